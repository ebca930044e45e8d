"""What the machine that runs kernels on the CPU is for: it finds what is wrong with these."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import cuda_on_cpu
import lengths_on_cpu
import numpy as np
import on_cpu
import pytest
from cuda_on_cpu import Launch, as_cpp, compile_all, launch, needs_compiler
from on_cpu import Guarded, map_text

from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import Box

pytestmark = needs_compiler

# Threads write their numbers to shared memory and read those of others, in ways that differ in what is forgotten.
SOURCE = """
struct half_t { unsigned short bits; };
struct bfloat16_t { unsigned short bits; };
struct float8_t { unsigned char bits; };
struct integer8_t { signed char bits; };
#line 1 "ptx/barrier.cuh"
#line 1 "ptx/cp_async.cuh"
#line 1 "ptx/flag.cuh"
#line 1 "ptx/shared.cuh"
#line 1 "ptx/tma.cuh"
#line 1 "ptx/wgmma.cuh"
#line 1 "kernels.cu"
struct Params { float* out; const float* in; };
extern __shared__ __align__(1024) char memory[];

template <bool BARRIER>
void neighbour(Params p) {
    __shared__ int x[128];
    x[threadIdx.x] = threadIdx.x;
    if (BARRIER) __syncthreads();
    p.out[threadIdx.x] = x[(threadIdx.x + 64) % 128];
}
void barrier(Params p) { neighbour<true>(p); }
void no_barrier(Params p) { neighbour<false>(p); }

template <bool WAIT>
void copy(Params p) {
    unsigned bytes = shared_address(memory);
    if (threadIdx.x < 32) cp_async_16(bytes + 16 * threadIdx.x, p.in + 4 * threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<WAIT ? 0 : 1>();
    __syncthreads();
    p.out[threadIdx.x] = __uint_as_float(load_shared(bytes + 4 * threadIdx.x));
}
void wait(Params p) { copy<true>(p); }
void no_wait(Params p) { copy<false>(p); }

void two_barriers(Params p) {
    if (threadIdx.x < 64)
        sync_threads<128>(1);
    else
        sync_threads<128>(2);
}
void no_turn(Params p) {
    while (load_acquire((unsigned*)p.out) != 5) __nanosleep(32);
}
void outside(Params p) { store_shared(shared_address(memory) + 8192, 0); }
void outside_by_pointer(Params p) { memory[8192] = 0; }
void nowhere(Params p) { *(float*)(8ll * threadIdx.x) = 0; }
void amid_16_bytes(Params p) { *(float4*)(p.out + 4 * threadIdx.x + 2) = {}; }
void amid_8_bytes(Params p) { p.out[threadIdx.x] = ((const float2*)(p.in + threadIdx.x / 2 * 2 + 1))->x; }
void copy_from_amid(Params p) { cp_async_16(shared_address(memory), p.in + 1, false); }
void divided_warp(Params p) {
    if (threadIdx.x % 2)
        __syncwarp();
    else
        __any_sync(~0u, true);
}

template <bool FENCE, bool READ>
void leave(Params p) {
    unsigned mine = shared_address(memory) + 4 * threadIdx.x;
    store_shared(mine, __float_as_uint(p.in[threadIdx.x]));
    if (FENCE) fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_add(p.out, shared_address(memory), 512);
        tma_commit();
        if (READ) tma_wait_read();
    }
}
void fence(Params p) { leave<true, true>(p); }
void no_fence(Params p) { leave<false, true>(p); }
void no_read(Params p) { leave<true, false>(p); }

template <bool ENOUGH>
void load(Params p) {
    unsigned bytes = shared_address(memory), barrier = bytes + 1024;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect(barrier, ENOUGH ? 512 : 1024);
        bulk_load(bytes, p.in, 512, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    p.out[threadIdx.x] = __uint_as_float(load_shared(bytes + 4 * threadIdx.x));
}
void bytes(Params p) { load<true>(p); }

// A box of ones.
void box(Params p, TensorMap map) {
    for (int i = threadIdx.x; i < 256; i += 128) store_shared(shared_address(memory) + 4 * i, __float_as_uint(1));
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(map, shared_address(memory), 0, 0, 0, 0);
        tma_commit();
        tma_wait_read();
    }
}
void fewer_bytes(Params p) { load<false>(p); }

// A product of zeros; A and B are shared memory, which is zero.
template <bool FENCE, bool WAIT>
void product(Params p) {
    for (int i = threadIdx.x; i < 2048; i += 128) store_shared(shared_address(memory) + 4 * i, 0);
    fence_async();
    __syncthreads();
    unsigned long long operand = (64ull | 1ull << 30) << 32 | shared_address(memory) >> 4;
    float d[4][4];
    if (FENCE) wgmma_fence();
    wgmma_start(d, operand, operand, half_t());
    wgmma_commit();
    if (WAIT) wgmma_wait<0>();
    p.out[threadIdx.x] = p.in[threadIdx.x] + d[0][0];
}
void waited(Params p) { product<true, true>(p); }
void not_waited(Params p) { product<true, false>(p); }
void not_fenced(Params p) { product<false, true>(p); }
"""
RIGHT = ("barrier", "wait", "fence", "bytes", "waited")
NUMBERS = "wrong numbers"
WRONG = {  # and what is said of them, in one of the two orders or in both
    "no_barrier": NUMBERS,
    "no_wait": "where a copy may land|wrong numbers",
    "two_barriers": "nobody can go on:\n  block 0, threads 0 to 63: barrier 1.*\n  block 0, threads 64 to 127: barrier "
    "2",
    "no_turn": "nobody can go on:\n  block 0, threads 0 to 127: load_acquire",
    "outside": "4 bytes at 8192 of shared memory, of which the launch asked for 8192",
    "outside_by_pointer": "has written to 8192 of shared memory, of which the launch asked for 8192",
    "nowhere": "block 0, thread .*: Segmentation fault",
    "amid_16_bytes": "an address that is not aligned",
    "amid_8_bytes": "an address that is not aligned",
    "copy_from_amid": "cp.async of 16 bytes from",
    "divided_warp": "is at .*, other lanes of the warp at ",
    "no_fence": "no fence between",
    "no_read": "has ended while TMA was to read",
    "fewer_bytes": "nobody can go on:\n  block 0, threads 0 to 127: mbarrier_wait",
    "not_waited": NUMBERS,
    "not_fenced": "without wgmma_fence",
}


KERNELS = [*RIGHT, *WRONG, "box"]


@pytest.mark.parametrize("kernel", [*RIGHT, *WRONG])
def test_machine(kernel: str) -> None:
    (library,) = compile_all(as_cpp(SOURCE, KERNELS))
    given = np.arange(128, dtype=np.float32)
    expected = np.roll(given, -64) if "barrier" in kernel else given
    found = []
    for last_first in (False, True):
        out = np.zeros(128, np.float32)
        params = struct.pack("QQ", out.ctypes.data, given.ctypes.data)
        wrong = launch(library, kernel, Launch(1, 128, 1, 1, 1024, 8192, last_first), params)
        if wrong or not np.array_equal(out, expected):
            found.append(wrong or NUMBERS)
    if kernel in RIGHT:
        assert found == []
    else:
        assert found and all(re.search(WRONG[kernel], x) for x in found), found


def test_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For later runs, and until anything that they are made of changes."""
    monkeypatch.setenv("CUPYFLASH_TEST_CACHE", str(tmp_path / "kept"))
    cuda_on_cpu._machine()
    compiled, compiler = [], cuda_on_cpu._run_all
    monkeypatch.setattr(cuda_on_cpu, "_run_all", lambda *commands: compiled.extend(commands) or compiler(*commands))
    for n, made_of in enumerate((b"", b"", b"another header")):
        monkeypatch.setattr(cuda_on_cpu, "_made_of", lambda made_of=made_of: made_of)
        both = compile_all(*['extern "C" int number() { return 7; }'] * 2)
        assert [x.number() for x in both] == [7, 7] and len(compiled) == (1, 1, 2)[n]
    assert [x.suffix for x in (tmp_path / "kept").iterdir()] == [".so", ".so"]
    monkeypatch.undo()
    made_of = cuda_on_cpu._made_of()
    assert re.search(rb'"-march=(?!native)', made_of)  # libraries of another machine may not run
    assert (cuda_on_cpu.TESTS / "ptx_on_cpu" / "mma.h").read_bytes() in made_of


@pytest.mark.parametrize("columns", [3, 4, 5, 8])
def test_a_box_is_cut_at_16_bytes_of_a_row(columns: int) -> None:
    """Rows of a box lie in whole or not at all; along a row the engine writes 16 bytes at once."""
    (library,) = compile_all(as_cpp(SOURCE, KERNELS))
    out = np.zeros((1, 1, 4, 12), np.float32)
    params = struct.pack("QQ", out.ctypes.data, 0)
    text = map_text(out.ctypes.data, "float32", (columns, 3, 1, 1), (48, 192, 192), Box("out", 4))
    for last_first in (False, True):
        assert launch(library, "box", Launch(1, 128, 1, 1, 1024, 8192, last_first), params, text) is None
        assert out[0, 0].any(0).tolist() == [n < (columns + 3) // 4 * 4 for n in range(12)]
        assert out[0, 0].any(1).tolist() == [True] * 3 + [False]
        out[...] = 0


@pytest.mark.parametrize("stride, at", [(40, 0), (48, 8), (0, 0)])
def test_a_map_that_the_driver_would_refuse(stride: int, at: int) -> None:
    (library,) = compile_all(as_cpp(SOURCE, KERNELS))
    out = np.zeros((1, 1, 4, 12), np.float32)
    text = map_text(out.ctypes.data // 16 * 16 + at, "float32", (4, 3, 1, 1), (stride, 192, 192), Box("out", 4))
    wrong = launch(library, "box", Launch(1, 128, 1, 1, 1024, 8192, False), struct.pack("QQ", 0, 0), text)
    assert wrong is not None and "does not lie at 16 bytes" in wrong


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("size", [1, 128, 100_000])
def test_guards(size: int, behind: bool) -> None:
    """What lies before an array nobody may write, and what lies behind it nobody may read."""
    (library,) = compile_all(as_cpp(SOURCE, KERNELS))
    of = Guarded((size,), np.float32, np.zeros(size, np.float32))
    of.check("x")
    out = np.zeros(128, np.float32)
    how = Launch(1, 128, 1, 1, 1024, 8192, False)
    if behind:
        first = of.pointer + -(-size // 4) * 16
        wrong = launch(library, "wait", how, struct.pack("QQ", out.ctypes.data, first))
        assert wrong is not None and "Segmentation fault" in wrong
    else:
        assert launch(library, "wait", how, struct.pack("QQ", of.pointer - 512, out.ctypes.data)) is None
        with pytest.raises(AssertionError, match="x, an input, was written"):
            of.check("x")


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("columns", [1, 8, 13])
def test_guards_between_rows(columns: int, aligned: bool) -> None:
    of = Guarded((2, 3, 2, columns), np.float16, None, aligned, apart=True)
    row = of.array.strides[2] // 2
    assert row >= columns + 8 and (row % 8 == 0 or not aligned)
    of.array[...] = 0
    of.check("x")
    np.ndarray(1, np.float16, of._memory, of._start + 2 * columns)[...] = 0
    with pytest.raises(AssertionError, match="memory around x was written"):
        of.check("x")


@pytest.mark.parametrize(
    "forward, backward, said",
    [
        ((2, 192, 2, 1), None, "forward with {.*'KEYS': 192"),  # its scores have no room in registers
        (None, (64, 64, 1, 2, 2, 0), "backward with {.*'WARPGROUPS': 1"),  # which share keys out otherwise
    ],
)
def test_a_tile_that_a_problem_does_not_take(
    forward: tuple[int, ...] | None, backward: tuple[int, ...] | None, said: str, rng: np.random.Generator
) -> None:
    """The plan would have another, and what a test is about would not run."""
    arch = Arch("sm_90a", 90, 2, 232448)
    shapes = {"seq": (200, 200), "dims": (128, 128)}
    with pytest.raises(AssertionError, match=f"sm90 has no {said}"):
        on_cpu.check("sm90", arch, rng, "float16", shapes, {"tiles": (forward, backward)})
    of = lengths_on_cpu.Sequences(rng, [200, 70], [200, 90], dtype="float16", dims=(128, 128))
    with pytest.raises(AssertionError, match=f"sm90 has no {said}"):
        lengths_on_cpu.check("sm90", arch, of, tiles={"forward": forward, "backward": backward})
