"""Attention as a PyTorch module: projections, grouped heads, rotary positions, padding, a window. Copy it and change
it.

    python examples/torch_module.py [--steps N] [--device cpu|cuda]

trains a small model to say what stood three places before, which only attention can look up, and compares the module
with PyTorch's own attention.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash.torch import attention


class Attention(nn.Module):
    """Causal self-attention of x (B, S, width). `kv_heads` heads of keys and values are shared by `heads` of queries.

    `window`: how many positions back a query sees, itself not counted; None: all of them.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads or heads, width // heads
        self.window = None if window is None else (window, 0)
        self.project = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """key_mask (B, S): False for padding."""
        *batch_and_length, _ = x.shape
        parts = self.project(x).split([n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q, k, v = (part.view(*batch_and_length, -1, self.dim) for part in parts)  # (B, S, heads, dim), not copied
        q, k = rotate(q), rotate(k)
        o = attention(q, k, v, causal=True, window=self.window, key_mask=key_mask)
        return self.out(o.flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) of x (B, S, H, D)."""
    half = x.shape[-1] // 2
    rate = 1e4 ** -(torch.arange(half, device=x.device) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] * rate)[:, None]
    cos, sin, a, b = angle.cos().to(x.dtype), angle.sin().to(x.dtype), x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model(nn.Module):
    """Tokens (B, S) to scores of `tokens` classes, (B, S, tokens)."""

    def __init__(self, tokens: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Attention(width, heads=4, kv_heads=2, window=8) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.read = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.read(self.norms[-1](x))


def difference_from_pytorch(device: str) -> float:
    """Largest difference between this module's attention and scaled_dot_product_attention, and of the gradients
    by q."""
    q, k, v = (torch.randn(2, 50, 4, 16, device=device, requires_grad=True) for _ in range(3))
    ours = attention(q, k, v, causal=True)
    q2, k2, v2 = (x.transpose(1, 2) for x in (q, k, v))
    theirs = nn.functional.scaled_dot_product_attention(q2, k2, v2, is_causal=True).transpose(1, 2)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((x * weights).sum(), q, retain_graph=True)[0] for x in (ours, theirs)]
    return max((ours - theirs).abs().max().item(), (gradients[0] - gradients[1]).abs().max().item())


def main(arguments: list[str] | None = None) -> list[float]:
    """Returns the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    print(f"off from PyTorch's attention and its gradient by at most {difference_from_pytorch(args.device):.1e}")
    tokens, back = 16, 3
    model = Model(tokens).to(args.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(1, args.steps + 1):
        text = torch.randint(tokens, (16, 24), device=args.device)
        scores = model(text)[:, back:]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, :-back].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == 1:
            print(f"step {step:4}  loss {losses[-1]:.3f} (not knowing: 2.773)")
    return losses


if __name__ == "__main__":
    main()
