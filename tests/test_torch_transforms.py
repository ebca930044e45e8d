"""The operators of PyTorch under torch.func: gradients, Jacobians, vmap."""

from __future__ import annotations

from typing import Any

import pytest

from cupyflash.cpu import corridor

torch = pytest.importorskip("torch")


from test_torch_operators import DEVICES, GIVEN, drawn, leaves, loss, same

from cupyflash import attention_append
from cupyflash.torch import attention


def named(tensors: list[Any], options: dict[str, Any]) -> tuple[list[Any], Any]:
    """The arrays with gradients as a list, and the loss as a function of them."""
    names = [name for name, x in options.items() if isinstance(x, torch.Tensor) and x.requires_grad]
    arrays = [x.detach() for x in leaves(tensors, options)]
    rest = {name: x for name, x in options.items() if name not in names}

    def function(*x: Any) -> Any:
        more = {"score_arrays": rest["score_arrays"] | {"a": x[-1]}} if "score" in rest else {}
        return loss(list(x[:3]), rest | dict(zip(names, x[3:])) | more)

    return arrays, function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", GIVEN)
def test_functional_gradients(name: str, device: str) -> None:
    tensors, options = drawn(GIVEN[name], device)
    arrays, function = named(tensors, options)
    expected = torch.autograd.grad(loss(tensors, options), leaves(tensors, options))
    same(torch.func.grad(function, tuple(range(len(arrays))))(*arrays), expected)


def test_a_pullback_that_outlives_its_transform() -> None:
    tensors, options = drawn(GIVEN["everything"])
    arrays, function = named(tensors, options)
    expected = torch.autograd.grad(loss(tensors, options), leaves(tensors, options))
    value, pull = torch.func.vjp(function, *arrays)
    same(pull(torch.ones_like(value)), expected)


def test_a_tensor_that_outlives_its_transform() -> None:
    (q, k, v), _ = drawn({})
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x * 1), x.sum())[1])(q.detach())
    same(
        torch.autograd.grad(attention(kept[0], k, v).sum(), (k, v)),
        torch.autograd.grad(attention(q, k, v).sum(), (k, v)),
    )


def test_functional_jacobian() -> None:
    (q, k, v), _ = drawn({}, grad=False)
    expected = torch.autograd.functional.jacobian(lambda q: attention(q, k, v)[0, 0], q)
    same([torch.func.jacrev(lambda q: attention(q, k, v)[0, 0])(q)], [expected])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("which", ["everything", "queries", "keys", "not the arrays", "sinks alone", "masks alone"])
def test_vmap(which: str, rank: int, layout: str) -> None:
    """Of arrays mapped over their first or last axis, or not at all: results, and gradients, of which each entry has
    its own."""
    generator = torch.Generator().manual_seed(0)
    heads, n = (4, 2) if rank > 2 else (1, 1), 3

    def tensor(length: int, heads: int, dim: int) -> Any:
        x = torch.randn(n, 2, length, heads, dim, dtype=torch.float64, generator=generator)
        x = x.transpose(2, 3) if layout == "bhsd" else x
        x = x if rank == 4 else x[:, 0]
        return x if rank > 2 else x.squeeze(2 if layout == "bshd" else 1)

    def numbers(*axes: int) -> Any:  # of (batch, head, query, key), those that q has
        shape = [size for axis, size in enumerate((2, heads[0], 5, 7)) if axis in axes and axis >= 4 - rank]
        return torch.randn(n, *shape, dtype=torch.float64, generator=generator)

    arrays = [tensor(5, heads[0], 8), tensor(7, heads[1], 8), tensor(7, heads[1], 6)]
    arrays += [numbers(0, 1, 2, 3), numbers(1), numbers(0, 1), numbers(0, 3) > -0.5, numbers(2, 3) > -0.5]
    names = ("bias", "sinks", "alibi_slopes", "key_mask", "mask")
    dims = {
        "everything": (0,) * 8, "queries": (0, *(None,) * 7), "keys": (None, 0, 0, *(None,) * 5),
        "not the arrays": (0, 0, 0, *(None,) * 5), "sinks alone": (*(None,) * 4, 0, None, None, None),
        "masks alone": (*(None,) * 6, 0, 0),
    }[which]  # fmt: skip
    given = [x if dim == 0 else x[1] for x, dim in zip(arrays, dims)]

    def results(*x: Any) -> Any:
        return attention(*x[:3], **dict(zip(names, x[3:])), layout=layout, return_lse=True, softcap=3.0)

    def total(*x: Any) -> Any:
        out, lse = results(*x)
        return out.square().sum() + lse.clamp(min=-10).sin().sum()

    for function in (results, torch.func.grad(total, tuple(range(6)))):
        one = [function(*(x if dim is None else x[i] for x, dim in zip(given, dims))) for i in range(n)]
        expected = [torch.stack(x) for x in zip(*one)]
        same(torch.vmap(function, dims)(*given), expected)
        last = [x if dim is None else x.movedim(0, -1) for x, dim in zip(given, dims)]
        same(torch.vmap(function, tuple(None if dim is None else -1 for dim in dims))(*last), expected)


def test_vmap_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = corridor.run
    monkeypatch.setattr(corridor, "run", lambda call: (calls.append(call.arrays["q"].shape), run(call))[1])
    q, k = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 7, 2, 8)
    torch.vmap(torch.vmap(lambda q, k: attention(q, k, k)))(q, k)
    assert calls == [(6, 5, 4, 8)]


def test_vmap_inside_a_compiler() -> None:
    torch._dynamo.reset()
    q, k = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 7, 2, 8)
    function = torch.vmap(lambda q, k: attention(q, k, k, causal=True))
    same([torch.compile(function, fullgraph=True, backend="aot_eager")(q, k)], [function(q, k)])


@pytest.mark.parametrize("attends", [True, False])
def test_vmap_of_appending(attends: bool) -> None:
    """Lengths may be mapped, too; what all entries would write to one cache is refused by name."""
    q, k, v = torch.randn(3, 3, 2, 1, 4, 8).unbind()
    caches, filled = torch.randn(2, 3, 2, 6, 4, 8), torch.tensor([[1, 2], [3, 4], [0, 5]])

    def step(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, filled: Any) -> Any:
        out = attention_append(q if attends else None, k, v, k_cache, v_cache, filled)
        return k.sum() if out is None else out

    for dims in ((0,) * 6, (0, 0, 0, 0, 0, None), (0, None, None, 0, 0, 0)):
        given = [x if dim is not None else x[0] for x, dim in zip((q, k, v, *caches.clone(), filled), dims)]
        alone = [x.clone() for x in given]
        of_each = [[x if dim is None else x[n] for x, dim in zip(alone, dims)] for n in range(3)]
        want = torch.stack([step(*x) for x in of_each])
        same([torch.vmap(step, dims)(*given), *given[3:5]], [want, *alone[3:5]])
    for dims, name in (((None, 0, None, None, None, None), "k_new"), ((None,) * 5 + (0,), "seqlens_k")):
        given = [x if dim is not None else x[0].clone() for x, dim in zip((q, k, v, *caches, filled), dims)]
        with pytest.raises(
            ValueError, match=f"^{name} is mapped by vmap and k_cache is not, so that all entries would"
        ):
            torch.vmap(step, dims)(*given)
