"""The disk cache: a hit where it works, a compilation and no more where it does not."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from cupyflash.gpu import compiler
from cupyflash.gpu.compiler import CacheInfo, cache_dir, cache_info, clear_cache, share_cache

pytest.importorskip("cuda.core")

SOURCE = 'extern "C" __global__ void k(int *a) { *a = 1; }'
OTHER = 'extern "C" __global__ void k(int *a) { *a = 2; }'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of our own, still empty."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(path))
    compiler.compile_source.cache_clear()
    yield path
    compiler.compile_source.cache_clear()


def compile_anew(source=SOURCE, arch="sm_80"):
    """As a new process would: nothing but the disk cache remembers."""
    compiler.compile_source.cache_clear()
    compiled = compiler.compile_source(source, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.resources["k"].registers > 0
    return compiled


def entry(cache: Path) -> Path:
    (path,) = (p for p in (cache / "programs").rglob("*") if p.is_file())
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
    clear_cache()
    assert file.read_text() == "kept"


@pytest.mark.skipif(sys.platform == "win32", reason="no permission bits")
def test_read_only_and_filled_by_another_user(monkeypatch):
    """What is in it is found, what is not costs a compilation. Root may write anywhere, so it steps down first."""
    code = """
import os
compiler.compile_uncached(SOURCE, 'sm_80')  # loads all that perhaps only root may read
if os.geteuid() == 0:
    os.setuid(65534)
try:
    (compiler.cache_dir() / "x").touch()
except PermissionError:
    print(compiler.compile_source(SOURCE, 'sm_80').cached, compiler.compile_source(OTHER, 'sm_80').cached)
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        cache = Path(folder, "cache")
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(cache))
        compile_anew()
        share_cache()
        folders = [cache, *(p for p in cache.rglob("*") if p.is_dir())]
        for p in folders:
            p.chmod(0o555)
        printed = output(in_a_new_process(code))
        for p in folders:
            p.chmod(0o755)
        assert cache_info().entries == 1
    assert printed == "True False"


@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
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


def test_32_processes_at_once(tmp_path):
    start = tmp_path / "start"
    code = f"""
import pathlib, time
compiler.nvrtc_version()
print("ready", flush=True)
while not pathlib.Path({str(start)!r}).exists():
    time.sleep(0.001)
compiled = compiler.compile_source(SOURCE, 'sm_80')
print(compiled.resources["k"].registers > 0, compiler.hashlib.sha256(compiled.cubin).hexdigest())
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
    monkeypatch.setattr(compiler, "CACHE_LIMIT", int(2.5 * size))
    for source in (sources[1], sources[0], sources[2]):
        time.sleep(0.02)  # beyond the clock tick of access times
        compile_anew(source)
    assert cache_info().entries == 2
    assert compile_anew(sources[0]).cached
    assert compile_anew(sources[2]).cached
    assert not compile_anew(sources[1]).cached


def test_info_and_clear(cache):
    assert cache_info() == CacheInfo(cache, 0, 0)
    compile_anew()
    compile_anew(OTHER)
    stranger = cache / "not ours"
    stranger.write_text("kept")
    info = cache_info()
    assert (info.path, info.entries) == (cache, 2)
    assert info.bytes > len(compiler.compile_source(SOURCE, "sm_80").cubin)
    assert clear_cache() == info
    assert cache_info() == CacheInfo(cache, 0, 0)
    assert not compiler.compile_source(SOURCE, "sm_80").cached
    assert stranger.read_text() == "kept"


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
