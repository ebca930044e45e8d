"""Lengths in memory, in the Hopper forward without a GPU."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from kernel_cover import cached
from lengths_on_cpu import Ran, Sequences, check, check_nonsense, plans_of
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm90_forward, sm90_forward_cost
from cupyflash.gpu.families.likely import as_dense
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import FORWARD
from cupyflash.problem import Given

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)  # two blocks take tile after tile, and find places that are empty
QUERIES, KEYS = [70, 0, 1, 130], [80, 3, 0, 140]
N, HEADS, ROWS = 4, 4, 201 + 5  # with those behind
Case = Callable[[np.random.Generator], tuple[Sequences, dict[str, Any], dict[str, np.ndarray], tuple[int, ...] | None]]
USUAL = (2, 128, 2, 1)  # warpgroups, keys, stages, blocks


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[KernelPlan]:
    """The plans that are made."""
    found: list[KernelPlan] = []
    make = sm90_forward.plan
    monkeypatch.setattr(sm90_forward, "plan", lambda *args: found.append(make(*args)) or found[-1])
    return found


def packed(r: np.random.Generator, queries: list[int] = QUERIES, keys: list[int] = KEYS, **how: Any) -> Sequences:
    return Sequences(r, queries, keys, **({"dtype": "float16", "dims": (64, 64)} | how))


def normal(r: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return r.standard_normal(shape).astype(dtype)


def drawn(r: np.random.Generator, *shape: int) -> np.ndarray:
    return r.random(shape) < 0.75


CASES: dict[str, Case] = {
    "packed": lambda r: (packed(r, [70, 0, 264, 300], [80, 3, 0, 333]), {"causal": True}, {}, USUAL),
    "a tile in the mean": lambda r: (packed(r, [70, 0, 1, 64, 300], [80, 3, 0, 64, 333]), {"causal": True}, {}, USUAL),
    "a window": lambda r: (packed(r, offsets="int64"), {"causal": True, "window": (20, None)}, {}, USUAL),
    "three warpgroups": lambda r: (packed(r, [70, 0, 1, 200], [80, 3, 0, 256]), {}, {}, (3, 128, 3, 1)),
    "one in each of three blocks": lambda r: (
        packed(r, dims=(64, 40), heads=(2, 2)), {"causal": True}, {}, (1, 64, 3, 3),
    ),
    "32": lambda r: (packed(r, dims=(32, 24)), {}, {}, (4, 64, 4, 1)),
    "rows that no map tells": lambda r: (packed(r, dims=(64, 43)), {"causal": True}, {}, USUAL),
    "128 on caches": lambda r: (packed(r, dims=(128, 128), k="cache"), {"causal": True}, {}, USUAL),
    "192": lambda r: (packed(r, dims=(192, 128)), {"causal": True}, {}, (2, 80, 2, 1)),
    "256": lambda r: (packed(r, dims=(256, 200), heads=(2, 1)), {"causal": True}, {}, None),
    "pages of 16": lambda r: (packed(r, k="paged", page=16), {"causal": True}, {}, USUAL),
    "pages of 24": lambda r: (packed(r, k="paged", page=24, offsets="int64"), {}, {}, USUAL),
    "pages of 64, a few queries each": lambda r: (
        packed(r, [7] * 4, k="paged", page=64, q="dense"), {}, {}, (2, 128, 4, 1),
    ),
    "pages of 256": lambda r: (packed(r, k="paged", page=256), {"causal": "top_left"}, {}, (2, 96, 2, 1)),
    "few queries on caches": lambda r: (
        packed(r, [5] * 4, [80, 3, 200, 140], k="cache", q="dense", heads=(8, 1)), {"causal": True}, {}, (2, 128, 4, 1),
    ),
    "few packed queries": lambda r: (
        packed(r, [1, 3, 1, 0], [80, 3, 200, 140], heads=(8, 1), behind=2), {"causal": True}, {"sinks": normal(r, 8)},
        (2, 128, 4, 1),
    ),
    "queries for each on packed": lambda r: (packed(r, [90] * 4, q="dense"), {"causal": "top_left"}, {}, USUAL),
    "packed on keys for each": lambda r: (packed(r, keys=[137] * 4, k="dense"), {"causal": True}, {}, USUAL),
    "bias and mask": lambda r: (
        packed(r), {"causal": True},
        {"bias": normal(r, N, HEADS, 136, 144, dtype=np.float16), "mask": drawn(r, 1, HEADS, 136, 144)}, (2, 64, 2, 1),
    ),
    "bias and mask by line": lambda r: (
        packed(r, lines=("bias", "mask")), {"causal": True},
        {"bias": normal(r, HEADS, ROWS, 144), "mask": drawn(r, 1, ROWS, 144)}, (2, 64, 2, 1),
    ),
    "slopes, sinks, key mask": lambda r: (
        packed(r), {"causal": True},
        {"alibi_slopes": abs(normal(r, N, HEADS)), "sinks": normal(r, HEADS), "key_mask": drawn(r, N, 160)}, USUAL,
    ),
    "slopes for all, soft cap": lambda r: (
        packed(r), {"window": (20, 3), "softcap": 5.0},
        {"alibi_slopes": abs(normal(r, 1, HEADS)), "sinks": normal(r, HEADS)}, USUAL,
    ),
    "soft cap": lambda r: (packed(r), {"softcap": 5.0, "causal": True}, {}, USUAL),
    "dropout": lambda r: (packed(r), {"dropout": 0.3, "causal": True}, {"seed": np.array(5)}, USUAL),
    "score function": lambda r: (
        packed(r), {"score": "s * (1 + 0.1 * b) + 0.01 * (i - j) * h", "causal": True}, {}, USUAL,
    ),
}  # fmt: skip


@cases(CASES, "packed", "pages of 16")
def test_each_as_by_itself(case: str, rng: np.random.Generator) -> None:
    of, options, others, tile = CASES[case](rng)
    seed = 5 if "seed" in others else None
    check("sm90", GPU, of, options, others, backward=False, tiles={"forward": tile} if tile else {}, seed=seed)


MIXED: dict[str, Case] = {
    "a prompt beside tokens": lambda r: (
        packed(r, [150, 1, 1, 0, 1, 70], [300, 80, 3, 9, 140, 90], heads=(8, 2), behind=2), {"causal": True}, {},
        (2, 128, 4, 1),
    ),
    "behind them, in pages, sinks": lambda r: (
        packed(r, [1, 1, 0, 3, 100], [80, 3, 9, 140, 300], heads=(4, 2), k="paged", page=32, dims=(128, 100), behind=1),
        {"causal": True, "window": (70, None)}, {"sinks": normal(r, 4)}, (2, 128, 2, 1),
    ),
    "one warpgroup, slopes, key mask": lambda r: (
        packed(r, [1, 90, 1, 2, 65], [80, 97, 9, 140, 90], heads=(8, 1), k="cache", behind=1), {"causal": True},
        {"alibi_slopes": abs(normal(r, 5, 8)), "key_mask": drawn(r, 5, 160)}, (1, 64, 3, 3),
    ),
    "192, soft cap": lambda r: (
        packed(r, [1, 70, 1, 65], [80, 70, 9, 99], heads=(4, 1), dims=(192, 128), behind=1), {"softcap": 5.0}, {},
        (2, 80, 2, 1),
    ),
}  # fmt: skip


@cases(MIXED, "a prompt beside tokens")
def test_heads_share_tiles_of_many(
    case: str, seen: list[KernelPlan], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some sequences have several tiles of all heads that share K and V, others a row of one.

    To the bit as alone, with as many heads in a tile: the rows of a warp have a say in them."""
    monkeypatch.setattr(sm90_forward_cost, "mixed", lambda problem, _: problem.group)
    of, options, others, tile = MIXED[case](rng)
    check("sm90", GPU, of, options, others, backward=False, tiles={"forward": tile})
    constants = dict(seen[0].constants)
    assert constants["PACK"] == of.heads[0] // of.heads[1] and constants["ORDERED"]


# Queries and keys of which positions leave some keys unseen: before a window of the first query, behind the last one's.
UNSEEN: dict[str, Case] = {
    "before a window": lambda r: (
        packed(r, [3, 1, 20, 130], [300, 137, 3, 200]), {"causal": True, "window": (11, None)}, {}, USUAL,
    ),
    "behind the last query's, in pages": lambda r: (
        packed(r, [20, 1, 70, 0], [140, 16, 300, 5], k="paged", page=16), {"causal": "top_left", "window": (3, None)},
        {}, USUAL,
    ),
    "under a soft cap, on caches": lambda r: (
        packed(r, [70, 20, 33, 40], [300, 23, 140, 200], k="cache"), {"window": (11, 9), "softcap": 5.0}, {}, USUAL,
    ),
    "of keys for each": lambda r: (
        packed(r, [3, 1, 20, 130], [200] * 4, k="dense"), {"window": (20, 3)}, {"key_mask": drawn(r, N, 200)}, USUAL,
    ),
}  # fmt: skip


@cases(UNSEEN, "before a window")
def test_keys_that_no_query_sees_may_hold_anything(case: str, rng: np.random.Generator) -> None:
    of, options, others, tile = UNSEEN[case](rng)
    left, right = options["window"]
    right = 0 if "causal" in options else right
    for n, (queries, keys) in enumerate(zip(of.queries, of.keys)):
        first = 0 if options.get("causal") == "top_left" else keys - queries  # on which the first query stands
        seen = np.zeros(keys, bool)
        seen[max(0, first - left) : max(0, first + queries + right) if queries else 0] = True
        for name in "kv":
            of.own[name][n][~seen] = np.nan
    check("sm90", GPU, of, options, others, backward=False, tiles={"forward": tile})


SHARED: dict[str, Case] = {
    "packed": lambda r: (packed(r, [70, 0, 1, 90], [300, 3, 0, 140]), {"causal": True}, {}, USUAL),
    "tokens on pages": lambda r: (
        packed(r, [1] * 4, [300, 3, 500, 140], k="paged", page=32, q="dense", heads=(8, 2)), {},
        {"sinks": normal(r, 8)}, (2, 128, 4, 1),
    ),
    "packed tokens on caches": lambda r: (
        packed(r, [1, 3, 1, 0], [300, 3, 500, 140], k="cache", heads=(8, 2)), {"causal": True},
        {"sinks": normal(r, 8)}, (2, 128, 4, 1),
    ),
}  # fmt: skip


@cases(SHARED, "tokens on pages")
def test_keys_in_shares(
    case: str, seen: list[KernelPlan], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of each sequence; of short ones some are empty."""
    monkeypatch.setattr(sm90_forward_cost, "dealt", lambda *_: Dealt(3, 0))
    monkeypatch.setattr(shares, "by_length", lambda *_: (0, 3))
    of, options, others, tile = SHARED[case](rng)
    check("sm90", GPU, of, options, others, backward=False, tiles={"forward": tile})
    assert dict(seen[0].constants)["SHARES"] and dict(seen[0].scalars)["shares"] == 3


CUT: dict[str, Case] = {
    "tokens on pages": lambda r: (
        packed(r, [1] * 4, [300, 3, 600, 0], k="paged", page=32, q="dense", heads=(8, 2)), {},
        {"sinks": normal(r, 8)}, (2, 128, 4, 1),
    ),
    "a few on caches": lambda r: (
        packed(r, [3] * 4, [300, 3, 600, 140], k="cache", q="dense", heads=(4, 2)), {"causal": True}, {},
        (2, 128, 4, 1),
    ),
    "packed tokens on packed keys": lambda r: (
        packed(r, [1] * 4, [300, 3, 600, 0], heads=(8, 2), behind=0), {"causal": True}, {"sinks": normal(r, 8)},
        (2, 128, 4, 1),
    ),
    "a few packed on pages, and rows behind them": lambda r: (
        packed(r, [3, 0, 1, 2], [300, 3, 600, 140], k="paged", page=16, heads=(4, 1), behind=2), {"causal": True}, {},
        (1, 64, 3, 2),
    ),
    "packed that were not expected to be long": lambda r: (
        packed(r, [1, 130, 0, 200, 1], [300, 131, 5, 600, 0], heads=(2, 2), behind=140), {"causal": True}, {},
        (2, 128, 4, 1),
    ),
    "queries for each on packed keys": lambda r: (
        packed(r, [3] * 4, [300, 3, 600, 140], q="dense", heads=(4, 2), offsets="int64"), {}, {}, (2, 128, 4, 1),
    ),
    "bias and mask": lambda r: (
        packed(r, [3] * 4, [150, 3, 0, 70], k="cache", q="dense"), {"causal": True},
        {"bias": normal(r, 1, HEADS, 3, 160, dtype=np.float16), "mask": drawn(r, N, HEADS, 3, 160)}, (2, 64, 2, 1),
    ),
}  # fmt: skip


@cases(CUT, "tokens on pages")
def test_keys_in_shares_by_length(
    case: str, seen: list[KernelPlan], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of keys each, so that long sequences have many; alone each is cut in as many."""
    for name, tiles in (("LENGTH_TILES", 1), ("LONG_TILES", 2)):
        monkeypatch.setattr(shares, name, tiles)
    of, options, others, tile = CUT[case](rng)
    alone = {n: Dealt(max(2, -(-n // tile[1])), 0) for n in of.keys}  # (sinks are added where shares are combined)
    monkeypatch.setattr(sm90_forward_cost, "longest_q", lambda _: 1)
    monkeypatch.setattr(sm90_forward_cost, "dealt", lambda x, *_: alone.get(x.seq_k, Dealt(1, 0)))
    check("sm90", GPU, of, options, others, backward=False, tiles={"forward": tile})
    constants = dict(seen[0].constants)
    assert constants["SHARES"] and constants["SHARE_TILES"] == 1 and dict(seen[0].scalars)["shares"] >= 3


@pytest.mark.parametrize("last_first", [False, True])
def test_shares_are_found_again_for_other_lengths(
    last_first: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than lanes, launched again and again on the same memory: all follows from the lengths there."""
    for name, tiles in (("LENGTH_TILES", 1), ("LONG_TILES", 2)):
        monkeypatch.setattr(shares, name, tiles)
    count, most = 37, 300
    of = packed(rng, [2] * count, [most] * count, k="cache", q="dense", heads=(2, 1), behind=0, offsets="int64")
    given = {name: of.of_queries(name) if name == "q" else of.of_keys(name) for name in "qkv"} | of.lengths()
    problem = state(**given, causal=True)
    [made] = plans_of(problem, GPU, "sm90", False, {}, {"forward": (2, 128, 4, 1)})
    scalars, constants = dict(made.scalars), dict(made.constants)
    assert constants["SHARE_TILES"] == 1 and scalars["shares"] == 3 and made.workspace[0].nbytes
    [library] = Ran([made]).libraries
    inputs = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in given.items()}
    spaces = {x.name: Guarded(x.shape, x.dtype) for x in made.workspace}
    long = np.zeros(count, "i8")
    long[[3, 34]] = most, 129
    for lengths in (np.full(count, most), np.zeros(count), long, rng.integers(-9, 500, count), np.full(count, 1 << 40)):
        inputs["seqlens_k"] = Guarded((count,), lengths.astype("i8").dtype, lengths.astype("i8"))
        results = {"out": Guarded(given["q"].shape, "f2"), "lse": Guarded((count, 2, 2), "f4")}
        run(library, made, problem, results | inputs | spaces, last_first, 2)
        for n, keys in enumerate(np.clip(lengths, 0, most).astype(int)):
            out, lse = exact(given["q"][n], given["k"][n, :keys, 0], given["v"][n, :keys, 0])
            np.testing.assert_allclose(results["out"].array[n], out, rtol=0, atol=4e-3, err_msg=f"{n} of {lengths}")
            np.testing.assert_allclose(results["lse"].array[n], lse, rtol=0, atol=4e-3, err_msg=f"{n} of {lengths}")


@pytest.mark.parametrize("last_first", [False, True])
def test_shares_are_found_again_for_other_packed_lengths(
    last_first: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of packed queries, of which some have more than the tile that was expected, or none, and of offsets that
    are nonsense: these write nothing elsewhere."""
    for name, tiles in (("LENGTH_TILES", 1), ("LONG_TILES", 2)):
        monkeypatch.setattr(shares, name, tiles)
    count, most, rows = 37, 300, 200
    of = packed(rng, [2] * count, [most] * count, k="cache", heads=(2, 1), behind=rows - 2 * count, offsets="int64")
    given = {name: of.of_queries(name) if name == "q" else of.of_keys(name) for name in "qkv"} | of.lengths()
    given["q"] = rng.standard_normal(given["q"].shape).astype("f2")
    problem = state(**given, causal=True, max_seqlen_q=2)
    [made] = plans_of(problem, GPU, "sm90", False, {}, {"forward": (2, 128, 4, 1)})
    assert dict(made.constants)["SHARE_TILES"] == 1 and dict(made.constants)["PACKED_Q"]
    [library] = Ran([made]).libraries
    inputs = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in given.items()}
    spaces = {x.name: Guarded(x.shape, x.dtype) for x in made.workspace}
    few = np.cumsum([0, *rng.integers(0, 3, count)])
    one = np.where(np.arange(count + 1) > 33, 170, 0) + np.minimum(np.arange(count + 1), 30)
    wild = rng.integers(-9, 300, count + 1)
    for offsets in (few, 2 * np.arange(count + 1), one, wild, np.full(count + 1, -(1 << 40))):
        lengths = rng.integers(-9, most + 1, count)
        for name, x in (("cu_seqlens_q", offsets), ("seqlens_k", lengths)):
            inputs[name] = Guarded(x.shape, "i8", x.astype("i8"))
        results = {"out": Guarded(given["q"].shape, "f2"), "lse": Guarded((2, rows), "f4")}
        run(library, made, problem, results | inputs | spaces, last_first, 2)
        if offsets is wild:
            assert not np.isnan(results["out"].array).any(), f"not written, with {wild}"
            continue
        bounds = np.clip(offsets, 0, rows)
        for n, (first, end, keys) in enumerate(zip(bounds, bounds[1:], np.clip(lengths, 0, most))):
            out, lse = exact(given["q"][first:end], given["k"][n, :keys, 0], given["v"][n, :keys, 0])
            about = f"{n} of {offsets} and {lengths}"
            np.testing.assert_allclose(results["out"].array[first:end], out, rtol=0, atol=4e-3, err_msg=about)
            np.testing.assert_allclose(results["lse"].array[:, first:end], lse, rtol=0, atol=4e-3, err_msg=about)
        assert not results["out"].array[bounds[-1] :].any() and np.isneginf(results["lse"].array[:, bounds[-1] :]).all()


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sequence whose heads share K and V, under a causal mask."""
    scores = np.einsum("ihd,jd->hij", q.astype("f8"), k.astype("f8")) / np.sqrt(q.shape[-1])
    i, j = np.arange(len(q)), np.arange(len(k))
    scores[:, j > i[:, None] + len(k) - len(q)] = -np.inf
    top = scores.max(-1, keepdims=True, initial=-1e30)
    sums = np.exp(scores - top).sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(sums) + top[..., 0]
    out = np.einsum("hij,jd->ihd", np.exp(scores - top), v.astype("f8")) / np.where(sums > 0, sums, 1).T[..., None]
    return out, lse


POISONED: dict[str, Case] = {
    "packed": lambda r: (packed(r, [70, 33, 130], [80, 50, 140]), {}, {}, USUAL),
    "soft cap": lambda r: (packed(r, [70, 33, 130], [80, 50, 140]), {"softcap": 5.0}, {}, USUAL),
    "bias by line": lambda r: (
        packed(r, [70, 33, 130], [80, 50, 140], lines=("bias",)), {"causal": True},
        {"bias": normal(r, HEADS, 233 + 5, 144, dtype=np.float16)}, (2, 64, 2, 1),
    ),
    "three warpgroups": lambda r: (packed(r, [70, 33, 200], [80, 50, 256]), {}, {}, (3, 128, 3, 1)),
}  # fmt: skip


@cases(POISONED, "packed", "soft cap")
def test_no_bit_follows_from_another_sequence(case: str, rng: np.random.Generator) -> None:
    """Whatever the sequence in the middle holds: NaN, or scores so large that all maxima would grow."""
    of, options, others, tile = POISONED[case](rng)
    given = {name: of.of_queries(name) if name == "q" else of.of_keys(name) for name in "qkv"}
    problem = state(**given, **options, **others, **of.lengths())
    plans = plans_of(problem, GPU, "sm90", False, {}, {"forward": tile})
    ran, results = Ran(plans), []
    rows_q, rows_k = (slice(n[0], n[0] + n[1]) for n in (of.queries, of.keys))  # of the one in the middle
    for bad in (1.0, 300.0, np.nan):
        these = {name: x.copy() for name, x in given.items()}
        for name, rows in (("q", rows_q), ("k", rows_k), ("v", rows_k)):
            these[name][rows] *= bad
        arrays = {name: x.copy() for name, x in others.items()}
        for name in of.lines:
            arrays[name][:, rows_q] *= bad
        shapes = {"out": given["q"].shape, "lse": (HEADS, len(given["q"]))}
        found = ran(problem, plans, these | arrays | of.lengths(), shapes)
        results.append([np.delete(found["out"], range(rows_q.start, rows_q.stop), 0),
                        np.delete(found["lse"], range(rows_q.start, rows_q.stop), 1)])  # fmt: skip
    for other in results[1:]:
        for x, y in zip(results[0], other):
            assert not np.isnan(x).any() and np.array_equal(x, y)


SMALL: dict[str, Any] = {"dims": (32, 32), "heads": (2, 1)}
NONSENSE: dict[str, Case] = {
    "packed": lambda r: (
        packed(r, **SMALL), {"causal": True, "window": (20, None)},
        {"alibi_slopes": normal(r, N, 2), "key_mask": drawn(r, N, 140), "sinks": normal(r, 2)}, None,
    ),
    "bias by line": lambda r: (
        packed(r, lines=("bias",), **SMALL), {"causal": True}, {"bias": normal(r, 2, ROWS, 144)}, None,
    ),
    "pages": lambda r: (packed(r, k="paged", page=24, offsets="int64", **SMALL), {"causal": True}, {}, None),
    "caches": lambda r: (packed(r, k="cache", offsets="int64", **SMALL), {"causal": "top_left"}, {}, None),
}  # fmt: skip


@cases(NONSENSE, "pages")
def test_nonsense_stays_inside(case: str, rng: np.random.Generator) -> None:
    of, options, others, _ = NONSENSE[case](rng)
    check_nonsense("sm90", GPU, of, 25, options, others, backward=False)


def test_what_is_not_served_is_named(rng: np.random.Generator) -> None:
    of = packed(rng, k="paged", page=12)
    problem = state(of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), **of.lengths())
    with pytest.raises(ValueError, match="sm90 takes pages of a multiple of 8 rows, not 12"):
        plan(problem, Arch.of("sm_90a"), FORWARD, "sm90")


def test_planners_reckon_with_likely_lengths(rng: np.random.Generator) -> None:
    of = packed(rng)
    arrays = (of.of_queries("q"), of.of_keys("k"), of.of_keys("v"))
    likely = as_dense(state(*arrays, causal=True, **of.lengths()))
    assert (likely.batch, likely.seq_q, likely.seq_k, likely.ragged) == (4, 52, 57, False)
    assert likely.diagonal == 5
    hinted = as_dense(state(*arrays, max_seqlen_q=128, max_seqlen_k=64, **of.lengths()))
    assert (hinted.batch, hinted.seq_q, hinted.seq_k) == (4, 52, 57)  # none is long
    for hint, (batch, queries) in {2048: (2, 2048), 1024: (4, 1000)}.items():  # some are, and none by much
        long = as_dense(cached(4, 64000, seq_q=4000, rows_q=4000, rows_k=64000, max_seqlen_q=hint))
        assert (long.batch, long.seq_q) == (batch, queries)


STEPS = """
extern "C" __global__ void attention_steps(const Params p) {
    TileSchedule schedule(p);
    for (int n = blockIdx.x * 32 + threadIdx.x; n < schedule.total(); n += gridDim.x * 32) {
        Tile tile = schedule.tile(n);
        p.lse[n] = tile.none() ? 0 : walk_of(p, tile).count();
    }
}
"""


def test_no_thread_block_ends_much_later_than_others(rng: np.random.Generator) -> None:
    """Packed sequences under a causal mask: the last tiles to start are short, of whichever sequence they are."""
    of = packed(rng, [1024] * 8, [1024] * 8, heads=(16, 16), dims=(128, 128), behind=0)
    given = {name: of.of_queries(name) if name == "q" else of.of_keys(name) for name in "qkv"} | of.lengths()
    problem = state(**given, causal=True)
    made = sm90_forward.plan(problem, Arch.of("sm_90a"), None)
    [library] = compile_all(as_cpp(generate(made) + STEPS, ["attention_steps"]))
    made = replace(made, launches=(replace(made.launches[0], name="attention_steps", grid=132, threads=32),))
    arrays = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in given.items()}
    arrays |= {"out": Guarded(given["q"].shape, "f2"), "lse": Guarded((16, 8192), "f4")}
    run(library, made, problem, arrays, False, 2)
    steps = arrays["lse"].array.ravel()
    steps = steps[np.isfinite(steps)]
    ends = [0.0] * made.launches[0].grid
    for n in steps[steps > 0]:
        heapq.heapreplace(ends, ends[0] + n + 1)
    assert steps.sum() == 16 * 8 * sum(range(1, 9)) and max(ends) < 1.04 * np.mean(ends)


@pytest.mark.parametrize(
    ("problem", "share_tiles", "parts"),
    [
        (cached(32, 65536), 32, 32),  # query tiles for all multiprocessors, and one cache may be longer than others
        (cached(16, 8192), 0, 1),  # not much longer
        (cached(32, 65536, max_seqlen_k=4096), 0, 1),  # not likely
        (cached(4, 65536), 16, 64),  # multiprocessors would be idle
        (cached(32, 65536, (8, 1)), 16, 64),
        (cached(2, 2048), 2, 16),  # in no fewer than where all are as long
        (cached(4, 2**20), 16, 1024),
        (cached(64, 2**20), 64, 256),  # more would take too much memory
        (cached(1, 65536), 0, 32),  # nothing to differ from
        (cached(32, 65536, left=4000), 0, 1),
        (cached(32, 65536, block_mask=("batch", "head")), 0, 1),
        (cached(8, 65536, seq_q=300), 0, 1),
        (cached(8, 65536, seq_q=64, rows_q=64), 16, 64),
        (cached(32, 65536, seq_q=32, rows_q=32), 32, 32),  # a token each
        (cached(32, 65536, seq_q=50, rows_q=50), 0, 5),  # who knows
        (cached(32, 65536, seq_q=50, rows_q=50, max_seqlen_q=1), 32, 32),
        (cached(32, 64000, seq_q=32, rows_q=32, rows_k=64000), 32, 32),  # four times the mean is long
        (cached(64, 64000, seq_q=64, rows_q=64, rows_k=64000), 0, 1),  # not that many more
        (cached(64, 64000, seq_q=64, rows_q=64, rows_k=64000, max_seqlen_k=8192), 32, 32),
        (cached(512, 32768, seq_q=32768, rows_q=32768, rows_k=32768), 0, 1),  # short ones
        (
            cached(2048, 2**23, seq_q=2048, rows_q=2048, rows_k=2**23, max_seqlen_q=1, max_seqlen_k=16384),
            0,
            1,
        ),  # none is cut
        (cached(4, 65536, seq_q=256, rows_q=256, max_seqlen_q=256), 0, 2),  # the hint is right, not the mean
    ],
)
def test_where_each_cache_is_cut_by_its_own_length(problem: Any, share_tiles: int, parts: int) -> None:
    made = sm90_forward.plan(problem, Arch.of("sm_90a"), None)
    assert (dict(made.constants)["SHARE_TILES"], dict(made.scalars)["shares"]) == (share_tiles, parts)
    if share_tiles:
        assert share_tiles * parts * dict(made.constants)["KEYS"] >= problem.seq_k, "of the longest something is left"
        assert max(x.nbytes for x in made.workspace) <= shares.MOST_LEFT


@pytest.mark.parametrize("rows", [8, 2**17])
def test_shares_leave_no_more_than_there_is_room_for(rows: int) -> None:
    """Of all rows of q, though a hint says that few of them are filled."""
    offsets = Given("cu_seqlens_q", "int32", ("offset",))
    tokens = cached(2, 8192, seq_q=rows, rows_q=rows, max_seqlen_q=1)
    made = plan(replace(tokens, given=(offsets, *tokens.given)), Arch.of("sm_90a"), FORWARD, "sm90")
    assert dict(made.constants)["SHARES"] == (rows == 8)
    assert sum(x.nbytes for x in made.workspace) < 1.02 * shares.MOST_LEFT


def test_shares_of_float64_leave_twice_as_much() -> None:
    tokens = replace(cached(64, 2**17, (4, 4), seq_q=16), dtype="float64")
    made = plan(tokens, Arch.of("sm_80"), FORWARD, "sm80")
    assert 0.5 * shares.MOST_LEFT < sum(x.nbytes for x in made.workspace) < 1.02 * shares.MOST_LEFT
