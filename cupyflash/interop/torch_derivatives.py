"""Derivatives of the operators, which are made of each other:

    J u     attention_jvp           of attention along tangents u of its inputs
    Jᵀ G    attention_backward      its gradients for those of the results, G
    H(G) u  attention_backward_jvp  of Jᵀ G along u; H is symmetric

                       by reverse mode                              in forward mode
    attention          Jᵀ                                           J
    J u                by the inputs H, by u Jᵀ                     J of u's tangent; not along inputs: twice forward
    Jᵀ G               for u, gradients of its results:             H along the inputs, Jᵀ of G's tangent
                       by the inputs H(G) u, by G J u
    H(G) u             by u J, then H; by the rest it raises        H of u's tangent; along the rest it raises

out and lse count as functions of the inputs, here and there: they get no gradients of their own. (For those that may
be others' a user's call is made another one: `parts`.)

PyTorch drops tangents of operators in silence, and has no second derivative of `torch.library.register_autograd` under
torch.func. So each operator has a kernel of its own in the place of autograd, which every transform comes by. What is
neither traced nor mapped comes here as a call, without an operator (`torch_levels`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from .. import cached
from ..call import Arrays
from ..passes import BACKWARD, BACKWARD_JVP, BY_RESULTS, FORWARD, FORWARD_TWICE, JVP, TWICE, Pass
from ..problem import FLOAT8
from ..reals import FOLLOWS
from .torch_schema import INPUTS, Arguments, lists_of, names_of, operator

Found = dict[str, Any]
Run = Callable[..., Any]  # Given.run, or the same below a level
Names = tuple[str, ...]
_functorch: Any = torch._C._functorch


class Given(Protocol):
    """What is differentiated, at one level of torch.func, or without: `Arguments` of an operator, or a call."""

    of: Pass
    arrays: Arrays
    wrt: tuple[str, ...]
    keys: tuple[str, ...]  # what the arrays that a score function reads are called
    with_rows: bool  # whether lse, or its tangent, is asked for
    last: bool  # whether nobody follows below
    looked: bool  # whether all tangents at this level are known
    settled: bool  # whether inputs and results of attention, as a node has kept them, have none at this level

    def run(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = ()) -> Any:
        """A pass on these arrays, followed by whoever follows them at this level."""

    def below(self, work: Callable[..., list[Any]], *arrays: Arrays) -> list[Any]:
        """What `work` makes of a function as `run` and of these arrays, both below this level."""


def following(of: Pass) -> Callable[..., Any]:
    """What autograd does for the operator of a pass, at one level of torch.func, or without."""
    op, size = operator(of), len(names_of(of))
    lists = [size + n for n, name in enumerate(lists_of(of)) if name != "blocks"]

    def kernel(keys: Any, *args: Any) -> Any:
        tensors = [x for x in (*args[:size], *(x for n in lists for x in args[n])) if x is not None]
        if any_dual(tensors):
            _refuse_fused()
            given = Arguments(of, args)
            return _in_forward_mode(given, *apart(given.arrays))
        if _wanted(tensors):
            given = Arguments(of, args)
            return _recorded(given, given.arrays)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return kernel


def follow(given: Given, plain: Arrays, moves: Arrays) -> Any:
    """The same for what comes without an operator: `apart` from its tangents."""
    if moves:
        return _in_forward_mode(given, plain, moves)
    return _recorded(given, plain) if _wanted(plain.values()) else _once(given, plain)


def _once(given: Given, arrays: Arrays) -> list[Any]:
    """Below this level."""
    return given.below(lambda run, arrays: run(given.of, arrays, given.wrt), arrays)


def _wanted(tensors: Iterable[Any]) -> bool:
    """Whether gradients may be asked for."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


# ---- forward mode ---------------------------------------------------------------------------------------------------

# There is one level, 0, of which PyTorch's Python does not know where a compiled program has entered it.
_unpack, _make = torch._VF._unpack_dual, torch._VF._make_dual


def any_dual(tensors: Iterable[Any]) -> bool:
    """Whether forward mode follows one of them; with or without requires_grad, also under torch.no_grad()."""
    if not torch._C._is_fwd_grad_enabled():  # as in the forward of an autograd function, which has a jvp of its own
        return False
    for x in tensors:
        if x.is_floating_point() and _unpack(x, level=0)[1] is not None:
            return True
    return False


def followed(scalar: Any) -> bool:
    """Whether a derivative, or an axis of vmap, is expected of a tensor that is taken for the number in it."""
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    return isinstance(scalar, torch.Tensor) and bool(_followed(scalar))


FOLLOWS.append(followed)


def moves(x: Any) -> bool:
    """Whether a derivative of it may be asked for, at any level of torch.func, or outside of these."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return bool(x.requires_grad)


@torch._disable_dynamo
def _followed(scalar: Any) -> bool:
    """At any level."""
    scalar = unwrapped(scalar)
    if scalar.requires_grad or _functorch.is_batchedtensor(scalar) or any_dual((scalar,)):
        return True
    if _functorch.peek_interpreter_stack() is None:
        return False
    own = _functorch.maybe_get_level(scalar) == _functorch.maybe_current_level()
    with temporarily_pop_interpreter_stack():
        return bool(_followed(_functorch.get_unwrapped(scalar) if own else scalar))


def _refuse_fused() -> None:
    """NotImplementedError where Inductor's code calls. It was not made for tangents, and has lost those of what it has
    fused."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch._inductor.runtime.compile_tasks."):
            raise NotImplementedError(
                "a program of torch.compile is given tensors with tangents, and would lose some of them; differentiate "
                "inside of what is compiled, or use backend='aot_eager'"
            )
        frame = frame.f_back


def apart(arrays: Arrays, settled: bool = False) -> tuple[Arrays, Arrays]:
    """The arrays without tangents, and these. `settled`: inputs and results of attention have none."""
    plain, moves = dict(arrays), {}
    for name, x in arrays.items():
        if x.is_floating_point() and not (settled and name[0] != "t" and name not in ("dout", "dlse")):
            primal, tangent = _unpack(x, level=0)
            if tangent is not None:
                plain[name], moves[name] = primal, tangent
    return plain, moves


def _in_forward_mode(given: Given, plain: Arrays, moves: Arrays) -> Any:
    of, wrt = given.of, given.wrt
    if _wanted((*plain.values(), *moves.values())):
        dual = [*given.arrays.values()]
        results = _recorded(given, plain, dual)  # a backward at this level of forward mode gives tangents, too
        for arrays in (plain, moves):  # of which there are gradients when it is over: no third derivatives
            arrays |= _guarded(arrays, list(arrays), dual)
        with Modes(True, False) if given.last else _nothing:  # what has been taken apart has no tangents
            tangents = _ALONG[of](given.run, wrt, plain, results, moves)
    else:

        def both(run: Run, plain: Arrays, moves: Arrays) -> list[Any]:
            results = run(of, plain, wrt)
            tangents = _ALONG[of](run, wrt, plain, results, moves)
            return [*results, *tangents] if given.with_rows else [results[0], tangents[0]]

        found = given.below(both, plain, moves)  # nobody follows at this level what has been taken apart
        results, tangents = found[: len(found) // 2], found[len(found) // 2 :]
    wanted = results if given.with_rows else results[:1]
    duals = [_make(x, tangent, level=0) for x, tangent in zip(wanted, tangents)]
    return duals if of.of_gradients else tuple(duals)


def _moving(moves: Arrays) -> Arrays:
    return {f"t{name}": x for name, x in moves.items()}


def _of_forward(run: Run, wrt: Names, plain: Arrays, results: Any, moves: Arrays) -> Any:
    if plain["q"].dtype is torch.float8_e4m3fn:
        cached.refuse_float8(FLOAT8, JVP)
    return run(JVP, plain | dict(zip(("out", "lse"), results)) | _moving(moves))


def _of_jvp(run: Run, wrt: Names, plain: Arrays, results: Any, moves: Arrays) -> Any:
    if not all(name.startswith("t") for name in moves):
        raise NotImplementedError(FORWARD_TWICE)
    return run(JVP, _fixed(plain) | moves)


def _fixed(arrays: Arrays) -> Arrays:
    """Those that are no tangents."""
    return {name: x for name, x in arrays.items() if not name.startswith("t")}


def _of_backward(run: Run, wrt: Names, plain: Arrays, results: Any, moves: Arrays) -> Any:
    of_g: Arrays = {name: moves.pop(name) for name in ("dout", "dlse") if name in moves}
    of_results = [moves.pop(name, None) for name in ("out", "lse")]
    if not moves:
        if not of_g:
            raise NotImplementedError(BY_RESULTS)
        return run(BACKWARD, _with_g(plain, of_g.get("dout"), of_g.get("dlse")), wrt)
    arrays = plain | _moving(moves)
    if any(x is None for x in of_results):
        of_results = run(JVP, _without_g(arrays))
    return run(BACKWARD_JVP, arrays | _moving(of_g) | _jvp(of_results), wrt)


def _of_backward_jvp(run: Run, wrt: Names, plain: Arrays, results: Any, moves: Arrays) -> Any:
    if not all(name.startswith("t") for name in moves):
        raise RuntimeError(TWICE)
    of_g = {name: moves[name] for name in ("tdout", "tdlse") if name in moves}
    if len(moves) == len(of_g):
        return run(BACKWARD, _with_g(_fixed(plain), of_g.get("tdout"), of_g.get("tdlse")), wrt)
    of_results = [moves.pop(name, None) for name in ("tout", "tlse")]
    arrays = _fixed(plain) | moves
    if any(x is None for x in of_results):
        of_results = run(JVP, _without_g(arrays))
    return run(BACKWARD_JVP, arrays | _jvp(of_results), wrt)


_ALONG = {FORWARD: _of_forward, JVP: _of_jvp, BACKWARD: _of_backward, BACKWARD_JVP: _of_backward_jvp}


def _jvp(of_results: Iterable[Any]) -> Arrays:
    """What a jvp gave, as those take it that go on from there."""
    return dict(zip(("tout", "tlse"), of_results))


def _without_g(arrays: Arrays) -> Arrays:
    return {name: x for name, x in arrays.items() if name not in ("dout", "dlse", "tdout", "tdlse", "tout", "tlse")}


def _with_g(arrays: Arrays, dout: Any, dlse: Any) -> Arrays:
    """With these gradients of out and lse in the place of others."""
    dout = torch.zeros_like(arrays["out"]) if dout is None else dout
    return _without_g(arrays) | {"dout": dout} | ({} if dlse is None else {"dlse": dlse})


# ---- reverse mode ---------------------------------------------------------------------------------------------------


def _recorded(given: Given, arrays: Arrays, dual: list[Any] | None = None) -> Any:
    """The results for these arrays. `dual`: the same with tangents."""
    if given.of is BACKWARD_JVP:
        arrays = arrays | _guarded(arrays, [name for name in arrays if not name.startswith("t")])
    forward_mode = torch._C._is_fwd_grad_enabled()
    results = _at_one_level(_record, given, tuple(arrays), forward_mode, dual, *all_unwrapped(arrays.values()))
    return list(results) if given.of.of_gradients else results


def _guarded(arrays: Arrays, names: Iterable[str], dual: list[Any] | None = None) -> Arrays:
    """Of these arrays those that gradients are wanted of, which are refused: always, or where `dual` have tangents
    still."""
    wanted = [name for name in names if arrays[name].requires_grad]
    if not wanted:
        return {}
    forward_mode = torch._C._is_fwd_grad_enabled()
    return dict(zip(wanted, _at_one_level(_guard, forward_mode, dual, *[unwrapped(arrays[name]) for name in wanted])))


_set_one_level = _functorch.set_single_level_autograd_function_allowed


def _at_one_level(function: Callable[..., Any], *args: Any) -> Any:
    """An autograd function applied, which levels of torch.func allow where they have said so."""
    if not torch._C._are_functorch_transforms_active():
        return function(*args)
    before = _functorch.get_single_level_autograd_function_allowed()
    _set_one_level(True)
    try:
        return function(*args)
    finally:
        _set_one_level(before)


def unwrapped(x: Any) -> Any:
    """What transforms that are over have left wrapped; as PyTorch's own functions do."""
    while _is_dead(x):
        x = _unwrap_dead(x)
    return x


def innermost(x: Any) -> Any:
    """What lies beneath x, whatever transforms have wrapped it."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def all_unwrapped(tensors: Collection[Any]) -> Any:
    """The same of many, of which hardly ever one is wrapped."""
    return [*map(unwrapped, tensors)] if any(map(_is_dead, tensors)) else tensors


_is_dead, _unwrap_dead = _functorch.is_dead_tensor_wrapper, _functorch.unwrap_if_dead


class Modes:
    """With gradients and forward mode enabled, or not: PyTorch's own two contexts in a quarter of their time."""

    __slots__ = ("_before", "_within")

    def __init__(self, grad: bool, forward_mode: bool) -> None:
        self._within = grad, forward_mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        _set_modes(*self._within)

    def __exit__(self, *_: object) -> None:
        _set_modes(*self._before)


def _set_modes(grad: bool, forward_mode: bool) -> None:
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward_mode)


def _below(forward_mode: bool) -> Modes:
    """For the forward of an autograd function: the other levels of torch.func come there, to record and to move as they
    would have done outside."""
    return Modes(True, forward_mode)


_nothing = nullcontext()


class _Recorded(torch.autograd.Function):
    """A pass, with its gradients by those of others."""

    @staticmethod
    def forward(
        ctx: Any, given: Given, names: tuple[str, ...], forward_mode: bool, dual: list[Any] | None, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        with _nothing if given.last else _below(forward_mode):
            results = tuple(_once(given, dict(zip(names, tensors))))
        ctx.set_materialize_grads(False)
        ctx.given, ctx.names, ctx.plain = given, names, given.looked and dual is None
        ctx.save_for_backward(*(dual or tensors), *(() if given.of.of_gradients else results))
        given.arrays = {}
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        given, n = ctx.given, len(ctx.names)
        needed = [name for name, wanted in zip(ctx.names, ctx.needs_input_grad[4:]) if wanted]
        grads = other_than_zero(grads)
        if all(x is None for x in grads):
            return (None,) * (4 + n)
        saved = ctx.saved_tensors
        # (What lies in the wrapper of a level that is over may have tangents at that below.)
        inside = all_unwrapped(saved)
        given.settled = ctx.plain and inside is saved
        saved = inside
        found = _BY[given.of](given, dict(zip(ctx.names, saved)), saved[n:], grads, needed)
        return None, None, None, None, *map(found.get, ctx.names)


class _Guard(torch.autograd.Function):
    """A node for itself in front of another, whose backward is run for other gradients, too."""

    @staticmethod
    def forward(ctx: Any, forward_mode: bool, dual: list[Any] | None, *tensors: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.always = dual is None
        ctx.save_for_backward(*dual or ())
        with _below(forward_mode), torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.aten.alias(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if ctx.always or any_dual(ctx.saved_tensors):
            raise RuntimeError(TWICE)
        return None, None, *grads


# Not through Function.apply, which asks for a function that is written for all levels of torch.func at once.
_record: Any = super(torch.autograd.Function, _Recorded).apply
_guard: Any = super(torch.autograd.Function, _Guard).apply


def other_than_zero(grads: Iterable[Any]) -> tuple[Any, ...]:
    """None in the place of those that PyTorch knows to be 0, which have no memory; those that it has yet to negate,
    negated."""
    return tuple([None if x is None or x._is_zerotensor() else x.resolve_neg() if x.is_neg() else x for x in grads])


def _gradients(given: Given, of: Pass, arrays: Arrays, wanted: Iterable[str], t: str = "") -> Found:
    """Those of q, k, v and of what else is wanted, by name."""
    wrt = [name for name in wanted if name not in ("q", "k", "v")]
    return {f"{t}{name}": x for name, x in zip(("q", "k", "v", *wrt), given.run(of, arrays, wrt))}


def _inputs(given: Given, needed: list[str]) -> list[str]:
    """Those of attention: q, k, v and optional arrays."""
    return [name for name in needed if name in INPUTS or name in given.keys]


def _by_forward(given: Given, arrays: Arrays, results: Any, grads: Any, needed: list[str]) -> Found:
    return _gradients(given, BACKWARD, _with_g(arrays | dict(zip(("out", "lse"), results)), *grads), needed)


def _by_jvp(given: Given, arrays: Arrays, results: Any, grads: Any, needed: list[str]) -> Found:
    moved, inputs = [name[1:] for name in needed if name.startswith("t")], _inputs(given, needed)
    if not moved and not inputs:
        raise RuntimeError(BY_RESULTS)
    found = _gradients(given, BACKWARD, _with_g(_fixed(arrays), *grads), moved, "t") if moved else {}
    if inputs:
        found |= _gradients(given, BACKWARD_JVP, _with_g(arrays, *grads) | _jvp(results), inputs)
    return found


def _by_backward(given: Given, arrays: Arrays, results: Any, grads: Any, needed: list[str]) -> Found:
    inputs = _inputs(given, needed)
    if not inputs and not {"dout", "dlse"} & set(needed):
        raise RuntimeError(BY_RESULTS)
    arrays |= _moves(given, grads)
    of_g = given.run(JVP, _without_g(arrays))
    found = _gradients(given, BACKWARD_JVP, arrays | _jvp(of_g), inputs) if inputs else {}
    return found | dict(zip(("dout", "dlse"), of_g))


def _by_backward_jvp(given: Given, arrays: Arrays, results: Any, grads: Any, needed: list[str]) -> Found:
    moved = [name[1:] for name in needed if name.startswith("t") and name not in ("tout", "tlse")]
    if not moved:
        raise RuntimeError(TWICE)
    linear = [name for name in moved if name not in ("dout", "dlse")]
    arrays = _fixed(arrays) | _moves(given, grads)
    of_g = given.run(JVP, _without_g(arrays))
    found = _gradients(given, BACKWARD_JVP, arrays | _jvp(of_g), linear, "t") if linear else {}
    return found | dict(zip(("tdout", "tdlse"), of_g))


def _moves(given: Given, grads: Any) -> Arrays:
    """Gradients of gradients, as tangents of what those are for."""
    return {f"t{name}": x for name, x in zip(("q", "k", "v", *given.wrt), grads) if x is not None}


_BY = {FORWARD: _by_forward, JVP: _by_jvp, BACKWARD: _by_backward, BACKWARD_JVP: _by_backward_jvp}
