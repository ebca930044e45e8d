"""DTensors whose batch or heads two processes share: results and gradients are those of one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import together

torch = pytest.importorskip("torch")

from torch import distributed

import cupyflash
from cupyflash.torch import scaled_dot_product_attention

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this PyTorch has no gloo"
)
AXES = {"bshd": {"batch": 0, "head": 2}, "bhsd": {"batch": 0, "head": 1}}


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(layout: str, heads_k: int = 2, heads_q: int = 4) -> list[Any]:
    shapes = ((3, 5, heads_q, 8), (3, 7, heads_k, 8), (3, 7, heads_k, 6))
    found = [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]
    return found if layout == "bshd" else [x.transpose(1, 2).contiguous() for x in found]


def optional(heads: int = 4) -> dict[str, Any]:
    return {
        "bias": numbers(3, heads, 5, 7, seed=4), "sinks": numbers(heads, seed=5),
        "alibi_slopes": numbers(heads, seed=6).abs(), "key_mask": numbers(3, 7, seed=7) > -1,
    }  # fmt: skip


def agree(mesh: Any, layout: str, axis: str | None, heads_k: int, arrays: dict[str, Any]) -> None:
    """A call of DTensors, and its gradients, beside the same of the whole tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    at = AXES[layout].get(axis or "")
    of_arrays = {"batch": {"bias": 0, "key_mask": 0}, "head": {"bias": 1, "sinks": 0, "alibi_slopes": 0}}
    axes = dict.fromkeys("qkv", at) | of_arrays.get(axis or "", {})
    if axis == "head" and heads_k == 1:
        axes |= {"k": None, "v": None}
    given = dict(zip("qkv", operands(layout, heads_k))) | arrays

    def shared(name: str, x: Any) -> Any:
        axis = None if name == "bias" and x.dim() == 2 else axes.get(name)
        return distribute_tensor(x, mesh, [Replicate() if axis is None else Shard(axis)])

    def results(of: dict[str, Any]) -> list[Any]:
        leaves = {name: x.requires_grad_(x.is_floating_point()) for name, x in of.items()}
        out, lse = cupyflash.attention(**leaves, causal=True, layout=layout, return_lse=True)
        (out.square().sum() + lse.sin().sum()).backward()
        return [out, lse, *(x.grad for x in leaves.values() if x.requires_grad)]

    expected = results({name: x.clone() for name, x in given.items()})
    found = results({name: shared(name, x) for name, x in given.items()})
    if at is not None:
        assert found[0].to_local().shape[at] < found[0].shape[at]
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        where = f"{layout}, {axis}, {heads_k} key heads, result {n} of {[*given]}"
        torch.testing.assert_close(x.full_tensor(), y, msg=lambda m, where=where: f"{where}: {m}")


def refused(mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    q, k, v = operands("bshd")

    def call(places: str, **options: Any) -> Any:
        how = {"b": Shard(0), "s": Shard(1), "h": Shard(2), "r": Replicate()}
        given = [x if at == "-" else distribute_tensor(x, mesh, [how[at]]) for at, x in zip(places, (q, k, v))]
        return cupyflash.attention(*given, **options)

    for places, options, message in (
        ("hrh", {}, r"k is a DTensor with the placements .*Replicate.*must be \(Shard\(dim=2\),\)"),
        ("sss", {}, r"q is a DTensor with the placement S.*cupyflash\.parallel"),
        ("h-h", {}, "^k is a Tensor, but q is a DTensor; it must be one"),
        ("-hh", {}, "^k is a DTensor array but q is a torch array"),
        ("hhh", {"sinks": numbers(4)}, "^sinks is a Tensor, but q is a DTensor"),
        ("hhh", {"dropout": 0.5, "seed": 1}, "^dropout is given, which goes with no DTensors; call with what to_local"),
        ("hhh", {"score": lambda s, b, h, i, j: s + h}, "^q is a DTensor, which attention alone takes"),
        ("bbb", {"block_mask": cupyflash.block_mask(cupyflash.masks.causal(), shape=(5, 7))}, "^block_mask is given"),
        ("bbb", {"cu_seqlens_q": distribute_tensor(torch.tensor([0, 5]), mesh)}, "^cu_seqlens_q is given"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            call(places, **options)
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"q is a DTensor with the placement P"):
        cupyflash.attention(type(whole[0]).from_local(q, mesh, [Partial()]), *whole[1:])
    with pytest.raises(TypeError, match="^q is a DTensor, which attention alone takes"):
        cupyflash.attention_backward(whole[0], *whole, whole[0], whole[0])
    q, k, v = (distribute_tensor(x, mesh, [Shard(2)]) for x in operands("bshd", heads_k=3, heads_q=6))
    with pytest.raises(ValueError, match="k has 3 heads, which 2 ranks share; each must have as many"):
        cupyflash.attention(q, k, v)


def one_process(rank: int, file: str) -> None:
    """What each of two processes does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for layout in AXES:
        for axis in ("batch", "head", None):
            for heads_k in (2, 1, 4):
                agree(mesh, layout, axis, heads_k, optional() if heads_k == 2 else {})
        agree(mesh, layout, "head", 2, {"bias": numbers(5, 7, seed=8)})
    q, k, v = operands("bhsd", heads_k=4)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True)
    shared = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for call in (scaled_dot_product_attention, compiled):
        torch.testing.assert_close(call(*shared, is_causal=True).full_tensor(), theirs)
    refused(mesh)
    Path(f"{file}-{rank}").touch()
    end = time.monotonic() + 60
    while not Path(f"{file}-{1 - rank}").exists() and time.monotonic() < end:  # it may still be receiving
        time.sleep(0.01)
    os._exit(0)  # threads of gloo that outlive their group sometimes abort a process


def test_batch_and_heads_may_be_shared_out(tmp_path: Path) -> None:
    code = "import sys, test_torch_shards; test_torch_shards.one_process(int(sys.argv[1]), sys.argv[2])"
    together(code, *((rank, tmp_path / "meeting") for rank in range(2)))
