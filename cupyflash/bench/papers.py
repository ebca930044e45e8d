"""docs/papers.md: what the FlashAttention papers report beside what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tools.timing import significant
from . import plots, report
from .report import Row, cell

SUITES = ("figures", "memory", "training")
PASSES = {
    "both": "forward and backward (Figures 4 and 7)",
    "forward": "forward (Figure 5)",
    "backward": "backward (Figure 6)",
}
COLUMNS = {  # of the figures' tables, from the oldest to the newest
    "math": "standard (PyTorch math)",
    "flash1": "FlashAttention-1 (ours)",
    "sm80": "FlashAttention-2 (ours, sm80)",
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "ours": "cupyflash",
}
# FlashAttention-2 (https://arxiv.org/abs/2307.08691), the bars of Figure 4c: A100, forward and backward, head dim 64,
# causal, TFLOP/s by sequence length. None: out of memory.
FIGURE_4C: dict[int, tuple[int | None, int, int]] = {  # PyTorch, FlashAttention, FlashAttention-2
    512: (15, 58, 88),
    1024: (16, 70, 119),
    2048: (17, 77, 140),
    4096: (18, 87, 156),
    8192: (18, 92, 165),
    16384: (None, 97, 171),
}
# Table 1 of the same paper: TFLOP/s of one of eight A100. Without FlashAttention, with it, with FlashAttention-2.
TABLE_1 = {
    ("1.3B", 2048): (142, 189, 196),
    ("1.3B", 8192): (72, 170, 220),
    ("2.7B", 2048): (149, 189, 205),
    ("2.7B", 8192): (80, 175, 225),
}
INTRO = """# The papers' tables

<!-- Made by `cupyflash bench plot` from the JSON files in `bench/results/`; do not edit. -->

`cupyflash bench paper` measures them:
the suites `figures`, `memory` and `training`, each of which can be run alone.

The papers are FlashAttention (Dao et al. 2022, https://arxiv.org/abs/2205.14135) and FlashAttention-2 (Dao 2023,
https://arxiv.org/abs/2307.08691). Their figures are of an A100, whose tensor cores reach 312 TFLOP/s by the data sheet.
"""
FIGURES = """The papers' setting: 16k tokens in all, hidden width 2048, TFLOP/s by their count (4·S²·D·H·B for the forward, half of it
with a causal mask, 2.5 times it for the backward). In brackets: the share of what a matrix product reaches in the same
run. Forward and backward is the work of both over the time of both, each timed alone. – is what has no room.
"""
FIGURES_DIFFER = """Why they differ:

- FlashAttention-1 is Algorithm 1 as published, in plain CUDA (`kernels_cu/flash1`): one thread block for each head and no
  tensor cores. The paper's is a kernel on tensor cores, so that the way from 1 to 2 is longer here. With long sequences
  there are fewer heads than multiprocessors, and most of the GPU waits: what FlashAttention-2 changed first.
- Standard attention is PyTorch's math backend, which computes 16-bit inputs in float32. Its score matrix is left out where
  it would take more than half of the memory.
- Newer GPUs multiply matrices several times faster than an A100, but read memory and take exponentials hardly twice as
  fast: kernels that were near the ceiling there (`sm80` has the instructions of an A100) are further from it.
"""
MEMORY = """Megabytes at the peak. The paper's ratio is that of all memory, with inputs and results, so it is taken here as well:
"total". FlashAttention reports a footprint linear in the sequence length, up to 20 times smaller than that of exact
attention; its repository says 10 times at 2k and 20 times at 4k.
"""
TRAINING = """Model TFLOP/s by FlashAttention-2's formula, 6·S·N + 12·L·W·S² for a sequence (N parameters, L layers, width W): the score
matrix in full, and nothing for what is computed again. The paper's numbers are per GPU of eight A100; here it is one GPU.
`examples/train_gpt.py` runs any row. "recomputed": activations are computed again in the backward, in all columns alike.
"""
TRAINING_DIFFER = """Why they differ:

- The GPU, and that eight of them also exchange gradients.
- The paper's models have fused layers; these are plain PyTorch modules, with float32 weights under bfloat16 autocast, where
  norms, activations and the residual take a larger part of a step.
- Without FlashAttention each layer's score matrices, here bfloat16, are kept for the backward: "out of memory" is where all
  layers' had no room.
"""


def write(found: Sequence[dict[str, Any]], docs: Path) -> list[str]:
    """Pictures and the page, from results files; returns the files written, none where no suite of the papers
    was run."""
    found = [data for data in found if data["suite"] in SUITES and not data["family"]]
    if not any(data["suite"] != "memory" for data in found):
        return []
    written = []
    parts = [INTRO]
    for place in dict.fromkeys(data["file"].split("/")[0] for data in found):
        here = {data["suite"]: data for data in found if data["file"].split("/")[0] == place}
        parts.append(f"## {next(iter(here.values()))['machine']}\n")
        if data := here.get("figures"):
            pictures = _draw(data, docs / "plots")
            written += [str(path) for path in pictures]
            parts += ["### Speed of attention: FlashAttention-2, Figures 4 to 7\n", _circumstances(data), FIGURES]
            parts += [f"![{path.stem}](plots/{path.name})\n" for path in pictures]
            parts += [claims(data), figure_4c(data), FIGURES_DIFFER]
            parts += [f"#### {title[0].upper()}{title[1:]}\n\n{speeds(data, name)}" for name, title in PASSES.items()]
        if data := here.get("memory"):
            parts += ["### Memory: FlashAttention, Figure 3\n", _circumstances(data), MEMORY, memory(data["rows"])]
        if data := here.get("training"):
            parts += [
                "### Training: FlashAttention-2, Table 1\n",
                _circumstances(data),
                TRAINING,
                training(data["rows"]),
            ]
            parts.append(TRAINING_DIFFER)
    page = docs / "papers.md"
    page.write_text("\n".join(parts), encoding="utf-8")
    return [*written, str(page)]


def rows_of(data: dict[str, Any], name: str) -> list[Row]:
    """The rows of a pass; "both" is computed from the two: all the work over the time of both."""
    rows = [row for row in data["rows"] if row["problem"]["pass"] == name]
    if name != "both":
        return rows
    paired: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in data["rows"]:
        problem = row["problem"]
        paired.setdefault((problem["dim"], problem["causal"], problem["seq"]), {})[problem["pass"]] = row
    for pair in paired.values():
        if len(pair) == 2:
            names = ["ours", *pair["forward"]["peers"]]
            speeds = {x: _together(_value(pair["forward"], x), _value(pair["backward"], x)) for x in names}
            known = {x: speed for x, speed in speeds.items() if speed is not None}
            problem = {**pair["forward"]["problem"], "pass": "both"}
            rows.append(report.make_row(problem, "TFLOP/s", known, {}, names[1:]))
    return rows


def _together(forward: float | None, backward: float | None) -> float | None:
    return significant(3.5 / (1 / forward + 2.5 / backward)) if forward and backward else None


def speeds(data: dict[str, Any], name: str) -> str:
    """Everybody's TFLOP/s in one pass, with the share of the ceiling."""
    rows = rows_of(data, name)
    shown = [column for column in COLUMNS if any(_value(row, column) is not None for row in rows)]
    lines = _head("head dim", "causal", "S", *(COLUMNS[column] for column in shown))
    for row in rows:
        problem = row["problem"]
        ceiling = plots.ceiling(row, data["ceilings"])
        cells = [_share(_value(row, column), ceiling) for column in shown]
        lines.append(_line(str(problem["dim"]), cell(problem["causal"]), str(problem["seq"]), *cells))
    return "\n".join(lines) + "\n"


def claims(data: dict[str, Any]) -> str:
    """What the FlashAttention-2 paper says in words, beside the same here."""
    rows = [row for name in PASSES for row in rows_of(data, name)]

    def best(column: str) -> str:
        known = [(speed, plots.ceiling(row, data["ceilings"])) for row in rows if (speed := _value(row, column))]
        return _share(*max(known)) if known else "–"

    def ratios(over: str, under: str) -> str:
        known = [a / b for row in rows if (a := _value(row, over)) and (b := _value(row, under))]
        return f"{min(known):.1f} to {max(known):.1f}" if known else "–"

    lines = [
        *_head("FlashAttention-2", "the paper", "here, ours (sm80)", "here, PyTorch's"),
        _line("times as fast as FlashAttention-1", "1.7 to 3.0", ratios("sm80", "flash1"), ratios("fa2", "flash1")),
        _line("times as fast as standard attention", "3 to 10", ratios("sm80", "math"), ratios("fa2", "math")),
        _line("at most, TFLOP/s", "230 (73% of an A100's 312); 335 on an H100", best("sm80"), best("fa2")),
    ]
    after = (
        f"The planner's choice (cupyflash) reaches {best('ours')} TFLOP/s at most and is {ratios('ours', 'fa2')} times "
        "as fast as PyTorch's FlashAttention-2. The paper expected another 1.5 to 2 times from the new instructions of "
        "an H100."
    )
    return "\n".join([*lines, "", after]) + "\n"


def figure_4c(data: dict[str, Any]) -> str:
    """One panel of the paper's figures, bar by bar."""
    lines = _head("Figure 4c, S", *(f"{name}, {where}" for name in _KINDS for where in ("A100", "here")), "cupyflash")
    for row in rows_of(data, "both"):
        problem = row["problem"]
        if (problem["dim"], problem["causal"]) == (64, True) and problem["seq"] in FIGURE_4C:
            papers = FIGURE_4C[problem["seq"]]
            here = [_value(row, column) for column in _KINDS.values()]
            pairs = [cell(x) for pair in zip(papers, here) for x in pair]
            lines.append(_line(str(problem["seq"]), *pairs, cell(_value(row, "ours"))))
    caption = "Forward and backward, head dim 64, causal, TFLOP/s: the paper's bars and the same here.\n"
    return caption + "\n" + "\n".join(lines) + "\n"


_KINDS = {"standard": "math", "FlashAttention-1": "flash1", "FlashAttention-2": "sm80"}


def memory(rows: Sequence[Row]) -> str:
    """Standard attention's memory and ours, beyond inputs and results, and the ratio with them."""
    lines = _head(
        "", "S", "standard (PyTorch math)", "cupyflash", "standard, total", "cupyflash, total", "ratio of totals"
    )
    for row in rows:
        problem = row["problem"]
        arrays = 4 if problem["pass"] == "forward" else 8  # q, k, v, out; and their gradients
        elements = problem["batch"] * problem["seq"] * problem["heads"] * problem["dim"]
        given = arrays * elements * (4 if problem["dtype"] == "float32" else 2) / 1e6
        values = [_value(row, "math"), row["ours"]]
        totals = [None if x is None else x + given for x in values]
        ratio = "–" if None in totals else f"{totals[0] / totals[1]:.1f}"  # type: ignore[operator]
        lines.append(_line(problem["pass"], str(problem["seq"]), *map(cell, (*values, *totals)), ratio))
    return "\n".join(lines) + "\n"


def training(rows: Sequence[Row]) -> str:
    """Table 1, the paper's columns and ours."""
    lines = _head(
        "model", "context", "", "without, paper", "without, here", "FlashAttention, paper", "FlashAttention-2, paper",
        "FlashAttention-2 (PyTorch), here", "cupyflash, here",
    )  # fmt: skip
    for row in rows:
        problem, notes = row["problem"], row.get("notes", {})
        without, first, second = TABLE_1[problem["model"], problem["seq"]]
        here = {name: _speed_and_note(_value(row, name), notes.get(name)) for name in ("math", "fa2", "ours")}
        lines.append(
            _line(
                problem["model"],
                str(problem["seq"]),
                "recomputed" if problem["recompute"] else "",
                str(without),
                here["math"],
                str(first),
                str(second),
                here["fa2"],
                here["ours"],
            )
        )
    return "\n".join(lines) + "\n"


def _speed_and_note(speed: float | None, note: str | None) -> str:
    """TFLOP/s with tokens/s, or why there is none."""
    if speed is None:
        return "out of memory" if note and "OutOfMemory" in note else note or "–"
    return f"{cell(speed)} ({note})" if note else cell(speed)


def _draw(data: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in PASSES:
        path = folder / f"{data['file'].replace('/', '_')}_{name}.png"
        rows = rows_of(data, name)
        if rows:
            figure = plots.figure({**data, "suite": name, "rows": rows})
            figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
            paths.append(path)
    return paths


def _circumstances(data: dict[str, Any]) -> str:
    return f"{data['rows'][0]['problem']['dtype']}; {plots.circumstances(data)}\n"


def _value(row: Row, name: str) -> float | None:
    value: float | None = row["ours"] if name == "ours" else row["peers"].get(name)
    return value


def _share(speed: float | None, ceiling: float | None) -> str:
    if speed is None or not ceiling:
        return cell(speed)
    share = speed / ceiling
    return f"{cell(speed)} ({share:.{0 if share >= 0.05 else 1}%})"


def _head(*columns: str) -> list[str]:
    return [_line(*columns), "|" + " --- |" * len(columns)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
