"""A one-step generator trained with MeanFlow (Geng et al. 2025): a jvp through a small transformer in every step.

    python examples/meanflow.py [--steps N] [--device cpu|cuda]

On a CPU take one thread of PyTorch (OMP_NUM_THREADS=1): at operations this small threads mostly wait for each other.

u(z, r, t) is the mean velocity from r to t. As it is v - (t - r) du/dt, the target needs du/dt along (v, 0, 1): a jvp.
Samples are circles of points, each made of noise in one step.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash.torch import attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.of_times = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        shift, scale, shift_mlp, scale_mlp = self.of_times(times)[:, None].chunk(4, -1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(2))
        return x + self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


class Net(nn.Module):
    def __init__(self, dim: int, tokens: int, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(dim, width), nn.Linear(width, dim)
        self.where = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.times = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        x, times = self.inward(z) + self.where, self.times(torch.stack([t, t - r], -1))
        for block in self.blocks:
            x = block(x, times)
        return self.outward(x)


def loss_of(net: Net, x: Tensor) -> Tensor:
    e = torch.randn_like(x)
    t, r = torch.rand(2, len(x), device=x.device).sort(0, descending=True).values
    r = torch.where(torch.rand_like(r) < 0.75, t, r)
    z, v = torch.lerp(x, e, t[:, None, None]), e - x
    u, du = torch.func.jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    return (u - (v - (t - r)[:, None, None] * du).detach()).square().mean()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE.png", help="draw samples beside the noise (needs matplotlib)")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    angle = torch.arange(16, device=args.device) / 16 * 2 * torch.pi
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    net = Net(2, 16).to(args.device)
    adam, losses = torch.optim.Adam(net.parameters(), 2e-3), []
    for step in range(args.steps):
        loss = loss_of(net, circle * (0.5 + torch.rand(128, 1, 1, device=args.device)))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: {losses[-1]:.2f}", flush=True)
    with torch.no_grad():
        z = torch.randn(256, 16, 2, device=args.device)
        sample = z - net(z, torch.zeros(256, device=args.device), torch.ones(256, device=args.device))
    noise, spread = (x.norm(dim=-1).std(1).mean().item() for x in (z, sample))
    print(f"loss {losses[0]:.2f}, after {args.steps} steps {losses[-1]:.2f}")
    print(f"radii of a sample differ by {spread:.2f} (of the noise: {noise:.2f})")
    if args.plot:
        plot(args.plot, {"noise": z[:6].cpu(), "one step later": sample[:6].cpu()}, losses)
    return {"first": losses[0], "last": sum(losses[-10:]) / 10, "noise": noise, "sample": spread}


def plot(path: str, points: dict[str, Tensor], losses: list[float]) -> None:
    """Each sample's 16 points in a colour of its own, and the loss by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    *pairs, last = figure.subplots(1, len(points) + 1)
    for axes, (name, samples) in zip(pairs, points.items()):
        for sample in samples.numpy():
            axes.plot(*sample.T, "o", markersize=4)
        axes.set(title=name, aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
    last.plot(losses, color="#0b4f8a")
    last.set(title="loss", xlabel="step", yscale="log")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
