"""The kernel that copies pieces of arrays, beside what NumPy copies: without a GPU, and on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from copies_on_cpu import by_kernel, by_numpy
from cuda_on_cpu import needs_compiler
from on_cpu import Guarded

from cupyflash.gpu import compiler
from cupyflash.gpu.copies import _PROGRAM, MOST, NAME, TILE, Copies, Piece, Side, _plain


def side(array: int, x: np.ndarray, part: tuple[slice, ...]) -> tuple[Side, tuple[int, ...]]:
    """Where a part of an array is, and its lengths."""
    some = x[part]
    at = some.__array_interface__["data"][0] - x.__array_interface__["data"][0] if some.size else 0
    return Side(array, at, some.strides), some.shape


def piece(to: tuple[int, np.ndarray, Any], source: tuple[int, np.ndarray, Any]) -> Piece:
    (to_side, lengths), (from_side, of_source) = side(*to), side(*source)
    assert lengths == of_source
    return Piece(to_side, from_side, lengths, to[1].itemsize)


def poisoned(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Guarded:
    return Guarded(shape, np.dtype(dtype), drawn(rng, shape, dtype))


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape)) * kind.itemsize
    found = rng.integers(0, 2 if kind == bool else 256, count, np.uint8)
    return found.view(kind).reshape(shape)


def rows(begin: int, count: int) -> Any:
    return (slice(None), slice(begin, begin + count))


def same(x: np.ndarray, y: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))


@needs_compiler
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("dim", [64, 12, 9, 1])
@pytest.mark.parametrize("begin", [0, 1])  # elements behind a multiple of 16 bytes
def test_it_copies_what_numpy_does(dtype: str, dim: int, begin: int, rng: np.random.Generator) -> None:
    """Parts of heads, rows that begin anywhere, heads first, none, strides of 0, below 0, of columns, and past some;
    what lies between is left alone."""
    shape = (2, 29, 6, dim)
    flat = poisoned(rng, (begin + int(np.prod(shape)),), dtype).array
    x = flat[begin:].reshape(shape)
    y = poisoned(rng, (2, 6, 29, dim), dtype).array.swapaxes(1, 2)
    wide = drawn(rng, (2, 29, 6, 2 * dim), dtype)[..., ::2]
    backwards = drawn(rng, shape, dtype)[:, ::-1, :, ::-1]
    same_row = np.broadcast_to(drawn(rng, (2, 1, 6, dim), dtype), shape)
    apart = drawn(rng, (2, 29, 6, dim + 1), dtype)[..., :dim]
    given = [x, y, wide, backwards, same_row, apart]
    targets = [poisoned(rng, (2, 60, 6, dim), dtype) for _ in range(3)]
    heads = slice(2, 5)
    addresses = [*(z.pointer for z in targets), *(z.__array_interface__["data"][0] for z in given)]
    first, second, third = (z.array for z in targets)
    turned = third.reshape(2, 6, 60, dim).swapaxes(1, 2)
    copies = Copies([
        piece((0, first, rows(3, 20)), (3, x, rows(5, 20))),
        piece((0, first, rows(29, 29)), (4, y, rows(0, 29))),
        piece((0, first, rows(58, 0)), (4, y, rows(3, 0))),
        piece((1, second, (*rows(0, 29), heads)), (5, wide, (*rows(0, 29), heads))),
        piece((1, second, (*rows(30, 11), slice(0, 1))), (3, x, (*rows(18, 11), slice(5, 6)))),
        piece((1, second, (*rows(42, 18), heads)), (8, apart, (*rows(3, 18), heads))),
        piece((2, turned, rows(0, 29)), (6, backwards, rows(0, 29))),
        piece((2, turned, (*rows(31, 29), heads)), (7, same_row, (*rows(0, 29), heads))),
    ])  # fmt: skip
    before = [z.array.copy() for z in targets]
    by_numpy(copies, addresses)
    want = [z.array.copy() for z in targets]
    same(want[0][:, 3:23], x[:, 5:25])
    same(want[1][:, 30:41, :1], x[:, 18:, 5:])
    for last_first in (False, True):
        for z, old in zip(targets, before):
            z.array[...] = old
        by_kernel(copies, addresses, last_first)
        for n, (z, expected) in enumerate(zip(targets, want)):
            same(z.array, expected)
            z._is_input = False
            z.check(f"target {n}")


SUMS = [("float32", "bfloat16"), ("float32", "float16"), ("float32", "float32"), ("float64", "float64")]


@needs_compiler
@pytest.mark.parametrize("dtypes", SUMS, ids="-".join)
@pytest.mark.parametrize("dim", [64, 9])
def test_it_adds_in_order_and_rounds_once(dtypes: tuple[str, str], dim: int, rng: np.random.Generator) -> None:
    """Rows of arrays of other lengths; into heads of one; one source, several, itself and more than a launch takes."""
    many = 3 * MOST
    sources = [rng.standard_normal((2, 40 + n % 3, 3, dim)).astype(dtypes[0]) for n in range(many)]
    for x in sources[2:]:
        x *= 1e-3  # so that an order shows
    target = Guarded((2, 90, 6, dim), np.dtype(dtypes[1]))
    given = [(n, x, rows(n % 4, 21)) for n, x in enumerate(sources, 1)]
    pieces = [
        piece((0, target.array, (*rows(begin, 21), slice(1, 4))), some[0])._replace(
            itemsize=np.dtype(dtypes[0]).itemsize, added=tuple(side(*x)[0] for x in some[1:])
        )
        for begin, some in ((0, given[:1]), (21, given[1:3]), (42, given[2:7]), (69, given[7:]))
    ]
    addresses = [target.pointer, *(x.ctypes.data for x in sources)]
    kept = [x.copy() for x in sources]
    copies = Copies(pieces, dtypes)
    assert [len(x.sources) for x in copies.launches] == [8, MOST, MOST, many - 7 - 2 * (MOST - 1)]
    before = target.array.copy()
    by_numpy(copies, addresses)
    want = target.array.copy()
    expected = kept[2][:, 3:24] + kept[3][:, :21] + kept[4][:, 1:22] + kept[5][:, 2:23] + kept[6][:, 3:24]
    same(want[:, 42:63, 1:4], expected.astype(dtypes[1]))
    for last_first in (False, True):
        target.array[...] = before
        for x, y in zip(sources, kept):
            x[...] = y
        by_kernel(copies, addresses, last_first)
        same(target.array, want)
    target.check("target")
    assert all(np.array_equal(x, y) for n, (x, y) in enumerate(zip(sources, kept)) if n != 7)


@needs_compiler
def test_to_what_is_there_is_added(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((2, 29, 3, 8)).astype("float32") for _ in range(2))
    (to, lengths), (more, _) = side(0, x, rows(4, 20)), side(1, y, rows(9, 20))
    want = x.copy()
    want[:, 4:24] += y[:, 9:]
    by_kernel(Copies([Piece(to, to, lengths, 4, (more,))], ("float32", "float32")), [x.ctypes.data, y.ctypes.data])
    same(x, want)


@needs_compiler
def test_more_than_a_launch_and_a_block_hold(rng: np.random.Generator) -> None:
    """Pieces of many lengths, some longer than a tile, in an order of their own."""
    lengths = [int(n) for n in rng.permutation([*range(2 * MOST), 3 * TILE // 8, TILE // 8 + 1, 1])]
    total = sum(lengths)
    x, target = drawn(rng, (total,), "float64"), Guarded((total + len(lengths),), np.dtype("f8"))
    ends, pieces = np.cumsum([0, *lengths]), []
    for n, length in enumerate(lengths):
        to, source = (slice(ends[n] + n, ends[n] + n + length),), (slice(ends[n], ends[n] + length),)
        pieces.append(piece((0, target.array, to), (1, x, source)))
    copies = Copies(pieces)
    assert len(copies.launches) == 3  # what is empty is none
    by_kernel(copies, [target.pointer, x.ctypes.data])
    for n, length in enumerate(lengths):
        same(target.array[ends[n] + n : ends[n] + n + length], x[ends[n] : ends[n] + length])
        assert np.isnan(target.array[ends[n] + n + length])
    target.check("target")


def test_axes_along_which_both_sides_go_on_alike_are_one() -> None:
    x, y = np.zeros((2, 29, 6, 64), np.float16), np.zeros((2, 40, 3, 64), np.float16)
    heads_first, some = np.zeros((2, 6, 29, 64), np.float16).swapaxes(1, 2), (*rows(0, 20), slice(3))
    lse, odd = np.zeros((2, 6, 29, 1), np.float32).swapaxes(1, 2), np.zeros((29, 1, 6, 2), np.float16)[..., :1]

    def plain(to: Any, source: Any) -> list[tuple[Any, int]]:
        x = piece((0, *to), (1, *source))
        return [(tuple((n, *strides) for n, strides in z.axes), z.run) for z in _plain(x, x.itemsize)]

    assert plain((x, ()), (x, ())) == [((), x.nbytes)]
    assert plain((heads_first, ()), (heads_first, ())) == [((), x.nbytes)]
    assert plain((x, rows(3, 20)), (x, rows(0, 20))) == [(((2, 29 * 768, 29 * 768),), 20 * 768)]
    assert plain((y, some), (x, some)) == [(((2, 40 * 384, 29 * 768), (20, 384, 768)), 384)]
    assert plain((lse, rows(1, 9)), (lse, rows(0, 9))) == [(((12, 29 * 4, 29 * 4),), 36)]
    assert plain((x[0, :, 3:4, :1], ()), (odd[:, :, 2], ())) == [(((29, 768, 24),), 2)]  # axes of one element are none
    (first, _), (second, _) = [side(n, z, ()) for n, z in ((0, x[..., ::2]), (1, heads_first[..., ::2]))]
    each = list(_plain(Piece(first, second, (2, 29, 6, 32), 2), 2))  # four axes: by batch entries
    assert [(z.to[1], z.sources[0][1], len(z.axes)) for z in each] == [
        (n * 29 * 768, n * 29 * 768, 3) for n in range(2)
    ]
    long = Piece(Side(0, 0, (2**33, 4)), Side(1, 0, (2**33, 4)), (4, 2**31), 2)
    assert [z.axes for z in _plain(long, 2)] == [((4, (2**33, 2**33)), (2**31, (4, 4)))]  # of 32 bits each
    assert Copies([long]).launches[0].blocks == 2**20


def test_nothing_is_no_launch() -> None:
    nothing = Piece(Side(0, 0, (4,)), Side(1, 0, (4,)), (0,), 4)
    for copies in (Copies([]), Copies([nothing])):
        assert copies.launches == []
        copies.launch([0, 0], 0, 0)


def test_the_next_call_with_the_same_addresses_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu import alone

    said: list[Any] = []
    monkeypatch.setattr(alone, "launch", lambda *given: said.append(given))
    copies = Copies([Piece(Side(0, 8, (4,)), Side(1, 0, (4,)), (5,), 4)] * (MOST + 1))
    for addresses in ([16, 64], [16, 64], [32, 64]):
        copies.launch(addresses, 1, 7)
    params = [x[2] for x in said]
    assert params[0] is params[2] and params[1] is params[3] and params[0] != params[4]
    assert [x[3][0] for x in said] == [48, 16] * 3 and {x[4:] for x in said} == {(1, 7)}


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtypes", [("", ""), *SUMS], ids="-".join)
def test_it_compiles_without_spills(arch: str, dtypes: tuple[str, str]) -> None:
    pytest.importorskip("cuda.core")
    source = _PROGRAM._replace(given=dtypes[0], written=dtypes[1]).source()
    found = compiler.compile_source(source, arch).resources[NAME]
    assert found.spill_stores == 0 and found.stack == 0 and found.registers <= (128 if dtypes[0] else 64)


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("dim", [128, 64, 12, 9, 1])
@pytest.mark.parametrize("begin", [0, 1])
def test_on_a_gpu(dtype: str, dim: int, begin: int, rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    shape = (2, 400, 6, dim)
    flat = cupy.asarray(drawn(rng, (begin + int(np.prod(shape)),), dtype))
    x = flat[begin:].reshape(shape)
    y = cupy.asarray(drawn(rng, (2, 6, 400, dim), dtype)).swapaxes(1, 2)
    found, want = cupy.zeros((2, 900, 6, dim), dtype), cupy.zeros((2, 900, 6, dim), dtype)
    heads, lies, pieces = slice(2, 5), found.strides, []
    for number, (z, to, at, count) in enumerate(((x, 3, 5, 390), (y, 450, 0, 400))):
        want[:, to : to + count, heads] = z[:, at : at + count, heads]
        sides = (Side(n, i * s[1] + 2 * s[2], s) for n, i, s in ((0, to, lies), (1 + number, at, z.strides)))
        pieces.append(Piece(*sides, (2, count, 3, dim), x.itemsize))
    addresses, stream = [z.data.ptr for z in (found, x, y)], cupy.cuda.Stream()
    Copies(pieces).launch(addresses, 0, cupy.cuda.get_current_stream().ptr)
    assert (found.view("uint8") == want.view("uint8")).all()
    found[...] = 0
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        Copies(pieces * MOST).launch(addresses, 0, stream.ptr)
        graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
    assert (found.view("uint8") == want.view("uint8")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", SUMS, ids="-".join)
@pytest.mark.parametrize("dim", [128, 9])
def test_sums_on_a_gpu(dtypes: tuple[str, str], dim: int, rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    shape, given = (2, 400, 6, dim), np.dtype(dtypes[0])
    xs = [cupy.asarray(rng.standard_normal(shape).astype(given)) for _ in range(3)]
    found = cupy.zeros((2, 500, 6, dim), dtypes[1])
    want = found.copy()
    want[:, 7:397, 2:5] = (xs[0][:, :390, 2:5] + xs[1][:, 5:395, 2:5]) + xs[2][:, 10:, 2:5]
    sides = [Side(1 + n, 5 * n * x.strides[1] + 2 * x.strides[2], x.strides) for n, x in enumerate(xs)]
    to = Side(0, 7 * found.strides[1] + 2 * found.strides[2], found.strides)
    sums = Copies([Piece(to, sides[0], (2, 390, 3, dim), given.itemsize, tuple(sides[1:]))], dtypes)
    sums.launch([x.data.ptr for x in (found, *xs)], 0, cupy.cuda.get_current_stream().ptr)
    assert (found.view("uint8") == want.view("uint8")).all()
