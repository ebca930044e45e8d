"""Derivatives beyond the first backward on NumPy arrays: identities, differences, JAX's own, corners and bad input.

What every option does to them, on every backend, `semantics.check` asks.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from criterion import ByLuck
from reference import DTYPES, draw, state
from reference_tangents import tangents
from score_functions import WRITTEN
from semantics import as_arguments, draw_blocks, draw_inputs
from tangents import Moving, can_move, draw_tangents

from cupyflash import attention, attention_backward, attention_backward_jvp, attention_jvp, merge
from cupyflash.cpu import crew
from cupyflash.gradients import Gradients
from cupyflash.score.graph import name_of

ALL = ("bias", "alibi_slopes", "sinks")
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "rows that see nothing": {"causal": True, "seq": (23, 11)},
    "window": {"window": (7, 3), "key_mask": True},
    "negative scale": {"scale": -0.7},
    "soft cap": {"softcap": 1.5, "scale": 0.8},
    "bias": {"given": ("bias",)},
    "bias for all queries": {"given": ("bias", "mask"), "full": "hk"},
    "slopes, sinks": {"given": ("alibi_slopes", "sinks"), "causal": "top_left"},
    "dropout": {"given": ("seed",), "dropout": 0.3},
    "blocks": {"blocks": True},
    "documents": {"score": "documents"},
    "relative": {"score": "relative"},
    "grid": {"score": "grid", "causal": True},
    "without s": {"score": "without_s"},
    "all": {"given": (*ALL, "seed"), "softcap": 2.0, "dropout": 0.2, "window": (9, 2), "key_mask": True},
    "all, scored": {"given": (*ALL, "mask", "seed"), "score": "documents", "dropout": 0.2, "full": "bqk"},
}
_DRAWN = ("seq", "key_mask", "given", "full", "score")
Arrays = dict[str, Any]


class Case:
    """A problem in float64, by its arrays; those with derivatives can be stepped."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        options = dict(CASES[name])
        drawn = {"seq": (13, 19), "heads": (4, 2), "dims": (6, 5), "dlse": 1.0}
        drawn |= {x: options.pop(x) for x in _DRAWN if x in options}
        inputs = draw_inputs(rng, "float64", **drawn)
        if drawn.get("score"):
            options["score"] = WRITTEN[drawn["score"]].function
        if options.pop("blocks", False):
            options["block_mask"] = draw_blocks(rng, (2, 4, *drawn["seq"]), (16, 16)).mask()
        masks = {} if inputs.key_mask is None else {"key_mask": inputs.key_mask}
        given = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in inputs.given.items()}
        self.arrays = {**dict(zip(("q", "k", "v", "dout", "dlse"), (*inputs[:4], inputs.dlse))), **masks, **given}
        self.options, self.rng = options, rng
        self.problem = state(*inputs[:3], **masks, **given, **options)
        self.names = can_move(self.problem, inputs.given)
        self.inputs = [name for name in self.names if name not in ("dout", "dlse")]

    def tangents(self, names: list[str] | None = None) -> Arrays:
        return draw_tangents(self.rng, self.arrays, self.names if names is None else names)

    def stepped(self, along: Mapping[str, Any], step: float) -> Arrays:
        return self.arrays | {name: self.arrays[name] + step * x for name, x in along.items()}

    def of(self, arrays: Arrays) -> Arrays:
        """As arguments of a call beside q, k, v."""
        others = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "dout", "dlse")}
        return as_arguments(others) | self.options

    def forward(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        return attention(*(arrays[x] for x in "qkv"), return_lse=True, **self.of(arrays))

    def backward(self, arrays: Arrays, dout: Any = None, dlse: Any = None) -> Arrays:
        out, lse = self.forward(arrays)
        dout, dlse = (arrays[n] if x is None else x for n, x in (("dout", dout), ("dlse", dlse)))
        qkv = (arrays[x] for x in "qkv")
        return self.named(attention_backward(dout, *qkv, out, lse, dlse=dlse, wrt=self.wrt, **self.of(arrays)))

    def jvp(self, moved: Arrays) -> tuple[np.ndarray, np.ndarray]:
        qkv = (self.arrays[x] for x in "qkv")
        return attention_jvp(told(moved), *qkv, *self.forward(self.arrays), **self.of(self.arrays))

    def backward_jvp(self, moved: Arrays, **more: Any) -> Arrays:
        a = self.arrays
        more = {"wrt": self.wrt, "dlse": a["dlse"]} | more
        out, lse = self.forward(a)
        found = attention_backward_jvp(told(moved), a["dout"], a["q"], a["k"], a["v"], out, lse, **more, **self.of(a))
        return self.named(found)

    @property
    def wrt(self) -> list[str]:
        return [name_of(name) or name for name in self.inputs if name not in ("q", "k", "v")]

    def named(self, found: Gradients) -> Arrays:
        return {name: found.of_call(name) for name in self.inputs}


def told(moved: Arrays) -> Arrays:
    return {name_of(name) or name: x for name, x in moved.items()}


def inner(x: Arrays, y: Arrays) -> float:
    return sum(float((x[name] * y[name]).sum()) for name in x)


def close(found: Any, expected: Any, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0.0)))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, rng: np.random.Generator) -> Case:
    return Case(request.param, rng)


def test_the_jvp_is_the_transpose_of_the_backward(case: Case) -> None:
    moved = case.tangents(case.inputs)
    tout, tlse = case.jvp(moved)
    finite = np.isfinite(case.forward(case.arrays)[1])
    assert not tlse[~finite].any() and tout.shape == case.arrays["dout"].shape
    expected = inner(case.backward(case.arrays), moved)
    assert (case.arrays["dout"] * tout).sum() + (case.arrays["dlse"] * tlse).sum() == pytest.approx(expected, rel=1e-10)


def test_the_hessian_is_symmetric(case: Case) -> None:
    one, two = case.tangents(case.inputs), case.tangents(case.inputs)
    left, right = inner(two, case.backward_jvp(one)), inner(one, case.backward_jvp(two))
    assert left == pytest.approx(right, rel=1e-9, abs=1e-9)


def test_differences(case: Case) -> None:
    """Corners of score functions are far from what is drawn."""
    moved, step = case.tangents(), 1e-5
    of_inputs = {name: moved[name] for name in case.inputs}
    (out, lse), (before, lse_before) = (case.forward(case.stepped(of_inputs, x)) for x in (step, -step))
    tout, tlse = case.jvp(of_inputs)
    finite = np.isfinite(lse)
    close(tout, (out - before) / (2 * step), 1e-6)
    close(tlse[finite], (lse[finite] - lse_before[finite]) / (2 * step), 1e-6)
    grads, others = (case.backward(case.stepped(moved, x)) for x in (step, -step))
    for name, x in case.backward_jvp(moved).items():
        close(x, (grads[name] - others[name]) / (2 * step), 1e-6)


def test_each_tangent_alone(case: Case) -> None:
    """What is not there costs nothing, and is 0: all of them together are their sum."""
    moved = case.tangents()
    of_inputs = [case.jvp({name: moved[name]}) for name in case.inputs]
    for x, each in zip(case.jvp({name: moved[name] for name in case.inputs}), zip(*of_inputs)):
        close(x, sum(each))
    each_alone = [case.backward_jvp({name: moved[name]}) for name in case.names]
    for name, x in case.backward_jvp(moved).items():
        close(x, sum(found[name] for found in each_alone))


def test_what_a_jvp_gave_is_used(rng: np.random.Generator) -> None:
    case = Case("all", rng)
    moved = case.tangents(case.inputs)
    found, given = (case.backward_jvp(moved, **x) for x in ({}, {"jvp": case.jvp(moved)}))
    assert all(np.array_equal(x, given[name]) for name, x in found.items())
    other = case.backward_jvp(moved, jvp=[2 * x for x in case.jvp(moved)])
    assert not np.allclose(other["q"], found["q"])


def test_tangents_of_the_gradients_of_results_alone(rng: np.random.Generator) -> None:
    """Then it is a backward."""
    case = Case("all", rng)
    moved = case.tangents(["dout", "dlse"])
    expected = case.backward(case.arrays, moved["dout"], moved["dlse"])
    for name, x in case.backward_jvp(moved).items():
        close(x, expected[name])


def test_merged_parts_have_the_tangent_of_the_whole(rng: np.random.Generator) -> None:
    q, k, v, tq, tk, tv = rng.standard_normal((6, 2, 40, 3, 8))
    out, lse = attention(q, k, v, return_lse=True)
    tout, tlse = attention_jvp({"q": tq, "k": tk, "v": tv}, q, k, v, out, lse)
    parts = [slice(0, 15), slice(15, 40)]
    found = [attention(q, k[:, x], v[:, x], return_lse=True) for x in parts]
    moved = [
        attention_jvp({"q": tq, "k": tk[:, x], "v": tv[:, x]}, q, k[:, x], v[:, x], *y) for x, y in zip(parts, found)
    ]
    step = 1e-6
    merged = [
        merge(*zip(*((out + e * tout, lse + e * tlse) for (out, lse), (tout, tlse) in zip(found, moved))))
        for e in (step, -step)
    ]
    for x, (after, before) in zip((tout, tlse), zip(*merged)):
        close(x, (after - before) / (2 * step), 1e-7)


# ---- the reference
# ------------------------------------------------------------------------------------------------------

OF_JAX = {
    "plain": {},
    "soft cap, causal": {"softcap": 1.5, "causal": True},
    "terms": {"given": ALL, "causal": True},
    "dropped, scored": {"given": ("bias", "seed"), "dropout": 0.3, "score": "documents"},
}


@pytest.mark.parametrize("name", OF_JAX)
def test_the_reference_is_what_jax_gives(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rules, of standard attention."""
    jax = pytest.importorskip("jax")
    monkeypatch.setitem(CASES, name, OF_JAX[name])
    case = Case(name, rng)
    moved = case.tangents()
    found = tangents(case.problem, case.arrays, moved)
    fixed = {x: y for x, y in case.arrays.items() if x not in case.names}
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", True)

        def results(inputs: Arrays) -> Any:
            return standard_of_jax(case.problem, inputs | fixed)

        def gradients(inputs: Arrays, dout: Any, dlse: Any) -> Any:
            return jax.vjp(results, inputs)[1]((dout, dlse))[0]

        inputs, along = ({x: jax.numpy.asarray(y[x]) for x in case.inputs} for y in (case.arrays, moved))
        of_results, along_results = ([jax.numpy.asarray(y[x]) for x in ("dout", "dlse")] for y in (case.arrays, moved))

        @jax.jit
        def moving(inputs: Arrays, along: Arrays, of_results: Any, along_results: Any) -> Any:
            _, of_forward = jax.jvp(results, (inputs,), (along,))
            _, of_backward = jax.jvp(gradients, (inputs, *of_results), (along, *along_results))
            return of_forward, of_backward

        (tout, tlse), grads = moving(inputs, along, of_results, along_results)
    finally:
        jax.config.update("jax_enable_x64", before)
    expected = {"tout": tout, "tlse": tlse} | {f"td{x}": y for x, y in grads.items()}
    assert expected.keys() == found.keys()
    for x, y in expected.items():
        close(found[x], y, 1e-12)


def standard_of_jax(problem: Any, a: Arrays) -> Any:
    """softmax(score(Q Kᵀ)) V and lse, in JAX."""
    import jax.numpy as jnp
    from reference import distance, kept, visible

    q, k, v = (a[x].transpose(0, 2, 1, 3) for x in "qkv")
    k, v = (jnp.repeat(x, problem.group, 1) for x in (k, v))
    s = problem.scale * q @ k.swapaxes(-1, -2)
    seen = jnp.asarray(visible(problem, a.get("key_mask"), a.get("mask")))
    if problem.score is not None:  # documents
        ids, cap = a["score_arrays['ids']"], a["score_arrays['cap']"][:, None, None]
        seen = seen & (ids[:, None, : problem.seq_q, None] == ids[:, None, None, : problem.seq_k])
        s = cap * jnp.tanh(s / cap)
    if problem.softcap is not None:
        s = problem.softcap * jnp.tanh(s / problem.softcap)
    if "alibi_slopes" in a:
        s = s - a["alibi_slopes"][..., None, None] * distance(problem)
    if "bias" in a:
        s = s + jnp.where(seen, a["bias"], 0)
    s = jnp.where(seen, s, -jnp.inf)
    if "sinks" in a:
        sink = jnp.broadcast_to(a["sinks"][:, None, None], (*s.shape[:-1], 1))
        s = jnp.concatenate([s, sink], -1)
    top = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = (e / total)[..., : problem.seq_k] * kept(problem, a) / problem.kept
    return (p @ v).transpose(0, 2, 1, 3), (top + jnp.log(total))[..., 0]


# ---- precision
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tangents_that_all_keys_share(dtype: str, rng: np.random.Generator) -> None:
    """A time embedding's, for instance: what they share moves all scores alike, and is taken off before anything is
    rounded."""
    q, k, v, dout, tq, tk, tv = draw(rng, dtype, 7, 2, 200, 2, 64)
    tk = (tk.astype(np.float32) + 16).astype(DTYPES[dtype])
    arrays, moved = {"q": q, "k": k, "v": v, "dout": dout}, {"q": tq, "k": tk, "v": tv}
    problem = state(q, k, v)
    exact, own = (tangents(problem, arrays, moved, own=x) for x in (False, True))
    out, lse = attention(q, k, v, return_lse=True)
    tout, _ = attention_jvp(moved, q, k, v, out, lse)
    error, of_own = (np.abs(x.astype(np.float64) - exact["tout"]).max() for x in (tout, own["tout"]))
    assert error < of_own / 4, (error, of_own)


@pytest.mark.filterwarnings("error")
def test_where_a_handful_of_queries_decides_the_rounding_of_o_is_allowed(rng: np.random.Generator) -> None:
    """Along sinks alone tO is a part of O, whose rounding comes twice, where own precision may be right by luck. A tO
    that is off is not allowed."""
    refused = 0
    for _ in range(150):
        (q, dout), (k, v) = (draw(rng, "float16", 2, 1, rows, 2, 64) for rows in (2, 3))
        sinks, tsinks = rng.standard_normal((2, 2)).astype(np.float16)
        arrays, moved = {"q": q, "k": k, "v": v, "dout": dout, "sinks": sinks}, {"sinks": tsinks}
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
        tout, tlse = attention_jvp(moved, q, k, v, out, lse, sinks=sinks)
        judge = Moving(state(q, k, v, sinks=sinks), arrays, moved).judge
        for factor in (1, 0.5):
            jvp = tout * np.float16(factor), tlse
            found = attention_backward_jvp(moved, dout, q, k, v, out, lse, jvp=jvp, sinks=sinks)
            try:
                judge("tdk", found.dk), judge("tdq", found.dq)
            except (AssertionError, ByLuck):
                assert factor < 1
                refused += 1
    assert refused > 140


# ---- corners
# ----------------------------------------------------------------------------------------------------------


def test_rows_whose_first_keys_lie_in_different_tiles(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is judged from the mean of its own first tile on, whatever others begin to see."""
    monkeypatch.setattr(sys.modules["cupyflash.cpu.tiles"], "QUERIES", 16)
    monkeypatch.setattr(sys.modules["cupyflash.cpu.tiles"], "KEYS", 16)
    monkeypatch.setattr(sys.modules["cupyflash.cpu.tiles"], "LONGEST", 1)
    mask = np.arange(64) >= rng.integers(0, 60, (1, 1, 20, 1))
    arrays = dict(zip(("q", "k", "v", "dout"), draw(rng, "float64", 4, 1, 64, 2, 8)))
    arrays["q"], arrays["dout"] = (arrays[name][:, :20] for name in ("q", "dout"))
    problem = state(*(arrays[name] for name in "qkv"), mask=mask)
    moved = draw_tangents(rng, arrays, ["q", "k", "v"])
    given = [arrays[name] for name in "qkv"]
    out, lse = attention(*given, mask=mask, return_lse=True)
    tout, tlse = attention_jvp(moved, *given, out, lse, mask=mask)
    exact = tangents(problem, arrays | {"mask": mask}, moved)
    assert np.abs(tout - exact["tout"]).max() < 1e-12 and np.abs(tlse - exact["tlse"]).max() < 1e-12


def test_rows_that_see_nothing(rng: np.random.Generator) -> None:
    q, k, v, dout, tq, tk, tv = rng.standard_normal((7, 1, 9, 2, 4))
    k, v, tk, tv = (x[:, :4] for x in (k, v, tk, tv))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    blind = np.isneginf(lse[0, 0])
    assert blind.sum() == 5
    for x in (q, tq, dout):
        x[:, blind] = np.nan
    moved = {"q": tq, "k": tk, "v": tv, "dlse": np.full_like(lse, 1.0)}
    moved["dlse"][..., blind] = np.inf
    of_inputs = {name: moved[name] for name in "qkv"}
    tout, tlse = attention_jvp(of_inputs, q, k, v, out, lse, causal=True)
    assert not tout[:, blind].any() and not tlse[..., blind].any() and np.isfinite(tout).all()
    found = attention_backward_jvp(moved, dout, q, k, v, out, lse, causal=True)
    assert not found.dq[:, blind].any() and all(np.isfinite(x).all() for x in found)


def test_hidden_pairs_add_nothing_whatever_is_there(rng: np.random.Generator) -> None:
    q, k, v, dout, tq, tk, tv = rng.standard_normal((7, 1, 8, 2, 4))
    bias, tbias = rng.standard_normal((2, 1, 2, 8, 8))
    seen = rng.random((1, 8)) < 0.6
    seen[:, 0] = True
    cleared = [np.where(seen[..., None, None], x, 0) for x in (k, v, tk, tv)]
    off = rng.random(bias.shape) < 0.2
    off[..., 0] = False
    bias = np.where(off, -np.inf, bias)

    def found(k: Any, v: Any, tk: Any, tv: Any, tbias: Any) -> list[np.ndarray]:
        options = {"key_mask": seen, "bias": bias}
        out, lse = attention(q, k, v, return_lse=True, **options)
        moved = {"q": tq, "k": tk, "v": tv, "bias": tbias}
        tout, tlse = attention_jvp(moved, q, k, v, out, lse, **options)
        h = attention_backward_jvp(moved, dout, q, k, v, out, lse, wrt="bias", **options)
        assert not h.dbias[..., ~seen[0]].any() and not h.dbias[off].any()
        return [tout, tlse, *h, h.dbias]

    spoilt = [np.where(seen[..., None, None], x, np.nan) for x in (k, v, tk, tv)]
    clean = found(*cleared, np.where(off, 0, tbias))
    for x, y in zip(clean, found(*spoilt, np.where(off | ~seen[:, None, None], np.nan, tbias))):
        np.testing.assert_array_equal(x, y)


def test_a_pair_of_probability_0_adds_nothing() -> None:
    """Though it is seen."""
    q, k = np.ones((1, 1, 1, 1)), np.array([0.0, -2000.0]).reshape(1, 2, 1, 1)
    v, nowhere = np.ones((1, 2, 1, 1)), np.array([1.0, np.inf]).reshape(1, 2, 1, 1)
    out, lse = attention(q, k, v, return_lse=True)
    moved = {"k": nowhere, "v": nowhere}
    tout, tlse = attention_jvp(moved, q, k, v, out, lse)
    assert tout.item() == 1 and tlse.item() == 1
    found = attention_backward_jvp(moved, out, q, k, v, out, lse)
    assert all(np.isfinite(x).all() for x in found) and not found.dk[:, 1].any() and not found.dv[:, 1].any()


@pytest.mark.parametrize(
    ("sq", "sk", "heads", "d", "dv"),
    [(0, 5, 2, 4, 4), (5, 0, 2, 4, 4), (5, 6, 0, 4, 4), (5, 6, 2, 0, 4), (5, 6, 2, 4, 0)],
)
def test_empty(sq: int, sk: int, heads: int, d: int, dv: int, rng: np.random.Generator) -> None:
    (q, tq), (k, tk), (v, tv), (dout, tdout) = (
        rng.standard_normal((2, 2, n, heads, size)) for n, size in ((sq, d), (sk, d), (sk, dv), (sq, dv))
    )
    out, lse = attention(q, k, v, return_lse=True)
    moved = {"q": tq, "k": tk, "v": tv}
    tout, tlse = attention_jvp(moved, q, k, v, out, lse)
    assert (tout.shape, tlse.shape) == (out.shape, lse.shape)
    found = attention_backward_jvp(moved | {"dout": tdout}, dout, q, k, v, out, lse)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    if sk == 0:
        assert not tout.any() and not tlse.any() and not found.dq.any()


def test_sinks_without_keys(rng: np.random.Generator) -> None:
    """lse is the sink."""
    q, k = rng.standard_normal((1, 3, 2, 4)), np.empty((1, 0, 2, 4))
    sinks, tsinks, rows, tdlse = (rng.standard_normal(n) for n in (2, 2, (1, 2, 3), (1, 2, 3)))
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    tout, tlse = attention_jvp({"sinks": tsinks}, q, k, k, out, lse, sinks=sinks)
    assert not tout.any()
    np.testing.assert_array_equal(tlse, np.broadcast_to(tsinks[:, None], tlse.shape))
    found = attention_backward_jvp(
        {"sinks": tsinks, "dlse": tdlse}, q, q, k, k, out, lse, sinks=sinks, dlse=rows, wrt="sinks"
    )
    close(found.dsinks, tdlse.sum((0, 2)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_cores_do_not_matter(deterministic: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout, tq, tk, tv = draw(rng, "float32", 7, 1, 1200, 2, 16)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    moved, found = {"q": tq, "k": tk, "v": tv}, []
    for cores in (1, 3):
        monkeypatch.setattr(crew, "threads", lambda n=cores: n)
        jvp = attention_jvp(moved, q, k, v, out, lse, causal=True)
        grads = attention_backward_jvp(
            moved, dout, q, k, v, out, lse, causal=True, jvp=jvp, deterministic=deterministic
        )
        found.append([*jvp, *grads])
    assert all(np.array_equal(x, y) for x, y in zip(found[0][:3], found[1][:3]))
    for x, y in zip(*found):
        np.testing.assert_allclose(x, y, rtol=0, atol=0 if deterministic else 1e-4)


def test_no_array_over_all_pairs(rng: np.random.Generator) -> None:
    """The scores of 8192 tokens alone are 256 MB."""
    q, k, v, dout, tq, tk, tv = draw(rng, "float32", 7, 8192, 8)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    moved = {"q": tq, "k": tk, "v": tv}
    tracemalloc.start()
    try:
        jvp = attention_jvp(moved, q, k, v, out, lse, causal=True)
        attention_backward_jvp(moved, dout, q, k, v, out, lse, causal=True, jvp=jvp)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


# ---- where results go
# ---------------------------------------------------------------------------------------------------


def test_targets(rng: np.random.Generator) -> None:
    q, k, v, dout, tq = rng.standard_normal((5, 2, 7, 3, 4))
    out, lse = attention(q, k, v, return_lse=True)
    there = np.full((2, 3, 7, 4), np.nan).swapaxes(1, 2)
    tout, tlse = attention_jvp({"q": tq}, q, k, v, out, lse, tout=there)
    assert tout is there
    np.testing.assert_array_equal(there, attention_jvp({"q": tq}, q, k, v, out, lse)[0])
    grads = tuple(np.full(x.shape, np.nan) for x in (q, k, v))
    found = attention_backward_jvp({"q": tq}, dout, q, k, v, out, lse, grads=grads)
    assert all(x is y for x, y in zip(found, grads)) and all(np.isfinite(x).all() for x in grads)
    with pytest.raises(ValueError, match=r"^tout shares memory with tangents\['q'\]; it must have memory of its own$"):
        attention_jvp({"q": tq}, q, k, v, out, lse, tout=tq)
    with pytest.raises(ValueError, match=r"^grads: dk has shape \(2, 7, 3, 3\); it must be \(2, 7, 3, 4\)$"):
        attention_backward_jvp({"q": tq}, dout, q, k, v, out, lse, grads=(grads[0], grads[1][..., :3], grads[2]))
    with pytest.raises(ValueError, match=r"^jvp: tlse shares|^grads: dq shares memory with jvp: tout"):
        attention_backward_jvp({"q": tq}, dout, q, k, v, out, lse, jvp=(tout, tlse), grads=(tout, *grads[1:]))
