"""Head dimensions from 256 to 576 on tensor cores, where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from semantics import check, draw_inputs

pytestmark = pytest.mark.gpu

BACKENDS = [Backend("sm90", "sm90"), Backend("sm80", "sm80")]
DIMS = [
    (257, 257), (320, 320), (328, 384), (448, 448), (512, 512), (576, 512), (64, 512), (160, 512), (512, 64),
    (500, 333),
]  # fmt: skip
# Shapes and options, as `draw_inputs` and `check` take them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"seq": (700, 900)}, {}),
    "causal": ({"seq": (900, 1100), "heads": (4, 2)}, {"causal": True}),
    "hidden": ({"seq": (300, 500), "key_mask": True, "dlse": 1.0}, {"window": (150, 40), "scale": -0.05}),
    "scores": (
        {"seq": (260, 330), "given": ("bias", "alibi_slopes", "sinks", "seed")},
        {"causal": True, "softcap": 5.0, "dropout": 0.2},
    ),
    # Tiles of all lengths, more than clusters; what the forward of a cluster takes, together.
    "many": ({"seq": (1000, 1300), "batch": 5, "heads": (6, 2)}, {"causal": "top_left"}),
    "together": (
        {"seq": (700, 900), "key_mask": True, "given": ("alibi_slopes", "sinks", "seed")},
        {"window": (300, 100), "softcap": 5.0, "dropout": 0.2, "scale": 0.1},
    ),
    "large": ({"seq": (300, 2000)}, {"scale": 3.0, "causal": True}),  # maxima grow
    "a-token": ({"seq": (1, 5000), "heads": (8, 1)}, {}),  # keys are shared out, heads share a tile
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda x: x.name)
def test_wide_heads(backend: Backend, dims: tuple[int, int], kind: str, rng: np.random.Generator) -> None:
    if not backend.takes("bfloat16", 64, 64):
        pytest.skip(f"no {backend.name} kernels on this GPU")
    shapes, options = KINDS[kind]
    dtype = "float16" if dims[0] % 64 else "bfloat16"
    check(
        backend,
        draw_inputs(rng, dtype, dims=dims, **shapes),
        backward=backend.name != "sm90" or 320 < max(dims) <= 512,
        **options,
    )
