"""Others' attention where lengths are data: packed sequences, caches of which so much is filled, pages of a pool.

The lengths are among the `scores` of a case by the names that `attention` has for them. What a peer plans or schedules
by them is made beforehand and not timed.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from ..passes import BACKWARD, FORWARD, Pass
from ..tools.timing import Candidate
from .case import Case, Prepare

FEW = 16  # queries; so many and less are what decoding asks
PAGE = 64  # FlashInfer takes caches as pages of so many rows


def fa3(operators: Any, case: Case, of: Pass) -> Candidate:
    """FlashAttention-3's operators; for caches with their schedule. Where keys are more than queries it decides itself
    in how many parts to split them."""
    q, k, v, dout, causal = case[:5]
    given: dict[str, Any] = {"is_causal": causal}
    if n := case.scores.get("latent"):  # V goes with the first columns of Q, the rest of K with the rest
        v, k = k[..., :n], k[..., n:]
        given |= {"q_v": q[..., :n], "softmax_scale": case.scores["scale"]}
        q = q[..., n:]
    if "cu_seqlens_q" in case.scores:
        given |= _packed(case)
    splits = {"num_splits": int(k.shape == q.shape)}
    if "seqlens_k" in case.scores:
        table, lengths = case.scores.get("page_table"), case.scores["seqlens_k"]
        page, longest = (None, k.shape[1]) if table is None else (k.shape[1], k.shape[1] * table.shape[1])
        (batch, queries, heads, dim), heads_k = q.shape, k.shape[2]
        of_all = (batch, queries, longest, heads, heads_k, dim, v.shape[3], q.dtype, lengths)
        made = operators.get_scheduler_metadata(*of_all, page_size=page, is_causal=causal, **splits)
        given |= {"seqused_k": lengths, "page_table": table, "scheduler_metadata": made}
    forward = functools.partial(operators.fwd, q, k, v, **given, **splits)
    if of is FORWARD:
        return Candidate(lambda: (forward()[0],))
    out, lse = forward()[:2]

    def call() -> tuple[Any, ...]:
        grads = tuple(map(_empty_like, (q, k, v)))
        operators.bwd(dout, q, k, v, out, lse, *grads, **given)
        return grads

    return Candidate(call)


def fa2(case: Case, of: Pass) -> Candidate:
    """PyTorch's operators of FlashAttention-2 for packed sequences."""
    import torch

    if "cu_seqlens_k" not in case.scores:
        raise NotImplementedError("lengths of caches are not asked of PyTorch's FlashAttention-2")
    q, k, v, dout, causal = case[:5]
    known = (*_packed(case).values(), 0.0, causal)
    forward = functools.partial(torch.ops.aten._flash_attention_forward, q, k, v, *known, False)
    if of is FORWARD:
        return Candidate(lambda: (forward()[0],))
    out, lse, *state = forward()[:4]
    backward = torch.ops.aten._flash_attention_backward
    return Candidate(lambda: tuple(backward(dout, q, k, v, out, lse, *known, *state)))


def flashinfer(tensor_cores: bool = False) -> Prepare:
    """FlashInfer: its decoding with pages, without tensor cores or with these, its latent attention, and its prefill of
    packed sequences.
    CUPYFLASH_PEER_FLASHINFER: a folder that has the package."""
    if (folder := os.environ.get("CUPYFLASH_PEER_FLASHINFER")) and folder not in sys.path:
        sys.path.append(folder)  # behind what is installed
    package = importlib.import_module("flashinfer")

    def prepare(case: Case, of: Pass) -> Candidate:
        if of is BACKWARD:
            raise NotImplementedError("FlashInfer has a forward alone")
        if "latent" in case.scores:
            return _flashinfer_latent(package, case)
        q, k, v, _, causal = case[:5]
        heads, heads_k = q.shape[-2], k.shape[-2]
        dtypes = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
        if "cu_seqlens_k" in case.scores:
            packed = package.BatchPrefillWithRaggedKVCacheWrapper(_workspace(str(q.device)), "NHD")
            ends = case.scores["cu_seqlens_q"], case.scores["cu_seqlens_k"]
            packed.plan(*ends, heads, heads_k, q.shape[-1], causal=causal, **dtypes)
            return Candidate(lambda: (packed.run(q, k, v),))
        if q.shape[1] > 1:
            raise NotImplementedError("FlashInfer decodes one query of a sequence")
        k, v, *whose = _in_pages(case)
        workspace = _workspace(str(q.device))
        decode = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        decode.plan(*whose, heads, heads_k, q.shape[-1], k.shape[1], **dtypes)
        return Candidate(lambda: (decode.run(q[:, 0], (k, v)),))

    return prepare


def _flashinfer_latent(package: Any, case: Case) -> Candidate:
    import torch

    n, (batch, queries, heads, dim) = case.scores["latent"], case.q.shape
    pool, _, *whose, _ = _in_pages(case)
    firsts = torch.arange(batch + 1, dtype=torch.int32, device=pool.device) * queries
    planned = package.mla.BatchMLAPagedAttentionWrapper(_workspace(str(pool.device)))
    planned.plan(
        firsts, *whose, case.scores["seqlens_k"], heads, n, dim - n, pool.shape[1], case.causal, case.scores["scale"],
        case.q.dtype, pool.dtype,
    )  # fmt: skip
    parts = [x[..., columns] for x in (case.q.flatten(0, 1), pool[:, :, 0]) for columns in (slice(n), slice(n, None))]
    return Candidate(lambda: (planned.run(*parts),))


def flashmla() -> Prepare:
    """FlashMLA's dense decoding: the package flash_mla, or the operator library that CUPYFLASH_PEER_FLASHMLA names,
    vLLM's."""
    if path := os.environ.get("CUPYFLASH_PEER_FLASHMLA"):
        import torch

        torch.ops.load_library(path)
        operator = torch.ops._flashmla_C.dense_decode_fwd
        return functools.partial(_flashmla, lambda *given: operator(*given, None))  # None: an array of results
    return functools.partial(_flashmla, importlib.import_module("flash_mla.cuda").dense_decode_fwd)


def _flashmla(decode: Any, case: Case, of: Pass) -> Candidate:
    if of is BACKWARD or "latent" not in case.scores:
        raise NotImplementedError("FlashMLA is asked for forwards of latent attention alone")
    pool, _, table = _pools(case)
    given = (
        case.q, pool, case.scores["latent"], case.scores["seqlens_k"], table.int(), case.scores["scale"], case.causal
    )  # fmt: skip
    schedule = decode(*given, None, None)[2:]
    return Candidate(lambda: (decode(*given, *schedule)[0],))


def cudnn(case: Case, of: Pass) -> Candidate:
    """cuDNN on pages, by nvidia-cudnn-frontend."""
    import torch

    if of is BACKWARD or case.causal or "page_table" not in case.scores:
        raise NotImplementedError("lengths are asked of cuDNN for decoding on pages alone")
    frontend = importlib.import_module("cudnn")
    half = {torch.bfloat16: frontend.data_type.BFLOAT16, torch.float16: frontend.data_type.HALF}[case.q.dtype]
    single = frontend.data_type.FLOAT
    handle = frontend.create_handle()
    graph = frontend.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, handle=handle)
    table, lengths = case.scores["page_table"], case.scores["seqlens_k"]
    batch, queries, _, dim = case.q.shape
    out = torch.empty_like(case.q)
    arrays = {name: x.transpose(1, 2) for name, x in zip("qkv", case[:3])}  # (B, H, S, D), where they lie
    arrays |= {f"paged_attention_{x}_table": table.view(batch, 1, -1, 1) for x in "kv"}
    arrays |= {"seq_len_q": torch.full_like(lengths, queries), "seq_len_kv": lengths}
    arrays = {name: x if x.ndim == 4 else x.view(batch, 1, 1, 1) for name, x in arrays.items()}
    named = {name: graph.tensor_like(x) for name, x in arrays.items()}
    o, *_ = graph.sdpa(
        **named, paged_attention_max_seq_len_kv=table.shape[1] * case.k.shape[1], use_padding_mask=True,
        use_causal_mask=False, attn_scale=dim**-0.5, is_inference=True,
    )  # fmt: skip
    result = out.transpose(1, 2)
    o.set_output(True).set_dim([*result.shape]).set_stride([*result.stride()])
    graph.build([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=out.device, dtype=torch.uint8)
    memory = {named[name]: x for name, x in arrays.items()} | {o: result}

    def call() -> tuple[Any, ...]:
        frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(memory, workspace, handle=handle)
        return (out,)

    return Candidate(call)


def _packed(case: Case) -> dict[str, Any]:
    """Where packed sequences end, and how long the longest is, as FlashAttention's functions are told."""
    ends = {name: case.scores[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return ends | {f"max_seqlen_{x}": int(ends[f"cu_seqlens_{x}"].diff().max()) for x in "qk"}


def _pools(case: Case) -> tuple[Any, ...]:
    """K and V (None where K has it) as pools of pages, and the table of these. Caches are cut where they lie."""
    import torch

    k, v, table = case.k, case.v, case.scores.get("page_table")
    if table is not None:
        return k, v, table
    each = k.shape[1] // PAGE
    if each * PAGE != k.shape[1]:
        raise NotImplementedError(f"caches of {k.shape[1]} rows are not pages of {PAGE}")
    table = torch.arange(len(k) * each, dtype=torch.int32, device=k.device).view(len(k), each)
    return *(x if x is None else x.view(-1, PAGE, *x.shape[2:]) for x in (k, v)), table


def _in_pages(case: Case) -> tuple[Any, ...]:
    """K and V as pools of pages; where the pages of each sequence begin among all, which they are, and how many rows
    the last one has."""
    import torch

    k, v, table = _pools(case)
    page = k.shape[1]
    lengths = case.scores.get("seqlens_k")
    lengths = torch.full_like(table[:, 0], table.shape[1] * page) if lengths is None else lengths
    used = -(-lengths // page)
    places = torch.arange(table.shape[1], device=table.device) < used[:, None]
    ends = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    return k, v, ends, table[places].int(), ((lengths - 1) % page + 1).int()


@functools.cache
def _workspace(device: str) -> Any:
    import torch

    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)


def _empty_like(x: Any) -> Any:
    import torch

    return torch.empty_like(x)
