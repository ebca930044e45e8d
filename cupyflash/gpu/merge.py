"""Parts of an attention put together, in one launch for up to MOST of them (kernels_cu/merge/merge.cu)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..problem import ITEMSIZE, View, to_bshd
from . import compiler, device
from .params import TYPES
from .source import inlined

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
    params: bytes

    @classmethod
    def of(cls, parts: Sequence[Part], into: Part, layout: str) -> Merging:
        """`params` has the addresses of the views."""
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
        numbers = [x.ptr for x in (*outs[:-1], *lses[:-1], outs[-1], lses[-1])]
        for xs in (strides[:of_each], lse_strides[:of_each], strides[-1:], lse_strides[-1:]):
            numbers += [n % 2**64 for x in xs for n in x]  # they may be negative
        numbers += [lengths[axis] for axis in order]
        params = struct.pack(f"<{len(numbers)}Qi4x", *numbers, columns)
        return cls(outs[0].dtype, outs[-1].dtype, len(parts), strided, vectors, batch * rows * heads, params)

    @property
    def blocks(self) -> int:
        return -(-self.rows // WARPS)

    def source(self) -> str:
        given, _, _, accum = TYPES[self.dtype]
        of_each = self.parts if self.strided else 1
        lines = [
            "struct half_t { unsigned short bits; };",
            "struct bfloat16_t { unsigned short bits; };",
            "struct float8_t { unsigned char bits; };",
            f"using In = {given};",
            f"using Product = {given};",
            f"using Out = {TYPES[self.out_dtype][2]};",
            f"using Accum = {accum};",
            f"using Number = unsigned{' long long' * (self.rows >= 2**31)};  // of a row",
            f"constexpr int PARTS = {self.parts};",
            f"constexpr bool STRIDED = {str(self.strided).lower()}, VECTORS = {str(self.vectors).lower()};",
            "struct Axes { long long at[3]; };",
            "struct Params {",
            "    const In* outs[PARTS];",
            "    const Accum* lses[PARTS];",
            "    Out* out;",
            "    Accum* lse;",
            f"    Axes strides[{of_each}], lse_strides[{of_each}], out_strides, new_lse_strides;",
            "    unsigned long long length[3];",
            "    int columns;",
            "};",
        ]
        return "\n".join(lines) + "\n" + inlined("merge/merge.cu")

    def launch(self, ordinal: int, stream: int) -> None:
        from cupy.cuda import Device, driver, runtime

        from .launch import Arguments

        arguments = Arguments(self.params)
        with Device(ordinal):
            runtime.setDevice(ordinal)  # the driver wants a context, on this thread too
            function = _function(self._replace(rows=2**31 * (self.rows >= 2**31), params=b""), ordinal)
            driver.launchKernel(function.ptr, self.blocks, 1, 1, 32 * WARPS, 1, 1, 0, stream, arguments.address, 0)


def merge(lib: Any, outs: list[Any], lses: list[Any], into: Sequence[Any], layout: str) -> tuple[Any, Any]:
    """(out, lse), `into` where these are given, on the current stream of the arrays' library.

    What many parts make is of float32 until the last launch (of float64 where they are).
    """
    ordinal, dtype = lib.device(outs[0]), lib.view(outs[0]).dtype
    kept = "float64" if dtype == "float64" else "float32"
    shapes = tuple(outs[0].shape), tuple(lses[0].shape)
    most = MOST_STRIDED
    if len(outs) > most and len({(lib.signature(x), lib.signature(y)) for x, y in zip(outs, lses)}) == 1:
        most = MOST
    while True:
        last = len(outs) <= most
        made = []
        for n in range(0, len(outs), most):
            if last and into:
                to = into[0], into[1]
            else:
                to = (lib.empty(shapes[0], dtype if last else kept, ordinal), lib.empty(shapes[1], kept, ordinal))
            made.append(to)
            parts = [(lib.view(x), lib.view(y)) for x, y in zip(outs[n : n + most], lses[n : n + most])]
            merging = Merging.of(parts, (lib.view(to[0]), lib.view(to[1])), layout)
            if merging.rows:
                merging.launch(ordinal, lib.stream(ordinal))
        if last:
            return made[0]
        outs, lses, most = [x for x, _ in made], [y for _, y in made], MOST


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


@functools.lru_cache(64)
def _function(merging: Merging, ordinal: int) -> Any:
    """`merging` without what a launch has of its own."""
    compiled = compiler.compile_source(merging.source(), device.current(ordinal).name)
    return compiler.load(compiled, [(NAME, 0)], ordinal)[0]
