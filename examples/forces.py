"""A molecular potential trained on forces, -dE/dx, through attention with a bias of distances: gradients of gradients.

    python examples/forces.py [--steps N] [--device cpu|cuda]

On a CPU take one thread of PyTorch (OMP_NUM_THREADS=1): at operations this small threads mostly wait for each other.

The forces are a gradient, by positions on which queries, keys, values and the bias depend; training is one of that.
The molecules are random, their true potential is one of Morse between pairs.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash.torch import attention


class Potential(nn.Module):
    def __init__(self, kinds: int = 3, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads, self.kinds, self.around = heads, nn.Embedding(kinds, width), nn.Linear(12, width)
        self.register_buffer("centres", torch.linspace(0.5, 4, 12))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.bias = nn.ModuleList(nn.Linear(12, heads) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        """Energies (B,) of atoms at x (B, N, 3), of kinds (B, N)."""
        distance = ((x[:, :, None] - x[:, None]).square().sum(-1) + 1e-6).sqrt()
        shells = torch.exp(-4 * (distance[..., None] - self.centres).square())
        y = self.kinds(kinds) + self.around(shells.sum(2))
        for qkv, bias, mlp in zip(self.qkv, self.bias, self.mlp):
            q, k, v = qkv(y).unflatten(-1, (3, self.heads, -1)).unbind(2)
            y = y + attention(q, k, v, bias=bias(shells).permute(0, 3, 1, 2)).flatten(2)
            y = y + mlp(y)
        return self.energy(y).sum((1, 2))


def morse(x: Tensor, kinds: Tensor) -> Tensor:
    """The true energies."""
    apart = (x[:, :, None] - x[:, None]).square().sum(-1) + torch.eye(x.shape[1], device=x.device)
    m = torch.exp(1 - apart.sqrt())
    return (torch.where(kinds[:, :, None] == kinds[:, None], 1.0, 2.0) * (m * m - 2 * m)).sum((1, 2))


def forces(energy: Tensor, x: Tensor, to_be_trained_on: bool = False) -> Tensor:
    return -torch.autograd.grad(energy.sum(), x, create_graph=to_be_trained_on)[0]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Potential().to(args.device)
    adam, errors = torch.optim.Adam(model.parameters(), 3e-3), []
    for step in range(args.steps):
        x = (3 * torch.rand(32, 12, 3, device=args.device)).requires_grad_()
        kinds = torch.randint(3, (32, 12), device=args.device)
        wanted = forces(morse(x, kinds), x)
        loss = (forces(model(x, kinds), x, to_be_trained_on=True) - wanted).square().mean() / wanted.square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        errors.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: {errors[-1]:.3f}", flush=True)
    print(f"squared error of the forces, of their square: {errors[0]:.2f}, after {args.steps} steps {errors[-1]:.3f}")
    return {"first": errors[0], "last": sum(errors[-10:]) / 10}


if __name__ == "__main__":
    main()
