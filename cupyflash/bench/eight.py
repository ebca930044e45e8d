"""The suite `fp8`: the forward of inputs of 8 bits, beside cuDNN's and beside ours and FlashAttention-3's of
bfloat16."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from .. import attention
from ..passes import FORWARD
from ..problem import FLOAT8
from ..tools.timing import Candidate, geomean, ratio, reason
from . import peers
from .report import NAMES, cell, ratio_text
from .suite import TOLERANCE, Measured, Options, Problem, case_of, flops_of, relative_error, take_turns

PEERS = ("cudnn8", "eight", "bf16", "fa3")
OVER = {"cudnn8": "cuDNN", "bf16": "our bfloat16"}
NEAR = 0.08  # relative, Frobenius: of numbers with 4 bits, P and perhaps the result among them


def problems(options: Options) -> list[Problem]:
    tokens, hidden = 16384, 2048
    lengths = (2048,) if options.quick else (2048, 4096, 8192, 16384)
    return [
        {"pass": "forward", "dtype": FLOAT8, "dim": dim, "causal": causal, "seq": seq, "batch": tokens // seq,
         "heads": hidden // dim}
        for dim, causal, seq in itertools.product((64, 128, 256), (False, True), lengths)
    ]  # fmt: skip


def measure(problem: Problem, options: Options) -> Measured:
    """TFLOP/s. All compute the same: numbers of 8 bits, or these in bfloat16."""
    import torch

    case = case_of({**problem, "dtype": "bfloat16"})
    in_eight = case._replace(**{name: getattr(case, name).to(torch.float8_e4m3fn) for name in "qkv"})
    in_sixteen = case._replace(**{name: getattr(in_eight, name).bfloat16() for name in "qkv"})
    exact = attention(*(x.float() for x in in_sixteen[:3]), causal=case.causal)
    ways: dict[str, Callable[[], Candidate]] = {
        "ours": lambda: peers.ours(options.family)(in_eight, FORWARD),
        "eight": lambda: peers.ours(options.family)(
            in_eight._replace(scores={"out_dtype": torch.float8_e4m3fn}), FORWARD
        ),
        "bf16": lambda: peers.ours()(in_sixteen, FORWARD),
        "cudnn8": functools.partial(_peer, "cudnn8", in_eight),
        "fa3": functools.partial(_peer, "fa3", in_sixteen),
    }
    candidates, notes = {}, {}
    for name, way in ways.items():
        try:
            candidate = way()
            with candidate.context():
                (out, *_) = candidate.call()
            error = relative_error(out.float(), exact)
        except Exception as failure:  # noqa: BLE001 - a peer may fail in any way; the row goes on without it
            notes[name] = reason(failure)
            continue
        if error < (TOLERANCE if name in ("bf16", "fa3") else NEAR):
            candidates[name] = candidate
        else:
            notes[name] = f"wrong: relative error {error:.2g} against float32"
    seconds, more = take_turns(candidates, options)
    work = flops_of(problem, FORWARD)
    return {name: work / 1e12 / t for name, t in seconds.items()}, notes | more


def tables(data: dict[str, Any]) -> str:
    """A results file as Markdown, with what ours is times cuDNN's and times ours of bfloat16."""
    rows = data["rows"]
    over = {name: [ratio(row["ours"], row["peers"].get(name), row["unit"]) for row in rows] for name in OVER}
    names = [name for name in PEERS if any(row["peers"].get(name) for row in rows)]
    said = "16k tokens in all, hidden size 2048, results in bfloat16 unless said."
    columns = [
        "dim",
        "causal",
        "seq",
        "cupyflash",
        *(NAMES[name] for name in names),
        *(f"over {OVER[x]}" for x in over),
    ]
    lines = [
        f"{rows[0]['unit']}, {data['machine']}, {data['date'][:10]}; {said}",
        "",
        f"| {' | '.join(columns)} |",
        "|" + " --- |" * len(columns),
    ]
    for n, row in enumerate(rows):
        asked = [cell(row["problem"][key]) for key in ("dim", "causal", "seq")]
        values = [cell(x) for x in (row["ours"], *(row["peers"].get(name) for name in names))]
        ratios = [ratio_text(each[n]).plain for each in over.values()]
        lines.append(f"| {' | '.join([*asked, *values, *ratios])} |")
    means = [f"{ratio_text(geomean(each)).plain} {OVER[name]}" for name, each in over.items()]
    return "\n".join([*lines, "", f"Geometric means: {', '.join(means)}."])


def _peer(name: str, case: peers.Case) -> Candidate:
    found = peers.load(name)
    if callable(found):
        return found(case, FORWARD)
    raise RuntimeError(found)
