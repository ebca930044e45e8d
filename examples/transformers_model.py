"""Attention of a Hugging Face model by cupyflash: registered under a name, and chosen by it.

    python examples/transformers_model.py [--device cpu|cuda]

Nothing is downloaded: the model is a small Llama with random weights, whose scores are compared with those of the
library's own attention, for texts of different lengths. With a model of yours it is the same two lines:

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cupy")
"""

from __future__ import annotations

import argparse

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(f"{error}; run pip install torch transformers") from None

from cupyflash.integrations.transformers import register


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Largest differences of scores and of gradients, and how many of the tokens written differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(arguments)

    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(args.device)
    tokens = torch.randint(1, 99, (3, 20), device=args.device)
    padding = torch.arange(20, device=args.device) >= torch.tensor([[0], [5], [12]], device=args.device)  # on the left
    given = {"input_ids": tokens * padding, "attention_mask": padding.long()}

    found = {}
    for name in ("eager", "cupy"):
        model.set_attn_implementation(name)
        model.zero_grad()
        scores = model(**given).logits
        scores[padding].square().mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        written = model.generate(**given, max_new_tokens=8, do_sample=False)
        found[name] = (scores[padding].detach(), gradient, written)
    (scores, gradient, written), ours = found.values()
    differences = {
        "scores": (ours[0] - scores).abs().max().item(),
        "gradients": ((ours[1] - gradient).abs().max() / gradient.abs().max()).item(),
        "tokens": int((ours[2] != written).sum()),
    }
    print("off from the library's own attention:", differences)
    return differences


if __name__ == "__main__":
    main()
