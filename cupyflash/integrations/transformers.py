"""Hugging Face transformers: `register()`, then `attn_implementation="cupy"` where a model is made or loaded."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from .. import api
from ..torch.dropout import dropout_options


def register(name: str = "cupy") -> None:
    """Make `name` an attention implementation of transformers, with the masks that "sdpa" gets.

    The name may not hold "flash": transformers takes every such name for a build of the package flash-attn (ValueError).

    For models of every kind that choose their attention: causal and bidirectional, with soft caps (Gemma 2), sinks (gpt-oss),
    position biases (T5), windows, padded batches, and any cache. Those that do not (Bloom, XGLM, MPT) raise ValueError when
    they run. Probabilities (output_attentions) are never in memory: None.
    """
    if "flash" in name:
        raise ValueError(
            f"name is {name!r}; it must not hold 'flash', which transformers takes for the package flash-attn"
        )
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
        kind: Any = type(config)
        if _computes_itself(kind):
            raise ValueError(
                f"attn_implementation is {name!r}, but the models of {kind.__name__} compute attention themselves, and would "
                "misread these masks; it must be 'eager'"
            )
        return sdpa_mask(*args, config=config, **kwargs)

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)


@functools.cache
def _computes_itself(config: type) -> bool:
    """Whether the models of a configuration never ask for the attention that was chosen, and do not say that they do."""
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    models = [x for x in vars(module).values() if isinstance(x, type) and getattr(x, "config_class", None) is config]
    flags = ("_supports_sdpa", "_supports_attention_backend")
    return bool(models) and not any(getattr(x, flag, False) for x in models for flag in flags)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query (B, Hq, S, D), key and value (B, Hk, T, D) -> (B, S, Hq, D), None.

    attention_mask: booleans, True where a key may be attended, or numbers added to the scores, (B, 1 or Hq, S, T). Without one
    a causal module hides keys after the query, counted from the start of both (a prefill into a static cache).
    """
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "bias": position_bias}
    options |= dropout_options("dropout", dropout, query)
    if attention_mask is None:
        wanted = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["causal"] = "top_left" if wanted and query.shape[2] > 1 else False
    elif attention_mask.dtype is torch.bool:
        options["mask"] = attention_mask
    else:
        options["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    out = api.attention(query, key, value, layout="bhsd", **options)
    return out.transpose(1, 2).contiguous(), None
