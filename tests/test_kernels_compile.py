"""Every kernel family, compiled for every architecture that it claims: no GPU needed, no register spilled in silence.

That takes some thirty minutes of two cores, and is marked slow; a few kernels of each family are compiled always.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kernel_cover import FAMILY_ARCHS, cover, few, in_8_bits, problems, some_problems, tile
from kernel_cover import problem as of_usual_size

from cupyflash.gpu import compiler
from cupyflash.gpu.compiler import Resources
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import ceil
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan
from cupyflash.gpu.source import generate
from cupyflash.passes import FORWARD, PASSES
from cupyflash.problem import ARRAYS, AttentionProblem
from cupyflash.score import trace
from cupyflash.tools.autotune import candidates

pytest.importorskip("cuda.core")


STATIC_SHARED = 48 << 10  # bytes that every GPU gives without being asked


def plans(problems: Iterable[AttentionProblem], family: str, arch: Arch) -> dict[str, KernelPlan]:
    """The kernels to compile, by the source that they come to: many problems share one."""
    found = {}
    for problem in problems:
        passes = [of for of in PASSES.values() if of.moved == bool(problem.tangents)]
        for of in passes:
            stated = (
                problem
                if of.of_gradients
                else replace(problem, tangents=tuple(x for x in problem.tangents if x.name != "dout"))
            )
            if FAMILIES[family].objection(stated, arch, of) is None:
                kernel_plan = plan(stated, arch, of, family)
                found[generate(kernel_plan)] = kernel_plan
        lengths = {
            row.name: row.lengths(row.shape(problem)) for row in ARRAYS if row.gradient and problem.has(row.name)
        }
        of_score = {x.key: (8,) * x.rank for x in (problem.score.arrays if problem.score else ()) if x.kind == "float"}
        of_gradients = passes[-1]
        for names in (lengths, of_score):
            if names and FAMILIES[family].objection(problem, arch, of_gradients) is None:
                kernel_plan = plan(problem, arch, of_gradients, family, lengths=names)
                found[generate(kernel_plan)] = kernel_plan
    return found


FIRST = {family: arch for family, arch in reversed(FAMILY_ARCHS)}  # the oldest


def first_look(family: str, arch: str) -> dict[str, KernelPlan]:
    """Of one head dimension: others take several times as long."""
    return plans((x for x in some_problems() if x.dim == 128), family, Arch.of(arch))


@functools.cache
def covering_set(family: str) -> dict[str, dict[str, KernelPlan]]:
    """By architecture."""
    archs = [arch for of, arch in FAMILY_ARCHS if of == family]
    first = {FIRST[family]: tuple(some_problems())}
    return {arch: plans((*cover(family, arch), *first.get(arch, ())), family, Arch.of(arch)) for arch in archs}


@functools.cache
def of_family(family: str) -> dict[str, dict[str, KernelPlan]]:
    """Of the covering set some programs, in which every two constants and each tile are (`few`)."""
    every = [x for found in covering_set(family).values() for x in found.values()]
    kept = {id(x) for x in few(every, [*first_look(family, FIRST[family]).values()])}
    return {arch: {s: x for s, x in found.items() if id(x) in kept} for arch, found in covering_set(family).items()}


@pytest.mark.parametrize(("family", "arch"), FIRST.items())
def test_some_compile_without_undeclared_spills(family: str, arch: str) -> None:
    compile_all(first_look(family, arch))


# Of some there are many, which processes of a test run share: about twenty each.
SHARED_OUT = {
    ("sm90", "sm_90a"): 16, ("sm80", "sm_80"): 8, ("sm80", "sm_86"): 4, ("sm80", "sm_90a"): 3, ("simt", "sm_75"): 4,
    ("simt", "sm_90a"): 2,
}  # fmt: skip
PARTS = [
    (family, arch, part, parts)
    for family, arch in FAMILY_ARCHS
    for parts in [SHARED_OUT.get((family, arch), 1)]
    for part in range(parts)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "arch", "part", "parts"), PARTS)
def test_compiles_without_undeclared_spills(family: str, arch: str, part: int, parts: int) -> None:
    """But for what the test above compiles."""
    compile_all(dict([*of_family(family)[arch].items()][part::parts]))


@pytest.mark.parametrize("family", FIRST)
def test_every_two_constants_meet_in_what_is_compiled(family: str) -> None:
    def meeting(kernel_plan: KernelPlan) -> set[object]:
        constants = [*kernel_plan.constants, ("dtype", kernel_plan.dtype), ("arch", kernel_plan.arch)]
        own = [x for x in constants if x[0] != "SHARED_MEMORY"]
        met = [*itertools.combinations(own, 2), (kernel_plan.dtype, kernel_plan.spills), tile(kernel_plan)]
        return {(kernel_plan.source, *both) for both in met}

    assert all(of_family(family).values())
    compiled = [x for found in of_family(family).values() for x in found.values()]
    compiled += first_look(family, FIRST[family]).values()
    whole = [x for found in covering_set(family).values() for x in found.values()]
    assert set().union(*map(meeting, compiled)) >= set().union(*map(meeting, whole))
    assert len(compiled) < len(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "constant", "asked"),
    [
        *(("sm90", "KEYS", in_8_bits(dim, "nothing", False)) for dim in (64, 128)),
        *(("sm80", "WARPS", of_usual_size("float64", dim)) for dim in (64, 128, 144)),
    ],
)  # fmt: skip
def test_tiles_that_may_be_tried_compile(family: str, constant: str, asked: AttentionProblem) -> None:
    """One for each value of what they differ in that not every kernel takes."""
    trials = candidates(asked, Arch.of("sm_90a"), FORWARD, family)
    chosen = {dict(trial.plan.constants)[constant]: trial.plan for trial in trials}
    assert len(chosen) > 1
    for made in chosen.values():
        compiler.compile_source(generate(made), made.arch)


def beyond_registers(used: Resources, declared: int) -> str | None:
    """What a thread has in memory, and a plan does not declare. Its frame has what is spilled, in steps of 8 bytes;
    with more in it something has an address: an array, or `this` of a function that ptxas has not inlined.
    """
    spilled = max(used.spill_stores, used.spill_loads)
    if spilled > declared:
        return f"spills {spilled} bytes, {declared} declared"
    if used.stack > ceil(spilled, 8) * 8:
        return f"has {used.stack} bytes on the stack, {spilled} of them spilled"
    return None


@pytest.mark.parametrize(
    ("used", "declared", "text"),
    [
        (Resources(168, 0, 0, 576, 0), 144, "has 576 bytes on the stack, 0 of them spilled"),
        (Resources(255, 28, 28, 36, 0), 28, "has 36 bytes on the stack, 28 of them spilled"),
        (Resources(255, 24, 28, 32, 0), 24, "spills 28 bytes, 24 declared"),
        (Resources(255, 28, 28, 32, 0), 28, None),
        (Resources(255, 356, 300, 160, 0), 356, None),
    ],
)
def test_what_threads_have_in_memory_is_told(used: Resources, declared: int, text: str | None) -> None:
    assert beyond_registers(used, declared) == text


def compile_all(found: dict[str, KernelPlan]) -> None:
    def complaint(source: str, kernel_plan: KernelPlan) -> str | None:
        what = f"{kernel_plan.source} {kernel_plan.dtype} {dict(kernel_plan.constants)}"
        try:
            compiled = compiler.compile_source(source, kernel_plan.arch)
        except compiler.CompileError as error:
            return f"{what}: {str(error)[:2000]}"
        if "serialized" in compiled.log:  # "wgmma.mma_async instructions are serialized due to ..."
            return f"{what}: {compiled.log}"
        launched = {launch.name for launch in kernel_plan.launches}
        at_times = {"attention_split", "attention_turn", "attention_order", "attention_combine"}
        empty = at_times - launched  # where there is nothing to do
        compiled_names = compiled.resources.keys() - empty
        if not launched <= compiled_names or (compiled_names != launched and not kernel_plan.wrt):
            return f"{what}: has the kernels {sorted(compiled.resources)}, not those that are launched"
        shared = max(r.static_shared for r in compiled.resources.values())
        if shared > STATIC_SHARED:
            return f"{what}: declares {shared} bytes of shared memory"
        wrong = (text for r in compiled.resources.values() if (text := beyond_registers(r, kernel_plan.spills)))
        return next((f"{what}: {text}" for text in wrong), None)

    assert found
    with ThreadPoolExecutor(1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count()) as pool:
        complaints = [text for text in pool.map(complaint, found.keys(), found.values()) if text]
    assert not complaints, f"{len(complaints)} of {len(found)}:\n" + "\n".join(complaints)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_a_score_function_may_read_many_elements(dtype: str) -> None:
    """The shared memory of the kernel that sums their gradients does not grow with their number."""
    score = trace(
        lambda s, b, h, i, j, x, y: s + x[h, j - i] + x[h, i] + y[i] + y[j] + y[b],
        {"x": (dtype, 2, False), "y": (dtype, 1, False)},
    )
    for fields in ({}, {"deterministic": True}):
        asked = plans([of_usual_size(dtype, 128, score=score, **fields)], "simt", Arch.of("sm_75"))
        compile_all({source: made for source, made in asked.items() if made.wrt})


@pytest.mark.parametrize(("constant", "text"), [("ADDED", "has no term"), ("ADDED_MOVES", "has no tangent")])
@pytest.mark.parametrize("family", FIRST)
def test_what_is_added_to_scores_has_a_term(family: str, constant: str, text: str) -> None:
    """A row of rules.py that says `adds`, and no class in attention/terms.cuh, or no tangent there: that is not passed
    over in silence."""
    kernel_plan = plan(next(problems()), Arch.of(FIRST[family]), family=family)
    constants = dict(kernel_plan.constants)
    constants[constant] += 1
    source = generate(replace(kernel_plan, constants=tuple(constants.items())))
    with pytest.raises(compiler.CompileError, match=text):
        compiler.compile_uncached(source, kernel_plan.arch)


def test_a_compile_error_names_our_file_and_line() -> None:
    problem = next(problems())
    kernel_plan = plan(problem, Arch.of("sm_80"), family="simt")
    source = generate(kernel_plan)
    lines = source.splitlines()
    start = lines.index(f'#line 1 "{kernel_plan.source}"')
    broken = "\n".join([*lines[: start + 5], "not CUDA;", *lines[start + 5 :]])
    with pytest.raises(compiler.CompileError, match=rf"{kernel_plan.source}\(5\)"):
        compiler.compile_uncached(broken, kernel_plan.arch)
