"""A score function as CUDA: what kernels_cu/attention/pairs.cuh and score_gradient.cuh ask of `namespace user`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..score import Score
from ..score.derivative import reads, slope
from ..score.graph import VARIABLES, Node

_TYPES = {"bool": "bool", "int": "int", "long": "long long", "float": "Accum"}
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "shl": "<<", "shr": ">>", "and": "&", "or": "|", "xor": "^", "lt": "<",
    "le": "<=", "eq": "==", "ne": "!=",
}  # fmt: skip
_FUNCTIONS = {  # of kernels_cu/attention/score_functions.cuh, but for C's own
    "abs": "fabs", "minimum": "fmin", "maximum": "fmax", "floordiv": "floor_divide", "mod": "modulo",
    "truncdiv": "divide", "truncmod": "remainder", "pow": "pow", "exp": "exp", "log": "log", "log2": "log2", "sqrt": "sqrt",
    "tanh": "hyperbolic_tangent<Product>", "sigmoid": "sigmoid", "sin": "sin", "cos": "cos", "floor": "floor",
}  # fmt: skip
_PARAMETERS = "const Params& p, Accum s, int b, int h, int i, int j"


class Read(NamedTuple):
    """An element of an array that a score reads, for the gradient of that array."""

    array: int
    nodes: tuple[Node, ...]
    change: int  # d score / d element
    index: tuple[int, ...]
    by_batch: bool  # whether the index depends on b, h, i, j
    by_head: bool
    by_query: bool
    by_key: bool
    diagonal: bool  # on i and j through their difference alone
    weighted: bool  # whether the change depends on s


def reads_of(score: Score, wanted: Sequence[str]) -> tuple[Read, ...]:
    """Those of the arrays that are called so."""
    found = []
    for n, array in enumerate(score.arrays):
        for nodes, change, index in reads(score, n) if array.key in wanted else ():
            on = _depends(nodes, index)
            diagonal = "d" in on and not on & {"i", "j"}
            found.append(
                Read(
                    n, nodes, change, index, "b" in on, "h" in on, bool(on & {"i", "d"}), bool(on & {"j", "d"}),
                    diagonal, "s" in _depends(nodes, (change,)),
                )
            )  # fmt: skip
    return tuple(found)


def _depends(nodes: tuple[Node, ...], roots: Sequence[int]) -> set[str]:
    """The variables that these depend on; "d" for i - j where i and j come in that form alone."""
    lines = [_line(nodes, n) for n in range(len(nodes))] if nodes else []
    found: set[str] = set()
    todo = list(roots)
    while todo:
        n = todo.pop()
        line = lines[n]
        if line is not None and line[0] == -line[1] != 0:
            found.add("d")
        elif nodes[n].op in VARIABLES:
            found.add(nodes[n].op)
        else:
            todo += nodes[n].args
    return found


def _line(nodes: tuple[Node, ...], n: int) -> tuple[int, int] | None:
    """(x, y) where a node is x i + y j and a constant; else None."""
    op, kind, args, _ = nodes[n]
    if kind not in ("int", "long"):
        return None
    if op in ("i", "j", "const"):
        return int(op == "i"), int(op == "j")
    if op not in ("add", "sub", "neg"):
        return None
    inner = [_line(nodes, m) for m in args]
    if None in inner:
        return None
    sign = 1 if op == "add" else -1
    first = inner[0] if len(inner) == 2 else (0, 0)
    return first[0] + sign * inner[-1][0], first[1] + sign * inner[-1][1]  # type: ignore[index]


def text(score: Score | None, wanted: Sequence[str] = ()) -> str:
    """`namespace user`. `wanted`: arrays whose gradients are to be summed, by what they are called in a call."""
    made = slope(score) if score else None
    constant = made is None or made[0][made[1]].op == "const"
    lines = ["namespace user {", f"constexpr bool CONSTANT_SLOPE = {str(constant).lower()};"]
    for name, body in (("score", (score.nodes, score.root) if score else None), ("slope", made)):
        lines.append(f"__device__ inline Accum {name}({_PARAMETERS}) {{")
        lines += ["return 0;" if score is None or body is None else _body(score, *body), "}"]
    lines += _of_gradients(score, wanted)
    return "\n".join([*lines, "}"]) + "\n"


def _of_gradients(score: Score | None, wanted: Sequence[str]) -> list[str]:
    """What is read of the arrays that are wanted, and where their gradients go: all sums lie one behind the other."""
    lines, first, stores = ["template <int N>", "struct Read;"], {}, []
    before = "0LL"
    for n, array in enumerate(score.arrays if score else ()):
        if array.key in wanted:
            count = " * ".join(f"p.{_shape(n)}.length{axis}" for axis in range(array.rank))
            first[n], before = before, f"{before} + {count}"
            target = f"p.d{cuda_name(n)}"
            stores.append(f"if (n < {before}) {target}[n - ({first[n]})] = from_float<Pointed<decltype({target})>>(x);")
    found = reads_of(score, wanted) if score else ()
    for n, read in enumerate(found):
        assert score is not None
        lines += ["template <>", f"struct Read<{n}> {{"]
        for flag in ("by_batch", "by_head", "by_query", "by_key", "diagonal", "weighted"):
            lines.append(f"static constexpr bool {flag.upper()} = {str(getattr(read, flag)).lower()};")
        lines += [
            f"__device__ static int splits(const Params& p) {{ return p.score_splits_{n}; }}",
            f"__device__ static int blocks(const Params& p) {{ return p.score_blocks_{n}; }}",
            f"__device__ static Accum change({_PARAMETERS}) {{", _body(score, read.nodes, read.change), "}",
            "// The number, among all sums, of the element that a pair reads.",
            f"__device__ static long long element({_PARAMETERS}) {{",
            *_statements(score, read.nodes, read.index), f"return {first[read.array]} + {_element(score, read)};", "}", "};",
        ]  # fmt: skip
    lines += [
        f"constexpr int READS = {len(found)};",
        f"__device__ inline long long elements(const Params& p) {{ return {before}; }}",
        "__device__ inline void store(const Params& p, long long n, Accum x) {", "else ".join(stores), "}",
    ]  # fmt: skip
    return lines


def cuda_name(array: int) -> str:
    """What the n-th array of a score function is called in Params."""
    return f"score_array_{array}"


def _shape(array: int) -> str:
    return f"{cuda_name(array)}_shape"


def _body(score: Score, nodes: tuple[Node, ...], root: int) -> str:
    return "\n".join([*_statements(score, nodes, (root,)), f"return x{root};"])


def _statements(score: Score, nodes: tuple[Node, ...], roots: Sequence[int]) -> list[str]:
    """A line for each operation that the roots need. Products that are added once become part of the sum."""
    needed, uses = set(), dict.fromkeys(range(len(nodes)), 0)
    todo = list(roots)
    while todo:
        n = todo.pop()
        uses[n] += 1
        if n not in needed:
            needed.add(n)
            todo += nodes[n].args
    fused = {}  # sum: the product in it
    for n in sorted(needed):
        node = nodes[n]
        if node.kind == "float" and node.op in ("add", "sub"):
            products = [m for m in node.args if nodes[m].op == "mul" and uses[m] == 1]
            if products and node.args[0] != node.args[1]:
                fused[n] = products[0]
    inside = set(fused.values())
    return [
        f"const {_TYPES[nodes[n].kind]} x{n} = {_operation(score, nodes, n, fused.get(n))};"
        for n in sorted(needed)
        if n not in inside
    ]


def _operation(score: Score, nodes: tuple[Node, ...], n: int, product: int | None) -> str:
    op, kind, args, value = nodes[n]
    x = [f"x{m}" for m in args]
    if op in VARIABLES:
        return op
    if op == "const":
        return _literal(kind, value)
    if product is not None:
        a, b = (f"x{m}" for m in nodes[product].args)
        if op == "add":
            return f"fma({a}, {b}, {x[1] if args[0] == product else x[0]})"
        return f"fma({a}, {b}, -{x[1]})" if args[0] == product else f"fma(-{a}, {b}, {x[0]})"
    if op == "read":
        element = f"p.{cuda_name(int(value))}[{_offset(score, int(value), args)}]"
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
    if op == "neg":
        return f"-{x[0]}"
    if op in ("floordiv", "mod") and nodes[args[1]].op == "const":
        divisor = int(nodes[args[1]].value)
        if divisor > 0 and divisor & (divisor - 1) == 0:  # what rounds down by itself
            return f"{x[0]} >> {divisor.bit_length() - 1}" if op == "floordiv" else f"{x[0]} & {divisor - 1}"
    if op in _OPERATORS:
        return f"{x[0]} {_OPERATORS[op]} {x[1]}"
    if kind != "float" and op in ("minimum", "maximum", "abs"):
        return f"{x[0]} < 0 ? -{x[0]} : {x[0]}" if op == "abs" else f"{op[:3]}({', '.join(x)})"
    return f"{_FUNCTIONS[op]}({', '.join(x)})"


def _literal(kind: str, value: str) -> str:
    if kind == "bool":
        return value.lower()
    if kind != "float":
        return f"{_TYPES[kind]}({value}LL)" if kind == "int" else f"{value}LL"
    special = {"inf": "0x7f800000", "-inf": "0xff800000", "nan": "0x7fc00000"}.get(value)
    return f"Accum({value})" if special is None else f"Accum(__int_as_float({special}))"


def _offset(score: Score, array: int, args: Sequence[int]) -> str:
    """Of the element with these indices, each moved to the nearest that there is."""
    shape, step = f"p.{_shape(array)}", "" if score.arrays[array].wide else "int"
    terms = [f"nearest(x{m}, {shape}.length{axis}) * {step}({shape}.stride{axis})" for axis, m in enumerate(args)]
    return " + ".join(terms)


def _element(score: Score, read: Read) -> str:
    """The number of the element in a contiguous array."""
    shape = f"p.{_shape(read.array)}"
    number = "0LL"
    for axis, m in enumerate(read.index):
        number = f"({number}) * {shape}.length{axis} + nearest(x{m}, {shape}.length{axis})"
    return number
