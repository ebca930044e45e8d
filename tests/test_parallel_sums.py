"""Copies to and from messages, and what ranks add up."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from copies_on_cpu import by_numpy
from near_on_cpu import Memory, Near
from reference import fresh_rng

from cupyflash import attention, attention_backward, block_mask, parallel
from cupyflash.gpu.copies import Copies
from cupyflash.parallel import Rows, arrays
from cupyflash.parallel.transfers import SentKeys


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 48 == j // 48) & (j <= i)


def test_all_copies_of_cupy_arrays_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, launched = fresh_rng(), []
    adapter = types.SimpleNamespace(
        pointer=lambda x: int(x.__array_interface__["data"][0]), device=lambda x: 3, stream=lambda ordinal: 7
    )

    def launch(self: Copies, addresses: Sequence[int], *where: int) -> None:
        launched.append(where)
        by_numpy(self, addresses)

    monkeypatch.setattr(arrays, "library", lambda x: "cupy")
    monkeypatch.setattr(arrays.interop, "library", lambda name, x: adapter)
    monkeypatch.setattr(Copies, "launch", launch)
    x, lse = rng.standard_normal((2, 24, 6, 8)).astype(np.float16), rng.standard_normal((2, 6, 24))
    to, of_lse = np.zeros((2, 40, 3, 8), np.float16), np.zeros((2, 3, 30))
    of_q = lse.swapaxes(1, 2)[..., None], of_lse.swapaxes(1, 2)[..., None]
    pairs = [(to[:, 8:20], x[:, 4:16, 3:]), (to[:, 30:40], x[:, :10, ::2]), (of_q[1][:, 1:9], of_q[0][:, 16:, 3:])]
    arrays.put_all([*pairs, (to[:, :0], x[:, :0, :3])])
    arrays.put_all([])
    assert launched == [(3, 7)]
    for target, source in pairs:
        np.testing.assert_array_equal(target, source)
    assert np.count_nonzero(to) == np.count_nonzero(pairs[0][1]) + np.count_nonzero(pairs[1][1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_sums_of_arrays_on_a_gpu_are_one_launch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, launched = fresh_rng(), []
    adapter = types.SimpleNamespace(
        pointer=lambda x: int(x.__array_interface__["data"][0]), device=lambda x: 3, stream=lambda ordinal: 7,
        on_gpu=lambda x: True,
    )  # fmt: skip

    def launch(self: Copies, addresses: Sequence[int], *where: int) -> None:
        launched.append((*where, self.dtypes))
        by_numpy(self, addresses)

    monkeypatch.setattr(arrays.interop, "library", lambda name, x: adapter)
    monkeypatch.setattr(Copies, "launch", launch)
    kind = "float64" if dtype == "float64" else "float32"
    x, y, z = rng.standard_normal((3, 2, 24, 6, 8)).astype(kind)
    to = np.zeros((2, 40, 6, 8), dtype)
    wants = [((x[:, 4:16] + y[:, 1:13]) + z[:, :12]).astype(dtype), x[:, :9].astype(dtype)]
    sums = [(to[:, 8:20], [x[:, 4:16], y[:, 1:13], z[:, :12]]), (to[:, 30:39], [x[:, :9]]), (to[:, :0], [y[:, :0]])]
    arrays.put_sums(sums)
    arrays.put_sums([])
    assert launched == [(3, 7, (kind, dtype))]
    for (target, _), want in zip(sums, wants):
        np.testing.assert_array_equal(target, want)
    assert np.count_nonzero(to) == sum(map(np.count_nonzero, wants))


@pytest.mark.parametrize("beside", [False, True])
def test_keys_are_sent_in_a_stream_of_their_gpu_whichever_is_current(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default stream is 0 of each."""
    window = pytest.importorskip("cupyflash.parallel.window")
    current, copied = [0], []

    @contextlib.contextmanager
    def here(ordinal: int) -> Iterator[None]:
        current.append(ordinal)
        yield
        current.pop()

    def copy(*what: int) -> None:
        copied.append((current[-1], *what))

    names = {"memcpyDefault": 4, "eventRecord": lambda *_: None, "streamWaitEvent": lambda *_: None}
    monkeypatch.setattr(window, "runtime", types.SimpleNamespace(memcpyAsync=copy, **names))
    monkeypatch.setattr(window, "here", here)
    monkeypatch.setattr(window, "stream", lambda _: 0)
    found = window.Window.__new__(window.Window)
    found._ordinal, found.places = 1, [1000, 2000]
    found._stream, found._before = types.SimpleNamespace(cuda_stream=7), types.SimpleNamespace(ptr=0)
    found.push([(1, 24, 5000, 16)], beside)
    assert copied == [(1, 2024, 5000, 16, 4, 7 if beside else 0)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_sum_is_rounded_once(dtype: Any) -> None:
    rng = fresh_rng()
    parts = [rng.standard_normal((3, 50)).astype(np.float32) for _ in range(3)]
    target = np.empty((3, 100), dtype)[:, ::2]
    arrays.put_sums([(target, parts)])
    np.testing.assert_array_equal(target, ((parts[0] + parts[1]) + parts[2]).astype(dtype))


def test_keys_that_one_call_alone_has_are_written_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of documents that lie in the chunks of a rank; nor is anything zero before."""
    n, size = 192, 2
    rows = Rows(n, (((0, 48), (96, 144)), ((48, 96), (144, 192))))
    x = fresh_rng().standard_normal((4, 1, n, 2, 8))
    mask = block_mask(documents, shape=(n, n), block=16)
    out, lse = attention(*x[1:], block_mask=mask, return_lse=True)
    want = attention_backward(*x, out, lse, block_mask=mask)

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(SentKeys, "add", never)

    def work(group: Any) -> Any:
        own = parallel.block_mask(documents, rows, group, block=16)
        given = [rows.take(y, group.rank) for y in (*x, out)]
        norm = rows.take(lse, group.rank, 2)
        return parallel.attention_backward(*given, norm, group, rows=rows, block_mask=own)

    for whole, parts in zip(want, zip(*parallel.simulated(size).run(work))):
        np.testing.assert_allclose(rows.join(list(parts)), whole, atol=1e-12)


@pytest.mark.parametrize(
    ("size", "causal", "expected"), [(2, True, [1, 1]), (2, False, [2, 1]), (4, True, [1, 2, 2, 1])]
)
def test_sums_of_calls_and_ranks_are_one_launch(
    size: int, causal: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more of each call whose keys others hold, that adds to what an earlier one wrote. (The last rank has one
    call: its chunks touch.)"""
    rows, memory = Rows.zigzag(64 * size, size, multiple=16), Memory(size)
    launched = [0] * size
    x = fresh_rng().standard_normal((4, 1, 64 * size, 2, 8))
    out, lse = attention(*x[1:], causal=causal, return_lse=True)

    def work(plain: Any) -> Any:
        group = Near(plain, memory)

        def copied(copies: Copies, addresses: Sequence[int]) -> None:
            launched[plain.rank] += copies.dtypes is not None
            by_numpy(copies, addresses)

        group.window.copied = copied
        own = [*(rows.take(y, plain.rank) for y in (*x, out)), rows.take(lse, plain.rank, 2)]
        return parallel.attention_backward(*own, group, rows=rows, exchange="keys", causal=causal)

    found = parallel.simulated(size).run(work)
    assert launched == expected
    for y, parts in zip(attention_backward(*x, out, lse, causal=causal), zip(*found)):
        np.testing.assert_allclose(rows.join(list(parts)), y, atol=1e-12)
