"""Parts of an attention put together, in one launch for up to MOST of them (kernels_cu/merge/merge.cu)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..problem import ITEMSIZE, View, contiguous, to_bshd
from . import alone
from .params import TYPES
from .source import FORMATS, inlined

WARPS = 4  # rows of a block
EACH = 4  # numbers of a lane
NAME = "attention_merge"
MOST, MOST_STRIDED = 240, 60  # parts of a launch: their addresses, and strides of each that differ, are its parameters

Part = tuple[View, View]  # out and lse


class Merging(NamedTuple):
    """Parts and the result of them, as a program and its parameters have it."""

    dtype: str
    out_dtype: str
    parts: int
    strided: bool  # whether parts lie otherwise than the first
    vectors: bool  # whether EACH numbers are read and written at once
    rows: int
    behind: bytes  # what stands in its parameters behind the addresses

    @classmethod
    def of(cls, parts: Sequence[Part], into: Part, layout: str) -> Merging:
        outs, lses = ([x[n] for x in (*parts, into)] for n in range(2))
        of_outs, of_lses = [_axes(x, layout) for x in outs], [_lse_axes(x) for x in lses]
        order = sorted(range(3), key=lambda axis: -of_outs[0][axis])  # neighbours in memory are neighbours in a launch
        strides, lse_strides = ([[x[axis] for axis in order] for x in xs] for xs in (of_outs, of_lses))
        strided = any(x != xs[0] for xs in (strides, lse_strides) for x in xs[:-1])
        of_each = len(parts) if strided else 1
        batch, rows, heads, columns = to_bshd(outs[0].shape, layout)
        lengths = (batch, rows, heads)
        aligned = all(x.ptr % (EACH * ITEMSIZE[x.dtype]) == 0 for x in outs)
        vectors = aligned and columns % EACH == 0 and not any(n % EACH for x in strides for n in x)
        numbers = []
        for xs in (strides[:of_each], lse_strides[:of_each], strides[-1:], lse_strides[-1:]):
            numbers += [n % 2**64 for x in xs for n in x]  # they may be negative
        numbers += [lengths[axis] for axis in order]
        behind = struct.pack(f"<{len(numbers)}Qi4x", *numbers, columns)
        return cls(outs[0].dtype, outs[-1].dtype, len(parts), strided, vectors, batch * rows * heads, behind)

    @property
    def blocks(self) -> int:
        return -(-self.rows // WARPS)

    def source(self) -> str:
        given, _, _, accum = TYPES[self.dtype]
        of_each = self.parts if self.strided else 1
        lines = [
            *FORMATS,
            f"using In = {given};",
            f"using Product = {given};",
            f"using Out = {TYPES[self.out_dtype][2]};",
            f"using Accum = {accum};",
            f"using Number = unsigned{' long long' * (self.rows >= 2**31)};  // of a row",
            f"constexpr int MERGED = {self.parts};",
            f"constexpr bool STRIDED = {str(self.strided).lower()}, VECTORS = {str(self.vectors).lower()};",
            "struct Axes { long long at[3]; };",
            "struct Params {",
            "    const In* outs[MERGED];",
            "    const Accum* lses[MERGED];",
            "    Out* out;",
            "    Accum* lse;",
            f"    Axes strides[{of_each}], lse_strides[{of_each}], out_strides, new_lse_strides;",
            "    unsigned long long length[3];",
            "    int columns;",
            "};",
        ]
        return "\n".join(lines) + "\n" + inlined("merge/merge.cu")

    def params(self, addresses: Sequence[int]) -> bytes:
        """The kernel's parameter, for the addresses of all outs, then of all lses, then of what is written."""
        return struct.pack(f"<{len(addresses)}Q", *addresses) + self.behind

    def launch(self, addresses: Sequence[int], ordinal: int, stream: int) -> None:
        if self.rows == 0:
            return
        program = self._replace(rows=2**31 * (self.rows >= 2**31), behind=b"")  # without what a launch has of its own
        alone.launch(program, NAME, self.params(addresses), (self.blocks, 32 * WARPS), ordinal, stream)


class Prepared:
    """A class of calls: parts, and arrays to write, of the same shapes, strides, dtypes and alignments.

    What many parts make is of float32 until the last launch (of float64 where they are).
    """

    def __init__(self, lib: Any, outs: list[Any], lses: list[Any], into: list[Any], layout: str) -> None:
        self.ordinal, dtype = lib.device(outs[0]), lib.view(outs[0]).dtype
        kept = "float64" if dtype == "float64" else "float32"
        shapes = tuple(outs[0].shape), tuple(lses[0].shape)
        self._last = (shapes[0], dtype, self.ordinal), (shapes[1], kept, self.ordinal)
        self._kept = (shapes[0], kept, self.ordinal), self._last[1]
        parts = [(lib.view(x), lib.view(y)) for x, y in zip(outs, lses)]
        alike = len({(lib.signature(x), lib.signature(y)) for x, y in zip(outs, lses)}) == 1
        self.steps: list[list[Merging]] = []  # launches on what those of the step before have made
        while not self.steps or len(parts) > 1:
            most = MOST if alike or self.steps else MOST_STRIDED
            last = len(parts) <= most
            to = tuple(_view(*x) for x in (self._last if last else self._kept))
            if last and into:
                to = lib.view(into[0]), lib.view(into[1])
            step = [Merging.of(parts[n : n + most], (to[0], to[1]), layout) for n in range(0, len(parts), most)]
            self.steps.append(step)
            parts = [(to[0], to[1])] * len(step)

    def run(self, lib: Any, outs: Sequence[Any], lses: Sequence[Any], into: Sequence[Any]) -> tuple[Any, Any]:
        """(out, lse), `into` where these are given, on the current stream of the arrays' library."""
        stream, empty, pointer = lib.stream(self.ordinal), lib.empty, lib.pointer
        for step in self.steps:
            made, n = [], 0
            for merging in step:
                last = step is self.steps[-1]
                to = into if last and into else [empty(*x) for x in (self._last if last else self._kept)]
                end = n + merging.parts
                merging.launch([*map(pointer, (*outs[n:end], *lses[n:end], *to))], self.ordinal, stream)
                made.append(to)
                n = end
            outs, lses = [x for x, _ in made], [y for _, y in made]
        return outs[0], lses[0]


def _view(shape: tuple[int, ...], dtype: str, ordinal: int) -> View:
    """Of an array that a library makes, which is aligned for all."""
    return View(shape, contiguous(shape), dtype, f"cuda:{ordinal}", "")


def takes(views: Sequence[View]) -> bool:
    """Whether the numbers of a row lie side by side."""
    return all(x.shape[-1] < 2 or x.strides[-1] == 1 for x in views)


def _axes(x: View, layout: str) -> tuple[int, ...]:
    """Strides of batch, row and head."""
    return to_bshd(x.strides, layout, fill=0)[:3]


def _lse_axes(x: View) -> tuple[int, int, int]:
    """The same of an array (B, H, S), or without the first axes."""
    batch, head, row = (*(0,) * (3 - len(x.strides)), *x.strides)
    return batch, row, head
