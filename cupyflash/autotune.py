"""Tiles by measurement, instead of from the table in gpu/tuning.py: what `cupyflash tune` does. Nothing tunes unasked.

The tiles of a family are tried in three steps, each with fewer: those that shared memory and the warps admit (no GPU
needed), those that compile without spilling more registers than the table's, those that give the same result. They are
timed in turn; the fastest is stored in the user's configuration folder (`tuned`), where `device.current` finds it.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

from . import problem as rules
from . import tuned
from .bench.timing import Candidate, cupy_event, gpu_sampler, interleave, reason
from .explanation import as_view
from .gpu import device, tuning
from .gpu.device import Arch
from .gpu.plan import KernelPlan, plan
from .precompile import Job, compile_all
from .problem import AttentionProblem
from .tuned import Tuned

Progress = Callable[[str, int, int], object]  # what is being done, how many are done, of how many
TOLERANCE = {"float16": 1e-2, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-10}  # relative, Frobenius
GAIN = 1.01  # a tile that is less faster than the table's is the same within what a measurement tells

# What is combined, in the order of the table's columns after its limits.
FIELDS: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {
    ("sm80", False): {
        "rows": (64, 128), "keys": (32, 48, 64, 96, 128), "warps": (4, 8), "column_warps": (1, 2), "stages": (1, 2),
        "blocks": (1, 2, 3),
    },
    ("sm80", True): {
        "rows": (32, 64, 128), "keys": (32, 64, 128), "warps": (4, 8), "column_warps": (1, 2, 4), "stages": (1, 2),
        "blocks": (1, 2, 3),
    },
    ("sm90", False): {
        "groups": (2, 3), "keys": (64, 80, 96, 128, 192), "stages": (2, 3, 4), "spills": (0,),
    },
    ("sm90", True): {
        "rows": (64, 80, 96, 128), "keys": (64, 80, 96, 128), "groups": (2, 3), "stages": (1, 2), "do_stages": (1, 2),
        "spills": (0,),
    },
    ("simt", False): {
        "owned": (32, 64), "visited": (32, 64), "columns": (32, 64, 128, 256), "depth": (16, 32), "blocks": (2, 3, 4),
        "spills": (0,), "threads": (128,),
    },
}  # fmt: skip
FIELDS["simt", True] = FIELDS["simt", False]


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
    backward: bool
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
    k: Any,
    v: Any,
    *,
    dtype: str | None,
    backward: bool,
    family: str | None,
    key_mask: Any,
    store: bool,
    rounds: int,
    min_ms: float,
    progress: Progress,
    **options: Any,
) -> Tuning:
    """`cupyflash.tune`; see there."""
    rules.check_options("tune", options)
    device.current(0)  # says what is missing, where there is no GPU
    ordinal = _ordinal()
    arch = replace(device.current(ordinal), tuned=())
    k = q if k is None else k
    given = {"q": q, "k": k, "v": k if v is None else v, "key_mask": key_mask}
    views = {name: as_view(name, x, dtype, arch.name) for name, x in given.items() if x is not None}
    problem = rules.describe(views["q"], views["k"], views["v"], key_mask=views.get("key_mask"), **options)
    if problem.empty:
        raise ValueError(f"q has shape {views['q'].shape} and k {views['k'].shape}: no score, so nothing to tune")
    trials = list(candidates(problem, arch, backward, family))
    compiled = list(_compiled(problem, backward, trials, progress))
    timed = _timed(problem, backward, ordinal, options, compiled, arch, rounds, min_ms, progress)
    own, others = timed[0], sorted(timed[1:], key=lambda trial: trial.seconds or float("inf"))
    if own.seconds is None:
        raise RuntimeError(f"the table's own tile cannot be timed: {own.note}")
    faster = [trial for trial in others[:1] if trial.seconds and trial.seconds * GAIN < own.seconds]
    best = faster[0] if faster else own
    entry = tuned.entry(problem, arch.name, arch.sms, own.plan.family, backward, best.tile)
    path = None
    if store:
        assert best.seconds is not None
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        entry = replace(entry, ms=1e3 * best.seconds, table_ms=1e3 * own.seconds, date=date)
        if best is not own or entry.key in {x.key for x in tuned.stored().entries}:  # else there is nothing to change
            path = str(tuned.replace([entry] if best is not own else [], [entry.key]))
            _forget()
    return Tuning(problem, backward, own.plan.family, (own, *others), best, path)


def candidates(problem: AttentionProblem, arch: Arch, backward: bool, family: str | None) -> Iterator[Trial]:
    """The table's own tile, then every other one that fits. Pure. ValueError for a family that has nothing to choose."""
    stock = replace(arch, tuned=())
    own = plan(problem, stock, backward, family)
    family = own.family
    if (family, backward) not in FIELDS:
        raise ValueError(f"family is {family!r}; it has nothing to tune: name one of 'sm90', 'sm80', 'simt'")
    yield Trial((), own)
    seen = {own.constants}  # a tile that does not fit leads to the table's own as well
    for tile in _tiles(problem, stock, family, backward):
        entry = tuned.entry(problem, arch.name, arch.sms, family, backward, tile)
        other = plan(problem, replace(stock, tuned=(entry,)), backward, family)
        if other.constants not in seen and _resident(other, arch):
            seen.add(other.constants)
            yield Trial(tile, other)


def _resident(chosen: KernelPlan, arch: Arch) -> bool:
    """Has a multiprocessor shared memory for as many blocks as the registers are divided among? (1 KiB each is CUDA's.)"""
    blocks = int(dict(chosen.constants).get("MIN_BLOCKS", 1))
    return blocks * (max(x.shared_memory for x in chosen.launches) + 1024) <= arch.shared_memory + 1024


def table(family: str, backward: bool) -> list[tuple[int, ...]]:
    """The tiles of a family's table in gpu/tuning.py, without its limits."""
    if family == "simt":
        return [astuple(tile) for _, back, _, tile in tuning.SIMT if back == backward]
    rows: dict[tuple[str, bool], Any] = {
        ("sm80", False): tuning.SM80_FORWARD,
        ("sm80", True): tuning.SM80_BACKWARD,
        ("sm90", False): tuning.SM90_FORWARD,
        ("sm90", True): tuning.SM90_BACKWARD,
    }
    limits = len(tuning.UNLIMITED[family, backward])
    return [tuple(row[limits:]) for row in rows[family, backward]]


def _tiles(problem: AttentionProblem, arch: Arch, family: str, backward: bool) -> Iterator[tuple[int, ...]]:
    names = FIELDS[family, backward]
    for tile in dict.fromkeys([*table(family, backward), *itertools.product(*names.values())]):
        if _possible(dict(zip(names, tile)), problem, family, backward):
            yield tile


def _possible(t: dict[str, int], problem: AttentionProblem, family: str, backward: bool) -> bool:
    """Do the warps share the tile out evenly, and have its sums room in the registers? Shared memory is the plan's."""
    d, dv = (-(-n // 16) * 16 for n in (problem.dim, problem.dim_v))
    if family == "sm90":
        if backward:  # how the warpgroups share out the keys is in the table
            return (t["keys"], t["groups"]) in {(keys, groups) for _, keys, groups, *_ in table(family, backward)}
        # Scores, their 16-bit copy and the output, in what the kernel gives a thread that computes.
        return t["keys"] * 3 // 4 + dv // 2 <= {2: 200, 3: 128}[t["groups"]]
    if family == "simt":
        words = 2 if problem.dtype == "float64" else 1
        sums = t["owned"] * ((1 + backward) * t["columns"] + (1 + backward) * t["visited"]) // t["threads"] * words
        even = t["visited"] % t["depth"] == 0
        return even and sums + 30 <= min(255, 65536 // (t["threads"] * t["blocks"]))
    threads = 32 * t["warps"]
    limit = min(255, 65536 // (threads * t["blocks"])) - 40
    sharing = t["warps"] // t["column_warps"]
    if backward:
        down = max(1, t["rows"] // 32)  # warps along dQ's rows
        even = t["keys"] % (16 * sharing) == 0 and t["rows"] % (16 * t["column_warps"]) == 0 and t["warps"] % down == 0
        return even and t["keys"] * (d + dv + 2 * t["rows"]) // threads <= limit
    even = t["rows"] % (16 * sharing) == 0 and t["keys"] % (16 * t["column_warps"]) == 0
    return even and t["rows"] * (dv + t["keys"]) // threads <= limit


def _compiled(problem: AttentionProblem, backward: bool, trials: list[Trial], progress: Progress) -> Iterator[Trial]:
    """The trials, on all cores through the disk cache; those that cannot be used have a note."""
    jobs = {Job(problem, backward, trial.plan): trial for trial in trials}
    noted: dict[Job, Trial] = {}
    for done in compile_all(list(jobs)):
        trial = jobs[done.job]
        if done.compiled is None:
            trial = replace(trial, note=f"does not compile: {_first_error(str(done.error))}")
        else:
            spilled = max(max(r.spill_stores, r.spill_loads) for r in done.compiled.resources.values())
            if trial.tile and spilled > trials[0].plan.spills:
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
    backward: bool,
    ordinal: int,
    options: dict[str, Any],
    trials: list[Trial],
    arch: Arch,
    rounds: int,
    min_ms: float,
    progress: Progress,
) -> list[Trial]:
    """The trials without a note, checked against the first and timed in turn on the GPU."""
    prepare = _on_gpu(problem, backward, ordinal, options, arch)
    notes: dict[str, str] = {}
    ready: dict[str, Candidate] = {}
    expected: tuple[Any, ...] = ()
    for number, trial in enumerate(trials):
        if trial.note:
            continue
        try:
            call = prepare(trial)
            results = call()
            worst = max(difference(x, y) for x, y in zip(results, expected or results))
        except Exception as error:  # noqa: BLE001 - what a GPU does not launch is no candidate
            notes[str(number)] = reason(error)
            continue
        expected = expected or results
        if worst <= TOLERANCE[problem.dtype]:
            ready[str(number)] = Candidate(call)
        else:  # also where it is NaN
            notes[str(number)] = f"wrong: differs by {worst:.1e}"
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


def _on_gpu(
    problem: AttentionProblem, backward: bool, ordinal: int, options: dict[str, Any], arch: Arch
) -> Callable[[Trial], Callable[[], tuple[Any, ...]]]:
    """A function that makes a call of a trial's kernels, all on the same random arrays."""
    import cupy

    from .gpu import corridor
    from .interop import cupy_ as lib

    p = problem
    shared = {"causal": False, "window": None, "scale": None, "deterministic": False, **options, "layout": "bshd"}
    with cupy.cuda.Device(ordinal):
        random = cupy.random.RandomState(0)

        def draw(*shape: int) -> Any:
            return random.standard_normal(shape, dtype="float32").astype(lib.empty((0,), p.dtype, ordinal).dtype)

        q, k = draw(p.batch, p.seq_q, p.heads_q, p.dim), draw(p.batch, p.seq_k, p.heads_k, p.dim)
        v = draw(p.batch, p.seq_k, p.heads_k, p.dim_v)
        key_mask = random.random_sample((p.batch, p.seq_k)) < 0.9 if p.key_mask else None
        arrays: dict[str, Any] = {"q": q, "k": k, "v": v, "key_mask": key_mask}
        if backward:
            out, lse = corridor.forward(lib, q, k, v, key_mask, None, True, shared, None)
            arrays |= {"dout": draw(*out.shape), "out": out, "lse": lse}

    def prepare(trial: Trial) -> Callable[[], tuple[Any, ...]]:
        family = trial.plan.family
        entry = tuned.entry(p, arch.name, arch.sms, family, backward, trial.tile)
        own = replace(arch, tuned=(entry,) if trial.tile else ())
        prepared = corridor.Prepared(lib, arrays, {}, (), shared, family, backward, ordinal, own)
        return lambda: tuple(prepared.run(lib, arrays, {}, False)[0])

    return prepare


def difference(x: Any, y: Any) -> float:
    """Frobenius norm of x - y over that of y, for NumPy and CuPy arrays."""
    wide = "float64" if x.dtype == "float64" else "float32"
    x, y = x.astype(wide), y.astype(wide)
    return float(((x - y) ** 2).sum() ** 0.5 / max(float((y**2).sum() ** 0.5), 1e-30))


def _ordinal() -> int:
    """The GPU that CuPy computes on."""
    return int(device.import_cupy().cuda.runtime.getDevice())


def _forget() -> None:
    from .gpu import corridor

    corridor.forget()


def export(entries: tuple[Tuned, ...]) -> list[str]:
    """The stored tiles as rows for the tables in gpu/tuning.py, each with a comment that says what was measured."""
    lines = []
    for x in entries:
        name = "SIMT" if x.family == "simt" else f"{x.family.upper()}_{'BACKWARD' if x.backward else 'FORWARD'}"
        widest = max(x.dim, x.dim_v)
        limits: tuple[Any, ...] = (widest,)
        if x.family == "sm80" and x.backward:
            limits = (widest, x.seq_q)
        elif x.family == "sm90" and not x.backward:
            limits = (widest, x.banded)
        elif x.family == "simt":
            limits = (8 if x.dtype == "float64" else 4, x.backward, widest)
        tile = f"Simt{x.tile}" if x.family == "simt" else ", ".join(map(str, x.tile))
        features = [word for word, on in (("banded", x.banded), ("key mask", x.key_mask)) if on]
        lines.append(
            f"# {name}: {x.arch} with {x.sms} multiprocessors, {x.dtype}, head dim {x.dim}, {x.dim_v}, "
            f"{', '.join(features) or 'no mask'}, up to {x.seq_q} x {x.seq_k}: {x.ms:.4g} ms, before {x.table_ms:.4g} ms"
        )
        lines.append(f"({', '.join(map(str, limits))}, {tile}),")
    return lines
