"""flex_attention and what its functions capture: integers of every width, and tensors that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from cupyflash.torch import flex as of_flex
from cupyflash.torch import flex_attention

N = 12
_RNG = np.random.default_rng(0)
_DRAWN = {
    x: torch.from_numpy(_RNG.integers(np.iinfo(x).min, np.iinfo(x).max, N, x, endpoint=True))
    for x in ("int8", "uint8", "int16", "int32", "int64")
}
INT8, UINT8, INT16, INT32, INT64 = _DRAWN.values()
ODD = torch.arange(N) % 2 == 1

INTEGERS: dict[str, tuple[Callable[..., Any], float]] = {  # of q_idx and kv_idx, and what makes it about 1
    "int8 +": (lambda i, j: INT8[i] + INT8[j], 100),
    "int8 *": (lambda i, j: INT8[i] * INT8[j], 100),
    "int8 <<": (lambda i, j: INT8[j] << 2, 100),
    "int8 << i": (lambda i, j: INT8[j] << i, 100),
    "int8 //": (lambda i, j: INT8[j] // (INT8[i] | 1), 100),
    "int8 clamp": (lambda i, j: (INT8[j] * 3).clamp(-5, 100), 100),
    "int8 * int16": (lambda i, j: INT8[i] * INT16[j], 20000),
    "int8 * uint8": (lambda i, j: INT8[i] * UINT8[j], 20000),
    "uint8 -": (lambda i, j: UINT8[i] - UINT8[j], 100),
    "uint8 *": (lambda i, j: UINT8[i] * UINT8[j], 100),
    "uint8 - 200": (lambda i, j: UINT8[j] - 200, 100),
    "uint8 neg": (lambda i, j: -UINT8[j], 100),
    "uint8 not": (lambda i, j: ~UINT8[j], 100),
    "uint8 >>": (lambda i, j: (UINT8[i] + UINT8[j]) >> 2, 10),
    "uint8 <": (lambda i, j: torch.where(UINT8[i] - UINT8[j] > 100, 1.0, 0.0), 1),
    "uint8 == -1": (lambda i, j: torch.where(UINT8[j] == UINT8[0] - 256, 1.0, 0.0) + (UINT8[j] >= -100), 1),
    "uint8 % -3": (lambda i, j: UINT8[j] % -3 + UINT8[i] // -3, 100),
    "int8 % 200": (lambda i, j: INT8[j] % 200 + INT8[i] // 200, 100),
    "uint8 max": (lambda i, j: torch.maximum(-UINT8[i], UINT8[j]), 100),
    "uint8 sign": (lambda i, j: torch.sign(UINT8[j] - 128), 2),
    "int16 *": (lambda i, j: INT16[i] * INT16[j], 20000),
    "int32 +": (lambda i, j: INT32[i] + INT32[j], 1e9),
    "int32 *": (lambda i, j: INT32[i] * INT32[j], 1e9),
    "int32 neg": (lambda i, j: -INT32[j] - 1, 1e9),
    "int32 * 2**31": (lambda i, j: INT32[j] * 2**31, 1e9),
    "int32 + 2**31": (lambda i, j: INT32[j] + 2**31, 1e9),
    "int32 ** 9": (lambda i, j: INT32[j] ** 9, 1e9),
    "int32 //": (lambda i, j: INT32[j] * 3 // 7, 1e8),
    "int32 <<": (lambda i, j: INT32[j] << 5, 1e9),
    "int64 *": (lambda i, j: INT64[i] * INT64[j], 1e18),
    "int64 of where": (lambda i, j: torch.where(ODD[j], 1, 70000) * 100000 * 100000, 1e15),
    "int64 of bool": (lambda i, j: (i > j) * 2000000000 * 3, 1e9),
    "int64 of bool +": (lambda i, j: (i > j) + 2147483647, 1e9),
    "to int8": (lambda i, j: INT32[j].to(torch.int8), 100),
    "to uint8": (lambda i, j: INT32[j].to(torch.uint8), 100),
    "to int16": (lambda i, j: INT32[j].to(torch.int16), 20000),
    "to int32": (lambda i, j: INT64[j].to(torch.int32) * 3, 1e9),
    "bool to int8": (lambda i, j: ODD[i].to(torch.int8) * 100 + ODD[j] * 100, 100),
    "index": (lambda i, j: torch.arange(256)[(UINT8[i] + UINT8[j]).int()], 100),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_wrap_as_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, N, 16, dtype=torch.float64)
    i, j = torch.arange(N, dtype=torch.int32)[:, None], torch.arange(N, dtype=torch.int32)
    function, unit = INTEGERS[name]
    s = q @ k.mT / 4 + function(i.expand(N, N), j.expand(N, N)).double() / unit
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s + function(i, j).double() / unit)
    torch.testing.assert_close(found, s.softmax(-1) @ v, atol=1e-12, rtol=0)


class Counted:
    """A tensor's holder, of which nothing is known."""

    def __init__(self, x: Any) -> None:
        self.x = x


def _cases() -> dict[str, tuple[Callable[..., Any], Callable[[], None]]]:
    """Mask functions, and what changes what they give."""
    length, other, held, bound = torch.tensor(20), torch.tensor(20), Counted(torch.tensor(20)), 20
    table, inner = torch.arange(32) < 20, torch.tensor(20)

    def rebind() -> None:
        nonlocal other
        other = torch.tensor(5)

    def number() -> None:
        nonlocal bound
        bound = 5

    return {
        "in place": (lambda b, h, i, j: j < length, lambda: length.fill_(5)),
        "an element": (lambda b, h, i, j: table[j], lambda: table.__setitem__(slice(5, None), False)),
        "another tensor": (lambda b, h, i, j: j < other, rebind),
        "its memory": (lambda b, h, i, j: j < inner, lambda: setattr(inner, "data", torch.tensor(5))),
        "of an object": (lambda b, h, i, j: j < held.x, lambda: held.x.fill_(5)),
        "another of an object": (lambda b, h, i, j: j < held.x, lambda: setattr(held, "x", torch.tensor(5))),
        "a number": (lambda b, h, i, j: j < bound, number),
        "combined": (flex.and_masks(lambda b, h, i, j: j < length, lambda b, h, i, j: i >= 0), lambda: length.fill_(5)),
    }


@pytest.mark.parametrize("name", list(_cases()))
def test_partial_blocks_follow_what_a_mask_captures(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 32, 16, dtype=torch.float64)
    mask_mod, change = _cases()[name]
    mask = flex.create_block_mask(mask_mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=32)
    for seen in (20, 5):
        for _ in range(2):
            expected = (q @ k[:, :, :seen].mT / 4).softmax(-1) @ v[:, :, :seen]
            torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, atol=1e-12, rtol=0)
        change()


def test_lists_that_change() -> None:
    q, k, v = torch.randn(3, 1, 1, 64, 16, dtype=torch.float64)
    mask = flex.create_block_mask(lambda b, h, i, j: j >= 0, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    flex_attention(q, k, v, block_mask=mask)
    mask.full_kv_num_blocks.fill_(1)
    seen = mask.full_kv_indices[0, 0, 0, 0].item() * 32
    expected = (q @ k[:, :, seen : seen + 32].mT / 4).softmax(-1) @ v[:, :, seen : seen + 32]
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_does_not_change_is_converted_once(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], of_flex._made
    monkeypatch.setattr(of_flex, "_made", lambda *x: made.append(1) or make(*x))
    with torch.inference_mode(inference):
        ids = torch.arange(64) // 20
        documents = flex.and_masks(lambda b, h, i, j: ids[i] == ids[j], lambda b, h, i, j: i >= j)
        mask = flex.create_block_mask(documents, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
        x = torch.randn(1, 1, 64, 16)
        for _ in range(3):
            flex_attention(x, x, x, block_mask=mask)
    assert len(made) == 1


TABLE, WEIGHTS = torch.from_numpy(_RNG.normal(size=(N, 3))), torch.from_numpy(_RNG.normal(size=3))
ROWS: dict[str, Callable[..., Any]] = {
    "dot": lambda s, b, h, i, j: s + (TABLE[i] * TABLE[j]).sum(),
    "matmul": lambda s, b, h, i, j: s + TABLE[i] @ TABLE[j],
    "distance": lambda s, b, h, i, j: s - (((TABLE[i] - TABLE[j]) ** 2).sum(-1) + 0.1).sqrt(),
    "mean": lambda s, b, h, i, j: s * TABLE[i].mean() + TABLE[j].mean(0),
    "largest": lambda s, b, h, i, j: s + (TABLE[i] * TABLE[j]).amax() - TABLE[j].amin(-1),
    "by a row for all": lambda s, b, h, i, j: s + (TABLE[i] * s * WEIGHTS).tanh().sum(),
    "kept": lambda s, b, h, i, j: s + (TABLE[i] / TABLE[j].abs().sum(-1, keepdim=True)).sum(),
    "booleans": lambda s, b, h, i, j: s + (TABLE[i] > TABLE[j]).sum() + torch.where(TABLE[i] > 0, TABLE[j], 0.5).sum(),
    "a number": lambda s, b, h, i, j: s.sum() + 1,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    """What is computed of a row is what PyTorch computes of it."""
    q, k, v = (torch.from_numpy(_RNG.normal(size=(1, 2, N, 4))) for _ in range(3))
    expected = flex.flex_attention(q, k, v, score_mod=ROWS[name])
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=ROWS[name]), expected)


def test_gradients_of_rows() -> None:
    q, k, v, dout = (torch.from_numpy(_RNG.normal(size=(1, 2, N, 4))) for _ in range(4))
    table = TABLE.clone().requires_grad_()
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (table[i] * table[j]).sum())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=table @ table.T)
    for found, same in zip(torch.autograd.grad(out, table, dout), torch.autograd.grad(expected, table, dout)):
        torch.testing.assert_close(found, same)


@pytest.mark.parametrize(
    ("score_mod", "message"),
    [
        (lambda s, b, h, i, j: s + TABLE[i], "returns 3 numbers; it must return the new score"),
        (lambda s, b, h, i, j: s + (torch.zeros(N, 65)[i] * s).sum(), r"or rows of up to 64 numbers"),
        (
            lambda s, b, h, i, j: s + (torch.zeros(2, N, 3)[h] * s).sum(),
            r"shape \(2, 12, 3\) .*\[h, i\], or rows",
        ),
        (lambda s, b, h, i, j: s + TABLE[i].prod(), r"aten\.prod.* sum, mean, amax, amin and dot of rows"),
    ],
)
def test_of_rows_that_are_refused(score_mod: Callable[..., Any], message: str) -> None:
    q = torch.zeros(1, 2, N, 4)
    with pytest.raises((TypeError, NotImplementedError), match=message):
        flex_attention(q, q, q, score_mod=score_mod)
