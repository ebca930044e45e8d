"""The Hopper kernel of latent attention, run without a GPU, beside each sequence from its scores in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from lengths_on_cpu import Sequences
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import shares, sm90_latent
from cupyflash.gpu.families.shares import Dealt
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


def check(of: Sequences, options: dict[str, Any], sinks: np.ndarray | None = None, last_first: bool = False) -> Any:
    q, k = of.of_queries("q"), of.of_keys("k")
    given = of.lengths() | ({} if sinks is None else {"sinks": sinks})
    problem = state(q, k, k[..., :N], latent=N, **options, **given)
    assert sm90_latent.objection(problem, GPU) is None
    assert "batch_invariant" in (sm90_latent.objection(replace(problem, batch_invariant=True), GPU) or "")
    kernels = plan(problem, GPU)
    assert kernels.source == "sm90/latent.cu"
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
    return kernels


@cases(CASES, "one tile, several, none, a few keys", "pages of 16", "a window")
@pytest.mark.parametrize("last_first", [False, True])
def test_each_sequence(case: str, last_first: bool, rng: np.random.Generator) -> None:
    how = dict(CASES[case])
    options, sinks = how.pop("options", {}), how.pop("sinks", False)
    of = drawn(rng, **how)
    check(of, options, rng.standard_normal(how["heads"][0]).astype("f4") if sinks else None, last_first)


def test_maxima_that_grow(rng: np.random.Generator) -> None:
    """From tile to tile, in either warpgroup: O so far and the sums of both shrink."""
    of = drawn(rng, 1, [400, 330], (16, 1), large=1.0)
    for n, keys in enumerate(of.keys):
        times = np.linspace(6, 0.1, keys)[:, None, None] if n == 0 else rng.choice([0.1, 6.0], (keys, 1, 1))
        of.own["k"][n] = (of.own["k"][n] * times).astype("f2")
        of.own["v"][n] = of.own["k"][n][..., :N]
    check(of, {"scale": 0.2})


@pytest.mark.parametrize("k", ["dense", "cache"])
def test_keys_in_shares(k: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of each sequence, of which some are empty."""
    monkeypatch.setattr(shares, "shares", lambda *_: Dealt(3, 0))
    of = drawn(rng, 2, [300], (8, 1), k=k) if k == "cache" else drawn(rng, 2, [300, 300], (8, 1), k=k)
    kernels = check(of, {"causal": True}, rng.standard_normal(8).astype("f4"))
    assert dict(kernels.constants)["SHARES"] and not dict(kernels.constants)["SHARE_TILES"]


@pytest.mark.parametrize("keys", [[300, 3, 500, 0], [64, 900, 100], [200, 190, 180, 170]], ids=str)
@pytest.mark.parametrize(("heads", "few"), [(8, 2048), (8, 0), (80, 2048)])
def test_keys_in_shares_by_length(
    keys: list[int], heads: int, few: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut is what is longer than what each of the two blocks has to do; what is not has no parts to be put together."""
    monkeypatch.setattr(sm90_latent, "LEAST_TILES", 1)
    monkeypatch.setattr(sm90_latent, "FEW_ROWS", few)
    of = drawn(rng, 1 if heads > 64 else 3, keys, (heads, 1), k="paged", page=32)
    kernels = check(of, {"causal": True}, rng.standard_normal(heads).astype("f4"))
    assert dict(kernels.constants)["SHARE_TILES"] == 1
