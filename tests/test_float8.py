"""Inputs of 8 bits (e4m3): what they stand for, on the CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float8_problems import FLOAT8, NumPy, check, exact_of
from float8_problems import quantize as draw_quantized
from pages import blocks
from semantics import draw_inputs

from cupyflash import attention, attention_backward, explain, tune
from cupyflash.float8 import quantize, rotation
from cupyflash.gpu import device
from cupyflash.passes import BACKWARD, FORWARD

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "float8.md").read_text(encoding="utf-8")
PAGE = blocks(TEXT, "python")


def drawn(rng: np.random.Generator, by: str | None = None, seq: tuple[int, int] = (150, 300)) -> Any:
    shapes = ((2, seq[0], 4, 64), (2, seq[1], 2, 64), (2, seq[1], 2, 40))
    return draw_quantized(rng, *[rng.standard_normal(shape).astype(np.float32) for shape in shapes], by=by)


@pytest.mark.parametrize("by", [None, "head", "block"])
def test_what_they_stand_for(by: str | None, rng: np.random.Generator) -> None:
    x = drawn(rng, by)
    _, exact = exact_of(x, causal=True)
    out, lse = attention(*x[:3], causal=True, return_lse=True, **x.descales)
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out.astype(np.float64), exact.out, rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(lse, exact.lse, rtol=1e-5, atol=1e-5)


def test_the_page() -> None:
    known: dict[str, Any] = {}
    exec(PAGE[0], known)  # noqa: S102
    exact = attention(*(known[name].astype(np.float32) for name in "qkv"), causal=True)
    error = known["out"].astype(np.float32) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.06


def test_numbers(rng: np.random.Generator) -> None:
    """The same as arrays of one number; with another scale, too."""
    x = drawn(rng)
    for scale in (None, 0.3):
        given = {"q_descale": 0.5, "k_descale": 3.0, "v_descale": 0.25}
        as_arrays = {name: np.full((1, 1, 1), n, np.float32) for name, n in given.items()}
        results = [attention(*x[:3], scale=scale, return_lse=True, **y) for y in (given, as_arrays)]
        for one, other in zip(*results):
            np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp16", ml_dtypes.float8_e4m3fn])
def test_results(dtype: Any, rng: np.random.Generator) -> None:
    x = drawn(rng)
    _, exact = exact_of(x)
    out = attention(*x[:3], out_dtype=dtype, out_scale=100)
    step = {1: 2**-4, 2: 2**-8}[out.dtype.itemsize]
    np.testing.assert_allclose(out.astype(np.float64), 100 * exact.out, rtol=step, atol=0.01)
    large = attention(*x[:3], out_dtype=dtype, out_scale=1e6).astype(np.float32)
    assert np.abs(large).max() == 448 if out.dtype == FLOAT8 else np.abs(large).max() > 448


def test_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = drawn(rng, "head")
    given = [torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) for a in x[:3]]
    scales = {name: torch.from_numpy(y) for name, y in x.descales.items()}
    out = attention(*given, **scales)
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), attention(*x[:3], **x.descales).astype(np.float32))


def test_ranks_and_layouts(rng: np.random.Generator) -> None:
    x = drawn(rng, "block")
    expected = attention(*x[:3], **x.descales)
    turned = attention(*[a.transpose(0, 2, 1, 3) for a in x[:3]], layout="bhsd", **x.descales)
    np.testing.assert_array_equal(turned.transpose(0, 2, 1, 3), expected)
    one = attention(*[a[0] for a in x[:3]], **{name: y[0] for name, y in x.descales.items()})
    np.testing.assert_array_equal(one, expected[0])


def test_what_is_refused(rng: np.random.Generator) -> None:
    x = drawn(rng)
    q, k, v = x[:3]
    with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
        attention_backward(v, q, k, v, v, np.ones((2, 4, 150), np.float32))
    with pytest.raises(
        ValueError, match=r"^k_descale has shape \(2, 2, 7\); it must be \(2, 2, 3\), \(batch, key_head, key_block\)"
    ):
        attention(q, k, v, k_descale=np.ones((2, 2, 7), np.float32))
    with pytest.raises(
        ValueError, match="^scale times q_descale times k_descale is .*; for float8_e4m3fn inputs its size"
    ):
        attention(q, k, v, q_descale=1e25, k_descale=1e10)
    with pytest.raises(ValueError, match="^out_scale times v_descale is 1e[+]40; it must be more than 0, from 1e-30"):
        attention(q, k, v, v_descale=1e20, out_scale=1e20)
    assert attention(q, k, v, scale=1.0, q_descale=1e30, k_descale=1e-30).shape == attention(q, k, v).shape
    with pytest.raises(TypeError, match="^v_descale has dtype float64; it must be float32"):
        attention(q, k, v, v_descale=np.ones((2, 2, 1)))
    for number, is_ in ((0, "0.0; it must be more than 0"), (-1.0, "-1.0"), (float("nan"), "nan"), (1e31, r"1e\+31")):
        for name in ("q_descale", "v_descale", "out_scale"):
            with pytest.raises(ValueError, match=f"^{name} is {is_}"):
                attention(q, k, v, **{name: number})
    for odd, what in ((True, "True"), ("2", "'2'"), ([2.0], r"\[2.0\]")):
        with pytest.raises(TypeError, match=f"^k_descale is {what}; it must be"):
            attention(q, k, v, k_descale=odd)
    with pytest.raises(
        ValueError, match="^out_dtype is 'float32'; it must be bfloat16, float16, float8_e4m3fn or None"
    ):
        attention(q, k, v, out_dtype="float32")
    with pytest.raises(TypeError, match="^bias has dtype float8_e4m3fn; it must be float32"):
        attention(q, k, v, bias=np.zeros((150, 300), FLOAT8))
    plain = [a.astype(np.float32) for a in x[:3]]
    with pytest.raises(TypeError, match="^q_descale is given with q of float32; it is for inputs of float8_e4m3fn"):
        attention(*plain, q_descale=np.ones((1, 1), np.float32))
    with pytest.raises(ValueError, match="^out_dtype is bfloat16; with q of float32 it must be None"):
        attention(*plain, out_dtype="bfloat16")
    for name in ("q_descale", "k_descale", "v_descale"):
        with pytest.raises(TypeError, match=f"^{name} is given with q of float32; it is for inputs of float8_e4m3fn"):
            attention(*plain, **{name: 2})
    with pytest.raises(ValueError, match="^out_scale is 2.0; with q of float32 it must be 1.0"):
        attention(*plain, out_scale=2)
    with pytest.raises(TypeError, match="^k has dtype float32 but q has float8_e4m3fn; all arrays must have one dtype"):
        attention(q, plain[1], v)
    other = [a.astype(ml_dtypes.float8_e5m2) for a in plain]
    with pytest.raises(TypeError, match="^q has dtype float8_e5m2; it must be one of .*, float8_e4m3fn$"):
        attention(*other)
    with pytest.raises(TypeError, match="^out has dtype float8_e4m3fn; it must be bfloat16$"):
        attention(q, k, v, out=np.empty((2, 150, 4, 40), FLOAT8))
    with pytest.raises(TypeError, match="'v_descale'; inputs of 8 bits have a forward alone$"):
        attention_backward(v, q, k, v, v, np.ones((2, 4, 150), np.float32), v_descale=2.0)


def test_explained(rng: np.random.Generator) -> None:
    shape = (2, 2048, 16, 128)
    told = explain(shape, dtype="fp8", arch="sm_90a", q_descale=(16, 1), k_descale=2.0, v_descale=(2, 16, 16))
    n = 2 * 2048 * 16 * 128
    assert told.workspace["turned"] == n and told.optional == {"q_descale": 64, "v_descale": 2048}
    assert told.bytes_moved == 3 * n + 2 * n + 2 * 2048 * 16 * 4 + 64 + 2048  # q, k, v; out; lse
    assert told.problem.scale == pytest.approx(2 * 128**-0.5)
    assert "attention_turn" in str(told) and "scale of q, scale of v" in str(told)
    assert explain(shape, dtype="fp8", arch="sm_90a", out_dtype="fp8").bytes_moved == 4 * n + 2 * 2048 * 16 * 4
    bias = explain(shape, dtype="fp8", arch="sm_90a", bias=(2048, 2048), sinks=(16,), alibi_slopes=(16,))
    assert [x.dtype for x in bias.problem.given] == ["float32"] * 3
    on_cpu = explain(*drawn(rng)[:3], v_descale=2.0)
    assert on_cpu.family == "numpy" and "float8_e4m3fn is computed in float32, tile by tile" in on_cpu.notes
    for arch in (None, "sm_90a"):
        with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
            explain(shape, dtype="fp8", arch=arch, of="backward")
    for arch, cc in (("sm_80", "8.0"), ("sm_89", "8.9"), ("sm_100", "10.0")):
        why = f"sm90 is for compute capability 9.0, this GPU has {cc}; sm80 takes no float8_e4m3fn; simt takes no"
        with pytest.raises(ValueError, match=f"^no kernel family takes this problem: {why}"):
            explain(shape, dtype="fp8", arch=arch)


def test_compiled_ahead() -> None:
    from cupyflash.tools.precompile import jobs

    work = jobs(["sm_90a"], ["float8_e4m3fn"], causal=[True], arrays=("bias", "k_descale"))
    assert {(job.problem.dim, job.of) for job in work} == {(dim, FORWARD) for dim in (64, 128, 256)}
    with pytest.raises(
        ValueError, match="no kernel family takes this problem: sm90 has a forward alone of float8_e4m3fn"
    ):
        jobs(["sm_90a"], ["float8_e4m3fn"], passes=[BACKWARD])


def test_on_a_command_line() -> None:
    runner = pytest.importorskip("typer.testing").CliRunner()
    from cupyflash.tools.commands import app

    asked = ["explain", "--shape", "2,256,4,64", "--dtype", "fp8", "--arch", "sm_90a"]
    done = runner.invoke(
        app, [*asked, "--bias", "--q-descale", "--v-descale", "--out-dtype", "fp16", "--out-scale", "2"]
    )
    assert done.exit_code == 0 and "bias, scale of q, scale of v" in done.stdout and "turned 128 KiB" in done.stdout


def test_no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu.device import Arch
    from cupyflash.tools import autotune

    monkeypatch.setattr(autotune.device, "current", lambda ordinal: Arch.of("sm_90a"))
    monkeypatch.setattr(autotune, "_ordinal", lambda: 0)
    with pytest.raises(ValueError, match="^q has dtype float8_e4m3fn, of which CuPy has no arrays to time"):
        tune((2, 2048, 16, 128), dtype="fp8", q_descale=2.0)
    q, k = np.zeros((2, 1, 4, 64), np.float16), np.zeros((2, 2048, 4, 64), np.int8)
    with pytest.raises(ValueError, match="^k has dtype int8, and caches of 8 bits are not tuned"):
        tune(q, k, k_descale=2.0)


@pytest.mark.filterwarnings("error")
def test_results_that_are_too_large_are_infinite_without_a_warning(rng: np.random.Generator) -> None:
    assert np.isinf(attention(*drawn(rng)[:3], out_dtype="fp16", out_scale=1e9)).any()


def test_results_of_8_bits_that_are_too_large_are_the_largest(rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, "float32", seq=(70, 150), dims=(64, 64))
    check(NumPy(), rng, inputs, by="head", result="float8_e4m3fn", out_scale=3e3)
    x = draw_quantized(rng, *inputs[:3], by="head")
    out = attention(*x[:3], out_dtype="float8_e4m3fn", out_scale=3e3, **x.descales)
    assert np.isin((-448, 448), out.astype(np.float32)).all()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("by", ["block", "head", None])
def test_quantize(library: str, by: str | None, rng: np.random.Generator) -> None:
    xp: Any = pytest.importorskip("jax.numpy" if library == "jax" else library)
    put = xp.from_numpy if library == "torch" else xp.asarray
    arrays = [
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 150, 4, 64), (2, 300, 2, 64), (2, 300, 2, 40))
    ]
    arrays[0][0, :128] *= 50
    arrays[2][:, :, 0] = 0
    exact = attention(*arrays)
    quantized = [quantize(put(x), by) for x in arrays]
    blocks = {"block": (2, 4, 2), "head": (2, 4, 1), None: (1, 1, 1)}
    assert tuple(quantized[0][1].shape) == blocks[by]
    given = [x for x, _ in quantized]
    scales = dict(zip(("q_descale", "k_descale", "v_descale"), [y for _, y in quantized]))
    if by is None:
        turned = [quantize(put(np.ascontiguousarray(x.transpose(0, 2, 1, 3))), by, layout="bhsd") for x in arrays]
        np.testing.assert_array_equal(np.asarray(turned[0][1]), np.asarray(quantized[0][1]))
    out = attention(*given, out_dtype="fp16", **scales)
    found = np.asarray(out).astype(np.float32)
    rows = slice(128, None) if by == "block" else slice(None)  # those 50 times as large are a matter of luck
    assert np.sqrt(((found - exact)[:, rows] ** 2).mean() / (exact[:, rows] ** 2).mean()) < (
        0.06 if by == "block" else 0.4
    )


@pytest.mark.parametrize("zeros", ["q", "k", "v", "qk"])
def test_the_scale_of_zeros_is_a_number_like_others(zeros: str, rng: np.random.Generator) -> None:
    x = {name: rng.standard_normal((1, 5, 2, 8), np.float32) * (name not in zeros) for name in "qkv"}
    numbers, scales = zip(*(quantize(x[name], None) for name in "qkv"))
    names = [f"{name}_descale" for name in "qkv"]
    arrays, plain = dict(zip(names, scales)), dict(zip(names, [x.item() for x in scales]))
    for out_scale in (1.0, 0.5):
        found, wanted = (
            attention(*numbers, return_lse=True, out_scale=out_scale, **given) for given in (plain, arrays)
        )
        for a, b in zip(found, wanted):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=1e-6, rtol=1e-2)
    large = np.full((2, 1), 1e30, np.float32)  # beside an array a small number may be what makes a scale
    with pytest.raises(ValueError, match="^scale times q_descale is 3.5.*e-31; for float8_e4m3fn inputs its size"):
        attention(*numbers, q_descale=1e-30, k_descale=large)


def test_quantize_in_one_graph(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal((1, 300, 2, 8), np.float32))
    for by in ("block", "head", None):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, by=by: quantize(x, by), fullgraph=True, backend="aot_eager")
        for found, wanted in zip(compiled(x), quantize(x, by)):
            assert torch.equal(found.float(), wanted.float())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("by", ["block", "head", None])
def test_quantize_what_is_not_finite_or_not_there(library: str, by: str | None, rng: np.random.Generator) -> None:
    """It becomes NaN, and leaves the scales as they are; of nothing there are scales, too."""
    xp: Any = pytest.importorskip("jax.numpy" if library == "jax" else library)
    put = xp.from_numpy if library == "torch" else xp.asarray
    x = rng.standard_normal((2, 300, 3, 40)).astype(np.float32)
    odd = x.copy()
    odd[0, 0, 0, 3], odd[1, 5, 2, 0], odd[1, 299, 1, 39] = np.inf, np.nan, -np.inf
    bad = ~np.isfinite(odd)
    (numbers, scale), (_, expected) = quantize(put(odd), by), quantize(put(np.where(bad, 0, x)), by)
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(expected))
    found = np.asarray(numbers.float() if library == "torch" else numbers).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), bad)
    for shape in ((2, 0, 3, 4), (0, 5, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0), (0, 4)):
        numbers, scale = quantize(put(np.zeros(shape, np.float32)), by)
        assert tuple(numbers.shape) == shape
        if shape == (2, 5, 3, 0):
            assert np.asarray(scale).max() == np.asarray(scale).min() == np.float32(1e-30)
    _, scale = quantize(put(np.full((3, 4), 1e-42, np.float32)), by)
    assert np.asarray(scale) == np.float32(1e-30)


class Cupy:  # an array of CuPy's, which cannot be made without a GPU
    dtype, shape, __module__, __qualname__ = np.dtype(np.float32), (4, 8), "cupy", "ndarray"


def test_cupy_has_no_arrays_of_8_bits() -> None:
    """What somebody with its arrays is told; were it to have such one day, the page is to be written anew."""
    with pytest.raises(
        TypeError, match=r"^x is a cupy.ndarray; .*: CuPy has none of 8 bits; torch.from_dlpack\(x\) shares"
    ):
        quantize(Cupy())
    cupy = pytest.importorskip("cupy")
    with pytest.raises(ValueError, match="Unsupported dtype float8_e4m3fn"):
        cupy.empty(4, FLOAT8)


@pytest.mark.gpu
def test_cupy_by_way_of_torch() -> None:
    """As the page has it."""
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("torch")
    if device.current(0).cc != 90:
        pytest.skip("kernels for 8 bits are Hopper's")
    known: dict[str, Any] = {}
    exec(PAGE[1], known)  # noqa: S102
    out = known["out"]
    assert isinstance(out, cupy.ndarray) and out.dtype == np.float16
    exact = attention(*(cupy.asnumpy(known[name]) for name in "qkv"))
    error = cupy.asnumpy(out).astype(np.float32) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.08


def traced_inputs(rng: np.random.Generator, put: Any) -> tuple[list[Any], list[Any]]:
    x = drawn(rng, "block")
    return [put(a) for a in x[:3]], [put(scale) for scale in x.descales.values()]


def causal(q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any, **options: Any) -> Any:
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return attention(q, k, v, causal=True, **scales, **options)


def in_torch(a: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) if a.dtype == FLOAT8 else torch.from_numpy(a)


def test_traced_by_torch(rng: np.random.Generator) -> None:
    """As an operator: compiled, exported, mapped; with numbers, and every dtype of results."""
    torch = pytest.importorskip("torch")
    inputs, scales = traced_inputs(rng, in_torch)

    def compiled(function: Any, **how: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend="aot_eager", **how)

    def same(x: Any, y: Any) -> None:
        assert x.dtype == y.dtype and torch.equal(x.float(), y.float())

    class Module(torch.nn.Module):
        def forward(self, *arrays: Any) -> Any:
            return causal(*arrays)

    expected = causal(*inputs, *scales)
    assert expected.dtype == torch.bfloat16
    for dynamic in (False, True):
        same(compiled(causal, dynamic=dynamic)(*inputs, *scales), expected)
    same(torch.export.export(Module(), (*inputs, *scales)).module()(*inputs, *scales), expected)
    same(torch.vmap(causal)(*(x[:, None] for x in (*inputs, *scales)))[:, 0], expected)
    for dtype in (torch.float16, torch.float8_e4m3fn):

        def numbers(q: Any, k: Any, v: Any, dtype: Any = dtype) -> Any:
            return attention(q, k, v, q_descale=0.5, v_descale=2.0, out_dtype=dtype, out_scale=0.25)

        same(compiled(numbers)(*inputs), numbers(*inputs))
    # (Not that of the schema, which compares inputs.)
    checks = ("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cupyflash.attention.default, operator_arguments(inputs, scales), test_utils=checks)


def operator_arguments(inputs: list[Any], scales: list[Any]) -> tuple[Any, ...]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.cupyflash.attention.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), See():
        causal(*inputs, *scales)
    return seen[0]


def test_autocast_and_gradients_in_torch(rng: np.random.Generator) -> None:
    """8 bits stay what they are under autocast; who wants a gradient is told that there is none."""
    torch = pytest.importorskip("torch")
    inputs, scales = traced_inputs(rng, in_torch)
    expected = causal(*inputs, *scales)
    with torch.autocast("cpu", torch.float16):
        out = causal(*inputs, *scales)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    sinks = torch.zeros(4, requires_grad=True)
    why = (
        "^q has dtype float8_e4m3fn, of which there is a forward alone, but a gradient is wanted; call under torch.no_g"
    )
    with pytest.raises(TypeError, match=why):
        causal(*inputs, *scales, sinks=sinks)
    with torch.no_grad():
        assert causal(*inputs, *scales, sinks=sinks).dtype == torch.bfloat16
    with pytest.raises(Exception, match="of which there is a forward alone"):
        torch.func.grad(lambda sinks: causal(*inputs, *scales, sinks=sinks).float().sum())(sinks.detach())
    with pytest.raises(Exception, match="of which there is a forward alone"):
        torch.compile(lambda sinks: causal(*inputs, *scales, sinks=sinks), backend="aot_eager")(sinks)


def test_traced_by_jax(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax")
    inputs, scales = traced_inputs(rng, jax.numpy.asarray)
    expected = causal(*inputs, *scales)
    np.testing.assert_array_equal(jax.jit(causal)(*inputs, *scales), expected)
    np.testing.assert_array_equal(jax.vmap(causal)(*(x[:, None] for x in (*inputs, *scales)))[:, 0], expected)
    quantized = jax.jit(lambda *x: [quantize(a.astype("float32")) for a in x])(*inputs)
    assert [x.dtype for x, _ in quantized] == [FLOAT8] * 3
    number = jax.jit(lambda q, k, v, s: attention(q, k, v, q_descale=s))(*inputs, 2.0)
    np.testing.assert_allclose(
        number.astype("float32"), attention(*inputs, q_descale=2.0).astype("float32"), rtol=2**-7, atol=1e-6
    )
    for which in (0, 3):
        with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
            jax.grad(lambda *x: causal(*x).astype("float32").sum(), which)(*inputs, *scales)


def test_what_quantize_refuses() -> None:
    for dtype in (np.int64, np.complex64, FLOAT8):
        with pytest.raises(
            TypeError, match=f"^x has dtype {np.dtype(dtype)}; it must be one of float16, bfloat16, float32"
        ):
            quantize(np.ones((2, 3), dtype))
    with pytest.raises(ValueError, match="^by is 'row'; it must be 'block', 'head' or None"):
        quantize(np.ones((2, 3)), "row")
    with pytest.raises(TypeError, match="^x is a list"):
        quantize([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^x has 1 dimensions, shape \(3,\)"):
        quantize(np.ones(3))
    with pytest.raises(TypeError, match="^x is a masked array, whose mask would be lost"):
        quantize(np.ma.masked_array(np.ones((2, 3), np.float32), True))
    for dim in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"^dim is {dim}; it must be an integer, 1 or more"):
            rotation(dim)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rotation(np.int64(4)), rotation(4))


@pytest.mark.parametrize("dim", [1, 3, 64, 96, 128])
def test_a_rotation_spreads_what_is_large(dim: int, rng: np.random.Generator) -> None:
    matrix = rotation(dim, seed=3)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    if dim >= 64:
        # As the paper has them: one number in a thousand is ten times as large.
        q, k, v = (rng.standard_normal((1, 512, 4, dim)).astype(np.float32) for _ in range(3))
        for x in (q, k, v):
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001)
        exact = attention(q, k, v)
        errors = []
        for turn in (np.eye(dim, dtype=np.float32), matrix):
            pairs = [quantize(x, "head") for x in (q @ turn, k @ turn, v)]
            names = ("q_descale", "k_descale", "v_descale")
            out = attention(*[x for x, _ in pairs], **dict(zip(names, [y for _, y in pairs]))).astype(np.float32)
            errors.append(np.sqrt(((out - exact) ** 2).mean()))
        assert errors[1] < errors[0]
