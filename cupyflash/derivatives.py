"""The public functions for derivatives beyond the first backward: tangents of `attention`'s results, and of its
gradients.

    J u     what the results change by along tangents u of the inputs               attention_jvp
    Jᵀ G    the gradients of the inputs, for those of the results                   attention_backward
    H(G) u  what the gradients change by along u                                    attention_backward_jvp

H(G) is symmetric, and Jᵀ the transpose of J: all second derivatives are made of these three.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import dispatch, interop
from .api import Shared, attention_backward
from .call import Arrays, Call
from .given import placed, present, trace_score, with_check
from .gradients import Gradients, check_wrt
from .other_names import unexpected
from .passes import BACKWARD_JVP, JVP, Pass
from .problem import ARRAYS, complete
from .rules import seed_of
from .signature import A, Array, sharing
from .tangents import jvp_of, of_call

if TYPE_CHECKING:
    from typing_extensions import Unpack


@sharing(attention_backward, without=("dlse", "wrt", "grads", "add"))
def attention_jvp(
    tangents: Mapping[str, Array],
    q: A,
    k: A,
    v: A,
    out: A,
    lse: Array,
    *,
    tout: A | None = None,
    **options: Unpack[Shared],
) -> tuple[A, Any]:
    """Tangents of `attention`'s results along tangents of its inputs (forward mode): d/de of attention(q + e tq, ...)
    at e = 0.

    Recomputes the probabilities from q, k and lse, as `attention_backward` does: at most 5 products of a tile where the
    forward has 2, and no score matrix in memory. What `tangents` leaves out is 0 and costs nothing.

    It also is the second derivative of a gradient by what that is for: where a loss depends on attention_backward(dout,
    ...), its gradients u of dq, dk, dv make those of dout and dlse by attention_jvp(u, ...).

    Parameters
    ----------
    tangents : mapping of arrays
        Those of "q", "k", "v", "bias", "alibi_slopes", "sinks" and the names in score_arrays (of arrays of floats) that
        are not 0; at least one. Each has shape and dtype of what it is the tangent of, and any strides.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them, out in the dtype of q
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, at,
    dropout, seed, layout, cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k, batch_invariant, sms,
    check, deterministic : as given to `attention`
    tout : (B, Sq, Hq, Dv), optional
        Where to write the tangent of out.
    family : str, optional
        As in `attention`.

    Returns
    -------
    tout : (B, Sq, Hq, Dv)
        Tangent of out, in its dtype. Hidden pairs add nothing, whatever tangents are there; rows that see no key have
        0.
    tlse : (B, Hq, Sq)
        Tangent of lse, in its dtype.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    operands = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    call = _call(attention_jvp, JVP, operands, tangents, dict(options))
    found: tuple[A, Any] = _run(call if tout is None else call.but(targets={"tout": tout}))
    return found


@sharing(attention_backward, without=("add",))
def attention_backward_jvp(
    tangents: Mapping[str, Array],
    dout: A,
    q: A,
    k: A,
    v: A,
    out: A,
    lse: Array,
    *,
    dlse: Array | None = None,
    jvp: tuple[A, Array] | None = None,
    wrt: str | Iterable[str] = (),
    grads: tuple[A, A, A] | None = None,
    **options: Unpack[Shared],
) -> Gradients:
    """Tangents of `attention_backward`'s results along tangents of its inputs: d/de of attention_backward(dout, q + e
    tq, ...).

    That is a Hessian product: H(G) u for G = (dout, dlse) and tangents u of the inputs, plus attention_backward(tdout,
    ...) where dout has a tangent too. At most 10 products of a tile (12 with that of dout) where the backward has 5,
    and no score matrix in memory. What `tangents` leaves out is 0 and costs nothing.

    H(G) is symmetric, so it also is the gradient of a gradient: where a loss depends on attention_backward(dout, q, k,
    v, ...), its gradients u of dq, dk, dv (and of what else `wrt` has) make those of q, k, v by
    attention_backward_jvp(u, dout, ...), and those of dout and dlse by attention_jvp(u, ...).

    Parameters
    ----------
    tangents : mapping of arrays
        As for `attention_jvp`; of "dout" and "dlse", too.
    dout : (B, Sq, Hq, Dv)
        Gradient of the loss with respect to `out`, in the dtype of q.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them, out in the dtype of q
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, at,
    dropout, seed, layout, cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k, batch_invariant, sms,
    check : as given to `attention`
    deterministic : bool
        Bitwise the same results in every run; on a CPU, with any number of cores.
    dlse : (B, Hq, Sq), optional
        Gradient of the loss with respect to `lse`, in its dtype.
    jvp : (tout, tlse), optional
        What `attention_jvp` returned for the same tangents, those of dout and dlse left out. Computed where it is not
        given.
    wrt : names, or one name
        Optional arrays for whose gradients tangents are wanted too, as in `attention_backward`.
    grads : (dq, dk, dv), optional
        Where to write the tangents of these gradients: each with memory of its own.
    family : str, optional
        As in `attention`.

    Returns
    -------
    dq, dk, dv
        The tangents of these gradients, as `attention_backward` returns the gradients: a named tuple, with dbias,
        dalibi_slopes, dsinks and dscore_arrays by name. Hidden pairs, and rows that see no key, add nothing.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    for name, x, each in (("grads", grads, "(dq, dk, dv)"), ("jvp", jvp, "(tout, tlse)")):
        size = each.count(",") + 1
        if x is not None and (not isinstance(x, (tuple, list)) or len(x) != size):
            what = f"holds {len(x)} arrays" if isinstance(x, (tuple, list)) else f"is {type(x).__name__}"
            raise ValueError(f"{name} {what}; it must be a tuple of {size} arrays {each} or None")
    operands = {"q": q, "dout": dout, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse}
    call = _call(attention_backward_jvp, BACKWARD_JVP, operands, tangents, dict(options))
    wanted = check_wrt(wrt, call.arrays, call.options["score"])
    call = call.but(targets={} if grads is None else dict(zip(BACKWARD_JVP.results, grads)), wrt=wanted)
    if jvp is None:
        if not interop.inlined(call.lib):  # a compiler looks at all of it first
            dispatch.check(call)
        jvp = _run(jvp_of(call))
    found: Gradients = _run(call.but(arrays=call.arrays | dict(zip(("tout", "tlse"), jvp))))
    return found


def _call(function: Callable[..., Any], of: Pass, operands: Arrays, tangents: Any, given: dict[str, Any]) -> Call:
    """A call of a function that was `given` these options and optional arrays by name."""
    known = _parameters(function)
    for name in given:
        if name not in known:
            raise unexpected(function.__name__, name, known)
    seed, number = seed_of(given.get("seed"), given.get("dropout", 0.0))
    required = [name for name in operands if name != "dlse"]
    optional = {row.name: given.get(row.name) for row in ARRAYS} | {"seed": seed, "at": None}
    arrays = present(required, operands | optional)
    options, score_arrays = complete(given), given.get("score_arrays")
    options["at"] = placed(options["at"], arrays)
    lib = interop.library("q", arrays["q"])
    if options["score"] is not None or score_arrays is not None:
        trace_score(lib, arrays, options, score_arrays)
    arrays = arrays | of_call(tangents, arrays, options["score"], of)
    call = Call(lib, of, arrays, options, seed=number, family=given.get("family"))
    return with_check(call, given.get("check", False))


@functools.cache  # to read a signature costs more than all else here
def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _run(call: Call) -> Any:
    return (call.lib.recorder(call) or dispatch.run)(call)
