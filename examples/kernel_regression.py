"""Nadaraya-Watson kernel regression of a large point set, as one attention call, with its gradient.

The estimate at x from n noisy samples z_j at points y_j is a weighted mean with Gaussian weights (Nadaraya 1964):

    f(x) = sum_j w_j z_j / sum_j w_j,    w_j = exp(-sum_d (x_d - y_jd)^2 / (2 h_d^2))

Expanding the square, |x|^2 is the same for every j and cancels, and what is left is a dot product:

    log w_j = sum_d (x_d / h_d)(y_jd / h_d) - sum_d (y_jd / h_d)^2 / 2 + const
            = q . k_j    with  q = (x / h, 1),  k_j = (y_j / h, -|y_j / h|^2 / 2)

so f(x) is attention with scale 1. The n x m weight matrix is never in memory, whatever n and m are, and
`attention_backward` gives the gradient: here that of the error on held-out samples with respect to the bandwidths h,
which gradient descent then finds. A coordinate that does not matter gets a wide one.

    python examples/kernel_regression.py [--points N] [--queries M] [--float64] [--device cpu|gpu] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from cupyflash import attention, attention_backward
from cupyflash.arrays import array_module, on_host

Array = Any


def features(xp: Any, x: Array, y: Array, h: Array) -> tuple[Array, Array]:
    """Queries (m, D + 1) and keys (n, D + 1) whose dot products are the logarithms of the weights."""
    x, y = x / h, y / h
    return (
        xp.concatenate([x, xp.ones_like(x[:, :1])], axis=1),
        xp.concatenate([y, -0.5 * (y * y).sum(axis=1, keepdims=True)], axis=1),
    )


def estimate(xp: Any, x: Array, y: Array, z: Array, h: Array) -> Array:
    """f at the points x (m, D) from samples z (n, C) at y (n, D), with bandwidths h (D,)."""
    q, k = features(xp, x, y, h)
    return attention(q, k, z, scale=1.0)


def error_and_gradient(xp: Any, x: Array, target: Array, y: Array, z: Array, h: Array) -> tuple[float, Array]:
    """Mean squared error of f at x, and its gradient with respect to log h (D,)."""
    q, k = features(xp, x, y, h)
    out, lse = attention(q, k, z, scale=1.0, return_lse=True)
    residual = out - target
    dq, dk, _ = attention_backward(residual * (2 / residual.size), q, k, z, out, lse, scale=1.0)
    # x / h and y / h shrink by themselves as log h grows; the last key feature, -|y / h|^2 / 2, grows by |y / h|^2.
    own, other = -(dq * q)[:, :-1].sum(axis=0), -(dk * k)[:, :-1].sum(axis=0)
    return float((residual * residual).mean()), own + other + (dk[:, -1:] * (y / h) ** 2).sum(axis=0)


def direct(x: np.ndarray, y: np.ndarray, z: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The textbook formula in float64, with the whole weight matrix."""
    x, y, z, h = (a.astype(np.float64) for a in (x, y, z, h))
    log_w = -0.5 * (((x[:, None] - y) / h) ** 2).sum(axis=-1)
    w = np.exp(log_w - log_w.max(axis=1, keepdims=True))
    return w @ z / w.sum(axis=1, keepdims=True)


def samples(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points in the cube [-1, 1]^3, noisy values there, and the values without noise; the third coordinate is idle."""
    y = rng.uniform(-1, 1, (count, 3))
    clean = (np.sin(6 * y[:, 0]) + y[:, 1] ** 2)[:, None]
    return y, clean + rng.normal(0, 0.2, clean.shape), clean


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, help="samples to learn from (default 8,000; on a GPU 200,000)")
    parser.add_argument("--queries", type=int, help="samples to predict (default 2,000; on a GPU 50,000)")
    parser.add_argument("--steps", type=int, default=25, help="steps of gradient descent")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--device", choices=["cpu", "gpu"])
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args(arguments)

    xp = array_module(args.device)
    points, queries = (args.points or 8_000, args.queries or 2_000) if xp is np else (
        args.points or 200_000, args.queries or 50_000
    )  # fmt: skip
    dtype = "float64" if args.float64 else "float32"
    rng = np.random.default_rng(0)
    (y, z, _), (x, target, clean) = samples(points, rng), samples(queries, rng)
    y, z, x, target, clean = (xp.asarray(a, dtype=dtype) for a in (y, z, x, target, clean))

    log_h = np.log(np.full(3, 0.4))
    history = []
    start = time.perf_counter()
    for step in range(args.steps):
        h = xp.asarray(np.exp(log_h), dtype=dtype)
        error, gradient = error_and_gradient(xp, x, target, y, z, h)
        history.append(error)
        downhill = -on_host(gradient).astype(np.float64)
        log_h += 0.3 * (1 - step / args.steps) * downhill / np.abs(downhill).max()
    seconds = time.perf_counter() - start
    h = xp.asarray(np.exp(log_h), dtype=dtype)
    f = estimate(xp, x, y, z, h)

    few = slice(0, 200)
    x0, y0, z0, t0, h0 = (on_host(a) for a in (x[few], y, z, target[few], h))
    off = float(np.abs(on_host(f[few]) - direct(x0, y0, z0, h0)).max())
    gradient = on_host(error_and_gradient(xp, x[few], target[few], y, z, h)[1])
    differences = [
        (
            np.mean((direct(x0, y0, z0, h0 * np.exp(e)) - t0) ** 2)
            - np.mean((direct(x0, y0, z0, h0 / np.exp(e)) - t0) ** 2)
        )
        / 2e-4
        for e in 1e-4 * np.eye(3)
    ]
    gradient_off = float(np.abs(gradient - differences).max() / np.abs(differences).max())
    rms = float(xp.sqrt(((f - clean) ** 2).mean()))

    print(f"{points:,} samples, {queries:,} queries, {dtype}, {xp.__name__}: {args.steps} steps in {seconds:.2f} s")
    print(f"mean squared error at held-out samples {history[0]:.4f} -> {history[-1]:.4f} (noise alone: 0.0400)")
    print("bandwidths " + ", ".join(f"{b:.3f}" for b in h0) + "; the third coordinate does not matter")
    print(f"error against the noiseless function {rms:.4f} (root mean square; the noise is 0.2)")
    print(
        f"largest difference from the formula in float64, 200 queries: {off:.1e}; gradient, relative: "
        f"{gradient_off:.1e}"
    )
    if args.plot:
        plot(args.plot, xp, y, z, h, history)
    return {"first": history[0], "last": history[-1], "difference": off, "gradient": gradient_off, "rms": rms}


def plot(path: str, xp: Any, y: Array, z: Array, h: Array, history: list[float]) -> None:
    """The samples near a line along the first coordinate with the fitted curve, and the error by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    line = np.zeros((400, 3))
    line[:, 0] = np.linspace(-1, 1, 400)
    curve = on_host(estimate(xp, xp.asarray(line, dtype=y.dtype), y, z, h))
    y0, z0 = on_host(y), on_host(z)
    near = np.flatnonzero(abs(y0[:, 1]) < 0.1)[:3000]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot(y0[near, 0], z0[near, 0], ".", color="#9ec5e8", markersize=3, label="samples near the line")
    left.plot(line[:, 0], np.sin(6 * line[:, 0]), "--", color="#333333", label="the function")
    left.plot(line[:, 0], curve[:, 0], color="#d1495b", linewidth=2, label="kernel regression")
    left.set(xlabel="first coordinate (the others are 0)", ylabel="value")
    right.plot(history, color="#0b4f8a", label="error at held-out samples")
    right.axhline(0.04, color="#333333", linestyle="--", linewidth=1, label="noise alone")
    right.set(xlabel="step", ylabel="mean squared error", yscale="log")
    right.set_yticks([0.04, 0.06, 0.1, 0.2, 0.4], labels=["0.04", "0.06", "0.1", "0.2", "0.4"])
    right.set_yticks([], minor=True)
    for axis in (left, right):
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)  # above, where no sample is
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
