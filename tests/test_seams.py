"""What other tests put something else in the place of, by itself: copies, allocations, loading, and what says where an
array is."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
import test_launch
from kernel_cover import problem

from cupyflash import attention, attention_backward
from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler, launch, strides
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.interop import cupy_, numpy_
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import AXES, Given, View
from cupyflash.rules import wide
from cupyflash.score import trace

library = test_launch.library

# ---- the launch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, bool])
@pytest.mark.parametrize("dim", [7, 8, 16])
def test_between_the_rows_of_a_copy_are_zeros(dim: int, dtype: Any, library: Any) -> None:
    """Whatever the memory held before: it is multiplied with what may be anything."""
    held = np.ones((2, 3, 2, 2 * dim), dtype)[..., ::2]
    size = held.itemsize

    def empty(shape: tuple[int, ...], name: str, device: int) -> np.ndarray:
        return np.full(np.prod(shape) * size, 0xFF, np.uint8).view(held.dtype)

    view = numpy_.view(held)
    copy = strides.padded(view, 16)
    buffer = launch.copy_of(SimpleNamespace(**vars(library), empty=empty), held.ctypes.data, view, copy, 0, 7)
    rows = buffer.reshape(-1, copy.strides[-2])
    assert (rows[:, :dim].astype(float) == 1).all() and not rows[:, dim:].view(np.uint8).any()


class Devices:
    """CuPy of two GPUs that are not there: on which one things are made."""

    def __init__(self) -> None:
        self.current, self.made = 0, list[tuple[str, int]]()
        fake = self

        class Device:
            def __init__(self, n: int) -> None:
                self.n = n

            def __enter__(self) -> None:
                self.before, fake.current = fake.current, self.n

            def __exit__(self, *_: object) -> None:
                fake.current = self.before

        def note(what: str) -> Any:
            return lambda *_, **__: (
                fake.made.append((what, fake.current))
                or SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=name))
            )

        runtime = SimpleNamespace(getDevice=lambda: fake.current)
        self.cuda = SimpleNamespace(Device=Device, runtime=runtime)
        self.empty, self.RawModule = note("empty"), note("load")


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
def test_results_and_kernels_are_where_the_arrays_are(
    device: int, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Devices()
    fake.current = current
    monkeypatch.setattr(cupy_, "cupy", fake)
    cupy_.empty((2, 3), "float16", device)
    monkeypatch.setattr(compiler, "import_cupy", lambda: fake)
    compiled = SimpleNamespace(cubin=b"", arch="sm_80")
    assert compiler.load(compiled, [("one", 0), ("two", 0)], device) == ["one", "two"]
    assert fake.made == [("empty", device), ("load", device)] and fake.current == current


def test_a_bias_is_not_copied_along_axes_that_it_is_broadcast_along() -> None:
    given = (Given("bias", "q", AXES),)
    of = problem("float16", given=given, heads_q=3, heads_k=3, seq_q=999, seq_k=999)
    kernels = plan(of, Arch.of("sm_90a"), FORWARD, "sm90")
    assert any(box.array == "bias" for box in kernels.maps)
    shape = (of.batch, of.heads_q, of.seq_q, of.seq_k)
    for spread in (0, 1, 2):
        strides_of = [shape[1] * shape[2] * 1001, shape[2] * 1001, 1001, 1]
        strides_of[spread] = 0
        view = View(shape, tuple(strides_of), "float16", "cuda:0", "cupy")
        copy = strides.to_copy("bias", view, of, 4, kernels, False)
        assert copy is not None and copy.source.shape == tuple(1 if n == spread else x for n, x in enumerate(shape))


# ---- the disk -------------------------------------------------------------------------------------------------------


def test_what_is_read_is_noted_by_ourselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Most file systems do not note it, or once a day."""
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path))
    key = b"\1" * 32
    disk.write(key, b"value")
    (entry,) = (path for path in tmp_path.rglob("*") if path.is_file())
    now, written = 10**18 + 7, entry.stat().st_mtime_ns
    monkeypatch.setattr(disk.time, "time_ns", lambda: now)
    assert disk.read(key) == b"value"
    status = entry.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (now, written)


# ---- arrays of other libraries --------------------------------------------------------------------------------------


class Producer:
    """A DLPack producer whose memory is of this type of device."""

    def __init__(self, held: np.ndarray, type: int) -> None:
        self.held, self.type = held, type

    def __dlpack__(self, **_: Any) -> Any:
        return self.held.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.type, 0


@pytest.mark.parametrize("type", [1, 3])
def test_pinned_memory_of_the_host_is_taken(type: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 5, 2, 4))
    given = Producer(x, type)
    assert np.array_equal(attention(given, given, given), attention(x, x, x))


class OldProducer(Producer):
    """One whose DLPack is too old to say that it may be written to: NumPy takes it for read-only."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.held.__array_interface__


def test_what_dlpack_takes_for_read_only_is_written_where_numpy_may(rng: np.random.Generator) -> None:
    x, held = rng.standard_normal((1, 5, 2, 4)), np.zeros((1, 5, 2, 4))
    assert not np.from_dlpack(OldProducer(held, 1)).flags.writeable
    attention(x, x, x, out=OldProducer(held, 1))
    assert np.array_equal(held, attention(x, x, x))


def test_an_array_of_several_devices_is_refused() -> None:
    pytest.importorskip("jax")
    from cupyflash.interop import jax_

    one, other = (SimpleNamespace(platform="cpu", local_hardware_id=n) for n in range(2))
    for held, message in (({id(one): one}, None), ({id(one): one, id(other): other}, "^is sharded over 2 devices")):
        x = SimpleNamespace(is_deleted=lambda: False, devices=held.values)
        if message is None:
            assert jax_.named.__wrapped__(*x.devices()) == "cpu"
            continue
        with pytest.raises(ValueError, match=message):
            jax_._where(x)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_results_lie_as_their_shape_says(name: str, rank: int, layout: str, rng: np.random.Generator) -> None:
    """One axis after the other, however the inputs lie; what is traced is told the same."""
    shape = (2, 3, 5, 8)[-rank:]
    given = [rng.standard_normal(shape[::-1]).T for _ in range(3)]
    if name == "numpy":
        out, lse = attention(*given, layout=layout, return_lse=True)
        grads = attention_backward(given[0], *given, out, lse, layout=layout)
        assert all(x.flags.c_contiguous for x in (out, lse, *grads))
        return
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = [torch.from_numpy(x) for x in given]
    fake = FakeTensorMode()
    found = []
    for mode, there in ((contextlib.nullcontext(), tensors), (fake, [fake.from_tensor(x) for x in tensors])):
        with mode:
            out, lse = attention(*there, layout=layout, return_lse=True)
            results = (out, lse, *attention_backward(there[0], *there, out, lse, layout=layout))
        assert all(x.is_contiguous() for x in results)
        found.append([(tuple(x.shape), x.dtype, x.stride()) for x in results])
    assert found[0] == found[1]


def test_operators_give_contiguous_results_whatever_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile was told."""
    torch = pytest.importorskip("torch")
    from cupyflash.interop import torch_operators

    real = torch_operators.at_once

    def turned(call: Any) -> Any:
        results = real(call)
        if call.of.of_gradients:
            return results
        return tuple(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in results)

    monkeypatch.setattr(torch_operators, "at_once", turned)
    q = torch.randn(1, 5, 3, 8)
    out, lse = torch.compile(lambda q: attention(q, q, q, return_lse=True), backend="eager")(q)
    assert out.is_contiguous() and lse.is_contiguous()


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_how_far_elements_are_apart_has_no_sign(signs: tuple[int, int]) -> None:
    """Such arrays are read with 64-bit offsets."""
    for reach in (2**31 - 1, 2**31):
        x = View((3, 2), (signs[0] * (2**29 - 50), signs[1] * (reach - 2**30 + 100)), "float32", "cuda:0", "cupy")
        assert wide(x) == (reach == 2**31)


@pytest.mark.parametrize("is_wide", [False, True])
def test_offsets_of_wide_arrays_have_64_bits(is_wide: bool) -> None:
    of = problem("float32", score=trace(lambda s, b, h, i, j, t: s + t[i, j], {"t": ("float32", 2, is_wide)}))
    text = generate(plan(of, Arch.of("sm_80"), BACKWARD, "simt"))
    offset = next(line for line in text.splitlines() if "nearest(x1" in line)
    assert ("int(" not in offset) == is_wide, offset
