"""How many multiprocessors a call takes at most: `sms`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import Backend, pairs
from reference import DTYPES

from cupyflash import attention, attention_backward, explain, parallel
from cupyflash.gpu.device import Arch
from cupyflash.gpu.kernel_plan import KernelPlan
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD, JVP, Pass
from cupyflash.problem import Given, View, contiguous
from cupyflash.rules import describe

H200, A100 = Arch.of("sm_90a"), Arch.of("sm_80")
LONG = (1, 16384, 16, 128)
FAMILIES = [pytest.param(b, d, id=f"{b.name}-{d}") for b, d in pairs() if b.family in ("sm90", "sm80", "simt")]
CLOSE = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 3e-5, "float64": 1e-11}


def planned(
    shape: tuple[int, ...], of: Pass = FORWARD, keys: tuple[int, ...] | None = None, arch: Arch = H200, **options: Any
) -> KernelPlan:
    q, k = (View(x, contiguous(x), "bfloat16", "cuda:0", "cupy") for x in (shape, keys or shape))
    problem = describe(q, k, k, **options)
    if of is JVP:
        problem = replace(problem, tangents=(Given("q", "bfloat16", ()),))
    return plan(problem, arch, of)


def grid(made: KernelPlan) -> int:
    """Of the launch that computes."""
    return next(x.grid for x in made.launches if x.name == f"attention_{made.of}")


@pytest.mark.parametrize("of", [FORWARD, BACKWARD, JVP], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_persistent_grids_have_no_more_blocks(of: Pass, causal: bool) -> None:
    """And programs of long sequences are the same, and with them the bits."""
    for dim in (64, 128, 256):
        shape = (*LONG[:3], dim)
        all_of_it = planned(shape, of, causal=causal)
        blocks = grid(all_of_it) // H200.sms
        for n in (124, 60):
            made = planned(shape, of, causal=causal, sms=n)
            assert grid(made) <= n * dict(made.constants).get("BLOCKS", 1)
            if n == 124 and of is not JVP:
                assert generate(made) == generate(all_of_it) and grid(made) == blocks * n
        assert planned(shape, of, causal=causal, sms=10_000) == all_of_it
        assert grid(planned(shape, of, causal=causal, sms=1)) <= 2  # a cluster is of two


def test_shares_of_keys_are_for_so_many() -> None:
    for arch, few in ((H200, 40), (A100, 40)):
        asked: dict[str, Any] = {"keys": (1, 65536, 8, 128), "arch": arch}
        every, some = planned((1, 1, 8, 128), **asked), planned((1, 1, 8, 128), sms=few, **asked)
        assert 1 < dict(some.scalars)["shares"] < dict(every.scalars)["shares"]
        assert grid(some) <= 2 * few


def test_blocks_of_others_are_one_for_each_tile() -> None:
    short = (2, 500, 8, 64)
    assert planned(short, arch=A100, sms=3).launches == planned(short, arch=A100).launches


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4", 2**31, [3]])
def test_what_it_must_be(wrong: Any) -> None:
    x = np.ones((1, 4, 1, 8), np.float32)
    with pytest.raises(ValueError, match=r"^sms is .*; it must be None or how many multiprocessors a call takes"):
        attention(x, x, x, sms=wrong)
    with pytest.raises(ValueError, match="^sms is"):
        attention_backward(x, x, x, x, x, np.ones((1, 1, 4), np.float32), sms=wrong)


def test_a_cpu_has_none() -> None:
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 8))
    np.testing.assert_array_equal(attention(x, x, x, sms=np.int64(3)), attention(x, x, x))


def test_explained() -> None:
    found = explain(LONG, dtype="bf16", arch="sm_90a", sms=100)
    assert ("device", "sm_90a, 100 multiprocessors at most") in found.rows() and found.kernels[0].grid == 100
    assert ("device", "sm_90a") in explain(LONG, dtype="bf16", arch="sm_90a").rows()


def test_parts_of_a_sequence_have_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash import dispatch

    seen, run = [], dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda call: (seen.append(call.options.get("sms")), run(call))[1])
    x = np.random.default_rng(0).standard_normal((1, 64, 2, 8))
    rows = parallel.Rows.zigzag(64, 2, multiple=16)

    def work(group: Any) -> None:
        own = rows.take(x, group.rank, axis=1)
        out, lse = parallel.attention(own, own, own, group, rows=rows, causal=True, sms=7, return_lse=True)
        parallel.attention_backward(own, own, own, own, out, lse, group, rows=rows, causal=True, sms=7)

    parallel.simulated(2).run(work)
    assert len(seen) >= 2 and set(seen) == {7}


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dtype"), FAMILIES)
def test_fewer_multiprocessors_compute_the_same(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    shapes = (2, 700, 4, 64), (2, 900, 2, 64), (2, 900, 2, 64), (2, 700, 4, 64)
    q, k, v, dout = (backend.put(rng.standard_normal(x).astype(DTYPES[dtype])) for x in shapes)
    found = []
    for sms in (None, 1, 7, 1000):
        given: dict[str, Any] = {"causal": True, "sms": sms, "family": backend.family}
        out, lse = attention(q, k, v, return_lse=True, **given)
        more = attention_backward(dout, q, k, v, out, lse, **given)
        token = attention(q[:, :1], k, v, sms=sms, family=backend.family)
        found.append([backend.get(x).astype("f8") for x in (out, lse, *more, token)])
    for some in found[1:]:
        for x, y in zip(some, found[0]):
            scale = max(1.0, float(np.abs(y).max()))
            np.testing.assert_allclose(x, y, atol=CLOSE[dtype] * scale)
