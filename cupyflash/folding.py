"""A call on arrays with one axis more, as JAX's and PyTorch's vmap ask for it: that axis becomes part of the batch.

Written once for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .cached import SCALES, of_eight
from .passes import PASSES, PER_QUERY
from .problem import ARRAYS, PLACES, ArrayRule, mask_kind
from .score.graph import folded as folded_score

Arrays = dict[str, Any]
_FOLDED = frozenset(name for x in PASSES.values() for name in x.inputs)
_OPTIONAL = {row.name: row for row in ARRAYS}


def forward(
    xp: Any,
    run: Callable[[Arrays, dict[str, Any]], tuple[Any, Any]],
    arrays: Arrays,
    has: Collection[str],
    size: int,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """out and lse of a call of which the arrays that `has` names have an axis more, of `size` entries, in front; so
    have both.

    `run` is the call with arrays of one rank, and options for them; `xp` is torch or jax.numpy.
    """
    folding = Folding(xp, arrays, has, size, options)
    sinks = arrays["sinks"] if "sinks" in has else None  # they have no batch axis
    out, lse = folding.results(*run(folding.fold(arrays if sinks is None else _without_sinks(arrays)), folding.options))
    return (out, lse) if sinks is None else folding.with_sinks(out, lse, sinks)


def backward(
    xp: Any,
    run: Callable[[Arrays, dict[str, Any], tuple[str, ...]], Sequence[Any]],
    arrays: Arrays,
    has: Collection[str],
    size: int,
    options: dict[str, Any],
    wrt: tuple[str, ...],
) -> list[Any]:
    """As `forward`: the gradients of q, k, v and of what `wrt` names, for each entry its own."""
    folded = tuple([name for name in wrt if name != "sinks"])
    folding = Folding(xp, arrays, has, size, options, folded)
    if "sinks" in has and size:  # no batch axis; lse has them already, but who differentiates this again needs them
        alone = [
            run({x: arrays[x][n] if x in has else arrays[x] for x in arrays}, options, folded) for n in range(size)
        ]
        results = dict(zip(("q", "k", "v", *folded), map(xp.stack, zip(*alone))))
    else:
        given = _without_sinks(arrays) if "sinks" in has else arrays
        results = folding.gradients(run(folding.fold(given), folding.options, folded), given, folded)
    if "sinks" in wrt:
        results["sinks"] = folding.of_sinks(arrays, has)
    return [results[name] for name in ("q", "k", "v", *wrt)]


def jvp(
    xp: Any,
    run: Callable[[Arrays, dict[str, Any]], tuple[Any, Any]],
    arrays: Arrays,
    has: Collection[str],
    size: int,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """As `forward`: the tangents of out and lse."""
    _refuse_sinks(has)
    folding = Folding(xp, arrays, has, size, options)
    return folding.results(*run(folding.fold(arrays), folding.options))


def backward_jvp(
    xp: Any,
    run: Callable[[Arrays, dict[str, Any], tuple[str, ...]], Sequence[Any]],
    arrays: Arrays,
    has: Collection[str],
    size: int,
    options: dict[str, Any],
    wrt: tuple[str, ...],
) -> list[Any]:
    """As `backward`: the tangents of the gradients."""
    _refuse_sinks((*has, *wrt))
    folding = Folding(xp, arrays, has, size, options, wrt)
    return [*folding.gradients(run(folding.fold(arrays), folding.options, wrt), arrays, wrt).values()]


def _base(name: str) -> str:
    """What a tangent is the tangent of, or what that is the tangent of: no array has a name that starts with t but
    these."""
    return name.lstrip("t")


def _refuse_sinks(names: Collection[str]) -> None:
    if "sinks" in map(_base, names):
        raise NotImplementedError(
            "sinks, their tangents or their gradients have an axis of vmap in forward mode or in a second derivative, "
            "and no batch axis that it could become a part of; make a call for each entry (in JAX with jax.lax.map), "
            "without vmap"
        )


def _refuse(arrays: Arrays, options: dict[str, Any]) -> None:
    """What goes by the number of the batch entry, which is another in the folded call."""
    mask, at = mask_kind(options["block_mask"]), options["at"]
    for name, given in (
        ("dropout", options["dropout"]),
        ("block_mask with a batch axis", mask is not None and "batch" in mask.axes),
        ("at with a score function", options["score"] is not None and ("at" in arrays or (at and at[0]))),
    ):
        if given:
            raise NotImplementedError(
                f"{name} is given under vmap, which makes its axis a part of the batch: the numbers of batch entries, "
                "on which it depends, would be others; make that axis the batch, and call without vmap"
            )


def _refuse_packed(arrays: Arrays, has: Collection[str]) -> None:
    """What has no axis of sequences that another could become a part of: packed rows, pools of pages, scales of k and v
    of 8 bits."""
    packed, pools = "pack the sequences of all entries", not {"k", "v"}.isdisjoint(map(_base, has))
    scales = of_eight(arrays["k"]) and not of_eight(arrays["q"])
    for name, refused, what, instead in (
        ("cu_seqlens_q", True, "q is packed", packed),
        ("cu_seqlens_k", True, "k and v are packed", packed),
        ("page_table", pools, "k and v are a pool of pages", "put the pages of all into one pool"),
        *((name, scales, "scales lie as rows of k do", "make that axis the batch") for name in SCALES),
    ):
        if name in arrays and refused:
            raise NotImplementedError(
                f"{name} is given under vmap, which makes its axis a part of the batch: {what}, with no axis of "
                f"sequences for it; {instead}, or make a call for each entry (in JAX with jax.lax.map)"
            )


def _without_sinks(arrays: Arrays) -> Arrays:
    return {name: x for name, x in arrays.items() if name != "sinks"}


class Folding:
    """How the arrays of one call are folded. `rank` is that of q without the new axis.

    `has` names the arrays that have that axis, `wrt` optional arrays of which each entry gets a gradient of its own:
    such an array shall have the batch in full, as shall one whose tangent has the axis, and the tangent of one that has
    it.
    """

    def __init__(
        self,
        xp: Any,
        arrays: Arrays,
        has: Collection[str],
        size: int,
        options: dict[str, Any],
        wrt: tuple[str, ...] = (),
    ) -> None:
        _refuse(arrays, options)
        _refuse_packed(arrays, has)
        self._options, self._has, self._whole = options, has, {*map(_base, has), *wrt}
        self.reads = () if options["score"] is None else options["score"].keys
        q = arrays["q"].shape
        q = q[1:] if "q" in has else q
        self.xp, self.size, self.layout, self.rank = xp, size, options["layout"], len(q)
        self.batch, self._paged = q[0] if self.rank == 4 else 1, "page_table" in arrays

    @property
    def options(self) -> dict[str, Any]:
        """Those of the folded call, where arrays of a score function are read by the new axis, if they have it."""
        score = self._options["score"]
        if score is None:
            return self._options
        names = tuple([name for name in self.reads if name in self._whole])
        return self._options | {"score": folded_score(score, int(self.batch), names)}

    def _expand(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.xp.broadcast_to(x, shape)

    def fold(self, arrays: Arrays) -> Arrays:
        """Every array with the new axis in its batch."""
        return {name: self._one(_base(name), x, name in self._has) for name, x in arrays.items()}

    def _one(self, name: str, x: Any, has: bool) -> Any:
        """`name`: of the array whose tangent it is, if it is one."""
        row, whole = _OPTIONAL.get(name), name in self._whole
        if row is not None and not row.placed:
            return self._optional(row, x, has, whole)
        if name in self.reads:
            x = self._expand(x[None], (self.size, *x.shape)) if whole and not has else x
            if len(x.shape) > 4:
                raise NotImplementedError(
                    f"{name} has {len(x.shape) - 1} dimensions, and vmap makes one more of it; it must have 3 at most "
                    "there"
                )
            return x
        if (name in ("k", "v") and self._paged) or (name == "at" and not has):
            return x  # a pool, of whose pages page_table names those of each; what is the same for all
        if name not in _FOLDED:
            raise NotImplementedError(f"{name} is given, but vmap cannot make it a part of the batch")
        if not has:
            x = self._expand(x[None], (self.size, *x.shape))
        if self.rank == 2:  # the heads that q has not
            at = 1 if name in PER_QUERY or self.layout == "bhsd" else 2
            return x.reshape(*x.shape[:at], 1, *x.shape[at:])
        return x if self.rank == 3 else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def _optional(self, row: ArrayRule, x: Any, has: bool, whole: bool) -> Any:
        axes = row.has(self.rank)
        own = has or whole or row.ragged or (self.rank == 4 and len(x.shape) == len(axes) and x.shape[0] > 1)
        if "batch" not in (PLACES.get(axis, axis) for axis in row.axes) or not own:
            return x  # stands for the whole batch
        shape = x.shape[1:] if has else x.shape
        shape = (1,) * (len(axes) - len(shape)) + tuple(shape)
        x = x.reshape(x.shape[0] if has else 1, *shape)
        batch = (self.batch,) if self.rank == 4 else ()
        rest = shape[len(batch) :]
        x = self._expand(x, (self.size, *batch, *rest))
        heads = (1,) if self.rank == 2 and any(PLACES.get(axis, axis) == "head" for axis in row.axes) else ()
        return x.reshape(self.size * math.prod(batch), *heads, *rest)

    def unfold(self, name: str, x: Any) -> Any:
        """A result of the folded call, or the gradient of q, k or v, with the new axis in front."""
        if self.rank == 4:
            return x.reshape(self.size, self.batch, *x.shape[1:])
        if self.rank == 3:
            return x
        at = 1 if name == "lse" or self.layout == "bhsd" else 2
        return x.reshape(*x.shape[:at], *x.shape[at + 1 :])

    def results(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """out and lse of the folded call, or their tangents, with the new axis in front."""
        return self.unfold("out", out), self.unfold("lse", lse)

    def gradients(self, grads: Sequence[Any], arrays: Arrays, wrt: tuple[str, ...]) -> Arrays:
        """Those of the folded call, or their tangents, of q, k, v and of what `wrt` names, with the new axis in
        front."""
        found = {name: self.unfold(name, x) for name, x in zip("qkv", grads)}
        for name, x in zip(wrt, grads[3:]):
            shape = tuple(arrays[name].shape)
            own = shape[1:] if name in self._has else shape
            found[name] = x if name in self.reads else self.unfold_gradient(x, own)
        return found

    def unfold_gradient(self, x: Any, shape: tuple[int, ...]) -> Any:
        """The gradient of an optional array that was folded whole, with the new axis in front of its own `shape`."""
        if self.rank == 4:
            x = x.reshape(self.size, self.batch, *x.shape[1:])
            if len(shape) < len(x.shape) - 1 or shape[0] == 1:
                x = x.sum(1)
        return x.reshape(self.size, *shape)

    def with_sinks(self, out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
        """out and lse of a call without sinks, both with the new axis in front, as they are with `sinks`, which have it
        too.

        They have no batch axis to be folded into: softmax over one score more is out · exp(lse - lse'), where lse' has
        it.
        """
        where = self.xp.where
        sinks = self._like(self._over_rows(sinks), lse)
        sinks = where(sinks == -math.inf, -math.inf, sinks)  # these have no gradient
        unseen = lse == -math.inf
        lse = where(unseen, 0.0, lse)  # derivatives go through both branches: none may compute inf - inf
        total = self.xp.logaddexp(lse, sinks)
        weight = where(unseen, 0.0, self.xp.exp(lse - total))
        return self._like(self._like(out, lse) * self._over_out(weight), out), where(unseen, sinks, total)

    def of_sinks(self, arrays: Arrays, has: Collection[str]) -> Any:
        """The gradient of sinks, with the new axis in front: Σ exp(sink - lse) (dlse - rowsum(dout · out)) over a
        head's rows."""
        given = {name: arrays[name] for name in ("sinks", "lse", "out", "dout", "dlse") if name in arrays}
        full = {name: x if name in has else self._expand(x[None], (self.size, *x.shape)) for name, x in given.items()}
        where, lse, sinks, out = self.xp.where, full["lse"], full["sinks"], full["out"]
        unseen = lse == -math.inf
        # A query that sees no key has an out of 0, and a dout that may hold anything.
        dout = where((out != 0).any(-1)[..., None], full["dout"], 0.0)
        delta = (self._like(dout, lse) * self._like(out, lse)).sum(-1)
        if self.layout == "bshd" and self.rank > 2:
            delta = delta.swapaxes(-1, -2)
        slope = where(unseen, 0.0, full["dlse"]) - delta if "dlse" in full else -delta
        weight = self.xp.exp(self._like(self._over_rows(sinks), lse) - where(unseen, math.inf, lse))
        terms = (weight * slope).sum(-1)
        terms = terms.sum(1) if self.rank == 4 else terms
        if math.prod(sinks.shape) < math.prod(terms.shape):  # one stands for all heads
            terms = terms.sum(-1)
        return self._like(terms.reshape(sinks.shape), sinks)

    def _over_rows(self, sinks: Any) -> Any:
        """Sinks with the new axis in front, so that they broadcast over lse."""
        heads = (tuple(sinks.shape[1:]) or (1,)) if self.rank > 2 else ()
        return sinks.reshape(self.size, *(1,) * (self.rank == 4), *heads, 1)

    @staticmethod
    def _like(x: Any, y: Any) -> Any:
        """x in the dtype of y."""
        return x.to(y.dtype) if hasattr(x, "to") else x.astype(y.dtype)  # PyTorch's name for it

    def _over_out(self, weight: Any) -> Any:
        """A weight for each row, shaped like lse, so that it broadcasts over out."""
        return (weight.swapaxes(-1, -2) if self.layout == "bshd" and self.rank > 2 else weight)[..., None]
