"""What JAX's derivatives of second order run, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from test_jax_derivatives import ORDERS, SEEN, SHAPES, TREE, dot, drawn, loss, ours, quick_to_compile, stacked, standard
from test_jax_transforms import close, double_precision, numbers

import cupyflash
from cupyflash.cpu import corridor

jax = pytest.importorskip("jax")

from jax import numpy as jnp

from cupyflash.interop import jax_call
from cupyflash.jax import attention, dot_product_attention

__all__ = ["double_precision", "quick_to_compile"]  # fixtures of every test


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


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that are planned for a GPU, as if there were one."""
    jax_gpu = pytest.importorskip("cupyflash.interop.jax_gpu")
    found: list[str] = []

    class Callback:
        scratch, plain = 64, True

        def __init__(self, call: Any, views: Any) -> None:
            assert list(views) == sorted(views)  # as XLA hands the buffers over
            found.append(call.of.name)

    monkeypatch.setattr(jax_call, "has_gpu", lambda: True)
    monkeypatch.setattr(jax_gpu, "Callback", Callback)
    return found


def test_a_gpu_is_called_back_for_each_pass(planned: list[str]) -> None:
    """Where there is one: planned once, when it is lowered for it."""
    x = {name: numbers(1, 2, 3, 11, seed=n) for n, name in enumerate("qkv")}  # as no other test has them
    traced = jax.jit(lambda x: jax.jvp(jax.grad(lambda x: loss(ours)(x)), (x,), (x,))).trace(x)
    passes = ["forward", "jvp", "backward", "backward_jvp"]
    for platform, target in (
        ("cuda", "xla_buffer_python_gpu_callback_cmd_buffer"),
        ("cpu", "xla_buffer_python_cpu_callback"),
    ):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert lowered.count(f"@{target}(") == 4 and "xla_buffer" not in lowered.replace(target, "")
    assert sorted(planned) == sorted(passes)


def test_kernels_that_a_gradient_does_not_run_are_not_planned(planned: list[str]) -> None:
    """`grad` asks for the type of a tangent, which a family that is named may have no kernels for."""
    x = {name: numbers(1, 2, 3, 12, seed=n) for n, name in enumerate("qkv")}  # as no other test has them
    jax.jit(jax.grad(loss(functools.partial(ours, family="flash1")))).trace(x).lower(lowering_platforms=("cuda",))
    assert planned == ["forward", "backward"]


# ---- what is refused ------------------------------------------------------------------------------------------------


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

    def hessian(x: Any) -> Any:
        return jax.hessian(lambda q: loss(ours)(x | {"q": q}))(x["q"])

    for third in (
        grad(grad(first)),
        jax.grad(lambda x: jax.jvp(lambda x: dot(grad(first)(x), x), (x,), (x,))[1]),
        lambda x: jax.jvp(grad(first), (x,), (x,)),
        jax.grad(lambda x: hessian(x).sum()),
    ):
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


# ---- the package's functions ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["dropout", "block_mask", "mask"])
def test_as_on_numpy_arrays(name: str) -> None:
    """Of what is no matter of JAX's."""
    seen = np.tril(np.ones((4, 5), bool), 1)
    options: dict[str, Any] = {
        "dropout": {"dropout": 0.4, "seed": 5},
        "block_mask": {"block_mask": cupyflash.block_mask(seen, block=16), "scale": -0.3},
        "mask": {"mask": seen, "deterministic": True},
    }[name]
    x, u = (drawn(("q", "k", "v"), seed) for seed in (0, 9))
    attend = lambda x: attention(**x, **options)
    (tout, hvp) = jax.jit(
        lambda x, u: (jax.jvp(attend, (x,), (u,))[1], jax.jvp(jax.grad(lambda x: attend(x).sum()), (x,), (u,))[1])
    )(x, u)
    qkv, du = [np.asarray(x[name]) for name in "qkv"], {name: np.asarray(y) for name, y in u.items()}
    out, lse = cupyflash.attention(*qkv, **options, return_lse=True)
    close(tout, cupyflash.attention_jvp(du, *qkv, out, lse, **options)[0])
    expected = cupyflash.attention_backward_jvp(du, np.ones_like(out), *qkv, out, lse, **options)
    close([hvp[name] for name in "qkv"], list(expected))
