"""What is kept is kept under everything that it follows from: whatever changes, another call of the same kind gets
what is its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from kernel_cover import SCORE, moving_problems, problem, problems

from cupyflash import attention, attention_backward
from cupyflash.gpu import programs
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan, Workspace
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP
from cupyflash.problem import ARRAYS, AXES, EIGHT, OPTIONS, Given
from cupyflash.score import trace

# ---- the corridor: what a call is planned for -----------------------------------------------------------------------

cupy = pytest.importorskip("cupy")
import test_corridor_offline as offline
from test_corridor_offline import HQ, SK, SQ, B, D, Gpu

gpu = offline.gpu
HALF, SINGLE = np.float16, np.float32


CHANGED_OPTIONS: dict[str, Any] = {
    "causal": [True, "top_left"], "window": [(0, None), (None, 0), (0, 0)], "scale": [0.5, -0.5],
    "softcap": [2.0, 3.0], "score": [lambda s, b, h, i, j: 2 * s, lambda s, b, h, i, j: 3 * s], "dropout": [0.1, 0.2],
    "layout": ["bhsd"], "deterministic": [True], "at": [(0, 0, 0, 0), (0, 0, 0, 64)],
    "latent": [D, D // 2], "sms": [1, 2],
}  # fmt: skip
CHANGED_ARRAYS: dict[str, list[tuple[tuple[int, ...], Any]]] = {
    "key_mask": [((B, SK), bool), ((1, SK), bool)], "mask": [((B, HQ, SQ, SK), bool), ((SK,), bool)],
    "bias": [((HQ, SQ, SK), HALF), ((HQ, SQ, SK), SINGLE), ((1, SQ, SK), HALF)],
    "alibi_slopes": [((HQ,), SINGLE), ((B, HQ), SINGLE), ((HQ,), HALF)],
    "sinks": [((HQ,), HALF), ((HQ,), SINGLE), ((1,), HALF)],
}  # fmt: skip


def test_every_option_and_array_is_changed() -> None:
    assert {row.name for row in OPTIONS} == CHANGED_OPTIONS.keys() | {
        "block_mask", "out_dtype", "out_scale", "max_seqlen_q", "max_seqlen_k", "batch_invariant",
    }  # fmt: skip
    names = {row.name for row in ARRAYS if not (row.of_float8 or row.ragged or row.placed)}
    assert names == CHANGED_ARRAYS.keys() | {"seed"}


def calls(gpu: Gpu, backward: bool) -> list[tuple[str, Callable[[], Any]]]:
    """The same call, each time with one thing that is another; what it is."""
    base = offline.for_backward(gpu) if backward else offline.inputs(gpu)
    run: Any = attention_backward if backward else attention

    def like(x: Any, dtype: Any = HALF, offset: int = 0) -> Any:
        return gpu.array(x.shape, dtype, offset)

    changes: list[tuple[str, dict[str, Any]]] = [("nothing", {})]
    for name, values in CHANGED_OPTIONS.items():
        for value in values:
            if name == "layout":
                swapped = {n: x.swapaxes(1, 2) for n, x in base.items() if n != "lse"}
                changes.append((name, swapped | {name: value}))
            elif name == "latent":
                changes += [] if backward else [(f"latent {value}", {name: value, "v": None})]
            elif name != "deterministic" or backward:
                changes.append((f"{name} {value}", {name: value} | ({"seed": 3} if name == "dropout" else {})))
    for name, forms in CHANGED_ARRAYS.items():
        changes += [(f"{name} {shape} {np.dtype(dtype)}", {name: gpu.array(shape, dtype)}) for shape, dtype in forms]
    changes += [(f"family {name}", {"family": name}) for name in ("sm80", "simt")]
    changes += [(f"places in memory, {x}", {"at": gpu.array((4,), np.dtype(x))}) for x in ("int32", "int64")]
    changes += [("seed in memory", {"dropout": 0.1, "seed": gpu.array((1,), np.int64)})]
    rows = {"q": SQ, "k": SK, "v": SK, "dout": SQ, "out": SQ}
    for name, x in base.items():
        if name != "lse":
            wide = gpu.array((B, rows[name], x.shape[2], 2 * D))[..., :D]
            changes += [(f"strides of {name}", {name: wide}), (f"address of {name}", {name: like(x, offset=8)})]
    longer = {n: gpu.array((B, rows[n] + 1, x.shape[2], D)) for n, x in base.items() if n in ("k", "v")}
    changes += [("keys", longer)]
    changes += [("dtype", {n: like(x, SINGLE) for n, x in base.items() if n != "lse"})]
    if backward:
        changes += [("dlse", {"dlse": gpu.array((B, HQ, SQ), np.float32)})]
        both = {"bias": gpu.array((HQ, SQ, SK)), "sinks": gpu.array((HQ,))}
        changes += [(f"wrt {wrt}", both | {"wrt": wrt}) for wrt in ((), ("bias",), ("sinks",), ("bias", "sinks"))]
        targets = [like(base[n]) for n in "qkv"]
        changes += [
            ("targets", {"grads": tuple(targets)}),
            ("what is added to", {"grads": tuple(targets), "add": True}),
        ]
        wide = [gpu.array((*x.shape[:3], 2 * D))[..., :D] for x in targets]
        for n in range(3):
            mixed = tuple(wide[i] if i == n else targets[i] for i in range(3))
            changes += [(f"where d{'qkv'[n]} goes", {"grads": mixed})]
    else:
        changes += [("where out goes", {"out": gpu.array((B, SQ, HQ, 2 * D))[..., :D]})]
    return [(name, lambda change=change: run(**base | change)) for name, change in changes]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_each_argument_asks_for_a_plan_of_its_own(gpu: Gpu, backward: bool) -> None:
    """And each finds it again, in any order."""
    made = calls(gpu, backward)
    first: dict[str, list[KernelPlan]] = {}

    def launched(call: Callable[[], Any]) -> list[KernelPlan]:
        before = len(gpu.launched)
        call()
        return [kernels for kernels, *_ in gpu.launched[before:]]

    for name, call in made:
        before = gpu.planned
        first[name] = launched(call)
        assert gpu.planned > before, f"{name}: what was planned for another call is taken"
    planned = gpu.planned
    for name, call in reversed(made):
        assert launched(call) == first[name], name
    assert gpu.planned == planned


# ---- programs: what a kernel is compiled from -----------------------------------------------------------------------


def plans() -> list[KernelPlan]:
    """Of the covering set, of every pass, with gradients of this array and of that."""
    tabled = problem("bfloat16", score=trace(
        lambda s, b, h, i, j, x, y: s + x[i] + y[j], {"x": ("float32", 1, False), "y": ("float32", 1, False)}
    ))  # fmt: skip
    found: list[KernelPlan] = []
    forms = [  # of arrays that differ in their dtype alone
        problem("bfloat16", dim=64, given=(Given(name, dtype, AXES if name == "bias" else ("head",)),))
        for name in ("bias", "sinks", "alibi_slopes")
        for dtype in ("bfloat16", "float32")
    ]
    forms += [problem("float16", dim=64, cache_dtype=dtype) for dtype in EIGHT]
    some = itertools.chain(
        forms, itertools.islice(problems(), 0, None, 5), itertools.islice(moving_problems(), 0, None, 3)
    )
    for one, arch in itertools.product([*some, tabled, problem("float32", score=SCORE)], ("sm_80", "sm_90a")):
        for of in (JVP, BACKWARD_JVP) if one.tangents else (FORWARD, BACKWARD):
            for family, room in FAMILIES.items():
                if room.objection(one, Arch.of(arch), of) is None:
                    found.append(plan(one, Arch.of(arch), of, family))
        if one.score and not one.tangents:
            keys = [x.key for x in one.score.arrays if x.kind == "float"]
            found += [plan(one, Arch.of(arch), BACKWARD, "simt", lengths={key: (64,)}) for key in keys]
    return found


CODE: dict[str, Any] = {  # fields of a plan that its program follows from, and another value
    "source": "simt/forward.cu", "arch": "sm_86", "dtype": "bfloat16", "out_dtype": "float32", "constants": (("A", 1),),
    "given": (Given("sinks", "float32", ("head",)),), "tangents": (Given("q", "", ()),), "score": SCORE,
    "wrt": ("bias",), "launches": (), "of": BACKWARD, "cache_dtype": "int8", "dq_dtype": "bfloat16",
    "workspace": (Workspace("shares", "float32", (1,)),), "scalars": (("other", 1),), "family": "simt",
}  # fmt: skip


def test_every_field_of_a_plan_is_of_its_program_or_of_a_launch() -> None:
    assert {*CODE, *programs.OF_A_LAUNCH} == {x.name for x in fields(KernelPlan)}


@pytest.mark.parametrize("field", [*CODE, "ordinal", "shared_memory"])
def test_each_field_asks_for_a_program_of_its_own(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, ordinal = plan(problem("float16"), Arch.of("sm_80"), FORWARD), 0
    monkeypatch.setattr(programs, "_loaded", {})
    monkeypatch.setattr(programs, "program", lambda plan: plan)
    monkeypatch.setattr(programs.compiler, "load", lambda *given: [given])
    other = replace(one, **{field: CODE[field]}) if field in CODE else one
    if field == "shared_memory":
        first, *rest = one.launches
        other = replace(one, launches=(replace(first, shared_memory=first.shared_memory + 16), *rest))
    assert programs.functions(one, 0) is programs.functions(replace(one, spills=one.spills + 1), 0)
    before = programs.functions(one, ordinal)
    assert programs.functions(other, ordinal + (field == "ordinal")) != before


def test_what_is_loaded_is_the_plans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_loaded", {})
    monkeypatch.setattr(programs, "program", generate)
    loaded: list[Any] = []

    def load(source: str, kernels: Any, ordinal: int) -> list[Any]:
        loaded.append([hash(source), kernels, ordinal])
        return loaded[-1]

    monkeypatch.setattr(programs.compiler, "load", load)
    some = plans()
    assert len(some) > 100
    for one, ordinal in itertools.product(some, (0, 1)):
        kernels = tuple((x.name, x.shared_memory) for x in one.launches)
        assert programs.functions(one, ordinal) == [hash(generate(one)), kernels, ordinal]
    assert len(loaded) > 100


# ---- score functions: what they are known by ------------------------------------------------------------------------

GLOBAL: Any = 1.0


def by_a_default(x: Any) -> Any:
    return lambda s, b, h, i, j, x=x: s * x


def by_a_default_of_a_helper(x: Any) -> Any:
    def helper(s: Any, x: Any = x) -> Any:
        return s * x

    return lambda s, b, h, i, j: helper(s)


def by_a_keyword(x: Any) -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any, *, x: Any = x) -> Any:
        return s * x

    return score


def by_a_closure(x: Any) -> Any:
    return lambda s, b, h, i, j: s * x


def by_a_closure_inside(x: Any) -> Any:
    return lambda s, b, h, i, j: next(s * y for y in (x,))


def by_a_tuple(x: Any) -> Any:
    held = (1, (2, x))
    return lambda s, b, h, i, j: s * held[1][1]


def by_a_global(x: Any) -> Any:
    globals()["GLOBAL"] = x
    return lambda s, b, h, i, j: s * GLOBAL


def by_a_global_inside(x: Any) -> Any:
    globals()["GLOBAL"] = x

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        def inner() -> Any:
            return s * GLOBAL

        return inner()

    return score


def by_a_global_two_inside(x: Any) -> Any:
    globals()["GLOBAL"] = x
    return lambda s, b, h, i, j: next(next(s * GLOBAL for _ in "1") for _ in "1")


def by_a_constant(x: Any) -> Any:
    return eval(f"lambda s, b, h, i, j: s * {x!r}")


@pytest.mark.parametrize("of", [
    by_a_default, by_a_default_of_a_helper, by_a_keyword, by_a_closure, by_a_closure_inside, by_a_tuple, by_a_global,
    by_a_global_inside, by_a_global_two_inside, by_a_constant,
])  # fmt: skip
def test_a_score_function_is_known_by_all_that_it_reads(of: Any) -> None:
    want = {x: trace(lambda s, b, h, i, j, x=x: s * x, {}) for x in (0.0, 1, 1.0, 2.0, 3.0)}
    for x in (1.0, 2.0, 0.0, 3.0, 2.0, 1):
        assert trace(of(x), {}) == want[x], x


@pytest.mark.parametrize("form", [("float32", 1, False), ("float64", 1, False), ("float32", 2, False), ("float32", 1,
    True), ("int32", 1, False)])  # fmt: skip
def test_a_score_function_is_known_by_its_arrays_too(form: tuple[str, int, bool]) -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any) -> Any:
        return s + (x[i] if form[1] == 1 else x[i, j])

    found = trace(score, {"x": form})
    assert [(x.dtype, x.rank, x.wide) for x in found.arrays] == [form]


# ---- PyTorch and JAX: what is kept of a call ------------------------------------------------------------------------


def changed_calls() -> list[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(5)
    arrays = {
        "bias": rng.standard_normal((2, 5, 7)).astype("f4"), "mask": rng.random((5, 7)) < 0.7,
        "key_mask": rng.random((1, 7)) < 0.7, "sinks": rng.standard_normal(2).astype("f4"),
        "alibi_slopes": rng.random(2).astype("f4"),
    }  # fmt: skip
    made: list[tuple[str, dict[str, Any]]] = [("nothing", {})]
    for name, values in CHANGED_OPTIONS.items():
        if name not in ("layout", "latent"):  # which takes no v (test_latent.py)
            made += [(f"{name} {x}", {name: x} | ({"seed": 3} if name == "dropout" else {})) for x in values]
    made += [("another seed", {"dropout": 0.2, "seed": 4})]
    made += [(name, {name: x}) for name, x in arrays.items()]
    return made


@pytest.mark.parametrize("library", ["torch traced", "jax", "jax traced"])
def test_each_argument_has_a_result_of_its_own(library: str) -> None:
    """As NumPy has it, one call after the other, and in the other order."""
    made = changed_calls()
    rng = np.random.default_rng(6)
    given = [rng.standard_normal((1, n, 2, 4)).astype("f4") for n in (5, 7, 7)]
    if library == "torch traced":
        torch = pytest.importorskip("torch")
        put, run = torch.from_numpy, lambda *x, **o: torch.func.vjp(lambda *x: attention(*x, **o), *x)[0]
    else:
        jax = pytest.importorskip("jax")
        put, run = jax.numpy.asarray, attention
        if library == "jax traced":
            run = lambda *x, **o: jax.jit(lambda *x: attention(*x, **o))(*x)
    placed = [put(x) for x in given]
    for name, change in (*made, *(made[::-1] if library == "jax" else ())):
        there = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in change.items()}
        expected = attention(*given, **change)
        np.testing.assert_allclose(np.asarray(run(*placed, **there)), expected, rtol=0, atol=1e-6, err_msg=name)
