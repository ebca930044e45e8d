"""Small models of diffusers by name: each a function that returns one and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import randn, tensor

Made = tuple[Any, dict[str, Any]]
MODELS: dict[str, Callable[[], Made]] = {}


def _model(make: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[make.__name__] = make
    return make


def padding() -> Any:
    """Of two texts of 7 tokens, one of which has 4."""
    return tensor([[True] * 7, [True] * 4 + [False] * 3])


@_model
def unet() -> Made:
    """Self- and cross-attention in a UNet, with padded text."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24, attention_head_dim=8,
    )  # fmt: skip
    return model, {
        "sample": randn(2, 4, 16, 16), "timestep": tensor([3, 7]), "encoder_hidden_states": randn(2, 7, 24),
        "encoder_attention_mask": padding(),
    }  # fmt: skip


@_model
def unet2d() -> Made:
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return model, {"sample": randn(2, 3, 16, 16), "timestep": tensor([3, 7])}


@_model
def sd3() -> Made:
    """Joint attention of text and picture."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 7, 24),
        "pooled_projections": randn(2, 20), "timestep": tensor([3, 7]),
    }  # fmt: skip


@_model
def flux() -> Made:
    """Joint attention, rotated, through diffusers' own choice of a function."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 16, 4), "encoder_hidden_states": randn(2, 7, 24),
        "pooled_projections": randn(2, 20), "timestep": tensor([0.3, 0.7]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip


@_model
def dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "timestep": tensor([3, 7]), "class_labels": tensor([1, 2])
    }  # fmt: skip


@_model
def lumina2() -> Made:
    """Padded text, fewer heads of keys, expanded by the processor."""
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128),
        cap_feat_dim=32,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "timestep": torch.rand(2), "encoder_hidden_states": randn(2, 7, 32),
        "encoder_attention_mask": padding(),
    }  # fmt: skip


@_model
def cogview4() -> Made:
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2, out_channels=4,
        text_embed_dim=24, time_embed_dim=16, condition_dim=4,
    )  # fmt: skip
    size, corner = torch.full((2, 2), 8.0), torch.zeros(2, 2)
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 7, 24), "timestep": tensor([3, 7]),
        "original_size": size, "target_size": size, "crop_coords": corner,
    }  # fmt: skip


@_model
def mochi() -> Made:
    """One attention for each text of a batch, without its padding."""
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=7,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 2, 8, 8), "encoder_hidden_states": randn(2, 7, 16), "timestep": tensor([3, 7]),
        "encoder_attention_mask": padding(),
    }  # fmt: skip


@_model
def cosmos() -> Made:
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type="learnable",
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 2, 8, 8), "timestep": tensor([3.0]), "encoder_hidden_states": randn(1, 7, 16),
    }  # fmt: skip


@_model
def hidream() -> Made:
    model = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, num_routed_experts=2,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=(0, 1),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states_t5": randn(2, 7, 32),
        "encoder_hidden_states_llama3": randn(2, 2, 7, 16), "pooled_embeds": randn(2, 64), "timesteps": tensor([3, 7]),
    }  # fmt: skip


@_model
def z_image() -> Made:
    """Lists of pictures and texts of several lengths."""
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=1, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, cap_feat_dim=16, axes_dims=[8, 4, 4], axes_lens=[128, 64, 64],
    )  # fmt: skip
    return model, {"x": [randn(4, 1, 8, 8)], "t": torch.rand(1), "cap_feats": [randn(7, 16)]}


@_model
def wan() -> Made:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(1, 4, 2, 8, 8), "timestep": tensor([3]), "encoder_hidden_states": randn(1, 7, 16),
    }  # fmt: skip


@_model
def hunyuan_video() -> Made:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 1, 4, 4), "timestep": tensor([3, 7]), "encoder_hidden_states": randn(2, 7, 16),
        "pooled_projections": randn(2, 8), "encoder_attention_mask": padding(), "guidance": tensor([1000.0, 900.0]),
    }  # fmt: skip


@_model
def sana() -> Made:
    """Linear attention to itself, softmax attention to the text."""
    model = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=2,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
        sample_size=8,
    )  # fmt: skip
    return model, {
        "hidden_states": randn(2, 4, 8, 8), "encoder_hidden_states": randn(2, 7, 8), "timestep": tensor([3, 7]),
        "encoder_attention_mask": padding(),
    }  # fmt: skip


@_model
def autoencoder_wan() -> Made:
    """Without processors: its module asks for attention by itself."""
    model = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False]
    )  # fmt: skip
    return model, {"sample": randn(1, 3, 1, 16, 16)}
