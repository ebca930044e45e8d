"""torch.nn.attention.flex_attention, with its signature and semantics."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .. import api
from ..blockmask.blocks import BlockMask
from ..interop.torch_schema import refuse_script
from ..score.fingerprint import Same, fingerprint
from ..signature import unscripted
from .score_mod import traced
from .watch import Watch

_LARGEST = 512  # blocks beyond that are cut up


class _Kept(NamedTuple):
    """What was made of a mask."""

    state: Any  # what it was made from
    depends: list[bool]  # whether its mask_mod depends on b and on h
    made: dict[Any, BlockMask]  # for how many of these


_masks: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


@unscripted
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Exact attention in the place of torch.nn.attention.flex_attention.flex_attention; it needs no torch.compile.

    Parameters
    ----------
    query : (B, Hq, L, E)
    key, value : (B, H, S, E), (B, H, S, Ev)
        float16, bfloat16, float32 or float64. Their batch may be 1.
    score_mod : function of (score, b, h, q_idx, kv_idx), optional
        The new score, from tensors without dimensions, b to kv_idx of int32 as in PyTorch's compiled kernels. It is run
        once and followed operator by operator; elements of tensors that it captures are read, as in bias[h, q_idx -
        kv_idx], and get gradients. A function that is called again is known by its code and by what it looks up, if
        that is numbers, tensors and functions; else it is run in each call (10 ms).
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        Converted at its first call, and again where its lists, what its mask_mod looks up, or an element of a tensor
        that it captures has changed; in each call where mask_mod looks up other things than numbers, tensors and
        functions. Of tensors made in torch.inference_mode, through .data, and by others in the same memory (NumPy),
        PyTorch tells no changes: make another mask there.
    scale : float, optional
        Default 1 / sqrt(E).
    enable_gqa : bool
        Hq may be a multiple of H.
    return_lse : bool
        Also return the log-sum-exp of each row, (B, Hq, L), differentiable.
    kernel_options : dict, optional
        Of kernels that are not these: not looked at.
    return_aux : AuxRequest, optional
        With lse=True the second result is an AuxOutput with lse. max_scores is not served.

    Returns
    -------
    (B, Hq, L, Ev), or (that, lse), or (that, AuxOutput). Queries that see no key: 0, and lse -inf.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it is and what it must be.
    NotImplementedError
        Naming an operator in score_mod that is not known here; for return_aux with max_scores.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, heads, sequence, dimension)")
    for name, x in (("key", key), ("value", value)):
        if not enable_gqa and x.shape[1] != query.shape[1]:
            raise ValueError(
                f"{name} has {x.shape[1]} heads but query has {query.shape[1]}; they must be the same, or "
                "enable_gqa=True given"
            )
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse is True and return_aux is given; at most one of them can be")
        if return_aux.max_scores:
            raise NotImplementedError("return_aux asks for max_scores, which are not kept; it can ask for lse")
    if key.shape[0] == value.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    out, lse = _attend(query, key, value, score_mod, block_mask, scale)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


@torch.compiler.disable  # functions and masks have no place in a graph: torch.compile breaks it here
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: Any
) -> Any:
    refuse_script()  # before functions run
    options: dict[str, Any] = {"scale": scale, "layout": "bhsd"}
    if score_mod is not None:
        options["score"], options["score_arrays"] = traced(score_mod, query, key)
    if block_mask is not None:
        with temporarily_clear_interpreter_stack():  # transforms of torch.func have no part in it
            options["block_mask"] = _converted(block_mask, query, key.shape[2])
    return api.attention(query, key, value, return_lse=True, **options)


def _converted(mask: Any, query: torch.Tensor, keys: int) -> BlockMask:
    for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod"):
        if not hasattr(mask, name):
            raise TypeError(
                f"block_mask is a {type(mask).__name__}; it must be a torch.nn.attention.flex_attention.BlockMask, or "
                "None (cupyflash.attention takes those of cupyflash.block_mask)"
            )
    lengths = (query.shape[2], keys)
    everything = min(mask.BLOCK_SIZE) >= 1 << 30  # PyTorch's own for no mask
    if not everything and tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, but query has "
            f"{lengths[0]} and key {lengths[1]}; make one for these lengths"
        )
    if mask.kv_num_blocks.device != query.device:
        raise ValueError(f"block_mask is on {mask.kv_num_blocks.device} but query is on {query.device}; make it there")
    if everything:
        return _made(mask, query, lengths, (1, 1))
    state, kept = _state(mask), _masks.get(mask)
    if kept is None or state is None or kept.state != state:
        depends = [_depends(mask.mask_mod, axis, query.device) for axis in (0, 1)]
        kept = _masks[mask] = _Kept(state, depends, {})
    size = tuple(n if x else 1 for n, x in zip(query.shape, kept.depends))
    if size not in kept.made:
        kept.made[size] = _made(mask, query, lengths, size)
    return kept.made[size]


def _state(mask: Any) -> Any:
    """What a conversion follows from; None where that is not known."""

    def of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None
        version = None if x.is_inference() else x._version
        return Same(x), version, x.data_ptr(), x.dtype, tuple(x.shape), x.stride()

    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    try:
        function = fingerprint(mask.mask_mod, of)
        return None if function is None else (function, tuple(map(of, lists)), tuple(mask.BLOCK_SIZE))
    except RuntimeError:  # of tensors without memory
        return None


@torch.no_grad()
def _depends(mask_mod: Any, axis: int, device: torch.device) -> bool:
    """Whether it asks for b (axis 0) or h (1): its result is mapped, then, where only that one is."""
    place = [torch.zeros((1,) if n == axis else (), dtype=torch.int64, device=device) for n in range(4)]
    try:
        with Watch():
            torch.vmap(mask_mod, tuple(0 if n == axis else None for n in range(4)), out_dims=None)(*place)
    except (ValueError, RuntimeError, IndexError):  # the first for that; others come again where the mask is made
        return True
    return False


@torch.no_grad()
def _made(mask: Any, query: torch.Tensor, lengths: tuple[int, int], size: tuple[int, ...]) -> BlockMask:
    """By its lists of blocks, and mask_mod in those that are not full: as PyTorch's kernels read it.

    `size`: of how many batches and heads mask_mod knows, where one list is for all.
    """
    sizes = tuple(mask.BLOCK_SIZE)
    columns = -(-lengths[1] // sizes[1])
    partial = _listed(mask.kv_num_blocks, mask.kv_indices, columns)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns)
    listed = [max(partial.shape[axis], full.shape[axis]) for axis in (0, 1)]
    batch, heads = (n if own == 1 else own for own, n in zip(listed, size))
    of = mask.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        of = torch.vmap(of, dims)

    def seen(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        with Watch():
            return of(b.reshape(-1), h.reshape(-1), i.reshape(-1), j)

    def seen_in_blocks(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        at = b % partial.shape[0], h % partial.shape[1], i // sizes[0], j // sizes[1]
        return full[at] | (partial[at] & seen(b, h, i, j))

    shape = (batch, heads, *lengths)
    if all(n % 16 == 0 and n <= _LARGEST for n in sizes):
        return api.block_mask(seen, shape=shape, block=sizes, blocks=partial | full, full=full, like=mask.kv_num_blocks)
    return api.block_mask(seen_in_blocks, shape=shape, like=mask.kv_num_blocks)


def _listed(counts: torch.Tensor, numbers: torch.Tensor, columns: int) -> torch.Tensor:
    """Booleans (batch, heads, rows of blocks, columns) of the first `counts` numbers of each row."""
    shape = (1,) * (4 - numbers.dim()) + tuple(numbers.shape)
    numbers, counts = numbers.reshape(shape).long(), counts.reshape(shape[:3])
    given = torch.arange(shape[3], device=numbers.device) < counts[..., None]
    there = torch.zeros(*shape[:3], columns + 1, dtype=torch.bool, device=numbers.device)
    return there.scatter_(-1, torch.where(given, numbers, columns), True)[..., :columns]
