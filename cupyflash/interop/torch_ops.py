"""The operators torch.ops.cupyflash.attention and attention_backward, and how a call finds its way to them.

A call that is traced (torch.compile, torch.export, fake tensors, dispatch modes) or transformed (torch.func) becomes an operator,
which PyTorch knows by its schema: shapes, derivative, vmap. What runs at once under autograd is an autograd function, and what
needs no gradient goes straight to the corridor: both cost the host less than the dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .. import folding, interop, passes
from .. import problem as rules
from ..problem import ARRAYS, FLOAT8, OF_FLOAT8, OPTIONS, Gradients, View, lasting
from ..score import Score
from . import torch_data
from .protocol import Arrays, Library

_OPTIONAL = tuple(row.name for row in ARRAYS)
_INPUTS = ("q", "k", "v", *_OPTIONAL)
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

# ---- how a call is run ----------------------------------------------------------------------------------------------


def needed(arrays: Arrays, backward: bool) -> bool:
    """Whether a call cannot simply run: it is traced or transformed, or autograd or autocast have a part in it."""
    q = arrays["q"]
    if followed(q):
        return True
    if backward:
        return torch.are_deterministic_algorithms_enabled() or _any_dual(arrays)
    return _recorded(arrays) or _autocast_dtype(q) is not None


def followed(x: torch.Tensor) -> bool:
    """Whether calls on x are traced or transformed, so that it may have no memory."""
    return _traced(x) or torch._C._are_functorch_transforms_active()


def _traced(q: torch.Tensor) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (type(q) is not torch.Tensor and type(q).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)
    )


def _any_requires_grad(arrays: Arrays) -> bool:
    for x in arrays.values():
        if getattr(x, "requires_grad", False):
            return True
    return False


def _any_dual(arrays: Arrays) -> bool:
    """Whether forward-mode differentiation follows one of them; with or without requires_grad, also under torch.no_grad()."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arrays.values())


def _recorded(arrays: Arrays) -> bool:
    """Whether a derivative is wanted; there is none in forward mode, which an autograd function says."""
    return (torch.is_grad_enabled() and _any_requires_grad(arrays)) or _any_dual(arrays)


def forward(
    lib: Library,
    arrays: Arrays,
    targets: Arrays,
    return_lse: bool,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
) -> tuple[Any, Any]:
    """As `passes.forward`, followed by whoever traces, transforms or records."""
    dtype = _autocast_dtype(arrays["q"])
    if dtype is not None:
        arrays = _autocast(arrays, dtype)
    if arrays["q"].dtype is _FLOAT8 and torch.is_grad_enabled() and _any_requires_grad(arrays):
        raise TypeError(
            f"q has dtype {FLOAT8}, of which there is a forward alone, but a gradient is wanted; call under torch.no_grad()"
        )
    traced = _traced(arrays["q"])
    transformed = torch._C._are_functorch_transforms_active()
    if not traced and not transformed and not _recorded(arrays):
        return passes.forward(lib, arrays, targets, return_lse, options, seed, family)
    if targets:
        if traced or transformed:
            raise ValueError(f"out is {_NO_WRITING}")
        raise ValueError(
            "out is given but a gradient is wanted, and autograd cannot follow a write into out; leave it out, or call "
            "under torch.no_grad()"
        )
    if not traced:
        call = (lib, lasting(options), seed, family)  # the backward takes what the forward took
        if transformed:
            return _Transformed.apply(call, tuple(arrays), *arrays.values())
        return _record(call, tuple(arrays), *map(_unwrapped, arrays.values()))
    _check_fake(arrays)
    return torch.ops.cupyflash.attention(*_arguments(lib, _with_seed(arrays, seed), _INPUTS, options), family)


def backward(
    lib: Library,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    wrt: tuple[str, ...],
) -> Gradients:
    """As `passes.backward`, followed by whoever traces or transforms."""
    traced = _traced(arrays["q"]) or _traced(arrays["dout"])
    if not traced and not torch._C._are_functorch_transforms_active() and not _any_dual(arrays):
        return _gradients(lib, arrays, targets, options, seed, family, wrt)
    if targets:
        raise ValueError(f"grads is {_NO_WRITING}")
    if traced:
        _check_fake(arrays)
        given = _arguments(lib, _with_seed(arrays, seed), (*_ROWS, *_INPUTS), options)
        grads = torch.ops.cupyflash.attention_backward(*given, family, list(wrt))
    else:
        grads = _AttentionBackward.apply((lib, options, seed, family), tuple(arrays), wrt, *arrays.values())
    return Gradients(*grads[:3], **{f"d{name}": x for name, x in zip(wrt, grads[3:])})


def _gradients(
    lib: Library,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    wrt: tuple[str, ...],
) -> Gradients:
    """As `passes.backward`; torch.use_deterministic_algorithms is heeded when gradients are computed, as PyTorch does."""
    if torch.are_deterministic_algorithms_enabled():
        options = options | {"deterministic": True}
    return passes.backward(lib, arrays, targets, options, seed, family, wrt)


def _check_fake(arrays: Arrays) -> None:
    """TypeError, naming the argument, for a tensor with memory beside a q without."""
    q = arrays["q"]
    if not isinstance(q, FakeTensor) or q.fake_mode.allow_non_fake_inputs:
        return
    for name, x in arrays.items():
        if isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name} is a {type(x).__name__} with memory, but q is a FakeTensor; all must be, or none")


_NO_WRITING = (
    "given but the call is traced or transformed (torch.compile, torch.func, fake tensors), where nothing can be written into; "
    "leave it out"
)


_How = tuple[Library, dict[str, Any], "int | None", "str | None"]  # a call but for its arrays: options, seed, family


_FLOAT8 = torch.float8_e4m3fn


def _autocast_dtype(q: torch.Tensor) -> torch.dtype | None:
    """That to which inputs are cast; those of 8 bits, which have scales, stay."""
    where = "cuda" if q.is_cuda else "cpu"
    return torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) and q.dtype is not _FLOAT8 else None


def _autocast(arrays: Arrays, dtype: torch.dtype) -> Arrays:
    """As autocast does to PyTorch's own attention: q, k and v in its dtype, float64 left alone. Others may stay float32."""

    def cast(name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
            return x
        return x if name not in ("q", "k", "v") and (x.dtype is torch.float32 or name not in _INPUTS) else x.to(dtype)

    return {name: cast(name, x) for name, x in arrays.items()}


class _Attention(torch.autograd.Function):
    """A call at once, with its gradients: of out and of lse, through the call's own backward."""

    @staticmethod
    def forward(ctx: Any, call: _How, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lib, options, seed, family = call
        result = passes.forward(lib, dict(zip(names, tensors)), {}, True, options, seed, family)
        _Transformed.setup_context(ctx, (call, names, *tensors), result)
        return result

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(_ONCE)
        return _Transformed.backward(ctx, dout, dlse)


# Not through Function.apply, which looks for defaults of arguments and for transforms, for 2 us.
_record = super(torch.autograd.Function, _Attention).apply


def _unwrapped(x: Any) -> Any:
    """What a transform that is over has left wrapped; as Function.apply does."""
    return torch._C._functorch.unwrap_if_dead(x) if isinstance(x, torch.Tensor) else x


class _Transformed(torch.autograd.Function):
    """The same in the form that torch.func asks for, which costs the host 11 us more."""

    @staticmethod
    def forward(call: _How, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lib, options, seed, family = call
        return passes.forward(lib, dict(zip(names, tensors)), {}, True, options, seed, family)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.call, ctx.names, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (2 + len(ctx.names))
        # A pullback of torch.func.vjp is called when its transform is over: what it kept is wrapped for nothing.
        *tensors, out, lse = map(_unwrapped, ctx.saved_tensors)
        wanted = zip(ctx.names, ctx.needs_input_grad[2:])
        wrt = tuple([name for name, needed in wanted if needed and name not in ("q", "k", "v")])
        arrays = dict(zip(ctx.names, tensors))
        arrays |= {"dout": torch.zeros_like(out) if dout is None else dout, "out": out, "lse": lse}
        if dlse is not None:
            arrays["dlse"] = dlse
        lib, options, seed, family = ctx.call
        grads = backward(lib, arrays, {}, options, seed, family, wrt)
        return None, None, *[getattr(grads, f"d{name}", None) for name in ctx.names]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: _How, names: tuple[str, ...], *tensors: Any) -> tuple[Any, Any]:
        lib, options, seed, family = call

        def run(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, Any]:
            return _Transformed.apply((lib, options, seed, family), tuple(arrays), *arrays.values())

        arrays, has = _in_front(names, tensors, in_dims[2:])
        return folding.forward(torch, run, arrays, has, info.batch_size, options), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    """Its gradients under torch.func, which transforms these too."""

    @staticmethod
    def forward(call: _How, names: tuple[str, ...], wrt: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
        lib, options, seed, family = call
        grads = _gradients(lib, dict(zip(names, tensors)), {}, options, seed, family, wrt)
        return (*grads, *(getattr(grads, f"d{name}") for name in wrt))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(_ONCE)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: _How, names: tuple[str, ...], wrt: tuple[str, ...], *tensors: Any
    ) -> tuple[Any, Any]:
        lib, options, seed, family = call

        def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...]) -> Any:
            return _AttentionBackward.apply((lib, options, seed, family), tuple(arrays), wrt, *arrays.values())

        arrays, has = _in_front(names, tensors, in_dims[3:])
        grads = folding.backward(torch, run, arrays, has, info.batch_size, options, wrt)
        return tuple(grads), (0,) * len(grads)


def _in_front(names: Iterable[str], tensors: Iterable[Any], dims: Iterable[int | None]) -> tuple[Arrays, set[str]]:
    """The arrays with a mapped axis in front, and the names of those that have it."""
    given = [(name, x, dim) for name, x, dim in zip(names, tensors, dims) if x is not None]
    arrays = {name: x if dim is None else x.movedim(dim, 0) for name, x, dim in given}
    return arrays, {name for name, _, dim in given if dim is not None}


_ONCE = (
    "the gradients of attention cannot be differentiated again: call backward() or torch.autograd.grad() "
    "without create_graph=True"
)

# ---- the operators --------------------------------------------------------------------------------------------------


_UNKNOWN = "but a call that is traced (torch.compile, torch.export, fake tensors) cannot take it"


def _arguments(lib: Library, arrays: Arrays, names: tuple[str, ...], options: dict[str, Any]) -> list[Any]:
    """A call as an operator takes it, but for its family: arrays, None for those that are not given, and options. Errors are
    those of the rules."""
    encoded = _encoded(options)
    keys = _keys(options["score"])
    for name in arrays:
        if name not in names and name not in keys:
            raise NotImplementedError(f"{name} is given, {_UNKNOWN}")
    arrays = interop.adopted(lib, arrays)
    blocks, encoded["block_mask"] = torch_data.of_mask(options["block_mask"], arrays["q"])
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


class _Call:
    """The arguments of either operator: the arrays that are given, by name, and the others."""

    def __init__(self, args: Sequence[Any], backward: bool) -> None:
        self.names = (*(_ROWS if backward else ()), *_INPUTS)
        n = len(self.names)
        inputs, rest = args[:n], args[n + 2 :]
        self.lists = args[n : n + 2]
        self.reads, self.blocks = ([x for x in given if x is not None] for given in self.lists)
        self.encoded, self.family = rest[: len(_TYPES)], rest[len(_TYPES)]
        self.options = _decoded(self.encoded, self.reads, self.blocks)
        self.arrays: Arrays = {name: x for name, x in zip(self.names, inputs) if x is not None}
        self.keys = _keys(self.options["score"])
        self.arrays |= zip(self.keys, self.reads)
        self.wrt: tuple[str, ...] = tuple(rest[-1]) if backward else ()

    def again(self, arrays: Arrays, options: dict[str, Any]) -> list[Any]:
        """The arguments but for `wrt`, with other arrays and another score function."""
        encoded = dict(zip(_TYPES, self.encoded))
        if options["score"] is not None:
            encoded["score"] = options["score"].data
        inputs, reads = [arrays.get(name) for name in self.names], [arrays[key] for key in self.keys]
        return [*inputs, reads or _NONE, self.lists[1], *encoded.values(), self.family]

    def in_front(self, in_dims: Sequence[Any]) -> tuple[Arrays, set[str]]:
        """As `_in_front`, of the arrays of the call."""
        of_reads = in_dims[len(self.names)] or [None] * len(self.reads)
        dims = dict(zip((*self.names, *self.keys), (*in_dims[: len(self.names)], *of_reads)))
        return _in_front(self.arrays, self.arrays.values(), [dims[name] for name in self.arrays])

    def readable(self) -> dict[str, Any]:
        """The options with the block mask itself."""
        numbers = self.encoded[_PLACE["block_mask"]]
        return self.options | {"block_mask": torch_data.mask(self.blocks, numbers)}


def _attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(args, False)
    lib = interop.library("q", call.arrays["q"])
    out, lse = passes.forward(lib, call.arrays, {}, True, call.readable(), None, call.family)
    return out.contiguous(), lse.contiguous()


def _attention_backward(*args: Any) -> list[torch.Tensor]:
    call = _Call(args, True)
    lib = interop.library("q", call.arrays["q"])
    grads = _gradients(lib, call.arrays, {}, call.readable(), None, call.family, call.wrt)
    return [x.contiguous() for x in (*grads, *(getattr(grads, f"d{name}") for name in call.wrt))]


def _fake_attention(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(args, False)
    _check(call, False)
    q, v = call.arrays["q"], call.arrays["v"]
    rows = tuple(q.shape[:-1])
    if call.options["layout"] == "bshd" and len(rows) > 1:
        rows = (*rows[:-2], rows[-1], rows[-2])
    lse = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = getattr(torch, call.options["out_dtype"] or OF_FLOAT8[0]) if q.dtype is _FLOAT8 else q.dtype
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out), q.new_empty(rows, dtype=lse)


def _fake_attention_backward(*args: Any) -> list[torch.Tensor]:
    call = _Call(args, True)
    _check(call, True)
    return [call.arrays[name].new_empty(call.arrays[name].shape) for name in ("q", "k", "v", *call.wrt)]


def _check(call: _Call, backward: bool) -> None:
    """What the rules say, as far as it can be said: of lengths that are symbols, only when they are numbers."""
    mask = call.options["block_mask"]
    lengths = [n for x in call.arrays.values() for n in x.shape] + ([] if mask is None else [*mask.shape])
    if all(type(n) is int for n in lengths):
        views = {name: view(x) for name, x in call.arrays.items()}
        plain = {name: x for name, x in call.options.items() if not isinstance(x, (torch.SymFloat, torch.SymInt))}
        rules.state(views, {}, rules.complete(plain), backward)


def view(x: torch.Tensor) -> View:
    """As that of the adapter, of a tensor that may have no memory."""
    where = f"cuda:{x.get_device()}" if x.is_cuda else x.device.type
    return View(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), where, "torch")


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    n = len(_INPUTS)
    reads, blocks, *ctx.rest = inputs[n:]
    ctx.reads = len(reads)
    ctx.save_for_backward(*inputs[:n], *reads, *blocks, *output)


def _differentiate(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    *saved, out, lse = ctx.saved_tensors
    n = len(_INPUTS)
    inputs, reads, blocks = saved[:n], saved[n : n + ctx.reads], saved[n + ctx.reads :]
    found: dict[str, Any] = {}
    keys = () if reads[0] is None else torch_data.score(ctx.rest[_PLACE["score"]], map(view, reads)).keys
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(out) if dout is None else dout
        wrt = [name for name, wanted in zip(_INPUTS, ctx.needs_input_grad) if wanted and name in _OPTIONAL]
        wrt += [key for key, wanted in zip(keys, ctx.needs_input_grad[n] if keys else ()) if wanted]
        grads = torch.ops.cupyflash.attention_backward(dout, out, lse, dlse, *inputs, reads, blocks, *ctx.rest, wrt)
        found = dict(zip(("q", "k", "v", *wrt), grads))
    of_lists = [found.get(key) for key in keys] or None, None if blocks[0] is None else [None] * len(blocks)
    return (*(found.get(name) for name in _INPUTS), *of_lists, *[None] * len(ctx.rest))


def _not_again(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(_ONCE)


def _vmap_attention(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    call = _Call(args, False)

    def run(arrays: Arrays, options: dict[str, Any]) -> tuple[Any, Any]:
        return torch.ops.cupyflash.attention(*call.again(arrays, options))

    arrays, has = call.in_front(in_dims)
    return folding.forward(torch, run, arrays, has, info.batch_size, call.options), (0, 0)


def _vmap_attention_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    call = _Call(args, True)

    def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...]) -> Any:
        return torch.ops.cupyflash.attention_backward(*call.again(arrays, options), list(wrt))

    arrays, has = call.in_front(in_dims)
    grads = folding.backward(torch, run, arrays, has, info.batch_size, call.options, call.wrt)
    return grads, [0] * len(grads)


def _define() -> torch.library.Library:
    lib = torch.library.Library("cupyflash", "DEF")
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
    torch.library.register_autograd("cupyflash::attention", _differentiate, setup_context=_keep, lib=lib)
    torch.library.register_autograd("cupyflash::attention_backward", _not_again, lib=lib)
    return lib


_library = _define()  # gone with it
