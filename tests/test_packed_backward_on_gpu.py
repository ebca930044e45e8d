"""The backward of sequences whose lengths are data by the Hopper kernels, where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from criterion import assert_as_good
from lengths_on_cpu import nonsense
from ragged import GRADIENTS, Case, _is_float, _poisoned, _units, arguments, draw_case, expected, luck_of

from cupyflash import attention, attention_backward

pytestmark = pytest.mark.gpu

SM90 = Backend("sm90", "sm90")
EDGES = [0, 1, 63, 64, 65, 127, 128, 129, 300]  # tiles have 64, 96 or 128 rows
SHUFFLED = [129, 64, 0, 300, 1, 128, 65, 127, 63]


def run(case: Case, layout: str = "bshd", fill: float = np.nan) -> dict[str, np.ndarray]:
    """Forward and backward; results lie amid numbers that nobody may write."""
    arrays, named = arguments(case, layout, SM90.put)
    cupy, q, k, v = SM90.xp, *(arrays[name] for name in "qkv")
    out, lse = attention(q, k, v, return_lse=True, **named)
    read = [name[len("score_arrays['") : -2] for name in case.given if name.startswith("score_arrays[")]
    read = [name for name in read if _is_float(case.given[f"score_arrays['{name}']"])]
    wrt = [name for name in case.given if name in GRADIENTS] + read
    taken = [SM90.put(_poisoned(case, SM90.get(x), at)) for x, at in ((out, layout == "bhsd"), (lse, True))]
    named["dlse"] = SM90.put(_poisoned(case, case.arrays["dlse"], True))
    around = 4096
    memory = [cupy.full(arrays[name].size + 2 * around, 77, q.dtype) for name in "qkv"]
    grads = tuple(x[around:-around].reshape(arrays[name].shape) for x, name in zip(memory, "qkv"))
    for x in grads:
        x.fill(fill)
    SM90.poison()
    results = attention_backward(arrays["dout"], q, k, v, *taken, wrt=wrt, grads=grads, family="sm90", **named)
    for name, x in zip("qkv", memory):
        ends = SM90.get(cupy.concatenate([x[:around], x[-around:]])).astype(np.float32)
        assert (ends == 77).all(), f"memory around d{name} was written"
    found = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), results))
    found = {name: SM90.get(x) for name, x in (found | {f"d{x}": y for x, y in results.of_arrays.items()}).items()}
    if layout == "bhsd":
        found |= {name: found[name].swapaxes(-3, -2) for name in ("out", "dq", "dk", "dv")}
    return found


def judge(case: Case, layout: str = "bshd") -> None:
    found, each = run(case, layout), []
    exact, own = expected(case, False, True, each), expected(case, True, True)
    assert found.keys() == exact.keys()
    units = _units(case, luck_of(each, exact))
    for name, x in found.items():
        assert_as_good(x, exact[name], own[name], name, units.get(name, 1.0))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "dims", [(32, 32), (64, 64), (90, 100), (128, 128), (160, 144), (192, 128), (192, 192), (256, 256)]
)
def test_edges_of_tiles(dims: tuple[int, int], layout: str, causal: Any, rng: np.random.Generator) -> None:
    dtype = "bfloat16" if causal is True else "float16"
    for heads, lens in (((4, 2), SHUFFLED), ((3, 3), EDGES)):
        options = {"causal": causal, "deterministic": layout == "bhsd"}
        judge(draw_case(rng, EDGES, lens, dtype=dtype, dims=dims, heads=heads, options=options), layout)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (160, 160), (256, 256)])
def test_many_and_long(dims: tuple[int, int], rng: np.random.Generator) -> None:
    """More heads than sums of dQ have room for, hundreds of sequences, and one long among them."""
    for heads in ((2, 1), (24, 24)):
        lens = [int(x) for x in rng.integers(0, 40, 200 if heads[0] == 2 else 20)]
        lens[7] = 2000 if heads[0] == 2 else 500
        judge(draw_case(rng, lens, lens, dtype="bfloat16", dims=dims, heads=heads, options={"causal": True}))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"options": {"window": (40, 3)}}, "left": {"options": {"window": (33, None)}},
    "softcap": {"options": {"softcap": 0.7, "causal": True}},
    "key_mask": {"given": ("key_mask", "sinks"), "options": {"causal": True}},
    "sinks": {"given": ("sinks",), "options": {"causal": True}}, "mask": {"given": ("mask",)},
    "bias": {"given": ("bias",), "options": {"causal": True}},
    "bias by line": {"given": ("bias",), "lines": ("bias",)}, "mask by line": {"given": ("mask",), "lines": ("mask",)},
    "alibi": {"given": ("alibi_slopes",), "options": {"causal": True}},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3}}, "score": {"score": "documents"},
    "blocks": {"blocks": "bh"}, "scale": {"options": {"scale": -0.4, "causal": True}},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_options(dim: int, option: str, rng: np.random.Generator) -> None:
    lens_q, lens_k = [150, 0, 1, 77], [140, 3, 0, 200]
    judge(draw_case(rng, lens_q, lens_k, dtype="float16", dims=(dim, dim), **OPTIONS[option]))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_for_each_on_caches(dim: int, rng: np.random.Generator) -> None:
    for causal in (False, True):
        case = draw_case(rng, [70] * 5, [0, 1, 128, 129, 300], dtype="float16", dims=(dim, dim), form_q="dense",
                         form_k="filled", options={"causal": causal})  # fmt: skip
        judge(case)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_in_every_run(dim: int, causal: bool, rng: np.random.Generator) -> None:
    lens = [int(x) for x in rng.integers(0, 400, 20)] + [1500]
    case = draw_case(rng, lens, lens, dtype="bfloat16", dims=(dim, dim), heads=(8, 4),
                     options={"causal": causal, "deterministic": True})  # fmt: skip
    first = run(case)
    for _ in range(5):
        for name, x in run(case).items():
            assert x.tobytes() == first[name].tobytes(), name


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_bit_follows_from_another_sequence(dim: int, rng: np.random.Generator) -> None:
    lens_q, lens_k = [70, 33, 130, 200], [80, 50, 140, 129]
    case = draw_case(rng, lens_q, lens_k, dtype="float16", dims=(dim, dim), heads=(2, 1),
                     options={"causal": True, "deterministic": True})  # fmt: skip
    kept = run(case)
    bad = {name: x.copy() for name, x in case.arrays.items()}
    for name in ("q", "k", "v", "dout"):
        bad[name][case.keys[1] if name in "kv" else case.queries[1]] = np.nan
    found = run(case._replace(arrays=bad))
    for name in ("dq", "dk", "dv"):
        places = case.queries[1] if name == "dq" else case.keys[1]
        a, b = (np.delete(x[name], np.r_[places[0]], 0) for x in (kept, found))
        assert not np.isnan(b.astype(np.float32)).any() and a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nonsense_stays_inside(dim: int, rng: np.random.Generator) -> None:
    case = draw_case(rng, [70, 0, 1, 130], [80, 3, 0, 140], dtype="float16", dims=(dim, dim), rest=5,
                     options={"causal": True, "deterministic": bool(dim == 64)})  # fmt: skip
    arrays = {name: np.nan_to_num(x) for name, x in case.arrays.items()}
    for _ in range(40):
        rows = {"cu_seqlens_q": len(arrays["q"]), "cu_seqlens_k": len(arrays["k"])}
        lengths = {name: nonsense(rng, (5,), rows[name], "int64") for name in rows}
        told = case._replace(arrays=arrays, lengths=case.lengths | lengths)
        cupy = SM90.xp
        given = {name: SM90.put(x) for name, x in told.arrays.items()}
        named = {name: SM90.put(x) for name, x in told.lengths.items()} | case.options
        q, k, v = (given[name] for name in "qkv")
        out, lse = attention(q, k, v, return_lse=True, **named)
        memory = [cupy.full(x.size + 8192, 77, x.dtype) for x in (q, k, v)]
        grads = tuple(x[4096:-4096].reshape(of.shape) for x, of in zip(memory, (q, k, v)))
        for x in grads:
            x.fill(np.nan)
        attention_backward(given["dout"], q, k, v, out, lse, dlse=given["dlse"], grads=grads, family="sm90", **named)
        for name, x, grad in zip("qkv", memory, grads):
            assert not bool(cupy.isnan(grad).any()), f"d{name} is not written, with {lengths}"
            assert bool((x[:4096] == 77).all() and (x[-4096:] == 77).all()), f"around d{name}, with {lengths}"
