"""The list of tiles of packed sequences, in the Hopper forward without a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_on_cpu import as_cpp, compile_all, needs_compiler
from kernel_cover import problem
from on_cpu import Guarded, run
from reference import state

from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_backward, sm90_backward_cost, sm90_forward, sm90_forward_cost
from cupyflash.gpu.kernel_plan import Launch
from cupyflash.gpu.source import generate
from cupyflash.problem import Given

pytestmark = needs_compiler

GPU = Arch("sm_90a", 90, 2, 232448)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("window", [None, (20, None)])
def test_tiles_are_listed_by_keys_and_by_places(
    last_first: bool, window: tuple[int, None] | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with most keys first, and of a class, which differ by an eighth, in the order of places, whoever comes
    first: where later tiles see more keys, from the last place on."""
    monkeypatch.setattr(sm90_forward_cost, "ordered", lambda *_: True)
    queries = [*rng.integers(0, 200, 30), 70000, *rng.integers(0, 3, 40), 5000]
    keys = [*rng.integers(0, 300, 30), 70100, *rng.integers(0, 9000, 40), 4000]
    offsets = {f"cu_seqlens_{x}": np.cumsum([0, *n]).astype("i4") for x, n in (("q", queries), ("k", keys))}
    given = {name: np.zeros((sum(n) + 3, 1, 8), "f2") for name, n in zip("qkv", (queries, keys, keys))} | offsets
    problem = state(**given, causal=True, window=window)
    made = sm90_forward.plan(problem, GPU, (2, 128, 2, 1))
    order = next(x for x in made.workspace if x.name == "order")
    [library] = compile_all(as_cpp(generate(made), ["attention_order"]))
    made = replace(made, launches=made.launches[:1], maps=())
    spaces = {"order": Guarded(order.shape, "uint32")}
    run(library, made, problem, {n: Guarded(x.shape, x.dtype, x) for n, x in given.items()} | spaces, last_first, 2)
    found = spaces["order"].array.view("i4").reshape(-1, 8)
    left, count, expected = problem.left, found[0, 0], []
    for n, (rows, has) in enumerate(zip([*queries, 3], [*keys, 0])):
        for tile in range(-(-rows // 128)):
            first, last = (x + has - rows for x in (tile * 128, min(rows, tile * 128 + 128) - 1))
            seen = max(0, min(has, last + 1) - (0 if left is None else max(0, first - left)))
            expected.append((max(0, np.float32(seen).view("i4") // 2**20 - 127 * 8), n, tile))
    assert count == len(expected)
    listed = [(n, tile) for _, n, tile in sorted(expected, key=lambda x: (x[0], x[1], x[2]), reverse=True)]
    assert [tuple(x[:2]) for x in found[1 : count + 1]] == listed


LISTED = """
extern "C" __global__ void attention_listed(const Params p) { list_tiles(p); }
"""


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("dim", [64, 256])
def test_key_tiles_are_listed_by_queries(
    last_first: bool, dim: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the backward, those that most query tiles visit first, and of a class from the first place on (of wide ones in
    the order of places alone); behind them what has each place of query tiles."""
    monkeypatch.setattr(sm90_backward_cost, "PLACE_VALUES", 0)
    queries = [*rng.integers(0, 200, 30), 30000, *rng.integers(0, 3, 40), 700]
    keys = [*rng.integers(0, 300, 30), 30100, *rng.integers(0, 900, 40), 600]
    given = {f"cu_seqlens_{x}": np.cumsum([0, *n]).astype("i4") for x, n in (("q", queries), ("k", keys))}
    given |= {name: np.zeros((sum(n) + 3, 1, dim), "f2") for name, n in zip("qkv", (queries, keys, keys))}
    asked = state(**given, causal=True)
    made = sm90_backward.plan(asked, GPU, None)
    constants, order = dict(made.constants), next(x for x in made.workspace if x.name == "order")
    [library] = compile_all(as_cpp(generate(made) + LISTED, ["attention_listed"]))
    made = replace(made, launches=(Launch("attention_listed", 1, 128),), maps=())
    arrays = {n: Guarded(x.shape, x.dtype, x) for n, x in given.items()} | {"order": Guarded(order.shape, "uint32")}
    run(library, made, asked, arrays, last_first, 2)
    found = arrays["order"].array.view("i4").reshape(-1, 8)
    rows, of_tile = constants["ROWS"], constants["KEYS"] * constants["CLUSTER"]
    assert constants["BY_VISITS"] == (dim == 64)
    expected, bounds = [], np.cumsum([[0, 0], *zip([*queries, 3], [*keys, 3])], axis=0)
    for n, (has, own) in enumerate(zip([*queries, 0], [*keys, 3])):
        for tile in range(-(-own // of_tile)):
            begin = max(0, tile * of_tile + has - own)
            visits = -(-has // rows) - begin // rows if begin < has else 0
            expected.append(
                (-constants["BY_VISITS"] * max(0, np.float32(visits).view("i4") // 2**20 - 127 * 8), n, tile, visits)
            )
    assert found[0, 0] == len(expected)
    listed = found[1 : len(expected) + 1]
    assert [(x[0], x[1], x[3] - x[2]) for x in listed.tolist()] == [x[1:] for x in sorted(expected)]
    assert (listed[:, 6] == bounds[listed[:, 0], 1]).all()
    table, places = found[1 + (sum(keys) + 3) // of_tile + len(keys) + 1 :], (sum(queries) + 3) // rows + len(keys) + 1
    assert len(table) == places
    expected = np.full((places, 2), -1)
    for n, has in enumerate([*queries, 3]):
        first = bounds[n, 0] // rows + n
        for tile in range(-(-has // rows)):
            expected[first + tile] = n, tile
    there = expected[:, 1] >= 0
    assert (table[there, :2] == expected[there]).all() and (table[~there, 1] == -1).all()
    assert (table[there, 4] == bounds[expected[there, 0], 0]).all()


STARTED = """
extern "C" __global__ void attention_started(const Params p) {
    TileSchedule schedule(p);
    for (int n = blockIdx.x * 32 + threadIdx.x; n < schedule.total(); n += gridDim.x * 32) {
        Tile tile = schedule.tile(n);
        p.lse[n] = tile.head.q + p.heads_q * tile.queries.begin;
    }
}
"""


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "together"),
    [
        ([8192, *[1] * 9], [8192] * 10, True, 2),  # K and V of so many heads stay in the cache
        ([8192, *[1] * 9], [8192] * 10, False, 2),
        ([1024, *[1] * 9], [1024] * 10, True, 4),  # of all
        ([1] * 10, [8192, *[8] * 9], True, 4),  # with the longest of some heads first, those of others would end late
    ],
)
def test_heads_of_a_list_are_in_rounds(
    queries: list[int], keys: list[int], causal: bool, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90_forward_cost, "ordered", lambda *_: True)
    heads, rows = 4, sum(queries)
    given = {f"cu_seqlens_{x}": np.cumsum([0, *n]).astype("i4") for x, n in (("q", queries), ("k", keys))}
    given |= {name: np.zeros((n, heads, 256), "f2") for name, n in (("q", rows), ("k", sum(keys)), ("v", sum(keys)))}
    asked = state(**given, causal=causal)
    made = sm90_forward.plan(asked, GPU, None)
    [library] = compile_all(as_cpp(generate(made) + STARTED, ["attention_order", "attention_started"]))
    order, forward = made.launches
    made = replace(made, launches=(order, replace(forward, name="attention_started", threads=32)), maps=())
    spaces = {x.name: Guarded(x.shape, x.dtype) for x in made.workspace if x.nbytes}
    arrays = {name: Guarded(x.shape, x.dtype, x) for name, x in given.items()} | spaces
    arrays["lse"] = Guarded((heads, rows), "f4")
    run(library, made, asked, arrays, False, 2)
    started = arrays["lse"].array.ravel()
    started = started[np.isfinite(started)].astype(int)
    count = int(spaces["order"].array[0])
    assert len(started) == heads * count
    for n, x in enumerate(started):
        assert x % heads == n // (together * count) * together + n % together
        assert x // heads == started[n - n % together] // heads, "another tile"


@pytest.mark.parametrize(
    ("rows", "batch", "heads_k", "hint", "listed"),
    [
        (2079, 32, 8, None, True),  # heads share tiles
        (2079, 32, 32, None, True),  # a tile each in the mean
        (2079, 8, 32, None, False),  # several
        (16384, 65, 32, None, False),
        (16384, 65, 32, 8192, True),  # all but one have one
        (16384, 64, 32, 256, False),
        (16384, 8, 32, 2048, False),
        (240, 8, 32, None, False),  # few for each thread block
        (33, 2, 8, None, False),
        (65536, 1, 32, 65536, False),  # one
        (8200, 2, 32, 8192, False),  # two of 4100, of which the hint is above all
    ],
)
def test_where_tiles_are_listed(rows: int, batch: int, heads_k: int, hint: int | None, listed: bool) -> None:
    packed = tuple(Given(name, "int32", ("offset",)) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    asked = problem("bfloat16", 128, batch=batch, seq_q=rows, seq_k=65536, heads_q=32, heads_k=heads_k, rows_q=rows,
        rows_k=65536, causal="bottom_right", right=0, given=packed, max_seqlen_q=hint)  # fmt: skip
    made = sm90_forward.plan(asked, Arch.of("sm_90a"), None)
    assert (made.launches[0].name == "attention_order") == dict(made.constants)["ORDERED"] == listed
    assert bool(sum(x.nbytes for x in made.workspace if x.name == "order")) == listed
