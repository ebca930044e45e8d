"""README.md: its examples run, its commands and options exist. So do the examples of other pages."""

from __future__ import annotations

import importlib
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, commands

from cupyflash.problem import ARRAYS, OPTIONS

TOP = Path(__file__).resolve().parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
COMMANDS = (TOP / "docs" / "command-line.md").read_text(encoding="utf-8")
RUN = (
    "README.md", "docs/start.md", "docs/recipes.md", "docs/serving.md", "docs/packed-training.md",
    "docs/block-masks.md", "docs/score_functions.md",
    "docs/frameworks.md", "docs/float8.md",
    "docs/options.md", "docs/derivatives.md", "docs/parallel.md",
)  # fmt: skip


def example(page: str, number: int, block: str) -> Any:
    """The block as a test parameter, named by its page and the libraries it imports."""
    imports = re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)
    imports += ["torch"] * ("cupyflash.compat" in block)  # on which that stands
    marks = [pytest.mark.gpu] if "cupy" in imports else []
    return pytest.param(
        block, imports, marks=marks, id=f"{Path(page).stem}-{number}-{'+'.join(dict.fromkeys(imports))}"
    )


EXAMPLES = [
    example(page, number, block)
    for page in RUN
    for number, block in enumerate(blocks((TOP / page).read_text(encoding="utf-8"), "python"), 1)
]


@pytest.mark.parametrize(("block", "imports"), EXAMPLES)
def test_python_examples_run(block: str, imports: list[str], tmp_path: Path) -> None:
    for library in imports:
        pytest.importorskip(library)
    script = tmp_path / "example.py"
    script.write_text(block, encoding="utf-8")
    names = runpy.run_path(str(script))
    for name in {"out", "mean", "dq", "dk", "dv"} & names.keys():
        x = names[name]
        largest = abs(x.detach() if hasattr(x, "detach") else x).max()
        assert 0 < float(largest) < math.inf, f"{name} is all zeros, or has NaN"


def test_every_library_has_an_example() -> None:
    source = "".join(blocks(README, "python"))
    for library in ("cupy", "numpy", "torch", "jax"):
        assert re.search(rf"^import {library}\b", source, re.MULTILINE), library


@pytest.mark.parametrize(
    ("module", "name"), re.findall(r"^\|.*`from (cupyflash[\w.]+) import (\w+)`", README, re.MULTILINE)
)
def test_replacements_are_there(module: str, name: str) -> None:
    """The rows of what is called today."""
    pytest.importorskip("jax" if ".jax" in module else "torch")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_table_has_every_replacement() -> None:
    table = README.partition("## In the place of what you call today")[2].partition("\n## ")[0]
    for today in (
        "torch.nn.functional.scaled_dot_product_attention", "flex_attention", "torch.nn.MultiheadAttention",
        "flash_attn_func",
        "jax.nn.dot_product_attention", "memory_efficient_attention", "attn_implementation=", "diffusers",
        "nnx.MultiHeadAttention",
        "equinox.nn.MultiheadAttention",
    ):  # fmt: skip
        assert today in table, today


def test_commands_and_their_options_exist() -> None:
    typer = pytest.importorskip("typer")
    from cupyflash.tools.commands import app

    group = typer.main.get_command(app)
    seen = set()
    for program, *words in commands(README + COMMANDS):
        if program == "cupyflash":
            name, *arguments = words
            group.commands[name].make_context(name, arguments)  # raises where an option does not exist
            seen.add(name)
    assert seen == set(group.commands), "commands that the pages do not show"


def test_extras_exist() -> None:
    lists = [re.findall(r'"\.\[([\w,]+)\]"', README)]
    named = {extra for found in lists for names in found for extra in names.split(",")}
    assert {"demo", "test"} <= named
    extras = (TOP / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    assert named <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


def test_files_exist() -> None:
    pages = README + (TOP / "docs" / "what-runs.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:cupyflash|kernels_cu|docs|bench|examples)/[\w/]+(?:\.\w+)?)`", pages)
    assert paths
    for path in paths:
        assert (TOP / path).exists(), path


def test_it_speaks_to_users_and_briefly() -> None:
    assert len(README.splitlines()) <= 200
    assert not re.search(r"^.{141}", re.sub(r"^[|!].*$", "", README, flags=re.MULTILINE), re.MULTILINE)


def test_every_option_is_on_the_page_of_options() -> None:
    page = (TOP / "docs" / "options.md").read_text(encoding="utf-8")
    for row in (*OPTIONS, *ARRAYS):
        assert re.search(rf"`[^`]*\b{row.name}\b[^`]*`", page), row.name
