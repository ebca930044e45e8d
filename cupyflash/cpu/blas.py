"""NumPy's BLAS library, held to the thread that calls it while a crew works: heads and tiles already occupy
every core."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any


class OneThread:
    """A context in which products stay on the thread that calls them; each thread of a crew enters it.

    Most BLAS libraries have one number of threads for the whole process, so the first who enters notes it, and the last
    who leaves brings it back. Accelerate (macOS) has no such number and does without. An interrupt must not come
    between, so only threads of our own enter: Python raises it in the main thread.
    """

    def __init__(self) -> None:
        self._inside, self._before = 0, list[int]()
        self._lock = threading.RLock()  # its thread may fork within, in a signal's handler

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = [x.num_threads for x in _libraries()]
            self._inside += 1
            for x in _libraries():
                _set(x, 1)  # by each thread: some libraries (MKL, those with OpenMP) have a number for each

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        for x, n in zip(_libraries(), self._before):
            _set(x, n)

    def needless(self) -> bool:
        """Whether products stay on one thread as it is: nobody holds them there, or is about to bring others back."""
        with self._lock:
            return not self._inside and all(x.num_threads == 1 for x in _libraries())

    def at_forks(self) -> None:
        """From now on a forked process begins with the number that was there before: the threads inside stay behind."""
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(
                before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forked
            )

    def _forked(self) -> None:
        if self._inside:
            self._inside = 0
            self._restore()
        self._lock.release()


one_thread = OneThread()
one_thread.at_forks()


@functools.cache
def _libraries() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]


def _set(library: Any, n: int) -> None:
    """threadpoolctl 3.8 ignores, for OpenBLAS, all threads but the first that ever asked, as long as that one lives."""
    getattr(library, "_real_set_num_threads", library.set_num_threads)(n)
