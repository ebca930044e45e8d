"""What all calls of a kind over several ranks share: the parts that a rank computes, and the calls of `attention` of
each."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .. import dispatch, interop
from ..api import trace_score
from ..call import Arrays, Call
from ..passes import FORWARD, Pass
from ..problem import complete
from .arrays import Cuts, Place, cuts, lying, place, taken
from .asked import Asked, index
from .rows import Rows, Span, cut
from .steps import Round, Step, rounds
from .transfers import Numbers


class Turn:
    """A call of a round, as all calls of a kind make it."""

    def __init__(
        self, call: Call, step: Step, heads: Span, rows: Place | None, places: dict[str, tuple[slice, ...]]
    ) -> None:
        self.call, self.step = call, step  # but for what it is given
        self.heads = heads  # of queries, among all
        self.places = places  # of its part of each optional array
        self._rows = rows  # of its queries, in arrays of all of the rank's
        self._rest = call.seed, call.family, call.return_lse, call.wrt
        self._lies = lying(call.lib.kind)
        self._ready: dict[Any, _Ready | None] = {}  # by how arrays lie; None: it ran once

    def run(self, asked: Asked, of_rows: Arrays, arrays: Arrays, targets: Arrays) -> Any:
        """With arrays of all of the rank's rows, and others of the pass as this call has them, optional ones aside."""
        lib, options = self.call.lib, self.call.options
        every, score = of_rows | arrays, options["score"]
        for name, at in self.places.items():
            every[name] = asked.arrays[name][at]
        if self.call.seed is None and (seed := asked.options["seed"]) is not None:
            every["seed"] = seed
        if score is not None:
            every |= {key: asked.options["score_arrays"][x.name] for key, x in zip(score.keys, score.arrays)}
        if asked.mask is not None and self.step.keys[1] > self.step.keys[0]:
            options = options | {"block_mask": asked.mask.part(self.step.local, self.step.keys, self.heads)}
        call, key = Call(lib, self.call.of, every, options, targets, *self._rest), None
        if asked.plain:
            key = (*map(self._lies, every.values()), *map(self._lies, targets.values()))
            if (ready := self._ready.get(key)) is not None and (found := ready.found(call)) is not None:
                return found[0].run(call, found[1])
        for name, x in of_rows.items():
            every[name] = taken(x, self._rows)
        result = (lib.recorder(call) or dispatch.run)(call)
        if key is not None:
            self._ready[key] = _Ready.of(call, of_rows) if key in self._ready else None
        return result


class _Ready(NamedTuple):
    """What a call ran by: another, whose arrays lie alike, does but for addresses."""

    kept: Callable[[], Any]
    behind: tuple[int, ...]  # bytes from where arrays begin to the parts of them that it takes

    @classmethod
    def of(cls, call: Call, of_rows: Arrays) -> _Ready | None:
        parts, pointer = call.arrays, call.lib.pointer
        if _any_odd(map(pointer, parts.values())):
            return None
        behind = (pointer(x) - pointer(of_rows[name]) if name in of_rows else 0 for name, x in parts.items())
        return cls(dispatch.kept(call), (*behind,))

    def found(self, call: Call) -> tuple[Any, list[int]] | None:
        """That, and addresses; None where one is odd, or where it is no longer kept."""
        addresses = [*map(operator.add, map(call.lib.pointer, call.arrays.values()), self.behind)]
        prepared = None if _any_odd(addresses) else self.kept()
        return None if prepared is None else (prepared, addresses)


def _any_odd(addresses: Iterable[int]) -> bool:
    """Whether an array begins where kernels cannot read it by 16 bytes: others are prepared for it."""
    return functools.reduce(operator.or_, addresses) & 15 != 0


class Turns(NamedTuple):
    """Those of a round."""

    calls: list[Turn]
    rows: Cuts  # of results of queries, (B, S, H, D), of the heads at a place
    heads: Place | None
    numbers: Cuts  # of those of them, (B, H, S)
    of_numbers: Place | None
    places: list[Place | None]  # of each call's numbers


class Part:
    """What a rank has once heads are dealt out: rows of its team, and some heads. All calls of a kind share it, so it
    has none of their arrays."""

    def __init__(self, asked: Asked, rows: Rows, key_rows: Rows, heads: Span, groups: int) -> None:
        self.rows, self.key_rows, self.heads, self.groups = rows, key_rows, heads, groups
        self.group_of = asked.problem.group if asked.problem.heads_k else 1  # query heads of a key head
        self.size = asked.group.size
        of = rows, key_rows, asked.sight, asked.group.rank, heads[1] - heads[0]
        how = {"groups": groups, "stretches": asked.stretches, "block": asked.block}
        self.rounds: Sequence[Round] = rounds(*of, **how)
        self._dealt: dict[int, list[tuple[Part, Span]]] = {}
        self._turns: dict[str, Sequence[Turns]] = {}

    @classmethod
    def of(cls, asked: Asked) -> Part:
        found: Part | None = asked.memo.get("part")
        if found is None:
            size = asked.team.size
            heads = asked.problem.heads_k // size
            first = asked.team.rank * heads
            rows, key_rows = (x if size == 1 else x.together(size) for x in (asked.rows, asked.key_rows))
            found = asked.memo["part"] = cls(asked, rows, key_rows, (first, first + heads), asked.groups)
        return found

    def dealt(self, asked: Asked, most: int) -> list[tuple[Part, Span]]:
        """In which groups heads are handed over, at least `most` or as many as there are, and which of the rank's they
        are. Where keys travel too, theirs come in groups."""
        if most not in self._dealt:
            first, last = self.heads
            groups = min(max(most, 1 if self.size > 1 else self.groups), max(1, last - first))
            own = self.groups if self.size > 1 else 1
            self._dealt[most] = [
                (Part(asked, self.rows, self.key_rows, (first + a, first + b), min(own, b - a)), (a, b))
                for a, b in cut(last - first, groups)
            ]
        return self._dealt[most]

    def turns(self, asked: Asked, of: Pass) -> Sequence[Turns]:
        """Of each round."""
        if of.name not in self._turns:
            self._turns[of.name] = [self._of_round(asked, of, x) for x in self.rounds]
        return self._turns[of.name]

    def _of_round(self, asked: Asked, of: Pass, round_: Round) -> Turns:
        (q_shift, k_shift), count = asked.shift, self.rows.count(asked.group.rank)
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
            found.append(Turn(call, step, among_all, place((step.local, count), of_rank), places))
        spans, all_rows = [x.local for x in round_.steps], ((0, count), count)
        return Turns(
            found, cuts(1, spans, count), place(all_rows, of_rank), cuts(2, spans, count), place(of_rank, all_rows),
            [place(of_rank, (x, count)) for x in spans],
        )  # fmt: skip

    @functools.cached_property
    def most(self) -> tuple[int, int]:
        """Rows, and calls of a round, of the rank that has most."""
        ranks = range(self.rows.size)
        return max(map(self.rows.count, ranks)), max(len(self.rows.local(r)) for r in ranks)

    def numbers(self, plan: Sequence[Turns], xs: dict[str, Any]) -> Numbers:
        """Those of `xs`, as calls of a backward take them."""
        return Numbers({x: xs[x] for x in ("lse", "dlse") if x in xs}, [x.places for x in plan], *self.most)

    @functools.cached_property
    def alone(self) -> bool:
        """Whether one call has all that there is, so that nothing is added to anything."""
        steps = [x for of in self.rounds for x in of.steps]
        every = (0, self.key_rows.count(0))
        return self.size == len(self.rounds) == len(steps) == 1 and steps[0].here == every
