"""Lengths in memory, in kernels that run without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from lengths_on_cpu import WIDTH, Ran, Sequences, check, check_case, check_invariant, check_nonsense, plans_of
from ragged import draw_case
from reference import state
from semantics import draw_blocks

from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import key_tiles, places, query_tiles
from cupyflash.gpu.plan import plan
from cupyflash.passes import BACKWARD, FORWARD, Pass
from cupyflash.problem import View
from cupyflash.rules import describe

pytestmark = needs_compiler
ARCHS = {"simt": Arch("sm_75", 75, 2, 65536), "sm80": Arch("sm_80", 80, 2, 166912)}
QUERIES, KEYS = [40, 0, 65, 1], [33, 5, 64, 90]  # tiles have 64 rows, or 32
N, HEADS, ROWS = 4, 4, 106 + 5  # with those behind
Case = Callable[[np.random.Generator], tuple[Sequences, dict[str, Any], dict[str, np.ndarray]]]


def packed(rng: np.random.Generator, queries: list[int] = QUERIES, keys: list[int] = KEYS, **how: Any) -> Sequences:
    return Sequences(rng, queries, keys, **how)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def view(shape: tuple[int, ...], dtype: str = "float16") -> View:
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    return View(shape, tuple(strides), dtype, "cuda:0", "cupy")


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.random(shape) < 0.75


OF_KEYS = [7] * 4, KEYS
CASES: dict[str, Case] = {
    "packed": lambda r: (packed(r, [70, 0, 1, 64, 33], [80, 3, 0, 64, 130]), {}, {}),
    "packed, a window": lambda r: (packed(r, offsets="int64"), {"causal": True, "window": (20, None)}, {}),
    "packed, both sides": lambda r: (packed(r), {"window": (11, 7)}, {}),
    "packed on caches": lambda r: (packed(r, keys=[33, 0, 64, 90], k="cache"), {"causal": True}, {}),
    "packed on keys for each": lambda r: (packed(r, keys=[37] * 4, k="dense"), {"causal": True}, {}),
    "queries for each on packed": lambda r: (packed(r, [9] * 4, q="dense"), {"causal": "top_left"}, {}),
    "queries for each on caches": lambda r: (packed(r, *OF_KEYS, q="dense", k="cache"), {"causal": True}, {}),
    "pages": lambda r: (packed(r, k="paged", offsets="int64"), {"causal": True, "window": (30, None)}, {}),
    "pages of 1": lambda r: (packed(r, [1] * 4, q="dense", k="paged", page=1), {}, {}),
    "float16, pages": lambda r: (
        packed(r, k="paged", dtype="float16", dims=(40, 24), page=3), {"causal": True, "window": (30, None)},
        {"key_mask": drawn(r, N, 95)},
    ),
    "float64, pages": lambda r: (packed(r, k="paged", dtype="float64", page=16), {"causal": True}, {}),
    "float16": lambda r: (packed(r, dtype="float16", dims=(40, 24)), {"causal": True}, {}),
    "float16, wide": lambda r: (packed(r, dtype="float16", dims=(320, 288), heads=(2, 1)), {"causal": True}, {}),
    "float16, wide, pages": lambda r: (
        packed(r, k="paged", dtype="float16", dims=(512, 264), heads=(2, 1), page=3), {"window": (30, 9)}, {},
    ),
    "float16, caches, a window": lambda r: (packed(r, dtype="float16", k="cache"), {"window": (9, 4)}, {}),
    "float64": lambda r: (packed(r, dtype="float64", dims=(24, 40), k="cache"), {"window": (10, 10)}, {}),
    "bias": lambda r: (
        packed(r), {"causal": True}, {"bias": normal(r, N, HEADS, 70, 95), "mask": drawn(r, 1, HEADS, 65, 90)},
    ),
    "bias for all": lambda r: (packed(r), {}, {"bias": normal(r, 1, 1, 65, 100)}),
    "bias of keys": lambda r: (packed(r), {}, {"bias": normal(r, 1, HEADS, 1, 100)}),
    "bias by line": lambda r: (
        packed(r, lines=("bias", "mask")), {"causal": True},
        {"bias": normal(r, HEADS, ROWS, 95), "mask": drawn(r, 1, ROWS, 90)},
    ),
    "a bias for each line": lambda r: (packed(r, lines=("bias",)), {}, {"bias": normal(r, 1, ROWS, 1)}),
    "slopes, sinks, key mask": lambda r: (
        packed(r), {"causal": True},
        {"alibi_slopes": abs(normal(r, N, HEADS)), "sinks": normal(r, HEADS), "key_mask": drawn(r, N, 95)},
    ),
    "slopes for all, soft cap": lambda r: (
        packed(r), {"window": (20, 3), "softcap": 5.0},
        {"alibi_slopes": abs(normal(r, 1, HEADS)), "sinks": normal(r, HEADS)},
    ),
    "dropout": lambda r: (packed(r), {"dropout": 0.3, "causal": True}, {"seed": np.array(5)}),
    "score function": lambda r: (packed(r), {"score": "s * (1 + 0.1 * b) + 0.01 * (i - j) * h", "causal": True}, {}),
}  # fmt: skip


@cases([f"{family}: {case}" for family in ARCHS for case in CASES],
       "simt: packed", "simt: pages", "sm80: packed on caches")  # fmt: skip
def test_each_as_by_itself(case: str, rng: np.random.Generator) -> None:
    family, case = case.split(": ")
    of, options, others = CASES[case](rng)
    check(family, ARCHS[family], of, options, others, seed=5 if "seed" in others else None)


# Queries and keys of a block mask, and whether a bias that is shorter stands beside it.
MASKS = {
    "longer than all rows": ({"k": "packed"}, (150, 230), False),
    "longer than caches, beside a bias": ({"k": "cache"}, (140, 130), True),
    "as long as sequences": ({"k": "packed"}, (70, 92), False),
    "beside a bias that is shorter": ({"k": "packed", "dtype": "float16"}, (90, 190), True),
    "shorter than what is left behind all": ({"k": "packed", "dtype": "float16", "behind": 300}, (70, 92), False),
}  # fmt: skip


@cases([f"{family}: {case}" for family in ARCHS for case in MASKS], "simt: beside a bias that is shorter")
def test_a_block_mask_of_any_length(case: str, rng: np.random.Generator) -> None:
    """It is by sequence and position, and what no sequence reaches does not count; as NumPy's, too."""
    from cupyflash import attention

    family, case = case.split(": ")
    how, longest, biased = MASKS[case]
    of = packed(rng, **how)
    blocks = draw_blocks(rng, (N, HEADS, *longest), (16, 32))
    others = {"bias": rng.standard_normal((1, HEADS, 66, 91)).astype(WIDTH[of.dtype])} if biased else {}
    found = check(family, ARCHS[family], of, {"window": (60, 9)}, others, blocks=blocks)
    q, k, v = of.of_queries("q"), of.of_keys("k"), of.of_keys("v")
    want = attention(q, k, v, window=(60, 9), block_mask=blocks.mask(), **others, **of.lengths())
    tolerance = 1e-2 if of.dtype == "float16" else 1e-5
    np.testing.assert_allclose(found["out"], want, rtol=tolerance, atol=tolerance)


# Gradients of what scores read; deterministic ones in two orders. `along`: axes along which arrays have all numbers.
GRADIENTS: dict[str, dict[str, Any]] = {
    "one bias for all": {"given": ("bias", "alibi_slopes", "sinks"), "along": "qk"},
    "a bias for each, of caches": {"given": ("bias", "mask"), "form_k": "filled"},
    "a bias by line": {"given": ("bias", "alibi_slopes"), "lines": ("bias",), "along": "bhqk"},
    "relative": {"score": "relative", "given": ("key_mask",)},
    "documents, of caches": {"score": "documents", "form_k": "filled"},
    "by key, by query": {"score": "without_s", "form_q": "dense"},
    "relative, a block mask": {"score": "relative", "blocks": "b", "given": ("sinks",)},
    "float16": {"score": "relative", "dtype": "float16", "given": ("bias", "sinks"), "along": "hqk"},
}
LENGTHS_OF = {"packed": [70, 0, 1, 64], "dense": [33] * 4}


@cases([f"{family}: {case}" for family in ARCHS for case in GRADIENTS], "simt: relative")
def test_gradients_and_their_order(case: str, rng: np.random.Generator) -> None:
    family, case = case.split(": ")
    how = {"dims": (16, 16), "options": {"causal": True, "deterministic": True}} | GRADIENTS[case]
    check_case(family, ARCHS[family], draw_case(rng, LENGTHS_OF[how.get("form_q", "packed")], [80, 3, 0, 130], **how))


INVARIANT: dict[str, Case] = {
    "float16": lambda r: (packed(r, *CHUNKED, dtype="float16", dims=(40, 24)), {}, {"sinks": half(r, HEADS)}),
    "float16, caches, a soft cap": lambda r: (
        packed(r, *CHUNKED, dtype="float16", k="cache"), {"softcap": 30.0, "window": (250, None)}, {}),
    "float64": lambda r: (packed(r, *CHUNKED, dtype="float64", dims=(24, 40)), {}, {}),
    "float32": lambda r: (packed(r, *CHUNKED), {}, {}),
}  # fmt: skip
CHUNKED, CUTS = ([90, 33, 65, 1], [290, 100, 70, 240]), [37, 16, 1, 0]


def half(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return normal(rng, *shape).astype(np.float16)


@cases([f"{family}: {case}" for family in ARCHS for case in INVARIANT if (family, case) != ("sm80", "float32")],
       "sm80: float16")  # fmt: skip
def test_a_sequences_bits_do_not_depend_on_others(case: str, rng: np.random.Generator) -> None:
    """With batch_invariant=True, nor on how its queries are cut."""
    family, case = case.split(": ")
    of, options, others = INVARIANT[case](rng)
    for q in of.own["q"]:  # small scores, and such as grow in some rows and not in others
        q[:40] /= 16
        q[40:] *= rng.choice([1, 4, 16], (len(q[40:]), 1, 1)).astype(q.dtype)
    check_invariant(family, ARCHS[family], of, CUTS, options, others)


SMALL: dict[str, Any] = {"dims": (8, 8), "heads": (2, 1)}
NONSENSE: dict[str, Case] = {
    "packed": lambda r: (
        packed(r, **SMALL), {"causal": True, "window": (20, None)},
        {
            "bias": normal(r, N, 2, 65, 90), "alibi_slopes": normal(r, N, 2), "key_mask": drawn(r, N, 90),
            "mask": drawn(r, 1, 2, 65, 90), "sinks": normal(r, 2),
        },
    ),
    "pages": lambda r: (
        packed(r, k="paged", offsets="int64", lines=("bias",), **SMALL), {"causal": True},
        {"bias": normal(r, 2, ROWS, 90), "alibi_slopes": normal(r, N, 2)},
    ),
    "caches": lambda r: (
        packed(r, k="cache", offsets="int64", **SMALL), {"causal": "top_left"}, {"bias": normal(r, N, 2, 65, 90)},
    ),
}  # fmt: skip


@cases([f"{family}: {case}" for family in ARCHS for case in NONSENSE], "simt: packed")
def test_nonsense_stays_inside(case: str, rng: np.random.Generator) -> None:
    family, case = case.split(": ")
    of, options, others = NONSENSE[case](rng)
    check_nonsense(family, ARCHS[family], of, 60, options, others)


@cases([*ARCHS], "simt")
def test_a_sequence_that_is_longer_than_arrays_over_pairs_sees_nothing(case: str, rng: np.random.Generator) -> None:
    """They end before it does, and the last sequence's with them."""
    of = packed(rng, **SMALL)
    given = {name: np.nan_to_num(x) for name, x in (
        ("q", of.of_queries("q")), ("k", of.of_keys("k")), ("v", of.of_keys("v")))}  # fmt: skip
    given |= {"key_mask": drawn(rng, N, 90), "bias": normal(rng, N, 1, 1, 90)}
    lengths = of.lengths()
    problem = state(**given, **lengths)
    plans = plans_of(problem, ARCHS[case], case, False, {}, {})
    ends = lengths["cu_seqlens_k"].copy()
    ends[1:-1] = ends[1]  # all but the first one's keys are the last one's
    assert ends[-1] - ends[-2] > problem.seq_k == 90
    shapes = {"out": given["q"].shape, "lse": (2, len(given["q"]))}
    found = Ran(plans)(problem, plans, given | lengths | {"cu_seqlens_k": ends}, shapes)
    first, last = lengths["cu_seqlens_q"][[1, -2]]
    assert found["out"][:first].any() and not found["out"][last:].any()
    assert np.isneginf(found["lse"][:, last:]).all()


@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
@pytest.mark.parametrize("form", ["packed", "caches", "dense"])
def test_one_program_whatever_the_others(form: str, of: Pass) -> None:
    """With batch_invariant=True, and no shares of keys; a tile that was timed for other lengths is not taken."""

    def made(invariant: bool, n: int, rows: int, tiles: dict[str, Any] | None = None) -> tuple[Any, ...]:
        q = view((n * rows, 8, 64) if form != "dense" else (n, rows, 8, 64))
        k = view({"packed": (n * 4096, 1, 64), "caches": (n, 4096, 1, 64), "dense": (n, 4096, 1, 64)}[form])
        counts = {"packed": ("cu_seqlens_q", "cu_seqlens_k"), "caches": ("cu_seqlens_q", "seqlens_k"), "dense": ()}
        lengths = {x: view((n + x.startswith("cu"),), "int32") for x in counts[form]}
        problem = describe(q, k, k, batch_invariant=invariant, causal=True, **lengths)
        x = plan(problem, Arch.of("sm_80"), of, "sm80", tiles)
        return x.constants, dict(x.scalars).get("shares")

    timed = {"sm80": (64, 64, 4, 1, 1, 1)}
    assert len({made(True, 1, 1), made(True, 70, 1), made(True, 2, 3000), made(True, 2, 3000, timed)}) == 1
    assert len({made(False, 1, 1), made(False, 2, 3000), made(False, 2, 3000, timed)}) > 1


def test_tiles_have_room() -> None:
    """Each sequence's tiles begin at their place, whatever the lengths, and none reaches into the next one's."""
    from reference import state

    rng = np.random.default_rng(0)
    for size in (1, 16, 64):
        lengths = rng.integers(0, 3 * size + 2, 20)
        of = packed(rng, list(lengths), list(lengths), **SMALL)
        problem = state(of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), **of.lengths())
        begins = np.cumsum([0, *lengths])
        first = begins // size + np.arange(21)
        assert np.all(first[:-1] + -(-lengths // size) <= first[1:])
        rest = -(-of.behind // size)
        assert first[-1] + rest <= places(problem, problem.rows_q, size)
        assert query_tiles(problem, size) == 2 * key_tiles(problem, size) == 2 * places(problem, problem.rows_q, size)
