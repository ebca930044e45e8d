"""The examples, at sizes that a test can afford."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

NEEDS = {
    "train_gpt.py": ["torch"], "torch_module.py": ["torch"], "relative_positions.py": ["torch"],
    "from_flex_attention.py": ["torch"], "jax_training.py": ["jax"], "transformers_model.py": ["transformers"],
    "flax_attention.py": ["flax"], "equinox_attention.py": ["equinox", "optax"], "meanflow.py": ["torch"],
    "forces.py": ["torch"], "parallel_gpt.py": ["torch"], "parallel_jax.py": ["jax"],
}  # fmt: skip
FOLDER = Path(__file__).resolve().parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernel_regression(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    small = ["--points", "1500", "--queries", "400", "--steps", "15", "--device", "cpu", "--plot", str(plot)]
    result = load("kernel_regression").main(small + ["--float64"] * (dtype == "float64"))
    assert result["last"] < 0.2 * result["first"]
    assert result["rms"] < 0.12
    assert result["difference"] < (1e-11 if dtype == "float64" else 1e-4)
    assert result["gradient"] < (1e-5 if dtype == "float64" else 1e-2)
    assert f"1,500 samples, 400 queries, {dtype}" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_relative_positions(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    result = load("relative_positions").main(["--steps", "60", "--device", "cpu"])
    assert result["last"] < 0.01 * result["first"] and result["peaks"]
    assert "each head looks back by [3, 3]" in capsys.readouterr().out


def test_from_flex_attention(capsys: pytest.CaptureFixture[str]) -> None:
    """What FlexAttention's pages show: written for it, and with options."""
    pytest.importorskip("torch.nn.attention.flex_attention")
    found = load("from_flex_attention").main(["--device", "cpu"])
    named = ("ALiBi", "soft cap", "documents", "prefix LM", "sliding window with sinks", "T5", "neighbourhoods")
    assert len(found) == len(named) and all(x.startswith(y) for x, y in zip(found, named))
    assert max(found.values()) < 1e-5
    assert "alibi_slopes" in capsys.readouterr().out


def test_kernel_regression_is_the_formula(rng: np.random.Generator) -> None:
    example = load("kernel_regression")
    x, y, z = rng.normal(size=(7, 2)), rng.normal(size=(31, 2)), rng.normal(size=(31, 3))
    h = np.array([0.3, 2.0])
    by_hand = np.empty((7, 3))
    for i in range(7):
        w = np.exp(-0.5 * (((x[i] - y) / h) ** 2).sum(axis=1))
        by_hand[i] = (w[:, None] * z).sum(axis=0) / w.sum()
    np.testing.assert_allclose(example.estimate(np, x, y, z, h), by_hand, rtol=1e-9)
    np.testing.assert_allclose(example.direct(x, y, z, h), by_hand, rtol=1e-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_non_local_means(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The formula, and an image whose noise goes."""
    example = load("non_local_means")
    plot = tmp_path / "plot.png"
    errors = example.main(["--size", "48", "--device", device, "--plot", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert errors["denoised"] < 0.7 * errors["noisy"]
    assert "2,304 pixels" in capsys.readouterr().out
    image = example.picture(12) + np.random.default_rng(0).random((12, 12, 3), dtype=np.float32)
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="reflect")
    patches = np.array([padded[i : i + 3, j : j + 3].ravel() for i in range(12) for j in range(12)], float)
    weights = np.exp(-(((patches[:, None] - patches) ** 2).mean(-1)) / 0.25)
    by_hand = (weights @ image.reshape(-1, 3)) / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(example.denoise(image, 0.5, radius=1).reshape(-1, 3), by_hand, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_cupy_devices(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("cupy_devices").main(["--batch", "7", "--length", "40", "--device", device]) < 1e-5
    assert "7 x 40 queries on" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernel_regression_on_a_gpu(dtype: str) -> None:
    small = ["--points", "20000", "--queries", "2000", "--device", "gpu"]
    result = load("kernel_regression").main(small + ["--float64"] * (dtype == "float64"))
    assert result["last"] < 0.2 * result["first"]
    assert result["difference"] < (1e-11 if dtype == "float64" else 1e-4)
    assert result["gradient"] < (1e-5 if dtype == "float64" else 1e-1)  # against a difference quotient


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_library_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("torch", "jax", "transformers", "flax", "equinox"):
        monkeypatch.setitem(sys.modules, needed, None)
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(SystemExit, match=r"run pip install (torch|jax)"):
        load(name.removesuffix(".py"))


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py")))
def test_help(name: str) -> None:
    command = [sys.executable, FOLDER / name, "--help"]
    for library in NEEDS.get(name, []):
        pytest.importorskip(library)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "usage:" in done.stdout
    assert name not in ("train_bytes.py", "train_gpt.py") or ("--device" in done.stdout and "--steps" in done.stdout)


def test_train_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    losses = load("train_bytes").main(steps=20, device="cpu")
    assert len(losses) == 20
    assert losses[0] == pytest.approx(np.log(256), rel=1e-4) and losses[-1] < 4.5
    assert "import " in capsys.readouterr().out


def test_torch_module(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    example = load("torch_module")
    losses = example.main(["--steps", "40", "--device", "cpu"])
    assert losses[0] > 2.5 and losses[-1] < 0.5
    assert "step   40  loss" in capsys.readouterr().out
    assert example.difference_from_pytorch("cpu") < 1e-5


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of PyTorch, whose threads wait for each other at every small operation."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_meanflow(one_thread: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    result = load("meanflow").main(["--steps", "40", "--device", "cpu", "--plot", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result["first"] > 1.5 and result["last"] < 0.8 and result["sample"] < 0.8 * result["noise"]
    assert "after 40 steps" in capsys.readouterr().out


def test_forces(one_thread: None, capsys: pytest.CaptureFixture[str]) -> None:
    result = load("forces").main(["--steps", "60", "--device", "cpu"])
    assert result["first"] > 0.9 and result["last"] < 0.15
    assert "after 60 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_parallel_gpt(one_thread: None) -> None:
    """Two processes have the losses of one."""
    pytest.importorskip("torch")
    small = [str(FOLDER / "parallel_gpt.py"), "--steps", "6", "--length", "64", "--width", "32"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = [
        subprocess.run([sys.executable, *how, *small], capture_output=True, text=True, check=True, timeout=300).stdout
        for how in ([], launcher)
    ]
    one, two = (re.findall(r"loss ([\d.]+)", x) for x in said)
    assert len(one) == 2 and float(one[1]) < float(one[0])
    np.testing.assert_allclose([float(x) for x in two], [float(x) for x in one], atol=1e-4)


@pytest.mark.slow
def test_parallel_jax() -> None:
    """Two devices have the losses of one. (In a process of its own: as many are there only where it says so first.)"""
    pytest.importorskip("jax")
    small = ["--steps", "6", "--length", "64", "--width", "32", "--batch", "2"]
    command = [sys.executable, str(FOLDER / "parallel_jax.py"), *small]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    over, one = (re.findall(pattern, said) for pattern in (r"loss ([\d.]+)", r"devices, ([\d.]+)"))
    assert len(one) == 3 and float(one[-1]) < float(one[0])
    np.testing.assert_allclose([float(x) for x in over], [float(x) for x in one], atol=1e-4)


def test_parallel_cupy(capsys: pytest.CaptureFixture[str]) -> None:
    """The bandwidths that are learned from all samples, over GPUs or simulated ranks."""
    errors, h = load("parallel_cupy").main(["--points", "1500", "--queries", "400", "--steps", "10"])
    assert errors[-1] < 0.1 * errors[0] and h[0] < h[1] < h[2]
    assert "1,500 samples, 400 queries, float64" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_serve(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are those of the model alone, also where pages run out; lines in a pipe too."""
    example = load("serve")
    for pages, most in ((60, 64), (12, 24)):
        found = example.main(["--requests", "9", "--pages", str(pages), "--most", str(most), "--device", device])
        assert found["wrong"] == [] and found["reused"] > 0 and (found["put off"] > 0) == (pages == 12)
        said = capsys.readouterr().out
        assert "9 of 9 requests done, 0 running, " in said and "9 of 9 texts are those of the model alone" in said
        assert "\r" not in said
    server = example.Server(example.Llama(np), 2, 4, 8)
    with pytest.raises(ValueError, match="request 3 needs 3 pages; there are 2"):
        server.submit(example.Request(3, 0, [1] * 8, 1, 0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_shared_prefix(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("shared_prefix").main(["--questions", "3", "--device", device]) < 1e-5
    assert "2 x 3 sequences" in capsys.readouterr().out


def test_jax_training(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    losses = load("jax_training").main(["--steps", "50"])
    assert losses[0] > 1.4 and losses[-1] < 0.7
    assert "step   50  loss" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flax", "equinox"])
def test_layers_of_jax_libraries(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the same weights, the same losses as with the stock layer."""
    for library in NEEDS[f"{name}_attention.py"]:
        pytest.importorskip(library)
    losses = load(f"{name}_attention").main(["--steps", "50"])
    assert losses[name][0] > 2.4 and losses["cupyflash"][-1] < 0.1
    np.testing.assert_allclose(losses["cupyflash"], losses[name], rtol=1e-2, atol=1e-4)
    assert "step   50  " in capsys.readouterr().out


@pytest.mark.slow
def test_flax_layer() -> None:
    """Masks, biases, more axes of batches, decoding, and dropout by Flax's generators."""
    pytest.importorskip("flax")
    import jax
    from flax import nnx

    from cupyflash.integrations.flax import attention_fn as attend

    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 3, 5, 4, 8))
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 3, 4, 5, 5)).at[..., 0].set(True)
    bias = jax.random.normal(jax.random.key(2), (2, 3, 4, 5, 5))
    for options in ({}, {"mask": mask}, {"bias": bias, "mask": mask, "is_causal": True}):
        np.testing.assert_allclose(attend(q, k, v, **options), nnx.dot_product_attention(q, k, v, **options), atol=1e-5)
    with pytest.raises(NotImplementedError, match="^sow_weights is True and dropout_rate is 0.1"):
        attend(q, k, v, module=nnx.Linear(1, 1, rngs=nnx.Rngs(0)), dropout_rate=0.1)
    kept = []
    for f in (attend, nnx.dot_product_attention):
        module = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        f(q, k, v, mask=mask, module=module)
        kept.append(nnx.state(module, nnx.Intermediate)["attention_weights"][0])
    np.testing.assert_allclose(*kept, atol=1e-6)
    x = jax.random.normal(jax.random.key(3), (2, 6, 16))
    layers = [
        nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), num_kv_heads=2, attention_fn=f)
        for f in (attend, nnx.dot_product_attention)
    ]
    for layer in layers:
        layer.init_cache(x.shape)
    for i in range(2):
        np.testing.assert_allclose(*(layer(x[:, i : i + 1], decode=True) for layer in layers), atol=1e-5)
    layer = nnx.MultiHeadAttention(4, 16, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0), attention_fn=attend)
    one, same, other = (layer(x, deterministic=False, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any()


def test_flax_masks_of_several_axes_of_batches() -> None:
    pytest.importorskip("flax")
    import jax
    from flax import nnx

    from cupyflash.integrations.flax import attention_fn as attend

    q = jax.random.normal(jax.random.key(0), (2, 3, 5, 1, 4))
    mask = jax.random.bernoulli(jax.random.key(1), 0.5, (2, 3, 1, 5, 5)).at[..., 0].set(True)
    bias = jax.random.normal(jax.random.key(2), (2, 3, 1, 5, 5))
    for at in (np.s_[:1], np.s_[:, :1], np.s_[:1, :1]):
        for name, x in (("mask", mask), ("bias", bias)):
            wanted = nnx.dot_product_attention(q, q, q, **{name: np.broadcast_to(x[at], x.shape)})
            np.testing.assert_allclose(attend(q, q, q, **{name: x[at]}, deterministic=True), wanted, atol=1e-5)
    np.testing.assert_array_equal(attend(q, q, q, mask=mask[0]), attend(q, q, q, mask=mask[:1]))
    for name, x in (("mask", mask[:, :2]), ("bias", bias[:, :2])):
        message = rf"^{name} has shape \(2, 2, 1, 5, 5\); before its last three axes it must have \(2, 3\), or 1"
        with pytest.raises(ValueError, match=message):
            attend(q, q, q, **{name: x})


@pytest.mark.slow
def test_equinox_layer() -> None:
    """Called as the stock layer is."""
    eqx = pytest.importorskip("equinox")
    pytest.importorskip("optax")
    import jax

    layer = load("equinox_attention").MultiheadAttention
    options = {
        "use_query_bias": True,
        "use_output_bias": True,
        "qk_size": 6,
        "vo_size": 10,
        "key_size": 12,
        "value_size": 14,
    }
    ours, stock = (kind(4, 16, **options, key=jax.random.key(0)) for kind in (layer, eqx.nn.MultiheadAttention))
    x = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((5, 16), (7, 12), (7, 14)))]
    for shape in ((5, 7), (4, 5, 7)):
        mask = jax.random.bernoulli(jax.random.key(3), 0.7, shape).at[..., 0].set(True)
        np.testing.assert_allclose(ours(*x, mask), stock(*x, mask), atol=1e-5)
    turned = {"process_heads": lambda q, k, v: (q * 2, k, v)}
    np.testing.assert_allclose(ours(*x, **turned), stock(*x, **turned), atol=1e-5)
    drops = layer(4, 16, dropout_p=0.5, key=jax.random.key(0))
    one, same, other = (drops(x[0], x[0], x[0], key=jax.random.key(seed)) for seed in (1, 1, 2))
    assert (one == same).all() and (one != other).any()
    assert (drops(x[0], x[0], x[0], inference=True) == eqx.nn.inference_mode(drops)(x[0], x[0], x[0])).all()
    with pytest.raises(RuntimeError, match="^key is None; dropout needs one"):
        drops(x[0], x[0], x[0])


def test_transformers_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from cupyflash import api

    example, calls = load("transformers_model"), []
    real = api.attention
    monkeypatch.setattr(api, "attention", lambda *a, **o: calls.append(a[0].shape) or real(*a, **o))
    differences = example.main(["--device", "cpu"])
    assert differences["scores"] < 1e-5 and differences["gradients"] < 1e-4 and not differences["tokens"]
    assert set(calls) == {(3, 4, 20, 16), (3, 4, 1, 16)}  # all at once, and token by token
    assert "'tokens': 0" in capsys.readouterr().out
