"""Compile kernels before they are needed, with no GPU present: what `cupyflash compile` does in a container's build."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..gpu import compiler
from ..gpu.compiler import Compiled
from ..gpu.device import Arch
from ..gpu.plan import KernelPlan, plan
from ..gpu.programs import program
from ..gpu.source import generate
from ..latent import refuse
from ..lengths import refuse_pages
from ..passes import BACKWARD, FORWARD, Pass
from ..problem import ARRAY_RULES, FLOAT8, LAYOUTS, AttentionProblem, View, contiguous
from ..rules import describe
from .explanation import dtype_name, eight_name
from .shapes import of_arrays, placed

HEAD_DIMS = {"float16": (64, 128, 256), "bfloat16": (64, 128, 256), "float32": (64, 128), "float64": (64, 128)}
# Queries, keys, heads, and heads of keys: no kernel is compiled for these, but tiles may differ, and who shares them.
_SIZES = ((1024, 1024, 16, 16), (1024, 1024, 128, 128), (8192, 8192, 16, 16), (8192, 8192, 16, 1))
_FEW = ((1, 8192, 16, 16), (1, 8192, 16, 4), (512, 8192, 8, 8))  # a token, a late part of a prompt: forward alone


@dataclass(frozen=True)
class Job:
    """One source to compile, and the problem that it answers."""

    problem: AttentionProblem
    of: Pass
    plan: KernelPlan


@dataclass(frozen=True)
class Done:
    """A job's result: a program and the seconds it took, or the error."""

    job: Job
    seconds: float
    compiled: Compiled | None
    error: Exception | None = None


def jobs(
    archs: Sequence[str],
    dtypes: Sequence[str] = tuple(HEAD_DIMS),
    head_dims: Sequence[int] = (),
    causal: Sequence[bool | str] = (False, True),
    passes: Sequence[Pass] = (FORWARD, BACKWARD),
    arrays: Collection[str] = (),
    family: str | None = None,
    kv_dtype: str | None = None,
    **options: Any,
) -> list[Job]:
    """Every combination of what is given, each source once. head_dims default to the usual ones of each dtype.

    `kv_dtype`: of k and v of 8 bits beside q of 16, of which there is a forward alone. `arrays` names the optional
    arrays that the kernels take, `options` are those of every call. ValueError for an architecture, head dimension or
    family that is not known, TypeError for such a dtype.
    """
    found: dict[tuple[str, str], Job] = {}
    for arch, dtype in product(archs, [dtype_name(dtype) or "" for dtype in dtypes]):
        dims = head_dims or HEAD_DIMS.get(dtype, (64, 128, 256))
        latent = options.get("latent")
        only = dtype == FLOAT8 or "page_table" in arrays or kv_dtype is not None or latent is not None
        taken = [FORWARD] if only and FORWARD in passes else passes
        for dim, banded, of, sizes in product(dims, causal, taken, (*_SIZES, *_FEW)):
            if of is BACKWARD and sizes in _FEW:
                continue
            seq_q, seq_k, heads, heads_k = sizes
            of_q, of_k = placed(arrays, (1, seq_q, heads, dim), (1, seq_k, heads_k, dim))
            x, k = _view(of_q, dtype), _view(of_k, dtype if kv_dtype is None else eight_name(kv_dtype))
            shapes = of_arrays(arrays, of_q, of_k, of_k, LAYOUTS[0], eight=kv_dtype is not None)
            given = {name: _view(shape, ARRAY_RULES[name].taken(dtype)[0]) for name, shape in shapes.items()}
            problem = describe(x, k, k, causal=banded, **given, **options)
            if of is not FORWARD:
                refuse_pages(problem, of)
                refuse(latent, of)
            job = Job(problem, of, plan(problem, Arch.of(arch), of, family))
            found.setdefault((job.plan.arch, generate(job.plan)), job)
    return list(found.values())


def _view(shape: tuple[int, ...], dtype: str) -> View:
    return View(shape, contiguous(shape), dtype, "cuda:0", "shape")


def compile_all(work: Sequence[Job]) -> Iterator[Done]:
    """Compile through the disk cache, on all cores, yielding as each is done. ImportError where NVRTC is missing."""
    yield from map(_compile, work[:1])  # on this thread: cuda.core cannot be imported by several at once
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_compile, job) for job in work[1:]]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for those at work alone


def kept(result: Done) -> bool:
    """Whether the disk cache has what was compiled, so that another process need not compile it again."""
    compiler.compile_source.cache_clear()
    return program(result.job.plan).cached


def _compile(job: Job) -> Done:
    start = time.perf_counter()
    compiled, error = None, None
    try:
        compiled = program(job.plan)
    except RuntimeError as refused:  # CompileError: tell of it with the others' results
        error = refused
    return Done(job, time.perf_counter() - start, compiled, error)
