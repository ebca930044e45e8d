"""What the command line says where something is in the way: of files, of folders, of warnings."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rich.table import Table
from rich.text import Text

import cupyflash
from cupyflash.bench import report
from cupyflash.folders import warn_once
from cupyflash.tools import cli, files
from cupyflash.tools.console import Console

X = np.ones((1, 3, 2, 4), np.float32)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def given(tmp_path: Path) -> tuple[object, ...]:
    """A command that lacks its output."""
    np.savez(tmp_path / "in.npz", q=X, k=X, v=X)
    return "attend", "-i", tmp_path / "in.npz", "--device", "cpu"


# ---- the output of attend -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["long", "circle", "nowhere", "read-only", "folder", "pipe"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    run: Run, given: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    out, also = tmp_path / "out.npy", ()
    try:
        if where == "long":
            out = tmp_path / f"{'x' * 300}.npy"
        elif where == "circle":
            out.symlink_to(out)
        elif where == "nowhere":
            out.symlink_to(tmp_path / "missing" / "out.npy")
        elif where == "pipe":
            os.mkfifo(out)
            also = ("--overwrite",)
    except (OSError, AttributeError):
        pytest.skip("no such thing here")
    locked = {"read-only": out, "folder": tmp_path}.get(where)
    if locked == out:
        out.touch()
        also = ("--overwrite",)
    access = os.access
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: (mode, Path(path)) != (os.W_OK, locked) and access(path, mode))
    monkeypatch.setattr(cupyflash, "attention", None)
    code, printed, err = run(*given, "-o", out, *also)
    assert (code, printed) == (2, "")
    assert err == f"cupyflash: --output is {out}; it must be a file in a folder that exists and can be written\n"


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_a_failure_to_write_names_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device", str(source))

    monkeypatch.setattr(os, "replace", full)
    out = tmp_path / f"out{suffix}"
    with pytest.raises(OSError) as raised:
        files.write(out, {"out": X})
    assert str(raised.value) == f"{out} cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="no rights in a file's mode")
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_who_may_read_an_output_says_the_umask(tmp_path: Path, suffix: str) -> None:
    before = os.umask(0o022)
    try:
        files.write(tmp_path / f"out{suffix}", {"out": X})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / f"out{suffix}").stat().st_mode) == 0o644


# ---- files that are read --------------------------------------------------------------------------------------------


def npy(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def test_what_is_wrong_with_an_archive_names_the_array(tmp_path: Path) -> None:
    path = tmp_path / "in.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q.npy", npy(X))
        archive.writestr("k.npy", npy(X)[:-1])
    with pytest.raises(ValueError, match=r"in\.npz cannot be read as \.npz: k\.npy: its header says shape"):
        files.read(path)


@pytest.mark.parametrize("shape", ["(__import__('os').getcwd(),)", "(x,)", "[i for i in ()]"])
def test_a_header_with_code_is_told_in_words(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n"
    path = tmp_path / "q.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode() + bytes(16))
    with pytest.raises(ValueError, match=r"as \.npy: its header holds more than plain values$"):
        files.read(path)


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_the_other_byte_order_is_read(tmp_path: Path, suffix: str, dtype: str) -> None:
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    path = tmp_path / f"q{suffix}"
    np.save(path, x) if suffix == ".npy" else np.savez(path, q=x)
    found = files.read(path)["q"]
    assert found.dtype.isnative and found.dtype == x.dtype.newbyteorder("=") and (found == x).all()


def test_eight_bits_of_safetensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    arrays = {"a": X, "q": (2 * X).astype(ml_dtypes.float8_e4m3fn), "e": np.zeros((0, 3), ml_dtypes.float8_e4m3fn)}
    files.write(path, arrays)
    found = files.read(path)
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape and (found[name] == x).all()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"in\.safetensors cannot be read as \.safetensors: "):
        files.read(path)


@pytest.mark.parametrize(("asked", "dtype"), [(None, "bfloat16"), ("fp8", "float8_e4m3fn")])
def test_eight_bits_in_and_out(run: Run, tmp_path: Path, asked: str | None, dtype: str) -> None:
    files.write(tmp_path / "in.safetensors", dict.fromkeys("qkv", X.astype(ml_dtypes.float8_e4m3fn)))
    options = () if asked is None else ("--out-dtype", asked)
    for suffix in files.SUFFIXES:
        out = tmp_path / f"out{suffix}"
        code, printed, err = run("attend", "-i", tmp_path / "in.safetensors", "--device", "cpu", "-o", out, *options)
        assert (code, err) == (0, "") and f"1x3x2x4 {dtype}" in printed
        assert (f"note: {suffix} has no {dtype}; others read " in printed) == (suffix != ".safetensors")
    assert files.read(out)["out"].dtype == dtype


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--shape", "1,64,2,64", "--dtype"),
        ("compile", "--arch", "sm_80", "--dtype"),
    ],
)
@pytest.mark.parametrize("dtype", ["float", "", "bf16,fp16"])
def test_a_dtype_that_is_not_known_goes_by_its_name(run: Run, arguments: tuple[str, ...], dtype: str) -> None:
    code, _, err = run(*arguments, dtype)
    assert code == 2 and err.startswith(f"cupyflash: dtype is {dtype!r}; it must be one of float16, bfloat16, ")


def test_explain_of_no_array() -> None:
    with pytest.raises(TypeError, match="^q is a NoneType; it must be an array"):
        cupyflash.explain(None, dtype="float16")


# ---- dropout and its seed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["-1", str(2**64), "5.5", "1,2", "five", "seed.txt", "", "."])
def test_a_seed_that_is_none_goes_by_its_option(run: Run, given: tuple[object, ...], tmp_path: Path, seed: str) -> None:
    code, printed, err = run(*given, "--dropout", "0.1", "--seed", seed, "-o", tmp_path / "out.npy")
    assert (code, printed) == (2, "")
    assert err == (
        f"cupyflash: --seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1, or a file that ends in .npy, "
        ".npz, .safetensors\n"
    )


def test_dropout_asks_for_the_option_of_its_seed(run: Run, given: tuple[object, ...], tmp_path: Path) -> None:
    code, printed, err = run(*given, "--dropout", "0.1", "-o", tmp_path / "out.npy")
    assert (code, printed) == (2, "")
    assert err == "cupyflash: --dropout is 0.1, but there is no seed; give --seed, a whole number or a file of one\n"
    assert run(*given, "--dropout", "0", "-o", tmp_path / "out.npy")[0] == 0


# ---- arrays of a score ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "arrays", "message"),
    [
        ("s + t[h]", [], "--score reads t, which is not given; give --score-array t=FILE"),
        ("s + t[h]", ["t.npy"], "--score-array is 't.npy'; it must be NAME=FILE, once for each array that"),
        ("s + t[h]", ["u=t.npy"], "--score-array is 'u=t.npy'; it must be NAME=FILE, once for each array that"),
        ("s + t[h]", ["t="], "--score-array is 't='; it must be NAME=FILE, once for each array that"),
        ("s + t[h]", ["t=t.npy", "t=u.npy"], "--score-array is 't=u.npy'; it must be NAME=FILE, once for each"),
        ("s + t", ["t=t.npy"], "that --score reads as NAME[...]: no array"),
        ("s +", ["t=t.npy"], "cupyflash: score is 's +', which has its end instead of a number or a name at 4"),
        (None, ["t=t.npy"], "that --score reads as NAME[...]: no array"),
        ("s + t[u[h]]", ["x=t.npy"], "that --score reads as NAME[...]: t, u"),
        ("s + t[h]", ["t=none.npy"], "--score-array: none.npy does not exist"),
        ("s + t[h]", ["t=t.txt"], "--score-array: t.txt ends in '.txt'; it must be a file that ends in"),
        ("s + t[h]", ["t=in.npz"], "--score-array: in.npz holds q, k, v, but no t"),
    ],
)
def test_arrays_of_a_score_go_by_their_option(
    run: Run, given: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    score: str | None, arrays: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.save("t.npy", np.ones(2, np.float32))
    options = [part for x in arrays for part in ("--score-array", x)] + (["--score", score] if score else [])
    code, printed, err = run(*given, *options, "-o", "out.npy")
    assert (code, printed) == (2, "")
    assert message in err and err.count("\n") == 1


def test_the_output_is_no_array_of_a_score(run: Run, given: tuple[object, ...], tmp_path: Path) -> None:
    out = tmp_path / "t.npy"
    np.save(out, np.ones(2, np.float32))
    code, _, err = run(*given, "--score", "s + t[h]", "--score-array", f"t={out}", "--overwrite", "-o", out)
    assert (code, err) == (
        2, f"cupyflash: --output is {out}, the file that --score-array reads; it must be another\n"
    )  # fmt: skip


# ---- the entrance ---------------------------------------------------------------------------------------------------


def test_a_warning_is_a_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~nosuchuser/here")
    warn_once.cache_clear()
    code = "from cupyflash.tools.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "info"], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert done.stderr == (
        "cupyflash: warning: CUPYFLASH_CACHE_DIR is '~nosuchuser/here', but no such user is known; nothing is kept or "
        "looked for there\n"
    )


def test_the_version_needs_no_extra() -> None:
    code = (
        "import runpy, sys; sys.modules['typer'] = sys.modules['rich'] = None; sys.argv[1:] = ['--version']; "
        "runpy.run_module('cupyflash', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cupyflash {cupyflash.__version__}\n", "")


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_bench_says_first_that_it_cannot_write(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "file").touch()
    code, printed, _ = run("bench", "cpu", "--quick", "--out", tmp_path / "file")
    assert code == 2
    assert printed.startswith(f"out is {tmp_path / 'file'}; it must be a folder that can be written (")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", "1", "{}", '{"rows"'])
def test_a_file_that_bench_did_not_write_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "forward.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        report.load(tmp_path)
    assert str(raised.value).startswith(f"{path} is not a file of `cupyflash bench`: ")


# ---- what comes from outside and moves a cursor ----------------------------------------------------------------------

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202ename"


def harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_names_of_arrays_are_shown_not_sent(run: Run, tmp_path: Path, suffix: str) -> None:
    files.write(tmp_path / f"in{suffix}", {EVIL: X, "line\nbreak": X})
    code, out, err = run("attend", "-i", tmp_path / f"in{suffix}", "-o", tmp_path / "out.npy")
    assert code == 2 and harmless(out + err) and "\\x1b]0;title\\x07" in err and err.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no such names")
def test_names_of_files_are_shown_not_sent(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    files.write(folder / "in.npz", dict.fromkeys("qkv", X))
    code, out, err = run("attend", "-i", folder / "in.npz", "-o", folder / "out.npy", "--device", "cpu")
    assert code == 0 and harmless(out + err) and "written to" in out and "\\x1b[2J" in out
    code, out, err = run("attend", "-i", folder / "none.npz", "-o", folder / "o.npy")
    assert code == 2 and harmless(out + err) and "\\x1b[2J" in err
    code, out, err = run("attend", folder / "one too many", "-o", folder / "o.npy")  # the parser's own message
    assert code == 2 and harmless(out + err) and "\\x1b[2J" in err


@pytest.mark.parametrize("variable", ["CUPYFLASH_CACHE_DIR", "CUPYFLASH_CONFIG_DIR", "CUPYFLASH_DUMP"])
def test_the_environment_is_shown_not_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / EVIL))
    code, out, err = run("info")
    assert code == 0 and harmless(out + err) and "title" in out


def test_a_warning_is_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with cli.told():
        warnings.warn_explicit(EVIL, RuntimeWarning, cli.__file__, 1)
    out, err = capsys.readouterr()
    assert not out and harmless(err) and "title" in err


def test_tables_and_bars_are_shown_not_sent() -> None:
    """On a terminal too, where a table has escape sequences of its own."""
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=200)
    table = Table()
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    screen.print(table)
    screen.print(EVIL, style="red")
    assert "\x1b[1m" in out.getvalue() and out.getvalue().count("title") == 3
    for sent in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\r", "\u202e"):
        assert sent not in out.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
def test_results_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    for name in ("x.json", "x.json.part"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    report.save(tmp_path / "x.json", {"rows": []})
    assert (tmp_path / "victim").read_text() == "precious" and report.read(tmp_path / "x.json") == {"rows": []}
