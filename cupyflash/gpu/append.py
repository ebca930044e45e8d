"""The kernel that writes new rows of K and V to caches in place, and turns Q, in one launch
(kernels_cu/append/append.cu)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .. import cached
from ..overlap import extent, sharing
from ..problem import ITEMSIZE, AttentionProblem, View, contiguous, to_bshd
from . import alone
from .params import EIGHT, TYPES
from .source import FORMATS, inlined

THREADS = 128
MOST_LANES = 1024  # of a row whose largest number they find: a block
NAME = "attention_append"
MOST = 2**31 - 1  # blocks of a launch
_MOST_KEPT = 256
_INTEGERS = {"int32": "int", "int64": "long long"}
_MADE = {"seqlens_k": "Length", "cu_seqlens_q": "Offset", "page_table": "Page", "slots": "Slot"}
_GIVEN = ("rotary[0]", "rotary[1]", *_MADE)
_CACHES = ("k_cache", "v_cache")


class Program(NamedTuple):
    """What the kernel is compiled with."""

    dtype: str
    width: int  # numbers that a thread reads and writes at once
    of_angles: str  # dtype of the tables; "" without
    interleaved: bool
    integers: tuple[tuple[str, str], ...]  # those that are given, with their dtypes
    kept: str = ""  # dtype of caches of 8 bits
    row_scales: tuple[bool, bool] = (False, False)  # whether rows of K, of V, have scales of their own
    lanes: int = 1  # that find one of these

    @property
    def threads(self) -> int:
        return self.lanes if self.lanes > 32 else THREADS

    def source(self) -> str:
        given, _, _, accum = TYPES[self.dtype]
        integers = dict(self.integers)
        flags = {
            "PACKED": "cu_seqlens_q" in integers, "PAGED": "page_table" in integers, "SLOTS": "slots" in integers,
            "ROTARY": bool(self.of_angles), "INTERLEAVED": self.interleaved, "EIGHT": bool(self.kept),
            "K_ROW_SCALES": self.row_scales[0], "V_ROW_SCALES": self.row_scales[1],
        }  # fmt: skip
        lines = [
            *FORMATS,
            f"using In = {given};",
            f"using Accum = {accum};",
            f"using Kept = {EIGHT.get(self.kept, given)};",
            f"using Table = {TYPES[self.of_angles or 'float32'][0]};",
            *(f"using {name} = {_INTEGERS[integers.get(of, 'int32')]};" for of, name in _MADE.items()),
            f"constexpr int THREADS = {self.threads}, WIDTH = {self.width}, LANES = {self.lanes};",
            f"constexpr float LARGEST = {cached.LARGEST.get(self.kept, 1.0)}f;",
            *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
            "struct Strides { long long entry, row, head, column; };",
            "struct Params {",
            "    const In* from[3];  // K, V, Q",
            "    void* to[3];  // Kept, Kept, In",
            "    float* scales[2];  // of K, of V; null where they are `numbers`",
            "    const Table *cos, *sin;",
            *(f"    const {name}* {of};" for of, name in _MADE.items()),
            "    Length* totals;",
            "    Strides from_strides[3], to_strides[3], scale_strides[2];",
            "    long long cos_strides[2], sin_strides[2], length_stride, offset_stride;",
            "    long long table_strides[2], slot_strides[2];",
            "    long long entries, page, most, positions;",
            "    unsigned blocks, blocks_of_row, rows, heads[3], pieces[3], pieces_of_head[3];",
            "    int columns[3], half, sequences;",
            "    float numbers[2];",
            "};",
        ]
        return "\n".join(lines) + "\n" + inlined("append/append.cu")


class Place(NamedTuple):
    """How large everything is that rows are looked up in."""

    groups: int  # of new rows, each of a sequence; 1 where they are packed, or slots say where they belong
    rows: int  # of each
    sequences: int
    entries: int  # of a cache: sequences, or pages
    page: int  # rows of each
    most: int  # that a sequence may have

    @classmethod
    def behind(cls, problem: AttentionProblem, rows: int, cache: tuple[int, int]) -> Place:
        """Behind those that sequences have; `cache`: the first two axes of one."""
        groups = 1 if problem.rows_q is not None else problem.batch
        return cls(groups, rows, problem.batch, *cache, problem.seq_k)

    @classmethod
    def in_slots(cls, slots: tuple[int, ...], cache: tuple[int, int]) -> Place:
        return cls((1, *slots)[-2], slots[-1], 0, *cache, 0)


class Appending(NamedTuple):
    """A launch but for the addresses."""

    program: Program
    blocks: int
    behind: bytes  # what stands in its parameters behind the addresses

    def params(self, addresses: Sequence[int]) -> bytes:
        """For the addresses of new K, V and Q, of the caches and turned Q, of scales, of what is given of `_GIVEN`, and
        of the lengths that are made."""
        return struct.pack(f"<{len(addresses)}Q", *addresses) + self.behind

    def launch(self, addresses: Sequence[int], ordinal: int, stream: int) -> None:
        alone.launch(self.program, NAME, self.params(addresses), (self.blocks, self.program.threads), ordinal, stream)


def planned(
    given: Sequence[tuple[str, View]],
    place: Place,
    layout: str,
    interleaved: bool,
    numbers: Mapping[str, float] | None = None,
) -> Appending | None:
    """`given`: the arrays by name, q among them where it is turned; of pointers the last 4 bits matter. `numbers`: what
    caches of 8 bits are multiplied by, where that is no array. None where there is nothing to write, or too much."""
    views = dict(given)
    of = [views["k_new"], views["v_new"], *([views["q"]] if "q" in views else [])]
    caches = [views[name] for name in _CACHES]
    to = [*caches, *(_made(x) for x in of[2:])]
    shapes = [to_bshd(x.shape, layout) for x in of]
    columns, heads = [x[3] for x in shapes], [x[2] for x in shapes]
    cos = views.get("rotary[0]")
    half = cos.shape[1] if cos else 0
    strides = [[_strides(x, layout) for x in xs] for xs in (of, to)]
    width = 16 // ITEMSIZE[of[0].dtype]
    while width > 1 and not (
        not any(n % width for n in (*columns, half))
        and all(_in_vectors(x, width) for x in (*of, *to))
        and all(_in_vectors(x, min(width, 16 // ITEMSIZE[x.dtype])) for x in (cos, views.get("rotary[1]")) if x)
    ):
        width //= 2
    eight = cached.of_eight(caches[0])
    scales = [views.get(name) for name in cached.SCALES]
    row_scales = (cached.of_rows(scales[0], caches[0]), cached.of_rows(scales[1], caches[1]))
    of_head = [-(-n // (2 * width)) for n in columns]
    lanes = 1
    if any(row_scales):
        lanes = 1 << (max(*of_head[:2], 1) - 1).bit_length()
        of_head[:2] = lanes, lanes
    integers = tuple((name, views[name].dtype) for name in _MADE if name in views)
    of_angles = cos.dtype if cos else ""
    kept = caches[0].dtype if eight else ""
    program = Program(of[0].dtype, width, of_angles, interleaved and cos is not None, integers, kept, row_scales, lanes)
    pieces = [n * m for n, m in zip(heads, of_head)]
    if any(row_scales):  # whole warps of K, and of V
        pieces[:2] = [-(-n // 32) * 32 for n in pieces[:2]]
    blocks_of_row = -(-sum(pieces) // program.threads)
    blocks = place.groups * place.rows * blocks_of_row
    lengths = "seqlens_k" in views
    whole = blocks + (-(-place.sequences // program.threads) if lengths else 0)
    if not blocks or not place.entries * place.page or not (place.most or not lengths) or whole > MOST:
        return None
    if lanes > MOST_LANES:
        return None
    of_scales = [_scale_strides(x, layout) for x in scales]
    wide = [n for side in strides for n in _flat(side, 12)] + _flat(of_scales, 8)
    for name in _GIVEN:
        axes = 1 if name in ("seqlens_k", "cu_seqlens_q") else 2
        own = views[name].strides if name in views else ()
        wide += [*(0,) * (axes - len(own)), *own]
    wide += [place.entries, place.page, place.most, cos.shape[0] if cos else 0]
    small = [blocks, blocks_of_row, place.rows, *_flat([heads], 3), *_flat([pieces], 3), *_flat([of_head], 3, 1)]
    small += [*_flat([columns], 3), half, place.sequences]
    factors = [(numbers or {}).get(name, 1.0) for name in cached.SCALES]
    behind = struct.pack(f"<{len(wide)}Q{len(small)}I2f4x", *(n % 2**64 for n in wide), *small, *factors)
    return Appending(program, whole, behind)


class Prepared:
    """A class of calls: arrays of the same shapes, strides, dtypes and alignments."""

    def __init__(self, lib: Any, views: Mapping[str, View], appending: Appending) -> None:
        self._lib, self._views, self._appending = lib, views, appending
        of_rows = [x for x in cached.SCALES if x in views and cached.of_rows(views[x], views["k_cache"])]
        self._written = [*_CACHES, *of_rows]
        there = [n for n, x in enumerate(views.values()) if 0 not in x.shape]
        told = [n for n, name in enumerate(views) if name in self._written and n in there]
        read = [n for n in there if n not in told]
        self._pairs = [*itertools.combinations(told, 2), *itertools.product(read, told)]
        self._extents = [extent(x._replace(ptr=0)) for x in views.values()]
        self._apart: set[tuple[int, ...]] = set()  # addresses at which they were seen to share nothing
        like = [views.get(name) for name in ("seqlens_k", "q")]
        self._makes = [x and (x.shape, x.dtype) for x in like]
        # Of the arrays' addresses, those of what is made, and a 0 behind them.
        found = {name: n for n, name in enumerate((*views, "totals", "turned"))}
        order = ("k_new", "v_new", "q", *_CACHES, "turned", *cached.SCALES, *_GIVEN, "totals")
        self._in_order = itemgetter(*[found.get(name, -1) for name in order])

    def run(
        self, arrays: Mapping[str, Any], at: Mapping[str, int] | None = None
    ) -> tuple[Any | None, Any | None] | None:
        """Write, on the current stream of the arrays' library. Lengths behind the call, where there are lengths, and
        the q that is given, turned; None, and nothing is done, where arrays share memory. `at`: their addresses, where
        they are known already."""
        lib, ordinal = self._lib, self._lib.device(arrays["k_cache"])
        pointer = lib.pointer
        addresses = tuple([pointer(arrays[name]) if at is None else at[name] for name in self._views])
        if addresses not in self._apart:
            extents = [(at + first, at + end) for at, (first, end) in zip(addresses, self._extents)]
            views = [*self._views.values()]
            if sharing(self._pairs, extents, lambda n: views[n]._replace(ptr=addresses[n])):
                return None  # one thread waits for no other
            if len(self._apart) >= _MOST_KEPT:
                self._apart.clear()
            self._apart.add(addresses)
        totals, q = [None if x is None else lib.empty(*x, ordinal) for x in self._makes]
        made = [0 if x is None else pointer(x) for x in (totals, q)]
        self._appending.launch(self._in_order((*addresses, *made, 0)), ordinal, lib.stream(ordinal))
        for name in self._written:
            lib.written(arrays[name])
        return totals, q


def prepare(
    lib: Any,
    arrays: Mapping[str, Any],
    place: Place,
    layout: str,
    interleaved: bool,
    numbers: Mapping[str, float] | None = None,
) -> Prepared | None:
    """Of new rows, caches, scales of these, what says where rows belong, and q where it is to be turned; `numbers` as
    of `planned`. None where there is nothing to write, or too much."""
    views = {name: lib.view(x) for name, x in arrays.items()}
    appending = planned([*views.items()], place, layout, interleaved, numbers)
    return None if appending is None else Prepared(lib, views, appending)


def _made(x: View) -> View:
    """Of an array like x that a library makes, which is aligned for all."""
    return View(x.shape, contiguous(x.shape), x.dtype, x.device, x.kind)


def _strides(x: View, layout: str) -> tuple[int, int, int, int]:
    """Of entry (or sequence), row, head and column."""
    return to_bshd(x.strides, layout, fill=0)


def _scale_strides(x: View | None, layout: str) -> tuple[int, int, int, int]:
    """The same of scales; 0 along the axes that they do not have."""
    if x is None or x.shape in ((), (1,)):
        return (0, 0, 0, 0)
    return (0, 0, x.strides[0], 0) if len(x.shape) == 1 else to_bshd((*x.strides, 0), layout, fill=0)


def _in_vectors(x: View, width: int) -> bool:
    """Whether columns of x are read so many at once."""
    *outer, columns = zip(x.shape, x.strides)
    alone = columns[0] < 2 or columns[1] == 1
    return alone and x.ptr % (width * ITEMSIZE[x.dtype]) == 0 and not any(n > 1 and s % width for n, s in outer)


def _flat(rows: Sequence[Sequence[int]], most: int, fill: int = 0) -> list[int]:
    found = [n for row in rows for n in row]
    return found + [fill] * (most - len(found))
