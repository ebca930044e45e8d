"""flash-attn's functions of packed sequences: each sequence is computed as by itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyflash.compat import flash_attn, flash_attn_interface

LENGTHS = {
    "a batch": ([5, 5], [5, 5]), "of several lengths": ([3, 7, 1, 4], [3, 7, 1, 4]), "one": ([6], [9]),
    "others of keys": ([3, 0, 7, 2], [8, 2, 7, 5]), "without keys": ([2, 3], [4, 0]), "none": ([], []),
}  # fmt: skip


def packed(lengths: list[int], *rest: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), *rest, generator=generator, dtype=torch.float64).requires_grad_()


def ends(lengths: list[int], dtype: Any = torch.int32) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True}, {"causal": True, "window_size": (2, 0), "softcap": 5.0}, {"window_size": (1, 2)},
        {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.9])}, {"softmax_scale": 0.7},
    ],
    ids=str,
)  # fmt: skip
def test_each_sequence_is_as_by_itself(name: str, options: dict[str, Any]) -> None:
    of_q, of_k = LENGTHS[name]
    q, k, v = packed(of_q, 4, 8), packed(of_k, 2, 8, seed=1), packed(of_k, 2, 8, seed=2)
    longest = max(of_q, default=1), max(of_k, default=1) + 1  # more is allowed
    out, lse, probabilities = flash_attn.flash_attn_varlen_func(
        q, k, v, ends(of_q), ends(of_k), *longest, **options, return_attn_probs=True
    )
    parts = [
        flash_attn.flash_attn_func(*(x[None] for x in one), **options, return_attn_probs=True)
        for one in zip(q.split(of_q), k.split(of_k), v.split(of_k))
    ]
    expected = torch.cat([part[0][0] for part in parts]) if parts else q.detach()
    assert probabilities is None and out.shape == q.shape and lse.shape == (4, len(q))
    torch.testing.assert_close(out, expected)
    if parts:
        torch.testing.assert_close(lse, torch.cat([part[1][0] for part in parts], dim=1))
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        found, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
        torch.testing.assert_close(found, wanted)


def test_packed_in_one_tensor_and_flash_attention_3() -> None:
    lengths = [3, 7, 4]
    where = ends(lengths, torch.int64)
    q, k, v = (packed(lengths, 2, 8, seed=i).detach() for i in range(3))
    given = {"causal": True, "softmax_scale": 0.3}
    expected = flash_attn.flash_attn_varlen_func(q, k, v, where, where, 7, 7, **given)
    qkv, kv = torch.stack([q, k, v], 1), torch.stack([k, v], 1)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, where, 7, **given), expected)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, where, where, 7, 7, **given), expected)
    third = flash_attn_interface.flash_attn_varlen_func
    assert torch.equal(third(q, k, v, where, where, 7, 7, **given), expected)
    out, lse = third(q, k, v, where, where, 7, 7, **given, return_attn_probs=True)
    assert torch.equal(out, expected) and lse.shape == (2, 14)
    with pytest.raises(ValueError, match=r"^seqused_k is torch.int64 of shape \(4,\); it must be int32 or int64 of sh"):
        third(q, k, v, where, where, 7, 7, seqused_k=where)


def test_signatures() -> None:
    """Which others read."""
    options = list(inspect.signature(flash_attn.flash_attn_func).parameters)[3:]
    packed_too = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    for name, first in {
        "varlen_func": ["q", "k", "v", *packed_too], "varlen_kvpacked_func": ["q", "kv", *packed_too],
        "varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    }.items():  # fmt: skip
        found = list(inspect.signature(getattr(flash_attn, f"flash_attn_{name}")).parameters)
        assert found == [*first, *options, "block_table"]


def test_dropout_and_compiled() -> None:
    lengths = [3, 7]
    q = packed(lengths, 2, 8).detach().float()
    where = ends(lengths)

    def call(q: Any, where: Any, p: float = 0.0) -> Any:
        return flash_attn.flash_attn_varlen_func(q, q, q, where, where, 7, 7, dropout_p=p)

    torch.manual_seed(0)
    dropped = call(q, where, 0.5)
    torch.manual_seed(0)
    assert torch.equal(call(q, where, 0.5), dropped) and not torch.equal(call(q, where), dropped)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, where), call(q, where))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"q": torch.zeros(1, 10, 2, 8)}, ValueError, r"q has 4 dimensions, shape \(1, 10, 2, 8\); with cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0.0, 10.0])}, TypeError, "cu_seqlens_q has dtype float32; it must be int32"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 12])}, ValueError, r"cu_seqlens_k\[2\] is 12; it must be at most 10"),
        ({"cu_seqlens_q": torch.tensor([0, 7, 3])}, ValueError, r"cu_seqlens_q\[2\] is 3; it must be cu_seq"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1; it must be None or how many rows"),
        ({"block_table": torch.zeros(2, 1)}, TypeError, "block_table has dtype float32"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "k has 3 dimensions"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    q = torch.zeros(10, 2, 8)
    where = ends([3, 7])
    given = {"q": q, "k": q, "v": q, "cu_seqlens_q": where, "cu_seqlens_k": where, "max_seqlen_q": 7, "max_seqlen_k": 7}
    with pytest.raises(kind, match=f"^{message}"):
        flash_attn.flash_attn_varlen_func(**{**given, **change})
    with pytest.raises(ValueError, match=r"^qkv has shape \(10, 2, 8\); it must be \(rows of all sequences, 3, heads"):
        flash_attn.flash_attn_varlen_qkvpacked_func(q, where, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_k": [0, 8, 16]}, r"cu_seqlens_k\[2\] is 16; it must be at most 12, the rows of k"),
        ({"cu_seqlens_k": [2, 8, 12]}, r"cu_seqlens_k\[0\] is 2; it must be 0"),
        ({"cu_seqlens_k": [0, 8, 7]}, r"cu_seqlens_k\[2\] is 7; it must be cu_seqlens_k\[1\], 8, or more"),
        ({"cu_seqlens_q": [0, 2, 9]}, r"cu_seqlens_q\[2\] is 9; it must be at most 4, the rows of q"),
        ({"cu_seqlens_q": [1, 2, 4]}, r"cu_seqlens_q\[0\] is 1; it must be 0"),
        ({"cu_seqlens_q": [0, 2, 1]}, r"cu_seqlens_q\[2\] is 1; it must be cu_seqlens_q\[1\], 2, or more"),
        ({"seqused_k": [-1, 4]}, r"seqused_k\[0\] is -1; it must be 0 or more"),
        ({"seqused_q": [1, -2]}, r"seqused_q\[1\] is -2; it must be 0 or more"),
        ({"seqused_q": [1, 3]}, r"seqused_q\[1\] is 3; it must be at most 2, as cu_seqlens_q say"),
        ({"v": torch.zeros(11, 1, 8)}, r"v has shape \(11, 1, 8\); it must have as many rows as k, 12"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_are_used_are_rows_that_are_there(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [0, 8, 12], "seqused_q": [1, 2]}
    given |= {"seqused_k": [3, 4]} | change
    given |= {name: torch.tensor(x) for name, x in given.items() if name != "v"}
    x = torch.zeros(12, 1, 8)
    given = {"q": x[:4], "k": x, "v": x, "max_seqlen_q": 2, "max_seqlen_k": 8} | given
    with pytest.raises(ValueError, match=f"^{message}"):
        flash_attn_interface.flash_attn_varlen_func(**given)
