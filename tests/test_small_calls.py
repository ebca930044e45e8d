"""Small calls on the CPU: what is left out for the sake of their time changes no result and no message."""

from __future__ import annotations

import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from criterion import assert_as_good
from reference import DTYPES, draw, fresh_rng, references, state

from cupyflash import attention, attention_backward, attention_jvp, cpu, rules
from cupyflash.cpu import corridor, tiles
from cupyflash.cpu.hiding import hide, silence

forward = sys.modules["cupyflash.cpu.forward"]


def arrays(rng, dtype="float32", shape=(2, 9, 11, 4, 2, 8, 6)):
    batch, seq_q, seq_k, heads_q, heads_k, dim, dim_v = shape
    return (
        draw(rng, dtype, batch, seq_q, heads_q, dim),
        draw(rng, dtype, batch, seq_k, heads_k, dim),
        draw(rng, dtype, batch, seq_k, heads_k, dim_v),
    )


SHAPES = [(2, 9, 11, 4, 2, 8, 6), (1, 70, 130, 3, 3, 16, 16), (3, 1, 65, 4, 1, 8, 8), (2, 20, 7, 2, 2, 5, 9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["plain", "causal", "window", "mask", "mask of keys", "alibi", "softcap", "dropout", "scale", "heads first"]
)
def test_a_single_tile_gives_the_same_bits(dtype, shape, kind, monkeypatch):
    """As any other, where it is computed in fewer steps."""
    rng = fresh_rng()
    q, k, v = arrays(rng, dtype, shape)
    batch, seq_q, seq_k, heads, *_ = shape
    options, given = {}, {}
    if kind == "causal":
        options["causal"] = True
    elif kind == "window":
        options["window"] = (3, 2)
    elif kind == "mask":
        given["mask"] = rng.random((batch, heads, seq_q, seq_k)) < 0.6
    elif kind == "mask of keys":
        given["mask"] = rng.random((batch, 1, 1, seq_k)) < 0.6
    elif kind == "alibi":
        given["alibi_slopes"] = rng.random((batch, heads), "float32")
    elif kind == "softcap":
        options["softcap"] = 0.7
    elif kind == "dropout":
        options["dropout"], given["seed"] = 0.3, np.array(5)
    elif kind == "scale":
        options["scale"] = 1e-20
    else:
        q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v))
    problem = state(q, k, v, **options, **given)
    taken, plain = [], forward._at_once
    monkeypatch.setattr(forward, "_at_once", lambda *a: taken.append(plain(*a)) or taken[-1])
    at_once = cpu.forward(problem, q, k, v, **given)
    if kind != "window":  # of which keys beyond it are left out
        assert len(taken) == 1 and taken[0] is at_once
    monkeypatch.setattr(forward, "_only_tile", lambda *_: None)
    for x, y in zip(at_once, cpu.forward(problem, q, k, v, **given)):
        assert x.dtype == y.dtype and x.strides == y.strides
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
def test_what_a_mask_hides_may_be_anything(hidden):
    rng = fresh_rng()
    q, k, v = arrays(rng)
    dout = rng.standard_normal((2, 9, 4, 6), "float32")
    mask = rng.random((2, 1, 9, 11)) < 0.7
    mask[:, :, :, 3] = mask[0, :, 2] = False
    exact, _ = references(state(q, k, v, mask=mask), q, k, v, None, dout, mask=mask)
    k[:, 3], v[:, 3] = hidden, hidden
    q[0, 2], dout[0, 2] = hidden, hidden
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, mask=mask)
    for name, x in {"out": out, "lse": lse, **grads._asdict()}.items():
        np.testing.assert_allclose(x, getattr(exact, name), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys_first", [False, True])
def test_hiding_by_bits(dtype, keys_first):
    rng = fresh_rng()
    x = rng.choice(np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1.5, 1e-40], dtype), (2, 3, 5, 7))
    if keys_first:
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    for shape in ((2, 3, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (5, 7), (7,), (2, 3, 5, 1)):
        seen = rng.random(shape) < 0.5
        whole = np.broadcast_to(seen, x.shape)
        for given in (seen, whole):
            for change, value in ((hide, -np.inf), (silence, 0)):
                found = x.copy("K")
                change(found, given)
                np.testing.assert_array_equal(found, np.where(whole, x, value))
                assert not np.signbit(found[~whole]).any() or change is hide


@pytest.mark.parametrize("given", ["", "mask"])
def test_no_thread_begins(given, monkeypatch):
    """Where the largest product is so small that BLAS keeps it on the thread that calls."""

    def refuse(self):
        raise AssertionError("a thread begins")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rng = fresh_rng()
    x = rng.standard_normal((1, 64, 8, 64), "float32")
    options = {"mask": rng.random((1, 1, 64, 64)) < 0.7} if given else {}
    out, lse = attention(x, x, x, return_lse=True, **options)
    attention_backward(x, x, x, x, out, lse, **options)


@pytest.fixture
def asked(monkeypatch):
    """How often the rules were asked."""
    corridor._stated.clear()
    calls, plain = [], rules.state
    monkeypatch.setattr(rules, "state", lambda *a: calls.append(a) or plain(*a))
    return calls


def test_the_rules_are_asked_once_of_calls_that_are_alike(asked):
    q, k, v = arrays(fresh_rng())
    for n in range(3):
        out = attention(q + n, k, v, window=(3, 1))
    assert len(asked) == 1
    different = [
        lambda: attention(q, k, v, window=(3, 2)),
        lambda: attention(q, k, v, window=(3, 1), return_lse=True, softcap=2.0),
        lambda: attention(q.astype("float64"), k.astype("float64"), v.astype("float64"), window=(3, 1)),
        lambda: attention(q, k, v, window=(3, 1), mask=np.ones(11, bool)),
        lambda: attention(q, k, v, window=(3, 1), mask=np.ones((9, 1), bool)),
        lambda: attention(q[:1], k[:1], v[:1], window=(3, 1)),
        lambda: attention(q[::-1], k, v, window=(3, 1)),
    ]
    for n, call in enumerate(different):
        call()
        assert len(asked) == n + 2
    before = len(asked)
    for _ in range(2):  # where a target lies is looked at in each call
        assert attention(q + 2, k, v, window=(3, 1), out=np.empty_like(out)).tobytes() == out.tobytes()
        with pytest.raises(ValueError, match="shares memory with q"):
            attention(q[..., :6], k[..., :6], v, window=(3, 1), out=q[..., :6])
    assert len(asked) == before + 4


@pytest.mark.parametrize(
    "right, wrong",
    [
        ({"window": (3, 1)}, {"window": (3, True)}),
        ({"window": (3, 1)}, {"window": (3.0, 1)}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"batch_invariant": False}, {"batch_invariant": 0}),
        ({"at": (0, 0, 1, 0)}, {"at": (0, 0, True, 0)}),
        ({"softcap": 1}, {"softcap": True}),
        ({}, {"block_mask": 3}),
    ],
    ids=str,
)
def test_what_equals_an_option_and_is_none_is_refused_all_the_same(right, wrong):
    q, k, v = arrays(fresh_rng())
    attention(q, k, v, **right)
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        attention(q, k, v, **wrong)


def test_options_in_arrays_are_read_in_each_call():
    q, k, v = arrays(fresh_rng())
    scale = np.array(0.5)
    first = attention(q, k, v, scale=scale)
    scale[...] = 2
    np.testing.assert_array_equal(attention(q, k, v, scale=scale), attention(q, k, v, scale=2.0))
    assert np.abs(attention(q, k, v, scale=scale) - first).max() > 1e-3
    window = [1, 1]
    attention(q, k, v, window=window)
    window[0] = 5
    np.testing.assert_array_equal(attention(q, k, v, window=window), attention(q, k, v, window=(5, 1)))


def test_tensors_without_memory_are_refused_behind_such_that_have_it():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays(fresh_rng()))
    attention(q, k, v)
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = mode.from_tensor(k)
    for wrong, what in (
        ((q, fake, v), "k"), ((q, k.to("meta"), v), "k"), ((q.to("meta"), k, v), "q"),
        ((q, k, torch._neg_view(v)), "v"), ((q, k.to_sparse(), v), "k"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{what} "):
            attention(*wrong)


def test_limits_of_tiles_are_no_part_of_what_is_kept(monkeypatch):
    """Who sets others gets others."""
    q, k, v = arrays(fresh_rng())
    problem = state(q, k, v)
    assert forward._only_tile(problem, *tiles.limits()) is not None
    monkeypatch.setattr(tiles, "QUERIES", 4)
    monkeypatch.setattr(tiles, "KEYS", 4)
    assert forward._only_tile(problem, *tiles.limits()) is None


def test_many_threads_at_once():
    """Calls like each other, that share what is kept of them."""
    rng = fresh_rng()
    inputs = [arrays(rng) for _ in range(4)]
    mask = rng.random((9, 11)) < 0.7
    expected = [[attention(*x), attention(*x, mask=mask)] for x in inputs]
    corridor._stated.clear()
    wrong = []

    def work(n):
        for _ in range(50):
            for x, right in zip((attention(*inputs[n]), attention(*inputs[n], mask=mask)), expected[n]):
                if x.tobytes() != right.tobytes():
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert not wrong


def test_sums_of_values_near_the_largest_number():
    """Have a finite mean, which takes more steps."""
    q, k, v = arrays(fresh_rng(), "bfloat16")
    v[...] = 0.9 * float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    np.testing.assert_allclose(attention(q, k, v).astype("float64"), v[0, 0, 0, 0].astype("float64"), rtol=1e-2)


def test_what_has_one_thread_is_not_held(monkeypatch):
    """With one core, or as somebody has asked of BLAS: then no thread has to begin that holds it."""
    from cupyflash.cpu import blas, crew

    begun, plain = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: begun.append(self) or plain(self))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    x = fresh_rng().standard_normal((1, 140, 2, 64), "float32")
    assert 140 * 140 * 64 > crew.WORTH_HOLDING and 140 * 64 > crew.CUT_SIDES
    for threads, expected in (([1, 1], 0), ([1, 2], 1)):
        libraries = [type("Library", (), {"num_threads": n, "set_num_threads": print})() for n in threads]
        monkeypatch.setattr(blas, "_libraries", lambda found=libraries: found)
        begun.clear()
        attention(x, x, x)
        assert len(begun) == expected


def test_products_are_cut_where_that_costs_less_than_to_hold(monkeypatch):
    """Then no thread begins, and BLAS has no reason for any: in every pass, alone and as one of packed sequences."""
    from cupyflash.cpu import blas, crew

    begun, sizes, plain = [], [], np.matmul
    rng = fresh_rng()
    q, k, v, dout = (rng.standard_normal((1, 128, 2, 64), "float32") for _ in range(4))
    assert crew.cuts(state(q, k, v)) and 128 * 128 * 64 > crew.WORTH_HOLDING
    libraries = [type("Library", (), {"num_threads": 2, "set_num_threads": print})()]

    def watched(a, b, out=None):
        sizes.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return plain(a, b, out=out)

    def found():
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out, *attention_backward(dout, q, k, v, out, lse, causal=True)

    cu, rows = np.array([0, 128], np.int32), [x[0] for x in (q, k, v, dout)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: begun.append(self))
        patch.setattr(blas, "_libraries", lambda: libraries)
        patch.setattr(np, "matmul", watched)
        alone = found()
        _, lse = attention(q, k, v, causal=True, return_lse=True)
        tout, _ = attention_jvp({"q": dout}, q, k, v, alone[0], lse, causal=True)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
        out, lse = attention(*rows[:3], **lengths, return_lse=True)
        packed = out, *attention_backward(rows[3], *rows[:3], out, lse, **lengths)
    assert not begun and len(sizes) > 60 and max(sizes) <= crew.WORTH_HOLDING
    assert all((x[0] == y).all() for x, y in zip(alone, packed)) and np.isfinite(tout).all()
    for threads in (1, 3):
        with threadpoolctl.threadpool_limits(threads, user_api="blas"):
            assert all((x == y).all() for x, y in zip(found(), alone))
    exact, own = references(state(q, k, v, causal=True), q, k, v, None, dout)
    for name, x in zip(("out", "dq", "dk", "dv"), alone):
        assert_as_good(x, getattr(exact, name), getattr(own, name), name)
