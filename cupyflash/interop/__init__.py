"""Arrays in, arrays of the same library out, without copies.

Each library has one adapter, a plain module of functions (`numpy_`, `cupy_`, `torch_`, `jax_`), imported when the first
array of that library arrives: importing cupyflash imports none of them. `protocol` says what an adapter has. Arrays of
other libraries that speak DLPack or the CUDA array interface (Numba, Warp, ...) become CuPy arrays on a GPU and NumPy
arrays on a CPU, and results become arrays of theirs again (`foreign`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from ..call import Arrays, Call
from ..problem import View
from ..rules import argument_name, target_name
from .protocol import Adapter, Library

_ADAPTERS = {"numpy": "numpy_", "cupy": "cupy_", "torch": "torch_", "jax": "jax_", "jaxlib": "jax_"}
_SHARDS = "torch.distributed.tensor"  # whose tensors are parts of one
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13
_by_type: dict[type, Library] = {}
OPERANDS = ("q", "k", "v", "dout", "out", "lse")  # the library of these is that of the call
_PACKAGE = sys.modules[__name__]  # adapters that are imported are attributes of it


def library(name: str, x: Any) -> Library:
    """The adapter for x, given as argument `name`; TypeError where x is no array."""
    found = _by_type.get(type(x))
    return found if found is not None else _find(name, x)


def known(cls: type) -> Library | None:
    """The adapter for arrays of a class, of which one has arrived."""
    return _by_type.get(cls)


def adopt(lib: Library, arrays: Arrays, targets: Arrays) -> tuple[Arrays, Arrays]:
    """Bring the arrays of one call, and those given to be written, into one library: `lib`, that of q.

    Arrays of that library pass through untouched; those of other DLPack and CUDA array interface producers are wrapped.
    TypeError names the argument that is no array, or that comes from another library than q.
    """
    arrays = adopted(lib, arrays, argument_name)
    if targets:
        targets = adopted(lib, targets, target_name)
        for name, x in targets.items():
            lib.check_target(target_name(name), x)
    return arrays, targets


def adopted(lib: Library, arrays: Arrays, called: Callable[[str], str] = str) -> Arrays:
    """The arrays, with those of producers that have no adapter wrapped. `called`: what one was given as, by its name
    here."""
    for cls in {*map(type, arrays.values())}:
        if _by_type.get(cls) is not lib:
            return {name: _adopt_one(lib, called(name), x, arrays.get("q")) for name, x in arrays.items()}
    return arrays


def like(q: Any) -> Callable[[Any], Any]:
    """What makes a result one of the library of q, which has no adapter."""
    from . import foreign

    return foreign.like(q)


def view(lib: Library | Adapter, name: str, x: Any) -> View:
    """The view of x, given as argument `name`; TypeError or ValueError where there is none."""
    try:
        return lib.view(x)
    except (TypeError, ValueError) as error:  # of ours: it says what x is
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name} {error}") from None
    except RuntimeError as error:
        raise TypeError(
            f"{name} is a {type(x).__name__} that cannot be read ({error}); it must be an array with memory of its own"
        ) from error


def followed(lib: Library | Adapter, x: Any) -> bool:
    """Whether PyTorch traces or transforms what is done with x, so that what it holds is not known."""
    return lib.kind == "torch" and cast(Any, lib).followed(x)


def memory(lib: Library | Adapter, arrays: Arrays) -> dict[str, View]:
    """Views that have addresses, of arrays whose own PyTorch hides; of others none."""
    hidden = {name: x for name, x in arrays.items() if followed(lib, x)}
    return {name: cast(Any, lib).memory(x) for name, x in hidden.items()}


def held(lib: Library | Adapter, x: Any) -> bool:
    """Whether x itself has the numbers that a call on it is about, not one whose axis vmap has taken away, or whose
    derivative is followed."""
    return lib.kind != "torch" or not cast(Any, lib).wrapped(x)


def mapped(lib: Library | Adapter, x: Any) -> bool:
    """Whether PyTorch's vmap has taken an axis of x away."""
    return lib.kind == "torch" and cast(Any, lib).mapped(x)


def check_followed(call: Call) -> None:
    """TypeError, ValueError or NotImplementedError where PyTorch follows a forward that it cannot."""
    if call.lib.kind == "torch":
        call.lib.check(call)


def inlined(lib: Library) -> bool:
    """Whether torch.compile reads this code, in the place of Python that runs it."""
    return lib.kind == "torch" and cast(Any, lib).inlined()


def name_unreadable(lib: Adapter, arrays: Arrays, targets: Arrays) -> None:
    """Once a call has failed: raise what `view` says of the array that is to blame, if one is."""
    named = {argument_name(name): x for name, x in arrays.items()}
    for name, x in (named | {target_name(name): x for name, x in targets.items()}).items():
        view(lib, name, x)
        if isinstance(x, getattr(lib, "WITHOUT_MEMORY", ())):
            raise TypeError(f"{name} is a {type(x).__name__}, which has no memory, but q is none; all must be, or none")


def _find(name: str, x: Any) -> Library:
    cls = type(x)
    if isinstance(x, type):
        raise TypeError(f"{name} is the class {x.__module__}.{x.__qualname__}; it must be an array")
    module, objection = _of_class(cls)
    if objection is not None:
        raise TypeError(f"{name} is a {cls.__module__}.{cls.__qualname__}; {objection}")
    if module:
        lib: Library = getattr(_PACKAGE, module)
        _by_type[cls] = lib
        return lib
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        try:
            where = int(x.__dlpack_device__()[0])
        except Exception as error:
            raise TypeError(f"{name} is a {cls.__name__} that cannot tell its device by DLPack: {error}") from error
        if where in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            return _adapter("cupy_")
        if where in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            return _adapter("numpy_")
        raise TypeError(f"{name} is on a device of DLPack type {where}; it must be on a CPU or a CUDA GPU")
    if hasattr(x, "__cuda_array_interface__"):
        return _adapter("cupy_")
    raise TypeError(
        f"{name} is a {cls.__name__}; it must be an array: NumPy, CuPy, PyTorch, JAX, or anything with __dlpack__ or "
        "__cuda_array_interface__"
    )


def _of_class(cls: type) -> tuple[str, str | None]:
    """The module that is the adapter for a class, imported, and its objection; "" for a class of no library that has
    one."""
    for base in cls.__mro__:  # subclasses, such as torch.nn.Parameter, may come from anywhere
        root = base.__module__.partition(".")[0]
        if root in _ADAPTERS:
            module = "torch_shards" if base.__module__.startswith(_SHARDS) else _ADAPTERS[root]
            return module, _adapter(module).objection(cls)
    return "", None


_of_class._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile calls it, instead of tracing an import


def _adapter(module: str) -> Library:
    return cast(Library, import_module(f".{module}", __name__))


def _adopt_one(lib: Library, name: str, x: Any, q: Any) -> Any:
    found = library(name, x)
    if found is not lib:
        if lib.kind == "jax" and found.kind == "numpy" and q is not None and name not in OPERANDS:
            return cast(Any, lib).constant(x, q)
        raise TypeError(
            f"{name} is a {found.kind} array but q is a {lib.kind} array; all arrays must come from one library"
        )
    return x if type(x) in _by_type else lib.wrap(name, x)
