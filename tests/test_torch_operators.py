"""The operators that PyTorch compiles, exports, transforms and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import SCORES, judge, references
from semantics import draw_inputs

import cupyflash
from cupyflash import folding, interop
from cupyflash.cpu import corridor
from cupyflash.problem import ARRAYS, OPTIONS
from cupyflash.score import tanh, where

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cupyflash.call import Call
from cupyflash.interop import torch_, torch_ops, torch_schema
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, Pass
from cupyflash.torch import attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONAL = [row.name for row in ARRAYS if not (row.of_float8 or row.ragged or row.placed)]


def scored(s: Any, b: Any, h: Any, i: Any, j: Any, a: Any, ids: Any) -> Any:
    return where(j <= i + 3, 2 * tanh(s / 2) + a[h, ids[j]] * (1 + 0.1 * b), -math.inf)


GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True, "deterministic": True},
    "window": {"causal": "top_left", "window": (3, None), "scale": 0.3},
    "heads first": {"layout": "bhsd", "window": (2, 1)},
    **{name: {name: True} for name in OPTIONAL},
    "dropout": {"dropout": 0.3, "seed": True},
    "everything": {"softcap": 1.5, "causal": True, "dropout": 0.25, **dict.fromkeys(OPTIONAL, True)},
    "score": {"score": "s + a[h, ids[j]] * (1 + 0.1f * b)"},
    "score, a function": {"score": scored},
    "block_mask": {"block_mask": (1, 1)},
    "block_mask of each head": {"block_mask": (2, 4), "layout": "bhsd"},
    "score and all else": {
        "score": scored,
        "block_mask": (2, 1),
        "causal": True,
        "dropout": 0.25,
        **dict.fromkeys(OPTIONAL, True),
    },
}


def drawn(
    given: dict[str, Any], device: str = "cpu", dtype: Any = None, grad: bool = True
) -> tuple[list[Any], dict[str, Any]]:
    """q, k, v and the options of an entry of GIVEN, float64 unless said."""
    dtype = torch.float64 if dtype is None else dtype
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    shapes = {"key_mask": (2, 7), "mask": (4, 5, 7), "bias": (4, 5, 7), "alibi_slopes": (2, 4), "sinks": (4,)}
    options = dict(given)
    if "seed" in given:
        options["seed"] = torch.tensor([11], device=device)
    for row in [row for row in ARRAYS if row.name in OPTIONAL]:
        if row.name in given and row.name != "seed":
            x = numbers(*shapes[row.name])
            options[row.name] = x > -0.5 if row.dtypes == ("bool",) else x.requires_grad_(grad)
    if "score" in given:
        options["score_arrays"] = {"a": numbers(4, 3).requires_grad_(grad), "ids": torch.arange(7, device=device) % 3}
    if "block_mask" in given:
        options["block_mask"] = cupyflash.block_mask(
            numbers(*given["block_mask"], 5, 7) > -0.5, block=16, like=a_tensor(device)
        )
    tensors = [numbers(2, 5, 4, 8), numbers(2, 7, 2, 8), numbers(2, 7, 2, 6)]
    if given.get("layout") == "bhsd":
        tensors = [x.transpose(1, 2) for x in tensors]
    return [x.detach().requires_grad_(grad) for x in tensors], options


def a_tensor(device: str) -> Any:
    return torch.empty(1, device=device)


def leaves(tensors: list[Any], options: dict[str, Any]) -> list[Any]:
    every = [*options.values(), *options.get("score_arrays", {}).values()]
    return [*tensors, *(x for x in every if isinstance(x, torch.Tensor) and x.requires_grad)]


def loss(tensors: list[Any], options: dict[str, Any]) -> Any:
    out, lse = attention(*tensors, return_lse=True, **options)
    return out.square().sum() + lse.clamp(min=-10).sin().sum()


def same(actual: Any, expected: Any, **tolerance: float) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def as_arguments(tensors: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Of the operator: what `attention` hands to it."""
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.cupyflash.attention.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), See():
        attention(*tensors, **options)
    return seen[0]


# ---- the operators themselves ---------------------------------------------------------------------------------------


def test_the_schema_has_every_option_and_array() -> None:
    """In the order of the tables, by which arguments are told apart."""
    optional, options = ([row.name for row in table] for table in (ARRAYS, OPTIONS))
    options = ["place" if x == "at" else x for x in options]  # which is an array's name
    names = [x.name for x in torch.ops.cupyflash.attention.default._schema.arguments]
    assert names == ["q", "k", "v", *optional, "score_arrays", "blocks", *options, "family", "check"]
    backward = [x.name for x in torch.ops.cupyflash.attention_backward.default._schema.arguments]
    assert backward == ["dout", "out", "lse", "dlse", *names, "wrt"]
    moving = [f"t{row.name}" for row in ARRAYS if row.gradient]
    for of in (JVP, BACKWARD_JVP):
        own = [row.name for row in of.rows if not row.result and row.name not in names]
        own = [*["dout"] * of.of_gradients, *(x for x in own if x != "dout")]
        expected = [*own, *moving, *names]
        expected.insert(expected.index("blocks") + 1, "tscore_arrays")
        found = [x.name for x in torch_schema.operator(of)._schema.arguments]
        assert found == [*expected, "wrt"] if of.of_gradients else found == expected


def checked(name: str) -> Any:
    """Second derivatives take as long as the first, and have nothing of each option alone."""
    return pytest.param(name, (JVP, BACKWARD_JVP), marks=() if "every" in name or "all" in name else pytest.mark.slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, passes", [*((x, (FORWARD, BACKWARD)) for x in GIVEN), *map(checked, GIVEN)])
def test_opcheck(name: str, passes: tuple[Pass, ...], device: str) -> None:
    """PyTorch's own checks: schema, derivative, fake kernel, and what is traced against what runs at once."""
    tensors, options = drawn(GIVEN[name], device)
    arguments = as_arguments(tensors, options)
    if FORWARD in passes:
        torch.library.opcheck(torch.ops.cupyflash.attention.default, arguments)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    given = torch_schema.Arguments(FORWARD, arguments)
    out, lse = torch.ops.cupyflash.attention(*arguments)
    wrt = [row.name for row in ARRAYS if row.gradient and row.name in options]
    wrt += ["score_arrays['a']"] if "score" in options else []
    arrays = given.arrays | {"out": out, "lse": lse, "dout": torch.randn_like(out), "dlse": torch.randn_like(lse)}
    arrays |= {f"t{x}": torch.randn_like(arrays[x]) for x in ("q", "k", "v", *wrt)}
    arrays |= zip(("tout", "tlse"), given.run(JVP, arrays))
    for of in passes:
        if of is not FORWARD:
            torch.library.opcheck(torch_schema.operator(of), given.others(of, arrays, wrt))


# ---- compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_compiled_in_one_graph(name: str, dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    tensors, options = drawn(GIVEN[name], device)
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    of = leaves(tensors, options)
    same(torch.autograd.grad(compiled(tensors, options), of), torch.autograd.grad(loss(tensors, options), of))
    with torch.no_grad():
        same([compiled(tensors, options)], [loss(tensors, options)])


@pytest.mark.parametrize("entry", [attention, cupyflash.attention], ids=["torch", "package"])
def test_lengths_and_scales_are_symbols(entry: Any) -> None:
    """A length or a scale that changes compiles nothing anew."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, scale: entry(q, k, k, scale=scale / q.shape[1], causal=True),
        fullgraph=True, dynamic=True, backend="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    for n, scale in ((5, 0.5), (6, 0.25), (9, 1.5), (12, 0.75)):
        q, k = torch.randn(2, n, 4, 8), torch.randn(2, n + 4, 2, 8)
        with torch._dynamo.config.patch(error_on_recompile=n > 6):
            same([compiled(q, k, scale)], [attention(q, k, k, scale=scale / n, causal=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["everything", "score and all else"])
def test_compiled_by_inductor(name: str) -> None:
    torch._dynamo.reset()
    tensors, options = drawn(GIVEN[name])
    of = leaves(tensors, options)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(tensors, options), of)
    same(found, torch.autograd.grad(loss(tensors, options), of))


def test_attention_backward_compiles() -> None:
    torch._dynamo.reset()
    (q, k, v), options = drawn(GIVEN["everything"], grad=False)
    out, lse = attention(q, k, v, return_lse=True, **options)

    def gradients(dout: Any) -> Any:
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=("bias", "sinks"), **options)
        return *grads, grads.dbias, grads.dsinks

    same(torch.compile(gradients, fullgraph=True, backend="aot_eager")(out), gradients(out))


class Model(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    tensors, _ = drawn({}, grad=False)
    length, keys = torch.export.Dim("length", min=2, max=64), torch.export.Dim("keys", min=2, max=64)
    shapes = ({1: length}, {1: keys}, {1: keys})
    program = torch.export.export(Model(), tuple(tensors), dynamic_shapes=shapes, strict=strict)
    assert any(node.target is torch.ops.cupyflash.attention.default for node in program.graph.nodes)
    other = [torch.randn(2, 11, 4, 8), torch.randn(2, 13, 2, 8), torch.randn(2, 13, 2, 6)]
    for given in (tensors, other):
        same([program.module()(*given)], [attention(*given, causal=True)])


def exported_layer(device: str, masked: bool = False) -> tuple[Any, Any, list[Any]]:
    """A layer, its exported program, and inputs: of two lengths unless it has a score function and a block mask."""
    torch.manual_seed(0)
    project = torch.nn.Linear(32, 96, device=device)
    options: dict[str, Any] = {"softcap": 3.0, "window": (7, None)}
    if masked:
        table = torch.randn(4, 3, device=device)
        mask = cupyflash.block_mask(torch.randn(16, 16, device=device) > 0, block=16, like=table)
        options = {
            "score": scored,
            "score_arrays": {"a": table, "ids": torch.arange(16, device=device) % 3},
            "block_mask": mask,
        }

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = project

        def forward(self, x: Any) -> Any:
            q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
            return attention(q, k, v, causal=True, **options).flatten(-2)

    inputs = [torch.randn(2, n, 32, device=device) for n in (16, 16 if masked else 33)]
    with torch.no_grad():
        length = None if masked else torch.export.Dim("length", min=2, max=64)
        return Layer(), torch.export.export(Layer(), (inputs[0],), dynamic_shapes=({1: length},), strict=False), inputs


@pytest.mark.parametrize("masked", [False, True])
def test_a_program_from_a_file(masked: bool, tmp_path: Path) -> None:
    layer, program, inputs = exported_layer("cpu", masked)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for x in inputs:
        same([loaded(x)], [layer(x)])


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_ahead_of_time(masked: bool, tmp_path: Path) -> None:
    """By AOTInductor, into a library that calls the operator. (On a GPU PyTorch 2.11 needs minutes to link one,
    whatever it calls.)"""
    layer, program, inputs = exported_layer("cpu", masked)
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for x in inputs:
            same([loaded(x)], [layer(x)])


@pytest.mark.gpu
def test_cuda_graphs_of_a_compiler() -> None:
    torch._dynamo.reset()
    x = torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: attention(x, x, x, causal=True), mode="reduce-overhead", fullgraph=True)
    expected = torch.autograd.grad(attention(x, x, x, causal=True).float().square().sum(), x)
    for _ in range(4):
        same(torch.autograd.grad(compiled(x).float().square().sum(), x), expected, rtol=0.05, atol=0.05)


def test_fake_tensors() -> None:
    """Shapes and dtypes come of shapes and dtypes; what is wrong is said before anything runs."""
    with FakeTensorMode():
        q, k = torch.ones(2, 5, 4, 8, dtype=torch.float16), torch.ones(2, 7, 2, 8, dtype=torch.float16)
        out, lse = attention(q, k, k, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, torch.float16, (2, 4, 5), torch.float32)
        grads = cupyflash.attention_backward(out, q, k, k, out, lse)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
        with pytest.raises(ValueError, match="^k has batch 1"):
            attention(q, k[:1], k)
        with pytest.raises(ValueError, match=r"^out is given but the call is traced or transformed \(torch.compile"):
            attention(q, k, k, out=q)
        with pytest.raises(ValueError, match="^grads is given but the call is traced or transformed"):
            cupyflash.attention_backward(out, q, k, k, out, lse, grads=(q, k, k))
        with pytest.raises(TypeError, match="^bias is a ndarray|^bias is a numpy array but q is a torch array"):
            attention(q, k, k, bias=np.ones((5, 7), np.float32))


def test_fake_tensors_among_others_are_named() -> None:
    """A kernel would read them at address 0."""
    x = torch.ones(2, 5, 4, 8)
    fake = FakeTensorMode().from_tensor(x)
    lse, rows = fake[..., 0].transpose(1, 2), x[..., 0].transpose(1, 2)
    for name in ("k", "v", "key_mask", "bias", "out"):
        bad = {"key_mask": fake[:, :, 0, 0] > 0, "bias": lse[..., None]}.get(name, fake)
        with pytest.raises(TypeError, match=f"^{name} is a FakeTensor, which has no memory, but q is none"):
            attention(**{"q": x, "k": x, "v": x, name: bad})
    for name in ("k", "v", "bias"):
        good = {"bias": rows[..., None]}.get(name, x)
        with pytest.raises(TypeError, match=f"^{name} is a Tensor with memory, but q is a FakeTensor"):
            attention(**{"q": fake, "k": fake, "v": fake, name: good})
    for name in ("k", "dout", "out", "lse"):
        given = dict.fromkeys(("q", "k", "v", "dout", "out"), fake) | {"lse": lse}
        with pytest.raises(TypeError, match=f"^{name} is a Tensor with memory, but q is a FakeTensor"):
            cupyflash.attention_backward(**{**given, name: rows if name == "lse" else x})
    with pytest.raises(TypeError, match="^grads: dk is a FakeTensor, which has no memory, but q is none"):
        cupyflash.attention_backward(x, x, x, x, x, rows.contiguous(), grads=(x.clone(), fake, x.clone()))
    assert attention(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x), x, x).shape == x.shape


def test_the_corridor_finds_those_without_memory() -> None:
    """What is seen where an operator's own implementation is given one."""
    on_gpu = pytest.importorskip("cupyflash.gpu.corridor", exc_type=ImportError)
    x = torch.ones(2, 5, 4, 8)
    assert on_gpu.addresses_of(torch_, {"q": x, "k": x[:0]}) == [x.data_ptr(), 0]  # nothing is read there
    with pytest.raises(TypeError, match="a FakeTensor has no memory"):
        on_gpu.addresses_of(torch_, {"q": x, "k": FakeTensorMode().from_tensor(x)})


def test_what_the_operators_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option or array of the tables that no schema names is refused by name where a call is traced, and nowhere
    else."""
    q = torch.randn(2, 5, 4, 8)
    row = dataclasses.replace(OPTIONS[0], name="other", default=None)
    monkeypatch.setattr(torch_schema, "OPTIONS", (*OPTIONS, row))
    options: dict[str, Any] = {row.name: row.default for row in OPTIONS}
    lib = interop.library("q", q)
    arrays = {"q": q, "k": q, "v": q}
    for more, given in (({}, {"other": True}), ({"more": q}, {"other": None})):
        with (
            FakeTensorMode(),
            pytest.raises(NotImplementedError, match="^(other|more) is given, but a call that is traced"),
        ):
            torch_ops.run(Call(lib, FORWARD, arrays | more, options | given))
    with pytest.raises(NotImplementedError, match="^more is given, but vmap cannot make it a part of the batch"):
        folding.forward(torch, lambda arrays: arrays, arrays | {"more": q}, {"q"}, 2, options)


def test_what_is_wrong_is_said_by_compilers() -> None:
    torch._dynamo.reset()
    q, k = torch.ones(2, 5, 4, 8), torch.ones(2, 7, 2, 4)
    with pytest.raises(Exception, match="k has head dimension 4"):
        torch.compile(lambda q, k: attention(q, k, k), fullgraph=True, backend="eager")(q, k)


# ---- activation checkpointing, autocast -----------------------------------------------------------------------------


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is computed again in the backward, unless a policy keeps its results by the operator's name."""
    calls = []
    run = corridor.run
    monkeypatch.setattr(corridor, "run", lambda call: (call.of is FORWARD and calls.append(1), run(call))[1])
    (q, k, v), _ = drawn({})

    def block(q: Any) -> Any:
        return attention(2 * q, k, v, causal=True).square()

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> Any:
        ours = op is torch.ops.cupyflash.attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    expected = torch.autograd.grad(block(q).sum(), (q, k, v))
    del calls[:]
    more = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)} if selective else {}
    found = torch.autograd.grad(checkpoint(block, q, use_reentrant=False, **more).sum(), (q, k, v))
    same(found, expected)
    assert len(calls) == (1 if selective else 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["at once", "compiled"])
def test_autocast(how: str, device: str) -> None:
    """q, k and v are cast as for PyTorch's own attention, and gradients come back in their dtypes; float64 is left
    alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, 8, device=device, requires_grad=True) for _ in range(3))
    bias, sinks = torch.randn(5, 5, device=device), torch.randn(4, device=device, dtype=torch.float16)
    function = torch.compile(attention, backend="aot_eager") if how == "compiled" else attention
    with torch.autocast(device, torch.bfloat16):
        out = function(q, k.half(), v, bias=bias, sinks=sinks)
        with torch.no_grad():
            assert attention(q, k, v).dtype is torch.bfloat16
        assert attention(*(x.double() for x in (q, k, v))).dtype is torch.float64
    assert out.dtype is torch.bfloat16
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k.half(), v)]
    expected = attention(*low, bias=bias, sinks=sinks.bfloat16())
    same([out], [expected], rtol=0, atol=0)
    found = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(x.dtype is torch.float32 for x in found)
    same(found, [x.float() for x in torch.autograd.grad(expected.float().sum(), low)], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_compiled_is_as_good(dtype: str, rng: np.random.Generator) -> None:
    """Judged against float64, as what runs at once is."""
    torch._dynamo.reset()
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=SCORES, full="hqk", dlse=1.0)

    def put(x: np.ndarray, grad: bool = False) -> Any:
        y = torch.from_numpy(x.astype(np.float32) if x.dtype.name == "bfloat16" else x.copy())
        return (y.bfloat16() if x.dtype.name == "bfloat16" else y).requires_grad_(grad)

    q, k, v = (put(x, True) for x in inputs[:3])
    given = {name: put(x, name != "mask") for name, x in inputs.given.items()}
    compiled = torch.compile(
        lambda q, k, v, given: attention(q, k, v, softcap=2.0, causal=True, return_lse=True, **given),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    out, lse = compiled(q, k, v, given)
    torch.autograd.backward((out, lse), (put(inputs.dout), put(inputs.dlse)))
    results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    results |= {f"d{name}": x.grad for name, x in given.items() if x.requires_grad}
    assert len(results) == 8

    def get(x: Any) -> np.ndarray:
        x = x.detach()
        return x.float().numpy().astype(inputs.q.dtype) if x.dtype is torch.bfloat16 else x.numpy()

    judge({name: get(x) for name, x in results.items()}, *references(inputs, softcap=2.0, causal=True))
