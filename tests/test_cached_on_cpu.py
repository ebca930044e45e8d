"""k and v of 8 bits beside q of 16, in kernels that run without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from cached_problems import Cached, draw
from cuda_on_cpu import as_cpp, cases, compile_all, needs_compiler
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate

pytestmark = needs_compiler

ARCHS = {"sm80": Arch("sm_90a", 90, 3, 232448), "simt": Arch("sm_75", 75, 3, 65536)}
A100 = Arch("sm_80", 80, 3, 166912)
LENGTHS = [5, 0, 130, 64]
TOKEN: dict[str, Any] = {"lens_q": [1] * 4, "lens_k": LENGTHS, "heads": (8, 2), "dims": (64, 48)}
E4M3, INT8 = "float8_e4m3fn", "int8"
# (dtype of k and v, what they are multiplied by, how they lie)
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "a token": (E4M3, "row", TOKEN | {"options": {"causal": True}}),
    "a token, int8, pages": (INT8, "row", TOKEN | {"form_k": "paged", "page": 7, "dtype": "bfloat16"}),
    "a token, an array": (INT8, "array", TOKEN | {"lens_k": [5, 0, 30, 64]}),
    "a token, by head": (INT8, "head", TOKEN | {"dims": (128, 128), "heads": (4, 1)}),
    "a token, a number, a key mask": (E4M3, "number", TOKEN | {"given": ("key_mask",)}),
    "a token, a key mask": (E4M3, "row", TOKEN | {"lens_k": [90, 64, 130, 5], "given": ("key_mask",), "along": "bk"}),
    # What a tile before the first one would hold lies beyond the page before the array.
    "a token, many heads": (E4M3, "row", TOKEN | {"heads": (64, 32), "dims": (16, 16), "lens_k": [130, 64, 70, 5]}),
    "a token, sinks": (E4M3, None, TOKEN | {"given": ("sinks", "bias")}),
    "a token, a window": (E4M3, "row", TOKEN | {"options": {"window": (20, None)}}),
    "a token, wide": (INT8, "row", TOKEN | {"dims": (256, 192), "heads": (2, 1)}),
    "chunks": (E4M3, "row", {"lens_q": [70, 3, 1, 33], "lens_k": [80, 3, 150, 64], "form_q": "packed",
        "form_k": "paged", "page": 16, "options": {"causal": True}, "dtype": "bfloat16"}),
    "packed": (E4M3, "head", {"lens_q": [70, 3, 0, 33], "lens_k": [80, 3, 150, 64], "form_q": "packed",
        "form_k": "packed", "dims": (32, 80), "options": {"window": (30, 9), "softcap": 5.0}}),
    "wide": (E4M3, "row", {"lens_q": [20] * 2, "lens_k": [90, 33], "dims": (320, 288), "heads": (2, 1)}),
    "shares": (E4M3, "row", TOKEN | {"lens_q": [1], "lens_k": [1300], "options": {"causal": True}}),
}  # fmt: skip
APART = ("a token, sinks", "a token, a window")  # heads differ there, or positions do


@cases([f"{family}: {name}" for family in ARCHS for name in CASES],
       "sm80: a token", "sm80: a token, int8, pages", "sm80: a token, many heads", "simt: a token",
       "sm80: chunks")  # fmt: skip
def test_exact_on_what_is_meant(case: str, rng: np.random.Generator) -> None:
    family, name = case.split(": ")
    eight, by, how = CASES[name]
    drawn = draw(rng, eight, by, **how)
    grouped = check(family, ARCHS[family], drawn)
    assert grouped == (name.startswith(("a token", "shares")) and name not in APART)


def check(family: str, arch: Arch, drawn: Cached) -> bool:
    """Whether heads stood together."""
    case = drawn.case
    numbers = {name: x for name, x in drawn.scales.items() if isinstance(x, float)}
    scales = {name: x for name, x in drawn.scales.items() if name not in numbers}
    q, k, v = (case.arrays[name] for name in "qkv")
    options = dict(case.options)
    if numbers:
        options["scale"] = numbers["k_descale"] * q.shape[-1] ** -0.5
        options["out_scale"] = numbers["v_descale"]
    problem = state(q, k, v, **options, **case.given, **case.lengths, **scales)
    kernels = plan(problem, arch, family=family)
    (library,) = compile_all(as_cpp(generate(kernels), [x.name for x in kernels.launches]))
    shape = {name: drawn.exact[name].shape for name in ("out", "lse")}
    for last_first in (False, True):
        inputs = {"q": q, "k": k, "v": v, **case.given, **case.lengths, **scales}
        given = {name: Guarded(x.shape, x.dtype, x, rows_aligned=kernels.alignment == 16) for name, x in inputs.items()}
        given |= {x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes}
        results = {"out": Guarded(shape["out"], q.dtype), "lse": Guarded(shape["lse"], "float32")}
        run(library, kernels, problem, given | results, last_first, arch.sms)
        drawn.judge({name: x.array for name, x in results.items()})
    return kernels.grouped
