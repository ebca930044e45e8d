"""What PyTorch's operators are among those of a score function."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..score.value import Traced, apply, gelu, power, softplus, truth, where


def name_of(n: Any) -> str:
    """Of the operator, whichever of its overloads it is, in place or not."""
    schema = getattr(n.target, "_schema", None)  # Python's own take a result out of several
    return "" if schema is None else str(schema.name).removeprefix("aten::").strip("_")


def tags_of(n: Any) -> Any:
    """What PyTorch says of the operator."""
    return getattr(n.target, "tags", ())


def writes_to(n: Any) -> list[Any]:
    """The nodes whose tensors a node writes into."""
    return _tensors_of(n, lambda info: info.is_write)


def memory_of(n: Any) -> Any:
    """The node that made the memory in which a node's tensor lies."""
    while of := n.args[:1] if n.target is operator.getitem else _tensors_of(n, lambda info: True):
        n = of[0]
    return n


def is_view(n: Any) -> bool:
    """Whether a node has another node's memory, into which it does not write."""
    return memory_of(n) is not n and not writes_to(n)


def _tensors_of(n: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """Of a node's inputs those whose memory its result may have, or be written in."""
    schema = getattr(n.target, "_schema", None)
    found: list[Any] = []
    for at, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and wanted(argument.alias_info):
            torch.fx.map_arg(n.args[at] if at < len(n.args) else n.kwargs.get(argument.name), found.append)
    return found


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return apply("add", x, y if alpha == 1 else apply("mul", y, alpha))


def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return apply("sub", x, y if alpha == 1 else apply("mul", y, alpha))


def _is_float(*args: Any) -> bool:
    return any(isinstance(x, float) or (isinstance(x, Traced) and x._graph.kind(x._n) == "float") for x in args)


def _truncated(x: Any) -> Any:
    return where(apply("lt", x, 0), apply("neg", apply("floor", apply("neg", x))), apply("floor", x))


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return apply("div", x, y)
    if _is_float(x, y):
        return (_truncated if rounding_mode == "trunc" else lambda x: apply("floor", x))(apply("div", x, y))
    return apply("truncdiv" if rounding_mode == "trunc" else "floordiv", x, y)


def _remainder(x: Any, y: Any) -> Any:
    if not _is_float(x, y):
        return apply("mod", x, y)
    return apply("sub", x, apply("mul", apply("floor", apply("div", x, y)), y))


def _fmod(x: Any, y: Any) -> Any:
    if not _is_float(x, y):
        return apply("truncmod", x, y)
    return apply("sub", x, apply("mul", _truncated(apply("div", x, y)), y))


def _pow(x: Any, y: Any) -> Any:
    y = int(y) if isinstance(y, float) and y.is_integer() else y
    if isinstance(y, int) and y > 1 and not _is_float(x):  # by products, which wrap
        half = _pow(x, y // 2)
        return apply("mul", apply("mul", half, half), x if y % 2 else 1)
    return power(x, y)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """Whose derivative at the bounds is 1, as PyTorch's."""
    x = x if low is None else where(apply("lt", x, low), low, x)
    return x if high is None else where(apply("lt", high, x), high, x)


def _sign(x: Any) -> Any:
    return where(apply("lt", 0, x), 1, where(apply("lt", x, 0), -1, 0))


def _cast(x: Any, dtype: torch.dtype | None = None) -> Any:
    return x.astype(_CASTS[dtype]) if dtype in _CASTS and isinstance(x, Traced) else x


_CASTS = {
    torch.bool: "bool", torch.int8: "int32", torch.uint8: "int32", torch.int16: "int32", torch.int32: "int32",
    torch.int64: "int64", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32",
    torch.float64: "float64",
}  # fmt: skip
KEYWORDS = ("alpha", "rounding_mode", "dtype", "approximate")
# A number beside a tensor of integers becomes one of its dtype first: 255 == -1 for uint8.
OF_ONE_DTYPE = ("floor_divide", "div", "remainder", "fmod", "lt", "le", "eq", "ne", "gt", "ge")
KINDS = {torch.bool: "bool", torch.int64: "long"}


def _simple(op: str) -> Any:
    return lambda *args: apply(op, *args)


OPERATORS: dict[str, Any] = {
    **{op: _simple(op) for op in ("mul", "neg", "abs", "minimum", "maximum", "exp", "log", "log2", "sqrt", "tanh",
        "sigmoid",
                                  "sin", "cos", "floor", "erf", "atan2", "lt", "le", "eq", "ne")},
    "add": _add, "sub": _sub, "rsub": lambda x, y, alpha=1: _sub(y, x, alpha), "div": _div,
    "floor_divide": lambda x, y: _div(x, y, "floor"), "remainder": _remainder, "fmod": _fmod, "pow": _pow,
    "gt": lambda x, y: apply("lt", y, x), "ge": lambda x, y: apply("le", y, x),
    "bitwise_and": _simple("and"), "bitwise_or": _simple("or"), "bitwise_xor": _simple("xor"),
    "bitwise_not": _simple("not"),
    "logical_and": lambda x, y: apply("and", truth(x), truth(y)),
    "logical_or": lambda x, y: apply("or", truth(x), truth(y)),
    "logical_xor": lambda x, y: apply("xor", truth(x), truth(y)), "logical_not": lambda x: apply("not", truth(x)),
    "bitwise_left_shift": _simple("shl"), "bitwise_right_shift": _simple("shr"), "lshift": _simple("shl"),
    "rshift": _simple("shr"), "and": _simple("and"), "or": _simple("or"), "xor": _simple("xor"), "where": where,
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda x, high: _clamp(x, None, high),
    "relu": lambda x: where(apply("lt", 0, x), x, 0), "gelu": gelu,
    "softplus": lambda x, beta=1, _=20: apply("div", softplus(apply("mul", x, beta)), beta),
    "silu": lambda x: apply("mul", x, apply("sigmoid", x)),
    "exp2": lambda x: apply("pow", 2.0, x), "log10": lambda x: apply("div", apply("log", x), math.log(10)),
    "log1p": lambda x: apply("log", apply("add", x, 1)), "expm1": lambda x: apply("sub", apply("exp", x), 1),
    "rsqrt": lambda x: apply("div", 1, apply("sqrt", x)), "reciprocal": lambda x: apply("div", 1, x),
    "tan": lambda x: apply("div", apply("sin", x), apply("cos", x)),
    "ceil": lambda x: apply("neg", apply("floor", apply("neg", x))), "trunc": _truncated, "sign": _sign, "sgn": _sign,
    "to_copy": _cast, "clone": lambda x: x, "alias": lambda x: x,
}  # fmt: skip
# What depends on nothing but the shape and dtype of a number: what it is.
OF_SHAPE: dict[str, Any] = {
    "zeros_like": lambda n: 0, "ones_like": lambda n: 1, "new_zeros": lambda n: 0, "new_ones": lambda n: 1,
    "full_like": lambda n: n.args[1], "new_full": lambda n: n.args[2],
}  # fmt: skip
