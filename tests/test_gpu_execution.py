"""How the kernels run, beside what they compute: streams, graphs, memory, tensors over 2^31 elements, other devices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import Backend, pairs
from criterion import assert_as_good
from reference import DTYPES, draw, standard, standard_in_own_precision, state
from semantics import draw_inputs

from cupyflash import attention, attention_backward
from cupyflash.gpu.compiler import compile_source

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(b, d, id=f"{b.name}-{d}") for b, d in pairs() if b.family]
LARGE = [b for b in (Backend(f, f) for f in ("sm90", "sm80", "simt")) if b.takes("float16", 128, 128)]
on_gpu_families = pytest.mark.parametrize(("backend", "dtype"), FAMILIES)


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    import cupy

    yield
    cupy.get_default_memory_pool().free_all_blocks()


def spin(milliseconds: int) -> None:
    """Keep CuPy's current stream busy."""
    import cupy

    source = 'extern "C" __global__ void spin(long long ns) { long long t, s;'
    source += ' asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(s));'
    source += ' do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); while (t - s < ns); }'
    cupy.RawKernel(source, "spin")((1,), (1,), (np.int64(milliseconds * 1_000_000),))


@on_gpu_families
def test_never_waits_for_the_gpu(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    import cupy

    q, k, v, dout = (backend.put(x) for x in draw_inputs(rng, dtype)[:4])
    options = {"causal": True, "family": backend.family}

    def run() -> None:
        out, lse = attention(q, k, v, return_lse=True, **options)
        attention_backward(dout, q, k, v, out, lse, **options)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(1)
        run()  # compiled, loaded, memory in the pool
        stream.synchronize()
        spin(500)
        run()
        assert not stream.done
        stream.synchronize()


@on_gpu_families
def test_in_a_cuda_graph(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Captured once, replayed on other inputs in the same memory."""
    import cupy

    first, second = draw_inputs(rng, dtype), draw_inputs(rng, dtype)
    q, k, v, dout = (backend.put(x) for x in first[:4])
    out = backend.nan(dout.shape, dtype)
    grads = tuple(backend.nan(x.shape, dtype) for x in (q, k, v))
    options = {"causal": True, "family": backend.family}

    def run() -> Any:
        _, lse = attention(q, k, v, out=out, return_lse=True, **options)
        attention_backward(dout, q, k, v, out, lse, grads=grads, **options)
        return lse

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()  # compiled, loaded, memory in the pool
        stream.begin_capture()
        lse = run()
        graph = stream.end_capture()
        for x, y in zip((q, k, v, dout), second):
            x.set(y)
        for x in (out, *grads):
            x.set(np.full(x.shape, np.nan, DTYPES[dtype]))
        graph.launch(stream)
        stream.synchronize()
    problem = state(*second[:3], causal=True)
    exact, own = (f(problem, *second[:3], None, second.dout) for f in (standard, standard_in_own_precision))
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        assert_as_good(backend.get(x), getattr(exact, name), getattr(own, name), name)


# ---- memory ---------------------------------------------------------------------------------------------------------

SHAPE = (4, 512, 8, 64)  # with more keys, shares of them might leave results of their own
ROWS = 4 * 8 * 512
SLACK = 16 << 10  # allocations are rounded up


def kept_in_memory(backend: Backend, dtype: str, inputs: int) -> int:
    """What a pass needs beside its results, of so many inputs.

    flash1's forward: m, l and, where it has 16 bits, O in float32. On tensor cores float32 numbers are split in two.
    """
    if backend.family == "flash1" and inputs == 3:
        return ROWS * 4 * (2 if dtype == "float32" else 2 + 64)
    return inputs * ROWS * 64 * 4 if (backend.family, dtype) == ("sm80", "float32") else 0


def row_vectors(backend: Backend) -> int:
    """What the backward keeps of each row: delta, and on tensor cores lse as well, in whole tiles."""
    return 2 if backend.family in ("sm90", "sm80") else 1


@on_gpu_families
def test_memory_through_cupy(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Forward: nothing beyond out and lse. Backward: one dQ of sums and a row vector or two beyond the gradients.

    With float32 on tensor cores, its inputs once more.
    """
    import cupy

    q, k, v, dout = (backend.put(draw(rng, dtype, *SHAPE)) for _ in range(4))
    beside = SLACK + kept_in_memory(backend, dtype, 3)
    lse_bytes = ROWS * (8 if dtype == "float64" else 4)
    options = {"causal": True, "family": backend.family}
    pool = cupy.cuda.MemoryPool()  # never gives back: what it took in all is at least the peak
    with cupy.cuda.using_allocator(pool.malloc):
        out = attention(q, k, v, **options)
        assert pool.total_bytes() <= q.nbytes + beside
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = attention(q, k, v, return_lse=True, **options)
        assert pool.total_bytes() <= q.nbytes + lse_bytes + beside
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        grads = attention_backward(dout, q, k, v, out, lse, **options)
        assert (
            pool.total_bytes()
            <= 3 * q.nbytes + (64 + row_vectors(backend)) * lse_bytes + kept_in_memory(backend, dtype, 4) + SLACK
        )
    assert all(x.shape == SHAPE for x in grads)


@on_gpu_families
def test_memory_through_torch(backend: Backend, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v, dout = (torch.randn(SHAPE, device="cuda").to(getattr(torch, dtype)) for _ in range(4))
    size = q.numel() * q.element_size()
    options = {"causal": True, "family": backend.family}

    def peak(function: Any) -> tuple[Any, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    rows = ROWS * (8 if dtype == "float64" else 4)
    (out, lse), forward = peak(lambda: attention(q, k, v, return_lse=True, **options))
    assert forward <= size + rows + kept_in_memory(backend, dtype, 3) + SLACK
    _, backward = peak(lambda: attention_backward(dout, q, k, v, out, lse, **options))
    assert backward <= 3 * size + (64 + row_vectors(backend)) * rows + kept_in_memory(backend, dtype, 4) + SLACK


# ---- tensors over 2^31 elements ------------------------------------------------------------------------------------


@pytest.fixture
def much_memory() -> Iterator[None]:
    """60 GB of the GPU, for one test at a time, also where several processes run tests."""
    import fcntl

    import cupy

    pool = cupy.get_default_memory_pool()
    with open(Path(tempfile.gettempdir()) / f"cupyflash-tests-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pool.free_all_blocks()
        free = cupy.cuda.Device().mem_info[0] / 1e9
        if free < 60:
            pytest.skip(f"needs 60 GB of free GPU memory, there are {free:.0f}")
        yield
        pool.free_all_blocks()


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("backend", LARGE, ids=lambda b: b.name)
@pytest.mark.parametrize("long", ["batch", "sequence"])
def test_tensors_over_2_to_31_elements(backend: Backend, long: str, rng: np.random.Generator) -> None:
    """The last rows are judged; what comes before repeats a block of random numbers."""
    import cupy

    shape = (16640, 128, 8, 128) if long == "batch" else (1, (1 << 20) + 1000, 16, 128)
    window = (100, 0)
    block = cupy.asarray(draw(rng, "float16", 1 << 20))

    def large() -> Any:
        x = cupy.empty(shape, np.float16)
        flat = x.reshape(-1)
        whole = flat.size // block.size * block.size
        flat[:whole].reshape(-1, block.size)[...] = block
        flat[whole:] = block[: flat.size - whole]
        x[-1, -300:] = cupy.asarray(draw(rng, "float16", *x[-1, -300:].shape))
        return x

    q, k, v, dout = (large() for _ in range(4))
    assert q.size > 2**31
    out = cupy.full(shape, np.nan, np.float16)
    grads = tuple(cupy.full(shape, np.nan, np.float16) for _ in range(3))
    options = {"causal": True, "window": window, "family": backend.family}
    _, lse = attention(q, k, v, out=out, return_lse=True, **options)
    attention_backward(dout, q, k, v, out, lse, grads=grads, **options)

    rows = min(300, shape[1])  # of the last batch; with the window, the last 100 depend on these alone
    tail = [backend.get(x[-1:, -rows:]) for x in (q, k, v, dout)]
    problem = state(*tail[:3], causal=True, window=window)
    exact, own = (f(problem, *tail[:3], None, tail[3]) for f in (standard, standard_in_own_precision))
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads)):
        judged = slice(-100, None)
        assert_as_good(
            backend.get(x[-1:, judged]), getattr(exact, name)[:, judged], getattr(own, name)[:, judged], name
        )
        assert not cupy.isnan(x[0, :64]).any() and not cupy.isnan(x[-1, -300:]).any()
    assert_as_good(backend.get(lse[-1:, :, -100:]), exact.lse[:, :, -100:], own.lse[:, :, -100:], "lse")


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_on_a_device_that_is_not_the_current_one(dtype: str, rng: np.random.Generator) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host = draw_inputs(rng, dtype)
    with cupy.cuda.Device(1):
        q, k, v, dout = (cupy.asarray(x) for x in host[:4])
    out, lse = attention(q, k, v, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse)
    problem = state(*host[:3])
    exact, own = (f(problem, *host[:3], None, host.dout) for f in (standard, standard_in_own_precision))
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)):
        assert x.device.id == 1
        assert_as_good(cupy.asnumpy(x), getattr(exact, name), getattr(own, name), name)
    with pytest.raises(ValueError, match="k is on cuda:0 but q is on cuda:1"):
        attention(q, cupy.asarray(host.k), v)


def test_kernels_loaded_once_serve_every_size(rng: np.random.Generator) -> None:
    """Sizes are no constants of a kernel: another length compiles and loads nothing."""
    backend = Backend("simt", "simt")
    for length in (100, 200, 300):
        q, k, v, dout = (backend.put(draw(rng, "float32", 1, length, 1, 64)) for _ in range(4))
        out, lse = attention(q, k, v, return_lse=True, family="simt")
        attention_backward(dout, q, k, v, out, lse, family="simt")
        if length == 100:
            before = compile_source.cache_info()
    assert compile_source.cache_info() == before


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("family", "dim"), [("sm90", 64), ("sm90", 128), ("sm90", 192), ("sm90", 256), ("sm80", 64), ("sm80", 256)]
)
def test_a_thousand_runs_give_the_same_bits(
    family: str, dim: int, deterministic: bool, rng: np.random.Generator
) -> None:
    """What races would show in: nothing but dq, and that only without `deterministic`, depends on who comes first."""
    import cupy

    backend = Backend(family, family)
    if not backend.takes("bfloat16", dim, dim):
        pytest.skip(f"no {family} kernels on this GPU")
    many, few = (2, 700, 8, dim), (2, 700, 2, dim)
    q, k, v, dout = (backend.put(draw(rng, "bfloat16", *shape)) for shape in (many, few, few, many))
    dlse = backend.put(draw(rng, "float32", 2, 8, 700))
    options = {"causal": True, "family": family}

    def run() -> tuple[Any, ...]:
        out, lse = attention(q, k, v, return_lse=True, **options)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, **options)
        return (out, lse, dk, dv, dq) if deterministic else (out, lse, dk, dv)

    first, different = run(), cupy.zeros(5, dtype=bool)
    for _ in range(1000):
        for n, (x, y) in enumerate(zip(first, run())):
            different[n] |= (x.view(cupy.uint16) != y.view(cupy.uint16)).any()
    assert not different.any(), f"out, lse, dk, dv, dq differ: {different}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq", [200, 257, 768, 1024])
@pytest.mark.parametrize("dim", [64, 80, 96, 111, 128, 192, 256])
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_the_forward_gives_the_same_bits(
    family: str, dim: int, seq: int, causal: bool, rng: np.random.Generator
) -> None:
    """Many tiles for each block, which it takes in an order that differs from run to run; lse to its last bit."""
    import cupy

    backend = Backend(family, family)
    if not backend.takes("bfloat16", dim, dim):
        pytest.skip(f"no {family} kernels on this GPU")
    q, k, v = (backend.put(draw(rng, "bfloat16", 60, seq, 4, dim)) for _ in range(3))
    options = {"causal": causal, "family": family, "return_lse": True}
    first, different = attention(q, k, v, **options), cupy.zeros(2, dtype=bool)
    for _ in range(200):
        for n, (x, y) in enumerate(zip(first, attention(q, k, v, **options))):
            different[n] |= (x.view(cupy.uint16) != y.view(cupy.uint16)).any()
    assert not different.any(), f"out, lse differ: {different}"
