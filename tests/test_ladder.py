"""The ladder: every rung against the others and the reference, and the papers' claims about what each one moves."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
from reference import draw, standard, state

from cupyflash import reference as ladder

TOP = Path(__file__).resolve().parent.parent


def close(actual: object, exact: np.ndarray, name: str) -> None:
    actual = actual.get() if hasattr(actual, "get") else actual
    assert actual.shape == exact.shape and actual.dtype == exact.dtype, name
    np.testing.assert_allclose(
        actual, exact, rtol=0, atol=1e-12 * max(1, np.abs(exact[np.isfinite(exact)]).max()), err_msg=name
    )


def heads(*arrays: np.ndarray) -> list[np.ndarray]:
    """(S, D) as (1, S, 1, D)."""
    return [x[None, :, None] for x in arrays]


def one_head(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """q, k, v, dout of one head; odd sizes that no tile divides, Dv different from D."""
    sq, sk, d, dv = (2 * rng.integers(low, high) + 1 for low, high in ((8, 25), (8, 25), (2, 6), (2, 6)))
    return tuple(draw(rng, "float64", *shape) for shape in ((sq, d), (sk, d), (sk, dv), (sq, dv)))


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> object:
    return importlib.import_module(request.param)


@pytest.mark.parametrize("masked", [False, True])
def test_standard(rng, xp, masked):
    shapes = (2, 13, 3, 5), (2, 17, 3, 5), (2, 17, 3, 7), (2, 13, 3, 7)
    q, k, v, dout = (draw(rng, "float64", *shape) for shape in shapes)
    key_mask = None
    if masked:
        key_mask = rng.random((2, 17)) < 0.6
        key_mask[1] = False  # a batch entry of padding only
    exact = standard(state(q, k, v, key_mask), q, k, v, key_mask, dout)
    a = [xp.asarray(x) for x in (q, k, v, dout)]
    out, p = ladder.standard_attention(*a[:3], key_mask=xp.asarray(key_mask) if masked else None)
    grads = ladder.standard_attention_backward(a[3], *a[:3], p)
    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), (exact.out, *exact[2:])):
        close(x, y, name)


@pytest.mark.parametrize("rung", [ladder.safe_softmax, ladder.online_softmax])
def test_softmax(rng, xp, rung):
    x = draw(rng, "float64", 2, 3, 11) * 1e3
    x[0, 0] = -np.inf
    x[0, 1, :4] = -np.inf  # the maximum rises from -inf on the way
    e = np.exp(x[0, 1:] - x[0, 1:].max(-1, keepdims=True))
    y = rung(xp.asarray(x))
    close(y[0, 1:], e / e.sum(-1, keepdims=True), "softmax")
    close(y[0, 0], np.zeros(11), "a row of -inf")
    close(
        y[1],
        ladder.standard_attention(*heads(x[1], np.eye(11), np.eye(11)), scale=1.0)[1][0, 0],
        "softmax in attention",
    )
    close(rung(xp.asarray(x[1, 2])), np.asarray(y[1, 2].tolist()), "without leading axes")


def test_one_head_rungs_agree(rng, xp):
    q, k, v, _ = one_head(rng)
    exact = standard(state(*heads(q, k, v), scale=0.7), *heads(q, k, v))
    a = [xp.asarray(x) for x in (q, k, v)]
    close(ladder.flash_one_pass(*a, scale=0.7), exact.out[0, :, 0], "one pass")
    out, ell, m = ladder.flash1_forward(*a, 150, scale=0.7)
    close(out, exact.out[0, :, 0], "flash1")
    close(m + xp.log(ell), exact.lse[0, 0], "flash1, m + log l")
    close(m, (0.7 * q @ k.T).max(1), "flash1, m")
    for parts in (1, 3, 100):
        out, lse = ladder.split_kv(*a, parts, scale=0.7)
        close(out, exact.out[0, :, 0], f"{parts} parts")
        close(lse, exact.lse[0, 0], f"{parts} parts, lse")


@pytest.mark.parametrize("hidden", ["none", "some", "first tile", "all"])
def test_flash1(rng, xp, hidden):
    q, k, v, dout = one_head(rng)
    key_mask = {
        "none": None,
        "some": rng.random(len(k)) < 0.6,
        "first tile": np.arange(len(k)) >= 5,
        "all": np.zeros(len(k), bool),
    }[hidden]
    mask = None if key_mask is None else key_mask[None]
    exact = standard(state(*heads(q, k, v), mask), *heads(q, k, v), mask, *heads(dout))
    a = [xp.asarray(x) for x in (q, k, v, dout)]
    mask = None if key_mask is None else xp.asarray(key_mask)
    for on_chip in (4 * max(q.shape[1], v.shape[1]), 150, 10**5):
        out, ell, m = ladder.flash1_forward(*a[:3], on_chip, key_mask=mask)
        grads = ladder.flash1_backward(a[3], *a[:3], out, ell, m, on_chip, key_mask=mask)
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), (exact.out, *exact[2:])):
            close(x, y[0, :, 0], f"{name}, M = {on_chip}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_qk", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("seq", [(23, 23), (29, 17), (17, 29)])
def test_flash2(rng, xp, causal, heads_qk, seq):
    (hq, hk), (sq, sk) = heads_qk, seq
    shapes = (2, sq, hq, 5), (2, sk, hk, 5), (2, sk, hk, 7), (2, sq, hq, 7)
    q, k, v, dout = (draw(rng, "float64", *shape) for shape in shapes)
    exact = standard(state(q, k, v, causal=causal), q, k, v, dout=dout)
    a = [xp.asarray(x) for x in (q, k, v, dout)]
    tile = {"rows": int(rng.integers(1, 40)), "keys": int(rng.integers(1, 40)), "causal": causal}
    out, lse = ladder.flash2_forward(*a[:3], **tile)
    grads = ladder.flash2_backward(a[3], *a[:3], out, lse, **tile)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), exact):
        close(x, y, f"{name}, {tile}")


def test_block_sparse_is_attention_over_its_blocks(rng, xp):
    q, k, v, _ = one_head(rng)
    rows, keys = ladder.tile_sizes(150, max(q.shape[1], v.shape[1]))
    shape = -(-len(q) // rows), -(-len(k) // keys)
    blocks = rng.random(shape) < 0.5
    blocks[0], blocks[1:, 1], blocks[1:, 0], blocks[:, 2] = False, True, False, False
    seen = blocks.repeat(rows, 0).repeat(keys, 1)[: len(q), : len(k)]
    s = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    p = np.nan_to_num(np.exp(s - np.where(seen.any(1), s.max(1), 0)[:, None]))
    exact = p @ v / np.maximum(p.sum(1), 1e-300)[:, None]

    for x in (k, v):
        x[2 * keys : 3 * keys] = np.nan  # a column of zero blocks is never touched
    out, ell, m = ladder.block_sparse(*(xp.asarray(x) for x in (q, k, v)), blocks, 150)
    close(out, exact, "out")
    close(ell, p.sum(1), "l")
    close(m, s.max(1), "m")


def test_io_of_standard_attention_is_nd_plus_n_squared():
    for n, d in ((16, 4), (48, 8)):
        q, k, v, dout = np.ones((4, 2, n, 3, d))
        _, p, forward = ladder.standard_attention(q, k, v, trace=True)
        *_, backward = ladder.standard_attention_backward(dout, q, k, v, p, trace=True)
        assert (forward.read, forward.written) == (6 * (3 * n * d + 2 * n * n), 6 * (n * d + 2 * n * n))
        assert (backward.read, backward.written) == (6 * (5 * n * d + 5 * n * n), 6 * (3 * n * d + 2 * n * n))
        assert forward.exponentials == 6 * n * n


@pytest.mark.parametrize("n, d, on_chip", [(12, 8, 72), (48, 8, 128), (96, 4, 64), (96, 4, 384)])
def test_io_of_flash1_is_n2_d2_over_m(n, d, on_chip):
    q, k, v, dout = np.ones((4, n, d))
    rows, keys = ladder.tile_sizes(on_chip, d)
    assert (rows, keys) == (min(on_chip // (4 * d), d), on_chip // (4 * d))
    assert n % rows == n % keys == 0
    out, ell, m, forward = ladder.flash1_forward(q, k, v, on_chip, trace=True)
    *_, backward = ladder.flash1_backward(dout, q, k, v, out, ell, m, on_chip, trace=True)
    steps = n // keys  # 4 N d / M where 4 d divides M
    assert forward.read == 2 * n * d + steps * (2 * n * d + 2 * n)
    assert forward.written == (1 + steps) * (n * d + 2 * n)
    assert forward.on_chip == 2 * (rows + keys) * d + rows * keys + 2 * rows
    assert forward.exponentials == n * n + 2 * n * steps
    assert forward.rescalings == 2 * n * d * steps
    assert backward.read == 2 * n * d + steps * (4 * n * d + 2 * n)
    assert backward.written == 5 * n * d + steps * n * d
    assert backward.exponentials == n * n
    if on_chip % (4 * d) == 0:  # the leading term, 12 N² d² / M, with what the lower terms may add
        leading = 12 * n**2 * d**2 / on_chip
        assert leading <= forward.moved <= leading * (1 + 4 / (3 * d)) + 3 * n * d + 2 * n


def test_io_of_flash1_halves_where_the_chip_doubles():
    q, k, v = np.ones((3, 256, 16))
    moved = [ladder.flash1_forward(q, k, v, on_chip, trace=True)[-1].moved for on_chip in (256, 512, 1024)]
    fixed = 3 * q.size + 2 * len(q)  # K, V and the first O, l, m
    assert (moved[0] - fixed) == 2 * (moved[1] - fixed) == 4 * (moved[2] - fixed)


@pytest.mark.parametrize("n, d, rows, keys", [(24, 4, 8, 4), (64, 8, 16, 32)])
def test_flash2_rescales_less_and_stores_less_than_flash1(n, d, rows, keys):
    q, k, v, dout = np.ones((4, n, d))
    out, lse, forward = ladder.flash2_forward(*heads(q, k, v), rows=rows, keys=keys, trace=True)
    *_, backward = ladder.flash2_backward(*heads(dout, q, k, v), out, lse, rows=rows, keys=keys, trace=True)
    row_steps, key_steps = n // rows, n // keys
    assert (forward.read, forward.written) == (n * d + row_steps * 2 * n * d, n * d + n)
    assert forward.exponentials == n * n + n * key_steps
    assert forward.rescalings == n * d * (key_steps + 1)
    assert forward.on_chip == 2 * (rows + keys) * d + rows * keys + 2 * rows
    assert backward.read == 4 * n * d + key_steps * (3 * n * d + 2 * n)
    assert backward.written == 3 * n * d + n + key_steps * n * d

    same_tiles = 4 * d * keys
    if ladder.tile_sizes(same_tiles, d)[1] == keys:
        *_, first = ladder.flash1_forward(q, k, v, same_tiles, trace=True)
        assert forward.rescalings < first.rescalings
        assert forward.exponentials < first.exponentials
        assert forward.written < first.written


def test_causal_tiles_are_skipped():
    q = np.ones((1, 32, 1, 4))
    *_, full = ladder.flash2_forward(q, q, q, rows=8, keys=8, trace=True)
    out, lse, causal = ladder.flash2_forward(q, q, q, rows=8, keys=8, causal=True, trace=True)
    *_, backward = ladder.flash2_backward(q, q, q, q, out, lse, rows=8, keys=8, causal=True, trace=True)
    assert full.exponentials == 16 * (64 + 8)
    assert causal.exponentials == 10 * (64 + 8)  # 4 tiles on the diagonal, 6 below it
    assert backward.exponentials == 10 * 64


def test_block_sparse_moves_its_share():
    q, k, v = np.ones((3, 32, 4))
    blocks = np.zeros((8, 8), bool)
    blocks[:, ::4] = True  # a quarter
    *_, dense = ladder.flash1_forward(q, k, v, 64, trace=True)
    *_, sparse = ladder.block_sparse(q, k, v, blocks, 64, trace=True)
    assert dense.read == 4 * sparse.read
    start = q.size + 2 * len(q)  # O, l and m are set everywhere
    assert dense.written - start == 4 * (sparse.written - start)
    *_, nothing = ladder.block_sparse(q, k, v, blocks & False, 64, trace=True)
    assert (nothing.read, nothing.written, nothing.multiplications) == (0, start, 0)


def test_io_of_the_rungs_between():
    x = np.ones((5, 8))
    _, safe = ladder.safe_softmax(x, trace=True)
    _, online = ladder.online_softmax(x, trace=True)
    assert (safe.moved, safe.exponentials) == (4 * x.size, 2 * x.size)
    assert (online.moved, online.exponentials) == (3 * x.size, 3 * x.size)

    q, k, v = np.ones((3, 6, 4))
    _, one_pass = ladder.flash_one_pass(q, k, v, trace=True)
    assert (one_pass.read, one_pass.written) == (24 + 2 * 6 * 24, 24)
    *_, whole = ladder.split_kv(q, k, v, 1, trace=True)
    *_, split = ladder.split_kv(q, k, v, 3, trace=True)
    # Each further part reads q again, writes an out and an lse, and the merge reads them.
    assert split.moved - whole.moved == 2 * (24 + 2 * (24 + 6))


def test_a_trace_of_ones_own_sees_every_step(rng):
    class Watch(ladder.Trace):
        def __init__(self):
            super().__init__()
            self.tiles, self.parts = [], []

        def hold(self, *arrays):
            super().hold(*arrays)
            self.tiles.append(tuple(x.shape for x in arrays[:2]))

        def add(self, part):
            super().add(part)
            self.parts.append(part)

    q, k, v, _ = (x[:6, :2] for x in one_head(rng))
    watch = Watch()
    *_, same = ladder.flash2_forward(*heads(q, k, v), rows=4, keys=3, trace=watch)
    *_, plain = ladder.flash2_forward(*heads(q, k, v), rows=4, keys=3, trace=True)
    assert same is watch and watch.tiles == [((r, 2), (3, 2)) for r in (4, 4, 2, 2)]
    assert (watch.moved, watch.multiplications) == (plain.moved, plain.multiplications)
    *_, split = ladder.split_kv(q, k, v, 3, trace=Watch())
    assert [part.tiles for part in split.parts] == 3 * [[((6, 2), (2, 2))]]


def test_float32_stays_float32(rng):
    q, k, v, dout = (x.astype(np.float32) for x in one_head(rng))
    out, ell, m = ladder.flash1_forward(q, k, v, 150)
    results = [out, ell, m, *ladder.flash1_backward(dout, q, k, v, out, ell, m, 150), *ladder.split_kv(q, k, v, 2)]
    results += [ladder.flash_one_pass(q, k, v), ladder.safe_softmax(q[0]), ladder.online_softmax(q)]
    results += ladder.standard_attention(*heads(q, k, v))
    out, lse = ladder.flash2_forward(*heads(q, k, v), causal=True)
    results += [out, lse, *ladder.flash2_backward(*heads(dout, q, k, v), out, lse, causal=True)]
    assert {x.dtype for x in results} == {np.dtype(np.float32)}


def test_messages():
    q = np.ones((4, 8))
    with pytest.raises(ValueError, match=r"on_chip is 31; it must be at least 4 · D = 32"):
        ladder.flash1_forward(q, q, q, 31)
    with pytest.raises(ValueError, match=r"blocks has shape \(4, 3\); it must be \(4, 4\), one for each tile of 1 x 1"):
        ladder.block_sparse(q, q, q, np.ones((4, 3), bool), 32)
    with pytest.raises(ValueError, match=r"parts is 0; it must be at least 1"):
        ladder.split_kv(q, q, q, 0)
    with pytest.raises(ValueError, match=r"q has 3 heads and k has 2; the heads of q must be a multiple"):
        ladder.flash2_forward(np.ones((1, 4, 3, 8)), np.ones((1, 4, 2, 8)), np.ones((1, 4, 2, 8)))
    with pytest.raises(TypeError, match=r"k is a list; it must be a NumPy or CuPy array"):
        ladder.flash_one_pass(q, [1.0], q)
    with pytest.raises(TypeError, match=r"x has dtype float16; all must be float32, or all float64"):
        ladder.safe_softmax(q.astype(np.float16))


def test_the_worked_example():
    found = doctest.testmod(importlib.import_module("cupyflash.reference.flash1"))
    assert found.attempted and not found.failed


def test_the_table_in_the_docs():
    found = doctest.testfile(str(TOP / "docs" / "ladder.md"), module_relative=False, encoding="utf-8")
    assert found.attempted and not found.failed
