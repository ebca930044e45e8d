"""Where a row of a sequence lies is said in one room of the kernels, and which tile is the n-th in another."""

from __future__ import annotations

import re

import pytest

from cupyflash.gpu.source import kernels_folder

# What a kernel's text may say, as a regular expression, and the files that do.
ROOMS = {
    "lengths, and which rows are live": (r"\bp\.(seq|first|end)_[qk]\b", {"attention/sequence.cuh"}),
    "a place in a tensor map": (r"\bInMap\s*(\w+\s*)?\{|InMap \w+\(", {"attention/head.cuh", "tile/places.cuh"}),
    "boxes of TMA": (r"\btma_(load|store)\(", {"ptx/tma.cuh", "tile/swizzled.cuh", "sm90/pair_tiles.cuh"}),
    "a head of its numbers": (r"\bHead(\s+\w+)?\s*\{[^}\s]", set()),
    # (and of the numbers that shares of one sequence have)
    "a number's tile": (
        r"[\w)] % tiles\b", {"attention/tiles.cuh", "attention/schedule.cuh", "sm90/shares_by_length.cuh"},
    ),
    "the n-th of a list": (r"\bnth\(", {"attention/block_list.cuh", "attention/schedule.cuh"}),
}  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_nobody_else_says(room: str) -> None:
    pattern, allowed = ROOMS[room]
    folder = kernels_folder()
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.cu*")}
    code = {name: re.sub(r"//.*", "", text) for name, text in files.items()}
    assert {name for name, text in code.items() if re.search(pattern, text)} == allowed
