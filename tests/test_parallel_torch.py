"""A sequence that processes share over gloo: a model's gradients are those of one process."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import together

torch = pytest.importorskip("torch")

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cupyflash
from cupyflash import parallel
from cupyflash.parallel import Rows

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this PyTorch has no gloo"
)
LENGTH, WIDTH = 64, 32


class Layer(torch.nn.Module):
    """Causal attention with learned slopes, sinks and a table by distance, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.slopes, self.sinks, self.table = (
            torch.nn.Parameter(torch.rand(shape)) for shape in ((4,), (4,), (4, 2 * LENGTH - 1))
        )

    def forward(self, x: Any, **how: Any) -> Any:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 8)).unbind(2)
        options = {
            "causal": True, "alibi_slopes": self.slopes, "sinks": self.sinks, "dropout": 0.2, "seed": 3,
            "score": _table, "score_arrays": {"t": self.table},
        }  # fmt: skip
        run = parallel.attention if how else cupyflash.torch.attention
        return x + self.outer(run(q, k, v, **how, **options).flatten(-2))


def _table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, j - i + LENGTH - 1]


class Model(torch.nn.Module):
    """Two layers, the second of which is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Any, **how: Any) -> Any:
        x = self.layers[0](x, **how)
        return checkpoint(self.layers[1], x, use_reentrant=False, **how)


def gradients(model: Any, of: Any, x: Any, total: int, world: int = 1, **how: Any) -> dict[str, Any]:
    """Of a mean over all ranks' tokens, where gradients are averaged over ranks."""
    (model(x, **how).square().sum() * world / total).backward()
    return {name: y.grad for name, y in of.named_parameters()}


def in_a_group(rank: int, size: int, file: str) -> None:
    """What each of the processes does."""
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, LENGTH, WIDTH)
    expected = gradients(model, model, x, x.numel())
    rows = Rows.zigzag(LENGTH, size, multiple=16 if size == 2 else 1)

    def compared(found: dict[str, Any], at: str) -> None:
        for name, y in found.items():
            torch.testing.assert_close(y, expected[name], msg=lambda m, name=name: f"{at} {name}: {m}")

    if size == 2:
        for exchange in ("keys", "heads", None):
            own = copy.deepcopy(model)
            own.zero_grad()
            ddp = torch.nn.parallel.DistributedDataParallel(own)
            how = {"rows": rows, "group": None, "exchange": exchange}
            compared(gradients(ddp, own, rows.take(x, rank), x.numel(), size, **how), f"DDP, {exchange}")
        own = copy.deepcopy(model)
        own.zero_grad()
        compiled = torch.compile(own, backend="eager")
        found = gradients(compiled, own, rows.take(x, rank), x.numel(), rows=rows, group=distributed.group.WORLD)
        for y in found.values():
            distributed.all_reduce(y)
        compared(found, "compiled")
        wrong(rows, x, rank)
        direct(rows, rank, size)
    else:
        # Two halves of the batch, each sequence shared by two; FSDP2 over the four.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "rows"))
        of_rows = Rows.zigzag(LENGTH, 2, multiple=16)
        batch, part = mesh.get_local_rank("batch"), mesh.get_local_rank("rows")
        own = copy.deepcopy(model)
        own.zero_grad()
        for module in (*own.layers, own):
            fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
        halves = [x[:2], x[2:]]
        one = copy.deepcopy(model)
        one.zero_grad()
        for half in halves:  # dropout has the numbers of a batch of two
            (one(half).square().sum() / x.numel()).backward()
        found = gradients(own, own, of_rows.take(halves[batch], part), x.numel(), 4, rows=of_rows, group=mesh["rows"])
        expected = {name: y.grad for name, y in one.named_parameters()}
        compared({name: y.full_tensor() for name, y in found.items()}, "FSDP2")
        rows = Rows.contiguous(LENGTH, 4, multiple=16)  # keys between hosts, heads inside
        both(rows, init_device_mesh("cpu", (2, 2)), rank)
    Path(f"{file}-{rank}").touch()
    end = time.monotonic() + 60
    while not all(Path(f"{file}-{r}").exists() for r in range(size)) and time.monotonic() < end:
        time.sleep(0.01)  # it may still be receiving
    # Threads of gloo that outlive their group sometimes abort a process that ends in the ordinary way.
    os._exit(0)


def both(rows: Rows, mesh: Any, rank: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, LENGTH, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = cupyflash.torch.attention(q, k, v, causal=True)
    out.square().sum().backward()
    own = [rows.take(x.detach(), rank).requires_grad_() for x in (q, k, v)]
    found = parallel.attention(*own, mesh, rows=rows, causal=True)
    torch.testing.assert_close(found, rows.take(out, rank))
    of_one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
    for pair in ((mesh.get_group(1), mesh.get_group(0)), (of_one["heads"], of_one["keys"])):
        torch.testing.assert_close(parallel.attention(*own, pair, rows=rows, causal=True), found, atol=0, rtol=0)
    with pytest.raises(ValueError, match="group holds a mesh of 2 dimensions; it must be that mesh alone"):
        parallel.attention(*own, (mesh, mesh), rows=rows)
    found.square().sum().backward()
    for x, y in zip(own, (q, k, v)):
        torch.testing.assert_close(x.grad, rows.take(y.grad, rank))


def direct(rows: Rows, rank: int, size: int) -> None:
    """Without autograd, in 16 bits, which gloo need not know."""
    torch.manual_seed(2)
    q, k, v, dout = (torch.randn(1, LENGTH, 4, 8).bfloat16() for _ in range(4))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse)
    own = [rows.take(x, rank) for x in (dout, q, k, v)]
    found, norm = parallel.attention(*own[1:], rows=rows, exchange="keys", return_lse=True)
    torch.testing.assert_close(found, rows.take(out, rank))
    of_rank = parallel.attention_backward(*own, found, norm, rows=rows, exchange="keys")
    for x, y in zip(of_rank, grads):
        torch.testing.assert_close(x, rows.take(y, rank), atol=0.02, rtol=0.02)


def wrong(rows: Rows, x: Any, rank: int) -> None:
    q = rows.take(x, rank).unflatten(-1, (4, 8))
    for options, message in (
        ({"scale": 1.0 + rank}, "scale is"),
        ({"window": (-1, 0) if rank else None}, "window's left bound is -1"),
        ({"rows": Rows.contiguous(32, 2)}, "q has 32 rows"),
        ({"exchange": "heads", "block_mask": 3}, "block_mask is a int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            parallel.attention(q, q, q, **{"rows": rows, **options})
    with pytest.raises(NotImplementedError, match="parallel.attention_backward has no derivative"):
        parallel.attention_backward(q, q.clone().requires_grad_(), q, q, q, q[..., 0], rows=rows)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_zigzag_is_the_head_tail_order(size: int) -> None:
    """Of torch.distributed.tensor.experimental.context_parallel, row for row."""
    module = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    if not hasattr(module, "_HeadTailLoadBalancer"):
        pytest.skip("this PyTorch has it elsewhere")
    for length, multiple in ((2 * size * 128, 128), (2 * size * 5, 1)):
        order = module._HeadTailLoadBalancer(length, size, "cpu")._generate_indices().flatten().numpy()
        rows = Rows.zigzag(length, size, multiple=multiple)
        np.testing.assert_array_equal(np.concatenate([rows.positions(r) for r in range(size)]), order)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_over_gloo(tmp_path: Path, size: int) -> None:
    code = "import sys, test_parallel_torch as t; t.in_a_group(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    together(code, *((rank, size, tmp_path / "meeting") for rank in range(size)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_over_simulated_ranks(dtype: str) -> None:
    """As of tensors in one process, gradients of what all ranks share too."""
    torch.manual_seed(0)
    rows, of = Rows.zigzag(96, 3, multiple=16), getattr(torch, dtype)
    q, k, v, dout = (torch.randn(2, 96, 4, 8).to(of).requires_grad_() for _ in range(4))
    slopes = torch.rand(4, requires_grad=True)
    out = cupyflash.torch.attention(q, k, v, causal=True, alibi_slopes=slopes)
    out.backward(dout)

    def work(group: Any) -> Any:
        own = [rows.take(x.detach(), group.rank).requires_grad_() for x in (q, k, v)]
        of_rank = slopes.detach().requires_grad_()
        found = parallel.attention(*own, group, rows=rows, causal=True, alibi_slopes=of_rank)
        found.backward(rows.take(dout.detach(), group.rank))
        return found.detach(), *(x.grad for x in own), of_rank.grad

    found = parallel.simulated(3).run(work)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 0.03, "rtol": 0.03}
    for n, x in enumerate((out.detach(), q.grad, k.grad, v.grad)):
        torch.testing.assert_close(rows.join([y[n] for y in found]), x, **close)
    torch.testing.assert_close(sum(y[4] for y in found), slopes.grad, **close)
    np.testing.assert_equal(found[0][0].shape, rows.take(out, 0).shape)
