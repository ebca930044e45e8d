"""How to add things, as docs/architecture.md tells: patches (tests/recipes/), each followed in a copy of the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_on_cpu import needs_compiler
from recipes import Recipe, tree
from recipes.rooms import FAMILY, LIBRARY
from recipes.scores import ADDED_ARRAY, ADDED_SCALAR, ON_PRODUCT, TERMS, WITH_GRADIENT

TOP = Path(__file__).resolve().parent.parent
PAGE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
SCORES = (ON_PRODUCT, ADDED_SCALAR, ADDED_ARRAY, WITH_GRADIENT)
RECIPES = (*SCORES, FAMILY, LIBRARY)
KERNELS = ("simt", "sm80", "sm90")
MOST = {ADDED_SCALAR: 4, ADDED_ARRAY: 4, WITH_GRADIENT: 6}  # files; who needs more mends the house first
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def follow(folder: Path, recipe: str, where: str) -> str:
    """What following it prints; errors are the test's."""
    done = subprocess.run(
        [sys.executable, "-P", folder / "tests" / "recipes" / "follow.py", recipe, where], check=False, cwd=folder,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.fspath(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_the_page_counts_the_files(recipe: Recipe) -> None:
    section = PAGE.partition(f"\n### ... {recipe.title}\n")[2].partition("\n#")[0]
    assert section, f"docs/architecture.md has no recipe for {recipe.title}"
    said = re.search(rf"\b({'|'.join(NUMBERS)}) files\b", section, re.IGNORECASE)
    assert said and NUMBERS.index(said[1].lower()) + 2 == len(recipe.files), (said, recipe.files)
    named = set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))
    assert named == set(recipe.files)
    assert len(recipe.files) <= MOST.get(recipe, 99)


@pytest.mark.parametrize("recipe", SCORES, ids=lambda recipe: recipe.title)
def test_scores_on_numpy(recipe: Recipe, tmp_path: Path) -> None:
    follow(tree(tmp_path, recipe), recipe.title, "numpy")


@needs_compiler
@pytest.mark.parametrize("family", KERNELS)
def test_all_families_follow(family: str, tmp_path: Path) -> None:
    """All recipes of scores at once, and each by itself among the slow tests."""
    follow(tree(tmp_path, ON_PRODUCT, ADDED_SCALAR, WITH_GRADIENT), "all", family)


@needs_compiler
def test_tangents_follow(tmp_path: Path) -> None:
    folder = tree(tmp_path, ON_PRODUCT, ADDED_SCALAR, WITH_GRADIENT)
    for where in ("numpy", "simt"):
        follow(folder, "all", f"tangents {where}")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("recipe", SCORES, ids=lambda recipe: recipe.title)
def test_each_in_all_families(recipe: Recipe, family: str, tmp_path: Path) -> None:
    follow(tree(tmp_path, recipe), recipe.title, family)


@needs_compiler
@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize("recipe", (ADDED_SCALAR, ADDED_ARRAY), ids=lambda recipe: recipe.title)
def test_what_has_no_term_does_not_compile(recipe: Recipe, family: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="an array or option that `adds` to scores has no term"):
        follow(tree(tmp_path, recipe.without(TERMS)), recipe.title, family)


@needs_compiler
def test_a_family(tmp_path: Path) -> None:
    follow(tree(tmp_path, FAMILY), FAMILY.title, "tried")


def test_a_library(tmp_path: Path) -> None:
    follow(tree(tmp_path, LIBRARY), LIBRARY.title, "cpu")
