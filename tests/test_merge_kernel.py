"""The kernel that puts parts together, beside `cupyflash.merge` on the CPU: without a GPU, and on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from cuda_on_cpu import Launch, as_cpp, cases, compile_all, launch, needs_compiler
from on_cpu import Guarded
from reference import DTYPES

from cupyflash import merge
from cupyflash.gpu import compiler
from cupyflash.gpu.merge import MOST, MOST_STRIDED, NAME, WARPS, Merging, Prepared
from cupyflash.problem import View

CLOSE = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 2e-6, "float64": 1e-14}


def view(x: np.ndarray, pointer: int) -> View:
    return View(x.shape, tuple(n // x.itemsize for n in x.strides), x.dtype.name, "cuda:0", "cupy", pointer)


def draw(rng: np.random.Generator, dtype: str, parts: int, dim: int, layout: str) -> tuple[list[Any], list[Any]]:
    """Of (2, 13, 3, dim); of some rows no part sees a key, and of one lse is NaN, of another inf."""
    shape = (2, 13, 3, dim) if layout == "bshd" else (2, 3, 13, dim)
    kind = np.float64 if dtype == "float64" else np.float32
    outs = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(parts)]
    lses = [(8 * rng.standard_normal((2, 3, 13))).astype(kind) for _ in range(parts)]
    for n, lse in enumerate(lses):
        lse[0, 1, : 3 + n] = -np.inf
    lses[-1][1, 2, 4], lses[0][1, 0, 12] = np.nan, np.inf
    return outs, lses


def expected(outs: list[Any], lses: list[Any], layout: str) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        return merge([x.astype("f8") for x in outs], [x.astype("f8") for x in lses], layout=layout)


def compare(found: tuple[Any, Any], want: tuple[np.ndarray, np.ndarray], dtype: str) -> None:
    close = CLOSE[dtype]
    close_lse = {"rtol": 1e-14, "atol": 1e-14} if dtype == "float64" else {"rtol": 2e-6, "atol": 1e-6}
    np.testing.assert_allclose(np.asarray(found[0], "f8"), want[0], rtol=close, atol=2 * close)
    np.testing.assert_allclose(np.asarray(found[1], "f8"), want[1], **close_lse)
    assert np.isneginf(found[1][0, 1, :3]).all() and np.isnan(found[1][1, 2, 4]) and np.isnan(found[1][1, 0, 12])


CASES = {
    "bfloat16": ("bfloat16", 3, 64, "bshd"),
    "float16": ("float16", 2, 130, "bhsd"),
    "float32": ("float32", 2, 37, "bhsd"),
    "float64": ("float64", 9, 132, "bshd"),
    "many": ("float32", 70, 12, "bshd"),
}


@needs_compiler
@pytest.mark.parametrize("form", ["apart", "in place", "strided", "wide"])
@cases(CASES, *CASES)
def test_parts_make_the_whole(case: str, form: str, rng: np.random.Generator) -> None:
    dtype, parts, dim, layout = CASES[case]
    if form == "strided":
        parts = min(parts, MOST_STRIDED)
    outs, lses = draw(rng, dtype, parts, dim, layout)
    given = [Guarded(x.shape, x.dtype, x, form == "strided" and n % 2 == 1) for n, x in enumerate(outs)]
    norms = [Guarded(x.shape, x.dtype, x) for x in lses]
    of_result = np.dtype("f4") if form == "wide" and dtype != "float64" else outs[0].dtype
    to, lse = Guarded(outs[0].shape, of_result), Guarded(lses[0].shape, lses[0].dtype)
    if form == "in place":
        to, lse = given[0], norms[0]
    merging = Merging.of(
        [(view(x.array, x.pointer), view(y.array, y.pointer)) for x, y in zip(given, norms)],
        (view(to.array, to.pointer), view(lse.array, lse.pointer)),
        layout,
    )
    assert merging.strided == (form == "strided")
    (library,) = compile_all(as_cpp(merging.source(), [NAME]))
    params = merging.params([x.pointer for x in (*given, *norms, to, lse)])
    wrong = launch(library, NAME, Launch(merging.blocks, 32 * WARPS, 1, 2, 1024, 0, form == "wide"), params)
    assert wrong is None, wrong
    compare((to.array, lse.array), expected(outs, lses, layout), dtype if of_result != np.float32 else "float32")
    for n, x in enumerate((*given, *norms, to, lse)):
        if form != "in place" or x not in (to, lse):
            x.check(f"array {n}")


class OnCpu:
    """As an adapter of a GPU has it, on NumPy arrays."""

    device, stream, signature = (lambda x: 0), (lambda n: 0), (lambda x: (x.shape, x.strides, x.dtype))
    pointer, view = (lambda x: x.ctypes.data), (lambda x: view(x, x.ctypes.data))
    empty = lambda shape, dtype, n: np.full(shape, np.nan, DTYPES[dtype])


@needs_compiler
@pytest.mark.parametrize(("parts", "strided", "launches"), [(70, False, [1]), (70, True, [2, 1]), (500, False, [3, 1])])
def test_many_parts_take_several_launches(
    parts: int, strided: bool, launches: list[int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_cpu(self: Merging, addresses: list[int], *_: int) -> None:
        (library,) = compile_all(as_cpp(self.source(), [NAME]))
        how = Launch(self.blocks, 32 * WARPS, 1, 2, 1024, 0, False)
        assert launch(library, NAME, how, self.params(addresses)) is None

    monkeypatch.setattr(Merging, "launch", on_cpu)
    outs, lses = draw(rng, "bfloat16", parts, 12, "bshd")
    given = [np.repeat(x, 2, 1)[:, ::2] if strided and n % 2 else x for n, x in enumerate(outs)]
    want = expected(outs, lses, "bshd")
    prepared = Prepared(OnCpu, given, lses, [], "bshd")
    assert [len(step) for step in prepared.steps] == launches
    found = prepared.run(OnCpu, given, lses, [])
    assert found[0].dtype == outs[0].dtype
    compare(found, want, "bfloat16")
    into = [given[1], lses[1]]
    compare(Prepared(OnCpu, given, lses, into, "bshd").run(OnCpu, given, lses, into), want, "bfloat16")


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_it_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for parts, strided in ((2, True), (8, False), (MOST, False), (MOST_STRIDED, True)):
        for dtype, out_dtype in (("bfloat16", "bfloat16"), ("float32", "float16"), ("float64", "float64")):
            merging = Merging(dtype, out_dtype, parts, strided, True, 100, b"")
            found = compiler.compile_source(merging.source(), arch).resources[NAME]
            assert found.spill_stores == 0 and found.registers <= 128


# ---- on a GPU -----------------------------------------------------------------------------------------------------

GPU = Backend("simt", "simt")


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 9, 70, 500])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim", [64, 37, 132])
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_on_a_gpu(dtype: str, dim: int, layout: str, parts: int, rng: np.random.Generator) -> None:
    outs, lses = draw(rng, dtype, parts, dim, layout)
    want = expected(outs, lses, layout)
    put = [GPU.put(x) for x in outs], [GPU.put(x) for x in lses]
    GPU.poison()
    found = merge(*put, layout=layout)
    assert found[0].dtype == outs[0].dtype and found[1].dtype == lses[0].dtype
    compare(tuple(map(GPU.get, found)), want, dtype)
    strided = [GPU.put(np.repeat(x, 2, 0))[n % 2 :: 2] if n else put[0][0] for n, x in enumerate(outs)]
    compare(tuple(map(GPU.get, merge(strided, put[1], layout=layout))), want, dtype)
    turned = [GPU.put(x.swapaxes(2, 3)).swapaxes(2, 3) for x in outs]  # rows that no kernel reads
    compare(tuple(map(GPU.get, merge(turned, put[1], layout=layout))), want, dtype)
    into = put[0][0], put[1][0]
    assert merge(*put, layout=layout, out=into)[0] is into[0]
    compare(tuple(map(GPU.get, into)), want, dtype)


@pytest.mark.gpu
def test_torch_on_a_gpu(rng: np.random.Generator) -> None:
    """At once, where autograd follows, compiled, and in a CUDA graph."""
    torch = pytest.importorskip("torch")
    outs = [torch.from_numpy(rng.standard_normal((2, 13, 3, 64))).cuda().to(torch.bfloat16) for _ in range(4)]
    lses = [torch.from_numpy(rng.standard_normal((2, 3, 13))).cuda().float() for _ in range(4)]
    want = merge([x.cpu().double() for x in outs], [x.cpu().double() for x in lses])
    leaves = [x.clone().requires_grad_() for x in outs]
    found = merge(leaves, lses)
    found[0].float().sum().backward()
    assert all(x.grad is not None for x in leaves)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    merge(outs, lses)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        replayed = merge(outs, lses)
    graph.replay()
    for x, y in (found, merge(outs, lses), torch.compile(merge)(outs, lses), replayed):
        torch.testing.assert_close(x.detach().cpu().double(), want[0], rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(y.detach().cpu().double(), want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5, 3, 4), (2, 5, 3, 0), (2, 5, 0, 4), (5, 4), (5, 3, 4)])
def test_empty_and_few_axes_on_a_gpu(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    outs = [rng.standard_normal(shape).astype("f4") for _ in range(3)]
    rows = shape[:-1]
    lses = [rng.standard_normal((*rows[:-2], *rows[-2:][::-1])).astype("f4") for _ in range(3)]
    want = merge(outs, lses)
    found = merge([GPU.put(x) for x in outs], [GPU.put(x) for x in lses])
    for x, y in zip(found, want):
        np.testing.assert_allclose(GPU.get(x), y, rtol=1e-5, atol=1e-5)
