"""One small problem of each kind on a GPU, to be run under compute-sanitizer: every family, dtype, option and head
dimension.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/memcheck.py --part 1/4
    compute-sanitizer --tool racecheck python tests/memcheck.py --family sm90 --only "everything"
    python tests/memcheck.py --cpu --list

A line for each problem: forward, backward and the gradients of all arrays, judged as the tests do. Every array has
memory of its own, not a piece of CuPy's pool, so that what lies beyond its ends is nobody's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("CUPYFLASH_CONFIG_DIR", os.devnull)  # not with tiles that were tuned here
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import float8_problems
import numpy as np
from backends import CPU, Backend, no_gpu, passes
from reference import state
from score_functions import WRITTEN
from semantics import LAYS, Blocks, Inputs, check, draw_blocks, draw_inputs

from cupyflash.gpu.device import Arch, current
from cupyflash.gpu.plan import FAMILIES
from cupyflash.problem import FLOAT8, FLOATS, ITEMSIZE

DIMS = ((64, 64), (128, 128), (32, 32), (256, 256), (96, 96), (192, 128), (40, 72), (160, 160))
ORDER = ("bfloat16", "float16", "float32", "float64")


class Kind(NamedTuple):
    """What `draw_inputs` and `check` are given beside sizes; `blocks` as `draw_blocks` has it."""

    shapes: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    options: dict[str, Any] = {}  # noqa: RUF012
    blocks: tuple[Any, ...] | None = None


def _with_score(name: str) -> Kind:
    return Kind({"score": name}, {"score": WRITTEN[name].function})


_MASKED = {"key_mask": True, "given": ("mask", "bias", "alibi_slopes", "sinks", "seed"), "heads": (4, 2), "dlse": 1.0}
_BANDED = {"causal": True, "window": (150, None), "dropout": 0.2}
KINDS = {
    "everything": Kind(_MASKED, {**_BANDED, "softcap": 8.0}, ((32, 48), "bh")),
    "everything with a score": Kind({**_MASKED, "score": "relative"}, {**_BANDED,
        "score": WRITTEN["relative"].function}, ((48, 32), "")),
    "everything deterministic": Kind(_MASKED, {**_BANDED, "softcap": 8.0, "deterministic": True}, ((64, 64), "h")),
    "nothing": Kind(),
    "causal": Kind({}, {"causal": True}),
    "top left": Kind({}, {"causal": "top_left"}),
    "window": Kind({}, {"window": (40, 30)}),
    "negative scale": Kind({}, {"scale": -0.1}),
    "softcap": Kind({}, {"softcap": 3.0}),
    "key_mask": Kind({"key_mask": True}),
    "mask": Kind({"given": ("mask",)}),
    "mask of all heads": Kind({"given": ("mask",), "full": "bqk"}),
    "bias": Kind({"given": ("bias",)}),
    "bias of all batches": Kind({"given": ("bias",), "full": "hqk"}),
    "bias of keys": Kind({"given": ("bias",), "full": "k"}),
    "bias of queries": Kind({"given": ("bias",), "full": "bq"}),
    "bias in float32": Kind({"given": ("bias",), "bias": "float32"}),
    "alibi_slopes": Kind({"given": ("alibi_slopes",)}, {"causal": True}),
    "alibi_slopes, both sides": Kind({"given": ("alibi_slopes",)}),
    "sinks": Kind({"given": ("sinks",)}),
    "dropout": Kind({"given": ("seed",)}, {"dropout": 0.3}),
    "block_mask": Kind({}, {}, ((32, 48), "bh")),
    "block_mask, causal": Kind({}, {"causal": True}, ((128, 128), "")),
    **{f"score {name}": _with_score(name) for name in WRITTEN},
    "deterministic": Kind({"heads": (4, 2)}, {"deterministic": True}),
    "deterministic table": Kind({"score": "grid"}, {"score": WRITTEN["grid"].function, "deterministic": True}),
    "few queries": Kind({"batch": 20, "seq": (5, 150), "heads": (12, 2)}, {"causal": True}),
    "one query": Kind({"batch": 24, "seq": (1, 300), "heads": (10, 2)}),
    "short": Kind({"batch": 70, "seq": (49, 49), "heads": (4, 4)}, {"causal": True}),
    "one key head": Kind({"batch": 1, "seq": (330, 300), "heads": (24, 1)}, {"causal": True}),
    "more tiles than multiprocessors": Kind({"batch": 5, "seq": (260, 200), "heads": (12, 3)}, {"causal": True}),
    "slices": Kind({}, {"lay": LAYS["slices-of-a-larger-array"]}),
    "rows not aligned": Kind({}, {"lay": LAYS["rows-not-aligned"]}),
    "heads first": Kind({}, {"layout": "bhsd"}),
}  # fmt: skip


# Of 8 bits, the forward alone: what `float8_problems.check` is given.
_EVERYTHING = {name: x for name, x in _MASKED.items() if name != "dlse"}
KINDS_8 = {
    "everything by block": Kind(_EVERYTHING, {**_BANDED, "softcap": 8.0, "by": "block"}, ((32, 48), "bh")),
    "nothing": Kind(),
    "causal": Kind({}, {"causal": True}),
    "by number": Kind({}, {"by": "number"}),
    "by head": Kind({"heads": (4, 2)}, {"by": "head"}),
    "by block": Kind({"heads": (4, 2)}, {"by": "block"}),
    "by block, causal": Kind({}, {"by": "block", "causal": True}),
    "result of 8 bits": Kind({}, {"result": FLOAT8, "out_scale": 20.0}),
    "result of float16": Kind({}, {"result": "float16"}),
    "rows not aligned": Kind({}, {"lay": LAYS["rows-not-aligned"], "result": FLOAT8}),
    "few queries": Kind({"batch": 20, "seq": (5, 150), "heads": (12, 2)}, {"causal": True, "by": "block"}),
    "more tiles than multiprocessors": Kind({"batch": 5, "seq": (260, 200), "heads": (12, 3)},
        {"causal": True, "by": "head"}),
}  # fmt: skip


class Problem(NamedTuple):
    backend: Backend
    dtype: str
    kind: str
    dims: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.backend.name} {self.dtype} d{'/'.join(map(str, dict.fromkeys(self.dims)))} {self.kind}"

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(str(self).encode()))

    def draw(self) -> tuple[Inputs, dict[str, Any], Blocks | None]:
        """The same in every run, and in whatever part."""
        shapes, options, blocks = (KINDS_8 if self.dtype == FLOAT8 else KINDS)[self.kind]
        rng = self.rng()
        shapes = {"seq": (197, 333), "dims": self.dims, **shapes}
        if shapes.get("bias") and ITEMSIZE[self.dtype] != 2:
            shapes["bias"] = None
        inputs = draw_inputs(rng, "float32" if self.dtype == FLOAT8 else self.dtype, **shapes)
        (batch, queries, heads, _), keys = inputs.q.shape, inputs.k.shape[1]
        drawn = draw_blocks(rng, (batch, heads, queries, keys), *blocks) if blocks else None
        return inputs, dict(options), drawn

    def objection(self, inputs: Inputs, options: dict[str, Any], blocks: Blocks | None, arch: Arch) -> str | None:
        if self.backend.family is None:
            return None
        asked = {name: x for name, x in options.items() if name not in ("lay", "layout", "by", "result", "out_scale")}
        asked |= {"block_mask": blocks.mask()} if blocks else {}
        problem = state(*inputs[:3], inputs.key_mask, **asked, **inputs.given)
        room = FAMILIES[self.backend.family]
        if self.dtype == FLOAT8:
            problem = replace(problem, dtype=FLOAT8)
        return next(filter(None, (room.objection(problem, arch, of) for of in passes(self.dtype))), None)


def problems(backends: list[Backend]) -> Iterator[Problem]:
    """What has most in it comes first. Head dimensions take turns, so that each meets every family and dtype."""
    pairs = [(b, dtype) for b in backends for dtype in ORDER if b.takes(dtype, 64, 64)]
    for n, kind in enumerate(KINDS):
        for m, (backend, dtype) in enumerate(pairs):
            turn = [dims for dims in DIMS if backend.takes(dtype, *dims)]
            yield Problem(backend, dtype, kind, turn[(n + 3 * m) % len(turn)])
    for backend in [b for b in backends if b.takes(FLOAT8, 64, 64)]:
        for n, kind in enumerate(KINDS_8):
            yield Problem(backend, FLOAT8, kind, DIMS[n % len(DIMS)])


def run(problem: Problem, arch: Arch) -> str:
    """What came of it: "right", why it is left out, or what is wrong."""
    inputs, options, blocks = problem.draw()
    if why := problem.objection(inputs, options, blocks, arch):
        return f"left out: {why}"
    try:
        if problem.dtype == FLOAT8:  # of which CuPy has no arrays
            library = float8_problems.library(*(("torch", True) if problem.backend.family else ("numpy", False)))
            if library is None:
                return "left out: PyTorch is not there"
            family = problem.backend.family
            float8_problems.check(library, problem.rng(), inputs, blocks=blocks, family=family, **options)
            return "right"
        check(problem.backend, inputs, blocks=blocks, **options)
    except AssertionError as error:
        return f"WRONG: {error}"
    except Exception:  # noqa: BLE001 (a fault of the GPU comes as any error, and then in all that follow)
        return f"WRONG: {traceback.format_exc()}"
    return "right"


def lost() -> bool:
    """Whether a fault has left the GPU such that every call fails."""
    import cupy

    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return True
    return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="N/OF", help="every OF-th problem, from the N-th on")
    parser.add_argument("--family", choices=FAMILIES, help="only these kernels")
    parser.add_argument("--dtype", choices=(*FLOATS, FLOAT8), help="only this one")
    parser.add_argument("--only", default="", help="kinds that begin so")
    parser.add_argument("--after", type=Path, metavar="LOG", help="without what is right, or left out, in this one")
    parser.add_argument("--cpu", action="store_true", help="NumPy's way, to test the list")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args(arguments)
    part, of = map(int, args.part.split("/"))
    if not 1 <= part <= of:
        parser.error(f"--part is {args.part}; it must be N/OF, N from 1 to OF")
    if not args.cpu and no_gpu():
        parser.error(f"{no_gpu()}; --cpu runs the list without a GPU")
    arch = Arch.of("sm_90a") if args.cpu else current(0)
    if not args.cpu:
        import cupy

        cupy.cuda.set_allocator(None)
    warnings.simplefilter("ignore")
    families = [CPU] if args.cpu else [Backend(name, name) for name in FAMILIES if args.family in (None, name)]
    work = [x for x in problems(families) if x.kind.startswith(args.only) and args.dtype in (None, x.dtype)]
    if args.after and args.after.is_file():
        lines = args.after.read_text(encoding="utf-8", errors="replace").splitlines()
        before = {line.partition(": ")[0] for line in lines if ": right, " in line or ": left out: " in line}
        work = [x for x in work if str(x) not in before]
    start, results = time.monotonic(), []
    for problem in work[part - 1 :: of]:
        begin = time.monotonic()
        results.append("listed" if args.list else run(problem, arch))
        print(f"{problem}: {results[-1]}, {time.monotonic() - begin:.1f} s", flush=True)
        if results[-1].startswith("WRONG") and not args.cpu and lost():
            print("what follows is not run: the GPU is lost to this process", flush=True)
            break
    wrong, left = (sum(x.startswith(what) for x in results) for what in ("WRONG", "left out"))
    seconds = time.monotonic() - start
    print(f"part {args.part}: {len(results)} problems, {left} left out, {wrong} wrong, {seconds:.0f} s", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
