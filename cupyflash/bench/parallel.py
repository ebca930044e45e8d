"""`cupyflash bench parallel`: one sequence over the GPUs of a host, beside one of them and beside others.

It starts a process for each GPU (torchrun's and mpiexec's are taken as they are). `share` is the time of our own call
for the whole on one GPU, over the number of GPUs x the time here: 1 is as if each did its part alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..tools.timing import reason
from . import machine, parallel_page, report

SECONDS = 140  # that a run may take, of which whole cases are left out
DIM = 128
WRONG = 2e-2  # of the largest value: a result that is further off is none
PEERS = ("fa3 gather", "fa3 ring", "fa3 ulysses", "torch allgather", "torch alltoall")


class Case(NamedTuple):
    name: str
    length: int
    heads_q: int
    heads_k: int
    window: int | None = None


CASES = (
    Case("16k 16/16", 16384, 16, 16), Case("64k 16/16", 65536, 16, 16), Case("64k 32/8", 65536, 32, 8),
    Case("16k 32/8", 16384, 32, 8), Case("window 4096", 131072, 32, 8, 4095), Case("window 1024", 131072, 32, 8, 1023),
    Case("128k 16/16", 131072, 16, 16), Case("128k 32/8", 131072, 32, 8),
)  # fmt: skip
USUAL = 6  # cases of a run that names none
LIBRARIES = ("cupy", "jax")


def run(
    out: Any = None,
    seconds: float = SECONDS,
    only: Sequence[str] = (),
    groups: Sequence[int] = (),
    ranks: int = 0,
    refused: Sequence[str] = (),
) -> int:
    """Start the processes, and wait for them. groups: of heads, besides the usual number. ranks: default all GPUs.
    refused: options that were given and are not of this suite."""
    try:
        for name in refused:
            raise machine.Unavailable(f"{name} is given; bench suite 'parallel' takes out and only")
        for name in only:
            if name not in LIBRARIES and not any(x.name.startswith(name) for x in CASES):
                known = ", ".join([*(x.name for x in CASES), *LIBRARIES])
                raise machine.Unavailable(
                    f"only is {name!r}; for bench suite 'parallel' it must be, or begin, one of {known}"
                )
        machine.require_gpu("parallel")
    except machine.Unavailable as error:
        print(error)
        return 2
    import torch

    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return _work(out, time.time() + seconds, only, groups)
    number = ranks or torch.cuda.device_count()
    if number < 2 or number > torch.cuda.device_count():
        print(f"bench suite 'parallel' needs 2 GPUs or more; {torch.cuda.device_count()} are there")
        return 2
    end = time.time() + seconds
    folder = (
        Path(out) if out is not None else Path("bench", "results", f"{number}x{machine.short_name(machine.name(True))}")
    )
    others = [x for x in LIBRARIES if not only or x in only]
    codes = []
    if not only or any(x not in LIBRARIES for x in only):
        command = ["cupyflash.bench.parallel", "--until", str(end - 25 * len(others)), f"--out={folder}"]
        command += [f"--only={x}" for x in only if x not in LIBRARIES] + [f"--groups={n}" for n in groups]
        codes.append(_together([command] * number, end - 25 * len(others)))
    for library in others:
        ranks = number if library == "cupy" else 1
        command, port = ["cupyflash.bench.parallel_libraries", library, str(folder)], str(_port())
        codes.append(_together([[*command, str(r), str(number), port] for r in range(ranks)], end))
    return max(codes)


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _together(commands: list[list[str]], end: float) -> int:
    """Run modules, one for each rank; where one has failed, or time is over, all are ended. 0: none had to be."""
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port()), "WORLD_SIZE": str(len(commands))}
    env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # else kernels that fill a GPU start before transfers
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    started = [
        subprocess.Popen([sys.executable, "-m", *command], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r, command in enumerate(commands)
    ]
    end += 20
    while any(x.poll() is None for x in started):
        if any(x.poll() not in (None, 0) for x in started):
            end = min(end, time.time() + 10)  # the others wait in vain
        if time.time() > end:
            for x in started:
                x.kill()
        time.sleep(0.2)
    return int(any(x.returncode for x in started))


class World:
    """This process among the others."""

    def __init__(self, until: float) -> None:
        import torch
        from torch import distributed

        self.until = until
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(local)
        distributed.init_process_group(
            "nccl", device_id=torch.device("cuda", local), timeout=datetime.timedelta(seconds=90)
        )
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def largest(self, x: float) -> float:
        import torch
        from torch import distributed

        found = torch.tensor([x], dtype=torch.float64, device="cuda")
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        return float(found)

    def left(self) -> float:
        """Seconds, the same on all ranks."""
        return -self.largest(time.time() - self.until)

    def tried(self, call: Callable[[], Any]) -> tuple[Any, str | None]:
        """What it gives; or why it failed, if it did so anywhere."""
        import torch

        why, found = None, None
        try:
            found = call()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way
            why = reason(error)
        if self.largest(float(why is not None)):
            return None, why or "it failed on another rank"
        return found, None

    def once(self, call: Callable[[], Any], number: int) -> float:
        """Milliseconds of a call, of the slowest rank."""
        import torch
        from torch import distributed

        distributed.barrier()
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(number):
            call()
        last.record()
        torch.cuda.synchronize()
        return self.largest(first.elapsed_time(last) / number)

    def timed(self, calls: dict[str, tuple[Callable[[], Any], Any]], rounds: int, target: float) -> dict[str, float]:
        """Medians; everyone in turn, each round in another order."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        number = {}
        for name, (call, context) in calls.items():
            with context():
                number[name] = max(1, min(40, int(target / max(self.once(call, 1), 1e-3))))
        for n in range(rounds):
            if n and self.left() < 2:
                break
            for name in random.Random(n).sample(list(calls), len(calls)):
                call, context = calls[name]
                with context():
                    found[name].append(self.once(call, number[name]))
        return {name: statistics.median(x) for name, x in found.items()}


class Ours:
    """`parallel.attention` with its backward."""

    def __init__(self, held: Any, options: dict[str, Any], how: dict[str, Any]) -> None:
        self.h, self.options = held, options | how

    def forward(self) -> Any:
        from .. import parallel

        h = self.h
        self.out, self.lse = parallel.attention(h.q, h.k, h.v, rows=h.rows, return_lse=True, **self.options)
        return self.out

    def backward(self) -> Any:
        from .. import parallel

        h = self.h
        given = (h.dout, h.q, h.k, h.v, self.out, self.lse)
        return tuple(parallel.attention_backward(*given, rows=h.rows, **self.options))


class One:
    """The whole on this GPU."""

    def __init__(self, x: Sequence[Any], options: dict[str, Any]) -> None:
        self.x, self.options = x, options

    def forward(self) -> Any:
        from .. import attention

        self.out, self.lse = attention(*self.x[1:], return_lse=True, **self.options)
        return self.out

    def backward(self) -> Any:
        from .. import attention_backward

        dout, q, k, v = self.x
        return tuple(attention_backward(dout, q, k, v, self.out, self.lse, **self.options))


def measured(w: World, case: Case, groups: Sequence[int]) -> dict[str, Any]:
    """A row for the forward and one for the backward."""
    import torch

    from ..parallel import Rows
    from . import parallel_peers as others

    draw = torch.Generator(device="cuda").manual_seed(1)
    shapes = [(1, case.length, h, DIM) for h in (case.heads_q, case.heads_q, case.heads_k, case.heads_k)]
    x = [torch.randn(s, generator=draw, device="cuda", dtype=torch.bfloat16) for s in shapes]  # dout, q, k, v
    options: dict[str, Any] = {"causal": True} | ({"window": (case.window, None)} if case.window else {})
    rows = (Rows.contiguous if case.window else Rows.zigzag)(case.length, w.size)
    held = others.Held(w.rank, rows, *x)
    makers: dict[str, Callable[[], Any]] = {"one": partial(One, x, options)}
    exchanges = ["keys"] + ([] if case.heads_k % w.size or case.window else ["heads"])
    for exchange in exchanges:
        makers[exchange] = partial(Ours, held, options, {"exchange": exchange})
        for n in groups:
            if (case.heads_k // (w.size if exchange == "heads" else 1)) % n == 0:
                makers[f"{exchange}/{n}"] = partial(Ours, held, options, {"exchange": exchange, "groups": n})
    if case.window is None:
        if case.heads_k % 4 == 0:
            makers["fa3 gather"] = partial(others.Gather, held, 4)
        makers["fa3 ring"] = partial(others.Ring, held)
        if case.heads_k % w.size == 0:
            makers["fa3 ulysses"] = partial(others.Ulysses, held)
        for rotate in ("allgather", "alltoall"):
            makers[f"torch {rotate}"] = partial(others.ContextParallel, held, rotate)
    ready, notes, reference = {}, {}, None
    for name, make in makers.items():
        ready[name], notes[name] = w.tried(make)
        if ready[name] is None:
            continue
        context = getattr(ready[name], "context", contextlib.nullcontext)

        def both(it: Any = ready[name], context: Any = context) -> Any:
            with context():
                return it.forward(), *it.backward()

        found, notes[name] = w.tried(both)
        if found is None:
            ready[name] = None
            continue
        if reference is None:
            reference = [rows.take(y, w.rank) for y in found]
            continue
        off = w.largest(max(_off(y, z) for y, z in zip(found, reference)))
        if not off < WRONG:
            ready[name], notes[name] = None, f"wrong: off by {off:.2g} of the largest value"
    del reference
    torch.cuda.empty_cache()
    result = {}
    for of in ("forward", "backward"):
        calls = {
            name: (getattr(it, of), getattr(it, "context", contextlib.nullcontext))
            for name, it in ready.items()
            if it is not None
        }
        result[of] = w.timed(calls, 3, 60 if of == "forward" else 100)
    return {"ms": result, "notes": {name: why for name, why in notes.items() if why}}


def _off(x: Any, y: Any) -> float:
    return float((x.float() - y.float()).abs().max() / y.float().abs().max())


def rows_of(case: Case, size: int, found: dict[str, Any]) -> list[dict[str, Any]]:
    """As they stand in the file."""
    rows = []
    for of, ms in found["ms"].items():
        ours = {name: t for name, t in ms.items() if name not in ("one", *PEERS)}
        peers = {name: ms.get(name) for name in PEERS if name in ms or name in found["notes"]}
        usual = min(ours[x] for x in ("keys", "heads") if x in ours)
        problem = {
            "case": case.name, "pass": of, "seq": case.length, "heads_q": case.heads_q, "heads_k": case.heads_k,
            "dim": DIM, "window": case.window, "ranks": size, "dtype": "bfloat16",
        }  # fmt: skip
        rows.append(parallel_page.row(problem, ms["one"], ours, usual, peers, found["notes"]))
    return rows


def link(w: World) -> dict[str, float]:
    """GB/s into each GPU, both ways at once."""
    import torch
    from torch import distributed

    found = {}
    for size in (4 << 20, 64 << 20, 256 << 20):
        x, y = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))

        def exchange(x: Any = x, y: Any = y) -> None:
            pairs = [
                distributed.P2POp(distributed.isend, x, (w.rank + 1) % w.size),
                distributed.P2POp(distributed.irecv, y, (w.rank - 1) % w.size),
            ]
            for work in distributed.batch_isend_irecv(pairs):
                work.wait()

        exchange()
        found[f"{size >> 20} MB"] = round(size / min(w.once(exchange, 20) for _ in range(3)) / 1e6, 1)
    return found


def _work(out: Any, until: float, only: Sequence[str], groups: Sequence[int]) -> int:
    import torch

    from ..gpu.source import sources_digest

    w = World(until)
    gpu = machine.name(True)
    folder = Path(out) if out is not None else Path("bench", "results", f"{w.size}x{machine.short_name(gpu)}")
    results: dict[str, Any] = {
        "suite": "parallel", "gpu": gpu, "ranks": w.size, "driver": machine.driver(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "sources": sources_digest(),
        "versions": {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "link_gbps": link(w), "rows": [],
    }  # fmt: skip
    w.say(f"{w.size} x {gpu}, torch {torch.__version__}; GB/s into each GPU: {results['link_gbps']}")
    chosen = [x for x in CASES if any(x.name.startswith(name) for name in only)] or list(CASES[:USUAL])
    for case in chosen:
        start, left = time.time(), w.left()
        if left < 12:
            w.say(f"{case.name}: no time is left")
            continue
        found, why = w.tried(partial(measured, w, case, groups))
        torch.cuda.empty_cache()
        if found is None:
            w.say(f"{case.name}: {why}")
            continue
        rows = rows_of(case, w.size, found)
        results["rows"] += rows
        if w.rank == 0:
            report.save(folder / "parallel.json", results)
        for row in rows:
            ours = ", ".join(f"{name} {t:g} ({row['share'][name]:.3f})" for name, t in row["each"].items())
            peers = ", ".join(f"{name} {t:g}" for name, t in row["peers"].items() if t)
            w.say(f"{case.name} {row['problem']['pass']}: one GPU {row['one']:g} ms; {ours}; {peers}")
        for name, why in found["notes"].items():
            w.say(f"  {name}: {why}")
        w.say(f"  ({time.time() - start:.0f} s)")
    w.say(f"written to {folder / 'parallel.json'}")
    sys.stdout.flush()
    os._exit(0)  # a communicator that others still use may wait for them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cupyflash.bench.parallel", description=__doc__)
    parser.add_argument("--out", help="folder of parallel.json (default bench/results/<n>x<gpu>)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the run may take")
    parser.add_argument("--only", action="append", default=[], help=f"cases: {', '.join(x.name for x in CASES)}")
    parser.add_argument("--groups", action="append", type=int, default=[], help="of heads, besides the usual number")
    parser.add_argument("--ranks", type=int, default=0, help="processes (default one for each GPU)")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seconds = args.until - time.time() if args.until else args.seconds
    return run(args.out, seconds, args.only, args.groups, args.ranks)


if __name__ == "__main__":
    raise SystemExit(main())
