"""NumPy's BLAS library, held to the thread that calls it while a crew works: heads and tiles already occupy every core."""

from __future__ import annotations

import functools
import threading
from typing import Any


class OneThread:
    """A context in which products stay on the thread that calls them.

    A BLAS library has one number of threads for the whole process, so the first who enters notes it, and the last who leaves
    brings it back. Accelerate (macOS) has no such number and does without.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, list[int]()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = [x.num_threads for x in _libraries()]
                for x in _libraries():
                    x.set_num_threads(1)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                for x, n in zip(_libraries(), self._before):
                    x.set_num_threads(n)


one_thread = OneThread()


@functools.cache
def _libraries() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    return [x for x in ThreadpoolController().lib_controllers if x.user_api == "blas"]
