"""The Hopper forward's tiles of short sequences, each with the rows of so many heads, chosen by name."""

from __future__ import annotations

from typing import Any

import pytest

from cupyflash.gpu.families import sm90_forward, sm90_forward_cost
from cupyflash.gpu.families.sm90_forward_tiles import BRIEF, BRIEF_KEYS, BRIEF_PACKS, ForwardTile
from cupyflash.gpu.kernel_plan import KernelPlan

Choice = tuple[int, ForwardTile, int]  # head dimension, tile, heads that share it
CHOICES: list[Choice] = [
    (dim, t, pack)
    for dim in BRIEF
    for t in BRIEF[dim] + BRIEF_KEYS.get(dim, ())
    for pack in (1, *(BRIEF_PACKS if dim <= 128 and ((t.warpgroups, t.keys) == (2, 128) or t.warpgroups == 1) else ()))
]
# Shapes and options, as `draw_inputs` and `check` take them: more queries than a tile has of a head, a group that packs
# do not divide, keys beyond a tile.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"seq": (150, 170)}, {}),
    "causal": ({"seq": (140, 190), "key_mask": True, "dlse": 1.0}, {"causal": True}),
    "hidden-queries": ({"seq": (200, 90), "given": ("sinks",)}, {"causal": True}),
    "window": ({"seq": (130, 260)}, {"window": (70, 10)}),
}


def name_of(choice: Choice) -> str:
    dim, t, pack = choice
    return f"d{dim}-{t.rows}x{t.keys}-{t.stages}-{t.blocks}-pack{pack}"


def choose(choice: Choice, patch: pytest.MonkeyPatch) -> list[KernelPlan]:
    """The forward's plans from now on, all of which have this tile."""
    _, t, pack = choice
    plans: list[KernelPlan] = []
    make = sm90_forward.plan
    patch.setattr(sm90_forward_cost, "by_seconds", lambda *_: ((t, pack),))
    patch.setattr(sm90_forward, "plan", lambda *args: plans.append(make(*args)) or plans[-1])
    return plans


def taken(choice: Choice, plans: list[KernelPlan]) -> bool:
    """Whether all of them have it: (some tiles have no room for 192 columns of V)."""
    _, t, pack = choice
    told = [dict(x.constants) for x in plans]
    return bool(told) and all((x["WARPGROUPS"], x["KEYS"], x["PACK"]) == (t.warpgroups, t.keys, pack) for x in told)
