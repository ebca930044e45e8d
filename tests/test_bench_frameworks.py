"""The suites `host` and `jax` without a GPU: who is asked what, and that what is timed is attention."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import host, jitted, peers, runner, suite
from cupyflash.bench.suites import SUITES, Options
from cupyflash.passes import FORWARD, PASSES
from cupyflash.tools import timing
from cupyflash.tools.timing import Candidate

SMALL = {"dtype": "float32", "batch": 2, "seq": 24, "heads": 2, "dim": 16}


@pytest.fixture
def jax(monkeypatch):
    monkeypatch.setattr(jitted, "PEER", "xla")  # in the place of cuDNN
    return pytest.importorskip("jax")


def test_the_wall_sampler_waits_for_the_last_call(monkeypatch):
    clock, calls, waited = [0.0], [], []

    def call():
        calls.append(len(calls))
        clock[0] += 0.001
        return (calls[-1],)

    def wait(results):
        waited.append(results[0])
        clock[0] += 0.004

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    sample = timing.wall_sampler({"x": Candidate(call)}, 20, wait)
    assert sample("x") == pytest.approx(0.001 + 0.004 / 7)  # two calls took 3 ms each
    assert len(calls) == (1 + 2) + (1 + 7) and waited == [0, 2, 3, 10]


# --- host ---------------------------------------------------------------------------------------------------------


def test_every_library_has_both_passes():
    problems = SUITES["host"].problems(Options())
    assert len(problems) == 2 * len(host.ROWS) and {p["seq"] for p in problems} == {128}
    assert {p["library"] for p in problems} >= {"cupy", "torch", "torch, with grad", "jax", "jax, jitted", "jax, added"}


def measured(monkeypatch, library, direction):
    """A row of the suite, of tensors on the CPU; of what is timed, each gives what the row's pass gives."""
    (problem,) = (p for p in host.problems(Options()) if (p["library"], p["pass"]) == (library, direction))
    monkeypatch.setattr(host, "case_of", lambda problem: suite.case_of({**problem, **SMALL}, "cpu"))
    monkeypatch.setattr(host, "_synchronize", lambda: None)
    sample = timing.host_sampler if library != "jax, added" else timing.wall_sampler

    def sampler(candidates, *more):
        for name, candidate in candidates.items():
            results = candidate.call()
            results = results if isinstance(results, tuple | list) else (results,)
            assert len(results) == (1 if direction == "forward" else 3), name
        return sample(candidates, *more)

    monkeypatch.setattr(host, sample.__name__, sampler)
    return host.measure(problem, Options(rounds=1, quick=True, min_ms=2))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_what_is_timed_is_the_pass_of_the_row(monkeypatch, jax, library, direction):
    monkeypatch.setattr(jitted, "require_gpu", lambda: None)
    assert "ours" in measured(monkeypatch, library, direction)[0]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_pytorch_is_measured_with_grad(monkeypatch, direction):
    values, notes = measured(monkeypatch, "torch, with grad", direction)
    assert {*values} == {"ours", "torch"} and min(values.values()) > 1 and notes == {}
    # The forward is recorded, and the backward is autograd's.
    case = suite.case_of({**SMALL, "causal": True}, "cpu")
    for prepare in host._prepares({"library": "torch, with grad", "pass": direction}, None).values():
        results = prepare(case, PASSES[direction]).call()
        assert len(results) == (1 if direction == "forward" else 3)
        assert results[0].requires_grad == (direction == "forward")
    assert not case.q.requires_grad


def test_pytorch_without_grad_is_not_recorded(monkeypatch):
    values, notes = measured(monkeypatch, "torch", "forward")
    assert {*values} == {"ours", "torch"} and notes == {}
    case = suite.case_of({**SMALL, "causal": True}, "cpu")
    for prepare in host._prepares({"library": "torch", "pass": "forward"}, None).values():
        assert not prepare(case, FORWARD).call()[0].requires_grad


@pytest.mark.parametrize("library", ["jax, jitted", "jax, added"])
@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
def test_jax_is_measured_under_jit(monkeypatch, jax, library, direction):
    values, notes = measured(monkeypatch, library, direction)
    assert {*values} == {"ours", "jax-cudnn"} and notes == {}


def test_what_a_call_adds_is_the_difference_by_call(monkeypatch, jax):
    times = {"ours x 1": 100e-6, "ours x 9": 300e-6, "jax-cudnn x 1": 90e-6}
    assert host._added(times) == {"ours": pytest.approx(25e-6)}
    assert host._added(times | {"jax-cudnn x 9": 89e-6})["jax-cudnn"] == 0
    monkeypatch.setattr(jitted, "PEER", "nobody's")
    values, notes = measured(monkeypatch, "jax, added", "forward")
    assert {*values} == {"ours"} and {*notes} == {"jax-cudnn"}


@pytest.mark.parametrize("name", ["ours", "jax-cudnn"])
def test_a_chain_is_that_many_calls(jax, name):
    case = suite.case_of({**SMALL, "causal": True}, "cpu")
    out = case.q
    for _ in range(3):
        (out,) = peers.load("torch")(case._replace(q=out), FORWARD).call()
    found = host._chained(name, None, 3, case, FORWARD).call()
    assert torch.allclose(torch.from_dlpack(found), out, atol=1e-5)


# --- jax ----------------------------------------------------------------------------------------------------------


def test_the_problems_are_full_causal_and_with_a_bias():
    problems = SUITES["jax"].problems(Options(dtype="float16"))
    kinds = [(p["dim"], p["causal"], p["bias"]) for p in problems]
    assert kinds == [(d, *x) for d in (64, 128) for x in ((False, False), (True, False), (False, True))]
    assert all(p["heads"] * p["dim"] == 2048 and p["seq"] == 2048 and p["dtype"] == "float16" for p in problems)


@pytest.mark.parametrize(("causal", "bias"), [(False, False), (True, False), (False, True)])
def test_gradients_under_jit_are_compared_and_timed(monkeypatch, jax, causal, bias):
    monkeypatch.setattr(suite, "TOLERANCE", 1e-4)
    monkeypatch.setattr(jitted, "draw", functools.partial(jitted.draw, device="cpu"))
    problem = {"pass": "forward and backward", **SMALL, "causal": causal, "bias": bias}
    values, notes = jitted.measure(problem, Options(rounds=2, min_ms=2))
    assert {*values} == {"ours", "jax-cudnn"} and notes == {}
    case = jitted.draw(problem, device="cpu")
    assert len(jitted.gradients(jitted.attend("ours", causal), case).call()) == 3 + bias


def test_tensors_of_a_gpu_need_a_jax_that_sees_it(jax):
    class OnGpu:
        is_cuda = True

    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError, match="JAX sees no GPU, its backend is cpu"):
            jitted.arrays(OnGpu())


# --- fp32, a family at a time -------------------------------------------------------------------------------------


def test_fp32_asks_a_family_for_what_it_takes(monkeypatch):
    from cupyflash.gpu import device

    monkeypatch.setattr(device, "current", lambda ordinal: device.Arch.of("sm_90a"))
    everything = SUITES["fp32"].problems(Options())
    assert SUITES["fp32"].problems(Options(family="simt")) == everything
    of_sm80 = SUITES["fp32"].problems(Options(family="sm80"))
    assert [p for p in everything if p["dtype"] == "float32"] == [p for p in of_sm80 if p["dtype"] == "float32"]
    assert SUITES["fp32"].problems(Options(dtype="float32")) == [p for p in everything if p["dtype"] == "float32"]


def test_a_family_that_takes_nothing_is_refused(monkeypatch, capsys, tmp_path):
    from cupyflash.gpu import device

    monkeypatch.setattr(device, "current", lambda ordinal: device.Arch.of("sm_90a"))
    monkeypatch.setattr(runner.machine, "require_gpu", lambda suite: None)
    assert bench.run(["fp32"], family="sm90", out=tmp_path) == 2
    assert "family is 'sm90'; it takes no problem of bench suite 'fp32'" in capsys.readouterr().out
