"""Whom the cache of kernels believes: links, owners, and two users of one folder."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_cache
from test_cache import OTHER, SOURCE, compile_anew, entry, posix, refused

from cupyflash import folders
from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler
from cupyflash.gpu.cache import cache_info

cache, nobody = test_cache.cache, test_cache.nobody


def test_an_entry_under_another_key_is_refused(cache):
    disk.write(b"one", b"the program of one")
    first = entry(cache)
    disk.write(b"two", b"the program of two")
    (second,) = (path for path in (cache / "cupyflash-programs").iterdir() if path != first)
    shutil.copy(first, second)
    assert disk.read(b"one") == b"the program of one"
    assert disk.read(b"two") is None


def test_an_entry_without_a_program_is_mended(cache):
    """Whole by its digest, and yet nothing that can be used."""
    whole = compile_anew()
    disk.write(compiler._key(SOURCE, "sm_80"), b'{"bad": "JSON"')
    again = compile_anew()
    assert not again.cached and again.cubin == whole.cubin
    assert compile_anew().cached


@posix
@pytest.mark.parametrize("umask, folder, file", [(0, 0o755, 0o644), (0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_nobody_else_may_write(cache, umask, folder, file):
    before = os.umask(umask)
    try:
        disk.write(b"key", b"value")
    finally:
        os.umask(before)
    for path, mode in ((cache, folder), (cache / "cupyflash-programs", folder), (entry(cache), file)):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(cache, mode):
    disk.write(b"key", b"value")
    (cache / "cupyflash-programs").chmod(mode)
    refused("other users can write there")
    disk.write(b"other", b"value")
    assert len(list((cache / "cupyflash-programs").iterdir())) == 1
    assert "other users can write there" in cache_info().note
    (cache / "cupyflash-programs").chmod(0o755)
    assert disk.read(b"key") == b"value"


@posix
@pytest.mark.parametrize("mode", [0o666, 0o664])
def test_an_entry_that_others_can_write_is_not_used(cache, mode):
    disk.write(b"key", b"value")
    disk.write(b"other", b"value")
    for path in (cache / "cupyflash-programs").iterdir():
        path.chmod(mode)
    refused("writable by nobody else")
    disk.write(b"key", b"value")  # as a compilation does
    assert disk.read(b"key") == b"value"


@posix
def test_what_another_user_owns_is_not_used(cache, nobody):
    disk.write(b"key", b"value")
    os.chown(entry(cache), nobody, -1)
    refused("own them")
    folders.warn_once.cache_clear()
    disk.write(b"key", b"value")
    os.chown(cache / "cupyflash-programs", nobody, -1)
    refused("own them")


@posix
@pytest.mark.parametrize("kind", ["FIFO", "link to an entry", "link to nothing"])
def test_no_file_where_an_entry_should_be(cache, kind):
    disk.write(b"key", b"value")
    path = entry(cache)
    moved = path.rename(cache / "moved")
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(moved if kind == "link to an entry" else cache / "none")
    assert disk.read(b"key") is None
    disk.write(b"key", b"new")
    assert disk.read(b"key") == b"new"
    assert moved.read_bytes().endswith(b"\nvalue")


def test_a_link_to_the_folder_is_followed(cache, tmp_path):
    """~/.cache often is one, to a larger disk."""
    (tmp_path / "large").mkdir()
    try:
        cache.symlink_to(tmp_path / "large", target_is_directory=True)
    except OSError:
        pytest.skip("no links")
    disk.write(b"key", b"value")
    assert disk.read(b"key") == b"value" and (tmp_path / "large" / "cupyflash-programs").is_dir()


# ---- two users ------------------------------------------------------------------------------------------------------


@pytest.fixture
def for_everybody(monkeypatch) -> Iterator[Path]:
    """A cache in a folder that every user can reach, as in a container."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(Path(top, "cache")))
        yield Path(top, "cache")
    os.umask(before)


def test_root_fills_and_another_user_runs(for_everybody, nobody, recwarn):
    """A container: what is in it is found, what is not costs a compilation and cannot be kept."""
    compile_anew()
    os.seteuid(nobody)
    with pytest.raises(PermissionError):
        (for_everybody / "cupyflash-programs" / "x").touch()
    assert compile_anew().cached
    assert not compile_anew(OTHER).cached
    os.seteuid(0)
    assert cache_info().entries == 1 and len(list((for_everybody / "cupyflash-programs").iterdir())) == 1
    assert not recwarn.list


@pytest.mark.parametrize("what", ["programs", "entry"])
def test_what_another_user_cannot_read_is_told_once(for_everybody, nobody, what):
    compile_anew()
    path = for_everybody / "cupyflash-programs" if what == "programs" else entry(for_everybody)
    path.chmod(0o700 if what == "programs" else 0o600)
    os.seteuid(nobody)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not compile_anew().cached
        assert not compile_anew().cached
    assert len(told) == 1
    assert f"{for_everybody / 'cupyflash-programs'} cannot be read by this user" in str(told[0].message)
    assert "chmod -R a+rX" in str(told[0].message)
    assert what == "entry" or "cannot be read" in cache_info().note


def test_whose_cache_is_planted_by_another_user(for_everybody, nobody):
    """Into a folder that everybody can write: the victim is not given it."""
    for_everybody.mkdir()
    for_everybody.chmod(0o777)
    os.seteuid(nobody)
    disk.write(b"key", b"value")
    assert disk.read(b"key") == b"value"  # it is right, for who wrote it
    os.seteuid(0)
    refused("own them")
