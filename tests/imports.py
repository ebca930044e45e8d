"""The package's import graph, read from its sources: imports inside functions count too, and those by a name in a
string."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "cupyflash"
# Modules that import others by names that stand in their tables: every name of a module beside them there is an import.
# Which adapter an array needs only its library says: `interop` plugs it in, by the protocol, and knows none.
PLUGGED = ("cupyflash.interop",)


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Each module of the package with those of the package that it imports; modules by their full names."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: set(imports(name, path.name == "__init__.py", path.read_text(encoding="utf-8"), set(files))) - {name}
        for name, path in sorted(files.items())
    }


def imports(name: str, is_package: bool, text: str, modules: Collection[str]) -> Iterator[str]:
    """Which of `modules` the module `name` imports, whose source is `text`."""
    package = name if is_package else name.rpartition(".")[0]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = [f"{base}.{x.name}" if f"{base}.{x.name}" in modules else base for x in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name not in PLUGGED:
            found = _named(node.value, package, modules)
        else:
            continue
        yield from (x for x in found if x in modules)


def _named(text: str, package: str, modules: Collection[str]) -> list[str]:
    """The modules that a string names, as `import_module` takes them; all that begin so where it is but a beginning."""
    full = f"{package}{text}" if text.startswith(".") else text
    if text.strip(".") and text.endswith("."):
        return [x for x in modules if x.startswith(full)]
    return [full] if "." in text else []
