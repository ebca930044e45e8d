"""The suites `gpt` and `import` without a GPU: the same model everywhere, trained from the same weights on the same
tokens."""

from __future__ import annotations

import functools
import json
import math
import types

import numpy as np
import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import fa3, first_call, gpt, jitted, machine, peers, runner, steps, suites
from cupyflash.bench.case import make_case
from cupyflash.bench.suites import SUITES, Options
from cupyflash.passes import BACKWARD, FORWARD

TINY = {"layers": 2, "width": 64, "dim": 32, "causal": True, "seq": 40, "batch": 4, "heads": 2, "dtype": "bfloat16"}


def tokens(step: int) -> np.ndarray:
    first = np.random.default_rng(step).integers(96, size=(4, 1))
    return (first + 37 * np.arange(41)) % 96


def losses(step) -> list[float]:
    return [float(step(tokens(n))) for n in range(5)]


@pytest.fixture
def small(monkeypatch):
    """Nothing that needs a GPU or a C++ compiler, and few steps."""
    monkeypatch.setattr(steps, "STEPS", 2)
    monkeypatch.setattr(steps, "importable", lambda names: {"fa2": peers.load("fa2")})
    monkeypatch.setattr(jitted, "PEER", "xla")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


# --- gpt ----------------------------------------------------------------------------------------------------------


def test_the_model_has_12_layers_of_head_dimension_128(monkeypatch):
    for has, name in ((True, steps.FLAX), (False, steps.JAX)):
        monkeypatch.setattr(steps, "_has_flax", lambda has=has: has)
        problems = SUITES["gpt"].problems(Options())
        assert [p["library"] for p in problems] == [steps.TORCH, name]
        assert all((p["layers"], p["dim"], p["seq"], p["batch"] * p["seq"]) == (12, 128, 4096, 16384) for p in problems)
    with torch.device("meta"):
        model = gpt.Gpt(gpt.SIZES[steps.MODEL], 4096, gpt.WAYS["ours"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(127e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gpt_jax", "gpt_flax"])
def test_jax_trains_as_pytorch_does(module, monkeypatch):
    jax = pytest.importorskip("jax")
    made = pytest.importorskip(f"cupyflash.bench.{module}", exc_type=ImportError)
    monkeypatch.setattr(jitted, "PEER", "xla")
    weights = steps.initial("tiny", 40)
    model = gpt.Gpt(gpt.SIZES["tiny"], 40, gpt.WAYS["fa2"])
    model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in weights.items()})
    step = gpt.stepper(model)
    expected = losses(lambda x: step(torch.from_numpy(x)))
    for name in ("ours", "jax-cudnn"):
        attend = jitted.attend(name, True)
        found = losses(made.stepper(weights, gpt.SIZES["tiny"], attend, jax.numpy.float32))
        assert found == pytest.approx(expected, abs=1e-4)
    rough = losses(made.stepper(weights, gpt.SIZES["tiny"], attend, jax.numpy.bfloat16))
    assert rough != found and rough == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("library", [steps.TORCH, steps.FLAX, steps.JAX])
def test_everybody_is_trained_in_turn(small, library, monkeypatch):
    if library == steps.FLAX and not steps._has_flax():
        pytest.skip("Flax is not installed")
    if library != steps.TORCH:
        pytest.importorskip("jax")
    peer = "fa2" if library == steps.TORCH else "jax-cudnn"
    seen: dict[object, list[float]] = {}
    go = steps.Run.go
    monkeypatch.setattr(steps.Run, "go", lambda run, n: seen.setdefault(run, []).append(n) or go(run, n))
    values, notes = steps.measure({"library": library, **TINY}, Options(rounds=2), "tiny", "cpu")
    assert {*values} == {"ours", peer} == {*notes} and min(values.values()) > 0
    assert [*seen.values()] == [[3, 2, 2]] * 2
    first, last = notes["ours"].split("loss ")[1].split(" to ")
    assert notes[peer].endswith(f"loss {first} to {last}") and float(first) == pytest.approx(math.log(96), abs=0.1)


def test_a_compiled_model_is_one_graph_with_the_backend_that_was_named(monkeypatch):
    graphs: list[set[str]] = []

    def look(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    compiler = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(look(graph, inputs)))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    marks = {
        "ours": "cupyflash.attention.default",
        "fa2": "flash_attention",
        "math": "softmax",
        "fa3": "bench.fa3.default",
    }
    operators = types.SimpleNamespace(fwd=_forward, bwd=_backward)
    monkeypatch.setattr(peers, "fa3_operators", lambda: operators)
    for way, mark in marks.items():
        graphs.clear()
        model = gpt.Gpt(gpt.SIZES["tiny"], 40, gpt._standard if way == "math" else gpt.WAYS[way])
        gpt.stepper(model, compiled=True)(torch.from_numpy(tokens(0)))
        assert len(graphs) == 2  # forward and backward
        assert any(mark in target for target in graphs[0]), (way, graphs[0])
    torch._dynamo.reset()


def _forward(q, k, v, is_causal, num_splits):
    """FlashAttention-3's operators, from PyTorch's on a CPU."""
    assert is_causal and num_splits == 1
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, True
    )
    return out.transpose(1, 2).contiguous(), lse, None, None


def _backward(dout, q, k, v, out, lse, dq, dk, dv, is_causal):
    given = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, lse, 0.0, is_causal)
    for into, x in zip((dq, dk, dv), found, strict=True):
        into.copy_(x.transpose(1, 2))


def test_flash_attention_3_is_differentiated(monkeypatch):
    operators = types.SimpleNamespace(fwd=_forward, bwd=_backward)
    monkeypatch.setattr(peers, "fa3_operators", lambda: operators)
    case = make_case(2, 24, 2, 16, causal=True, dtype="float32", seed=1, device="cpu")
    found = peers.differentiable(lambda case: fa3.causal(*case[:3]), torch.no_grad, case, FORWARD).call()
    for x, y in zip(found, peers.load("math")(case, FORWARD).call(), strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    leaves = [x.requires_grad_() for x in case[:3]]
    gradients = torch.autograd.grad(fa3.causal(*leaves), leaves, case.dout)
    for x, y in zip(gradients, peers.load("math")(case, BACKWARD).call(), strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def test_who_trains_another_model_is_wrong():
    good, far = [4.6, 4.5, 4.4], [4.6, 4.9, 5.2]
    assert steps.wrong({"fa2": good, "ours": [4.61, 4.5, 4.4]}) == {}
    assert steps.wrong({"fa2": good, "ours": far}) == {"ours": "wrong: losses differ by 0.089 from those of fa2"}
    nan = [4.6, math.nan, 1.0]
    assert {*steps.wrong({"fa2": nan, "cudnn": good, "ours": good})} == {"fa2"}
    assert {*steps.wrong({"ours": nan})} == {"ours"}
    assert {*steps.wrong({"fa2": good, "ours": good[:2]})} == {"ours"}


def test_who_fails_is_left_out_and_ours_alone_is_unchecked(small, monkeypatch):
    monkeypatch.setitem(gpt.WAYS, "fa2", lambda q, k, v: q.no_such_thing())
    values, notes = steps.measure({"library": steps.TORCH, **TINY}, Options(rounds=1), "tiny", "cpu")
    assert {*values} == {"ours"} and {*notes} == {"ours", "fa2"}
    assert notes["ours"].startswith("unchecked: no peer trains it; ")


def test_without_a_gpu_jax_is_not_measured_for_one():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match="JAX sees no GPU, its backend is cpu"):
            steps._in_jax(steps.JAX, "ours", "tiny", {}, None, "cuda")


# --- import -------------------------------------------------------------------------------------------------------


def test_an_import_is_timed_in_a_new_process():
    seconds, libraries = first_call.import_time("import numpy")
    assert 0 < seconds < 30 and libraries == ["numpy"]
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        first_call.import_time("import no_such_module")


def test_imports_are_measured_in_turn(monkeypatch):
    problems = SUITES["import"].problems(Options())
    assert [p["statement"] for p in problems] == [*first_call.IMPORTS]
    asked = []

    def import_time(statement):
        asked.append(statement)
        if statement == "import jax":
            raise RuntimeError("No module named 'jax'")
        return (0.03, []) if statement == "import cupyflash" else (0.1, ["numpy", "torch"])

    monkeypatch.setattr(suites.first_call, "import_time", import_time)
    values, notes = SUITES["import"].measure(problems[0], Options(rounds=3))
    assert values == {"ours": 0.03, "alone": 0.1} and notes == {"ours": "with no array library"}
    assert asked.count("import cupyflash") == asked.count("import numpy") == 1 + 3
    values, notes = SUITES["import"].measure(problems[3], Options(rounds=1))
    assert values == {"ours": 0.1} and notes == {
        "ours": "with numpy, torch",
        "alone": "RuntimeError: No module named 'jax'",
    }


def test_both_suites_run_are_resumed_and_drawn(small, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    values = {"require_gpu": None, "name": "NVIDIA H200", "ceilings": {"gemm_bf16_tflops": 700.0}, "driver": "1"}
    for name, value in values.items():
        monkeypatch.setattr(machine, name, lambda *_, value=value: value)
    calls = []
    monkeypatch.setattr(first_call, "import_time", lambda statement: calls.append(statement) or (0.1, []))
    of_steps = SUITES["gpt"]._replace(
        problems=lambda options: [{"library": steps.TORCH, **TINY}],
        measure=functools.partial(steps.measure, model="tiny", device="cpu"),
    )
    monkeypatch.setattr(runner, "SUITES", {"gpt": of_steps, "import": SUITES["import"]})
    for _ in range(2):
        assert bench.run(["gpt", "import"], out=tmp_path / "h200", rounds=1, resume=True) == 0
    assert len(calls) == 4 * 2 * 2  # none in the second run
    assert "1 rows are in" in capsys.readouterr().out
    row = json.loads((tmp_path / "h200" / "gpt.json").read_text())["rows"][0]
    assert row["unit"] == "tokens/s" and row["ratio_to_best"] == pytest.approx(
        row["ours"] / row["peers"]["fa2"], rel=1e-3
    )
    bench.plot(tmp_path, tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (
        "### Training steps of a GPT" in page
        and "| import cupyflash | import numpy | **0.1** | **0.1** | 1.00x |" in page
    )
