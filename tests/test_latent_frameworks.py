"""Latent attention in PyTorch, JAX, FlashMLA's names, and on the way to a GPU: nothing is copied, nothing has a
gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
cupy = pytest.importorskip("cupy")

import test_append_kernel
import test_corridor_offline as offline
from cuda_on_cpu import needs_compiler
from test_corridor_callbacks import xla_call
from test_latent import LENGTHS, TABLE, D, N, new_row, same

import cupyflash.jax
import cupyflash.torch
from cupyflash import attention, attention_append
from cupyflash.compat import flash_mla
from cupyflash.problem import contiguous

gpu, kernel = offline.gpu, test_append_kernel.kernel
ALONE = r"latent is 16, of which there is a forward alone"


@pytest.fixture
def given(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    q, k = (rng.standard_normal((2, rows, heads, D)).astype("f") for rows, heads in ((3, 4), (9, 1)))
    return q, k, attention(q, k, k[..., :N], causal=True)


def attend(q: Any, k: Any) -> Any:
    return attention(q, k, latent=N, causal=True)


# ---- PyTorch --------------------------------------------------------------------------------------------------------


def test_torch(given: Any) -> None:
    q, k, wanted = map(torch.tensor, given)
    for run in (attend, lambda q, k: cupyflash.torch.attention(q, k, latent=N, causal=True)):
        assert torch.equal(run(q, k), wanted)
    compiled = torch.compile(attend, fullgraph=True)
    assert torch.equal(compiled(q, k), wanted) and torch.equal(compiled(q.half(), k.half()), attend(q.half(), k.half()))
    exported = torch.export.export(Layer(), (q, k)).module()
    assert torch.equal(exported(q, k), wanted)
    mapped = torch.func.vmap(attend)(torch.stack([q, 2 * q]), torch.stack([k, k]))
    assert torch.equal(mapped[0], wanted) and torch.equal(mapped[1], attend(2 * q, k))
    with torch.autocast("cpu"):
        assert torch.equal(attend(q, k), attend(q.bfloat16(), k.bfloat16()))
    with pytest.raises(TypeError, match="^v is a NoneType; it must be a torch.Tensor"):
        cupyflash.torch.attention(q, k)
    with pytest.raises(ValueError, match="^v is given, and latent is 16"):
        cupyflash.torch.attention(q, k, k, latent=N)


class Layer(torch.nn.Module):
    def forward(self, q: Any, k: Any) -> Any:
        return attend(q, k)


@pytest.mark.parametrize("of", ["q", "k"])
def test_torch_has_no_gradient(given: Any, of: str) -> None:
    """Never a silent zero: neither at once nor traced nor transformed."""
    q, k, wanted = map(torch.tensor, given)
    x = (q if of == "q" else k).requires_grad_()
    with torch.no_grad():
        assert torch.equal(attend(q, k), wanted)
    for run in (attend, torch.compile(attend)):
        with pytest.raises(TypeError, match=ALONE):
            run(q, k)

    def by(x: Any) -> Any:
        return attend(x, k.detach()) if of == "q" else attend(q.detach(), x)

    x = x.detach()
    for run in (torch.func.grad(lambda x: by(x).sum()), lambda x: torch.func.jvp(by, (x,), (x,))):
        with pytest.raises(TypeError, match=ALONE):
            run(x)


def test_torch_nested_tensors(rng: np.random.Generator) -> None:
    rows = [torch.randn(n, 2, D) for n in (3, 5)]
    q = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for x, y in zip(attention(q, q, latent=N).unbind(), rows):
        torch.testing.assert_close(x, attention(y, y, y[..., :N]))


def test_torch_appends(rng: np.random.Generator) -> None:
    q, new, pool, wanted, out = map(torch.tensor, new_row(rng))
    lengths, table = torch.tensor(LENGTHS), torch.tensor(TABLE)

    def append(q: Any, new: Any, cache: Any, lengths: Any) -> Any:
        return attention_append(
            q, new, k_cache=cache, seqlens_k=lengths, page_table=table, latent=N, causal=True
        )  # fmt: skip

    for run in (append, torch.compile(append, fullgraph=True)):
        cache = pool.clone()
        same([x.numpy() for x in (run(q, new, cache, lengths), cache)], [out.numpy(), wanted.numpy()])


# ---- JAX ------------------------------------------------------------------------------------------------------------


def test_jax(given: Any) -> None:
    q, k, wanted = map(jax.numpy.asarray, given)
    runs = [attend, jax.jit(attend), lambda q, k: cupyflash.jax.attention(q, k, latent=N, causal=True)]
    same([run(q, k) for run in runs], [wanted] * 3)
    same([jax.vmap(attend)(q[None], k[None])[0]], [wanted])
    for run in (jax.grad(lambda q: attend(q, k).sum()), jax.jit(jax.grad(lambda k: attend(q, k).sum(), 0))):
        with pytest.raises(TypeError, match=ALONE):
            run(q)
    with pytest.raises(TypeError, match=ALONE):
        jax.jvp(lambda q: attend(q, k), (q,), (q,))
    with pytest.raises(TypeError, match="^v is a NoneType; it must be a jax.Array"):
        cupyflash.jax.attention(q, k)


def test_jax_copies_nothing(given: Any) -> None:
    """Where a slice of an array would be a copy, K alone is handed over."""
    program = str(jax.make_jaxpr(attend)(*given[:2]))
    assert "names=('q', 'k')" in program and "slice" not in program


def test_jax_appends(rng: np.random.Generator) -> None:
    q, new, pool, wanted, out = map(jax.numpy.asarray, new_row(rng))

    def append(q: Any, new: Any, cache: Any) -> Any:
        return attention_append(
            q, new, k_cache=cache, seqlens_k=LENGTHS, page_table=TABLE, latent=N, causal=True
        )  # fmt: skip

    for run in (append, jax.jit(append, donate_argnums=2)):
        same(run(q, new, pool + 0), [out, wanted])
    slots = np.array([[TABLE[n, x // 4] * 4 + x % 4] for n, x in enumerate(LENGTHS)])
    same([attention_append(None, new, k_cache=pool, slots=slots, latent=N)], [wanted])


# ---- the corridor of a GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8])
def test_kernels_read_v_where_k_is(gpu: offline.Gpu, offset: int) -> None:
    q, k = gpu.array((2, 3, 4, 64)), gpu.array((2, 9, 1, 80), offset=offset)[..., :64]
    out = attention(q, k, latent=48)
    p = gpu.last()
    assert out.shape == (2, 3, 4, 48) and p["dim_v"] == 48
    if offset:  # both are copied where kernels read 16 bytes at once
        (at_k, of_k, to_k, _), (at_v, of_v, to_v, _) = gpu.copied
        assert at_k == at_v == k.data.ptr and (of_k.shape[-1], of_v.shape[-1]) == (64, 48)
        assert (p["k"], p["v"]) == (to_k, to_v)
    else:
        assert p["k"] == p["v"] == k.data.ptr and not gpu.copied
        assert tuple(p["k_strides"]) == tuple(p["v_strides"]) == offline.strides(k)
    planned = gpu.planned
    attention(q, k, latent=48)
    assert gpu.planned == planned


def test_a_callback_of_xla_has_v_where_k_is(gpu: offline.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"k": ((2, 9, 1, 64), "bfloat16"), "q": ((2, 3, 4, 64), "bfloat16")}
    _, buffers, (out, *_) = xla_call(monkeypatch, shapes, None, {"latent": 48})
    p = gpu.last()
    assert p["k"] == p["v"] == buffers["k"].address and p["q"] == buffers["q"].address and p["out"] == out.address
    assert tuple(p["v_strides"]) == contiguous((2, 9, 1, 64))[:3]


@needs_compiler
def test_the_kernel_writes_a_row_once(kernel: Any, rng: np.random.Generator) -> None:
    q, new, pool, wanted, out = new_row(rng)
    for _ in range(2):  # planned, and known
        cache = pool.copy()
        found = attention_append(q, new, k_cache=cache, seqlens_k=LENGTHS, page_table=TABLE, latent=N, causal=True)
        same([found, cache], [out, wanted])
    assert len(kernel.launches) == 2


# ---- FlashMLA -------------------------------------------------------------------------------------------------------


def oracle(q: Any, cache: Any, columns: int, scale: float, causal: bool) -> tuple[Any, Any]:
    """One sequence in float64, q (rows, heads, D) on cache (keys, D)."""
    q, cache = q.double(), cache.double()
    s = torch.einsum("qhd,kd->hqk", q, cache) * scale
    if causal:
        hidden = torch.arange(len(cache))[None] > torch.arange(len(q))[:, None] + len(cache) - len(q)
        s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,kd->qhd", s.softmax(-1).nan_to_num(0), cache[:, :columns]), s.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 192**-0.5])
def test_flash_mla(causal: bool, scale: float | None) -> None:
    batch, rows, heads, page, lengths = 3, 2, 16, 64, [130, 2, 1]
    q = torch.randn(batch, rows, heads, 576)
    cache = torch.full((8, page, 1, 576), torch.nan)
    table = torch.tensor([[5, 0, 3], [2, -1, -1], [7, -1, 2**30]], dtype=torch.int32)
    for n, length in enumerate(lengths):
        for j in range(length):
            cache[table[n, j // page], j % page] = torch.randn(1, 576)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    metadata, splits = flash_mla.get_mla_metadata(seqlens, rows * heads, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, seqlens, 512, metadata, splits, scale, causal=causal)
    assert out.shape == (batch, rows, heads, 512) and lse.shape == (batch, heads, rows)
    for n, length in enumerate(lengths):
        own = torch.cat([cache[page_] for page_ in table[n, : -(-length // page)]])[:length, 0]
        exact, of_rows = oracle(q[n], own, 512, 576**-0.5 if scale is None else scale, causal)
        torch.testing.assert_close(out[n].double(), exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[n].double(), of_rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    ["indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length",
     "is_fp8_kvcache"],
)  # fmt: skip
def test_flash_mla_refuses(name: str) -> None:
    q, cache = torch.zeros(1, 1, 2, 24), torch.zeros(2, 4, 1, 24)
    given: dict[str, Any] = {"block_table": torch.zeros(1, 2, dtype=torch.int32), "head_dim_v": 16}
    given["cache_seqlens"] = torch.ones(1, dtype=torch.int32)
    assert flash_mla.flash_mla_with_kvcache(q, cache, **given)[0].shape == (1, 1, 2, 16)
    with pytest.raises(NotImplementedError, match=f"^{name} is "):
        flash_mla.flash_mla_with_kvcache(q, cache, **given, **{name: name == "is_fp8_kvcache" or torch.zeros(1)})
    with pytest.raises(ValueError, match="^head_dim_v is 40; it must be at most the columns of k_cache, 24"):
        flash_mla.flash_mla_with_kvcache(q, cache, **given | {"head_dim_v": 40})
    with pytest.raises(TypeError, match="^block_table is a NoneType"):
        flash_mla.flash_mla_with_kvcache(q, cache, **given | {"block_table": None})
