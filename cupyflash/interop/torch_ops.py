"""How a call on tensors finds who runs it, where PyTorch follows it.

What is traced (torch.compile, torch.export, fake tensors, dispatch modes) or mapped (vmap) becomes an operator
(`torch_operators`). What is differentiated by torch.func, in forward mode or again is taken apart here
(`torch_levels`), what runs at once under autograd is an autograd function, and what needs no gradient goes straight to
the corridor: all of these cost the host less than the dispatcher.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import dispatch, interop, parts
from ..cached import name_of, of_eight
from ..call import Arrays, Call
from ..gradients import Gradients
from ..passes import BACKWARD, FORWARD, Pass
from ..problem import complete
from ..rules import lasting
from ..scalars import told
from . import torch_derivatives, torch_levels, torch_nested, torch_operators, torch_schema
from .protocol import Recorder


def recorder(call: Call) -> Recorder | None:
    """None where a call may simply run: it is neither traced nor transformed, and autograd and autocast have no part in
    it."""
    arrays, forward = call.arrays, call.of is FORWARD
    q = arrays["q"]
    if followed(q) or _any_dual(arrays.values()) or (forward and _autocast_dtype(q) is not None):
        return run
    if not forward:
        return run if _by_operator(call) or torch.are_deterministic_algorithms_enabled() else None
    return _record if torch.is_grad_enabled() and _any_requires_grad(arrays.values()) else None


def followed(x: torch.Tensor) -> bool:
    """Whether calls on x are traced or transformed, so that it may have no memory."""
    return traced(x) or torch._C._are_functorch_transforms_active()


def recorded(tensors: Collection[torch.Tensor]) -> bool:
    """Whether somebody follows what becomes of one of them: autograd, a compiler, a transform."""
    if followed(next(iter(tensors))) or _any_dual(tensors):
        return True
    return torch.is_grad_enabled() and _any_requires_grad(tensors)


# By names of their own, since each call asks them.
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_scripted = torch._C._is_tracing


def traced(q: torch.Tensor) -> bool:
    """Whether q is followed by a compiler or the like: calls become operators."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _scripted()
        or (_function_modes() > 0 and torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0)  # of make_fx
        or (type(q) is not torch.Tensor and type(q).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
    )


def _any_requires_grad(arrays: Iterable[Any]) -> bool:
    for x in arrays:
        if getattr(x, "requires_grad", False):
            return True
    return False


def _any_dual(arrays: Iterable[Any]) -> bool:
    """Whether forward mode follows one of them. (Where a compiled program has its level, operators ask by
    themselves.)"""
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    return torch_derivatives.any_dual([x for x in arrays if isinstance(x, torch.Tensor)])


_is_batched, _is_legacy_batched = torch_operators.is_batched, torch._C._functorch.is_legacy_batchedtensor


def _by_operator(call: Call) -> bool:
    """Of a pass that takes results: whether it is to be differentiated (again), or mapped by autograd's own vmap
    (is_grads_batched=True)."""
    arrays = call.arrays
    if torch.is_grad_enabled() and not call.targets and _any_requires_grad(arrays.values()):
        return True
    if not call.of.moved:  # then gradients alone may be
        return _is_batched(arrays["dout"]) or ("dlse" in arrays and _is_batched(arrays["dlse"]))
    for x in arrays.values():
        if isinstance(x, torch.Tensor) and _is_legacy_batched(x):
            return True
    return False


def run(call: Call, settled: bool = False) -> Any:
    """As `dispatch.run`, followed by whoever traces, transforms or records. `settled` as `torch_levels.run` has it."""
    if call.arrays["q"].is_nested:
        return torch_nested.run(call, lambda packed: (recorder(packed) or dispatch.run)(packed))
    return (_forward if call.of is FORWARD else _derivative)(call, settled)


def _forward(call: Call, settled: bool) -> Any:
    dtype = _autocast_dtype(call.arrays["q"])
    if dtype is not None:
        call = call.but(arrays=_autocast(call.arrays, dtype))
    return _attend(call, settled)


def _attend(call: Call, settled: bool = False) -> Any:
    """In the dtypes that the arrays have."""
    arrays = call.arrays
    recorded = torch.is_grad_enabled() and _any_requires_grad(arrays.values())
    compiled = traced(arrays["q"])
    if not compiled and not torch._C._are_functorch_transforms_active() and not _any_dual(arrays.values()):
        return (_record if recorded else dispatch.run)(call)
    _check_followed(call, recorded)
    return _followed_by_pytorch(call, compiled, settled)


def check(call: Call) -> None:
    """TypeError, ValueError or NotImplementedError where PyTorch follows a forward that it cannot: for who writes
    before that runs."""
    arrays = call.arrays
    recorded = torch.is_grad_enabled() and _any_requires_grad(arrays.values())
    if followed(arrays["q"]) or _any_dual(arrays.values()):
        _check_followed(call, recorded)
        torch_schema.check_options(call.options)
    elif recorded:
        _check_recorded(call)


def _check_followed(call: Call, recorded: bool) -> None:
    if recorded:
        _check_gradient(call)
    if call.targets:
        raise ValueError(f"out is {_NO_WRITING}")


def _derivative(call: Call, settled: bool = False) -> Any:
    arrays = call.arrays
    q, dout = arrays["q"], arrays.get("dout")
    compiled = traced(q) or (dout is not None and traced(dout))
    transformed = compiled or torch._C._are_functorch_transforms_active()
    if not transformed and not _any_dual(arrays.values()) and not _by_operator(call):
        return torch_operators.at_once(call)
    if call.targets:
        raise ValueError(f"{'grads' if call.of.of_gradients else 'tout'} is {_NO_WRITING}")
    if call.options.get("out_dtype") is not None:
        raise ValueError("out_dtype is given but the call is traced, transformed or differentiated; leave it out")
    foreign = call.of is BACKWARD and not call.own and _moves(compiled, arrays["out"], arrays["lse"])
    if foreign and (compiled or not _is_own(call)):  # what is compiled has no nodes to look at
        return _of_others(call)
    return _followed_by_pytorch(call, compiled, settled)


def _moves(compiled: bool, *results: torch.Tensor) -> bool:
    """Whether gradients of both may be asked for. (One alone: its caller kept them. Tangents are taken as given.)"""
    if torch.is_grad_enabled() and all(x.requires_grad for x in results):
        return True
    transformed = not compiled and torch._C._are_functorch_transforms_active()
    return transformed and all(map(torch_derivatives.moves, results))


def _is_own(call: Call) -> bool:
    """Whether out and lse are seen to be what attention made of the other arrays, by a node of autograd."""
    node: Any = call.arrays["lse"].grad_fn
    made: Any = getattr(node, "call", None)
    if node is not call.arrays["out"].grad_fn or not isinstance(made, Call) or made.seed != call.seed:
        return False
    try:
        known = dict(zip(node.names, node.saved_tensors))
    except RuntimeError:  # freed, or written to
        return False
    given = {name: x for name, x in call.arrays.items() if name not in ("dout", "dlse", "out", "lse")}
    ours, theirs = (lasting(complete(x.options)) for x in (call, made))
    same = all(ours[name] == theirs[name] for name in ours if name not in _OF_NO_VALUE)
    return same and known.keys() == given.keys() and all(_place(known[name]) == _place(x) for name, x in given.items())


_OF_NO_VALUE = ("deterministic", "out_dtype", "sms", "max_seqlen_q", "max_seqlen_k", "batch_invariant")


def _place(x: torch.Tensor) -> Any:
    x = torch_derivatives.innermost(x)
    return x.data_ptr(), x.shape, x.stride()


def _of_others(call: Call) -> Gradients:
    """A backward whose out and lse may be others'."""
    call = call.but(options=complete(call.options))

    def run(of: Pass, arrays: Arrays) -> Any:
        part = call.but(
            of=of, arrays=arrays, return_lse=of is FORWARD, wrt=call.wrt if of is BACKWARD else (), own=True
        )
        return _attend(part) if of is FORWARD else _derivative(part)

    found: Gradients = parts.gradients(torch, run, call.arrays, call.options["layout"])
    return found


def _followed_by_pytorch(call: Call, compiled: bool, settled: bool) -> Any:
    """By an operator, or where its derivatives alone are asked for taken apart."""
    if compiled or not torch_levels.served() or _by_dispatcher(call.arrays):
        return torch_levels.in_form(call, torch_schema.run(call))
    return torch_levels.run(call, interop.adopted(call.lib, call.arrays), run, settled)


def _by_dispatcher(arrays: Arrays) -> bool:
    """Whether PyTorch's dispatcher has to do something before they are read: split an axis off, or negate one."""
    for x in arrays.values():
        if isinstance(x, torch.Tensor) and (x.is_neg() or _is_legacy_batched(x)):
            return True
    return False


_NO_WRITING = (
    "given but the call is traced or transformed (torch.compile, torch.func, fake tensors), where nothing can be "
    "written into; leave it out"
)


def _record(call: Call) -> tuple[Any, Any]:
    """As `dispatch.run`, run at once under autograd."""
    arrays = call.arrays
    _check_recorded(call)
    kept = call.without_arrays()  # for a backward that comes later, and takes what the forward took
    kept.options = lasting(kept.options)
    tensors = [_unwrapped(x) if isinstance(x, torch.Tensor) and _is_dead(x) else x for x in arrays.values()]
    return _both(kept, tuple(arrays), *tensors) if call.return_lse else (_out(kept, tuple(arrays), *tensors), None)


def _check_recorded(call: Call) -> None:
    _check_gradient(call)
    if call.targets:
        raise ValueError(
            "out is given but a gradient is wanted, and autograd cannot follow a write into out; leave it out, or call "
            "under torch.no_grad()"
        )


def _check_gradient(call: Call) -> None:
    """TypeError where a gradient is wanted of what has a forward alone."""
    arrays, latent = call.arrays, call.options["latent"]
    eight = "q" if arrays["q"].dtype in _EIGHT else "k" if getattr(arrays["k"], "dtype", None) in _EIGHT else None
    if eight or "page_table" in arrays or latent is not None:
        what = f"latent is {told(latent)}, of which" if latent is not None else "page_table is given, with which"
        what = f"{eight} has dtype {name_of(arrays[eight])}, of which" if eight else what
        raise TypeError(f"{what} there is a forward alone, but a gradient is wanted; call under torch.no_grad()")


_FLOAT8 = torch.float8_e4m3fn
_EIGHT = frozenset((_FLOAT8, torch.int8))


def _autocast_dtype(q: torch.Tensor) -> torch.dtype | None:
    """That to which inputs are cast; those of 8 bits, which have scales, stay."""
    where = "cuda" if q.is_cuda else "cpu"
    return torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) and q.dtype is not _FLOAT8 else None


def _autocast(arrays: Arrays, dtype: torch.dtype) -> Arrays:
    """As autocast does to PyTorch's own attention: q, k and v in its dtype, float64 left alone. Others may stay
    float32."""

    def cast(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype is torch.float64 or of_eight(x):
            return x
        return (
            x
            if name not in ("q", "k", "v") and (x.dtype is torch.float32 or name not in torch_schema.INPUTS)
            else x.to(dtype)
        )

    return {name: cast(name, x) for name, x in arrays.items()}


class _Attention(torch.autograd.Function):
    """A call at once, with its gradients: of out and of lse, through the call's own backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = dispatch.run(
            call.but(arrays=dict(zip(names, tensors)), return_lse=True, followed=True)
        )
        ctx.call, ctx.names = call, names
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *result)
        return result

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = torch_derivatives.other_than_zero((dout, dlse))
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.names))
        *tensors, out, lse = ctx.saved_tensors
        wanted = zip(ctx.names, ctx.needs_input_grad[2:])
        wrt = tuple([name for name, needed in wanted if needed and name not in ("q", "k", "v")])
        arrays = dict(zip(ctx.names, tensors))
        arrays |= {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        dq, dk, dv = grads = _derivative(ctx.call.but(of=BACKWARD, arrays=arrays, wrt=wrt, own=True))
        found = {"q": dq, "k": dk, "v": dv} | grads.of_arrays
        return None, None, *map(found.get, ctx.names)


class _Out(_Attention):
    """The same where lse is not asked for: a result less for autograd to follow, for 1 us."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Any) -> torch.Tensor:  # type: ignore[override]
        return _Attention.forward(ctx, call, names, *tensors)[0]


# Not through Function.apply, which looks for defaults of arguments and for transforms, for 2 us.
_both, _out = (super(torch.autograd.Function, x).apply for x in (_Attention, _Out))
# What a transform that is over has left wrapped; as Function.apply does.
_unwrapped = torch_derivatives.unwrapped
_is_dead = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]
