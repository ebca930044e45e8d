"""What surrounds the code says the same as the code, and as its parts say of each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import headings, links

import cupyflash

TOP = Path(__file__).resolve().parent.parent
PROJECT = (TOP / "pyproject.toml").read_text(encoding="utf-8")
PAGES = sorted(
    path for folder in (TOP, TOP / "docs", TOP / "docs" / "notes", TOP / "bench",
        TOP / ".github") for path in folder.glob("*.md")
)  # fmt: skip


def test_pythons_that_are_claimed_are_tested() -> None:
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert f'requires-python = ">={claimed[0]}"' in PROJECT
    workflow = (TOP / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    tested = re.search(r"python: \[(.*)\]", workflow)
    assert tested and re.findall(r'"(3\.\d+)"', tested[1]) == claimed
    assert f"Python {claimed[0]} to {claimed[-1]}" in (TOP / "README.md").read_text(encoding="utf-8")


def test_tools_are_pinned_in_one_place() -> None:
    """Hooks and workflows take them from the extra `dev`."""
    config = (TOP / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    used = set(re.findall(r"entry: ([\w-]+)", config))
    assert used and all(re.search(rf'"{tool}==[\d.]+"', PROJECT) for tool in used)
    assert "additional_dependencies" not in config and "rev:" not in config


def test_lint_is_the_same_here_and_there() -> None:
    """What the workflow finds badly formatted, `.ci/run` has found before."""
    workflow = (TOP / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    lint = re.findall(r"- run: ((?:ruff|mypy) .*)", workflow)
    assert len(lint) == 3 and set(lint) <= set((TOP / ".ci" / "run").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(TOP).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text(encoding="utf-8")), f"{page.name} links to {link}"


def test_the_site_has_no_more_tabs_than_a_row_shows() -> None:
    """At 1440 pixels, where what is beyond is cut; and every page of docs/ is in one of them."""
    nav = (TOP / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    assert 3 < len(re.findall(r"^  - ", nav, re.MULTILINE)) <= 8
    linked = {*re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE)}
    assert {path.name for path in (TOP / "docs").glob("*.md")} <= linked


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for needed in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(needed)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path], check=False, cwd=TOP,
        capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {path.parent.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("index.html")}
    named = re.findall(r": ([\w-]+)\.md$", (TOP / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) > 15 and {"." if name == "index" else name for name in named} <= pages.keys()
    reference = pages["api"].read_text(encoding="utf-8")
    drop_ins = ("torch.scaled_dot_product_attention", "torch.flex_attention", "jax.dot_product_attention")
    functions = [name for name in cupyflash.__all__ if name != "__version__"]
    for name in (*functions, "torch.attention", "jax.attention", *drop_ins, "integrations.diffusers.use"):
        assert f'id="cupyflash.{name}"' in reference, name
    assert "online softmax: what was summed" in pages["kernels_cu/simt/forward.cu"].read_text(encoding="utf-8")
    for path in pages.values():
        assert not re.findall(r'(?:src|<link[^>]* href)="https?://', path.read_text(encoding="utf-8")), path
