"""`at` as an array that kernels read: what the rules and the planner make of it, and PyTorch's and JAX's programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cover import COMPILED

from cupyflash import attention, attention_backward, explain
from cupyflash.gpu import params
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD, JVP
from cupyflash.places import check_values
from cupyflash.problem import AttentionProblem, Given, View, contiguous
from cupyflash.rules import describe

H200, A100 = Arch.of("sm_90a"), Arch.of("sm_80")


def view(*shape: int, dtype: str = "float16", device: str = "cuda:0") -> View:
    return View(shape, contiguous(shape), dtype, device, "cupy")


Q = view(1, 500, 4, 64)
AT = view(4, dtype="int32")


def stated(**options: Any) -> AttentionProblem:
    return describe(Q, Q, Q, **{"at": AT, **options})


def test_nothing_is_known_of_what_it_hides() -> None:
    known, data = (
        describe(Q, Q, Q, causal=True, window=(600, None), at=(0, 0, 0, 0)),
        stated(causal=True, window=(600, 0)),
    )
    assert (known.left, known.right, data.left, data.right) == (None, 0, 600, 0)
    assert data.live == (range(500), range(500)) and data.visible == 500 * 500 and data.at is None
    values = {x.name: x.value for x in params._values(plan(data, H200), data)}
    assert (values["left"], values["right"], values["first_k"], values["end_k"]) == (600, 0, 0, 500)
    assert "AT = true" in generate(plan(data, H200)) and "AT = false" in generate(plan(known, H200))


def test_programs_of_wholes_have_no_room_for_it() -> None:
    names = params.layout(plan(describe(Q, Q, Q, causal=True), H200)).names
    more = params.layout(plan(stated(causal=True), H200)).names
    assert names is not None and more is not None and set(more) - set(names) == {"at"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": view(3, dtype="int32")}, r"^at has shape \(3,\); it must be \(4,\) \(where the first batch entry"),
        ({"at": view(1, dtype="int64")}, r"^at has shape \(1,\); it must be \(4,\)"),
        ({"at": view(4, dtype="uint32")}, "^at has dtype uint32; it must be int32 or int64"),
        ({"at": view(4, dtype="int32", device="cpu")}, "^at is on cpu but q is on cuda:0"),
        ({"at": AT._replace(kind="torch")}, "^at is a torch array but q is a cupy array"),
    ],
)
def test_what_it_must_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stated(**options)


def test_beside_lengths_it_is_refused() -> None:
    rows = view(500, 4, 64)
    with pytest.raises(ValueError, match="^at is an array of int32, and cu_seqlens_q is given; it must be None there"):
        describe(rows, rows, rows, at=AT, cu_seqlens_q=view(3, dtype="int32"), cu_seqlens_k=view(3, dtype="int32"))


def test_what_does_not_fit_in_32_bits_is_refused() -> None:
    for window, side in (((2**29, 0), "left"), ((None, 2**29), "right")):
        with pytest.raises(ValueError, match=rf"^window's {side} bound is 536870912, and at is an array"):
            plan(stated(window=window), H200)
    plan(stated(window=(2**29 - 1, 0)), H200)


def test_who_does_not_take_it_says_so() -> None:
    with pytest.raises(ValueError, match="flash1 takes no `at`"):
        plan(stated(), H200, family="flash1")
    moving = (Given("q", "float16", ()),)
    for options, family in (({}, "sm90"), ({"causal": True}, "sm80")):
        made = plan(replace(stated(**options), tangents=moving), H200, JVP)
        assert made.family == family
        assert family == "sm90" or made.passed_over == ("sm90 takes no `at` in memory with causal or window",)
    slopes = {"alibi_slopes": (1, 4, 1, 1)}
    for options, family in (({}, "sm90"), ({"window": (9, None)}, "sm80")):
        problem = stated(alibi_slopes=view(4, dtype="float32"), **options)
        assert plan(problem, H200, BACKWARD, lengths=slopes).family == family


def test_values_that_are_looked_at() -> None:
    problem = stated(dropout=0.1, seed=view(1, dtype="int64"))
    check_values(problem, {"at": np.array([0, 0, 2**31 - 512, 16])})
    check_values(problem, {})
    for at, message in (
        ((0, -1, 0, 0), "must be None or four integers"),
        ((0, 0, 2**31 - 496, 0), r"the last query would stand at 2147483651; it must be less than 2\*\*31"),
        ((0, 0, 0, 8), "with dropout its key, 8, must be a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            check_values(problem, {"at": np.array(at)})


def test_explained() -> None:
    shape: Any = (1, 4096, 8, 128)
    asked: dict[str, Any] = {"dtype": "bf16", "arch": "sm_90a", "causal": True}
    assert ("mask", "causal (bottom right), places read by kernels") in explain(shape, at=(4,), **asked).rows()
    numbers = [explain(shape, at=at, **asked) for at in ((0, 0, 128, 0), np.array([0, 0, 128, 0]))]
    assert numbers[0] == numbers[1] and numbers[0].problem.at == (0, 0, 128, 0)


def test_gradients_in_float32() -> None:
    q = np.random.default_rng(0).standard_normal((1, 32, 2, 8)).astype("f2")
    out, lse = attention(q, q, q, return_lse=True, causal=True)
    arrays = (q, q, q, q, out, lse)
    wide = attention_backward(*arrays, causal=True, out_dtype="float32")
    for x, y in zip(wide, attention_backward(*arrays, causal=True)):
        assert x.dtype == "f4" and (x != y).any()
        np.testing.assert_array_equal(x.astype("f2"), y)
    with pytest.raises(ValueError, match="^out_dtype is float32; with q of float16 it must be None but for gradients"):
        attention(q, q, q, out_dtype="float32")
    with pytest.raises(ValueError, match="^out_dtype is float16; with q of float16 it must be None"):
        attention_backward(*arrays, out_dtype="float16")
    plain = [x.astype("f4") for x in arrays]
    with pytest.raises(ValueError, match="^out_dtype is float32; with q of float32 it must be None"):
        attention_backward(*plain, out_dtype="float32")


def test_gradients_in_float32_in_jax() -> None:
    jax = pytest.importorskip("jax")
    from cupyflash.jax import attention as attend

    q = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 32, 2, 8)), "bfloat16")
    out, lse = attend(q, q, q, return_lse=True)
    gradients = jax.jit(lambda *x: tuple(attention_backward(*x, out_dtype="float32")))
    assert {x.dtype.name for x in gradients(q, q, q, q, out, lse)} == {"float32"}
    with pytest.raises(NotImplementedError, match="^gradients with out_dtype have no derivatives"):
        jax.grad(lambda g: gradients(g, q, q, q, out, lse)[0].sum())(q)


def test_pytorch_compiles_one_program_for_all_places() -> None:
    torch = pytest.importorskip("torch")
    import cupyflash.torch

    q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
    call = lambda q, at: cupyflash.torch.attention(q, k, v, causal=True, at=at)
    graphs = []
    compiled = torch.compile(call, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    for query in (0, 5, 40):
        at = torch.tensor([0, 0, query, 8])
        expected, own = (x.clone().requires_grad_() for x in (q, q))
        call(expected, (0, 0, query, 8)).square().sum().backward()
        found = compiled(own, at)
        found.square().sum().backward()
        torch.testing.assert_close(found, call(q, (0, 0, query, 8)))
        torch.testing.assert_close(own.grad, expected.grad)
        torch.testing.assert_close(torch.func.grad(lambda q: call(q, at).square().sum())(q), expected.grad)  # noqa: B023
    assert len(graphs) == 1
    with pytest.raises(NotImplementedError, match="^at is given, but vmap cannot make it a part of the batch"):
        torch.vmap(lambda at: call(q, at))(torch.zeros(2, 4, dtype=torch.int64))
    x = torch.randn(1, 32, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    out, lse = cupyflash.torch.attention(x, x, x, return_lse=True)
    with pytest.raises(ValueError, match="^out_dtype is given but the call is traced, transformed or differentiated"):
        attention_backward(x, x, x, x, out, lse, out_dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(("family", "arch", "dim"), COMPILED)
def test_they_spill_no_more_than_is_declared(family: str, arch: str, dim: int, everything: bool) -> None:
    from cupyflash.gpu.compiler import compile_source

    q, options = view(2, 1000, 8, dim), {"causal": True}
    if everything:
        options |= {"window": (300, 0), "dropout": 0.1, "seed": view(1, dtype="int64"), "softcap": 5.0}
        options |= {"alibi_slopes": view(8, dtype="float32"), "key_mask": view(2, 1000, dtype="bool")}
    problem = describe(q, q, q, at=AT, **options)
    for of in (FORWARD, BACKWARD):
        made = plan(problem, Arch.of(arch), of, family)
        compiled = compile_source(generate(made), arch)
        assert max(x.spill_stores for x in compiled.resources.values()) <= made.spills
        assert "serialized" not in compiled.log
