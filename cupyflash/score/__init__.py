"""Score functions: what `attention(score=...)` computes with.

A score function is an ordinary Python function of (s, b, h, i, j, arrays ...) that is run once, on numbers that write
down what is done to them: operators, comparisons, the functions here, and NumPy's of the same names. Branches by
`where`.
"""

from .graph import Score, ScoreArray
from .trace import trace
from .value import (
    absolute,
    atan2,
    clip,
    cos,
    erf,
    exp,
    floor,
    gelu,
    log,
    log2,
    maximum,
    minimum,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
)

__all__ = [
    "Score", "ScoreArray", "absolute", "atan2", "clip", "cos", "erf", "exp", "floor", "gelu", "log", "log2", "maximum",
    "minimum", "sigmoid", "sin", "softplus",
    "sqrt", "tanh", "trace", "where",
]  # fmt: skip
