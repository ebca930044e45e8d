"""Fails unless tests/gpu_report.json says that these very kernel sources passed on a GPU, every family and dtype."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from backends import to_count
from criterion import luck_explains

from cupyflash.gpu.source import sources_digest

HOW = "Run `pytest --gpu-report tests/gpu_report.json` on a machine with a GPU and commit the report."


def complaints(report: dict[str, Any], digest: str) -> list[str]:
    """What is wrong with the report, in sentences."""
    wrong = []
    if report.get("sources") != digest:
        wrong.append(f"it is of other kernel sources ({str(report.get('sources'))[:12]}) than these ({digest[:12]})")
    for outcome in ("failed", "errors"):
        if report.get(outcome) != 0:
            wrong.append(f"it counts {report.get(outcome)} {outcome}: {report.get('failures')}")
    missed, explained = report.get("by_luck"), luck_explains(report.get("passed", 0))
    if missed is None:
        wrong.append("it does not count `by_luck`, results that missed the criterion by little")
    elif missed > explained:
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
    for again in report.get("again", ()):
        tests = again["tests"]
        more = f" and {len(tests) - 5} more" if len(tests) > 5 else ""
        print(f"{path.name}: ran again, {again['date']}: {', '.join(tests[:5])}{more}")
    print(f"{path.name}: {report['passed']} tests passed on {report['gpu']}, {report['date']}, on these kernel sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
