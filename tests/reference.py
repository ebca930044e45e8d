"""Standard attention with the score matrix in memory: the plain version that every kernel is judged against.

`standard` computes in float64, `standard_in_own_precision` as a framework without a fused kernel would in the inputs'
own precision; `criterion.py` is between them. Arrays are NumPy in (B, S, H, D).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from rounding import rounded_to

from cupyflash.problem import ARRAYS, AttentionProblem, View
from cupyflash.rules import describe

if TYPE_CHECKING:
    from score_functions import ByHand

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


class _Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


class Standard(_Results):
    """out (B, Sq, Hq, Dv), lse (B, Hq, Sq); dq, dk, dv shaped like q, k, v, None unless dout was given.

    By name alone: the gradients of the optional arrays that are given, shaped like these; and `luck`, by how much
    rounding moves each of them where few numbers decide, if it is random: four standard deviations, for arithmetic in
    the dtype of q.
    """

    dbias: np.ndarray | None = None
    dalibi_slopes: np.ndarray | None = None
    dsinks: np.ndarray | None = None

    @functools.cached_property
    def luck(self) -> dict[str, float]:
        """Reckoned when it is asked for, which takes longer than the rest."""
        reckon = vars(self).get("reckon", dict)
        return reckon()

    def unit(self, name: str) -> float:
        """`unit` of a result in `assert_as_good`: luck decides where few numbers do, each a sum of many."""
        few = getattr(self, name).size < 2000
        return max(1.0, self.luck.get(name, 0.0) / 1e-5) if few else 1.0


Rounding = Callable[[np.ndarray], np.ndarray]


def _exactly(x: np.ndarray) -> np.ndarray:
    return x


def standard(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_mask: np.ndarray | None = None,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **given: np.ndarray,
) -> Standard:
    """Attention (and, with dout, its gradients) in float64; every result is float64. `given`: other optional arrays."""
    return _standard(problem, q, k, v, {"key_mask": key_mask, **given}, dout, dlse, np.dtype(np.float64), _exactly)


def standard_in_own_precision(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_mask: np.ndarray | None = None,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **given: np.ndarray,
) -> Standard:
    """Attention as standard tensor operations give it in the dtype of q: what a framework's math path does.

    For float16 and bfloat16 each operation runs in float32 and its result (S, P, dP, dS, ...) is rounded to the dtype.
    Of what happens to a score between Q Kᵀ and softmax that is tanh alone: a sum with a bias or a distance in 16 bits
    would excuse any error.
    """
    dtype = np.dtype(DTYPES[problem.dtype])
    given["key_mask"] = key_mask
    if dtype.itemsize >= 4:
        return _standard(problem, q, k, v, given, dout, dlse, dtype, _exactly)
    work = np.dtype(np.float32)
    return _standard(problem, q, k, v, given, dout, dlse, work, lambda x: rounded_to(x, dtype))


def references(problem: AttentionProblem, *arrays: np.ndarray | None, **given: np.ndarray) -> tuple[Standard, Standard]:
    """`standard`, and `standard_in_own_precision`, which for float64 is the same."""
    exact = standard(problem, *arrays, **given)
    return exact, exact if problem.dtype == "float64" else standard_in_own_precision(problem, *arrays, **given)


def visible(
    problem: AttentionProblem, key_mask: np.ndarray | None = None, mask: np.ndarray | None = None
) -> np.ndarray:
    """Booleans, (B, 1, Sq, Sk) or with `mask` perhaps (B, Hq, Sq, Sk): may query i see key j?"""
    at = np.arange(problem.seq_q)[:, None] + problem.diagonal
    j = np.arange(problem.seq_k)[None, :]
    seen = np.ones((problem.seq_q, problem.seq_k), bool)
    if problem.left is not None:
        seen &= j >= at - problem.left
    if problem.right is not None:
        seen &= j <= at + problem.right
    seen = np.broadcast_to(seen, (problem.batch, 1, *seen.shape))
    if key_mask is not None:
        key_mask = np.broadcast_to(key_mask, (problem.batch, problem.seq_k))
        seen = seen & key_mask[:, None, None, :]
    return seen if mask is None else seen & mask


def scores(
    problem: AttentionProblem, s: np.ndarray, given: dict[str, np.ndarray | None], rounded: Rounding = _exactly
) -> tuple[np.ndarray, np.ndarray | float]:
    """From s = scale · Q Kᵀ, (B, Hq, Sq, Sk), to what softmax is taken of but for what is hidden; and its derivative by
    s."""
    work, slope = s.dtype, 1.0
    if problem.score is not None:
        found = _by_hand(problem, s, given)
        s, slope = found.score, found.slope
    if problem.softcap is not None:
        cap = work.type(problem.softcap)
        capped = rounded(np.tanh(s / cap))
        s, slope = cap * capped, 1 - capped**2
    if given.get("alibi_slopes") is not None:
        s = s - given["alibi_slopes"].astype(work)[..., None, None] * distance(problem).astype(work)
    if given.get("bias") is not None:
        hidden = np.isneginf(s) if problem.score is not None else False  # what the bias is there does not matter
        s = np.where(hidden, s, s + given["bias"].astype(work))
    return s, slope


def kept(problem: AttentionProblem, given: dict[str, np.ndarray | None]) -> np.ndarray | bool:
    """Booleans, (B, Hq, Sq, Sk): the probabilities that dropout keeps, each from a Philox of its own; True where it
    keeps all."""
    if not problem.dropout:
        return True
    # A counter for eight pairs: bit 3 of the query and bits 3 and 0 of the key are left out.
    rows, columns = -(-problem.seq_q // 16) * 8, -(-problem.seq_k // 16) * 4
    b, h, row, column = np.ogrid[: problem.batch, : problem.heads_q, :rows, :columns]
    seed = int(np.asarray(given["seed"]).reshape(())) % 2**64
    batch, head, query, key = problem.at or (0, 0, 0, 0)
    counter = [column + key // 4, b + batch, row + query // 2, h + head]
    words = np.stack(philox(counter, (seed % 2**32, seed // 2**32), 7), -1).astype("<u4")
    keeps = (words.view("<u2") >= round(problem.dropout * 2**16)).reshape(problem.batch, problem.heads_q, -1)
    i, j = np.ogrid[: problem.seq_q, : problem.seq_k]
    place = (i // 16 * 8 + i % 8) * columns + j // 16 * 4 + j % 8 // 2
    word = j // 8 % 2 * 2 + i // 8 % 2
    return keeps.take(place * 8 + word * 2 + j % 2, 2)


def philox(counter: list[Any], key: tuple[int, int], rounds: int) -> list[np.ndarray]:
    """Philox4x32 as Salmon et al. 2011 have it: counters of four words to four random words each."""
    x = [np.asarray(word).astype(np.uint64) for word in counter]
    for n in range(rounds):
        k = [np.uint64((word + n * step) % 2**32) for word, step in zip(key, (0x9E3779B9, 0xBB67AE85))]
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        (high, low), (other, last) = ((y >> np.uint64(32), y & np.uint64(2**32 - 1)) for y in (second, first))
        x = [high ^ x[1] ^ k[0], low, other ^ x[3] ^ k[1], last]
    return x


def _by_hand(problem: AttentionProblem, s: np.ndarray, given: dict[str, np.ndarray | None]) -> ByHand:
    from score_functions import by_hand

    return by_hand(problem, s, given)


def distance(problem: AttentionProblem) -> np.ndarray:
    """(Sq, Sk): how far each key stands from the query's diagonal."""
    return np.abs(np.arange(problem.seq_q)[:, None] + problem.diagonal - np.arange(problem.seq_k))


@np.errstate(all="ignore")  # rows that see no key; infinities and NaN, of which it sets no standard
def flash2_in_own_precision(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_mask: np.ndarray | None,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    **given: np.ndarray,
) -> dict[str, np.ndarray]:
    """All but lse by FlashAttention-2's Algorithms 1 and 2 in float64; P, O and dS are rounded, and gradients of
    optional arrays. out, dq, dk and dv are as they are before that.

    That is what every FlashAttention kernel rounds. D = rowsum(dO * O) carries the rounding of P and O, which the sum
    over P * dP in standard attention does not see: in rows with a handful of keys this is, by luck, a few times worse.
    And the P of O = P V is not divided by its sum yet, and dV is one sum over all heads that share a key: where few
    numbers differ, as where P is the same for all keys and V has one column, other roundings, by luck worse ones.
    """
    dtype = np.dtype(DTYPES[problem.dtype])

    def rounded(x: np.ndarray) -> np.ndarray:
        return rounded_to(x, dtype)

    qh, kh, vh, do = (np.asarray(x).astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    kh, vh = (np.repeat(x, problem.group, axis=1) for x in (kh, vh))
    seen = visible(problem, key_mask, given.get("mask"))
    s, slope = scores(problem, qh @ kh.swapaxes(-1, -2) * problem.scale, given)
    p, lse = _softmax(np.where(seen, s, -np.inf), given.get("sinks"))
    top = p.max(-1, keepdims=True, initial=0.0)
    top[top == 0] = 1
    unscaled = p / top  # exp(S - maximum), as it is rounded before P V
    keeps, inverse = kept(problem, given), 1 / problem.kept
    of_v = (rounded(np.where(keeps, unscaled, 0)) @ vh) * top * inverse
    out = rounded(of_v)
    through_lse = 0 if dlse is None else np.where(np.isneginf(lse), 0, dlse).astype(np.float64)[..., None]
    delta = (do * out).sum(-1, keepdims=True) - through_lse
    of_scores = p * (np.where(keeps, do @ vh.swapaxes(-1, -2) * inverse, 0) - delta)
    ds = rounded(of_scores * slope)
    of_group = problem.batch, problem.heads_k, problem.group, problem.seq_k
    dk, dv = (
        (x.swapaxes(-1, -2) @ y).reshape(*of_group, y.shape[-1]).sum(2)
        for x, y in ((ds, qh * problem.scale), (rounded(np.where(keeps, p * inverse, 0)), do))
    )
    of_rows = {"out": of_v, "dq": ds @ kh * problem.scale, "dk": dk, "dv": dv}
    products = qh @ kh.swapaxes(-1, -2) * problem.scale
    of_arrays = _of_arrays(problem, given, lse, rounded(of_scores), -delta, rounded, products)
    return {name: x.transpose(0, 2, 1, 3) for name, x in of_rows.items()} | of_arrays


def fresh_rng() -> np.random.Generator:
    """A generator with a new seed, printed so that a failing test shows it; CUPYFLASH_TEST_SEED brings it back."""
    seed = int(os.environ.get("CUPYFLASH_TEST_SEED") or np.random.SeedSequence().entropy % 2**32)
    print(f"CUPYFLASH_TEST_SEED={seed}")
    return np.random.default_rng(seed)


class Windows(np.random.Generator):
    """Draws normal numbers as pieces of a long table, of which there are millions: in a hundredth of the time.

    Arrays that are drawn one after the other are of different tables: of one, a query may be a key.
    """

    LENGTH = 2**20 - 3  # a prime: what is longer repeats itself along no axis
    TABLES = 4

    def __init__(self, seed: tuple[int, ...]) -> None:
        super().__init__(np.random.SFC64(seed))
        self.drawn = 0

    @staticmethod
    @functools.cache
    def table(dtype: str, number: int) -> np.ndarray:
        """Twice, so that a piece may begin anywhere."""
        return np.resize(np.random.default_rng(number).standard_normal(Windows.LENGTH), 2 * Windows.LENGTH).astype(
            DTYPES[dtype]
        )

    def of(self, dtype: str, shape: Any) -> np.ndarray:
        start, size = int(self.integers(self.LENGTH)), math.prod(shape)
        self.drawn += 1
        piece = self.table(dtype, self.drawn % self.TABLES)[start : start + min(size, self.LENGTH)]
        return (piece.copy() if size == len(piece) else np.resize(piece, size)).reshape(shape)

    def standard_normal(self, size: Any = None, dtype: Any = "float64", out: Any = None) -> Any:
        shape = (size,) if isinstance(size, int) else size or ()
        return self.of(np.dtype(dtype).name, shape)


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Standard normal numbers in `dtype`."""
    if isinstance(rng, Windows):
        return rng.of(dtype, shape)
    return rng.standard_normal(shape, "float64" if dtype == "float64" else "float32").astype(DTYPES[dtype])


def state(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, key_mask: np.ndarray | None = None, **options: object
) -> AttentionProblem:
    """The problem that NumPy arrays (in the layout that `options` says) and options, optional arrays among them,
    state."""

    def stated(x: object) -> object:
        if not isinstance(x, np.ndarray):
            return x
        return View(x.shape, tuple(n // x.itemsize for n in x.strides), x.dtype.name, "cpu", "numpy")

    read = {n: options.pop(n) for n in list(options) if n.startswith("score_arrays[")}
    options["score_arrays"] = {n[len("score_arrays['") : -2]: stated(x) for n, x in read.items()}
    options = {n: x if n == "score_arrays" else stated(x) for n, x in options.items()}
    return describe(*map(stated, (q, k, v)), key_mask=stated(key_mask), **options)


def _standard(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    given: dict[str, np.ndarray | None],
    dout: np.ndarray | None,
    dlse: np.ndarray | None,
    work: np.dtype,
    rounded: Rounding,
) -> Standard:
    def heads_first(x: np.ndarray) -> np.ndarray:
        return np.asarray(x).astype(work).transpose(0, 2, 1, 3)

    scale = work.type(problem.scale)
    qh, kh, vh = heads_first(q), heads_first(k), heads_first(v)
    kh, vh = (np.repeat(x, problem.group, axis=1) if problem.heads_k and problem.group > 1 else x for x in (kh, vh))
    seen, sinks = visible(problem, given["key_mask"], given.get("mask")), given.get("sinks")
    exactly, wide = rounded is _exactly, work == np.float64
    with np.errstate(all="ignore"):  # infinities and NaN in the inputs do what IEEE says
        scaled = qh if wide else qh * scale  # in float64 it does not matter when: what is smaller is multiplied
        products = scaled @ kh.swapaxes(-1, -2)
        products *= scale if wide else 1
        of_rounded = products if exactly else rounded(rounded(scaled) @ kh.swapaxes(-1, -2))
        s, slope = scores(problem, of_rounded, given, rounded)
        p, lse = _softmax(np.where(seen, s, -np.inf), sinks)
        # Of finite numbers, what is 0 in P stays 0.
        finite = all(map(_all_finite, (qh, kh, vh))) and bool(np.isfinite(slope).all() and (lse < np.inf).all())

        def shown(x: np.ndarray) -> np.ndarray:
            return x if finite else np.where(seen, x, 0)

        p = rounded(shown(p))
        keeps, inverse = kept(problem, given), work.type(1 / problem.kept)
        after = p if keeps is True else rounded(np.where(keeps, p * inverse, 0))  # dropout
        out = rounded(sum_over_visible(after, seen, vh))
        if not exactly:  # lse is never rounded to 16 bits, so neither are the products that it is judged by
            s, _ = scores(problem, products, given, rounded)
            _, lse = _softmax(np.where(seen, s, -np.inf), sinks)
        if dout is None:
            return Standard(out.transpose(0, 2, 1, 3), lse)

        do = heads_first(dout)
        finite = finite and _all_finite(do) and (dlse is None or bool(np.isfinite(dlse).all()))
        dp = rounded(do @ vh.swapaxes(-1, -2))
        if keeps is not True:
            dp = rounded(np.where(keeps, dp * inverse, 0))
        finite = finite and bool(np.isfinite(dp).all())  # it may be too large for 16 bits
        by_einsum = finite and work == np.float64  # which adds one after the other: too coarse elsewhere
        mean = np.einsum("...j,...j->...", p, dp)[..., None] if by_einsum else shown(p * dp).sum(-1, keepdims=True)
        through_lse = 0 if dlse is None else np.where(np.isneginf(lse), 0, dlse).astype(work)[..., None]
        of_sink_scores = through_lse - mean
        of_scores = dp + of_sink_scores
        of_scores *= p
        of_scores = shown(of_scores)
        ds = rounded(shown(of_scores * slope)) if isinstance(slope, np.ndarray) or slope != 1 else rounded(of_scores)
        of_arrays = _of_arrays(problem, given, lse, rounded(of_scores), of_sink_scores, rounded, products)
        turned, ds = seen.swapaxes(-1, -2), ds * scale if wide else ds
        dq, dk = sum_over_visible(ds, seen, kh), sum_over_visible(ds.swapaxes(-1, -2), turned, qh)
        dq, dk = (x if wide else rounded(x * scale) for x in (dq, dk))
        dv = rounded(sum_over_visible(after.swapaxes(-1, -2), turned, do))
        if problem.heads_k and problem.group > 1:
            shape = problem.batch, problem.heads_k, problem.group, problem.seq_k
            dk, dv = (rounded(x.reshape(*shape, x.shape[-1]).sum(2)) for x in (dk, dv))

    def luck() -> dict[str, float]:
        with np.errstate(all="ignore"):
            terms = shown(p * (np.abs(dp) + np.abs(of_sink_scores)))
            return _luck(problem, given, lse, p, of_scores, terms, of_sink_scores, out * do, products)

    results = Standard(out.transpose(0, 2, 1, 3), lse, *(x.transpose(0, 2, 1, 3) for x in (dq, dk, dv)))
    vars(results).update(of_arrays, reckon=luck)
    return results


def _of_arrays(
    problem: AttentionProblem,
    given: dict[str, np.ndarray | None],
    lse: np.ndarray,
    ds: np.ndarray,
    of_sink_scores: np.ndarray,
    rounded: Rounding,
    products: np.ndarray,
) -> dict[str, np.ndarray]:
    """Gradients of optional arrays from those of the scores, (B, Hq, Sq, Sk): summed over what they are broadcast
    along.

    `of_sink_scores`, (B, Hq, Sq, 1): those of the sinks' scores, but for their probabilities; `products`: scale · Q Kᵀ.
    """
    grads = {}
    for name, x, index, change in _read(problem, given, products):
        each = np.where(ds == 0, 0, ds * change)
        if ds.dtype == np.float64:  # the same sums, much sooner
            flat = np.ravel_multi_index(index, x.shape)
            grad = np.bincount(flat.ravel(), each.ravel(), x.size).reshape(x.shape)
        else:
            grad = np.zeros(x.shape, ds.dtype)
            np.add.at(grad, index, each)
        grads[f"d{name}"] = rounded(grad) if x.dtype.name == problem.dtype else grad
    for row in ARRAYS:
        x = given.get(row.name)
        if x is None or not row.gradient:
            continue
        if row.name == "sinks":
            each = rounded(_of_sink(x, lse) * of_sink_scores)
        else:
            each = -distance(problem).astype(ds.dtype) * ds if row.name == "alibi_slopes" else ds
        grad = _summed(each, row.lengths(x.shape)).reshape(x.shape)
        grads[f"d{row.name}"] = rounded(grad) if x.dtype.name == problem.dtype else grad
    return grads


def _read(
    problem: AttentionProblem, given: dict[str, np.ndarray | None], products: np.ndarray
) -> Iterator[tuple[str, np.ndarray, tuple[np.ndarray, ...], np.ndarray]]:
    """Of each array that a score function reads and that has a gradient: its name, itself, which element each pair
    reads, and the score's derivative by that.
    """
    if problem.score is None:
        return
    for name, (index, change) in _by_hand(problem, products, given).reads.items():
        named = f"score_arrays[{name!r}]"
        index = tuple(np.broadcast_to(x, products.shape) for x in index)
        yield named, given[named], index, np.broadcast_to(change, products.shape)


def _luck(
    problem: AttentionProblem,
    given: dict[str, np.ndarray | None],
    lse: np.ndarray,
    p: np.ndarray,
    ds: np.ndarray,
    terms: np.ndarray,
    of_sink_scores: np.ndarray,
    o_do: np.ndarray,
    products: np.ndarray,
) -> dict[str, float]:
    """`Standard.luck`. `terms`, (B, Hq, Sq, Sk): sizes of what dS is a difference of; `o_do`, (B, Hq, Sq, Dv): of
    rowsum(dO * O).

    Each term is rounded by itself, rowsum and lse once for all keys. What is rounded to 16 bits is rounded to float32
    on its way some more times, which does not count; float32 in sums of many products.
    """
    dtype = np.dtype(DTYPES[problem.dtype])
    eps = float(ml_dtypes.finfo(dtype).eps) * (1 if dtype.itemsize == 2 else 8)
    of_rowsum = eps * np.sqrt((o_do**2).sum(-1, keepdims=True))
    of_lse = (
        8 * float(np.finfo(DTYPES[problem.lse_dtype]).eps) * (1 + np.abs(np.where(np.isfinite(lse), lse, 0)))[..., None]
    )
    luck = {}
    for name, x, index, change in _read(problem, given, products):
        flat, rows = np.ravel_multi_index(index, x.shape), np.arange(lse.size).reshape(*lse.shape, 1)
        variance = np.bincount(flat.ravel(), ((eps * terms * change) ** 2).ravel(), x.size)
        own, inverse = np.unique(flat + x.size * rows, return_inverse=True)  # of an element, a row's add up
        for each in (p * change * of_rowsum, ds * change * of_lse):  # a row's are alike
            sums = np.bincount(inverse.ravel(), np.nan_to_num(each).ravel(), own.size)
            variance += np.bincount(own % x.size, sums**2, x.size)
        luck[f"d{name}"] = 4 * float(np.nan_to_num(np.sqrt(variance)).max(initial=0.0))
    for row in ARRAYS:
        x = given.get(row.name)
        if x is None or not row.gradient:
            continue
        lengths = row.lengths(x.shape)
        if row.name == "sinks":
            apart, by_row = [], [_of_sink(x, lse) * of_rowsum, _of_sink(x, lse) * of_sink_scores * of_lse]
        else:
            weights = distance(problem) if row.name == "alibi_slopes" else 1.0
            apart, by_row = [eps * terms * weights], [p * weights * of_rowsum, ds * weights * of_lse]
        if lengths[3] == 1:
            by_row = [x.sum(-1, keepdims=True) for x in by_row]
        variance = sum(_summed(x**2, lengths) for x in (*apart, *by_row))
        luck[f"d{row.name}"] = float(np.nan_to_num(np.sqrt(variance)).max(initial=0.0))
    return luck


def _all_finite(x: np.ndarray) -> bool:
    flat = x.ravel(order="K")
    return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())  # squares may be too large


def _of_sink(sinks: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Probabilities of the sinks, (B, Hq, Sq, 1)."""
    return np.where(np.isneginf(lse), 0, np.exp(sinks.astype(lse.dtype).reshape(-1, 1) - lse))[..., None]


def _summed(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    return x.sum(tuple(axis for axis, n in enumerate(lengths) if n != x.shape[axis]), keepdims=True)


def _softmax(scores: np.ndarray, sinks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Softmax, in place, and log-sum-exp over the last axis. A row of -inf has no mass: probabilities 0, lse -inf (or
    the sink)."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)[:, None, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), 0, top).astype(scores.dtype)
    scores -= top
    e = np.exp(scores, out=scores)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    e /= np.where(total == 0, 1, total)
    return e, (top + np.log(total))[..., 0]


def sum_over_visible(weights: np.ndarray, seen: np.ndarray, x: np.ndarray) -> np.ndarray:
    """weights @ x, without the terms that are not seen: where x is not finite, 0 · x would be NaN."""
    if _all_finite(x):
        return weights @ x
    finite = np.isfinite(x)
    seen = np.broadcast_to(seen, weights.shape)
    weights = np.where(seen, weights, 0)
    if not np.isfinite(weights).all():  # infinity times 0 is not infinity times infinity
        return _one_by_one(weights, seen, x)
    out = weights @ np.where(finite, x, 0)
    for j in np.flatnonzero(~finite.all((0, 1, 3))):  # few rows hold such
        term = weights[..., j, None] * x[..., j, None, :]
        out += np.where(seen[..., j, None] & ~finite[..., j, None, :], term, 0)
    return out


def _one_by_one(weights: np.ndarray, seen: np.ndarray, x: np.ndarray) -> np.ndarray:
    out = np.empty((*weights.shape[:-1], x.shape[-1]), x.dtype)
    for b, h, i in np.ndindex(*weights.shape[:-1]):
        out[b, h, i] = weights[b, h, i, seen[b, h, i]] @ x[b, h, seen[b, h, i]]
    return out
