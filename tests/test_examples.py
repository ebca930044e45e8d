"""The examples, at sizes that a test can afford."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernel_regression_on_a_gpu(dtype: str) -> None:
    small = ["--points", "20000", "--queries", "2000", "--device", "gpu"]
    result = load("kernel_regression").main(small + ["--float64"] * (dtype == "float64"))
    assert result["last"] < 0.2 * result["first"]
    assert result["difference"] < (1e-11 if dtype == "float64" else 1e-4)
    assert result["gradient"] < (1e-5 if dtype == "float64" else 1e-1)  # against a difference quotient


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.py")))
def test_help(name: str) -> None:
    command = [sys.executable, FOLDER / name, "--help"]
    for library in {"train_gpt.py": ["torch"], "torch_module.py": ["torch"], "jax_training.py": ["jax"]}.get(name, []):
        pytest.importorskip(library)
    if name == "transformers_model.py":
        pytest.importorskip("transformers")
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


def test_jax_training(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    losses = load("jax_training").main(["--steps", "50"])
    assert losses[0] > 1.4 and losses[-1] < 0.7
    assert "step   50  loss" in capsys.readouterr().out


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
