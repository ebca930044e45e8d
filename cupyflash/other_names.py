"""What arguments of other attention functions are called here, for who brings their names along.

PyTorch's scaled_dot_product_attention and MultiheadAttention, flash-attn, FlexAttention, jax.nn.dot_product_attention,
xFormers, transformers.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .signature import unscripted

F = TypeVar("F", bound=Callable[..., Any])
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'(?=$|\. Did you mean)")

_DROPOUT = "here it is dropout, which needs a seed"
_WINDOW = "here it is window=(left, right), with None where a side is unbounded"
_FILLED = "here it is seqlens_k, how many rows of its cache each sequence has filled"
_LENGTHS = f"{_FILLED}, or key_mask, (batch, keys) booleans"
_PACKED = "here it is cu_seqlens_q and cu_seqlens_k, where each packed sequence begins"
_PAGES = "here it is page_table, (sequences, pages of one), with seqlens_k"
_ROTARY = "attention_append takes rotary=(cos, sin)"
_CACHE = "here caches are k and v, with seqlens_k; attention_append takes them by that name"
_FASTEST = "the fastest kernels are taken by themselves; leave it out"
_BIAS = "here it is mask where it holds booleans (True: may be attended), and bias where it is added to the score"

HERE = {
    "query": "here it is q",
    "key": "here it is k",
    "value": "here it is v",
    "softmax_lse": "here it is lse",
    "lengths": _FILLED,
    "k_cache": _CACHE,
    "v_cache": _CACHE,
    "segment_ids": "here it is cu_seqlens_q and cu_seqlens_k, of packed sequences, or block_mask=masks.documents(ids)",
    "rotary_interleaved": "attention_append takes it, with rotary=(cos, sin)",
    "num_splits": _FASTEST,
    "sm_margin": "here it is sms, how many multiprocessors a call takes at most",
    "pack_gqa": _FASTEST,
    "is_causal": "here it is causal=True, or causal='top_left' for what PyTorch and JAX mean where q and k differ in "
    "length",
    "attn_mask": _BIAS,
    "attention_mask": _BIAS,
    "attn_bias": _BIAS,
    "key_padding_mask": "here it is key_mask, where True means that the key may be attended",
    "dropout_p": _DROPOUT,
    "p": _DROPOUT,
    "softmax_scale": "here it is scale",
    "sm_scale": "here it is scale",
    "scaling": "here it is scale",
    "window_size": _WINDOW,
    "local_window_size": _WINDOW,
    "sliding_window": "here it is window=(n - 1, 0) for the last n keys",
    "logits_soft_cap": "here it is softcap",
    "attn_logits_soft_cap": "here it is softcap",
    "s_aux": "here it is sinks",
    "learnable_sink": "here it is sinks",
    "enable_gqa": "k and v may always have fewer heads than q; leave it out",
    "return_softmax_lse": "here it is return_lse",
    "return_residual": "here it is return_lse, (batch, heads, queries)",
    "return_attn_probs": "here it is return_lse; attention_weights makes probabilities",
    "need_weights": "attention_weights makes them, all or some",
    "query_seq_lengths": "here it is cu_seqlens_q, of packed queries",
    "key_value_seq_lengths": _LENGTHS,
    "cu_seqlens": _PACKED,
    "cu_seq_q": "here it is cu_seqlens_q",
    "cu_seq_k": "here it is cu_seqlens_k",
    "cu_seq_lens_q": "here it is cu_seqlens_q",
    "cu_seq_lens_k": "here it is cu_seqlens_k",
    "max_seqlen": "here it is max_seqlen_q and max_seqlen_k",
    "max_length_q": "here it is max_seqlen_q",
    "max_length_k": "here it is max_seqlen_k",
    "cache_seqlens": _FILLED,
    "seqused_k": _FILLED,
    "context_lens": _FILLED,
    "seq_lens": _FILLED,
    "kv_seqlen": _FILLED,
    "block_table": _PAGES,
    "block_tables": _PAGES,
    "page_tables": _PAGES,
    "page_indices": _PAGES,
    "cache_batch_idx": "here it is page_table with one page for each sequence, with seqlens_k",
    "cache_leftpad": "here it is key_mask, where False hides the key",
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "score_mod": "here it is score, which gets arrays by name; cupyflash.torch.flex_attention takes yours as it is",
    "mask_mod": "here it is block_mask, which cupyflash.block_mask makes of it",
    "implementation": "the fastest kernels are taken by themselves; family names others",
    "backend": "the fastest kernels are taken by themselves; family names others",
    "op": "the fastest kernels are taken by themselves; family names others",
}
# Of ours, what other functions of ours take.
ELSEWHERE = {
    ("attention_backward", "return_lse"): "it takes the lse that attention(..., return_lse=True) returned",
    ("attention_jvp", "return_lse"): "tout and tlse always come back, both",
    ("attention_backward_jvp", "return_lse"): "it takes the lse that attention(..., return_lse=True) returned",
    ("attention_vjp", "return_lse"): "what it returns has lse, as backward.lse",
    ("attention_vjp", "out"): "the result is a new array",
    ("attention_weights", "dropout"): "weights are those before dropout; leave it out",
    ("attention_weights", "seed"): "weights are those before dropout; leave it out",
    ("attention_weights", "v"): "weights do not depend on it",
    ("attention_weights", "latent"): "weights do not depend on it",
    **{
        ("attention_weights", name): "ask for the weights of one sequence at a time, as a dense call"
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "max_seqlen_q", "max_seqlen_k")
    },
    **{(name, "backward"): "here it is of='backward'" for name in ("explain", "tune")},
    ("attention_jvp", "dout"): "that belongs to attention_backward_jvp",
    ("attention_jvp", "dlse"): "that belongs to attention_backward_jvp",
    ("attention_jvp", "wrt"): "tangents say what moves; wrt belongs to attention_backward and attention_backward_jvp",
}
OF_8_BITS = ("q_descale", "k_descale", "v_descale", "out_scale")


def unexpected(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Python's error for a keyword argument that a function does not have, with what may have been meant."""
    near = difflib.get_close_matches(name, known, 1)
    forward = "inputs of 8 bits have a forward alone" if name in OF_8_BITS else ""
    forward = "latent attention has a forward alone" if name == "latent" else forward
    meant = HERE.get(name) or ELSEWHERE.get((function, name)) or forward
    meant = meant or (f"did you mean {near[0]!r}?" if near else "")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}" + (f"; {meant}" if meant else ""))


def renaming(traced: Callable[[], bool] = lambda: False, **theirs: str) -> Callable[[F], F]:
    """For a function in the place of another: errors of ours speak of its arguments, by the names that `theirs` has for
    ours.

    While `traced()`, as a compiler reads it, the function is left as it is.
    """
    ours = re.compile(rf"\b({'|'.join(theirs)})\b")

    def of(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if traced():
                return function(*args, **options)
            try:
                return function(*args, **options)
            except (TypeError, ValueError) as error:
                if type(error) not in (TypeError, ValueError):  # another's, with a constructor of its own
                    raise
                if unknown := _UNEXPECTED.search(text := str(error)):  # of what is called here, by its own names
                    if unknown[1] not in theirs:
                        raise
                    raise TypeError(f"{text[: unknown.end()]}; here it is {theirs[unknown[1]]}") from error
                raise type(error)(ours.sub(lambda x: theirs[x[1]], text)) from error

        return unscripted(call)

    return of
