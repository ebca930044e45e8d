"""Parts of a whole on kernels that run without a GPU: all of them together beside the whole on the CPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from cuda_on_cpu import as_cpp, compile_all
from on_cpu import Guarded, run
from reference import state

from cupyflash import attention, attention_backward
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import AttentionProblem

At = tuple[int, int, int, int]
Arrays = dict[str, np.ndarray]


def table_of_the_whole(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    """Of the distance, and of each of batch entry, head and query by itself."""
    return s + t[h, j - i + 300] * (b + 1) + 0.01 * (i % 7)


@dataclass
class Whole:
    """What is asked of all, and its arrays, (B, S, H, D). `options` are those of a call."""

    family: str
    arch: Arch
    dtype: str
    rng: np.random.Generator
    seq: tuple[int, int] = (160, 224)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 48)
    options: dict[str, Any] = field(default_factory=dict)
    slopes: bool = False
    table: bool = False
    out_dtype: str | None = None  # of results
    dq_rounded: bool = False  # whether dq alone is of the dtype of q
    by_array: bool = False  # whether kernels read where a part stands
    before: Arrays | None = None  # what targets of gradients hold, to which these are added
    compiled: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (sq, sk), (hq, hk), (d, dv) = self.seq, self.heads, self.dims
        kind = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        shapes = {"q": (2, sq, hq, d), "k": (2, sk, hk, d), "v": (2, sk, hk, dv), "dout": (2, sq, hq, dv)}
        self.arrays = {name: self.rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
        self.others: Arrays = {}
        if self.slopes:
            self.others["alibi_slopes"] = (0.2 * self.rng.random((2, hq))).astype("f4")
        if self.table:
            self.options["score"] = table_of_the_whole
            self.others["score_arrays['t']"] = self.rng.standard_normal((hq, 601)).astype("f4")

    @property
    def close(self) -> dict[str, float]:
        size = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 3e-5, "float64": 1e-10}[self.dtype]
        return {"rtol": size, "atol": 4 * size}

    def exact(self) -> Arrays:
        """Results for all, in float64 on the CPU."""
        x = {name: y.astype("f8") for name, y in self.arrays.items()}
        options = {"at": (0, 0, 0, 0), **self.options}  # as for parts, query i stands on key i
        if self.slopes:
            options["alibi_slopes"] = self.others["alibi_slopes"].astype("f8")
        if self.table:
            options["score_arrays"] = {"t": self.others["score_arrays['t']"].astype("f8")}
        out, lse = attention(x["q"], x["k"], x["v"], return_lse=True, **options)
        wrt = ["alibi_slopes"] * self.slopes + ["t"] * self.table
        grads = attention_backward(x["dout"], x["q"], x["k"], x["v"], out, lse, wrt=wrt, **options)
        found = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads))
        return found | {f"d{name}": grads.of_arrays[name] for name in self.others}

    def cut(self, n: int, heads: slice, queries: slice, keys: slice) -> tuple[Arrays, Arrays, At]:
        """A part of batch entry n: its rows, its optional arrays, and where it stands."""
        group = self.heads[0] // self.heads[1]
        of_k = slice(heads.start // group, heads.stop // group)
        part = {
            name: np.ascontiguousarray(
                self.arrays[name][n : n + 1, keys if name in "kv" else queries, of_k if name in "kv" else heads]
            )
            for name in self.arrays
        }
        others = {
            name: np.ascontiguousarray(x[n : n + 1, heads]) if name == "alibi_slopes" else x
            for name, x in self.others.items()
        }
        return part, others, (n, heads.start, queries.start, keys.start)

    def run(self, rows: Arrays, others: Arrays, at: At | None, out: Any = None, lse: Any = None) -> Arrays:
        """What the kernels give of a part: its forward, or, with out and lse of all keys, the gradients."""
        options = {"seed": np.array(0), **self.options} if self.options.get("dropout") else self.options
        seed = options.get("seed")
        places = np.array(at, "int32") if self.by_array else at
        problem = state(rows["q"], rows["k"], rows["v"], at=places, **{**options, **others})
        problem = replace(problem, given=tuple(x for x in problem.given if x.name != "seed"), out_dtype=self.out_dtype)
        problem = replace(problem, add=out is not None and self.before is not None)
        if self.dq_rounded and out is not None:
            problem = replace(problem, dq_dtype=self.dtype)
        assert not problem.empty
        made = self._plans(problem, others, out is not None)
        libraries = compile_all(*[as_cpp(generate(x), [y.name for y in x.launches]) for x in made])
        inputs = {name: Guarded(x.shape, x.dtype, x, True) for name, x in {**rows, **others}.items()}
        if self.by_array:
            inputs["at"] = Guarded(places.shape, places.dtype, places)
        of_result = np.dtype(self.out_dtype) if self.out_dtype else rows["q"].dtype
        batch, seq, heads, _ = rows["q"].shape
        shapes = {"lse": (batch, heads, seq)}
        if out is None:
            results = {"out": Guarded(rows["dout"].shape, of_result), "lse": Guarded(shapes["lse"], problem.lse_dtype)}
        else:
            inputs |= {"out": Guarded(out.shape, out.dtype, out, True), "lse": Guarded(lse.shape, lse.dtype, lse)}
            kinds = {"q": rows["q"].dtype} if self.dq_rounded else {}
            results = {f"d{name}": Guarded(rows[name].shape, kinds.get(name, of_result), None, True) for name in "qkv"}
            results |= {f"d{name}": Guarded(x.shape, x.dtype) for name, x in others.items()}
        for name, x in (self.before or {}).items() if out is not None else ():
            results[name].array[...] = x
        for library, kernels in zip(libraries, made):
            spaces = {x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes}
            run(library, kernels, problem, results | inputs | spaces, False, 2, seed and int(seed))
        return {name: x.array.copy() for name, x in results.items()}

    def _plans(self, problem: AttentionProblem, others: Arrays, backward: bool) -> list[KernelPlan]:
        if not backward:
            return [plan(problem, self.arch, FORWARD, self.family)]
        made = [plan(problem, self.arch, BACKWARD, self.family)]
        for name, x in others.items():
            lengths = {name: (x.shape[0], x.shape[1], 1, 1) if name == "alibi_slopes" else x.shape}
            made.append(plan(problem, self.arch, BACKWARD, self.family, lengths=lengths))
        return made


def check(whole: Whole, queries: list[int], keys: list[int]) -> None:
    """Cut at these rows, and each batch entry and half of the heads by itself: parts merged, gradients added."""
    exact = whole.exact()
    found = {name: np.zeros(x.shape) for name, x in exact.items()}
    hq = whole.heads[0]
    for n, first in ((n, first) for n in range(2) for first in (0, hq // 2)):
        heads = slice(first, first + hq // 2)
        group = hq // whole.heads[1]
        of_k = slice(heads.start // group, heads.stop // group)
        for a, b in itertools.pairwise(queries):
            some = slice(a, b)
            tops, outs = [], []
            o = np.ascontiguousarray(exact["out"][n : n + 1, some, heads]).astype(whole.arrays["q"].dtype)
            kind = "f8" if whole.dtype == "float64" else "f4"
            of_all = np.ascontiguousarray(exact["lse"][n : n + 1, heads, some]).astype(kind)
            for c, d in itertools.pairwise(keys):
                rows, others, at = whole.cut(n, heads, some, slice(c, d))
                part = whole.run(rows, others, at)
                outs.append(part["out"].astype("f8")), tops.append(part["lse"].astype("f8"))
                grads = whole.run(rows, others, at, o, of_all)
                found["dq"][n, some, heads] += grads["dq"][0].astype("f8")
                found["dk"][n, c:d, of_k] += grads["dk"][0].astype("f8")
                found["dv"][n, c:d, of_k] += grads["dv"][0].astype("f8")
                if whole.slopes:
                    found["dalibi_slopes"][n, heads] += grads["dalibi_slopes"][0]
                if whole.table:
                    found["dscore_arrays['t']"] += grads["dscore_arrays['t']"]
            lse = np.logaddexp.reduce(tops)
            safe = np.where(np.isneginf(lse), 0, lse)
            weights = [np.exp(x - safe).transpose(0, 2, 1)[..., None] for x in tops]
            found["out"][n, some, heads] = sum(w * x for w, x in zip(weights, outs))[0]
            found["lse"][n, heads, some] = lse[0]
    for name, x in exact.items():
        close = dict(whole.close)
        if name.removeprefix("d") in whole.others:  # sums over many pairs
            close["atol"] = max(close["atol"], close["rtol"] * float(np.abs(x).max()))
        np.testing.assert_allclose(found[name], x, err_msg=name, **close)
