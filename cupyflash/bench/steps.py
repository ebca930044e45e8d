"""The suite `gpt`: training steps of a 12-layer GPT with one attention or another, in compiled PyTorch and in JAX.

Everybody starts from the same weights, sees the same tokens and takes the same number of steps, a few at a time and in
turn; who loses something else than the first of them is wrong.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..tools.timing import interleave, reason
from . import jitted
from .suite import TOLERANCE, Measured, Options, Problem, importable

PEERS = ("fa2", "cudnn", "fa3", "jax-cudnn")
MODEL = "125M, d128"
TORCH, FLAX, JAX = "PyTorch, compiled", "JAX, Flax", "JAX"
WARM_UP, STEPS = 3, 10  # steps before anything is timed, and of a sample


class Trainer(NamedTuple):
    """`put` brings tokens (B, S + 1) to where they are needed; `step` takes those and returns the loss; `wait` until
    all that was asked for is done."""

    put: Callable[[np.ndarray], Any]
    step: Callable[[Any], Any]
    wait: Callable[[Any], object]


class Run:
    """A trainer on its way through the data."""

    def __init__(self, trainer: Trainer, data: Callable[[int], np.ndarray]) -> None:
        self.trainer, self.data = trainer, data
        self._losses: list[Any] = []

    def go(self, steps: int) -> float:
        """So many further steps; returns the seconds that one took."""
        begin = len(self._losses)
        tokens = [self.trainer.put(self.data(step)) for step in range(begin, begin + steps)]
        start = time.perf_counter()
        self._losses += [self.trainer.step(x) for x in tokens]
        self.trainer.wait(self._losses[-1])
        return (time.perf_counter() - start) / steps

    @property
    def losses(self) -> list[float]:
        return [float(x) for x in self._losses]


def problems(options: Options) -> list[Problem]:
    """16k tokens a step. JAX's model is Flax's where that is installed, else plain functions."""
    from .gpt import SIZES

    size, seq = SIZES[MODEL], 1024 if options.quick else 4096
    fixed = {"layers": size.layers, "width": size.width, "dim": size.width // size.heads, "causal": True}
    return [
        {"library": library, **fixed, "seq": seq, "batch": 16384 // seq, "heads": size.heads, "dtype": "bfloat16"}
        for library in (TORCH, FLAX if _has_flax() else JAX)
    ]


def _has_flax() -> bool:
    try:
        importlib.import_module("cupyflash.bench.gpt_flax")
    except ImportError:  # not there, or too old
        return False
    return True


def measure(problem: Problem, options: Options, model: str = MODEL, device: str = "cuda") -> Measured:
    """Tokens a second, by the host's clock."""
    from .gpt import SIZES, model_flops

    size, tokens = SIZES[model], problem["batch"] * problem["seq"]
    weights = initial(model, problem["seq"])

    def data(step: int) -> np.ndarray:  # each token is the one before plus 37: there is something to learn
        first = np.random.default_rng(step).integers(size.vocabulary, size=(problem["batch"], 1))
        found: np.ndarray = (first + 37 * np.arange(problem["seq"] + 1)) % size.vocabulary
        return found.astype(np.int32)

    make = _in_torch if problem["library"] == TORCH else _in_jax
    names = [*importable(("fa2", "cudnn", "fa3"))] if problem["library"] == TORCH else ["jax-cudnn"]
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name in (*names, "ours"):
        try:
            runs[name] = Run(make(problem["library"], name, model, weights, options.family, device), data)
            runs[name].go(WARM_UP)
        except Exception as failure:  # noqa: BLE001 - as in compare
            runs.pop(name, None)
            notes[name] = reason(failure)
    seconds, failures = interleave(list(runs), options.rounds, lambda name: runs[name].go(STEPS))
    notes |= failures
    parameters = sum(x.size for x in weights.values())
    work = problem["batch"] * model_flops(parameters, size.layers, size.width, problem["seq"]) / 1e12
    losses = {name: runs[name].losses for name in seconds}
    for name, why in wrong(losses).items():
        notes[name] = why
        del seconds[name]
    for name, t in seconds.items():
        notes[name] = f"{work / t:.0f} model TFLOP/s, loss {losses[name][0]:.2f} to {losses[name][-1]:.2f}"
    if [*seconds] == ["ours"]:
        notes["ours"] = f"unchecked: no peer trains it; {notes['ours']}"
    runs.clear()
    if problem["library"] == TORCH:
        import torch

        torch._dynamo.reset()
    gc.collect()
    return {name: tokens / t for name, t in seconds.items()}, notes


def wrong(losses: dict[str, list[float]]) -> dict[str, str]:
    """Who loses something else than the first, by more than TOLERANCE of it on average; NaN is wrong too."""
    found: dict[str, str] = {}
    judge = next((name for name, own in losses.items() if np.isfinite(own).all()), None)
    for name, own in losses.items():
        pairs = list(itertools.zip_longest(own, losses[judge] if judge else own, fillvalue=np.nan))
        far = float(sum(abs(x - y) for x, y in pairs) / sum(abs(y) for _, y in pairs))
        if not far < TOLERANCE:
            found[name] = f"wrong: losses differ by {far:.2g} from those of {judge or 'anybody'}"
    return found


def initial(model: str, context: int) -> dict[str, np.ndarray]:
    """The weights that everybody starts from, by PyTorch's names."""
    import torch

    from .gpt import SIZES, WAYS, Gpt

    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return {name: x.numpy() for name, x in Gpt(SIZES[model], context, WAYS["ours"]).state_dict().items()}


def _in_torch(
    library: str, name: str, model: str, weights: dict[str, np.ndarray], family: str | None, device: str
) -> Trainer:
    import torch

    from .gpt import SIZES, WAYS, Gpt, ours, stepper

    way = ours(family) if name == "ours" else WAYS[name]
    made = Gpt(SIZES[model], len(weights["positions.weight"]), way)
    made.load_state_dict({key: torch.from_numpy(x) for key, x in weights.items()})
    step = stepper(made.to(device), compiled=True)
    wait = (lambda loss: torch.cuda.synchronize()) if device == "cuda" else (lambda loss: None)
    return Trainer(lambda tokens: torch.from_numpy(tokens).to(device, torch.int64), step, wait)


def _in_jax(
    library: str, name: str, model: str, weights: dict[str, np.ndarray], family: str | None, device: str
) -> Trainer:
    if device == "cuda":
        jitted.require_gpu()
    import jax

    from .gpt import SIZES

    made = importlib.import_module("cupyflash.bench.gpt_flax" if library == FLAX else "cupyflash.bench.gpt_jax")
    dtype = jax.numpy.bfloat16 if device == "cuda" else jax.numpy.float32
    # Every result of a program is there when its last kernel has run.
    step = made.stepper(weights, SIZES[model], jitted.attend(name, True, family), dtype)
    return Trainer(jax.numpy.asarray, step, jax.block_until_ready)
