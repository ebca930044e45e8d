"""Hopper's backward where each warpgroup owns 64 keys and dQ has more columns than 64 for each of them; and where a
cluster has all keys of a head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from semantics import check, draw_blocks, draw_inputs

pytestmark = pytest.mark.gpu

SM90 = Backend("sm90", "sm90")
DIMS = [(160, 160), (144, 136), (129, 153), (192, 128), (170, 99), (120, 192)]
# Shapes and options, as `draw_inputs` and `check` take them.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"seq": (1000, 900), "heads": (6, 3)}, {}),
    "causal": ({"seq": (900, 1100), "heads": (4, 2), "batch": 5}, {"causal": True}),
    "hidden": ({"seq": (300, 500), "key_mask": True, "dlse": 1.0, "given": ("sinks",)}, {"window": (150, 40)}),
    "top-left": ({"seq": (500, 300), "heads": (3, 3), "key_mask": True}, {"causal": "top_left", "scale": -0.05}),
    "in-order": ({"seq": (700, 900), "heads": (6, 2)}, {"deterministic": True, "again": True}),
    "in-order-causal": ({"seq": (900, 900), "heads": (4, 4)}, {"deterministic": True, "causal": True, "again": True}),
    "window": ({"seq": (2300, 2300), "heads": (2, 1)}, {"window": (200, 0)}),  # few add to each tile of dQ
    "shares": ({"seq": (1500, 900), "heads": (8, 1), "batch": 1}, {"causal": True, "again": True}),
    "rounds": ({"seq": (200, 130), "heads": (40, 40), "batch": 6}, {}),  # more heads than sums of dQ have room for
    "few-keys": ({"seq": (500, 120), "heads": (5, 5), "batch": 30}, {}),  # a tile has all
    "few-keys-causal": ({"seq": (100, 128), "heads": (6, 3), "batch": 3, "key_mask": True}, {"causal": True}),
    "edges": ({"seq": (49, 129)}, {}),
    "one": ({"seq": (1, 700)}, {"causal": True}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def there() -> None:
    if not SM90.takes("bfloat16", 64, 64):
        pytest.skip("no sm90 kernels on this GPU")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", DIMS)
def test_dims(dims: tuple[int, int], kind: str, rng: np.random.Generator) -> None:
    shapes, options = KINDS[kind]
    check(SM90, draw_inputs(rng, "float16" if dims[0] % 32 else "bfloat16", dims=dims, **shapes), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_blocks(dims: tuple[int, int], causal: bool, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, "bfloat16", dims=dims, seq=(400, 600), heads=(4, 2), key_mask=True)
    blocks = draw_blocks(rng, (2, 4, 400, 600), (48, 96), "bh")
    check(SM90, inputs, blocks=blocks, causal=causal)


@pytest.mark.parametrize("keys", [1, 50, 64, 65, 128])
@pytest.mark.parametrize("dims", [(256, 256), (200, 233), (192, 192), (512, 512), (384, 345)])
def test_a_cluster_has_all_keys(dims: tuple[int, int], keys: int, rng: np.random.Generator) -> None:
    """Of more than 256 columns up to 64; with more keys there are sums."""
    dtype = "float16" if dims[0] % 64 else "bfloat16"
    for seq, heads, batch, options in (
        ((500, keys), (6, 3), 30, {}),
        ((130, keys), (4, 2), 3, {"causal": True}),  # most queries see nothing
        ((3000, keys), (2, 1), 1, {"window": (70, 9), "again": True}),  # queries in shares
    ):
        check(SM90, draw_inputs(rng, dtype, dims=dims, seq=seq, heads=heads, batch=batch, key_mask=True), **options)
