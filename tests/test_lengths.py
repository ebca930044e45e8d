"""Lengths that are data, on NumPy: what comes of each sequence, what of rows of nobody, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ragged import Case, arguments, check_case, draw_case
from reference import DTYPES

from cupyflash import attention, attention_backward, attention_backward_jvp, attention_jvp

FORMS = [
    ("packed", "packed"), ("packed", "filled"), ("packed", "paged"), ("packed", "dense"), ("dense", "packed"),
    ("dense", "filled"), ("dense", "paged"),
]  # fmt: skip
LENGTHS = ([0, 1, 17, 5], [3, 1, 0, 40])
SQUARE = [2, 0, 1, 33, 16]


def drawn(rng: np.random.Generator, form_q: str, form_k: str, **how: Any) -> Case:
    lens_q, lens_k = (list(x) for x in LENGTHS)
    if form_q == "dense":
        lens_q = [int(rng.integers(1, 6))] * 4
    if form_k == "dense":
        lens_k = [int(rng.integers(1, 30))] * 4
    return draw_case(rng, lens_q, lens_k, form_q=form_q, form_k=form_k, **how)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_each_sequence_is_as_if_it_were_alone(form_q: str, form_k: str, causal: Any, rng: np.random.Generator) -> None:
    for layout, targets in (("bshd", False), ("bhsd", True)):
        case = drawn(rng, form_q, form_k, options={"causal": causal}, integers=(np.int32, np.int64)[targets])
        check_case(case, layout=layout, targets=targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, rng: np.random.Generator) -> None:
    for form_q, form_k in FORMS[:3]:
        check_case(drawn(rng, form_q, form_k, dtype=dtype, dims=(24, 40), options={"causal": True}))


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}}, "window": {"options": {"window": (3, 2)}},
    "top_left": {"options": {"causal": "top_left"}}, "softcap": {"options": {"softcap": 0.7}},
    "key_mask": {"given": ("key_mask",)}, "mask": {"given": ("mask",)}, "bias": {"given": ("bias",)},
    "mask by line": {"given": ("mask",), "lines": ("mask",)}, "bias by line": {"given": ("bias",), "lines": ("bias",)},
    "shared": {"given": ("bias",), "along": "hk"}, "alibi": {"given": ("alibi_slopes",)},
    "sinks": {"given": ("sinks",)},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3}}, "score": {"score": "documents"},
    "table": {"score": "relative"}, "blocks": {"blocks": "bh"}, "scale": {"options": {"scale": -0.4}},
    "deterministic": {"options": {"deterministic": True}}, "invariant": {"options": {"batch_invariant": True}},
}  # fmt: skip


def together(*names: str) -> dict[str, Any] | None:
    """How a case with several of OPTIONS is drawn; None where they exclude each other."""
    how: dict[str, Any] = {"given": (), "lines": (), "options": {}}
    for name in names:
        for what, x in OPTIONS[name].items():
            if what in ("given", "lines"):
                if {*x} & {*how[what]}:
                    return None
                how[what] += x
            elif what == "options":
                if x.keys() & how["options"].keys():
                    return None
                how["options"] |= x
            elif what in how:
                return None
            else:
                how[what] = x
    return None if how.get("score") and "softcap" in how["options"] else how


PAIRS = [x for x in itertools.combinations(OPTIONS, 2) if together(*x) is not None]


@pytest.mark.parametrize("first", OPTIONS)
def test_options_two_at_a_time(first: str, rng: np.random.Generator) -> None:
    for pair in [x for x in PAIRS if x[0] == first] or [(first,)]:
        how = together(*pair)
        assert how is not None
        form_k = ("packed", "filled", "paged")[rng.integers(3)]
        check_case(draw_case(rng, [4, 0, 1, 19], [6, 2, 0, 23], form_k=form_k, dims=(8, 8), **how))


def test_tiles_and_one_large_among_small(rng: np.random.Generator) -> None:
    lens = [511, 512, 513, 1, 0, 1300]
    check_case(draw_case(rng, lens, lens, heads=(2, 1), dims=(8, 8), options={"causal": True}))
    case = draw_case(rng, [1] * 6, lens, heads=(2, 1), dims=(8, 8), form_q="dense", form_k="paged", page=64)
    check_case(case)


@pytest.mark.parametrize("page", [1, 2, 3, 7, 16, 64, 512])
def test_pages_of_any_size(page: int, rng: np.random.Generator) -> None:
    for layout in ("bshd", "bhsd"):
        check_case(draw_case(rng, [5, 0, 3], [70, 9, page], form_k="paged", page=page), layout=layout)


def test_pools_are_views_of_one(rng: np.random.Generator) -> None:
    """(pages, 2, page, heads, dim), as vLLM has them, with anything between."""
    case = draw_case(rng, [1, 1], [40, 3], form_q="dense", form_k="paged", page=8)
    pool = np.full((len(case.arrays["k"]), 3, 8, 2, 32), np.nan, np.float32)
    pool[:, 0, :, :, ::2], pool[:, 2, :, :, ::2] = case.arrays["k"], case.arrays["v"]
    arrays = case.arrays | {"k": pool[:, 0, :, :, ::2], "v": pool[:, 2, :, :, ::2]}
    check_case(case._replace(arrays=arrays))


def test_many_sequences(rng: np.random.Generator) -> None:
    lens = rng.integers(0, 30, 300)
    check_case(draw_case(rng, [*map(int, lens)], [*map(int, lens)], heads=(2, 2), dims=(8, 8)))


def test_what_sequences_share_is_summed_before_it_is_rounded(rng: np.random.Generator) -> None:
    lens = [int(n) for n in rng.integers(1, 6, 200)]
    case = draw_case(rng, lens, lens, heads=(8, 8), dims=(8, 8), dtype="bfloat16", given=("sinks",))
    arrays, named = arguments(case)
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = attention(q, k, v, return_lse=True, **named)
    found = []
    for sinks in (named["sinks"], named["sinks"].astype(np.float32)):
        grads = attention_backward(arrays["dout"], q, k, v, out, lse, wrt="sinks", **named | {"sinks": sinks})
        found.append(grads.dsinks.astype(np.float64))
    assert (np.abs(found[0] - found[1]) <= 2.0**-8 * np.abs(found[1])).all()


def test_nobody_is_there(rng: np.random.Generator) -> None:
    for n in (0, 3):
        case = draw_case(rng, [0] * n, [0] * n, rest=4, given=("sinks",))
        found = check_case(case)
        assert not found["out"].any() and np.isneginf(found["lse"]).all() and not found["dsinks"].any()


def bits(*arrays: Any) -> list[bytes]:
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks", "alibi"])
def test_the_same_bits_packed_alone_padded_cached_and_paged(dtype: str, name: str, rng: np.random.Generator) -> None:
    lens_q, lens_k = [1, 30, 3, 520], [50, 30, 0, 601]
    how = together(name) or {}
    case = draw_case(rng, lens_q, lens_k, dtype=dtype, heads=(4, 2), dims=(32, 16), along="h", **how)
    q, k, v, dout = (case.arrays[x] for x in ("q", "k", "v", "dout"))
    others = case.options | case.given
    out, lse = attention(q, k, v, return_lse=True, **case.lengths, **others)
    grads = attention_backward(dout, q, k, v, out, lse, **case.lengths, **others)
    s, page = max(lens_k), 16
    cache = [np.full((4, s + 9, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    reach = [-(-m // page) for m in lens_k]
    table = np.full((4, max(reach)), -1, np.int32)
    pools = [np.full((sum(reach), page, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    free = list(rng.permutation(sum(reach)))
    for n, (of_k,) in enumerate(case.keys):
        for whole, x in zip(cache, (k, v)):
            whole[n, : lens_k[n]] = x[of_k]
        for at in range(reach[n]):
            table[n, at] = free.pop()
            for pool, x in zip(pools, (k, v)):
                rows = x[of_k][at * page : (at + 1) * page]
                pool[table[n, at], : len(rows)] = rows
    cu, filled = case.lengths["cu_seqlens_q"], np.array(lens_k)
    as_cache = attention(q, *cache, cu_seqlens_q=cu, seqlens_k=filled, return_lse=True, **others)
    assert bits(*as_cache) == bits(out, lse)
    paged = attention(q, *pools, cu_seqlens_q=cu, seqlens_k=filled, page_table=table, return_lse=True, **others)
    assert bits(*paged) == bits(out, lse)
    of_cache = attention_backward(dout, q, *cache, out, lse, cu_seqlens_q=cu, seqlens_k=filled, **others)
    assert bits(of_cache.dq) == bits(grads.dq)
    for n, ((of_q,), (of_k,)) in enumerate(zip(case.queries, case.keys)):
        one = [x[None] for x in (q[of_q], k[of_k], v[of_k])]
        alone = attention(*one, return_lse=True, **others)
        assert bits(*alone) == bits(out[of_q], lse[:, of_q])
        of_alone = attention_backward(dout[of_q][None], *one, *alone, **others)
        assert bits(*of_alone) == bits(grads.dq[of_q], grads.dk[of_k], grads.dv[of_k])
        assert bits(of_cache.dk[n, : lens_k[n]], of_cache.dv[n, : lens_k[n]]) == bits(*of_alone[1:])
        padded = np.full((1, lens_q[n] + 4, *q.shape[1:]), np.nan, q.dtype)
        padded[0, : lens_q[n]] = q[of_q]
        ends = np.array([0, lens_q[n]])
        again = attention(padded[0], k[of_k][None], v[of_k][None], cu_seqlens_q=ends, **others)
        assert bits(again[: lens_q[n]]) == bits(out[of_q]) and not again[lens_q[n] :].any()


def test_dropout_goes_by_sequence_and_position(rng: np.random.Generator) -> None:
    """Packed or padded drops the same."""
    case = draw_case(rng, SQUARE, SQUARE, heads=(2, 2))
    q, k, v = (case.arrays[x] for x in "qkv")
    packed = attention(q, k, v, dropout=0.4, seed=7, **case.lengths)
    long = max(SQUARE)
    padded = [np.zeros((len(SQUARE), long, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    for n, (of_q,) in enumerate(case.queries):
        for whole, x in zip(padded, (q, k, v)):
            whole[n, : SQUARE[n]] = x[of_q]
    seen = np.arange(long) < np.array(SQUARE)[:, None]
    out = attention(*padded, key_mask=seen, dropout=0.4, seed=7)
    for n, (of_q,) in enumerate(case.queries):
        np.testing.assert_allclose(out[n, : SQUARE[n]], packed[of_q], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cores", ["1", "3"])
def test_any_number_of_cores(cores: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that sequences share are added in one order."""
    lens = [int(n) for n in rng.integers(0, 200, 20)] + [700]
    case = draw_case(rng, lens, lens, heads=(4, 4), dims=(64, 64), given=("bias",), along="h", dtype="float16")
    arrays, named = arguments(case)
    results = []
    for threads in ("2", cores):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        out, lse = attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **named)
        grads = attention_backward(
            arrays["dout"], *(arrays[x] for x in "qkv"), out, lse, wrt="bias", deterministic=True, **named
        )
        results.append(bits(out, lse, *grads, grads.dbias))
    assert results[0] == results[1]


TANGENTS = [
    (("q", "k", "v"), {"options": {"causal": True}}),
    (("q", "bias", "sinks"), {"given": ("bias", "sinks"), "lines": ("bias",), "options": {"window": (4, 4)}}),
    (("k", "alibi_slopes", "bias"), {"given": ("bias", "alibi_slopes", "seed"), "options": {"dropout": 0.2}}),
    (("v", "table"), {"score": "relative"}),
]


@pytest.mark.parametrize(("moving", "how"), TANGENTS, ids=["-".join(x) for x, _ in TANGENTS])
def test_tangents_are_those_of_each_alone(
    moving: tuple[str, ...], how: dict[str, Any], rng: np.random.Generator
) -> None:
    """As differences say, of results and of gradients, in float64."""
    for form_k in ("packed", "filled"):
        case = draw_case(rng, [3, 0, 9, 1], [5, 2, 7, 0], form_k=form_k, dtype="float64", dims=(8, 8), **how)
        arrays, named = arguments(case)
        q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
        whole = {"q": q, "k": k, "v": v} | named | named.get("score_arrays", {})
        tangents = {
            name: np.where(np.isnan(whole[name]), np.nan, rng.standard_normal(whole[name].shape)) for name in moving
        }
        out, lse = attention(q, k, v, return_lse=True, **named)
        tout, tlse = attention_jvp(tangents, q, k, v, out, lse, **named)
        wrt = [name for name in moving if name not in "qkv"]
        second = attention_backward_jvp(tangents, dout, q, k, v, out, lse, wrt=wrt, **named)

        def at(step: float) -> list[np.ndarray]:
            moved = {name: whole[name] + step * tangents[name] for name in moving}  # noqa: B023
            given = {**named, **{name: x for name, x in moved.items() if name in named}}  # noqa: B023
            if "score_arrays" in given:
                given["score_arrays"] = {name: moved.get(name, x) for name, x in given["score_arrays"].items()}
            of = [moved.get(name, x) for name, x in zip("qkv", (q, k, v))]  # noqa: B023
            results = attention(*of, return_lse=True, **given)
            grads = attention_backward(dout, *of, *results, wrt=wrt, **given)  # noqa: B023
            return [*results, *grads, *grads.of_arrays.values()]

        for x, y, found in zip(at(1e-5), at(-1e-5), (tout, tlse, *second, *second.of_arrays.values())):
            with np.errstate(invalid="ignore"):
                slope = np.where(np.isneginf(x), 0, (x - y) / 2e-5)
            np.testing.assert_allclose(found, slope, rtol=1e-5, atol=1e-6)


def test_results_in_float32_and_gradients_that_are_added(rng: np.random.Generator) -> None:
    case = draw_case(rng, SQUARE, SQUARE, dtype="bfloat16", rest=0)
    arrays, named = arguments(case)
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out = attention(q, k, v, **named)
    wide = attention(q, k, v, out=np.empty(out.shape, np.float32), **named)
    assert bits(wide.astype(out.dtype)) == bits(out) and (wide != out).any()
    out, lse = attention(q, k, v, return_lse=True, **named)
    once = attention_backward(
        dout, q, k, v, out, lse, grads=tuple(np.empty(x.shape, np.float32) for x in (q, k, v)), **named
    )
    twice = tuple(x.copy() for x in once)
    attention_backward(dout, q, k, v, out, lse, grads=twice, add=True, **named)
    assert all(np.allclose(y, 2 * x, atol=1e-6) for x, y in zip(once, twice))


@pytest.mark.parametrize("form_k", ["packed", "filled", "paged"])
def test_8_bits(form_k: str, rng: np.random.Generator) -> None:
    """A number for each head, or for each 128 rows of a sequence."""
    import ml_dtypes

    case = draw_case(
        rng, [140, 3], [150, 40], form_k=form_k, dtype="float32", rest=0, page=32, options={"causal": True}
    )
    q, k, v = (np.nan_to_num(case.arrays[x]).astype(ml_dtypes.float8_e4m3fn) for x in "qkv")
    for blocks in (1, 2):
        scales = {
            f"{x}_descale": rng.uniform(0.5, 2, (2, h, blocks)).astype(np.float32) for x, h in zip("qkv", (4, 2, 2))
        }
        out = attention(q, k, v, **scales, **case.lengths, **case.options)
        assert out.dtype == ml_dtypes.bfloat16
        for n, ((of_q,), of_k) in enumerate(zip(case.queries, case.keys)):
            own = [q[of_q], k[of_k], v[of_k]]
            rows = [np.repeat(s[n], 128, 1)[:, : len(x)] if blocks > 1 else s[n] for x, s in zip(own, scales.values())]
            meant = [x.astype(np.float32) * s.T[:, :, None] for x, s in zip(own, rows)]
            np.testing.assert_allclose(
                out[of_q].astype(np.float32), attention(*meant, causal=True), rtol=0.02, atol=0.02
            )
