"""What the operators get of a score function and of a block mask: an operator takes numbers, texts and tensors.

A score function goes as the operations that were traced, beside the tensors that it reads; a block mask as two tensors
that share its memory, so that another one of the same shape is another input of the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import rules
from ..blockmask.blocks import BlockMask
from ..problem import MaskKind, View, mask_kind
from ..score import Score
from ..score.trace import decoded

# Masks on GPUs, each as long as the memory of its tensors, since they keep the lists that kernels walk by.
_seen: dict[Any, tuple[StorageWeakRef, BlockMask]] = {}


def score(data: str, views: Iterable[View]) -> Score:
    """A score function from its `data`, and views of what it reads."""
    return decoded(data, tuple([rules.wide(x) for x in views]))


def of_mask(mask: BlockMask | None, q: torch.Tensor) -> tuple[list[torch.Tensor] | None, list[int] | None]:
    """Its tensors, and the numbers (batch, heads, queries, keys, and queries and keys of a block), for a call on q."""
    if mask_kind(mask) is None or mask is None:
        return None, None
    mask.make_tensors()
    tensors = list(mask.tensors)
    if isinstance(q, FakeTensor) and not q.fake_mode.allow_non_fake_inputs:
        tensors = [q.fake_mode.from_tensor(x) for x in tensors]
    return tensors, [*mask.kind.shape, *mask.block]


def stated(tensors: Sequence[torch.Tensor], numbers: Sequence[int] | None) -> BlockMask | None:
    """From what `of_mask` gives, a mask that has a form and no content, as for tensors without memory."""
    if numbers is None:
        return None
    batch, heads, queries, keys, *block = numbers
    where = f"cuda:{tensors[0].get_device()}" if tensors[0].is_cuda else tensors[0].device.type
    return BlockMask(MaskKind((batch, heads, queries, keys), where), (block[0], block[1]), None, None)


def mask(tensors: Sequence[torch.Tensor], numbers: Sequence[int] | None) -> BlockMask | None:
    """The mask itself, for one call."""
    form = stated(tensors, numbers)
    if form is None:
        return None
    slots, bits = (x.detach() for x in tensors)
    if not slots.is_cuda:
        return BlockMask(form.kind, form.block, slots.numpy(), bits.numpy().view(np.uint16))
    return _kept(slots, (form.kind, form.block), lambda: _copied(form, slots, bits))


def _kept(x: torch.Tensor, kind: Any, make: Callable[[], BlockMask]) -> BlockMask:
    """What was made for the memory of x, whichever tensor it comes in; as long as there is that memory."""
    memory = x.untyped_storage()
    key = memory._cdata, x.storage_offset(), kind
    if key not in _seen:
        for old in [old for old, (ref, _) in _seen.items() if ref.expired()]:
            del _seen[old]
        _seen[key] = StorageWeakRef(memory), make()
    return _seen[key][1]


def _copied(form: BlockMask, slots: torch.Tensor, bits: torch.Tensor) -> BlockMask:
    """On a GPU, in memory of its own: if it held that of the tensors, neither would ever go."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "block_mask is seen for the first time while a CUDA graph is captured, where lists for kernels cannot be "
            "made; call before, with this mask, and do not compile with mode='reduce-overhead'"
        )
    import cupy

    with cupy.cuda.Device(slots.get_device()):
        parts = [cupy.from_dlpack(x).copy() for x in (slots, bits)]
        cupy.cuda.get_current_stream().synchronize()
    return BlockMask(form.kind, form.block, parts[0], parts[1].view(np.uint16))
