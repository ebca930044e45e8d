"""Calls with k and v of 8 bits beside q of 16, and what they must give: exact attention on what the numbers mean."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from criterion import assert_as_good
from ragged import Case, draw_case, expected
from reference import DTYPES

EIGHT = {"float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn), "int8": np.dtype(np.int8)}
BY = (None, "number", "array", "head", "row")  # what numbers are multiplied by


class Cached(NamedTuple):
    case: Case  # of which k and v are of 8 bits
    scales: dict[str, Any]
    exact: dict[str, np.ndarray]  # out and lse
    own: dict[str, np.ndarray]  # as standard operations give them, of k and v rounded to the dtype of q

    def judge(self, found: dict[str, np.ndarray]) -> None:
        for name, x in found.items():
            assert_as_good(x, self.exact[name], self.own[name], name)


def draw(
    rng: np.random.Generator, eight: str, by: str | None, lens_q: list[int], lens_k: list[int], **how: Any
) -> Cached:
    """`how` as of `draw_case`. What belongs to nobody holds NaN, or as bad, and so do its scales."""
    how = {"dtype": "float16", "form_q": "dense", "form_k": "filled"} | how
    case = draw_case(rng, lens_q, lens_k, **how)
    arrays, meant, scales = dict(case.arrays), {}, {}
    for name in "kv":
        x = case.arrays[name].astype(np.float32)
        nobodys = np.isnan(x)
        if eight == "int8":
            arrays[name] = np.where(nobodys, -128, np.clip(np.rint(25 * x), -127, 127)).astype(np.int8)
        else:
            arrays[name] = x.astype(EIGHT[eight])
        unit = 1 / 25 if eight == "int8" else 1.0
        scale: Any = 1.0
        if by == "number":
            scale = unit * rng.uniform(0.5, 2)
        elif by == "array":
            scale = np.array([unit * rng.uniform(0.5, 2)], np.float32)
        elif by == "head":
            scale = (unit * rng.uniform(0.5, 2, x.shape[-2])).astype(np.float32)
        elif by == "row":
            scale = (unit * rng.uniform(0.5, 2, x.shape[:-1])).astype(np.float32)
            scale[nobodys.all(-1)] = np.nan
        if by is not None:
            scales[f"{name}_descale"] = scale
        meant[name] = arrays[name].astype(np.float64) * (scale if np.ndim(scale) == 0 else scale[..., None])
    if "key_mask" in case.given and how["form_k"] == "filled":  # what is hidden may be anything, too
        masks = np.broadcast_to(case.given["key_mask"], (len(lens_k), max(lens_k) + 2))
        for (entry, rows), shown in zip(case.keys, masks):
            for name in "kv":
                hidden = ~shown[: len(arrays[name][entry, rows])]
                arrays[name][entry, rows][hidden] = -128 if eight == "int8" else np.nan
                if by == "row":
                    scales[f"{name}_descale"][entry, rows][hidden] = np.nan
    exactly = {name: meant.get(name, x).astype(np.float64) for name, x in case.arrays.items()}
    options = {"scale": case.arrays["q"].shape[-1] ** -0.5, **case.options}
    exact = expected(case._replace(arrays=exactly, options=options, given=_as(case.given, np.float64)), False, False)
    rounded = {
        name: meant[name].astype(DTYPES[how["dtype"]]) if name in meant else x for name, x in case.arrays.items()
    }
    return Cached(case._replace(arrays=arrays), scales, exact, expected(case._replace(arrays=rounded), True, False))


def _as(given: dict[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    return {name: x.astype(dtype) if x.dtype.kind not in "biu" else x for name, x in given.items()}
