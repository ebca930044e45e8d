"""docs/tutorial.md: its code prints what the page says, its commands exist, its pictures are drawn by its script."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest
from pages import blocks, commands, examples, links

TOP = Path(__file__).resolve().parent.parent
DOCS = TOP / "docs"
PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")


def test_the_code_prints_what_the_page_says() -> None:
    names: dict[str, object] = {}
    found = examples(PAGE)
    assert len(found) == len(blocks(PAGE, "python")) and sum(text is not None for _, text in found) > 10
    for number, (code, text) in enumerate(found):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, f"tutorial.md, block {number + 1}", "exec"), names)  # noqa: S102 - the page is ours
        assert said.getvalue() == (text or ""), f"block {number + 1}:\n{code}"


def test_commands_and_their_options_exist() -> None:
    typer = pytest.importorskip("typer")
    from cupyflash.tools.commands import app

    group = typer.main.get_command(app)
    seen = {words[0] for program, *words in commands(PAGE) if program == "cupyflash"}
    for program, *words in commands(PAGE):
        if program == "cupyflash":
            group.commands[words[0]].make_context(words[0], words[1:])
    assert {"explain", "bench"} <= seen


def test_links_lead_somewhere() -> None:
    for link in links(PAGE):
        assert (DOCS / link).exists(), link


def test_the_script_draws_the_pictures_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runpy.run_path(str(DOCS / "tutorial_plots.py"))["main"](str(tmp_path))
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {link.partition("/")[2] for link in links(PAGE) if link.startswith("plots/")}
    assert drawn <= {path.name for path in (DOCS / "plots").iterdir()}
