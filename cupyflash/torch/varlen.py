"""torch.nn.attention.varlen's varlen_attn and varlen_attn_out, with their signatures and semantics."""

from __future__ import annotations

from typing import Any

import torch

from .. import api
from ..other_names import renaming
from .dropout import check_tensors

_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "seqlens_k": "seqused_k", "page_table": "block_table", "max_seqlen_q": "max_q", "max_seqlen_k": "max_k",
}  # fmt: skip


@renaming(torch.compiler.is_compiling, **_NAMES)
def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of packed sequences in the place of torch.nn.attention.varlen.varlen_attn, on CPUs too.

    Parameters
    ----------
    query : (Tq, Hq, D)
        float16, bfloat16, float32 or float64.
    key, value : (Tk, H, D), or with block_table (pages, page, H, D)
        Those of value may have another D.
    cu_seq_q : (N + 1,) int32 or int64
        Where each sequence begins in query, and the end. What is behind that gets 0.
    cu_seq_k : (N + 1,) int32 or int64, or None
        The same of key and value; not looked at with block_table.
    max_q, max_k : int
        The longest lengths. Hints, but that with seqused_k and without block_table no more than max_k keys of a
        sequence are read.
    return_aux : AuxRequest, optional
        With lse=True the log-sum-exp of each row, (Hq, Tq), comes too; differentiable.
    scale : float, optional
        Default 1 / sqrt(D).
    window_size : (left, right)
        Keys that a query sees beside its diagonal, at the bottom right of its sequence; -1 is all. (-1, 0) is causal.
    enable_gqa : bool
        Hq may be a multiple of H.
    seqused_k : (N,) int32 or int64, optional
        How many keys of each sequence are there. No gradients.
    block_table : (N, pages of one) int32 or int64, optional
        Which pages of key and value a sequence has, with seqused_k. No gradients.
    num_splits : int, optional
        1: what comes of a sequence does not depend on the others, to the bit. Other numbers are not looked at.

    Returns
    -------
    (Tq, Hq, D), or (that, lse)

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it is and what it must be.
    """
    return _attend(
        None, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, enable_gqa,
        seqused_k, block_table, num_splits,
    )  # fmt: skip


@renaming(torch.compiler.is_compiling, **_NAMES)
def varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `varlen_attn`, written into `out`, shaped and typed as the result. Nothing is differentiated."""
    check_tensors(out=out)
    return _attend(
        out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, enable_gqa,
        seqused_k, block_table, num_splits,
    )  # fmt: skip


def _attend(
    out: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    return_aux: Any,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> Any:
    check_tensors(query=query, key=key, value=value, cu_seq_q=cu_seq_q)
    lengths = {"cu_seq_k": cu_seq_k, "seqused_k": seqused_k, "block_table": block_table}
    check_tensors(**{name: x for name, x in lengths.items() if x is not None})
    if query.dim() == 3 and key.dim() > 2 and not enable_gqa and key.shape[-2] != query.shape[-2]:
        raise ValueError(
            f"key has {key.shape[-2]} heads but query has {query.shape[-2]}; they must be the same, or enable_gqa=True "
            "given"
        )
    options: dict[str, Any] = {"cu_seqlens_q": cu_seq_q, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    if block_table is not None and seqused_k is None:
        raise ValueError("block_table is given without seqused_k; give the keys that each sequence has, (N,)")
    if block_table is not None:
        options |= {"seqlens_k": seqused_k, "page_table": block_table}
    elif cu_seq_k is None:
        raise ValueError(
            "cu_seq_k is None, but block_table is not given; it must say where each sequence begins in key"
        )
    elif seqused_k is None:
        options["cu_seqlens_k"] = cu_seq_k
    elif torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise TypeError(
            "seqused_k is given, with which there is a forward alone, but a gradient is wanted; call under "
            "torch.no_grad()"
        )
    else:  # a part of each packed sequence: pages of one row
        reach = torch.arange(max_k, dtype=cu_seq_k.dtype, device=cu_seq_k.device)
        options |= {"seqlens_k": seqused_k, "page_table": cu_seq_k[:-1, None] + reach}
        key, value = key.unsqueeze(1), value.unsqueeze(1)
    rows = bool(return_aux is not None and return_aux.lse)
    return api.attention(
        query, key, value, scale=scale, window=_window(window_size), batch_invariant=num_splits == 1, return_lse=rows,
        out=out, **options,
    )  # fmt: skip


def _window(size: Any) -> tuple[int | None, int | None]:
    """-1 stands for all."""
    if not isinstance(size, (tuple, list)) or len(size) != 2 or any(type(n) is not int or n < -1 for n in size):
        raise ValueError(f"window_size is {size!r}; it must be (left, right), numbers of keys, -1 for all")
    left, right = (None if n == -1 else n for n in size)
    return left, right
