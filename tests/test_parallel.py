"""Attention over simulated ranks beside one device: every option, every gradient, any rows."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from reference import fresh_rng

from cupyflash import attention, attention_backward, parallel
from cupyflash import block_mask as whole_mask
from cupyflash.parallel import Rows
from cupyflash.parallel.explain import Machine

B, D, DV = 2, 8, 12


def _table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, i // 8, j // 8] * (b + 1)


def _documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 40 == j // 40) & ((i + j + h) % 5 > 0)


WHAT = {
    "nothing": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (30, 12)},
    "causal window": {"causal": True, "window": (25, None)},
    "scale": {"scale": -0.4},
    "softcap": {"softcap": 2.0},
    "key_mask": {"key_mask": True},
    "mask": {"mask": True},
    "bias": {"bias": "full"},
    "bias of heads": {"bias": "heads"},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "score": {"score": _table},
    "block_mask": {"block_mask": True},
    "dropout": {"dropout": 0.3, "seed": 5},
    "dlse": {"dlse": True},
}
WRT = ("bias", "alibi_slopes", "sinks")


class Problem:
    """The whole, and the part of each rank."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: Rows,
        key_rows: Rows,
        what: dict[str, Any],
        heads: tuple[int, int] = (8, 4),
    ) -> None:
        self.rows, self.keys, self.what = rows, key_rows, dict(what)
        (hq, hk), sq, sk = heads, rows.length, key_rows.length
        self.q, self.k = rng.standard_normal((B, sq, hq, D)), rng.standard_normal((B, sk, hk, D))
        self.v, self.dout = rng.standard_normal((B, sk, hk, DV)), rng.standard_normal((B, sq, hq, DV))
        self.dlse = rng.standard_normal((B, hq, sq)) if self.what.pop("dlse", False) else None
        made = {
            "key_mask": lambda: rng.random((B, sk)) < 0.7, "mask": lambda: rng.random((B, 1, sq, sk)) < 0.7,
            "alibi_slopes": lambda: rng.random(hq), "sinks": lambda: rng.standard_normal(hq),
        }  # fmt: skip
        for name in made.keys() & self.what.keys():
            self.what[name] = made[name]()
        if "bias" in self.what:
            shape = (1, hq, sq, sk) if self.what["bias"] == "full" else (hq, 1, sk)
            self.what["bias"] = rng.standard_normal(shape)
        if "score" in self.what:
            self.what["score_arrays"] = {"t": rng.standard_normal((hq, -(-sq // 8) or 1, -(-sk // 8) or 1))}
        self.blocks = self.what.pop("block_mask", False)
        self.wrt = tuple(x for x in WRT if x in self.what) + ("t",) * ("score" in self.what)

    def one(self, deterministic: bool = False) -> tuple[Any, ...]:
        options = dict(self.what)
        if self.blocks:
            shape = (1, self.q.shape[2], self.rows.length, self.keys.length)
            options["block_mask"] = whole_mask(_documents, shape=shape, block=16)
        out, lse = attention(self.q, self.k, self.v, return_lse=True, **options)
        more = {"dlse": self.dlse, "wrt": self.wrt, "deterministic": deterministic}
        return out, lse, attention_backward(self.dout, self.q, self.k, self.v, out, lse, **more, **options)

    def on(self, ranks: Any, plan: dict[str, Any], reduce: bool = True, deterministic: bool = False) -> list[Any]:
        """out, lse and gradients of each rank. ranks: of `simulated`, each with its group or two."""

        def work(group: Any) -> Any:
            mine = plan.get("split", lambda x: x)(group)
            r = group.rank
            own = [x.take(y, r) for x, y in ((self.rows, self.q), (self.keys, self.k), (self.keys, self.v))]
            how = {"rows": self.rows, "key_rows": self.keys} | {x: y for x, y in plan.items() if x != "split"}
            options = dict(self.what)
            for name in ("bias", "mask"):
                if name in options and options[name].shape[-2] > 1:
                    options[name] = self.rows.take(options[name], r, axis=-2)
            if self.blocks:
                heads = self.q.shape[2]
                options["block_mask"] = parallel.block_mask(
                    _documents, self.rows, group, key_rows=self.keys, heads=heads, block=16
                )
            out, lse = parallel.attention(*own, mine, return_lse=True, **how, **options)
            dlse = None if self.dlse is None else self.rows.take(self.dlse, r, axis=2)
            more = {"dlse": dlse, "wrt": self.wrt, "reduce": reduce, "deterministic": deterministic}
            arrays = (self.rows.take(self.dout, r), *own, out, lse)
            return out, lse, parallel.attention_backward(*arrays, mine, **how, **more, **options)

        return ranks.run(work)

    def joined(self, found: list[Any]) -> dict[str, Any]:
        """The whole of what ranks have; of what all share, that of the first."""
        grads = [x[2] for x in found]
        whole = {
            "out": self.rows.join([x[0] for x in found]), "lse": self.rows.join([x[1] for x in found], axis=2),
            "dq": self.rows.join([x.dq for x in grads]), "dk": self.keys.join([x.dk for x in grads]),
            "dv": self.keys.join([x.dv for x in grads]),
        }  # fmt: skip
        for name in grads[0].of_arrays:
            parts = [x.of_arrays[name] for x in grads]
            own = name == "bias" and self.what["bias"].shape[-2] > 1
            whole[name] = self.rows.join(parts, axis=-2) if own else parts[-1]
        return whole


def assert_equal(problem: Problem, found: list[Any], expected: tuple[Any, ...], atol: float = 1e-12) -> None:
    out, lse, grads = expected
    want = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv, **grads.of_arrays}
    whole = problem.joined(found)
    assert whole.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(
            whole[name], x, atol=atol * max(1, np.abs(x[np.isfinite(x)]).max(initial=0)), err_msg=name
        )


PLANS = {
    "keys": {"exchange": "keys"},
    "groups": {"exchange": "keys", "groups": 4},
    "stretches": {"exchange": "keys", "stretches": 2},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", WHAT)
def test_every_option_alone(name: str, plan: str) -> None:
    rng = fresh_rng()
    for size in rng.choice([2, 3, 4, 8], 2, replace=False).tolist():
        rows = Rows.zigzag(272, size, multiple=16) if size % 2 else Rows.contiguous(272, size, multiple=16)
        problem = Problem(rng, rows, rows, WHAT[name])
        assert_equal(problem, problem.on(parallel.simulated(size, delay=1e-4), PLANS[plan]), problem.one())


@pytest.mark.parametrize("name", [x for x in WHAT if x not in ("mask", "bias", "block_mask")])
def test_heads_have_the_bits_of_one_device(name: str) -> None:
    rng = fresh_rng()
    for size in (2, 4):
        rows = Rows.zigzag(144, size, multiple=16)
        problem = Problem(rng, rows, rows, WHAT[name])
        plan = {"exchange": "heads", "groups": 4 // size}
        found, (out, lse, grads) = problem.on(parallel.simulated(size, delay=1e-4), plan), problem.one()
        whole = problem.joined(found)
        for x, y in [("out", out), ("lse", lse), ("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)]:
            np.testing.assert_array_equal(whole[x], y, err_msg=x)
        assert_equal(problem, found, (out, lse, grads))


def two(heads: int):
    """Of a rank of all: (heads, keys)."""

    def split(group: Any) -> tuple[Any, Any]:
        team, across = divmod(group.rank, heads)
        return (
            group.part([team * heads + n for n in range(heads)]),
            group.part([across + n * heads for n in range(group.size // heads)]),
        )

    return split


@pytest.mark.parametrize("name", [x for x in WHAT if x not in ("mask", "bias", "block_mask")])
def test_both_exchanges(name: str) -> None:
    rng = fresh_rng()
    for size, heads in ((4, 2), (8, 4), (6, 2)):
        rows = Rows.zigzag(208, size, multiple=16)
        problem = Problem(rng, rows, rows, WHAT[name])
        assert_equal(problem, problem.on(parallel.simulated(size), {"split": two(heads)}), problem.one())


def test_random_combinations() -> None:
    rng = fresh_rng()
    for _ in range(40):
        size = int(rng.choice([2, 3, 4, 8]))
        what: dict[str, Any] = {}
        for name in rng.permutation(list(WHAT))[:5]:
            what |= WHAT[name]
        if "score" in what:
            what.pop("softcap", None)
        sq = int(rng.choice([0, 16, 90, 200]))
        sk = sq if rng.random() < 0.6 or "dropout" in what or "score" in what else int(rng.choice([0, 50, 130]))
        kind = rng.choice(["contiguous", "zigzag", "balanced"])
        make = lambda n: (
            Rows.balanced(n, size, np.arange(n) + 1.0, chunks=2, multiple=16)  # noqa: B023
            if kind == "balanced"  # noqa: B023
            else getattr(Rows, kind)(n, size, multiple=16)  # noqa: B023
        )
        problem = Problem(rng, make(sq), make(sk), what, heads=((8, 8), (6, 2), (4, 1))[rng.integers(3)])
        plan = list(PLANS.values())[rng.integers(3)]
        if plan.get("groups", 1) > problem.k.shape[2]:
            plan = {"exchange": "keys", "groups": problem.k.shape[2]}
        assert_equal(problem, problem.on(parallel.simulated(size), plan), problem.one())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("plan", [*PLANS, "heads"])
def test_errors_of_16_bits_are_those_of_one_call(dtype: Any, plan: str) -> None:
    """Parts that were rounded to 16 bits would be at 1.1 to 1.7 times."""
    rng, size = fresh_rng(), 4
    rows = Rows.zigzag(512, size)
    problem = Problem(rng, rows, rows, {"causal": True, "sinks": True})
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, getattr(problem, name).astype(dtype))
    problem.what["sinks"] = problem.what["sinks"].astype(np.float32)
    found = problem.joined(problem.on(parallel.simulated(size), PLANS.get(plan, {"exchange": "heads"})))
    own = problem.one()
    own_out = own[0]
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, getattr(problem, name).astype(np.float64))
    problem.what["sinks"] = problem.what["sinks"].astype(np.float64)
    out, _, grads = problem.one()
    pairs = {"out": (out, own_out), **{x: (getattr(grads, x), getattr(own[2], x)) for x in ("dq", "dk", "dv")}}
    for name, (exact, one) in pairs.items():
        error, of_one = (np.sqrt(np.mean((x.astype(np.float64) - exact) ** 2)) for x in (found[name], one))
        assert found[name].dtype == dtype and error <= 1.05 * of_one, (name, error / of_one)


def test_the_same_bits_in_every_run_in_whichever_order_messages_come() -> None:
    rng, size = fresh_rng(), 4
    rows = Rows.zigzag(256, size, multiple=16)
    problem = Problem(rng, rows, rows, WHAT["causal"], heads=(4, 2))
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, getattr(problem, name).astype(np.float32))
    how = {"exchange": "keys", "groups": 2}
    first = problem.joined(problem.on(parallel.simulated(size, seed=0), how, deterministic=True))
    for seed in range(1, 6):
        ranks = parallel.simulated(size, seed=seed, delay=1e-3)
        again = problem.joined(problem.on(ranks, how, deterministic=True))
        for name, x in first.items():
            np.testing.assert_array_equal(again[name], x, err_msg=name)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_ranks_and_layouts(rank: int, layout: str) -> None:
    rng, size = fresh_rng(), 3
    rows = Rows.contiguous(60, size, multiple=4)
    axis = 0 if rank == 2 else (1 if layout == "bshd" else 2) - (rank == 3)
    shape = [(2, 60, 4, 8), (60, 4, 8), (60, 8)][4 - rank]
    if layout == "bhsd" and rank > 2:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    q, k, v, dout = rng.standard_normal((4, *shape))
    out, lse = attention(q, k, v, causal=True, return_lse=True, layout=layout)
    grads = attention_backward(dout, q, k, v, out, lse, causal=True, layout=layout)

    def work(group: Any) -> Any:
        dy, *own = (rows.take(x, group.rank, axis) for x in (dout, q, k, v))
        how = {"rows": rows, "causal": True, "layout": layout}
        found = parallel.attention(*own, group, return_lse=True, **how)
        return *found, *parallel.attention_backward(dy, *own, *found, group, **how)

    found = parallel.simulated(size).run(work)
    for n, x in enumerate((out, lse, *grads)):
        whole = rows.join([y[n] for y in found], -1 if n == 1 else axis)
        np.testing.assert_allclose(whole, x, atol=1e-12)


def test_shares_of_gradients_sum_to_them() -> None:
    rng, size = fresh_rng(), 3
    rows = Rows.zigzag(96, size, multiple=16)
    problem = Problem(rng, rows, rows, {**WHAT["alibi"], **WHAT["sinks"], **WHAT["score"], **WHAT["bias of heads"]})
    found, (_, _, grads) = problem.on(parallel.simulated(size), {"exchange": "keys"}, reduce=False), problem.one()
    for name, x in grads.of_arrays.items():
        np.testing.assert_allclose(sum(y[2].of_arrays[name] for y in found), x, atol=1e-11)
    assert found[0][2].dscore_arrays["t"].shape == grads.dscore_arrays["t"].shape


def test_a_mask_says_where_the_work_is() -> None:
    size, length = 4, 640
    plain = Rows.contiguous(length, size)

    def work(group: Any) -> Any:
        return parallel.block_mask(lambda b, h, i, j: (i // 100 == j // 100) & (j <= i), plain, group, block=16)

    masks = parallel.simulated(size).run(work)
    sees = np.arange(length) % 100 + 1
    for mask in masks:
        sums = [x.sum() for x in np.split(mask.pairs_of_rows(), length // 16)]
        np.testing.assert_allclose(sums, [x.sum() for x in np.split(sees, length // 16)])
    rows = Rows.balanced(length, size, masks[0], chunks=2, multiple=16)
    assert rows == Rows.balanced(length, size, masks[3], chunks=2, multiple=16)


def test_merge() -> None:
    """Decoding over a cache that is shared out."""
    rng, size = fresh_rng(), 4
    q, (k, v) = rng.standard_normal((2, 1, 4, 8)), rng.standard_normal((2, 2, 90, 2, 8))
    out, lse = attention(q, k, v, return_lse=True)

    def work(group: Any) -> Any:
        own = slice(group.rank * 25, min(90, group.rank * 25 + 25))
        return parallel.merge(*attention(q, k[:, own], v[:, own], return_lse=True), group)

    for found in parallel.simulated(size).run(work):
        np.testing.assert_allclose(found[0], out, atol=1e-13)
        np.testing.assert_allclose(found[1], lse, atol=1e-13)


def test_explain() -> None:
    rows = Rows.zigzag(65536, 8)
    text = str(parallel.explain((1, 65536, 32, 128), rows=rows, heads_k=8, causal=True, exchange="keys"))
    assert "65,536 rows over 8 ranks, exchange of keys, 2 groups of key heads, 1 stretches" in text
    assert "rank 0: rows 0 to 4,096, 61,440 to 65,536; 268,439,552 pairs a head in 4 calls; keys of ranks 1, 2" in text
    assert "rank 7: rows 28,672 to 36,864; 268,439,552 pairs a head in 2 calls" in text  # chunks that touch
    far = Machine(host=2)  # GPUs
    found = parallel.explain((1, 32768, 32, 128), rows=Rows.contiguous(32768, 4), heads_k=8, causal=True, machine=far)
    assert found.exchange == "keys forward and of heads backward" and len({x.pairs for x in found.ranks}) == 4
    found = parallel.explain((1, 1 << 17, 32, 128), rows=Rows.contiguous(1 << 17, 16), heads_k=32, causal=True)
    assert found.exchange == "heads" and len({x.pairs for x in found.ranks}) == 1
    near = parallel.explain(
        (1, 65536, 32, 128), rows=Rows.contiguous(65536, 8), heads_k=8, window=(4095, 0), exchange="keys"
    )
    assert near.ranks[0].sent < near.ranks[3].sent < 1e9 and near.ranks[3].calls == near.ranks[0].calls
    with pytest.raises(ValueError, match="heads_k is 6, which cannot be dealt out to 8 ranks"):
        parallel.explain((1, 65536, 6, 128), rows=rows, heads_k=6, exchange="heads")


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": -1}, {"groups": 9}, {"groups": 1.5}, {"groups": 2, "exchange": "heads"}, {"stretches": 0},
        {"dtype": "int8"}, {"dtype": "float13"}, {"window": 3}, {"window": (-1, 0)}, {"causal": "left"},
        {"heads_k": 0}, {"heads_k": 2.0}, {"rows": None}, {"key_rows": Rows.contiguous(64, 2)},
        {"shape": (64, 12, 8)}, {"shape": (-1, 64, 12, 8)}, {"shape": (1, 64, 12, 8.0)},
    ],
    ids=str,
)  # fmt: skip
def test_explain_is_told_what_a_call_is(wrong: dict[str, Any]) -> None:
    given = {"shape": (1, 64, 12, 8), "rows": Rows.contiguous(64, 4, multiple=16), "heads_k": 4, "stretches": None}
    parallel.explain(**given)
    name = "window" if "window" in wrong else next(iter(wrong))
    with pytest.raises((TypeError, ValueError), match=rf"^{name}.* is .*; (it|these) must be"):
        parallel.explain(**given | wrong)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_explain_counts_what_is_sent(exchange: str, dtype: str) -> None:
    """Of ranks with more rows and fewer, forward and backward."""
    rng, rows, sent = fresh_rng(), Rows.contiguous(110, 3, multiple=16), [0, 0, 0]
    q, (k, v) = rng.standard_normal((2, 110, 9, 8)), rng.standard_normal((2, 2, 110, 3, 8))
    q, k, v = (x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for x in (q, k, v))

    def work(group: Any) -> None:
        of_group = group.exchange

        def counted(sends: Any, receives: Any) -> Any:
            sent[group.rank] += sum(x.nbytes for to, x in sends if to != group.rank)
            return of_group(sends, receives)

        group.exchange = counted
        own = [rows.take(x, group.rank) for x in (q, k, v)]
        out, lse = parallel.attention(*own, group, rows=rows, causal=True, exchange=exchange, return_lse=True)
        parallel.attention_backward(own[0], *own, out, lse, group, rows=rows, causal=True, exchange=exchange)

    parallel.simulated(3).run(work)
    found = parallel.explain(q.shape, rows=rows, heads_k=3, causal=True, exchange=exchange, dtype=dtype)
    assert [x.sent for x in found.ranks] == sent and min(sent) > 0


@pytest.mark.parametrize("shape", [(), (2, 1)], ids=str)
def test_a_bias_of_all_heads_has_its_gradient_rounded_once(shape: tuple[int, ...]) -> None:
    """Though each group of heads has a part of it."""
    rng, rows = fresh_rng(), Rows.contiguous(64, 2, multiple=16)
    q, k, v = (x.astype(np.float16) for x in rng.standard_normal((3, 2, 64, 8, 16)))
    bias = rng.standard_normal((*shape, 64, 64)).astype(np.float16)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    wanted = attention_backward(q, q, k, v, out, lse, bias=bias.astype("f4"), wrt=["bias"]).of_arrays["bias"]

    def work(group: Any) -> Any:
        (own, of_k, of_v, of_out), of_bias = (
            (rows.take(x, group.rank) for x in (q, k, v, out)),
            rows.take(bias, group.rank, -2),
        )
        given: dict[str, Any] = {"rows": rows, "exchange": "keys", "groups": 4, "bias": of_bias, "wrt": ["bias"]}
        of_lse = rows.take(lse, group.rank, 2)
        return parallel.attention_backward(own, own, of_k, of_v, of_out, of_lse, group, **given).of_arrays["bias"]

    found = rows.join(parallel.simulated(2).run(work), -2)
    assert found.dtype == np.float16
    ulp = np.spacing(np.abs(wanted).astype(np.float16)).astype("f4")
    assert (np.abs(found.astype("f4") - wanted) <= 0.51 * ulp + 1e-5).all()


def test_groups_that_heads_cannot_have_are_of_keys() -> None:
    """The exchange would be of heads, of which each rank gets one."""
    rng, rows = fresh_rng(), Rows.contiguous(64, 4, multiple=16)
    q, (k, v) = rng.standard_normal((1, 64, 12, 8)), rng.standard_normal((2, 1, 64, 4, 8))
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True)
    dq = attention_backward(q, q, k, v, out, lse)[0]
    assert parallel.explain(q.shape, rows=rows, heads_k=4, groups=1).exchange == "heads"
    assert parallel.explain(q.shape, rows=rows, heads_k=4, groups=2).exchange == "keys"

    def work(group: Any) -> Any:
        own, of_k, of_v = (rows.take(x, group.rank) for x in (q, k, v))
        given: dict[str, Any] = {"rows": rows, "groups": 2}
        found, own_lse = parallel.attention(own, of_k, of_v, group, return_lse=True, **given)
        return parallel.attention_backward(own, own, of_k, of_v, found, own_lse, group, **given)[0]

    found = rows.join(parallel.simulated(4).run(work))
    np.testing.assert_allclose(found.astype(float), dq.astype(float), atol=0.02, rtol=0.02)
    with pytest.raises(ValueError, match="^groups is 5; it must be None or an integer from 1 to 4$"):
        parallel.simulated(4).run(
            lambda group: parallel.attention(*(rows.take(x, group.rank) for x in (q, k, v)), group, rows=rows, groups=5)
        )


def test_a_part_of_a_block_mask() -> None:
    rng = fresh_rng()
    seen = rng.random((2, 3, 70, 90)) < rng.choice([0, 0.5, 1], (2, 3, 1, 1))
    seen[..., 16:32, 16:48] = True
    mask = whole_mask(seen, block=16)
    for rows, keys, heads in (((16, 48), (0, 90), None), ((0, 70), (32, 64), (1, 3)), ((64, 70), (80, 90), (0, 1)),
        ((16, 16), (16, 32), None)):  # fmt: skip
        part = mask.part(rows, keys, heads)
        own = seen[:, slice(*(heads or (0, 3))), slice(*rows), slice(*keys)]
        assert part.shape == own.shape and part.share() == pytest.approx(own.mean() if own.size else 0)
        q, k = (
            rng.standard_normal((2, own.shape[2], own.shape[1], 8)),
            rng.standard_normal((2, own.shape[3], own.shape[1], 8)),
        )
        np.testing.assert_allclose(attention(q, k, k, block_mask=part), attention(q, k, k, mask=own), atol=1e-13)
        columns = np.flatnonzero(own.any((0, 1, 2)))
        lo, hi = part.hull()
        assert not len(columns) or (
            lo == columns[0] // 16 * 16 and hi == min(own.shape[3], columns[-1] // 16 * 16 + 16)
        )
    for rows, keys in (((8, 32), (0, 90)), ((0, 32), (0, 40)), ((0, 80), (0, 90))):
        with pytest.raises(ValueError, match="in blocks of 16 it must begin and end at multiples of that, or end at"):
            mask.part(rows, keys)


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (1, 0, 2)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_a_rank_with_one_row(name: str, counts: tuple[int, ...]) -> None:
    ends = np.cumsum([0, *counts]).tolist()
    rows = Rows(ends[-1], tuple(((a, b),) for a, b in itertools.pairwise(ends)))
    heads = len(counts)
    rng = fresh_rng()
    q, k, v = (rng.standard_normal((1, rows.length, heads, D)) for _ in range(3))
    x = rng.standard_normal((1, heads, rows.length, rows.length))
    x = x > 0 if name == "mask" else x

    def work(group: Any) -> Any:
        own = [rows.take(y, group.rank) for y in (q, k, v)]
        return parallel.attention(*own, group, rows=rows, **{name: rows.take(x, group.rank, 2)})

    found = rows.join(parallel.simulated(len(counts)).run(work))
    np.testing.assert_allclose(found, attention(q, k, v, **{name: x}), atol=1e-12)


@pytest.mark.parametrize("what", [{"exchange": "heads"}, {"reduce": True, "wrt": "bias"}])
def test_whose_one_row_is(what: dict[str, Any]) -> None:
    rows = Rows(2, (((0, 1),), ((1, 2),)))
    x, bias = np.ones((1, 1, 2, D)), np.ones((1, 2, 1, 2))

    def work(group: Any) -> Any:
        out, lse = parallel.attention(x, x, x, group, rows=rows, bias=bias, return_lse=True, exchange="keys")
        parallel.attention_backward(x, x, x, x, out, lse, group, rows=rows, bias=bias, **what)

    with pytest.raises(ValueError, match=r"bias has shape \(1, 2, 1, 2\), and no rank has more than one row"):
        parallel.simulated(2).run(work)
