"""The few things that are done to arrays of any library here: room for them, views, copies."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import interop
from ..gpu.copies import Copies, Piece, Side
from ..namespaces import namespace
from ..problem import ITEMSIZE
from .rows import Span

SIXTEEN = ("float16", "bfloat16")


class Place(NamedTuple):
    """Of a part of an array."""

    spans: tuple[tuple[int, Span], ...]  # of axes of which it is not all
    slices: tuple[slice, ...]


def library(x: Any) -> str:
    """ "numpy", "torch", "cupy", ...: whose array it is."""
    of: Any = type(x)
    return _library(of)


@functools.cache
def _library(of: Any) -> str:
    return "numpy" if issubclass(of, np.ndarray) else str(of.__module__).partition(".")[0]


def empty(shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
    """Room of the library, the device and (unless another is named) the dtype of `like`."""
    kind = library(like)
    if kind == "torch":
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=getattr(functions(kind), dtype))
    return functions(kind).empty(shape, like.dtype if dtype is None else dtype)


def in_a_row(x: Any) -> Any:
    """A contiguous tensor in one axis. (Of one number PyTorch keeps any stride, by which no bytes can be viewed.)"""
    x = x.reshape(-1)
    return x if x.stride(0) == 1 else x.as_strided(x.shape, (1,))


functions = functools.cache(namespace)  # a module that is imported again costs several us


def taken(x: Any, place: Place | None) -> Any:
    """The part of x at a place, a view of it where that is not all: each costs the host as much as half a launch."""
    if place is None:
        return x
    if library(x) != "torch":
        return x[place.slices]
    for axis, (begin, end) in place.spans:  # in half of the time
        x = x.narrow(axis, begin, end - begin)
    return x


def alone(x: Any, place: Place | None) -> Any:
    """The same for who keeps it: of one batch entry elements that lie side by side have strides that say so, by which
    PyTorch judges whether arrays lie alike."""
    found = taken(x, place)
    return found if found is x else found.reshape(found.shape)


def place(*axes: tuple[Span, int]) -> Place | None:
    """Of an array (B, ...), as `taken` takes it: a span of each further axis, which has so many entries."""
    spans = tuple((n, span) for n, (span, count) in enumerate(axes, 1) if span != (0, count))
    slices = (slice(None), *(slice(*span) for span, _ in axes))
    return Place(spans, slices) if spans else None


class Cuts(NamedTuple):
    """Of an array in parts along an axis."""

    axis: int
    sizes: tuple[int, ...]  # of all of it, from its beginning
    order: tuple[int, ...]  # which of these the parts are
    slices: tuple[tuple[slice, ...], ...]


def cuts(axis: int, spans: Sequence[Span], count: int) -> Cuts:
    """Of spans that do not overlap, of so many entries."""
    ends = sorted({0, count, *(x for span in spans for x in span)})
    begins = {begin: n for n, begin in enumerate(ends[:-1])}
    sizes = tuple(b - a for a, b in itertools.pairwise(ends)) or (0,)
    whole = (slice(None),) * axis
    return Cuts(axis, sizes, tuple(begins[a] for a, _ in spans), tuple((*whole, slice(*x)) for x in spans))


def cut_up(x: Any, of: Cuts) -> list[Any]:
    """The parts, views."""
    if len(of.sizes) == 1:
        return [x] * len(of.order)
    if library(x) != "torch":
        return [x[at] for at in of.slices]
    found = x.split_with_sizes(of.sizes, of.axis)  # one call of PyTorch for all
    return [found[n] for n in of.order]


def join_up(target: Any, parts: Sequence[Any], of: Cuts) -> None:
    """Write what all parts of an array are, of its dtype."""
    if len(parts) == 1:
        put(target, parts[0])
    elif parts:
        rising = [x for _, x in sorted(zip(of.order, parts), key=operator.itemgetter(0))]
        functions(library(target)).concatenate(rising, of.axis, out=target)


def zeros(shape: tuple[int, ...], like: Any, dtype: Any = None) -> Any:
    found = empty(shape, like, dtype)
    found[...] = 0
    return found


def wide(x: Any) -> str | None:
    """What sums of such numbers are kept in; None: in their own dtype."""
    return "float32" if dtype_name(x.dtype) in SIXTEEN else None


@functools.cache
def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def beside(x: Any) -> bool:
    """Whether its elements lie side by side, in their order."""
    return bool(x.is_contiguous() if library(x) == "torch" else x.flags.c_contiguous)


def strides(x: Any) -> tuple[int, ...]:
    """Bytes of each axis."""
    return tuple(n * x.itemsize for n in x.stride()) if library(x) == "torch" else x.strides


@functools.cache
def lying(kind: str) -> Callable[[Any], tuple[int, ...]]:
    """What says how an array of a library lies: its strides, as they are there."""
    return functions(kind).Tensor.stride if kind == "torch" else operator.attrgetter("strides")


def packed(x: Any) -> Any:
    """x, or a copy, with its elements side by side."""
    return x if beside(x) else x.contiguous() if library(x) == "torch" else functions(library(x)).ascontiguousarray(x)


def put(target: Any, x: Any) -> None:
    """Write, rounded to the target's dtype."""
    if isinstance(target, np.ndarray):
        with np.errstate(over="ignore"):
            target[...] = x
    elif library(target) == "torch":
        target.copy_(x)
    else:
        target[...] = x


def put_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Write arrays to others of their shapes and dtypes, of which none is read, but for those that are there: CuPy's in
    one launch, as its own copies find the place of each element anew."""
    pairs = [pair for pair in pairs if pair[0] is not pair[1]]
    if not pairs or library(pairs[0][0]) != "cupy":
        for target, x in pairs:
            put(target, x)
        return
    lib: Any = interop.library("q", pairs[0][0])
    ordinal, every = lib.device(pairs[0][0]), [x for pair in pairs for x in pair]
    copies = copies_of(tuple((tuple(x.shape), to.strides, x.strides, x.itemsize) for to, x in pairs))
    copies.launch([*map(lib.pointer, every)], ordinal, lib.stream(ordinal))


@functools.lru_cache(256)
def copies_of(pairs: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int], ...]) -> Copies:
    """Of arrays, each as where it is written, then as it is read: shape, strides of both, bytes of an element."""
    return Copies(
        [
            Piece(Side(2 * n, 0, to), Side(2 * n + 1, 0, source), shape, size)
            for n, (shape, to, source, size) in enumerate(pairs)
        ]
    )


def put_sums(sums: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Write to arrays the sums of others of one dtype, added in their order and rounded once: on a GPU in one launch. A
    target may be the first of its parts, and no other's."""
    lib: Any = interop.library("q", sums[0][0]) if sums else None
    if lib is None or not lib.on_gpu(sums[0][0]):
        for target, parts in sums:
            _put_sum(target, parts)
        return
    ordinal, every = lib.device(sums[0][0]), [x for target, parts in sums for x in (target, *parts)]
    given, written = sums[0][1][0].dtype, sums[0][0].dtype
    lies = tuple([(tuple(target.shape), *map(strides, (target, *parts))) for target, parts in sums])
    copies = _sums_of(lies, dtype_name(given), dtype_name(written))
    copies.launch([*map(lib.pointer, every)], ordinal, lib.stream(ordinal))


@functools.lru_cache(256)
def _sums_of(sums: tuple[tuple[tuple[int, ...], ...], ...], given: str, written: str) -> Copies:
    """Of arrays, each as the shape of a sum, how it lies where it is written, and how each of its parts does."""
    pieces, n = [], 0
    for shape, *each in sums:
        to, source, *added = (Side(n + i, 0, lies) for i, lies in enumerate(each))
        pieces.append(Piece(to, source, shape, ITEMSIZE[given], tuple(added)))
        n += len(each)
    return Copies(pieces, (given, written))


def _put_sum(target: Any, parts: Sequence[Any]) -> None:
    if len(parts) == 1:
        put(target, parts[0])
        return
    total = parts[0]
    for x in parts[1:-1]:
        total = total + x
    if (kind := library(target)) == "torch":
        functions(kind).add(total, parts[-1], out=target)
    else:
        with np.errstate(over="ignore"):
            functions(kind).add(total, parts[-1], out=target, casting="unsafe")


def four(x: Any, layout: str) -> Any:
    """An array in the caller's rank and layout as a (B, S, H, D) view."""
    axes = len(x.shape)
    if axes == 2:
        return x[None, :, None]
    x = x[None] if axes == 3 else x
    return x if layout == "bshd" else x.swapaxes(1, 2)


def three(lse: Any) -> Any:
    """A number for each row, (B, H, S), of what the caller has."""
    return lse if len(lse.shape) == 3 else lse[(None,) * (3 - len(lse.shape))]
