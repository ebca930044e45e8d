"""The suite `models`: the attention calls of real models, with heads, dimensions and lengths as their configurations
have them.

What else a model does to its scores (soft caps, sinks, relative positions) is left out, as not every peer has it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ..passes import PASSES, Pass
from ..problem import AttentionProblem
from . import peers
from .case import make_case
from .suite import Measured, Options, Problem, compare, importable, take_turns


class Call(NamedTuple):
    """Batch, queries, heads of Q, heads of K and V, and their dimension; where not given, keys are as many as queries,
    and dim_v is dim. `window`: keys before a query that it sees beside itself, none behind it."""

    batch: int
    seq: int
    heads: int
    heads_k: int
    dim: int
    causal: bool = False
    seq_k: int | None = None
    dim_v: int | None = None
    window: int | None = None

    @property
    def keys(self) -> int:
        return self.seq if self.seq_k is None else self.seq_k

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        dims = str(self.dim) if self.dim_v is None else f"{self.dim}/{self.dim_v}"
        mask = f", window {self.window}" if self.window is not None else ", causal" if self.causal else ""
        length = str(self.seq) if self.keys == self.seq else f"{self.seq} on {self.keys}"
        return f"{self.batch} x {length}, {heads} x {dims}{mask}"


PEERS = ("fa2", "cudnn", "fa3", "fa4")

# A window of w in a configuration is w keys with the query's own.
MODELS = {
    # Language models, prefill and training
    "GPT-2 small": Call(8, 1024, 12, 12, 64, causal=True),
    "BERT base, 128": Call(256, 128, 12, 12, 64),
    "BERT base, 512": Call(32, 512, 12, 12, 64),
    "BERT large, 128": Call(256, 128, 16, 16, 64),
    "BERT large, 512": Call(32, 512, 16, 16, 64),
    "T5 base": Call(32, 512, 12, 12, 64),
    "Llama 3 8B, 2k": Call(1, 2048, 32, 8, 128, causal=True),
    "Llama 3 8B, 8k": Call(1, 8192, 32, 8, 128, causal=True),
    "Llama 3 8B, 32k": Call(1, 32768, 32, 8, 128, causal=True),
    "Llama 3 8B, 8 x 2k": Call(8, 2048, 32, 8, 128, causal=True),
    "Llama 3 8B, chunk": Call(1, 512, 32, 8, 128, causal=True, seq_k=8192),
    "Llama 3 70B, 2k": Call(1, 2048, 64, 8, 128, causal=True),
    "Llama 3 70B, 8k": Call(1, 8192, 64, 8, 128, causal=True),
    "Llama 3 70B, 32k": Call(1, 32768, 64, 8, 128, causal=True),
    "Llama 3 70B, 8 x 2k": Call(8, 2048, 64, 8, 128, causal=True),
    "Qwen 3 30B-A3B, 4k": Call(1, 4096, 32, 4, 128, causal=True),
    "Qwen 3 32B, 16k": Call(1, 16384, 64, 8, 128, causal=True),
    "Mistral 7B, 8k": Call(1, 8192, 32, 8, 128, window=4095),
    "Mistral 7B, 16k": Call(1, 16384, 32, 8, 128, window=4095),
    "Gemma 2 9B, local": Call(1, 8192, 16, 8, 256, window=4095),
    "Gemma 2 9B, global": Call(1, 8192, 16, 8, 256, causal=True),
    "Gemma 3 12B, local": Call(1, 8192, 16, 8, 256, window=1023),
    "Gemma 3 12B, global": Call(1, 8192, 16, 8, 256, causal=True),
    "gpt-oss 20B, local": Call(2, 4096, 64, 8, 64, window=127),
    "gpt-oss 20B, global": Call(2, 4096, 64, 8, 64, causal=True),
    "DeepSeek V3, 2k": Call(1, 2048, 128, 128, 192, causal=True, dim_v=128),
    "DeepSeek V3, 8k": Call(1, 8192, 128, 128, 192, causal=True, dim_v=128),
    "Falcon 7B": Call(2, 2048, 71, 1, 64, causal=True),
    "StarCoder": Call(1, 8192, 48, 1, 128, causal=True),
    # Vision
    "ViT-B/16": Call(64, 197, 12, 12, 64),
    "ViT-L/16, 384": Call(16, 577, 16, 16, 64),
    "SigLIP so400m": Call(16, 729, 16, 16, 72),
    "Swin-T, stage 1": Call(4096, 49, 3, 3, 32),
    "Swin-B, stage 3": Call(1024, 49, 16, 16, 32),
    # Pictures and films
    "SD 1.5, 64 x 64": Call(8, 4096, 8, 8, 40),
    "SD 1.5, 32 x 32": Call(8, 1024, 8, 8, 80),
    "SD 1.5, 16 x 16": Call(8, 256, 8, 8, 160),
    "SD 1.5, cross": Call(8, 4096, 8, 8, 40, seq_k=77),
    "SDXL, 64 x 64": Call(8, 4096, 10, 10, 64),
    "SDXL, 32 x 32": Call(8, 1024, 20, 20, 64),
    "SDXL, cross": Call(8, 4096, 10, 10, 64, seq_k=77),
    "DiT-XL/2, 512": Call(16, 1024, 16, 16, 72),
    "Flux": Call(1, 4608, 24, 24, 128),
    "Wan 2.1 14B, 720p": Call(1, 75600, 40, 40, 128),
    # Speech, proteins, anything
    "Whisper large, encoder": Call(8, 1500, 20, 20, 64),
    "Whisper large, cross": Call(8, 448, 20, 20, 64, seq_k=1500),
    "AlphaFold 2, rows of 256": Call(512, 256, 8, 8, 32),
    "AlphaFold 2, rows of 768": Call(128, 768, 8, 8, 32),
    "Perceiver IO": Call(1, 512, 8, 8, 128, seq_k=50176),
}

# Sliding windows by themselves: 16k tokens (or one sequence of more) of width 2048.
WINDOWS = {
    f"window {window}, {seq // 1024}k, d{dim}": Call(
        max(1, 16384 // seq), seq, 2048 // dim, 2048 // dim, dim, window=window
    )
    for dim in (64, 128)
    for window in (128, 256, 1024, 4096)
    for seq in (2048, 8192, 32768)
    if window < seq
}

# Writing token by token: queries on what is written. No more than a forward.
TOKENS = {
    "Llama 3 8B, a token, 8k": Call(1, 1, 32, 8, 128, seq_k=8192),
    "Llama 3 8B, 16 x a token, 4k": Call(16, 1, 32, 8, 128, seq_k=4096),
    "Llama 3 70B, 8 tokens, 32k": Call(1, 8, 64, 8, 128, causal=True, seq_k=32768),
    "GPT-2 XL, a token, 1k": Call(1, 1, 25, 25, 64, seq_k=1024),
}
CALLS = MODELS | WINDOWS | TOKENS
QUICK = ("GPT-2 small", "BERT base, 128", "Llama 3 70B, 2k", "gpt-oss 20B, local", "DeepSeek V3, 2k", "SDXL, cross")

# What `report.summary` sums up beside each pass: the rows of a kind.
KINDS = {
    "models": [*MODELS],
    "windows": [*WINDOWS],
    "token by token": [*TOKENS],
    "few key heads, batch 1 and 2": [
        name for name, x in MODELS.items() if x.heads >= 8 * x.heads_k and x.batch <= 2 and x.window is None
    ],
    "latent attention": [name for name, x in MODELS.items() if x.dim_v is not None],
}


def problems(options: Options) -> list[Problem]:
    """Each call in both passes, but those of TOKENS; with `quick` a few of them."""
    names: Sequence[str] = QUICK if options.quick and not options.only else tuple(CALLS)
    return [
        {"pass": direction, "model": name, "call": str(CALLS[name]), "dtype": options.dtype}
        for direction in ("forward", "backward")
        for name in names
        if name.startswith(options.only or "") and (direction == "forward" or name not in TOKENS)
    ]


def draw(call: Call, dtype: str, seed: int, device: str = "cuda") -> peers.Case:
    """Random normal inputs of a call."""
    sizes = {
        name: getattr(call, name) for name in ("batch", "seq", "heads", "dim", "causal", "seq_k", "heads_k", "dim_v")
    }
    window = None if call.window is None else (call.window, 0)
    return make_case(**sizes, dtype=dtype, seed=seed, device=device, window=window)


def work(call: Call, of: Pass) -> float:
    """Floating-point operations of the pairs that the mask leaves: two products in the forward, five in the
    backward."""
    return float(_stated(call).flops(of))


def pairs(call: Call) -> int:
    """How many pairs of a query and a key of a head the mask leaves; the last query stands on the last key."""
    return _stated(call).visible


def _stated(call: Call) -> AttentionProblem:
    return AttentionProblem(
        "bfloat16", call.batch, call.seq, call.keys, call.heads, call.heads_k, call.dim, call.dim_v or call.dim,
        scale=1.0,
        diagonal=call.keys - call.seq, left=call.window, right=0 if call.causal or call.window is not None else None,
    )  # fmt: skip


def measure(problem: Problem, options: Options) -> Measured:
    """TFLOP/s of ours and the peers, in turn."""
    call, of = CALLS[problem["model"]], PASSES[problem["pass"]]
    case = draw(call, problem["dtype"], zlib.crc32(repr(problem).encode()))
    prepares = importable(PEERS)
    prepares["ours"] = peers.ours(options.family)
    candidates, notes = compare(prepares, case, of)
    seconds, more = take_turns(candidates, options, patience=0.25)
    return {name: work(call, of) / 1e12 / t for name, t in seconds.items()}, notes | more
