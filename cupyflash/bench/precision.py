"""The suite `precision`: how far float32 and float64 results are from exact ones, on inputs that hurt, beside standard
attention."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .. import attention, attention_backward
from ..gpu.plan import FAMILIES
from ..passes import BACKWARD, FORWARD
from ..tools.timing import reason
from . import peers
from .report import cell
from .suite import Measured, Options, Problem

RESULTS = ("out", "dq", "dk", "dv")
ERRORS = ("largest", "Frobenius", "row")  # over the largest value; norms; norms in the worst row
NAMES = {
    "standard": "standard",
    "standard-tf32": "standard, TF32",
    "3xtf32": "3xTF32",
    "efficient": "memory-efficient (PyTorch)",
    "ours": "cupyflash",
}
PEERS = ("standard", "standard-tf32", "3xtf32", "efficient", *FAMILIES)
EXACT = "longdouble"


class Inputs(NamedTuple):
    """q, k, v and dout, (B, H, S, D)."""

    q: Any
    k: Any
    v: Any
    dout: Any


def _scaled(x: Inputs, *factors: Any) -> Inputs:
    return Inputs(*(a * factor for a, factor in zip(x, factors, strict=True)))


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Inputs:
    return Inputs(*(rng.standard_normal(shape) for _ in range(4)))


def _outlier(rng: np.random.Generator, shape: tuple[int, ...]) -> Inputs:
    """One row of each array is 64 times as large as the others."""
    row = np.where(np.arange(shape[2]) == shape[2] // 3, 64.0, 1.0)[:, None]
    return _scaled(_normal(rng, shape), *[row] * 4)


def _spread(rng: np.random.Generator, shape: tuple[int, ...]) -> Inputs:
    """Rows between 1 and 2^-24 of the largest; of V and dO around 1."""
    rows = [2.0 ** -rng.uniform(0, 24, (*shape[:-1], 1)) for _ in range(4)]
    return _scaled(_normal(rng, shape), rows[0], rows[1], 2.0**12 * rows[2], 2.0**12 * rows[3])


# Scales are such that scores, results and what lies between them are numbers of float32.
INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Inputs]] = {
    "normal": _normal,
    "scores x 100": lambda rng, shape: _scaled(_normal(rng, shape), 100, 1, 1, 1),
    "heavy tails": lambda rng, shape: Inputs(*(rng.standard_t(2, shape) for _ in range(4))),
    "outlier row": _outlier,
    "rows over 2^24": _spread,
    "q, v 1e-20": lambda rng, shape: _scaled(_normal(rng, shape), 1e-20, 1e20, 1e-20, 1e20),
    "q, v 1e18": lambda rng, shape: _scaled(_normal(rng, shape), 1e18, 1e-18, 1e18, 1e-18),
}


def problems(options: Options) -> list[Problem]:
    """The errors of each result for each kind of inputs."""
    fixed = {"batch": 1, "heads": 2, "seq": 256 if options.quick else 1024, "dim": 64}
    return [
        {"dtype": dtype, "inputs": inputs, "result": result, "error": error, **fixed}
        for dtype, inputs, result, error in itertools.product(("float32", "float64"), INPUTS, RESULTS, ERRORS)
    ]


def measure(problem: Problem, options: Options) -> Measured:
    """Errors of everybody: of those that are found together for a kind of inputs, one."""
    shape = tuple(problem[name] for name in ("batch", "heads", "seq", "dim"))
    found, notes = errors(problem["dtype"], problem["inputs"], shape, options.family)
    values = {name: each[problem["result"], problem["error"]] for name, each in found.items()}
    wild = {name: f"wrong: {problem['result']} is not finite" for name, x in values.items() if not math.isfinite(x)}
    return {name: x for name, x in values.items() if name not in wild}, {**notes, **wild}


Found = dict[tuple[str, str], float]


@functools.lru_cache(2)
def errors(
    dtype: str, inputs: str, shape: tuple[int, ...], family: str | None
) -> tuple[dict[str, Found], dict[str, str]]:
    """By name, the errors of everybody who takes the problem, by result and kind of error; and why others do not."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = INPUTS[inputs](np.random.default_rng(zlib.crc32(inputs.encode())), shape)
    rounded = Inputs(*(x.astype(dtype) for x in drawn))
    # float64 is judged by more than float64, as far as the processor has it.
    exact = standard(Inputs(*(x.astype(np.longdouble if dtype == "float64" else np.float64) for x in rounded)))
    given = Inputs(*(torch.from_numpy(x).to(device) for x in rounded))
    ways: dict[str, Callable[[], tuple[Any, ...]]] = {"standard": lambda: standard(given)}
    if dtype == "float32":
        ways["standard-tf32"] = lambda: _with_tf32(lambda: standard(given))
        ways["3xtf32"] = lambda: _with_tf32(lambda: standard(given, product_of_parts))
    ways["efficient"] = lambda: _efficient(given)
    ways["ours"] = lambda: ours(given, family)
    ways |= {name: functools.partial(ours, given, name) for name in FAMILIES if device == "cuda"}
    found, notes = {}, {}
    for name, way in ways.items():
        try:
            results = [x.detach().cpu().numpy() for x in way()]
        except Exception as failure:  # noqa: BLE001 - a peer may fail in any way; the table goes on without it
            notes[name] = reason(failure)
            continue
        judged = [distance(x, right) for x, right in zip(results, exact, strict=True)]
        found[name] = {(result, kind): each[kind] for result, each in zip(RESULTS, judged) for kind in ERRORS}
    return found, notes


def distance(x: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """The ERRORS of a result; of rows those that are more than rounding beside the largest."""
    difference = x.astype(right.dtype) - right
    norms, sizes = (np.sqrt((a * a).sum(-1)) for a in (difference, right))
    there = sizes > np.finfo(x.dtype).eps * sizes.max()
    kinds = (
        abs(difference).max() / abs(right).max(),
        np.sqrt((norms**2).sum() / (sizes**2).sum()),
        (norms[there] / sizes[there]).max(),
    )
    return dict(zip(ERRORS, map(float, kinds)))


def standard(x: Inputs, product: Callable[[Any, Any], Any] | None = None) -> tuple[Any, ...]:
    """Out, dQ, dK and dV with every score in memory, in the dtype of the arrays, PyTorch's or NumPy's."""
    import torch

    xp: Any = np if isinstance(x.q, np.ndarray) else torch
    product = product or xp.matmul
    scale = float(x.q.shape[-1]) ** -0.5
    s = product(x.q, x.k.swapaxes(2, 3)) * scale
    p = xp.exp(s - xp.amax(s, -1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    dp = product(x.dout, x.v.swapaxes(2, 3))
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return product(p, x.v), product(ds, x.k), product(ds.swapaxes(2, 3), x.q), product(p.swapaxes(2, 3), x.dout)


def product_of_parts(a: Any, b: Any) -> Any:
    """A matrix product of float32 by three of TF32, as CUTLASS has it: x is a part of 11 bits and what is left."""
    import torch

    (a, a_left), (b, b_left) = ((x, y - x) for y in (a, b) for x in [_eleven_bits(y)])
    return (torch.matmul(a_left, b) + torch.matmul(a, b_left)) + torch.matmul(a, b)


def _eleven_bits(x: Any) -> Any:
    import torch

    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _with_tf32(call: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    with _tf32():
        return call()


@contextmanager
def _tf32() -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _efficient(x: Inputs) -> tuple[Any, ...]:
    q, k, v, dout = (a.transpose(1, 2).contiguous() for a in x)
    results: list[Any] = []
    for of in (FORWARD, BACKWARD):
        candidate = peers.LOADERS["efficient"]()(peers.Case(q, k, v, dout, causal=False), of)
        with candidate.context():
            results += [a.transpose(1, 2) for a in candidate.call()]
    return tuple(results)


def ours(x: Inputs, family: str | None) -> tuple[Any, ...]:
    q, k, v, dout = x
    out, lse = attention(q, k, v, layout="bhsd", return_lse=True, family=family)
    return out, *attention_backward(dout, q, k, v, out, lse, layout="bhsd", family=family)


def tables(data: dict[str, Any]) -> str:
    """A results file as Markdown: for each dtype a line for each result of each kind of inputs, with all of ERRORS in a
    cell."""
    lines = []
    for dtype in dict.fromkeys(row["problem"]["dtype"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["problem"]["dtype"] == dtype]
        by = {tuple(row["problem"][name] for name in ("inputs", "result", "error")): row for row in rows}
        values = {key: {**row["peers"], "ours": row["ours"]} for key, row in by.items()}
        names = [name for name in ("ours", *PEERS) if any(each.get(name) is not None for each in values.values())]
        sizes = ", ".join(f"{name} {rows[0]['problem'][name]}" for name in ("batch", "heads", "seq", "dim"))
        lines += [
            f"{dtype}, {data['machine']}, {data['date'][:10]}; {sizes}. Each cell: {', '.join(ERRORS)}.",
            "",
            "| inputs | | " + " | ".join(NAMES.get(name, f"`{name}`") for name in names) + " |",
            "| --- |" + " --- |" * (len(names) + 1),
        ]
        for inputs, result in dict.fromkeys(key[:2] for key in by):
            each = [[values.get((inputs, result, error), {}).get(name) for error in ERRORS] for name in names]
            shown = [" ".join(map(cell, errors)) if any(x is not None for x in errors) else "–" for errors in each]
            lines.append(f"| {inputs} | {result} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)
