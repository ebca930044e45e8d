"""The fuzzer: it is right about what is right, finds what is wrong, and can say it again."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import float8_problems
import fuzz
import numpy as np
import pytest
import semantics
from backends import Backend, apart, pairs
from criterion import ByLuck, as_good_as_rounding, assert_as_good
from reference import DTYPES, state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import FLOATS, OPTIONS

SMALL = ["--cpu", "--jobs", "1", "--kinds", "12"]


def test_every_library_is_right(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for seed in ("1", "2"):
        assert fuzz.main([*SMALL, "--problems", "30", "--seed", seed, "--record", str(path)]) == 0
    first, second = json.loads(path.read_text())
    assert (first["seed"], second["seed"]) == (1, 2) and first["gpu"] is None and not first["wrong"]
    for run in (first, second):
        assert run["problems"] == sum(run["counts"].values()) == 30
    seen = {name.split("/")[2] for name in (*first["counts"], *second["counts"])}
    assert seen == set(fuzz.libraries(False))


def test_what_is_wrong_is_found_and_found_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = semantics.attention_backward

    def wrong(*arrays: object, **options: object) -> object:
        grads = real(*arrays, **options)
        if options["softcap"]:
            grads.dk[...] *= grads.dk.dtype.type(1.1)
        return grads

    monkeypatch.setattr(semantics, "attention_backward", wrong)
    these = [*SMALL, "--library", "numpy", "--seed", "4"]
    assert fuzz.main([*these, "--problems", "36"]) == 1
    said = capsys.readouterr().out
    found = re.findall(r"--seed 4 --only (\d+:\d+): Kind\(.*softcap=True.*\n.*\n  AssertionError: dk is off by", said)
    assert found and f"{len(found)} wrong" in said.splitlines()[-1]
    assert fuzz.main([*these, "--only", found[0]]) == 1
    assert "dk is off by" in capsys.readouterr().out
    monkeypatch.undo()
    assert fuzz.main([*these, "--only", found[0]]) == 0
    assert capsys.readouterr().out.endswith("right\n")


def test_more_misses_than_luck_explains_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missed(*_: object, **__: object) -> None:
        warnings.warn("off by little", ByLuck, stacklevel=1)

    monkeypatch.setattr(fuzz, "run_cupy_or_numpy", missed)
    monkeypatch.setattr(fuzz, "run_ragged", lambda *_: ("", missed()))
    these = ["--cpu", "--jobs", "1", "--kinds", "1", "--library", "numpy", "--dtype", "float32"]
    assert fuzz.main([*these, "--problems", "3"]) == 0
    assert fuzz.main([*these, "--problems", "4"]) == 1
    assert "4 results missed the criterion by little: luck explains 3" in capsys.readouterr().out


def test_processes_share_the_kinds_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--cpu", "--jobs", "2", "--kinds", "3", "--problems", "7", "--library", "numpy"]) == 0
    assert "7 problems of 3 kinds, 0 wrong" in capsys.readouterr().out
    assert [list(numbers) for _, numbers in fuzz.spread(7, [1, 1, 1])] == [[0, 1], [0, 1, 2], [0, 1]]
    assert [len(numbers) for _, numbers in fuzz.spread(41, [1, 0.05, 1])] == [20, 1, 20]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_as_good_as_rounding_is_as_good(dtype: str, rng: np.random.Generator) -> None:
    """Whatever own precision does: here it errs nowhere."""
    passed = 0
    for _ in range(500):
        exact = rng.standard_normal((3, 5)) * 10.0 ** rng.integers(-6, 6)
        if rng.random() < 0.3:
            exact[rng.random((3, 5)) < 0.2] = rng.choice([np.inf, -np.inf, np.nan])
        with np.errstate(all="ignore"):
            actual = (exact + rng.standard_normal((3, 5)) * 10.0 ** rng.integers(-14, 3)).astype(DTYPES[dtype])
        if rng.random() < 0.1:
            actual[0, 0] = rng.choice([np.inf, -np.inf, np.nan])
        if as_good_as_rounding(actual, exact):
            passed += 1
            assert_as_good(actual, exact, exact, luck=False)
    assert 50 < passed < 450


def test_normal_numbers_are_drawn_from_a_table() -> None:
    for dtype in ("float32", "float64"):
        x = fuzz.Drawn((1, 2)).standard_normal((300, 1000), dtype)
        assert x.dtype == dtype and abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
        assert np.array_equal(x, fuzz.Drawn((1, 2)).standard_normal((300, 1000), dtype))
        assert not np.array_equal(x, fuzz.Drawn((1, 3)).standard_normal((300, 1000), dtype))


def test_arrays_come_back_in_one_piece() -> None:
    arrays = [np.ones(3, x) for x in ("float8_e4m3fn", "float32", "bfloat16")] + [np.array(2.0), np.ones((0, 2), "i4")]
    found = apart(np.concatenate([x.reshape(-1).view(np.uint8) for x in arrays]), [(x.shape, x.dtype) for x in arrays])
    for x, y in zip(arrays, found):
        assert np.array_equal(x, y) and x.dtype == y.dtype and y.flags.aligned


def test_8_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    these = [*SMALL, "--dtype", "float8_e4m3fn", "--seed", "3", "--problems", "24"]
    assert fuzz.main(these) == 0
    real = float8_problems.attention

    def wrong(*arrays: object, **options: object) -> object:
        out, lse = real(*arrays, **options)
        return out, lse + 0.01 * (options["causal"] is True)

    monkeypatch.setattr(float8_problems, "attention", wrong)
    assert fuzz.main([*these, "--library", "numpy"]) == 1
    assert re.search(r"Kind\(.*causal=True.*by=.*\n.*\n  AssertionError", capsys.readouterr().out)


GPU_PAIRS = [(backend, dtype) for backend, dtype in pairs() if backend.family]


@pytest.mark.parametrize(("backend", "dtype"), GPU_PAIRS, ids=[f"{b.name}-{d}" for b, d in GPU_PAIRS])
def test_a_kind_is_what_kernels_are_compiled_with(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """A forward and a backward, however many problems: else a million of them would take days.

    Of each another one where sizes decide it: short sequences in both passes, and keys, or key tiles, that thread
    blocks share; in sm80 dead queries, or dead keys, before the live ones.
    """
    arch = Arch.of("sm_90a")
    for _ in range(4):
        kind = fuzz.draw_kind(rng, backend, dtype, "cupy")
        sources = set()
        for seed in rng.integers(2**32, size=8):
            inputs, options, _ = fuzz.draw_problem(np.random.default_rng(int(seed)), kind)
            options["block_mask"] = options["blocks"].mask() if kind.blocks is not None else None
            options = {row.name: options.get(row.name, row.default) for row in OPTIONS if row.name != "layout"}
            problem = state(*inputs[:3], inputs.key_mask, **options, **inputs.given)
            family = backend.family_for(problem)
            sources |= {generate(plan(problem, arch, backward, family)) for backward in (FORWARD, BACKWARD)}
        assert 2 <= len(sources) <= 2 + {"sm90": 4, "sm80": 5}.get(backend.family or "", 0), kind
