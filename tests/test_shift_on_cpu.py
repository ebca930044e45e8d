"""The shift of J u, without a GPU: what scores' tangents have in common is not rounded into the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, compile_all, needs_compiler
from on_cpu import Guarded, run
from reference import standard, state
from reference_tangents import tangents

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import JVP
from cupyflash.problem import Given

pytestmark = needs_compiler
pytest.importorskip("cupyflash.gpu.tensormap", reason="needs CuPy")

ARCHS = {
    "sm90": Arch("sm_90a", 90, 3, 232448),
    "sm80": Arch("sm_80", 80, 3, 166912),
    "simt": Arch("sm_80", 80, 3, 166912),
}
LENGTH, DIM = 200, 32


def away_from_the_diagonal(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """Scores grow by 30 a tile from key 199 down to key 0, and their tangents by 120."""
    q, k, v = rng.standard_normal((3, 1, LENGTH, 1, DIM)) * 0.1
    q[..., 0], k[..., 0] = 1, np.arange(LENGTH, 0, -1).reshape(1, -1, 1) * 0.5
    return {"causal": True, "scale": 1.0}, {"q": q, "k": k, "v": v}, {"q": 4 * q}


def window(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
    """All keys share a tangent of 80, and some rows see nothing of their thread block's first tile."""
    q, k, v = rng.standard_normal((3, 1, LENGTH, 1, DIM))
    tq = rng.standard_normal(q.shape)
    tq[..., 0], q[..., 0], k[..., 0] = 80, 0, 1
    return {"window": (24, 24), "scale": 0.25}, {"q": q, "k": k, "v": v}, {"q": 4 * tq}


@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("case", [away_from_the_diagonal, window])
def test_shift(case: Any, family: str, rng: np.random.Generator) -> None:
    options, drawn, moves = case(rng)
    arrays = {name: x.astype(np.float16) for name, x in drawn.items()}
    moved = {name: x.astype(np.float16) for name, x in moves.items()}
    q, k, v = arrays.values()
    problem = state(q, k, v, deterministic=False, **options)
    exact = standard(problem, q, k, v)
    arrays |= {"out": exact.out.astype(np.float16)}
    wanted = tangents(problem, arrays | {"dout": np.zeros_like(v)}, moved)
    asked = replace(problem, tangents=tuple(Given(name, "float16", ()) for name in moved))
    kernels = plan(asked, ARCHS[family], JVP, family)
    (library,) = compile_all(as_cpp(generate(kernels), [x.name for x in kernels.launches]))
    given = {name: Guarded(x.shape, x.dtype, x, True) for name, x in arrays.items()}
    given |= {f"t{name}": Guarded(x.shape, x.dtype, x, True) for name, x in moved.items()}
    given["lse"] = Guarded(exact.lse.shape, np.float32, exact.lse.astype(np.float32))
    given |= {x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes}
    tout, tlse = Guarded(v.shape, np.float16, None, True, True), Guarded(exact.lse.shape, np.float32)
    run(library, kernels, asked, {**given, "tout": tout, "tlse": tlse}, False, ARCHS[family].sms)
    size = np.abs(wanted["tout"]).max()
    np.testing.assert_allclose(tout.array, wanted["tout"], rtol=0, atol=3e-3 * size)
    np.testing.assert_allclose(tlse.array, wanted["tlse"], rtol=2e-6, atol=1e-3)
