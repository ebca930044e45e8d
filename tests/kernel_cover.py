"""A covering set of kernel configurations, for the tests that plan and compile without a GPU."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import MOVING, PAIRWISE, KernelPlan, features
from cupyflash.gpu.plan import FAMILIES
from cupyflash.passes import FORWARD
from cupyflash.problem import ARRAYS, AXES, FLOAT8, FLOATS, ITEMSIZE, OF_FLOAT8, AttentionProblem, Given
from cupyflash.score import tanh, trace, where

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
DIMS = [(d, d) for d in (16, 32, 64, 80, 96, 128, 160, 192, 256)] + [(192, 128), (64, 96), (256, 32)]
LENGTHS = (1000, 8192)  # tiles may differ; where they do not, the source is the same and is compiled once
FEW = {
    (16, 16): 200,
    (32, 32): 100,
    (64, 64): 1,
    (96, 96): 7,
    (128, 128): 1,
    (192, 128): 30,
    (192, 192): 16,
    (256, 256): 60,
}  # queries: tiles differ

GIVEN = tuple(
    Given(rule.name, rule.dtypes[0], rule.axes) for rule in ARRAYS if not (rule.of_float8 or rule.ragged or rule.placed)
)  # every optional array
BIAS, MASK = (Given("bias", "q", AXES),), (Given("mask", "bool", AXES),)
SLOPES = (Given("alibi_slopes", "float32", ("batch", "head")),)
KEY_MASK = (Given("key_mask", "bool", ("batch", "key")),)  # the one that every family takes

# A score function whose slope is no constant, with a table of what depends on the distance, an array that is read for
# each pair, and one of integers.
SCORE = trace(
    lambda s, b, h, i, j, table, ids: where(ids[b, i] == ids[b, j], 20 * tanh(s / 20) + table[h, j - i], -math.inf),
    {"table": ("float32", 2, False), "ids": ("int32", 2, False)},
)

# What a kernel can be asked, as fields of a problem; "everything" has all the mask's and the score's code at once.
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": "bottom_right", "right": 0},
    "hidden": {"left": 100, "right": 50, "given": KEY_MASK, "scale": -1.0, "deterministic": True},
    "blocks": {"left": 100, "right": 50, "block_mask": ("batch", "head"), "deterministic": True},
    # Beside slopes a soft cap is computed in another way
    "capped": {"causal": "bottom_right", "right": 0, "softcap": 30.0},
    "slopes": {"causal": "bottom_right", "right": 0, "given": SLOPES, "softcap": 30.0},
    "dropped": {"causal": "bottom_right", "right": 0, "dropout": 0.1},
    "window": {"left": 127, "right": 0},  # few key tiles add to a tile of dQ
    "everything": {
        "left": 100, "right": 50, "block_mask": ("batch", "head"), "given": GIVEN, "scale": -1.0, "softcap": 30.0,
        "dropout": 0.1,
        "deterministic": True,
    },
    "score": {"right": 0, "score": SCORE},
}  # fmt: skip


def problem(dtype: str, dim: int = 64, dim_v: int | None = None, **fields: Any) -> AttentionProblem:
    """A problem of ordinary size, whose last query stands on the last key."""
    fields = {"batch": 2, "seq_q": 1000, "seq_k": 1000, "heads_q": 8, "heads_k": 2, "scale": 0.125} | fields
    fields.setdefault("diagonal", fields["seq_k"] - fields["seq_q"])
    given = fields.get("given", ())
    fields["given"] = tuple(x._replace(dtype=dtype if x.dtype == "q" else x.dtype) for x in given)
    return AttentionProblem(dtype=dtype, dim=dim, dim_v=dim if dim_v is None else dim_v, **fields)


def measured(call: list[Any]) -> AttentionProblem:
    """That of a row of measured_*.json."""
    batch, seq_q, seq_k, heads_q, heads_k, dim, causal, left = call
    masked: dict[str, Any] = {"causal": "bottom_right", "right": 0, "left": left} if causal else {}
    return problem("bfloat16", dim, batch=batch, seq_q=seq_q, seq_k=seq_k, heads_q=heads_q, heads_k=heads_k, **masked)


def moving(problem: AttentionProblem, names: Collection[str] = ()) -> AttentionProblem:
    """With tangents of these arrays; of all that may have one, where none is named."""
    read = [x.key for x in problem.score.arrays if x.kind == "float"] if problem.score else []
    can = [name for name in MOVING if problem.has(name) or name in ("q", "k", "v", "dout")] + read
    return replace(problem, tangents=tuple(Given(name, "", ()) for name in can if not names or name in names))


def moving_problems() -> Iterator[AttentionProblem]:
    """A few of each dtype, with tangents of everything; and some with tangents of few arrays."""
    for dtype in FLOATS:
        for dim in (32, 64, 128, 256):
            for name in ("hidden",) if dtype == "float16" else ("nothing", "everything"):
                yield moving(problem(dtype, dim, **FEATURES[name]))
        yield moving(problem(dtype, 64 if dtype == "float16" else 128, **FEATURES["score"]))
    for dtype, dim in (("bfloat16", 128), ("float32", 64)):
        for names in (("q", "k", "v"), ("q",), ("k", "v"), ("v",)):
            yield moving(problem(dtype, dim, **FEATURES["causal"]), names)
        for names in (("bias", "dout"), ("sinks",), ("alibi_slopes", "q")):
            yield moving(problem(dtype, dim, **FEATURES["everything"]), names)
    # What one kernel of H(G) u takes at once.
    most = FEATURES["everything"] | {"given": KEY_MASK + SLOPES, "softcap": None, "deterministic": False}
    for dim, names in ((64, ("q", "k", "v", "dout")), (128, ("q", "k", "v")), (256, ("q", "k", "v"))):
        yield moving(problem("bfloat16", dim, **most), names)


def some_problems(turn: int | None = None) -> Iterator[AttentionProblem]:
    """A first look: few problems, with most of the code in them; with `turn`, of each dtype two head dimensions."""
    for n, (dtype, name) in enumerate(zip(FLOATS, ("everything", "hidden", "everything", "hidden"))):
        for dim in (64, 128, 256) if turn is None else ((64, 128)[(turn + n) % 2], 256):
            yield problem(dtype, dim, **FEATURES[name])
    for n, (dtype, name) in enumerate((("bfloat16", "hidden"), ("float32", "everything"))):
        yield moving(problem(dtype, 128 if turn is None else (64, 128)[(turn + n) % 2], **FEATURES[name]))
    yield problem("bfloat16", 128, given=BIAS)
    yield in_8_bits(128, "causal", True)
    yield next(of_caches())


def in_8_bits(dim: int, name: str, by_block: bool, result: str = OF_FLOAT8[0]) -> AttentionProblem:
    """With a scale for each block, or each head."""
    fields = dict(FEATURES[name])
    scales = [Given(rule.name, "float32", rule.axes[: 2 + by_block]) for rule in ARRAYS if rule.of_float8]
    given = [x._replace(dtype="float32") if x.dtype == "q" else x for x in fields.pop("given", ())]
    return problem(FLOAT8, dim, seq_q=8192, seq_k=8192, out_dtype=result, given=(*given, *scales), **fields)


def of_8_bits() -> Iterator[AttentionProblem]:
    for dim in (64, 128, 256):
        yield in_8_bits(dim, "everything", True)
        yield in_8_bits(dim, "causal", True, FLOAT8)
    yield in_8_bits(128, "nothing", False)
    yield in_8_bits(192, "hidden", False, "float16")


def of_caches() -> Iterator[AttentionProblem]:
    """k and v of 8 bits beside q of 16, with a scale for each row of both, or none."""
    scales = tuple(Given(f"{x}_descale", "float32", ("row", "key_head")) for x in "kv")
    for dim, eight in ((64, "int8"), (128, FLOAT8), (256, "int8"), (512, FLOAT8)):
        for dtype, name, seq_q, own in (
            ("bfloat16", "nothing", 1, scales), ("float16", "nothing", 16, ()), ("float16", "hidden", 1000, scales),
            ("bfloat16", "everything", 16, scales), ("bfloat16", "score", 1000, scales),
        ):  # fmt: skip
            fields = dict(FEATURES[name])
            given = (*fields.pop("given", ()), *own)
            yield problem(dtype, dim, batch=10, seq_q=seq_q, cache_dtype=eight, given=given, **fields)


def of_pairs() -> Iterator[AttentionProblem]:
    both = (*MASK, Given("bias", "float32", AXES))
    for dim in (32, 64, 96, 128, 144, 192, 208, 256):
        for given in (MASK, BIAS, both):
            for length in (49, 1000):
                yield problem("bfloat16", dim, batch=20, seq_q=length, seq_k=length, given=given)
        yield problem("float16", dim, causal="bottom_right", right=0, given=both)
        yield problem("float16", dim, batch=20, seq_q=49, seq_k=49, given=both, block_mask=("batch", "head"))


# Of each family, architectures for which the covering set is compiled. For others, which have the same registers and
# read the same source, some of it.
THOROUGH = {"sm90": ("sm_90a",), "sm80": ("sm_80", "sm_86"), "simt": ("sm_75", "sm_90a"), "flash1": ("sm_75",)}


def wide() -> Iterator[AttentionProblem]:
    """Beyond 256 columns, which tiles fill shared memory with."""
    for dims in ((288, 288), (320, 320), (384, 384), (512, 512), (576, 512), (576, 576)):
        for name in ("nothing", "hidden", "everything"):
            yield problem("bfloat16" if name == "everything" else "float16", *dims, **FEATURES[name])
    for dims in ((64, 512), (512, 64)):
        yield problem("bfloat16", *dims, **FEATURES["causal"])
    # Everything for which there is room beside so many columns.
    given = tuple(x for x in GIVEN if x.name not in PAIRWISE)
    many = FEATURES["everything"] | {"given": given}
    for dims in ((512, 512), (384, 512)):
        yield problem("bfloat16", *dims, **many)
        yield problem("bfloat16", *dims, **many | {"block_mask": None, "batch": 1, "heads_k": 1, "seq_q": 8192})
    yield problem("float16", 160, 512)
    ends = tuple(Given(f"cu_seqlens_{x}", "int32", ("offset",)) for x in "qk")
    yield problem("float16", 384, rows_q=2000, rows_k=2000, right=0, given=(*ends, *MASK))
    yield problem("bfloat16", 512, **FEATURES["score"])
    sinks = (Given("sinks", "float32", ("head",)),)
    for n, name in enumerate(("causal", "window", "capped", "slopes", "dropped")):  # of a cluster, in the forward
        dims = ((512, 512), (384, 384), (448, 512))[n % 3]
        for given in ((), (*KEY_MASK, *sinks)):
            options = FEATURES[name]
            yield problem(
                ("bfloat16", "float16")[n % 2], *dims, **options | {"given": (*options.get("given", ()), *given)}
            )
    yield problem("bfloat16", 512, batch=1, seq_q=100, seq_k=16384)


def latent() -> Iterator[AttentionProblem]:
    """V in K, whose kernel is Hopper's own: tokens and a few more, on arrays, caches and pages."""
    caches = (Given("seqlens_k", "int32", ("sequence",)),)
    pages = (*caches, Given("page_table", "int64", ("sequence", "page")))
    sinks = (Given("sinks", "float32", ("head",)),)
    queries = ((1, 128, ()), (2, 16, sinks), (70, 8, ()), (1, 16, ()), (1, 8, sinks))
    for given, more in (((), {}), (caches, {"cache": 8192}), (pages, {"page": 64, "pages": 900})):
        for n, (seq_q, heads, own) in enumerate(queries):
            for name in ("nothing", "causal", "window"):
                fields = {"latent": 512, "seq_k": 8192, "heads_q": heads, "heads_k": 1, "batch": (64, 3)[n % 2]}
                fields |= more | FEATURES[name] | {"given": (*own, *given), "seq_q": seq_q}
                if given:
                    fields["diagonal"] = 0
                yield problem(("bfloat16", "float16")[n % 2], 576, 512, **fields)


def cover(family: str, arch: str) -> Iterator[AttentionProblem]:
    if family in ("sm80", "sm90") and arch in (*THOROUGH[family], "sm_90a"):  # each has tiles of its own
        yield from wide()
    if arch in THOROUGH[family]:
        yield from problems()
        yield from moving_problems()
        yield from of_8_bits()
        yield from of_caches()
        if family == "sm90":  # where these take room that tiles have elsewhere
            yield from of_pairs()
            yield from latent()
        return
    yield from some_problems(ARCHS.index(arch))
    if (family, arch) == ("sm80", "sm_90a"):  # where doubles have tiles and instructions of their own
        yield from (x for x in problems() if x.dtype == "float64")


def problems() -> Iterator[AttentionProblem]:
    """The covering set. The two 16-bit formats differ in one instruction, so they share the features out."""
    for dtype in FLOATS:
        for dims in DIMS:
            for name, fields in FEATURES.items():
                left_out = {
                    "float16": ("causal", "blocks", "slopes", "dropped", "window"), "bfloat16": ("nothing",),
                    "float32": ("capped", "window"),
                    "float64": ("capped", "window"),
                }  # fmt: skip
                if name in left_out.get(dtype, ()):
                    continue
                everywhere = ("nothing", "causal", *["everything"] * (dtype != "float16"))
                if name in everywhere or dims in ((64, 64), (128, 128)):
                    for length in LENGTHS:
                        yield problem(dtype, *dims, seq_q=length, seq_k=length, **fields)
                    if dims in FEW and ITEMSIZE[dtype] == 2:
                        yield problem(dtype, *dims, batch=10, seq_q=FEW[dims], **fields)
                    for length in (
                        (FEW[dims], 300) if dims in FEW and ITEMSIZE[dtype] == 2 else (300,)
                    ):  # thread blocks share keys
                        yield problem(dtype, *dims, batch=1, seq_q=length, seq_k=16384, **fields)
                    if dims in ((64, 64), (128, 128)) and ITEMSIZE[dtype] == 2:  # tiles of one warpgroup
                        yield problem(dtype, *dims, batch=20, heads_k=8, seq_q=49, seq_k=49, **fields)
                        yield problem(dtype, *dims, batch=20, seq_k=77, **fields)  # a key tile has all keys
    yield problem(
        "bfloat16", 128, batch=1, heads_q=9, heads_k=9, seq_q=512, seq_k=50176
    )  # shares, of which a block has several


FAMILY_ARCHS = [  # architectures from the oldest on
    (family, arch)
    for family, room in FAMILIES.items()
    for arch in ARCHS
    if room.objection(problem("float16"), Arch.of(arch), FORWARD) is None
]


# Numbers that are no part of a tile: they follow from it, or from what is asked.
FOLLOWS = re.compile("SHARED_MEMORY.*|ADDED.*|SUM_TILES|PACK|DOT|KEY_BOX|SHARES")


ASKED = {name for name, _ in features(problem("float16"))}  # constants of the mask and the score


def tile(plan: KernelPlan) -> tuple[Any, ...]:
    """Its tile, head dimensions among it; the two 16-bit formats share one."""
    numbers = [(k, v) for k, v in plan.constants if not isinstance(v, bool) and not FOLLOWS.fullmatch(k)]
    return (plan.source, plan.dtype.replace("bfloat16", "float16"), bool(plan.wrt), *numbers)


def together(plans: Sequence[KernelPlan]) -> list[int]:
    """What meets in each plan, as bits: every two constants of its kernel file, of those that differ between plans; its
    dtype and what it declares to spill; and a tile with the most that is switched on beside it, on Hopper with each set
    of features.

    Dtypes, the architecture and what a gradient is of are constants, too. Shared memory is not: it follows from others.
    """
    stated = [
        {k: v for k, v in x.constants if k != "SHARED_MEMORY"}
        | {"dtype": x.dtype, "out": x.out_dtype, "arch": x.arch, "wrt": x.wrt[:1]}
        for x in plans
    ]
    values = defaultdict(set)
    for x, constants in zip(plans, stated):
        for name, value in constants.items():
            values[x.source, name].add(value)
    switched_on = [sum(value is True for _, value in x.constants) for x in plans]
    most: dict[Any, int] = {}
    for x, number in zip(plans, switched_on):
        most[tile(x)] = max(number, most.get(tile(x), 0))
    bits: dict[Any, int] = {}
    found = []
    for x, constants, number in zip(plans, stated, switched_on):
        differing = [item for item in constants.items() if len(values[x.source, item[0]]) > 1]
        met = [*combinations_with_replacement([("file", x.source), *differing], 2), (x.dtype, x.spills)]
        met += [("most", tile(x))] if number == most[tile(x)] else []
        if x.family == "sm90":  # whose rows say what one set of features spills
            met.append((tile(x), x.spills, tuple(value for name, value in x.constants if name in ASKED)))
        found.append(sum(1 << bits.setdefault((x.source, *both), len(bits)) for both in met))
    return found


def few(plans: Sequence[KernelPlan], before: Sequence[KernelPlan] = ()) -> list[KernelPlan]:
    """Some of these plans, in which everything meets that meets in all of them (`together`), but for what has met in
    `before`. The one in which most meets anew comes first."""
    met = together([*plans, *before])
    left = 0
    for bits in met:
        left |= bits
    for bits in met[len(plans) :]:
        left &= ~bits
    found = []
    while left:
        best = max(range(len(plans)), key=lambda n: (met[n] & left).bit_count())
        found.append(plans[best])
        left &= ~met[best]
    return found


def cached(batch: int, rows: int, heads: tuple[int, int] = (32, 8), seq_q: int = 1, **options: Any) -> AttentionProblem:
    """Few queries on caches of so many rows."""
    given = (Given("seqlens_k", "int32", ("sequence",)),)
    return problem(
        "bfloat16", 128, batch=batch, seq_q=seq_q, seq_k=rows, heads_q=heads[0], heads_k=heads[1], cache=rows,
        diagonal=0, given=given, **options,
    )  # fmt: skip


# A family, what it is compiled for, and a head dimension, of which spills are looked at where an option is new.
COMPILED = [
    ("sm90", "sm_90a", 64),
    ("sm90", "sm_90a", 128),
    ("sm90", "sm_90a", 256),
    ("sm90", "sm_90a", 512),
    ("sm80", "sm_80", 128),
    ("simt", "sm_75", 64),
]
