"""A batch that is too large for one GPU, over all GPUs of the machine with CuPy, copies beside kernels.

Parts of the batch go round the devices, two streams on each: while one part is computed on a stream, the next one is
copied on the other. A call goes to CuPy's current stream of the current device, and waits for nothing; only the end
waits.

    python examples/cupy_devices.py [--batch N] [--length N] [--device cpu|gpu]
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np

from cupyflash import attention
from cupyflash.arrays import array_module


def over_devices(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, part: int, streams: list[Any], **options: Any
) -> np.ndarray:
    """Attention of arrays in pinned memory on the host, `part` batch entries at a time, each on the next stream."""
    import cupy

    out = pinned(q.shape[:-1] + v.shape[-1:], q.dtype)
    for start, (device, stream) in zip(range(0, len(q), part), itertools.cycle(streams)):
        which = slice(start, start + part)
        with device, stream:
            parts = [cupy.empty(x[which].shape, x.dtype) for x in (q, k, v)]
            for x, y in zip(parts, (q, k, v)):
                x.set(y[which], stream=stream)  # from pinned memory: does not wait
            attention(*parts, **options).get(stream=stream, out=out[which], blocking=False)
    for _, stream in streams:
        stream.synchronize()
    return out


def streams_of(devices: list[int]) -> list[Any]:
    """Two for each device, those of one device far apart, so that all devices begin at once."""
    import cupy

    found = []
    for _, n in itertools.product(range(2), devices):
        with cupy.cuda.Device(n) as device:
            found.append((device, cupy.cuda.Stream(non_blocking=True)))
    return found


def pinned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array on the host that a GPU copies by itself."""
    import cupyx

    return cupyx.empty_pinned(shape, dtype)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: GPUs if there are any")
    given = parser.parse_args(arguments)
    xp = array_module(given.device)
    drawn = np.random.default_rng(0).standard_normal((3, given.batch, given.length, 4, 64), dtype=np.float32)
    if xp is np:  # one device, which has no streams
        out, where = attention(*drawn, causal=True), "the CPU"
    else:
        host = pinned(drawn.shape, drawn.dtype)
        host[...] = drawn
        count = xp.cuda.runtime.getDeviceCount()
        out, where = over_devices(*host, part=2, streams=streams_of(list(range(count))), causal=True), f"{count} GPUs"
    one = attention(*drawn[:, :1], causal=True)
    difference = float(abs(out[:1] - one).max())
    print(
        f"{given.batch} x {given.length} queries on {where}; the first entry differs from the CPU's by {difference:.1e}"
    )
    return difference


if __name__ == "__main__":
    main()
