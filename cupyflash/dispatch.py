"""One hand-over of a call to the CPU or the GPU, where it is run at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from . import interop
from .call import Arrays, Call
from .counts import check_at
from .gradients import Gradients
from .problem import AttentionProblem, mask_kind
from .rules import argument_name, lasting, state


def run(call: Call) -> Any:
    """(out, lse), where lse is None unless it is asked for; of gradients, `Gradients`; of a jvp, (tout, tlse)."""
    q, into = call.arrays["q"], call.targets
    arrays, targets = interop.adopt(call.lib, call.arrays, into)
    adapter = call.lib
    if call.options.get("latent") is not None:
        arrays = arrays | {"v": arrays["k"]}
    if arrays is not call.arrays or targets is not into:
        call = call.but(arrays=arrays, targets=targets)
    try:
        on_gpu = adapter.on_gpu(arrays["q"])
        if "at" in arrays and not (on_gpu or adapter.on_gpu(arrays["at"])):
            call = _with_numbers(call)
        if call.family is not None and not on_gpu:
            refuse_family(call.family, adapter.kind)
        if call.check and on_gpu:
            _values().check(call)
        results = (_gpu() if on_gpu else _cpu()).run(call)
    except Exception:
        interop.name_unreadable(adapter, arrays, targets)
        raise
    for x in targets.values():
        adapter.written(x)
    return results if arrays["q"] is q else _as_given(call, results, q, into)


def kept(call: Call) -> Callable[[], Any]:
    """Of a call that has run on a GPU what the next one like it runs by, as long as that is kept: its `run` takes a
    call and its arrays' addresses. Of one on a CPU nothing."""
    return _gpu().kept(call) if call.lib.on_gpu(call.arrays["q"]) else lambda: None


def _with_numbers(call: Call) -> Call:
    """A call on a CPU whose `at` is an array."""
    arrays = dict(call.arrays)
    numbers = check_at((*call.lib.to_numpy(arrays.pop("at")).tolist(),))
    return call.but(arrays=arrays, options=call.options | {"at": numbers})


def refuse_family(family: str, kind: str) -> NoReturn:
    """Families are the GPU's."""
    from .gpu.plan import check_family

    check_family(family)
    raise ValueError(f"family is {family!r}, a family of GPU kernels, but q is a {kind} array on the CPU")


def check_family(call: Call, problem: AttentionProblem | None) -> None:
    """ValueError where the family that is named does not take the call; without a problem, as a compiler has none yet,
    where it is on the CPU."""
    if call.family is not None:
        q = call.arrays["q"]
        if not call.lib.on_gpu(q):
            refuse_family(call.family, call.lib.kind)
        if problem is not None:
            _gpu().check_family(call, problem, call.lib.device(q))


def check(call: Call) -> None:
    """What `run` says of a call that is wrong, before anything is computed for it: once for all calls like it."""
    arrays, targets = interop.adopt(call.lib, call.arrays, call.targets)
    key = _like(call, arrays, targets) if call.lib.recorder(call) is None else None
    if key is not None and key in _right:
        return
    views = {name: interop.view(call.lib, argument_name(name), x) for name, x in arrays.items()}
    state(views, {name: call.lib.view(x) for name, x in targets.items()}, call.options, call.of)
    if key is not None:
        if len(_right) >= _MOST:
            _right.clear()
        _right.add(key)


_right: set[Any] = set()
_MOST = 4096


def _like(call: Call, arrays: Arrays, targets: Arrays) -> Any:
    """What the rules look at, as a key; None where there is none, as on the CPU, or of nonsense, which the rules
    name."""
    signature = getattr(call.lib, "signature", None)
    if signature is None:
        return None
    try:
        options = lasting(call.options) | {"block_mask": mask_kind(call.options["block_mask"])}
        of_arrays = map(signature, (*arrays.values(), *targets.values()))
        key = call.lib.kind, call.of, *options.values(), *arrays, *targets, *of_arrays
        hash(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return key


def _as_given(call: Call, results: Any, q: Any, into: dict[str, Any]) -> Any:
    """Results of the library of q, which has no adapter."""
    like = interop.like(q)
    if not call.of.of_gradients:
        out, lse = results
        return next(iter(into.values())) if into else like(out), None if lse is None else like(lse)
    dq, dk, dv = (into[name] if name in into else like(x) for name, x in zip(call.of.results, results))
    return Gradients(dq, dk, dv, {name: like(x) for name, x in results.of_arrays.items()})


@functools.cache  # an import statement costs 0.6 us in every call
def _gpu() -> Any:
    from .gpu import corridor

    return corridor


@functools.cache
def _values() -> Any:
    from .gpu import values

    return values


@functools.cache
def _cpu() -> Any:
    from .cpu import corridor

    return corridor
