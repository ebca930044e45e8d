"""Arguments by the names that other attention functions have for them: the message names ours, and ours means
the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from reference import fresh_rng

import cupyflash
from cupyflash import attention, attention_backward
from cupyflash.other_names import _UNEXPECTED, HERE
from cupyflash.problem import ARRAYS, OPTIONS

X = np.ones((1, 4, 2, 8), np.float32)
OURS = [row.name for row in (*OPTIONS, *ARRAYS)]
NAMES = Path(__file__).resolve().parent.parent / "docs" / "names.md"


@pytest.mark.parametrize("name", HERE)
def test_the_message_names_ours(name: str) -> None:
    assert name not in OURS
    for function in (attention, attention_backward, cupyflash.explain, cupyflash.tune):
        arrays = (X,) * {"attention": 3, "attention_backward": 6}.get(function.__name__, 1)
        with pytest.raises(TypeError) as raised:
            function(*arrays, **{name: None})
        assert str(raised.value) == f"{function.__name__}() got an unexpected keyword argument {name!r}; {HERE[name]}"


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_entries(library: str) -> None:
    pytest.importorskip(library)
    module = pytest.importorskip(f"cupyflash.{library}")
    x = pytest.importorskip("torch" if library == "torch" else "jax.numpy").ones((4, 8))
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'; here it is causal=True"):
        module.attention(x, x, x, is_causal=True)


def test_a_name_of_nobody() -> None:
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'colour'$"):
        attention(X, X, X, colour="red")
    with pytest.raises(TypeError, match=r"argument 'windw'; did you mean 'window'\?$"):
        attention(X, X, X, windw=(1, 1))
    with pytest.raises(
        TypeError, match=r"^attention_backward\(\) got .* 'determinstic'; did you mean 'deterministic'\?$"
    ):
        attention_backward(X, X, X, X, X, X[..., 0], determinstic=True)


@pytest.mark.parametrize("more", ["", ". Did you mean 'scales'?"])  # as Python says from 3.13 on
def test_what_python_says_of_an_unknown_name(more: str) -> None:
    found = _UNEXPECTED.search(f"f() got an unexpected keyword argument 'scale'{more}")
    assert found is not None and found[1] == "scale" and found[0].endswith("'scale'")


def test_functions_have_an_option_of_their_own() -> None:
    assert "here it is score," in HERE["score_mod"] and "here it is block_mask," in HERE["mask_mod"]


def test_every_hint_is_of_something_that_is_here() -> None:
    here = {*OURS, *cupyflash.__all__, "family", "return_lse", "q", "k", "v", "lse"} - {"attention", "at"}
    for name, hint in HERE.items():
        words = {*re.findall(r"\w+", hint)}
        assert name not in words and ("leave it out" in hint or words & here), (name, hint)


def test_the_table_of_names() -> None:
    """What it says that others have is either ours or gets a message."""
    _, _, text = NAMES.read_text(encoding="utf-8").partition("| here | PyTorch")
    rows = [line.split("|")[1:-1] for line in text.partition("\n\n")[0].splitlines()[2:]]
    theirs = {name for row in rows for cell in row[1:] for name in re.findall(r"\b(\w+)=", cell)}
    ours = {*OURS, "return_lse"}
    assert {name for row in rows for name in re.findall(r"\b(\w+)=", row[0])} <= ours
    assert theirs - ours <= set(HERE) and {"is_causal", "softmax_scale", "attn_bias", "enable_gqa"} <= theirs


# ---- ours means the same ---------------------------------------------------------------------------------------------

SQ, SK = 5, 8


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, "float32")


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rng = fresh_rng()
    q, k, v = (torch.from_numpy(drawn(rng, 2, h, s, 16)) for h, s in ((4, SQ), (2, SK), (2, SK)))
    seen, bias = torch.from_numpy(rng.random((2, 1, SQ, SK)) < 0.7), torch.from_numpy(drawn(rng, 4, SQ, SK))
    padding = torch.from_numpy(rng.random((2, SK)) < 0.3)  # of MultiheadAttention: True is hidden
    seen[..., 0], padding[:, 0] = True, False  # PyTorch gives NaN to who sees nothing
    for theirs, ours in (
        ({"is_causal": True}, {"causal": "top_left"}),
        ({"attn_mask": seen}, {"mask": seen}),
        ({"attn_mask": bias}, {"bias": bias}),
        ({"attn_mask": ~padding[:, None, None]}, {"key_mask": ~padding}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ):
        out = attention(q, k, v, layout="bhsd", **ours)
        torch.testing.assert_close(out, sdpa(q, k, v, enable_gqa=True, **theirs), rtol=1e-4, atol=1e-5)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    theirs_is = pytest.importorskip("jax.nn").dot_product_attention
    rng = fresh_rng()
    q, k, v = (jax.numpy.asarray(drawn(rng, 2, s, h, 16)) for h, s in ((4, SQ), (2, SK), (2, SK)))
    same = k[:, :SQ], v[:, :SQ]  # windows are counted from another diagonal where lengths differ
    seen, bias = rng.random((2, 1, SQ, SK)) < 0.7, jax.numpy.asarray(drawn(rng, 1, 4, SQ, SK))
    seen[..., 0] = True
    seen, lengths = jax.numpy.asarray(seen), jax.numpy.asarray([3, 8])
    for theirs, ours, kv in (
        ({"is_causal": True}, {"causal": "top_left"}, (k, v)),
        ({"mask": seen}, {"mask": seen}, (k, v)),
        ({"bias": bias}, {"bias": bias}, (k, v)),
        ({"key_value_seq_lengths": lengths}, {"key_mask": jax.numpy.arange(SK) < lengths[:, None]}, (k, v)),
        ({"local_window_size": (2, 1)}, {"window": (2, 1)}, same),
        ({"scale": 0.3}, {"scale": 0.3}, (k, v)),
    ):
        np.testing.assert_allclose(attention(q, *kv, **ours), theirs_is(q, *kv, **theirs), rtol=1e-4, atol=1e-5)
