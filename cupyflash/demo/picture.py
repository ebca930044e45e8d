"""The demo's picture: how the loss fell, and where one head looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SHOWN = 56  # bytes of text on each side of the attention map
INK, FAINT, STRONG = "#333333", "#9ec5e8", "#0b4f8a"


def draw(path: Path, losses: list[float], held_out: list[tuple[int, float]], odds: np.ndarray, text: bytes) -> str:
    """Write a PNG and return which head it shows.

    losses: nats per byte after each step; held_out: (step, loss) pairs; odds: probabilities (heads, S, S) of one layer
    on the bytes of `text`.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    odds = odds[:, :SHOWN, :SHOWN]
    head = int(np.argmax([_structure(p) for p in odds]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), width_ratios=(1, 1.1), layout="constrained")

    steps = np.arange(1, len(losses) + 1)
    left.plot(steps, losses, color=FAINT, linewidth=1, label="training, each step")
    left.plot(steps, _smooth(losses), color=STRONG, linewidth=2, label="training, smoothed")
    left.plot(*zip(*held_out), "o", color="#d1495b", markersize=7, clip_on=False, zorder=3, label="text held out")
    left.set(title="Loss", xlabel="step", ylabel="nats per byte", xlim=(0, len(losses)), ylim=(0, None))
    left.annotate(f"{held_out[-1][1]:.2f}", held_out[-1], xytext=(0, -18), textcoords="offset points", ha="right")
    left.grid(color="#e6e6e6")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)

    letters = [_letter(b) for b in text[:SHOWN]]
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

    figure.savefig(path, dpi=120)
    plt.close(figure)
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
