"""From a plan to its kernels, compiled and loaded: the one place that goes from a plan over its source to a program."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from . import compiler
from .compiler import Compiled
from .dump import dump
from .kernel_plan import KernelPlan
from .source import generate


def program(plan: KernelPlan) -> Compiled:
    """The plan's source, compiled or taken from the cache. Needs no GPU.

    CompileError carries NVRTC's log; ImportError says what to install where NVRTC or cuda-core is missing.
    """
    source = generate(plan)
    compiled = compiler.compile_source(source, plan.arch)
    dump(plan, source, compiled)
    return compiled


_loaded: dict[tuple[Any, ...], list[Any]] = {}

# Fields of a plan that say how a program is launched, not what it is; of `workspace` and `scalars` it has the names.
OF_A_LAUNCH = (
    "launches", "alignment", "workspace", "spills", "maps", "scalars", "lists", "passed_over", "grouped", "portions",
    "found",
)  # fmt: skip
_OF_A_PROGRAM = tuple(x.name for x in fields(KernelPlan) if x.name not in OF_A_LAUNCH)


def functions(plan: KernelPlan, ordinal: int) -> list[Any]:
    """The plan's kernels as functions on the GPU `ordinal`, one for each launch, loaded once."""
    key = _key(plan, ordinal)
    if key not in _loaded:
        _loaded[key] = compiler.load(program(plan), _kernels(plan), ordinal)
    return _loaded[key]


def ready(plan: KernelPlan, ordinal: int) -> bool:
    """Whether the plan's program need not be compiled for `functions`: it is loaded, or on disk."""
    return _key(plan, ordinal) in _loaded or compiler.on_disk(generate(plan), plan.arch)


def _kernels(plan: KernelPlan) -> tuple[tuple[str, int], ...]:
    return tuple((x.name, x.shared_memory) for x in plan.launches)


def _key(plan: KernelPlan, ordinal: int) -> tuple[Any, ...]:
    names = (*((x.name, x.dtype) for x in plan.workspace), *(name for name, _ in plan.scalars))
    return (*(getattr(plan, name) for name in _OF_A_PROGRAM), names, _kernels(plan), ordinal)
