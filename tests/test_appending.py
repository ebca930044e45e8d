"""attention_append: what it writes, where, and what it attends to; and what it refuses before it writes anything."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from criterion import assert_as_good
from ragged import Case, draw_case, expected
from reference import DTYPES, draw

from cupyflash import attention, attention_append
from cupyflash.namespaces import namespace
from cupyflash.rotary import rotate

A = (slice(None),)


def turned(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rows x (rows, heads, D) by angles (rows, half), as it is told in words: pair by pair."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    found, half = x.copy(), angles.shape[1]
    cos, sin = np.cos(angles).astype(wide), np.sin(angles).astype(wide)
    for i in range(half):
        one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = x[..., one].astype(wide), x[..., other].astype(wide)
        found[..., one] = (a * cos[:, i, None] - b * sin[:, i, None]).astype(x.dtype)
        found[..., other] = (a * sin[:, i, None] + b * cos[:, i, None]).astype(x.dtype)
    return found


class Appended:
    """A case whose last rows are still to be written: `before` is what caches are then, `after` what they must become.

    `angles`: (positions, half) of rotary.
    """

    def __init__(self, case: Case, angles: np.ndarray | None = None, interleaved: bool = False) -> None:
        q = case.arrays["q"].copy()
        lens = [len(q[of]) for of in case.queries]
        totals = case.lengths["seqlens_k"]
        self.filled = totals - np.array(lens, totals.dtype)
        nan = q.dtype.type(np.nan)
        self.before, self.new, self.after = {}, {}, {}
        for name in "kv":
            x = case.arrays[name]
            self.new[name] = np.full((*q.shape[:-2], *x.shape[-2:]), nan, q.dtype)
            self.before[name], self.after[name] = x.copy(), x.copy()
        for n, (of_q, of_k) in enumerate(zip(case.queries, case.keys)):
            behind = np.arange(int(self.filled[n]), int(totals[n]))
            rows = of_k[0], np.arange(x.shape[1])[of_k[1]]
            rows = (rows[0][behind] if np.ndim(rows[0]) else rows[0], rows[1][behind])
            for name in "kv":
                self.new[name][of_q] = case.arrays[name][rows]
                self.before[name][rows] = nan
            if angles is not None:
                self.after["k"][rows] = turned(case.arrays["k"][rows], angles[behind], interleaved)
                q[of_q] = turned(q[of_q], angles[behind], interleaved)
        self.q = case.arrays["q"]
        self.case = case._replace(arrays=case.arrays | {"q": q, **self.after})
        self.options = {**case.options, **case.given, **case.lengths} | {"seqlens_k": self.filled}
        if angles is not None:
            wide = np.float64 if q.dtype == np.float64 else np.float32
            self.options["rotary"] = np.cos(angles).astype(wide), np.sin(angles).astype(wide)
            self.options["rotary_interleaved"] = interleaved

    def run(
        self,
        layout: str = "bshd",
        put: Any = lambda x: x,
        back: Any = lambda x: x,
        by: Any = attention_append,
        **how: Any,
    ) -> None:
        """Append, and judge caches, to the bit, and results."""

        def laid(x: np.ndarray) -> Any:
            return put(np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x.copy())

        q, k, v, *caches = (laid(x) for x in (self.q, *self.new.values(), *self.before.values()))
        given = {name: tuple(map(put, x)) if name == "rotary" else x for name, x in self.options.items()}
        given = {name: put(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        filled = given.pop("seqlens_k")
        out, lse, *changed = by(q, k, v, *caches, filled, return_lse=True, layout=layout, **given, **how)
        caches = changed or caches
        exact, own = expected(self.case, False, False), expected(self.case, True, False)
        first = (lambda x: x.swapaxes(-3, -2)) if layout == "bhsd" else (lambda x: x)
        for name, x in zip("kv", caches):
            assert_same(first(back(x)), self.after[name])
        assert_as_good(first(back(out)), exact["out"], own["out"], "out", len(exact["out"]) ** 0.5)
        assert_as_good(back(lse), exact["lse"], own["lse"], "lse")
        assert_same(back(filled), self.filled)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """To the bit, NaN too."""
    assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()


LENGTHS = {"packed": ([3, 0, 1, 20], [30, 5, 1, 41]), "dense": ([2] * 4, [30, 2, 9, 41])}
FORMS = tuple(itertools.product(LENGTHS, ("filled", "paged")))


def appended(rng: np.random.Generator, form_q: str, form_k: str, half: int = 0, **how: Any) -> Appended:
    interleaved = bool(rng.integers(2))
    case = draw_case(rng, *LENGTHS[form_q], form_q=form_q, form_k=form_k, page=how.pop("page", 8), **how)
    angles = rng.uniform(0, 6, (50, half)) if half else None
    return Appended(case, angles, interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_rows_are_written_turned_and_attended(form_q: str, form_k: str, dtype: str, rng: np.random.Generator) -> None:
    for layout, half in (("bshd", 0), ("bhsd", 6), ("bshd", 8)):
        one = appended(rng, form_q, form_k, half, dtype=dtype, dims=(16, 24), options={"causal": bool(half)})
        one.run(layout)


@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_pages_of_any_size(page: int, rng: np.random.Generator) -> None:
    lens = ([2, 1, 30], [70, 1, 100]) if page < 64 else ([2, 1, 30], [68, 1, 100])
    Appended(draw_case(rng, *lens, form_k="paged", page=page, integers=np.int32)).run()


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"options": {"window": (3, 2)}}, "softcap": {"options": {"softcap": 0.7}},
    "key_mask": {"given": ("key_mask",)}, "mask": {"given": ("mask",)}, "bias": {"given": ("bias",)},
    "alibi": {"given": ("alibi_slopes",)}, "sinks": {"given": ("sinks",)},
    "dropout": {"given": ("seed",), "options": {"dropout": 0.3}}, "scale": {"options": {"scale": -0.4}},
    "invariant": {"options": {"batch_invariant": True}},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_as_in_attention(name: str, rng: np.random.Generator) -> None:
    for form_k in ("filled", "paged"):
        appended(rng, "packed", form_k, 4, **OPTIONS[name]).run(max_seqlen_k=7, max_seqlen_q=1)


def test_score_functions_and_targets(rng: np.random.Generator) -> None:
    one = appended(rng, "packed", "paged", 4)
    q, k, v, *caches = (x.copy() for x in (one.q, *one.new.values(), *one.before.values()))
    given = {name: x for name, x in one.options.items() if name != "seqlens_k"}
    out, table = np.full((*q.shape[:-1], 16), np.nan, q.dtype), rng.standard_normal(60).astype(np.float32)
    score = {"score": lambda s, b, h, i, j, table: s + table[j] * b, "score_arrays": {"table": table}}
    assert attention_append(q, k, v, *caches, one.filled, out=out, **score, **given) is out
    seen = {name: one.case.lengths[name] for name in ("cu_seqlens_q", "seqlens_k", "page_table")}
    again = attention(one.case.arrays["q"], *one.after.values(), **score, **seen)
    assert_same(out, again)


def test_the_rotation_is_that_of_complex_numbers(rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 1, 7, 2, 16))
    caches, angles = np.zeros((2, 1, 20, 2, 16)), rng.uniform(0, 6, (20, 5))
    rotary = np.cos(angles), np.sin(angles)
    attention_append(None, k, v, *caches, np.array([4]), rotary=rotary, rotary_interleaved=True)
    as_complex = (k[0, ..., 0:10:2] + 1j * k[0, ..., 1:10:2]) * np.exp(1j * angles[4:11, None])
    found = caches[0][0, 4:11]
    np.testing.assert_allclose(found[..., 0:10:2] + 1j * found[..., 1:10:2], as_complex, rtol=1e-12)
    assert (found[..., 10:] == k[0, ..., 10:]).all() and (caches[1][0, 4:11] == v[0]).all()
    halves = np.zeros((2, 1, 20, 2, 16))
    order = [*range(0, 10, 2), *range(1, 10, 2), *range(10, 16)]
    attention_append(None, k[..., order], v, *halves, np.array([4]), rotary=rotary)
    np.testing.assert_array_equal(halves[0], caches[0][..., order])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_that_stand_nowhere_are_turned_by_some_angle(kind: str, rng: np.random.Generator) -> None:
    """They are not written, but what their lengths say is no place in the tables."""
    pytest.importorskip(kind)
    xp = namespace(kind)
    put = xp.from_numpy if kind == "torch" else np.asarray
    x, table = put(rng.standard_normal((4, 2, 6))), put(rng.standard_normal((5, 3)))
    found = rotate(xp, x, table, table, put(np.array([-7, 2, 5, 2**40])), False)
    assert np.isfinite(np.asarray(found)).all()
    assert np.array_equal(
        np.asarray(found[1:2]), np.asarray(rotate(xp, x[1:2], table, table, put(np.array([2])), False))
    )


def test_token_by_token_is_all_at_once(rng: np.random.Generator) -> None:
    """In chunks of any lengths, to the bit; nothing but new rows is written."""
    n, s, angles = 3, 23, rng.uniform(0, 6, (30, 8))
    q, k, v = rng.standard_normal((3, n, s, 2, 16)).astype(np.float32)
    rotary = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    whole = np.full((2, n, 30, 2, 16), np.nan, np.float32)
    none = np.zeros(n, np.int64)
    out = attention_append(q, k, v, *whole, none, rotary=rotary, causal=True)
    parts, at = np.full_like(whole, np.nan), 0
    for step in (1, 5, 1, 1, 9, 2, 4):
        rows = A + (slice(at, at + step),)
        found = attention_append(q[rows], k[rows], v[rows], *parts, none + at, rotary=rotary, causal=True)
        np.testing.assert_allclose(found, out[rows], rtol=1e-5, atol=1e-6)
        at += step
    assert at == s
    assert_same(parts, whole)


def test_views_of_one_pool(rng: np.random.Generator) -> None:
    """(pages, 2, page, heads, dim), and what lies between is left alone."""
    one = appended(rng, "packed", "paged")
    pool = np.full((len(one.before["k"]), 3, 8, 2, 32), 7, np.float32)
    pool[:, 0, :, :, ::2], pool[:, 2, :, :, ::2] = one.before["k"], one.before["v"]
    k, v = pool[:, 0, :, :, ::2], pool[:, 2, :, :, ::2]
    given = {name: x for name, x in one.options.items() if name != "seqlens_k"}
    attention_append(one.q, *one.new.values(), k, v, one.filled, **given)
    assert_same(k, one.after["k"])
    assert_same(v, one.after["v"])
    assert (pool[:, 1] == 7).all() and (pool[..., 1::2] == 7).all()


def test_new_rows_may_lie_in_the_cache(rng: np.random.Generator) -> None:
    caches = rng.standard_normal((2, 1, 9, 2, 8))
    rows = caches[:, :, :3].copy()
    attention_append(None, caches[0, :, :3], caches[1, :, :3], *caches, np.array([1]))
    np.testing.assert_array_equal(caches[:, :, 1:4], rows)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_slots(layout: str, rng: np.random.Generator) -> None:
    for shape in ((7,), (2, 5)):
        pool = draw(rng, "bfloat16", 2, 6, 4, 2, 16)
        k, v = draw(rng, "bfloat16", 2, *shape, 2, 16)
        slots = rng.permutation(24)[: np.prod(shape)].reshape(shape).astype(np.int32)
        slots.flat[::3] = -1
        want = pool.copy()
        for x, whole in ((k, want[0]), (v, want[1])):
            for place in np.ndindex(*shape):
                if slots[place] >= 0:
                    whole[slots[place] // 4, slots[place] % 4] = x[place]

        def laid(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x.swapaxes(-3, -2)) if layout == "bhsd" else x.copy()

        caches = laid(pool[0]), laid(pool[1])
        assert attention_append(None, laid(k), laid(v), *caches, slots=slots, layout=layout) is None
        for x, whole in zip(caches, want):
            assert_same(x.swapaxes(-3, -2) if layout == "bhsd" else x, whole)
    nowhere = pool.copy()
    attention_append(None, k, v, *nowhere, slots=np.full(shape, -1))
    assert_same(nowhere, pool)


def test_nothing_to_do(rng: np.random.Generator) -> None:
    """No sequence, no row, no room, a row of nobody."""
    for n, rows, room in ((0, 3, 4), (2, 0, 4), (2, 0, 0), (0, 0, 0)):
        q, k, v = np.full((3, n, rows, 2, 8), np.nan, np.float32)
        caches = np.zeros((2, n, room, 2, 8), np.float32)
        assert attention_append(q, k, v, *caches, np.zeros(n, np.int32)).shape == q.shape
        assert not caches.any()
    q = np.full((4, 2, 8), np.nan, np.float32)
    caches = np.zeros((2, 2, 4, 2, 8), np.float32)
    out = attention_append(q, q, q, *caches, np.array([0, 3]), cu_seqlens_q=np.zeros(3, int))
    assert not out.any() and not caches.any()


# ---- other libraries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_pytorch(form_q: str, form_k: str, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    for layout in ("bshd", "bhsd"):
        one = appended(rng, form_q, form_k, 6, options={"causal": True}, given=("bias",))
        one.run(layout, torch.from_numpy, lambda x: x.numpy())
    caches = torch.zeros(2, 1, 4, 2, 8, dtype=torch.bfloat16)
    new = torch.ones(2, 1, 3, 2, 8, dtype=torch.bfloat16)
    attention_append(None, *new, *caches, slots=torch.tensor([[2, -1, 0]], dtype=torch.int32))
    assert caches[:, 0].float().mean((0, 2, 3)).tolist() == [1, 0, 1, 0]


def test_pytorch_follows_no_gradient() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 2, 2, 8)
    caches, filled = torch.zeros(2, 1, 4, 2, 8), torch.zeros(1, dtype=torch.int64)
    k.requires_grad_()
    with pytest.raises(ValueError, match=r"^k_new requires grad, and attention_append, .* torch\.no_grad\(\)"):
        attention_append(q, k, v, *caches, filled)
    assert not caches.any()
    with torch.no_grad():
        attention_append(q, k, v, *caches, filled)
    assert (caches[0][:, :2] == k).all()
    version = caches._version
    attention_append(q, k.detach(), v, *caches, filled)
    assert caches._version > version


@pytest.mark.parametrize(("form_q", "form_k"), FORMS)
def test_pytorch_compiles_it(form_q: str, form_k: str, rng: np.random.Generator) -> None:
    """In one graph, which writes to the caches that it is given."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    layout = "bhsd" if form_q == "packed" else "bshd"
    one = appended(rng, form_q, form_k, 6, options={"causal": True}, given=("sinks",))
    one.run(
        layout,
        torch.from_numpy,
        lambda x: x.numpy(),
        by=torch.compile(attention_append, fullgraph=True, backend="aot_eager"),
    )
    torch._dynamo.reset()


def test_pytorch_compiles_writing_alone_and_lengths_that_change() -> None:
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    pool, new = torch.zeros(2, 3, 4, 2, 8), torch.ones(2, 5, 2, 8)
    write = torch.compile(
        lambda c, slots: attention_append(None, *new, *c, slots=slots), fullgraph=True, backend="eager"
    )
    write(pool.unbind(), torch.tensor([2, -1, 0, 11, 7]))
    assert pool.mean((0, 3, 4)).flatten().nonzero().flatten().tolist() == [0, 2, 7, 11]
    q, caches, seen = torch.randn(3, 2, 2, 8), torch.zeros(2, 3, 40, 2, 8), []

    def count(module: Any, _: Any) -> Any:
        seen.append(module)
        return module

    step = torch.compile(lambda q, c, n: attention_append(q, q, q, *c, n, causal=True), dynamic=True, backend=count)
    for rows in (5, 6, 7):
        q, filled, other = torch.randn(3, rows, 2, 8), torch.tensor([0, 5, 33 - rows]), caches.clone()
        torch.testing.assert_close(
            step(q, caches.unbind(), filled), attention_append(q, q, q, *other, filled, causal=True)
        )
        assert torch.equal(caches, other)
    assert len(seen) == 1
    torch._dynamo.reset()


def test_pytorch_exports_it() -> None:
    torch = pytest.importorskip("torch")

    class Step(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, filled: Any) -> Any:
            return attention_append(q, q, q, k, v, filled)

    def given() -> tuple[Any, ...]:
        return torch.ones(2, 1, 2, 8), torch.zeros(2, 6, 2, 8), torch.zeros(2, 6, 2, 8), torch.tensor([0, 5])

    with torch.no_grad():
        program = torch.export.export(Step(), given())
    found, want = given(), given()
    torch.testing.assert_close(program.module()(*found), attention_append(want[0], want[0], want[0], *want[1:]))
    assert torch.equal(found[1], want[1]) and torch.equal(found[2], want[2]) and found[1].any()


def test_the_operator_is_what_pytorch_is_told() -> None:
    torch = pytest.importorskip("torch")
    from cupyflash.interop import torch_append  # noqa: F401  # the operator comes with it

    q, new = torch.randn(5, 4, 8), torch.randn(2, 5, 2, 8)
    lengths = torch.tensor([1, 6], dtype=torch.int32), torch.tensor([0, 2, 5]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    angles, pool = torch.rand(12, 3), torch.randn(2, 6, 4, 2, 8)
    for tail in ((*lengths, None, angles.cos(), angles.sin()), (*lengths, None, None, None)):
        torch.library.opcheck(torch.ops.cupyflash.append.default, (q, *new, *pool, *tail, "bshd", False, False))
    slots = torch.tensor([3, -1, 20, 7, 0])
    tail = None, None, None, slots, None, None, "bshd", False, False
    torch.library.opcheck(torch.ops.cupyflash.append.default, (None, *new, *pool, *tail))


def test_what_pytorch_traces_is_refused_before_anything_is_written() -> None:
    torch = pytest.importorskip("torch")
    q, caches, filled = torch.randn(1, 2, 2, 8), torch.zeros(2, 1, 4, 2, 8), torch.zeros(1, dtype=torch.int64)

    def step(q: Any, k: Any, n: Any, **more: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(lambda: attention_append(q, k, q, *caches, n, **more), fullgraph=True, backend="eager")()

    for match, call in {
        r"k_new has shape \(1, 1, 2, 8\)": lambda: step(q, q[:, :1], filled),
        "k_new requires grad": lambda: step(q, q.clone().requires_grad_(), filled),
        "seqlens_k has dtype torch.float32|seqlens_k has dtype float32": lambda: step(q, q, filled.float()),
        r"seqlens_k\[0\] is 3, and 2 rows come behind": lambda: step(q, q, filled + 3),
        "rotary_interleaved is 1": lambda: step(q, q, filled, rotary_interleaved=1),
    }.items():
        with pytest.raises(Exception, match=match):
            call()
    assert not caches.any()
    tensors = q, *map(torch.clone, caches), filled
    with torch._subclasses.FakeTensorMode() as mode:
        fake_q, k, v, n = map(mode.from_tensor, tensors)
        assert attention_append(fake_q, fake_q, fake_q, k, v, n).shape == q.shape
        assert attention_append(None, fake_q, fake_q, k, v, n) is None
        with pytest.raises(ValueError, match=r"^v_new has shape"):
            attention_append(fake_q, fake_q, fake_q[:, :1], k, v, n)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_nonsense_that_nobody_looks_at_writes_nothing_outside(kind: str, rng: np.random.Generator) -> None:
    """What lengths on a device hold is not known: rows go to their own places, or nowhere."""
    from cupyflash import caches
    from cupyflash.passes import FORWARD
    from cupyflash.problem import View, complete, contiguous
    from cupyflash.rules import state

    pytest.importorskip(kind)
    xp, put = namespace(kind), {"torch": lambda x: namespace("torch").from_numpy(x)}.get(kind, lambda x: x)
    put = namespace("jax").asarray if kind == "jax" else put

    def view(x: Any) -> View:
        return View(x.shape, contiguous(x.shape), x.dtype.name, "cpu", "numpy")

    for turn in (1, 1, 1, 2, 2, 2) if kind == "jax" else range(60):  # JAX compiles for each shape
        n, page, pages, t = (int(rng.integers(1, 5)) for _ in range(4)) if kind != "jax" else (3, 2, 4, 3)
        some = np.array([-(2**31), -2, -1, 0, 1, 2, 3, 5, 9, 2**31 - 1])
        lengths = {"seqlens_k": rng.choice(some, n).astype(np.int32)}
        if turn % 3:
            lengths["page_table"] = rng.choice(some, (n, int(rng.integers(0, 4)) if kind != "jax" else 2)).astype(
                np.int32
            )
        if turn % 2:
            lengths["cu_seqlens_q"] = rng.choice(some, n + 1).astype(np.int32)
        entries = pages if turn % 3 else n
        cache = rng.standard_normal((entries, page, 2, 4)).astype(np.float32)
        q = np.zeros((t, 2, 4) if turn % 2 else (n, t, 2, 4), np.float32)
        new = rng.standard_normal(q.shape).astype(np.float32)
        views = {"q": view(q), "k": view(cache), "v": view(cache)} | {name: view(x) for name, x in lengths.items()}
        problem, _ = state(views, {}, complete({}), FORWARD)
        want = cache.copy()
        for place in np.ndindex(q.shape[:-2]):
            if turn % 2:
                ends = lengths["cu_seqlens_q"].astype(int)
                of = min(int(np.searchsorted(ends[1:], place[0], side="right")), n - 1)
                if not ends[of] <= place[0] < ends[of + 1]:
                    continue
                at = int(lengths["seqlens_k"][of]) + place[0] - ends[of]
            else:
                of, at = place[0], int(lengths["seqlens_k"][place[0]]) + place[1]
            if lengths["seqlens_k"][of] < 0 or at >= problem.seq_k:
                continue
            entry = of if "page_table" not in lengths else int(lengths["page_table"][of, at // page])
            if 0 <= entry < entries:
                want[entry, at % page if "page_table" in lengths else at] = new[place]
        told = {name: put(x) for name, x in lengths.items()}
        found = caches.behind(xp, problem, t, told)
        guarded = np.full((entries + 2, page, 2, 4), 7, np.float32)
        guarded[1:-1] = cache
        changed = caches.write(xp, put(guarded)[1:-1], found.places, put(new))
        if kind == "jax":
            guarded[1:-1] = changed
        if len({*map(bytes, np.stack([*map(np.asarray, found.places[:2])], -1)[np.asarray(found.places.real)])}) < int(
            np.asarray(found.places.real).sum()
        ):
            continue  # two rows in one place: whoever is last
        assert (guarded[[0, -1]] == 7).all()
        if turn % 2 and (np.diff(lengths["cu_seqlens_q"].astype(int)) < 0).any():  # whose a row is nothing says
            rows = {*map(bytes, new.reshape(-1, 8))}
            assert all(bytes(x) in rows for x in guarded[1:-1][(guarded[1:-1] != cache).any((-2, -1))])
            continue
        assert_same(guarded[1:-1], want)


# ---- what is refused ------------------------------------------------------------------------------------------------


def given(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 3, 4, 8)).astype(np.float32)
    arrays = {"q": q, "k_new": k[:, :, :2], "v_new": v[:, :, :2]}
    arrays |= dict(zip(("k_cache", "v_cache"), rng.standard_normal((2, 2, 9, 2, 8)).astype(np.float32)))
    return arrays | {"seqlens_k": np.array([2, 6])} | changes


def paged(table: Any, **changes: Any) -> dict[str, Any]:
    pool = np.zeros((2, 6, 4, 2, 8), np.float32)
    return given(k_cache=pool[0], v_cache=pool[1], page_table=np.array(table), **changes)
