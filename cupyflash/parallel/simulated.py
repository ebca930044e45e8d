"""Ranks in one process, each a thread, whose messages arrive late and in another order than they were sent: for
notebooks and tests."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ..namespaces import namespace
from .arrays import in_a_row, library
from .groups import bytes_of
from .rows import positive


class Simulated:
    """`simulated(n)`: n ranks. `run` has each call a function with its group."""

    def __init__(self, size: int, *, delay: float = 0.0, seed: int | None = None) -> None:
        self.size, self._delay, self._random = positive("size", size), delay, random.Random(seed)

    def run(self, function: Callable[..., Any], *of_ranks: Sequence[Any]) -> list[Any]:
        """function(group, ...) of each rank, with the rank's entry of each further argument: what they return.

        Where some raise, the others end too, and the first error of the lowest rank is raised.
        """
        post = _Post(self.size, self._delay, random.Random(self._random.random()))
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = function(_Rank(post, rank), *(x[rank] for x in of_ranks))
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                errors[rank] = error
                post.stop(rank)

        threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(self.size)]
        for x in threads:
            x.start()
        for x in threads:
            x.join()
        post.close()
        own = [errors[r] for r in sorted(errors) if not isinstance(errors[r], RankLost)] or list(errors.values())
        if own:
            raise own[0]
        return results


class RankLost(RuntimeError):
    """A rank waits for another that has raised."""


class _Post:
    """What is under way. A thread of its own delivers it, whatever is there in any order."""

    def __init__(self, size: int, delay: float, rng: random.Random) -> None:
        self.size, self._delay, self._random = size, delay, rng
        self._changed = threading.Condition()
        self._sent: list[tuple[Any, np.ndarray]] = []
        self._arrived: dict[Any, np.ndarray] = {}
        self._lost: int | None = None
        self._open = True
        threading.Thread(target=self._deliver, name="post", daemon=True).start()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._sent and self._open:
                    self._changed.wait()
                if not self._sent:
                    return
                label, x = self._sent.pop(self._random.randrange(len(self._sent)))
                self._arrived[label] = x
                self._changed.notify_all()
            if self._delay:
                time.sleep(self._random.random() * self._delay)

    def send(self, label: Any, x: np.ndarray) -> None:
        with self._changed:
            self._sent.append((label, x))
            self._changed.notify_all()

    def receive(self, label: Any) -> np.ndarray:
        with self._changed:
            while label not in self._arrived:
                if self._lost is not None and not any(on_its_way == label for on_its_way, _ in self._sent):
                    raise RankLost(f"rank {self._lost} has raised, and sends nothing more")
                self._changed.wait()
            return self._arrived.pop(label)

    def stop(self, rank: int) -> None:
        with self._changed:
            self._lost = rank if self._lost is None else self._lost
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()


class _Rank:
    """The group as one rank has it."""

    eager = True
    known: ClassVar[set[Any]] = set()  # of an eager group nobody asks

    def __init__(self, post: _Post, rank: int, ranks: Sequence[int] | None = None) -> None:
        self._post, self._ranks = post, tuple(range(post.size) if ranks is None else ranks)
        self.rank, self.size = self._ranks.index(rank), len(self._ranks)
        self._numbers: dict[Any, int] = {}

    def part(self, ranks: Sequence[int]) -> _Rank:
        """A group of some ranks, of which this is one: each of these makes it."""
        return _Rank(self._post, self._ranks[self.rank], [self._ranks[r] for r in ranks])

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> _Waiting:
        for rank, x in sends:
            self._post.send(self._label("data", self.rank, rank), _to_host(x))
        return _Waiting(self._post, [(self._label("data", rank, self.rank), x) for rank, x in receives])

    def refuses(self, kind: str, on_gpu: bool, ordinal: int | None) -> str | None:
        """Why such arrays cannot be sent: what they must be."""
        return (
            None if kind in ("numpy", "torch", "cupy") else "a NumPy or CuPy array or a tensor, as group is simulated"
        )

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        for rank in range(self.size):
            self._post.send(self._label("gathered", self.rank, rank, "out"), x.copy())
        labels = [self._label("gathered", rank, self.rank, "in") for rank in range(self.size)]
        return np.stack([self._post.receive((*label[:4], "out", label[5])) for label in labels])

    def _label(self, *what: Any) -> tuple[Any, ...]:
        """Of the n-th message of its kind."""
        n = self._numbers.get(what, 0)
        self._numbers[what] = n + 1
        return (self._ranks, *what, n)


class _Waiting:
    def __init__(self, post: _Post, receives: list[tuple[Any, Any]]) -> None:
        self._post, self._receives = post, receives

    def wait(self) -> None:
        for label, x in self._receives:
            found = self._post.receive(label)
            if found.nbytes != x.nbytes:
                raise ValueError(f"a message of {found.nbytes} bytes came where {x.nbytes} were waited for")
            _from_host(x, found)
        self._receives = []


def _to_host(x: Any) -> np.ndarray:
    """A copy of a contiguous array as bytes in the host's memory."""
    kind = library(x)
    if kind == "torch":
        torch = namespace(kind)
        x = in_a_row(x.detach()).view(torch.uint8).cpu().numpy()
    elif kind == "cupy":
        x = x.get()
    return np.array(bytes_of(x))


def _from_host(x: Any, found: np.ndarray) -> None:
    """Such bytes, written to a contiguous array."""
    kind = library(x)
    if kind == "torch":
        torch = namespace(kind)
        in_a_row(x.detach()).view(torch.uint8).copy_(torch.from_numpy(found))
    elif kind == "cupy":
        x.set(found.view(x.dtype).reshape(x.shape))
    else:
        bytes_of(x)[...] = found
