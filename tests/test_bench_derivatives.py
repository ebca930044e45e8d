"""The suite `derivatives` without a GPU: its rows, everybody's results on a CPU, and what is shown of them."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import derivative_peers, derivatives, machine, report
from cupyflash.bench.derivatives import Shape
from cupyflash.bench.suite import replayed
from cupyflash.bench.suites import SUITES, Options
from cupyflash.gpu import device
from cupyflash.gpu.device import Arch
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP
from cupyflash.tools import precompile
from cupyflash.tools.precompile import Job
from cupyflash.tools.timing import Candidate

SUITE = SUITES["derivatives"]


def row(what: str, beside: str, shape: Shape) -> dict[str, Any]:
    return {"pass": what, **shape._asdict(), "beside": beside, "unit": "ms"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measures on the CPU; every call is said to take 1 ms, ours half of it, ours without a derivative a fifth. Graphs,
    which it has none of, are the calls that they would hold."""
    timed: list[list[str]] = []
    drawn = derivatives.draw
    seconds = {"ours": 5e-4, "ours_alone": 2e-4}

    def turns(candidates: dict[str, Candidate], *others: Any) -> Any:
        timed.append([*candidates])
        return {name: seconds.get(name, 1e-3) for name in candidates}, {}

    monkeypatch.setattr(derivatives, "draw", lambda problem: drawn(problem, "cpu"))
    monkeypatch.setattr(derivatives, "take_turns", turns)
    monkeypatch.setattr(derivatives, "replayed", lambda candidates: Candidate(candidates[-1].call))
    monkeypatch.setattr(derivatives, "interleave", lambda names, rounds, sampler: turns(dict.fromkeys(names)))
    derivatives._measured.cache_clear()
    return timed


BIASED, CAUSAL = Shape(2, 2, 24, 8, "float32", bias=True), Shape(2, 2, 24, 8, "float64", causal=True)
HALF = Shape(2, 2, 24, 8, causal=True)


@pytest.mark.parametrize("what", ["jvp", "step", "double", "hvp"])
@pytest.mark.parametrize("shape", [BIASED, CAUSAL, HALF], ids=lambda x: x.dtype)
def test_everybody_computes_the_same(what: str, shape: Shape, on_cpu: list[list[str]]) -> None:
    values, notes = derivatives.measure(row(what, "PyTorch", shape), Options())
    assert notes == {}
    assert values == {"ours": 0.5, "ours_alone": 0.2, "math": 1.0, "by-hand": 1.0}
    made = report.make_row(row(what, "PyTorch", shape), "ms", values, notes, derivatives.PEERS)
    assert (made["ratio_to_best"], made["ours_alone"], made["times_alone"]) == (2.0, 0.2, 2.5)


@pytest.mark.parametrize(("what", "shape"), [("jvp", BIASED), ("step", HALF), ("double", BIASED), ("hvp", HALF)])
def test_jax_computes_the_same(what: str, shape: Shape, on_cpu: list[list[str]]) -> None:
    pytest.importorskip("jax")
    values, notes = derivatives.measure(row(what, "JAX", shape), Options())
    assert notes == {} and values == {"ours": 0.5, "ours_alone": 0.2, "jax-xla": 1.0}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton package, of one that computes as PyTorch's users do."""

    class JVPAttn:
        @staticmethod
        def fwd_dual(
            q: Any, k: Any, v: Any, *, attn_mask: None, causal: bool, sm_scale: float, verify_attn_mask: bool
        ) -> Any:
            assert q.shape[-1] == 16 and causal and not verify_attn_mask
            s = (q @ k.mT * sm_scale).masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
            return s.softmax(-1) @ v

    module: Any = types.ModuleType("jvp_flash_attention.jvp_attention")
    module.JVPAttn = JVPAttn
    monkeypatch.setitem(sys.modules, "jvp_flash_attention", types.ModuleType("jvp_flash_attention"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    there = derivatives.importlib.util.find_spec
    monkeypatch.setattr(
        derivatives.importlib.util, "find_spec", lambda name: there(name) if name != "jvp_flash_attention" else name
    )


@pytest.mark.parametrize("what", ["jvp", "step", "double"])
@pytest.mark.usefixtures("triton")
def test_the_triton_package_is_called_by_its_own_rules(what: str, on_cpu: list[list[str]]) -> None:
    """With dimensions that it has, and what it computes looked at as everybody's."""
    values, notes = derivatives.measure(row(what, "Triton", HALF), Options())
    if what == "double":
        assert notes == {"jvp-flash": "NotImplementedError: it has no double"} and values == {"ours": 0.5}
    else:
        assert notes == {} and values == {"ours": 0.5, "jvp-flash": 1.0}


@pytest.mark.parametrize("what", ["jvp", "step", "double", "hvp"])
@pytest.mark.usefixtures("triton")
def test_everybody_whom_pytorch_calls_is_replayed(
    what: str, on_cpu: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a replay gives is what is looked at."""
    held: list[Any] = []

    def graph(candidates: list[Candidate]) -> Candidate:
        (candidate,) = candidates
        held.append(candidate.call)
        replay = (lambda: tuple(0 * x for x in candidate.call())) if len(held) == 3 else candidate.call
        return Candidate(replay)

    monkeypatch.setattr(derivatives, "replayed", graph)
    values, notes = derivatives.measure(row(what, "graphs", HALF), Options())
    assert notes == {"math": "wrong: relative error 1 against float64"}
    assert list(values) == ["ours", "ours_alone", "by-hand", *(["jvp-flash"] if what in ("jvp", "step") else [])]
    assert len(held) == 1 + len(values)


def test_a_replay_is_of_all_calls_and_gives_the_last_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call was made once before the graph holds it: on another stream, as the graph's is."""
    done: list[str] = []
    where = ["main"]

    class Stream:
        def wait_stream(self, other: Any) -> None:
            done.append("wait")

    class Inside:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"

        def __enter__(self) -> None:
            where.append(self.name)

        def __exit__(self, *error: object) -> None:
            where.pop()

    graph = types.SimpleNamespace(replay=lambda: done.append("replay"))
    fakes = {"Stream": Stream, "current_stream": Stream, "stream": Inside, "CUDAGraph": lambda: graph}
    for name, fake in {**fakes, "graph": lambda of: Inside("graph" if of is graph else "another")}.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def call(name: str) -> Candidate:
        return Candidate(lambda: done.append(f"{name} in {where[-1]}") or (name, len(done)), lambda: Inside("its own"))

    first, last = call("first"), call("last")
    found = replayed([first, last, first, last])
    warm, within = ([f"{name} in {place}" for name in ("first", "last")] for place in ("side", "graph"))
    assert done == ["wait", *warm, "wait", *within, *within]
    assert found.call() == ("last", 8) and done[-1] == "replay" and where == ["main"]


@pytest.mark.parametrize("what", ["Ju", "Hu"])
def test_a_family_is_beside_its_own_forward_or_backward(
    what: str, on_cpu: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    for name in ("attention", "attention_jvp", "attention_backward", "attention_backward_jvp"):
        real = getattr(derivative_peers, name)

        def spied(*args: Any, family: str, name: str = name, real: Any = real, **options: Any) -> Any:
            asked.append((name, family))
            return real(*args, **options)

        monkeypatch.setattr(derivative_peers, name, spied)
    values, notes = derivatives.measure(row(what, "sm80", BIASED), Options())
    assert notes == {} and values == {"ours": 0.5, "ours_alone": 0.2}
    assert {family for _, family in asked} == {"sm80"}
    assert ("attention_backward_jvp", "sm80") in asked or what == "Ju"


def test_who_is_wrong_or_has_no_room_is_told(on_cpu: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Any) -> Any:
        attend = derivatives.ours(x, None)
        return lambda q, k, v: attend(q, k, 1.001 * v)

    def full(x: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(derivatives, "sdpa_math", full)
    values, notes = derivatives.measure(row("double", "PyTorch", BIASED), Options())
    assert {*values} == {"ours", "ours_alone", "by-hand"} and notes == {"math": "out of memory"}
    monkeypatch.setattr(derivatives, "sdpa_math", wrong)
    derivatives._measured.cache_clear()
    values, notes = derivatives.measure(row("jvp", "PyTorch", BIASED), Options())
    assert {*values} == {"ours", "ours_alone", "by-hand"}
    assert notes["math"].startswith("wrong: relative error 0.001") and notes["math"].endswith("against float64")


@pytest.mark.parametrize("text", [
    "OutOfMemoryError: CUDA out of memory. Tried", "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while",
    "OutOfMemoryError: Allocation failed",
])  # fmt: skip
def test_every_librarys_words_for_no_room(text: str) -> None:
    assert derivatives._why(text) == "out of memory" and derivatives._why("ValueError: no") == "ValueError: no"


def test_the_rows_that_tell_most_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives.importlib.util, "find_spec", lambda name: name)
    asked = SUITE.problems(Options())
    named = [derivatives.names_of(x)[1] for x in asked if x["unit"] == "ms"]
    assert named[:4] == [
        f"PyTorch-{x}" for x in ("jvp-4096-d64", "double-4096-d64", "jvp-4096-d128", "double-4096-d128")
    ]
    assert named[5:7] == ["sm90-Ju-4096-d64", "sm90-Hu-4096-d64"] and len({*named}) == len(named)
    assert named[-1] == "JAX-jvp-16384-d128"  # after it the pool of JAX has most of the memory
    assert {x["unit"] for x in asked if x["beside"] == "sm90"} == {"ms"}
    in_graphs = [x for x in asked if x["beside"] == "graphs"]
    assert {x["unit"] for x in in_graphs} == {"ms"} and max(x["seq"] for x in in_graphs) == 2048
    assert {"graphs-step-256-d72", "graphs-double-1024-d128", "graphs-hvp-64-d16-float32-bias"} <= {*named}
    triton = [x for x in asked if x["beside"] == "Triton"]
    assert {x["pass"] for x in triton} == {"jvp", "step"} and {x["dtype"] for x in triton} == {"bfloat16"}
    assert {x["seq"] for x in asked if x["bias"]} == {64, 512}
    assert {x["dim"] for x in asked if x["dtype"] == "bfloat16"} == {64, 72, 128, 256}
    quick = [derivatives.names_of(x)[1] for x in SUITE.problems(Options(quick=True)) if x["unit"] == "ms"]
    assert quick == named[: len(quick)] and len(quick) < len(named) / 2


def test_rows_are_asked_for_by_name_and_by_what_they_are_beside() -> None:
    def names(*only: str, **options: Any) -> set[str]:
        return {derivatives.names_of(x)[1] for x in SUITE.problems(Options(only=only, **options))}

    assert {x.split("-")[1] for x in names("double")} == {"double"} and names(
        "PyTorch-jvp-4096-d64", "sm90-Ju-4096-d64"
    ) == {
        "PyTorch-jvp-4096-d64",
        "sm90-Ju-4096-d64",
    }
    assert {x.split("-")[0] for x in names(family="sm80")} >= {"PyTorch", "sm80"}
    assert not names("sm90", family="sm80")
    assert {"jvp-4096-d64", "JAX-jvp-4096-d64", "sm90-Hu-1024-d72"} <= {*SUITE.names}


def test_without_a_package_there_are_no_rows_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derivatives.importlib.util, "find_spec", lambda name: name if name == "torch" else None)
    assert {x["beside"] for x in SUITE.problems(Options())} == {"PyTorch", "graphs", "sm90", "sm80", "simt"}


@pytest.mark.parametrize(
    ("asked", "family", "passes"),
    [
        (row("jvp", "PyTorch", derivatives.D64), None, {(FORWARD, "sm90"), (JVP, "sm90")}),
        (row("Ju", "simt", Shape(4, 16, 1024, 64)), "simt", {(FORWARD, "simt"), (JVP, "simt")}),
        (
            row("double", "PyTorch", Shape(8, 8, 512, 64, "float64", bias=True)),
            None,
            {(x, "sm80") for x in (FORWARD, BACKWARD, JVP, BACKWARD_JVP)},
        ),
    ],
)
def test_what_is_compiled_ahead_is_what_runs(asked: Any, family: str | None, passes: Any) -> None:
    jobs = [*derivatives.jobs_of(asked, Arch.of("sm_90a"), family)]
    assert {(x.of, x.plan.family) for x in jobs} == passes
    assert all([y.name for y in x.problem.tangents] == (["q", "k", "v"] if x.of.moved else []) for x in jobs)
    assert {dataclasses.astuple(x.problem)[:4] for x in jobs} == {dataclasses.astuple(jobs[0].problem)[:4]}


def test_rows_that_follow_each_other_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source once; J u and H u of D 64 and 128 beside PyTorch are then there for sm90's rows as well."""
    compiled: list[Job] = []
    monkeypatch.setattr(device, "current", lambda ordinal: Arch.of("sm_90a"))
    monkeypatch.setattr(precompile, "compile_all", lambda jobs: compiled.extend(jobs) or [])
    derivatives.compile_ahead.cache_clear()
    options = Options(only=("PyTorch", "sm90"))
    for beside in ("PyTorch", "PyTorch", "sm90"):
        derivatives.compile_ahead(options, beside, 0)
    derivatives.compile_ahead.cache_clear()
    of_torch, of_sm90 = compiled[: len(compiled) // 2], compiled[len(compiled) // 2 :]
    sources = {generate(x.plan) for x in of_torch}
    assert len(sources) == len(of_torch) and {generate(x.plan) for x in of_sm90} == sources
    assert {(x.of, x.problem.dim) for x in of_torch} == set(
        itertools.product((FORWARD, BACKWARD, JVP, BACKWARD_JVP), (64, 128))
    )


def test_memory_is_what_lies_beside_inputs_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter((4000,))
    fakes = {"synchronize": lambda: None, "memory_allocated": lambda: 1000, "reset_peak_memory_stats": lambda: None}
    for name, fake in {**fakes, "max_memory_allocated": lambda: next(peaks)}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    way = derivatives.Way(Candidate(lambda: (torch.zeros(100), torch.zeros(50))))
    assert derivatives._peak(way) == 4000 - 1000 - 600
    assert derivatives._peak(way._replace(temporary=7)) == 7


def test_a_run_is_resumed_and_has_both_units(
    on_cpu: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "require_gpu", lambda suite: None)
    monkeypatch.setattr(machine, "name", lambda gpu: "NVIDIA H100")
    monkeypatch.setattr(machine, "ceilings", lambda *given: {})
    monkeypatch.setattr(derivatives, "SHAPES", {BIASED: "jvp double"})
    monkeypatch.setattr(derivatives, "MODULES", {"PyTorch": "torch"})
    monkeypatch.setattr(derivatives, "OF_FAMILY", {"sm80": (BIASED,)})
    measured = derivatives._measured
    peaks = {"ours": 1.0, "math": 30.0}

    def with_peaks(*asked: Any) -> Any:
        found, notes = measured(*asked)
        return {**found, "MB": peaks}, notes

    monkeypatch.setattr(derivatives, "_measured", with_peaks)
    only = ["jvp-24-d8-float32-bias", "double", "sm80-Ju"]
    monkeypatch.setitem(SUITES, "derivatives", SUITE._replace(names=tuple(only)))
    path = tmp_path / "derivatives.json"
    monkeypatch.setattr(derivatives, "ours", lambda x, family, real=derivatives.ours: real(x, None))
    monkeypatch.setattr(
        derivatives, "family_ways", lambda what, x, family, real=derivatives.family_ways: real(what, x, None)
    )
    assert bench.run(["derivatives"], out=tmp_path, only=only[:1]) == 0
    assert len(on_cpu) == 1  # of the row in megabytes nothing is measured anew
    assert bench.run(["derivatives"], out=tmp_path, only=only, resume=True) == 0
    assert len(on_cpu) == 3
    rows = {(x["problem"]["pass"], x["unit"]): x for x in report.read(path)["rows"]}
    assert [*rows] == [("jvp", "ms"), ("jvp", "MB"), ("double", "ms"), ("double", "MB"), ("Ju", "ms")]
    assert rows["jvp", "ms"]["times_alone"] == 2.5 and rows["jvp", "MB"]["ratio_to_best"] == 30.0
    assert "2 rows are in" in (printed := capsys.readouterr().out) and "x alone" in printed and "2.50x" in printed


def synthetic() -> list[dict[str, Any]]:
    """Ours is 8 times as fast as by hand, in graphs, where it takes a fifth, 40 times; in JAX 4 times as fast as XLA.
    J u takes 2.5 forwards."""
    rows = []
    for problem in derivatives._all():
        for unit in ("ms",) if problem["beside"] in ("graphs", *derivatives.OF_FAMILY) else ("ms", "MB"):
            values = {"ours": 0.1 if problem["beside"] == "graphs" else 0.5} | {
                "jvp-flash": 3.0,
                "by-hand": 4.0,
                "math": 40.0,
                "jax-xla": 2.0,
            }
            here = {"ours", *derivatives.BESIDE[problem["beside"]]}
            values = {name: x for name, x in values.items() if name in here}
            if unit == "ms" and problem["beside"] not in ("JAX", "Triton"):
                values["ours_alone"] = 0.2
            notes = {"math": "out of memory"} if problem["seq"] == 16384 and values.pop("math", None) else {}
            rows.append(report.make_row({**problem, "unit": unit}, unit, values, notes, derivatives.PEERS))
    return rows


def test_rows_of_one_problem_are_shown_as_one() -> None:
    rows = synthetic()
    shown = derivatives.merged(rows)
    compared = [x for x in shown if x["peers"]]
    assert len(
        {(derivatives.name_of(x["problem"]), x["unit"], derivatives._kind(x["problem"])) for x in compared}
    ) == len(compared)
    named = [derivatives.name_of(x["problem"]) for x in shown]
    assert [name for name, _ in itertools.groupby(named)] == [*dict.fromkeys(named)]  # all of a name together
    assert [(x["problem"]["beside"], x["unit"]) for x, name in zip(shown, named) if name == "step-256-d72"] == [
        ("PyTorch, Triton", "ms"), ("PyTorch, Triton", "MB"), ("graphs", "ms"), ("JAX", "ms"), ("JAX", "MB"),
    ]  # fmt: skip
    first = shown[0]
    assert first["problem"]["beside"] == "PyTorch, Triton" and first["ratio_to_best"] == 6.0
    assert first["peers"] == {"math": 40.0, "by-hand": 4.0, "jvp-flash": 3.0}
    assert first["times_alone"] == 2.5 and rows[0]["problem"]["beside"] == "PyTorch"  # what was given stays
    said = report.summary(rows)
    assert "jvp: least 6.00x the best peer (jvp-4096-d64), at most 2.50 times forward (jvp-4096-d64)" in said
    assert "JAX jvp: least 4.00x the best peer (jvp-4096-d64)" in said
    least, most = "least 30.00x the best peer (step-1024-d72)", "at most 0.50 times forward and backward"
    assert f"graphs step: {least}, {most} (step-1024-d72)" in said
    # 0.5 MB beside 64 x 8 x 64 x 16 numbers of float32
    assert "memory beyond inputs and results: at most 0.24 times q's (double-64-d16-float32-bias)" in said
    assert "sm90 Hu: at most 2.50 times backward (Hu-4096-d64)" in said


def test_the_page_has_its_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = {
        "suite": "derivatives", "gpu": "NVIDIA H100", "machine": "NVIDIA H100", "date": "2026-01-01T00", "family": None,
        "rows": synthetic(),
        "driver": "1", "sources": "0", "versions": {}, "absent": {}, "ceilings": {},
    }  # fmt: skip
    report.save(tmp_path / "results" / "h100" / "derivatives.json", data)
    (tmp_path / "docs").mkdir()
    bench.plot(tmp_path / "results", tmp_path / "docs")
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs" / "plots" / "h100_derivatives.png").is_file()
    table = [line for line in page.splitlines() if line.startswith("| jvp | 4096 | 64 |")]
    assert len(table) == 4 and "| PyTorch, Triton | ms | **0.5** | 40 | 4 | 3 | – | 6.00x | 2.50x |" in table[0]
    assert "| JAX | ms | **0.5** | – | – | – | 2 | 4.00x | – |" in table[2]
    assert "| Ju | 4096 | 64 |" in page
