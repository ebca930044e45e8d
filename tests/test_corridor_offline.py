"""The corridor without a GPU: CuPy arrays at addresses that nobody reads, and kernels that write down what they are
given."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
from stand_in_cuda import Cuda

from cupyflash import appending, attention, attention_append, attention_backward, writing
from cupyflash.gpu import alone, corridor, device, launch, params
from cupyflash.gpu.device import Arch
from cupyflash.interop import cupy_
from cupyflash.problem import ITEMSIZE, OPTIONS, View, contiguous

STREAM = 77
B, SQ, SK, HQ, HK, D = 2, 40, 50, 4, 2, 64


class Gpu(Cuda):
    """A GPU that computes nothing: where memory was given out, what was launched, copied and filled."""

    arch: Arch
    plans: dict[int, Any]  # by the address of their first kernel

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.plans = {}
        self.launched: list[tuple[Any, np.void, int]] = []  # plan, Params and stream of first kernels
        self.end = 1 << 40
        self.copied: list[tuple[int, View, int, View]] = []  # from address, view, to address, view
        self.filled: list[float] = []
        self.spread: list[int] = []  # from address
        self.copied_back: list[tuple[Any, Any]] = []
        self.planned = 0

    def array(self, shape: tuple[int, ...], dtype: Any = np.float16, offset: int = 0) -> Any:
        size = max(1, int(np.prod(shape))) * np.dtype(dtype).itemsize + offset
        start, self.end = self.end, self.end + -(-size // 512) * 512 + 512
        memory = cupy.cuda.UnownedMemory(start, size, None, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset))

    def functions(self, plan: Any, ordinal: int) -> list[Any]:
        self.planned += 1
        first = 1000 * self.planned
        self.plans[first] = plan
        return [SimpleNamespace(ptr=first + n) for n, _ in enumerate(plan.launches)]

    def launchKernel(self, *given: int) -> None:
        super().launchKernel(*given)
        asked = self.launches[-1]
        if plan := self.plans.get(asked.function):
            layout = params.layout(plan)
            record = np.frombuffer(asked.parameter(0, layout.itemsize), layout)[0]
            self.launched.append((plan, record, asked.stream))

    def copy_of(self, lib: Any, pointer: int, view: View, copy: View, device: int, stream: int) -> Any:
        held = lib.empty((copy.strides[0] * copy.shape[0],), view.dtype, device)
        self.copied.append((pointer, view, lib.pointer(held), copy))
        assert stream == STREAM
        return held

    def last(self) -> np.void:
        return self.launched[-1][1]


@pytest.fixture(params=["sm_90a", "sm_80"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu(monkeypatch)
    made.arch = arch = Arch.of(request.param)
    monkeypatch.setattr(corridor, "_prepared", {})
    monkeypatch.setattr(corridor, "functions", made.functions)
    monkeypatch.setattr(corridor, "ready", lambda *_: True)
    monkeypatch.setattr(device, "current", lambda ordinal: arch)
    monkeypatch.setattr(launch, "copy_of", made.copy_of)
    monkeypatch.setattr(launch, "fill", lambda lib, x, value, *_: made.filled.append(value))
    monkeypatch.setattr(launch, "spread", lambda lib, rows, pointer, *_: made.spread.append(pointer))
    monkeypatch.setattr(launch, "copy_into", lambda lib, target, source, *_: made.copied_back.append((target, source)))
    monkeypatch.setattr(cupy_, "stream", lambda device: STREAM)
    monkeypatch.setattr(cupy_, "empty", lambda shape, dtype, device: made.array(shape, cupy_._DTYPES[dtype]))
    return made


def inputs(gpu: Gpu, dtype: Any = np.float16) -> dict[str, Any]:
    return {
        "q": gpu.array((B, SQ, HQ, D), dtype), "k": gpu.array((B, SK, HK, D), dtype),
        "v": gpu.array((B, SK, HK, D), dtype),
    }  # fmt: skip


def for_backward(gpu: Gpu, dtype: Any = np.float16) -> dict[str, Any]:
    rows = gpu.array((B, HQ, SQ), np.float32)
    return inputs(gpu, dtype) | {
        "dout": gpu.array((B, SQ, HQ, D), dtype), "out": gpu.array((B, SQ, HQ, D), dtype), "lse": rows,
    }  # fmt: skip


def strides(x: Any) -> tuple[int, int, int]:
    """(batch, row, head) of a (B, S, H, D) array."""
    b, s, h, _ = (n // x.itemsize for n in x.strides)
    return b, s, h


def test_forward(gpu: Gpu) -> None:
    given = inputs(gpu)
    out, lse = attention(**given, causal=True, return_lse=True)
    (plan, p, stream), *_ = gpu.launched
    assert plan.source.endswith("forward.cu") and stream == STREAM
    for name, x in (given | {"out": out}).items():
        assert p[name] == x.data.ptr and tuple(p[f"{name}_strides"]) == strides(x)
    assert p["lse"] == lse.data.ptr and lse.dtype == np.float32 and lse.shape == (B, HQ, SQ)
    assert out.shape == (B, SQ, HQ, D) and out.dtype == np.float16
    assert (p["seq_q"], p["seq_k"], p["heads_k"], p["diagonal"], p["key_mask"]) == (SQ, SK, HK, SK - SQ, 0)
    attention(**given)
    assert gpu.last()["lse"] == 0
    assert not gpu.copied and not gpu.filled


def test_backward(gpu: Gpu) -> None:
    given = for_backward(gpu)
    grads = attention_backward(**given)
    p = gpu.last()
    for name, x in (given | grads._asdict()).items():
        assert p[name] == x.data.ptr
        assert name == "lse" or tuple(p[f"{name}_strides"]) == strides(x)
    assert p["dlse"] == 0
    assert [x.shape for x in grads] == [given[name].shape for name in "qkv"]
    dlse = gpu.array((B, HQ, SQ), np.float32)
    attention_backward(**given, dlse=dlse)
    assert gpu.last()["dlse"] == dlse.data.ptr and gpu.planned == 2


def test_the_second_call_prepares_nothing(gpu: Gpu) -> None:
    for _ in range(3):
        given = inputs(gpu)
        attention(**given, window=(3, None))
        assert gpu.last()["q"] == given["q"].data.ptr
    assert gpu.planned == 1
    attention(**given, window=(4, None))
    assert gpu.planned == 2 and gpu.last()["left"] == 4


def test_other_layouts(gpu: Gpu) -> None:
    given = {name: x.transpose(0, 2, 1, 3) for name, x in inputs(gpu).items()}
    out = attention(**given, layout="bhsd")
    assert out.shape == (B, HQ, SQ, D)
    p = gpu.last()
    assert tuple(p["q_strides"]) == (SQ * HQ * D, HQ * D, D) and tuple(p["out_strides"]) == (HQ * SQ * D, D, SQ * D)
    thin = {name: x[0, 0] for name, x in given.items()}
    assert attention(**thin).shape == (SQ, D)
    assert tuple(gpu.last()["q_strides"]) == (0, HQ * D, 0)


def test_targets_are_part_of_what_is_prepared(gpu: Gpu) -> None:
    """The same inputs, and results that lie in another way each time."""
    given = inputs(gpu)
    wide = gpu.array((B, SQ, HQ, 2 * D))
    places = [None, wide[..., :D], wide[..., D:], gpu.array((B, HQ, SQ, D)).transpose(0, 2, 1, 3), None]
    for place in places:
        out = attention(**given, out=place)
        assert place is None or out is place
        assert gpu.last()["out"] == out.data.ptr and tuple(gpu.last()["out_strides"]) == strides(out)
    given = for_backward(gpu)
    attention_backward(**given)
    grads = tuple(gpu.array((*x.shape[:2], 2 * x.shape[2], D))[:, :, ::2] for x in (given[name] for name in "qkv"))
    assert all(x is y for x, y in zip(attention_backward(**given, grads=grads), grads))
    for name, x in zip(("dq", "dk", "dv"), grads):
        assert gpu.last()[name] == x.data.ptr and tuple(gpu.last()[f"{name}_strides"]) == strides(x)


def test_misaligned_inputs_are_copied(gpu: Gpu) -> None:
    given = inputs(gpu)
    attention(**given)
    odd = gpu.array((B, SK, HK, D), offset=8)
    attention(**given | {"k": odd})
    ((at, view, to, copy),) = gpu.copied
    assert at == odd.data.ptr and view.shape == odd.shape and gpu.last()["k"] == to and to % 16 == 0
    assert copy.strides == contiguous(odd.shape) and tuple(gpu.last()["k_strides"]) == strides(odd)
    attention(**given)
    assert len(gpu.copied) == 1 and gpu.last()["k"] == given["k"].data.ptr
    narrow = {name: gpu.array((1, 8, 1, 24), np.float32, offset=4) for name in "qkv"}
    attention(**narrow)  # simt reads float32 wherever it lies
    assert len(gpu.copied) == 1 and gpu.last()["q"] == narrow["q"].data.ptr


def test_what_no_kernel_reads_is_copied(gpu: Gpu) -> None:
    given = for_backward(gpu)
    mask = gpu.array((B, 2 * SK), np.bool_)[:, ::2]
    strange = {
        "v": gpu.array((B, SK, HK, 2 * D))[..., ::2], "dout": gpu.array((B, SQ, HQ, D + 1))[..., 1:],
        "lse": gpu.array((B, SQ, HQ), np.float32).transpose(0, 2, 1), "key_mask": mask,
    }  # fmt: skip
    attention_backward(**given | strange)
    copies = {at: (view, to, copy) for at, view, to, copy in gpu.copied}
    p = gpu.last()
    assert len(copies) == 4
    for name, x in strange.items():
        view, to, copy = copies[x.data.ptr]
        assert p[name] == to and view.shape == x.shape and view.strides == tuple(s // x.itemsize for s in x.strides)
        assert copy.strides[-1] == 1 and ITEMSIZE[copy.dtype] == x.itemsize
    assert tuple(p["key_mask_strides"]) == (SK, 0, 0, 1)


def test_key_mask_where_it_is(gpu: Gpu) -> None:
    given = inputs(gpu)
    wide = gpu.array((B, SK + 6), np.bool_)
    attention(**given, key_mask=wide[:, 3:-3])
    assert gpu.last()["key_mask"] == wide.data.ptr + 3 and tuple(gpu.last()["key_mask_strides"]) == (SK + 6, 0, 0, 1)
    attention(**given, key_mask=wide[:1, :SK])  # one for all of the batch
    assert tuple(gpu.last()["key_mask_strides"]) == (0, 0, 0, 1) and not gpu.copied
    attention(**given, key_mask=wide[:, :1])  # one for all keys: a kernel reads rows
    ((_, view, _, copy),) = gpu.copied
    assert view.shape == (B, SK) and view.strides == (SK + 6, 0) and copy.strides == (SK, 1)
    assert tuple(gpu.last()["key_mask_strides"]) == (SK, 0, 0, 1)


def test_arrays_of_scores_where_they_are(gpu: Gpu) -> None:
    """In any strides; axes that they have not, or of length 1, have stride 0."""
    given = inputs(gpu) | {"family": "simt"}
    bias = gpu.array((HQ, SQ, SK))
    slopes, sinks = gpu.array((2 * HQ,), np.float32)[::2], gpu.array((HQ,))
    mask = gpu.array((B, 1, SK, SQ), np.bool_).swapaxes(2, 3)
    attention(**given, bias=bias, mask=mask, alibi_slopes=slopes, sinks=sinks, softcap=2.0)
    p = gpu.last()
    for name, x, want in (
        ("bias", bias, (0, SQ * SK, SK, 1)), ("mask", mask, (SQ * SK, 0, 1, SQ)),
        ("alibi_slopes", slopes, (0, 2, 0, 0)),
        ("sinks", sinks, (0, 1, 0, 0)),
    ):  # fmt: skip
        assert p[name] == x.data.ptr and tuple(p[f"{name}_strides"]) == want, name
    assert p["cap"] == pytest.approx(2 * np.log2(np.e)) and p["cap_inverse"] == pytest.approx(D**-0.5 / 2)
    attention(**given, bias=gpu.array((1, SK))[:, ::-1], mask=gpu.array((), np.bool_))
    assert tuple(gpu.last()["bias_strides"]) == (0, 0, 0, -1) and tuple(gpu.last()["mask_strides"]) == (0, 0, 0, 0)
    planned = gpu.planned
    attention(**given, bias=gpu.array((SQ, SK), np.float32))  # a kernel of its own
    assert gpu.planned == planned + 1 and not gpu.copied


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_bias_that_the_copy_engine_cannot_read_is_copied(gpu: Gpu, dtype: Any) -> None:
    """Once, and not along the axes that it is broadcast along; a family without the engine reads it where it is."""
    given, unit, wide = inputs(gpu), 16 // np.dtype(dtype).itemsize, gpu.array((HQ, SQ, 64), dtype)
    attention(**given, bias=wide[..., :SK])
    p = gpu.last()
    assert p["bias"] == wide.data.ptr and tuple(p["bias_strides"]) == (0, SQ * 64, 64, 1) and not gpu.copied
    for odd in (wide[..., 1 : SK + 1], gpu.array((HQ, SQ, SK + 1), dtype)[..., :SK], wide[..., :SK][:, ::-1]):
        attention(**given, bias=odd)
        if gpu.launched[-1][0].family != "sm90":
            assert gpu.last()["bias"] == odd.data.ptr and not gpu.copied
            continue
        (_, view, to, copy) = gpu.copied[-1]
        assert view.shape == (HQ, SQ, SK) and gpu.last()["bias"] == to
        assert copy.strides[-1] == 1 and copy.strides[-2] % unit == 0 and copy.strides[-2] - SK < unit
    one = gpu.array((SK,), dtype)
    attention(**given, bias=one)
    assert gpu.last()["bias"] == one.data.ptr and tuple(gpu.last()["bias_strides"]) == (0, 0, 0, 1)


@pytest.mark.parametrize("rank", [2, 4])
def test_gradients_of_arrays(gpu: Gpu, rank: int) -> None:
    """In arrays like those given, by kernels of their own; those of q, k and v come from the same launches as
    without."""
    shape = (D,) if rank == 2 else (HQ, D)
    q, k = (gpu.array((*((B,) if rank == 4 else ()), n, *shape)) for n in (SQ, SK))
    shapes = {
        "bias": (1, SK) if rank == 2 else (HQ, 1, SK),
        "alibi_slopes": () if rank == 2 else (HQ,),
        "sinks": () if rank == 2 else (1,),
    }
    given = {name: gpu.array(x, np.float32 if name == "alibi_slopes" else np.float16) for name, x in shapes.items()}
    out, lse = attention(q, k, k, return_lse=True, **given)
    attention_backward(out, q, k, k, out, lse, **given)
    plain = gpu.launched[-1][0]
    grads = attention_backward(out, q, k, k, out, lse, wrt=given, **given)
    assert [x[0].wrt for x in gpu.launched[-2:]] == [(), ("bias", "alibi_slopes", "sinks")]
    assert gpu.launched[-2][0] == plain
    p = gpu.last()
    for name, x in given.items():
        grad = getattr(grads, f"d{name}")
        assert grad.shape == x.shape and grad.dtype == x.dtype and p[f"d{name}"] == grad.data.ptr
    assert tuple(p["dbias_strides"]) == ((0, 0, 0, 1) if rank == 2 else (0, SK, 0, 1))
    assert tuple(p["dsinks_strides"]) == (0, 0, 0, 0)


def test_results_in_a_form_that_no_kernel_writes(gpu: Gpu) -> None:
    out = gpu.array((B, SQ, HQ, 2 * D))[..., ::2]
    assert attention(**inputs(gpu), out=out) is out
    ((target, source),) = gpu.copied_back
    assert target is out and gpu.last()["out"] == source.data.ptr and source.data.ptr != out.data.ptr


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_gradients_of_arrays_read_what_the_backward_has_left(gpu: Gpu, dtype: Any) -> None:
    q, k, bias = gpu.array((B, SQ, HQ, 32), dtype), gpu.array((B, SK, HK, 32), dtype), gpu.array((HQ, SQ, SK), dtype)
    lse = gpu.array((B, HQ, SQ), np.float32)
    for _ in range(2):  # planned, and kept
        attention_backward(q, q, k, k, q, lse, bias=bias, wrt="bias")
        (first, p, _), (second, r, _) = gpu.launched[-2:]
        found = {f"{name}_{what}" for name in ("q", "k", "v", "dout") for what in ("halves", "units")} | {"delta"}
        if dtype == np.float32:
            assert set(second.found) == found
        assert all(r[name] == p[name] != 0 for name in second.found)
        assert [x.nbytes for x in first.workspace if x.name in second.found] == [
            x.nbytes for x in second.workspace if x.name in second.found
        ]
    assert gpu.planned == 2


@pytest.mark.parametrize("dtype, length", [(np.float32, SK), (np.float32, 2048), (np.float16, SK)])
def test_a_workspace_is_kept_for_gradients_of_arrays_where_they_find_something(
    gpu: Gpu, dtype: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory is free when they ask for theirs."""
    pieces: list[list[Any]] = []  # weak references to what was given out before each

    def empty(shape: tuple[int, ...], of: str, device: int) -> Any:
        pieces.append([x for x in (pieces[-1] if pieces else []) if x() is not None])
        made = gpu.array(shape, cupy_._DTYPES[of])
        pieces[-1].append(weakref.ref(made))
        return made

    monkeypatch.setattr(cupy_, "empty", empty)
    q, bias = gpu.array((B, length, HQ, 32), dtype), gpu.array((HQ, length, length), dtype)
    attention_backward(q, q, q, q, q, gpu.array((B, HQ, length), np.float32), bias=bias, wrt="bias")
    second, *_ = gpu.launched[-1]
    assert bool(second.found) == (length == SK and (dtype == np.float32 or second.family == "sm80"))
    # At the end there are dq, dk, dv, dbias, and workspaces; and a copy of the bias, whose rows TMA wants
    # padded.
    assert len(pieces[-1]) == 4 + (2 if second.found else 1) + len(gpu.copied) // 2


def test_workspace_is_aligned(gpu: Gpu) -> None:
    for deterministic in (False, True):
        attention_backward(**for_backward(gpu), deterministic=deterministic)
        plan, p, _ = gpu.launched[-1]
        assert plan.workspace
        spans = sorted((int(p[x.name]), x.nbytes) for x in plan.workspace if x.nbytes)
        assert all(at % 256 == 0 for at, _ in spans)
        assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= gpu.end


def test_targets_that_overlap_are_refused(gpu: Gpu) -> None:
    """Also where the same shapes went through before: it is the addresses that decide."""
    given = for_backward(gpu)
    fine = tuple(gpu.array(given[name].shape) for name in "qkv")
    for _ in range(2):
        attention_backward(**given, grads=fine)
    launches = len(gpu.launched)
    with pytest.raises(ValueError, match="grads: dv shares memory with grads: dk"):
        attention_backward(**given, grads=(fine[0], fine[1], fine[1]))
    with pytest.raises(ValueError, match="grads: dk shares memory with v; it must have memory of its own"):
        attention_backward(**given, grads=(fine[0], given["v"], fine[2]))
    with pytest.raises(ValueError, match="out has shape .*: elements share memory"):
        attention(
            **{name: given[name] for name in "qkv"}, out=cupy.broadcast_to(gpu.array((1, 1, 1, D)), (B, SQ, HQ, D))
        )
    packed = gpu.array((B, SK, 2, HK, D))  # side by side is not over each other
    attention_backward(**given, grads=(fine[0], packed[:, :, 0], packed[:, :, 1]))
    assert len(gpu.launched) == launches + 1


def test_where_there_is_nothing_to_compute(gpu: Gpu) -> None:
    given = inputs(gpu) | {"k": gpu.array((B, 0, HK, D)), "v": gpu.array((B, 0, HK, D))}
    attention(**given, return_lse=True)
    assert gpu.filled == [0.0, -np.inf] and not gpu.launched
    sinks = gpu.array((HQ,))
    attention(**given, sinks=sinks, return_lse=True)
    attention(**given, sinks=sinks)
    assert gpu.spread == [sinks.data.ptr] and gpu.filled[2:] == [0.0, -np.inf, 0.0]
    gpu.filled = gpu.filled[:2]
    narrow = for_backward(gpu) | {
        name: gpu.array((B, n, h, 0)) for name, n, h in (("v", SK, HK), ("dout", SQ, HQ), ("out", SQ, HQ))
    }
    attention_backward(**narrow)
    assert gpu.filled[2:] == [0.0] * 3 and not gpu.launched
    attention_backward(**narrow, dlse=gpu.array((B, HQ, SQ), np.float32))  # the loss depends on the scores all the same
    assert len(gpu.launched) == 1 and len(gpu.filled) == 5


def test_without_keys_only_sinks_have_a_gradient(gpu: Gpu) -> None:
    """Where the loss depends on lse, which is the sink then."""
    given = for_backward(gpu) | {"k": gpu.array((B, 0, HK, D)), "v": gpu.array((B, 0, HK, D))}
    given |= {"dlse": gpu.array((B, HQ, SQ), np.float32), "sinks": gpu.array((HQ,)), "alibi_slopes": gpu.array((HQ,))}
    table = {"score": lambda s, b, h, i, j, t: s + t[h, j - i], "score_arrays": {"t": gpu.array((HQ, 9), np.float32)}}
    attention_backward(**given, **table, wrt=("alibi_slopes", "t"))
    assert not gpu.launched and gpu.filled == [0.0] * 5
    attention_backward(**given, wrt=("alibi_slopes", "sinks"))
    (plan, _, _), *_ = gpu.launched
    assert plan.wrt == ("alibi_slopes", "sinks") and not plan.maps


NUMBERED = [row.name for row in OPTIONS if row.number and row.name != "out_scale"]  # that is for inputs of 8 bits


@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_that_was_written_to(gpu: Gpu, name: str) -> None:
    """A tensor of no dimensions is hashed by its identity, not by what it holds."""
    torch = pytest.importorskip("torch")
    given, number = inputs(gpu), torch.tensor(0.5)
    seen = []
    for value in (0.5, 0.25, 0.25):
        number.fill_(value)
        attention(**given, **{name: number if len(seen) < 2 else value}, seed=1)
        seen.append([gpu.last()[field] for field in ("scale", "cap", "drop_below")])
    assert seen[0] != seen[1] == seen[2]


@pytest.mark.parametrize("form", [tuple, list])
def test_a_window_that_was_written_to(gpu: Gpu, form: type) -> None:
    torch = pytest.importorskip("torch")
    given, left = inputs(gpu), torch.tensor(3)
    for n in (3, 10, 10):
        left.fill_(n)
        attention(**given, window=form((left, 0)))
        assert gpu.last()["left"] == n
    assert gpu.planned == 2


@pytest.mark.parametrize("name", NUMBERED)
def test_equal_numbers_are_one_class_of_calls(gpu: Gpu, name: str) -> None:
    """A new tensor in every call (a learned temperature) must not plan every call anew."""
    torch = pytest.importorskip("torch")
    given = inputs(gpu)
    for _ in range(3):
        attention(**given, **{name: torch.tensor(0.5)}, seed=1)
    assert len(corridor._prepared) == 1


def test_another_seed_is_packed_alone(gpu: Gpu) -> None:
    """Nothing is planned for it; an array is another class of calls, and its address is what is packed."""
    given = inputs(gpu)
    for seed in (1, 2**64 - 1, -1):
        attention(**given, dropout=0.5, seed=seed)
        assert gpu.last()["round_keys"].tolist() == list(params.round_keys(seed % 2**64))
    assert gpu.planned == 1
    held = gpu.array((1,), np.int64)
    attention(**given, dropout=0.5, seed=held)
    assert gpu.last()["seed"] == held.data.ptr and gpu.planned == 2
    attention(**given, seed=1)  # without dropout it is nowhere
    assert "round_keys" not in gpu.last().dtype.names


def test_a_family_is_asked_before_rows_are_written(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(*_: Any) -> None:
        raise AssertionError("rows were written")

    monkeypatch.setattr(writing, "behind", written)
    q, new = gpu.array((2, 1, 4, 64)), gpu.array((2, 1, 2, 64))
    given = (q, new, new, *(gpu.array((2, 9, 2, 64)) for _ in "kv"), gpu.array((2,), np.int32))
    for family, match in (("sm91", "^family is 'sm91'"), ("flash1", "^no kernel family takes this problem: flash1 ")):
        with pytest.raises(ValueError, match=match):
            attention_append(*given, family=family)
    with pytest.raises(AssertionError, match="rows were written"):
        attention_append(*given, family="sm80")


def test_the_next_append_attends_by_what_is_kept_of_the_last(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at what it is given; anew where that is not alike, and where tiles are stored."""
    monkeypatch.setattr(appending, "_alike", {})
    monkeypatch.setattr(alone, "_function", lambda *_: SimpleNamespace(ptr=1))
    prepared: list[Any] = []
    prepare = corridor.prepare
    monkeypatch.setattr(corridor, "prepare", lambda *given: (prepared.append(given), prepare(*given))[1])

    def append(rows: int = 9, odd: int = 0, **options: Any) -> tuple[int, int]:
        """How often a call was prepared, and how much was copied."""
        q, new = gpu.array((2, 1, 4, D), offset=odd), gpu.array((2, 1, 2, D))
        caches, filled = [gpu.array((2, rows, 2, D)) for _ in "kv"], gpu.array((2,), np.int32)
        before = len(prepared), len(gpu.copied)
        attention_append(q, new, new, *caches, filled, **options)
        p = gpu.last()
        assert [p["k"], p["v"]] == [x.data.ptr for x in caches] and p["seqlens_k"] != filled.data.ptr
        assert odd or p["q"] == q.data.ptr
        return len(prepared) - before[0], len(gpu.copied) - before[1]

    more: list[dict[str, Any]] = [{"causal": True}, {"rows": 10}, {"odd": 8}, {"family": "simt"}, {"return_lse": True}]
    ways = [{}, *more]
    for _ in range(2):
        kinds = [append(**how) for how in ways]
        assert all(n for n, _ in kinds) and kinds[3][1] == 1
    planned = gpu.planned
    assert [append(**how) for how in ways] == [(0, copies) for _, copies in kinds] and gpu.planned == planned
    corridor.forget()
    assert append() == (2, 0) and gpu.planned == planned + 1 and append() == (0, 0)
