"""The command line, and `explain`, whose command it is."""

from __future__ import annotations

import errno
import importlib.abc
import re
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import typer
from criterion import assert_as_good
from reference import DTYPES, draw, standard, standard_in_own_precision

import cupyflash
from cupyflash import bench
from cupyflash.arrays import array_module
from cupyflash.bench.__main__ import main as bench_main
from cupyflash.bench.suites import SUITES
from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.pip_line import pip_line
from cupyflash.problem import ARRAYS, OPTIONS
from cupyflash.rules import describe
from cupyflash.tools import cli, files, precompile
from cupyflash.tools.command_options import value as command_value
from cupyflash.tools.precompile import Done, Job, jobs
from cupyflash.tools.tables import KernelLines

X = np.ones((1, 3, 2, 4), np.float32)
SHAPE = X.shape
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CuPy, whatever this one has."""
    from cupyflash.gpu import device

    monkeypatch.setitem(sys.modules, "cupy", None)
    device.current.cache_clear()
    yield
    device.current.cache_clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compile cache of the test's own."""
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    compiler.compile_source.cache_clear()
    return tmp_path / "cache"


def tensors(rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
    return {"q": draw(rng, dtype, 2, 5, 4, 8), "k": draw(rng, dtype, 2, 7, 2, 8), "v": draw(rng, dtype, 2, 7, 2, 8)}


def problem_of(arrays: dict[str, np.ndarray], **options: object):
    from cupyflash.interop import numpy_

    return describe(*(numpy_.view(arrays[name]) for name in "qkv"), **options)


# ---- the entrance ---------------------------------------------------------------------------------------------------


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("demo", "attend", "explain", "info", "compile", "tune", "bench"):
        assert command in out


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_help_cuts_no_summary(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("--help")
    assert "..." not in out.partition("Commands:")[2] and max(map(len, out.splitlines())) <= columns
    assert "use the fastest from now on." in " ".join(out.split())
    for command in ("demo", "attend", "explain", "info", "compile", "tune", "bench"):
        _, out, _ = run(command, "--help")
        assert max(map(len, out.splitlines())) <= columns or columns < 80, command


def test_explain_fits_a_terminal(run: Run) -> None:
    """What kernels are compiled with is told where it is asked for."""
    asked = ("explain", "--shape", "2,8192,16,128", "--causal", "--arch", "sm_90a")
    for also in ((), ("--of", "backward")):
        _, out, _ = run(*asked, *also)
        assert "constants" not in out and max(map(len, out.splitlines())) <= 80
        _, told, _ = run(*asked, *also, "--verbose")
        extra = [line for line in told.splitlines() if line not in out.splitlines()]
        assert len(extra) == 1 and re.match(r"constants +DIM 128, .*STAGES 2", extra[0])
    found = cupyflash.explain((2, 8192, 16, 128), dtype="bf16", arch="sm_90a")
    assert "constants" not in str(found) and "constants" in dict(found.rows(verbose=True))


@pytest.mark.parametrize(
    ("missing", "module", "arguments"),
    [
        ("typer", "cupyflash", ["info"]),
        ("rich", "cupyflash", ["info"]),
        ("rich", "cupyflash.bench", ["cpu", "--quick"]),
        ("matplotlib", "cupyflash.bench", ["plot"]),
    ],
)
def test_missing_extra_is_a_message(missing: str, module: str, arguments: list[str]) -> None:
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments}; "
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    said = f"cupyflash: this command needs {missing}, which is not installed; run {pip_line('demo')}\n"
    assert done.stderr == said


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cupyflash {cupyflash.__version__}\n", "")


@pytest.mark.parametrize("command", ["attend", "explain", "tune", "compile"])
def test_every_row_of_the_tables_is_an_option(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    for row in (*OPTIONS, *ARRAYS):
        if (
            getattr(row, "written", True)
            and not (command == "attend" and getattr(row, "of_gradients", False))
            and (command, row.name)
            != (
                "compile",
                "layout",
            )
        ):
            assert f"--{row.name.replace('_', '-')}" in out, row.name
    flags = [line for line in out.splitlines() if line.strip().startswith(("--causal", "--deterministic", "--version"))]
    assert not [line for line in flags if "<" in line or "BOOL" in line]  # they take no value


def test_a_new_row_needs_no_change_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option and an array that are not there yet become options of a command by their rows alone."""
    from cupyflash.problem import ArrayRule, OptionRule
    from cupyflash.tools import command_options

    def check(cap: object) -> object:
        if not isinstance(cap, float):
            raise TypeError(f"soft_cap is {cap!r}; it must be a number")
        return cap

    cap = OptionRule("soft_cap", None, "Scores are bent below it.", check)
    bias = ArrayRule("tint", ("batch", "head", "query", "key"), ("q",), "tint", "added to a score")
    monkeypatch.setattr(command_options, "OPTIONS", (*OPTIONS, cap))
    monkeypatch.setattr(command_options, "ARRAYS", (*ARRAYS, bias))
    app, calls = typer.Typer(), []

    @app.command()
    @command_options.asked(files=True)
    def command(options: dict[str, object], arrays: dict[str, Path]) -> None:
        calls.append((options, arrays))

    app(["--soft-cap", "3.5", "--tint", "b.npy", "--top-left", "--window", "4,"], standalone_mode=False)
    assert calls == [
        ({"causal": "top_left", "window": (4, None), "layout": "bshd", "soft_cap": 3.5}, {"tint": Path("b.npy")})
    ]
    with pytest.raises(TypeError, match="soft_cap is 'high'; it must be a number"):
        app(["--soft-cap", "high"], standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-3,0", (-3, 0)), ("3,", (3, None)), (",3", (None, 3)), ("1e-3", 1e-3), ("bhsd", "bhsd"), ("", "")],
)
def test_values(text: str, value: object) -> None:
    assert command_value(text) == value


def test_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "nonsense"], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "No such command 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_traceback_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["cupyflash", "explain", "--shape", "a"])
    with pytest.raises(ValueError, match="--shape is 'a'"):
        cli.main()


# ---- attend ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_attend_one_file_each(run: Run, tmp_path: Path, rng: np.random.Generator, dtype: str, suffix: str) -> None:
    arrays = tensors(rng, dtype)
    for name, x in arrays.items():
        files.write(tmp_path / (name + suffix), {name: x})
    out = tmp_path / ("out" + suffix)
    given = [part for name in arrays for part in (f"--{name}", tmp_path / (name + suffix))]
    code, printed, err = run("attend", *given, "--causal", "--device", "cpu", "-o", out)
    assert (code, err) == (0, "")
    assert f"2x5x4x8 {dtype}" in printed
    problem = problem_of(arrays, causal=True)
    result = files.read(out)["out"]
    assert result.dtype == DTYPES[dtype]
    exact, own = (f(problem, *arrays.values()) for f in (standard, standard_in_own_precision))
    assert_as_good(np.array(result), exact.out, own.out)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_attend_all_in_one_file(run: Run, tmp_path: Path, rng: np.random.Generator, suffix: str) -> None:
    arrays = tensors(rng, "float32")
    key_mask = np.array([[True] * 4 + [False] * 3, [True] * 7])
    files.write(tmp_path / ("in" + suffix), arrays | {"key_mask": key_mask, "other": np.arange(3)})
    out = tmp_path / ("out" + suffix)
    code, _, err = run(
        "attend",
        "-i",
        tmp_path / ("in" + suffix),
        "--window",
        "2,",
        "--scale",
        "0.5",
        "--lse",
        "--device",
        "cpu",
        "-o",
        out,
    )
    assert (code, err) == (0, "")
    from cupyflash.interop import numpy_

    problem = problem_of(arrays, window=(2, None), scale=0.5, key_mask=numpy_.view(key_mask))
    exact, own = (f(problem, *arrays.values(), key_mask) for f in (standard, standard_in_own_precision))
    results = files.read(out)
    assert set(results) == {"out", "lse"}
    assert_as_good(results["out"], exact.out, own.out)
    assert_as_good(results["lse"], exact.lse, own.lse)


def test_attend_top_left_and_heads_first(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = tensors(rng, "float64")
    files.write(tmp_path / "in.npz", {name: x.transpose(0, 2, 1, 3) for name, x in arrays.items()})
    options = ("--top-left", "--layout", "bhsd", "--device", "cpu")
    code, _, err = run("attend", "-i", tmp_path / "in.npz", *options, "-o", tmp_path / "out.npy")
    assert (code, err) == (0, "")
    expected = cupyflash.attention(*arrays.values(), causal="top_left")
    result = np.load(tmp_path / "out.npy").transpose(0, 2, 1, 3)
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    assert abs(result - cupyflash.attention(*arrays.values(), causal=True)).max() > 0.01


def test_attend_takes_a_seed_as_a_number_or_a_file(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = tensors(rng, "float32")
    files.write(tmp_path / "in.npz", arrays | {"seed": np.int64(7)})
    np.save(tmp_path / "seed.npy", np.uint64(2**64 - 1))
    given = {(): 7, ("--seed", "0"): 0, ("--seed", 2**64 - 1): -1, ("--seed", tmp_path / "seed.npy"): -1}
    for option, seed in given.items():
        options = ("--dropout", "0.5", *option, "--device", "cpu", "--overwrite", "-o", tmp_path / "out.npy")
        code, _, err = run("attend", "-i", tmp_path / "in.npz", *options)
        assert (code, err) == (0, "")
        expected = cupyflash.attention(*arrays.values(), dropout=0.5, seed=seed)
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_attend_reads_arrays_of_a_score(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays, table, slopes = tensors(rng, "float32"), draw(rng, "float32", 4, 11), draw(rng, "float32", 4)
    files.write(tmp_path / "in.npz", arrays | {"other": slopes, "slopes": slopes})
    np.save(tmp_path / "t.npy", table)
    score = "s + table[h][j - i + 4] - slopes [h] * abs(j - i)"
    given = ("--score", score, "--score-array", f"table={tmp_path / 't.npy'}")
    given += ("--score-array", f"slopes={tmp_path / 'in.npz'}", "--device", "cpu")
    code, printed, err = run("attend", "-i", tmp_path / "in.npz", *given, "-o", tmp_path / "out.npy")
    assert (code, err) == (0, "") and "table    4x11 float32\nslopes   4 float32\n" in printed
    expected = cupyflash.attention(*arrays.values(), score=score, score_arrays={"table": table, "slopes": slopes})
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_bfloat16_files_of_others(tmp_path: Path) -> None:
    """A bfloat16 tensor that PyTorch wrote, and a bfloat16 .npy, which says V2."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    x = torch.randn(3, 4).to(torch.bfloat16)
    save_file({"x": x}, tmp_path / "x.safetensors")
    read = files.read(tmp_path / "x.safetensors")["x"]
    assert read.dtype == ml_dtypes.bfloat16
    np.save(tmp_path / "x.npy", read)
    for back in (read, files.read(tmp_path / "x.npy")["x"]):
        np.testing.assert_array_equal(back.astype(np.float32), x.float().numpy())


def test_a_bfloat16_that_others_cannot_read_is_told(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    for dtype, suffix, told in (
        ("bfloat16", ".npz", True),
        ("bfloat16", ".safetensors", False),
        ("float16", ".npz", False),
    ):
        files.write(tmp_path / f"in{suffix}", tensors(rng, dtype))
        out = tmp_path / f"out-{dtype}{suffix}"
        code, printed, _ = run("attend", "--device", "cpu", "-i", tmp_path / f"in{suffix}", "--overwrite", "-o", out)
        assert code == 0 and (f"note: {suffix} has no bfloat16; others read two bytes" in printed) == told


def test_attend_errors_are_one_line(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = tensors(rng, "float32")
    good, out = tmp_path / "in.npz", tmp_path / "out.npz"
    files.write(good, arrays)
    files.write(tmp_path / "qk.npz", {name: arrays[name] for name in "qk"})
    files.write(tmp_path / "int.npy", {"v": np.arange(8)})
    np.savez(tmp_path / "names.npz", query=arrays["q"], key=arrays["k"])
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "many.npz", **{f"a{i}": np.zeros(1) for i in range(100)})
    (tmp_path / "dir.npz").mkdir()
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("bad.npz", "bad.npy", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"this is no array")
    (tmp_path / "link.npz").symlink_to(good)
    before = good.read_bytes()
    cases: list[tuple[list[object], str]] = [
        (["-i", tmp_path / "none.npz"], "none.npz does not exist"),
        (["-i", tmp_path], "is a folder; it must be a file that ends in .npy, .npz, .safetensors"),
        (["-i", "."], ". is a folder; it must be a file that ends in"),
        (["-i", tmp_path / "names.npz"], "names.npz, which holds query, key; give --q, --k and --v"),
        (["-i", tmp_path / "empty.npz"], "empty.npz, which holds no array; give --q"),
        (["--q", tmp_path / "empty.npz"], "empty.npz holds no array, but no q"),
        (["-i", tmp_path / "qk.npz"], "no v in"),
        ([], "no q and no k and no v; give --q, --k and --v, or --input with all three"),
        (["--q", good, "--k", good, "--v", tmp_path / "int.npy"], "v has "),
        (["--q", good, "--k", good, "--v", tmp_path / "qk.npz"], "--v: "),
        (["-i", good, "--k", good], "in.npz; give --q, --k and --v, or --input"),
        (["-i", good, "-o", good], "in.npz, the file that --input reads; it must be another"),
        (["--q", good, "--k", good, "--v", good, "-o", tmp_path / "link.npz"], "link.npz, the file that --q reads"),
        (["-i", good, "--key-mask", tmp_path / "int.npy", "-o", tmp_path / "int.npy"], "that --key-mask reads"),
        (["-i", tmp_path / "bad.npz"], "bad.npz cannot be read as .npz"),
        (["-i", tmp_path / "bad.safetensors"], "bad.safetensors cannot be read as .safetensors"),
        (["--q", tmp_path / "bad.npy"], "bad.npy cannot be read as .npy"),
        (["--q", tmp_path / "object.npy"], "object.npy cannot be read as .npy"),
        (
            ["-i", good, "--window", "3"],
            "--window is '3'; it must be LEFT,RIGHT, numbers of keys, empty where there is no",
        ),
        (["-i", good, "--window", "None,0"], "--window is 'None,0'; it must be LEFT,RIGHT"),
        (["-i", good, "--window", "(3,0)"], "--window is '(3,0)'; it must be LEFT,RIGHT"),
        (["-i", good, "--scale", "large"], "scale is 'large'; it must be a real number"),
        (["-i", good, "--window", "-1,0"], "window's left bound is -1"),
        (["-i", good, "--layout", "bhds"], "layout is 'bhds'"),
        (["-i", good, "--device", "tpu"], "device is 'tpu'; it must be 'cpu' or 'gpu'"),
        (["-i", good, "-o", tmp_path / "out.txt"], "out.txt ends in '.txt'"),
        (["-i", good, "-o", tmp_path / "out.npy", "--lse"], "with --lse there are two arrays"),
        (["-i", good, "-o", tmp_path / "no" / "out.npz"], "out.npz; it must be a file in a folder that exists"),
        (["-i", good, "-o", tmp_path / "dir.npz", "--overwrite"], "dir.npz; it must be a file in a folder that exists"),
        (
            ["-i", tmp_path / "many.npz"],
            "many.npz, which holds a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 and 90 more; give",
        ),
    ]
    for arguments, message in cases:
        given = arguments if "-o" in arguments else [*arguments, "-o", out]
        code, _, err = run("attend", "--device", "cpu", *given)
        assert code == 2, (arguments, err)
        assert err.startswith("cupyflash: "), arguments
        assert message in err, arguments
        assert err.count("\n") == 1, err
        assert not out.exists()
    assert good.read_bytes() == before


def header(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """The start of an .npy file."""
    size = len(text) + 1
    return (
        b"\x93NUMPY" + bytes(version) + size.to_bytes(2 if version == (1, 0) else 4, "little") + text.encode() + b"\n"
    )


PLAIN = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}".format
HOSTILE = {
    "more than there is": header(PLAIN("<f4", "(1000000000000,)")) + bytes(16),
    "overflow": header(PLAIN("<f4", f"({2**62}, {2**62})")) + bytes(16),
    "huge": header(PLAIN("<f4", f"({2**80},)")) + bytes(16),
    "negative": header(PLAIN("<f4", "(-1,)")) + bytes(16),
    "objects": header(PLAIN("|O", "(1,)")) + bytes(16),
    "elements of nothing": header(PLAIN("|S0", "(1000000000000000,)")) + bytes(16),
    "nested": header("(" * 4000) + bytes(16),
    "signs": header("-" * 9000 + "1") + bytes(16),
    "open": header("{'descr': '<f4', 'shape") + bytes(16),
    "long": header(" " * 20000, (2, 0)) + bytes(16),
    "version": header(PLAIN("<f4", "(4,)"), (9, 9)) + bytes(16),
    "empty": b"",
    "text": b"this is no array",
}


@pytest.mark.parametrize("what", list(HOSTILE))
@pytest.mark.parametrize("kind", [".npy", ".npz"])
def test_hostile_arrays_are_one_line(run: Run, tmp_path: Path, kind: str, what: str) -> None:
    path, out = tmp_path / f"q{kind}", tmp_path / "out.npy"
    if kind == ".npy":
        path.write_bytes(HOSTILE[what])
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("q.npy", HOSTILE[what])
    code, printed, err = run("attend", "--q", path, "--k", path, "--v", path, "--device", "cpu", "-o", out)
    assert (code, printed) == (2, "")
    assert err.startswith(f"cupyflash: --q: {path} cannot be read as {kind}: ") and err.count("\n") == 1
    assert "allow_pickle" not in err and len(err) < 600
    assert not out.exists()


def test_hostile_archives_are_one_line(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    arrays = tensors(rng, "float32")
    path, out = tmp_path / "in.npz", tmp_path / "out.npy"
    np.savez_compressed(path, **arrays)
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        first = archive.infolist()[0]
    bad = {}
    data = first.header_offset + 30 + len(first.filename) + 20  # of the first member, past its header
    bad["deflate"] = whole[:data] + b"\xff" * 40 + whole[data + 40 :]
    bad["cut"] = whole[: len(whole) // 2]
    central = whole.index(b"PK\1\2")
    for name, field, new in (("method", 10, b"\x63\0"), ("encrypted", 8, b"\1\0"), ("size", 24, b"\xff\xff\xff\x7f")):
        bad[name] = whole[: central + field] + new + whole[central + field + len(new) :]
    for name, content in bad.items():
        path.write_bytes(content)
        code, printed, err = run("attend", "-i", path, "--device", "cpu", "-o", out)
        assert (code, printed) == (2, ""), name
        assert err.startswith(f"cupyflash: {path} cannot be read as .npz: ") and err.count("\n") == 1, (name, err)
    assert "more than can be in a file of" in err  # the last: 2 GiB in a few bytes


def test_what_is_not_asked_for_is_not_read(run: Run, tmp_path: Path, rng: np.random.Generator) -> None:
    """A bomb beside the arrays stays unlit."""
    np.savez_compressed(tmp_path / "in.npz", **tensors(rng, "float32"))
    with zipfile.ZipFile(tmp_path / "in.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", HOSTILE["objects"])
        with archive.open("large.npy", "w") as member:
            member.write(header(PLAIN("<f4", "(67108864,)")))
            for _ in range(256):
                member.write(bytes(1 << 20))
    tracemalloc.start()
    code, _, err = run("attend", "-i", tmp_path / "in.npz", "--device", "cpu", "-o", tmp_path / "out.npy")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (code, err) == (0, "") and peak < 100 << 20


def test_too_large_for_memory_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*given: object, **options: object) -> None:
        raise MemoryError

    np.save(tmp_path / "q.npy", np.ones((4, 4), np.float32))
    monkeypatch.setattr(np, "load", none_left)
    code, _, err = run("attend", *(x for n in "qkv" for x in (f"--{n}", tmp_path / "q.npy")), "-o", tmp_path / "o.npy")
    assert code == 2 and "q.npy cannot be read as .npy: there is not enough memory for its arrays" in err


# ---- the output -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_an_output_that_exists_is_replaced_on_request(
    run: Run, tmp_path: Path, rng: np.random.Generator, suffix: str
) -> None:
    files.write(tmp_path / "in.npz", tensors(rng, "float32"))
    out = tmp_path / f"out{suffix}"
    out.write_bytes(b"precious")
    given = ("attend", "-i", tmp_path / "in.npz", "--device", "cpu", "-o", out)
    code, _, err = run(*given)
    assert code == 2 and f"--output is {out}, which exists; --overwrite replaces it" in err
    assert out.read_bytes() == b"precious"
    assert run(*given, "--overwrite")[0] == 0
    assert files.read(out)["out"].shape == (2, 5, 4, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npz", out.name]


@pytest.mark.parametrize("suffix", files.SUFFIXES)
@pytest.mark.parametrize("how", [OSError("no space left"), KeyboardInterrupt()])
def test_an_output_outlives_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str, how: BaseException
) -> None:
    """Half of the new file is written when it happens."""
    import safetensors.numpy

    def fail(file: object, *given: object, **named: object) -> None:
        if hasattr(file, "write"):
            file.write(b"half")
        raise how

    for module, name in ((np, "save"), (np, "savez"), (safetensors.numpy, "save")):
        monkeypatch.setattr(module, name, fail)
    out = tmp_path / f"out{suffix}"
    out.write_bytes(b"precious")
    with pytest.raises(type(how)):
        files.write(out, {"out": np.ones(3)})
    assert out.read_bytes() == b"precious" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_processes_of_one_number_write_one_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suffix: str) -> None:
    """Two containers on one volume: each writes a whole file, and the later one stays."""
    import safetensors.numpy

    out, inner = tmp_path / f"out{suffix}", []

    def while_another_writes(plain: Any) -> Any:
        def save(*given: Any, **named: Any) -> Any:
            if not inner:
                inner.append(None)
                files.write(out, {"out": np.zeros(3)})
            return plain(*given, **named)

        return save

    for module, name in ((np, "save"), (np, "savez"), (safetensors.numpy, "save")):
        monkeypatch.setattr(module, name, while_another_writes(getattr(module, name)))
    files.write(out, {"out": np.ones(3)})
    assert inner and list(tmp_path.iterdir()) == [out]
    (found,) = files.read(out).values()
    assert (found == 1).all()


def test_an_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    out = tmp_path / "out.npy"
    out.symlink_to(tmp_path / "there" / "real.npy")
    files.write(out, {"out": np.ones(3)})
    assert out.is_symlink() and np.load(tmp_path / "there" / "real.npy").sum() == 3


@pytest.mark.parametrize("name", ["[bold red]x.npz", "[/].npz", "[link=x]"])
def test_names_are_printed_as_they_are(run: Run, tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    folder = tmp_path / "[bold]"
    folder.mkdir()
    files.write(folder / "in.npz", tensors(rng, "float32"))
    out = folder / (name if name.endswith(".npz") else f"{name}.npy")
    out.parent.mkdir(exist_ok=True)  # of "[/].npz" it is "["
    code, printed, err = run("attend", "-i", folder / "in.npz", "--device", "cpu", "-o", out)
    assert (code, err) == (0, "")
    assert printed.endswith(f"written to {out}\n")
    code, _, err = run("attend", "-i", folder / "[/]none.npz", "-o", folder / "o.npz")
    assert code == 2 and f"{folder / '[/]none.npz'} does not exist" in err


def test_a_home_that_cannot_be_written(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy makes a folder there when it is imported; NumPy does without."""
    from cupyflash.gpu import device

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "cupy":
                raise PermissionError(errno.EACCES, "Permission denied", "/root/.cupy")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "none"))
    device.current.cache_clear()
    try:
        assert array_module() is np
        code, out, err = run("info")
        assert (code, err) == (0, "") and "'/root/.cupy'); let CUPY_CACHE_DIR name a folder that can be written" in out
        with pytest.raises(ImportError, match="CUPY_CACHE_DIR"):
            array_module("gpu")
    finally:
        device.current.cache_clear()


def test_gpu_asked_for_and_not_there(run: Run, tmp_path: Path, rng: np.random.Generator, no_gpu: None) -> None:
    files.write(tmp_path / "in.npz", tensors(rng, "float32"))
    code, _, err = run("attend", "-i", tmp_path / "in.npz", "--device", "gpu", "-o", tmp_path / "out.npz")
    assert code == 2
    assert pip_line("cuda13") in err
    assert array_module() is np


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_on_the_cpu(no_gpu: None, rng: np.random.Generator) -> None:
    x = draw(rng, "float32", 2, 64, 4, 16)
    told = cupyflash.explain(x, x, x, causal=True)
    assert (told.device, told.family, told.kernels, told.copies) == ("cpu", "numpy", (), ())
    assert told.flops == 4 * 2 * 4 * 16 * (64 * 65 // 2)
    assert told.bytes_moved == 4 * (4 * 2 * 64 * 4 * 16 + 2 * 64 * 4)
    assert "causal (bottom right): 50.8% of the scores" in str(told)
    shapes = cupyflash.explain((2, 64, 4, 16), dtype="float32", causal=True)  # a second call: `explain` is the function
    assert (shapes.problem, shapes.flops) == (told.problem, told.flops)
    assert 'name one to plan for it, as in arch="sm_90a"' in str(shapes)


def test_public_functions_are_not_hidden_by_modules() -> None:
    """A module named like a function of the package would take its place when it is first imported."""
    modules = {path.stem for path in Path(cupyflash.__file__).parent.iterdir()}
    assert modules.isdisjoint(cupyflash.__all__)


def test_explain_plans_without_a_gpu(no_gpu: None, cache: Path) -> None:
    told = cupyflash.explain((2, 300, 4, 59), (2, 500, 2, 59), dtype="bfloat16", arch="sm_80", family="sm80")
    assert (told.device, told.family) == ("sm_80", "sm80")
    (kernel,) = told.kernels
    assert kernel.registers is not None and 0 < kernel.registers <= 255
    assert kernel.shared_memory and kernel.spills is not None
    assert f"{kernel.registers} registers" in str(told)
    assert [copy.split(",")[0] for copy in told.copies] == ["q", "k", "v"]
    assert "no multiple of 16 bytes" in told.copies[0]

    split = cupyflash.explain((1, 64, 1, 16), dtype="float32", arch="sm_80")
    assert (split.family, split.workspace["q_halves"]) == ("sm80", 4 * 64 * 16)
    assert any("two of float16" in note for note in split.notes) and not split.copies

    back = cupyflash.explain((1, 64, 1, 16), dtype="float32", arch="sm_75", of="backward")
    assert back.family == "simt"
    assert any("sm80 needs compute capability 8.0, this GPU has 7.5" in why for why in back.passed_over)
    assert back.workspace["delta"] == 64 * 4
    assert back.flops == 5 * 2 * 64 * 64 * 16
    assert back.bytes_moved == 4 * (8 * 64 * 16 + 64)
    assert back.copies == ()


def test_explain_tells_of_copies(cache: Path, rng: np.random.Generator) -> None:
    x = draw(rng, "float16", 1, 64, 2, 64)
    turned = np.asfortranarray(x)
    told = cupyflash.explain(x, turned, np.repeat(x, 2, axis=-1)[..., ::2], arch="sm_90a", family="sm80")
    assert any(copy.startswith("k, because its last dimension has stride 128, not 1") for copy in told.copies)
    assert any(copy.startswith("v, because its last dimension has stride 2, not 1") for copy in told.copies)


def test_explain_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, arch: str) -> None:
        raise ImportError("compiling kernels needs cuda-core")

    monkeypatch.setattr(compiler, "compile_source", missing)
    told = cupyflash.explain((1, 64, 1, 64), dtype="float32", arch="sm_90a")
    assert told.kernels[0].registers is None
    assert "registers and shared memory are unknown: compiling kernels needs cuda-core" in str(told)


SHAPE_64 = (2, 64, 4, 64)


def test_explain_shows_what_gradients_of_arrays_cost() -> None:
    """Kernels of their own, the products that these compute once more, and what is written."""
    given = {"bias": (4, 64, 64), "sinks": (4,), "score": "s + t[h][j - i + 63]", "score_arrays": {"t": (4, 127)}}
    options = {"dtype": "bf16", "arch": "sm_90a", "of": "backward", **given}
    plain = cupyflash.explain(SHAPE_64, **options)
    told = cupyflash.explain(SHAPE_64, **options, wrt=("bias", "t", "sinks"))
    more = [x.name for x in told.kernels[len(plain.kernels) :]]
    assert told.kernels[: len(plain.kernels)] == plain.kernels
    assert {"attention_backward_bias", "attention_backward_sinks", "attention_backward_score"} <= set(more)
    assert told.flops == plain.flops * 9 // 5  # five products, and twice two more
    assert plain.optional == {"bias": 2 * 4 * 64 * 64, "sinks": 8, "t": 4 * 4 * 127}
    assert told.bytes_moved == plain.bytes_moved + sum(plain.optional.values())
    assert "of which bias 32 KiB, sinks 8 B, t 1.984 KiB, dbias 32 KiB" in str(told)
    only_sinks = cupyflash.explain(SHAPE_64, **options, wrt="sinks")
    assert only_sinks.flops == plain.flops and len(only_sinks.kernels) > len(plain.kernels)
    with pytest.raises(
        ValueError,
        match="wrt is 'bias', but of is 'forward', which has no gradients; it must be 'backward' or 'backward_jvp'",
    ):
        cupyflash.explain(SHAPE_64, dtype="bf16", **given, wrt="bias")
    with pytest.raises(ValueError, match="wrt holds 'alibi_slopes', but alibi_slopes is not given"):
        cupyflash.explain(SHAPE_64, **options, wrt="alibi_slopes")
    x = np.zeros((1, 64, 2, 16), np.float32)
    on_cpu = cupyflash.explain(x, bias=np.zeros((64, 64), np.float32), of="backward", wrt="bias")
    assert on_cpu.flops == cupyflash.explain(x, of="backward").flops * 7 // 5


def test_explain_of_nothing() -> None:
    told = cupyflash.explain((0, 8, 1, 64), dtype="float32", arch="sm_90a")
    assert (told.family, told.kernels, told.flops) == ("none", (), 0)


def test_explain_prints_without_rich() -> None:
    code = "import sys; sys.modules['rich'] = None; import cupyflash; "
    code += "print(cupyflash.explain((1, 8, 1, 8), dtype='float32'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "FLOPs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((1, 8, 1, 8),), TypeError, "q is a shape, (1, 8, 1, 8); dtype must be given with it"),
        ((["a", 1],), TypeError, "q is ['a', 1]; it must be an array or a shape"),
        (((1, -8, 1, 8),), ValueError, "q has shape (1, -8, 1, 8); its lengths must be 0 or more"),
        (("text",), TypeError, "q is a str; it must be an array"),
        (
            (X, None, None, {"dtype": "other"}),
            ValueError,
            "dtype is 'other', but q is an array of float32; dtype is for shapes",
        ),
        ((SHAPE, None, None, {"dtype": X}), TypeError, "it must be one of float16"),
        (
            ((10**400, 4), None, None, {"dtype": "bf16"}),
            ValueError,
            "its lengths must be 0 or more, and less than 2**63",
        ),
        ((SHAPE, None, None, {"dtype": "other"}), TypeError, "dtype is 'other'; it must be one of float16"),
        ((X, None, None, {"family": []}), ValueError, "family is []; it must be one of 'sm90'"),
        (
            (X, None, None, {"family": "simt"}),
            ValueError,
            "family is 'simt', a family of GPU kernels, but q is a numpy array",
        ),
        (
            (SHAPE, None, None, {"dtype": "bf16", "family": "simt"}),
            ValueError,
            "family is 'simt', but no GPU can be used",
        ),
        ((X, None, None, {"backward": True}), TypeError, "argument 'backward'; here it is of='backward'"),
        (
            (X, None, None, {"of": "back"}),
            ValueError,
            "of is 'back'; it must be one of 'forward', 'backward', 'jvp', 'backward_jvp'",
        ),
        ((X, None, None, {"of": True}), ValueError, "of is True; it must be one of 'forward'"),
        (
            (X, None, None, {"of": "jvp"}),
            ValueError,
            "of is 'jvp', but tangents is (); it must name what moves, as in ('q', 'k')",
        ),
        (
            (X, None, None, {"of": "backward", "tangents": ("q",)}),
            ValueError,
            "tangents are given, but of is 'backward'; it must be 'backward_jvp'",
        ),
        (
            (X, None, None, {"of": "forward", "tangents": ("q",)}),
            ValueError,
            "tangents are given, but of is 'forward'; it must be 'jvp'",
        ),
        (
            ((1, 1 << 31, 1, 64), None, None, {"dtype": "bf16", "arch": "sm_90a"}),
            ValueError,
            "q has a sequence of 2147483648",
        ),
    ],
)
def test_explain_errors(arguments: tuple[object, ...], error: type[Exception], message: str, no_gpu: None) -> None:
    *arrays, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error) as raised:
        cupyflash.explain(*arrays, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "torch", "jax"]
)
def test_dtypes_go_by_many_names(dtype: object, no_gpu: None) -> None:
    if dtype in ("torch", "jax"):
        dtype = pytest.importorskip("torch" if dtype == "torch" else "jax.numpy").bfloat16
    assert cupyflash.explain(SHAPE, dtype=dtype).problem.dtype == "bfloat16"
    assert cupyflash.explain(X.astype(ml_dtypes.bfloat16), dtype=dtype).problem.dtype == "bfloat16"


def test_an_option_that_is_not_there_is_told_by_name() -> None:
    for function in (cupyflash.explain, cupyflash.tune):
        with pytest.raises(
            TypeError,
            match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'windw'; did you mean 'window'\?$",
        ):
            function((1, 8, 1, 8), dtype="float16", windw=1)
    cupyflash.explain(np.ones((8, 4)), window=(1, 1), return_lse=True, out=None)


def test_bytes_moved_counts_optional_arrays() -> None:
    """As they lie in memory."""
    q = np.zeros((1, 3, 2, 8), np.float16)
    plain = cupyflash.explain(q).bytes_moved
    wide = np.broadcast_to(np.zeros((2, 1, 3), np.float32), (1, 2, 3, 3))
    for given, size in (({"key_mask": np.ones((1, 3), bool)}, 3), ({"bias": wide}, 24), ({"bias": q[:, :, 0, :3]}, 18)):
        assert cupyflash.explain(q, **given).bytes_moved == plain + size


def test_explain_command(run: Run, cache: Path) -> None:
    shape = ("--shape", "2,8192,16,128", "--dtype", "bf16", "--causal", "--arch", "sm_90a", "--family", "sm80")
    code, out, err = run("explain", *shape)
    assert (code, err) == (0, "")
    for expected in ("2 x 8192 x 16 x 128 bfloat16", "sm_90a", "sm80", "registers", "549.8 GFLOP", "workspace"):
        assert expected in out
    other = ("--kv-shape", "2,4096,4,128", "--v-shape", "2,4096,4,64", "--key-mask", "--window", "100,0")
    code, out, err = run("explain", *shape, *other, "--of", "backward")
    assert (code, err) == (0, "")
    assert "2 x 4096 x 4 x 128, 64" in out
    assert "key mask" in out and "window (100 keys to the left" in out and "dq_sum" in out
    code, out, err = run("explain", *shape, "--tangents", "q,v", "--of", "backward_jvp")
    assert (code, err) == (0, "") and re.search(r"^pass +backward_jvp$", out, re.MULTILINE)
    code, out, err = run("explain", *shape, "--softcap", "30", "--mask", "--bias", "--alibi-slopes", "--sinks")
    assert (code, err) == (0, "")
    assert "causal (bottom right), mask: " in out
    assert re.search(r"^score +soft cap 30, bias, ALiBi slopes, sinks$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "2,x"], "--shape is '2,x'; it must be 2 to 4 integers"),
        (["--shape", "1,2,3,4,5"], "--shape is '1,2,3,4,5'; it must be 2 to 4 integers"),
        (["--shape", "1,8,3,8", "--kv-shape", "1,8,2,8"], "q has 3 heads and k has 2"),
        (["--shape", "1,8,1,8", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["--shape", "1,8,1,8", "--arch", "sm_42"], "arch is 'sm_42'; it must be one of sm_75"),
        (["--shape", "1,8,1,8", "--arch", "sm_80", "--family", "sm1"], "family is 'sm1'"),
    ],
)
def test_explain_command_errors(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run("explain", *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


# ---- info, compile, bench -------------------------------------------------------------------------------------------


def test_info_with_nothing_there(run: Run, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("cuda", "cuda.core", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "none"))
    code, out, err = run("info")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "none can be used" in words and pip_line("cuda13") in words
    assert "no kernel can be compiled" in words
    for package in ("numpy", "ml-dtypes", "threadpoolctl"):  # what is installed with this one
        assert f"{metadata.version(package)} ({package})" in words
    assert "0 programs" in words
    assert "CUPYFLASH_DUMP not set (a folder to write source" in words
    assert not [line for line in out.splitlines() if line != line.rstrip()]  # nothing is padded


def test_info_tells_of_a_cache_that_is_not_used(run: Run, cache: Path) -> None:
    disk.write(b"key", b"value")
    (cache / "cupyflash-programs").chmod(0o777)
    if sys.platform != "win32":
        assert "are not used, since other users can write there" in run("info")[1]


def test_compile_fills_the_cache(run: Run, cache: Path) -> None:
    only = ("--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--causal", "--of", "forward")
    code, out, err = run("compile", *only)
    assert (code, err) == (0, "")
    assert "sm80" in out and "forward" in out and "3 programs" in out  # few queries, too, with shares and without
    assert not [line for line in out.splitlines() if line != line.rstrip() or not line]
    assert "cached" not in out
    assert disk.cache_info().entries == 3
    compiler.compile_source.cache_clear()  # as in a new process
    code, out, _ = run("compile", *only)
    assert code == 0 and "cached" in out


def test_compiled_kernels_are_told_in_80_columns() -> None:
    """In lines that stand under their headings."""
    work = jobs(["sm_90a"])
    lines = KernelLines(work)
    told = [lines.heading]
    for job in work:
        found = {x.name: compiler.Resources(255, 1000, 1000, 0, 0) for x in job.plan.launches}
        told += lines.of(Done(job, 12.34, compiler.Compiled("sm_90a", b"", "", found, False)))
        told += lines.of(Done(job, 12.34, None, RuntimeError("refused")))
    assert len(told) == 1 + 2 * sum(len(job.plan.launches) for job in work)
    assert max(map(len, told)) <= 80 and all(x == x.rstrip() and "\n" not in x for x in told)
    for heading, cell in (("registers", "255"), ("spilled", "2000"), ("seconds", "12.34")):
        end = told[0].index(heading) + len(heading)
        assert {x[:end][-len(cell) :] for x in told[1:] if cell in x} == {cell}


def test_compiled_kernels_are_told_as_they_come(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe too: what is there is told before the next program is."""
    seen = []

    def slow(work: list[Job]) -> Iterator[Done]:
        for job in work:
            seen.append(capsys.readouterr().out)
            found = {x.name: compiler.Resources(40, 0, 0, 0, 0) for x in job.plan.launches}
            yield Done(job, 1.0, compiler.Compiled("sm_80", b"", "", found, True))

    monkeypatch.setattr(precompile, "compile_all", slow)
    code, out, _ = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward", "--full")
    assert code == 0 and out.count("\n") > 1
    first, second, *_ = seen
    assert first.startswith("2 programs to compile or to find in the cache, on ") and first.count("\n") == 1
    heading, told, *_ = second.splitlines()
    assert "registers" in heading and "float32" in told and "sm_80" in told


def test_compile_that_keeps_nothing_fails(run: Run, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    code, out, err = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward")
    assert code == 2 and "registers" not in out
    assert f"nothing can be kept in the cache folder {cache}" in err and err.count("\n") == 1


def test_compile_without_nvrtc_has_no_table(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, arch: str) -> None:
        raise ImportError("compiling kernels needs NVRTC, which cannot be loaded")

    monkeypatch.setattr(compiler, "compile_uncached", missing)
    code, out, err = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward")
    assert code == 2 and "needs NVRTC" in err and err.count("\n") == 1
    assert out.count("\n") == 1 and "registers" not in out


def test_compiled_is_what_a_call_needs(cache: Path) -> None:
    """The kernels of `compile` are those of a real call: training, a prompt, a late part of one, a token."""
    from cupyflash.gpu.device import Arch
    from cupyflash.gpu.plan import plan
    from cupyflash.gpu.source import generate

    ready = {generate(job.plan) for job in jobs(["sm_90a"])}
    for dtype, dim in (("float16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 64), ("float64", 128)):
        for causal in (False, True):
            arrays = {name: np.empty((3, 1000, 6, dim), DTYPES[dtype]) for name in "qkv"}
            problem = problem_of(arrays, causal=causal)
            for of in (FORWARD, BACKWARD):
                assert generate(plan(problem, Arch.of("sm_90a"), of)) in ready, (dtype, dim, causal, of)
            for length, heads, heads_k in ((1, 32, 8), (1, 32, 32), (512, 8, 8)):
                shapes = {"q": (1, length, heads, dim), "k": (1, 9000, heads_k, dim), "v": (1, 9000, heads_k, dim)}
                problem = problem_of(
                    {name: np.empty(shape, DTYPES[dtype]) for name, shape in shapes.items()}, causal=causal
                )
                assert generate(plan(problem, Arch.of("sm_90a"))) in ready, (dtype, dim, causal, length, heads_k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_42"], "arch is 'sm_42'"),
        (["--arch", "sm_80", "--of", "jvp"], "of is 'jvp'; it must be one of 'forward', 'backward'"),
        (["--arch", "sm_80", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["--arch", "sm_80", "--family", "sm1"], "family is 'sm1'"),
        (["--arch", "sm_75", "--family", "sm80", "--dtype", "fp16"], "needs compute capability 8.0"),
    ],
)
def test_compile_errors(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("compile", *arguments)
    assert code == 2
    assert message in err and err.count("\n") == 1


def test_compile_tells_of_a_refused_source(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu import programs

    monkeypatch.setattr(programs, "generate", lambda plan: "this is no CUDA")
    code, out, _ = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward", "--full")
    assert code == 1
    assert "failed" in out and "cannot compile for sm_80" in out


def test_tune_prints_every_tile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu.device import Arch
    from cupyflash.problem import AttentionProblem
    from cupyflash.tools.autotune import Tuning, candidates

    asked = AttentionProblem("bfloat16", 2, 512, 512, 4, 4, 64, 64, 0.125)
    own, best, wrong, *_ = candidates(asked, Arch.of("sm_80"), FORWARD, "sm80")
    own, best = replace(own, seconds=2e-3), replace(best, seconds=1e-3)
    wrong = replace(wrong, note="wrong: differs by 1.0e+00")
    calls = []

    def tune(*shapes: object, **options: object) -> Tuning:
        calls.append((shapes, options))
        options["progress"]("time", 1, 2)
        return Tuning(asked, "forward", "sm80", (own, best, wrong), best, "/there/tuning.json")

    monkeypatch.setattr(cupyflash, "tune", tune)
    code, out, err = run("tune", "--shape", "2,512,4,64", "--causal", "--key-mask", "--dry-run", "--family", "sm80")
    assert (code, err) == (0, "")
    ((shapes, options),) = calls
    assert shapes == ((2, 512, 4, 64),) * 3 and options["key_mask"] == (2, 512) and options["dtype"] == "bfloat16"
    assert options["causal"] is True and options["family"] == "sm80" and options["store"] is False
    for text in ("2.000x", "the table's own", "wrong: differs", "2.000 times as fast", "/there/tuning.json", "keys"):
        assert text in out
    assert out.index("2.000x") < out.index("the table's own") < out.index("wrong: differs")


def test_tune_export(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cupyflash.gpu import tuned
    from cupyflash.gpu.device import Arch

    monkeypatch.setenv("CUPYFLASH_CONFIG_DIR", str(tmp_path))
    tuned.stored.cache_clear()
    code, out, err = run("tune", "--export")
    assert (code, out) == (2, "") and "tuning.json holds nothing" in err
    problem = problem_of({name: np.empty((1, 100, 2, 64), np.float16) for name in "qkv"})
    tuned.replace([tuned.entry(problem, Arch.of("sm_80"), "sm80", FORWARD, (64, 64, 4, 1, 2, 2))], [])
    code, out, _ = run("tune", "--export")
    tuned.stored.cache_clear()
    assert code == 0 and out.splitlines()[1].startswith("Tile(rows=64, keys=64, ")


def test_tune_errors(run: Run, no_gpu: None) -> None:
    code, out, err = run("tune")
    assert (code, out) == (2, "") and "--shape is missing" in err
    code, out, err = run("tune", "--shape", "2,512,4,64")
    assert (code, out) == (2, "") and "arrays on a GPU need CuPy" in err and err.count("\n") == 1


def test_bench_is_handed_over(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(bench, "run", lambda *given: calls.append(given) or 1)
    few = ("--rounds", 2, "--min-ms", 1.5)
    code, _, err = run("bench", "fp32", "host", "--family", "simt", "--quick", "--out", tmp_path, "--dtype=fp16", *few)
    assert (code, err) == (1, "")
    assert calls == [(["fp32", "host"], "simt", tmp_path, True, "float16", 2, 1.5, (), False, False, False)]
    assert run("bench", "scores", "--only", "bias", "--only=mask", "--slow")[0] == 1
    assert calls[1] == (["scores"], None, None, False, None, None, None, ["bias", "mask"], True, False, False)
    assert run("bench", "models", "--sustained")[0] == 1
    assert calls[2] == (["models"], None, None, False, None, None, None, (), False, True, False)
    assert run("bench", "models", "--resume")[0] == 1
    assert calls[3] == (["models"], None, None, False, None, None, None, (), False, False, True)


def test_bench_plot_draws_what_quick_wrote(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    suite = SUITES["cpu"]
    monkeypatch.setitem(SUITES, "cpu", suite._replace(problems=lambda options: suite.problems(options)[:2]))
    assert bench.run(["cpu"], quick=True, rounds=1, min_ms=1) == 0
    code, _, err = run("bench", "plot")
    assert code == 2 and "`cupyflash bench plot --quick` draws" in err
    picture = Path("bench", "quick", "plots", "cpu_cpu.png")
    for plotted in (
        lambda: run("bench", "plot", "--quick")[:2],
        lambda: (bench_main(["plot", "--quick"]), str(picture)),
    ):
        code, printed = plotted()
        assert code == 0 and str(picture) in printed and picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    assert not Path("docs").exists()


def test_bench_of_an_unknown_suite(run: Run) -> None:
    code, out, err = run("bench", "speed")
    assert code == 2
    assert "'speed'" in out + err
