"""The suite `derivatives`: jvp, a MeanFlow step, gradients of gradients and Hessian products, beside what people have
today; and J u and H u of each kernel family beside its own forward and backward."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from ..problem import Given, View, contiguous
from ..rules import describe
from ..tools.timing import Candidate, interleave, reason, wall_sampler
from .derivative_peers import (
    KNOWN,
    Attend,
    Inputs,
    Way,
    by_hand,
    family_ways,
    jax_way,
    jvp_flash,
    ours,
    ours_in_jax,
    sdpa_math,
    three,
    torch_call,
    xla,
)
from .suite import Measured, Options, Problem, relative_error, replayed, take_turns


class Shape(NamedTuple):
    batch: int
    heads: int
    seq: int
    dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    bias: bool = False


# Who is measured with ours in one row: a library that is slow to start, or keeps memory, does not hold up the others.
# Those of a family are its own forward and backward. All are called by PyTorch: of "PyTorch" and "Triton" each call
# anew, of "graphs" and the families by replays of a CUDA graph. "JAX": all by JAX, jitted.
BESIDE = {
    "PyTorch": ("math", "by-hand"),
    "sm90": (),
    "graphs": ("math", "by-hand", "jvp-flash"),
    "JAX": ("jax-xla",),
    "Triton": ("jvp-flash",),
    "sm80": (),
    "simt": (),
}
MODULES = {"PyTorch": "torch", "graphs": "torch", "JAX": "jax", "Triton": "jvp_flash_attention"}
PEERS = tuple(dict.fromkeys(itertools.chain(*BESIDE.values())))
SHORT = 2048  # tokens up to which PyTorch's host may take longer than the kernels
ALONE = {"jvp": "forward", "step": "both", "double": "both", "hvp": "both", "Ju": "forward", "Hu": "backward"}
# Of each row what runs in it, so that it can be compiled ahead.
PASSES_OF: dict[str, tuple[Pass, ...]] = {
    "jvp": (FORWARD, JVP), "step": (FORWARD, JVP, BACKWARD), "Ju": (FORWARD, JVP),
    "Hu": (FORWARD, JVP, BACKWARD, BACKWARD_JVP),
}  # fmt: skip
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative error above which a result is wrong; 16 bits:
COARSE = 5e-2
PATIENCE = 0.1  # seconds; slower calls are timed once

D64, D128, LONG = Shape(4, 16, 4096, 64), Shape(2, 16, 4096, 128), Shape(1, 12, 16384, 128)
SHAPES = {
    D64: "jvp double step",
    D128: "jvp double step",
    LONG: "jvp",
    Shape(16, 16, 1024, 72): "jvp step",  # DiT-XL/2
    Shape(16, 16, 1024, 64): "jvp double step",
    Shape(8, 16, 1024, 128): "jvp double step",
    Shape(2, 8, 4096, 256): "jvp double",
    Shape(4, 16, 2048, 64, causal=True): "jvp double hvp",
    Shape(64, 16, 256, 72): "jvp step",
    Shape(64, 16, 256, 64): "jvp hvp",
    Shape(8, 12, 1024, 64, "float32"): "jvp double step",
    Shape(1, 12, 4096, 64, "float32"): "double",
    Shape(2, 12, 1024, 64, "float64"): "jvp double",
    Shape(1, 8, 2048, 32, "float64"): "double",
    **{
        Shape(batch, 8, atoms, dim, dtype, bias=True): "double hvp"
        for dtype in ("float32", "float64")
        for batch, atoms, dim in ((64, 64, 16), (8, 512, 64))
    },
}
WIDE = tuple(Shape(2, 12, 1024, dim, dtype) for dtype in ("float32", "float64") for dim in (64, 128))
OF_FAMILY = {
    "sm90": (D64, D128, *(x for x in SHAPES if x.dtype == "bfloat16" and x not in (D64, D128))),
    "sm80": (D64, D128, Shape(2, 8, 4096, 256), *WIDE),
    "simt": (Shape(4, 16, 1024, 64), Shape(4, 16, 1024, 128), *WIDE),
}


def name_of(problem: Mapping[str, Any]) -> str:
    """What a row is called, as in "jvp-4096-d64" or "double-512-d64-float32-bias"."""
    dtype = "" if problem["dtype"] == "bfloat16" else f"-{problem['dtype']}"
    more = "".join(f"-{x}" for x in ("causal", "bias") if problem[x])
    return f"{problem['pass']}-{problem['seq']}-d{problem['dim']}{dtype}{more}"


def _all() -> list[Problem]:
    asked = [
        (beside, shape, what)
        for beside in MODULES
        for shape in SHAPES
        for what in SHAPES[shape].split()
        if (beside != "Triton" or _known(what, shape)) and (beside != "graphs" or shape.seq <= SHORT)
    ]
    asked += [(family, shape, what) for family in OF_FAMILY for shape in OF_FAMILY[family] for what in ("Ju", "Hu")]
    found = [{"pass": what, **shape._asdict(), "beside": beside} for beside, shape, what in asked]
    return sorted(found, key=lambda x: (tier(x), list(BESIDE).index(x["beside"])))


def _known(what: str, shape: Shape) -> bool:
    """To the Triton package."""
    return what in KNOWN and shape.dtype == "bfloat16" and not shape.bias


def tier(problem: Mapping[str, Any]) -> int:
    """0: the rows that tell most; 2: the one after which JAX, which gives no memory back, leaves none."""
    shape = _shape(problem)
    if shape == LONG and problem["beside"] in ("PyTorch", "JAX"):
        return 0 if problem["beside"] == "PyTorch" else 2
    return int(shape not in (D64, D128) or problem["pass"] == "step")


def _shape(problem: Mapping[str, Any]) -> Shape:
    return Shape(*(problem[name] for name in Shape._fields))


def problems(options: Options) -> list[Problem]:
    """Each row in milliseconds, and in megabytes beyond inputs and results but for replays; those that tell most
    first. Of packages that are not installed there are none; with a family those of other families are left out."""
    there = {beside for beside, module in MODULES.items() if importlib.util.find_spec(module) is not None}
    there |= {options.family} if options.family else {*OF_FAMILY}
    return [
        {**problem, "unit": unit}
        for problem in _all()
        if problem["beside"] in there and not (options.quick and not options.only and tier(problem))
        and (not options.only or any(name.startswith(options.only) for name in names_of(problem)))
        for unit in (("ms",) if _in_graphs(problem) else ("ms", "MB"))
    ]  # fmt: skip


def _in_graphs(problem: Mapping[str, Any]) -> bool:
    return problem["beside"] == "graphs" or problem["beside"] in OF_FAMILY


def names_of(problem: Mapping[str, Any]) -> tuple[str, str]:
    """By what a row is asked for: its name, and that behind what it is measured beside."""
    return name_of(problem), f"{problem['beside']}-{name_of(problem)}"


NAMES = tuple(dict.fromkeys(itertools.chain(*map(names_of, _all()))))


def draw(problem: Problem, device: str = "cuda") -> Inputs:
    import torch

    shape, seed = _shape(problem), zlib.crc32(name_of(problem).encode())
    given: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    given["dtype"] = getattr(torch, shape.dtype)
    rows, pairs = (shape.batch, shape.heads, shape.seq, shape.dim), (shape.seq, shape.seq)
    at, along, weights = (three(torch.randn(rows, **given) for _ in "qkv") for _ in range(3))
    bias = torch.randn((*rows[:2], *pairs), **given) if shape.bias else None
    hidden = torch.ones(pairs, dtype=torch.bool, device=device).triu(1) if shape.causal else None
    return Inputs(at, along, torch.randn(rows, **given), weights, bias, hidden, shape.causal)


def ways(problem: Problem, x: Inputs, family: str | None) -> dict[str, Callable[[], Way]]:
    """Everybody of a row, by name."""
    what, beside = problem["pass"], problem["beside"]
    if beside in OF_FAMILY:
        return {
            name: lambda name=name: family_ways(what, x, beside)[name]  # type: ignore[misc]
            for name in ("ours", "ours_alone")
        }

    def by_torch(attend: Callable[[], Attend], what: str = what) -> Callable[[], Way]:
        return lambda: Way(Candidate(torch_call(what, attend(), x)))

    if beside == "JAX":
        return {
            "ours": lambda: jax_way(what, x, ours_in_jax(x, family)),
            "ours_alone": lambda: jax_way(ALONE[what], x, ours_in_jax(x, family)),
            "jax-xla": lambda: jax_way(what, x, xla(x)),
        }
    found = {"ours": by_torch(lambda: ours(x, family))}
    if beside == "Triton":
        return found | {"jvp-flash": by_torch(lambda: jvp_flash(x, what))}
    found["ours_alone"] = by_torch(lambda: ours(x, family), ALONE[what])
    found |= {"math": by_torch(lambda: sdpa_math(x)), "by-hand": by_torch(lambda: by_hand(x))}
    if beside == "graphs" and _known(what, _shape(problem)) and importlib.util.find_spec(MODULES["Triton"]):
        found["jvp-flash"] = by_torch(lambda: jvp_flash(x, what))
    return found


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(problem: Problem, options: Options) -> Measured:
    """Milliseconds, or megabytes at the peak beyond inputs and results: both are found at once."""
    asked = tuple((name, x) for name, x in problem.items() if name != "unit")
    found, notes = _measured(asked, options)
    return found[problem["unit"]], notes


@functools.lru_cache(1)
def _measured(
    asked: tuple[tuple[str, Any], ...], options: Options
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    problem = dict(asked)
    x = draw(problem)
    if x.dout.is_cuda:
        compile_ahead(options, problem["beside"], tier(problem))
    what = {"Ju": "jvp", "Hu": "hvp"}.get(problem["pass"], problem["pass"])
    small = x.exact()
    right = torch_call(what, by_hand(small), small)()
    right = right[1:] if problem["pass"] == "Ju" else right
    tolerance = TOLERANCE.get(problem["dtype"], COARSE)
    candidates: dict[str, Candidate] = {}
    peaks: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, prepare in ways(problem, x, options.family).items():
        try:
            way = prepare()
            if _in_graphs(problem):
                way = way._replace(candidate=replayed([way.candidate]))
            if name != "ours_alone":
                error = _error(way, right)
                if not error < tolerance:  # also where it is NaN
                    notes[name] = f"wrong: relative error {error:.2g} against float64"
                    continue
                if x.dout.is_cuda and not _in_graphs(problem):
                    peaks[name] = _peak(way) / 1e6
            candidates[name] = way.candidate
        except Exception as failure:  # noqa: BLE001 - a peer may fail in any way; the row goes on without it
            notes[name] = _why(reason(failure))
        _free(x)
    if problem["beside"] == "JAX":
        seconds, failures = interleave(
            list(candidates), options.rounds, wall_sampler(candidates, options.min_ms, functools.partial(_wait, x))
        )
    else:
        seconds, failures = take_turns(candidates, options, PATIENCE)
    notes |= {name: _why(why) for name, why in failures.items()}
    return {"ms": {name: 1e3 * t for name, t in seconds.items()}, "MB": peaks}, notes


def _error(way: Way, right: Sequence[Any]) -> float:
    """The largest error of a result in what `right` has of it."""
    found = way.found(tuple(way.candidate.call()))
    found = found[: len(right)]  # J u gives lse's tangent, too
    return max(relative_error(x.detach()[: y.shape[0], : y.shape[1]], y) for x, y in zip(found, right, strict=True))


def _peak(way: Way) -> float:
    """Bytes beyond inputs and results."""
    if way.temporary is not None:
        return way.temporary
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = way.candidate.call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results))


def _why(note: str) -> str:
    """A note; that memory does not suffice, each library says in words of its own."""
    lower = note.lower().replace("outofmemory", "out of memory")
    return "out of memory" if "out of memory" in lower or "resource_exhausted" in lower else note


def _wait(x: Inputs, results: tuple[Any, ...]) -> None:
    import jax
    import torch

    jax.block_until_ready(results)
    if x.dout.is_cuda:
        torch.cuda.synchronize()


def _free(x: Inputs) -> None:
    """What PyTorch keeps of one peer's memory is not there for another library's."""
    if x.dout.is_cuda:
        import torch

        torch.cuda.empty_cache()


@functools.cache
def compile_ahead(options: Options, beside: str, rank: int) -> None:
    """Compile what rows that follow each other run, on all cores: one by one it would take longer than they do."""
    from ..gpu.device import current
    from ..gpu.source import generate
    from ..tools.precompile import Job, compile_all

    arch = current(0)
    family = beside if beside in OF_FAMILY else options.family
    jobs: dict[str, Job] = {}
    for problem in problems(options):
        if (problem["beside"], tier(problem)) == (beside, rank):
            jobs |= {generate(job.plan): job for job in jobs_of(problem, arch, family)}
    for _ in compile_all([*jobs.values()]):
        pass


def jobs_of(problem: Mapping[str, Any], arch: Any, family: str | None) -> Iterable[Any]:
    """What `compile_all` takes, of the kernels that a row runs; nothing of what a family objects to."""
    from ..gpu.plan import plan
    from ..tools.precompile import Job

    shape = _shape(problem)
    x, pairs = ((shape.batch, n, shape.heads, m) for n, m in ((shape.seq, shape.dim), (shape.seq, shape.seq)))
    pairs = (shape.batch, shape.heads, shape.seq, shape.seq)
    q, bias = (View(lengths, contiguous(lengths), shape.dtype, "cuda:0", "torch") for lengths in (x, pairs))
    stated = describe(q, q, q, causal=shape.causal, **({"bias": bias} if shape.bias else {}))
    for of in PASSES_OF.get(problem["pass"], (FORWARD, BACKWARD, JVP, BACKWARD_JVP)):
        tangents = tuple(Given(name, shape.dtype, ()) for name in "qkv") if of.moved else ()
        asked = replace(stated, tangents=tangents)
        try:
            yield Job(asked, of, plan(asked, arch, of, family))
        except ValueError:  # it is told where the row is measured
            continue


# --- what is shown --------------------------------------------------------------------------------------------------


def merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for a problem that was measured beside several in the same way: with the least of their ratios, and all
    peers. Rows of one name follow each other."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        problem = row["problem"]
        kind = _kind(problem)
        first = found.setdefault((name_of(problem), row["unit"], kind), {**row, "peers": {}, "problem": dict(problem)})
        if first["problem"] != problem:
            first["problem"]["beside"] += f", {problem['beside']}"
            ratios = [x["ratio_to_best"] for x in (first, row) if x["ratio_to_best"] is not None]
            first |= {"ratio_to_best": min(ratios, default=None)}
            first |= {key: x for key, x in row.items() if key in ("ours_alone", "times_alone")}
        first["peers"].update(row["peers"])
    names = [name for name, *_ in found]
    return sorted(found.values(), key=lambda row: names.index(name_of(row["problem"])))


def _kind(problem: Mapping[str, Any]) -> str:
    """How a row was measured: "", called by PyTorch; else beside what."""
    beside = str(problem["beside"])
    return "" if beside.startswith(("PyTorch", "Triton")) else beside


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `report.summary` says of each kind of row: the least against the best of all, the most times alone; and the
    most memory, in times q's."""
    found = []
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in merged([row for row in rows if row["unit"] == "ms"]):
        kinds.setdefault((_kind(row["problem"]), row["problem"]["pass"]), []).append(row)
    for (kind, what), group in kinds.items():
        said = []
        if least := min((x for x in group if x["ratio_to_best"]), key=lambda x: x["ratio_to_best"], default=None):
            said.append(f"least {least['ratio_to_best']:.2f}x the best peer ({name_of(least['problem'])})")
        if most := max((x for x in group if x.get("times_alone")), key=lambda x: x["times_alone"], default=None):
            alone = {"both": "forward and backward"}.get(ALONE[what], ALONE[what])
            said.append(f"at most {most['times_alone']:.2f} times {alone} ({name_of(most['problem'])})")
        if said:
            found.append(f"{kind} {what}: ".lstrip() + ", ".join(said))
    of_q = [
        (row["ours"] * 1e6 / _bytes_of_q(row["problem"]), name_of(row["problem"]))
        for row in rows
        if row["unit"] == "MB" and row["ours"] is not None
    ]
    if of_q:
        times, name = max(of_q, key=lambda x: x[0])
        found.append(f"memory beyond inputs and results: at most {times:.2f} times q's ({name})")
    return found


def _bytes_of_q(problem: Mapping[str, Any]) -> int:
    shape = _shape(problem)
    return math.prod(shape[:4]) * {"float64": 8, "float32": 4}.get(shape.dtype, 2)
