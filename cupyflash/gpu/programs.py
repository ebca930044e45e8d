"""From a plan to its kernels, compiled and loaded: the one place that goes from a plan over its source to a program."""

from __future__ import annotations

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


def functions(plan: KernelPlan, ordinal: int) -> list[Any]:
    """The plan's kernels as functions on the GPU `ordinal`, one for each launch, loaded once."""
    kernels = tuple((x.name, x.shared_memory) for x in plan.launches)
    key = (
        plan.source,
        plan.arch,
        plan.dtype,
        plan.out_dtype,
        plan.constants,
        plan.given,
        plan.tangents,
        plan.score,
        plan.wrt,
        kernels,
        ordinal,
    )
    if key not in _loaded:
        _loaded[key] = compiler.load(program(plan), kernels, ordinal)
    return _loaded[key]
