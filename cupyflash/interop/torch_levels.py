"""Calls that are differentiated in forward mode or again, also by torch.func, and neither traced nor mapped: without
operators.

Each operator would be asked for at each level of torch.func, at that of autograd and at its kernel, through PyTorch's
dispatcher, which wraps all its arguments anew: some 50 us of the host each time. Here a level is lowered in Python, as
an interpreter of torch.func would do it, and the call goes on below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import coerce_cinterpreter

from ..call import Arrays, Call
from ..gradients import Gradients
from ..passes import FORWARD, Pass
from ..rules import lasting
from . import torch_derivatives, torch_operators, torch_schema
from .protocol import Recorder

_functorch: Any = torch._C._functorch
_interpreter = _functorch.peek_interpreter_stack
_LOWERED = (TransformType.Grad, TransformType.Jvp)


def served() -> bool:
    """Whether the level of torch.func that is asked first, if any, is one of derivatives."""
    interpreter = _interpreter()
    return interpreter is None or interpreter.key() in _LOWERED


def run(call: Call, recorded: Recorder) -> Any:
    """The results of a call. `recorded` runs those that it is made of, which others may follow."""
    return _of_call(call, torch_derivatives.follow(OfCall(call, recorded)))


class OfCall:
    """A call, in the place of an operator's `Arguments`."""

    def __init__(self, call: Call, recorded: Recorder) -> None:
        self._recorded, self._call = recorded, call.without_arrays()
        self._call.options, self._call.check = lasting(call.options), call.check
        score = call.options["score"]
        self.of, self.wrt = call.of, call.wrt
        self.keys: tuple[str, ...] = () if score is None else score.keys
        self.with_rows = call.return_lse or call.of is not FORWARD
        arrays = call.arrays
        names = (*torch_schema.names_of(call.of), *self.keys, *[f"t{key}" for key in self.keys])
        self.arrays: Arrays = {name: arrays[name] for name in names if name in arrays}

    def _with(self, of: Pass, arrays: Arrays, wrt: Iterable[str]) -> Call:
        call, looks = self._call, self._call.check and of is self.of
        rows = of is FORWARD
        return Call(call.lib, of, arrays, call.options, {}, call.seed, call.family, rows, tuple(wrt), check=looks)

    def run(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = ()) -> Any:
        call = self._with(of, arrays, wrt)
        return _results(call, self._recorded(call))

    def below(self, of: Pass, arrays: Arrays, wrt: Iterable[str] = ()) -> Any:
        interpreter = _interpreter()
        if interpreter is None:
            call = self._with(of, arrays, wrt)
            return _results(call, torch_operators.at_once(call))
        level, unwrap, wrap = interpreter.level(), _functorch._unwrap_for_grad, _functorch._wrap_for_grad
        with coerce_cinterpreter(interpreter).lower():
            results = self.run(of, {name: unwrap(x, level) for name, x in arrays.items()}, wrt)
        return [wrap(x, level) for x in results]


def _results(call: Call, found: Any) -> list[torch.Tensor]:
    """In the form of an operator's."""
    if not call.of.of_gradients:
        return [*found]
    return [*found, *[found.of_arrays[name] for name in call.wrt]]


def _of_call(call: Call, results: Any) -> Any:
    """And back."""
    if not call.of.of_gradients:
        first, *rows = results
        return first, rows[0] if rows else None
    dq, dk, dv, *others = results
    return Gradients(dq, dk, dv, dict(zip(call.wrt, others)))
