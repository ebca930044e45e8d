"""The demo's picture: time and memory beside plain attention; how the loss fell, and where one head looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .beside import Row, duration, size, times

SHOWN = 56  # bytes of text on each side of the attention map
INK, FAINT, STRONG, OTHER = "#333333", "#9ec5e8", "#0b4f8a", "#d1495b"


@dataclass(frozen=True)
class Lesson:
    """What a picture shows of a training.

    losses: nats per byte after each step; held_out: (step, loss) pairs; odds: probabilities (heads, S, S) of one layer
    on the bytes of `text`.
    """

    losses: list[float]
    held_out: list[tuple[int, float]]
    odds: np.ndarray
    text: bytes
    layer: int


def draw(
    path: Path, rows: Sequence[Row], names: Sequence[str], subject: str, free: int | None, lesson: Lesson | None = None
) -> str:
    """Write a PNG and return what it shows.

    rows, names: of `beside`, where `subject` says of what; free: bytes that a line is drawn at.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    lines = 1 if lesson is None else 2
    figure = plt.figure(figsize=(12, 5 * lines + (lines - 1)), layout="constrained")
    upper, *lower = figure.subfigures(lines, 1, height_ratios=(5, 6)[:lines], squeeze=False)[:, 0]
    upper.suptitle(subject, color=INK)
    left, right = upper.subplots(1, 2)
    _compare(left, right, rows, names, free)
    shown = "time and memory by rows"
    if lesson is not None:
        left, right = lower[0].subplots(1, 2, width_ratios=(1, 1.1))
        _losses(left, lesson)
        shown += f"; loss; attention of layer {lesson.layer + 1}, {_looks(lower[0], right, lesson)}"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return shown


def _compare(left: Any, right: Any, rows: Sequence[Row], names: Sequence[str], free: int | None) -> None:
    """Time of a call and memory beside its inputs, by rows; a cross where a way was not run, and what it needs."""
    for i, (name, color) in enumerate(zip(names, (STRONG, OTHER))):
        ran = [(row.rows, row.cells[i]) for row in rows if row.cells[i].seconds is not None]
        for axis, values in ((left, [cell.seconds for _, cell in ran]), (right, [cell.nbytes for _, cell in ran])):
            axis.plot([n for n, _ in ran], values, "o-", color=color, linewidth=2, markersize=5)
            if ran and values[-1]:
                end = (ran[-1][0], values[-1])
                axis.annotate(name, end, xytext=(7, 0), textcoords="offset points", color=color, va="center")
        for row in rows:
            cell = row.cells[i]
            if cell.seconds is None and cell.nbytes:
                if ran:
                    right.plot([ran[-1][0], row.rows], [ran[-1][1].nbytes, cell.nbytes], ":", color=color)
                right.plot([row.rows], [cell.nbytes], "x", color=color, markersize=9, markeredgewidth=2)
                said = f"{size(cell.nbytes)} needed" + (": out of memory" if cell.ran_out else "")
                at = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
                right.annotate(said, (row.rows, cell.nbytes), color=color, **at)
    both = [row for row in rows if all(cell.seconds and cell.nbytes for cell in row.cells)]
    for axis, title, of, better in (
        (left, "Time of a call", "seconds", "as fast"), (right, "Memory beside its inputs", "nbytes", "less memory")
    ):  # fmt: skip
        axis.set(title=title, xlabel="rows")
        axis.set_xscale("log", base=2)
        axis.set_xticks([row.rows for row in rows], [f"{row.rows:,}" for row in rows])
        axis.set_xlim(rows[0].rows / 1.3, rows[-1].rows * 2.4)
        axis.grid(color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
        if both:
            ours, other = (getattr(cell, of) for cell in both[-1].cells)
            said = f"at {both[-1].rows:,} rows: {times(other / ours)} {better}"
            axis.text(0.97, 0.05, said, transform=axis.transAxes, color=INK, fontsize=12, ha="right")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda x, _: duration(x))
    right.set_yscale("log", base=32)  # 1 MiB, 32 MiB, 1 GiB, 32 GiB
    right.yaxis.set_major_formatter(lambda x, _: size(x))
    right.tick_params(axis="y", which="minor", left=False)
    if free is not None:
        right.axhline(free, color=INK, linestyle=":", linewidth=1)
        right.annotate(
            f"free here: {size(free)}", (0.01, free), xycoords=("axes fraction", "data"), xytext=(0, -12),
            textcoords="offset points", color=INK,
        )  # fmt: skip


def _losses(left: Any, lesson: Lesson) -> None:
    losses, held_out = lesson.losses, lesson.held_out
    steps = np.arange(1, len(losses) + 1)
    left.plot(steps, losses, color=FAINT, linewidth=1, label="training, each step")
    left.plot(steps, _smooth(losses), color=STRONG, linewidth=2, label="training, smoothed")
    left.plot(*zip(*held_out), "o", color=OTHER, markersize=7, clip_on=False, zorder=3, label="text held out")
    left.set(title="Loss", xlabel="step", ylabel="nats per byte", xlim=(0, len(losses)), ylim=(0, None))
    left.annotate(f"{held_out[-1][1]:.2f}", held_out[-1], xytext=(0, -18), textcoords="offset points", ha="right")
    left.grid(color="#e6e6e6")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)


def _looks(figure: Any, right: Any, lesson: Lesson) -> str:
    """Draw the head that looks at most, and return which one it is."""
    odds = lesson.odds[:, :SHOWN, :SHOWN]
    head = int(np.argmax([_structure(p) for p in odds]))
    letters = [_letter(b) for b in lesson.text[:SHOWN]]
    past = np.tri(len(letters), dtype=bool)
    picture = right.imshow(np.where(past, np.sqrt(odds[head]), np.nan), cmap="magma_r", vmin=0, vmax=1)
    right.spines[["top", "right"]].set_visible(False)
    right.set(title=f"Where head {head + 1} looks", xlabel="at this byte", ylabel="from this byte")
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(range(len(letters)), letters, family="monospace", fontsize=9, color=INK)
        axis.set_tick_params(length=0, pad=2)
    bar = figure.colorbar(picture, ax=right, shrink=0.8, label="probability")
    shares = np.array([0, 0.01, 0.1, 0.25, 0.5, 1])
    bar.set_ticks(np.sqrt(shares), labels=[f"{share:g}" for share in shares])
    return f"head {head + 1} of {len(odds)}"


def _structure(p: np.ndarray) -> float:
    """How much a head looks at single bytes far from its own: weight on the strongest keys, times their distance."""
    best = p.argmax(axis=-1)
    rows = np.arange(len(p))
    return float((p[rows, best] * np.minimum(rows - best, 12)).mean())


def _smooth(losses: list[float]) -> np.ndarray:
    """Exponential moving average over about 3 % of the run, without the pull of its start towards zero."""
    keep = 1 - 1 / max(1.0, len(losses) / 40)
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1
        means.append(total / weight)
    return np.array(means)


def _letter(byte: int) -> str:
    return {10: "↵", 32: "·"}.get(byte, chr(byte) if 32 < byte < 127 else "▫")
