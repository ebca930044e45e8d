"""Groups of torch.distributed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from .arrays import in_a_row
from .groups import of_one_host

FEW = 1 << 20  # bytes


class TorchGroup:
    """The ranks of a `ProcessGroup`: `of` makes one for each, and keeps none of both."""

    def __init__(self, group: Any) -> None:
        self._of: weakref.ref[Any] = weakref.ref(group)
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._ranks, self._backend = distributed.get_process_group_ranks(group), distributed.get_backend(group)
        self.eager = self._backend == "gloo" or not torch.cuda.is_available()
        self.known: set[Any] = set()  # what its ranks compared
        self.beside = True  # whether kernels that move data run beside those that compute: it pays to send meanwhile
        self.window: Any = None  # what ranks of one host write through, into each other's memory, where they can
        self._met = False

    @property
    def _group(self) -> Any:
        if (found := self._of()) is None:  # None would be the default group
            raise ValueError("group is a ProcessGroup that was destroyed; it must be one that is there")
        return found

    @property
    def _bound(self) -> torch.device | None:
        """The device that its communicator was made for, where it was made for one."""
        return getattr(self._group, "bound_device_id", None)

    def meet(self) -> None:
        """Once, all ranks at the same time: what they can do."""
        if self._met or self._backend != "nccl":
            return
        found, window = _window(), None
        self._met, self.beside = True, not of_one_host(self)
        if self.beside:
            return
        if self.all_gather(np.array([found is not None], np.uint8)).all():
            try:
                window = found(self._group, self._bound or torch.device("cuda", torch.cuda.current_device()))
            except Exception:  # noqa: BLE001 - for any reason that a driver, a machine or a container may have
                window = None
            if self.all_gather(np.array([window is not None], np.uint8)).all():
                self.window = window

    def prepare(self, kind: str) -> None:
        """Before calls of a new kind: time-outs may have been set since the last."""
        if self.window is not None:
            self.window.wait_as_long()

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> _Works:
        out, into, late = _by_rank(sends), _by_rank(receives), []
        for rank, some in out.items():
            if _few(some):
                out[rank] = [torch.cat(some)]
        for rank, some in into.items():
            if _few(some):
                into[rank] = [some[0].new_empty(sum(x.numel() for x in some))]
                late += list(zip(some, into[rank][0].split([x.numel() for x in some])))
        operations = [
            distributed.P2POp(what, x, self._ranks[rank], self._group, n)
            for what, messages in ((distributed.isend, out), (distributed.irecv, into))
            for rank, some in messages.items()
            for n, x in enumerate(some)
        ]
        return _Works(distributed.batch_isend_irecv(operations) if operations else [], late)

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


_made: weakref.WeakKeyDictionary[Any, TorchGroup] = weakref.WeakKeyDictionary()


def of(group: Any) -> TorchGroup:
    """That of a `ProcessGroup`."""
    found = _made.get(group)
    if found is None:
        found = _made[group] = TorchGroup(group)
    return found


class _Works:
    def __init__(self, works: list[Any], late: list[tuple[Any, Any]]) -> None:
        self._works, self._late = works, late

    def wait(self) -> None:
        for x in self._works:
            x.wait()
        if self._late:
            torch._foreach_copy_([x for x, _ in self._late], [x for _, x in self._late])
        self._works, self._late = [], []


def _by_rank(some: Sequence[tuple[int, Any]]) -> dict[int, list[torch.Tensor]]:
    """What goes to each rank, or comes from it, as bytes: both ends find the same."""
    found: dict[int, list[torch.Tensor]] = {}
    for rank, x in some:
        if x.numel():
            found.setdefault(rank, []).append(_bytes(x))
    return found


def _few(some: list[torch.Tensor]) -> bool:
    """Whether several messages are so short that one is sooner there, and the host done with it."""
    return len(some) > 1 and sum(x.numel() for x in some) <= FEW


def _window() -> Any:
    """What makes one, where all is installed that it needs and nobody wants none."""
    asked = os.environ.get("CUPYFLASH_WINDOW", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"CUPYFLASH_WINDOW is {asked!r}; it must be 1, 0 or empty")
    if asked == "0":
        return None
    try:
        from .window import Window
    except ImportError:
        return None
    return Window


def groups(group: Any) -> Any:
    """One of ours, or two, of a ProcessGroup, a DeviceMesh of one or two dimensions (keys, heads: heads are inside a
    host), or None, the default group."""
    if group is None and (world := distributed.group.WORLD) is not None:
        return of(world)
    if isinstance(group, DeviceMesh):
        if group.ndim not in (1, 2):
            raise ValueError(f"group is a mesh of {group.ndim} dimensions; it must have one, or two: (keys, heads)")
        if group.ndim == 1:
            return groups(group.get_group())
        return of(group.get_group(1)), of(group.get_group(0))
    if group is None:
        raise ValueError("group is None, and there is no default group; call torch.distributed.init_process_group")
    if isinstance(group, distributed.ProcessGroup):
        if distributed.get_rank(group) < 0:
            raise ValueError("group does not hold this rank; it must")
        return of(group)
    return group


def _bytes(x: Any) -> torch.Tensor:
    """A contiguous tensor as uint8, sharing its memory: of any dtype, which gloo may not know."""
    return in_a_row(x).view(torch.uint8)
