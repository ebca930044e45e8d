"""The list of tests/memcheck.py: it has everything, and runs as far as that is possible without a GPU."""

from __future__ import annotations

import itertools

import memcheck
import pytest
from backends import CPU, Backend
from float8_problems import BY

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES
from cupyflash.passes import FORWARD
from cupyflash.problem import ARRAYS, FLOAT8, FLOATS, OF_FLOAT8, OPTIONS, AttentionProblem

GPU = [Backend(name, name) for name in FAMILIES]


def test_every_option_and_array_has_a_problem_of_its_own() -> None:
    """But for those of which there is no backward: for inputs of 8 bits (tests/test_float8.py), latent
    (tests/test_latent_on_gpu.py)."""
    elsewhere = ("at", "out_dtype", "out_scale", "max_seqlen_q", "max_seqlen_k", "batch_invariant", "sms", "latent")
    for row in OPTIONS:
        if row.name in elsewhere:
            continue
        assert [row.name] in map(options, memcheck.KINDS.values()), row.name
    for row in [row for row in ARRAYS if not (row.of_float8 or row.ragged or row.placed)]:
        assert [row.name] in map(arrays, memcheck.KINDS.values()), row.name
        assert sum(row.name in arrays(kind) for kind in memcheck.KINDS.values()) >= 4, row.name


def test_8_bits_have_every_scale_result_and_dimension() -> None:
    given = [kind.options for kind in memcheck.KINDS_8.values()]
    assert {x.get("by") for x in given} == set(BY) and {x.get("result", "bfloat16") for x in given} == set(OF_FLOAT8)
    for backend in GPU:
        own = [x for x in memcheck.problems([backend]) if x.dtype == FLOAT8]
        assert {x.kind for x in own} == ({*memcheck.KINDS_8} if backend.family == "sm90" else set())
        assert {x.dims for x in own} == (set(memcheck.DIMS) if own else set())
        assert not any(x.objection(*x.draw(), Arch.of("sm_90a")) for x in own)


def options(kind: memcheck.Kind) -> list[str]:
    return [*kind.options, *["block_mask"] * (kind.blocks is not None)]


def arrays(kind: memcheck.Kind) -> list[str]:
    return [*kind.shapes.get("given", ()), *["key_mask"] * kind.shapes.get("key_mask", False)]


def test_every_family_has_every_dtype_kind_and_dimension() -> None:
    every = list(memcheck.problems(GPU))
    assert len(set(map(str, every))) == len(every)
    for backend in GPU:
        for dtype in FLOATS:
            own = [x for x in every if (x.backend, x.dtype) == (backend, dtype)]
            if backend.takes(dtype, 64, 64):
                assert {x.kind for x in own} == {*memcheck.KINDS}
                assert {x.dims for x in own} == {dims for dims in memcheck.DIMS if backend.takes(dtype, *dims)}
            else:
                assert not own


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_is_left_out_says_why(arch: str) -> None:
    """flash1 takes little; others all but what has no room, and that alone."""
    arch = Arch.of(arch)
    taken = [
        x
        for x in GPU
        if FAMILIES[x.family].objection(AttentionProblem("float16", 1, 1, 1, 1, 1, 64, 64, 1.0), arch, FORWARD) is None
    ]
    for problem in memcheck.problems(taken):
        if problem.dtype == "float16":
            why = problem.objection(*problem.draw(), arch)
            expected = (
                problem.backend.name == "flash1" and ("takes no" in why or "head dimensions up to" in why)
                if why
                else True
            )
            assert expected or "no shared memory" in why or "differs between keys" in why, (problem, why)


def test_the_parts_are_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(part: str) -> list[str]:
        assert memcheck.main(["--cpu", "--list", "--part", part]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1].startswith(f"part {part}: {len(lines) - 1} problems, 0 left out, 0 wrong")
        return [line.split(":")[0] for line in lines[:-1]]

    parts = [listed(f"{n}/4") for n in (1, 2, 3, 4)]
    assert sorted(itertools.chain(*parts)) == sorted(listed("1/1")) == sorted(str(x) for x in memcheck.problems([CPU]))
    with pytest.raises(SystemExit):
        memcheck.main(["--cpu", "--part", "5/4"])


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", x) for x in memcheck.KINDS] + [(FLOAT8, x) for x in memcheck.KINDS_8]
)
def test_kinds_run(dtype: str, kind: str) -> None:
    (problem,) = (x for x in memcheck.problems([CPU]) if (x.kind, x.dtype) == (kind, dtype))
    assert memcheck.run(problem, Arch.of("sm_90a")) == "right"


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def check(*_: object, **__: object) -> None:
        raise AssertionError("out is off by 1")

    monkeypatch.setattr(memcheck, "check", check)
    assert memcheck.main(["--cpu", "--only", "nothing", "--dtype", "float32"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "nothing: WRONG: out is off by 1" in lines[0] and "1 problems, 0 left out, 1 wrong" in lines[1]
