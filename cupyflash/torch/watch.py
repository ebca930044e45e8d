"""What a function of PyTorch's does while it is run once: a mask_mod, or a score_mod, whose operators are followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from ..interop.torch_derivatives import innermost

WRITES_BY_PAIR = (
    "score_mod writes into a tensor by a number that depends on the pair; it must read elements, and choose with "
    "torch.where"
)


class Watch(TorchFunctionMode):
    """table[h] reads an element, as under PyTorch's own vmap, and who looks at a number is noticed."""

    looked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = _index(args)
            if any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in index):
                self.looked = True  # by values: how many elements there are
            if any(isinstance(x, torch.Tensor) for x in index) and all(map(_known, index)):
                return torch.ops.aten.index.Tensor(args[0], [_INDICES.get(type(x), lambda x: x)(x) for x in index])
        elif func in _LOOKS or func in _READS:
            self.looked = True
        return func(*args, **(kwargs or {}))


class Trace(Watch):
    """The same while a trace follows a score_mod. It sees what is computed, so what it would not see is noticed, too.

    Gradients are on for the function, and off in each operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut: set[str] = set()  # nodes of what it computes with gradients off
        self._known: dict[Any, bool] = {}  # which nodes depend on the pair

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            return func(*args)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = _index(args)
            by_pair = any(map(self._of_the_pair, _tensors(index)))
            if by_pair and func is torch.Tensor.__setitem__:
                raise NotImplementedError(WRITES_BY_PAIR)
            if by_pair and not all(map(_known, index)):
                raise NotImplementedError(
                    "score_mod reads a part of a tensor beside a number that depends on the pair; it must read "
                    "elements, as in table[h, i], or rows, as in table[h]"
                )
        elif func in _LOOKS or func in _READS:
            if any(map(self._of_the_pair, _tensors(args))):
                raise TypeError(
                    "score_mod hands a number of the pair to NumPy or Python; it must compute with functions of torch"
                    if func in _READS
                    else "score_mod decides by a number that depends on the pair (with if, and, or, not, int() or "
                    "item()); it must choose with torch.where, and combine with &, | and ~"
                )
            with disable_proxy_modes_tracing():
                return super().__torch_function__(func, types, args, kwargs)
        if torch._C._are_functorch_transforms_active():  # the function's own, which differentiate within
            return super().__torch_function__(func, types, args, kwargs)
        off, nodes = not torch.is_grad_enabled(), _graph().nodes
        before = len(nodes) if off else 0
        with torch.no_grad():
            found = super().__torch_function__(func, types, args, kwargs)
        if off:
            self.cut |= {n.name for n in list(nodes)[before:]}
        return found

    def _of_the_pair(self, x: Any) -> bool:
        """Whether a tensor is computed of what the function is called with."""
        mode: Any = get_proxy_mode()
        slot: Any = None if mode is None else get_proxy_slot(innermost(x), mode.tracer, None)
        return slot is not None and self._depends(slot.proxy.node)

    def _depends(self, n: Any) -> bool:
        if n not in self._known:
            self._known[n] = n.op == "placeholder" or any(map(self._depends, n.all_input_nodes))
        return self._known[n]


def _graph() -> Any:
    mode: Any = get_proxy_mode()
    return _Nothing if mode is None else mode.tracer.graph


class _Nothing:
    """The graph where make_fx computes for itself."""

    nodes: tuple[Any, ...] = ()


def _tensors(x: Any) -> Iterator[Any]:
    """Those in lists, tuples, dictionaries and slices."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict, slice)):
        inside = x.values() if isinstance(x, dict) else (x.start, x.stop, x.step) if isinstance(x, slice) else x
        for y in inside:
            yield from _tensors(y)


def _index(args: Any) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _known(index: Any) -> bool:
    return isinstance(index, (int, torch.Tensor)) or (isinstance(index, slice) and index == slice(None))


def _functions(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names}


_INDICES: dict[type, Any] = {int: torch.tensor, slice: lambda x: None}
_LOOKS = _functions("item", "__bool__", "__int__", "__float__", "__index__", "__contains__")
_READS = _functions("tolist", "numpy", "__array__")
