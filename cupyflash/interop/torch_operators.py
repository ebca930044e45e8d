"""The operators torch.ops.cupyflash.attention and attention_backward: what PyTorch knows by a schema, with shapes, derivative
and vmap. For calls that are traced (torch.compile, torch.export, fake tensors, dispatch modes)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch, folding, interop
from .. import problem as rules
from ..call import Arrays, Call
from ..passes import BACKWARD, FORWARD, Pass
from ..problem import ARRAYS, OF_FLOAT8, OPTIONS, Gradients, View
from ..score import Score
from . import torch_data

_OPTIONAL = tuple(row.name for row in ARRAYS)
INPUTS = ("q", "k", "v", *_OPTIONAL)
_ROWS = ("dout", "out", "lse", "dlse")
_LISTS = ("score_arrays", "blocks")  # further inputs, lists of tensors: what a score function reads, and a block mask
_NONE: list[Any] = [None]  # one that is not given: an empty list AOTInductor hands on as None, which is refused
# The options that the operators have, in the order of OPTIONS, and their types in a schema; a Scalar may be a symbol.
_TYPES = {
    "causal": "str", "window": "SymInt[]?", "scale": "Scalar?", "softcap": "Scalar?", "score": "str?",
    "block_mask": "SymInt[]?", "dropout": "Scalar", "out_dtype": "str?", "out_scale": "Scalar", "layout": "str",
    "deterministic": "bool",
}  # fmt: skip

_PLACE = {name: n for n, name in enumerate(_TYPES)}

ONCE = (  # what a second derivative raises
    "the gradients of attention cannot be differentiated again: call backward() or torch.autograd.grad() "
    "without create_graph=True"
)
FORWARD_MODE = (  # what a tangent raises
    "q, k, v or an optional array has a tangent, but attention has no derivative in forward mode (jvp); take gradients "
    "in reverse mode: backward(), torch.autograd.grad, torch.func.grad or vjp"
)


def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call, by the operator."""
    return torch.ops.cupyflash.attention(*_arguments(call, INPUTS), call.family)


def attention_backward(call: Call) -> list[torch.Tensor]:
    """Its gradients, and those that `wrt` names behind them, by the operator."""
    return torch.ops.cupyflash.attention_backward(*_arguments(call, (*_ROWS, *INPUTS)), call.family, list(call.wrt))


def _check_fake(arrays: Arrays) -> None:
    """TypeError, naming the argument, for a tensor with memory beside a q without."""
    q = arrays["q"]
    if not isinstance(q, FakeTensor) or q.fake_mode.allow_non_fake_inputs:
        return
    for name, x in arrays.items():
        if isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name} is a {type(x).__name__} with memory, but q is a FakeTensor; all must be, or none")


def refuse_script() -> None:
    """NotImplementedError under torch.jit.trace, for which what is computed is a constant: it has no form for the operators."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace (or torch.onnx.export by way of it) follows the call, but attention has no form in TorchScript; use "
            "torch.compile or torch.export"
        )


_UNKNOWN = "but a call that is traced (torch.compile, torch.export, fake tensors) cannot take it"


def _arguments(call: Call, names: tuple[str, ...]) -> list[Any]:
    """A call as an operator takes it, but for its family: arrays, None for those that are not given, and options. Errors are
    those of the rules."""
    refuse_script()
    _check_fake(call.arrays)
    encoded = _encoded(call.options)
    keys = _keys(call.options["score"])
    arrays = _with_seed(call.arrays, call.seed)
    for name in arrays:
        if name not in names and name not in keys:
            raise NotImplementedError(f"{name} is given, {_UNKNOWN}")
    arrays = interop.adopted(call.lib, arrays)
    blocks, encoded["block_mask"] = torch_data.of_mask(call.options["block_mask"], arrays["q"])
    inputs, reads = [arrays.get(name) for name in names], [arrays[key] for key in keys]
    return [*inputs, reads or _NONE, blocks or _NONE, *encoded.values()]


def _with_seed(arrays: Arrays, seed: int | None) -> Arrays:
    """A seed that is a number as a tensor, which may be another in each run of what is traced."""
    if seed is None:
        return arrays
    signed = seed - 2**64 if seed >= 2**63 else seed
    return {**arrays, "seed": torch.full((1,), signed, dtype=torch.int64, device=arrays["q"].device)}


def _keys(score: Score | None) -> tuple[str, ...]:
    """What the arrays that it reads are called among those of a call."""
    return () if score is None else score.keys


def _encoded(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the schema has them, in the order of _TYPES; of a block mask nothing."""
    for row in OPTIONS:
        if row.name not in _TYPES and options.get(row.name, row.default) != row.default:
            raise NotImplementedError(f"{row.name} is given, {_UNKNOWN}")
    values: dict[str, Any] = dict.fromkeys(_TYPES)
    numbers = (float, int, type(None))  # as they are: one may be a symbol, and rules are for numbers
    for row in OPTIONS:
        if row.name in _TYPES and row.name not in ("score", "block_mask"):
            value = options.get(row.name, row.default)
            values[row.name] = value if type(value) in numbers else row.check(value)
    values["causal"] = values["causal"] or ""
    values["window"] = None if values["window"] is None else [-1 if n is None else n for n in values["window"]]
    values["score"] = None if options["score"] is None else options["score"].data
    return values


def _decoded(values: Iterable[Any], reads: Sequence[torch.Tensor], blocks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Options; a block mask as it is stated."""
    options = rules.complete(dict(zip(_TYPES, values)))
    options["causal"] = options["causal"] or False
    options["window"] = tuple([None if n < 0 else n for n in options["window"] or ()]) or None
    if options["score"] is not None:
        options["score"] = torch_data.score(options["score"], map(view, reads))
    options["block_mask"] = torch_data.stated(blocks, options["block_mask"])
    return options


class _Arguments:
    """Those of either operator: the arrays that are given, by name, and the others."""

    def __init__(self, of: Pass, args: Sequence[Any]) -> None:
        self.of = of
        self.names = (*(_ROWS if of is BACKWARD else ()), *INPUTS)
        n = len(self.names)
        inputs, rest = args[:n], args[n + 2 :]
        self.lists = args[n : n + 2]
        self.reads, self.blocks = ([x for x in given if x is not None] for given in self.lists)
        self.encoded, self.family = rest[: len(_TYPES)], rest[len(_TYPES)]
        self.options = _decoded(self.encoded, self.reads, self.blocks)
        self.arrays: Arrays = {name: x for name, x in zip(self.names, inputs) if x is not None}
        self.keys = _keys(self.options["score"])
        self.arrays |= zip(self.keys, self.reads)
        self.wrt = rules.check_wanted(rest[-1], self.arrays, self.options["score"]) if of is BACKWARD else ()

    def again(self, arrays: Arrays, options: dict[str, Any]) -> list[Any]:
        """The arguments but for `wrt`, with other arrays and another score function."""
        encoded = dict(zip(_TYPES, self.encoded))
        if options["score"] is not None:
            encoded["score"] = options["score"].data
        inputs, reads = [arrays.get(name) for name in self.names], [arrays[key] for key in self.keys]
        return [*inputs, reads or _NONE, self.lists[1], *encoded.values(), self.family]

    def in_front(self, in_dims: Sequence[Any]) -> tuple[Arrays, set[str]]:
        """As the function, of the arrays of the call."""
        of_reads = in_dims[len(self.names)] or [None] * len(self.reads)
        dims = dict(zip((*self.names, *self.keys), (*in_dims[: len(self.names)], *of_reads)))
        return in_front(self.arrays, self.arrays.values(), [dims[name] for name in self.arrays])

    def call(self) -> Call:
        """The call itself."""
        numbers = self.encoded[_PLACE["block_mask"]]
        options = self.options | {"block_mask": torch_data.mask(self.blocks, numbers)}
        lib = interop.library("q", self.arrays["q"])
        return Call(lib, self.of, self.arrays, options, family=self.family, return_lse=self.of is FORWARD, wrt=self.wrt)


def gradients(call: Call) -> Gradients:
    """As `dispatch.run`; torch.use_deterministic_algorithms is heeded when gradients are computed, as PyTorch does."""
    if torch.are_deterministic_algorithms_enabled():
        call = call.but(options=call.options | {"deterministic": True})
    grads: Gradients = dispatch.run(call)
    return grads


def in_front(names: Iterable[str], tensors: Iterable[Any], dims: Iterable[int | None]) -> tuple[Arrays, set[str]]:
    """The arrays with a mapped axis in front, and the names of those that have it."""
    given = [(name, x, dim) for name, x, dim in zip(names, tensors, dims) if x is not None]
    arrays = {name: x if dim is None else x.movedim(dim, 0) for name, x, dim in given}
    return arrays, {name for name, _, dim in given if dim is not None}


def _attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = dispatch.run(_Arguments(FORWARD, args).call())
    return out.contiguous(), lse.contiguous()


def _attention_backward(*args: Any) -> list[torch.Tensor]:
    call = _Arguments(BACKWARD, args).call()
    grads = gradients(call)
    return [x.contiguous() for x in (*grads, *(grads.of_arrays[name] for name in call.wrt))]


def _fake_attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Arguments(FORWARD, args)
    _check(call)
    q, v = call.arrays["q"], call.arrays["v"]
    rows = tuple(q.shape[:-1])
    if call.options["layout"] == "bshd" and len(rows) > 1:
        rows = (*rows[:-2], rows[-1], rows[-2])
    lse = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = getattr(torch, call.options["out_dtype"] or OF_FLOAT8[0]) if q.dtype is torch.float8_e4m3fn else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out), q.new_empty(rows, dtype=lse)


def _fake_attention_backward(*args: Any) -> list[torch.Tensor]:
    call = _Arguments(BACKWARD, args)
    _check(call)
    return [call.arrays[name].new_empty(call.arrays[name].shape) for name in ("q", "k", "v", *call.wrt)]


def _check(call: _Arguments) -> None:
    """What the rules say, as far as it can be said: of lengths that are symbols, only when they are numbers."""
    mask = call.options["block_mask"]
    lengths = [n for x in call.arrays.values() for n in x.shape] + ([] if mask is None else [*mask.shape])
    if all(type(n) is int for n in lengths):
        views = {name: view(x) for name, x in call.arrays.items()}
        plain = {name: x for name, x in call.options.items() if not isinstance(x, (torch.SymFloat, torch.SymInt))}
        rules.state(views, {}, rules.complete(plain), call.of)


def view(x: torch.Tensor) -> View:
    """As that of the adapter, of a tensor that may have no memory."""
    where = f"cuda:{x.get_device()}" if x.is_cuda else x.device.type
    return View(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), where, "torch")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    n = len(INPUTS)
    reads, blocks, *ctx.rest = inputs[n:]
    ctx.reads = len(reads)
    ctx.save_for_backward(*inputs[:n], *reads, *blocks, *output)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *saved, out, lse = ctx.saved_tensors
    n = len(INPUTS)
    inputs, reads, blocks = saved[:n], saved[n : n + ctx.reads], saved[n + ctx.reads :]
    found: dict[str, Any] = {}
    keys = () if reads[0] is None else torch_data.score(ctx.rest[_PLACE["score"]], map(view, reads)).keys
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(out) if dout is None else dout
        wrt = [name for name, wanted in zip(INPUTS, ctx.needs_input_grad) if wanted and name in _OPTIONAL]
        wrt += [key for key, wanted in zip(keys, ctx.needs_input_grad[n] if keys else ()) if wanted]
        grads = torch.ops.cupyflash.attention_backward(dout, out, lse, dlse, *inputs, reads, blocks, *ctx.rest, wrt)
        found = dict(zip(("q", "k", "v", *wrt), grads))
    of_lists = [found.get(key) for key in keys] or None, None if blocks[0] is None else [None] * len(blocks)
    return (*(found.get(name) for name in INPUTS), *of_lists, *[None] * len(ctx.rest))


def _not_again(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(ONCE)


def _vmap_attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    call = _Arguments(FORWARD, args)

    def run(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, Any]:
        return torch.ops.cupyflash.attention(*call.again(arrays, options))

    arrays, has = call.in_front(in_dims)
    return folding.forward(torch, run, arrays, has, info.batch_size, call.options), (0, 0)


def _vmap_attention_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    call = _Arguments(BACKWARD, args)

    def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...]) -> Any:
        return torch.ops.cupyflash.attention_backward(*call.again(arrays, options), list(wrt))

    arrays, has = call.in_front(in_dims)
    grads = folding.backward(torch, run, arrays, has, info.batch_size, call.options, call.wrt)
    return grads, [0] * len(grads)


def any_dual(arrays: Iterable[Any]) -> bool:
    """Whether forward-mode differentiation follows one of them; with or without requires_grad, also under torch.no_grad()."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arrays)


def _without_tangents(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd does for an operator, for which PyTorch would drop tangents in silence."""

    def run(keys: Any, *args: Any) -> Any:
        if any_dual(tree_iter(args)):
            raise NotImplementedError(FORWARD_MODE)
        return kernel(keys, *args)

    return run


class _Library(torch.library.Library):
    """Refuses tangents, whoever calls an operator of it: a program, a transform, a rule of vmap."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        super().impl(op_name, _without_tangents(fn) if dispatch_key == "Autograd" else fn, dispatch_key, **options)


_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def is_batched(x: Any) -> bool:
    """Whether it is mapped by autograd's own vmap (is_grads_batched=True), which is not that of torch.func."""
    return isinstance(x, torch.Tensor) and _is_legacy_batched(x)


def _batched(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """An operator under autograd's own vmap, by its rule for that of torch.func."""

    def run(*args: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        if level > 1:
            raise NotImplementedError(
                "gradients that are batched twice (is_grads_batched=True within another) are not served"
            )
        # 1 is what a tensor without the axis would get, and there is none.
        plain = tree_map(lambda x: torch._remove_batch_dim(x, level, 1, 0) if is_batched(x) else x, args)
        dims = tree_map(lambda x: 0 if is_batched(x) else None, args)
        sizes = [x.shape[0] for x, dim in zip(tree_iter(plain), tree_iter(dims)) if dim == 0]
        results, _ = rule(SimpleNamespace(batch_size=sizes[0]), dims, *plain)
        return tree_map(lambda x: torch._add_batch_dim(x, 0, level), results)

    return run


def _flops(args: Sequence[Any], of: Pass) -> int:
    """Of all pairs, also those that are hidden, as PyTorch counts its own attention: 2 products, 5 of the backward."""
    args = args[len(_ROWS) :] if of is BACKWARD else args
    q, k, v = args[:3]
    layout = args[len(INPUTS) + len(_LISTS) + _PLACE["layout"]]
    keys = k.shape[-3 if layout == "bshd" and k.dim() > 2 else -2]
    over_d, over_dv = (3, 2) if of is BACKWARD else (1, 1)
    return 2 * math.prod(q.shape[:-1]) * keys * (over_d * q.shape[-1] + over_dv * v.shape[-1])


def _define() -> torch.library.Library:
    lib = _Library("cupyflash", "DEF")
    names = ["Tensor q", "Tensor k", "Tensor v", *(f"Tensor? {name}" for name in _OPTIONAL)]
    arrays = ", ".join([*names, *(f"Tensor?[] {name}" for name in _LISTS)])
    options = ", ".join([*(f"{kind} {name}" for name, kind in _TYPES.items()), "str? family"])
    rows = "Tensor dout, Tensor out, Tensor lse, Tensor? dlse"
    tags = (torch.Tag.pt2_compliant_tag,)
    lib.define(f"attention({arrays}, {options}) -> (Tensor, Tensor)", tags=tags)
    lib.define(f"attention_backward({rows}, {arrays}, {options}, str[] wrt) -> Tensor[]", tags=tags)
    for name, run, fake, vmap in (
        ("attention", _attention, _fake_attention, _vmap_attention),
        ("attention_backward", _attention_backward, _fake_attention_backward, _vmap_attention_backward),
    ):
        for key in ("CPU", "CUDA"):
            lib.impl(name, run, key)
        torch.library.register_fake(f"cupyflash::{name}", fake, lib=lib)
        torch.library.register_vmap(f"cupyflash::{name}", vmap, lib=lib)
        lib.impl(name, _batched(vmap), "Batched")
    torch.library.register_autograd("cupyflash::attention", _differentiate, setup_context=_keep, lib=lib)
    torch.library.register_autograd("cupyflash::attention_backward", _not_again, lib=lib)
    return lib


_library = _define()  # gone with it


@register_flop_formula(torch.ops.cupyflash.attention, get_raw=True)
def _flops_of_attention(*args: Any, out_val: Any = None) -> int:
    return _flops(args, FORWARD)


@register_flop_formula(torch.ops.cupyflash.attention_backward, get_raw=True)
def _flops_of_attention_backward(*args: Any, out_val: Any = None) -> int:
    return _flops(args, BACKWARD)
