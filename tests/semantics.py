"""One attention problem, run forward and backward on a backend and judged against the reference."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tangents
from backends import Backend
from criterion import (
    as_good_as_rounding,
    assert_as_good,
    assert_as_good_as_either,
    assert_mean_errors,
    far_units,
    group_units,
    large_score_units,
    one_key_units,
)
from reference import Standard, draw, flash2_in_own_precision, standard, standard_in_own_precision, state, visible
from score_functions import WRITTEN, key, of_dtype

from cupyflash import BlockMask, attention, attention_backward, block_mask
from cupyflash.problem import ARRAYS, AttentionProblem
from cupyflash.score.graph import name_of


class Inputs(NamedTuple):
    """NumPy arrays in (B, S, H, D)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    key_mask: np.ndarray | None = None
    dlse: np.ndarray | None = None
    given: dict[str, np.ndarray] = {}  # noqa: RUF012 (other optional arrays; never written to)


def draw_inputs(
    rng: np.random.Generator,
    dtype: str,
    *,
    batch: int = 2,
    seq: tuple[int, int] = (67, 93),
    heads: tuple[int, int] = (2, 2),
    dims: tuple[int, int] = (64, 64),
    key_mask: bool = False,
    dlse: float = 0.0,
    given: Collection[str] = (),
    full: str = "bhqk",
    bias: str | None = None,
    score: str | None = None,
) -> Inputs:
    """Random inputs: `seq` is (Sq, Sk), `heads` (Hq, Hk), `dims` (D, Dv); `dlse` the size of lse's gradient, 0 for
    none.

    `given` names other optional arrays. Along the axes of `full`, by their first letters, a mask or bias has every
    number; it has length 1 along the others. `bias`: the dtype of that, where it is not that of q. A seed is one of no
    dimensions, which stands for a number; reshaped to one dimension it is an array. With the arrays of `score`, of
    WRITTEN; what is learned of them is in float32 for 16-bit inputs.
    """
    (sq, sk), (hq, hk), (d, dv) = seq, heads, dims
    shapes = ((batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, hq, dv))
    mask = rng.random((batch, sk)) < 0.7 if key_mask else None
    rows = dlse * draw(rng, "float64" if dtype == "float64" else "float32", batch, hq, sq) if dlse else None
    over_pairs = [n if axis in full else 1 for axis, n in zip("bhqk", (batch, hq, sq, sk))]
    arrays = {
        "mask": lambda: rng.random(over_pairs) < 0.7,
        "bias": lambda: draw(rng, bias or dtype, *over_pairs),
        "alibi_slopes": lambda: (2.0 ** -rng.uniform(1, 8, (batch, hq))).astype(np.float32),
        "sinks": lambda: draw(rng, dtype, hq),
        "seed": lambda: np.array(rng.integers(-(2**63), 2**63)),
    }
    optional = {name: arrays[name]() for name in given}
    if score is not None:
        read = of_dtype(WRITTEN[score].draw(rng, batch, hq, sq, sk), "float64" if dtype == "float64" else "float32")
        optional |= {key(name): x for name, x in read.items()}
        if (
            score == "documents" and "bias" in given and full == "bhqk"
        ):  # what it is where pairs are hidden does not matter
            ids = read["ids"]
            optional["bias"][(ids[:, None, :sq, None] != ids[:, None, None, :sk]).repeat(hq, 1)] = np.nan
    return Inputs(*(draw(rng, dtype, *shape) for shape in shapes), mask, rows, optional)


class Blocks(NamedTuple):
    """A block mask as plain booleans, (B|1, H|1, Sq, Sk), and the size of its blocks."""

    seen: np.ndarray
    block: tuple[int, int]

    def mask(self, like: Any = None) -> BlockMask:
        return block_mask(self.seen, block=self.block, like=like)

    def with_mask(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Optional arrays whose mask hides the same."""
        return given | {"mask": self.seen & given.get("mask", np.True_)}


def draw_blocks(
    rng: np.random.Generator, shape: tuple[int, int, int, int], block: tuple[int, int], axes: str = "bh"
) -> Blocks:
    """Random ones for (B, H, Sq, Sk), empty, full and partial; `axes`: those of batch and heads along which they
    differ."""
    whole = (*(n if axis in axes else 1 for axis, n in zip("bh", shape)), *shape[2:])
    grid = (*whole[:2], *(-(-n // size) for n, size in zip(shape[2:], block)))
    kinds = rng.choice(3, grid, p=(0.4, 0.3, 0.3))  # empty, full, partial
    kinds[..., :1, :] *= grid[2] == 1 or rng.random() < 0.5  # or queries that see no key
    kinds = kinds.repeat(block[0], 2).repeat(block[1], 3)[:, :, : shape[2], : shape[3]]
    return Blocks((kinds == 1) | ((kinds == 2) & (rng.random(whole) < 0.6)), block)


def dead_rows(
    problem: AttentionProblem,
    key_mask: np.ndarray | None = None,
    blocks: np.ndarray | None = None,
    tiles: Collection[tuple[int, int]] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Which queries see no key, (B, Sq, Hq), and which keys no query sees, (B, Sk, Hk), by position and key_mask.

    Of what `blocks` (booleans over all pairs) hide, tiles of queries and keys of all sizes in `tiles` that hold nothing
    else.
    """
    p, seen = problem, visible(problem, key_mask)
    if blocks is None:  # alike in all heads
        each = (~seen.any(axis).swapaxes(1, 2) for axis in (3, 2))
        heads = (p.batch, p.seq_q, p.heads_q), (p.batch, p.seq_k, p.heads_k)
        return tuple(map(np.broadcast_to, each, heads))
    seen = np.broadcast_to(seen, (p.batch, p.heads_q, p.seq_q, p.seq_k))

    def of_group(x: np.ndarray) -> np.ndarray:  # over the heads that share keys
        return x.reshape(p.batch, p.heads_k, -1, p.seq_k).all(2)

    def by_tile(x: np.ndarray, size: int) -> np.ndarray:  # what is alike in all of each tile
        return np.logical_and.reduceat(x, np.arange(0, x.shape[-1], size), -1).repeat(size, -1)[..., : x.shape[-1]]

    left = np.broadcast_to(blocks, seen.shape)
    queries = ~seen.any(3) | np.logical_and.reduce([by_tile(~left.any(3), rows) for rows, _ in tiles])
    keys = of_group(~seen.any(2))
    keys |= np.logical_and.reduce([of_group(by_tile(~left.any(2), columns)) for _, columns in tiles])
    return queries.swapaxes(1, 2), keys.swapaxes(1, 2)


def spoil(rng: np.random.Generator, x: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """x with what may stand anywhere in dead rows: NaN, infinities, the largest numbers. A copy, if any are."""
    if not dead.any():
        return x
    largest = float(ml_dtypes.finfo(x.dtype).max)
    x, infinite = x.copy(), (np.inf, -np.inf) if x.dtype.itemsize > 1 else ()
    each = rng.choice([np.nan, *infinite, largest, -largest], (int(dead.sum()), 1)).astype(x.dtype)
    x[dead] = np.where(rng.integers(2, size=(len(each), x.shape[-1]), dtype=bool), each, each[::-1])
    return x


Shape = tuple[int, ...]


class Lay(NamedTuple):
    """How an array lies in memory: as view(base), where base has the shape `around` and is otherwise NaN."""

    around: Callable[[Shape], Shape]
    view: Callable[[Any], Any]


CONTIGUOUS = Lay(lambda s: s, lambda base: base)
LAYS = {
    "axes-swapped-in-memory": Lay(lambda s: (s[0], s[2], s[1], s[3]), lambda base: base.swapaxes(1, 2)),
    "slices-of-a-larger-array": Lay(
        lambda s: (s[0] + 1, 2 * s[1], s[2] + 1, s[3] + 16), lambda base: base[1:, ::2, 1:, 8:-8]
    ),
    "rows-not-aligned": Lay(lambda s: (*s[:3], s[3] + 1), lambda base: base[..., 1:]),
    "last-dimension-strided": Lay(lambda s: (*s[:3], 2 * s[3]), lambda base: base[..., ::2]),
    "last-dimension-outermost": Lay(lambda s: (s[3], *s[:3]), lambda base: base.transpose(1, 2, 3, 0)),
    "reversed": Lay(lambda s: s, lambda base: base[:, ::-1]),
    "reversed-rows": Lay(lambda s: s, lambda base: base[..., ::-1]),
}


def check(
    backend: Backend,
    inputs: Inputs,
    *,
    rank: int = 4,
    layout: str = "bshd",
    lay: Lay | dict[str, Lay] = CONTIGUOUS,
    backward: bool = True,
    deterministic: bool = False,
    large_scores: bool = False,
    wrt: Collection[str] | None = None,
    blocks: Blocks | None = None,
    moving: Collection[str] | None = None,
    targets: bool = True,
    again: bool = False,
    alike: bool = False,
    thorough: bool = False,
    judge: Judge | None = None,
    placed: str | None = None,
    **options: Any,
) -> None:
    """Run `inputs` through attention and attention_backward on the backend; every result must be as good as the
    reference.

    `moving`: arrays whose tangents both passes of those are given, if any; unless said, on a CPU all, and one alone.

    `wrt`: optional arrays whose gradients are asked for, all that are given unless said. `blocks`: a block mask.

    Arrays are given in `rank` dimensions, `layout` and `lay`; results go into arrays that hold NaN before, and nothing
    around them may be touched. `large_scores` and `thorough` as `Judge` has it.

    A dictionary as `lay` has that of each array by name, of results too. Without `targets` these are new arrays.
    `again`: a second call must give the same bits; `alike`: q, k and v, which have the same numbers, are one array.
    `judge`: of these, where it is made already. `placed`: the numbers of `at` are an array of this dtype.
    """
    q, k, v, dout = inputs[:4]
    others = inputs.given
    judge = judge or Judge(inputs, options, backward, large_scores, blocks, thorough)
    dtype = judge.problem.dtype

    def laid(name: str) -> Lay:
        return lay.get(name, CONTIGUOUS) if isinstance(lay, dict) else lay

    if not judge.problem.empty and not alike:  # what is dead does not matter
        blind, unseen = dead_rows(judge.problem, inputs.key_mask)
        rng = np.random.default_rng(q.size)
        q, k, v, dout = (
            x if math.prod(laid(name).around(x.shape)) < x.size else spoil(rng, x, dead)  # else one row is many
            for name, x, dead in zip(("q", "k", "v", "dout"), inputs, (blind, unseen, unseen, blind))
        )
    given = [
        _placed(backend, as_caller_has_it(x, rank, layout), laid(name))[1]
        for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))
    ]
    given = [given[0]] * 3 + given[3:] if alike else given
    options |= {"layout": layout, "family": backend.family_for(judge.problem)}
    if placed is not None:
        options["at"] = backend.put(np.array(options["at"], placed))
    named = {}
    for name, x in arrays_of_rank(inputs, rank).items():
        named[name] = _placed(backend, x, laid(name))[1] if x.ndim == 4 else as_given(name, x, backend.put)
    options |= as_arguments(named)
    if blocks is not None:
        options["block_mask"] = blocks.mask(like=given[0])

    shapes = {"out": q.shape[:-1] + v.shape[-1:], "dq": q.shape, "dk": k.shape, "dv": v.shape}
    bases: dict[str, Any] = {}

    def target(name: str) -> Any:
        if not targets:
            return None
        bases[name], view = _unwritten(backend, shapes[name], dtype, rank, layout, laid(name))
        return view

    out = target("out")
    backend.poison()
    arrays = given[: 3 if options.get("latent") is None else 2]
    result, lse = attention(*arrays, out=out, return_lse=True, **options)
    assert result is out or not targets
    out = result
    found = {"lse": lse} | ({} if targets else {"out": out})
    if again:
        _assert_same_bits(backend, "forward", (out, lse), attention(*arrays, return_lse=True, **options))
    if backward:
        grads = tuple(target(name) for name in ("dq", "dk", "dv")) if targets else None
        read = {x.key: x for x in judge.problem.score.arrays} if judge.problem.score else {}
        wrt = wrt_of(judge.problem, others) if wrt is None else wrt
        backend.poison()
        if inputs.dlse is not None:
            options["dlse"] = backend.put(inputs.dlse.reshape(lse.shape))
        results = attention_backward(
            given[3], *given[:3], out, lse, deterministic=deterministic, grads=grads, wrt=wrt, **options
        )  # fmt: skip
        if grads is None:
            found |= dict(zip(("dq", "dk", "dv"), results))
        else:
            assert all(x is view for x, view in zip(results, grads))
        if again and deterministic:
            more = attention_backward(given[3], *given[:3], out, lse, deterministic=True, wrt=wrt, **options)
            _assert_same_bits(backend, "backward", (*results, *results.of_arrays.values()),
                              (*more, *more.of_arrays.values()))  # fmt: skip
        for row in ARRAYS:
            if row.name in wrt:
                found[f"d{row.name}"] = getattr(results, f"d{row.name}")
                assert found[f"d{row.name}"].shape == options[row.name].shape
            else:
                assert getattr(results, f"d{row.name}", None) is None
        assert results.dscore_arrays.keys() == {x.name for x in read.values() if x.name in wrt}
        found |= {f"d{name}": results.dscore_arrays[x.name] for name, x in read.items() if x.name in wrt}

    # A GPU compiles kernels for each set of tangents: for what a test names.
    asked = bool(moving) if moving is not None else (backend.family is None and tangents.are_asked(judge.problem))
    if backward and asked:
        known = {name: x for name, x in options.items() if name != "deterministic"}
        _check_tangents(
            backend, judge, given, out, lse, known | {"deterministic": deterministic}, rank, layout,
            CONTIGUOUS if isinstance(lay, dict) else lay, moving,
        )  # fmt: skip
    judge.reckon()  # while a GPU computes
    fetched = dict(zip((*bases, *found), backend.get_all([*bases.values(), *found.values()])))
    for name, x in fetched.items():
        if name in bases:
            judge(name, as_reference_has_it(laid(name).view(x), rank, layout))
            _assert_untouched_around(x, laid(name))
        elif name == "lse":
            judge(name, x)
        elif name in shapes:
            judge(name, as_reference_has_it(x, rank, layout))
        else:
            assert x.dtype == others[name[1:]].dtype
            judge(name, x.reshape(others[name[1:]].shape))


def wrt_of(problem: AttentionProblem, given: Collection[str]) -> list[str]:
    """All optional arrays that have a gradient."""
    read = problem.score.arrays if problem.score else ()
    names = [row.name for row in ARRAYS if row.gradient and row.name in given]
    return names + [x.name for x in read if x.kind == "float"]


def _assert_same_bits(backend: Backend, what: str, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    for n, (x, y) in enumerate(zip(*(backend.get_all(list(some)) for some in (first, second)))):
        assert x.tobytes() == y.tobytes(), f"result {n} of the {what} is not the same in a second call"


def _check_tangents(
    backend: Backend,
    judge: Judge,
    given: list[Any],
    out: Any,
    lse: Any,
    options: dict[str, Any],
    rank: int,
    layout: str,
    lay: Lay,
    moving: Collection[str] | None,
) -> None:
    """Along tangents of these arrays, or of everything at once and of one array alone; what is hidden has any."""
    q, k, v, dout, key_mask, dlse, others = judge.inputs
    problem = judge.problem
    arrays = {"q": q, "k": k, "v": v, "dout": dout} | ({} if key_mask is None else {"key_mask": key_mask}) | others
    arrays |= {} if dlse is None else {"dlse": dlse}
    rng = np.random.default_rng(q.size + k.size)
    names = tangents.can_move(problem, others)
    dead = {}
    if not problem.empty:
        blind, unseen = dead_rows(problem, key_mask)
        dead = {"q": blind, "k": unseen, "v": unseen, "dout": blind}
    shaped = arrays | {"dlse": np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)}
    for some in [[*moving]] if moving is not None else [names, [str(rng.choice(names))]]:
        moved = tangents.draw_tangents(rng, shaped, some)
        spoilt = {name: spoil(rng, x, dead[name]) if name in dead else x for name, x in moved.items()}
        placed = {}
        for name, x in spoilt.items():
            if name in ("q", "k", "v", "dout"):
                x = as_caller_has_it(x, rank, layout)
            elif name == "dlse":
                placed[name] = backend.put(x.reshape(lse.shape))
                continue
            elif name == "bias" and x.shape == (problem.batch, problem.heads_q, problem.seq_q, problem.seq_k):
                x = np.where(tangents.hidden(problem, others, key_mask), np.nan, x).astype(x.dtype)
            if name in ("q", "k", "v", "dout"):
                placed[name] = _placed(backend, x, lay)[1]
            else:
                placed[name] = backend.put(_of_rank(name, x, rank))
        wrt = [name for name in (some if moving is not None else names) if name not in ("q", "k", "v", "dout", "dlse")]
        wanted = [name_of(name) or name for name in wrt]
        backend.poison()
        found = tangents.call(placed, given[3], given[:3], out, lse, options, wanted)
        moving = tangents.Moving(problem, arrays, moved)
        for name, x in zip(found, backend.get_all([*found.values()])):
            rows = name in ("tout", "tdq", "tdk", "tdv")
            moving.judge(name, as_reference_has_it(x, rank, layout) if rows else x)


class Judge:
    """The problem that inputs and options state, and a verdict on each of its results, in the shapes of the reference.

    `large_scores`: some are so far from 0 that luck decides, see `large_score_units`. What misses the criterion, lse
    apart, may also be about as good as the published algorithm is on this very problem, computed in float64 and rounded
    where it rounds. `thorough`: not the largest error of all alone, but the mean square of each head as well.
    """

    def __init__(
        self,
        inputs: Inputs,
        options: dict[str, Any],
        backward: bool,
        large_scores: bool,
        blocks: Blocks | None = None,
        thorough: bool = False,
    ) -> None:
        q, k, v, dout, key_mask, dlse, others = inputs
        stated = options if blocks is None else options | {"block_mask": blocks.mask()}
        self.problem = state(q, k, v, key_mask, **stated, **others)
        if blocks is not None:
            others = blocks.with_mask(others)
        self.inputs, self.thorough = inputs._replace(given=others), thorough
        self.large_scores, self.arrays = large_scores, (q, k, v, key_mask, dout if backward else None, dlse)

    def reckon(self) -> None:
        """What every verdict needs; the rest is only for what is not as good as rounding."""
        assert self.exact

    @functools.cached_property
    def exact(self) -> Standard:
        return standard(self.problem, *self.arrays, **self.inputs.given)

    @functools.cached_property
    def own(self) -> Standard:
        if self.problem.dtype == "float64":
            return self.exact
        return standard_in_own_precision(self.problem, *self.arrays, **self.inputs.given)

    @functools.cached_property
    def published(self) -> dict[str, np.ndarray]:
        q, k, v, dout, key_mask, dlse, others = self.inputs
        return flash2_in_own_precision(self.problem, q, k, v, key_mask, dout, dlse, **others)

    @functools.cached_property
    def units(self) -> dict[str, float]:
        q, k, v, dout = self.inputs[:4]
        if self.large_scores:
            given = self.inputs.given
            return large_score_units(self.problem, q, k, given.get("bias"), given.get("alibi_slopes"))
        found = [
            one_key_units(self.problem, q, k, v, dout), far_units(self.problem, self.inputs.given),
            group_units(self.problem),
        ]  # fmt: skip
        return {name: max(x.get(name, 1.0) for x in found) for name in {*found[0], *found[1], *found[2]}}

    def __call__(self, name: str, actual: np.ndarray) -> None:
        right = getattr(self.exact, name)
        if name == "lse":  # where q has no batch axis, or no heads, it has none either
            assert actual.dtype == self.problem.lse_dtype, f"lse has dtype {actual.dtype}"
            actual = actual.reshape(right.shape)
        if self.thorough and name in ("out", "dq", "dk", "dv") and not self.large_scores:
            try:
                assert_mean_errors(actual, right, getattr(self.own, name), name)
            except AssertionError:
                if name in ("out", "dv"):
                    raise
                assert_mean_errors(actual, right, self.published[name], name, self.units.get(name, 1.0))
        if as_good_as_rounding(actual, right):
            return
        own = getattr(self.own, name)
        with contextlib.suppress(AssertionError):
            return assert_as_good(actual, right, own, name, luck=False)
        published = None if name == "lse" else self.published[name]
        unit = lambda: max(self.units.get(name, 1.0), self.exact.unit(name))
        assert_as_good_as_either(actual, right, own, published, name, unit)


def arrays_of_rank(inputs: Inputs, rank: int) -> dict[str, np.ndarray]:
    """The optional arrays, key_mask among them, as a caller with q of `rank` dimensions has them."""
    given = dict(inputs.given) if inputs.key_mask is None else {"key_mask": inputs.key_mask, **inputs.given}
    return {name: _of_rank(name, x, rank) for name, x in given.items()}


def _of_rank(name: str, x: np.ndarray, rank: int) -> np.ndarray:
    row = next((row for row in ARRAYS if row.name == name), None)
    if row is None or x.ndim != len(row.axes):  # leading axes are left out already
        return x
    return x.reshape(x.shape[len(row.axes) - len(row.has(rank)) :])


def as_given(name: str, x: np.ndarray, put: Callable[[np.ndarray], Any]) -> Any:
    """An optional array as a call gets it: put where the others are, but for a seed that stands for a number."""
    return int(x) if name == "seed" and x.ndim == 0 else put(x)


def as_arguments(named: dict[str, Any]) -> dict[str, Any]:
    """Arrays as arguments of a call: those that a score function reads in score_arrays."""
    start = "score_arrays['"
    arguments = {name: x for name, x in named.items() if not name.startswith(start)}
    read = {name[len(start) : -2]: x for name, x in named.items() if name.startswith(start)}
    return arguments | ({"score_arrays": read} if read else {})


def as_caller_has_it(x: np.ndarray, rank: int, layout: str) -> np.ndarray:
    if rank == 2:
        return x[0, :, 0]
    x = x if layout == "bshd" else x.swapaxes(1, 2)
    return x if rank == 4 else x[0]


def as_reference_has_it(x: np.ndarray, rank: int, layout: str) -> np.ndarray:
    if rank == 2:
        return x[None, :, None]
    x = x if rank == 4 else x[None]
    return x if layout == "bshd" else x.swapaxes(1, 2)


def _placed(backend: Backend, x: np.ndarray, lay: Lay) -> tuple[Any, Any]:
    """The base array on the backend and the view of it that has the values of x."""
    if lay is CONTIGUOUS:
        return (backend.put(x),) * 2
    host = np.full(lay.around(x.shape), np.nan, x.dtype)
    lay.view(host)[...] = x
    base = backend.put(host)
    return base, lay.view(base)


def _unwritten(backend: Backend, shape: Shape, dtype: str, rank: int, layout: str, lay: Lay) -> tuple[Any, Any]:
    shape = as_caller_has_it(np.empty(shape, bool), rank, layout).shape
    base = backend.nan(lay.around(shape), dtype)
    return base, lay.view(base)


def _assert_untouched_around(host: np.ndarray, lay: Lay) -> None:
    inside = lay.view(host)
    if inside.size == host.size:
        return
    host = host.copy()
    inside = lay.view(host)
    inside[...] = 0
    assert np.isnan(host).sum() == host.size - inside.size, "memory around a result was written"
