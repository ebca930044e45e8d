"""What is told of lengths, offsets and pages that cannot be: by shapes always, by values on a CPU or where asked."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, attention_backward, attention_jvp, block_mask, dispatch, explain

CU, PAGES = np.array([0, 3, 20]), np.array([[1, -1], [0, 2]])


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


Q, K, CACHE = ones(20, 4, 8), ones(20, 2, 8), ones(2, 16, 2, 8)
PACKED = {"q": Q, "k": K, "v": K, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
FILLED = {"q": Q, "k": CACHE, "v": CACHE, "cu_seqlens_q": CU, "seqlens_k": np.array([7, 16])}
PAGED = FILLED | {"k": ones(3, 16, 2, 8), "v": ones(3, 16, 2, 8), "page_table": PAGES}


def offsets(*x: int) -> dict[str, Any]:
    return PACKED | {"cu_seqlens_k": np.array(x)}


VALUES = [
    (offsets(1, 3, 20), "cu_seqlens_k[0] is 1; it must be 0"),
    (offsets(0, 4, 3), "cu_seqlens_k[2] is 3; it must be cu_seqlens_k[1], 4, or more"),
    (offsets(0, -1, 20), "cu_seqlens_k[1] is -1; it must be cu_seqlens_k[0], 0, or more"),
    (offsets(0, 3, 21), "cu_seqlens_k[2] is 21; it must be at most 20, the rows of k"),
    (
        PACKED | {"cu_seqlens_q": np.array([0, 21, 22], np.int32)},
        "cu_seqlens_q[1] is 21; it must be at most 20, the rows",
    ),
    (
        PACKED | {"bias": ones(1, 4, 10, 20)},
        "20, 17 more than cu_seqlens_q[1]; it must be at most 10 more, as long as bias",
    ),
    (PACKED | {"key_mask": np.ones((2, 15), bool)}, "it must be at most 15 more, as long as key_mask"),
    (PACKED | {"block_mask": block_mask(np.ones((16, 17), bool))}, "it must be at most 16 more, as long as block_mask"),
    (FILLED | {"seqlens_k": np.array([3, -2])}, "seqlens_k[1] is -2; it must be 0 or more"),
    (FILLED | {"seqlens_k": np.array([17, 3])}, "seqlens_k[0] is 17; it must be at most 16, the rows of a cache"),
    (
        FILLED | {"bias": ones(4, 20, 12)},
        "seqlens_k[1] is 16; it must be at most 12, the rows of a cache, and as long as",
    ),
    (PAGED | {"seqlens_k": np.array([7, 33])}, "it must be at most 32, the reach of page_table, 2 pages of 16 rows"),
    (
        PAGED | {"seqlens_k": np.array([17, 32])},
        "page_table[0, 1] is -1; it must be a page of k, 0 to 2: seqlens_k[0], 17, reaches it",
    ),
    (PAGED | {"page_table": PAGES + 3, "seqlens_k": np.array([0, 1])}, "page_table[1, 0] is 3; it must be a page"),
]

SHAPES: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        (
            FILLED | {"q": Q.astype(np.float32), "k": CACHE.astype(kind), "v": CACHE.astype(kind)},
            TypeError,
            f"k has dtype {np.dtype(kind)} beside q of float32; k and v of 8 bits are for q of float16 or bfloat16",
        )
        for kind in (np.int8, ml_dtypes.float8_e4m3fn)
    ),
    (
        PACKED | {"cu_seqlens_q": CU.astype(np.float32)},
        TypeError,
        "cu_seqlens_q has dtype float32; it must be int32 or int64",
    ),
    (
        PACKED | {"cu_seqlens_q": CU.astype(np.uint32)},
        TypeError,
        "cu_seqlens_q has dtype uint32; it must be int32 or int64",
    ),
    (PACKED | {"cu_seqlens_q": [0, 3, 20]}, TypeError, "cu_seqlens_q is a list; it must be an array"),
    (PACKED | {"cu_seqlens_q": CU[None]}, ValueError, "cu_seqlens_q has shape (1, 3); it must be (sequences + 1,)"),
    (PACKED | {"cu_seqlens_q": CU[:0]}, ValueError, "cu_seqlens_q has shape (0,); it must be (sequences + 1,)"),
    (offsets(0, 20), ValueError, "cu_seqlens_k has 1 sequences, shape (2,); it must have as many as cu_seqlens_q, 2"),
    (
        PACKED | {"q": Q[None]},
        ValueError,
        "q has 4 dimensions, shape (1, 20, 4, 8); with cu_seqlens_q it must have 3, (rows, heads, dim)",
    ),
    (PACKED | {"k": K[None], "layout": "bhsd"}, ValueError, "with cu_seqlens_k it must have 3, (heads, rows, dim)"),
    (
        PACKED | {"cu_seqlens_k": None},
        ValueError,
        "with cu_seqlens_q and no cu_seqlens_k it must have 4, (sequences, rows, heads, dim)",
    ),
    (
        PACKED | {"cu_seqlens_q": None},
        ValueError,
        "q has 3 dimensions, shape (20, 4, 8); with cu_seqlens_k and no cu_seqlens_q it must have 4",
    ),
    (PACKED | {"v": K[1:]}, ValueError, "v has 19 keys, shape (19, 2, 8); it must have as many as k, 20"),
    (
        FILLED | {"seqlens_k": np.arange(3)},
        ValueError,
        "seqlens_k has 3 sequences, shape (3,); it must have as many as cu",
    ),
    (
        FILLED | {"k": CACHE[:1]},
        ValueError,
        "k has 1 sequences, shape (1, 16, 2, 8); it must have as many as cu_seqlens_q",
    ),
    (FILLED | {"cu_seqlens_k": CU}, ValueError, "seqlens_k is given with cu_seqlens_k"),
    (PAGED | {"seqlens_k": None}, ValueError, "page_table is given without seqlens_k"),
    (PAGED | {"seqlens_k": None, "cu_seqlens_k": CU}, ValueError, "page_table is given with cu_seqlens_k"),
    (PAGED | {"page_table": PAGES[0]}, ValueError, "page_table has shape (2,); it must be (sequences, pages of one)"),
    (
        PAGED | {"page_table": PAGES[:1]},
        ValueError,
        "page_table has 1 sequences, shape (1, 2); it must have as many as cu",
    ),
    (PAGED | {"v": CACHE}, ValueError, "v has 2 pages, shape (2, 16, 2, 8); it must have as many as k, 3"),
    (
        PAGED | {"v": ones(3, 8, 2, 8)},
        ValueError,
        "v has 8 rows of a page, shape (3, 8, 2, 8); it must have as many as k, 16",
    ),
    (PAGED | {"k": ones(3, 0, 2, 8), "v": ones(3, 0, 2, 8)}, ValueError, "k has pages of 0 rows"),
    (
        PACKED | {"bias": ones(4, 19, 20)},
        ValueError,
        "it must be (4, 20, longest), (head, row of q, key), where a length of 1 stands for all",
    ),
    (
        PACKED | {"bias": ones(20, 20)},
        ValueError,
        "longest), (sequence, head, query, key), or (4, 20, longest), (head, row of q, key)",
    ),
    (PACKED | {"bias": ones(4, 1, 20)}, ValueError, "bias has shape (4, 1, 20); it must be (4, 20, longest)"),
    (
        PACKED | {"mask": np.ones((3, 1, 20, 20), bool)},
        ValueError,
        "mask has shape (3, 1, 20, 20); it must be (2, 4, longest",
    ),
    (
        PACKED | {"alibi_slopes": ones(3, 4)},
        ValueError,
        "it must be (2, 4), (sequence, head), where a length of 1 stands for all (times",
    ),
    (
        PACKED | {"block_mask": block_mask(np.ones((3, 1, 20, 20), bool))},
        ValueError,
        "it must be (2, 4, longest, longest), (sequence, head, query, key)",
    ),
    (
        {"q": ones(2, 5, 4, 8), "k": CACHE, "v": CACHE, "seqlens_k": np.array([7, 16])}
        | {"block_mask": block_mask(np.ones((2, 1, 6, 16), bool))},
        ValueError,
        "block_mask has shape (2, 1, 6, 16); it must be (2, 4, 5, longest), (sequence, head, query, key)",
    ),
    (PACKED | {"max_seqlen_q": 2.5}, ValueError, "max_seqlen_q is 2.5; it must be None or how many rows"),
    (PACKED | {"max_seqlen_k": True}, ValueError, "max_seqlen_k is True; it must be None or how many rows"),
    (PACKED | {"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1; it must be None or how many rows"),
    (
        dict(zip("qkv", (CACHE,) * 3)) | {"max_seqlen_q": 17},
        ValueError,
        "max_seqlen_q is 17, but cu_seqlens_q, which it is",
    ),
    (PACKED | {"at": (0, 0, 0, 0)}, ValueError, "at is (0, 0, 0, 0), and cu_seqlens_q is given; it must be None there"),
    (PACKED | {"batch_invariant": 1}, TypeError, "batch_invariant is 1; it must be True or False"),
    (PACKED | {"check": 1}, TypeError, "check is 1; it must be True or False"),
]


@pytest.mark.parametrize(("given", "message"), VALUES, ids=range(len(VALUES)))
def test_values(given: dict[str, Any], message: str) -> None:
    given = dict(given)
    q, k, v = (given.pop(name) for name in "qkv")
    into = np.full(q.shape, 3, np.float32)
    for check in (False, True):
        with pytest.raises(ValueError) as raised:
            attention(q, k, v, check=check, out=into, **given)
        assert message in str(raised.value)
    assert (into == 3).all()


@pytest.mark.parametrize(("given", "error", "message"), SHAPES, ids=range(len(SHAPES)))
def test_shapes(given: dict[str, Any], error: type[Exception], message: str) -> None:
    given = dict(given)
    q, k, v = (given.pop(name) for name in "qkv")
    with pytest.raises(error) as raised:
        attention(q, k, v, **given)
    assert message in str(raised.value)
    if "check" not in given:
        with pytest.raises((TypeError, ValueError)):
            explain(q, k, v, **given)


def test_hints_bound_nothing() -> None:
    """Whatever they say, the result is the same."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal(Q.shape), rng.standard_normal(K.shape)
    one = attention(q, k, k, cu_seqlens_q=CU, cu_seqlens_k=CU)
    for most in (0, 1, 5, 2**30):
        other = attention(q, k, k, cu_seqlens_q=CU, cu_seqlens_k=CU, max_seqlen_q=most, max_seqlen_k=np.int64(most))
        assert other.tobytes() == one.tobytes()


def test_derivatives_with_pages() -> None:
    given = {name: x for name, x in PAGED.items() if name not in "qkv"}
    q, k, v = (PAGED[name] for name in "qkv")
    out, lse = attention(q, k, v, return_lse=True, **given)
    with pytest.raises(TypeError, match="page_table is given to attention_backward; .* a forward alone"):
        attention_backward(q, q, k, v, out, lse, **given)
    with pytest.raises(TypeError, match="page_table is given to attention_jvp; .* a forward alone"):
        attention_jvp({"q": q}, q, k, v, out, lse, **given)


def test_nonsense_leads_nowhere() -> None:
    """Of a thousand arrays of numbers each is refused, and nothing written, or means what it says."""
    rng = np.random.default_rng()
    taken = 0
    for _ in range(1000):
        most = int(rng.choice([4, 20, 40, 2**40]))
        low = int(rng.choice([0, 0, -1, -most]))
        ends_q, ends_k = (rng.integers(low, most, 3) for _ in range(2))
        for x in (ends_q, ends_k):
            if rng.random() < 0.7:
                x.sort()
                x[0] = 0
        filled, table = rng.integers(low, most, 2), rng.integers(low, most, (2, 2))
        for given in ({"cu_seqlens_k": ends_k}, {"seqlens_k": filled}, {"seqlens_k": filled, "page_table": table}):
            k = K if "cu_seqlens_k" in given else PAGED["k"] if "page_table" in given else CACHE
            around = np.full((24, 4, 8), 7, np.float32)
            try:
                attention(Q, k, k, cu_seqlens_q=ends_q, out=around[2:22], **given)
            except ValueError as error:
                assert str(error).startswith(("cu_seqlens_", "seqlens_k[", "page_table["))
                assert (around == 7).all()
                continue
            taken += 1
            assert (ends_q >= 0).all() and ends_q[-1] <= 20 and (around[:2] == 7).all() and (around[22:] == 7).all()
            rows = np.arange(20) < ends_q[-1]
            lens = np.diff(ends_k) if "cu_seqlens_k" in given else filled
            sees = np.repeat(lens > 0, np.diff(ends_q))
            assert np.allclose(around[2:22][rows], sees[:, None, None]) and not around[2:22][~rows].any()
    assert taken > 20


def test_the_environment_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: x for name, x in PACKED.items() if name not in "qkv"}
    with monkeypatch.context() as patch:  # another mapping in its place
        patch.setattr(os, "environ", {**os.environ, "CUPYFLASH_CHECK": "yes"})
        with pytest.raises(ValueError, match="CUPYFLASH_CHECK is 'yes'; it must be 1, 0 or empty"):
            attention(Q, K, K, **given)
    monkeypatch.setenv("CUPYFLASH_CHECK", "yes")
    with pytest.raises(ValueError, match="CUPYFLASH_CHECK is 'yes'; it must be 1, 0 or empty"):
        attention(Q, K, K, **given)
    assert attention(CACHE, CACHE, CACHE).shape == CACHE.shape  # of a call without lengths nothing is asked


def test_values_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at where asked, before anything is planned; not while a graph is captured."""
    cupy = pytest.importorskip("cupy")
    from cupyflash.gpu import values
    from cupyflash.interop import cupy_

    held = {"cu_seqlens_q": CU, "cu_seqlens_k": np.array([0, 30, 31])}
    at = {name: 1 << (40 + n) for n, name in enumerate(("q", "k", "v", *held))}
    looked, capturing = [], [0]

    def array(name: str, x: np.ndarray) -> Any:
        memory = cupy.cuda.UnownedMemory(at[name], x.nbytes, None, 0)
        return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def on_host(lib: Any, x: Any, device: int, stream: int) -> np.ndarray:
        looked.append((device, stream))
        return next(held[name] for name in held if at[name] == x.data.ptr)

    monkeypatch.setattr(values, "on_host", on_host)
    monkeypatch.setattr(cupy_, "stream", lambda device: 77)
    monkeypatch.setattr(values.runtime, "streamIsCapturing", lambda stream: capturing[0])
    q, k, v = array("q", Q), array("k", K), array("v", K)
    given = {name: array(name, x) for name, x in held.items()}
    run: list[Any] = []
    gpu = SimpleNamespace(run=lambda call: (run.append(call), None))
    monkeypatch.setattr(dispatch, "_gpu", lambda: gpu)
    attention(q, k, v, **given)
    assert run and not looked
    for asked in ("check", "environment"):
        if asked == "environment":
            monkeypatch.setenv("CUPYFLASH_CHECK", "1")
        with pytest.raises(ValueError, match=r"cu_seqlens_k\[1\] is 30; it must be at most 20, the rows of k"):
            attention(q, k, v, check=asked == "check", **given)
        assert len(run) == 1 and looked == [(0, 77)] * 2
        looked.clear()
    capturing[0] = 1
    with pytest.raises(ValueError, match="is captured as a CUDA graph, where cu_seqlens_q cannot be looked at"):
        attention(q, k, v, **given)
    assert len(run) == 1 and not looked
