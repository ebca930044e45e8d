"""Hugging Face diffusers: `use(model)`, and its attention computes with these kernels."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from ..torch.sdpa import scaled_dot_product_attention

M = TypeVar("M")

_ASKED = "scaled_dot_product_attention"


def use(model: M) -> M:
    """Let a model of diffusers (UNet, transformer, autoencoder) compute attention with these kernels. Returns the
    model.

    Every attention processor that asks for torch.nn.functional.scaled_dot_product_attention, or for diffusers' choice
    among its backends, becomes a copy of itself, as `processor` makes it; so does every module that asks by itself.
    Projections, norms, rotations and adapters stay. `model.set_attn_processor` takes others as ever.

    Warns of the processors that compute otherwise (linear attention, AttnProcessor, sliced ones, those of xFormers):
    they stay as they are. TypeError or ValueError where nothing is left.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be a model of diffusers, such as pipeline.unet or "
            "pipeline.transformer"
        )
    others, served = Counter[str](), 0
    modules = list(model.modules())
    held = {id(x) for module in modules if (x := getattr(module, "processor", None)) is not None}
    for module in modules:
        own = getattr(module, "processor", None)
        if callable(own):
            if (ours := _copied(own)) is None:
                others[type(own).__name__] += 1
            else:
                module.processor = ours
                served += 1
        if id(module) not in held and (kind := _ours(type(module))) is not None:
            module.__class__ = kind
            served += 1
    left = ", ".join(f"{name} ({n})" for name, n in others.items())
    if not served and not left:
        raise TypeError(
            f"model is a {type(model).__name__}, in which nothing calls {_CALLED}; it must be a model of diffusers, "
            "such as pipeline.unet or pipeline.transformer"
        )
    if not served:
        raise ValueError(f"model is a {type(model).__name__} whose attention is computed by {left}; {_MUST}")
    if left:
        warnings.warn(f"in {type(model).__name__} {left} stay as they are: they do not call {_CALLED}", stacklevel=2)
    return model


_CALLED = "torch.nn.functional.scaled_dot_product_attention"
_MUST = (
    f"it must be computed by processors that call {_CALLED}: call model.set_attn_processor(AttnProcessor2_0()) before "
    "use(model)"
)


def processor(of: Any) -> Any:
    """A copy of an attention processor whose torch.nn.functional.scaled_dot_product_attention is ours.

    ValueError where the processor does not call that: AttnProcessor, sliced ones, those of xFormers, linear attention.
    """
    if (own := _copied(of)) is None:
        raise ValueError(
            f"the processor is a {type(of).__name__}; it must be one that calls {_CALLED}, such as AttnProcessor2_0"
        )
    return own


def _copied(of: Any) -> Any:
    """The same; None where it does not call that."""
    kind = _ours(type(of))
    if kind is None or kind is type(of):
        return kind and of
    own = copy.copy(of)
    own.__class__ = kind
    return own


class _Ours:
    """What classes have become that use our attention."""


_made: dict[type, type | None] = {}


def _ours(kind: type) -> type | None:
    """The class with our attention in its methods; None where none of them asks for any."""
    if issubclass(kind, _Ours):
        return kind
    if kind in _made:
        return _made[kind]
    methods: dict[str, Any] = {}
    for name in {name for base in kind.__mro__ if not base.__module__.startswith("torch.") for name in vars(base)}:
        method = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if made := _asking_ours(method):
            methods[name] = made
    made_of = (kind.__name__, (_Ours, kind), {**methods, "__module__": kind.__module__})
    return _made.setdefault(kind, type(*made_of) if methods else None)


def _asking_ours(function: Any, depth: int = 0) -> types.FunctionType | None:
    """The function among other globals: where it, or a function of its module that it calls, asks for attention, it
    gets ours. None where it asks for none.

    Not a TorchFunctionMode around the call: torch.compile breaks its graph there, and every operator pays for it.
    """
    if depth > 3 or not isinstance(function, types.FunctionType):
        return None
    known, names = function.__globals__, _names(function.__code__)
    changed: dict[str, Any] = {}
    if _ASKED in names:
        used = {name: known[name] for name in names & known.keys() if isinstance(known[name], types.ModuleType)}
        nearest = next((m for m in _modules() if any(m is x for x in used.values())), None)
        changed |= {name: _modules()[x] for name, x in used.items() if x is nearest}
    for name in names & known.keys():
        x = known[name]
        if name == "dispatch_attention_fn":
            changed[name] = _dispatched
        elif x is torch.nn.functional.scaled_dot_product_attention:
            changed[name] = scaled_dot_product_attention
        elif getattr(x, "__module__", None) == function.__module__ and (asking := _asking_ours(x, depth + 1)):
            changed[name] = asking
    if not changed:
        return None
    own = {name: x for name, x in {**known, **changed}.items() if name != "__name__"}  # dynamo imports what is so named
    made = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    for name in ("__kwdefaults__", "__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(function, name))
    made.__dict__.update(function.__dict__)
    return made


def _names(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _modules() -> dict[Any, types.ModuleType]:
    """PyTorch's modules by which the function is called, the nearest first, and what they are with ours in it."""
    functional = _but(torch.nn.functional, scaled_dot_product_attention=scaled_dot_product_attention)
    nn = _but(torch.nn, functional=functional)
    return {torch.nn.functional: functional, torch.nn: nn, torch: _but(torch, nn=nn)}


def _but(module: types.ModuleType, **changed: Any) -> types.ModuleType:
    made = types.ModuleType(module.__name__)
    vars(made).update({**vars(module), **changed})
    return made


def _dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: Mapping[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> torch.Tensor:
    """diffusers' dispatch_attention_fn, (batch, sequence, heads, dim), with ours in the place of every backend."""
    if parallel_config is not None:
        raise NotImplementedError(
            "parallel_config is given; parts of a sequence on several GPUs are not served: "
            "leave out model.enable_parallelism() or use(model)"
        )
    if (attention_kwargs or {}).get("return_lse"):
        raise NotImplementedError("return_lse is True; with use(model) it must be left out")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # of keys
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.transpose(1, 2)
