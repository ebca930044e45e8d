"""Hugging Face transformers: `register()`, then `attn_implementation="cupy"` where a model is made or loaded."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from types import ModuleType
from typing import Any

import torch

from .. import api
from ..torch.dropout import dropout_options
from ..weights import attention_weights
from .transformers_arguments import HARMLESS

_names: set[str] = set()


def register(name: str = "cupy") -> None:
    """Make `name` an attention implementation of transformers: with the masks that "sdpa" gets, or, where the name
    holds "flash", with lengths and pages, as transformers uses flash-attn: `register("cupyflash2")`.

    Names with "flash" serve continuous batching (`generate_batch`; its decoding with block tables where a 2 or 3 stands
    behind "flash"), packed training (position_ids that start anew) and padded batches, whose padding is left out;
    others serve what lengths do not say, such as position biases and masks for each pair.

    For models of every kind that choose their attention: causal and bidirectional, with soft caps (Gemma 2), sinks
    (gpt-oss), position biases (T5), windows, padded batches, and any cache. ValueError where a model is made or
    chooses, if it computes attention by itself (Bloom, XLNet, Falcon) or does not say what these masks leave out
    (NLLB-MoE); where it runs, if it gives its attention an argument that is not understood. With
    output_attentions=True `attention_weights` makes the probabilities, those before dropout (None where the name holds
    "flash"). ImportError where a name holds "flash" and transformers has no place to answer for it, ValueError for a
    name that it has already ("sdpa").
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface

    functions: Any = attention_forward, attention_mask
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it must be a string, such as 'cupy'")
    if "flash" in name:
        from . import transformers_flash as flash

        flash.answer(name)
        functions = flash.attention_forward, flash.attention_mask
    elif not name or any(name in x and not _is_ours(x[name]) for x in (AttentionInterface(), AttentionMaskInterface())):
        raise ValueError(f"name is {name!r}; it must be a name that transformers does not have yet, such as 'cupy'")
    AttentionInterface.register(name, functions[0])
    AttentionMaskInterface.register(name, functions[1])
    if not _names:
        _check_classes_of(PreTrainedModel)
    _names.add(name)


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(__package__ or "cupyflash")


def _check_classes_of(base: Any) -> None:
    """Let all models ask `_check` when our attention is chosen; transformers has no place to register that."""
    chosen, choose = base.get_correct_attn_implementation, base.set_attn_implementation

    @functools.wraps(chosen)
    def get_correct_attn_implementation(self: Any, requested_attention: Any, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in _names:
            _check(type(self), requested_attention)
        return chosen(self, requested_attention, *args, **kwargs)

    @functools.wraps(choose)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(attn_implementation, str) and attn_implementation in _names:
            for model in self.modules():  # transformers leaves out, with a warning, what has no choice
                if isinstance(model, base):
                    _check(type(model), attn_implementation)
        return choose(self, attn_implementation, *args, **kwargs)

    base.get_correct_attn_implementation = get_correct_attn_implementation
    base.set_attn_implementation = set_attn_implementation
    if (adjust := getattr(base, "_check_and_adjust_attn_implementation", None)) is None:
        return

    @functools.wraps(adjust)
    def check_and_adjust(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """Without what models of sinks do, which have a list of all names with "flash" that they take."""
        if attn_implementation in _names and "flash" in attn_implementation:
            from . import transformers_flash as flash

            found = self.get_correct_attn_implementation(attn_implementation)
            flash.answer(found)  # loaded before torch.compile reads the model
            return found
        return adjust(self, attn_implementation, *args, **kwargs)

    base._check_and_adjust_attn_implementation = check_and_adjust


def _check(model: Any, name: str) -> None:
    """ValueError unless a class of models lets its attention be chosen, and says what `name` has to know."""
    source = sys.modules.get(model.__module__)
    if source is None:
        return
    if _computes_itself(source):
        raise _refused(f"{model.__name__} computes attention by itself")
    if "flash" in name:
        from .transformers_flash import refused

        if not model._supports_flash_attn:
            raise refused(f"{model.__name__} has _supports_flash_attn = False")
        return
    if hasattr(source, "ALL_ATTENTION_FUNCTIONS") and not (model._supports_sdpa or model._supports_attention_backend):
        raise _refused(
            f"{model.__name__} has _supports_sdpa = _supports_attention_backend = False: its layers need not say what "
            "is causal"
        )


def _refused(why: str) -> ValueError:
    return ValueError(f"{why}; its attn_implementation must be 'eager'")


@functools.cache
def _computes_itself(source: ModuleType) -> bool:
    """Whether a module has layers of attention, some of which do not ask what was chosen."""
    if any("ATTENTION_CLASSES" in name and "eager" in x for name, x in vars(source).items() if isinstance(x, dict)):
        return True
    if hasattr(source, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any(issubclass(x, torch.nn.Module) and "Attention" in x.__name__ for x in _classes(source))


def _classes(source: ModuleType) -> list[type]:
    """What a module defines, and does not import."""
    return [x for x in vars(source).values() if isinstance(x, type) and x.__module__ == source.__name__]


@functools.cache
def _reads_masks_as_eager(source: ModuleType) -> bool:
    """Whether no model of a module takes the masks of "sdpa", or only under that name."""
    if not any(getattr(x, "_supports_sdpa", False) for x in _classes(source)):
        return True
    try:
        return '_attn_implementation == "sdpa"' in inspect.getsource(source)
    except OSError:
        return True


@torch.compiler.assume_constant_result  # what it asks cannot be traced
def _mask_for(config: type) -> str | None:
    """The implementation whose masks the models of a configuration expect; None where they compute attention by
    themselves."""
    source = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if source is None:
        return "sdpa"
    if _computes_itself(source):
        return None
    return "eager" if _reads_masks_as_eager(source) else "sdpa"


def attention_mask(*args: Any, config: Any = None, **kwargs: Any) -> Any:
    """The mask that "sdpa" gets: booleans, or None where nothing is hidden or where causality is all, of as many
    queries as keys.

    The one that "eager" gets, numbers and never None for causality, for models that know no other.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    expected = _mask_for(type(config))
    if expected is None:
        raise _refused(f"the model of {type(config).__name__} computes attention by itself")
    if expected == "eager":
        return eager_mask(*args, config=config, **kwargs)
    if kwargs.get("q_length") not in (1, kwargs.get("kv_length")):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, config=config, **kwargs)


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
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What transformers calls: query (B, Hq, S, D), key and value (B, Hk, T, D) -> (B, S, Hq, D), and None or, where
    output_attentions is asked for, the probabilities, (B, Hq, S, T).

    attention_mask: booleans, True where a key may be attended, or numbers added to the scores, (B, 1 or Hq, S, T). It
    holds the window. Without one a causal module (is_causal, or its attribute) hides keys after the query; it must have
    as many queries as keys, or a single query, which attends to all. cu_seq_lens_q, cu_seq_lens_k (a batch of 1) and
    seq_idx (B, S) keep sequences apart that are packed into one. ValueError for an argument that is not None and not
    known to change nothing.
    """
    layer, queries, keys = type(module).__name__, query.shape[2], key.shape[2]
    for name, x in kwargs.items():
        if x is not None and name not in HARMLESS:
            raise _refused(f"{layer} gives its attention {name}, a {type(x).__name__}, which is not understood")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "bias": position_bias}
    if deterministic is not None:
        options["deterministic"] = deterministic
    options |= dropout_options("dropout", dropout, query)
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", None)
        if queries > 1 and causal is None:
            raise _refused(f"{layer} has no mask and no is_causal")
        if queries > 1 and causal and queries != keys:
            raise _refused(f"{layer} is causal, and has no mask for {queries} queries and {keys} keys")
        if sliding_window is not None and keys > sliding_window:
            raise _refused(f"{layer} has no mask for sliding_window={sliding_window} and {keys} keys")
        options["causal"] = bool(causal) and queries > 1
    elif attention_mask.dtype is torch.bool:
        options["mask"] = attention_mask
    else:
        options["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    packed = _packed(layer, query, key, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
    if packed is not None:
        if options.get("causal") and cu_seq_lens_q is not cu_seq_lens_k and seq_idx is None:
            packed, options["causal"] = packed & _upto_own_end(query, cu_seq_lens_q, cu_seq_lens_k), False
        options["mask"] = packed & options["mask"] if "mask" in options else packed
    out = api.attention(query, key, value, layout="bhsd", **options)
    weights = _weights(layer, query, key, options) if _asked_for_weights(kwargs) else None
    return out.transpose(1, 2).contiguous(), weights


def _asked_for_weights(given: dict[str, Any]) -> bool:
    """By the call of the model, which some hand through, and of which others know where they collect results."""
    if given.get("output_attentions"):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collected = getattr(capturing, "_active_collector", None)
    return any(name.endswith("attentions") for name in (collected and collected.get()) or ())


def _weights(layer: str, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    options = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    shape = (*query.shape[:3], key.shape[2])
    try:
        weights: torch.Tensor = attention_weights(query, key, layout="bhsd", **options)
    except torch.OutOfMemoryError as error:
        gigabytes = math.prod(shape) * query.element_size() / 2**30
        raise torch.OutOfMemoryError(
            f"output_attentions is True, and the probabilities of each {layer}, {shape}, take {gigabytes:.1f} GiB; "
            "cupyflash.attention_weights makes some of them, or sums"
        ) from error
    return weights


def _packed(layer: str, query: Any, key: Any, cu_q: Any, cu_k: Any, seq_idx: Any) -> Any:
    """(B, 1, S, T), True where query and key are of the same sequence; None where a row of the batch is one
    sequence."""
    if cu_q is None and cu_k is None and seq_idx is None:
        return None
    if seq_idx is not None:
        of_q = of_k = seq_idx
    elif cu_q is None or cu_k is None or query.shape[0] != 1:
        raise _refused(f"{layer} gives cu_seq_lens for a batch of {query.shape[0]}, or one of the two alone")
    else:
        of_q, of_k = _sequence_of(cu_q, query), _sequence_of(cu_k, key)
    queries, keys = query.shape[2], key.shape[2]
    if of_q.shape != (query.shape[0], queries) or of_k.shape != (key.shape[0], keys):
        raise _refused(f"{layer} gives seq_idx of {tuple(of_q.shape)} for {queries} queries and {keys} keys")
    return of_q[:, None, :, None] == of_k[:, None, None, :]


def _upto_own_end(query: torch.Tensor, cu_q: Any, cu_k: Any) -> torch.Tensor:
    """(1, 1, S, S), causal where a sequence may have other queries than keys: its last query stands on its last key."""
    rows = torch.arange(query.shape[2], device=query.device)
    of_q, of_k = (
        x.to(query.device)[_sequence_of(x, query).clamp(max=len(x) - 1)] - rows for x in (cu_q, cu_k)
    )  # fmt: skip
    return of_k[:, None, None, :] >= of_q[:, None, :, None]


def _sequence_of(starts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(1, S): which of the sequences that start there a row of x belongs to."""
    rows = torch.arange(x.shape[2], device=x.device, dtype=starts.dtype)
    return torch.searchsorted(starts.to(x.device), rows, right=True)[None]
