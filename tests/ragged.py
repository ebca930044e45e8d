"""Calls of sequences whose lengths are data, and what they must give: each sequence by itself, densely, in float64.

A sequence's arrays are picked out row by row here, by nothing that the package has. As the n-th of a call it is judged
as the n-th batch entry of a dense call: what goes by its number (dropout, score functions) does.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from backends import CPU, Backend
from criterion import as_good_as_rounding, assert_as_good, assert_as_good_as_either
from reference import DTYPES, draw, flash2_in_own_precision, standard, standard_in_own_precision, state
from score_functions import WRITTEN, key, of_dtype

from cupyflash import attention, attention_backward, block_mask

UNUSED = (-1, 2147480000)  # what entries of a page table hold that no length reaches
GRADIENTS = ("bias", "alibi_slopes", "sinks")


class Case(NamedTuple):
    """Arrays as (rows, heads, dim), (sequences, rows, heads, dim) or (pages, rows, heads, dim), and where each
    sequence's rows lie: pairs of an entry of the first axis, if there is one before rows, and a row."""

    arrays: dict[str, np.ndarray]  # q, k, v, dout, dlse
    lengths: dict[str, np.ndarray]  # the arrays of integers
    given: dict[str, np.ndarray]  # optional arrays
    options: dict[str, Any]
    queries: list[Any]  # for each sequence an index of q's rows
    keys: list[Any]
    blocks: np.ndarray | None = None  # a block mask as booleans

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.lengths


def draw_case(
    rng: np.random.Generator,
    lens_q: list[int],
    lens_k: list[int],
    *,
    dtype: str = "float32",
    form_q: str = "packed",
    form_k: str = "packed",
    page: int = 16,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    rest: int = 3,
    given: tuple[str, ...] = (),
    lines: tuple[str, ...] = (),
    along: str = "bhqk",
    score: str | None = None,
    blocks: str | None = None,
    integers: Any = np.int64,
    options: dict[str, Any] | None = None,
) -> Case:
    """`rest`: how many rows belong to nobody, behind each end. Arrays over pairs named in `lines` have a line for each
    packed query; the others have every number along the axes of `along`, by first letters. `blocks`: those of "bh"
    along which a block mask differs."""
    n, (hq, hk), (d, dv), lengths = len(lens_q), heads, dims, {}
    nan = DTYPES[dtype](np.nan)
    if form_q == "packed":
        ends = np.cumsum([0, *lens_q])
        lengths["cu_seqlens_q"] = ends.astype(integers)
        front: tuple[int, ...] = (int(ends[-1]) + rest,)
        queries: list[Any] = [(slice(a, b),) for a, b in itertools.pairwise(ends)]
    else:
        assert len({*lens_q}) == 1
        front = n, lens_q[0]
        queries = [(at, slice(None)) for at in range(n)]
    if form_k == "packed":
        ends = np.cumsum([0, *lens_k])
        lengths["cu_seqlens_k"] = ends.astype(integers)
        of_keys: tuple[int, ...] = (int(ends[-1]) + rest,)
        keys: list[Any] = [(slice(a, b),) for a, b in itertools.pairwise(ends)]
    elif form_k == "filled":
        lengths["seqlens_k"] = np.array(lens_k, integers)
        of_keys = n, max(lens_k) + rest
        keys = [(at, slice(m)) for at, m in enumerate(lens_k)]
    elif form_k == "paged":
        lengths["seqlens_k"] = np.array(lens_k, integers)
        reach = [-(-m // page) for m in lens_k]
        pool = sum(reach) + rest
        numbers = list(rng.permutation(pool))
        table = rng.choice(UNUSED, (n, max(reach) + (1 if rest else 0))).astype(integers)
        for at, some in enumerate(reach):
            table[at, :some] = [numbers.pop() for _ in range(some)]
        if n > 1 and reach[0] and reach[-1]:  # a page of two
            table[-1, 0] = table[0, 0]
        lengths["page_table"] = table
        of_keys = pool, page
        keys = [(table[at][np.arange(m) // page], np.arange(m) % page) for at, m in enumerate(lens_k)]
    else:
        assert len({*lens_k}) == 1
        of_keys = n, lens_k[0]
        keys = [(at, slice(None)) for at in range(n)]
    arrays = {
        "q": draw(rng, dtype, *front, hq, d), "dout": draw(rng, dtype, *front, hq, dv),
        "k": draw(rng, dtype, *of_keys, hk, d), "v": draw(rng, dtype, *of_keys, hk, dv),
    }  # fmt: skip
    for name, places in (("q", queries), ("dout", queries), ("k", keys), ("v", keys)):
        owned = np.zeros(arrays[name].shape[: len(places[0])] if n else arrays[name].shape[:1], bool)
        for place in places:
            owned[place] = True
        arrays[name][~owned] = nan
    of_rows = "float64" if dtype == "float64" else "float32"
    arrays["dlse"] = draw(rng, of_rows, *((hq, front[0]) if len(front) == 1 else (n, hq, front[1])))
    long_q, long_k = max(lens_q, default=0) + 2 * (form_q == "packed"), max(lens_k, default=0) + 2 * (form_k != "dense")
    over = [m if axis in along else 1 for axis, m in zip("bhqk", (n, hq, long_q, long_k))]
    line = [hq if "h" in along else 1, front[0], long_k if "k" in along else 1]
    own = {
        "key_mask": lambda: rng.random((n if "b" in along else 1, long_k)) < 0.7,
        "mask": lambda: rng.random(line if "mask" in lines else over) < 0.7,
        "bias": lambda: draw(rng, dtype, *(line if "bias" in lines else over)),
        "alibi_slopes": lambda: (2.0 ** -rng.uniform(1, 8, (n if "b" in along else 1, hq))).astype(of_rows),
        "sinks": lambda: draw(rng, dtype, hq),
        "seed": lambda: np.array([rng.integers(-(2**63), 2**63)]),
    }
    optional = {name: own[name]() for name in given}
    if score is not None:
        read = WRITTEN[score].draw(rng, max(n, 1), hq, max(long_q, 1), max(long_k, 1))
        optional |= {key(name): x for name, x in of_dtype(read, of_rows).items()}
    options = dict(options or {})
    seen = None
    if score is not None:
        options["score"] = WRITTEN[score].function
    if blocks is not None:
        seen = np.repeat(np.repeat(rng.random((n if "b" in blocks else 1, hq if "h" in blocks else 1,
                                               -(-long_q // 16), -(-long_k // 16))) < 0.6, 16, 2), 16, 3)  # fmt: skip
        seen = seen[:, :, :long_q, :long_k]
    return Case(arrays, lengths, optional, options, queries, keys, seen)


def picked(x: np.ndarray, places: Any) -> np.ndarray:
    """The rows of a sequence, (rows, heads, dim)."""
    return np.array(x[places])


def of_array(case: Case, name: str, x: np.ndarray, n: int, lq: int, lk: int) -> tuple[Any, ...]:
    """The index of what a sequence has of an optional array."""

    def some(length: int, own: int) -> slice:
        return slice(None) if length == 1 else slice(own)

    def entry(length: int) -> slice:
        return slice(None) if length == 1 else slice(n, n + 1)

    if name in ("mask", "bias"):
        if x.ndim == 3:
            return slice(None), *case.queries[n], some(x.shape[2], lk)
        return entry(x.shape[0]), slice(None), some(x.shape[2], lq), some(x.shape[3], lk)
    if name == "key_mask":
        return entry(x.shape[0]), some(x.shape[1], lk)
    return (entry(x.shape[0]), slice(None)) if name == "alibi_slopes" else (slice(None),) * x.ndim


def published(*arrays: Any, **given: np.ndarray) -> Any:
    """FlashAttention-2's results in own precision; lse as standard attention has it."""
    own = standard_in_own_precision(*arrays, **given)
    return SimpleNamespace(lse=own.lse, luck={}, **flash2_in_own_precision(*arrays, **given))


def expected(
    case: Case, own_precision: bool, backward: bool, each: list[Any] | None = None, compute: Any = None
) -> dict[str, np.ndarray]:
    """The results of a call, sequence by sequence; `each` gets those of every sequence that has keys. compute: in the
    place of standard attention."""
    arrays, dtype = case.arrays, case.arrays["q"].dtype.name
    hq, dv = arrays["q"].shape[-2], arrays["v"].shape[-1]
    rows = arrays["q"].shape[:-2]
    of_lse = (hq, *rows) if case.packed else (rows[0], hq, rows[1])
    results = {"out": np.zeros((*rows, hq, dv)), "lse": np.full(of_lse, -np.inf)}
    if backward:
        results |= {f"d{name}": np.zeros(arrays[name].shape) for name in "qkv"}
        wanted = [name for name in case.given if name in GRADIENTS or name.startswith("score_arrays[")]
        results |= {f"d{name}": np.zeros(case.given[name].shape) for name in wanted if _is_float(case.given[name])}
    compute = compute or (standard_in_own_precision if own_precision and dtype != "float64" else standard)
    for n, (of_q, of_k) in enumerate(zip(case.queries, case.keys)):
        one = {name: picked(arrays[name], of_k if name in "kv" else of_q) for name in ("q", "k", "v", "dout")}
        lq, lk = len(one["q"]), len(one["k"])
        if not lq:
            continue
        at_lse = (slice(None), *of_q) if case.packed else (n,)
        index = {name: of_array(case, name, x, n, lq, lk) for name, x in case.given.items()}
        given = {name: x[index[name]] for name, x in case.given.items()}
        for name in ("mask", "bias"):
            if name in given and given[name].ndim == 3:
                given[name] = given[name][None]
        if case.blocks is not None:
            entry = slice(n, n + 1) if len(case.blocks) > 1 else slice(None)
            shown = case.blocks[entry, :, :lq, :lk]
            given["mask"] = shown & given["mask"] if "mask" in given else shown
        # Where its number counts, as the last of n + 1 batch entries, of which the others get no gradient.
        others = n if "score" in case.options or case.options.get("dropout") else 0
        whole = {name: np.zeros((others, *x.shape), x.dtype) for name, x in one.items()}
        whole = {name: np.concatenate([x, one[name][None]]) for name, x in whole.items()}
        dlse = np.zeros((others + 1, hq, lq), arrays["dlse"].dtype)
        dlse[-1] = arrays["dlse"][at_lse]
        problem = state(whole["q"], whole["k"], whole["v"], **case.options, **given)
        mine = {name: x for name, x in given.items() if name != "key_mask"}
        found = compute(
            problem, whole["q"], whole["k"], whole["v"], given.get("key_mask"),
            *((whole["dout"], dlse) if backward else ()), **mine,
        )  # fmt: skip
        results["out"][of_q] = found.out[-1]
        results["lse"][at_lse] = found.lse[-1]
        if each is not None and lk:
            each.append(found)
        if backward:
            results["dq"][of_q] = found.dq[-1]
            results["dk"][of_k] = found.dk[-1]
            results["dv"][of_k] = found.dv[-1]
            for name in results.keys() - {"out", "lse", "dq", "dk", "dv"}:
                of = name[1:]
                part = getattr(found, name)
                results[name][index[of]] += part.reshape(results[name][index[of]].shape)
    return results


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype.name == "bfloat16"


def arguments(case: Case, layout: str = "bshd", put: Any = lambda x: x) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `attention` is given: arrays in the layout, and the rest by name."""

    def laid(x: np.ndarray) -> Any:
        return put(np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x)

    arrays = {name: put(x) if name == "dlse" else laid(x) for name, x in case.arrays.items()}
    named = {name: put(x) for name, x in (case.lengths | case.given).items() if not name.startswith("score_arrays[")}
    if "score" in case.options:
        read = {name: put(x) for name, x in case.given.items() if name.startswith("score_arrays[")}
        named["score_arrays"] = {name[len("score_arrays['") : -2]: x for name, x in read.items()}
    if case.blocks is not None:
        named["block_mask"] = block_mask(put(case.blocks), block=16, like=arrays["q"])
    return arrays, named | case.options | {"layout": layout}


def check_case(
    case: Case,
    backward: bool = True,
    layout: str = "bshd",
    targets: bool = False,
    on: Backend = CPU,
    named: bool = True,
) -> dict[str, np.ndarray]:
    """Run a call, with NaN in all that belongs to nobody, and judge it. Its results, heads last but one.

    What the family of `on` has no backward of lengths for, another one computes. `named`: the forward's is it, else the
    plan's choice.
    """
    family = on.family if named else None
    arrays, options = arguments(case, layout, on.put)
    backward = backward and "page_table" not in case.lengths
    q, k, v = (arrays[name] for name in "qkv")
    shape = (*q.shape[:-1], v.shape[-1])
    into = on.nan(shape, case.arrays["q"].dtype.name) if targets else None
    given = (q, k, v) if options.get("latent") is None else (q, k)
    out, lse = attention(*given, return_lse=True, out=into, family=family, **options)
    assert into is None or out is into
    found = {"out": out, "lse": lse}
    if backward:
        read = {name: x for name, x in case.given.items() if name.startswith("score_arrays[") and _is_float(x)}
        wrt = [name for name in case.given if name in GRADIENTS] + [name[len("score_arrays['") : -2] for name in read]
        dtype = case.arrays["q"].dtype.name
        grads = tuple(on.nan(arrays[name].shape, dtype) for name in "qkv") if targets else None
        taken = _poisoned(case, out, layout == "bhsd"), _poisoned(case, lse, True)
        options["dlse"] = _poisoned(case, arrays["dlse"], True)
        family = family if family in ("sm80", "simt") else None
        results = attention_backward(arrays["dout"], q, k, v, *taken, wrt=wrt, grads=grads, family=family, **options)
        found |= dict(zip(("dq", "dk", "dv"), results)) | {f"d{x}": y for x, y in results.of_arrays.items()}
        assert grads is None or all(x is y for x, y in zip(results, grads))
    found = dict(zip(found, on.get_all([*found.values()])))
    if layout == "bhsd":
        found |= {name: found[name].swapaxes(-3, -2) for name in ("out", "dq", "dk", "dv") if name in found}
    judge(case, found, backward)
    return found


def judge(case: Case, found: dict[str, np.ndarray], backward: bool) -> None:
    """Whether these results are as good as the reference's."""
    each: list[Any] = []
    exact = expected(case, False, backward, each)
    assert found.keys() == exact.keys()
    if all(as_good_as_rounding(x, exact[name]) for name, x in found.items()):
        return
    own = expected(case, True, backward)
    units = _units(case, luck_of(each, exact))
    for name, x in found.items():
        unit = units.get(name, 1.0)
        with contextlib.suppress(AssertionError):
            assert_as_good(x, exact[name], own[name], name, unit, luck=False)
            continue
        of_published = None if name == "lse" else expected(case, True, True, compute=published)[name]
        assert_as_good_as_either(x, exact[name], own[name], of_published, name, lambda unit=unit: unit)


def luck_of(each: list[Any], names: Collection[str]) -> dict[str, float]:
    """`unit` of gradients of optional arrays, sums over all sequences, whose results are `each`."""
    return {
        name: math.hypot(*(x.luck.get(name, 0.0) for x in each)) / 1e-5
        for name in names if name not in ("out", "lse", "dq", "dk", "dv")
    }  # fmt: skip


def _units(case: Case, luck: dict[str, float]) -> dict[str, float]:
    """What `assert_as_good` calls so: where few numbers decide, luck does, and the rounding of `out` beside it."""
    q, k = (np.nan_to_num(case.arrays[name].astype(np.float64)) for name in "qk")
    rows = sum(len(picked(q, of)) for of in case.queries) * q.shape[-2]
    sequences = max(1.0, math.sqrt(len(case.queries)))
    units = {name: max(sequences, x) for name, x in luck.items()} | {"out": sequences, "dv": sequences}
    scale = abs(case.options.get("scale") or 1 / max(1, q.shape[-1]) ** 0.5)
    few = rows < 600
    of_out = 4 * float(ml_dtypes.finfo(case.arrays["q"].dtype).eps) / 1e-5 * few
    for name, other in (("dq", k), ("dk", q)):
        units[name] = sequences + of_out * scale * float(np.abs(other).max(initial=0.0))
    return units


def _poisoned(case: Case, x: Any, heads_first: bool) -> Any:
    """A copy with NaN in rows that belong to nobody."""
    x = x.copy()
    if case.packed:
        behind = slice(int(case.lengths["cu_seqlens_q"][-1]), None)
        x[(slice(None), behind) if heads_first else behind] = np.nan
    return x
