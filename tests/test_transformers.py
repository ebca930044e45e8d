"""Hugging Face models with our attention: logits, gradients and what they generate are those of their own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cupyflash.integrations.transformers import register

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 128,
}  # fmt: skip
PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**COMMON, **GROUPED}),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {**COMMON, **GROUPED, "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "GptOssForCausalLM": (
        "GptOssConfig", {**COMMON, **GROUPED, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "BertForMaskedLM": ("BertConfig", {**COMMON, **PLAIN}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 100, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**{k: v for k, v in COMMON.items() if k not in ("vocab_size", "max_position_embeddings")}, **PLAIN, "image_size": 32,
         "patch_size": 8},
    ),
}  # fmt: skip
GENERATE = ["LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "T5ForConditionalGeneration"]


def made(name: str) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    config, options = MODELS[name]
    made = getattr(transformers, config)(**options)
    made._attn_implementation = "eager"
    register()
    return getattr(transformers, name)(made)


def batch(name: str) -> dict[str, Any]:
    """Two sequences, the second padded: on the left for what generates."""
    if name.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    mask = torch.ones(2, 17, dtype=torch.long)
    if name in GENERATE[:3]:
        mask[1, :5] = 0
    else:
        mask[1, 12:] = 0
    return {"input_ids": torch.randint(3, 100, (2, 17)), "attention_mask": mask}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    model, given = made(name).train(), batch(name)
    seen = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    more = {"decoder_input_ids": given["input_ids"]} if name.startswith("T5") else {}
    results = {}
    for implementation in ("eager", "cupy"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        model.zero_grad()
        logits = model(**given, **more).logits[seen]  # what padding attends is not defined
        logits.square().mean().backward()
        results[implementation] = (
            logits.detach(),
            {n: x.grad for n, x in model.named_parameters() if x.grad is not None},
        )
    (logits, grads), (expected, of) = results["cupy"], results["eager"]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert grads.keys() == of.keys()
    for n, x in grads.items():
        torch.testing.assert_close(x, of[n], rtol=1e-3, atol=1e-5 * of[n].abs().max().item() + 1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_within_the_dtype(name: str, dtype: str) -> None:
    """The models' own loss of labels, and all gradients together: as far from eager's in float32 as eager's in this dtype."""
    model, given = made(name).train(), batch(name)
    if "attention_mask" in given:  # padded on the right, so that no label is told by a row that attends to nothing
        given["attention_mask"] = given["attention_mask"].sort(1, descending=True).values
        given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    else:
        given["labels"] = torch.tensor([0, 1])

    def found(implementation: str, dtype: Any) -> tuple[Any, Any]:
        model.to(dtype).set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(**{n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}).loss
        loss.backward()
        return loss.detach().double(), torch.cat(
            [x.grad.double().flatten() for x in model.parameters() if x.grad is not None]
        )

    to = getattr(torch, dtype)
    model.to(to)  # the weights of all three are those that this dtype has
    exact, theirs, ours = found("eager", torch.float32), found("eager", to), found("cupy", to)
    for x, y, z in zip(ours, theirs, exact):
        assert (x - z).norm() <= 2 * (y - z).norm() + {"float32": 1e-5, "bfloat16": 2e-2}[dtype] * z.norm()


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", GENERATE)
def test_generates_the_same(name: str, cache: str | None) -> None:
    model, given = made(name).eval(), batch(name)
    more = {} if cache is None else {"cache_implementation": cache}
    tokens = {}
    for implementation in ("eager", "cupy"):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(**given, max_new_tokens=8, do_sample=False, **more)
    assert torch.equal(tokens["cupy"], tokens["eager"])


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match="^name is 'cupyflash'; it must not hold 'flash', which transformers takes for"
    ):
        register("cupyflash")


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MptForCausalLM"])
def test_models_that_compute_attention_themselves_are_refused(name: str) -> None:
    """They would take booleans of our masks for numbers that are added to the scores."""
    kind = name.removesuffix("ForCausalLM") + "Config"
    config = getattr(transformers, kind)(
        hidden_size=64, n_layer=1, n_head=4, n_layers=1, n_heads=4, d_model=64, vocab_size=100
    )
    register()
    model = getattr(transformers, name)._from_config(config, attn_implementation="cupy")
    with pytest.raises(ValueError, match=f"^attn_implementation is 'cupy', but the models of {kind} compute attention"):
        model(torch.zeros(1, 8, dtype=torch.long))


def test_dropout_in_training() -> None:
    """By PyTorch's generator."""
    model = made("BertForMaskedLM")
    model.set_attn_implementation("cupy")
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, torch.nn.Dropout):
            module.dropout.p = 0.1
    model.train()
    logits = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(model(**batch("BertForMaskedLM")).logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])
