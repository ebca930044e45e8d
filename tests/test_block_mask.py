"""Block masks: how they are made, the lists that kernels walk by, and attention with them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import CPU, Backend, in_turn, on_pairs_with_scores
from frameworks import framework
from semantics import CONTIGUOUS, check, draw_blocks, draw_inputs

import cupyflash
from cupyflash import BlockMask, attention, attention_backward, block_mask, masks
from cupyflash.blockmask import blocks
from cupyflash.blockmask.tile_lists import ListUse
from cupyflash.problem import MaskKind


def booleans(mask: BlockMask) -> np.ndarray:
    """All pairs of a mask on the CPU."""
    batch, heads, seq_q, seq_k = mask.shape
    seen = np.zeros(mask.shape, bool)
    for b, h in np.ndindex(batch, heads):
        found = mask.pairs(b, h, slice(0, seq_q), slice(0, seq_k))
        seen[b, h] = True if found is None else found
    return seen


def on_the_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def counts(mask: BlockMask) -> tuple[int, ...]:
    """Of full, partial and empty blocks."""
    return tuple(mask.counts().values())


# ---- how they are made ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [128, (16, 48), (64, 32)])
def test_a_function_an_array_and_blocks_say_the_same(block: Any, rng: np.random.Generator) -> None:
    pairs = rng.random((2, 3, 150, 170)) < 0.3
    pairs[0, 1, :64, :64] = True
    pairs[1, :, :, 96:] = False
    from_array = block_mask(pairs, block=block)
    from_function = block_mask(lambda b, h, i, j: pairs[b, h, i, j], shape=pairs.shape, block=block)
    for mask in (from_array, from_function):
        assert (booleans(mask) == pairs).all() and mask.share() == pytest.approx(pairs.mean())
    assert counts(from_array) == counts(from_function)
    rows, keys = (block, block) if isinstance(block, int) else block
    present = rng.random((2, 1, -(-150 // rows), -(-170 // keys))) < 0.5
    wide = present.repeat(rows, 2).repeat(keys, 3)[..., :150, :170]
    assert (booleans(block_mask(pairs, block=block, blocks=present)) == (pairs & wide)).all()
    full = present & (rng.random(present.shape) < 0.5)
    whole = full.repeat(rows, 2).repeat(keys, 3)[..., :150, :170]
    assert (booleans(block_mask(pairs, block=block, blocks=present, full=full)) == (pairs & wide | whole)).all()
    alone = block_mask(blocks=present, shape=(2, 1, 150, 170), block=block)
    assert (booleans(alone) == wide).all() and counts(alone)[1] == 0


def test_numbers_of_blocks() -> None:
    numbers = np.array([[0, -1], [2, 0], [-1, -1]])
    mask = block_mask(blocks=numbers, shape=(40, 48), block=16)
    blocks = np.array([[1, 0, 0], [1, 0, 1], [0, 0, 0]], bool)
    assert (booleans(mask) == blocks.repeat(16, 0).repeat(16, 1)[:40]).all()
    assert counts(mask) == (3, 0, 6)


def test_a_function_is_asked_of_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.blockmask import blocks

    asked = []

    def causal(b: np.ndarray, h: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        asked.append((b.shape, h.shape, i.shape, j.shape))
        return (j <= i) & (b >= 0) & (h >= 0)

    monkeypatch.setattr(blocks, "AT_ONCE", 100_000)
    mask = block_mask(causal, shape=(1, 2, 1000, 1000), block=32)
    assert (booleans(mask) == np.tri(1000, dtype=bool)).all()
    assert len(asked) > 10 and asked[0] == ((1, 1, 1, 1), (2, 1, 1), (32, 1), (1000,))
    monkeypatch.setattr(blocks, "AT_ONCE", 1)  # each head by itself
    assert (booleans(block_mask(causal, shape=(1, 2, 100, 100), block=64)) == np.tri(100, dtype=bool)).all()
    assert asked[-1] == ((1, 1, 1, 1), (1, 1, 1), (36, 1), (100,))


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_a_function_gets_arrays_of_the_library_of_like(library: str, on_gpu: bool) -> None:
    found = framework(library, on_gpu)
    if found is None:
        pytest.skip(f"no {library} here")
    with found.library.session():
        ids, like, tri = (
            found.library.put(x, CONTIGUOUS) for x in (np.arange(64) // 20, np.ones(2), np.tri(40, dtype=bool))
        )

        def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
            assert type(i) is type(ids)
            return (ids[i] == ids[j]) & (j <= i)

        mask = block_mask(documents, shape=(64, 64), block=16, like=like)
        same = block_mask(masks.documents(ids) & masks.causal(), shape=(64, 64), block=16, like=like)
        i = np.arange(64)
        use, want = USES[0], ((i[:, None] // 20 == i // 20) & (i <= i[:, None]))[None, None]
        for x in (mask, same):
            assert_list_says(on_the_host(x.list_for(use)), use, want)
        of_array = block_mask(tri, block=16, like=like)
        assert_list_says(on_the_host(of_array.list_for(use)), use, np.tri(40, dtype=bool)[None, None])


def test_memory_is_that_of_blocks_and_bits() -> None:
    ids = np.repeat(np.arange(8), 1024)
    mask = block_mask(masks.causal() & masks.documents(ids), shape=(8192, 8192))
    assert counts(mask) == (8 * 28, 64, 64 * 64 - 8 * 36)
    mask.list_for(ListUse("key_lists", 128, 128, "queries"))
    mask.list_for(ListUse("query_lists", 64, 128, "keys"))
    assert mask.nbytes < 8192 * 8192 / 8 / 10
    assert repr(mask) == "<BlockMask (1, 1, 8192, 8192) on cpu, blocks of 128 x 128: 224 full, 64 partial, 3,808 empty>"


def test_patterns() -> None:
    i, j = np.arange(90)[:, None], np.arange(120)[None]
    ids = np.arange(120) // 37
    block: dict[str, Any] = {"seq_q": 90, "seq_k": 120, "block": 16}
    patterns: dict[str, tuple[masks.Pattern, np.ndarray]] = {
        "causal": (masks.causal(), j <= i),
        "causal-at-the-end": (masks.causal(30), j <= i + 30),
        "window": (masks.window(9), abs(i - j) <= 9),
        "window-of-two-sides": (masks.window(9, 0, diagonal=30), (j <= i + 30) & (j >= i + 21)),
        "prefix-lm": (masks.prefix(20) | masks.causal(), (j < 20) | (j <= i)),
        "documents": (masks.documents(ids[:90], ids), ids[:90, None] == ids),
        "dilated": (masks.dilated(3, 4), (abs(i - j) <= 12) & (abs(i - j) % 4 == 0)),
        "strided": (masks.strided(8), (j <= i) & ((i - j < 8) | ((i - j) % 8 == 0))),
        "not": (~masks.causal() & masks.prefix(50), (j > i) & (j < 50)),
        "bigbird": (
            masks.bigbird(**block, random=0, around=1, globally=1),
            (abs(i // 16 - j // 16) <= 1) | (i // 16 < 1) | (j // 16 < 1),
        ),
    }
    for name, (pattern, want) in patterns.items():
        assert (booleans(block_mask(pattern, shape=(90, 120), block=32))[0, 0] == want).all(), name
    few, many = (
        booleans(block_mask(masks.bigbird(**block, random=n), shape=(90, 120), block=16))[0, 0] for n in (0, 2)
    )
    more = (many & ~few)[::16, ::16].sum(1)
    assert not (few & ~many).any() and (more == [0, 2, 2, 2, 2, 2]).all()
    again = booleans(block_mask(masks.bigbird(**block, random=2, seed=1), shape=(90, 120), block=16))[0, 0]
    assert (again != many).any()


def test_patterns_of_batch_entries() -> None:
    ids = np.array([[0] * 30 + [1] * 34, [0] * 10 + [1] * 54])
    mask = block_mask(masks.documents(ids) | masks.prefix([3, 7]), shape=(2, 1, 64, 64), block=16)
    j = np.arange(64)
    want = (ids[:, :, None] == ids[:, None]) | (j < np.array([3, 7])[:, None, None])
    assert (booleans(mask)[:, 0] == want).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: block_mask(masks.causal()), TypeError, "shape is None; it must be"),
        (lambda: block_mask(masks.causal(), shape=(1, 2, 3)), ValueError, r"shape is \(1, 2, 3\); it must be"),
        (lambda: block_mask(masks.causal(), shape=7), ValueError, "shape is 7; it must be"),
        (lambda: block_mask(shape=(9, 9)), ValueError, "neither source nor blocks is given"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), full=np.ones((1, 1), bool)), ValueError,
            "full is given without"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), block=24), ValueError,
            "block is 24; it must be a multiple of 16 up to 32768"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), block=1 << 16), ValueError, "block is 65536; it must"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), block=(16, 0)), ValueError, r"block is \(16, 0\); it must"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), block="big"), ValueError, "block is 'big'; it must"),
        (lambda: block_mask(np.ones((9, 9))), TypeError, "source has dtype float64; it must be bool"),
        (lambda: block_mask([[True]]), TypeError, "source is a list; it must be an array"),
        (lambda: block_mask(np.ones((2, 9), bool), shape=(9, 9)), ValueError,
            r"source has shape \(2, 9\); it must broadc"),
        (lambda: block_mask(lambda b, h, i, j: i - j, shape=(9, 9)), TypeError, "what source returns has dtype int64"),
        (lambda: block_mask(lambda b, h, i, j: i[:4] > j, shape=(9, 9)), ValueError,
            r"source returns shape \(4, 9\) for"),
        (lambda: block_mask(blocks=np.ones((2, 2), bool), shape=(9, 9)), ValueError,
            r"blocks has shape \(2, 2\); it must"),
        (lambda: block_mask(blocks=np.ones((1, 1)), shape=(9, 9)), TypeError,
            "blocks has dtype float64; it must be bool, or"),
        (lambda: block_mask(blocks=np.array([[1]]), shape=(9, 9)), ValueError,
            "blocks holds 1 to 1; it must be from -1"),
        (lambda: block_mask(blocks=np.zeros((3, 1), int), shape=(9, 9)), ValueError,
            r"blocks has shape \(3, 1\); as numbers"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), device="tpu"), ValueError,
            "device is 'tpu'; it must be 'cpu' or"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), like=3), TypeError, "like is a int; it must be an array"),
        (lambda: block_mask(masks.causal(), shape=(9, 9), like=np.ones(1), device="cpu"), ValueError,
            "like and device="),
        (lambda: block_mask(lambda b, h, i: i, shape=(9, 9)), TypeError,
            r"source is <function .*; it must be a function of"),
        (lambda: block_mask(masks.causal, shape=(9, 9)), TypeError, r"must be a function of \(b, h, i, j\): call it"),
        (lambda: block_mask(masks.documents([1, 2]), shape=(9, 9)), ValueError,
            "ids is for 2 queries; shape is .* for 9"),
        (lambda: block_mask(masks.documents([1] * 9, [1, 2]), shape=(9, 9)), ValueError, "keys is for 2 keys; shape"),
        (lambda: block_mask(~masks.documents([[1] * 9] * 2), shape=(9, 9)), ValueError,
            "ids is for 2 batch entries; shape"),
        (lambda: block_mask(masks.causal() | masks.prefix([3, 4]), shape=(9, 9)), ValueError,
            "length is for 2 batch entr"),
        (lambda: block_mask(masks.bigbird(8) & masks.causal(), shape=(9, 9)), ValueError,
            "seq_q is for 8 queries; shape"),
        (lambda: masks.window(-1), ValueError, "left is -1; it must be 0 or more"),
        (lambda: masks.window(None), TypeError, "left is None; it must be an integer"),
        (lambda: masks.causal(0.5), TypeError, "diagonal is 0.5; it must be an integer"),
        (lambda: masks.window(True, False), TypeError, "left is True; it must be an integer"),
        (lambda: masks.strided("8"), TypeError, "stride is '8'; it must be an integer"),
        (lambda: masks.prefix("a"), TypeError,
            "length is 'a'; it must be an integer, or an array with one for each batch entry"),
        (lambda: masks.documents({1}), TypeError, "ids is .1.; it must be an array of integers"),
        (lambda: block_mask(lambda b, h, i, j: (i > j) and (h == 0), shape=(9, 9)), TypeError,
            r"source asks for one truth \(if, and, or, not\)"),
        (lambda: masks.documents(np.ones(3)), TypeError, "ids has dtype float64; it must be an array of integers"),
        (lambda: masks.documents(3), ValueError, r"ids has shape \(\); it must be"),
        (lambda: masks.prefix([[1]]), ValueError, r"length has shape \(1, 1\); it must be"),
        (lambda: masks.strided(0), ValueError, "stride is 0; it must be 1 or more"),
        (lambda: masks.dilated(3, -1), ValueError, "step is -1; it must be 1 or more"),
    ],
)  # fmt: skip
def test_messages_of_making(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_arrays_on_another_device_are_refused() -> None:
    """Also what a function returns; arrays on the CPU are copied to a GPU."""
    cupy = pytest.importorskip("cupy")

    def on(ordinal: int) -> Any:  # an array that nobody reads
        memory = cupy.cuda.UnownedMemory(1 << 40, 81, None, ordinal)
        return cupy.ndarray((9, 9), bool, cupy.cuda.MemoryPointer(memory, 0))

    here = np.ones((9, 9), bool)
    for name, call in (
        ("source", lambda: block_mask(on(0), like=here)),
        ("what source returns", lambda: block_mask(lambda b, h, i, j: on(0), shape=(9, 9))),
        ("blocks", lambda: block_mask(here, blocks=on(0))),
        ("full", lambda: block_mask(here, blocks=np.ones((1, 1), bool), full=on(0))),
    ):
        with pytest.raises(ValueError, match=f"^{name} is on cuda:0; it must be on cpu, as the mask is$"):
            call()
    gpu: Any = SimpleNamespace(asarray=lambda x: x, cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=1)))
    for x in (on(1), here):
        assert blocks._taken(gpu, "source", x) is x
    with pytest.raises(ValueError, match="^source is on cuda:0; it must be on cuda:1, as the mask is, or on cpu$"):
        blocks._taken(gpu, "source", on(0))


def test_arrays_that_jax_traces_are_refused() -> None:
    jax = pytest.importorskip("jax")
    seen = jax.numpy.ones((9, 9), bool)
    for name, function in (
        ("like", lambda x: block_mask(masks.causal(), shape=(9, 9), like=x)),
        ("source", lambda x: block_mask(x)),
        ("blocks", lambda x: block_mask(blocks=x[:1, :1], shape=(9, 9))),
    ):
        with pytest.raises(
            TypeError, match=f"^{name} is traced by JAX; it must be an array: make the mask outside jit"
        ):
            jax.jit(function)(seen)


def test_messages_of_calls() -> None:
    x = np.ones((2, 40, 4, 8), np.float32)
    wanted = r"it must be \(2, 4, 40, 40\), \(batch, head, query, key\), where batch and head may be 1"
    for shape in ((40, 41), (41, 40), (2, 3, 40, 40), (4, 1, 40, 40)):
        mask = block_mask(masks.causal(), shape=shape)
        with pytest.raises(ValueError, match="block_mask has shape .*; " + wanted):
            attention(x, x, x, block_mask=mask)
    with pytest.raises(
        TypeError, match="block_mask is a numpy.ndarray; it must be what cupyflash.block_mask made, or None"
    ):
        attention(x, x, x, block_mask=np.ones((40, 40), bool))
    mask = block_mask(masks.causal(), shape=(40, 40))
    mask.kind = MaskKind(mask.shape, "cuda:0")
    with pytest.raises(ValueError, match="block_mask is on cuda:0 but q is on cpu; make it with like=q"):
        attention(x, x, x, block_mask=mask)


def test_explain_tells() -> None:
    mask = block_mask(masks.causal(), shape=(256, 256), block=64)
    table = str(cupyflash.explain((1, 256, 2, 64), dtype="bf16", arch="sm_90a", block_mask=mask))
    assert "block mask" in table and "6 full, 4 partial, 6 empty" in table


# ---- the lists that kernels walk by ---------------------------------------------------------------------------------

USES = [
    ListUse("key_lists", 128, 128, "queries"),
    ListUse("key_lists", 64, 96, None),
    ListUse("key_lists", 192, 80, "queries"),
    ListUse("query_lists", 64, 128, "keys"),
    ListUse("query_lists", 80, 48, "keys"),
    ListUse("query_lists", 32, 64, "queries"),
]


def assert_list_says(found: np.ndarray, use: ListUse, seen: np.ndarray) -> None:
    """By the format that kernels read. A tile is there if some pair is visible, and has bits if some is hidden."""
    batch, heads, *seq = seen.shape
    grid = [-(-n // size) for n, size in zip(seq, use[1:3])]
    padded = np.zeros((batch, heads, grid[0] * use.queries, grid[1] * use.keys), bool)
    inside = padded.copy()
    padded[:, :, : seq[0], : seq[1]], inside[:, :, : seq[0], : seq[1]] = seen, True
    own = grid[use.name == "query_lists"]
    lists = batch * heads
    begins, order = found[: lists * own + 1], found[lists * own + 1 : 2 * lists * own + 1].reshape(lists, own)
    visits = found[2 * lists * own + 1 :]
    number = np.diff(begins).reshape(lists, own)
    assert (np.sort(order, axis=1) == np.arange(own)).all()
    assert (np.diff(np.take_along_axis(number, order, 1), axis=1) <= 0).all()  # most visits first
    for n in range(lists * own):
        of, tile = divmod(n, own)
        listed = visits[2 * begins[n] : 2 * begins[n + 1]].reshape(-1, 2)
        at = {int(other): int(where) for other, where in listed}
        assert list(at) == sorted(at)
        for other in range(grid[use.name == "key_lists"]):
            row, column = (tile, other) if use.name == "key_lists" else (other, tile)
            part = slice(row * use.queries, (row + 1) * use.queries), slice(column * use.keys, (column + 1) * use.keys)
            want, real = (x[divmod(of, heads)][part] for x in (padded, inside))
            assert (other in at) == want.any()
            if use.bits is None or other not in at:
                continue
            assert (at[other] < 0) == (want == real).all()
            if at[other] >= 0:
                bits = found[at[other] :][: use.queries * use.keys // 32].view(np.uint8)
                bits = np.unpackbits(bits, bitorder="little").astype(bool)
                shown = bits.reshape(use.queries, -1) if use.bits == "queries" else bits.reshape(use.keys, -1).T
                assert (shown[real] == want[real]).all()


# ---- attention ------------------------------------------------------------------------------------------------------


@on_pairs_with_scores
def test_random_blocks(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    for seq, block, axes in (((300, 430), (128, 128), "bh"), ((193, 265), (48, 80), "h"), ((150, 140), (64, 16), "")):
        blocks = draw_blocks(rng, (2, 4, *seq), block, axes)
        check(backend, draw_inputs(rng, dtype, seq=seq, heads=(4, 2)), blocks=blocks)


@in_turn("options", [{"causal": True}, {"causal": True, "deterministic": True}, {"window": (40, 9)}], softcap=1.0)
def test_in_a_band(backend: Backend, dtype: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    for seq, block in (((300, 430), (64, 64)), ((265, 150), (128, 48))):
        blocks = draw_blocks(rng, (2, 4, *seq), block)
        check(backend, draw_inputs(rng, dtype, seq=seq, heads=(4, 2), key_mask=True), blocks=blocks, **options)


@in_turn("dims", [(128, 128), (192, 128), (256, 256)], softcap=1.0)
def test_head_dimensions(backend: Backend, dtype: str, dims: tuple[int, int], rng: np.random.Generator) -> None:
    for deterministic in (False, True):
        blocks = draw_blocks(rng, (2, 2, 200, 330), (64, 128), "b")
        inputs = draw_inputs(rng, dtype, seq=(200, 330), heads=(2, 1), dims=dims)
        check(backend, inputs, blocks=blocks, deterministic=deterministic)


@on_pairs_with_scores
def test_beside_everything_else(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    given = ("mask", "bias", "alibi_slopes", "sinks")
    blocks = draw_blocks(rng, (2, 4, 130, 150), (32, 64))
    inputs = draw_inputs(rng, dtype, seq=(130, 150), heads=(4, 2), given=given, key_mask=True)
    check(backend, inputs, blocks=blocks, softcap=2.0, causal=True)


@on_pairs_with_scores
def test_nothing_is_seen(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    blocks = draw_blocks(rng, (2, 4, 150, 140), (64, 64), "")
    blocks.seen[...] = False
    check(backend, draw_inputs(rng, dtype, seq=(150, 140), heads=(4, 2)), blocks=blocks)


@pytest.mark.parametrize("shape", [(0, 9), (9, 0)])
def test_no_queries_or_keys(shape: tuple[int, int]) -> None:
    q, k = np.ones((1, shape[0], 1, 8), np.float32), np.ones((1, shape[1], 1, 8), np.float32)
    out, lse = attention(q, k, k, block_mask=block_mask(masks.causal(), shape=shape), return_lse=True)
    assert out.shape == q.shape and not out.any() and np.isneginf(lse).all()
    assert [
        x.shape for x in attention_backward(out, q, k, k, out, lse, block_mask=block_mask(masks.causal(), shape=shape))
    ]


def test_another_pattern_of_the_same_kind(rng: np.random.Generator) -> None:
    """What is kept of a call is not the pattern."""
    inputs = draw_inputs(rng, "float32", seq=(150, 140))
    for _ in range(2):
        check(CPU, inputs, blocks=draw_blocks(rng, (2, 2, 150, 140), (64, 64)))


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_frameworks(library: str, on_gpu: bool, rng: np.random.Generator) -> None:
    """Through autograd, and with the mask made where the arrays are."""
    found = framework(library, on_gpu)
    if found is None:
        pytest.skip(f"no {library} here")
    for recorded in (False, True):
        found.check(
            draw_inputs(rng, "float32", heads=(4, 2)), rank=4, layout="bshd", lay=CONTIGUOUS, deterministic=False,
            family=None,
            recorded=recorded, blocks=draw_blocks(rng, (2, 4, 67, 93), (16, 32)), causal=True,
        )  # fmt: skip


def test_patterns_have_no_truth_value() -> None:
    for wrong in (
        lambda: not masks.causal(),
        lambda: masks.causal() and masks.prefix(3),
        lambda: masks.causal() or masks.prefix(3),
    ):
        with pytest.raises(TypeError, match="^a pattern has no truth value; combine patterns by &, | and ~"):
            wrong()


def test_what_patterns_are_combined_with() -> None:
    for other, told in (
        (np.ones((3, 3), bool), "a ndarray at &"), (True, "a bool at &"),
        (masks.prefix, r"masks\.prefix, which is to be called at &"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"^a pattern stands beside {told}; it must be a pattern or a function"):
            masks.causal() & other  # type: ignore[operator]
    for both in (masks.causal() & (lambda b, h, i, j: j > 2), (lambda b, h, i, j: j > 2) & masks.causal()):
        assert block_mask(both, shape=(16, 16)).share() == sum(max(0, i - 2) for i in range(16)) / 256


# ---- what stands at the edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(150, 170), (128, 64), (65, 63), (1, 1)])
def test_the_share_is_of_pairs_that_are_there(shape: tuple[int, int]) -> None:
    """Blocks at the ends hold fewer."""
    for pairs in (np.ones((1, 1, *shape), bool), np.tri(*shape, dtype=bool)[None, None]):
        assert block_mask(pairs, block=64).share() == pytest.approx(pairs.mean(), abs=1e-12)


def test_a_full_block_that_is_not_there_is_not_seen(rng: np.random.Generator) -> None:
    there = np.array([[[[True, False], [False, True]]]])
    full = np.array([[[[True, True], [False, False]]]])  # one of them is not in `blocks`
    pairs = rng.random((1, 1, 64, 64)) < 0.5
    mask = block_mask(pairs, block=32, blocks=there, full=full)
    seen = np.zeros((1, 1, 64, 64), bool)
    seen[..., :32, :32], seen[..., 32:, 32:] = True, pairs[..., 32:, 32:]
    assert (booleans(mask) == seen).all()


@pytest.mark.parametrize(
    ("ids", "keys", "message"),
    [
        ((3, 5), (5,), "ids is .* 3"), ((5,), (3, 5), "keys is .* 3"), ((2, 5), (3, 5), "keys is .* 3"),
        ((3, 5), (2, 5), "ids is .* 3"),
    ],
    ids=str,
)  # fmt: skip
def test_documents_of_another_batch_are_refused(ids: tuple[int, ...], keys: tuple[int, ...], message: str) -> None:
    pattern = masks.documents(np.zeros(ids, int), keys=np.zeros(keys, int))
    with pytest.raises(ValueError, match=".") as error:
        block_mask(pattern, shape=(2, 1, 5, 5), block=16)
    assert message.split()[0] in str(error.value) and "3" in str(error.value) and "2" in str(error.value)


@pytest.mark.parametrize("kinds", ["full", "partial", "empty"])
def test_explain_tells_what_share_is_computed(kinds: str) -> None:
    """By the blocks that hold nothing, beside which no other share is told."""
    pairs = np.zeros((1, 1, 64, 64), bool)
    pairs[..., :32, :32] = kinds == "full"
    pairs[..., 0, 0] |= kinds == "partial"
    pairs[..., 32:, 32:] = True
    mask = block_mask(pairs, block=32)
    table = str(cupyflash.explain((1, 64, 2, 64), dtype="bf16", arch="sm_90a", block_mask=mask))
    assert f"; the empty ones, {75 if kinds == 'empty' else 50}.0% of them, cost nothing" in table
    assert "\nFLOPs        at most 2.097 MFLOP" in table and "% of the scores are computed" not in table
