"""One sequence over the devices of a mesh, inside `jax.shard_map`.

from cupyflash.jax import parallel
from cupyflash.parallel import Rows

rows = Rows.zigzag(length, mesh.shape["sp"])
out = parallel.attention(q, k, v, axis="sp", rows=rows, causal=True)     # q, k, v, out: this rank's rows

All ranks run one program, which reads where its rows stand: `jax.lax.axis_index` says who it is. What travels are
collectives of XLA's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from .. import api, interop
from ..interop.jax_passes import alike
from ..parallel.arrays import SIXTEEN, four
from ..parallel.asked import Asked, check, usual_exchange
from ..parallel.groups import Alone
from ..parallel.rows import Rows, Span
from ..problem import ARRAY_RULES, ARRAYS
from ..scalars import check_flag
from ..score.graph import name_of

__all__ = ["attention"]

_OPTIONAL = tuple(row.name for row in ARRAYS if not row.placed)
Arrays = dict[str, Any]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str | tuple[str, str],
    rows: Rows,
    key_rows: Rows | None = None,
    exchange: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`cupyflash.jax.attention` of a sequence whose rows the ranks along an axis of a mesh hold: inside `shard_map`.

    Under jit, grad, scan and remat; there is no derivative in forward mode and no second one. Only this rank's rows are
    kept for the backward. Gradients of what all ranks share (slopes, sinks, score_arrays) are summed over them by
    `shard_map`, as those of other weights.

    Parameters
    ----------
    q : (B, own rows, Hq, D)
    k, v : (B, own rows, Hk, D), (B, own rows, Hk, Dv)
        This rank's rows, as `rows` says, in the ranks and layouts that `attention` takes.
    axis : str, or (str, str)
        Of the mesh. Two: (heads, keys): ranks along the first get some heads of all their rows, those along the second
        the keys of all. Rank n of `rows` is then keys * size of heads + heads: PartitionSpec((keys, heads)) of rows.
    rows, key_rows : cupyflash.parallel.Rows
        Who holds which queries, and which keys (default: the same): all ranks as many.
    exchange : "keys", "heads", optional
        "keys": each rank gets all keys (`all_gather`), and dk and dv go back in float32 or float64 (`psum_scatter`).
        "heads": each gets all rows of some heads (`all_to_all`). Default: "heads" where the key heads can be dealt out
        and no mask or bias has rows of its own.
    return_lse : bool
    options : as of `cupyflash.parallel.attention`, but for block_mask, groups and stretches
        They mean what they mean for the whole. Batch entries (b of a score function, dropout) are counted from 0 in
        each part of a batch that is shared out over another axis.

    Returns
    -------
    out : (B, own rows, Hq, Dv)
    lse : (B, Hq, own rows), only with return_lse=True

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be, while the call is traced; outside `shard_map`.
    """
    check_flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a jax.Array")
    if options.get("block_mask") is not None:
        raise ValueError("block_mask is given; parallel.attention does not take it in JAX, it must be None: use mask")
    for name in ("groups", "stretches"):
        if options.pop(name, None) is not None:
            raise ValueError(f"{name} is given; parallel.attention does not take it in JAX, it must be left out")
    axes = _axes(axis, exchange, options, k, rows)
    arrays = {"q": q, "k": k, "v": v} | {x: options.pop(x) for x in _OPTIONAL if options.get(x) is not None}
    if isinstance(arrays.get("seed"), Integral):
        options["seed"] = arrays.pop("seed")
    reads = options.pop("score_arrays", None) or {}
    if not isinstance(reads, Mapping):
        raise TypeError(f"score_arrays is a {type(reads).__name__}; it must be a dict of arrays, by name")
    reads = dict(reads)
    lib: Any = interop.library("q", q)
    arrays, reads = interop.adopted(lib, arrays), interop.adopted(lib, reads)
    asked = _checked(arrays, reads, options, axes, rows, key_rows)
    cast = alike([*arrays.values(), *reads.values()])
    given, reads = dict(zip(arrays, cast)), dict(zip(reads, cast[len(arrays) :]))
    for name in "qkv":
        given[name] = four(given[name], asked.layout)
    out, lse = _attention(given, reads, asked, axes, options)
    out = out.swapaxes(1, 2) if asked.layout == "bhsd" and q.ndim > 2 else out
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    return (out, lse.reshape(lse.shape[4 - max(q.ndim, 3) :] if q.ndim > 2 else lse.shape[2:])) if return_lse else out


class _Axes(NamedTuple):
    """Names of axes of the mesh, or None, and how many ranks each has."""

    heads: str | None
    keys: str | None
    of_heads: int = 1
    of_keys: int = 1


class _Some(Alone):
    """The first of some ranks, in whose place the arguments are checked: all are given the same."""

    def __init__(self, size: int) -> None:
        self.size = size


def _axes(axis: Any, exchange: Any, given: dict[str, Any], k: Any, rows: Any) -> _Axes:
    names = axis if isinstance(axis, tuple) else (axis,)
    if not 1 <= len(names) <= 2 or not all(isinstance(x, str) for x in names) or len({*names}) < len(names):
        raise TypeError(f"axis is {axis!r}; it must be the name of an axis of the mesh, or two: (heads, keys)")
    sizes = []
    for name in names:
        try:
            sizes.append(int(jax.lax.psum(1, name)))
        except NameError:
            raise ValueError(
                f"axis is {axis!r}, but there is no axis {name!r} here; it must be one of the mesh, inside shard_map"
            ) from None
    if len(names) == 2:
        if exchange is not None:
            raise ValueError(f"exchange is {exchange!r}, and axis holds two; with (heads, keys) it must be None")
        return _Axes(*names, *sizes)
    if exchange not in (None, "keys", "heads"):
        raise ValueError(f"exchange is {exchange!r}; it must be 'keys', 'heads' or None")
    if usual_exchange(_Some(sizes[0]), exchange, given, k, rows) == "heads":
        return _Axes(names[0], None, sizes[0], 1)
    return _Axes(None, names[0], 1, sizes[0])


def _checked(arrays: Arrays, reads: Arrays, options: dict[str, Any], axes: _Axes, rows: Any, key_rows: Any) -> Asked:
    """What `parallel.attention` makes of the same; of the arrays shapes and dtypes are asked."""
    for name, x in (("rows", rows), ("key_rows", key_rows)):
        counts = [x.count(r) for r in range(x.size)] if isinstance(x, Rows) else []
        if len({*counts}) > 1:
            raise ValueError(
                f"{name} holds {min(counts)} rows of one rank and {max(counts)} of another; inside shard_map all must "
                "hold as many"
            )
    plan = {"rows": rows, "key_rows": key_rows, "exchange": None, "groups": None, "stretches": None}
    found = []

    def checked(arrays: Arrays, reads: Arrays) -> None:
        operands = {name: arrays[name] for name in "qkv"}
        given = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "seed")} | options
        if "seed" in arrays:  # looked at where it is used
            given["seed"] = 0
        if reads:
            given["score_arrays"] = reads
        group = (_Some(axes.of_heads), _Some(axes.of_keys))
        found.append(check("attention", group, operands, plan, given))

    jax.eval_shape(checked, arrays, reads)
    return found[0]


@dataclass(frozen=True)
class _Places:
    """Where the rows of each rank along the axis of keys stand, once heads are dealt out."""

    order: np.ndarray  # (ranks, rows): how a rank's rows are to be taken, so that they rise
    parts: list[Span]  # of a rank's rows, each of neighbours in the whole, whichever rank it is
    begins: np.ndarray  # (ranks, parts): where they begin there

    @classmethod
    def of(cls, rows: Rows, axes: _Axes) -> _Places:
        n = axes.of_heads
        held = [np.concatenate([rows.positions(t * n + m) for m in range(n)]) for t in range(axes.of_keys)]
        order = np.stack([np.argsort(x) for x in held])
        spans = [[own for _, own in rows.together(n).local(t)] for t in range(axes.of_keys)]
        ends = sorted({0, held[0].size, *(x for some in spans for own in some for x in own)})
        parts = list(itertools.pairwise(ends)) or [(0, 0)]
        firsts = [[int(x[some[a]]) if x.size else 0 for a, _ in parts] for x, some in zip(held, order)]
        return cls(order, parts, np.array(firsts, np.int32))


def _attention(given: Arrays, reads: Arrays, asked: Asked, axes: _Axes, options: dict[str, Any]) -> tuple[Any, Any]:
    """out (B, S, H, D) and lse (B, H, S): heads are dealt out, and back, around an exchange of keys."""
    places = _Places.of(asked.rows, axes)
    how = _How(asked, axes, places, {x: y for x, y in options.items() if x != "layout"})
    if axes.of_heads == 1:
        return how.exchanged(given, reads)
    assert axes.heads is not None
    order = _own(places.order, axes)
    q, k, v = (jax.lax.all_to_all(given[x], axes.heads, split_axis=2, concat_axis=1, tiled=True) for x in "qkv")
    dealt = {name: _own_heads(name, x, asked.problem.heads_q, axes) for name, x in given.items() if name not in "qkv"}
    out, lse = how.exchanged(dealt | {"q": q[:, order], "k": k, "v": v}, reads)
    back = jnp.argsort(order)
    out, lse = out[:, back], lse[:, :, back]
    out = jax.lax.all_to_all(out, axes.heads, split_axis=1, concat_axis=2, tiled=True)
    return out, jax.lax.all_to_all(lse, axes.heads, split_axis=2, concat_axis=1, tiled=True)


def _own(table: np.ndarray, axes: _Axes) -> Any:
    """This rank's row of a table, along the axis of keys."""
    return table[0] if axes.keys is None else jnp.asarray(table)[jax.lax.axis_index(axes.keys)]


def _own_heads(name: str, x: Any, heads: int, axes: _Axes) -> Any:
    """Those that this rank has of an optional array."""
    known = ARRAY_RULES[name].axes if name in ARRAY_RULES else ()
    own = known[len(known) - x.ndim :]
    if "head" not in own or x.shape[own.index("head")] == 1:
        return x
    count = heads // axes.of_heads
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes.heads) * count, count, own.index("head"))


@dataclass(frozen=True)
class _How:
    """A call but for its arrays."""

    asked: Asked
    axes: _Axes
    places: _Places
    options: dict[str, Any]

    def exchanged(self, given: Arrays, reads: Arrays) -> tuple[Any, Any]:
        """out and lse of queries with the keys of all ranks along the axis of keys."""
        call: Any = jax.custom_vjp(self.forward)
        call.defvjp(self._kept, self._backward)
        return call(given, reads)

    def forward(self, given: Arrays, reads: Arrays) -> tuple[Any, Any]:
        k, v = self._gathered(given["k"]), self._gathered(given["v"])

        found = []
        for part, at in zip(self.places.parts, self._stand()):
            options = self._options(given, reads, at, part)
            found.append(api.attention(given["q"][:, slice(*part)], k, v, return_lse=True, **options))
        return jnp.concatenate([x for x, _ in found], 1), jnp.concatenate([x for _, x in found], 2)

    def _kept(self, given: Arrays, reads: Arrays) -> Any:
        out, lse = self.forward(given, reads)
        return (out, lse), (given, reads, out, lse)

    def _backward(self, kept: Any, cotangents: Any) -> tuple[Arrays, Arrays]:
        given, reads, out, lse = kept
        k, v, (dout, dlse) = self._gathered(given["k"]), self._gathered(given["v"]), cotangents
        names = [x for x in given if x not in ("q", "k", "v") and ARRAY_RULES[x].gradient]
        of_reads = [x for x, y in reads.items() if jnp.issubdtype(y.dtype, jnp.floating)]
        own = [x for x in names if self._has_rows(x, given[x])]
        # So that no part of a sum is rounded to 16 bits.
        wide = {x: _wide(y) if x in names and x not in own else y for x, y in given.items()}
        wide_reads = {x: _wide(y) if x in of_reads else y for x, y in reads.items()}
        sums_in = "float32" if str(given["q"].dtype) in SIXTEEN else None
        parts: list[Arrays] = []
        for part, at in zip(self.places.parts, self._stand()):
            rows = slice(*part)
            found = api.attention_backward(
                dout[:, rows], given["q"][:, rows], k, v, out[:, rows], lse[:, :, rows], dlse=dlse[:, :, rows],
                wrt=[*names, *of_reads], out_dtype=sums_in, **self._options(wide, wide_reads, at, part),
            )  # fmt: skip
            parts.append({"q": found.dq, "k": found.dk, "v": found.dv} | found.of_arrays)
        whole = [x for x in parts[0] if x not in ("q", *own)]
        sums = {x: sum((y[x] for y in parts[1:]), parts[0][x]) for x in whole}
        sums |= {x: jnp.concatenate([y[x] for y in parts], 1 if x == "q" else -2) for x in ("q", *own)}
        sums |= {name: self._returned(sums[name]) for name in "kv"}
        grads = {x: sums[x].astype(y.dtype) if x in sums else None for x, y in given.items()}
        by_name = {name_of(x): y for x, y in sums.items()}
        return grads, {x: by_name[x].astype(y.dtype) if x in of_reads else None for x, y in reads.items()}

    def _options(self, given: Arrays, reads: Arrays, at: Any, part: Span) -> dict[str, Any]:
        """Of a part of this rank's rows."""
        arrays = {
            name: x[..., slice(*part), :] if self._has_rows(name, x) else x
            for name, x in given.items()
            if name not in ("q", "k", "v")
        }
        more = {"score_arrays": reads} if reads else {}
        return self.options | arrays | more | {"at": at}

    def _stand(self) -> list[Any]:
        """Where the parts of this rank's rows stand: for each four integers, or an array of them that is read where the
        call runs."""
        axes, problem, (q_shift, k_shift) = self.axes, self.asked.problem, self.asked.shift
        numbered = axes.of_heads > 1 and (problem.dropout > 0 or problem.score is not None)  # else heads have no number
        if axes.of_keys == 1 and not numbered:
            return [(0, 0, int(x) + q_shift, k_shift) for x in self.places.begins[0]]
        begins = _own(self.places.begins, axes)
        head = jax.lax.axis_index(axes.heads) * (problem.heads_q // axes.of_heads) if numbered else 0
        places = [(0, head, x + q_shift, k_shift) for x in begins]
        return [jnp.stack([jnp.asarray(x, jnp.int32) for x in place]) for place in places]

    def _has_rows(self, name: str, x: Any) -> bool:
        return "query" in ARRAY_RULES[name].axes and x.ndim > 1 and x.shape[-2] > 1

    def _gathered(self, x: Any) -> Any:
        """The keys of all ranks, in the order of the whole."""
        if self.axes.keys is not None and x.size:  # XLA gathers no axis without numbers
            x = jax.lax.all_gather(x, self.axes.keys, axis=1, tiled=True)
        return _taken(x, self._order_of_keys())

    def _returned(self, x: Any) -> Any:
        """To each rank the sum of its keys' gradients."""
        x = _taken(x, np.argsort(self._order_of_keys()))
        if self.axes.keys is None or not x.size:
            return x
        return jax.lax.psum_scatter(x, self.axes.keys, scatter_dimension=1, tiled=True)

    def _order_of_keys(self) -> np.ndarray:
        rows = self.asked.key_rows
        return np.argsort(np.concatenate([rows.positions(r) for r in range(rows.size)]))


def _taken(x: Any, order: np.ndarray) -> Any:
    return x if np.array_equal(order, np.arange(order.size)) else x[:, order]


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if str(x.dtype) in SIXTEEN else x
