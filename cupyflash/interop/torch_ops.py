"""How a call on tensors finds who runs it, where PyTorch follows it.

What is traced (torch.compile, torch.export, fake tensors, dispatch modes) becomes an operator (`torch_operators`), what is
transformed (torch.func) an autograd function of the form that transforms ask for. What runs at once under autograd is an
autograd function, and what needs no gradient goes straight to the corridor: both cost the host less than the dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import dispatch, folding
from ..call import Arrays, Call
from ..passes import BACKWARD, FORWARD
from ..problem import FLOAT8, Gradients, lasting
from . import torch_operators
from .protocol import Recorder


def recorder(call: Call) -> Recorder | None:
    """None where a call may simply run: it is neither traced nor transformed, and autograd and autocast have no part in it."""
    arrays, forward = call.arrays, call.of is FORWARD
    q = arrays["q"]
    if followed(q) or torch_operators.any_dual(arrays.values()) or (forward and _autocast_dtype(q) is not None):
        return run
    if not forward:
        return run if _any_batched(arrays) or torch.are_deterministic_algorithms_enabled() else None
    return _record if torch.is_grad_enabled() and _any_requires_grad(arrays) else None


def followed(x: torch.Tensor) -> bool:
    """Whether calls on x are traced or transformed, so that it may have no memory."""
    return _traced(x) or torch._C._are_functorch_transforms_active()


# By names of their own, since each call asks them.
_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_scripted = torch._C._is_tracing


def _traced(q: torch.Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or _scripted()
        or (_function_modes() > 0 and torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0)  # of make_fx
        or (type(q) is not torch.Tensor and type(q).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
    )


def _any_requires_grad(arrays: Arrays) -> bool:
    for x in arrays.values():
        if getattr(x, "requires_grad", False):
            return True
    return False


_is_batched = torch_operators.is_batched


def _any_batched(arrays: Arrays) -> bool:
    """Whether autograd's own vmap (is_grads_batched=True) maps what a backward gets."""
    return _is_batched(arrays["dout"]) or ("dlse" in arrays and _is_batched(arrays["dlse"]))


def run(call: Call) -> Any:
    """As `dispatch.run`, followed by whoever traces, transforms or records."""
    return _forward(call) if call.of is FORWARD else _backward(call)


def _forward(call: Call) -> Any:
    dtype = _autocast_dtype(call.arrays["q"])
    if dtype is not None:
        call = call.but(arrays=_autocast(call.arrays, dtype))
    arrays = call.arrays
    recorded = torch.is_grad_enabled() and _any_requires_grad(arrays)
    traced = _traced(arrays["q"])
    transformed = torch._C._are_functorch_transforms_active()
    if not traced and not transformed:
        # (In forward mode there is no derivative, which an autograd function says.)
        return (_record if recorded or torch_operators.any_dual(arrays.values()) else dispatch.run)(call)
    _check_float8(arrays["q"], recorded)
    if call.targets:
        raise ValueError(f"out is {_NO_WRITING}")
    if not traced:
        return _Transformed.apply(_lasting(call), tuple(arrays), *arrays.values())
    return torch_operators.attention(call)


def _lasting(call: Call) -> Call:
    """A call for a backward that comes later: it takes what the forward took."""
    kept = call.without_arrays()
    kept.options = lasting(kept.options)
    return kept


def _record(call: Call) -> tuple[Any, Any]:
    """As `dispatch.run`, run at once under autograd."""
    arrays = call.arrays
    _check_float8(arrays["q"], True)
    if call.targets:
        raise ValueError(
            "out is given but a gradient is wanted, and autograd cannot follow a write into out; leave it out, or call "
            "under torch.no_grad()"
        )
    kept = _lasting(call)
    tensors = map(_unwrapped, arrays.values())
    return _both(kept, tuple(arrays), *tensors) if call.return_lse else (_out(kept, tuple(arrays), *tensors), None)


def _check_float8(q: torch.Tensor, recorded: bool) -> None:
    if recorded and q.dtype is _FLOAT8:
        raise TypeError(
            f"q has dtype {FLOAT8}, of which there is a forward alone, but a gradient is wanted; call under torch.no_grad()"
        )


def _backward(call: Call) -> Gradients:
    arrays, wrt = call.arrays, call.wrt
    traced = _traced(arrays["q"]) or _traced(arrays["dout"]) or _any_batched(arrays)
    if not traced and not torch._C._are_functorch_transforms_active() and not torch_operators.any_dual(arrays.values()):
        return torch_operators.gradients(call)
    if call.targets:
        raise ValueError(f"grads is {_NO_WRITING}")
    if traced:
        grads = torch_operators.attention_backward(call)
    else:
        grads = _AttentionBackward.apply(call.without_arrays(), tuple(arrays), *arrays.values())
    dq, dk, dv, *others = grads
    return Gradients(dq, dk, dv, dict(zip(wrt, others)))


_NO_WRITING = (
    "given but the call is traced or transformed (torch.compile, torch.func, fake tensors), where nothing can be written into; "
    "leave it out"
)


_FLOAT8 = torch.float8_e4m3fn


def _autocast_dtype(q: torch.Tensor) -> torch.dtype | None:
    """That to which inputs are cast; those of 8 bits, which have scales, stay."""
    where = "cuda" if q.is_cuda else "cpu"
    return torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) and q.dtype is not _FLOAT8 else None


def _autocast(arrays: Arrays, dtype: torch.dtype) -> Arrays:
    """As autocast does to PyTorch's own attention: q, k and v in its dtype, float64 left alone. Others may stay float32."""

    def cast(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
            return x
        return (
            x
            if name not in ("q", "k", "v") and (x.dtype is torch.float32 or name not in torch_operators.INPUTS)
            else x.to(dtype)
        )

    return {name: cast(name, x) for name, x in arrays.items()}


class _Attention(torch.autograd.Function):
    """A call at once, with its gradients: of out and of lse, through the call's own backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = dispatch.run(call.but(arrays=dict(zip(names, tensors)), return_lse=True))
        _Transformed.setup_context(ctx, (call, names, *tensors), result)
        return result

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(torch_operators.ONCE)
        return _Transformed.backward(ctx, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(torch_operators.FORWARD_MODE)


class _Out(_Attention):
    """The same where lse is not asked for: a result less for autograd to follow, for 1 us."""

    @staticmethod
    def forward(ctx: Any, call: Call, names: tuple[str, ...], *tensors: Any) -> torch.Tensor:  # type: ignore[override]
        return _Attention.forward(ctx, call, names, *tensors)[0]


# Not through Function.apply, which looks for defaults of arguments and for transforms, for 2 us.
_both, _out = (super(torch.autograd.Function, x).apply for x in (_Attention, _Out))


def _unwrapped(x: Any) -> Any:
    """What a transform that is over has left wrapped; as Function.apply does."""
    return torch._C._functorch.unwrap_if_dead(x) if isinstance(x, torch.Tensor) else x


class _Transformed(torch.autograd.Function):
    """The same in the form that torch.func asks for, which costs the host 11 us more."""

    @staticmethod
    def forward(call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return dispatch.run(call.but(arrays=dict(zip(names, tensors)), return_lse=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.call, ctx.names, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.names))
        # A pullback of torch.func.vjp is called when its transform is over: what it kept is wrapped for nothing.
        *tensors, out, lse = map(_unwrapped, ctx.saved_tensors)
        wanted = zip(ctx.names, ctx.needs_input_grad[2:])
        wrt = tuple([name for name, needed in wanted if needed and name not in ("q", "k", "v")])
        arrays = dict(zip(ctx.names, tensors))
        arrays |= {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        grads = _backward(ctx.call.but(of=BACKWARD, arrays=arrays, wrt=wrt))
        return None, None, *map(grads.of_call, ctx.names)

    jvp = _Attention.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[Any, Any]:
        def run(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, Any]:
            return _Transformed.apply(call.but(options=options), tuple(arrays), *arrays.values())

        arrays, has = torch_operators.in_front(names, tensors, in_dims[2:])
        return folding.forward(torch, run, arrays, has, info.batch_size, call.options), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    """Its gradients under torch.func, which transforms these too."""

    @staticmethod
    def forward(call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
        grads = torch_operators.gradients(call.but(arrays=dict(zip(names, tensors))))
        return (*grads, *(grads.of_arrays[name] for name in call.wrt))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(torch_operators.ONCE)

    jvp = _Attention.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, names: tuple[str, ...], *tensors: Any) -> tuple[Any, Any]:
        def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...]) -> Any:
            return _AttentionBackward.apply(call.but(options=options, wrt=wrt), tuple(arrays), *arrays.values())

        arrays, has = torch_operators.in_front(names, tensors, in_dims[2:])
        grads = folding.backward(torch, run, arrays, has, info.batch_size, call.options, call.wrt)
        return tuple(grads), (0,) * len(grads)
