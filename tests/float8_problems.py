"""Float8 problems: inputs, what they stand for, and how far a result may be from exact attention on that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from criterion import FEW_NUMBERS
from frameworks import Framework, framework
from reference import Standard, standard, state
from rounding import FLOAT8, from_float8, to_float8, widened
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
            found.append(from_float8(x, "float32") * np.moveaxis(rows, 1, 2)[..., None])
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
        given.append(to_float8(x))
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
    x = x.spoilt(rng, judge.problem, inputs.key_mask)
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
    for n in (0, 2)[: len(results) // 2]:
        if n == 0 or any(a.tobytes() != b.tobytes() for a, b in zip(found[:2], found[2:4])):
            judge(as_reference_has_it(found[n], rank, layout), found[n + 1])
    if around is not None:
        assert int(found[4]) - int(found[5]) == around, "memory around out was written"


class Judge:
    """Exact attention on what 8 bits stand for, and a verdict on results in the shapes of the reference."""

    def __init__(
        self, x: Quantized, key_mask: Any, given: dict[str, np.ndarray], result: str, out_scale: float, on_gpu: bool,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.result, self.out_scale, self.on_gpu = result, out_scale, on_gpu
        self.meant = x.meant()
        self.problem = state(*self.meant, key_mask, **options, **given)
        self.stated = x, key_mask, given, options

    def reckon(self) -> None:
        (x, key_mask, given, options), on_gpu, problem = self.stated, self.on_gpu, self.problem
        q, k, v = self.meant
        # Beside out what a relative error of each probability comes to, at most.
        found = standard(problem, q, k, np.concatenate([v, np.abs(v)], -1), key_mask, **given)
        exact, weighed = np.split(found.out, 2, -1)
        self.exact = found._replace(out=exact)
        heads = np.repeat(k, problem.group, 2).transpose(0, 2, 3, 1)
        scaled = q.transpose(0, 2, 1, 3) * abs(problem.scale)
        of_heads, rows = np.abs(heads), np.abs(scaled)
        sums = rows @ of_heads
        one_sign = ((scaled @ heads) ** 2 / np.maximum(sums, 1e-30)).max(-1, initial=0)
        sums = sums.max(-1, initial=0)
        # On a GPU products of 8 bits keep 13 beside the largest of a sum (cuBLAS's too: the same numbers to 1e-5). What
        # D of them lose is sqrt(D / 3) units of the last bit in the root mean square, six times that at most: more than
        # 2^-11 of the sum where one of them is nearly all of it. All lose towards 0: of a score s of products whose
        # sizes add up to S a share s / S has nothing to make up for it, and loses half a unit each, of a sum that grows
        # up to s. Those of P V keep as many in each of their steps of 32 keys, up to 512.
        product = (rows * of_heads.max(-1, initial=0)[:, :, None]).max(-1)
        cut = np.maximum(sums * 2.0**-11, (12 * q.shape[3]) ** 0.5 * 2.0**-13 * product)
        cut += q.shape[3] * 2.0**-15 * one_sign
        self.of_lse = 1e-4 + cut if on_gpu else 1e-5 + sums * 2.0**-20  # of each row
        largest = float(sums.max(initial=0))
        of_score = 1e-4 + largest * 2.0**-11 if on_gpu else 1e-5 + largest * 2.0**-20
        of_sums = min(problem.seq_k, 512) / 512 * 0.015
        share = (2.0**-4 + of_sums if on_gpu else 1e-5) + 2 * of_score
        # A P 2^16 times smaller than the largest is off by half or more; it counts where that one is dropped (and this
        # one is divided by the share of those that are not), or where its value is 0.
        least = 2.0**-14 / (1 - options.get("dropout", 0.0))
        least = least * float(np.abs(v).max(initial=0)) if on_gpu else 0.0
        self.whole = whole(x, self.result) + 2 * of_score + of_sums

        rounding = ROUNDING[self.result]
        if self.result == "float8_e4m3fn":  # what is beyond the largest becomes that
            most = float(ml_dtypes.finfo(FLOAT8).max) / self.out_scale
            exact = exact.clip(-most, most)
        room = weighed * share
        self.few = np.count_nonzero(room.ravel(order="K")) < FEW_NUMBERS
        room += least
        size = np.abs(exact)
        self.expected, self.allowed = exact, size + room
        self.allowed *= rounding
        self.allowed += room
        self.allowed += SMALLEST[self.result] / self.out_scale + 1e-6
        self.norm = float(np.linalg.norm(size.ravel(order="K")))
        # Numbers too small for all bits of the result are off by half of the smallest, whatever they are.
        smallest = SMALLEST[self.result] / self.out_scale
        if self.norm:
            self.whole += smallest * (np.count_nonzero(size < smallest / rounding) / 3) ** 0.5 / self.norm

    def __call__(self, out: np.ndarray, lse: np.ndarray) -> None:
        assert out.dtype == RESULTS[self.result] and lse.dtype == np.float32
        error = from_float8(out, "float64") if out.dtype == FLOAT8 else widened(out, np.dtype(np.float64))
        error /= self.out_scale
        error -= self.expected
        np.abs(error, out=error)
        assert_within("out", error, self.allowed)
        if not self.few and self.norm:  # of fewer luck decides
            off = float(np.linalg.norm(error.ravel(order="K"))) / self.norm
            assert off <= self.whole, f"out is off by {off:.3f} of its norm, {self.whole:.3f} is allowed"
        unseen = np.isneginf(self.exact.lse)
        lse = lse.reshape(unseen.shape)
        assert np.array_equal(np.isneginf(lse), unseen), "lse is -inf where a key is seen, or not where none is"
        assert not np.moveaxis(out, 2, 1)[unseen].any(), "a row that sees no key is not 0"
        lse, exact_lse = (np.where(unseen, 0, each) for each in (lse, self.exact.lse))
        assert_within("lse", np.abs(lse - exact_lse), self.of_lse + 1e-5 * np.abs(exact_lse))


def assert_within(name: str, error: np.ndarray, allowed: np.ndarray) -> None:
    """Arrays of one shape; NaN is no error that is allowed."""
    if error.size and not (error <= allowed).all():
        worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)), error.shape)
        said = f"{name} is off by {error[worst]:.3g} at {[*map(int, worst)]}, where {allowed[worst]:.3g} is allowed"
        raise AssertionError(said)


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
