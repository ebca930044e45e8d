"""Which arrays are taken, what is said of those that are not, and that nothing is copied and no stream left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import no_gpu
from frameworks import judge, references, sleep
from reference import DTYPES
from semantics import draw_inputs

import cupyflash
from cupyflash import attention, attention_backward, attention_backward_jvp, attention_jvp, interop


class DLPackOnly:
    """A foreign array: DLPack and nothing else."""

    def __init__(self, array: Any, device: tuple[int, int] | None = None) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device or self._array.__dlpack_device__()


class CudaArrayOnly:
    """A foreign GPU array as Numba has it: the CUDA array interface and nothing else."""

    def __init__(self, array: Any, stream: int | None = None) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "version": 3, "stream": stream}


class OnNoGpu:
    """A foreign GPU array where there is no GPU: nobody gets as far as its memory."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {"shape": (3, 4), "typestr": "<f4", "data": (1 << 40, False), "version": 3}


def test_importing_imports_no_framework() -> None:
    code = (
        "import sys, numpy as np, cupyflash\n"
        "q = np.ones((3, 4), np.float32)\n"
        "cupyflash.attention(q, q, q)\n"
        "print([m for m in ('torch', 'jax', 'cupy') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "bad", [None, 3.0, [[1.0]], ((1.0,),), "q", b"q", object(), {}], ids=lambda x: type(x).__name__
)
def test_what_is_no_array(bad: Any) -> None:
    good = np.ones((3, 4), np.float32)
    expected = f"is a {type(bad).__name__}; it must be an array"
    with pytest.raises(TypeError, match=f"^q {expected}"):
        attention(bad, good, good)
    if bad is not None:  # where None means that there is none
        with pytest.raises(TypeError, match=f"^key_mask {expected}"):
            attention(good, good, good, key_mask=bad)
        with pytest.raises(TypeError, match=f"^grads: dk {expected}|^dk {expected}"):
            attention_backward(good, good, good, good, good, good[:, 0], grads=(good, bad, good))


@pytest.mark.parametrize("library", ["numpy.ndarray", "torch.Tensor", "jax.Array", "cupy.ndarray"])
def test_a_class_is_no_array(library: str) -> None:
    module, _, name = library.partition(".")
    cls = getattr(pytest.importorskip(module), name)
    good = np.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match=rf"^k is the class .*{name}; it must be an array"):
        attention(good, cls, good)
    with pytest.raises(TypeError, match=rf"^outs\[0\] is the class .*{name}; it must be an array"):
        cupyflash.merge([cls], [good])
    with pytest.raises(TypeError, match=rf"^q is the class .*{name}; it must be an array"):
        cupyflash.explain(cls)


def test_numpy_classes_that_are_no_arrays_for_us() -> None:
    good = np.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match="k is a numpy.matrix; it must be an array; pass numpy.asarray"):
        attention(good, good.view(np.matrix), good)
    with pytest.raises(TypeError, match="v is a numpy.*MaskedArray; its mask would be lost"):
        attention(good, good, np.ma.array(good, mask=good > 0))
    with pytest.raises(TypeError, match="q is a numpy.float32; it must be an array"):
        attention(np.float32(1), good, good)
    with pytest.raises(TypeError, match="q has dtype >f4; it must be one of float16"):
        attention(good.astype(">f4"), good, good)


def test_numpy_subclasses(tmp_path: Path) -> None:
    class Mine(np.ndarray):
        pass

    good = np.random.default_rng(0).standard_normal((5, 4), np.float32)
    good.tofile(tmp_path / "q")
    mapped = np.memmap(tmp_path / "q", np.float32, "r", shape=(5, 4))
    expected = attention(good, good, good)
    np.testing.assert_array_equal(attention(mapped, good.view(Mine), good), expected)


def test_operators_of_numpy_subclasses_are_not_used(rng: np.random.Generator) -> None:
    class Units(np.ndarray):
        def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    q, k, v, dout, bias = rng.standard_normal((5, 6, 6)).astype(np.float32)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    expected = (out, lse, *attention_backward(dout, q, k, v, out, lse, bias=bias))
    q, k, v, dout, bias, out, lse = (x.view(Units) for x in (q, k, v, dout, bias, out, lse))
    target = np.empty_like(q)
    found = (*attention(q, k, v, bias=bias, return_lse=True), *attention_backward(dout, q, k, v, out, lse, bias=bias))
    assert attention(q, k, v, bias=bias, out=target) is target
    for x, y in zip((*found, target), (*expected, expected[0])):
        np.testing.assert_array_equal(np.asarray(x), y)


def test_fields_of_records(rng: np.random.Generator) -> None:
    """Strides of 10 bytes are 2.5 elements: whether they overlap is a matter of bytes."""
    records = np.zeros((1, 4, 2, 8), [("x", "f4"), ("y", "f2"), ("z", "f4")])
    q = records["z"] = rng.standard_normal(records.shape, np.float32)
    expected = attention(q, q, q)
    np.testing.assert_array_equal(attention(records["z"], q, q, out=records["x"]), expected)
    np.testing.assert_array_equal(records["x"], expected)
    np.testing.assert_array_equal(records["z"], q)
    memory = records.reshape(-1).view(np.uint8)
    for start in (0, 4, 6):  # over x, y and z
        out = np.ndarray(records.shape, np.float32, memory, start, records.strides)
        with pytest.raises(ValueError, match="out shares memory with q; it must have memory of its own"):
            attention(records["z" if start else "x"], q, q, out=out)
    with pytest.raises(ValueError, match="elements share memory"):
        attention(q[:, :1], q, q, out=np.ndarray((1, 1, 2, 8), np.float32, memory, 0, (0, 0, 48, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_view(dtype: str) -> None:
    x = np.zeros((2, 3, 4, 10), DTYPES[dtype]).transpose(0, 2, 1, 3)[:, ::-1, :, ::2]
    lib = interop.library("q", x)
    assert lib.view(x) == ((2, 4, 3, 5), (120, -10, 40, 2), dtype, "cpu", "numpy", x.__array_interface__["data"][0])


def test_known_libraries_pass_through_untouched() -> None:
    x, y = np.ones((3, 4), np.float32), np.ones(3, bool)
    lib = interop.library("q", x)
    assert lib.kind == "numpy"
    given, targets = {"q": x, "key_mask": y}, {"out": x}
    arrays, into = interop.adopt(lib, given, targets)
    assert arrays is given and into is targets
    assert lib.to_numpy(x) is x and lib.from_numpy(x) is x and not lib.on_gpu(x) and lib.recorder(given) is None


def test_dlpack_producers_on_the_cpu_become_numpy() -> None:
    x, k = np.ones((3, 4), np.float32), np.ones((5, 4), np.float32)
    q = DLPackOnly(x)
    lib: Any = interop.library("q", q)
    arrays, _ = interop.adopt(lib, {"q": q, "k": k}, {})
    assert lib.kind == "numpy" and type(arrays["q"]) is np.ndarray
    assert np.shares_memory(arrays["q"], x) and arrays["k"] is k
    out = attention(q, DLPackOnly(k), k)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, attention(x, k, k))


def strict(x: np.ndarray) -> Any:
    return pytest.importorskip("array_api_strict").asarray(x)


def on_another_device(x: np.ndarray) -> Any:
    xp = pytest.importorskip("array_api_strict")
    return xp.asarray(x, device=xp.Device("device1"))


def warp(x: np.ndarray) -> Any:
    wp = pytest.importorskip("warp")
    wp.config.quiet = True
    return wp.array(x, dtype=wp.dtype_from_numpy(x.dtype), device="cpu")


def tensorflow(x: np.ndarray) -> Any:
    return pytest.importorskip("tensorflow").constant(x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("make", [strict, on_another_device, warp, tensorflow])
def test_the_real_packages(make: Any, dtype: str, rng: np.random.Generator) -> None:
    """In and out of the same kind, in every pass and in merge, with optional arrays and targets of theirs."""
    if dtype == "float16" and make in (strict, on_another_device):
        pytest.skip("the standard of arrays has no float16")
    q, k, v, bias = (
        make(rng.standard_normal(shape).astype(dtype)) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (5, 7))
    )

    def get(x: Any) -> np.ndarray:
        return np.from_dlpack(x)

    plain = [get(x) for x in (q, k, v)]
    of_numpy = attention(*plain, bias=get(bias), causal=True, return_lse=True)
    out, lse = attention(q, k, v, bias=bias, causal=True, return_lse=True)
    grads = attention_backward(out, q, k, v, out, lse, bias=bias, causal=True, wrt="bias")
    expected = attention_backward(of_numpy[0], *plain, *of_numpy, bias=get(bias), causal=True, wrt="bias")
    merged = cupyflash.merge([out, out], [lse, lse])

    def along(of: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any) -> tuple[Any, ...]:
        moved, options = {"q": q, "bias": bias}, {"bias": bias, "causal": True}
        jvp = attention_jvp(moved, q, k, v, out, lse, **options)
        return *jvp, *attention_backward_jvp(
            moved, out, q, k, v, out, lse, **options, **({} if of is make else {"jvp": jvp})
        )

    moving = along(make, q, k, v, bias, out, lse)
    for x, y in zip(moving, along(np, *plain, get(bias), *of_numpy), strict=True):
        assert type(x) is type(q)
        np.testing.assert_array_equal(get(x), y)
    found = (out, lse, *grads, grads.dbias)
    assert all(type(x) is type(q) for x in (*found, *merged))
    assert all(x.device == q.device for x in (*found, *merged))
    for x, y in zip(found, (*of_numpy, *expected, expected.dbias), strict=True):
        np.testing.assert_array_equal(get(x), y)
    if make is not tensorflow:  # whose tensors are immutable
        target = make(np.zeros((2, 5, 4, 6), dtype))
        assert attention(q, k, v, bias=bias, causal=True, out=target) is target
        np.testing.assert_array_equal(get(target), of_numpy[0])
        targets = tuple(make(np.zeros(x.shape, dtype)) for x in plain)
        written = attention_backward(out, q, k, v, out, lse, bias=bias, causal=True, grads=targets)
        assert all(x is y for x, y in zip(written, targets))
        np.testing.assert_array_equal(get(targets[1]), expected.dk)
        assert attention_jvp({"q": q}, q, k, v, out, lse, bias=bias, causal=True, tout=target)[0] is target


def test_arrays_of_numba_become_numbas(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own function for the CUDA array interface, as far as that is seen without a GPU."""
    cuda = pytest.importorskip("numba.cuda")
    seen: list[Any] = []
    monkeypatch.setattr(cuda, "as_cuda_array", lambda x: seen.append(x) or "Numba's")
    x = type("DeviceNDArray", (DLPackOnly,), {"__module__": "numba.cuda.cudadrv.devicearray"})(np.ones((3, 4)))
    assert attention(x, x, x, return_lse=True) == ("Numba's", "Numba's")
    assert [y.shape for y in seen] == [(3, 4), (3,)]


def test_dlpack_producers_that_cannot_be_taken() -> None:
    good = np.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match="q is on a device of DLPack type 8; it must be on a CPU or a CUDA GPU"):
        attention(DLPackOnly(good, (8, 0)), good, good)
    with pytest.raises(TypeError, match="k is a DLPackOnly that NumPy cannot take by DLPack"):
        attention(good, DLPackOnly(good.astype(ml_dtypes.bfloat16), (1, 0)), good)


@pytest.mark.parametrize("broken", [RuntimeError("no"), TypeError("no"), 5, (), ("cpu", 0)], ids=str)
def test_producers_that_do_not_work(broken: Any) -> None:
    class Producer(DLPackOnly):
        def __dlpack_device__(self) -> Any:
            if isinstance(broken, Exception):
                raise broken
            return broken

    good = np.ones((3, 4), np.float32)
    for name in ("q", "v", "bias", "out"):
        with pytest.raises(TypeError, match=f"^{name} is a Producer that cannot tell its device by DLPack"):
            attention(**{"q": good, "k": good, "v": good, name: Producer(good)})


def test_one_library_only() -> None:
    torch = pytest.importorskip("torch")
    a, t = np.ones((3, 4), np.float32), torch.ones(3, 4)
    with pytest.raises(TypeError, match="k is a torch array but q is a numpy array; all arrays must come from one lib"):
        attention(a, t, a)
    with pytest.raises(TypeError, match="key_mask is a numpy array but q is a torch array"):
        attention(t, t, t, key_mask=np.ones(3, bool))
    with pytest.raises(TypeError, match="out is a numpy array but q is a torch array"):
        attention(t, t, t, out=a)
    with pytest.raises(TypeError, match="dout is a numpy array but q is a torch array"):
        attention_backward(a, t, t, t, t, t[:, 0])


def test_gpu_arrays_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupyflash.interop.cupy_", raising=False)
    x = OnNoGpu()
    with pytest.raises(ImportError, match=r"arrays on a GPU need CuPy, .*; run pip install "):
        attention(x, x, x)


@pytest.mark.parametrize("described", [None, {}, {"shape": (3, 4)}], ids=str)
def test_gpu_arrays_that_are_none(described: Any) -> None:
    pytest.importorskip("cupy")
    x = OnNoGpu()
    x.__cuda_array_interface__ = described
    with pytest.raises(TypeError, match="^q is a OnNoGpu that CuPy cannot take"):
        attention(x, x, x)


@pytest.mark.skipif(no_gpu() is None, reason="there is a driver")
def test_gpu_arrays_without_a_driver() -> None:
    pytest.importorskip("cupy")
    x = OnNoGpu()
    with pytest.raises(
        RuntimeError, match="no NVIDIA driver was found; install one|CUDA sees no GPU|driver is for CUDA"
    ):
        attention(x, x, x)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy(dtype: str, rng: np.random.Generator) -> None:
    import cupy

    inputs = draw_inputs(rng, dtype, heads=(4, 2), key_mask=True)
    q, k, v, dout, mask = (cupy.asarray(x) for x in inputs[:5])
    lib = interop.library("q", q)
    assert lib.view(q) == (q.shape, (2 * 67 * 4 * 64 // 2, 4 * 64, 64, 1), dtype, "cuda:0", "cupy", q.data.ptr)
    assert lib.pointer(q) == q.data.ptr and lib.device(q) == 0 and lib.signature(q) != lib.signature(k)
    out, lse = attention(q, k, v, key_mask=mask, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, key_mask=mask)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    assert all(type(x) is cupy.ndarray for x in results.values())
    judge({name: x.get() for name, x in results.items()}, *references(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("foreign", [DLPackOnly, CudaArrayOnly])
def test_foreign_gpu_arrays_become_cupy(foreign: type, rng: np.random.Generator) -> None:
    import cupy

    inputs = draw_inputs(rng, "float32", key_mask=True)
    q, k, v, _, mask = (cupy.asarray(x) for x in inputs[:5])
    lib: Any = interop.library("q", foreign(q))
    arrays, _ = interop.adopt(lib, {"q": foreign(q), "k": k}, {})
    taken = arrays["q"]
    assert lib.kind == "cupy" and type(taken) is cupy.ndarray and taken.data.ptr == q.data.ptr and arrays["k"] is k
    out = attention(foreign(q), foreign(k), v, key_mask=foreign(mask))
    assert type(out) is cupy.ndarray
    judge({"out": out.get()}, *references(inputs))


def numba_array(x: np.ndarray) -> Any:
    return pytest.importorskip("numba.cuda").to_device(x)


def warp_array(x: np.ndarray) -> Any:
    wp = pytest.importorskip("warp")
    wp.config.quiet = True
    return wp.array(x, dtype=wp.dtype_from_numpy(x.dtype), device="cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [numba_array, warp_array])
def test_the_real_packages_on_a_gpu(make: Any, rng: np.random.Generator) -> None:
    import cupy

    inputs = draw_inputs(rng, "float32", key_mask=False)
    q, k, v, dout = (make(np.ascontiguousarray(x)) for x in inputs[:4])
    out, lse = attention(q, k, v, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    assert all(type(x) is type(q) for x in results.values())
    judge({name: cupy.asarray(x).get() for name, x in results.items()}, *references(inputs))


@pytest.mark.gpu
def test_memory_of_cuda_core(rng: np.random.Generator) -> None:
    """As docs/start.md takes it: a view of the buffer, into which the result is written."""
    import cupy

    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    inputs = draw_inputs(rng, "float16", key_mask=False)

    def buffer(x: np.ndarray) -> Any:
        held = device.allocate(x.nbytes, stream=device.default_stream)
        device.sync()
        view = cupy.from_dlpack(held).view(x.dtype).reshape(x.shape)
        assert view.data.ptr == int(held.handle)
        view[...] = cupy.asarray(x)
        return held, view

    buffers = [buffer(x) for x in (*inputs[:3], np.full(inputs[3].shape, np.nan, np.float16))]
    q, k, v, out = (view for _, view in buffers)
    assert attention(q, k, v, out=out) is out
    written = cupy.from_dlpack(buffers[-1][0]).view("float16").reshape(out.shape)
    judge({"out": written.get()}, *references(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_work_goes_to_cupys_current_stream(dtype: str, rng: np.random.Generator) -> None:
    import cupy

    inputs = draw_inputs(rng, dtype)
    late = [cupy.asarray(x) for x in inputs[:4]]
    out, lse = attention(*late[:3], return_lse=True)
    attention_backward(late[3], *late[:3], out, lse)  # compiled: what follows is queued while the stream sleeps
    arrays = [cupy.full_like(x, np.nan) for x in late]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    sleep(stream)
    with stream:
        for x, source in zip(arrays, late):
            x[...] = source
        q, k, v, dout = arrays
        out, lse = attention(q, k, v, return_lse=True)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse)
        results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        judge({name: x.get(stream=stream) for name, x in results.items()}, *references(inputs))


@pytest.mark.gpu
def test_a_foreign_producers_stream_is_waited_for(rng: np.random.Generator) -> None:
    import cupy

    inputs = draw_inputs(rng, "float32")
    late = [cupy.asarray(x) for x in inputs[:3]]
    attention(*late)
    arrays = [cupy.full_like(x, np.nan) for x in late]
    cupy.cuda.Device().synchronize()
    producer, ours = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    sleep(producer)
    with producer:
        for x, source in zip(arrays, late):
            x[...] = source
    with ours:
        foreign = [CudaArrayOnly(x, producer.ptr) for x in arrays]
        out = attention(*foreign)
        assert not producer.done, "the host waited for the producer"
        judge({"out": out.get(stream=ours)}, *references(inputs))


@pytest.mark.gpu
def test_a_cpu_array_among_gpu_arrays() -> None:
    import cupy

    a, g = np.ones((3, 4), np.float32), cupy.ones((3, 4), np.float32)
    with pytest.raises(TypeError, match="k is a numpy array but q is a cupy array; all arrays must come from one lib"):
        attention(g, a, g)
    with pytest.raises(TypeError, match="key_mask is a numpy array but q is a cupy array"):
        attention(g, g, g, key_mask=np.ones(3, bool))
    with pytest.raises(TypeError, match="v is a cupy array but q is a numpy array"):
        attention(a, a, CudaArrayOnly(g))


@pytest.mark.gpu
def test_strides_that_count_no_whole_elements() -> None:
    import cupy

    x = cupy.zeros((6, 5), np.float32)[:, :4].view(np.float64)
    with pytest.raises(ValueError, match="no multiples of its item size 8; pass cupy.ascontiguousarray"):
        attention(x, x, x)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [3, 4])
def test_results_are_contiguous(layout: str, rank: int) -> None:
    """On the CPU as on a GPU, whichever the layout: who reshapes them without a copy can do so."""
    q, k, v, dout = np.random.default_rng().standard_normal((4, *(2, 3, 5, 8)[-rank:]), np.float32)
    out, lse = cupyflash.attention(q, k, v, layout=layout, return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, layout=layout)
    assert all(x.flags.c_contiguous for x in (out, lse, grads.dq, grads.dk, grads.dv))
