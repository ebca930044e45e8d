"""Attention over several ranks that PyTorch's autograd follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from ..interop.torch_ import wrapped
from ..interop.torch_derivatives import any_dual
from ..interop.torch_operators import is_batched
from ..interop.torch_ops import _autocast, _autocast_dtype, recorded
from . import calls
from .arrays import packed
from .asked import PLAN


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, *, return_lse: bool = False, **options: Any
) -> Any:
    """`calls.attention`, which autograd follows.

    Gradients of bias, alibi_slopes, sinks and score_arrays are this rank's part of them, as those of other weights that
    all ranks share are: what sums gradients over the group (DDP, FSDP) sums them. (DDP divides by the number of ranks:
    a loss is a mean over all ranks' tokens.)
    """
    if torch.compiler.is_compiling():
        return _uncompiled(q, k, v, group, return_lse=return_lse, **options)
    if _may_be_transformed():
        _refuse_transformed("attention", {"q": q, "k": k, "v": v} | _arrays_of(options), group)
    if not (reads := dict(options.get("score_arrays") or {})):
        options.pop("score_arrays", None)
    named = [name for name in _FOLLOWED if options.get(name) is not None]
    if isinstance(q, torch.Tensor) and (dtype := _autocast_dtype(q)) is not None:
        q, k, v = _autocast({"q": q, "k": k, "v": v}, dtype).values()
        options |= _autocast({name: options[name] for name in named}, dtype)
    tensors = [q, k, v, *[options[name] for name in named], *reads.values()]
    # (Of what is neither True nor False all ranks are told.)
    with_lse = True if return_lse is False else return_lse
    with _as_they_are(q):
        if recorded([x for x in tensors if isinstance(x, torch.Tensor)]):
            given = {name: x for name, x in options.items() if name not in (*named, "score_arrays")}
            out, lse = _Attention.apply(_How(group, with_lse, given, named, tuple(reads)), *tensors)
        else:
            out, lse = calls.attention(q, k, v, group, return_lse=with_lse, **options)
    return (out, lse) if return_lse else out


def _as_they_are(q: Any) -> Any:
    """A context in which autocast casts nothing: what it casts has been."""
    if not isinstance(q, torch.Tensor) or not torch.is_autocast_enabled(kind := q.device.type):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


_uncompiled = torch.compiler.disable(attention)


_FOLLOWED = ("bias", "alibi_slopes", "sinks")


class _How:
    """What is asked, but for the tensors that autograd follows."""

    def __init__(
        self, ranks: Any, return_lse: Any, options: dict[str, Any], named: Sequence[str], reads: Sequence[str]
    ) -> None:
        self.ranks, self.return_lse, self.options, self.named, self.reads = ranks, return_lse, options, named, reads

    def given(self, tensors: Sequence[Any]) -> dict[str, Any]:
        reads = dict(zip(self.reads, tensors[len(self.named) :]))
        return self.options | dict(zip(self.named, tensors)) | ({"score_arrays": reads} if reads else {})


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, q: Any, k: Any, v: Any, *tensors: Any) -> Any:
        given = how.given([x.detach() for x in tensors])
        plan = {name: given.pop(name, None) for name in PLAN}
        out, lse = calls.forward(
            q.detach(), k.detach(), v.detach(), how.ranks, plan, given, how.return_lse, followed=True
        )
        ctx.how = how
        # As they were given: gradients that are differentiated again must lead to them, to be refused there.
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        saved = ctx.saved_tensors
        if _may_be_transformed() or is_batched(dout) or is_batched(dlse):
            _refuse_transformed("attention", {"the gradient of out": dout, "the gradient of lse": dlse}, ctx.how.ranks)
        with torch.no_grad(), _as_they_are(saved[0]):
            grads = _Attention._gradients(ctx, dout, dlse, *saved)
        if not torch.is_grad_enabled():
            return grads
        # create_graph=True
        followed = [x for x in (dout, dlse, *saved) if x is not None and x.requires_grad]
        found = iter(_Once.apply([x for x in grads if x is not None], *followed))
        return tuple(None if x is None else next(found) for x in grads)

    @staticmethod
    def _gradients(ctx: Any, dout: Any, dlse: Any, *saved: Any) -> tuple[Any, ...]:
        q, k, v, out, lse, *tensors = (x.detach() for x in saved)
        how, names = ctx.how, (*ctx.how.named, *ctx.how.reads)
        needs = ctx.needs_input_grad[1:]
        wanted = [name for name, need in zip(names, needs[3:]) if need]
        dout = torch.zeros_like(out) if dout is None else dout
        arrays = (dout, q, k, v, out, lse)
        # All ranks say the same of dlse, or the call would differ between them.
        dlse = torch.zeros_like(lse) if dlse is None else packed(dlse)
        grads = calls.attention_backward(*arrays, how.ranks, dlse=dlse, wrt=wanted, **how.given(tensors))
        of_reads = grads.dscore_arrays
        more = [
            (of_reads[name] if name in of_reads else getattr(grads, f"d{name}")) if name in wanted else None
            for name in names
        ]
        return None, *(x if need else None for x, need in zip(grads, needs)), *more


class _Once(torch.autograd.Function):
    """Gradients as they are, of which there is no derivative. They hang on all that they follow from, so that whoever
    asks for a derivative of them, of whatever input, comes by here."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Any], *followed: Any) -> tuple[Any, ...]:
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            "a gradient of parallel.attention is differentiated, and it has no second derivative; take those of "
            "cupyflash.attention, on one device"
        )


_OPERANDS = ("dout", "q", "k", "v", "out", "lse")


def attention_backward(*arrays: Any, dlse: Any = None, **given: Any) -> Any:
    """`calls.attention_backward`, which autograd does not follow."""
    operands = dict(zip(_OPERANDS, arrays), dlse=dlse)
    if _may_be_transformed() or is_batched(arrays[0]) or is_batched(dlse):
        _refuse_transformed("attention_backward", operands | _arrays_of(given), arrays[6])
    _refuse_followed("attention_backward", operands, arrays[6])
    if _any_requires_grad(given.values()) or given.get("score_arrays"):
        with torch.no_grad():  # (4 us)
            return calls.attention_backward(*arrays, dlse=dlse, **given)
    return calls.attention_backward(*arrays, dlse=dlse, **given)


def merge(out: Any, lse: Any, group: Any, **given: Any) -> tuple[Any, Any]:
    """`calls.merge`, which autograd does not follow."""
    if _may_be_transformed() or is_batched(out) or is_batched(lse):
        _refuse_transformed("merge", {"out": out, "lse": lse}, group)
    _refuse_followed("merge", {"out": out, "lse": lse}, group)
    with torch.no_grad():
        return calls.merge(out, lse, group, **given)


def _refuse_followed(function: str, arrays: Mapping[str, Any], group: Any) -> None:
    if torch.is_grad_enabled() and _any_requires_grad(arrays.values()):
        name = next(name for name, x in arrays.items() if getattr(x, "requires_grad", False))
        text = f"{name} requires grad, but parallel.{function} has no derivative; it must not"
        calls.refused(function, group, NotImplementedError(f"{text}: detach it, or call under torch.no_grad()"))


def _any_requires_grad(xs: Iterable[Any]) -> bool:
    return True in [getattr(x, "requires_grad", False) for x in xs]


def _may_be_transformed() -> bool:
    """Whether forward mode or a transform of torch.func is there at all; every call asks."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _arrays_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The optional arrays by the names that messages have for them."""
    reads = options.get("score_arrays")
    of_score = reads if isinstance(reads, Mapping) else {}  # else named by `check`
    return {**options, **{f"score_arrays[{name!r}]": x for name, x in of_score.items()}}


def _refuse_transformed(function: str, arrays: Mapping[str, Any], group: Any) -> None:
    """NotImplementedError, on all ranks, where forward mode, torch.func or autograd's own vmap follows a tensor: its
    tangent would be lost, or it has no memory that could be sent."""
    tensors = {name: x for name, x in arrays.items() if isinstance(x, torch.Tensor)}
    if (level := peek_interpreter_stack()) is not None:
        # All tensors that are made at such a level belong to it, whatever was given.
        name = [*(name for name, x in tensors.items() if wrapped(x)), *arrays][0]
        what = f"is given inside {_TRANSFORMS.get(level.key(), 'a transform of torch.func')}"
        must = "must be given outside of it"
    elif (found := next((name for name, x in tensors.items() if is_batched(x)), None)) is not None:
        name, what, must = found, "is mapped by autograd (is_grads_batched=True)", "must be given one at a time"
    elif (found := next((name for name, x in tensors.items() if any_dual((x,))), None)) is not None:
        name, what, must = found, "has a tangent of forward mode", "must have none"
    else:
        return
    has = "has no derivative and is not mapped"
    if function == "attention":
        has = "has its gradient alone, by .backward() or torch.autograd.grad, and is not mapped"
    error = NotImplementedError(
        f"{name} {what}, but parallel.{function} {has}; it {must}, or the call be cupyflash.{function}, on one device"
    )
    with temporarily_clear_interpreter_stack():  # else what tells the other ranks would be transformed
        calls.refused(function, group, error)


_TRANSFORMS = {
    TransformType.Grad: "torch.func.grad (or vjp, jacrev)",
    TransformType.Jvp: "torch.func.jvp (or jacfwd)",
    TransformType.Vmap: "torch.func.vmap",
}
