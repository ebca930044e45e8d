"""k and v of 8 bits beside q of 16, as caches hold them: calls, appending, refusals."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import CPU, Backend
from cached_problems import BY, EIGHT, Cached, draw
from ragged import arguments
from reference import DTYPES

from cupyflash import Pages, attention, attention_append, attention_backward, attention_jvp
from cupyflash.cached import quantised

LENGTHS = [5, 0, 40, 24]
FORMS: dict[str, dict[str, Any]] = {
    "caches": {"lens_q": [1] * 4, "options": {"causal": True}},
    "a key mask": {"lens_q": [1] * 4, "given": ("key_mask",), "along": "bk"},
    "pages": {"lens_q": [3] * 4, "form_k": "paged", "page": 7, "options": {"causal": True}, "dtype": "bfloat16"},
    "chunks on pages": {"lens_q": [9, 1, 0, 3], "form_q": "packed", "form_k": "paged", "options": {"window": (9, 3)}},
    "packed": {"lens_q": [9, 1, 0, 3], "form_q": "packed", "form_k": "packed", "given": ("sinks", "bias")},
}


def judge(drawn: Cached, layout: str = "bshd", on: Backend = CPU, put: Any = None) -> None:
    """A call, with NaN in all that belongs to nobody."""
    put = put or on.put
    arrays, named = arguments(drawn.case, layout, put)
    scales = {name: laid_scale(x, layout, put) for name, x in drawn.scales.items()}
    q, k, v = (arrays[name] for name in "qkv")
    found = dict(zip(("out", "lse"), attention(q, k, v, return_lse=True, family=on.family, **named, **scales)))
    found = {name: on.get(x) for name, x in found.items()}
    if layout == "bhsd":
        found["out"] = found["out"].swapaxes(-3, -2)
    drawn.judge(found)


def laid_scale(x: Any, layout: str, put: Any) -> Any:
    if isinstance(x, float):
        return x
    return put(np.ascontiguousarray(x.swapaxes(-2, -1)) if layout == "bhsd" and x.ndim > 1 else x)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("form", FORMS)
def test_exact_on_what_is_meant(form: str, eight: str, by: str | None, layout: str, rng: np.random.Generator) -> None:
    judge(draw(rng, eight, by, lens_k=LENGTHS, **FORMS[form]), layout)


def half(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def eight_bits(rng: np.random.Generator, eight: str, *shape: int) -> np.ndarray:
    x = rng.standard_normal(shape)
    return (np.rint(30 * x) if eight == "int8" else x).astype(EIGHT[eight])


@pytest.mark.parametrize("eight", EIGHT)
def test_without_lengths_and_without_a_batch(eight: str, rng: np.random.Generator) -> None:
    """As with k and v of 16 bits that hold the same numbers."""
    for front in ((2,), ()):
        q, (k, v) = half(rng, *front, 5, 4, 16), (eight_bits(rng, eight, *front, 9, 2, 16) for _ in "kv")
        scales = [rng.uniform(0.5, 2, k.shape[:-1]).astype("f4") for _ in "kv"]
        wide = [x.astype("f8") * s[..., None] for x, s in zip((k, v), scales)]
        want = attention(q.astype("f8"), *wide, causal=True)
        got = attention(q, k, v, k_descale=scales[0], v_descale=scales[1], causal=True)
        np.testing.assert_allclose(got.astype("f8"), want, atol=2e-3 * np.abs(want).max())
    one = attention(q, k, v, k_descale=np.array(0.5, "f4"))
    np.testing.assert_allclose(one, attention(q, k, v, k_descale=0.5), atol=0.05)
    alone = attention(q[:, 0], k[:, 0], v[:, 0], k_descale=scales[0][:, 0], v_descale=scales[1][:, 0])
    heads = attention(q[:, :1], k[:, :1], v[:, :1], k_descale=scales[0][:, :1], v_descale=scales[1][:, :1])
    np.testing.assert_array_equal(alone, heads[:, 0])


def appended(
    rng: np.random.Generator,
    eight: str,
    by: str | None,
    put: Any = np.array,
    get: Any = np.asarray,
    layout: str = "bshd",
    append: Any = attention_append,
) -> None:
    """Into pages: what was written is what rounding makes of the new rows, and attention to it follows."""
    n, new, page, heads, dim = 3, 2, 4, 2, 16
    filled, table = np.array([3, 0, 9], np.int32), rng.permutation(12).reshape(3, 4).astype(np.int32)
    q, k_new, v_new = half(rng, n, new, 4, dim), half(rng, n, new, heads, dim), half(rng, n, new, heads, dim)
    caches = {name: eight_bits(rng, eight, 12, page, heads, dim) for name in ("k_cache", "v_cache")}
    unit = 1 / 30 if eight == "int8" else 1.0
    scales: dict[str, Any] = {}
    for name in ("k_descale", "v_descale"):
        if by == "number":
            scales[name] = unit * 1.5
        elif by == "array":
            scales[name] = np.array([unit * 1.5], "f4")
        elif by == "head":
            scales[name] = (unit * rng.uniform(1, 2, heads)).astype("f4")
        elif by == "row":
            scales[name] = (unit * rng.uniform(1, 2, (12, page, heads))).astype("f4")
    places = [(table[b, (filled[b] + i) // page], (filled[b] + i) % page) for b in range(n) for i in range(new)]

    def lay(x: np.ndarray) -> Any:
        return put(np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "bhsd" and x.ndim > 2 else x)

    given = {name: lay(x) for name, x in caches.items()}
    of = {name: x if isinstance(x, float) else lay(x) for name, x in scales.items()}
    found = append(
        lay(q), lay(k_new), lay(v_new), *given.values(), put(filled), page_table=put(table), causal=True,
        layout=layout, **of,
    )  # fmt: skip
    if isinstance(found, tuple):  # JAX's arrays are others then
        found, *changed = found
        given = dict(zip(given, changed))
        of |= zip(of if by == "row" else (), changed[2:])
    rows = {"k_cache": k_new, "v_cache": v_new}
    most = 127 if eight == "int8" else 448
    for (name, was), scale_name in zip(caches.items(), ("k_descale", "v_descale")):
        scale = scales.get(scale_name, 1.0)
        whole = get(given[name])
        whole = whole.swapaxes(1, 2) if layout == "bhsd" else whole
        want, x = was.copy(), rows[name].astype("f4").reshape(-1, heads, dim)
        if by == "row":
            want_scale, scale = scale.copy(), np.abs(x).max(-1) / np.float32(most)
            for at, s in zip(places, scale):
                want_scale[at] = s
            own = get(of[scale_name])
            np.testing.assert_allclose(own.swapaxes(1, 2) if layout == "bhsd" else own, want_scale, rtol=1e-6)
            scale = scale[..., None]
        elif by == "head":
            scale = scale[:, None]
        numbers = np.clip(x / np.float32(scale), -most, most)
        numbers = (np.rint(numbers) if eight == "int8" else numbers).astype(EIGHT[eight])
        for at, row in zip(places, numbers):
            want[at] = row
        close = 1 if eight == "int8" else 2.0**-3  # a quotient may be rounded otherwise, by another library
        np.testing.assert_allclose(
            whole.astype("f4"), want.astype("f4"), rtol=close, atol=2**-9 if eight != "int8" else 1
        )
        assert (whole.view(np.uint8) != want.view(np.uint8)).mean() < 0.01
    again = attention(
        lay(q), given["k_cache"], given["v_cache"], seqlens_k=put(filled + new), page_table=put(table), causal=True,
        layout=layout, **of,
    )  # fmt: skip
    np.testing.assert_array_equal(get(found), get(again))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("eight", EIGHT)
def test_appending_rounds_new_rows(eight: str, by: str | None, rng: np.random.Generator) -> None:
    appended(rng, eight, by)


def test_appending_with_heads_first(rng: np.random.Generator) -> None:
    appended(rng, "int8", "row", layout="bhsd")


@pytest.mark.parametrize("eight", EIGHT)
def test_slots_and_what_is_not_finite(eight: str) -> None:
    new = np.zeros((3, 1, 8), np.float16)
    new[0], new[1, 0, 3], new[2] = 4.0, np.nan, 60000
    k, v = (np.zeros((2, 3, 1, 8), EIGHT[eight]) for _ in "kv")
    scales = {name: np.ones((2, 3, 1), np.float32) for name in ("k_descale", "v_descale")}
    attention_append(None, new, new, k, v, slots=np.array([4, 0, -1]), v_descale=scales["v_descale"], k_descale=0.5)
    largest = 127 if eight == "int8" else 448
    assert (k[1, 1].astype("f4") == 8).all() and (v[1, 1].astype("f4") == largest).all()
    assert scales["v_descale"][1, 1] == np.float32(4 / largest) and np.isnan(scales["v_descale"][0, 0])
    assert np.isnan(k[0, 0, 0, 3].astype("f4")) == (eight != "int8")
    assert (scales["v_descale"].ravel() == 1).sum() == 4  # -1 is nowhere
    attention_append(None, new, new, k, v, slots=np.array([-1, -1, 2]))
    assert (k[0, 2].astype("f4") == largest).all()


Q, K8, K16 = (np.zeros((2, 4, 2, 8), x) for x in (np.float16, np.int8, np.float16))
F8 = K8.view(EIGHT["float8_e4m3fn"])
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type, str]] = {
    "v of 16": ((Q, K8, K16), {}, TypeError, "^v has dtype float16, and the other of k and v is of 8 bits"),
    "k of 16": ((Q, K16, F8), {}, TypeError, "^k has dtype float16, and the other of k and v is of 8 bits"),
    "another": ((Q, K8, F8), {}, TypeError, "^v has dtype float8_e4m3fn but k has int8; both must have one dtype"),
    "float32": ((Q.astype("f4"), K8, K8), {}, TypeError, "^k has dtype int8 beside q of float32; k and v of 8"),
    "int8 alone": ((K8, K8, K8), {}, TypeError, "^k has dtype int8 beside q of int8"),
    "shape": ((Q, K8, K8), {"k_descale": np.ones(4, "f4")}, ValueError,
        r"^k_descale has shape \(4,\); it must be \(2,\), one for each head of k, or \(2, 4, 2\), one for each"),
    "dtype": ((Q, K8, K8), {"v_descale": np.ones(2)}, TypeError, "^v_descale has dtype float64; it must be float32"),
    "of q": ((Q, K8, K8), {"q_descale": 2.0}, TypeError, "^q_descale is given with q of float16; it is for inputs of"),
    "of q, an array": ((Q, K8, K8), {"q_descale": np.ones((2, 1), "f4")}, TypeError, "^q_descale is given with q of"),
    "of 16": ((Q, Q, Q), {"k_descale": 2.0}, TypeError,
        "^k_descale is given with q of float16; .* and for k and v of 8 bits beside q of 16"),
    "number": ((Q, K8, K8), {"k_descale": -1.0}, ValueError, "^k_descale is -1.0"),
    "out_dtype": ((Q, K8, K8), {"out_dtype": "bfloat16"}, ValueError, "^out_dtype is bfloat16; with q of float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    arrays, given, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        attention(*arrays, **given)


def test_there_is_a_forward_alone() -> None:
    lse = np.zeros((2, 2, 4), np.float32)
    with pytest.raises(TypeError, match="^k has dtype int8 beside q of float16, of which there is a forward alone"):
        attention_backward(Q, Q, K8, K8, Q, lse)
    with pytest.raises(TypeError, match="^k has dtype int8 beside q of float16, of which there is a forward alone"):
        attention_jvp({"q": Q}, Q, K8, K8, Q, lse)


def test_appending_refused() -> None:
    new, filled = np.zeros((2, 1, 2, 8), np.float16), np.zeros(2, np.int32)

    def append(new: np.ndarray, k: np.ndarray, v: np.ndarray, **given: Any) -> None:
        attention_append(None, new, new, k, v, filled, **given)

    with pytest.raises(TypeError, match="^k_new has dtype int8; beside k_cache of int8 it must be float16 or bfloat16"):
        append(new.astype(np.int8), K8.copy(), K8.copy())
    with pytest.raises(TypeError, match="^k_descale is given with k_cache of float16; it is for caches of float8"):
        append(new, K16.copy(), K16.copy(), k_descale=2.0)
    with pytest.raises(TypeError, match="^v_descale is given with k_cache of float16; it is for caches of float8"):
        append(new, K16.copy(), K16.copy(), v_descale=np.ones(2, "f4"))
    with pytest.raises(ValueError, match=r"^v_descale has shape \(3,\); it must be \(2,\), one for each head of k"):
        append(new, K8.copy(), K8.copy(), v_descale=np.ones(3, "f4"))
    with pytest.raises(TypeError, match="^v_cache has dtype int8; it must be that of k_cache, float8_e4m3fn"):
        append(new, F8.copy(), K8.copy())
    scales = np.ones((2, 4, 2), "f4")
    scales.flags.writeable = False
    with pytest.raises(ValueError, match="^k_descale is read-only"):
        append(new, K8.copy(), K8.copy(), k_descale=scales)


def tensor(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    bits = {"float8_e4m3fn": (np.uint8, torch.float8_e4m3fn), "bfloat16": (np.int16, torch.bfloat16)}
    as_bits, dtype = bits.get(x.dtype.name, (x.dtype, None))
    made = torch.from_numpy(np.array(x, order="C").view(as_bits))
    return made if dtype is None else made.view(dtype)


def of_tensor(x: Any) -> np.ndarray:
    import torch

    eight, half = np.dtype(EIGHT["float8_e4m3fn"]), np.dtype(DTYPES["bfloat16"])
    if x.dtype is torch.float8_e4m3fn:
        return x.cpu().view(torch.uint8).numpy().view(eight)
    return x.cpu().view(torch.int16).numpy().view(half) if x.dtype is torch.bfloat16 else x.cpu().numpy()


def _jax(x: np.ndarray) -> Any:
    return pytest.importorskip("jax.numpy").asarray(x)


LIBRARIES = {"torch": (tensor, of_tensor), "jax": (_jax, np.asarray)}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("library", LIBRARIES)
def test_other_libraries(library: str, eight: str, by: str | None, rng: np.random.Generator) -> None:
    put, get = LIBRARIES[library]
    on = SimpleNamespace(family=None, put=put, get=get)
    judge(draw(rng, eight, by, lens_k=LENGTHS, **FORMS["caches"]), on=on)  # type: ignore[arg-type]
    judge(draw(rng, eight, by, lens_k=LENGTHS, **FORMS["pages"]), "bhsd", on=on)  # type: ignore[arg-type]
    appended(rng, eight, by, put, get)


def test_torch_refuses_gradients_and_vmap_and_casts_none() -> None:
    torch = pytest.importorskip("torch")
    q, k = torch.ones(2, 1, 4, 8, dtype=torch.float16), torch.ones(2, 5, 2, 8, dtype=torch.int8)
    with pytest.raises(
        TypeError, match="^k has dtype int8, of which there is a forward alone, but a gradient is wanted"
    ):
        attention(q.clone().requires_grad_(), k, k)
    scales = torch.ones(2, 5, 2)
    with pytest.raises(NotImplementedError, match="^k_descale is given under vmap"):
        torch.func.vmap(lambda q, k, s: attention(q, k, k, k_descale=s))(q, k, scales)
    small = k.to(torch.float8_e4m3fn)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q.float(), small, small, k_descale=scales).dtype is torch.bfloat16


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("eight", EIGHT)
def test_pytorch_compiles_appending(eight: str, by: str | None, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "compile"):
        pytest.skip("this PyTorch compiles nothing")
    torch._dynamo.reset()
    compiled = torch.compile(attention_append, fullgraph=True, backend="aot_eager")
    appended(rng, eight, by, tensor, of_tensor, append=compiled)
    torch._dynamo.reset()


def test_the_operator_is_what_pytorch_is_told() -> None:
    torch = pytest.importorskip("torch")
    from cupyflash.interop import torch_append  # noqa: F401  # the operator comes with it

    new, slots = torch.randn(2, 5, 2, 8).half(), torch.tensor([3, -1, 20, 7, 0])
    caches = torch.zeros(2, 6, 4, 2, 8, dtype=torch.int8)
    tail = None, None, None, slots, None, None, "bshd", False, False
    scales = torch.ones(2, 6, 4, 2), torch.ones(2)
    for more in (
        (None, None, *scales[0]), (scales[1], None, None, scales[0][0]),
        (None, None, None, None, 0.5, 2.0),
    ):  # fmt: skip
        torch.library.opcheck(torch.ops.cupyflash.append.default, (None, *new, *caches, *tail, *more))
    with pytest.raises(ValueError, match="^v_descale shares memory with k_descale"):
        torch.ops.cupyflash.append.default(None, *new, *caches, *tail, None, None, scales[0][0], scales[0][0])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_scales_of_rows_have_memory_of_their_own(library: str) -> None:
    """What K writes there is not what V divides by."""
    put = np.array if library == "numpy" else tensor
    new, filled = put(np.ones((2, 1, 2, 8), np.float16)), put(np.zeros(2, np.int32))
    memory = put(np.ones((2, 4, 3), "f4"))
    for k_descale, v_descale, message in (
        (memory[..., :2], memory[..., :2], "^v_descale shares memory with k_descale; it must have memory of its own$"),
        (memory[..., :2], memory[..., 1:], "^v_descale shares memory with k_descale"),
    ):
        caches = put(K8), put(K8)
        with pytest.raises(ValueError, match=message):
            attention_append(None, new, new, *caches, filled, k_descale=k_descale, v_descale=v_descale)
        assert not any(of.any() for of in caches)
    cache = put(K8)
    if library == "torch":
        with pytest.raises(ValueError, match=r"^v_descale has shape \(2, 4, 2\) and strides \(12, 3, 0\)"):
            attention_append(None, new, new, cache, put(K8), filled, v_descale=memory[..., :1].expand(2, 4, 2))
    apart = {"k_descale": memory[..., :1].repeat(2, -1) if library == "numpy" else memory[..., :2].clone()}
    attention_append(None, new, new, cache, put(K8), filled, v_descale=memory[..., 1:], **apart)


def test_what_is_not_finite_warns_of_nothing() -> None:
    """Neither a scale of 0 nor one beyond the rows that there are; so too where warnings are errors."""
    q, scales = Q[:, :1], np.ones((2, 4, 2), "f4")
    scales[:, 3] = np.inf
    mask = np.arange(4) < 3
    with np.errstate(all="raise"):
        assert not attention(q, K8, K8, key_mask=mask, k_descale=scales, v_descale=scales).any()
        new = np.array([np.inf, np.nan, 1, 0] * 8, np.float16).reshape(2, 1, 2, 8)
        attention_append(None, new, new, K8.copy(), F8.copy().view("i1"), np.zeros(2, np.int32), k_descale=scales,
                         v_descale=np.zeros(2, "f4"))  # fmt: skip


def test_numbers_that_scale_nothing_and_what_is_no_argument() -> None:
    new, filled = np.ones((2, 1, 2, 8), np.float16), np.zeros(2, np.int32)
    attention_append(None, new, new, cache := K8.copy(), K8.copy(), filled, k_descale=1e-30)
    assert (cache[:, 0] == 127).all()
    with pytest.raises(ValueError, match="^scale times k_descale is 3.*; for int8 inputs its size must be"):
        attention(Q, K8, K8, k_descale=1e-30)
    with pytest.raises(TypeError, match="^attention_append.. got an unexpected keyword argument 'numbers'"):
        attention_append(None, new, new, K8.copy(), K8.copy(), filled, numbers={"k_descale": -1.0})
    with pytest.raises(TypeError, match="^k has dtype uint8; .*, int8 beside q of float16 or bfloat16$"):
        attention(Q, K8.view("u1"), K8.view("u1"))


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_compiled_with_another_number_each_time(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "compile"):
        pytest.skip("this PyTorch compiles nothing")
    q, k = torch.ones(2, 1, 4, 8, dtype=torch.float16), torch.arange(160, dtype=torch.int8).reshape(2, 5, 2, 8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: attention(q, k, k, **{name: x}), backend="aot_eager", fullgraph=True)
    for x in (0.02, 0.03, 0.04):  # the second makes it a symbol
        assert torch.equal(compiled(x), attention(q, k, k, **{name: x}))
    with pytest.raises(Exception, match=f"{name} is nan; it must be finite"):
        attention(q, k, k, **{name: float("nan")})


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_pages_that_are_shared_take_their_scales_along(layout: str, rng: np.random.Generator) -> None:
    """A fork copies a page that it writes to, and what the rows there are multiplied by."""

    def lay(x: np.ndarray, axis: int) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(axis, axis + 1)) if layout == "bhsd" else x

    pools = [
        *(lay(np.zeros((8, 4, 2, 8), np.int8), 1) for _ in "kv"),
        *(lay(np.zeros((8, 4, 2), "f4"), 1) for _ in "kv"),
    ]
    scales = dict(zip(("k_descale", "v_descale"), pools[2:]))
    pages = Pages(pools, layout=layout)
    first, rows = pages.allocate(), half(rng, 1, 6, 2, 8)
    room = pages.append([first], [6])
    attention_append(None, *[lay(rows, 1)] * 2, *pools[:2], room.seqlens_k, page_table=room.page_table, layout=layout,
                     **scales)  # fmt: skip
    both, q, new = [first, pages.fork(first)], half(rng, 2, 1, 4, 8), half(rng, 2, 1, 2, 8)
    room = pages.append(both, [1, 1])
    found = attention_append(lay(q, 1), *[lay(new, 1)] * 2, *pools[:2], room.seqlens_k, page_table=room.page_table,
                             layout=layout, **scales)  # fmt: skip
    whole = np.concatenate((rows.repeat(2, 0), new), 1)
    np.testing.assert_allclose(lay(found, 1), attention(q, whole, whole), atol=0.03)
    with pytest.raises(ValueError, match=r"^pools\[1\] has shape \(8, 4\); it must be .*\) for scales"):
        Pages([pools[0], np.zeros((8, 4))], layout=layout)


@pytest.mark.parametrize("eight", EIGHT)
def test_jax_refuses_gradients_of_new_rows(eight: str) -> None:
    """Which integers would have as 0."""
    jax = pytest.importorskip("jax")
    new, cache, filled = _jax(Q[:, :1]), _jax(K8.view(EIGHT[eight])), _jax(np.zeros(2, np.int32))

    def step(new: Any) -> Any:
        return attention_append(new, new, new, cache, cache, filled, v_descale=0.5)[0].astype("f4").sum()

    jax.jit(step)(new), jax.vmap(lambda x: step(new * x))(np.ones(2, "f2"))
    for of in (
        step,
        lambda x: attention_append(new, x, new, cache, cache, filled)[0].astype("f4").sum(),
        jax.jit(lambda x: attention_append(new, new, x, cache, cache, filled)[0].astype("f4").sum()),
    ):
        with pytest.raises(TypeError, match="_new is written to caches of 8 bits, of which there is a forward alone"):
            jax.grad(of)(new)
    jax.grad(lambda x: step(jax.lax.stop_gradient(x)) + x.astype("f4").sum())(new)


@pytest.mark.parametrize("eight", EIGHT)
@pytest.mark.parametrize("scale", [None, 0.3, 0.013, 1 / 3])
def test_jax_rounds_as_numpy(scale: float | None, eight: str, rng: np.random.Generator) -> None:
    """Near ties, too: XLA would multiply by the inverse of a divisor that many numbers have."""
    jax = pytest.importorskip("jax")
    for dtype in ("float16", "bfloat16"):
        x = rng.standard_normal((1, 2000, 2, 64)).astype(DTYPES[dtype])
        want = quantised(np, x, eight, scale)
        of_jax = functools.partial(quantised, jax.numpy, dtype=eight, scale=scale)
        for found in (of_jax(jax.numpy.asarray(x)), jax.jit(lambda x, run=of_jax: run(x))(x)):
            np.testing.assert_array_equal(np.asarray(found[0]).view("u1"), want[0].view("u1"))
            np.testing.assert_allclose(found[1], want[1], rtol=1e-7 if scale else 0)
