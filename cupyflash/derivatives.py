"""The public functions for derivatives beyond the first backward: tangents of `attention`'s results, and of its gradients.

    J u     what the results change by along tangents u of the inputs               attention_jvp
    Jᵀ G    the gradients of the inputs, for those of the results                   attention_backward
    H(G) u  what the gradients change by along u                                    attention_backward_jvp

H(G) is symmetric, and Jᵀ the transpose of J: all second derivatives are made of these three.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from . import dispatch, interop
from .api import ScoreFunction, present, trace_score
from .call import Arrays, Call
from .interop.protocol import Library
from .other_names import unexpected
from .passes import BACKWARD_JVP, JVP, Pass
from .problem import Gradients, check_wrt, seed_of
from .signature import A, Array, closed
from .tangents import jvp_of, of_call

if TYPE_CHECKING:
    from .blockmask.blocks import BlockMask


@closed
def attention_jvp(
    tangents: Mapping[str, Array],
    q: A,
    k: A,
    v: A,
    out: A,
    lse: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score: ScoreFunction | None = None,
    score_arrays: Mapping[str, Array] | None = None,
    block_mask: BlockMask | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    tout: A | None = None,
    family: str | None = None,
    **unknown: NoReturn,  # refused, and told what it is called here
) -> tuple[A, Any]:
    """Tangents of `attention`'s results along tangents of its inputs (forward mode): d/de of attention(q + e tq, ...) at e = 0.

    Recomputes the probabilities from q, k and lse, as `attention_backward` does: at most 5 products of a tile where the
    forward has 2, and no score matrix in memory. What `tangents` leaves out is 0 and costs nothing.

    It also is the second derivative of a gradient by what that is for: where a loss depends on attention_backward(dout, ...), its
    gradients u of dq, dk, dv make those of dout and dlse by attention_jvp(u, ...).

    Parameters
    ----------
    tangents : mapping of arrays
        Those of "q", "k", "v", "bias", "alibi_slopes", "sinks" and the names in score_arrays (of arrays of floats) that are not
        0; at least one. Each has shape and dtype of what it is the tangent of, and any strides.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, dropout, seed,
    layout, deterministic : as given to `attention`
    tout : (B, Sq, Hq, Dv), optional
        Where to write the tangent of out.
    family : str, optional
        As in `attention`.

    Returns
    -------
    tout : (B, Sq, Hq, Dv)
        Tangent of out, in its dtype. Hidden pairs add nothing, whatever tangents are there; rows that see no key have 0.
    tlse : (B, Hq, Sq)
        Tangent of lse, in its dtype.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    if unknown:
        raise unexpected("attention_jvp", next(iter(unknown)), inspect.signature(attention_jvp).parameters)
    seed, number = seed_of(seed, dropout)
    arrays: Arrays = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "key_mask": key_mask, "mask": mask, "bias": bias,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "seed": seed,
    }  # fmt: skip
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "score": score, "block_mask": block_mask,
        "dropout": dropout, "layout": layout, "deterministic": deterministic,
    }  # fmt: skip
    lib, arrays = _given(JVP, arrays, options, score_arrays, tangents)
    call = Call(lib, JVP, arrays, options, {} if tout is None else {"tout": tout}, number, family)
    found: tuple[A, Any] = _run(call)
    return found


@closed
def attention_backward_jvp(
    tangents: Mapping[str, Array],
    dout: A,
    q: A,
    k: A,
    v: A,
    out: A,
    lse: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_mask: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    score: ScoreFunction | None = None,
    score_arrays: Mapping[str, Array] | None = None,
    block_mask: BlockMask | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    dlse: Array | None = None,
    jvp: tuple[A, Array] | None = None,
    wrt: str | Iterable[str] = (),
    grads: tuple[A, A, A] | None = None,
    family: str | None = None,
    **unknown: NoReturn,  # refused, and told what it is called here
) -> Gradients:
    """Tangents of `attention_backward`'s results along tangents of its inputs: d/de of attention_backward(dout, q + e tq, ...).

    That is a Hessian product: H(G) u for G = (dout, dlse) and tangents u of the inputs, plus attention_backward(tdout, ...) where
    dout has a tangent too. At most 10 products of a tile (12 with that of dout) where the backward has 5, and no score matrix in
    memory. What `tangents` leaves out is 0 and costs nothing.

    H(G) is symmetric, so it also is the gradient of a gradient: where a loss depends on attention_backward(dout, q, k, v, ...),
    its gradients u of dq, dk, dv (and of what else `wrt` has) make those of q, k, v by attention_backward_jvp(u, dout, ...), and
    those of dout and dlse by attention_jvp(u, ...).

    Parameters
    ----------
    tangents : mapping of arrays
        As for `attention_jvp`; of "dout" and "dlse", too.
    dout : (B, Sq, Hq, Dv)
        Gradient of the loss with respect to `out`, in the dtype of q.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, dropout, seed,
    layout : as given to `attention`
    deterministic : bool
        Bitwise the same results in every run; on a CPU, with any number of cores.
    dlse : (B, Hq, Sq), optional
        Gradient of the loss with respect to `lse`, in its dtype.
    jvp : (tout, tlse), optional
        What `attention_jvp` returned for the same tangents, those of dout and dlse left out. Computed where it is not given.
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
    if unknown:
        of = inspect.signature(attention_backward_jvp).parameters
        raise unexpected("attention_backward_jvp", next(iter(unknown)), of)
    seed, number = seed_of(seed, dropout)
    arrays: Arrays = {
        "q": q, "dout": dout, "k": k, "v": v, "out": out, "lse": lse, "key_mask": key_mask, "mask": mask, "bias": bias,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "seed": seed, "dlse": dlse,
    }  # fmt: skip
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "score": score, "block_mask": block_mask,
        "dropout": dropout, "layout": layout, "deterministic": deterministic,
    }  # fmt: skip
    lib, arrays = _given(BACKWARD_JVP, arrays, options, score_arrays, tangents)
    for name, x, each in (("grads", grads, "(dq, dk, dv)"), ("jvp", jvp, "(tout, tlse)")):
        size = each.count(",") + 1
        if x is not None and (not isinstance(x, (tuple, list)) or len(x) != size):
            what = f"holds {len(x)} arrays" if isinstance(x, (tuple, list)) else f"is {type(x).__name__}"
            raise ValueError(f"{name} {what}; it must be a tuple of {size} arrays {each} or None")
    targets = {} if grads is None else dict(zip(BACKWARD_JVP.results, grads))
    wanted = check_wrt(wrt, arrays, options["score"])
    call = Call(lib, BACKWARD_JVP, arrays, options, targets, number, family, wrt=wanted)
    if jvp is None:
        jvp = _run(jvp_of(call))
    arrays |= zip(("tout", "tlse"), jvp)
    found: Gradients = _run(call)
    return found


def _given(
    of: Pass, arrays: Arrays, options: dict[str, Any], score_arrays: Any, tangents: Any
) -> tuple[Library, Arrays]:
    """The library of q, and the arrays of a call, tangents among them; the score function becomes a `Score`."""
    required = [row.name for row in of.rows if not (row.optional or row.result or row.name in ("tout", "tlse"))]
    arrays = present(required, arrays)
    lib = interop.library("q", arrays["q"])
    if options["score"] is not None or score_arrays is not None:
        trace_score(lib, arrays, options, score_arrays)
    return lib, arrays | of_call(tangents, arrays, options["score"], of)


def _run(call: Call) -> Any:
    return (call.lib.recorder(call) or dispatch.run)(call)
