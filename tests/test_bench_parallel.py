"""`cupyflash bench parallel`: what it refuses, and the rows of its file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import pages, parallel, parallel_cases, parallel_page, parallel_world, report


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 3}, "rounds is given; bench suite 'parallel' takes out, only and resume"),
        ({"only": ["64k", "65k"]}, "only is '65k'; for bench suite 'parallel' it must be, or begin, one of 16k 16/16"),
    ],
)
def test_refused(
    given: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.machine, "require_gpu", lambda suite: None)
    assert bench.run(["parallel"], **given) == 2
    assert message in capsys.readouterr().out


def test_it_needs_two(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert parallel.run(cpu=True, ranks=1, out=tmp_path) == 2
    assert "needs 2 GPUs or more; 1 are there, 1 are asked for" in capsys.readouterr().out


def test_memory_is_measured_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What came before would leave its memory there."""
    started: list[list[str]] = []

    def together(commands: list[list[str]], end: float, more: Any = None) -> int:
        started.append([x for x in commands[0] if x.startswith("--only") or not x.startswith("-")])
        return 0

    monkeypatch.setattr(parallel, "_together", together)
    assert parallel.run(cpu=True, ranks=2, out=tmp_path, only=["host", "memory", "bias", "jax"]) == 0
    assert [x[2:] for x in started[:2]] == [["--only=bias", "--only=host"], ["--only=memory"]]
    assert started[2][:2] == ["cupyflash.bench.parallel_libraries", "jax"]
    assert parallel.run(cpu=True, ranks=2, out=tmp_path, only=["memory"]) == 0
    assert [x[2:] for x in started[3:]] == [["--only=memory"]]


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{x}" for x in NAMES[:1] + ("SIZE", "LOCAL_RANK"))
ALONE = ("127.0.0.1", "29531")


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, None),
        (dict(zip(NAMES, ("1", "2", "1", "a", "5"))), ("1", "2", "1", "a", "5")),
        (dict(zip(OPEN_MPI, ("3", "4", "1"))), ("3", "4", "1", *ALONE)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("1", "2", "1", *ALONE)),
        ({"RANK": "0"}, None),
    ],
)
def test_who_started_a_process(env: dict[str, str], found: Any) -> None:
    assert parallel_world.launched(env) == (found and dict(zip(NAMES, found)))


class Ranks(NamedTuple):
    size: int = 2
    cpu: bool = False


def rows(**ms: float) -> list[dict[str, Any]]:
    notes = {"fa3 gather": "wrong: off by 1 of the largest value"}
    of = {"forward": "keys", "backward": "heads"}
    return [parallel_cases.row_of(parallel_cases.CASES[0], x, Ranks(), ms, notes, usual) for x, usual in of.items()]


MS = {"one": 20.0, "keys": 12.5, "heads": 10.0, "keys/4": 9.0, "fa3 ring": 12.0, "torch alltoall": 15.0}
WHERE = {
    "suite": "parallel", "gpu": "a GPU", "ranks": 2, "driver": "1", "date": "2026-11-26T03", "sources": "abc",
    "versions": {"torch": "2"},
}  # fmt: skip


def test_rows_of_a_file() -> None:
    """A share of 1 is as if each GPU did its part alone; ours is what a call takes that names no exchange."""
    forward, row = rows(**MS)
    assert forward["ours"] == 12.5 and row["ours"] == 10.0
    assert row["share"] == {"keys": 0.8, "heads": 1.0, "keys/4": 1.111}
    assert row["peers"] == {"fa3 gather": None, "fa3 ring": 12.0, "torch alltoall": 15.0}
    assert row["ratio_to_best"] == 1.2 and row["problem"]["ranks"] == 2
    assert rows(one=20.0, keys=12.5)[0]["ours"] == 12.5
    none, _ = rows(one=20.0, **{"fa3 ring": 12.0})
    assert none["ours"] is None and none["ratio_to_best"] is None


def test_what_is_no_number_is_wrong() -> None:
    x, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert parallel_cases.difference(x, x) == 0 and parallel_cases.difference(nan, x) == math.inf


def test_a_file_grows_by_cases_and_begins_anew_elsewhere(tmp_path: Path) -> None:
    parallel_page.begin(tmp_path, WHERE)
    parallel_page.keep(tmp_path, rows(**MS))
    other = {**rows(**MS)[0], "problem": {**rows(**MS)[0]["problem"], "case": "bias"}, "ours": None}
    parallel_page.keep(tmp_path, [other])
    parallel_page.keep(tmp_path, rows(**(MS | {"heads": 11.0})))
    parallel_page.begin(tmp_path, WHERE | {"date": "later"})
    found = report.read(tmp_path / "parallel.json")["rows"]
    assert [x["problem"]["case"] for x in found] == ["bias", "16k 16/16", "16k 16/16"]
    assert [x["ours"] for x in found] == [None, 12.5, 11.0]
    assert parallel._missing(tmp_path, ["16k 16/16", "bias", "link"]) == ["bias", "link"]
    parallel_page.begin(tmp_path, WHERE | {"sources": "other"})
    assert report.read(tmp_path / "parallel.json")["rows"] == []


def test_the_page_and_its_picture(tmp_path: Path) -> None:
    part = {
        "problem": {"case": "decode 128k", "pass": "forward", "ranks": 2}, "unit": "us", "ours": 18.0,
        "each": {"part": 30.0, "merged": 48.0}, "peers": {}, "notes": {}, "ratio_to_best": None,
    }  # fmt: skip
    folder, docs = tmp_path / "results" / "2xa", tmp_path / "docs"
    parallel_page.begin(folder, WHERE)
    parallel_page.keep(folder, [*rows(**MS), part])
    docs.mkdir()
    (docs / "parallel.md").write_text("<!-- parallel:begin -->\n<!-- parallel:end -->\n")
    written = pages.plot(tmp_path / "results", docs)
    text = (docs / "parallel.md").read_text()
    assert "2 x a GPU, " in text and ", torch 2; kernel sources abc." in text
    assert "| 16k 16/16 | backward | 20 | 12.5 (0.80) | 10 (1.00) | – | 12 | 15 | 1.20x |" in text
    assert "| decode 128k | 18 µs | part 30, merged 48 |" in text
    assert "](plots/parallel.png)" in text and str(docs / "plots" / "parallel.png") in written
    assert report.summary(report.read(folder / "parallel.json")["rows"])[-1].startswith("worst row 0.96x")


def test_documents() -> None:
    begin = parallel_cases.documents(4096)
    assert begin.shape == (4096,) and begin[0] == 0 and (begin[1:] >= begin[:-1]).all() and len({*begin}) > 4


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    """Two processes over gloo, in all that is measured but for what only GPUs have."""
    only = ["16k 16/16", "bias", "documents", "table", "decode", "host", "jax"]
    command = [sys.executable, "-m", "cupyflash.bench.parallel", "--cpu", f"--out={tmp_path}", "--groups=2"]
    env = {name: x for name, x in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE")}
    done = subprocess.run(
        [*command, *(f"--only={x}" for x in only)], check=False, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "parallel.json").read_text())["rows"]
    cases = [(x["problem"]["case"], x["problem"]["pass"]) for x in found]
    both = [(name, of) for name in only[:2] + only[2:4] for of in ("forward", "backward")]
    assert {*both, ("decode 128k", "forward"), ("host, keys", "backward"), ("jax 64k", "both")} <= {*cases}
    assert all(x["ours"] is not None for x in found), done.stdout
    causal = found[0]
    assert all(causal["peers"][f"fa3 {x}"] for x in ("gather", "ring", "ulysses")), causal["notes"]
    assert set(causal["each"]) == {"keys", "keys/2", "heads", "heads/2"} and "wrong" not in done.stdout
    resumed = subprocess.run(
        [*command, "--resume", *(f"--only={x}" for x in only)], check=False, env=env, capture_output=True, text=True
    )
    assert resumed.returncode == 0 and "forward" not in resumed.stdout, resumed.stdout
