"""PyTorch's score_mod as a score function: run once on tensors without dimensions, and followed operator by operator.

What does not depend on the pair (tensors that it captures, and what it makes of them) is computed by PyTorch in each
call, and read as an array, so that it gets its gradient.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ..interop import torch_
from ..rules import score_of
from ..score.fingerprint import fingerprint
from ..score.graph import Graph, Score
from ..score.value import Traced, apply, gelu, power, softplus, truth, where
from .rows import LONGEST, REDUCTIONS, Element, Row, each

_KEPT = 256
_plans: dict[Any, Plan] = {}
_tracing = threading.RLock()  # PyTorch's tracer patches what all threads share


def traced(score_mod: Callable[..., Any], query: torch.Tensor, keys: int) -> tuple[Score, dict[str, torch.Tensor]]:
    """score_mod for this query, (B, H, L, E), and so many keys, as `score` and `score_arrays` of attention."""
    if torch._C._are_functorch_transforms_active():  # which wrap the tensors that a trace would follow
        raise NotImplementedError(
            "score_mod is given under torch.func (grad, vjp, vmap); give the function to cupyflash.attention as score, "
            "with the tensors that it reads as score_arrays"
        )
    captured: list[torch.Tensor] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None
        captured.append(x)
        first = next(at for at, y in enumerate(captured) if y is x)  # the same one may be captured twice
        return ("tensor", first, x.dtype, tuple(x.shape), x.stride(), x.device)

    known = fingerprint(score_mod, leaf)
    # The casts of autocast are traced, too: of tensors on either device.
    casts = tuple(torch.is_autocast_enabled(x) and torch.get_autocast_dtype(x) for x in ("cpu", "cuda"))
    key = None if known is None else (known, query.device, query.dtype, casts)
    plan = _plans.get(key)
    if plan is None:
        with _tracing:
            plan = Plan(score_mod, query, captured)
        if key is not None and plan.lasts:
            if len(_plans) >= _KEPT:
                _plans.clear()
            _plans[key] = plan
    return plan.call(captured, query, keys)


def _check(score_mod: Any) -> None:
    must = "it must be a function of (score, b, h, q_idx, kv_idx)"
    if not callable(score_mod):
        raise TypeError(f"score_mod is a {type(score_mod).__name__}; {must}")
    try:
        inspect.signature(score_mod).bind(*range(5))
    except TypeError as error:
        raise TypeError(f"score_mod is {score_mod!r}; {must} ({error})") from None
    except ValueError:  # of C, which tells nothing
        pass


class Watch(TorchFunctionMode):
    """While a score_mod runs: table[h] reads an element, as under PyTorch's own vmap, and who looks at a number is
    noticed."""

    looked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in index):
                self.looked = True  # by values: how many elements there are
            if any(isinstance(x, torch.Tensor) for x in index) and all(map(_known, index)):
                return torch.ops.aten.index.Tensor(args[0], [_INDICES.get(type(x), lambda x: x)(x) for x in index])
        elif func in _READS and args[0].dim() == 0:  # of which a trace would see nothing
            raise TypeError(
                "score_mod hands a number of the pair to NumPy or Python; it must compute with functions of torch"
            )
        elif func in _LOOKS or func in _READS:
            self.looked = True
        return func(*args, **(kwargs or {}))


def _known(index: Any) -> bool:
    return isinstance(index, (int, torch.Tensor)) or (isinstance(index, slice) and index == slice(None))


_INDICES: dict[type, Any] = {int: torch.tensor, slice: lambda x: None}
_LOOKS = {getattr(torch.Tensor, name) for name in ("item", "__bool__", "__int__", "__float__", "__index__")}
_READS = {getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__")}


class Plan:
    """A score_mod that has been run: its operators, and which of them depend on the pair."""

    def __init__(self, score_mod: Callable[..., Any], query: torch.Tensor, captured: list[torch.Tensor]) -> None:
        _check(score_mod)
        number = torch.float64 if query.dtype is torch.float64 else torch.float32
        place = [torch.zeros((), dtype=torch.int32, device=query.device) for _ in range(4)]
        watch = Watch()
        try:
            # (Tangents are for `call` to follow.)
            with torch.inference_mode(False), torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), watch:
                module = make_fx(lambda *x: score_mod(*x))(torch.zeros((), dtype=number, device=query.device), *place)
        except RuntimeError as error:
            if "trying to get value out of a tracing tensor" not in str(error):
                raise
            raise TypeError(
                "score_mod decides by a number that depends on the pair (with if, and, or, not, int() or item()); it "
                "must choose with torch.where, and combine with &, | and ~"
            ) from None
        self.lasts = not watch.looked  # else another value of a tensor may be another function
        self.nodes = list(module.graph.nodes)
        # Indexing is marked so, too, where only its booleans do that: Watch sees them.
        if any(torch.Tag.dynamic_output_shape in _tags(n) and _name(n) != "index" for n in self.nodes):
            self.lasts = False  # a shape that follows from values may be looked at
        self.fixed: dict[Any, torch.Tensor] = {}
        self.at: dict[Any, int] = {}  # nodes that are tensors which the function captures: where they are among those
        self.pair: set[Any] = {n for n in self.nodes if n.op == "placeholder"}
        made: set[Any] = set()  # of no tensor at all: numbers
        for n in self.nodes:
            inputs = n.all_input_nodes
            if n.op == "get_attr":
                x = getattr(module, n.target)
                same = [at for at, y in enumerate(captured) if y is x]
                if same:
                    self.at[n] = same[0]
                    continue
                self.fixed[n] = x
                if all("lift_fresh" in str(m.target) for m in n.users):  # torch.tensor(...) in the function
                    made.add(n)
                else:
                    self.lasts = False  # found in an object, which may hold another one the next time
            elif n.op == "call_function" and any(m in self.pair for m in inputs):
                if _name(n) in _OF_SHAPE:
                    made.add(n)
                else:
                    self.pair.add(n)
            elif torch.Tag.nondeterministic_seeded in _tags(n):  # drawn in each call
                continue
            elif n.op == "call_function" and all(m in made for m in inputs):
                made.add(n)
        used = {m for n in self.nodes if n in self.pair or n.op == "output" for m in n.all_input_nodes} - self.pair
        plain = {n for n in used & made if n.op == "call_function" and n.meta["val"].dim() == 0}
        self.numbers = {n: x.item() for n, x in self._computed([], plain).items()}
        self.reads = {n: f"a{i}" for i, n in enumerate(sorted(used - plain, key=self.nodes.index))}
        self.scores: dict[Any, Score] = {}
        module.graph.owning_module = None  # which holds the tensors of this first call

    def _computed(self, captured: list[torch.Tensor], wanted: Any) -> dict[Any, torch.Tensor]:
        """Nodes that do not depend on the pair."""
        found: dict[Any, torch.Tensor] = {}

        def get(n: Any) -> torch.Tensor:
            if n not in found:
                if n.op == "get_attr":
                    found[n] = captured[self.at[n]] if n in self.at else self.fixed[n]
                elif _name(n) in _OF_SHAPE:
                    found[n] = torch.full((), _OF_SHAPE[_name(n)](n), dtype=n.meta["val"].dtype)
                else:
                    args, kwargs = torch.fx.map_arg((n.args, n.kwargs), get)
                    found[n] = n.target(*args, **kwargs)
            return found[n]

        return {n: get(n) for n in wanted}

    def call(
        self, captured: list[torch.Tensor], query: torch.Tensor, keys: int
    ) -> tuple[Score, dict[str, torch.Tensor]]:
        found = self._computed(captured, self.reads)
        arrays = {name: _readable(found[n], query) for n, name in self.reads.items()}
        lengths = (*query.shape[:3], keys)
        key = (lengths, query.dtype, tuple((x.dtype, x.shape, x.stride()) for x in arrays.values()))
        score = self.scores.get(key)
        if score is None:
            if len(self.scores) >= _KEPT:
                self.scores.clear()
            views = {name: torch_.view(x) for name, x in arrays.items()}
            run = _Run(self, {name: tuple(found[n].shape) for n, name in self.reads.items()}, lengths)
            score = self.scores[key] = score_of(run.score, views, torch_.view(query))  # type: ignore[assignment]
        assert score is not None
        return score, arrays


def _readable(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A tensor as `score_arrays` takes it: of a dtype and a rank that they have, where q is."""
    if x.dim() > 4:
        raise NotImplementedError(
            f"score_mod reads a tensor of shape {tuple(x.shape)}; it must have 4 dimensions at most: flatten() some"
        )
    if x.device != query.device:
        if x.dim():
            raise ValueError(
                f"score_mod reads a tensor of shape {tuple(x.shape)} on {x.device}, but query is on {query.device}; "
                "both must be on one device"
            )
        x = x.to(query.device)  # as PyTorch takes numbers from the CPU
    if x.is_floating_point() and x.dtype not in (query.dtype, torch.float32):
        x = x.to(query.dtype if query.dtype is torch.float64 else torch.float32)
    elif x.dtype in (torch.int8, torch.uint8, torch.int16):
        x = x.to(torch.int32)
    return x[None] if x.dim() == 0 else x


class _Run:
    """The operators of a plan on the numbers of a score function."""

    def __init__(self, plan: Plan, shapes: dict[str, tuple[int, ...]], lengths: tuple[int, ...]) -> None:
        self.plan, self.shapes, self.lengths = plan, shapes, lengths
        self.dtypes = [n.meta["val"].dtype for n in plan.reads]  # as they are captured
        self.ranges: list[tuple[float, float]] = []  # of nodes of the score's graph

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any, **arrays: Any) -> Any:
        known: dict[Any, Any] = dict(self.plan.numbers)
        for n, name in self.plan.reads.items():
            shape = self.shapes[name]
            known[n] = Element(arrays[name], shape, (None,) * len(shape)).number()
        variables = iter((s, b, h, i, j))
        for n in self.plan.nodes:
            if n.op == "placeholder":
                known[n] = next(variables)
            elif n.op == "output":
                found = _plain(n, known[n.args[0]]) if isinstance(n.args[0], torch.fx.Node) else None
                if found is None or isinstance(found, Row):
                    what = repr(n.args[0]) if found is None else f"{len(found)} numbers"
                    raise TypeError(
                        f"score_mod returns {what}; it must return the new score, a tensor without dimensions"
                    )
                return found
            elif n in self.plan.pair:
                known[n] = self._operator(n, known)
        raise AssertionError("a graph without output")

    def _operator(self, n: Any, known: dict[Any, Any]) -> Any:
        name = _name(n)
        if name == "index" or name == "select":
            args = torch.fx.map_arg(n.args, known.__getitem__)
            return self._element(n, name, *args)
        function = _OPERATORS.get(name) or REDUCTIONS.get(name)
        if function is None:
            raise NotImplementedError(
                f"score_mod calls {n.target}, which is not known here; it can use + - * / // % **, comparisons, & | ^ "
                "~, abs, where, minimum, maximum, clamp, exp, log, sqrt, tanh, sigmoid, sin, cos, tan, atan2, "
                "erf, gelu, softplus, floor, indexing, sum, mean, amax, amin and dot of rows, and anything on tensors "
                "before they are indexed: x.prod(-1)[h] for x[h].prod()"
            )
        args = torch.fx.map_arg(n.args, lambda m: _plain(n, known[m]))
        kwargs = {key: x for key, x in n.kwargs.items() if key in _KEYWORDS and x is not None}
        wanted = n.meta["val"].dtype

        def whole(x: Any) -> Any:
            return self._as(wanted, x) if isinstance(x, Traced) else x

        def run(*args: Any) -> Any:
            if wanted is torch.int64 and name in ("add", "sub", "rsub", "mul"):  # of booleans and numbers, too
                args = tuple(x.astype("int64") if isinstance(x, Traced) else x for x in args)
            return whole(function(*args, **kwargs))

        try:
            return each(run, args) if name in _OPERATORS else each(whole, (function(*args),))
        except TypeError as error:  # of kinds of numbers that do not fit
            raise TypeError(f"score_mod calls {n.target}, and {error}") from None

    def _as(self, dtype: torch.dtype, x: Traced) -> Traced:
        """A number as one of this dtype: integers keep the bits that it has, as PyTorch's do."""
        graph, kind = x._graph, "float" if dtype.is_floating_point else _KINDS.get(dtype, "int")
        if graph.kind(x._n) != kind:
            x = x.astype({"bool": bool, "float": float, "int": "int32", "long": "int64"}[kind])
        if kind == "int" and dtype is not torch.int32:
            limits = torch.iinfo(dtype)
            low, high = self._range(graph, x._n)
            if low < limits.min or high > limits.max:
                rest = 32 - limits.bits
                x = apply("and", x, limits.max) if limits.min == 0 else apply("shr", apply("shl", x, rest), rest)
        return x

    def _element(self, n: Any, name: str, x: Any, *rest: Any) -> Any:
        """Of indexing by numbers: x[i, ...] or x.select(axis, i)."""
        if not isinstance(x, Element):
            raise NotImplementedError(
                "score_mod indexes what depends on the pair; it must index tensors that it captures"
            )
        given = zip(x.free, rest[0]) if name == "index" else [(x.free[rest[0]], rest[1])]
        for axis, index in given:
            if isinstance(index, Element):
                raise NotImplementedError(
                    f"score_mod indexes by a tensor of shape {index.shape}; indices must be numbers"
                )
            if index is not None:
                x = x.at(axis, self._from_the_end(index, x.shape[axis]))
        return x.number()

    def _from_the_end(self, index: Any, length: int) -> Any:
        """An index as PyTorch has it, where negative ones count from the end."""
        if not isinstance(index, Traced):
            return int(index) + length if index < 0 else int(index)
        if index._graph.kind(index._n) in ("bool", "float"):
            raise TypeError(f"score_mod indexes by a {index._graph.kind(index._n)}; indices must be integers")
        return index if self._range(index._graph, index._n)[0] >= 0 else where(index < 0, index + length, index)

    def _range(self, graph: Graph, n: int) -> tuple[float, float]:
        """The least and the largest that an integer can be."""
        for m in range(len(self.ranges), n + 1):
            low, high = self._range_of(graph, m)
            bits = {"int": 31, "long": 63}.get(graph.kind(m))
            if (
                bits is not None and not -(2**bits) <= low <= high < 2**bits
            ):  # what does not fit comes in at the other end
                low, high = -(2**bits), 2**bits - 1
            self.ranges.append((low, high))
        return self.ranges[n]

    def _range_of(self, graph: Graph, n: int) -> tuple[float, float]:
        op, kind, args, number = graph.nodes[n]
        if op in ("b", "h", "i", "j"):
            return 0, self.lengths["bhij".index(op)] - 1
        value = graph.known(n)
        if value is not None:
            return value, value
        if kind == "bool":
            return 0, 1
        if op == "read" and kind != "float":
            limits = torch.iinfo(self.dtypes[int(number)])
            return limits.min, limits.max
        inner = [self.ranges[m] for m in args]
        if op == "where":
            (_, _), (a, b), (c, d) = inner
            return min(a, c), max(b, d)
        if op == "to":
            return inner[0]
        if op == "neg":
            return -inner[0][1], -inner[0][0]
        if op == "abs":
            ((a, b),) = inner
            return max(0, a, -b), max(-a, b)
        if op in ("add", "sub", "mul", "minimum", "maximum"):
            (a, b), (c, d) = inner
            if op == "add":
                return a + c, b + d
            if op == "sub":
                return a - d, b - c
            if op == "mul":
                ends = [0 if 0 in (x, y) else x * y for x in (a, b) for y in (c, d)]
                return min(ends), max(ends)
            least = min if op == "minimum" else max
            return least(a, c), least(b, d)
        if op == "and" and inner[1][0] >= 0:
            return 0, inner[1][1]
        if op == "shr" and inner[1][0] == inner[1][1] and 0 <= inner[1][0] < 32:
            return int(inner[0][0]) >> int(inner[1][0]), int(inner[0][1]) >> int(inner[1][0])
        if op in ("floordiv", "mod") and inner[1][0] > 0:
            (a, b), (c, d) = inner
            return (0, d - 1) if op == "mod" else (min(0, a), max(b, 0))
        return -math.inf, math.inf


def _plain(n: Any, x: Any) -> Any:
    if isinstance(x, Element):
        if (row := x.row()) is not None:
            return row
        raise NotImplementedError(
            f"score_mod computes ({n.target}) with a tensor of shape {x.shape} after it was read at "
            f"{len(x.index) - len(x.free)} indices that depend on the pair; it must read elements, as in table[h, i], "
            f"or rows of up to {LONGEST} numbers; what it computes of tensors before they are indexed may be anything: "
            "x.sum(-1)[h] for x[h].sum()"
        )
    return x


# ---- PyTorch's operators --------------------------------------------------------------------------------------------


def _name(n: Any) -> str:
    """Of the operator, whichever of its overloads it is, in place or not."""
    schema = getattr(n.target, "_schema", None)  # Python's own take a result out of several
    return "" if schema is None else str(schema.name).removeprefix("aten::").strip("_")


def _tags(n: Any) -> Any:
    """What PyTorch says of the operator."""
    return getattr(n.target, "tags", ())


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
_KEYWORDS = ("alpha", "rounding_mode", "dtype", "approximate")
_KINDS = {torch.bool: "bool", torch.int64: "long"}


def _simple(op: str) -> Any:
    return lambda *args: apply(op, *args)


_OPERATORS: dict[str, Any] = {
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
_OF_SHAPE: dict[str, Any] = {
    "zeros_like": lambda n: 0, "ones_like": lambda n: 1, "new_zeros": lambda n: 0, "new_ones": lambda n: 1,
    "full_like": lambda n: n.args[1], "new_full": lambda n: n.args[2],
}  # fmt: skip
