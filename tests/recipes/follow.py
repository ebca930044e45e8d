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
import tangents
from backends import CPU
from semantics import Inputs, check, draw_inputs

from cupyflash import attention, attention_backward, attention_backward_jvp, attention_jvp, merge

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
    shrunk = 1 / np.sqrt(1 + (s / problem.squash) ** 2) if getattr(problem, "squash", 0) else 1.0
    s, slope = of_the_tree(problem, s * shrunk, given, *rounded)
    if getattr(problem, "slant", 0):
        stands = np.arange(problem.seq_q)[:, None] + problem.diagonal
        s = s + (problem.slant * (np.arange(problem.seq_k) - stands)).astype(s.dtype)
    if given.get("key_bias") is not None:
        s = s + given["key_bias"].astype(s.dtype)[:, None, None, :]
    return s, slope * shrunk**3


def follow_scores(recipe: str, where: str) -> None:
    reference.scores, tangents.MOST = scores, -1  # the reference's tangents know no recipes
    rng = reference.fresh_rng()
    shapes, options = SHAPES | {"given": ("bias", "alibi_slopes")}, OPTIONS.get(recipe, {})

    def change(inputs: Inputs) -> Inputs:
        if recipe in OPTIONS and recipe != "all":
            return inputs
        key_bias = rng.standard_normal((inputs.q.shape[0], inputs.k.shape[1]), np.float32)
        return inputs._replace(given={**inputs.given, "key_bias": key_bias})

    if where.startswith("tangents "):
        return follow_tangents(where.split()[1], rng, shapes, options, change)
    if where != "numpy":
        from on_cpu import Arch
        from on_cpu import check as check_kernels

        dtype, name, number, memory = FAMILIES[where]
        arch = Arch(name, number, 2, memory)
        return check_kernels(where, arch, rng, dtype, shapes, {"causal": True} | options, change=change, unit=2)
    check(CPU, change(draw_inputs(rng, "float32", key_mask=True, **shapes)), scale=-0.3, window=(40, 9), **options)
    check(CPU, change(draw_inputs(rng, "float64")), **options)


def differences(function: Any, moved: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What results change by along tangents of the arrays that they are a function of."""
    ahead, behind = (function({name: e * x for name, x in moved.items()}) for e in (1e-5, -1e-5))
    return [(x - y) / 2e-5 for x, y in zip(ahead, behind)]


class Moving:
    """What tests/tangents.py has under this name, by differences of results on NumPy in float64."""

    options: dict[str, Any]

    def __init__(self, problem: Any, arrays: dict[str, np.ndarray], moved: dict[str, np.ndarray]) -> None:
        arrays, moved = ({name: np.asarray(x, np.float64) for name, x in y.items()} for y in (arrays, moved))
        own = {"causal": True, **self.options}
        wrt = [name for name in arrays if name in ("bias", "alibi_slopes", "key_bias")]

        def results(by: dict[str, np.ndarray]) -> list[np.ndarray]:
            q, k, v, dout, dlse, *others = (arrays[x] + by.get(x, 0) for x in ("q", "k", "v", "dout", "dlse", *wrt))
            given = own | dict(zip(wrt, others))
            out, lse = attention(q, k, v, return_lse=True, **given)
            grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **given)
            return [out, lse, *grads, *grads.of_arrays.values()]

        names = ["tout", "tlse", "tdq", "tdk", "tdv", *(f"td{name}" for name in wrt)]
        of_inputs = {name: x for name, x in moved.items() if name not in ("dout", "dlse")}
        self.exact = dict(zip(names, differences(results, moved))) | dict(
            zip(names[:2], differences(results, of_inputs))
        )

    def judge(self, name: str, actual: np.ndarray) -> None:
        right = self.exact[name].reshape(actual.shape)
        assert np.abs(actual - right).max() <= 2e-5 * np.abs(right).max(), name


def follow_tangents(
    where: str, rng: np.random.Generator, shapes: dict[str, Any], options: dict[str, Any], change: Any
) -> None:
    """Both passes of tangents, in kernels, or on NumPy."""
    Moving.options = options
    if where == "numpy":
        q, k, v, dout, _, dlse, given = change(draw_inputs(rng, "float64", **shapes))
        given = {name: x.astype(np.float64) for name, x in given.items()}
        arrays = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, **given}
        moved = {name: rng.standard_normal(x.shape) for name, x in arrays.items()}
        judge = Moving(None, arrays, moved)
        own = {"causal": True, **options, **given}
        out, lse = attention(q, k, v, return_lse=True, **own)
        of_inputs = {name: x for name, x in moved.items() if name not in ("dout", "dlse")}
        found = dict(zip(("tout", "tlse"), attention_jvp(of_inputs, q, k, v, out, lse, **own)))
        grads = attention_backward_jvp(moved, dout, q, k, v, out, lse, dlse=dlse, wrt=tuple(given), **own)
        found |= {f"t{name}": x for name, x in grads._asdict().items()}
        for name, x in (found | {f"td{name}": x for name, x in grads.of_arrays.items()}).items():
            judge.judge(name, x)
        return
    import on_cpu_tangents
    from on_cpu import Arch

    vars(on_cpu_tangents).update(Moving=Moving, draw_inputs=lambda *args, **named: change(draw_inputs(*args, **named)))
    dtype, name, number, memory = FAMILIES[where]
    on_cpu_tangents.check(where, Arch(name, number, 2, memory), rng, dtype, shapes, {"causal": True} | options)


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
