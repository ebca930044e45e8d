"""What a package has and imports only when it is asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def later(package: str, *modules: str, **places: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: of its `modules`, and of names in others (by their relative `places`).

    One whose library is missing is no attribute, so that hasattr and help() work; importing it says what is missing.
    """

    def get(name: str) -> Any:
        if name in places:
            return getattr(import_module(places[name], package), name)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return import_module(f".{name}", package)
        except ImportError as error:
            why = f"cannot be imported: {error}"
            if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
                why = f"needs {error.name}, which is not installed; run pip install {error.name}"
            raise AttributeError(f"{package}.{name} {why}") from error

    return get, lambda: sorted({*vars(sys.modules[package]), *modules, *places})
