"""xFormers' block-diagonal biases, of stand-ins with their names and attributes, beside a loop over sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyflash.compat import xformers
from cupyflash.compat.xformers_blocks import MASKS

OF_Q, OF_K, PADDING, PAGE = [3, 1, 2], [5, 3, 2], 8, 4


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(q: Any, k: Any, v: Any, causal: Any, window: Any) -> Any:
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    at = torch.arange(len(k))[None] - torch.arange(len(q))[:, None]
    at = at if causal == "top_left" else at - (len(k) - len(q))
    s = s.masked_fill((at < -window[0]) | (at > (min(0, window[1]) if causal else window[1])), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


def constructed(name: str, starts: Any, tables: Any) -> Any:
    """One of here, of the same lengths."""
    made, on = getattr(xformers, name), {"device": "cpu"}
    _, local = MASKS[name]
    window = ((2,) if MASKS[name][0] else (2, 1)) if local else ()
    if name.startswith("Paged"):
        by = made.from_seqlens_local if local else made.from_seqlens
        mask = by(OF_Q, torch.tensor(OF_K), tables, PAGE, *window)
        if not local:
            of = "BlockDiagonalCausalWithOffsetPaddedKeysMask" if "Causal" in name else "BlockDiagonalPaddedKeysMask"
            other = getattr(xformers, of).from_seqlens(OF_Q, PADDING, OF_K, **on).make_paged(tables, PAGE, made)
            assert type(other) is made and other.k_seqinfo.padding == mask.k_seqinfo.padding == tables.shape[1] * PAGE
        return mask.to("cpu")
    if "Padded" in name:
        by = made.from_seqlens_local if local else made.from_seqlens
        return by(OF_Q, PADDING, OF_K, *window, **on)
    if "Gappy" in name:
        return made.from_seqlens(OF_Q, starts, OF_K, **on)
    plain = xformers.BlockDiagonalMask.from_seqlens(OF_Q, OF_K, **on)
    make = {
        "BlockDiagonalMask": lambda: plain, "BlockDiagonalCausalMask": plain.make_causal,
        "BlockDiagonalCausalFromBottomRightMask": plain.make_causal_from_bottomright,
        "BlockDiagonalCausalLocalAttentionMask": lambda: plain.make_local_attention(2),
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda: plain.make_local_attention_from_bottomright(2),
    }[name]  # fmt: skip
    return make()


def test_lists_of_tensors_and_back() -> None:
    tensors = [drawn(2, 3, 2, 8), drawn(1, 5, 2, 8, seed=1)]
    mask, rows = xformers.BlockDiagonalMask.from_tensor_list(tensors)
    assert mask.q_seqinfo.seqlen_py == [3, 3, 5] and rows.shape == (1, 11, 2, 8)
    assert list(mask.q_seqinfo.intervals()) == [(0, 3), (3, 6), (6, 11)] and mask.q_seqinfo.max_seqlen == 5
    out = xformers.memory_efficient_attention(rows, rows, rows, mask)
    for x, y in zip(tensors, mask.to("cpu").split(out), strict=True):
        torch.testing.assert_close(y, xformers.memory_efficient_attention(x, x, x))
    both, q, k, v = xformers.BlockDiagonalMask.from_tensor_lists_qkv(tensors, [x[:, :2] for x in tensors])
    assert v is None and both.k_seqinfo.seqlen_py == [2, 2, 2] and [len(x) for x in both.split_kv(k)] == [2, 1]
    with pytest.raises(ValueError, match="^queries and keys have other lengths; call split_queries or split_kv"):
        both.split(q)


TABLES, IS = "^block_tables is", r"it must be int32 or int64, \(sequences, pages of one\)"


def padded() -> Any:
    return xformers.BlockDiagonalPaddedKeysMask.from_seqlens(OF_Q, PADDING, OF_K, device="cpu")


def pages(tables: Any) -> Any:
    return xformers.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2, 2], [2, 4], tables, PAGE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: xformers.BlockDiagonalMask.from_seqlens([3, -1]), r"^q_seqlen is \[3, -1\]; it must hold integers"),
        (
            lambda: xformers.BlockDiagonalMask.from_seqlens([3], [1, 2]),
            "^kv_seqlen has 2 sequences; it must have as ma",
        ),
        (
            lambda: xformers.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]),
            "^kv_seqlen has 5; it must be at most kv_padding, 4",
        ),
        (
            lambda: xformers.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [5]),
            "^kv_seqstarts has 1 numbers; it must have 2, one more than kv_seqlen",
        ),
        (
            lambda: xformers.BlockDiagonalMask.from_seqlens([1]).make_local_attention(0),
            "^window_size is 0; it must be a number of keys, 1",
        ),
        (
            lambda: xformers.LocalAttentionFromBottomRightMask(1.5, 2),
            "^window_left is 1.5; it must be a number of keys, 0 or more",
        ),
        (
            lambda: xformers.BlockDiagonalMask.from_tensor_lists_qkv(*([drawn(1, n, 1, 8)] for n in (2, 4, 3))),
            r"^tensors_v has \[3\] rows; it must have those of tensors_k, \[4\]",
        ),
        (lambda: padded().make_paged([[0]], PAGE, xformers.PagedBlockDiagonalPaddedKeysMask), f"{TABLES} a list; {IS}"),
        (lambda: pages(torch.zeros(2, 1)), rf"{TABLES} torch.float32 of shape \(2, 1\); {IS}"),
        (lambda: pages(torch.tensor([0, 1])), rf"{TABLES} torch.int64 of shape \(2,\); {IS}"),
    ],
)
def test_what_lengths_cannot_be(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_each_sequence_attends_to_its_own(name: str, ours: bool) -> None:
    causal, local = MASKS[name]
    starts = torch.tensor([0, *OF_K]).cumsum(0).int()
    rows = sum(OF_K)
    seqinfo: dict[str, Any] = {"seqlen": torch.tensor(OF_K, dtype=torch.int32), "seqlen_py": OF_K, "padding": PADDING}
    bias = type(name, (), {"_window_size": 2, "window_left": 2, "window_right": 1})()
    if "Paged" in name:
        bias.block_tables, bias.page_size, rows = torch.tensor([[4, 1], [0, -1], [3, -1]]).int(), PAGE, 5 * PAGE
        place = [[int(bias.block_tables[n, j // PAGE]) * PAGE + j % PAGE for j in range(x)] for n, x in enumerate(OF_K)]
    else:
        if "Padded" in name:
            starts, rows = torch.arange(4).int() * PADDING, 3 * PADDING
        elif "Gappy" in name:
            starts, rows = torch.tensor([1, 8, 12, 15]).int(), 15
        place = [list(range(int(starts[n]), int(starts[n]) + x)) for n, x in enumerate(OF_K)]
    bias.q_seqinfo = SimpleNamespace(seqstart=torch.tensor([0, *OF_Q]).cumsum(0).int())
    bias.k_seqinfo = SimpleNamespace(seqstart=starts, **seqinfo)
    if ours:
        bias = constructed(name, starts, getattr(bias, "block_tables", None))
    window = ((1, 0) if causal else (2, 1)) if local else (1000, 1000)
    q, k, v = drawn(1, 6, 2, 8), drawn(1, rows, 2, 8, seed=1), drawn(1, rows, 2, 8, seed=2)
    given = [x.requires_grad_() for x in (q, k, v)]
    with torch.set_grad_enabled("Paged" not in name):
        out, lse = xformers.memory_efficient_attention_forward_requires_grad(*given, bias)
        parts = [
            alone(x, k[0, at], v[0, at], causal, window) for x, at in zip(q[0].split(OF_Q), place, strict=True)
        ]  # fmt: skip
        wanted = torch.cat([x for x, _ in parts])[None]
    torch.testing.assert_close((out, lse), (wanted, torch.cat([x for _, x in parts], 1)[None]))
    if "Paged" not in name:
        dout = drawn(*out.shape, seed=3)
        torch.testing.assert_close(torch.autograd.grad(out, given, dout), torch.autograd.grad(wanted, given, dout))
    with pytest.raises(ValueError, match=f"^query has shape .*; with a {name} it must be"):
        xformers.memory_efficient_attention(q.expand(2, -1, -1, -1), k, v, bias)


@pytest.mark.parametrize(
    "name",
    ["PagedBlockDiagonalGappyKeysMask", "BlockDiagonalLocalAttentionFromBot"],
)
def test_others_are_refused_by_name(name: str) -> None:
    q = drawn(1, 6, 2, 8)
    with pytest.raises(NotImplementedError, match=f"^attn_bias is a {name}; it must be None, a tensor or one of"):
        xformers.memory_efficient_attention(q, q, q, type(name, (), {})())


LOCAL = [x for x in MASKS if "Local" in x and "PaddedKeys" in x]


@pytest.mark.parametrize("name", LOCAL)
def test_a_window_has_no_usual_size(name: str) -> None:
    made, tables = getattr(xformers, name), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=f"^{name}.from_seqlens has no window; call from_seqlens_local with one"):
        made.from_seqlens(*((OF_Q, OF_K, tables, PAGE) if "Paged" in name else (OF_Q, PADDING, OF_K)))


def test_pages_keep_the_window() -> None:
    local, both, paged = (getattr(xformers, name) for name in (
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask",
        "PagedBlockDiagonalCausalLocalPaddedKeysMask",
    ))  # fmt: skip
    tables = torch.arange(6, dtype=torch.int32).view(3, 2)
    mask = local.from_seqlens_local(OF_Q, PADDING, OF_K, 2, device="cpu")
    made, asked = mask.make_paged(tables, PAGE, paged), paged.from_seqlens_local(OF_Q, OF_K, tables, PAGE, 2)
    assert made._window_size == asked._window_size == 2
    q, k, v = drawn(1, 6, 2, 8), drawn(1, 24, 2, 8, seed=1), drawn(1, 24, 2, 8, seed=2)
    wanted = xformers.memory_efficient_attention(q, k, v, mask)
    for x in (made, asked):
        torch.testing.assert_close(xformers.memory_efficient_attention(q, k, v, x), wanted)
    for one, kind, has in (
        (mask, xformers.PagedBlockDiagonalPaddedKeysMask, "_window_size"), (padded(), paged, "none"),
        (both.from_seqlens_local(OF_Q, PADDING, OF_K, 2, 1, device="cpu"), paged, "window_left, window_right"),
    ):  # fmt: skip
        message = f"^paged_type is {kind.__name__}; it must be one with the window of a {type(one).__name__}: {has}$"
        with pytest.raises(ValueError, match=message):
            one.make_paged(tables, PAGE, kind)


def test_keys_that_are_not_there() -> None:
    def attend(mask: Any, *rows: int) -> Any:
        return xformers.memory_efficient_attention(*(drawn(1, n, 1, 8) for n in (4, *rows)), mask)

    gappy = xformers.BlockDiagonalGappyKeysMask.from_seqlens([2, 2], [0, 4, 8], [3, 4], device="cpu")
    with pytest.raises(ValueError, match=r"^key has shape \(1, 6, 1, 8\); it must have 8 rows or more, as kv_"):
        attend(gappy, 6, 6)
    table = torch.tensor([[0, 1], [2, 1]])
    for mask in (
        gappy, pages(table), xformers.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], 6, [2, 4], device="cpu"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^value has shape \(1, 11, 1, 8\); it must have as many rows as key, 12"):
            attend(mask, 12, 11)


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_of_sequences_that_have_none(compiled: bool) -> None:
    q, k, v = (drawn(1, n, 1, 8) for n in (4, 8, 8))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = xformers.BlockDiagonalGappyKeysMask.from_seqlens([2, 2], [0, 100, 100], [3, 0], device="cpu")
        return xformers.memory_efficient_attention(q, k, v, mask)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    of_first = xformers.memory_efficient_attention(q[:, :2], k[:, :3], v[:, :3])
    torch.testing.assert_close(run(q, k, v), torch.cat([of_first, torch.zeros_like(of_first)], 1))


def test_errors_name_what_was_given() -> None:
    q, k = drawn(1, 4, 1, 8), drawn(1, 12, 1, 8).requires_grad_()
    with pytest.raises(TypeError, match="^attn_bias.block_tables is given, with which there is a forward alone"):
        xformers.memory_efficient_attention(q, k, k, pages(torch.tensor([[0, 1], [2, 1]])))
    mask = xformers.BlockDiagonalMask.from_seqlens([1, 4], device="cpu")
    with pytest.raises(ValueError, match=r"^attn_bias.q_seqinfo.seqstart\[2\] is 5; it must be at most 4, the rows"):
        xformers.memory_efficient_attention(q, k, k, mask)
    with pytest.raises(NotImplementedError, match="^attn_bias.q_seqinfo.seqstart is given under vmap.*: query is pa"):
        torch.vmap(lambda x: xformers.memory_efficient_attention(x, x, x, mask))(drawn(3, 1, 5, 1, 8))


def test_biases_of_groups_and_of_one_head() -> None:
    q, k = drawn(2, 3, 2, 2, 8), drawn(2, 4, 2, 2, 8, seed=1)
    for shape in ((2, 1, 2, 3, 4), (1, 2, 1, 1, 4), (2, 1, 1, 3, 4)):
        bias = drawn(*shape, seed=2)
        outs = [xformers.memory_efficient_attention(q, k, k, x) for x in (bias, bias.expand(2, 2, 2, 3, 4))]
        torch.testing.assert_close(*outs)
    for cut, shape, wanted in (
        ((), (2, 2, 2, 3, 5), "2, 2, 2, 3, 4"), ((), (2, 3, 2, 3, 4), "2, 2, 2, 3, 4"), ((0, 0), (3, 3, 4), "2, 3, 4"),
    ):  # fmt: skip
        given = [x[:, :, 0, 0] if cut else x for x in (q, k, k)]
        message = rf"^attn_bias has shape \({str(shape)[1:-1]}\); it must be \({wanted}\), where a length of 1"
        with pytest.raises(ValueError, match=message):
            xformers.memory_efficient_attention(*given, drawn(*shape))
