"""The pictures of docs/tutorial.md, drawn from runs of cupyflash.reference: `python docs/tutorial_plots.py [folder]`.

Needs NumPy and matplotlib alone. Every number in a picture was computed or counted in the run that it shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cupyflash.bench.plots import STYLE
from cupyflash.reference import (
    Trace,
    block_sparse,
    flash1_forward,
    flash2_forward,
    split_kv,
    standard_attention,
    tile_sizes,
)

RED, BLUE, GREEN, PURPLE, GREY = "#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#555555"


class Watch(Trace):
    """A chip that writes down what passes: which tile, with which statistics, and the factors of every rescaling."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles: list[tuple[int, int, int, int]] = []  # first row, rows, first key, keys
        self.held: list[tuple[np.ndarray, ...]] = []  # S, ℓ, m
        self.factors: list[np.ndarray] = []
        self.parts: list[Watch] = []  # split_kv: one for each range of keys

    def hold(self, *arrays: Any) -> None:
        super().hold(*arrays)
        q, k, _, _, s, ell, m = arrays
        self.tiles.append((_place(q), len(q), _place(k), len(k)))
        self.held.append((s.copy(), ell.copy(), m.copy()))

    def rescale(self, factor: Any, x: Any) -> Any:
        self.factors.append(factor)
        return super().rescale(factor, x)

    def add(self, part: Trace) -> None:
        super().add(part)
        assert isinstance(part, Watch)
        self.parts.append(part)


def _place(x: np.ndarray) -> int:
    """Which row of its array a tile starts at."""
    assert x.base is not None
    return (x.ctypes.data - x.base.ctypes.data) // x.strides[0]


def _inputs(length: int, dim: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, dim)) for _ in range(3)]


def _heads(*arrays: np.ndarray) -> list[np.ndarray]:
    """(S, D) as (1, S, 1, D)."""
    return [x[None, :, None] for x in arrays]


def online() -> Figure:
    """One query, key by key: scores and their running maximum, the running sum, the factor that corrects it."""
    q, k, v = _inputs(24, 8, seed=7)
    watch = Watch()
    flash2_forward(*_heads(2 * q[:1].copy(), k, v), rows=1, keys=1, trace=watch)
    scores, sums, maxima = (np.array([held[i].item() for held in watch.held]) for i in range(3))
    factors = np.array([factor.item() for factor in watch.factors[:-1]])  # the last one divides by the sum
    keys = np.arange(1, len(scores) + 1)

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    top.step(keys, maxima, where="post", color=RED, label="largest so far, m")
    top.plot(keys, scores, "o", color=BLUE, markersize=5, label="score of this key, x")
    top.set_ylabel("score")
    top.legend(loc="lower right", frameon=False, ncols=2)
    top.set_ylim(scores.min() - 1.6, scores.max() + 0.4)
    grown = factors < 1
    middle.bar(keys[~grown], factors[~grown], 0.6, color="#cccccc", label="the largest stays: 1")
    middle.bar(keys[grown], factors[grown], 0.6, color=RED, label="a new largest: less than 1")
    middle.set_ylabel("correction factor")
    middle.set_ylim(0, 1.45)
    middle.legend(loc="upper right", frameon=False, ncols=2)
    bottom.step(keys, sums, where="post", color=GREEN, label="sum so far, ℓ")
    for key in keys[grown][1:]:
        for axis in (top, bottom):
            axis.axvline(key, color=RED, linewidth=0.7, linestyle=":")
    bottom.axhline(
        np.exp(scores - scores.max()).sum(), color=GREY, linestyle="--", linewidth=1, label="in three passes"
    )
    bottom.set_ylabel("sum of $e^{x - m}$")
    bottom.set_ylim(0, 1.35 * sums.max())
    bottom.legend(loc="upper left", frameon=False, ncols=2)
    bottom.set_xlabel("key")
    bottom.set_xticks(keys[::2] + 1)
    figure.suptitle("Online softmax: one row of scores, key by key", fontsize=13, fontweight="bold")
    return figure


def tiles() -> Figure:
    """In which order five algorithms visit the tiles of a 12 x 12 score matrix."""
    q, k, v = _inputs(12, 8)
    blocks = np.eye(6, dtype=bool) | np.eye(6, k=-1, dtype=bool)
    blocks[:, 0] = True
    runs: list[tuple[str, list[Watch]]] = []
    for name, run in (
        ("FlashAttention-1", lambda watch: flash1_forward(q, k, v, 72, trace=watch)),
        ("FlashAttention-2", lambda watch: flash2_forward(*_heads(q, k, v), rows=2, keys=2, trace=watch)),
        ("causal", lambda watch: flash2_forward(*_heads(q, k, v), rows=2, keys=2, causal=True, trace=watch)),
        ("block sparse", lambda watch: block_sparse(q, k, v, blocks, 72, trace=watch)),
        ("split keys, 3 parts", lambda watch: split_kv(q, k, v, 3, trace=watch)),
    ):
        watch = Watch()
        run(watch)
        runs.append((name, watch.parts or [watch]))

    colours = matplotlib.colormaps["YlGnBu"]
    figure = Figure(figsize=(12.5, 3.1), layout="constrained")
    for axis, (name, chips) in zip(figure.subplots(1, len(runs)), runs):
        for number, chip in enumerate(chips):
            for turn, (row, rows, key, keys) in enumerate(chip.tiles):
                share = number / len(chips) if len(chips) > 1 else turn / len(chip.tiles)
                tile = Rectangle((key, row), keys, rows, facecolor=colours(0.1 + 0.75 * share), edgecolor="white")
                axis.add_patch(tile)
                text = f"part {number + 1}" if len(chips) > 1 else str(turn + 1)
                colour = "white" if share > 0.6 else "black"
                axis.text(key + keys / 2, row + rows / 2, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_xlim(0, 12)
        axis.set_ylim(12, 0)
        axis.set_aspect("equal")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[["top", "right"]].set_visible(True)
        axis.set_title(name)
        axis.set_xlabel("keys")
    figure.axes[0].set_ylabel("queries")
    return figure


def traffic() -> Figure:
    """Elements moved between memory and chip, counted, and the papers' formulas."""
    dim, on_chip = 64, 32768
    rows, keys = tile_sizes(on_chip, dim)
    lengths = np.array([2**n for n in range(7, 13)])
    counted: dict[str, list[int]] = {"standard": [], "FlashAttention-1": [], "FlashAttention-2": []}
    for n in lengths:
        q, k, v = (x.astype(np.float32) for x in _inputs(n, dim))
        counted["standard"].append(standard_attention(*_heads(q, k, v), trace=True)[-1].moved)
        counted["FlashAttention-1"].append(flash1_forward(q, k, v, on_chip, trace=True)[-1].moved)
        # The same tiles the other way round: as many elements on the chip.
        counted["FlashAttention-2"].append(flash2_forward(*_heads(q, k, v), rows=keys, keys=rows, trace=True)[-1].moved)
    n, d = np.geomspace(lengths[0], lengths[-1], 100), dim
    formulas = {
        "standard": (4 * n * d + 4 * n**2, "4Nd + 4N²"),
        "FlashAttention-1": (3 * n * d + 2 * n + n / keys * (3 * n * d + 4 * n), "3Nd + 2N + (N/Bc)(3Nd + 4N)"),
        "FlashAttention-2": (2 * n * d + n + n / keys * 2 * n * d, "2Nd + N + (N/Br) 2Nd"),
    }
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, values), colour in zip(counted.items(), (GREY, PURPLE, RED)):
        left.plot(lengths, values, "o", color=colour, markersize=6)
        line, formula = formulas[name]
        left.plot(n, line, color=colour, linewidth=1.3, label=f"{name}: {formula}")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(lengths, [str(x) for x in lengths])
    left.set_xlabel("sequence length N")
    left.set_ylabel("elements moved")
    left.set_title(f"longer sequences (d = {dim}, M = {on_chip})")
    left.legend(loc="upper left", frameon=False, fontsize=9)

    length = 1024
    q, k, v = (x.astype(np.float32) for x in _inputs(length, dim))
    sizes = [4 * dim * keys for keys in (8, 16, 32, 64, 128, 256)]
    moved = [flash1_forward(q, k, v, size, trace=True)[-1].moved for size in sizes]
    right.plot(sizes, moved, "o", color=PURPLE, markersize=6, label="FlashAttention-1, counted")
    right.plot(
        sizes, [12 * length**2 * dim**2 / size for size in sizes], color=PURPLE, linewidth=1.3, label="12 N²d²/M"
    )
    standard = standard_attention(*_heads(q, k, v), trace=True)[-1].moved
    right.axhline(standard, color=GREY, label="standard")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
    right.set_xlabel("elements that fit on the chip, M")
    right.set_title(f"a larger chip (d = {dim}, N = {length})")
    right.legend(frameon=False, fontsize=9)
    figure.suptitle(
        "Traffic between memory and chip: counted (points) and by formula (lines)", fontsize=13, fontweight="bold"
    )
    return figure


def rescaling() -> Figure:
    """How the factors die out: a new maximum is rarer with every tile that has been seen."""
    length, keys = 256, 16
    steps = length // keys
    q, k, v = _inputs(length, 64, seed=3)
    watch = Watch()
    flash2_forward(*_heads(q, k, v), rows=length, keys=keys, trace=watch)
    factors = np.concatenate(watch.factors[:steps], axis=1)  # (rows, steps); after them comes the division by the sum

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(
        factors[:, 1:], aspect="auto", cmap="magma", vmin=0, vmax=1, extent=(1.5, steps + 0.5, length, 0),
        interpolation="nearest",
    )  # fmt: skip
    left.grid(visible=False)
    left.set_xlabel("tile of 16 keys")
    left.set_ylabel("query")
    left.set_title("factor on what was summed before")
    figure.colorbar(image, ax=left)
    tile = np.arange(2, steps + 1)
    right.bar(tile, 100 * (factors[:, 1:] < 1).mean(0), 0.7, color=BLUE, label="rows with a new largest score, counted")
    right.plot(tile, 100 / tile, "o-", color=RED, markersize=4, label="by chance: 1 in t")
    right.set_xlabel("tile t")
    right.set_ylabel("% of the rows")
    right.set_title("who has to rescale")
    right.legend(frameon=False)
    return figure


def main(folder: str = "docs/plots") -> None:
    """Draw all of them into a folder."""
    with matplotlib.rc_context(STYLE):
        for draw in (online, tiles, traffic, rescaling):
            path = Path(folder, f"tutorial_{draw.__name__}.png")
            draw().savefig(path, bbox_inches="tight", metadata={"Software": None})
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
