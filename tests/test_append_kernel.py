"""The kernel that appends, beside what array operations write: without a GPU, to the bit, and on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from append_on_cpu import OnCpu, on_cpu
from backends import Backend
from cuda_on_cpu import cases, needs_compiler
from on_cpu import Guarded
from ragged import draw_case
from reference import draw
from test_appending import Appended, assert_same

from cupyflash import attention_append, writing
from cupyflash.gpu import append, compiler
from cupyflash.gpu.append import NAME, THREADS, Appending, Place, Program, planned
from cupyflash.problem import View


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    yield from on_cpu(monkeypatch)


CASES: dict[str, dict[str, Any]] = {  # dtype, forms of q and k, dims, half of rotary, layout
    "packed pages": {"dtype": "bfloat16", "form_q": "packed", "form_k": "paged", "half": 8, "dims": (16, 24)},
    "dense pages": {"dtype": "float16", "form_q": "dense", "form_k": "paged", "half": 4, "dims": (20, 8),
                    "layout": "bhsd"},
    "dense": {"dtype": "float32", "form_q": "dense", "form_k": "filled", "half": 3, "dims": (7, 5)},
    "packed": {"dtype": "float64", "form_q": "packed", "form_k": "filled", "half": 6, "dims": (12, 12),
               "layout": "bhsd"},
    "not turned": {"dtype": "bfloat16", "form_q": "packed", "form_k": "paged", "half": 0, "dims": (16, 24)},
    "wide heads": {"dtype": "float16", "form_q": "dense", "form_k": "filled", "half": 64, "dims": (256, 136)},
    "pairs": {"dtype": "float16", "form_q": "packed", "form_k": "filled", "half": 2, "dims": (6, 10)},
}  # fmt: skip
LENGTHS = {"packed": ([3, 0, 1, 20, 0], [30, 5, 1, 41, 0]), "dense": ([2] * 4, [30, 2, 9, 41])}


def appended(rng: np.random.Generator, interleaved: bool, **how: Any) -> tuple[Appended, str]:
    layout, half = how.pop("layout", "bshd"), how.pop("half")
    how |= {"page": int(rng.integers(1, 20)), "integers": np.int64 if interleaved else np.int32}
    case = draw_case(rng, *LENGTHS[how["form_q"]], **how, options={"causal": True})
    return Appended(case, rng.uniform(0, 6, (50, half)) if half else None, interleaved), layout


@needs_compiler
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@cases(CASES, "packed pages", "dense")
def test_it_writes_what_array_operations_do(
    case: str, interleaved: bool, kernel: Any, rng: np.random.Generator
) -> None:
    one, layout = appended(rng, interleaved, **CASES[case])
    if interleaved and "rotary" in one.options and one.q.itemsize == 2:  # in the caches' own dtype
        one.options["rotary"] = tuple(x.astype(one.q.dtype) for x in one.options["rotary"])

    def laid(x: np.ndarray) -> Guarded:
        x = np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x
        return Guarded(x.shape, x.dtype, x)

    found = []
    for by_kernel in (True, False):
        given = [laid(x) for x in (one.q, *one.new.values(), *one.before.values())]
        options = {name: x for name, x in one.options.items() if name != "seqlens_k"}
        with pytest.MonkeyPatch.context() as patch:
            if not by_kernel:
                patch.setattr(writing, "on_kernel", lambda lib, arrays: None)
            out, lse = attention_append(
                *(x.array for x in given), one.filled, return_lse=True, layout=layout, **options
            )
        for x in given[:3]:
            x.check("what is new")
        found.append((out, lse, *(x.array for x in given[3:])))
        for x in given[3:]:
            x._is_input = False
            x.check("a cache")
    assert len(kernel.launches) == 1
    for x, y in zip(*found):
        assert_same(x, y)
    first = (lambda x: x.swapaxes(-3, -2)) if layout == "bhsd" else (lambda x: x)
    if not (interleaved and one.q.itemsize == 2):
        for name, x in zip("kv", found[0][2:]):
            assert_same(first(x), one.after[name])


@needs_compiler
def test_vectors_are_as_wide_as_all_allow(kernel: Any, rng: np.random.Generator) -> None:
    """Views into one pool, and rows that begin anywhere: what lies between is left alone."""
    one, _ = appended(rng, False, **CASES["packed pages"])
    given = {name: x for name, x in one.options.items() if name != "seqlens_k"}
    dim, dim_v = (one.before[name].shape[-1] for name in "kv")
    for step, between in ((1, 0), (1, 1), (2, 0)):
        width = (dim + dim_v) * step + between
        pool = np.full((*one.before["k"].shape[:-1], width), 7, one.q.dtype)
        k, v = pool[..., : dim * step : step], pool[..., dim * step : (dim + dim_v) * step : step]
        k[...], v[...] = one.before["k"], one.before["v"]
        attention_append(one.q, *one.new.values(), k, v, one.filled, **given)
        assert_same(k, one.after["k"])
        assert_same(v, one.after["v"])
        k[...], v[...] = 7, 7
        assert (pool == 7).all()
    assert [x.program.width for x in kernel.launches] == [8, 1, 1]


@needs_compiler
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_slots(layout: str, kernel: Any, rng: np.random.Generator) -> None:
    for shape in ((7,), (2, 5)):
        pool, new = draw(rng, "bfloat16", 2, 6, 4, 2, 16), draw(rng, "bfloat16", 2, *shape, 2, 16)
        slots = rng.permutation(24)[: np.prod(shape)].reshape(shape)
        slots.flat[::3] = -1
        wide = np.repeat(slots, 2, -1)[..., ::2]
        laid = (lambda x: np.ascontiguousarray(x.swapaxes(-3, -2))) if layout == "bhsd" else np.copy
        caches, want = [*map(laid, pool)], [*map(laid, pool)]
        attention_append(None, *map(laid, new), *caches, slots=wide, layout=layout)
        assert len(kernel.launches) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "on_kernel", lambda lib, arrays: None)
            attention_append(None, *map(laid, new), *want, slots=slots, layout=layout)
        for x, y in zip(caches, want):
            assert_same(x, y)
        kernel.launches.clear()


def test_what_it_leaves_to_others(kernel: Any, rng: np.random.Generator) -> None:
    """New rows that lie in the cache, and nothing to write."""
    caches = rng.standard_normal((2, 1, 9, 2, 8))
    rows = caches[:, :, :3].copy()
    attention_append(None, caches[0, :, :3], caches[1, :, :3], *caches, np.array([1]))
    np.testing.assert_array_equal(caches[:, :, 1:4], rows)
    empty = np.zeros((2, 1, 0, 2, 8))
    attention_append(None, *empty, *caches, np.array([1]))
    attention_append(None, *empty, *empty, np.array([0]))
    assert not kernel.launches


@needs_compiler
def test_the_next_call_like_it_is_planned_no_more(kernel: Any, rng: np.random.Generator, monkeypatch: Any) -> None:
    """What may differ does: lengths, pages, addresses. What each call must look at is looked at."""
    plans: list[Any] = []
    monkeypatch.setattr(append, "planned", lambda *given: (plans.append(given), planned(*given))[1])
    q, k, v = rng.standard_normal((3, 2, 1, 2, 16)).astype(np.float32)
    angles, pools = rng.standard_normal((40, 8)).astype(np.float32), np.zeros((4, 8, 5, 2, 16), np.float32)
    options: dict[str, Any] = {"rotary": (angles, angles[::-1].copy())}

    def both(k: np.ndarray, v: np.ndarray, filled: Any, table: Any, **more: Any) -> None:
        """By the kernel and by array operations; caches begin alike."""
        given = {"q": q, "page_table": np.array(table), "seqlens_k": np.array(filled), **options, **more}
        found = attention_append(k_new=k, v_new=v, k_cache=pools[0], v_cache=pools[1], **given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "on_kernel", lambda lib, arrays: None)
            want = attention_append(k_new=k.copy(), v_new=v.copy(), k_cache=pools[2], v_cache=pools[3], **given)
        assert_same(pools[:2], pools[2:])
        for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, want))):
            assert x is y is None or x.tobytes() == y.tobytes()

    for turn in range(3):
        both(k + turn, v - turn, [turn, 2 * turn], [[turn, 1], [5, 7 - turn]])
    assert len(plans) == 1 and len(kernel.launches) == 3
    assert [x.ctypes.data for x in kernel.told] == [x.ctypes.data for x in pools[:2]] * 3
    for n, more in enumerate(({"causal": True}, {"return_lse": True}, {"rotary_interleaved": True}, {"q": None}), 2):
        for _ in range(2):
            both(k, v, [3, 4], [[0, 1], [2, 3]], **more)
        assert len(plans) == n
    off = np.zeros(k.size + 1, np.float32)[1:].reshape(k.shape)
    off[...] = k
    both(off, v, [3, 4], [[0, 1], [2, 3]])
    assert len(plans) == 6 and kernel.launches[-1].program.width < kernel.launches[0].program.width
    before = len(kernel.launches)
    with pytest.raises(TypeError, match="rotary_interleaved is 1"):  # a class of its own
        both(k, v, [3, 4], [[0, 1], [2, 3]], rotary_interleaved=1)
    inside = pools[:2, :2, :1]  # rows of the caches: of the same class, and not for the kernel
    same = np.empty_like(pools[:2])[:, :2, :1]
    same[...] = 5
    for new in (same, inside):
        want = new.copy()
        attention_append(None, *new, *pools[:2], np.array([1, 2]), page_table=np.array([[0], [1]]))
        for x, rows in zip(pools, want):
            assert_same(x[[0, 1], [1, 2]], rows[:, 0])
    assert len(kernel.launches) == before + 1


@needs_compiler
def test_what_says_where_rows_belong_lies_in_no_cache(kernel: Any, rng: np.random.Generator) -> None:
    """Also of a call like one before it, which looks at addresses alone."""
    pools = np.zeros((2, 8, 5, 2, 16), np.float32)
    q, k, v = rng.standard_normal((3, 2, 1, 2, 16)).astype(np.float32)
    angles = np.ones((2, 40, 8), np.float32)
    behind = {"q": q, "k_new": k, "v_new": v, "seqlens_k": np.array([3, 4]), "page_table": np.array([[0, 1], [2, 3]])}
    behind |= {"cu_seqlens_q": np.array([0, 1, 2]), "rotary": (angles[0], angles[1])}
    behind |= {name: behind[name][:, 0] for name in ("q", "k_new", "v_new")}
    slots = {"q": None, "k_new": k[:, 0], "v_new": v[:, 0], "slots": np.array([3, 9])}

    def inside(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = pools[1].reshape(-1).view(x.dtype)[: x.size].reshape(x.shape)
        return found

    cases: list[tuple[dict[str, Any], str, Any]] = [
        *((behind, name, inside(behind[name])) for name in ("seqlens_k", "cu_seqlens_q", "page_table")),
        *((behind, "rotary", (*angles[:n], inside(angles[n]), *angles[n + 1 :])) for n in (0, 1)),
        (slots, "slots", inside(slots["slots"])),
    ]
    for given, name, x in cases:
        attention_append(**given, k_cache=pools[0], v_cache=pools[1])
        pools[...] = 0
        before = len(kernel.launches)
        with pytest.raises(ValueError, match=f"^v_cache shares memory with {name}"):
            attention_append(**given | {name: x}, k_cache=pools[0], v_cache=pools[1])
        assert not pools.any() and len(kernel.launches) == before


# ---- nonsense -------------------------------------------------------------------------------------------------------

SOME = {"int32": [-(2**31), -2, -1, 0, 1, 2, 3, 5, 9, 2**31 - 1], "int64": [-(2**63), -1, 0, 1, 2, 4, 2**63 - 1]}


@needs_compiler
@pytest.mark.parametrize("form", ["paged", "filled", "slots"])
@cases(["int32", "int64"], "int64")
def test_nonsense_writes_nothing_outside(case: str, form: str, kernel: Any, rng: np.random.Generator) -> None:
    """What is not checked, a device's: new rows come to their own places, or nowhere; lengths are what caches hold."""
    some = np.array(SOME[case], case)
    written = 0
    for turn in range(100):
        n, page, entries, t = (int(rng.integers(1, 5)) for _ in range(4))
        entries = entries if form != "filled" else n
        cache = Guarded((entries, page, 2, 4), np.float32)
        other = Guarded((entries, page, 2, 4), np.float32)
        cache.array[...] = other.array[...] = 7
        new = rng.standard_normal((2, t, 2, 4)).astype(np.float32)
        given: dict[str, Any] = {"k_new": new[0], "v_new": new[1], "k_cache": cache.array, "v_cache": other.array}
        want, lengths = np.full((2, entries, page, 2, 4), 7, np.float32), np.zeros(n, case)
        places = []
        if form == "slots":
            given["slots"] = rng.choice(some, t)
            places = [
                (int(s) // page, int(s) % page, i) for i, s in enumerate(given["slots"]) if 0 <= s < entries * page
            ]
            place = Place.in_slots((t,), (entries, page))
        else:
            reach = int(rng.integers(1, 4)) if form == "paged" else 1
            most = page * reach
            filled, ends = rng.choice(some, n), rng.choice(some, n + 1)
            if turn % 2:  # some sense in it
                filled = rng.integers(-1, most, n).astype(case)
                ends = np.sort(rng.integers(-1, t + 2, n + 1)).astype(case)
            given |= {"seqlens_k": filled, "cu_seqlens_q": ends}
            if form == "paged":
                pages = rng.integers(-1, entries + 1, (n, reach)) if turn % 4 == 1 else rng.choice(some, (n, reach))
                given["page_table"] = pages.astype(case)
            place = Place(1, t, n, entries, page, most)
            for of in range(n):
                first, end, behind = int(ends[of]), int(ends[of + 1]), int(filled[of])
                if behind >= 0:
                    lengths[of] = min(behind + min(max(end - first, 0), t), most)
            for i in range(t):
                of = min(next((x for x in range(n) if ends[x + 1] > i), n - 1), n - 1)
                if (ends[1:][:-1] > ends[1:][1:]).any():
                    continue  # which sequence has a row is anybody's guess
                at = (int(filled[of]) + i - int(ends[of])) % 2**64
                if ends[of] <= i < ends[of + 1] and filled[of] >= 0 and at < most:
                    entry = int(given["page_table"][of, at // page]) if form == "paged" else of
                    places += [(entry, at % page, i)] * (0 <= entry < entries)
        for entry, row, i in places:
            want[:, entry, row] = new[:, i]
        prepared = append.prepare(kernel, given, place, "bshd", False)
        made = prepared and prepared.run(given)
        assert made
        for x in (cache, other):
            x.check("a cache")
        if form != "slots":
            assert_same(made[0], lengths)
            if (given["cu_seqlens_q"][1:][:-1] > given["cu_seqlens_q"][1:][1:]).any():
                continue
        if len({x[:2] for x in places}) == len(places):  # else whoever is last
            written += len(places)
            assert_same(np.stack((cache.array, other.array)), want)
    assert written > 10 and len(kernel.launches) == 100


@needs_compiler
def test_pools_of_more_than_two_to_the_31(kernel: Any) -> None:
    """Of memory that nobody has touched."""
    pools = [np.zeros((2**22 + 2**10, 16, 2, 16), np.float16) for _ in range(2)]
    last = len(pools[0]) - 1
    new = np.arange(1, 33, dtype=np.float16).reshape(1, 1, 2, 16)
    table = np.array([[0, last]], np.int32)
    attention_append(None, new, -new, *pools, np.array([20]), page_table=table)
    assert_same(pools[0][last, 4], new[0, 0])
    assert_same(pools[1][last, 4], -new[0, 0])
    attention_append(None, new, -new, *pools, slots=np.array([[last * 16 + 5]]))
    assert_same(pools[0][last, 5], new[0, 0])
    assert len(kernel.launches) == 2 and not pools[0][:3].any()


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_blocks_and_widths_follow_from_memory(rng: np.random.Generator) -> None:
    def given(dim: int, at: int = 0, kind: str = "float16") -> tuple[tuple[str, View], ...]:
        def view(*shape: int, dtype: str = kind) -> View:
            strides = tuple(int(np.prod(shape[n + 1 :])) for n in range(len(shape)))
            return View(shape, strides, dtype, "cuda:0", "cupy", at)

        new, cache = view(2, 3, 2, dim), view(2, 50, 2, dim)
        arrays = {"k_new": new, "v_new": new, "k_cache": cache, "v_cache": cache, "q": view(2, 3, 8, dim)}
        arrays |= {f"rotary[{n}]": view(50, dim // 2, dtype="float32") for n in range(2)}
        return tuple((arrays | {"seqlens_k": view(2, dtype="int32")}).items())

    place = Place(2, 3, 2, 2, 50, 50)
    for dim, at, kind, width in (
        (128, 0, "float16", 8), (128, 8, "float16", 2), (24, 0, "float16", 4), (36, 0, "float16", 2),
        (128, 0, "float64", 2), (128, 8, "float64", 1), (64, 0, "float32", 4),
    ):  # fmt: skip
        found = planned(given(dim, at, kind), place, "bshd", False)
        assert found and found.program.width == width
        of_row = -(-(dim // 2 // width * 12) // THREADS)
        assert found.blocks == 6 * of_row + 1


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_it_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    packed = (("seqlens_k", "int32"), ("cu_seqlens_q", "int32"), ("page_table", "int32"))
    for program in (
        Program("bfloat16", 8, "float32", False, packed),
        Program("float16", 8, "float16", True, (("seqlens_k", "int64"),)),
        Program("float32", 4, "float32", True, packed),
        Program("float64", 2, "float32", False, packed[:2]),
        Program("float16", 1, "", False, (("slots", "int64"),)),
    ):
        found = compiler.compile_source(program.source(), arch).resources[NAME]
        assert found.spill_stores == 0 and found.stack == 0 and found.registers <= 64


# ---- on a GPU -------------------------------------------------------------------------------------------------------

GPU = Backend("simt", "simt")


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, interleaved: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Appending] = []
    launched = Appending.launch
    monkeypatch.setattr(Appending, "launch", lambda self, *given: (ran.append(self), launched(self, *given)))
    one, layout = appended(rng, interleaved, **CASES[case])
    GPU.poison()
    one.run(layout, GPU.put, GPU.get)
    assert len(ran) == 1


@pytest.mark.gpu
def test_torch_on_a_gpu(rng: np.random.Generator) -> None:
    """At once, and in a CUDA graph whose lengths and pages change."""
    torch = pytest.importorskip("torch")
    one, _ = appended(rng, False, **CASES["packed pages"] | {"dtype": "float32"})
    one.run("bshd", lambda x: torch.from_numpy(x).cuda(), lambda x: x.cpu().numpy())
    q, k, v = (torch.randn(3, 1, 4, 64, device="cuda") for _ in range(3))
    caches = torch.zeros(2, 3, 40, 4, 64, device="cuda")
    angles = torch.rand(40, 16, device="cuda")
    filled = torch.tensor([0, 7, 39], dtype=torch.int32, device="cuda")
    how = {"rotary": (angles.cos(), angles.sin()), "causal": True}
    version = caches[0]._version
    attention_append(q, k, v, *caches, filled, **how)
    assert caches[0]._version > version
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = attention_append(q, k, v, *caches, filled, **how)
    for lengths in ([5, 0, 21], [-1, 12, 40], [2**31 - 1, 39, 3]):
        filled.copy_(torch.tensor(lengths))
        caches.zero_()
        graph.replay()
        found = out.clone(), caches.clone()
        caches.zero_()
        torch.testing.assert_close(attention_append(q, k, v, *caches, filled, **how), found[0], rtol=0, atol=0)
        assert torch.equal(caches, found[1])
        for n, length in enumerate(lengths):
            assert bool(caches[:, n].any()) == (0 <= length < 40)
