"""One hand-over to the CPU or the GPU: the forward and the backward of a call on the arrays of one library, run at once."""

from __future__ import annotations

import functools
from typing import Any

from . import interop
from .interop.protocol import Arrays, Library
from .problem import Gradients


def forward(
    lib: Library,
    arrays: Arrays,
    targets: Arrays,
    return_lse: bool,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
) -> tuple[Any, Any]:
    """out and (where asked for) lse. `lib` is that of q; `targets` are arrays to write results to, by name; `seed`, that of
    dropout where it is a number."""
    q, into = arrays["q"], targets
    arrays, targets = interop.adopt(lib, arrays, targets)
    adapter: Any = lib
    try:
        backend = _gpu() if adapter.on_gpu(arrays["q"]) else _cpu()
        results = backend.forward(adapter, arrays, targets, return_lse, options, seed, family)
    except Exception:
        interop.name_unreadable(adapter, arrays, targets)
        raise
    for x in targets.values():
        adapter.written(x)
    if arrays["q"] is not q:  # of a library that has no adapter
        like = interop.like(q)
        out, lse = results
        return into["out"] if into else like(out), None if lse is None else like(lse)
    return results


def backward(
    lib: Library,
    arrays: Arrays,
    targets: Arrays,
    options: dict[str, Any],
    seed: int | None,
    family: str | None,
    wrt: tuple[str, ...],
) -> Gradients:
    """The gradients, also of the optional arrays that `wrt` names; `arrays` has dout, out, lse and perhaps dlse too."""
    q, into = arrays["q"], targets
    arrays, targets = interop.adopt(lib, arrays, targets)
    adapter: Any = lib
    try:
        backend = _gpu() if adapter.on_gpu(arrays["q"]) else _cpu()
        results = backend.backward(adapter, arrays, targets, options, seed, family, wrt)
    except Exception:
        interop.name_unreadable(adapter, arrays, targets)
        raise
    for x in targets.values():
        adapter.written(x)
    if arrays["q"] is not q:
        like = interop.like(q)
        first = (into[name] if name in into else like(x) for name, x in zip(Gradients._fields, results))
        return Gradients(*first, **{name: like(x) for name, x in vars(results).items()})
    return results


@functools.cache  # an import statement costs 0.6 us in every call
def _gpu() -> Any:
    from .gpu import corridor

    return corridor


@functools.cache
def _cpu() -> Any:
    from .cpu import corridor

    return corridor
