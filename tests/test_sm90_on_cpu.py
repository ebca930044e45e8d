"""The kernels for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import on_cpu
import pytest
from cuda_on_cpu import cases, needs_compiler
from on_cpu import check
from score_functions import documents, grid, relative, without_s
from semantics import Blocks, Inputs

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward, sm90_backward_cost, sm90_forward, sm90_forward_cost
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.passes import FORWARD

pytestmark = needs_compiler

# With so few multiprocessors two blocks (two clusters where the backward is wide) take tile after tile. With more,
# several share what a tile of a gradient of a bias sums.
GPU, WIDE, MANY = (Arch("sm_90a", 90, sms, 232448) for sms in (2, 4, 13))

SCORES = ("mask", "bias", "alibi_slopes", "sinks")
# (dtype, shapes, options) as `check` takes them. Lengths are such that tiles end at, and just beyond, a mask's edge.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("float16", {"dims": (64, 43), "seq": (300, 300), "dlse": 1.0}, {}),
    "large": ("float16", {"seq": (200, 500), "batch": 1}, {"scale": 3.0}),  # maxima grow from tile to tile
    "large-128": ("bfloat16", {"seq": (200, 500), "dims": (128, 128), "batch": 1}, {"scale": 3.0}),
    "group": ("bfloat16", {"heads": (4, 2), "seq": (300, 362)}, {"causal": True}),
    "group-in-order": ("float16", {"heads": (3, 1), "seq": (300, 300), "dims": (128, 128), "batch": 1},
        {"causal": True, "deterministic": True}),
    "group-256": ("float16", {"heads": (3, 1), "seq": (200, 300), "dims": (256, 200), "batch": 1}, {"causal": True}),
    "group-192": ("bfloat16", {"heads": (3, 1), "seq": (300, 200), "dims": (192, 192), "batch": 1},
        {"causal": "top_left"}),
    "128": ("float16", {"seq": (400, 430), "dims": (128, 100), "batch": 1}, {"causal": True}),
    "window": ("float16", {"seq": (200, 430), "dims": (128, 128), "batch": 1}, {"window": (17, 140), "scale": -0.3}),
    "left": (
        "float16", {"seq": (200, 266), "dims": (90, 96), "batch": 1}, {"window": (0, None), "deterministic": True},
    ),
    "key-mask": (  # which leaves some queries no key
        "bfloat16", {"seq": (130, 400), "key_mask": True, "dims": (59, 111), "given": ("sinks",), "dlse": 1.0},
        {"causal": "top_left", "rows_aligned": False},
    ),
    "in-order": ("float16", {"heads": (4, 2), "seq": (150, 633), "batch": 1}, {"deterministic": True}),
    "in-order-causal": ("float16", {"seq": (400, 433), "batch": 1}, {"causal": True, "deterministic": True}),
    "192": ("float16", {"seq": (170, 250), "dims": (192, 128), "key_mask": True}, {"window": (50, 50)}),
    "192-192": ("bfloat16", {"seq": (170, 250), "dims": (192, 180), "key_mask": True}, {"window": (50, 50)}),
    # Sums of O, dK and dV along as many columns as there are, in sixteens.
    "80": ("bfloat16", {"seq": (300, 362), "dims": (77, 72), "heads": (2, 1), "batch": 1, "dlse": 1.0}, {}),
    "80-scores": ("float16", {"seq": (200, 250), "dims": (80, 80), "batch": 1, "given": SCORES},
        {"softcap": 2.0, "causal": True}),
    "80-of-few-queries": ("bfloat16", {"seq": (3, 900), "dims": (80, 80), "heads": (8, 1)}, {}),
    "112": ("float16", {"seq": (130, 300), "dims": (112, 100), "key_mask": True},
        {"window": (50, 50), "deterministic": True}),
    "112-unaligned": ("bfloat16", {"seq": (130, 96), "dims": (109, 105)}, {"rows_aligned": False}),
    "144": ("bfloat16", {"seq": (130, 300), "dims": (144, 130), "heads": (12, 2), "batch": 1}, {"causal": True}),
    "208": ("float16", {"seq": (130, 300), "dims": (208, 200), "batch": 1, "given": ("bias",)}, {"causal": True}),
    "240-unaligned": ("float16", {"seq": (130, 200), "dims": (240, 233), "batch": 1}, {"rows_aligned": False}),
    # 48 queries by 128 keys, whose third block of columns of dQ two warpgroups share out by rows.
    "160": ("float16", {"seq": (300, 362), "dims": (160, 149), "heads": (4, 2), "batch": 1, "dlse": 1.0},
        {"causal": True}),
    "160-in-order": ("bfloat16", {"seq": (150, 433), "dims": (140, 160), "key_mask": True, "batch": 1},
        {"deterministic": True}),
    "160-unaligned": ("bfloat16", {"seq": (100, 150), "dims": (153, 133), "batch": 1}, {"rows_aligned": False}),
    "160-window": ("float16", {"heads": (4, 2), "seq": (150, 1210), "dims": (136, 100), "batch": 6},
        {"window": (150, 0)}),
    "160-blocks": ("bfloat16", {"seq": (170, 350), "dims": (160, 144), "batch": 1, "key_mask": True},
        {"blocks": ((48, 96), "h"), "causal": True}),
    "128-192": ("float16", {"seq": (200, 300), "dims": (120, 192), "batch": 1}, {}),
    # Rows that begin at no multiple of 16 bytes, where they leave through a strip of shared memory, and where there is
    # none.
    "192-odd": ("bfloat16", {"seq": (300, 250), "dims": (192, 99), "batch": 1},
        {"causal": True, "rows_aligned": False}),
    "256-odd": ("float16", {"seq": (300, 250), "dims": (256, 199), "heads": (1, 1), "batch": 1},
        {"rows_aligned": False}),
    "wide": (
        "float16", {"seq": (170, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1, "dlse": 1.0}, {"causal": True},
    ),
    "wide-in-order": (
        "bfloat16", {"seq": (130, 700), "dims": (201, 256), "heads": (1, 1), "batch": 1},
        {"deterministic": True, "rows_aligned": False},
    ),
    "wide-key-mask": (
        "float16", {"seq": (170, 250), "dims": (256, 200), "heads": (2, 1), "key_mask": True}, {"causal": "top_left"},
    ),
    "in-turn": ("float16", {"heads": (4, 4), "seq": (70, 140), "batch": 6}, {}),  # more heads than sums of dQ have room
    # In windows the first key tile that adds to a tile of dQ stores; heads take the place of others; some queries see
    # nothing.
    "in-turn-window": ("float16", {"heads": (4, 2), "seq": (150, 1210), "batch": 6}, {"window": (150, 0)}),
    "unseen-window": (
        "bfloat16", {"heads": (3, 3), "seq": (960, 800), "dims": (128, 128), "batch": 4, "given": ("seed",)},
        {"window": (80, 20), "dropout": 0.1},
    ),
    # A key tile has all keys
    "whole": ("float16", {"seq": (300, 77), "heads": (4, 2), "dims": (40, 64), "dlse": 1.0}, {}),
    "whole-unaligned": ("bfloat16", {"seq": (130, 128), "dims": (59, 64), "batch": 1}, {"rows_aligned": False}),
    "whole-128": (
        "bfloat16", {"seq": (200, 128), "dims": (128, 90), "heads": (2, 2), "batch": 1, "given": SCORES},
        {"softcap": 2.0, "scale": -0.3},
    ),
    "whole-96": ("float16", {"seq": (150, 100), "dims": (90, 96), "batch": 1},
        {"rows_aligned": False, "deterministic": True}),
    "whole-unseen": (  # of some query tiles no query sees a key
        "float16", {"seq": (500, 90), "heads": (2, 1), "key_mask": True}, {"causal": True},
    ),
    "whole-window": ("bfloat16", {"seq": (400, 120), "dims": (128, 128), "batch": 1}, {"window": (20, 9)}),
    # The same of wide heads, whose columns three warpgroups share out.
    "whole-192": ("float16", {"seq": (150, 84), "dims": (192, 190), "heads": (4, 2), "dlse": 1.0}, {"causal": True}),
    "whole-160-128": ("float16", {"seq": (150, 120), "dims": (160, 150), "heads": (4, 2), "dlse": 1.0},
        {"causal": True}),
    # And of a cluster, whose blocks have keys of their own, or columns: dQ leaves from registers.
    "whole-256": ("float16", {"seq": (150, 100), "dims": (256, 200), "heads": (4, 2), "batch": 1, "dlse": 1.0},
        {"causal": True}),
    "whole-176-scores": ("bfloat16", {"seq": (130, 100), "dims": (176, 160), "heads": (2, 1), "batch": 1,
        "given": SCORES, "key_mask": True}, {"softcap": 2.0, "causal": True}),
    "whole-256-unaligned": ("bfloat16", {"seq": (130, 128), "dims": (201, 256), "batch": 1}, {"rows_aligned": False}),
    "whole-256-scores": ("float16", {"seq": (200, 60), "dims": (256, 256), "heads": (2, 1), "batch": 1,
        "given": ("alibi_slopes", "sinks"), "key_mask": True},
        {"softcap": 2.0, "window": (20, 9), "deterministic": True}),
    # Of three blocks of columns, or one, a consumer has none.
    "whole-384": ("float16", {"seq": (90, 60), "dims": (384, 345), "heads": (2, 1), "batch": 1}, {}),
    "whole-100-400": ("bfloat16", {"seq": (90, 60), "dims": (100, 400), "batch": 1}, {"rows_aligned": False}),
    "whole-512": ("bfloat16", {"seq": (90, 60), "dims": (512, 400), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "whole-192-128": ("bfloat16", {"seq": (130, 128), "dims": (190, 128), "batch": 1}, {"rows_aligned": False}),
    "whole-160": ("bfloat16", {"seq": (130, 96), "dims": (149, 160), "batch": 1}, {"rows_aligned": False}),
    "whole-144": (
        "float16", {"seq": (300, 90), "dims": (144, 130), "heads": (2, 1), "given": SCORES, "key_mask": True},
        {"softcap": 2.0, "window": (20, 9), "deterministic": True},
    ),
    "few-queries": ("float16", {"seq": (5, 400), "heads": (12, 2)}, {"causal": True}),
    # Of heads that share a tile the last ones are none; and heads of results begin at 8 bytes, their rows at 16.
    "few-queries-sinks": (
        "float16", {"seq": (5, 200), "heads": (12, 2), "given": ("sinks", "alibi_slopes")},
        {"causal": True, "rows_aligned": False, "apart": 4},
    ),
    "softcap": ("bfloat16", {"seq": (100, 250), "batch": 1}, {"softcap": 1.5, "scale": -0.3}),
    # Some warps' products are all near 0 beside the cap, others' are not.
    "near-cap": ("bfloat16", {"seq": (200, 300), "batch": 1}, {"softcap": 7.0, "causal": True}),
    "near-cap-128": ("float16", {"seq": (200, 250), "dims": (128, 128), "batch": 1}, {"softcap": 7.0, "scale": -0.09}),
    "near-cap-wide": ("float16", {"seq": (130, 250), "dims": (256, 200), "batch": 1},
        {"softcap": 7.5, "window": (90, 60)}),
    "bias": ("float16", {"seq": (200, 250), "batch": 1, "given": ("bias",), "full": "hqk"}, {}),
    "bias-float32": (
        "bfloat16", {"seq": (200, 250), "dims": (128, 128), "batch": 2, "given": ("bias", "mask"), "full": "bqk",
            "bias": "float32"},
        {"causal": True},
    ),
    "bias-of-keys": ("float16", {"seq": (200, 266), "given": ("bias", "mask"), "full": "bk"}, {}),
    "bias-wide": ("float16", {"seq": (70, 150), "dims": (192, 128), "batch": 1, "given": ("bias",), "bias": "float32"},
        {}),
    "48-keys": (  # as with a mask and a float32 bias beside 256 columns, of which the backward has no room
        "float16", {"seq": (150, 200), "dims": (128, 100), "batch": 1, "given": ("bias", "mask"), "bias": "float32"},
        {"tiles": ((2, 48, 2, 1), None), "causal": True},
    ),
    "48-keys-window": (  # of a tile's six, the last two are the first warpgroup's alone, the first two the second one's
        "bfloat16", {"seq": (256, 256), "dims": (128, 100), "heads": (1, 1), "batch": 1, "given": ("bias", "mask"),
            "bias": "float32"},
        {"tiles": ((2, 48, 2, 1), None), "window": (96, 0)},
    ),
    "bias-summed": (
        "bfloat16", {"seq": (200, 264), "heads": (4, 2), "batch": 3, "given": ("bias", "sinks"), "full": "hqk",
            "key_mask": True, "dlse": 1.0},
        {"softcap": 2.0, "scale": -0.3},
    ),
    "bias-parts": ("float16", {"seq": (130, 143), "dims": (90, 128), "batch": 5, "given": ("bias",), "full": "qk"}, {}),
    "bias-parts-window": (
        "bfloat16", {"seq": (200, 200), "dims": (32, 40), "heads": (4, 2), "given": ("bias", "mask"), "full": "qk",
            "bias": "float32"},
        {"window": (20, 9), "deterministic": True},
    ),
    "bias-unseen": (  # of whole tiles no query sees a key
        "float16", {"seq": (200, 700), "batch": 1, "given": ("bias", "sinks")}, {"causal": "top_left"},
    ),
    "slopes-parts": (
        "bfloat16", {"seq": (200, 300), "heads": (4, 2), "dims": (64, 128), "given": ("alibi_slopes",)},
        {"causal": True},
    ),
    "bias-wider": ("float16", {"seq": (70, 150), "dims": (250, 192), "heads": (2, 1), "given": ("bias",)},
        {"causal": True}),
    "scores": ("float16", {"seq": (200, 250), "heads": (4, 2), "batch": 1, "given": SCORES},
        {"softcap": 2.0, "causal": True}),
    "scores-128": ("bfloat16", {"seq": (200, 250), "dims": (128, 128), "batch": 1, "given": SCORES},
        {"window": (50, 9)}),
    "scores-wide": ("float16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1, "given": SCORES[1:]},
        {"deterministic": True}),
    "scores-of-few-queries": ("float16", {"seq": (5, 200), "heads": (12, 2), "given": SCORES},
        {"softcap": 2.0, "causal": True}),
    "dropout": (
        "bfloat16", {"seq": (300, 362), "heads": (4, 2), "given": ("seed",), "dlse": 1.0},
        {"dropout": 0.2, "rows_aligned": False, "apart": 4},
    ),
    "dropout-128": ("float16", {"seq": (200, 430), "dims": (128, 128), "batch": 1, "given": ("seed",)},
        {"causal": True, "dropout": 0.6}),
    "dropout-wide": ("float16", {"seq": (170, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1,
        "given": (*SCORES[1:], "seed")}, {"window": (50, 9), "dropout": 0.2}),
    "dropout-of-few-queries": ("float16", {"seq": (5, 200), "heads": (12, 2), "given": ("seed",)}, {"dropout": 0.2}),
    "blocks": ("float16", {"seq": (400, 500), "heads": (4, 2), "batch": 2}, {"blocks": ((128, 128),)}),
    "blocks-causal": (
        "bfloat16", {"seq": (300, 430), "heads": (2, 1), "dims": (128, 100), "batch": 2},
        {"blocks": ((48, 96), "b"), "causal": True, "deterministic": True},
    ),
    "blocks-and-more": (
        "float16", {"seq": (200, 250), "heads": (4, 2), "dims": (128, 128), "batch": 1, "given": SCORES,
            "key_mask": True},
        {"blocks": ((64, 64), "h"), "window": (90, 40)},
    ),
    "blocks-192": ("float16", {"seq": (170, 350), "dims": (192, 128), "batch": 1}, {"blocks": ((64, 112), "")}),
    "blocks-wide": (
        "float16", {"seq": (200, 450), "dims": (256, 200), "heads": (2, 1), "batch": 1}, {"blocks": ((64, 64),)},
    ),
    "blocks-wide-in-order": (
        "bfloat16", {"seq": (200, 450), "dims": (201, 256), "heads": (2, 1), "batch": 1},
        {"blocks": ((64, 128),), "deterministic": True},
    ),
    "blocks-bias-summed": (  # over heads and entries of the batch whose blocks are others
        "bfloat16", {"seq": (200, 264), "heads": (4, 2), "batch": 3, "given": ("bias", "sinks"), "full": "qk"},
        {"blocks": ((48, 96), "bh"), "softcap": 2.0},
    ),
    "blocks-dropout": (
        "float16", {"seq": (300, 430), "heads": (4, 2), "given": ("seed",), "dlse": 1.0},
        {"blocks": ((64, 128),), "causal": True, "dropout": 0.2},
    ),
    "blocks-dropout-and-more": (
        "bfloat16",
        {"seq": (200, 250), "heads": (4, 2), "dims": (128, 128), "batch": 1, "given": (*SCORES, "seed"),
            "key_mask": True},
        {"blocks": ((64, 64), "h"), "window": (90, 40), "dropout": 0.3, "softcap": 2.0, "deterministic": True},
    ),
    "blocks-dropout-wide": (
        "float16", {"seq": (200, 450), "dims": (256, 200), "heads": (2, 1), "batch": 1, "given": ("bias", "seed")},
        {"blocks": ((64, 64),), "dropout": 0.4},
    ),
    "dropout-bias": (
        "bfloat16", {"seq": (200, 264), "heads": (4, 2), "given": ("bias", "sinks", "seed"), "full": "hqk",
            "dlse": 1.0},
        {"causal": True, "dropout": 0.2},
    ),
    "dropout-bias-parts": (
        "float16", {"seq": (130, 143), "dims": (90, 128), "batch": 5, "given": ("bias", "mask", "seed"), "full": "k"},
        {"dropout": 0.6, "softcap": 2.0, "scale": -0.3},
    ),
    "dropout-slopes-parts": (
        "float16", {"seq": (200, 300), "heads": (4, 2), "given": ("alibi_slopes", "seed")},
        {"window": (150, 9), "dropout": 0.2},
    ),
    "short": ("float16", {"seq": (49, 49), "dims": (32, 32), "heads": (4, 4)}, {}),  # with one warpgroup that computes
    "short-many": ("bfloat16", {"seq": (64, 49), "dims": (64, 48), "heads": (6, 3), "batch": 5, "dlse": 1.0},
        {"deterministic": True}),
    "short-scores": (
        "float16", {"seq": (50, 63), "dims": (59, 64), "heads": (4, 2), "batch": 3, "given": SCORES, "key_mask": True},
        {"softcap": 2.0, "causal": True, "rows_aligned": False},
    ),
    "short-bias": (
        "bfloat16", {"seq": (49, 49), "dims": (32, 32), "heads": (4, 4), "batch": 3, "given": ("bias", "seed"),
            "full": "hqk", "bias": "float32"},
        {"dropout": 0.2},
    ),
    "short-blocks": ("float16", {"seq": (64, 60), "heads": (4, 2), "batch": 2},
        {"blocks": ((16, 32), "bh"), "window": (20, 9)}),
    "short-unseen": ("float16", {"seq": (40, 60), "heads": (4, 2)}, {"causal": "top_left"}),
    "short-causal": ("bfloat16", {"seq": (63, 200), "dims": (128, 96), "heads": (4, 4), "key_mask": True},
        {"causal": True}),
    "short-window": ("float16", {"seq": (50, 330), "heads": (4, 4), "given": ("bias",)}, {"window": (150, 9)}),
    "score": ("float16", {"heads": (4, 2), "seq": (290, 400), "score": "relative"},
        {"score": relative, "causal": True}),
    "score-128": (
        "float16", {"seq": (200, 250), "dims": (128, 128), "batch": 1, "score": "documents", "given": ("bias",)},
        {"score": documents, "scale": -0.3, "deterministic": True},
    ),
    "score-wide": (
        "bfloat16", {"seq": (70, 150), "dims": (256, 200), "heads": (2, 1), "batch": 1, "score": "without_s"},
        {"score": without_s},
    ),
    "score-of-few-queries": ("bfloat16", {"seq": (5, 200), "heads": (12, 2), "score": "grid"},
        {"score": grid, "causal": True}),
    # Head dimensions up to 32: tiles of four warpgroups, of two in each of two thread blocks, of three.
    "32": ("float16", {"seq": (230, 300), "dims": (32, 32), "batch": 1, "dlse": 1.0}, {}),
    "32-large": ("bfloat16", {"seq": (100, 500), "dims": (32, 32), "batch": 1}, {"scale": 3.0}),
    "32-causal": ("bfloat16", {"seq": (300, 362), "dims": (32, 24), "heads": (4, 2)}, {"causal": True}),
    "32-bias": (  # an Evoformer's
        "bfloat16", {"seq": (256, 256), "dims": (32, 32), "heads": (2, 2), "batch": 3, "given": ("bias",),
            "full": "hqk", "key_mask": True},
        {},
    ),
    "32-bias-float32": (
        "float16", {"seq": (120, 330), "dims": (20, 32), "heads": (4, 2), "batch": 2, "given": ("bias", "mask"),
            "full": "bqk", "bias": "float32"},
        {"window": (150, 9), "rows_aligned": False},
    ),
    "32-scores": (
        "float16", {"seq": (200, 250), "dims": (32, 27), "heads": (4, 2), "batch": 1, "given": (*SCORES, "seed"),
            "key_mask": True},
        {"softcap": 2.0, "causal": True, "dropout": 0.2},
    ),
    "32-of-few-queries": ("float16", {"seq": (5, 400), "dims": (32, 32), "heads": (12, 2)}, {"causal": True}),
    "32-blocks": ("float16", {"seq": (300, 330), "dims": (32, 32), "heads": (4, 2), "given": ("bias",)},
        {"blocks": ((64, 128),)}),
    "few-keys": ("bfloat16", {"seq": (400, 77), "dims": (40, 64), "key_mask": True}, {}),
    "few-keys-64": ("float16", {"seq": (250, 50), "heads": (4, 2)}, {}),
    "few-keys-96": ("bfloat16", {"seq": (400, 90), "batch": 1}, {}),
    "few-keys-128": ("float16", {"seq": (250, 60), "dims": (128, 128), "batch": 1}, {"rows_aligned": False}),
    "few-keys-80-128": ("bfloat16", {"seq": (250, 80), "dims": (90, 128), "batch": 1}, {"scale": 3.0}),
    "few-keys-160": ("bfloat16", {"seq": (150, 77), "dims": (160, 160), "batch": 1}, {}),
    "wider": ("bfloat16", {"seq": (400, 330), "dims": (72, 96), "key_mask": True, "batch": 1}, {}),
    "in-three": ("float16", {"seq": (150, 200), "key_mask": True}, {"tiles": ((1, 64, 3, 3), None), "causal": True}),
    "of-256": ("bfloat16", {"seq": (300, 350), "batch": 1}, {"tiles": ((4, 64, 3, 1), None), "window": (90, 20)}),
    "32-in-four": ("bfloat16", {"seq": (150, 200), "dims": (32, 16)}, {"tiles": ((1, 64, 2, 4), None), "causal": True}),
    "32-in-order": ("float16", {"heads": (4, 2), "seq": (150, 433), "dims": (32, 32), "batch": 1},
        {"deterministic": True}),
    "one-query-bias": (
        "float16", {"seq": (1, 300), "heads": (6, 2), "given": ("bias", "seed"), "full": "k"}, {"dropout": 0.2},
    ),
    "one-query": ("bfloat16", {"seq": (1, 300), "heads": (6, 2), "dims": (128, 128)}, {}),
}  # fmt: skip


@cases(
    CASES, "plain", "group", "window", "key-mask", "in-order", "wide", "whole-unseen", "scores", "few-queries",
    "short-many",
    "bias-summed", "dropout", "blocks-and-more", "score", "few-queries-sinks", "one-query-bias",
)  # fmt: skip
def test_on_cpu(case: str, rng: np.random.Generator) -> None:
    def of_keys(inputs: Inputs) -> Inputs:
        """A bias that has no axis but that of keys."""
        if case == "one-query-bias":
            inputs.given["bias"] = inputs.given["bias"].reshape(-1)
        return inputs

    check("sm90", WIDE if "wide" in case else MANY if "parts" in case else GPU, rng, *CASES[case], change=of_keys)


@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_query_tiles_without_keys(
    deterministic: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their dQ is 0, also while key tiles add to what lies in its place for another head."""

    def first_head_alone(rng: np.random.Generator, shape: tuple[int, ...], *_: Any) -> Blocks:
        seen = np.zeros(shape, bool)
        seen[:, 0] = True
        return Blocks(seen, (64, 64))

    monkeypatch.setattr(on_cpu, "draw_blocks", first_head_alone)
    shapes = {"seq": (150, 1000), "heads": (40, 40), "batch": 1}
    check("sm90", GPU, rng, "float16", shapes, {"blocks": ((64, 64),), "deterministic": deterministic})


# The query tiles of a head of K and V in three shares.
LARGE = Arch("sm_90a", 90, 6, 232448)
SHARED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "group": ("bfloat16", {"heads": (3, 1), "seq": (400, 430), "batch": 1, "dlse": 1.0}, {"causal": True}),
    "in-order": (
        "bfloat16", {"heads": (3, 1), "seq": (400, 430), "batch": 1}, {"causal": True, "deterministic": True},
    ),
    "uneven": ("float16", {"heads": (4, 1), "seq": (330, 300), "batch": 2, "key_mask": True}, {"window": (40, 0)}),
    "unseen": ("float16", {"heads": (2, 1), "seq": (900, 200), "batch": 12}, {"causal": True}),  # by some query tiles
    "32": ("bfloat16", {"heads": (3, 1), "seq": (400, 430), "dims": (24, 32), "batch": 1, "dlse": 1.0},
        {"causal": True}),
    "cross": ("float16", {"seq": (300, 77), "dims": (128, 100), "heads": (2, 2), "batch": 1, "key_mask": True}, {}),
    "short": ("bfloat16", {"seq": (49, 60), "heads": (7, 1), "dims": (32, 64), "batch": 2}, {"causal": True}),
    "192": ("float16", {"seq": (330, 180), "dims": (192, 128), "heads": (2, 1), "batch": 1}, {"window": (150, 50)}),
    "wide": ("float16", {"seq": (260, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1}, {"causal": True}),
    "wide-in-order": (
        "bfloat16", {"seq": (200, 250), "dims": (201, 256), "heads": (2, 1), "batch": 1},
        {"causal": True, "deterministic": True, "rows_aligned": False},
    ),
    "dropout": (
        "float16", {"heads": (3, 1), "seq": (400, 430), "batch": 1, "given": ("seed",), "dlse": 1.0},
        {"causal": True, "dropout": 0.2},
    ),
    "dropout-and-more": (
        "bfloat16", {"heads": (3, 1), "seq": (400, 430), "dims": (128, 100), "batch": 1, "given": (*SCORES, "seed")},
        {"causal": True, "dropout": 0.3, "softcap": 2.0, "deterministic": True},
    ),
    "dropout-wide": (
        "float16", {"seq": (260, 250), "dims": (256, 200), "heads": (2, 1), "batch": 1, "given": ("bias", "seed")},
        {"causal": True, "dropout": 0.3},
    ),
}  # fmt: skip


@cases(SHARED, "group", "wide")
def test_thread_blocks_share_key_tiles(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that end amid a head, or where a head does."""
    seen: list[KernelPlan] = []
    make = sm90_backward.plan
    monkeypatch.setattr(sm90_backward, "plan", lambda *args: seen.append(make(*args)) or seen[-1])
    monkeypatch.setattr(sm90_backward_cost, "shares", lambda *_: sm90_backward_cost.Dealt(3))
    monkeypatch.setattr(sm90_backward_cost, "CACHE", 1)  # so that shares take room in turn
    check("sm90", LARGE, rng, *SHARED[case])
    assert dict(seen[0].constants)["SHARES"] and dict(seen[0].scalars)["shares"] == 3


# Key tiles of the last heads alone: of how many heads of K and V the others are, the problem.
LAST_SHARED: dict[str, tuple[int, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "plain": (3, ("bfloat16", {"heads": (4, 2), "seq": (330, 200), "batch": 2, "dlse": 1.0}, {})),
    "causal": (1, ("float16", {"heads": (6, 2), "seq": (400, 330), "dims": (128, 100), "batch": 1}, {"causal": True})),
    "in-order": (2, ("bfloat16", {"heads": (6, 3), "seq": (260, 270), "batch": 1},
        {"causal": True, "deterministic": True})),
    "wide": (1, ("float16", {"heads": (2, 2), "seq": (200, 250), "dims": (256, 200), "batch": 1}, {})),
    "in-turn": (5, ("float16", {"heads": (1, 1), "seq": (130, 200), "batch": 7, "key_mask": True},
        {"deterministic": True})),
}  # fmt: skip


@cases(LAST_SHARED, "causal")
def test_thread_blocks_share_key_tiles_of_the_last_heads(
    case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, problem = LAST_SHARED[case]
    monkeypatch.setattr(sm90_backward_cost, "shares", lambda *_: sm90_backward_cost.Dealt(2, whole))
    for cache in (sm90_backward_cost.CACHE, 1):  # there is room for all, or they take it in turn
        monkeypatch.setattr(sm90_backward_cost, "CACHE", cache)
        check("sm90", LARGE, rng, *problem)


# The keys of a query tile in shares: so many, the problem.
KEYS_SHARED: dict[str, tuple[int, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "plain": (3, ("float16", {"seq": (70, 500), "batch": 2}, {})),
    "causal": (2, ("bfloat16", {"seq": (300, 362), "heads": (4, 2), "batch": 1, "dlse": 1.0}, {"causal": True})),
    "more-than-tiles": (5, ("float16", {"seq": (200, 330), "dims": (128, 90), "batch": 1},
        {"causal": True, "rows_aligned": False})),
    "few-queries": (3, ("bfloat16", {"seq": (5, 700), "heads": (12, 2), "given": ("sinks",), "key_mask": True},
        {"causal": True})),
    "many": (37, ("bfloat16", {"seq": (3, 37 * 128), "heads": (3, 1), "batch": 1, "given": ("sinks",)}, {})),
    "odd-rows": (3, ("float16", {"seq": (5, 300), "heads": (3, 1), "batch": 1}, {})),
    "one-query": (4, ("float16", {"seq": (1, 600), "heads": (6, 2), "dims": (128, 128)}, {})),
    "sinks": (3, ("float16", {"seq": (130, 400), "heads": (4, 2), "batch": 1, "given": ("sinks",)},
        {"causal": "top_left"})),
    # By the first queries
    "unseen": (3, ("bfloat16", {"seq": (400, 300), "batch": 1}, {"window": (60, 0), "causal": True})),
    "scores": (
        3, ("bfloat16", {"seq": (150, 430), "dims": (128, 59), "heads": (2, 1), "batch": 1, "given": SCORES},
            {"softcap": 2.0, "window": (200, 9)}),
    ),
    "dropout": (2, ("float16", {"seq": (150, 400), "batch": 1, "given": ("bias", "seed"), "full": "hqk"},
        {"causal": True, "dropout": 0.2})),
    "blocks": (
        3, ("float16", {"seq": (200, 600), "heads": (4, 2), "batch": 2, "given": ("sinks",)},
            {"blocks": ((64, 128),), "causal": True}),
    ),
    "32": (3, ("bfloat16", {"seq": (230, 300), "dims": (32, 24), "batch": 1}, {})),
    "192": (2, ("float16", {"seq": (100, 350), "dims": (192, 128), "batch": 1}, {"causal": True})),
    "wide": (3, ("bfloat16", {"seq": (100, 350), "dims": (256, 200), "heads": (2, 1), "batch": 1},
        {"window": (150, 20)})),
}  # fmt: skip


@cases(KEYS_SHARED, "plain", "causal", "few-queries")
def test_thread_blocks_share_keys(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of which a warpgroup, or a tile, sees all, some or none; more than there are key tiles."""
    shares, problem = KEYS_SHARED[case]
    seen: list[KernelPlan] = []
    make = sm90_forward.plan
    monkeypatch.setattr(sm90_forward, "plan", lambda *args: seen.append(make(*args)) or seen[-1])
    monkeypatch.setattr(sm90_forward_cost, "dealt", lambda *_: Dealt(shares, 0))
    check("sm90", LARGE, rng, *problem)
    assert dict(seen[0].constants)["SHARES"] and dict(seen[0].scalars)["shares"] == shares
    assert [x.name for x in seen[0].launches] == ["attention_forward", "attention_combine"]


# Heads of a round, and of the last one, in a cache that holds K and V of few: the bytes of that, the problem.
ROUNDS: dict[str, tuple[int, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "one": (80_000, ("bfloat16", {"seq": (300, 300), "heads": (3, 3)}, {"causal": True})),
    "two": (200_000, ("float16", {"seq": (300, 362), "heads": (8, 4), "dims": (128, 100)}, {"causal": True})),
    "wide": (1, ("bfloat16", {"seq": (260, 260), "heads": (3, 3), "dims": (192, 128)}, {"window": (150, 0)})),
}


@cases(ROUNDS, "one")
def test_heads_come_in_rounds(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many heads as the L2 cache holds are dealt out at once, and at the end all that are left."""
    cache, problem = ROUNDS[case]
    make = on_cpu.generate
    usual = "CACHE = 16 << 20;"

    def small(plan: KernelPlan) -> str:
        source = make(plan)
        assert (usual in source) == (plan.of is FORWARD)
        return source.replace(usual, f"CACHE = {cache};")

    monkeypatch.setattr(on_cpu, "generate", small)
    check("sm90", GPU, rng, *problem)
