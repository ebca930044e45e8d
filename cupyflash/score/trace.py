"""From a Python function, or an expression, to a `Score`. A function is run once, on numbers that write down what is done."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .expression import parse
from .graph import VARIABLES, Graph, Node, Score, ScoreArray
from .value import Traced, TracedArray, lift, refusal_of_others

_KEPT = 1024  # functions, and scores
# Modules that nobody changes.
_KNOWN = ("math", "numpy", "jax", "torch", "cupyflash", "operator", "_operator", "builtins")
_FIXED = (types.BuiltinFunctionType, types.FunctionType, type)  # nor these in them
_traced: dict[Any, Score] = {}
_same: dict[Score, Score] = {}


def trace(
    score: Callable[..., Any] | str | Score, arrays: Mapping[str, tuple[str, int, bool]], inlined: bool = False
) -> Score:
    """The score function as data. `arrays` says of each that it reads its dtype, the number of its dimensions, and whether
    offsets in it may have more than 32 bits. `inlined`: torch.compile reads this code, and calls what is marked for it.

    TypeError or ValueError for what is no score function of these arrays, or cannot be traced: saying what and where.
    """
    given = tuple([ScoreArray(name, *form) for name, form in arrays.items()])
    if inlined and callable(score):  # it watches what the function looks up
        return _finished(given, *_run(score, given))
    if isinstance(score, Score):
        return score
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


# ---- whether a function is the one that was traced before -------------------------------------------------------------


def fingerprint(function: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """What a function's graph follows from: its code and every number that it looks up. None where that is not known.

    `leaf` is asked for what stands for any other object that it looks up, None where it does not know.
    """
    try:
        return _of_function(function, (), leaf)
    except (_Unknown, TypeError):  # the last: what cannot be hashed
        return None


class _Unknown(Exception):
    pass


def _of_function(function: Any, outer: tuple[Any, ...], leaf: Callable[[Any], Any] | None) -> Any:
    if type(function) is not types.FunctionType or vars(function):  # attributes are looked up, too
        raise _Unknown
    if function in outer:
        return "itself"
    outer = (*outer, function)

    def of(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(_of_value(x, outer, leaf) for x in values)

    names = _names(function.__code__)
    if names is None:
        raise _Unknown
    looked_up = [name for name in names if name in function.__globals__]
    defaults = function.__kwdefaults__ or {}
    return (
        function.__code__, of(cell.cell_contents for cell in function.__closure__ or ()),
        tuple(zip(looked_up, of(function.__globals__[name] for name in looked_up))), of(function.__defaults__ or ()),
        tuple(zip(defaults, of(defaults.values()))),
    )  # fmt: skip


_ELSEWHERE = {"eval", "exec", "globals", "vars", "__import__", "random"}  # what these give is not seen here


@functools.lru_cache(_KEPT)
def _names(code: types.CodeType) -> tuple[str, ...] | None:
    """Global names that the code, and functions inside it, may look up; None where it finds things in other ways too."""
    names = [*code.co_names]
    if not _ELSEWHERE.isdisjoint(names) or any(x.opname == "IMPORT_NAME" for x in dis.get_instructions(code)):
        return None
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            inner = _names(x)
            if inner is None:
                return None
            names += inner
    return tuple(dict.fromkeys(names))


def _is_scalar(x: Any) -> bool:
    """Whether x is one of NumPy's, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic)


def _of_value(x: Any, outer: tuple[Any, ...], leaf: Callable[[Any], Any] | None) -> Any:
    if x is None or type(x) in (bool, int, float, str) or _is_scalar(x):
        return type(x), repr(x)
    if isinstance(x, tuple) and not hasattr(x, "__dict__"):  # classes made of them may have attributes
        return type(x), *(_of_value(y, outer, leaf) for y in x)
    if isinstance(x, types.ModuleType):
        path = x.__name__.split(".")
        if path[0] not in _KNOWN or "random" in path:
            raise _Unknown
        return x.__name__
    ours = getattr(x, "__module__", None) or ""
    if type(x).__name__ == "ufunc" or isinstance(x, _FIXED) and ours.partition(".")[0] in _KNOWN:
        return x
    found = None if leaf is None else leaf(x)
    return _of_function(x, outer, leaf) if found is None else found
