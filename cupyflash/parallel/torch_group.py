"""Groups of torch.distributed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

_known: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()  # what ranks compared, by their group


class TorchGroup:
    """The ranks of a `ProcessGroup`."""

    def __init__(self, group: Any) -> None:
        self._group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        self._ranks = distributed.get_process_group_ranks(group)
        self._backend = distributed.get_backend(group)
        self.eager = self._backend == "gloo" or not torch.cuda.is_available()
        self.known: set[Any] = _known.setdefault(group, set())

    @property
    def _bound(self) -> torch.device | None:
        """The device that its communicator was made for, where it was made for one."""
        return getattr(self._group, "bound_device_id", None)

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> _Works:
        of_two: dict[int, int] = {}

        def operation(what: Any, x: Any, rank: int, number: int) -> Any:
            return distributed.P2POp(what, _bytes(x), self._ranks[rank], self._group, number)

        operations = []
        for what, some in ((distributed.isend, sends), (distributed.irecv, receives)):
            of_two.clear()
            for rank, x in some:
                if x.numel():
                    operations.append(operation(what, x, rank, of_two.setdefault(rank, 0)))
                    of_two[rank] += 1
        return _Works(distributed.batch_isend_irecv(operations) if operations else [])

    def refuses(self, kind: str, on_gpu: bool, ordinal: int | None) -> str | None:
        """Why such arrays cannot be sent: what they must be."""
        if kind != "torch":
            return "a tensor, as group is PyTorch's"
        if on_gpu == (self._backend == "gloo") and self._backend in ("gloo", "nccl"):
            return f"on {'the CPU' if on_gpu else 'a GPU'}, as group is one of {self._backend}"
        if on_gpu and self._bound is not None and self._bound.index not in (None, ordinal):
            return f"on {self._bound}, as group is"
        return None

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        own = torch.from_numpy(x.copy()).to("cpu" if self.eager else self._bound or "cuda")
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, group=self._group)
        return torch.stack(parts).cpu().numpy()


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for x in self._works:
            x.wait()


def groups(group: Any) -> Any:
    """One of ours, or two, of a ProcessGroup, a DeviceMesh of one or two dimensions (keys, heads: heads are inside a
    host), or None, the default group."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            raise ValueError(f"group is a mesh of {group.ndim} dimensions; it must have one, or two: (keys, heads)")
        if group.ndim == 1:
            return groups(group.get_group())
        return TorchGroup(group.get_group(1)), TorchGroup(group.get_group(0))
    if group is None and not distributed.is_initialized():
        raise ValueError("group is None, and there is no default group; call torch.distributed.init_process_group")
    if group is None or isinstance(group, distributed.ProcessGroup):
        found = distributed.group.WORLD if group is None else group
        if distributed.get_rank(found) < 0:
            raise ValueError("group does not hold this rank; it must")
        return TorchGroup(found)
    return group


def _bytes(x: Any) -> torch.Tensor:
    """A contiguous tensor as uint8, sharing its memory: of any dtype, which gloo may not know."""
    return x.reshape(-1).view(torch.uint8)
