"""flash-attn's functions of caches, beside a loop over sequences that computes each from its scores."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyflash.compat import flash_attn, flash_attn_interface

CACHE, NEW, HEADS, HEADS_K, DIM = 12, 2, 4, 2, 8
FILLED = [5, 0, 9]


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(q: Any, k: Any, v: Any, causal: bool = False, window: Any = (-1, -1), first: int = 0) -> tuple[Any, Any]:
    """One sequence, q (queries, heads, dim) and k (keys, heads, dim), of which those before `first` are hidden."""
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // HEADS_K, 1)) * DIM**-0.5
    at = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    left, right = (1000 if x == -1 else x for x in window)
    hidden = (at < -left) | (at > (min(right, 0) if causal else right)) | (torch.arange(len(k)) < first)
    s = s.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", s.softmax(-1).nan_to_num(0.0), v.repeat_interleave(HEADS // HEADS_K, 1))
    return out, s.logsumexp(-1)


def turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """x (rows, heads, dim), a pair of columns at a time."""
    x, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i][:, None], sin[positions, i][:, None]
        x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return x


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def paged(caches: list[Any], page: int) -> tuple[list[Any], Any]:
    """Pools of shuffled pages with what these caches hold, views of one tensor, and the table; NaN elsewhere."""
    n, rows = caches[0].shape[:2]
    each = rows // page
    table = torch.randperm(n * each + 3, generator=torch.Generator().manual_seed(1))[: n * each].reshape(n, each).int()
    both = torch.full((n * each + 3, 2, page, HEADS_K, DIM), torch.nan, dtype=torch.float64)
    for i, x in enumerate(caches):
        both[table.long(), i] = x.reshape(n, each, page, HEADS_K, DIM)
    return [both[:, 0], both[:, 1]], table


@pytest.mark.parametrize("form", ["caches", "entries", "pages"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (2, 0)}, {"window_size": (3, 1)}], ids=str
)
@pytest.mark.parametrize("third", [False, True])
def test_new_rows_are_written_and_attended(form: str, options: dict[str, Any], third: bool) -> None:
    q, k, v = drawn(3, NEW, HEADS, DIM), drawn(3, NEW, HEADS_K, DIM, seed=1), drawn(3, NEW, HEADS_K, DIM, seed=2)
    caches = [drawn(3, CACHE, HEADS_K, DIM, seed=3 + i) for i in (0, 1)]
    for x in caches:
        for n, filled in enumerate(FILLED):
            x[n, filled:] = torch.nan
    given: dict[str, Any] = {"cache_seqlens": torch.tensor(FILLED, dtype=torch.int32)}
    pools, entry = [x.clone() for x in caches], torch.arange(3)
    if form == "entries":
        entry = torch.tensor([4, 1, 0])
        pools = [torch.full((5, CACHE, HEADS_K, DIM), torch.nan, dtype=torch.float64) for _ in caches]
        for pool, x in zip(pools, caches):
            pool[entry] = x
        given["cache_batch_idx"] = entry.int()
    elif form == "pages":
        pools, table = paged(caches, 4)
        given["page_table" if third else "block_table"] = torch.where(
            torch.arange(3) * 4 < torch.tensor([[7], [2], [11]]), table, -1
        )
    before = [x.clone() for x in pools]
    call = (flash_attn_interface if third else flash_attn).flash_attn_with_kvcache
    out, lse = call(q, *pools, k, v, **given, **options, return_softmax_lse=True)
    for n, filled in enumerate(FILLED):
        keys, values = (torch.cat([x[n, :filled], y[n]]) for x, y in zip(caches, (k, v)))
        same(
            (out[n], lse[n]),
            alone(q[n], keys, values, options.get("causal", False), options.get("window_size", (-1, -1))),
        )
    for pool, old, y in zip(pools, before, (k, v)):  # all that changed is the new rows
        if form == "pages":
            for n, filled in enumerate(FILLED):
                for i in range(NEW):
                    old[table[n, (filled + i) // 4], (filled + i) % 4] = y[n, i]
        else:
            for n, filled in enumerate(FILLED):
                old[entry[n], filled : filled + NEW] = y[n]
        torch.testing.assert_close(pool, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotary(interleaved: bool, causal: bool) -> None:
    """Queries that see all stand where the first one does."""
    q, k, v = drawn(3, 3, HEADS, DIM), drawn(3, NEW, HEADS_K, DIM, seed=1), drawn(3, NEW, HEADS_K, DIM, seed=2)
    caches = [drawn(3, CACHE, HEADS_K, DIM, seed=3 + i) for i in (0, 1)]
    angles = drawn(CACHE + 3, 3, seed=5)
    cos, sin = angles.cos(), angles.sin()
    rotary: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    given = {"cache_seqlens": torch.tensor(FILLED), **rotary, "causal": causal}
    pools = [x.clone() for x in caches]
    out = flash_attn.flash_attn_with_kvcache(q, *pools, k, v, **given)
    for n, filled in enumerate(FILLED):
        at = filled + torch.arange(3) * causal
        new = turned(k[n], cos, sin, filled + torch.arange(NEW), interleaved)
        keys, values = torch.cat([caches[0][n, :filled], new]), torch.cat([caches[1][n, :filled], v[n]])
        same(out[n], alone(turned(q[n], cos, sin, at, interleaved), keys, values, causal)[0])
        same(pools[0][n, filled : filled + NEW], new)
    with pytest.raises(ValueError, match="^rotary_cos has angles for 9 positions; it must have those of position 10"):
        flash_attn.flash_attn_with_kvcache(q, *pools, k, v, **{**given, "rotary_cos": cos[:9], "rotary_sin": sin[:9]})
    # FlashAttention-3: positions of their own, and packed.
    ends, third = torch.tensor([0, 2, 4, 6]), flash_attn_interface.flash_attn_with_kvcache
    pools, own = [x.clone() for x in caches], torch.tensor([1, 2, 3])
    packed = third(
        q.flatten(0, 1), *pools, k.flatten(0, 1), v.flatten(0, 1), **given, rotary_seqlens=own,
        cu_seqlens_q=torch.tensor([0, 3, 6, 9]), cu_seqlens_k_new=ends,
    )  # fmt: skip
    for n, filled in enumerate(FILLED):
        new = turned(k[n], cos, sin, own[n] + torch.arange(NEW), interleaved)
        keys, values = torch.cat([caches[0][n, :filled], new]), torch.cat([caches[1][n, :filled], v[n]])
        at = own[n] + torch.arange(3) * causal
        same(packed[3 * n : 3 * n + 3], alone(turned(q[n], cos, sin, at, interleaved), keys, values, causal)[0])


def test_lines_of_a_table_that_entries_name() -> None:
    """FlashAttention-3's cache_batch_idx beside page_table; rotary_seqlens without angles changes nothing."""
    q, k, lines = drawn(3, NEW, HEADS, DIM), drawn(3, NEW, HEADS_K, DIM, seed=1), torch.tensor([2, 0, 1])
    cache, lengths = drawn(3, CACHE, HEADS_K, DIM, seed=3), torch.tensor(FILLED)
    pools, table = paged([cache, cache], 4)
    given = {"cache_seqlens": lengths, "page_table": table, "cache_batch_idx": lines, "rotary_seqlens": lengths}
    out = flash_attn_interface.flash_attn_with_kvcache(q, *pools, k, k, **given)
    for n, filled in enumerate(FILLED):
        same(out[n], alone(q[n], *[torch.cat([cache[lines[n], :filled], k[n]])] * 2)[0])
    with pytest.raises(ValueError, match=r"^cache_batch_idx\[2\] is 3; it must be a line of page_table, 0 to 2"):
        flash_attn_interface.flash_attn_with_kvcache(q, *pools, **{**given, "cache_batch_idx": torch.tensor([0, 1, 3])})
    with pytest.raises(ValueError, match="^cache_batch_idx is given with block_table, which says where each sequence"):
        flash_attn.flash_attn_with_kvcache(
            q, *pools, cache_seqlens=lengths, block_table=table, cache_batch_idx=lines
        )  # fmt: skip


@pytest.mark.parametrize("third", [False, True])
def test_lengths_below_zero_and_numbers(third: bool) -> None:
    """What pads a graph: nothing is written, nothing attended."""
    module, name = (flash_attn_interface, "page_table") if third else (flash_attn, "block_table")
    q, k = drawn(3, 1, HEADS, DIM), drawn(3, 1, HEADS_K, DIM, seed=1)
    cache = drawn(3, CACHE, HEADS_K, DIM, seed=3)
    pools, table = paged([cache, cache], 4)
    table[1] = -1
    before = [x.clone() for x in pools]
    lengths = torch.tensor([5, -1, 9], dtype=torch.int32)
    out, lse = module.flash_attn_with_kvcache(
        q, *pools, k, k, cache_seqlens=lengths, **{name: table}, causal=True, return_softmax_lse=True
    )
    assert not out[1].any() and bool((lse[1] == -torch.inf).all())
    for n, filled in ((0, 5), (2, 9)):
        same(out[n], alone(q[n], *[torch.cat([cache[n, :filled], k[n]])] * 2)[0])
    for pool, old in zip(pools, before):
        for n, filled in ((0, 5), (2, 9)):
            old[table[n, filled // 4], filled % 4] = k[n, 0]
        torch.testing.assert_close(pool, old, rtol=0, atol=0, equal_nan=True)
    call = module.flash_attn_with_kvcache
    for given, rows in (({"cache_seqlens": 7}, 7), ({}, CACHE), ({"cache_seqlens": 0}, 0)):
        out = call(q, cache, cache, **given)
        for n in range(3):
            same(out[n], alone(q[n], cache[n, :rows], cache[n, :rows])[0])
    out = call(q, cache, cache, cache_seqlens=9, cache_leftpad=torch.tensor([0, 4, 9]), causal=True)
    for n, first in enumerate((0, 4, 9)):
        same(out[n], alone(q[n], cache[n, :9], cache[n, :9], True, first=first)[0])
    same(call(q, cache, cache, cache_seqlens=9, num_splits=3), call(q, cache, cache, cache_seqlens=9))


def test_packed_pages() -> None:
    """Chunks of prompts beside tokens; lengths of keys are differences of offsets in flash-attn 2."""
    cache = [drawn(3, CACHE, HEADS_K, DIM, seed=3 + i) for i in (0, 1)]
    pools, table = paged(cache, 4)
    ends = torch.tensor([0, 1, 1, 5], dtype=torch.int32)
    q, lengths = drawn(7, HEADS, DIM), [5, 0, 9]
    of_k = torch.tensor([0, 5, 5, 14], dtype=torch.int32)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, *pools, ends, of_k, 4, 9, causal=True, block_table=table, return_attn_probs=True
    )
    third = flash_attn_interface
    metadata = third.get_scheduler_metadata(3, 4, 9, HEADS, HEADS_K, DIM, torch.tensor(lengths))
    other = third.flash_attn_with_kvcache(
        q, *pools, cache_seqlens=torch.tensor(lengths), page_table=table, cu_seqlens_q=ends, max_seqlen_q=4,
        causal=True, scheduler_metadata=metadata, num_splits=2, pack_gqa=True,
    )  # fmt: skip
    for n in (0, 2):
        rows = slice(ends[n], ends[n + 1])
        wanted = alone(q[rows], cache[0][n, : lengths[n]], cache[1][n, : lengths[n]], True)
        same((out[rows], lse[:, rows]), wanted)
        same(other[rows], wanted[0])
    assert not out[5:].any() and not other[5:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_packed_sequences(causal: bool) -> None:
    """seqused_q and seqused_k: gradients too, and NaN in rows that are not used reaches nobody."""
    of_q, of_k, used_q, used_k = [4, 2, 0, 3], [6, 3, 2, 5], [3, 0, 0, 3], [5, 3, 2, 0]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0) for x in (of_q, of_k))
    q, k, v = (drawn(n, h, DIM, seed=i) for i, (n, h) in enumerate(((9, HEADS), (16, HEADS_K), (16, HEADS_K))))
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    for n in range(4):
        q[cu_q[n] + used_q[n] : cu_q[n + 1]] = torch.nan
        for x in (k, v):
            x[cu_k[n] + used_k[n] : cu_k[n + 1]] = torch.nan
    given = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        *given, cu_q, cu_k, 1, 1, seqused_q=torch.tensor(used_q), seqused_k=torch.tensor(used_k), causal=causal,
        return_attn_probs=True,
    )  # fmt: skip
    wanted = torch.zeros_like(clean[0])
    for n in range(4):
        a, c = int(cu_q[n]), int(cu_k[n])
        b, d = a + used_q[n], c + used_k[n]
        if b > a and d > c:
            part, rows = alone(clean[0][a:b], clean[1][c:d], clean[2][c:d], causal)
            wanted = torch.cat([wanted[:a], part, wanted[b:]])
            same(lse[:, a:b], rows)
    same(out, wanted)
    dout = drawn(9, HEADS, DIM, seed=7)
    same(torch.autograd.grad(out, given, dout), torch.autograd.grad(wanted, clean, dout))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": None}, ValueError, "v is given without k; give both, or none"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is None, but k is given"),
        ({"cache_seqlens": 11}, ValueError, r"cache_seqlens\[0\] is 11, and 2 rows come behind these; k_cache has"),
        ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens is a float; it must be an integer"),
        ({"cache_seqlens": torch.zeros(2)}, ValueError, r"cache_seqlens is torch.float32 of shape \(2,\)"),
        ({"cache_batch_idx": torch.tensor([0, 1, 3])}, ValueError, r"cache_batch_idx\[2\] is 3; it must be an entry"),
        ({"k": drawn(3, NEW, 1, DIM)}, ValueError, r"k has shape \(3, 2, 1, 8\); it must be \(3, 2, 2, 8\)"),
        ({"v": drawn(3, NEW, HEADS_K, DIM).float()}, TypeError, "v is torch.float32; it must be that of v_cache"),
        ({"rotary_cos": torch.ones(12, 2)}, ValueError, "rotary_cos is given without rotary_sin"),
        ({"rotary_cos": drawn(12, 5), "rotary_sin": drawn(12, 5)}, ValueError, r"rotary_cos has shape \(12, 5\)"),
        ({"window_size": 3}, TypeError, "window_size is 3; it must be two integers"),
        ({"causal": "top_left"}, TypeError, "causal is 'top_left'; it must be True or False"),
        ({"block_table": torch.zeros(3, 2)}, ValueError, r"block_table is torch.float32 of shape \(3, 2\)"),
        ({"v_cache": drawn(3, 4, HEADS_K, DIM)}, ValueError, r"v_cache is torch.float64 of shape \(3, 4, 2, 8\)"),
        ({"q": drawn(3, NEW, 3, DIM)}, ValueError, "q has 3 heads"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = drawn(3, CACHE, HEADS_K, DIM)
    given = {"q": drawn(3, NEW, HEADS, DIM), "k_cache": cache, "v_cache": cache.clone(), "cache_seqlens": 4}
    given |= {"k": drawn(3, NEW, HEADS_K, DIM), "v": drawn(3, NEW, HEADS_K, DIM)}
    with pytest.raises(error, match=f"^{message}"):
        flash_attn.flash_attn_with_kvcache(**{**given, **change})


def test_what_is_refused_of_flash_attention_3() -> None:
    q, cache = drawn(3, NEW, HEADS, DIM), drawn(3, CACHE, HEADS_K, DIM)
    for name, value in (("qv", q), ("attention_chunk", 4), ("k_descale", q), ("q_descale", q), ("v_descale", q)):
        with pytest.raises(NotImplementedError, match=f"^{name} is .* not served"):
            flash_attn_interface.flash_attn_with_kvcache(q, cache, cache, **{name: value})
    with pytest.raises(ValueError, match="^q requires grad, and flash_attn_with_kvcache has no gradient"):
        flash_attn.flash_attn_with_kvcache(q.requires_grad_(), cache, cache)
    ends = torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match=r"^seqused_k\[1\] is 3; it must be at most 2, as cu_seqlens_k say"):
        flash_attn_interface.flash_attn_varlen_func(
            cache[0], cache[0], cache[0], ends, ends, 2, 2, seqused_k=torch.tensor([2, 3])
        )
    new, ends = drawn(6, HEADS_K, DIM), torch.tensor([0, 2, 4, 7])
    with pytest.raises(ValueError, match=r"^cu_seqlens_k_new\[3\] is 7; it must be at most 6, the rows of k$"):
        flash_attn_interface.flash_attn_with_kvcache(
            q.detach(), cache, cache.clone(), new, new, cache_seqlens=torch.tensor(FILLED), cu_seqlens_k_new=ends
        )
