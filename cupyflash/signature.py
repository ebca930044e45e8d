"""The public functions: what their signatures say of arrays, functions that show another one than they have, and
TorchScript, which can read none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Protocol, TypeVar


class DLPackArray(Protocol):
    """NumPy, CuPy, PyTorch, JAX, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class CudaArray(Protocol):
    """Numba, Warp, ..."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


Array = DLPackArray | CudaArray
A = TypeVar("A", bound=Array)  # results are of the type of q
L = TypeVar("L", bound=Array)  # lse has a dtype and a shape of its own

F = TypeVar("F", bound=Callable[..., Any])


def unscripted(function: F) -> F:
    """Let torch.jit.script refuse a function, and say what to use, in the place of its own error about some line of
    it."""
    function.__prepare_scriptable__ = refuse_jit_script  # type: ignore[attr-defined]  # what it asks first
    return function


def refuse_jit_script(_: Any = None) -> NoReturn:
    raise NotImplementedError(f"torch.jit.script compiles a call of attention, {NO_SCRIPT}")


NO_SCRIPT = "but attention has no form in TorchScript; use torch.compile or torch.export"


def like(shown: F, without: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], F]:
    """Give a function that hands its keyword arguments on the signature of the one that takes them (but for some)."""
    return lambda function: _show(function, shown, without)


def closed(function: F) -> F:
    """Do not show a function's ** parameter, which it has to refuse what nobody knows with a message of its own."""
    names = [name for name, x in inspect.signature(function).parameters.items() if x.kind is x.VAR_KEYWORD]
    return _show(function, function, names)


def sharing(other: Callable[..., Any], without: Collection[str] = ()) -> Callable[[F], F]:
    """Show, in the place of a function's ** parameter, the keyword arguments of another (but for some)."""

    def decorate(function: F) -> F:
        own = list(inspect.signature(function).parameters.values())
        names = {x.name for x in own} | {*without}
        theirs = [x for x in inspect.signature(other).parameters.values() if x.kind is x.KEYWORD_ONLY]
        shown = [x for x in own if x.kind is x.POSITIONAL_OR_KEYWORD] + [x for x in theirs if x.name not in names]
        signature = inspect.Signature([*shown, *(x for x in own if x.kind is x.KEYWORD_ONLY)])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return unscripted(function)

    return decorate


def _show(function: Any, shown: Callable[..., Any], without: Collection[str]) -> Any:
    signature = inspect.signature(shown)
    kept = [x for x in signature.parameters.values() if x.name not in without]
    function.__signature__ = signature.replace(parameters=kept)
    return unscripted(function)
