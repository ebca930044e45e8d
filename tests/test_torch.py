"""PyTorch tensors: results, gradients through autograd, streams and graphs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from frameworks import OPTIONS, SCORES, asked_of_the_cpu, judge, references, split
from reference import DTYPES, draw
from semantics import Inputs, draw_inputs

import cupyflash
from cupyflash import interop
from cupyflash.problem import INTEGERS, ITEMSIZE

torch = pytest.importorskip("torch")

from cupyflash.torch import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """PyTorch's threads set MKL up at once, and a process' first float64 logsumexp is wrong by 1e-9 now and then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def put(x: np.ndarray | None, device: str = "cpu", grad: bool = False) -> Any:
    if x is None:
        return None
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16).requires_grad_(grad)
    return torch.from_numpy(x.copy()).to(device).requires_grad_(grad)


def get(x: Any) -> np.ndarray:
    x = x.detach().cpu()
    return x.float().numpy().astype(DTYPES["bfloat16"]) if x.dtype is torch.bfloat16 else x.numpy()


def leaves(inputs: Inputs, device: str = "cpu") -> list[Any]:
    return [put(x, device, grad=True) for x in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [attention, cupyflash.attention], ids=["torch", "package"])
def test_results_and_gradients(entry: Any, dtype: str, options: str, device: str, rng: np.random.Generator) -> None:
    masked, options = split(options)
    inputs = draw_inputs(rng, dtype, heads=(4, 2), dims=(64, 32), key_mask=masked)
    q, k, v = leaves(inputs, device)
    out, lse = entry(q, k, v, key_mask=put(inputs.key_mask, device), return_lse=True, **options)
    assert type(out) is torch.Tensor and out.dtype is q.dtype and out.device == q.device and out.requires_grad
    out.backward(put(inputs.dout, device))
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    judge({name: get(x) for name, x in results.items()}, *references(inputs, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [attention, cupyflash.attention], ids=["torch", "package"])
def test_scores(entry: Any, dtype: str, device: str, rng: np.random.Generator) -> None:
    """Soft cap, mask, bias, slopes and sinks, and gradients of all that has one."""
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=SCORES, full="hqk", dlse=1.0)
    q, k, v = leaves(inputs, device)
    given = {name: put(x, device, grad=name != "mask") for name, x in inputs.given.items()}
    out, lse = entry(q, k, v, softcap=2.0, causal=True, return_lse=True, **given)
    torch.autograd.backward((out, lse), (put(inputs.dout, device), put(inputs.dlse, device)))
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    results |= {f"d{name}": x.grad for name, x in given.items() if x.requires_grad}
    judge({name: get(x) for name, x in results.items()}, *references(inputs, softcap=2.0, causal=True))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_gradient_of_one_array(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comes where the array requires it, also where nothing else does, and is computed nowhere else."""
    inputs = draw_inputs(rng, "float32", heads=(4, 2), given=SCORES, full="hqk")
    q, k, v = (put(x) for x in (inputs.q, inputs.k, inputs.v))
    given = {other: put(x, "cpu", grad=other == name) for other, x in inputs.given.items()}
    asked = asked_of_the_cpu(monkeypatch)
    attention(q, k, v, **given).backward(put(inputs.dout))
    judge({f"d{name}": get(given[name].grad)}, *references(inputs))
    attention(q.requires_grad_(), k, v, **{other: x.detach() for other, x in given.items()}).sum().backward()
    assert asked == [(name,), ()]
    assert all(x.grad is None for other, x in given.items() if other != name)
    with torch.no_grad():
        assert not attention(q, k, v, **given).requires_grad


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck(options: str, rank: int, layout: str) -> None:
    masked, options = split(options)
    generator = torch.Generator().manual_seed(0)

    def tensor(*bshd: int, strided: bool = False) -> Any:
        shape = bshd if layout == "bshd" else (bshd[0], bshd[2], bshd[1], bshd[3])
        shape = shape[4 - rank :] if rank > 2 else (bshd[1], bshd[3])
        x = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64, generator=generator)
        return (x[..., ::2] if strided else x[..., : shape[-1]].contiguous()).detach().requires_grad_()

    heads = (4, 2) if rank > 2 else (1, 1)
    q, k, v = tensor(2, 4, heads[0], 2), tensor(2, 5, heads[1], 2, strided=True), tensor(2, 5, heads[1], 3)
    mask = torch.rand(2, 5, generator=generator) < 0.7 if masked else None
    mask = mask if mask is None or rank == 4 else mask[0]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, key_mask=mask, layout=layout, **options), (q, k, v))
    scores = {
        "bias": torch.randn(4, 5, dtype=torch.float64, generator=generator),
        "alibi_slopes": torch.rand(heads[0] if rank > 2 else (), dtype=torch.float64, generator=generator),
        "sinks": torch.randn(heads[0] if rank > 2 else (), dtype=torch.float64, generator=generator),
    }
    hides = torch.rand(4, 5, generator=generator) < 0.8
    options |= {"softcap": 0.8, "key_mask": mask, "layout": layout, "mask": hides}

    def both(*x: Any) -> Any:
        out, lse = attention(*x[:3], **dict(zip(scores, x[3:])), return_lse=True, **options)
        return out, lse

    assert torch.autograd.gradcheck(both, (q, k, v, *(x.requires_grad_() for x in scores.values())))


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (4, 5, 7), (2, 1, 5, 7), (1, 4, 1, 7), (2, 4, 5, 7)], ids=str)
def test_gradcheck_of_a_bias(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, bias = (
        torch.randn(x, dtype=torch.float64, generator=generator)
        for x in ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 3), shape)
    )
    assert torch.autograd.gradcheck(
        lambda x: attention(q, k, v, bias=x, causal=True, softcap=1.5), bias.requires_grad_()
    )


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_come_in_any_form(device: str, rng: np.random.Generator) -> None:
    """sum() sends back one number with strides 0, a transpose a transposed gradient."""
    inputs = draw_inputs(rng, "float32")
    weights = put(inputs.dout, device)
    q, k, v = leaves(inputs, device)
    (attention(q, k, v).transpose(1, 2) * weights.transpose(1, 2).contiguous()).sum().backward()
    judge({f"d{n}": get(x.grad) for n, x in zip("qkv", (q, k, v))}, *references(inputs))
    q, k, v = leaves(inputs, device)
    attention(q, k, v).sum().backward()
    ones = inputs._replace(dout=np.ones_like(inputs.dout))
    judge({f"d{n}": get(x.grad) for n, x in zip("qkv", (q, k, v))}, *references(ones))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input(wanted: str, device: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, "float32")
    tensors = {name: put(getattr(inputs, name), device, grad=name == wanted) for name in "qkv"}
    cupyflash.attention(**tensors).backward(put(inputs.dout, device))
    assert all((x.grad is not None) == (name == wanted) for name, x in tensors.items())
    judge({f"d{wanted}": get(tensors[wanted].grad)}, *references(inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_in_a_module(device: str, rng: np.random.Generator) -> None:
    """Parameters (a subclass of Tensor) and one packed projection, differentiated in a chain."""
    x = put(draw(rng, "float32", 2, 9, 16), device)
    weight = torch.nn.Parameter(put(draw(rng, "float32", 48, 16), device))

    def loss(attend: Any) -> Any:
        q, k, v = (x @ weight.T).view(2, 9, 3, 4, 4).unbind(2)
        return attend(q, k, v).square().sum()

    def standard(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    (expected,) = torch.autograd.grad(loss(standard), weight)
    (actual,) = torch.autograd.grad(loss(attention), weight)
    # float32 leaves 1e-5 of the largest gradient, hundreds here
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=5e-5 * expected.abs().max().item())
    assert cupyflash.attention(weight, weight, weight).requires_grad


def test_no_graph_where_none_is_wanted(rng: np.random.Generator) -> None:
    q, k, v = leaves(draw_inputs(rng, "float32"))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out, lse = attention(q, k, v, return_lse=True)
            assert not out.requires_grad and not lse.requires_grad
    assert not attention(q.detach(), k.detach(), v.detach()).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_through_lse(masked: bool, layout: str, device: str, rng: np.random.Generator) -> None:
    """Of attention in two parts and merged, and of whole attention; of out and lse, and of one alone."""
    inputs = draw_inputs(rng, "float64", heads=(4, 2), dims=(16, 12), key_mask=masked)
    mask = put(inputs.key_mask, device)
    if masked:
        mask[0] = False  # queries that see no key
        mask[1, 0] = mask[1, 50] = True
    q, k, v = (x if layout == "bshd" else x.detach().transpose(1, 2).requires_grad_() for x in leaves(inputs, device))
    along = 1 if layout == "bshd" else 2

    def whole() -> Any:
        return attention(q, k, v, key_mask=mask, layout=layout, return_lse=True)

    def merged() -> Any:
        pieces = zip(k.split(40, along), v.split(40, along), [None] * 3 if mask is None else mask.split(40, 1))
        parts = [attention(q, *kv, key_mask=m, layout=layout, return_lse=True) for *kv, m in pieces]
        return cupyflash.merge(*zip(*parts), layout=layout)

    def standard() -> Any:
        x, y, z = (t if layout == "bhsd" else t.transpose(1, 2) for t in (q, k, v))
        scores = x @ y.repeat_interleave(2, 1).mT / 4
        if mask is not None:
            scores = torch.where(mask[:, None, None], scores, -1e9)
        out = scores.softmax(-1) @ z.repeat_interleave(2, 1)
        return out if layout == "bhsd" else out.transpose(1, 2), scores.logsumexp(-1)

    w, u = (torch.randn_like(x) for x in whole())
    if masked:
        w[0], u[0] = 0, 0
    for terms in ((1, 1), (0, 1), (1, 0)):
        exact, *others = (
            torch.autograd.grad(sum((x * y).nan_to_num().sum() for x, y, n in zip(f(), (w, u), terms) if n), (q, k, v),
                                allow_unused=True, materialize_grads=True)
            for f in (standard, whole, merged)
        )  # fmt: skip
        for grads in others:
            for name, got, expected in zip("qkv", grads, exact):
                assert (got - expected).abs().max() < 1e-11, (terms, name)


@pytest.mark.parametrize("device", DEVICES)
def test_a_write_is_seen_by_autograd(device: str, rng: np.random.Generator) -> None:
    """As after torch.add(out=...): who kept the old values for its own gradient is told."""
    q, k, v = (x.detach() for x in leaves(draw_inputs(rng, "float32"), device))
    weights = [torch.ones_like(x, requires_grad=True) for x in (q, q, k, v)]
    targets = [torch.ones_like(x) for x in weights]
    kept = [(w * x).sum() for w, x in zip(weights, targets)]
    out, lse = attention(q, k, v, out=targets[0], return_lse=True)
    cupyflash.attention_backward(out, q, k, v, out, lse, grads=tuple(targets[1:]))
    for loss in kept:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():  # has no versions
        x = torch.empty_like(q)
        assert attention(q, k, v, out=x) is x


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_are_not_written(device: str, rng: np.random.Generator) -> None:
    q, k, v = (x.detach() for x in leaves(draw_inputs(rng, "float32"), device))
    leaf = torch.zeros_like(q, requires_grad=True)
    with pytest.raises(ValueError, match="^out requires grad.*pass its detach"):
        cupyflash.attention(q, k, v, out=leaf)
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="^grads: dk requires grad.*pass its detach"):
        grads = (torch.zeros_like(q), leaf, torch.zeros_like(v))
        cupyflash.attention_backward(out, q, k, v, out, lse, grads=grads)
    assert not leaf.detach().any()
    with torch.no_grad():
        attention(q, k, v, out=leaf)
    assert leaf.detach().any()


@pytest.mark.parametrize("wanted", [False, True])
def test_a_mask_that_requires_grad(wanted: bool) -> None:
    x = torch.ones(3, 4, requires_grad=wanted)
    with pytest.raises(TypeError, match="^key_mask has dtype float32; it must be bool"):
        cupyflash.attention(x, x, x, key_mask=torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (32, 0), (64, 200)])
def test_large_gradients_of_lse(dims: tuple[int, int], device: str, rng: np.random.Generator) -> None:
    """65536, GradScaler's first scale, is no float16. Head dimension 256 has no column to spare; Dv may be 0."""
    inputs = draw_inputs(rng, "float16", dims=dims, dlse=65536.0)
    inputs.dout[...] = 0
    q, k, v = leaves(inputs, device)
    _, lse = attention(q, k, v, return_lse=True)
    lse.backward(put(inputs.dlse, device))
    judge({"dq": get(q.grad), "dk": get(k.grad), "dv": get(v.grad)}, *references(inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_out(device: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, "float32")
    q, k, v = leaves(inputs, device)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ValueError, match="out is given but a gradient is wanted"):
        attention(q, k, v, out=out)
    with torch.no_grad():
        assert attention(q, k, v, out=out) is out
    judge({"out": get(out)}, *references(inputs))


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_numpy_shares_memory(dtype: str) -> None:
    x = torch.zeros((3, 4), dtype=getattr(torch, dtype)).T
    lib = interop.library("q", x)
    a = lib.to_numpy(x)
    assert a.dtype.name == dtype and a.__array_interface__["data"][0] == x.data_ptr()
    assert tuple(s // a.itemsize for s in a.strides) == x.stride()
    back = lib.from_numpy(a)
    assert back.data_ptr() == x.data_ptr() and back.dtype is x.dtype and back.stride() == x.stride()
    assert lib.view(x) == ((4, 3), (1, 4), dtype, "cpu", "torch", x.data_ptr())
    x.untyped_storage().resize_(100)  # which numpy() would forbid from then on
    empty = torch.zeros((0, 4), dtype=x.dtype)
    assert lib.to_numpy(empty).shape == (0, 4) and lib.to_numpy(empty).dtype == a.dtype


def test_every_dtype_can_be_allocated() -> None:
    lib: Any = interop.library("q", torch.zeros(1))
    for dtype in ITEMSIZE.keys() - set(INTEGERS):  # those of seeds, which are neither made nor copied
        x = lib.empty((2, 3), dtype, "cpu")
        assert lib.view(x)[:4] == ((2, 3), (3, 1), dtype, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_options_are_those_of_the_forward(device: str, rng: np.random.Generator) -> None:
    """However the arrays and lists that they were given as are changed before the backward."""
    q, k, v = (put(draw(rng, "float32", 1, 9, 2, 8), device, True) for _ in range(3))
    scale, left, window = torch.tensor(0.5), torch.tensor(3), [2, 1]
    for options, change in (
        ({"scale": scale}, lambda: scale.mul_(4)),
        ({"window": (left, 0)}, lambda: left.fill_(1)),
        ({"window": window}, lambda: window.__setitem__(0, 5)),
    ):
        out = attention(q, k, v, **options)
        expected = torch.autograd.grad(out.square().sum(), (q, k, v))
        out = attention(q, k, v, **options)
        change()
        for found, x in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected):
            assert torch.equal(found, x)
        assert not torch.equal(attention(q, k, v, **options), out)  # the next call sees what they hold now


@pytest.mark.parametrize("entry", ["autograd", "backward", "func", "compiled"])
def test_deterministic_algorithms(entry: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's own attention: what holds when gradients are computed."""
    from cupyflash.cpu import corridor

    asked, compute = [], corridor._backward

    def spy(problem: Any, **given: Any) -> Any:
        asked.append(problem.deterministic)
        return compute(problem, **given)

    monkeypatch.setattr(corridor, "_backward", spy)
    q, k, v = (put(draw(rng, "float32", 1, 9, 2, 8), grad=entry != "func") for _ in range(3))

    def of(q: Any) -> Any:
        return attention(q, k, v).sum()

    for wanted in (False, True):
        loss = of(q) if entry == "autograd" else None
        torch.use_deterministic_algorithms(wanted)
        try:
            if entry == "func":
                torch.func.grad(of)(q)
            elif entry == "backward":
                with torch.no_grad():
                    out, lse = attention(q, k, v, return_lse=True)
                    cupyflash.attention_backward(out, q, k, v, out, lse)
            else:
                loss = torch.compile(of, backend="aot_eager")(q) if loss is None else loss
                loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_numpy_keeps_the_tensor() -> None:
    x = torch.ones(5)
    lib, alive = interop.library("q", x), weakref.ref(x)
    part = lib.to_numpy(x)[1:]
    del x
    assert alive() is not None and part.sum() == 4
    del part
    assert alive() is None


def test_signature_tells_apart_what_view_does() -> None:
    x = torch.zeros(2, 3, 4)
    lib = interop.library("q", x)
    others = [x.transpose(0, 1), x.half(), torch.zeros(2, 3, 5), x[:, :, ::2]]
    signatures = {lib.signature(x), *(lib.signature(y) for y in others)}
    assert len(signatures) == 5 and lib.signature(torch.ones(2, 3, 4)) == lib.signature(x)


def test_help_shows_what_the_package_takes() -> None:
    assert inspect.signature(attention) == inspect.signature(cupyflash.attention)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'is_causal'"):
        attention(torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4), is_causal=True)


def test_a_scale_that_is_learned() -> None:
    """It is refused, compiled too, and what the message says in its place has its gradient."""
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64).unbind()
    scale = torch.nn.Parameter(torch.rand((), dtype=torch.float64))
    for call in (attention, torch.compile(attention, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match=r"multiplies q: q \* scale as q \(in its dtype\), and scale=1\.0"):
            call(q, k, v, scale=scale)
    (found,) = torch.autograd.grad(attention(q * scale, k, v, scale=1.0).square().sum(), scale)
    step = 1e-6
    high, low = (attention(q, k, v, scale=scale.item() + x).square().sum() for x in (step, -step))
    torch.testing.assert_close(found, (high - low) / (2 * step), rtol=1e-6, atol=1e-6)


def test_a_softcap_that_is_learned() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64).unbind()
    softcap = torch.nn.Parameter(torch.rand((), dtype=torch.float64) + 1)
    with pytest.raises(TypeError) as raised:
        attention(q, k, v, softcap=softcap)
    said = str(raised.value).partition("is read by a score function: ")[2]
    options = eval(f"dict({said})", {"cupyflash": cupyflash, "softcap": softcap})
    out = attention(q, k, v, **options)
    torch.testing.assert_close(out, attention(q, k, v, softcap=softcap.item()))
    (found,) = torch.autograd.grad(out.square().sum(), softcap)
    step = 1e-6
    high, low = (attention(q, k, v, softcap=softcap.item() + x).square().sum() for x in (step, -step))
    torch.testing.assert_close(found, (high - low) / (2 * step), rtol=1e-6, atol=1e-6)


def test_bad_tensors() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(TypeError, match="k is a ndarray; it must be a torch.Tensor"):
        attention(x, np.ones((3, 4), np.float32), x)
    with pytest.raises(TypeError, match="q has dtype int64"):
        attention(x.long(), x, x)
    for scale in (torch.ones((), requires_grad=True), torch.ones((), dtype=torch.complex64)):
        with pytest.raises(TypeError, match=r"scale is Tensor of shape \(\) and dtype .*; it must be a real number"):
            attention(x, x, x, scale=scale)
    with pytest.raises(TypeError, match="(?s)scale is .*; it must be a real number or None"):
        torch.vmap(lambda scale: attention(x, x, x, scale=scale))(torch.ones(2))
    with pytest.raises(TypeError, match="v has dtype bfloat16 but q has float32; all arrays must have one dtype$"):
        attention(x, x, x.bfloat16())
    with pytest.raises(TypeError, match="key_mask is a list; it must be an array"):
        attention(x, x, x, key_mask=[True] * 3)


def unreadable(what: str) -> Any:
    x = torch.ones(3, 4)
    if what == "sparse":
        return x.to_sparse()
    if what == "meta":
        return x.to("meta")
    if what == "negative":
        return torch.ones(3, 4, dtype=torch.complex64).conj().imag
    return torch.nested.nested_tensor([x, x])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("sparse", TypeError, "has layout torch.sparse_coo; it must be strided"),
        ("meta", ValueError, "is on meta; it must be on cpu or cuda"),
        ("negative", ValueError, r"is a view that torch has yet to negate; pass its resolve_neg\(\)"),
        ("strided", TypeError, "is a nested tensor; it must be a dense one"),
    ],
)
def test_tensors_that_cannot_be_read_are_named(what: str, error: type[Exception], message: str) -> None:
    x, bad = torch.ones(3, 4), unreadable(what)
    for name in ("q", "k", "v", "key_mask", "bias", "out"):
        with pytest.raises(error, match=f"^{name} {message}"):
            attention(**{"q": x, "k": x, "v": x, name: bad})
    for name in ("dout", "out", "lse", "dlse"):
        with pytest.raises(error, match=f"^{name} {message}"):
            cupyflash.attention_backward(
                **{**dict.fromkeys(("dout", "q", "k", "v", "out"), x), "lse": x[:, 0], name: bad}
            )
    with pytest.raises(error, match=f"^grads: dk {message}"):
        cupyflash.attention_backward(x, x, x, x, x, x[:, 0], grads=(x, bad, x))
    with pytest.raises(error, match=rf"^lses\[1\] {message}"):
        cupyflash.merge([x, x], [x[:, 0], bad])
    with pytest.raises(error, match=f"^v {message}"):
        cupyflash.explain(x, x, bad)
