"""Sequences whose lengths are data, on kernels that run without a GPU: each as it comes out by itself, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ragged
from cuda_on_cpu import as_cpp, compile_all
from on_cpu import Guarded, run, with_tile
from reference import state
from semantics import Blocks

from cupyflash import BlockMask, block_mask
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.problem import ARRAYS, AttentionProblem

WIDTH = {"float16": "f2", "float32": "f4", "float64": "f8"}
GRADIENTS = [row.name for row in ARRAYS if row.gradient]


@dataclass
class Sequences:
    """What each has, and how all lie in arrays.

    `q`: "packed" or "dense"; `k`: "packed", "dense", "cache" or "paged". `behind`: rows of packed arrays, and of each
    cache, that belong to nobody. What nobody reads is NaN, or as bad.
    """

    rng: np.random.Generator
    queries: list[int]
    keys: list[int]
    q: str = "packed"
    k: str = "packed"
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    behind: int = 5
    page: int = 8
    offsets: str = "int32"
    lines: tuple[str, ...] = ()  # arrays over pairs that have a line for each packed query
    own: dict[str, list[np.ndarray]] = field(default_factory=dict)  # of each sequence: q, k, v, dout, dlse

    def __post_init__(self) -> None:
        (heads_q, heads_k), (dim, dim_v) = self.heads, self.dims
        shapes = {
            "q": lambda i, j: (i, heads_q, dim),
            "k": lambda i, j: (j, heads_k, dim),
            "v": lambda i, j: (j, heads_k, dim_v),
            "dout": lambda i, j: (i, heads_q, dim_v),
            "dlse": lambda i, j: (heads_q, i),
        }
        for name, shape in shapes.items():
            dtype = {"float16": "f4"}.get(self.dtype, WIDTH[self.dtype]) if name == "dlse" else WIDTH[self.dtype]
            self.own[name] = [self.normal(shape(i, j)).astype(dtype) for i, j in zip(self.queries, self.keys)]
        for name, values in (("q", self.queries), ("k", self.keys)):
            assert getattr(self, name) != "dense" or len(set(values)) == 1

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(WIDTH[self.dtype])

    @property
    def count(self) -> int:
        return len(self.queries)

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.queries), max(self.keys)

    def bad(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, np.nan, dtype)

    # ---- all of them -------------------------------------------------------------------------------------------------

    def of_queries(self, name: str) -> np.ndarray:
        rows = self.own[name]
        if self.q == "dense":
            return np.stack(rows)
        return np.concatenate([*rows, self.bad((self.behind, *rows[0].shape[1:]), rows[0].dtype)])

    def of_keys(self, name: str) -> np.ndarray:
        rows = self.own[name]
        rest = rows[0].shape[1:]
        if self.k == "dense":
            return np.stack(rows)
        if self.k == "packed":
            return np.concatenate([*rows, self.bad((self.behind, *rest), rows[0].dtype)])
        cached = self.bad((self.count, self.longest[1] + self.behind, *rest), rows[0].dtype)
        for n, x in enumerate(rows):
            cached[n, : len(x)] = x
        if self.k == "cache":
            return cached
        pool = self.bad((self.pages, self.page, *rest), rows[0].dtype)
        for n, x in enumerate(rows):
            for j, row in enumerate(x):
                pool[self.table[n, j // self.page], j % self.page] = row
        return pool

    @property
    def pages(self) -> int:
        return self.table.size + 3

    @property
    def table(self) -> np.ndarray:
        """Which page has which rows, in no order; of those behind a sequence nonsense."""
        each = -(-(self.longest[1] + self.behind) // self.page)
        order = np.random.default_rng(5).permutation(self.count * each + 3)[: self.count * each]
        table = order.reshape(self.count, each).astype(self.offsets)
        for n, length in enumerate(self.keys):
            table[n, -(-length // self.page) :] = 2147480000 if n % 2 else -1
        return table

    def lengths(self) -> dict[str, np.ndarray]:
        given = {}
        if self.q == "packed":
            given["cu_seqlens_q"] = np.cumsum([0, *self.queries])
        if self.k == "packed":
            given["cu_seqlens_k"] = np.cumsum([0, *self.keys])
        if self.k in ("cache", "paged"):
            given["seqlens_k"] = np.array(self.keys)
        given = {name: x.astype(self.offsets) for name, x in given.items()}
        return given | ({"page_table": self.table} if self.k == "paged" else {})

    def own_dlse(self) -> np.ndarray:
        rows = self.own["dlse"]
        if self.q == "dense":
            return np.stack(rows)
        behind = self.bad((rows[0].shape[0], self.behind), rows[0].dtype)
        return np.ascontiguousarray(np.concatenate([*rows, behind], axis=1))

    # ---- one of them -------------------------------------------------------------------------------------------------

    def rows_of(self, n: int, name: str, x: np.ndarray) -> np.ndarray:
        """Of a result what is of number n."""
        first = self.first_query(n)
        if name == "lse":
            return x[n] if self.q == "dense" else x[:, first : first + self.queries[n]]
        if name in ("out", "dq"):
            return x[n] if self.q == "dense" else x[first : first + self.queries[n]]
        first = sum(self.keys[:n])
        return x[first : first + self.keys[n]] if self.k == "packed" else x[n, : self.keys[n]]

    def made_of(self, own: list[dict[str, np.ndarray]]) -> Sequences:
        """Sequences that lie as these do."""
        made = replace(self, queries=[len(x["q"]) for x in own], keys=[len(x["k"]) for x in own], own={})
        made.own = {name: [x[name] for x in own] for name in self.own}
        return made

    def of(self, numbers: list[int]) -> Sequences:
        return self.made_of([{name: rows[n] for name, rows in self.own.items()} for n in numbers])

    def cut(self, n: int, at: int) -> list[dict[str, np.ndarray]]:
        """Its first `at` queries with the keys that there were under a causal mask, and the others with all."""
        x = {name: rows[n] for name, rows in self.own.items()}
        keys = max(0, self.keys[n] - (self.queries[n] - at))
        first = {name: x[name][:at] for name in ("q", "dout")} | {name: x[name][:keys] for name in ("k", "v")}
        rest = {name: x[name][at:] for name in ("q", "dout")} | {name: x[name] for name in ("k", "v")}
        return [first | {"dlse": x["dlse"][:, :at]}, rest | {"dlse": x["dlse"][:, at:]}]

    def first_query(self, n: int) -> int:
        return sum(self.queries[:n])

    def alone(self, n: int, name: str, x: np.ndarray) -> np.ndarray:
        """Of an optional array given for all what a batch has in which each entry has the shape of number n."""
        axes = next(row.axes for row in ARRAYS if row.name == name)
        if name in self.lines:
            x = x[None, :, self.first_query(n) : self.first_query(n) + self.queries[n]]
        cut = {"query": self.queries[n], "key": self.keys[n]}
        for axis, of in enumerate(axes):
            if of in cut and x.shape[axis] > 1:
                x = x.take(range(cut[of]), axis)
            if of == "batch" and x.shape[axis] > 1:
                x = x.take([n] * self.count, axis)
        return np.ascontiguousarray(x)

    def alone_blocks(self, n: int, blocks: Blocks) -> Blocks:
        """The same of a block mask."""
        seen = blocks.seen[n : n + 1].repeat(self.count, 0) if len(blocks.seen) > 1 else blocks.seen
        return Blocks(np.ascontiguousarray(seen[:, :, : self.queries[n], : self.keys[n]]), blocks.block)


class Ran:
    """A problem's plans, compiled: forward, backward and the gradients of arrays."""

    def __init__(self, plans: list[KernelPlan]) -> None:
        self.plans = plans
        self.libraries = compile_all(*[as_cpp(generate(x), self.kernels(x)) for x in plans])

    @staticmethod
    def kernels(of: KernelPlan) -> list[str]:
        """Also what is launched for other lengths alone."""
        return list(
            dict.fromkeys(
                [x.name for x in of.launches]
                + [f"attention_backward_{x}_add" for x in of.wrt if x in GRADIENTS and x != "sinks"]
            )
        )

    def __call__(
        self,
        problem: AttentionProblem,
        plans: list[KernelPlan],
        given: dict[str, np.ndarray],
        shapes: dict[str, tuple[int, ...]],
        last_first: bool = False,
        seed: int | None = None,
        mask: BlockMask | None = None,
        left: dict[str, Guarded] | None = None,
    ) -> dict[str, np.ndarray]:
        """Results by name. Programs are those compiled; the plans say grids and workspaces, which end up in `left`."""
        mapped = bool(self.plans[0].maps)  # TMA wants rows that begin at 16 bytes, as the corridor copies them
        inputs = {
            name: Guarded(x.shape, x.dtype, x, rows_aligned=mapped, packed=name in ("q", "k", "v", "dout"))
            for name, x in given.items()
        }
        of = {name: given.get(name.removeprefix("d"), given["q"]).dtype for name in shapes}
        results = {name: Guarded(shape, of[name], None) for name, shape in shapes.items()}
        results["lse"] = Guarded(shapes["lse"], problem.lse_dtype)
        for n, (library, kernels) in enumerate(zip(self.libraries, plans)):
            assert kernels.constants == self.plans[n].constants, "another program"
            spaces = {x.name: Guarded(x.shape, x.dtype) for x in kernels.workspace if x.nbytes}
            for use in kernels.lists:
                found = mask.list_for(use)
                spaces[use.name] = Guarded(found.shape, found.dtype, found)
            if left is not None:
                left |= spaces
            if n == 0:
                run(library, kernels, problem, results | inputs | spaces, last_first, 2, seed)
                for name in ("out", "lse"):
                    inputs[name] = Guarded(results[name].array.shape, results[name].array.dtype, results[name].array)
            else:
                run(library, kernels, problem, results | inputs | spaces, last_first, 2, seed)
        return {name: x.array.copy() for name, x in results.items()}


def plans_of(
    problem: AttentionProblem,
    arch: Arch,
    family: str,
    backward: bool,
    arrays: dict[str, tuple[int, ...]],
    tiles: dict[str, Any],
) -> list[KernelPlan]:
    made = [with_tile(problem, arch, FORWARD, family, tiles.get("forward"))]
    if backward:
        made.append(with_tile(problem, arch, BACKWARD, family, tiles.get("backward")))
    if arrays:
        lengths = {name: next(x for x in ARRAYS if x.name == name).lengths(shape) for name, shape in arrays.items()}
        made.append(plan(problem, arch, BACKWARD, family, lengths=lengths))
    return made


def check(
    family: str,
    arch: Arch,
    of: Sequences,
    options: dict[str, Any] | None = None,
    others: dict[str, np.ndarray] | None = None,
    backward: bool = True,
    tiles: dict[str, Any] | None = None,
    last_first: bool = False,
    seed: int | None = None,
    blocks: Blocks | None = None,
) -> dict[str, np.ndarray]:
    """Forward and backward of all at once, and of each by itself: out, lse, dq, dk and dv are to the bit the same, and
    0, or -inf, what belongs to nobody. `blocks`: a block mask, as long as any sequence or longer."""
    options, others, tiles = options or {}, others or {}, tiles or {}
    mask = None
    if blocks is not None:
        mask = blocks.mask()
        options = options | {"block_mask": mask}
    backward = backward and of.k != "paged"
    arrays = {name: others[name].shape for name in GRADIENTS if name in others} if backward else {}
    q, k, v, dout, dlse = of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), of.of_queries("dout"), of.own_dlse()
    problem = state(q, k, v, **options, **others, **of.lengths())
    seeds = {name: others[name] for name in others if name == "seed" and seed is not None}
    if seed is not None:
        others = {name: x for name, x in others.items() if name != "seed"}
    given = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, **others, **of.lengths()}
    shapes = {"out": dout.shape, "lse": dlse.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    shapes |= {f"d{name}": shape for name, shape in arrays.items()}
    if seed is not None:
        problem = replace(problem, given=tuple(x for x in problem.given if x.name != "seed"))
    if not backward:
        shapes = {name: shapes[name] for name in ("out", "lse")}
    plans = plans_of(problem, arch, family, backward, arrays, tiles)
    found = Ran(plans)(problem, plans, given, shapes, last_first, seed, mask)

    sums = {name: np.zeros(shape) for name, shape in arrays.items()}
    dense: dict[Any, Ran] = {}  # programs may follow from lengths
    for n in range(of.count):
        own = {name: of.alone(n, name, x) for name, x in others.items()}
        batch = {name: np.stack([rows[n]] * of.count) for name, rows in of.own.items()}
        bounds = {"left": problem.left, "right": problem.right}
        if blocks is not None:
            mask = of.alone_blocks(n, blocks).mask()
            options = options | {"block_mask": mask}
        one = replace(state(batch["q"], batch["k"], batch["v"], **options, **own, **seeds), **bounds)
        shape = {name: batch[name].shape for name in ("q", "k", "v")}
        want = {"out": batch["dout"].shape, "lse": batch["dlse"].shape} | {f"d{name}": x for name, x in shape.items()}
        want |= {f"d{name}": own[name].shape for name in arrays}
        want = {name: x for name, x in want.items() if name in shapes}
        if one.empty:
            results = {name: np.zeros(x, "f4") for name, x in want.items()}
            results["lse"][:] = own["sinks"].reshape(1, -1, 1) if "sinks" in own else -np.inf
        else:
            if seed is not None:
                one = replace(one, given=tuple(x for x in one.given if x.name != "seed"))
            made = plans_of(one, arch, family, backward, {name: own[name].shape for name in arrays}, tiles)
            program = tuple(x.constants for x in made)
            if program not in dense:
                dense[program] = Ran(made)
            results = dense[program](one, made, batch | own, want, last_first, seed, mask)
        compare(of, n, found, results, want)
        add_gradients(of, n, sums, results, others)
    for name, exact in sums.items():
        np.testing.assert_allclose(
            found[f"d{name}"],
            exact,
            rtol=2e-2 if of.dtype == "float16" else 2e-4,
            atol=1e-2 if of.dtype == "float16" else 2e-4,
            err_msg=f"d{name}",
        )
    nobodys(of, found)
    return found


def check_case(family: str, arch: Arch, case: ragged.Case) -> None:
    """Forward and backward of a case, and all its gradients, judged; where these are deterministic blocks run in two
    orders, and every result is the same."""
    mask = None if case.blocks is None else block_mask(case.blocks, block=16)
    options = case.options | ({} if mask is None else {"block_mask": mask})
    named = case.arrays | case.given | case.lengths
    q, k, v = (named[name] for name in "qkv")
    problem = state(q, k, v, **options, **case.given, **case.lengths)
    floats = {name: x.shape for name, x in case.given.items() if x.dtype.kind == "f"}
    asked = [{x: floats[x] for x in floats if x in GRADIENTS}, {x: floats[x] for x in floats if problem.reads(x)}]
    plans = [plan(problem, arch, of, family) for of in (FORWARD, BACKWARD)]
    for names in filter(None, asked):
        lengths = {x: next((row.lengths(y) for row in ARRAYS if row.name == x), y) for x, y in names.items()}
        plans.append(plan(problem, arch, BACKWARD, family, lengths=lengths))
    shapes = {"out": case.arrays["dout"].shape, "lse": case.arrays["dlse"].shape}
    shapes |= {f"d{name}": named[name].shape for name in ("q", "k", "v", *asked[0], *asked[1])}
    ran, before = Ran(plans), None
    for last_first in (False, True) if problem.deterministic else (True,):
        found = ran(problem, plans, named, shapes, last_first, None, mask)
        ragged.judge(case, found, True)
        before = before or found
        assert all(before[name].tobytes() == x.tobytes() for name, x in found.items()), "in another order other bits"


def check_invariant(
    family: str,
    arch: Arch,
    of: Sequences,
    cuts: list[int],
    options: dict[str, Any],
    others: dict[str, np.ndarray],
) -> None:
    """With batch_invariant=True each comes out to the bit the same beside others, in another order and alone; and out
    and lse also where its queries are cut in two calls' worth, after so many, each with the keys that were there."""
    options = options | {"batch_invariant": True, "causal": True}
    programs: dict[Any, Ran] = {}

    def results(of: Sequences, backward: bool) -> list[dict[str, bytes]]:
        q, k, v, dout, dlse = of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), of.of_queries("dout"), of.own_dlse()
        problem = state(q, k, v, **options, **others, **of.lengths())
        shapes = {"out": dout.shape, "lse": dlse.shape}
        if backward:
            shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
        plans = plans_of(problem, arch, family, backward, {}, {"forward": None})
        program = tuple(x.constants for x in plans)
        if program not in programs:
            programs[program] = Ran(plans)
        given = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, **others, **of.lengths()}
        found = programs[program](problem, plans, given, shapes, len(of.queries) % 2 == 0)
        return [{name: of.rows_of(n, name, x).tobytes() for name, x in found.items()} for n in range(of.count)]

    wanted = results(of, True)
    orders = [list(range(of.count))[::-1][1:], *([n] for n in range(of.count))]
    for order in orders:
        for n, found in zip(order, results(of.of(order), True)):
            for name, bits in found.items():
                assert bits == wanted[n][name], f"{name} of sequence {n} in {order}"
    assert len(programs) == 1, "they follow from lengths"
    pieces = [piece for n, cut in enumerate(cuts) for piece in of.cut(n, cut)]
    found = results(of.made_of(pieces), False)
    for n in range(of.count):
        for name, axis in (("out", 0), ("lse", 1)):
            rows = [np.frombuffer(x[name], np.uint8) for x in found[2 * n : 2 * n + 2]]
            whole = np.frombuffer(wanted[n][name], np.uint8)
            if axis == 1:
                rows, whole = [x.reshape(of.heads[0], -1) for x in rows], whole.reshape(of.heads[0], -1)
            assert np.array_equal(np.concatenate(rows, axis=axis), whole), f"{name} of sequence {n}, cut at {cuts[n]}"


def compare(of: Sequences, n: int, found: dict[str, np.ndarray], results: dict[str, np.ndarray], want: Any) -> None:
    for name in want:
        if name in ("out", "lse", "dq", "dk", "dv"):
            got = of.rows_of(n, name, found[name])
            assert np.array_equal(got, results[name][n], equal_nan=False), f"{name} of sequence {n}, of {want}"


def add_gradients(
    of: Sequences, n: int, sums: dict[str, np.ndarray], results: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> None:
    """What sequence n alone adds to gradients of arrays: entry n of a batch in which all are that one."""
    for name, total in sums.items():
        part = results[f"d{name}"].astype("f8")
        by_sequence = name != "sinks" and part.shape[0] > 1
        part = part[n : n + 1] if by_sequence else part / of.count
        if name in of.lines:
            rows = slice(of.first_query(n), of.first_query(n) + of.queries[n])
            total[:, rows, : part.shape[3]] += part[0]
            continue
        where = [slice(0, x) for x in part.shape]
        if by_sequence:
            where[0] = slice(n, n + 1)
        total[tuple(where)] += part


def nobodys(of: Sequences, found: dict[str, np.ndarray]) -> None:
    if of.q == "packed" and of.behind:
        rows = slice(sum(of.queries), None)
        assert not found["out"][rows].any() and np.all(found["lse"][:, rows] == -np.inf), "out or lse of nobody's rows"
        assert "dq" not in found or not found["dq"][rows].any(), "dq of nobody's rows"
    for name in ("dk", "dv"):
        if name in found and of.k == "packed":
            assert not found[name][sum(of.keys) :].any(), f"{name} of nobody's rows"
        if name in found and of.k == "cache":
            for n, length in enumerate(of.keys):
                assert not found[name][n, length:].any(), f"{name} behind a cache's length"


def nonsense(rng: np.random.Generator, shape: tuple[int, ...], rows: int, dtype: str) -> np.ndarray:
    """What should be offsets, lengths or pages and is not."""
    kind, most = rng.integers(6), np.iinfo(dtype)
    x = rng.integers(-rows, 2 * rows + 1, shape)
    if kind == 0:
        x = rng.integers(most.min, most.max, shape)
    elif kind == 1:
        x = np.sort(x)[..., ::-1]
    elif kind == 2:
        x = rng.choice([most.min, -1, 0, 1, rows, rows + 1, most.max], shape)
    elif kind == 3:
        x = np.sort(np.clip(x, 0, rows))
    elif kind == 4:
        x = np.full(shape, rng.choice([most.min, -1, 0, rows - 1, most.max]))
    return x.astype(dtype)


def check_nonsense(
    family: str,
    arch: Arch,
    of: Sequences,
    times: int,
    options: dict[str, Any] | None = None,
    others: dict[str, np.ndarray] | None = None,
    backward: bool = True,
) -> None:
    """Whatever arrays of lengths hold, nothing outside of arrays is read or written, and all results are written."""
    options, others = options or {}, others or {}
    backward = backward and of.k != "paged"
    arrays = {name: others[name].shape for name in GRADIENTS if name in others} if backward else {}
    lengths = of.lengths()
    given = {name: np.nan_to_num(x) for name, x in (
        ("q", of.of_queries("q")), ("k", of.of_keys("k")), ("v", of.of_keys("v")), ("dout", of.of_queries("dout")),
        ("dlse", of.own_dlse()))} | others  # fmt: skip
    problem = state(given["q"], given["k"], given["v"], **options, **others, **lengths)
    shapes = {"out": given["dout"].shape, "lse": given["dlse"].shape}
    if backward:
        shapes |= {f"d{name}": given[name].shape for name in "qkv"} | {f"d{name}": x for name, x in arrays.items()}
    plans = plans_of(problem, arch, family, backward, arrays, {})
    ran = Ran(plans)
    for _ in range(times):
        bad = {}
        for name, x in lengths.items():
            rows = {"cu_seqlens_q": problem.rows_q, "cu_seqlens_k": problem.rows_k, "seqlens_k": problem.seq_k}
            bad[name] = nonsense(of.rng, x.shape, rows.get(name) or problem.pages, of.offsets)
        results = ran(problem, plans, given | bad, shapes)
        for name, x in results.items():
            assert not np.isnan(x).any(), f"{name} is not written, with {bad}"
