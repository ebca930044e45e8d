"""What several ranks have not is refused on all of them, by name; what `Rows.balanced` and `explain` take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import BlockMask, attention, block_mask, masks, parallel
from cupyflash.parallel import Machine, Rows, seen

EIGHT = Rows.contiguous(8, 2, multiple=1)


def all_raise(work: Callable[[Any], Any], error: type[Exception], text: str, size: int = 2) -> None:
    """On every rank, which another told it of or not; and none waits."""

    def run(group: Any) -> None:
        with pytest.raises(error, match=rf"^(rank \d of the group: )?{text}"):
            work(group)

    parallel.simulated(size).run(run)


def _grad(torch: Any, loss: Any, x: Any, w: Any) -> Any:
    return torch.autograd.grad(loss, x)


def _grad_of_weights(torch: Any, loss: Any, x: Any, w: Any) -> Any:
    return torch.autograd.grad(loss, w)


def _inputs(torch: Any, loss: Any, x: Any, w: Any) -> Any:
    loss.backward(inputs=[x])


def _backward(torch: Any, loss: Any, x: Any, w: Any) -> Any:
    loss.backward()


@pytest.mark.parametrize("how", [_grad, _grad_of_weights, _inputs, _backward])
@pytest.mark.parametrize("more", [False, True])
def test_no_second_derivative_is_left_out(how: Any, more: bool) -> None:
    """However it is asked for, of an input or of what came before, alone or beside the first."""
    torch = pytest.importorskip("torch")

    def work(group: Any) -> None:
        w = torch.randn(8, dtype=torch.float64, requires_grad=True)
        x = torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
        out = parallel.attention(x, x * w, x, group, rows=EIGHT)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        how(torch, g.square().sum() + (out.sum() if more else 0), x, w)

    all_raise(work, NotImplementedError, "a gradient of parallel.attention is differentiated")


@pytest.mark.parametrize("of", ["dout", "bias", "table"])
def test_nor_that_of_what_else_a_gradient_follows_from(of: str) -> None:
    torch = pytest.importorskip("torch")

    def work(group: Any) -> None:
        x = torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True)
        others = {"dout": torch.ones_like(x), "bias": torch.zeros(1, 2, 4, 8).double(), "table": torch.ones(2).double()}
        chosen = others[of].requires_grad_()
        out = parallel.attention(
            x, x, x, group, rows=EIGHT, bias=others["bias"], score=lambda s, b, h, i, j, t: s * t[h],
            score_arrays={"t": others["table"]},
        )  # fmt: skip
        (g,) = torch.autograd.grad(out, x, others["dout"], create_graph=True)
        torch.autograd.grad(g.sum(), chosen)

    all_raise(work, NotImplementedError, "a gradient of parallel.attention is differentiated")


def test_gradients_with_a_graph_are_those_without() -> None:
    torch = pytest.importorskip("torch")

    def work(group: Any) -> None:
        q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=x != "k") for x in "qkv")
        found = [
            torch.autograd.grad(parallel.attention(q, k, v, group, rows=EIGHT).square().sum(), (q, v), create_graph=x)
            for x in (False, True)
        ]
        for once, graph in zip(*found):
            assert torch.equal(once, graph) and graph.requires_grad and not once.requires_grad
            graph *= 2  # a tensor of its own, no view

    parallel.simulated(2).run(work)


def _functions(torch: Any, group: Any) -> dict[str, Callable[[Any], Any]]:
    """Each public function, of one of its arguments."""
    x = torch.ones(1, 4, 2, 8, dtype=torch.float64)
    lse = torch.zeros(1, 2, 4, dtype=torch.float64)
    how = {"group": group, "rows": EIGHT}
    return {
        "attention q": lambda y: parallel.attention(y, x, x, **how),
        "attention v": lambda y: parallel.attention(x, x, y, **how),
        "attention bias": lambda y: parallel.attention(x, x, x, bias=y[..., :1].sum((1, 2, 3)), **how),
        "attention score_arrays['t']": lambda y: parallel.attention(
            x, x, x, score=lambda s, b, h, i, j, t: s + t[0], score_arrays={"t": y[0, 0, 0]}, **how
        ),
        "attention_backward dout": lambda y: parallel.attention_backward(y, x, x, x, x, lse, **how).dq,
        "attention_backward k": lambda y: parallel.attention_backward(x, x, y, x, x, lse, **how).dq,
        "merge out": lambda y: parallel.merge(y, lse, group)[0],
        "merge lse": lambda y: parallel.merge(x, y[..., 0].mT, group)[0],
    }


FUNCTIONS = (
    "attention q", "attention v", "attention bias", "attention score_arrays['t']", "attention_backward dout",
    "attention_backward k", "merge out", "merge lse",
)  # fmt: skip


@pytest.mark.parametrize("which", FUNCTIONS)
def test_forward_mode_is_refused_on_all_ranks(which: str) -> None:
    """Where one rank alone asks for it, too: no tangent is left out, and no rank waits."""
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    x = torch.ones(1, 4, 2, 8, dtype=torch.float64)
    function, name = which.split()

    def work(group: Any) -> None:
        given = forward_ad.make_dual(x, x) if group.rank == 1 else x
        _functions(torch, group)[which](given)

    text = rf"{re.escape(name)} has a tangent of forward mode, but parallel\.{function} has .*; it must have none"
    with forward_ad.dual_level():
        all_raise(work, NotImplementedError, text)
        if function != "attention":  # what has no tangent is taken, and autograd's gradient beside it
            parallel.simulated(2).run(lambda group: _functions(torch, group)[which](x))


@pytest.mark.parametrize("which", FUNCTIONS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "jacrev"])
def test_transforms_of_torch_func_are_refused(which: str, transform: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 4, 2, 8, dtype=torch.float64)
    function, name = which.split()

    def work(group: Any) -> None:
        of = _functions(torch, group)[which]
        runs = {
            "grad": lambda: torch.func.grad(lambda y: of(y).sum())(x),
            "jvp": lambda: torch.func.jvp(of, (x,), (x,)),
            "vmap": lambda: torch.func.vmap(of)(x[None]),
            "jacrev": lambda: torch.func.jacrev(of)(x),
        }
        runs[transform]()

    called = "grad" if transform == "jacrev" else transform
    text = rf"{re.escape(name)} is given inside torch\.func\.{called}\b.*, but parallel\.{function} has .*; it must be "
    all_raise(work, NotImplementedError, text)
    parallel.simulated(2).run(lambda group: _functions(torch, group)[which](x))  # nothing is left of the transform


def test_what_a_transform_does_not_follow_is_refused_as_well() -> None:
    """Whatever is made at its level belongs to it, the room for results too."""
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 4, 2, 8)

    def work(group: Any) -> None:
        torch.func.vmap(lambda y: y + parallel.attention(x, x, x, group, rows=EIGHT).sum())(torch.ones(3))

    all_raise(work, NotImplementedError, "q is given inside torch.func.vmap, but parallel.attention has")


def test_gradients_in_batches_and_in_forward_mode_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    x = torch.ones(1, 4, 2, 8)

    def batched(group: Any) -> None:
        y = x.clone().requires_grad_()
        out = parallel.attention(y, y, y, group, rows=EIGHT)
        torch.autograd.grad(out, y, torch.stack([x, x]), is_grads_batched=True)

    all_raise(
        batched, NotImplementedError, "the gradient of out is mapped by autograd .*; it must be given one at a time"
    )

    def forward(group: Any) -> None:
        y = x.clone().requires_grad_()
        out = parallel.attention(y, y, y, group, rows=EIGHT)
        torch.autograd.grad(out, y, forward_ad.make_dual(x, x) if group.rank else x)

    with forward_ad.dual_level():
        all_raise(
            forward, NotImplementedError, "the gradient of out has a tangent of forward mode, but parallel.attent"
        )


def _alone(file: str) -> None:
    """The one rank of a group over gloo, whose collectives take tensors."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    x = torch.ones(1, 8, 2, 8, dtype=torch.float64)
    rows = Rows.contiguous(8, 1, multiple=1)
    for of, text in (
        (lambda y: parallel.attention(y, x, x, rows=rows), "q is given inside torch.func"),
        (lambda y: parallel.merge(y, x[..., 0].mT)[0], "out is given inside torch.func"),
    ):
        for run in (
            lambda of=of: torch.func.grad(lambda y: of(y).sum())(x),
            lambda of=of: torch.func.jvp(of, (x,), (x,)),
            lambda of=of: torch.func.vmap(of)(x[None]),
            lambda of=of: torch.func.vmap(torch.func.grad(lambda y: of(y).sum()))(x[None]),
        ):
            with pytest.raises(NotImplementedError, match=text):
                run()
    y = x.clone().requires_grad_()
    out = parallel.attention(y, y, y, rows=rows)
    (g,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
    with pytest.raises(NotImplementedError, match="a gradient of parallel.attention is differentiated"):
        torch.autograd.grad(out.sum() + g.square().sum(), y)
    torch.testing.assert_close(out, attention(x, x, x), check_device=False)
    distributed.destroy_process_group()


def test_over_gloo_transforms_are_refused(tmp_path: Any) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    from processes import together

    together("import sys, test_parallel_refusals as t; t._alone(sys.argv[1])", (tmp_path / "meeting",))


PATTERNS = {
    "causal": masks.causal(),
    "causal on another diagonal": masks.causal(7),
    "of heads and batch entries": lambda b, h, i, j: (j <= i) & ((i + j * (h + 1) + b) % 3 > 0),
    "documents": lambda b, h, i, j: (i // 37 == j // 37) & (j <= i),
    "all": lambda b, h, i, j: (i >= 0) & (j >= 0),
    "none": lambda b, h, i, j: (i < 0) & (j < 0),
}


def dense(pattern: Any, shape: tuple[int, int, int, int]) -> np.ndarray:
    axes = (np.arange(n).reshape(-1, *(1,) * (3 - axis)) for axis, n in enumerate(shape))
    return np.broadcast_to(pattern(*axes), shape).sum(axis=(0, 1, 3))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("block", [16, (32, 48), (16, 128)])
@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (1, 1, 150, 150), (2, 3, 101, 130), (1, 2, 7, 200)])
def test_a_block_mask_says_what_each_row_sees(
    name: str, block: Any, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen, "AT_ONCE", 512)  # so that several parts are counted
    mask, sees = block_mask(PATTERNS[name], shape=shape, block=block), dense(PATTERNS[name], shape)
    np.testing.assert_array_equal(seen.keys_of_rows(mask), sees)
    for size in (1, 2, 3):
        assert Rows.balanced(shape[2], size, mask, multiple=16) == Rows.balanced(shape[2], size, sees, multiple=16)


def test_what_a_block_has_behind_the_ends_does_not_count() -> None:
    made = block_mask(masks.causal(), shape=(40, 40), block=32)
    other = BlockMask(made.kind, made.block, made._slots, made._bits | np.uint16(0))
    other._bits[made._slots[0, 0, 1, 1], :, 0] |= np.uint16(0xFF00)  # keys 40 to 47
    other._bits[made._slots[0, 0, 1, 1], 8:] = 0xFFFF  # rows from 40 on
    np.testing.assert_array_equal(seen.keys_of_rows(other), np.arange(40) + 1)


def test_a_mask_of_tensors_and_of_no_rows() -> None:
    torch = pytest.importorskip("torch")
    mask = block_mask(masks.causal(), shape=(2, 1, 90, 90), block=16, like=torch.zeros(1))
    assert Rows.balanced(90, 3, mask, multiple=16) == Rows.balanced(90, 3, np.arange(90) + 1, multiple=16)
    assert Rows.balanced(0, 2, block_mask(masks.causal(), shape=(0, 16), block=16)).size == 2
    with pytest.raises(ValueError, match=r"mask is about shape \(90,\); it must be about 64 rows"):
        Rows.balanced(64, 2, mask)
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    theirs = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
    with pytest.raises(TypeError, match=r"mask is a torch\.nn\..*\.BlockMask; it must be a block mask, or hold how"):
        Rows.balanced(128, 2, theirs)


X = np.ones((1, 8, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EIGHT.take([1] * 8, 0), "x is a list; it must be an array"),
        (lambda: EIGHT.take(X, 0, axis=1.0), "axis is 1.0; it must be an integer"),  # type: ignore[arg-type]
        (lambda: EIGHT.take(X, 0, axis=True), "axis is True; it must be an integer"),
        (lambda: EIGHT.take(X, 0, axis=None), "axis is None; it must be an integer"),  # type: ignore[arg-type]
        (lambda: EIGHT.join([1, 2]), "parts[0] is a int; it must be an array"),
        (lambda: EIGHT.join([X[:, :4], None]), "parts[1] is a NoneType; it must be an array"),
        (lambda: EIGHT.join(3), "parts is a int; it must hold an array for each of 2 ranks"),  # type: ignore[arg-type]
        (lambda: EIGHT.join([X, X], axis="1"), "axis is '1'; it must be an integer"),  # type: ignore[arg-type]
        (
            lambda: parallel.explain((1, 8, 2, 4), rows=EIGHT, machine=3),  # type: ignore[arg-type]
            "machine is a int; it must be a parallel.Machine or None",
        ),
        (
            lambda: parallel.explain((1, 8, 2, 4), rows=EIGHT, machine=Machine),  # type: ignore[arg-type]
            "machine is a type; it must be a parallel.Machine or None",
        ),
        (lambda: Machine(between=0.0), "between is 0.0; it must be a number above 0"),
        (lambda: Machine(start=-1.0), "start is -1.0; it must be a number of at least 0"),
        (lambda: Machine(forward="fast"), "forward is 'fast'; it must be a number above 0"),  # type: ignore[arg-type]
        (lambda: Machine(host=2.5), "host is 2.5; it must be 1 or more, an integer"),  # type: ignore[arg-type]
    ],
)
def test_what_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        make()


def test_axes_of_any_integer_are_taken() -> None:
    parts = [EIGHT.take(X, r, axis=np.int64(-2)) for r in (0, 1)]
    np.testing.assert_array_equal(EIGHT.join(parts, axis=np.int32(1)), X)


def test_a_machine_of_ones_own() -> None:
    rows = Rows.zigzag(65536, 4)
    how = {"rows": rows, "heads_k": 8, "causal": True, "exchange": "keys"}
    usual = parallel.explain((1, 65536, 32, 128), **how)
    assert usual == parallel.explain((1, 65536, 32, 128), machine=parallel.Machine(), **how)
    slow = dataclasses.replace(parallel.Machine(), inside=1e9)
    assert parallel.explain((1, 65536, 32, 128), machine=slow, **how).ranks[0].exposed > usual.ranks[0].exposed
    assert parallel.explain((1, 65536, 32, 128), machine=parallel.Machine(start=0), **how).ranks[0].exposed >= 0
    free = parallel.Machine(inside=float("inf"), between=float("inf"))
    assert parallel.explain((1, 65536, 32, 128), machine=free, **how).ranks[0].exposed <= usual.ranks[0].exposed
