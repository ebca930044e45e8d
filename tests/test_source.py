"""The source generator: one self-contained CUDA string that names our files and lines. Pure; no GPU needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from imports import import_graph
from kernel_cover import FEATURES, problem

from cupyflash.gpu import params, source
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan
from cupyflash.passes import BACKWARD, FORWARD, Pass

TOP = Path(__file__).resolve().parent.parent
GPU = Arch.of("sm_90a")
SOURCES = [
    (family, of)
    for family, room in FAMILIES.items()
    for of in (FORWARD, BACKWARD)
    if room.objection(problem("float16"), GPU, of) is None
]


def planned(family: str, of: Pass, **fields: object) -> KernelPlan:
    return plan(problem("float16", **fields), GPU, of, family)


@pytest.mark.parametrize(("family", "of"), SOURCES)
def test_nothing_from_outside_is_included(family: str, of: Pass) -> None:
    text = source.generate(planned(family, of))
    assert not re.search(r"^\s*#\s*(include|pragma\s+once)", text, re.MULTILINE)


@pytest.mark.parametrize(("family", "of"), SOURCES)
def test_every_file_once_and_every_line_in_its_place(family: str, of: Pass) -> None:
    """Walking the #line marks, each line of the string is that line of that file."""
    kernel_plan = planned(family, of)
    text = source.generate(kernel_plan)
    opened = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert opened[0] == kernel_plan.source and len(opened) == len(set(opened))
    file, number = None, 0
    for line in text.splitlines():
        mark = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if mark:
            file, number = mark[2], int(mark[1])
        elif file not in (None, "user/score.cuh"):  # that one is made
            original = (source.kernels_folder() / file).read_text().splitlines()[number - 1]
            assert line in (original, ""), f"{file}:{number}"
            if line != original:
                assert original.startswith(("#include", "#pragma once"))
            number += 1


def test_the_plan_is_in_front() -> None:
    kernel_plan = planned("sm80", FORWARD, **FEATURES["everything"])
    text = source.generate(kernel_plan)
    head = text[: text.index("#line")]
    for name, value in kernel_plan.constants:
        kind = "bool" if isinstance(value, bool) else "int"
        assert f"constexpr {kind} {name} = {str(value).lower()};" in head
    for name, type in (("In", "half_t"), ("Product", "half_t"), ("Out", "half_t"), ("Accum", "float")):
        assert f"using {name} = {type};" in head
    assert params.text(kernel_plan) in head and head.index("namespace config") < head.index("struct Params")


def test_sources_differ_where_plans_do() -> None:
    texts = {source.generate(planned("simt", FORWARD, **fields)) for fields in FEATURES.values()}
    assert len(texts) == len(FEATURES)
    for of in (FORWARD, BACKWARD):
        for fields in (
            {},
            {"right": 0, "diagonal": 0},
        ):  # where tiles differ in length, some are dealt out and some are not
            texts = {source.generate(planned("sm90", of, seq_q=s, batch=90, **fields)) for s in (1, 999, 9000)}
            assert len(texts) == (3 if of is FORWARD else 2)  # few are packed, some are short


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels in a folder of the test's own."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(source.kernels_folder(), folder)
    monkeypatch.setattr(source, "kernels_folder", lambda: folder)
    return folder


def digest() -> str:
    source.sources_digest.cache_clear()
    try:
        return source.sources_digest()
    finally:
        source.sources_digest.cache_clear()


def test_digest_follows_the_sources(copied: Path) -> None:
    first = digest()
    assert re.fullmatch("[0-9a-f]{64}", first)
    kernel = copied / "simt" / "forward.cu"
    text = kernel.read_bytes()
    kernel.write_bytes(text + b"\n")
    assert digest() != first
    kernel.write_bytes(text.replace(b"\n", b"\r\n"))  # as git may check it out elsewhere
    assert digest() == first
    kernel.rename(kernel.with_name("other.cu"))
    assert digest() != first


def test_digest_counts_sources_alone(copied: Path) -> None:
    first = digest()
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__" / "x.pyc").write_bytes(b"x")
    (copied / "notes.txt").write_text("x")
    assert digest() == first
    (copied / "new.cuh").write_text("x")
    assert digest() != first


def test_the_digest_covers_what_a_call_on_a_gpu_walks_through() -> None:
    """Every module that the package's entrances import, but for the CPU's, the tools, and who calls as users do."""
    others = tuple(f"cupyflash.{room}" for room in ("cpu", "tools", "compat", "integrations", "parallel"))
    graph = import_graph()
    entrances = [name for name in graph if name.split(".")[1:2] in (["api"], ["torch"], ["jax"], ["interop"])]
    reached, waiting = set(), ["cupyflash", *entrances]
    while waiting:
        name = waiting.pop()
        if name not in reached and not name.startswith(others):
            reached.add(name)
            waiting += sorted(graph[name])
    assert {
        "cupyflash.gpu.corridor",
        "cupyflash.gpu.families.sm90",
        "cupyflash.problem",
        "cupyflash.gpu.tuned",
    } <= reached
    covered = set(source.sources())
    missing = {name for name in reached if not {path_of(name), path_of(name, package=True)} & covered}
    assert not missing
    kernels = {
        f"kernels_cu/{path.relative_to(TOP / 'kernels_cu').as_posix()}" for path in (TOP / "kernels_cu").rglob("*.cu*")
    }
    assert kernels <= covered and len(kernels) > 20
    assert not {"cupyflash/tools/cli.py", "cupyflash/cpu/forward.py", "cupyflash/bench/suites.py"} & covered


def path_of(module: str, package: bool = False) -> str:
    return module.replace(".", "/") + ("/__init__.py" if package else ".py")


@pytest.mark.parametrize(
    "room", ["gpu/plan.py", "gpu/families/sm90.py", "interop/cupy_.py", "torch/__init__.py", "api.py"]
)
def test_digest_follows_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: str) -> None:
    first, found = digest(), source.sources()
    changed = tmp_path / "changed.py"
    changed.write_bytes(found[f"cupyflash/{room}"].read_bytes() + b"#")
    monkeypatch.setattr(source, "sources", lambda: found | {f"cupyflash/{room}": changed})
    assert digest() != first


def test_the_digest_is_that_of_the_checkout() -> None:
    """The package under test, wherever it is installed, has the sources that lie beside these tests."""
    for name, path in source.sources().items():
        assert path.read_bytes() == (TOP / name).read_bytes(), f"{name} is not what is installed: pip install again"


def test_missing_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "gpu" / "source.py"))
    source.kernels_folder.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match="CUDA sources are missing"):
            source.kernels_folder()
    finally:
        source.kernels_folder.cache_clear()
