"""A score function, and a block mask, as data: made before, or read from a file, they are checked as the raw
ones are."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import numpy as np
import pytest

from cupyflash import BlockMask, attention, attention_backward, explain
from cupyflash.gpu.score import text
from cupyflash.problem import ARRAYS, MaskKind
from cupyflash.score import Score, ScoreArray, trace, where
from cupyflash.score.graph import Node


def _biased(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + where(table[h, i - j] > 0, table[h, i - j], 3)


def _traced(dtype: str = "float32", rank: int = 2, name: str = "table") -> Score:
    index = ", ".join("i" * rank)
    return trace(f"s + {name}[{index}]", {name: (dtype, rank, False)})


@pytest.mark.parametrize(("score", "arrays", "error", "message"), [
    (_traced(), {"table": np.ones((4, 4), bool)}, TypeError,
        r"score_arrays\['table'\] is of bool .* traced for float32 and 2"),
    (_traced(), {"table": np.ones(4, np.float32)}, TypeError, r"score_arrays\['table'\] is of float32 and 1 dim"),
    (_traced(), {"other": np.ones((4, 4), np.float32)}, ValueError, "holds 'other', but score was traced for 'table'"),
    (_traced(), {}, ValueError, "score_arrays holds nothing, but score was traced for 'table'"),
    (trace("2 * s", {}), {"table": np.ones(4, np.float32)}, ValueError,
        "holds 'table', but score was traced for nothing"),
])  # fmt: skip
def test_a_score_that_was_traced_for_other_arrays(
    score: Score, arrays: dict[str, Any], error: type[Exception], message: str, rng: np.random.Generator
) -> None:
    """Kernels would read, and write gradients, by a type and a number of dimensions that the arrays do not have."""
    x = rng.standard_normal((1, 4, 1, 16), np.float32)
    with pytest.raises(error, match=message):
        attention(x, x, x, score=score, score_arrays=arrays)
    with pytest.raises(error, match=message):
        attention_backward(x, x, x, x, x, x[..., 0, 0], score=score, score_arrays=arrays)
    with pytest.raises(error, match=message):
        explain(x, x, x, score=score, score_arrays=arrays, arch="sm_80")


def test_a_score_that_was_traced_for_these_arrays(rng: np.random.Generator) -> None:
    x, table = rng.standard_normal((1, 4, 1, 16), np.float32), rng.standard_normal((1, 4), np.float32)
    score = trace(_biased, {"table": ("float32", 2, False)})
    expected = attention(x, x, x, score=_biased, score_arrays={"table": table})
    assert np.array_equal(attention(x, x, x, score=score, score_arrays={"table": table}), expected)
    wide = trace(score, {"table": ("float32", 2, True)})
    assert wide.arrays[0].wide and not score.arrays[0].wide and wide.data == score.data
    assert "* int(" in text(score) and "* int(" not in text(wide)


def _changed(n: int, **fields: Any) -> str:
    """The data of a score whose n-th operation is another."""
    arrays, nodes, root = json.loads(trace(_biased, {"table": ("float32", 2, False)}).data)
    nodes[n] = list(Node(*nodes[n])._replace(**fields))
    return json.dumps([arrays, nodes, root])


_NODES = trace(_biased, {"table": ("float32", 2, False)}).nodes
_AT = {node.op: n for n, node in enumerate(_NODES)}
_WHOLE = trace("s + (i << 3)", {}).data
_CODE = '0LL); asm volatile("trap;"); int z = int(0'


@pytest.mark.parametrize("data", [
    _WHOLE.replace('"3"', json.dumps(_CODE)),
    *(_WHOLE.replace('"3"', json.dumps(x)) for x in ("03", " 3", "3.0", "0x3", "1_0", "", str(2**31), "nan", "True")),
    *(_changed(_AT["const"], value=x) for x in (_CODE, "1e5", "0.", "0.10", "Infinity", "1" * 5000)),
    *(_changed(_AT["const"], kind=x) for x in ("bool", "int", "long", "Accum", 3, None)),
    *(_changed(_AT["read"], value=x) for x in ("1", "-1", "00", _CODE, 0)),
    *(_changed(_AT["read"], kind=x) for x in ("int", "bool")),
    *(_changed(_AT["read"], args=x) for x in ([], [_AT["h"]], [_AT["h"], _AT["s"]], [_AT["h"]] * 3, [_AT["h"], 99],
        [_AT["h"], -1])),
    *(_changed(_AT["sub"], op=x) for x in (_CODE, "neg", "exp", "lt", "where", "read", "const", "asm", 1, None, [])),
    *(_changed(_AT["sub"], args=x) for x in ([_AT["i"]], [_AT["i"], _AT["s"]], [_AT["i"], _AT["sub"]], [True, True],
        "ij", 3)),
    *(_changed(_AT["sub"], kind=x) for x in ("long", "float", "bool")),
    _changed(_AT["sub"], value=_CODE),
    *(_changed(_AT["where"], args=x) for x in ([_AT["s"]] * 3, [_AT["lt"], _AT["s"], _AT["i"]])),
    _changed(_AT["s"], kind="int"), _changed(_AT["i"], args=[0]), _changed(_AT["i"], value="0"),
    *(json.dumps([x, _NODES, len(_NODES) - 1]) for x in (
        [], [["table", "float32", 1]], [["table", "float32", 9]], [["table", "float32", True]], [["table", "int8", 2]],
        [["table", "const float* x; int", 2]], [["a b", "float32", 2]], [[3, "float32", 2]],
        [["table", "float32", 2]] * 2,
    )),
    *(json.dumps([[["table", "float32", 2]], _NODES, x]) for x in (len(_NODES), -1, 0.0, True, None, "0", _AT["i"])),
    "", "{}", "[]", "3", "[[], [[]], 0]", "[" * 100_000,
])  # fmt: skip
def test_data_that_no_trace_gives(data: str) -> None:
    """It lies in exported programs, and kernels are written from it."""
    wide = (False,) * data.count('"table", "') if data != _WHOLE else ()
    with pytest.raises(ValueError, match="score "):
        Score.of(data, wide)


def test_a_score_made_by_hand_is_checked_too() -> None:
    score = trace("s + 3 * i", {})
    nodes = tuple(node._replace(value=_CODE) if node.value == "3" else node for node in score.nodes)
    with pytest.raises(ValueError, match="score has .*asm volatile.* as operation"):
        Score((), nodes, score.root)
    with pytest.raises(ValueError, match="score has .*asm volatile.* as operation"):
        dataclasses.replace(score, nodes=nodes)
    with pytest.raises(ValueError, match="called 'x; y'"):
        Score((ScoreArray("x; y", "float32", 1),), score.nodes, score.root)


def test_data_is_that_of_the_score() -> None:
    score = trace(_biased, {"table": ("float32", 2, False)})
    assert Score.of(score.data, (False,)) == score
    with pytest.raises(ValueError, match="score reads 1 arrays, but 2 are given"):
        Score.of(score.data, (False, False))
    ends = trace(lambda s, b, h, i, j: s + where(i > -(2**63), -(2**31), 2**63 - 1) + float("-inf") + 1e-300, {})
    assert Score.of(ends.data, ()) == ends
    assert "(-9223372036854775807LL - 1)" in text(ends)  # C has no literal for it


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    importlib.import_module("cupyflash.interop.torch_operators")
    return torch


@pytest.mark.parametrize("wrt", [
    ["table"], ["score_arrays['ids']"], ["bias"], ["q"], ["score_arrays['table']"] * 2, ["asm"],
])  # fmt: skip
def test_gradients_that_an_operator_is_asked_for(wrt: list[str]) -> None:
    """The arguments of an exported program may be any."""
    torch = _torch()
    from cupyflash import torch as cupyflash_torch  # noqa: F401  # which defines the operators

    x, ids = torch.ones(1, 4, 1, 16), torch.zeros(4, dtype=torch.int64)
    score = trace("s + table[h, i] + ids[j]", {"table": ("float32", 2, False), "ids": ("int64", 1, False)})
    names = [row.name for row in ARRAYS]
    rest = ["", None, None, None, score.data, None, None, None, 0.0, None, 1.0, *LAST]
    given = [x, x, torch.ones(1, 1, 4), None, x, x, x, *[None] * len(names), [torch.ones(1, 4), ids], [None], *rest]
    grads = torch.ops.cupyflash.attention_backward(*given, ["score_arrays['table']"])
    assert [tuple(g.shape) for g in grads] == [(1, 4, 1, 16)] * 3 + [(1, 4)]
    with pytest.raises(ValueError, match="wrt is"):
        torch.ops.cupyflash.attention_backward(*given, wrt)


LAST = ("bshd", None, None, False, None, False, None, False)  # of an operator: layout, hints of lengths, ... check


@pytest.mark.parametrize(("slots", "bits", "message"), [
    ([[5]], (1, 16, 1), "slots from 5 to 5; they must number 1 blocks"),
    ([[-3]], (1, 16, 1), "slots from -3 to -3"),
    ([[0]], (0, 16, 1), "slots from 0 to 0; they must number 0 blocks"),
    ([[0, 0]], (1, 16, 1), r"slots of int32 and shape \(1, 1, 1, 2\)"),
    ([[0]], (1, 8, 1), r"bits of uint16 and shape \(1, 8, 1\)"),
])  # fmt: skip
def test_a_block_mask_made_by_hand(slots: Any, bits: Any, message: str) -> None:
    """Kernels find a block's bits by its number."""
    kind = MaskKind((1, 1, 16, 16), "cpu")
    with pytest.raises(ValueError, match=message):
        BlockMask(kind, (16, 16), np.array([[slots]], np.int32), np.zeros(bits, np.uint16))
    torch = _torch()
    x = torch.ones(1, 16, 1, 16)
    blocks = [torch.tensor([[slots]], dtype=torch.int32), torch.zeros(bits, dtype=torch.int16)]
    rest = ["", None, None, None, None, [1, 1, 16, 16, 16, 16], None, None, 0.0, None, 1.0, *LAST]
    none = [None] * len(ARRAYS)
    with pytest.raises(ValueError, match=message):
        torch.ops.cupyflash.attention(x, x, x, *none, [None], blocks, *rest)
