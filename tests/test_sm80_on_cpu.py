"""The kernels for Ampere's tensor cores without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check
from score_functions import documents, relative, without_s

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares

pytestmark = needs_compiler

# With few multiprocessors: as many blocks run at once.
A100, A10, H200 = Arch("sm_80", 80, 3, 166912), Arch("sm_86", 86, 3, 101376), Arch("sm_90a", 90, 3, 232448)

SCORES = ("mask", "bias", "alibi_slopes", "sinks")
# (GPU, dtype, shapes, options) as `check` takes them. Lengths are such that tiles end at a mask's edge, and just
# beyond.
CASES: dict[str, tuple[Arch, str, dict[str, Any], dict[str, Any]]] = {
    "plain": (A100, "float16", {"dims": (64, 48), "dlse": 1.0}, {}),
    "group": (A100, "bfloat16", {"heads": (4, 2), "seq": (150, 212)}, {"causal": True}),
    "window": (
        A100, "float16", {"seq": (200, 230), "dims": (128, 128), "batch": 1}, {"window": (17, 4), "scale": -0.3},
    ),
    "left": (
        A100, "float16", {"seq": (200, 266), "dims": (90, 128), "batch": 1},
        {"window": (0, None), "deterministic": True},
    ),
    "key-mask": (  # which leaves some queries no key
        A100, "bfloat16", {"seq": (130, 300), "key_mask": True, "dims": (59, 111), "given": ("sinks",), "dlse": 1.0},
        {"causal": "top_left", "rows_aligned": False},
    ),
    "in-order": (
        A100, "float16", {"heads": (4, 2), "seq": (150, 333), "batch": 1}, {"causal": True, "deterministic": True},
    ),
    "long": (
        A100, "bfloat16", {"heads": (1, 1), "seq": (2100, 140), "batch": 1},
        {"window": (150, None), "deterministic": True},
    ),
    "wide": (A100, "float16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1}, {"causal": True}),
    # By the first queries
    "unseen": (A100, "float16", {"seq": (230, 100), "heads": (2, 1), "given": ("sinks",)}, {"causal": True}),
    "192": (A100, "float16", {"seq": (70, 150), "dims": (192, 128), "key_mask": True}, {"window": (50, 50)}),
    "one-stage": (
        A10, "bfloat16", {"seq": (100, 150), "dims": (128, 100), "batch": 1, "dlse": 1.0}, {"causal": True},
    ),
    "narrow-tiles": (A10, "float16", {"seq": (100, 90), "dims": (256, 256), "batch": 1}, {"scale": 0.0}),
    # In the forward, warps share rows while two tiles are in flight; in the backward, none shares and one tile is.
    "other-tiles": (A100, "float16", {"seq": (150, 200)}, {"tiles": ((64, 64, 4, 2, 2, 2), (64, 64, 4, 1, 1, 2))}),
    "softcap": (A100, "bfloat16", {"seq": (100, 150), "batch": 1}, {"softcap": 1.5, "scale": -0.3}),
    "bias": (A100, "float16", {"seq": (100, 150), "batch": 1, "given": ("bias",), "full": "hqk"}, {}),
    "scores": (A100, "float16", {"seq": (100, 150), "heads": (4, 2), "given": SCORES},
        {"softcap": 2.0, "causal": True}),
    "scores-wide": (A100, "bfloat16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1,
        "given": SCORES}, {"window": (50, 9), "deterministic": True}),
    "dropout": (A100, "float16", {"seq": (100, 150), "heads": (4, 2), "given": ("seed",), "dlse": 1.0},
        {"causal": True, "dropout": 0.2}),
    "dropout-wide": (A100, "bfloat16", {"seq": (70, 150), "dims": (256, 200), "batch": 1, "given": (*SCORES, "seed")},
        {"window": (50, 9), "dropout": 0.6}),
    "blocks": (A100, "float16", {"seq": (190, 300), "heads": (4, 2)}, {"blocks": ((64, 64),), "deterministic": True}),
    "blocks-and-more": (
        A100, "bfloat16", {"seq": (150, 130), "heads": (2, 1), "dims": (128, 96), "given": SCORES, "key_mask": True},
        {"blocks": ((16, 48), "b"), "window": (50, 9), "deterministic": True},
    ),
    "score": (
        A100, "float16", {"heads": (4, 2), "seq": (150, 260), "score": "relative", "given": ("alibi_slopes",)},
        {"score": relative, "causal": True},
    ),
    "score-in-order": (
        A100, "bfloat16", {"dims": (64, 128), "seq": (150, 170), "score": "documents", "given": ("bias",), "dlse": 1.0},
        {"score": documents, "scale": -0.3, "deterministic": True},
    ),
    "score-without-s": (A100, "float16", {"seq": (150, 170), "score": "without_s"},
        {"score": without_s, "window": (50, 9)}),
    "blocks-dropout": (
        A100, "float16", {"seq": (190, 300), "heads": (4, 2), "given": ("seed",), "dlse": 1.0},
        {"blocks": ((64, 64),), "causal": True, "dropout": 0.2},
    ),
    "blocks-dropout-and-more": (
        A100, "bfloat16", {"seq": (150, 130), "heads": (2, 1), "dims": (128, 96), "given": (*SCORES, "seed"),
            "full": "qk"},
        {"blocks": ((16, 48), "b"), "window": (50, 9), "dropout": 0.6, "deterministic": True},
    ),
    # Float32, as two float16 a number.
    "float32": (A100, "float32", {"dims": (64, 48), "dlse": 1.0}, {}),
    "float32-odd": (A100, "float32", {"dims": (33, 47), "heads": (2, 2)}, {"causal": True}),
    "float32-group": (A100, "float32", {"heads": (4, 2), "seq": (150, 212)}, {"causal": True, "deterministic": True}),
    "float32-window": (
        A100, "float32", {"seq": (200, 230), "dims": (128, 128), "batch": 1}, {"window": (17, 4), "scale": -0.3},
    ),
    "float32-wide": (A100, "float32", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1},
        {"causal": True}),
    "float32-on-little-memory": (
        A10, "float32", {"seq": (130, 140), "dims": (128, 100), "key_mask": True}, {"deterministic": True},
    ),
    "float32-narrow-tiles": (A10, "float32", {"seq": (60, 70), "dims": (190, 170), "batch": 1}, {}),
    "float32-scores": (
        A100, "float32", {"seq": (100, 150), "heads": (4, 2), "given": (*SCORES, "seed")},
        {"softcap": 2.0, "causal": True, "dropout": 0.2},
    ),
    "float32-bias": (
        A100, "float32", {"seq": (90, 150), "dims": (32, 32), "given": ("bias",), "key_mask": True, "dlse": 1.0}, {},
    ),
    "float32-bias-padded": (
        H200, "float32", {"seq": (70, 140), "dims": (40, 33), "heads": (2, 1), "batch": 1, "given": ("bias",)}, {},
    ),
    "float32-blocks": (
        A100, "float32", {"seq": (190, 300), "heads": (4, 2), "dims": (32, 128)},
        {"blocks": ((64, 64),), "deterministic": True},
    ),
    "float32-score": (
        A100, "float32", {"heads": (4, 2), "seq": (290, 200), "score": "relative", "given": ("alibi_slopes",)},
        {"score": relative, "causal": True},
    ),
    "near-cap": (A100, "float16", {"seq": (200, 300), "heads": (4, 2)}, {"softcap": 7.0, "causal": True}),
    "bias-without-columns": (A100, "float16", {"seq": (100, 150), "dims": (0, 64), "given": ("bias",)},
        {"causal": True}),
    "double": (H200, "float64", {"dims": (64, 48), "heads": (4, 2), "seq": (150, 212), "dlse": 1.0}, {}),
    "double-group": (A100, "float64", {"heads": (4, 2), "seq": (100, 150), "dims": (32, 32)},
        {"causal": True, "deterministic": True}),
    "double-128": (H200, "float64", {"seq": (100, 230), "dims": (128, 128), "batch": 1},
        {"window": (17, 4), "scale": -0.3}),
    "double-key-mask": (
        A100, "float64", {"seq": (70, 150), "key_mask": True, "dims": (59, 111)},
        {"causal": "top_left", "rows_aligned": False},
    ),
    "double-192": (H200, "float64", {"seq": (70, 100), "dims": (192, 128), "heads": (2, 1)},
        {"causal": True, "deterministic": True}),
    "double-wide": (H200, "float64", {"seq": (70, 90), "dims": (256, 200), "heads": (2, 1), "batch": 1},
        {"window": (50, None)}),
    "double-scores": (
        H200, "float64", {"seq": (100, 150), "heads": (4, 2), "given": (*SCORES, "seed"), "key_mask": True},
        {"softcap": 2.0, "causal": True, "dropout": 0.2},
    ),
    "double-dropout": (A100, "float64", {"seq": (70, 100), "dims": (192, 160), "given": ("seed",), "dlse": 1.0},
        {"dropout": 0.6}),
    "double-blocks": (
        H200, "float64", {"seq": (150, 130), "heads": (2, 1), "dims": (128, 96), "given": SCORES, "full": "qk"},
        {"blocks": ((16, 48), "b"), "window": (50, 9), "deterministic": True},
    ),
    "double-score": (A100, "float64", {"seq": (150, 170), "score": "documents"}, {"score": documents, "scale": -0.3}),
    "double-other-tiles": (H200, "float64", {"seq": (100, 90)}, {"tiles": ((64, 32, 8, 2, 2, 1),
        (32, 32, 4, 2, 2, 1))}),
    "no-columns": (A100, "float16", {"seq": (5, 1), "dims": (0, 16)}, {}),
}  # fmt: skip


@cases(
    CASES, "plain", "group", "window", "key-mask", "unseen", "in-order", "scores", "dropout", "blocks-and-more",
    "float32", "float32-bias",
    "double",
)  # fmt: skip
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    arch, *rest = CASES[case]
    check("sm80", arch, rng, *rest)


def multiplied(**by: Any) -> Any:
    """Inputs that are so many times as large."""
    return lambda x: x._replace(**{name: (getattr(x, name) * y).astype(x.q.dtype) for name, y in by.items()})


def one_row(size: float, *names: str) -> Any:
    """Inputs with one row that is so much larger."""
    return multiplied(**dict.fromkeys(names, np.where(np.arange(90) == 7, size, 1)[None, :, None, None]))


def infinite(inputs: Any) -> Any:
    """A key whose product with every query is -inf: no query sees it."""
    inputs.k[:, 5, :, 3] = -np.inf
    np.abs(inputs.q[..., 3], out=inputs.q[..., 3])
    return inputs


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_nan_beside_a_sink(family: str, name: str, rng: np.random.Generator) -> None:
    """It is no row without keys, of which lse is the sink."""

    def one(inputs: Any) -> Any:
        getattr(inputs, name)[1, 5, 0, 3] = np.nan
        return inputs

    check(family, A100, rng, "float16", {"seq": (52, 17), "heads": (2, 1), "given": ("sinks",)}, {}, change=one)


def test_a_sink_for_all_heads(rng: np.random.Generator) -> None:
    def one(inputs: Any) -> Any:
        inputs.given["sinks"] = inputs.given["sinks"][:1].copy()
        return inputs

    check("sm80", A100, rng, "float16", {"seq": (70, 90), "heads": (4, 2), "given": ("sinks",)}, {}, change=one)


@pytest.mark.parametrize("share", [0.8, 1.2])
def test_a_sink_beside_very_large_logits(share: float, rng: np.random.Generator) -> None:
    """One key takes what the sink leaves, or nothing."""
    scale = 1.9 / np.log2(np.e)  # far from a power of two

    def large(inputs: Any) -> Any:
        inputs.q[...], inputs.k[...] = 0, 0
        inputs.q[..., 0], inputs.k[:, 7, :, 0] = 2.0**15, 2.0**15
        inputs.given["sinks"][...] = share * scale * 2.0**30
        return inputs

    check("sm80", A100, rng, "float32", {"given": ("sinks",)}, {"scale": scale}, change=large, own_times=4)


def test_one_large_product_among_small_ones(rng: np.random.Generator) -> None:
    """Wherever it stands among eight columns, and these among others, a soft cap is no polynomial there."""

    def spiky(inputs: Any) -> Any:
        inputs.k[...] *= 0.05
        inputs.k[0, [*range(0, 96, 9)]] *= 1000
        inputs.k[1, [8, 77]] *= 1000
        return inputs

    check("sm80", A100, rng, "float16", {"seq": (70, 96), "dims": (64, 48)}, {"softcap": 7.0}, change=spiky)


def test_what_is_rounded_of_huge_products_does_not_show(rng: np.random.Generator) -> None:
    """Neither scale nor product is a power of two: their product has more bits than a float32."""

    def huge(inputs: Any) -> Any:
        inputs.q[...], inputs.k[...] = 0, 0
        inputs.q[..., 0], inputs.k[:, 7, :, 0] = 2.0**15 + 2.0**5, 2.0**15 + 2.0**5
        return inputs

    shapes, options = {"dims": (64, 48), "dlse": 1.0}, {"scale": 1.9 / np.log2(np.e)}
    check("sm80", A100, rng, "float16", shapes, options, change=huge, own_times=40, backward=False)


SIZES: dict[str, tuple[Any, float | None]] = {  # the change of the inputs, and the scale
    "tiny": (multiplied(q=1e-15, k=1e-15, v=1e-30), 1e29),
    "huge": (multiplied(q=1e15, k=1e14, v=1e30, dout=1e-30), 1e-30),
    "tiny-gradient": (multiplied(dout=1e-30), None),
    "large-logits": (multiplied(q=50), None),
    "rows-apart": (one_row(2.0**24, "v", "dout"), None),
    "a-large-key": (one_row(2.0**7, "k"), None),
    "infinite": (infinite, None),
}


@pytest.mark.parametrize("size", SIZES)
def test_float32_of_all_sizes(size: str, rng: np.random.Generator) -> None:
    """Each tile has a power of two of its own, and what is small beside the largest of it keeps its bits.

    The largest error is of one or two rows: by luck it is a few times that of own precision, with plain float32, too.
    """
    change, scale = SIZES[size]
    shapes = {"seq": (90, 90), "batch": 1, "dims": (64, 80)}
    check("sm80", A100, rng, "float32", shapes, {"scale": scale}, change=change, own_times=4)


@pytest.mark.parametrize("dtype, unit", [("float32", 2.0**26), ("float64", 1)])
def test_a_row_of_which_one_key_takes_all(dtype: str, unit: float, rng: np.random.Generator) -> None:
    """Its dP - delta is 0 to the bit, however large its dO is: dQ and dK are that times what is large.

    Else they would be off by some 2^45 eps. In float32 dV keeps 22 bits of that dO.
    """

    def change(inputs: Any) -> Any:
        inputs = one_row(2.0**30, "dout")(one_row(64, "q", "v")(inputs))
        inputs.k[:, 7] = inputs.q[:, 7]
        inputs.dout[:, np.arange(90) != 7] = 0
        return inputs

    shapes = {"seq": (90, 90), "batch": 1, "dims": (64, 80)}
    check("sm80", H200, rng, dtype, shapes, {}, unit, change, own_times=4)


# The keys of a query tile in shares: so many, the problem.
KEYS_SHARED: dict[str, tuple[int, tuple[Arch, str, dict[str, Any], dict[str, Any]]]] = {
    "plain": (3, (A100, "float16", {"seq": (70, 500), "dims": (64, 48)}, {})),
    "causal": (2, (A100, "bfloat16", {"seq": (150, 212), "heads": (4, 2), "dlse": 1.0}, {"causal": True})),
    "more-than-tiles": (7, (A100, "float16", {"seq": (100, 330), "dims": (128, 90), "batch": 1},
        {"causal": True, "rows_aligned": False})),
    "unseen": (3, (A100, "float32", {"seq": (400, 300), "heads": (2, 1), "batch": 1, "given": ("sinks",)},
        {"causal": True})),
    "float32": (4, (A10, "float32", {"seq": (100, 300), "dims": (64, 59), "batch": 1, "key_mask": True},
        {"window": (150, 9)})),
    "float64": (3, (H200, "float64",
        {"seq": (70, 200), "dims": (64, 47), "heads": (2, 1), "given": ("sinks", "bias", "seed")},
        {"causal": True, "dropout": 0.3})),
    "wide": (3, (A100, "float16", {"seq": (70, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1},
        {"softcap": 2.0})),
    "blocks": (2, (A100, "bfloat16", {"seq": (150, 430), "heads": (2, 1), "given": (*SCORES, "seed")},
        {"blocks": ((64, 64),), "dropout": 0.2})),
}  # fmt: skip


@cases(KEYS_SHARED, "plain", "float32", "float64")
def test_thread_blocks_share_keys(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of which a tile sees all, some or none; more than there are key tiles."""
    many, (arch, *problem) = KEYS_SHARED[case]
    monkeypatch.setattr(shares, "shares", lambda *_: shares.Dealt(many, 0))
    check("sm80", arch, rng, *problem)
