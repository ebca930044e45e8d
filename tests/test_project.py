"""What surrounds the code says the same as the code, and as its parts say of each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import headings, links

TOP = Path(__file__).resolve().parent.parent
PROJECT = (TOP / "pyproject.toml").read_text(encoding="utf-8")
PAGES = sorted(
    path for folder in (TOP, TOP / "docs", TOP / "bench", TOP / ".github") for path in folder.glob("*.md")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(TOP).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target.read_text(encoding="utf-8")), f"{page.name} links to {link}"
