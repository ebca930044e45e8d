"""The NumPy path against standard attention in float64."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from criterion import assert_as_good, large_score_units
from reference import DTYPES, draw, fresh_rng, references, state
from semantics import draw_inputs

from cupyflash import attention, attention_backward, cpu
from cupyflash.cpu import crew, tiles
from cupyflash.cpu.pairs import Pairs


def check(q, k, v, key_mask=None, dout=None, units=None, dlse=None, **options):
    """Forward and, with dout, backward against the reference; returns what was computed, by name."""
    problem = state(q, k, v, key_mask, **options)
    exact, own = references(problem, q, k, v, key_mask, dout, dlse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = cpu.forward(problem, q, k, v, key_mask=key_mask)
        grads = () if dout is None else cpu.backward(problem, dout, q, k, v, out, lse, dlse, key_mask=key_mask)
    assert out.dtype == q.dtype and lse.dtype == DTYPES[problem.lse_dtype]
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    for name, x in found.items():
        assert name == "lse" or x.dtype == q.dtype
        assert_as_good(x, getattr(exact, name), getattr(own, name), name, (units or {}).get(name, 1.0))
    return found


def arrays(rng, dtype, batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v):
    """q, k, v and dout."""
    return (
        draw(rng, dtype, batch, seq_q, heads_q, dim),
        draw(rng, dtype, batch, seq_k, heads_k, dim),
        draw(rng, dtype, batch, seq_k, heads_k, dim_v),
        draw(rng, dtype, batch, seq_q, heads_q, dim_v),
    )


@pytest.fixture(params=["one tile", "many tiles"])
def tile_size(request, monkeypatch):
    """Small tiles as well as the real ones, so that small inputs have edges and tails of every kind."""
    if request.param == "many tiles":
        monkeypatch.setattr(tiles, "QUERIES", 16)
        monkeypatch.setattr(tiles, "KEYS", 8)


OPTIONS = [
    {"causal": causal, "window": window}
    for causal in (False, True, "top_left")
    for window in (None, (9, None), (None, 3), (5, 2), (0, 0))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seq_q, seq_k", [(37, 37), (21, 50), (50, 21)])
def test_masks(options, seq_q, seq_k, tile_size):
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 2, seq_q, seq_k, 4, 2, 16, 12)
    check(q, k, v, None, dout, **options)
    check(q, k, v, rng.random((2, seq_k)) < 0.6, dout, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype, causal, tile_size):
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, dtype, 1, 70, 45, 6, 3, 40, 24)
    check(q, k, v, rng.random((1, 45)) < 0.8, dout, causal=causal, window=(30, 11), scale=0.3)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 1, 1),
        (3, 1, 300, 8, 1, 64, 64),  # decoding, multi-query
        (1, 513, 257, 1, 1, 59, 111),  # one more than a tile
        (1, 1030, 700, 2, 1, 8, 8),  # several tiles and tails
        (2, 7, 130, 2, 2, 512, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(shape, causal):
    q, k, v, dout = arrays(fresh_rng(), "float32", *shape)
    check(q, k, v, None, dout, causal=causal)


def test_any_strides():
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 2, 33, 41, 4, 2, 10, 14)
    problem = state(q, k, v, causal=True)
    out, lse = cpu.forward(problem, q, k, v)
    grads = cpu.backward(problem, dout, q, k, v, out, lse)

    def odd(x):
        """The same values, neither contiguous nor in order."""
        wide = np.full((*x.shape[::-1], 2), np.nan, x.dtype)
        wide[..., 1] = x.T
        return wide[::-1, ..., 1].T[..., ::-1]

    strange = [odd(x) for x in (q, k, v, dout, out)]
    np.testing.assert_array_equal(strange[0], q)
    odd_out, odd_lse = cpu.forward(problem, *strange[:3])
    odd_grads = cpu.backward(problem, strange[3], *strange[:3], strange[4], odd(lse))
    for a, b in zip((odd_out, odd_lse, *odd_grads), (out, lse, *grads)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["large logits", "dominant key", "equal scores"])
def test_scores_that_hurt(dtype, kind, tile_size):
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, dtype, 1, 40, 60, 2, 1, 32, 32)
    if kind == "large logits":
        q, k = (x * x.dtype.type(40) for x in (q, k))
        units = large_score_units(state(q, k, v, scale=1.0), q, k)
        found = check(q, k, v, None, dout, units, scale=1.0)
        assert found["lse"].max() > 1e4
    elif kind == "dominant key":
        k[:, 47] *= 30
        units = large_score_units(state(q, k, v), q, k)
        check(q, k, v, None, dout, units)
        check(q, k, v, None, dout, units, causal=True)
    else:
        k[:] = k[:, :1]
        found = check(q, k, v, None, dout)
        mean = v.astype(np.float64).mean(axis=1, keepdims=True)
        assert np.abs(found["out"] - mean).max() < {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_no_key(dtype, tile_size):
    rng = fresh_rng()
    # (So many numbers that the largest error of own precision is no matter of luck: with a sixteenth 1 in 200 missed.)
    q, k, v, dout = arrays(rng, dtype, 6, 40, 24, 8, 4, 16, 16)
    key_mask = np.ones((6, 24), bool)
    key_mask[1] = False
    found = check(q, k, v, key_mask, dout, causal=True)
    for rows in (np.s_[0, :16], np.s_[1]):  # queries before the first key; a batch entry without keys
        assert not found["out"][rows].any() and not found["dq"][rows].any()
    assert np.isneginf(found["lse"][0, :, :16]).all() and np.isneginf(found["lse"][1]).all()
    assert not found["dk"][1].any() and not found["dv"][1].any()
    assert np.isfinite(found["lse"][0, :, 16:]).all() and found["out"][0, 16:].any()


# An infinite dout is left out: whether inf - inf arises depends on the order of a sum.
@pytest.mark.parametrize("value, where", [(np.nan, x) for x in ("q", "k", "v", "dout")] + [(np.inf, x) for x in "qkv"])
def test_what_is_not_finite_stays_where_the_reference_has_it(value, where, tile_size):
    """Hidden pairs do not spread it: neither those of the band, nor keys that key_mask hides."""
    rng = fresh_rng()
    given = dict(zip(("q", "k", "v", "dout"), arrays(rng, "float32", 2, 40, 40, 2, 1, 16, 16)))
    given[where][0, 20, 0, 3] = value
    for options in ({}, {"causal": True}, {"window": (4, 4)}):
        found = check(given["q"], given["k"], given["v"], None, given["dout"], **options)
        names = {"q": ("out", "dq", "dk"), "k": ("out", "dk"), "v": ("out", "dq"), "dout": ("dv",)}[where]
        assert not any(np.isfinite(found[name]).all() for name in names)
        assert all(np.isfinite(x[1]).all() for x in found.values())
    if where in ("k", "v"):
        key_mask = np.ones((2, 40), bool)
        key_mask[0, 20] = False
        found = check(given["q"], given["k"], given["v"], key_mask, given["dout"])
        assert all(np.isfinite(x).all() for x in found.values())


def test_scores_of_minus_infinity_are_as_if_hidden(tile_size):
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 1, 20, 30, 1, 1, 8, 8)
    q[..., 0] = np.abs(q[..., 0]) + 0.1
    k[:, ::3, :, 0] = -np.inf
    out = check(q, k, v, None, dout)["out"]
    hidden = np.arange(30)[None] % 3 != 0
    np.testing.assert_allclose(out, check(q, k, v, hidden)["out"], atol=1e-6)
    k[..., 0] = -np.inf
    found = check(q, k, v, None, dout)
    assert np.isneginf(found["lse"]).all() and not found["out"].any() and not found["dv"].any()


SIZES = ("batch", "seq_q", "seq_k", "heads", "dim", "dim_v")


@pytest.mark.parametrize("zero", [c for n in (1, 2) for c in itertools.combinations(SIZES, n)], ids="+".join)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (2, 2)}], ids=str)
def test_empty(zero, options):
    size = {name: 0 if name in zero else 5 for name in SIZES}
    shape = [size[name] for name in ("batch", "seq_q", "seq_k", "heads", "heads", "dim", "dim_v")]
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", *shape)
    found = check(q, k, v, None, dout, **options)
    check(q, k, v, rng.random((shape[0], shape[2])) < 0.5, dout, **options)
    if zero == ("dim",):  # all scores are 0, so each query takes the mean of the keys it sees
        assert np.isfinite(found["lse"]).all() and found["out"].any()


@pytest.mark.parametrize("workers", ["1", "5"])
def test_one_thread_or_many(workers, monkeypatch):
    """With more threads than heads the gradients of one head are summed over several tasks."""
    monkeypatch.setenv("OMP_NUM_THREADS", workers)
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    monkeypatch.setattr(tiles, "QUERIES", 16)
    assert crew.threads() == int(workers)
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 1, 100, 90, 4, 2, 16, 16)
    check(q, k, v, rng.random((1, 90)) < 0.7, dout, causal=True)
    q, k, v, dout = arrays(rng, "float32", 1, 100, 90, 1, 1, 16, 16)
    first, second = (check(q, k, v, None, dout, causal=True) for _ in range(2))
    for name in first:  # bit for bit
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("given", ["", "bias", "key_mask"])
def test_heads_that_are_put_together(given, group, monkeypatch):
    """Are the same, bit for bit, as each by itself."""
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 5, 40, 30, 4 * group, 4, 16, 16)
    extra = {"bias": rng.standard_normal((5, 1, 40, 30), "float32")} if given == "bias" else {}
    key_mask = rng.random((5, 30)) < 0.7 if given == "key_mask" else None
    problem = state(q, k, v, key_mask, causal=True, **extra)
    together = tiles.Tiling.of(problem, queries_apart=True)
    assert together.heads == 4 * group and (together.batches > 1) == (given != "key_mask")

    def results():
        out, lse = cpu.forward(problem, q, k, v, key_mask=key_mask, **extra)
        grads = cpu.backward(problem, dout, q, k, v, out, lse, key_mask=key_mask, wrt=tuple(extra), **extra)
        return out, lse, *grads[:3], *(grads.of_arrays[name] for name in extra)

    found = results()
    monkeypatch.setattr(
        tiles.Tiling, "of", classmethod(lambda cls, problem, queries_apart: together._replace(batches=1, heads=group))
    )
    for x, y in zip(results(), found):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("asked", "found"),
    [("3", 3), (" 3 ", 3), ("8,2", 8), ("007", 7), ("100000", 256), ("9" * 5000, 256), ("0", None), ("-1", None),
     ("\u00b2", None), ("many", None), ("", None)],
    ids=lambda x: str(x)[:8],
)  # fmt: skip
def test_threads_that_are_asked_for(asked, found, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = crew.threads()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert crew.threads() == (own if found is None else found)


def test_no_more_threads_can_be_had(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    q, k, v, dout = arrays(fresh_rng(), "float32", 1, 100, 90, 4, 2, 16, 16)
    check(q, k, v, None, dout)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    monkeypatch.setattr(sys.modules["cupyflash.cpu.forward"], "product", fail)
    q, k, v, _ = arrays(fresh_rng(), "float32", 1, 100, 90, 4, 2, 16, 16)
    with pytest.raises(MemoryError, match="no room"):
        cpu.forward(state(q, k, v), q, k, v)


@pytest.mark.parametrize("dtype, large", [("float32", 1e30), ("float64", 1e290)])
@pytest.mark.parametrize("side", ["q", "k"])
def test_scales_far_from_one(dtype, large, side):
    """As if the factor stood in q or k: neither q nor k leaves its range on the way to scores of a few units."""
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, dtype, 1, 30, 40, 2, 1, 16, 16)
    plain = check(q, k, v, None, dout, scale=0.25)
    half = DTYPES[dtype](large**0.5)
    for scale in (large, 1 / large):
        up = DTYPES[dtype](1 / half if scale > 1 else half)
        given = {"q": q * up, "k": k * up}
        given[side] *= DTYPES[dtype](0.25)  # exact
        problem = state(given["q"], given["k"], v, scale=scale)
        out, lse = cpu.forward(problem, given["q"], given["k"], v)
        grads = cpu.backward(problem, dout, given["q"], given["k"], v, out, lse)
        step = 1e-4 if dtype == "float32" else 1e-10
        np.testing.assert_allclose(out, plain["out"], rtol=step, atol=step)
        np.testing.assert_allclose(lse, plain["lse"], rtol=step, atol=step)
        for name, x in (("dq", grads.dq), ("dk", grads.dk)):
            quarter = 0.25 if name == f"d{side}" else 1.0
            np.testing.assert_allclose(x * up * DTYPES[dtype](quarter), plain[name], rtol=step, atol=10 * step)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_values_near_the_largest_number(dtype):
    """The mean of finite values is finite, though their sum is not. Small values beside them stay what they are."""
    q, k, v, _ = arrays(fresh_rng(), dtype, 1, 20, 700, 2, 1, 16, 16)
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    v[..., :8] = 0.9 * largest
    v[..., 8] = -0.9 * largest
    v[..., 15] *= DTYPES[dtype](1e-36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, _ = cpu.forward(state(q, k, v), q, k, v)
    step = 1e-2 if dtype == "bfloat16" else 1e-5
    large = np.where(np.arange(9) < 8, 0.9, -0.9)
    np.testing.assert_allclose(
        out[..., :9].astype(np.float64) / largest, np.broadcast_to(large, (1, 20, 2, 9)), rtol=step
    )
    np.testing.assert_array_equal(
        out[..., 9:], cpu.forward(state(q, k, v), q, k, np.where(np.arange(16) < 9, v * 0, v))[0][..., 9:]
    )


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (30, 5)}], ids=str)
@pytest.mark.parametrize("full", ["bhqk", "bqk", "hqk", "qk", "k", "bhq", ""])
def test_many_threads_that_add_to_one_bias(full, options, monkeypatch):
    """Each in its turn, of many tiles; and keys that key_mask hides stand in other tiles in each batch entry."""
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    monkeypatch.setattr(tiles, "QUERIES", 16)
    monkeypatch.setattr(tiles, "KEYS", 8)
    rng = fresh_rng()
    inputs = draw_inputs(
        rng, "float32", batch=4, seq=(70, 50), heads=(4, 2), dims=(8, 8), given=("bias", "sinks"), full=full,
        key_mask=True,
        dlse=1.0,
    )  # fmt: skip
    q, k, v, dout, key_mask, dlse, given = inputs
    key_mask[0, 20:] = False  # one entry is done early
    key_mask[2] = False  # or has nothing to do
    problem = state(q, k, v, key_mask, deterministic=True, **options, **given)
    out, lse = cpu.forward(problem, q, k, v, key_mask=key_mask, **given)
    first = None
    for workers in ("1", "7"):
        monkeypatch.setenv("OMP_NUM_THREADS", workers)
        grads = cpu.backward(problem, dout, q, k, v, out, lse, dlse, wrt=("bias", "sinks"), key_mask=key_mask, **given)
        found = [*grads, grads.dbias, grads.dsinks]
        first = first or found
        for x, y in zip(found, first):
            np.testing.assert_array_equal(x, y)
    exact, _ = references(problem, q, k, v, key_mask, dout, dlse, **given)
    np.testing.assert_allclose(grads.dbias, exact.dbias, atol=1e-4)
    np.testing.assert_allclose(grads.dsinks, exact.dsinks, atol=1e-4)


def test_an_error_while_others_wait_for_their_turn(monkeypatch):
    """Reaches the caller, and nobody waits on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    q, k, v, dout = arrays(fresh_rng(), "float32", 3, 40, 30, 2, 2, 16, 16)
    bias = np.zeros((40, 30), np.float32)
    problem = state(q, k, v, bias=bias)
    out, lse = cpu.forward(problem, q, k, v, bias=bias)
    plain, begun, threads = Pairs.score, [], threading.active_count()

    def fail_first(self, s, at):
        begun.append(at)
        if (self.batches.start, at.heads.start) == (0, 0):
            while len(begun) < 3:
                time.sleep(0.01)
            raise MemoryError("no room")
        plain(self, s, at)

    monkeypatch.setattr(Pairs, "score", fail_first)
    with pytest.raises(MemoryError, match="no room"):
        cpu.backward(problem, dout, q, k, v, out, lse, wrt=("bias",), bias=bias)
    assert threading.active_count() == threads


def test_gradient_of_lse_of_rows_that_see_no_key():
    """Has no effect, whatever it is: the derivative of log sum exp of nothing is often NaN."""
    q, k, v, dout = arrays(fresh_rng(), "float32", 1, 20, 12, 2, 1, 8, 8)
    problem = state(q, k, v, causal=True)
    out, lse = cpu.forward(problem, q, k, v)
    dlse = fresh_rng().standard_normal(lse.shape).astype(np.float32)
    dlse[np.isneginf(lse)] = 0
    clean = cpu.backward(problem, dout, q, k, v, out, lse, dlse)
    dlse[np.isneginf(lse)] = np.nan
    for x, y in zip(cpu.backward(problem, dout, q, k, v, out, lse, dlse), clean):
        np.testing.assert_array_equal(x, y)
    check(q, k, v, None, dout, dlse=dlse, causal=True)


def test_tiles_outside_the_band_are_not_visited():
    q = np.empty((1, 4096, 1, 8), np.float32)

    def visited(**options):
        problem = state(q, q, q, **options)
        pairs, tiling = Pairs(problem, slice(0, 1), {}), tiles.Tiling.of(problem, queries_apart=True)
        found = [
            tile
            for rows in tiles.query_tiles(problem, tiling)
            for tile in tiles.key_tiles(pairs, slice(0, 1), rows, tiling)
        ]
        return len(found), sum(pairs.visible(tile) is not None for tile in found)

    rows, columns = 4096 // tiles.QUERIES, 4096 // tiles.KEYS
    assert visited() == (rows * columns, 0)
    ends = [tiles.QUERIES * (n + 1) for n in range(rows)]  # of the keys that a tile of queries sees
    assert visited(causal=True) == (sum(-(-end // tiles.KEYS) for end in ends), rows)
    assert visited(window=(64, 0))[0] <= rows * (tiles.QUERIES // tiles.KEYS + 1)


def test_memory_grows_with_the_sequence_not_its_square():
    seq, dim = 8192, 16
    q, k, v, dout = arrays(fresh_rng(), "float32", 1, seq, seq, 1, 1, dim, dim)
    problem = state(q, k, v)
    tracemalloc.start()
    try:
        out, lse = cpu.forward(problem, q, k, v)
        cpu.backward(problem, dout, q, k, v, out, lse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * seq * seq / 8  # the score matrix is 256 MiB


@pytest.mark.parametrize("lengths", [(1, 10**6), (10**6, 1), (1, 1), (3, 300), (10**4, 10**4)])
@pytest.mark.parametrize("heads", [(1, 1), (24, 2), (7, 7)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tile_has_room(lengths, heads, dtype):
    """In a core's cache; and its heads are whole groups of those that share K and V, or a part of one."""
    q, k = (np.broadcast_to(np.zeros((), dtype), (10**5, n, h, 64)) for n, h in zip(lengths, heads))
    for queries_apart in (False, True):
        tiling = tiles.Tiling.of(state(q, k, k), queries_apart)
        scores = tiling.batches * tiling.heads * tiling.queries * tiling.keys
        assert scores * q.itemsize <= 1 << 20
        assert scores // tiling.keys <= 4096 and scores // tiling.queries <= 4096  # rows of Q and of K
        group = heads[0] // heads[1]
        assert tiling.heads % group == 0 or group % tiling.heads == 0
        assert tiling.batches == 1 or tiling.heads == heads[0]


@pytest.mark.parametrize("shape", [(1, 8, 1024, 1024), (1024, 1024), (2, 1, 1024, 1024)], ids=str)
def test_memory_of_the_gradient_of_a_bias(shape, monkeypatch):
    """Is that of the bias, and no more, on however many threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    q, k, v, dout = arrays(fresh_rng(), "float32", shape[0] if len(shape) == 4 else 2, 1024, 1024, 8, 8, 8, 8)
    bias = np.zeros(shape, np.float32)
    problem = state(q, k, v, bias=bias)
    out, lse = cpu.forward(problem, q, k, v, bias=bias)
    peaks = []
    for wrt in ((), ("bias",)):
        tracemalloc.start()
        try:
            cpu.backward(problem, dout, q, k, v, out, lse, wrt=wrt, bias=bias)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < bias.nbytes + 4 * 3 * 4 * tiles.QUERIES * tiles.KEYS


# NaN of q or k is the score itself, which a bias cannot hide.
@pytest.mark.parametrize(
    "by, where", [("bias", "v"), ("bias", "dout"), *(("score", x) for x in ("q", "k", "v", "dout"))]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_of_minus_infinity_hides_what_stands_there(by, where, value, tile_size):
    """In a query that sees no key, and in a key that no query sees."""
    rng = fresh_rng()
    given = dict(zip(("q", "k", "v", "dout"), arrays(rng, "float32", 2, 40, 30, 2, 1, 8, 8)))
    seen, x = rng.random((40, 30)) < 0.6, rng.standard_normal((40, 30), "float32")
    seen[:, 7] = seen[11] = False
    if by == "bias":
        options = {"bias": np.where(seen, x, -np.inf)}
    else:
        options = {"score_arrays": {"x": x, "seen": seen}, "score": "seen[i, j] ? s + x[i, j] : -INFINITY"}

    def results(at):
        given[where][:, 11 if where in ("q", "dout") else 7] = at
        q, k, v, dout = given.values()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out, lse = attention(q, k, v, return_lse=True, **options)
            grads = attention_backward(dout, q, k, v, out, lse, wrt="bias" if by == "bias" else "x", **options)
        return out, lse, *grads, grads.dbias if by == "bias" else grads.dscore_arrays["x"]

    for x, y in zip(results(value), results(0)):
        np.testing.assert_array_equal(x, y)
