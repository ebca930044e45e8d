"""DTensors of PyTorch, whose batch or heads are shared out over a mesh: each rank attends what it holds, and nothing is
sent. (A sequence that is shared out is `cupyflash.parallel`'s.)"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import dispatch
from ..call import Call
from ..passes import FORWARD
from ..problem import ARRAY_RULES, View, check_layout, contiguous
from . import torch_
from .protocol import Recorder

kind = "DTensor"
Names = Sequence[str | None]  # what the axes of an array are
_AXES = {"b": "batch", "h": "head", "s": None, "d": None}
_TAKEN = ("q", "k", "v", "key_mask", "mask", "bias", "alibi_slopes", "sinks")
_REFUSED = ("score", "block_mask", "at", "dropout", "latent")  # most know entries and heads by their numbers
_LOCAL = "call with what to_local() gives, as torch.distributed.tensor.experimental.local_map does"


def objection(cls: type) -> str | None:
    return None if issubclass(cls, DTensor) else "it must be a torch.Tensor"


def view(x: DTensor) -> View:
    raise TypeError(f"is a DTensor, which attention alone takes, and without score functions; {_LOCAL}")


def recorder(call: Call) -> Recorder:
    return run


def check_target(name: str, x: Any) -> None:
    view(x)


def wrap(name: str, x: Any) -> NoReturn:
    raise TypeError(f"{name} is a {type(x).__name__}, but q is a DTensor; it must be one")


def run(call: Call) -> Any:
    """The results of a forward, DTensors that are shared out as q is."""
    arrays, options = call.arrays, call.options
    if call.of is not FORWARD:
        raise TypeError(f"q is a DTensor, which attention alone takes; {_LOCAL}")
    for name in (*(x for x in _REFUSED if options[x]), *(x for x in arrays if x not in _TAKEN), *call.targets):
        raise ValueError(f"{name} is given, which goes with no DTensors; {_LOCAL}")
    q, k, v = (arrays[name] for name in "qkv")
    layout = check_layout(options["layout"])
    names = [_AXES[x] for x in ("sd" if q.dim() == 2 else layout[-q.dim() :])]
    of_ranks = [_shared(place, names) for place in q.placements]
    local = {name: _local(name, x, _names(name, x, names), q, names, of_ranks) for name, x in arrays.items()}
    if "head" in of_ranks:
        ranks = math.prod([n for n, axis in zip(q.device_mesh.shape, of_ranks) if axis == "head"])
        heads_q, heads = q.shape[names.index("head")], k.shape[names.index("head")]
        if 1 < heads < heads_q and heads % ranks:
            raise ValueError(f"k has {heads} heads, which {ranks} ranks share; each must have as many")
    own = call.but(lib=torch_, arrays=local)
    out, lse = (torch_.recorder(own) or dispatch.run)(own)
    out = _whole(out, (*q.shape[:-1], v.shape[-1]), q, names, of_ranks)
    if lse is not None:
        of_lse = ("batch", "head", None)[1 - q.dim() :]
        lse = _whole(lse, tuple([q.shape[names.index(x)] for x in of_lse]), q, of_lse, of_ranks)
    return out, lse


def _names(name: str, x: Any, of_q: Names) -> Names:
    if name in "qkv":
        return of_q
    axes = ARRAY_RULES[name].axes
    return axes[max(0, len(axes) - x.dim()) :]


def _shared(place: Any, names: Names) -> str | None:
    """What is shared out along an axis of the mesh; None where each rank has all of it."""
    if type(place) is Replicate:
        return None
    axis = names[place.dim] if type(place) is Shard and place.dim < len(names) else None
    if axis is None:
        raise ValueError(
            f"q is a DTensor with the placement {place}; it must be replicated, or shared out by its batch or heads "
            "(cupyflash.parallel has sequences that are shared out)"
        )
    return axis


def _local(name: str, x: Any, names: Names, q: DTensor, of_q: Names, of_ranks: Names) -> torch.Tensor:
    """What this rank holds of an array, and is to hold beside its part of q."""
    if not isinstance(x, DTensor):
        wrap(name, x)
    places: list[Any] = []
    for axis in of_ranks:
        i = names.index(axis) if axis in names and axis else None
        one = i is not None and x.shape[i] == 1 and q.shape[of_q.index(axis)] != 1
        places.append(Replicate() if i is None or one else Shard(i))
    if x.device_mesh != q.device_mesh or list(x.placements) != places:
        raise ValueError(
            f"{name} is a DTensor with the placements {x.placements}; beside those of q, {q.placements}, they must be "
            f"{tuple(places)} on the same mesh"
        )
    # The gradient of what all ranks have is a sum over those that share the rest out.
    parts = [Partial() if axis and place == Replicate() else place for axis, place in zip(of_ranks, places)]
    local = x.to_local(grad_placements=parts)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _whole(x: torch.Tensor, shape: tuple[int, ...], q: DTensor, names: Names, of_ranks: Names) -> DTensor:
    places = [Shard(names.index(axis)) if axis else Replicate() for axis in of_ranks]
    return DTensor.from_local(x, q.device_mesh, places, shape=torch.Size(shape), stride=contiguous(shape))
