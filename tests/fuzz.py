"""Random problems over every option, array library and layout, on a CPU or a GPU, each judged against float64.

    python tests/fuzz.py --problems 2000                     # NumPy, PyTorch and JAX on the CPU
    python tests/fuzz.py --problems 1000000 --record tests/fuzz_runs.json    # every kernel family, where there is a GPU
    python tests/fuzz.py --problems 1000000 --seconds 500 --go-on --record tests/fuzz_runs.json    # a million in parts
    python tests/fuzz.py --seed 7 --only 12:345              # one problem again

On a GPU what is asked becomes constants of a kernel, which takes seconds to compile. So kinds are drawn first: all that
a kernel is compiled with. Of each kind many problems are drawn, in which only shapes, numbers and places in memory
differ.
Problem n of kind k is drawn from (seed, k, n), and from nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TOP = Path(__file__).resolve().parent.parent
if __name__ in ("__main__", "__mp_main__"):  # as a script, and in the processes that it starts
    sys.path.insert(0, str(TOP))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("CUPYFLASH_CONFIG_DIR", os.devnull)  # not with tiles that were tuned here

import float8_problems
import fuzz_lengths
import numpy as np
from backends import CPU, Backend, no_gpu
from criterion import ByLuck
from frameworks import framework
from fuzz_runs import FAILURES, Result, Work, go_over
from fuzz_ways import CHANGES, LARGE_SCORES, ByFunction, changes_for, draw_lays, drop_in, run_cupy_or_numpy, with_tiles
from reference import DTYPES, Windows
from score_functions import WRITTEN
from semantics import CONTIGUOUS, LAYS, Inputs, draw_blocks, draw_inputs

from cupyflash.gpu.plan import FAMILIES
from cupyflash.problem import ARRAYS, FLOAT8, FLOATS, ITEMSIZE, OF_FLOAT8, AttentionProblem

# Head dimensions from one of these (and not it) to the next have a kernel in common, in every family.
EDGES = (*range(0, 257, 16), 300)
# Queries that a packed tile of the Hopper forward has room for, beside 64, 16, 8, 4 or 2 heads.
FEW = ((1, 2), (3, 8), (9, 16), (17, 32), (33, 64))
# Tiles have up to 256 rows or keys, and one in 30 problems may have more: in thousands of each kind, all edges and
# several tiles.
MANY_OR_FAR = 0.0005, 0.0005  # how often heads are hundreds, or keys thousands
MOST = 2 * 10**6  # numbers of q, and of k, where heads are hundreds: else a reference takes seconds
LONGEST = ((20, 60, 130, 300, 1100), (10, 20, 50, 150, 600))  # and where queries are few, of many heads
HOW_OFTEN = (0.45, 0.4, 0.12, 0.028, 0.002)
GROUPED = 64  # with more queries than this there is no packing; nor with as many heads or fewer on a GPU of some size
PROBLEMS_OF_A_KIND = {"cpu": 10, "gpu": 4000}  # nothing is compiled on a CPU
# Times as many: of JAX, where XLA compiles for each shape; where queries are few, of as many heads as a GPU has room
# for; of block masks, whose lists wait for the GPU several times; and of lengths, each of which is judged by itself.
OF_JAX, OF_FEW, OF_BLOCKS, OF_RAGGED = 0.03, 0.2, 0.4, 0.2
OF_LENGTHS = 0.2  # how often lengths are data


@dataclass(frozen=True)
class Kind:
    """What becomes constants of kernels, and whose arrays it is asked with."""

    family: str | None  # None: the CPU
    dtype: str
    library: str
    dims: tuple[int, int]  # the upper EDGES of the head dimensions of q and v
    causal: bool | str
    left: bool  # is there a bound on that side of the diagonal that hides something?
    right: bool
    negative: bool  # the scale
    softcap: bool
    score: str | None  # of WRITTEN
    key_mask: bool
    blocks: str | None  # axes along which a block mask differs; None: there is none
    dropout: bool
    given: tuple[tuple[str, str], ...]  # the other optional arrays and their dtypes
    along: str  # of queries (q) and keys (k), along which a mask and a bias differ
    deterministic: bool
    few: tuple[int, int] | None  # queries of heads that share keys, from and to
    by: str | None = None  # of 8 bits: what inputs are scaled by
    result: str | None = None  # and what out is
    named: bool = True  # is the family? Else it is the plan's choice
    lengths: int = 0  # where they are data: what draws in which form; else 0
    tiles: int = 0  # the number of tiles that were tuned, if any
    latent: tuple[int, int] | None = None  # V is the first columns of K: of how many, how many
    at: str | None = None  # where rows stand: as "numbers", or the dtype of an array that kernels read


def draw_kind(rng: np.random.Generator, backend: Backend, dtype: str, library: str) -> Kind:
    """A kind that this backend takes."""
    takes = [edge for edge in EDGES[1:] if backend.takes(dtype, edge, edge)]
    dim, other = (int(takes[rng.integers(len(takes))]) for _ in range(2))
    causal = [False, True, "top_left"][rng.integers(3)]
    scored = rng.random() < 0.5 and backend.takes(dtype, 64, 64, softcap=1.0)
    given = []
    for row in ARRAYS:
        known = row.name not in ("key_mask", "seed") and not (row.of_float8 or row.ragged or row.placed)
        if known and scored and rng.random() < 0.4:
            dtypes = [dtype if x == "q" else x for x in row.dtypes if dtype != FLOAT8 or x != "q"]
            given.append((row.name, dtypes[rng.integers(len(dtypes))]))
    dropout = rng.random() < 0.2 and backend.takes(dtype, 64, 64, dropout=0.5)
    if dropout and rng.random() < 0.3:  # in memory; else it is a number
        given.append(("seed", ["int64", "int32"][rng.integers(2)]))
    score = list(WRITTEN)[rng.integers(len(WRITTEN))] if scored and rng.random() < 0.4 else None
    blocks = "".join(axis for axis in "bh" if rng.random() < 0.5) if scored and rng.random() < 0.4 else None
    # (What a score function reads is read by place. flash1 takes none.)
    stands = library in ("numpy", "cupy") and not (dtype == FLOAT8 or score or blocks is not None)
    stands = stands and backend.family != "flash1" and rng.random() < 0.15
    latent = None
    wide = backend.family in (None, "sm90", "simt") or (backend.family == "sm80" and ITEMSIZE[dtype] == 2)
    if library in ("numpy", "cupy") and dtype != FLOAT8 and wide and rng.random() < 0.08:
        columns = 512 if rng.random() < 0.6 else int(8 * rng.integers(1, 65))
        latent = columns + [64, int(rng.integers(0, 65))][rng.integers(2)], columns
    return Kind(
        backend.family, dtype, library,
        dims=(dim, other if rng.random() < 0.4 else dim),
        causal=causal,
        left=bool(rng.random() < 0.3),
        right=bool(causal or rng.random() < 0.3),
        negative=bool(rng.random() < 0.15),
        softcap=bool(scored and score is None and rng.random() < 0.4),
        score=score,
        key_mask=bool(rng.random() < 0.3),
        blocks=blocks,
        dropout=bool(dropout),
        given=tuple(given),
        # (Of 8 bits there are Hopper's kernels alone, which take a mask and a bias that differ between keys.)
        along="".join(axis for axis in "qk" if rng.random() < 0.6 or (dtype == FLOAT8 and axis == "k")),
        deterministic=bool(rng.random() < 0.3),
        few=FEW[rng.integers(len(FEW))] if rng.random() < 0.12 else None,
        named=bool(backend.family is None or rng.random() < 0.85),
        **_of_8_bits(rng) if dtype == FLOAT8 else {},
        lengths=int(rng.integers(1, 1000)) * (backend.family != "flash1" and library in ("numpy", "cupy")
                                              and dtype != FLOAT8 and bool(rng.random() < OF_LENGTHS)),
        tiles=int(rng.integers(1, 1000)) * bool(backend.family is not None and rng.random() < 0.15),
        latent=latent,
        at=["numbers", "int32", "int64"][rng.integers(3)] if stands else None,
    )  # fmt: skip


def _of_8_bits(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "by": float8_problems.BY[rng.integers(len(float8_problems.BY))],
        "result": OF_FLOAT8[rng.integers(len(OF_FLOAT8))],
    }


class Problem(NamedTuple):
    """What `check` takes, beside the backend."""

    inputs: Inputs
    options: dict[str, Any]
    text: str


def draw_problem(rng: np.random.Generator, kind: Kind) -> Problem:
    rank = 4 if kind.few or rng.random() < 0.8 else int(rng.integers(2, 4))
    # What a problem costs is what the reference takes. So many are small, and what is long has few heads.
    longest = int(rng.choice(LONGEST[bool(kind.few)], p=HOW_OFTEN))
    many, far = rng.random(2) < MANY_OR_FAR  # heads; keys, which thread blocks share
    longest = 20 if many and not kind.few else longest
    few_heads = longest > 100 and not kind.few and rng.random() < 0.9
    heads_k, group = (1, 1) if few_heads else (int(n) for n in rng.choice([1, 2, 3], 2, p=[0.55, 0.3, 0.15]))
    if rank == 2:
        heads_k = group = 1
    over_pairs = any(name in ("mask", "bias") for name, _ in kind.given)
    least_right = int("alibi_slopes" in dict(kind.given))  # kernels with ALiBi know whether the bound is 0
    # A bound that hides nothing is not there, nor an axis of one.
    least = 2 + least_right if kind.left or kind.right or over_pairs else 1
    if ITEMSIZE[kind.dtype] == 2 and not kind.few and rng.random() < 0.9:
        least = 10  # fewer make many heads, see below
    seq_q, seq_k = (int(n) for n in rng.integers(least, longest + 1, 2))
    if kind.few:
        group = int(rng.integers(2, 9))
        seq_q = int(rng.integers(max(least, kind.few[0]), max(least, kind.few[1]) + 1))
    elif group > 1:
        seq_q += GROUPED
    alike = not kind.few and not kind.latent and group == 1 and kind.dims[0] == kind.dims[1] and rng.random() < 0.1
    if far and rank == 4 and kind.blocks is None:
        heads_k, group, seq_k = 1, heads_k * group if kind.few else 1, int(2000 * 10 ** rng.random())
        seq_q, alike = min(seq_q, 64), False
    elif alike:
        seq_k = seq_q
    heads = heads_k * group
    # Where a handful of rows decides, luck does, in 16 bits.
    enough = 1 + 200 // (heads * min(seq_q, seq_k)) if ITEMSIZE[kind.dtype] == 2 else 1
    batch = enough + int(rng.choice(3, p=[0.7, 0.2, 0.1])) if not kind.few else max(enough, 1 + 160 // heads)
    if many and rank == 4 and not far:
        room = MOST // (max(seq_q, seq_k) * max(kind.dims))
        batch = int(rng.integers(300, min(3000, max(400, room)))) // heads + 1
    if rank < 4:
        batch, seq_q, seq_k = 1, max(seq_q, 200 // heads), max(seq_k, 200 // heads)

    dims = tuple(int(rng.integers(EDGES[EDGES.index(edge) - 1] + 1, edge + 1)) for edge in kind.dims)
    dims = kind.latent or ((dims[0], dims[0]) if alike else dims)
    inputs = draw_inputs(
        rng, "float32" if kind.dtype == FLOAT8 else kind.dtype, batch=batch, seq=(seq_q, seq_k), heads=(heads, heads_k),
        dims=dims, key_mask=kind.key_mask,
        dlse=float(10.0 ** rng.uniform(-1, 1)) if rng.random() < 0.3 else 0.0,
        given=[*(name for name, _ in kind.given if name != "seed"), *["seed"] * kind.dropout],
        full=kind.along + "".join(axis for axis in "bh" if rng.random() < 0.6), score=kind.score,
    )  # fmt: skip
    for name, dtype in kind.given:
        inputs.given[name] = inputs.given[name].astype(DTYPES.get(dtype, dtype))
        if name == "seed":
            inputs.given[name] = inputs.given[name].reshape(1)
    if kind.key_mask and rng.random() < 0.3:
        thin = inputs.key_mask[:1] if rng.random() < 0.5 else inputs.key_mask[:, :1]
        inputs = inputs._replace(key_mask=thin)

    # Keys to the left of the last query's diagonal and to the right of the first one's: what a bound is less than.
    reach_left, reach_right = (seq_q, seq_k) if kind.causal == "top_left" else (seq_k, seq_q)
    at = None
    if kind.at is not None:
        at = draw_places(rng, kind, seq_q, seq_k, least)
        reach_left, reach_right = (max(least, n) for n in (seq_q + at[2] - at[3], seq_k - at[2] + at[3]))
    left = _short(rng, 0, reach_left - 1) if kind.left else None
    right = _short(rng, least_right, reach_right - 1) if kind.right and not kind.causal else None
    if kind.causal and rng.random() < 0.3:  # a bound that says nothing beside that
        right = int(rng.integers(0, 2 * reach_right))
    size = float(rng.choice([0.0, rng.uniform(0, 2), 1.0])) / max(dims[0], 1) ** 0.5
    scale = -max(size, 1e-3) if kind.negative else [None, size][rng.integers(2)]
    options = {
        "rank": rank,
        "layout": ["bshd", "bhsd"][rng.integers(2)],
        "causal": kind.causal,
        "window": None if left is None and right is None else (left, right),
        "scale": scale,
        "softcap": float(rng.uniform(0.5, 20)) if kind.softcap else None,
        "score": WRITTEN[kind.score].function if kind.score else None,
        "dropout": float(rng.uniform(0.01, 0.97 if seq_k > 100 and rng.random() < 0.3 else 0.6)) * kind.dropout,
        "deterministic": kind.deterministic,
        "at": at,
        "sms": int(2 ** rng.uniform(0, 9)) if rng.random() < 0.1 else None,
    }
    if kind.dtype == FLOAT8:
        options |= {"by": kind.by, "result": kind.result, "out_scale": float(2.0 ** rng.uniform(-3, 5))}
    if kind.blocks is not None:
        sizes = tuple(int(16 * n) for n in rng.integers(1, 9, 2))
        drawn = draw_blocks(rng, (batch, heads, seq_q, seq_k), sizes, kind.blocks)
        options["blocks"] = ByFunction(*drawn) if rng.random() < 0.3 else drawn
    change = None
    if kind.dtype != FLOAT8 and rng.random() < 0.25:
        can = changes_for(kind, inputs)
        change = can[rng.integers(len(can))]
        CHANGES[change](rng, inputs)
    if kind.dtype != FLOAT8:
        options |= {"large_scores": change in LARGE_SCORES, "thorough": bool(rng.random() < 0.1)}
    lay: Any = list(LAYS)[rng.integers(len(LAYS))] if rank == 4 and rng.random() < 0.5 else "contiguous"
    laid: Any = LAYS.get(lay, CONTIGUOUS)
    if kind.dtype != FLOAT8 and rank == 4 and rng.random() < 0.15:
        laid, lay = draw_lays(rng, inputs)
    if kind.library in ("numpy", "cupy") and kind.dtype != FLOAT8:
        alike = alike and change is None and lay == "contiguous"
        if alike:
            inputs.k[...] = inputs.v[...] = inputs.q
        if change is not None or options["dropout"] > 0.6:
            options["moving"] = ()  # what tangents may be off by is known of ordinary numbers
        options |= {"targets": bool(rng.random() < 0.7), "again": bool(rng.random() < 0.15), "alike": alike}
        options["placed"] = None if kind.at == "numbers" else kind.at
        if alike:  # each query's own key takes nearly all
            options["large_scores"] = True
        if change == "infinite":  # 0 times infinity: some kernels leave out what has no weight, others do not
            options |= {"backward": False, "scale": scale or None}
    if kind.latent:
        inputs.v[...] = inputs.k[..., : dims[1]]
        options |= {"latent": dims[1], "backward": False}
    shapes = " ".join(f"{name}{tuple(x.shape)}" for name, x in zip("qkv", inputs))
    given = {name: f"{x.dtype}{x.shape}" for name, x in inputs.given.items()}
    said = {name: x for name, x in options.items() if name != "blocks"} | {"score": kind.score}
    text = f"{shapes} {given} dlse={inputs.dlse is not None} {said} {change} {lay}"
    if kind.blocks is not None:
        text += f" blocks of {sizes}"
    return Problem(inputs, options | {"lay": laid}, text)


def draw_places(rng: np.random.Generator, kind: Kind, seq_q: int, seq_k: int, least: int) -> tuple[int, ...]:
    """Where the first batch entry, head, query and key stand. Of an array, which is data, it may be where every pair is
    hidden, or none; bounds that are numbers hide something."""
    low, high = least - seq_q, seq_k - least
    if kind.at != "numbers" and rng.random() < 0.1:
        low, high = low - 200, high + 200
    step = 16 if kind.dropout else 1
    diagonal = step * int(rng.integers(-(-low // step), high // step + 1))
    query = 16 * int(rng.integers(0, 2000)) + max(0, diagonal)
    return (*map(int, rng.integers(0, 100, 2)), query, query - diagonal)


def _short(rng: np.random.Generator, low: int, high: int) -> int:
    """From low to below high; as often of any size as of any number. (Of few keys luck decides how well they do.)"""
    least = low + 8
    if rng.random() < 0.5 or high - least < 4:
        return int(rng.integers(low, high))
    return least + int(np.exp(rng.uniform(0, np.log(high - least)))) - 1


def run_one(kind: Kind, seed: tuple[int, ...]) -> tuple[str, str | None]:
    """One problem of a kind: what it was, and what is wrong with what came of it."""
    with with_tiles(kind.tiles):
        return _run_one(kind, Windows(seed))


def _run_one(kind: Kind, rng: Windows) -> tuple[str, str | None]:
    if kind.lengths:
        return run_ragged(rng, kind)
    problem, way = draw_problem(rng, kind), ""
    try:
        if kind.dtype == FLOAT8:
            library = float8_problems.library(kind.library, kind.family is not None)
            with library.session():
                float8_problems.check(library, rng, problem.inputs, family=kind.family, **problem.options)
        elif kind.library in ("numpy", "cupy"):
            backend = Sparing(kind.family or "cpu", kind.family) if kind.named else Unnamed("gpu", kind.family)
            way = run_cupy_or_numpy(rng, backend, problem.inputs, problem.options)
        else:
            library = framework(kind.library, kind.family is not None)
            recorded, traced = rng.random(2) < 0.5
            family = kind.family if kind.named else None
            through = drop_in(kind.library, problem.inputs, problem.options) if rng.random() < 0.5 else None
            way = f"recorded={recorded} traced={traced} {'by another name' if through else ''}"
            library.check(
                problem.inputs, family=family, recorded=recorded, traced=traced, through=through, **problem.options
            )
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what the fuzzer looks for)
        wrong = f"{type(error).__name__}: {error} ({way})"
        return problem.text, wrong if isinstance(error, AssertionError) else f"{wrong}\n{traceback.format_exc()}"
    return problem.text, None


def run_ragged(rng: Windows, kind: Kind) -> tuple[str, str | None]:
    """The same where lengths are data."""
    dims = kind.latent or tuple(int(rng.integers(EDGES[EDGES.index(edge) - 1] + 1, edge + 1)) for edge in kind.dims)
    said: list[str] = []
    try:
        fuzz_lengths.run(rng, kind, dims, said)
    except Exception as error:  # noqa: BLE001
        return " ".join(said), f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    return " ".join(said), None


class Sparing(Backend):
    """A backend that fills free memory with NaN now and then: each time, that would take as long as all else."""

    _calls = itertools.count()

    def poison(self) -> None:
        if next(Sparing._calls) % 32 == 0:
            super().poison()


class Unnamed(Sparing):
    """One whose kernels are the plan's choice."""

    def family_for(self, problem: AttentionProblem) -> None:
        return None


# ---- the script -----------------------------------------------------------------------------------------------------


def libraries(on_gpu: bool) -> list[str]:
    """Those that are there."""
    return ["cupy" if on_gpu else "numpy"] + [name for name in ("torch", "jax") if framework(name, on_gpu) is not None]


def backends(on_gpu: bool) -> list[Backend]:
    """The newest kernels most often."""
    if not on_gpu:
        return [CPU]
    there = [Backend(name, name) for name in FAMILIES if Backend(name, name).takes("float16", 64, 64)]
    return [backend for n, backend in enumerate(there) for _ in range(len(there) - n)]


def kind_of(args: argparse.Namespace, k: int, names: list[str]) -> Kind:
    rng = np.random.default_rng([args.seed, k])
    choice = [x for x in backends(not args.cpu) if args.family in (None, x.family)]
    backend = choice[rng.integers(len(choice))]
    in_8_bits = [x for x in names if x != "cupy"]
    every = [*FLOATS, *[FLOAT8] * bool(in_8_bits)]
    dtypes = [x for x in every if backend.takes(x, 64, 64) and args.dtype in (None, x)]
    if not dtypes:
        raise SystemExit(f"{args.dtype} is no dtype that {backend.name} takes")
    dtype = dtypes[rng.integers(len(dtypes))]
    names = in_8_bits if dtype == FLOAT8 else names
    # Half of them with NumPy or CuPy, whose arrays may lie in memory in every way.
    library = names[0] if rng.random() < 0.5 else names[rng.integers(len(names))]
    return draw_kind(rng, backend, dtype, library)


def run_kind(work: Work) -> Result:
    args, k = work.args, work.kind
    kind = kind_of(args, k, work.libraries)
    failures: list[str] = []
    done = by_luck = 0
    for n in work.numbers:
        if time.time() > work.until or len(failures) >= FAILURES:
            break
        done += 1
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ByLuck)
            text, wrong = run_one(kind, (args.seed, k, n))
        for x in warned:
            if issubclass(x.category, ByLuck):
                by_luck += 1
                print(f"{x.message}: by luck? --seed {args.seed} --only {k}:{n}")
            else:
                warnings.showwarning(x.message, x.category, x.filename, x.lineno)
        if args.only:
            print(f"{kind}\n{text}")
        if wrong:
            failures.append(f"--seed {args.seed} --only {k}:{n}: {kind}\n  {text}\n  {wrong}")
    return Result(k, f"{kind.family or 'cpu'}/{kind.dtype}/{kind.library}", done, failures, by_luck)


def weight(kind: Kind) -> float:
    """How many problems of a kind there are beside others, so that none takes most of the time."""
    slow = [
        (OF_JAX, kind.library == "jax"), (OF_FEW, kind.few), (OF_BLOCKS, kind.blocks is not None),
        (OF_RAGGED, kind.lengths),
    ]  # fmt: skip
    return math.prod(share for share, applies in slow if applies)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end then, whatever is done")
    parser.add_argument("--kinds", type=int, help="default: one for every 4000 problems (CPU: 10), 20 at least")
    parser.add_argument("--seed", type=int, help="default: the time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; default: the cores")
    parser.add_argument("--cpu", action="store_true", help="NumPy's way even where there is a GPU")
    parser.add_argument("--family", choices=FAMILIES, help="only these kernels")
    parser.add_argument("--dtype", choices=(*FLOATS, FLOAT8), help="only this one")
    parser.add_argument("--library", choices=("numpy", "cupy", "torch", "jax"), help="only this one's arrays")
    parser.add_argument(
        "--only", metavar="K:N", help="problem N of kind K of that seed; the other options as they were"
    )
    parser.add_argument("--record", type=Path, metavar="PATH", help="add what was run to this list (JSON)")
    parser.add_argument("--go-on", action="store_true", help="where the record's runs of these sources ended, until "
                        "there are as many PROBLEMS in all")  # fmt: skip
    args = parser.parse_args(arguments)
    if not args.cpu and no_gpu():
        print(f"on the CPU: {no_gpu()}")
        args.cpu = True
    if args.cpu and args.family:
        parser.error(f"--family {args.family} needs a GPU")
    if args.go_on and not args.record:
        parser.error("--go-on needs --record PATH")
    if args.only and args.seed is None:
        parser.error("--only needs --seed")
    names = [x for x in libraries(not args.cpu) if args.library in (None, x)]
    if not names:
        parser.error(f"--library: {args.library} is not there, or not for this device")
    if args.only:
        k, n = map(int, args.only.split(":"))
        result = run_kind(Work(args, k, range(n, n + 1), names))
        print("\n".join(result.failures) or "right")
        return bool(result.failures)

    def of(k: int) -> float:
        return 1 if args.cpu else weight(kind_of(args, k, names))

    return go_over(args, run_kind, names, of, PROBLEMS_OF_A_KIND["cpu" if args.cpu else "gpu"])


if __name__ == "__main__":
    sys.exit(main())
