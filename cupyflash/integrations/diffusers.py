"""Hugging Face diffusers: `use(model)`, and its attention processors compute with these kernels."""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..torch.sdpa import scaled_dot_product_attention

M = TypeVar("M")


def use(model: M) -> M:
    """Let a model of diffusers (UNet, transformer, autoencoder) compute attention with these kernels. Returns the
    model.

    Each of its attention processors becomes a copy of itself, as `processor` makes it: projections, norms, rotations
    and adapters stay. `model.set_attn_processor` takes others as ever.
    """
    processors = getattr(model, "attn_processors", None)
    if processors is None:
        raise TypeError(
            f"model is a {type(model).__name__}; it must be a model of diffusers that has attn_processors, such as "
            "pipeline.unet or pipeline.transformer"
        )
    model.set_attn_processor({name: processor(x) for name, x in processors.items()})  # type: ignore[attr-defined]
    return model


def processor(of: Any) -> Any:
    """A copy of an attention processor whose torch.nn.functional.scaled_dot_product_attention is ours.

    ValueError, when it runs, where the processor does not call that (AttnProcessor, sliced ones, those of xFormers).
    """
    if isinstance(of, _Ours):
        return of
    own = copy.copy(of)
    kind: Any = type(of)
    own.__class__ = _ours(kind)
    return own


class _Ours:
    """What processors have become that use our attention."""


@functools.cache
def _ours(kind: type) -> type:
    called: Any = kind.__call__

    @functools.wraps(called)  # diffusers looks at its parameters
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Attend() as mode:
            result = called(self, *args, **kwargs)
        if not mode.asked:
            raise ValueError(
                f"the processor {kind.__name__} does not call torch.nn.functional.scaled_dot_product_attention; it "
                "must be one that does, such as AttnProcessor2_0: call model.set_attn_processor(AttnProcessor2_0()) "
                "before use(model)"
            )
        return result

    return type(kind.__name__, (_Ours, kind), {"__call__": call, "__module__": kind.__module__})


class _Attend(TorchFunctionMode):
    """Where PyTorch's attention is ours."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.asked = True
            func = scaled_dot_product_attention
        return func(*args, **(kwargs or {}))
