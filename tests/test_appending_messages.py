"""What attention_append refuses, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_appending import given, paged

from cupyflash import attention_append, block_mask

F32 = np.float32


SLOTS = {"q": None, "seqlens_k": None}


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_new": None}, TypeError, "^k_new is a NoneType; it must be an array"),
    ({"seqlens_k": None}, ValueError, "^seqlens_k is None; it must be the rows that each sequence has filled"),
    ({"seqlens_k": [2, 6]}, TypeError, "^seqlens_k is a list; it must be an array"),
    ({"seqlens_k": np.array([2.0, 6.0])}, TypeError, "^seqlens_k has dtype float64; it must be int32 or int64"),
    ({"seqlens_k": np.array([2])}, ValueError, "^q has 2 sequences, .* as many as seqlens_k, 1"),
    ({"seqlens_k": np.array([2, 7])}, ValueError, r"^seqlens_k\[1\] is 7, and 3 rows come behind .* room for 9$"),
    ({"seqlens_k": np.array([-1, 6])}, ValueError, r"^seqlens_k\[0\] is -1; it must be 0 or more"),
    ({"seqlens_k": np.array([0, 10])}, ValueError, r"^seqlens_k\[1\] is 10; it must be at most 9, the rows of a cache"),
    ({"k_new": np.zeros((2, 2, 2, 8), F32)}, ValueError,
     r"^k_new has shape \(2, 2, 2, 8\); it must be \(2, 3, 2, 8\), as q and k_cache say"),
    ({"v_new": np.zeros((2, 3, 2, 9), F32)}, ValueError, r"^v_new .* must be \(2, 3, 2, 8\), as q and v_cache say"),
    ({"v_new": np.zeros((2, 3, 2, 8))}, TypeError, "^v_new has dtype float64; it must be that of k_cache, float32"),
    ({"v_cache": np.zeros((2, 8, 2, 8), F32)}, ValueError, r"^v_cache has shape .*; it must be \(2, 9, 2, 8\)"),
    ({"k_cache": np.zeros((9, 2, 8), F32)}, ValueError,
     r"^k_cache has 3 dimensions, shape .* have 4, \(sequences, rows, heads, dim\)"),
    ({"k_cache": np.zeros((2, 9, 2, 8), int), "v_cache": np.zeros((2, 9, 2, 8), int)}, TypeError,
     "^k_cache has dtype int64; it must be one of float16"),
    ({"k_cache": np.zeros((2, 9, 2, 8), np.int8), "v_cache": np.zeros((2, 9, 2, 8), np.int8)}, TypeError,
     "^k_new has dtype float32; beside k_cache of int8 it must be float16 or bfloat16"),
    ({"q": np.zeros((6, 4, 8), F32)}, ValueError,
     r"^q has 3 dimensions, .*; without cu_seqlens_q it must have 4, \(sequences, rows, heads, dim\)"),
    ({"cu_seqlens_q": np.array([0, 3, 6])}, ValueError, r"^q has 4 .*; with cu_seqlens_q it must have 3"),
    ({"q": np.zeros((2, 3, 4, 8))}, TypeError, "^k_cache has dtype float32"),
    ({"bias": np.zeros((4, 9), F32)}, ValueError, r"^bias has shape \(4, 9\); it must be \(2, 4, 3, longest\)"),
    ({"causal": "down"}, ValueError, "^causal is 'down'"),
    ({"dropout": 0.5}, ValueError, "^dropout is 0.5, but seed is not given"),
    ({"softmax_scale": 1.0}, TypeError, "^attention_append.. got .* 'softmax_scale'; here it is scale"),
    ({"cu_seqlens_k": np.array([0, 3, 6])}, TypeError, "^attention_append.. got an unexpected keyword argument"),
    ({"cache_seqlens": 3}, TypeError, "here it is seqlens_k"),
    ({"rotary": np.zeros((9, 4), F32)}, TypeError, r"^rotary is a ndarray; it must be \(cos, sin\)"),
    ({"rotary": (np.zeros((9, 5), F32),) * 2}, ValueError, r"^rotary\[0\] .* half of 1 to 4 for rows of 8 columns"),
    ({"rotary": (np.zeros((9, 4), F32), np.zeros((9, 3), F32))}, ValueError, r"^rotary\[1\] has shape \(9, 3\)"),
    ({"rotary": (np.zeros((9, 4)),) * 2}, TypeError, r"^rotary\[0\] has dtype float64; it must be float32"),
    ({"rotary": (np.zeros((8, 4), F32),) * 2}, ValueError,
     r"^seqlens_k\[1\] is 6, and 3 rows come behind these; rotary has angles for 8$"),
    ({"rotary_interleaved": 1}, TypeError, "^rotary_interleaved is 1; it must be True or False"),
    ({"rotary_interleaved": True}, TypeError, "^rotary_interleaved is True, but rotary is None; it"),
    ({"family": "sm91"}, ValueError, "^family is 'sm91'; it must be one of 'sm90'"),
    ({"family": "sm80"}, ValueError, "^family is 'sm80', a family of GPU kernels, but q is a numpy array on the CPU"),
    ({"key_mask": np.ones((2, 8), bool)}, ValueError,
     r"^seqlens_k\[1\] is 6, and 3 rows come behind these; key_mask is for 8 keys$"),
    ({"key_mask": np.ones((2, 9), bool), "bias": np.zeros((2, 4, 3, 7), F32)}, ValueError, "key_mask or bias is for 7"),
    ({"block_mask": block_mask(np.ones((1, 1, 3, 8), bool), block=16)}, ValueError, "; block_mask is for 8 keys$"),
    ({"q": None, "causal": True}, ValueError, "^causal is given, but q is None"),
    ({"q": None, "return_lse": True}, ValueError, "^return_lse is given, but q is None"),
    ({"slots": np.zeros((2, 3), int)}, ValueError, "^q is given with slots"),
    (SLOTS | {"slots": np.array([[0, 1, 2], [3, 18, 5]])}, ValueError,
     r"^slots\[1, 1\] is 18; it must be a row of k_cache, 0 to 17, or -1"),
    (SLOTS | {"slots": np.array([[0, 1, 2], [3, 1, -1]])}, ValueError, r"^slots\[1, 1\] is 1, as another is"),
    (SLOTS | {"slots": np.array([0, 1, 2])}, ValueError, r"^k_new has shape .*; it must be \(3, 2, 8\), as slots and"),
    (SLOTS | {"slots": np.zeros((2, 3), bool)}, TypeError, "^slots has dtype bool"),
    (SLOTS | {"slots": np.zeros((2, 3), int), "causal": True}, ValueError, "^causal is given with slots"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_told_before_anything_is_written(changes: Any, error: Any, match: str) -> None:
    arguments = given(**changes)
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error, match=match):
        attention_append(**arguments)
    assert all(arguments[name].tobytes() == x for name, x in before.items())


def test_pages_that_rows_cannot_come_to() -> None:
    for table, match in (
        (
            [[0, 1, -1], [2, 3, -1]],
            r"^page_table\[1, 2\] is -1; it must be a page of k_cache, .* seqlens_k\[1\], 6, reach",
        ),
        ([[0, 6, 1], [2, 3, 4]], r"^page_table\[0, 1\] is 6; it must be a page of k_cache, 0 to 5"),
        ([[0, 3, 1], [2, 3, 4]], r"^page_table\[1, 1\] is 3, a page that rows of sequence 0 are written to as well"),
        ([[-1, 3], [2, 4]], r"^page_table\[0, 0\] is -1; it must be a page of k_cache, 0 to 5: seqlens_k\[0\], 2"),
        ([[0], [2]], r"^seqlens_k\[1\] is 6; it must be at most 4, the reach of page_table"),
        ([[0, 1], [2, 3]], r"^seqlens_k\[1\] is 6, and 3 rows come behind these; k_cache has room for 8"),
    ):
        arguments = paged(table)
        with pytest.raises(ValueError, match=match):
            attention_append(**arguments)
        assert not arguments["k_cache"].any()
    twice = paged(
        [[1, 1, 1], [0, 3, 4]],
        **{name: np.ones((2, 7, n, 8), F32) for name, n in (("q", 4), ("k_new", 2), ("v_new", 2))},
    )
    twice["seqlens_k"] = np.array([0, 2])
    with pytest.raises(
        ValueError, match=r"^page_table\[0, 1\] is 1, as page_table\[0, 0\] is, .* seqlens_k\[0\], 0, two"
    ):
        attention_append(**twice)
    assert not twice["k_cache"].any()
    apart = paged([[1, 1, -1], [3, 3, 4]])  # a page whose rows go round, each of which is written once
    attention_append(**apart)
    np.testing.assert_array_equal(apart["k_cache"][1, [2, 3, 0]], apart["k_new"][0])
    read = paged([[0, 1, -1], [0, 3, 4]])  # page 0 of sequence 1 is full, and read alone
    read["seqlens_k"] = np.array([4, 6])
    attention_append(**read)


def test_caches_that_cannot_be_written() -> None:
    arguments = given()
    arguments["v_cache"].flags.writeable = False
    with pytest.raises(ValueError, match="^v_cache is read-only"):
        attention_append(**arguments)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("how", ["called", "slots", "eager"])
def test_caches_of_inference_mode_are_written_there(how: str, name: str) -> None:
    """PyTorch changes a tensor that was made there first, and refuses it then."""
    torch = pytest.importorskip("torch")
    arrays = {name: torch.from_numpy(x.copy()) for name, x in given().items()}
    if how == "slots":
        arrays |= {"q": None, "seqlens_k": None, "slots": torch.arange(6).view(2, 3)}
    torch._dynamo.reset()
    call = attention_append if how in ("called", "slots") else torch.compile(attention_append, backend=how)
    with torch.inference_mode():
        arrays[name] = arrays[name].clone()
    before = {x: arrays[x].clone() for x in ("k_cache", "v_cache")}
    with pytest.raises(
        ValueError, match=f"^{name} was made under torch.inference_mode, .* call attention_append under"
    ):
        call(**arrays)
    assert all(torch.equal(arrays[x], before[x]) for x in before)
    with torch.inference_mode():
        call(**arrays)
    assert not torch.equal(arrays[name], before[name])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("attends", [True, False])
def test_what_is_written_has_memory_of_its_own(attends: bool, dtype: str, library: str) -> None:
    """Else V would be written over K, or over what is read."""
    put: Any = (lambda x: x) if library == "numpy" else pytest.importorskip("torch").from_numpy
    memory = np.zeros(4 * 9 * 2 * 8, np.dtype(dtype))
    at = {name: memory[n : n + 288].reshape(2, 9, 2, 8) for name, n in (("whole", 0), ("part", 144), ("own", 288))}
    both = memory.reshape(2, 2, 9, 2, 8)  # K and V of a sequence side by side: apart
    new = np.ones((2, 3, 2, 8), np.float16)
    of_caches = memory.view(np.float16)[:96].reshape(2, 3, 2, 8)  # as many bytes into the caches
    arrays = {"q": new if attends else None, "k_new": new, "v_new": new, "seqlens_k": np.array([2, 6])}
    arrays |= {"k_cache": at["whole"], "v_cache": at["own"]}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"v_cache": at["whole"]}, "^v_cache shares memory with k_cache; it must have memory of its own$"),
        ({"v_cache": at["part"]}, "^v_cache shares memory with k_cache"),
        ({"k_new": of_caches, "k_cache": at["own"], "v_cache": at["whole"]}, "^v_cache shares memory with k_new"),
        ({"v_new": of_caches}, "^k_cache shares memory with v_new"),
        ({"seqlens_k": memory.view(np.int64)[:2]}, "^k_cache shares memory with seqlens_k"),
    ]
    if attends:
        changes += [({"q": of_caches}, "^k_cache shares memory with q"), ({"out": of_caches}, "^out shares memory")]
    for change, message in changes:
        given = {name: None if x is None else put(x) for name, x in (arrays | change).items()}
        with pytest.raises(ValueError, match=message):
            attention_append(**given)
        assert not memory.any()
    given = {name: None if x is None else put(x) for name, x in arrays.items()}
    if library == "torch":
        with pytest.raises(ValueError, match=r"^v_cache has shape .* and strides \(0, .*: elements share memory"):
            attention_append(**given | {"v_cache": put(at["own"][:1]).expand(2, 9, 2, 8)})
        assert not memory.any()
    attention_append(**given | {"k_cache": put(both[:, 0]), "v_cache": put(both[:, 1])})
    assert both[0, :, 2].all() and both[1, :, 6].all()


FOLLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "out": ({"out": (2, 3, 4, 8)}, "^out is given but (the call is traced|a gradient is wanted)"),
    "family": ({"family": "sm91"}, "^family is 'sm91'"),
    "family of a GPU": ({"family": "sm80"}, "^family is 'sm80', a family of GPU kernels"),
    "causal": ({"causal": "down"}, "^causal is 'down'; it must be"),
    "window": ({"window": 3}, "^window is 3; it must be"),
    "dropout": ({"dropout": 0.5}, "^dropout is 0.5, but seed is not given"),
    "deterministic": ({"deterministic": 3}, "^deterministic is 3; it must be True or False"),
    "block mask": ({"block_mask": 3}, "^block_mask is a int"),
    "interleaved": ({"rotary_interleaved": True}, "^rotary_interleaved is True, but rotary is None"),
}


@pytest.mark.parametrize("how", ["compiled", "mapped", "forward mode", "recorded"])
@pytest.mark.parametrize("case", FOLLOWED)
def test_what_pytorch_follows_is_told_before_anything_is_written(case: str, how: str) -> None:
    """Also where its compiler falls back to Python, which runs what comes before the error."""
    torch = pytest.importorskip("torch")
    changes, match = FOLLOWED[case]
    arrays = {name: torch.from_numpy(x.copy()) for name, x in given().items()}
    arrays |= {name: torch.zeros(x) if isinstance(x, tuple) else x for name, x in changes.items()}
    caches = [arrays[name].clone() for name in ("k_cache", "v_cache")]
    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError), match=match), torch.autograd.forward_ad.dual_level():
        if how == "compiled":
            torch.compile(attention_append, backend="eager")(**arrays)
        elif how == "mapped":
            torch.vmap(lambda q: attention_append(**arrays | {"q": q}), randomness="different")(arrays["q"][None])
        elif how == "forward mode":
            bias = torch.autograd.forward_ad.make_dual(torch.zeros(2, 4, 3, 9), torch.ones(2, 4, 3, 9))
            attention_append(**{"bias": bias} | arrays)
        else:
            attention_append(**arrays, sinks=torch.zeros(4, requires_grad=True))
    torch._dynamo.reset()
    for name, x in zip(("k_cache", "v_cache"), caches):
        assert torch.equal(arrays[name], x)


def test_memory_of_mapped_caches() -> None:
    """torch.vmap hides addresses, and what lies beneath has them."""
    torch = pytest.importorskip("torch")
    memory = torch.zeros(3, 2, 2, 9, 2, 8)
    q, new = torch.randn(3, 2, 3, 4, 8), torch.randn(3, 2, 3, 2, 8)
    filled, rows = torch.tensor([[2, 6]] * 3), torch.arange(6)[None].expand(3, 6)
    k, v = memory[:, 0], memory[:, 1]
    shared = "^v_cache shares memory with k_cache; it must have memory of its own$"

    def step(q: Any, k: Any, v: Any, *caches: Any) -> Any:
        return attention_append(q, k, v, *caches[:-1], caches[-1])

    def at_rows(k: Any, k_cache: Any, v_cache: Any, rows: Any) -> Any:
        attention_append(None, k.flatten(0, 1), k.flatten(0, 1), k_cache, v_cache, slots=rows)
        return k

    def of_one(memory: Any) -> Any:
        return step(q[0], new[0], new[0], memory[0], memory[0], filled[0])

    for match, call in (
        (shared, lambda: torch.vmap(step)(q, new, new, k, k, filled)),
        (shared, lambda: torch.vmap(step, (0, 0, 0, 0, 1, 0))(q, new, new, k, k.movedim(0, 1), filled)),
        (shared, lambda: torch.vmap(at_rows)(new, k, k, rows)),
        (shared, lambda: torch.vmap(of_one)(memory)),
        (shared, lambda: torch.vmap(torch.vmap(lambda x: step(q[0], new[0], new[0], x[0], x[0], filled[0])))(
            memory[None])),
        ("^k_cache shares memory with q", lambda: torch.vmap(step)(
            memory.flatten()[: q.numel()].view(q.shape), new, new, k, v, filled)),
        ("^k_cache shares memory with v_new", lambda: torch.vmap(step)(q, new, k[:, :, :3], k, v, filled)),
        ("^k_cache has shape .*: elements share memory", lambda: torch.vmap(step)(
            q, new, new, k[:1].expand(k.shape), v, filled)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()
        assert not memory.any()
    found = torch.vmap(step)(q, new, new, k, v, filled)
    want = torch.zeros_like(memory)
    for n in range(3):
        torch.testing.assert_close(found[n], step(q[n], new[n], new[n], *want[n], filled[n]))
    torch.testing.assert_close(memory, want)
