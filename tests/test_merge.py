"""merge: attention over parts of the keys combined into attention over all of them."""

from __future__ import annotations

import functools
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from criterion import assert_as_good, large_score_units
from reference import DTYPES, draw, fresh_rng, standard, standard_in_own_precision, state

from cupyflash import cpu, merge, merging


def parts_of(rng, dtype="float32", cuts=(3, 40, 41), seq_k=70, scale=None):
    """Arrays, and (out, lse) over each part of the keys; key_mask hides whole parts from some batch entries."""
    q, k, v = draw(rng, dtype, 2, 9, 4, 16), draw(rng, dtype, 2, seq_k, 2, 16), draw(rng, dtype, 2, seq_k, 2, 12)
    key_mask = rng.random((2, seq_k)) < 0.7
    key_mask[0, :3] = False
    key_mask[1] = False
    bounds = [0, *cuts, seq_k]
    found = []
    for i, j in itertools.pairwise(bounds):
        given = q, k[:, i:j], v[:, i:j], key_mask[:, i:j]
        found.append(cpu.forward(state(*given, scale=scale), *given[:3], key_mask=given[3]))
    return (q, k, v, key_mask), *(list(column) for column in zip(*found))


def same(a, b):
    for x, y in zip(a, b):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 500.0])
def test_parts_make_the_whole(dtype, scale):
    given, outs, lses = parts_of(fresh_rng(), dtype, scale=scale)
    problem = state(*given, scale=scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = merge(outs, lses)
    exact, own = standard(problem, *given), standard_in_own_precision(problem, *given)
    assert out.dtype == DTYPES[dtype] and lse.dtype == DTYPES[problem.lse_dtype]
    units = large_score_units(problem, *given[:2])
    assert_as_good(out, exact.out, own.out, "out", units["out"])
    assert_as_good(lse, exact.lse, own.lse, "lse", units["lse"])
    assert not out[1].any() and np.isneginf(lse[1]).all() and np.isfinite(lse[0]).all()


def test_associative_and_commutative():
    _, outs, lses = parts_of(fresh_rng())
    whole = merge(outs, lses)
    pairs = list(zip(outs, lses))
    fold = functools.partial(functools.reduce, lambda a, b: merge((a[0], b[0]), (a[1], b[1])))
    same(fold(pairs), whole)
    same(fold(pairs[::-1]), whole)
    same(fold([fold(pairs[:2]), fold(pairs[2:])]), whole)
    same(merge(outs[:1], lses[:1]), pairs[0])


def test_layouts_and_ranks():
    _, outs, lses = parts_of(fresh_rng())
    out, lse = merge(outs, lses)
    heads_first, rows = merge([x.swapaxes(1, 2) for x in outs], lses, layout="bhsd")
    same((heads_first.swapaxes(1, 2), rows), (out, lse))
    same(merge([x[0] for x in outs], [x[0] for x in lses]), (out[0], lse[0]))
    same(merge([x[0].swapaxes(0, 1) for x in outs], [x[0] for x in lses], layout="bhsd"), (heads_first[0], lse[0]))
    for layout in ("bshd", "bhsd"):
        same(merge([x[0, :, 1] for x in outs], [x[0, 1] for x in lses], layout=layout), (out[0, :, 1], lse[0, 1]))


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_libraries(name, dtype):
    _, outs, lses = parts_of(fresh_rng(), dtype)
    out, lse = merge(outs, lses)
    if name == "jax":
        jnp = pytest.importorskip("jax.numpy")
        theirs = merge([jnp.asarray(x) for x in outs], [jnp.asarray(x) for x in lses])
        assert all(isinstance(x, jnp.ndarray) for x in theirs) and str(theirs[0].dtype) == dtype
    else:
        torch = pytest.importorskip("torch")
        wide = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in outs]
        theirs = merge(wide, [torch.from_numpy(x) for x in lses])
        assert all(isinstance(x, torch.Tensor) for x in theirs) and theirs[0].dtype == getattr(torch, dtype)
        theirs = [x.float().numpy() for x in theirs]
    step = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(np.asarray(theirs[0], np.float32), out.astype(np.float32), atol=step)
    np.testing.assert_allclose(np.asarray(theirs[1]), lse, rtol=1e-6)


def test_torch_gradients():
    """Those of attention written out in one piece, also through lse; nothing flows into rows that nobody saw."""
    torch = pytest.importorskip("torch")
    rng = fresh_rng()
    scores = torch.from_numpy(rng.standard_normal((2, 3, 5, 8)))
    scores[0, 0, 0] = scores[1, 2, 3, :4] = -torch.inf
    v = torch.from_numpy(rng.standard_normal((2, 3, 8, 4)))
    dout, dlse = torch.from_numpy(rng.standard_normal((2, 3, 5, 4))), torch.from_numpy(rng.standard_normal((2, 3, 5)))
    seen = torch.isfinite(scores)
    dlse[0, 0, 0] = 0

    def attend(logits, values, mask):
        """Out and lse; a row without keys gives 0 and -inf, and no gradient."""
        alive = mask.any(-1, keepdim=True)
        safe = torch.where(alive, logits.masked_fill(~mask, -torch.inf), 0)
        p = torch.where(mask, safe.softmax(-1), 0)
        return p @ values, torch.where(alive[..., 0], safe.logsumexp(-1), -torch.inf)

    leaves = [scores.masked_fill(~seen, 0).requires_grad_(), v.requires_grad_()]
    halves = [attend(leaves[0][..., j], leaves[1][..., j, :], seen[..., j]) for j in (slice(0, 4), slice(4, 8))]
    out, lse = merge(*zip(*halves), layout="bhsd")
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    whole = attend(*leaves, seen)
    for a, b in zip(grads, torch.autograd.grad(list(whole), leaves, [dout, dlse])):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_makes_one_graph(layout):
    torch = pytest.importorskip("torch")
    _, outs, lses = parts_of(fresh_rng())
    outs = [torch.tensor(x if layout == "bshd" else x.swapaxes(1, 2)) for x in outs]
    lses = [torch.tensor(x) for x in lses]

    class Merged(torch.nn.Module):
        def forward(self, *parts):
            n = len(parts) // 2
            return merge(parts[:n], parts[n:], layout=layout)

    whole = merge(outs, lses, layout=layout)
    torch._dynamo.reset()
    compiled = torch.compile(Merged(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Merged(), (*outs, *lses), strict=True).module()
    for f in (compiled, exported):
        same(f(*outs, *lses), whole)
    outs = [x.requires_grad_() for x in outs]
    grads = [torch.autograd.grad(f(*outs, *lses)[0].square().sum(), outs) for f in (compiled, Merged())]
    torch.testing.assert_close(*grads)


def test_jax_transforms():
    """merge is traced like any function of JAX: jit, grad and vmap, alone and around each other."""
    jax = pytest.importorskip("jax")
    _, outs, lses = parts_of(fresh_rng())
    outs, lses = ([jax.numpy.asarray(x) for x in xs] for xs in (outs, lses))
    whole = merge(outs, lses)
    same(jax.jit(merge)(outs, lses), whole)
    same(jax.vmap(merge)(outs, lses), whole)
    same(jax.jit(lambda x: merge([x, *outs[1:]], lses))(outs[0]), whole)  # beside concrete arrays

    def loss(outs, lses):
        out, lse = merge(outs, lses)
        return (out * out).sum() + jax.numpy.where(lse == -jax.numpy.inf, 0, lse).sum()

    grads = jax.grad(loss, (0, 1))(outs, lses)
    for name, x in zip(("outs", "lses"), grads):
        assert all(np.isfinite(part).all() for part in x), name
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(outs, lses))):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    step = 1e-2
    moved = [lses[0] + step, *lses[1:]], [lses[0] - step, *lses[1:]]
    slope = (loss(outs, moved[0]) - loss(outs, moved[1])) / (2 * step)
    np.testing.assert_allclose(np.asarray(grads[1][0]).sum(), slope, rtol=2e-3, atol=2e-2)


def test_an_lse_of_plus_infinity_is_nan_without_a_warning():
    _, outs, lses = parts_of(fresh_rng())
    lses[1][0, 0, 0] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = merge(outs, lses)
    assert np.isnan(out[0, 0, 0]).all() and np.isnan(lse[0, 0, 0]) and np.isfinite(out[0, 1:]).all()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_into_arrays_that_are_given(name):
    """Of their own, or those of a part."""
    _, outs, lses = parts_of(fresh_rng())
    whole = merge(outs, lses)
    if name == "torch":
        torch = pytest.importorskip("torch")
        outs, lses = ([torch.from_numpy(x) for x in xs] for xs in (outs, lses))
    for into in ((outs[0] * np.nan, lses[0] * np.nan), (outs[1], lses[1])):
        found = merge(outs, lses, out=into)
        assert found[0] is into[0] and found[1] is into[1]
        same(into, whole)


OUT, LSE = np.zeros((2, 5, 3, 4), np.float32), np.zeros((2, 3, 5), np.float32)


@pytest.mark.parametrize(
    "outs, lses, layout, error, message",
    [
        (OUT, [LSE], "bshd", TypeError, "outs is a ndarray; it must be a list or tuple"),
        ([OUT], LSE, "bshd", TypeError, "lses is a ndarray; it must be a list or tuple"),
        ([], [], "bshd", ValueError, "outs is empty; it must hold at least one part"),
        ([OUT, OUT], [LSE], "bshd", ValueError, "lses has 1 arrays; it must have as many as outs, 2"),
        ([OUT], [LSE], "sbhd", ValueError, "layout is 'sbhd'; it must be one of 'bshd', 'bhsd'"),
        ([OUT], [LSE], LSE, ValueError, r"layout is array\(.*; it must be one of 'bshd', 'bhsd'"),
        ([OUT, OUT[:1]], [LSE, LSE], "bshd", ValueError, r"outs\[1\] has shape \(1, 5, 3, 4\); it must be"),
        ([OUT], [LSE.swapaxes(1, 2)], "bshd", ValueError, r"lses\[0\] has shape \(2, 5, 3\); it must be \(2, 3, 5\)"),
        ([OUT], [LSE], "bhsd", ValueError, r"lses\[0\] has shape \(2, 3, 5\); it must be \(2, 5, 3\)"),
        ([OUT[0, 0, 0]], [LSE], "bshd", ValueError, r"outs\[0\] has 1 dimensions, shape \(4,\); it must have 4"),
        ([OUT.astype(int)], [LSE], "bshd", TypeError, r"outs\[0\] has dtype int64; it must be one of float16"),
        ([OUT], [LSE.astype(np.float64)], "bshd", TypeError, r"lses\[0\] has dtype float64; it must be float32"),
        ([OUT, OUT.tolist()], [LSE, LSE], "bshd", TypeError, r"outs\[1\] is a list; it must be an array"),
    ],
)
def test_bad_input(outs, lses, layout, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        merge(outs, lses, layout=layout)


@pytest.mark.parametrize(
    "out, error, message",
    [
        (OUT, TypeError, "out is a ndarray; it must be None or two arrays to write to"),
        ((OUT,), TypeError, "out is a tuple; it must be None or two arrays"),
        ((OUT.astype("f8"), LSE.copy()), ValueError, r"out\[0\] has shape .* float64, on cpu; they must be those of"),
        ((OUT.copy(), LSE[:, :2].copy()), ValueError, r"out\[1\] has shape \(2, 2, 5\)"),
        ((np.broadcast_to(OUT[:1], OUT.shape), LSE.copy()), ValueError, r"out\[0\] is read-only"),
        ((OUT[::-1], LSE.copy()), ValueError, r"out\[0\] shares some memory with a part"),
    ],
)
def test_what_out_must_be(out, error, message):
    with pytest.raises(error, match=message):
        merge([OUT], [LSE], out=out)


def test_arrays_of_jax_cannot_be_written():
    jnp = pytest.importorskip("jax.numpy")
    out, lse = jnp.asarray(OUT), jnp.asarray(LSE)
    with pytest.raises(TypeError, match="out is given, but arrays of JAX cannot be written"):
        merge([out], [lse], out=(out, lse))


def test_mixed_libraries():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"lses\[0\] is a torch array but outs\[0\] is a numpy array"):
        merge([OUT], [torch.from_numpy(LSE)])


def test_many_parts_do_not_drift():
    rng = fresh_rng()
    outs = [rng.random((1, 5, 1, 4), "float32") for _ in range(4000)]
    lses = [np.full((1, 1, 5), 0 if n < 500 else -8, "float32") for n in range(4000)]
    out, lse = merge(outs, lses)
    exact_out, exact_lse = merge([x.astype(np.float64) for x in outs], [x.astype(np.float64) for x in lses])
    np.testing.assert_allclose(lse, exact_lse, atol=1e-6)
    np.testing.assert_allclose(out, exact_out, atol=1e-6)


def test_what_kernels_are_kept_under(monkeypatch):
    """How many parts there are, in which layout, and whether all of them begin where vectors may."""

    class Array:
        def __init__(self, at, shape=(1, 4, 2, 8)):
            self.at, self.shape = at, shape

    lib = SimpleNamespace(kind="cupy", pointer=lambda x: x.at, signature=lambda x: x.shape)
    monkeypatch.setattr(merging.interop, "known", lambda cls: lib)

    def key(addresses, layout="bshd", into=None):
        return merging._class([Array(x) for x in addresses], [Array(64) for _ in addresses], layout, into)

    assert key([64, 128]) == key([256, 512])
    target = Array(64), Array(128)
    others = [
        key([64, 128], "bhsd"), key([64, 128, 256]), key([64, 136]), key([66, 128]), key([64, 128], into=target),
        key([64, 128], into=target[::-1]), merging._class([Array(64, (1, 4, 2, 9))] * 2, [Array(64)] * 2, "bshd", None),
    ]  # fmt: skip
    assert len({key([64, 128]), *others}) == 8
