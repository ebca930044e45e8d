"""Functions and modules of other packages in our place: values and gradients are theirs, or of what they are defined
by."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F

from cupyflash.compat import flash_attn, xformers
from cupyflash.torch import MultiheadAttention, multihead, scaled_dot_product_attention


def numbers(*shape: int, seed: int = 0, grad: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def same(ours: Any, theirs: Any, leaves: list[Any], **options: Any) -> None:
    """Results and gradients of two functions without arguments."""
    x, y = ours(), theirs()
    torch.testing.assert_close(x, y)
    weights = torch.randn_like(y)
    for g, e in zip(*(torch.autograd.grad((z * weights).sum(), leaves) for z in (x, y)), strict=True):
        torch.testing.assert_close(g, e)


# ---- torch.nn.functional.scaled_dot_product_attention ---------------------------------------------------------------

MASKS: dict[str, Any] = {
    "none": lambda lead: None,
    "booleans": lambda lead: numbers(5, 7) > -0.8,
    "booleans of keys": lambda lead: numbers(*lead[:1], *(1,) * len(lead[1:]), 1, 7) > -0.8,
    "numbers": lambda lead: numbers(*lead, 5, 7, grad=True),
    "numbers for all": lambda lead: numbers(5, 7, grad=True),
    "numbers that hide": lambda lead: torch.where(numbers(5, 7) > -0.5, 0.0, -torch.inf).double().index_fill(
        1, torch.tensor([3]), 0.0
    ),
}  # fmt: skip


def test_signatures() -> None:
    ours = inspect.signature(scaled_dot_product_attention).parameters.values()
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    required = inspect.Parameter.empty
    assert [(x.name, x.default) for x in ours] == [
        (x.name, x.default_value if x.has_default_value() else required) for x in theirs
    ]
    stock = inspect.signature(torch.nn.MultiheadAttention.forward).parameters
    assert list(inspect.signature(MultiheadAttention.forward).parameters) == list(stock)


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_scaled_dot_product_attention(mask: str, lead: tuple[int, ...]) -> None:
    q, k, v = numbers(*lead, 5, 8, grad=True), numbers(*lead, 7, 8, grad=True), numbers(*lead, 7, 6, grad=True)
    attn_mask = MASKS[mask](lead)
    leaves = [x for x in (q, k, v, attn_mask) if x is not None and x.requires_grad]
    for options in ({}, {"scale": 0.3}, *([{"is_causal": True}] if attn_mask is None else [])):
        same(
            lambda o=options: scaled_dot_product_attention(q, k, v, attn_mask, **o),
            lambda o=options: F.scaled_dot_product_attention(q, k, v, attn_mask, **o),
            leaves,
        )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "leads",
    [((2,), (1,), (1,)), ((1,), (2,), (2,)), ((), (2,), (2,)), ((2,), (), (1,)), ((3, 1), (1, 2), (2,))],
    ids=str,
)
def test_axes_before_the_heads_broadcast(leads: tuple[tuple[int, ...], ...], compiled: bool) -> None:
    q, k, v = (numbers(*lead, 4, n, 8, grad=True) for lead, n in zip(leads, (5, 7, 7)))
    mask = numbers(2, 1, 5, 7, grad=True)
    torch._dynamo.reset()
    f = (
        torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
        if compiled
        else scaled_dot_product_attention
    )
    same(lambda: f(q, k, v, mask), lambda: F.scaled_dot_product_attention(q, k, v, mask), [q, k, v, mask])


def test_grouped_queries() -> None:
    q, k, v = numbers(2, 4, 5, 8, grad=True), numbers(2, 2, 7, 8, grad=True), numbers(2, 2, 7, 6, grad=True)
    same(
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [q, k, v],
    )
    with pytest.raises(ValueError, match="^key has 2 heads but query has 4; they must be the same, or enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("mask", [numbers(5, 7), numbers(5, 7) > 0])
def test_causal_beside_a_mask(mask: Any) -> None:
    q, k = numbers(2, 4, 5, 8, grad=True), numbers(2, 4, 7, 8, grad=True)
    below = torch.ones(5, 7, dtype=torch.bool).tril()
    both = mask & below if mask.dtype is torch.bool else mask.masked_fill(~below, -torch.inf)
    same(
        lambda: scaled_dot_product_attention(q, k, k, mask, is_causal=True),
        lambda: F.scaled_dot_product_attention(q, k, k, both).nan_to_num(),
        [q, k],
    )


def test_a_mask_for_all_along_some_leading_axes() -> None:
    """As Evoformers have them: (B, N, H, S, S) of (B, 1, H, S, S)."""
    q, mask = numbers(2, 3, 4, 5, 8, grad=True), numbers(2, 1, 4, 5, 5, grad=True)
    same(
        lambda: scaled_dot_product_attention(q, q, q, mask),
        lambda: F.scaled_dot_product_attention(q, q, q, mask.expand(2, 3, 4, 5, 5)),
        [q, mask],
    )


def test_of_dropout_that_drops_all_nothing_is_left() -> None:
    q = numbers(2, 4, 5, 8, grad=True)
    out = scaled_dot_product_attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), dropout_p=1.0)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not out.any() and not dq.any()
    module, x = MultiheadAttention(16, 4, dropout=1.0, bias=False), torch.ones(5, 2, 16)
    assert not module(x, x, x, torch.zeros(2, 5, dtype=torch.bool))[0].any()


def test_rows_that_see_nothing_are_zeros() -> None:
    q = numbers(2, 4, 5, 8)
    hidden = torch.ones(5, 5, dtype=torch.bool)
    hidden[2] = False
    ours, theirs = (f(q, q, q, hidden) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention))
    assert not ours[:, :, 2].any()
    torch.testing.assert_close(ours, theirs.nan_to_num())


def test_what_is_refused() -> None:
    q, k = numbers(2, 4, 5, 8), numbers(2, 4, 7, 8)
    from torch.nn.attention.bias import causal_upper_left

    with pytest.raises(
        ValueError,
        match="^is_causal is True and attn_mask is a CausalBias; it must be one or the other",
    ):
        scaled_dot_product_attention(q, k, k, causal_upper_left(5, 7), is_causal=True)
    for flag in ("is_causal", "enable_gqa"):
        with pytest.raises(TypeError, match=f"^{flag} is 'no'; it must be True or False"):
            scaled_dot_product_attention(q, k, k, **{flag: "no"})
    for p in (-0.1, 2.0):
        with pytest.raises(ValueError, match=f"^dropout_p is {p}; it must be from 0 to 1"):
            scaled_dot_product_attention(q, k, k, dropout_p=p)
    with pytest.raises(
        ValueError, match=r"^key has shape \(3, 4, 7, 8\) but query has \(2, 4, 5, 8\); their axes before"
    ):
        scaled_dot_product_attention(q, numbers(3, 4, 7, 8), numbers(3, 4, 7, 8))
    with pytest.raises(
        ValueError, match=r"^value has shape \(3, 4, 7, 8\) but query has \(2, 4, 5, 8\); their axes before"
    ):
        scaled_dot_product_attention(q, k, numbers(3, 4, 7, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_causal_biases_of_pytorch(compiled: bool) -> None:
    """Tensors without elements, known by their kind."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    torch._dynamo.reset()
    function = (
        torch.compile(scaled_dot_product_attention, backend="aot_eager") if compiled else scaled_dot_product_attention
    )
    q, k = numbers(2, 4, 5, 8, grad=True), numbers(2, 4, 7, 8, grad=True)
    for bias in (causal_lower_right(5, 7), causal_upper_left(5, 7)):
        same(lambda b=bias: function(q, k, k, b), lambda b=bias: F.scaled_dot_product_attention(q, k, k, b), [q, k])
    with pytest.raises(ValueError, match="^attn_mask is for 5 queries and 6 keys, but query has 5 and key 7"):
        scaled_dot_product_attention(q, k, k, causal_lower_right(5, 6))


def test_compiled() -> None:
    torch._dynamo.reset()
    q, mask = numbers(2, 4, 5, 8, grad=True), numbers(5, 5, grad=True)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    same(lambda: compiled(q, q, q, mask), lambda: F.scaled_dot_product_attention(q, q, q, mask), [q, mask])


def test_errors_name_the_arguments_of_the_drop_in() -> None:
    """Not those of `attention`, to which they are handed."""
    q, k = numbers(2, 4, 5, 8), numbers(2, 4, 7, 8)
    nested = torch.nested.nested_tensor([numbers(4, 5, 8)], layout=torch.jagged)
    sdpa, module, own = scaled_dot_product_attention, MultiheadAttention(16, 4).double(), numbers(5, 2, 16)
    attend = xformers.memory_efficient_attention
    for call, error, message in (
        (lambda: sdpa(q.numpy(), k, k), TypeError, "^query is a ndarray; it must be a torch.Tensor"),
        (lambda: sdpa(q, None, k), TypeError, "^key is a NoneType; it must be a torch.Tensor"),
        (lambda: sdpa(q, k, k, [1]), TypeError, "^attn_mask is a list; it must be a torch.Tensor"),
        (lambda: sdpa(nested, k, k), TypeError, "^query is a nested tensor; it must be a dense one"),
        (lambda: sdpa(q, k, k, torch.ones(5, 6)), ValueError,
            r"^attn_mask has shape \(5, 6\); it must be \(2, 4, 5, 7\)"),
        (lambda: sdpa(q, k.float(), k), TypeError, "^key has dtype float32 but query has float64"),
        (lambda: sdpa(q, k, k, dropout_p="a"), TypeError, "^dropout_p is 'a'; it must be a number"),
        (lambda: module(own.numpy(), own, own), TypeError, "^query is a ndarray; it must be a torch.Tensor"),
        (lambda: module(own, own[..., :8], own), ValueError,
            r"^key has shape \(5, 2, 8\); it must be 3-dimensional, with 16"),
        (lambda: module(own, own, own[0]), ValueError, r"^value has shape \(2, 16\); it must be 3-dimensional"),
        (lambda: module(own, own[:, :1], own[:, :1]), ValueError, "^key has batch 1"),
        (lambda: module(own, own, own, torch.ones(2, 4) > 2), ValueError,
            r"^key_padding_mask has shape \(2, 4\); it must be \(2, 5\) \(True: hidden\)"),
        (lambda: module(own, own, own, torch.ones(2, 5).int()), TypeError,
            "^key_padding_mask has dtype torch.int32; it must"),
        (lambda: module(own, own, own, attn_mask=torch.ones(4, 5) > 2), ValueError, r"^attn_mask has shape \(4, 5\)"),
        (lambda: module(own, own, own, attn_mask=torch.ones(3, 5, 5)), ValueError, r"^attn_mask has shape \(3, 5, 5\)"),
        (lambda: flash_attn.flash_attn_func([1], k, k), TypeError, "^q is a list; it must be a torch.Tensor"),
        *((lambda x=x: flash_attn.flash_attn_func(k, k, k, causal=x), TypeError,
            f"^causal is '{x}'; it must be True or False")
          for x in ("no", "top_left")),
        (lambda: flash_attn.flash_attn_func(k, k, k, softmax_scale="a"), TypeError,
            "^softmax_scale is 'a'; it must be a real"),
        *((lambda x=x: flash_attn.flash_attn_func(k, k, k, window_size=x), TypeError,
            "^window_size is .*; it must be two integers")
          for x in (3, None, (None, None), (1, 2, 3), (1.5, 1), ("a", 1))),
        (lambda: flash_attn.flash_attn_qkvpacked_func(q.numpy()), TypeError,
            "^qkv is a ndarray; it must be a torch.Tensor"),
        (lambda: attend(q.numpy(), k, k), TypeError, "^query is a ndarray; it must be a torch.Tensor"),
        (lambda: attend(q, k[0], k[0]), ValueError,
            r"query \(2, 4, 5, 8\), key \(4, 7, 8\), .* must have as many dimensions"),
        (lambda: attend(q, q.float(), q), TypeError, "^key has dtype float32 but query has float64"),
        (lambda: attend(q, q, q, torch.ones(4, 3)), ValueError,
            r"^attn_bias has shape \(4, 3\); it must be \(2, 5, 4, 4\)"),
        (lambda: attend(q, q, q, xformers.LowerTriangularMask), NotImplementedError,
            "^attn_bias is the class LowerTriangularMask"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


# ---- torch.nn.MultiheadAttention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "how", [{}, {"bias": False}, {"kdim": 12, "vdim": 20}], ids=["packed", "without bias", "other widths"]
)
@pytest.mark.parametrize(
    "masks", ["none", "padding", "padding of numbers", "mask", "mask of numbers", "mask of heads", "causal", "all"]
)
def test_multihead_attention(masks: str, how: dict[str, Any], batch_first: bool) -> None:
    """The stock module's weights, and its results and gradients."""
    torch.manual_seed(0)
    stock = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first, dtype=torch.float64, **how)
    ours = MultiheadAttention(16, 4, batch_first=batch_first, dtype=torch.float64, **how)
    ours.load_state_dict(stock.state_dict())
    for module in (stock, ours):  # biases are zeros at first
        for name, x in module.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.constant_(x, 0.3)
    x, memory, values = (
        numbers(2, 5, 16),
        numbers(2, 7, how.get("kdim", 16)),
        numbers(2, 7, how.get("vdim", 16), seed=1),
    )
    if masks == "causal":
        memory = values = x
        if how.get("kdim"):
            pytest.skip("one width")
    inputs = [y if batch_first else y.transpose(0, 1) for y in (x, memory, values)]
    keys = memory.shape[1]
    padding, hides = torch.arange(keys) >= torch.tensor([[keys], [4]]), numbers(5, keys) > 0.8
    hides[:, 0] = False
    options: dict[str, Any] = {
        "none": {}, "padding": {"key_padding_mask": padding}, "mask": {"attn_mask": hides},
        "padding of numbers": {"key_padding_mask": numbers(2, keys)},
        "mask of numbers": {"attn_mask": numbers(5, keys)},
        "mask of heads": {"attn_mask": numbers(8, 5, keys)},
        "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
        "all": {"key_padding_mask": numbers(2, keys), "attn_mask": numbers(5, keys)},
    }[masks]  # fmt: skip
    found, expected = (module(*inputs, need_weights=False, **options)[0] for module in (ours, stock))
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        y.square().sum().backward()
    for (name, x), y in zip(ours.named_parameters(), stock.parameters()):
        torch.testing.assert_close(x.grad, y.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_one_sequence_and_self_attention() -> None:
    stock = torch.nn.MultiheadAttention(16, 4, dtype=torch.float64)
    ours = MultiheadAttention(16, 4, dtype=torch.float64)
    ours.load_state_dict(stock.state_dict())
    x, padding = numbers(5, 16), torch.arange(5) > 3
    found, weights = ours(x, x, x, padding)
    assert weights is None
    torch.testing.assert_close(found, stock(x, x, x, padding)[0])


def test_in_a_stock_layer() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = numbers(2, 5, 16)
    expected = layer(x)
    own = MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    own.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = own
    torch.testing.assert_close(layer(x), expected)


def test_what_the_stock_module_computes(recwarn: pytest.WarningsRecorder) -> None:
    """And that a warning says so once."""
    multihead._say.cache_clear()
    x, rest = numbers(5, 2, 16), {"dtype": torch.float64}
    for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        stock = torch.nn.MultiheadAttention(16, 4, **options, **rest)
        ours = MultiheadAttention(16, 4, **options, **rest)
        ours.load_state_dict(stock.state_dict())
        for given in ({"need_weights": True}, {"need_weights": True, "average_attn_weights": False}):
            torch.testing.assert_close(ours(x, x, x, **given), stock(x, x, x, **given))
        torch.testing.assert_close(ours(x, x, x), stock(x, x, x, need_weights=False))
    told = [str(w.message) for w in recwarn if "cupyflash" in str(w.message)]
    assert [x.partition(" is True: torch.nn.MultiheadAttention's own")[0] for x in told] == [
        "need_weights", "add_bias_kv", "add_zero_attn"
    ]  # fmt: skip


# ---- dropout, in all of them ----------------------------------------------------------------------------------------


def module(x: Any, p: float) -> Any:
    torch.manual_seed(5)
    layer = MultiheadAttention(8, 4, dropout=p, batch_first=True, dtype=torch.float64)
    return lambda: layer(x.flatten(0, 1)[..., 0, :], x.flatten(0, 1)[..., 0, :], x.flatten(0, 1)[..., 0, :])[0]


WITH_DROPOUT: dict[str, Any] = {
    "torch": lambda x, p: lambda: scaled_dot_product_attention(x[0], x[1], x[2], dropout_p=p),
    "module": module,
    "flash-attn": lambda x, p: lambda: flash_attn.flash_attn_func(x[0], x[1], x[2], p),
    "xFormers": lambda x, p: lambda: xformers.memory_efficient_attention(x[0], x[1], x[2], None, p),
}


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout(name: str) -> None:
    """By PyTorch's generator: the same after the same seed, another in each call, gradients too, and right on
    average."""
    x = numbers(3, 2, 6, 4, 8, grad=True)
    plain, call = WITH_DROPOUT[name](x, 0.0)(), WITH_DROPOUT[name](x, 0.4)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        out = call()
        results.append([out, *torch.autograd.grad(out.sum(), x)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert not torch.equal(call(), results[0][0])
    mean = torch.stack([call().detach() for _ in range(600)]).mean(0)
    torch.testing.assert_close(mean, plain.detach(), rtol=0, atol=0.35)


EVERY: dict[str, Any] = {
    "scaled_dot_product_attention": lambda x, bias: scaled_dot_product_attention(x, x, x, bias),
    "MultiheadAttention": lambda x, bias: a_module(x[..., 0, :], x[..., 0, :], x[..., 0, :], attn_mask=bias[0])[0],
    "flash_attn_func": lambda x, bias: flash_attn.flash_attn_func(x, x, x, 0.0, 0.3, True, (3, -1), 2.0),
    "flash_attn_qkvpacked_func": lambda x, bias: flash_attn.flash_attn_qkvpacked_func(
        torch.stack((x, x, x), 2), causal=True
    ),
    "flash_attn_kvpacked_func": lambda x, bias: flash_attn.flash_attn_kvpacked_func(x, torch.stack((x, x), 2)),
    "memory_efficient_attention": lambda x, bias: xformers.memory_efficient_attention(x, x, x, bias[None]),
    "LowerTriangularMask": lambda x, bias: xformers.memory_efficient_attention(x, x, x, xformers.LowerTriangularMask()),
}
a_module = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)


@pytest.mark.parametrize("name", EVERY)
def test_compiled_exported_and_mapped(name: str) -> None:
    """In one graph with any lengths, with gradients; in a program; and over an axis that becomes a part of the
    batch."""

    class Layer(torch.nn.Module):
        def forward(self, x: Any, bias: Any) -> Any:
            return EVERY[name](x, bias)

    torch._dynamo.reset()
    x, bias = numbers(2, 4, 4, 8, grad=True), numbers(4, 4, 4)
    compiled = torch.compile(EVERY[name], fullgraph=True, dynamic=True, backend="aot_eager")
    same(lambda: compiled(x, bias), lambda: EVERY[name](x, bias), [x])
    program = torch.export.export(Layer(), (x.detach(), bias), strict=False)
    torch.testing.assert_close(program.module()(x, bias), EVERY[name](x, bias))
    more = numbers(3, 2, 4, 4, 8)
    torch.testing.assert_close(
        torch.vmap(EVERY[name], (0, None))(more, bias), torch.stack([EVERY[name](y, bias) for y in more])
    )


def test_dropout_compiled() -> None:
    torch._dynamo.reset()
    q = numbers(2, 4, 6, 8)

    def attend() -> Any:
        return scaled_dot_product_attention(q, q, q, dropout_p=0.4)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for f in (attend, compiled, compiled):
        torch.manual_seed(3)
        results.append(f())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0)
    assert not torch.equal(compiled(), results[0])


def test_the_module_drops_in_training_alone() -> None:
    layer, x = MultiheadAttention(16, 4, dropout=0.5, dtype=torch.float64), numbers(5, 16)
    stock = torch.nn.MultiheadAttention(16, 4, dropout=0.5, dtype=torch.float64)
    stock.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    torch.testing.assert_close(layer.eval()(x, x, x)[0], stock.eval()(x, x, x)[0])
