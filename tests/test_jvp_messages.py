"""What attention_jvp and attention_backward_jvp say of input that is wrong, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import attention, attention_backward_jvp, attention_jvp
from cupyflash.passes import BACKWARD_JVP
from cupyflash.score import trace
from cupyflash.tangents import of_call

# --------------------------------------------------------------------------------------------------------------

Q = np.zeros((2, 5, 2, 4), np.float32)
K = np.zeros((2, 6, 2, 4), np.float32)
LSE = np.zeros((2, 2, 5), np.float32)
BIAS = np.zeros((2, 5, 6), np.float32)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not a mapping": (
        {"tangents": [Q]}, TypeError,
        "tangents is a list; it must be a dict of arrays by name, and have at least one of q, k, v",
    ),
    "none": ({"tangents": {}}, ValueError, "tangents is empty; it must have at least one of q, k, v"),
    "none of what is given": (
        {"tangents": {}, "bias": BIAS, "sinks": LSE[0, :, 0]}, ValueError,
        "tangents is empty; it must have at least one of q, k, v, bias, sinks",
    ),
    "without one": (
        {"tangents": {"mask": BIAS}, "mask": BIAS > 0, "bias": BIAS}, TypeError,
        "tangents has 'mask', which has none; it may have q, k, v, bias",
    ),
    "unknown": ({"tangents": {"x": Q}}, TypeError, "tangents has 'x', which has none; it may have q, k, v"),
    "as results are called": (
        {"tangents": {"k": K, "tq": Q}}, TypeError,
        "tangents has 'tq', which has none; it may have q, k, v; did you mean 'q'?",
    ),
    "as gradients are called": (
        {"tangents": {"dv": K}}, TypeError, "tangents has 'dv', which has none; it may have q, k, v; did you mean 'v'?"
    ),
    "misspelled": (
        {"tangents": {"alibi_slope": LSE[0, :, 0]}, "alibi_slopes": LSE[0, :, 0]}, TypeError,
        "tangents has 'alibi_slope', which has none; it may have q, k, v, alibi_slopes; did you mean 'alibi_slopes'?",
    ),
    "what follows": (
        {"tangents": {"lse": LSE}}, TypeError,
        "tangents has 'lse', which has none; it may have q, k, v; lse follows from the others: leave it out",
    ),
    "a score array of a name that there is": (
        {"tangents": {"q": Q}, "score": lambda s, b, h, i, j, q: s + q[j], "score_arrays": {"q": BIAS[0, 0]}},
        ValueError, "tangents has 'q', which is q and an array of score_arrays; give that another name",
    ),
    "not given": (
        {"tangents": {"bias": BIAS}}, TypeError, "tangents has 'bias', but bias is not given; it may have q, k, v"
    ),
    "integers that are read": (
        {"tangents": {"n": LSE}, "score": lambda s, b, h, i, j, n, x: s * n[j] + x[j],
         "score_arrays": {"n": np.zeros(6, int), "x": BIAS[0, 0]}}, TypeError,
        "tangents has 'n', which has none; it may have q, k, v, x",
    ),
    "shape": (
        {"tangents": {"k": Q}}, ValueError, "tangents['k'] has shape (2, 5, 2, 4); it must have that of k, (2, 6, 2, 4)"
    ),
    "shape of an array over pairs": (
        {"tangents": {"bias": BIAS[:1]}, "bias": BIAS}, ValueError,
        "tangents['bias'] has shape (1, 5, 6); it must have that of bias, (2, 5, 6)",
    ),
    "shape of what is read": (
        {"tangents": {"x": BIAS[0]}, "score": lambda s, b, h, i, j, x: s + x[j], "score_arrays": {"x": BIAS[0, 0]}},
        ValueError, "tangents['x'] has shape (5, 6); it must have that of x, (6,)",
    ),
    "dtype": (
        {"tangents": {"q": Q.astype(np.float64)}}, TypeError,
        "tangents['q'] has dtype float64; it must have that of q, float32",
    ),
    "no array": ({"tangents": {"q": 1.0}}, TypeError, "tangents['q'] is a float; it must be an array"),
    "None": ({"tangents": {"q": None}}, TypeError, "tangents['q'] is a NoneType; it must be an array"),
    "unknown option": (
        {"is_causal": True}, TypeError, "got an unexpected keyword argument 'is_causal'; here it is causal=True"
    ),
    "of another": ({"q_descale": 1.0}, TypeError, "got an unexpected keyword argument 'q_descale'; inputs of 8 bits"),
    "out": ({"out": Q[:1]}, ValueError, "out has shape (1, 5, 2, 4); it must be (2, 5, 2, 4)"),
    "no seed": ({"dropout": 0.5}, ValueError, "dropout is 0.5, but seed is not given"),
    "family": ({"family": "simt"}, ValueError, "family is 'simt', a family of GPU kernels, but q is a numpy array"),
}  # fmt: skip
BAD_BACKWARD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "none": (
        {"tangents": {}}, ValueError, "tangents is empty; it must have at least one of q, k, v, dout, dlse"
    ),
    "shape of dlse": (
        {"tangents": {"dlse": Q}}, ValueError,
        "tangents['dlse'] has shape (2, 5, 2, 4); it must have that of lse, (2, 2, 5)"
    ),
    "shape of dout": (
        {"tangents": {"dout": K}}, ValueError,
        "tangents['dout'] has shape (2, 6, 2, 4); it must have that of dout, (2, 5, 2, 4)",
    ),
    "what a jvp gave": ({"jvp": (Q, Q)}, ValueError, "jvp: tlse has shape (2, 5, 2, 4); it must be (2, 2, 5)"),
    "what half a jvp gave": ({"jvp": (Q,)}, ValueError,
        "jvp holds 1 arrays; it must be a tuple of 2 arrays (tout, tlse)"),
    "no jvp": ({"jvp": Q}, ValueError, "jvp is ndarray; it must be a tuple of 2 arrays (tout, tlse) or None"),
    "grads": ({"grads": (Q, K)}, ValueError,
        "grads holds 2 arrays; it must be a tuple of 3 arrays (dq, dk, dv) or None"),
    "wrt": ({"wrt": "q"}, ValueError, "wrt holds 'q', whose gradient comes anyway"),
    "dout": ({"dout": K}, ValueError, "dout has shape (2, 6, 2, 4); it must be (2, 5, 2, 4)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    wrong, error, text = BAD[what]
    arguments = {"tangents": {"q": Q}, "q": Q, "k": K, "v": K, "out": Q, "lse": LSE} | wrong
    for function, more in ((attention_jvp, {}), (attention_backward_jvp, {"dout": Q, "jvp": (Q, LSE)})):
        with pytest.raises(error) as raised:
            function(**arguments, **more)
        found = str(raised.value).removeprefix(f"{function.__name__}() ")
        if function is attention_backward_jvp:
            found = found.replace(", dout, dlse", "").replace("k, v, dout, dlse", "k, v")
        assert found.startswith(text), found


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tangents": {"dout": Q}}, "it may have q, k, v; dout belongs to attention_backward_jvp"),
        ({"return_lse": True}, "unexpected keyword argument 'return_lse'; tout and tlse always come back, both"),
        ({"dlse": LSE}, "unexpected keyword argument 'dlse'; that belongs to attention_backward_jvp"),
        ({"wrt": "bias"}, "unexpected keyword argument 'wrt'; tangents say what moves; wrt belongs to"),
    ],
)
def test_what_belongs_to_another_function(more: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as raised:
        attention_jvp(**{"tangents": {"q": Q}, "q": Q, "k": K, "v": K, "out": Q, "lse": LSE} | more)
    assert text in str(raised.value)


def test_a_score_array_of_the_name_of_what_is_not_there() -> None:
    """It has tangents: nothing else of the name could."""
    out, lse = Q + 1, LSE
    x = {"score": lambda s, b, h, i, j, dout: s + dout[j], "score_arrays": {"dout": BIAS[0, 0]}}
    tout, _ = attention_jvp({"dout": BIAS[0, 0] + 1}, Q, K, K, out, lse, **x)
    assert tout.shape == Q.shape
    with pytest.raises(ValueError, match="^tangents has 'dout', which is dout and an array of score_arrays"):
        attention_backward_jvp({"dout": Q}, Q, Q, K, K, out, lse, **x)


@pytest.mark.parametrize("what", BAD_BACKWARD)
def test_bad_input_of_the_backward(what: str) -> None:
    wrong, error, text = BAD_BACKWARD[what]
    arguments = {"tangents": {"q": Q}, "dout": Q, "q": Q, "k": K, "v": K, "out": Q, "lse": LSE} | wrong
    with pytest.raises(error) as raised:
        attention_backward_jvp(**arguments)
    assert str(raised.value).startswith(text), raised.value


def test_float8_has_a_forward_alone() -> None:
    import ml_dtypes

    q = np.zeros((1, 2, 1, 4), ml_dtypes.float8_e4m3fn)
    out, lse = attention(q, q, q, return_lse=True)
    with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone; attention_jvp"):
        attention_jvp({"q": q}, q, q, q, out, lse)
    with pytest.raises(
        TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone; attention_back"
    ):
        attention_backward_jvp({"dout": out}, out, q, q, q, out, lse)


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_nothing_is_computed_of_a_wrong_call(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a jvp that is not given comes first."""
    module: Any = pytest.importorskip("jax.numpy" if library == "jax" else library)
    q, k, lse = (module.asarray(x) for x in (Q, K, LSE))
    if library == "torch":
        q.requires_grad_()  # autograd follows the call
    ran: list[Any] = []
    monkeypatch.setattr("cupyflash.cpu.corridor.run", ran.append)
    with pytest.raises(ValueError, match="^dout has shape"):
        attention_backward_jvp({"q": q}, k, q, k, k, q, lse)
    with pytest.raises(ValueError, match="^tangents\\['dlse'] has shape"):
        attention_backward_jvp({"q": q, "dlse": q}, q, q, k, k, q, lse)
    assert not ran


@pytest.mark.parametrize("name", ["q", "bias", "dout"])
def test_a_name_of_two_arrays_is_of_neither(name: str) -> None:
    score = trace(lambda s, b, h, i, j, **read: s + read[name][j], {name: ("float32", 1, False)})
    key = f"score_arrays[{name!r}]"
    arrays = {"q": Q, "k": K, "v": K, "dout": Q, key: LSE[0, 0]}
    with pytest.raises(ValueError, match=f"^tangents has '{name}', which is {name} and an array of score_arrays; give"):
        of_call({name: Q}, arrays | {"bias": BIAS}, score, BACKWARD_JVP)
    if name == "bias":  # the only one, where no bias is given
        assert of_call({name: Q}, arrays, score, BACKWARD_JVP) == {f"t{key}": Q}
    assert [*of_call({"k": K}, arrays, score, BACKWARD_JVP)] == ["tk"]
