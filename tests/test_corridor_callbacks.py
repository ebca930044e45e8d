"""What array libraries wait for, and callbacks of XLA, through the corridor with a stand-in for CUDA."""

from __future__ import annotations

import contextlib
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import test_corridor_offline
from test_corridor_offline import HK, HQ, SK, SQ, STREAM, B, D, Gpu

from cupyflash.call import Call
from cupyflash.gpu import corridor, launch, params
from cupyflash.interop import cupy_
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cupyflash.problem import ITEMSIZE, MaskKind, View, complete, contiguous
from cupyflash.rules import score_of

gpu = test_corridor_offline.gpu


class Recorded:
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.come = threading.Event()
        runtime = SimpleNamespace(
            streamLegacy=1, eventRecord=lambda event, stream: self.said.append(("record", event, stream))
        )
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(
                Event=lambda **_: SimpleNamespace(ptr=55, synchronize=self.come.wait),
                Device=lambda _: contextlib.nullcontext(),
                get_current_stream=lambda: self.stream,
                runtime=runtime,
            ),
            asarray=lambda x: SimpleNamespace(device=contextlib.nullcontext(), owner=x),
            from_dlpack=lambda x: x,
        )
        self.stream = SimpleNamespace(
            ptr=9, wait_event=lambda event: self.said.append(("wait", event.ptr)), record=lambda event: event
        )


@pytest.mark.parametrize(("producer", "ours"), [(None, 9), (9, 9), (5, 9), (1, 0), (5, 0)])
def test_a_producers_stream_is_waited_for(producer: int | None, ours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """(The default stream is 1 to producers, and 0 to us.)"""
    fake = Recorded()
    fake.stream.ptr = ours
    monkeypatch.setattr(cupy_, "cupy", fake.cupy)
    monkeypatch.setattr(cupy_, "get_current_stream", lambda: fake.stream)
    foreign = SimpleNamespace(__cuda_array_interface__={"shape": (1,), "stream": producer})
    array = cupy_.wrap("q", foreign)
    assert "stream" not in array.owner.__cuda_array_interface__  # CuPy would have the host wait
    assert array.owner.owner is foreign
    assert fake.said == ([("record", 55, 5), ("wait", 55)] if producer == 5 else [])


class XlaBuffer:
    """What XLA hands a callback: memory that DLPack tells the address of."""

    def __init__(self, nbytes: int, ordinal: int = 0, misaligned: bool = False) -> None:
        memory = np.empty(nbytes + 272, np.uint8)
        start = -memory.__array_interface__["data"][0] % 256 + misaligned
        self.memory, self.ordinal, self.address = memory[start:][:nbytes], ordinal, 0
        self.address = self.memory.__array_interface__["data"][0]

    def __dlpack__(self) -> Any:
        return self.memory.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal


def xla_call(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, tuple[tuple[int, ...], str]], wrt: Any, options: dict[str, Any],
    ordinal: int = 0, misaligned: bool = False, seed: int | None = None, of: Pass | None = None,
) -> Any:  # fmt: skip
    """What JAX traces, and then runs: the callback, the buffers of inputs by name, and those of results."""
    jax = pytest.importorskip("jax")
    from cupyflash.interop import jax_gpu

    gpus = [SimpleNamespace(local_hardware_id=0)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)
    views = {name: View(shape, contiguous(shape), dtype, "", "jax") for name, (shape, dtype) in given.items()}
    of = of or (FORWARD if wrt is None else BACKWARD)
    asked = Call(None, of, {}, complete(options), seed=seed, return_lse=of is FORWARD, wrt=wrt or ())  # type: ignore[arg-type]
    call = jax_gpu.Callback(asked, views)

    def buffer(view: View) -> XlaBuffer:
        return XlaBuffer(int(np.prod(view.shape)) * ITEMSIZE[view.dtype], ordinal, misaligned)

    buffers = {name: buffer(view) for name, view in views.items()}
    results = [views[name] for name in ("q", "k", "v", *wrt)] if wrt is not None else [views["q"]] * 2
    outs = [buffer(view) for view in results]
    outs.append(XlaBuffer(call.scratch, ordinal))
    call(SimpleNamespace(stream=STREAM), outs, *buffers.values())
    return call, buffers, outs


Q, KV = ((B, SQ, HQ, D), "bfloat16"), ((B, SK, HK, D), "bfloat16")


def test_a_callback_of_xla(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs, results, stream and memory are what is launched with."""
    call, given, (out, lse, _) = xla_call(monkeypatch, {"q": Q, "k": KV, "v": KV}, None, {"causal": True})
    _, p, stream = gpu.launched[-1]
    assert stream == STREAM and call.plain and gpu.planned == 1
    assert {name: p[name] for name in given} == {name: x.address for name, x in given.items()}
    assert (p["out"], p["lse"]) == (out.address, lse.address)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_callback_of_xla_backward(gpu: Gpu, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, bias, q, kv = ((B, HQ, SQ), "float32"), ((HQ, SQ, SK), "float32"), (Q[0], dtype), (KV[0], dtype)
    arrays = {"q": q, "k": kv, "v": kv, "bias": bias, "dout": q, "out": q, "lse": rows}
    call, given, (dq, dk, dv, dbias, scratch) = xla_call(monkeypatch, arrays, ("bias",), {})
    (first, p, _), (second, r, stream) = gpu.launched
    assert stream == STREAM and gpu.planned == 2
    assert (p["dq"], p["dk"], p["dv"], p["dout"]) == (dq.address, dk.address, dv.address, given["dout"].address)
    assert r["dbias"] == dbias.address
    spaces = [
        (x.nbytes, q[x.name])
        for plan, q in ((first, p), (second, r))
        for x in plan.workspace
        if x.nbytes and x.name not in plan.found
    ]
    assert all(r[name] == p[name] for name in second.found)
    assert call.plain == (not gpu.copied)  # rows of the bias, which sm90 wants padded
    assert all(scratch.address <= to < scratch.address + call.scratch for _, _, to, _ in gpu.copied)
    for size, at in spaces:
        assert scratch.address <= at and at + size <= scratch.address + call.scratch
    ends = sorted((at, at + size) for size, at in spaces)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert apart == bool(second.found)  # else the second has the memory of the first


def test_a_callback_of_xla_along_tangents(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes that JAX's derivatives of second order run, launched as any other."""
    rows, sinks = ((B, HQ, SQ), "float32"), ((HQ,), "float32")
    known = {"q": Q, "k": KV, "v": KV, "sinks": sinks, "out": Q, "lse": rows}
    along = {"tq": Q, "tv": KV, "tsinks": sinks}
    call, given, (tout, tlse, _) = xla_call(monkeypatch, known | along, None, {}, of=JVP)
    ((_, p, stream),) = gpu.launched
    assert stream == STREAM and call.plain and (p["tout"], p["tlse"]) == (tout.address, tlse.address)
    assert {name: p[name] for name in along} == {name: given[name].address for name in along}
    arrays = known | along | {"dout": Q, "tdlse": rows, "tout": Q, "tlse": rows}
    _, given, (dq, dk, dv, dsinks, _) = xla_call(monkeypatch, arrays, ("sinks",), {}, of=BACKWARD_JVP)
    _, (_, p, _), (_, r, _) = gpu.launched
    assert (p["tdq"], p["tdk"], p["tdv"]) == (dq.address, dk.address, dv.address)
    assert dsinks.address in (r[name] for name in ("dsinks", "tdsinks") if name in r.dtype.names)
    for name in ("tq", "tdlse", "tout", "tlse"):
        assert p[name] == given[name].address


@pytest.mark.parametrize("wrt", [None, (), ("sinks",)])
def test_a_callback_with_the_same_buffers_launches_the_same(
    gpu: Gpu, wrt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stream of now; another place of anything, or another GPU, is looked at anew."""
    rows, sinks = ((B, HQ, SQ), "float32"), ((HQ,), "float32")
    arrays = {"q": Q, "k": KV, "v": KV, "sinks": sinks} | ({} if wrt is None else {"dout": Q, "out": Q, "lse": rows})
    call, given, outs = xla_call(monkeypatch, arrays, wrt, {})
    once = [(plan, p.tobytes(), stream) for plan, p, stream in gpu.launched]
    runs: list[Any] = []
    run = corridor.Kernels.run
    monkeypatch.setattr(corridor.Kernels, "run", lambda self, *args: runs.append(self) or run(self, *args))
    gpu.launched.clear()
    call(SimpleNamespace(stream=STREAM + 8), outs, *given.values())
    assert call.plain and not runs
    assert [(plan, p.tobytes(), stream - 8) for plan, p, stream in gpu.launched] == once
    moved = [XlaBuffer(outs[0].memory.nbytes), *outs[1:]]
    call(SimpleNamespace(stream=STREAM), moved, *given.values())
    assert len(runs) == len(call._prepared.steps)
    assert moved[0].address in gpu.launched[len(once)][1].tolist()
    elsewhere = [XlaBuffer(x.memory.nbytes, ordinal=1) for x in outs]
    for x, y in zip(elsewhere, outs):
        x.memory, x.address = y.memory, y.address
    inputs = [XlaBuffer(x.memory.nbytes, ordinal=1) for x in given.values()]
    for x, y in zip(inputs, given.values()):
        x.memory, x.address = y.memory, y.address
    call(SimpleNamespace(stream=STREAM), elsewhere, *inputs)
    assert len(runs) == 2 * len(call._prepared.steps)


def test_a_callback_of_xla_with_scores(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that is a number, and the gradients of optional arrays and of a score function's, each by kernels of their
    own."""
    views = {"a": View((HQ,), (1,), "float32", "", "jax")}
    score = score_of("s + a[h]", views, View(Q[0], contiguous(Q[0]), Q[1], "", "jax"))
    (read,) = (x.key for x in score.arrays)
    rows, sinks = ((B, HQ, SQ), "float32"), ((HQ,), "float32")
    arrays = {"q": Q, "k": KV, "v": KV, "sinks": sinks, read: ((HQ,), "float32"), "dout": Q, "out": Q, "lse": rows}
    options = {"score": score, "dropout": 0.5}
    _, given, (*_, dsinks, darray, _) = xla_call(monkeypatch, arrays, ("sinks", read), options, seed=2**40)
    first, second, third = (p for _, p, _ in gpu.launched)
    for p in (first, second, third):
        assert p["round_keys"].tolist() == list(params.round_keys(2**40))
        assert p[read] == given[read].address
    assert (second["dsinks"], third[f"d{read}"]) == (dsinks.address, darray.address)


def test_a_callback_of_xla_with_a_block_mask(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lists are made while JAX traces: a callback, which XLA may be recording, waits for nothing."""
    made, launches = [], []

    class Mask:
        kind = MaskKind((1, 1, SQ, SK), "cuda:0")

        def list_for(self, use: Any) -> Any:
            made.append(use)
            launches.append(len(gpu.launched))
            return SimpleNamespace(data=SimpleNamespace(ptr=4096))

    rows = ((B, HQ, SQ), "float32")
    arrays = {"q": Q, "k": KV, "v": KV, "dout": Q, "out": Q, "lse": rows}
    xla_call(monkeypatch, arrays, (), {"block_mask": Mask()})
    plan, p, _ = gpu.launched[-1]
    uses = list(plan.lists)
    assert uses and made == uses * 2 and set(launches) == {0}
    launched = len(gpu.launched)
    with pytest.raises(ValueError, match="block_mask is on cuda:0 but q is on cuda:1"):  # sharded over several GPUs
        xla_call(monkeypatch, arrays, (), {"block_mask": Mask()}, ordinal=1)
    assert len(gpu.launched) == launched
    assert all(p[use.name] == 4096 for use in uses)


@pytest.mark.parametrize(("ordinal", "misaligned"), [(1, False), (0, True)])
def test_a_callback_elsewhere(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, ordinal: int, misaligned: bool) -> None:
    """On another device than it was traced for, or with inputs that must be copied, another class of calls is
    prepared."""
    from cupyflash.interop import jax_gpu

    own = gpu.array((1 << 20,), np.uint8)
    monkeypatch.setattr(jax_gpu.cupy.cuda, "Device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(jax_gpu.cupy.cuda, "ExternalStream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(jax_gpu.cupy, "empty", lambda *_: own)
    monkeypatch.setattr(launch.cupy.cuda.runtime, "getDevice", lambda: ordinal)
    _, given, (out, _, _) = xla_call(monkeypatch, {"q": Q, "k": KV, "v": KV}, None, {}, ordinal, misaligned)
    p = gpu.last()
    assert gpu.planned == 2 and p["out"] == out.address
    if not misaligned:
        assert p["q"] == given["q"].address


@pytest.mark.parametrize("misaligned", [False, True])
@pytest.mark.parametrize("dim", [64, 40])
def test_a_callback_in_8_bits(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, dim: int, misaligned: bool) -> None:
    """Scales are read where they are, V is turned in XLA's memory; rows that are no multiples of 16 bytes are
    copied."""
    if gpu.arch.cc != 90:
        pytest.skip("kernels for 8 bits are Hopper's")
    from cupyflash.interop import jax_gpu

    eight = "float8_e4m3fn"
    more = gpu.array((1 << 20,), np.uint8)
    monkeypatch.setattr(jax_gpu.cupy.cuda, "Device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(jax_gpu.cupy.cuda, "ExternalStream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(jax_gpu.cupy, "empty", lambda *_: more)
    arrays = {
        "q": ((B, SQ, HQ, dim), eight), "k": ((B, SK, HK, dim), eight), "v": ((B, SK, HK, dim), eight),
        "q_descale": ((HQ, 1), "float32"), "v_descale": ((B, HK, 1), "float32"),
    }  # fmt: skip
    options = {"out_dtype": "float16", "out_scale": 3.0}
    call, given, (_, _, scratch) = xla_call(monkeypatch, arrays, None, options, misaligned=misaligned)
    plan, p, _ = gpu.launched[-1]
    assert plan.launches[0].name == "attention_turn" and p["out_scale"] == 3 and plan.out_dtype == "float16"
    assert p["q_descale"] == given["q_descale"].address and tuple(p["q_descale_strides"])[:2] == (0, 1)
    assert p["v_descale"] == given["v_descale"].address and tuple(p["v_descale_strides"])[:2] == (HK, 1)
    copied = {name for name in "qkv" if p[name] != given[name].address}
    assert copied == (set("qkv") if misaligned or dim == 40 else set()) and call.plain == (dim == 64)
    if not misaligned:
        assert scratch.address <= p["turned"] < scratch.address + call.scratch
    assert {tuple(copy.strides) for _, _, _, copy in gpu.copied} <= {
        (n * h * pad, h * pad, pad, 1) for n, h in ((SQ, HQ), (SK, HK)) for pad in (48, 64)
    }
