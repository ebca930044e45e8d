"""The demo on a terminal: train, show the progress, sample, check, draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text as Styled

from ..tools.console import Console
from .check import Check, check_layer
from .model import Model
from .picture import draw
from .text import Text, standard_library
from .training import Recipe, Step, generate, one_blas_thread, train, windows

PROMPTS = [b"\ndef ", b"\nclass ", b"\nimport "]
SAMPLE = 320  # bytes
WIDE = 90  # columns that a bar and the times have room in
HELD_OUT_LOOKS = 10  # times that the loss on held-out text is measured during training


def run(xp: Any, how: Recipe, output: Path, console: Console) -> bool:
    """Run the whole demo with arrays of `xp`, write the picture to `output`; returns whether the check passed."""
    with one_blas_thread():
        return _run(xp, how, output, console)


def _run(xp: Any, how: Recipe, output: Path, console: Console) -> bool:
    text = standard_library()
    model = Model(how.config, xp, how.seed)
    c = how.config
    console.print(
        f"[bold]A language model of bytes[/], from attention and its gradients alone: {c.layers} layers, width "
        f"{c.width}, {c.heads} heads, context {c.context}, {model.flat.size / 1e6:.2g} million weights.\n"
        f"Text: {text.files} files of Python's standard library, {(text.train.size + text.held_out.size) / 1e6:.1f} "
        f"MB. Attention in {c.attention_dtype}, on {_device(xp)}.\n"
    )
    losses, held_out = learn(model, text, how, console)
    console.print(
        f"Loss on text held out: [bold]{held_out[0][1]:.2f} → {held_out[-1][1]:.2f}[/] nats per byte "
        f"(perplexity {np.exp(held_out[0][1]):.0f} → {np.exp(held_out[-1][1]):.1f} bytes)\n"
    )

    samples = generate(model, PROMPTS, SAMPLE, seed=how.seed)
    panels = [Panel(Styled(_printable(sample.decode("latin-1").strip())), border_style="blue") for sample in samples]
    console.print("[bold]It writes[/]", *panels)

    layer = c.layers // 2
    shown = text.held_out[: c.context]
    checks, odds = check_layer(model, xp.asarray(shown[None].astype(np.int32)), layer, how.seed)
    console.print(
        f"\n[bold]Attention of layer {layer + 1} against float64[/]: largest errors, and those of standard attention "
        f"in {c.attention_dtype}"
    )
    console.print(_checks(checks))
    head = draw(output, losses, held_out, odds, shown.tobytes())
    console.print(Styled(f"Picture: {output} (loss; attention of layer {layer + 1}, {head})"), soft_wrap=True)
    return all(check.passed for check in checks)


def learn(model: Model, text: Text, how: Recipe, console: Console) -> tuple[list[float], list[tuple[int, float]]]:
    """Train under a progress bar, in a log under lines. Returns each step's loss and (step, loss on held-out text)
    pairs."""
    xp, length = model.xp, how.config.context
    unseen = windows(xp, xp.asarray(text.held_out), 2 * how.batch, length, np.random.default_rng(how.seed + 1))
    losses: list[float] = []
    held_out, looks = [(0, model.loss(*unseen))], 0
    told: tuple[ProgressColumn, ...] = TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}")
    if console.width >= WIDE:
        told = (SpinnerColumn(), BarColumn(30), *told, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*told, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=1.0)
        for step in train(model, text.train, how):
            losses.append(step.loss)
            if int(step.done * HELD_OUT_LOOKS) > looks:
                looks = int(step.done * HELD_OUT_LOOKS)
                held_out.append((step.number, model.loss(*unseen)))
                if not console.is_terminal:
                    console.print(f"{step.done:4.0%}  {_status(step, losses)}")
            progress.update(bar, completed=step.done, description=_status(step, losses))
    return losses, held_out


def _status(step: Step, losses: list[float]) -> str:
    recent = sum(losses[-10:]) / len(losses[-10:])
    rate = step.tokens / step.seconds
    return f"step {step.number}  loss [bold]{recent:.3f}[/]  {rate / 1000:,.1f} kB/s"


def _checks(checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("cupyflash", "standard", "allowed", ""):
        table.add_column(heading, justify="right")
    for c in checks:
        verdict = "[green]ok[/]" if c.passed else "[red]too large[/]"
        table.add_row(c.name, f"{c.error:.2e}", f"{c.standard:.2e}", f"{c.limit:.2e}", verdict)
    return table


def _printable(text: str) -> str:
    return "".join(ch if ch == "\n" or 32 <= ord(ch) < 127 else "·" for ch in text)


def _device(xp: Any) -> str:
    if xp is np:
        return "the CPU (NumPy)"
    return f"{xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)['name'].decode()} (CuPy)"
