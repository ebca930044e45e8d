"""The command `attend`: arrays in files, from whoever wrote them."""

from __future__ import annotations

import errno
import importlib.abc
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from criterion import assert_as_good
from reference import DTYPES, draw, standard, standard_in_own_precision
from test_cli import problem_of

import cupyflash
from cupyflash.arrays import array_module
from cupyflash.pip_line import pip_line
from cupyflash.tools import files

Run = Callable[..., tuple[int, str, str]]


def tensors(rng: np.random.Generator, dtype: str) -> dict[str, np.ndarray]:
    return {"q": draw(rng, dtype, 2, 5, 4, 8), "k": draw(rng, dtype, 2, 7, 2, 8), "v": draw(rng, dtype, 2, 7, 2, 8)}


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
