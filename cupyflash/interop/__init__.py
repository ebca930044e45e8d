"""Arrays in, arrays of the same library out, without copies.

Each library has one adapter, a plain module of functions (`numpy_`, `cupy_`, `torch_`, `jax_`), imported when the first
array of that library arrives: importing cupyflash imports none of them. Arrays of other libraries that speak DLPack or
the CUDA array interface (Numba, Warp, ...) become CuPy arrays on a GPU and NumPy arrays on a CPU.

What an adapter has:

    kind                        "numpy", "cupy", "torch" or "jax"
    objection(cls)              why instances of this class of the library are no arrays for us; None where they are
    on_gpu(x)                   whether x lives on a CUDA device
    view(x)                     x as a `problem.View`
    wants_grad(arrays)          whether autograd must record a call on these arrays (None among them is skipped)
    to_numpy(x), from_numpy(a)  for arrays on the CPU, sharing memory; bfloat16 as ml_dtypes.bfloat16

and, where arrays live on a GPU, the hot path, each well under a microsecond:

    signature(x)                hashable; arrays with equal signatures have views equal in all but the pointer
    pointer(x), device(x)       address of the first element, CUDA ordinal
    stream(device)              raw handle of the library's current stream on that device
    empty(shape, dtype, device) uninitialised, from the library's own allocator, ...
    finish(x, device)           ... and what the caller gets of it, once the kernels that write it are launched
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

_ADAPTERS = {"numpy": "numpy_", "cupy": "cupy_", "torch": "torch_", "jax": "jax_", "jaxlib": "jax_"}
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13
_by_type: dict[type, ModuleType] = {}


def library(name: str, x: Any) -> ModuleType:
    """The adapter for x, given as argument `name`; TypeError where x is no array."""
    found = _by_type.get(type(x))
    return found if found is not None else _find(name, x)


def adopt(lib: ModuleType, **named: Any) -> tuple[ModuleType, list[Any]]:
    """Bring the arguments of one call, given by name, into one library.

    `lib` is the adapter of q. Arrays of that library and None pass through untouched; those of other DLPack and CUDA
    array interface producers are wrapped. Returns the adapter for what comes out, and the arrays in order.
    TypeError names the argument that is no array, or that comes from another library than q.
    """
    arrays = list(named.values())
    for x in arrays:
        if x is not None and _by_type.get(type(x)) is not lib:
            arrays = [None if x is None else _adopt_one(lib, name, x) for name, x in named.items()]
            break
    return (lib, arrays) if lib.kind != "jax" else lib.borrow(named)


def _find(name: str, x: Any) -> ModuleType:
    cls = type(x)
    for base in cls.__mro__:  # subclasses, such as torch.nn.Parameter, may come from anywhere
        root = base.__module__.partition(".")[0]
        if root in _ADAPTERS:
            lib = import_module(f".{_ADAPTERS[root]}", __name__)
            objection = lib.objection(cls)
            if objection is not None:
                raise TypeError(f"{name} is a {cls.__module__}.{cls.__qualname__}; {objection}")
            _by_type[cls] = lib
            return lib
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        where = int(x.__dlpack_device__()[0])
        if where in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            return import_module(".cupy_", __name__)
        if where in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            return import_module(".numpy_", __name__)
        raise TypeError(f"{name} is on a device of DLPack type {where}; it must be on a CPU or a CUDA GPU")
    if hasattr(x, "__cuda_array_interface__"):
        return import_module(".cupy_", __name__)
    raise TypeError(
        f"{name} is a {cls.__name__}; it must be an array: NumPy, CuPy, PyTorch, JAX, or anything with __dlpack__ or "
        "__cuda_array_interface__"
    )


def _adopt_one(lib: ModuleType, name: str, x: Any) -> Any:
    found = library(name, x)
    if found is not lib:
        raise TypeError(
            f"{name} is a {found.kind} array but q is a {lib.kind} array; all arrays must come from one library"
        )
    return x if type(x) in _by_type else lib.wrap(name, x)
