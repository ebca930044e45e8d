"""From results files to pictures and pages under docs/."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from . import eight, ladder, papers, parallel_page, plots, precision, report

FILLED = {  # suites that have tables in a page of their own, and no picture
    "precision": ("precision.md", precision.tables), "parallel": ("parallel.md", parallel_page.tables),
}  # fmt: skip
PICTURE = "Shares by sequence length: the time of one GPU, over the number of GPUs and the time of all"
DRAWN = {"ladder": ("tutorial.md", ladder.table), "fp8": ("float8.md", eight.tables)}  # and those that have one as well


def plot(results: str | PathLike[str], docs: str | PathLike[str]) -> list[str]:
    """See `cupyflash.bench.plot`."""
    found = report.load(Path(results))
    if not found:
        raise FileNotFoundError(
            f"{results} has no <gpu>/<suite>.json; `cupyflash bench` writes them, and with --quick to bench/quick, "
            "which `cupyflash bench plot --quick` draws"
        )
    folder = Path(docs, "plots")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    benchmarks = [data for data in found if data["suite"] not in ("figures", "training", *FILLED)]
    for data in benchmarks:
        drawn = plots.figure(data)
        path = folder / f"{data['file'].replace('/', '_')}.png"
        drawn.savefig(path, bbox_inches="tight", metadata={"Software": None})
        written.append(str(path))
    if benchmarks:
        page = Path(docs, "benchmarks.md")
        page.write_text(plots.markdown(benchmarks))
        written.append(str(page))
    written += papers.write(found, Path(docs))
    for suite, (file, table) in {**DRAWN, **FILLED}.items():
        tables = [table(data) for data in _of(found, suite)]
        if suite == "parallel" and tables and (drawn := parallel_page.picture(_of(found, suite))) is not None:
            path = folder / "parallel.png"
            drawn.savefig(path, bbox_inches="tight", metadata={"Software": None})
            written.append(str(path))
            tables.append(f"![{PICTURE}](plots/{path.name})")
        if report.fill(Path(docs, file), suite, tables):
            written.append(str(Path(docs, file)))
    return written


def _of(found: Sequence[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    return [data for data in found if data["suite"] == suite and data["rows"]]
