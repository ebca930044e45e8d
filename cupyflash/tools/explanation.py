"""How a call would run, told without running it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import cached, interop, lengths, rules
from .. import latent as of_latent
from .. import tangents as of_tangents
from ..cpu.tiles import lies_for_blas
from ..given import placed
from ..gradients import apart, check_wrt
from ..passes import FORWARD, JVP, PASSES, Pass, pass_named
from ..problem import (
    ARRAY_RULES,
    DESCALES,
    EIGHT,
    FLOAT8,
    INPUTS,
    ITEMSIZE,
    AttentionProblem,
    Given,
    View,
    check_options,
    complete,
    contiguous,
    float_name,
    to_bshd,
)
from ..scalars import whole_number
from . import wording
from .wording import plain, si

NO_PLAN = ("return_lse", "out", "grads", "dlse")  # options of a call that change no plan


@dataclass(frozen=True)
class Kernel:
    """One kernel launch. What only the compiler knows is None where it could not be asked."""

    name: str
    grid: int
    threads: int
    shared_memory: int | None  # bytes of one thread block
    registers: int | None  # of one thread
    spills: int | None  # bytes of one thread that did not fit the registers


@dataclass(frozen=True)
class Explanation:
    """What `cupyflash.explain` returns: plain data that prints as a table."""

    problem: AttentionProblem
    of: str  # the pass, by name
    device: str  # "cpu" or an architecture, "sm_90a"
    family: str  # of kernels; "numpy" on the CPU, "none" where nothing needs to be computed
    tiles: dict[str, bool | float]  # the constants that the kernels are compiled with
    kernels: tuple[Kernel, ...]
    flops: int  # of the matrix products
    bytes_moved: int  # at least: every input read once, every output written once
    workspace: dict[str, int]  # bytes beyond inputs and outputs, by what they hold
    copies: tuple[str, ...]  # inputs that are copied first, and why
    passed_over: tuple[str, ...]  # faster families that do not take this problem, and why
    notes: tuple[str, ...] = ()
    optional: dict[str, int] = field(default_factory=dict)  # of bytes_moved, by array
    rank: int = 4  # of q, as it was given without lengths

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    def rows(self, verbose: bool = False) -> list[tuple[str, str]]:
        """The table, as (what, value) pairs; with verbose=True it has the constants, too."""
        p = self.problem
        rows = [
            ("pass", self.of),
            ("q", wording.queries(p, self.rank)),
            ("k, v", wording.keys_and_values(p, self.rank)),
            ("mask", wording.mask(p)),
            *([("score", scores)] if (scores := wording.scores(p)) else []),
            ("device", self.device + (f", {p.sms} multiprocessors at most" if p.sms and self.device != "cpu" else "")),
            ("family", self.family),
            *[("  passed over", why) for why in self.passed_over],
        ]
        if self.tiles and verbose:
            rows.append(("constants", ", ".join(f"{name} {plain(value)}" for name, value in self.tiles.items())))
        for kernel in self.kernels:
            rows.append(("kernel", f"{kernel.name}: {kernel.grid:,} blocks of {kernel.threads} threads"))
            rows.append(("  resources", wording.resources(kernel.registers, kernel.spills, kernel.shared_memory)))
        rows += [
            ("FLOPs", f"{'at most ' * wording.is_a_bound(p)}{si(self.flops, 1000)}FLOP"),
            ("bytes moved", f"at least {si(self.bytes_moved)}B" + wording.of_which(self.optional)),
            ("intensity", f"{self.intensity:,.1f} FLOP per byte"),
            ("workspace", ", ".join(f"{name} {si(size)}B" for name, size in self.workspace.items()) or "none"),
            *[("copy", why) for why in self.copies or ("none: every input is read where it is",)],
            *[("note", note) for note in self.notes],
        ]
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self.rows():
            table.add_row(name, Text(value))
        return table


def explain(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: Any = None,
    kv_dtype: Any = None,
    arch: str | None = None,
    of: str | None = None,
    tangents: Iterable[str] = (),
    family: str | None = None,
    **options: Any,
) -> Explanation:
    """Tell how a call would run, without running it: family, tiles, registers, shared memory, workspace, FLOPs, copies.

    Parameters
    ----------
    q, k, v : arrays or shapes
        What `attention` would be given; shapes (tuples) need `dtype`. k and v default to q's.
    dtype : optional
        For shapes: "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", a short name ("bf16") or a dtype of
        NumPy, PyTorch or JAX.
    kv_dtype : optional
        For shapes: "float8_e4m3fn" or "int8", of k and v that have 8 bits beside q of 16. Default: `dtype`.
    arch : str, optional
        Plan for this architecture ("sm_80", "sm_90a", ...) instead of the GPU at hand; no GPU is needed then.
    of : "forward", "backward", "jvp", "backward_jvp", optional
        Which pass: `attention`, `attention_backward`, `attention_jvp`, `attention_backward_jvp`. Default: "forward",
        with `tangents` "jvp".
    tangents : names of arrays, optional
        What moves, for "jvp" and "backward_jvp"; or a mapping of arrays, as those are given.
    family, **options
        As for `attention`, and `wrt` of `attention_backward`; an optional array may be a shape too.

    Returns
    -------
    Explanation
        Prints as a table; its fields are plain data.
    """
    given = options
    check_options("explain", given, (*NO_PLAN, "score_arrays", "wrt"))
    what = _pass(of, tangents)
    wrt = given.pop("wrt", ())
    if wrt and not what.of_gradients:
        able = " or ".join(repr(x.name) for x in PASSES.values() if x.of_gradients)
        raise ValueError(f"wrt is {wrt!r}, but of is {what.name!r}, which has no gradients; it must be {able}")
    k = q if k is None else k
    array, _ = rules.seed_of(given.get("seed"), 0.0)  # none is needed, and a number is compiled nowhere
    given["seed"] = array
    asked = {name: given[name] for name in complete({}) if name in given}
    if (at := given.get("at")) is not None:  # numbers, an array of them, or the shape of one
        held: dict[str, Any] = {"at": at} if isinstance(at, (tuple, list)) and len(at) == 1 else {}
        asked["at"] = None if held else placed(at, held)
        given["at"] = held.get("at")
    descales = {name: given.pop(name, None) for name in DESCALES}
    dtypes = dict.fromkeys("kv", eight_name(kv_dtype)) if kv_dtype is not None else {}
    of_q, of_k = as_view("q", q, dtype, arch), as_view("k", k, dtypes.get("k", dtype), arch)
    given |= rules.fold_descales(asked, of_q, of_k, descales)
    of_latent.operands(given.get("latent"), v)
    arrays = {"q": q, "k": k, "v": k if v is None else v, **{name: given.get(name) for name in ARRAY_RULES}}
    views = {name: as_view(name, x, dtypes.get(name, dtype), arch) for name, x in arrays.items() if x is not None}
    read = views_of_score(given.get("score_arrays"), arch)
    views = of_latent.with_view(views, asked)
    problem = rules.for_pass(rules.describe(**asked | views, score_arrays=read), what)
    of_latent.refuse(problem.latent, what)
    if what is not FORWARD:
        cached.refuse_float8(problem.dtype, what, problem.cache_dtype)
        lengths.refuse_pages(problem, what)
    wanted = check_wrt(wrt, arrays, problem.score)
    views |= {x.key: read[x.name] for x in (problem.score.arrays if problem.score else ())}
    if tangents:
        problem, views = _moving(problem, views, tangents, what)
    device = views["q"].device
    notes = _of_blocks(asked.get("block_mask"))
    if device == "cpu" and arch is None:
        if family is not None:
            _refuse_family(family, views["q"])
        found = _on_cpu(problem, views, what, given.get("layout", "bshd"), shapes=isinstance(q, tuple))
    else:
        ordinal = 0 if device == "cpu" else int(device.partition(":")[2])
        through_lse = given.get("dlse") is not None or problem.moves("dlse")
        found = _on_gpu(problem, views, what, family, arch, ordinal, wanted, through_lse)
    optional = optional_bytes(problem, views)
    flops = found.flops + sum(problem.flops() for names in apart(wanted) if set(names) != {"sinks"})
    # An array that a score function reads goes by its own name.
    names = [of_score.name if problem.score and (of_score := problem.score.array(key)) else key for key in wanted]
    gradients = {f"d{name}": optional[name] for name in names}
    moved = found.bytes_moved + sum(gradients.values())
    found = replace(found, rank=4 if problem.ragged else len(views["q"].shape), optional=optional | gradients)
    return replace(found, flops=flops, bytes_moved=moved, notes=found.notes + notes)


def _pass(of: str | None, tangents: Any) -> Pass:
    """The one that is asked for, with tangents where it takes them."""
    if of is None:
        return JVP if tangents else FORWARD
    found = pass_named(of)
    if found.moved and not tangents:
        raise ValueError(f"of is {of!r}, but tangents is {tangents!r}; it must name what moves, as in ('q', 'k')")
    if tangents and not found.moved:
        moved = next(x.name for x in PASSES.values() if x.moved and x.of_gradients == found.of_gradients)
        raise ValueError(f"tangents are given, but of is {of!r}; it must be {moved!r}")
    return found


def _moving(
    problem: AttentionProblem, views: dict[str, View], tangents: Any, of: Pass
) -> tuple[AttentionProblem, dict[str, View]]:
    """With tangents of arrays, and views of them."""
    named = tangents if isinstance(tangents, Mapping) else dict.fromkeys(tangents)
    moved, found = dict(views), []
    for name, x in of_tangents.of_call(named, views, problem.score, of).items():
        like = {"tdout": "out", "tdlse": "lse"}.get(name, name[1:])
        rank = len(views["q"].shape)
        if like in ("out", "lse"):
            shape = rules.out_shape(views["q"].shape, problem) if like == "out" else rules.lse_shape(rank, problem)
            view = views["q"]._replace(shape=shape, dtype=problem.dtype if like == "out" else problem.lse_dtype)
        else:
            view = views[like]
        if x is None or isinstance(x, (tuple, list)):
            view = view._replace(strides=contiguous(view.shape), ptr=0)
        else:
            view = as_view(rules.argument_name(name), x, None, None)
        moved[name], rule = view, ARRAY_RULES.get(name[1:])
        found.append(Given(name[1:], view.dtype, rule.spread(view, rank) if rule else ()))
    return replace(problem, tangents=tuple(found)), moved


def _of_blocks(block_mask: Any) -> tuple[str, ...]:
    if block_mask is None:
        return ()
    counts = block_mask.counts()
    said = ", ".join(f"{n:,} {name}" for name, n in counts.items())
    share = counts["empty"] / max(1, sum(counts.values()))
    return (f"block mask: {said} blocks; the empty ones, {share:.1%} of them, cost nothing",)


def _refuse_family(family: str, q: View) -> None:
    from ..dispatch import refuse_family
    from ..gpu.plan import check_family

    if q.kind != "shape":
        refuse_family(family, q.kind)
    check_family(family)
    raise ValueError(f"family is {family!r}, but no GPU can be used here; name one to plan for it, as in arch='sm_90a'")


def _on_cpu(problem: AttentionProblem, views: dict[str, View], of: Pass, layout: str, shapes: bool) -> Explanation:
    notes = []
    if problem.dtype in ("float16", "bfloat16", FLOAT8):
        notes.append(f"{problem.dtype} is computed in float32, tile by tile")
    if shapes:
        notes.append('no GPU can be used here; name one to plan for it, as in arch="sm_90a"')
    return Explanation(
        problem, of.name, "cpu", "none" if problem.empty else "numpy", {}, (), problem.flops(of),
        bytes_moved(problem, views, of), {}, _copies_on_cpu(problem, views, layout), (), tuple(notes),
    )  # fmt: skip


def _copies_on_cpu(problem: AttentionProblem, views: dict[str, View], layout: str) -> tuple[str, ...]:
    """Of K, V and their tangents, which BLAS reads where they are if it can."""
    copies = []
    for name in [x for x in ("k", "v", "tk", "tv") if x in views and not problem.empty]:
        _, row, _, element = to_bshd(views[name].strides, layout, fill=0)
        if problem.page is not None:
            copies.append(f"{name}, because its rows lie in pages")
        elif not lies_for_blas(views[name].shape[-1], row, element):
            what = "its rows do not lie one behind the other"
            if element != 1:
                what = "the numbers of its rows do not lie side by side"
            copies.append(f"{name}, because {what}")
    return tuple(copies)


def _on_gpu(
    problem: AttentionProblem,
    views: dict[str, View],
    of: Pass,
    family: str | None,
    arch_name: str | None,
    ordinal: int,
    wanted: tuple[str, ...],
    through_lse: bool,
) -> Explanation:
    from ..gpu import tuned
    from ..gpu.device import Arch, current
    from ..gpu.plans import plans

    arch = current(ordinal) if arch_name is None else Arch.of(arch_name)
    flops, moved = problem.flops(of), bytes_moved(problem, views, of)
    tiles = tuned.tiles(problem, arch, of) if arch_name is None else {}
    planned = [x for x in plans(problem, arch, of, family, tiles, wanted, views, through_lse) if x is not None]
    if not planned:
        note = "nothing to compute: the results are filled with zeros"
        return Explanation(problem, of.name, arch.name, "none", {}, (), flops, moved, {}, (), (), (note,))
    chosen = planned[0]
    resources, notes = _compiled(chosen)
    compiled = [resources, *(_compiled(x)[0] for x in planned[1:])]
    if arch_name is None:
        notes += _tuning(problem, arch, of, chosen.family)
    if any(x.name == "attention_split" for x in chosen.launches):
        notes += (
            f"a {problem.dtype} number is multiplied as two of float16, of 22 bits together; sums are {problem.dtype}",
        )
    if chosen.portions:
        many = f"heads run in {len(chosen.portions)} portions of up to {chosen.portions[0]} of k"
        notes += (f"{many}, so that these alone take workspace: blocks are those of the first",)
    constants = dict(chosen.constants)
    if most := constants.get("SHARE_TILES", 0):
        keys = f"{most * constants['KEYS']} keys at most"
        notes += (f"the keys of each sequence are dealt out by its own length, in shares of {keys}",)
    elif constants.get("LEAST_TILES"):
        notes += ("the keys of all sequences are dealt out in equal parts, whatever their lengths",)
    elif (shares := dict(chosen.scalars).get("shares", 1)) > 1:
        why = (
            f"the queries of a head of keys are dealt out in {shares} shares: key tiles are few, or some have many "
            "more queries"
            if of.of_gradients
            else f"the keys of a query tile are dealt out in {shares} shares: query tiles are few"
        )
        notes += (why,)
    shape = rules.out_shape(views["q"].shape, problem)
    made = views["q"]._replace(shape=shape, strides=contiguous(shape), ptr=0)
    views = views | {name: made for name in ("dout", "out", "tout") if name in of.inputs}  # as a caller would make them
    workspace: dict[str, int] = {}
    for space in (space for made in reversed(planned) for space in made.workspace):
        workspace[space.name] = max(space.nbytes, workspace.get(space.name, 0))
    kernels = []
    for launch, made_of in [(launch, x) for made, x in zip(planned, compiled) for launch in made.launches]:
        found = made_of.get(launch.name)
        kernels.append(
            Kernel(
                launch.name, launch.grid, launch.threads,
                None if found is None else launch.shared_memory + found.static_shared,
                None if found is None else found.registers,
                None if found is None else found.spill_stores + found.spill_loads,
            )
        )  # fmt: skip
    return Explanation(
        problem, of.name, arch.name, chosen.family, dict(chosen.constants), tuple(kernels), flops, moved,
        workspace,
        _copies(problem, views, chosen), chosen.passed_over,
        notes,
    )  # fmt: skip


def _compiled(chosen: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Resources of a plan's kernels by name, compiled through the cache; none of them and a note without NVRTC."""
    from ..gpu.programs import program

    try:
        return program(chosen).resources, ()
    except ImportError as error:
        return {}, (f"registers and shared memory are unknown: {error}",)


def _tuning(problem: AttentionProblem, arch: Any, of: Pass, family: str) -> tuple[str, ...]:
    """Where the tiles come from, if not from the table; why the stored ones are not used, if they are not."""
    from ..gpu import tuned

    found = tuned.find(problem, arch, of)
    own = [found[family]] if family in found else []
    said = [f"tiles tuned on {x.date}: {x.ms:.3g} ms, the table's took {x.table_ms:.3g} ms" for x in own]
    return (*said, *filter(None, [tuned.stored().note]))


def _copies(problem: AttentionProblem, views: dict[str, View], chosen: Any) -> tuple[str, ...]:
    from ..gpu.strides import to_copy

    rank = len(views["q"].shape)
    copies = ((name, to_copy(name, view, problem, rank, chosen, view.ptr % 16 != 0)) for name, view in views.items())
    return tuple(f"{name}, because {copy.why}" for name, copy in copies if copy is not None)


def as_view(name: str, x: Any, dtype: Any, arch: str | None) -> View:
    """The view of an array, or of one that has the shape x and this dtype."""
    if not isinstance(x, (tuple, list)):
        lib = interop.library(name, x)
        view = interop.view(lib, name, interop.adopted(lib, {name: x})[name])
        if name not in ARRAY_RULES and float_name(dtype) not in (None, view.dtype):
            raise ValueError(f"dtype is {dtype!r}, but {name} is an array of {view.dtype}; dtype is for shapes alone")
        return view if view.device else view._replace(device=_place_of_shapes(arch))  # of one that JAX traces
    dtype = dtype if name in ("k", "v") and dtype in EIGHT else dtype_name(dtype)
    numbers = [whole_number(n) for n in x] if isinstance(x, Iterable) else [None]
    shape = tuple(n for n in numbers if n is not None)
    if len(shape) < len(numbers):
        raise TypeError(f"{name} is {x!r}; it must be an array or a shape, a tuple of integers")
    if not all(0 <= n < 2**63 for n in shape):
        raise ValueError(f"{name} has shape {shape}; its lengths must be 0 or more, and less than 2**63")
    if name in ARRAY_RULES and (dtype is not None or ARRAY_RULES[name].dtypes[0] != "q"):
        dtype = ARRAY_RULES[name].taken(dtype or "")[0]
    elif dtype is None:
        raise TypeError(f"{name} is a shape, {shape}; dtype must be given with it, as in dtype='bfloat16'")
    return View(shape, contiguous(shape), dtype, _place_of_shapes(arch), "shape")


def _place_of_shapes(arch: str | None) -> str:
    return "cuda:0" if arch is not None or _gpu_at_hand() else "cpu"


def dtype_name(dtype: Any) -> str | None:
    """What a dtype that is asked for is called here; TypeError for one that attention does not take, None for None."""
    name = float_name(dtype)
    if name not in (None, *INPUTS):
        raise TypeError(f"dtype is {dtype!r}; it must be one of {', '.join(INPUTS)}")
    return name


def eight_name(dtype: Any) -> str:
    """What a dtype of 8 bits, of k and v beside q of 16, is called here; TypeError for others."""
    known = (float_name(dtype), getattr(dtype, "__name__", None), str(dtype).removeprefix("torch."))
    name = next((x for x in known if x in EIGHT), None)
    if name is None:
        raise TypeError(
            f"kv_dtype is {dtype!r}; it must be {' or '.join(EIGHT)}, or left out: k and v have q's dtype then"
        )
    return name


def views_of_score(arrays: Any, arch: str | None) -> dict[str, View]:
    """Of what is given as score_arrays: arrays, or shapes of float32."""
    arrays = dict(arrays or {}).items()
    return {
        name: as_view(f"score_arrays[{name!r}]", x, "float32" if isinstance(x, (tuple, list)) else None, arch)
        for name, x in arrays
    }


def _gpu_at_hand() -> bool:
    from ..gpu.device import current

    try:
        current(0)
    except (ImportError, RuntimeError):
        return False
    return True


def bytes_moved(problem: AttentionProblem, views: dict[str, View], of: Pass) -> int:
    """Bytes of all inputs and outputs: what a pass has to read and write at the very least."""
    p = problem
    rows = (p.rows_q if p.rows_q is not None else p.batch * p.seq_q) * p.heads_q
    q, o = rows * p.dim, rows * p.dim_v
    keys = p.rows_k if p.rows_k is not None else 0 if p.has("seqlens_k") else p.batch * p.seq_k  # of caches unknown
    k, v = (keys * p.heads_k * d for d in (p.dim, p.dim_v if p.latent is None else 0))
    size, of_k, of_out = ITEMSIZE[p.dtype], ITEMSIZE[p.cache_dtype or p.dtype], o * ITEMSIZE[p.result_dtype]
    sizes = {"q": q * size, "k": k * of_k, "v": v * of_k, "out": of_out, "lse": rows * ITEMSIZE[p.lse_dtype]}
    sizes |= {f"{d}{name}": n for d in ("d", "t", "td") for name, n in sizes.items()}
    there = (row.name for row in of.rows if not row.optional or p.moves(row.name[1:]))
    return sum(sizes[name] for name in there) + sum(optional_bytes(problem, views).values())


def optional_bytes(problem: AttentionProblem, views: dict[str, View]) -> dict[str, int]:
    """Of optional arrays, and those that a score function reads, by name."""
    found = {}
    for name, dtype, _ in problem.given:  # what lies in memory, not what it is broadcast to
        own = zip(views[name].shape, views[name].strides)
        found[name] = math.prod(length for length, stride in own if stride) * ITEMSIZE[dtype]
    for x in problem.score.arrays if problem.score else ():
        found[x.name] = math.prod(views[x.key].shape) * ITEMSIZE[x.dtype]
    for name, dtype, _ in problem.tangents:
        read = problem.score.array(name) if problem.score else None
        if read or name in ARRAY_RULES:
            found[f"tangent of {read.name if read else name}"] = math.prod(views[f"t{name}"].shape) * ITEMSIZE[dtype]
    return found
