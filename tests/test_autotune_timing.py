"""How a tuned tile wins: it is timed, judged and stored."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_autotune
from kernel_cover import problem
from test_autotune import A100, H200, SHAPE, TUNED, entry

import cupyflash
from cupyflash.call import Call
from cupyflash.gpu import device, tuned
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, Pass
from cupyflash.problem import complete
from cupyflash.tools import autotune, precompile
from cupyflash.tools.autotune import candidates

FAST = (64, 96, 4, 1, 2, 2)

clock, store = test_autotune.clock, test_autotune.store


def test_the_fastest_right_one_is_stored(clock: SimpleNamespace, store: Path) -> None:
    faster, fastest = (64, 64, 4, 1, 2, 2), (128, 64, 4, 1, 2, 2)
    times = {FAST: 0.5e-3, faster: 0.1e-3, fastest: 0.05e-3}
    clock.seconds = lambda tile: times.get(tile, 1e-3)
    clock.spills, clock.wrong, clock.stop = {faster}, {fastest: [0.1]}, 0
    steps = []
    result = cupyflash.tune(SHAPE, dtype="float16", progress=lambda *step: steps.append(step))
    assert result.family == "sm80" and result.best.tile == FAST and result.gain == pytest.approx(2)
    assert result.trials[0].tile == () and result.trials[1] is result.best
    notes = {trial.tile: trial.note for trial in result.trials}
    assert notes[faster] == "spills 9999 bytes" and notes[fastest] == "wrong: differs by 1.0e-01 from simt"
    assert sum(note == "does not compile: static assertion failed" for note in notes.values()) == 1
    assert [trial.seconds for trial in result.trials if trial.note] == [None] * 3
    assert {what for what, *_ in steps} == {"compile", "check", "time"} and steps[-1][1] == steps[-1][2]
    (found,) = tuned.stored().entries
    assert found == dataclasses.replace(entry(FAST), ms=0.5, table_ms=1.0, date=found.date) and found.date
    assert result.path == str(store) and clock.forgotten == 1
    assert tuned.tiles(problem("float16"), A100, FORWARD) == {"sm80": FAST}


@pytest.mark.parametrize(
    "errors", [[np.nan], [0.0, np.nan], [np.nan, 0.0], [0.0, np.nan, 0.5], [0.0, np.inf], [0.5, 0.0]]
)
def test_a_wrong_tile_wins_never(clock: SimpleNamespace, errors: list[float]) -> None:
    """Wherever among its results NaN stands."""
    clock.seconds = lambda tile: 0.5e-3 if tile == FAST else 1e-3
    clock.wrong = {FAST: errors}
    result = cupyflash.tune(SHAPE, dtype="float16", store=False)
    assert result.best is result.trials[0]
    (found,) = (trial for trial in result.trials if trial.tile == FAST)
    assert found.seconds is None and found.note.startswith("wrong: differs by ")
    assert ("nan" in found.note) == any(np.isnan(errors))


@pytest.mark.parametrize("kernels", [(9999, 0), (0, 9999), (0, 16, 9999)], ids=str)
def test_one_kernel_that_spills_is_enough(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kernels: tuple[int, ...]
) -> None:
    make = autotune.compile_all

    def several(jobs):
        for done in make(jobs):
            (one,) = done.compiled.resources.values()
            of_each = {n: SimpleNamespace(spill_stores=0, spill_loads=min(one.spill_stores, n)) for n in kernels}
            done.compiled.resources = of_each
            yield done

    monkeypatch.setattr(autotune, "compile_all", several)
    clock.spills = {FAST}
    result = cupyflash.tune(SHAPE, dtype="float16", store=False)
    assert [trial.tile for trial in result.trials if trial.note == "spills 9999 bytes"] == [FAST]


@pytest.mark.parametrize(
    "of, dim, own, most", [(BACKWARD, 64, 200, 200), (BACKWARD_JVP, 64, 264, 352), (FORWARD, 384, 0, 168)], ids=str
)
def test_what_may_be_spilled_is_of_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch, of: Pass, dim: int, own: int, most: int
) -> None:
    """Where the table's own tile is of others, a row of the table says it."""
    asked = test_autotune.asked_of(of, dim, seq_q=4096, seq_k=4096)
    trials = list(candidates(asked, H200, of, "sm90"))
    assert trials[0].plan.spills == own and (trials[0].plan.source == trials[1].plan.source) == (own == most)

    def notes(spilled: int) -> set[str]:
        used = {"all": SimpleNamespace(spill_stores=spilled, spill_loads=0)}
        compiled = SimpleNamespace(resources=used, log="")
        done = (SimpleNamespace(job=precompile.Job(asked, of, x.plan), compiled=compiled, error=None) for x in trials)
        monkeypatch.setattr(autotune, "compile_all", lambda jobs: done)
        return {x.note for x in autotune._compiled(asked, of, trials, lambda *_: None) if x.tile}

    assert notes(most) == {""} and notes(most + 4) == {f"spills {most + 4} bytes"}


@pytest.mark.parametrize("errors", [[np.nan, 0.0], [0.5]])
def test_the_tables_own_tile_is_judged_too(clock: SimpleNamespace, store: Path, errors: list[float]) -> None:
    """And is not the measure of the others."""
    own = dict(next(candidates(problem("float16"), A100, FORWARD, None)).plan.constants)
    tile = tuple(own[name] for name in ("ROWS", "KEYS", "WARPS", "COLUMN_WARPS", "STAGES", "MIN_BLOCKS"))
    clock.wrong = {tile: errors}
    with pytest.raises(RuntimeError, match="the table's own tile cannot be timed: wrong: differs by .* from simt"):
        cupyflash.tune(SHAPE, dtype="float16")
    assert not store.exists()


@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
def test_who_judges(of: Pass) -> None:
    """Another family, or the CPU."""
    half = problem("float16")
    for family, arch, judge in (
        ("sm90", H200, "simt"), ("sm80", H200, "simt"), ("sm80", A100, "simt"), ("flash1", A100, "simt"),
        ("simt", A100, "sm80"), ("simt", Arch.of("sm_75"), None),
    ):  # fmt: skip
        assert autotune.judge_of(half, family, arch, of) == judge


@pytest.mark.parametrize("of", [FORWARD, BACKWARD])
def test_the_measure_of_the_cpu(of: Pass, rng: np.random.Generator) -> None:
    from cupyflash.cpu import corridor
    from cupyflash.interop import numpy_

    q, k, v, dout = (rng.standard_normal((1, 9, 2, 8), "float32") for _ in range(4))
    bias = rng.standard_normal((9, 9), "float32")
    arrays = {"q": q, "k": k, "v": v, "bias": bias, **({"dout": dout} if of is BACKWARD else {})}
    options = complete({"causal": True, "layout": "bshd"})
    expected, made = autotune.measure(corridor, Call(numpy_, of, arrays, options))
    out, lse = cupyflash.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    if of is BACKWARD:
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, bias=bias, causal=True)
        assert autotune.difference(made["out"], out) == autotune.difference(made["lse"], lse) == 0
        assert expected.keys() == {"dq", "dk", "dv"}
        for name, x in expected.items():
            assert autotune.difference(x, getattr(grads, name)) < 1e-6
    else:
        assert expected.keys() == {"out"} and not made and autotune.difference(expected["out"], out) == 0


def test_the_table_keeps_its_place_within_the_noise(clock: SimpleNamespace, store: Path) -> None:
    clock.seconds = lambda tile: 0.995e-3 if tile == FAST else 1e-3
    result = cupyflash.tune(SHAPE, dtype="float16")
    assert result.best is result.trials[0] and result.path is None and not store.exists() and result.gain == 1
    tuned.replace([entry(FAST)], [])  # what won once does no more
    assert cupyflash.tune(SHAPE, dtype="float16").path == str(store)
    assert tuned.stored().entries == ()


def test_nothing_is_stored_unasked(clock: SimpleNamespace, store: Path) -> None:
    clock.seconds = lambda tile: 0.5e-3 if tile == FAST else 1e-3
    assert cupyflash.tune(SHAPE, dtype="float16", store=False).best.tile == FAST
    assert not store.exists() and clock.forgotten == 0

    def interrupt(tile):
        raise KeyboardInterrupt

    clock.seconds = interrupt
    with pytest.raises(KeyboardInterrupt):
        cupyflash.tune(SHAPE, dtype="float16")
    assert not store.exists()


def test_where_the_tables_own_fails_nothing_is_known(clock: SimpleNamespace, store: Path) -> None:
    def broken(tile):
        raise RuntimeError("illegal address")

    clock.seconds = broken
    with pytest.raises(RuntimeError, match="the table's own tile cannot be timed: RuntimeError: illegal address"):
        cupyflash.tune(SHAPE, dtype="float16")
    assert not store.exists()


def test_an_interrupt_cancels_what_is_not_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cancelled = [], threading.Event()

    class Pool(precompile.ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(False, cancel_futures=cancel_futures)
            cancelled.set()
            super().shutdown(wait)

    def work(job: int) -> None:
        started.append(job)
        if job > 1:
            assert cancelled.wait(60)

    monkeypatch.setattr(precompile, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(precompile, "_compile", work)
    done = precompile.compile_all(range(1000))
    next(done), next(done)
    done.close()
    assert len(started) <= 2 + (os.cpu_count() or 1)


def test_messages(clock: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="no score, so nothing to tune"):
        cupyflash.tune((2, 0, 8, 64), dtype="float16")
    with pytest.raises(TypeError, match="dtype must be given with it"):
        cupyflash.tune(SHAPE)
    with pytest.raises(ValueError, match="family is 'sm1'"):
        cupyflash.tune(SHAPE, dtype="float16", family="sm1")
    with pytest.raises(TypeError, match="store is 'no'; it must be True or False"):
        cupyflash.tune(SHAPE, dtype="float16", store="no")
    with pytest.raises(ValueError, match="of is 'jvp'; it must be one of 'forward', 'backward'$"):
        cupyflash.tune(SHAPE, dtype="float16", of="jvp")


def test_difference_is_relative() -> None:
    x = np.array([3, 4], np.float16)
    assert autotune.difference(x, x) == 0 and autotune.difference(2 * x, x) == pytest.approx(1)
    assert np.isnan(autotune.difference(x * np.nan, x))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "of"), [(family, of) for family, of in TUNED if of in (FORWARD, BACKWARD)])
def test_tiles_are_timed_and_used(
    family: str, of: Pass, store: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's tiles and one more; whatever runs gives the same result, and the next call runs what is stored."""
    import cupy

    from cupyflash.gpu import corridor

    shape, dtype = (2, 300, 4, 64), "float16" if of is BACKWARD else "bfloat16"
    asked, arch = problem(dtype, seq_q=300, seq_k=300, heads_q=4, heads_k=4), device.current(0)
    if (why := FAMILIES[family].objection(asked, arch, of)) is not None:
        pytest.skip(f"{family} {why}")
    tiles = FAMILIES[family].TILES
    few = {name: values[:1] for name, values in tiles[of].tried.items()}
    monkeypatch.setitem(tiles, of, dataclasses.replace(tiles[of], tried=few))
    result = cupyflash.tune(shape, dtype=dtype, of=of.name, family=family, rounds=2, min_ms=1)
    timed = [trial for trial in result.trials if trial.seconds]
    assert timed[0] is result.trials[0] and all(0 < trial.seconds < 1 for trial in timed) and len(timed) > 1
    assert not [trial.note for trial in result.trials if trial.note.startswith("wrong")]

    def call() -> list[np.ndarray]:
        options = {"family": family}
        out, lse = cupyflash.attention(*arrays, return_lse=True, **({} if of is BACKWARD else options))
        results = cupyflash.attention_backward(arrays[0], *arrays, out, lse, **options) if of is BACKWARD else (out,)
        return [cupy.asnumpy(x).astype(np.float64) for x in results]

    arrays = [cupy.asarray(rng.standard_normal(shape, np.float32)).astype("float16") for _ in range(3)]
    own = tuned.entry(asked, arch, family, of, timed[1].tile)
    try:
        before = call()
        tuned.replace([dataclasses.replace(own, dtype="float16")], [])
        corridor.forget()
        for x, y in zip(call(), before):
            assert autotune.difference(x, y) < autotune.TOLERANCE["float16"]
        explained = cupyflash.explain(shape, dtype="float16", of=of.name, family=family)
        assert explained.tiles == dict(timed[1].plan.constants) and "tiles tuned on" in explained.notes[0]
    finally:
        monkeypatch.setenv("CUPYFLASH_CONFIG_DIR", os.devnull)
        tuned.stored.cache_clear()
        corridor.forget()
