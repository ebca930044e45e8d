"""What problems of the fuzzer hold beside normal numbers, how arrays lie, and the ways in which a call is made."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from backends import Backend
from reference import DTYPES, state
from semantics import LAYS, Blocks, Inputs, Judge, Lay, as_arguments, as_given, check, wrt_of

from cupyflash import attention, attention_backward, block_mask, merge
from cupyflash.gpu import tuned
from cupyflash.gpu.device import Arch
from cupyflash.gpu.plan import FAMILIES
from cupyflash.passes import Pass
from cupyflash.problem import AttentionProblem

# ---- values ---------------------------------------------------------------------------------------------------------

Change = Callable[[np.random.Generator, Inputs], None]


def _equal(rng: np.random.Generator, x: Inputs) -> None:
    x.k[...] = x.k[:, :1]


def _ramp(rng: np.random.Generator, x: Inputs) -> None:
    """Scores grow from key to key, or fall: a maximum is raised in each tile, or in none."""
    along = np.linspace(0, rng.choice([-1, 1]) * rng.uniform(0.5, 3), x.k.shape[1])[None, :, None, None]
    x.q[...], x.k[...] = x.q * 0.3 + 1, x.k * 0.3 + along


def _huge(rng: np.random.Generator, x: Inputs) -> None:
    x.q[...] = x.q * 2.0 ** rng.integers(2, 6)


def _spike(rng: np.random.Generator, x: Inputs) -> None:
    """One key, in each entry another."""
    at = rng.integers(x.k.shape[1], size=len(x.k))
    x.k[np.arange(len(x.k)), at] *= 16


def _large_values(rng: np.random.Generator, x: Inputs) -> None:
    x.v[...], x.dout[...] = x.v * 16, x.dout * 4


def _slopes(rng: np.random.Generator, x: Inputs) -> None:
    """Large ones, and such as favour what is far."""
    slopes = x.given["alibi_slopes"]
    slopes[...] = slopes * rng.choice([-1, 1], slopes.shape) * 2.0 ** rng.integers(0, 6)


def _hidden(rng: np.random.Generator, x: Inputs) -> None:
    """All keys of an entry, or all that some queries see."""
    if x.key_mask is not None:
        x.key_mask[rng.integers(len(x.key_mask))] = False
    if "mask" in x.given:
        mask = x.given["mask"]
        mask[rng.random((*mask.shape[:3], 1)).repeat(mask.shape[3], 3) < rng.choice([0.1, 0.9])] = False


def _nan(rng: np.random.Generator, x: Inputs) -> None:
    one = x[rng.integers(4)]
    one[tuple(rng.integers(one.shape))] = np.nan


def _infinite(rng: np.random.Generator, x: Inputs) -> None:
    """A key whose product with every query is -inf: none sees it."""
    column = rng.integers(x.q.shape[3])
    np.abs(x.q[..., column], out=x.q[..., column])
    x.q[..., column] += x.q.dtype.type(0.1)
    x.k[:, rng.integers(x.k.shape[1]), :, column] = -np.inf


CHANGES: dict[str, Change] = {
    "equal": _equal, "ramp": _ramp, "huge": _huge, "spike": _spike, "large values": _large_values, "slopes": _slopes,
    "hidden": _hidden, "nan": _nan, "infinite": _infinite,
}  # fmt: skip
LARGE_SCORES = ("ramp", "huge", "spike", "slopes", "infinite")  # where luck decides, as `Judge` has it


def changes_for(kind: Any, x: Inputs) -> list[str]:
    """Those that say something of a problem of this kind: not NaN where something is hidden, of which it might be."""
    hides = kind.causal or kind.left or kind.right or kind.key_mask or kind.blocks is not None or kind.score
    hides = hides or "mask" in x.given or kind.dropout
    needs = {
        "slopes": "alibi_slopes" in x.given, "hidden": x.key_mask is not None or "mask" in x.given,
        "nan": not hides and 0 not in (x.q.size, x.v.size),
        "infinite": not (hides or kind.negative or kind.softcap or kind.latent) and x.q.size > 0 and x.k.shape[1] > 1
        and kind.library in ("numpy", "cupy"),  # (latent: V has the infinity, too, and 0 times that is NaN)
    }  # fmt: skip
    return [name for name in CHANGES if needs.get(name, True)]


# ---- layouts --------------------------------------------------------------------------------------------------------


def repeated(x: Any, count: int) -> Any:
    """An array whose first axis has one entry, so many times, with stride 0."""
    xp = sys.modules[type(x).__module__.partition(".")[0]]
    return xp.lib.stride_tricks.as_strided(x, (count, *x.shape[1:]), (0, *x.strides[1:]))


def draw_lays(rng: np.random.Generator, inputs: Inputs) -> tuple[dict[str, Lay], str]:
    """One for each array. What is the same in all of the batch may lie in memory once."""
    names = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", *inputs.given)
    drawn = {name: list(LAYS)[rng.integers(len(LAYS))] for name in names if rng.random() < 0.5}
    lays = {name: LAYS[lay] for name, lay in drawn.items()}
    for name, x in zip(("q", "k", "v", "dout"), inputs):
        if rng.random() < 0.15 and len(x) > 1:
            x[...] = x[:1]
            lays[name] = Lay(lambda s: (1, *s[1:]), functools.partial(repeated, count=len(x)))
            drawn[name] = "stride 0"
    return lays, str(drawn)


class ByFunction(Blocks):
    """Blocks whose mask is made of a function, as callers mostly do."""

    def mask(self, like: Any = None) -> Any:
        module = type(self.seen if like is None else like).__module__.partition(".")[0]
        if module not in ("numpy", "cupy"):
            return super().mask(like)
        seen = self.seen if module == "numpy" else sys.modules["cupy"].asarray(self.seen)
        return block_mask(lambda b, h, i, j: seen[b, h, i, j], shape=seen.shape, block=self.block, like=like)


# ---- ways to call ---------------------------------------------------------------------------------------------------


@functools.cache
def own_stream(make: type) -> Any:
    """One for all problems of a process: memory is kept by stream, and a new one's would be asked of the driver."""
    return make(non_blocking=True)


@contextlib.contextmanager
def a_stream(backend: Backend) -> Iterator[None]:
    """Everything on a stream of its own, beside which the default one does nothing."""
    stream = own_stream(backend.xp.cuda.Stream)
    with stream:
        yield
        stream.synchronize()


@contextlib.contextmanager
def red_zones(backend: Backend) -> Iterator[None]:
    """All memory that is asked for, results and workspaces too, lies apart in one piece, of which the rest stays as it
    was."""
    from test_guards import Arena

    arena = Arena(backend)
    with arena.serves():
        yield
        backend.xp.cuda.get_current_stream().synchronize()
    arena.check()


_tiles = 0  # of the kind before


@contextlib.contextmanager
def with_tiles(number: int) -> Iterator[None]:
    """Where that is not 0, kernels have tiles as `tune` stores them, those of this number."""
    global _tiles
    if number != _tiles:
        from cupyflash.gpu import corridor  # needs CuPy

        corridor.forget()
        _tiles = number
    before = tuned.tiles
    tuned.tiles = functools.partial(tiles_of, number) if number else before
    try:
        yield
    finally:
        tuned.tiles = before


def tiles_of(number: int, problem: AttentionProblem, arch: Arch, of: Pass) -> dict[str, tuple[int, ...]]:
    """One of each family that `tune` would try, the same for problems that take the same ones."""
    found = {}
    for name, room in FAMILIES.items():
        if (tiles := room.TILES.get(of)) is not None:
            tried = _tried(name, of)
            start = number % len(tiles.table if number % 2 else tried)  # half of the time a tile of the table
            in_turn = (*tried[start:], *tried[:start])
            found[name] = next((tile for tile in in_turn if tiles.possible(tiles.tile(tile), problem)), tried[0])
    return found


@functools.cache
def _tried(family: str, of: Pass) -> list[tuple[int, ...]]:
    tiles = FAMILIES[family].TILES[of]
    return list(dict.fromkeys([*tiles.listed(), *itertools.product(*tiles.tried.values())]))


class Plain(Backend):
    """Which leaves free memory as it is: it may be few."""

    def poison(self) -> None:
        pass


def in_threads(run: Callable[[], None], count: int = 3) -> None:
    """The same call in several threads at once."""
    errors: list[BaseException] = []

    def one() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_cupy_or_numpy(rng: np.random.Generator, backend: Backend, inputs: Inputs, options: dict[str, Any]) -> str:
    """`check`, in one of the ways that there are; which."""
    ways = ["plain"] * 12 + ["threads"]
    if _merges(inputs, options):
        ways += ["merge"] * 2
    if backend.family is not None:
        ways += ["stream"] * 2
        if options["rank"] == 4 and "blocks" not in options and "latent" not in options:
            ways += ["graph"]
        if 64 * (inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes) < 32 << 20:
            ways += ["red zones"] * 2
    way = ways[rng.integers(len(ways))]
    if way == "threads":
        also = {name: options[name] for name in ("backward", "blocks", "thorough") if name in options}
        own = {name: options[name] for name in OF_A_CALL}
        judge = Judge(inputs, own, **{"backward": True, "large_scores": options["large_scores"], **also})
        judge.reckon()
        in_threads(lambda: check(backend, inputs, judge=judge, **options))
    elif way == "merge":
        check_merge(rng, backend, inputs, options)
    elif way == "stream":
        with a_stream(backend):
            check(backend, inputs, **options)
    elif way == "graph":
        check(backend, inputs, **options)
        check_graph(backend, inputs, options)
    elif way == "red zones":
        with red_zones(backend):
            check(Plain(backend.name, backend.family), inputs, **options)
    else:
        check(backend, inputs, **options)
    return way


OF_A_CALL = ("causal", "window", "scale", "softcap", "score", "dropout", "at")


def check_graph(backend: Backend, inputs: Inputs, options: dict[str, Any]) -> None:
    """Captured, and replayed into what holds NaN: the bits of a call."""
    own = {name: options[name] for name in OF_A_CALL}
    problem = state(*inputs[:3], inputs.key_mask, **own, **inputs.given)
    given = inputs.given if inputs.key_mask is None else inputs.given | {"key_mask": inputs.key_mask}
    own |= as_arguments({name: as_given(name, x, backend.put) for name, x in given.items()})
    own["family"] = backend.family_for(problem)
    if options.get("placed"):
        own["at"] = backend.put(np.array(options["at"], options["placed"]))
    q, k, v, dout = (backend.put(x) for x in inputs[:4])
    targets = [backend.nan(x.shape, problem.dtype) for x in (dout, q, k, v)]
    how = {"deterministic": options["deterministic"], "wrt": wrt_of(problem, inputs.given)}
    if inputs.dlse is not None:
        how["dlse"] = backend.put(inputs.dlse)

    def run(out: Any = None, *grads: Any) -> tuple[Any, ...]:
        out, lse = attention(q, k, v, out=out, return_lse=True, **own)
        results = attention_backward(dout, q, k, v, out, lse, grads=grads or None, **how, **own)
        return (out, lse, *results) if options["deterministic"] else (out, lse)

    stream = own_stream(backend.xp.cuda.Stream)
    backend.xp.cuda.get_current_stream().synchronize()
    with stream:
        first = backend.get_all(list(run(*targets)))  # and memory is in the pool
        stream.begin_capture()
        try:
            captured = run(*targets)
        finally:
            graph = stream.end_capture()
        for x in targets:
            x.view(np.uint8)[...] = 255  # NaN
        graph.launch(stream)
        stream.synchronize()
        for n, (x, y) in enumerate(zip(first, backend.get_all(list(captured)))):
            assert x.tobytes() == y.tobytes(), f"result {n} of a graph has other bits than that of a call"


def _merges(inputs: Inputs, options: dict[str, Any]) -> bool:
    others = (
        options["causal"],
        options["window"],
        options["dropout"],
        options["score"],
        options.get("blocks"),
        options["at"],
    )
    plain = (
        not inputs.given
        and "latent" not in options
        and not any(x is not None and x is not False and x != 0 for x in others)
    )
    plain = plain and all(np.isfinite(x.astype(np.float64)).all() for x in inputs[:3])
    return plain and options["rank"] == 4 and inputs.k.shape[1] > 3


def check_merge(rng: np.random.Generator, backend: Backend, inputs: Inputs, options: dict[str, Any]) -> None:
    """Attention over parts of the keys, put together, is that over all of them."""
    own = {name: options[name] for name in ("scale", "softcap")}
    judge = Judge(inputs, own, False, options.get("large_scores", False))
    q, k, v = (backend.put(x) for x in inputs[:3])
    count = int(rng.integers(2, min(8, k.shape[1]) + 1))
    cuts = np.sort(rng.choice(np.arange(1, k.shape[1]), count - 1, replace=False))
    bounds = [0, *map(int, cuts), k.shape[1]]
    seen, parts = inputs.key_mask, []
    if seen is not None and seen.shape[1] == 1:  # one for all keys
        seen = np.repeat(seen, k.shape[1], axis=1)
    for i, j in itertools.pairwise(bounds):
        key_mask = None if seen is None else backend.put(seen[:, i:j])
        parts.append(
            attention(q, k[:, i:j], v[:, i:j], key_mask=key_mask, return_lse=True, family=backend.family, **own)
        )
    out, lse = (backend.get(x) for x in merge(*zip(*[(x.astype(x.dtype), y) for x, y in parts])))
    judge("lse", lse)
    # Each part was rounded, and then their sum.
    assert out.dtype == DTYPES[judge.problem.dtype]
    error, eps = np.abs(out.astype(np.float64) - judge.exact.out), float(np.finfo(np.float16).eps)
    eps = {"float16": eps, "bfloat16": 8 * eps}.get(judge.problem.dtype, 1e-6)
    allowed = (
        4 * eps * np.abs(inputs.v.astype(np.float64)).max() + 1e-5 + 2 * np.abs(judge.own.out - judge.exact.out).max()
    )
    assert (error <= allowed).all(), f"merged out is off by {error.max():.3e}; at most {allowed:.3e} is allowed"


# ---- drop-ins of PyTorch and JAX ------------------------------------------------------------------------------------


def drop_in(name: str, inputs: Inputs, options: dict[str, Any]) -> Callable[..., Any] | None:
    """Another package's function that means the same, on arrays (B, S, H, D); None where there is none."""
    if options.get("score") or options.get("blocks") or options["dropout"] or options["rank"] != 4:
        return None
    if inputs.key_mask is not None or inputs.dlse is not None or set(inputs.given) - {"alibi_slopes"}:
        return None
    causal, (left, right), scale = options["causal"], options["window"] or (None, None), options["scale"]
    if name == "torch" and causal != "top_left":
        from cupyflash.compat.flash_attn import flash_attn_func

        window = (-1 if left is None else left, -1 if right is None else right)
        cap = options["softcap"] or 0.0
        return lambda q, k, v, **given: flash_attn_func(
            q, k, v, softmax_scale=scale, causal=causal, window_size=window, softcap=cap, **given
        )
    if options["softcap"] or inputs.given:
        return None
    if name == "torch" and options["window"] is None:
        from cupyflash.torch import scaled_dot_product_attention

        def sdpa(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return found.transpose(1, 2)

        return sdpa
    if name == "jax" and options["window"] is None and causal is not True:
        from cupyflash.jax import dot_product_attention

        return lambda q, k, v: dot_product_attention(q, k, v, scale=scale, is_causal=bool(causal))
    return None
