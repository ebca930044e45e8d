"""Rows and steps: who holds what, who computes what with whose keys, what is sent. Pure, over random problems."""

from __future__ import annotations

import numpy as np
import pytest
from reference import fresh_rng

from cupyflash.parallel.rows import Rows, Span, joined
from cupyflash.parallel.steps import Band, Blocks, Sight, deal, rounds

TRIALS = 60


def drawn_rows(rng: np.random.Generator, length: int, size: int) -> Rows:
    """Of any kind."""
    multiple = int(rng.choice([1, 4, 16, 128]))
    kind = rng.integers(4)
    if kind == 0:
        return Rows.contiguous(length, size, multiple=multiple)
    if kind == 1:
        return Rows.zigzag(length, size, multiple=multiple)
    if kind == 2:
        return Rows.balanced(length, size, rng.random(length), chunks=int(rng.integers(1, 5)), multiple=multiple)
    ends = np.sort(rng.integers(0, length + 1, int(rng.integers(0, 8))))
    spans = list(zip([0, *ends.tolist()], [*ends.tolist(), length]))
    of = rng.integers(0, size, len(spans))
    return Rows(length, tuple(tuple(x for x, r in zip(spans, of) if r == rank) for rank in range(size)))


def drawn_sight(rng: np.random.Generator, seq_q: int, seq_k: int) -> tuple[Sight, np.ndarray]:
    """And which pairs are visible."""
    left, right = (None if rng.random() < 0.4 else int(rng.integers(0, 30)) for _ in range(2))
    diagonal = int(rng.choice([0, seq_k - seq_q, int(rng.integers(-20, 21))]))
    band, at = Band(seq_k, left, right, diagonal), np.arange(seq_q)[:, None] + diagonal
    seen, j = np.ones((seq_q, seq_k), bool), np.arange(seq_k)
    if left is not None:
        seen &= j >= at - left
    if right is not None:
        seen &= j <= at + right
    if rng.random() < 0.5:
        return band, seen
    block, hulls = 8, []
    for a in range(0, seq_q, block):  # documents, say: a stretch of keys for each block of rows
        lo, hi = np.sort(rng.integers(0, seq_k + 1, 2)).tolist()
        hulls.append((lo, hi) if hi > lo else (0, 0))
        seen[a : a + block, :lo] = False
        seen[a : a + block, hi:] = False
    return Blocks(band, block, tuple(hulls)), seen


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_every_row_is_held_once_and_join_is_the_inverse_of_take(size: int) -> None:
    rng = fresh_rng()
    for _ in range(TRIALS):
        length = int(rng.choice([0, 1, 7, 100, 1024, 3001]))
        rows = drawn_rows(rng, length, size)
        held = np.concatenate([rows.positions(r) for r in range(size)])
        np.testing.assert_array_equal(np.sort(held), np.arange(length))
        assert [rows.count(r) for r in range(size)] == [len(rows.positions(r)) for r in range(size)]
        x = rng.random((2, length, 3))
        parts = [rows.take(x, r) for r in range(size)]
        for r, part in enumerate(parts):
            np.testing.assert_array_equal(part, x[:, rows.positions(r)])
        np.testing.assert_array_equal(rows.join(parts), x)
        np.testing.assert_array_equal(rows.take(x.swapaxes(0, 1), 0, axis=0), parts[0].swapaxes(0, 1))


def test_the_cuts_of_others() -> None:
    """PyTorch's head-tail order, and Transformer Engine's dual chunk swap."""
    rows = Rows.zigzag(4096, 4)
    assert rows.chunks[1] == ((512, 1024), (3072, 3584))
    assert Rows.contiguous(1000, 4).chunks == (((0, 256),), ((256, 512),), ((512, 768),), ((768, 1000),))
    assert Rows.contiguous(100, 3).chunks == (((0, 0),), ((0, 0),), ((0, 100),))
    assert Rows.zigzag(12, 2, multiple=1).chunks == (((0, 3), (9, 12)), ((3, 6), (6, 9)))
    assert all(a % 128 == 0 for spans in Rows.zigzag(5000, 3).chunks for a, b in spans if b > a)


@pytest.mark.parametrize("kind", ["causal", "window", "documents", "random"])
@pytest.mark.parametrize("size", [2, 3, 8, 32])
def test_balanced_within_five_percent(kind: str, size: int) -> None:
    rng = fresh_rng()
    length = 128 * 8 * size
    i = np.arange(length)
    if kind == "documents":
        ends = np.unique(np.append(np.cumsum(rng.lognormal(7, 1, 1000).astype(int) + 1), length))
        ends = ends[ends <= length]
        begins = np.concatenate([[0], ends[:-1]])
        sees = (i - np.repeat(begins, ends - begins) + 1).astype(float)
    else:
        sees = {"causal": i + 1.0, "window": np.minimum(i + 1.0, 300), "random": 1 + rng.random(length)}[kind]
    rows = Rows.balanced(length, size, sees)
    work = [sum(sees[a:b].sum() for a, b in spans) for spans in rows.chunks]
    mean = sees.sum() / size
    heaviest = max(sees[n : n + 128].sum() for n in range(0, length, 128))
    assert max(work) <= max(1.05 * mean, heaviest + 0.5 * mean), (max(work) / mean, heaviest / mean)
    if heaviest < 0.3 * mean:
        assert max(work) <= 1.05 * mean, max(work) / mean
    assert max(map(rows.count, range(size))) == length // size


def test_balanced_has_no_more_calls_than_pay() -> None:
    """Of documents parts as long as these: eight a rank are as even, in calls that are short and want others' keys."""
    pytest.importorskip("torch")
    from cupyflash.bench.parallel_cases import documents

    begin = documents(1 << 16)
    sees = np.arange(1 << 16) - begin + 1.0
    few, many = Rows.balanced(1 << 16, 2, sees), Rows.balanced(1 << 16, 2, sees, chunks=8)
    assert max(map(len, few.chunks)) == 2 and max(map(len, many.chunks)) == 7
    assert Rows.balanced(1 << 16, 4, np.ones(1 << 16)) == Rows.contiguous(1 << 16, 4)
    causal = np.arange(1 << 16) + 1.0
    assert max(map(len, Rows.balanced(1 << 16, 4, causal).chunks)) == 2
    assert Rows.balanced(1 << 16, 4, np.zeros(1 << 16)).size == 4


def overlap(x: Span, y: Span) -> int:
    return max(0, min(x[1], y[1]) - max(x[0], y[0]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
def test_every_visible_pair_is_computed_once_and_both_ends_agree(size: int) -> None:
    rng = fresh_rng()
    for _ in range(TRIALS // (1 + size // 16)):
        seq_q, seq_k = (int(rng.choice([0, 1, 5, 40, 300])) for _ in range(2))
        if rng.random() < 0.5:
            seq_k = seq_q
        rows, keys = drawn_rows(rng, seq_q, size), drawn_rows(rng, seq_k, size)
        sight, seen = drawn_sight(rng, seq_q, seq_k)
        heads, groups, stretches = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
        block = int(rng.choice([1, 8, 16]))
        plans = [
            rounds(rows, keys, sight, r, heads, groups=groups, stretches=stretches, block=block) for r in range(size)
        ]
        computed = np.zeros((heads, seq_q, seq_k), int)
        asked = np.zeros((heads, seq_q), int)
        for r, plan in enumerate(plans):
            assert len(plan) == len(plans[0])
            for n, of in enumerate(plan):
                assert {x.source for x in of.sends} <= {r} and {x.target for x in of.receives} <= {r}
                for x in of.sends:  # what is sent is what is waited for
                    assert x in plans[x.target][n].receives
                here = np.full(of.length, -1)
                for x in of.receives:
                    assert x.source == r or x in plans[x.source][n].sends
                    for span, held, at in zip(x.rows, x.held, x.here):
                        assert (here[slice(*at)] == -1).all()
                        here[slice(*at)] = keys.positions(x.source)[slice(*held)]
                        np.testing.assert_array_equal(here[slice(*at)], np.arange(*span))
                np.testing.assert_array_equal(here, np.concatenate([np.arange(0), *(np.arange(*x) for x in of.has)]))
                begun = np.zeros(of.length, bool)
                for step, fresh in zip(of.steps, of.begun):  # gradients are written where there are none, else added
                    own = np.arange(*step.here)
                    if fresh is None:
                        assert not begun[own].any()
                    else:
                        assert begun[own].any()
                        of_it = [np.arange(*x) for x in fresh]
                        assert np.concatenate([own[:0], *of_it]).tolist() == own[~begun[own]].tolist()
                    begun[own] = True
                assert begun.all()
                for step in of.steps:
                    assert rows.positions(r)[slice(*step.local)].tolist() == list(range(*step.rows))
                    if step.keys[1] > step.keys[0]:
                        assert here[slice(*step.here)].tolist() == list(range(*step.keys))
                    computed[slice(*of.heads), slice(*step.rows), slice(*step.keys)] += 1
                    if of.first:
                        asked[slice(*of.heads), slice(*step.rows)] += 1
                    if step.full:
                        assert seen[slice(*step.rows), slice(*step.keys)].all()
                # Nothing is sent that nobody needs, beyond whole blocks of what a chunk of rows sees.
                for span in of.has:
                    assert any(overlap(span, step.keys) for step in of.steps)
        assert computed.max(initial=0) <= 1 and (computed[:, seen] == 1).all()
        assert (asked == 1).all()


def test_chunks_that_touch_are_one_call_and_one_message() -> None:
    """The last rank's in zigzag: two calls would each begin and end with idle multiprocessors."""
    rows = Rows.zigzag(4096, 4)
    plans = [rounds(rows, rows, Band(4096, None, 0), r, 4, groups=1)[0] for r in range(4)]
    assert [len(x.steps) for x in plans] == [2, 2, 2, 1]
    (step,) = plans[3].steps
    assert (step.rows, step.local, step.keys) == ((1536, 2560), (0, 1024), (0, 2560))
    assert [x.rows for x in plans[3].sends] == [((1536, 2560),)] * 3


def test_a_window_is_one_message_to_a_neighbour() -> None:
    rows = Rows.contiguous(4096, 8)
    for r in range(8):
        (only,) = rounds(rows, rows, Band(4096, 300, 0), r, 4, groups=1)
        assert {x.target for x in only.sends} == ({r + 1} if r < 7 else set())
        assert sum(b - a for x in only.sends for a, b in x.rows) == (300 if r < 7 else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_heads_are_dealt_out_and_rows_come_together(ranks: int) -> None:
    rng = fresh_rng()
    for _ in range(TRIALS):
        size, length = ranks * int(rng.integers(1, 4)), int(rng.choice([0, 5, 100, 1000]))
        rows = drawn_rows(rng, length, size)
        together = rows.together(ranks)
        for n in range(size // ranks):
            team = range(n * ranks, (n + 1) * ranks)
            dealt = deal(rows, team, ranks * 2)
            assert dealt.heads == tuple((2 * r, 2 * r + 2) for r in range(ranks))
            assert dealt.length == together.count(n)
            found = np.full(dealt.length, -1)
            for rank, some in zip(team, dealt.rows):
                for own, at in some:
                    found[slice(*at)] = rows.positions(rank)[slice(*own)]
            np.testing.assert_array_equal(found, together.positions(n))


def test_joined() -> None:
    assert joined([(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]) == [(0, 3), (5, 9)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rows(4, (((0, 2),), ((1, 4),))), "chunks hold .* they must hold each of 4 rows once"),
        (lambda: Rows(4, (((0, 3),),)), "they must hold each of 4 rows once"),
        (lambda: Rows(4, (((2, 4), (0, 2)),)), "chunks of rank 0 are .* they must rise"),
        (lambda: Rows.zigzag(-1, 2), "length is -1; it must be 0 or more"),
        (lambda: Rows.contiguous(8, 0), "size is 0; it must be 1 or more"),
        (lambda: Rows.contiguous(8, 2, multiple=0), "multiple is 0; it must be 1 or more"),
        (lambda: Rows.balanced(8, 2, [1, 2]), "mask is about shape .* it must be about 8 rows"),
        (lambda: Rows.balanced(8, 2, "x"), "mask is a str; it must be a block mask, or hold how many keys each row"),
        (lambda: Rows.zigzag(8, 2).take(np.ones((2, 7)), 0), "x has 7 rows along axis 1"),
        (lambda: Rows.zigzag(8, 2).join([np.ones((2, 7))]), "parts holds 1 arrays; it must hold one for each of 2"),
        (
            lambda: Rows.contiguous(8, 2, multiple=1).join([np.ones((2, 3))] * 2),
            r"parts\[0\] has 3 rows; it must have 4",
        ),
    ],
)
def test_messages(make, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
