"""The last step without a GPU: what kernels are launched with, by functions that write down what they are given."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")
from kernel_cover import problem
from reference import DTYPES

from cupyflash.gpu import launch, params, tensormap
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.interop import numpy_
from cupyflash.problem import ITEMSIZE, View

A100, H200 = Arch.of("sm_80"), Arch.of("sm_90a")
SPACE = 1 << 40


@pytest.fixture(autouse=True)
def first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensormap, "encode", lambda *_: bytes(128))
    monkeypatch.setattr(launch.cupy.cuda.runtime, "getDevice", lambda: 0)


class Launched:
    """A launcher of a problem, and what its kernels were called with."""

    def __init__(self, arch: Arch, backward: bool, family: str | None = None, **fields: Any) -> None:
        self.problem = problem("bfloat16", **fields)
        self.plan = plan(self.problem, arch, backward, family)
        self.calls: list[tuple[Any, ...]] = []
        functions = [lambda *given, n=n: self.calls.append((n, *given)) for n, _ in enumerate(self.plan.launches)]
        strides = {name: (640_000, 640, 64) for name in params.ROWED}
        self.launcher = launch.Launcher(self.plan, functions, self.problem, strides, 0)

    def __call__(self, **addresses: int) -> np.void:
        """Launch; returns Params as the first kernel got them."""
        pointers = [addresses.get(name, 0) for name in self.launcher.slots]
        self.launcher(pointers, 77, SPACE)
        return np.frombuffer(self.calls[-1][3][0].tobytes(), params.layout(self.plan))[0]


def test_kernels_in_order_on_the_stream() -> None:
    launched = Launched(A100, True)
    launched(q=256)
    assert [call[0] for call in launched.calls] == [0, 1, 2]
    for (_, grid, block, arguments, shared, stream), asked in zip(launched.calls, launched.plan.launches):
        assert (grid, block, shared, stream.ptr) == ((asked.grid,), (asked.threads,), asked.shared_memory, 77)
        assert arguments is launched.calls[0][3]


def test_pointers_by_name() -> None:
    launched = Launched(A100, True)
    addresses = {name: 4096 + 16 * i for i, name in enumerate(params.POINTERS[True])}
    record = launched(**addresses)
    assert {name: record[name] for name in addresses} == addresses and record["key_mask"] == 0
    assert tuple(record["dq_strides"]) == (640_000, 640, 64)


@pytest.mark.parametrize(
    ("family", "backward", "deterministic"),
    [("sm80", True, False), ("sm80", True, True), ("sm90", True, False), ("flash1", False, False)],
)
def test_workspace_is_aligned_and_apart(family: str, backward: bool, deterministic: bool) -> None:
    launched = Launched(H200, backward, seq_q=999, seq_k=998, deterministic=deterministic, family=family)
    record, end = launched(), SPACE
    for space in launched.plan.workspace:
        if space.nbytes:
            assert record[space.name] % 256 == 0 and record[space.name] >= end
            end = int(record[space.name]) + space.nbytes
        else:
            assert record[space.name] == 0  # null, not the address of something else
    assert end - SPACE <= launched.launcher.workspace < end - SPACE + 256
    if family == "sm80":
        assert (record["counters"] != 0) == deterministic


def test_packed_once_for_the_same_pointers() -> None:
    launched = Launched(A100, False)
    for at in (256, 256, 512):
        launched(q=at)
    first, again, other = (call[3] for call in launched.calls)
    assert first is again and first is not other


def test_the_copy_engine_gets_its_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second parameter, in the order of the plan's boxes, for the arrays at the addresses of the call."""
    encoded = []
    monkeypatch.setattr(tensormap, "encode", lambda at, *rest: encoded.append((at, rest[-1])) or bytes(128))
    launched = Launched(H200, True)
    addresses = {name: 4096 + 16 * i for i, name in enumerate(params.POINTERS[True])}
    launched(**addresses)
    assert encoded == [(addresses[box.array], box) for box in launched.plan.maps]
    _, maps = launched.calls[0][3]
    assert maps.nbytes == 128 * len(launched.plan.maps) + 64
    launched(**addresses | {"dq": 16 * 999})  # not read or written by the copy engine
    assert len(encoded) == len(launched.plan.maps)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With NumPy in CuPy's place."""

    def on_device(pointer: int, view: View, device: int) -> np.ndarray:
        size = ITEMSIZE[view.dtype]
        strides = tuple(s * size for s in view.strides)
        bits = {"data": (pointer, False), "shape": view.shape, "strides": strides, "typestr": f"<u{size}", "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__=bits))

    cuda = SimpleNamespace(
        Device=lambda _: nullcontext(), Stream=SimpleNamespace(from_external=lambda _: nullcontext())
    )
    monkeypatch.setattr(launch, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(launch, "on_device", on_device)
    return SimpleNamespace(view=numpy_.view, pointer=lambda x: x.ctypes.data)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), ml_dtypes.float8_e4m3fn])
def test_what_results_without_kernels_are_filled_with(dtype: Any, library: Any) -> None:
    x = np.full((2, 3), np.nan, dtype)
    launch.fill(library, x, 0.0, 0, 7)
    assert not x.any() and not np.signbit(x).any()
    if np.dtype(dtype).itemsize > 2:  # lse
        launch.fill(library, x, float("-inf"), 0, 7)
        assert np.isneginf(x).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (3, 5), (5,)])
def test_numbers_of_heads_are_spread_over_their_rows(shape: tuple[int, ...], dtype: str, library: Any) -> None:
    held = np.arange(-2, 4).astype(DTYPES[dtype])
    numbers = held[::2] if len(shape) > 1 else held[0, ...]
    rows = np.full(shape, np.nan, "float64" if dtype == "float64" else "float32")
    launch.spread(library, rows, numbers.ctypes.data, numpy_.view(numbers), 0, 7)
    want = np.broadcast_to(numbers.astype(rows.dtype)[..., None], shape)
    np.testing.assert_array_equal(rows, want)
