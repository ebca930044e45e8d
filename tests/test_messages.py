"""Bad input: each message names the argument, what it is and what it must be, and nothing has been computed then.

What is said where there is no GPU, driver, CuPy or NVRTC: test_device.py and test_compiler.py. What is no array, or
comes from another library: test_interop.py.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
from backends import Backend, on_pairs
from criterion import assert_as_good
from reference import DTYPES, draw, standard, standard_in_own_precision, state

from cupyflash import attention, attention_backward, explain, merge
from cupyflash.problem import View
from cupyflash.rules import describe

B, SQ, SK, HQ, HK, D, DV = 2, 5, 7, 4, 2, 8, 16


def good(dtype: str = "float32") -> dict[str, Any]:
    """q, k, v that are right."""
    shapes = {"q": (B, SQ, HQ, D), "k": (B, SK, HK, D), "v": (B, SK, HK, DV)}
    return {name: np.ones(shape, DTYPES[dtype]) for name, shape in shapes.items()}


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


# what is wrong: (arguments instead of the right ones, error, parts of the message in order)
BAD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "dtypes of q and k": ({"k": ones(B, SK, HK, D, dtype=np.float64)}, TypeError,
        ["k has dtype float64", "q has float32"]),
    "dtypes of q and v": ({"v": ones(B, SK, HK, DV, dtype=np.float16)}, TypeError,
        ["v has dtype float16", "q has float32"]),
    "integers": ({"q": ones(B, SQ, HQ, D, dtype=np.int32)}, TypeError, ["q has dtype int32",
        "float16, bfloat16, float32"]),
    "integer keys": ({"k": ones(B, SK, HK, D, dtype=np.int64)}, TypeError,
        ["k has dtype int64", "must be one of float16"]),
    "records of nothing": ({"q": np.zeros((B, SQ, HQ, D), "V0")}, TypeError, ["q has dtype void", "must be one of"]),
    "booleans": ({"v": ones(B, SK, HK, DV, dtype=bool)}, TypeError, ["v has dtype bool", "must be one of float16"]),
    "complex": ({"q": ones(B, SQ, HQ, D, dtype=np.complex64)}, TypeError, ["q has dtype complex64", "must be one of"]),
    "byte order": ({"q": ones(B, SQ, HQ, D, dtype=">f4")}, TypeError, ["q has dtype >f4", "must be one of"]),
    "group": ({"q": ones(B, SQ, 3, D)}, ValueError, ["q has 3 heads", "k has 2", "multiple"]),
    "no key heads": (
        {"k": ones(B, SK, 0, D), "v": ones(B, SK, 0, DV)}, ValueError, ["q has 4 heads and k has 0", "multiple"],
    ),
    "heads of v": ({"v": ones(B, SK, 4, DV)}, ValueError, ["v has 4 heads", r"shape \(2, 7, 4, 16\)", "as k, 2"]),
    "head dimension": ({"k": ones(B, SK, HK, 9)}, ValueError, ["k has head dimension 9", "that of q, 8"]),
    "keys of v": ({"v": ones(B, 6, HK, DV)}, ValueError, ["v has 6 keys", "as k, 7"]),
    "batch of k": ({"k": ones(3, SK, HK, D)}, ValueError, ["k has batch 3", "that of q, 2"]),
    "batch of v": ({"v": ones(1, SK, HK, DV)}, ValueError, ["v has batch 1", "that of q, 2"]),
    "rank 1": ({"q": ones(D)}, ValueError, ["q has 1 dimensions", r"shape \(8,\)", "must have 4"]),
    "rank 5": ({"q": ones(1, B, SQ, HQ, D)}, ValueError, ["q has 5 dimensions", r"4 \(batch, sequence, heads, dim\)"]),
    "rank in bhsd": ({"q": ones(D), "layout": "bhsd"}, ValueError, [r"4 \(batch, heads, sequence, dim\)"]),
    "ranks": ({"k": ones(SK, HK, D)}, ValueError, ["k has 3 dimensions", "q has 4", "the same number"]),
    "layout": ({"layout": "sbhd"}, ValueError, ["layout is 'sbhd'", "'bshd', 'bhsd'"]),
    "causal": ({"causal": "bottom_left"}, ValueError, ["causal is 'bottom_left'", "'bottom_right' or 'top_left'"]),
    "causal list": ({"causal": []}, ValueError, [r"causal is \[\]", "must be False, True"]),
    "negative window": ({"window": (-1, 0)}, ValueError, ["window's left bound is -1", "0 or more"]),
    "negative right": ({"window": (None, -2)}, ValueError, ["window's right bound is -2", "0 or more"]),
    "window of one": ({"window": (3,)}, ValueError, [r"window is \(3,\)", r"pair \(left, right\)"]),
    "window number": ({"window": 3}, ValueError, ["window is 3", "None or a pair"]),
    "window float": ({"window": (1.5, 0)}, TypeError, ["window's left bound is 1.5", "integer or None"]),
    "scale word": ({"scale": "big"}, TypeError, ["scale is 'big'", "real number or None"]),
    "scale infinite": ({"scale": float("inf")}, ValueError, ["scale is inf", "finite"]),
    "scale nan": ({"scale": float("nan")}, ValueError, ["scale is nan", "finite"]),
    "scale large": ({"scale": 1e31}, ValueError, [r"scale is 1e\+31", r"from 1e-30 to 1e\+30, or 0"]),
    "scale small": ({"scale": 1e-60}, ValueError, ["scale is 1e-60", r"from 1e-30 to 1e\+30, or 0"]),
    "scale integer": ({"scale": 10**400}, ValueError, ["scale is inf", "finite"]),
    "scale complex": ({"scale": 1j}, TypeError, ["scale is 1j", "real number or None"]),
    "scale array": ({"scale": ones(2)}, TypeError, ["scale is ndarray of shape", "real number or None"]),
    "scale bool": ({"scale": True}, TypeError, ["scale is True", "real number or None"]),
    "window set": ({"window": {1, 2}}, ValueError, ["window is {1, 2}", r"pair \(left, right\)"]),
    "window bools": ({"window": (True, 0)}, TypeError, ["window's left bound is True", "integer or None"]),
    "scale numbers": ({"scale": ones(1)}, TypeError, ["scale is ndarray of shape", "real number or None"]),
    "causal array": ({"causal": ones(2)}, ValueError, ["causal is array", "must be False, True"]),
    "window array": ({"window": ones(2)}, ValueError, ["window is array", r"pair \(left, right\)"]),
    "window of arrays": ({"window": (ones(2), 0)}, TypeError, ["window's left bound is array", "integer or None"]),
    "layout array": ({"layout": ones(2)}, ValueError, ["layout is array", "'bshd', 'bhsd'"]),
    "deterministic array": ({"deterministic": ones(2)}, TypeError, ["deterministic is array", "True or False"]),
    "return_lse": ({"return_lse": "no"}, TypeError, ["return_lse is 'no'", "True or False"]),
    "return_lse array": ({"return_lse": ones(2)}, TypeError, ["return_lse is array", "True or False"]),
    "family list": ({"family": []}, ValueError, [r"family is \[\]", "must be one of 'sm90'"]),
    "family array": ({"family": ones(2)}, ValueError, ["family is array", "must be one of 'sm90'"]),
    "no elements": ({"q": np.zeros((B, SQ, HQ, D), "S0")}, TypeError, ["q has dtype bytes", "must be one of float16"]),
    "mask of no elements": ({"key_mask": np.zeros((B, SK), "V0")}, TypeError,
        ["key_mask has dtype void", "must be bool"]),
    "deterministic": ({"deterministic": "no"}, TypeError, ["deterministic is 'no'", "True or False"]),
    "mask shape": ({"key_mask": ones(B, SQ, dtype=bool)}, ValueError, [r"key_mask has shape \(2, 5\)", r"\(2, 7\)"]),
    "mask rank": ({"key_mask": ones(1, B, SK, dtype=bool)}, ValueError,
        [r"key_mask has shape \(1, 2, 7\)", r"\(2, 7\)"]),
    "mask dtype": ({"key_mask": ones(B, SK, dtype=np.uint8)}, TypeError, ["key_mask has dtype uint8", "must be bool"]),
    "out shape": ({"out": ones(B, SQ, HQ, D)}, ValueError, [r"out has shape \(2, 5, 4, 8\)", r"\(2, 5, 4, 16\)"]),
    "out dtype": ({"out": ones(B, SQ, HQ, DV, dtype=np.float64)}, TypeError, ["out has dtype float64", "float32"]),
    "q list": ({"q": [[1.0]]}, TypeError, ["q is a list", "must be an array"]),
    "k none": ({"k": None}, TypeError, ["k is", "None", "must be an array"]),
    "softcap word": ({"softcap": "hard"}, TypeError, ["softcap is 'hard'", "real number or None"]),
    "softcap negative": ({"softcap": -30}, ValueError, ["softcap is -30.0", "more than 0, or None"]),
    "softcap infinite": ({"softcap": float("inf")}, ValueError, ["softcap is inf", "finite"]),
    "softcap large": ({"softcap": 1e31}, ValueError, [r"softcap is 1e\+31", r"from 1e-30 to 1e\+30"]),
    "pair mask dtype": (
        {"mask": ones(SQ, SK)}, TypeError, ["mask has dtype float32", r"must be bool \(True: the query may attend"],
    ),
    "pair mask shape": (
        {"mask": ones(B, 3, SQ, SK, dtype=bool)}, ValueError,
        [r"mask has shape \(2, 3, 5, 7\)", r"must be \(2, 4, 5, 7\), \(batch, head, query, key\), where a length of 1"],
    ),
    "bias dtype": ({"bias": ones(SQ, SK, dtype=np.float64)}, TypeError,
        ["bias has dtype float64", r"must be float32 \("]),
    "bias shape": ({"bias": ones(SK, SQ)}, ValueError, [r"bias has shape \(7, 5\)", "leading axes may be left out"]),
    "bias rank": ({"bias": ones(1, B, HQ, SQ, SK)}, ValueError, [r"bias has shape \(1, 2, 4, 5, 7\)",
        r"\(2, 4, 5, 7\)"]),
    "bias number": ({"bias": 1.0}, TypeError, ["bias is a float", "must be an array"]),
    "slopes shape": (
        {"alibi_slopes": ones(HK)}, ValueError, [r"alibi_slopes has shape \(2,\)", r"\(2, 4\), \(batch, head\)"],
    ),
    "slopes dtype": (
        {"alibi_slopes": ones(HQ, dtype=np.float16)}, TypeError,
        ["alibi_slopes has dtype float16", r"must be float32 \("],
    ),
    "sinks shape": ({"sinks": ones(B, HQ)}, ValueError, [r"sinks has shape \(2, 4\)", r"must be \(4,\), \(head\)"]),
    "sinks dtype": ({"sinks": ones(HQ, dtype=np.int32)}, TypeError, ["sinks has dtype int32", r"must be float32 \("]),
    "mask list": ({"key_mask": [True]}, TypeError, ["key_mask is a list", "must be an array"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_forward(what: str) -> None:
    wrong, error, parts = BAD[what]
    out = np.full((B, SQ, HQ, DV), np.nan, np.float32)
    with pytest.raises(error, match=".*".join(parts)):
        attention(**(good() | {"out": out} | wrong))
    assert np.isnan(out).all()


@pytest.mark.gpu
@pytest.mark.parametrize("what", BAD)
def test_forward_on_a_gpu(what: str) -> None:
    import cupy

    wrong, error, parts = BAD[what]
    if what in ("byte order", "records of nothing", "no elements", "mask of no elements"):
        pytest.skip("CuPy has no such arrays")
    out = cupy.full((B, SQ, HQ, DV), np.nan, np.float32)
    arguments = {
        name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in (good() | {"out": out} | wrong).items()
    }
    with pytest.raises(error, match=".*".join(parts)):
        attention(**arguments)
    assert cupy.isnan(out).all()


BAD_BACKWARD: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "dout shape": ({"dout": ones(B, SQ, HQ, D)}, ValueError, [r"dout has shape \(2, 5, 4, 8\)", r"\(2, 5, 4, 16\)"]),
    "dout dtype": ({"dout": ones(B, SQ, HQ, DV, dtype=np.float64)}, TypeError, ["dout has dtype float64", "float32"]),
    "dlse shape": ({"dlse": ones(B, SQ, HQ)}, ValueError, [r"dlse has shape \(2, 5, 4\)", r"\(2, 4, 5\)"]),
    "dlse dtype": ({"dlse": ones(B, HQ, SQ, dtype=np.float64)}, TypeError, ["dlse has dtype float64", "float32"]),
    "dlse list": ({"dlse": [1.0]}, TypeError, ["dlse is a list", "must be an array"]),
    "out shape": ({"out": ones(B, SQ, HK, DV)}, ValueError, [r"out has shape \(2, 5, 2, 16\)", r"\(2, 5, 4, 16\)"]),
    "lse shape": ({"lse": ones(B, SQ, HQ)}, ValueError, [r"lse has shape \(2, 5, 4\)", r"\(2, 4, 5\)"]),
    "lse dtype": ({"lse": ones(B, HQ, SQ, dtype=np.float64)}, TypeError, ["lse has dtype float64", "float32"]),
    "lse none": ({"lse": None}, TypeError, ["lse is", "None", "must be an array"]),
    "wrt word": ({"wrt": "bais"}, ValueError,
        ["wrt holds 'bais'", "names of optional arrays that are given, of 'bias', "]),
    "wrt not given": ({"wrt": ("sinks",)}, ValueError, ["wrt holds 'sinks', but sinks is not given",
        "of 'bias', 'alibi_sl"]),
    "wrt q": ({"wrt": ["q"]}, ValueError, ["wrt holds 'q', whose gradient comes anyway", "it must hold names"]),
    "wrt key_mask": (
        {"wrt": {"key_mask"}, "key_mask": ones(B, SK, dtype=bool)}, ValueError,
        ["wrt holds 'key_mask', which has no gradient", "of 'bias', 'alibi_slopes', 'sinks'"],
    ),
    "wrt number": ({"wrt": 1}, TypeError, ["wrt is 1", "it must hold names of optional arrays"]),
    "wrt None": ({"wrt": None}, TypeError, ["wrt is None", "it must hold names of optional arrays"]),
    "wrt array": ({"wrt": ones(1)}, TypeError, [r"wrt holds .*1\.", "it must hold names of optional arrays"]),
    "grads two": ({"grads": (1, 2)}, ValueError, ["grads holds 2 arrays", "three arrays"]),
    "grads None": (
        {"grads": (ones(B, SQ, HQ, D), ones(B, SK, HK, D), None)}, TypeError, ["dv is a NoneType", "must be an array"],
    ),
    "grads array": ({"grads": ones(B, SQ, HQ, D)}, ValueError, ["grads is ndarray", r"three arrays \(dq, dk, dv\)"]),
    "dk shape": (
        {"grads": (ones(B, SQ, HQ, D), ones(B, SK, HQ, D), ones(B, SK, HK, DV))}, ValueError,
        [r"dk has shape \(2, 7, 4, 8\)", r"\(2, 7, 2, 8\)"],
    ),
    "dv dtype": (
        {"grads": (ones(B, SQ, HQ, D), ones(B, SK, HK, D), ones(B, SK, HK, DV, dtype=np.float16))}, TypeError,
        ["dv has dtype float16", "float32"],
    ),
    "head dimension": ({"k": ones(B, SK, HK, 9)}, ValueError, ["k has head dimension 9", "that of q, 8"]),
    "window": ({"window": (-1, None)}, ValueError, ["window's left bound is -1", "0 or more"]),
    "mask shape": ({"key_mask": ones(B, SQ, dtype=bool)}, ValueError, [r"key_mask has shape \(2, 5\)", r"\(2, 7\)"]),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_BACKWARD)
def test_backward(what: str) -> None:
    wrong, error, parts = BAD_BACKWARD[what]
    out, lse = attention(**good(), return_lse=True)
    with pytest.raises(error, match=".*".join(parts)):
        attention_backward(**(good() | {"dout": out, "out": out, "lse": lse} | wrong))


@pytest.mark.gpu
@pytest.mark.parametrize("what", BAD_BACKWARD)
def test_backward_on_a_gpu(what: str) -> None:
    import cupy

    def put(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(put(y) for y in x)
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    wrong, error, parts = BAD_BACKWARD[what]
    q = {name: put(x) for name, x in good().items()}
    out, lse = attention(**q, return_lse=True)
    arguments = q | {"dout": out, "out": out, "lse": lse} | {name: put(x) for name, x in wrong.items()}
    with pytest.raises(error, match=".*".join(parts)):
        attention_backward(**arguments)


@pytest.mark.parametrize("name", ["k", "v", "key_mask"])
def test_two_devices(name: str) -> None:
    views = {
        "q": View((B, SQ, HQ, D), (), "float32", "cuda:0", "cupy"),
        "k": View((B, SK, HK, D), (), "float32", "cuda:0", "cupy"),
        "v": View((B, SK, HK, DV), (), "float32", "cuda:0", "cupy"),
        "key_mask": View((B, SK), (), "bool", "cuda:0", "cupy"),
    }
    for device in ("cuda:1", "cpu"):
        moved = views | {name: views[name]._replace(device=device)}
        with pytest.raises(ValueError, match=f"{name} is on {device} but q is on cuda:0.*one device"):
            describe(**moved)


@pytest.mark.parametrize("name", ["q", "k", "v", "key_mask"])
def test_two_libraries(name: str) -> None:
    torch = pytest.importorskip("torch")
    arguments = good() | {"key_mask": ones(B, SK, dtype=bool)}
    arguments[name] = torch.from_numpy(arguments[name])
    with pytest.raises(TypeError, match="is a (numpy|torch) array.*q is a (numpy|torch) array.*one library"):
        attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "key_mask", "out"])
def test_a_cpu_array_among_gpu_arrays(name: str) -> None:
    import cupy

    host = good() | {"key_mask": ones(B, SK, dtype=bool), "out": ones(B, SQ, HQ, DV)}
    arguments = {other: x if other == name else cupy.asarray(x) for other, x in host.items()}
    with pytest.raises(TypeError, match="is a (numpy|cupy) array.*q is a (numpy|cupy) array"):
        attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm90", "sm80", "simt"])
def test_a_head_dimension_that_the_family_does_not_take(family: str) -> None:
    import cupy

    dim = {"sm90": 584, "sm80": 584, "simt": 5000}[family]
    x = cupy.ones((1, 4, 1, dim), np.float16)
    with pytest.raises(ValueError, match=f"no kernel family takes.*{family} takes head dimensions.*{dim}"):
        attention(x, x, x, family=family)


@pytest.mark.parametrize(
    ("family", "message"),
    [("sm70", "it must be one of 'sm90', 'sm80', 'simt', 'flash1'"), ("simt", "a family of GPU kernels, but q is")],
)
def test_a_family_on_the_cpu(family: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**good(), family=family)


def test_results_that_cannot_be_written() -> None:
    fixed = ones(B, SQ, HQ, DV)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="^out is read-only; it must be an array that can be written"):
        attention(**good(), out=fixed)
    out, lse = attention(**good(), return_lse=True)
    grads = (ones(B, SQ, HQ, D), ones(B, SK, HK, D), ones(B, SK, HK, DV))
    grads[1].flags.writeable = False
    with pytest.raises(ValueError, match="^grads: dk is read-only"):
        attention_backward(out, **good(), out=out, lse=lse, grads=grads)
    assert (grads[0] == 1).all()


@pytest.mark.parametrize("what", [None, 1, "dk", [1.0]])
def test_a_target_that_is_no_array_goes_by_what_it_was_given_as(what: object) -> None:
    out, lse = attention(**good(), return_lse=True)
    grads = (ones(B, SQ, HQ, D), what, ones(B, SK, HK, DV))
    with pytest.raises(TypeError, match=f"^grads: dk is a {type(what).__name__}; it must be an array"):
        attention_backward(out, **good(), out=out, lse=lse, grads=grads)


def test_results_that_overlap() -> None:
    """Each target has memory of its own: no element of it twice, and none of another target or an input."""
    x = {name: ones(B, SQ, HQ, D) for name in "qkv"}
    wide = ones(B, SQ, HQ, 2 * D)
    thin = np.broadcast_to(ones(D), (B, SQ, HQ, D)).copy()
    thin = np.lib.stride_tricks.as_strided(thin, strides=(0, 0, 0, 4))
    with pytest.raises(ValueError, match=r"^out has shape .* and strides \(0, 0, 0, 1\): elements share memory"):
        attention(**x, out=thin)
    with pytest.raises(ValueError, match="^out shares memory with k; it must have memory of its own"):
        attention(**x, out=x["k"])
    out, lse = attention(**x, return_lse=True)
    given = {**x, "dout": out.copy(), "out": out, "lse": lse}
    g, h = ones(B, SQ, HQ, D), ones(B, SQ, HQ, D)
    with pytest.raises(ValueError, match="^grads: dk shares memory with grads: dq;"):
        attention_backward(**given, grads=(g, g, h))
    with pytest.raises(ValueError, match="^grads: dv shares memory with grads: dq;"):
        attention_backward(**given, grads=(wide[..., :D], h, wide[..., 1 : D + 1]))
    with pytest.raises(ValueError, match="^grads: dv shares memory with dout;"):
        attention_backward(**given, grads=(g, h, given["dout"]))
    attention_backward(**given, grads=(wide[..., :D], h, wide[..., D:]))  # side by side


@pytest.mark.gpu
def test_an_unknown_family() -> None:
    import cupy

    x = cupy.ones((1, 4, 1, 64), np.float16)
    with pytest.raises(ValueError, match="family is 'sm70'.*must be one of 'sm90', 'sm80', 'simt'"):
        attention(x, x, x, family="sm70")


@on_pairs
def test_a_last_dimension_that_is_not_contiguous_works(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    wide = draw(rng, dtype, 2, 30, 2, 64)
    host = wide[..., ::2]
    problem = state(host, host, host)
    exact, own = (f(problem, host, host, host) for f in (standard, standard_in_own_precision))
    x = backend.put(wide)[..., ::2]
    assert_as_good(backend.get(attention(x, x, x, family=backend.family)), exact.out, own.out, "out")


# ---- the place of the heads ------------------------------------------------------------------------------------------


AXES = {"bshd": r"\(batch, sequence, heads, dim\)", "bhsd": r"\(batch, heads, sequence, dim\)"}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("what", ["heads", "bias", "lse", "merge", "explain"])
def test_shapes_that_fit_the_other_layout(what: str, layout: str) -> None:
    """(batch, 3, 5, dim) and the like: right in one of the two."""

    def laid(heads: int, rows: int) -> np.ndarray:
        return ones(B, heads, rows, D) if layout == "bshd" else ones(B, rows, heads, D)

    other = {"bshd": "bhsd", "bhsd": "bshd"}[layout]
    q, k = laid(4, 6), laid(4, 9)
    calls: dict[str, Any] = {
        "heads": lambda layout: attention(q, k, k, layout=layout),
        "bias": lambda layout: attention(q, q, q, bias=ones(4, 6, 6), layout=layout),
        "lse": lambda layout: attention_backward(q, q, q, q, q, ones(B, 4, 6), layout=layout),
        "merge": lambda layout: merge([q, q], [ones(B, 4, 6)] * 2, layout=layout),
        "explain": lambda layout: explain(q, k, k, layout=layout),
    }
    calls[what](other)
    with pytest.raises(ValueError, match=f'; the shapes fit as {AXES[other]}, layout="{other}"$') as raised:
        calls[what](layout)
    assert str(raised.value).count("layout=") == 1


def test_three_axes_that_fit_the_other_layout() -> None:
    with pytest.raises(ValueError, match=r'; the shapes fit as \(heads, sequence, dim\), layout="bhsd"$'):
        attention(ones(4, 10, 8), ones(4, 12, 8), ones(4, 12, 8))
    with pytest.raises(ValueError, match=r'; the shapes fit as \(heads, sequence, dim\), layout="bhsd"$'):
        merge([ones(4, 6, 8)] * 2, [ones(4, 6)] * 2)


def test_shapes_that_fit_neither_layout() -> None:
    q, k = ones(B, 4, 6, D), ones(B, 9, 9, D)
    with pytest.raises(ValueError, match="must be a multiple of those of k$"):
        attention(q, k, k)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", ["out", "dout"])
def test_results_with_the_heads_elsewhere(name: str, layout: str) -> None:
    q, turned, lse = ones(B, 4, 6, D), ones(B, 6, 4, D), ones(*((B, 6, 4) if layout == "bshd" else (B, 4, 6)))
    with pytest.raises(ValueError, match=rf"^{name} has .* be \(2, 4, 6, 8\), with the heads where q has them"):
        if name == "out":
            attention(q, q, q, out=turned, layout=layout)
        else:
            attention_backward(turned, q, q, q, q, lse, layout=layout)


@pytest.mark.parametrize(
    ("shape", "layout", "read"),
    [
        ((2, 300, 512), "bshd", "(sequence, heads, dim): 300 heads of dimension 512, with 2 queries each"),
        ((1, 4, 200, 8), "bshd", "(batch, sequence, heads, dim): 200 heads of dimension 8, with 4 queries each"),
        ((1, 200, 4, 8), "bhsd", "(batch, heads, sequence, dim): 200 heads of dimension 8, with 4 queries each"),
    ],
)
def test_heads_that_nobody_has_are_warned_of(shape: tuple[int, ...], layout: str, read: str) -> None:
    q, other = ones(*shape), {"bshd": "bhsd", "bhsd": "bshd"}[layout]
    for call in (attention, explain):
        with pytest.warns(UserWarning, match=re.escape(f'{read}; if these are rows, give layout="{other}"')):
            call(q, q, q, layout=layout)


@pytest.mark.parametrize(
    ("q", "k", "layout"),
    [
        ((300, 2, 512), (300, 2, 512), "bshd"), ((2, 300, 512), (2, 300, 512), "bhsd"),
        ((1, 128, 64), (1, 128, 64), "bshd"), ((1, 1, 128, 64), (1, 1, 128, 64), "bshd"),
        ((4, 512, 64), (4, 512, 64), "bshd"),  # nn.MultiheadAttention's, with the batch among the heads
        ((1, 128, 576), (50, 1, 576), "bshd"),
    ],
)  # fmt: skip
def test_heads_that_somebody_has(q: tuple[int, ...], k: tuple[int, ...], layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(ones(*q), ones(*k), ones(*k), layout=layout)
