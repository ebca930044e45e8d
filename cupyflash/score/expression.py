"""Score functions as an expression in C: `s + 0.1f * (i - j)`, `j <= i ? s : -INFINITY`, `s + table[h][j - i + 127]`.

The same graph comes of it as of a Python function, so that it runs on a CPU and has derivatives. Integers are divided
as in C.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

from .graph import KINDS, RULES, VARIABLES, Graph, ScoreArray

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?)|([A-Za-z_]\w*)|"
    r"(<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>=!~&|^?:()\[\],]))"
)
_LEVELS = (  # of operators, those that bind least first
    {"||": "or"}, {"&&": "and"}, {"|": "or"}, {"^": "xor"}, {"&": "and"}, {"==": "eq", "!=": "ne"},
    {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}, {"<<": "shl", ">>": "shr"}, {"+": "add", "-": "sub"},
    {"*": "mul", "/": "div", "%": "mod"},
)  # fmt: skip
_LEVEL = {token: (n, op) for n, level in enumerate(_LEVELS) for token, op in level.items()}
_CASTS = {"float": "float", "double": "float", "int": "int", "bool": "bool"}
_ALIASES = {"fmin": "minimum", "fmax": "maximum", "min": "minimum", "max": "maximum", "fabs": "abs", "logf": "log"}
_FUNCTIONS = {name for name, rule in RULES.items() if rule == "float" and name != "div"} | {"abs", "minimum", "maximum"}
_TWO = ("minimum", "maximum", "pow")


def parse(text: str, graph: Graph, arrays: tuple[ScoreArray, ...]) -> int:
    """The node of an expression. ValueError, saying where, for what is none."""
    parser = _Parser(text, graph, arrays)
    try:
        n = parser.choice()
    except RecursionError:
        raise ValueError(
            f"score is {text!r}, which is nested too deep; it must be flatter, or a Python function"
        ) from None
    if parser.token:
        parser.refuse(f"does not go on with {parser.token!r}")
    return n


class _Parser:
    def __init__(self, text: str, graph: Graph, arrays: tuple[ScoreArray, ...]) -> None:
        self.text, self.graph, self.end = text, graph, 0
        self.arrays = {x.name: (n, x) for n, x in enumerate(arrays)}
        self.advance()

    def refuse(self, why: str) -> NoReturn:
        before = self.text[: self.start]
        raise ValueError(
            f"score is {self.text!r}, which {why} at {len(before) + 1}; it must be an expression in C of s, b, h, i, j"
        )

    def at_hand(self) -> str:
        return repr(self.token) if self.token else "its end"

    def advance(self) -> str:
        """The next token becomes the one at hand, which is returned."""
        last = getattr(self, "token", "")
        while self.end < len(self.text) and self.text[self.end].isspace():
            self.end += 1
        self.start, match = self.end, _TOKEN.match(self.text, self.end)
        if match is None and self.end < len(self.text):
            self.refuse(f"has {self.text[self.end]!r}")
        self.token = "" if match is None else self.text[self.start : match.end()]
        self.number = match[1] if match else None
        self.name = match[2] if match else None
        self.end = len(self.text) if match is None else match.end()
        return last

    def expect(self, token: str) -> None:
        if self.token != token:
            self.refuse(f"has {self.at_hand()} instead of {token!r}")
        self.advance()

    def choice(self) -> int:
        chosen = []
        while True:
            n = self.binary(0)
            if self.token != "?":
                break
            self.advance()
            chosen.append((n, self.choice()))
            self.expect(":")
        for condition, x in reversed(chosen):
            n = self.graph.where(condition, x, n)
        return n

    def binary(self, least: int) -> int:
        """Of operators that bind as those of the level `least`, or more."""
        x = self.unary()
        while self.token in _LEVEL and _LEVEL[self.token][0] >= least:
            token = self.advance()
            level, op = _LEVEL[token]
            x = self.operate(token, op, x, self.binary(level + 1))
        return x

    def operate(self, token: str, op: str, x: int, y: int) -> int:
        graph = self.graph
        if token in ("&&", "||"):
            x, y = graph.to("bool", x), graph.to("bool", y)
        if op in ("gt", "ge"):
            return graph.apply({"gt": "lt", "ge": "le"}[op], y, x)
        if op in ("div", "mod") and graph.widest(x, y) != "float":
            op = f"trunc{op}"
        return self.apply(op, x, y)

    def apply(self, op: str, *args: int) -> int:
        try:
            return self.graph.apply(op, *args)
        except TypeError as error:
            self.refuse(f"has {op!r} of {' and '.join(self.graph.kind(n) for n in args)} ({error})")

    def unary(self) -> int:
        before = []  # signs, and kinds that it is cast to
        while self.token in ("-", "+", "!", "~", "("):
            token = self.advance()
            if token == "(" and self.token not in _CASTS:
                x = self.choice()
                self.expect(")")
                break
            if token == "(":
                token = _CASTS[self.advance()]
                self.expect(")")
            before.append(token)
        else:
            x = self.primary()
        for token in reversed(before):
            if token in KINDS:
                x = self.graph.to(token, x)
            elif token == "!":
                x = self.apply("not", self.graph.to("bool", x))
            elif token != "+":
                x = self.apply("neg" if token == "-" else "not", x)
        return x

    def primary(self) -> int:
        if self.number:
            if self.token.isdigit() and self.token[0] == "0" != self.token:
                self.refuse(f"has {self.token!r}, in C a number in base 8,")
            token = self.advance()
            if token[:2] in ("0x", "0X"):
                return self.graph.constant(int(token, 16))
            whole = token.isdigit()
            return self.graph.constant(int(token) if whole else float(token.rstrip("fF")))
        if not self.name:
            self.refuse(f"has {self.at_hand()} instead of a number or a name")
        if self.name in self.arrays:
            return self.element(*self.arrays[self.name])
        if self.name in VARIABLES:
            return self.graph.variable(self.advance())
        if self.name in ("INFINITY", "true", "false"):
            return self.graph.constant({"INFINITY": math.inf, "true": True, "false": False}[self.advance()])
        return self.call()

    def element(self, number: int, array: ScoreArray) -> int:
        self.advance()
        index = []
        while self.token == "[":
            self.advance()
            index.append(self.choice())
            while self.token == ",":
                self.advance()
                index.append(self.choice())
            self.expect("]")
        if len(index) != array.rank:
            self.refuse(
                f"reads {array.name} with {len(index)} indices, not {array.rank}, as many as it has dimensions,"
            )
        if any(self.graph.kind(n) == "float" for n in index):
            self.refuse(f"reads {array.name} at a float, not at integers,")
        return self.graph.read(
            number, array.kind, tuple(self.graph.to("int", n) if self.graph.kind(n) == "bool" else n for n in index)
        )

    def call(self) -> int:
        name = self.name or ""
        for plain in (name, name.removesuffix("f"), name.removeprefix("__").removesuffix("f")):
            op = _ALIASES.get(plain, plain)
            if op in _FUNCTIONS:
                break
        else:
            known = ", ".join(sorted(_FUNCTIONS | {"min", "max"}))
            arrays = "".join(f", {x}" for x in self.arrays)
            self.refuse(f"has {name!r}, which is none of s, b, h, i, j{arrays} nor a function of {known},")
        self.advance()
        self.expect("(")
        args = [self.choice()]
        while self.token == ",":
            self.advance()
            args.append(self.choice())
        self.expect(")")
        if len(args) != 1 + (op in _TWO):
            self.refuse(f"has {name!r} of {len(args)} numbers, not {1 + (op in _TWO)},")
        return self.apply(op, *args)
