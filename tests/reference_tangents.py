"""Tangents of standard attention's results and of its gradients, with the score matrix in memory: as `reference.py`.

    J u     tout, tlse: what out and lse change by along tangents u of the inputs
    H(G) u  tdq, tdk, tdv, tdbias, ...: what the gradients for G = (dout, dlse) change by along u, and along tangents of
    G

By the rules of differentiation, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from reference import (
    DTYPES,
    Rounding,
    _by_hand,
    _exactly,
    _of_sink,
    _softmax,
    _summed,
    distance,
    kept,
    scores,
    visible,
)
from rounding import rounded_to

from cupyflash.problem import ARRAYS, AttentionProblem

Arrays = dict[str, Any]


class Tangents(dict[str, np.ndarray]):
    """Results by name; and `luck`, by how much rounding moves each of those of arrays where few numbers decide."""

    def __init__(self, of: _Tangents) -> None:
        super().__init__(of())
        self._of = of

    def unit(self, name: str) -> float:
        """`unit` of a result in `assert_as_good`, as `Standard.unit`."""
        with np.errstate(all="ignore"):
            few = self[name].size < 2000 or name in ("tout", "tdq", "tdk")
            return max(1.0, self._of.reckon().get(name, 0.0) / 1e-5) if few else 1.0


def tangents(
    problem: AttentionProblem, arrays: Arrays, moved: Arrays, own: bool = False, by_out: bool = False
) -> Tangents:
    """Every result by name, in float64; with `own` as standard tensor operations give it in the dtype of q.

    `arrays`: q, k, v, dout and all optional arrays that are given, perhaps dlse, in the shapes of the reference.
    `moved`: the tangents of some of them by the same names. What has no tangent has one of 0.
    `by_out`: row sums of P * dP are those of dO * O, as FlashAttention-2 has them: they carry the rounding of O and tO,
    which in rows with a handful of keys is most of what a difference of dP and them is off by.
    """
    dtype = np.dtype(DTYPES[problem.dtype])
    if not own or dtype.itemsize == 8:
        return Tangents(_Tangents(problem, arrays, moved, np.dtype(np.float64), _exactly, by_out))
    if dtype.itemsize == 4:
        return Tangents(_Tangents(problem, arrays, moved, dtype, _exactly, by_out))
    work = np.dtype(np.float32)
    return Tangents(_Tangents(problem, arrays, moved, work, lambda x: rounded_to(x, dtype), by_out))


class _Tangents:
    def __init__(
        self,
        problem: AttentionProblem,
        arrays: Arrays,
        moved: Arrays,
        work: np.dtype,
        rounded: Rounding,
        by_out: bool,
    ) -> None:
        self.problem, self.arrays, self.moved, self.work, self.rounded = problem, arrays, moved, work, rounded
        self.by_out = by_out
        self.reckon: Callable[[], dict[str, float]] = dict

    def rows(self, of: Arrays, name: str, like: str) -> np.ndarray:
        """(B, H, S, D) for the query heads; zeros where it is not among them."""
        if name not in of:
            return np.zeros_like(self.rows(self.arrays, like, like))
        x = np.asarray(of[name]).astype(self.work).transpose(0, 2, 1, 3)
        return np.repeat(x, self.problem.group, 1) if name in "kv" and self.problem.heads_k else x

    def array(self, name: str) -> Any:
        return 0 if name not in self.moved else np.asarray(self.moved[name]).astype(self.work)

    def __call__(self) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            return self.results()

    def results(self) -> dict[str, np.ndarray]:
        p, rounded = self.problem, self.rounded
        given = {name: x for name, x in self.arrays.items() if name not in ("q", "k", "v", "dout", "dlse")}
        q, k, v, do = (self.rows(self.arrays, name, name) for name in ("q", "k", "v", "dout"))
        tq, tk, tv, tdo = (self.rows(self.moved, name, name) for name in ("q", "k", "v", "dout"))
        scale = self.work.type(p.scale)
        q, tq = (rounded(x * scale) for x in (q, tq))
        x = rounded(q @ turned(k))
        s, slope = scores(p, x, given, rounded)
        z = np.where(visible(p, given.get("key_mask"), given.get("mask")), s, -np.inf)
        prob, lse = _softmax(z, given.get("sinks"))
        live, unseen = prob != 0, np.isneginf(lse)

        def shown(x: np.ndarray) -> np.ndarray:
            return np.where(live, x, 0)

        tx = rounded(rounded(tq @ turned(k)) + rounded(q @ turned(tk)))
        ts = slope * tx + self.of_terms(given)
        bend, reads = self.of_function(x, tx, given)
        ts = shown(ts + sum(change * tangent for _, change, tangent, _ in reads.values()))
        if p.softcap is not None:
            t = np.tanh(x / self.work.type(p.softcap))
            bend = -2 * t * (1 - t * t) / self.work.type(p.softcap) * tx

        of_sink, tsinks = 0, 0
        if "sinks" in given:
            of_sink, tsinks = _of_sink(given["sinks"], lse), self.of_heads("sinks")
        tlse = (prob * ts).sum(-1, keepdims=True) + of_sink * tsinks  # never rounded, as lse
        tlse[unseen] = 0
        prob = rounded(prob)
        tp = rounded(shown(prob * rounded(ts - rounded(tlse))))
        keeps = kept(p, given)
        drop = 1 if keeps is True else keeps / self.work.type(p.kept)
        tout = rounded(rounded(rounded(drop * tp) @ v) + rounded(rounded(drop * prob) @ tv))

        dp = rounded(drop * rounded(do @ turned(v)))
        tdp = rounded(drop * rounded(rounded(do @ turned(tv)) + rounded(tdo @ turned(v))))
        of_lse, moved_lse = (np.where(unseen, 0, x.get("dlse", 0)).astype(self.work) for x in (self.arrays, self.moved))
        if self.by_out:
            out = rounded(rounded(drop * prob) @ v)
            delta, tdelta = row_sums(do * out), row_sums(tdo * out + do * tout)
        else:
            delta, tdelta = rounded(row_sums(prob * dp)), rounded(row_sums(tp * dp + prob * tdp))
        delta, tdelta = delta - of_lse[..., None], tdelta - moved_lse[..., None]
        ds = shown(prob * (dp - delta))
        tds = shown(rounded(tp * rounded(dp - delta)) + rounded(prob * rounded(tdp - tdelta)))
        dx, tdx = rounded(shown(ds * slope)), rounded(shown(tds * slope + bend * ds))
        tdq = rounded(rounded(rounded(tdx @ k) + rounded(dx @ tk)) * scale)
        tdk = rounded(rounded(turned(tdx) @ q) + rounded(turned(dx) @ tq))
        tdv = rounded(rounded(turned(rounded(drop * tp)) @ do) + rounded(turned(rounded(drop * prob)) @ tdo))
        found = {"tout": tout, "tdq": tdq, "tdk": self.over_group(tdk), "tdv": self.over_group(tdv)}
        found = {name: x.transpose(0, 2, 1, 3) for name, x in found.items()} | {"tlse": tlse[..., 0]}
        for row in ARRAYS:
            if row.gradient and row.name in given:
                if row.name == "sinks":
                    each = -(of_sink * (tsinks - tlse) * delta + of_sink * tdelta)
                else:
                    each = -distance(p).astype(self.work) * tds if row.name == "alibi_slopes" else rounded(tds)
                shape = given[row.name].shape
                found[f"td{row.name}"] = _summed(each, row.lengths(shape)).reshape(shape)
        for name, (index, change, _, tchange) in reads.items():
            each = shown(rounded(tds) * change + rounded(ds) * tchange)
            found[f"td{name}"] = self.summed_by(name, index, each)

        def luck() -> dict[str, float]:
            terms = np.abs(tp) * (np.abs(dp) + np.abs(delta)) + np.abs(prob) * (np.abs(tdp) + np.abs(tdelta))
            of_rowsums = [((drop * prob) @ v * do, tp), (tout * do, prob), ((drop * prob) @ v * tdo, prob)]
            of_logs = [(lse[..., None], tds), (tlse, ds)]
            found = self.luck(terms, of_rowsums, of_logs, reads, (of_sink, tsinks - tlse, delta, tdelta))
            if p.dtype == "float32":  # what rounds O, times what tS is off by from the mean of any of the row's keys
                spread = shown(np.abs(ts - tlse)).max(-1, keepdims=True, initial=0)
                found["tout"] = 4 * float(np.finfo("float32").eps * (spread * np.abs((drop * prob) @ v)).max(initial=0))
            return found | self.luck_of_few(of_rowsums, q, k * scale)

        self.reckon = luck
        return found

    def luck(self, terms: Any, of_rowsums: Any, of_logs: Any, reads: Arrays, sink: Any) -> dict[str, float]:
        """By how much rounding moves what arrays get where few numbers decide: four standard deviations.
        `reference._luck` has the same of gradients."""
        dtype = np.dtype(DTYPES[self.problem.dtype])
        eps = float(ml_dtypes.finfo(dtype).eps) * (1 if dtype.itemsize == 2 else 8)
        of_log = 8 * float(np.finfo(DTYPES[self.problem.lse_dtype]).eps)
        by_row = [eps * np.sqrt((x**2).sum(-1, keepdims=True)) * weight for x, weight in of_rowsums]
        by_row += [of_log * (1 + np.abs(np.where(np.isfinite(x), x, 0))) * weight for x, weight in of_logs]
        found = {}
        for name in self.arrays:
            row = next((row for row in ARRAYS if row.name == name and row.gradient), None)
            if name in reads:
                index, change, _, tchange = reads[name]
                variance = self.summed_by(name, index, (eps * terms * (np.abs(change) + np.abs(tchange))) ** 2)
                variance = variance + sum(self.summed_by(name, index, x * change) ** 2 for x in by_row)
            elif row is None:
                continue
            elif name == "sinks":
                of_sink, moved, delta, tdelta = sink
                each = of_sink * (np.abs(moved * delta) + np.abs(tdelta)) * (of_log * 8 + eps)
                variance = _summed(each**2, row.lengths(self.arrays[name].shape))
            else:
                lengths = row.lengths(self.arrays[name].shape)
                weights = distance(self.problem) if name == "alibi_slopes" else 1.0
                rows = [(x * weights).sum(-1, keepdims=True) if lengths[3] == 1 else x * weights for x in by_row]
                variance = sum(_summed(x**2, lengths) for x in (eps * terms * weights, *rows))
            found[f"td{name}"] = 4 * float(np.nan_to_num(np.sqrt(variance)).max(initial=0.0))
        return found

    def luck_of_few(self, of_rowsums: Any, q: np.ndarray, k: np.ndarray) -> dict[str, float]:
        """The same of dq and dk, by the rounding of O and tO, where a handful of queries decides: a row's is one for
        all of its keys."""
        p, dtype = self.problem, np.dtype(DTYPES[self.problem.dtype])
        if p.seq_q * p.group > 8 or dtype.itemsize != 2:
            return {}
        eps = float(ml_dtypes.finfo(dtype).eps)
        rows = [(eps * np.sqrt((x**2).sum(-1, keepdims=True)), weight) for x, weight in of_rowsums]
        of_q = sum((x * (weight @ k)) ** 2 for x, weight in rows)
        of_k = self.over_group(sum(turned(x * weight) ** 2 @ q**2 for x, weight in rows))
        return {name: float(np.nan_to_num(np.sqrt(x)).max(initial=0.0)) for name, x in (("tdq", of_q), ("tdk", of_k))}

    def summed_by(self, name: str, index: tuple[Any, ...], each: np.ndarray) -> np.ndarray:
        """What each element of an array that a score function reads gets."""
        total = np.zeros(self.arrays[name].shape, self.work)
        np.add.at(total, tuple(np.broadcast_to(n, each.shape) for n in index), each)
        return total

    def of_heads(self, name: str) -> np.ndarray:
        """(H, 1, 1), or (B, H, 1, 1)."""
        return np.asarray(self.array(name))[..., None, None]

    def of_terms(self, given: Arrays) -> Any:
        """What is added to scores changes by."""
        found: Any = 0
        if "alibi_slopes" in self.moved:
            found = found - self.of_heads("alibi_slopes") * distance(self.problem).astype(self.work)
        return found + self.array("bias")

    def of_function(self, x: np.ndarray, tx: np.ndarray, given: Arrays) -> tuple[Any, Arrays]:
        """What its slope changes by; and of each array that it reads: the index of the element of each pair, the
        derivative by that, the element's tangent, and what the derivative changes by."""
        if self.problem.score is None:
            return 0, {}
        found = _by_hand(self.problem, x, given)
        bend, reads = found.of_s * tx, {}
        for name, (index, change) in found.reads.items():
            key = f"score_arrays[{name!r}]"
            tangent = self.moved[key].astype(self.work)[index] if key in self.moved else 0
            mixed, own = found.of_reads.get(name, (0, 0))
            bend = bend + mixed * tangent
            reads[key] = index, change, tangent, mixed * tx + own * tangent
        return bend, reads

    def over_group(self, x: np.ndarray) -> np.ndarray:
        p = self.problem
        return self.rounded(x.reshape(p.batch, p.heads_k, p.group, *x.shape[2:]).sum(2)) if p.heads_k else x


def turned(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def row_sums(x: np.ndarray) -> np.ndarray:
    return x.sum(-1, keepdims=True)
