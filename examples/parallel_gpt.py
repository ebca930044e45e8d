"""A small GPT whose sequences are shared by processes: rows in zigzag, FSDP2, and the loss curve of one process.

    python examples/parallel_gpt.py                      # one process
    torchrun --nproc-per-node 2 examples/parallel_gpt.py  # two, over gloo: the same losses

Each process holds half of the rows of every sequence. It learns to repeat a text of random bytes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

try:
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch") from None

from cupyflash import parallel
from cupyflash.torch import attention


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        run = parallel.attention if how else attention
        x = x + self.out(run(q, k, v, causal=True, **how).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.after(x))))


class Gpt(nn.Module):
    def __init__(self, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x, how)
        return self.head(self.last(x))


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 20), ("length", 256), ("width", 64), ("heads", 4), ("layers", 2), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(argv)

    world, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    if world > 1:
        distributed.init_process_group("gloo")
    rows = parallel.Rows.zigzag(asked.length, world, multiple=16)
    how: dict[str, Any] = {"rows": rows} if world > 1 else {}

    torch.manual_seed(0)
    model = Gpt(asked.length, asked.width, asked.heads, asked.layers)
    if world > 1:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    period = torch.randint(256, (asked.batch, 32))
    text = period.repeat(1, -(-(asked.length + 1) // 32))[:, : asked.length + 1]
    tokens, labels = (rows.take(x, rank) for x in (text[:, :-1], text[:, 1:]))
    positions = torch.from_numpy(rows.positions(rank))

    losses = []
    for step in range(asked.steps):
        scores = model(tokens, positions, how)
        total = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / (asked.batch * asked.length)  # of all ranks' tokens
        optimizer.zero_grad()
        (loss * world).backward()  # FSDP averages gradients over ranks
        optimizer.step()
        loss = loss.detach()
        if world > 1:
            distributed.all_reduce(loss)
        losses.append(loss.item())
        if rank == 0 and (step % 5 == 0 or step == asked.steps - 1):
            print(f"step {step:4d}  loss {losses[-1]:.5f}  {world} process{'es' * (world > 1)}")
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
