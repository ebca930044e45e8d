"""What flash-attn's functions of caches share: new rows go behind those that are there, and queries attend to all."""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .. import api, caches, dispatch, interop, overlap
from ..call import Call
from ..given import present
from ..interop import torch_
from ..interop.torch_schema import refuse_script
from ..lengths import check_values
from ..other_names import renaming
from ..passes import FORWARD
from ..problem import View, complete
from ..rotary import check_tables, rotate
from ..rules import state
from ..scalars import check_no_text
from ..torch.dropout import check_tensors
from .used import readable
from .windows import window_of

_INTEGERS = torch.int32, torch.int64


class _Where(NamedTuple):
    """What new rows are written to: sequences with room for `seq_k` rows each, perhaps in pages."""

    batch: int
    seq_k: int
    page: int | None
    pages: int


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, *,
    cache_seqlens: int | torch.Tensor | None, table: torch.Tensor | None, table_name: str, softmax_scale: float | None,
    causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True, rotary_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and lse of `flash_attn_with_kvcache`, whose arguments these are; `table` has the name `table_name` there, and
    `sinks`, a score more in the denominator of each row, (Hq,), is s_aux.

    Where all is well, rows are written to k_cache and v_cache: k and v, in the places behind cache_seqlens.
    """
    named = {
        "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, table_name: table, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens, "alibi_slopes": alibi_slopes,
        "s_aux": sinks,
    }  # fmt: skip
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache} | {n: x for n, x in named.items() if x is not None}
    refuse_script()
    check_tensors(**given)
    check_no_text(causal=causal, rotary_interleaved=rotary_interleaved)
    window = window_of(window_size)
    for name, x in given.items():
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name} requires grad, and flash_attn_with_kvcache has no gradient; call it under torch.no_grad(), or "
                "pass its detach()"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; all must be on one device")
    _check_together(given, table_name, cache_seqlens)
    sequences = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    for name in ("cache_batch_idx", "cache_leftpad", "rotary_seqlens"):
        if name in given:
            _check_integers(name, given[name], sequences)
    if cu_seqlens_k_new is not None:
        _check_integers("cu_seqlens_k_new", cu_seqlens_k_new, sequences + 1)
    if table is not None:
        _check_integers(table_name, table, sequences if cache_batch_idx is None else len(table), "pages of one")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.shape[:3] != k_cache.shape[:3] or cache.dtype != k_cache.dtype:
            raise ValueError(
                f"{name} is {cache.dtype} of shape {tuple(cache.shape)}; it must have 4 dimensions, (entries, rows, "
                f"heads, dim), and be as k_cache, {k_cache.dtype} of {tuple(k_cache.shape)}"
            )

    entries, rows = k_cache.shape[:2]
    if table is None and cache_batch_idx is None and table_name == "block_table" and entries > sequences:
        k_cache, v_cache, entries = k_cache[:sequences], v_cache[:sequences], sequences  # FlashAttention-2: the first
    if cache_batch_idx is not None and table is not None:  # FlashAttention-3: whose line of the table it is
        _check_entries(cache_batch_idx, len(table), f"a line of {table_name}")
        table = table[cache_batch_idx.clamp(0, max(len(table) - 1, 0)).long()]
    elif cache_batch_idx is not None:  # a sequence has one page: its entry of the cache
        _check_entries(cache_batch_idx, entries, "an entry of k_cache")
        table = cache_batch_idx[:, None]
    reach = rows if table is None else rows * table.shape[1]
    filled = _filled(cache_seqlens, sequences, reach if table is not None else None, q)
    if filled is not None and cache_batch_idx is not None:
        _check_filled(filled, reach)
    options: dict[str, Any] = {
        "scale": softmax_scale, "causal": bool(causal), "window": window, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "sinks": sinks,
    }  # fmt: skip
    if filled is not None:
        options |= {"seqlens_k": filled.clamp(min=0), "page_table": table}
    if cu_seqlens_q is not None:
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    if cache_leftpad is not None:
        options["key_mask"] = torch.arange(reach, device=q.device) >= cache_leftpad[:, None]
    if k is not None and v is not None and filled is not None and sequences:
        paged = {} if table is None else {"page_table": table}
        where = _Where(sequences, reach, None if table is None else rows, entries)
        lengths = {"seqlens_k": filled, **paged}
        if cu_seqlens_k_new is not None:
            lengths["cu_seqlens_q"] = cu_seqlens_k_new
        _check_rows(given, sequences)
        new, packed = k.shape[-3], cu_seqlens_k_new is not None
        if not torch.compiler.is_compiling():
            one_page = cache_batch_idx is not None and rows == reach  # where an entry of the cache is in two lines
            _check_places(where._replace(page=None) if one_page else where, lengths, new, packed)
            _check_apart(given, table is not None)
            _check_attention(q, k_cache, v_cache, options)
        found = caches.behind(torch, where, new, lengths)  # type: ignore[arg-type]
        if rotary_cos is not None:
            by: dict[str, Any] = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
            base = filled if rotary_seqlens is None else rotary_seqlens
            k = _turned(k, _positions(base, new, cu_seqlens_k_new), **by)
            together = not causal and window == (None, None)  # then all queries stand where the first one does
            q = _turned(q, _positions(base, q.shape[-3], cu_seqlens_q, together), **by)
        for cache, x in ((k_cache, k), (v_cache, v)):
            caches.write(torch, cache, found.places, x)
        options["seqlens_k"] = found.totals.clamp(min=0)
    return _attention(q, k_cache, v_cache, **options)


@renaming(torch.compiler.is_compiling, k="k_cache", v="v_cache")
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return api.attention(q, k, v, return_lse=True, **options)


def _check_apart(given: dict[str, torch.Tensor], paged: bool) -> None:
    """ValueError where a cache shares memory with anything else, or with itself; new rows may lie in their cache, and
    in one pool pages of the other, as those of transformers do."""
    if any(torch_.wrapped(x) for x in given.values()):
        return  # addresses are hidden
    _apart(tuple((name, torch_.view(x)) for name, x in given.items()), paged)


@functools.lru_cache(256)  # decoding comes again and again with arrays in the same places
def _apart(views: tuple[tuple[str, View], ...], paged: bool) -> None:
    read = dict(views)
    written = {name: read.pop(name) for name in ("k_cache", "v_cache")}
    k, v = written.values()
    together = not paged or (k.ptr, k.strides) == (v.ptr, v.strides)
    for some in [written] if together else [{name: x} for name, x in written.items()]:
        overlap.check_apart(some, read, (("k_cache", "k"), ("v_cache", "v")))


@renaming(k="k_cache", v="v_cache")
def _check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    """What the attention would say of lengths as they are before, before anything is written."""
    asked = complete(options)
    arrays = present("qkv", {"q": q, "k": k, "v": v} | {n: x for n, x in options.items() if n not in asked})
    call = Call(interop.library("q", q), FORWARD, arrays, asked)
    if not readable(q):
        return dispatch.check(call)
    problem, _ = state({name: interop.view(call.lib, name, x) for name, x in arrays.items()}, {}, asked, FORWARD)
    lengths = {name: x for name, x in arrays.items() if name in ("cu_seqlens_q", "seqlens_k", "page_table")}
    check_values(problem, {name: x.numpy().astype("int64") for name, x in lengths.items()})


def _check_filled(filled: torch.Tensor, rows: int) -> None:
    if readable(filled) and (wrong := filled > rows).any():
        n = int(wrong.int().argmax())
        raise ValueError(f"cache_seqlens[{n}] is {int(filled[n])}; it must be at most the rows of k_cache, {rows}")


def _check_together(given: dict[str, torch.Tensor], table_name: str, cache_seqlens: Any) -> None:
    for one, other in (("k", "v"), ("v", "k"), ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos")):
        if one in given and other not in given:
            raise ValueError(f"{one} is given without {other}; give both, or none")
    for name in ("rotary_cos", "cu_seqlens_k_new"):
        if name in given and "k" not in given:
            raise ValueError(f"{name} is given without k and v, the new rows; it must be None")
    if "cache_batch_idx" in given and table_name in given and table_name == "block_table":
        raise ValueError(f"cache_batch_idx is given with {table_name}, which says where each sequence is; give one")
    if cache_seqlens is None and ("k" in given or "cu_seqlens_q" in given):
        name = "k" if "k" in given else "cu_seqlens_q"
        raise ValueError(
            f"cache_seqlens is None, but {name} is given; it must be the rows that each sequence has filled, "
            "(sequences,), or an integer"
        )


def _check_integers(name: str, x: torch.Tensor, n: int, second: str = "") -> None:
    if x.dtype not in _INTEGERS or x.dim() != (2 if second else 1) or len(x) != n:
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be int32 or int64 of shape ({n}, {second})"
        )


def _check_entries(indices: torch.Tensor, entries: int, what: str) -> None:
    if readable(indices) and (wrong := (indices < 0) | (indices >= entries)).any():
        n = int(wrong.int().argmax())
        raise ValueError(f"cache_batch_idx[{n}] is {int(indices[n])}; it must be {what}, 0 to {entries - 1}")


def _filled(x: Any, sequences: int, reach: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """(sequences,) how many rows each has; None where all have what a cache has."""
    if isinstance(x, torch.Tensor):
        if x.device != like.device:
            raise ValueError(f"cache_seqlens is on {x.device} but q is on {like.device}; all must be on one device")
        _check_integers("cache_seqlens", x, sequences)
        return x
    if x is None and reach is None:
        return None
    try:
        n = reach if x is None else operator.index(x)
    except TypeError:
        raise TypeError(
            f"cache_seqlens is a {type(x).__name__}; it must be an integer, a tensor of them, (sequences,), or None"
        ) from None
    return torch.full((sequences,), n or 0, dtype=torch.int32, device=like.device)


class _Shaped(NamedTuple):
    """What is asked of rotary tables and of new rows; torch.compile follows it."""

    shape: tuple[int, ...]
    dtype: str


def _check_rows(given: dict[str, torch.Tensor], sequences: int) -> None:
    """ValueError where new rows and caches do not belong together."""
    packed = "cu_seqlens_k_new" in given
    k = given["k"]
    for name in ("k", "v"):
        x, cache = given[name], given[f"{name}_cache"]
        front = k.shape[:1] if packed else (sequences, *k.shape[1:2])
        if tuple(x.shape) != (want := (*front, *cache.shape[2:])):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {want}, as k and {name}_cache say")
        if x.dtype != cache.dtype:
            raise TypeError(f"{name} is {x.dtype}; it must be that of {name}_cache, {cache.dtype}")
    if "rotary_cos" in given:
        q = given["q"]
        if q.shape[-1] != k.shape[-1] or q.dim() != (3 if "cu_seqlens_q" in given else 4):
            raise ValueError(f"q has shape {tuple(q.shape)}; it must have the {k.shape[-1]} columns of k, to be turned")
        view = {name: _Shaped(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in given.items()}
        _check_angles(view["rotary_cos"], view["rotary_sin"], k.shape[-1], view["k"].dtype)


def _check_angles(*given: Any) -> None:
    try:
        check_tables(*given)
    except (TypeError, ValueError) as error:
        message = str(error).replace("rotary[0]", "rotary_cos").replace("rotary[1]", "rotary_sin")
        raise type(error)(message) from None


@renaming(cu_seqlens_q="cu_seqlens_k_new", q="k", k="k_cache")
def _check_places(where: _Where, lengths: dict[str, torch.Tensor], rows: int, packed: bool) -> None:
    """ValueError, naming the place, where new rows have none, if that can be read. A length below 0 is nobody's."""
    import numpy as np

    if not readable(lengths["seqlens_k"]):
        return
    held = {name: x.numpy().astype(np.int64) for name, x in lengths.items()}
    if where.page is None:
        held.pop("page_table", None)
    filled = held["seqlens_k"]
    real = filled >= 0
    if not packed or not real.all():
        new = np.diff(held["cu_seqlens_q"]) if packed else np.full(len(filled), rows)
        held["cu_seqlens_q"] = np.concatenate([[0], np.cumsum(np.where(real, new, 0))])
    held["seqlens_k"] = np.maximum(filled, 0)
    all_rows = rows if packed else rows * len(filled)
    problem: Any = SimpleNamespace(**where._asdict(), rows_q=all_rows, seq_q=all_rows, given=(), block_mask=None)
    caches.check_behind(problem, held, rows, None)


def _positions(base: torch.Tensor, rows: int, ends: torch.Tensor | None, together: bool = False) -> torch.Tensor:
    """Of each row in its sequence, (sequences, rows) or, packed, (rows,); `base` is that of the first one."""
    number = torch.arange(rows, device=base.device)
    if ends is None:
        return base[:, None] + (torch.zeros_like(number) if together else number)
    of = torch.searchsorted(ends[1:].contiguous(), number.to(ends.dtype), right=True).clamp(max=len(base) - 1)
    return base[of] if together else base[of] + number - ends[of]


def _turned(x: torch.Tensor, positions: torch.Tensor, cos: Any, sin: Any, interleaved: bool) -> torch.Tensor:
    if readable(positions) and positions.numel() and (last := int(positions.max())) >= len(cos):
        raise ValueError(f"rotary_cos has angles for {len(cos)} positions; it must have those of position {last} too")
    return rotate(torch, x, cos, sin, positions, interleaved)
