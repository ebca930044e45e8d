"""The kernel that appends to caches of 8 bits, beside what array operations write: without a GPU, to the bit, and on
one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from append_on_cpu import OnCpu, on_cpu
from cached_problems import BY, EIGHT
from cuda_on_cpu import cases, needs_compiler
from on_cpu import Guarded
from reference import DTYPES
from test_appending import assert_same

from cupyflash import attention_append, writing
from cupyflash.gpu import append, compiler
from cupyflash.gpu.append import NAME, Appending, Program, planned

FORMS: dict[str, dict[str, Any]] = {  # dims, dtype of new rows, half of rotary; columns apart
    "dense": {"dims": (16, 24), "dtype": "float16", "half": 8},
    "packed pages": {"dims": (64, 16), "dtype": "bfloat16", "half": 20, "packed": True, "page": 7},
    "dense pages": {"dims": (20, 8), "dtype": "float16", "half": 4, "page": 4, "layout": "bhsd"},
    "slots": {"dims": (128, 128), "dtype": "bfloat16", "half": 0, "page": 8, "slots": True},
    "one head": {"dims": (16, 16), "dtype": "bfloat16", "half": 8, "heads": (3, 1)},
    "odd": {"dims": (7, 5), "dtype": "float16", "half": 3},
    "columns apart": {"dims": (256, 40), "dtype": "float16", "half": 128, "apart": 2},  # more than a warp finds a scale
    "wide": {"dims": (576, 512), "dtype": "bfloat16", "half": 32, "packed": True, "page": 16},
}
WAYS: dict[str, tuple[str | None, str | None]] = {str(by): (by, by) for by in BY}
WAYS |= {"row and number": ("row", "number"), "head and row": ("head", "row")}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    yield from on_cpu(monkeypatch)


class Drawn(NamedTuple):
    """A call's arrays; those that it writes to are `written`."""

    arrays: dict[str, np.ndarray]
    numbers: dict[str, float]
    options: dict[str, Any]
    written: list[str]

    def call(self, put: Any = lambda name, x: x, **more: Any) -> tuple[Any, dict[str, Any]]:
        arrays = {name: put(name, x) for name, x in self.arrays.items()}
        given = dict(arrays)
        if "cos" in given:
            given["rotary"] = given.pop("cos"), given.pop("sin")
        return attention_append(**{"q": None, **given, **self.numbers, **self.options, **more}), arrays


def draw(rng: np.random.Generator, eight: str, by: tuple[str | None, str | None], **how: Any) -> Drawn:
    """New rows hold numbers that are not finite too, but where something is attended: there rows that belong to nobody
    hold NaN, and so do their scales."""
    n, heads, kv_heads = 3, *how.get("heads", (4, 2))
    page, packed, slots = how.get("page", 0), how.get("packed", False), how.get("slots", False)
    filled = np.array([3, 0, 9], np.int32)
    front = (5,) if packed or slots else (n, 2)
    entries, rows = (12, page) if page else (n, 16)
    arrays: dict[str, Any] = {}
    for name, dim in zip("kv", how["dims"]):
        arrays[f"{name}_new"] = 2 * rng.standard_normal((*front, kv_heads, dim))
        arrays[f"{name}_cache"] = 4 * rng.standard_normal((entries, rows, kv_heads, dim))
    if slots:
        arrays["slots"] = rng.permutation(entries * rows)[: front[0]].astype(np.int64)
        arrays["slots"][1] = -1
        for name in ("k_new", "v_new"):
            arrays[name][0, 0, 3], arrays[name][2, 1, 5], arrays[name][3] = np.nan, -np.inf, 0
    else:
        arrays["q"] = rng.standard_normal((*front, heads, how["dims"][0]))
        arrays["seqlens_k"] = filled
    if packed:
        arrays["cu_seqlens_q"] = np.array([0, 3, 3, 4], np.int32)
    if page and not slots:
        arrays["page_table"] = rng.permutation(12).reshape(3, 4).astype(np.int32)
    unit, numbers, written = 1 / 30 if eight == "int8" else 1.0, {}, ["k_cache", "v_cache"]
    for name, kind in zip(("k_descale", "v_descale"), by):
        scales = {"array": (1,), "head": (kv_heads,), "row": (entries, rows, kv_heads)}
        if kind == "number":
            numbers[name] = unit * 1.7
        elif kind is not None:
            arrays[name] = (unit * rng.uniform(0.3, 2, scales[kind])).astype("f4")
            written += [name] * (kind == "row")
    if half := how["half"]:
        angles = rng.uniform(0, 6, (20, half))
        arrays |= {"cos": np.cos(angles).astype("f4"), "sin": np.sin(angles).astype("f4")}
    for name, x in arrays.items():
        if name.endswith("_cache"):
            arrays[name] = (np.rint(20 * x).clip(-127, 127) if eight == "int8" else x).astype(EIGHT[eight])
        elif x.dtype == np.float64:
            arrays[name] = x.astype(DTYPES[how["dtype"]])
    if not slots:
        nobodys = np.ones((entries, rows), bool)
        for of, length in enumerate(filled):
            behind = np.arange(length)
            nobodys[(arrays["page_table"][of, behind // page], behind % page) if page else (of, behind)] = False
        for name in ("k_cache", "v_cache"):
            arrays[name][nobodys] = -128 if eight == "int8" else np.nan
        for name in {"k_descale", "v_descale"} & {*written}:
            arrays[name][nobodys] = np.nan
    options: dict[str, Any] = {"layout": how.get("layout", "bshd")}
    options |= {} if slots else {"causal": True, "return_lse": True}
    options |= {"rotary_interleaved": how["interleaved"]} if half else {}
    if options["layout"] == "bhsd":
        for name, x in arrays.items():
            if name not in ("seqlens_k", "page_table", "cos", "sin") and x.ndim > 2:
                axis = -2 if name.endswith("_descale") else -3
                arrays[name] = np.ascontiguousarray(x.swapaxes(axis, axis + 1))
    if step := how.get("apart"):
        for name in ("k_cache", "v_cache", "k_new"):
            arrays[name] = np.repeat(arrays[name], step, -1)[..., ::step]
    return Drawn(arrays, numbers, options, written)


def both(drawn: Drawn) -> tuple[list[Any], list[Any]]:
    """What a call gives and leaves, by the kernel and by array operations, with guards around all that is dense."""

    def guarded(name: str, x: np.ndarray) -> np.ndarray:
        whole = x.flags.c_contiguous and x.ndim > 1
        guards[name] = Guarded(x.shape, x.dtype, x) if whole else None
        return guards[name].array if whole else x.copy() if whole or x.ndim == 1 else _as_laid(x)

    found: list[list[Any]] = []
    for by_kernel in (True, False):
        guards: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            if not by_kernel:
                patch.setattr(writing, "on_kernel", lambda lib, arrays: None)
            result, arrays = drawn.call(guarded)
        for name, x in guards.items():
            if x is not None:
                x._is_input = name not in drawn.written
                x.check(name)
        found.append([*(result or ()), *(np.array(arrays[name]) for name in drawn.written)])
    return found[0], found[1]


def _as_laid(x: np.ndarray) -> np.ndarray:
    """A copy with columns as far apart."""
    step = x.strides[-1] // x.itemsize
    return np.repeat(x, step, -1)[..., ::step]


def assert_alike(got: np.ndarray, want: np.ndarray) -> None:
    """To the bit, but for the bits of NaN."""
    if got.dtype.kind == "f" or got.dtype.itemsize == 1:
        one, other = got.astype("f4"), want.astype("f4")
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        got, want = (np.where(np.isnan(x), 0, x) for x in (one, other))
    assert_same(got, want)


@needs_compiler
@pytest.mark.parametrize("eight", EIGHT)
@cases(
    [f"{form}, {way}" for form in FORMS for way in WAYS],
    *("dense, row", "one head, row", "packed pages, head", "slots, row and number"),
)
def test_it_writes_what_array_operations_do(case: str, eight: str, kernel: OnCpu, rng: np.random.Generator) -> None:
    form, way = case.split(", ")
    interleaved = bool((len(form) + len(eight)) % 2)
    got, want = both(draw(rng, eight, WAYS[way], **FORMS[form], interleaved=interleaved))
    assert len(kernel.launches) == 1
    for x, y in zip(got, want):
        assert_alike(x, y)
    assert form == "slots" or np.isfinite(got[0].astype("f4")).all()


@needs_compiler
def test_lanes_and_widths(kernel: OnCpu, rng: np.random.Generator) -> None:
    for form, lanes, width in (("dense", 2, 8), ("slots", 8, 8), ("odd", 4, 1), ("columns apart", 128, 1)):
        drawn = draw(rng, "int8", ("row", "row"), **FORMS[form], interleaved=False)
        drawn.call()
        program = kernel.launches[-1].program
        assert (program.lanes, program.width) == (lanes, width), form
        assert program.threads == 128


def test_rows_that_are_too_long_are_for_others(kernel: OnCpu) -> None:
    """A block cannot find the scale of one."""
    new, cache = np.ones((1, 1, 1, 2050), np.float16)[..., ::2], np.zeros((1, 3, 1, 1025), np.int8)
    scales = np.ones((1, 3, 1), "f4")
    attention_append(None, new, new, cache, cache.copy(), np.array([1]), k_descale=scales)
    wide = np.ones((1, 1, 1, 5000), np.float16)[..., 1::2], np.zeros((1, 3, 1, 2500), np.int8)
    assert len(kernel.launches) == 1
    attention_append(None, wide[0], wide[0], wide[1], wide[1].copy(), np.array([1]), k_descale=scales)
    assert len(kernel.launches) == 1 and (wide[1][0, 1] == 127).all()


@needs_compiler
def test_the_next_call_like_it_is_planned_no_more(kernel: OnCpu, rng: np.random.Generator, monkeypatch: Any) -> None:
    """Scales that are arrays may lie elsewhere and hold others; a number is a part of the class."""
    plans: list[Any] = []
    monkeypatch.setattr(append, "planned", lambda *given: (plans.append(given), planned(*given))[1])
    for number, by in enumerate(("row", "head", "number"), 1):
        for _ in range(3):
            got, want = both(draw(rng, "float8_e4m3fn", (by, by), **FORMS["dense"], interleaved=False))
            for x, y in zip(got, want):
                assert_alike(x, y)
        assert len(plans) == number
    drawn = draw(rng, "float8_e4m3fn", ("number", "number"), **FORMS["dense"], interleaved=False)
    for factor in (2.0, 3.0):
        drawn.numbers["k_descale"] = factor
        got, want = both(drawn)
        assert_alike(got[2], want[2])
    assert len(plans) == 5


@needs_compiler
def test_scales_that_share_memory_are_refused_each_time(kernel: OnCpu) -> None:
    """A call of a known class too."""
    new, caches = np.ones((2, 1, 2, 8), np.float16), np.zeros((2, 2, 4, 2, 8), np.int8)
    memory = np.ones((3, 2, 4, 2), "f4")

    def call(k_descale: np.ndarray, v_descale: np.ndarray) -> None:
        attention_append(None, new, new, *caches, np.array([1, 2]), k_descale=k_descale, v_descale=v_descale)

    call(memory[0], memory[1])
    call(memory[2], memory[1])
    assert len(kernel.launches) == 2 and [x.dtype for x in kernel.told] == [caches.dtype, caches.dtype, "f4", "f4"] * 2
    caches[...] = 0
    with pytest.raises(ValueError, match="^v_descale shares memory with k_descale"):
        call(memory[1], memory[1])
    assert not caches.any()


@needs_compiler
@pytest.mark.parametrize("eight", EIGHT)
def test_every_number_of_16_bits(eight: str, kernel: OnCpu) -> None:
    """Rounded as an array of them is: ties, the smallest, what is too large, infinities and NaN."""
    for dtype in ("float16", "bfloat16"):
        numbers = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(1, -1, 8, 64)
        cache, scale = np.zeros(numbers.shape, EIGHT[eight]), np.array([0.75], "f4")
        attention_append(None, numbers, numbers, cache, cache.copy(), np.array([0]), k_descale=scale)
        with np.errstate(all="ignore"):
            want = numbers.astype("f4") / scale
            largest = 127 if eight == "int8" else 448
            want = np.clip(want, -largest, largest)
            want = np.rint(np.nan_to_num(want, nan=0)).astype("i1") if eight == "int8" else want.astype(EIGHT[eight])
        assert_alike(cache, want)
    assert len(kernel.launches) == 2


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_it_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    pages = (("seqlens_k", "int32"), ("cu_seqlens_q", "int32"), ("page_table", "int32"))
    for program in (
        Program("bfloat16", 8, "float32", False, pages, "float8_e4m3fn"),
        Program("bfloat16", 8, "float32", True, pages, "float8_e4m3fn", (True, True), 8),
        Program("float16", 8, "float16", False, (("seqlens_k", "int64"),), "int8", (True, False), 32),
        Program("float16", 1, "", False, (("slots", "int64"),), "int8", (True, True), 64),
    ):
        found = compiler.compile_source(program.source(), arch).resources[NAME]
        assert found.spill_stores == 0 and found.stack == 0 and found.registers <= 64


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def to_gpu(x: np.ndarray) -> Any:
    import torch
    from test_cached import tensor

    step = x.strides[-1] // x.itemsize
    whole = tensor(x).cuda()
    return (
        whole
        if step == 1
        else torch.repeat_interleave(whole.view(_integers(whole)), step, -1).view(whole.dtype)[..., ::step]
    )


def _integers(x: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16}[x.element_size()]


@pytest.mark.gpu
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu(form: str, way: str, eight: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that the CPU writes, to the bit but for NaN's; nothing beside them."""
    from test_cached import of_tensor

    ran: list[Appending] = []
    launched = Appending.launch
    monkeypatch.setattr(Appending, "launch", lambda self, *given: (ran.append(self), launched(self, *given)))
    drawn = draw(rng, eight, WAYS[way], **FORMS[form], interleaved=bool(len(form) % 2))
    want, theirs = drawn.call(lambda name, x: _as_laid(x))
    for _ in range(2):
        found, arrays = drawn.call(lambda name, x: to_gpu(x))
        assert not found or bool(found[0].isfinite().all())
        for name in drawn.written:
            assert_alike(of_tensor(arrays[name]), theirs[name])
        for x, y in zip(found or (), want or ()):  # scores are large here: what they are rounded to shows
            found_x, want_x = of_tensor(x).astype("f4"), y.astype("f4")
            np.testing.assert_allclose(found_x, want_x, atol=0.05 * np.abs(want_x[np.isfinite(want_x)]).max())
    assert len(ran) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["head", "row"])
def test_cupy_and_a_graph(by: str, rng: np.random.Generator) -> None:
    """CuPy has int8 alone; in a graph of PyTorch lengths, pages and numbers change."""
    import cupy
    import torch

    drawn = draw(rng, "int8", (by, by), **FORMS["packed pages"] | {"dtype": "float16"}, interleaved=False)
    _, theirs = drawn.call(lambda name, x: x.copy())
    _, arrays = drawn.call(lambda name, x: cupy.asarray(x))
    for name in drawn.written:
        assert_alike(cupy.asnumpy(arrays[name]), theirs[name])
    drawn = draw(rng, "float8_e4m3fn", (by, by), **FORMS["packed pages"], interleaved=True)
    _, arrays = drawn.call(lambda name, x: to_gpu(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = drawn.call(lambda name, x: arrays[name])
    for lengths in ([0, 5, 11], [-1, 3, 20], [25, 1, 2]):
        arrays["seqlens_k"].copy_(torch.tensor(lengths))
        arrays["page_table"].copy_(torch.randperm(12).view(3, 4))
        arrays["k_new"].normal_()
        before = {name: arrays[name].clone() for name in drawn.written}
        graph.replay()
        after = {name: arrays[name].clone() for name in drawn.written}
        for name, x in before.items():
            arrays[name].copy_(x)
        again, _ = drawn.call(lambda name, x: arrays[name])
        for x, y in zip(again, out):  # (rows that were nobody's are NaN)
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        for name in drawn.written:
            assert torch.equal(arrays[name].view(torch.uint8), after[name].view(torch.uint8))
