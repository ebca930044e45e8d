"""Tuning without a GPU: which tiles are tried, how one wins by a fake clock, what is stored, and who believes it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_cover import GIVEN, problem

import cupyflash
from cupyflash.call import Call
from cupyflash.gpu import device, source, tuned
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families.sm90_backward_jvp import TILES as TILES_OF_H
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.passes import BACKWARD, FORWARD, JVP, Pass
from cupyflash.problem import AttentionProblem, Given, complete
from cupyflash.tools import autotune, explanation, precompile
from cupyflash.tools.autotune import candidates

A100, H200 = Arch.of("sm_80"), Arch.of("sm_90a")
SHAPE = (2, 1000, 8, 64)
TUNED = [(family, of) for family, room in FAMILIES.items() for of in room.TILES]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A configuration folder of the test's own; the file in it."""
    monkeypatch.setenv("CUPYFLASH_CONFIG_DIR", str(tmp_path / "config"))
    forget()
    yield tmp_path / "config" / "tuning.json"
    forget()


def asked_of(of: Pass, dim: int = 64, **fields: object) -> AttentionProblem:
    """A problem with tangents, where the pass takes such."""
    moves = tuple(Given(name, "float16", ()) for name in "qkv") if of.moved else ()
    return problem("float16", dim, tangents=moves, **fields)


def forget() -> None:
    """As a new process knows it: neither the file nor the kernels."""
    for kept in (source.inlined, source.code_digest, tuned.stored):
        kept.cache_clear()


def entry(tile: tuple[int, ...], arch: Arch = A100, of: Pass = FORWARD, family: str = "sm80", **fields: object):
    return tuned.entry(problem("float16", **fields), arch, family, of, tile)


# ---- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_what_is_tried_are_fields_of_the_tiles(family: str, of: Pass) -> None:
    tiles = FAMILIES[family].TILES[of]
    names = [field.name for field in dataclasses.fields(tiles.table[0])]
    assert set(tiles.tried) < set(names)  # what remains are limits
    for row, values in zip(tiles.table, tiles.listed()):
        assert dataclasses.replace(row, **dict(zip(tiles.tried, values))) == row
        limits = {name: getattr(row, name) for name in names if name not in tiles.tried}
        assert dataclasses.replace(tiles.tile(values), **limits) == row
    assert {family for family, _ in TUNED} == {"sm90", "sm80", "simt"}


@pytest.mark.parametrize("dim_v", [64, 128, 192])
def test_hopper_backward_has_room_for_what_leaves(dim_v: int) -> None:
    """dK and dV of a warpgroup's 64 keys leave through the room of two tiles of dS and the parts of dQ."""
    trials = list(candidates(problem("float16", 128, dim_v=dim_v), H200, BACKWARD, "sm90"))
    narrow = [c for c in (dict(trial.plan.constants) for trial in trials) if c["KEYS"] == 64 * c["GROUPS"]]
    for c in narrow:
        room = 2 * 2 * c["ROWS"] * c["KEYS"] + c["GROUPS"] * 4 * 64 * c["ROWS"]
        assert c["GROUPS"] * 2 * 64 * (c["DIM"] + c["DIM_V"]) <= room
    assert narrow or dim_v > 128


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_candidates_fit_and_differ(family: str, of: Pass) -> None:
    for dim in (64, 128):
        asked = asked_of(of, dim)
        trials = list(candidates(asked, H200, of, family))
        assert trials[0].tile == () and trials[0].plan == plan(asked, H200, of, family)
        assert len({trial.plan.constants for trial in trials}) == len(trials) > 1
        assert {trial.plan.family for trial in trials} == {family}
        for trial in trials:
            assert all(launch.shared_memory <= H200.shared_memory for launch in trial.plan.launches)
            assert all(launch.threads <= 1024 for launch in trial.plan.launches)


def test_warps_share_a_tile_evenly() -> None:
    for dim in (64, 128, 256):
        for trial in candidates(problem("float16", dim), A100, FORWARD, "sm80"):
            c = dict(trial.plan.constants)
            assert c["ROWS"] % (16 * c["WARPS"] // c["COLUMN_WARPS"]) == 0 and c["KEYS"] % (16 * c["COLUMN_WARPS"]) == 0
            assert c["ROWS"] * (c["DIM_V"] + c["KEYS"]) <= 32 * c["WARPS"] * 255  # its sums have room in the registers


def test_tiles_of_hopper_tangents_come_out_even() -> None:
    asked = problem("bfloat16", 64, tangents=(Given("q", "bfloat16", ()),))
    tried = [dict(zip(TILES_OF_H.tried, values)) for values in itertools.product(*TILES_OF_H.tried.values())]
    possible = [t for t in tried if TILES_OF_H.possible(TILES_OF_H.tile([*t.values()]), asked)]
    assert {t["key_stages"] for t in possible if t["ahead"]} == {2, 3, 4}  # what is owed keeps one
    assert {(t["groups"], t["rows"]) for t in possible} == {(2, 32), (2, 64), (3, 32)}
    assert {(t["groups"], t["keys"]) for t in possible} == {(2, 32), (2, 64), (3, 32), (3, 48)}


def test_a_family_with_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="family is 'flash1'; it has nothing to tune"):
        list(candidates(problem("float16"), A100, FORWARD, "flash1"))


# ---- what is stored --------------------------------------------------------------------------------------------------


def test_stored_and_read_again(store: Path) -> None:
    first, second = entry((64, 64, 4, 1, 2, 2)), entry((64, 32, 4, 1, 2, 2), seq_q=5000)
    assert tuned.stored() == tuned.Stored()
    assert tuned.replace([first], [first.key]) == store
    tuned.replace([second], [second.key])
    assert tuned.stored().entries == (first, second)
    other = dataclasses.replace(first, tile=(128, 32, 4, 1, 2, 2), ms=1.0)
    tuned.replace([other], [other.key])
    assert set(tuned.stored().entries) == {second, other}
    tuned.replace([], [second.key])
    assert tuned.stored().entries == (other,)
    assert [path.name for path in store.parent.iterdir()] == ["tuning.json"]


def test_optional_arrays_are_part_of_the_class(store: Path) -> None:
    """And are read again as they were."""
    plain, masked = entry((64, 64, 4, 1, 2, 2)), entry((64, 32, 4, 1, 2, 2), given=GIVEN)
    tuned.replace([plain, masked], [])
    assert masked.asked == tuple(x.name.upper() for x in GIVEN) and set(tuned.stored().entries) == {plain, masked}
    assert tuned.tiles(problem("float16", given=GIVEN), A100, FORWARD) == {"sm80": masked.tile}


def kernels_with(monkeypatch: pytest.MonkeyPatch, folder: Path, file: str, line: str) -> None:
    """The kernels as after an update: a line more in one file."""
    shutil.copytree(source.kernels_folder(), folder)
    with (folder / file).open("a") as kernel:
        kernel.write(line)
    monkeypatch.setattr(source, "kernels_folder", lambda: folder)
    forget()


def test_a_tile_of_other_kernels_is_left_alone_with_a_note(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no other tile."""
    forward, backward = entry((64, 64, 4, 1, 2, 2)), entry((64, 64, 4, 1, 2, 2), of=BACKWARD)
    tuned.replace([forward, backward], [])
    kernels_with(monkeypatch, tmp_path / "kernels", "sm80/forward.cu", "int more;\n")
    assert (
        tuned.stored().entries == (backward,)
        and f"1 tile in {store} was tuned for other kernels" in tuned.stored().note
    )
    monkeypatch.setattr(device, "current", lambda ordinal: A100)
    monkeypatch.setattr(explanation, "_compiled", lambda plan: ({}, ()))
    explained = cupyflash.explain(SHAPE, dtype="float16")
    assert any("other kernels" in note and "cupyflash tune" in note for note in explained.notes)
    other = cupyflash.explain(SHAPE, dtype="float16", arch="sm_80")
    assert not any("other kernels" in note for note in other.notes)
    tuned.replace([], [])  # what is tuned next comes beside what still holds
    assert tuned.stored() == tuned.Stored((backward,))


@pytest.mark.parametrize("line", ["// what a reader wants to know\n", "\n\n"])
def test_a_comment_in_a_kernel_costs_no_tile(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    mine = entry((64, 64, 4, 1, 2, 2))
    tuned.replace([mine], [])
    kernels_with(monkeypatch, tmp_path / "kernels", "sm80/forward.cu", line)
    assert tuned.stored() == tuned.Stored((mine,))


def test_what_the_host_does_costs_no_tile(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = entry((64, 64, 4, 1, 2, 2))
    tuned.replace([mine], [])
    monkeypatch.setattr(source, "sources_digest", lambda: "of other modules")
    tuned.stored.cache_clear()
    assert tuned.stored() == tuned.Stored((mine,)) and "of other modules" not in store.read_text()


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"sources": 1}', "rows", "tile"])
def test_a_damaged_file_is_no_error(store: Path, damage: str) -> None:
    tuned.replace([entry((64, 64, 4, 1, 2, 2))], [])
    data = json.loads(store.read_text())
    if damage == "rows":
        data["rows"] = [{"tile": [1], "colour": "red"}]
    elif damage == "tile":
        data["rows"][0]["tile"] = ["64", 64, 4, 1, 2, 2]
    store.write_text(json.dumps(data) if damage in ("rows", "tile") else damage)
    tuned.stored.cache_clear()
    assert tuned.stored().entries == () and str(store) in tuned.stored().note


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_a_tile_written_by_hand_is_not_believed(store: Path, family: str, of: Pass) -> None:
    """What a plan makes of it need not be a kernel: a grid of -16, a division by zero."""
    tiles = FAMILIES[family].TILES[of]
    own, more = tiles.listed()[-1], 10_000  # than any
    tuned.replace([entry(own, H200, of, family)], [])
    assert tuned.stored().entries
    data = json.loads(store.read_text())
    strange = [own[:1], own[:-1], (*own, 1), *((n, *own[1:]) for n in (-16, 0, more, 10**18, str(own[0]), None))]
    changes = [{"tile": tile} for tile in strange]
    changes += [{"family": "sm1"}, {"family": []}, {"seq_q": "long"}, {"ms": "fast"}, {"of": None}]
    for change in changes:
        store.write_text(json.dumps({**data, "rows": [{**data["rows"][0], **change}]}))
        tuned.stored.cache_clear()
        assert tuned.stored().entries == () and "is not used" in tuned.stored().note, change


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_pipe_is_not_waited_for(store: Path) -> None:
    store.parent.mkdir()
    os.mkfifo(store)
    assert tuned.stored() == tuned.Stored()


def test_an_interrupt_leaves_the_old_file(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.replace([entry((64, 64, 4, 1, 2, 2))], [])
    before = store.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tuned.replace([entry((64, 32, 4, 1, 2, 2))], [])
    assert store.read_bytes() == before
    assert [path.name for path in store.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
    ("platform", "variables", "place"),
    [
        ("linux", {}, "home/.config/cupyflash"),
        ("linux", {"XDG_CONFIG_HOME": "/xdg"}, "/xdg/cupyflash"),
        ("win32", {"APPDATA": "/roaming"}, "/roaming/cupyflash"),
        ("darwin", {"XDG_CONFIG_HOME": "/xdg"}, "home/Library/Application Support/cupyflash"),
        ("linux", {"CUPYFLASH_CONFIG_DIR": "/mine", "XDG_CONFIG_HOME": "/xdg"}, "/mine"),
    ],
)
def test_place(monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], place: str) -> None:
    for name in ("CUPYFLASH_CONFIG_DIR", "XDG_CONFIG_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert tuned.path() == Path(place, "tuning.json")


# ---- who believes it -------------------------------------------------------------------------------------------------


def test_a_tile_is_for_its_class_alone(store: Path) -> None:
    tuned.replace([entry((64, 96, 4, 1, 1, 3))], [])
    like, longer = problem("float16", seq_q=1024, seq_k=600, batch=7), problem("float16", seq_q=1025)
    assert tuned.tiles(like, A100, FORWARD) == {"sm80": (64, 96, 4, 1, 1, 3)}
    others = (
        longer, problem("bfloat16"), problem("float16", 128), problem("float16", 64, 96), problem("float16", right=0),
        problem("float16", left=5), problem("float16", given=GIVEN), problem("float16", deterministic=True),
        problem("float16", seq_k=1025),
    )  # fmt: skip
    for asked in others:
        assert tuned.tiles(asked, A100, FORWARD) == {}
    assert tuned.tiles(like, A100, BACKWARD) == {}


def test_a_tile_is_for_its_kind_of_gpu_alone(store: Path) -> None:
    mine, other = entry((64, 64, 4, 1, 2, 2), Arch("sm_86", 86, 7, 99)), entry((64, 96, 4, 1, 2, 2), H200)
    tuned.replace([mine, other], [])
    assert tuned.find(problem("float16"), Arch("sm_86", 86, 7, 99), FORWARD) == {"sm80": mine}
    assert tuned.find(problem("float16"), Arch("sm_86", 86, 8, 99), FORWARD) == {}
    assert tuned.find(problem("float16"), H200, FORWARD) == {"sm80": other}


def test_a_plan_takes_the_tile_of_its_family() -> None:
    c = dict(
        plan(problem("float16"), A100, tiles={"sm80": (64, 96, 4, 1, 1, 3), "simt": (32, 32, 32, 16, 2)}).constants
    )
    assert [c[name] for name in ("ROWS", "KEYS", "WARPS", "STAGES", "MIN_BLOCKS")] == [64, 96, 4, 1, 3]
    too_large = {"sm80": (128, 128, 4, 1, 8, 1)}
    assert plan(problem("float16"), A100, tiles=too_large) == plan(problem("float16"), A100)


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_every_family_takes_a_tuned_tile(family: str, of: Pass) -> None:
    asked = asked_of(of)
    *_, last = candidates(asked, H200, of, family)
    chosen = plan(asked, H200, of, family, {family: last.tile})
    assert chosen == last.plan != plan(asked, H200, of, family)
    assert tuned.entry(asked, H200, family, of).kernel == source.code_digest(chosen.source)  # of what was timed


def test_explain_tells_of_a_tuned_tile(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.replace([dataclasses.replace(entry((64, 96, 4, 1, 1, 3)), ms=0.5, table_ms=0.6, date="2026-01-02")], [])
    monkeypatch.setattr(device, "current", lambda ordinal: A100)
    told = cupyflash.explain(SHAPE, dtype="float16")
    assert told.tiles["KEYS"] == 96
    assert "tiles tuned on 2026-01-02: 0.5 ms, the table's took 0.6 ms" in told.notes
    assert not any("tuned" in note for note in cupyflash.explain((2, 5000, 8, 64), dtype="float16").notes)
    assert cupyflash.explain(SHAPE, dtype="float16", arch="sm_80").tiles["KEYS"] != 96  # a GPU that is not there


# ---- how one wins ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(store: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU and a compiler that are not there. `seconds(tile)` is the clock, `spills` is a set of tiles, `wrong` their
    errors."""
    fake = SimpleNamespace(seconds=lambda tile: 1e-3, spills=set(), wrong={}, stop=None, forgotten=0)
    by_plan: dict[object, tuple[int, ...]] = {}

    def compile_all(jobs):
        for number, job in enumerate(reversed(jobs)):
            tile = tile_of(job.plan)
            spilled = 9999 if tile in fake.spills else 0
            resources = {"attention_forward": SimpleNamespace(spill_stores=spilled, spill_loads=0)}
            compiled = SimpleNamespace(resources=resources, log="")
            error = (
                RuntimeError("NVRTC says:\na.cu(22): error: static assertion failed\nmore")
                if number == fake.stop
                else None
            )
            yield SimpleNamespace(job=job, compiled=None if error else compiled, error=error)

    def tile_of(chosen):
        c = dict(chosen.constants)
        return tuple(c[name] for name in ("ROWS", "KEYS", "WARPS", "COLUMN_WARPS", "STAGES", "MIN_BLOCKS"))

    def on_gpu(*_):
        def prepare(trial):
            tile = tile_of(trial.plan)
            call = lambda: None
            by_plan[call] = tile
            return call, lambda: fake.wrong.get(tile, [0.0, 1e-3])

        return prepare

    def sampler(ready, min_ms, event):
        assert event is autotune.cupy_event
        return lambda name: fake.seconds(by_plan[ready[name].call])

    def forget():
        fake.forgotten += 1

    monkeypatch.setattr(device, "current", lambda ordinal: A100)
    monkeypatch.setattr(autotune, "compile_all", compile_all)
    monkeypatch.setattr(autotune, "_on_gpu", on_gpu)
    monkeypatch.setattr(autotune, "gpu_sampler", sampler)
    monkeypatch.setattr(autotune, "_forget", forget)
    monkeypatch.setattr(autotune, "_ordinal", lambda: 0)
    return fake


FAST = (64, 96, 4, 1, 2, 2)


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


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_exported_rows_are_rows_of_the_table(monkeypatch: pytest.MonkeyPatch, family: str, of: Pass) -> None:
    # Where tiles are not weighed before the table is asked.
    dim = {FORWARD: 128, BACKWARD: 128, JVP: 192}.get(of, 64) if family == "sm90" else 64
    asked = asked_of(of, dim, seq_q=4096, seq_k=4096)
    *_, last = candidates(asked, H200, of, family)
    comment, row = autotune.export((entry(last.tile, H200, of, family, dim=dim, seq_q=4096),))
    assert comment.startswith(f"# {family} {of}: sm_90a")
    tiles = FAMILIES[family].TILES
    home = sys.modules[type(tiles[of].table[0]).__module__]
    (parsed,) = eval(f"[{row}]", vars(home))
    table = tiles[of]
    longer = dataclasses.replace(table, table=(parsed, *table.table))
    monkeypatch.setitem(tiles, of, longer)
    for module in [x for name, x in sys.modules.items() if name.startswith("cupyflash.gpu.families.")]:
        if vars(module).get("TILES") is table:  # a module for each pass
            monkeypatch.setattr(module, "TILES", longer)
    assert plan(asked, H200, of, family) == last.plan
    if family != "simt":  # in whose table the widest is the limit of the kernels
        assert plan(asked_of(of, dim + 64, seq_q=4096, seq_k=4096), H200, of, family) != last.plan


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe{", b"[" * 100_000, b'{"rows": [{"tile": [-16, 1]}]}', b'{"sources": "1", "rows": []}', b"null"],
)
def test_a_file_that_cannot_be_read_is_left_alone(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPYFLASH_CONFIG_DIR", str(tmp_path))
    (tmp_path / "tuning.json").write_bytes(content)
    tuned.stored.cache_clear()
    try:
        assert not tuned.stored().entries and "is not used" in tuned.stored().note
    finally:
        tuned.stored.cache_clear()
