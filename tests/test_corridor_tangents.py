"""The corridor of the passes that take tangents, without a GPU: as test_corridor_offline.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
import test_corridor_offline as offline
from test_corridor_offline import HK, HQ, SK, SQ, B, D, Gpu, for_backward, strides

from cupyflash import attention_backward_jvp, attention_jvp, explain
from cupyflash.passes import BACKWARD_JVP, JVP, Pass

gpu = offline.gpu


def of_forward(gpu: Gpu) -> dict[str, Any]:
    given = for_backward(gpu)
    return {name: x for name, x in given.items() if name != "dout"} | {"family": "simt"}


def test_jvp(gpu: Gpu) -> None:
    """Tangents lie as they like; what has none is null, and another program."""
    given = of_forward(gpu)
    tq, tv = gpu.array((HQ, SQ, B, D)).transpose(2, 1, 0, 3), gpu.array((B, SK, HK, D))[:, ::-1]
    tout, tlse = attention_jvp({"q": tq, "v": tv}, **given)
    plan, p, _ = gpu.launched[-1]
    assert plan.source == "simt/jvp.cu" and len(plan.launches) == 1 and not plan.workspace
    for name, x in (("tq", tq), ("tv", tv), ("tout", tout), ("q", given["q"]), ("out", given["out"])):
        assert p[name] == x.data.ptr and tuple(p[f"{name}_strides"]) == strides(x)
    assert p["tk"] == 0 and p["lse"] == given["lse"].data.ptr and p["tlse"] == tlse.data.ptr
    assert (
        tout.shape == (B, SQ, HQ, D)
        and tlse.shape == (B, HQ, SQ)
        and (tout.dtype, tlse.dtype) == (np.float16, np.float32)
    )
    constants = dict(plan.constants)
    assert [constants[f"T{name}"] for name in ("Q", "K", "V", "DOUT", "BIAS")] == [True, False, True, False, False]
    attention_jvp({"q": gpu.array((B, SQ, HQ, D))}, **given)
    assert gpu.planned == 2 and not dict(gpu.launched[-1][0].constants)["TV"]
    assert not gpu.copied and not gpu.filled


def test_backward_jvp(gpu: Gpu) -> None:
    """What the jvp gave is taken where it is given, and computed before where it is not."""
    given = for_backward(gpu) | {"family": "simt"}
    moved = {"k": gpu.array((B, SK, HK, D)), "dlse": gpu.array((B, HQ, SQ), np.float32)}
    tout, tlse = gpu.array((B, SQ, HQ, D)), gpu.array((B, HQ, SQ), np.float32)
    grads = attention_backward_jvp(moved, jvp=(tout, tlse), **given)
    assert [x[0].source for x in gpu.launched] == ["simt/backward_jvp.cu"]
    p = gpu.last()
    for name, x in {"tk": moved["k"], "tout": tout, "tdq": grads.dq, "tdk": grads.dk, "tdv": grads.dv}.items():
        assert p[name] == x.data.ptr and tuple(p[f"{name}_strides"]) == strides(x)
    assert (p["tlse"], p["tdlse"]) == (tlse.data.ptr, moved["dlse"].data.ptr)
    assert p["dlse"] == p["tq"] == p["tv"] == p["tdout"] == 0
    assert [x.shape for x in grads] == [given[name].shape for name in "qkv"]
    attention_backward_jvp(moved, **given)
    assert [x[0].source for x in gpu.launched[1:]] == ["simt/jvp.cu", "simt/backward_jvp.cu"]
    first, second = (x[1] for x in gpu.launched[1:])
    assert first["tout"] == second["tout"] and first["tlse"] == second["tlse"] and first["tk"] == second["tk"]


def test_only_gradients_move(gpu: Gpu) -> None:
    """Then out and lse do not: zeros are theirs, without a kernel."""
    given = for_backward(gpu) | {"family": "simt"}
    attention_backward_jvp({"dout": gpu.array((B, SQ, HQ, D))}, **given)
    assert [x[0].source for x in gpu.launched] == ["simt/backward_jvp.cu"] and gpu.filled == [0.0, 0.0]


def test_arrays_that_scores_read(gpu: Gpu) -> None:
    """Tangents have strides of their own; the tangent of a gradient is shaped and typed as the array."""
    given = for_backward(gpu) | {"family": "simt"}
    given |= {
        "bias": gpu.array((HQ, 1, SK)), "alibi_slopes": gpu.array((HQ,), np.float32), "sinks": gpu.array((HQ,)),
        "score": lambda s, b, h, i, j, x, y: s * x[h, i] + y[j],
        "score_arrays": {"x": gpu.array((HQ, SQ), np.float32), "y": gpu.array((SK,))},
    }  # fmt: skip
    moved = {
        "bias": gpu.array((HQ, 1, 2 * SK))[..., ::2],
        "sinks": gpu.array((HQ,)),
        "x": gpu.array((SQ, HQ), np.float32).T,
    }
    names = ("bias", "alibi_slopes", "sinks", "x", "y")
    grads = attention_backward_jvp(moved, wrt=names, **given)
    sources = ["simt/jvp.cu", "simt/backward_jvp.cu", *["simt/array_gradient_jvp.cu"] * 2]
    launched = [x for x in gpu.launched if x[0].of.moved]
    assert [x[0].source for x in launched] == sources
    for _, p, _ in launched:
        assert p["tbias"] == moved["bias"].data.ptr and tuple(p["tbias_strides"]) == (0, 2 * SK, 0, 2)
        assert p["tsinks"] == moved["sinks"].data.ptr and "talibi_slopes" not in p.dtype.names
        assert p["tscore_arrays['x']"] == moved["x"].data.ptr and "tscore_arrays['y']" not in p.dtype.names
        assert tuple(p["tscore_array_0_strides"]) == (1, HQ, 0, 0)
    p, of_score = launched[2][1], launched[3][1]
    for name in names[:3]:
        grad = getattr(grads, f"d{name}")
        assert grad.shape == given[name].shape and grad.dtype == given[name].dtype and p[f"td{name}"] == grad.data.ptr
    assert tuple(p["dbias_strides"]) == (0, SK, 0, 1)
    for name, x in given["score_arrays"].items():
        grad = grads.dscore_arrays[name]
        assert (
            grad.shape == x.shape and grad.dtype == x.dtype and of_score[f"tdscore_arrays[{name!r}]"] == grad.data.ptr
        )
    assert launched[2][0].launches[0].name != "attention_backward_jvp_delta"  # which is there already
    assert p["delta"] == launched[1][1]["delta"] and p["tdelta"] == launched[1][1]["tdelta"] != 0


def test_forms_that_no_kernel_takes(gpu: Gpu) -> None:
    given = of_forward(gpu)
    tq, tout = (gpu.array((B, SQ, HQ, 2 * D))[..., ::2] for _ in range(2))
    found, _ = attention_jvp({"q": tq}, **given, tout=tout)
    assert found is tout
    ((source, view, to, _),) = gpu.copied
    ((target, written),) = gpu.copied_back
    assert source == tq.data.ptr and view.shape == tq.shape and gpu.last()["tq"] == to
    assert target is tout and gpu.last()["tout"] == written.data.ptr != tout.data.ptr


def test_targets(gpu: Gpu) -> None:
    given = for_backward(gpu) | {"family": "simt"}
    grads = [gpu.array((B, n, h, D)) for n, h in ((SQ, HQ), (SK, HK), (SK, HK))]
    moved = {"q": gpu.array((B, SQ, HQ, D))}
    found = attention_backward_jvp(moved, grads=grads, **given)
    assert all(x is y for x, y in zip(found, grads)) and gpu.last()["tdk"] == grads[1].data.ptr
    with pytest.raises(ValueError, match=r"grads: dq shares memory with tangents\['q'\]"):
        attention_backward_jvp(moved, grads=[moved["q"], *grads[1:]], **given)


def test_where_there_is_nothing_to_compute(gpu: Gpu) -> None:
    """Without keys lse is the sink."""
    q, none, sinks = gpu.array((B, SQ, HQ, D)), gpu.array((B, 0, HK, D)), gpu.array((HQ,))
    rows = gpu.array((B, HQ, SQ), np.float32)
    given = {"q": q, "k": none, "v": none, "out": q, "lse": rows, "sinks": sinks, "family": "simt"}
    tsinks = gpu.array((HQ,))
    attention_jvp({"q": gpu.array((B, SQ, HQ, D)), "sinks": tsinks}, **given)
    assert gpu.filled == [0.0, 0.0] and gpu.spread == [tsinks.data.ptr] and not gpu.launched
    found = attention_backward_jvp({"sinks": tsinks, "dlse": rows}, q, **given, wrt="sinks")
    assert [x[0].source for x in gpu.launched] == ["simt/array_gradient_jvp.cu"] and found.dsinks.shape == (HQ,)


def test_misaligned(gpu: Gpu) -> None:
    """Vectors are moved where they can be: that is seen on the GPU, and nothing is copied for it."""
    given = of_forward(gpu)
    tk = gpu.array((B, SK, HK, D), offset=2)
    attention_jvp({"k": tk}, **given)
    assert gpu.last()["tk"] == tk.data.ptr and not gpu.copied


@pytest.mark.parametrize("of", [JVP, BACKWARD_JVP])
def test_what_explain_tells_is_what_runs(gpu: Gpu, of: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.tools import explanation

    monkeypatch.setattr(explanation, "_compiled", lambda plan: ({}, ()))
    given, asked = for_backward(gpu), {"family": "simt", "causal": True, "softcap": 20.0}
    moved = {"q": gpu.array((B, SQ, HQ, 2 * D))[..., ::2], "bias": gpu.array((SQ, SK))}
    qkv, bias = [given[name] for name in "qkv"], gpu.array((SQ, SK))
    wrt = {"wrt": "bias"} if of.of_gradients else {}
    told = explain(*qkv, **asked, bias=bias, tangents=moved, of=of.name, **wrt)
    if of.of_gradients:
        jvp = given["out"], given["lse"]
        attention_backward_jvp(moved, given["dout"], *qkv, *jvp, jvp=jvp, **asked, bias=bias, **wrt)
    else:
        attention_jvp(moved, *qkv, given["out"], given["lse"], **asked, bias=bias)
    launches = [(x.name, x.grid, x.threads) for plan, _, _ in gpu.launched for x in plan.launches]
    assert launches == [(x.name, x.grid, x.threads) for x in told.kernels] and told.family == "simt"
    assert told.copies == ("tq, because its last dimension has stride 2, not 1",) and len(gpu.copied) >= 1
    by_name = explain(*qkv, **asked, bias=bias, tangents=("q", "bias"), of=of.name, **wrt)
    assert by_name.kernels == told.kernels and not by_name.copies
    rows, keys, of_lse = B * SQ * HQ * D * 2, B * SK * HK * D * 2, B * HQ * SQ * 4
    read, of_bias = 2 * rows + 2 * keys + of_lse + rows, 2 * SQ * SK * 2
    # dout, tout, tlse; results
    rest = (3 * rows + of_lse) + (2 * keys + SQ * SK * 2) if of.of_gradients else rows + of_lse
    assert told.bytes_moved == read + of_bias + rest
    pairs = B * HQ * told.problem.visible
    of_wrt = 4 * pairs * D if of.of_gradients else 0
    assert told.flops == 2 * pairs * (7 if of.of_gradients else 3) * D + of_wrt


def test_explain_refuses_what_a_call_would() -> None:
    shape = {"q": (1, 4, 2, 8), "dtype": "float16", "arch": "sm_80"}
    with pytest.raises(TypeError, match="tangents has 'bias', but bias is not given"):
        explain(**shape, tangents=("bias",))
    with pytest.raises(ValueError, match="wrt is 'bias', but of is 'jvp', which has no gradients"):
        explain(**shape, tangents=("q",), wrt="bias", bias=(4, 4))
    with pytest.raises(TypeError, match="of which there is a forward alone"):
        explain(**shape | {"dtype": "float8_e4m3fn"}, tangents=("q",))
