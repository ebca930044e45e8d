"""Calls of a kind that was checked before: they compute with their own arrays, and what differs is checked again."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import fresh_rng

torch = pytest.importorskip("torch")

from cupyflash import attention, attention_backward, dispatch, merge, parallel
from cupyflash.parallel import Rows, asked, calls, kinds, parts, run
from cupyflash.parallel.groups import Alone
from cupyflash.parallel.kinds import kind_of

OPTIONS: dict[str, Any] = {"causal": True, "dropout": 0.2, "seed": 3}
ROWS = Rows.zigzag(64, 2, multiple=16)


class Costly:
    """A group over which the first call of a kind alone is compared."""

    eager, beside, window = False, True, None

    def __init__(self, group: Any, known: set[Any] | None = None) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        self.known = set() if known is None else known
        self.exchanged = self.gathered = 0

    def exchange(self, *x: Any) -> Any:
        self.exchanged += 1
        return self._group.exchange(*x)

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        self.gathered += 1
        return self._group.all_gather(x)


def test_the_second_call_of_a_kind_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That which autograd follows is of another: all ranks must have a backward, or none."""
    rng, checked = fresh_rng(), []
    inputs = [torch.from_numpy(rng.standard_normal((3, 1, 64, 2, 8))) for _ in range(4)]
    slopes = [torch.from_numpy(rng.random(2)).requires_grad_(n > 1) for n in range(4)]

    def counted(*x: Any) -> Any:
        checked.append(x[0])
        return asked.check(*x)

    monkeypatch.setattr(calls, "check", counted)

    def work(plain: Any) -> Any:
        group, found = Costly(plain), []
        for x, y in zip(inputs, slopes):
            own = [ROWS.take(z, group.rank) for z in x]
            found.append(parallel.attention(*own, group, rows=ROWS, alibi_slopes=y, **OPTIONS, exchange="keys"))
        before = group.gathered
        with pytest.raises(ValueError, match="scale is .* it must be the same on all ranks"):
            parallel.attention(*own, group, rows=ROWS, causal=True, scale=1.0 + plain.rank)
        return found, before

    found = parallel.simulated(2).run(work)
    assert len(checked) == 3 * 2 and all(gathered == 2 for _, gathered in found)
    for n, (x, y) in enumerate(zip(inputs, slopes)):
        whole = ROWS.join([some[n] for some, _ in found])
        torch.testing.assert_close(whole, attention(*x, alibi_slopes=y, **OPTIONS))


def test_whatever_a_call_depends_on_is_said_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing changed at a time: checked once, and computed with what it says, whichever came before."""
    checked: list[Any] = []
    monkeypatch.setattr(calls, "check", lambda *x: (checked.append(x[0]), asked.check(*x))[1])
    drawn = torch.from_numpy(fresh_rng().standard_normal((3, 1, 64, 2, 8)))
    others = Rows(64, (((0, 32), (48, 64)), ((32, 48),)))
    ways: list[dict[str, Any]] = [
        {}, {"exchange": "keys"}, {"exchange": "heads"}, {"groups": 2}, {"stretches": 2}, {"causal": False},
        {"window": (9, 3)}, {"scale": 0.5}, {"softcap": 2.0}, {"rows": others, "key_rows": ROWS}, {"key_rows": others},
        {"alibi_slopes": torch.tensor([0.5, 0.25])}, {"dtype": torch.float32}, {"layout": "bhsd"}, {"step": 2},
    ]  # fmt: skip

    def work(plain: Any) -> None:
        group = Costly(plain)
        for turn in range(3):
            for way in ways:
                how = {"rows": ROWS, "causal": True} | way
                x = (drawn * (turn + 1)).to(how.pop("dtype", torch.float64))
                own = [r.take(y, plain.rank) for r, y in zip((how["rows"], *(how.get("key_rows", ROWS),) * 2), x)]
                own = [y.repeat_interleave(n, -1)[..., ::n] for n in [how.pop("step", 1)] for y in own]
                axes = (1, 2) if how.get("layout") == "bhsd" else (1, 1)
                before = len(checked)
                found = parallel.attention(*(y.transpose(*axes) for y in own), group, **how).transpose(*axes)
                group.all_gather(np.zeros(1, np.uint8))  # until both have
                assert (len(checked) > before) == (turn == 0), way
                group.all_gather(np.zeros(1, np.uint8))
                plan = ("rows", "key_rows", "exchange", "groups", "stretches", "layout")
                want = attention(*x, **{name: y for name, y in how.items() if name not in plan})
                torch.testing.assert_close(found, how["rows"].take(want, plain.rank))

    parallel.simulated(2).run(work)


@pytest.mark.parametrize(
    ("name", "known", "nonsense"),
    [("groups", 1, True), ("return_lse", True, 1), ("window", (9, 3), (9.0, 3))],
)
def test_what_equals_a_known_kind_is_refused_all_the_same(name: str, known: Any, nonsense: Any) -> None:
    x = torch.zeros(3, 1, 64, 2, 8)

    def work(plain: Any) -> None:
        group, own = Costly(plain), [ROWS.take(y, plain.rank) for y in x]
        parallel.attention(*own, group, rows=ROWS, **{name: known})
        with pytest.raises((TypeError, ValueError), match=name):
            parallel.attention(*own, group, rows=ROWS, **{name: nonsense})

    parallel.simulated(2).run(work)


@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_numbers_of_rows_are_given_as_kernels_take_them(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some of a rank's rows each call of a GPU would copy them."""
    seen: list[Any] = []
    ran = parts.Turn.run

    def looked_at(self: Any, asked: Any, of_rows: Any, arrays: Any, targets: Any) -> Any:
        seen.extend((name, x.is_contiguous()) for name, x in arrays.items() if name in ("lse", "dlse"))
        return ran(self, asked, of_rows, arrays, targets)

    monkeypatch.setattr(parts.Turn, "run", looked_at)
    q, k, v, dout = (torch.from_numpy(fresh_rng().standard_normal((2, 64, 2, 8))) for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True)

    def work(group: Any) -> None:
        own = [ROWS.take(x, group.rank) for x in (dout, q, k, v, out)]
        norm = ROWS.take(lse, group.rank, 2)
        parallel.attention_backward(*own, norm, group, rows=ROWS, causal=True, exchange=exchange, dlse=norm)

    parallel.simulated(2).run(work)
    assert {name for name, _ in seen} == {"lse", "dlse"} and all(beside for _, beside in seen)


class Prepared:
    """What a GPU keeps of a call: it has the addresses of arrays that lie as they did."""

    runs: int = 0
    there: bool = True  # nobody took its place

    def __init__(self, call: Any) -> None:
        self._like = {name: (x.shape, x.stride(), x.dtype) for name, x in call.arrays.items()}

    def run(self, call: Any, addresses: list[int]) -> Any:
        type(self).runs += 1
        assert [*call.arrays] == [*self._like]
        of = {name: self._at(at, *like) for at, (name, like) in zip(addresses, self._like.items())}
        return dispatch.run(call.but(arrays=of))

    @staticmethod
    def _at(address: int, shape: Any, strides: Any, dtype: Any) -> Any:
        size = (1 + sum((n - 1) * x for n, x in zip(shape, strides))) * dtype.itemsize
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).as_strided(shape, strides)

    @classmethod
    def kept(cls, call: Any) -> Callable[[], Any]:
        found = cls(call)
        return lambda: found if cls.there else None


@pytest.mark.parametrize("how", [{"exchange": "keys"}, {"exchange": "heads"}, {"exchange": "keys", "groups": 2}])
def test_calls_that_ran_twice_run_by_addresses(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arrays that lie alike; not those at odd addresses, nor what is no longer kept."""
    monkeypatch.setattr(dispatch, "kept", Prepared.kept)
    monkeypatch.setattr(run, "_plain", lambda *_: True)
    monkeypatch.setattr(Prepared, "runs", 0)
    rng, size, ways = fresh_rng(), 2, ["first", "again", "ready", "odd", "gone", "ready"]
    given = {"causal": True, "alibi_slopes": torch.from_numpy(rng.random(4))}
    known: list[set[Any]] = [set() for _ in range(size)]
    calls_of_both = 3 + 3 if how["exchange"] == "keys" else 2 + 2  # zigzag's last rank has one where the other has two
    for way in ways:
        q, k, v, dout = (torch.from_numpy(rng.standard_normal((1, 64, 4, 8))) for _ in range(4))
        out, lse = attention(q, k, v, **given, return_lse=True)
        want = [out, *attention_backward(dout, q, k, v, out, lse, **given, dlse=lse)]

        def work(plain: Any, every: Any = (dout, q, k, v, out), norm: Any = lse, way: str = way) -> Any:
            group = Costly(plain, known[plain.rank])
            own = [ROWS.take(x, plain.rank) for x in every]
            if way == "odd":
                own = [torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in own]
                assert all(x.data_ptr() % 16 for x in own)
            norm = ROWS.take(norm, plain.rank, 2)
            found = parallel.attention(*own[1:4], group, rows=ROWS, **given, **how)
            return found, *parallel.attention_backward(*own, norm, group, rows=ROWS, dlse=norm, **given, **how)

        before, Prepared.there = Prepared.runs, way != "gone"
        found = parallel.simulated(size).run(work)
        for n, x in enumerate(want):
            torch.testing.assert_close(ROWS.join([some[n] for some in found]), x)
        ran = Prepared.runs - before
        if way == "ready":
            assert ran == calls_of_both * how.get("groups", 1)
        elif way != "odd":  # there what was received or packed lies as before
            assert ran == 0


class Foreign:
    """An array of a library of which nothing is known."""

    def __init__(self, held: np.ndarray) -> None:
        self._held, self.shape = held, held.shape

    def __dlpack__(self, **how: Any) -> Any:
        return self._held.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self._held.__dlpack_device__()


@pytest.mark.parametrize("name", ["seed", "score_arrays"])
def test_nobody_asks_how_arrays_lie_of_which_there_is_no_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_plain", lambda *_: True)
    q, k, v = fresh_rng().standard_normal((3, 1, 64, 2, 8))
    given: dict[str, dict[str, Any]] = {
        "seed": {"dropout": 0.5, "seed": Foreign(np.array(7))},
        "score_arrays": {"score": lambda s, b, h, i, j, w: s * w[h], "score_arrays": {"w": Foreign(np.ones(2))}},
    }

    def work(group: Any) -> Any:
        own = [ROWS.take(x, group.rank) for x in (q, k, v)]
        return parallel.attention(*own, Costly(group), rows=ROWS, **given[name])

    np.testing.assert_allclose(ROWS.join(parallel.simulated(2).run(work)), attention(q, k, v, **given[name]))


@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_groups_of_as_many_ranks_are_not_taken_for_each_other_nor_kept(exchange: str) -> None:
    x = [torch.from_numpy(fresh_rng().standard_normal((1, 64, 2, 8))) for _ in range(3)]

    def work(plain: Any) -> Any:
        one, other = Costly(plain), Costly(plain)
        own = [ROWS.take(y, plain.rank) for y in x]
        for group in (one, other, one):
            before = group.exchanged
            parallel.attention(*own, group, rows=ROWS, causal=True, exchange=exchange)
            assert group.exchanged > before
        return weakref.ref(one), weakref.ref(other)

    found = parallel.simulated(2).run(work)
    gc.collect()
    assert all(group() is None for some in found for group in some)


def test_a_kind_that_another_thread_drops_meanwhile_is_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dropped(OrderedDict[Any, Any]):
        def get(self, *x: Any) -> Any:
            found = super().get(*x)
            self.clear()
            return found

    x, group, rows = torch.zeros(3, 1, 8, 2, 8), Costly(Alone()), Rows.contiguous(8, 1)
    monkeypatch.setattr(kinds, "_templates", Dropped())
    for _ in range(2):
        torch.testing.assert_close(parallel.attention(*x, group, rows=rows), torch.zeros(1, 8, 2, 8))


def test_of_rows_that_one_rank_leaves_out_all_are_told() -> None:
    x = torch.zeros(3, 1, 32, 2, 8)

    def work(group: Any) -> None:
        given: dict[str, Any] = {"rows": ROWS} if group.rank else {}
        for own in (x, x.numpy()):
            with pytest.raises(TypeError, match="rows is a NoneType; it must be a parallel.Rows"):
                parallel.attention(*own, group, **given)
            with pytest.raises(TypeError, match="rows is a NoneType; it must be a parallel.Rows"):
                parallel.attention_backward(*own, *own[:2], own[0][..., 0].swapaxes(1, 2), group, **given)

    parallel.simulated(2).run(work)


def test_a_tensor_is_no_group() -> None:
    x = torch.zeros(3, 1, 32, 2, 8)
    for group in (x, (x, x)):
        with pytest.raises(
            TypeError, match=r"group is a torch.Tensor; it must be parallel.simulated\(n\)'s, PyTorch's"
        ):
            parallel.attention(*x, group, rows=ROWS)


def test_a_group_that_was_destroyed_is_not_taken_for_the_default_one() -> None:
    torch_group = pytest.importorskip("cupyflash.parallel.torch_group")
    found = torch_group.TorchGroup.__new__(torch_group.TorchGroup)
    found._of, found.eager, found.size = (lambda: None), True, 1
    with pytest.raises(ValueError, match="group is a ProcessGroup that was destroyed; it must be one that is there"):
        found.all_gather(np.zeros(1, np.uint8))


def test_groups_that_send_otherwise_are_of_another_kind() -> None:
    """As many groups of heads as pay in the one need not in the other, and its ranks would not have as many."""
    x, ranks = torch.zeros(1, 8, 2, 8), [Costly(Alone()) for _ in range(3)]
    ranks[1].beside, ranks[2].window = False, object()
    kinds = {kind_of([group], {"q": x, "k": x, "v": x}, {}) for group in ranks}
    assert len(kinds) == 3 and None not in kinds


def test_the_second_merge_of_a_kind_compares_nothing_and_rounds_once() -> None:
    rng = fresh_rng()
    outs = [torch.from_numpy(rng.standard_normal((2, 1, 4, 8))).half() for _ in range(2)]
    lses = [torch.from_numpy(rng.standard_normal((2, 4, 1))).float() for _ in range(2)]
    wide = merge([x.float() for x in outs], lses)[0]

    def work(plain: Any) -> Any:
        group, own = Costly(plain), (outs[plain.rank], lses[plain.rank])
        found = [parallel.merge(*own, group) for _ in range(3)]
        before = group.gathered
        with pytest.raises(ValueError, match="out is .* it must be the same on all ranks"):
            parallel.merge(own[0][:, :, : 2 + plain.rank], own[1][:, : 2 + plain.rank], group)
        return found, before

    for found, gathered in parallel.simulated(2).run(work):
        assert gathered == 1
        for x, _ in found:
            torch.testing.assert_close(x, wide.half(), atol=0, rtol=0)
    with pytest.raises(NotImplementedError, match=r"parallel\.merge has no derivative"):
        parallel.merge(outs[0].requires_grad_(), lses[0], Costly(Alone()))
