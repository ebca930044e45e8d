"""What a patched copy of the tree computes, judged by what the patch says: `python follow.py RECIPE WHERE` in it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pytest
import reference
from backends import CPU
from semantics import Inputs, check, draw_inputs

from cupyflash import attention, attention_backward, merge

OPTIONS: dict[str, dict[str, Any]] = {
    "a scalar on the product": {"squash": 1.5},
    "a scalar that is added": {"slant": 0.07},
    "all": {"squash": 1.5, "slant": 0.07},
}
FAMILIES = {
    "simt": ("float32", "sm_75", 75, 65536), "sm80": ("float16", "sm_80", 80, 166912),
    "sm90": ("bfloat16", "sm_90a", 90, 232448), "tried": ("float32", "sm_80", 80, 166912),
}  # fmt: skip
SHAPES: dict[str, Any] = {"seq": (70, 150), "heads": (4, 2), "dlse": 1.0}

of_the_tree = reference.scores


def scores(problem: Any, s: np.ndarray, given: dict[str, Any], *rounded: Any) -> tuple[np.ndarray, Any]:
    """As the reference has them, with the options of the recipes."""
    shrunk = 1 / (1 + np.abs(s) / problem.squash) if getattr(problem, "squash", 0) else 1.0
    s, slope = of_the_tree(problem, s * shrunk, given, *rounded)
    if getattr(problem, "slant", 0):
        stands = np.arange(problem.seq_q)[:, None] + problem.diagonal
        s = s + (problem.slant * (np.arange(problem.seq_k) - stands)).astype(s.dtype)
    if given.get("key_bias") is not None:
        s = s + given["key_bias"].astype(s.dtype)[:, None, None, :]
    return s, slope * shrunk**2


def follow_scores(recipe: str, where: str) -> None:
    reference.scores = scores
    rng = reference.fresh_rng()
    shapes, options = SHAPES | {"given": ("bias", "alibi_slopes")}, OPTIONS.get(recipe, {})

    def change(inputs: Inputs) -> Inputs:
        if recipe in OPTIONS and recipe != "all":
            return inputs
        key_bias = rng.standard_normal((inputs.q.shape[0], inputs.k.shape[1]), np.float32)
        return inputs._replace(given={**inputs.given, "key_bias": key_bias})

    if where != "numpy":
        from on_cpu import Arch
        from on_cpu import check as check_kernels

        dtype, name, number, memory = FAMILIES[where]
        arch = Arch(name, number, 2, memory)
        return check_kernels(where, arch, rng, dtype, shapes, {"causal": True} | options, change=change, unit=2)
    check(CPU, change(draw_inputs(rng, "float32", key_mask=True, **shapes)), scale=-0.3, window=(40, 9), **options)
    check(CPU, change(draw_inputs(rng, "float64")), **options)


def follow_family(where: str) -> None:
    from on_cpu import Arch
    from on_cpu import check as check_kernels

    dtype, name, number, memory = FAMILIES[where]
    check_kernels(where, Arch(name, number, 2, memory), reference.fresh_rng(), dtype, SHAPES, {"causal": True}, unit=2)


def follow_library() -> None:
    """With one whose arrays are NumPy's but for their class."""

    class Sheet(np.ndarray):
        pass

    Sheet.__module__ = "sheets"
    sheets: Any = types.ModuleType("sheets")
    vars(sheets).update({"Sheet": Sheet} | {name: getattr(np, name) for name in np.__all__})
    sys.modules["sheets"] = sheets
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 30, 4, 16))
    given = [x.view(Sheet) for x in (q, k, v)]
    out, lse = attention(*given, causal=True, return_lse=True)
    found = [out, lse, *attention_backward(out, *given, out, lse, causal=True), merge([out], [lse])[0]]
    whole, rows = attention(q, k, v, causal=True, return_lse=True)
    right = [whole, rows, *attention_backward(whole, q, k, v, whole, rows, causal=True), whole]
    for x, y in zip(found, right, strict=True):
        assert type(x) is Sheet and np.allclose(x, y, rtol=1e-14)
    with pytest.raises(TypeError, match="k is a numpy array but q is a sheets array"):
        attention(given[0], k, v)


def main(recipe: str, where: str) -> None:
    if recipe == "an array library":
        follow_library()
    elif recipe == "a kernel family":
        follow_family(where)
    else:
        follow_scores(recipe, where)


if __name__ == "__main__":
    main(*sys.argv[1:])
