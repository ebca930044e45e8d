"""Keys that ranks write into each other's memory: the plan of it, over memory that threads share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from reference import fresh_rng

from cupyflash import attention, attention_backward, block_mask, parallel
from cupyflash.parallel import Rows

POISON = 0xFF  # a float of such bytes is NaN


class Memory:
    """Of all ranks."""

    def __init__(self, size: int) -> None:
        self.halves: list[list[np.ndarray]] = [[np.zeros(0, np.uint8)] * 2 for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=60)


class Window:
    """As `parallel.window.Window`, of NumPy's arrays. Copies are made at the last moment; what nobody may read any
    more is poisoned."""

    def __init__(self, memory: Memory, rank: int) -> None:
        self._memory, self._rank, self.calls, self._late, self._turn = memory, rank, 0, [], 0

    def begin(self, size: int) -> bool:
        self._memory.halves[self._rank] = [np.full(size, POISON, np.uint8) for _ in range(2)]
        self.calls, self._turn = self.calls + 1, 0
        self._memory.barrier.wait()
        return True

    def room(self, half: int, offset: int, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
        count = int(np.prod(shape)) * like.itemsize
        return self._memory.halves[self._rank][half][offset : offset + count].view(like.dtype).reshape(shape)

    @staticmethod
    def address(x: np.ndarray) -> int:
        assert x.flags.c_contiguous
        return x.ctypes.data

    def push(self, half: int, parts: Sequence[tuple[int | None, int, int, int]]) -> None:
        assert all(rank != self._rank for rank, _, _, _ in parts)
        for rank, offset, address, count in parts:
            target = self._memory.halves[self._rank if rank is None else rank][half][offset : offset + count]
            assert len(target) == count
            self._late.append((target, address))

    def arrived(self) -> None:
        if self._turn:
            self._memory.halves[self._rank][(self._turn + 1) % 2][:] = POISON
        self._turn += 1
        for target, address in self._late:
            ctypes.memmove(target.ctypes.data, address, target.nbytes)
        self._late = []
        self._memory.barrier.wait()

    def end(self) -> None:
        assert not self._late


class Near:
    """A simulated group whose ranks have a window."""

    def __init__(self, group: Any, memory: Memory) -> None:
        self._group, self.rank, self.size, self.eager, self.known = group, group.rank, group.size, True, group.known
        self.exchange, self.all_gather, self.refuses = group.exchange, group.all_gather, group.refuses
        self.window = Window(memory, group.rank)


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 40 == j // 40) & (j <= i)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window": (30, 0)}, "full": {}, "groups": {"causal": True, "groups": 2},
    "stretches": {"causal": True, "stretches": 3}, "both": {"groups": 4, "stretches": 2}, "documents": {},
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_keys_in_each_others_memory(name: str, size: int) -> None:
    rng, how = fresh_rng(), dict(CASES[name])
    layout = "bhsd" if name == "groups" else "bshd"
    length, heads_q, heads_k = int(rng.integers(150, 260)), 8, 4
    plan = {x: how.pop(x) for x in ("groups", "stretches") if x in how}
    q, k, v, dout = (
        rng.standard_normal((2, length, heads, dim))
        for heads, dim in ((heads_q, 8), (heads_k, 8), (heads_k, 12), (heads_q, 12))
    )
    axis = 1 if layout == "bshd" else 2
    whole = [x if axis == 1 else x.swapaxes(1, 2) for x in (dout, q, k, v)]
    rows = (Rows.contiguous if name == "window" else Rows.zigzag)(length, size, multiple=16)
    if name == "documents":
        alone = how | {"block_mask": block_mask(documents, shape=(length, length), block=16)}
    else:
        alone = how
    out, lse = attention(*whole[1:], layout=layout, return_lse=True, **alone)
    expected = [out, *attention_backward(*whole, out, lse, layout=layout, **alone)]
    memory = Memory(size)

    def work(plain: Any) -> Any:
        group, given = Near(plain, memory), how | plan | {"rows": rows, "layout": layout}
        if name == "documents":
            given["block_mask"] = parallel.block_mask(documents, rows, plain, block=16)
        own = [rows.take(x, group.rank, axis) for x in whole]
        some, norm = parallel.attention(*own[1:], group, return_lse=True, **given)
        grads = parallel.attention_backward(*own, some, norm, group, exchange="keys", **given)
        assert group.window.calls == 2
        return [some, *grads]

    found = parallel.simulated(size).run(work)
    for x, parts in zip(expected, zip(*found)):
        np.testing.assert_allclose(rows.join(list(parts), axis), x, atol=1e-12, rtol=1e-12)


def test_where_there_is_a_window_keys_are_what_travels_forward() -> None:
    """They do so while others are computed with; heads do not."""
    x = np.ones((1, 64, 8, 8))
    rows, memory = Rows.zigzag(64, 2, multiple=16), Memory(2)
    for near, expected in ((True, 1), (False, 0)):

        def work(plain: Any, near: bool = near) -> int:
            group = Near(plain, memory)
            if not near:
                group.window = None
            own = [rows.take(x, group.rank)] * 3
            parallel.attention(*own, group, rows=rows)
            return group.window.calls if near else 0

        assert parallel.simulated(2).run(work) == [expected] * 2


def test_who_wants_no_window_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_group = pytest.importorskip("cupyflash.parallel.torch_group")
    monkeypatch.setenv("CUPYFLASH_WINDOW", "0")
    assert torch_group._window() is None
    monkeypatch.setenv("CUPYFLASH_WINDOW", "no")
    with pytest.raises(ValueError, match="CUPYFLASH_WINDOW is 'no'; it must be 1, 0 or empty"):
        torch_group._window()
