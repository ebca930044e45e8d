"""Hugging Face models with our attention: logits, gradients and what they generate are those of their own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cupyflash.integrations.transformers import attention_forward, register

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
        {**{k: v for k, v in COMMON.items() if k not in ("vocab_size", "max_position_embeddings")}, **PLAIN,
            "image_size": 32,
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
    """The models' own loss of labels, and all gradients together: as far from eager's in float32 as eager's in this
    dtype."""
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


@pytest.mark.parametrize("name", [3, None, b"x", "", "eager", "sdpa", "flex_attention"])
def test_names_that_are_not_ours_to_give(name: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    before = [dict(x) for x in (AttentionInterface(), AttentionMaskInterface())]
    text = "a name that transformers does not have yet" if isinstance(name, str) else "a string"
    with pytest.raises((TypeError, ValueError), match=f"^name is {name!r}; it must be {text}, such as 'cupy'$"):
        register(name)
    assert before == [dict(x) for x in (AttentionInterface(), AttentionMaskInterface())]


def test_a_name_of_ours_may_be_given_again() -> None:
    import importlib

    module = importlib.import_module("cupyflash.integrations.transformers")
    register()
    importlib.reload(module).register()


@pytest.mark.parametrize("chosen", ["made", "later"])
@pytest.mark.parametrize(
    "name", ["Bloom", "Mpt", "Falcon", "GPTNeo", "XLNet", "Deberta", "Funnel", "BigBird", "NllbMoe", "PegasusX"]
)
def test_models_that_compute_attention_themselves_are_refused(name: str, chosen: str) -> None:
    """Where the implementation is chosen: some would never call it, some misread its masks, some have no causal
    attention by it."""
    register()
    config = getattr(transformers, name + "Config")()
    made = getattr(transformers, name + "Model")
    why = f"^{name}Model (computes attention by itself|has _supports_sdpa = _supports_attention_backend = False: .*); "
    with torch.device("meta"):
        if chosen == "made":
            with pytest.raises(ValueError, match=why):
                made._from_config(config, attn_implementation="cupy")
        else:
            with pytest.raises(ValueError, match=why):
                made._from_config(config, attn_implementation="eager").set_attn_implementation("cupy")


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_in_one_graph(padded: bool) -> None:
    model, given = made("LlamaForCausalLM").eval(), batch("LlamaForCausalLM")
    given = given if padded else {"input_ids": given["input_ids"]}
    model.set_attn_implementation("cupy")
    expected = model(**given).logits
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(**given).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_where_they_are_asked_for(name: str) -> None:
    model, given = made(name).eval(), batch(name)
    given |= {"decoder_input_ids": given["input_ids"]} if name.startswith("T5") else {}
    given.pop("attention_mask", None)  # a query of padding attends to what it likes
    found = []
    for implementation in ("eager", "cupy"):
        model.set_attn_implementation(implementation)
        found.append(model(**given, output_attentions=True))
    kinds = [x for x in found[0] if x.endswith("attentions")]
    assert kinds
    for kind in kinds:
        for expected, weights in zip(found[0][kind], found[1][kind], strict=True):
            torch.testing.assert_close(weights, expected)
    assert getattr(model(**given), kinds[0], None) is None


def test_masks_are_refused_where_nobody_asked_when_the_model_was_made() -> None:
    register()
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=100)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="eager")
    model.config._attn_implementation = "cupy"
    with pytest.raises(
        ValueError, match="^the model of BloomConfig computes attention by itself; its attn_implementation must be"
    ):
        model(torch.zeros(1, 8, dtype=torch.long))


class Layer(torch.nn.Module):
    def __init__(self, is_causal: bool | None = True) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def qkv(queries: int = 7, keys: int = 7, batch: int = 1) -> list[Any]:
    return [torch.randn(batch, 2, n, 16) for n in (queries, keys, keys)]


@pytest.mark.parametrize(
    ("layer", "lengths", "options", "why"),
    [
        (
            Layer(),
            (7, 7),
            {"indices": torch.zeros(1)},
            "Layer gives its attention indices, a Tensor, which is not understood",
        ),
        (
            Layer(),
            (7, 7),
            {"sinks": torch.zeros(1)},
            "Layer gives its attention sinks, a Tensor, which is not understood",
        ),
        (Layer(), (7, 7), {"head_mask": False}, "Layer gives its attention head_mask, a bool, which is not understood"),
        (Layer(), (2, 7), {}, "Layer is causal, and has no mask for 2 queries and 7 keys"),
        (Layer(False), (2, 7), {"is_causal": True}, "Layer is causal, and has no mask for 2 queries and 7 keys"),
        (Layer(None), (7, 7), {}, "Layer has no mask and no is_causal"),
        (Layer(), (7, 7), {"sliding_window": 6}, "Layer has no mask for sliding_window=6 and 7 keys"),
        (
            Layer(),
            (7, 7),
            {"cu_seq_lens_q": torch.tensor([0, 7])},
            "Layer gives cu_seq_lens for a batch of 1, or one of",
        ),
        (Layer(), (7, 9), {"seq_idx": torch.zeros(1, 7)}, "Layer gives seq_idx of (1, 7) for 7 queries and 9 keys"),
    ],
)
def test_what_a_layer_may_not_ask(layer: Any, lengths: Any, options: dict[str, Any], why: str) -> None:
    mask = torch.ones(1, 1, *lengths, dtype=torch.bool) if "seq_idx" in options else None
    with pytest.raises(ValueError) as error:
        attention_forward(layer, *qkv(*lengths), mask, **options)
    assert str(error.value).startswith(why) and str(error.value).endswith("; its attn_implementation must be 'eager'")


def test_what_changes_nothing_is_taken() -> None:
    given, layer = qkv(), Layer()
    expected, _ = attention_forward(layer, *given, None)
    more = {
        "indices": None,
        "position_ids": torch.arange(7)[None],
        "max_length_q": 7,
        "use_cache": True,
        "sliding_window": 7,
    }
    found, _ = attention_forward(layer, *given, None, **more)
    assert torch.equal(found, expected)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(attention_forward(Layer(False), *given, causal)[0], expected)
    one = [x[:, :, -1:] if x is given[0] else x for x in given]  # a single query attends to all
    torch.testing.assert_close(attention_forward(layer, *one, None)[0], expected[:, -1:])


@pytest.mark.parametrize("mask", [None, "booleans", "numbers"])
@pytest.mark.parametrize("by", ["cu_seq_lens", "seq_idx"])
def test_packed_sequences_are_kept_apart(by: str, mask: str | None) -> None:
    given, cu = qkv(), torch.tensor([0, 3, 7], dtype=torch.int32)
    parts = [attention_forward(Layer(), *(x[:, :, i:j] for x in given), None)[0] for i, j in ((0, 3), (3, 7))]
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    masks = {None: None, "booleans": causal, "numbers": torch.zeros(1, 1, 7, 7).masked_fill(~causal, -torch.inf)}
    packed = (
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
        if by == "cu_seq_lens"
        else {"seq_idx": torch.tensor([[0] * 3 + [1] * 4])}
    )
    torch.testing.assert_close(attention_forward(Layer(), *given, masks[mask], **packed)[0], torch.cat(parts, 1))


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_gemma_4_with_some_logits(keep: int) -> None:
    """It drops queries of layers that share keys, after the mask is made."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    register()
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **COMMON, **GROUPED, num_kv_shared_layers=1, global_head_dim=16, hidden_size_per_layer_input=16,
        sliding_window=64,
        vocab_size_per_layer_input=100, layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    model, logits = transformers.Gemma4ForCausalLM(config).eval(), {}
    for x in model.parameters():
        x.data.normal_(0, 1 / 8)
    for implementation in ("eager", "cupy"):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(torch.arange(3, 20)[None], logits_to_keep=keep).logits
    torch.testing.assert_close(logits["cupy"], logits["eager"], atol=1e-5, rtol=1e-4)


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
