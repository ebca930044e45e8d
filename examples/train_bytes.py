"""The model of `cupyflash demo`, used from Python: a transformer trained without an autograd framework.

    python examples/train_bytes.py [--steps N] [--device cpu|gpu]

The model and its hand-written gradients are in `cupyflash/demo/model.py`.
"""

from __future__ import annotations

import argparse

from cupyflash.arrays import array_module
from cupyflash.demo.model import Config, Model
from cupyflash.demo.text import standard_library
from cupyflash.demo.training import Recipe, generate, one_blas_thread, train


def main(steps: int = 100, device: str | None = None) -> list[float]:
    """Train a small model for some steps and print what it writes; returns the loss of every step."""
    how = Recipe(Config(layers=2, width=96, heads=3, context=128), batch=8, rate=6e-3, seconds=600, steps=steps)
    model = Model(how.config, array_module(device))  # CuPy where a GPU can be used, NumPy elsewhere
    losses = []
    with one_blas_thread():
        for step in train(model, standard_library().train, how):
            losses.append(step.loss)
            if step.number % 10 == 1 or step.number == steps:
                print(f"step {step.number:4}  loss {step.loss:.3f} nats per byte")
        print(generate(model, [b"\nimport "], how.config.context)[0].decode("latin-1"))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of the optimiser (default 100)")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: the GPU where one can be used")
    main(**vars(parser.parse_args()))
