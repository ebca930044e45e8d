"""Calls on a GPU whose arrays and workspace lie alone, with no memory before or behind them: whoever reads outside ends
the process. (Among others' memory nothing would show, as long as it is not written to.) By test_unmapped.py, which
starts it:

    python tests/unmapped.py sm90 first|last
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from cupyflash import attention, attention_backward, attention_jvp

LENGTHS = 5, 300, 0, 77, 130, 1
DIMS = 64, 128, 256


class Alone:
    """Memory whose pages have no neighbours. `last`: what is asked for ends with them, else it begins there."""

    def __init__(self, last: bool) -> None:
        cupy.zeros(1)  # there is a context
        self.last, self._kept = last, []
        where = driver.CUmemLocation()
        where.type, where.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, cupy.cuda.Device().id
        self._kind = driver.CUmemAllocationProp()
        self._kind.type, self._kind.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
        self._access = driver.CUmemAccessDesc()
        self._access.location = where
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page = asked(driver.cuMemGetAllocationGranularity(self._kind, least))

    def allocate(self, size: int) -> Any:
        """As CuPy asks for memory."""
        pages = max(1, -(-size // self._page)) * self._page
        begin = int(asked(driver.cuMemAddressReserve(pages + 2 * self._page, 0, 0, 0))) + self._page
        handle = asked(driver.cuMemCreate(pages, self._kind, 0))
        asked(driver.cuMemMap(begin, pages, 0, handle, 0))
        asked(driver.cuMemSetAccess(begin, pages, [self._access], 1))
        at = begin + (pages - size) // 16 * 16 if self.last else begin
        self._kept.append(handle)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(begin, pages, self), at - begin)

    def put(self, x: np.ndarray) -> Any:
        made = cupy.ndarray(x.shape, x.dtype, self.allocate(x.nbytes))
        made.set(np.ascontiguousarray(x))
        return made


def asked(answer: tuple[Any, ...]) -> Any:
    code, *rest = answer
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return rest[0] if rest else None


def calls(rng: np.random.Generator) -> list[tuple[str, dict[str, Any], dict[str, Any], bool]]:
    """(name, arrays, options, whether there are gradients)"""

    def draw(*shape: int) -> np.ndarray:
        return (0.5 * rng.standard_normal(shape)).astype(np.float16)

    packed, most = np.cumsum([0, *LENGTHS]).astype(np.int32), np.array(LENGTHS, np.int32)
    rows, found = sum(LENGTHS), []
    for dim in DIMS:
        dense = {"q": draw(2, 150, 4, dim), "k": draw(2, 333, 2, dim), "v": draw(2, 333, 2, dim)}
        found.append((f"dense {dim}", dense, {"causal": True}, True))
        few = {"q": draw(rows, 4, dim), "k": draw(rows, 2, dim), "v": draw(rows, 2, dim)}
        few |= {"cu_seqlens_q": packed, "cu_seqlens_k": packed}
        for causal in (False, True):
            found.append((f"packed {dim}", few, {"causal": causal}, True))
        cache = {"q": draw(6, 2, 4, dim), "k": draw(6, 300, 2, dim), "v": draw(6, 300, 2, dim), "seqlens_k": most}
        found.append((f"cache {dim}", cache, {"causal": True}, False))
        pages = {"q": draw(6, 1, 4, dim), "k": draw(40, 16, 2, dim), "v": draw(40, 16, 2, dim), "seqlens_k": most}
        pages["page_table"] = rng.permutation(40)[:38].astype(np.int32)[None].repeat(6, 0)
        found.append((f"pages {dim}", pages, {}, False))
    return found


def run(
    put: Callable[[np.ndarray], Any], arrays: dict[str, Any], options: dict[str, Any], gradients: bool
) -> list[Any]:
    given = {name: put(x) for name, x in arrays.items()}
    q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
    out = put(np.zeros((*q.shape[:-1], v.shape[-1]), np.float16))
    out, lse = attention(q, k, v, return_lse=True, out=out, **given, **options)
    found = [out, lse]
    if gradients:
        dout, grads = put(arrays["q"]), tuple(put(np.zeros(x.shape, np.float16)) for x in (q, k, v))
        found += attention_backward(dout, q, k, v, out, lse, grads=grads, **given, **options)[:3]
    if gradients and "cu_seqlens_q" not in given:
        moved = {name: put(arrays[name]) for name in "qkv"}
        found += attention_jvp(moved, q, k, v, out, lse, **given, **options)
    return [x.get() for x in found]


def main() -> None:
    family, place = sys.argv[1:]
    alone = Alone(place == "last")
    for name, arrays, options, gradients in calls(np.random.default_rng(1)):
        want = run(cupy.asarray, arrays, options | {"family": family}, gradients)
        with cupy.cuda.using_allocator(alone.allocate):
            found = run(alone.put, arrays, options | {"family": family}, gradients)
        cupy.cuda.Device().synchronize()
        for got, right in zip(found, want, strict=True):
            np.testing.assert_allclose(got, right, rtol=2e-2, atol=2e-2, err_msg=name)
        print(name, options, "right", flush=True)


if __name__ == "__main__":
    main()
