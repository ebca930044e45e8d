"""Training and sampling: AdamW on random windows of the text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash.arrays import on_host

from .model import Array, Config, Model


@dataclass(frozen=True)
class Recipe:
    """A model size and how to train it. Training ends after `steps` or `seconds`, whichever comes first."""

    config: Config
    batch: int
    rate: float
    seconds: float
    steps: int | None = None
    seed: int = 0


CPU = Recipe(Config(layers=2, width=96, heads=3, context=64), batch=8, rate=1e-2, seconds=55)
GPU = Recipe(
    Config(layers=8, width=512, heads=8, context=512, attention_dtype="float16"), batch=32, rate=1.5e-3, seconds=40
)


@dataclass(frozen=True)
class Step:
    """What is known after an optimiser step."""

    number: int
    loss: float  # nats per byte
    done: float  # 0 to 1
    seconds: float
    tokens: int  # seen so far


def recipe(xp: Any, steps: int | None = None, seconds: float | None = None, seed: int = 0) -> Recipe:
    """The recipe for an array module: a small model for NumPy, a larger one for CuPy."""
    base = CPU if xp is np else GPU
    return replace(base, steps=steps, seconds=base.seconds if seconds is None else seconds, seed=seed)


def one_blas_thread() -> Any:
    """A context in which BLAS leaves the cores to `train`, which gives each a part of the batch instead.

    Matrices as small as the CPU model's are not worth BLAS's own threads, and where other programs want the cores too
    those wait for each other most of the time.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="blas")


def train(model: Model, text: np.ndarray, how: Recipe) -> Iterator[Step]:
    """Train in place, yielding after every step. The learning rate warms up, then falls linearly to zero."""
    xp, optimiser, rng = model.xp, AdamW(model), np.random.default_rng(how.seed)
    data = xp.asarray(text)
    # On the CPU one thread for each equal part of the batch: NumPy lets go of the interpreter lock.
    workers = _parts(how.batch, os.cpu_count() or 1) if xp is np else 1
    start, number, done = time.perf_counter(), 0, 0.0
    with ThreadPoolExecutor(workers) as pool:
        over = pool.map if workers > 1 else map
        while done < 1:
            batch = windows(xp, data, how.batch, how.config.context, rng)
            parts = list(over(model.gradient, *(xp.split(x, workers) for x in batch)))
            loss, gradient = (sum(part) / workers for part in zip(*parts))
            optimiser.step(gradient, how.rate * min((number + 1) / 20, 1 - done))
            number += 1
            seconds = time.perf_counter() - start
            done = min(1.0, max(seconds / how.seconds, number / (how.steps or math.inf)))
            yield Step(number, loss, done, seconds, number * how.batch * how.config.context)


def _parts(batch: int, cores: int) -> int:
    """Into how many equal parts a batch goes, no more than there are cores."""
    return max(n for n in range(1, cores + 1) if batch % n == 0)


def windows(xp: Any, data: Array, batch: int, length: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`batch` random windows of a byte vector, (batch, length), and the same windows one byte later."""
    starts = rng.integers(0, data.size - length, size=(batch, 1))
    both = data[xp.asarray(starts + np.arange(length + 1))].astype("int32")
    return both[:, :-1], both[:, 1:]


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017), gradients clipped to norm 1."""

    def __init__(self, model: Model, beta1: float = 0.9, beta2: float = 0.95, decay: float = 0.1) -> None:
        self.model, self.beta1, self.beta2, self.decay = model, beta1, beta2, decay
        self.mean, self.square = model.xp.zeros_like(model.flat), model.xp.zeros_like(model.flat)
        self.count = 0

    def step(self, gradient: Array, rate: float) -> None:
        xp, w = self.model.xp, self.model.flat
        self.count += 1
        gradient *= xp.minimum(1, 1 / (xp.sqrt(gradient @ gradient) + 1e-12))
        self.mean += (1 - self.beta1) * (gradient - self.mean)
        self.square += (1 - self.beta2) * (gradient * gradient - self.square)
        mean = self.mean / (1 - self.beta1**self.count)
        square = self.square / (1 - self.beta2**self.count)
        w *= 1 - rate * self.decay
        w -= rate * mean / (xp.sqrt(square) + 1e-8)


def generate(model: Model, prompts: list[bytes], length: int, temperature: float = 0.6, seed: int = 0) -> list[bytes]:
    """Continue each prompt to `length` bytes, byte by byte; returns prompts and all.

    The model sees as much as its context holds. Everything is computed anew for every byte: one shape, no cache, and
    causality hides what is not yet written.
    """
    xp, context = model.xp, model.config.context
    rng = np.random.default_rng(seed)
    written = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(written, prompts):
        row[: len(prompt)] = list(prompt)
    for i in range(min(map(len, prompts)), length):
        start = max(0, i - context)
        seen = written[:, start : start + context]
        scores = on_host(model.logits(xp.asarray(seen))[0][:, i - 1 - start]).astype(np.float64) / temperature
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        for row, prompt, p in zip(written, prompts, odds):
            if i >= len(prompt):
                row[i] = rng.choice(p.size, p=p)
    return [bytes(row.tolist()) for row in written]
