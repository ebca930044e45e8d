"""From a plan to one CUDA string: our files inlined, the plan's constants in front. Pure; needs no GPU.

The string includes nothing from outside, so that NVRTC alone compiles it, and carries `#line` marks, so that a
compiler message names our file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from ..passes import PASSES
from . import params, score
from .kernel_plan import KernelPlan

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*(?://.*)?$')
_SCORE = "user/score.cuh"  # where the user's score function stands, which is no file
# Packages that a call on a GPU goes through; modules beside them it may all meet.
_WALKED = ("gpu", "interop", "score", "torch", "jax", "blockmask")
FORMATS = (
    "// Distinct types for the formats of 16 and 8 bits; only ptx/convert.cuh looks inside.",
    "struct half_t { unsigned short bits; };",
    "struct bfloat16_t { unsigned short bits; };",
    "struct float8_t { unsigned char bits; };  // e4m3: no infinities, at most 448",
    "struct integer8_t { signed char bits; };",
)


@functools.cache
def kernels_folder() -> Path:
    """The folder of `.cu` files: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "simt" / "forward.cu").is_file():
            return folder
    raise FileNotFoundError(f"cupyflash's CUDA sources are missing: no kernels_cu in {package} nor beside it")


def generate(plan: KernelPlan) -> str:
    """The whole CUDA source of a plan, as one string."""
    named = (*params.types(plan), params.dq_type(plan), params.kept_type(plan))
    types = zip(("In", "Product", "Out", "Accum", "OutQ", "Kept"), named)
    lines = [
        *FORMATS,
        *(f"using {name} = {type};" for name, type in types),
        "namespace config {",
        *(
            f"constexpr {_declare(name, value)};"
            for name, value in (*plan.constants, ("PORTIONS", bool(plan.portions)))
        ),
        "}",
    ]
    function = f'#line 1 "{_SCORE}"\n' + score.text(plan.score, plan.wrt, plan.tangents)
    return (
        "\n".join(lines) + "\n" + params.text(plan) + inlined(plan.source).replace(f'#include "{_SCORE}"\n', function)
    )


@functools.cache
def inlined(name: str) -> str:
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
            elif match[1] == _SCORE:
                lines += [f'#include "{_SCORE}"', f'#line {number + 1} "{file}"']
            elif match[1] not in seen:
                lines += [*text(match[1]), f'#line {number + 1} "{file}"']
            else:
                lines.append("")
        return lines

    return "\n".join(text(name)) + "\n"


@functools.cache
def code_digest(family: str, of: str) -> str:
    """SHA-256 over the code of the kernel files that a family has for a pass, and of what they include: comments, and
    where a line stands, do not count. A file's name says its pass: the longest that is in it."""
    found = sorted((kernels_folder() / family).glob("*.cu"))
    names = [x.name for x in found if max((name for name in PASSES if name in x.stem), key=len, default="") == of]
    lines = (line.partition("//")[0].split() for name in names for line in inlined(f"{family}/{name}").splitlines())
    return hashlib.sha256("\n".join(" ".join(x) for x in lines if x and x[0] != "#line").encode()).hexdigest()


def _declare(name: str, value: bool | float) -> str:
    if isinstance(value, bool):
        return f"bool {name} = {str(value).lower()}"
    return f"int {name} = {value}" if isinstance(value, int) else f"double {name} = {value!r}"


def sources() -> dict[str, Path]:
    """What a run on a GPU vouches for, by name: the kernels, and every module that a call with GPU arrays walks
    through."""
    package = Path(__file__).resolve().parent.parent
    found = [*package.glob("*.py"), *(x for room in _WALKED for x in (package / room).rglob("*.py"))]
    named = {f"cupyflash/{path.relative_to(package).as_posix()}": path for path in found}
    kernels = kernels_folder()
    named |= {
        f"kernels_cu/{path.relative_to(kernels).as_posix()}": path
        for path in kernels.rglob("*")
        if path.suffix in (".cu", ".cuh")
    }
    return dict(sorted(named.items()))


@functools.cache
def sources_digest() -> str:
    """SHA-256 over `sources()`, whose lines may end as git likes them on the machine at hand."""
    digest = hashlib.sha256()
    for name, path in sources().items():
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
