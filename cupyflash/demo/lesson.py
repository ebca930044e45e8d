"""The demo's lesson: a language model is trained, and what it learnt is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
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
from rich.text import Text as Styled

from ..tools.console import Console
from .check import Check, check_layer
from .model import Model
from .picture import Lesson
from .text import Text, standard_library
from .training import Recipe, Step, generate, one_blas_thread, train, windows

PROMPTS = [b"\ndef ", b"\nclass ", b"\nimport "]
SAMPLE = 320  # bytes
WIDE = 90  # columns that a bar and the times have room in
HELD_OUT_LOOKS = 10  # times that the loss on held-out text is measured during training


def teach(xp: Any, how: Recipe, device: str, console: Console) -> tuple[Lesson, list[Check]]:
    """Train, tell how it goes and what the model writes; returns what a picture shows, and checks of a layer."""
    with one_blas_thread():
        return _teach(xp, how, device, console)


def _teach(xp: Any, how: Recipe, device: str, console: Console) -> tuple[Lesson, list[Check]]:
    text = standard_library()
    model = Model(how.config, xp, how.seed)
    c = how.config
    console.print(
        f"[bold]A language model of bytes[/], from attention and its gradients alone: {c.layers} layers, width "
        f"{c.width}, {c.heads} heads, context {c.context}, {model.flat.size / 1e6:.2g} million weights.\n"
        f"Text: {text.files} files of Python's standard library, {(text.train.size + text.held_out.size) / 1e6:.1f} "
        f"MB. Attention in {c.attention_dtype}, on {device}.\n"
    )
    losses, held_out = learn(model, text, how, console)
    console.print(
        f"Loss on text held out: [bold]{held_out[0][1]:.2f} → {held_out[-1][1]:.2f}[/] nats per byte; before training "
        f"every byte was as likely as any other, log 256 = {np.log(256):.2f}\n"
    )
    samples = generate(model, PROMPTS, SAMPLE, seed=how.seed)
    panels = [Panel(Styled(_printable(sample.decode("latin-1").strip())), border_style="blue") for sample in samples]
    console.print("[bold]It writes[/]", *panels)

    layer = c.layers // 2
    shown = text.held_out[: c.context]
    checks, odds = check_layer(model, xp.asarray(shown[None].astype(np.int32)), layer, how.seed)
    return Lesson(losses, held_out, odds, shown.tobytes(), layer), checks


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


def _printable(text: str) -> str:
    return "".join(ch if ch == "\n" or 32 <= ord(ch) < 127 else "·" for ch in text)
