"""Derivatives of second order with every option, against those of standard attention; what runs for them, what is
refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

import cupyflash
from cupyflash.call import Call
from cupyflash.cpu import corridor
from cupyflash.score import tanh, where

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch_standard import standard

from cupyflash.torch import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Options = dict[str, Any]
QUERIES, KEYS = 5, 7


def numbers(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, ids: Any) -> Any:
    return where(j <= i + 3, 2 * tanh(s / 2) * a[h, ids[j]] + a[h, 0] * (1 + 0.1 * b), -math.inf)


IDS = torch.arange(KEYS) % 3
SEEN = numbers(4, QUERIES, KEYS) > -0.5
SEEN[1, 2] = False  # a row that sees nothing


@functools.cache
def blocks(device: str) -> Any:
    return cupyflash.block_mask(SEEN.to(device), block=16, like=SEEN.to(device))


ARRAYS = {
    "bias": numbers(4, QUERIES, KEYS), "of keys": numbers(2, 1, 1, KEYS), "alibi_slopes": numbers(2, 4),
    "sinks": numbers(4), "a": numbers(4, 3),
}  # fmt: skip
GIVEN: dict[str, Options] = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"causal": "top_left", "window": (2, None), "scale": -0.3},
    "heads first": {"layout": "bhsd", "window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "key_mask": {"key_mask": numbers(2, KEYS) > -0.5},
    "mask": {"mask": SEEN},
    "block_mask": {"block_mask": SEEN},
    "bias": {"bias": "bias"},
    "bias of keys": {"bias": "of keys"},
    "alibi_slopes": {"alibi_slopes": "alibi_slopes"},
    "sinks": {"sinks": "sinks"},
    "dropout": {"dropout": 0.25, "seed": torch.tensor([11])},
    "dropout by a number": {"dropout": 0.25, "seed": 2**63 + 5},
    "score": {"score": scored},
    "everything": {
        "softcap": 1.5, "causal": True, "mask": SEEN, "bias": "bias", "alibi_slopes": "alibi_slopes", "sinks": "sinks",
        "dropout": 0.25, "seed": 3,
    },
    "score and all else": {
        "score": scored, "block_mask": SEEN, "causal": True, "bias": "of keys", "sinks": "sinks", "dropout": 0.25,
        "seed": 3, "layout": "bhsd",
    },
}  # fmt: skip


def arrays_of(options: Options) -> list[Any]:
    """q, k, v, and those of the options by which there are derivatives."""
    shapes = [(2, QUERIES, 4, 8), (2, KEYS, 2, 8), (2, KEYS, 2, 6)]
    found = [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]
    if options.get("layout") == "bhsd":
        found = [x.transpose(1, 2) for x in found]
    found += [ARRAYS[x] for x in options.values() if isinstance(x, str) and x in ARRAYS]
    return [*found, ARRAYS["a"]] if "score" in options else found


def named(options: Options, more: tuple[Any, ...]) -> tuple[Options, Any]:
    """Options with these arrays, and what a score function reads of them."""
    given = iter(more)
    made = {name: next(given) if isinstance(x, str) and x in ARRAYS else x for name, x in options.items()}
    return made, next(given, None)


def ours(options: Options, device: str = "cpu") -> Callable[..., Any]:
    mask = blocks(device)

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        made, a = named(options, more)
        made = {name: x.to(q.device) if isinstance(x, torch.Tensor) else x for name, x in made.items()}
        if "score" in options:
            made["score_arrays"] = {"a": a, "ids": IDS.to(q.device)}
        if "block_mask" in options:
            made["block_mask"] = mask
        out, lse = attention(q, k, v, return_lse=True, **made)
        return out, lse.clamp(min=-100.0)

    return f


@functools.cache
def kept(name: str) -> Any:
    """What dropout keeps: of equal probabilities, (B, H, Sq, Sk)."""
    q, k, v = torch.zeros(2, QUERIES, 4, 1), torch.zeros(2, KEYS, 4, 1), torch.eye(KEYS)[:, None].expand(2, -1, 4, -1)
    return attention(q, k, v, dropout=GIVEN[name]["dropout"], seed=GIVEN[name]["seed"]).transpose(1, 2).double() > 0


def theirs(name: str) -> Callable[..., Any]:
    keeps = kept(name) if "seed" in GIVEN[name] else None  # here: what is kept within a transform is of its level

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        made, a = named(GIVEN[name], more)
        made.pop("seed", None)
        if "block_mask" in made:
            made["mask"] = made.pop("block_mask")
        if "score" in made:
            b = torch.arange(2.0, dtype=torch.float64)[:, None, None, None]
            made["mask"] = made.get("mask", True) & (torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + 3)
            made["score"] = lambda s: 2 * torch.tanh(s / 2) * a[:, None, IDS] + a[:, :1, None] * (1 + 0.1 * b)
        out, lse = standard(q, k, v, return_lse=True, keeps=keeps, **made)
        return out, lse.clamp(min=-100.0)

    return f


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    def of(*arrays: Any) -> Any:
        out, lse = f(*arrays)
        return (torch.tanh(out) ** 2).sum() + torch.sin(lse).sum()

    return of


def leaves(arrays: list[Any]) -> list[Any]:
    return [x.detach().clone().requires_grad_() for x in arrays]


def moved(f: Any, xs: list[Any], us: list[Any]) -> Any:
    return jvp(f, tuple(xs), tuple(us))[1]


def each_moved(f: Any, xs: list[Any], us: list[Any]) -> Any:
    found = []
    for n, u in enumerate(us):
        with forward_ad.dual_level():
            results = f(*[forward_ad.make_dual(x, u) if m == n else x for m, x in enumerate(xs)])
            tangents = [forward_ad.unpack_dual(x).tangent for x in results]
            found += [torch.zeros_like(y) if x is None else x for x, y in zip(tangents, results)]
    return found


def twice(f: Any, xs: list[Any], us: list[Any]) -> Any:
    xs = leaves(xs)
    grads = torch.autograd.grad(loss(f)(*xs), xs, create_graph=True)
    return torch.autograd.grad(sum((x * u).sum() for x, u in zip(grads, us)), xs)


def each_twice(f: Any, xs: list[Any], us: list[Any]) -> Any:
    """By each array alone of the gradient of each alone: which of them are wanted differs."""
    found = []
    for n, u in enumerate(us):
        x = leaves([xs[n]])[0]
        (g,) = torch.autograd.grad(loss(f)(*xs[:n], x, *xs[n + 1 :]), x, create_graph=True)
        found += torch.autograd.grad((g * u).sum(), x)
    return found


def forward_over_reverse(f: Any, xs: list[Any], us: list[Any]) -> Any:
    return moved(grad(loss(f), tuple(range(len(xs)))), xs, us)


def reverse_over_forward(f: Any, xs: list[Any], us: list[Any]) -> Any:
    return grad(lambda *xs: moved(loss(f), [*xs], us), tuple(range(len(xs))))(*xs)


WAYS = [moved, each_moved, twice, each_twice, forward_over_reverse, reverse_over_forward]


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GIVEN)
def test_options(name: str, way: Any, device: str) -> None:
    xs = arrays_of(GIVEN[name])
    us = [numbers(*x.shape, seed=7) for x in xs]
    there = [[x.to(device) for x in arrays] for arrays in (xs, us)]
    same(way(ours(GIVEN[name], device), *there), way(theirs(name), xs, us))


@pytest.mark.slow
@pytest.mark.parametrize("way", [moved, forward_over_reverse, reverse_over_forward])
@pytest.mark.parametrize("name", GIVEN)
def test_options_compiled(name: str, way: Any) -> None:
    torch._dynamo.reset()
    xs = arrays_of(GIVEN[name])
    us = [numbers(*x.shape, seed=7) for x in xs]
    f = ours(GIVEN[name])
    call = torch.compile(lambda *xs: way(f, [*xs], us), backend="aot_eager")
    same(call(*xs), way(theirs(name), xs, us))


CHECKED: dict[str, Options] = {
    "a": {"causal": True, "softcap": 1.5, "bias": True, "sinks": True},
    "b": {"dropout": 0.25, "seed": 3, "alibi_slopes": True, "window": (1, 1)},
}


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name: str) -> None:
    """PyTorch's own: against differences, in both modes, twice in reverse, and forward over reverse."""
    shapes = {"bias": (2, 3, 3), "sinks": (2,), "alibi_slopes": (2,)}
    given = [x for x in CHECKED[name] if x in shapes]
    arrays = leaves(
        [numbers(1, 3, 2, 2), numbers(1, 3, 1, 2), numbers(1, 3, 1, 1), *(numbers(*shapes[x]) for x in given)]
    )

    def f(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return attention(q, k, v, return_lse=True, **CHECKED[name] | dict(zip(given, more)))

    assert gradcheck(f, arrays, check_forward_ad=True, check_batched_grad="dropout" not in CHECKED[name])
    assert gradgradcheck(f, arrays, check_fwd_over_rev=True, check_rev_over_rev=True)


# ---- what runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that run from now on, each with the tangents that it takes."""
    found: list[str] = []
    run = corridor.run

    def seen(call: Call) -> Any:
        names = [x for x in call.arrays if x.startswith("t") and x not in ("tout", "tlse")]
        found.append(" ".join([call.of.name, *sorted(names)]))
        return run(call)

    monkeypatch.setattr(corridor, "run", seen)
    return found


Q, K, V = (numbers(2, QUERIES, 4, 8, seed=n) for n in range(3))


def of_q(q: Any) -> Any:
    return attention(q, K, V).square().sum()


def mean_flow(weights: list[Any], *, through: bool, transform: bool) -> Any:
    """A step of it: u and its tangent along time, of which the target is made."""

    def net(x: Any, t: Any) -> Any:
        q, k, v = (torch.tanh(y * w + t) for y, w in zip((Q, K, V), weights))
        return attention(q, k, v) * x

    one = torch.ones((), dtype=torch.float64)
    if transform:
        u, du = jvp(net, (one, one), (0.3 * one, one))
    else:
        with forward_ad.dual_level():
            u, du = forward_ad.unpack_dual(
                net(forward_ad.make_dual(one, 0.3 * one), forward_ad.make_dual(one.clone(), one))
            )
    return (u - 0.5 * (du if through else du.detach())).square().sum()


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("through", [False, True])
def test_a_step_of_mean_flow(through: bool, transform: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = leaves([numbers(8, seed=n) for n in range(3)])
    found = torch.autograd.grad(mean_flow(weights, through=through, transform=transform), weights)
    more = ["backward", "backward_jvp tk tq tv"] if through else []
    assert sorted(ran) == sorted(["forward", "jvp tk tq tv", "backward", *more])
    with monkeypatch.context() as m:
        m.setitem(globals(), "attention", standard)
        expected = torch.autograd.grad(mean_flow(weights, through=through, transform=transform), weights)
    same(found, expected)


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_of_mean_flow_compiled(backend: str, transform: bool, ran: list[str]) -> None:
    """With backward() outside of what is compiled, in one graph."""
    torch._dynamo.reset()
    weights = leaves([numbers(8, seed=n) for n in range(3)])
    step = torch.compile(
        functools.partial(mean_flow, through=True, transform=transform), backend=backend, fullgraph=True
    )
    found = torch.autograd.grad(step(weights), weights)
    assert sorted(ran) == ["backward", "backward", "backward_jvp tk tq tv", "forward", "jvp tk tq tv"]
    same(found, torch.autograd.grad(step(weights), weights))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_trained_forces(checkpointed: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = leaves([numbers(8, seed=n) for n in range(3)])

    def trained() -> Any:
        x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        inputs = [y * w + torch.sin(x) for y, w in zip((Q, K, V), weights)]
        out = checkpoint(attention, *inputs, use_reentrant=False) if checkpointed else attention(*inputs)
        (force,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad((force + 1) ** 2, weights)

    found = trained()
    once = ["forward", "backward", "jvp tk tq tv", "backward_jvp tk tq tv", "backward"]
    assert [x for x in ran if x != "forward"] == once[1:] and ran.count("forward") == (3 if checkpointed else 1)
    monkeypatch.setitem(globals(), "attention", standard)
    same(found, trained())


def test_what_has_no_tangent_costs_nothing(ran: list[str]) -> None:
    jvp(lambda q: attention(q, K, V), (Q,), (K,))
    assert ran == ["forward", "jvp tq"]
    del ran[:]
    q = Q.clone().requires_grad_()
    (g,) = torch.autograd.grad(attention(q, K, V).square().sum(), q, create_graph=True)
    torch.autograd.grad(g.sum(), q)
    assert ran == ["forward", "backward", "jvp tq", "backward_jvp tq", "backward"]
    del ran[:]
    jvp(grad(of_q), (Q,), (K,))
    assert sorted(ran) == ["backward", "backward_jvp tdout tq", "forward", "jvp tq"]


@pytest.mark.parametrize("again", [False, True])
def test_gradients_without_memory(again: bool, ran: list[str]) -> None:
    """PyTorch's ZeroTensor, as that of out, of both, and of the gradient."""
    q, zero = Q.clone().requires_grad_(), torch._efficientzerotensor(Q.shape, dtype=Q.dtype)
    out, lse = attention(q, K, V, return_lse=True)
    (found,) = torch.autograd.grad([out, lse], q, [zero, lse.detach()], create_graph=again, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(lse, q, lse.detach(), retain_graph=True)[0])
    del ran[:]
    assert torch.autograd.grad(out, q, zero, retain_graph=True, allow_unused=True)[0] is None
    if again:
        assert torch.autograd.grad(found, q, zero, allow_unused=True)[0] is None
    assert not ran


def test_a_function_of_ones_own() -> None:
    """Its forward calls attention, its jvp and its backward the plain functions; the latter is differentiated again."""

    class Ours(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any) -> Any:
            out, lse = attention(q, K, V, return_lse=True)
            ctx.save_for_backward(q, out, lse)
            ctx.save_for_forward(q, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            q, out, lse = ctx.saved_tensors
            return cupyflash.attention_backward(dout, q, K, V, out, lse)[0]

        @staticmethod
        def jvp(ctx: Any, tangent: Any) -> Any:
            q, out, lse = ctx.saved_tensors
            return cupyflash.attention_jvp({"q": tangent}, q, K, V, out, lse)[0]

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(Ours.apply(forward_ad.make_dual(Q, K))).tangent
    torch.testing.assert_close(found, jvp(lambda q: standard(q, K, V), (Q,), (K,))[1])
    own, by_standard = (twice(lambda q, f=f: (f(q), q), [Q], [V]) for f in (Ours.apply, lambda q: standard(q, K, V)))
    same(own, by_standard)


def test_merged_parts() -> None:
    """Their derivatives are those of the whole."""

    def f(q: Any, k: Any, v: Any) -> Any:
        parts = [attention(q, k[:, x], v[:, x], return_lse=True) for x in (slice(0, 3), slice(3, None))]
        return cupyflash.merge(*zip(*parts))

    us = [K, V, Q]
    for way in (moved, twice, forward_over_reverse, reverse_over_forward):
        same(way(f, [Q, K, V], us), way(functools.partial(standard, return_lse=True), [Q, K, V], us))


def test_dtypes() -> None:
    """Tangents have those of what they are tangents of, under autocast too."""
    q, k, v = (x.float() for x in (Q, K, V))
    low = [x.bfloat16() for x in (q, k, v)]
    tangents = [x.cos() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found = jvp(functools.partial(attention, return_lse=True), (q, k, v), tuple(tangents))
    expected = jvp(functools.partial(attention, return_lse=True), tuple(low), tuple(x.bfloat16() for x in tangents))
    for xs, ys in zip(found, expected):
        assert [x.dtype for x in xs] == [torch.bfloat16, torch.float32]
        torch.testing.assert_close(xs, ys, rtol=0, atol=0)


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "bias", "bias of keys", "alibi_slopes", "score", "heads first"])
def test_vmap(name: str) -> None:
    """Of tangents alone, and of all arrays: each entry as by itself."""
    xs = arrays_of(GIVEN[name])
    us = [numbers(3, *x.shape, seed=7) for x in xs]
    stacked = [torch.stack([x, x.sin(), x.cos()]) for x in xs]
    f = ours(GIVEN[name])
    for way in (moved, forward_over_reverse, reverse_over_forward):
        alone = vmap(lambda *us, way=way: way(f, xs, [*us]))(*us)
        same(alone, map(torch.stack, zip(*[way(f, xs, [u[n] for u in us]) for n in range(3)])))
        every = vmap(lambda xs, us, way=way: way(f, xs, us))(stacked, us)
        same(every, map(torch.stack, zip(*[way(f, [x[m] for x in stacked], [u[m] for u in us]) for m in range(3)])))


def test_sinks_under_vmap() -> None:
    """Theirs have no batch that the axis could be a part of; along others there is no harm in them."""
    xs, us = arrays_of(GIVEN["sinks"]), [numbers(3, 2, QUERIES, 4, 8)]
    f = ours(GIVEN["sinks"])
    found = vmap(lambda u: jvp(lambda q: f(q, *xs[1:]), (xs[0],), (u,))[1])(*us)
    same(found, map(torch.stack, zip(*[jvp(lambda q: f(q, *xs[1:]), (xs[0],), (u,))[1] for u in us[0]])))
    for call in (
        lambda: vmap(lambda u: jvp(lambda s: f(*xs[:3], s), (xs[3],), (u,))[1])(numbers(3, 4)),
        lambda: torch.func.hessian(lambda s: loss(f)(*xs[:3], s))(xs[3]),
    ):
        with pytest.raises(NotImplementedError, match="^sinks, their tangents or their gradients have an axis of vmap"):
            call()


@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_with_sinks_under_vmap_again(mapped: bool) -> None:
    """Of what a vmap has made of a gradient: by q, and by the sinks, which are in lse already."""
    f, expected = ours(GIVEN["sinks"]), theirs("sinks")
    q, k, v, sinks = arrays_of(GIVEN["sinks"])
    some, sinks = torch.tensor([1.0, 0.5], dtype=torch.float64), torch.stack([sinks, -sinks]) if mapped else sinks

    def of(f: Any) -> Any:
        first = grad(lambda a, s: loss(f)(a * q, k, v, s), argnums=(0, 1))
        return grad(lambda a, s: sum(x.sin().sum() for x in vmap(first, (0, 0 if mapped else None))(a, s)), (0, 1))

    same(of(f)(some, sinks), of(expected)(some, sinks))


def test_batched_gradients_with_sinks_again() -> None:
    def of(f: Any) -> Any:
        xs = leaves(arrays_of(GIVEN["sinks"]))
        out = f(*xs)[0]
        found = torch.autograd.grad(out, xs, torch.stack([out, out.sin()]), is_grads_batched=True, create_graph=True)
        return torch.autograd.grad(sum(x.sin().sum() for x in found), xs)

    same(of(ours(GIVEN["sinks"])), of(theirs("sinks")))


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
def test_a_number_in_a_tensor_has_no_derivative(name: str) -> None:
    """Refused by name; as a constant it is taken, also one that is made inside of a transform."""
    x, number, of_number = numbers(1, 2, 2, 3), numbers(1)[0].abs() / 9, torch.ones((), dtype=torch.float64)
    f = lambda x, number: attention(x, x, x, **{name: number}, seed=1).sum()

    def dual(number: Any) -> Any:
        with forward_ad.dual_level():
            return f(x, forward_ad.make_dual(number, of_number))

    for way in (
        dual,
        lambda number: jvp(lambda n: f(x, n), (number,), (of_number,)),
        lambda number: jvp(lambda n: grad(f)(x, n), (number,), (of_number,)),
        lambda number: grad(lambda n: jvp(lambda x: f(x, n), (x,), (x,))[1])(number),
        lambda number: vmap(lambda n: f(x, n))(number[None]),
    ):
        with pytest.raises(TypeError, match=f"(?s)^{name} is .*; it must be a real number or None"):
            way(number)
    for make in (lambda: number, lambda: number * 1):
        same(*(jvp(grad(lambda x, n=n: f(x, n())), (x,), (x,)) for n in (make, lambda: float(number))))
