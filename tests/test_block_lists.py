"""The lists of a block mask that kernels walk by."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from semantics import draw_blocks
from test_block_mask import USES, assert_list_says

from cupyflash import block_mask, masks
from cupyflash.blockmask import tile_lists
from cupyflash.blockmask.tile_lists import WORD, ListUse


@pytest.mark.parametrize("use", USES, ids=str)
def test_lists(use: ListUse, rng: np.random.Generator) -> None:
    for _ in range(4):
        shape = (*(int(n) for n in rng.integers(1, 3, 2)), *(int(n) for n in rng.integers(1, 400, 2)))
        block = tuple(int(16 * n) for n in rng.integers(1, 9, 2))
        blocks = draw_blocks(rng, shape, block)
        assert_list_says(blocks.mask().list_for(use), use, blocks.seen)
        # Where sequences are shorter than the mask: of what they can have.
        some = tuple(int(rng.integers(1, n + 1)) for n in shape[2:])
        part = use._replace(seq=some)
        assert_list_says(blocks.mask().list_for(part), part, blocks.seen[:, :, : some[0], : some[1]])


def test_what_a_word_is() -> None:
    """Kernels rely on it."""
    assert WORD == 16


def test_lists_are_made_once() -> None:
    mask = block_mask(masks.causal(), shape=(256, 256), block=64)
    assert mask.list_for(USES[0]) is mask.list_for(ListUse(*USES[0])) is not mask.list_for(USES[1])


def test_threads_share_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that is made stays, since a kernel may be reading it already."""
    mask, both = block_mask(masks.causal(), shape=(256, 256), block=64), threading.Barrier(2)
    make = tile_lists.make

    def together(*given: Any) -> Any:
        both.wait(60)
        return make(*given)

    monkeypatch.setattr(tile_lists, "make", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(mask.list_for, [USES[0]] * 2)
    assert first is second is mask.list_for(USES[0])
