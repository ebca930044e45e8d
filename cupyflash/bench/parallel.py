"""`cupyflash bench parallel`: one sequence over the GPUs of a host, beside one of them and beside others.

It starts a process for each GPU; those that torchrun or mpiexec started are taken as they are. `share` is the time of
our own call for the whole on one GPU, over the number of GPUs x the time here: 1 is as if each did its part alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import machine, parallel_page

SECONDS = 300  # that a run may take, of which whole cases are left out
LEAST = 12  # seconds that must be left for a case to begin
LIBRARIES = ("cupy", "jax")
APART = {"memory": 25, "cupy": 30, "jax": 40}  # in processes of their own, and seconds that are left for each


def run(
    out: Any = None,
    seconds: float | None = None,
    only: Sequence[str] = (),
    resume: bool = False,
    groups: Sequence[int] = (),
    ranks: int = 0,
    cpu: bool = False,
    refused: Sequence[str] = (),
) -> int:
    """Start the processes, and wait for them. groups: of heads, besides the usual number. ranks: default all GPUs. cpu:
    without any, over gloo and with short sequences, to try what is measured with. refused: options that were given and
    are not of this suite."""
    seconds = SECONDS if seconds is None else seconds
    try:
        for name in refused:
            raise machine.Unavailable(f"{name} is given; bench suite 'parallel' takes out, only and resume")
        if not cpu:
            machine.require_gpu("parallel")
        else:
            machine.require_torch("parallel")
        known = _names()
        for name in only:
            if not any(x.startswith(name) for x in known):
                raise machine.Unavailable(
                    f"only is {name!r}; for bench suite 'parallel' it must be, or begin, one of {', '.join(known)}"
                )
    except machine.Unavailable as error:
        print(error)
        return 2
    import torch

    from .parallel_world import launched

    names = [x for x in known if not only or any(x.startswith(name) for name in only)]
    started = launched(os.environ)
    there = (ranks or 2) if cpu else torch.cuda.device_count()
    number = int(started["WORLD_SIZE"]) if started else ranks or there
    if number < 2 or (not started and number > there):
        print(f"bench suite 'parallel' needs 2 GPUs or more; {there} are there, {number} are asked for")
        return 2
    circumstances = _circumstances(number, cpu)
    folder = Path(out) if out is not None else _folder(circumstances)
    if started:
        if left_out := [x for x in names if x in LIBRARIES]:
            names = [x for x in names if x not in LIBRARIES]
            if started["RANK"] == "0":
                print(f"{' and '.join(left_out)}: left out of processes that others started")
        os.environ.update(started)
        if started["RANK"] == "0":
            parallel_page.begin(folder, circumstances)
        _work(folder, time.time() + seconds, names, resume, groups, cpu)
    end = time.time() + seconds
    parallel_page.begin(folder, circumstances)
    if resume:
        names = _missing(folder, names)
    others = [x for x in APART if x in names]
    codes = [0]
    for some in ([x for x in names if x not in others], [x for x in others if x not in LIBRARIES]):
        if some:
            until = end - sum(APART[x] for x in others if x not in some)
            command = ["cupyflash.bench.parallel", "--until", str(until), f"--out={folder}"]
            command += [f"--only={x}" for x in some] + [f"--groups={n}" for n in groups]
            command += ["--cpu"] * cpu
            codes.append(_together([command] * number, until))
            others = [x for x in others if x not in some]
    for library in others:
        command = ["cupyflash.bench.parallel_libraries", library, str(folder)]
        processes = number if library == "cupy" else 1
        port = str(free_port())
        each = [[*command, str(r), str(number), port, *["cpu"] * cpu] for r in range(processes)]
        if cpu and library == "cupy":
            print("cupy: needs GPUs")
            continue
        devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}".strip()
        codes.append(_together(each, end, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices} if cpu else {}))
    print(f"{folder / parallel_page.FILE}")
    return max(codes)


def _names() -> list[str]:
    """What may be measured, in the order in which it is."""
    from .parallel_cases import CASES
    from .parallel_parts import PARTS

    return [*(x.name for x in CASES[:8]), *PARTS, *(x.name for x in CASES[8:]), *LIBRARIES]


def _missing(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of which the file has no row. A row's case begins with the name of what it is of."""
    there = parallel_page.has(folder)
    return [name for name in names if not any(x.startswith(name) for x in there)]


def _circumstances(number: int, cpu: bool) -> dict[str, Any]:
    import torch

    from ..gpu.source import sources_digest

    versions = {"torch": str(torch.__version__)}
    if not cpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "suite": "parallel", "gpu": machine.name(not cpu), "ranks": number, "driver": None if cpu else machine.driver(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "sources": sources_digest(), "versions": versions,
    }  # fmt: skip


def _folder(circumstances: dict[str, Any]) -> Path:
    return Path("bench", "results", f"{circumstances['ranks']}x{machine.short_name(circumstances['gpu'])}")


def free_port() -> int:
    """One that is free, and that no socket is given by itself until it is bound: those are from 32768 on."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as s:
            port = random.randrange(15000, 32000)
            s.bind(("127.0.0.1", port))
            return port


def _together(commands: list[list[str]], end: float, more: dict[str, str] | None = None) -> int:
    """Run modules, one for each rank; where one has failed, or time is over, all are ended. 0: none had to be."""
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(commands))}
    env |= more or {}
    env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # else kernels that fill a GPU start before transfers
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    started: list[subprocess.Popen[bytes]] = []
    end += 20
    try:
        for r, command in enumerate(commands):
            own = env | {"RANK": str(r), "LOCAL_RANK": str(r)}
            started.append(subprocess.Popen([sys.executable, "-m", *command], env=own))
        failed = False
        while any(x.poll() is None for x in started):
            if not failed and any(x.poll() not in (None, 0) for x in started):
                failed, end = True, min(end, time.time() + 15)  # the others wait in vain
            if time.time() > end:
                name = " ".join(commands[0][:2])
                print(f"{name}: ended, as {'another rank failed' if failed else 'its time is over'}", flush=True)
                break
            time.sleep(0.2)
    finally:
        for x in started:
            x.kill()
            x.wait()
    return int(any(x.returncode for x in started))


def _work(folder: Path, until: float, names: Sequence[str], resume: bool, groups: Sequence[int], cpu: bool) -> None:
    """What each process does; it ends here."""
    code = 1
    try:
        code = _measure(folder, until, names, resume, groups, cpu)
    except BaseException:  # noqa: BLE001 - said, and then the process ends
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a communicator that others still use may wait for them


def _measure(folder: Path, until: float, names: Sequence[str], resume: bool, groups: Sequence[int], cpu: bool) -> int:
    from .parallel_cases import CASES, measured
    from .parallel_parts import PARTS
    from .parallel_world import World

    w = World(until, cpu)
    left = w.left()
    w.say(f"{w.size} x {machine.name(not cpu)}; {left:.0f} s")
    if resume:
        names = _missing(folder, names)
    cases = {x.name: x.small() if cpu else x for x in CASES}
    code, left_out = 0, []
    for name in names:
        start = time.time()
        if w.left() < LEAST:
            left_out.append(name)
            continue
        call = partial(measured, w, cases[name], groups) if name in cases else partial(PARTS[name], w)
        rows, why = w.tried(call)
        w.emptied()
        if rows is None:
            w.say(f"{name}: {why}")
            code = 1
            continue
        if w.rank == 0:
            parallel_page.keep(folder, rows)
        for row in rows:
            w.say(parallel_page.told(row))
            code = max(code, int(row["ours"] is None))
        for of, why in (rows[0]["notes"] if rows else {}).items():
            w.say(f"  {of}: {why}")
        w.say(f"  ({time.time() - start:.0f} s)")
    if left_out:
        w.say(f"no time was left for {', '.join(left_out)}; --resume goes on with them")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cupyflash.bench.parallel", description=__doc__)
    parser.add_argument("--out", help="folder of parallel.json (default bench/results/<n>x<gpu>)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the run may take")
    parser.add_argument("--only", action="append", default=[], help="cases, or how their names begin")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has, measure the others")
    parser.add_argument("--groups", action="append", type=int, default=[], help="of heads, besides the usual number")
    parser.add_argument("--ranks", type=int, default=0, help="processes (default one for each GPU)")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, over gloo: does it run?")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seconds = args.until - time.time() if args.until else args.seconds
    return run(args.out, seconds, args.only, args.resume, args.groups, args.ranks, args.cpu)


if __name__ == "__main__":
    raise SystemExit(main())
