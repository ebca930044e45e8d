"""From a Python function, or an expression, to a `Score`. A function is run once, on numbers that write down what is
done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .expression import parse
from .fingerprint import fingerprint
from .graph import VARIABLES, Graph, Node, Score, ScoreArray
from .value import Traced, TracedArray, lift, refusal_of_others

_KEPT = 1024  # functions, and scores
_traced: dict[Any, Score] = {}
_same: dict[Score, Score] = {}


def trace(
    score: Callable[..., Any] | str | Score, arrays: Mapping[str, tuple[str, int, bool]], inlined: bool = False
) -> Score:
    """The score function as data. `arrays` says of each that it reads its dtype, the number of its dimensions, and
    whether offsets in it may have more than 32 bits. `inlined`: torch.compile reads this code, and calls what is marked
    for it.

    TypeError or ValueError for what is no score function of these arrays, or cannot be traced: saying what and where.
    """
    given = tuple([ScoreArray(name, *form) for name, form in arrays.items()])
    if inlined and callable(score):  # it watches what the function looks up
        return _finished(given, *_run(score, given))
    if isinstance(score, Score):
        return _fitting(score, given)
    if isinstance(score, str):
        return _parsed(score, given)
    known = fingerprint(score)
    found = None if known is None else _traced.get((known, given))
    if found is None:
        order = _parameters(score, {x.name: x for x in given})
        try:
            nodes, root = _run(score, order)
        except (TypeError, IndexError) as error:
            told = refusal_of_others(error)
            if told is None:
                raise
            raise told from error
        found = _finished(order, nodes, root)
        if known is not None:
            _keep(_traced, (known, given), found)
    return found


@functools.lru_cache(_KEPT)
def decoded(data: str, wide: tuple[bool, ...]) -> Score:
    """`Score.of`, the same one as a trace gives."""
    found = Score.of(data, wide)
    return _same.setdefault(found, found)


def _run(function: Any, arrays: tuple[ScoreArray, ...]) -> tuple[tuple[Node, ...], int]:
    """Nodes, and the number of the result among them."""
    graph = Graph()
    variables = [Traced(graph, graph.variable(name)) for name in VARIABLES]
    reads = {x.name: TracedArray(graph, n, x) for n, x in enumerate(arrays)}
    result = function(*variables, **reads)
    if result is None:
        raise TypeError("score returns None; it must return the new score")
    n = lift(graph, result, "its result")  # a plain number becomes a node here
    return tuple(graph.nodes), n


def _parsed(text: str, arrays: tuple[ScoreArray, ...]) -> Score:
    found = _traced.get((text, arrays))
    if found is None:
        graph = Graph()
        n = parse(text, graph, arrays)
        found = _finished(arrays, tuple(graph.nodes), n)
        _keep(_traced, (text, arrays), found)
    return found


def _fitting(score: Score, arrays: tuple[ScoreArray, ...]) -> Score:
    """A score that was traced before, for the arrays of this call: kernels read them by what it says."""
    given, want = ({x.name: x for x in of} for of in (arrays, score.arrays))
    if given.keys() != want.keys():
        names, others = (", ".join(map(repr, of)) or "nothing" for of in (given, want))
        raise ValueError(f"score_arrays holds {names}, but score was traced for {others}")
    for name, x in want.items():
        y = given[name]
        if (x.dtype, x.rank) != (y.dtype, y.rank):
            raise TypeError(
                f"{x.key} is of {y.dtype} and {y.rank} dimensions, but score was traced for {x.dtype} and {x.rank}; it "
                "must be traced for these arrays, or be the function itself"
            )
    wide = tuple([x._replace(wide=x.wide or given[x.name].wide) for x in score.arrays])
    return score if wide == score.arrays else replace(score, arrays=wide)


def _finished(arrays: tuple[ScoreArray, ...], nodes: tuple[Node, ...], n: int) -> Score:
    """Equal ones are the same, so that what is kept for one is found at once."""
    graph = Graph(nodes)
    if graph.kind(n) == "bool":
        raise TypeError(
            "score returns a boolean; it must return the new score, as in where(condition, s, -math.inf) to hide pairs"
        )
    nodes, (root,) = graph.pruned(graph.to("float", n))
    found = Score(arrays, nodes, root)
    return _same[found] if found in _same else _keep(_same, found, found)


def _keep(kept: dict[Any, Score], key: Any, score: Score) -> Score:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = score
    return score


# torch.compile calls these, instead of reading them.
_parsed._dynamo_marked_constant = True  # type: ignore[attr-defined]
_finished._dynamo_marked_constant = True  # type: ignore[attr-defined]
_fitting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _parameters(function: Any, arrays: dict[str, ScoreArray]) -> tuple[ScoreArray, ...]:
    """The arrays in the order of the function's parameters, which are s, b, h, i, j and their names."""
    must = "it must take s, b, h, i, j, and then the arrays of score_arrays by their names"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise TypeError(f"score is {function!r}, whose parameters cannot be seen; {must}") from None
    positional = [x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(VARIABLES):
        raise TypeError(f"score has {len(positional)} positional parameters; {must}")
    others = [x for x in parameters if x not in positional[: len(VARIABLES)]]
    anything = any(x.kind == x.VAR_KEYWORD for x in others)
    named = {x.name for x in others if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
    for name in arrays:
        if name not in named and not anything:
            raise TypeError(f"score_arrays holds {name!r}, but score has no such parameter; {must}")
    for x in others:
        if x.name in named and x.default is x.empty and x.name not in arrays:
            raise TypeError(f"score has a parameter {x.name!r}, but score_arrays holds no such array; {must}")
    first = [x.name for x in others if x.name in arrays]
    return tuple(arrays[name] for name in (*first, *(name for name in arrays if name not in first)))
