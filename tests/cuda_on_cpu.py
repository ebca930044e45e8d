"""CUDA without a GPU: source compiled as C++, the instructions of kernels_cu/ptx replaced by the twins in ptx_on_cpu/,
the threads of a launch run as fibers (cuda_on_cpu.h).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="needs Linux and g++ to compile the kernels for the CPU",
)


def cases(names: Iterable[str], *always: str) -> Any:
    """Parametrise a test over `case`: g++ takes seconds for each, so that all but some are slow."""
    names = list(names)
    assert names and {*always} <= {*names}
    marks = {name: () if name in always else (pytest.mark.slow,) for name in names}
    return pytest.mark.parametrize("case", [pytest.param(name, id=name, marks=marks[name]) for name in names])


TESTS = Path(__file__).parent
FOLDER = Path(tempfile.mkdtemp(prefix="kernels-on-cpu-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

# Not fortified: that forbids jumps between stacks. Most of the time goes to the compiler: -Og is short for both. An
# address that is no multiple of what is read or written there is a fault, as on a GPU.
GXX = (
    "g++", "-std=c++17", "-Og", "-march=native", "-fPIC", "-fno-exceptions", "-U_FORTIFY_SOURCE", "-w",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error", f"-I{TESTS}",
)  # fmt: skip


def as_cpp(cuda: str, kernels: Iterable[str]) -> str:
    """A source of `gpu/source.py` as C++, with a function to run each kernel.

    A twin stands in the place of each file of ptx; shared memory is that of the block whose thread runs.
    """
    lines, skipping, twins = [], False, set()
    for line in cuda.splitlines():
        mark = re.match(r'#line \d+ "(.*)"', line)
        if mark:
            skipping = mark[1].startswith("ptx/")
            twin = f"ptx_on_cpu/{Path(mark[1]).stem}.h"
            if skipping and twin not in twins:
                assert (TESTS / twin).exists(), f"{mark[1]} has no twin tests/{twin}"
                twins.add(twin)
                lines.append(f'#include "{twin}"')
        if not skipping:
            lines.append(line)
    cpp = "\n".join(lines) + "\n"
    cpp = re.sub(r"extern __shared__ .*?(\w+)\[\];", r"static char*& \1 = on_cpu::dynamic_shared;", cpp)
    fixed = iter(range(100))
    cpp = re.sub(
        r"__shared__ (?:alignas\(\d+\) )?([\w:]+) (\w+)((?:\[[^\]]+\])*);",
        lambda m: f"auto& {m[2]} = on_cpu::fixed_shared<{m[1]}{m[3]}, {next(fixed)}>();",
        cpp,
    )
    return cpp + "".join(
        f'extern "C" const char* run_{name}(const void* params, const void* maps, const on_cpu::Launch& how) {{\n'
        f"    return on_cpu::launch(on_cpu::call({name}, params, maps), how);\n}}\n"
        for name in kernels
    )


@functools.cache
def _machine() -> Path:
    """cuda_on_cpu.cpp, compiled and loaded, and the header that kernels are compiled with, compiled too."""
    header, machine = FOLDER / "cuda_on_cpu.h", FOLDER / "machine.so"
    _run_all(
        [*GXX, "-x", "c++-header", str(TESTS / "cuda_on_cpu.h"), "-o", f"{header}.gch"],
        [*GXX, "-shared", str(TESTS / "cuda_on_cpu.cpp"), "-o", str(machine)],
    )
    ctypes.CDLL(str(machine), ctypes.RTLD_GLOBAL)
    return header


@functools.cache
def _made_of() -> bytes:
    """What a library is made of besides its source: g++, its options for this machine, and our headers."""
    # (-###: with the instructions of this machine. The last of GXX is where our headers are, which are read.)
    gxx = subprocess.run([*GXX[:-1], "-###", "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True, check=True)
    headers = [TESTS / "cuda_on_cpu.h", *sorted((TESTS / "ptx_on_cpu").iterdir())]
    return gxx.stderr + b"".join(x.read_bytes() for x in headers)


def compile_all(*sources: str) -> list[ctypes.CDLL]:
    """A library for each source of `as_cpp`. What is not compiled yet is compiled at the same time.

    They are kept in the folder CUPYFLASH_TEST_CACHE, if it is set, for other processes and later runs.
    """
    header, kept = _machine(), Path(os.environ.get("CUPYFLASH_TEST_CACHE") or FOLDER)
    kept.mkdir(parents=True, exist_ok=True)
    commands, libraries, made = [], [], {}
    for source in sources:
        library = kept / f"{hashlib.sha256(_made_of() + source.encode()).hexdigest()[:16]}.so"
        libraries.append(library)
        if not (library.exists() or library in made):
            text = FOLDER / f"{library.stem}.cpp"
            text.write_text(source)
            made[library] = kept / f"{library.stem}.{os.getpid()}"  # another process may be at it too
            commands.append([*GXX, "-include", str(header), "-shared", str(text), "-o", str(made[library])])
    _run_all(*commands)
    for library, own in made.items():
        own.replace(library)
    return [ctypes.CDLL(str(library)) for library in libraries]


def _run_all(*commands: list[str]) -> None:
    compilers = [subprocess.Popen(command) for command in commands]
    codes = [compiler.wait() for compiler in compilers]
    assert not any(codes), "g++ does not compile this; its messages are above"


class Launch(ctypes.Structure):
    """`on_cpu::Launch`."""

    _fields_ = [
        ("grid", ctypes.c_uint),  # blocks
        ("threads", ctypes.c_uint),  # of each
        ("cluster", ctypes.c_uint),  # blocks of each
        ("in_flight", ctypes.c_uint),  # blocks at once
        ("shared_start", ctypes.c_uint),  # the address of shared memory
        ("shared_bytes", ctypes.c_uint),
        ("last_first", ctypes.c_bool),  # which of the two orders
    ]


def launch(library: ctypes.CDLL, kernel: str, how: Launch, params: bytes, maps: bytes | None = None) -> str | None:
    """Run a kernel on Params and tensor maps; what went wrong, or None."""
    function = getattr(library, f"run_{kernel}")
    function.restype = ctypes.c_char_p
    wrong = function(params, maps, ctypes.byref(how))
    return wrong.decode() if wrong else None
