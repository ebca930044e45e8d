"""A score function as data: operations on numbers, in the order in which they are computed.

A graph knows nothing of Python functions, CUDA or NumPy. Equal operations are one node, and what is known already is
computed while it is built.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

KINDS = ("bool", "int", "long", "float")  # 32 and 64 bits; float is what scores are computed in
VARIABLES = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
TANGENT = "ts"  # of s: a variable of what is derived from a score function (score/derivative.py)
_KINDS_OF = {  # dtypes of arrays
    "bool": "bool", "int32": "int", "int64": "long", "float16": "float", "bfloat16": "float", "float32": "float",
    "float64": "float"
}  # fmt: skip
_RANKS = range(1, 5)


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
        return f"{_KEY}{self.name!r}]"


_KEY = "score_arrays["


def name_of(key: str) -> str | None:
    """The name of an array that a score function reads, from what it is called among those of a call; None for
    others."""
    return key[len(_KEY) + 1 : -2] if key.startswith(_KEY) else None


def kind_of(dtype: str) -> str:
    return _KINDS_OF.get(dtype, "float")


# Of operations: what they take and give. "same": the widest kind of their operands, "int" at least; "whole": that, but
# no float; "float"; "truth": booleans, or bits of integers; "compare": from the widest kind to bool.
RULES = {
    **dict.fromkeys(("add", "sub", "mul", "minimum", "maximum", "neg", "abs"), "same"),
    **dict.fromkeys(("floordiv", "mod", "truncdiv", "truncmod", "shl", "shr"), "whole"),
    **dict.fromkeys(
        ("div", "pow", "exp", "log", "log2", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor", "erf", "atan2"),
        "float"
    ),
    **dict.fromkeys(("and", "or", "xor", "not"), "truth"),
    **dict.fromkeys(("lt", "le", "eq", "ne"), "compare"),
}  # fmt: skip
_OF_ONE = ("neg", "abs", "not", "exp", "log", "log2", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor", "erf")
_TAKEN = {  # kinds of operands, by rule
    "same": KINDS[1:], "whole": ("int", "long"), "float": ("float",), "truth": KINDS[:3], "compare": KINDS[1:]
}  # fmt: skip


def _truncdiv(x: int, y: int) -> int:
    return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1)


def _few(bits: int) -> int:
    """How far integers are shifted, where that is less than what they have."""
    if not 0 <= bits < 32:
        raise ValueError
    return bits


_FOLD: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "minimum": min, "maximum": max, "neg": operator.neg,
    "abs": abs, "floordiv": operator.floordiv, "mod": operator.mod, "truncdiv": _truncdiv,
    "truncmod": lambda x, y: x - y * _truncdiv(x, y), "shl": lambda x, y: x << _few(y),
    "shr": lambda x, y: x >> _few(y),
    "div": operator.truediv, "pow": operator.pow, "exp": math.exp, "log": math.log, "log2": math.log2,
    "sqrt": math.sqrt,
    "tanh": math.tanh, "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "sin": math.sin, "cos": math.cos,
    "floor": math.floor, "erf": math.erf, "atan2": math.atan2,
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
        return number(node.kind, node.value) if node.op == "const" else None

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
                return self._folded(op, self.kind(args[0]), _FOLD[op](*known))
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
            return self.add(Node("const", self.kind(x), (), "0"))
        return None

    def _folded(self, op: str, kind: str, x: Any) -> int:
        """The constant that comes of an operation on others of this kind; integers keep the bits that it has."""
        if kind in ("int", "long") and RULES[op] != "compare":
            half = 2 ** (31 if kind == "int" else 63)
            return self.add(Node("const", kind, (), repr((int(x) + half) % (2 * half) - half)))
        return self.constant(float(x) if kind == "float" and RULES[op] != "compare" else x)

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


def number(kind: str, text: str) -> Any:
    """The number that a constant is, from its `value`."""
    return text == "True" if kind == "bool" else float(text) if kind == "float" else int(text)


@dataclass(frozen=True, eq=False)
class Score:
    """A score function that has been traced: what is asked of a problem, so hashable and without any data.

    ValueError for what no trace gives: kernels are written from it, and it may come from a file.
    """

    arrays: tuple[ScoreArray, ...]
    nodes: tuple[Node, ...]
    root: int  # the new score
    keys: tuple[str, ...] = field(init=False)  # what the arrays are called among those of a call
    data: str = field(init=False)  # all of it but `wide`, which follows from the arrays of a call
    if TYPE_CHECKING:
        _hash: int = field(init=False)  # for mypy alone: it is no field

    def __post_init__(self) -> None:
        _check(self.arrays, self.nodes, self.root)
        object.__setattr__(self, "_hash", hash((self.arrays, self.nodes, self.root)))
        object.__setattr__(self, "keys", tuple(x.key for x in self.arrays))
        object.__setattr__(self, "data", json.dumps([[x[:3] for x in self.arrays], self.nodes, self.root]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Score):
            return NotImplemented
        return (self.arrays, self.nodes, self.root) == (other.arrays, other.nodes, other.root)

    @classmethod
    def of(cls, data: str, wide: tuple[bool, ...]) -> Score:
        """What has such `data`; `wide` of each array."""
        try:
            arrays, nodes, root = json.loads(data)
            named = tuple([ScoreArray(name, dtype, rank) for name, dtype, rank in arrays])
            made = tuple([Node(op, kind, tuple(args), value) for op, kind, args, value in nodes])
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"score is not the data of a score function ({error})") from None
        if len(named) != len(wide):
            raise ValueError(f"score reads {len(named)} arrays, but {len(wide)} are given")
        return cls(tuple([x._replace(wide=w) for x, w in zip(named, wide)]), made, root)

    def __str__(self) -> str:
        """As one expression, behind what is used in it more than once."""
        if len(self.nodes) > 24:
            return f"of {len(self.nodes)} operations"
        uses = [m for node in self.nodes for m in node.args]
        texts, before = list[str](), list[str]()
        for n, (op, kind, args, value) in enumerate(self.nodes):
            inner = ", ".join(texts[m] for m in args)
            if op == "read":
                text = f"{self.arrays[int(value)].name}[{inner}]"
            else:
                text = op if op in VARIABLES else value if op == "const" else f"{kind if op == 'to' else op}({inner})"
            if args and uses.count(n) > 1:
                before.append(f"x{n} = {text}")
                text = f"x{n}"
            texts.append(text)
        return "; ".join([*before, texts[self.root]])

    def array(self, key: str) -> ScoreArray | None:
        """The array that is called `key` among those of a call."""
        return next((x for x in self.arrays if x.key == key), None)


def _check(arrays: Any, nodes: Any, root: Any) -> None:
    """ValueError, naming it, for an array or an operation that no trace gives."""
    names = [x.name for x in arrays]
    for x in arrays:
        if type(x.name) is not str or not x.name.isidentifier() or names.count(x.name) > 1:
            raise ValueError(f"score reads an array that is called {x.name!r}; it must be a name, and each another")
        if not isinstance(x.dtype, str) or x.dtype not in _KINDS_OF:
            raise ValueError(f"score reads {x.name} of dtype {x.dtype!r}; it must be one of {', '.join(_KINDS_OF)}")
        if type(x.rank) is not int or x.rank not in _RANKS or type(x.wide) is not bool:
            raise ValueError(f"score reads {x.name} of {x.rank!r} dimensions; it must have 1 to 4")
    for n, node in enumerate(nodes):
        why = _objection(arrays, nodes, n, *node)
        if why:
            raise ValueError(f"score has {tuple(node)!r} as operation {n}, {why}")
    if type(root) is not int or not 0 <= root < len(nodes) or nodes[root].kind != "float":
        raise ValueError(f"score is operation {root!r} of {len(nodes)}; it must be one of them, and a float")


def _objection(arrays: Any, nodes: Any, n: int, op: Any, kind: Any, args: Any, value: Any) -> str:
    """What is wrong with one operation; nothing where it is as `Graph` makes them."""
    if type(op) is not str or type(value) is not str or type(kind) is not str or kind not in KINDS:
        return f"which must have a name, a kind of {', '.join(KINDS)}, operands and a text"
    if type(args) is not tuple or not all(type(m) is int and 0 <= m < n for m in args):
        return "whose operands must be operations before it"
    kinds = [nodes[m].kind for m in args]
    if op == "const":
        return (
            "" if not args and _written(kind, value) else f"which must be a number of kind {kind} as Python writes it"
        )
    if op == "read":
        numbers = {str(m): x for m, x in enumerate(arrays)}
        if value not in numbers or kind != numbers[value].kind:
            return "which must read one of the arrays, of that kind"
        if len(args) != numbers[value].rank or not set(kinds) <= {"int", "long"}:
            return "whose operands must be integers, one for each dimension of the array"
        return ""
    if op in VARIABLES:
        right = kind == VARIABLES[op] and not args
    elif op == "to":
        right = len(args) == 1
    elif op == "where":
        right = kinds == ["bool", kind, kind]
    elif op in RULES:
        rule, of = RULES[op], kinds[0] if kinds else ""
        right = kinds == [of] * (1 if op in _OF_ONE else 2) and of in _TAKEN[rule]
        right = right and kind == ("bool" if rule == "compare" else of)
    else:
        return "whose name is not known"
    return "" if right and not value else "whose operands or kinds do not fit"


def _written(kind: str, text: str) -> bool:
    """Whether a text is how a number of this kind is written."""
    try:
        x = number(kind, text)
    except (ValueError, OverflowError):
        return False
    bits = {"int": 31, "long": 63}.get(kind)
    return repr(x) == text and (bits is None or -(2**bits) <= x < 2**bits)


@functools.lru_cache(256)
def folded(score: Score, batch: int, mapped: tuple[str, ...]) -> Score:
    """The same for a call whose batch is that of several calls, of `batch` entries each, one behind the other. Arrays
    called as in `mapped` have one entry for each of these calls in front."""
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
