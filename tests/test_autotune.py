"""Tuning without a GPU: which tiles are tried, how one wins by a fake clock, what is stored, and who believes it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_cover import GIVEN, in_8_bits, problem

import cupyflash
from cupyflash.gpu import device, source, tuned
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_forward_tiles as forward
from cupyflash.gpu.families.sm90_backward_jvp import TILES as TILES_OF_H
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, PASSES, Pass
from cupyflash.problem import AttentionProblem, Given
from cupyflash.tools import autotune, explanation
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
    """dK or dV of a warpgroup's 64 keys leaves through the room of two tiles of dS and the parts of dQ."""
    trials = list(candidates(problem("float16", 128, dim_v=dim_v), H200, BACKWARD, "sm90"))
    narrow = [c for c in (dict(trial.plan.constants) for trial in trials) if c["KEYS"] == 64 * c["WARPGROUPS"]]
    for c in narrow:
        room = 2 * 2 * c["ROWS"] * c["KEYS"] + c["WARPGROUPS"] * 4 * 64 * c["ROWS"]
        assert c["WARPGROUPS"] * 2 * 64 * max(c["DIM"], c["DIM_V"]) <= room
    assert narrow


@pytest.mark.parametrize("dim", [144, 256])
def test_hopper_backward_has_who_takes_the_columns_of_dq(dim: int) -> None:
    """Each warpgroup of a cluster 64; two that own their keys some rows of 64 more."""
    trials = list(candidates(problem("float16", dim, dim_v=64), H200, BACKWARD, "sm90"))
    assert len(trials) > 1
    for c in (dict(trial.plan.constants) for trial in trials):
        rest = 64 if c["KEYS"] == 64 * c["WARPGROUPS"] else 0
        assert c["DIM"] <= 64 * c["WARPGROUPS"] * c["CLUSTER"] + rest


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


@pytest.mark.parametrize("dim", [192, 384, 512])
def test_a_candidate_has_the_tile_that_it_is_named_after(dim: int) -> None:
    """Not the one that the table has where that one does not fit, which need not be what the plan chooses."""
    names = list(FAMILIES["sm90"].TILES[FORWARD].tried)[:4]
    tried = list(candidates(problem("bfloat16", dim), Arch.of("sm_90a"), FORWARD, "sm90"))[1:]
    assert tried
    for trial in tried:
        has = dict(trial.plan.constants)
        assert tuple(has[name.upper()] for name in names) == trial.tile[:4]


def test_warps_share_a_tile_evenly() -> None:
    for dim in (64, 128, 256):
        for trial in candidates(problem("float16", dim), A100, FORWARD, "sm80"):
            c = dict(trial.plan.constants)
            assert c["ROWS"] % (16 * c["WARPS"] // c["COLUMN_WARPS"]) == 0 and c["KEYS"] % (16 * c["COLUMN_WARPS"]) == 0
            assert c["ROWS"] * (c["DIM_V"] + c["KEYS"]) <= 32 * c["WARPS"] * 255  # its sums have room in the registers


@pytest.mark.parametrize("dim", [64, 128, 192])
def test_tiles_that_would_not_compile_are_not_tried(dim: int) -> None:
    """Of 8 bits a product takes 32 keys at once, and makes scores of 64 or more; two warps copy 1024 bytes at once."""
    eight, double = in_8_bits(dim, "nothing", False), problem("float64", dim + 16)
    keys = {dict(trial.plan.constants)["KEYS"] for trial in candidates(eight, H200, FORWARD, "sm90")}
    assert {64, 96} <= keys <= {64, 96, 128, 192}
    for asked, family, tile in ((eight, "sm90", (2, 80, 2, 1, 0)), (double, "sm80", (32, 16, 2, 1, 1, 1))):
        own = plan(asked, H200, family=family)
        fits = dim == 64 and family == "sm80"
        assert (plan(asked, H200, family=family, tiles={family: tile}) != own) == fits  # one that is stored, too
        tried = [trial.tile for trial in candidates(asked, H200, FORWARD, family)]
        assert (tile in tried) == fits


@pytest.mark.parametrize(
    ("tile", "dims", "eight", "possible"),
    [
        ((1, 64, 1, 2, 0), (64, 224), True, False),  # 128 sums of 128 registers
        ((1, 64, 1, 2, 0), (64, 192), True, True),
        ((1, 64, 1, 2, 0), (64, 256), False, False),
        ((1, 128, 2, 3, 0), (64, 64), True, False),  # scores alone
        ((1, 96, 2, 3, 0), (64, 64), True, True),
        ((2, 192, 2, 1, 0), (128, 128), True, True),  # what the table has: their copy is half as large
        ((2, 192, 2, 1, 0), (128, 128), False, False),
        ((3, 96, 2, 1, 0), (128, 128), True, True),
        ((3, 64, 3, 1, 0), (64, 160), False, False),  # 192 columns
    ],
)
def test_hopper_forward_has_registers(
    tile: tuple[int, ...], dims: tuple[int, int], eight: bool, possible: bool
) -> None:
    """Those of the sums of one product, too, which ptxas counts before threads share out what they have."""
    asked = (
        dataclasses.replace(in_8_bits(dims[0], "nothing", False), dim_v=dims[1]) if eight else problem("float16", *dims)
    )
    assert forward.TILES.possible(forward.TILES.tile(tile), asked) == possible
    chosen = plan(asked, H200, family="sm90", tiles={"sm90": tile})
    names = [name.upper() for name in list(forward.TILES.tried)[:4]]
    assert (tuple(dict(chosen.constants)[name] for name in names) == tile[:4]) == possible


def test_hopper_forwards_own_tiles_are_possible() -> None:
    """At the most columns that a row is for."""
    own = forward.FORWARD_TILES, forward.NARROW, forward.MIDDLE, forward.WIDER, forward.FEW_KEYS, forward.PACKED
    brief = *forward.BRIEF.values(), *forward.BRIEF_KEYS.values()
    for row in itertools.chain(*own, forward.LISTED, forward.SHORT, [forward.TWO_BLOCKS], *brief):
        assert forward.TILES.possible(row, problem("float16", min(row.dim, 256))), row
    for row in forward.EIGHT:
        assert forward.TILES.possible(row, in_8_bits(min(row.dim, 256), "nothing", False)), row


def test_tiles_of_hopper_tangents_come_out_even() -> None:
    asked = problem("bfloat16", 64, tangents=(Given("q", "bfloat16", ()),))
    tried = [dict(zip(TILES_OF_H.tried, values)) for values in itertools.product(*TILES_OF_H.tried.values())]
    possible = [t for t in tried if TILES_OF_H.possible(TILES_OF_H.tile([*t.values()]), asked)]
    assert {t["key_stages"] for t in possible if t["ahead"]} == {2, 3, 4}  # what is owed keeps one
    assert {(t["warpgroups"], t["rows"]) for t in possible} == {(2, 32), (2, 64), (3, 32)}
    assert {(t["warpgroups"], t["keys"]) for t in possible} == {(2, 32), (2, 64), (3, 32), (3, 48)}


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


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_a_tile_is_of_all_kernels_that_it_was_timed_beside(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, of: Pass
) -> None:
    """The table's own may be another file's: of wide heads, and of what has each product of H(G) u once."""
    mine, folder = entry(FAMILIES[family].TILES[of].listed()[0], H200, of, family), tmp_path / "kernels"
    trials = [x for dim in (64, 128 if of.moved else 384) for x in candidates(asked_of(of, dim), H200, of, family)]
    files = {trial.plan.source for trial in trials}
    assert len(files) == 1 + ((family, of) in {("sm90", FORWARD), ("sm90", BACKWARD_JVP)})
    tuned.replace([mine], [])
    for n, file in enumerate(files):
        with monkeypatch.context() as changed:
            kernels_with(changed, folder / str(n), file, "int more;\n")
            assert not tuned.stored().entries, file
    with monkeypatch.context() as changed:
        other = next(x for x in PASSES.values() if x is not of)
        kernels_with(changed, folder / "other", f"{family}/{other}.cu", "int more;\n")
        assert tuned.stored().entries == (mine,)
    forget()
    assert tuned.stored().entries == (mine,)


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


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "of"), TUNED)
def test_exported_rows_are_rows_of_the_table(monkeypatch: pytest.MonkeyPatch, family: str, of: Pass) -> None:
    # Where tiles are not weighed before the table is asked, and no other kernel goes first.
    dim = {FORWARD: 128, BACKWARD: 128, JVP: 192}.get(of, 64) if family == "sm90" else 64
    shape = {"seq_q": 4096, "seq_k": 4096, "deterministic": (family, of) == ("sm90", BACKWARD_JVP)}
    asked = asked_of(of, dim, **shape)
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
        assert plan(asked_of(of, dim + 64, **shape), H200, of, family) != last.plan


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
