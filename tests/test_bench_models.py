"""The suite `models` without a GPU: calls, what they count, peers with windows and few key heads, table and picture;
and what `--sustained` does."""

from __future__ import annotations

import functools
import json
import sys
import time
import types

import numpy as np
import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import machine, models, peers, plots, report, runner, suite
from cupyflash.bench.models import CALLS, Call
from cupyflash.bench.suites import SUITES
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.tools.timing import Candidate

SMALL = {
    "full": Call(2, 24, 2, 2, 16),
    "few key heads": Call(2, 24, 6, 2, 16, causal=True),
    "chunk": Call(1, 8, 4, 1, 16, causal=True, seq_k=24),
    "cross": Call(2, 24, 2, 2, 16, seq_k=7),
    "latent": Call(1, 24, 2, 2, 24, causal=True, dim_v=16),
    "window": Call(1, 40, 2, 2, 16, window=9),
}


def seen(call: Call) -> np.ndarray:
    """Which pairs the mask leaves."""
    distance = np.arange(call.seq)[:, None] + call.keys - call.seq - np.arange(call.keys)
    left = np.ones_like(distance, bool)
    if call.causal or call.window is not None:
        left &= distance >= 0
    return left if call.window is None else left & (distance <= call.window)


# --- calls --------------------------------------------------------------------------------------------------------


def test_every_call_is_one_that_attention_takes():
    for name, call in CALLS.items():
        assert call.heads % call.heads_k == 0 and max(call.dim, call.dim_v or 0) <= 256, name
        assert not (call.causal and call.window is not None), name
        assert call.seq <= call.keys or not call.causal, name
    assert {*models.QUICK} <= {*models.MODELS}
    assert len(models.WINDOWS) == 2 * (3 + 3 + 3 + 2)
    assert all(names and {*names} <= {*CALLS} for names in models.KINDS.values())
    assert "Falcon 7B" in models.KINDS["few key heads, batch 1 and 2"]


def test_problems_are_both_passes_of_every_call():
    problems = models.problems(suite.Options(dtype="float16"))
    asked = {"forward": [*CALLS], "backward": [name for name in CALLS if name not in models.TOKENS]}
    assert [(p["pass"], p["model"]) for p in problems] == [(d, name) for d, names in asked.items() for name in names]
    assert {p["dtype"] for p in problems} == {"float16"}
    assert len(models.problems(suite.Options(quick=True))) == 2 * len(models.QUICK)
    only = models.problems(suite.Options(quick=True, only=("Gemma 3", "window 128, 2k")))
    assert {p["model"] for p in only} == {
        "Gemma 3 12B, local", "Gemma 3 12B, global", "window 128, 2k, d64", "window 128, 2k, d128",
    }  # fmt: skip


def test_a_call_reads_as_it_is():
    assert str(CALLS["Llama 3 70B, 2k"]) == "1 x 2048, 64/8 x 128, causal"
    assert str(CALLS["SD 1.5, cross"]) == "8 x 4096 on 77, 8 x 40"
    assert str(CALLS["DeepSeek V3, 2k"]) == "1 x 2048, 128 x 192/128, causal"
    assert str(CALLS["gpt-oss 20B, local"]) == "2 x 4096, 64/8 x 64, window 127"


@pytest.mark.parametrize("name", SMALL)
def test_pairs_are_those_that_the_mask_leaves(name):
    call = SMALL[name]
    assert models.pairs(call) == seen(call).sum()
    products = call.dim + (call.dim_v or call.dim)
    assert models.work(call, FORWARD) == 2 * call.batch * call.heads * seen(call).sum() * products
    if call.dim_v is None:
        assert models.work(call, BACKWARD) == 2.5 * models.work(call, FORWARD)


# --- peers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
def test_ours_and_pytorch_compute_every_kind_of_call(name, of, monkeypatch):
    monkeypatch.setattr(suite, "TOLERANCE", 1e-4)
    call = SMALL[name]
    case = models.draw(call, "float32", 1, "cpu")
    assert case.q.shape == (call.batch, call.seq, call.heads, call.dim)
    assert case.dout.shape == (call.batch, call.seq, call.heads, call.dim_v or call.dim)
    hidden = torch.from_numpy(~seen(call))
    leaves = [x.clone().requires_grad_() for x in case[:3]]
    q, k, v = (x.double().transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(call.heads // call.heads_k, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * call.dim**-0.5).masked_fill(hidden, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    exact = torch.autograd.grad(out, leaves, case.dout.double()) if of is BACKWARD else (out.detach(),)
    prepares = {"math": peers.sdpa("MATH")}
    if of is FORWARD:  # of PyTorch's tensors on a CPU the gradients are autograd's
        prepares["ours"] = peers.ours()
    found, notes = suite.compare(prepares, case, of, exact)
    if call.window is None:
        assert [*found] == [*prepares] and notes == {}
    else:
        assert [*found] == ["ours"][of is BACKWARD :] and "has no window" in notes["math"]


def test_flash_attention_2_takes_windows_where_its_package_is(monkeypatch):
    case = models.draw(SMALL["window"], "float32", 1, "cpu")
    module = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    prepare = peers.fa2()
    with pytest.raises(ImportError):
        prepare(case, FORWARD)

    def flash_attn_func(q, k, v, causal, window_size):
        assert not causal and window_size == (9, 0)
        return v

    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert prepare(case, FORWARD).call() == (case.v,)


# --- measuring ----------------------------------------------------------------------------------------------------


def small_suite(monkeypatch, names=SMALL):
    monkeypatch.setattr(models, "CALLS", {name: SMALL[name] for name in names})
    monkeypatch.setattr(models, "draw", functools.partial(models.draw, device="cpu"))
    monkeypatch.setattr(models, "importable", lambda names: {"cudnn": peers.load("math")})


def test_a_call_is_measured_in_turn(monkeypatch):
    small_suite(monkeypatch)
    speeds, taken = {"ours": 1.0, "cudnn": 2.0}, []

    def sampler(candidates, min_ms, patience):
        assert min_ms == 20.0 and patience < 1
        return lambda name: taken.append(name) or speeds[name]

    monkeypatch.setattr(suite, "gpu_sampler", sampler)
    for problem in models.problems(suite.Options(dtype="float32")):
        if problem["pass"] == "forward":
            values, notes = models.measure(problem, suite.Options(rounds=3))
            work = models.work(SMALL[problem["model"]], FORWARD) / 1e12
            assert values["ours"] == pytest.approx(work)
            if problem["model"] == "window":
                assert values.keys() == {"ours"} and notes["ours"].startswith("unchecked")
            else:
                assert values["cudnn"] == pytest.approx(work / 2) and notes == {}
    assert taken.count("ours") == 3 * len(SMALL) and taken[:6] != 3 * taken[:2]


def nvidia_smi(folder, monkeypatch, lines):
    """A nvidia-smi that says so every 10 ms, and a GPU for it to look at."""
    fake = folder / "nvidia-smi"
    told = "; ".join(f"echo '{line}'" for line in lines)
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1 $2 $3" = "-i GPU-12-34 --query-gpu=clocks.sm,power.draw" ] || exit 1\n'
        f"while :; do {told}; sleep 0.01; done\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="12-34"))


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a script")
def test_sustained_is_a_second_on_end_with_clock_and_power(monkeypatch, tmp_path):
    nvidia_smi(tmp_path, monkeypatch, ["1500, 690.4", "[N/A], [N/A]", "1510, 691"])
    asked, meter, real = {}, [], machine.Meter.__enter__

    def enter(self):
        meter.append(self)
        return real(self)

    monkeypatch.setattr(machine.Meter, "__enter__", enter)

    def sampler(candidates, min_ms, patience, most):
        asked.update(min_ms=min_ms, most=most)

        def sample(name):
            end = time.monotonic() + 60
            while not meter[0]._seen and time.monotonic() < end:  # it takes its time to start
                time.sleep(0.01)
            time.sleep(0.4)
            return 0.5

        return sample

    monkeypatch.setattr(suite, "gpu_sampler", sampler)
    candidates = {"ours": Candidate(lambda: ()), "fa3": Candidate(lambda: ())}
    seconds, notes = suite.take_turns(candidates, suite.Options(rounds=1, sustained=True))
    assert asked == {"min_ms": 1000.0, "most": 10**6} and seconds == {"ours": 0.5, "fa3": 0.5}
    assert notes.keys() == {"ours", "fa3"}
    assert all(note in ("1500 MHz, 690 W", "1505 MHz, 691 W", "1510 MHz, 691 W") for note in notes.values()), notes


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a script")
def test_what_nvidia_smi_does_not_tell_is_unknown(monkeypatch, tmp_path):
    nvidia_smi(tmp_path, monkeypatch, ["[N/A], [N/A]"])
    with machine.Meter() as meter:
        time.sleep(0.3)
        assert meter.state(0) == "clock and power unknown"


def test_sustained_is_refused_where_nobody_runs_for_a_second(capsys, tmp_path):
    assert bench.run(["jit"], out=tmp_path, sustained=True) == 2
    assert "sustained is set; that is for bench suites forward, backward, models, not 'jit'" in capsys.readouterr().out


# --- table, summary, picture, run ---------------------------------------------------------------------------------


def synthetic(names, sustained=False):
    """Ours 1.1 times as fast as FlashAttention-3, in the backward 0.9 times."""
    notes = {"ours": "1515 MHz, 690 W", "fa3": "1500 MHz, 700 W"} if sustained else {}
    rows = []
    for problem in models.problems(suite.Options(only=names)):
        fast = 110.0 if problem["pass"] == "forward" else 90.0
        rows.append(report.make_row(problem, "TFLOP/s", {"ours": fast, "fa3": 100.0}, notes, models.PEERS))
    return rows


def test_the_table_has_models_and_their_calls():
    lines = plots.table(synthetic(("Falcon", "gpt-oss"))).splitlines()
    assert lines[0] == "| pass | model | call | cupyflash | FlashAttention-3 | vs best |"
    assert lines[2] == "| forward | gpt-oss 20B, local | 2 x 4096, 64/8 x 64, window 127 | **110** | 100 | 1.10x |"
    told = plots.table(synthetic(("Falcon",), sustained=True), with_notes=True).splitlines()
    assert told[2].endswith("| **110** (1515 MHz, 690 W) | 100 (1500 MHz, 700 W) | 1.10x |")


def test_the_summary_is_by_kind_and_pass():
    lines = report.summary(synthetic(("Falcon", "DeepSeek V3, 2k", "window 128, 2k, d64")))
    assert lines[-8:] == [
        f"{kind}, {direction}: best peer {ratio}x, worst {ratio}x ({worst})"
        for kind, worst in (
            ("models", "DeepSeek V3, 2k"), ("windows", "window 128, 2k, d64"),
            ("few key heads, batch 1 and 2", "Falcon 7B"), ("latent attention", "DeepSeek V3, 2k"),
        )
        for direction, ratio in (("forward", "1.10"), ("backward", "0.90"))
    ]  # fmt: skip


def test_a_run_writes_rows_and_the_plot_draws_them(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")

    def measure(problem, options):
        assert options.sustained and options.rounds == 2
        return {"ours": 90.0, "fa3": 100.0}, {"ours": "1515 MHz, 690 W", "fa3": "1500 MHz, 700 W"}

    monkeypatch.setattr(runner, "SUITES", {"models": SUITES["models"]._replace(measure=measure)})
    monkeypatch.setattr(peers, "load", lambda name: "not here" if name in ("fa2", "fa4") else peers.sdpa())
    values = {"require_gpu": None, "name": "NVIDIA H200", "ceilings": {"gemm_bf16_tflops": 700.0}, "driver": "1"}
    for name, value in values.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    assert bench.run(["models"], out=tmp_path / "h200", only=["Falcon"], sustained=True) == 0
    printed = capsys.readouterr().out
    assert "Falcon 7B" in printed and "ours 1515 MHz, 690 W, fa3 1500 MHz, 700 W" in printed
    found = json.loads((tmp_path / "h200" / "models_sustained.json").read_text())
    assert found["sustained"] and [row["ratio_to_best"] for row in found["rows"]] == [0.9, 0.9]
    bench.plot(tmp_path, tmp_path / "docs")
    assert (tmp_path / "docs" / "plots" / "h200_models_sustained.png").stat().st_size > 5000
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "### Attention calls of models, a second on end" in page and "90 (1515 MHz, 690 W)" in page
