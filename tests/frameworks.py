"""What the tests of the array libraries share."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference import Standard, assert_as_good, standard, standard_in_own_precision, state
from semantics import Inputs

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": "top_left", "window": (20, None), "scale": 0.3},
    "keys": {"key_mask": True, "window": (40, 9)},
}


SCORES = ("mask", "bias", "alibi_slopes", "sinks")  # optional arrays, to be given with a soft cap


def split(name: str) -> tuple[bool, dict[str, Any]]:
    """An entry of OPTIONS as (whether keys are masked, the rest)."""
    options = dict(OPTIONS[name])
    return options.pop("key_mask", False), options


def references(inputs: Inputs, **options: Any) -> tuple[Standard, Standard]:
    """Exact results, and those of standard attention in the inputs' own precision."""
    problem = state(inputs.q, inputs.k, inputs.v, inputs.key_mask, **options, **inputs.given)
    args = (problem, inputs.q, inputs.k, inputs.v, inputs.key_mask, inputs.dout, inputs.dlse)
    return standard(*args, **inputs.given), standard_in_own_precision(*args, **inputs.given)


def judge(results: dict[str, np.ndarray], exact: Standard, own: Standard) -> None:
    for name, x in results.items():
        assert_as_good(x, getattr(exact, name), getattr(own, name), name, exact.unit(name))


def sleep(stream: Any, cycles: int = 200_000_000) -> None:
    """Keep a CuPy stream busy for about a tenth of a second, so that work that does not wait for it comes too early."""
    import cupy

    code = 'extern "C" __global__ void sleep(long long n) { long long t = clock64(); while (clock64() - t < n); }'
    with stream:
        cupy.RawKernel(code, "sleep")((1,), (1,), (np.int64(cycles),))
