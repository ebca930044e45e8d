"""A call of the public functions: what is computed, of which arrays, how, and into which targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .passes import Pass

Arrays = dict[str, Any]  # of one call, those that are given, by the name of the argument


@dataclass(slots=True)
class Call:
    """Made in `api`, and handed down as it is: who needs another makes it with `but`, and changes none."""

    lib: Any  # the adapter of q (interop.protocol says what it has)
    of: Pass
    arrays: Arrays  # those that are given; the tangent of one is called "t" + its name
    options: dict[str, Any]  # every option of the pass
    targets: Arrays = field(default_factory=dict)  # arrays to write results to, by name
    seed: int | None = None  # of dropout, where it is a number
    family: str | None = None
    return_lse: bool = False  # of a forward
    wrt: tuple[str, ...] = ()  # of gradients: optional arrays of which there shall be some too
    add: bool = False  # of gradients: to what their targets hold
    follows: bool = False  # a launch of ours, which waited for all before it, is the last one in the stream
    check: bool = False  # whether values of lengths, offsets and pages on a device are looked at first
    followed: bool = False  # of a forward: its gradients will be asked for
    own: bool = False  # of what takes out and lse: they are surely what attention made of the other arrays

    def but(self, **fields: Any) -> Call:
        """The same call with other fields."""
        call = Call(
            self.lib, self.of, self.arrays, self.options, self.targets, self.seed, self.family, self.return_lse,
            self.wrt, self.add, self.follows, self.check, self.followed, self.own,
        )  # fmt: skip
        for name, x in fields.items():
            setattr(call, name, x)
        return call

    def without_arrays(self) -> Call:
        """What outlives its arrays: for who keeps those in his own way."""
        return Call(self.lib, self.of, {}, self.options, {}, self.seed, self.family, self.return_lse, self.wrt)
