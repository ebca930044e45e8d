"""Derivatives of a graph, node by node from the operands to the result (forward mode).

A derivative by one number only follows what depends on it, and what `where` does not choose never reaches the result:
nothing is multiplied by 0 that might be infinite. Where a function has a corner, its derivative there is PyTorch's: 0
of abs (JAX has 1), half each of equal minima and maxima.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .graph import TANGENT, Graph, Node, Score


def along(graph: Graph, root: int, changes: Mapping[int, int]) -> int | None:
    """The node of what root changes by where each node of `changes` changes by the one beside it; None where
    that is 0."""
    found: dict[int, int | None] = {}
    for n in range(root + 1):
        found[n] = changes[n] if n in changes else _of(graph, n, graph.nodes[n], found)
    return found[root]


def derivative(graph: Graph, root: int, by: int) -> int | None:
    """The node of d root / d by; None where root does not depend on it."""
    return along(graph, root, {by: graph.constant(1.0)})


@functools.lru_cache(256)
def slope(score: Score) -> tuple[tuple[Node, ...], int] | None:
    """Nodes that compute d score / d s, and its number among them; None where the score does not depend on s."""
    graph = Graph(score.nodes)
    return _pruned(graph, derivative(graph, score.root, graph.variable("s")))


def changes(graph: Graph, score: Score, moves: tuple[str, ...]) -> dict[int, int]:
    """What `along` takes where these move: "s", by the variable TANGENT, and arrays by what they are called in a call.
    Elements of the n-th of the arrays change by what is read of an array behind all of them, the n-th of these.
    """
    found = {graph.variable("s"): graph.add(Node(TANGENT, "float"))} if "s" in moves else {}
    for n, node in enumerate(score.nodes):
        if node.op == "read" and score.arrays[int(node.value)].key in moves:
            found[n] = graph.read(len(score.arrays) + int(node.value), node.kind, node.args)
    return found


class Moved(NamedTuple):
    """Nodes, and the numbers among them of what a score and its slope change by; None of a number that is 0."""

    nodes: tuple[Node, ...]
    tangent: int | None
    bend: int | None


@functools.lru_cache(256)
def moved(score: Score, moves: tuple[str, ...]) -> Moved:
    """Of a score function, where these move (`changes`)."""
    graph = Graph(score.nodes)
    by = changes(graph, score, moves)
    slope = derivative(graph, score.root, graph.variable("s"))
    found = (along(graph, score.root, by), None if slope is None else along(graph, slope, by))
    nodes, numbers = graph.pruned(*(n for n in found if n is not None))
    left = iter(numbers)
    return Moved(nodes, *(None if n is None else next(left) for n in found))


class Read(NamedTuple):
    """An element of an array that the score of a pair reads: nodes, and the numbers of these among them."""

    nodes: tuple[Node, ...]
    change: int  # d score / d element
    element: tuple[int, ...]  # its indices
    bend: int | None  # what the change changes by, if anything


@functools.lru_cache(256)
def reads(score: Score, array: int, moves: tuple[str, ...] = ()) -> list[Read]:
    """For each element of an array that the score of a pair reads, where these move (`changes`). Elements that the
    score does not depend on are left out.
    """
    found = []
    for n, node in enumerate(score.nodes):
        if node.op == "read" and node.value == str(array):
            graph = Graph(score.nodes)
            changed = derivative(graph, score.root, n)
            if changed is not None:
                bend = along(graph, changed, changes(graph, score, moves))
                nodes, (first, *rest) = graph.pruned(changed, *([] if bend is None else [bend]), *node.args)
                found.append(Read(nodes, first, tuple(rest[bend is not None :]), None if bend is None else rest[0]))
    return found


def _pruned(graph: Graph, root: int | None) -> tuple[tuple[Node, ...], int] | None:
    if root is None:
        return None
    nodes, (root,) = graph.pruned(root)
    return nodes, root


def _of(graph: Graph, n: int, node: Node, found: dict[int, int | None]) -> int | None:
    """The derivative of one node from those of its operands; None for 0."""
    if node.kind != "float" or node.op == "read":
        return None
    d = [found[m] for m in node.args]
    if all(x is None for x in d):
        return None
    apply, number = graph.apply, graph.constant

    def times(x: int | None, y: int) -> int | None:
        return None if x is None else apply("mul", x, y)

    def plus(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else apply("add", x, y)

    def minus(x: int | None) -> int | None:
        return None if x is None else apply("neg", x)

    def chosen(condition: int, x: int | None, y: int | None) -> int:
        return graph.where(condition, number(0.0) if x is None else x, number(0.0) if y is None else y)

    op, args = node.op, node.args
    x, y = args[0], args[-1]
    if op == "add":
        return plus(d[0], d[1])
    if op == "sub":
        return plus(d[0], minus(d[1]))
    if op == "neg":
        return minus(d[0])
    if op == "mul":
        return plus(times(d[0], y), times(d[1], x))
    if op == "div":  # (x' - q y') / y
        inner = plus(d[0], minus(times(d[1], n)))
        return None if inner is None else apply("div", inner, y)
    if op == "pow":  # y x^(y - 1), x^y log(x); 0 where x^0 is 1 for every x, and of 0^y
        of_base = apply("mul", y, apply("pow", x, apply("sub", y, number(1.0))))
        of_base = chosen(apply("eq", y, number(0.0)), None, of_base)
        of_exponent = chosen(apply("eq", x, number(0.0)), None, apply("mul", n, apply("log", x)))
        return plus(times(d[0], of_base), times(d[1], of_exponent))
    if op == "where":
        return chosen(args[0], d[1], d[2])
    if op in ("maximum", "minimum"):
        first = apply("lt", y, x) if op == "maximum" else apply("lt", x, y)
        half = times(plus(d[0], d[1]), number(0.5))
        return chosen(first, d[0], chosen(apply("eq", x, y), half, d[1]))
    if op == "abs":
        zero = number(0.0)
        return chosen(apply("lt", zero, x), d[0], chosen(apply("lt", x, zero), minus(d[0]), None))
    if op == "floor":
        return None
    if op == "atan2":  # of (x, y): (x' y - y' x) / (x² + y²)
        inner = plus(times(d[0], y), minus(times(d[1], x)))
        return None if inner is None else apply("div", inner, apply("add", apply("mul", x, x), apply("mul", y, y)))
    one = number(1.0)
    factors: dict[str, Callable[[], int]] = {
        "exp": lambda: n,
        "log": lambda: apply("div", one, x),
        "log2": lambda: apply("div", number(1.4426950408889634), x),
        "sqrt": lambda: apply("div", number(0.5), n),
        "tanh": lambda: apply("sub", one, apply("mul", n, n)),
        "sigmoid": lambda: apply("mul", n, apply("sub", one, n)),
        "erf": lambda: apply("mul", number(2 / math.sqrt(math.pi)), apply("exp", apply("neg", apply("mul", x, x)))),
        "sin": lambda: apply("cos", x),
        "cos": lambda: apply("neg", apply("sin", x)),
    }
    return times(d[0], factors[op]())
