"""Every model type of the installed transformers, made small, with our attention beside eager's: equal, refused, or not
made.

python tests/transformers_models.py            # writes docs/transformers-models.md, in some minutes
python tests/transformers_models.py llama t5   # says what is found for these
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

import cupyflash.integrations.transformers as ours

NAME = "cupy"
LISTED = Path(__file__).parent.parent / "docs" / "transformers-models.md"
HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM")
MAPPINGS = [
    *(f"MODEL_FOR_{x}_MAPPING_NAMES" for x in HEADS),
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
]
# How large a size is, by the end of its name: the first that fits. A pattern of layers keeps its kinds.
SIZES: dict[str, int] = {
    "vocab_size_per_layer_input": 128, "key_value_heads": 2, "kv_heads": 2, "n_head_kv": 2, "multi_query_group_num": 2, "index_n_heads": 2, "attention_groups": 2,
    "topk_group": 1, "n_group": 1, "n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "num_value_heads": 4, "num_key_heads": 2, "index_topk": 4, "index_topk_blocks": 2, "index_block_size": 4, "index_kpool": 2, "conv_kernel_size": 3,
    "attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "nhead": 4, "resampler_n_heads": 4,
    "num_kv_shared_layers": 0, "hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "layers": 2, "depth": 2,
    "mlp_layer_depth": 2, "first_k_dense_replace": 1,
    "qk_head_dim": 32, "global_head_dim": 16, "head_dim": 16, "d_kv": 16, "dim_head": 16, "lora_rank": 16, "vocab_size": 128,
    "position_embeddings": 128, "n_positions": 128, "target_positions": 128, "source_positions": 128, "max_seq_len": 128,
    "moe_intermediate_size": 32, "intermediate_size": 96, "ffn_dim": 96, "d_ff": 96, "n_inner": 96, "mlp_dim": 96,
    "ffn_hidden_size": 96, "feedforward_size": 96, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "experts": 4,
    "image_size": 32, "patch_size": 8, "sliding_window": 6, "sliding_window_size": 6, "attention_chunk_size": 6,
    "local_attention": 8, "query_pre_attn_scalar": 16, "max_window_layers": 1, "full_attention_interval": 2,
    "temporal_patch_size": 2, "num_mel_bins": 16, "size_per_layer_input": 16, "size_per_layer_embed": 16,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "embedding_size": 64, "projection_dim": 64,
    "hidden_dim": 64, "word_embed_proj_dim": 64, "emb_dim": 64, "cross_attention_hidden_size": 64, "output_dim": 64,
    "hidden_size_global": 64, "encoder_hidden_size": 64,
}  # fmt: skip
KEPT = {"num_channels", "spatial_merge_size", "num_feat_extract_layers"}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 99, "decoder_start_token_id": 1}
PATTERNS = {"layer_types", "layers_block_type", "hybrid_layer_pattern"}
# What no rule says.
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
DOTS: dict[str, Any] = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "per_layer_config": {
        1: {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    },
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]}, "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2}, "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "glm4v_text": {"rope_parameters": MROPE}, "glm_ocr_text": {"rope_parameters": MROPE},
    "glm_image_text": {"rope_parameters": MROPE}, "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "deepseek_v2": {"num_experts_per_tok": 2}, "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "mask_token_id": 4}, "kimi_linear": {"num_experts_per_token": 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]}, "dots3_note_text": DOTS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip


class NotMade(Exception):
    """Why a model type cannot be made small here."""


def sizes(config: Any) -> dict[str, Any]:
    """What makes a configuration small: arguments of its kind."""
    found: dict[str, Any] = {}
    asked = set(inspect.signature(type(config).__init__).parameters)
    heads = vars(config).get("num_attention_heads")
    for name, value in vars(config).items():
        size = next((n for end, n in SIZES.items() if name == end or name.endswith("_" + end)), None)
        if isinstance(value, transformers.PreTrainedConfig):
            if name in asked:
                found[name] = {"model_type": value.model_type, **sizes(value)}
        elif name.endswith(("dropout", "dropout_prob", "layerdrop")) and isinstance(value, float):
            found[name] = 0.0
        elif name in PATTERNS and value and isinstance(value[0], str):
            different = list(dict.fromkeys(value))
            found[name] = (different * 2)[: max(2, len(different))]
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            half = int(16 * (value.get("partial_rotary_factor") or 1)) // 2
            found[name] = {**value, "mrope_section": [half - half * 3 // 8 * 2, half * 3 // 8, half * 3 // 8]}
        elif isinstance(value, (list, tuple)) and value and name == "image_size":
            found[name] = [32] * len(value)
        elif name.endswith(("_token_id", "_token_index", "_token")) and isinstance(value, int) and value > 99:
            found[name] = SPECIAL.get(name, 100 + sum(map(ord, name)) % 27)
        elif isinstance(value, int) and not isinstance(value, bool) and name not in KEPT and size is not None:
            if name.endswith("key_value_heads") and value == heads:
                found[name] = 4
            elif value > size:
                found[name] = size
        elif value is None and name in ("head_dim", "num_key_value_heads") and name in asked:
            found[name] = size
    pattern = next((found[x] for x in found if x in PATTERNS), None)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if pattern is not None and name in found:
            found[name] = len(pattern)
    return {**found, **EXTRA.get(config.model_type, {})}


def small(kind: str) -> Any:
    """The configuration of a model type, small."""
    made: Any = transformers.CONFIG_MAPPING[kind]
    default = made()
    more = sizes(default)
    try:
        config = made(**more)
    except Exception as error:
        raise NotMade(f"its configuration: {said(error)}") from error
    return config


def said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:110]}"


def kinds() -> list[str]:
    """All model types that have a model with inputs that can be guessed."""
    tables = [getattr(modeling_auto, x) for x in MAPPINGS]
    return sorted(x for x in configuration_auto.CONFIG_MAPPING_NAMES if any(x in t for t in tables))


def model_class(kind: str) -> Any:
    for table in MAPPINGS:
        name = getattr(modeling_auto, table).get(kind)
        if name is not None:
            for one in [name] if isinstance(name, str) else name:
                with contextlib.suppress(Exception):
                    return getattr(transformers, one)
    raise NotMade("it needs a package that is not here")


def made(kind: str) -> Any:
    """A small model in eval mode whose attention is far from uniform."""
    of = model_class(kind)
    config = small(kind)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            count = sum(x.numel() for x in of(config).parameters())
    except Exception as error:
        raise NotMade(f"its model: {said(error)}") from error
    if count > 30_000_000:
        raise NotMade(f"it is not small: {count / 1e6:.0f} million parameters")
    config = small(kind)
    config._attn_implementation = "eager"
    model = of(config).float().eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim > 1 and x.numel():
                x.normal_(0, 1.5 / x[0].numel() ** 0.5)
            else:
                x.add_(0.1 * torch.randn_like(x))
    return model


def batches(model: Any, padded: str) -> Iterator[dict[str, Any]]:
    """Guesses at what a model takes: two sequences, the second padded on the side named; or pictures, or sounds."""
    torch.manual_seed(1)
    config, takes, main = model.config, inspect.signature(model.forward).parameters, model.main_input_name
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    ids = torch.randint(20, min(100, vocabulary if isinstance(vocabulary, int) and vocabulary > 20 else 100), (2, 12))
    last = 7 if padded == "right" else 11
    ids[:, last] = min(99, int(ids.max()) + 1)  # the end, which some models look for
    text: dict[str, Any] = {"input_ids": ids} if "input_ids" in takes else {}
    if "bbox" in takes:
        text["bbox"] = torch.randint(0, 9, (2, 12, 4)).cumsum(-1)
    if "attention_mask" in takes and text and padded != "nowhere":
        text["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
        text["attention_mask"][1, slice(0, 4) if padded == "left" else slice(8, 12)] = 0
    begun: dict[str, Any] = {"decoder_input_ids": ids[:, :9]} if "decoder_input_ids" in takes else {}
    if main == "input_ids" and text:
        yield text | begun
    seen = getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(seen, "num_channels", None) or getattr(seen, "in_channels", None) or 3
    if "pixel_values" in takes and isinstance(height, int) and isinstance(channels, int):
        yield text | begun | {"pixel_values": torch.randn(2, channels, height, width)}
    if "grid_thw" in takes:
        patch = channels * getattr(seen, "temporal_patch_size", 1) * seen.patch_size**2
        yield {next(iter(takes)): torch.randn(40, patch), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}
    heard = getattr(config, "encoder_config", config)
    if main == "input_features":
        for mels in {getattr(heard, x, None) for x in ("num_mel_bins", "feature_size", "input_dim")} - {None}:
            for length in (2 * getattr(heard, "max_source_positions", 32), 64):
                yield begun | {"input_features": torch.randn(2, mels, length)}
                yield begun | {"input_features": torch.randn(2, length, mels)}
    if main == "input_values":
        yield begun | {"input_values": torch.randn(2, 2000)}


def result_of(output: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return getattr(output, name)
    for x in output.values() if isinstance(output, dict) else output:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x
    raise NotMade("it returns no tensor")


def passes(model: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """What is seen of the result, and all gradients."""
    model.zero_grad()
    torch.manual_seed(2)
    out = result_of(model(**given))
    mask = given.get("attention_mask")
    if mask is not None and out.shape[:2] == mask.shape:
        out = out[mask.bool()]  # what padding attends is not defined
    if not out.numel() or not out.isfinite().all():
        raise NotMade("its own result is empty, or not finite")
    out.square().mean().backward()
    grads = {n: torch.zeros(()) if x.grad is None else x.grad.clone() for n, x in model.named_parameters()}
    return out.detach(), grads


def compare(what: str, found: Any, expected: Any) -> None:
    """AssertionError unless equal, as far as parts of a model that compute in float32 allow."""
    limit = 1e-4 * max(float(expected.abs().max()), 1e-3)
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    error = float((found - expected).abs().max()) if found.numel() else 0.0
    assert error <= limit, f"{what}: {error:.2g} off, of {float(expected.abs().max()):.2g}"


def not_made(kind: str, why: str) -> str:
    """What is refused by its class alone needs no model."""
    with contextlib.suppress(NotMade):
        try:
            ours._check(model_class(kind), NAME)
        except ValueError as error:
            return f"refused: {error}"
    return f"not made: {why}"


def judge(kind: str) -> str:
    """What is found: "equal", "no attention", "refused: why", "not made: why". AssertionError where results differ."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    ours.register(NAME)
    try:
        model = made(kind)
    except NotMade as error:
        return not_made(kind, str(error))
    except Exception as error:  # noqa: BLE001  # a model's own
        return not_made(kind, said(error))
    runs: dict[str, Any] = {}
    why = f"its input is {model.main_input_name}"
    for padded in ("nowhere", "left", "right"):
        for given in batches(model, padded):
            if padded != "nowhere" and "attention_mask" not in given:
                continue
            try:
                runs[padded] = given, passes(model, given)
                break
            except Exception as error:  # noqa: BLE001  # a model's own
                why = said(error)
    if "nowhere" not in runs:
        return not_made(kind, why)
    tokens = None
    more = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    if model.can_generate() and "left" in runs:
        with contextlib.suppress(Exception):
            tokens = model.generate(**given_of(runs), **more)
    called = []
    real = ours.api.attention
    ours.api.attention = lambda *a, **o: called.append(1) or real(*a, **o)  # type: ignore[assignment]
    try:
        model.set_attn_implementation(NAME)
        for padded, (given, (result, grads)) in runs.items():
            found, of = passes(model, given)
            compare(f"padded {padded}", found, result)
            most = max(float(x.abs().max()) for x in grads.values() if x.numel())
            for n, x in of.items():
                error = float((x - grads[n]).abs().max()) if x.numel() else 0.0
                assert error <= 1e-3 * most + 1e-7, f"padded {padded}: gradient of {n} {error:.2g} off, of {most:.2g}"
        if tokens is not None:
            assert torch.equal(model.generate(**given_of(runs), **more), tokens), "other tokens"
    except ValueError as error:
        if "attn_implementation must be 'eager'" in str(error):
            return f"refused: {error}"
        raise
    finally:
        ours.api.attention = real
    if called:
        return "equal"
    attends = sorted({type(x).__name__ for x in model.modules() if "Attention" in type(x).__name__})
    assert not attends, f"never called, for {attends}"
    return "no attention"


def given_of(runs: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in runs["left"][0].items() if n != "decoder_input_ids"}


def listed() -> dict[str, str]:
    """What the list says of each model type."""
    rows = [x.split(" | ", 1) for x in LISTED.read_text("utf-8").splitlines() if x.startswith("| `")]
    return {kind.strip("|` "): found.removesuffix(" |").strip() for kind, found in rows}


def write(found: dict[str, str]) -> None:
    """The list, in the order of the alphabet."""
    counts = {
        x: sum(y.split(":")[0] == x for y in found.values()) for x in ("equal", "refused", "no attention", "not made")
    }
    lines = [
        "# Model types of Hugging Face transformers", "",
        f"What `attn_implementation=\"cupy\"` gives with transformers {transformers.__version__}, for a small model of each of its",
        f"{len(found)} types with weights of our own, beside \"eager\": result, all gradients, padding on the left and on the right, and",
        f"tokens where it generates. {counts['equal']} are equal. {counts['refused']} are refused, with the message that is here.",
        f"{counts['no attention']} have no attention to choose. {counts['not made']} could not be made small by a general rule, and were not",
        "compared. `python tests/transformers_models.py` writes this list, and `tests/test_transformers_models.py` holds it.", "",
        "| type | |", "| --- | --- |", *(f"| `{kind}` | {x} |" for kind, x in sorted(found.items())),
    ]  # fmt: skip
    LISTED.write_text("\n".join(lines) + "\n", "utf-8")


def main(chosen: list[str]) -> None:
    found: dict[str, str] = {}
    for kind in chosen or kinds():
        try:
            found[kind] = judge(kind)
        except Exception as error:  # noqa: BLE001
            found[kind] = f"WRONG {said(error)}"
        if chosen or found[kind].startswith("WRONG"):
            print(f"{kind}: {found[kind]}", flush=True)
    if not chosen and not any(x.startswith("WRONG") for x in found.values()):
        write({kind: "not made" if x.startswith("not made") else x for kind, x in found.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
