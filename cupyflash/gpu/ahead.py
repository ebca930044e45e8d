"""Programs that come after the one that is compiled, on threads of their own: NVRTC lets go of the interpreter lock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable

from .kernel_plan import KernelPlan
from .programs import program

MOST = 8  # threads at once: they take memory and cores, and a process that ends waits for them
_NAME = "cupyflash compiles"


def compile_ahead(make: Callable[[], Iterable[KernelPlan | None]]) -> None:
    """Start to compile the plans that `make` makes. Who asks for one waits for it (`cache.turn`), and is told what goes
    wrong; here nobody is."""
    _start(_compile_each, make)


def _start(target: Callable[..., None], given: object) -> None:
    if sum(x.name == _NAME for x in threading.enumerate()) >= MOST:
        return  # what is asked for is compiled then
    with contextlib.suppress(RuntimeError):  # no thread can be started: likewise
        threading.Thread(target=target, args=(given,), name=_NAME).start()


def _compile_each(make: Callable[[], Iterable[KernelPlan | None]]) -> None:
    with contextlib.suppress(Exception):
        for plan in make():
            if plan is not None:
                _start(_compile, plan)


def _compile(plan: KernelPlan) -> None:
    with contextlib.suppress(Exception):
        program(plan)
