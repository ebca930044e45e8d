"""Of `cupyflash bench parallel`: CuPy over NCCL, and JAX inside shard_map, at 64k. Rows join those of PyTorch's in the
file of the folder OUT.

python -m cupyflash.bench.parallel_libraries cupy|jax OUT RANK SIZE PORT [cpu]
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..tools.timing import reason
from . import parallel_page

LENGTH, HEADS, DIM, ROUNDS = 65536, 16, 128, 3
PEERS = ("cudnn heads",)
WRONG = 2e-2  # of the largest value: a result that is further off is none


def row(
    library: str, of: str, dtype: str, size: int, ms: dict[str, float], notes: dict[str, str],
    shape: tuple[int, int, int] = (LENGTH, HEADS, DIM),
) -> dict[str, Any]:  # fmt: skip
    """Ours is what a call takes that does not name an exchange: that of heads."""
    one, each = ms["one"], {name: t for name, t in ms.items() if name in ("keys", "heads")}
    peers = {name: ms.get(name) for name in PEERS if name in ms or name in notes}
    problem = {
        "case": f"{library} 64k", "pass": of, "seq": shape[0], "heads_q": shape[1], "heads_k": shape[1],
        "dim": shape[2], "what": library, "ranks": size, "dtype": dtype,
    }  # fmt: skip
    return parallel_page.row(problem, one, each, ms.get("heads", ms.get("keys")), peers, notes)


def keep(out: str, rows: list[dict[str, Any]], fresh: int = 2) -> None:
    """Write them, and say the last, which are new."""
    parallel_page.keep(Path(out), rows)
    for x in rows[-fresh:]:
        print(parallel_page.told(x), flush=True)


def in_turn(calls: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Medians of what each says it took, in changing order."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(ROUNDS):
        for name in random.Random(n).sample(list(calls), len(calls)):
            found[name].append(calls[name]())
    return {name: statistics.median(x) for name, x in found.items()}


def pair(forward: Any, backward: Any, x: list[Any], how: dict[str, Any]) -> tuple[Callable[[], Any], ...]:
    """The forward and the backward of dout, q, k, v."""
    out, lse = forward(*x[1:], return_lse=True, **how)
    return partial(forward, *x[1:], **how), partial(backward, *x, out, lse, **how)


def cupy_rank(out: str, rank: int, size: int, port: int) -> None:
    import cupy
    import ml_dtypes
    from cupyx.distributed import NCCLBackend

    from .. import attention, attention_backward, parallel

    cupy.cuda.Device(rank).use()
    group: Any = NCCLBackend(size, rank, host="127.0.0.1", port=port)
    held = parallel.Rows.zigzag(LENGTH, size)

    def largest(x: float) -> float:
        found = cupy.array([x])
        group.all_reduce(found, found, op="max")
        return float(found[0])

    def milliseconds(call: Callable[[], Any], number: int) -> float:
        largest(0.0)
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record()
        for _ in range(number):
            call()
        last.record()
        last.synchronize()
        return largest(cupy.cuda.get_elapsed_time(first, last) / number)

    rows = []
    for dtype in ("float16", "bfloat16"):
        cupy.random.seed(0)
        draw = partial(cupy.random.standard_normal, (1, LENGTH, HEADS, DIM), dtype=cupy.float32)
        x = [draw().astype(getattr(ml_dtypes, dtype, dtype)) for _ in range(4)]
        calls = {"one": pair(attention, attention_backward, x, {"causal": True})}
        own = [held.take(y, rank) for y in x]
        for exchange in ("keys", "heads"):
            how = {"group": group, "rows": held, "exchange": exchange, "causal": True}
            calls[exchange] = pair(parallel.attention, parallel.attention_backward, own, how)
        for n, of in enumerate(("forward", "backward")):
            for both in calls.values():
                both[n]()
            number = (3, 1)[n]
            ms = in_turn({name: partial(milliseconds, both[n], number) for name, both in calls.items()})
            rows.append(row("cupy", of, dtype, size, ms, {}))
        if rank == 0:
            keep(out, rows)


def jax_devices(out: str, cpu: bool) -> None:
    import jax
    import numpy as np
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from ..jax import attention
    from ..jax import parallel as over
    from ..parallel import Rows

    size = jax.device_count()
    mesh, spec = Mesh(np.array(jax.devices()), ("sp",)), P(None, "sp")
    length, heads, dim, kind = (512, 4, 16, jnp.float32) if cpu else (LENGTH, HEADS, DIM, jnp.bfloat16)
    held = Rows.zigzag(length, size)
    order = np.concatenate([held.positions(r) for r in range(size)])
    with jax.default_device(jax.devices()[0]):
        keys = jax.random.split(jax.random.key(0), 4)
        x = [jax.random.normal(key, (1, length, heads, dim), kind) for key in keys]
    placed = [jax.device_put(y[:, order], NamedSharding(mesh, spec)) for y in x]
    straight = [jax.device_put(y, NamedSharding(mesh, spec)) for y in x]

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        moved = [jax.lax.all_to_all(y, "sp", 2, 1, tiled=True) for y in (q, k, v)]
        found = jax.nn.dot_product_attention(*moved, is_causal=True, implementation="cudnn")
        return jax.lax.all_to_all(found, "sp", 1, 2, tiled=True)

    def spread(f: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)

    # Each with its arrays, and how their rows come in their order.
    back = np.argsort(order)
    functions: dict[str, tuple[Any, list[Any], Any]] = {"one": (partial(attention, causal=True), x, slice(None))}
    for exchange in ("keys", "heads"):
        ours = partial(over.attention, axis="sp", rows=held, exchange=exchange, causal=True)
        functions[exchange] = (spread(ours), placed, back)
    functions["cudnn heads"] = (spread(cudnn), straight, slice(None))
    calls: dict[str, Callable[[], float]] = {}
    notes: dict[str, str] = {}
    reference: list[Any] = []
    for name, (f, (dout, *given), rows) in functions.items():

        def both(dout: Any, *given: Any, f: Any = f) -> Any:
            found, pull = jax.vjp(f, *given)
            return found, pull(dout)

        run = partial(jax.jit(both), dout, *given)
        try:
            found, grads = jax.block_until_ready(run())
        except Exception as error:  # noqa: BLE001 - cuDNN may not be there
            notes[name] = reason(error)
            print(f"jax {name}: {notes[name]}", flush=True)
            continue
        whole = [jax.device_put(y, jax.devices()[0])[:, rows] for y in (found, *grads)]
        reference = reference or whole
        off = max(float(jnp.abs(y - z).max() / jnp.abs(z).max()) for y, z in zip(whole, reference))
        if not off < WRONG:
            notes[name] = f"wrong: off by {off:.2g} of the largest value"
            continue
        calls[name] = partial(_milliseconds, run, jax.block_until_ready)
    ms = in_turn(calls)
    keep(out, [row("jax", "both", str(x[0].dtype), size, ms, notes, (length, heads, dim))])


def _milliseconds(run: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    for _ in range(2):
        found = run()
    wait(found)
    return (time.perf_counter() - start) / 2 * 1e3


def main(part: str, out: str, rank: str, size: str, port: str, *cpu: str) -> None:
    code = 1
    try:
        if part == "cupy":
            cupy_rank(out, int(rank), int(size), int(port))
        else:
            jax_devices(out, bool(cpu))
        code = 0
    except BaseException:  # noqa: BLE001 - said, and then the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # CuPy's NCCLBackend has a process of its own, and others may still wait for a transfer


if __name__ == "__main__":
    main(*sys.argv[1:])
