"""Score functions of one's own: what is computed, on every backend that takes it; messages.

On a GPU each function is a kernel to compile: there are few, and tests share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends import Backend, in_turn, on_pairs_with_scores
from score_functions import WRITTEN, documents, relative
from semantics import LAYS, check, draw_inputs

from cupyflash import attention, attention_backward, explain
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
