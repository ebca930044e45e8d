"""What plans choose by and was measured: where and when is said, and nothing is said in vain."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from cupyflash.gpu import families, measured

FAMILIES = Path(families.__file__).parent


@pytest.mark.parametrize("name", measured.TABLE)
def test_each_says_where_and_when(name: str) -> None:
    row = measured.TABLE[name]
    assert row.number > 0 and row.what and row.gpu
    assert datetime.date(2026, 11, 1) <= datetime.date.fromisoformat(row.date)


def test_each_is_asked_for_by_the_family_that_it_names() -> None:
    asked = {
        (name, path.stem)
        for path in FAMILIES.glob("*.py")
        for name in re.findall(r'number\("([^"]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert {name for name, _ in asked} == set(measured.TABLE)
    assert all(module.startswith(name.partition(".")[0]) for name, module in asked)


def test_costs_have_no_seconds_of_their_own() -> None:
    """Small numbers and rates are of a GPU: they stand in the table."""
    for path in FAMILIES.glob("*.py"):
        found = re.findall(r"\b\d+(?:\.\d+)?e-?\d+\b", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} has {found}"


def test_costs_of_tiles_are_in_the_table() -> None:
    for path in FAMILIES.glob("*.py"):
        found = re.findall(r"cost=\d.*", path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} has {found}"
