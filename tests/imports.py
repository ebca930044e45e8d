"""The package's import graph, read from its sources: imports inside functions count too."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "cupyflash"
HANDED_OVER = ("cupyflash.autotune", "cupyflash.explanation")  # tools that api.py has no more than a name of


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Each module of the package with those of the package that it imports; modules by their full names."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _imports(name, path, set(files)) for name, path in sorted(files.items())}


def _imports(name: str, path: Path, modules: set[str]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{x.name}" if f"{base}.{x.name}" in modules else base for x in node.names}
    return (found & modules) - {name}
