"""A model with our attention on two processes: its gradients are those of one."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import together

torch = pytest.importorskip("torch")

from torch import distributed
from torch.utils.checkpoint import checkpoint

import cupyflash.torch

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this PyTorch has no gloo"
)


class Layer(torch.nn.Module):
    """Attention with a learned bias by distance, and learned sinks, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.bias, self.sinks = (torch.nn.Parameter(torch.randn(shape)) for shape in ((4, 12, 12), (4,)))

    def forward(self, x: Any) -> Any:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return x + self.outer(
            cupyflash.torch.attention(q, k, v, causal=True, bias=self.bias, sinks=self.sinks).flatten(-2)
        )


class Model(torch.nn.Module):
    """Two layers, the second of which is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)


def gradients(model: Any, of: Any, batch: Any) -> dict[str, Any]:
    model(batch).square().mean().backward()
    return {name: x.grad for name, x in of.named_parameters()}


def distributed_data_parallel(model: Any, batch: Any) -> dict[str, Any]:
    return gradients(torch.nn.parallel.DistributedDataParallel(model), model, batch)


def fully_sharded(model: Any, batch: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return {name: x.full_tensor() for name, x in gradients(model, model, batch).items()}


def one_process(rank: int, file: str) -> None:
    """What each of two processes does."""
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(6, 12, 32)
    expected = gradients(model, model, batch)
    for how in (distributed_data_parallel, fully_sharded):
        own = copy.deepcopy(model)
        own.zero_grad()
        found = how(own, batch[rank::2])
        assert found.keys() == expected.keys()
        for name, x in found.items():
            torch.testing.assert_close(x, expected[name], msg=lambda m, at=(how, name): f"{at}: {m}")
    Path(f"{file}-{rank}").touch()
    end = time.monotonic() + 60
    while not Path(f"{file}-{1 - rank}").exists() and time.monotonic() < end:  # it may still be receiving
        time.sleep(0.01)
    # Threads of gloo that outlive their group sometimes abort a process that ends in the ordinary way.
    os._exit(0)


@pytest.mark.slow
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Each process has half of the batch, of which DDP and FSDP2 average the gradients."""
    code = "import sys, test_torch_parallel; test_torch_parallel.one_process(int(sys.argv[1]), sys.argv[2])"
    together(code, *((rank, tmp_path / "meeting") for rank in range(2)))
