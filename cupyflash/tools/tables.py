"""How commands tell what they found: lines, pairs and tables, on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from ..passes import PASSES
from .console import Console
from .precompile import Done, Job
from .visible import visible


def say(text: Any) -> None:
    """Print a line."""
    typer.echo(visible(str(text)))


def show(what: Any) -> None:
    """Print a table: as wide as the terminal, and elsewhere, in a log, as wide as it is, without blanks at its ends."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(what)
        return
    console.width = 1000
    with console.capture() as printed:
        console.print(what)
    say("\n".join(line.rstrip() for line in printed.get().splitlines()))


def pairs(rows: list[tuple[str, str]]) -> None:
    """Print (what, value) pairs as a table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    show(table)


def tuning_table(result: Any) -> Table:
    """Every tile that was tried, the fastest first."""
    sets = [dict(trial.plan.constants) for trial in result.trials]
    names = [name for name in sets[0] if len({constants.get(name) for constants in sets}) > 1]
    flops = result.problem.flops(PASSES[result.of]) / 1e12
    table = Table(title=f"{result.family} {result.of}, {len(sets)} tiles")
    for heading in (*(name.lower() for name in names), "ms", "TFLOP/s", "against the table's"):
        table.add_column(heading, justify="right")
    table.add_column("")
    own = result.trials[0]
    order = sorted(zip(result.trials, sets), key=lambda pair: pair[0].seconds or float("inf"))
    for trial, constants in order:
        cells = [str(constants.get(name, "")) for name in names]
        if trial.seconds is None:
            cells += ["", "", ""]
        else:
            cells += [
                f"{1e3 * trial.seconds:.4g}",
                f"{flops / trial.seconds:.4g}",
                f"{own.seconds / trial.seconds:.3f}x",
            ]
        note = "the table's own" if trial is own else trial.note
        table.add_row(*cells, Text(note), style="bold" if trial is result.best else "" if trial.seconds else "dim")
    return table


class KernelLines:
    """Lines of a table of compiled kernels, each told as soon as its program is there."""

    def __init__(self, work: Sequence[Job]) -> None:
        rows = [cells for job in work for cells in _kernels(Done(job, 0.0, None))]
        self._widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows)]
        self.heading = self._line(_HEADINGS)

    def of(self, result: Done) -> list[str]:
        """One for each kernel of a program."""
        return [self._line(cells) for cells in _kernels(result)]

    def _line(self, cells: Sequence[str]) -> str:
        sides = (str.ljust,) * _NUMBERS + (str.rjust,) * (len(cells) - _NUMBERS)
        return " ".join(side(x, n) for side, x, n in zip(sides, cells, self._widths)).rstrip()


_HEADINGS = ("arch", "family", "dtype", "dim", "mask", "kernel", "registers", "spilled", "seconds")
_NUMBERS = _HEADINGS.index("registers")  # the first column that stands at the right


def _kernels(result: Done) -> Iterator[tuple[str, ...]]:
    p, plan = result.job.problem, result.job.plan
    mask = "causal" if p.causal else "full"
    resources = {} if result.compiled is None else result.compiled.resources
    seconds = "cached" if result.compiled and result.compiled.cached else f"{result.seconds:.2f}"
    for i, launch in enumerate(plan.launches):
        found = resources.get(launch.name)
        numbers = ("failed", "") if found is None else (found.registers, found.spill_stores + found.spill_loads)
        same = (plan.arch, plan.family, p.dtype, str(p.dim), mask) if i == 0 else ("",) * 5
        yield (*same, launch.name.removeprefix("attention_"), *map(str, numbers), seconds if i == 0 else "")
