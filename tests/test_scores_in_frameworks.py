"""Score functions, block masks and dropout where PyTorch or JAX differentiates, compiles, maps."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.score import tanh, where

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from cupyflash.torch import attention

B, SQ, SK, HQ, HK, D = 2, 21, 26, 4, 2, 8
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape) for shape in ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, D)))
DOUT, DLSE = RNG.standard_normal((B, SQ, HQ, D)), RNG.standard_normal((B, HQ, SQ))
A, IDS = RNG.standard_normal((HQ, 7)), np.arange(SK, dtype=np.int32) % 7
SHARED = cupyflash.block_mask(cupyflash.masks.causal(3), shape=(1, 1, SQ, SK), block=16)
OF_EACH = cupyflash.block_mask(RNG.random((B, HQ, SQ, SK)) > 0.3, block=16)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, ids: Any) -> Any:
    return s * (1 + 0.1 * b) + a[h, ids[j]]


OPTIONS: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": 0.3, "seed": 5},
    "dropout, a large seed": {"dropout": 0.3, "seed": -3},
    "dropout, a seed in an array": {"dropout": 0.3, "seed": np.array([5], np.uint32)},
    "score": {"score": score, "score_arrays": {"a": A, "ids": IDS}},
    "block mask": {"block_mask": SHARED},
    "block mask of each head": {"block_mask": OF_EACH},
    "all": {
        "dropout": 0.3, "seed": 5, "score": score, "score_arrays": {"a": A, "ids": IDS}, "block_mask": OF_EACH,
        "sinks": RNG.standard_normal(HQ), "bias": RNG.standard_normal((HQ, SQ, SK)),
    },
}  # fmt: skip
given_options = pytest.mark.parametrize("name", OPTIONS)


def converted(convert: Callable[[np.ndarray], Any], options: dict[str, Any]) -> dict[str, Any]:
    def one(x: Any) -> Any:
        return (
            {name: one(y) for name, y in x.items()}
            if isinstance(x, dict)
            else convert(x)
            if isinstance(x, np.ndarray)
            else x
        )

    return {name: one(x) for name, x in options.items()}


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """out, lse and the gradients of q, k, v, then of what else has one, by explicit calls on NumPy arrays."""
    options = OPTIONS[name]
    out, lse = cupyflash.attention(Q, K, V, return_lse=True, **options)
    wrt = [x for x in ("bias", "sinks") if x in options] + ["a"] * ("score" in options)
    grads = cupyflash.attention_backward(DOUT, Q, K, V, out, lse, dlse=DLSE, wrt=wrt, **options)
    return [out, lse, *grads, *(grads.dscore_arrays["a"] if x == "a" else getattr(grads, f"d{x}") for x in wrt)]


def differentiable(options: dict[str, Any]) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    """The arrays of options that have a gradient, in the order of `expected`, and the options with others in their
    place."""
    names = [x for x in ("bias", "sinks") if x in options]
    read = options.get("score_arrays")

    def put(*x: Any) -> dict[str, Any]:
        more = {"score_arrays": {**read, "a": x[-1]}} if read else {}
        return {**options, **dict(zip(names, x)), **more}  # some tracers know no |

    return [options[x] for x in names] + ([read["a"]] if read else []), put


def close(found: Any, name: str) -> None:
    for x, y in zip(found, expected(name), strict=True):
        np.testing.assert_allclose(np.asarray(x.detach() if hasattr(x, "detach") else x), y, rtol=1e-9, atol=1e-9)


# ---- PyTorch --------------------------------------------------------------------------------------------------------


def tensors(name: str) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    more, put = differentiable(converted(torch.tensor, OPTIONS[name]))
    return [*map(torch.tensor, (Q, K, V)), *more], put


@given_options
def test_torch(name: str) -> None:
    """At once: without a gradient, by autograd, and by torch.func."""
    given, put = tensors(name)
    douts = torch.tensor(DOUT), torch.tensor(DLSE)

    def run(*x: Any) -> Any:
        return attention(*x[:3], return_lse=True, **put(*x[3:]))

    results, pull = torch.func.vjp(run, *given)
    close([*results, *pull(douts)], name)
    close([*run(*given), *expected(name)[2:]], name)
    leaves = [x.requires_grad_() for x in given]
    results = run(*leaves)
    close([*results, *torch.autograd.grad(results, leaves, douts)], name)


@given_options
def test_torch_compiled(name: str) -> None:
    torch._dynamo.reset()
    given, put = tensors(name)
    leaves = [x.requires_grad_() for x in given]
    run = torch.compile(
        lambda *x: attention(*x[:3], return_lse=True, **put(*x[3:])), fullgraph=True, backend="aot_eager"
    )
    results = run(*leaves)
    close([*results, *torch.autograd.grad(results, leaves, (torch.tensor(DOUT), torch.tensor(DLSE)))], name)


def test_torch_compiled_for_other_seeds() -> None:
    """A seed that is a number is an argument of the operator: the same program serves others, which drop others."""
    torch._dynamo.reset()
    q = torch.tensor(Q)

    def run(seed: Any) -> Any:
        return attention(q, q, q, dropout=0.3, seed=seed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for seed in (3, 4, -4, 2**63 + 5, torch.tensor([6])):
        torch.testing.assert_close(compiled(seed), run(seed))


def compiled(function: Any, **more: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **more)


def capped(cap: float) -> Any:
    return lambda s, b, h, i, j: cap * tanh(s / cap)


FACTOR = 2.0


def scaled(s: Any, b: Any, h: Any, i: Any, j: Any, more: float = 0.5) -> Any:
    return FACTOR * s + more


class Sloped:
    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - self.slope * abs(i - j)


def test_torch_compiles_for_what_a_function_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same code, the numbers that it finds around it are watched: a number that changes is not missed."""
    q = torch.tensor(Q)
    run = compiled(lambda q, score: attention(q, q, q, score=score))
    for score in (capped(1.0), capped(2.0), capped(3.0), scaled, Sloped(0.5), Sloped(0.25), Sloped(0.25).__call__):
        torch.testing.assert_close(run(q, score), attention(q, q, q, score=score))
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    torch.testing.assert_close(run(q, scaled), attention(q, q, q, score=scaled))


def test_torch_compiles_functions_made_inside() -> None:
    """In what is compiled, and by numbers that are symbols there: they become numbers, and only they."""

    def function(q: Any, c: float) -> Any:
        n = q.shape[1]
        return attention(q, q, q, score=lambda s, b, h, i, j: where(j - n < -2, s * c, n - j + s))

    run = compiled(function, dynamic=True)
    for n, c in ((9, 0.5), (11, 0.25), (11, 4.0)):
        q = torch.tensor(Q)[:, :n]
        torch.testing.assert_close(run(q, c), function(q, c))


def test_torch_compiles_for_all_lengths() -> None:
    """Other lengths, other arrays and other masks compile nothing anew."""

    def function(q: Any, k: Any, a: Any, mask: Any) -> Any:
        return attention(q, k, k, score="s + a[h, j % 7] + 0.1f * b", score_arrays={"a": a}, block_mask=mask)

    run = compiled(function, dynamic=True)
    rng = np.random.default_rng(1)
    for n, m in ((17, 20), (33, 41), (50, 18), (21, 75)):
        q, k, a = (torch.tensor(rng.standard_normal(x)) for x in ((B, n, HQ, D), (B, m, HK, D), (HQ, 7)))
        mask = cupyflash.block_mask(rng.random((B, 1, n, m)) > 0.4, block=16, like=q)
        with torch._dynamo.config.patch(error_on_recompile=n > 33 or m > 41):
            torch.testing.assert_close(run(q, k, a, mask), function(q, k, a, mask))


def test_torch_compiles_another_mask_of_the_same_shape() -> None:
    q = torch.tensor(Q)
    run = compiled(lambda q, mask: attention(q, q, q, block_mask=mask))
    for seed in range(4):
        source = np.random.default_rng(seed).random((1, 1, SQ, SQ)) > 0.5
        mask = cupyflash.block_mask(source, block=16, **({"like": q} if seed else {}))
        with torch._dynamo.config.patch(error_on_recompile=seed > 1):
            torch.testing.assert_close(run(q, mask), attention(q, q, q, mask=torch.tensor(source)))


def test_torch_compiled_explicit_gradients() -> None:
    given, put = tensors("all")
    out, lse = attention(*given[:3], return_lse=True, **put(*given[3:]))

    def gradients(dout: Any, dlse: Any) -> Any:
        options = put(*given[3:])
        grads = cupyflash.attention_backward(dout, *given[:3], out, lse, dlse=dlse, wrt=("a", "bias"), **options)
        return *grads, grads.dbias, grads.dscore_arrays["a"]

    douts = torch.tensor(DOUT), torch.tensor(DLSE)
    for x, y in zip(compiled(gradients)(*douts), gradients(*douts), strict=True):
        torch.testing.assert_close(x, y)


def test_torch_compiled_with_a_gradient_of_an_array_alone() -> None:
    q, ids = torch.tensor(Q), torch.tensor(IDS[:SQ])

    def out(a: Any) -> Any:
        return attention(q, q, q, score=score, score_arrays={"a": a, "ids": ids})

    a = torch.tensor(A, requires_grad=True)
    (found,), (wanted,) = (torch.autograd.grad(f(a), a, torch.tensor(DOUT)) for f in (compiled(out), out))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "score", ["s + x", lambda s, b, h, i, j: i < j, lambda s, b, h, i, j: where(i < j, s, 0) and s]
)
def test_torch_compilers_say_what_is_wrong_with_a_score(score: Any) -> None:
    q = torch.tensor(Q)
    with pytest.raises((TypeError, ValueError)) as eager:
        attention(q, q, q, score=score)
    message = str(eager.value).partition(" (")[0]
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(lambda q: attention(q, q, q, score=score))(q)


def test_the_tensors_of_a_mask_are_real_whoever_asks_first() -> None:
    q = torch.tensor(Q)

    def fake(mask: Any) -> None:
        with FakeTensorMode() as mode:
            attention(*[mode.from_tensor(q)] * 3, block_mask=mask)

    def inference(mask: Any) -> None:
        with torch.inference_mode():
            compiled(lambda q: attention(q, q, q, block_mask=mask))(q)

    def exported(mask: Any) -> None:
        class Masked(torch.nn.Module):
            def forward(self, q: Any) -> Any:
                return attention(q, q, q, block_mask=mask)

        torch.export.export(Masked(), (q,), strict=False)

    for first in (fake, inference, exported):
        mask = cupyflash.block_mask(cupyflash.masks.causal(), shape=(1, 1, SQ, SQ), block=16)
        first(mask)
        assert all(type(x) is torch.Tensor and not x.is_inference() for x in mask.tensors)
        x = torch.tensor(Q, requires_grad=True)
        compiled(lambda q, mask: attention(q, q, q, block_mask=mask))(x, mask).sum().backward()


def test_what_is_kept_for_a_mask_goes_with_its_memory() -> None:
    """Tensors come and go, and an address may come again; the memory is what counts."""
    from cupyflash.interop import torch_data

    made: list[Any] = []

    def kept(x: Any, kind: Any = None) -> Any:
        return torch_data._kept(x, kind, lambda: made.append(object()) or made[-1])

    torch_data._seen.clear()
    x, y = torch.zeros(8), torch.zeros(8)
    first = kept(x)
    assert kept(x.detach()) is first and kept(x.view(2, 4)) is first
    assert kept(y) is not first and kept(x[4:]) is not first and kept(x, 1) is not first
    assert len(torch_data._seen) == 4
    del x
    assert kept(torch.zeros(8)) is made[-1] and len(made) == 5 and len(torch_data._seen) == 2


class Layer(torch.nn.Module):
    def __init__(self, mask: Any, a: Any) -> None:
        super().__init__()
        self.mask, self.a = mask, torch.nn.Parameter(a)

    def forward(self, q: Any, k: Any, ids: Any) -> Any:
        return attention(q, k, k, score=score, score_arrays={"a": self.a, "ids": ids}, block_mask=self.mask)


@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_torch_exported(strict: bool, like: bool, tmp_path: Path) -> None:
    """The function is in the program as text, and the mask as tensors; so they are in a file of it."""
    q, k, a, ids = map(torch.tensor, (Q, K, A, IDS))
    seen = RNG.random((B, HQ, SQ, SK)) > 0.3
    layer = Layer(cupyflash.block_mask(seen, block=16, **({"like": q} if like else {})), a)
    program = torch.export.export(layer, (q, k, ids), strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    q = 2 * q
    for found in (program, torch.export.load(tmp_path / "layer.pt2")):
        torch.testing.assert_close(found.module()(q, k, ids), layer(q, k, ids))


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", ["score", "block mask of each head", "all"])
def test_torch_fake_tensors(name: str, real: bool) -> None:
    """`real`: whether other tensors may come too, as a mask's do."""
    given, _ = tensors(name)
    options = converted(torch.tensor, OPTIONS[name])
    with FakeTensorMode(allow_non_fake_inputs=real) as mode:
        fake = [mode.from_tensor(x) for x in given]
        if "score" in options:
            options["score_arrays"] = {key: mode.from_tensor(x) for key, x in options["score_arrays"].items()}
        more = {x: mode.from_tensor(options[x]) for x in ("bias", "sinks") if x in options}
        out, lse = attention(*fake[:3], return_lse=True, **options | more)
        assert out.shape == DOUT.shape and lse.shape == DLSE.shape
        if "block_mask" in options:
            with pytest.raises(ValueError, match=r"^block_mask has shape \(2, 4, 21, 26\); it must be \(2, 4, 5, 26\)"):
                attention(fake[0][:, :5], *fake[1:3], block_mask=options["block_mask"])


@pytest.mark.parametrize("name", ["dropout", "block mask of each head"])
def test_torch_vmap_refuses_what_goes_by_the_batch(name: str) -> None:
    given, put = tensors(name)
    what = {"block mask of each head": "block_mask with a batch axis"}.get(name, name)
    with pytest.raises(
        NotImplementedError, match=f"^{what} is given under vmap, which makes its axis a part of the batch"
    ):
        torch.vmap(lambda q: attention(q, *given[1:3], **put(*given[3:])))(given[0][None])
    if name == "dropout":  # whose backward must drop the same
        with pytest.raises(NotImplementedError, match="^dropout is given under vmap"):
            torch.func.jacrev(lambda q: attention(q, *given[1:3], **put())[0, 0])(given[0])


MAPPED = {"queries": (0, None, None), "arrays": (None, 0, 0), "both": (0, 0, None)}


def of_the_batch(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, ids: Any) -> Any:
    return s * (1 + 0.3 * b) + a[h, ids[j]] * s * b


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("which", MAPPED)
def test_torch_vmap_with_a_score_function(which: str, rank: int, inside: bool) -> None:
    """Numbers of batch entries stay what they are, and arrays may be mapped; each entry has a gradient of its own."""
    n, dims = 3, MAPPED[which]
    rng = np.random.default_rng(2)
    shape = (2, 5, 4, 8)
    shape = {4: shape, 3: shape[1:], 2: shape[1::2]}[rank]
    q, a, ids = (
        torch.tensor(x)
        for x in (rng.standard_normal((n, *shape)), rng.standard_normal((n, 4, 3)), rng.integers(0, 3, (n, 5)))
    )

    def total(q: Any, a: Any, ids: Any) -> Any:
        out, lse = attention(q, q, q, return_lse=True, score=of_the_batch, score_arrays={"a": a, "ids": ids})
        return out.square().sum() + lse.sin().sum()

    given = [x if dim == 0 else x[1] for x, dim in zip((q, a, ids), dims)]
    if (
        inside
    ):  # of gradients in what is compiled PyTorch knows those of autograd alone, for operators that are not its own
        function = torch.vmap(total, dims)
        torch.testing.assert_close(compiled(function)(*given), function(*given))
        return
    grads, values = torch.vmap(torch.func.grad_and_value(total, (0, 1)), dims)(*given)
    for m in range(n):
        one, value = torch.func.grad_and_value(total, (0, 1))(
            *(x if dim is None else x[m] for x, dim in zip(given, dims))
        )
        for x, y in zip((*grads, values), (*one, value), strict=True):
            torch.testing.assert_close(x[m], y)


def test_torch_vmap_of_an_array_of_four_dimensions() -> None:
    q, a = torch.tensor(Q), torch.zeros(3, 1, 1, 1, 1, dtype=torch.float64)
    with pytest.raises(
        NotImplementedError, match=r"^score_arrays\['a'\] has 4 dimensions, and vmap makes one more of it"
    ):
        torch.vmap(lambda a: attention(q, q, q, score="s + a[0, 0, 0, 0]", score_arrays={"a": a}))(a)


def test_torch_vmap_with_a_block_mask_of_all() -> None:
    given, _ = tensors("block mask")
    found = torch.vmap(lambda q: attention(q, *given[1:], block_mask=SHARED))(torch.stack([given[0], given[0]]))
    for x in found:
        np.testing.assert_allclose(x, expected("block mask")[0], rtol=1e-9, atol=1e-9)


def test_torch_autocast_with_a_score_function() -> None:
    """q, k and v are cast; what the function reads stays as it is, and gets its gradient so."""
    q, a = torch.tensor(Q, dtype=torch.float32), torch.tensor(A, dtype=torch.float32, requires_grad=True)
    options = {"score": "s + a[h, j % 7]", "score_arrays": {"a": a}}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, q, q, **options)
    half = q.bfloat16()
    expected = attention(half, half, half, **options)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
    dout = torch.randn_like(out)
    (found,), (wanted,) = (torch.autograd.grad(x, a, dout) for x in (out, expected))
    assert found.dtype is torch.float32 and torch.equal(found, wanted)
