"""Train a GPT model in PyTorch with one attention or another: FlashAttention-2's Table 1, a row of it.

    python examples/train_gpt.py --model 1.3B --context 8192 --attention ours
    python examples/train_gpt.py --model 1.3B --context 8192 --attention math --checkpoint
    python examples/train_gpt.py --device cpu

The model and the loop are in `cupyflash/bench/gpt.py`; tokens are synthetic. `cupyflash bench training` runs the table.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from rich.progress import Progress
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch rich") from None

from cupyflash.bench.gpt import SIZES, WAYS, Trained, model_flops, train


def main(arguments: list[str] | None = None) -> Trained:
    """Train for some steps; print the loss, tokens per second and model TFLOP/s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, help="default: 125M, on a CPU tiny")
    parser.add_argument("--context", type=int, help="tokens of a sequence; default: 2048, on a CPU 64")
    parser.add_argument("--batch", type=int, help="sequences of a step; default: 8192 tokens' worth, on a CPU 1024")
    parser.add_argument(
        "--attention", choices=WAYS, default="ours", help="ours; PyTorch's fa2, cudnn or math backend; fa3"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again instead of keeping them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(arguments)

    model, context, tokens = ("tiny", 64, 1024) if args.device == "cpu" else ("125M", 2048, 8192)
    model, context = args.model or model, args.context or context
    size, batch = SIZES[model], args.batch or max(1, tokens // context)
    with Progress() as progress:
        bar = progress.add_task(f"{model}, {context} tokens, {args.attention}", total=args.steps)
        done = train(
            size, context, batch, args.attention, args.steps, checkpoint=args.checkpoint,
            warm_up=min(3, args.steps - 1), device=args.device, told=lambda step: progress.advance(bar),
        )  # fmt: skip
    flops = model_flops(done.parameters, size.layers, size.width, context)
    digits = 0 if done.parameters >= 1e7 else 1  # the tiny one has 0.1 million
    print(f"{done.parameters / 1e6:,.{digits}f} million parameters; loss {done.losses[0]:.2f} -> {done.losses[-1]:.2f}")
    print(f"{batch * context / done.seconds:,.0f} tokens/s, {batch * flops / done.seconds / 1e12:.3g} model TFLOP/s")
    return done


if __name__ == "__main__":
    main()
