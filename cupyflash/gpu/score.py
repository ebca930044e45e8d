"""A score function as CUDA: what kernels_cu/attention/pairs.cuh and score_gradient.cuh ask of `namespace user`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..problem import Given
from ..score import Score
from ..score.derivative import along, changes, derivative, reads
from ..score.graph import TANGENT, VARIABLES, Graph, Node, number

_NOTHING: Mapping[int, str] = MappingProxyType({})

_TYPES = {"bool": "bool", "int": "int", "long": "long long", "float": "Accum"}
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "lt": "<",
    "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
_FUNCTIONS = {  # of kernels_cu/attention/score_functions.cuh, but for C's own
    "abs": "fabs", "minimum": "fmin", "maximum": "fmax", "floordiv": "floor_divide", "mod": "modulo",
    "truncdiv": "divide", "truncmod": "remainder", "pow": "pow", "exp": "exp", "log": "log", "log2": "log2",
    "sqrt": "sqrt",
    "tanh": "hyperbolic_tangent<In>", "sigmoid": "sigmoid", "sin": "sin", "cos": "cos", "floor": "floor",
    "erf": "erf", "atan2": "atan2",
}  # fmt: skip
_WHOLE = ("add", "sub", "mul", "neg", "abs", "shl", "shr")  # of integers, in namespace whole there
_HEAVY = (
    "read", "div", "pow", "exp", "log", "log2", "sqrt", "tanh", "sigmoid", "sin", "cos", "floordiv", "mod", "truncdiv",
    "truncmod", "erf", "atan2",
)  # fmt: skip
_OF_PAIR = "int b, int h, int i, int j"
_PARAMETERS = f"const Params& p, Accum s, {_OF_PAIR}"
_MOVING = f"const Params& p, Accum s, Accum {TANGENT}, {_OF_PAIR}"
BEYOND = 256  # how far behind the last query or key kernels ask for scores, at most


class Tables(NamedTuple):
    """Scores and their slopes, what these change by, and what is computed before for all i - j, instead of for each
    pair: what depends on b, h and that alone.
    """

    nodes: tuple[Node, ...]
    score: int
    slope: int | None  # None: it is 0
    tangent: int | None
    bend: int | None
    tabled: tuple[int, ...]
    by_batch: bool  # whether what is tabled depends on b, on h
    by_head: bool

    def lines(self, batch: int, heads: int) -> int:
        """How many there are of each."""
        return (batch if self.by_batch else 1) * (heads if self.by_head else 1)


def moves(score: Score, tangents: Sequence[Given]) -> tuple[str, ...]:
    """What of that moves, as `score.derivative` has it."""
    given = [x.name for x in tangents]
    return (*["s"] * ("q" in given or "k" in given), *(x.key for x in score.arrays if x.key in given))


@functools.lru_cache(256)
def tables(score: Score, moving: tuple[str, ...] = ()) -> Tables:
    graph = Graph(score.nodes)
    by, slope = changes(graph, score, moving), derivative(graph, score.root, graph.variable("s"))
    every = (score.root, slope, along(graph, score.root, by), None if slope is None else along(graph, slope, by))
    nodes, numbers = graph.pruned(*(n for n in every if n is not None))
    left, on = iter(numbers), _variables(nodes)
    root, slope, tangent, bend = (None if n is None else next(left) for n in every)
    assert root is not None
    found, seen, todo = [], set(), [*numbers]
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if nodes[n].kind == "float" and "d" in on[n] and on[n] <= {"b", "h", "d"}:
            found.append(n)
        else:
            todo += nodes[n].args
    varied = set().union(*(on[n] for n in found))
    return Tables(nodes, root, slope, tangent, bend, tuple(sorted(found)), "b" in varied, "h" in varied)


def light(score: Score) -> bool:
    """Whether what is left for each pair is arithmetic: nothing is read for it, and no function is computed but the
    simplest."""
    made = tables(score)
    seen, todo = set(made.tabled), [made.score, *([] if made.slope is None else [made.slope])]
    while todo:
        n = todo.pop()
        if n not in seen:
            seen.add(n)
            if made.nodes[n].op in _HEAVY:
                return False
            todo += made.nodes[n].args
    return True


class Read(NamedTuple):
    """An element of an array that a score reads, for the gradient of that array."""

    array: int
    nodes: tuple[Node, ...]
    change: int  # d score / d element
    element: tuple[int, ...]  # its indices
    by_batch: bool  # whether these depend on b, h, i, j
    by_head: bool
    by_query: bool
    by_key: bool
    diagonal: bool  # on i and j through their difference alone
    weighted: bool  # whether the change depends on s
    bend: int | None  # what the change changes by; None: it is 0


def reads_of(score: Score, wanted: Sequence[str], moving: tuple[str, ...] = ()) -> tuple[Read, ...]:
    """Those of the arrays that are called so."""
    found = []
    for n, array in enumerate(score.arrays):
        for nodes, change, index, bend in reads(score, n, moving) if array.key in wanted else ():
            on = _depends(nodes, index)
            diagonal = "d" in on and not on & {"i", "j"}
            found.append(
                Read(
                    n, nodes, change, index, "b" in on, "h" in on, bool(on & {"i", "d"}), bool(on & {"j", "d"}),
                    diagonal, "s" in _depends(nodes, (change,)), bend,
                )
            )  # fmt: skip
    return tuple(found)


def _variables(nodes: tuple[Node, ...]) -> list[set[str]]:
    """The variables that each node depends on; "d" for i - j where i and j come in that form alone."""
    lines: list[tuple[int, int] | None] = []  # (x, y) of a node that is x i + y j and a constant
    found: list[set[str]] = []
    for op, kind, args, _ in nodes:
        line = None
        inner = [lines[m] for m in args]
        if op in ("i", "j") or (op == "const" and kind == "int"):
            line = int(op == "i"), int(op == "j")
        elif op in ("add", "sub", "neg") and kind == "int" and None not in inner:
            sign, (x, y) = 1 if op == "add" else -1, inner[-1] or (0, 0)
            first = inner[0] if len(inner) == 2 else None
            line = (first or (0, 0))[0] + sign * x, (first or (0, 0))[1] + sign * y
        lines.append(line)
        if line is not None and line[0] == -line[1] != 0:
            found.append({"d"})
        else:
            found.append({op} if op in (*VARIABLES, TANGENT) else set().union(*(found[m] for m in args)))
    return found


def _depends(nodes: tuple[Node, ...], roots: Sequence[int]) -> set[str]:
    on = _variables(nodes)
    return set().union(*(on[n] for n in roots))


def text(score: Score | None, wanted: Sequence[str] = (), tangents: Sequence[Given] = ()) -> str:
    """`namespace user`. `wanted`: arrays whose gradients are to be summed, by what they are called in a call."""
    moving = moves(score, tangents) if score else ()
    made = tables(score, moving) if score else Tables((), 0, None, None, None, (), False, False)
    constant = made.slope is None or made.nodes[made.slope].op == "const"
    lines = [
        "namespace user {", f"constexpr bool CONSTANT_SLOPE = {str(constant).lower()};",
        f"constexpr bool BENDS = {str(made.bend is not None).lower()};  // whether the slope moves",
        f"constexpr int TABLES = {len(made.tabled)};",
        "// What is tabled of a pair begins here.",
        "__device__ inline const Accum* tabled(const Params& p, int b, int h, int i, int j) {",
        f"return p.score_tables + {_line_of(made)} * p.score_span + (j - i + p.score_origin);" if made.tabled
        else "return nullptr;",
        "}",
    ]  # fmt: skip
    values = {n: f"tabled[{k} * (long long)p.score_plane]" if k else "tabled[0]" for k, n in enumerate(made.tabled)}
    for name, root in (
        ("score", made.score if score else None), ("slope", made.slope), ("tangent", made.tangent), ("bend", made.bend)
    ):  # fmt: skip
        parameters = _MOVING if name in ("tangent", "bend") else _PARAMETERS
        lines.append(f"__device__ inline Accum {name}({parameters}, const Accum* tabled) {{")
        lines += ["return 0;" if score is None or root is None else _body(score, made.nodes, root, values), "}"]
    lines += [*_of_gradients(score, wanted, moving), "}"]
    if score and made.tabled:
        lines += _tabulate(score, made)
    return "\n".join(lines) + "\n"


def _line_of(made: Tables) -> str:
    """Which line of a table is of batch entry b and head h."""
    if made.by_batch:
        return "((long long)b * p.heads_q + h)" if made.by_head else "(long long)b"
    return "(long long)h" if made.by_head else "0LL"


def _tabulate(score: Score, made: Tables) -> list[str]:
    """The kernel that fills the tables: a thread for each i - j of a line, blocks of 128 for those of a line."""
    lines = [
        'extern "C" __global__ void __launch_bounds__(128) attention_score_tables(const __grid_constant__ Params p) {',
        "const int blocks = (p.score_span + 127) / 128, n = blockIdx.x % blocks * 128 + threadIdx.x;",
        "const int line = blockIdx.x / blocks;",
        f"int h = {'line % p.heads_q' if made.by_head else '0'};",
        f"int b = {('line / p.heads_q' if made.by_head else 'line') if made.by_batch else '0'};",
        "int i = 0, j = n - p.score_origin;",
        "if (n >= p.score_span) return;",
        "Accum* const to = p.score_tables + (long long)line * p.score_span + n;",
        *_statements(score, made.nodes, made.tabled),
    ]
    return [*lines, *(f"to[{k} * (long long)p.score_plane] = x{n};" for k, n in enumerate(made.tabled)), "}"]


def _of_gradients(score: Score | None, wanted: Sequence[str], moving: tuple[str, ...]) -> list[str]:
    """What is read of the arrays that are wanted, and where their gradients go: all sums lie one behind the other."""
    lines, first, stores = ["template <int N>", "struct Read;"], {}, []
    before = "0LL"
    for n, array in enumerate(score.arrays if score else ()):
        if array.key in wanted:
            count = " * ".join(f"p.{cuda_name(n)}_shape.length{axis}" for axis in range(array.rank))
            first[n], before = before, f"{before} + {count}"
            target = f"p.d{cuda_name(n)}"
            stores.append(f"if (n < {before}) {target}[n - ({first[n]})] = from_float<Pointed<decltype({target})>>(x);")
    found = reads_of(score, wanted, moving) if score else ()
    for n, read in enumerate(found):
        assert score is not None
        lines += ["template <>", f"struct Read<{n}> {{"]
        for flag in ("by_batch", "by_head", "by_query", "by_key", "diagonal", "weighted"):
            lines.append(f"static constexpr bool {flag.upper()} = {str(getattr(read, flag)).lower()};")
        lines += [
            f"__device__ static int splits(const Params& p) {{ return p.score_splits_{n}; }}",
            f"__device__ static int blocks(const Params& p) {{ return p.score_blocks_{n}; }}",
            f"__device__ static Accum change({_PARAMETERS}) {{", _body(score, read.nodes, read.change), "}",
            f"__device__ static Accum bend({_MOVING}) {{",
            "return 0;" if read.bend is None else _body(score, read.nodes, read.bend), "}",
            "// The number, among all sums, of the element that a pair reads.",
            f"__device__ static long long element({_PARAMETERS}) {{",
            *_statements(score, read.nodes, read.element), f"return {first[read.array]} + {_element(score, read)};",
            "}", "};",
        ]  # fmt: skip
    lines += [
        f"constexpr int READS = {len(found)};",
        f"__device__ inline long long elements(const Params& p) {{ return {before}; }}",
        "__device__ inline void store(const Params& p, long long n, Accum x) {", "else ".join(stores), "}",
    ]  # fmt: skip
    return lines


def cuda_name(array: int) -> str:
    """What the n-th array of a score function is called in Params; its tangent has a t in front."""
    return f"score_array_{array}"


def _read(score: Score, value: str) -> tuple[int, bool]:
    """Which array a node reads, and whether its tangent."""
    array, count = int(value), len(score.arrays)
    return array % count, array >= count


def _body(score: Score, nodes: tuple[Node, ...], root: int, known: Mapping[int, str] = _NOTHING) -> str:
    return "\n".join([*_statements(score, nodes, (root,), known), f"return x{root};"])


def _statements(
    score: Score, nodes: tuple[Node, ...], roots: Sequence[int], known: Mapping[int, str] = _NOTHING
) -> list[str]:
    """A line for each operation that the roots need but for what is `known`. Products that are added once become part
    of the sum.
    """
    needed, uses = set(), dict.fromkeys(range(len(nodes)), 0)
    todo = list(roots)
    while todo:
        n = todo.pop()
        uses[n] += 1
        if n not in needed:
            needed.add(n)
            todo += () if n in known else nodes[n].args
    fused = {}  # sum: the product in it
    for n in sorted(needed):
        node = nodes[n]
        if node.kind == "float" and node.op in ("add", "sub") and n not in known:
            products = [m for m in node.args if nodes[m].op == "mul" and uses[m] == 1 and m not in known]
            if products and node.args[0] != node.args[1]:
                fused[n] = products[0]
    inside = set(fused.values())
    placed = any(nodes[n].op in VARIABLES and nodes[n].op != "s" for n in needed if n not in known)
    return ["of_whole(p, b, h, i, j);"] * placed + [
        f"const {_TYPES[nodes[n].kind]} x{n} = {known.get(n) or _operation(score, nodes, n, fused.get(n))};"
        for n in sorted(needed)
        if n not in inside
    ]


def _operation(score: Score, nodes: tuple[Node, ...], n: int, product: int | None) -> str:
    op, kind, args, value = nodes[n]
    x = [f"x{m}" for m in args]
    if op in (*VARIABLES, TANGENT):
        return op
    if op == "const":
        return _literal(kind, value)
    if product is not None:
        a, b = (f"x{m}" for m in nodes[product].args)
        if op == "add":
            return f"fma({a}, {b}, {x[1] if args[0] == product else x[0]})"
        return f"fma({a}, {b}, -{x[1]})" if args[0] == product else f"fma(-{a}, {b}, {x[0]})"
    if op == "read":
        array, moved = _read(score, value)
        element = f"p.{'t' * moved}{cuda_name(array)}[{_offset(score, value, args)}]"
        return {"float": f"to_float({element})", "bool": f"{element} != 0"}.get(kind, element)
    if op == "where":
        return f"{x[0]} ? {x[1]} : {x[2]}"
    if op == "to":
        if kind == "bool":
            return f"{x[0]} != 0"
        if nodes[args[0]].kind == "float":
            return f"truncated<{_TYPES[kind]}>({x[0]})"
        return f"{_TYPES[kind]}({x[0]})" if kind != "long" else f"(long long){x[0]}"
    if op == "not":
        return f"!{x[0]}" if kind == "bool" else f"~{x[0]}"
    if kind != "float" and op in _WHOLE:
        return f"whole::{op}({', '.join(x)})"
    if op == "neg":
        return f"-{x[0]}"
    if op in ("floordiv", "mod") and nodes[args[1]].op == "const":
        divisor = int(nodes[args[1]].value)
        if divisor > 0 and divisor & (divisor - 1) == 0:  # what rounds down by itself
            return f"{x[0]} >> {divisor.bit_length() - 1}" if op == "floordiv" else f"{x[0]} & {divisor - 1}"
    if op in _OPERATORS:
        return f"{x[0]} {_OPERATORS[op]} {x[1]}"
    if kind != "float" and op in ("minimum", "maximum"):
        return f"{op[:3]}({', '.join(x)})"
    return f"{_FUNCTIONS[op]}({', '.join(x)})"


def _literal(kind: str, value: str) -> str:
    x = number(kind, value)
    if kind == "bool":
        return "true" if x else "false"
    if kind == "float":
        special = {"inf": "0x7f800000", "-inf": "0xff800000", "nan": "0x7fc00000"}.get(repr(x))
        return f"Accum({x!r})" if special is None else f"Accum(__int_as_float({special}))"
    if x == -(2**63):  # C has no such literal: the sign is an operator
        return f"({x + 1}LL - 1)"
    return f"{_TYPES[kind]}({x}LL)" if kind == "int" else f"{x}LL"


def _offset(score: Score, value: str, args: Sequence[int]) -> str:
    """Of the element with these indices, each moved to the nearest that there is."""
    array, moved = _read(score, value)
    shape, step = f"p.{cuda_name(array)}_shape", "" if moved or score.arrays[array].wide else "int"
    strides = f"p.t{cuda_name(array)}_strides" if moved else shape
    terms = [f"nearest(x{m}, {shape}.length{axis}) * {step}({strides}.stride{axis})" for axis, m in enumerate(args)]
    return " + ".join(terms)


def _element(score: Score, read: Read) -> str:
    """The number of the element in a contiguous array."""
    shape = f"p.{cuda_name(read.array)}_shape"
    number = "0LL"
    for axis, m in enumerate(read.element):
        number = f"({number}) * {shape}.length{axis} + nearest(x{m}, {shape}.length{axis})"
    return number
