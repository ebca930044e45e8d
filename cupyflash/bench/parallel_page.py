"""The file that `cupyflash bench parallel` writes, and what is made of it for docs/parallel.md: tables, a picture."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..tools.timing import significant
from . import report
from .report import cell

FILE = "parallel.json"
HEADINGS = {
    "keys": "keys", "heads": "heads", "fa3 gather": "FlashAttention-3, gather", "fa3 ring": "FlashAttention-3, ring",
    "fa3 ulysses": "FlashAttention-3, Ulysses", "torch allgather": "PyTorch, cuDNN, all-gather",
    "torch alltoall": "PyTorch, cuDNN, ring", "flash allgather": "PyTorch, flash, all-gather",
    "flash alltoall": "PyTorch, flash, ring", "cudnn heads": "cuDNN, all_to_all",
}  # fmt: skip
SAME = ("suite", "gpu", "ranks", "driver", "sources", "versions")  # of rows that may stand in one file


def row(
    problem: dict[str, Any], one: float, each: Mapping[str, float], usual: float | None,
    peers: Mapping[str, float | None], notes: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Of milliseconds: of the whole on one GPU, of each way over several, of the one that a call takes, of others."""
    best = min((t for t in peers.values() if t), default=None)
    return {
        "problem": problem, "unit": "ms", "one": significant(one), "ours": significant(usual),
        "each": {name: significant(t) for name, t in each.items()},
        "share": {name: significant(one / problem["ranks"] / t) for name, t in each.items()},
        "peers": {name: significant(t) for name, t in peers.items()}, "notes": notes,
        "ratio_to_best": None if best is None or usual is None else significant(best / usual),
    }  # fmt: skip


def begin(folder: Path, circumstances: Mapping[str, Any]) -> None:
    """A file for rows; those that it has remain where circumstances are the same."""
    path = folder / FILE
    rows = []
    if path.is_file():
        before = report.read(path)
        if all(before.get(name) == circumstances[name] for name in SAME):
            rows = before["rows"]
    report.save(path, {**circumstances, "rows": rows})


def has(folder: Path) -> set[str]:
    """The cases of which there are rows with a result."""
    return {x["problem"]["case"] for x in report.read(folder / FILE)["rows"] if x["ours"] is not None}


def keep(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, in the place of those of the same cases."""
    data = report.read(folder / FILE)
    names = {x["problem"]["case"] for x in rows}
    data["rows"] = [x for x in data["rows"] if x["problem"]["case"] not in names] + [*rows]
    data["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report.save(folder / FILE, data)


def told(row: dict[str, Any]) -> str:
    """A row as a line."""
    problem = row["problem"]
    head = f"{problem['case']} {problem['pass']}"
    if "share" not in row:
        each = ", ".join(f"{name} {x:g}" for name, x in row["each"].items())
        return f"{head}: {row['ours']:g} {row['unit']} ({each})"
    each = ", ".join(f"{name} {t:g} ({row['share'][name]:.3f})" for name, t in row["each"].items())
    peers = "".join(f"; {name} {t:g}" for name, t in row["peers"].items() if t)
    return f"{head} {problem['dtype']}: one GPU {row['one']:g} ms; {each}{peers}"


def tables(data: dict[str, Any]) -> str:
    """Milliseconds of the slowest rank, and in brackets the share of what each GPU would do alone; then what is no
    call over all ranks."""
    shared = [row for row in data["rows"] if "share" in row]
    parts = [row for row in data["rows"] if "share" not in row]
    found = [_where(data)]
    if shared:
        found += ["", *_shares(shared)]
    if parts:
        found += ["", "| | | made of, or beside |", "| --- | --- | --- |"]
        for row in parts:
            each = ", ".join(f"{name} {cell(x)}" for name, x in row["each"].items())
            unit = "µs" if row["unit"] == "us" else row["unit"]
            found.append(f"| {row['problem']['case']} | {cell(row['ours'])} {unit} | {each} |")
    return "\n".join(found)


def _shares(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = [name for name in HEADINGS if any(name in (row["each"] | row["peers"]) for row in rows)]
    headings = ["", "pass", "one GPU", *(HEADINGS[name] for name in names), "vs best"]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in rows:
        problem, values = row["problem"], row["peers"] | row["each"]
        shown = [
            f"{cell(values[name])} ({row['share'][name]:.2f})" if name in row["share"] else cell(values.get(name))
            for name in names
        ]
        dtype = "" if problem["dtype"] == "bfloat16" else f", {problem['dtype']}"
        ratio = "–" if row["ratio_to_best"] is None else f"{row['ratio_to_best']:.2f}x"
        lines.append(
            " | ".join(["| " + problem["case"] + dtype, problem["pass"], cell(row["one"]), *shown, ratio]) + " |"
        )
    return lines


def _where(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {x}" for name, x in data["versions"].items())
    return (
        f"{data['ranks']} x {data['gpu']}, {data['date'][:10]}, {versions}; kernel sources {data['sources'][:12]}. "
        "Milliseconds of the slowest rank; in brackets the share of what each GPU would do alone."
    )


def picture(found: Sequence[dict[str, Any]]) -> Any:
    """Of each file, and for calls of no other option, the share by length: ours in the exchange that a call takes, and
    the best of others. None where there is nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    from .plots import COLOURS, STYLE

    panels = [
        (of, heads) for of in ("forward", "backward") for heads in ("16/16", "32/8")
        if any(_points(data, of, heads) for data in found)
    ]  # fmt: skip
    if not panels:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(panels) + 0.4, 4.0), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (of, heads) in zip(axes, panels):
            for n, data in enumerate(found):
                points = _points(data, of, heads)
                where = f"{data['ranks']} x {data['gpu']}"
                for m, (label, colour) in enumerate((("cupyflash", COLOURS["ours"]), ("the best other", "#1f77b4"))):
                    style = {"color": colour, "marker": "osd^"[n % 4], "linestyle": ("-", "--", ":", "-.")[n % 4]}
                    axis.plot([x[0] for x in points], [x[1 + m] for x in points], label=f"{label}, {where}", **style)
            lengths = sorted({x[0] for data in found for x in _points(data, of, heads)})
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{x // 1024}k" if x >= 1024 else str(x) for x in lengths])
            axis.axhline(1, color="#333333", linewidth=1)
            axis.set_ylim(bottom=0)
            axis.set_title(f"{of}, {heads} heads, causal")
            axis.set_xlabel("sequence length")
        axes[0].set_ylabel("share of what each GPU would do alone")
        handles = {x.get_label(): x for axis in axes for x in axis.get_lines() if str(x.get_label())[0] != "_"}
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=2, frameon=False)
    return figure


def _points(data: dict[str, Any], of: str, heads: str) -> list[tuple[int, float | None, float | None]]:
    """Of causal calls (length, our share, that of the best other)."""
    found = []
    for row in data["rows"]:
        problem = row["problem"]
        here = problem.get("what") == "causal" and problem["pass"] == of
        if here and row["ours"] and f"{problem['heads_q']}/{problem['heads_k']}" == heads:
            alone = row["one"] / problem["ranks"]
            best = min((t for t in row["peers"].values() if t), default=None)
            found.append((problem["seq"], alone / row["ours"], None if best is None else alone / best))
    return sorted(found)
