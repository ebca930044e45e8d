"""One hand-over of a call to the CPU or the GPU, where it is run at once."""

from __future__ import annotations

import functools
from typing import Any

from . import interop
from .call import Call
from .passes import FORWARD
from .problem import Gradients


def run(call: Call) -> Any:
    """(out, lse), where lse is None unless it is asked for; of a backward, `Gradients`."""
    q, into = call.arrays["q"], call.targets
    arrays, targets = interop.adopt(call.lib, call.arrays, into)
    adapter = call.lib
    if arrays is not call.arrays or targets is not into:
        call = call.but(arrays=arrays, targets=targets)
    try:
        backend = _gpu() if adapter.on_gpu(arrays["q"]) else _cpu()
        results = backend.run(call)
    except Exception:
        interop.name_unreadable(adapter, arrays, targets)
        raise
    for x in targets.values():
        adapter.written(x)
    return results if arrays["q"] is q else _as_given(call, results, q, into)


def _as_given(call: Call, results: Any, q: Any, into: dict[str, Any]) -> Any:
    """Results of the library of q, which has no adapter."""
    like = interop.like(q)
    if call.of is FORWARD:
        out, lse = results
        return into["out"] if into else like(out), None if lse is None else like(lse)
    dq, dk, dv = (into[name] if name in into else like(x) for name, x in zip(Gradients._fields, results))
    return Gradients(dq, dk, dv, {name: like(x) for name, x in results.of_arrays.items()})


@functools.cache  # an import statement costs 0.6 us in every call
def _gpu() -> Any:
    from .gpu import corridor

    return corridor


@functools.cache
def _cpu() -> Any:
    from .cpu import corridor

    return corridor
