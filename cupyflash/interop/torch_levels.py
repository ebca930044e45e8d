"""Calls that are differentiated in forward mode or again, also by torch.func, and neither traced nor mapped: without
operators.

Each operator would be asked for at each level of torch.func, at that of autograd and at its kernel, through PyTorch's
dispatcher, which wraps all its arguments anew: some 50 us of the host each time. Here a level is lowered in Python, as
an interpreter of torch.func would do it, and the call goes on below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from ..call import Arrays, Call
from ..gradients import Gradients
from ..passes import FORWARD, Pass
from ..rules import lasting
from . import torch_operators, torch_schema
from .torch_derivatives import Modes, all_unwrapped, apart, follow, unwrapped
from .torch_operators import is_batched

_functorch: Any = torch._C._functorch
_interpreter, _level_of = _functorch.peek_interpreter_stack, _functorch.maybe_get_level
_wrap, _unwrap = _functorch._wrap_for_grad, _functorch._unwrap_for_grad
_GRAD, _JVP = TransformType.Grad, TransformType.Jvp
_OfGrad, _OfJvp = _functorch.CGradInterpreterPtr, _functorch.CJvpInterpreterPtr
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def served() -> bool:
    """Whether the level of torch.func that is asked first, if any, is one of derivatives."""
    interpreter = _interpreter()
    return interpreter is None or interpreter.key() in (_JVP, _GRAD)


@torch._disable_dynamo  # which reads what a transform calls piece by piece
def run(call: Call, arrays: Arrays, part: Callable[..., Any], settled: bool = False) -> Any:
    """The results of a call on these arrays. `part` runs those that it is made of, as this; `settled`: a node of
    autograd has kept inputs and results of attention, which have no tangents."""
    given = OfCall(call, arrays, part)
    moving = given.moving()
    plain, moves = apart(given.arrays, settled) if moving else (given.arrays, {})
    given.looked = moving or forward_ad._current_level < 0  # forward mode may be off for a while
    if any(map(is_batched, moves.values())):  # autograd's own vmap of forward mode (strategy="forward-mode")
        return in_form(call, torch_schema.run(call))
    return in_form(call, follow(given, plain, moves))


class OfCall:
    """A call, in the place of an operator's `Arguments`, at the level of torch.func that is asked first, or without."""

    looked = settled = False

    def __init__(self, call: Call, arrays: Arrays, part: Callable[..., Any]) -> None:
        self._part, self._call = part, call.without_arrays()
        self._call.options, self._call.check = lasting(call.options), call.check
        score = call.options["score"]
        self.of, self.wrt = call.of, call.wrt
        self.keys: tuple[str, ...] = () if score is None else score.keys
        self.with_rows = call.return_lse or call.of is not FORWARD
        interpreter = _interpreter()
        self._interpreter, self.last = interpreter, interpreter is None
        if interpreter is None:
            self.arrays = dict(zip(arrays, all_unwrapped(arrays.values())))
        else:
            self._of_jvp, self._level = interpreter.key() == _JVP, interpreter.level()
            self.arrays = {name: self._here(x) for name, x in arrays.items()}

    def _here(self, x: Any) -> Any:
        """As this level has it, to which nothing is what lower ones follow."""
        return x if _level_of(x) == self._level else _wrap(unwrapped(x), self._level)

    def moving(self) -> bool:
        """Whether forward mode may follow: at a level of its own, or where the one level is open that PyTorch has."""
        return _forward_mode() or (not self.last and self._of_jvp and torch._C._is_fwd_grad_enabled())

    def run(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = ()) -> list[torch.Tensor]:
        call = self._with(of, arrays, wrt)
        return _results(call, self._part(call, self.settled))

    def below(self, work: Callable[..., list[Any]], *arrays: Arrays) -> list[Any]:
        if self.last:
            return work(self._at_once, *arrays)
        level = self._level
        inside = [{name: _unwrap(x, level) for name, x in some.items()} for some in arrays]
        with _Below(self._interpreter, self._of_jvp, level):
            lone = level == 1 and not _forward_mode() and not any(map(_may_be_followed, inside))
            results = work(self._at_once if lone else self.run, *inside)
        return [_wrap(x, level) for x in results]

    def _at_once(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = ()) -> list[torch.Tensor]:
        call = self._with(of, arrays, wrt)
        return _results(call, torch_operators.at_once(call))

    def _with(self, of: Pass, arrays: Arrays, wrt: Iterable[str]) -> Call:
        call, looks = self._call, self._call.check and of is self.of
        rows = of is FORWARD
        options, more = call.options, {"check": looks, "own": True}
        return Call(call.lib, of, arrays, options, {}, call.seed, call.family, rows, tuple(wrt), **more)


class _Below(Modes):
    """Below a level of torch.func, in the modes that were outside of it: as its interpreter in Python goes there, in a
    sixth of the time."""

    __slots__ = ("_stack",)

    def __init__(self, interpreter: Any, of_jvp: bool, level: int) -> None:
        grad, forward_mode = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        if of_jvp:  # PyTorch has one level of it: outside of the first one of torch.func is none
            forward_mode = forward_mode and level > 1 and _OfJvp(interpreter).prevFwdGradMode()
        else:
            grad = grad and _OfGrad(interpreter).prevGradMode()
        super().__init__(grad, forward_mode)

    def __enter__(self) -> None:
        self._stack = _functorch.pop_dynamic_layer_stack()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        _functorch.push_dynamic_layer_stack(self._stack)


def _forward_mode() -> bool:
    """Whether the one level of forward mode is open that PyTorch has."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _may_be_followed(arrays: Arrays) -> bool:
    """Where neither a level of torch.func nor forward mode is."""
    for x in arrays.values():
        if x.requires_grad or type(x) not in _PLAIN or is_batched(x):
            return True
    return False


def _results(call: Call, found: Any) -> list[torch.Tensor]:
    """In the form of an operator's."""
    if not call.of.of_gradients:
        return [*found]
    return [*found, *[found.of_arrays[name] for name in call.wrt]]


def in_form(call: Call, results: Any) -> Any:
    """Results of an operator, as a call has them."""
    if not call.of.of_gradients:
        first, *rows = results
        return first, rows[0] if rows else None
    dq, dk, dv, *others = results
    return Gradients(dq, dk, dv, dict(zip(call.wrt, others)))
