"""The public functions: what they take, what it means, and one hand-over to the CPU or the GPU.

Arrays come in from any library and results go back to the same one; see `cupyflash.interop`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict, overload

from . import dispatch, interop
from . import latent as of_latent
from .call import Arrays, Call
from .given import add_lengths, placed, present, trace_score, with_check
from .gradients import Gradients, check_wrt
from .other_names import unexpected
from .passes import BACKWARD, FORWARD
from .rules import fold_descales, seed_of
from .scalars import check_flag
from .signature import A, Array, L, closed, unscripted

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .blockmask.blocks import BlockMask


ScoreFunction = Callable[..., Any] | str


class Shared(TypedDict, total=False):
    """What `attention` and its derivatives may be given by name."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    key_mask: Array | None
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    score: ScoreFunction | None
    score_arrays: Mapping[str, Array] | None
    block_mask: BlockMask | None
    at: Sequence[int] | Array | None
    dropout: float
    seed: int | Array | None
    layout: str
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    seqlens_k: Array | None
    page_table: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool
    sms: int | None
    check: bool
    deterministic: bool
    family: str | None


class Options(Shared, total=False):
    """And `attention` alone, but for return_lse, on which the type of its result depends."""

    q_descale: float | Array | None
    k_descale: float | Array | None
    v_descale: float | Array | None
    latent: int | None
    out_dtype: Any
    out_scale: float
    out: Array | None


@overload
def attention(
    q: A, k: A, v: A | None = None, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> A: ...
@overload
def attention(
    q: A, k: A, v: A | None = None, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[A, Any]: ...
@overload
def attention(q: A, k: A, v: A | None = None, *, return_lse: bool, **options: Unpack[Options]) -> A | tuple[A, Any]: ...
@closed
def attention(
    q: Any,
    k: Any,
    v: Any = None,
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
    at: Sequence[int] | Array | None = None,
    latent: int | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    q_descale: float | Array | None = None,
    k_descale: float | Array | None = None,
    v_descale: float | Array | None = None,
    out_dtype: Any = None,
    out_scale: float = 1.0,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seqlens_k: Array | None = None,
    page_table: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    sms: int | None = None,
    check: bool = False,
    return_lse: bool = False,
    deterministic: bool = False,
    out: Array | None = None,
    family: str | None = None,
    **unknown: NoReturn,  # refused, and told what it is called here
) -> Any:
    """Exact attention, softmax(score(Q Kᵀ)) V, without the score matrix in memory.

    The online-softmax tiling of FlashAttention (Dao et al. 2022, Algorithm 1; Dao 2023, Algorithm 1). What happens to a
    score, in this order: s = scale · q · k; s = c tanh(s / c) with softcap=c, or s = score(s, b, h, i, j, ...);
    s = s - slope · |i + diagonal - j| with alibi_slopes; s = s + bias; s = -inf where causal, window, key_mask, mask or
    block_mask hides the key; softmax, in whose denominator sinks are a score more; dropout. All of them combine.

    Parameters
    ----------
    q : (B, Sq, Hq, D)
        Queries. float16, bfloat16, float32, float64 or float8_e4m3fn (on a GPU: Hopper's); NumPy, CuPy, PyTorch, JAX or
        anything with DLPack or the CUDA array interface. Any strides.
    k : (B, Sk, Hk, D)
        Keys. Hq must be a multiple of Hk (multi-head, grouped-query or multi-query attention): query head h reads
        key/value head h // (Hq // Hk).
    v : (B, Sk, Hk, Dv)
        Values. Dv may differ from D. Beside q of float16 or bfloat16 k and v may both be float8_e4m3fn or int8, as
        caches of 8 bits are: there is a forward of these alone. On a GPU their size times Sk must stay below the
        largest number of the format that sums are kept in (float32; float64 for float64).
    causal : False, True, "bottom_right" or "top_left"
        Hide keys to the right of the diagonal. True is "bottom_right": query i sees keys j <= i + Sk - Sq, so the
        last query sees the last key. "top_left": j <= i.
    window : (left, right), optional
        Each query sees `left` keys to the left and `right` keys to the right of its diagonal, both inclusive;
        None is unbounded. The diagonal is the one that `causal` names.
    scale : float, optional
        Multiplies Q Kᵀ. Default 1 / sqrt(D). 0, or of a size from 1e-30 to 1e30 (float64: from 1e-290 to 1e290).
    softcap : float, optional
        c in c · tanh(s / c), which keeps scores between -c and c. None or 0: no cap.
    key_mask : (B, Sk) bool, optional
        True where the key may be attended. This and the arrays below have the shape given or one that NumPy broadcasts
        to it: a length of 1 stands for all, leading axes may be left out. They are read where they are (a key_mask
        whose last axis is not contiguous is copied). Where q has no batch axis, or no heads, they have none.
    mask : (B, Hq, Sq, Sk) bool, optional
        True where the query may attend the key.
    bias : (B, Hq, Sq, Sk), optional
        Added to the score, in the dtype of q or float32. What it holds where a key is hidden does not matter, NaN
        included.
    alibi_slopes : (B, Hq), optional
        Attention with linear biases: the slope of each head, in float32 or the dtype of q, times the distance of the
        key from the query's diagonal is taken off the score. The diagonal is the one that `causal` names.
    score : function or text, optional
        f(s, b, h, i, j, arrays ...), the new score of query i and key j of head h of batch entry b, all counted from 0,
        from s = scale · q · k; see `cupyflash.score` and the page on score functions. It is run once, to be traced, and
        computed in float32 (float64 for float64). -inf hides a pair. Not together with softcap. Or the same as an
        expression in C.
    score_arrays : dict of arrays, optional
        What `score` reads, at most 32, by the names of its parameters: of 1 to 4 dimensions, in the dtype of q,
        float32, int32, int64 or bool, with any strides. An index beyond an end is taken as the nearest that there is.
    sinks : (Hq,), optional
        For each head a score more in the denominator of every row, with no value; in the dtype of q or float32. Neither
        scaled, capped, biased nor masked. lse includes it.
    block_mask : BlockMask, optional
        Made by `cupyflash.block_mask` for (B, Hq, Sq, Sk), or 1 for the batch and the heads, on the device of q: what
        it hides in whole blocks costs no time, and what it leaves in whole blocks no test.
    at : four integers, or an integer array of four, optional
        Of a part of a whole: where the first batch entry, head, query and key of these arrays stand among all. Query i
        then stands on key i, for causal, window and alibi_slopes; b, h, i and j of `score` and the numbers of dropout
        are those of the whole (with dropout a query and key that are multiples of 16). An array (int32 or int64) on a
        GPU is read when the kernels run, as `seed` is, and unchecked unless `check`; one on the CPU at the call.
    latent : int, optional
        Latent attention: V is the first so many columns of K, in its memory; v is left out. A forward alone.
    dropout : float
        Probabilities become 0 with this chance, from 0 to 1 (not included), and the others are divided by the share
        that is kept (Srivastava et al. 2014). In steps of 1 / 65536, at most 65534 of them, and exact in these. lse is
        that without dropout.
    seed : int or array of one integer
        Decides, with dropout, which ones: by Philox4x32 with 7 rounds (Salmon et al. 2011), from (seed, batch entry,
        query head, query, key) and nothing else. So a call with the same seed drops the same ones on every device, in
        every layout and dtype and by every kernel family, as does `attention_backward`; nothing is stored. Any 64 bits,
        5 and 5 - 2**64 being the same. An array (int64, uint64, int32 or uint32, on q's device) is read when the
        kernels run, so that a CUDA graph that is run again finds a new seed there. Without dropout it is not looked at.
    q_descale, k_descale, v_descale : float, or array (B, Hq, blocks) for q and (B, Hk, blocks) for k and v, optional
        What inputs of float8_e4m3fn are multiplied by, more than 0: a number, or in float32 one for each head, (Hq, 1)
        or (B, Hq, 1), or for each block of 128 rows. (Shah et al. 2024, section 3.3, has blocks.) Bias, slopes, sinks
        and arrays of a score function are float32 then. Of k and v of 8 bits beside q of 16: a number, or in float32
        an array that holds one, (Hk,) for each of their heads, or, laid out as k without its last axis, one for each
        row of a head; tensor cores take what an array multiplies rounded to the dtype of q.
    out_dtype : dtype, optional
        Of the result, for inputs of float8_e4m3fn: bfloat16, which is the default, float16 or float8_e4m3fn.
    out_scale : float
        What the result is multiplied by before it is rounded, for k and v of 8 bits. Beyond 448 one of 8 bits is 448.
    layout : "bshd" or "bhsd"
        Where the heads stand. Without the batch axis (S, H, D) and without heads (S, D) are accepted too.
    cu_seqlens_q : (N + 1,) int32 or int64, optional
        q is packed, (T, Hq, D): sequence n has the rows from cu_seqlens_q[n] up to cu_seqlens_q[n + 1]. So is out; lse
        is (Hq, T). These four arrays say how long N sequences are, and where; they are on q's device and read when the
        kernels run, so that a CUDA graph that is run again finds new lengths there. Every option is for each sequence
        as if it were alone: causal and window at its own end, b its number, i and j positions in it. Arrays over pairs
        are (N, Hq, longest, longest), by sequence and position, or (Hq, T, longest), with a line for each packed query;
        any `longest` that sequences do not exceed will do. Rows that belong to nobody, behind the last sequence, get 0
        and an lse of -inf, and what they hold reaches nobody.
    cu_seqlens_k : (N + 1,) int32 or int64, optional
        The same of k (Tk, Hk, D) and v (Tk, Hk, Dv).
    seqlens_k : (N,) int32 or int64, optional
        k (N, S, Hk, D) and v (N, S, Hk, Dv) are caches, of which sequence n has filled so many rows; the last query
        stands on the last of them. q is (N, Sq, Hq, D), or packed.
    page_table : (N, P) int32 or int64, optional
        With seqlens_k: k (pages, page, Hk, D) and v are pools of pages of any size, and row j of sequence n is row j %
        page of page page_table[n, j // page]. Pages may be shared. There is no backward.
    max_seqlen_q, max_seqlen_k : int, optional
        How long packed queries, and keys, are at most: hints for tiles. A wrong one costs time, never the result.
    batch_invariant : bool
        What comes of a sequence does not depend, to the bit, on the others of the call: on a CPU it never does. Kernels
        give the same out and lse, too, however its queries are cut.
    sms : int, optional
        Multiprocessors of a GPU that a call takes at most: others are free for what runs beside it. Tiles, shares of
        keys and grids are those of a GPU with so many, and so are the bits. It bounds the grids of sm90, but for short
        launches before and after; sm80 and simt have a block for each tile, and share keys by it. CPUs ignore it.
    check : bool
        Look at the values of these arrays first, as is always done on a CPU; CUPYFLASH_CHECK=1 asks it of all calls. On
        a GPU that waits for the device. Unchecked values are clamped there: nothing outside of the arrays is read or
        written, but some rows get 0 or another sequence's keys.
    return_lse : bool
        Also return the log-sum-exp of every row's scores, which `attention_backward` and `merge` need.
    deterministic : bool
        The forward always is, bit for bit; this asks it of the gradients that PyTorch (where
        `torch.use_deterministic_algorithms(True)` does too) and JAX take.
    out : array, optional
        Where to write the result, with memory of its own; beside inputs of 16 bits also of float32: it is not rounded
        then.
    family : "sm90", "sm80", "simt", "flash1", optional
        Take this kernel family instead of the fastest one that supports the problem. "flash1", FlashAttention as
        published in 2022, is there to be compared with and is taken only where it is named.

    Returns
    -------
    out : (B, Sq, Hq, Dv)
        Same library, dtype, device, rank and layout as q. Rows that see no key are 0.
    lse : (B, Hq, Sq), only with return_lse=True
        Natural log, float32 (float64 for float64 inputs). -inf for rows that see no key; with sinks, the sink.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    if unknown:
        raise unexpected("attention", next(iter(unknown)), inspect.signature(attention).parameters)
    seed, number = seed_of(seed, dropout)
    arrays: Arrays = {"q": q, "k": k, "v": v}
    if not (key_mask is mask is bias is alibi_slopes is sinks is seed is None):  # most calls: this is the hot path
        arrays |= {"key_mask": key_mask, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes}
        arrays |= {"sinks": sinks, "seed": seed}
    ragged = not (cu_seqlens_q is cu_seqlens_k is seqlens_k is page_table is None)
    if ragged:
        add_lengths(arrays, cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table)
    arrays = present("qkv" if latent is None else of_latent.operands(latent, v), arrays)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "score": score,
        "block_mask": block_mask, "at": at, "latent": latent, "dropout": dropout, "out_dtype": out_dtype,
        "out_scale": out_scale, "layout": layout, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "batch_invariant": batch_invariant, "sms": sms, "deterministic": deterministic,
    }  # fmt: skip
    if not (q_descale is k_descale is v_descale is None):
        arrays |= fold_descales(options, q, k, {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale})
    if return_lse is not True and return_lse is not False:
        check_flag("return_lse", return_lse)
    lib = interop.library("q", q)
    if at is not None:
        options["at"] = placed(at, arrays)
    if score is not None or score_arrays is not None:
        trace_score(lib, arrays, options, score_arrays)
    call = Call(lib, FORWARD, arrays, options, {} if out is None else {"out": out}, number, family, return_lse)
    if ragged or check is not False:
        call = with_check(call, check)
    o, lse = (lib.recorder(call) or dispatch.run)(call)
    return (o, lse) if return_lse else o


@closed
def attention_backward(
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
    at: Sequence[int] | Array | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seqlens_k: Array | None = None,
    page_table: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    sms: int | None = None,
    check: bool = False,
    deterministic: bool = False,
    dlse: Array | None = None,
    wrt: str | Iterable[str] = (),
    grads: tuple[A, A, A] | None = None,
    add: bool = False,
    out_dtype: Any = None,
    family: str | None = None,
    **unknown: NoReturn,  # refused, and told what it is called here
) -> Gradients:
    """Gradients of `attention`: (dq, dk, dv) for the gradient `dout` of its result. No autograd framework needed.

    Recomputes the probabilities from q, k and lse (Dao 2023, Algorithm 2), so no score matrix is kept.

    Parameters
    ----------
    dout : (B, Sq, Hq, Dv)
        Gradient of the loss with respect to `out`, in the dtype of q.
    q, k, v : as given to `attention`
    out, lse : as `attention(..., return_lse=True)` returned them, out in the dtype of q
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, at,
    dropout, seed, layout, cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k, batch_invariant, sms,
    check : as given to `attention`
    deterministic : bool
        Bitwise the same gradients in every run; on a CPU, with any number of cores.
    dlse : (B, Hq, Sq), optional
        Gradient of the loss with respect to `lse`, in its dtype, where it depends on that; 0 where no key is seen.
    wrt : names, or one name
        Optional arrays whose gradients are wanted too, of "bias", "alibi_slopes", "sinks" and the names in
        score_arrays. dq, dk and dv do not depend on it.
    grads : (dq, dk, dv), optional
        Where to write these gradients, each with own memory; all or dk and dv also of float32 beside inputs of 16 bits.
    add : bool
        Add dq, dk and dv to what `grads` holds: of several parts of a whole, in the order of the calls.
    out_dtype : dtype, optional
        "float32": dq, dk and dv of inputs of 16 bits are not rounded; for who has no arrays to give as `grads`.
    family : str, optional
        As in `attention`.

    Returns
    -------
    dq, dk, dv
        A named tuple. Shapes and dtypes of q, k and v; dk and dv are summed over the query heads that share them.
    dbias, dalibi_slopes, dsinks
        Further fields of it, by name alone; None where `wrt` does not ask for them. Shape and dtype of what was given:
        summed over the axes along which it stands for all, in float32 (float64 for float64). Hidden pairs, and rows
        that see no key, add nothing, whatever the bias holds there (but to dsinks what dlse says: there lse is the
        sink).
    dscore_arrays
        The same for those in score_arrays, a dict by their names.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be. Nothing has been launched then.
    """
    if unknown:
        raise unexpected("attention_backward", next(iter(unknown)), inspect.signature(attention_backward).parameters)
    seed, number = seed_of(seed, dropout)
    arrays: Arrays = {"q": q, "dout": dout, "k": k, "v": v, "out": out, "lse": lse}
    if not (key_mask is mask is bias is alibi_slopes is sinks is seed is dlse is None):
        arrays |= {"key_mask": key_mask, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes}
        arrays |= {"sinks": sinks, "seed": seed, "dlse": dlse}
    ragged = not (cu_seqlens_q is cu_seqlens_k is seqlens_k is page_table is None)
    if ragged:
        add_lengths(arrays, cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table)
    arrays = present(("q", "dout", "k", "v", "out", "lse"), arrays)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "score": score,
        "block_mask": block_mask, "at": at, "dropout": dropout, "out_dtype": out_dtype, "layout": layout,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "batch_invariant": batch_invariant, "sms": sms,
        "deterministic": deterministic,
    }  # fmt: skip
    lib = interop.library("q", q)
    if at is not None:
        options["at"] = placed(at, arrays)
    if score is not None or score_arrays is not None:
        trace_score(lib, arrays, options, score_arrays)
    if grads is not None and (not isinstance(grads, (tuple, list)) or len(grads) != 3):
        what = f"holds {len(grads)} arrays" if isinstance(grads, (tuple, list)) else f"is {type(grads).__name__}"
        raise ValueError(f"grads {what}; it must be a tuple of three arrays (dq, dk, dv) or None")
    targets = dict(zip(Gradients._fields, grads)) if grads is not None else {}
    if check_flag("add", add) and grads is None:
        raise ValueError("add is True, but grads is not given; it must hold the arrays to add to")
    wanted = check_wrt(wrt, arrays, options["score"])
    call = Call(lib, BACKWARD, arrays, options, targets, number, family, wrt=wanted, add=add)
    if ragged or check is not False:
        call = with_check(call, check)
    return (lib.recorder(call) or dispatch.run)(call)


@unscripted
def merge(outs: Sequence[A], lses: Sequence[L], *, layout: str = "bshd", out: tuple[A, L] | None = None) -> tuple[A, L]:
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
    out : (out, lse), optional
        Arrays to write the result to, shaped and of the dtypes of a part: (O, lse) so far, with a part more. They may
        be those of a part. Not of JAX; autograd does not follow the write.

    Returns
    -------
    out, lse
        As one `attention(..., return_lse=True)` over all the keys would return. Rows that no part sees: 0 and -inf.

    Notes
    -----
    On a GPU (CuPy; PyTorch where nothing follows the call) one launch merges up to 60 parts, 240 where all lie alike.
    """
    from .merging import merge as _merge

    return _merge(outs, lses, layout=layout, out=out)


def block_mask(
    source: Any = None,
    *,
    shape: tuple[int, ...] | None = None,
    block: int | tuple[int, int] = 128,
    blocks: Any = None,
    full: Any = None,
    like: Any = None,
    device: str | None = None,
) -> BlockMask:
    """A mask that is applied in blocks, for `attention(..., block_mask=...)`: what is hidden in whole blocks costs
    nothing.

    Parameters
    ----------
    source : function, array or pattern, optional
        A function of (b, h, i, j), the numbers of the batch entry, head, query and key, that returns booleans: True
        where the query may attend the key. It is called with arrays of int64 (JAX's: int32) of shapes (B, 1, 1, 1), (1,
        H, 1, 1), (R, 1) and (Sk,) that broadcast, for R queries at a time, so use operators, not `if`. They are of the
        library of `like`, else NumPy's or CuPy's. Or a boolean array that broadcasts to `shape`, or one of
        `cupyflash.masks`. Without it all pairs of `blocks` are visible.
    shape : (batch, heads, queries, keys), or (queries, keys)
        1 for batch or heads where all share a pattern. Default: that of the array.
    block : int or (int, int)
        Queries and keys of a block, multiples of 16.
    blocks : array, optional
        Which blocks are there: booleans that broadcast to (B, H, blocks of queries, blocks of keys), or, for each block
        of queries, numbers of blocks of keys, integers (..., blocks of queries, n) where -1 is none. Default: all.
    full : array, optional
        Blocks of these, in the same form, in which all pairs are visible, whatever `source` says of them.
    like : array, optional
        Where the mask will be used: on the device of this array, q for example.
    device : "cpu" or "cuda:N", optional
        The same, by name; default "cpu".

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be.
    """
    from .blockmask.blocks import make

    return make(source, shape, block, blocks, full, like, device)
