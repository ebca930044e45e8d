"""Block masks: which blocks of pairs are there, and of those of which only some pairs are visible, which.

Block-sparse attention as in FlashAttention (Dao et al. 2022, section 3.3, Algorithm 5), exact for any pattern: blocks
are empty, full or partial, and a partial one has a bit for each pair. Memory is that of the blocks and the bits, never
Sq x Sk.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from .. import interop
from ..interop.protocol import Library
from ..problem import MaskKind
from . import tile_lists
from .patterns import Pattern
from .tile_lists import EMPTY, FULL, WORD, ListUse

LARGEST = 1 << 15  # a block, whose bits are 128 MB then
AT_ONCE = 1 << 23  # pairs that a function is asked of at once, unless a row of blocks has more


class BlockMask:
    """What `block_mask` makes; `attention(..., block_mask=...)` takes it. It never changes.

    What kernels read of it is made at the first call with kernels of other tiles, which waits for the GPU: make that
    call before a CUDA graph is captured, and keep the mask as long as the graph. Another mask of the same shape
    compiles nothing new, but that JAX traces each mask by itself.

    Attributes
    ----------
    kind
        `kind.shape`, (batch, heads, queries, keys) with 1 where all share a pattern, and `kind.device`.
    block : (int, int)
        Queries and keys of a block.
    """

    def __init__(self, kind: MaskKind, block: tuple[int, int], slots: Any, bits: Any) -> None:
        if slots is not None:
            _check_parts(kind.shape, block, slots, bits)
        self.kind, self.block = kind, block
        self._slots, self._bits = slots, bits  # see tile_lists
        self._lists: dict[ListUse, Any] = {}
        self.tensors: Any = None  # slots and bits as tensors of PyTorch, see make_tensors

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return self.kind.shape

    @property
    def nbytes(self) -> int:
        """Bytes of blocks, bits, and lists made so far."""
        return self._slots.nbytes + self._bits.nbytes + sum(x.nbytes for x in self._lists.values())

    def counts(self) -> dict[str, int]:
        """How many blocks are full, partial and empty."""
        full, empty = (int((self._slots == x).sum()) for x in (FULL, EMPTY))
        return {"full": full, "partial": self._slots.size - full - empty, "empty": empty}

    def share(self) -> float:
        """Of all pairs, those that are visible."""
        with _on(self.kind.device) as xp:
            sides = [
                xp.minimum(size, n - size * xp.arange(-(-n // size))) for n, size in zip(self.shape[2:], self.block)
            ]
            whole = ((self._slots == FULL) * (sides[0][:, None] * sides[1])).sum()
            visible = int(whole) + int(xp.unpackbits(self._bits.ravel().view(np.uint8)).sum(dtype=np.int64))
        return visible / max(1, math.prod(self.shape))

    def part(self, rows: tuple[int, int], keys: tuple[int, int], heads: tuple[int, int] | None = None) -> BlockMask:
        """The mask of some rows, keys and heads, [begin, end): these begin at multiples of its block, and end at such
        or where it ends. Nothing is asked again."""
        slots = self._slots
        if heads is not None and self.shape[1] > 1:
            slots = slots[:, slice(*heads)]
        for axis, name, (first, end), size, n in zip(
            (2, 3), ("rows", "keys"), (rows, keys), self.block, self.shape[2:]
        ):
            if not 0 <= first <= end <= n or first % size or (end % size and end != n):
                raise ValueError(
                    f"{name} is {(first, end)}; of {n} in blocks of {size} it must begin and end at multiples of that, "
                    f"or end at {n}"
                )
            slots = slots[(*[slice(None)] * axis, slice(first // size, -(-end // size)))]
        shape = (*slots.shape[:2], rows[1] - rows[0], keys[1] - keys[0])
        with _on(self.kind.device) as xp:
            slots = xp.array(slots)
            numbered = slots >= 0
            used, slots[numbered] = xp.unique(slots[numbered], return_inverse=True)
            return BlockMask(MaskKind(shape, self.kind.device), self.block, slots, self._bits[used])

    def hull(self) -> tuple[int, int]:
        """The first key and the last but one of the blocks that are not empty; (0, 0) where all are."""
        with _on(self.kind.device) as xp:
            found = xp.flatnonzero((self._slots != EMPTY).any(axis=(0, 1, 2)))
            if not len(found):
                return 0, 0
            return int(found[0]) * self.block[1], min(self.shape[3], (int(found[-1]) + 1) * self.block[1])

    def __repr__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.counts().items())
        rows, keys = self.block
        return f"<BlockMask {self.shape} on {self.kind.device}, blocks of {rows} x {keys}: {counts}>"

    def list_for(self, use: ListUse) -> Any:
        """The list that a kernel walks by (`tile_lists.make`), made once."""
        found = self._lists.get(use)
        if found is None:
            with _on(self.kind.device) as xp:
                found = tile_lists.make(xp, self._slots, self._bits, self.block, use.seq or self.shape[2:], use)
                # Another thread may have made it too, and launched with it: that one is kept.
                found = self._lists.setdefault(use, found if xp is np else _of_its_own(found))
        return found

    def make_tensors(self) -> None:
        """Have `tensors`, which share the memory of slots and bits: these as int16, since PyTorch hardly knows
        uint16."""
        if self.tensors is None:
            import torch
            from torch.utils._python_dispatch import _disable_current_modes

            share = torch.from_numpy if self.kind.device == "cpu" else torch.from_dlpack
            with torch.inference_mode(False), _disable_current_modes():  # real ones, whoever asks first
                self.tensors = share(self._slots), share(self._bits.view(np.int16))

    make_tensors._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it, instead of reading it

    def pairs(self, b: int, h: int, rows: slice, keys: Any) -> Any:
        """Which pairs of these queries and keys (an index) are visible: booleans; None: all, False: none. On
        the CPU."""
        batch, heads, _, seq_k = self.shape
        slots, (block_q, block_k) = self._slots[b % batch, h % heads], self.block
        j = np.arange(seq_k)[keys]
        first, last = rows.start // block_q, (rows.stop - 1) // block_q + 1
        slots = slots[first:last][:, np.unique(j // block_k)] if len(j) else slots[:0]
        if (slots == EMPTY).all():
            return False
        if (slots == FULL).all():
            return None
        i = np.arange(rows.start, rows.stop)[:, None]
        words = tile_lists.words(np, self._slots[b % batch, h % heads], self._bits, self.block, i, j[None] // WORD)
        return (words >> (j % WORD).astype(np.uint16)) & 1 != 0


def _check_parts(shape: tuple[int, ...], block: tuple[int, int], slots: Any, bits: Any) -> None:
    """ValueError where these are not what `tile_lists` says: kernels read by them, and they may come from a file."""
    rows, keys = check_block(block)
    grid = (*shape[:2], -(-shape[2] // rows), -(-shape[3] // keys))
    for name, x, dtype, want in (
        ("slots", slots, "int32", grid),
        ("bits", bits, "uint16", (len(bits), rows, keys // WORD)),
    ):
        if x.dtype != dtype or x.shape != want:
            raise ValueError(f"block_mask has {name} of {x.dtype} and shape {x.shape}; they must be {dtype}, {want}")
    if slots.size and not EMPTY <= int(slots.min()) <= int(slots.max()) < len(bits):
        raise ValueError(
            f"block_mask has slots from {slots.min()} to {slots.max()}; they must number {len(bits)} blocks"
        )


def make(
    source: Any,
    shape: tuple[int, ...] | None,
    block: int | tuple[int, int],
    blocks: Any,
    full: Any,
    like: Any,
    device: str | None,
) -> BlockMask:
    """`cupyflash.block_mask`; see there."""
    block = check_block(block)
    kind, device = _where(like, device)
    with _on(device) as xp:
        given = None if source is None or callable(source) else _booleans(xp, "source", source)
        shape = _shape(shape, given)
        if isinstance(source, Pattern):
            source.check(shape)
        elif callable(source):
            _check_function(source)
        grid = (*shape[:2], *(-(-n // size) for n, size in zip(shape[2:], block)))
        if source is None and blocks is None:
            raise ValueError("neither source nor blocks is given; at least one must be")
        if full is not None and blocks is None:
            raise ValueError("full is given without blocks; it names some of these")
        present = None if blocks is None else _of_blocks(xp, "blocks", blocks, grid)
        whole = None if full is None else _of_blocks(xp, "full", full, grid) & present
        if source is None:
            slots = xp.where(present, FULL, EMPTY).astype(np.int32)
            bits = xp.zeros((0, block[0], block[1] // WORD), np.uint16)
        else:
            slots, bits = tile_lists.from_pairs(
                xp, _rows(xp, source if given is None else given, kind, shape, block), shape, block, present, whole
            )
        if xp is not np:  # the first call may come on another stream
            xp.cuda.get_current_stream().synchronize()
        made = BlockMask(MaskKind(shape, device), block, slots, bits)
    if kind == "torch":
        made.make_tensors()
    return made


def _rows(
    xp: ModuleType, source: Any, kind: str, shape: tuple[int, ...], block: tuple[int, int]
) -> Iterator[tuple[slice, slice, slice, Any]]:
    """What the source says: (batch entries, heads, queries, booleans that broadcast to these and all keys), row by row
    of blocks, or some rows at once."""
    batch, heads, seq_q, seq_k = shape
    together = batch * heads * block[0] * seq_k <= AT_ONCE
    size = block[0] * max(1, AT_ONCE // max(1, batch * heads * block[0] * seq_k))
    ranges = [(slice(0, batch), slice(0, heads))]
    if not together:
        ranges = [(slice(b, b + 1), slice(h, h + 1)) for b in range(batch) for h in range(heads)]
    convert = (lambda x: x) if isinstance(source, Pattern) else _converter(xp, kind)
    for of_batch, of_heads in ranges:
        for first in range(0, seq_q, size):
            rows = slice(first, min(seq_q, first + size))
            want = of_batch.stop - of_batch.start, of_heads.stop - of_heads.start, rows.stop - first, seq_k
            if not callable(source):
                seen = xp.broadcast_to(source, shape)[of_batch, of_heads, rows]
            else:
                b, h, i, j = (
                    xp.arange(x.start, x.stop, dtype=np.int64) for x in (of_batch, of_heads, rows, slice(0, seq_k))
                )
                at = map(convert, (b[:, None, None, None], h[:, None, None], i[:, None], j))
                seen = _booleans(xp, "what source returns", _said(source, *at))
                if seen.ndim > 4 or any(n not in (1, m) for n, m in zip(seen.shape[::-1], want[::-1])):
                    raise ValueError(
                        f"source returns shape {seen.shape} for queries {rows.start} to {rows.stop}; it must broadcast "
                        f"to {want}"
                    )
            yield of_batch, of_heads, rows, xp.broadcast_to(seen, want)


def _said(source: Callable[..., Any], *at: Any) -> Any:
    try:
        return source(*at)
    except (ValueError, RuntimeError) as error:
        if "ambiguous" not in str(error):
            raise
        raise TypeError(
            "source asks for one truth (if, and, or, not) of arrays that hold many positions; combine what it compares "
            "by &, | and ~, and choose by where"
        ) from error


def _converter(xp: ModuleType, kind: str) -> Callable[[Any], Any]:
    """From an array of xp to one of the library of `like`."""
    if kind == "torch":
        import torch

        return torch.from_dlpack
    if kind == "jax":
        import jax

        return lambda x: jax.dlpack.from_dlpack(x.astype(np.int32))  # JAX has no int64 unless it is told to
    return lambda x: x


def _booleans(xp: ModuleType, name: str, x: Any) -> Any:
    if isinstance(x, (bool, np.bool_)):
        return xp.asarray(x)
    found = _taken(xp, name, x)
    if found.dtype != bool:
        raise TypeError(f"{name} has dtype {found.dtype}; it must be bool")
    return found


def _taken(xp: ModuleType, name: str, x: Any) -> Any:
    """x as an array of xp: one on a GPU must be on that of the mask, one on the CPU is copied there."""
    lib = interop.library(name, x)
    x = interop.adopted(lib, {name: x})[name]
    found, here = _device(lib, name, x), "cpu" if xp is np else f"cuda:{xp.cuda.Device().id}"
    if found not in ("cpu", here):
        raise ValueError(f"{name} is on {found}; it must be on {here}, as the mask is{', or on cpu' * (xp is not np)}")
    if xp is not np and lib.kind not in ("cupy", "numpy"):
        xp.cuda.Device().synchronize()  # what computes it runs on a stream of its own library
    return xp.asarray(x.detach() if lib.kind == "torch" else x)


def _device(lib: Library, name: str, x: Any) -> str:
    device = interop.view(lib, name, x).device
    if not device:
        raise TypeError(f"{name} is traced by JAX; it must be an array: make the mask outside jit")
    return device


def _of_blocks(xp: ModuleType, name: str, x: Any, grid: tuple[int, ...]) -> Any:
    """Booleans of `grid` from such, or from numbers of blocks of keys."""
    found = _taken(xp, name, x)
    if found.dtype.kind in "iu":
        want = (*grid[:3], "any number")
        if found.ndim not in (2, 3, 4) or any(n not in (1, m) for n, m in zip(found.shape[:-1][::-1], grid[:3][::-1])):
            raise ValueError(f"{name} has shape {found.shape}; as numbers of blocks it must broadcast to {want}")
        if found.size and not -1 <= int(found.min()) <= int(found.max()) < grid[3]:
            raise ValueError(
                f"{name} holds {int(found.min())} to {int(found.max())}; it must be from -1 (none) to {grid[3] - 1}"
            )
        numbers, found = found.astype(np.int64), xp.zeros((*found.shape[:-1], grid[3] + 1), bool)
        xp.put_along_axis(found, numbers % (grid[3] + 1), True, axis=-1)  # -1 is the place behind the last
        found = found[..., :-1]
    if found.dtype != bool:
        raise TypeError(f"{name} has dtype {found.dtype}; it must be bool, or integers: numbers of blocks")
    if found.ndim > 4 or any(n not in (1, m) for n, m in zip(found.shape[::-1], grid[::-1])):
        raise ValueError(
            f"{name} has shape {found.shape}; it must broadcast to {grid}, (batch, head, blocks of queries, of keys)"
        )
    return xp.broadcast_to(found, grid)


def _check_function(source: Any) -> None:
    try:
        inspect.signature(source).bind("b", "h", "i", "j")
    except TypeError:
        hint = ": call it" if getattr(source, "__module__", "") == Pattern.__module__ else ""
        raise TypeError(f"source is {source!r}; it must be a function of (b, h, i, j){hint}") from None
    except ValueError:  # a builtin, which does not say
        pass


def check_block(block: Any) -> tuple[int, int]:
    sizes = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    try:
        sizes = tuple(operator.index(n) for n in sizes)
    except TypeError:
        sizes = ()
    if len(sizes) != 2 or any(n % WORD or not WORD <= n <= LARGEST for n in sizes):
        raise ValueError(
            f"block is {block!r}; it must be a multiple of {WORD} up to {LARGEST}, or two: (queries, keys)"
        )
    return sizes[0], sizes[1]


def _shape(shape: Any, given: Any) -> tuple[int, int, int, int]:
    if shape is None:
        if given is None:
            raise TypeError("shape is None; it must be (batch, heads, queries, keys) where source is no array")
        shape = given.shape
    try:
        found = tuple(operator.index(n) for n in shape)
    except TypeError:
        found = ()
    if len(found) not in (2, 4) and (given is None or len(found) != 3) or any(n < 0 for n in found):
        raise ValueError(f"shape is {shape!r}; it must be (batch, heads, queries, keys) or (queries, keys)")
    found = (*(1,) * (4 - len(found)), *found)
    batch, heads, seq_q, seq_k = found
    if given is not None and (given.ndim > 4 or any(n not in (1, m) for n, m in zip(given.shape[::-1], found[::-1]))):
        raise ValueError(f"source has shape {given.shape}; it must broadcast to {found}, (batch, head, query, key)")
    return batch, heads, seq_q, seq_k


def _where(like: Any, device: str | None) -> tuple[str, str]:
    """The library whose arrays a function gets, and the device of the mask."""
    if like is not None:
        lib = interop.library("like", like)
        if device is not None:
            raise ValueError(f"like and device={device!r} are given; one of them says where the mask is")
        return lib.kind, _device(lib, "like", interop.adopted(lib, {"like": like})["like"])
    device = "cpu" if device is None else device
    if device == "cuda":
        device = "cuda:0"
    kind, _, number = device.partition(":") if isinstance(device, str) else ("", "", "")
    if device != "cpu" and not (kind == "cuda" and number.isdecimal()):
        raise ValueError(f"device is {device!r}; it must be 'cpu' or 'cuda:N'")
    return "numpy" if device == "cpu" else "cupy", device


class _on:
    """NumPy, or CuPy with the device at hand."""

    def __init__(self, device: str) -> None:
        self._device: Any = None
        self._number = None if device == "cpu" else int(device.partition(":")[2])

    def __enter__(self) -> Any:
        if self._number is None:
            return np
        from ..gpu.device import current, import_cupy

        cupy = import_cupy()
        current(self._number)  # says what is missing
        self._device = cupy.cuda.Device(self._number)
        self._device.__enter__()
        return cupy

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._device.__exit__(*error)


def _of_its_own(x: Any) -> Any:
    """A CuPy array in memory that no pool has: it is not given away as long as kernels on any stream may read it."""
    import cupy

    own = cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(1, x.nbytes)), 0))
    own[...] = x
    cupy.cuda.get_current_stream().synchronize()
    return own
