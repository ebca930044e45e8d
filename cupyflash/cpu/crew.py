"""The threads that share the work of one call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from ..problem import AttentionProblem
from .blas import one_thread

T = TypeVar("T")

# Below so many multiplications a call ends sooner than threads start and have handed the interpreter lock to each other
# around every step (2 cores, docs/notes/cpu.md).
WORTH_THREADS = 1 << 26
# And up to so many of one product BLAS libraries (OpenBLAS) keep it on the thread that calls them: there is nothing to
# hold.
WORTH_HOLDING = 1 << 18
# To hold it a thread has to begin. Of calls with no more multiplications than this in all, and no larger right sides of
# products, products are cut so small instead: BLAS packs the right side anew for each piece.
CUT_CALLS, CUT_SIDES = 1 << 24, 1 << 13
MOST_THREADS = 256  # BLAS libraries have such a number, too


def worth_threads(problem: AttentionProblem) -> bool:
    return multiplications(problem) >= WORTH_THREADS


def multiplications(problem: AttentionProblem) -> int:
    pairs = problem.batch * problem.heads_q * problem.seq_q * problem.seq_k
    return pairs * (problem.dim + problem.dim_v)


def _of_a_product(problem: AttentionProblem) -> int:
    """Multiplications of the largest product of two matrices, at most."""
    return problem.seq_q * problem.seq_k * max(problem.dim, problem.dim_v)


def stays_here(problem: AttentionProblem) -> bool:
    """Whether a problem is so small that BLAS and we keep it on the thread that calls, whatever others do."""
    return not worth_threads(problem) and _needs_no_holding(problem)


def _needs_no_holding(problem: AttentionProblem) -> bool:
    """Whether BLAS keeps each of its products on the thread that calls it."""
    return _of_a_product(problem) <= WORTH_HOLDING or cuts(problem)


def cuts(problem: AttentionProblem) -> bool:
    """Whether products are cut. (They may be other bits than whole ones: so it follows from the problem alone.)"""
    side = max(problem.seq_q, problem.seq_k) * max(problem.dim, problem.dim_v)
    most = CUT_CALLS * (problem.batch if problem.batch_invariant else 1)  # as if each entry were alone
    little = side <= CUT_SIDES and multiplications(problem) <= most
    return little and _of_a_product(problem) > WORTH_HOLDING


class _Member(threading.local):
    of_a_crew = False  # whether this thread is one: what it calls needs none, nor to hold BLAS
    cuts = False  # whether what it computes now has products cut: said at the beginning of each


member = _Member()


class Crew:
    """Threads for one call, or for so many multiplications; the caller waits. NumPy lets go of the interpreter lock in
    products and element loops.

    An interrupt, or an error in one thread, ends them all at their next step.
    """

    def __init__(self, work: AttentionProblem | int, here: bool = False) -> None:
        """`here`: of so many multiplications, that BLAS keeps each product on the thread that calls it."""
        if isinstance(work, int):
            count, self._cuts = work, False
        else:
            count, self._cuts, here = multiplications(work), cuts(work), _needs_no_holding(work)
        self.size = threads() if count >= WORTH_THREADS else 1
        small = self.size == 1 and (here or member.of_a_crew or one_thread.needless())
        self._own = 0 if small else self.size  # threads to begin; none: the caller's
        self._error: BaseException | None = None

    def run(self, task: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """task(*a) for each a, taken in order. Infinities and NaN in the inputs do what IEEE says."""
        process = os.getpid()
        if self._own:
            self._share(task, arguments, process)
        else:
            member.cuts = self._cuts
            with np.errstate(all="ignore"):
                for a in arguments:
                    task(*a)
        if os.getpid() != process:
            raise RuntimeError(
                "the process was forked while attention computed; its threads are not in the new process"
            )
        if self._error is not None:
            raise self._error

    def _share(self, task: Callable[..., None], arguments: Iterable[tuple[Any, ...]], process: int) -> None:
        lock, waiting, inside = threading.Lock(), iter(arguments), list[None]()

        def work() -> None:
            try:
                with np.errstate(all="ignore"):
                    while not self.stopped:
                        with lock:
                            a = next(waiting, None)
                        if a is None:
                            return
                        task(*a)
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                self._error = self._error or error

        def alone() -> None:
            inside.append(None)
            member.of_a_crew, member.cuts = True, self._cuts
            if not self.stopped:
                with one_thread:
                    work()
            inside.pop()

        # Threads of our own, not a pool: pools take no work once the main thread has ended.
        crew = [threading.Thread(target=alone, name="cupyflash", daemon=True) for _ in range(self._own)]
        begun = 0
        try:
            for thread in crew:
                if not _start(thread):  # those that are there do it
                    break
                begun += 1
            if not begun:
                work()
            for thread in crew[:begun]:
                thread.join()
        except BaseException as error:
            self._error = self._error or error  # who begins later does nothing
            while inside and os.getpid() == process:
                time.sleep(0.001)  # an interrupted join (Python 3.11) takes its thread for ended
            raise

    def steps(self, of: Iterable[T]) -> Iterator[T]:
        """The steps of a task; none after an interrupt."""
        for step in of:
            if self._error is not None:
                return
            yield step

    @property
    def stopped(self) -> bool:
        """After an interrupt or an error."""
        return self._error is not None


def _start(thread: threading.Thread) -> bool:
    """False where no more threads can be had. (Apart: Python leaves a gap in the `try` around another.)"""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


class Turns:
    """Visits to places that tasks of a crew share: each goes over its place behind the one before it.

    `visits`, as (place, visit), are in the order in which the crew takes up their tasks: so the first task that is not
    done never waits, and all come to their turn.
    """

    def __init__(self, crew: Crew, visits: Iterable[tuple[Hashable, Hashable]]) -> None:
        self._crew, self._changed = crew, threading.Condition()
        self._before: dict[Hashable, Hashable] = {}
        self._reached: dict[Hashable, float] = {}
        last: dict[Hashable, Hashable] = {}
        for place, visit in visits:
            self._before[visit] = last.get(place)
            last[place] = visit

    @contextmanager
    def passing(self, visit: Hashable, point: float) -> Iterator[None]:
        """Begins when the visit before has passed a point of their place; at its end this one has.

        Points of a visit rise, and infinity comes last: then this visit is over, and so are those before it.
        """
        before = self._before[visit]
        with self._changed:
            while before is not None and self._reached.get(before, -1) < point and not self._crew.stopped:
                self._changed.wait(0.1)  # an error wakes nobody
        yield
        with self._changed:
            self._reached[visit] = point
            self._changed.notify_all()


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
