"""`cupyflash.compat.install`: what others import as flash-attn and xFormers is ours, until it is undone."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupyflash import compat
from cupyflash.compat import bert_padding, flash_attn, flash_attn_interface, stand_in, xformers

ROOTS = {root for x in stand_in.PACKAGES.values() for root in x.roots}


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """As where none of these packages is; afterwards all is as before."""
    before = dict(sys.modules), list(sys.meta_path)
    if any(importlib.util.find_spec(x) for x in ROOTS):
        pytest.skip("one of these packages is really there")
    yield
    assert (set(sys.modules) - set(before[0])) & ROOTS == set() and sys.meta_path == before[1]


def test_flash_attn() -> None:
    with compat.install("flash_attn") as installed:
        assert repr(installed) == "Installed('flash_attn')"
        import flash_attn as found
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        assert found.flash_attn_func is flash_attn.flash_attn_func and found.__version__.startswith("2.8")
        assert flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
        assert (index_first_axis, pad_input, unpad_input) == (
            bert_padding.index_first_axis, bert_padding.pad_input, bert_padding.unpad_input
        )  # fmt: skip
        assert found.bert_padding is sys.modules["flash_attn.bert_padding"]
        for name in ("flash_attn", "flash-attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == found.__version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        with pytest.raises(ImportError, match="flash_attn.layers"):
            importlib.import_module("flash_attn.layers.rotary")
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_flash_attention_3() -> None:
    with compat.install("flash_attn_interface"):
        from flash_attn_interface import flash_attn_func

        assert flash_attn_func is flash_attn_interface.flash_attn_func
        assert importlib.util.find_spec("flash_attn_3") and importlib.util.find_spec("flash_attn") is None
        assert importlib.metadata.version("flash_attn_3").startswith("3.")
        assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]


def test_xformers() -> None:
    with compat.install("xformers"):
        import xformers as found
        from xformers.ops import fmha, memory_efficient_attention, unbind
        from xformers.ops.fmha.attn_bias import LowerTriangularMask

        assert memory_efficient_attention is xformers.memory_efficient_attention
        assert fmha.memory_efficient_attention is memory_efficient_attention and fmha is found.ops.fmha
        assert fmha.attn_bias.LowerTriangularMask is LowerTriangularMask is xformers.LowerTriangularMask
        q, k, v = unbind(torch.randn(2, 5, 3, 4, 8), 2)
        torch.testing.assert_close(
            memory_efficient_attention(q, k, v, LowerTriangularMask()), flash_attn.flash_attn_func(q, k, v, causal=True)
        )
        with pytest.raises(ImportError, match="SwiGLU"):
            from xformers.ops import SwiGLU  # noqa: F401
        assert importlib.metadata.version("xformers") == found.__version__


def test_several_and_twice() -> None:
    outer = compat.install("xformers", "flash_attn", "xformers")
    with compat.install("flash_attn"):  # nothing is left to do, nor to undo
        pass
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func
    outer.undo()
    outer.undo()
    assert importlib.util.find_spec("xformers") is None


def test_what_is_installed_is_not_shadowed_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("flash_attn_func = 'theirs'")
    (tmp_path / "flash_attn" / "layers.py").write_text("")
    (tmp_path / "flash_attn-2.7.4.dist-info").mkdir()
    (tmp_path / "flash_attn-2.7.4.dist-info" / "METADATA").write_text("Name: flash-attn\nVersion: 2.7.4\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        said = (
            r"^packages has 'flash_attn', which is installed here \(flash-attn 2.7.4\); with replace=True imports find"
        )
        with pytest.raises(ValueError, match=said):
            compat.install("flash_attn")
        theirs = importlib.import_module("flash_attn.layers") and sys.modules["flash_attn"]
        with compat.install("flash_attn", replace=True):
            assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func
            assert importlib.metadata.version("flash_attn").startswith("2.8")
            assert "flash_attn.layers" not in sys.modules
        assert sys.modules["flash_attn"] is theirs and "flash_attn.layers" in sys.modules
        assert importlib.metadata.version("flash_attn") == "2.7.4"
        for name in ("flash_attn", "flash_attn.layers"):
            del sys.modules[name]
    importlib.invalidate_caches()
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))  # somebody's stand-in
    with pytest.raises(ValueError, match=r"^packages has 'xformers', which is installed here; with replace=True"):
        compat.install("xformers")


def test_names() -> None:
    known = "'flash_attn', 'flash_attn_interface', 'flash_mla', 'xformers'"
    with pytest.raises(ValueError, match=f"^packages has 'flash-attn'; it must be one or more of {known}$"):
        compat.install("flash-attn")
    with pytest.raises(ValueError, match=f"^packages is empty; it must be one or more of {known}$"):
        compat.install()


@pytest.mark.slow
def test_diffusers_and_transformers_find_them() -> None:
    """With all the checks that they make: find_spec, versions, distributions, names that they import."""
    for name in ("diffusers", "transformers"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} is not there")
    code = """if True:
        import cupyflash.compat, torch
        cupyflash.compat.install("flash_attn", "flash_attn_interface", "xformers")
        from diffusers.models import attention_dispatch as d
        from transformers import modeling_flash_attention_utils as t
        from transformers.utils import import_utils
        assert d._CAN_USE_FLASH_ATTN and d._CAN_USE_FLASH_ATTN_3 and d._CAN_USE_XFORMERS_ATTN
        q = torch.randn(2, 5, 4, 8)
        expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
        for backend in ("flash", "xformers"):
            torch.testing.assert_close(d.dispatch_attention_fn(q, q, q, backend=backend), expected)
        torch.testing.assert_close(d.flash_attn_3_func(q, q, q), expected)
        for version in (2, 3):
            assert t.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]["pkg_availability_check"]()
        import_utils.is_torch_cuda_available = lambda: True
        assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
        assert import_utils.is_flash_attn_greater_or_equal("2.4.1")
        given = dict(is_causal=True, sliding_window=2, attn_implementation="flash_attention_2")
        out = t._flash_attention_forward(q, q, q, None, 5, **given)
        torch.testing.assert_close(out, t._flash_fn(q, q, q, causal=True, window_size=(1, 1)))
        mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        out = t._flash_attention_forward(q, q, q, mask, 5, is_causal=True, attn_implementation="flash_attention_2")
        torch.testing.assert_close(out[1, :3], t._flash_fn(*[q[1:, :3]] * 3, causal=True)[0])
        print("found")
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.stdout == "found\n", done.stderr


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 4), (3, 6, 2, 4)])
def test_padding(shape: tuple[int, ...]) -> None:
    """Rows without padding, and back."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    rows, indices, ends, longest, used = bert_padding.unpad_input(x, mask)
    assert rows.shape == (7, *shape[2:]) and torch.equal(rows, x[mask.bool()])
    assert (ends.tolist(), longest, used.tolist()) == ([0, 3, 7, 7], 4, [3, 4, 0])
    assert ends.dtype == used.dtype == torch.int32 and indices.dtype == torch.int64
    back = bert_padding.pad_input(rows, indices, 3, 6)
    kept = mask.bool().reshape(3, 6, *[1] * (len(shape) - 2))
    torch.testing.assert_close(back, torch.where(kept, x, 0))
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    torch.testing.assert_close(grad, torch.where(kept, 2 * x.detach(), 0.0))
    unused = torch.tensor([[0, 0, 0, 1, 0, 0], [0] * 6, [0] * 6])
    rows, _, ends, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert (len(rows), ends.tolist(), longest, used.tolist()) == (8, [0, 4, 8, 8], 4, [3, 4, 0])


def test_flash_attention_3_computes() -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
    given: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (3, -1), "softcap": 20.0}
    out, lse = flash_attn_interface.flash_attn_func(q, k, k, **given, return_attn_probs=True, num_splits=4)
    expected, rows, _ = flash_attn.flash_attn_func(q, k, k, **given, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(lse, rows)
    assert torch.equal(flash_attn_interface.flash_attn_func(q, k, k, **given), expected)
    for name, value in (("qv", q), ("attention_chunk", 4)):
        with pytest.raises(NotImplementedError, match=f"^{name} is .* not served"):
            flash_attn_interface.flash_attn_func(q, k, k, **{name: value})


def test_flash_attention_3_of_8_bits() -> None:
    """Scales are (batch, heads of keys)."""
    q, k = (torch.randn(2, n, h, 16).to(torch.float8_e4m3fn) for n, h in ((5, 4), (7, 2)))
    scales = {f"{x}_descale": torch.rand(2, 2) + 0.5 for x in "qkv"}
    found = flash_attn_interface.flash_attn_func(q, k, k, **scales).float()
    of = {name: x.repeat_interleave(2, 1)[:, :, None, None] for name, x in scales.items()}
    k_all = k.float().repeat_interleave(2, 2).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(1, 2) * of["q_descale"], k_all * of["k_descale"], k_all * of["v_descale"]
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
