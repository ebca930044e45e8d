"""The forward of 8 bits through every library that has such arrays, on the CPU and on a GPU: each option, layout and
scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import no_gpu
from float8_problems import BY, check, library
from score_functions import WRITTEN
from semantics import LAYS, draw_blocks, draw_inputs

from cupyflash.gpu import device

SCORES = ("mask", "bias", "alibi_slopes", "sinks")
EIGHT = "float8_e4m3fn"

# What `draw_inputs` and `check` are given; "blocks" as `draw_blocks` has it, and "score" the name of one of WRITTEN.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"seq": (200, 150)},
    "group": {"seq": (200, 300), "heads": (4, 2), "dims": (128, 128), "causal": True},
    "by number": {"seq": (200, 300), "dims": (96, 96), "by": "number", "result": "float16"},
    "by head": {"seq": (130, 260), "heads": (3, 1), "dims": (192, 128), "by": "head", "causal": True},
    "by block": {"seq": (300, 400), "heads": (4, 2), "dims": (128, 128), "by": "block"},
    "by block, causal": {"seq": (300, 400), "dims": (128, 96), "by": "block", "causal": True, "result": "float16"},
    "wide": {"seq": (150, 330), "heads": (4, 2), "dims": (256, 256), "by": "block", "softcap": 2.0, "causal": True},
    "wide, full": {"seq": (150, 330), "dims": (256, 256)},
    "odd": {"seq": (70, 150), "dims": (90, 33), "window": (20, 5), "key_mask": True},
    "narrow": {"seq": (70, 150), "dims": (1, 7), "by": "head"},
    "192": {"seq": (130, 200), "dims": (192, 192), "causal": "top_left"},
    "8 bits out": {"seq": (130, 260), "dims": (128, 64), "by": "head", "result": EIGHT, "out_scale": 30.0},
    "8 bits out, odd": {"seq": (130, 60), "dims": (64, 37), "result": EIGHT, "out_scale": 100.0, "causal": True},
    "everything": {
        "seq": (150, 260), "heads": (4, 2), "dims": (64, 40), "by": "block", "given": (*SCORES, "seed"),
        "window": (50, 9),
        "key_mask": True, "softcap": 8.0, "dropout": 0.2, "blocks": ((32, 48), "bh"),
    },
    "mask": {"seq": (150, 260), "given": ("mask",), "full": "qk"},
    "bias": {"seq": (150, 260), "dims": (128, 128), "given": ("bias",), "by": "block"},
    "slopes": {"seq": (150, 260), "given": ("alibi_slopes",), "causal": True, "by": "head"},
    "sinks": {"seq": (150, 260), "given": ("sinks",)},
    "score": {"seq": (150, 260), "dims": (128, 128), "score": "relative", "by": "block"},
    "block mask": {"seq": (300, 400), "dims": (128, 128), "blocks": ((128, 128), ""), "causal": True},
    "dropout": {"seq": (150, 260), "heads": (4, 2), "by": "block", "given": ("seed",), "dropout": 0.3},
    "negative scale": {"seq": (150, 260), "scale": -0.2, "by": "block"},
    "few queries": {"batch": 20, "seq": (5, 150), "heads": (12, 2), "causal": True},
    "one query": {"batch": 24, "seq": (1, 300), "heads": (10, 2), "by": "head"},
    "short": {"batch": 70, "seq": (49, 49), "heads": (4, 4), "by": "number"},
    "rows without keys": {"seq": (300, 100), "causal": True, "by": "block"},
    "many tiles": {"seq": (520, 800), "heads": (4, 1), "dims": (128, 128), "causal": True, "by": "block"},
    "heads first": {"seq": (200, 300), "heads": (4, 2), "layout": "bhsd", "by": "block"},
    "no batch": {"batch": 1, "seq": (200, 300), "heads": (4, 2), "rank": 3, "by": "block"},
    "no heads": {"batch": 1, "seq": (200, 300), "heads": (1, 1), "rank": 2, "by": "block"},
    "no queries": {"seq": (0, 300), "by": "head"},
    "no keys": {"seq": (200, 0), "by": "head"},
    "no batch entries": {"batch": 0, "seq": (20, 30)},
}  # fmt: skip
SHAPES = ("batch", "seq", "heads", "dims", "given", "full", "key_mask", "score")
COUNTED = pytest.mark.gpu(of=f"sm90/{EIGHT}")
LIBRARIES = [
    pytest.param(name, on_gpu, id=f"{name}-{'gpu' if on_gpu else 'cpu'}", marks=[COUNTED] * on_gpu)
    for name, on_gpu in (("numpy", False), ("torch", False), ("jax", False), ("torch", True), ("jax", True))
]
in_libraries = pytest.mark.parametrize(("name", "on_gpu"), LIBRARIES)


def taken(name: str, on_gpu: bool) -> Any:
    """The library; skipped where there is none, or a GPU without kernels for 8 bits."""
    found = library(name, on_gpu)
    if found is None:
        pytest.skip(f"no {name} on this device")
    if on_gpu and device.current(0).cc != 90:
        pytest.skip("kernels for 8 bits are Hopper's")
    return found


@in_libraries
@pytest.mark.parametrize("case", CASES)
def test_every_option(case: str, name: str, on_gpu: bool, rng: np.random.Generator) -> None:
    lib, options = taken(name, on_gpu), dict(CASES[case])
    inputs = draw_inputs(rng, "float32", **{key: options.pop(key) for key in SHAPES if key in options})
    if written := CASES[case].get("score"):
        options["score"] = WRITTEN[written].function
    if blocks := options.pop("blocks", None):
        shape = (*inputs.q.shape[::2][:2], inputs.q.shape[1], inputs.k.shape[1])
        options["blocks"] = draw_blocks(rng, shape, *blocks)
    check(lib, rng, inputs, **options)


@in_libraries
@pytest.mark.parametrize("lay", LAYS)
def test_strides(lay: str, name: str, on_gpu: bool, rng: np.random.Generator) -> None:
    if name == "jax":
        pytest.skip("its arrays lie in one way")
    lib, result = taken(name, on_gpu), ("bfloat16", EIGHT)[list(LAYS).index(lay) % 2]
    for dims in ((64, 64), (59, 51)):
        inputs = draw_inputs(rng, "float32", seq=(70, 150), heads=(4, 2), dims=dims)
        check(lib, rng, inputs, by="block", lay=LAYS[lay], result=result)


@in_libraries
@pytest.mark.parametrize("by", BY)
def test_inputs_that_hurt(by: str | None, name: str, on_gpu: bool, rng: np.random.Generator) -> None:
    """One key that takes nearly all, scores of several hundred, a number in a thousand that is ten times as large."""
    lib = taken(name, on_gpu)
    inputs = draw_inputs(rng, "float32", seq=(200, 500), heads=(2, 1))
    far = inputs._replace(k=inputs.k.copy())
    far.k[:, 77] *= 8
    check(lib, rng, far, by=by)
    check(lib, rng, inputs, by=by, scale=4.0, causal=True)
    outliers = [x * np.where(rng.random(x.shape) < 1e-3, 10, 1).astype(np.float32) for x in inputs[:3]]
    check(lib, rng, inputs._replace(q=outliers[0], k=outliers[1], v=outliers[2]), by=by)


@in_libraries
@pytest.mark.parametrize("causal", [False, True])
def test_maxima_that_grow_in_some_rows(causal: bool, name: str, on_gpu: bool, rng: np.random.Generator) -> None:
    """Towards the first key, which is visited last, in every other row; the others have seen their largest."""
    inputs = draw_inputs(rng, "float32", batch=1, seq=(64, 3000), heads=(1, 1))
    inputs.q[..., :2], inputs.k[..., :2] = 0, 1
    inputs.q[:, ::2, :, 0] = inputs.q[:, 1::2, :, 1] = 16
    inputs.k[..., 0] = np.repeat(np.linspace(400, 16, 24), 125)[None, :, None]  # exact numbers of 8 bits or not
    inputs.k[:, :-128, :, 1], inputs.k[:, -128:, :, 1] = -16, 256
    check(taken(name, on_gpu), rng, inputs, scale=0.02, causal=causal)


@in_libraries
def test_scales_of_zero(name: str, on_gpu: bool, rng: np.random.Generator) -> None:
    """Every score is 0 then; and a row of zeros has a scale, too."""
    lib = taken(name, on_gpu)
    inputs = draw_inputs(rng, "float32", seq=(150, 260))
    check(lib, rng, inputs, scale=0.0)
    check(lib, rng, inputs._replace(q=np.zeros_like(inputs.q), k=np.zeros_like(inputs.k)), by="block", causal=True)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_vmap_of_scales_by_block(name: str, rank: int, rng: np.random.Generator) -> None:
    """Of a call without batch or heads, for arrays that are mapped and one that is not."""
    library = pytest.importorskip(name)
    from cupyflash import attention
    from cupyflash.float8 import quantize

    array, vmap = (library.from_numpy, library.func.vmap) if name == "torch" else (library.numpy.asarray, library.vmap)
    shape = (200, 2, 16) if rank == 3 else (200, 16)
    entries = [[quantize(array(rng.standard_normal(shape, np.float32))) for _ in "qkv"] for _ in range(3)]
    stack = library.stack if name == "torch" else library.numpy.stack
    given = [stack([pair[n] for pair in same]) for n in (0, 1) for same in zip(*entries)]

    def call(q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> Any:
        return attention(q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)

    every, but_one = vmap(call)(*given), vmap(call, (0, 0, 0, 0, None, 0))(*given[:4], given[4][0], given[5])
    for n in range(3):
        one = [x[n] for x in given]
        assert (every[n] == call(*one)).all()
        assert (but_one[n] == call(*one[:4], given[4][0], one[5])).all()


@pytest.mark.gpu
def test_the_same_bits_in_every_run(rng: np.random.Generator) -> None:
    """Many tiles for each block, which it takes in an order that differs from run to run."""
    torch = pytest.importorskip("torch")
    taken("torch", True)
    from cupyflash import attention
    from cupyflash.float8 import quantize

    for batch, seq, dim, causal in (
        (16, 1000, 64, True), (16, 1000, 128, True), (16, 1000, 128, False), (16, 1000, 256, True),
        (1, 7000, 64, True), (1, 7000, 128, False), (1, 7000, 256, True),
    ):  # fmt: skip
        pairs = [quantize(torch.randn((batch, seq, 4, dim), device="cuda")) for _ in range(3)]
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), [scale for _, scale in pairs]))
        inputs = [x for x, _ in pairs]
        first = attention(*inputs, causal=causal, return_lse=True, **scales)
        for _ in range(100):
            again = attention(*inputs, causal=causal, return_lse=True, **scales)
            assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_over_many_keys(dims: tuple[int, int], causal: bool) -> None:
    """Of values that are 1 the mean is; one sum of tensor cores over so many would be a third of it."""
    torch = pytest.importorskip("torch")
    taken("torch", True)
    from cupyflash import attention

    generator = torch.Generator("cuda").manual_seed(5)
    q, k = (torch.randn(1, n, 2, dims[0], device="cuda", generator=generator) for n in (300, 100_000))
    v = torch.ones(1, 100_000, 2, dims[1], device="cuda")
    for scale in (0.0, None):
        out = attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), causal=causal, scale=scale).float()
        assert 0.96 <= float(out.min()) and float(out.max()) <= 1.005


@pytest.mark.gpu
def test_in_a_cuda_graph(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    taken("torch", True)
    from cupyflash import attention

    first, second = (
        [torch.randn((2, 300, 4, 128), device="cuda").to(torch.float8_e4m3fn) for _ in "qkv"] for _ in "ab"
    )
    expected = attention(*second, causal=True)
    attention(*first, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*first, causal=True)
    for x, y in zip(first, second):
        x.copy_(y)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.skipif(no_gpu() is not None, reason="no GPU")
def test_other_gpus_say_so() -> None:
    torch = pytest.importorskip("torch")
    if device.current(0).cc == 90:
        pytest.skip("Hopper has kernels for 8 bits")
    from cupyflash import attention

    x = torch.zeros((1, 16, 1, 64), device="cuda").to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no kernel family takes this problem: sm90 is for compute capability 9.0"):
        attention(x, x, x)
