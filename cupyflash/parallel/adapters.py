"""From what a caller gives as `group` to the protocol."""

from __future__ import annotations

import functools
import operator
from typing import Any

from .arrays import library
from .groups import Group


def of(group: Any) -> Group:
    """The group that a caller gave; TypeError for what is none."""
    if group is None:
        raise TypeError("group is None; it must be a group: parallel.simulated, an mpi4py communicator, ...")
    try:
        _protocol(group)
    except AttributeError:
        return _adapter(group)
    found: Group = group
    return found


_protocol = operator.attrgetter("rank", "size", "exchange", "all_gather", "eager")


def _adapter(group: Any) -> Group:
    kind = library(group)
    if kind == "mpi4py":
        from .mpi import MpiGroup

        return MpiGroup(group)
    if kind == "torch" and (ranks := _torch().groups(group)) is not group:
        if isinstance(ranks, tuple):
            raise ValueError("group holds a mesh of 2 dimensions; it must be that mesh alone, or hold two of one each")
        found: Group = ranks
        return found
    if kind in ("cupy", "cupyx", "cupy_backends"):
        from .nccl import NcclGroup

        return NcclGroup(group)
    if hasattr(group, "run"):
        raise TypeError(
            f"group is a {type(group).__name__}, all of its ranks; it must be what its run(function) gives to function"
        )
    if isinstance(group, int):  # what PyTorch's new_group gives to others than its members
        raise TypeError(f"group is {group}, no group; it must be one that holds this rank")
    name = f"{type(group).__module__}.{type(group).__qualname__}".removeprefix("builtins.")
    raise TypeError(
        f"group is a {name}; it must be parallel.simulated(n)'s, PyTorch's, an mpi4py communicator or CuPy's of NCCL"
    )


def named(group: Any, kind: str | None = None) -> Any:
    """Of PyTorch, what a mesh or None (for tensors: the default group) stands for; else the group as it is."""
    if (group is None and kind == "torch") or library(group) == "torch":
        return _torch().groups(group)
    return group


@functools.cache  # an import statement costs 1 us in every call
def _torch() -> Any:
    from . import torch_group

    return torch_group
