"""Rows of `cupyflash bench parallel` that are no attention call over all ranks: what transfers cost, alone and beside a
call, memory, a step of decoding, the host's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from .. import attention, attention_backward, parallel
from ..parallel import Rows
from ..tools.timing import significant
from .parallel_cases import DIM
from .parallel_world import Call, World

HOST_CALLS = 50
GROUP = 1  # key heads of a group, where memory is measured


def row(case: str, of: str, unit: str, ours: float, w: World, each: dict[str, float], **more: Any) -> dict[str, Any]:
    """`each`: what `ours` was made of, or stands beside."""
    return {
        "problem": {"case": case, "pass": of, "ranks": w.size}, "unit": unit, "ours": significant(ours),
        "each": {name: significant(x) for name, x in each.items()}, "peers": {}, "notes": {}, "ratio_to_best": None,
    } | more  # fmt: skip


class Neighbours:
    """Each sends to the next, and receives from the one before, at once."""

    def __init__(self, w: World, count: int) -> None:
        self.w = w
        self.x, self.y = (torch.empty(count, dtype=torch.uint8, device=w.device) for _ in range(2))

    def start(self) -> list[Any]:
        w = self.w
        pairs = [
            distributed.P2POp(distributed.isend, self.x, (w.rank + 1) % w.size),
            distributed.P2POp(distributed.irecv, self.y, (w.rank - 1) % w.size),
        ]
        return distributed.batch_isend_irecv(pairs if w.rank % 2 == 0 else pairs[::-1])

    def run(self) -> None:
        for work in self.start():
            work.wait()


class Copies:
    """Out of the next one's memory, by the copy engine."""

    def __init__(self, w: World, count: int, piece: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        own: Any = symmetric.empty(piece, dtype=torch.uint8, device=w.device)
        world: Any = distributed.group.WORLD
        of_all: Any = symmetric.rendezvous(own, world)
        self._own, self._theirs = own, of_all.get_buffer((w.rank + 1) % w.size, (piece,), torch.uint8)
        self._room, self._times = torch.empty_like(own), count // piece
        self._stream = torch.cuda.Stream()

    def run(self) -> None:
        for _ in range(self._times):
            self._room.copy_(self._theirs)

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.run()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


def link(w: World) -> list[dict[str, Any]]:
    """GB/s into each GPU, both ways at once."""
    rows = []
    for size in (1 << 12,) if w.cpu else (4 << 20, 64 << 20, 256 << 20):
        own = torch.empty(size, dtype=torch.uint8, device=w.device)
        of_all, room = (torch.empty(size * w.size, dtype=torch.uint8, device=w.device) for _ in range(2))
        gather = partial(distributed.all_gather, list(of_all.chunk(w.size)), own)
        ways: dict[str, Callable[[], Any]] = {
            "send and receive": Neighbours(w, size).run, "all_gather": gather,
            "all_to_all": partial(distributed.all_to_all_single, room, of_all),
        }  # fmt: skip
        if not w.cpu:
            copies, why = w.tried(partial(Copies, w, size, size))
            if copies is None:
                w.say(f"  link, copy engine: {why}")
            else:
                ways["copy engine"] = copies.run
        each = {}
        for name, call in ways.items():
            _, why = w.tried(call)
            if why:
                w.say(f"  link, {name}: {why}")
                continue
            moved = size * (w.size - 1) if name.startswith("all") else size
            each[name] = moved / min(w.once(call, 20) for _ in range(3)) / 1e6
        rows.append(row(f"link {size >> 20} MB", "transfer", "GB/s", each.get("send and receive", 0.0), w, each))
    return rows


def beside(w: World) -> list[dict[str, Any]]:
    """What 1 GB under way costs the attention call beside it."""
    length, heads = (256, 2) if w.cpu else (32768, 16)
    kind = torch.float32 if w.cpu else torch.bfloat16
    q, k, v = (torch.randn(1, length, heads, DIM, device=w.device).to(kind) for _ in range(3))
    amount, rows = 1 << 12 if w.cpu else 1 << 30, []
    sent = Neighbours(w, amount)
    copies: Any = None
    if not w.cpu:
        copies, why = w.tried(lambda: Copies(w, amount, 256 << 20))
        if why:
            w.say(f"  beside, copy engine: {why}")
    for causal in (True, False):
        call = partial(attention, q, k, v, causal=causal)

        def with_nccl(call: Any = call) -> None:
            works = sent.start()
            call()
            for x in works:
                x.wait()

        def with_copies(call: Any = call) -> None:
            copies.start()
            call()
            copies.wait()

        calls = {"alone": Call(call), "1 GB": Call(sent.run), "beside 1 GB": Call(with_nccl)}
        if copies is not None:
            calls["beside 1 GB by the copy engine"] = Call(with_copies)
        for x in calls.values():
            x.run()
        ms = w.timed(calls, 60)
        rows.append(row(f"beside, {'causal' if causal else 'full'}", "forward", "ms", ms["beside 1 GB"], w, ms))
    return rows


def memory(w: World) -> list[dict[str, Any]]:
    """Beyond inputs and results of a forward, in groups of K and V: of one key head each. (What needs most comes last,
    and nothing else came before: a window is as large as its largest call.)"""
    length, hq, hk = (512, 4, 2) if w.cpu else (131072, 32, 8)
    kind = torch.float32 if w.cpu else torch.bfloat16
    rows, found = Rows.zigzag(length, w.size), []
    shapes = [(1, rows.count(w.rank), h, DIM) for h in (hq, hk, hk)]
    own = [torch.randn(s, device=w.device, dtype=kind) for s in shapes]
    group = 2 * length * DIM * GROUP * own[0].element_size()
    ways: dict[str, dict[str, Any]] = {
        "keys": {"exchange": "keys", "groups": hk // GROUP}, "keys, usual groups": {"exchange": "keys"},
    }  # fmt: skip
    if hk % w.size == 0:
        ways["heads, usual groups"] = {"exchange": "heads"}
    for name, how in ways.items():
        call = partial(parallel.attention, *own, rows=rows, causal=True, return_lse=True, **how)
        call()
        if w.cpu:
            continue
        w.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = call()
        w.wait()
        results = out.nbytes + lse.nbytes
        peak = w.largest(torch.cuda.max_memory_allocated() - before - results)
        if w.window is not None:
            peak += w.window.nbytes  # which PyTorch does not count; of the largest call until now
        del out, lse
        found.append(row(f"memory, {name}", "forward", "groups", peak / group, w, {"MB": peak / 1e6}))
    return found


def decode(w: World) -> list[dict[str, Any]]:
    """A token on a cache of 128k that is shared out: what merging adds to the call on a part, in CUDA graphs."""
    length, hq, hk = (512, 4, 2) if w.cpu else (131072, 32, 8)
    kind = torch.float32 if w.cpu else torch.bfloat16
    q = torch.randn(1, 1, hq, DIM, device=w.device, dtype=kind)
    k, v = (torch.randn(1, length // w.size, hk, DIM, device=w.device, dtype=kind) for _ in range(2))
    part = partial(attention, q, k, v, return_lse=True)

    def whole() -> Any:
        out, lse = part()
        return parallel.merge(out, lse)

    calls = {name: Call(call if w.cpu else graph_of(call)) for name, call in (("part", part), ("merged", whole))}
    ms = w.timed(calls, 5, rounds=7)
    each = {name: 1e3 * t for name, t in ms.items()}
    return [row("decode 128k", "forward", "us", each["merged"] - each["part"], w, each)]


def graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of it, to be replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host(w: World) -> list[dict[str, Any]]:
    """Until a call returns, beyond its parts: the calls of `attention` that it makes."""
    length, heads, dim = 2048, 4, 64
    if w.cpu:
        length = 512
    kind = torch.float32 if w.cpu else torch.bfloat16
    rows, found = Rows.zigzag(length, w.size), []

    def drawn(n: int, of: int) -> list[torch.Tensor]:
        return [torch.randn(1, n, of, dim, device=w.device, dtype=kind) for _ in range(3)]

    own, (k, v, _) = drawn(rows.count(w.rank), heads), drawn(length, heads)
    parts: list[tuple[Sequence[torch.Tensor], dict[str, Any]]] = [
        ((own[0][:, c:d], k[:, :b], v[:, :b]), {"causal": True, "at": (0, 0, a, 0)})
        for (a, b), (c, d) in rows.local(w.rank)
    ]
    ways = {"keys": parts}
    if heads % w.size == 0:
        ways["heads"] = [(drawn(length, heads // w.size), {"causal": True})]
    for name, some in ways.items():
        how: dict[str, Any] = {"rows": rows, "causal": True, "exchange": name}
        pairs = both(parallel.attention, parallel.attention_backward, own, how)
        alone = [both(attention, attention_backward, x, of) for x, of in some]
        for n, of in enumerate(("forward", "backward")):

            def every(n: int = n, alone: Any = alone) -> None:
                for x in alone:
                    x[n]()

            each = {"whole": microseconds(w, pairs[n]), "parts": microseconds(w, every)}
            found.append(row(f"host, {name}", of, "us", each["whole"] - each["parts"], w, each))
    return found


def both(forward: Any, backward: Any, x: Sequence[torch.Tensor], how: dict[str, Any]) -> tuple[Any, Any]:
    """A forward, and the backward of what it gave."""
    forward = partial(forward, *x, **how, return_lse=True)
    out, lse = forward()
    return forward, partial(backward, out, *x, out, lse, **how)


def microseconds(w: World, call: Callable[[], Any]) -> float:
    """Of the host, of the slowest rank: the least of some rounds, as others may be waiting for a full queue."""
    number, least = 3 if w.cpu else HOST_CALLS, float("inf")
    for _ in range(1 if w.cpu else 5):
        call()
        distributed.barrier()
        w.wait()
        start = time.perf_counter()
        for _ in range(number):
            call()
        least = min(least, time.perf_counter() - start)
    return w.largest(least / number * 1e6)


PARTS: dict[str, Callable[[World], list[dict[str, Any]]]] = {
    "link": link, "decode": decode, "host": host, "memory": memory, "beside": beside,
}  # fmt: skip
