"""Problems of the fuzzer whose lengths are data: of the same kinds, on NumPy and CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from backends import Backend, the_arch
from ragged import Case, check_case, draw_case
from reference import state
from score_functions import WRITTEN

from cupyflash import block_mask
from cupyflash.gpu.plan import FAMILIES
from cupyflash.passes import FORWARD
from cupyflash.problem import AttentionProblem

FORMS = [
    ("packed", "packed"), ("packed", "packed"), ("packed", "filled"), ("packed", "paged"), ("packed", "dense"),
    ("dense", "packed"), ("dense", "filled"), ("dense", "paged"),
]  # fmt: skip
SIZES = (1, 2, 15, 16, 17, 40, 130)  # what lengths are up to


def draw(rng: np.random.Generator, kind: Any, dims: tuple[int, int]) -> tuple[Case, dict[str, Any], str]:
    """A case of a kind, how it is called, and what it is."""
    fixed = np.random.default_rng(kind.lengths)  # what kernels are compiled with
    form_q, form_k = FORMS[fixed.integers(len(FORMS))]
    n, most = int(rng.integers(0 if form_q + form_k == "packedpacked" else 1, 9)), SIZES[rng.integers(len(SIZES))]
    lens_q, lens_k = ([int(x) for x in rng.integers(0, most + 1, n)] for _ in range(2))
    if form_q == form_k == "packed" and rng.random() < 0.5:
        lens_k = list(lens_q)
    if n and rng.random() < 0.2:  # one large among small
        lens_k[rng.integers(n)] += int(rng.integers(100, 700))
    lens_q = [most] * n if form_q == "dense" else lens_q
    lens_k = [most] * n if form_k == "dense" else lens_k
    hk, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    names = [name for name, _ in kind.given if name != "seed"]
    lines = tuple(name for name in names if name in ("mask", "bias") and form_q == "packed" and fixed.random() < 0.4)
    page = int(2 ** fixed.uniform(0, 9))
    options: dict[str, Any] = {"causal": kind.causal, "deterministic": kind.deterministic}
    if kind.left or kind.right:
        options["window"] = tuple(int(rng.integers(0, most + 3)) if x else None for x in (kind.left, kind.right))
    if kind.negative:
        options["scale"] = -float(rng.uniform(0.1, 1)) / max(1, dims[0]) ** 0.5
    if kind.softcap:
        options["softcap"] = float(rng.uniform(0.5, 20))
    if kind.dropout:
        options["dropout"] = float(rng.uniform(0.01, 0.6))
    if fixed.random() < 0.2:
        options |= {"batch_invariant": True}
    how: dict[str, Any] = {
        "form_q": form_q, "form_k": form_k, "page": page, "heads": (hk * group, hk), "dims": dims,
        "rest": int(rng.integers(0, 4)), "given": (*names, *["key_mask"] * kind.key_mask, *["seed"] * kind.dropout),
        "lines": lines, "along": kind.along + "".join(axis for axis in "bh" if rng.random() < 0.6),
        "score": kind.score if kind.score in WRITTEN else None, "blocks": kind.blocks, "options": options,
        "integers": (np.int32, np.int64)[fixed.integers(2)],
    }  # fmt: skip
    called = {"layout": ("bshd", "bhsd")[rng.integers(2)], "targets": bool(rng.random() < 0.5)}
    text = f"lengths {lens_q} {lens_k} {how} {called}"
    case = draw_case(rng, lens_q, lens_k, dtype=kind.dtype, **how)
    if kind.latent:
        case.arrays["v"][...] = case.arrays["k"][..., : dims[1]]
        case.options["latent"] = dims[1]
    return case, called, text


def family_for(case: Case, family: str | None) -> str | None:
    """The family to name; None where it leaves the case to others."""
    if family is None or (problem := problem_of(case)).empty:  # of which nobody is asked
        return None
    return None if FAMILIES[family].objection(problem, the_arch(), FORWARD) else family


def problem_of(case: Case) -> AttentionProblem:
    blocks = {} if case.blocks is None else {"block_mask": block_mask(case.blocks, block=16)}
    arrays = (case.arrays[name] for name in "qkv")
    return state(*arrays, **case.options, **case.lengths, **case.given, **blocks)


def run(rng: np.random.Generator, kind: Any, dims: tuple[int, int], said: list[str]) -> None:
    """Draw one and judge it; `said` gets what it is."""
    case, called, text = draw(rng, kind, dims)
    said.append(text)
    named = kind.named and family_for(case, kind.family) is not None
    check_case(case, backward=not kind.latent, **called, on=Backend(kind.family or "cpu", kind.family), named=named)
