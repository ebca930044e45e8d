"""Lengths that are data, in PyTorch: autograd, compilers, transforms, nested tensors, beside NumPy and float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from ragged import Case, arguments, check_case, draw_case

import cupyflash

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cupyflash.interop import torch_schema
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cupyflash.torch import attention

FORMS = [("packed", "packed"), ("packed", "filled"), ("dense", "packed"), ("dense", "filled"), ("packed", "dense")]
HOW: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"options": {"causal": True, "deterministic": True}},
    "bias": {"given": ("bias", "alibi_slopes", "sinks", "key_mask"), "options": {"causal": "top_left"}},
    "by line": {"given": ("bias", "mask"), "lines": ("bias", "mask")},
    "score": {"score": "relative"},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3, "window": (4, 2)}},
    "blocks": {"blocks": "bh"},
}
GRADIENTS = ("bias", "alibi_slopes", "sinks")


def tensor(x: np.ndarray) -> Any:
    return torch.from_numpy(np.array(x))


def drawn(name: str, form_q: str = "packed", form_k: str = "packed", layout: str = "bshd", seed: int = 0) -> Any:
    """A case in float64; its q, k and v, all that has a gradient, and what else a call is given, as tensors."""
    lens_q, lens_k = ([0, 1, 4, 3], [3, 1, 0, 9])
    lens_q = [2] * 4 if form_q == "dense" else lens_q
    lens_k = [5] * 4 if form_k == "dense" else lens_k
    rng = np.random.default_rng(seed)
    case = draw_case(rng, lens_q, lens_k, form_q=form_q, form_k=form_k, dtype="float64", dims=(8, 6), page=4,
                     **HOW[name])  # fmt: skip
    arrays, given = arguments(case, layout, tensor)
    leaves = {x: arrays[x].requires_grad_() for x in "qkv"}
    leaves |= {x: given.pop(x).requires_grad_() for x in GRADIENTS if x in given}
    read = given.get("score_arrays", {})
    leaves |= {f"score_arrays.{x}": y.requires_grad_() for x, y in read.items() if y.is_floating_point()}
    return case, leaves, given | {"dout": arrays["dout"], "dlse": arrays["dlse"]}


def called(leaves: dict[str, Any], given: dict[str, Any], entry: Any = attention) -> Any:
    """out, and lse with 0 for -inf."""
    given = {name: x for name, x in given.items() if name not in ("dout", "dlse")}
    read = {name.removeprefix("score_arrays."): x for name, x in leaves.items() if "." in name}
    if "score_arrays" in given:
        given["score_arrays"] = given["score_arrays"] | read
    plain = {name: x for name, x in leaves.items() if "." not in name}
    out, lse = entry(**plain, **given, return_lse=True)
    return out, torch.where(lse > -1e30, lse, 0.0)


def loss(leaves: dict[str, Any], given: dict[str, Any]) -> Any:
    out, lse = called(leaves, given)
    own = torch.where(given["dout"].isnan(), 0.0, given["dout"])
    return (out * own).sum() + (lse * given["dlse"]).sum()


def gradients(function: Any, leaves: dict[str, Any], given: dict[str, Any]) -> list[Any]:
    return list(torch.autograd.grad(function(leaves, given), [*leaves.values()]))


def expected(case: Case, layout: str = "bshd") -> dict[str, np.ndarray]:
    """Of NumPy, which is judged against float64."""
    found = check_case(case, layout=layout)
    rows = ("out", "dq", "dk", "dv")
    return {name: x.swapaxes(-3, -2) if layout == "bhsd" and name in rows else x for name, x in found.items()}


def same(actual: Any, wanted: Any, **tolerance: float) -> None:
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_autograd(form_q: str, form_k: str, name: str, layout: str) -> None:
    """Of out and lse, by everything that has a gradient; rows that belong to nobody hold NaN."""
    if name == "by line" and form_q == "dense":
        pytest.skip("of packed queries")
    case, leaves, given = drawn(name, form_q, form_k, layout)
    wanted = expected(case, layout)
    out, _ = called(leaves, given)
    np.testing.assert_array_equal(out.detach(), wanted["out"])
    named = {x: f"dscore_arrays['{x.removeprefix('score_arrays.')}']" if "." in x else f"d{x}" for x in leaves}
    for x, grad in zip(leaves, gradients(loss, leaves, given)):
        np.testing.assert_allclose(grad, wanted[named[x]], rtol=1e-12, atol=1e-12, err_msg=x)


@pytest.mark.parametrize("name", ["causal", "bias", "score"])
def test_derivatives(name: str) -> None:
    """Forward mode and twice, beside differences along random directions: along each axis they take a minute."""
    _, leaves, given = drawn(name)
    own = {x: torch.nan_to_num(y.detach()).requires_grad_() for x, y in leaves.items()}

    def function(*xs: Any) -> Any:
        return called(dict(zip(own, xs)), given)

    xs = tuple(own.values())
    assert torch.autograd.gradcheck(function, xs, check_forward_ad=True, atol=1e-4, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, xs, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", HOW)
def test_compiled_in_one_graph(name: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    _, leaves, given = drawn(name)
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    same(gradients(compiled, leaves, given), gradients(loss, leaves, given), rtol=1e-12, atol=1e-12)


def test_compiled_caches_and_pages() -> None:
    torch._dynamo.reset()
    for form in ("filled", "paged"):
        _, leaves, given = drawn("causal", "dense", form)
        with torch.no_grad():
            compiled = torch.compile(called, fullgraph=True, dynamic=True, backend="aot_eager")
            same(compiled(leaves, given), called(leaves, given))


def test_rows_sequences_and_hints_are_symbols() -> None:
    """Other rows, other sequences and other longest lengths compile nothing anew, and a hint in a tensor is never
    read."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, cu, most: attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, max_seqlen_q=most,
                                      max_seqlen_k=most), fullgraph=True, dynamic=True, backend="eager",
    )  # fmt: skip
    for rows, ends, most in ((9, (0, 4, 9), 5), (12, (0, 2, 3, 12), 9), (15, (0, 0, 7, 8, 14), 700), (3, (0, 2, 3), 2)):
        q, cu = torch.randn(rows, 2, 8), torch.tensor(ends)
        with torch._dynamo.config.patch(error_on_recompile=rows != 9):
            same([compiled(q, cu, most)], [attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)])
    hint = torch.empty((), dtype=torch.int32, device="meta")  # that cannot be read
    for call in (attention, torch.compile(attention, fullgraph=True, backend="eager")):
        found = call(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=hint, max_seqlen_k=hint)
        same([found], [attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)])


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    for name in ("bias", "score"):
        _, leaves, given = drawn(name)
        compiled = torch.compile(loss, fullgraph=True)
        same(gradients(compiled, leaves, given), gradients(loss, leaves, given), rtol=1e-10, atol=1e-10)


class Model(torch.nn.Module):
    def forward(self, q: Any, cu: Any, lens: Any, table: Any, pool: Any) -> Any:
        out = attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        return attention(out, pool, pool, cu_seqlens_q=cu, seqlens_k=lens, page_table=table)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    inputs = (torch.randn(7, 2, 8), torch.tensor([0, 3, 7]), torch.tensor([5, 2]), torch.tensor([[1, 0], [2, -1]]),
              torch.randn(3, 4, 2, 8))  # fmt: skip
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {"q": {0: rows}, "cu": None, "lens": None, "table": None, "pool": None}
    program = torch.export.export(Model(), inputs, dynamic_shapes=shapes, strict=strict)
    longer = (torch.randn(9, 2, 8), torch.tensor([0, 2, 9]), *inputs[2:])
    same([program.module()(*longer)], [Model()(*longer)])


@pytest.mark.parametrize(
    "passes", [pytest.param((FORWARD, BACKWARD)), pytest.param((JVP, BACKWARD_JVP), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("form_q", "form_k"), FORMS[:2])
def test_opcheck(form_q: str, form_k: str, passes: tuple[Pass, ...]) -> None:
    """PyTorch's own checks: schema, derivative, fake kernel, and what is traced against what runs at once."""
    _, leaves, given = drawn("causal", form_q, form_k)
    given = {name: x for name, x in given.items() if name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k")}
    q, k, v = (torch.nan_to_num(x.detach()) for x in leaves.values())
    out, lse = attention(q, k, v, **given, return_lse=True)
    lib = cupyflash.interop.library("q", q)
    options = cupyflash.problem.complete({"causal": True, "max_seqlen_k": 5})
    seen = []
    for of in passes:
        arrays = {"q": q, "k": k, "v": v, **given}
        if of is not FORWARD:
            arrays |= {"out": out, "lse": torch.nan_to_num(lse, neginf=0.0)}
        arrays |= {"dout": torch.randn_like(out)} if of.of_gradients else {}
        arrays |= {"tq": torch.randn_like(q), "tk": torch.randn_like(k)} if of.moved else {}
        arrays |= {"tout": torch.randn_like(out), "tlse": torch.randn_like(lse)} if of is BACKWARD_JVP else {}
        call = cupyflash.call.Call(lib, of, arrays, options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_schema, "operator", lambda of: lambda *args: seen.append(args))
            torch_schema.run(call)
        torch.library.opcheck(torch_schema.operator(of), seen[-1])


def test_functional() -> None:
    """torch.func, and autocast."""
    _, leaves, given = drawn("bias")
    found = torch.func.grad(loss)({x: y.detach() for x, y in leaves.items()}, given)
    same([found[x] for x in leaves], gradients(loss, leaves, given), rtol=1e-12, atol=1e-12)
    q, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert out.dtype is torch.bfloat16


def test_vmap_of_caches() -> None:
    q, k, v = torch.randn(3, 2, 1, 4, 8), torch.randn(3, 2, 9, 2, 8), torch.randn(3, 2, 9, 2, 6)
    lens = torch.tensor([[4, 9], [0, 2], [7, 7]])
    bias = torch.randn(2, 4, 1, 9)

    def one(q: Any, k: Any, v: Any, lens: Any) -> Any:
        return attention(q, k, v, seqlens_k=lens, bias=bias, causal=True)

    for dims in ((0, 0, 0, 0), (0, None, None, 0), (None, 0, 0, None)):
        xs = [x if d == 0 else x[1] for x, d in zip((q, k, v, lens), dims)]
        alone = [one(*[x[n] if d == 0 else x for x, d in zip(xs, dims)]) for n in range(3)]
        same(torch.func.vmap(one, dims)(*xs), torch.stack(alone))
    alone = lambda q, k, v, lens: attention(q[None], k[None], v[None], seqlens_k=lens[None])[0]  # one sequence
    same(torch.func.vmap(alone)(q[0], k[0], v[0], lens[0]), attention(q[0], k[0], v[0], seqlens_k=lens[0]))
    pool, table = torch.randn(5, 4, 2, 8), torch.tensor([[[0, 1, 2], [3, 4, 0]]] * 3)
    table[1, 0] = torch.tensor([4, 3, -1])
    paged = lambda q, lens, table: attention(q, pool, pool, seqlens_k=lens, page_table=table)
    same(torch.func.vmap(paged)(q, lens, table), torch.stack([paged(*xs) for xs in zip(q, lens, table)]))
    with pytest.raises(NotImplementedError, match="^page_table is given under vmap, .* a pool of pages, .*; put the"):
        torch.func.vmap(lambda k: attention(q[0], k, k, seqlens_k=lens[0], page_table=table[0]))(pool[None])


def test_vmap_of_what_is_packed_is_refused() -> None:
    q, cu = torch.randn(2, 6, 2, 8), torch.tensor([0, 2, 6])
    for x, call, name in (
        (q, lambda x: attention(x, q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu), "cu_seqlens_q"),
        (torch.randn(2, 2, 3, 2, 8), lambda x: attention(x, q[0], q[0], cu_seqlens_k=cu), "cu_seqlens_k"),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name} is given under vmap, .*; pack the sequences of all"):
            torch.func.vmap(call)(x)


def test_no_gradient_through_pages() -> None:
    _, leaves, given = drawn("nothing", "dense", "paged")
    message = "^page_table is given, with which there is a forward alone, but a gradient is wanted; call under torch.no"
    for call in (called, torch.compile(called, backend="eager")):
        with pytest.raises(Exception, match=message[1:]):
            call(leaves, given)
    with torch.no_grad():
        assert called(leaves, given)[0].isfinite().all()
    with pytest.raises(TypeError, match="page_table is given to attention_jvp; k and v in pages have a forward alone"):
        q, k, v = (leaves[x].detach() for x in "qkv")
        torch.func.jvp(lambda q: called({"q": q, "k": k, "v": v}, given)[0], (q,), (q,))


def test_what_is_wrong_is_said_by_compilers_and_in_autograd() -> None:
    q, cu = torch.randn(6, 2, 8, requires_grad=True), torch.tensor([0, 2, 6])
    for wrong, error, message in (
        ({"cu_seqlens_q": torch.tensor([0, 4, 2]), "cu_seqlens_k": cu}, ValueError,
            r"cu_seqlens_q\[2\] is 2; it must be cu_seqlens_q\[1\], 4, or more"),
        ({"cu_seqlens_q": cu.float(), "cu_seqlens_k": cu}, TypeError, "cu_seqlens_q has dtype float32; it must be int"),
        ({"cu_seqlens_q": cu, "cu_seqlens_k": cu[1:]}, ValueError, "cu_seqlens_k has 1 sequences, shape .*; it must h"),
        ({"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; it must be No"),
        ({"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": cu}, TypeError,
            r"max_seqlen_q is an array of torch.int64 of shape \(3,\); it must be one integer"),
        ({"cu_seqlens_q": cu, "cu_seqlens_k": cu, "check": 1}, TypeError, "check is 1; it must be True or False"),
    ):  # fmt: skip
        torch._dynamo.reset()
        for call in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
            with pytest.raises(error if call is attention else Exception, match=message):
                call(q, q, q, **wrong)


def test_check_reaches_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass that it is asked of alone."""
    from cupyflash.interop import torch_operators

    seen = []
    run = torch_operators.at_once
    monkeypatch.setattr(torch_operators, "at_once", lambda call: seen.append((call.of, call.check)) or run(call))
    q, cu = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    torch.func.grad(lambda q: attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, check=True).sum())(q)
    assert seen == [(FORWARD, True), (BACKWARD, False)]


def test_flops() -> None:
    """Of the pairs that there are; where lengths have no values, of the most that there may be."""
    per_pair = 4 * (4 * 8 + 10 * 8)  # of 4 heads, forward and backward

    def counted(**hints: int) -> int:
        q, k, cu = torch.zeros(12, 4, 8, requires_grad=True), torch.zeros(12, 2, 8), torch.tensor([0, 3, 3, 4, 10])
        with FlopCounterMode(display=False) as counter:
            attention(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, **hints).sum().backward()
        return int(counter.get_total_flops())

    assert counted() == (9 + 1 + 36) * per_pair
    with FakeTensorMode():
        assert counted(max_seqlen_q=6, max_seqlen_k=7) == 4 * 6 * 7 * per_pair
        assert counted() == 4 * 12 * 12 * per_pair
        pool, lens = torch.zeros(5, 9, 2, 8), torch.zeros(3, dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            attention(torch.zeros(3, 2, 4, 8), pool, pool, seqlens_k=lens, page_table=lens[:, None].expand(3, 2))
    assert counter.get_total_flops() == 3 * 2 * 18 * 4 * 4 * 8


def test_tensors_on_a_gpu_that_is_not_there() -> None:
    """Nothing is asked of lengths or hints but shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, cu, most = (torch.zeros(x, dtype=d, device="cuda") for x, d in (
            ((12, 4, 8), torch.float16), ((5,), torch.int32), ((), torch.int32)))  # fmt: skip
        out, lse = attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=most, return_lse=True)
    assert out.shape == (12, 4, 8) and lse.shape == (4, 12) and out.is_cuda


# ---- jagged nested tensors ------------------------------------------------------------------------------------------


def jagged(grad: bool = True) -> list[Any]:
    torch.manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 4, 10])
    nest = functools.partial(torch.nested.nested_tensor_from_jagged, offsets=offsets)
    values = [torch.randn(10, h, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6))]
    return [nest(x).detach().requires_grad_(grad) for x in values]


def of_nested(q: Any, k: Any, v: Any, **options: Any) -> Any:
    out, lse = attention(q, k, v, causal=True, return_lse=True, **options)
    return out.values().square().sum() + lse.sin().sum()


def of_packed(q: Any, k: Any, v: Any, offsets: Any, **options: Any) -> Any:
    out, lse = attention(q, k, v, causal=True, return_lse=True, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_jagged(compiled: bool) -> None:
    """As packed, with gradients, and results that are nested as q is."""
    torch._dynamo.reset()
    nested = jagged()
    packed = [x.detach().values().requires_grad_() for x in nested]
    bias = torch.randn(4, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    function = torch.compile(of_nested, fullgraph=True, backend="aot_eager") if compiled else of_nested
    found = torch.autograd.grad(function(*nested, bias=bias), [*nested, bias])
    wanted = torch.autograd.grad(of_packed(*packed, nested[0].offsets(), bias=bias), [*packed, bias])
    assert all(x.is_nested for x in found[:3])
    same([*(x.values() for x in found[:3]), found[3]], wanted)
    out = attention(*nested)
    assert out.shape == nested[0].shape[:3] + (6,) and (nested[0][..., :6] + out).is_nested


def test_jagged_heads_first_and_by_hand() -> None:
    q, k, v = jagged(False)
    expected = attention(q, k, v, causal=True)
    out = attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bhsd")
    same([out.transpose(1, 2).values()], [expected.values()])
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    grads = cupyflash.attention_backward(out, q, k, v, out, lse)
    cu = q.offsets()
    packed = [x.values() for x in (out, q, k, v, out)]
    same([x.values() for x in grads], cupyflash.attention_backward(*packed, lse, cu_seqlens_q=cu, cu_seqlens_k=cu))
    slopes = torch.rand(4, dtype=torch.float64)
    score = lambda s, b, h, i, j, a: s + a[b] * j
    found = attention(q, k, v, score=score, score_arrays={"a": slopes})
    of = attention(*packed[1:4], cu_seqlens_q=cu, cu_seqlens_k=cu, score=score, score_arrays={"a": slopes})
    same([found.values()], [of])


def test_of_nested_tensors_is_refused() -> None:
    q, k, v = jagged(False)
    x = torch.randn(4, 2, 4, 8, dtype=torch.float64)
    holes = torch.nested.narrow(x, 1, torch.tensor([0, 1, 0, 0]), torch.tensor([1, 1, 2, 2]), layout=torch.jagged)
    other = torch.nested.nested_tensor_from_jagged(v.values(), torch.tensor([0, 1, 3, 4, 10]))
    one = "it must be a dense one, or q, k and v all of layout torch.jagged"
    for call, error, message in (
        (lambda: attention(q, k.values(), v), TypeError, "^k is a Tensor, but q is a nested tensor; both must be"),
        (lambda: attention(x, k, v), TypeError, f"^k is a nested tensor; {one}"),
        (lambda: attention(x, x, x, bias=q), TypeError, f"^bias is a nested tensor; {one}"),
        (lambda: attention(q, k, v, bias=q), TypeError, "^bias is a nested tensor; it must be a dense one"),
        (lambda: attention(q, k, v, cu_seqlens_q=q.offsets()), ValueError, "^cu_seqlens_q is given, but q is a nested"),
        (lambda: attention(q, k, v, seqlens_k=q.offsets()), ValueError, "^seqlens_k is given, but k is a nested"),
        (lambda: attention(q, k, other), ValueError, "^v is a nested tensor of other lengths than k; it must be "),
        (lambda: attention(q, k, v, layout="bhsd"), ValueError, r"axis 1 has the lengths; with layout='bhsd' it must"),
        (lambda: attention(q, k, v, out=q), ValueError, "^out is given, but q is a nested tensor, whose results are n"),
        (lambda: attention(q, k, v, at=(0, 0, 0, 0)), ValueError, r"^at is .*, and q is a nested tensor; it must be N"),
        (
            lambda: attention(q, k, v, page_table=q.offsets()),
            ValueError,
            r"^page_table is given with k.offsets\(\), which says that",
        ),
        (
            lambda: attention(q, k, v, key_mask=torch.ones(4, 2, dtype=torch.bool)),
            ValueError,
            r"more than k.offsets\(\)\[\d\]; it must be at most 2 more, as long as key_mask",
        ),
        (
            lambda: cupyflash.attention_backward(q, q, k, v, q, x, grads=(q, k, v)),
            ValueError,
            "^grads is given, but q is a nested tensor",
        ),
        (lambda: attention(holes, k, v), ValueError, r"^q is a nested tensor with holes; pass its contiguous\(\)"),
        (lambda: attention(torch.nested.nested_tensor([x[0]]), k, v), TypeError, f"^q is a nested tensor; {one}"),
        (lambda: cupyflash.merge([x, q], [x[..., 0], x[..., 0]]), TypeError, "is a nested tensor; it must be a dense"),
        (lambda: cupyflash.explain(x, x, v), TypeError, f"^v is a nested tensor; {one}"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
