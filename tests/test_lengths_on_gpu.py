"""Lengths in memory, in kernels on a GPU: judged as on the CPU (ragged.py), and to the bit where that is promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from ragged import Case, arguments, check_case, draw_case

from cupyflash import attention, attention_backward

pytestmark = pytest.mark.gpu
FAMILIES = {name: Backend(name, name) for name in ("sm90", "sm80", "simt")}
DTYPES = {
    "sm90": ("float16", "bfloat16"), "sm80": ("float16", "float32", "bfloat16", "float64"),
    "simt": ("float32", "float16", "float64"),
}  # fmt: skip
QUERIES, KEYS = [1, 130, 0, 65, 200, 17], [500, 130, 5, 0, 257, 1]
FORMS = {
    "packed": {}, "caches": {"form_k": "filled"}, "tokens on caches": {"form_q": "dense", "form_k": "filled"},
    "keys for each": {"form_k": "dense"}, "queries for each": {"form_q": "dense"},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, a window": {"options": {"causal": True, "window": (90, None)}},
    "top left": {"options": {"causal": "top_left"}, "integers": np.int32},
    "both sides, a soft cap": {"options": {"window": (33, 70), "softcap": 20.0}},
    "one bias for all": {
        "given": ("bias", "alibi_slopes", "sinks"), "along": "qk", "options": {"causal": True, "deterministic": True},
    },
    "a bias for each": {"given": ("bias", "mask", "sinks"), "along": "bhqk"},
    "by line": {"given": ("bias", "mask"), "lines": ("bias", "mask"), "options": {"causal": True}},
    "key mask": {"given": ("key_mask", "sinks"), "along": "bk", "options": {"causal": True}},
    "block mask": {"blocks": "bh", "options": {"causal": True}},
    "block mask, a bias": {"blocks": "b", "given": ("bias",), "along": "hqk", "options": {"deterministic": True}},
    "relative": {"score": "relative", "options": {"causal": True, "deterministic": True}},
    "documents": {"score": "documents"},
    "by key, by query": {"score": "without_s", "options": {"deterministic": True}},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3, "causal": True}},
    "invariant": {"options": {"batch_invariant": True, "causal": True}},
}  # fmt: skip


def drawn(rng: np.random.Generator, number: int, how: dict[str, Any], dims: tuple[int, int], dtype: str) -> Case:
    """Sequences in a form that follows from the number; lines are there for packed queries alone."""
    form = dict(list(FORMS.values())[0 if "lines" in how else number % len(FORMS)])
    lens_q = [40] * len(QUERIES) if form.get("form_q") else QUERIES
    lens_k = [130] * len(KEYS) if form.get("form_k") == "dense" else KEYS
    return draw_case(rng, lens_q, lens_k, dims=dims, dtype=dtype, **{"heads": (4, 2), "rest": 3, **form, **how})


CASES = [
    pytest.param(family, number, kind, id=f"{family}-{kind}")
    for at, family in enumerate(FAMILIES)
    for number, kind in enumerate(KINDS, at)
    if family != "sm90" or kind != "invariant"
]


@pytest.mark.parametrize(("family", "number", "kind"), CASES)
def test_each_as_by_itself(family: str, number: int, kind: str, rng: np.random.Generator) -> None:
    """Forward and every gradient, in forms, dtypes and head dimensions in turn."""
    dtype = DTYPES[family][number % len(DTYPES[family])]
    dims = ((64, 64), (128, 128), (72, 40))[number % 3]
    case = drawn(rng, number, KINDS[kind], dims, dtype)
    check_case(case, targets=number % 2 == 0, layout=("bshd", "bhsd")[number % 2], on=FAMILIES[family])


@pytest.mark.parametrize("family", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize("form_q", ["packed", "dense"])
@pytest.mark.parametrize("page", [1, 3, 8, 16, 64])
def test_pages(family: str, form_q: str, page: int, rng: np.random.Generator) -> None:
    """NaN in every slot that belongs to nobody, and no pages in entries of the table that no length reaches."""
    if family == "sm90" and page % 8:
        pytest.skip("takes pages of a multiple of 8 rows")
    lens_q = [3] * len(KEYS) if form_q == "dense" else QUERIES
    dtype = DTYPES[family][page % len(DTYPES[family])]
    case = draw_case(
        rng, lens_q, KEYS, form_q=form_q, form_k="paged", page=page, dtype=dtype, dims=(64, 64),
        options={"causal": True}, given=("sinks",),
    )  # fmt: skip
    check_case(case, on=FAMILIES[family])


@pytest.mark.parametrize("form_k", ["packed", "filled", "paged"])
@pytest.mark.parametrize(("dims", "heads"), [((64, 64), (16, 2)), ((128, 128), (16, 4)), ((192, 128), (16, 8))])
@pytest.mark.parametrize("kind", ["causal", "a window, sinks"])
def test_prompts_beside_tokens(
    kind: str, dims: tuple[int, int], heads: tuple[int, int], form_k: str, rng: np.random.Generator
) -> None:
    """Heads that share K and V share tiles, of which prompts have several."""
    lens_q = [300, *(1,) * 19, 130, *(1,) * 20, 70, 0, 1]
    lens_k = [n + int(rng.integers(0, 400)) for n in lens_q]
    how: dict[str, Any] = {"options": {"causal": True}, "form_k": form_k}
    if kind != "causal":
        how |= {"options": {"causal": True, "window": (90, None)}, "given": ("sinks",)}
    case = draw_case(rng, lens_q, lens_k, dtype="bfloat16", dims=dims, heads=heads, rest=3, **how)
    check_case(case, on=FAMILIES["sm90"])


@pytest.mark.parametrize(
    ("heads", "dims", "lens_k"),
    [((32, 1), (128, 128), [16384]), ((16, 1), (64, 64), [9000]), ((8, 1), (128, 72), [20000, 5, 300, 0, 7000]),
     ((12, 2), (256, 256), [8192]), ((32, 8), (128, 128), [4096])],
)  # fmt: skip
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_a_token_on_many_keys(
    family: str, heads: tuple[int, int], dims: tuple[int, int], lens_k: list[int], rng: np.random.Generator
) -> None:
    """Keys are dealt out in shares, of which several warps make a row."""
    case = draw_case(
        rng, [1] * len(lens_k), lens_k, form_q="dense", form_k="filled", dtype="bfloat16", dims=dims, heads=heads,
        given=("sinks",),
    )  # fmt: skip
    check_case(case, on=FAMILIES[family])


def bits(on: Backend, *arrays: Any) -> list[bytes]:
    return [on.get(x).tobytes() for x in arrays]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("sm80", "float16"), ("sm80", "bfloat16"), ("sm80", "float64"), ("simt", "float32"), ("simt", "float16"),
     (None, "bfloat16"), (None, "float32")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["causal", "window, a soft cap"])
def test_a_sequences_bits_do_not_depend_on_others(
    family: str | None, dtype: str, kind: str, rng: np.random.Generator
) -> None:
    """With batch_invariant=True: alone, beside others, in another order, and with its queries in two calls."""
    on = FAMILIES[family or "sm80"]
    options: dict[str, Any] = {"causal": True, "batch_invariant": True, "family": family}
    if kind != "causal":
        options |= {"window": (200, 0), "softcap": 30.0}
    case = draw_case(rng, QUERIES, [max(x) for x in zip(QUERIES, KEYS)], dtype=dtype, dims=(64, 64), heads=(4, 2))
    x = {name: np.where(np.isnan(a), 0, a).astype(a.dtype) for name, a in case.arrays.items()}
    x["q"] *= rng.choice([0.25, 1, 8], (len(x["q"]), 1, 1)).astype(x["q"].dtype)  # some rows' maxima grow, some do not

    def run(of: list[tuple[Any, Any]], backward: bool = True) -> list[list[bytes]]:
        """Of sequences that are these rows of q, and of k."""
        put = {name: on.put(np.concatenate([x[name][q] for q, _ in of])) for name in ("q", "dout")}
        put |= {name: on.put(np.concatenate([x[name][k] for _, k in of])) for name in ("k", "v")}
        ends = [np.cumsum([0, *(len(x[name][rows]) for rows in side)]) for name, side in zip("qk", zip(*of))]
        lengths = {f"cu_seqlens_{name}": on.put(y.astype(np.int32)) for name, y in zip("qk", ends)}
        q, k, v = (put[name] for name in "qkv")
        out, lse = attention(q, k, v, return_lse=True, **lengths, **options)
        results = [[on.get(out)[a:b], on.get(lse)[:, a:b]] for a, b in zip(ends[0], ends[0][1:])]
        if backward:
            dq, dk, dv = map(on.get, attention_backward(put["dout"], q, k, v, out, lse, **lengths, **options))
            for n, found in enumerate(results):
                rows_q, rows_k = (slice(e[n], e[n + 1]) for e in ends)
                found += [dq[rows_q], dk[rows_k], dv[rows_k]]
        return [[y.tobytes() for y in found] for found in results]

    own = [(q[0], k[0]) for q, k in zip(case.queries, case.keys)]
    want = run(own)
    for _ in range(3):
        some = [int(n) for n in rng.permutation(len(own))[: rng.integers(1, len(own) + 1)]]
        assert run([own[n] for n in some]) == [want[n] for n in some], some
    for n in range(len(own)):
        assert run([own[n]]) == [want[n]], n
    pieces = []
    for q, k in own:
        at = int(rng.integers(q.start, q.stop + 1))
        pieces += [(slice(q.start, at), slice(k.start, k.stop - (q.stop - at))), (slice(at, q.stop), k)]
    found = run(pieces, backward=False)
    for n, (first, rest) in enumerate(zip(found[::2], found[1::2])):
        assert first[0] + rest[0] == want[n][0], f"out of {n}, cut"


@pytest.mark.parametrize("family", ["sm80", "simt"])
@pytest.mark.parametrize("kind", ["one bias for all", "relative", "by key, by query"])
def test_deterministic_gradients_are_the_same_in_every_run(family: str, kind: str, rng: np.random.Generator) -> None:
    on = FAMILIES[family]
    case = drawn(rng, 0, KINDS[kind], (64, 64), "float16")
    arrays, named = arguments(case, put=on.put)
    named |= {"family": family}
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, lse = attention(q, k, v, return_lse=True, **named)
    wrt = [*(x for x in ("bias", "alibi_slopes", "sinks") if x in case.given), *named.get("score_arrays", {})]

    def grads() -> list[bytes]:
        found = attention_backward(dout, q, k, v, out, lse, wrt=wrt, **named)
        assert len(found.of_arrays) == len(wrt)
        return bits(on, *found, *found.of_arrays.values())

    want = grads()
    assert all(grads() == want for _ in range(20))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_mask_longer_than_all_rows(family: str, rng: np.random.Generator) -> None:
    """Beside a bias that is shorter; what no sequence reaches may hide or show what it likes."""
    case = draw_case(
        rng, QUERIES, KEYS, dims=(64, 64), dtype="float16", blocks="bh", given=("bias",), along="hqk",
        options={"window": (150, 30)},
    )  # fmt: skip
    assert case.blocks is not None
    longer = rng.random((*case.blocks.shape[:2], 600, 1000)) < 0.5
    longer[:, :, : case.blocks.shape[2], : case.blocks.shape[3]] = case.blocks
    check_case(case._replace(blocks=longer), on=FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form_k", ["packed", "filled", "paged"])
def test_a_captured_call_serves_all_later_lengths(family: str, form_k: str, rng: np.random.Generator) -> None:
    """Arrays of lengths are changed in place, and the graph is run again; hints are those of the capture."""
    import cupy

    on, draws = FAMILIES[family], []
    for lens_q, lens_k in ((QUERIES, KEYS), ([30, 0, 200, 1, 100, 2], [250, 1, 0, 500, 60, 2])):
        rest = 500 - sum(lens_q), 1000 - sum(lens_k)
        case = draw_case(
            rng, lens_q, lens_k, form_k=form_k, dims=(64, 64), dtype="float16", rest=0, options={"causal": True}
        )
        arrays, named = dict(case.arrays), dict(case.lengths)
        for name, behind in (("q", rest[0]), *((x, rest[1]) for x in "kv" if form_k == "packed")):
            arrays[name] = np.concatenate([arrays[name], np.full((behind, *arrays[name].shape[1:]), np.nan, "f2")])
        draws.append((arrays, named))
    if form_k == "paged":  # of one size
        pages = max(len(x["k"]) for x, _ in draws)
        width = max(y["page_table"].shape[1] for _, y in draws)
        for x, y in draws:
            for name in "kv":
                x[name] = np.concatenate([x[name], np.full((pages - len(x[name]), *x[name].shape[1:]), np.nan, "f2")])
            table = np.full((len(QUERIES), width), -1)
            table[:, : y["page_table"].shape[1]] = y["page_table"]
            y["page_table"] = table
    put = {name: on.put(draws[0][0][name]) for name in "qkv"} | {x: on.put(y) for x, y in draws[0][1].items()}
    hints = {"max_seqlen_q": 200, "max_seqlen_k": 100}

    def run(out: Any = None) -> Any:
        return attention(**put, causal=True, family=family, out=out, return_lse=True, **hints)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = run()[0]
        stream.begin_capture()
        _, lse = run(out)
        graph = stream.end_capture()
        for n in (1, 0, 1):
            for name, x in put.items():
                x.set((draws[n][0] | draws[n][1])[name])
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            found = bits(on, out, lse)
            assert found == bits(on, *run()), n
            assert not np.isnan(on.get(out)).any()
