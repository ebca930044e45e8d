"""Kernel regression over samples that fill several GPUs, with its gradient, in CuPy and float64.

The estimate at x from samples z_j at points y_j is attention with scale 1 (examples/kernel_regression.py has the
derivation). Each GPU holds some of the queries and some of the samples, which no GPU need hold all of: the samples of
the others come to it in parts, `stretches`, and go again.

    python examples/parallel_cupy.py               # a process for each GPU; without GPUs two simulated ranks
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import numpy as np

from cupyflash import parallel


def features(xp: Any, x: Any, y: Any, h: Any) -> tuple[Any, Any]:
    """Queries (m, D + 1) and keys (n, D + 1) whose dot products are the logarithms of the weights."""
    x, y = x / h, y / h
    k = xp.concatenate([y, -0.5 * (y * y).sum(axis=1, keepdims=True)], axis=1)
    return xp.concatenate([x, xp.ones_like(x[:, :1])], axis=1), k


def fitted(xp: Any, group: Any, rank: int, size: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """What each rank does: errors of the steps of gradient descent, and the bandwidths."""
    rows, key_rows = parallel.Rows.contiguous(args.queries, size), parallel.Rows.contiguous(args.points, size)
    rng = np.random.default_rng(rank)  # a rank draws its own
    x, y = (xp.asarray(rng.uniform(-1, 1, (some.count(rank), 3))) for some in (rows, key_rows))
    true = [(xp.sin(6 * at[:, 0]) + at[:, 1] ** 2)[:, None] for at in (x, y)]
    z = true[1] + xp.asarray(rng.normal(0, 0.2, true[1].shape))
    how = {"rows": rows, "key_rows": key_rows, "exchange": "keys", "stretches": args.stretches, "scale": 1.0}
    log_h, errors = np.log(np.full(3, 0.4)), []
    for step in range(args.steps):
        h = xp.asarray(np.exp(log_h))
        q, k = features(xp, x, y, h)
        out, lse = parallel.attention(q, k, z, group, return_lse=True, **how)
        residual = out - true[0]
        dout = residual * (2 / args.queries)
        dq, dk, _ = parallel.attention_backward(dout, q, k, z, out, lse, group, **how)
        # x / h and y / h shrink by themselves as log h grows; the last key feature, -|y / h|^2 / 2, grows by |y / h|^2.
        own = -(dq * q)[:, :-1].sum(0) - (dk * k)[:, :-1].sum(0) + (dk[:, -1:] * (y / h) ** 2).sum(0)
        error, *gradient = total(xp, group, xp.concatenate([(residual**2).sum()[None] / args.queries, own]))
        errors.append(float(error))
        log_h -= 0.3 * (1 - step / args.steps) * np.array(gradient) / np.abs(gradient).max()
    return errors, np.exp(log_h).tolist()


def total(xp: Any, group: Any, x: Any) -> np.ndarray:
    """The sum of a few numbers over all ranks."""
    if xp is np:
        return group.all_gather(x.view(np.uint8)).view(np.float64).sum(0)
    group.all_reduce(x, x)
    return xp.asnumpy(x)


def of_gpu(rank: int, size: int, args: argparse.Namespace, found: Any) -> None:
    """A process of its own."""
    import cupy
    from cupyx.distributed import NCCLBackend

    with cupy.cuda.Device(rank):
        found.put((rank, fitted(cupy, NCCLBackend(size, rank), rank, size, args)))


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=4000, help="samples of all ranks")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--stretches", type=int, default=2, help="in how many parts samples come")
    args = parser.parse_args(arguments)
    try:
        import cupy

        size = cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001 - no CuPy, or no driver
        size = 0
    if size < 2:
        where, results = "2 simulated ranks", parallel.simulated(2).run(lambda g: fitted(np, g, g.rank, 2, args))
    else:
        spawn = multiprocessing.get_context("spawn")
        found = spawn.Queue()
        processes = [spawn.Process(target=of_gpu, args=(rank, size, args, found)) for rank in range(size)]
        for process in processes:
            process.start()
        where, results = f"{size} GPUs", [x for _, x in sorted(found.get(timeout=300) for _ in processes)]
        for process in processes:
            process.join(30)
            process.kill()
    errors, h = results[0]
    print(f"{args.points:,} samples, {args.queries:,} queries, float64, {where}")
    print(f"mean squared error against the function {errors[0]:.4f} -> {errors[-1]:.4f} in {args.steps} steps")
    print(f"bandwidths {', '.join(f'{x:.3f}' for x in h)}; the third coordinate does not matter")
    return errors, h


if __name__ == "__main__":
    main()
