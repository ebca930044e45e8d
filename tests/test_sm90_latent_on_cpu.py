"""The Hopper kernel of latent attention, run without a GPU, beside each sequence from its scores in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from kernel_cover import latent
from lengths_on_cpu import Sequences
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm90_latent
from cupyflash.gpu.families.shares import Dealt
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)  # two blocks take tile after tile
D, N = 576, 512
CASES: dict[str, dict[str, Any]] = {
    "one tile, several, none, a few keys": {"rows": 1, "keys": [64, 200, 0, 3], "heads": (16, 1)},
    "an even number of tiles": {"rows": 2, "keys": [128, 256, 250], "heads": (16, 1), "options": {"causal": True}},
    "more heads than a tile has": {"rows": 1, "keys": [70, 130], "heads": (80, 1), "k": "paged", "page": 64},
    "pages of 16": {"rows": 3, "keys": [100, 33, 17], "heads": (8, 1), "k": "paged", "page": 16},
    "pages of 24": {"rows": 1, "keys": [100, 33], "heads": (8, 2), "k": "paged", "page": 24,
                    "options": {"causal": True}},
    "dense": {"rows": 2, "keys": [150, 150], "heads": (12, 2), "k": "dense", "options": {"causal": True}},
    "dense, a tile for each head": {"rows": 70, "keys": [90], "heads": (2, 1), "k": "dense",
                                    "options": {"causal": True}},
    "a window": {"rows": 4, "keys": [200, 300, 5], "heads": (4, 1), "options": {"causal": True, "window": (50, None)}},
    "top left, sinks": {"rows": 5, "keys": [140, 2, 0], "heads": (4, 1), "options": {"causal": "top_left"},
                        "sinks": True},
    "narrower keys": {"rows": 1, "keys": [100, 65], "heads": (16, 1), "dim": 528},
    "a negative scale": {"rows": 1, "keys": [130], "heads": (16, 1), "options": {"scale": -0.05}},
}  # fmt: skip
# Those with few rows, which have a kernel of their own, by the one for many, too.
BY_64 = {f"{name}, 64 rows": x for name, x in CASES.items() if x["rows"] * x["heads"][0] <= 32 * x["heads"][1]}


def drawn(rng: np.random.Generator, rows: int, keys: list[int], heads: tuple[int, int], **how: Any) -> Sequences:
    dim, large = how.pop("dim", D), how.pop("large", 1.0)
    how = {"q": "dense", "k": "cache", "dtype": "float16", "behind": 9, "dims": (dim, N)} | how
    of = Sequences(rng, [rows] * len(keys), keys, heads=heads, **how)
    for n in range(of.count):
        of.own["k"][n] = (of.own["k"][n] * large).astype("f2")
        of.own["v"][n] = of.own["k"][n][..., :N]
    return of


def exact(of: Sequences, n: int, problem: Any, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """O (rows, heads, N) and lse (heads, rows) of one sequence, in float64."""
    q, k = (of.own[x][n].astype("f8") for x in "qk")
    k = k.repeat(len(q[0]) // max(1, k.shape[1]), 1)
    s = np.einsum("qhd,khd->hqk", q, k) * problem.scale
    top_left = problem.causal == "top_left"
    at = np.arange(len(k))[None] - np.arange(len(q))[:, None] - (0 if top_left else len(k) - len(q))
    hidden = np.zeros(at.shape, bool)
    if problem.right is not None:
        hidden |= at > problem.right
    if problem.left is not None:
        hidden |= at < -problem.left
    s = np.where(hidden, -np.inf, s)
    beside = (
        np.full((s.shape[0], s.shape[1], 1), -np.inf)
        if sinks is None
        else sinks[:, None, None] + np.zeros_like(s[..., :1], shape=(*s.shape[:2], 1))
    )
    both = np.concatenate([s, beside], -1)
    top = both.max(-1, keepdims=True)
    e = np.exp(both - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(total[..., 0]) + np.where(np.isfinite(top), top, 0)[..., 0]
        weights = np.nan_to_num(e / total)
    return np.einsum("hqk,khd->qhd", weights[..., :-1], k[..., :N]), lse


def check(
    of: Sequences,
    options: dict[str, Any],
    sinks: np.ndarray | None = None,
    last_first: bool = False,
    gpu: Arch = GPU,
    few: bool = True,
) -> tuple[KernelPlan, dict[str, Guarded]]:
    """The plan, and the workspaces as it left them. few: whether the kernel for few rows has run."""
    q, k = of.of_queries("q"), of.of_keys("k")
    given = of.lengths() | ({} if sinks is None else {"sinks": sinks})
    problem = state(q, k, k[..., :N], latent=N, **options, **given)
    assert sm90_latent.objection(problem, gpu) is None
    assert "batch_invariant" in (sm90_latent.objection(replace(problem, batch_invariant=True), gpu) or "")
    kernels = plan(problem, gpu)
    assert kernels.source == ("sm90/latent_few.cu" if few else "sm90/latent.cu")
    (library,) = compile_all(as_cpp(generate(kernels), list(dict.fromkeys(x.name for x in kernels.launches))))
    arrays = {name: Guarded(x.shape, x.dtype, x, rows_aligned=True) for name, x in {"q": q, "k": k, **given}.items()}
    arrays["v"] = arrays["k"]
    out = Guarded((*q.shape[:-1], N), q.dtype)
    lse = Guarded((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    spaces = {x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes}
    run(library, kernels, problem, arrays | spaces | {"out": out, "lse": lse}, last_first, 2)
    for n in range(of.count):
        wanted, of_rows = exact(of, n, problem, sinks)
        scale = max(1.0, abs(wanted).max(initial=0))
        np.testing.assert_allclose(out.array[n].astype("f8"), wanted, rtol=2e-3, atol=2e-3 * scale, err_msg=f"out {n}")
        np.testing.assert_allclose(lse.array[n], of_rows, rtol=1e-4, atol=1e-3, err_msg=f"lse {n}")
    return kernels, spaces


@pytest.fixture
def by_64(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Few rows, by the kernel for many."""
    return lambda: monkeypatch.setattr(sm90_latent, "FEW_ROWS", 0)


@cases(
    [*CASES, *BY_64],
    "one tile, several, none, a few keys", "pages of 16", "a window", "pages of 24", "more heads than a tile has",
    "pages of 16, 64 rows", "a window, 64 rows",
)  # fmt: skip
@pytest.mark.parametrize("last_first", [False, True])
def test_each_sequence(case: str, last_first: bool, rng: np.random.Generator, by_64: Callable[[], None]) -> None:
    few = case in CASES and f"{case}, 64 rows" in BY_64
    how = dict((CASES | BY_64)[case])
    if case in BY_64:
        by_64()
    options, sinks = how.pop("options", {}), how.pop("sinks", False)
    of = drawn(rng, **how)
    check(of, options, rng.standard_normal(how["heads"][0]).astype("f4") if sinks else None, last_first, few=few)


@pytest.mark.parametrize("few", [True, False])
def test_maxima_that_grow(few: bool, rng: np.random.Generator, by_64: Callable[[], None]) -> None:
    """From tile to tile, in either warpgroup: O so far and the sums of both shrink."""
    if not few:
        by_64()
    of = drawn(rng, 1, [400, 330], (16, 1), large=1.0)
    for n, keys in enumerate(of.keys):
        times = np.linspace(6, 0.1, keys)[:, None, None] if n == 0 else rng.choice([0.1, 6.0], (keys, 1, 1))
        of.own["k"][n] = (of.own["k"][n] * times).astype("f2")
        of.own["v"][n] = of.own["k"][n][..., :N]
    check(of, {"scale": 0.2}, few=few)


def test_products_that_overflow_where_maxima_are_old(rng: np.random.Generator) -> None:
    """A row's maximum is raised where its keys do not fit beside that of before, in any warp; others stay."""
    of = drawn(rng, 1, [520, 200], (32, 1))
    for n, keys in enumerate(of.keys):
        of.own["k"][n][:] = (0.05 * of.own["k"][n]).astype("f2")
        of.own["k"][n][keys - 7] = 0
        of.own["k"][n][keys - 7, :, : 32 // (n + 1)] = 4
        of.own["v"][n] = of.own["k"][n][..., :N]
    check(of, {"scale": 0.5})


@pytest.mark.parametrize(
    ("k", "split", "few", "processors", "blocks"),
    [("dense", 2048, True, 2, 1), ("dense", 2048, True, 70, 2), ("cache", 2048, True, 132, 4),
     ("cache", 2048, False, 100, 4), ("dense", 0, True, 132, 1), ("dense", 0, False, 132, 1)],
)  # fmt: skip
def test_keys_in_shares(
    k: str,
    split: int,
    few: bool,
    processors: int,
    blocks: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    by_64: Callable[[], None],
) -> None:
    """As many of each sequence, of which some are empty; each row by one block, or by several."""
    monkeypatch.setattr(shares, "shares", lambda *_: Dealt(3, 0))
    monkeypatch.setattr(sm90_latent, "SPLIT_ROWS", split)
    if not few:
        by_64()
    of = drawn(rng, 2, [300], (8, 1), k=k) if k == "cache" else drawn(rng, 2, [300, 300], (8, 1), k=k)
    gpu = Arch("sm_90a", 90, processors, 232448)
    kernels, _ = check(of, {"causal": True}, rng.standard_normal(8).astype("f4"), gpu=gpu, few=few)
    constants = dict(kernels.constants)
    assert constants["SHARES"] and not constants["LEAST_TILES"] and constants["ROW_BLOCKS"] == blocks


def test_rows_say_which_kernel() -> None:
    """And of how many rows a tile is, whether keys are asked for ahead, and by how many blocks a row is combined."""
    one = next(x for x in latent() if not x.given and x.seq_q == 1 and x.right is None)
    for heads, seq_q, rows, ahead, blocks in (
        (1, 1, 8, 0, 4), (8, 1, 8, 0, 4), (9, 1, 16, 0, 4), (16, 1, 16, 0, 4), (16, 2, 32, 0, 4), (8, 3, 32, 0, 4),
        (33, 1, 64, 0, 4), (16, 3, 64, 0, 2), (64, 1, 64, 0, 2), (128, 1, 64, 2, 1), (1, 33, 64, 0, 4),
    ):  # fmt: skip
        made = plan(replace(one, batch=1, heads_q=heads, seq_q=seq_q), Arch.of("sm_90a"))
        told = dict(made.constants)
        assert made.source == ("sm90/latent.cu" if rows == 64 else "sm90/latent_few.cu"), (heads, seq_q)
        assert (told["ROWS"], told["AHEAD"], told["ROW_BLOCKS"]) == (rows, ahead, blocks), (heads, seq_q)
        assert made.launches[1].grid == heads * seq_q * blocks and made.launches[1].threads == 512


# Lengths, and on how many multiprocessors; into how many parts sequences are cut, those that are.
STRETCHES: dict[str, tuple[list[int], int, list[int]]] = {
    "one that is long": ([64, 2000, 100], 6, [6]),
    "not where it begins": ([300, 3, 500, 0], 2, []),  # an edge stands at the first key of the third
    "each its own": ([500, 510, 490], 3, []),
    "each its own, in parts": ([600, 600], 4, [2, 2]),
    "not at the end": ([700, 900], 5, [2, 3]),  # another stands before the last key tile of the first
    "many": ([3000 if n == 33 else 40 * (n % 5) for n in range(37)], 7, [3]),
    "one after the other": ([900, 800, 700, 900], 3, [2, 2]),
    "none has keys": ([0] * 3, 4, []),
    "the first and the last have none": ([0, 0, 900, 0], 3, [3]),
    "shorter than a begin": ([64] * 9, 4, []),
}


def parts_of(spaces: dict[str, Guarded]) -> list[int]:
    """How many parts each tile of queries has that was cut; each of them stands at one place."""
    notes = [tuple(map(int, x)) for x in spaces["share_notes"].array if x[3]]
    tiles = sorted({(batch, head, parts) for batch, head, _, parts in notes})
    assert sorted(notes) == sorted((*tile[:2], n, tile[2]) for tile in tiles for n in range(tile[2]))
    return [parts for _, _, parts in tiles]


@cases(STRETCHES, "one that is long", "many", "none has keys")
@pytest.mark.parametrize(("last_first", "few"), [(False, True), (True, True), (True, False)])
def test_equal_stretches_of_all_keys(
    case: str,
    last_first: bool,
    few: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    by_64: Callable[[], None],
) -> None:
    keys, processors, parts = STRETCHES[case]
    if not few:
        by_64()
    monkeypatch.setattr(sm90_latent, "LEAST_TILES", 4)
    of = drawn(rng, 3, keys, (8, 1), k="paged", page=32, behind=300)
    sinks = rng.standard_normal(8).astype("f4")
    kernels, spaces = check(of, {"causal": True}, sinks, last_first, Arch("sm_90a", 90, processors, 232448), few)
    assert dict(kernels.constants)["LEAST_TILES"] == 4 and kernels.launches[0].grid == processors
    assert parts_of(spaces) == parts


def test_shares_leave_as_much_whatever_the_lengths() -> None:
    for problem in latent():
        if not problem.has("seqlens_k") or problem.page or problem.left is not None or problem.seq_q > 32:
            continue
        for keys in (1000, 10**6):
            made = plan(replace(problem, seq_k=keys, cache=keys), Arch.of("sm_90a"))
            space = next(x for x in made.workspace if x.name == "share_out")
            assert dict(made.constants)["LEAST_TILES"] and space.shape[0] <= 2 * 132 * sm90_latent.ROWS
        # Where the line would not fit 32 bits each sequence has as many shares.
        made = plan(replace(problem, seq_k=2**28, cache=2**28, batch=1000), Arch.of("sm_90a"))
        assert not dict(made.constants)["LEAST_TILES"]


@pytest.mark.parametrize("processors", [2, 5, 6, 17])
def test_tiles_that_share_keys(processors: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of queries of each sequence: blocks side by side, where they are even or one more leaves few idle."""
    monkeypatch.setattr(sm90_latent, "LEAST_TILES", 4)
    of = drawn(rng, 1, [700, 70, 0, 400, 5], (80, 1), k="cache")
    kernels, spaces = check(of, {}, gpu=Arch("sm_90a", 90, processors, 232448), few=False)
    scalars = dict(kernels.scalars)
    assert (kernels.launches[0].grid, scalars["columns"]) == {2: (2, 2), 5: (5, 1), 6: (6, 2), 17: (16, 2)}[processors]
    parts_of(spaces)
