"""Lengths in memory, in the Hopper backward without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import cases, needs_compiler
from kernel_cover import problem as any_problem
from lengths_on_cpu import Ran, Sequences, check, check_nonsense, plans_of
from on_cpu import Guarded
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward_cost, sm90_backward_tiles, sm90_forward
from cupyflash.gpu.families.sm90_forward_tiles import pack_of
from cupyflash.gpu.plan import plan
from cupyflash.passes import BACKWARD
from cupyflash.problem import Given

pytestmark = needs_compiler

# Two blocks, or two clusters, take tile after tile, and find places that are empty.
GPU, WIDE = (Arch("sm_90a", 90, sms, 232448) for sms in (2, 4))
QUERIES, KEYS = [70, 0, 1, 130], [80, 3, 0, 140]
N, HEADS, ROWS = 4, 4, 201 + 5  # with those behind
USUAL = (2, 128, 2, 1)  # of the forward
# Of the backward, by columns: queries, keys, warpgroups that compute, stages of Q and of dO, and spills.
TILES = {
    64: (128, 128, 2, 2, 2, 184),
    128: (64, 128, 2, 2, 2, 352),
    160: (48, 128, 2, 2, 2, 184),
    192: (64, 96, 3, 2, 1, 224),
    256: (64, 64, 2, 2, 1, 200),
}


@pytest.fixture(autouse=True)
def all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key tiles, of few sequences too, where they do not add in turn."""
    for name in ("LISTED_TILES", "PLACE_VALUES"):
        monkeypatch.setattr(sm90_backward_cost, name, 0)


Case = Callable[[np.random.Generator], tuple[Sequences, dict[str, Any], dict[str, np.ndarray]]]


def packed(r: np.random.Generator, queries: list[int] = QUERIES, keys: list[int] = KEYS, **how: Any) -> Sequences:
    return Sequences(r, queries, keys, **({"dtype": "float16", "dims": (64, 64), "heads": (4, 2)} | how))


def normal(r: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return r.standard_normal(shape).astype(dtype)


def drawn(r: np.random.Generator, *shape: int) -> np.ndarray:
    return r.random(shape) < 0.75


EDGES = [127, 0, 128, 1, 129], [127, 5, 129, 0, 128]  # a tile of 64 columns has 128 of each
EDGES_128 = [63, 0, 64, 1, 65], [127, 5, 129, 0, 128]
IN_ORDER = {"causal": True, "deterministic": True}

CASES: dict[str, Case] = {
    "64": lambda r: (packed(r, *EDGES, heads=(2, 1)), {}, {}),
    "64 in order": lambda r: (packed(r, [300, 0, 70], [333, 3, 80], heads=(2, 2)), {"deterministic": True}, {}),
    "64 causal": lambda r: (packed(r, *EDGES, heads=(2, 2), offsets="int64"), IN_ORDER, {}),
    "128": lambda r: (packed(r, *EDGES_128, heads=(2, 1), dims=(128, 104)), {}, {}),
    "128 causal": lambda r: (packed(r, *EDGES_128, heads=(2, 2), dims=(128, 128)), IN_ORDER, {}),
    "128 in order": lambda r: (
        packed(r, [200, 0, 70], [300, 3, 80], heads=(2, 1), dims=(128, 128)), {"deterministic": True}, {},
    ),
    "more queries than keys": lambda r: (packed(r, [140, 200], [20, 130], heads=(2, 1)), {"causal": True}, {}),
    "more queries than keys, sinks": lambda r: (
        packed(r, [140, 200], [20, 130], heads=(2, 1), dims=(128, 128)), {"causal": True}, {"sinks": normal(r, 2)},
    ),
    "a long one before short ones": lambda r: (packed(r, [500, 60, 30], [3, 60, 40], heads=(1, 1)), {}, {}),
    "one key tile of all keys, many queries": lambda r: (
        packed(r, [300, 1, 63, 0, 65], [40, 129, 127, 7, 128], heads=(4, 2), dims=(96, 88)),
        {"causal": True, "deterministic": True, "window": (70, None)}, {},
    ),
    "one key tile of all keys, few queries": lambda r: (
        packed(r, [3, 1, 70, 129, 9], [200, 1, 127, 129, 128], heads=(3, 1)), {"deterministic": True}, {},
    ),
    "one key tile of all keys, few columns of a block": lambda r: (
        packed(r, [129, 64, 1], [60, 128, 140], heads=(2, 1), dims=(56, 40)), {"window": (20, 9)}, {},
    ),
    "one key tile of all keys, rows as no map can tell": lambda r: (
        packed(r, [70, 1, 64], [64, 2, 130], heads=(2, 1), dims=(60, 44)), IN_ORDER, {},
    ),
    "160": lambda r: (packed(r, *EDGES_128, heads=(2, 1), dims=(160, 136)), {"causal": True}, {}),
    "160 in order": lambda r: (packed(r, [47, 0, 130], [129, 3, 128], heads=(2, 1), dims=(150, 160)), IN_ORDER, {}),
    "160, a window": lambda r: (packed(r, dims=(160, 160)), {"window": (20, 9), "causal": "top_left"}, {}),
    "192": lambda r: (packed(r, [63, 0, 130], [95, 3, 97], heads=(2, 1), dims=(192, 128)), IN_ORDER, {}),
    "256": lambda r: (packed(r, *EDGES_128, heads=(2, 1), dims=(256, 200)), {"causal": True}, {}),
    "256 in order": lambda r: (packed(r, [65, 1, 130], [300, 60, 64], heads=(1, 1), dims=(256, 256)), IN_ORDER, {}),
    "more heads than sums of dQ": lambda r: (packed(r, [70, 0, 140], [80, 3, 140], heads=(9, 9)), {"causal": True}, {}),
    "a window": lambda r: (packed(r), {"window": (20, 9)}, {}),
    "a window, 128": lambda r: (packed(r, dims=(128, 128)), {"window": (20, 9), "causal": "top_left"}, {}),
    "queries for each on caches": lambda r: (
        packed(r, [70] * 4, [80, 3, 0, 140], q="dense", k="cache"), {"causal": True}, {},
    ),
    "queries for each on caches, 256": lambda r: (
        packed(r, [70] * 4, [80, 3, 0, 140], q="dense", k="cache", dims=(256, 256), heads=(1, 1)), {}, {},
    ),
    "queries for each on short caches": lambda r: (
        packed(r, [70] * 8, [80, 3, 0, 100, 0, 1, 0, 0], q="dense", k="cache", heads=(2, 2)), {}, {},
    ),
    "slopes, sinks, key mask": lambda r: (
        packed(r, keys=[80, 3, 5, 140]), {"causal": True},
        {"alibi_slopes": abs(normal(r, N, HEADS)), "sinks": normal(r, HEADS), "key_mask": drawn(r, N, 160)},
    ),
    "bias and mask": lambda r: (
        packed(r, dims=(128, 128)), {"causal": True},
        {"bias": normal(r, N, HEADS, 136, 144, dtype=np.float16), "mask": drawn(r, 1, HEADS, 136, 144)},
    ),
    "bias and mask by line": lambda r: (
        packed(r, dims=(128, 128), lines=("bias", "mask")), {"causal": True},
        {"bias": normal(r, HEADS, ROWS, 144, dtype=np.float16), "mask": drawn(r, 1, ROWS, 144)},
    ),
    "soft cap": lambda r: (packed(r), {"softcap": 5.0, "causal": True}, {}),
    "dropout": lambda r: (packed(r), {"dropout": 0.3, "causal": True}, {"seed": np.array(5)}),
    "score function": lambda r: (
        packed(r), {"score": "s * (1 + 0.1 * b) + 0.01 * (i - j) * h", "causal": True}, {},
    ),
}  # fmt: skip


@cases(CASES, "64 causal", "128", "one key tile of all keys, many queries")
def test_each_as_by_itself(case: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    # Alone, few queries of many heads would be in one warp, whose rows vote: here a warp has rows of one head.
    monkeypatch.setattr(sm90_forward, "pack_of", lambda problem, t: min(t.rows // 16, pack_of(problem, t)))
    of, options, others = CASES[case](rng)
    seed = 5 if "seed" in others else None
    dim = next(n for n in TILES if max(of.dims) <= n)
    narrow = (2, 64, 2, 1) if "bias" in others else USUAL
    forward = None if dim > 192 else (2, 96, 2, 1) if dim > 128 else narrow  # (bits are those of the tile)
    tiles = {"forward": forward, "backward": TILES[dim]}
    check("sm90", WIDE if dim == 256 else GPU, of, options, others, tiles=tiles, seed=seed)


@pytest.mark.parametrize(
    ("number", "value", "listed"),
    [("LISTED_CACHE", 0, True), pytest.param("PLACE_VALUES", 1 << 60, False, marks=pytest.mark.slow)],
)
def test_key_tiles_come_by_places(
    number: str, value: int, listed: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of places: of a list, and where there is none."""
    monkeypatch.setattr(sm90_backward_cost, number, value)
    of = packed(rng, [140, 0, 200], [20, 3, 140], heads=(2, 1))
    problem = state(of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), causal=True, **of.lengths())
    constants = dict(plan(problem, GPU, BACKWARD, "sm90").constants)
    assert (constants["ORDERED"], constants["BY_VISITS"]) == (listed, False)
    check("sm90", GPU, of, {"causal": True}, tiles={"forward": USUAL, "backward": TILES[64]})


def test_short_ones(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences of up to 64 rows, as the planner takes them to be, and one that is longer, and alone would have no
    such tile."""
    every = (*sm90_backward_tiles.BACKWARD_TILES, *sm90_backward_tiles.SHORT_BACKWARD)
    monkeypatch.setattr(sm90_backward_tiles, "BACKWARD_TILES", every)
    of = packed(rng, [60, 1, 64, 0, 9, 100], [64, 2, 63, 3, 7, 130], heads=(2, 1))
    problem = state(of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), **of.lengths())
    assert dict(plan(problem, GPU, BACKWARD, "sm90").constants)["WARPGROUPS"] == 1
    check("sm90", GPU, of, {"deterministic": True}, tiles={"forward": USUAL, "backward": (64, 64, 1, 2, 2, 0)})


@pytest.mark.parametrize("deterministic", [False, True])
def test_dq_is_summed_of_sequences_with_several_key_tiles_alone(deterministic: bool, rng: np.random.Generator) -> None:
    """Of others nobody writes to the places of sums, not even zeros."""
    queries = [70, 140, 200, 9, 0]
    of = packed(rng, queries, [80, 128, 300, 3, 4], heads=(6, 6), behind=0)
    given = {name: of.of_queries(name) for name in ("q", "dout")} | {name: of.of_keys(name) for name in "kv"}
    given |= {"dlse": of.own_dlse()} | of.lengths()
    arrays, options = (given[x] for x in "qkv"), {"causal": True, "deterministic": deterministic}
    problem = state(*arrays, **options, **of.lengths())
    plans = plans_of(problem, GPU, "sm90", True, {}, {"forward": USUAL, "backward": TILES[64]})
    scalars = dict(plans[1].scalars)
    assert dict(plans[1].constants)["WHOLE_BY_LENGTH"] and scalars["resident"] < 6, "places are used again"
    shapes = {"out": given["dout"].shape, "lse": given["dlse"].shape} | {f"d{x}": given[x].shape for x in "qkv"}
    spaces: dict[str, Guarded] = {}
    Ran(plans)(problem, plans, given, shapes, left=spaces)
    sums = spaces["dq_sum"].array.reshape(scalars["resident"], -1, 128 * 64)
    places = [sum(queries[:2]) // 128 + 2 + n for n in range(2)]  # of its query tiles
    for place in range(sums.shape[1]):
        assert np.isnan(sums[:, place]).all() == (place not in places), place


@pytest.mark.parametrize(
    ("keys", "fields", "some"),
    [
        (40, {}, True),
        (128, {}, True),
        (129, {}, False),  # to ask costs more than it saves
        (40, {"dim": 256}, False),  # consumers share out the columns, and hold no rows
        (40, {"out_dtype": "float32"}, False),
        (40, {"block_mask": ("batch",)}, False),
        (40, {"max_seqlen_q": 8192, "max_seqlen_k": 8192}, True),
    ],
)
def test_where_key_tiles_may_have_all_keys(keys: int, fields: dict[str, Any], some: bool) -> None:
    packed = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    rows = 64 * keys
    asked = any_problem("bfloat16", **{"dim": 64, "batch": 64, "seq_q": rows, "seq_k": rows, "rows_q": rows,
        "rows_k": rows, "given": packed} | fields)  # fmt: skip
    made = plan(asked, Arch.of("sm_90a"), BACKWARD)
    assert dict(made.constants).get("WHOLE_BY_LENGTH", False) == some


# And which rows hold anything: of q and dout, of k and v.
Bad = tuple[slice, slice]
POISONED: dict[str, tuple[Case, Bad]] = {
    "64": (lambda r: (packed(r, [70, 33, 130], [80, 50, 140]), IN_ORDER, {}), (slice(70, 103), slice(80, 130))),
    "128": (
        lambda r: (packed(r, [70, 33, 130], [80, 50, 140], dims=(128, 128), heads=(2, 1)), IN_ORDER, {}),
        (slice(70, 103), slice(80, 130)),
    ),
    "256": (
        lambda r: (packed(r, [70, 33, 80], [80, 50, 70], dims=(256, 256), heads=(1, 1)), IN_ORDER, {}),
        (slice(70, 103), slice(80, 130)),
    ),
    "queries without a key": (
        lambda r: (packed(r, [140, 100], [30, 130], heads=(2, 1)), IN_ORDER, {"sinks": normal(r, 2)}),
        (slice(110), slice(0)),
    ),
    "queries behind all keys": (
        lambda r: (
            packed(r, [100, 60], [30, 60], heads=(2, 1)), IN_ORDER | {"causal": "top_left", "window": (20, None)}, {},
        ),
        (slice(50, 100), slice(0)),
    ),
    "keys before a window": (
        lambda r: (packed(r, [3, 70], [100, 80], heads=(2, 1)), IN_ORDER | {"window": (11, None)}, {}),
        (slice(0), slice(86)),
    ),
}  # fmt: skip


@cases(POISONED, "64")
def test_no_bit_follows_from_rows_that_do_not_matter(case: str, rng: np.random.Generator) -> None:
    """Those of another sequence, and queries that see no key: they are NaN."""
    make, bad = POISONED[case]
    of, options, others = make(rng)
    given = {name: of.of_queries(name) for name in ("q", "dout")} | {name: of.of_keys(name) for name in "kv"}
    given |= {"dlse": of.own_dlse()} | others | of.lengths()
    problem = state(given["q"], given["k"], given["v"], **options, **others, **of.lengths())
    dim, arch = of.dims[0], WIDE if of.dims[0] == 256 else GPU
    tiles = {"forward": USUAL if dim < 256 else None, "backward": TILES[dim]}
    plans = plans_of(problem, arch, "sm90", True, {}, tiles)
    shapes = {"out": given["dout"].shape, "lse": given["dlse"].shape} | {f"d{x}": given[x].shape for x in "qkv"}
    ran, found = Ran(plans), []
    for factor in (1, np.nan):
        these = {name: x.copy() for name, x in given.items()}
        for name, rows in zip(("q", "dout", "k", "v"), (bad[0], bad[0], bad[1], bad[1])):
            these[name][rows] *= factor
        results = ran(problem, plans, these, shapes)
        found.append([np.delete(results[x], np.r_[bad[x != "dq"]], 0) for x in ("dq", "dk", "dv")])
    for x, y in zip(*found):
        assert not np.isnan(y).any() and np.array_equal(x, y)


SMALL: dict[str, Any] = {"dims": (32, 32), "heads": (2, 1)}
NONSENSE: dict[str, Case] = {
    "packed": lambda r: (
        packed(r, offsets="int64", **SMALL), {"causal": True, "window": (20, None)},
        {"key_mask": drawn(r, N, 140), "sinks": normal(r, 2)},
    ),
    "64": lambda r: (packed(r, heads=(2, 2)), {"causal": True}, {}),
    "in order": lambda r: (packed(r, **SMALL), {"deterministic": True}, {}),
    "256": lambda r: (packed(r, dims=(256, 256), heads=(1, 1)), {"causal": True}, {}),
    "caches": lambda r: (packed(r, [70] * 4, q="dense", k="cache", **SMALL), {"causal": "top_left"}, {}),
}  # fmt: skip


@cases(NONSENSE, "packed")
def test_nonsense_stays_inside(case: str, rng: np.random.Generator) -> None:
    of, options, others = NONSENSE[case](rng)
    check_nonsense("sm90", WIDE if case == "256" else GPU, of, 12, options, others)


def test_what_is_not_served_is_named(rng: np.random.Generator) -> None:
    hopper = Arch.of("sm_90a")
    for how, message in (
        ({"k": "cache"}, "sm90 has no backward of packed sequences on one side alone"),
        ({"queries": [90] * 4, "q": "dense"}, "sm90 has no backward of packed sequences on one side alone"),
    ):
        of = packed(rng, **how)
        problem = state(of.of_queries("q"), of.of_keys("k"), of.of_keys("v"), **of.lengths())
        with pytest.raises(ValueError, match=message):
            plan(problem, hopper, BACKWARD, "sm90")
        assert plan(problem, hopper, BACKWARD).family == "sm80"
    of = packed(rng)
    arrays = (of.of_queries("q"), of.of_keys("k"), of.of_keys("v"))
    assert plan(state(*arrays, **of.lengths()), hopper, BACKWARD).family == "sm90"
    problem = state(*arrays, **of.lengths(), batch_invariant=True)
    with pytest.raises(ValueError, match="sm90 takes no .*batch_invariant=True"):
        plan(problem, hopper, BACKWARD, "sm90")


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "hint", "dim", "listed", "by_visits"),
    [
        (8, 16384, 16, 2048, 128, True, True),
        (8, 16384, 16, None, 128, True, True),
        (8, 16384, 16, 2048, 256, True, False),  # Q, dO and dQ of what is under work leave the L2 cache
        (24, 60000, 16, 8192, 128, True, False),
        (64, 16384, 16, 256, 128, False, False),  # two key tiles each
        (65, 16384, 16, 8192, 128, True, True),
        (512, 26600, 16, 128, 128, True, True),
        (512, 20480, 16, 40, 128, True, True),  # one each
        (512, 26600, 2, 128, 128, False, False),  # nothing to do meanwhile
    ],
)
def test_where_key_tiles_are_listed(
    batch: int, rows: int, heads: int, hint: int | None, dim: int, listed: bool, by_visits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.undo()
    packed = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    asked = any_problem("bfloat16", dim, batch=batch, seq_q=rows, seq_k=rows, heads_q=heads, heads_k=heads, rows_q=rows,
        rows_k=rows, causal="bottom_right", right=0, given=packed, max_seqlen_q=hint, max_seqlen_k=hint)  # fmt: skip
    for deterministic in (False, True):
        made = plan(replace(asked, deterministic=deterministic), Arch.of("sm_90a"), BACKWARD, "sm90")
        constants = dict(made.constants)
        found = constants["ORDERED"], constants["BY_VISITS"]
        assert found == ((False, False) if deterministic else (listed, by_visits))
        assert bool(sum(x.nbytes for x in made.workspace if x.name == "order")) == found[0]


def test_heads_together() -> None:
    """Few, since each has all sequences; fewer where a hint says that none is long."""
    arch = Arch.of("sm_90a")
    x = {name: np.zeros((16384, 16, 128), np.float16) for name in "qkv"}
    ends = {f"cu_seqlens_{side}": np.arange(0, 16385, 256, dtype=np.int32) for side in "qk"}

    def scalars(**hint: int) -> dict[str, int]:
        return dict(plan(state(**x, causal=True, **ends, **hint), arch, BACKWARD, "sm90").scalars)

    assert [scalars()[name] for name in ("together", "resident", "shares")] == [2, 5, 1]
    hinted = scalars(max_seqlen_q=256, max_seqlen_k=256)
    assert (hinted["together"], hinted["resident"]) == (1, 3)
