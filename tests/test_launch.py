"""The last step without a GPU: what kernels are launched with, by functions that write down what they are given."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")
from kernel_cover import problem
from reference import DTYPES
from stand_in_cuda import Cuda

from cupyflash.gpu import launch, params, tensormap
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.interop import numpy_
from cupyflash.passes import BACKWARD, BY_ROWS, FORWARD, Pass
from cupyflash.problem import ITEMSIZE, View

A100, H200 = Arch.of("sm_80"), Arch.of("sm_90a")
SPACE = 1 << 40


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


class Launched:
    """A launcher of a problem, and what its kernels were launched with."""

    def __init__(
        self, cuda: Cuda, arch: Arch, of: Pass, family: str | None = None, device: int = 0, **fields: Any
    ) -> None:
        self.cuda = cuda
        self.problem = problem("bfloat16", **fields)
        self.plan = plan(self.problem, arch, of, family)
        functions = [SimpleNamespace(ptr=1000 + n) for n, _ in enumerate(self.plan.launches)]
        strides = {name: (640_000, 640, 64) for name in BY_ROWS}
        self.launcher = launch.Launcher(self.plan, functions, self.problem, strides, device)

    def __call__(self, **addresses: int) -> np.void:
        """Launch; returns Params as the last kernel got them."""
        pointers = [addresses.get(name, 0) for name in self.launcher.slots]
        self.launcher(pointers, 77, SPACE)
        layout = params.layout(self.plan)
        return np.frombuffer(self.cuda.launches[-1].parameter(0, layout.itemsize), layout)[0]


def test_kernels_in_order_on_the_stream(cuda: Cuda) -> None:
    launched = Launched(cuda, A100, BACKWARD)
    launched(q=256)
    assert [x.function for x in cuda.launches] == [1000, 1001, 1002]
    for x, asked in zip(cuda.launches, launched.plan.launches):
        assert (x.grid, x.threads, x.shared, x.stream) == (asked.grid, asked.threads, asked.shared_memory, 77)
        assert x.table == cuda.launches[0].table


def test_each_thread_gets_a_context_once(cuda: Cuda) -> None:
    """A thread that CUDA has not seen has none, and the driver launches nothing there."""
    launched = Launched(cuda, A100, BACKWARD)
    threads = [threading.Thread(target=lambda: [launched(q=256), launched(q=512)]) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(cuda.contexts) == 2 and {device for _, device in cuda.contexts} == {0}
    assert len(cuda.launches) == 4 * len(launched.plan.launches)


def test_maps_are_made_where_the_driver_has_a_context(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(tensormap, "encode", lambda *_: seen.append((cuda.current, *cuda.contexts)) or bytes(128))
    Launched(cuda, H200, FORWARD, device=1)(q=256)
    assert set(seen) == {(1, (threading.get_ident(), 1))}


def test_the_device_of_the_arrays_is_current_for_a_launch(cuda: Cuda) -> None:
    here, there = Launched(cuda, A100, FORWARD), Launched(cuda, A100, FORWARD, device=1)
    for launched in (there, here, there, here):
        launched(q=256)
    assert [x.device for x in cuda.launches] == [1, 0, 1, 0] and cuda.current == 0
    assert [device for _, device in cuda.contexts] == [1, 0, 1]  # again where it was not current


def test_pointers_by_name(cuda: Cuda) -> None:
    launched = Launched(cuda, A100, BACKWARD)
    addresses = {name: 4096 + 16 * i for i, name in enumerate(row.name for row in BACKWARD.rows)}
    record = launched(**addresses)
    assert {name: record[name] for name in addresses} == addresses and record["key_mask"] == 0
    assert tuple(record["dq_strides"]) == (640_000, 640, 64)


@pytest.mark.parametrize(
    ("family", "of", "deterministic"),
    [("sm80", BACKWARD, False), ("sm80", BACKWARD, True), ("sm90", BACKWARD, False), ("flash1", FORWARD, False)],
)
def test_workspace_is_aligned_and_apart(cuda: Cuda, family: str, of: Pass, deterministic: bool) -> None:
    launched = Launched(cuda, H200, of, seq_q=999, seq_k=998, deterministic=deterministic, family=family)
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


def test_filled_once_for_the_same_pointers(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, filled = Launched(cuda, A100, FORWARD), []
    fill = params.Packer.fill
    monkeypatch.setattr(params.Packer, "fill", lambda *x: filled.append(x[2][0]) or fill(*x))
    for at in (256, 256, 512, 256):
        launched(q=at)
    first, again, other, last = (x.table for x in cuda.launches)
    assert first == again == last != other and filled == [256, 512]


def test_those_of_the_oldest_pointers_are_filled_anew(cuda: Cuda) -> None:
    """A caller whose arrays lie elsewhere in each call makes no more of them."""
    launched = Launched(cuda, H200, BACKWARD)
    for at in range(1024, 1024 * (2 * launch._KEPT + 1), 1024):
        record = launched(q=at, dout=at + 256)
        assert (record["q"], record["dout"]) == (at, at + 256)
    tables = [x.table for x in cuda.launches]
    assert len({*tables}) == launch._KEPT and tables[-1] == tables[len(tables) // 2 - 1]


def test_two_threads_have_arguments_of_their_own(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lets others run while it copies them."""
    launched, seen = Launched(cuda, A100, FORWARD), []
    plain = cuda.launchKernel

    def interrupted(*args: Any) -> None:
        if not seen:
            seen.append(args[9])
            other = threading.Thread(target=launched, kwargs={"q": 512})
            other.start()
            other.join()
        plain(*args)

    monkeypatch.setattr(cuda, "launchKernel", interrupted)
    assert launched(q=256)["q"] == 256
    inner, outer = cuda.launches
    assert inner.table != outer.table == seen[0]


def test_arguments_of_a_refused_launch_are_not_kept(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(cuda, H200, FORWARD)
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> None:
            raise RuntimeError("refused")

        launched(q=256)
        patch.setattr(tensormap, "move", refuse)
        patch.setattr(launch, "_KEPT", 1)
        with pytest.raises(RuntimeError, match="refused"):
            launched(q=512)
    assert launched(q=512)["q"] == 512 and launched(q=256)["q"] == 256


def test_the_copy_engine_gets_its_maps(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second parameter, in the order of the plan's boxes, for the arrays at the addresses of the call."""
    encoded = []
    monkeypatch.setattr(tensormap, "encode", lambda at, *rest: encoded.append((at, rest[-1])) or bytes(128))
    launched = Launched(cuda, H200, BACKWARD)
    addresses = {name: 4096 + 16 * i for i, name in enumerate(row.name for row in BACKWARD.rows)}
    launched(**addresses)
    assert encoded == [(addresses[box.array], box) for box in launched.plan.maps]
    size = 128 * len(launched.plan.maps)
    assert cuda.launches[0].parameter(1, size + 64) == bytes(size) + (1).to_bytes(64, "little")
    monkeypatch.setattr(launch, "_KEPT", 1)
    moved = []
    monkeypatch.setattr(tensormap, "move", lambda _, at: moved.append(at))
    launched(**addresses | {"dq": 16 * 999})  # not read or written by TMA
    launched(**addresses | {"v": 16 * 999})
    assert len(encoded) == len(launched.plan.maps) and moved == [16 * 999]
    monkeypatch.setattr(launch, "_KEPT", 9)  # another set, which is like the one that is there
    launched(**addresses | {"v": 16 * 998})
    assert len(encoded) == len(launched.plan.maps) and moved == [16 * 999, 16 * 998]


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
