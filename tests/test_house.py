"""What docs/architecture.md and CONTRIBUTING.md say of the tree, where a test can look; test_imports.py,
test_sequence.py and test_recipes.py have their share."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent
PACKAGE, KERNELS = TOP / "cupyflash", TOP / "kernels_cu"
ARCHITECTURE = (TOP / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
CODE = {
    path: path.read_text(encoding="utf-8")
    for folder in (PACKAGE, KERNELS, TOP / "tests")
    for path in sorted(folder.rglob("*"))
    if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp")
}
CUDA = {path: text for path, text in CODE.items() if KERNELS in path.parents}
MADE_UP = ("sheets", "tried")  # by the recipes
LONG = {"tests/reference.py": 530, "tests/semantics.py": 530}  # files of more than 500 lines: how many they may have


def places(pages: dict[str, str], pattern: str) -> list[str]:
    """Where a regular expression is found, by file and line."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in pages.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


@pytest.mark.parametrize("page", (ARCHITECTURE, CONTRIBUTING), ids=("architecture", "contributing"))
def test_files_that_are_named_are_there(page: str) -> None:
    named = set(re.findall(r"`([\w./]+\.(?:py|cuh?|h|md|toml|sh)|[a-z][\w./]*/[\w.]+\.json)`", page))
    known = [path.as_posix() for path in TOP.rglob("*") if not {".git", "node_modules"} & set(path.parts)]
    assert len(named) > 5
    for name in named:
        if not any(word in name for word in MADE_UP):
            assert any(path.endswith(f"/{name}") for path in known), name


def test_names_in_the_page_are_in_the_code() -> None:
    words = set(re.findall(r"\w+", "\n".join(CODE.values())))
    prose = re.sub(r"^```.*?^```", "", ARCHITECTURE, flags=re.MULTILINE | re.DOTALL)
    named = {word for word in re.findall(r"`([A-Za-z_]\w+)(?:\([^`]*\))?`", prose) if word not in MADE_UP}
    assert len(named) > 100 and named - words == set()


def test_every_room_is_on_the_page() -> None:
    tree = re.search(r"^```\ncupyflash/\n(.*?)^kernels_cu/\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    assert tree
    for part, folder in zip(tree.groups(), (PACKAGE, KERNELS)):
        named = {
            word.rstrip("/")
            for line in part.splitlines()
            if line.startswith("  ") and line[2] != " "
            for word in re.findall(r"^[\w./ ]+?(?=  )", line[2:])[0].split()
        }
        there = {path.name for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
        left_out = {"__pycache__", "__main__.py"}
        assert {name for name in named if "/" not in name} == there - left_out
        assert all((folder / name).is_dir() for name in named if "/" in name)


def test_what_the_seam_is_asked_is_where_the_page_says() -> None:
    table = ARCHITECTURE.partition("| question | answered in |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for question, where, _, _, on_cpu in rows:
        files = [KERNELS / "attention" / name for name in re.findall(r"`(\w+\.cuh)`", where)]
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        if files:
            for name in re.findall(r"`(\w+)\(", question):
                assert re.search(rf"\b{name}\w*\(", text), (name, where)
        for name in re.findall(r"`(\w+)`", on_cpu):
            assert places({p: t for p, t in CODE.items() if p.parent.name == "cpu"}, rf"def {name}\b"), name


def test_kernels_know_no_band() -> None:
    families = {p: without_comments(t) for p, t in CUDA.items() if p.parent.name in ("simt", "sm80", "sm90", "flash1")}
    assert not places(families, r"\b(config::)?(LEFT|RIGHT)\b")


def test_instructions_have_one_home_and_no_header_of_cuda_is_needed() -> None:
    outside = {path: without_comments(text) for path, text in CUDA.items() if path.parent.name != "ptx"}
    assert not places(outside, r"\basm\b")
    assert not places(CUDA, r"#include <")


def test_corridors_take_a_call_that_nobody_changes() -> None:
    for name in ("gpu", "cpu"):
        tree = ast.parse((PACKAGE / name / "corridor.py").read_text(encoding="utf-8"))
        run = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
        assert [(x.arg, ast.unparse(x.annotation)) for x in run.args.args if x.annotation] == [("call", "Call")]
    package = {path: text for path, text in CODE.items() if PACKAGE in path.parents}
    assert not places(package, r"\bcall\.(arrays|options|targets|seed|family|wrt|of|lib)(\[[^\]]*\])? *\|?= ")


def test_kernels_are_compiled_without_contraction() -> None:
    from cupyflash.gpu import compiler

    assert "fma=False" in inspect.getsource(compiler)


def test_scripts_of_contributors_take_what_is_said() -> None:
    said = re.findall(r"python (tests/\w+\.py)([^\n`#]*)", CONTRIBUTING)
    assert len(said) > 3
    for script, arguments in said:
        text = (TOP / script).read_text(encoding="utf-8")
        assert all(f'"{option}"' in text for option in re.findall(r"--[\w-]+", arguments)), (script, arguments)
    extras = {x for found in re.findall(r"\.\[([\w,]+)\]", CONTRIBUTING) for x in found.split(",")}
    project = (TOP / "pyproject.toml").read_text(encoding="utf-8")
    assert extras and all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)


def test_the_glossary_is_short() -> None:
    table = ARCHITECTURE.partition("## Glossary")[2].strip().splitlines()
    assert len([row for row in table if row.startswith("| ")]) - 2 <= 20


def test_lines_are_up_to_120_columns() -> None:
    assert not places(CUDA, r"^.{121}")
    assert "E501" in (TOP / "pyproject.toml").read_text(encoding="utf-8")


def test_files_are_up_to_500_lines() -> None:
    for path, text in CODE.items():
        name = path.relative_to(TOP).as_posix()
        assert len(text.splitlines()) <= LONG.get(name, 500), name
