"""A call over several ranks, as its plan says: rounds of keys, inside an exchange of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import dispatch, interop
from ..api import merge, trace_score
from ..call import Arrays, Call
from ..gradients import Gradients
from ..namespaces import cast, namespace
from ..passes import BACKWARD, FORWARD, PER_QUERY, Pass
from ..problem import complete
from .arrays import Cuts, Place, add_to, cut_up, cuts, empty, join_up, library, place, put, taken, wide, zeros
from .asked import Asked, index, own_rows
from .near import NearHeads, NearKeys, handed
from .rows import Rows, Span, cut, joined
from .steps import Deal, Round, Step, deal, rounds
from .transfers import ByHeads, FromHeads, Numbers, SentKeys, Sums, ToHeads, summed

WINDOW = 1 << 30  # bytes that arrays of a group of heads may take


class Turn(NamedTuple):
    """A call of a round, as all calls of a kind make it."""

    call: Call  # but for what it is given
    step: Step
    heads: Span  # of queries, among all
    places: dict[str, tuple[slice, ...]]  # of its part of each optional array

    def run(self, asked: Asked, arrays: Arrays, targets: Arrays) -> Any:
        """With arrays of the pass, optional ones aside."""
        options, score = self.call.options, self.call.options["score"]
        arrays |= {name: asked.arrays[name][at] for name, at in self.places.items()}
        if self.call.seed is None and (seed := asked.options["seed"]) is not None:
            arrays["seed"] = seed
        if score is not None:
            arrays |= {key: asked.options["score_arrays"][x.name] for key, x in zip(score.keys, score.arrays)}
        if asked.mask is not None and self.step.keys[1] > self.step.keys[0]:
            options = options | {"block_mask": asked.mask.part(self.step.local, self.step.keys, self.heads)}
        call = self.call.but(arrays=arrays, options=options, targets=targets)
        return (call.lib.recorder(call) or dispatch.run)(call)


class Turns(NamedTuple):
    """Those of a round."""

    calls: list[Turn]
    rows: Cuts  # of queries, (B, S, H, D), of the heads at a place
    heads: Place | None
    numbers: Cuts  # of those of them, (B, H, S)
    of_numbers: Place | None
    places: list[Place | None]  # of each call's numbers


@dataclass
class Part:
    """What a rank has once heads are dealt out: rows of its team, and some heads."""

    asked: Asked
    rows: Rows
    key_rows: Rows
    heads: Span  # of the keys, among all
    groups: int

    @classmethod
    def of(cls, asked: Asked) -> Part:
        size = asked.team.size
        heads = asked.problem.heads_k // size
        first = asked.team.rank * heads
        if "together" not in asked.memo:
            of_both = asked.rows, asked.key_rows
            asked.memo["together"] = [x if size == 1 else x.together(size) for x in of_both]
        rows, key_rows = asked.memo["together"]
        return cls(asked, rows, key_rows, (first, first + heads), asked.groups)

    @property
    def group_of(self) -> int:
        """Query heads of a key head."""
        return self.asked.problem.group if self.asked.problem.heads_k else 1

    def dealt(self, most: int) -> list[tuple[Part, Span]]:
        """In which groups heads are handed over, at least `most` or as many as there are, and which of the rank's they
        are. Where keys travel too, theirs come in groups."""
        first, last = self.heads
        groups = min(max(most, 1 if self.asked.group.size > 1 else self.groups), max(1, last - first))
        own = self.groups if self.asked.group.size > 1 else 1
        return [
            (Part(self.asked, self.rows, self.key_rows, (first + a, first + b), min(own, b - a)), (a, b))
            for a, b in self.kept(("dealt", groups), lambda: cut(last - first, groups))
        ]

    def rounds(self) -> Sequence[Round]:
        asked = self.asked
        of = self.rows, self.key_rows, asked.sight, asked.group.rank, self.heads[1] - self.heads[0]
        how = {"groups": self.groups, "stretches": asked.stretches, "block": asked.block}
        return self.kept("rounds", lambda: rounds(*of, **how))

    def kept(self, name: Any, make: Callable[[], Any]) -> Any:
        """What is the same in all calls of a kind."""
        memo, key = self.asked.memo, (name, self.heads, self.groups)
        if key not in memo:
            memo[key] = make()
        return memo[key]

    def turns(self, of: Pass) -> Sequence[Turns]:
        """Of each round."""
        return self.kept(("turns", of.name), lambda: [self._turns(of, x) for x in self.rounds()])

    def _turns(self, of: Pass, round_: Round) -> Turns:
        asked, (q_shift, k_shift), count = self.asked, self.asked.shift, self.rows.count(self.asked.group.rank)
        heads = round_.heads[0] * self.group_of, round_.heads[1] * self.group_of
        first, of_rank = self.heads[0] * self.group_of, (heads, (self.heads[1] - self.heads[0]) * self.group_of)
        among_all, found = (first + heads[0], first + heads[1]), []
        lib, options = interop.library("q", asked.operands["q"]), complete(asked.options)
        if options["score"] is not None:
            trace_score(lib, {"q": asked.operands["q"]}, options, asked.options["score_arrays"])
        seed, wrt = asked.options["seed"], tuple([x for x in asked.wrt if x != "sinks" or round_.first])
        for step in round_.steps:
            at = (0, among_all[0], step.rows[0] + q_shift, step.keys[0] + k_shift)
            call = Call(
                lib, of, {}, options | {"at": at}, seed=None if hasattr(seed, "shape") else seed,
                family=asked.options["family"], return_lse=of is FORWARD, wrt=wrt,
            )  # fmt: skip
            places = {
                name: index(name, tuple(x.shape), among_all, step.local, step.keys)
                for name, x in asked.arrays.items()
                if name != "sinks" or round_.first  # one score more, once
            }
            found.append(Turn(call, step, among_all, places))
        spans, all_rows = [x.local for x in round_.steps], ((0, count), count)
        return Turns(
            found, cuts(1, spans, count), place(all_rows, of_rank), cuts(2, spans, count), place(of_rank, all_rows),
            [place(of_rank, (x, count)) for x in spans],
        )  # fmt: skip

    def numbers(self, xs: dict[str, Any]) -> Numbers:
        """Those of `xs`, as calls of a backward take them."""
        ranks = range(self.rows.size)
        longest, calls = self.kept(
            "longest", lambda: (max(map(self.rows.count, ranks)), max(len(self.rows.local(r)) for r in ranks))
        )
        places = [x.places for x in self.turns(BACKWARD)]
        return Numbers({name: x for name, x in xs.items() if name in PER_QUERY}, places, longest, calls)

    def deals(self) -> tuple[Deal, Deal]:
        """Of the rows of queries and of keys."""
        team, first = self.asked.team, self.asked.group.rank * self.asked.team.size
        ranks, heads = range(first, first + team.size), self.asked.problem.heads_k
        return deal(self.asked.rows, ranks, heads), deal(self.asked.key_rows, ranks, heads)

    def by_heads(self, xs: dict[str, Any]) -> dict[str, ByHeads]:
        of_q, of_k = self.deals()
        return {
            name: ByHeads(of_k, 1, x) if name in ("k", "v") else ByHeads(of_q, self.group_of, _of_rows(name, x))
            for name, x in xs.items()
        }

    def to_heads(self, xs: dict[str, Any], some: Span) -> ToHeads:
        return ToHeads(self.asked.team, [*self.by_heads(xs).values()], some)

    def from_heads(self, xs: dict[str, Any], targets: dict[str, Any], some: Span) -> FromHeads:
        into = [_of_rows(name, x) for name, x in targets.items()]
        return FromHeads(self.asked.team, [*self.by_heads(xs).values()], some, into)


def forward(asked: Asked, out: Any, lse: Any) -> None:
    """Writes out (B, S, H, Dv) and lse (B, H, S) of this rank's rows."""
    part, xs = Part.of(asked), {x: asked.operands[x] for x in "qkv"}
    if asked.team.size == 1:
        _forward(part, xs, out, lse)
        return

    def run(some: Part, moved: dict[str, Any], into: dict[str, Any]) -> None:
        _forward(some, moved, into["out"], into["lse"])

    _in_heads(part, xs, {"out": out, "lse": lse}, run)


def _in_heads(
    part: Part, xs: dict[str, Any], targets: dict[str, Any], run: Callable[[Part, dict[str, Any], dict[str, Any]], None]
) -> None:
    """Hand rows over for heads, `run` with them, and hand its results back."""
    window, asked = getattr(part.asked.team, "window", None), part.asked
    if window is None and asked.group.size == 1:
        _in_heads_sent(part, part.dealt(1), xs, targets, run)
        return
    # All teams have the same groups of heads, whichever of them have a window.
    if "most" not in asked.memo:
        count, every = part.heads[1] - part.heads[0], (*part.by_heads(xs).values(), *part.by_heads(targets).values())
        asked.memo["most"] = -(-sum(x.nbytes(count) for x in every) // WINDOW)
    most = asked.memo["most"]
    groups = part.dealt(most)
    done = _in_heads_near(window, part, groups, xs, targets, run) if window is not None and most else 0
    _in_heads_sent(part, groups[done:], xs, targets, run)


def _in_heads_near(
    window: Any, part: Part, groups: Sequence[tuple[Part, Span]], xs: Any, targets: Any, run: Any
) -> int:
    """Where ranks reach each other's memory, which stays with them: not too much of it. How many groups are done: all,
    or those until it is not to be had."""
    rank, memo = part.asked.team.rank, part.asked.memo
    for n, (some, heads) in enumerate(groups):
        if ("handed", heads) not in memo:
            memo["handed", heads] = handed(rank, part.by_heads(xs), part.by_heads(targets), heads)
        near = NearHeads(window, rank, memo["handed", heads], xs, targets)
        if not near.may:
            return n
        run(some, near.there(), near.rooms())
        near.back()
    return len(groups)


def _in_heads_sent(part: Part, groups: Sequence[tuple[Part, Span]], xs: Any, targets: Any, run: Any) -> None:
    """By messages: those of the next group of heads, and of the one before, travel while one is computed."""
    back = []
    coming = part.to_heads(xs, groups[0][1]) if groups else None
    for n, (some, heads) in enumerate(groups):
        assert coming is not None
        here = coming
        coming = part.to_heads(xs, groups[n + 1][1]) if n + 1 < len(groups) else None
        moved = {name: _of_rows(name, x) for name, x in zip(xs, here.wait())}
        found = _rooms(moved, targets)
        run(some, moved, found)
        back.append(part.from_heads(found, targets, heads))
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


def _forward(part: Part, xs: dict[str, Any], out: Any, lse: Any) -> None:
    q, merging = xs["q"], part.asked.stretches > 1
    sums = empty(tuple(out.shape), out, wide(out)) if merging else out
    every = part.turns(FORWARD)
    for (of, keys, _), turns in zip(_keys(part, xs["k"], xs["v"], None, Numbers({}, [[]] * len(every))), every):
        targets, norm = cut_up(taken(sums, turns.heads), turns.rows), taken(lse, turns.of_numbers)
        queries = cut_up(taken(q, turns.heads), turns.rows)
        arrays = [{"q": x, "k": k, "v": v} for x, (k, v) in zip(queries, keys)]
        if of.first:
            runs = zip(turns.calls, arrays, targets)
            join_up(norm, [turn.run(part.asked, x, {"out": target})[1] for turn, x, target in runs], turns.numbers)
            continue
        for turn, x, target, so_far in zip(turns.calls, arrays, targets, cut_up(norm, turns.numbers)):
            more = turn.run(part.asked, x, {"out": empty(tuple(target.shape), target)})
            merge([target, more[0]], [so_far, more[1]], out=(target, so_far))
    if merging:
        put(out, sums)


def backward(asked: Asked, dq: Any, dk: Any, dv: Any) -> dict[str, Any]:
    """Writes the gradients of this rank's rows; those of the arrays that `wrt` names, this rank's part of them."""
    part, grads = Part.of(asked), {"q": dq, "k": dk, "v": dv}
    names: list[str] = [x for x in ("q", "dout", "out", "k", "v", "lse", "dlse") if x in asked.operands]
    xs = {name: asked.operands[name] for name in names}
    like = _of_wrt(asked)
    of_arrays = {name: zeros(tuple(x.shape), x, wide(x)) for name, x in like.items() if not _of_one_call(name, x)}
    _widen(asked)
    if asked.team.size == 1:
        _backward(part, xs, grads, of_arrays, like)
    else:

        def run(some: Part, moved: dict[str, Any], into: dict[str, Any]) -> None:
            _backward(some, moved, into, of_arrays, like)

        _in_heads(part, xs, grads, run)
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
    part: Part, xs: dict[str, Any], grads: dict[str, Any], of_arrays: dict[str, Any], like: dict[str, Any]
) -> None:
    dq, dk, dv = (grads[x] for x in "qkv")
    plan, once = part.turns(BACKWARD), part.asked.stretches == 1  # a row of dq has all of its keys in one call
    if part.kept("unseen", lambda: _unseen(part, dk.shape[1])):
        dk[...] = 0
        dv[...] = 0
    keys_of = _keys(part, xs["k"], xs["v"], (dk, dv), part.numbers(xs))
    for (of, keys, numbers), turns in zip(keys_of, plan):
        whole = len(plan) == 1 and _alone(part, of, dk.shape[1])  # nothing is added to anything
        if whole or once:
            sums = taken(dq, turns.heads)
        elif of.first:
            sums = empty(tuple(taken(dq, turns.heads).shape), dq, wide(dq))
        own = Sums((dk, dv), [(dk, dv)]) if whole else keys_of.room()
        written, of_rows = _Written(own), [x for x in ("q", "dout", "out") if x in xs]
        rows = zip(*(cut_up(taken(xs[name], turns.heads), turns.rows) for name in of_rows))
        every = zip(turns.calls, rows, keys, numbers, cut_up(sums, turns.rows))
        for n, (turn, some, (k, v), of_queries, of_q) in enumerate(every):
            arrays = dict(zip(of_rows, some)) | of_queries | {"k": k, "v": v}
            into = (of_q if of.first else empty(tuple(of_q.shape), sums), *written.room(n))
            found = turn.run(part.asked, arrays, dict(zip(Gradients._fields, into)))
            if not of.first:
                of_q += into[0]
            written.add(n, into[1:])
            for name, x in found.of_arrays.items():
                if _of_one_call(name, like[name]):
                    _put_part(of_arrays, name, turn.places[name], x, like[name])
                else:
                    of_arrays[name][turn.places.get(name, ...)] += x
        if whole:
            continue
        if of.last and not once:
            put(taken(dq, turns.heads), sums)
        keys_of.give(own)


class _Written:
    """Sums of gradients of a round's keys, of which not all need be there: the first of them are written, others added
    to them."""

    def __init__(self, sums: Sums) -> None:
        self._sums, self._begun = sums, False

    def room(self, n: int) -> list[Any]:
        """Where a call is to write its part: of the sums, if it is the first and has all keys, or beside them."""
        parts = self._sums.parts[n]
        if not self._begun and parts[0] is self._sums.every[0]:
            return list(parts)
        if not self._begun:
            for x in self._sums.every:
                x[...] = 0
            self._begun = True
        return [empty(tuple(x.shape), x) for x in parts]

    def add(self, n: int, parts: Sequence[Any]) -> None:
        if self._begun:
            add_to(self._sums.parts[n], parts)
        self._begun = True


def _alone(part: Part, of: Round, count: int) -> bool:
    """Whether one call gives all of a round's gradients, of all `count` rows of k."""
    return part.asked.group.size == 1 and len(of.steps) == 1 and of.steps[0].here == (0, count)


def _unseen(part: Part, count: int) -> bool:
    """Whether a row of k is in no call, so that its gradient, zero, comes from none."""
    plan = part.rounds()
    rank = part.asked.group.rank
    held = joined(x for of in plan for m in (*of.sends, *of.receives) if m.source == rank for x in m.held)
    return held != ([(0, count)] if count else [])


def _keys(part: Part, k: Any, v: Any, grads: Any, numbers: Numbers) -> SentKeys | NearKeys:
    """Of each round what its calls have, and where gradients of the keys go."""
    plan, group = part.rounds(), part.asked.group
    window = getattr(group, "window", None)
    if window is not None and group.size > 1 and plan:
        near = NearKeys(window, group.rank, plan, k, v, grads, numbers, part.asked.memo)
        if near.may:
            return near
    return SentKeys(group, plan, k, v, grads, numbers)


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
