"""The processes of `cupyflash bench parallel`: who they are, and times of the slowest of them."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed

from ..parallel import torch_group
from ..tools.timing import reason

# By whom a process may have been started: its rank, their number, its number on its host.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, and we
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH
)
PATIENCE = 60  # seconds that a rank waits for others


def launched(env: Mapping[str, str]) -> dict[str, str] | None:
    """What torch.distributed is to read, where somebody started several processes; None where nobody did."""
    for names in LAUNCHERS:
        if names[0] in env and names[1] in env:
            rank, size = env[names[0]], env[names[1]]
            found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": env.get(names[2], rank)}
            met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
            return found | {name: env.get(name, x) for name, x in met.items()}
    return None


class Call(NamedTuple):
    """Something to time, inside `context`."""

    run: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class World:
    """This process among the others. cpu: over gloo, to try without a GPU what is measured with."""

    def __init__(self, until: float, cpu: bool) -> None:
        self.until, self.cpu = until, cpu
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cpu") if cpu else torch.device("cuda", local)
        more: dict[str, Any] = {"timeout": datetime.timedelta(seconds=PATIENCE)}
        if cpu:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(local)
            more["device_id"] = self.device
        distributed.init_process_group("gloo" if cpu else "nccl", **more)
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    @property
    def window(self) -> Any:
        """Through which ranks write keys into each other's memory, once a call of ours was made; None where they
        cannot."""
        return torch_group.of(distributed.group.WORLD).window

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def wait(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def emptied(self) -> None:
        """What is free goes back to the GPU."""
        if not self.cpu:
            torch.cuda.empty_cache()

    def largest(self, x: float) -> float:
        found = torch.tensor([x], dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
        return float(found)

    def left(self) -> float:
        """Seconds, the same on all ranks."""
        return -self.largest(time.time() - self.until)

    def tried(self, call: Callable[[], Any]) -> tuple[Any, str | None]:
        """What it gives; or why it failed, if it did so anywhere."""
        why, found = None, None
        try:
            found = call()
            self.wait()
        except Exception as error:  # noqa: BLE001 - a peer may fail in any way
            why = reason(error)
        if self.largest(float(why is not None)):
            return None, why or "it failed on another rank"
        return found, None

    def once(self, call: Callable[[], Any], number: int) -> float:
        """Milliseconds of a call, of the slowest rank."""
        distributed.barrier()
        self.wait()
        if self.cpu:
            start = time.perf_counter()
            for _ in range(number):
                call()
            return self.largest((time.perf_counter() - start) / number * 1e3)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(number):
            call()
        last.record()
        torch.cuda.synchronize()
        return self.largest(first.elapsed_time(last) / number)

    def timed(self, calls: Mapping[str, Call], target: float, rounds: int = 3) -> dict[str, float]:
        """Medians; everyone in turn, each round in another order. target: milliseconds of a sample."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        number = {}
        for name, (call, context) in calls.items():
            with context():
                number[name] = max(1, min(40, int(target / max(self.once(call, 1), 1e-3))))
        for n in range(1 if self.cpu else rounds):
            if n and self.left() < 2:
                break
            for name in random.Random(n).sample(list(calls), len(calls)):
                call, context = calls[name]
                with context():
                    if not self.cpu:  # clocks follow what ran before: that is to be the same call
                        self.once(call, -(-number[name] // 2))
                    found[name].append(self.once(call, 1 if self.cpu else number[name]))
        return {name: statistics.median(x) for name, x in found.items()}
