"""The operators torch.ops.cupyflash.attention, attention_backward, attention_jvp and attention_backward_jvp: what
PyTorch knows of a call by a schema, with shapes, derivatives (`torch_derivatives`) and vmap. For calls that are traced
(torch.compile, torch.export, fake tensors, dispatch modes) or mapped (vmap)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import register_flop_formula

from .. import dispatch, folding, lengths, rules
from ..call import Arrays, Call
from ..gradients import Gradients
from ..passes import BACKWARD, BACKWARD_JVP, FORWARD, JVP, PASSES, Pass
from ..problem import OF_FLOAT8, products
from .torch_derivatives import following
from .torch_schema import Arguments, name_of, operator, schema


def at_once(call: Call) -> Any:
    """As `dispatch.run`; torch.use_deterministic_algorithms is heeded when gradients are computed, as PyTorch does."""
    if call.of.of_gradients and torch.are_deterministic_algorithms_enabled():
        call = call.but(options=call.options | {"deterministic": True})
    return dispatch.run(call)


def _kernel(of: Pass) -> Callable[..., Any]:
    def results(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows = at_once(Arguments(of, args).call())
        return first.contiguous(), rows.contiguous()

    def gradients(*args: Any) -> list[torch.Tensor]:
        call = Arguments(of, args).call()
        grads: Gradients = at_once(call)
        return [x.contiguous() for x in (*grads, *(grads.of_arrays[name] for name in call.wrt))]

    return gradients if of.of_gradients else results


def _fake(of: Pass) -> Callable[..., Any]:
    """Shapes and dtypes of the results."""

    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = Arguments(of, args)
        call.check()
        q = call.arrays["q"]
        latent = call.options["latent"]
        columns = call.arrays["v"].shape[-1] if latent is None else latent
        rows = tuple(q.shape[:-1])
        if call.options["layout"] == "bshd" and len(rows) > 1:
            rows = (*rows[:-2], rows[-1], rows[-2])
        lse = torch.float64 if q.dtype is torch.float64 else torch.float32
        out = getattr(torch, call.options["out_dtype"] or OF_FLOAT8[0]) if q.dtype is torch.float8_e4m3fn else q.dtype
        return q.new_empty((*q.shape[:-1], columns), dtype=out), q.new_empty(rows, dtype=lse)

    def like(*args: Any) -> Any:
        call = Arguments(of, args)
        call.check()
        found = ("q", "k", "v", *call.wrt) if of.of_gradients else ("out", "lse")
        empty = [call.arrays[name].new_empty(call.arrays[name].shape) for name in found]
        return empty if of.of_gradients else tuple(empty)

    return forward if of is FORWARD else like


_FOLD = {FORWARD: folding.forward, BACKWARD: folding.backward, JVP: folding.jvp, BACKWARD_JVP: folding.backward_jvp}


def _vmap(of: Pass) -> Callable[..., tuple[Any, Any]]:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        call = Arguments(of, args)

        def run(arrays: Arrays, options: dict[str, Any], wrt: tuple[str, ...] = ()) -> Any:
            return call.run(of, arrays, wrt, options["score"])

        arrays, has = call.in_front(in_dims)
        fold: Any = _FOLD[of]
        results = fold(torch, run, arrays, has, info.batch_size, call.options, *[call.wrt] * of.of_gradients)
        return results, tree_map(lambda x: 0, results)

    return rule


# ---- autograd's own vmap --------------------------------------------------------------------------------------------


_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def is_batched(x: Any) -> bool:
    """Whether it is mapped by autograd's own vmap (is_grads_batched=True), which is not that of torch.func."""
    return isinstance(x, torch.Tensor) and _is_legacy_batched(x)


def _batched(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """An operator under autograd's own vmap, by its rule for that of torch.func."""

    def run(*args: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        if level > 1:
            raise NotImplementedError(
                "gradients that are batched twice (is_grads_batched=True within another) are not served"
            )
        # 1 is what a tensor without the axis would get, and there is none.
        plain = tree_map(lambda x: torch._remove_batch_dim(x, level, 1, 0) if is_batched(x) else x, args)
        dims = tree_map(lambda x: 0 if is_batched(x) else None, args)
        sizes = [x.shape[0] for x, dim in zip(tree_iter(plain), tree_iter(dims)) if dim == 0]
        results, _ = rule(SimpleNamespace(batch_size=sizes[0]), dims, *plain)
        return tree_map(lambda x: torch._add_batch_dim(x, 0, level), results)

    return run


# ---- what PyTorch is told -------------------------------------------------------------------------------------------


def _flops(of: Pass) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None) -> int:
        """Of all pairs, also those that are hidden, as PyTorch counts its own attention: 2 products, 5 of the
        backward."""
        given = Arguments(of, args)
        q, k = (given.arrays[name].shape for name in "qk")
        latent = given.options["latent"]
        columns = given.arrays["v"].shape[-1] if latent is None else latent
        at = -3 if given.options["layout"] == "bshd" and len(k) > 2 else -2
        over_d, over_dv = products(of, rules.tangents_in(given.arrays))
        if lengths.stated(given.arrays):
            pairs = q[-2 if at == -3 else -3] * _pairs(given, q[at], k[at])
        else:
            pairs = math.prod(q[:-1]) * k[at]
        return 2 * pairs * (over_d * q[-1] + over_dv * columns)

    return count


def _pairs(given: Arguments, rows_q: int, rows_k: int) -> int:
    """Of queries and keys of all sequences together; where lengths have no values yet, of the longest that may be."""
    arrays = given.arrays
    one = lengths.stated(arrays)[0]
    n = arrays[one].shape[0] - one.startswith("cu_")
    most = {"q": rows_q, "k": rows_k}
    if "page_table" in arrays:
        most["k"] *= arrays["page_table"].shape[1]
    found = {}
    for side in "qk":
        x, hint = arrays.get(f"cu_seqlens_{side}"), given.options[f"max_seqlen_{side}"]
        known = x.diff() if x is not None else arrays.get("seqlens_k") if side == "k" else None
        if known is None or isinstance(known, FakeTensor):
            longest = most[side] if hint is None or known is None else min(hint, most[side])
            found[side] = [longest] * n
        else:
            found[side] = known.clamp(min=0).tolist()
    return sum(a * b for a, b in zip(found["q"], found["k"]))


_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not for torch.compile to read: it would, where a transform has it give up a function that calls the operator."""

    def run(*args: Any) -> Any:
        before = _set_eval_frame(None)
        try:
            return function(*args)
        finally:
            _set_eval_frame(before)

    return run


def _define() -> torch.library.Library:
    lib = torch.library.Library("cupyflash", "DEF")
    for of in PASSES.values():
        name, vmap = name_of(of), _opaque(_vmap(of))
        lib.define(schema(of), tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            lib.impl(name, _opaque(_kernel(of)), key)
        torch.library.register_fake(f"cupyflash::{name}", _fake(of), lib=lib)
        torch.library.register_vmap(f"cupyflash::{name}", vmap, lib=lib)
        lib.impl(name, _opaque(_batched(vmap)), "Batched")
        lib.impl(name, _opaque(following(of)), "Autograd", with_keyset=True)
        register_flop_formula(operator(of).overloadpacket, get_raw=True)(_flops(of))
    return lib


_library = _define()  # gone with it
