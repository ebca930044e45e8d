"""Score functions of one's own: what is computed, on every backend that takes it; messages.

On a GPU each function is a kernel to compile: there are few, and tests share them.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import Backend, in_turn, on_pairs_with_scores
from score_functions import WRITTEN, documents, relative
from semantics import LAYS, check, draw_inputs

from cupyflash import attention, attention_backward, attention_jvp, explain
from cupyflash.gpu.score import reads_of, tables
from cupyflash.score import (
    absolute,
    atan2,
    clip,
    cos,
    erf,
    exp,
    floor,
    gelu,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    trace,
    where,
)


@in_turn("name", WRITTEN, softcap=1.0)
def test_functions(backend: Backend, dtype: str, name: str, rng: np.random.Generator) -> None:
    for seq in ((67, 93), (193, 65), (300, 310)):
        inputs = draw_inputs(rng, dtype, seq=seq, heads=(4, 2), score=name)
        check(backend, inputs, score=WRITTEN[name].function)


@in_turn("name", ["relative", "documents"], softcap=1.0)
def test_with_all_else(backend: Backend, dtype: str, name: str, rng: np.random.Generator) -> None:
    """Before ALiBi, bias and masks; the gradient of lse goes through it."""
    given = ("mask", "bias", "alibi_slopes", "sinks")
    for dlse in (0.0, 1.0):
        inputs = draw_inputs(
            rng, dtype, seq=(130, 150), heads=(4, 2), given=given, key_mask=True, score=name, dlse=dlse
        )
        check(backend, inputs, score=WRITTEN[name].function, window=(40, 9), scale=-0.3)


@on_pairs_with_scores
def test_few_queries_of_heads_that_share_keys(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Where heads share a tile each has its own elements."""
    inputs = draw_inputs(rng, dtype, batch=50, seq=(5, 50), heads=(12, 3), score="relative")
    check(backend, inputs, score=relative, causal=True)


@in_turn("name", WRITTEN, softcap=1.0)
def test_deterministic_gradients(backend: Backend, dtype: str, name: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(300, 310), heads=(4, 2), score=name)
    before: list[bytes] | None = None
    put = {key: backend.put(x) for key, x in inputs.given.items()}
    arrays = {key[len("score_arrays['") : -2]: x for key, x in put.items()}
    q, k, v, dout = (backend.put(x) for x in inputs[:4])
    options: dict[str, Any] = {"score": WRITTEN[name].function, "score_arrays": arrays, "family": backend.family}
    out, lse = attention(q, k, v, return_lse=True, **options)
    wrt = [n for n, x in arrays.items() if x.dtype.kind == "f"]
    for _ in range(3):
        grads = attention_backward(dout, q, k, v, out, lse, deterministic=True, wrt=wrt, **options)
        bits = [backend.get(x).tobytes() for x in (*grads, *grads.dscore_arrays.values())]
        assert before in (None, bits)
        before = bits
    check(backend, inputs, deterministic=True, score=WRITTEN[name].function)


@on_pairs_with_scores
def test_strides_and_indices_that_are_nowhere(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Arrays are read where they are; what lies beyond an end is read at that end, before the first element too."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), score="relative")
    name = "score_arrays['table']"
    table = inputs.given[name]
    around = np.full((2 * table.shape[1], table.shape[0] + 1), np.nan, table.dtype)
    around[::2, 1:] = table.T
    q, k, v = (backend.put(x) for x in inputs[:3])
    options = {"score": relative, "family": backend.family}
    plain = attention(q, k, v, score_arrays={"table": backend.put(table)}, **options)
    strided = attention(q, k, v, score_arrays={"table": backend.put(around)[::2, 1:].T}, **options)
    reversed_ = attention(q, k, v, score_arrays={"table": backend.put(table[:, ::-1])[:, ::-1]}, **options)
    for other in (strided, reversed_):
        assert np.array_equal(backend.get(plain), backend.get(other))


@in_turn("lay", LAYS, softcap=1.0)
def test_layouts(backend: Backend, dtype: str, lay: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, heads=(4, 2), score="relative")
    check(backend, inputs, lay=LAYS[lay], layout="bhsd", score=relative)


@on_pairs_with_scores
def test_rows_that_it_hides(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """-inf for all keys of a query: 0, -inf and no gradient."""
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), score="documents")
    ids = inputs.given["score_arrays['ids']"]
    ids[:, 100:] = 5
    ids[:, 140:] = 6
    inputs.given["score_arrays['ids']"] = ids
    check(backend, inputs, score=documents, window=(None, 5))


def test_gradients_that_would_be_nan() -> None:
    """What `where` does not choose has no say, nor what has no weight."""
    q, k, v = (np.ones((1, 4, 1, 2)) for _ in range(3))
    weights = np.array([0.0, 1.0, 2.0, 0.0])

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, weights: Any) -> Any:
        return s + log(weights[j]) + where(j > 5, sqrt(s - 100), 0.0)

    out, lse = attention(q, k, v, score=score, score_arrays={"weights": weights}, return_lse=True)
    grads = attention_backward(
        np.ones_like(out), q, k, v, out, lse, score=score, score_arrays={"weights": weights}, wrt="weights",
        dlse=np.ones_like(lse)
    )  # fmt: skip
    assert np.isfinite(np.concatenate([x.ravel() for x in (*grads, *grads.dscore_arrays.values())])).all()
    np.testing.assert_allclose(grads.dscore_arrays["weights"], [0, 4 / 3, 4 / 3, 0])  # of log(weights.sum())


@pytest.mark.parametrize("as_text", [False, True])
def test_powers_of_nothing(as_text: bool, rng: np.random.Generator) -> None:
    """A learned power of the distance: on the diagonal 0 to it, whatever it is; and of x to the power of 0."""
    q, k, v, dout = (rng.standard_normal((1, 6, 2, 3)) for _ in range(4))
    arrays = {"power": np.array([0.7, 2.5]), "none": np.zeros(6)}
    written = (lambda s, b, h, i, j, power, none: s - absolute(i - j) ** power[h] + (0 * s) ** none[j],
               "s - pow(abs(i - j), power[h]) + pow(0 * s, none[j])")[as_text]  # fmt: skip
    given = {"score": written, "score_arrays": arrays}
    out, lse = attention(q, k, v, return_lse=True, **given)
    grads = attention_backward(dout, q, k, v, out, lse, wrt=tuple(arrays), **given)
    distance = np.abs(np.arange(6)[:, None] - np.arange(6)) * 1.0
    bias = -(distance ** arrays["power"][:, None, None]) + 1
    plain = attention_backward(dout, q, k, v, out, lse, bias=bias, wrt="bias")
    for x, y in zip(grads, plain):
        np.testing.assert_allclose(x, y, atol=1e-12)
    by_power = plain.dbias * (bias - 1) * np.log(np.where(distance == 0, 1, distance))
    np.testing.assert_allclose(grads.dscore_arrays["power"], by_power.sum((1, 2)), atol=1e-12)
    assert not grads.dscore_arrays["none"].any()


UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # as traced, and in NumPy
    "exp": (lambda x: exp(x / 4), lambda x: np.exp(x / 4)),
    "log": (lambda x: log(x * x + 0.1), lambda x: np.log(x * x + 0.1)),
    "log2": (lambda x: log2(abs(x) + 1), lambda x: np.log2(abs(x) + 1)),
    "sqrt": (lambda x: sqrt(x * x + 1), lambda x: np.sqrt(x * x + 1)),
    "tanh": (tanh, np.tanh),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "sin": (sin, np.sin),
    "cos": (lambda x: cos(x), np.cos),
    "erf": (erf, np.vectorize(math.erf)),
    "atan2": (lambda x: atan2(x, 1 + x * x), lambda x: np.arctan2(x, 1 + x * x)),
    "softplus": (softplus, lambda x: np.logaddexp(x, 0)),
    "gelu": (gelu, lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2),
    "floor": (lambda x: floor(x) * x, lambda x: np.floor(x) * x),
    "abs": (absolute, np.abs),
    "divide": (lambda x: 1 / (2 + x * x) - x / 3, lambda x: 1 / (2 + x * x) - x / 3),
    "power": (lambda x: x**3 - (x * x + 1) ** 0.7 + 1.5 ** (x / 9),
        lambda x: x**3 - (x * x + 1) ** 0.7 + 1.5 ** (x / 9)),
    "clip": (lambda x: clip(x, -0.5, 1), lambda x: np.clip(x, -0.5, 1)),
    "where": (lambda x: where((x > 0.1) & ~(x >= 1), x * x, -x), lambda x: np.where((x > 0.1) & ~(x >= 1), x * x, -x)),
    "numpy": (lambda x: np.where(np.less(x, 0.2), np.tanh(x), np.maximum(x, 1)),
        lambda x: np.where(x < 0.2, np.tanh(x), np.maximum(x, 1))),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_derivatives_by_finite_differences(name: str, rng: np.random.Generator) -> None:
    """In float64: of every function by s, and by an element of an array."""
    traced, plain = UNARY[name]
    q, k, v, dout = (rng.standard_normal((1, 7, 1, 3)) for _ in range(4))
    table = rng.standard_normal(7)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return traced(s + table[j])

    def loss(q: np.ndarray, table: np.ndarray) -> float:
        x = plain(np.einsum("bihd,bjhd->bhij", q, k) / 3**0.5 + table)
        p = np.exp(x - np.log(np.exp(x).sum(-1, keepdims=True)))
        return float((np.einsum("bhij,bjhd->bihd", p, v) * dout).sum())

    given = {"score": score, "score_arrays": {"table": table}}
    out, lse = attention(q, k, v, return_lse=True, **given)
    grads = attention_backward(dout, q, k, v, out, lse, wrt=("table",), **given)
    for x, grad in ((q, grads.dq), (table, grads.dscore_arrays["table"])):
        direction = rng.standard_normal(x.shape)
        step = 1e-6 * direction
        arguments = [(q + way * step, table) if x is q else (q, table + way * step) for way in (1, -1)]
        expected = (loss(*arguments[0]) - loss(*arguments[1])) / 2e-6
        assert abs((grad * direction).sum() - expected) < 1e-6 * max(1, abs(expected))


def test_a_tie_shares_the_derivative() -> None:
    for function, expected in ((maximum, 0.5), (minimum, 0.5)):
        found = trace(lambda s, b, h, i, j, function=function: function(s, 0.0), {})
        made = tables(found)
        assert value(made.slope, made.nodes, s=0.0) == expected
    made = tables(trace(lambda s, b, h, i, j: abs(s), {}))
    assert [value(made.slope, made.nodes, s=s) for s in (-2.0, 0.0, 3.0)] == [-1, 0, 1]


def value(root: int | None, nodes: Any, **variables: float) -> float:
    from cupyflash.cpu.score import compute

    assert root is not None
    return float(compute(nodes, (root,), {n: np.float64(x) for n, x in variables.items()}, [], np.float64)[0])


INTEGERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # of i and j
    "//": (lambda i, j: (i - j) // 3, lambda i, j: (i - j) // 3),
    "// 4": (lambda i, j: (i - j) // 4, lambda i, j: (i - j) // 4),
    "%": (lambda i, j: (i - j) % 3, lambda i, j: (i - j) % 3),
    "% 4": (lambda i, j: (i - j) % 4, lambda i, j: (i - j) % 4),
    "% -3": (lambda i, j: (i - j) % -3, lambda i, j: (i - j) % -3),
    "// j": (lambda i, j: where(j == 0, 0, i // j), lambda i, j: np.where(j == 0, 0, i // np.maximum(j, 1))),
    "bits": (lambda i, j: (i & 3 | j ^ 5) + (1 << (j & 3)) - (i >> 1),
        lambda i, j: (i & 3 | j ^ 5) + (1 << (j & 3)) - (i >> 1)),
    "not": (lambda i, j: ~i + (i != j).astype(int), lambda i, j: ~i + (i != j)),
    "int": (lambda i, j: ((i - j) / 2.0).astype(int), lambda i, j: np.trunc((i - j) / 2)),
    "abs": (lambda i, j: abs(i - j), lambda i, j: abs(i - j)),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, rng: np.random.Generator) -> None:
    traced, plain = INTEGERS[name]
    assert_computes(lambda s, b, h, i, j: s + traced(i, j) / 8, lambda s, i, j: s + plain(i, j) / 8, rng)


WRAPPING: tuple[Callable[..., Any], ...] = (  # of i and j, to 32 bits
    lambda i, j: i * 1000000007 + j * 998244353,
    lambda i, j: -(i * 1000000007) - (j * 998244353 - 2147483647),
    lambda i, j: abs((j * 0 + 1 << 31) + i % 2),
    lambda i, j: (j - 20 << i) + (j - 20 << 30),
    lambda i, j: (j - 20) * 16777216 >> i,
    lambda i, j: ((j * 0 + 1 << 31) + i) // (j * 0 - 1) + ((j * 0 + 1 << 31) + i) % (j * 0 - 1),
)


@on_pairs_with_scores
def test_integers_wrap_everywhere(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """As NumPy's do: the same bits as from a table of them."""
    inputs = draw_inputs(rng, dtype, seq=(40, 48), heads=(2, 1))
    q, k, v = (backend.put(x) for x in inputs[:3])
    i, j = np.arange(40, dtype=np.int32)[:, None], np.arange(48, dtype=np.int32)
    for n, of in enumerate(WRAPPING):
        with np.errstate(all="ignore"):
            table = backend.put(((of(i, j) >> np.int32(20)) / 512).astype(np.float32))
        expected = attention(q, k, v, score="s + table[i, j]", score_arrays={"table": table}, family=backend.family)
        found = attention(q, k, v, score=lambda s, b, h, i, j, of=of: s + (of(i, j) >> 20) / 512, family=backend.family)
        assert np.array_equal(backend.get(found), backend.get(expected)), n


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "s + 0.1f * (i - j)": lambda s, i, j: s + 0.1 * (i - j),
    "j <= i ? s : -INFINITY": lambda s, i, j: np.where(j <= i, s, -np.inf),
    "20 * tanhf(s / 20)": lambda s, i, j: 20 * np.tanh(s / 20),
    "s + (i - j) / 4 + (i - j) % 4": lambda s, i, j: s + np.trunc((i - j) / 4) + np.fmod(i - j, 4),
    "(i ^ j) & 0x3 ? fmaxf(s, .5f) : min(s, 1e0)": lambda s, i, j: np.where((i ^ j) & 3, np.maximum(s, 0.5),
        np.minimum(s, 1)),
    "!(i > 3 && j < 2 || i == j) * s - -(float)(i << 1 >> 2)": lambda s, i, j: ~((i > 3) & (j < 2) | (i == j)) * s
        + (i << 1 >> 2),
    "s + (int)(i * 0.5) + ~j + +h + b": lambda s, i, j: s + i // 2 + ~j,
}  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions(text: str, rng: np.random.Generator) -> None:
    assert_computes(text, EXPRESSIONS[text], rng)


def test_deep_expressions(rng: np.random.Generator) -> None:
    """As programs write them: what is nested, and what is chained."""
    for text, plain in (
        ("(" * 200 + "s" + " + 0.01 * i)" * 200, lambda s, i, j: s + 2 * i),
        ("- " * 1000 + "s", lambda s, i, j: s),
        ("(float)" * 1000 + "s", lambda s, i, j: s),
        ("".join(f"i == {n} ? s * {n} : " for n in range(1000)) + "0 * s", lambda s, i, j: s * i),
        ("s" + " + 0.001 * i" * 1000, lambda s, i, j: s + i),
    ):
        assert_computes(text, plain, rng)
    for text in ("(" * 5000 + "s" + ")" * 5000, "tanh(" * 5000 + "s" + ")" * 5000):
        with pytest.raises(ValueError, match="score is .* nested too deep; it must be flatter, or a Python function"):
            trace(text, {})


def test_what_is_used_twice_is_written_once() -> None:
    found = trace("(s + j) * (s + j) + tanh(s)", {})
    assert str(found) == "x3 = add(s, float(j)); add(mul(x3, x3), tanh(s))".replace("float(j)", "float(j)")

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for _ in range(11):
            s = (s + 1) * (s + 1)
        return s

    assert len(str(trace(score, {}))) < 500
    assert str(trace(lambda s, b, h, i, j: score(score(s, b, h, i, j), b, h, i, j), {})) == "of 46 operations"


def assert_computes(score: Any, plain: Callable[..., Any], rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 9, 1, 2)) for _ in range(3))
    i, j = np.ogrid[:9, :9]
    x = plain(q[0, :, 0] @ k[0, :, 0].T / 2**0.5, i, j)
    x = np.exp(x - x.max(-1, keepdims=True))
    expected = x / x.sum(-1, keepdims=True) @ v[0, :, 0]
    np.testing.assert_allclose(attention(q, k, v, score=score)[0, :, 0], expected, atol=1e-12)


def test_an_expression_reads_arrays(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, 9, 2, 4)) for _ in range(3))
    table = rng.standard_normal((2, 65))
    of_text = [
        attention(q, k, v, score=text, score_arrays={"table": table})
        for text in ("s + table[h][j - i + 32]", "s + table[h, j - i + 32]")
    ]
    for x in of_text:
        assert np.array_equal(x, attention(q, k, v, score=relative, score_arrays={"table": table}))


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_other_libraries_functions_are_refused_with_the_line(library: str) -> None:
    xp = pytest.importorskip(library)
    x, table = np.zeros((1, 4, 2, 3)), xp.asarray(TABLE)
    for score in (
        lambda s, b, h, i, j: xp.tanh(s),
        lambda s, b, h, i, j: xp.where(i > j, s, s),
        lambda s, b, h, i, j: s + table[h, i],
    ):
        with pytest.raises(TypeError, match=r"score_arrays.*test_score_functions.py, line \d+"):
            attention(x, x, x, score=score)


def test_what_depends_on_the_distance_is_computed_before() -> None:
    array = {"table": ("float32", 2, False)}
    assert len(tables(trace(relative, array)).tabled) == 1
    assert not tables(trace(lambda s, b, h, i, j, table: s + table[h, i], array)).tabled
    for index in (lambda i, j: abs(i - j), lambda i, j: 3 + j - i, lambda i, j: -i + 2 + j, lambda i, j: (i - j) // 2):
        (read,) = reads_of(
            trace(lambda s, b, h, i, j, table, index=index: s + table[h, index(i, j)], array), ["score_arrays['table']"]
        )
        assert read.diagonal and read.by_head and not read.by_batch and not read.weighted
    for index in (lambda i, j: i + j, lambda i, j: i // 2 - j // 2, lambda i, j: 2 * i - j):
        (read,) = reads_of(
            trace(lambda s, b, h, i, j, table, index=index: s * table[0, index(i, j)], array), ["score_arrays['table']"]
        )
        assert not read.diagonal and read.by_query and read.by_key and not read.by_head and read.weighted


def test_explain_names_it() -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
        return s + table[h, j - i]

    pytest.importorskip("cuda.core")
    told = explain((2, 300, 4, 64), dtype="bf16", arch="sm_90a", score=score, score_arrays={"table": (4, 9)})
    assert told.family == "sm90" and told.tiles["SCORE"]
    assert "table[h, sub(j, i)]" in str(told)
    plain = explain((2, 300, 4, 64), dtype="bf16", arch="sm_90a")
    assert told.bytes_moved == plain.bytes_moved + 4 * 4 * 9
    assert "flash1" not in [
        explain((2, 300, 4, 64), dtype="fp16", arch=a, score="s * 2").family for a in ("sm_75", "sm_80")
    ]


# ---- messages
# -----------------------------------------------------------------------------------------------------------

TABLE = np.zeros((2, 9))
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
        r"if, and, or.*where.*test_score_functions.py, line \d+"),
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
        r"takes an element of a number.*test_score_functions.py, line \d+"),
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
        r"to what does not take it; .*score_arrays.* \(.*test_score_functions.py, line \d+.*divmod"),
    "format": (lambda s, b, h, i, j: f"{s:.2f}", None, TypeError,
        "to what does not take it; it must use functions of cupyflash.score"),
    "astype": (lambda s, b, h, i, j: s.astype(complex), None, TypeError, "must be bool, int or float"),
    "bits-of-a-float": (lambda s, b, h, i, j: s & 1, None, TypeError, "it takes integers or booleans, not floats"),
    "sequence": (lambda s, b, h, i, j: sum(s), None, TypeError, "as if it were a sequence"),
    "text-operand": (lambda s, b, h, i, j: s + "1", None, TypeError, "has '1' as an operand; it must be a number"),
    "long": (lambda s, b, h, i, j: s + 2**70, None, TypeError, "more than 64 bits"),
    "text": (lambda s, b, h, i, j: "s", None, TypeError,
        r"has 's' as its result; it must be a number \(.*test_score_functions.py"),
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
