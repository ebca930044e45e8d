"""varlen_attn in the place of torch.nn.attention.varlen's, which has no kernel on a CPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("torch.nn.attention.varlen")

from cupyflash.torch import scaled_dot_product_attention, varlen_attn, varlen_attn_out

CU_Q, CU_K = torch.tensor([0, 2, 2, 7]), torch.tensor([0, 5, 6, 15])
USED = torch.tensor([4, 1, 9], dtype=torch.int32)
LSE = theirs.AuxRequest(lse=True)


def drawn(grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(*x, dtype=torch.float64, requires_grad=grad) for x in ((7, 4, 8), (15, 2, 8), (15, 2, 8))]


def expected(q: Any, k: Any, v: Any, window: tuple[int, int], used: Any = None, scale: Any = None) -> tuple[Any, Any]:
    """Each sequence alone, from the scores themselves."""
    outs, rows = [], []
    for n in range(3):
        (a, b), (c, d) = (x[n : n + 2].tolist() for x in (CU_Q, CU_K))
        d = d if used is None else c + int(used[n])
        s = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d].repeat_interleave(2, 1)) * (8**-0.5 if scale is None else scale)
        at = torch.arange(d - c)[None] - torch.arange(b - a)[:, None] - ((d - c) - (b - a))
        left, right = (1000 if x == -1 else x for x in window)
        s = s.masked_fill((at < -left) | (at > right), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v[c:d].repeat_interleave(2, 1)))
        rows.append(s.logsumexp(-1))
    return torch.cat(outs), torch.cat(rows, 1)


def same(actual: Any, wanted: Any) -> None:
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_signatures() -> None:
    for ours in (varlen_attn, varlen_attn_out):
        mine, own = (inspect.signature(x).parameters for x in (ours, getattr(theirs, ours.__name__)))
        assert [(x.name, x.kind, x.default) for x in mine.values()] == [
            (x.name, x.kind, x.default) for x in own.values()
        ]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 1)])
def test_as_each_sequence_alone(window: tuple[int, int]) -> None:
    """out and lse, both differentiable."""
    tensors = drawn(True)
    for scale in (None, 0.3):
        found = varlen_attn(
            *tensors, CU_Q, CU_K, 5, 9, window_size=window, enable_gqa=True, return_aux=LSE, scale=scale
        )
        wanted = expected(*tensors, window, scale=scale)
        same(found, wanted)
        grads = [torch.autograd.grad(out.sin().sum() + lse.sum(), tensors) for out, lse in (found, wanted)]
        same(*grads)
    assert isinstance(varlen_attn(*tensors, CU_Q, CU_K, 5, 9, enable_gqa=True), torch.Tensor)


def test_caches() -> None:
    q, k, v = drawn()
    wanted, _ = expected(q, k, v, (-1, 0), USED)
    causal: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    same([varlen_attn(q, k, v, CU_Q, CU_K, 5, 9, seqused_k=USED, **causal)], [wanted])
    table = torch.tensor([[2, -1], [0, -1], [4, 3]], dtype=torch.int32)
    pools = [torch.full((6, 8, 2, 8), torch.nan, dtype=torch.float64) for _ in range(2)]
    for x, pool in zip((k, v), pools):
        for n, m in enumerate(USED.tolist()):
            rows = x[CU_K[n] : CU_K[n] + m]
            for at in range(0, m, 8):
                part = rows[at : at + 8]
                pool[table[n, at // 8], : len(part)] = part
    for cu_k in (None, CU_K):
        same([varlen_attn(q, *pools, CU_Q, cu_k, 5, 16, seqused_k=USED, block_table=table, num_splits=1, **causal)],
             [wanted])  # fmt: skip
    out = torch.full_like(q, torch.nan)
    found = varlen_attn_out(out, q, *pools, CU_Q, None, 5, 16, seqused_k=USED, block_table=table, **causal)
    assert found is out
    same([out], [wanted])


def test_compiled() -> None:
    torch._dynamo.reset()
    q, k, v = drawn()
    compiled = torch.compile(varlen_attn, fullgraph=True, dynamic=True, backend="aot_eager")
    for most in (9, 11, 40):
        same([compiled(q, k, v, CU_Q, CU_K, most, most, enable_gqa=True)], [expected(q, k, v, (-1, -1))[0]])
    same([compiled(q, k, v, CU_Q, CU_K, 5, 9, enable_gqa=True, seqused_k=USED)], [expected(q, k, v, (-1, -1), USED)[0]])


def test_as_padded_sequences_of_pytorch() -> None:
    q, k, v = drawn()
    found = varlen_attn(q, k, v, CU_Q, CU_K, 5, 9, enable_gqa=True)
    alone = [x.transpose(0, 1)[None] for x in (q[2:], k[6:], v[6:])]
    same([found[2:]], [scaled_dot_product_attention(*alone, enable_gqa=True)[0].transpose(0, 1)])


def test_errors_name_the_arguments_of_pytorch() -> None:
    q, k, v = drawn(True)
    plain = [q.detach(), k.detach()[:, None], v.detach()[:, None]]
    for call, error, message in (
        (lambda: varlen_attn(q, k, v, CU_Q, CU_K, 5, 9), ValueError, "^key has 2 heads but query has 4; .* enable"),
        (lambda: varlen_attn(q, k, v, CU_Q, None, 5, 9, enable_gqa=True), ValueError, "^cu_seq_k is None, but"),
        (lambda: varlen_attn(q, k, v, CU_Q, CU_K, 5, 9, enable_gqa=True, window_size=(-2, 0)), ValueError,
            r"^window_size is \(-2, 0\); it must be"),
        (lambda: varlen_attn(q, k, v, CU_Q, CU_K - 1, 5, 9, enable_gqa=True), ValueError, r"^cu_seq_k\[0\] is -1; it"),
        (lambda: varlen_attn(q, k, v, CU_Q.float(), CU_K, 5, 9, enable_gqa=True), TypeError, "^cu_seq_q has dtype f"),
        (lambda: varlen_attn(q, k, v, [0, 7], CU_K, 5, 9), TypeError, "^cu_seq_q is a list; it must be a torch.Tensor"),
        (lambda: varlen_attn(q, k, v, CU_Q, CU_K, 5, 9, enable_gqa=True, seqused_k=USED), TypeError, "^seqused_k"),
        (lambda: varlen_attn(*plain, CU_Q, None, 5, 9, enable_gqa=True, block_table=CU_K[None]),
            ValueError, "^block_table is given without seqused_k"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
