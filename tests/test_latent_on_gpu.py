"""Latent attention on a GPU: each family beside NumPy's float64, on caches and pages with NaN around, and in graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from ragged import draw_case

from cupyflash import attention, attention_append, explain

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"form_k": "dense", "rest": 0},
    "caches": {"form_k": "filled"},
    "pages of 16": {"form_k": "paged", "page": 16},
    "pages of 64": {"form_k": "paged", "page": 64},
}


def drawn(rng: np.random.Generator, form: str, dtype: str, rows: int, heads: int, dims: tuple[int, int]) -> Any:
    lengths = [700] * 3 if form == "dense" else [700, 0, 129]
    return draw_case(rng, [rows] * 3, lengths, dtype=dtype, form_q="dense", heads=(heads, 1), dims=dims, **FORMS[form])


def judged(found: tuple[Any, Any], case: Any, columns: int, **options: Any) -> None:
    wide = {name: case.arrays[name].astype("f8") for name in "qk"}
    exact = attention(**wide, latent=columns, return_lse=True, **case.lengths, **options)
    out, lse = (cupy.asnumpy(x).astype("f8") for x in found)
    np.testing.assert_allclose(out, exact[0], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("backend", [Backend(x, x) for x in ("sm90", "sm80", "simt")], ids=lambda x: x.name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "heads", "causal"), [(1, 16, False), (3, 80, True)])
def test_each_family(
    backend: Backend, form: str, rows: int, heads: int, causal: bool, rng: np.random.Generator
) -> None:
    """What NaN surrounds reaches nobody, and nothing is left as it was."""
    dtype = "bfloat16" if form == "caches" else "float16"
    case = drawn(rng, form, dtype, rows, heads, (576, 512))
    given = {name: backend.put(x) for name, x in case.lengths.items()}
    q, k = (backend.put(case.arrays[name]) for name in "qk")
    out = backend.nan((3, rows, heads, 512), dtype)
    how: dict[str, Any] = {"latent": 512, "causal": causal, **given}
    found = attention(q, k, out=out, return_lse=True, family=backend.family, **how)
    judged(found, case, 512, causal=causal)
    if backend.family == "sm90":
        assert not explain(q, k, **how).copies
    for _ in range(20):
        again = attention(q, k, return_lse=True, family=backend.family, **how)
        assert all(cupy.array_equal(x.view("u1"), y.view("u1")) for x, y in zip(again, found))


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"window": (90, None), "causal": True}, {"sinks": True}], ids=str
)
def test_options(options: dict[str, Any], rng: np.random.Generator) -> None:
    case = drawn(rng, "pages of 64", "bfloat16", 2, 16, (576, 512))
    given: dict[str, Any] = dict(options)
    if "sinks" in given:
        given["sinks"] = rng.standard_normal(16).astype("f4")
    on_gpu = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in (given | case.lengths).items()}
    found = attention(*map(cupy.asarray, (case.arrays["q"], case.arrays["k"])), latent=512, return_lse=True, **on_gpu)
    given = {name: x.astype("f8") if isinstance(x, np.ndarray) else x for name, x in given.items()}
    judged(found, case, 512, **given)


def test_other_columns(rng: np.random.Generator) -> None:
    case = drawn(rng, "caches", "float16", 1, 8, (96, 72))
    found = attention(
        *map(cupy.asarray, (case.arrays["q"], case.arrays["k"])), latent=72, return_lse=True,
        seqlens_k=cupy.asarray(case.lengths["seqlens_k"]),
    )  # fmt: skip
    judged(found, case, 72)


def test_a_graph_finds_other_lengths(rng: np.random.Generator) -> None:
    """Longest among short, so that keys are cut by their own length."""
    batch, page, most = 5, 64, 6000
    pool = cupy.asarray(rng.standard_normal((batch * 94, page, 1, 576)).astype("f2"))
    table = cupy.asarray(rng.permutation(batch * 94).reshape(batch, 94).astype("i4"))
    q = cupy.asarray(rng.standard_normal((batch, 1, 16, 576)).astype("f2"))
    lengths, out = cupy.full(batch, most, "i4"), cupy.empty((batch, 1, 16, 512), "f2")
    how: dict[str, Any] = {"latent": 512, "seqlens_k": lengths, "page_table": table}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        attention(q, pool, out=out, **how)
        stream.begin_capture()
        attention(q, pool, out=out, **how)
        graph = stream.end_capture()
        for _ in range(20):
            lengths[:] = cupy.asarray(rng.choice([0, 1, 64, 100, 1000, most], batch).astype("i4"))
            out[:] = np.nan
            graph.launch(stream)
            assert cupy.array_equal(out, attention(q, pool, **how))


def test_appending(rng: np.random.Generator) -> None:
    q, new = (cupy.asarray(rng.standard_normal((2, 1, heads, 576)).astype("f2")) for heads in (16, 1))
    cache = cupy.full((2, 300, 1, 576), np.nan, "f2")
    lengths = cupy.asarray(np.array([200, 3], "i4"))
    cache[0, :200], cache[1, :3] = (cupy.asarray(rng.standard_normal((n, 1, 576)).astype("f2")) for n in (200, 3))
    wanted = cache.copy()
    wanted[0, 200], wanted[1, 3] = new[0, 0], new[1, 0]
    found = attention_append(q, new, k_cache=cache, seqlens_k=lengths, latent=512)
    assert cupy.array_equal(cache.view("u2"), wanted.view("u2"))
    assert cupy.array_equal(found, attention(q, wanted, latent=512, seqlens_k=lengths + 1))
