"""The tutorial's last table: what the suite `ladder` measured, rung by rung, and what each one changed."""

from __future__ import annotations

from typing import Any

from .report import cell

RUNGS = {
    "standard": ("standard (CuPy, cuBLAS)", "the formula: scores and weights, N x N, go to memory and back"),
    "flash1": ("FlashAttention-1", "tiles; one thread block for each head; O is rescaled and stored at every step"),
    "simt": ("FlashAttention-2, `simt`", "queries outermost: a block for each tile of them, O stays in registers"),
    "sm80": ("FlashAttention-2, `sm80`", "tensor cores, and copies in the background"),
    "ours": ("the planner's choice", "the fastest family of this GPU"),
    "sm90": ("Hopper, `sm90`", "products and copies run in the background, under the softmax"),
}


def table(data: dict[str, Any]) -> str:
    """One results file of the suite as a Markdown table, with a line that says what was measured."""
    rows = {(row["problem"]["pass"], row["unit"]): row for row in data["rows"]}
    columns = [("forward", "ms"), ("backward", "ms"), ("forward", "GB")]
    problem = data["rows"][0]["problem"]
    measured = (
        f"{data['machine']}, {data['date'][:10]}: {problem['dtype']}, batch {problem['batch']}, {problem['heads']} "
        f"heads, N = {problem['seq']}, d = {problem['dim']}. Bytes are counted as in section 5, from the tiles of each "
        "kernel; what tiles fetch again comes mostly from the GPU's cache."
    )
    lines = [
        measured,
        "",
        "| | forward | backward | moved, forward | what changed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in ("standard", "flash1", "simt", "sm80", "ours"):
        shown = [_value(rows.get(column), name) for column in columns]
        if any(value is not None for value in shown):
            chosen = rows[columns[2]].get("notes", {}).get("ours") if columns[2] in rows else None
            label, change = RUNGS[chosen if name == "ours" and chosen == "sm90" else name]
            texts = [f"{cell(x)} {unit}" if x is not None else "–" for x, (_, unit) in zip(shown, columns)]
            lines.append(f"| {label} | {' | '.join(texts)} | {change} |")
    return "\n".join(lines)


def _value(row: dict[str, Any] | None, name: str) -> float | None:
    if row is None:
        return None
    value: float | None = row["ours"] if name == "ours" else row["peers"].get(name)
    return value
