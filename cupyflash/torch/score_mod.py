"""PyTorch's score_mod as a score function: run once on tensors without dimensions, and followed operator by operator.

What does not depend on the pair (tensors that it captures, and what it makes of them) is computed by PyTorch in each
call, and read as an array, so that it gets its gradient.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from ..interop import torch_, torch_ops
from ..rules import score_of
from ..score.fingerprint import fingerprint
from ..score.graph import Graph, Score
from ..score.value import Traced, apply, where
from .rows import LONGEST, REDUCTIONS, Element, Row, each
from .score_operators import (
    KEYWORDS,
    KINDS,
    OF_ONE_DTYPE,
    OF_SHAPE,
    OPERATORS,
    is_view,
    memory_of,
    name_of,
    tags_of,
    writes_to,
)
from .watch import WRITES_BY_PAIR, Trace

_KEPT = 256
_plans: dict[Any, Plan] = {}
_tracing = threading.RLock()  # PyTorch's tracer patches what all threads share


def traced(
    score_mod: Callable[..., Any], query: torch.Tensor, key: torch.Tensor
) -> tuple[Score, dict[str, torch.Tensor]]:
    """score_mod for this query, (B, H, L, E), and key, as `score` and `score_arrays` of attention."""
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
    like = None if known is None else (known, query.device, query.dtype, casts)
    plan = _plans.get(like)
    if plan is None:
        with _tracing:
            plan = Plan(score_mod, query, captured)
        if like is not None and plan.lasts:
            if len(_plans) >= _KEPT:
                _plans.clear()
            _plans[like] = plan
    off = plan.cut_off(captured, (query, key))
    if off and torch_ops.recorded(off):
        raise NotImplementedError(
            "score_mod computes without gradients (under torch.no_grad, or in a torch.autograd.Function), which is not "
            "followed: they would go through all that is computed; it may take the detach() of a captured tensor"
        )
    with ExitStack() as as_traced:
        for device in (x for x, cast in zip(("cpu", "cuda"), casts) if cast):
            as_traced.enter_context(torch.autocast(device, enabled=False))
        return plan.call(captured, query, key.shape[2])


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


class Plan:
    """A score_mod that has been run: its operators, and which of them depend on the pair."""

    def __init__(self, score_mod: Callable[..., Any], query: torch.Tensor, captured: list[torch.Tensor]) -> None:
        _check(score_mod)
        number = torch.float64 if query.dtype is torch.float64 else torch.float32
        place = [torch.zeros((), dtype=torch.int32, device=query.device) for _ in range(4)]
        watch = Trace()
        try:
            # (Tangents are for `call` to follow.)
            with torch.inference_mode(False), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(False), watch:
                score = torch.zeros((), dtype=number, device=query.device)
                module = make_fx(lambda *x: score_mod(*x))(score, *place)
        except RuntimeError as error:
            if "trying to get value out of a tracing tensor" not in str(error):
                raise
            raise TypeError(
                "score_mod hands a number of the pair to what asks for its value (as range and narrow do); it must "
                "compute with it, choose with torch.where, and read elements by it"
            ) from None
        self.lasts = not watch.looked  # else another value of a tensor may be another function
        self.nodes = list(module.graph.nodes)
        # Indexing is marked so, too, where only its booleans do that: Watch sees them.
        if any(torch.Tag.dynamic_output_shape in tags_of(n) and name_of(n) != "index" for n in self.nodes):
            self.lasts = False  # a shape that follows from values may be looked at
        self.fixed: dict[Any, torch.Tensor] = {}
        self.at: dict[Any, int] = {}  # nodes that are tensors which the function captures: where they are among those
        self.pair: set[Any] = {n for n in self.nodes if n.op == "placeholder"}
        self.of_shape: set[Any] = set()  # of which only the form is the pair's
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
                if name_of(n) in OF_SHAPE:
                    made.add(n)
                    self.of_shape.add(n)
                else:
                    self.pair.add(n)
            elif torch.Tag.nondeterministic_seeded in tags_of(n):  # drawn in each call
                continue
            elif n.op == "call_function" and all(m in made for m in inputs):
                made.add(n)
        self.cut = _behind({n for n in self.nodes if n.name in watch.cut})
        self.writes = self._look_at_writes(made)
        used = {m for n in self.nodes if n in self.pair or n.op == "output" for m in n.all_input_nodes} - self.pair
        plain = {n for n in used & made if n.op == "call_function" and n.meta["val"].dim() == 0 and not self.writes}
        self.numbers = {n: x.item() for n, x in self._computed([], plain).items()}
        self.reads = {n: f"a{i}" for i, n in enumerate(sorted(used - plain, key=self.nodes.index))}
        self.scores: dict[Any, Score] = {}
        module.graph.owning_module = None  # which holds the tensors of this first call

    def _look_at_writes(self, made: set[Any]) -> bool:
        """Whether something that does not depend on the pair is written in place: then its nodes have an order.
        NotImplementedError where the pair would have to see what was there before."""
        read: set[Any] = set()  # memory, by the pair so far
        views = {memory_of(n) for n in self.nodes if is_view(n)}
        found = False
        for n in self.nodes:
            to = writes_to(n)
            if n in self.pair:
                if any(m not in self.pair and (m.meta["val"].dim() or memory_of(m) is not m) for m in to):
                    raise NotImplementedError(WRITES_BY_PAIR)
                if any(memory_of(m) in views for m in to):
                    raise NotImplementedError(
                        f"score_mod writes ({n.target}) into what it has another view of; it must make a new one"
                    )
            elif to:
                found = True
                if any(of.op == "get_attr" and of not in made for of in map(memory_of, to)):
                    raise NotImplementedError(
                        f"score_mod writes ({n.target}) into a tensor that it captures; it must write into its clone()"
                    )
                if any(memory_of(m) in read for m in to):
                    raise NotImplementedError(
                        f"score_mod writes ({n.target}) into a tensor of which it has read elements before; it must "
                        "write into a clone()"
                    )
            if n in self.pair or n.op == "output":
                read.update(memory_of(m) for m in n.all_input_nodes if m not in self.pair)
        return found

    def cut_off(self, captured: list[torch.Tensor], of_scores: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """What is computed with while gradients are off; of scores those that they are made of."""
        found: list[torch.Tensor] = []
        for n in self.cut:
            if n.op == "placeholder":
                found += of_scores
            else:
                found.append(captured[self.at[n]] if n in self.at else self.fixed[n])
        return found

    def _computed(self, captured: list[torch.Tensor], wanted: Any) -> dict[Any, torch.Tensor]:
        """Nodes that do not depend on the pair."""
        found: dict[Any, torch.Tensor] = {}

        def get(n: Any) -> torch.Tensor:
            if n not in found:
                if n.op == "get_attr":
                    found[n] = captured[self.at[n]] if n in self.at else self.fixed[n]
                elif n in self.of_shape:
                    like = n.meta["val"]
                    found[n] = torch.full(like.shape, OF_SHAPE[name_of(n)](n), dtype=like.dtype, device=like.device)
                else:
                    args, kwargs = torch.fx.map_arg((n.args, n.kwargs), get)
                    found[n] = n.target(*args, **kwargs)
            return found[n]

        if self.writes and wanted:
            for n in self.nodes:
                if n.op == "call_function" and n not in self.pair:
                    get(n)
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
        name = name_of(n)
        if name == "index" or name == "select":
            args = torch.fx.map_arg(n.args, known.__getitem__)
            return self._element(n, name, *args)
        function = OPERATORS.get(name) or REDUCTIONS.get(name)
        if function is None:
            raise NotImplementedError(
                f"score_mod calls {n.target}, which is not known here; it can use + - * / // % **, comparisons, & | ^ "
                "~, abs, where, minimum, maximum, clamp, exp, log, sqrt, tanh, sigmoid, sin, cos, tan, atan2, "
                "erf, gelu, softplus, floor, indexing, sum, mean, amax, amin and dot of rows, and anything on tensors "
                "before they are indexed: x.prod(-1)[h] for x[h].prod()"
            )
        args = torch.fx.map_arg(n.args, lambda m: _plain(n, known[m]))
        if name in OF_ONE_DTYPE:
            args = tuple(_beside(n, x) for x in args)
        kwargs = {key: x for key, x in n.kwargs.items() if key in KEYWORDS and x is not None}
        wanted = n.meta["val"].dtype

        def whole(x: Any) -> Any:
            return self._as(wanted, x) if isinstance(x, Traced) else x

        def run(*args: Any) -> Any:
            if wanted is torch.int64 and name in ("add", "sub", "rsub", "mul"):  # of booleans and numbers, too
                args = tuple(x.astype("int64") if isinstance(x, Traced) else x for x in args)
            return whole(function(*args, **kwargs))

        try:
            return each(run, args) if name in OPERATORS else each(whole, (function(*args),))
        except TypeError as error:  # of kinds of numbers that do not fit
            raise TypeError(f"score_mod calls {n.target}, and {error}") from None

    def _as(self, dtype: torch.dtype, x: Traced) -> Traced:
        """A number as one of this dtype: integers keep the bits that it has, as PyTorch's do."""
        graph, kind = x._graph, "float" if dtype.is_floating_point else KINDS.get(dtype, "int")
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


def _behind(nodes: set[Any]) -> list[Any]:
    """The tensors, and the numbers of the pair, through which gradients would reach these nodes."""
    found, seen, left = [], set[Any](), [n for n in nodes if _is_float(n)]
    while left:
        n = left.pop()
        if n in seen or not _is_float(n) or name_of(n) == "detach":
            continue
        seen.add(n)
        left += n.all_input_nodes
        if n.op in ("placeholder", "get_attr"):
            found.append(n)
    return found


def _is_float(n: Any) -> bool:
    return bool(getattr(n.meta.get("val"), "is_floating_point", lambda: n.op == "get_attr")())


def _beside(n: Any, x: Any) -> Any:
    """A number of Python's as what it is beside the one tensor of an operator, of integers: what does not fit comes in
    at the other end."""
    of = [m.meta["val"].dtype for m in n.all_input_nodes]
    if type(x) is not int or len(of) != 1 or of[0].is_floating_point or of[0] is torch.bool:
        return x
    limits = torch.iinfo(of[0])
    return (x - limits.min) % 2**limits.bits + limits.min


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
