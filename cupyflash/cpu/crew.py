"""The threads that share the work of one call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..problem import AttentionProblem

T = TypeVar("T")

# Below so many multiplications a call ends sooner than threads start.
WORTH_THREADS = 1 << 22
MOST_THREADS = 256  # BLAS libraries have such a number, too


class Crew:
    """Threads for one call, the caller's among them. NumPy lets go of the interpreter lock in products and element loops.

    An interrupt, or an error in one thread, ends them all at their next step.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        work = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k * (problem.dim + problem.dim_v)
        self.size = 1 if work < WORTH_THREADS else threads()
        self._error: BaseException | None = None

    def run(self, task: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """task(*a) for each a, taken in order."""
        waiting, lock = iter(arguments), threading.Lock()

        def work() -> None:
            try:
                while True:
                    with lock:
                        a = next(waiting, None)
                    if a is None or self._error is not None:
                        return
                    task(*a)
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                self._error = self._error or error

        # Threads of our own, not a pool: pools take no work once the main thread has ended.
        others: list[threading.Thread] = []
        try:
            for _ in range(self.size - 1):
                thread = threading.Thread(target=work, name="cupyflash", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads can be had: those that are there do it
                    break
                others.append(thread)
            work()
            for thread in others:
                thread.join()
        except BaseException as error:  # noqa: BLE001 (an interrupt outside of a task, raised again below)
            self._error = self._error or error
            for thread in others:
                thread.join()
        if self._error is not None:
            raise self._error

    def steps(self, of: Iterable[T]) -> Iterator[T]:
        """The steps of a task; none after an interrupt."""
        for step in of:
            if self._error is not None:
                return
            yield step


def threads() -> int:
    """As many as the process has cores, or as OMP_NUM_THREADS says: what the BLAS libraries do."""
    asked = (
        os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip().lstrip("0")
    )  # "8,2": 8, each with a team of 2
    if asked.isdecimal():
        return min(int(asked[:9]), MOST_THREADS)
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
