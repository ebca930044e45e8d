"""Whether a function is the one that was run before: by its code and by all that it looks up.

What is looked up is known for what it is, never for its name: anybody may call a module, or a function, as a library's.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Libraries of whose own functions it is known that they give the same for the same, but for what their callers put on
# them.
_LIBRARIES = ("math", "numpy", "jax", "torch", "cupyflash", "operator", "_operator", "builtins")
_ELSEWHERE = {  # what these give, or find, is not seen here
    "eval", "exec", "globals", "locals", "vars", "dir", "getattr", "hasattr", "attrgetter", "methodcaller", "format",
    "format_map", "__dict__", "__getattribute__", "__import__", "open", "input", "random",
}  # fmt: skip
_UNSEEN = ("IMPORT_NAME", "MATCH_CLASS")  # instructions that do so
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_HEAP = 1 << 9  # of type.__flags__: a class that is no part of C, and may be changed
_KEPT = 1024


def fingerprint(function: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """What a function's graph follows from: its code and every number that it looks up. None where that is not known.

    `leaf` is asked for what stands for any other object that it looks up, None where it does not know.
    """
    try:
        return _Walk(leaf).all_of(function)
    except (_Unknown, TypeError, RecursionError):  # what cannot be hashed, and what is nested too deep
        return None


class Same:
    """An object that is equal to itself alone."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


_fixed: dict[int, Any] = {}  # what has been found to be so, by id: things of libraries, that stay


class _Unknown(Exception):
    pass


class _Walk:
    def __init__(self, leaf: Callable[[Any], Any] | None) -> None:
        self.leaf = leaf
        self.inside: list[Any] = []  # functions that it is in
        self.names: dict[str, None] = {}  # that their code may look up, in a module too
        self.modules: list[types.ModuleType] = []

    def all_of(self, function: Any) -> tuple[Any, ...]:
        found, done = [self.function(function)], 0
        seen: set[tuple[int, str]] = set()
        while done != len(self.modules) + len(
            self.names
        ):  # what a module holds may be a function with names of its own
            done = len(self.modules) + len(self.names)
            for module in [*self.modules]:
                held = vars(module)
                for name in sorted(held.keys() & self.names.keys()):
                    if (id(module), name) not in seen:
                        seen.add((id(module), name))
                        found.append((id(module), name, self.value(held[name])))
        result = found[0], frozenset(found[1:])
        hash(result)
        return result

    def function(self, function: Any) -> Any:
        if type(function) is not types.FunctionType or vars(function):  # attributes are looked up, too
            raise _Unknown
        if function in self.inside:
            return "itself", self.inside.index(function)
        names = _names(function.__code__)
        if names is None:
            raise _Unknown
        self.names |= dict.fromkeys(names)
        own, usual = function.__globals__, getattr(function, "__builtins__")  # noqa: B009
        looked_up = [name for name in names if name in own or name in usual]
        defaults = function.__kwdefaults__ or {}
        self.inside.append(function)
        found = (
            function.__code__, tuple(map(self.cell, function.__closure__ or ())),
            tuple(zip(looked_up, self.values([own[name] if name in own else usual[name] for name in looked_up]))),
            self.values(function.__defaults__ or ()), tuple(zip(defaults, self.values(defaults.values()))),
        )  # fmt: skip
        self.inside.pop()
        return found

    def cell(self, cell: types.CellType) -> Any:
        try:
            held = cell.cell_contents
        except ValueError:
            return "empty"
        return self.value(held)

    def values(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([self.value(x) for x in values])

    def value(self, x: Any) -> Any:
        kind = type(x)
        if _fixed.get(id(x)) is x:
            return Same(x)
        if kind in _PLAIN or _is_scalar(x):
            return kind, repr(x)
        if isinstance(x, tuple):
            return kind, _attributes(kind), self.values(x)
        if isinstance(x, types.ModuleType):
            if not _is_library(x):
                raise _Unknown
            if not any(x is y for y in self.modules):
                self.modules.append(x)
            return Same(x)
        if _is_fixed(x):
            _fixed[id(x)] = x
            return Same(x)
        if _is_dtype(x):
            return kind, x
        found = None if self.leaf is None else self.leaf(x)
        return self.function(x) if found is None else found


@functools.lru_cache(_KEPT)
def _names(code: types.CodeType) -> tuple[str, ...] | None:
    """Global names that the code, and functions inside it, may look up; None where it finds things in other
    ways too."""
    names = [*code.co_names]
    if not _ELSEWHERE.isdisjoint(names) or any(x.opname in _UNSEEN for x in dis.get_instructions(code)):
        return None
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            inner = _names(x)
            if inner is None:
                return None
            names += inner
    return tuple(dict.fromkeys(names))


def _is_scalar(x: Any) -> bool:
    """Whether x is one of NumPy's, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic) and not type(x).__flags__ & _HEAP


class _Stock(NamedTuple):
    """What every class of named tuples has."""

    x: int = 0


def _attributes(kind: type) -> Any:
    """What instances of a class of tuples have beside their elements."""
    if not kind.__flags__ & _HEAP:
        return None
    own = vars(kind)
    fields = own.get("_fields", ())
    for name, x in own.items():
        if type(x) is not type(vars(_Stock)["x"]) if name in fields else name not in vars(_Stock):
            raise _Unknown
    if type(kind) is not type or kind.__mro__ != (kind, tuple, object):
        raise _Unknown
    return tuple(map(Same, own.values()))


def _is_library(module: types.ModuleType) -> bool:
    """Whether a module is a library's own, not merely called so."""
    name = module.__name__
    path = name.split(".")
    root = sys.modules.get(path[0])
    if path[0] not in _LIBRARIES or "random" in path or type(module) is not types.ModuleType:
        return False
    if sys.modules.get(name) is not module or root is None:
        return False
    file, top = getattr(module, "__file__", None), getattr(root, "__file__", None)
    return module is root or bool(file and top and file.startswith(os.path.dirname(top) + os.sep))


def _is_fixed(x: Any) -> bool:
    """Whether x is a function or a class of a library, which nobody can change or give a memory."""
    kind, library = type(x), str(getattr(x, "__module__", None)).partition(".")[0] in _LIBRARIES
    if kind is types.BuiltinFunctionType:  # of C: what its name says cannot be changed; methods are of objects that can
        plain = x.__self__ is None or isinstance(x.__self__, types.ModuleType)
        return library and plain and x.__name__ not in _ELSEWHERE and not _has_state(x)
    if kind is types.FunctionType:
        own = sys.modules.get(str(x.__globals__.get("__name__")))
        return (
            own is not None and vars(own) is x.__globals__ and _is_library(own)
            and x.__closure__ is None and vars(own).get(x.__name__) is x and not _has_state(x)
        )  # fmt: skip
    if kind is type:
        return library and not x.__flags__ & _HEAP
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind in (numpy.ufunc, type(numpy.where)):
        return vars(numpy).get(x.__name__) is x
    return False


def _has_state(function: Any) -> bool:
    """Whether a function of a library gives something else each time, or what has been set."""
    return str(function.__name__).lstrip("_").startswith(("rand", "get_"))


def _is_dtype(x: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(x, numpy.dtype):  # equal ones may have other metadata, fields too
        return x.metadata is None and x.fields is None and x.subdtype is None
    # PyTorch has neither while another thread imports it, and x is none.
    return isinstance(x, (getattr(torch, "dtype", ()), getattr(torch, "device", ())))
