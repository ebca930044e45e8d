"""cupyflash.jax.dot_product_attention beside jax.nn's."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import test_jax_transforms
from jax import numpy as jnp
from test_jax_transforms import both, close, numbers, qkv

from cupyflash.jax import attention, dot_product_attention

double_precision = test_jax_transforms.double_precision


def test_signature_of_dot_product_attention() -> None:
    """Whatever the installed JAX has, of the arguments that both name, is named, ordered and left out alike."""
    ours, theirs = (
        {name: (x.kind, x.default) for name, x in inspect.signature(f).parameters.items()}
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert [(name, x) for name, x in ours.items() if name in theirs] == list(theirs.items())


LENGTHS: dict[str, Any] = {"key_value_seq_lengths": jnp.asarray([7, 3], jnp.int32)}


CASES: dict[str, dict[str, Any]] = {
    "nothing": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3},
    "window": {"local_window_size": 3, "is_causal": True}, "window alone": {"local_window_size": (3, 2)},
    "bias": {"bias": (1, 4, 5, 7)}, "bias of one row": {"bias": (2, 1, 1, 7)}, "mask": {"mask": (2, 1, 5, 7)},
    "mask and window": {"mask": (1, 4, 5, 7), "local_window_size": (4, 1)}, "lengths": LENGTHS,
    "lengths of both": LENGTHS | {"query_seq_lengths": jnp.asarray([5, 2], jnp.int32), "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_dot_product_attention(name: str, batched: bool) -> None:
    """Values and gradients are those of jax.nn, in float32 and with fewer queries than keys."""
    options = dict(CASES[name])
    if not batched and ("bias of one row" in name or "lengths" in name):
        options = {n: x[:1] if n != "is_causal" and not isinstance(x, tuple) else x for n, x in options.items()}
        options = {n: (1, *x[1:]) if isinstance(x, tuple) else x for n, x in options.items()}
    if not batched and name == "mask":
        options["mask"] = (1, 1, 5, 7)
    q, k, v = numbers(2, 5, 4, 8, dtype="float32"), *(numbers(2, 7, 2, 8, seed=i, dtype="float32") for i in (1, 2))
    q, k, v = (q, k, v) if batched else (q[0], k[0], v[0])
    if "mask" in options:
        options["mask"] = (numbers(*options["mask"]) > -0.8).at[..., 0].set(True)
    bias = numbers(*options.pop("bias"), dtype="float32") if "bias" in options else None
    with_bias = () if bias is None else (bias,)

    def total(function: Any) -> Any:
        return jax.value_and_grad(lambda *x: jnp.sin(function(*x, **options)).sum(), tuple(range(3 + len(with_bias))))

    close(
        total(dot_product_attention)(q, k, v, *with_bias),
        total(jax.nn.dot_product_attention)(q, k, v, *with_bias),
        2e-5,
    )


@pytest.mark.parametrize("name", ["window alone", "mask and window", "lengths of both"])
def test_where_jax_is_told_to_promote_nothing(name: str) -> None:
    """As JAX's own tests have it: neither ranks nor dtypes."""
    q, k, v = (numbers(2, n, 4, 8, dtype="float32") for n in (5, 7, 7))
    options = dict(CASES[name])
    masks = [numbers(*options.pop("mask")) > -0.8, numbers(7) > -0.8] if "mask" in options else [None]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = [dot_product_attention(q, k, v, mask=mask, **options) for mask in masks]
    close(found, [dot_product_attention(q, k, v, mask=mask, **options) for mask in masks])


def test_no_infinity_is_made_that_nobody_asked_for() -> None:
    """As jax_debug_infs has it, of rows that see no key."""
    q, lengths = numbers(1, 2, 1, 4), jnp.asarray([1], jnp.int32)
    for options in ({"mask": jnp.asarray([[True, True], [False, False]])}, {"query_seq_lengths": lengths}):

        def f(q: Any, options: dict[str, Any] = options, **more: Any) -> Any:
            return dot_product_attention(q, q, q, **options, **more)

        with jax.debug_infs(True):
            assert not f(q)[:, 1].any()
            assert jax.grad(lambda q, f=f: f(q).sum())(q).shape == q.shape
        assert jnp.isneginf(f(q, return_residual=True)[1][:, 1]).all()


def test_errors_name_the_arguments_of_jax() -> None:
    """Not those of `attention`, to which they are handed; while tracing."""
    q, k, v = qkv()
    three, two = jnp.ones(3, jnp.int32), jnp.ones(2, jnp.int32)
    for x, options, message in (
        ((q, k[..., :4], v), {}, "^key has head dimension 4"),
        ((q, k.astype("float32"), v), {}, "^key has dtype float32 but query"),
        ((q, k, v), {"key_value_seq_lengths": three},
            r"^key_value_seq_lengths has shape \(3,\) .*; it must be \(2,\) and int32"),
        ((q, k, v), {"query_seq_lengths": three},
            r"^query_seq_lengths has shape \(3,\) .*; it must be \(2,\) and int32"),
        ((q[0], k[0], v[0]), {"key_value_seq_lengths": two},
            r"^key_value_seq_lengths has shape \(2,\) .*; it must be \(1,\)"),
        *(((q, k, v), {"local_window_size": n},
            "^local_window_size is .*; it must be an integer, 0 or more, or two of them")
          for n in (-1, 2.5, "a", (1, 2, 3), (None, 2), (1, -2))),
        *(((q, k, v), {name: "no"}, f"^{name} is 'no'; it must be True or False") for name in ("is_causal",
            "return_residual")),
        ((q, None, v), {}, "^key is None; it must be an array"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            jax.jit(lambda *x, o=options: dot_product_attention(*x, **o)).trace(*x)


def test_dot_product_attention_says_more() -> None:
    q, k, v = qkv()
    out, lse = dot_product_attention(q, k, v, return_residual=True)
    expected = attention(q, k, v, return_lse=True)
    close((out, lse), (expected[0], expected[1].swapaxes(1, 2)))
    for name in ("xla", "cudnn"):  # as Keras gives it
        close(dot_product_attention(q, k, v, implementation=name), expected[0])
    hidden = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 5, 7), bool))
    assert not hidden.any()
    for options, message in (
        ({"implementation": "triton"}, "^implementation is 'triton'; it must be None, 'xla' or 'cudnn'"),
        (
            {"query_seq_lengths": jnp.ones(2)},
            r"^query_seq_lengths has shape \(2,\) and dtype float64; it must be \(2,\) and int32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dot_product_attention(q, k, v, **options)
    with pytest.raises(ValueError, match=r"^query has shape \(5, 8\); it must be \(B, T, N, H\)"):
        dot_product_attention(q[0, :, 0], k[0, :, 0], v[0, :, 0])


MASKINGS: dict[str, dict[str, Any]] = {
    "none": {}, "causal": {"is_causal": True}, "padding": {"lengths": True},
    "padding and causal": {"lengths": True, "is_causal": True},
    "window": {"local_window_size": (4, 7)}, "window of one number": {"local_window_size": 6, "is_causal": True},
    "custom": {"mask": (3, 4, 24, 24)}, "custom and padding": {"mask": (1, 1, 24, 24), "lengths": True},
    "custom for each head": {"mask": (1, 4, 24, 24), "is_causal": True},
}  # fmt: skip


def as_good(ours: Any, theirs: Any, exact: Any, dtype: str) -> None:
    for x, y, z in zip(ours, theirs, exact):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y, z = (np.asarray(a, np.float64) for a in (x, y, z))
        assert abs(x - z).max() <= 2 * abs(y - z).max() + {"float32": 1e-5}.get(dtype, 1e-3)


@pytest.mark.parametrize("masking", MASKINGS)
def test_as_jax_tests_its_own(masking: str) -> None:
    n = list(MASKINGS).index(masking)
    dtype = ("bfloat16", "float32")[n % 2]
    as_good(*both(dtype, (1, 2, 4)[n // 3], MASKINGS[masking]), dtype)


@pytest.mark.parametrize(
    "shape", [(3, 4, 24, 24), (1, 4, 24, 24), (3, 1, 24, 24), (1, 1, 24, 24), (3, 4, 1, 24), (1, 1, 1, 24)]
)
def test_gradients_of_biases_of_every_form(shape: tuple[int, ...]) -> None:
    """Also mapped, where every entry has a bias of its own."""
    as_good(
        *both("float32", 2, {"is_causal": True}, bias=shape, mapped=shape[0] > shape[1] or shape[2] == 1), "float32"
    )


def test_under_vmap_and_jit_together() -> None:
    """Mapped over any axis, with what is not mapped shared."""
    q, k, v = numbers(2, 3, 5, 4, 8), numbers(3, 7, 2, 2, 8), numbers(3, 7, 2, 8)
    ours, theirs = (
        jax.jit(jax.vmap(lambda q, k, v, f=f: f(q, k, v, scale=0.2), (0, 2, None), 1))(q, k, v)
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    close(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    "shapes",
    [((3, 24, 4, 8), (3, 24, 3, 8), None), ((3, 24, 4, 8), (2, 24, 4, 8), None), ((3, 24, 4, 8), (3, 24, 4, 6), None),
     ((3, 24, 4, 8), (3, 24, 4, 8), (2, 4, 24, 24)), ((3, 24, 4, 8), (3, 24, 4, 8), (3, 4, 24, 20))],
)  # fmt: skip
def test_shapes_that_do_not_fit(shapes: tuple[Any, ...]) -> None:
    q, k = (numbers(*x) for x in shapes[:2])
    bias = None if shapes[2] is None else numbers(*shapes[2])
    for function in (dot_product_attention, jax.nn.dot_product_attention):
        with pytest.raises((ValueError, TypeError)):
            function(q, k, k, bias)


def test_rows_behind_query_seq_lengths() -> None:
    """Whatever they hold, no residual has weight there, and no gradient has NaN of theirs."""
    q, k, v = numbers(2, 4, 2, 8), numbers(2, 5, 2, 8), numbers(2, 5, 2, 8)
    lengths = jnp.asarray([2, 0], jnp.int32)
    dirty = jnp.where((jnp.arange(4) < lengths[:, None])[..., None, None], q, jnp.nan)

    def run(q: Any, k: Any, v: Any) -> Any:
        return dot_product_attention(q, k, v, query_seq_lengths=lengths, return_residual=True)

    out, residual = run(dirty, k, v)
    whole, rows = dot_product_attention(q, k, v, return_residual=True)
    np.testing.assert_array_equal(out[0, :2], whole[0, :2])
    np.testing.assert_array_equal(residual[0, :2], rows[0, :2])
    assert not out[0, 2:].any() and not out[1].any()
    assert (residual[0, 2:] == -jnp.inf).all() and (residual[1] == -jnp.inf).all()
    found, wanted = (
        jax.grad(lambda q, k, v: (run(q, k, v)[0] ** 2).sum(), (0, 1, 2))(x, k, v) for x in (dirty, q)
    )  # fmt: skip
    for x, y in zip(found, wanted):
        np.testing.assert_array_equal(x, y)
    assert found[1][0].any() and not found[0][:, 2:].any()
