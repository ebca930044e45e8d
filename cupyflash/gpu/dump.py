"""CUPYFLASH_DUMP=folder: every program that a process uses, in files that a person can read.

Each program is four files, named as in sm_90a-sm90-forward-bfloat16-d128-1f0c93aa: `.cu`, the one source that was
compiled; `.ptx`; `.cubin`, for cuobjdump, nvdisasm and Nsight; and `.txt`, what it is for and what each kernel takes.
PTX is not needed to run, so it is compiled for the dump alone, which takes as long as the program did.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ..folders import written_whole
from . import compiler
from .compiler import Compiled
from .kernel_plan import KernelPlan

VARIABLE = "CUPYFLASH_DUMP"


def dump(plan: KernelPlan, source: str, compiled: Compiled) -> None:
    """Write a program's files to the folder that CUPYFLASH_DUMP names, if it names one, once per process.

    OSError says so where it cannot.
    """
    folder = os.environ.get(VARIABLE)
    if folder and (folder, plan.arch, source) not in _dumped:
        _write(Path(folder), plan, source, compiled)
        _dumped.add((folder, plan.arch, source))


_dumped: set[tuple[str, str, str]] = set()


def title(plan: KernelPlan, source: str) -> str:
    """The name of a program's files: architecture, family, pass, dtype, head dimensions (of its tile), and a hash."""
    constants = dict(plan.constants)
    dims = [constants[name] for name in ("DIM", "DIM_V", "COLUMNS") if name in constants]
    dim = f"d{dims[0]}" if len(set(dims)) == 1 else "d" + "x".join(map(str, dims))
    digest = hashlib.sha256(f"{plan.arch}\n{source}".encode()).hexdigest()
    return f"{plan.arch}-{plan.family}-{plan.of}-{plan.dtype}-{dim}-{digest[:8]}"


def _write(folder: Path, plan: KernelPlan, source: str, compiled: Compiled) -> None:
    name = title(plan, source)
    files = {
        ".cu": source.encode(),
        ".ptx": compiler.ptx(source, plan.arch).encode(),
        ".cubin": compiled.cubin,
        ".txt": _text(name, plan, compiled).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, content in files.items():
            with written_whole(folder / (name + suffix)) as file:
                file.write(content)
    except OSError as error:
        raise OSError(f"{VARIABLE} is {str(folder)!r}; it must be a folder that can be written ({error})") from error


def _text(name: str, plan: KernelPlan, compiled: Compiled) -> str:
    lines = [name, f"source {plan.source}", *(f"{key} = {value}" for key, value in plan.constants), ""]
    for launch in plan.launches:
        used = compiled.resources.get(launch.name)
        static = 0 if used is None else used.static_shared
        lines.append(f"{launch.name}: {launch.threads} threads, {launch.shared_memory + static} bytes of shared memory")
        if used is not None:
            spilled = used.spill_stores + used.spill_loads
            lines[-1] += f", {used.registers} registers, {spilled} bytes spilled, {used.stack} bytes of stack"
    return "\n".join([*lines, "", compiled.log, ""])
