"""A call over several ranks, as its plan says: rounds of keys, inside an exchange of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import interop
from ..api import merge
from ..call import Call
from ..gradients import Gradients
from ..namespaces import cast, namespace
from ..passes import BACKWARD, FORWARD, Pass
from .arrays import cut_up, empty, join_up, library, packed, put, taken, wide, zeros
from .asked import Asked, own_rows
from .near import NearHeads, NearKeys, handed
from .parts import Part, Turn
from .rows import Span, joined
from .steps import Deal, deal
from .transfers import ByHeads, FromHeads, Numbers, SentKeys, ToHeads, summed

WINDOW = 1 << 30  # bytes that arrays of a group of heads may take


def _by_heads(asked: Asked, xs: dict[str, Any]) -> list[ByHeads]:
    of_q, of_k = _deals(asked)
    group_of = asked.problem.group if asked.problem.heads_k else 1
    return [
        ByHeads(of_k, 1, x) if name in ("k", "v") else ByHeads(of_q, group_of, _of_rows(name, x))
        for name, x in xs.items()
    ]


def _deals(asked: Asked) -> tuple[Deal, Deal]:
    """Of the rows of queries and of keys."""
    team, first = asked.team, asked.group.rank * asked.team.size
    ranks, heads = range(first, first + team.size), asked.problem.heads_k
    return deal(asked.rows, ranks, heads), deal(asked.key_rows, ranks, heads)


def forward(asked: Asked, out: Any, lse: Any) -> None:
    """Writes out (B, S, H, Dv) and lse (B, H, S) of this rank's rows."""
    part, xs = Part.of(asked), asked.operands
    asked.plain = asked.lasts and _plain(asked, FORWARD)
    if asked.team.size == 1:
        _forward(asked, part, xs, out, lse)
        return

    def run(some: Part, moved: dict[str, Any], into: dict[str, Any]) -> None:
        _forward(asked, some, moved, into["out"], into["lse"])

    _in_heads(asked, part, xs, {"out": out, "lse": lse}, run)


def _plain(asked: Asked, of: Pass) -> bool:
    """Whether calls are a GPU's, and followed by nobody."""
    q = asked.operands["q"]
    lib: Any = interop.library("q", q)
    return (
        lib.on_gpu(q)
        and lib.recorder(Call(lib, of, asked.operands | asked.arrays, asked.options, asked.operands)) is None
    )


_Run = Callable[[Part, dict[str, Any], dict[str, Any]], None]


def _in_heads(asked: Asked, part: Part, xs: dict[str, Any], targets: dict[str, Any], run: _Run) -> None:
    """Hand rows over for heads, `run` with them, and hand its results back."""
    window = getattr(asked.team, "window", None)
    if window is None and part.size == 1:
        _in_heads_sent(asked, part.dealt(asked, 1), xs, targets, run)
        return
    # All teams have the same groups of heads, whichever of them have a window.
    if (most := asked.memo.get("most")) is None:
        count, every = part.heads[1] - part.heads[0], [*_by_heads(asked, xs), *_by_heads(asked, targets)]
        most = asked.memo["most"] = -(-sum(x.nbytes(count) for x in every) // WINDOW)
    groups = part.dealt(asked, most)
    done = _in_heads_near(window, asked, groups, xs, targets, run) if window is not None and most else 0
    if done < len(groups):
        _in_heads_sent(asked, groups[done:], xs, targets, run)


def _in_heads_near(
    window: Any, asked: Asked, groups: Sequence[tuple[Part, Span]], xs: Any, targets: Any, run: _Run
) -> int:
    """Where ranks reach each other's memory, which stays with them: not too much of it. How many groups are done: all,
    or those until it is not to be had."""
    rank, memo = asked.team.rank, asked.memo
    for n, (some, heads) in enumerate(groups):
        if (of := memo.get(heads)) is None:
            arrays, results = (dict(zip(x, _by_heads(asked, x))) for x in (xs, targets))
            of = memo[heads] = handed(rank, arrays, results, heads)
        near = NearHeads(window, rank, of, xs, targets)
        if not near.may:
            return n
        run(some, *near.there())
        near.back()
    return len(groups)


def _in_heads_sent(asked: Asked, groups: Sequence[tuple[Part, Span]], xs: Any, targets: Any, run: _Run) -> None:
    """By messages: those of the next group of heads, and of the one before, travel while one is computed."""
    back: list[FromHeads] = []
    into = [_of_rows(name, x) for name, x in targets.items()]
    sent = _by_heads(asked, xs)
    coming = ToHeads(asked.team, sent, groups[0][1])
    for n, (some, heads) in enumerate(groups):
        here = coming
        if n + 1 < len(groups):
            coming = ToHeads(asked.team, sent, groups[n + 1][1])
        moved = {name: packed(_of_rows(name, x)) for name, x in zip(xs, here.wait())}
        found = _rooms(moved, targets)
        run(some, moved, found)
        back.append(FromHeads(asked.team, _by_heads(asked, found), heads, into))
    for x in back:
        x.wait()


def _rooms(moved: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """For results of all rows of some heads."""
    b, s, h, _ = moved["q"].shape
    found = {}
    for name, x in targets.items():
        if name == "lse":
            found[name] = empty((b, h, s), x)
        else:
            like = moved["q" if name in ("q", "out") else name]
            found[name] = empty((*like.shape[:3], x.shape[3]), x)
    return found


def _forward(asked: Asked, part: Part, xs: dict[str, Any], out: Any, lse: Any) -> None:
    every = part.turns(asked, FORWARD)
    if part.alone:
        put(lse, every[0].calls[0].run(asked, {}, xs, {"out": out})[1])
        return
    queries, merging = {"q": xs["q"]}, asked.stretches > 1
    sums = empty(tuple(out.shape), out, wide(out)) if merging else out
    for (of, keys, _), turns in zip(_keys(asked, part, xs["k"], xs["v"], None, Numbers({}, [[]] * len(every))), every):
        targets, norm = cut_up(taken(sums, turns.heads), turns.rows), taken(lse, turns.of_numbers)
        if of.first:
            runs = zip(turns.calls, keys, targets)
            found = [turn.run(asked, queries, {"k": k, "v": v}, {"out": target})[1] for turn, (k, v), target in runs]
            join_up(norm, found, turns.numbers)
            continue
        for turn, (k, v), target, so_far in zip(turns.calls, keys, targets, cut_up(norm, turns.numbers)):
            more = turn.run(asked, queries, {"k": k, "v": v}, {"out": empty(tuple(target.shape), target)})
            merge([target, more[0]], [so_far, more[1]], out=(target, so_far))
    if merging:
        put(out, sums)


def backward(asked: Asked, dq: Any, dk: Any, dv: Any) -> dict[str, Any]:
    """Writes the gradients of this rank's rows; those of the arrays that `wrt` names, this rank's part of them."""
    part, xs, grads = Part.of(asked), asked.operands, {"q": dq, "k": dk, "v": dv}
    asked.plain = asked.lasts and _plain(asked, BACKWARD)
    like: dict[str, Any] = {}
    of_arrays: dict[str, Any] = {}
    if asked.wrt:
        like = _of_wrt(asked)
        of_arrays = {name: zeros(tuple(x.shape), x, wide(x)) for name, x in like.items() if not _of_one_call(name, x)}
        _widen(asked)
    if asked.team.size == 1:
        _backward(asked, part, xs, grads, of_arrays, like)
    else:

        def run(some: Part, moved: dict[str, Any], into: dict[str, Any]) -> None:
            _backward(asked, some, moved, into, of_arrays, like)

        _in_heads(asked, part, xs, grads, run)
    # (All ranks in one order. Of what is not there no call was about any.)
    of_arrays = {name: of_arrays[name] if name in of_arrays else zeros(tuple(x.shape), x) for name, x in like.items()}
    if asked.reduce:
        for name, x in of_arrays.items():
            if name != "bias" or not _any(asked, own_rows(asked.arrays[name])):  # with rows of its own it is whole
                of_arrays[name] = summed(asked.group, summed(asked.team, x))
    return {name: _rounded(x, like[name]) for name, x in of_arrays.items()}


def _widen(asked: Asked) -> None:
    """Of 16-bit arrays of which several calls have a gradient none is to be rounded: these are given in float32."""
    for name in asked.wrt:
        if (x := asked.arrays.get(name)) is None or not (kind := wide(x)):
            continue
        if not own_rows(x) or (asked.groups > 1 and not _of_one_call(name, x)):
            asked.arrays[name] = cast(x, getattr(namespace(library(x)), kind))


def _backward(
    asked: Asked, part: Part, xs: dict[str, Any], grads: dict[str, Any], of_arrays: dict[str, Any], like: dict[str, Any]
) -> None:
    plan, once = part.turns(asked, BACKWARD), asked.stretches == 1  # a row of dq has all of its keys in one call
    if part.alone:
        turn = plan[0].calls[0]
        found = turn.run(asked, {}, xs, dict(zip(Gradients._fields, grads.values())))
        _put_parts(of_arrays, turn, found.of_arrays, like)
        return
    dq, dk, dv = (grads[x] for x in "qkv")
    if "unseen" not in asked.memo:
        asked.memo["unseen"] = _unseen(part, asked.group.rank, dk.shape[1])
    if asked.memo["unseen"]:
        dk[...] = 0
        dv[...] = 0
    keys_of = _keys(asked, part, xs["k"], xs["v"], (dk, dv), part.numbers(plan, xs))
    of_rows = {name: xs[name] for name in ("q", "dout", "out")}
    for (of, keys, numbers), turns in zip(keys_of, plan):
        if once:
            sums = taken(dq, turns.heads)
        elif of.first:
            sums = empty(tuple(taken(dq, turns.heads).shape), dq, wide(dq))
        own = keys_of.room()
        every = zip(turns.calls, keys, numbers, cut_up(sums, turns.rows), own.parts, of.begun)
        for n, (turn, (k, v), of_queries, of_q, of_keys, begun) in enumerate(every):
            room = of_keys if begun is None else [empty(tuple(x.shape), x) for x in of_keys]
            into = (of_q if of.first else empty(tuple(of_q.shape), sums), *room)
            found = turn.run(asked, of_rows, {"k": k, "v": v} | of_queries, dict(zip(Gradients._fields, into)))
            if not of.first:
                of_q += into[0]
            if begun is not None:
                keys_of.add(n, room)
            _put_parts(of_arrays, turn, found.of_arrays, like)
        if of.last and not once:
            put(taken(dq, turns.heads), sums)
        keys_of.give(own)


def _put_parts(of_arrays: dict[str, Any], turn: Turn, found: dict[str, Any], like: dict[str, Any]) -> None:
    """What a call gives of the gradients of optional arrays."""
    for name, x in found.items():
        if _of_one_call(name, like[name]):
            _put_part(of_arrays, name, turn.places[name], x, like[name])
        else:
            of_arrays[name][turn.places.get(name, ...)] += x


def _unseen(part: Part, rank: int, count: int) -> bool:
    """Whether a row of k is in no call, so that its gradient, zero, comes from none."""
    held = joined(x for of in part.rounds for m in (*of.sends, *of.receives) if m.source == rank for x in m.held)
    return held != ([(0, count)] if count else [])


def _keys(asked: Asked, part: Part, k: Any, v: Any, grads: Any, numbers: Numbers) -> SentKeys | NearKeys:
    """Of each round what its calls have, and where gradients of the keys go."""
    group = asked.group
    window = getattr(group, "window", None)
    if window is not None and part.size > 1 and part.rounds:
        near = NearKeys(window, group.rank, part.rounds, k, v, grads, numbers, asked.memo)
        if near.may:
            return near
    return SentKeys(group, part.rounds, k, v, grads, numbers)


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


def _of_one_call(name: str, x: Any) -> bool:
    """Whether each of its elements has its gradient from a single call: such sums are not wide."""
    return name == "bias" and len(x.shape) >= 3 and min(x.shape[-3:]) > 1


def _put_part(found: dict[str, Any], name: str, place: tuple[slice, ...], x: Any, like: Any) -> None:
    """What one call gives of an array of which no other gives the same elements. All of it is not copied."""
    if name not in found:
        if tuple(x.shape) == tuple(like.shape):
            found[name] = x
            return
        found[name] = zeros(tuple(like.shape), like)
    put(found[name][place], x)


def _rounded(x: Any, like: Any) -> Any:
    if x.dtype == like.dtype:
        return x
    found = empty(tuple(x.shape), like)
    put(found, x)
    return found


def _of_rows(name: str, x: Any) -> Any:
    """A number for each row, (B, H, S), as (B, S, H, 1), and back; others as they are."""
    if name not in ("lse", "dlse"):
        return x
    return x.swapaxes(1, 2)[..., None] if len(x.shape) == 3 else x[..., 0].swapaxes(1, 2)
