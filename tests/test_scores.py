"""What happens to a score between Q Kᵀ and the softmax, on every backend that takes it: soft cap, ALiBi, bias, mask,
sinks.

On a GPU each set of options is a kernel to compile: tests share sets and head dimensions, and differ in data.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from backends import CPU, Backend, in_turn, on_pairs_with_scores
from criterion import assert_as_good
from reference import DTYPES, references, state
from semantics import LAYS, Inputs, check, draw_inputs

from cupyflash import attention, attention_backward
from cupyflash.problem import ARRAYS

# (arrays, options); under the masks that these have in other tests too.
ALONE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "softcap": ((), {"softcap": 1.5}),
    "alibi": (("alibi_slopes",), {"causal": True}),
    "bias": (("bias",), {}),
    "mask": (("mask",), {}),
    "sinks": (("sinks",), {}),
}
ALL = ("mask", "bias", "alibi_slopes", "sinks")
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (13, 7)},
}
# Axes along which a mask and a bias are more than one number.
FORMS = ("bhqk", "hqk", "bqk", "qk", "bhk", "k", "q", "h", "")
SEQS = [(67, 93), (193, 65), (2, 77)]


def of_length(seq: tuple[int, int]) -> dict[str, Any]:
    """Where a handful of rows decides luck does: a larger batch."""
    return {"seq": seq, "batch": 2 if min(seq) > 10 else 16}


@pytest.mark.parametrize("name", ALONE)
@on_pairs_with_scores
def test_each_alone(backend: Backend, dtype: str, name: str, rng: np.random.Generator) -> None:
    given, options = ALONE[name]
    for seq in (*SEQS, *[(1, 77)] * ("causal" not in options)):
        inputs = draw_inputs(rng, dtype, **of_length(seq), heads=(4, 2), given=given)
        check(backend, inputs, **options)


@in_turn("band", BANDS, softcap=1.0)
def test_all_together(backend: Backend, dtype: str, band: str, rng: np.random.Generator) -> None:
    for seq in (*SEQS, *[(1, 77), (130, 1)] * (band == "full")):
        inputs = draw_inputs(rng, dtype, **of_length(seq), heads=(4, 2), given=ALL, key_mask=True)
        check(backend, inputs, softcap=2.0, **BANDS[band])


@in_turn("dims", [(256, 256), (128, 128)], softcap=1.0)
def test_all_together_of_wide_heads(
    backend: Backend, dtype: str, dims: tuple[int, int], rng: np.random.Generator
) -> None:
    """Where a tensor-core backward shares out columns, and not keys."""
    inputs = draw_inputs(rng, dtype, seq=(150, 140), heads=(4, 2), dims=dims, given=ALL, key_mask=True)
    check(backend, inputs, softcap=2.0, causal=True)


@on_pairs_with_scores
def test_many_tiles(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    for seq in ((517, 700), (2, 2099), (900, 60)):
        inputs = draw_inputs(rng, dtype, **of_length(seq), given=ALL, key_mask=True)
        check(backend, inputs, softcap=2.0, causal=True)


@pytest.mark.parametrize("full", FORMS)
@on_pairs_with_scores
def test_axes_of_length_1(backend: Backend, dtype: str, full: str, rng: np.random.Generator) -> None:
    """Stand for all; and the leading ones may be left out."""
    inputs = draw_inputs(rng, dtype, seq=(67, 93), heads=(4, 2), given=ALL, full=full, key_mask=True)
    if full in ("q", "h", ""):  # a mask that hides whole heads hides everything that could be wrong
        inputs.given["mask"][...] |= inputs.given["mask"].size == 1 or full == "h"
    check(backend, inputs, softcap=2.0, causal=True)
    short = {name: x.reshape(np.trim_zeros(np.array(x.shape) - 1, "f") + 1) for name, x in inputs.given.items()}
    check(backend, inputs._replace(given=short), softcap=2.0, causal=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@on_pairs_with_scores
def test_ranks_and_layouts(backend: Backend, dtype: str, rank: int, layout: str, rng: np.random.Generator) -> None:
    batch, heads = (2 if rank == 4 else 1), ((1, 1) if rank == 2 else (4, 2))
    inputs = draw_inputs(rng, dtype, batch=batch, heads=heads, seq=(67, 130), given=ALL, key_mask=True)
    check(backend, inputs, rank=rank, layout=layout, softcap=2.0, causal=True)


@pytest.mark.parametrize("lay", LAYS)
@on_pairs_with_scores
def test_strides(backend: Backend, dtype: str, lay: str, rng: np.random.Generator) -> None:
    """Of q, k and v, and of mask and bias."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=ALL, key_mask=True)
    check(backend, inputs, lay=LAYS[lay], softcap=2.0, causal=True)


@on_pairs_with_scores
def test_expanded_in_strides(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """A bias of one head, and a transposed one, with the full shape and strides of 0."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=("bias",), full="qk")
    whole = np.broadcast_to(inputs.given["bias"], (2, 4, 67, 93))
    references = expected(inputs._replace(given={"bias": whole}))  # and a gradient for each pair
    for base in (backend.put(inputs.given["bias"]), backend.put(inputs.given["bias"].swapaxes(2, 3)).swapaxes(2, 3)):
        judge(backend, inputs, references, bias=backend.xp.broadcast_to(base, whole.shape))


@on_pairs_with_scores
def test_nan_beside_sinks(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """A row of NaN has no largest score, and is no row without keys for that."""
    for name in ("q", "k", "v", "dout"):
        inputs = draw_inputs(rng, dtype, seq=(52, 17), given=("sinks",))
        getattr(inputs, name)[1, 5, 0, 3] = np.nan
        check(backend, inputs, moving=())


@on_pairs_with_scores
def test_a_bias_and_sinks_in_float32(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """For inputs of any dtype; and slopes in the dtype of q, of each batch entry or one set for all."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=ALL, key_mask=True)
    for name in ("bias", "sinks"):
        inputs.given[name] = rng.standard_normal(inputs.given[name].shape).astype(np.float32)
    inputs.given["alibi_slopes"] = inputs.given["alibi_slopes"].astype(DTYPES[dtype])
    check(backend, inputs, softcap=2.0, causal=True)
    inputs.given["alibi_slopes"] = inputs.given["alibi_slopes"][0]
    check(backend, inputs, softcap=2.0, causal=True)


# As FEW in test_semantics.py: whole groups of heads in a tile, and parts of them.
FEW = {"1-of-8": (24, (1, 77), (8, 1)), "5-of-4": (50, (5, 50), (12, 3)), "16-of-7": (5, (16, 77), (14, 2))}


@pytest.mark.parametrize("few", FEW)
@in_turn("band", ["full", "causal"], softcap=1.0)
def test_few_queries_of_heads_that_share_keys(
    backend: Backend, dtype: str, few: str, band: str, rng: np.random.Generator
) -> None:
    """Slopes, sinks and bias are those of each head of the tile."""
    batch, seq, heads = FEW[few]
    inputs = draw_inputs(rng, dtype, batch=batch, seq=seq, heads=heads, given=ALL, key_mask=True)
    check(backend, inputs, softcap=2.0, **BANDS[band])


@pytest.mark.parametrize("causal", [True, "top_left"])
@on_pairs_with_scores
def test_alibi_counts_from_the_diagonal(
    backend: Backend, dtype: str, causal: bool | str, rng: np.random.Generator
) -> None:
    """That causal names: as a bias of -slope * |i + diagonal - j| does."""
    for seq in ((67, 93), (93, 67)):
        inputs = draw_inputs(rng, dtype, seq=seq, heads=(4, 2), given=("alibi_slopes",))
        diagonal = 0 if causal == "top_left" else seq[1] - seq[0]
        distance = np.abs(np.arange(seq[0])[:, None] + diagonal - np.arange(seq[1]))
        bias = -inputs.given["alibi_slopes"][..., None, None].astype(np.float64) * distance
        wide = bias.astype("float64" if dtype == "float64" else "float32")
        references = expected(inputs._replace(given={"bias": wide}), causal=causal)
        slopes = backend.put(inputs.given["alibi_slopes"])
        judge(backend, inputs, references, wrt=(), alibi_slopes=slopes, causal=causal)


# ---- what hides ------------------------------------------------------------------------------------------------------


@in_turn("band", BANDS, softcap=1.0)
def test_rows_that_see_no_key(backend: Backend, dtype: str, band: str, rng: np.random.Generator) -> None:
    """By the band, key_mask or mask: out and gradients are 0, exactly, and lse the sink."""
    inputs = draw_inputs(rng, dtype, batch=3, seq=(130, 90), heads=(4, 2), given=ALL, key_mask=True)
    inputs.key_mask[1] = False
    inputs.given["mask"][0, :, 50:70] = False
    inputs.given["mask"][2, 1] = False
    options = {"softcap": 2.0, **BANDS[band]}
    check(backend, inputs, **options)
    found = run(backend, inputs, key_mask=backend.put(inputs.key_mask), **put(backend, inputs.given), **options)
    sinks = inputs.given["sinks"].astype(np.float64)[:, None]
    unseen = np.s_[0, :, 50:70], np.s_[1], np.s_[2, 1]
    for lse, head in zip((found["lse"][at] for at in unseen), (sinks, sinks, sinks[1])):
        np.testing.assert_allclose(lse, np.broadcast_to(head, lse.shape), rtol=1e-6)
    for name in ("out", "dq"):
        x = found[name].swapaxes(1, 2)
        assert not any(x[at].any() for at in unseen), name
    assert not any(found["dbias"][at].any() for at in unseen)
    assert not found["dk"][1].any() and not found["dv"][1].any()


@on_pairs_with_scores
def test_rows_that_a_mask_hides(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Without sinks, or with such as take nothing: 0, and lse -inf. No matter what q holds there."""
    inputs = draw_inputs(rng, dtype, seq=(130, 90), heads=(4, 2), given=("mask", "sinks"))
    inputs.given["mask"][:, :, 60:80] = False
    inputs.given["sinks"][...] = -np.inf
    assert not run(backend, inputs, **put(backend, inputs.given))["dsinks"].any()
    del inputs.given["sinks"]
    check(backend, inputs)
    found = run(backend, inputs, **put(backend, inputs.given))
    assert np.isneginf(found["lse"][:, :, 60:80]).all()
    assert not found["out"][:, 60:80].any() and not found["dq"][:, 60:80].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@on_pairs_with_scores
def test_a_bias_does_not_matter_where_keys_are_hidden(
    backend: Backend, dtype: str, value: float, rng: np.random.Generator
) -> None:
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=ALL, key_mask=True)
    i, j = np.ogrid[:130, :150]
    hidden = (j > i + 20) | ~inputs.given["mask"] | ~inputs.key_mask[:, None, None]
    inputs.given["bias"][hidden] = value
    check(backend, inputs, softcap=2.0, causal=True)
    options = put(backend, inputs.given) | {"key_mask": backend.put(inputs.key_mask), "softcap": 2.0, "causal": True}
    assert not run(backend, inputs, **options)["dbias"][hidden].any()


@pytest.mark.parametrize("value", ["-inf", "-1e4", "-1e9", "lowest"])
@on_pairs_with_scores
def test_a_bias_that_hides(backend: Backend, dtype: str, value: str, rng: np.random.Generator) -> None:
    """As people write it, in float32: -inf, a large negative number or the lowest."""
    number = float(np.finfo(np.float32).min) if value == "lowest" else float(value)
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=("bias",))
    hidden = rng.random(inputs.given["bias"].shape) < 0.4
    inputs.given["bias"] = np.where(hidden, number, rng.standard_normal(hidden.shape)).astype(np.float32)
    check(backend, inputs)
    # As if a mask had hidden them.
    clean = np.where(hidden, 0, inputs.given["bias"])
    references = expected(inputs._replace(given={"bias": clean, "mask": ~hidden}))
    judge(backend, inputs, references, bias=backend.put(inputs.given["bias"]))


@pytest.mark.parametrize("value", ["-inf", "-1e4", "-1e9", "lowest"])
@on_pairs_with_scores
def test_rows_that_a_bias_hides(backend: Backend, dtype: str, value: str, rng: np.random.Generator) -> None:
    """Padding: what becomes of such rows is nobody's matter, but their gradient is 0, and nothing may come of it."""
    number = float(np.finfo(np.float32).min) if value == "lowest" else float(value)
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=("bias",))
    padding = np.s_[:, :, 100:]
    inputs.given["bias"] = inputs.given["bias"].astype(np.float32)
    inputs.given["bias"][padding] = number
    inputs.dout[:, 100:] = 0
    found = run(backend, inputs, bias=backend.put(inputs.given["bias"]))
    assert np.isfinite(found["out"]).all()
    mask = np.ones((130, 1), bool)
    mask[100:] = False
    exact, own = expected(inputs._replace(given={"mask": mask, "bias": np.where(mask, inputs.given["bias"], 0)}))
    for name, x in found.items():
        rows = {"out": np.s_[:, :100], "lse": np.s_[:, :, :100]}.get(name, np.s_[:])
        assert_as_good(x[rows], getattr(exact, name)[rows], getattr(own, name)[rows], name)


@pytest.mark.parametrize("of_bias", ["float32", "own"])
@on_pairs_with_scores
def test_the_lowest_bias_is_minus_infinity(
    backend: Backend, dtype: str, of_bias: str, rng: np.random.Generator
) -> None:
    """Of float32 and bfloat16, and of float64 in its own range: whole rows of it see no key."""
    given = DTYPES[dtype] if of_bias == "own" or dtype == "float64" else np.float32
    if given is np.float16:
        pytest.skip("the lowest number of float16 is a score like others")
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=("bias",))
    bias = inputs.given["bias"].astype(given)
    bias[:, 1, 40:90], bias[:, 2, :, ::2] = ml_dtypes.finfo(given).min, ml_dtypes.finfo(given).min
    found = run(backend, inputs._replace(given={"bias": bias}), bias=backend.put(bias))
    hidden = np.where(bias == ml_dtypes.finfo(given).min, -np.inf, bias).astype(given)
    exact, own = expected(inputs._replace(given={"bias": hidden}))
    assert not found["out"][:, 40:90, 1].any() and np.isneginf(found["lse"][:, 1, 40:90]).all()
    for name, x in found.items():
        assert_as_good(x, getattr(exact, name), getattr(own, name), name)


@on_pairs_with_scores
def test_rows_whose_bias_is_minus_infinity(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """See no key."""
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=("bias",))
    inputs.given["bias"][:, 1, 40:90] = -np.inf
    check(backend, inputs)


@on_pairs_with_scores
def test_a_large_bias(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=("bias",))
    inputs.given["bias"] = (1e4 * np.round(2 * rng.standard_normal(inputs.given["bias"].shape))).astype(np.float32)
    check(backend, inputs, large_scores=True)


# ---- sizes, signs, and what the backward is asked --------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 30.0, 1e6])
@on_pairs_with_scores
def test_soft_caps(backend: Backend, dtype: str, softcap: float, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(67, 130))
    # With a cap far below the scores nearly every slope, 1 - tanh², is the difference of two numbers that are nearly
    # equal.
    luck = not 0.01 < softcap < 1e3
    check(backend, inputs, softcap=softcap, large_scores=luck)
    check(backend, inputs, softcap=softcap, scale=2.0, large_scores=luck)


@in_turn("scale", [-0.3, 0.0], softcap=1.0)
def test_scale(backend: Backend, dtype: str, scale: float, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(67, 130), heads=(4, 2), given=ALL, key_mask=True)
    check(backend, inputs, softcap=2.0, scale=scale)


@pytest.mark.parametrize("sink", [-np.inf, -200.0, 200.0])
@on_pairs_with_scores
def test_sinks_of_any_size(backend: Backend, dtype: str, sink: float, rng: np.random.Generator) -> None:
    """One that takes nothing, one that takes next to nothing, and one that takes all."""
    inputs = draw_inputs(rng, dtype, seq=(67, 130), heads=(4, 2), given=("sinks",))
    inputs.given["sinks"][1:3] = sink
    check(backend, inputs)


@on_pairs_with_scores
def test_nothing_but_sinks(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """There are no keys at all: lse is the sink, and so is what its gradient gives."""
    for rank, layout in ((4, "bshd"), (4, "bhsd"), (3, "bshd"), (2, "bshd")):
        batch, heads = (2 if rank == 4 else 1), (1 if rank == 2 else 3)
        inputs = draw_inputs(rng, dtype, batch=batch, heads=(heads, heads), seq=(5, 0), given=("sinks",))
        check(backend, inputs, rank=rank, layout=layout)
        more = draw_inputs(
            rng, dtype, batch=batch, heads=(heads, heads), seq=(5, 0), given=("sinks", "alibi_slopes"), dlse=1.0
        )
        check(backend, more, rank=rank, layout=layout)
        inputs.given["sinks"] = inputs.given["sinks"].astype(np.float32)[:1]
        check(backend, inputs, rank=rank, layout=layout)


@on_pairs_with_scores
def test_gradient_of_lse(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(167, 230), heads=(4, 2), given=ALL, key_mask=True, dlse=1.0)
    check(backend, inputs, softcap=2.0, causal=True)


@on_pairs_with_scores
def test_deterministic_gradients(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    for full in ("bhqk", "hqk", "qk", "bk"):
        inputs = draw_inputs(rng, dtype, seq=(230, 301), heads=(4, 2), given=ALL, full=full, key_mask=True)
        check(backend, inputs, softcap=2.0, causal=True, deterministic=True)
        options = put(backend, inputs.given) | {
            "key_mask": backend.put(inputs.key_mask),
            "softcap": 2.0,
            "causal": True,
        }
        first, *others = (run(backend, inputs, deterministic=True, **options) for _ in range(3))
        assert len(first) == 8
        for name, x in first.items():
            assert all(x.tobytes() == other[name].tobytes() for other in others), name


# ---- gradients of bias, slopes and sinks: `check` asks for them everywhere -------------------------------------------


@pytest.mark.parametrize("wrt", [(), ("bias",), ("alibi_slopes",), ("sinks",)], ids="".join)
@on_pairs_with_scores
def test_gradients_of_some_arrays(backend: Backend, dtype: str, wrt: tuple[str, ...], rng: np.random.Generator) -> None:
    """Nothing else depends on which are asked for."""
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=ALL, full="hqk", dlse=1.0)
    check(backend, inputs, wrt=wrt, softcap=2.0, causal=True)
    if backend.family is None:  # of kernels other tiles may be better
        options = put(backend, inputs.given) | {"softcap": 2.0, "causal": True}
        found, all_of_them = (run(backend, inputs, wrt=names, **options) for names in (wrt, ALL[1:]))
        for name, x in found.items():
            np.testing.assert_array_equal(x, all_of_them[name])


@pytest.mark.parametrize("full", ["hqk", "qk", "bhk", "bhq", "bh", ""])
@on_pairs_with_scores
def test_gradients_summed_over_many(backend: Backend, dtype: str, full: str, rng: np.random.Generator) -> None:
    """In float32, whatever the dtype: thousands of terms to an element."""
    inputs = draw_inputs(rng, dtype, batch=12, seq=(150, 140), heads=(4, 2), given=("bias", "sinks"), full=full)
    # Where the sum is over keys, what stays of dS is next to nothing but the rounding of O in delta: that of every
    # FlashAttention.
    check(backend, inputs)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 1.5}], ids=str)
def test_finite_differences(options: dict[str, Any], rng: np.random.Generator) -> None:
    """Of a loss of out and lse, in float64: so that reference and results are not wrong in the same way."""
    for full in ("bhqk", "hk", "q"):
        inputs = draw_inputs(
            rng, "float64", seq=(4, 5), heads=(4, 2), dims=(3, 2), given=ALL, full=full, key_mask=True, dlse=1.0
        )  # fmt: skip
        options = options | {"key_mask": inputs.key_mask, "mask": inputs.given.pop("mask")}
        inputs.given["alibi_slopes"] = inputs.given["alibi_slopes"].astype(np.float64)
        given = inputs.given

        def loss(given: dict[str, np.ndarray], inputs: Inputs = inputs, options: dict[str, Any] = options) -> float:
            out, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, **given, **options)
            return float((out * inputs.dout).sum() + (lse * inputs.dlse)[np.isfinite(lse)].sum())

        found = run(CPU, inputs, dlse=inputs.dlse, **given, **options)
        for name, x in given.items():
            for at in np.ndindex(x.shape):
                step = np.zeros_like(x)
                step[at] = 1e-5
                slope = (loss(given | {name: x + step}) - loss(given | {name: x - step})) / 2e-5
                assert abs(found[f"d{name}"][at] - slope) < 1e-7, (name, full, at)


# ---- runs without the frame of `check` -------------------------------------------------------------------------------


def put(backend: Backend, given: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: backend.put(x) for name, x in given.items()}


def run(
    backend: Backend,
    inputs: Inputs,
    deterministic: bool = False,
    wrt: Collection[str] | None = None,
    dlse: Any = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """out, lse and the gradients by name; optional arrays are those of `options` alone, `wrt` all of them
    unless said."""
    q, k, v, dout = (backend.put(x) for x in inputs[:4])
    own = {row.name: backend.get(options[row.name]) for row in ARRAYS if options.get(row.name) is not None}
    others = {name: x for name, x in options.items() if name not in own and name != "dlse"}
    options["family"] = backend.family_for(state(*inputs[:3], **own, **others))
    out, lse = attention(q, k, v, return_lse=True, **options)
    if wrt is None:
        wrt = [row.name for row in ARRAYS if row.gradient and row.name in options]
    grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, deterministic=deterministic, **options)
    found = {"out": out, "lse": lse, **grads._asdict(), **{f"d{name}": getattr(grads, f"d{name}") for name in wrt}}
    return {name: backend.get(x) for name, x in found.items()}


def expected(inputs: Inputs, **options: Any) -> tuple[Any, Any]:
    """Exact results, and those in own precision."""
    problem = state(inputs.q, inputs.k, inputs.v, inputs.key_mask, **inputs.given, **options)
    args = problem, inputs.q, inputs.k, inputs.v, inputs.key_mask, inputs.dout
    return references(*args, **inputs.given)


def judge(backend: Backend, inputs: Inputs, references: tuple[Any, Any], **options: Any) -> None:
    exact, own = references
    for name, x in run(backend, inputs, **options).items():
        assert_as_good(x, getattr(exact, name), getattr(own, name), name, exact.unit(name))
