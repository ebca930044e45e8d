"""Tensor maps: what the driver is told of arrays. A driver that writes down what it is asked; no GPU needed."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.driver")
from kernel_cover import problem

from cupyflash.gpu import tensormap
from cupyflash.gpu.device import Arch
from cupyflash.gpu.families import sm90_forward_cost
from cupyflash.gpu.plan import FAMILIES, plan
from cupyflash.gpu.strides import to_copy
from cupyflash.passes import BACKWARD, FORWARD, Pass
from cupyflash.problem import ITEMSIZE, Given, View

STRIDES = {"q": (700_000, 1024, 64), "k": (0, 128, 64), "v": (80_000, 256, 128), "out": (800_000, 1024, 128)}
AT = (0x1000, 0x2000, 0x3000, 0x4000)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of cuTensorMapEncodeTiled; the map of call n is 128 bytes of n."""
    from cuda.bindings import driver

    calls: list[dict[str, Any]] = []

    def encode(dtype: Any, rank: int, address: int, shape: Any, strides: Any, box: Any, steps: Any, *rest: Any) -> Any:
        calls.append(
            {
                "dtype": dtype.name.rpartition("_")[2], "at": address, "shape": [int(x) for x in shape],
                "strides": [int(x) for x in strides], "box": [int(x) for x in box], "rest": [x.name for x in rest],
            }
        )  # fmt: skip
        assert rank == len(shape) == len(strides) + 1 == len(box) == len(steps)
        status = driver.CUresult.CUDA_ERROR_INVALID_VALUE if address == 0xBAD0 else driver.CUresult.CUDA_SUCCESS
        buffer = ctypes.create_string_buffer(bytes([len(calls)]) * 128, 128)
        return status, SimpleNamespace(getPtr=lambda: ctypes.addressof(buffer), buffer=buffer)

    def replace(found: Any, address: int) -> Any:
        assert found.getPtr() % 64 == 0
        calls.append({"moved": address})
        ctypes.memset(found.getPtr(), 255, 128)
        return (driver.CUresult.CUDA_ERROR_INVALID_VALUE if address == 0xBAD0 else driver.CUresult.CUDA_SUCCESS,)

    names = {name: getattr(driver, name) for name in dir(driver) if name.startswith(("CU", "cuu"))}
    names |= {"cuTensorMapEncodeTiled": encode, "cuTensorMapReplaceAddress": replace}
    monkeypatch.setattr(tensormap, "bindings", lambda: SimpleNamespace(**names))
    return calls


def pointed(maps: tensormap.PlacedMaps, *at: int) -> bytes:
    """The parameter for arrays there."""
    maps.point(at)
    return bytes(maps.memory)


def maps(strides: dict[str, tuple[int, ...]] = STRIDES, **fields: Any) -> tensormap.PlacedMaps:
    fields = {"batch": 1, "heads_q": 8, "heads_k": 2, "seq_q": 500, "seq_k": 300} | fields
    asked = problem("bfloat16", 64, 128, **fields)
    return tensormap.PlacedMaps(tensormap.Maps(plan(asked, Arch.of("sm_90a"), family="sm90"), asked, strides))


def test_rows_that_are_dead_by_position_are_no_part_of_inputs(asked: list[dict[str, Any]]) -> None:
    """500 queries on 300 keys: the first 90 see none, nor do the last 95; the first 80 and the last 10 of 500 keys
    nobody sees."""
    pointed(maps(diagonal=-100, left=5, right=10), *AT)
    assert [call["at"] for call in asked] == [AT[0] + 90 * 2048, *AT[1:]]
    assert [call["shape"][1] for call in asked] == [315, 300, 300, 500]
    asked.clear()
    pointed(maps(seq_q=300, seq_k=500, diagonal=180, left=100, right=10), *AT)
    assert [call["at"] for call in asked] == [AT[0], AT[1] + 80 * 256, AT[2] + 80 * 512, AT[3]]
    assert [call["shape"][1] for call in asked] == [300, 410, 410, 300]


def test_windows_of_packed_rows(asked: list[dict[str, Any]]) -> None:
    """Entry n has the rows of a box before row n, so that a box from there on has a sequence's last rows and nothing
    behind them."""
    offsets = tuple(Given(f"cu_seqlens_{side}", "int32", ("offset",)) for side in "qk")
    given = problem("bfloat16", 64, batch=9, heads_q=8, heads_k=2, seq_q=500, seq_k=300, rows_q=500, rows_k=300,
        given=offsets)  # fmt: skip
    made = plan(given, Arch.of("sm_90a"), BACKWARD, "sm90")
    of_all = tensormap.Maps(made, given, dict.fromkeys(("q", "k", "v", "dout", "dk", "dv", "dq"), (0, 512, 64)))
    pointed(tensormap.PlacedMaps(of_all), *[1 << 20] * len(made.maps))
    assert len(asked) == len(made.maps) == 7
    for call, box in zip(asked, made.maps):
        rows, heads = (300, 2) if box.array in ("k", "v", "dk", "dv") else (500, 8)
        assert call["at"] == 1 << 20
        assert call["shape"] == [64, 2**30, heads, rows + 1, 2**30 + 1]
        row, head, entry, back = call["strides"]
        assert (row, head, entry) == (1024, 128, 1024)
        assert call["box"] == [64, box.rows, 1, 1, 1]
        for first, end in ((0, 1), (7, 7), (rows - 3, rows)):  # row `first` of a sequence that ends there
            assert ((2**30 - (end - first)) * row + end * entry + 2**30 * back) % 2**64 == first * 1024


def test_rows_that_no_window_reaches() -> None:
    """Rows of packed arrays that lie too far apart are copied; so many that a place among them is none are refused."""
    offsets = tuple(Given(f"cu_seqlens_{side}", "int32", ("offset",)) for side in "qk")
    given = problem("bfloat16", 64, batch=9, heads_q=8, heads_k=8, seq_q=2, seq_k=2, rows_q=2, rows_k=2, given=offsets)
    arch = Arch.of("sm_90a")
    made = plan(given, arch, family="sm90")
    for row, far in ((2**33 - 8, False), (2**33, True), (2**33 + 8, True)):  # elements
        view = View((2, 8, 64), (row, 64, 1), "bfloat16", "cuda:0", "cupy")
        copy = to_copy("k", view, given, 4, made, False)
        assert (copy is not None) == far
        if copy is not None:
            assert copy.why == f"TMA of Hopper takes strides of 1 to 2**34 bytes, not {2 * row}"
    for of in (FORWARD, BACKWARD):
        for side in "qk":
            rows = {f"seq_{side}": 2**30 + 1, f"rows_{side}": 2**30 + 1}
            assert FAMILIES["sm90"].objection(replace(given, **{name: 2**30 for name in rows}), arch, of) is None
            why = FAMILIES["sm90"].objection(replace(given, **rows), arch, of)
            assert why == "takes packed arrays of up to 1073741824 rows"


def test_columns_rows_heads_batches(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_forward_cost, "by_seconds", lambda *_: ())  # a tile whose rows and keys are many
    parameter = pointed(maps(), *AT)
    assert [call["at"] for call in asked] == list(AT)
    assert {call["dtype"] for call in asked} == {"BFLOAT16"}
    assert [call["shape"] for call in asked] == [[64, 500, 8, 1], [64, 300, 2, 1], [128, 300, 2, 1], [128, 500, 8, 1]]
    # bytes between rows and between heads; that between batches says nothing where there is one
    assert [call["strides"][:2] for call in asked] == [[2048, 128], [256, 128], [512, 256], [2048, 256]]
    assert [call["box"] for call in asked] == [[64, rows, 1, 1] for rows in (128, 128, 128, 64)]
    for call in asked:
        assert call["rest"][:2] == ["CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B"]
        assert call["rest"][3] == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in call["strides"])
    assert parameter[:512] == b"".join(bytes([n]) * 128 for n in (1, 2, 3, 4))
    assert int.from_bytes(parameter[512:], "little") == 1 and len(parameter) == 576


def test_boxes_of_several_heads(asked: list[dict[str, Any]]) -> None:
    """Few queries: a box of Q has all of those of many heads, also of more than there are."""
    pointed(maps(seq_q=5, batch=10), *AT)
    assert [call["shape"] for call in asked] == [[64, 5, 8, 10], [64, 300, 2, 10], [128, 300, 2, 10], [128, 5, 8, 10]]
    assert [call["box"] for call in asked] == [[64, 8, 16, 1], [64, 128, 1, 1], [64, 128, 1, 1], [64, 64, 1, 1]]


def test_strides_between_batches(asked: list[dict[str, Any]]) -> None:
    pointed(maps(STRIDES | {"k": (40_000, 128, 64)}, batch=3), *AT)
    assert [call["strides"][2] for call in asked] == [1_400_000, 80_000, 160_000, 1_600_000]


def test_encoded_once_and_moved(asked: list[dict[str, Any]]) -> None:
    made = maps(diagonal=-100, left=5, right=10)
    first = pointed(made, *AT)
    assert pointed(made, *AT) == first and len(asked) == 4
    second = pointed(made, 0x5000, *AT[1:])  # that array's alone
    assert asked[4:] == [{"moved": 0x5000 + 90 * 2048}] and second == bytes([255] * 128) + first[128:]
    assert pointed(made, 0x5000, *AT[1:3], 0x4008) == second[:-64] + bytes(64) and len(asked) == 5  # no map is of that
    assert pointed(made, 0x5000, *AT[1:]) == second and len(asked) == 5


def test_more_of_them_like_one(asked: list[dict[str, Any]]) -> None:
    """What lies where it did is copied."""
    made = maps()
    first = pointed(made, *AT)
    other = tensormap.PlacedMaps(made._maps, made)
    assert pointed(other, *AT[:2], 0x9000, AT[3]) == first[:256] + bytes([255] * 128) + first[384:]
    assert asked[4:] == [{"moved": 0x9000}] and bytes(made.memory) == first


def test_an_output_that_is_at_a_place_for_a_map_later(asked: list[dict[str, Any]]) -> None:
    made = maps()
    assert pointed(made, *AT[:3], 0x4008)[384:] == bytes(192) and len(asked) == 3
    whole = b"".join(bytes([n]) * 128 for n in (1, 2, 3, 4))
    assert pointed(made, *AT) == whole + (1).to_bytes(64, "little") and len(asked) == 4


def test_a_map_that_the_driver_does_not_move(asked: list[dict[str, Any]]) -> None:
    made = maps()
    pointed(made, *AT)
    with pytest.raises(RuntimeError, match=r"cannot move TMA's description of an array to 0xbad0 \(CUDA_ERROR_INVALID"):
        pointed(made, AT[0], 0xBAD0, *AT[2:])


@pytest.mark.parametrize(
    "dtype, out_dtype, of",
    [
        ("float16", None, FORWARD),
        ("float16", None, BACKWARD),
        ("float8_e4m3fn", None, FORWARD),
        ("float8_e4m3fn", "bfloat16", FORWARD),
    ],
)
def test_outputs_have_maps_only_where_their_rows_end_at_16_bytes(
    asked: list[dict[str, Any]], dtype: str, out_dtype: str | None, of: Pass
) -> None:
    """TMA cuts a store there, not at an element: it would write what follows a row that ends in between."""
    strides = dict.fromkeys(("q", "k", "v", "dout", "dk", "dv", "dq", "out"), (256_000, 512, 256))
    seen = set()
    for dims in ((x, y) for n in range(1, 257) for x, y in ((n, 64), (64, n))):
        given = problem(dtype, *dims, batch=2, heads_q=2, heads_k=2, seq_q=500, seq_k=60, out_dtype=out_dtype)
        chosen = plan(given, Arch.of("sm_90a"), of, "sm90")
        columns = {"dk": dims[0], "dq": dims[0], "dv": dims[1], "out": dims[1]}
        written = {box.array for box in chosen.maps} & columns.keys()
        whole = all(columns[name] * ITEMSIZE[out_dtype or dtype] % 16 == 0 for name in written)
        placed = tensormap.PlacedMaps(tensormap.Maps(chosen, given, strides))
        parameter = pointed(placed, *[0x1000] * len(chosen.maps))
        assert int.from_bytes(parameter[-64:], "little") == whole, dims
        asked.clear()
        seen |= {(name, whole) for name in written}
    assert seen == {
        (name, whole) for name in (("dk", "dv", "dq") if of is BACKWARD else ("out",)) for whole in (False, True)
    }


@pytest.mark.parametrize("out", [(800_000, -1024, 128), (800_000, 1023, 128), (800_000, 1024, 0)])
def test_an_output_that_no_map_can_tell(asked: list[dict[str, Any]], out: tuple[int, ...]) -> None:
    for made, at in ((maps(STRIDES | {"out": out}), AT), (maps(), (*AT[:3], 0x4008))):
        parameter = pointed(made, *at)
        assert parameter[384:] == bytes(192)
    assert len(asked) == 6


def test_a_refusal_of_the_driver(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(
        RuntimeError, match=r"cannot describe an array of shape \(64, 500, 8, 1\).*0xbad0.*INVALID_VALUE"
    ):
        pointed(maps(), 0xBAD0, *AT[1:])
