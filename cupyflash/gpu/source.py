"""From a plan to one CUDA string: our files inlined, the plan's constants in front. Pure; needs no GPU.

The string includes nothing from outside, so that NVRTC alone compiles it, and carries `#line` marks, so that a
compiler message names our file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from .plan import KernelPlan

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')
_TYPES = {  # Element, the type that sums are kept in
    "float16": ("half_t", "float"),
    "bfloat16": ("bfloat16_t", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}


@functools.cache
def kernels_folder() -> Path:
    """The folder of `.cu` files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "attention" / "params.cuh").is_file():
            return folder
    raise FileNotFoundError(f"cupyflash's CUDA sources are missing: no kernels_cu in {package} nor beside it")


def generate(plan: KernelPlan) -> str:
    """The whole CUDA source of a plan, as one string."""
    element, accum = _TYPES[plan.dtype]
    constants = "\n".join(f"constexpr {_declare(name, value)};" for name, value in plan.constants)
    prelude = (
        "// Distinct types for the two 16-bit formats; only ptx/convert.cuh looks inside.\n"
        "struct half_t { unsigned short bits; };\nstruct bfloat16_t { unsigned short bits; };\n"
        f"using Element = {element};\nusing Accum = {accum};\n"
        f"namespace config {{\n{constants}\n}}\n"
    )
    return prelude + _inline(plan.source)


@functools.cache
def _inline(name: str) -> str:
    """A kernel file with every `#include "..."` of ours replaced by that file's text, each file once."""
    seen: set[str] = set()

    def text(file: str) -> list[str]:
        seen.add(file)
        lines = [f'#line 1 "{file}"']
        for number, line in enumerate((kernels_folder() / file).read_text(encoding="utf-8").splitlines(), 1):
            match = _INCLUDE.match(line)
            if line.strip() == "#pragma once":
                lines.append("")  # each file enters once, and NVRTC warns of the pragma in a main file
            elif match is None:
                lines.append(line)
            elif match[1] not in seen:
                lines += [*text(match[1]), f'#line {number + 1} "{file}"']
            else:
                lines.append("")
        return lines

    return "\n".join(text(name)) + "\n"


def _declare(name: str, value: bool | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    return f"int {name} = {value}" if isinstance(value, int) else f"double {name} = {value!r}"


@functools.cache
def sources_digest() -> str:
    """SHA-256 over the kernels and the code that plans and launches them: what a GPU report vouches for."""
    gpu = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for label, root, suffixes in (("kernels_cu", kernels_folder(), (".cu", ".cuh")), ("gpu", gpu, (".py",))):
        for path in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).as_posix()):
            if path.suffix in suffixes:
                content = path.read_bytes().replace(b"\r\n", b"\n")
                digest.update(f"{label}/{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
