"""Numbers while a score function is traced: they look like numbers, and write down what is done to them."""

from __future__ import annotations

import linecache
import math
import numbers
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

from .graph import RULES, Graph, ScoreArray, kind_of

_PACKAGE = Path(__file__).resolve().parent.parent
_KINDS = {
    bool: "bool", int: "int", float: "float", "bool": "bool", "int32": "int", "int64": "long", "float32": "float",
    "float64": "float", "float16": "float", "bfloat16": "float",
}  # fmt: skip


def place() -> str:
    """Where the user's function stands: " (file, line n: text)"."""
    frame = sys._getframe(1)
    while frame is not None and _ours(frame):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_globals.get("__name__", "").startswith("torch._dynamo"):
        return ""
    return _line(frame.f_code.co_filename, frame.f_lineno)


def _ours(frame: types.FrameType) -> bool:
    return _PACKAGE in Path(frame.f_code.co_filename).resolve().parents


def _line(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f" ({file}, line {line}{': ' + text if text else ''})"


place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it, instead of reading it


def refusal(why: str) -> TypeError:
    return TypeError(f"score {why}{place()}")


def refuse(why: str) -> NoReturn:
    raise refusal(why)


_CALLED = "of a score function"
_GIVEN = "arrays that it reads must be given by name in score_arrays, and be parameters of the function"


def refusal_of_others(error: TypeError | IndexError) -> TypeError | None:
    """What to say where another library, or Python, does not take a number of the pair; None for any other error."""
    at = error.__traceback__
    while at is not None and _ours(at.tb_frame):
        at = at.tb_next
    if at is None or not any(name in str(error) for name in (Traced.__name__, _CALLED)):
        return None
    place_ = _line(at.tb_frame.f_code.co_filename, at.tb_lineno)
    return TypeError(
        "score hands a number of the pair to what does not take it; it must use functions of cupyflash.score, or "
        f"NumPy's, and {_GIVEN}{place_}: {str(error).splitlines()[0]}"
    )


class Traced:
    """A number that a score function computes with: s, b, h, i, j, an element of an array, and what comes of them."""

    __slots__ = ("_graph", "_n")
    __array_priority__ = 1000.0

    def __init__(self, graph: Graph, n: int) -> None:
        self._graph, self._n = graph, n

    def astype(self, dtype: Any) -> Traced:
        """As bool, int or float (or one of NumPy's names for them); from float to int towards 0."""
        known = _KINDS.get(dtype) or _KINDS.get(getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch."))
        if known is None:
            refuse(f"has astype({dtype!r}); it must be bool, int or float")
        return Traced(self._graph, self._graph.to(known, self._n))

    def __repr__(self) -> str:
        return f"<{self._graph.kind(self._n)} {_CALLED}>"

    # What cannot be written down: it would need a number.

    def __bool__(self) -> bool:
        raise refusal(
            "decides by a number that depends on the pair, with if, and, or, not, or a comparison of three; it must "
            "choose with cupyflash.score.where, and combine with &, | and ~"
        )

    def __float__(self) -> float:
        refuse(
            "hands a number of the pair to a function that wants a plain float; it must use those of cupyflash.score, "
            "or NumPy's"
        )

    def __int__(self) -> int:
        refuse("makes a plain int of a number of the pair; it must use astype(int)")

    def __index__(self) -> int:
        raise refusal(f"uses a number of the pair as a plain index; {_GIVEN}")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        refuse(
            "hands a number of the pair to a function that wants an array; it must use those of cupyflash.score, or "
            f"NumPy's, and {_GIVEN}"
        )

    def __iter__(self) -> Any:
        refuse("goes through a number of the pair as if it were a sequence; it is one number")

    def __getitem__(self, index: Any) -> Any:
        refuse("takes an element of a number of the pair as if it were an array; it is one number")

    def __len__(self) -> int:
        raise refusal(
            f"asks for the length of a number of the pair as if it were a sequence; it is one number, and {_GIVEN}"
        )

    def __round__(self, digits: Any = None) -> Any:
        refuse("rounds a number of the pair; it must use floor(x + 0.5)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that libraries look for
            raise AttributeError(name)
        refuse(f"asks a number of the pair for its {name!r}, which it has not; it has operators and astype")

    __hash__ = None  # type: ignore[assignment]

    # What can.

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or kwargs or name is None:
            refuse(f"calls numpy.{ufunc.__name__}, which is not known here; it must use a function of cupyflash.score")
        return name(*inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = {"where": where, "clip": clip}.get(function.__name__)
        if kwargs or name is None:
            refuse(
                f"calls numpy.{function.__name__}, which is not known here; it must use a function of cupyflash.score"
            )
        return name(*args)

    def __add__(self, x: Any) -> Traced:
        return _traced("add", self, x)

    def __radd__(self, x: Any) -> Traced:
        return _traced("add", x, self)

    def __sub__(self, x: Any) -> Traced:
        return _traced("sub", self, x)

    def __rsub__(self, x: Any) -> Traced:
        return _traced("sub", x, self)

    def __mul__(self, x: Any) -> Traced:
        return _traced("mul", self, x)

    def __rmul__(self, x: Any) -> Traced:
        return _traced("mul", x, self)

    def __truediv__(self, x: Any) -> Traced:
        return _traced("div", self, x)

    def __rtruediv__(self, x: Any) -> Traced:
        return _traced("div", x, self)

    def __floordiv__(self, x: Any) -> Traced:
        return _traced("floordiv", self, x)

    def __rfloordiv__(self, x: Any) -> Traced:
        return _traced("floordiv", x, self)

    def __mod__(self, x: Any) -> Traced:
        return _traced("mod", self, x)

    def __rmod__(self, x: Any) -> Traced:
        return _traced("mod", x, self)

    def __pow__(self, x: Any) -> Any:
        return power(self, x)

    def __rpow__(self, x: Any) -> Any:
        return power(x, self)

    def __lshift__(self, x: Any) -> Traced:
        return _traced("shl", self, x)

    def __rlshift__(self, x: Any) -> Traced:
        return _traced("shl", x, self)

    def __rshift__(self, x: Any) -> Traced:
        return _traced("shr", self, x)

    def __rrshift__(self, x: Any) -> Traced:
        return _traced("shr", x, self)

    def __and__(self, x: Any) -> Traced:
        return _traced("and", self, x)

    def __rand__(self, x: Any) -> Traced:
        return _traced("and", x, self)

    def __or__(self, x: Any) -> Traced:
        return _traced("or", self, x)

    def __ror__(self, x: Any) -> Traced:
        return _traced("or", x, self)

    def __xor__(self, x: Any) -> Traced:
        return _traced("xor", self, x)

    def __rxor__(self, x: Any) -> Traced:
        return _traced("xor", x, self)

    def __invert__(self) -> Traced:
        return _traced("not", self)

    def __neg__(self) -> Traced:
        return _traced("neg", self)

    def __pos__(self) -> Traced:
        return self

    def __abs__(self) -> Traced:
        return _traced("abs", self)

    def __lt__(self, x: Any) -> Traced:
        return _traced("lt", self, x)

    def __le__(self, x: Any) -> Traced:
        return _traced("le", self, x)

    def __gt__(self, x: Any) -> Traced:
        return _traced("lt", x, self)

    def __ge__(self, x: Any) -> Traced:
        return _traced("le", x, self)

    def __eq__(self, x: object) -> Traced:  # type: ignore[override]
        return _traced("eq", self, x)

    def __ne__(self, x: object) -> Traced:  # type: ignore[override]
        return _traced("ne", self, x)


class TracedArray:
    """An array that a score function reads: indexing gives an element."""

    __slots__ = ("_array", "_graph", "_number")

    def __init__(self, graph: Graph, number: int, array: ScoreArray) -> None:
        self._graph, self._number, self._array = graph, number, array

    def __getitem__(self, index: Any) -> Traced:
        index = index if isinstance(index, tuple) else (index,)
        name, rank = self._array.name, self._array.rank
        if len(index) != rank:
            row = f"; a sum over a row is written out, as sum({name}[i, n] * {name}[j, n] for n in range(8))"
            said = f"reads {name} with {len(index)} indices; it must have {rank}, as many as {name} has dimensions"
            refuse(said + row * (len(index) < rank))
        numbers_ = []
        for x in index:
            n = lift(self._graph, x, f"an index of {name}")
            if self._graph.kind(n) == "float":
                refuse(f"reads {name} at a float; indices must be integers: use // for /, or astype(int)")
            numbers_.append(self._graph.to("int", n) if self._graph.kind(n) == "bool" else n)
        return Traced(self._graph, self._graph.read(self._number, kind_of(self._array.dtype), tuple(numbers_)))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        refuse(f"computes with {self._array.name} as a whole; it must read elements, as in {self._array.name}[h, i]")

    def __iter__(self) -> Any:  # without it Python would count up to an end that there is not
        refuse(f"goes through {self._array.name}; it must read elements, as in {self._array.name}[h, i]")

    def __contains__(self, x: Any) -> bool:
        raise refusal(f"looks for a number in {self._array.name}; it must read elements, and compare them")

    def __len__(self) -> int:
        raise refusal(
            f"asks for the length of {self._array.name}; it must know it, or get it as a plain number from outside"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = self._array.name
        refuse(f"asks {whole} for its {name!r}; it must read elements, as in {whole}[h, i]")


def lift(graph: Graph, x: Any, what: str = "an operand") -> int:
    """The node of a number, traced or plain."""
    if isinstance(x, Traced):
        if x._graph is not graph:
            refuse("computes with a number of another call; it must use its own parameters alone")
        return x._n
    if isinstance(x, TracedArray):
        name = x._array.name
        refuse(f"computes with {name} as a whole; it must read elements, as in {name}[h, i]")
    if type(x).__name__ in ("bool", "bool_"):  # NumPy's too
        return graph.constant(bool(x))
    if isinstance(x, numbers.Integral):
        return graph.constant(int(x))
    if isinstance(x, numbers.Real) or type(x).__name__ == "bfloat16":
        return graph.constant(float(x))
    if hasattr(x, "shape"):
        refuse(f"has a {type(x).__name__} as {what}; {_GIVEN}")
    refuse(f"has {x!r} as {what}; it must be a number")


def _graph_of(args: tuple[Any, ...]) -> Graph | None:
    for x in args:
        if isinstance(x, Traced):
            return x._graph
    return None


def apply(op: str, *args: Any) -> Any:
    """An operation on numbers of which some are traced."""
    if _graph_of(args) is None:  # plain numbers: what it would be
        graph = Graph()
        return graph.known(_apply(graph, op, args))
    return _traced(op, *args)


def _traced(op: str, *args: Any) -> Traced:
    graph = _graph_of(args)
    assert graph is not None
    return Traced(graph, _apply(graph, op, args))


def _apply(graph: Graph, op: str, args: tuple[Any, ...]) -> int:
    nodes = [lift(graph, x) for x in args]
    try:
        return graph.apply(op, *nodes)
    except TypeError as error:
        refuse(f"has an operation {op!r} of {' and '.join(graph.kind(n) for n in nodes)}: {error}")


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y. What is not chosen does not matter, nor does its derivative, NaN or not."""
    graph = _graph_of((condition, x, y))
    if graph is None:
        return x if condition else y
    nodes = [lift(graph, value) for value in (condition, x, y)]
    return Traced(graph, graph.where(*nodes))


def power(x: Any, y: Any) -> Any:
    """x ** y, in floats; of an integer y from 0 to 8 as products."""
    if isinstance(y, numbers.Integral) and not isinstance(y, bool) and 0 <= int(y) <= 8 and isinstance(x, Traced):
        result: Any = 1
        for _ in range(int(y)):
            result = x if result is not x and isinstance(result, int) else apply("mul", result, x)
        return result
    return apply("pow", x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """minimum(maximum(x, low), high)."""
    return minimum(maximum(x, low), high)


def softplus(x: Any) -> Any:
    """log(1 + exp(x))."""
    return maximum(x, 0) + log(1 + exp(-absolute(x)))


def gelu(x: Any, approximate: str = "none") -> Any:
    """x times the share of a normal distribution that lies below x; approximate="tanh": PyTorch's and JAX's other."""
    if approximate == "none":
        return x * (0.5 + 0.5 * erf(x * 0.5**0.5))
    return x * (0.5 + 0.5 * tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def _function(op: str, says: str) -> Any:
    def function(*args: Any) -> Any:
        return apply(op, *args)

    assert op in RULES
    function.__name__, function.__doc__ = op, says
    return function


exp = _function("exp", "e to the power of x.")
log = _function("log", "Natural logarithm.")
log2 = _function("log2", "Logarithm in base 2.")
sqrt = _function("sqrt", "Square root.")
tanh = _function("tanh", "Hyperbolic tangent; in kernels for 16-bit formats as exact as these.")
sigmoid = _function("sigmoid", "1 / (1 + exp(-x)).")
sin = _function("sin", "Sine.")
cos = _function("cos", "Cosine.")
floor = _function(
    "floor", "The largest whole number that is not above x, as a float; astype(int) makes an integer of it."
)
erf = _function("erf", "The error function.")
atan2 = _function("atan2", "The angle of the point (y, x), as atan2(y, x); NumPy's arctan2.")
absolute = _function("abs", "|x|; its derivative at 0 is 0.")
minimum = _function("minimum", "The smaller of two; where they are equal, each has half of the derivative.")
maximum = _function("maximum", "The larger of two; where they are equal, each has half of the derivative.")

_UFUNCS: dict[str, Any] = {
    **{op: _function(op, "") for op in ("exp", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor", "minimum",
        "maximum")},
    "add": _function("add", ""), "subtract": _function("sub", ""), "multiply": _function("mul", ""),
    "divide": _function("div", ""), "true_divide": _function("div", ""), "floor_divide": _function("floordiv", ""),
    "remainder": _function("mod", ""), "negative": _function("neg", ""), "absolute": absolute, "fabs": absolute,
    "arctan2": atan2,
    "power": power, "float_power": power, "less": _function("lt", ""), "less_equal": _function("le", ""),
    "equal": _function("eq", ""), "not_equal": _function("ne", ""), "greater": lambda x, y: apply("lt", y, x),
    "greater_equal": lambda x, y: apply("le", y, x), "bitwise_and": _function("and", ""),
    "bitwise_or": _function("or", ""), "bitwise_xor": _function("xor", ""), "invert": _function("not", ""),
    "logical_and": lambda x, y: apply("and", truth(x), truth(y)),
    "logical_or": lambda x, y: apply("or", truth(x), truth(y)),
    "logical_not": lambda x: apply("not", truth(x)), "left_shift": _function("shl", ""),
    "right_shift": _function("shr", ""),
}  # fmt: skip


def truth(x: Any) -> Any:
    """Whether a number is not 0."""
    return x.astype(bool) if isinstance(x, Traced) else bool(x)
