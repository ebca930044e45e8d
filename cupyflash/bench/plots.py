"""From results to pictures, and to the page of docs/benchmarks.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from . import derivatives, machine, report
from .report import Row, cell

COLOURS = {
    "cudnn8": "#1f77b4",
    "eight": "#ff9896",
    "bf16": "#c49c94",
    "ours": "#d62728",
    "fa3": "#1f77b4",
    "fa4": "#17becf",
    "cudnn": "#2ca02c",
    "fa2": "#9467bd",
    "efficient": "#8c564b",
    "math": "#7f7f7f",
    "standard": "#bcbd22",
    "sm80": "#ff7f0e",
    "flash1": "#e377c2",
    "flex": "#393b79",
    "numpy": "#bcbd22",
    "torch": "#9467bd",
    "jax": "#1b6e1b",
    "jax-cudnn": "#1b6e1b",
    "alone": "#7f7f7f",
    "by-hand": "#bcbd22",
    "jax-xla": "#1b6e1b",
    "jvp-flash": "#393b79",
    "flashinfer": "#17becf",
    "flashinfer-tc": "#9edae5",
    "flashmla": "#2ca02c",
    "lengths": "#ff9896",
    "append": "#f7b6d2",
    "dense": "#c49c94",
    "read": "#7f7f7f",
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "font.size": 10,
    "axes.titlesize": 11,
    "figure.dpi": 110,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
}
TITLES = {
    "forward": "Attention forward",
    "backward": "Attention backward",
    "fp32": "float32 and float64",
    "fp8": "Attention forward, float8",
    "both": "Attention forward and backward",
    "memory": "Memory beyond inputs and results",
    "host": "Host time of a call",
    "jax": "Gradients in JAX under jit",
    "jit": "First call in a new process",
    "import": "Import in a new process",
    "gpt": "Training steps of a GPT with 12 layers",
    "ladder": "The ladder",
    "scores": "Masks, biases and score options",
    "models": "Attention calls of models",
    "derivatives": "Further derivatives",
    "decode": "Decoding: a token on caches",
    "varlen": "Packed sequences",
    "paged": "Pages",
    "latent": "Latent attention",
    "cpu": "NumPy path",
}
INTRO = """# Benchmarks

<!-- Made by `cupyflash bench plot` from the JSON files in `bench/results/`; do not edit. -->

How it is measured: everybody in a table runs in the same process on the same random normal inputs, results are compared
with each other before anything is timed, and samples are taken in turn, in a new order each round, because clocks and power
drift. A number is the median over the rounds. GPU times lie between CUDA events around many calls; those of jitted programs and of
training steps are the host's, from the first of many until the last is done. TFLOP/s count
4·S²·D·H·B for the forward, half of it with a causal mask, 2.5 times it for the backward, as the papers do, and of that what a
boolean mask leaves (for calls of models, the pairs that the mask leaves); the backward is timed alone. "vs best" compares
with the fastest peer of the row, larger is better whatever the unit; "vs causal" with our own attention with a causal mask
alone, in the same rounds. – is what a peer cannot do or what has no room. Further derivatives (`derivatives`): `jvp` is forward
and tangent, `step` a MeanFlow step's attention (jvp, then backward through the value), `double` forward, backward and its
backward, `hvp` a Hessian product, each as users write it: by PyTorch in eager mode (beside PyTorch, Triton), the same replayed
from CUDA graphs (graphs), by JAX under jit (JAX); `Ju` and `Hu` are `attention_jvp` and `attention_backward_jvp` of a kernel
family, replayed; "times alone" is how many of our own forwards (`jvp`, `Ju`), backwards (`Hu`), or both (others) that takes, in
the same rounds; megabytes are the peak beyond inputs and results. Decoding, pages, latent attention and packed sequences are replayed
from CUDA graphs, from more copies of the arrays than the L2 cache holds; "reading K and V" is a sum over their bytes, and neither that
nor ours in another form is a peer. Of latent attention V is in K and read once; TFLOP/s count 2·H·(576 + 512) for each pair of a query
and a key. Suites that name other kernel sources were measured on another state of the kernels; the report of the
tests on a GPU, `tests/gpu_report.json`, names those of the checkout. `bench/README.md` tells how to run it.
"""


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The page: for each machine and suite the circumstances, a picture, what it sums up to, and every row."""
    parts = [INTRO]
    order = list(TITLES)
    places = Counter(data["file"].split("/")[0] for data in found)
    for place in sorted(places, key=lambda x: (x == "cpu", -places[x])):  # GPUs come first, and of them who has most
        here = [data for data in found if data["file"].split("/")[0] == place]
        here.sort(key=lambda data: (order.index(data["suite"]), data["family"] or "", data.get("sustained", False)))
        parts.append(f"## {here[0]['machine']}\n")
        for data in here:
            rows = shown(data)
            stem = data["file"].replace("/", "_")
            shared = report.fixed([row["problem"] for row in rows])
            parts += [
                f"### {_title(data)}\n",
                f"{rows[0]['unit']}{shared and '; ' + shared}. {circumstances(data)}\n",
                f"![{_title(data)}](plots/{stem}.png)\n",
                "\n".join(f"- {line}" for line in report.summary(data["rows"])) + "\n",
                table(rows, with_notes=data.get("sustained", False) or data["suite"] in report.NOTED),
            ]
    return "\n".join(parts)


def shown(data: dict[str, Any]) -> list[Row]:
    """The rows of a results file; of those that are one problem beside several, one."""
    return derivatives.merged(data["rows"]) if data["suite"] == "derivatives" else list(data["rows"])


def circumstances(data: dict[str, Any]) -> str:
    """When, on what and of which kernel sources a suite was measured, with the ceilings of that run."""
    driver = f", driver {data['driver']}" if data["driver"] else ""
    versions = ", ".join(f"{key} {value}" for key, value in data["versions"].items())
    ceilings = ", ".join(f"{key} {cell(value)}" for key, value in data["ceilings"].items())
    return (
        f"{data['date'][:10]}{driver}, {versions}; kernel sources {data['sources'][:12]}. "
        f"Ceilings in the same run: {ceilings}."
    )


def table(rows: Sequence[Row], with_notes: bool = False) -> str:
    """All rows as a Markdown table; the best value of each is bold. with_notes: behind a value stands its note."""
    keys = report.varying([row["problem"] for row in rows])
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    ratios = {"ratio_to_best": "vs best", "ratio_to_causal": "vs causal", "times_alone": "times alone"}
    ratios = {key: heading for key, heading in ratios.items() if any(key in row for row in rows)}
    headings = [*keys, "cupyflash", *(report.NAMES.get(name, name) for name in peers), *ratios.values()]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in rows:
        best = report.best({**row["peers"], "ours": row["ours"]}, row["unit"])
        values = [row["ours"], *(row["peers"].get(name) for name in peers)]
        shown = [f"**{cell(value)}**" if value is not None and value == best else cell(value) for value in values]
        if with_notes:
            notes = [row.get("notes", {}).get(name, "") for name in ("ours", *peers)]
            shown = [f"{x} ({y})" if y and value else x for x, y, value in zip(shown, notes, values)]
        shown += [report.ratio_text(row.get(key)).plain for key in ratios]
        lines.append("| " + " | ".join([*(cell(row["problem"][key]) for key in keys), *shown]) + " |")
    return "\n".join(lines) + "\n"


def _title(data: dict[str, Any]) -> str:
    family = f", family {data['family']} forced" if data["family"] else ""
    return TITLES[data["suite"]] + family + (", a second on end" if data.get("sustained") else "")


def figure(data: dict[str, Any]) -> Any:
    """Lines over the sequence length where there are several, bars otherwise and for rows with names; of models the
    ratios."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        if "scores" in data["rows"][0]["problem"]:
            return _named_bars(data)
        if data["suite"] == "cpu":  # (of both masks it would be too high)
            full = [row for row in data["rows"] if not row["problem"]["causal"]]
            return _named_bars({**data, "rows": full}, "dtype", ("seq", "dim"))
        if {"model", "row"} & {*data["rows"][0]["problem"]}:
            return _ratios(data)
        if data["suite"] == "derivatives":
            return _bars({**data, "rows": [row for row in shown(data) if row["peers"]] or shown(data)})
        lengths = {row["problem"].get("seq") for row in data["rows"]}
        return _lines(data) if len(lengths) > 1 else _bars(data)


def _lines(data: dict[str, Any]) -> Any:
    """One panel for each head dimension (and dtype) and each mask or pass."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = data["rows"]
    unit = rows[0]["unit"]
    keys = [key for key in report.varying([row["problem"] for row in rows]) if key != "seq"]
    down, across = ("causal" if "causal" in keys else "pass"), [key for key in keys if key in ("dtype", "dim")]
    if {"pass", "causal"} <= set(keys):  # fp32: a picture for each mask and pass would be too many
        rows = [row for row in rows if not row["problem"]["causal"] and not row["problem"].get("bias")]
        down = "pass"
    vertical = _distinct(rows, [down])
    horizontal = _distinct(rows, across)
    if len(horizontal) == 1:  # one row of panels is better than one column
        vertical, horizontal, down, across = horizontal, vertical, "", [down]
    shared = len(_distinct(rows, ["dtype"])) == 1  # one dtype's speed says nothing about another's
    figure = Figure(figsize=(3.9 * len(horizontal) + 0.6, 3.0 * len(vertical) + 0.9), layout="constrained")
    axes = figure.subplots(len(vertical), len(horizontal), squeeze=False, sharey=shared)
    lengths = sorted({row["problem"]["seq"] for row in rows})
    peers = _measured(rows)
    for y, first in enumerate(vertical):
        for x, second in enumerate(horizontal):
            axis = axes[y][x]
            panel = [row for row in rows if _is(row, [down], first) and _is(row, across, second)]
            by_length = {row["problem"]["seq"]: row for row in panel}
            for name in [*reversed(peers), "ours"]:  # ours on top
                values = [_value(by_length.get(seq), name) for seq in lengths]
                ours = name == "ours"
                axis.plot(
                    range(len(lengths)), values, label=name, color=COLOURS.get(name, "#444444"), marker="o",
                    linewidth=2.2 if ours else 1.3,
                    markersize=4 if ours else 6.5, markerfacecolor=None if ours else "none",  # seen even under ours
                )  # fmt: skip
            highest = ceiling(panel[0], data["ceilings"])
            if unit == "TFLOP/s" and highest:
                axis.axhline(highest, color="#333333", linestyle="--", linewidth=1)
            axis.set_xticks(range(len(lengths)), [f"{seq // 1024}k" if seq >= 1024 else str(seq) for seq in lengths])
            axis.set_title(", ".join(filter(None, [_words([down], first), _words(across, second)])))
            if unit == "TFLOP/s":
                axis.set_ylim(0, 1.06 * _highest(rows if shared else panel, data["ceilings"]))
            else:
                axis.set_yscale("symlog", linthresh=0.1)  # a logarithm that has room for 0
                axis.set_ylim(0, 2 * _highest(rows, {}))
            if x == 0:
                axis.set_ylabel(unit)
            if y == len(vertical) - 1:
                axis.set_xlabel("sequence length")
    handles = {line.get_label(): line for line in reversed(axes[0][0].get_lines()) if line.get_label()[0] != "_"}
    labels = [_label(name, data) for name in handles]
    shown: list[Any] = list(handles.values())
    if unit == "TFLOP/s" and any(ceiling(row, data["ceilings"]) for row in rows):
        shown.append(Line2D([], [], color="#333333", linestyle="--", linewidth=1))
        labels.append("matrix product, 8192³")
    figure.legend(shown, labels, loc="outside lower center", ncols=min(4, len(shown)), frameon=False)
    figure.suptitle(f"{_title(data)}, {data['machine']}", fontsize=13, fontweight="bold")
    return figure


def _bars(data: dict[str, Any]) -> Any:
    """A group of horizontal bars for each row, for suites without a range of lengths; one unit in a picture."""
    from matplotlib.figure import Figure

    rows = [row for row in data["rows"] if row["unit"] == data["rows"][0]["unit"]]
    keys = report.varying([row["problem"] for row in rows])
    figure = Figure(figsize=(8.4, 0.27 * _room(rows) + 1.3), layout="constrained")
    axis = figure.subplots()
    handles = _draw_groups(axis, rows, keys, data)
    if data["suite"] in ("ladder", "derivatives"):  # from rung to rung by an order of magnitude
        axis.set_xscale("log")
    axis.set_xlabel(f"{'µs' if rows[0]['unit'] == 'us' else rows[0]['unit']}")
    _finish(figure, handles, data)
    return figure


def _named_bars(data: dict[str, Any], apart: str = "dim", named: Sequence[str] = ("scores",)) -> Any:
    """Groups of bars for rows called by `named`: a column of panels for each pass, a row of them for each of
    `apart`."""
    from matplotlib.figure import Figure

    rows = data["rows"]
    across, down = _distinct(rows, ["pass"]), _distinct(rows, [apart])
    if apart == "dim":
        down.sort(reverse=True)
    panels = [[[row for row in rows if _is(row, ["pass"], x) and _is(row, [apart], y)] for x in across] for y in down]
    heights = [max(map(_room, line)) for line in panels]
    size = (6.6 * len(across), 0.24 * sum(heights) + 0.7 * len(down) + 1)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(down), len(across), squeeze=False, sharex="col", height_ratios=heights)
    handles: dict[str, Any] = {}
    for y, line in enumerate(panels):
        for x, panel in enumerate(line):
            keys = [*named, *(key for key in ("dtype",) if len(_distinct(panel, [key])) > 1)]
            handles |= _draw_groups(axes[y][x], panel, keys, data)
            axes[y][x].set_title(", ".join([*across[x], _words([apart], down[y])]))
            if y == len(down) - 1:
                axes[y][x].set_xlabel(rows[0]["unit"])
    _finish(figure, handles, data)
    return figure


def _ratios(data: dict[str, Any]) -> Any:
    """A panel for each pass: how many times as fast as the best peer each call is."""
    from matplotlib.figure import Figure

    rows, name_of = data["rows"], "model" if data["suite"] == "models" else "row"
    passes = _distinct(rows, ["pass"])
    panels = [[row for row in rows if _is(row, ["pass"], name) and row["ratio_to_best"]] for name in passes]
    figure = Figure(figsize=(5.2 * len(passes), 0.2 * max(map(len, panels)) + 1.4), layout="constrained")
    axes = figure.subplots(1, len(passes), squeeze=False)[0]
    for axis, name, panel in zip(axes, passes, panels):
        ratios = [row["ratio_to_best"] for row in panel]
        colours = [COLOURS["ours"] if ratio >= 1 else COLOURS["math"] for ratio in ratios]
        axis.barh(range(len(panel)), ratios, 0.75, color=colours)
        axis.axvline(1, color="#333333", linewidth=1)
        for at, ratio in enumerate(ratios):  # not on the line
            end = (max(ratio, 1), at)
            axis.annotate(f"{ratio:.2f}", end, (3, 0), textcoords="offset points", va="center", fontsize=7)
        axis.set_yticks(range(len(panel)), [row["problem"][name_of] for row in panel], fontsize=7)
        axis.set_ylim(len(panel) - 0.4, -0.6)
        axis.margins(x=0.1)
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
        axis.set_title(name[0])
        axis.set_xlabel("times the best peer's speed")
    figure.suptitle(f"{_title(data)}, {data['machine']}", fontsize=13, fontweight="bold")
    return figure


def _room(rows: Sequence[Row]) -> float:
    """How many bars high the groups of these rows are, with what lies between them."""
    return sum(max(1, sum(_value(row, name) is not None for name in ("ours", *row["peers"]))) + 0.8 for row in rows)


def _draw_groups(axis: Any, rows: Sequence[Row], keys: Sequence[str], data: dict[str, Any]) -> dict[str, Any]:
    """A group of horizontal bars for each row; what the legend has to say, by label."""
    names = ["ours", *_measured(rows)]
    bars: list[tuple[float, float, str]] = []  # position, value, name
    ticks, position, handles = [], 0.0, {}
    for row in rows:
        group = [(name, value) for name in names if (value := _value(row, name)) is not None]
        ticks.append(position + (len(group) - 1) / 2)
        bars += [(position + i, value, name) for i, (name, value) in enumerate(group)]
        position += max(1, len(group)) + 0.8
    for name in names:
        own = [(y, value) for y, value, owner in bars if owner == name]
        if own:
            places, values = zip(*own)
            drawn = axis.barh(places, values, 0.85, color=COLOURS.get(name))
            axis.bar_label(drawn, [cell(value) for value in values], padding=3, fontsize=8)
            handles[_label(name, data)] = drawn
    axis.set_yticks(ticks, [_words(keys, tuple(row["problem"][key] for key in keys)) for row in rows])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.08)
    return handles


def _finish(figure: Any, handles: dict[str, Any], data: dict[str, Any]) -> None:
    """Legend and title of a picture of bars."""
    columns = min(4, len(handles)) or 1
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(f"{_title(data)}, {data['machine']}", fontsize=13, fontweight="bold")


def ceiling(row: Row, ceilings: dict[str, float | None]) -> float | None:
    return ceilings.get(machine.gemm_key(row["problem"]["dtype"]) + "_tflops")


def _highest(rows: Sequence[Row], ceilings: dict[str, float | None]) -> float:
    """The highest value that these rows or their ceilings reach."""
    values = [value for row in rows for value in (row["ours"], *row["peers"].values(), ceiling(row, ceilings))]
    return max((value for value in values if value is not None), default=1.0)


def _measured(rows: Sequence[Row]) -> list[str]:
    """The peers that have a value in any row."""
    return list(dict.fromkeys(name for row in rows for name, value in row["peers"].items() if value is not None))


def _distinct(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row["problem"][key] for key in keys) for row in rows))


def _is(row: Row, keys: Sequence[str], values: tuple[Any, ...]) -> bool:
    return all(row["problem"][key] == value for key, value in zip(keys, values))


def _value(row: Row | None, name: str) -> float | None:
    if row is None:
        return None
    value: float | None = row["ours"] if name == "ours" else row["peers"].get(name)
    return value


def _label(name: str, data: dict[str, Any]) -> str:
    if name == "ours":
        return "cupyflash" + (f" ({data['family']})" if data["family"] else "")
    return report.NAMES.get(name, name)


def _words(keys: Sequence[str], values: Sequence[Any]) -> str:
    """'dim', 64 as 'head dim 64'; masks, passes and dtypes by their own names; a bias where there is one."""
    words: dict[str, Callable[[Any], str]] = {
        "dim": "head dim {}".format,
        "seq": "{} tokens".format,
        "causal": lambda x: "causal" if x else "full",
        "bias": lambda x: "bias" if x else "",
    }
    return ", ".join(filter(None, (words.get(key, str)(value) for key, value in zip(keys, values))))
