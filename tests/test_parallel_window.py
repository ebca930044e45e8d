"""Keys that ranks write into each other's memory: the plan of it, over memory that threads share."""

from __future__ import annotations

import datetime
import gc
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from copies_on_cpu import by_kernel, by_numpy
from cuda_on_cpu import needs_compiler
from near_on_cpu import Memory, Near, Window
from reference import fresh_rng

from cupyflash import attention, attention_backward, block_mask, parallel
from cupyflash.gpu.copies import Copies
from cupyflash.parallel import Rows, asked, near, run


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 40 == j // 40) & (j <= i)


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True}, "window": {"window": (30, 0)}, "full": {}, "groups": {"causal": True, "groups": 2},
    "stretches": {"causal": True, "stretches": 3}, "both": {"groups": 4, "stretches": 2}, "documents": {},
    "heads": {"causal": True, "exchange": "heads"}, "heads in groups": {"exchange": "heads", "groups": 2},
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_keys_in_each_others_memory(name: str, size: int) -> None:
    rng, how = fresh_rng(), dict(CASES[name])
    layout = "bhsd" if name == "groups" else "bshd"
    length, heads_q, heads_k = int(rng.integers(150, 260)), *((48, 24) if "exchange" in how else (8, 4))
    plan = {"exchange": "keys"} | {x: how.pop(x) for x in ("groups", "stretches", "exchange") if x in how}
    calls = 2 * plan.get("groups", 1) if plan["exchange"] == "heads" else 2
    q, k, v, dout = (
        rng.standard_normal((2, length, heads, dim))
        for heads, dim in ((heads_q, 8), (heads_k, 8), (heads_k, 12), (heads_q, 12))
    )
    axis = 1 if layout == "bshd" else 2
    whole = [x if axis == 1 else x.swapaxes(1, 2) for x in (dout, q, k, v)]
    rows = (Rows.contiguous if name == "window" else Rows.zigzag)(length, size, multiple=16)
    if name == "documents":
        alone = how | {"block_mask": block_mask(documents, shape=(length, length), block=16)}
    else:
        alone = how
    out, lse = attention(*whole[1:], layout=layout, return_lse=True, **alone)
    dlse = rng.standard_normal(lse.shape)
    expected = [out, *attention_backward(*whole, out, lse, dlse=dlse, layout=layout, **alone)]
    memory = Memory(size)

    def work(plain: Any) -> Any:
        group, given = Near(plain, memory), how | plan | {"rows": rows, "layout": layout}
        if name == "documents":
            given["block_mask"] = parallel.block_mask(documents, rows, plain, block=16)
        own = [rows.take(x, group.rank, axis) for x in whole]
        some, norm = parallel.attention(*own[1:], group, return_lse=True, **given)
        grads = parallel.attention_backward(*own, some, norm, group, dlse=rows.take(dlse, group.rank, 2), **given)
        assert group.window.calls == calls
        return [some, *grads]

    found = parallel.simulated(size).run(work)
    for x, parts in zip(expected, zip(*found)):
        np.testing.assert_allclose(rows.join(list(parts), axis), x, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [2, 3])
def test_two_exchanges_in_each_others_memory(size: int, dtype: str) -> None:
    """Heads inside of teams, keys between them, and sums that are wider than what is added up."""
    rng, teams = fresh_rng(), 2
    q, k, v, dout = (rng.standard_normal((1, 200, 6, 16)).astype(dtype) for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = [out, *attention_backward(dout, q, k, v, out, lse, causal=True)]
    rows = Rows.zigzag(200, size * teams, multiple=16)
    of_teams, of_keys = [Memory(size) for _ in range(teams)], [Memory(teams) for _ in range(size)]

    def work(plain: Any) -> Any:
        team, place = divmod(plain.rank, size)
        heads = Near(plain.part(range(team * size, (team + 1) * size)), of_teams[team])
        keys = Near(plain.part(range(place, size * teams, size)), of_keys[place])
        own = [rows.take(x, plain.rank) for x in (dout, q, k, v)]
        given = {"rows": rows, "causal": True}
        some, norm = parallel.attention(*own[1:], (heads, keys), return_lse=True, **given)
        return [some, *parallel.attention_backward(*own, some, norm, (heads, keys), **given)]

    found = parallel.simulated(size * teams).run(work)
    for x, parts in zip(expected, zip(*found)):
        tolerance = 4e-3 if dtype == "float16" else 4e-6
        np.testing.assert_allclose(rows.join(list(parts)), x, atol=tolerance * abs(x).max(), rtol=0)


def test_what_is_not_to_be_had_is_sent_and_nothing_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three heads one is handed over in memory, two, for which there is too little, by messages."""
    monkeypatch.setattr(run, "WINDOW", 50000)
    q, k, v, dout = (fresh_rng().standard_normal((1, 64, 6, 8)) for _ in range(4))
    sinks, rows = fresh_rng().standard_normal(6), Rows.contiguous(64, 2, multiple=16)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    alone = attention_backward(dout, q, k, v, out, lse, sinks=sinks, wrt="sinks")
    memory = Memory(2, 45000)

    def work(plain: Any) -> Any:
        group, given = Near(plain, memory), {"rows": rows, "exchange": "heads", "sinks": sinks}
        own = [rows.take(x, group.rank) for x in (dout, q, k, v)]
        some, norm = parallel.attention(*own[1:], group, return_lse=True, **given)
        before = group.window.calls
        found = parallel.attention_backward(*own, some, norm, group, wrt="sinks", reduce=True, **given)
        assert group.window.calls == before + 1
        return found

    found = parallel.simulated(2).run(work)
    np.testing.assert_allclose(found[0].dsinks, alone.dsinks, atol=1e-12)
    np.testing.assert_allclose(rows.join([x.dk for x in found]), alone.dk, atol=1e-12)


def test_of_a_kind_numbers_of_rows_may_lie_otherwise() -> None:
    """Heads are handed over by messages, or in memory, where those of all rows of a head lie side by side."""
    q, k, v, dout = (fresh_rng().standard_normal((2, 192, 4, 8)) for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = attention_backward(dout, q, k, v, out, lse, causal=True)
    rows = Rows.zigzag(192, 4, multiple=16)
    of_teams, of_keys = [Memory(2) for _ in range(2)], [Memory(2) for _ in range(2)]

    def work(plain: Any) -> None:
        team, place = divmod(plain.rank, 2)
        pair = (
            Near(plain.part((2 * team, 2 * team + 1)), of_teams[team]),
            Near(plain.part((place, place + 2)), of_keys[place]),
        )
        for x in pair:
            x.eager, x.known = False, set()
        own = [rows.take(x, plain.rank) for x in (dout, q, k, v, out)]
        for most in (0, None):
            of_teams[team].most = most
            found = parallel.attention_backward(*own, rows.take(lse, plain.rank, 2), pair, rows=rows, causal=True)
            for x, y in zip(found, expected):
                np.testing.assert_allclose(x, rows.take(y, plain.rank), atol=1e-12)
            plain.all_gather(np.zeros(1, np.uint8))

    parallel.simulated(4).run(work)


@pytest.mark.parametrize("near", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("fewer", [((64, 80), (80, 96)), ((64, 80), (80, 80)), ((64, 64), (64, 64))])
def test_teams_with_more_rows_or_no_memory_hand_over_as_many_heads(
    near: tuple[int, ...], fewer: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys travel between teams in the same rounds."""
    monkeypatch.setattr(run, "WINDOW", 30000)
    length = fewer[1][1]
    q, k, v, dout = (fresh_rng().standard_normal((1, length, 8, 8)) for _ in range(4))
    rows = Rows(length, (((0, 32),), ((32, 64),), fewer[:1], fewer[1:]))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = [out, *attention_backward(dout, q, k, v, out, lse, causal=True)]
    memories = [Memory(2) for _ in range(2)]

    def work(plain: Any) -> Any:
        team, place = divmod(plain.rank, 2)
        heads = plain.part((2 * team, 2 * team + 1))
        pair = Near(heads, memories[team]) if team in near else heads, plain.part((place, place + 2))
        own = [rows.take(x, plain.rank) for x in (dout, q, k, v)]
        some, norm = parallel.attention(*own[1:], pair, return_lse=True, rows=rows, causal=True)
        return [some, *parallel.attention_backward(*own, some, norm, pair, rows=rows, causal=True)]

    found = parallel.simulated(4).run(work)
    for x, parts in zip(expected, zip(*found)):
        np.testing.assert_allclose(rows.join(list(parts)), x, atol=1e-12)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("size", "window"), [(2, (50, 0)), (3, (50, 0)), (3, None)])
def test_rows_that_others_alone_see_are_packed_at_once_or_sent_as_they_are(
    size: int, window: Any, groups: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all batch entries and for all ranks; where rows lie side by side, from where they are."""
    length, how = 96 * size, {"causal": True, "window": window, "layout": layout}
    rows, heads_first = Rows.contiguous(length, size), layout == "bhsd"
    key_rows = Rows(length, rows.chunks[1:] + rows.chunks[:1])
    q, k, v, dout = (fresh_rng().standard_normal((2, length, 4, 8)) for _ in range(4))
    whole = [np.ascontiguousarray(x.swapaxes(1, 2)) if heads_first else x for x in (dout, q, k, v)]
    out, lse = attention(*whole[1:], return_lse=True, **how)
    expected = [out, *attention_backward(*whole, out, lse, **how)]
    memory, axis, made = Memory(size), 2 if heads_first else 1, []

    def copied(copies: Copies, addresses: Sequence[int]) -> None:
        if copies.dtypes is None:  # else sums
            made.append([x for x in copies.pieces if x.to.array != 0])  # not where they are computed with
        by_numpy(copies, addresses)

    monkeypatch.setattr(Window, "copied", staticmethod(copied))

    def work(plain: Any) -> Any:
        group, given = Near(plain, memory), how | {"rows": rows, "key_rows": key_rows, "groups": groups}
        given["exchange"] = "keys"
        of_rank = [(rows if n in (0, 1) else key_rows).take(x, group.rank, axis) for n, x in enumerate(whole)]
        some, norm = parallel.attention(*of_rank[1:], group, return_lse=True, **given)
        return [some, *parallel.attention_backward(*of_rank, some, norm, group, **given)]

    found = parallel.simulated(size).run(work)
    for n, (x, parts) in enumerate(zip(expected, zip(*found))):
        of = key_rows if n > 1 else rows
        np.testing.assert_allclose(of.join(list(parts), axis), x, atol=1e-12, rtol=1e-12)
    assert len(made) == 2 * size * groups  # of forward and backward, each round of each rank at once
    # Its rows, of K and of V. In a window to who has those queries, and the last of them to the next; else once to all
    # behind, and those of the last rank, which sees the first rows as well, not at all.
    packed = {0, 2} if window is None else {2, 4} if size > 2 else {2}
    assert {len(x) for x in made} == ({0} if groups == 1 and not heads_first else packed)


@pytest.mark.parametrize("plan", [{"exchange": "keys", "groups": 2}, {"exchange": "heads"}, {"stretches": 2}])
def test_what_is_kept_of_a_kind_serves_other_arrays(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie, of other strides, of another dtype, forward and backward in turn: all is listed once for each."""
    rows, memory = Rows.zigzag(192, 2, multiple=16), Memory(2)
    made: list[Copies] = []

    def counted(*given: Any) -> Copies:
        made.append(Copies(*given))
        return made[-1]

    monkeypatch.setattr(near, "Copies", counted)
    given = {"rows": rows, "causal": True, "exchange": "keys"} | plan
    drawn = {
        dtype: [fresh_rng().standard_normal((4, 2, 192, 4, 8)).astype(dtype) for _ in range(2)]
        for dtype in ("float64", "float32")
    }
    listed: list[int] = []

    def work(plain: Any) -> list[Any]:
        group, found = Near(plain, memory), []
        group.eager = False
        for turn in range(2):
            for some in drawn.values():
                for apart in (False, True):
                    own = [rows.take(x, group.rank, 1) for x in some[turn]]
                    own = [np.repeat(x, 2, -2)[:, :, ::2] if apart else x.copy() for x in own]
                    out, lse = parallel.attention(*own[1:], group, return_lse=True, **given)
                    found.append([out, *parallel.attention_backward(*own, out, lse, group, **given)])
            memory.barrier.wait()
            listed.append(len(made))
            memory.barrier.wait()
        return found

    found, n = parallel.simulated(2).run(work), 0
    assert len(set(listed)) == 1  # the second time nothing is listed again
    for turn in range(2):
        for dtype, some in drawn.items():
            dout, q, k, v = some[turn]
            out, lse = attention(q, k, v, causal=True, return_lse=True)
            expected = [out, *attention_backward(dout, q, k, v, out, lse, causal=True)]
            for _ in range(2):
                for x, parts in zip(expected, zip(*(of_rank[n] for of_rank in found))):
                    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
                    np.testing.assert_allclose(rows.join(list(parts)), x, atol=tolerance, rtol=tolerance)
                n += 1


@needs_compiler
@pytest.mark.parametrize("name", ["groups", "heads"])
def test_the_kernel_of_copies_in_the_place_of_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = threading.Lock()  # threads of a kernel are fibers of one machine

    def copied(copies: Copies, addresses: Sequence[int]) -> None:
        with turn:
            by_kernel(copies, addresses)

    monkeypatch.setattr(Window, "copied", staticmethod(copied))
    test_keys_in_each_others_memory(name, 2)


def test_memory_that_was_made_in_inference_mode_is_written_to_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    window = pytest.importorskip("cupyflash.parallel.window")
    handle = types.SimpleNamespace(buffer_ptrs=[0, 0])
    of_torch = types.SimpleNamespace(
        empty=lambda size, **how: torch.empty(size, **how), rendezvous=lambda own, group: handle
    )
    monkeypatch.setattr(window, "symmetric", of_torch)
    found = window.Window.__new__(window.Window)
    found._group, found._device = lambda: None, torch.device("cpu")
    x, shape = torch.ones(1, 4, 2, 8), (1, 4, 2, 8)
    with torch.inference_mode():
        found._reserve(4096)
        found.array(1024, shape, x)
    for offset in (1024, 2048):
        into = found.array(offset, shape, x)
        into[...] = x
        into[...] += 1
        assert into.min() == 2 and into.dtype == x.dtype
    assert found._own[2048:2304].view(torch.float32).view(shape)[0, 1, 0, 0] == 2
    with torch.inference_mode():
        part = found.kept("part", lambda: found.array(1024, shape, x)[:, :2])
    part += 1
    assert found.kept("part", lambda: None) is part
    found._reserve(4096)
    assert found.kept("part", lambda: None) is None  # views of what is no more


def test_memory_that_a_graph_was_captured_with_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    window = pytest.importorskip("cupyflash.parallel.window")
    handle = types.SimpleNamespace(buffer_ptrs=[0], barrier=lambda timeout_ms: None)
    of_torch = types.SimpleNamespace(empty=torch.empty, rendezvous=lambda own, group: handle)
    monkeypatch.setattr(window, "symmetric", of_torch)
    monkeypatch.setattr(window, "stream", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    found = window.Window.__new__(window.Window)
    found._group, found._device, found._patience, found._last = lambda: None, torch.device("cpu"), 1, None
    found._of_graphs, found._ordinal = {}, 0
    found._reserve(1024)
    for captured in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
        assert found.begin(1024) and found.begin(found.nbytes)
        own = weakref.ref(found._own)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert found.begin(2 * found.nbytes)  # elsewhere
        gc.collect()
        assert (own() is not None) == captured


def test_ranks_wait_as_long_as_their_group_says() -> None:
    torch = pytest.importorskip("torch")
    window = pytest.importorskip("cupyflash.parallel.window")
    options = types.SimpleNamespace(_timeout=datetime.timedelta(seconds=90))
    for found, milliseconds in ((types.SimpleNamespace(options=options), 90_000), (object(), window.PATIENCE)):
        group = types.SimpleNamespace(_get_backend=lambda device, found=found: found)
        assert window.patience(group, torch.device("cuda", 0)) == milliseconds
    group = types.SimpleNamespace(_get_backend=lambda device: types.SimpleNamespace(options=options))
    waiting = window.Window.__new__(window.Window)
    waiting._group, waiting._device = lambda: group, torch.device("cuda", 0)
    torch_group = pytest.importorskip("cupyflash.parallel.torch_group")
    of = torch_group.TorchGroup.__new__(torch_group.TorchGroup)
    of.window = waiting
    for seconds, milliseconds in ((90, 90_000), (30, 30_000), (1e-4, 1)):  # 0 would be for ever
        options._timeout = datetime.timedelta(seconds=seconds)
        of.prepare("torch")  # before calls of a new kind
        assert waiting._patience == milliseconds


@pytest.mark.parametrize(
    ("heads", "length", "how", "near", "forward", "backward"),
    [
        ((16, 16), 1 << 14, {"causal": True}, True, "heads", "heads"),
        ((32, 8), 1 << 16, {"causal": True}, True, "heads", "heads"),  # more bytes, but one call
        ((32, 4), 1 << 16, {"causal": True}, True, "keys", "heads"),
        ((32, 8), 1 << 16, {"causal": True}, False, "keys", "keys"),
        ((16, 16), 1 << 17, {"causal": True, "window": (1023, None)}, True, "keys", "keys"),  # of neighbours alone
        ((16, 16), 1 << 16, {"causal": True}, False, "keys", "heads"),
        ((16, 16), 1 << 16, {"groups": 16}, True, "keys", "keys"),  # of heads there are 8
    ],
)
def test_that_exchange_for_which_ranks_wait_less(
    heads: tuple[int, int], length: int, how: dict[str, Any], near: bool, forward: str, backward: str
) -> None:
    names = {"rank": 0, "size": 2, "eager": True, "exchange": None, "all_gather": None}
    two = types.SimpleNamespace(**names, window=object() if near else None)
    rows = (Rows.contiguous if "window" in how else Rows.zigzag)(length, 2)
    q, k = (np.broadcast_to(np.float16(0), (1, length // 2, n, 128)) for n in heads)
    plan = {"rows": rows, "key_rows": None, "groups": how.get("groups")}
    for operands, expected in (({}, forward), ({"dout": q}, backward)):
        found = asked.usual_of_two(two, {"q": q, "k": k, "v": k} | operands, plan, how)
        assert found == expected


def test_who_wants_no_window_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_group = pytest.importorskip("cupyflash.parallel.torch_group")
    monkeypatch.setenv("CUPYFLASH_WINDOW", "0")
    assert torch_group._window() is None
    monkeypatch.setenv("CUPYFLASH_WINDOW", "no")
    with pytest.raises(ValueError, match="CUPYFLASH_WINDOW is 'no'; it must be 1, 0 or empty"):
        torch_group._window()
