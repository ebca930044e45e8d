"""Head dimensions above 256 on this GPU: TFLOP/s of each of our families, beside PyTorch's memory-efficient and math
backends, and beside our own 256 with as many products.

python bench/wide_heads.py                  # some five minutes
python bench/wide_heads.py --only 8192      # rows whose name has that
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from cupyflash.bench import models, peers
from cupyflash.bench.models import Call
from cupyflash.bench.suite import Options, compare, take_turns
from cupyflash.passes import BACKWARD, FORWARD, Pass

FAMILIES = ("sm90", "sm80", "simt")
PEERS = ("efficient", "math")


def rows() -> Iterator[tuple[Call, Pass]]:
    """512 with 8 heads and 256 with 16, 16k tokens; then what latent attention has (DeepSeek V3), and a token of it."""
    for seq, causal, of in itertools.product((2048, 4096, 8192), (False, True), (FORWARD, BACKWARD)):
        for dim in (512, 256):
            yield Call(16384 // seq, seq, 4096 // dim, 4096 // dim, dim, causal=causal), of
    for of in (FORWARD, BACKWARD):
        yield Call(2, 4096, 16, 1, 576, causal=True, dim_v=512), of
        yield Call(4, 4096, 8, 8, 320, causal=True), of
    yield Call(64, 1, 128, 1, 576, seq_k=4096, dim_v=512), FORWARD


def prepared(device: str = "cuda") -> dict[str, peers.Prepare]:
    found = {"ours": peers.ours()} | {name: peers.LOADERS[name]() for name in PEERS}
    return found | {name: peers.ours(name) for name in FAMILIES if device == "cuda"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has that")
    only = parser.parse_args().only
    names = ("ours", *FAMILIES, *PEERS)
    print("TFLOP/s".ljust(44), *(name.rjust(9) for name in names))
    for call, of in rows():
        what = f"{of} {call}"
        if only not in what:
            continue
        candidates, notes = compare(prepared(), models.draw(call, "bfloat16", 0), of)
        seconds, more = take_turns(candidates, Options(), patience=1.0)
        speeds = {name: models.work(call, of) / seconds[name] / 1e12 for name in seconds}
        print(what.ljust(44), *(f"{speeds[x]:9.1f}" if x in speeds else "–".rjust(9) for x in names), flush=True)
        for name, text in (notes | more).items():
            print(f"    {name}: {text}")


if __name__ == "__main__":
    main()
