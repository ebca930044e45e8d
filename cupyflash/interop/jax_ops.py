"""A call on JAX arrays as an operation of JAX's own: under jit, grad, vmap, scan, remat and shard_map.

XLA calls back into Python with the buffers of a call (`jax.experimental.buffer_callback`), where the corridor launches on XLA's
stream; results and workspace are XLA's memory, so that nothing is copied, and XLA orders everything. What is wrong with a call
is said while it is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import dispatch, folding, interop
from .. import problem as rules
from ..call import Arrays, Call
from ..passes import BACKWARD, FORWARD, Pass
from ..problem import ARRAYS, OPTIONS, Gradients
from .protocol import Library

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:  # JAX before 0.6.1
    raise ImportError(f"JAX is {jax.__version__}; attention on its arrays needs 0.6.1 or later") from error


class How(NamedTuple):
    """A call but for its arrays and targets, as a key."""

    of: Pass
    options: tuple[tuple[str, Any], ...]
    family: str | None
    wrt: tuple[str, ...] = ()

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def call(self, arrays: Arrays) -> Call:
        lib = interop.library("q", arrays["q"])
        return Call(
            lib, self.of, arrays, dict(self.options), family=self.family,
            return_lse=self.of is FORWARD, wrt=self.wrt,
        )  # fmt: skip


def run(call: Call) -> Any:
    """As `dispatch.run`, differentiable."""
    arrays, how = _checked(call)
    if how.of is BACKWARD:
        return _gradients(_run(_made(how), arrays), how.wrt)
    if _traced(arrays):
        return _attention(arrays, how)
    return _made(how)(arrays) if call.return_lse else (_out_of(how)(arrays), None)


def _checked(call: Call) -> tuple[Arrays, How]:
    lib, options = call.lib, call.options
    arrays, _ = interop.adopt(lib, call.arrays, call.targets)
    stated = _stated(options)
    place = None if _traced(arrays) else _place(lib, arrays)
    if call.seed is not None:  # as an array it may be another in each call without compiling anew
        number = np.full(1, call.seed % 2**64, np.uint64)
        arrays = arrays | {"seed": lib.constant(number, arrays["q"])}
    how = How(call.of, stated, call.family, call.wrt)
    if place is not None:
        mask = rules.mask_kind(options["block_mask"])
        if mask is not None and mask.device != place:
            raise ValueError(f"block_mask is on {mask.device} but q is on {place}; make it with like=q")
        if call.family is not None and place == "cpu":
            _refuse(call.family)
        return arrays, how
    alike = _varying(arrays.values(), _axes(arrays.values()))
    return dict(zip(arrays, alike)), how


def _stated(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Every option as the rules take it; those of before are known."""
    if options["block_mask"] is None:
        try:
            return _known(*((name, _kind(x), x) for name, x in options.items()))
        except TypeError:  # a number in an array, which is no key, or nonsense, which is named here
            pass
    return _as_the_rules_have_them(*options.items())


def _as_the_rules_have_them(*options: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    given = dict(options)
    values = {row.name: row.check(given.get(row.name, row.default)) for row in OPTIONS}
    values["block_mask"] = given["block_mask"]
    values["causal"] = values["causal"] or False  # as options have it
    return tuple(values.items())


@functools.lru_cache(1024)
def _known(*options: tuple[str, Any, Any]) -> tuple[tuple[str, Any], ...]:
    return _as_the_rules_have_them(*((name, x) for name, _, x in options))


def _kind(x: Any) -> Any:
    """True and 1 are the same key, but not the same option."""
    return (tuple, *map(type, x)) if type(x) is tuple else type(x)


def _place(lib: Library, arrays: Arrays) -> str:
    """Where arrays are that are not traced; ValueError for one that is elsewhere, or nowhere."""
    if not any(x.is_deleted() for x in arrays.values()):
        devices = arrays["q"].devices()
        together = len(devices) == 1 and all(x.devices() == devices for x in arrays.values())
        if together and (found := cast(Any, lib).named(*devices)):
            return found
    place = interop.view(lib, "q", arrays["q"]).device
    for name, x in arrays.items():
        where = interop.view(lib, name, x).device
        if where != place:
            raise ValueError(f"{name} is on {where} but q is on {place}; all arrays must be on one device")
    return place


def _traced(arrays: Arrays) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays.values())


# ---- derivatives and batches ----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attention(arrays: Arrays, how: How) -> tuple[jax.Array, jax.Array]:
    out, lse = _run(_made(how), arrays)
    return out, lse


def _optional(arrays: Arrays, how: How) -> list[str]:
    """Those that have gradients, in the order of `check_wrt`."""
    score = how.option("score")
    of_score = [x.key for x in (score.arrays if score else ()) if x.kind == "float"]
    return [row.name for row in ARRAYS if row.gradient and row.name in arrays] + of_score


def _keep(arrays: Arrays, how: How) -> tuple[Any, Any]:
    # Keys alone, which JAX sorts: what is kept is a pytree of arrays.
    wanted = {name: () for name in _optional(arrays, how) if arrays[name].perturbed}
    arrays = {name: x.value for name, x in arrays.items()}
    with jax.debug_infs(False) if cast(Any, jax.config).jax_debug_infs else nullcontext():  # as `_out_of`
        out, lse = _attention(arrays, how)
    return (out, lse), (arrays, out, lse, wanted)


def _differentiate(how: How, kept: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
    arrays, out, lse, wanted = kept
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    dout = jax.numpy.zeros_like(out) if dout is None else dout
    wrt = tuple(name for name in _optional(arrays, how) if name in wanted)
    arrays = arrays | {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    grads = _gradients(_run(_made(how._replace(of=BACKWARD, wrt=wrt)), arrays), wrt)
    return ({name: grads.of_call(name) for name in kept[0]},)


_attention.defvjp(_keep, _differentiate, symbolic_zeros=True)  # else what the loss does not depend on comes as zeros


def _gradients(grads: Sequence[Any], wrt: tuple[str, ...]) -> Gradients:
    dq, dk, dv, *others = grads
    return Gradients(dq, dk, dv, dict(zip(wrt, others)))


def _made(how: How) -> Callable[[Arrays], Any]:
    """The same function for equal calls: of the last 1024 of them, or of the last 32 with a block mask, whose memory goes with it."""
    return (_plain if how.option("block_mask") is None else _masked)(how)


def _make(how: How) -> Callable[[Arrays], Any]:
    """The call of arrays; vmap makes its axis a part of the batch. Gradients cannot be differentiated again."""

    @jax.custom_batching.custom_vmap
    def run(arrays: Arrays) -> Any:
        return _called(arrays, how)

    @run.def_vmap
    def of_more(size: int, has: list[Arrays], arrays: Arrays) -> Any:
        def folded(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...] = ()) -> Any:
            return _made(how._replace(options=tuple(options.items()), wrt=wrt))(arrays)

        named = [name for name, x in has[0].items() if x]
        if how.of is FORWARD:
            return folding.forward(jax.numpy, folded, arrays, named, size, dict(how.options)), (True, True)
        grads = folding.backward(jax.numpy, folded, arrays, named, size, dict(how.options), how.wrt)
        return tuple(grads), (True,) * len(grads)

    if how.of is FORWARD:
        return jax.jit(run)

    @jax.custom_jvp
    def once(arrays: Arrays) -> Any:
        return run(arrays)

    @once.defjvp
    def again(primals: Any, tangents: Any) -> Any:
        raise TypeError("the gradients of attention cannot be differentiated again")

    return jax.jit(once)


def _out_of(how: How) -> Callable[[Arrays], Any]:
    """Its first result alone: of rows that see nothing lse is -inf, which JAX takes for a mistake where `jax_debug_infs` is set."""
    return (_plain_out if how.option("block_mask") is None else _masked_out)(how)


def _make_out(how: How) -> Callable[[Arrays], Any]:
    return jax.jit(lambda arrays: _made(how)(arrays)[0])


_plain_out, _masked_out = functools.lru_cache(1024)(_make_out), functools.lru_cache(32)(_make_out)
_plain, _masked = functools.lru_cache(1024)(_make), functools.lru_cache(32)(_make)


# ---- the callback ---------------------------------------------------------------------------------------------------


def _called(arrays: Arrays, how: How) -> tuple[jax.Array, ...]:
    """What the call gives of arrays that may be traced: out and lse; of a backward, gradients."""
    family, mask = how.family, rules.mask_kind(how.option("block_mask"))
    call = how.call(arrays)
    views = {name: call.lib.view(x)._replace(device=mask.device if mask else "") for name, x in arrays.items()}
    problem, shapes = rules.state(views, {}, call.options, how.of)
    results = [jax.ShapeDtypeStruct(shape, problem.result_dtype) for shape in shapes.values()]
    if call.return_lse:
        results.append(jax.ShapeDtypeStruct(rules.lse_shape(len(arrays["q"].shape), problem), problem.lse_dtype))
    results += [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in how.wrt]
    names = tuple(arrays)

    has_gpu = _has_gpu()
    if family is not None and not has_gpu:
        _refuse(family)

    def on_cpu(*xs: jax.Array) -> Any:  # where there is a GPU, too, this is traced, and a family refused when it runs
        return buffer_callback(functools.partial(_on_cpu, how, names), results)(*xs)

    def on_gpu(*xs: jax.Array) -> Any:
        from .jax_gpu import Callback

        call = Callback(how.call({"q": arrays["q"]}), views)
        scratch = jax.ShapeDtypeStruct((call.scratch,), "uint8")
        # In a command buffer (CUDA graph) XLA calls back once, and then replays what was launched.
        return buffer_callback(call, [*results, scratch], command_buffer_compatible=call.plain)(*xs)[:-1]

    first, *others = arrays.values()
    inputs = [_in_this_process.bind(first), *others]
    on = {"cpu": on_cpu, "cuda": on_gpu}
    if mask is not None:  # which is on one of them
        del on["cuda" if mask.device == "cpu" else "cpu"]
    found = jax.lax.platform_dependent(*inputs, **on) if has_gpu else on_cpu(*inputs)
    return tuple(found)


def _lowered(ctx: Any, x: Any) -> list[Any]:
    if getattr(ctx.module_context.lowering_parameters, "for_export", False):
        raise NotImplementedError(
            "attention is a callback into this process, and jax.export cannot write that down: export a function that calls "
            "jax.nn.dot_product_attention in its place"
        )
    return [x]


# The identity, which is there to be asked where it is compiled for.
_in_this_process = Primitive("cupyflash_in_this_process")
_in_this_process.def_impl(lambda x: x)
_in_this_process.def_abstract_eval(lambda x: x)
mlir.register_lowering(_in_this_process, _lowered)


def _run(call: Callable[[Arrays], Any], arrays: Arrays) -> list[jax.Array]:
    return _varying(call(arrays), _axes(jax.tree.leaves(arrays)))


def _axes(arrays: Iterable[Any]) -> frozenset[str]:
    """The axes of a mesh along which any of the arrays may differ, inside shard_map."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        kind: Any = jax.typeof(x)
        axes |= kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", axes)
    return axes


def _varying(arrays: Iterable[Any], axes: frozenset[str]) -> list[Any]:
    """The arrays as such that may differ along these axes; where they do not, their gradients are summed over them."""
    missing = [(x, tuple(axes - _axes([x]))) for x in arrays]
    return [_cast(x, more) if more else x for x, more in missing]


def _cast(x: jax.Array, axes: tuple[str, ...]) -> Any:
    lax: Any = jax.lax
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)  # its name before


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="gpu"))
    except RuntimeError:
        return False


def _refuse(family: str) -> None:
    from ..cpu.corridor import refuse_family

    refuse_family(family, "jax")


def _on_cpu(how: How, names: Sequence[str], ctx: Any, out: Sequence[Any], *inputs: Any) -> None:
    if how.family is not None:
        _refuse(how.family)
    results = dispatch.run(how.call({name: np.asarray(x) for name, x in zip(names, inputs)}))
    results = (*results, *(results.of_arrays[name] for name in how.wrt))
    for target, x in zip(out, results):
        np.asarray(target)[...] = x
