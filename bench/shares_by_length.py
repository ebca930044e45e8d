"""Times the numbers by which caches are cut in shares (cupyflash/gpu/families/shares.py), on a Hopper GPU.

    python bench/shares_by_length.py FOLDER [ROW ...]

Each setting is a process of its own, `cupyflash bench decode` of these rows beside the peers that are there; its
results are FOLDER/<setting>/decode.json. The table has microseconds; run again, it goes on where it ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROWS = (
    "long-32", "long-4", "ragged-8", "ragged-16", "ragged-64", "ragged-128", "16x4096-32/8", "64x4096-32/8",
    "16x16384-32/8", "1x16384-32/8", "16x16on4096",
)  # fmt: skip
# FEW_TILES, LENGTH_TILES, LONG_TILES; the first one is without shares by length where query tiles are enough.
SETTINGS = (
    (8, 16, 1 << 20), (8, 16, 64), (8, 8, 64), (8, 32, 64), (8, 64, 64), (8, 16, 24), (8, 32, 24), (4, 16, 64),
    (16, 16, 64),
)  # fmt: skip


def one(folder: Path, setting: tuple[int, ...], rows: list[str]) -> dict[str, dict[str, float]]:
    """Microseconds of each row: ours, with lengths where the row is dense, and of the best peer."""
    code = (
        "from cupyflash.gpu.families import shares\n"
        f"shares.FEW_TILES, shares.LENGTH_TILES, shares.LONG_TILES = {setting}\n"
        "from cupyflash.bench.__main__ import main\n"
        "main()"
    )
    arguments = ["decode", "--resume", "--out", str(folder)] + [x for row in rows for x in ("--only", row)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    found = {}
    for row in json.loads((folder / "decode.json").read_text())["rows"]:
        times = {name: t for name, t in row["peers"].items() if t}
        theirs = [t for name, t in times.items() if name not in ("lengths", "read")]
        found[row["problem"]["row"]] = {
            "ours": times.get("lengths", row["ours"]), "dense": row["ours"], "peer": min(theirs, default=float("nan"))
        }  # fmt: skip
    return found


def main() -> None:
    folder, rows = Path(sys.argv[1]), sys.argv[2:] or list(ROWS)
    results = {}
    for setting in SETTINGS:
        name = "-".join(map(str, setting))
        results[name] = one(folder / name, setting, rows)
        for row, times in results[name].items():
            print(f"{name:14}{row:24}" + "".join(f"{what:>8} {t:8.1f}" for what, t in times.items()), flush=True)
    print("\n" + f"{'':24}" + "".join(f"{name:>14}" for name in results))
    for row in {row: None for found in results.values() for row in found}:
        print(f"{row:24}" + "".join(f"{found[row]['ours']:14.1f}" for found in results.values() if row in found))


if __name__ == "__main__":
    main()
