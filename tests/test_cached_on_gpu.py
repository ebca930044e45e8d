"""k and v of 8 bits beside q of 16, in kernels on a GPU: judged as on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cached_problems import BY, EIGHT, draw
from test_cached import appended, judge, of_tensor, tensor

from cupyflash import attention

pytestmark = pytest.mark.gpu
KEYS = [500, 130, 5, 0, 2100, 64]
TOKENS: dict[str, Any] = {"lens_q": [1] * 6, "lens_k": KEYS, "heads": (8, 2)}
CHUNKS: dict[str, Any] = {"lens_q": [70, 1, 5, 0, 200, 33], "lens_k": KEYS, "heads": (4, 2), "form_q": "packed"}
KINDS: dict[str, dict[str, Any]] = {
    "tokens": TOKENS | {"options": {"causal": True}},
    "tokens, pages": TOKENS | {"form_k": "paged", "page": 16},
    "tokens, pages of 7": TOKENS | {"form_k": "paged", "page": 7, "given": ("key_mask",)},
    "tokens, one head of k": TOKENS | {"heads": (8, 1)},
    "tokens, a bias": TOKENS | {"given": ("bias", "sinks"), "along": "bhk"},
    "tokens, a window": TOKENS | {"options": {"window": (90, None)}},
    "a few": TOKENS | {"lens_q": [5] * 6, "options": {"causal": True, "softcap": 20.0}},
    "chunks": CHUNKS | {"form_k": "paged", "page": 16, "options": {"causal": True}},
    "chunks, packed": CHUNKS | {"form_k": "packed", "options": {"window": (100, 30)}},
    "invariant": TOKENS | {"options": {"causal": True, "batch_invariant": True}},
}
DIMS = ((128, 128), (64, 64), (256, 256), (80, 48), (512, 320))


def on_gpu(family: str | None, cupy: bool = False) -> Any:
    if cupy:
        import cupy as xp

        return SimpleNamespace(family=family, put=xp.asarray, get=xp.asnumpy)
    return SimpleNamespace(family=family, put=lambda x: tensor(x).cuda(), get=of_tensor)


@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_exact_on_what_is_meant(family: str, kind: str, eight: str, rng: np.random.Generator) -> None:
    """Dtypes of q, scales and head dimensions in turn."""
    number = [*KINDS].index(kind) + 3 * (eight == "int8")
    how = {"dims": DIMS[number % len(DIMS)], "dtype": ("bfloat16", "float16")[number % 2]} | KINDS[kind]
    drawn = draw(rng, eight, BY[number % len(BY)], **how)
    judge(drawn, ("bshd", "bhsd")[number % 2], on_gpu(family))


def test_cupy_and_the_family_that_is_chosen(rng: np.random.Generator) -> None:
    for by in BY:
        judge(draw(rng, "int8", by, **TOKENS, dims=(128, 128)), on=on_gpu(None, cupy=True))


def test_shares_of_a_long_cache(rng: np.random.Generator) -> None:
    for page in (0, 64):
        form = {"form_k": "paged", "page": page} if page else {}
        long = {"lens_q": [1, 1], "lens_k": [40000, 3], "heads": (8, 2), "dims": (128, 128)}
        judge(draw(rng, "float8_e4m3fn", "row", **long, **form), on=on_gpu(None))


@pytest.mark.parametrize("family", ["sm80", "simt"])
def test_both_dtypes_in_one_process(family: str, rng: np.random.Generator) -> None:
    """Each has kernels of its own, though all else is the same."""
    for eight in (*EIGHT, *EIGHT):
        judge(draw(rng, eight, "row", **TOKENS, dims=(128, 128)), on=on_gpu(family))


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("lengths", [(40000, 3), (20000, 5), (9000, 700), (2048, 2048)], ids=str)
def test_shares_read_nothing_that_others_left(lengths: tuple[int, int], page: int) -> None:
    """Often, each time after other numbers lay in the memory that results and shares come into."""
    import torch

    generator = torch.Generator("cuda").manual_seed(sum(lengths) + page)
    rows, of = -(-max(lengths) // 64) * 64, {"device": "cuda", "generator": generator}
    q = torch.randn(2, 1, 8, 128, dtype=torch.float16, **of)
    k, v = (torch.randn(2, rows, 2, 128, **of).to(torch.float8_e4m3fn) for _ in "kv")
    scales = [0.5 + torch.rand(2, rows, 2, **of) for _ in "kv"]
    wide = [x.float() * scale[..., None] for x, scale in zip((k, v), scales)]
    parts = [
        torch.einsum("kgd,skd->kgs", q[n, 0].float().view(2, 4, 128), wide[0][n, :length]) * 128**-0.5
        for n, length in enumerate(lengths)
    ]
    exact = torch.stack(
        [torch.einsum("kgs,skd->kgd", s.softmax(-1), wide[1][n, : s.shape[-1]]) for n, s in enumerate(parts)]
    ).view(2, 1, 8, 128)
    for n, length in enumerate(lengths):
        for x in (k, v):
            x[n, length:].view(torch.uint8).fill_(0x7F)  # NaN
        for scale in scales:
            scale[n, length:] = float("nan")
    given = [k, v, *scales]
    options: dict[str, Any] = {"seqlens_k": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    if page:
        number = 2 * rows // page
        order = torch.randperm(number, **of)
        options["page_table"] = order.view(2, -1).int()
        for i, x in enumerate(given):
            pool = torch.empty_like(x.view(number, page, *x.shape[2:]))
            pool.view(torch.uint8)[order] = x.view(number, page, *x.shape[2:]).view(torch.uint8)
            given[i] = pool
    k, v, k_scales, v_scales = given
    for turn in range(40):
        left = [torch.full((1 << n,), (123.0, -50.0, float("nan"))[turn % 3], device="cuda") for n in range(8, 24, 2)]
        del left
        out = attention(q, k, v, k_descale=k_scales, v_descale=v_scales, **options)
        assert (out - exact).abs().max() < 0.01 * exact.abs().max(), turn


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("eight", EIGHT)
def test_appending(eight: str, by: str | None, rng: np.random.Generator) -> None:
    on = on_gpu(None)
    appended(rng, eight, by, on.put, on.get)


def test_a_graph_finds_new_lengths_and_numbers(rng: np.random.Generator) -> None:
    import torch

    q = torch.randn(4, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(4, 700, 2, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv")
    scales, lengths = torch.rand(4, 700, 2, device="cuda"), torch.full((4,), 300, device="cuda", dtype=torch.int32)

    def call() -> Any:
        return attention(q, k, v, seqlens_k=lengths, k_descale=scales, v_descale=scales)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for more in (0, 1, 700):
        lengths.copy_(torch.tensor([more, 700 - more, 5, 64]))
        scales.uniform_()
        graph.replay()
        assert torch.equal(out, call())
