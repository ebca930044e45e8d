"""The fuzzer: it is right about what is right, finds what is wrong, and can say it again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import float8_problems
import fuzz
import fuzz_lengths
import fuzz_runs
import fuzz_ways
import numpy as np
import pytest
import ragged
import semantics
from backends import CPU, Backend, apart, pairs
from criterion import ByLuck, as_good_as_rounding, assert_as_good, assert_mean_errors
from reference import DTYPES, Windows, draw, state, sum_over_visible

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import FLOATS, OPTIONS, AttentionProblem

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
    these = [*SMALL, "--library", "numpy", "--seed", "3"]
    assert fuzz.main([*these, "--problems", "36"]) == 1
    said = capsys.readouterr().out
    found = re.findall(r"--seed 3 --only (\d+:\d+): Kind\(.*softcap=True.*\n.*\n  AssertionError: dk is off by", said)
    assert found and f"{len(found)} wrong" in said.splitlines()[-1]
    assert fuzz.main([*these, "--only", found[0]]) == 1
    assert "dk is off by" in capsys.readouterr().out
    monkeypatch.undo()
    assert fuzz.main([*these, "--only", found[0]]) == 0
    assert capsys.readouterr().out.endswith("right\n")


def test_places_that_are_read_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key further on, where they are an array."""
    real = semantics.attention

    def wrong(*arrays: object, **options: Any) -> object:
        if isinstance(options["at"], np.ndarray):
            options["at"] = options["at"] + np.array([0, 0, 0, 1], options["at"].dtype)
        return real(*arrays, **options)

    monkeypatch.setattr(semantics, "attention", wrong)
    drawn = fuzz.draw_kind(np.random.default_rng(0), CPU, "float32", "numpy")
    plain = {"blocks": None, "few": None, "given": (), "dropout": False, "key_mask": False, "lengths": 0, "score": None}
    for at in ("numbers", "int32", "int64"):
        kind = dataclasses.replace(drawn, **plain, left=True, right=True, causal=True, dims=(64, 64), at=at)
        found = [fuzz.run_one(kind, (1, 0, n))[1] for n in range(6)]
        assert all(x is None or "AssertionError" in x for x in found)
        assert sum(x is not None for x in found) >= 4 if at != "numbers" else not any(found)


@pytest.mark.parametrize("lengths", [0, 7])
def test_values_of_other_columns_are_found(lengths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where V is the first columns of K."""
    drawn = fuzz.draw_kind(np.random.default_rng(0), CPU, "float32", "numpy")
    plain = {"blocks": None, "few": None, "given": (), "causal": False, "left": False, "right": False, "at": None}
    kind = dataclasses.replace(drawn, **plain, score=None, lengths=lengths, dropout=False, latent=(40, 24))
    assert not any(fuzz.run_one(kind, (1, 0, n))[1] for n in range(6))
    for module in (semantics, ragged):
        real = module.attention
        monkeypatch.setattr(module, "attention", lambda q, k, real=real, **options: real(q, k[..., ::-1], **options))
    found = [fuzz.run_one(kind, (1, 0, n))[1] for n in range(6)]
    assert sum("AssertionError" in (x or "") for x in found) >= 4


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
    assert [list(numbers) for numbers in fuzz_runs.spread(7, [1, 1, 1])] == [[0, 1], [0, 1, 2], [0, 1]]
    assert [len(numbers) for numbers in fuzz_runs.spread(41, [1, 0.05, 1])] == [20, 1, 20]


def test_the_last_kinds_are_cut_into_portions() -> None:
    """Each problem once; the first portion of every kind before the second of any."""
    work = [fuzz_runs.Work(None, k, range(size), []) for k, size in enumerate((40, 30, 100, 5))]
    cut = fuzz_runs.in_portions(work, 2)
    assert cut[:2] == work[:2] and [x.kind for x in cut[2:5]] == [2, 2, 3]
    for kind in work:
        assert [n for x in cut if x.kind == kind.kind for n in x.numbers] == [*kind.numbers]
    assert fuzz_runs.in_portions(work, 1) == work and max(len(x.numbers) for x in fuzz_runs.in_portions(work, 9)) == 13


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


def test_runs_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the same sources they go on where the one before ended, whoever ended it; and say so."""
    path = tmp_path / "runs.json"
    these = ["--cpu", "--jobs", "1", "--library", "numpy", "--go-on", "--record", str(path)]
    asked = []

    def one(kind: fuzz.Kind, seed: tuple[int, ...]) -> tuple[str, None]:
        asked.append(seed)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return "", None

    monkeypatch.setattr(fuzz, "run_one", one)
    now = iter(range(100))
    assert fuzz.main([*these, "--problems", "6", "--kinds", "3"]) == 0
    (first,) = json.loads(path.read_text())
    assert (first["problems"], first["from"], first["to"]) == (4, 0, 3)  # two of three kinds, and one who knows
    monkeypatch.setattr(fuzz.time, "time", lambda: next(now))
    assert fuzz.main([*these, "--problems", "10", "--kinds", "3", "--seconds", "3.5"]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(fuzz, "run_one", one)
    assert fuzz.main([*these, "--problems", "10", "--kinds", "2"]) == 0
    runs = json.loads(path.read_text())
    assert [(run["from"], run["to"]) for run in runs] == [(0, 3), (3, 5), (5, 7)]
    assert len({run["seed"] for run in runs}) == 1 and sum(run["problems"] for run in runs) == 10
    assert len({*asked}) == len(asked) == 11
    assert "these sources: 10 problems in 3 runs, 0 wrong" in capsys.readouterr().out
    assert fuzz.main([*these, "--problems", "10"]) == 0 and len(json.loads(path.read_text())) == 3
    runs[-1]["sources"] = "others"
    path.write_text(json.dumps(runs))
    assert fuzz.main([*these, "--problems", "8", "--kinds", "1"]) == 0
    assert json.loads(path.read_text())[-1]["from"] == 5


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for n in range(5):
        numbers.put(n)
    for visible, names in ((None, "01201"), ("3,5,7", "35735")):
        taken = []
        for _ in range(5):
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            fuzz_runs.take_a_gpu(numbers, 3)
            taken.append(os.environ["CUDA_VISIBLE_DEVICES"])
        assert "".join(taken) == names


def test_normal_numbers_are_pieces_of_a_table() -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for shape in ((300, 1000), (3, 500, 1000)):
            x = draw(Windows((1, 2)), dtype, *shape)
            assert x.shape == shape and x.dtype == DTYPES[dtype]
            of = x.astype(np.float64)
            assert abs(of.mean()) < 0.02 and abs(of.std() - 1) < 0.02
            assert np.array_equal(x, draw(Windows((1, 2)), dtype, *shape))
            assert not np.array_equal(x, draw(Windows((1, 3)), dtype, *shape))
    rng = Windows((5,))
    pieces = [{*rng.of("float64", (2000,)).tolist()} for _ in range(200)]  # of one table some would overlap
    assert not any(x & y for n, x in enumerate(pieces) for y in pieces[n + 1 : n + Windows.TABLES])
    x = Windows((4,)).standard_normal((3, 2))
    x[...] = 0  # a copy
    assert Windows((4,)).standard_normal((3, 2)).all()


def test_a_number_alone_is_as_good_as_rounding() -> None:
    """Of an array without axes."""
    exact = np.array(-9.42375572)
    assert as_good_as_rounding(exact.astype(np.float16), exact)
    assert not as_good_as_rounding(np.array(-9.5, np.float16), exact)


@pytest.mark.parametrize("finite", [True, False])
def test_sums_over_what_is_visible(finite: bool, rng: np.random.Generator) -> None:
    """As term by term, whatever is not finite."""
    for _ in range(100):
        batch, heads, queries, keys, dim = rng.integers(1, 5, 5)
        weights = rng.choice([0, 1, -2, 0.5], (batch, heads, queries, keys))
        x = rng.choice(
            [1, 2, -3, np.inf, -np.inf, np.nan], (batch, heads, keys, dim), p=[0.4, 0.3, 0.15, 0.05, 0.05, 0.05]
        )
        seen = rng.random((batch, 1, queries, keys)) < 0.6
        x[0, 0, 0, 0] = np.inf
        if not finite:
            weights[rng.random(weights.shape) < 0.2] = rng.choice([np.inf, np.nan])
        found = np.zeros((batch, heads, queries, dim))
        with np.errstate(invalid="ignore"):
            for b, h, i, j in np.argwhere(np.broadcast_to(seen, weights.shape)):
                found[b, h, i] += weights[b, h, i, j] * x[b, h, j]
            assert np.array_equal(sum_over_visible(weights, seen, x), found, equal_nan=True)


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


def test_what_tensor_cores_leave_out_of_8_bits(rng: np.random.Generator) -> None:
    """All that is beyond 13 bits of the largest in a sum of 32 products and what was there before. That adds up where a
    key is its query, so that no product is negative; elsewhere little is allowed.
    """
    drawn = semantics.draw_inputs(rng, "float32", batch=20, seq=(40, 20), heads=(1, 1), dims=(256, 16))
    drawn.k[...] = drawn.q[:, :20]
    x = float8_problems.quantize(rng, *drawn[:3])
    judge = float8_problems.Judge(x, None, {}, "bfloat16", 1.0, True, {})
    judge.reckon()
    q, k, v = (a[:, :, 0].astype(np.float64) for a in x.meant())
    sums = np.zeros((20, 40, 20, 1))
    for n in range(0, 256, 32):
        terms = np.concatenate([q[:, :, None, n : n + 32] * k[:, None, :, n : n + 32], sums], -1)
        unit = 2.0 ** (np.floor(np.log2(np.abs(terms).max(-1, keepdims=True))) - 13)
        sums = (np.trunc(terms / unit) * unit).sum(-1, keepdims=True)
    weights = np.exp(sums[..., 0] / 16)
    lse = np.log(weights.sum(-1)).astype(np.float32)[:, None]
    out = (weights @ v / weights.sum(-1, keepdims=True)).astype(float8_problems.RESULTS["bfloat16"])[:, :, None]
    judge(out, lse)
    for row, off in ((30, 0.03), (10, 0.3)):
        wrong = lse.copy()
        wrong[:, :, row] += off
        with pytest.raises(AssertionError, match="lse is off"):
            judge(out, wrong)


GPU_PAIRS = [(backend, dtype) for backend, dtype in pairs() if backend.family]


@pytest.mark.parametrize(("backend", "dtype"), GPU_PAIRS, ids=[f"{b.name}-{d}" for b, d in GPU_PAIRS])
def test_a_kind_is_what_kernels_are_compiled_with(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """A forward and a backward, however many problems: else a million of them would take days.

    Of each another one where sizes decide it: short sequences in both passes, and keys, or key tiles, that thread
    blocks share (`sms` decides that, too); in sm80 dead queries, or dead keys, before the live ones.
    """
    arch = Arch.of("sm_90a")
    for _ in range(4):
        kind = fuzz.draw_kind(rng, backend, dtype, "cupy")
        sources = set()
        for seed in rng.integers(2**32, size=8):
            inputs, options, _ = fuzz.draw_problem(np.random.default_rng(int(seed)), kind)
            options["block_mask"] = options["blocks"].mask() if kind.blocks is not None else None
            placed = options.get("placed")
            options = {row.name: options.get(row.name, row.default) for row in OPTIONS if row.name != "layout"}
            options["at"] = np.array(options["at"], placed) if placed else options["at"]
            problem = state(*inputs[:3], inputs.key_mask, **options, **inputs.given)
            family = backend.family_for(problem)
            sources |= {
                generate(plan(problem, arch, of, family)) for of in ((FORWARD,) if kind.latent else (FORWARD, BACKWARD))
            }
        assert 2 - bool(kind.latent) <= len(sources) <= 2 + {"sm90": 5, "sm80": 8}.get(backend.family or "", 0), kind


@pytest.mark.parametrize("family", ["sm90", "sm80", "simt"])
def test_nor_do_lengths_make_it_more(family: str, rng: np.random.Generator) -> None:
    arch, on = Arch.of("sm_90a"), Backend(family, family)
    for _ in range(8):
        drawn = fuzz.draw_kind(rng, on, "float16", "cupy")
        kind = dataclasses.replace(drawn, lengths=int(rng.integers(1, 1000)))
        sources = set()
        for seed in rng.integers(2**32, size=8):
            case, _, _ = fuzz_lengths.draw(np.random.default_rng(int(seed)), kind, kind.latent or kind.dims)
            problem, named = fuzz_lengths.problem_of(case), fuzz_lengths.family_for(case, family)
            if problem.empty:
                continue
            sources.add(generate(plan(problem, arch, FORWARD, named)))
            if problem.page is None and not kind.latent:
                sources.add(generate(plan(problem, arch, BACKWARD, named if named in ("sm80", "simt") else None)))
        assert len(sources) <= 8, kind


def test_tiles_that_were_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each family has another one, of which classes of calls that were planned before know."""
    asked: list[dict[str, tuple[int, ...]]] = []
    problem, arch = AttentionProblem("float16", 1, 300, 300, 4, 4, 64, 64, 0.125), Arch.of("sm_90a")
    forgotten = []
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupyflash.gpu.corridor.forget", lambda: forgotten.append(1))
    real = fuzz_ways.tuned.tiles
    for number in (0, 7, 7, 8, 0):
        with fuzz_ways.with_tiles(number):
            asked.append(dict(fuzz_ways.tuned.tiles(problem, arch, FORWARD)))
        assert fuzz_ways.tuned.tiles is real
    assert not asked[0] and not asked[4] and asked[1] == asked[2] != asked[3] and len(forgotten) == 3
    own = plan(problem, arch, FORWARD, "sm80").constants
    found = {
        plan(problem, arch, FORWARD, "sm80", fuzz_ways.tiles_of(n, problem, arch, FORWARD)).constants
        for n in range(1, 40)
    }
    assert len(found - {own}) > 5


class Stream:
    """As CuPy's, on NumPy: what is captured runs once more."""

    replayed: list[Callable[[], object]]

    def __init__(self, **_: object) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin_capture(self) -> None:
        Stream.replayed = []

    def end_capture(self) -> Stream:
        self.captured = Stream.replayed[:]
        return self

    def launch(self, stream: Stream) -> None:
        for call in self.captured:
            call()

    def synchronize(self) -> None: ...


class Graphs(Backend):
    @property
    def xp(self) -> Any:
        return SimpleNamespace(cuda=SimpleNamespace(Stream=Stream, get_current_stream=Stream))

    def put(self, a: np.ndarray) -> np.ndarray:
        return np.array(a)

    def nan(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return CPU.nan(shape, dtype)

    def get_all(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [x.copy() for x in arrays]


@pytest.mark.parametrize("stale", [False, True])
def test_what_a_graph_does_not_write_is_seen(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.replayed = []

    def call(real: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        if not (stale and options.get("grads")):
            Stream.replayed.append(lambda: real(*arrays, **options))
        return real(*arrays, **options)

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(fuzz_ways, name, functools.partial(call, getattr(fuzz_ways, name)))
    drawn = dataclasses.replace(
        fuzz.draw_kind(np.random.default_rng(0), CPU, "float32", "numpy"), blocks=None, few=None
    )
    kind = dataclasses.replace(drawn, deterministic=True, dropout=False, given=())
    inputs, options, _ = fuzz.draw_problem(Windows((3,)), kind)
    options["rank"] = 4
    with pytest.raises(AssertionError, match="other bits") if stale else contextlib.nullcontext():
        fuzz_ways.check_graph(Graphs("cpu"), inputs, options)


def test_what_rounding_out_costs_where_dropout_leaves_one_key() -> None:
    """rowsum(dO * O) has the rounding of O, which V over what is kept is not, and standard attention gives 0: gradients
    of FlashAttention-2's algorithm are as good as that, and three times as far off is luck; further is wrong."""
    how: dict[str, Any] = {"dtype": "float16", "form_q": "dense", "heads": (3, 1), "dims": (70, 168)}
    case = ragged.draw_case(
        np.random.default_rng(0), [1] * 17, [0, *[1] * 16], given=("seed",), options={"dropout": 0.485}, **how
    )
    exact = ragged.expected(case, False, True)
    found = ragged.expected(case, True, True, compute=ragged.published)
    own = ragged.expected(case, True, True)["dq"]
    assert np.abs(found["dq"] - exact["dq"]).max() > 3 * np.abs(own - exact["dq"]).max()
    dtypes = {name: case.arrays["q"].dtype for name in ("out", "dq", "dk", "dv")}
    found = {name: x.astype(dtypes.get(name, np.float32)) for name, x in found.items()}
    for times, how_far in ((1, None), (2.5, ByLuck), (4, AssertionError)):
        dq = (exact["dq"] + times * (found["dq"] - exact["dq"])).astype(np.float16)
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("error")
            if how_far:
                stack.enter_context(pytest.raises(how_far))
            ragged.judge(case, found | {"dq": dq}, True)


def test_the_mean_of_heads_where_one_key_is_seen(rng: np.random.Generator) -> None:
    """Two sums of products in float32 differ by what these are large."""
    inputs = semantics.draw_inputs(rng, "float32", batch=1, seq=(40, 1), heads=(1, 1), dims=(256, 256))
    inputs = inputs._replace(**{name: 8 * getattr(inputs, name) for name in ("q", "k", "v", "dout")})
    judge = semantics.Judge(inputs, {}, True, large_scores=False, thorough=True)
    dq = np.full(inputs.q.shape, 0.5e-5 * judge.units["dq"], np.float32)
    judge("dq", dq)
    with pytest.raises(AssertionError, match="dq is off by .* in the mean"):
        judge("dq", 4 * dq)


def test_the_mean_of_heads_whose_last_queries_alone_see_keys(rng: np.random.Generator) -> None:
    """Rows of 0 make a mean of few numbers no surer; where results are not 0 there, they count."""
    exact = rng.standard_normal((1, 90, 2, 229))
    exact[:, :80] = 0
    off = 1e-2 * rng.standard_normal(exact.shape) * (exact != 0)
    assert_mean_errors((exact + 3 * off).astype(np.float16), exact, exact + off, "dq")
    for actual in (exact + 1e-2 * rng.standard_normal(exact.shape), exact + 3e-2):
        with pytest.raises(AssertionError, match="dq is off by .* in the mean"):
            assert_mean_errors(actual.astype(np.float16), exact, exact + 1e-3 * off, "dq")
