"""The disk cache: a hit where it works, a compilation and no more where it does not."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyflash import folders
from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler
from cupyflash.gpu.cache import CacheInfo, cache_dir, cache_info

pytest.importorskip("cuda.core")

SOURCE = 'extern "C" __global__ void k(int *a) { *a = 1; }'
OTHER = 'extern "C" __global__ void k(int *a) { *a = 2; }'


posix = pytest.mark.skipif(sys.platform == "win32", reason="no owners, modes or FIFOs")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of our own, still empty; what was said once may be said again."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(path))
    compiler.compile_source.cache_clear()
    folders.warn_once.cache_clear()
    yield path
    compiler.compile_source.cache_clear()
    folders.warn_once.cache_clear()


@pytest.fixture
def nobody() -> Iterator[int]:
    """Another user, which this process can become for a while."""
    if sys.platform == "win32" or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    yield 65534
    os.seteuid(0)


def compile_anew(source=SOURCE, arch="sm_80"):
    """As a new process would: nothing but the disk cache remembers."""
    compiler.compile_source.cache_clear()
    compiled = compiler.compile_source(source, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.resources["k"].registers > 0
    return compiled


def entry(cache: Path) -> Path:
    (path,) = (cache / "cupyflash-programs").iterdir()
    return path


def in_a_new_process(code: str, **popen) -> subprocess.Popen[str]:
    root = str(Path(compiler.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    prelude = f"from cupyflash.gpu import compiler\nSOURCE = {SOURCE!r}\nOTHER = {OTHER!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **popen,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_hit():
    first, second = compile_anew(), compile_anew()
    assert (first.cached, second.cached) == (False, True)
    assert second.cubin == first.cubin
    assert second.log == first.log
    assert second.resources == first.resources


def test_this_process_remembers(cache):
    first = compile_anew()
    shutil.rmtree(cache)
    assert compiler.compile_source(SOURCE, "sm_80") is first


def test_source_architecture_and_nvrtc_make_the_key(monkeypatch):
    compile_anew()
    assert not compile_anew(OTHER).cached
    assert not compile_anew(arch="sm_90a").cached
    assert compile_anew().cached
    from cuda.bindings import nvrtc

    real, major, minor = nvrtc.nvrtcVersion()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (real, major, minor + 1))
    assert not compile_anew().cached


def test_new_process_hits():
    compile_anew()
    assert output(in_a_new_process("print(compiler.compile_source(SOURCE, 'sm_80').cached)")) == "True"


def test_errors_are_not_kept():
    for _ in range(2):
        with pytest.raises(compiler.CompileError):
            compiler.compile_source("nonsense", "sm_80")
    assert cache_info().entries == 0


def damage(data: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "truncated": data[: len(data) // 2],
        "one bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        "garbage": os.urandom(len(data)),
        "zeros": bytes(len(data)),
        "bare cubin": data[data.index(b"\x7fELF") :],
        "longer": data + b"x",
    }[how]


@pytest.mark.parametrize("how", ["empty", "truncated", "one bit", "garbage", "zeros", "bare cubin", "longer"])
def test_corrupt(cache, how):
    whole = compile_anew()
    path = entry(cache)
    path.write_bytes(damage(path.read_bytes(), how))
    again = compile_anew()
    assert not again.cached
    assert again.cubin == whole.cubin
    assert compile_anew().cached  # and the entry is mended


def test_a_folder_where_an_entry_should_be(cache):
    compile_anew()
    path = entry(cache)
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    assert not compile_anew().cached


def test_deleted_between_calls(cache):
    compile_anew()
    shutil.rmtree(cache)
    assert not compile_anew().cached
    assert compile_anew().cached


def test_deleted_during_a_compilation(cache, monkeypatch):
    real = compiler.compile_uncached

    def deleting(source, arch):
        shutil.rmtree(cache)
        return real(source, arch)

    monkeypatch.setattr(compiler, "compile_uncached", deleting)
    assert not compile_anew().cached


@pytest.mark.parametrize("where", ["under a file", "a file", "proc", "no home"])
def test_nowhere_to_write(tmp_path, monkeypatch, where):
    file = tmp_path / "file"
    file.write_text("kept")
    if where == "no home":

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("LOCALAPPDATA", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
    else:
        places = {"under a file": file / "cache", "a file": file, "proc": Path("/proc/self/cache")}
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(places[where]))
    assert not compile_anew().cached
    assert not compile_anew().cached
    assert cache_info().entries == 0
    assert file.read_text() == "kept"


@posix
def test_read_only(cache):
    compile_anew()
    (cache / "cupyflash-programs").chmod(0o555)
    if os.access(cache / "cupyflash-programs", os.W_OK):
        pytest.skip("root may write anywhere")
    assert compile_anew().cached
    assert not compile_anew(OTHER).cached
    (cache / "cupyflash-programs").chmod(0o755)


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_full_disk(monkeypatch, call):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert not compile_anew().cached
    assert cache_info().entries == 0  # no half-written file either
    assert not compile_anew().cached
    assert compile_anew().cached


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on file sizes")
def test_a_write_that_stops_halfway():
    """The system itself cuts the write short: 1000 bytes of it reach the disk."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(compiler.compile_source(SOURCE, 'sm_80').cached)
"""
    assert output(in_a_new_process(code)) == "False"
    assert cache_info().entries == 0
    assert not compile_anew().cached


@pytest.mark.slow
def test_32_processes_at_once(tmp_path):
    start = tmp_path / "start"
    code = f"""
import hashlib, pathlib, time
compiler.nvrtc_version()
print("ready", flush=True)
while not pathlib.Path({str(start)!r}).exists():
    time.sleep(0.001)
compiled = compiler.compile_source(SOURCE, 'sm_80')
print(compiled.resources["k"].registers > 0, hashlib.sha256(compiled.cubin).hexdigest())
"""
    processes = [in_a_new_process(code) for _ in range(32)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    start.touch()
    results = {output(process) for process in processes}
    assert len(results) == 1
    assert results.pop().startswith("True")
    assert cache_info().entries == 1  # nobody left a temporary file
    assert compile_anew().cached


def test_processes_while_another_deletes(cache):
    code = "for _ in range(20): compiler.compile_source.cache_clear(); compiler.compile_source(SOURCE, 'sm_80')"
    processes = [in_a_new_process(code) for _ in range(4)]
    while any(process.poll() is None for process in processes):
        shutil.rmtree(cache, ignore_errors=True)
        time.sleep(0.002)
    for process in processes:
        output(process)


def test_threads():
    sources = [SOURCE.replace("= 1", f"= {n % 4}") for n in range(16)]
    cubins = {}
    threads = [
        threading.Thread(target=lambda s=s, n=n: cubins.update({n: (s, compiler.compile_source(s, "sm_80").cubin)}))
        for n, s in enumerate(sources)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cubins) == 16
    assert len(set(cubins.values())) == 4


def test_size_limit(monkeypatch):
    """The entry that was not read for longest goes first."""
    sources = [SOURCE.replace("= 1", f"= {n}") for n in range(3)]
    compile_anew(sources[0])
    size = cache_info().bytes
    monkeypatch.setattr(disk, "LIMIT", int(2.5 * size))
    for source in (sources[1], sources[0], sources[2]):
        time.sleep(0.02)  # beyond the clock tick of access times
        compile_anew(source)
    assert cache_info().entries == 2
    assert compile_anew(sources[0]).cached
    assert compile_anew(sources[2]).cached
    assert not compile_anew(sources[1]).cached


def test_info_counts_programs_alone(cache):
    assert cache_info() == CacheInfo(cache, 0, 0)
    compile_anew()
    compile_anew(OTHER)
    for name in ("0" * 64 + ".program.lock", ".cupyflash-0123456789abcdef", "not ours"):
        (cache / "cupyflash-programs" / name).write_text("left behind")
    (cache / "not ours").write_text("kept")
    info = cache_info()
    assert (info.path, info.entries, info.note) == (cache, 2, "")
    assert info.bytes > len(compiler.compile_source(SOURCE, "sm_80").cubin)


@pytest.mark.parametrize("name", ["{}.program.lock", ".cupyflash-{:.16}"])
def test_what_dead_processes_left_goes_after_a_while(cache, name):
    disk.write(b"key", b"value")
    old, young = (cache / "cupyflash-programs" / name.format(digit * 64) for digit in "0f")
    old.touch()
    young.touch()
    os.utime(old, times=(0, 0))
    disk.write(b"other", b"value")
    assert young.exists() and not old.exists()
    assert (disk.read(b"key"), disk.read(b"other")) == (b"value", b"value")


def test_files_of_others_stay(cache, monkeypatch):
    """Whatever their names are like, however old and large they are, wherever CUPYFLASH_CACHE_DIR leads."""
    digest = "0123456789abcdef" * 4
    names = [
        "train.py", digest, digest.upper() + ".program", digest[1:] + ".program", f"{digest}.program.txt",
        f"{digest}.lock",
        f"{digest}.0123456789abcdef", f"{digest}.program.0123456789abcdef", ".cupyflash-", ".cupyflash-01234567",
        "x.program",
    ]  # fmt: skip
    folders_of_others = [cache, cache / "programs", cache / "cupyflash-programs"]
    for folder in folders_of_others:
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("precious")
            os.utime(folder / name, times=(0, 0))
    monkeypatch.setattr(disk, "LIMIT", 0)
    disk.write(b"key", b"value")
    for folder in folders_of_others:
        assert sorted(x.name for x in folder.iterdir() if x.is_file()) == sorted(names)


@posix
@pytest.mark.skipif(sys.platform == "win32", reason="links need a right there")
@pytest.mark.parametrize("planted", ["link", "file"])
def test_what_lies_where_a_file_is_to_be_written_stays(tmp_path, monkeypatch, planted):
    """Whoever guessed the name of one that is being written."""
    monkeypatch.setattr(folders.secrets, "token_hex", lambda _: "0" * 16)
    victim, there = tmp_path / "victim", tmp_path / (".cupyflash-" + "0" * 16)
    victim.write_text("own")
    there.symlink_to(victim) if planted == "link" else there.write_text("own")
    with pytest.raises(FileExistsError), folders.written_whole(tmp_path / "result") as file:
        file.write(b"other")
    assert victim.read_text() == there.read_text() == "own" and not (tmp_path / "result").exists()


def test_a_link_in_the_place_of_the_folder_is_not_used(cache, tmp_path, monkeypatch):
    """Who can write in CUPYFLASH_CACHE_DIR could have it lead to anybody's files."""
    disk.write(b"key", b"value")
    moved = (cache / "cupyflash-programs").rename(tmp_path / "moved")
    (cache / "cupyflash-programs").symlink_to(moved, target_is_directory=True)
    before = sorted(moved.iterdir())
    monkeypatch.setattr(disk, "LIMIT", 0)
    refused("it is a link")
    disk.write(b"other", b"value")
    with disk.turn(b"other"):
        assert sorted(moved.iterdir()) == before
    assert sorted(moved.iterdir()) == before and "it is a link" in cache_info().note


def refused(what: str) -> None:
    """Reading gives nothing, with one warning however often, and `info` tells."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [disk.read(b"key") for _ in range(3)] == [None] * 3
        assert disk.read(b"other") is None
    assert len(told) == 1 and what in str(told[0].message) and "CUPYFLASH_CACHE_DIR" in str(told[0].message)


# ---- where it is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "platform, variables, place",
    [
        ("linux", {}, "home/.cache/cupyflash"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/cupyflash"),
        ("win32", {}, "home/AppData/Local/cupyflash"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/cupyflash"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "home/Library/Caches/cupyflash"),
        ("linux", {"CUPYFLASH_CACHE_DIR": "/mine", "XDG_CACHE_HOME": "/xdg"}, "/mine"),
        ("linux", {"CUPYFLASH_CACHE_DIR": ""}, "home/.cache/cupyflash"),
    ],
)
def test_place(monkeypatch, platform, variables, place):
    for name in ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert cache_dir() == Path(place)


@posix
def test_a_user_who_is_not_known(monkeypatch, recwarn):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~nosuchuser/cache")
    assert not compile_anew().cached
    assert not compile_anew().cached
    assert cache_info().entries == 0
    (told,) = recwarn.list
    assert "CUPYFLASH_CACHE_DIR is '~nosuchuser/cache', but no such user is known" in str(told.message)
    assert not Path("~nosuchuser").exists()
