"""Fails unless tests/gpu_report.json says that these very kernel sources passed on a GPU, every family and dtype.

A test that failed there because it was wrong itself may be withdrawn: it is listed with the reason, and must be gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from backends import to_count
from criterion import luck_explains

from cupyflash.gpu.source import sources_digest

HOW = "Run `pytest --gpu-report tests/gpu_report.json` on a machine with a GPU and commit the report."


def in_the_tree(names: Collection[str]) -> set[str]:
    """Which of these tests pytest still finds."""
    if not names:
        return set()
    files = sorted({name.split("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *files]
    found = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    return set(names) & set(found.stdout.splitlines())


def complaints(
    report: dict[str, Any], digest: str, still: Callable[[Collection[str]], set[str]] = in_the_tree
) -> list[str]:
    """What is wrong with the report, in sentences."""
    wrong = []
    withdrawn = {name for x in report.get("withdrawn", ()) for name in x["tests"]}
    if there := still(withdrawn):
        wrong.append(f"tests that are withdrawn are still there: {sorted(there)}")
    failures = [name for name in report.get("failures", ()) if name not in withdrawn]
    excused = len(report.get("failures", ())) - len(failures)
    if report.get("sources") != digest:
        wrong.append(f"it is of other kernel sources ({str(report.get('sources'))[:12]}) than these ({digest[:12]})")
    for outcome, known in (("failed", excused), ("errors", 0)):
        if report.get(outcome) != known:
            wrong.append(f"it counts {report.get(outcome)} {outcome}: {failures}")
    missed, explained = report.get("by_luck", 0), luck_explains(report.get("passed", 0))
    if missed > explained:
        wrong.append(f"{missed} results missed the criterion by little, and luck explains {explained}")
    counts = report.get("counts") or {}
    for name in to_count():
        if not counts.get(name):
            wrong.append(f"it has no passed test of {name.replace('/', ' in ')}")
    return wrong


def main() -> int:
    path = Path(__file__).with_name("gpu_report.json")
    if not path.is_file():
        wrong = ["it is missing"]
    else:
        report = json.loads(path.read_text(encoding="utf-8"))
        wrong = complaints(report, sources_digest())
    if wrong:
        print(f"{path.name}: {'; '.join(wrong)}.\n{HOW}", file=sys.stderr)
        return 1
    for x in report.get("withdrawn", ()):
        print(f"{path.name}: failed and withdrawn, {x['date']}: {', '.join(x['tests'])}: {x['why']}")
    for again in report.get("again", ()):
        print(f"{path.name}: ran again, {again['date']}: {', '.join(again['tests'])}")
    print(f"{path.name}: {report['passed']} tests passed on {report['gpu']}, {report['date']}, on these kernel sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
