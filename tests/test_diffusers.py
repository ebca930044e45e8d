"""Models of Hugging Face diffusers with our attention: outputs and gradients are those of their own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import cupyflash.torch.sdpa
from cupyflash.integrations.diffusers import processor, use


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of q in the calls of our attention."""
    seen, real = [], cupyflash.torch.sdpa.api.attention
    monkeypatch.setattr(
        cupyflash.torch.sdpa.api, "attention", lambda *a, **o: seen.append(tuple(a[0].shape)) or real(*a, **o)
    )
    return seen


def unet() -> tuple[Any, dict[str, Any]]:
    """Self- and cross-attention in a UNet, with padded text."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24, attention_head_dim=8,
    )  # fmt: skip
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return model, {
        "sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "encoder_attention_mask": mask,
    }  # fmt: skip


def sd3() -> tuple[Any, dict[str, Any]]:
    """Joint attention of text and picture."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=20, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 24),
        "pooled_projections": torch.randn(2, 20), "timestep": torch.tensor([3, 7]),
    }  # fmt: skip


def flux() -> tuple[Any, dict[str, Any]]:
    """Joint attention, rotated, through diffusers' own choice of a function."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 7, 24),
        "pooled_projections": torch.randn(2, 20), "timestep": torch.tensor([0.3, 0.7]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip


def results(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    found = model(**given).sample
    found.square().mean().backward()
    return found.detach(), {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("make", [unet, sd3, flux])
def test_outputs_and_gradients(make: Any, calls: list[Any]) -> None:
    torch.manual_seed(0)
    model, given = make()
    expected, of = results(model, given)
    keys, kinds = list(model.state_dict()), [type(x).__name__ for x in model.attn_processors.values()]
    assert not calls and use(model) is model
    found, grads = results(model, given)
    assert len(calls) == len(kinds) and [type(x).__name__ for x in model.attn_processors.values()] == kinds
    assert list(model.state_dict()) == keys and grads.keys() == of.keys()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for n, x in grads.items():
        torch.testing.assert_close(x, of[n], rtol=1e-3, atol=1e-5 * of[n].abs().max().item() + 1e-7)


@pytest.mark.slow
def test_compiled(calls: list[Any]) -> None:
    torch.manual_seed(0)
    model, given = unet()
    model.eval()
    with torch.no_grad():
        expected = model(**given).sample
        found = torch.compile(use(model), backend="eager")(**given).sample
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_processors() -> None:
    """A copy of the same kind and the same parameters, made once."""
    kind = diffusers.models.attention_processor.AttnProcessor2_0
    stock = kind()
    ours = processor(stock)
    assert isinstance(ours, kind) and type(stock) is kind and processor(ours) is ours
    assert inspect.signature(ours.__call__) == inspect.signature(stock.__call__)
    model, given = unet()
    use(model)
    use(model)
    model(**given, cross_attention_kwargs={})


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="^model is a Linear; it must be a model of diffusers that has attn_processors"):
        use(torch.nn.Linear(1, 1))
    model, given = unet()
    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    use(model)
    with pytest.raises(ValueError, match=r"^the processor AttnProcessor does not call .* such as AttnProcessor2_0"):
        model(**given)
