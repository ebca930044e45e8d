"""`cupyflash bench parallel`: what it refuses, and the rows of its file."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from cupyflash import bench
from cupyflash.bench import parallel, parallel_page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": 3}, "rounds is given; bench suite 'parallel' takes out and only"),
        ({"only": ["64k", "65k"]}, "only is '65k'; for bench suite 'parallel' it must be, or begin, one of 16k 16/16"),
    ],
)
def test_refused(given: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["parallel"], **given) == 2
    assert message in capsys.readouterr().out


def test_rows_of_a_file() -> None:
    """A share of 1 is as if each GPU did its part alone."""
    ms = {"one": 20.0, "keys": 12.5, "heads": 10.0, "keys/4": 9.0, "fa3 ring": 12.0, "torch alltoall": 15.0}
    found = {"ms": {"forward": ms}, "notes": {"fa3 gather": "wrong: off by 1 of the largest value"}}
    (row,) = parallel.rows_of(parallel.CASES[0], 2, found)
    assert row["ours"] == 10.0 and row["share"] == {"keys": 0.8, "heads": 1.0, "keys/4": 1.111}
    assert row["peers"] == {"fa3 gather": None, "fa3 ring": 12.0, "torch alltoall": 15.0}
    assert row["ratio_to_best"] == 1.2 and row["problem"]["ranks"] == 2


def test_the_table_of_a_page() -> None:
    ms = {"one": 20.0, "keys": 12.5, "heads": 10.0, "fa3 ring": 12.0}
    rows = parallel.rows_of(parallel.CASES[0], 2, {"ms": {"forward": ms}, "notes": {}})
    data = {"suite": "parallel", "gpu": "a GPU", "ranks": 2, "date": "2026-11-26T03", "sources": "abc", "rows": rows}
    text = parallel_page.tables({**data, "versions": {"torch": "2"}, "link_gbps": {"4 MB": 80.0}})
    assert (
        "2 x a GPU, 2026-11-26, torch 2; kernel sources abc. Send and receive at once, into each GPU: 80 GB/s" in text
    )
    assert "| 16k 16/16 | forward | 20 | 12.5 (0.80) | 10 (1.00) | 12 | 1.20x |" in text
