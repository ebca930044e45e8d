"""Dropout of probabilities: which are dropped, what the others become, and the gradients, on every backend that has it.

The reference has a Philox of its own (tests/reference.py), an element at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend, in_turn, on_pairs_with_scores
from reference import DTYPES, kept, philox, state
from semantics import LAYS, check, draw_blocks, draw_inputs

from cupyflash import attention, attention_backward, explain
from cupyflash.cpu import dropout as on_cpu
from cupyflash.gpu.params import round_keys

SCORES = ("mask", "bias", "alibi_slopes", "sinks", "seed")

# From the authors' Random123, for 10 rounds: (counter, key, result).
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)  # fmt: skip


@pytest.mark.parametrize("generator", [philox, on_cpu.philox])
def test_known_answers(generator: Any) -> None:
    for counter, key, result in KNOWN:
        assert tuple(int(x) for x in generator(counter, key, 10)) == result


def test_seven_rounds(rng: np.random.Generator) -> None:
    """As the authors' table of what passes BigCrush has them: the first rounds of ten."""
    counter, key = rng.integers(0, 2**32, (4, 50)), tuple(int(x) for x in rng.integers(0, 2**32, 2))
    for ours, theirs in zip(on_cpu.philox(tuple(counter), key), philox(list(counter), key, 7)):
        np.testing.assert_array_equal(ours, theirs)
    pairs = [(x % 2**32, x >> 32) for x in round_keys(key[0] | key[1] << 32)]
    assert pairs[0] == key and len(pairs) == on_cpu.ROUNDS
    assert pairs[6] == ((key[0] + 6 * 0x9E3779B9) % 2**32, (key[1] + 6 * 0xBB67AE85) % 2**32)


def seen_in_forward(backend: Backend, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> np.ndarray:
    """(B, H, Sq, Sk): which probabilities are not 0. All scores are 0, and columns of V show a key each."""
    batch, seq_q, seq_k, heads, dim = shape
    q, k = (backend.put(np.zeros((batch, n, heads, dim), DTYPES[dtype])) for n in (seq_q, seq_k))
    seen = np.empty((batch, heads, seq_q, seq_k), bool)
    for first in range(0, seq_k, dim):
        v = np.eye(seq_k, dim, -first).astype(DTYPES[dtype])
        v = backend.put(np.broadcast_to(v[None, :, None], (batch, seq_k, heads, dim)))
        out = backend.get(attention(q, k, v, family=backend.family, **options)).astype(np.float64)
        part = out.transpose(0, 2, 1, 3)[..., : seq_k - first]
        seen[..., first : first + dim] = part != 0
        np.testing.assert_allclose(part[part != 0] * seq_k * (1 - round(options["dropout"] * 2**16) / 2**16), 1, 0.01)
    return seen


def seen_in_backward(backend: Backend, dtype: str, shape: tuple[int, ...], options: dict[str, Any]) -> np.ndarray:
    """The same from dV, where columns of dO show a query each."""
    batch, seq_q, seq_k, heads, dim = shape
    q, k, v = (backend.put(np.zeros((batch, n, heads, dim), DTYPES[dtype])) for n in (seq_q, seq_k, seq_k))
    out, lse = attention(q, k, v, return_lse=True, family=backend.family, **options)
    seen = np.empty((batch, heads, seq_q, seq_k), bool)
    for first in range(0, seq_q, dim):
        dout = np.eye(seq_q, dim, -first).astype(DTYPES[dtype])
        dout = backend.put(np.broadcast_to(dout[None, :, None], (batch, seq_q, heads, dim)))
        dv = backend.get(attention_backward(dout, q, k, v, out, lse, family=backend.family, **options)[2])
        part = dv.transpose(0, 2, 3, 1)[:, :, : seq_q - first] != 0
        seen[:, :, first : first + dim] = part
    return seen


@in_turn("dims", [(64, 64), (128, 128), (256, 256)], softcap=1.0)
def test_the_same_ones_everywhere(
    backend: Backend, dtype: str, dims: tuple[int, int], rng: np.random.Generator
) -> None:
    """Bit for bit, forward and backward."""
    shape = 2, 203, 331, 3, dims[0]
    options = {"dropout": float(rng.uniform(0.05, 0.95)), "seed": int(rng.integers(0, 2**63))}
    q, k = (np.zeros((2, n, 3, 8), np.float32) for n in shape[1:3])
    expected = kept(state(q, k, k, dropout=options["dropout"]), {"seed": np.array(options["seed"])})
    np.testing.assert_array_equal(seen_in_forward(backend, dtype, shape, options), expected)
    np.testing.assert_array_equal(seen_in_backward(backend, dtype, shape, options), expected)


@on_pairs_with_scores
def test_against_the_reference(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    for seq in ((67, 93), (193, 65), (300, 400)):
        inputs = draw_inputs(rng, dtype, seq=seq, heads=(4, 2), given=("seed",), dlse=1.0)
        check(backend, inputs, dropout=float(rng.uniform(0.05, 0.6)))


@in_turn("band", [{"causal": True}, {"window": (13, 70)}], softcap=1.0)
def test_with_everything_else(backend: Backend, dtype: str, band: dict[str, Any], rng: np.random.Generator) -> None:
    for seq in ((67, 93), (193, 130)):
        inputs = draw_inputs(rng, dtype, seq=seq, heads=(4, 2), given=SCORES, key_mask=True)
        check(backend, inputs, dropout=0.3, softcap=2.0, deterministic=seq[0] > 100, **band)


@in_turn("given", [("seed",), SCORES], softcap=1.0)
def test_under_a_block_mask(backend: Backend, dtype: str, given: tuple[str, ...], rng: np.random.Generator) -> None:
    """Whose visits, bits and order say nothing about which are dropped."""
    inputs = draw_inputs(rng, dtype, seq=(193, 310), heads=(4, 2), dims=(128, 64), given=given)
    blocks = draw_blocks(rng, (2, 4, 193, 310), (64, 48), "h")
    check(backend, inputs, dropout=0.3, window=(200, 90), blocks=blocks)


@in_turn("dims", [(256, 256), (128, 128), (192, 128), (33, 80)], softcap=1.0)
def test_head_dimensions(backend: Backend, dtype: str, dims: tuple[int, int], rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, seq=(150, 140), heads=(4, 2), dims=dims, given=("seed",))
    check(backend, inputs, dropout=0.3, causal=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@on_pairs_with_scores
def test_ranks_and_layouts(backend: Backend, dtype: str, rank: int, layout: str, rng: np.random.Generator) -> None:
    batch, heads = (2 if rank == 4 else 1), ((1, 1) if rank == 2 else (4, 2))
    inputs = draw_inputs(rng, dtype, batch=batch, heads=heads, seq=(67, 130), given=("seed",))
    check(backend, inputs, rank=rank, layout=layout, dropout=0.3)


@on_pairs_with_scores
def test_strides(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    inputs = draw_inputs(rng, dtype, heads=(4, 2), given=("seed",))
    check(backend, inputs, lay=LAYS["slices-of-a-larger-array"], dropout=0.3)


@on_pairs_with_scores
def test_few_queries_of_heads_that_share_keys(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Heads that would share a tile without dropout."""
    inputs = draw_inputs(rng, dtype, batch=24, seq=(5, 77), heads=(16, 2), given=("seed",))
    check(backend, inputs, dropout=0.3)


@on_pairs_with_scores
def test_seeds_in_memory(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """Of every kind of integer, also negative ones, as if they were numbers."""
    q, k, v, dout = (backend.put(x) for x in draw_inputs(rng, dtype, heads=(4, 2))[:4])

    def run(seed: Any) -> list[np.ndarray]:
        options = {"dropout": 0.3, "seed": seed, "family": backend.family}
        out, lse = attention(q, k, v, return_lse=True, **options)
        return [backend.get(x) for x in (out, lse, *attention_backward(dout, q, k, v, out, lse, **options)[1:])]

    for seed, kind in ((-5, np.int64), (2**64 - 5, np.uint64), (-5, np.int32), (2**32 - 5, np.uint32)):
        expected = run(seed)
        for x, y in zip(run(backend.put(np.full((1, 1), seed, kind))), expected):
            np.testing.assert_array_equal(x, y)
    for x, y in zip(run(5 - 2**64), run(5)):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(run(np.int32(-5)), run(2**64 - 5)):
        np.testing.assert_array_equal(x, y)
    assert (run(6)[0] != expected[0]).any()


@on_pairs_with_scores
def test_none(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """A share that rounds to none, and one of 0, whatever the seed: the bits that there are without."""
    q, k, v = (backend.put(x) for x in draw_inputs(rng, dtype)[:3])
    plain = backend.get(attention(q, k, v, family=backend.family))
    for options in ({"dropout": 1e-9, "seed": 1}, {"dropout": 0, "seed": 1}, {"seed": backend.put(np.array([1]))}):
        np.testing.assert_array_equal(backend.get(attention(q, k, v, family=backend.family, **options)), plain)


@on_pairs_with_scores
def test_nearly_all(backend: Backend, dtype: str, rng: np.random.Generator) -> None:
    """2 of 65536 are left, at least; nothing overflows on the way."""
    q, k, v, dout = (backend.put(x) for x in draw_inputs(rng, dtype, seq=(300, 500), heads=(4, 4))[:4])
    options = {"dropout": 1 - 1e-12, "seed": 3, "family": backend.family}
    out, lse = attention(q, k, v, return_lse=True, **options)
    found = [backend.get(x).astype(np.float64) for x in (out, *attention_backward(dout, q, k, v, out, lse, **options))]
    assert all(np.isfinite(x).all() for x in found)
    rows = found[0].any(-1).mean()  # of 500 keys each
    assert abs(rows - (1 - (1 - 2 / 65536) ** 500)) < 0.02, rows


def test_rates_and_independence() -> None:
    """Of 2^22 decisions, in 5 standard deviations; also between neighbours, heads, entries of the batch, and seeds."""
    size, share = 2048, 0.3
    below = round(share * 2**16)

    def mask(seed: int = 17, batch: int = 1, head: int = 2) -> np.ndarray:
        return on_cpu.kept(seed, batch, head, (0, size), (0, size), below)

    x = mask() - (1 - below / 2**16)
    deviation = (share * (1 - share)) ** 0.5
    assert abs(x.mean()) < 5 * deviation / size
    for axis in (0, 1):
        lines = x.mean(axis) * size**0.5 / deviation
        assert abs(lines).max() < 6 and abs(lines.std() - 1) < 0.1
    for i, j in ((0, 1), (1, 0), (8, 0), (0, 8), (8, 8), (1, 1), (0, 9), (16, 16), (0, 128)):
        products = x[: size - i, : size - j] * x[i:, j:]
        assert abs(products.mean()) < 5 * deviation**2 / size, (i, j)
    for other in (mask(18), mask(17 + 2**32), mask(batch=2), mask(head=3)):
        assert abs((x * (other - (1 - below / 2**16))).mean()) < 5 * deviation**2 / size


def test_the_mean_is_that_without(rng: np.random.Generator) -> None:
    """Over many seeds: what is kept is divided by exactly the share of it."""
    q, k, v = draw_inputs(rng, "float64", batch=1, seq=(8, 300), dims=(8, 8))[:3]
    plain = attention(q, k, v)
    some = np.stack([attention(q, k, v, dropout=0.5, seed=seed) for seed in range(400)])
    error = (some.mean(0) - plain) / (some.std(0) / 20)
    assert abs(error).max() < 6 and abs(error.std() - 1) < 0.3


BAD: list[tuple[dict[str, Any], type, str]] = [
    ({"dropout": 0.1}, ValueError,
        "dropout is 0.1, but seed is not given; it must be an integer, or an array that holds one"),
    ({"dropout": 1.0, "seed": 1}, ValueError,
        "dropout is 1.0; it must be a share of the probabilities, 0 or more and less than 1"),
    ({"dropout": -0.1, "seed": 1}, ValueError, "dropout is -0.1; it must be a share of the probabilities"),
    ({"dropout": float("nan"), "seed": 1}, ValueError, "dropout is nan; it must be finite"),
    ({"dropout": "a", "seed": 1}, TypeError, "dropout is 'a'; it must be a real number"),
    ({"dropout": True, "seed": 1}, TypeError, "dropout is True; it must be a real number"),
    ({"dropout": 0.1, "seed": [1]}, TypeError, r"seed is \[1\]; it must be an integer, or an array that holds one"),
    ({"dropout": 0.1, "seed": 1.5}, TypeError, "seed is 1.5; it must be an integer, or an array that holds one"),
    ({"dropout": 0.1, "seed": True}, TypeError, "seed is True; it must be an integer"),
    ({"seed": "a"}, TypeError, "seed is 'a'; it must be an integer"),
    ({"dropout": 0.1, "seed": 2**64}, ValueError, "seed is 18446744073709551616; it must have 64 bits, from -2"),
    ({"dropout": 0.1, "seed": -(2**64) - 1}, ValueError, "it must have 64 bits"),
    ({"dropout": 0.1, "seed": np.arange(2)}, ValueError, r"seed has shape \(2,\); it must have one element"),
    ({"dropout": 0.1, "seed": np.array(1.0)}, TypeError,
        "seed has dtype float64; it must be int64 or uint64 or int32 or uint32"),
    ({"seed": np.array(1.0)}, TypeError, "seed has dtype float64"),
    ({"dropout": 0.1, "seed": 1, "wrt": "seed"}, ValueError, "wrt holds 'seed', which has no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "says"), BAD, ids=str)
def test_messages(given: dict[str, Any], error: type[Exception], says: str) -> None:
    x = np.zeros((1, 4, 2, 8), np.float32)
    lse = np.zeros((1, 2, 4), np.float32)
    if "wrt" not in given:
        with pytest.raises(error, match=says):
            attention(x, x, x, **given)
    with pytest.raises(error, match=says):
        attention_backward(x, x, x, x, x, lse, **given)


def test_explained() -> None:
    """No seed is needed, and one may be given as a call has it."""
    shape = (2, 1024, 8, 64)
    for seed in ({}, {"seed": 7}, {"seed": (1,)}):
        told = explain(shape, dtype="bfloat16", arch="sm_90a", dropout=0.1, **seed)
        assert told.problem.dropout == 0.1 and told.problem.has("seed") == (seed == {"seed": (1,)})
        assert dict(told.rows())["score"] == "dropout 0.1"
    few = explain((8, 1, 32, 64), (8, 900, 4, 64), dtype="bfloat16", arch="sm_90a", dropout=0.1)
    assert few.tiles["PACK"] == 1


def test_refused_by_flash1() -> None:
    with pytest.raises(ValueError, match="flash1 takes no dropout"):
        explain((2, 64, 8, 64), dtype="float32", arch="sm_80", dropout=0.1, family="flash1")


@pytest.mark.gpu
def test_a_graph_reads_the_seed_when_it_runs() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    seed = torch.tensor([1], device="cuda")
    attention(q, k, v, dropout=0.3, seed=seed)  # compiled before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout=0.3, seed=seed)
    for n in (5, 6):
        seed.fill_(n)
        graph.replay()
        torch.cuda.synchronize()
        # Another kernel, in which the compiler may round otherwise: by a part in some 300. Other ones dropped differ by
        # half.
        right, other = (attention(q, k, v, dropout=0.3, seed=seed).float() for seed in (n, n + 1))
        assert (out - right).norm() < 0.02 * right.norm() < 0.2 * (out - other).norm()
