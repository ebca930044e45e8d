"""Derivatives of second order in JAX: every order of forward and reverse mode, against JAX's own of standard
attention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_jax_transforms import PLATFORMS, as_good, close, double_precision, numbers

import cupyflash
from cupyflash.cpu import corridor

jax = pytest.importorskip("jax")

from jax import numpy as jnp

from cupyflash.interop import jax_call
from cupyflash.jax import attention, dot_product_attention

__all__ = ["double_precision"]  # a fixture of every test

TREE = jax.tree


@pytest.fixture(autouse=True)
def quick_to_compile() -> Any:
    """XLA takes most of the time of these tests."""
    on_cpu = jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", on_cpu)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SHAPES: dict[str, Any] = {
    "q": (2, 4, 4, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 3), "bias": (4, 1, 5), "alibi_slopes": (4,), "sinks": (4,), "table": (4, 5),
}  # fmt: skip
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "scores": (("q", "k", "v", "bias", "alibi_slopes", "sinks"), {"causal": True, "softcap": 1.3, "window": (2, 0)}),
    "function": (("q", "k", "v", "sinks", "table"), {"masked": True}),
}


SEEN = np.array([[True, False, True, True, True], [False] * 5])  # the queries of one entry see no key


def bent(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """A score function that is linear in neither."""
    return s * table[h, j] + 0.1 * s * s + table[h, j] * table[h, j]


def drawn(names: tuple[str, ...], seed: int = 0, **how: Any) -> dict[str, Any]:
    return {name: numbers(*SHAPES[name], seed=seed + n, **how) for n, name in enumerate(names)}


def ours(x: dict[str, Any], masked: bool = False, **options: Any) -> Any:
    x = dict(x)
    options |= {"key_mask": SEEN, "score": bent, "score_arrays": {"table": x.pop("table")}} if masked else {}
    return attention(x.pop("q"), x.pop("k"), x.pop("v"), **x, **options, return_lse=True)


def standard(
    x: dict[str, Any], masked: bool = False, causal: bool = False, softcap: float = 0.0, window: Any = None
) -> Any:
    q, (k, v) = x["q"], (jnp.repeat(x[name], x["q"].shape[2] // x["k"].shape[2], 2) for name in "kv")
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / q.shape[-1] ** 0.5
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    if masked:
        table = x["table"][:, None, :]
        s = s * table + 0.1 * s * s + table * table
    if "alibi_slopes" in x:
        s = s - x["alibi_slopes"][:, None, None] * abs(distance)
    s = s + x.get("bias", 0)
    there = distance <= (0 if causal else k.shape[1])
    there &= distance >= -(window[0] if window else k.shape[1])
    there = there & (SEEN[:, None, None] if masked else True)
    s = jnp.where(there, s, -1e30)
    more = jnp.broadcast_to(x["sinks"][:, None, None] if "sinks" in x else -1e30, (*s.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate((s, more), -1), -1)
    p = jnp.where(there, jnp.exp(s - lse[..., None]), 0)
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest"), lse


def loss(attend: Any) -> Any:
    """Of both results, and no square of them."""

    def of(x: Any) -> Any:
        out, lse = attend(x)
        return (jnp.tanh(out) ** 2).sum() + jnp.sin(lse).sum()

    return of


def dot(x: Any, y: Any) -> Any:
    return sum((a * b).sum() for a, b in zip(TREE.leaves(x), TREE.leaves(y), strict=True))


Transform = Callable[[Any, Any, Any], Any]
ORDERS: dict[str, Transform] = {
    "jvp": lambda f, x, u: jax.jvp(f, (x,), (u,)),
    "jvp of grad": lambda f, x, u: jax.jvp(jax.grad(loss(f)), (x,), (u,)),
    "grad of jvp": lambda f, x, u: jax.grad(lambda x, u: jax.jvp(loss(f), (x,), (u,))[1], (0, 1))(x, u),
    "grad of grad": lambda f, x, u: jax.grad(lambda x: dot(jax.grad(loss(f))(x), u))(x),
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_order(case: str, platform: str) -> None:
    names, options = CASES[case]
    x, u = drawn(names, platform=platform), drawn(names, 9, platform=platform)
    close(*(
        jax.jit(lambda x, u, f=f: {name: order(lambda x: f(x, **options), x, u) for name, order in ORDERS.items()})(x, u)
        for f in (ours, standard)
    ))  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_good_as_standard_attention(dtype: str, platform: str) -> None:
    """In its own precision; lse and a bias are float32 beside 16 bits."""
    x, u = (drawn(("q", "k", "v", "bias"), seed, dtype=dtype, platform=platform) for seed in (0, 9))
    x["bias"], u["bias"] = (y["bias"].astype("float32") for y in (x, u))

    def of(f: Any, dtype: str | None = None) -> Any:
        def attend(x: Any) -> Any:
            out, lse = f(x, causal=True)
            return out, lse.astype(dtype or "float32")

        given = [TREE.map(lambda y: y.astype(dtype or y.dtype), y) for y in (x, u)]
        return TREE.leaves(jax.jit(lambda x, u: ORDERS["grad of grad"](attend, x, u))(*given))

    as_good(
        of(ours),
        of(lambda x, **how: standard(x | {"bias": x["bias"].astype(dtype)}, **how)),
        of(standard, "float64"),
        dtype,
    )


def stacked(x: Any) -> Any:
    return TREE.map(lambda x: jnp.stack([x, x * x]), x)


def layers(f: Any) -> Any:
    """Two of them, which keep nothing of what they compute."""
    return lambda x: jax.lax.scan(lambda sum_, _: (sum_ + jax.checkpoint(loss(f))(x), None), 0.0, None, 2)[0]


TRANSFORMS: dict[str, Transform] = {
    "linearize": lambda f, x, u: jax.linearize(f, x)[1](u),
    "jacfwd": lambda f, x, u: jax.jacfwd(f)(x),
    "jacrev": lambda f, x, u: jax.jacrev(f)(x),
    "hessian": lambda f, x, u: jax.hessian(loss(f))(x),
    "jacrev of jacfwd": lambda f, x, u: jax.jacrev(jax.jacfwd(loss(f)))(x),
    "jacrev of jacrev": lambda f, x, u: jax.jacrev(jax.jacrev(loss(f)))(x),
    "vmap of jvp": lambda f, x, u: jax.vmap(lambda u: ORDERS["jvp"](f, x, u))(stacked(u)),
    "vmap of jvp of grad": lambda f, x, u: jax.vmap(lambda x, u: ORDERS["jvp of grad"](f, x, u), (0, None))(stacked(x), u),
    "vmap of grad of jvp": lambda f, x, u: jax.vmap(lambda u: ORDERS["grad of jvp"](f, x, u))(stacked(u)),
    "grad of vmap of jvp": lambda f, x, u: jax.grad(
        lambda x: jnp.sin(jax.vmap(lambda u: jax.jvp(loss(f), (x,), (u,))[1])(stacked(u))).sum()
    )(x),
    "remat and scan": lambda f, x, u: [
        jax.jvp(jax.grad(layers(f)), (x,), (u,)), jax.grad(lambda x: dot(jax.grad(layers(f))(x), u))(x),
    ],
    "by the direction": lambda f, x, u: jax.grad(lambda u: dot(jax.jvp(jax.grad(loss(f)), (x,), (u,))[1], x))(u),
    "of lse alone": lambda f, x, u: jax.grad(
        lambda x: dot(jax.grad(lambda x: jnp.sin(f(x)[1]).sum())(x), u)
    )(x),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    rows = {"q": (1, 2, 2, 3), "k": (1, 3, 1, 3), "v": (1, 3, 1, 2), "bias": (2, 3)}
    x, u = ({n: numbers(*shape, seed=seed) for n, shape in rows.items()} for seed in (0, 5))
    close(*(
        jax.jit(lambda x, u, f=f: TRANSFORMS[name](lambda x: f(x, causal=True), x, u))(x, u) for f in (ours, standard)
    ))  # fmt: skip


# ---- which kernels run
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The passes that run, each with the arrays that it has tangents of."""
    found: list[tuple[str, str]] = []
    run = corridor.run

    def spied(call: Any) -> Any:
        found.append(
            (call.of.name, " ".join(sorted(x[1:] for x in call.arrays if x[0] == "t" and x not in ("tout", "tlse"))))
        )
        return run(call)

    monkeypatch.setattr(corridor, "run", spied)
    return found


def count(ran: list[tuple[str, str]]) -> dict[str, int]:
    names = [name for name, _ in ran]
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize(("stopped", "compiled"), [(True, False), (True, True), (False, True)])
def test_a_meanflow_step(stopped: bool, compiled: bool, ran: list[tuple[str, str]]) -> None:
    """The target of MeanFlow and of consistency models has no gradient: no second derivative is computed for it."""
    x, w = drawn(("q", "k", "v")), drawn(("q", "k", "v"), 9)

    def step(f: Any) -> Any:
        def of(w: Any) -> Any:
            def net(z: Any, time: Any) -> Any:
                return f(TREE.map(lambda x, w: jnp.tanh(x * w + time), x, w))[0] * z

            one = jnp.ones(())
            u, du = jax.jvp(net, (one, one), (0.3 * one, one))
            return ((u - 0.5 * (jax.lax.stop_gradient(du) if stopped else du)) ** 2).sum()

        return jax.value_and_grad(of)

    found = (jax.jit(step(ours)) if compiled else step(ours))(w)
    once = {"forward": 1, "jvp": 1, "backward": 1}
    assert count(ran) == (once if stopped else once | {"backward": 2, "backward_jvp": 1})
    close(found, jax.jit(step(standard))(w))


@pytest.mark.parametrize("compiled", [False, True])
def test_trained_forces(compiled: bool, ran: list[tuple[str, str]]) -> None:
    x, w = drawn(("q", "k", "v")), drawn(("q", "k", "v"), 9)

    def training(f: Any) -> Any:
        def of(w: Any) -> Any:
            def energy(place: Any) -> Any:
                return (f(TREE.map(lambda x, w: x * w + jnp.sin(place), x, w))[0] ** 2).sum()

            value, force = jax.value_and_grad(energy)(jnp.asarray(0.3))
            return 1e-3 * value**2 + force**2

        return jax.value_and_grad(of)

    found = (jax.jit(training(ours)) if compiled else training(ours))(w)
    assert count(ran) == {"forward": 1, "backward": 2, "jvp": 1, "backward_jvp": 1}
    close(found, jax.jit(training(standard))(w), 1e-8)


def test_what_has_no_tangent_costs_nothing(ran: list[tuple[str, str]]) -> None:
    x = drawn(("q", "k", "v", "bias", "sinks"))

    def of(name: str) -> Any:
        return lambda y: ours(x | {name: y}, causal=True)

    for name, y in x.items():
        ran.clear()
        f = of(name)
        jax.jvp(f, (y,), (y,))
        jax.grad(lambda y, f=f: dot(jax.grad(lambda y: f(y)[0].sum())(y), y))(y)
        assert ran == [
            ("forward", ""), ("jvp", name),
            ("forward", ""), ("backward", ""), ("jvp", name), ("backward_jvp", name),
        ]  # fmt: skip
    ran.clear()
    jax.jvp(jax.grad(lambda q: (of("q")(q)[0] ** 2).sum()), (x["q"],), (x["q"],))  # what comes in moves, too
    assert ran[-1] == ("backward_jvp", "dout q")
    ran.clear()
    jax.jvp(lambda mask: attention(x["q"], x["k"], x["v"], mask=mask > 0), (jnp.ones((4, 5)),), (jnp.ones((4, 5)),))
    assert ran == [("forward", "")]


def test_vmap_is_one_call_of_each(ran: list[tuple[str, str]]) -> None:
    x, u = drawn(("q", "k", "v")), drawn(("q", "k", "v"), 9)
    jax.vmap(lambda u: jax.jvp(jax.grad(loss(ours)), (x,), (u,)))(TREE.map(lambda x: jnp.stack([x] * 3), u))
    assert count(ran) == {"forward": 1, "jvp": 1, "backward": 1, "backward_jvp": 1}


# ---- vmap
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "layout", "mapped"),
    [(4, "bshd", "k bias"), (4, "bhsd", "u of bias"), (3, "bhsd", "q u of table"), (3, "bshd", "table"), (2, "bshd", "v u of q"),
     (2, "bhsd", "alibi_slopes u of v")],
)  # fmt: skip
def test_mapped_arrays_and_tangents(rank: int, layout: str, mapped: str) -> None:
    """An array may be mapped and its tangent not, or the other way round: as many calls, one after the other."""
    heads, n = (2, 1) if rank > 2 else (1, 1), 2

    def rows(length: int, heads: int, dim: int, seed: int) -> Any:
        x = numbers(n, 2, length, heads, dim, seed=seed)
        x = x.swapaxes(2, 3) if layout == "bhsd" else x
        x = x if rank == 4 else x[:, 0]
        return x if rank > 2 else x.squeeze(2 if layout == "bshd" else 1)

    def all_of(seed: int) -> dict[str, Any]:
        x = {"q": rows(3, heads[0], 4, seed), "k": rows(4, heads[1], 4, seed + 1), "v": rows(4, heads[1], 2, seed + 2)}
        of_heads = (heads[0],) if rank > 2 else ()
        one = (1,) if rank == 4 else ()
        x |= {"bias": numbers(n, *one, *of_heads, 3, 4, seed=seed), "alibi_slopes": numbers(n, *of_heads, seed=seed)}
        return x | {"table": numbers(n, 4, seed=seed)}

    names = all_of(0).keys()
    plain, *of_u = mapped.split("u of ")
    dims = tuple({name: 0 if name in some.split() else None for name in names} for some in (plain, " ".join(of_u)))
    given = tuple(
        {name: y if dim[name] == 0 else y[0] for name, y in all_of(seed).items()} for seed, dim in zip((0, 7), dims)
    )

    def attend(x: Any) -> Any:
        x = dict(x)
        table = {"table": x.pop("table")}
        score = lambda s, b, h, i, j, table: s * table[j]
        return attention(**x, score=score, score_arrays=table, layout=layout, return_lse=True)

    def function(x: Any, u: Any) -> Any:
        return jax.jvp(attend, (x,), (u,)), jax.jvp(jax.grad(loss(attend)), (x,), (u,))

    one = jax.jit(function)
    each = [
        one(*({name: y[i] if dim[name] == 0 else y for name, y in z.items()} for z, dim in zip(given, dims)))
        for i in range(n)
    ]
    close(jax.jit(jax.vmap(function, dims))(*given), TREE.map(lambda *x: jnp.stack(x), *each))


# ---- what is refused
# --------------------------------------------------------------------------------------------------


def refused(function: Any, message: str, *x: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        function(*x)


def test_third_derivatives_are_refused() -> None:
    """While they are traced, whatever JAX is asked for."""
    x = drawn(("q", "k", "v"))
    twice = "attention can be differentiated twice, not three times"

    def grad(f: Any) -> Any:
        return jax.grad(lambda x: dot(f(x), x))

    first = jax.grad(loss(ours))
    for third in (
        grad(grad(first)), jax.grad(lambda x: jax.jvp(loss(lambda x: (grad(first)(x)["q"], x["v"])), (x,), (x,))[1]),
        lambda x: jax.jvp(grad(first), (x,), (x,)), jax.grad(lambda x: dot(jax.hessian(lambda q: loss(ours)(x | {"q": q}))(x["q"]), x)),
    ):  # fmt: skip
        refused(jax.jit(third).trace, twice, x)
    refused(grad(grad(first)), twice, x)


def test_forward_mode_twice_is_refused_where_it_is_compiled() -> None:
    x = drawn(("q", "k", "v"))
    message = (
        "attention has no second derivative in forward mode alone; take one of them in reverse mode: jax.hessian and"
    )
    f = lambda x: ours(x)[0].sum()
    twice = lambda x: jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,))
    refused(twice, message, x)
    refused(jax.jit(twice).trace(x).lower, message)
    refused(jax.jacfwd(jax.jacfwd(f)), message, x)


def test_sinks_that_are_mapped_are_refused() -> None:
    x = drawn(("q", "k", "v", "sinks"))
    f = loss(ours)

    def of(sinks: Any) -> Any:
        return jax.jvp(f, (x | {"sinks": sinks},), (x,))[1]

    message = "sinks, their tangents or their gradients have an axis of vmap in forward mode or in a second derivative"
    refused(jax.vmap(of), message, stacked(x["sinks"]))
    refused(jax.jacfwd(lambda sinks: f(x | {"sinks": sinks})), message, x["sinks"])
    one = jax.jit(of)
    close(
        jax.jit(lambda y: jax.lax.map(of, y))(stacked(x["sinks"])), jnp.stack([one(y) for y in stacked(x["sinks"])])
    )  # as it says

    def by_q(f: Any) -> Any:  # to which sinks are given, and no more
        return jax.jit(jax.vmap(lambda u: ORDERS["jvp of grad"](lambda q: f(x | {"q": q}), x["q"], u)))(stacked(x["q"]))

    close(by_q(ours), by_q(standard))


@pytest.mark.parametrize("of", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
@pytest.mark.parametrize("scale", [False, True])
def test_eight_bits_have_a_forward_alone(of: Any, scale: bool) -> None:
    q = jnp.ones((1, 16, 1, 16), "float8_e4m3fn")
    f = lambda x: attention(*([q] * 3 if scale else [x] * 3), q_descale=x if scale else None).astype("float32").sum()
    with pytest.raises(TypeError, match="^q has dtype float8_e4m3fn, of which there is a forward alone"):
        of(f)(jnp.ones((1, 1), "float32") if scale else q)


def test_rows_that_see_nothing_are_no_mistake() -> None:
    """Their lse is -inf, of which nobody is told who did not ask for it."""
    x = {name: numbers(*SHAPES[name], seed=n) for n, name in enumerate("qkv")}
    f = lambda x: (attention(**x, key_mask=SEEN) ** 2).sum()
    with jax.debug_infs(True), jax.debug_nans(True):
        for order in (ORDERS["jvp of grad"], ORDERS["grad of grad"], ORDERS["jvp"]):
            for found in TREE.leaves(order(lambda x: (attention(**x, key_mask=SEEN), jnp.ones(())), x, x)):
                assert jnp.isfinite(found).all()
    hvp = jax.jvp(jax.grad(f), (x,), (x,))[1]
    assert hvp["q"][0].any() and not hvp["q"][1].any() and not hvp["v"][1].any()


# ---- the package's functions
# ------------------------------------------------------------------------------------------


def test_functions_of_the_package() -> None:
    """They give JAX arrays what JAX finds, are traced, and are differentiated themselves."""
    x, u = (drawn(("q", "k", "v", "bias"), seed) for seed in (0, 9))
    bias, qkv = x["bias"], [x[name] for name in "qkv"]
    out, lse = ours(x, causal=True)
    g = tuple(numbers(*y.shape, seed=3) for y in (out, lse))
    options = {"bias": bias, "causal": True}

    def pulled(x: Any) -> Any:
        return jax.vjp(lambda x: standard(x, causal=True), x)[1](g)[0]

    expected = jax.jit(
        lambda x, u: (jax.jvp(lambda x: standard(x, causal=True), (x,), (u,))[1], jax.jvp(pulled, (x,), (u,))[1])
    )(x, u)

    def found(u: Any, jvp: Any = None) -> Any:
        call = cupyflash.attention_backward_jvp(u, g[0], *qkv, out, lse, dlse=g[1], jvp=jvp, wrt="bias", **options)
        return {"bias": call.dbias, **dict(zip("qkv", call))}

    for wrap in (lambda f: f, jax.jit):
        j = wrap(lambda u: cupyflash.attention_jvp(u, *qkv, out, lse, **options))(u)
        close([j, wrap(found)(u), wrap(found)(u, j)], [expected[0], expected[1], expected[1]])

    def explicit(q: Any) -> Any:  # out and lse are functions of q, whatever they come from
        return cupyflash.attention_backward(g[0], q, *qkv[1:], out, lse, dlse=g[1], **options).dq

    close(
        jax.jvp(explicit, (x["q"],), (u["q"],))[1],
        jax.jvp(lambda q: pulled(x | {"q": q})["q"], (x["q"],), (u["q"],))[1],
    )
    by_u = jax.grad(lambda u: dot(cupyflash.attention_jvp({"q": u}, *qkv, out, lse, **options), g))(u["q"])
    close(by_u, explicit(qkv[0]))


def test_errors_name_the_tangent() -> None:
    x = drawn(("q", "k", "v"))
    out, lse = ours(x)
    gone = x["q"] + 1
    gone.delete()
    for tangent, message in (
        (gone, r"tangents\['q'\] is deleted; it must be an array that was not donated"),
        (x["k"], r"tangents\['q'\] has shape \(2, 5, 2, 4\); it must have that of q, \(2, 4, 4, 4\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            cupyflash.attention_jvp({"q": tangent}, **x, out=out, lse=lse)


def test_the_function_of_jax() -> None:
    """In whose place ours stands: what it makes of its arguments is differentiated, too."""
    x, u = (drawn(("q", "k", "v", "bias"), seed, dtype="float32") for seed in (0, 9))
    mask = (numbers(2, 1, 4, 5) > -0.8).at[..., 0].set(True)

    def of(f: Any) -> Any:
        def attend(x: Any) -> Any:
            out = f(x["q"], x["k"], x["k"] + x["v"][..., :1], x["bias"][None], mask, is_causal=True)
            return out, jnp.ones(())

        return jax.jit(lambda x, u: ORDERS["jvp of grad"](attend, x, u))(x, u)

    close(of(dot_product_attention), of(jax.nn.dot_product_attention), 2e-5)


def test_dropout_is_that_of_the_seed() -> None:
    x, u = (drawn(("q", "k", "v"), seed) for seed in (0, 9))
    options = {"dropout": 0.4, "seed": 5}
    attend = lambda x: attention(**x, **options)
    tout, hvp = jax.jit(
        lambda x, u: (jax.jvp(attend, (x,), (u,))[1], jax.jvp(jax.grad(lambda x: attend(x).sum()), (x,), (u,))[1])
    )(x, u)
    qkv, du = [np.asarray(x[name]) for name in "qkv"], {name: np.asarray(y) for name, y in u.items()}
    out, lse = cupyflash.attention(*qkv, **options, return_lse=True)
    close(tout, cupyflash.attention_jvp(du, *qkv, out, lse, **options)[0])
    expected = cupyflash.attention_backward_jvp(du, np.ones_like(out), *qkv, out, lse, **options)
    close([hvp[name] for name in "qkv"], list(expected))


def test_donated_buffers() -> None:
    x = drawn(("q", "k", "v"))
    step = lambda f, x: TREE.map(lambda x, h: x - 0.01 * h, x, jax.jvp(jax.grad(loss(f)), (x,), (x,))[1])
    expected = jax.jit(lambda x: step(standard, step(standard, x)))(x)
    ours_ = jax.jit(lambda x: step(ours, x), donate_argnums=0)
    given = TREE.map(lambda x: x + 0, x)
    close(ours_(ours_(given)), expected)
    assert given["q"].is_deleted()


# ---- several devices
# --------------------------------------------------------------------------------------------------

SHARDED = """
import numpy as np, jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from jax.sharding import Mesh, PartitionSpec as P
from test_jax_derivatives import ORDERS, close, numbers, ours, standard
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("b", "h"))
shapes = {"q": (4, 3, 4, 4), "k": (4, 5, 2, 4), "v": (4, 5, 2, 3), "bias": (4, 3, 5)}
x, u = ({name: numbers(*shape, seed=seed) for name, shape in shapes.items()} for seed in (0, 5))
x, u = jax.tree.map(np.asarray, (x, u))
parts = {"q": P("b", None, "h"), "k": P("b", None, "h"), "v": P("b", None, "h"), "bias": P("h")}
def whole(x):
    return standard(x, causal=True)
def in_parts(x):
    return shard_map(lambda x: ours(x, causal=True), mesh=mesh, in_specs=(parts,), out_specs=(P("b", None, "h"), P("b", "h")))(x)
def all_of(f):
    return jax.jit(lambda x, u: {name: ORDERS[name](f, x, u) for name in ("jvp of grad", "grad of jvp", "grad of grad")})(x, u)
close(all_of(in_parts), all_of(whole))
# Each device differentiates for itself: the bias is that of all entries, so that its gradients are summed over them.
def hvp(f):
    return lambda x, u: ORDERS["jvp of grad"](f, x, u)[1]
specs = dict.fromkeys(shapes, P("b")) | {"bias": P()}
each = shard_map(hvp(lambda x: ours(x, causal=True)), mesh=Mesh(np.array(jax.devices()[:4]), "b"), in_specs=(specs, specs), out_specs=specs)
close(jax.jit(each)(x, u), jax.jit(hvp(whole))(x, u))
print("sharded")
"""


def test_several_devices() -> None:
    """Derivatives of a shard_map, and inside it."""
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["sharded"], done.stderr[-3000:]


def test_a_gpu_is_called_back_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one: planned once, while JAX traces, and lowered for it."""
    jax_gpu = pytest.importorskip("cupyflash.interop.jax_gpu")
    planned: list[str] = []

    class Callback:
        scratch, plain = 64, True

        def __init__(self, call: Any, views: Any) -> None:
            assert list(views) == sorted(views)  # as XLA hands the buffers over
            planned.append(call.of.name)

    monkeypatch.setattr(jax_call, "_has_gpu", lambda: True)
    monkeypatch.setattr(jax_gpu, "Callback", Callback)
    x = {name: numbers(1, 2, 3, 11, seed=n) for n, name in enumerate("qkv")}  # as no other test has them
    traced = jax.jit(lambda x: jax.jvp(jax.grad(lambda x: loss(ours)(x)), (x,), (x,))).trace(x)
    passes = ["forward", "jvp", "backward", "backward_jvp"]
    assert planned == passes
    for platform, target in (
        ("cuda", "xla_buffer_python_gpu_callback_cmd_buffer"),
        ("cpu", "xla_buffer_python_cpu_callback"),
    ):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert lowered.count(f"@{target}(") == 4 and "xla_buffer" not in lowered.replace(target, "")
    assert planned == passes


@pytest.mark.gpu
@pytest.mark.parametrize("family", [None, "simt"])
def test_run_again_with_other_arrays(family: str | None) -> None:
    """XLA replays what was launched, in other memory; at once and eager it is the same."""
    order = ORDERS["jvp of grad"]
    f = lambda x: attention(**x, family=family, causal=True, return_lse=True)
    jitted, expected = (jax.jit(lambda x, u, f=f: order(f, x, u)) for f in (f, lambda x: standard(x, causal=True)))
    for seed in range(4):
        x, u = (drawn(("q", "k", "v", "bias"), n, platform="gpu") for n in (seed, seed + 20))
        close(jitted(x, u), expected(x, u))
    close(order(f, x, u), expected(x, u))
