"""The passes that take tangents, on kernels that run without a GPU, judged against the reference: as on_cpu.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from cuda_on_cpu import as_cpp, compile_all
from on_cpu import Guarded, run
from reference import state
from semantics import dead_rows, draw_blocks, draw_inputs, spoil
from tangents import Moving, can_move, draw_tangents, hidden

from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.gradients import apart, lengths_of
from cupyflash.passes import BACKWARD_JVP, FORWARD, JVP
from cupyflash.problem import AttentionProblem, Given, View


def check(
    family: str,
    arch: Arch,
    rng: np.random.Generator,
    dtype: str,
    shapes: dict[str, Any],
    options: dict[str, Any],
    moves: Collection[str] = (),
) -> None:
    """Both passes, and the tangents of all gradients of arrays, in both orders (cuda_on_cpu.h), to the bit the same but
    for what a score function reads. `moves`: the arrays that have tangents; all that may, where none is named.
    `rows_aligned`: as `on_cpu.check` has it.
    """
    options = {"deterministic": False} | options
    blocks, rows_aligned = options.pop("blocks", None), options.pop("rows_aligned", True)
    q, k, v, dout, key_mask, dlse, others = draw_inputs(rng, dtype, **shapes)
    if key_mask is not None:
        key_mask[0] = False  # queries that see no key
        key_mask[1:, : key_mask.shape[1] // 3] = False
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "key_mask": key_mask, **others}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    judged, seen = dict(arrays), None
    if blocks:
        drawn = draw_blocks(rng, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), *blocks)
        options["block_mask"], judged, seen = drawn.mask(), arrays | drawn.with_mask(others), drawn.seen
    problem = state(q, k, v, key_mask, **options, **others)
    names = [name for name in can_move(problem, others) if not moves or name in moves]
    assert len(names) >= len(moves)
    rows = np.empty((problem.batch, problem.heads_q, problem.seq_q), problem.lse_dtype)
    moved = draw_tangents(rng, {"dlse": rows, **arrays}, names)
    judge = Moving(problem, judged, moved)
    seed = None
    if "seed" in others and others["seed"].ndim == 0:  # a number
        seed = int(arrays.pop("seed")) % 2**64
        problem = replace(problem, given=tuple(x for x in problem.given if x.name != "seed"))

    def moving(names: Collection[str]) -> AttentionProblem:
        return replace(problem, tangents=tuple(Given(name, moved[name].dtype.name, ()) for name in names))

    of_inputs = [name for name in names if name not in ("dout", "dlse")]
    stated = [problem, moving(of_inputs), moving(names)]
    plans = [plan(x, arch, of, family) for x, of in zip(stated, (FORWARD, JVP, BACKWARD_JVP))]
    wanted = apart(tuple(name for name in can_move(problem, others) if name in others))
    for wrt in wanted:
        views = {name: View(others[name].shape, (), "", "", "") for name in wrt}
        made = plan(stated[2], arch, BACKWARD_JVP, family, lengths=lengths_of(wrt, views))
        plans.append(made.after(plans[2]))
        stated.append(stated[2])
    # What is dead may hold anything, and so may tangents of what is added to hidden pairs.
    blind, unseen = dead_rows(problem, key_mask, seen, {(use.queries, use.keys) for x in plans for use in x.lists})
    dead = {"q": blind, "k": unseen, "v": unseen, "dout": blind}
    arrays |= {f"t{name}": x for name, x in moved.items()}
    for name, of in ((name, name.removeprefix("t")) for name in list(arrays)):
        if of in dead:
            arrays[name] = spoil(rng, arrays[name], dead[of])
        elif name == "tbias" and arrays[name].shape == (*rows.shape, k.shape[1]):
            arrays[name] = np.where(hidden(problem, others, key_mask), np.nan, arrays[name]).astype(arrays[name].dtype)

    aligned = plans[1].alignment == 16
    libraries = compile_all(*[as_cpp(generate(x), [y.name for y in x.launches]) for x in plans])
    listed = [_lists(x, options) for x in plans]
    spaces = [{x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes} for kernels in plans]
    for kernels, own in zip(plans[3:], spaces[3:]):  # what it finds there, the backward's has left
        own |= {name: spaces[2][name] for name in kernels.found if name in spaces[2]}
    of_rows = {"out": dout, "tout": dout, "tdq": q, "tdk": k, "tdv": v}
    before: dict[str, bytes] = {}
    for last_first in (False, True):
        given = {name: Guarded(x.shape, x.dtype, x, aligned) for name, x in arrays.items()}
        found: dict[str, Guarded] = {}
        results = [
            ("out", "lse"),
            ("tout", "tlse"),
            ("tdq", "tdk", "tdv"),
            *[[f"td{x}" for x in wrt] for wrt in wanted],
        ]
        for n, of in enumerate(results):
            made = {
                name: Guarded(of_rows[name].shape, dtype, None, aligned and rows_aligned, True)
                for name in of
                if name in of_rows
            }
            made |= {name: Guarded(rows.shape, rows.dtype) for name in of if name in ("lse", "tlse")}
            if n > 2:
                made |= {name: Guarded(others[name[2:]].shape, others[name[2:]].dtype) for name in of}
            if n == 1 and not of_inputs:
                for x in made.values():  # no kernel is needed
                    x.array[...] = 0
            else:
                run(libraries[n], plans[n], stated[n], made | given | spaces[n] | listed[n], last_first, arch.sms, seed)
            found |= made
            if n < 2:  # what comes after takes these
                given |= {name: Guarded(x.array.shape, x.array.dtype, x.array, aligned) for name, x in made.items()}
        for name, x in found.items():
            if name not in ("out", "lse"):
                judge.judge(name, x.array)
            bits = x.array.tobytes()
            if options["deterministic"] or not (name == "tdq" or name.startswith("tdscore_arrays")):
                assert before.setdefault(name, bits) == bits, f"{name} depends on the order"


def _lists(kernels: KernelPlan, options: dict[str, Any]) -> dict[str, Guarded]:
    lists = {use.name: options["block_mask"].list_for(use) for use in kernels.lists}
    return {name: Guarded(x.shape, x.dtype, x) for name, x in lists.items()}
