"""The bench without a GPU: statistics, FLOP counts, peers' calls, results files, tables and plots."""

from __future__ import annotations

import json
import math
import sys
import types

import numpy as np
import pytest

pytest.importorskip("rich")

from cupyflash import bench
from cupyflash.bench import machine, peers, report, suites
from cupyflash.bench.case import make_case
from cupyflash.bench.suites import SUITES, Options
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.pip_line import pip_line
from cupyflash.tools import timing
from cupyflash.tools.timing import Candidate

# --- statistics ---------------------------------------------------------------------------------------------------


def test_flops_are_the_papers():
    sizes = {"batch": 2, "seq": 1024, "heads": 16, "dim": 128}
    full = timing.flops(**sizes, causal=False, of=FORWARD)
    assert full == 4 * 2 * 16 * 1024**2 * 128
    assert timing.flops(**sizes, causal=True, of=FORWARD) == full / 2
    assert timing.flops(**sizes, causal=True, of=BACKWARD) == 2.5 * full / 2


def test_interleave_takes_turns_and_medians():
    order: list[str] = []
    values = {"a": iter([3.0, 1.0, 2.0]), "b": iter([30.0, 10.0, 20.0])}

    def sample(name):
        order.append(name)
        return next(values[name])

    medians, failures = timing.interleave(["a", "b"], 3, sample)
    assert medians == {"a": 2.0, "b": 20.0} and failures == {}
    rounds = [order[i : i + 2] for i in range(0, 6, 2)]
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert len({tuple(pair) for pair in rounds}) == 2  # not always the same one first


def test_interleave_goes_on_without_those_that_fail():
    def sample(name):
        if name == "bad":
            raise RuntimeError("\n  out of memory\nmore")
        return 1.0

    medians, failures = timing.interleave(["bad", "good"], 3, sample)
    assert medians == {"good": 1.0}
    assert failures == {"bad": "RuntimeError: out of memory"}


def test_interleave_lets_an_interrupt_through():
    def sample(name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.interleave(["a"], 1, sample)


def test_host_sampler_counts_calls_and_enters_the_context():
    events: list[str] = []

    class Context:
        def __enter__(self):
            events.append("in")

        def __exit__(self, *error):
            events.append("out")

    candidate = Candidate(lambda: events.append("call") or (), Context)
    assert timing.host_sampler({"x": candidate}, 3)("x") > 0
    assert events == ["in", *["call"] * 4, "out"]


def test_gpu_sampler_repeats_until_a_sample_is_long_enough(monkeypatch):
    torch = pytest.importorskip("torch")
    clock = [0.0]  # milliseconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = clock[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.time - self.time

    def call():
        clock[0] += 0.5
        return ()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    sample = timing.gpu_sampler({"x": Candidate(call)}, min_ms=20)
    assert sample("x") == pytest.approx(0.5e-3)
    before = clock[0]
    sample("x")
    assert clock[0] - before == pytest.approx(0.5 + 20)  # one call ahead of the clock, then 20 ms of them
    before = clock[0]
    impatient = timing.gpu_sampler({"x": Candidate(call)}, min_ms=20, patience=0.4e-3)
    assert [impatient("x") for _ in range(5)] == [pytest.approx(0.5e-3)] * 5
    assert clock[0] - before == pytest.approx(2 * 0.5)  # in the first round alone, once


def test_ratio_is_better_when_larger():
    assert timing.ratio(600.0, 300.0, "TFLOP/s") == 2.0
    assert timing.ratio(10.0, 30.0, "us") == 3.0
    assert timing.ratio(None, 300.0, "TFLOP/s") is None
    assert timing.ratio(0.0, 1.0, "MB") is None


def test_best_geomean_significant():
    assert timing.best({"a": 1.0, "b": None, "c": 3.0}, "TFLOP/s") == 3.0
    assert timing.best({"a": 1.0, "b": None, "c": 3.0}, "s") == 1.0
    assert timing.best({"b": None}, "s") is None
    assert timing.geomean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert timing.geomean([None]) is None
    assert timing.significant(123.456) == 123.5 and timing.significant(0.000123456) == 0.0001235
    assert timing.significant(None) is None


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_short_name(full, short):
    assert machine.short_name(full) == short


# --- problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_grid_is_the_papers(name):
    problems = SUITES[name].problems(Options())
    assert len(problems) == 36
    assert all(p["batch"] * p["seq"] == 16384 and p["heads"] * p["dim"] == 2048 for p in problems)
    assert {p["pass"] for p in problems} == {name} and {p["dtype"] for p in problems} == {"bfloat16"}
    quick = SUITES[name].problems(Options(dtype="float16", quick=True))
    assert len(quick) == 12 and {p["dtype"] for p in quick} == {"float16"}


def test_every_suite_tells_its_problems_apart():
    pytest.importorskip("torch")
    for suite in SUITES.values():
        problems = suite.problems(Options())
        assert len({json.dumps(problem) for problem in problems}) == len(problems)
        keys = report.varying(problems)
        assert len({tuple(problem[key] for key in keys) for problem in problems}) == len(problems)


# --- peers, on the CPU --------------------------------------------------------------------------------------------


@pytest.fixture
def case():
    pytest.importorskip("torch")
    return make_case(2, 64, 2, 16, causal=True, dtype="float32", seed=7, device="cpu")


def attention_by_hand(case):
    """out, lse and the gradients in float64, the formulas of the FlashAttention-2 paper without tiles."""
    q, k, v, dout = (x.numpy().astype(np.float64).transpose(0, 2, 1, 3) for x in case[:4])
    scale = q.shape[-1] ** -0.5
    s = q @ k.swapaxes(2, 3) * scale
    s = np.where(np.tril(np.ones(s.shape[2:], bool)), s, -np.inf) if case.causal else s
    lse = np.log(np.exp(s).sum(-1))
    p = np.exp(s - lse[..., None])
    out = p @ v
    ds = p * (dout @ v.swapaxes(2, 3) - (dout * out).sum(-1, keepdims=True)) * scale
    grads = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dout
    return out.transpose(0, 2, 1, 3), lse, [g.transpose(0, 2, 1, 3) for g in grads]


def close(tensors, arrays):
    return all(np.allclose(x.numpy(), y, atol=1e-5) for x, y in zip(tensors, arrays))


def test_sdpa_peers_give_out_and_gradients(case):
    out, _, grads = attention_by_hand(case)
    for name in ("torch", "math"):
        peer = peers.load(name)
        assert close(peer(case, FORWARD).call(), [out])
        candidate = peer(case, BACKWARD)
        assert close(candidate.call(), grads)
        assert close(candidate.call(), grads)  # the graph is kept: it is called many times


def test_standard_attention_is_attention(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", np)  # the same calls on the CPU
    out, _, grads = attention_by_hand(case)
    assert close(peers.standard(case, FORWARD).call(), [out])
    assert close(peers.standard(case, BACKWARD).call(), grads)


def test_fa3_calls_the_operators_by_their_schema(case, monkeypatch):
    """The schemas are those of FlashAttention-3's operators; a wrong name or order fails here as it would there."""
    torch = pytest.importorskip("torch")
    out, lse, grads = attention_by_hand(case)
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        pytest.skip("the real operators are loaded")
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
        "Tensor? q_v = None, Tensor(out!)? out = None, float? softmax_scale = None, bool is_causal = False, "
        "int window_size_left = -1, int window_size_right = -1, int num_splits = 0, bool? pack_gqa = None) "
        "-> (Tensor(out!), Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
        "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, float? softmax_scale = None, bool is_causal = False) "
        "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor)"
    )

    def as_float(x):
        return torch.from_numpy(np.ascontiguousarray(x, np.float32))

    def fwd(q, k, v, k_new, v_new, q_v, into, scale, is_causal, left=-1, right=-1, num_splits=0, pack_gqa=None):
        assert is_causal and num_splits == 0 and q is not k  # query tiles are few
        return as_float(out), as_float(lse), torch.empty(0), torch.empty(0)

    def bwd(dout, q, k, v, o, softmax_lse, dq, dk, dv, scale, is_causal):
        assert is_causal and torch.equal(dout, case.dout) and close([o, softmax_lse], [out, lse])
        for target, grad in zip((dq, dk, dv), grads):
            target.copy_(as_float(grad))
        return dq, dk, dv, softmax_lse

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    monkeypatch.delenv("CUPYFLASH_PEER_FA3", raising=False)
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    prepare = peers.fa3()
    assert close(prepare(case, FORWARD).call(), [out])
    assert close(prepare(case, BACKWARD).call(), grads)


def test_absent_peers_tell_why(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUPYFLASH_PEER_FA3", str(tmp_path / "missing.so"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "missing.so" in peers.load.__wrapped__("fa3")
    assert "flash_attn" in peers.load.__wrapped__("fa4")


def test_compare_leaves_out_who_fails_or_is_wrong(case):
    def wrong(case, of):
        return Candidate(lambda: (1.1 * case.v,))

    def nan(case, of):
        return Candidate(lambda: (case.v * math.nan,))

    def broken(case, of):
        raise ValueError("float32 is not supported")

    right = peers.load("torch")
    prepares = {"nan": nan, "broken": broken, "torch": right, "wrong": wrong, "ours": right}
    candidates, notes = suites.compare(prepares, case, FORWARD)
    assert list(candidates) == ["torch", "ours"]
    assert notes["nan"].startswith("wrong: relative error nan")
    assert notes["broken"] == "ValueError: float32 is not supported"
    assert notes["wrong"].endswith("against torch")
    assert "ours" not in notes
    _, alone = suites.compare({"broken": broken, "ours": right}, case, FORWARD)
    assert alone["ours"].startswith("unchecked")


# --- running ------------------------------------------------------------------------------------------------------


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.run(["forward"], out=tmp_path) == 2
    printed = capsys.readouterr().out
    assert "'forward' needs a CUDA GPU" in printed and "'cpu'" in printed and printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_torch_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    for suite in ("host", "cpu"):
        assert bench.run([suite]) == 2
        assert "pip install torch" in capsys.readouterr().out


def test_one_line_names_all_that_is_missing(monkeypatch, capsys):
    for module in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, module, None)
    for version, first in ((None, "needs a CUDA GPU (nvidia-smi finds none"), ("580", "needs torch (")):
        monkeypatch.setattr(machine, "driver", lambda version=version: version)
        assert bench.run(["forward"]) == 2
        printed = capsys.readouterr().out
        assert first in printed and "torch (" in printed and "cupy (" in printed and printed.count("\n") == 1
        assert printed.endswith(f"; pip install torch && {pip_line('cuda13')}\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"family": "simt"}, "family is 'simt', a family of GPU kernels; bench suite 'cpu' measures NumPy"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; bench suite 'cpu' measures float32 and float64"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float16, bfloat16"),
    ],
)
def test_the_cpu_suite_refuses_what_it_cannot_use(given, message, capsys, tmp_path):
    assert bench.run(["cpu"], out=tmp_path, **given) == 2
    assert message in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_unknown_suites_are_named(capsys):
    assert bench.run(["forwards"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "'forwards'; it must be of forward, backward," in printed
    assert printed.endswith("cpu, all, paper, or parallel or plot, each alone")


def test_the_cpu_suite_runs(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    suite = SUITES["cpu"]
    monkeypatch.setitem(SUITES, "cpu", suite._replace(problems=lambda options: suite.problems(options)[::3]))
    assert bench.run(["cpu"], out=tmp_path, quick=True, rounds=1) == 0
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["suite"] == "cpu" and results["gpu"] is None and len(results["sources"]) == 64
    assert set(results["ceilings"]) == {"gemm_fp32_gflops", "gemm_fp64_gflops", "copy_gbps"}
    assert len(results["rows"]) == 3  # forward and backward, in both dtypes
    for row in results["rows"]:
        peers = {name: x for name, x in row["peers"].items() if x is not None}
        assert row["ours"] > 0 and {"torch", "numpy"} <= peers.keys() <= {"torch", "numpy", "jax"}
        assert "wrong" not in str(row.get("notes"))
        assert row["ratio_to_best"] == pytest.approx(row["ours"] / max(peers.values()), rel=1e-3)
    assert "GFLOP/s" in capsys.readouterr().out
