"""Tiles by measurement, instead of from the tables in gpu/families: what `cupyflash tune` does. Nothing tunes unasked.

The tiles of a family are tried in three steps, each with fewer: those that shared memory and the warps admit (no GPU
needed), those that compile without spilling more registers than the table's of the same kernels, those that give the
result of another family, or of the CPU: the table's own tile is judged as any other. They are timed in turn; the
fastest is stored in the user's configuration folder (`tuned`), where the next call's plan finds it.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .. import rules
from ..call import Call
from ..gpu import device, tuned
from ..gpu.device import Arch
from ..gpu.kernel_plan import Tiles, room
from ..gpu.plan import FAMILIES, KernelPlan
from ..gpu.plans import plans
from ..gpu.tuned import Tuned
from ..passes import BACKWARD, FORWARD, PASSES, Pass, pass_named
from ..problem import EIGHT, FLOAT8, AttentionProblem, check_options, complete
from ..scalars import check_flag
from .explanation import as_view, views_of_score
from .precompile import Job, compile_all
from .shapes import even, of_problem
from .timing import Candidate, cupy_event, gpu_sampler, interleave, reason

Progress = Callable[[str, int, int], object]  # what is being done, how many are done, of how many
TOLERANCE = {"float16": 1e-2, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-10}  # relative, Frobenius
TUNED = (FORWARD, BACKWARD)  # tangents have the tables' own tiles
GAIN = 1.01  # a tile that is less faster than the table's is the same within what a measurement tells


@dataclass(frozen=True)
class Trial:
    """One tile: the plan it leads to, and the seconds it takes, or why it has none."""

    tile: tuple[int, ...]  # () is the table's own
    plan: KernelPlan
    seconds: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Tuning:
    """What `cupyflash.tune` returns. The first trial is the table's own tile, the others are sorted by time."""

    problem: AttentionProblem
    of: str  # the pass, by name
    family: str
    trials: tuple[Trial, ...]
    best: Trial  # the first trial, where no other is faster by more than the noise
    path: str | None  # the file that holds it now; None where nothing was stored

    @property
    def gain(self) -> float:
        """How many times faster the best is than the table's own."""
        own, best = self.trials[0].seconds, self.best.seconds
        return own / best if own and best else 1.0


def tune(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: Any = None,
    of: str = "forward",
    family: str | None = None,
    store: bool = True,
    rounds: int = 5,
    min_ms: float = 10.0,
    progress: Progress | None = None,
    **options: Any,
) -> Tuning:
    """Time the tiles that a problem's kernels could have on this GPU, and use the fastest from now on.

    FlashAttention-2 (Dao 2023, section 3.3) chose them by hand and left this to future work. What is stored holds for
    problems of the same dtype, head dimensions, kind of mask, optional arrays and options, with lengths up to the same
    power of two, on the same kind of GPU.

    Parameters
    ----------
    q, k, v : arrays or shapes
        As for `explain`. Only shapes matter: random arrays of that size are made on CuPy's current GPU.
    dtype : optional
        For shapes: "float16", "bfloat16", "float32", "float64", a short name ("bf16") or a dtype of NumPy, PyTorch or
        JAX.
    of : "forward", "backward"
        Which pass: `attention` or `attention_backward`. Tiles of tangents are the tables' own.
    family : "sm90", "sm80", "simt", optional
        Default: the one that such a call takes.
    store : bool
        Keep the fastest in `tuning.json` in the user's configuration folder (or CUPYFLASH_CONFIG_DIR). The file is
        replaced at the end, whole; an interrupt leaves it as it was.
    rounds, min_ms
        How often each tile is timed, in turn, and for how many milliseconds at least.
    progress : callable, optional
        Called with what is being done, how many are done, and of how many.
    **options
        As for `attention`: those that change a problem, and its optional arrays (or their shapes).

    Returns
    -------
    Tuning
        Every tile with its time or why it has none; `best`, and `gain` over the table's own.

    Raises
    ------
    ImportError, RuntimeError
        Where there is no CuPy or no GPU; RuntimeError also where the kernels do not run.
    ValueError
        For a family that has nothing to tune.
    """
    what, given = pass_named(of, TUNED), options
    progress = progress or (lambda *_: None)
    check_options("tune", given, ("score_arrays",))
    check_flag("store", store)
    device.current(0)  # says what is missing, where there is no GPU
    ordinal = _ordinal()
    arch = device.current(ordinal)
    if as_view("q", q, dtype, arch.name).dtype == FLOAT8:
        raise ValueError(f"q has dtype {FLOAT8}, of which CuPy has no arrays to time; its tiles are the table's own")
    k = q if k is None else k
    if (of_k := as_view("k", k, dtype, arch.name).dtype) in EIGHT:
        raise ValueError(f"k has dtype {of_k}, and caches of 8 bits are not tuned; their tiles are the table's own")
    if given.get("latent") is not None:
        raise ValueError(
            f"latent is {given['latent']}, and latent attention is not tuned; its tiles are the table's own"
        )
    asked = {name: given.pop(name) for name in complete({}) if name in given}
    given["seed"], _ = rules.seed_of(given.get("seed"), 0.0)  # a number changes nothing
    read = views_of_score(given.pop("score_arrays", None), arch.name)
    arrays = {"q": q, "k": k, "v": k if v is None else v, **given}
    views = {name: as_view(name, x, dtype, arch.name) for name, x in arrays.items() if x is not None}
    problem = rules.for_pass(rules.describe(**views, **asked, score_arrays=read), what)
    asked["score"] = problem.score
    if problem.empty:
        raise ValueError(f"q has shape {views['q'].shape} and k {views['k'].shape}: no score, so nothing to tune")
    trials = list(candidates(problem, arch, what, family))
    compiled = list(_compiled(problem, what, trials, progress))
    shapes = {x.key: read[x.name].shape for x in (problem.score.arrays if problem.score else ())}
    timed = _timed(problem, what, ordinal, asked, shapes, compiled, rounds, min_ms, progress)
    own, others = timed[0], sorted(timed[1:], key=lambda trial: trial.seconds or float("inf"))
    if own.seconds is None:
        raise RuntimeError(f"the table's own tile cannot be timed: {own.note}")
    faster = [trial for trial in others[:1] if trial.seconds and trial.seconds * GAIN < own.seconds]
    best = faster[0] if faster else own
    entry = tuned.entry(problem, arch, own.plan.family, what, best.tile)
    path = None
    if store:
        assert best.seconds is not None
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        entry = replace(entry, ms=1e3 * best.seconds, table_ms=1e3 * own.seconds, date=date)
        if best is not own or entry.key in {x.key for x in tuned.stored().entries}:  # else there is nothing to change
            path = str(tuned.replace([entry] if best is not own else [], [entry.key]))
            _forget()
    return Tuning(problem, what.name, own.plan.family, (own, *others), best, path)


def candidates(problem: AttentionProblem, arch: Arch, of: Pass, family: str | None) -> Iterator[Trial]:
    """The table's own tile, then every other one that fits. Pure. ValueError for a family that has nothing to
    choose."""
    (own,) = plans(problem, arch, of, family)
    if own is None:
        raise ValueError("nothing reaches the results of this problem, so there is nothing to tune")
    family = own.family
    if of not in FAMILIES[family].TILES:
        others = ", ".join(repr(name) for name, room in FAMILIES.items() if of in room.TILES)
        raise ValueError(f"family is {family!r}; it has nothing to tune: name one of {others}")
    yield Trial((), own)
    tiles = FAMILIES[family].TILES[of]
    seen = {own.constants}
    for tile in dict.fromkeys([*tiles.listed(), *itertools.product(*tiles.tried.values())]):
        if tiles.possible(tiles.tile(tile), problem):
            (other,) = plans(problem, arch, of, family, {family: tile})
            if other and other.constants not in seen and _has(other, tiles, tile) and _resident(other, arch):
                seen.add(other.constants)
                yield Trial(tile, other)


def _has(chosen: KernelPlan, tiles: Tiles[Any], tile: Sequence[int]) -> bool:
    """Whether that is its tile: one that does not fit leads to what the table has."""
    constants = dict(chosen.constants)
    return all(constants.get(name.upper(), n) == n for name, n in zip(tiles.tried, tile))


def _resident(chosen: KernelPlan, arch: Arch) -> bool:
    """Whether a multiprocessor has shared memory for as many blocks as the registers are divided among."""
    blocks = int(dict(chosen.constants).get("MIN_BLOCKS", 1))
    return max(x.shared_memory for x in chosen.launches) <= room(arch, blocks)


def _compiled(problem: AttentionProblem, of: Pass, trials: list[Trial], progress: Progress) -> Iterator[Trial]:
    """The trials, on all cores through the disk cache; those that cannot be used have a note."""
    jobs = {Job(problem, of, trial.plan): trial for trial in trials}
    noted: dict[Job, Trial] = {}
    most: dict[str, int] = {}  # bytes that the table lets kernels spill; of others than its own tile's, what a row does
    for trial in trials:
        source, own = trial.plan.source, trials[0].plan
        most[source] = own.spills if source == own.source else max(trial.plan.spills, most.get(source, 0))
    for done in compile_all(list(jobs)):
        trial = jobs[done.job]
        if done.compiled is None:
            trial = replace(trial, note=f"does not compile: {_first_error(str(done.error))}")
        else:
            spilled = max(max(r.spill_stores, r.spill_loads) for r in done.compiled.resources.values())
            if trial.tile and spilled > most[trial.plan.source]:
                trial = replace(trial, note=f"spills {spilled} bytes")
            elif "serialized" in done.compiled.log:
                trial = replace(trial, note="its products wait for each other")
        noted[done.job] = trial
        progress("compile", len(noted), len(jobs))
    yield from (noted[job] for job in jobs)


def _first_error(log: str) -> str:
    """The first line of a compiler's log that is an error, without its place."""
    lines = [line.partition("error:")[2].strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.splitlines())[0][:80]


def _timed(
    problem: AttentionProblem,
    of: Pass,
    ordinal: int,
    options: dict[str, Any],
    read: dict[str, tuple[int, ...]],
    trials: list[Trial],
    rounds: int,
    min_ms: float,
    progress: Progress,
) -> list[Trial]:
    """The trials without a note, each judged by what another family computes, and timed in turn on the GPU."""
    judge = judge_of(problem, trials[0].plan.family, device.current(ordinal), of)
    prepare = _on_gpu(problem, of, ordinal, options, read, judge)
    notes: dict[str, str] = {}
    ready: dict[str, Candidate] = {}
    for number, trial in enumerate(trials):
        if trial.note:
            continue
        try:
            call, errors_of = prepare(trial)
            errors = errors_of()
        except Exception as error:  # noqa: BLE001 - what a GPU does not launch is no candidate
            notes[str(number)] = reason(error)
            continue
        if all(error <= TOLERANCE[problem.dtype] for error in errors):  # not where one is NaN
            ready[str(number)] = Candidate(call)
        else:
            worst = max(errors, key=lambda error: (np.isnan(error), error))
            notes[str(number)] = f"wrong: differs by {worst:.1e} from {judge or 'the CPU'}"
        progress("check", number + 1, len(trials))
    sample = gpu_sampler(ready, min_ms, event=cupy_event)
    taken = itertools.count(1)

    def counted(name: str) -> float:
        seconds = sample(name)
        progress("time", next(taken), rounds * len(ready))
        return seconds

    seconds, failures = interleave(list(ready), rounds, counted)
    notes |= failures
    return [
        replace(trial, seconds=seconds.get(str(i)), note=notes.get(str(i), trial.note))
        for i, trial in enumerate(trials)
    ]


def judge_of(problem: AttentionProblem, family: str, arch: Arch, of: Pass) -> str | None:
    """The family whose results are the measure of another's tiles; None for the CPU, where no other takes the
    problem."""
    for name in ("simt", "sm80"):
        passes = {FORWARD, of}  # a backward begins with the result of a forward
        if name != family and not any(FAMILIES[name].objection(problem, arch, x) for x in passes):
            return name
    return None


Check = Callable[[], list[float]]


def _on_gpu(
    problem: AttentionProblem,
    of: Pass,
    ordinal: int,
    options: dict[str, Any],
    read: dict[str, tuple[int, ...]],
    judge: str | None,
) -> Callable[[Trial], tuple[Callable[[], tuple[Any, ...]], Check]]:
    """A function that makes, of a trial's kernels, a call and how far its results are from the judge's, all on the same
    random arrays. `read`: shapes of those that a score function reads.
    """
    import cupy

    from ..arrays import on_host
    from ..cpu import corridor as cpu_corridor
    from ..gpu import corridor
    from ..interop import cupy_ as lib
    from ..interop import numpy_

    p, drawn = problem, of_problem(problem)
    shared = complete({**options, "layout": "bshd"})
    with cupy.cuda.Device(ordinal):
        random = cupy.random.RandomState(0)

        def draw(shape: tuple[int, ...], dtype: str = p.dtype) -> Any:
            if dtype == "bool":
                return random.random_sample(shape) < 0.9
            if dtype in ("int32", "int64"):
                return cupy.zeros(shape, dtype)
            return random.standard_normal(shape, dtype="float32").astype(lib.empty((0,), dtype, ordinal).dtype)

        arrays: dict[str, Any] = {
            **{name: draw(shape, x.dtype if (x := p.array(name)) else p.dtype) for name, shape in drawn.items()},
            **{name: cupy.asarray(x) for name, x in even(p).items()},
            **{x.key: draw(read[x.key], x.dtype) for x in (p.score.arrays if p.score else ())},
        }
        if of is BACKWARD:
            arrays["dout"] = draw((*drawn["q"][:-1], p.dim_v))
        given = arrays if judge else {name: on_host(x) for name, x in arrays.items()}
        backend, kind = (corridor, lib) if judge else (cpu_corridor, numpy_)
        expected, made = measure(backend, Call(kind, of, given, shared, seed=0, family=judge))
        for name, x in made.items():
            arrays[name] = x if judge else lib.empty(x.shape, str(x.dtype), ordinal)
            if not judge:
                arrays[name].set(np.ascontiguousarray(x))
        targets = {name: lib.empty(x.shape, str(x.dtype), ordinal) for name, x in expected.items()}

    asked = Call(lib, of, arrays, shared, seed=0)
    stated = corridor.Stated.of(asked)

    def prepare(trial: Trial) -> tuple[Callable[[], tuple[Any, ...]], Check]:
        step = corridor.Kernels(asked, stated, ordinal, trial.plan)

        def call(into: dict[str, Any] | None = None) -> tuple[Any, ...]:
            return tuple(step.run(asked.but(targets=into) if into else asked).results)

        def errors() -> list[float]:
            for x in targets.values():  # what is not written is NaN, not what another tile has left
                x.data.memset_async(0xFF, x.nbytes)
            call(targets)
            return [difference(targets[name] if judge else on_host(targets[name]), x) for name, x in expected.items()]

        return call, errors

    return prepare


def measure(backend: Any, call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results that tiles are judged by, by a corridor of the GPU or the CPU; and the arrays that a backward needs
    besides."""
    given = {name: x for name, x in call.arrays.items() if name != "dout"}
    out, lse = backend.run(call.but(of=FORWARD, arrays=given, return_lse=call.of is BACKWARD))
    if call.of is FORWARD:
        return {"out": out}, {}
    made = {"out": out, "lse": lse}
    return backend.run(call.but(arrays={**call.arrays, **made}))._asdict(), made


def difference(x: Any, y: Any) -> float:
    """Frobenius norm of x - y over that of y, for NumPy and CuPy arrays."""
    wide = "float64" if x.dtype == "float64" else "float32"
    x, y = x.astype(wide), y.astype(wide)
    return float(((x - y) ** 2).sum() ** 0.5 / max(float((y**2).sum() ** 0.5), 1e-30))


def _ordinal() -> int:
    """The GPU that CuPy computes on."""
    return int(device.import_cupy().cuda.runtime.getDevice())


def _forget() -> None:
    from ..gpu import corridor

    corridor.forget()


def export(entries: tuple[Tuned, ...]) -> list[str]:
    """The stored tiles as rows for the tables in gpu/families, each with a comment that says what was measured."""
    lines = []
    for x in entries:
        tiles = FAMILIES[x.family].TILES[PASSES[x.of]]
        tile = tiles.tile(x.tile)
        limits: dict[str, Any] = {
            "dim": max(x.dim, x.dim_v), "seq_q": x.seq_q, "banded": x.banded, "sums": 8 if x.dtype == "float64" else 4,
        }  # fmt: skip
        own = {field.name for field in fields(tile)}
        values = {**dict(zip(tiles.tried, x.tile)), **{name: value for name, value in limits.items() if name in own}}
        what = [*(["banded"] if x.banded else []), *(name.lower() for name in x.asked)]
        lines.append(
            f"# {x.family} {x.of}: {x.arch} with {x.sms} multiprocessors, {x.dtype}, "
            f"head dim {x.dim}, {x.dim_v}, {', '.join(what) or 'no mask'}, up to {x.seq_q} x {x.seq_k}: {x.ms:.4g} ms, "
            f"before {x.table_ms:.4g} ms"
        )
        lines.append(f"{type(tile).__name__}({', '.join(f'{name}={value}' for name, value in values.items())}),")
    return lines
