"""The source generator: one self-contained CUDA string that names our files and lines. Pure; no GPU needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from kernel_cover import FEATURES, problem

from cupyflash.gpu import source
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES, KernelPlan, plan

GPU = Arch.of("sm_90a")
SOURCES = [
    (family, backward)
    for family, (objection, _) in FAMILIES.items()
    for backward in (False, True)
    if objection(problem("float16"), GPU, backward) is None
]


def planned(family: str, backward: bool, **fields: object) -> KernelPlan:
    return plan(problem("float16", **fields), GPU, backward, family)


@pytest.mark.parametrize(("family", "backward"), SOURCES)
def test_nothing_from_outside_is_included(family: str, backward: bool) -> None:
    text = source.generate(planned(family, backward))
    assert not re.search(r"^\s*#\s*(include|pragma\s+once)", text, re.MULTILINE)


@pytest.mark.parametrize(("family", "backward"), SOURCES)
def test_every_file_once_and_every_line_in_its_place(family: str, backward: bool) -> None:
    """Walking the #line marks, each line of the string is that line of that file."""
    kernel_plan = planned(family, backward)
    text = source.generate(kernel_plan)
    opened = re.findall(r'^#line 1 "(.+)"$', text, re.MULTILINE)
    assert opened[0] == kernel_plan.source and len(opened) == len(set(opened))
    file, number = None, 0
    for line in text.splitlines():
        mark = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if mark:
            file, number = mark[2], int(mark[1])
        elif file is not None:
            original = (source.kernels_folder() / file).read_text().splitlines()[number - 1]
            assert line in (original, ""), f"{file}:{number}"
            if line != original:
                assert original.startswith(("#include", "#pragma once"))
            number += 1


def test_the_plan_is_in_front() -> None:
    kernel_plan = planned("sm80", False, **FEATURES["everything"])
    text = source.generate(kernel_plan)
    head = text[: text.index("#line")]
    for name, value in kernel_plan.constants:
        kind = "bool" if isinstance(value, bool) else "int"
        assert f"constexpr {kind} {name} = {str(value).lower()};" in head
    assert "using Element = half_t;" in head and "using Accum = float;" in head


def test_sources_differ_where_plans_do() -> None:
    texts = {source.generate(planned("simt", False, **fields)) for fields in FEATURES.values()}
    assert len(texts) == len(FEATURES)
    assert source.generate(planned("simt", False, seq_q=5)) == source.generate(planned("simt", False, seq_q=6))


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


def test_the_digest_is_that_of_the_checkout() -> None:
    """The package under test, wherever it is installed, has the sources that lie beside these tests."""
    top = Path(__file__).resolve().parent.parent
    for here, there in (
        (top / "kernels_cu", source.kernels_folder()),
        (top / "cupyflash" / "gpu", Path(source.__file__).parent),
    ):
        for path in here.rglob("*.[cp][uy]*"):
            if path.suffix in (".cu", ".cuh", ".py"):
                assert path.read_bytes() == (there / path.relative_to(here)).read_bytes(), (
                    f"{path.relative_to(top)} is not what is installed: pip install again"
                )


def test_missing_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source, "__file__", str(tmp_path / "gpu" / "source.py"))
    source.kernels_folder.cache_clear()
    try:
        with pytest.raises(FileNotFoundError, match="CUDA sources are missing"):
            source.kernels_folder()
    finally:
        source.kernels_folder.cache_clear()
