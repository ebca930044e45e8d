"""Tensor maps: what TMA wants to know of an array, encoded by the driver. Needs a GPU."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Mapping, Sequence

from ..problem import ITEMSIZE, AttentionProblem
from .early import bindings
from .kernel_plan import Box, KernelPlan, by_line

BYTES = 128  # of one map
# Of a map of windows entry n has the rows before row n, the last of which is row WINDOW - 1: what a box has behind them
# is outside of the map. Row r of entry n is row r + n - WINDOW of the array: the fifth axis takes addresses of 64 bits
# back so far at WINDOW (as Triton's ragged descriptors do). A map that begins before the array is a fault where nothing
# lies there.
WINDOW = 1 << 30
ROW = 128  # bytes of a box: as the swizzle of tile/swizzled.cuh takes them
ALIGNED = 64  # bytes, where a map begins


class Maps:
    """The maps that a plan's kernels take as their second parameter: those of `plan.maps`, in order, but for addresses.

    Outputs come last, and behind them stands whether they are there: where one lies as no map can tell (rows that do
    not begin and end at 16 bytes, negative strides) the kernel stores them by itself.
    """

    def __init__(self, plan: KernelPlan, problem: AttentionProblem, strides: Mapping[str, Sequence[int]]) -> None:
        p = problem
        # Of inputs the rows that are dead by position are left out: whatever they hold, they come as zeros
        # (attention/head.cuh).
        # A tangent is as what it is the tangent of.
        queries, keys = p.live
        firsts = {"q": queries.start, "dout": queries.start, "k": keys.start, "v": keys.start}
        # Rows and entries: packed sequences have one, and pages are entries of a pool.
        of_q, of_k = _entries(p, p.rows_q, p.seq_q), _entries(p, p.rows_k, p.cache or p.seq_k)
        seen_q = of_q if p.ragged else (len(queries), p.batch)
        seen_k = (p.page, p.pages) if p.page is not None else of_k if p.ragged else (len(keys), p.batch)
        shapes = {
            "q": (p.dim, seen_q[0], p.heads_q, seen_q[1]),
            "k": (p.dim, seen_k[0], p.heads_k, seen_k[1]),
            "v": (p.dim_v, seen_k[0], p.heads_k, seen_k[1]),
            "out": (p.dim_v, of_q[0], p.heads_q, of_q[1]),
            "dout": (p.dim_v, seen_q[0], p.heads_q, seen_q[1]),
            "dk": (p.dim, of_k[0], p.heads_k, of_k[1]),
            "dv": (p.dim_v, of_k[0], p.heads_k, of_k[1]),
            "dq": (p.dim, of_q[0], p.heads_q, of_q[1]),
        }
        self.arrays = []  # dtype, shape, strides, box of each
        self.skipped: list[int] = []  # bytes before the first row
        for box in plan.maps:
            if box.pairwise:
                dtype = next(x.dtype for x in plan.given if x.name == box.array)
                batch, head, row, _ = strides[box.array]
                # Along an axis that it is broadcast along, an array has one entry.
                lines = (p.rows_q or 0, 1) if by_line(p, box.array) else (p.seq_q, p.batch)
                lengths = ((lines[0], row), (p.heads_q, head), (lines[1], batch))
                shape: tuple[int, ...] = (p.seq_k, *(n if stride else 1 for n, stride in lengths))
            elif space := next((x for x in plan.workspace if x.name == box.array), None):
                dtype, shape = space.dtype, space.shape[::-1]
                row, head, batch = (math.prod(shape[: n + 1]) for n in range(3))
            else:
                own = plan.dq_dtype if box.array == "dq" else None
                dtype = own or plan.out_dtype or plan.dtype if box.array in plan.of.results else plan.dtype
                shape, (batch, row, head) = shapes[box.array.removeprefix("t")], strides[box.array]
            # The stride of an axis with one entry says nothing, and may be anything.
            size = ITEMSIZE[dtype]
            apart = tuple(size * stride if n > 1 else 16 for n, stride in zip(shape[1:], (row, head, batch)))
            if box.windows:
                shape = (shape[0], WINDOW, shape[2], shape[1] + 1, WINDOW + 1)
                apart = (*apart[:2], apart[0], 2**64 // WINDOW - apart[0])
            self.arrays.append((dtype, shape, apart, box))
            self.skipped.append(size * row * firsts.get(box.array.removeprefix("t"), 0))
        self.inputs = sum(box.array not in plan.of.results for box in plan.maps)
        outputs = self.arrays[self.inputs :]
        # A store is cut at 16 bytes of a row, not at an element: it would write what follows a row that ends in
        # between.
        sizes = [n for dtype, shape, apart, _ in outputs for n in (shape[0] * ITEMSIZE[dtype], *apart)]
        self.mappable = all(0 < n < 2**40 and n % 16 == 0 for n in sizes)


class PlacedMaps:
    """The parameter that `Maps` are, in memory for one launch at a time. `like`: others of them, that are kept."""

    def __init__(self, maps: Maps, like: PlacedMaps | None = None) -> None:
        count = len(maps.arrays)
        self._maps = maps
        self._at: list[int | None] = [None] * count if like is None else [*like._at]  # the address that each has
        whole = (ctypes.c_char * (BYTES * count + 2 * ALIGNED))()
        begin = -ctypes.addressof(whole) % ALIGNED
        self.memory = (ctypes.c_char * (BYTES * count + ALIGNED)).from_buffer(whole, begin)
        self._bytes, self._begin = memoryview(self.memory).cast("B"), ctypes.addressof(self.memory)
        if like is not None:
            self._bytes[:] = like._bytes

    def point(self, pointers: Sequence[int]) -> None:
        """To arrays at these addresses, in the order of `plan.maps`. Where one lies elsewhere than before its map is
        moved, not made anew."""
        maps = self._maps
        mapped = maps.mappable and not functools.reduce(operator.or_, pointers[maps.inputs :], 0) & 15
        for i in range(len(self._at) if mapped else maps.inputs):
            at = pointers[i]
            if at != self._at[i]:
                if self._at[i] is None:
                    self._bytes[BYTES * i : BYTES * (i + 1)] = encode(at + maps.skipped[i], *maps.arrays[i])
                else:
                    move(self._begin + BYTES * i, at + maps.skipped[i])
                self._at[i] = at
        self._bytes[BYTES * len(self._at)] = mapped


def _entries(problem: AttentionProblem, packed: int | None, rows: int) -> tuple[int, int]:
    return (rows, problem.batch) if packed is None else (packed, 1)


def encode(pointer: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: Box) -> bytes:
    """The map of an array (columns, rows, heads, batch, or entries of windows and what takes back) that moves in boxes.

    `strides` are those of all but columns, in bytes. RuntimeError with the driver's reason where it refuses.
    """
    driver = bindings()
    kind = driver.CUtensorMapDataType
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    status, found = driver.cuTensorMapEncodeTiled(
        {
            "float16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "float32": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            "bool": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            "float8_e4m3fn": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        }[dtype],
        len(shape),
        pointer,
        [u64(n) for n in shape],
        [u64(n) for n in strides],
        [u32(n) for n in (ROW // ITEMSIZE[dtype], box.rows, box.heads, *[1] * (len(shape) - 3))],
        [u32(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"the driver cannot describe an array of shape {shape} with strides of {strides} bytes at {pointer:#x} "
            f"to TMA ({status.name})"
        )
    return ctypes.string_at(found.getPtr(), BYTES)


def move(address: int, pointer: int) -> None:
    """Let the map at `address` be that of an array at `pointer`. RuntimeError with the driver's reason where it
    refuses."""
    driver = bindings()
    (status,) = driver.cuTensorMapReplaceAddress(driver.CUtensorMap(_ptr=address), pointer)
    if status:
        raise RuntimeError(f"the driver cannot move TMA's description of an array to {pointer:#x} ({status.name})")
