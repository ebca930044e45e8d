"""The rows that `cupyflash bench parallel` writes, and the tables of docs/parallel.md, which are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tools.timing import significant
from .report import cell

HEADINGS = {
    "keys": "keys", "heads": "heads", "fa3 gather": "FlashAttention-3, gather", "fa3 ring": "FlashAttention-3, ring",
    "fa3 ulysses": "FlashAttention-3, Ulysses", "torch allgather": "PyTorch, all-gather",
    "torch alltoall": "PyTorch, ring", "cudnn heads": "cuDNN, all_to_all",
}  # fmt: skip


def row(
    problem: dict[str, Any], one: float, each: Mapping[str, float], usual: float, peers: Mapping[str, float | None],
    notes: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Of milliseconds: of the whole on one GPU, of each way over several, of the one that a call takes, of others."""
    best = min((t for t in peers.values() if t), default=None)
    return {
        "problem": problem, "unit": "ms", "one": significant(one), "ours": significant(usual),
        "each": {name: significant(t) for name, t in each.items()},
        "share": {name: significant(one / problem["ranks"] / t) for name, t in each.items()},
        "peers": {name: significant(t) for name, t in peers.items()}, "notes": notes,
        "ratio_to_best": None if best is None else significant(best / usual),
    }  # fmt: skip


def tables(data: dict[str, Any]) -> str:
    """Milliseconds of the slowest rank, and in brackets the share of what each GPU would do alone."""
    rows = data["rows"]
    names = [name for name in HEADINGS if any(name in (row["each"] | row["peers"]) for row in rows)]
    headings = ["", "pass", "one GPU", *(HEADINGS[name] for name in names), "vs best"]
    lines = [_where(data), "", "| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
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
    return "\n".join(lines)


def _where(data: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {x}" for name, x in data.get("versions", {}).items())
    link = ", ".join(f"{x:g} GB/s of {size}" for size, x in data.get("link_gbps", {}).items())
    return (
        f"{data.get('ranks', 2)} x {data.get('gpu')}, {str(data.get('date'))[:10]}, {versions}; kernel sources "
        f"{str(data.get('sources'))[:12]}. Send and receive at once, into each GPU: {link or 'not measured'}. "
        "Milliseconds of the slowest rank; in brackets the share of what each GPU would do alone."
    )
