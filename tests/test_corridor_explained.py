"""What explain tells is what the corridor runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import test_corridor_offline
from test_corridor_offline import HK, HQ, SK, SQ, B, D, Gpu, inputs

from cupyflash import attention, attention_backward, explain
from cupyflash.gpu import corridor, programs

gpu = test_corridor_offline.gpu


def test_explain_tells_of_misaligned_inputs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(plan: Any) -> Any:
        raise ImportError("none here")

    monkeypatch.setattr(programs, "program", no_compiler)
    given = inputs(gpu)
    assert not explain(**given).copies
    odd = explain(
        **given | {"v": gpu.array((B, SK, HK, D), offset=2)}, key_mask=gpu.array((B, 2 * SK), np.bool_)[:, ::2]
    )
    assert odd.copies == (
        "v, because it does not start at a 16-byte boundary",
        "key_mask, because its last dimension has stride 2, not 1",
    )  # fmt: skip
    assert odd.problem.has("key_mask") and "key mask" in str(odd)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "softcap": {"softcap": 20.0},
    "long": {"lengths": (4096, 8192)},
    "a token": {"lengths": (1, 8192)},
    "simt": {"family": "simt"},
    "float32": {"dtype": np.float32},
    "float64": {"dtype": np.float64, "dims": (96, 32)},
    "a wide head": {"dims": (256, 192)},
    "deterministic": {"deterministic": True, "causal": True},
    "key_mask": {"arrays": {"key_mask": (B, SK)}},
    "bias, with its gradient": {"arrays": {"bias": (1, HQ, SQ, SK)}, "wrt": ("bias",)},
    "bias and sinks": {
        "arrays": {"bias": (1, 1, SQ, SK), "sinks": (HQ,)},
        "wrt": ("bias", "sinks"),
        "lengths": (SQ, SK),
    },
    "no values": {"dims": (64, 0)},
    "no values, a gradient": {"dims": (64, 0), "arrays": {"bias": (1, HQ, SQ, SK)}, "wrt": ("bias",)},
    "no values, through lse": {"dims": (64, 0), "dlse": True},
    "no keys": {"lengths": (SQ, 0)},
    "no keys, through lse": {"lengths": (SQ, 0), "dlse": True, "arrays": {"sinks": (HQ,)}, "wrt": ("sinks",)},
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_explain_tells_is_what_runs(gpu: Gpu, name: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch for launch, with the memory beside: one function plans both. On this GPU, with a tile that was tuned for
    it."""
    from cupyflash.tools import explanation

    monkeypatch.setattr(explanation, "_compiled", lambda plan: ({}, ()))
    asked = dict(CALLS[name])
    (rows, keys), (dim, dim_v) = asked.pop("lengths", (SQ, SK)), asked.pop("dims", (D, D))
    dtype, dlse, wrt = asked.pop("dtype", np.float16), asked.pop("dlse", False), asked.pop("wrt", ())
    wide = np.float64 if dtype is np.float64 else np.float32
    kinds = {"key_mask": np.bool_, "sinks": wide}
    optional = {x: gpu.array(shape, kinds.get(x, dtype)) for x, shape in asked.pop("arrays", {}).items()}
    q, k, v = (gpu.array((B, n, h, d), dtype) for n, h, d in ((rows, HQ, dim), (keys, HK, dim), (keys, HK, dim_v)))
    family = asked.get("family") or ("sm90" if gpu.arch.cc == 90 and dtype is np.float16 else "sm80")
    monkeypatch.setattr(corridor.tuned, "tiles", lambda problem, arch, of: tile_of(family, of))
    if backward:
        out, lse = gpu.array((B, rows, HQ, dim_v), dtype), gpu.array((B, HQ, rows), wide)
        more = {"dlse": lse} if dlse else {}
        attention_backward(out, q, k, v, out, lse, **asked, **optional, **more, wrt=wrt)
        told = explain(q, k, v, **asked, **optional, **more, wrt=wrt, of="backward")
    else:
        attention(q, k, v, **asked, **optional)
        told = explain(q, k, v, **asked, **optional)
    ran = [plan for plan, _, _ in gpu.launched]
    launches = [(x.name, x.grid, x.threads) for plan in ran for x in plan.launches]
    assert launches == [(x.name, x.grid, x.threads) for x in told.kernels] and len(launches) == len(gpu.launches)
    assert told.tiles == (dict(ran[0].constants) if ran else {})
    assert told.family == (ran[0].family if ran else "none")
    spaces = sorted((x.nbytes, x.name) for plan in ran for x in plan.workspace)
    assert told.workspace == {name: size for size, name in spaces}  # the larger one where two plans have it


def tile_of(family: str, of: Any) -> dict[str, tuple[int, ...]]:
    """A tile that is not the table's first, if it fits."""
    from cupyflash.gpu.plan import FAMILIES

    return {family: FAMILIES[family].TILES[of].listed()[-1]}
