"""A score function as data: operations on numbers, in the order in which they are computed.

A graph knows nothing of Python functions, CUDA or NumPy. Equal operations are one node, and what is known already is computed
while it is built.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KINDS = ("bool", "int", "long", "float")  # 32 and 64 bits; float is what scores are computed in
VARIABLES = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
_KINDS_OF = {"bool": "bool", "int32": "int", "int64": "long"}  # dtypes that are no floats


class Node(NamedTuple):
    """An operation on earlier nodes. `value` is what a constant is, as Python writes it, or which array is read."""

    op: str
    kind: str  # of its result, of KINDS
    args: tuple[int, ...] = ()
    value: str = ""


class ScoreArray(NamedTuple):
    """An array that a score function reads."""

    name: str
    dtype: str
    rank: int
    wide: bool = False  # whether offsets of its elements may have more than 32 bits

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)

    @property
    def key(self) -> str:
        """What it is called among the arrays of a call."""
        return f"score_arrays[{self.name!r}]"


def kind_of(dtype: str) -> str:
    return _KINDS_OF.get(dtype, "float")


# Of operations: what they take and give. "same": the widest kind of their operands, "int" at least; "whole": that, but no
# float; "float"; "truth": booleans, or bits of integers; "compare": from the widest kind to bool.
RULES = {
    **dict.fromkeys(("add", "sub", "mul", "minimum", "maximum", "neg", "abs"), "same"),
    **dict.fromkeys(("floordiv", "mod", "truncdiv", "truncmod", "shl", "shr"), "whole"),
    **dict.fromkeys(
        ("div", "pow", "exp", "log", "log2", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor"), "float"
    ),
    **dict.fromkeys(("and", "or", "xor", "not"), "truth"),
    **dict.fromkeys(("lt", "le", "eq", "ne"), "compare"),
}  # fmt: skip


def _truncdiv(x: int, y: int) -> int:
    return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)


_FOLD: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "minimum": min, "maximum": max, "neg": operator.neg,
    "abs": abs, "floordiv": operator.floordiv, "mod": operator.mod, "truncdiv": _truncdiv,
    "truncmod": lambda x, y: x - y * _truncdiv(x, y), "shl": operator.lshift, "shr": operator.rshift,
    "div": operator.truediv, "pow": operator.pow, "exp": math.exp, "log": math.log, "log2": math.log2, "sqrt": math.sqrt,
    "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "sin": math.sin, "cos": math.cos, "floor": math.floor,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lt": operator.lt, "le": operator.le,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


class Graph:
    """Nodes under construction; a node is known by its number."""

    def __init__(self, nodes: tuple[Node, ...] = ()) -> None:
        self.nodes = list(nodes)
        self._known = {node: n for n, node in enumerate(nodes)}

    def kind(self, n: int) -> str:
        return self.nodes[n].kind

    def add(self, node: Node) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def variable(self, name: str) -> int:
        return self.add(Node(name, VARIABLES[name]))

    def constant(self, x: bool | float) -> int:
        # torch.compile makes a number of a symbol here, and nearly nowhere else
        ((x, _),) = itertools.groupby([x], key=lambda y: y)
        kind = "bool" if isinstance(x, bool) else "float"
        if kind != "bool" and isinstance(x, int):
            kind = "int" if -(2**31) <= x < 2**31 else "long"
            if not -(2**63) <= x < 2**63:
                raise TypeError("score computes with an integer of more than 64 bits")
        return self.add(Node("const", kind, (), repr(x)))

    def known(self, n: int) -> Any:
        """The number that a node is, or None where it is not constant."""
        node = self.nodes[n]
        if node.op != "const":
            return None
        if node.kind == "bool":
            return node.value == "True"
        return float(node.value) if node.kind == "float" else int(node.value)

    def read(self, array: int, kind: str, index: tuple[int, ...]) -> int:
        return self.add(Node("read", kind, index, repr(array)))

    def to(self, kind: str, n: int) -> int:
        """A number as one of another kind; from float to integers towards 0."""
        if self.kind(n) == kind:
            return n
        x = self.known(n)
        if x is not None and not (kind in ("int", "long") and isinstance(x, float)):
            if kind == "float":
                return self.constant(float(x))
            if kind == "bool":
                return self.constant(bool(x))
        return self.add(Node("to", kind, (n,)))

    def where(self, condition: int, x: int, y: int) -> int:
        kind = self.widest(x, y)
        condition, x, y = self.to("bool", condition), self.to(kind, x), self.to(kind, y)
        known = self.known(condition)
        if known is not None or x == y:
            return y if known is False else x
        return self.add(Node("where", kind, (condition, x, y)))

    def widest(self, *args: int) -> str:
        return KINDS[max([KINDS.index(self.kind(n)) for n in args])]

    def apply(self, op: str, *args: int) -> int:
        """An operation of RULES; TypeError where it does not take such operands."""
        rule, kind = RULES[op], self.widest(*args)
        if kind == "float" and rule in ("whole", "truth"):
            raise TypeError("it takes integers" + (" or booleans" if rule == "truth" else "") + ", not floats")
        if rule == "float":
            kind = "float"
        elif kind == "bool" and rule != "truth":
            kind = "int"
        args = tuple(self.to(kind, n) for n in args)
        result = "bool" if rule == "compare" else kind
        simple = self._simple(op, args)
        return simple if simple is not None else self.add(Node(op, result, args))

    def _simple(self, op: str, args: tuple[int, ...]) -> int | None:
        """The same as something known, or as an operand; None where it is neither."""
        known = [self.known(n) for n in args]
        if None not in known and op in _FOLD:
            try:
                return self.constant(_converted(_FOLD[op](*known), self.kind(args[0]), op))
            except (ArithmeticError, ValueError, TypeError):  # what NumPy and CUDA make of it
                return None
        if len(args) != 2:
            return None
        (x, y), (a, b) = args, known
        whole = self.kind(x) != "float"  # else 0 * x may be NaN, and 0 + x is not -0
        if b == 0 and op in ("add", "sub") or a == 0 and op == "add":
            return x if b == 0 else y
        if b == 1 and op in ("mul", "div") or a == 1 and op == "mul":
            return x if b == 1 else y
        if b == 1 and op == "pow":
            return x
        if whole and op == "mul" and 0 in (a, b):
            return self.constant(0)
        return None

    def pruned(self, *roots: int) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The nodes that these need, in order, and the roots' numbers among them."""
        needed, todo = set(), list(roots)
        while todo:
            n = todo.pop()
            if n not in needed:
                needed.add(n)
                todo += self.nodes[n].args
        number = {n: new for new, n in enumerate(sorted(needed))}
        nodes = tuple(
            node._replace(args=tuple(number[m] for m in node.args)) for node in (self.nodes[n] for n in sorted(needed))
        )
        return nodes, tuple(number[n] for n in roots)


def _converted(x: Any, kind: str, op: str) -> Any:
    return float(x) if kind == "float" and RULES[op] != "compare" else x


@dataclass(frozen=True, eq=False)
class Score:
    """A score function that has been traced: what is asked of a problem, so hashable and without any data."""

    arrays: tuple[ScoreArray, ...]
    nodes: tuple[Node, ...]
    root: int  # the new score
    keys: tuple[str, ...] = field(init=False)  # what the arrays are called among those of a call
    data: str = field(init=False)  # all of it but `wide`, which follows from the arrays of a call

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.arrays, self.nodes, self.root)))
        object.__setattr__(self, "keys", tuple(x.key for x in self.arrays))
        object.__setattr__(self, "data", json.dumps([[x[:3] for x in self.arrays], self.nodes, self.root]))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Score):
            return NotImplemented
        return (self.arrays, self.nodes, self.root) == (other.arrays, other.nodes, other.root)

    @classmethod
    def of(cls, data: str, wide: tuple[bool, ...]) -> Score:
        """What has such `data`; `wide` of each array."""
        arrays, nodes, root = json.loads(data)
        return cls(
            tuple(ScoreArray(name, dtype, rank, w) for (name, dtype, rank), w in zip(arrays, wide, strict=True)),
            tuple(Node(op, kind, tuple(args), value) for op, kind, args, value in nodes),
            root,
        )

    def __str__(self) -> str:
        return self.text(self.root) if len(self.nodes) <= 24 else f"of {len(self.nodes)} operations"

    def array(self, key: str) -> ScoreArray | None:
        """The array that is called `key` among those of a call."""
        return next((x for x in self.arrays if x.key == key), None)

    def text(self, n: int) -> str:
        """A node as one expression, in which what is used twice stands twice."""
        op, kind, args, value = self.nodes[n]
        if op in VARIABLES:
            return op
        if op == "const":
            return value
        inner = ", ".join(self.text(m) for m in args)
        if op == "read":
            return f"{self.arrays[int(value)].name}[{inner}]"
        return f"{kind if op == 'to' else op}({inner})"


@functools.lru_cache(256)
def folded(score: Score, batch: int, mapped: tuple[str, ...]) -> Score:
    """The same for a call whose batch is that of several calls, of `batch` entries each, one behind the other. Arrays called as
    in `mapped` have one entry for each of these calls in front."""
    graph, numbers = Graph(), list[int]()
    b, size = graph.variable("b"), graph.constant(batch)
    call, entry = graph.apply("floordiv", b, size), graph.apply("mod", b, size)
    if batch == 1:
        call, entry = b, graph.constant(0)
    for node in score.nodes:
        args = tuple(numbers[m] for m in node.args)
        if node.op == "read" and score.arrays[int(node.value)].key in mapped:
            args = (call, *args)
        numbers.append(entry if node.op == "b" else graph.add(node._replace(args=args)))
    nodes, (root,) = graph.pruned(numbers[score.root])
    arrays = tuple(x._replace(rank=x.rank + 1, wide=True) if x.key in mapped else x for x in score.arrays)
    return Score(arrays, nodes, root)
