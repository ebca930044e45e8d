"""What the demo measures: when it goes on, when it stops, and what it says of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import attention
from cupyflash.demo import beside, places
from cupyflash.demo.beside import Cell, Row, Way, duration, measure, runs_out, size, table, times
from cupyflash.demo.places import CupyPlace, NumpyPlace, Peak, Place, TorchPlace

MIB = 2**20


class Clocked(Place):
    """Where time is what ways say, memory as well."""

    library, dtype, heads = "nowhere", "float32", 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int | None = None) -> None:
        self.now, self._free, self._peak = 0.0, free, Peak()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def make(self, rows: int) -> Any:
        return np.empty((1, rows, 1, 1)), None, None

    def way(self, name: str, seconds: float, needs: int = 0, fails: int = 10**9, result: float = 0.0) -> Way:
        """One that takes so many seconds at 1024 rows, and `needs` bytes for each pair of rows."""

        def run(q: Any, k: Any, v: Any) -> Any:
            rows = q.shape[1]
            if rows >= fails:
                raise MemoryError
            self.now += seconds * (rows / 1024) ** 2
            self._peak.nbytes = rows * rows * needs
            return np.array([result])

        return Way(name, run, lambda rows, heads: rows * rows * heads * needs)

    def peak(self) -> Any:
        place = self

        class Watch:
            def __enter__(self) -> Peak:
                return place._peak

            def __exit__(self, *_: object) -> None:
                pass

        return Watch()

    def free(self) -> int | None:
        return self._free


def rows_of(place: Place, ways: list[Way], seconds: float) -> list[Row]:
    return list(table(measure(place, ways, seconds), len(ways)))


def test_to_16k_rows_and_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Clocked(monkeypatch)
    rows = rows_of(place, [place.way("a", 1e-4), place.way("b", 2e-4, result=3.0)], 8.0)
    assert [row.rows for row in rows] == [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # the next takes 4.9 s
    assert [row.cells[0].seconds for row in rows] == pytest.approx([1e-4 * (row.rows / 1024) ** 2 for row in rows])
    assert {row.cells[1].difference for row in rows} == {3.0} and {row.cells[0].difference for row in rows} == {0.0}
    assert place.now < 8


def test_what_would_take_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Clocked(monkeypatch)
    rows = rows_of(place, [place.way("a", 0.01), place.way("b", 0.1, needs=4)], 8.0)
    assert [row.rows for row in rows][-1] == 16384
    assert [bool(row.cells[1].seconds) for row in rows] == [True] * 4 + [False] * 2
    assert rows[4].cells[1] == Cell(None, 4 * 8192**2, why="b would take 6.4 s")
    assert rows[5].cells[1].why == "b would take 25.6 s" and rows[5].cells[0].seconds == pytest.approx(0.01 * 256)
    assert not rows[5].cells[1].ran_out and place.now < 9


def test_what_needs_more_memory_than_is_free_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Clocked(monkeypatch, free=40 * MIB)
    ways = [place.way("a", 1e-4), place.way("b", 1e-4, needs=4), place.way("c", 1e-4, needs=1, fails=2048)]
    rows = rows_of(place, ways, 10.0)
    assert [row.rows for row in rows][-1] == 16384  # not on: one of them ran out
    assert rows[3].cells[1] == Cell(None, 64 * MIB, why="out of memory: 40 MiB free")
    assert rows[2].cells[1].nbytes == 16 * MIB and rows[2].cells[1].seconds
    assert rows[2].cells[2] == Cell(None, 4 * MIB, why="out of memory") and rows[2].cells[2].ran_out
    assert runs_out(place, ways[1], 512) == (4096, 64 * MIB, 40 * MIB)
    assert runs_out(place, ways[1], 4096) == (8192, 256 * MIB, 40 * MIB)
    assert runs_out(place, ways[0], 512) is None and runs_out(Clocked(monkeypatch), ways[1], 512) is None


def test_numpy(rng: np.random.Generator) -> None:
    """Plain attention is attention; its memory is counted, and what it needs is what it takes."""
    place = NumpyPlace()
    _, other = beside.ours_and_plain(place)
    q, k, v = place.make(700)
    assert q.shape == (1, 700, 2, 64) and q.dtype == np.float32
    np.testing.assert_allclose(other.run(q, k, v), attention(q, k, v, causal=True), atol=2e-6)
    assert not np.array_equal(q, k)
    with place.peak() as found:
        other.run(q, k, v)
    assert other.needs(700, 2) <= found.nbytes < 1.3 * other.needs(700, 2)
    with place.peak() as found:
        np.ones(100_000)
        np.ones(200_000)
    assert 1_600_000 <= found.nbytes < 1_700_000
    assert place.difference(q, q + 0.5) == pytest.approx(0.5)


def test_pytorch_on_a_cpu() -> None:
    torch = pytest.importorskip("torch")
    place = TorchPlace("cpu")
    ways = beside.of_pytorch(place)
    names = [way.name for way in ways]
    assert names[0] == "cupyflash" and "math" in names and "cuDNN" not in names
    q, k, v = place.make(96)
    assert q.dtype is torch.bfloat16 and q.shape == (1, 96, 16, 64)
    for way in ways[1:]:
        assert place.difference(way.run(q, k, v), ways[0].run(q, k, v)) < 0.05


def test_free_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   5000 kB\n")
    assert places.free_memory(tmp_path) == 5_120_000
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("1000\n")
    assert places.free_memory(tmp_path) == 5_120_000
    (folder / "memory.max").write_text("3000\n")
    assert places.free_memory(tmp_path) == 2000
    (folder / "memory.current").write_text("4000\n")
    assert places.free_memory(tmp_path) == 0
    assert places.free_memory() > 0


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (duration(12.34), "12.3 s"), (duration(0.99996), "1 s"), (duration(0.0314), "31.4 ms"),
        (duration(7.2e-5), "72 µs"), (size(512), "0.5 KiB"), (size(999 * 1024), "999 KiB"), (size(2**30), "1 GiB"),
        (size(1001 * MIB), "0.978 GiB"), (times(9.94), "9.9x"), (times(9.96), "10x"), (times(1234.5), "1,234x"),
    ],
)  # fmt: skip
def test_numbers(told: str, text: str) -> None:
    assert told == text and len(told) <= 9


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    place = CupyPlace(cupy)
    ways = beside.ours_and_plain(place)
    *_, last = rows_of(place, ways, 60.0)
    ours, other = last.cells
    assert last.rows >= 16384 and ours.seconds and ours.seconds < (other.seconds or 10)
    assert ours.nbytes < other.nbytes / 20 and other.difference < 0.02
    if pytest.importorskip("torch").cuda.is_available():
        tensors = TorchPlace()
        assert {"cupyflash", "flash", "math"} <= {way.name for way in beside.of_pytorch(tensors)}
        *_, last = rows_of(tensors, beside.of_pytorch(tensors), 60.0)
        assert last.rows >= 16384 and all(cell.difference < 0.05 for cell in last.cells if cell.seconds)
