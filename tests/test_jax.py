"""JAX arrays, eager: results, gradients, and order between JAX's streams and ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
from frameworks import OPTIONS, SCORES, asked_of_the_cpu, judge, references, split
from reference import DTYPES
from semantics import Inputs, draw_inputs

import cupyflash

jax = pytest.importorskip("jax")

from cupyflash.jax import attention

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def put(x: np.ndarray | None, platform: str = "cpu") -> Any:
    if x is None:
        return None
    try:
        device = jax.devices(platform)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no {platform}: {error}")
    return jax.device_put(x, device)


def arrays(inputs: Inputs, platform: str = "cpu") -> list[Any]:
    return [put(x, platform) for x in inputs[:5]]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients(dtype: str, options: str, platform: str, rng: np.random.Generator) -> None:
    masked, options = split(options)
    inputs = draw_inputs(rng, dtype, heads=(4, 2), dims=(64, 32), key_mask=masked)
    q, k, v, dout, mask = arrays(inputs, platform)
    out, lse = cupyflash.attention(q, k, v, key_mask=mask, return_lse=True, **options)
    assert isinstance(out, jax.Array) and out.dtype == q.dtype and out.devices() == lse.devices() == q.devices()
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, key_mask=mask, **options)
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    assert all(x.devices() == q.devices() for x in grads)
    judge({name: np.asarray(x) for name, x in results.items()}, *references(inputs, **options))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_eager_grad(options: str, platform: str, rng: np.random.Generator) -> None:
    masked, options = split(options)
    inputs = draw_inputs(rng, "float32", heads=(4, 2), key_mask=masked)
    q, k, v, dout, mask = arrays(inputs, platform)
    out, pull = jax.vjp(lambda *x: attention(*x, key_mask=mask, **options), q, k, v)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout))))
    judge({name: np.asarray(x) for name, x in results.items()}, *references(inputs, **options))
    (dq,) = jax.grad(lambda x: (attention(*x, k, v, key_mask=mask, **options) * dout).sum())((q,))
    judge({"dq": np.asarray(dq)}, *references(inputs, **options))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_scores(platform: str, rng: np.random.Generator) -> None:
    """Soft cap, mask, bias, slopes and sinks, and gradients of all that has one."""
    inputs = draw_inputs(rng, "float32", heads=(4, 2), given=SCORES, full="hqk", dlse=1.0)
    q, k, v, dout, _ = arrays(inputs, platform)
    options = {"softcap": 2.0, "causal": True}
    given = {name: put(x, platform) for name, x in inputs.given.items()}
    mask = given.pop("mask")
    results, pull = jax.vjp(
        lambda q, k, v, given: attention(q, k, v, mask=mask, return_lse=True, **options, **given), q, k, v, given
    )
    *grads, of_arrays = pull((dout, put(inputs.dlse, platform)))
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (*results, *grads)))
    found |= {f"d{name}": x for name, x in of_arrays.items()}
    judge({name: np.asarray(x) for name, x in found.items()}, *references(inputs, **options))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_gradient_of_one_array(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes where it is asked for, and is computed nowhere else."""
    inputs = draw_inputs(rng, "float32", heads=(4, 2), given=SCORES, full="hqk")
    q, k, v, dout, _ = arrays(inputs)
    given = {other: put(x) for other, x in inputs.given.items()}
    asked = asked_of_the_cpu(monkeypatch)

    def loss(q: Any, x: Any) -> Any:
        return (attention(q, k, v, **given | {name: x}) * dout).sum()

    grad = jax.grad(loss, 1)(q, given[name])
    judge({f"d{name}": np.asarray(grad)}, *references(inputs))
    assert jax.grad(loss)(q, given[name]).any()
    assert asked == [(name,), ()]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradient_through_lse(platform: str, rng: np.random.Generator) -> None:
    q, k, v, *_ = arrays(draw_inputs(rng, "float32"), platform)
    u = jax.device_put(jax.numpy.asarray(rng.standard_normal((2, 2, 67)), "float32"), q.device)

    def scores(q: Any, k: Any) -> Any:
        return jax.numpy.einsum("bihd,bjhd->bhij", q, k, precision="highest") / 8  # a GPU takes TF32 otherwise

    expected = jax.grad(lambda *x: (jax.nn.logsumexp(scores(*x), -1) * u).sum(), (0, 1))(q, k)
    got = jax.grad(lambda *x: (attention(*x, v, return_lse=True)[1] * u).sum(), (0, 1))(q, k)
    for x, y in zip(got, expected):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (32, 0)])
def test_large_gradients_of_lse(dims: tuple[int, int], platform: str, rng: np.random.Generator) -> None:
    """65536 is no float16. Head dimension 256 has no column to spare; Dv may be 0."""
    inputs = draw_inputs(rng, "float16", dims=dims, dlse=65536.0)
    np.copysign(65536.0, inputs.dlse, out=inputs.dlse)  # and no more: times a probability it must be a float16
    q, k, v, *_ = arrays(inputs, platform)
    dlse = put(inputs.dlse, platform)
    grads = jax.grad(lambda *x: (attention(*x, return_lse=True)[1] * dlse).sum(), (0, 1, 2))(q, k, v)
    inputs.dout[...] = 0
    judge({name: np.asarray(x) for name, x in zip(("dq", "dk", "dv"), grads)}, *references(inputs))


def test_single_precision_mode(rng: np.random.Generator) -> None:
    jax.config.update("jax_enable_x64", False)
    inputs = draw_inputs(rng, "float32")
    q, k, v, *_ = arrays(inputs)
    out, lse = attention(q, k, v, return_lse=True)
    judge({"out": np.asarray(out), "lse": np.asarray(lse)}, *references(inputs))


def test_traced_options() -> None:
    x = jax.numpy.ones((3, 4))
    with pytest.raises(TypeError, match="^return_lse is .*; it must be True or False"):
        attention(x, x, x, return_lse=np.ones(2))
    for name, error, message in (
        ("scale", TypeError, "real number"), ("softcap", TypeError, "real number"),
        ("causal", ValueError, "False, True"),
        ("deterministic", TypeError, "True or False"), ("return_lse", TypeError, "True or False"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{name} is .*Trace.*; it must be (a )?{message}"):
            jax.jit(lambda y, name=name: cupyflash.attention(x, x, x, **{name: y}))(1.0)


def test_a_scale_that_is_traced() -> None:
    """It is refused, and what the message says in its place has its gradient."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8), "float64")
    for of, scale in ((jax.jit, 0.3), (jax.grad, 0.3), (jax.vmap, jax.numpy.ones(3))):
        with pytest.raises(TypeError, match=r"multiplies q: q \* scale as q \(in its dtype\), and scale=1\.0"):
            of(lambda scale: attention(q, k, v, scale=scale).sum())(scale)
    loss = lambda scale: (attention(q * scale, k, v, scale=1.0) ** 2).sum()
    direct = lambda scale: (attention(q, k, v, scale=scale) ** 2).sum()
    step = 1e-6
    numeric = (direct(0.3 + step) - direct(0.3 - step)) / (2 * step)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(0.3), numeric, rtol=1e-6)


def test_help_shows_what_the_package_takes() -> None:
    shown, of_package = (inspect.signature(f).parameters for f in (attention, cupyflash.attention))
    assert list(shown.values()) == [x for x in of_package.values() if x.name != "out"]


def test_what_jax_cannot_do() -> None:
    x = jax.numpy.ones((3, 4))
    with pytest.raises(TypeError, match="out is given to be written, but JAX arrays are immutable"):
        cupyflash.attention(x, x, x, out=x)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    with pytest.raises(TypeError, match="dq is given to be written, but JAX arrays are immutable"):
        cupyflash.attention_backward(out, x, x, x, out, lse, grads=(x, x, x))
    with pytest.raises(TypeError, match="k is a ndarray; it must be a jax.Array"):
        attention(x, np.ones((3, 4)), x)
    for entry in (attention, lambda *qkv, **options: jax.vjp(lambda q: attention(q, *qkv[1:], **options), qkv[0])):
        for name in ("key_mask", "bias"):
            with pytest.raises(TypeError, match=f"^{name} is a list; it must be "):
                entry(x, x, x, **{name: [True, True, True]})
    with pytest.raises(TypeError, match="k is a numpy array but q is a jax array"):
        cupyflash.attention(x, np.ones((3, 4)), x)
    gone = x + 1
    gone.delete()
    with pytest.raises(ValueError, match="^k is deleted; it must be an array that was not donated"):
        cupyflash.attention(x, gone, x)
    with pytest.raises(TypeError, match="q has dtype key<fry>"):
        cupyflash.attention(jax.random.key(0), x, x)
    with pytest.raises(TypeError, match="q has dtype int32"):
        cupyflash.attention(x.astype("int32"), x, x)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_order_between_jax_and_us(rng: np.random.Generator) -> None:
    """JAX computes the inputs late and uses the results at once."""
    inputs = draw_inputs(rng, "float32")
    q, k, v, *_ = arrays(inputs, "gpu")
    expected = np.asarray(attention(q, k, v)) * 2.0
    slow = jax.jit(lambda x, y: x + 0 * jax.lax.fori_loop(0, 200, lambda _, z: z @ z * 1e-4, y)[0, 0])
    busy = put(np.ones((2048, 2048), np.float32), "gpu")
    double = jax.jit(lambda x: x * 2)
    double(slow(q, busy)).block_until_ready()
    out = double(attention(slow(q, busy), slow(k, busy), slow(v, busy)))
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_cpu_array_among_gpu_arrays() -> None:
    a, g = (put(np.ones((3, 4), np.float32), platform) for platform in ("cpu", "gpu"))
    with pytest.raises(ValueError, match="k is on cpu but q is on cuda:0; all arrays must be on one device"):
        cupyflash.attention(g, a, g)
    with pytest.raises(ValueError, match="v is on cuda:0 but q is on cpu; all arrays must be on one device"):
        cupyflash.attention(a, a, g)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_a_family_that_is_named(rng: np.random.Generator, family: str) -> None:
    """At once, under jit and in the gradients. On the CPU it is refused, where there is a GPU, too."""
    inputs = draw_inputs(rng, "float16")
    q, k, v, *_ = arrays(inputs, "gpu")
    call = functools.partial(attention, family=family)
    right = attention(q, k, v)
    for run in (call, jax.jit(call)):
        np.testing.assert_allclose(np.asarray(run(q, k, v), "f4"), np.asarray(right, "f4"), atol=1e-2)
    squares = jax.grad(lambda *x: (call(*x).astype("float32") ** 2).sum(), (0, 1, 2))
    own = jax.grad(lambda *x: (attention(*x).astype("float32") ** 2).sum(), (0, 1, 2))(q, k, v)
    for x, y in zip(jax.jit(squares)(q, k, v), own):
        np.testing.assert_allclose(np.asarray(x, "f4"), np.asarray(y, "f4"), atol=3e-2)
    with pytest.raises(
        ValueError, match=f"^family is '{family}', a family of GPU kernels, but q is a jax array on the CPU"
    ):
        call(*arrays(inputs, "cpu")[:3])


def test_options_are_told_apart_whatever_came_before() -> None:
    """True is no cap, although it equals 1, which was one."""
    x = jax.numpy.ones((1, 4, 2, 8))
    for right, wrong in (
        ({"softcap": 1.0}, {"softcap": True}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"window": (1, 0)}, {"window": (True, False)}),
    ):
        cupyflash.attention(x, x, x, **right)
        with pytest.raises(TypeError, match=next(iter(wrong))):
            cupyflash.attention(x, x, x, **wrong)


def test_numpy_arrays_beside_jax_arrays() -> None:
    """As JAX's own functions take them, traced or not; of the dtype that they have."""
    jnp = jax.numpy
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.standard_normal((2, 5, 2, 8)), "float32") for _ in range(4))
    given = {
        "mask": np.tril(np.ones((5, 5), bool)), "bias": rng.standard_normal((2, 5, 5), "float32"),
        "sinks": np.zeros(2, "float32"), "alibi_slopes": np.full(2, 0.5, "float32"),
        "key_mask": rng.random((2, 5)) < 0.7,
        "seed": np.array(2**40 + 3), "score_arrays": {"x": rng.standard_normal(5).astype("float32")},
    }  # fmt: skip
    more = {"dropout": 0.3, "score": "s + x[j]", "return_lse": True}
    own = jax.tree.map(jnp.asarray, given)
    for x64 in (True, False):
        jax.config.update("jax_enable_x64", x64)
        right, pull = jax.vjp(lambda q: cupyflash.attention(q, k, v, **own, **more), q)
        for call in (attention, cupyflash.attention):
            for run in (call, jax.jit(lambda *x, call=call, **options: call(*x, **given, **more))):
                out, lse = run(q, k, v, **(given | more if run is call else {}))
                np.testing.assert_array_equal(out, right[0])
                np.testing.assert_array_equal(lse, right[1])
            _, of_numpy = jax.vjp(lambda q, call=call: call(q, k, v, **given, **more), q)
            np.testing.assert_array_equal(of_numpy((dout, lse))[0], pull((dout, lse))[0])
    del more["return_lse"]
    grads, expected = (
        cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=y(lse), wrt=("bias", "x"), **x, **more)
        for x, y in ((given, np.asarray), (own, jnp.asarray))
    )
    np.testing.assert_array_equal(grads.dbias, expected.dbias)
    np.testing.assert_array_equal(grads.dscore_arrays["x"], expected.dscore_arrays["x"])
    assert isinstance(grads.dbias, jax.Array)
    with pytest.raises(TypeError, match="^bias has dtype float64; it must be"):
        attention(q, k, v, bias=np.zeros((5, 5)))


def test_a_large_seed_does_not_compile_anew(caplog: pytest.LogCaptureFixture) -> None:
    x = jax.numpy.ones((1, 4, 2, 8), "float32")
    attention(x, x, x, dropout=0.5, seed=1)
    found = {}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for seed in (1, 2**32 + 1, 2**63 + 5, -1, -(2**63)):
            for x64 in (True, False):
                jax.config.update("jax_enable_x64", x64)
                found[seed, x64] = np.asarray(attention(x, x, x, dropout=0.5, seed=seed))
    assert sum("Finished XLA compilation" in x.message for x in caplog.records) <= 1  # for the other mode
    plain = np.ones(x.shape, "float32")
    for (seed, _), out in found.items():
        np.testing.assert_array_equal(out, cupyflash.attention(plain, plain, plain, dropout=0.5, seed=seed))


@pytest.mark.parametrize("entry", [attention, cupyflash.attention])
def test_nobody_hears_of_an_lse_that_was_not_asked_for(entry: Any) -> None:
    x = jax.numpy.ones((1, 4, 2, 8), "float32")
    mask = np.ones((4, 4), bool)
    mask[0] = False
    with jax.debug_infs(True), jax.debug_nans(True):
        assert not entry(x, x, x, mask=mask)[:, 0].any()
        for wrap in (jax.grad, lambda f: jax.jit(jax.grad(f))):
            assert not wrap(lambda q: entry(q, x, x, mask=mask).sum())(x)[:, 0].any()
        with pytest.raises(FloatingPointError):
            entry(x, x, x, mask=mask, return_lse=True)
        with pytest.raises(FloatingPointError):
            entry(x, x, x * np.inf)


def test_descales_that_are_numbers() -> None:
    """As cupyflash.attention takes them, by either name of it."""
    q = put(np.ones((1, 2, 1, 4), np.float32)).astype("bfloat16")
    k, q8 = (2 * q).astype("int8"), q.astype("float8_e4m3fn")
    for of in (attention, cupyflash.attention):
        np.testing.assert_array_equal(of(q, k, k, k_descale=0.5, v_descale=np.float32(0.25)).astype("float32"), 0.5)
        np.testing.assert_array_equal(of(q8, q8, q8, q_descale=2, v_descale=4.0).astype("float32"), 4)
        with pytest.raises(TypeError, match="^v_descale is True"):
            of(q8, q8, q8, v_descale=True)
    with pytest.raises(TypeError, match="^k_descale is a str; it must be a jax.Array or a numpy.ndarray"):
        attention(q, k, k, k_descale="0.5")
