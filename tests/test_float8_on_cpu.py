"""The Hopper forward of 8 bits without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from float8_problems import FLOAT8, RESULTS, Quantized, exact_of, quantize, whole
from on_cpu import Guarded, run, with_tile
from reference import Standard
from score_functions import WRITTEN
from semantics import Blocks, draw_blocks, draw_inputs

from cupyflash.float8 import quantize as by_block
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_forward
from cupyflash.gpu.source import generate
from cupyflash.passes import FORWARD
from cupyflash.problem import ARRAYS, Given, View

pytestmark = needs_compiler

H200 = Arch("sm_90a", 90, 2, 232448)
SCORES = ("bias", "alibi_slopes", "sinks", "mask")

CASES: dict[str, dict[str, Any]] = {  # shapes, how inputs are scaled, the result, options
    "plain": {"seq": (200, 150)},
    "group": {"seq": (200, 300), "heads": (4, 2), "dims": (128, 128), "causal": True},
    "heads": {"seq": (200, 300), "by": "head"},
    "blocks": {"seq": (300, 400), "heads": (2, 1), "dims": (128, 128), "by": "block"},
    # A tile of keys begins in the last block.
    "blocks-causal": {"seq": (200, 450), "dims": (128, 96), "by": "block", "causal": True, "result": "float16",
        "tile": (2, 192, 2)},
    "wide": {"seq": (130, 260), "heads": (2, 1), "dims": (256, 256), "by": "block", "softcap": 2.0},
    "odd": {"seq": (70, 150), "dims": (90, 33), "window": (20, 5), "key_mask": True},
    "eight": {"seq": (130, 260), "dims": (128, 64), "by": "head", "result": "float8_e4m3fn", "out_scale": 30.0},
    "eight-odd": {"seq": (130, 60), "dims": (64, 37), "result": "float8_e4m3fn", "out_scale": 100.0},
    "scores": {"seq": (150, 260), "dims": (64, 40), "by": "block", "given": SCORES, "window": (50, 9),
        "key_mask": True},
    "dropout": {"seq": (150, 260), "heads": (4, 2), "by": "block", "given": ("seed",), "dropout": 0.3},
    "everything": {
        "seq": (150, 260), "heads": (4, 2), "by": "block", "given": (*SCORES, "seed"), "window": (50, 9),
        "key_mask": True,
        "softcap": 8.0, "dropout": 0.2, "blocks": ((32, 48), "bh"),
    },
    "score": {"seq": (150, 260), "dims": (128, 128), "score": "relative", "by": "block", "scale": -0.1},
    "192": {"seq": (150, 280), "heads": (3, 1), "dims": (192, 128), "by": "head", "causal": True, "given": ("sinks",)},
    "three-warpgroups": {"seq": (200, 300), "dims": (128, 128), "tile": (3, 96, 2)},
    "sums": {"seq": (300, 1500), "heads": (4, 2), "by": "block", "causal": True},
    "sums-full": {"seq": (200, 1300), "dims": (128, 128), "by": "head", "given": ("sinks",)},
    "sums-wide": {"seq": (130, 1100), "heads": (1, 1), "dims": (256, 256), "window": (900, 300)},
    "sums-192": {"seq": (130, 1000), "heads": (2, 1), "dims": (192, 128), "causal": True, "by": "block",
        "result": "float16"},
    "sums-eight": {"seq": (130, 900), "heads": (1, 1), "dims": (128, 120), "window": (700, 90),
        "result": "float8_e4m3fn", "out_scale": 30.0},
    "sums-scores": {
        "seq": (150, 1000), "heads": (2, 1), "given": (*SCORES, "seed"), "dropout": 0.2, "softcap": 8.0,
        "blocks": ((64, 128), "h"),
    },
    "sums-unaligned": {"seq": (200, 1000), "dims": (64, 59), "rows_aligned": False},
    # And a key tile behind what a warpgroup sees
    "one-stage": {"seq": (300, 320), "tile": (2, 64, 1), "window": (100, 0)},
    "long-tiles": {"seq": (200, 500), "dims": (128, 128), "tile": (2, 192, 2), "by": "block", "window": (300, None)},
}  # fmt: skip


@cases(
    CASES, "plain", "blocks-causal", "wide", "odd", "eight-odd", "everything", "score", "sums-eight",
    "sums-unaligned",
)  # fmt: skip
def test_on_cpu(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.startswith("sums"):
        monkeypatch.setattr(sm90_forward, "SUM_KEYS", 256)
    options = {
        "by": None,
        "long_sums": case.startswith("sums"),
        "given": (),
        "key_mask": False,
        "heads": (2, 2),
        "dims": (64, 64),
    } | CASES[case]
    shapes = {name: options.pop(name) for name in ("seq", "heads", "dims", "given", "key_mask")}
    if score := options.pop("score", None):
        shapes["score"], options["score"] = score, WRITTEN[score].function
    drawn = draw_inputs(rng, "float32", **shapes)
    if blocks := options.pop("blocks", None):
        batch, queries, heads, _ = drawn.q.shape
        options["blocks"] = draw_blocks(rng, (batch, heads, queries, drawn.k.shape[1]), *blocks)
    x = quantize(rng, *drawn[:3], by=options.pop("by"))
    check(x, drawn.key_mask, drawn.given, **options)


def check(
    x: Quantized,
    key_mask: np.ndarray | None = None,
    others: dict[str, np.ndarray] | None = None,
    *,
    result: str = "bfloat16",
    out_scale: float = 1.0,
    off: float | None = None,  # of an element, relative
    **options: Any,
) -> None:
    """The kernel in both orders (cuda_on_cpu.h), to the bit the same in both, beside exact attention on what x stands
    for."""
    before = None
    for out, lse, exact in results(x, key_mask, others, result, out_scale, **options):
        error = np.sqrt(((out.astype(np.float64) / out_scale - exact.out) ** 2).sum() / (exact.out**2).sum())
        assert error <= whole(x, result), f"out is off by {error:.3f} of its norm"
        if off is not None:
            np.testing.assert_allclose(out.astype(np.float64), exact.out, rtol=off)
        np.testing.assert_allclose(lse, exact.lse, rtol=1e-5, atol=2e-5)
        bits = out.tobytes() + lse.tobytes()
        assert before in (None, bits)
        before = bits


def results(
    x: Quantized,
    key_mask: np.ndarray | None,
    others: dict[str, np.ndarray] | None,
    result: str,
    out_scale: float,
    *,
    tile: tuple[int, ...] | None = None,
    blocks: Blocks | None = None,
    long_sums: bool = False,  # whether O is a sum of sums (sm90/long_sums.cuh)
    rows_aligned: bool = True,  # whether those of out start at multiples of 16 bytes
    **options: Any,
) -> Iterator[tuple[np.ndarray, np.ndarray, Standard]]:
    """out and lse of the kernel, in both orders, and exact attention."""
    others = {name: a.reshape(1) if name == "seed" else a for name, a in (others or {}).items()}
    if blocks is not None:
        options["block_mask"] = blocks.mask()
    problem, exact = exact_of(x, key_mask, others, blocks, **options)
    given = [*problem.given]
    for rule in ARRAYS:
        if rule.name in x.descales:
            scale = x.descales[rule.name]
            strides = tuple(n // scale.itemsize for n in scale.strides)
            axes = rule.spread(View(scale.shape, strides, "float32", "cpu", "numpy"))
            given.append(Given(rule.name, "float32", axes))
    problem = replace(problem, dtype=FLOAT8.name, out_dtype=result, out_scale=out_scale, given=tuple(given))
    chosen = with_tile(problem, H200, FORWARD, "sm90", tile)
    assert (dict(chosen.constants)["SUM_TILES"] > 0) == long_sums
    (library,) = compile_all(as_cpp(generate(chosen), [y.name for y in chosen.launches]))
    optional = x.descales | others | ({} if key_mask is None else {"key_mask": key_mask})
    rng = np.random.default_rng(x.q.size)
    shown = x.spoilt(rng, problem, key_mask)
    inputs = {name: Guarded(a.shape, a.dtype, a, True) for name, a in zip("qkv", shown[:3])}
    inputs |= {name: Guarded(a.shape, a.dtype, a, True) for name, a in optional.items()}
    for use in chosen.lists:
        of_mask = options["block_mask"].list_for(use)
        inputs[use.name] = Guarded(of_mask.shape, of_mask.dtype, of_mask)
    made = {
        "out": Guarded(exact.out.shape, RESULTS[result], None, rows_aligned),
        "lse": Guarded(exact.lse.shape, "float32"),
    }
    spaces = {
        y.name: Guarded(y.shape, FLOAT8 if y.dtype == FLOAT8.name else y.dtype) for y in chosen.workspace if y.nbytes
    }
    for last_first in (False, True):
        run(library, chosen, problem, made | inputs | spaces, last_first, H200.sms)
        yield made["out"].array, made["lse"].array, exact


@pytest.mark.parametrize("long_sums", [False, True])
def test_a_row_keeps_its_maximum_where_that_of_another_grows(
    long_sums: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a warp raise their maxima together, here in each of 24 tiles; every other row has seen its largest in the
    first."""
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(np.float32) for n in (64, 24 * 128, 24 * 128))
    q[..., :2], k[..., :2] = 0, 1
    q[:, ::2, :, 0] = q[:, 1::2, :, 1] = 48  # the scale is 1/8
    k[:, :-128, :, 1], k[:, -128:, :, 1] = -1, 8  # the last keys are visited first
    size = 24 - np.arange(24, dtype=np.float32)
    given = [x.astype(FLOAT8) for x in (q, k, v)]
    if long_sums:
        monkeypatch.setattr(sm90_forward, "SUM_KEYS", 256)
    check(Quantized(*given, {"k_descale": size[None, None]}), long_sums=long_sums)


def test_rows_that_grow_by_little_beside_one_that_grows_by_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums in shared memory shrink by less than bfloat16 tells, in each of many tiles."""
    monkeypatch.setattr(sm90_forward, "SUM_KEYS", 256)
    tiles = 60
    q, k = np.zeros((1, 64, 1, 64), np.float32), np.zeros((1, 128 * tiles, 1, 64), np.float32)
    v = np.ones((1, 128 * tiles, 1, 64), np.float32)
    growth = np.where(np.arange(64) % 2, 0.0015, 3.0)[:, None] * (tiles - 1 - np.arange(128 * tiles) // 128)
    check(
        Quantized(*(x.astype(FLOAT8) for x in (q, k, v)), {}),
        others={"bias": growth.astype(np.float32)[None, None]},
        long_sums=True,
        off=0.02,
    )


def test_what_long_sums_round_off_is_kept(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many numbers of one sign: rounded to bfloat16 each time, they would be off by more than out's own rounding."""
    monkeypatch.setattr(sm90_forward, "SUM_KEYS", 256)
    q, k = np.zeros((1, 64, 1, 64), np.float32), np.zeros((1, 128 * 60, 1, 64), np.float32)
    v = rng.choice([1, 1.125, 1.25, 1.5, 1.875], k.shape).astype(np.float32)
    x = Quantized(*(x.astype(FLOAT8) for x in (q, k, v)), {})
    check(x, result="float16", long_sums=True, off=2.0**-10)


def test_values_that_no_query_sees_are_large(rng: np.random.Generator) -> None:
    """Beside their scale the others' probabilities would have no bits."""
    drawn = draw_inputs(rng, "float32", seq=(200, 600))
    drawn.v[:, 256:] *= 1e6
    check(quantize(rng, *drawn[:3], by="block"), causal="top_left")
    check(quantize(rng, *drawn[:3], by="block"), window=(600, 10), causal=False)


def test_values_of_zero_beside_small_ones(rng: np.random.Generator) -> None:
    """Padding, say: the scale of such a block is none that hides the others."""
    drawn = draw_inputs(rng, "float32", seq=(200, 400))
    v = 1e-2 * drawn.v
    v[:, 256:] = 0
    (k8, k_scale), (v8, v_scale) = (by_block(x) for x in (drawn.k, v))
    check(Quantized(drawn.q.astype(FLOAT8), k8, v8, {"k_descale": k_scale, "v_descale": v_scale}))


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_scale_of_zero(causal: bool, rng: np.random.Generator) -> None:
    """Of all scores, or what a block of zeros was divided by: every score is 0, and lse the logarithm of their
    number."""
    drawn = draw_inputs(rng, "float32", seq=(150, 260))
    x = quantize(rng, *drawn[:3])
    check(x, scale=0.0, causal=causal)
    zero = np.zeros((1, 1, 1), np.float32)
    check(x._replace(descales={"q_descale": zero}), causal=causal)
    blocks = np.array([[[0.0, 1.0, 0.0]]], np.float32)
    check(x._replace(descales={"k_descale": blocks, "v_descale": blocks}), causal=causal)
