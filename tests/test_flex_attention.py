"""cupyflash.torch.flex_attention beside PyTorch's own: score functions and block masks written for that."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch.nn.attention.flex_attention")


from cupyflash.torch import flex_attention
from cupyflash.torch.watch import Watch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
B, H, S, D = 2, 4, 70, 16


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def qkv(
    rng: np.random.Generator, heads: int = H, keys: int = S, dtype: str = "float32", device: str = "cpu"
) -> list[Any]:
    shapes = ((B, H, S, D), (B, heads, keys, D), (B, heads, keys, D))
    return [torch.tensor(rng.standard_normal(x), dtype=getattr(torch, dtype), device=device) for x in shapes]


def numbers(rng: np.random.Generator, *shape: int, dtype: Any = torch.float64, device: str = "cpu") -> Any:
    return torch.tensor(rng.standard_normal(shape), dtype=dtype, device=device, requires_grad=True)


def standard(
    q: Any, k: Any, v: Any, mod: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None
) -> Any:
    """out and lse with all scores in memory, differentiable: what PyTorch's own is not on a CPU."""

    def mapped(f: Any, with_score: bool) -> Any:
        for axis in (3, 2, 1, 0):
            place = [None] * 4
            place[axis] = 0
            f = torch.vmap(f, (*((0,) * with_score), *place))
        return f

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    place = [torch.arange(n, device=q.device) for n in scores.shape]
    with Watch():  # PyTorch's own has no gradients of table[b][i]
        if mod is not None:
            scores = mapped(mod, True)(scores, *place)
        if mask is not None:
            scores = torch.where(mapped(mask, False)(*place), scores, -math.inf)
    return torch.softmax(scores, -1).nan_to_num() @ v, scores.logsumexp(-1)


def agree(rng: np.random.Generator, name: str, device: str = "cpu", **shape: Any) -> None:
    """In float64: out, lse, the gradients of q, k, v and of what the score function captures, twice from one trace."""
    captured: list[Any] = []

    def capture(*shape: int) -> Any:
        captured.append(numbers(rng, *shape, device=device))
        return captured[-1]

    mod = made(name, capture)
    for _ in range(2):
        leaves = [x.requires_grad_() for x in qkv(rng, dtype="float64", device=device, **shape)]
        found = flex_attention(*leaves, score_mod=mod, enable_gqa="heads" in shape, return_lse=True)
        expected = standard(*leaves, mod)
        weights = [torch.tensor(rng.standard_normal(tuple(x.shape)), device=device) for x in found]
        grads = [
            torch.autograd.grad(results, leaves + captured, weights, allow_unused=False)
            for results in (found, expected)
        ]
        for x, y in zip((*found, *grads[0]), (*expected, *grads[1])):
            assert x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-9)


def test_signature() -> None:
    ours, own = (list(inspect.signature(f).parameters.values()) for f in (flex_attention, theirs.flex_attention))
    for x, y in zip(ours, own):  # as far as the installed PyTorch has them
        assert (x.name, x.kind, x.default) == (y.name, y.kind, y.default)
    assert {x.name for x in ours[len(own) :]} <= {"return_aux"}


# Score functions, and the shapes of the tensors that they capture.
MODS: dict[str, tuple[Any, ...]] = {
    "nothing": (lambda s, b, h, i, j: s,),
    "ALiBi": (lambda s, b, h, i, j, slopes: s + slopes[h] * (j - i), (H,)),
    "soft cap": (lambda s, b, h, i, j: 3 * torch.tanh(s / 3),),
    "a learned cap": (lambda s, b, h, i, j, c: c.abs() * torch.tanh(s / c.abs()), ()),
    "relative bias": (lambda s, b, h, i, j, table: s + table[h, i - j + S - 1], (H, 2 * S - 1)),
    "from the end": (lambda s, b, h, i, j, table: s + table[i - j], (S,)),
    "rows first": (lambda s, b, h, i, j, table: s + table[b, :, i][-1][j % 7], (B, 3, S, 7)),
    "computed before": (
        lambda s, b, h, i, j, x, y: s * torch.exp(0.1 * x.flatten() @ y)[h] + (x.sum(0) * 2)[j], (1, S), (S, H)
    ),
    "numbers of its own": (lambda s, b, h, i, j, x: s + torch.arange(S, device=x.device)[j] * x - torch.tensor(2.0),
        ()),
    "in place": (lambda s, b, h, i, j, bias: s.add_(bias[b, h, i, j]).mul_(2), (B, H, S, S)),
    "buckets": (lambda s, b, h, i, j, table: s + table[_bucket(i - j), h], (32, H)),
}  # fmt: skip


def made(name: str, new: Callable[..., Any]) -> Callable[..., Any]:
    """One of them, with tensors from new(*shape)."""
    function, *shapes = MODS[name]
    tensors = tuple(new(*shape) for shape in shapes)
    return lambda s, b, h, i, j: function(s, b, h, i, j, *tensors)


def _bucket(distance: Any) -> Any:
    """T5's, both sides."""
    n = torch.abs(distance)
    far = 8 + (torch.log(torch.clamp(n, min=1).float() / 8) / math.log(128 / 8) * 8).to(torch.int32)
    return (distance < 0).to(torch.int32) * 16 + torch.where(n < 8, n, torch.minimum(far, torch.full_like(far, 15)))


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("device", DEVICES)
def test_score_functions_and_their_gradients(name: str, device: str, rng: np.random.Generator) -> None:
    agree(rng, name, device=device)


def test_grouped_heads_and_more_keys(rng: np.random.Generator) -> None:
    """h is the head of the query, and positions count from 0 on both sides."""
    agree(rng, "ALiBi", heads=2, keys=90)


UNARY = {
    "exp": torch.exp, "exp2": lambda x: torch.exp2(x / 2), "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs() + 1),
    "log2": lambda x: torch.log2(x * x + 1), "log10": lambda x: torch.log10(x * x + 1),
    "log1p": lambda x: torch.log1p(x**2),
    "sqrt": lambda x: torch.sqrt(x**2 + 1), "rsqrt": lambda x: (x**4 + 1).rsqrt(),
    "reciprocal": lambda x: (x**2 + 1).reciprocal(),
    "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "sin": torch.sin,
    "erf": torch.erf, "gelu": torch.nn.functional.gelu, "softplus": torch.nn.functional.softplus,
    "gelu tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "atan2": lambda x: torch.atan2(x, x * x + 1),
    "cos": torch.cos, "relu": torch.relu,
    "tan": lambda x: torch.tan(x / 4),
    "clamp": lambda x: x.clamp(-0.5, 0.7), "clip above": lambda x: torch.clamp_max(x, 0.2),
    "floor": lambda x: x + x.floor(),
    "ceil": lambda x: x + torch.ceil(x), "trunc": lambda x: x + torch.trunc(x), "sign": lambda x: x * torch.sign(x),
    "rsub": lambda x: 1 - x, "alpha": lambda x: torch.add(x, x, alpha=0.5) - torch.sub(1.0 * x, x, alpha=3),
    "neg": lambda x: -x,
    "fmod": lambda x: torch.fmod(x, 0.7), "remainder": lambda x: x % 0.7,
    "rounded": lambda x: x + torch.div(x, 0.3, rounding_mode="trunc"),
    "maximum": lambda x: torch.maximum(x, x * x), "minimum": lambda x: torch.min(x, x * 0),
    "power": lambda x: 1.5**x + (x + 9) ** 0.3,
    "masked_fill": lambda x: x.masked_fill(x > 0.3, -1.0), "like": lambda x: x + torch.ones_like(x) + x.new_zeros(()),
    "where": lambda x: torch.where((x > 0) ^ (x < -0.5), x, 0.5),
    "logic": lambda x: x * torch.logical_or(x > 1, torch.logical_not(x > 0)),
}  # fmt: skip


def test_operators_of_numbers(rng: np.random.Generator) -> None:
    """Each, with its derivative."""
    for name, f in UNARY.items():
        leaves = [x[:1, :1, :9].requires_grad_() for x in qkv(rng, dtype="float64")]
        found, expected = (
            of(*leaves, lambda s, b, h, i, j, f=f: f(s))
            for of in (lambda *x: flex_attention(*x, return_lse=True), standard)
        )
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")
        for x, y in zip(*(torch.autograd.grad(r[0].square().sum() + r[1].sum(), leaves) for r in (found, expected))):
            torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")


INTEGERS: dict[str, Callable[..., Any]] = {
    "division": lambda i, j: (i - j) // 3 + torch.div(i - j, 4, rounding_mode="trunc") + (i + 1) / (j + 1),
    "remainders": lambda i, j: (i - j) % 5 + torch.fmod(i - j, 3),
    "bits": lambda i, j: (i & 3) + (i ^ j) + (i << 2) + (j >> 1) + ~i,
    "powers": lambda i, j: i**2 - j * j, "64 bits": lambda i, j: (i.long() * 2**33 + j) // 2**33,
    "tangents": lambda i, j: torch.tan(i % 3) + torch.tan(j % 2),
    "booleans": lambda i, j: (i > j).float() + (i != j) * (~(i == j)) + (i <= 3).to(torch.int32) * 2
    + (i.bool() & (j >= 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_operators_of_positions(name: str, rng: np.random.Generator) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + 0.01 * INTEGERS[name](i, j).to(s.dtype)

    q, k, v = qkv(rng, dtype="float64")
    torch.testing.assert_close(flex_attention(q, k, v, mod), standard(q, k, v, mod)[0])


IDS = torch.arange(S) // 23


def _prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 11 + 20 * b) | (i >= j)


MASKS: dict[str, tuple[Any, ...]] = {  # mask_mod, batch, heads
    "causal": (lambda b, h, i, j: i >= j, None, None),
    "window": (lambda b, h, i, j: (i >= j) & (i - j < 20), None, None),
    "documents": (lambda b, h, i, j: (IDS[i] == IDS[j]) & (i >= j), None, None),
    "prefix": (_prefix, B, None),
    "of heads": (lambda b, h, i, j: (j % (h + 2) == 0) & (i != 5), None, H),
    "both": (theirs.and_masks(_prefix, theirs.or_masks(lambda b, h, i, j: i - j < 9, lambda b, h, i, j: h == 1)), B, H),
}  # fmt: skip


@pytest.mark.parametrize("block", [128, 16, (16, 32), 24])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name: str, block: Any, rng: np.random.Generator) -> None:
    """As PyTorch's own computes it, eagerly, in float32."""
    mod, batch, heads = MASKS[name]
    q, k, v = qkv(rng)
    mask = theirs.create_block_mask(mod, batch, heads, S, S, device="cpu", BLOCK_SIZE=block)
    slopes = torch.rand(H)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + slopes[h] * (j - i)

    expected, lse = theirs.flex_attention(q, k, v, alibi, mask, return_lse=True)
    found = flex_attention(q, k, v, alibi, mask, return_lse=True)
    torch.testing.assert_close(found, (expected, lse), atol=2e-5, rtol=2e-5)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    slopes = slopes.double()
    both = [flex_attention(*leaves, alibi, mask), standard(*leaves, alibi, mod)[0]]
    for x, y in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in both)):
        torch.testing.assert_close(x, y)


def test_one_list_for_all_whose_mask_mod_asks_for_batch_and_head(rng: np.random.Generator) -> None:
    """It is asked for those of the query, whichever calls came before."""
    q, k, v = qkv(rng)
    starts = torch.arange(B * H).reshape(B, H) * 7
    mods = (
        lambda b, h, i, j: j >= starts[b, h],
        lambda b, h, i, j: j >= starts[b, 0],
        lambda b, h, i, j: j >= starts[0][h],
    )
    for mod in mods:
        mask = theirs.create_block_mask(mod, None, None, S, S, device="cpu")
        for x in ([x[:1] for x in (q, k, v)], (q, k, v), [x[:, :2] for x in (q, k, v)]):
            expected = theirs.flex_attention(*x, block_mask=mask)
            torch.testing.assert_close(flex_attention(*x, block_mask=mask), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["ALiBi", "soft cap", "relative bias", "from the end", "rows first", "buckets"])
def test_as_pytorch_computes_it(name: str, rng: np.random.Generator) -> None:
    mod = made(name, lambda *shape: numbers(rng, *shape, dtype=torch.float32).detach())
    q, k, v = qkv(rng, heads=2)
    more = {"enable_gqa": True, "scale": 0.2, "return_lse": True, "kernel_options": {"BLOCK_M": 32}}
    torch.testing.assert_close(
        flex_attention(q, k, v, mod, **more), theirs.flex_attention(q, k, v, mod, **more), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("device", DEVICES)
def test_lists_of_blocks(device: str, rng: np.random.Generator) -> None:
    """Lists that no mask_mod comes with, one batch of keys for all, and what the auxiliary outputs are called."""
    rows = torch.tensor([[[2, 1, 0, 1, 3]]], dtype=torch.int32)
    columns = torch.tensor(
        [[[[4, 0, 9, 9, 9], [2, 9, 9, 9, 9], [9] * 5, [1, 9, 9, 9, 9], [3, 0, 1, 9, 9]]]], dtype=torch.int32
    )
    mask = theirs.BlockMask.from_kv_blocks(
        rows.to(device), columns.clamp(max=4).to(device), BLOCK_SIZE=16, seq_lengths=(S, S)
    )
    q, k, v = qkv(rng, dtype="float64", device=device)
    seen = torch.zeros(5, 5, dtype=torch.bool, device=device)
    for row, given in enumerate(([4, 0], [2], [], [1], [3, 0, 1])):
        seen[row, given] = True
    out, lse = flex_attention(q, k[:1], v[:1], block_mask=mask, return_lse=True)
    expected = standard(q, k[:1].expand_as(k), v[:1].expand_as(v), mask=lambda b, h, i, j: seen[i // 16, j // 16])
    torch.testing.assert_close((out, lse), expected)
    if hasattr(theirs, "AuxRequest"):
        _, aux = flex_attention(q, k[:1], v[:1], block_mask=mask, return_aux=theirs.AuxRequest(lse=True))
        assert torch.equal(aux.lse, lse) and aux.max_scores is None
        with pytest.raises(NotImplementedError, match="^return_aux asks for max_scores"):
            flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))


def test_inside_a_compiled_model(rng: np.random.Generator) -> None:
    """The compiler leaves it as it is."""
    q, k, v = qkv(rng, dtype="float64")
    mod = MODS["soft cap"][0]
    compiled = torch.compile(lambda q: flex_attention(q * 2, k, v, mod).sin(), backend="eager")
    torch.testing.assert_close(compiled(q), standard(q * 2, k, v, mod)[0].sin())
    torch.testing.assert_close(torch.compile(flex_attention, backend="eager")(q, k, v, mod), standard(q, k, v, mod)[0])


def test_messages(rng: np.random.Generator) -> None:
    q, k, v = qkv(rng)
    table = torch.rand(H, S)
    mask = theirs.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, S, device="cpu")
    for options, error, message in (
        ({"score_mod": lambda s, b, h, i, j: s if i > j else s * 0}, TypeError,
            "^score_mod decides by a number that depends"),
        ({"score_mod": lambda s, b, h, i, j: np.tanh(s)}, TypeError,
            "^score_mod hands a number of the pair to NumPy or Python"),
        ({"score_mod": lambda s, b, h, i, j: s + i.tolist()}, TypeError,
            "^score_mod hands a number of the pair to NumPy or Py"),
        ({"score_mod": lambda s, b, h, i, j: s + math.exp(i)}, TypeError,
            "^score_mod decides by a number that depends on the"),
        ({"score_mod": lambda s, b, h, i, j: s + torch.erfinv(s)}, NotImplementedError,
            "^score_mod calls aten.erfinv.default, which is"),
        ({"score_mod": lambda s, b, h, i, j: torch.nn.functional.logsigmoid(s)}, NotImplementedError,
            "^score_mod calls aten.log_sig"),
        ({"score_mod": lambda s, b, h, i, j: s + table[h].sum()}, NotImplementedError,
            r"^score_mod computes \(aten.sum.* x.sum\(-1\)\[h\] for x\[h\].sum\(\)"),
        ({"score_mod": lambda s, b, h, i, j: s + table[h] * 2}, NotImplementedError,
            r"computes \(aten.mul.Tensor\) with a tensor of"),
        ({"score_mod": lambda s, b, h, i, j: s + table[h, i / 2]}, (TypeError, IndexError), "ind"),
        ({"score_mod": lambda s, b, h, i, j: i > j}, TypeError, "returns a boolean"),
        ({"score_mod": lambda s, b, h, i, j: 3.0}, TypeError, "^score_mod returns 3.0; it must return the new score"),
        ({"score_mod": lambda s, b, h, i, j: s + table[None, None, None][0, 0, 0, h, i]}, (NotImplementedError,),
            "^score_mod"),
        ({"score_mod": 1}, TypeError, r"^score_mod is a int; it must be a function of \(score, b, h, q_idx, kv_idx\)"),
        ({"score_mod": lambda s: s}, TypeError,
            r"^score_mod is <function .*; it must be a function of .* \(too many positional"),
        ({"score_mod": lambda s, b, h, i: s}, TypeError,
            r"^score_mod is <function .*; it must be a function of \(score, b, h"),
        ({"block_mask": mask}, ValueError,
            f"^block_mask is for 64 queries and {S} keys, but query has {S} and key {S}"),
        ({"block_mask": table}, TypeError,
            "^block_mask is a Tensor; it must be a torch.nn.attention.flex_attention.BlockMask"),
        ({"return_lse": True, "return_aux": mask}, ValueError, "^return_lse is True and return_aux is given"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            flex_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="^key has 2 heads but query has 4; they must be the same, or enable_gqa=True"):
        flex_attention(q, k[:, :2], v)
    with pytest.raises(ValueError, match=r"^query has shape \(4, 70, 16\); it must be \(batch, heads, sequence"):
        flex_attention(q[0], k, v)
    with pytest.raises(TypeError, match="^value is a ndarray; it must be a torch.Tensor"):
        flex_attention(q, k, v.numpy())
    with pytest.raises(ValueError, match="is on meta; it must be on cpu or cuda"):
        flex_attention(*(x.to("meta") for x in (q, k, v)), lambda s, b, h, i, j: s)


def test_a_tensor_that_is_captured_twice_and_two(rng: np.random.Generator) -> None:
    """The same function, over the same tensor twice or over two of the same kind."""
    q, k, v = qkv(rng, dtype="float64")
    one, other = numbers(rng, S), numbers(rng, S)

    def over(x: Any, y: Any) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + x[i] + 2 * y[j]

    for x, y in ((one, one), (one, other), (other, one), (other, other)):
        out, (expected, _) = flex_attention(q, k, v, score_mod=over(x, y)), standard(q, k, v, over(x, y))
        torch.testing.assert_close(out, expected)
        for wanted in {x, y}:
            found, should = (
                torch.autograd.grad(o.square().sum(), wanted, retain_graph=True)[0] for o in (out, expected)
            )
            torch.testing.assert_close(found, should)


def test_captured_tensors_of_other_strides_and_autocast(rng: np.random.Generator) -> None:
    """What is traced with one is not taken for the other."""
    q, k, v = qkv(rng, dtype="float64")
    table, left, right = numbers(rng, S, S), numbers(rng, S, 8), numbers(rng, 8, S)

    def flat(x: Any) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + x.reshape(-1)[i * S + j]

    for x in (table, table.t()):
        torch.testing.assert_close(flex_attention(q, k, v, score_mod=flat(x)), standard(q, k, v, flat(x))[0])

    a, b = left.float().detach(), right.float().detach()

    def product(s: Any, _: Any, h: Any, i: Any, j: Any) -> Any:
        return s + (a @ b)[i, j]

    q, k, v = (x.float() for x in (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        flex_attention(q, k, v, score_mod=product)
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=product), standard(q, k, v, product)[0])
