"""Compiled programs on disk: one file each, named by its key, in one folder.

Whatever happens to the folder costs a compilation, never an error: it may be read-only, full, corrupt, shared by many
processes, or deleted at any moment. A program is code that a GPU will run, so it is believed only where this user or
root owns its file and the folder, which is no link, where nobody else may write to them, and where its digest, which
covers its key, is right. What is removed has a name that only this module gives.

New files can be read by whom the umask lets read them (with the usual 022: everybody), so that root fills the cache of
a container and another user runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..folders import PARTIAL, user_folder, warn_once, written_whole

LIMIT = 512 << 20  # bytes on disk; the programs that were not read for longest go first
PATIENCE = 30.0  # seconds: the longest that a compilation takes, and that one process waits for another's
STALE = 3600.0  # seconds after which a lock or a file half written was left by a process that died

_PROGRAM = re.compile(r"[0-9a-f]{64}\.program")
_LOCK = re.compile(_PROGRAM.pattern + r"\.lock")
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
# A FIFO must not hang, a link leads out of the folder, and Windows would turn bytes into text.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_LINK | getattr(os, "O_BINARY", 0)

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True)
class CacheInfo:
    """What the cache holds; `note` says why it is not used, where it is not."""

    path: Path
    entries: int
    bytes: int
    note: str = ""


def cache_dir() -> Path:
    """CUPYFLASH_CACHE_DIR, or "cupyflash" in the user's cache folder."""
    return user_folder(
        "CUPYFLASH_CACHE_DIR", ("LOCALAPPDATA", "AppData/Local"), "Library/Caches", ("XDG_CACHE_HOME", ".cache")
    )


def cache_info() -> CacheInfo:
    """Where the cache is and what it holds."""
    note, sizes = "", []
    try:
        note = "" if _ours(os.lstat(_folder())) else _foreign()
        with os.scandir(_folder()) as found:
            for x in found:
                with contextlib.suppress(OSError):  # another process may remove it meanwhile
                    if _PROGRAM.fullmatch(x.name) and x.is_file(follow_symlinks=False):
                        sizes.append(x.stat(follow_symlinks=False).st_size)
    except PermissionError:
        note = _unreadable()
    except OSError:
        pass  # nothing was ever kept
    return CacheInfo(cache_dir(), len(sizes), sum(sizes), note)


def read(key: bytes) -> bytes | None:
    """What was written under a key; None where that is not there, not whole, or may be another user's."""
    try:
        if not _ours(os.lstat(_folder())):
            warn_once(_foreign())
            return None
        handle = os.open(_folder() / _name(key), _READ)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return None
            if not _ours(status):
                warn_once(_foreign())
                return None
            entry = file.read()
            with contextlib.suppress(
                OSError
            ):  # said, because few file systems note it by themselves; not for root's files
                where = handle if os.utime in os.supports_fd else _folder() / _name(key)
                os.utime(where, ns=(time.time_ns(), status.st_mtime_ns))
    except PermissionError:
        warn_once(_unreadable())
        return None
    except OSError:
        return None
    digest, _, value = entry.partition(b"\n")
    return value if digest == _digest(key, value) else None


def write(key: bytes, value: bytes) -> None:
    """Keep `value` under a key, if that can be done: the file is there whole or not at all."""
    with contextlib.suppress(OSError):
        _make(_folder())
        if not _ours(os.lstat(_folder())):
            return
        with written_whole(_folder() / _name(key), 0o644) as file:
            file.write(_digest(key, value) + b"\n" + value)
        _tidy()


@contextlib.contextmanager
def turn(key: bytes) -> Iterator[None]:
    """Let one of several processes (and threads) that miss a key make it, and hold the others up until it has.

    They are held up for PATIENCE at most, and not at all by a process that died, or where files cannot be locked.
    """
    path = _folder() / f"{_name(key)}.lock"
    handle, locked, end = None, False, time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        _make(_folder())
        if _ours(os.lstat(_folder())):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        while handle is not None and not locked:
            try:
                _lock(handle)
                locked = True
            except (BlockingIOError, PermissionError):  # another has it (on Windows: the latter)
                if os.fstat(handle).st_nlink == 0 or time.monotonic() > end:  # and is done with it, or too slow
                    break
                time.sleep(0.02)
    try:
        yield
    finally:
        # First its name, then the lock: whoever waits sees that its holder is done, and does not queue for it.
        if locked:
            with contextlib.suppress(OSError):  # Windows removes no open file: there they take turns
                os.unlink(path)
        if handle is not None:
            os.close(handle)


def _folder() -> Path:
    return cache_dir() / "cupyflash-programs"  # ours alone, wherever CUPYFLASH_CACHE_DIR points


def _make(folder: Path) -> None:
    """Create a folder and those above it, none of which others may write to, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        with contextlib.suppress(FileExistsError):
            if not path.is_dir():
                path.mkdir(mode=0o755)


def _name(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest() + ".program"


def _digest(key: bytes, value: bytes) -> bytes:
    return hashlib.sha256(_name(key).encode() + value).hexdigest().encode()


def _ours(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written it. On Windows the folder's access list sees to that.

    Of a link, as lstat sees it, nobody knows.
    """
    if stat.S_ISLNK(status.st_mode):
        return False
    if sys.platform == "win32":
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _foreign() -> str:
    return (
        f"compiled kernels in {_folder()} are not used, since other users can write there or own them, or it is a "
        "link: it and its files must be yours or root's and writable by nobody else (chmod -R go-w, or "
        "CUPYFLASH_CACHE_DIR names another folder)"
    )


def _unreadable() -> str:
    return (
        f"compiled kernels in {_folder()} cannot be read by this user, so they are compiled anew: give all users the "
        "right to read them (chmod -R a+rX), or let CUPYFLASH_CACHE_DIR name another folder"
    )


def _tidy() -> None:
    """Remove what processes that died have left, and, beyond LIMIT, the programs that were not read for longest."""
    programs, now = [], time.time()
    with os.scandir(_folder()) as found:
        for x in found:
            with contextlib.suppress(OSError):
                status = x.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _PROGRAM.fullmatch(x.name):
                    programs.append((status.st_atime, status.st_size, x.path))
                elif (_LOCK.fullmatch(x.name) or PARTIAL.fullmatch(x.name)) and now - status.st_mtime > STALE:
                    os.unlink(x.path)
    excess = sum(size for _, size, _ in programs) - LIMIT
    for _, size, path in sorted(programs):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            excess -= size
