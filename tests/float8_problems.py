"""Float8 problems: inputs, what they stand for, and how far a result may be from exact attention on that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from frameworks import Framework, framework
from reference import Standard, standard, state
from semantics import (
    CONTIGUOUS,
    Blocks,
    Inputs,
    Lay,
    arrays_of_rank,
    as_arguments,
    as_caller_has_it,
    as_given,
    as_reference_has_it,
    dead_rows,
    spoil,
)

from cupyflash import attention
from cupyflash.problem import BLOCK, DESCALES, AttentionProblem

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
RESULTS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float8_e4m3fn": FLOAT8}
BY = (None, "number", "head", "block")  # what numbers are scaled by
# Of P in 4 bits and of the result's own, over the largest of a row's: a relative error of the whole.
WHOLE = {"bfloat16": 0.035, "float16": 0.035, "float8_e4m3fn": 0.045}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4}  # of a result, and of the smallest ones
SMALLEST = {"bfloat16": 2**-134, "float16": 2**-25, "float8_e4m3fn": 2**-10}


class Quantized(NamedTuple):
    """q, k, v (B, S, H, D) in 8 bits, and what they are multiplied by, (B, H, blocks) or with lengths of 1, or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    descales: dict[str, np.ndarray]

    def meant(self) -> tuple[np.ndarray, ...]:
        """The numbers that they stand for, in float32."""
        found = []
        for name, x in zip("qkv", self[:3]):
            scale = self.descales.get(f"{name}_descale", np.ones((1, 1, 1), np.float32))
            rows = np.repeat(scale, BLOCK, 2)[:, :, : x.shape[1]] if scale.shape[2] > 1 else scale
            found.append(x.astype(np.float32) * np.moveaxis(rows, 1, 2)[..., None])
        return tuple(found)

    def spoilt(self, rng: np.random.Generator, problem: AttentionProblem, key_mask: np.ndarray | None) -> Quantized:
        """With anything in dead rows."""
        if problem.empty:
            return self
        blind, unseen = dead_rows(problem, key_mask)
        return self._replace(q=spoil(rng, self.q, blind), k=spoil(rng, self.k, unseen), v=spoil(rng, self.v, unseen))


def quantize(rng: np.random.Generator, *arrays: np.ndarray, by: str | None = None) -> Quantized:
    """With a scale for each head or block that brings its largest number to 448 (`by`, of BY; "number": any for each
    array).

    Heads and blocks are made of very different size.
    """
    given, descales = [], {}
    for name, x in zip(DESCALES, arrays):
        batch, seq, heads, _ = x.shape
        if by == "number":
            descales[name] = np.full((1, 1, 1), 2.0 ** rng.uniform(-1, 1), np.float32)
        elif by is not None:
            blocks = -(-seq // BLOCK) if by == "block" else 1
            size = 2.0 ** rng.uniform(-2, 2, (batch, heads, blocks)).astype(np.float32)
            rows = np.repeat(size, BLOCK, 2)[:, :, :seq] if by == "block" else size
            x = x * np.moveaxis(rows, 1, 2)[..., None]
            parts = np.split(x, range(BLOCK, seq, BLOCK), axis=1)[:blocks] if by == "block" else [x]
            scale = np.stack([np.abs(part).max((1, 3), initial=1e-3) for part in parts], -1) if parts else size
            descales[name] = scale = scale.astype(np.float32) / 448
            rows = np.repeat(scale, BLOCK, 2)[:, :, :seq] if by == "block" else scale
            x = x / np.moveaxis(rows, 1, 2)[..., None]
        given.append(x.astype(FLOAT8))
    return Quantized(*given, descales)


def exact_of(
    x: Quantized,
    key_mask: Any = None,
    given: dict[str, np.ndarray] | None = None,
    blocks: Blocks | None = None,
    **options: Any,
) -> tuple[AttentionProblem, Standard]:
    """The problem that the numbers state, in float32, and exact attention on them; `blocks`: what options["block_mask"]
    hides."""
    meant, given = x.meant(), given or {}
    problem = state(*meant, key_mask, **options, **given)
    return problem, standard(problem, *meant, key_mask, **(given if blocks is None else blocks.with_mask(given)))


class NumPy:
    """As the libraries of frameworks.py."""

    device = "cpu"

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, x: np.ndarray, lay: Lay) -> np.ndarray:
        if x.ndim != 4:
            return np.array(x, order="C")
        base = np.full(lay.around(x.shape), np.nan, x.dtype)
        lay.view(base)[...] = x
        return lay.view(base)

    def get(self, x: np.ndarray) -> np.ndarray:
        return x

    def get_all(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


def library(name: str, on_gpu: bool) -> Any:
    """None where it is not there."""
    if name == "numpy":
        return None if on_gpu else NumPy()
    found: Framework | None = framework(name, on_gpu)
    return None if found is None else found.library


def check(
    lib: Any,
    rng: np.random.Generator,
    inputs: Inputs,
    *,
    by: str | None = None,
    result: str = "bfloat16",
    out_scale: float = 1.0,
    rank: int = 4,
    layout: str = "bshd",
    lay: Lay = CONTIGUOUS,
    family: str | None = None,
    blocks: Blocks | None = None,
    deterministic: bool = False,  # as the forward always is
    **options: Any,
) -> None:
    """The forward of `inputs` (float32; made 8 bits here, `by` as `quantize` has it) through a library, into an array
    that holds NaN where that can be written, beside exact attention on what the 8 bits stand for.
    """
    x = quantize(rng, *inputs[:3], by=by)
    assert by in BY
    judged = inputs.given if blocks is None else blocks.with_mask(inputs.given)
    judge = Judge(x, inputs.key_mask, judged, result, out_scale, on_gpu(lib), options)
    x = x.spoilt(rng, state(*x.meant(), inputs.key_mask, **options, **inputs.given), inputs.key_mask)
    arrays = [lib.put(as_caller_has_it(a, rank, layout), lay) for a in x[:3]]
    others = arrays_of_rank(inputs._replace(given=inputs.given | x.descales), rank)
    named = as_arguments({name: as_given(name, a, lambda a: lib.put(a, lay)) for name, a in others.items()})
    if by == "number":
        named |= {name: float(a[0, 0, 0]) for name, a in x.descales.items()}
    if blocks is not None:
        named["block_mask"] = blocks.mask(like=arrays[0])
    asked = {"out_scale": out_scale, "layout": layout, "family": family, **options, **named}
    if result != "bfloat16":
        asked["out_dtype"] = result
    shape = (*x.q.shape[:3], x.v.shape[3])
    results: list[Any] = []
    around = None
    for into in (False, True):
        if into and type(arrays[0]).__module__.startswith("jax"):
            continue
        if into:
            empty = as_caller_has_it(np.full(shape, np.nan, RESULTS[result]), rank, layout)
            asked["out"] = lib.put(empty, lay)
        poison(lib)
        out, lse = attention(*arrays, return_lse=True, **asked)
        assert not into or out is asked["out"]
        results += [out, lse]
        if into and rank == 4:
            counted, around = nan_around(out)
            results += counted
    judge.reckon()  # while a GPU computes
    found = lib.get_all(results)
    for out, lse in zip(found[:4:2], found[1:4:2]):
        judge(as_reference_has_it(out, rank, layout), lse)
    if around is not None:
        assert int(found[4]) - int(found[5]) == around, "memory around out was written"


class Judge:
    """Exact attention on what 8 bits stand for, and a verdict on results in the shapes of the reference."""

    def __init__(
        self, x: Quantized, key_mask: Any, given: dict[str, np.ndarray], result: str, out_scale: float, on_gpu: bool,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.result, self.out_scale, self.on_gpu = result, out_scale, on_gpu
        self.stated = x, key_mask, given, options

    def reckon(self) -> None:
        (x, key_mask, given, options), on_gpu = self.stated, self.on_gpu
        q, k, v = x.meant()
        problem = state(q, k, v, key_mask, **options, **given)
        # Beside out what a relative error of each probability comes to, at most.
        exact = standard(problem, q, k, np.concatenate([v, np.abs(v)], -1), key_mask, **given)
        out, self.weighed = np.split(exact.out, 2, -1)
        self.exact = exact._replace(out=out)
        of_heads = np.repeat(np.abs(k), problem.group, 2).transpose(0, 2, 3, 1)
        rows = np.abs(q).transpose(0, 2, 1, 3) * abs(problem.scale)
        sums = (rows @ of_heads).max(-1, initial=0)
        # On a GPU products of 8 bits keep 13 beside the largest of a sum (cuBLAS's too: the same numbers to 1e-5). What
        # D of them lose is sqrt(D / 3) units of the last bit in the root mean square, six times that at most: more than
        # 2^-11 of the sum where one of them is nearly all of it. Those of P V keep as many in each of their steps of 32
        # keys, up to 512.
        product = (rows * of_heads.max(-1, initial=0)[:, :, None]).max(-1)
        cut = np.maximum(sums * 2.0**-11, (12 * q.shape[3]) ** 0.5 * 2.0**-13 * product)
        self.of_lse = 1e-4 + cut if on_gpu else 1e-5 + sums * 2.0**-20  # of each row
        largest = float(sums.max(initial=0))
        of_score = 1e-4 + largest * 2.0**-11 if on_gpu else 1e-5 + largest * 2.0**-20
        of_sums = min(problem.seq_k, 512) / 512 * 0.015
        self.share = (2.0**-4 + of_sums if on_gpu else 1e-5) + 2 * of_score
        # A P 2^16 times smaller than the largest is off by half or more; it counts where that one is dropped (and this
        # one is divided by the share of those that are not), or where its value is 0.
        least = 2.0**-14 / (1 - options.get("dropout", 0.0))
        self.least = least * float(np.abs(v).max(initial=0)) if on_gpu else 0.0
        self.whole = whole(x, self.result) + 2 * of_score + of_sums

    def __call__(self, out: np.ndarray, lse: np.ndarray) -> None:
        exact, rounding = self.exact.out, ROUNDING[self.result]
        if self.result == "float8_e4m3fn":  # what is beyond the largest becomes that
            largest = float(ml_dtypes.finfo(FLOAT8).max) / self.out_scale
            exact = exact.clip(-largest, largest)
        assert out.dtype == RESULTS[self.result] and lse.dtype == np.float32
        error = np.abs(out.astype(np.float64) / self.out_scale - exact)
        room = self.share * self.weighed + self.least
        allowed = room + rounding * (np.abs(exact) + room) + SMALLEST[self.result] / self.out_scale + 1e-6
        assert_within("out", error, allowed)
        norm = np.sqrt((exact**2).sum())
        if np.count_nonzero(self.weighed) >= 4096 and norm:  # of fewer luck decides
            off = np.sqrt((error**2).sum()) / norm
            # Numbers too small for all bits of the result are off by half of the smallest, whatever they are.
            smallest = SMALLEST[self.result] / self.out_scale
            small = np.count_nonzero(np.abs(exact) < smallest / rounding)
            whole = self.whole + smallest * (small / 3) ** 0.5 / norm
            assert off <= whole, f"out is off by {off:.3f} of its norm, {whole:.3f} is allowed"
        unseen = np.isneginf(self.exact.lse)
        lse = lse.reshape(unseen.shape)
        assert np.array_equal(np.isneginf(lse), unseen), "lse is -inf where a key is seen, or not where none is"
        assert not np.moveaxis(out, 2, 1)[unseen].any(), "a row that sees no key is not 0"
        lse, exact_lse = (np.where(unseen, 0, each) for each in (lse, self.exact.lse))
        assert_within("lse", np.abs(lse - exact_lse), self.of_lse + 1e-5 * np.abs(exact_lse))


def assert_within(name: str, error: np.ndarray, allowed: np.ndarray) -> None:
    """Arrays of one shape; NaN is no error that is allowed."""
    if error.size:
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)), error.shape)
        said = f"{name} is off by {error[worst]:.3g} at {[*map(int, worst)]}, where {allowed[worst]:.3g} is allowed"
        assert error[worst] <= allowed[worst], said


def whole(x: Quantized, result: str) -> float:
    """WHOLE; where heads or blocks are of different size the largest rows decide, whose weight one or two keys may
    have: by luck their P are off by up to 2^-4, with nothing beside them that is off the other way.
    """
    uneven = any(scale.size > 1 for scale in x.descales.values())
    return WHOLE[result] + (2**-4 - WHOLE["bfloat16"]) * uneven


def on_gpu(lib: Any) -> bool:
    return getattr(lib.device, "platform", lib.device) != "cpu"


def poison(lib: Any) -> None:
    """Fill memory that is free with NaN, so that nothing right comes of it by chance."""
    if lib.device == "cuda":
        lib.torch.full((8 << 20,), float("nan"), device="cuda")
    elif on_gpu(lib):
        lib.jax.block_until_ready(lib.jax.numpy.full(8 << 20, np.nan, np.float32, device=lib.device))


def nan_around(out: Any) -> tuple[list[Any], int]:
    """How many numbers are NaN in the array that `out` is a view of, and in `out`, where they are; by how much it is
    larger."""
    if isinstance(out, np.ndarray):
        base = out if out.base is None else out.base
        return [np.isnan(base).sum(), np.isnan(out).sum()], base.size - out.size
    base = out if out._base is None else out._base.view(out.dtype)
    return [x.float().isnan().sum() for x in (base, out)], base.numel() - out.numel()
