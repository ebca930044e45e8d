"""FlexAttention's examples, each in two ways: as it was written for FlexAttention, and with the options that say it
here.

    python examples/from_flex_attention.py [--device cpu|cuda]

Both give the same results and gradients, which are compared, by tables that are learned too. The options are faster;
what none of them says is said by `bias=`, `block_mask=` or a function of your own (docs/score_functions.md).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

try:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash import block_mask, masks
from cupyflash.torch import attention, flex_attention

B, H, S, D, SIDE = 2, 4, 256, 32, 16  # the sequence is also a picture of SIDE x SIDE


def examples(device: str) -> Iterator[tuple[str, Any, Any, dict[str, Any], list[torch.Tensor]]]:
    """(name, score_mod, mask_mod, options here, what is learned)."""
    i, j = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)
    q = torch.empty(0, device=device)

    def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return q_idx >= kv_idx

    def blocks(source: Any, batch: int = 1) -> Any:
        return block_mask(source, shape=(batch, 1, S, S), like=q)

    slopes = (2.0 ** -torch.arange(1, H + 1, device=device)).requires_grad_()

    def alibi(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score - slopes[h] * (q_idx - kv_idx)

    yield "ALiBi", alibi, causal, {"causal": True, "alibi_slopes": slopes}, [slopes]

    def capped(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return 20 * torch.tanh(score / 20)

    yield "soft cap", capped, causal, {"causal": True, "softcap": 20.0}, []

    document = torch.arange(S, device=device) // 100

    def documents(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    yield "documents", None, documents, {"causal": True, "block_mask": blocks(masks.documents(document))}, []

    lengths = torch.tensor([20, 150], device=device)

    def prefix(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    yield "prefix LM", None, prefix, {"block_mask": blocks(masks.prefix(lengths) | masks.causal(), B)}, []

    def window_with_sinks(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx >= kv_idx) & ((q_idx - kv_idx < 64) | (kv_idx < 4))

    streaming = blocks(masks.window(63, 0) | masks.prefix(4))
    yield "sliding window with sinks", None, window_with_sinks, {"causal": True, "block_mask": streaming}, []

    table = torch.randn(32, H, device=device, requires_grad=True)

    def bucket(distance: torch.Tensor) -> torch.Tensor:
        """T5's: 16 distances of their own, then 16 that grow with the logarithm."""
        distance = torch.clamp(distance, min=0)
        far = 16 + (torch.log(torch.clamp(distance, min=1) / 16) / math.log(8) * 16).to(torch.int32)
        return torch.where(distance < 16, distance, torch.clamp(far, max=31))

    def t5(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score + table[bucket(q_idx - kv_idx), h]

    yield (
        "T5's relative positions",
        t5,
        causal,
        {"causal": True, "bias": table[bucket(i - j)].permute(2, 0, 1)},
        [table],
    )

    def neighbourhood(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        rows, columns = q_idx // SIDE - kv_idx // SIDE, q_idx % SIDE - kv_idx % SIDE
        return (abs(rows) <= 2) & (abs(columns) <= 2)

    yield "neighbourhoods in a picture", None, neighbourhood, {"block_mask": blocks(neighbourhood)}, []


def difference(run: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> float:
    """The largest between two ways, of results and gradients, beside the largest number in them."""
    results = [out := run(), *torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)]
    others = [out := other(), *torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)]
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(results, others))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(arguments).device
    q, k, v = (torch.randn(B, H, S, D, device=device, requires_grad=True) for _ in range(3))
    found = {}
    for name, score_mod, mask_mod, options, learned in examples(device):
        mask = create_block_mask(mask_mod, B, None, S, S, device=device)
        found[name] = difference(
            lambda: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask),  # noqa: B023
            lambda: attention(q, k, v, layout="bhsd", **options),  # noqa: B023
            [q, k, v, *learned],
        )
        print(f"{name:30}{', '.join(options):30}differ by {found[name]:.1e}")
    return found


if __name__ == "__main__":
    main()
