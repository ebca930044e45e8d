"""Attention over several GPUs by others: FlashAttention-3's operators in the exchanges that people write around them,
and PyTorch's `context_parallel`. Batch 1, (1, S, H, D); causal with rows in zigzag, or of no mask with rows in a piece.

Each has `forward`, which returns out, and `backward` of the last forward: dq, dk, dv.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed

from .. import attention, attention_backward
from ..parallel import Rows
from . import peers
from .parallel_world import World

NAMES = (
    "fa3 gather", "fa3 ring", "fa3 ulysses", "torch allgather", "torch alltoall", "flash allgather", "flash alltoall",
)  # fmt: skip
GROUPS = 4  # of key heads, of which the next travels while one is computed


def makers(held: Held, causal: bool) -> dict[str, Callable[[], Any]]:
    """By name, those that can share out so many heads."""
    heads = held.k.shape[2]
    found: dict[str, Callable[[], Any]] = {}
    if heads % GROUPS == 0:
        found["fa3 gather"] = partial(Gather, held, causal)
    found["fa3 ring"] = partial(Ring, held, causal)
    if heads % held.size == 0:
        found["fa3 ulysses"] = partial(Ulysses, held, causal)
    for name, backend in (("torch", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION")):
        for rotate in ("allgather", "alltoall"):
            found[f"{name} {rotate}"] = partial(ContextParallel, held, causal, rotate, backend)
    return found


class Fa3:
    """A call of the operators on one GPU; on a CPU ours in their place, to try the exchanges."""

    def __init__(self, cpu: bool) -> None:
        self._op = None if cpu else peers.fa3_operators()

    def forward(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        if self._op is None:
            return attention(q, k, v, causal=causal, return_lse=True)
        out, lse = self._op.fwd(q, k, v, is_causal=causal, num_splits=1)[:2]
        return out, lse

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
        if self._op is None:
            return tuple(attention_backward(dout, q, k, v, out, lse, causal=causal))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._op.bwd(dout, q, k, v, out, lse, dq, dk, dv, is_causal=causal)
        return dq, dk, dv


class Held:
    """What a rank holds, and where its chunks stand."""

    def __init__(self, w: World, rows: Rows, dout: Any, q: Any, k: Any, v: Any) -> None:
        self.rank, self.size, self.rows, self.cpu = w.rank, w.size, rows, w.cpu
        self.dout, self.q, self.k, self.v = (rows.take(x, w.rank).contiguous() for x in (dout, q, k, v))
        self.chunks = rows.local(w.rank)

    def exchanged(self, sends: list[tuple[int, Any]], receives: list[tuple[int, Any]]) -> list[Any]:
        operations = [distributed.P2POp(distributed.isend, x, r) for r, x in sends]
        operations += [distributed.P2POp(distributed.irecv, x, r) for r, x in receives]
        return distributed.batch_isend_irecv(operations) if operations else []


def _wait(works: list[Any]) -> None:
    for x in works:
        x.wait()


class Gather:
    """All keys come to each rank, in groups of heads of which the next travels while one is computed."""

    def __init__(self, held: Held, causal: bool) -> None:
        self.h, self.fa3, self.causal, self.groups = held, Fa3(held.cpu), causal, GROUPS
        # Each chunk of queries, with how many keys it sees.
        self.seen = [(end if causal else held.rows.length, own) for (_, end), own in held.chunks]
        self.kept: list[Any] = []

    def _heads(self, n: int) -> tuple[slice, slice]:
        per, group = self.h.k.shape[2] // self.groups, self.h.q.shape[2] // self.h.k.shape[2]
        return slice(n * per, (n + 1) * per), slice(n * per * group, (n + 1) * per * group)

    def _start(self, n: int) -> tuple[list[Any], list[Any]]:
        h, (heads, _) = self.h, self._heads(n)
        rooms = [x.new_empty(1, h.rows.length, heads.stop - heads.start, x.shape[3]) for x in (h.k, h.v)]
        sends, receives = [], []
        for room, x in zip(rooms, (h.k, h.v)):
            for (a, b), (c, d) in h.chunks:
                room[:, a:b] = x[:, c:d, heads]
                sends += [(r, room[:, a:b]) for r in range(h.size) if r != h.rank]
            receives += [(r, room[:, a:b]) for r in range(h.size) if r != h.rank for (a, b), _ in h.rows.local(r)]
        return rooms, h.exchanged(sends, receives)

    def _rounds(self) -> Iterator[tuple[int, list[Any]]]:
        coming = self._start(0)
        for n in range(self.groups):
            rooms, works = coming
            if n + 1 < self.groups:
                coming = self._start(n + 1)
            _wait(works)
            yield n, rooms

    def forward(self) -> Any:
        h, self.kept = self.h, []
        out = torch.empty_like(h.q)
        for n, (k, v) in self._rounds():
            _, heads = self._heads(n)
            for end, (c, d) in self.seen:
                part, lse = self.fa3.forward(h.q[:, c:d, heads], k[:, :end], v[:, :end], self.causal)
                out[:, c:d, heads] = part
                self.kept.append((part, lse))
        return out

    def backward(self) -> Any:
        h, kept = self.h, iter(self.kept)
        dq, dk, dv = (torch.empty_like(x) for x in (h.q, h.k, h.v))
        waiting = None
        for n, (k, v) in self._rounds():
            _, heads = self._heads(n)
            sums = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
            for end, (c, d) in self.seen:
                part, lse = next(kept)
                operands = (h.dout[:, c:d, heads], h.q[:, c:d, heads], k[:, :end], v[:, :end])
                found = self.fa3.backward(*operands, part, lse, self.causal)
                dq[:, c:d, heads] = found[0]
                for x, y in zip(sums, found[1:]):
                    x[:, :end] += y
            if waiting is not None:
                self._finish(waiting, dk, dv)
            others = [r for r in range(h.size) if r != h.rank]
            sends = [(r, x[:, a:b]) for x in sums for r in others for (a, b), _ in h.rows.local(r)]
            rooms = {r: [torch.empty_like(x[:, : h.rows.count(h.rank)]) for x in sums] for r in others}
            receives = [(r, rooms[r][m][:, c:d]) for m in range(2) for r in others for _, (c, d) in h.chunks]
            waiting = n, sums, rooms, h.exchanged(sends, receives)
        self._finish(waiting, dk, dv)
        return dq, dk, dv

    def _finish(self, waiting: Any, dk: Any, dv: Any) -> None:
        n, sums, rooms, works = waiting
        _wait(works)
        heads, _ = self._heads(n)
        for m, target in enumerate((dk, dv)):
            own = torch.cat([sums[m][:, a:b] for (a, b), _ in self.h.chunks], 1)
            for some in rooms.values():
                own += some[m]
            target[:, :, heads] = own


class Ring:
    """Keys go round; parts are merged, and gradients of the keys travel with them."""

    def __init__(self, held: Held, causal: bool) -> None:
        self.h, self.fa3, self.causal = held, Fa3(held.cpu), causal
        self.half = held.q.shape[1] // 2

    def _pass(self, xs: list[Any]) -> tuple[list[Any], list[Any]]:
        h, rooms = self.h, [torch.empty_like(x) for x in xs]
        to, of = (h.rank + 1) % h.size, (h.rank - 1) % h.size
        return rooms, h.exchanged([(to, x) for x in xs], [(of, x) for x in rooms])

    def _step(self, hop: int) -> tuple[slice, slice, bool]:
        """Queries, keys, causal: of the keys of the rank `hop` before this one."""
        if hop == 0 or not self.causal:
            return slice(None), slice(None), self.causal
        early = hop <= self.h.rank
        return (slice(None), slice(0, self.half), False) if early else (slice(self.half, None), slice(None), False)

    def forward(self) -> Any:
        h, kv = self.h, [self.h.k, self.h.v]
        out, lse = None, None
        for hop in range(h.size):
            rooms, works = self._pass(kv) if hop + 1 < h.size else ([], [])
            queries, keys, causal = self._step(hop)
            part, norm = self.fa3.forward(h.q[:, queries], kv[0][:, keys], kv[1][:, keys], causal)
            if out is None or lse is None:
                out, lse = part.float(), norm.clone()
            else:
                old, new = lse[:, :, queries], torch.logaddexp(lse[:, :, queries], norm)
                weights = [(x - new).exp().transpose(1, 2)[..., None] for x in (old, norm)]
                out[:, queries] = out[:, queries] * weights[0] + part * weights[1]
                lse[:, :, queries] = new
            _wait(works)
            kv = rooms
        assert out is not None
        self.out, self.lse = out.to(h.q.dtype), lse
        return self.out

    def backward(self) -> Any:
        h, kv, lse = self.h, [self.h.k, self.h.v], self.lse
        assert lse is not None
        dq = torch.zeros_like(h.q, dtype=torch.float32)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in kv]
        for hop in range(h.size):
            rooms, works = self._pass(kv) if hop + 1 < h.size else ([], [])
            queries, keys, causal = self._step(hop)
            dout, q, out = (x[:, queries] for x in (h.dout, h.q, self.out))
            norm = lse[:, :, queries].contiguous()
            found = self.fa3.backward(dout, q, kv[0][:, keys], kv[1][:, keys], out, norm, causal)
            dq[:, queries] += found[0]
            for x, y in zip(sums, found[1:]):
                x[:, keys] += y
            _wait(works)
            kv = rooms
            sums, works = self._pass(sums)
            _wait(works)
        return dq.to(h.q.dtype), *(x.to(h.k.dtype) for x in sums)


class Ulysses:
    """Each rank gets all rows of some heads: all_to_all around one call."""

    def __init__(self, held: Held, causal: bool) -> None:
        self.h, self.fa3, self.causal = held, Fa3(held.cpu), causal
        self.order = torch.cat([torch.arange(a, b) for r in range(held.size) for (a, b), _ in held.rows.local(r)])
        self.order = self.order.to(held.q.device)

    def _to_heads(self, x: Any) -> Any:
        x = x.unflatten(2, (self.h.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        y = torch.empty_like(x)
        distributed.all_to_all_single(y, x)
        y = y.flatten(0, 2)
        found = torch.empty_like(y)
        found[self.order] = y
        return found[None]

    def _from_heads(self, x: Any) -> Any:
        x = x[0][self.order].unflatten(0, (self.h.size, -1))
        y = torch.empty_like(x)
        distributed.all_to_all_single(y, x.contiguous())
        return y.permute(1, 0, 2, 3).flatten(1, 2)[None]

    def forward(self) -> Any:
        self.moved = [self._to_heads(x) for x in (self.h.q, self.h.k, self.h.v)]
        q, k, v = self.moved
        self.out, self.lse = self.fa3.forward(q, k, v, self.causal)
        return self._from_heads(self.out)

    def backward(self) -> Any:
        q, k, v = self.moved
        found = self.fa3.backward(self._to_heads(self.h.dout), q, k, v, self.out, self.lse, self.causal)
        return tuple(self._from_heads(x) for x in found)


class ContextParallel:
    """torch.distributed.tensor.experimental.context_parallel around scaled_dot_product_attention."""

    def __init__(self, held: Held, causal: bool, rotate: str, backend: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        if held.cpu:
            raise NotImplementedError("context_parallel takes no attention of a CPU")
        self.mesh, self.causal, self.rotate, self.backend = (
            init_device_mesh("cuda", (held.size,)), causal, rotate, backend,
        )  # fmt: skip
        q, k, v, self.dout = (x.transpose(1, 2).contiguous() for x in (held.q, held.k, held.v, held.dout))
        self.x = [x.requires_grad_() for x in (q, k, v)]
        self.group = q.shape[1] // k.shape[1]
        self.dummy = torch.zeros(1, held.rows.length, device=q.device)
        self.out: Any = None

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import _attention, context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _attention.set_rotate_method(self.rotate)
        options = _attention._cp_options
        before, options.enable_load_balance = options.enable_load_balance, self.causal  # it takes no other mask
        try:
            with (
                sdpa_kernel(getattr(SDPBackend, self.backend)),
                context_parallel(self.mesh, buffers=[self.dummy], buffer_seq_dims=[1]),
            ):
                yield
        finally:
            options.enable_load_balance = before

    def _call(self) -> Any:
        from torch.nn import functional  # looked up in the call: the context replaces it

        q, k, v = self.x
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.group > 1)

    def forward(self) -> Any:
        with torch.no_grad():
            return self._call().transpose(1, 2)

    def backward(self) -> Any:
        with torch.enable_grad():
            if self.out is None:
                self.out = self._call()
            found = torch.autograd.grad(self.out, self.x, self.dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in found)
