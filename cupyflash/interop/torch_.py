"""PyTorch tensors."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nested._internal.nested_tensor import NestedTensor

from ..problem import View, contiguous
from . import torch_append, torch_derivatives, torch_nested, torch_ops, torch_schema

kind = "torch"
_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_OF_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
_BITS = {_OF_NUMPY[torch.bfloat16]: np.int16, _OF_NUMPY[torch.float8_e4m3fn]: np.int8}  # torch takes these alone
WITHOUT_MEMORY = (FakeTensor, FunctionalTensor)


def objection(cls: type) -> str | None:
    if not issubclass(cls, torch.Tensor):
        return "it must be a tensor"
    plain = cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain and not issubclass(cls, (*WITHOUT_MEMORY, NestedTensor)):
        return "it must be a plain tensor"
    return None


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def view(x: torch.Tensor) -> View:
    if x.is_nested:
        raise TypeError(f"is {torch_nested.REFUSED}")
    if torch_ops.followed(x):
        return torch_schema.view(x)
    if x.layout is not torch.strided:
        raise TypeError(f"has layout {x.layout}; it must be strided (dense)")
    if x.is_neg():
        raise ValueError("is a view that torch has yet to negate; pass its resolve_neg()")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"is on {x.device}; it must be on cpu or cuda")
    where = f"cuda:{x.get_device()}" if x.is_cuda else "cpu"
    return View(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), where, kind, x.data_ptr())


def memory(x: torch.Tensor) -> View:
    """Of what lies beneath x where transforms hide its address: under vmap it has all entries. 0 for an address where
    there is no memory."""
    x = torch_derivatives.innermost(x)
    return torch_schema.view(x)._replace(ptr=0 if traced(x) else x.data_ptr())


def signature(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg())


pointer = torch.Tensor.data_ptr
device = torch.Tensor.get_device


if hasattr(torch._C, "_cuda_getCurrentRawStream"):  # the public call costs microseconds for the object around it
    stream = torch._C._cuda_getCurrentRawStream
else:

    def stream(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


def empty(shape: tuple[int, ...], dtype: str, device: int) -> torch.Tensor:
    make, strides = _maker(shape, dtype, device)
    return make(shape, strides)


@functools.lru_cache(1024)
def _maker(shape: tuple[int, ...], dtype: str, device: int) -> tuple[Any, tuple[int, ...]]:
    """Of a tensor without elements: it costs 0.7 us less than torch.empty, which reads dtype and device from its
    arguments."""
    return torch.empty(0, dtype=_DTYPES[dtype], device=device).new_empty_strided, contiguous(shape)


recorder = torch_ops.recorder
recorded = torch_ops.recorded
check = torch_ops.check
traced = torch_ops.traced
append = torch_append.append
inlined, followed = torch.compiler.is_dynamo_compiling, torch_ops.followed
wrapped, mapped = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_batchedtensor


def check_target(name: str, x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, and autograd cannot follow a write into it; leave it out, pass its detach(), or "
            "call under torch.no_grad()"
        )


def written(x: torch.Tensor) -> None:
    if not x.is_inference():  # autograd never looks at those
        torch.autograd.graph.increment_version(x)


def wrap(name: str, x: Any) -> torch.Tensor:
    raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor, as q is")


class _Memory(ctypes.Array[ctypes.c_char]):
    """All memory from a tensor on, as NumPy takes it. `numpy()` would forbid its storage to be resized ever after,
    which FSDP does."""

    _type_, _length_ = ctypes.c_char, sys.maxsize
    owner: torch.Tensor


def to_numpy(x: torch.Tensor) -> np.ndarray:
    if not x.is_cpu:
        raise ValueError(f"a tensor is on {x.device}; it must be on the CPU")
    dtype = _OF_NUMPY.get(x.dtype)
    if dtype is None:
        dtype = _OF_NUMPY[x.dtype] = np.dtype(str(x.dtype).removeprefix("torch."))
    size, at = dtype.itemsize, x.data_ptr()
    if not at:
        if x.numel():
            raise TypeError(f"a {type(x).__name__} has no memory")
        return np.empty(x.shape, dtype)
    memory = _Memory.from_address(at)
    memory.owner = x
    strides = [stride * size for stride in x.stride()]
    return np.ndarray(x.shape, dtype, memory, 0, strides)  # type: ignore[arg-type]  # a buffer


def from_numpy(a: np.ndarray) -> torch.Tensor:
    bits = _BITS.get(a.dtype)
    return torch.from_numpy(a) if bits is None else torch.from_numpy(a.view(bits)).view(_DTYPES[a.dtype.name])
