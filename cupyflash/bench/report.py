"""Results: the JSON file that grows row by row, the table on the terminal, and the lines that sum a suite up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from ..folders import written_whole
from ..tools.timing import best, geomean, ratio, significant
from . import derivatives, models, serving

Row = dict[str, Any]

NAMES = {
    "cudnn8": "cuDNN, float8, results too",
    "eight": "cupyflash, float8 results",
    "bf16": "cupyflash, bfloat16",
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN (PyTorch)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "efficient": "memory-efficient (PyTorch)",
    "math": "math (PyTorch)",
    "standard": "standard attention (CuPy)",
    "numpy": "standard attention (NumPy)",
    "torch": "PyTorch SDPA",
    "jax": "JAX, jitted",
    "flash1": "FlashAttention-1 (ours)",
    "simt": "FlashAttention-2, simt (ours)",
    "sm80": "FlashAttention-2, sm80 (ours)",
    "jax-cudnn": "cuDNN (JAX, jitted)",
    "flex": "FlexAttention (torch.compile)",
    "alone": "what it stands on, alone",
    "by-hand": "by hand (PyTorch)",
    "jax-xla": "JAX, jitted (XLA)",
    "jvp-flash": "jvp_flash_attention (Triton)",
    "flashinfer": "FlashInfer",
    "flashinfer-tc": "FlashInfer, tensor cores",
    "flashmla": "FlashMLA",
    "lengths": "cupyflash, lengths on the device",
    "append": "cupyflash, appending",
    "dense": "cupyflash, dense call",
    "read": "reading K and V",
}

# Ours in another form, and what nobody who computes can reach: shown beside the peers.
OWN = ("eight", "bf16", "lengths", "append", "dense", "read")

NOTED = ("latent",)  # suites whose notes say more of a value, too


def make_row(
    problem: Mapping[str, Any], unit: str, values: Mapping[str, float], notes: Mapping[str, str], peers: Iterable[str]
) -> Row:
    """One row of a results file. Who has a note but no value is null; ratios are better when larger.

    Where our own attention with a causal mask alone was measured beside it, "ours_causal", the row has the ratio to
    that too; where our own without the derivative was, "ours_alone", how many times that ours takes.
    """
    rounded = {name: significant(value) for name, value in values.items()}
    row: Row = {
        "problem": dict(problem),
        "unit": unit,
        "ours": rounded.get("ours"),
        "peers": {name: rounded.get(name) for name in peers if name in values or name in notes},
    }
    others = {name: x for name, x in row["peers"].items() if name not in OWN}
    row["ratio_to_best"] = significant(ratio(row["ours"], best(others, unit), unit))
    if "ours_causal" in rounded:
        row["ours_causal"] = rounded["ours_causal"]
        row["ratio_to_causal"] = significant(ratio(row["ours"], row["ours_causal"], unit))
    if "ours_alone" in rounded:
        row["ours_alone"] = rounded["ours_alone"]
        row["times_alone"] = significant(ratio(row["ours_alone"], row["ours"], unit))
    if notes:
        row["notes"] = dict(notes)
    return row


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write a results file whole or not at all, so that an interrupted run leaves the rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write((json.dumps(results, indent=1) + "\n").encode())


def load(folder: Path) -> list[dict[str, Any]]:
    """All results under a folder such as bench/results, each with "file": <gpu>/<name of the file>."""
    return [{**read(path), "file": f"{path.parent.name}/{path.stem}"} for path in sorted(folder.glob("*/*.json"))]


def read(path: Path) -> dict[str, Any]:
    """One file of results; ValueError names one that is not."""
    try:
        results: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of `cupyflash bench`: {error}") from error
    if "rows" not in results:
        raise ValueError(f"{path} is not a file of `cupyflash bench`: it has no rows")
    return results


def fill(page: Path, name: str, tables: Sequence[str]) -> bool:
    """Put tables between the marks of that name in a page; False where there is no table, page or mark."""
    if not tables or not page.is_file():
        return False
    begin, end = (f"<!-- {name}:{which} -->" for which in ("begin", "end"))
    block = "\n\n".join([begin, *tables, end])
    text, marks = re.subn(f"{begin}.*?{end}", lambda _: block, page.read_text(encoding="utf-8"), flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
    return marks > 0


def varying(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields of the problems that tell them apart, without those that follow from the sequence length and dim."""
    shown = [key for key in problems[0] if key not in ("batch", "heads")]
    return [key for key in shown if len({problem.get(key) for problem in problems}) > 1]


def fixed(problems: Sequence[Mapping[str, Any]]) -> str:
    """The fields that all the problems share, in words."""
    same = [key for key in problems[0] if len({problem.get(key) for problem in problems}) == 1]
    return ", ".join(f"{key} {cell(problems[0][key])}" for key in same)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)


def ratio_text(value: float | None) -> Text:
    """A ratio to the best peer, green where ours leads."""
    if value is None:
        return Text("–")
    return Text(f"{value:.2f}x", style="green" if value >= 1 else "yellow" if value >= 0.9 else "red")


def summary(rows: Sequence[Row]) -> list[str]:
    """Geometric means against each peer and the best one, the worst row, short sequences, each head dimension."""
    lines = []
    every, rows = rows, [row for row in rows if row["unit"] == rows[0]["unit"]]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    means = [(NAMES.get(name, name), geomean(_against(rows, name))) for name in peers]
    if any(mean is not None for _, mean in means):
        lines.append("against " + ", ".join(f"{name} {mean:.2f}x" for name, mean in means if mean is not None))
    if (mean := geomean(row["ratio_to_best"] for row in rows)) is not None:
        compared = [row for row in rows if row["ratio_to_best"]]
        lines.append(f"against the best peer of each row {mean:.2f}x (geometric mean of {len(compared)} rows)")
        worst = min(compared, key=lambda row: row["ratio_to_best"])
        where = ", ".join(f"{key} {cell(worst['problem'][key])}" for key in varying([row["problem"] for row in rows]))
        lines.append(f"worst row {worst['ratio_to_best']:.2f}x ({where or fixed([worst['problem']])})")
    groups = {f"dim {dim}": _where(rows, lambda p, dim=dim: p.get("dim") == dim) for dim in _values(rows, "dim")}
    if len(_values(rows, "seq")) > 1:
        groups["sequences up to 1k"] = _where(rows, lambda p: p.get("seq", 1 << 62) <= 1024)
    named = "scores" in rows[0]["problem"]
    if named:
        names = dict.fromkeys(row["problem"]["scores"] for row in rows)
        groups = {name: _where(rows, lambda p, name=name: p["scores"] == name) for name in names}
    for label, group in groups.items():
        if 0 < len(group) < len(rows) + named and (mean := geomean(row["ratio_to_best"] for row in group)) is not None:
            fa2 = geomean(_against(group, "fa2"))
            causal = geomean(row.get("ratio_to_causal") for row in group)
            lines.append(
                f"{label}: best peer {mean:.2f}x"
                + (f", {NAMES['fa2']} {fa2:.2f}x" if fa2 else "")
                + (f", our own causal {causal:.2f}x" if causal else "")
            )
    if "model" in rows[0]["problem"]:
        kinds = {kind: _where(rows, lambda p, n=names: p["model"] in n) for kind, names in models.KINDS.items()}
        lines += _kinds(rows, kinds)
    if "row" in rows[0]["problem"]:
        lines += serving.lines(rows)
    if "beside" in rows[0]["problem"]:
        lines += derivatives.lines(every)
    elif len(dtypes := _values(rows, "dtype")) > 1 and "bias" in rows[0]["problem"]:
        kinds = {x: _where(rows, lambda p, x=x: p["dtype"] == x and not p["bias"]) for x in dtypes}
        lines += _kinds(rows, kinds | {"with a bias": _where(rows, lambda p: p["bias"])})
    if wrong := [row for row in rows if row["ours"] is None]:
        lines.append(f"NO RESULT of ours in {len(wrong)} rows; the first: {wrong[0]['notes'].get('ours')}")
    return lines


def _kinds(rows: Sequence[Row], kinds: Mapping[str, Sequence[Row]]) -> list[str]:
    """Geometric mean and worst row of each kind of problem and each pass."""
    lines = []
    keys = [key for key in varying([row["problem"] for row in rows]) if key not in ("pass", "dtype", "call")]
    for kind, among in kinds.items():
        for direction in dict.fromkeys(row["problem"]["pass"] for row in rows):
            group = _where(among, lambda p, d=direction: p["pass"] == d)
            if compared := [row for row in group if row["ratio_to_best"]]:
                worst = min(compared, key=lambda row: row["ratio_to_best"])
                where = (
                    [worst["problem"]["model"]]
                    if "model" in keys
                    else [f"{x} {cell(worst['problem'][x])}" for x in keys]
                )
                lines.append(
                    f"{kind}, {direction}: best peer {geomean(row['ratio_to_best'] for row in compared):.2f}x, "
                    f"worst {worst['ratio_to_best']:.2f}x ({', '.join(where)})"
                )
    return lines


def _against(rows: Iterable[Row], peer: str) -> list[float | None]:
    return [ratio(row["ours"], row["peers"].get(peer), row["unit"]) for row in rows]


def _values(rows: Iterable[Row], key: str) -> list[Any]:
    return sorted({row["problem"][key] for row in rows if key in row["problem"]})


def _where(rows: Iterable[Row], keep: Any) -> list[Row]:
    return [row for row in rows if keep(row["problem"])]
