"""Whether two arrays share memory, from addresses and strides alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash import overlap as module
from cupyflash.overlap import check_apart, extent, overlap, overlaps_itself
from cupyflash.problem import View


def addresses(x: View) -> list[int]:
    """Of every element, in elements."""
    return [x.ptr // 4 + sum(i * s for i, s in zip(index, x.strides)) for index in np.ndindex(*x.shape)]


def random_view(rng: np.random.Generator) -> View:
    rank = int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 5, rank))
    strides = tuple(int(s) for s in rng.integers(-7, 12, rank))
    return View(shape, strides, "float32", "cpu", "numpy", 4 * int(rng.integers(1000, 1020)))


def test_against_all_addresses(rng: np.random.Generator) -> None:
    views = [random_view(rng) for _ in range(400)]
    said = {True: 0, False: 0}
    for x in views:
        assert overlaps_itself(x) == (len(set(addresses(x))) < len(addresses(x))), x
        said[overlaps_itself(x)] += 1
    for x, y in itertools.islice(itertools.combinations(views, 2), 3000):
        assert overlap(x, y) == bool({*addresses(x)} & {*addresses(y)}), (x, y)
        said[overlap(x, y)] += 1
    assert min(said.values()) > 100


def test_what_is_written_and_read(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is found as of each pair, and the first pair is named; an array's reach is reckoned once."""
    reckoned: list[View] = []
    monkeypatch.setattr(module, "extent", lambda x: (reckoned.append(x), extent(x))[1])
    found = 0
    for _ in range(500):
        views = {name: random_view(rng) for name in "abcdef"}
        views = {name: x._replace(ptr=x.ptr + 4 * 30 * int(rng.integers(0, 9))) for name, x in views.items()}
        written, read = ({name: views[name] for name in names} for names in ("abc", "def"))
        if any(map(overlaps_itself, written.values())):
            continue
        moved = (("a", "d"), ("c", "b"))
        pairs = [(x, y) for n, x in enumerate("abc") for y in ("d", "e", "f", *"abc"[:n]) if (x, y) not in moved]
        shared = [pair for pair in pairs if overlap(views[pair[0]], views[pair[1]])]
        reckoned.clear()
        if shared:
            found += 1
            with pytest.raises(ValueError, match="^{} shares memory with {};".format(*shared[0])):
                check_apart(written, read, moved)
        else:
            check_apart(written, read, moved)
        assert len(reckoned) <= len(views)
    assert 50 < found < 450


def test_interleaved_arrays_do_not_overlap() -> None:
    even = View((1000, 500), (1000, 2), "float32", "cpu", "numpy", 4096)
    assert not overlap(even, even._replace(ptr=4100)) and overlap(even, even._replace(ptr=4104))
    assert not overlaps_itself(even) and not overlaps_itself(View((3, 2), (2, 3), "float32", "cpu", "numpy", 4096))


def test_what_cannot_be_decided_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    x = View((3, 5, 7), (1009, 211, 13), "float32", "cpu", "numpy", 4096)
    y = x._replace(strides=(1013, 223, 17), ptr=4104)
    asked = overlap(x, y)
    monkeypatch.setattr("cupyflash.overlap._EFFORT", 1)
    assert asked == bool({*addresses(x)} & {*addresses(y)}) and not overlap(x, y)
    monkeypatch.setattr(np, "shares_memory", refuses)
    assert not overlap(x, x)


def refuses(*_: object, **__: object) -> bool:
    raise np.exceptions.TooHardError
