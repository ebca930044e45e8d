"""A pass on JAX arrays as a function that XLA compiles, and what it calls back.

XLA calls back into Python with the buffers of a call (`jax.experimental.buffer_callback`), where the corridor launches
on XLA's stream; results and workspace are XLA's memory, so that nothing is copied, and XLA orders everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from .. import dispatch, rules
from ..call import Arrays, Call
from ..passes import FORWARD, Pass
from ..problem import View, contiguous, mask_kind
from . import numpy_

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:  # JAX before 0.6.1
    raise ImportError(f"JAX is {jax.__version__}; attention on its arrays needs 0.6.1 or later") from error

T = TypeVar("T")


class How(NamedTuple):
    """A call but for its arrays and targets, as a key."""

    of: Pass
    options: tuple[tuple[str, Any], ...]
    family: str | None
    wrt: tuple[str, ...] = ()
    own: bool = True  # whether out and lse, where they are given, are surely what attention makes of the other arrays

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def but(self, of: Pass, wrt: tuple[str, ...] = ()) -> How:
        """Another pass of the same problem."""
        return self._replace(of=of, wrt=wrt)

    def call(self, arrays: Arrays) -> Call:
        """Of NumPy's arrays, unless another adapter is put in its place."""
        return Call(
            numpy_, self.of, arrays, dict(self.options), family=self.family,
            return_lse=self.of is FORWARD, wrt=self.wrt,
        )  # fmt: skip


def _kept(make: Callable[..., T]) -> Callable[..., T]:
    """The same for equal calls: of the last 1024 of them, or of the last 32 with a block mask, whose memory goes with
    it."""
    plain, masked = functools.lru_cache(1024)(make), functools.lru_cache(32)(make)
    return lambda how, *more: (plain if how.option("block_mask") is None else masked)(how, *more)


@_kept
def made(how: How) -> Callable[[Arrays], Any]:
    """The call of arrays: out and lse, or their tangents; gradients, or theirs."""

    def call(arrays: Arrays) -> list[jax.Array]:
        return _called(arrays, how)

    call.__name__ = f"attention_{how.of}"  # in profiles
    return jax.jit(call)


@_kept
def out_of(how: How) -> Callable[[Arrays], Any]:
    """Its first result alone: of rows that see nothing lse is -inf, which JAX takes for a mistake where
    `jax_debug_infs` is set."""
    return jax.jit(lambda arrays: made(how)(arrays)[0])


def results_of(how: How, arrays: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Check a call; what it gives. Of the arrays shapes and dtypes are asked."""
    return _results(how, *_shaped(arrays))


def _shaped(arrays: dict[str, Any]) -> list[tuple[str, tuple[int, ...], Any]]:
    return [(name, tuple(x.shape), x.dtype) for name, x in sorted(arrays.items())]


def _views(how: How, arrays: Sequence[tuple[str, tuple[int, ...], Any]]) -> dict[str, View]:
    mask = mask_kind(how.option("block_mask"))
    where = mask.device if mask else ""
    return {name: View(shape, contiguous(shape), str(dtype), where, "jax") for name, shape, dtype in arrays}


@_kept
def _results(how: How, *arrays: tuple[str, tuple[int, ...], Any]) -> list[jax.ShapeDtypeStruct]:
    views, call = _views(how, arrays), how.call({})
    problem, shapes = rules.state(views, {}, call.options, how.of)
    results = [jax.ShapeDtypeStruct(shape, problem.result_dtype) for shape in shapes.values()]
    if not how.of.of_gradients:
        results.append(jax.ShapeDtypeStruct(rules.lse_shape(len(views["q"].shape), problem), problem.lse_dtype))
    if how.family is not None and not has_gpu():
        dispatch.refuse_family(how.family, "jax")
    return results + [jax.ShapeDtypeStruct(views[name].shape, views[name].dtype) for name in how.wrt]


@_kept
def _callback(how: How, *arrays: tuple[str, tuple[int, ...], Any]) -> Any:
    """What XLA calls back on a GPU. Not made for types alone: what `grad` pushes forward is never run, and a family may
    have no kernels for it."""
    from .jax_gpu import Callback

    return Callback(how.call({}), _views(how, arrays))


def _called(arrays: Arrays, how: How) -> list[jax.Array]:
    """What a call of arrays that are traced gives."""
    arrays = dict(sorted(arrays.items()))  # as they are planned
    mask = mask_kind(how.option("block_mask"))
    results = results_of(how, arrays)

    def on_cpu(*xs: jax.Array) -> Any:  # where there is a GPU, too, this is traced, and a family refused when it runs
        return buffer_callback(functools.partial(_on_cpu, how, tuple(arrays)), results)(*xs)

    def on_gpu(*xs: jax.Array) -> Any:
        callback = _callback(how, *_shaped(arrays))
        scratch = jax.ShapeDtypeStruct((callback.scratch,), "uint8")
        # In a command buffer (CUDA graph) XLA calls back once, and then replays what was launched.
        return buffer_callback(callback, [*results, scratch], command_buffer_compatible=callback.plain)(*xs)[:-1]

    on = {"cpu": on_cpu, "cuda": on_gpu}
    if mask is not None:  # which is on one of them
        del on["cuda" if mask.device == "cpu" else "cpu"]
    inputs = arrays.values()
    return list(jax.lax.platform_dependent(*inputs, **on) if has_gpu() else on_cpu(*inputs))


def refuse_check(check: bool, name: str) -> None:
    """ValueError for a check of a call that is traced, and may run on a GPU."""
    if check and has_gpu():
        raise ValueError(
            f"check is True, or CUPYFLASH_CHECK=1, but the call is traced, where {name} cannot be looked at; check "
            "must be False there"
        )


@functools.cache
def has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="gpu"))
    except RuntimeError:
        return False


def _on_cpu(how: How, names: Sequence[str], ctx: Any, out: Sequence[Any], *inputs: Any) -> None:
    if how.family is not None:
        dispatch.refuse_family(how.family, "jax")
    arrays = {name: np.asarray(x) for name, x in zip(names, inputs)}
    results = dispatch.run(how.call(arrays))
    results = (*results, *(results.of_arrays[name] for name in how.wrt))
    for target, x in zip(out, results):
        np.asarray(target)[...] = x
