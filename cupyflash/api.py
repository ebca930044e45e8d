"""The public functions: check, state the problem, hand it to the CPU or the GPU.

Arrays come in from any library and results go back to the same one; see `cupyflash.interop`.
"""

from __future__ import annotations

import functools
from typing import Any

from . import interop
from . import problem as rules
from .problem import AttentionProblem, View

Array = Any


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    key_mask: Array | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    out: Array | None = None,
    family: str | None = None,
) -> Any:
    """Exact attention, softmax(scale · Q Kᵀ + mask) V, without the score matrix in memory.

    The online-softmax tiling of FlashAttention (Dao et al. 2022, Algorithm 1; Dao 2023, Algorithm 1).

    Parameters
    ----------
    q : (B, Sq, Hq, D)
        Queries. float16, bfloat16, float32 or float64; NumPy, CuPy, PyTorch, JAX or anything with DLPack or the
        CUDA array interface. Any strides.
    k : (B, Sk, Hk, D)
        Keys. Hq must be a multiple of Hk (multi-head, grouped-query or multi-query attention): query head h reads
        key/value head h // (Hq // Hk).
    v : (B, Sk, Hk, Dv)
        Values. Dv may differ from D.
    causal : False, True, "bottom_right" or "top_left"
        Hide keys to the right of the diagonal. True is "bottom_right": query i sees keys j <= i + Sk - Sq, so the
        last query sees the last key. "top_left": j <= i.
    window : (left, right), optional
        Each query sees `left` keys to the left and `right` keys to the right of its diagonal, both inclusive;
        None is unbounded. The diagonal is the one that `causal` names.
    scale : float, optional
        Multiplies Q Kᵀ. Default 1 / sqrt(D).
    key_mask : (B, Sk) bool, optional
        True where the key may be attended.
    layout : "bshd" or "bhsd"
        Where the heads stand. Without the batch axis (S, H, D) and without heads (S, D) are accepted too.
    return_lse : bool
        Also return the log-sum-exp of every row's scores, which `attention_backward` and `merge` need.
    deterministic : bool
        The forward always is, bit for bit; this asks it of the gradients (PyTorch tensors that require grad).
    out : array, optional
        Where to write the result: the shape, dtype, library and device of the result.
    family : "sm90", "sm80", "simt", "flash1", optional
        Take this kernel family instead of the fastest one that supports the problem. "flash1", FlashAttention as
        published in 2022, is there to be compared with and is taken only where it is named.

    Returns
    -------
    out : (B, Sq, Hq, Dv)
        Same library, dtype, device, rank and layout as q. Rows that see no key are 0.
    lse : (B, Hq, Sq), only with return_lse=True
        Natural log, float32 (float64 for float64 inputs). -inf for rows that see no key.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    arrays = [q, k, v, key_mask]
    lib = interop.library("q", q)
    _given(k=k, v=v)
    options = {"causal": causal, "window": window, "scale": scale, "layout": layout}
    if lib.wants_grad(arrays):
        return lib.differentiable_attention(
            q, k, v, key_mask=key_mask, return_lse=return_lse, deterministic=deterministic, out=out, family=family,
            **options,
        )  # fmt: skip
    lib, (q, k, v, key_mask, out) = interop.adopt(lib, q=q, k=k, v=v, key_mask=key_mask, out=out)
    if lib.on_gpu(q):
        o, lse = _corridor().forward(lib, q, k, v, key_mask, out, return_lse, options, family)
    else:
        _no_family(family, lib, q)
        o, lse = _cpu_forward(lib, q, k, v, key_mask, out, options)
    return (o, lse) if return_lse else o


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    key_mask: Array | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    grads: tuple[Array, Array, Array] | None = None,
    family: str | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `attention`: (dq, dk, dv) for the gradient `dout` of its result. No autograd framework needed.

    Recomputes the probabilities from q, k and lse (Dao 2023, Algorithm 2), so no score matrix is kept.

    Parameters
    ----------
    dout : (B, Sq, Hq, Dv)
        Gradient of the loss with respect to `out`, in the dtype of q.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them
    causal, window, scale, key_mask, layout : as given to `attention`
    deterministic : bool
        Bitwise the same gradients in every run.
    grads : (dq, dk, dv), optional
        Where to write the gradients.
    family : str, optional
        As in `attention`.

    Returns
    -------
    dq, dk, dv
        Shapes and dtypes of q, k and v; dk and dv are summed over the query heads that share them.
    """
    lib = interop.library("q", q)
    _given(dout=dout, k=k, v=v, out=out, lse=lse)
    options = {"causal": causal, "window": window, "scale": scale, "layout": layout, "deterministic": deterministic}
    if grads is not None and (not isinstance(grads, (tuple, list)) or len(grads) != 3):
        what = f"holds {len(grads)} arrays" if isinstance(grads, (tuple, list)) else f"is {type(grads).__name__}"
        raise ValueError(f"grads {what}; it must be a tuple of three arrays (dq, dk, dv) or None")
    dq, dk, dv = grads if grads is not None else (None, None, None)
    if grads is not None:
        _given(dq=dq, dk=dk, dv=dv)
    lib, arrays = interop.adopt(lib, dout=dout, q=q, k=k, v=v, out=out, lse=lse, key_mask=key_mask, dq=dq, dk=dk, dv=dv)
    dout, q, k, v, out, lse, key_mask, dq, dk, dv = arrays
    into = None if grads is None else (dq, dk, dv)
    if lib.on_gpu(q):
        return _corridor().backward(lib, dout, q, k, v, out, lse, key_mask, into, options, family)
    _no_family(family, lib, q)
    return _cpu_backward(lib, dout, q, k, v, out, lse, key_mask, into, options)


def merge(outs: Any, lses: Any, *, layout: str = "bshd") -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

    out = Σ outᵢ · exp(lseᵢ - lse), lse = log Σ exp(lseᵢ): associative and commutative, which split-KV decoding, ring
    attention and cascade attention rest on (Dao et al. 2023, Flash-Decoding).

    Parameters
    ----------
    outs : sequence of (B, Sq, Hq, Dv)
        Partial results of one query set over different keys.
    lses : sequence of (B, Hq, Sq)
        Their log-sum-exps, in the same order.
    layout : "bshd" or "bhsd"
        Layout of outs.

    Returns
    -------
    out, lse
        As one `attention(..., return_lse=True)` over all the keys would return. Rows that no part sees: 0 and -inf.
    """
    from .merging import merge as _merge

    return _merge(outs, lses, layout=layout)


def explain(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str | None = None,
    arch: str | None = None,
    backward: bool = False,
    **options: Any,
) -> Any:
    """Tell how a call would run, without running it: family, tiles, registers, shared memory, workspace, FLOPs, copies.

    Parameters
    ----------
    q, k, v : arrays or shapes
        What `attention` would be given; shapes (tuples) need `dtype`. k and v default to q's.
    dtype : str, optional
        For shapes: "float16", "bfloat16", "float32", "float64".
    arch : str, optional
        Plan for this architecture ("sm_80", "sm_90a", ...) instead of the GPU at hand; no GPU is needed then.
    backward : bool
        Explain `attention_backward`.
    **options
        As for `attention`.

    Returns
    -------
    Explanation
        Prints as a table; its fields are plain data.
    """
    from .explanation import explain as _explain

    return _explain(q, k, v, dtype=dtype, arch=arch, backward=backward, **options)


def tune(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    dtype: str | None = None,
    backward: bool = False,
    family: str | None = None,
    key_mask: Any = None,
    store: bool = True,
    rounds: int = 5,
    min_ms: float = 10.0,
    progress: Any = None,
    **options: Any,
) -> Any:
    """Time the tiles that a problem's kernels could have on this GPU, and use the fastest from now on.

    FlashAttention-2 (Dao 2023, section 3.3) chose them by hand and left this to future work. What is stored holds for
    problems of the same dtype, head dimensions and kind of mask, with lengths up to the same power of two, on the same kind
    of GPU.

    Parameters
    ----------
    q, k, v, key_mask : arrays or shapes
        As for `explain`. Only shapes matter: random arrays of that size are made on CuPy's current GPU.
    dtype : str, optional
        For shapes: "float16", "bfloat16", "float32", "float64".
    backward : bool
        Tune `attention_backward`.
    family : "sm90", "sm80", "simt", optional
        Default: the one that such a call takes.
    store : bool
        Keep the fastest in `tuning.json` in the user's configuration folder (or CUPYFLASH_CONFIG_DIR). The file is
        replaced at the end, whole; an interrupt leaves it as it was.
    rounds, min_ms
        How often each tile is timed, in turn, and for how many milliseconds at least.
    progress : callable, optional
        Called with what is being done, how many are done, and of how many.
    **options
        causal, window, scale, layout, deterministic, as for `attention`.

    Returns
    -------
    Tuning
        Every tile with its time or why it has none; `best`, and `gain` over the table's own.

    Raises
    ------
    ImportError, RuntimeError
        Where there is no CuPy or no GPU; RuntimeError also where the kernels do not run.
    ValueError
        For a family that has nothing to tune.
    """
    from .autotune import tune as _tune

    return _tune(
        q, k, v, dtype=dtype, backward=backward, family=family, key_mask=key_mask, store=store, rounds=rounds,
        min_ms=min_ms, progress=progress or (lambda *_: None), **options,
    )  # fmt: skip


@functools.cache
def _corridor() -> Any:
    """What needs a GPU, imported by the first call that has one; an import statement costs 0.6 us in every call."""
    from .gpu import corridor

    return corridor


def _given(**named: Array) -> None:
    for name, x in named.items():
        if x is None:
            interop.library(name, x)  # raises: None is no array


def _cpu_forward(
    lib: Any, q: Array, k: Array, v: Array, key_mask: Array | None, out: Array | None, options: dict[str, Any]
) -> tuple[Array, Array]:
    from . import cpu

    views = [lib.view(x) for x in (q, k, v)]
    problem = rules.describe(*views, key_mask=None if key_mask is None else lib.view(key_mask), **options)
    layout = options["layout"]
    if out is not None:
        rules.check_like("out", lib.view(out), rules.out_shape(views[0].shape, problem), problem.dtype, views[0])
        _writable("out", lib.to_numpy(out))
    qn, kn, vn = (_four(lib.to_numpy(x), layout) for x in (q, k, v))
    o, lse = cpu.forward(problem, qn, kn, vn, _mask_rows(lib, key_mask))
    o = _like(o, views[0], layout)
    if out is not None:
        lib.to_numpy(out)[...] = o
    rank = len(views[0].shape)
    return (lib.from_numpy(o) if out is None else out), lib.from_numpy(lse.reshape(rules.lse_shape(rank, problem)))


def _cpu_backward(
    lib: Any,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    key_mask: Array | None,
    into: tuple[Array, Array, Array] | None,
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    from . import cpu

    views = [lib.view(x) for x in (q, k, v)]
    problem = rules.describe(*views, key_mask=None if key_mask is None else lib.view(key_mask), **options)
    layout = options["layout"]
    check_backward(lib, problem, views, dout, out, lse, into)
    for name, target in zip(("dq", "dk", "dv"), into or ()):
        _writable(f"grads: {name}", lib.to_numpy(target))
    dout, q, k, v, out = (_four(lib.to_numpy(x), layout) for x in (dout, q, k, v, out))
    rows = lib.to_numpy(lse).reshape(problem.batch, problem.heads_q, problem.seq_q)
    grads = cpu.backward(problem, dout, q, k, v, out, rows, _mask_rows(lib, key_mask))
    shaped = [_like(g, view, layout) for g, view in zip(grads, views)]
    if into is None:
        return tuple(lib.from_numpy(g) for g in shaped)  # type: ignore[return-value]
    for g, target in zip(shaped, into):
        lib.to_numpy(target)[...] = g
    return tuple(into)  # type: ignore[return-value]


def check_backward(
    lib: Any,
    problem: AttentionProblem,
    views: list[View],
    dout: Array,
    out: Array,
    lse: Array,
    into: tuple[Array, Array, Array] | None,
) -> None:
    """Check the arrays that only the backward takes against the problem that q, k and v state."""
    q = views[0]
    shape = rules.out_shape(q.shape, problem)
    rules.check_like("dout", lib.view(dout), shape, problem.dtype, q)
    rules.check_like("out", lib.view(out), shape, problem.dtype, q)
    rules.check_like("lse", lib.view(lse), rules.lse_shape(len(q.shape), problem), problem.lse_dtype, q)
    for name, target, like in zip(("dq", "dk", "dv"), into or (), views):
        rules.check_like(f"grads: {name}", lib.view(target), like.shape, problem.dtype, q)


def _no_family(family: str | None, lib: Any, q: Array) -> None:
    if family is None:
        return
    from .gpu.plan import FAMILIES

    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(map(repr, FAMILIES))}, or None")
    raise ValueError(f"family is {family!r}, a family of GPU kernels, but q is a {lib.kind} array on the CPU")


def _writable(name: str, x: Any) -> None:
    if not x.flags.writeable:
        raise ValueError(f"{name} is read-only; it must be an array that can be written")


def _four(x: Any, layout: str) -> Any:
    """A NumPy array in the caller's rank and layout as a (B, S, H, D) view."""
    if x.ndim == 2:
        return x[None, :, None, :]
    if x.ndim == 3:
        x = x[None]
    return x if layout == "bshd" else x.transpose(0, 2, 1, 3)


def _like(x: Any, view: View, layout: str) -> Any:
    """A (B, S, H, D) NumPy array in the rank and layout of `view`."""
    rank = len(view.shape)
    if rank == 2:
        return x[0, :, 0]
    if layout == "bhsd":
        x = x.transpose(0, 2, 1, 3)
    return x[0] if rank == 3 else x


def _mask_rows(lib: Any, key_mask: Array | None) -> Any:
    """key_mask as NumPy (B, Sk), also where the caller's arrays have no batch axis."""
    if key_mask is None:
        return None
    mask = lib.to_numpy(key_mask)
    return mask[None] if mask.ndim == 1 else mask
