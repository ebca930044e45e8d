"""What the operators take: a call as tensors, numbers and texts in the order of a schema, and back.

First the rows of the pass and tangents of optional arrays, then q, k, v and the optional arrays, lists of tensors,
options, the family, whether values of lengths are looked at, and of a pass that is about gradients `wrt`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import interop, rules
from ..call import Arrays, Call
from ..gradients import check_wanted
from ..passes import FORWARD, PASSES, Pass
from ..problem import ARRAYS, OPTIONS, View, complete, mask_kind
from ..score import Score
from ..signature import NO_SCRIPT
from . import torch_data

INPUTS = ("q", "k", "v", *(row.name for row in ARRAYS))
_NONE: list[Any] = [None]  # one that is not given: an empty list AOTInductor hands on as None, which is refused
# The options that the operators have, in the order of OPTIONS, and their types in a schema; a Scalar may be a symbol.
_TYPES = {
    "causal": "str", "window": "SymInt[]?", "scale": "Scalar?", "softcap": "Scalar?", "score": "str?",
    "block_mask": "SymInt[]?", "at": "SymInt[]?", "latent": "SymInt?", "dropout": "Scalar", "out_dtype": "str?",
    "out_scale": "Scalar", "layout": "str", "max_seqlen_q": "SymInt?", "max_seqlen_k": "SymInt?",
    "batch_invariant": "bool", "sms": "SymInt?", "deterministic": "bool",
}  # fmt: skip

_NUMBERS = {name for name, kind in _TYPES.items() if kind.startswith(("Scalar", "SymInt?"))}
_CALLED = {"at": "place"}  # options in a schema that are called like an array of it
_PLACE = {name: n for n, name in enumerate(_TYPES)}


def _names(of: Pass) -> tuple[str, ...]:
    rows = sorted((name for name in of.inputs if name not in INPUTS), key=lambda name: name != "dout")  # that first
    moving = [f"t{row.name}" for row in ARRAYS if row.gradient] if of.moved else []
    return (*rows, *moving, *INPUTS)


# Of the operator of each pass, by its name: the tensors, but for those in lists.
_NAMES = {name: _names(of) for name, of in PASSES.items()}
# Lists of tensors: what a score function reads, a block mask, and tangents of the first.
_LISTS = {name: ("score_arrays", "blocks", *(["tscore_arrays"] if of.moved else [])) for name, of in PASSES.items()}


def names_of(of: Pass) -> tuple[str, ...]:
    return _NAMES[of.name]


def lists_of(of: Pass) -> tuple[str, ...]:
    return _LISTS[of.name]


def name_of(of: Pass) -> str:
    """What its operator is called."""
    return "attention" if of is FORWARD else f"attention_{of.name}"


def operator(of: Pass) -> Any:
    return getattr(torch.ops.cupyflash, name_of(of)).default


def schema(of: Pass) -> str:
    optional = {row.name for row in of.rows if row.optional}
    optional |= {x for row in ARRAYS for x in (row.name, f"t{row.name}")} | {"v"}  # which latent attention has not
    tensors = [f"Tensor{'?' * (name in optional)} {name}" for name in names_of(of)]
    lists = [f"Tensor?[] {name}" for name in lists_of(of)]
    options = [*(f"{kind} {_CALLED.get(name, name)}" for name, kind in _TYPES.items()), "str? family", "bool check"]
    options += ["str[] wrt"] * of.of_gradients
    returns = "Tensor[]" if of.of_gradients else "(Tensor, Tensor)"
    return f"{name_of(of)}({', '.join([*tensors, *lists, *options])}) -> {returns}"


# ---- from a call ----------------------------------------------------------------------------------------------------


def run(call: Call) -> Any:
    """The results of a call, in the form of its operator, by this. Errors are those of the rules."""
    refuse_script()
    _check_fake(call.arrays)
    encoded = _encoded(call.options)
    keys = _keys(call.options["score"])
    arrays = _with_seed(call.arrays, call.seed)
    names = names_of(call.of)
    for name in arrays:
        if name not in names and name not in keys and name.removeprefix("t") not in keys:
            raise NotImplementedError(f"{name} is given, {_UNKNOWN}")
    arrays = interop.adopted(call.lib, arrays)
    blocks, encoded["block_mask"] = torch_data.of_mask(call.options["block_mask"], arrays["q"])
    values = [*encoded.values(), call.family, call.check, *[list(call.wrt)] * call.of.of_gradients]
    return operator(call.of)(*_tensors(call.of, arrays, keys, blocks or _NONE), *values)


def _tensors(of: Pass, arrays: Arrays, keys: Sequence[str], blocks: Sequence[Any]) -> list[Any]:
    lists = [[arrays[key] for key in keys] or _NONE, blocks]
    if of.moved:
        lists.append([arrays.get(f"t{key}") for key in keys] or _NONE)
    return [*(arrays.get(name) for name in names_of(of)), *lists]


def _check_fake(arrays: Arrays) -> None:
    """TypeError, naming the argument, for a tensor with memory beside a q without."""
    q = arrays["q"]
    if not isinstance(q, FakeTensor) or q.fake_mode.allow_non_fake_inputs:
        return
    for name, x in arrays.items():
        if isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name} is a {type(x).__name__} with memory, but q is a FakeTensor; all must be, or none")


def refuse_script() -> None:
    """NotImplementedError under torch.jit.trace, for which what is computed is a constant, and under torch.onnx.export:
    neither has a form for the operators."""
    if torch.onnx.is_in_onnx_export() or (_is_exporting() and _in_onnx_export()):
        raise NotImplementedError(
            "torch.onnx.export follows the call, but attention has no operator in ONNX; export the model with "
            "torch.nn.functional.scaled_dot_product_attention in its place"
        )
    if torch.jit.is_tracing():
        raise NotImplementedError(f"torch.jit.trace follows the call, {NO_SCRIPT}")


_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # PyTorch 2.6 may have none


def _in_onnx_export() -> bool:
    """What torch.onnx.is_in_onnx_export() says, for Dynamo too, which takes that for False."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return getattr(flags, "_is_onnx_exporting", False)


_UNKNOWN = (
    "but a call that is traced (torch.compile, torch.export, fake tensors) or transformed (torch.func) cannot take it"
)


def _with_seed(arrays: Arrays, seed: int | None) -> Arrays:
    """A seed that is a number as a tensor, which may be another in each run of what is traced."""
    if seed is None:
        return arrays
    signed = seed - 2**64 if seed >= 2**63 else seed
    return {**arrays, "seed": torch.full((1,), signed, dtype=torch.int64, device=arrays["q"].device)}


def _keys(score: Score | None) -> tuple[str, ...]:
    """What the arrays that it reads are called among those of a call."""
    return () if score is None else score.keys


def check_options(options: dict[str, Any]) -> None:
    """TypeError, ValueError or NotImplementedError, as `run` would raise it."""
    _encoded(options)
    mask_kind(options["block_mask"])


def _encoded(options: dict[str, Any]) -> dict[str, Any]:
    """Options as the schema has them, in the order of _TYPES; of a block mask nothing."""
    for row in OPTIONS:
        if row.name not in _TYPES and options.get(row.name, row.default) != row.default:
            raise NotImplementedError(f"{row.name} is given, {_UNKNOWN}")
    values: dict[str, Any] = dict.fromkeys(_TYPES)
    numbers = (float, int, type(None))  # one may be a symbol, and rules are for numbers
    for row in OPTIONS:
        if row.name in _TYPES and row.name not in ("score", "block_mask"):
            value = options.get(row.name, row.default)
            as_it_is = row.name in _NUMBERS and type(value) in numbers
            values[row.name] = value if as_it_is else row.check(value)
    values["causal"] = values["causal"] or ""
    values["window"] = None if values["window"] is None else [-1 if n is None else n for n in values["window"]]
    values["score"] = None if options["score"] is None else options["score"].data
    return values


# ---- and back -------------------------------------------------------------------------------------------------------


class Arguments:
    """Those of the operator of a pass: the arrays that are given, by name, and the others."""

    with_rows, last, looked, settled = True, False, False, False  # operators have both results

    def __init__(self, of: Pass, args: Sequence[Any]) -> None:
        self.of = of
        names, lists = names_of(of), lists_of(of)
        rest = args[len(names) + len(lists) :]
        reads, self.blocks, *moving = args[len(names) : len(names) + len(lists)]
        self.encoded = rest[: len(_TYPES)]
        self.family, self.looks, *wrt = rest[len(_TYPES) :]
        self.arrays: Arrays = {name: x for name, x in zip(names, args) if x is not None}
        reads = [x for x in reads if x is not None]
        data = self.encoded[_PLACE["score"]]
        self.score = None if data is None else torch_data.score(data, map(view, reads))
        self.keys = _keys(self.score)
        self.arrays |= zip(self.keys, reads)
        if moving:
            self.arrays |= {f"t{key}": x for key, x in zip(self.keys, moving[0]) if x is not None}
        self.wrt = check_wanted(wrt[0], self.arrays, self.score) if of.of_gradients else ()

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """A block mask as it is stated."""
        options = complete(dict(zip(_TYPES, self.encoded)))
        options["causal"] = options["causal"] or False
        options["window"] = tuple([None if n < 0 else n for n in options["window"] or ()]) or None
        options["at"] = None if options["at"] is None else tuple(options["at"])
        options["score"] = self.score
        numbers = options["block_mask"]
        options["block_mask"] = torch_data.stated([x for x in self.blocks if x is not None], numbers)
        return options

    def others(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = (), score: Score | None = None) -> list[Any]:
        """Of a pass on these arrays, the same options, and perhaps another score function."""
        encoded = list(self.encoded)
        if score is not None:
            encoded[_PLACE["score"]] = score.data
        values = [*encoded, self.family, self.looks and of is self.of, *[list(wrt)] * of.of_gradients]
        return [*_tensors(of, arrays, self.keys, self.blocks), *values]

    def run(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = (), score: Score | None = None) -> Any:
        """By its operator."""
        return operator(of)(*self.others(of, arrays, wrt, score))

    def below(self, work: Callable[..., list[Any]], *arrays: Arrays) -> list[Any]:
        """What `work` makes of a function as `run` and of these arrays, where autograd follows nothing: below this
        level of torch.func, or where there is none."""
        with torch._C._AutoDispatchBelowAutograd():
            return work(self.run, *arrays)

    def in_front(self, in_dims: Sequence[Any]) -> tuple[Arrays, set[str]]:
        """The arrays with a mapped axis in front, and the names of those that have it; `in_dims` has the form of the
        arguments."""
        names = names_of(self.of)
        reads, _, *moving = in_dims[len(names) : len(names) + len(lists_of(self.of))]
        dims: dict[str, int | None] = dict(zip(names, in_dims)) | dict(zip(self.keys, reads or ()))
        if moving:
            dims |= {f"t{key}": dim for key, dim in zip(self.keys, moving[0] or ())}
        has = {name for name in self.arrays if dims.get(name) is not None}
        return {name: x.movedim(dims[name], 0) if name in has else x for name, x in self.arrays.items()}, has

    def call(self) -> Call:
        """The call itself."""
        numbers = self.encoded[_PLACE["block_mask"]]
        options = self.options | {"block_mask": torch_data.mask([x for x in self.blocks if x is not None], numbers)}
        lib = interop.library("q", self.arrays["q"])
        rows = self.of is FORWARD
        return Call(lib, self.of, self.arrays, options, {}, None, self.family, rows, self.wrt, check=self.looks)

    def check(self) -> None:
        """What the rules say, as far as it can be said: of lengths that are symbols, only when they are numbers."""
        mask = self.options["block_mask"]
        lengths = [n for x in self.arrays.values() for n in x.shape] + ([] if mask is None else [*mask.shape])
        if all(type(n) is int for n in lengths):
            views = {name: view(x) for name, x in self.arrays.items()}
            plain = {name: x for name, x in self.options.items() if not _symbolic(x)}
            rules.state(views, {}, complete(plain), self.of)


def _symbolic(x: Any) -> bool:
    """Whether it is, or holds, a number that is not known yet."""
    return any(isinstance(n, (torch.SymFloat, torch.SymInt)) for n in (x if isinstance(x, tuple) else (x,)))


def view(x: torch.Tensor) -> View:
    """As that of the adapter, of a tensor that may have no memory."""
    where = f"cuda:{x.get_device()}" if x.is_cuda else x.device.type
    return View(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."), where, "torch")
