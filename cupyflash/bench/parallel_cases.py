"""Rows of `cupyflash bench parallel` that are an attention call over all ranks, with its backward: beside the whole on
one GPU, and beside others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import attention, attention_backward, block_mask, parallel
from ..parallel import Rows, torch_group
from ..parallel.asked import usual_of_two
from . import parallel_page
from . import parallel_peers as others
from .parallel_world import Call, World

DIM = 128
WRONG = 2e-2  # of the largest value: a result that is further off is none
MEAN = 6000  # rows of a document


class Case(NamedTuple):
    name: str
    length: int
    heads_q: int
    heads_k: int
    what: str = "causal"
    window: int | None = None
    dim: int = DIM

    def small(self) -> Case:
        """For a CPU."""
        length, heads_q, heads_k = max(512, self.length // 128), self.heads_q // 4, self.heads_k // 4
        return self._replace(length=length, heads_q=heads_q, heads_k=heads_k, dim=16)


CASES = (
    Case("16k 16/16", 1 << 14, 16, 16), Case("64k 16/16", 1 << 16, 16, 16), Case("64k 32/8", 1 << 16, 32, 8),
    Case("16k 32/8", 1 << 14, 32, 8), Case("window 4096", 1 << 17, 32, 8, "window", 4095),
    Case("window 1024", 1 << 17, 32, 8, "window", 1023), Case("documents", 1 << 16, 16, 16, "documents"),
    Case("bias", 1 << 13, 16, 16, "bias"), Case("64k full", 1 << 16, 16, 16, "full"),
    Case("128k 32/8", 1 << 17, 32, 8), Case("128k 16/16", 1 << 17, 16, 16), Case("alibi", 1 << 16, 16, 16, "alibi"),
    Case("dropout", 1 << 16, 16, 16, "dropout"), Case("table", 1 << 16, 16, 16, "table"),
    Case("16k full", 1 << 14, 16, 16, "full"), Case("128k full", 1 << 17, 16, 16, "full"),
)  # fmt: skip


def table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, i // 1024, j // 1024]


class Problem:
    """The whole of a case on this GPU, and what this rank holds of it."""

    def __init__(self, w: World, case: Case) -> None:
        self.case, self.w = case, w
        length, hq, hk = case.length, case.heads_q, case.heads_k
        kind = torch.float32 if w.cpu else torch.bfloat16
        draw = torch.Generator(device=w.device).manual_seed(1)
        made = functools.partial(torch.randn, generator=draw, device=w.device)
        shapes = [(1, length, h, case.dim) for h in (hq, hq, hk, hk)]
        self.x = [made(s, dtype=kind) for s in shapes]  # dout, q, k, v
        self.options: dict[str, Any] = {"causal": case.what not in ("full", "documents", "bias")}
        self.wrt: tuple[str, ...] = ()
        self.visible: Callable[..., Any] | None = None
        rows = Rows.contiguous if case.what in ("window", "bias", "full") else Rows.zigzag
        if case.what == "documents":
            begin = documents(length)
            number = torch.from_numpy(begin).to(w.device)  # a document is known by its first row
            self.visible = lambda b, h, i, j: (number[i] == number[j]) & (j <= i)
            rows = functools.partial(Rows.balanced, mask=np.arange(length) - begin + 1.0)
        self.rows = rows(length, w.size)
        if case.what == "window":
            self.options["window"] = (case.window, None)
        elif case.what == "bias":
            self.options["bias"], self.wrt = made((1, hq, length, length), dtype=kind), ("bias",)
        elif case.what == "dropout":
            self.options |= {"dropout": 0.1, "seed": 1}
        elif case.what == "alibi":
            self.options["alibi_slopes"] = torch.linspace(0.01, 0.5, hq, device=w.device)
        elif case.what == "table":
            count = -(-length // 1024)
            read = made((hq, count, count), dtype=torch.float32)
            self.options |= {"score": table, "score_arrays": {"t": read}}
            self.wrt = ("t",)

    def makers(self, groups: Sequence[int]) -> dict[str, Callable[[], Any]]:
        """Whom to measure: the whole on one GPU, ours in each exchange, others."""
        case, size, held = self.case, self.w.size, others.Held(self.w, self.rows, *self.x)
        found: dict[str, Callable[[], Any]] = {"one": functools.partial(One, self)}
        alone = case.what in ("window", "documents", "bias") or case.heads_k % size
        for exchange in ["keys"] + ([] if alone else ["heads"]):
            found[exchange] = functools.partial(Ours, self, held, {"exchange": exchange})
            for n in groups:
                if (case.heads_k // (size if exchange == "heads" else 1)) % n == 0:
                    how = {"exchange": exchange, "groups": n}
                    found[f"{exchange}/{n}"] = functools.partial(Ours, self, held, how)
        if case.what in ("causal", "full"):
            found |= others.makers(held, case.what == "causal")
        return found

    def own(self, found: Sequence[Any]) -> list[Any]:
        """This rank's part of out, dq, dk, dv and a bias's gradient, of the whole."""
        return [self.rows.take(x, self.w.rank, 1 if n < 4 else 2) for n, x in enumerate(found)]


class One:
    """The whole on this GPU."""

    def __init__(self, of: Problem) -> None:
        self.of, self.options = of, dict(of.options)
        if of.visible is not None:
            length = of.case.length
            self.options["block_mask"] = block_mask(of.visible, shape=(length, length), like=of.x[1])

    def forward(self) -> Any:
        self.out, self.lse = attention(*self.of.x[1:], return_lse=True, **self.options)
        return self.out

    def backward(self) -> tuple[Any, ...]:
        dout, q, k, v = self.of.x
        found = attention_backward(dout, q, k, v, self.out, self.lse, wrt=self.of.wrt, **self.options)
        return tuple(found[:3]) + ((found.dbias,) if "bias" in self.of.wrt else ())


class Ours:
    """`parallel.attention` with its backward."""

    def __init__(self, of: Problem, held: Any, how: dict[str, Any]) -> None:
        self.of, self.h, self.options = of, held, of.options | how | {"rows": of.rows}
        if of.visible is not None:
            self.options["block_mask"] = parallel.block_mask(of.visible, of.rows, None, like=held.q)
        if "bias" in self.options:
            self.options["bias"] = of.rows.take(self.options["bias"], held.rank, 2)

    def usual(self, of: str) -> str:
        """The exchange of a call that names none."""
        h, group = self.h, torch_group.of(torch.distributed.group.WORLD)
        operands = {"q": h.q, "k": h.k, "v": h.v} | ({"dout": h.dout} if of == "backward" else {})
        return usual_of_two(group, operands, {"rows": self.of.rows, "key_rows": None, "groups": None}, self.of.options)

    def forward(self) -> Any:
        h = self.h
        self.out, self.lse = parallel.attention(h.q, h.k, h.v, return_lse=True, **self.options)
        return self.out

    def backward(self) -> tuple[Any, ...]:
        h, wrt = self.h, self.of.wrt
        found = parallel.attention_backward(h.dout, h.q, h.k, h.v, self.out, self.lse, wrt=wrt, **self.options)
        return tuple(found[:3]) + ((found.dbias,) if "bias" in wrt else ())


def measured(w: World, case: Case, groups: Sequence[int]) -> list[dict[str, Any]]:
    """A row for the forward and one for the backward."""
    problem = Problem(w, case)
    ready: dict[str, Any] = {}
    notes: dict[str, str | None] = {}
    reference: list[Any] = []
    for name, make in problem.makers(groups).items():
        made, notes[name] = w.tried(make)
        if made is None:
            continue
        context = getattr(made, "context", contextlib.nullcontext)

        def both(it: Any = made, context: Any = context) -> Any:
            with context():
                return it.forward(), *it.backward()

        found, notes[name] = w.tried(both)
        if found is None:
            if name == "one":
                raise RuntimeError(f"the whole on one GPU: {notes[name]}")
            continue
        if name == "one":
            reference = problem.own(found)
        elif not (off := w.largest(max(difference(x, y) for x, y in zip(found, reference)))) < WRONG:
            notes[name] = f"wrong: off by {off:.2g} of the largest value"
            continue
        ready[name] = made
    del reference, found
    w.emptied()
    rows = []
    for of in ("forward", "backward"):
        calls = {x: Call(getattr(it, of), getattr(it, "context", contextlib.nullcontext)) for x, it in ready.items()}
        ms = w.timed(calls, 60 if of == "forward" else 100)
        usual = ready["heads"].usual(of) if "heads" in ready else "keys"
        rows.append(row_of(case, of, w, ms, {x: why for x, why in notes.items() if why}, usual))
    return rows


def difference(x: Any, y: Any) -> float:
    """The largest, of the largest value; infinite for what is no number."""
    off = float((x.float() - y.float()).abs().max() / y.float().abs().max())
    return off if np.isfinite(off) else float("inf")


def row_of(case: Case, of: str, w: Any, ms: dict[str, float], notes: dict[str, str], likely: str) -> dict[str, Any]:
    """As it stands in the file. Ours is what a call takes that does not name an exchange, which is `likely`."""
    ours = {name: t for name, t in ms.items() if name != "one" and name not in others.NAMES}
    peers = {name: ms.get(name) for name in others.NAMES if name in ms or name in notes}
    usual = next((ms[x] for x in (likely, "keys") if x in ms), None)
    problem = {
        "case": case.name, "pass": of, "seq": case.length, "heads_q": case.heads_q, "heads_k": case.heads_k,
        "dim": case.dim, "what": case.what, "ranks": w.size, "dtype": "float32" if w.cpu else "bfloat16",
    }  # fmt: skip
    return parallel_page.row(problem, ms["one"], ours, usual, peers, notes)


def documents(length: int) -> np.ndarray:
    """Where the document of each row begins, (length,): lengths are log-normal."""
    rng, ends = np.random.default_rng(3), [0]
    mean = MEAN * length / (1 << 16)
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + max(16, int(rng.lognormal(np.log(mean) - 0.5, 1.0)))))
    return np.repeat(ends[:-1], np.diff(ends))
