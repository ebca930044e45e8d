"""Long sums on the CPU: many small terms, which all round the same way, do not drift."""

from __future__ import annotations

import numpy as np
import pytest
from reference import fresh_rng, references, state
from test_cpu import arrays

from cupyflash import attention, attention_backward, cpu
from cupyflash.cpu import tiles

LONG = {
    "one large eighth first": (97, 4096, 1, 1), "few queries": (1, 40000, 1, 1), "few keys": (12000, 33, 1, 1),
    "many tiles": (64, 20000, 1, 1), "many heads": (16, 16, 256, 1), "many of a head": (100, 100, 64, 64),
}  # fmt: skip


@pytest.mark.parametrize("of_bias", [False, True], ids=["keys", "bias"])
@pytest.mark.parametrize("shape", LONG.values(), ids=LONG)
def test_long_sums_of_small_terms_do_not_drift(shape, of_bias):
    """Each rounds the same way, if they are equal."""
    rng = fresh_rng()
    seq_q, seq_k, heads, group = shape
    q, k = np.zeros((1, seq_q, heads, 8), "float32"), np.zeros((1, seq_k, heads // group, 8), "float32")
    scores = np.where(np.arange(seq_k) < seq_k // 8, 0, -8).astype("float32")
    q[..., 0] = rng.uniform(0.9, 1, q.shape[:-1])  # else out is rounded alike in every row, which dk adds up
    k[0, ..., 0] = 0 if of_bias else scores[:, None]
    v, dout = rng.random((*k.shape[:3], 4), "float32"), rng.random((*q.shape[:3], 4), "float32")
    given = {"sinks": np.full(heads, -4, "float32")}
    given |= {"bias": np.tile(scores, (seq_q if heads > 1 else 1, 1))} if of_bias else {}
    problem = state(q, k, v, scale=1.0, **given)
    exact, own = references(problem, q, k, v, None, dout, **given)
    out, lse = cpu.forward(problem, q, k, v, **given)
    grads = cpu.backward(problem, dout, q, k, v, out, lse, wrt=tuple(given), **given)
    found = {"out": out, "lse": lse, **grads._asdict(), **{f"d{name}": getattr(grads, f"d{name}") for name in given}}
    for name, x in found.items():
        right = getattr(exact, name)
        off, of_own = (np.abs(y.astype(np.float64) - right).max() for y in (x, getattr(own, name)))
        assert off <= 2 * of_own + 1e-6 * max(1, np.abs(right).max()), name


def test_sums_over_equal_batch_entries_do_not_drift():
    """Nothing but these sums rounds: they are many times what one entry has, in float64."""
    rng, entries = fresh_rng(), 6000
    q, k, v, dout = (np.tile(x, (entries, 1, 1, 1)) for x in arrays(rng, "float32", 1, 6, 5, 1, 1, 8, 8))
    given = {"bias": rng.standard_normal((6, 5), "float32"), "sinks": np.zeros(1, "float32")}
    out, lse = attention(q, k, v, return_lse=True, **given)
    one, all_of_them = (
        attention_backward(dout[:n], q[:n], k[:n], v[:n], out[:n], lse[:n], wrt=given, **given) for n in (1, entries)
    )
    wide = {name: np.broadcast_to(x, (entries, *x.shape)) for name, x in given.items()}["bias"][:, None]
    each = attention_backward(
        dout, q, k, v, out, lse, wrt="bias", bias=np.ascontiguousarray(wide), sinks=given["sinks"]
    ).dbias  # fmt: skip
    exact = each.astype(np.float64).sum(axis=(0, 1))
    assert np.abs(all_of_them.dbias - exact).max() <= 1e-6 * np.abs(exact).max()
    exact = entries * one.dsinks.astype(np.float64)
    assert np.abs(all_of_them.dsinks - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("of", ["tiles", "heads"])
def test_sums_of_dk_and_dv_do_not_drift(of, monkeypatch):
    """Over thousands of equal tiles of queries, and over many query heads that share a key."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    count = 6000 if of == "tiles" else 1024
    if of == "tiles":
        monkeypatch.setattr(tiles, "QUERIES", 1)
        monkeypatch.setattr(tiles, "LONGEST", 1)
        monkeypatch.setattr(tiles, "KEYS", 4)
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 1, 1, 4, 1, 1, 8, 8)
    q, dout = (np.repeat(x, count, axis=1 if of == "tiles" else 2) for x in (q, dout))
    out, lse = attention(q, k, v, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse)
    one = attention_backward(
        *(x[:, :1, :1] if x is q or x is dout or x is out else x for x in (dout, q, k, v, out)), lse[:, :1, :1]
    )
    for x, y in ((grads.dk, one.dk), (grads.dv, one.dv)):
        exact = count * y.astype(np.float64)
        assert np.abs(x - exact).max() <= 1e-6 * np.abs(exact).max()


def test_sums_over_tiles_of_keys_do_not_drift(monkeypatch):
    monkeypatch.setattr(tiles, "KEYS", 4)
    monkeypatch.setattr(tiles, "QUERIES", 2)
    monkeypatch.setattr(tiles, "LONGEST", 1)
    rng, count = fresh_rng(), 24000
    q, k, v, dout = arrays(rng, "float32", 1, 2, 1, 1, 1, 8, 8)
    k, v = (np.repeat(x, count, axis=1) for x in (k, v))
    problem = state(q, k, v)
    exact, _ = references(problem, q, k, v, None, dout)
    out, lse = cpu.forward(problem, q, k, v)
    np.testing.assert_allclose(out, exact.out, rtol=1e-6)
    np.testing.assert_allclose(lse, exact.lse, rtol=1e-6)
    lse, dlse = np.zeros_like(lse), np.ones_like(lse)  # else P is rounded before it is added, and dS is 0
    one = cpu.backward(state(q, k[:, :4], v[:, :4]), dout, q, k[:, :4], v[:, :4], out, lse, dlse)
    grads = cpu.backward(problem, dout, q, k, v, out, lse, dlse)
    exact = one.dq.astype(np.float64) * (count // 4)
    assert np.abs(grads.dq - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_of_sinks_know_nothing_of_rows_that_see_no_key(value):
    """But for what dlse says: there lse is the sink."""
    rng = fresh_rng()
    q, k, v, dout = arrays(rng, "float32", 2, 40, 30, 2, 1, 8, 8)
    sinks, dlse = np.array([0.5, -1], "float32"), rng.standard_normal((2, 2, 40), "float32")
    options = {"sinks": sinks, "causal": True}
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert not out[:, :10].any()

    def gradients(at):
        dout[:, :10] = at
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt="sinks", **options)

    clean, found = gradients(0), gradients(value)
    for x, y in zip((*found, found.dsinks), (*clean, clean.dsinks)):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("of", ["i", "j"])
def test_gradients_of_what_a_score_function_reads_do_not_drift(of):
    """Over queries and keys: P is 1 for one key, or as many small ones."""
    many = np.full(4096, np.exp(-8), "float32")
    many[:512] = 1
    seq_q, seq_k = (64, 4096) if of == "i" else (4096, 64)
    q, k = np.zeros((1, seq_q, 1, 1), "float32"), np.zeros((1, seq_k, 1, 1), "float32")
    given = {"score": f"s + x[{of}]", "score_arrays": {"x": np.zeros(64, "float32")}}
    if of == "i":
        q += 1
        k[0, :, 0, 0] = np.log(many)
        given["scale"] = 1.0
    out, lse = attention(q, k, k, return_lse=True, **given)
    dlse = np.ones_like(lse) if of == "i" else many[None, None]
    found = attention_backward(np.zeros_like(out), q, k, k, out, lse, dlse=dlse, wrt="x", **given)
    p = np.exp(
        q[0, :, 0] * k[0, :, 0].T.astype(np.float64) * given.get("scale", 1) - lse[0, 0].astype(np.float64)[:, None]
    )
    exact = (p * dlse[0, 0][:, None]).sum(axis=1 if of == "i" else 0)
    np.testing.assert_allclose(found.dscore_arrays["x"], exact, rtol=1e-6)
