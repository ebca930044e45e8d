"""A call over several ranks, as its plan says: rounds of keys, inside an exchange of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..api import attention, attention_backward, merge
from .arrays import empty, put, wide, zeros
from .asked import Asked, index, own_rows
from .rows import Rows, Span
from .steps import Deal, Round, Step, deal, rounds
from .transfers import Keys, Returns, from_heads, summed, to_heads


@dataclass
class Part:
    """What a rank has once heads are dealt out: rows of its team, and some heads."""

    asked: Asked
    rows: Rows
    key_rows: Rows
    heads: Span  # of the keys, among all

    @classmethod
    def of(cls, asked: Asked) -> Part:
        size, heads = asked.team.size, asked.problem.heads_k
        if size == 1:
            return cls(asked, asked.rows, asked.key_rows, (0, heads))
        first = asked.team.rank * (heads // size)
        return cls(asked, asked.rows.together(size), asked.key_rows.together(size), (first, first + heads // size))

    @property
    def group_of(self) -> int:
        """Query heads of a key head."""
        return self.asked.problem.group if self.asked.problem.heads_k else 1

    def rounds(self) -> list[Round]:
        asked = self.asked
        return rounds(
            self.rows, self.key_rows, asked.sight, asked.group.rank, self.heads[1] - self.heads[0],
            groups=asked.groups, stretches=asked.stretches, block=asked.block,
        )  # fmt: skip

    def query_heads(self, of: Round) -> slice:
        """Of a round, among those that the rank has."""
        return slice(of.heads[0] * self.group_of, of.heads[1] * self.group_of)

    def options(self, of: Round, step: Step) -> tuple[dict[str, Any], dict[str, tuple[slice, ...]]]:
        """Of a step, and where its part of each optional array stands."""
        asked, (q_shift, k_shift) = self.asked, self.asked.shift
        first = (self.heads[0] + of.heads[0]) * self.group_of
        heads = (first, first + (of.heads[1] - of.heads[0]) * self.group_of)
        places = {
            name: index(name, tuple(x.shape), heads, step.local, step.keys)
            for name, x in asked.arrays.items()
            if name != "sinks" or of.first  # one score more, once
        }
        options = asked.options | {name: asked.arrays[name][place] for name, place in places.items()}
        options["at"] = (0, first, step.rows[0] + q_shift, step.keys[0] + k_shift)
        if asked.mask is not None and step.keys[1] > step.keys[0]:
            options["block_mask"] = asked.mask.own.part(step.local, step.keys, heads)
        return options, places

    def deals(self) -> tuple[Deal, Deal]:
        """Of the rows of queries and of keys."""
        team, first = self.asked.team, self.asked.group.rank * self.asked.team.size
        ranks, heads = range(first, first + team.size), self.asked.problem.heads_k
        return deal(self.asked.rows, ranks, heads), deal(self.asked.key_rows, ranks, heads)


def forward(asked: Asked, out: Any, lse: Any) -> None:
    """Writes out (B, S, H, Dv) and lse (B, H, S) of this rank's rows."""
    part, (q, k, v) = Part.of(asked), (asked.operands[x] for x in "qkv")
    if asked.team.size == 1:
        _forward(part, q, k, v, out, lse)
        return
    of_q, of_k = part.deals()
    (q,) = to_heads(asked.team, of_q, part.group_of, [q])
    k, v = to_heads(asked.team, of_k, 1, [k, v])
    own, own_lse = empty((*q.shape[:3], out.shape[3]), out), empty((q.shape[0], q.shape[2], q.shape[1]), lse)
    _forward(part, q, k, v, own, own_lse)
    from_heads(asked.team, of_q, part.group_of, [own], [out])
    from_heads(asked.team, of_q, part.group_of, [_as_rows(own_lse)], [_as_rows(lse)])


def _forward(part: Part, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    merging = part.asked.stretches > 1
    sums = empty(tuple(out.shape), out, wide(out)) if merging else out
    for of, k_of, v_of in _rounds(part, k, v):
        heads = part.query_heads(of)
        for step in of.steps:
            options, _ = part.options(of, step)
            rows, keys = slice(*step.local), slice(*step.here)
            qi, target, norm = q[:, rows, heads], sums[:, rows, heads], lse[:, heads, rows]
            operands = (qi, k_of[:, keys], v_of[:, keys])
            if of.first:
                _, found = attention(*operands, return_lse=True, out=target, **options)
            else:
                more, found = attention(*operands, return_lse=True, out=empty(tuple(target.shape), target), **options)
                more, found = merge([target, more], [norm, found])
                put(target, more)
            put(norm, found)
    if merging:
        put(out, sums)


def backward(asked: Asked, dq: Any, dk: Any, dv: Any) -> dict[str, Any]:
    """Writes the gradients of this rank's rows; those of the arrays that `wrt` names, this rank's part of them."""
    part = Part.of(asked)
    names: list[str] = [x for x in ("q", "dout", "out", "k", "v", "lse", "dlse") if x in asked.operands]
    xs = {name: asked.operands[name] for name in names}
    of_arrays = {name: zeros(tuple(x.shape), x, wide(x)) for name, x in _of_wrt(asked).items()}
    if asked.team.size == 1:
        _backward(part, xs, (dq, dk, dv), of_arrays)
    else:
        of_q, of_k = part.deals()
        of_queries = [name for name in names if name not in ("k", "v")]
        given = [_as_rows(xs[x]) if x in ("lse", "dlse") else xs[x] for x in of_queries]
        found = to_heads(asked.team, of_q, part.group_of, given)
        moved = {n: _as_rows(x) if n in ("lse", "dlse") else x for n, x in zip(of_queries, found)}
        moved |= zip("kv", to_heads(asked.team, of_k, 1, [xs["k"], xs["v"]]))
        grads = tuple(empty(tuple(moved[x].shape), moved[x]) for x in "qkv")
        _backward(part, moved, grads, of_arrays)
        from_heads(asked.team, of_q, part.group_of, [grads[0]], [dq])
        from_heads(asked.team, of_k, 1, list(grads[1:]), [dk, dv])
    if asked.reduce:
        for name, x in of_arrays.items():
            if name != "bias" or not _any(asked, own_rows(asked.arrays[name])):  # with rows of its own it is whole
                of_arrays[name] = summed(asked.group, summed(asked.team, x))
    return {name: _rounded(x, _of_wrt(asked)[name]) for name, x in of_arrays.items()}


def _backward(part: Part, xs: dict[str, Any], grads: Any, of_arrays: dict[str, Any]) -> None:
    asked = part.asked
    dq, dk, dv = grads
    wide_q, wide_k, wide_v = (x if wide(x) is None else empty(tuple(x.shape), x, wide(x)) for x in grads)
    for x in (wide_q, wide_k, wide_v):
        x[...] = 0
    returns: list[Returns] = []
    for of, k_of, v_of in _rounds(part, xs["k"], xs["v"]):
        heads = part.query_heads(of)
        own = tuple(zeros(tuple(x.shape), x, wide(x)) for x in (k_of, v_of))
        for step in of.steps:
            options, places = part.options(of, step)
            rows, keys = slice(*step.local), slice(*step.here)
            of_q = {n: x[:, heads, rows] if n in ("lse", "dlse") else x[:, rows, heads]
                for n, x in xs.items() if n not in ("k", "v")}  # fmt: skip
            found = attention_backward(
                of_q["dout"], of_q["q"], k_of[:, keys], v_of[:, keys], of_q["out"], of_q["lse"],
                dlse=of_q.get("dlse"), grads=(wide_q[:, rows, heads], own[0][:, keys], own[1][:, keys]), add=True,
                wrt=[_called(x) for x in asked.wrt if x != "sinks" or of.first], **options,
            )  # fmt: skip
            for name, x in found.of_arrays.items():
                of_arrays[name][places.get(name, ...)] += x
        returns.append(Returns(asked.group, of, own))
        if len(returns) > 1:  # these travelled while the last was computed
            returns.pop(0).add_to(wide_k, wide_v)
    for x in returns:
        x.add_to(wide_k, wide_v)
    for target, x in zip((dq, dk, dv), (wide_q, wide_k, wide_v)):
        if target is not x:
            put(target, x)


def _rounds(part: Part, k: Any, v: Any) -> Iterator[tuple[Round, Any, Any]]:
    """Each with its keys; those of the next travel meanwhile."""
    plan, group = part.rounds(), part.asked.group
    under_way = Keys(group, plan[0], k, v) if plan else None
    for n, of in enumerate(plan):
        assert under_way is not None
        here = under_way
        under_way = Keys(group, plan[n + 1], k, v) if n + 1 < len(plan) else None
        yield (of, *here.wait())


def _of_wrt(asked: Asked) -> dict[str, Any]:
    """The arrays whose gradients are wanted, by their names among those of a call."""
    reads = asked.options["score_arrays"] or {}
    return {x: asked.arrays[x] if x in asked.arrays else reads[_called(x)] for x in asked.wrt}


def _called(name: str) -> str:
    """What a user calls an array that a score function reads."""
    from ..score.graph import name_of

    return name_of(name) or name


def _any(asked: Asked, flag: bool) -> bool:
    """Whether it is so on some rank."""
    for group in (asked.team, asked.group):
        flag = bool(group.all_gather(np.array([flag], np.uint8)).any())
    return flag


def _rounded(x: Any, like: Any) -> Any:
    if x.dtype == like.dtype:
        return x
    found = empty(tuple(x.shape), like)
    put(found, x)
    return found


def _as_rows(x: Any) -> Any:
    """A number for each row, (B, H, S), as (B, S, H, 1), and back."""
    return x.swapaxes(1, 2)[..., None] if len(x.shape) == 3 else x[..., 0].swapaxes(1, 2)
