"""What `cupyflash tune` found on this machine: a small JSON in the user's configuration folder, read once per process.

It holds tiles, each with the digest of the code of the kernels that were timed, its own and the one that a call takes
without it: one of other kernels is left alone, as a file is that cannot be read. The tables of gpu/families are used
then, and `explain` tells.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..folders import user_folder, written_whole
from ..passes import PASSES, Pass
from ..problem import AttentionProblem
from .device import Arch
from .kernel_plan import features
from .plan import FAMILIES
from .source import code_digest

AGAIN = "run `cupyflash tune` again"


@dataclass(frozen=True)
class Tuned:
    """The tile for a class of problems on a kind of GPU. `tile` has the fields that `tune` combines, in the family's
    order."""

    arch: str
    sms: int
    family: str
    of: str  # the pass, by name
    dtype: str
    dim: int
    dim_v: int
    banded: bool  # causal or a window
    asked: tuple[str, ...]  # what else is asked of scores and masks: the constants that are set for it
    deterministic: bool
    seq_q: int  # lengths up to this power of two, and above half of it
    seq_k: int
    kernel: str  # the digest of the code of its pass
    tile: tuple[int, ...]
    ms: float = 0.0  # what was measured, and with the table's own tile
    table_ms: float = 0.0
    date: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is for."""
        return dataclasses.astuple(dataclasses.replace(self, kernel="", tile=(), ms=0.0, table_ms=0.0, date=""))


def entry(problem: AttentionProblem, arch: Arch, family: str, of: Pass, tile: tuple[int, ...] = ()) -> Tuned:
    """The entry for the class that a problem belongs to. Batch and heads are not part of it."""
    banded = problem.left is not None or problem.right is not None
    asked = tuple(name for name, on in features(problem) if on and name not in ("LEFT", "RIGHT", "ADDED"))
    return Tuned(
        arch.name, arch.sms, family, of.name, problem.dtype, problem.dim, problem.dim_v, banded,
        asked, problem.deterministic, _power(problem.seq_q), _power(problem.seq_k),
        code_digest(family, of.name), tile,
    )  # fmt: skip


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Stored:
    """What the file holds; `note` says what of it is not used, and why."""

    entries: tuple[Tuned, ...] = ()
    note: str = ""


def path() -> Path:
    """tuning.json in CUPYFLASH_CONFIG_DIR, or in "cupyflash" in the user's configuration folder."""
    folder = user_folder(
        "CUPYFLASH_CONFIG_DIR", ("APPDATA", "AppData/Roaming"), "Library/Application Support",
        ("XDG_CONFIG_HOME", ".config"),
    )  # fmt: skip
    return folder / "tuning.json"


@functools.cache
def stored() -> Stored:
    """The file, as this process knows it."""
    try:
        if not stat.S_ISREG(path().stat().st_mode):  # a FIFO would hang
            return Stored()
        found = path().read_bytes()
    except OSError:
        return Stored()  # the usual case, and all that it costs
    try:
        data = json.loads(found.decode("utf-8"))
        if data.keys() != {"rows"}:
            raise KeyError("rows")
        rows = [_entry(row) for row in data["rows"]]
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError):
        return Stored(note=f"{path()} is not a file of this version of `cupyflash tune` and is not used; {AGAIN}")
    entries = tuple(x for x in rows if x.kernel == code_digest(x.family, x.of))
    left = len(rows) - len(entries)
    was = f"1 tile in {path()} was" if left == 1 else f"{left} tiles in {path()} were"
    note = f"{was} tuned for other kernels than these, and not used; {AGAIN}"
    return Stored(entries, note if left else "")


def _entry(row: dict[str, Any]) -> Tuned:
    """An entry as `tune` writes it. TypeError, ValueError or KeyError for any other, such as one with a tile of one's
    own."""
    found = Tuned(**{**row, "tile": tuple(row["tile"]), "asked": tuple(row["asked"])})
    numbers = (*found.tile, found.sms, found.dim, found.dim_v, found.seq_q, found.seq_k)
    if not all(type(n) is int for n in numbers) or not FAMILIES[found.family].TILES[PASSES[found.of]].known(found.tile):
        raise ValueError("no tile that is tried")
    if not all(isinstance(ms, float) for ms in (found.ms, found.table_ms)):
        raise TypeError("milliseconds are numbers")
    return found


def find(problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, Tuned]:
    """What is stored for problems like this one on GPUs like this one, by family."""
    return {x.family: x for x in stored().entries if x.key == entry(problem, arch, x.family, of).key}


def tiles(problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, tuple[int, ...]]:
    """The tiles of `find`, as `gpu.plan.plan` takes them."""
    return {family: x.tile for family, x in find(problem, arch, of).items()}


def save(entries: Iterable[Tuned]) -> Path:
    """Write the file whole or not at all: who reads it meanwhile, and who is interrupted, has the old one."""
    rows = [dataclasses.asdict(x) for x in entries]
    text = json.dumps({"rows": rows}, indent=1) + "\n"
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target, 0o600) as file:
        file.write(text.encode())
    stored.cache_clear()
    return target


def replace(found: Iterable[Tuned], keys: Iterable[tuple[Any, ...]]) -> Path:
    """Put `found` in the place of whatever the file has under `keys`, and keep the rest.

    Those of other kernels are dropped.
    """
    stored.cache_clear()  # another process may have written since
    gone = set(keys)
    return save([*(x for x in stored().entries if x.key not in gone), *found])
