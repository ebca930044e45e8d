"""Runs suites: progress and a growing table on the terminal, a growing JSON file on disk."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..problem import FLOATS
from ..tools.console import Console
from . import machine, numpy_path, peers, report
from .suite import Options
from .suites import GROUPS, SUITES


def run(
    suites: Sequence[str],
    family: str | None,
    out: str | PathLike[str] | None,
    quick: bool,
    dtype: str | None,
    rounds: int | None,
    min_ms: float | None,
    only: Sequence[str],
    slow: bool,
    sustained: bool,
    resume: bool,
) -> int:
    """See `cupyflash.bench.run`."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a log has no edge
    names = list(dict.fromkeys(name for asked in suites for name in GROUPS.get(asked, (asked,))))
    options = Options(
        family,
        dtype or "bfloat16",
        rounds=rounds or (2 if sustained else 3 if quick else 7),
        min_ms=min_ms or (5 if quick else 20),
        quick=quick,
        only=tuple(only),
        slow=slow,
        sustained=sustained,
    )
    try:
        for name in names:
            _check(name, family, dtype, only, sustained)
            if not SUITES[name].problems(options):
                raise machine.Unavailable(f"family is {family!r}; it takes no problem of bench suite {name!r}")
    except machine.Unavailable as error:
        console.print(Text(str(error)), soft_wrap=True)
        return 2
    good = True
    for name in names:
        gpu = machine.name(True) if SUITES[name].needs_gpu else None
        folder = (
            Path(out)
            if out is not None
            else Path("bench", "quick" if quick or only else "results", machine.short_name(gpu) if gpu else "cpu")
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)  # found out now, not after the first row
        except OSError as error:
            console.print(
                Text(f"out is {folder}; it must be a folder that can be written ({error.strerror})"), soft_wrap=True
            )
            return 2
        file = f"{family + '_' if family else ''}{name}{'_sustained' if sustained else ''}.json"
        rows = _run_suite(console, name, options, folder / file, gpu, resume)
        good = good and all(row["ours"] is not None for row in rows)
    return 0 if good else 1


def _check(name: str, family: str | None, dtype: str | None, only: Sequence[str], sustained: bool) -> None:
    if name not in SUITES:
        names = ", ".join([*SUITES, *GROUPS])
        raise machine.Unavailable(f"suites contains {name!r}; it must be of {names}, or parallel or plot, each alone")
    if dtype not in (None, *FLOATS):
        raise machine.Unavailable(f"dtype is {dtype!r}; it must be one of {', '.join(FLOATS)}")
    for asked in only:
        if not any(row.startswith(asked) for row in SUITES[name].names):
            known = f"be, or begin, one of {', '.join(SUITES[name].names)}" if SUITES[name].names else "be left out"
            raise machine.Unavailable(f"only is {asked!r}; for bench suite {name!r} it must {known}")
    if sustained and not SUITES[name].sustained:
        known = ", ".join(suite for suite in SUITES if SUITES[suite].sustained)
        raise machine.Unavailable(f"sustained is set; that is for bench suites {known}, not {name!r}")
    if SUITES[name].needs_gpu:
        machine.require_gpu(name)
        return
    if family is not None:
        raise machine.Unavailable(f"family is {family!r}, a family of GPU kernels; bench suite {name!r} measures NumPy")
    if dtype not in (None, *numpy_path.DTYPES):
        known = " and ".join(numpy_path.DTYPES)
        raise machine.Unavailable(f"dtype is {dtype!r}; bench suite {name!r} measures {known}")
    machine.require_torch(name)


def _run_suite(
    console: Console, name: str, options: Options, path: Path, gpu: str | None, resume: bool
) -> list[report.Row]:
    from ..gpu.source import sources_digest

    suite = SUITES[name]
    problems = suite.problems(options)
    absent = {p: why for p in suite.peers if p in peers.LOADERS and isinstance(why := peers.load(p), str)}
    present = [p for p in suite.peers if p not in absent]
    dtypes = dict.fromkeys(
        [*(["bfloat16"] if gpu else []), *(problem["dtype"] for problem in problems if "dtype" in problem)]
    )
    results: dict[str, Any] = {
        "suite": name,
        "gpu": gpu,
        "driver": machine.driver() if gpu else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "sources": sources_digest(),
        "family": options.family,
        "sustained": options.sustained,
        "machine": machine.name(gpu is not None),
        "versions": peers.versions(),
        "absent": absent,
        "ceilings": machine.ceilings(gpu is not None, dtypes, options.min_ms),
        "rows": [],
    }
    order = suite.problems(replace(options, only=()))
    if resume:
        results["rows"] = [row for row in _measured_before(path, results) if row["problem"] in order]
        console.print(Text(f"{len(results['rows'])} rows are in {path} already"), soft_wrap=True)
    left = [problem for problem in problems if not any(row["problem"] == problem for row in results["rows"])]
    keys = report.varying(problems)
    console.print(Text(f"{name} on {results['machine']}, {suite.unit}: {report.fixed(problems)}"), style="bold")
    console.print(Text("; ".join(f"{key} {report.cell(value)}" for key, value in results["ceilings"].items())))
    for peer, why in absent.items():
        console.print(Text(f"{peer} is not measured: {why}"), style="dim", soft_wrap=True)
    widths = [max(len(key), *(len(report.cell(p[key])) for p in problems)) for key in keys]
    more = {"scores": {"ratio_to_causal": "vs causal"}, "derivatives": {"times_alone": "x alone"}}
    ratios = {"ratio_to_best": "vs best", **more.get(name, {})}
    widths += [max(7, len(heading)) for heading in ("ours", *present, *ratios.values())]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(left))
        progress.console.print(_line(widths, [*keys, "ours", *present, *ratios.values()], style="bold"))
        told: set[str] = set()
        for problem in left:
            progress.update(task, description=" ".join(report.cell(problem[key]) for key in keys))
            values, notes = suite.measure(problem, options)
            row = report.make_row(problem, problem.get("unit", suite.unit), values, notes, present)
            results["rows"].append(row)
            results["rows"].sort(key=lambda row: order.index(row["problem"]))
            report.save(path, results)
            _release()
            speeds = [report.cell(value) for value in (row["ours"], *(row["peers"].get(peer) for peer in present))]
            cells: list[str | Text] = [
                *(report.cell(problem[key]) for key in keys),
                *speeds,
                *(report.ratio_text(row.get(key)) for key in ratios),
            ]
            progress.console.print(_line(widths, cells))
            if row["ours"] is None or str(notes.get("ours", "")).startswith("unchecked"):
                progress.console.print(Text(f"  ours: {notes.get('ours')}"), style="red", soft_wrap=True)
            if options.sustained or name in report.NOTED:
                states = ", ".join(f"{who} {notes[who]}" for who in values if who in notes)
                progress.console.print(Text(f"  {states}"), style="dim", soft_wrap=True)
            for peer in present:
                if peer in notes and peer not in values and (line := f"  {peer}: {notes[peer]}") not in told:
                    told.add(line)  # each once
                    progress.console.print(Text(line), style="dim", soft_wrap=True)
            progress.advance(task)
    for line in report.summary(results["rows"]):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"written to {path}\n"), soft_wrap=True)
    return list(results["rows"])


def _measured_before(path: Path, results: dict[str, Any]) -> list[report.Row]:
    """The rows with a result of ours in a file of the same kernel sources, machine and versions; else none."""
    if not path.is_file():
        return []
    before = report.read(path)
    same = ("sources", "machine", "driver", "family", "sustained", "versions")
    return [row for row in before["rows"] if row["ours"] is not None and all(before.get(x) == results[x] for x in same)]


def _line(widths: Iterable[int], cells: Iterable[str | Text], style: str = "") -> Table:
    """One line of a table whose rows are printed as they come."""
    table = Table.grid(padding=(0, 2))
    for width in widths:
        table.add_column(justify="right", width=width, no_wrap=True)
    table.add_row(*cells, style=style)
    return table


def _release() -> None:
    """Give cached GPU memory back, so that one library's pool does not starve another's."""
    for module, free in (("torch", lambda m: m.cuda.empty_cache()), ("cupy", _free_cupy)):
        if module in sys.modules:
            free(sys.modules[module])


def _free_cupy(cupy: Any) -> None:
    if cupy.cuda.is_available():
        cupy.get_default_memory_pool().free_all_blocks()
