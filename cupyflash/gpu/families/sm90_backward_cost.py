"""What the Hopper backward's tiles cost: in how many shares queries are dealt out, and in which order key tiles."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import NamedTuple

from ...problem import AttentionProblem
from ..kernel_plan import allowed, ceil, places
from ..measured import number
from .likely import even
from .sm90_backward_tiles import BackwardTile, cluster_keys, has_all_keys

# The backward's order of key tiles, and room for sums of dQ.
CACHE = 16 << 20  # bytes of the L2 cache that Q, dO and dQ of heads dealt out together take; twice where tiles are
LONG = 1024  # longer than this, in queries
APART = 2  # deterministic, no causal mask: steps between two key tiles of a head
# Shares of a head's query tiles: at most so many; tried are few, some, and as many as just fill one of so many waves.
MOST_SHARES, FULL_WAVES = 32, 8
MANY_TILES = 32  # key tiles for each multiprocessor: with more it is no matter how the last ones end
# Times q's bytes that their sums may take, where that is much: sums of dQ take as much. (Keys are in whole tiles.)
SUMS_ROOM = 2.05
MORE_ROOM, WORTH_MORE = 32 << 20, 1.07  # bytes more where that is so many times as fast, by that reckoning
# What is not the visit of a query tile, in visits of VISIT queries: a key tile's beginning and end, and its sums on
# their way to memory or back; and what memory takes for a byte of all sums, in visits.
VISIT = 64
SHARE_COST, SUMS_COST = number("sm90_backward.tile"), number("sm90_backward.sums")
SUMS_TRAFFIC = number("sm90_backward.sums_traffic")
# Under a causal mask key tiles that start together come to the same queries the more apart the more heads they have
# passed. A visit of SPILLED_KEYS keys takes so much longer for each doubling of what Q, dO and dQ of the shares under
# work take beyond what the L2 cache holds.
SPILLED_COST, SPILLED_KEYS, HELD = number("sm90_backward.spilled"), 128, number("sm90_backward.held")
ENDS, WAVE = number("sm90_backward.ends"), number("sm90_backward.wave")  # of `effort`
# All heads may be together where their Q, dO and dQ take no more than this. (Measured on an H100: with 70 MB and more
# 10 to 34 % are lost, with 36 to 53 MB 11 to 27 % gained.) More heads than the cache holds are, if so many times as
# fast by that reckoning.
ALL_CACHE, WORTH_MORE_HEADS = 56 << 20, 1.04
ENOUGH = 1.005  # times the least
# In so many shares the last heads alone: so many, or those whose key tiles are all that is under work at once.
LAST_SHARES, LAST_HEADS = (2, 3, 4, 6), (1, 2)
WORTH_SHARING = 1.04  # times as fast, by that reckoning
# Packed: key tiles of sequences that are alike are listed where each has one, or so many and more, and come by what
# visits them where Q, dO and dQ of the heads together take no more than this. Of O so many values are read in the time
# that it takes to find the sequence of a place (reckoned).
LISTED_TILES, LISTED_CACHE, PLACE_VALUES = 3, 36 << 20, 6000
MANY_WAVES = 12  # of key tiles
WAVES = 3  # key tiles of every thread block for whose heads there is room: under work, loaded, being finished


class Dealt(NamedTuple):
    """How query tiles are dealt out: those of the first heads of K and V whole, those of the others in shares."""

    shares: int = 1
    whole: int = 0  # heads

    def count(self, heads: int) -> int:
        """How many those of so many heads are."""
        return self.whole + (heads - self.whole) * self.shares

    @property
    def most(self) -> int:
        """The part of a head's query tiles that most of them have: one of so many."""
        return 1 if self.whole else self.shares


def shares(problem: AttentionProblem, t: BackwardTile, clusters: int, sums: int) -> Dealt:
    """Each share of a head of K and V leaves so many bytes of sums."""
    keys, queries = cluster_keys(problem, t), problem.group * ceil(problem.seq_q, t.rows)
    heads, tiles = problem.batch * problem.heads_k, ceil(problem.seq_k, keys)
    free = allowed(problem, SUMS_ROOM)
    room, more = free // max(1, sums), (free + MORE_ROOM) // max(1, sums)
    most = min(MOST_SHARES, MANY_TILES * clusters // max(1, heads * tiles), queries)
    if most < 2 or problem.block_mask is not None or problem.ragged:  # whose visits are not known here
        return Dealt()
    walks = walks_of(problem, t.rows, keys)
    alone = time_of(problem, t, walks, Dealt(), clusters)
    even = heads * sum(problem.group * len(x) + _ends_cost(t) for x in walks) / clusters  # if all ended at once
    if alone < WORTH_SHARING * even:
        return Dealt()
    full = {n * clusters // (heads * tiles) for n in range(1, FULL_WAVES + 1)}
    tried = [Dealt(n) for n in range(2, most + 1) if n <= 8 or n % 4 == 0 or n in full]
    wave = ceil(clusters, tiles)
    for last in {*LAST_HEADS, wave, 2 * wave}:
        tried += [Dealt(n, heads - last) for n in LAST_SHARES if last < heads and n <= queries]
    taken = {x: (heads - x.whole) * x.shares for x in tried}  # places of sums
    times, least = dict[Dealt, float](), alone  # of those that are within the room
    for x in sorted(tried, key=lambda x: taken[x]):
        if taken[x] <= more:
            times[x] = time_of(problem, t, walks, x, clusters, ENOUGH * least)
            least = min(least, times[x]) if taken[x] <= room else least
    if least < WORTH_MORE * min(times.values(), default=alone):
        times = {x: time for x, time in times.items() if taken[x] <= room}
    least = min(times.values(), default=alone)
    if least * WORTH_SHARING >= alone:
        return Dealt()
    enough = [x for x in times if times[x] <= ENOUGH * least]
    return min(enough, key=lambda x: taken[x])  # the fewest: their sums take memory


def effort(problem: AttentionProblem, t: BackwardTile, sms: int) -> float:
    """What a multiprocessor does, in pairs of a query and a key with those in vain: to weigh tiles with."""
    walks = [problem.group * len(x) for x in walks_of(problem, t.rows, cluster_keys(problem, t))]
    tiles, at_once = problem.batch * problem.heads_k * len(walks), t.blocks * sms / t.cluster
    waves = (1 - WAVE) * tiles / at_once + WAVE * math.ceil(tiles / at_once)
    visits = max(waves * (sum(walks) / len(walks) + ENDS), max(walks) + ENDS)
    return visits * t.blocks * t.rows * t.keys * t.cost


def shared_effort(problem: AttentionProblem, t: BackwardTile, dealt: Dealt, clusters: int) -> float:
    """The same for longer walks, of which some may be shared out; where there are many, what ends last is not asked."""
    walks = walks_of(problem, t.rows, cluster_keys(problem, t))
    tiles, visits = problem.batch * problem.heads_k * len(walks), problem.group * sum(map(len, walks))
    if tiles >= MANY_WAVES * clusters:
        time = problem.batch * problem.heads_k * (visits + _ends_cost(t) * len(walks)) / clusters
    else:
        time = time_of(problem, t, walks, dealt, clusters)
    return time * t.rows * t.keys * t.cost


def walks_of(problem: AttentionProblem, rows: int, keys: int) -> list[range]:
    """The tiles of `rows` queries of a head that visit each tile of `keys` keys."""
    found = []
    for begin in range(0, problem.seq_k, keys):
        first, end = 0, problem.seq_q
        if problem.right is not None:
            first = max(0, begin - problem.diagonal - problem.right)
        if problem.left is not None:
            end = min(end, min(begin + keys, problem.seq_k) - problem.diagonal + problem.left)
        found.append(range(first // rows, ceil(end, rows)) if first < end else range(0))
    return found


def time_of(
    problem: AttentionProblem, t: BackwardTile, walks: list[range], dealt: Dealt, clusters: int, most: float = math.inf
) -> float:
    """How long the backward takes, in visits of a query tile: clusters take key tiles in the order of their tickets.
    Where that is longer than `most` in any case, infinitely."""
    return _best_order(problem, t, walks, dealt, clusters, most)[1]


def _best_order(
    problem: AttentionProblem, t: BackwardTile, walks: list[range], dealt: Dealt, clusters: int, most: float = math.inf
) -> tuple[int, float]:
    """Of how many heads key tiles are dealt out as one, and how long it takes."""
    costs, whole = _costs(problem, t, walks, dealt), has_all_keys(problem, t)  # dQ: then there are no sums

    def time(together: int) -> float:
        if whole or not dealt.whole:  # there is room for what is under work, and more
            return _ends(costs, together, clusters)
        return _ends_in(_room(problem, t, dealt, clusters, together), costs, together, clusters)

    first, *others = _orders(problem, t, dealt, clusters)
    if (even := sum(map(sum, costs)) / clusters) > most:
        return first, math.inf
    times = {first: time(first)}
    if times[first] > WORTH_MORE_HEADS * even:  # there is something to gain
        times |= {n: time(n) for n in others}
    together = min(times, key=lambda n: times[n] * (1 if n == first else WORTH_MORE_HEADS))
    keys, heads = cluster_keys(problem, t), problem.batch * problem.heads_k
    passed = (heads - dealt.whole) * dealt.shares * (dealt.shares > 1) * len(walks)  # whose sums are written and read
    sums = SUMS_TRAFFIC * 4 * passed * keys * (problem.dim + problem.dim_v)
    if whole or problem.right is None or problem.left is not None:
        return together, times[together] + sums
    under_work = min(len(costs), max(together, clusters / max(1, len(walks)))) * _traffic(problem, dealt)
    apart = min(1.0, 2 * problem.group / dealt.most * keys / max(1, problem.seq_q))
    spilled = SPILLED_COST * SPILLED_KEYS / keys * apart  # fewer keys are fewer products of the same bytes
    return together, times[together] * (1 + spilled * max(0.0, math.log2(max(1, under_work) / HELD))) + sums


def _costs(problem: AttentionProblem, t: BackwardTile, walks: list[range], dealt: Dealt) -> list[list[float]]:
    """What each key tile of each head, or share, takes."""
    tiles, shares = ceil(problem.seq_q, t.rows), dealt.shares
    ends, passed = _ends_cost(t), (dealt.shares > 1) * SUMS_COST * VISIT / t.rows

    def before(n: int, walk: range) -> int:
        """How many of the first n query tiles, head by head, visit a key tile."""
        return n // tiles * len(walk) + min(max(0, n % tiles - walk.start), len(walk))

    bounds = [problem.group * tiles * n // shares for n in range(shares + 1)]
    costs = [
        [before(end, x) - before(begin, x) + ends + passed for x in walks] for begin, end in itertools.pairwise(bounds)
    ]
    costs[-1] = [cost + shares * passed for cost in costs[-1]]
    whole = [problem.group * len(x) + ends for x in walks]
    return [whole] * dealt.whole + costs * (problem.batch * problem.heads_k - dealt.whole)


def _ends_cost(t: BackwardTile) -> float:
    """A key tile's beginning and end, in visits of the tile's rows."""
    return SHARE_COST * VISIT / t.rows


def _ends(costs: list[list[float]], together: int, clusters: int) -> float:
    """When all are done: key tiles of so many heads are dealt out as one."""
    busy = [0.0] * clusters
    for first in range(0, len(costs), max(1, together)):
        for tile in zip(*costs[first : first + together]):
            for cost in tile:
                heapq.heapreplace(busy, busy[0] + cost)
    return max(busy)


def _ends_in(room: int, costs: list[list[float]], together: int, clusters: int) -> float:
    """The same where there is room for sums of dQ of so many: a head's begin when that is done whose room it takes."""
    busy, done = [0.0] * clusters, [0.0] * len(costs)
    for first in range(0, len(costs), max(1, together)):
        heads = range(first, min(first + together, len(costs)))
        free = [done[head - room] if head >= room else 0.0 for head in heads]
        for tile in zip(*costs[first : first + together]):
            for head, begin, cost in zip(heads, free, tile):
                end = max(begin, busy[0]) + cost
                heapq.heapreplace(busy, end)
                done[head] = max(done[head], end)
    return max(busy)


def _traffic(problem: AttentionProblem, dealt: Dealt) -> int:
    """Bytes of Q, dO and the sums of dQ of a head or a share. (Sums of narrow heads have more columns, and H u reads
    tangents: with these fewer heads would be dealt out together, which was 1 to 8 % slower on an H200.)"""
    return ceil(problem.group * problem.seq_q, dealt.most) * (6 * problem.dim + 2 * problem.dim_v)


def dealt_out(
    problem: AttentionProblem, likely: AttentionProblem, t: BackwardTile, dealt: Dealt, clusters: int
) -> tuple[int, int]:
    """Heads of K and V, or shares of their queries, whose key tiles are dealt out as one, and for how many there is
    room for sums of dQ."""
    if problem.rows_k is not None:
        return _packed(problem, likely, t, clusters)
    together, *others = _orders(problem, t, dealt, clusters)
    if problem.block_mask is not None and not problem.deterministic:
        return together, dealt.count(problem.batch * problem.heads_k)
    if others:
        walks = walks_of(problem, t.rows, cluster_keys(problem, t))
        together, _ = _best_order(problem, t, walks, dealt, clusters)
    return together, _room(problem, t, dealt, clusters, together)


def _room(problem: AttentionProblem, t: BackwardTile, dealt: Dealt, clusters: int, together: int) -> int:
    """For how many there is room."""
    heads = problem.batch * problem.heads_k
    spare = ceil(WAVES * clusters, max(1, ceil(problem.seq_k, cluster_keys(problem, t))))
    if problem.deterministic and problem.right is None:
        spare = max(0, spare - together)  # a head is under work for as long as all of them
    if dealt.whole:  # there is room for whole heads, which shares do not fill: no more than all take
        spare = min(spare, max(0, heads - 2 * together))
    return min(dealt.count(heads), 2 * together + spare)


def first_cleared(resident: int, together: int, clusters: int, of_head: int) -> int:
    """Heads, or shares, whose key tiles come first: the launch before leaves zeros where their sums will be. `of_head`:
    key tiles of each."""
    return min(resident, max(together, ceil(clusters, max(1, of_head))))


def _orders(problem: AttentionProblem, t: BackwardTile, dealt: Dealt, clusters: int) -> tuple[int, ...]:
    """Of how many heads key tiles may be dealt out as one: what is weighed."""
    heads = dealt.count(problem.batch * problem.heads_k)
    tiles = ceil(problem.group * ceil(problem.seq_q, t.rows), dealt.most)  # of them
    # A causal mask makes key tiles of different length: those of some heads are dealt out together, long ones first. Of
    # one long head the first tile takes as long as all others do on all multiprocessors: at the end they would stand
    # idle; so they do, for less long, at the end of the last heads of all.
    traffic = _traffic(problem, dealt)
    if problem.block_mask is not None and not problem.deterministic:  # the longest tiles of all heads are the first
        return (even_rounds(heads, max(2, ceil(2 * CACHE, traffic))),)
    if problem.right is not None:
        long = problem.seq_q > LONG
        together = even_rounds(heads, max(2, ceil(2 * CACHE, traffic)) if long else max(1, CACHE // traffic))
        # Or those that are under work at once in any case, and where there is room for them, all.
        of_head = max(1, ceil(problem.seq_k, cluster_keys(problem, t)))
        others = {heads} if heads * traffic <= ALL_CACHE else set()
        if heads * of_head <= MANY_TILES * clusters:
            others.add(even_rounds(heads, max(1, clusters // of_head)))
        return together, *sorted(n for n in others if n > together)
    # The key tiles of a head add to dQ in order. Taken at once, each would wait for the one before: all but one stand
    # idle for some steps. So they are taken some steps apart, and in between those of other heads.
    if problem.deterministic:
        return (ceil(heads, ceil(heads, ceil(APART * clusters, tiles))),)
    return (1,)


def even_rounds(heads: int, together: int) -> int:
    """So many heads at once, or some more or less, so that the last round is as full as it can be: where a round has
    few heads their longest tiles take as long as all others do on all multiprocessors."""
    near = range(max(1, ceil(3 * together, 4)), 5 * together // 4 + 1)
    return min(heads, max(near, key=lambda n: (((heads - 1) % n + 1) / n, -abs(n - together))))


def ordered(problem: AttentionProblem, likely: AttentionProblem, t: BackwardTile) -> bool:
    """Whether key tiles of packed sequences are listed before. (Those that add in turn do so in the order of places.)
    One thread block does it, beside others that read O: it must not take longer than they do."""
    keys = cluster_keys(problem, t)
    if problem.rows_q is None or problem.rows_k is None or problem.deterministic or problem.block_mask is not None:
        return False
    if even(problem) and 1 < ceil(likely.seq_k, keys) < LISTED_TILES:
        return False
    found = 2 * places(problem, problem.rows_k, keys) + places(problem, problem.rows_q, t.rows)
    return problem.heads_q * problem.rows_q * problem.dim_v >= PLACE_VALUES * found


def by_visits(problem: AttentionProblem, together: int) -> bool:
    """Whether those that most query tiles visit come first, of whichever sequence: where what all tiles of the heads
    together read and add to stays in the L2 cache. Else they come by places."""
    heads = together * problem.group * (problem.rows_q or 0)
    return heads * (6 * problem.dim + 2 * problem.dim_v) <= LISTED_CACHE


def _packed(problem: AttentionProblem, likely: AttentionProblem, t: BackwardTile, clusters: int) -> tuple[int, int]:
    """The same of packed sequences, all of which are one head's: they pass one after the other, so that what of few
    heads is under work is in the cache, whatever their lengths. Sums of dQ are of all of them."""
    heads = problem.heads_k
    # The first tile of a long sequence takes long: another head's are beside it. That none is long a hint says.
    together = 1 if problem.max_seqlen_q is not None and likely.seq_q <= LONG else 2
    if problem.deterministic and problem.right is None:  # some steps apart, as above
        tiles = max(1, problem.group * ceil(likely.seq_q, t.rows))
        together = ceil(heads, ceil(heads, ceil(APART * clusters, tiles)))
    spare = ceil(WAVES * clusters, places(problem, problem.rows_k or 0, cluster_keys(problem, t)))
    sums = 4 * problem.group * places(problem, problem.rows_q or 0, t.rows) * t.rows * problem.dim  # bytes of a head
    room = max(2 * together + 1, min(2 * together + spare, 2 * CACHE // max(1, sums)))
    return min(heads, together), min(heads, room)
