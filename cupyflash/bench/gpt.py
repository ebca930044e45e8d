"""Training of GPT models, to compare attention in them: FlashAttention-2's Table 1 on one GPU, in plain PyTorch.

The model is GPT-3's (Brown et al. 2020, Table 2.1): learned positions, layers of attention and a four times wider MLP,
each behind a layer norm, and an output matrix shared with the embedding. What is compared is one argument, `attention`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recompute

import cupyflash

from . import fa3

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (B, S, H, D) each, causal


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int = 50304  # GPT-2's, rounded up to a multiple of 128


SIZES = {
    "tiny": Size(2, 64, 2, 96),
    "125M": Size(12, 768, 12),
    "125M, d128": Size(12, 768, 6),
    "1.3B": Size(24, 2048, 16),
    "2.7B": Size(32, 2560, 32),
}

RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.01  # AdamW's


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
    """Token numbers (B, S) to logits (B, S, vocabulary). `checkpoint`: keep each layer's input alone for the
    backward."""

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


def ours(family: str | None = None) -> Attention:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cupyflash.attention(q, k, v, causal=True, family=family)
        return out

    return attend


def _sdpa(backend: SDPBackend) -> Attention:
    """One backend of PyTorch's, named in the function so that torch.compile sees it."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


class _ScoresIn16Bits:
    """PyTorch's math backend computes 16-bit scores in float32 unless told; standard attention in the papers
    does not."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(self.before)


_standard = _sdpa(SDPBackend.MATH)


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with _ScoresIn16Bits():
        return _standard(q, k, v)


# Each way of attention, by the peers' names.
WAYS: dict[str, Attention] = {
    "ours": ours(),
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": fa3.causal,
    "math": _math,
}


def stepper(model: Gpt, compiled: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of training on tokens (B, S + 1), with AdamW, on a GPU in bfloat16 with float32 weights; it returns the
    loss.

    `compiled`: model and loss by torch.compile, as one graph.
    """
    gpu = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=gpu)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
            return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    found = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = found(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


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
    gpu = torch.device(device).type == "cuda"
    synchronize: Callable[[], object] = torch.cuda.synchronize if gpu else lambda: None
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(size, context, WAYS[way], checkpoint)
        run = stepper(model)
        losses = torch.zeros(steps)
        for step in range(steps):
            if step == warm_up:
                synchronize()
                start = time.perf_counter()
            first = torch.randint(size.vocabulary, (batch, 1))
            losses[step] = run((first + 37 * torch.arange(context + 1)) % size.vocabulary)
            told(step)
        synchronize()
        seconds = (time.perf_counter() - start) / (steps - warm_up)
    return Trained(losses.tolist(), seconds, sum(p.numel() for p in model.parameters()))
