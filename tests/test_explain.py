"""`explain`, and its command: what it tells, of what it needs no GPU for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from reference import draw

import cupyflash
from cupyflash.gpu import compiler

X = np.ones((1, 3, 2, 4), np.float32)
SHAPE = X.shape
Run = Callable[..., tuple[int, str, str]]


def test_explain_on_the_cpu(no_gpu: None, rng: np.random.Generator) -> None:
    x = draw(rng, "float32", 2, 64, 4, 16)
    told = cupyflash.explain(x, x, x, causal=True)
    assert (told.device, told.family, told.kernels, told.copies) == ("cpu", "numpy", (), ())
    assert told.flops == 4 * 2 * 4 * 16 * (64 * 65 // 2)
    assert told.bytes_moved == 4 * (4 * 2 * 64 * 4 * 16 + 2 * 64 * 4)
    assert "causal (bottom right): 50.8% of the scores" in str(told)
    shapes = cupyflash.explain((2, 64, 4, 16), dtype="float32", causal=True)  # a second call: `explain` is the function
    assert (shapes.problem, shapes.flops) == (told.problem, told.flops)
    assert 'name one to plan for it, as in arch="sm_90a"' in str(shapes)


def test_explain_tells_of_copies_on_the_cpu(no_gpu: None) -> None:
    """What BLAS cannot read where it is."""
    x, wide = np.zeros((1, 5, 4, 8)), np.zeros((1, 8, 4, 5))
    cases = (
        (x[:, ::2, :, :4], np.zeros((1, 4, 3, 8)).swapaxes(1, 2), ()),
        (x, wide.swapaxes(1, 3), ("v, because the numbers of its rows do not lie side by side",)),
        (np.broadcast_to(x[:, :1], x.shape), x[:, ::-1], tuple(f"{n}, because its rows do not lie one" for n in "kv")),
    )
    for k, v, want in cases:
        told = cupyflash.explain(np.zeros((1, 2, 4, k.shape[3])), k, v)
        assert len(told.copies) == len(want) and all(map(str.startswith, told.copies, want))
        assert ("every input is read where it is" in str(told)) == (not want)
    turned = cupyflash.explain(
        x.swapaxes(1, 2), x.swapaxes(1, 2), layout="bhsd", tangents={"k": wide.transpose(0, 2, 3, 1)}
    )
    assert turned.copies == ("tk, because the numbers of its rows do not lie side by side",)
    told = cupyflash.explain(x[:, :2], x, seqlens_k=np.array([5]), page_table=np.array([[0]]))
    assert told.copies == ("k, because its rows lie in pages", "v, because its rows lie in pages")


def test_explain_of_what_jax_traces(no_gpu: None) -> None:
    """Planned as shapes are, as nobody knows yet where it runs."""
    jax = pytest.importorskip("jax")
    told = []

    def call(x: object) -> object:
        told.append([cupyflash.explain(x, causal=True, arch=arch) for arch in (None, "sm_90a")])
        return x

    jax.eval_shape(call, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16"))
    assert [(x.device, x.family) for x in told[0]] == [("cpu", "numpy"), ("sm_90a", "sm90")]


def test_public_functions_are_not_hidden_by_modules() -> None:
    """A module named like a function of the package would take its place when it is first imported."""
    modules = {path.stem for path in Path(cupyflash.__file__).parent.iterdir()}
    assert modules.isdisjoint(cupyflash.__all__)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2, 200, 3, 64), "2 x 200 x 3 x 64 float32 (batch, sequence, heads, dim)"),
        ((2, 200, 64), "2 x 200 x 64 float32 (sequence, heads, dim): no batch, 200 heads"),
        ((200, 64), "200 x 64 float32 (sequence, dim): no batch, no heads"),
    ],
)
def test_explain_says_what_the_axes_are(shape: tuple[int, ...], told: str, no_gpu: None) -> None:
    rows = dict(cupyflash.explain(shape, dtype="float32").rows())
    assert rows["q"] == told and rows["k, v"] == " x ".join(map(str, shape))


def test_explain_plans_without_a_gpu(no_gpu: None, cache: Path) -> None:
    told = cupyflash.explain((2, 300, 4, 59), (2, 500, 2, 59), dtype="bfloat16", arch="sm_80", family="sm80")
    assert (told.device, told.family) == ("sm_80", "sm80")
    (kernel,) = told.kernels
    assert kernel.registers is not None and 0 < kernel.registers <= 255
    assert kernel.shared_memory and kernel.spills is not None
    assert f"{kernel.registers} registers" in str(told)
    assert [copy.split(",")[0] for copy in told.copies] == ["q", "k", "v"]
    assert "no multiple of 16 bytes" in told.copies[0]

    split = cupyflash.explain((1, 64, 1, 16), dtype="float32", arch="sm_80")
    assert (split.family, split.workspace["q_halves"]) == ("sm80", 4 * 64 * 16)
    assert any("two of float16" in note for note in split.notes) and not split.copies

    back = cupyflash.explain((1, 64, 1, 16), dtype="float32", arch="sm_75", of="backward")
    assert back.family == "simt"
    assert any("sm80 needs compute capability 8.0, this GPU has 7.5" in why for why in back.passed_over)
    assert back.workspace["delta"] == 64 * 4
    assert back.flops == 5 * 2 * 64 * 64 * 16
    assert back.bytes_moved == 4 * (8 * 64 * 16 + 64)
    assert back.copies == ()


def test_explain_tells_of_copies(cache: Path, rng: np.random.Generator) -> None:
    x = draw(rng, "float16", 1, 64, 2, 64)
    turned = np.asfortranarray(x)
    told = cupyflash.explain(x, turned, np.repeat(x, 2, axis=-1)[..., ::2], arch="sm_90a", family="sm80")
    assert any(copy.startswith("k, because its last dimension has stride 128, not 1") for copy in told.copies)
    assert any(copy.startswith("v, because its last dimension has stride 2, not 1") for copy in told.copies)


def test_explain_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, arch: str) -> None:
        raise ImportError("compiling kernels needs cuda-core")

    monkeypatch.setattr(compiler, "compile_source", missing)
    told = cupyflash.explain((1, 64, 1, 64), dtype="float32", arch="sm_90a")
    assert told.kernels[0].registers is None
    assert "registers and shared memory are unknown: compiling kernels needs cuda-core" in str(told)


SHAPE_64 = (2, 64, 4, 64)


def test_explain_shows_what_gradients_of_arrays_cost() -> None:
    """Kernels of their own, the products that these compute once more, and what is written."""
    given = {"bias": (4, 64, 64), "sinks": (4,), "score": "s + t[h][j - i + 63]", "score_arrays": {"t": (4, 127)}}
    options = {"dtype": "bf16", "arch": "sm_90a", "of": "backward", **given}
    plain = cupyflash.explain(SHAPE_64, **options)
    told = cupyflash.explain(SHAPE_64, **options, wrt=("bias", "t", "sinks"))
    more = [x.name for x in told.kernels[len(plain.kernels) :]]
    assert told.kernels[: len(plain.kernels)] == plain.kernels
    assert {"attention_backward_bias", "attention_backward_sinks", "attention_backward_score"} <= set(more)
    assert told.flops == plain.flops * 9 // 5  # five products, and twice two more
    assert plain.optional == {"bias": 2 * 4 * 64 * 64, "sinks": 8, "t": 4 * 4 * 127}
    assert told.bytes_moved == plain.bytes_moved + sum(plain.optional.values())
    assert "of which bias 32 KiB, sinks 8 B, t 1.984 KiB, dbias 32 KiB" in str(told)
    only_sinks = cupyflash.explain(SHAPE_64, **options, wrt="sinks")
    assert only_sinks.flops == plain.flops and len(only_sinks.kernels) > len(plain.kernels)
    with pytest.raises(
        ValueError,
        match="wrt is 'bias', but of is 'forward', which has no gradients; it must be 'backward' or 'backward_jvp'",
    ):
        cupyflash.explain(SHAPE_64, dtype="bf16", **given, wrt="bias")
    with pytest.raises(ValueError, match="wrt holds 'alibi_slopes', but alibi_slopes is not given"):
        cupyflash.explain(SHAPE_64, **options, wrt="alibi_slopes")
    x = np.zeros((1, 64, 2, 16), np.float32)
    on_cpu = cupyflash.explain(x, bias=np.zeros((64, 64), np.float32), of="backward", wrt="bias")
    assert on_cpu.flops == cupyflash.explain(x, of="backward").flops * 7 // 5


def test_explain_of_nothing() -> None:
    told = cupyflash.explain((0, 8, 1, 64), dtype="float32", arch="sm_90a")
    assert (told.family, told.kernels, told.flops) == ("none", (), 0)


def test_explain_prints_without_rich() -> None:
    code = "import sys; sys.modules['rich'] = None; import cupyflash; "
    code += "print(cupyflash.explain((1, 8, 1, 8), dtype='float32'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "FLOPs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((1, 8, 1, 8),), TypeError, "q is a shape, (1, 8, 1, 8); dtype must be given with it"),
        ((["a", 1],), TypeError, "q is ['a', 1]; it must be an array or a shape"),
        (((True, 128, 4, 64),), TypeError, "q is (True, 128, 4, 64); it must be an array or a shape"),
        (((1, -8, 1, 8),), ValueError, "q has shape (1, -8, 1, 8); its lengths must be 0 or more"),
        (("text",), TypeError, "q is a str; it must be an array"),
        (
            (X, None, None, {"dtype": "other"}),
            ValueError,
            "dtype is 'other', but q is an array of float32; dtype is for shapes",
        ),
        ((SHAPE, None, None, {"dtype": X}), TypeError, "it must be one of float16"),
        (
            ((10**400, 4), None, None, {"dtype": "bf16"}),
            ValueError,
            "its lengths must be 0 or more, and less than 2**63",
        ),
        ((SHAPE, None, None, {"dtype": "other"}), TypeError, "dtype is 'other'; it must be one of float16"),
        ((X, None, None, {"family": []}), ValueError, "family is []; it must be one of 'sm90'"),
        (
            (X, None, None, {"family": "simt"}),
            ValueError,
            "family is 'simt', a family of GPU kernels, but q is a numpy array",
        ),
        (
            (SHAPE, None, None, {"dtype": "bf16", "family": "simt"}),
            ValueError,
            "family is 'simt', but no GPU can be used",
        ),
        ((X, None, None, {"backward": True}), TypeError, "argument 'backward'; here it is of='backward'"),
        (
            (X, None, None, {"of": "back"}),
            ValueError,
            "of is 'back'; it must be one of 'forward', 'backward', 'jvp', 'backward_jvp'",
        ),
        ((X, None, None, {"of": True}), ValueError, "of is True; it must be one of 'forward'"),
        (
            (X, None, None, {"of": "jvp"}),
            ValueError,
            "of is 'jvp', but tangents is (); it must name what moves, as in ('q', 'k')",
        ),
        (
            (X, None, None, {"of": "backward", "tangents": ("q",)}),
            ValueError,
            "tangents are given, but of is 'backward'; it must be 'backward_jvp'",
        ),
        (
            (X, None, None, {"of": "forward", "tangents": ("q",)}),
            ValueError,
            "tangents are given, but of is 'forward'; it must be 'jvp'",
        ),
        (
            ((1, 1 << 31, 1, 64), None, None, {"dtype": "bf16", "arch": "sm_90a"}),
            ValueError,
            "q has a sequence of 2147483648",
        ),
    ],
)
def test_explain_errors(arguments: tuple[object, ...], error: type[Exception], message: str, no_gpu: None) -> None:
    *arrays, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error) as raised:
        cupyflash.explain(*arrays, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "torch", "jax"]
)
def test_dtypes_go_by_many_names(dtype: object, no_gpu: None) -> None:
    if dtype in ("torch", "jax"):
        dtype = pytest.importorskip("torch" if dtype == "torch" else "jax.numpy").bfloat16
    assert cupyflash.explain(SHAPE, dtype=dtype).problem.dtype == "bfloat16"
    assert cupyflash.explain(X.astype(ml_dtypes.bfloat16), dtype=dtype).problem.dtype == "bfloat16"


def test_an_option_that_is_not_there_is_told_by_name() -> None:
    for function in (cupyflash.explain, cupyflash.tune):
        with pytest.raises(
            TypeError,
            match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'windw'; did you mean 'window'\?$",
        ):
            function((1, 8, 1, 8), dtype="float16", windw=1)
    cupyflash.explain(np.ones((8, 4)), window=(1, 1), return_lse=True, out=None)


def test_bytes_moved_counts_optional_arrays() -> None:
    """As they lie in memory."""
    q = np.zeros((1, 3, 2, 8), np.float16)
    plain = cupyflash.explain(q).bytes_moved
    wide = np.broadcast_to(np.zeros((2, 1, 3), np.float32), (1, 2, 3, 3))
    for given, size in (({"key_mask": np.ones((1, 3), bool)}, 3), ({"bias": wide}, 24), ({"bias": q[:, :, 0, :3]}, 18)):
        assert cupyflash.explain(q, **given).bytes_moved == plain + size


def test_explain_command(run: Run, cache: Path) -> None:
    shape = ("--shape", "2,8192,16,128", "--dtype", "bf16", "--causal", "--arch", "sm_90a", "--family", "sm80")
    code, out, err = run("explain", *shape)
    assert (code, err) == (0, "")
    for expected in ("2 x 8192 x 16 x 128 bfloat16", "sm_90a", "sm80", "registers", "549.8 GFLOP", "workspace"):
        assert expected in out
    other = ("--kv-shape", "2,4096,4,128", "--v-shape", "2,4096,4,64", "--key-mask", "--window", "100,0")
    code, out, err = run("explain", *shape, *other, "--of", "backward")
    assert (code, err) == (0, "")
    assert "2 x 4096 x 4 x 128, 64" in out
    assert "key mask" in out and "window (100 keys to the left" in out and "dq_sum" in out
    code, out, err = run("explain", *shape, "--tangents", "q,v", "--of", "backward_jvp")
    assert (code, err) == (0, "") and re.search(r"^pass +backward_jvp$", out, re.MULTILINE)
    code, out, err = run("explain", *shape, "--softcap", "30", "--mask", "--bias", "--alibi-slopes", "--sinks")
    assert (code, err) == (0, "")
    assert "causal (bottom right), mask: " in out
    assert re.search(r"^score +soft cap 30, bias, ALiBi slopes, sinks$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "2,x"], "--shape is '2,x'; it must be 2 to 4 integers"),
        (["--shape", "1,2,3,4,5"], "--shape is '1,2,3,4,5'; it must be 2 to 4 integers"),
        (["--shape", "1,8,3,8", "--kv-shape", "1,8,2,8"], "q has 3 heads and k has 2"),
        (["--shape", "1,8,1,8", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["--shape", "1,8,1,8", "--arch", "sm_42"], "arch is 'sm_42'; it must be one of sm_75"),
        (["--shape", "1,8,1,8", "--arch", "sm_80", "--family", "sm1"], "family is 'sm1'"),
    ],
)
def test_explain_command_errors(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("explain", *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
