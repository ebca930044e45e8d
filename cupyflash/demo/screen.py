"""The demo on a terminal: tables that fill in, checks, a lesson where it is asked for, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text as Styled

from ..tools.console import Console
from .beside import Cell, Row, Way, duration, measure, of_pytorch, ours_and_plain, runs_out, size, times
from .check import Check, check_attention
from .picture import Lesson, draw
from .places import DIM, CupyPlace, NumpyPlace, TorchPlace
from .training import Recipe

SECONDS = 10.0  # of the table beside plain attention
BESIDE_PYTORCH = 5.0
RATIOS = 72  # columns that the table has with its last two columns
CHECKED = 512  # rows


def run(xp: Any, how: Recipe | None, output: Path, console: Console, seed: int = 0) -> bool:
    """Run the demo with arrays of `xp`, and the lesson where `how` is given; write the picture to `output`. Returns
    whether the checks passed."""
    place: NumpyPlace | CupyPlace = NumpyPlace() if xp is np else CupyPlace(xp)
    ways = ours_and_plain(place)
    rows = _beside(place, ways, console, SECONDS)
    if xp is not np and (tensors := _pytorch()) is not None:
        _times(tensors, of_pytorch(tensors), console, BESIDE_PYTORCH)
    q, k, v = place.make(CHECKED)
    checks, _ = check_attention(xp, q, k, v, seed)
    console.print(
        f"[bold]Gradients beside float64[/]: largest errors of {CHECKED} rows in {place.dtype}, by plain attention in "
        f"float64. Allowed: four times those of plain attention in {place.dtype}, and 1e-5"
    )
    console.print(_checks(checks))
    lesson: Lesson | None = None
    if how is not None:
        from .lesson import teach

        lesson, trained = teach(xp, how, place.name, console)
        console.print(
            f"\n[bold]Attention of its layer {lesson.layer + 1} beside float64[/]: the same, in "
            f"{how.config.attention_dtype}"
        )
        console.print(_checks(trained))
        checks = [*checks, *trained]
    subject = f"Causal attention of {place.heads} heads of {DIM}, {place.dtype}, on {place.name}"
    shown = draw(output, rows, [way.name for way in ways], subject, place.free(), lesson)
    console.print(Styled(f"Picture: {output} ({shown})"), soft_wrap=True)
    return all(check.passed for check in checks)


def _pytorch() -> TorchPlace | None:
    """Where PyTorch can use the GPU."""
    try:
        place = TorchPlace()
        return place if place.torch.cuda.is_available() else None
    except ImportError:
        return None


def _beside(place: NumpyPlace | CupyPlace, ways: Sequence[Way], console: Console, seconds: float) -> list[Row]:
    """Print and return the table of time and memory, cell by cell as they are there."""
    line = Line(console.width)
    console.print(
        f"[bold]Causal attention[/] of {place.heads} heads of {DIM}, {place.dtype}, on {place.name}: time of a call, "
        "and memory beside its inputs\n"
    )
    for heading in line.headings([way.name for way in ways]):
        console.print(Styled(heading, style="bold"), soft_wrap=True)
    rows: list[Row] = []
    cells: list[Cell] = []
    for n, cell in measure(place, ways, seconds):
        cells.append(cell)
        console.print((line.rows(n) if len(cells) == 1 else "") + line.cell(cell), end="", soft_wrap=True)
        if len(cells) == len(ways):
            rows.append(Row(n, tuple(cells)))
            console.print(line.compared(cells), soft_wrap=True)
            cells = []
    found = runs_out(place, ways[1], rows[-1].rows)
    if found is not None and not any(cell.ran_out for row in rows for cell in row.cells):
        n, needs, free = found
        cells = [Cell(None), Cell(None, needs, why=f"out of memory: {size(free)} free")]
        rows.append(Row(n, tuple(cells)))
        console.print(line.rows(n) + "".join(map(line.cell, cells)) + line.compared(cells), soft_wrap=True)
    differences = [cell.difference for row in rows for cell in row.cells if cell.seconds is not None]
    console.print(f"\nTheir results differ by {max(differences):.1e} at most, in every row that both have.\n")
    return rows


class Line:
    """Lines of the table: for a narrow terminal without what only compares."""

    def __init__(self, width: int) -> None:
        self.wide = width >= RATIOS
        self._time, self._memory = (10, 10) if self.wide else (8, 9)

    def headings(self, names: Sequence[str]) -> tuple[str, str]:
        """Two lines."""
        over = "".join(f"{name:>{self._time + self._memory}}" for name in names)
        under = f"{'time':>{self._time}}{'memory':>{self._memory}}" * len(names)
        beyond = f"{'faster':>9}{'less memory':>14}" if self.wide else ""
        return f"{'':>{len(self.rows(0))}}{over}", f"{'rows':>{len(self.rows(0))}}{under}{beyond}"

    def rows(self, n: int) -> str:
        """How many."""
        return f"{n:>7,}" if self.wide else f"{n:>6,}"

    def cell(self, cell: Cell) -> str:
        """Time and memory; of what was not run, what it needs."""
        taken = "-" if cell.seconds is None else duration(cell.seconds)
        return f"{taken:>{self._time}}{'-' if cell.nbytes is None else size(cell.nbytes):>{self._memory}}"

    def compared(self, cells: Sequence[Cell]) -> str:
        """How many times better the first is than the second, or why one of them was not run."""
        why = next((x.why for x in cells if x.why), "")
        if why:
            return f"  {why}" if self.wide else f"\n{'':>8}{why}"
        ours, other = cells
        if not self.wide or not ours.seconds or not other.seconds or not ours.nbytes or not other.nbytes:
            return ""
        return f"{times(other.seconds / ours.seconds):>9}{times(other.nbytes / ours.nbytes):>14}"


def _times(place: TorchPlace, ways: Sequence[Way], console: Console, seconds: float) -> None:
    """Print the table of times on PyTorch's tensors."""
    console.print(
        f"[bold]Beside PyTorch {place.torch.__version__}[/], scaled_dot_product_attention by each of its backends: "
        f"causal attention of {place.heads} heads of {DIM}, {place.dtype}, on {place.name}: time of a call\n"
    )
    console.print(Styled(f"{'rows':>7}" + "".join(f"{way.name:>12}" for way in ways), style="bold"), soft_wrap=True)
    for i, (n, cell) in enumerate(measure(place, ways, seconds)):
        taken = "-" if cell.seconds is None else duration(cell.seconds)
        first, last = i % len(ways) == 0, i % len(ways) == len(ways) - 1
        console.print((f"{n:>7,}" if first else "") + f"{taken:>12}", end="\n" if last else "", soft_wrap=True)
    console.print()


def _checks(checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("cupyflash", "plain", "allowed", ""):
        table.add_column(heading, justify="right")
    for c in checks:
        verdict = "[green]ok[/]" if c.passed else "[red]too large[/]"
        table.add_row(c.name, f"{c.error:.2e}", f"{c.standard:.2e}", f"{c.limit:.2e}", verdict)
    return table
