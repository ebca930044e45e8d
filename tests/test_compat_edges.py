"""What functions in the place of others refuse, and caches that are not written to where they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cupyflash.compat import flash_attn, flash_attn_interface, xformers
from cupyflash.integrations.transformers import attention_forward

FILLED = torch.tensor([3, 4], dtype=torch.int32)


def drawn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def with_cache(module: Any = flash_attn, **change: Any) -> tuple[Any, Any]:
    """What a call that writes to caches says, and they hold: of those that are not given, zeros."""
    given = {"q": drawn(2, 1, 4, 8), "k_cache": torch.zeros(2, 8, 2, 8, dtype=torch.float64)}
    given |= {"v_cache": given["k_cache"].clone(), "k": drawn(2, 1, 2, 8), "v": drawn(2, 1, 2, 8)}
    given |= {"cache_seqlens": FILLED} | change
    try:
        return module.flash_attn_with_kvcache(**given), given
    except (TypeError, ValueError) as error:
        return str(error), given


def test_caches_that_share_memory() -> None:
    said, _ = with_cache(k_cache=torch.zeros(2, 8, 1, 8, dtype=torch.float64).expand(2, 8, 2, 8))
    assert said.startswith("k_cache has shape (2, 8, 2, 8)") and "elements share memory" in said
    cache = torch.zeros(2, 8, 2, 8, dtype=torch.float64)
    said, _ = with_cache(k_cache=cache, v_cache=cache)
    assert said.startswith("v_cache shares memory with k_cache")
    said, _ = with_cache(k_cache=cache, k=cache[:, 4:5], v=cache[:, 5:6])
    assert "k_cache shares memory with v" in said
    assert not cache.any()
    pool = torch.zeros(2, 8, 2, 2, 8, dtype=torch.float64)  # interleaved: no element is in both
    (out, *_), given = with_cache(k_cache=pool[:, :, 0], v_cache=pool[:, :, 1], return_softmax_lse=True)
    assert torch.equal(pool[0, 3, 1], given["v"][0, 0]) and torch.equal(pool[1, 4, 0], given["k"][1, 0])
    assert torch.equal(out, with_cache(**{name: given[name] for name in ("q", "k", "v")})[0])


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": float("nan")}, {"softmax_scale": "x"}, {"softcap": -1.0}, {"softcap": "a"},
        {"q": torch.ones(2, 1, 3, 8, dtype=torch.float64)}, {"q": torch.ones(2, 1, 4, 6, dtype=torch.float64)},
        {"q": torch.ones(2, 1, 4, 8)},
    ],
    ids=lambda x: "-".join(f"{name} {tuple(y.shape) if hasattr(y, 'shape') else y}" for name, y in x.items()),
)  # fmt: skip
def test_nothing_is_written_where_something_is_wrong(module: Any, change: dict[str, Any]) -> None:
    said, given = with_cache(module, **change)
    assert isinstance(said, str)
    assert not given["k_cache"].any() and not given["v_cache"].any()


def test_nothing_is_written_where_slopes_are_wrong() -> None:
    said, given = with_cache(alibi_slopes=torch.ones(3))
    assert said.startswith("alibi_slopes has")
    assert not given["k_cache"].any()


def test_more_entries_than_sequences() -> None:
    """FlashAttention-2 takes the first ones; 3 says no."""
    large = [torch.zeros(4, 8, 2, 8, dtype=torch.float64) for _ in "kv"]
    out, given = with_cache(k_cache=large[0], v_cache=large[1])
    same, small = with_cache(**{name: given[name] for name in ("q", "k", "v")})
    assert torch.equal(out, same)
    assert torch.equal(large[0][:2], small["k_cache"]) and not large[0][2:].any()
    assert isinstance(with_cache(flash_attn_interface, k_cache=large[0], v_cache=large[1])[0], str)


def test_entries_that_two_sequences_have() -> None:
    out, given = with_cache(cache_batch_idx=torch.tensor([1, 1]), cache_seqlens=torch.tensor([3, 3]))
    row = given["k_cache"][1, 3]
    assert any(torch.equal(row, given["k"][n, 0]) for n in (0, 1))
    assert out.shape == (2, 1, 4, 8) and not given["k_cache"][0].any()
    said, _ = with_cache(cache_batch_idx=torch.tensor([1, 0]), cache_seqlens=torch.tensor([9, 3]), k=None, v=None)
    assert said == "cache_seqlens[0] is 9; it must be at most the rows of k_cache, 8"


@pytest.mark.parametrize("rotary", [False, True])
def test_compiled_as_one_graph(rotary: bool) -> None:
    torch._dynamo.reset()
    angles = torch.randn(8, 4)
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if rotary else {}
    given = [torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)]
    caches = [[torch.zeros(2, 8, 2, 8) for _ in "kv"] for _ in range(2)]

    def call(q: Any, k: Any, v: Any, *caches: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=FILLED, causal=True, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given, *caches[0]), call(*given, *caches[1]))
    for x, y in zip(*caches):
        assert torch.equal(x, y)


QKV = drawn(3, 1, 3, 2, 8).unbind()
EIGHT = [x.to(torch.float8_e4m3fn) for x in torch.randn(3, 2, 3, 4, 8)]


def blocks(*lengths: int) -> Any:
    return xformers.BlockDiagonalMask.from_seqlens(lengths, device="cpu")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: flash_attn.flash_attn_func(*QKV, return_attn_probs="no"), TypeError, "return_attn_probs is 'no'"),
        (lambda: flash_attn_interface.flash_attn_func(*QKV, return_attn_probs="no"), TypeError, "return_attn_probs is"),
        (lambda: with_cache_raising(return_softmax_lse="no"), TypeError, "return_softmax_lse is 'no'"),
        (lambda: with_cache_raising(rotary_interleaved="no"), TypeError, "rotary_interleaved is 'no'; it must be True"),
        (
            lambda: flash_attn_interface.flash_attn_func(*EIGHT, q_descale=1.0), TypeError, "q_descale is a float"
        ),
        (
            lambda: flash_attn_interface.flash_attn_func(*EIGHT, k_descale=torch.ones(2, 2)),
            ValueError, r"k_descale has shape \(2, 2\); it must be \(2, 4\)",
        ),
        (
            lambda: xformers.memory_efficient_attention(drawn(1, 3, 2, 3, 8), *drawn(2, 1, 4, 3, 2, 8)),
            ValueError, r"key has shape \(1, 4, 3, 2, 8\), and query",
        ),
        (
            lambda: xformers.memory_efficient_attention(drawn(1, 3, 2, 4, 8), *drawn(2, 1, 4, 2, 2, 8)),
            ValueError, r"key has shape \(1, 4, 2, 2, 8\), and query",
        ),
        (
            lambda: xformers.memory_efficient_attention(drawn(2, 3, 2, 8), *drawn(2, 2, 4, 2, 8), drawn(2, 3, 4)),
            ValueError, r"attn_bias has shape \(2, 3, 4\); it must have as many dimensions as query, 4",
        ),
        (
            lambda: xformers.memory_efficient_attention(*QKV, output_dtype=torch.int32),
            TypeError, "output_dtype is torch.int32; it must be None or a floating-point",
        ),
        (lambda: xformers.memory_efficient_attention(*QKV, output_dtype="float32"), TypeError, "output_dtype is 'fl"),
        (lambda: blocks(2, 3).split(drawn(2, 5, 1, 4)), ValueError, r"tensor has shape \(2, 5, 1, 4\); it must be \(1"),
        (lambda: blocks(2, 3).split(drawn(1, 6, 1, 4)), ValueError, r"tensor has shape \(1, 6, 1, 4\); it must be \(1"),
        (
            lambda: xformers.BlockDiagonalMask.from_tensor_lists_qkv([drawn(2, 3, 1, 2)], [drawn(1, 5, 1, 2)] * 2),
            ValueError, r"tensors_k has batches of \[1, 1\]; it must have those of tensors_q, \[2\]",
        ),
        (lambda: blocks(2.0, 3), ValueError, r"q_seqlen is \[2.0, 3\]; it must hold integers"),
        (lambda: blocks(True, 3), ValueError, r"q_seqlen is \[True, 3\]; it must hold integers"),
    ],
)  # fmt: skip
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


def with_cache_raising(**change: Any) -> Any:
    cache = torch.zeros(2, 8, 2, 8)
    return flash_attn.flash_attn_with_kvcache(torch.ones(2, 1, 2, 8), cache, cache.clone(), **change)


def test_lengths_of_numpy() -> None:
    assert blocks(*np.array([2, 3])).q_seqinfo.seqlen_py == [2, 3]


def test_masks_of_one_head() -> None:
    """(B, M, N) booleans for (B, M, K)."""
    q, k, v = (drawn(2, n, 8) for n in (3, 4, 4))
    mask = torch.rand(2, 3, 4) < 0.7
    mask[..., 0] = True
    out = xformers.memory_efficient_attention(q, k, v, mask)
    hidden = torch.zeros(2, 3, 4, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out, xformers.memory_efficient_attention(q, k, v, hidden))
    torch.testing.assert_close(out, torch.softmax(q @ k.mT / 8**0.5 + hidden, -1) @ v)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 4, 8), (2, 5, 2, 2, 8)], ids=len)
def test_any_rank_is_one_graph(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    x = drawn(*shape)
    compiled = torch.compile(xformers.memory_efficient_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x), xformers.memory_efficient_attention(x, x, x))


def test_gradients_of_heads_that_are_expanded() -> None:
    """Each of the heads that share one in memory has its own, where somebody looks at it; else their sum is right."""
    q, small = drawn(1, 3, 2, 3, 8), [drawn(1, 4, 2, 1, 8) for _ in "kv"]

    def gradients(*given: Any) -> tuple[Any, ...]:
        return torch.autograd.grad(xformers.memory_efficient_attention(q, *given).square().sum(), given)

    apart = gradients(*(x.repeat(1, 1, 1, 3, 1).requires_grad_() for x in small))
    leaves = gradients(*(x.expand(1, 4, 2, 3, 8).requires_grad_() for x in small))
    for x, y in zip(leaves, apart):
        torch.testing.assert_close(x, y)
    own = [x.requires_grad_() for x in small]
    out = xformers.memory_efficient_attention(q, *(x.expand(1, 4, 2, 3, 8) for x in own)).square().sum()
    for x, y in zip(torch.autograd.grad(out, own), apart):
        torch.testing.assert_close(x, y.sum(3, keepdim=True))


def test_packed_sequences_with_other_queries_than_keys() -> None:
    """Of transformers: causal is at the bottom right of each sequence, as in flash_attn_varlen_func."""

    class Layer(torch.nn.Module):
        is_causal = True

    q, k, v = (drawn(1, 2, 5, 8) for _ in range(3))
    ends = torch.tensor([0, 2, 4]), torch.tensor([0, 3, 5])
    out, _ = attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=ends[0], cu_seq_lens_k=ends[1])
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    wanted = flash_attn.flash_attn_varlen_func(*rows, *ends, 3, 3, causal=True)
    torch.testing.assert_close(out[0, :4], wanted[:4])
    same = torch.tensor([0, 2, 5])
    out, _ = attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=same, cu_seq_lens_k=same.clone())
    torch.testing.assert_close(out[0], flash_attn.flash_attn_varlen_func(*rows, same, same, 3, 3, causal=True))


def test_arguments_that_are_called_otherwise_there() -> None:
    for call, text in (
        (lambda: flash_attn.flash_attn_func(*QKV, scale=0.1), "'scale'; here it is softmax_scale"),
        (lambda: with_cache_raising(page_table=FILLED[:, None]), "'page_table'; here it is block_table"),
        (lambda: flash_attn.flash_attn_func(*QKV, colour="red"), "'colour'"),
    ):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument {text}$"):
            call()
    with pytest.raises(TypeError, match=r"^dropout_p is \[0.1\]; it must be a number from 0 to 1"):
        flash_attn.flash_attn_func(*QKV, dropout_p=[0.1])
