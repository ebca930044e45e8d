"""Latent attention: V is the first columns of K. To the bit what a call gives whose v is that view of k."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
from ragged import Case, draw_case

import cupyflash
from cupyflash import attention, attention_append, block_mask, explain
from cupyflash.gpu.device import Arch

D, N = 24, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (5, 1), "softcap": 3.0},
    "score": {"score": "s + 0.1f * (i - j) + b"},
    "dropout": {"dropout": 0.3, "seed": 5},
    "scale": {"scale": -0.2, "batch_invariant": True},
}
FORMS = {
    "dense": {"form_q": "dense", "form_k": "dense", "rest": 0},
    "caches": {"form_q": "dense", "form_k": "filled"},
    "pages": {"form_q": "dense", "form_k": "paged", "page": 4},
    "packed on pages": {"form_k": "paged", "page": 8},
    "packed": {},
}


def drawn(rng: np.random.Generator, form: str, **how: Any) -> Case:
    queries = [3, 3, 3] if FORMS[form].get("form_q") == "dense" else [5, 0, 2]
    keys = [11, 11, 11] if form == "dense" else [11, 3, 20]
    return draw_case(rng, queries, keys, heads=(4, 1), dims=(D, N), **FORMS[form], **how)


def both(case: Case, **options: Any) -> tuple[list[Any], list[Any]]:
    q, k = case.arrays["q"], case.arrays["k"]
    given = case.options | case.lengths | case.given | options
    return [list(attention(q, k, *v, **more, return_lse=True, **given)) for v, more in (
        ([], {"latent": N}), ([k[..., :N]], {}),
    )]  # fmt: skip  # type: ignore[return-value]


def same(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_as_with_a_view(rng: np.random.Generator, form: str, options: dict[str, Any]) -> None:
    found, wanted = both(drawn(rng, form), **options)
    same(found, wanted)
    assert found[0].shape[-1] == N and np.isfinite(found[0]).all()


@pytest.mark.parametrize("form", ["dense", "pages", "packed on pages"])
@pytest.mark.parametrize("name", ["key_mask", "mask", "bias", "alibi_slopes", "sinks"])
def test_with_arrays(rng: np.random.Generator, form: str, name: str) -> None:
    same(*both(drawn(rng, form, given=(name,)), causal=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_and_the_most_columns(rng: np.random.Generator, dtype: str) -> None:
    case = draw_case(rng, [2, 2], [9, 9], dtype=dtype, heads=(4, 1), dims=(576, 512), form_q="dense", form_k="dense")
    q, k = case.arrays["q"], case.arrays["k"]
    same([attention(q, k, latent=512)], [attention(q, k, k[..., :512])])
    same([attention(q, k, latent=576)], [attention(q, k, k)])


def test_layouts_ranks_heads_and_blocks(rng: np.random.Generator) -> None:
    q, k = (rng.standard_normal((2, rows, heads, D)).astype("f") for rows, heads in ((5, 4), (9, 2)))
    out = attention(q, k, latent=N)
    same([attention(q, k, k[..., :N])], [out])
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k)]
    same([attention(*turned, latent=N, layout="bhsd").swapaxes(1, 2)], [out])
    same([attention(q[0], k[0], latent=N)], [attention(q[0], k[0], k[0][..., :N])])
    same([attention(q[0, :, 0], k[0, :, 0], latent=N)], [attention(q[0, :, 0], k[0, :, 0], k[0, :, 0, :N])])
    mask = block_mask(lambda b, h, i, j: i >= j, shape=(1, 1, 5, 9), block=16)
    same([attention(q, k, latent=N, block_mask=mask)], [attention(q, k, k[..., :N], block_mask=mask)])
    target = np.full((2, 5, 4, N), np.nan, "f")
    assert attention(q, k, latent=N, out=target) is target
    same([target], [out])


Q, K = np.zeros((2, 3, 4, D), "f"), np.zeros((2, 9, 1, D), "f")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"v": K, "latent": N}, "v is given, and latent is 16; it must be None there: V is the first columns of k"),
        ({"latent": 25}, r"latent is 25; it must be at most the columns of k, 24, shape \(2, 9, 1, 24\)"),
        ({"latent": 0}, "latent is 0; it must be 1 or more"),
        ({"latent": -1}, "latent is -1; it must be 1 or more"),
        ({"latent": True}, "latent is True; it must be None or how many columns of k are V, an integer"),
        ({"latent": 2.5}, "latent is 2.5; it must be None or how many columns of k are V, an integer"),
        ({"latent": "8"}, "latent is '8'; it must be None or"),
        ({}, "v is a NoneType; it must be an array"),
        ({"latent": N, "out": np.zeros(Q.shape, "f")}, r"out has shape .*; it must be \(2, 3, 4, 16\)"),
    ],
)
def test_what_is_wrong(given: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        attention(Q, K, **given)


def test_eight_bits_are_refused() -> None:
    q, k = Q.astype(np.float16), K.astype(np.int8)
    with pytest.raises(TypeError, match=r"^k has dtype int8, and latent is 16; it must be of 16 bits or more there$"):
        attention(q, k, latent=N)


@pytest.mark.parametrize("name", ["attention_backward", "attention_jvp", "attention_backward_jvp", "attention_vjp"])
def test_there_is_a_forward_alone(name: str) -> None:
    function: Any = getattr(cupyflash, name)
    known = f"^{name}\\(\\) got an unexpected keyword argument 'latent'; latent attention has a forward alone$"
    with pytest.raises(TypeError, match=known):
        if name == "attention_vjp":
            function(Q, K, K, latent=N)
        else:
            function(*([{"q": Q}] if "jvp" in name else []), *[Q] * (6 if "backward" in name else 5), latent=N)
    with pytest.raises(TypeError, match=r"'latent'; weights do not depend on it$"):
        cupyflash.attention_weights(Q, K, latent=N)  # type: ignore[call-arg]


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain((64, 1, 16, 576), (64, 4096, 1, 576), latent=512, dtype="bf16", arch="sm_90a")
    with_v = explain((64, 1, 16, 576), (64, 4096, 1, 576), (64, 4096, 1, 512), dtype="bf16", arch="sm_90a")
    assert with_v.bytes_moved - told.bytes_moved == 64 * 4096 * 512 * 2  # K and V are read once
    assert (told.problem.dim_v, told.problem.latent) == (512, 512) and told.flops == with_v.flops
    assert "v the first 512" in str(told) and "copy         none" in str(told)
    with pytest.raises(TypeError, match=r"^latent is 16, of which there is a forward alone; attention_backward takes"):
        explain(Q, K, latent=N, of="backward")
    with pytest.raises(ValueError, match="^v is given, and latent is 16"):
        explain(Q, K, K, latent=N)
    monkeypatch.setattr("cupyflash.gpu.device.current", lambda _: Arch.of("sm_90a"))
    monkeypatch.setattr("cupyflash.tools.autotune._ordinal", lambda: 0)
    with pytest.raises(ValueError, match="^latent is 16, and latent attention is not tuned"):
        cupyflash.tune((1, 8, 1, D), latent=N, dtype="bf16")


def test_command_line(run: Any, tmp_path: Any, rng: np.random.Generator) -> None:
    q, k = (rng.standard_normal((1, rows, 1, D)).astype("f") for rows in (3, 9))
    source, to = tmp_path / "in.npz", tmp_path / "out.npy"
    np.savez(source, q=q, k=k)
    attend = ("attend", "-i", source, "-o", to, "--device", "cpu")
    code, _, err = run(*attend, "--latent", N)
    assert (code, err) == (0, "")
    same([np.load(to)], [attention(q, k, k[..., :N])])
    code, _, err = run(*attend, "--overwrite")
    assert code and "no v in" in err
    shapes = ("--shape", "2,1,16,576", "--kv-shape", "2,64,1,576", "--latent", 512, "--arch", "sm_90a")
    code, printed, err = run("explain", *shapes)
    assert code == 0 and "v the first 512" in printed, err


# ---- appending ------------------------------------------------------------------------------------------------------


TABLE, LENGTHS = np.array([[3, 1, 5], [0, 2, 4]], np.int32), np.array([5, 7], np.int32)


def new_row(rng: np.random.Generator) -> tuple[Any, Any, Any, Any, Any]:
    """q, a row for each of two sequences, a pool of pages, that with the rows, and what is to come out."""
    q, new = (rng.standard_normal((2, 1, heads, D)).astype("f") for heads in (4, 1))
    pool = np.full((6, 4, 1, D), np.nan, "f")
    for n, length in enumerate(LENGTHS):
        for j in range(length):
            pool[TABLE[n, j // 4], j % 4] = rng.standard_normal((1, D))
    wanted = pool.copy()
    for n, length in enumerate(LENGTHS):
        wanted[TABLE[n, length // 4], length % 4] = new[n, 0]
    out = attention(q, wanted, wanted[..., :N], seqlens_k=LENGTHS + 1, page_table=TABLE, causal=True)
    return q, new, pool, wanted, out


def test_a_row_is_written_once(rng: np.random.Generator) -> None:
    q, new, pool, wanted, out = new_row(rng)
    given: dict[str, Any] = {"seqlens_k": LENGTHS, "page_table": TABLE, "latent": N}
    for _ in range(2):
        written = pool.copy()
        same([attention_append(q, new, k_cache=written, causal=True, **given), written], [out, wanted])
    written = pool.copy()
    assert attention_append(None, new, k_cache=written, **given) is None
    same([written], [wanted])
    slots = np.array([[TABLE[n, x // 4] * 4 + x % 4] for n, x in enumerate(LENGTHS)])
    written = pool.copy()
    assert attention_append(None, new, k_cache=written, slots=slots, latent=N) is None
    same([written], [wanted])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"v_new": True}, "v_new is given, and latent is 16; it must be None there: V is the first columns of K"),
        ({"v_cache": True}, "v_cache is given, and latent is 16; it must be None there"),
        ({"rotary": True}, "rotary is given, and latent is 16; it must be None there: k_new comes turned"),
        ({"latent": 40}, "latent is 40; it must be at most the columns of k_cache, 24"),
        ({"latent": 0}, "latent is 0; it must be 1 or more"),
        ({"k_cache": None}, "k_cache is a NoneType; it must be an array"),
        ({"latent": None}, "v_new is a NoneType; it must be an array"),
        ({"k_cache": np.zeros((6, 4, 1, D), np.int8)}, "k_cache has dtype int8, and latent is 16; it must be of 16"),
    ],
)  # fmt: skip
def test_what_is_wrong_of_appending(rng: np.random.Generator, change: dict[str, Any], error: str) -> None:
    q, new, pool, _, _ = new_row(rng)
    values = {"v_new": new, "v_cache": pool, "rotary": (np.ones((9, 4), "f"), np.ones((9, 4), "f"))}
    given = {"k_cache": pool, "seqlens_k": LENGTHS, "page_table": TABLE, "latent": N}
    before = pool.copy()
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        attention_append(q, new, **given | {name: values[name] if x is True else x for name, x in change.items()})
    same([pool], [before])


@pytest.mark.parametrize("library", ["numpy", "torch", "compiled"])
def test_who_writes_alone_is_told_too(rng: np.random.Generator, library: str) -> None:
    """Where nobody attends, `latent` says that there is no V, and must be columns of K all the same."""
    _, new, pool, _, _ = new_row(rng)
    given: dict[str, Any] = {"k_new": new, "k_cache": pool, "slots": np.array([[3], [7], [9]])[: len(new)]}
    append = attention_append
    if library != "numpy":
        torch = pytest.importorskip("torch")
        given = {name: torch.from_numpy(x) for name, x in given.items()}
        append = torch.compile(append, backend="eager", fullgraph=True) if library == "compiled" else append
    before = pool.copy()
    with pytest.raises(Exception, match="latent is 40; it must be at most the columns of k_cache, 24, shape"):
        append(None, latent=40, **given)
    with pytest.raises(Exception, match="latent is 0; it must be 1 or more"):
        append(None, latent=0, **given)
    same([pool], [before])
    append(None, latent=N, **given)
    assert (pool != before).any()


def test_appending_while_torch_is_half_imported(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread: it is among the modules then, and has no `compiler` yet."""
    _, new, pool, _, _ = new_row(rng)
    before = pool.copy()
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    attention_append(None, latent=N, k_new=new, k_cache=pool, slots=np.array([[3], [7], [9]])[: len(new)])
    assert (pool != before).any()
