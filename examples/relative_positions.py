"""Learn a bias by distance, as a score function: PyTorch sees the table as a parameter like any other.

    python examples/relative_positions.py [--steps N] [--device cpu|cuda]

Each token shall say what stood three places before it. Queries and keys are zeros, so that the table alone can tell
where to look; after training it has one peak, at a distance of three.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from torch import nn
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash.torch import attention

LENGTH, BEFORE = 64, 3


def relative(s, b, h, i, j, table):  # type: ignore[no-untyped-def]
    """A bias for each head and distance."""
    return s + table[h, j - i + LENGTH - 1]


class Positions(nn.Module):
    """Attention (B, S, heads, dim) by positions alone."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, 2 * LENGTH - 1))

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros_like(v)
        return attention(nothing, nothing, v, causal=True, score=relative, score_arrays={"table": self.table})


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    model = Positions(heads=2).to(args.device)
    adam = torch.optim.Adam(model.parameters(), lr=0.2)
    losses = []
    for _ in range(args.steps):
        x = torch.randn(4, LENGTH, 2, 16, device=args.device)
        loss = ((model(x)[:, BEFORE:] - x[:, :-BEFORE]) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    peaks = (LENGTH - 1 - model.table.argmax(-1)).tolist()
    print(f"loss {losses[0]:.3f}, after {args.steps} steps {losses[-1]:.4f}; each head looks back by {peaks}")
    return {"first": losses[0], "last": losses[-1], "peaks": float(all(peak == BEFORE for peak in peaks))}


if __name__ == "__main__":
    main()
