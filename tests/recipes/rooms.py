"""What stands beside others of its kind: a kernel family, and an array library."""

from __future__ import annotations

from . import Recipe, behind, copied, created, instead

NAMES = {"flash1": "tried", "FlashAttention (2022) as published": "tried out"}

FAMILY = Recipe("a kernel family", (
    copied("cupyflash/gpu/families/tried.py", "cupyflash/gpu/families/flash1.py", NAMES),
    copied("kernels_cu/tried/forward.cu", "kernels_cu/flash1/forward.cu", NAMES),
    copied("kernels_cu/tried/backward.cu", "kernels_cu/flash1/backward.cu", NAMES),
    copied("kernels_cu/tried/on_chip.cuh", "kernels_cu/flash1/on_chip.cuh", NAMES),
    instead("cupyflash/gpu/plan.py", "import flash1, simt, ", "import flash1, simt, tried, "),
    behind("cupyflash/gpu/plan.py", '"flash1": flash1', ', "tried": tried'),
    instead("cupyflash/gpu/plan.py", 'ON_REQUEST = ("flash1",', 'ON_REQUEST = ("flash1", "tried"'),
    instead("cupyflash/api.py", '"simt", "flash1", optional', '"simt", "flash1", "tried", optional'),
))  # fmt: skip

INTEROP = "cupyflash/interop/__init__.py"
# Of a library `sheets`, whose arrays are on the CPU.
LIBRARY = Recipe("an array library", (
    created("cupyflash/interop/sheets_.py", '''"""Arrays of sheets."""

from __future__ import annotations

from typing import Any

import numpy as np
import sheets

from ..call import Call
from ..problem import View
from . import numpy_

kind = "sheets"


def objection(cls: type) -> str | None:
    return None if issubclass(cls, sheets.Sheet) else "it must be a Sheet"


def on_gpu(x: Any) -> bool:
    return False


def view(x: Any) -> View:
    return numpy_.view(x)._replace(kind=kind)


def signature(x: Any) -> tuple[Any, ...]:
    return numpy_.signature(x)


def recorder(call: Call) -> None:
    return None


def check_target(name: str, x: Any) -> None:
    numpy_.check_target(name, x)


def written(x: Any) -> None:
    pass


def to_numpy(x: Any) -> np.ndarray:
    return np.asarray(x)


def from_numpy(a: np.ndarray) -> Any:
    return a.view(sheets.Sheet)


def wrap(name: str, x: Any) -> Any:
    return numpy_.wrap(name, x).view(sheets.Sheet)
'''),
    instead(INTEROP, '"jaxlib": "jax_"}', '"jaxlib": "jax_", "sheets": "sheets_"}'),
    instead("cupyflash/interop/conformance.py", "jax_ops, numpy_, ", "jax_ops, numpy_, sheets_, "),
    instead("cupyflash/interop/conformance.py", "(numpy_, torch_)", "(numpy_, sheets_, torch_)"),
    instead("cupyflash/namespaces.py", '"jax": "jax.numpy"}', '"jax": "jax.numpy", "sheets": "sheets"}'),
))  # fmt: skip
