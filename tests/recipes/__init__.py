"""The recipes of docs/architecture.md as patches, each applied to a copy of the tree (tests/test_recipes.py).

A patch is edits beside anchors, not lines by number: who moves code that they stand beside moves the anchor.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Edit:
    """What becomes of the text of a file; "" is that of one that is not there."""

    path: str
    change: Callable[[str], str]


@dataclass(frozen=True)
class Recipe:
    title: str  # the heading's end in docs/architecture.md
    edits: tuple[Edit, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(edit.path for edit in self.edits))

    def without(self, path: str) -> Recipe:
        """As if somebody forgot a file."""
        return Recipe(self.title, tuple(edit for edit in self.edits if edit.path != path))


def instead(path: str, old: str, new: str, everywhere: bool = False) -> Edit:
    """Of a place that there is once, or of all alike."""

    def change(text: str) -> str:
        found = text.count(old)
        assert found == 1 or (everywhere and found), f"{path} has {found} times {old!r}"
        return text.replace(old, new)

    return Edit(path, change)


def behind(path: str, anchor: str, new: str, everywhere: bool = False) -> Edit:
    return instead(path, anchor, anchor + new, everywhere)


def before(path: str, anchor: str, new: str, everywhere: bool = False) -> Edit:
    return instead(path, anchor, new + anchor, everywhere)


def created(path: str, text: str) -> Edit:
    def change(there: str) -> str:
        assert not there, f"{path} is there already"
        return text

    return Edit(path, change)


def copied(path: str, of: str, names: dict[str, str]) -> Edit:
    """A new file like another, with other names in it."""

    def change(there: str) -> str:
        assert not there, f"{path} is there already"
        text = (TOP / of).read_text(encoding="utf-8")
        for old, new in names.items():
            text = text.replace(old, new)
        return text

    return Edit(path, change)


def tree(folder: Path, *recipes: Recipe) -> Path:
    """A copy of what runs, with these patches."""
    for name in ("cupyflash", "kernels_cu", "tests"):
        shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in (edit for recipe in recipes for edit in recipe.edits):
        path = folder / edit.path
        text = edit.change(path.read_text(encoding="utf-8") if path.exists() else "")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
