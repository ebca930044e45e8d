"""The demo: its hand-written gradients, its training, and the whole command."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cupyflash.demo import beside, check, picture, screen, training
from cupyflash.demo.beside import Cell, Row
from cupyflash.demo.model import Config, Model
from cupyflash.demo.places import NumpyPlace, TorchPlace
from cupyflash.demo.text import standard_library
from cupyflash.demo.training import CPU, Recipe, generate, one_blas_thread, train
from cupyflash.tools import cli

TINY = Config(layers=2, width=16, heads=2, context=12)


def float64_model(seed: int) -> Model:
    """A tiny model in float64, all of whose weights are at work (a new one begins with its readout at zero)."""
    model = Model(replace(TINY, attention_dtype="float64"), seed=seed)
    model.flat = np.random.default_rng(seed).normal(0, 0.3, model.flat.size)
    model.weights = model.named(model.flat)
    model.rotary = tuple(table.astype(np.float64) for table in model.rotary)
    return model


def test_gradient_is_that_of_the_loss(rng: np.random.Generator) -> None:
    model = float64_model(int(rng.integers(1000)))
    tokens, targets = rng.integers(0, 256, (2, 3, 12))
    loss, gradient = model.gradient(tokens, targets)
    assert loss == pytest.approx(model.loss(tokens, targets), rel=1e-12)
    start = model.flat.copy()
    by_name = model.named(gradient)
    for name, part in model.named(direction := np.zeros_like(start)).items():  # each weight matrix by itself
        direction[:] = 0
        part[...] = rng.normal(size=part.shape)
        sides = []
        for step in (1e-6, -1e-6):
            model.flat[:] = start + step * direction
            sides.append(model.loss(tokens, targets))
        model.flat[:] = start
        slope = (sides[0] - sides[1]) / 2e-6
        assert slope == pytest.approx(float((by_name[name] * part).sum()), rel=1e-5, abs=1e-8), name


def test_untrained_model_knows_nothing(rng: np.random.Generator) -> None:
    tokens, targets = rng.integers(0, 256, (2, 3, 12))
    assert Model(TINY).loss(tokens, targets) == pytest.approx(np.log(256), rel=1e-5)


def test_model_sees_no_later_byte(rng: np.random.Generator) -> None:
    model = float64_model(1)
    tokens = rng.integers(0, 256, (1, 12))
    changed = tokens.copy()
    changed[0, 6:] = (tokens[0, 6:] + 1) % 256
    before, after = model.logits(tokens)[0], model.logits(changed)[0]
    np.testing.assert_allclose(before[0, :6], after[0, :6], rtol=1e-12)
    assert abs(before[0, 6:] - after[0, 6:]).max() > 1e-3


def test_training_lowers_the_loss() -> None:
    text = np.frombuffer(b"def attention(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 200, np.uint8)
    how = Recipe(replace(TINY, width=32, context=32), batch=4, rate=1e-2, seconds=600, steps=60)
    model = Model(how.config)
    with one_blas_thread():
        steps = list(train(model, text, how))
    assert [step.number for step in steps] == list(range(1, 61))
    assert steps[-1].done == 1 and steps[-1].tokens == 60 * 4 * 32
    assert steps[0].loss == pytest.approx(np.log(256), rel=1e-4)
    assert steps[-1].loss < 1.5
    (written,) = generate(model, [b"def attention("], length=32, temperature=0.2)
    assert written.startswith(b"def attention(") and len(written) == 32
    assert set(written) <= set(text.tolist())


def test_batch_in_parts_is_the_same_training(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    text = rng.integers(0, 256, 1000, dtype=np.uint8)
    how = Recipe(TINY, batch=4, rate=1e-3, seconds=600, steps=4)
    losses = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        losses.append([step.loss for step in train(Model(TINY), text, how)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("cores, parts", [(1, 1), (2, 2), (3, 2), (6, 4), (7, 4), (8, 8), (64, 8)])
def test_the_batch_is_spread_over_the_cores(cores: int, parts: int) -> None:
    assert training._parts(8, cores) == parts


def test_training_ends_by_the_clock(rng: np.random.Generator) -> None:
    text = rng.integers(0, 256, 1000, dtype=np.uint8)
    *_, last = train(Model(TINY), text, Recipe(TINY, batch=1, rate=1e-3, seconds=0.2))
    assert 0.2 <= last.seconds < 30 and last.done == 1


def test_generate_is_repeatable_and_keeps_the_prompts() -> None:
    model, prompts = float64_model(2), [b"a", b"longer"]
    first = generate(model, prompts, length=12, seed=5)
    assert first == generate(model, prompts, length=12, seed=5)
    assert first != generate(model, prompts, length=12, seed=6)
    assert all(text.startswith(prompt) and len(text) == 12 for text, prompt in zip(first, prompts))


def test_generate_goes_beyond_the_context() -> None:
    """Then the model sees what its context holds of the end."""
    model = float64_model(2)
    (text,) = generate(model, [b"ab"], length=40, seed=5)
    assert len(text) == 40 and text[:12] == generate(model, [b"ab"], length=12, seed=5)[0]
    seen = []
    real = model.logits
    model.logits = lambda tokens: seen.append(tokens.copy()) or real(tokens)
    generate(model, [text[:39]], length=40)
    assert seen[0].tolist() == [list(text[27:39])]


def test_text_is_the_standard_library() -> None:
    text = standard_library()
    assert text.files > 100 and text.train.size > 1_000_000
    assert 0.01 < text.held_out.size / text.train.size < 0.3
    assert b"import sys" in text.train.tobytes()


def test_text_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(FileNotFoundError, match="found 1 Python sources, 4 bytes, under"):
        standard_library(tmp_path)


def test_check_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    config = replace(TINY, context=64, width=64)
    model, tokens = Model(config), rng.integers(0, 256, (1, 64))
    checks, odds = check.check_layer(model, tokens, layer=1)
    assert [c.name for c in checks] == ["out", "dq", "dk", "dv"]
    assert all(c.passed for c in checks)
    assert odds.shape == (2, 64, 64)
    np.testing.assert_allclose(odds.sum(axis=-1), 1, rtol=1e-12)
    assert not np.triu(odds, 1).any()

    real = check.attention_backward
    monkeypatch.setattr(check, "attention_backward", lambda *a, **o: (g := real(*a, **o)) and (g[0], g[1] * 1.01, g[2]))
    assert [c.passed for c in check.check_layer(model, tokens, layer=1)[0]] == [True, True, False, True]
    monkeypatch.setattr(check, "attention_backward", lambda *a, **o: tuple(g * np.nan for g in real(*a, **o)))
    assert [c.passed for c in check.check_layer(model, tokens, layer=1)[0]] == [True, False, False, False]


def test_picture(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import image

    odds = np.zeros((2, 60, 60))
    odds[0, :, 0] = 1  # always at the first byte
    odds[1, np.arange(60), np.arange(60)] = 1  # always at itself
    rows = [
        Row(512, (Cell(1e-3, 10**6), Cell(2e-3, 10**7))),
        Row(1024, (Cell(None), Cell(None, 10**9, why="out of ..."))),
    ]
    lesson = picture.Lesson([5.0, 4.0, 3.0], [(0, 5.0), (3, 3.1)], odds, bytes(range(60)), layer=1)
    heights = []
    for free, of, said in ((None, None, ""), (10**8, lesson, "; loss; attention of layer 2, head 1 of 2")):
        shown = picture.draw(tmp_path / "a.png", rows, ["ours", "plain"], "Attention", free, of)
        assert shown == "time and memory by rows" + said
        pixels = image.imread(tmp_path / "a.png")
        assert pixels.shape[1] > 1000 and len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 50
        heights.append(len(pixels))
    assert heights[1] > 2 * heights[0]
    assert matplotlib.get_backend().lower() == "agg"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, and little time for them."""
    monkeypatch.setattr(beside, "MOST", 1024)
    monkeypatch.setattr(beside, "FARTHEST", 1024)
    monkeypatch.setattr(beside, "ENOUGH", 0.01)
    monkeypatch.setattr(screen, "SECONDS", 0.0)


def test_demo_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, short: None
) -> None:
    out = tmp_path / "demo.png"
    arguments = [
        "demo",
        "--train",
        "--steps",
        "25",
        "--seconds",
        "120",
        "--seed",
        "3",
        "--device",
        "cpu",
        "-o",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["cupyflash", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed = capsys.readouterr().out
    assert not exit_.value.code, printed
    first, last = map(float, re.search(r"([\d.]+) → ([\d.]+) nats per byte", printed).groups())
    assert first == pytest.approx(5.55, abs=0.01) and last < 3.8
    assert printed.count(" ok ") == 8 and "It writes" in printed
    assert out.read_bytes().startswith(b"\x89PNG")
    assert CPU.seconds < 60  # with what stands before and behind it, the whole lesson takes less than 90 s


def test_demo_in_a_log_of_another_encoding(tmp_path: Path) -> None:
    """It tells how it goes, in lines, and has a sign for what the encoding has not."""
    arguments = ["demo", "--train", "--steps", "12", "--device", "cpu", "-o", str(tmp_path / "[red]a.png")]
    code = (
        f"import sys; from cupyflash.demo import screen; from cupyflash.tools import cli; screen.SECONDS = 0.0; "
        f"sys.argv[1:] = {arguments}; cli.main()"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=300, env=environment)
    printed = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^ *\d+%  step \d+  loss [\d.]+", printed, re.MULTILINE)) >= 8
    assert "Picture:" in printed and "[red]a.png" in printed


@pytest.mark.parametrize("width", [40, 80, 120])
def test_demo_fits_the_terminal(width: int, tmp_path: Path, short: None) -> None:
    """Whole numbers in the tables, and no line is cut."""
    told = io.StringIO()
    console = Console(file=told, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    assert screen.run(np, Recipe(TINY, batch=4, rate=1e-2, seconds=600, steps=10), tmp_path / "a.png", console)
    text = told.getvalue()
    assert len(re.findall(r"^(?:out|dq|dk|dv) +(?:\d\.\d\de-\d\d +){3}ok", text, re.MULTILINE)) == 8
    assert re.search(r"100% step 10  loss \d\.\d{3}  [\d.,]+ kB/s", text.replace("\r", "\n"))
    assert "…" not in text
    cost, _, rest = text.partition("Gradients beside float64")
    assert rest and max(map(len, cost.splitlines())) <= width
    assert re.search(r"^ +512 +[\d.]+ [mµ]?s +[\d.]+ [KM]iB +[\d.]+ [mµ]?s +[\d.]+ [KM]iB", cost, re.MULTILINE)
    assert ("less memory" in cost) == (width >= 80)
    assert cost.count("out of memory: ") == 1  # the row in which plain attention ends
    assert re.search(r"results differ\s+by\s+\d\.\de-07\s+at\s+most", cost)


def test_the_table_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is there as soon as it is measured, before the next one is."""
    told, seen = io.StringIO(), []

    def slow(*given: Any) -> Any:
        for cell in (Cell(0.25, 2**20), Cell(0.5, 2**30, difference=1e-7)):
            seen.append(told.getvalue())
            yield 512, cell
        seen.append(told.getvalue())

    monkeypatch.setattr(screen, "measure", slow)
    place = NumpyPlace()
    screen._beside(place, beside.ours_and_plain(place), Console(file=told, width=80), 1.0)
    assert seen[0].endswith("less memory\n") and seen[1].endswith("\n    512    250 ms     1 MiB")
    assert seen[2].endswith("    500 ms     1 GiB     2.0x        1,024x\n")


def test_demo_says_first_that_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    monkeypatch.setattr(sys, "argv", ["cupyflash", "demo", "-o", str(tmp_path / "a.png")])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2 and "a.png, which cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_beside_pytorch(width: int, short: None) -> None:
    """As on a GPU, where five columns fit into 80."""
    torch = pytest.importorskip("torch")
    place = TorchPlace("cpu")
    ways = beside.of_pytorch(place)
    told = io.StringIO()
    screen._times(place, ways, Console(file=told, width=width), 60.0)
    text = told.getvalue()
    assert f"Beside PyTorch {torch.__version__}, scaled_dot_product_attention" in " ".join(text.split())
    assert re.search(r"^ +rows +cupyflash .*math$", text, re.MULTILINE)
    cells = r" +[\d.]+ [mµ]?s" * len(ways)
    assert re.search(rf"^ +512{cells}\n  1,024{cells}$", text, re.MULTILINE), text
    assert max(map(len, text.splitlines())) <= width and 7 + 12 * 5 <= 80


@pytest.mark.parametrize("name", ["steps", "seconds"])
def test_what_goes_with_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["cupyflash", "demo", f"--{name}", "5"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2 and f"--{name} is 5; it goes with --train" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["picture.jpg", "missing/picture.png"])
def test_demo_says_where_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, where: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["cupyflash", "demo", "-o", str(tmp_path / where)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "it must be a .png file in a folder that exists" in capsys.readouterr().err


@pytest.mark.gpu
def test_demo_model_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    text = standard_library(limit=2_000_000)
    config = Config(layers=2, width=128, heads=2, context=256, attention_dtype="float16")
    how = Recipe(config, batch=8, rate=4e-3, seconds=600, steps=60)
    model = Model(config, cupy)
    losses = [step.loss for step in train(model, text.train, how)]
    assert losses[0] == pytest.approx(np.log(256), rel=1e-3) and np.mean(losses[-10:]) < 3.2
    checks, _ = check.check_layer(model, cupy.asarray(text.held_out[None, :256].astype(np.int32)), layer=1)
    assert all(c.passed for c in checks), checks
    assert len(generate(model, [b"import "], length=64)[0]) == 64
