"""Models of Hugging Face diffusers with our attention: outputs and gradients are those of their own."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers_models import MODELS

import cupyflash.torch.sdpa
from cupyflash.integrations import diffusers as integration
from cupyflash.integrations.diffusers import processor, use


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of q in the calls of our attention."""
    seen, real = [], cupyflash.torch.sdpa.api.attention
    monkeypatch.setattr(
        cupyflash.torch.sdpa.api, "attention", lambda *a, **o: seen.append(tuple(a[0].shape)) or real(*a, **o)
    )
    return seen


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A model in which no weight is zero, as some are before training, so that all of it tells in the output."""
    torch.manual_seed(0)
    model, given = MODELS[name]()
    for x in model.parameters():
        if not x.any():
            torch.nn.init.normal_(x, std=0.05)
    return model.eval(), given


def used(model: Any) -> Any:
    """The same model with our attention, for what is not about the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert use(model) is model
    return model


def output(model: Any, given: dict[str, Any]) -> Any:
    found = model(**given).sample
    return torch.stack(found) if isinstance(found, list) else found


def results(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    found = output(model, given)
    found.square().mean().backward()
    return found.detach(), {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's, on a CPU
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name)
    stock, real = [], torch.nn.functional.scaled_dot_product_attention
    with monkeypatch.context() as patched:
        patched.setattr(
            torch.nn.functional, "scaled_dot_product_attention", lambda *a, **o: stock.append(a) or real(*a, **o)
        )
        expected, of = results(model, given)
        keys, kinds = list(model.state_dict()), [type(x).__name__ for x in model.modules()]
        asked = len(stock)
        assert asked and not calls
        found, grads = results(used(model), given)
        assert (len(calls), len(stock)) == (asked, asked)
    assert [type(x).__name__ for x in model.modules()] == kinds
    assert list(model.state_dict()) == keys and grads.keys() == of.keys()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for n, x in grads.items():
        torch.testing.assert_close(x, of[n], rtol=1e-3, atol=1e-5 * of[n].abs().max().item() + 1e-7)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("hunyuan_video", "unet", "wan", "z_image")]


@pytest.mark.parametrize("name", ["flux", "sana", *SLOW])
def test_compiled_whole(name: str) -> None:
    """torch.compile takes the model as it takes the stock one: in one graph, which serves the next call."""
    graphs: list[Any] = []
    model, given = made(name)
    with torch.no_grad():
        expected = output(model, given)
        torch._dynamo.reset()
        compiled = torch.compile(used(model), backend=lambda g, _: graphs.append(g.graph) or g.forward, fullgraph=True)
        found = output(compiled, given)
        output(compiled, given)
    (graph,) = graphs
    assert any("cupyflash" in str(x.target) for x in graph.nodes)
    assert not any("scaled_dot_product_attention" in str(x.target) for x in graph.nodes)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_every_class_that_asks_for_attention() -> None:
    """A class of diffusers' models is served if, and only if, its code asks for the functions that are ours."""
    root = Path(diffusers.__file__).parent
    served, missed = 0, []
    for path in sorted((root / "models").rglob("*.py")):
        text = path.read_text()
        if path.name == "attention_dispatch.py" or (
            "scaled_dot_product" not in text and "dispatch_attention" not in text
        ):
            continue
        module = importlib.import_module(".".join(("diffusers", *path.relative_to(root).with_suffix("").parts)))
        tree = ast.parse(text)
        helpers = {x.name for x in tree.body if isinstance(x, ast.FunctionDef) and _asks(x, set())}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and isinstance(kind := getattr(module, node.name), type):
                asks = any(_asks(x, helpers) for x in node.body if isinstance(x, ast.FunctionDef))
                inherits = any(integration._ours(base) for base in kind.__bases__)
                served += asks
                if (asks or inherits) != (integration._ours(kind) is not None):
                    missed.append(node.name)
    assert not missed and served > 100


def _asks(function: ast.FunctionDef, helpers: set[str]) -> bool:
    wanted = {"scaled_dot_product_attention", "dispatch_attention_fn", *helpers}
    called = (x.func for x in ast.walk(function) if isinstance(x, ast.Call))
    return any((x.attr if isinstance(x, ast.Attribute) else getattr(x, "id", "")) in wanted for x in called)


def test_processors() -> None:
    """A copy of the same kind and the same parameters, made once."""
    stock = AttnProcessor2_0()
    ours = processor(stock)
    assert isinstance(ours, AttnProcessor2_0) and type(stock) is AttnProcessor2_0 and processor(ours) is ours
    assert inspect.signature(ours.__call__) == inspect.signature(stock.__call__)
    model, given = made("unet")
    use(model)
    use(model)
    model(**given, cross_attention_kwargs={})


def test_a_copy_of_the_model_is_its_own(calls: list[Any]) -> None:
    model, given = made("autoencoder_wan")
    other = copy.deepcopy(model)
    copied = copy.deepcopy(use(model))
    output(other, given)
    assert not calls
    output(copied, given)
    assert calls


def test_some_stay_as_they_are() -> None:
    """And it says which."""
    model, _ = made("sana")
    said = r"^in SanaTransformer2DModel SanaLinearAttnProcessor2_0 \(2\) stay as they are: they do not call torch"
    with pytest.warns(UserWarning, match=said):
        use(model)


def test_what_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^model is a Linear, in which nothing calls .* it must be a model of diffusers"
    ):
        use(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"^model is a int; it must be a model of diffusers, such as pipeline.unet or"):
        use(3)
    with pytest.raises(ValueError, match=r"^the processor is a AttnProcessor; it must be .* such as AttnProcessor2_0$"):
        processor(AttnProcessor())
    model, _ = made("unet")
    model.set_attn_processor(AttnProcessor())
    said = (
        r"^model is a UNet2DConditionModel whose attention is computed by AttnProcessor \(8\); .*AttnProcessor2_0\(\)"
    )
    with pytest.raises(ValueError, match=said):
        use(model)


def test_what_a_dispatched_call_cannot_have() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="^parallel_config is given; .* leave out model.enable_parallelism"):
        integration._dispatched(q, q, q, parallel_config=object())
    with pytest.raises(NotImplementedError, match="^return_lse is True; with use"):
        integration._dispatched(q, q, q, attention_kwargs={"return_lse": True})


def test_mask_of_keys_and_heads_that_are_shared() -> None:
    """As diffusers' own choice takes them: (batch, keys)."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    given = {"attn_mask": mask, "enable_gqa": True, "scale": 0.3}
    torch.testing.assert_close(integration._dispatched(q, k, k, **given), dispatch_attention_fn(q, k, k, **given))
