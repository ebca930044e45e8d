"""What the tests of the array libraries share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import pytest
import reference
from backends import Backend, apart
from criterion import assert_as_good
from reference import Standard, state
from semantics import (
    CONTIGUOUS,
    Blocks,
    Inputs,
    Judge,
    Lay,
    arrays_of_rank,
    as_arguments,
    as_caller_has_it,
    as_given,
    as_reference_has_it,
)

import cupyflash
from cupyflash.call import Call
from cupyflash.cpu import corridor
from cupyflash.passes import BACKWARD

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": "top_left", "window": (20, None), "scale": 0.3},
    "keys": {"key_mask": True, "window": (40, 9)},
}


SCORES = ("mask", "bias", "alibi_slopes", "sinks")  # optional arrays, to be given with a soft cap


def split(name: str) -> tuple[bool, dict[str, Any]]:
    """An entry of OPTIONS as (whether keys are masked, the rest)."""
    options = dict(OPTIONS[name])
    return options.pop("key_mask", False), options


def references(inputs: Inputs, **options: Any) -> tuple[Standard, Standard]:
    """Exact results, and those of standard attention in the inputs' own precision."""
    problem = state(inputs.q, inputs.k, inputs.v, inputs.key_mask, **options, **inputs.given)
    args = (problem, inputs.q, inputs.k, inputs.v, inputs.key_mask, inputs.dout, inputs.dlse)
    return reference.references(*args, **inputs.given)


def judge(results: dict[str, np.ndarray], exact: Standard, own: Standard) -> None:
    for name, x in results.items():
        assert_as_good(x, getattr(exact, name), getattr(own, name), name, exact.unit(name))


def asked_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Of each backward that runs on a CPU from now on, the optional arrays whose gradients it is asked for."""
    asked = []
    run = corridor.run

    def seen(call: Call) -> Any:
        if call.of is BACKWARD:
            asked.append(call.wrt)
        return run(call)

    monkeypatch.setattr(corridor, "run", seen)
    return asked


def sleep(stream: Any, cycles: int = 200_000_000) -> None:
    """Keep a CuPy stream busy for about a tenth of a second, so that work that does not wait for it comes too early."""
    import cupy

    code = 'extern "C" __global__ void sleep(long long n) { long long t = clock64(); while (clock64() - t < n); }'
    with stream:
        cupy.RawKernel(code, "sleep")((1,), (1,), (np.int64(cycles),))


# ---- any problem through PyTorch or JAX -----------------------------------------------------------------------------


# Formats that NumPy knows by no name: as which PyTorch takes their bits, and what it calls them.
BITS = {
    np.dtype(ml_dtypes.bfloat16): ("int16", "bfloat16"),
    np.dtype(ml_dtypes.float8_e4m3fn): ("int8", "float8_e4m3fn"),
}


class Library(Protocol):
    """Arrays of one library on one device."""

    def session(self) -> AbstractContextManager[None]:
        """In which everything else happens."""

    def put(self, x: np.ndarray, lay: Lay) -> Any: ...

    def get(self, x: Any) -> np.ndarray: ...

    def get_all(self, arrays: list[Any]) -> list[np.ndarray]:
        """As `get` each, but the GPU is waited for once."""

    def recorded(self, arrays: list[Any], dout: Any, dlse: Any, options: dict[str, Any], traced: bool) -> list[Any]:
        """out, lse and the gradients of q, k and v, by the library's own differentiation; `traced`: by transforms."""

    def pulled(self, function: Callable[..., Any], arrays: list[Any], dout: Any) -> list[Any]:
        """out of a function of q, k and v, and their gradients."""


@functools.cache
def framework(name: str, on_gpu: bool) -> Framework | None:
    """PyTorch ("torch") or JAX ("jax") on a device; None where it is not there."""
    try:
        if name == "torch":
            return Framework(Torch("cuda" if on_gpu else "cpu"))
        return Framework(Jax("gpu" if on_gpu else "cpu"))
    except (ImportError, RuntimeError, AssertionError):  # the last: PyTorch without CUDA
        return None


class Framework:
    """Runs problems as `semantics.check` does, through a library that has autograd."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def check(
        self, inputs: Inputs, *, rank: int, layout: str, lay: Lay | dict[str, Lay], deterministic: bool,
        family: str | None, recorded: bool, through: Callable[..., Any] | None = None,
        traced: bool = False, blocks: Blocks | None = None, large_scores: bool = False, thorough: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """`recorded`: gradients by autograd, not by attention_backward; `traced`: under jax.jit, or by torch.func.

        `through`: by this function of (B, S, H, D) arrays, which gives out alone and is differentiated.
        """
        judge = Judge(inputs, options, backward=True, large_scores=large_scores, blocks=blocks, thorough=thorough)
        if through is not None:
            self._by_another_name(judge, inputs, through)
            return

        def put(x: np.ndarray, name: str) -> Any:
            return self.library.put(x, lay.get(name, CONTIGUOUS) if isinstance(lay, dict) else lay)

        with self.library.session():
            q, k, v, dout = (
                put(as_caller_has_it(x, rank, layout), name) for x, name in zip(inputs, ("q", "k", "v", "dout"))
            )
            if family is not None:
                family = Backend(family, family).family_for(judge.problem)
            options |= {"layout": layout, "family": family, "deterministic": deterministic}
            arrays = arrays_of_rank(inputs, rank)
            options |= as_arguments(
                {name: as_given(name, x, lambda x, name=name: put(x, name)) for name, x in arrays.items()}
            )
            if blocks is not None:
                options["block_mask"] = blocks.mask(like=q)
            dlse = None if inputs.dlse is None else put(inputs.dlse[(0,) * (4 - rank)], "dlse")
            if recorded:
                out, lse, *grads = self.library.recorded([q, k, v], dout, dlse, options, traced)
            else:
                out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
                grads = list(cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))
            judge.reckon()  # while a GPU computes
            lse, *others = self.library.get_all([lse, out, *grads[:3]])
            judge("lse", lse)
            for name, x in zip(("out", "dq", "dk", "dv"), others):
                judge(name, as_reference_has_it(x, rank, layout))

    def _by_another_name(self, judge: Judge, inputs: Inputs, through: Callable[..., Any]) -> None:
        with self.library.session():
            q, k, v, dout = (self.library.put(x, CONTIGUOUS) for x in inputs[:4])
            given = {name: self.library.put(x, CONTIGUOUS) for name, x in inputs.given.items()}
            found = self.library.pulled(lambda *x: through(*x, **given), [q, k, v], dout)
            for name, x in zip(("out", "dq", "dk", "dv"), self.library.get_all(found)):
                judge(name, x)


class Torch:
    def __init__(self, device: str) -> None:
        import torch

        torch.zeros(1, device=device)  # RuntimeError where it is not there
        self.torch, self.device = torch, device

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, x: np.ndarray, lay: Lay) -> Any:
        base = view = np.array(x, order="C")
        if x.ndim == 4:
            base = np.full(lay.around(x.shape), np.nan, x.dtype)
            view = lay.view(base)
            view[...] = x
            if min(view.strides) < 0:  # PyTorch has no such
                base = view = np.array(x, order="C")
        bits, dtype = BITS.get(base.dtype, (base.dtype, None))
        tensor = self.torch.from_numpy(base.view(bits)).to(self.device, non_blocking=True)
        tensor = tensor.view(getattr(self.torch, dtype)) if dtype else tensor
        start = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
        return tensor.as_strided(view.shape, [s // base.itemsize for s in view.strides], start)

    def get(self, x: Any) -> np.ndarray:
        return self.get_all([x])[0]

    def get_all(self, arrays: list[Any]) -> list[np.ndarray]:
        named = {dtype: x for x, (_, dtype) in BITS.items()}
        names = [str(x.dtype).removeprefix("torch.") for x in arrays]
        flat = [x.detach().contiguous().view(-1).view(self.torch.uint8) for x in arrays]
        host = self.torch.cat(flat).cpu().numpy()
        return apart(host, [(tuple(x.shape), named.get(name, name)) for x, name in zip(arrays, names)])

    def pulled(self, function: Callable[..., Any], arrays: list[Any], dout: Any) -> list[Any]:
        leaves = [x.requires_grad_() for x in arrays]
        out = function(*leaves)
        return [out, *self.torch.autograd.grad(out, leaves, dout)]

    def recorded(self, arrays: list[Any], dout: Any, dlse: Any, options: dict[str, Any], traced: bool) -> list[Any]:
        if traced:
            results, pull = self.torch.func.vjp(lambda *x: cupyflash.attention(*x, return_lse=True, **options), *arrays)
            return [*results, *pull((dout, self.torch.zeros_like(results[1]) if dlse is None else dlse))]
        leaves = [x.requires_grad_() for x in arrays]
        out, lse = cupyflash.attention(*leaves, return_lse=True, **options)
        results, back = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
        return [out, lse, *self.torch.autograd.grad(results, leaves, back)]


class Jax:
    def __init__(self, platform: str) -> None:
        import jax

        self.jax, self.device = jax, jax.devices(platform)[0]  # RuntimeError where it is not there

    @contextmanager
    def session(self) -> Iterator[None]:
        before = self.jax.config.jax_enable_x64
        self.jax.config.update("jax_enable_x64", True)
        try:
            yield
        finally:
            self.jax.config.update("jax_enable_x64", before)

    def put(self, x: np.ndarray, lay: Lay) -> Any:
        there = self.jax.device_put(x, self.device)  # its arrays lie in one way
        assert there.dtype == x.dtype, f"outside a session JAX takes 32 bits of {x.dtype}"
        return there

    def get(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def get_all(self, arrays: list[Any]) -> list[np.ndarray]:
        return self.jax.device_get(arrays)

    def pulled(self, function: Callable[..., Any], arrays: list[Any], dout: Any) -> list[Any]:
        out, pull = self.jax.vjp(function, *arrays)
        return [out, *pull(dout)]

    def recorded(self, arrays: list[Any], dout: Any, dlse: Any, options: dict[str, Any], traced: bool) -> list[Any]:
        from cupyflash.jax import attention

        def run(arrays: list[Any], dout: Any, dlse: Any) -> list[Any]:
            (out, lse), pull = self.jax.vjp(lambda *x: attention(*x, return_lse=True, **options), *arrays)
            return [out, lse, *pull((dout, self.jax.numpy.zeros_like(lse) if dlse is None else dlse))]

        return (self.jax.jit(run) if traced else run)(arrays, dout, dlse)
