"""`at` as an array, which the kernels of each family read when they run, beside the same as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend, pairs
from reference import DTYPES

from cupyflash import attention, attention_backward, attention_backward_jvp, attention_jvp

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(b, d, id=f"{b.name}-{d}") for b, d in pairs() if b.family in ("sm90", "sm80", "simt")]
CLOSE = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 3e-5, "float64": 1e-11}
ASKED: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((0, 0, 128, 30), {"causal": True}),
    "dead-queries": ((0, 0, 100, 190), {"causal": True}),
    "dead-keys": ((0, 0, 4096, 4000), {"window": (70, 9)}),
    "nothing": ((0, 0, 0, 2**20), {"causal": True}),
    "everything": ((0, 0, 2**30 - 300, 0), {"causal": True}),
    "dropout": ((3, 2, 64, 128), {"window": (90, 40), "dropout": 0.25, "seed": 5}),
    "score": ((1, 2, 70, 33), {"score": lambda s, b, h, i, j: s + 0.01 * b * h - 0.02 * (i - j)}),
}


def drawn(backend: Backend, rng: np.random.Generator, dtype: str, dims: tuple[int, int] = (64, 48)) -> list[Any]:
    """q, k, v, dout."""
    shapes = (1, 200, 4, dims[0]), (1, 300, 2, dims[0]), (1, 300, 2, dims[1]), (1, 200, 4, dims[1])
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def spoilt(arrays: list[Any], at: tuple[int, ...], options: dict[str, Any]) -> list[Any]:
    """With NaN in queries that see nothing by position, and in keys that nobody sees."""
    (left, right), diagonal = options.get("window") or (None, None), at[2] - at[3]
    right = 0 if options.get("causal") else right
    away = np.arange(300) - np.arange(200)[:, None] - diagonal
    seen = (left is None or away >= -left) & (right is None or away <= right) & np.ones((200, 300), bool)
    found = [x.copy() for x in arrays]
    for x, dead in zip(found, (~seen.any(1), ~seen.any(0), ~seen.any(0), ~seen.any(1))):
        x[:, dead] = np.nan
    return found


@pytest.mark.parametrize("case", ASKED)
@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_an_array_says_what_numbers_say(backend: Backend, dtype: str, case: str, rng: np.random.Generator) -> None:
    at, options = ASKED[case]
    options = options | {"family": backend.family}
    plain = drawn(backend, rng, dtype)
    dead = spoilt(plain, at, options)
    near = at[2] - at[3] < 2**20  # else distances are as large as numbers, and scores have no bits of them
    slopes = (0.1 * rng.random((4,))).astype("f8" if dtype == "float64" else "f4")
    of_distance = {"alibi_slopes": backend.put(slopes)} if near else {}
    found = []
    for arrays, place in ((plain, at), (dead, backend.put(np.array(at, "i8" if max(at) > 2**20 else "i4")))):
        q, k, v, dout = map(backend.put, arrays)
        more = options | {"at": place, **of_distance}
        out, lse = attention(q, k, v, return_lse=True, **more)
        grads = attention_backward(dout, q, k, v, out, lse, wrt=[*of_distance], **more)
        found.append([backend.get(x) for x in (out, lse, *grads, *grads.of_arrays.values())])
    for n, (x, y) in enumerate(zip(*found)):
        scale = max(1.0, float(np.abs(np.nan_to_num(y.astype("f8"), neginf=0)).max()))
        np.testing.assert_allclose(y.astype("f8"), x.astype("f8"), atol=CLOSE[dtype] * scale, err_msg=f"{case} {n}")


@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_so_do_tangents(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    q, k, v, dout = map(backend.put, drawn(backend, rng, dtype))
    moved = dict(zip("qkv", map(backend.put, drawn(backend, rng, dtype))))
    for options in ({"causal": True}, {}):
        if backend.family == "sm90" and options:
            continue  # its tangents leave what is dead by position to tensor maps
        found = []
        for place in ((0, 0, 128, 190), backend.put(np.array((0, 0, 128, 190)))):
            more: dict[str, Any] = options | {"at": place, "family": backend.family}
            out, lse = attention(q, k, v, return_lse=True, **more)
            rows = attention_jvp(moved, q, k, v, out, lse, **more)
            found.append([*rows, *attention_backward_jvp(moved, dout, q, k, v, out, lse, **more)])
        for x, y in zip(*found):
            x, y = backend.get(x).astype("f8"), backend.get(y).astype("f8")
            np.testing.assert_allclose(y, x, atol=CLOSE[dtype] * max(1.0, float(np.abs(x).max())))


@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_whatever_it_holds_nothing_else_is_read_or_written(
    backend: Backend, dtype: str, rng: np.random.Generator
) -> None:
    """Values that nothing checks are clamped; where they are looked at they are named."""
    q, k, v, dout = map(backend.put, drawn(backend, rng, dtype))
    for at in ((-5, -(2**40), -1, 2**62), (2**62, 7, 2**63 - 1, -(2**63)), (0, 0, 5, 3)):
        place = backend.put(np.array(at))
        more: dict[str, Any] = {"at": place, "window": (20, 10), "dropout": 0.2, "seed": 1, "family": backend.family}
        out, lse = attention(q, k, v, return_lse=True, **more)
        grads = attention_backward(dout, q, k, v, out, lse, **more)
        for x in (out, *grads):
            assert np.isfinite(backend.get(x).astype("f8")).all()
        with pytest.raises(ValueError, match=r"^at is \("):
            attention(q, k, v, check=True, **more)


def test_a_graph_finds_other_places(rng: np.random.Generator) -> None:
    import cupy

    q, k, v = (cupy.asarray(rng.standard_normal((1, 256, 4, 64)).astype("f2")) for _ in range(3))
    place = cupy.array([0, 0, 0, 0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = attention(q, k, v, causal=True, at=place)
        stream.begin_capture()
        attention(q, k, v, causal=True, at=place, out=out)
        graph = stream.end_capture()
        for query in (0, 100, 300):
            place.set(np.array([0, 0, query, 0]))
            graph.launch(stream)
            stream.synchronize()
            expected = attention(q, k, v, causal=True, at=(0, 0, query, 0))
            np.testing.assert_allclose(cupy.asnumpy(out), cupy.asnumpy(expected), atol=4e-3)
