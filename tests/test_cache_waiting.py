"""Many processes and threads that want the same kernel: one compiles, the others wait."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import test_cache
from test_cache import SOURCE, in_a_new_process, output, posix

from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler
from cupyflash.gpu.cache import cache_dir, cache_info

cache = test_cache.cache


def test_one_compiles_and_the_others_wait(tmp_path):
    """A cold start of many processes: each that compiles says so, and takes a second more than it would."""
    start = tmp_path / "start"
    code = f"""
import pathlib, time
compiler._key(SOURCE, "sm_80")  # what is loaded late
compiler.nvrtc_version()
real = compiler.compile_uncached
compiler.compile_uncached = lambda *given: (time.sleep(1), print("compiles"), real(*given))[-1]
print("ready", flush=True)
while not pathlib.Path({str(start)!r}).exists():
    time.sleep(0.001)
print("has it", len(compiler.compile_source(SOURCE, "sm_80").cubin))
"""
    processes = [in_a_new_process(code) for _ in range(8)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    start.touch()
    printed = [output(process) for process in processes]
    assert sorted(text.count("compiles") for text in printed) == [0] * 7 + [1]
    assert len({text.splitlines()[-1] for text in printed}) == 1
    assert cache_info().entries == 1 and len(list((cache_dir() / "cupyflash-programs").iterdir())) == 1  # and no lock


def test_threads_wait_for_each_other(monkeypatch):
    compiled = []
    real = compiler.compile_uncached

    def slow(source, arch):
        compiled.append(source)
        time.sleep(0.3)
        return real(source, arch)

    monkeypatch.setattr(compiler, "compile_uncached", slow)
    threads = [threading.Thread(target=compiler.compile_source, args=(SOURCE, "sm_80")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [SOURCE]


HOLD = """
from cupyflash.gpu import cache
with cache.turn(b"key"):
    print("holds", flush=True)
    input()
"""


def seconds_for_a_turn() -> float:
    start = time.perf_counter()
    with disk.turn(b"key"):
        return time.perf_counter() - start


@posix
def test_nobody_waits_for_the_dead():
    holder = in_a_new_process(HOLD, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "holds\n"
    assert list((cache_dir() / "cupyflash-programs").glob("*.lock"))
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert list((cache_dir() / "cupyflash-programs").glob("*.lock"))  # it could not clean up
    assert seconds_for_a_turn() < disk.PATIENCE / 2
    assert not list((cache_dir() / "cupyflash-programs").iterdir())


@posix
def test_nobody_waits_longer_than_compiling_takes(monkeypatch):
    monkeypatch.setattr(disk, "PATIENCE", 0.5)
    holder = in_a_new_process(HOLD, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "holds\n"
    holder.send_signal(signal.SIGSTOP)
    assert 0.5 <= seconds_for_a_turn() < 30
    holder.send_signal(signal.SIGCONT)
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0


def test_who_kept_nothing_is_waited_for_once(monkeypatch):
    """On a full disk those who waited do not queue up: when the first is done they all compile at once."""
    first, waiting, entered, together = threading.Event(), threading.Event(), [], []
    all_four, real, queued = threading.Barrier(4), disk._lock, set()

    def lock(handle):
        queued.add(threading.get_ident())
        real(handle)

    monkeypatch.setattr(disk, "_lock", lock)

    def hold():
        with disk.turn(b"key"):
            first.set()
            waiting.wait()

    def wait():
        with disk.turn(b"key"):
            entered.append(1)
            if sys.platform != "win32":  # where they take turns
                all_four.wait(20)
                together.append(1)

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert first.wait(60)
    threads += [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads[1:]:
        thread.start()
    end = time.monotonic() + 60
    while len(queued) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(queued) == 5 and not entered
    waiting.set()
    for thread in threads:
        thread.join()
    assert len(entered) == 4 and (len(together) == 4 or sys.platform == "win32")


@posix
@pytest.mark.parametrize("problem", ["no locks", "FIFO", "folder"])
def test_locks_that_cannot_be_had_cost_nothing(cache, monkeypatch, problem):
    lock = cache / "cupyflash-programs" / f"{disk._name(b'key')}.lock"
    lock.parent.mkdir(parents=True)
    if problem == "FIFO":
        os.mkfifo(lock)
    elif problem == "folder":
        lock.mkdir()
    else:

        def refuse(handle):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(disk, "_lock", refuse)
    assert seconds_for_a_turn() < disk.PATIENCE / 2
