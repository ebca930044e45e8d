"""Training of GPT models, to compare attention in them: FlashAttention-2's Table 1 on one GPU, in plain PyTorch.

The model is GPT-3's (Brown et al. 2020, Table 2.1): learned positions, layers of attention and a four times wider MLP,
each behind a layer norm, and an output matrix shared with the embedding. What is compared is one argument, `attention`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recompute

import cupyflash

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (B, S, H, D) each, causal


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int = 50304  # GPT-2's, rounded up to a multiple of 128


SIZES = {"tiny": Size(2, 64, 2, 96), "125M": Size(12, 768, 12), "1.3B": Size(24, 2048, 16), "2.7B": Size(32, 2560, 32)}


def model_flops(parameters: int, layers: int, width: int, seq: int) -> int:
    """FLOPs of training on one sequence, as FlashAttention-2's section 4.2 counts: 6 N S + 12 L W S².

    A multiplication and an addition for each parameter and token, and twice that for the gradients; the score matrix is
    counted in full although the mask hides half of it, and what is computed again is not counted.
    """
    return 6 * seq * parameters + 12 * layers * width * seq**2


class Block(nn.Module):
    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        width = size.width
        self.heads, self.attention = size.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Token numbers (B, S) to logits (B, S, vocabulary). `checkpoint`: keep each layer's input alone for the backward."""

    def __init__(self, size: Size, context: int, attention: Attention, checkpoint: bool = False) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embedding, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(context, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = recompute(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpoint else block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = cupyflash.attention(q, k, v, causal=True)
    return out


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class _ScoresIn16Bits:
    """PyTorch's math backend computes 16-bit scores in float32 unless told; standard attention in the papers does not."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(self.before)


# Each way of attention: the function, and what must hold around forward and backward.
WAYS: dict[str, tuple[Attention, tuple[Callable[[], AbstractContextManager[Any]], ...]]] = {
    "ours": (_ours, ()),
    "fa2": (_sdpa, (functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),)),
    "math": (_sdpa, (functools.partial(sdpa_kernel, SDPBackend.MATH), _ScoresIn16Bits)),
}


class Trained(NamedTuple):
    losses: list[float]  # of every step, nats per token
    seconds: float  # a step, without those that warm up
    parameters: int


def train(
    size: Size,
    context: int,
    batch: int,
    way: str,
    steps: int,
    *,
    checkpoint: bool = False,
    warm_up: int = 3,
    device: str = "cuda",
    told: Callable[[int], object] = lambda step: None,
) -> Trained:
    """Train a new model on synthetic tokens with AdamW, on a GPU in bfloat16 with float32 weights; `told` of each step.

    Each token is the one before plus 37, so that there is something to learn and the loss falls.
    RuntimeError (torch.OutOfMemoryError) where the GPU's memory does not hold it.
    """
    if not 0 <= warm_up < steps:
        raise ValueError(f"warm_up is {warm_up}; it must be 0 or more and less than steps, {steps}")
    attention, contexts = WAYS[way]
    gpu = torch.device(device).type == "cuda"
    synchronize: Callable[[], object] = torch.cuda.synchronize if gpu else lambda: None
    torch.manual_seed(0)
    with torch.device(device), ExitStack() as stack:
        for enter in contexts:
            stack.enter_context(enter())
        model = Gpt(size, context, attention, checkpoint)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=gpu)
        losses = torch.zeros(steps)
        for step in range(steps):
            if step == warm_up:
                synchronize()
                start = time.perf_counter()
            first = torch.randint(size.vocabulary, (batch, 1))
            tokens = (first + 37 * torch.arange(context + 1)) % size.vocabulary
            with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            del logits
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            told(step)
        synchronize()
        seconds = (time.perf_counter() - start) / (steps - warm_up)
    return Trained(losses.tolist(), seconds, sum(p.numel() for p in model.parameters()))
