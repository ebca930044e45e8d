"""Random problems on the kernels without a GPU (on_cpu.py): beside test_*_on_cpu.py's cases, whatever constants and
options come together.

python tests/fuzz_kernels.py --seconds 600              # each takes g++ some 20 seconds
python tests/fuzz_kernels.py --seed 7 --only 345        # one again
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import on_cpu
import on_cpu_tangents
import pytest
from float8_problems import BY, RESULTS, quantize
from on_cpu import check
from score_functions import WRITTEN
from semantics import Blocks, draw_blocks, draw_inputs
from test_float8_on_cpu import check as check_8_bits

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward_cost
from cupyflash.problem import AttentionProblem

ARCHS = {"sm90": ("sm_90a", 90, 232448), "sm80": ("sm_80", 80, 166912), "simt": ("sm_75", 75, 65536)}
DTYPES = {"sm90": ("float16", "bfloat16"), "sm80": ("float16", "bfloat16", "float32"), "simt": ("float32", "float16")}
# Lengths near which tiles begin, and any.
EDGES = (1, 16, 48, 49, 64, 77, 80, 96, 112, 128, 160, 192, 256, 320, 384)
DIMS = (8, 16, 24, 32, 40, 64, 64, 72, 96, 128, 128, 160, 192, 256)
HEADS = ((1, 1), (2, 2), (4, 2), (3, 1), (6, 2), (8, 1), (12, 2), (30, 30))


class Case(NamedTuple):
    """What `check` takes; 8 bits go another way."""

    family: str
    sms: int
    dtype: str
    shapes: dict[str, Any]
    options: dict[str, Any]
    shares: int  # 0: as planned
    moves: tuple[str, ...] | None = None  # with these tangents (on_cpu_tangents.py); none of them: all


def some(rng: np.random.Generator, choice: Any) -> Any:
    return choice[rng.integers(len(choice))]


def length(rng: np.random.Generator) -> int:
    near = int(some(rng, EDGES)) + int(rng.integers(-2, 3)) if rng.random() < 0.6 else int(rng.integers(1, 420))
    return max(1, near)


def draw_case(rng: np.random.Generator, families: list[str]) -> Case:
    family = some(rng, families)
    heads, dim = some(rng, HEADS), int(some(rng, DIMS)) - int(rng.choice([0, 0, 0, 1, 5]))
    dim_v = dim if rng.random() < 0.6 else int(some(rng, DIMS))
    eight = family == "sm90" and rng.random() < 0.12
    # Of few keys too: where one takes all the weight, luck decides how well own precision does.
    seq = length(rng), max(4, length(rng))
    seq = seq if rng.random() < 0.7 else (seq[1], seq[1])
    causal = [False, True, "top_left"][rng.integers(3)] if rng.random() < 0.6 else False
    window = None
    if rng.random() < 0.3:
        window = (int(rng.integers(3, 200)) if rng.random() < 0.8 else None, 0 if causal else int(rng.integers(3, 150)))
        window = (window[0], None) if causal else window
        window = None if window == (None, None) else window
    names = [x for x in ("mask", "bias", "alibi_slopes", "sinks") if rng.random() < 0.25]
    score = some(rng, list(WRITTEN)) if rng.random() < 0.15 else None
    dropout = float(rng.choice([0.1, 0.2, 0.6])) if rng.random() < 0.2 else 0.0
    softcap = float(rng.choice([0.7, 2.0, 7.0, 30.0])) if score is None and rng.random() < 0.3 else None
    scale = [None, None, 3.0, -0.3, -0.09, 0.0][rng.integers(6)]
    blocks = None
    if rng.random() < 0.2:
        sizes = tuple(int(16 * n) for n in rng.integers(1, 9, 2))
        blocks = (sizes, "".join(x for x in "bh" if rng.random() < 0.5))
    # Where a handful of rows decides, luck does.
    batch = int(rng.integers(1, 4)) + 200 // (heads[0] * min(seq))
    batch = min(batch, 30)
    shapes: dict[str, Any] = {
        "batch": batch, "seq": seq, "heads": heads, "dims": (max(dim, 1), dim_v), "key_mask": bool(rng.random() < 0.25),
        "given": [*names, *["seed"] * bool(dropout)], "full": some(rng, ["bhqk", "hqk", "bqk", "qk", "bk", "k", "hk"]),
        "score": score,
    }  # fmt: skip
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "dropout": dropout, "blocks": blocks,
    }  # fmt: skip
    if score:
        options["score"] = WRITTEN[score].function
    dtype = some(rng, DTYPES[family])
    if eight:
        options |= {
            "by": some(rng, BY),
            "result": some(rng, list(RESULTS)),
            "out_scale": float(2.0 ** rng.uniform(-3, 5)),
        }
        return Case(family, 2, "float8", shapes, options, 0)
    shapes |= {"dlse": 1.0 if rng.random() < 0.3 else 0.0, "bias": "float32" if rng.random() < 0.3 else None}
    options |= {"deterministic": bool(rng.random() < 0.35), "rows_aligned": bool(rng.random() < 0.8)}
    options["apart"] = 4 if rng.random() < 0.2 else True
    shares = int(rng.integers(2, 5)) if family == "sm90" and rng.random() < 0.2 and not blocks else 0
    case = Case(family, int(some(rng, (2, 2, 4, 6, 14, 40))), dtype, shapes, options, shares)
    if rng.random() < 0.3:
        can = ["q", "k", "v", "dout", *(x for x in names if x != "mask")]
        return case._replace(shares=0, moves=tuple(x for x in can if rng.random() < 0.4))
    return case


def uneven_blocks(rng: np.random.Generator, shape: tuple[int, int, int, int], *how: Any) -> Blocks:
    """`draw_blocks`, but of most heads nothing is seen, and all of some."""
    drawn = draw_blocks(rng, shape, *how)
    kinds = rng.choice(3, (*drawn.seen.shape[:2], 1, 1), p=(0.6, 0.2, 0.2))
    return drawn._replace(seen=(kinds == 1) | ((kinds == 2) & drawn.seen))


def run_case(case: Case, rng: np.random.Generator) -> None:
    if case.dtype == "float8":
        run_8_bits(case, rng)
        return
    with pytest.MonkeyPatch.context() as patch:
        if rng.random() < 0.3:
            for module in (on_cpu, on_cpu_tangents):
                patch.setattr(module, "draw_blocks", uneven_blocks)
        if case.shares:
            whole = int(rng.integers(0, 3))  # heads that are not dealt out

            def dealt(problem: AttentionProblem, *_: object) -> sm90_backward_cost.Dealt:
                heads, shares = problem.batch * problem.heads_k, min(case.shares, problem.group)
                return sm90_backward_cost.Dealt(shares, min(whole, heads - 1) if shares > 1 else 0)

            patch.setattr(sm90_backward_cost, "shares", dealt)
            patch.setattr(sm90_backward_cost, "CACHE", 1)
        name, cc, memory = ARCHS[case.family]
        arch, options = Arch(name, cc, case.sms, memory), dict(case.options)
        if case.moves is None:
            check(case.family, arch, rng, case.dtype, case.shapes, options)
        else:
            del options["rows_aligned"], options["apart"]
            on_cpu_tangents.check(case.family, arch, rng, case.dtype, case.shapes, options, case.moves)


def run_8_bits(case: Case, rng: np.random.Generator) -> None:
    options = {name: x for name, x in case.options.items() if name not in ("blocks", "by") and x is not None}
    drawn = draw_inputs(rng, "float32", **case.shapes)
    if case.options["blocks"]:
        batch, queries, heads, _ = drawn.q.shape
        options["blocks"] = draw_blocks(rng, (batch, heads, queries, drawn.k.shape[1]), *case.options["blocks"])
    check_8_bits(quantize(rng, *drawn[:3], by=case.options["by"]), drawn.key_mask, drawn.given, **options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--family", choices=ARCHS, action="append", help="default: all, the newest most often")
    parser.add_argument("--only", type=int, metavar="N", help="problem N of that seed")
    args = parser.parse_args()
    families = args.family or ["sm90"] * 8 + ["sm80"] * 2 + ["simt"]
    print(f"seed {args.seed}", flush=True)
    end, n, wrong, refused = time.monotonic() + args.seconds, args.only or 0, 0, 0
    while time.monotonic() < end:
        rng = np.random.default_rng([args.seed, n])
        case = draw_case(rng, families)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_case(case, rng)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (whatever it is, it is what the fuzzer looks for)
            if isinstance(error, ValueError) and " takes " in str(error):
                refused += 1  # by this family
            else:
                wrong += 1
                told = "" if isinstance(error, AssertionError) else traceback.format_exc()
                print(f"--seed {args.seed} --only {n}: {case}\n  {type(error).__name__}: {error}\n{told}", flush=True)
        if args.only is not None:
            print(case)
            break
        n += 1
        if n % 10 == 0:
            print(f"{n} problems, {wrong} wrong, {refused} refused", flush=True)
    print(f"seed {args.seed}: {n} problems, {wrong} wrong, {refused} refused")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
