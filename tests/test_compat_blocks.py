"""xFormers' block-diagonal biases, of stand-ins with their names and attributes, beside a loop over sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyflash.compat import xformers
from cupyflash.compat.xformers_blocks import MASKS

OF_Q, OF_K, PADDING, PAGE = [3, 1, 2], [5, 3, 2], 8, 4


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(q: Any, k: Any, v: Any, causal: Any, window: Any) -> Any:
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(len(k))[None] - torch.arange(len(q))[:, None]
    at = at if causal == "top_left" else at - (len(k) - len(q))
    s = s.masked_fill((at < -window[0]) | (at > (min(0, window[1]) if causal else window[1])), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("name", MASKS)
def test_each_sequence_attends_to_its_own(name: str) -> None:
    causal, local = MASKS[name]
    starts = torch.tensor([0, *OF_K]).cumsum(0).int()
    rows = sum(OF_K)
    seqinfo: dict[str, Any] = {"seqlen": torch.tensor(OF_K, dtype=torch.int32), "seqlen_py": OF_K, "padding": PADDING}
    bias = type(name, (), {"_window_size": 2, "window_left": 2, "window_right": 1})()
    if "Paged" in name:
        bias.block_tables, bias.page_size, rows = torch.tensor([[4, 1], [0, -1], [3, -1]]).int(), PAGE, 5 * PAGE
        place = [[int(bias.block_tables[n, j // PAGE]) * PAGE + j % PAGE for j in range(x)] for n, x in enumerate(OF_K)]
    else:
        if "Padded" in name:
            starts, rows = torch.arange(4).int() * PADDING, 3 * PADDING
        elif "Gappy" in name:
            starts, rows = torch.tensor([1, 8, 12, 15]).int(), 15
        place = [list(range(int(starts[n]), int(starts[n]) + x)) for n, x in enumerate(OF_K)]
    bias.q_seqinfo = SimpleNamespace(seqstart=torch.tensor([0, *OF_Q]).cumsum(0).int())
    bias.k_seqinfo = SimpleNamespace(seqstart=starts, **seqinfo)
    window = ((1, 0) if causal else (2, 1)) if local else (1000, 1000)
    q, k, v = drawn(1, 6, 2, 8), drawn(1, rows, 2, 8, seed=1), drawn(1, rows, 2, 8, seed=2)
    given = [x.requires_grad_() for x in (q, k, v)]
    with torch.set_grad_enabled("Paged" not in name):
        out, lse = xformers.memory_efficient_attention_forward_requires_grad(*given, bias)
        parts = [
            alone(x, k[0, at], v[0, at], causal, window) for x, at in zip(q[0].split(OF_Q), place, strict=True)
        ]  # fmt: skip
        wanted = torch.cat([x for x, _ in parts])[None]
    torch.testing.assert_close((out, lse), (wanted, torch.cat([x for _, x in parts], 1)[None]))
    if "Paged" not in name:
        dout = drawn(*out.shape, seed=3)
        torch.testing.assert_close(torch.autograd.grad(out, given, dout), torch.autograd.grad(wanted, given, dout))
    with pytest.raises(ValueError, match=f"^query has shape .*; with a {name} it must be"):
        xformers.memory_efficient_attention(q.expand(2, -1, -1, -1), k, v, bias)


@pytest.mark.parametrize(
    "name",
    ["BlockDiagonalCausalLocalAttentionMask", "PagedBlockDiagonalGappyKeysMask", "BlockDiagonalLocalAttentionFromBot"],
)
def test_others_are_refused_by_name(name: str) -> None:
    q = drawn(1, 6, 2, 8)
    with pytest.raises(NotImplementedError, match=f"^attn_bias is a {name}; it must be None, a tensor or one of"):
        xformers.memory_efficient_attention(q, q, q, type(name, (), {})())
