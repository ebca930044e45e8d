"""transformers by a name with "flash": packed, padded and cached sequences come with lengths, and give what eager
attention gives."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import test_transformers as plain
from test_transformers import Layer, qkv

from cupyflash.integrations.transformers import register

flash = pytest.importorskip("cupyflash.integrations.transformers_flash")
NAME, MODELS = "cupyflash2", ["LlamaForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"]
HEADS, HEADS_K, DIM = 4, 2, 8


def made(name: str) -> Any:
    model = plain.made(name)
    for x in model.parameters():  # so that sinks, windows and soft caps show
        x.data.mul_(3)
    register(NAME)
    return model


def asked(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[Any]:
    """What is handed to a function from here on."""
    seen, function = [], getattr(place, name)

    def look(*args: Any, **options: Any) -> Any:
        seen.append((args, options))
        return function(*args, **options)

    monkeypatch.setattr(place, name, look)
    return seen


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (n,), generator=draw).tolist() for n in (5, 17, 1, 30)]


GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 16}


def batched(model: Any, implementation: str, **options: Any) -> list[list[int]]:
    """The tokens of `generate_batch`, which reads the longest prompt in pieces."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    found = model.generate_batch(
        prompts(),
        generation_config=transformers.GenerationConfig(**GREEDY),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=16, max_batch_tokens=24, auto_switch_to_flash=False, use_cuda_graph=False,
            **options,
        ),
        progress_bar=False,
    )  # fmt: skip
    return [x.generated_tokens for x in found.values()]


def each_alone(model: Any) -> list[list[int]]:
    """The tokens of `generate` with eager attention. (generate_batch with "paged|eager" leaves out soft caps.)"""
    model.set_attn_implementation("eager")
    found = []
    for text in prompts():
        mask = torch.ones(1, len(text), dtype=torch.long)
        found.append(model.generate(torch.tensor([text]), attention_mask=mask, **GREEDY)[0, len(text) :].tolist())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_continuous_batching_writes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name).eval()
    expected = each_alone(model)
    if name.startswith("Llama"):
        assert batched(model, "sdpa") == expected
    seen = asked(monkeypatch, flash.flash_attn, "_attention")
    assert batched(model, NAME) == expected and all(len(x) == 16 for x in expected)
    assert seen and all("cu_seqlens_k" in options for _, options in seen)
    if name.startswith("Gemma2"):
        assert all(args[7] == 5.0 for args, _ in seen) and {args[6] for args, _ in seen} >= {(7, 7)}
    if name.startswith("GptOss"):
        assert all(options["sinks"] is not None for _, options in seen)


def test_decoding_with_block_tables_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import initialization

    model = made("LlamaForCausalLM").eval()
    expected = batched(model, "sdpa")
    # transformers has these tables on a GPU alone
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    seen = asked(monkeypatch, flash.kvcache, "attend")
    assert batched(model, NAME, max_blocks_per_request=4) == expected
    assert seen
    for (q, k_cache, v_cache, k, v), options in seen:
        assert q.shape[1:] == (1, 4, 16) and k.shape == v.shape == (len(q), 1, 2, 16)
        assert v_cache.data_ptr() - k_cache.data_ptr() == 4 * k_cache[0].numel()  # one pool
        assert options["table"].shape == (len(q), 4)


@pytest.mark.parametrize("name", [*MODELS, "BertForMaskedLM"])
def test_padded_logits_and_gradients(name: str) -> None:
    model, given = made(name).train(), plain.batch(name)
    seen, results = given["attention_mask"].bool(), {}
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**given).logits[seen]
        logits.square().mean().backward()
        results[implementation] = (
            logits.detach(),
            {n: x.grad for n, x in model.named_parameters() if x.grad is not None},
        )
    same(*results[NAME], *results["eager"])


def same(logits: Any, gradients: Any, expected: Any, of: Any) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert gradients.keys() == of.keys()
    for n, x in gradients.items():
        torch.testing.assert_close(x, of[n], rtol=1e-3, atol=1e-4 * of[n].abs().max().item() + 1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_packed_gradients_are_those_of_padded_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = made(name).train(), (6, 1, 14)
    texts = [torch.randint(3, 100, (n,)) for n in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(n, dtype=torch.long) for n in lengths], batch_first=True)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    given = {
        "eager": {"input_ids": padded, "attention_mask": mask},
        NAME: {"input_ids": torch.cat(texts)[None], "position_ids": positions},
    }
    seen, results = asked(monkeypatch, flash.flash_attn, "_attention"), {}
    for implementation, batch in given.items():
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(**batch, use_cache=False).logits
        logits = logits[0] if implementation == NAME else logits[mask.bool()]
        logits.square().mean().backward()
        results[implementation] = (
            logits.detach(),
            {n: x.grad for n, x in model.named_parameters() if x.grad is not None},
        )
    same(*results[NAME], *results["eager"])
    assert len(seen) == 2 and all(x["cu_seqlens_q"].tolist() == [0, 6, 7, 21] for _, x in seen)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generates_the_same(name: str, cache: str | None) -> None:
    model, given = made(name).eval(), plain.batch(name)
    more = {} if cache is None else {"cache_implementation": cache}
    tokens = {}
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(**given, max_new_tokens=8, do_sample=False, **more)
    assert torch.equal(tokens[NAME], tokens["eager"])


# ---- the functions --------------------------------------------------------------------------------------------------


def test_options_are_named_as_transformers_looks_for_them() -> None:
    """One that is not is left out there, silently."""
    common = {"softmax_scale", "causal", "window_size", "softcap", "s_aux"}
    for function, more in (
        (flash.flash_attn_func, {"dropout_p", "deterministic"}),
        (flash.flash_attn_varlen_func, {"dropout_p", "deterministic", "max_seqlen_q", "max_seqlen_k"}),
        (torch.compiler.disable(flash.flash_attn_with_kvcache), {"block_table", "cache_seqlens"}),
    ):
        assert common | more <= inspect.signature(function).parameters.keys()


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(q: Any, k: Any, v: Any, sinks: Any, window: int = 1000) -> Any:
    """One sequence, causal: q (queries, heads, dim), k and v (keys, heads, dim)."""
    s = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // HEADS_K, 1)) * DIM**-0.5
    at = torch.arange(len(k))[None] - torch.arange(len(q))[:, None] - (len(k) - len(q))
    s = s.masked_fill((at > 0) | (at < -window), -torch.inf)
    s = torch.cat([s, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., :-1], v.repeat_interleave(HEADS // HEADS_K, 1))


def test_longest_lengths_are_not_read_and_sinks_are() -> None:
    q, k, v, sinks = drawn(9, HEADS, DIM), drawn(9, HEADS_K, DIM, seed=1), drawn(9, HEADS_K, DIM, seed=2), drawn(HEADS)
    ends, unread = torch.tensor([0, 2, 9], dtype=torch.int32), torch.empty((), dtype=torch.int32, device="meta")
    out = flash.flash_attn_varlen_func(
        q, k, v, ends, ends, unread, unread, causal=True, window_size=(3, 3), s_aux=sinks
    )  # fmt: skip
    for a, b in ((0, 2), (2, 9)):
        torch.testing.assert_close(out[a:b], alone(q[a:b], k[a:b], v[a:b], sinks, 3))
    with pytest.raises(ValueError, match=r"^s_aux has shape \(3,\)"):
        flash.flash_attn_varlen_func(q, k, v, ends, ends, s_aux=sinks[:3])


def test_pages_of_one_pool_that_interleave() -> None:
    """As transformers lays it out: K and V of two layers in turn, and -1 where nothing is."""
    page, pool = 4, torch.full((12 * 4, 4, HEADS_K, DIM), torch.nan, dtype=torch.float64)
    view = pool.flatten(0, 1).view(-1, page, HEADS_K, DIM)
    k_cache, v_cache = view[2:-1], view[3:]  # of the second layer
    table = torch.tensor([[8, 0, -1], [-1, -1, -1], [20, 4, 36]], dtype=torch.int32)
    lengths = torch.tensor([5, -1, 8], dtype=torch.int32)
    q, k, v, sinks = (
        drawn(3, 1, HEADS, DIM),
        drawn(3, 1, HEADS_K, DIM, seed=1),
        drawn(3, 1, HEADS_K, DIM, seed=2),
        drawn(HEADS),
    )
    old = [drawn(3, 12, HEADS_K, DIM, seed=3 + i) for i in (0, 1)]
    for n in (0, 2):
        for i in range(int(lengths[n])):
            for cache, x in zip((k_cache, v_cache), old):
                cache[table[n, i // page], i % page] = x[n, i]
    wanted = pool.clone()
    shown = wanted.flatten(0, 1).view(-1, page, HEADS_K, DIM)
    for n in (0, 2):
        i = int(lengths[n])
        for first, x in ((2, k), (3, v)):
            shown[first:][table[n, i // page], i % page] = x[n, 0]
    out = flash.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True, s_aux=sinks
    )  # fmt: skip
    assert not out[1].any()
    for n in (0, 2):
        keys, values = (torch.cat([x[n, : int(lengths[n])], y[n]]) for x, y in zip(old, (k, v)))
        torch.testing.assert_close(out[n], alone(q[n], keys, values, sinks))
    torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


def test_offsets_alone_keep_sequences_apart() -> None:
    """transformers looks at offsets only beside both longest lengths."""
    register(NAME)
    layer, given = Layer(), [x.double() for x in qkv()]
    layer.config = transformers.LlamaConfig(attn_implementation=NAME)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    more = {"seq_idx": torch.tensor([[0] * 3 + [1] * 4])}
    out, _ = flash.attention_forward(layer, *given, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **more)
    for i, j in ((0, 3), (3, 7)):
        one, _ = flash.attention_forward(layer, *(x[:, :, i:j] for x in given), None)
        torch.testing.assert_close(out[:, i:j], one)


# ---- what is refused ------------------------------------------------------------------------------------------------

ENDS, MASK = torch.tensor([0, 7]), torch.ones(1, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "options", "why"),
    [
        (None, {"position_bias": torch.zeros(1, 2, 7, 7)}, "gives its attention position_bias, a Tensor, which is not"),
        (None, {"indices": torch.zeros(1)}, "gives its attention indices, a Tensor, which is not understood"),
        (None, {"seq_idx": torch.zeros(1, 7)}, "gives its attention seq_idx, a Tensor, which is not understood"),
        (None, {"cu_seq_lens_q": ENDS}, "gives one of cu_seq_lens_q and cu_seq_lens_k alone"),
        (None, {}, "is given float32 and has no torch.nn.Linear, by which transformers sees what was meant"),
        (MASK[None, None], {}, r"has a mask of shape \(1, 1, 1, 7\)"),
        (MASK, {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}, r"has a mask of shape \(1, 7\) beside cu_seq_lens_q"),
    ],
)
def test_what_a_layer_may_not_ask(mask: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^Layer {why}.*; its attn_implementation must be 'eager', or a name without"):
        flash.attention_forward(Layer(), *qkv(), mask, **options)


def test_a_mask_of_keys_that_are_not_those_of_the_queries() -> None:
    """Cross-attention: transformers' flash-attn leaves out queries where the keys' mask says padding."""
    layer = Layer(False)
    layer.config = transformers.LlamaConfig(attn_implementation=NAME)
    given, mask = [x.double() for x in qkv(5, 7)], MASK.clone()
    mask[:, 5:] = False
    with pytest.raises(ValueError, match="^Layer has 5 queries beside a mask of keys, which transformers reads as the"):
        flash.attention_forward(layer, *given, mask)
    register(NAME)
    flash.attention_forward(layer, given[0][:, :, :1], *given[1:], mask)


def test_a_window_to_both_sides_that_the_mask_has_wider() -> None:
    """T5Gemma's encoder: transformers' masks there show sliding_window keys to each side, its flash-attn one less."""
    layer = Layer(False)
    layer.config = transformers.LlamaConfig(attn_implementation=NAME, sliding_window=4)
    given = [x.double() for x in qkv()]
    with pytest.raises(
        ValueError, match="^Layer shows sliding_window - 1 = 3 keys to each side, and its mask one more"
    ):
        flash.attention_forward(layer, *given, None, sliding_window=4)
    register(NAME)
    flash.attention_forward(layer, *given, None, sliding_window=5)  # as ModernBERT says it
    flash.attention_forward(layer, *given, None, sliding_window=4, is_causal=True)


@pytest.mark.parametrize("name", ["flash_attention_2", "me/flash2", "paged|flash2"])
def test_names_that_are_not_ours_to_give(name: str) -> None:
    with pytest.raises(ValueError, match="^name is '.*'; it must be letters, digits and _, and none of transformers'"):
        register(name)


@pytest.mark.parametrize("change", ["gone", "of four", "not asked"])
def test_a_version_without_the_place(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as theirs

    monkeypatch.setattr(flash, "_names", set())
    if change == "gone":
        monkeypatch.delattr(theirs, "_lazy_imports")
    elif change == "of four":

        def lazy_import_flash_attention(name: str) -> Any:
            _, _, _, _ = theirs._lazy_imports(name)

        monkeypatch.setattr(theirs, "lazy_import_flash_attention", lazy_import_flash_attention)
    else:
        monkeypatch.setattr(theirs, "lazy_import_flash_attention", lambda name: ((None,) * 5, ()))
    before = dict(vars(theirs))
    with pytest.raises(ImportError, match=f"^transformers {transformers.__version__} does not ask .*_lazy_imports for"):
        register("ourflash3")
    assert vars(theirs) == before and not flash._names


def test_models_without_flash_attention_are_refused() -> None:
    register(NAME)
    config = transformers.T5Config(**plain.MODELS["T5ForConditionalGeneration"][1])
    with pytest.raises(ValueError, match="^T5ForConditionalGeneration has _supports_flash_attn = False; its attn_impl"):
        transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=NAME)
    with pytest.raises(ValueError, match="^BloomModel computes attention by itself"):
        transformers.BloomModel._from_config(transformers.BloomConfig(), attn_implementation=NAME)


def test_masks_that_lengths_do_not_say() -> None:
    from transformers import masking_utils

    model = made("LlamaForCausalLM")
    model.set_attn_implementation(NAME)
    ids, config = torch.randint(3, 100, (2, 8)), model.config
    of = "^the model of LlamaConfig "
    with pytest.raises(ValueError, match=of + "has position_ids that start anew, in a batch of 2; packed, it must be"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2), use_cache=False)
    cache = transformers.StaticCache(config, max_cache_len=16)
    with pytest.raises(ValueError, match=of + "has no attention_mask that says which keys of a static cache are there"):
        model(ids, past_key_values=cache)
    given = {"config": config, "inputs_embeds": torch.zeros(1, 8, 64), "attention_mask": None, "past_key_values": None}
    makes, any_key = masking_utils.create_causal_mask, lambda *args: args[3] >= 0
    for more in (
        {"or_mask_function": any_key}, {"and_mask_function": any_key},
        {"block_sequence_ids": torch.zeros(1, 8, dtype=torch.long)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=of + "shows or hides more than causality, windows and padding do"):
            makes(**given, **more)
    assert makes(**given) is None
