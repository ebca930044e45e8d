"""PyTorch on a GPU: streams, graphs, tensors elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import judge, references
from semantics import draw_inputs

torch = pytest.importorskip("torch")

import test_torch
from test_torch import get, leaves, put

from cupyflash.torch import attention

one_thread = test_torch.one_thread


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_work_goes_to_torchs_current_stream(dtype: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype)
    late = [put(x, "cuda") for x in inputs[:4]]
    warm = [x.clone().requires_grad_() for x in late[:3]]
    attention(*warm).backward(late[3])  # compiled: what follows is queued while the stream sleeps
    arrays = [torch.full_like(x, torch.nan) for x in late]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for x, source in zip(arrays, late):
            x.copy_(source)
        q, k, v = (x.requires_grad_() for x in arrays[:3])
        out, lse = attention(q, k, v, return_lse=True)
        out.backward(arrays[3])
        results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        judge({name: get(x) for name, x in results.items()}, *references(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_in_a_cuda_graph(dtype: str, rng: np.random.Generator) -> None:
    """Forward and backward captured once, replayed on new data in the same memory."""
    first, second = (draw_inputs(rng, dtype) for _ in range(2))
    q, k, v = leaves(first, "cuda")
    dout = put(first.dout, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compile and fill the allocators outside the capture
        torch.autograd.grad(attention(q, k, v), (q, k, v), dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(q, k, v, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    for inputs in (second, first):
        with torch.no_grad():
            for x, source in zip((q, k, v, dout), inputs):
                x.copy_(put(source))
            for x in (out, lse, dq, dk, dv):
                x.fill_(torch.nan)
        graph.replay()
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        judge({name: get(x) for name, x in results.items()}, *references(inputs))


@pytest.mark.gpu
def test_a_cpu_tensor_among_gpu_tensors() -> None:
    a, g = torch.ones(3, 4), torch.ones(3, 4, device="cuda")
    with pytest.raises(ValueError, match="k is on cpu but q is on cuda:0; all arrays must be on one device"):
        attention(g, a, g)
    with pytest.raises(ValueError, match="key_mask is on cpu but q is on cuda:0"):
        attention(g, g, g, key_mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="v is on cuda:0 but q is on cpu"):
        attention(a, a, g)
    with pytest.raises(ValueError, match="out is on cpu but q is on cuda:0"):
        attention(g, g, g, out=a)


@pytest.mark.gpu
def test_the_negative_bit_is_not_overlooked_on_a_gpu() -> None:
    x = torch.ones(3, 4, device="cuda")
    attention(x, x, x)  # the same but for the bit: prepared now
    with pytest.raises(ValueError, match=r"q is a view that torch has yet to negate; pass its resolve_neg\(\)"):
        attention(torch._neg_view(x), x, x)
