"""Wrong calls over simulated ranks end everywhere, and name the argument."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import parallel
from cupyflash.parallel import Rows, calls, run
from cupyflash.parallel.simulated import RankLost

SIZE = 3
ROWS = Rows.contiguous(48, SIZE, multiple=16)
X = np.random.default_rng(0).standard_normal((1, 48, 6, 8)).astype(np.float32)


def errors(call: Callable[[Any, Any], Any], size: int = SIZE) -> list[str]:
    """What each rank raises; "" where it raises nothing."""

    def work(group: Any) -> str:
        try:
            call(group, ROWS.take(X, group.rank) if group.rank < SIZE else X)
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return ""

    return parallel.simulated(size).run(work)


def attend(group: Any, x: Any, **options: Any) -> Any:
    return parallel.attention(x, x, x, group, **{"rows": ROWS, **options})


ODD = Rows(25, (((0, 8),), ((8, 17),), ((17, 25),)))
MASKS = {"mask": np.ones((1, 1, 48, 48), bool), "bias": np.ones((6, 48, 48), np.float32)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: attend(g, x, rows=Rows.contiguous(64, SIZE)), r"q has 16 rows, .*; it must have those of rank"),
        (
            lambda g, x: attend(g, x, rows=Rows.contiguous(48, 2)),
            "rows is of 2 ranks; it must be of 3, as the group is",
        ),
        (lambda g, x: attend(g, x, rows=None), "rows is a NoneType; it must be a parallel.Rows"),
        (lambda g, x: attend(g, x, key_rows=Rows.zigzag(96, SIZE)), "k has 16 rows, .* in key_rows"),
        (lambda g, x: attend(g, x[:, :, :4], exchange="heads"), "k has 4 heads, which cannot be dealt out to 3 ranks"),
        (lambda g, x: attend(g, x, exchange="ring"), "exchange is 'ring'; it must be 'keys', 'heads' or None"),
        (lambda g, x: attend(g, x, bias=MASKS["bias"]), r"bias has shape \(6, 48, 48\); it must be \(1, 6, 16, 48\)"),
        (
            lambda g, x: attend(g, x, mask=MASKS["mask"]),
            r"mask has shape \(1, 1, 48, 48\); it must be \(1, 6, 16, 48\)",
        ),
        (lambda g, x: attend(g, x, bias=MASKS["bias"][:, :16], exchange="heads"), "its queries must be 1, or exchange"),
        (
            lambda g, x: attend(g, x, groups=9, exchange="keys"),
            "groups is 9; it must be None or an integer from 1 to 6",
        ),
        (lambda g, x: attend(g, x, stretches=0), "stretches is 0; it must be None or an integer from 1"),
        (lambda g, x: attend(g, x, at=(0, 0, 0, 0)), "at is given; parallel.attention does not take it yet"),
        (lambda g, x: attend(g, x, out=x), "out is given; parallel.attention does not take it yet"),
        (lambda g, x: attend(g, x, is_causal=True), "unexpected keyword argument 'is_causal'"),
        (lambda g, x: attend(g, x, return_lse=1), "return_lse is 1; it must be True or False"),
        (lambda g, x: attend(g, x, block_mask=3), "block_mask is a int; it must be what parallel.block_mask made"),
        (lambda g, x: attend(g, x, window=(1,)), "window is .*; it must be None or a pair"),
        (lambda g, x: attend(None, x), "group is None; it must be a group"),
        (lambda g, x: attend("world", x), "group is a str; it must be parallel.simulated"),
        (
            lambda g, x: attend(parallel.simulated(2), x),
            r"group is a Simulated, all of its ranks; it must be what its run\(function\) gives",
        ),
        (lambda g, x: attend((g,), x), "group holds 1; it must be one, or two"),
        (lambda g, x: attend((g, g), x, exchange="keys"), "exchange is 'keys', and group holds two"),
        (lambda g, x: attend(g, list(x)), "q is a list"),
        (
            lambda g, x: attend(g, x[:, : 9 if g.rank == 1 else 8], rows=ODD, dropout=0.1, seed=1),
            "rows begins a chunk at 8; with dropout chunks must begin at multiples of 16",
        ),
        (
            lambda g, x: parallel.block_mask(lambda b, h, i, j: i >= j, ROWS, g, block=32),
            "rows begins a chunk at .*; with blocks of 32 it must be a multiple",
        ),
    ],
)
def test_what_is_wrong_on_all_ranks(call: Callable[[Any, Any], Any], message: str) -> None:
    for found in errors(call):
        assert found
        assert re.search(message, found), found


@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        ({"causal": True}, "causal is False on rank 0 and True on rank 1"),
        ({"scale": 0.5}, r"scale is None on rank 0 and 0\.5 on rank 1"),
        ({"dropout": 0.5, "seed": 1}, "dropout is 0.0 on rank 0 and 0.5 on rank 1"),
        ({"exchange": "heads"}, "exchange is 'keys' on rank 0 and 'heads' on rank 1"),
        ({"groups": 2}, "groups is 1 on rank 0 and 2 on rank 1"),
        ({"sinks": np.zeros(6, np.float32)}, "sinks is not given on rank 0 and of float32"),
        ({"score": lambda s, b, h, i, j: 2 * s}, "score is None on rank 0 and '"),
        ({"rows": Rows(48, (ROWS.chunks[2], ROWS.chunks[1], ROWS.chunks[0]))}, "rows is 48 rows .* on rank 0 and 48"),
    ],
)
def test_what_differs_between_ranks(of_rank_1: dict[str, Any], message: str) -> None:
    found = errors(lambda g, x: attend(g, x, **{"exchange": "keys"} | (of_rank_1 if g.rank == 1 else {})))
    assert all(found) and re.search(message, found[0]), found
    name = message.split()[0]
    assert all(f"{name} is" in x and "it must be the same on all ranks" in x for x in found), found


def test_other_arrays_on_one_rank() -> None:
    found = errors(lambda g, x: attend(g, x.astype(np.float64) if g.rank == 2 else x))
    assert all("q is of float32" in x or "q is of float64" in x for x in found), found


def test_an_error_of_one_rank_ends_the_others() -> None:
    found = errors(lambda g, x: attend(g, x, window=(-1, 0) if g.rank == 1 else None))
    assert "window's left bound is -1" in found[1] and not found[1].startswith("ValueError: rank")
    assert all(x.startswith("ValueError: rank 1 of the group: window's left bound is -1") for x in (found[0], found[2]))


def test_an_error_reaches_ranks_of_other_teams() -> None:
    rows = Rows.contiguous(64, 4, multiple=16)
    x = np.zeros((1, 64, 4, 8), np.float32)

    def work(group: Any) -> str:
        team, across = divmod(group.rank, 2)
        both = group.part([2 * team, 2 * team + 1]), group.part([across, across + 2])
        own = rows.take(x, group.rank)
        try:
            parallel.attention(own, own, own, both, rows=rows, scale="x" if group.rank == 3 else None)
        except TypeError as error:
            return str(error)
        return ""

    found = parallel.simulated(4).run(work)
    assert all("scale is 'x'; it must be a real number or None" in x for x in found), found


def test_a_rank_that_raises_elsewhere_does_not_leave_the_others_waiting() -> None:
    def work(group: Any) -> None:
        if group.rank == 1:
            raise KeyError("lost")
        attend(group, ROWS.take(X, group.rank))

    with pytest.raises(KeyError, match="lost"):
        parallel.simulated(SIZE).run(work)


def _raises(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        ({"mask": [[True]]}, "mask is a list; it must be an array"),
        ({"bias": 1.0}, "bias is a float; it must be an array"),
        ({"layout": "sbhd"}, "layout is 'sbhd'; it must be one of 'bshd', 'bhsd'"),
        ({"family": "simt"}, "family is 'simt', a family of GPU kernels, but q is a numpy array on the CPU"),
        ({"score": lambda s, b, h, i, j: _raises()}, "division by zero"),
        ({"dropout": 0.1, "seed": np.array(1)}, "seed is 1 on rank 1 and 0 on rank 0"),
    ],
)
def test_what_one_rank_is_given_ends_all(of_rank_1: dict[str, Any], message: str) -> None:
    others = {"dropout": 0.1, "seed": np.array(0)} if "seed" in of_rank_1 else {}
    found = errors(lambda g, x: attend(g, x, **(of_rank_1 if g.rank == 1 else others)))
    assert message in found[1] and all(found), found


def test_keys_of_one_dimension_end_all() -> None:
    def call(group: Any, x: Any) -> Any:
        return parallel.attention(x, x[0, 0, 0] if group.rank else x, x, group, rows=ROWS)

    assert all("k has 1 dimensions, shape (8,)" in x for x in errors(call))


def test_defaults_and_numbers_of_numpy_are_taken() -> None:
    def call(group: Any, x: Any) -> Any:
        plan = {"groups": np.int64(2), "stretches": np.int32(2), "exchange": "keys"}
        return attend(group, x, out_scale=1.0, batch_invariant=False, max_seqlen_q=None, **plan)

    assert errors(call) == [""] * SIZE


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": 3}, "rows is a int; it must be a parallel.Rows"),
        ({"key_rows": 7}, "key_rows is a int; it must be a parallel.Rows"),
        ({"block": "a"}, "block is 'a'; it must be a multiple of 16"),
        ({"block": ()}, r"block is \(\); it must be a multiple of 16"),
        ({"source": _raises}, "division by zero"),
    ],
)
def test_what_a_mask_cannot_be_made_of(given: dict[str, Any], message: str) -> None:
    def call(group: Any, _: Any) -> Any:
        usual = {"source": lambda b, h, i, j: i >= j, "rows": ROWS, "block": 16}
        return parallel.block_mask(**(usual | (given if group.rank == 1 else {})), group=group)

    assert all(re.search(message, x) for x in errors(call))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    ("function", "raises"),
    [(x, y) for x in ("forward", "backward") for y in ("itself", "empty")] + [("gathered", "itself")],
)
def test_what_one_rank_alone_raises_says_that_others_wait(
    function: str, raises: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its work, or as there is no room for its results."""

    def ran(asked: Any, *x: Any) -> Any:
        if raises == "empty" or asked.rank == 1:
            raise MemoryError("out of memory")
        return [[y] for y in x]  # of `gathered`

    def work(group: Any) -> Any:
        own = ROWS.take(X, group.rank)
        if function == "gathered":
            return parallel.merge(own, np.zeros((1, own.shape[2], own.shape[1]), X.dtype), group)
        if function == "forward":
            return parallel.attention(own, own, own, group, rows=ROWS)
        lse = np.zeros((1, own.shape[2], own.shape[1]), X.dtype)
        return parallel.attention_backward(*[own] * 5, lse, group, rows=ROWS)

    if raises == "empty":
        monkeypatch.setattr(calls, "empty", ran)
    else:
        monkeypatch.setattr(calls if function == "gathered" else run, function, ran)
    with pytest.raises(MemoryError, match="out of memory") as found:
        parallel.simulated(3).run(work)
    (note,) = found.value.__notes__
    rank = r"\d" if raises == "empty" else "1"
    assert re.match(f"Raised on rank {rank} after all ranks had agreed on the call.*time-out", note)


def test_merge_names_its_own_arguments() -> None:
    found = errors(lambda g, x: parallel.merge(None if g.rank == 1 else x, np.zeros((1, 6, x.shape[1]), "f4"), g))
    assert all("out is a NoneType" in x for x in found), found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rows(3, ((0, 3),)), "chunks is"),  # type: ignore[arg-type]
        (lambda: Rows(3, (((0.0, 3.0),),)), "integers"),  # type: ignore[arg-type]
        (lambda: Rows.zigzag(4.5, 2), "length is 4.5; it must be 0 or more, an integer"),  # type: ignore[arg-type]
        (lambda: Rows.zigzag(4, "2"), "size is '2'; it must be 1 or more, an integer"),  # type: ignore[arg-type]
        (lambda: Rows.balanced(4, 2, [1, 2, -1, 3]), "mask says -1.0 of a row"),
        (lambda: ROWS.take(X, -1), "rank is -1; it must be from 0 to 2"),
        (lambda: ROWS.take(X, 0, axis=9), "axis is 9; it must be one of the 4 axes of x, shape"),
        (lambda: ROWS.join([X] * 3, axis=-5), "axis is -5; it must be one of the 4 axes of parts[0], shape"),
        (lambda: ROWS.positions(3), "rank is 3; it must be from 0 to 2"),
        (lambda: parallel.simulated(0), "size is 0; it must be 1 or more, an integer"),
    ],
)
def test_what_rows_cannot_be(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_rows_of_lists_are_those_of_tuples() -> None:
    assert hash(Rows(3, [[[0, 2]], [[2, 3]]])) == hash(Rows(3, (((0, 2),), ((2, 3),))))  # type: ignore[arg-type]


def test_arrays_of_jax_have_functions_of_their_own() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 8, 2, 4))
    for call in (
        lambda: parallel.attention(x, x, x, rows=ROWS),
        lambda: parallel.attention_backward(x, x, x, x, x, x, rows=ROWS),
        lambda: parallel.merge(x, x),
    ):
        with pytest.raises(TypeError, match=r"that of cupyflash\.jax\.parallel"):
            call()
