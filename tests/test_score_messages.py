"""What is said of score functions that cannot be served."""

from __future__ import annotations

import linecache
import math
import re
from typing import Any

import numpy as np
import pytest
from score_functions import documents, relative
from test_score_functions import TABLE

from cupyflash import attention, attention_backward, attention_jvp, explain

WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {  # score, score_arrays
    "number": (3, None, TypeError, r"score is 3; it must be a function of \(s, b, h, i, j"),
    "arrays-alone": (None, {"table": TABLE}, ValueError, "score_arrays holds 'table', but no score is given"),
    "no-dict": (relative, [TABLE], TypeError, "score_arrays is a list; it must be a dict of arrays"),
    "names": (relative, {3: TABLE}, TypeError, r"score_arrays has the names \[3\]; it must be a dict of arrays"),
    "no-array": (relative, {"table": 3}, TypeError, r"score_arrays\['table'\] is a int; it must be an array"),
    "dtype": (relative, {"table": TABLE.astype(np.int8)}, TypeError,
        r"score_arrays\['table'\] has dtype int8; it must be float64"),
    "rank": (relative, {"table": TABLE[..., None, None, None]}, ValueError, "must have 1 to 4 dimensions"),
    "empty": (relative, {"table": TABLE[:0]}, ValueError, "none of length 0"),
    "unknown-array": (lambda s, b, h, i, j: s, {"table": TABLE}, TypeError,
        "score_arrays holds 'table', but score has no such"),
    "missing-array": (relative, None, TypeError, "score has a parameter 'table', but score_arrays holds no such array"),
    "parameters": (lambda s, i, j: s, None, TypeError, "score has 3 positional parameters; it must take s, b, h, i, j"),
    "if": (lambda s, b, h, i, j: s if i < j else -s, None, TypeError,
        r"if, and, or.*where.*test_score_messages.py, line \d+"),
    "math": (lambda s, b, h, i, j: math.tanh(s), None, TypeError, "function that wants a plain float"),
    "int": (lambda s, b, h, i, j: int(s), None, TypeError, r"plain int .*astype\(int\)"),
    "range": (lambda s, b, h, i, j: sum(range(i)), None, TypeError, "plain index"),
    "captured": (lambda s, b, h, i, j: s + TABLE, None, TypeError,
        "ndarray as an operand; arrays that it reads must be given by name"),
    "captured-index": (lambda s, b, h, i, j: s + TABLE[h, i], None, TypeError, "a function that wants an array"),
    "float-index": (lambda s, b, h, i, j, table: s + table[h, i / 2], {"table": TABLE}, TypeError,
        "reads table at a float"),
    "indices": (lambda s, b, h, i, j, table: s + table[h], {"table": TABLE}, TypeError,
        "reads table with 1 indices; it must have 2.* a sum over a row is written out"),
    "whole-array": (lambda s, b, h, i, j, table: s + table, {"table": TABLE}, TypeError,
        "computes with table as a whole"),
    "array-length": (lambda s, b, h, i, j, table: s + len(table), {"table": TABLE}, TypeError,
        "asks for the length of table"),
    "element": (lambda s, b, h, i, j: s[0], None, TypeError,
        r"takes an element of a number.*test_score_messages.py, line \d+"),
    "length": (lambda s, b, h, i, j: len(s), None, TypeError, "asks for the length of a number"),
    "round": (lambda s, b, h, i, j: round(s), None, TypeError, "rounds a number of the pair"),
    "too-many": ("s", {f"table{n}": TABLE for n in range(33)}, ValueError,
        "score_arrays holds 33 arrays; it must hold at most 32"),
    "attribute": (lambda s, b, h, i, j: s.exp(), None, TypeError, "asks a number of the pair for its 'exp'"),
    "numpy": (lambda s, b, h, i, j: np.arctan(s), None, TypeError, "calls numpy.arctan, which is not known here"),
    "numpy-function": (lambda s, b, h, i, j: np.cumsum(s), None, TypeError, "numpy.cumsum|has not|an array"),
    "loop": (lambda s, b, h, i, j, table: s + sum(x for x, _ in zip(table, range(3))), {"table": TABLE[0]}, TypeError,
        "goes through table; it must read"),
    "in": (lambda s, b, h, i, j, table: s + (3 in table), {"table": TABLE[0]}, TypeError,
        "looks for a number in table"),
    "others": (lambda s, b, h, i, j: divmod(i, 2)[0], None, TypeError,
        r"to what does not take it; .*score_arrays.* \(.*test_score_messages.py, line \d+.*divmod"),
    "format": (lambda s, b, h, i, j: f"{s:.2f}", None, TypeError,
        "to what does not take it; it must use functions of cupyflash.score"),
    "astype": (lambda s, b, h, i, j: s.astype(complex), None, TypeError, "must be bool, int or float"),
    "bits-of-a-float": (lambda s, b, h, i, j: s & 1, None, TypeError, "it takes integers or booleans, not floats"),
    "sequence": (lambda s, b, h, i, j: sum(s), None, TypeError, "as if it were a sequence"),
    "text-operand": (lambda s, b, h, i, j: s + "1", None, TypeError, "has '1' as an operand; it must be a number"),
    "long": (lambda s, b, h, i, j: s + 2**70, None, TypeError, "more than 64 bits"),
    "text": (lambda s, b, h, i, j: "s", None, TypeError,
        r"has 's' as its result; it must be a number \(.*test_score_messages.py"),
    "none": (lambda s, b, h, i, j: None, None, TypeError, "score returns None"),
    "boolean": (lambda s, b, h, i, j: i < j, None, TypeError, "score returns a boolean; .*where"),
    "expression-end": ("s +", None, ValueError, "has its end instead of a number or a name at 4"),
    "expression-more": ("s 3", None, ValueError, "does not go on with '3' at 3"),
    "expression-sign": ("s $ 3", None, ValueError, r"has '\$' at 3"),
    "expression-name": ("s + x", None, ValueError, "has 'x', which is none of s, b, h, i, j nor a function"),
    "expression-arguments": ("tanh(s, 3)", None, ValueError, "'tanh' of 2 numbers, not 1"),
    "expression-bits": ("s & 1", None, ValueError, "it takes integers"),
    "expression-indices": ("s + table[h]", {"table": TABLE}, ValueError, "reads table with 1 indices, not 2"),
    "expression-index": ("s + table[h][s]", {"table": TABLE}, ValueError, "reads table at a float"),
    "expression-octal": ("s + 010", None, ValueError, "has '010', in C a number in base 8, at 5"),
    "expression-bracket": ("(s", None, ValueError, r"has its end instead of '\)'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_messages(name: str) -> None:
    score, arrays, error, says = WRONG[name]
    x = np.zeros((1, 4, 2, 3))
    with pytest.raises(error) as found:
        attention(x, x, x, score=score, score_arrays=arrays)
    message = str(found.value)
    for line in re.findall(r", line (\d+): ", message):  # the line there has what the message shall be
        message = message.replace(f": {linecache.getline(__file__, int(line)).strip()}", "")
    assert re.search(says, message), message


@pytest.mark.parametrize("score", [lambda s, b, h, i, j: 1, lambda s, b, h, i, j: np.float32(2.5), "0.5f"])
def test_a_score_that_is_a_number(score: Any, rng: np.random.Generator) -> None:
    """All keys weigh the same, and q and k have no gradient."""
    q, k, v = (rng.standard_normal((1, 9, 2, 3)) for _ in range(3))
    out, lse = attention(q, k, v, score=score, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=1, keepdims=True), v.shape), atol=1e-14)
    grads = attention_backward(q, q, k, v, out, lse, score=score)
    assert not grads.dq.any() and not grads.dk.any() and grads.dv.any()
    for of in ("forward", "backward"):
        assert explain((1, 9, 2, 64), dtype="bf16", arch="sm_80", of=of, score=score).family == "sm80"


def test_a_number_of_another_call() -> None:
    x, kept = np.zeros((1, 4, 2, 3)), []
    attention(x, x, x, score=lambda s, b, h, i, j: kept.append(s) or s)
    with pytest.raises(TypeError, match="a number of another call"):
        attention(x, x, x, score=lambda s, b, h, i, j: s + kept[0])


def test_not_with_a_soft_cap() -> None:
    x = np.zeros((1, 4, 2, 3))
    with pytest.raises(ValueError, match="softcap is 2.0, and score is given too"):
        attention(x, x, x, score="s * 2", softcap=2.0)


def test_wrt_names_its_arrays() -> None:
    x, arrays = np.zeros((1, 4, 2, 3)), {"ids": np.zeros((1, 4), int), "cap": np.ones(2)}
    out, lse = attention(x, x, x, score=documents, score_arrays=arrays, return_lse=True)

    def grads(wrt: Any) -> Any:
        return attention_backward(x, x, x, x, out, lse, score=documents, score_arrays=arrays, wrt=wrt)

    assert grads(()).dscore_arrays == {} and set(grads("cap").dscore_arrays) == {"cap"}
    with pytest.raises(ValueError, match="wrt holds 'ids', which has no gradient; .*'cap'"):
        grads("ids")
    with pytest.raises(ValueError, match="wrt holds 'other'; it must hold names"):
        grads("other")


def test_an_array_that_is_read_may_be_called_as_an_argument(rng: np.random.Generator) -> None:
    """Both have a gradient then; of a tangent it would not be known whose it is."""
    q, k, v, dout = rng.standard_normal((4, 1, 3, 1, 2))
    given, read = rng.standard_normal((2, 3, 3))
    asked = {"bias": given, "score": lambda s, b, h, i, j, bias: s * bias[i, j], "score_arrays": {"bias": read}}
    out, lse = attention(q, k, v, return_lse=True, **asked)
    grads = attention_backward(dout, q, k, v, out, lse, wrt="bias", **asked)
    other = {**asked, "score": lambda s, b, h, i, j, x: s * x[i, j], "score_arrays": {"x": read}}
    apart = attention_backward(dout, q, k, v, out, lse, wrt=("bias", "x"), **other)
    np.testing.assert_array_equal(grads.dbias, apart.dbias)
    np.testing.assert_array_equal(grads.dscore_arrays["bias"], apart.dscore_arrays["x"])
    with pytest.raises(ValueError, match=r"tangents has 'bias', which is bias and an array of score_arrays"):
        attention_jvp({"bias": given}, q, k, v, out, lse, **asked)
    tout, _ = attention_jvp({"bias": read}, q, k, v, out, lse, **asked | {"bias": None})
    np.testing.assert_array_equal(tout, attention_jvp({"x": read}, q, k, v, out, lse, **other | {"bias": None})[0])
