"""The NumPy path beside PyTorch's CPU scaled_dot_product_attention, timed in turn on the same cores.

python bench/cpu_vs_torch.py [--shape B,S,H,D] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import cupyflash
from cupyflash.cpu.tiles import threads


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(shape: tuple[int, ...], causal: bool, rounds: int) -> None:
    q, k, v, dout = np.random.default_rng().standard_normal((4, *shape), np.float32)
    leaves = [torch.from_numpy(x.transpose(0, 2, 1, 3).copy()).requires_grad_() for x in (q, k, v)]
    tq, tk, tv = (x.detach() for x in leaves)
    tdout = torch.from_numpy(dout.transpose(0, 2, 1, 3).copy())
    out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    graph = scaled_dot_product_attention(*leaves, is_causal=causal)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (
            lambda: cupyflash.attention(q, k, v, causal=causal),
            lambda: scaled_dot_product_attention(tq, tk, tv, is_causal=causal),
        ),
        "backward": (
            lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal),
            lambda: torch.autograd.grad(graph, leaves, tdout, retain_graph=True),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
        mine, peer = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(a / b for a, b in times)
        print(f"{name:8s} causal={causal!s:5s}  cupyflash {mine:.3f} s  torch {peer:.3f} s  ratio {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1,4096,8,64", help="B,S,H,D (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each, in turn (default %(default)s)")
    arguments = parser.parse_args()
    shape = tuple(int(n) for n in arguments.shape.split(","))
    torch.set_num_threads(threads())
    print(f"float32, shape (B, S, H, D) = {shape}, {threads()} threads, median of {arguments.rounds} rounds")
    for causal in (False, True):
        compare(shape, causal, arguments.rounds)


if __name__ == "__main__":
    main()
