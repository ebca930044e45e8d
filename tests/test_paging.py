"""Pages: whose they are, counted, shared, copied when written; and that calls on them are those on what they hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from cupyflash import Pages, attention, attention_append
from cupyflash.paging import OutOfPages


def pools(count: int = 8, page: int = 4, n: int = 2) -> list[np.ndarray]:
    return [np.full((count, page, 1, 2), np.nan, np.float32) for _ in range(n)]


def write(pages: Pages, room: Any, rows: list[np.ndarray]) -> None:
    """By hand: rows (new, 1, 2) of each sequence, behind those that are there."""
    for n, x in enumerate(rows):
        for i, row in enumerate(x):
            at = int(room.seqlens_k[n]) + i
            for pool in pages.pools:
                pool[room.page_table[n, at // pages.page], at % pages.page] = row


def held(pages: Pages, sequence: int) -> np.ndarray:
    told = pages.told([sequence])
    n = int(told.seqlens_k[0])
    return np.array([pages.pools[0][told.page_table[0, i // pages.page], i % pages.page] for i in range(n)])


def test_a_random_life(rng: np.random.Generator) -> None:
    """Each sequence has what was written to it, whoever shared its pages; none is lost, none is in two hands."""
    pages, life = Pages(pools(30, 3)), dict[int, np.ndarray]()
    full = 0
    for _ in range(600):
        what = rng.choice(["allocate", "append", "append", "append", "fork", "free"])
        if what == "allocate" or not life:
            life[pages.allocate()] = np.zeros((0, 1, 2), np.float32)
            continue
        some = [int(x) for x in rng.choice([*life], min(len(life), int(rng.integers(1, 4))), replace=False)]
        if what == "fork":
            rows = int(rng.integers(0, len(life[some[0]]) + 1))
            life[pages.fork(some[0], rows)] = life[some[0]][:rows]
        elif what == "free":
            pages.free(some[0])
            del life[some[0]]
        else:
            new = [rng.standard_normal((int(rng.integers(0, 8)), 1, 2)).astype(np.float32) for _ in some]
            left, needed = pages.left, pages.needed(some, map(len, new))
            try:
                room = pages.append(some, map(len, new))
            except OutOfPages as error:
                full += 1
                assert needed > left == pages.left and str(error).startswith(f"{needed} pages are needed, and {left}")
                continue
            assert left - pages.left == needed <= left
            assert room.seqlens_k.tolist() == [len(life[x]) for x in some]
            write(pages, room, new)
            life |= {x: np.concatenate([life[x], y]) for x, y in zip(some, new)}
        for sequence, rows in life.items():
            assert pages.rows(sequence) == len(rows)
            np.testing.assert_array_equal(held(pages, sequence).reshape(rows.shape), rows)
        owned = Counter(x for name in life for x in set(pages.told([name]).page_table[0].tolist()) - {-1})
        assert pages.left == pages.count - len(owned)
    assert full > 3
    for sequence in [*life]:
        pages.free(sequence)
    assert pages.left == pages.count == 30


def test_what_is_shared_is_copied_when_it_is_written(rng: np.random.Generator) -> None:
    pages = Pages(pools(8, 4, 4))
    one = pages.allocate()
    x = rng.standard_normal((6, 1, 2)).astype(np.float32)
    write(pages, pages.append([one], [6]), [x])
    other, third = pages.fork(one), pages.fork(one, 4)
    assert pages.left == 6
    room = pages.append([one, other, third], [1, 1, 1])
    assert pages.left == 4  # a copy of the page that two write to, and one for the third
    tables = room.page_table.tolist()
    assert tables[0][0] == tables[1][0] == tables[2][0] and len({row[1] for row in tables}) == 3
    write(pages, room, [x[:1] * n for n in (1, 2, 3)])
    for n, (sequence, first) in enumerate(((one, 6), (other, 6), (third, 4)), 1):
        np.testing.assert_array_equal(held(pages, sequence), np.concatenate([x[:first], x[:1] * n]))
    for pool in pages.pools[1:]:
        np.testing.assert_array_equal(pool, pages.pools[0])
    pages.free(one)
    pages.append([other], [0])
    assert pages.left == 5


def test_tables_of_one_width() -> None:
    pages = Pages(pools())
    some = [pages.allocate() for _ in range(2)]
    assert pages.append(some, [5, 0]).page_table.shape == (2, 2)
    room = pages.append(some, [1, 1], width=5)
    assert room.page_table.shape == (2, 5) and (room.page_table[:, 2:] == -1).all()
    assert room.page_table.dtype == room.seqlens_k.dtype == np.int32
    with pytest.raises(ValueError, match="^width is 1; it must be 2, the pages of the longest"):
        pages.append(some, [1, 1], width=1)
    assert pages.rows(some[0]) == 6 and repr(pages) == "<Pages: 5 of 8 left, 4 rows each, 2 sequences>"
    assert pages.append([], []).page_table.shape == (0, 0)
    assert pages.told(some).page_table.shape == (2, 2) and pages.told(some, width=4).page_table.shape == (2, 4)
    assert pages.told([pages.allocate()], width=0).page_table.shape == (1, 0)


@pytest.mark.parametrize("call", ["append", "told"])
@pytest.mark.parametrize("width", [0, 1, -2, 1.5, True, 10**15])
def test_a_width_that_is_none_changes_nothing(width: Any, call: str) -> None:
    pages = Pages(pools())
    a = pages.allocate()
    pages.append([a], [5])
    b = pages.fork(a)
    rows = {"append": [[1]], "told": []}[call]
    error = MemoryError if width == 10**15 else ValueError if type(width) is int else TypeError
    match = {MemoryError: ".", ValueError: "must be 2, the pages of the longest", TypeError: "be an integer"}[error]
    with pytest.raises(error, match=match):
        getattr(pages, call)([b], *rows, width=width)
    assert (pages.rows(b), pages.left) == (5, 6)
    assert pages.told([a, b]).page_table.tolist() == [[0, 1]] * 2


def test_pools_that_cannot_be_written() -> None:
    """Then nobody has another page than before."""
    x = pools()
    x[1].flags.writeable = False
    message = r"^pools\[1\] is read-only; it must be an array that can be written"
    with pytest.raises(ValueError, match=message):
        Pages(x)
    x[1].flags.writeable = True
    pages = Pages(x)
    a = pages.allocate()
    pages.append([a], [5])
    b = pages.fork(a)
    x[1].flags.writeable = False
    with pytest.raises(ValueError, match=message):
        pages.append([a, b], [1, 9])
    assert (pages.rows(a), pages.rows(b), pages.left) == (5, 5, 6)
    x[1].flags.writeable = True
    assert pages.append([a, b], [1, 9]).page_table.tolist() == [[0, 2, -1, -1], [0, 1, 3, 4]]


def test_pools_of_a_library_without_an_adapter(rng: np.random.Generator) -> None:
    """Their memory is written to."""

    class Array:
        def __init__(self, x: np.ndarray) -> None:
            self.x = x

        def __dlpack__(self, **how: Any) -> Any:
            return self.x.__dlpack__(**how)

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

    x = pools()
    pages = Pages([*map(Array, x)])
    a = pages.allocate()
    rows = rng.standard_normal((5, 1, 2)).astype(np.float32)
    write(pages, pages.append([a], [5]), [rows])
    b = pages.fork(a)
    write(pages, pages.append([b], [1]), [rows[:1]])
    np.testing.assert_array_equal(held(pages, b), np.concatenate([rows, rows[:1]]))
    np.testing.assert_array_equal(x[0][[0, 2], :1], np.stack([rows[:1], rows[4:]]))
    with pytest.raises(TypeError, match="^pools.0. is a object; it must be an array"):
        Pages([object()])


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_text_and_its_continuations(kind: str, layout: str, rng: np.random.Generator) -> None:
    """Two of one beginning, token by token, are each by itself, densely."""
    library = pytest.importorskip({"jax": "jax.numpy"}.get(kind, kind))
    put = library.from_numpy if kind == "torch" else library.asarray
    first = (lambda x: x.swapaxes(-3, -2)) if layout == "bhsd" else (lambda x: x)
    texts = rng.standard_normal((2, 3, 11, 2, 8)).astype(np.float32)
    texts[1, :, :6] = texts[0, :, :6]
    pool = np.full((2, 9, 4, 2, 8), np.nan, np.float32)
    pages = Pages([put(np.ascontiguousarray(first(x))) for x in pool], layout=layout)

    def step(names: list[int], rows: np.ndarray) -> np.ndarray:
        """q, k and v of new rows: (3, sequences, new, 2, 8)."""
        room = pages.append(names, [rows.shape[2]] * len(names))
        q, k, v = (put(np.ascontiguousarray(first(x))) for x in rows)
        table = {"page_table": room.page_table, "layout": layout, "causal": True}
        found = attention_append(q, k, v, *pages.pools, room.seqlens_k, **table)
        if kind == "jax":
            found, *pages.pools = found
        return np.asarray(first(found))

    one = pages.allocate()
    found = [step([one], texts[0][:, None, :6]).repeat(2, 0)]
    both = [one, pages.fork(one)]
    assert pages.left == 7
    found += [step(both, texts.swapaxes(0, 1)[:, :, at : at + 1]) for at in range(6, 11)]
    assert pages.left == 4
    for n, text in enumerate(texts):
        alone = attention(*(x[None] for x in text.astype(np.float64)), causal=True)
        np.testing.assert_allclose(np.concatenate(found, 1)[n], alone[0], rtol=1e-5, atol=1e-5)


def test_messages() -> None:
    x = pools()
    for given, error, match in (
        ((x[0],), TypeError, "^pools is a ndarray; it must be a list of arrays"),
        (([],), TypeError, "^pools is empty"),
        (([x[0], x[1][:7]],), ValueError, r"^pools\[1\] has 7 pages of 4 rows; it must have 8 of 4, as pools\[0\]"),
        (([x[0][0]],), ValueError, r"^pools\[0\] has shape \(4, 1, 2\); it must be \(pages, page, heads, dim\)"),
        (([x[0][:0]],), ValueError, r"^pools\[0\] has shape .* with 1 or more pages of 1 or more rows"),
    ):
        with pytest.raises(error, match=match):
            Pages(*given)  # type: ignore[arg-type]
    pages = Pages(x)
    one = pages.allocate()
    with pytest.raises(KeyError, match="7 is no sequence that has been allocated and not freed"):
        pages.free(7)
    with pytest.raises(ValueError, match=r"^rows has 2 numbers; it must have one for each of the 1 sequences"):
        pages.append([one], [1, 2])
    with pytest.raises(ValueError, match=r"^sequences is \[1, 1\]; it must name each sequence once"):
        pages.append([one, one], [1, 2])
    with pytest.raises(ValueError, match="^rows has -1 for sequence 1; it must be 0 or more"):
        pages.append([one], [-1])
    with pytest.raises(ValueError, match="^rows is 1; it must be 0 to 0, those of sequence 1"):
        pages.fork(one, 1)
    with pytest.raises(OutOfPages, match="^9 pages are needed, and 8 of 8 are left"):
        pages.append([one], [33])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pages, a: pages.append(a, 1), "sequences is 1; it must be a list of integers, one for each sequence"),
        (lambda pages, a: pages.append([a], 1), "rows is 1; it must be a list of integers, one for each sequence"),
        (lambda pages, a: pages.append([a], "1"), "rows is '1'; it must be a list of integers"),
        (lambda pages, a: pages.append([a], [1.0]), r"rows\[0\] is 1.0; it must be an integer"),
        (lambda pages, a: pages.append([a], [None]), r"rows\[0\] is None; it must be an integer"),
        (lambda pages, a: pages.append([a], [True]), r"rows\[0\] is True; it must be an integer"),
        (lambda pages, a: pages.append([[a]], [1]), r"sequences\[0\] is \[1\]; it must be an integer"),
        (lambda pages, a: pages.fork(a, rows=1.5), "rows is 1.5; it must be an integer"),
        (lambda pages, a: pages.told(a), "sequences is 1; it must be a list of integers"),
        (lambda pages, a: pages.told([a, "2"]), r"sequences\[1\] is '2'; it must be an integer"),
    ],
)
def test_numbers_that_are_none(call: Any, message: str) -> None:
    pages = Pages([np.zeros((4, 2, 1, 8), np.float32)])
    a = pages.allocate()
    with pytest.raises(TypeError, match=f"^{message}"):
        call(pages, a)
    assert pages.rows(a) == 0 and pages.left == 4
    for odd in ([a], True, 1.0):
        with pytest.raises(KeyError, match="is no sequence"):
            pages.free(odd)  # type: ignore[arg-type]
    assert pages.append(np.array([a]), np.array([3])).seqlens_k.tolist() == [0]
