"""`attention_weights`: blocks of P = softmax(score(Q Kᵀ)), and sums of them, by the kernels of `attention` itself.

P V is a block of P where V has a column for each of some keys, and Pᵀ dO, the gradient of V, one where dO has a column
for each of some queries. So every option, library, GPU and derivative is that of `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

from . import interop
from .api import attention, attention_backward
from .namespaces import cast, namespace
from .other_names import unexpected
from .problem import FLOATS, check_layout
from .scalars import whole_number
from .signature import A, Array, sharing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import Shared

# Of V, and of dO, in a call: as many as kernels keep in registers; on a CPU a product is a library's.
COLUMNS, COLUMNS_ON_CPU = 128, 1024
REDUCE = ("queries", "keys", "heads")
Which = slice | int | None


class _Asked(TypedDict):
    heads: range
    queries: range
    keys: range


@overload
def attention_weights(
    q: A,
    k: A,
    *,
    queries: Which = None,
    keys: Which = None,
    heads: Which = None,
    reduce: str | None = None,
    largest: None = None,
    lse: Array | None = None,
    **options: Unpack[Shared],
) -> A: ...
@overload
def attention_weights(
    q: A,
    k: A,
    *,
    queries: Which = None,
    keys: Which = None,
    heads: Which = None,
    reduce: None = None,
    largest: int,
    lse: Array | None = None,
    **options: Unpack[Shared],
) -> tuple[A, A]: ...
@sharing(
    attention_backward,
    without=(
        "dlse", "wrt", "grads", "add", "dropout", "seed", "check", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k",
        "page_table", "max_seqlen_q", "max_seqlen_k",
    ),
)  # fmt: skip
def attention_weights(
    q: A,
    k: A,
    *,
    queries: Which = None,
    keys: Which = None,
    heads: Which = None,
    reduce: str | None = None,
    largest: int | None = None,
    lse: Array | None = None,
    **options: Unpack[Shared],
) -> Any:
    """The weights of `attention`, softmax(score(Q Kᵀ)): those of some queries and keys, or a sum over them.

    Costs about an attention for each 128 keys asked for, or a backward for each 128 queries, whichever is less; a sum
    over queries or keys one of them. (On a CPU for each 1024.) Memory is that of the result and of one such call.
    Differentiable in PyTorch and JAX as `attention` is, twice; what is itself a backward, as a sum over queries, once.

    Parameters
    ----------
    q : (B, Sq, Hq, D)
    k : (B, Sk, Hk, D)
        As given to `attention`, in float16, bfloat16, float32 or float64.
    queries, keys, heads : slice or int, optional
        Which weights; default: all. (An int is a slice of one: its axis stays.) Every weight is that of the whole call:
        a row over all keys sums to 1, or to less with sinks, or is 0 where its query sees no key.
    reduce : "queries", "keys" or "heads", optional
        Return the sum over that axis, of those that are chosen: "queries" is how much attention each key gets, "keys"
        how much of each query's goes to these keys, "heads", divided by their number, the average map.
    largest : int, optional
        Return so many of the largest weights of each row, and the numbers of their keys.
    lse : (B, Hq, Sq), optional
        As `attention(..., return_lse=True)` returned it: saves a call where there are few queries.
    causal, window, scale, softcap, key_mask, mask, bias, alibi_slopes, sinks, score, score_arrays, block_mask, at,
    layout, batch_invariant, sms, deterministic, family : as given to `attention`

    Returns
    -------
    weights : (B, heads, queries, keys)
        In the library and dtype of q; (heads, queries, keys) and (queries, keys) where q has no batch, or no heads.
        Without the axis of `reduce`. As PyTorch's and transformers' attention weights, in any layout of q.
    weights, places : (B, heads, queries, largest), with `largest`
        Sorted, the largest first; `places` are numbers of keys of k, integers.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be.
    """
    known = inspect.signature(attention_weights).parameters
    for name in options:
        if name not in known:
            raise unexpected("attention_weights", name, known)
    call = _Weights(q, k, lse, dict(options))
    asked: _Asked = {
        "heads": call.chosen("heads", heads, call.heads),
        "queries": call.chosen("queries", queries, call.queries),
        "keys": call.chosen("keys", keys, call.keys),
    }
    if reduce is not None and reduce not in REDUCE:
        raise ValueError(
            f"reduce is {reduce!r}; it must be None, {', '.join(map(repr, REDUCE[:-1]))} or {REDUCE[-1]!r}"
        )
    if largest is not None:
        return call.given_back(*call.largest(_count(largest, len(asked["keys"]), reduce), **asked))
    if reduce == "queries":
        return call.given_back(call.over_queries(**asked))
    if reduce == "keys":
        return call.given_back(call.over_keys(**asked))
    along_keys, blocks = call.blocks(**asked)
    if reduce == "heads":
        blocks = (call.over_heads(x) for x in blocks)
    return call.given_back(call.xp.concatenate(list(blocks), -1 if along_keys else -2))


def _count(largest: Any, keys: int, reduce: str | None) -> int:
    if reduce is not None:
        raise ValueError(f"largest is {largest!r}, and reduce is {reduce!r}; one of them must be None")
    n = whole_number(largest)
    if n is None or not 0 < n <= keys:
        raise ValueError(f"largest is {largest!r}; it must be an integer from 1 to {keys}, the keys that are chosen")
    return n


class _Weights:
    """A call of `attention_weights`: arrays with the axes of q, where H and S stand as its layout says."""

    def __init__(self, q: Any, k: Any, lse: Any, options: dict[str, Any]) -> None:
        lib = interop.library("q", q)
        interop.library("k", k)
        arrays = {"q": q, "k": k} | ({} if lse is None else {"lse": lse})
        arrays = interop.adopted(lib, arrays)
        views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
        self.as_given = None if arrays["q"] is q else interop.like(q)
        self.q, self.k, self.lse, self.options = arrays["q"], arrays["k"], arrays.get("lse"), options
        self.layout, self.xp = check_layout(options.get("layout", "bshd")), namespace(lib.kind)
        self.columns = COLUMNS_ON_CPU if views["q"].device == "cpu" else COLUMNS
        self.where = {"device": self.q.device} if lib.kind == "torch" else {}
        self.rank = len(views["q"].shape)
        for name in "qk":
            rank, dtype = len(views[name].shape), views[name].dtype
            if rank not in (2, 3, 4) or rank != self.rank:
                what = (
                    "4, 3 (without batch) or 2 (sequence, dim) dimensions"
                    if name == "q"
                    else f"as many as q, {self.rank}"
                )
                raise ValueError(f"{name} has shape {views[name].shape}; it must have {what}")
            if dtype not in FLOATS:
                raise TypeError(f"{name} has dtype {dtype}; it must be one of {', '.join(FLOATS)}")
        self.batch, self.queries, self.heads = self._lengths(views["q"].shape)
        _, self.keys, self.heads_k = self._lengths(views["k"].shape)
        self.group = self.heads // self.heads_k if self.heads_k else 1

    def _lengths(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Batch, sequence, heads; 1 where there is no such axis."""
        s, h = (-3, -2) if self.layout == "bshd" else (-2, -3)
        if self.rank == 2:
            return 1, shape[0], 1
        return (shape[0] if self.rank == 4 else 1), shape[s], shape[h]

    def chosen(self, name: str, which: Any, n: int) -> range:
        if which is None:
            return range(n)
        if not isinstance(which, slice):
            at = whole_number(which)
            if at is None:
                raise TypeError(f"{name} is {which!r}; it must be None, a slice or an integer")
            if not -n <= at < n:
                raise ValueError(f"{name} is {at}; there are {n}, so it must be from {-n} to {n - 1}")
            which = slice(at % n, at % n + 1)
        if which.step is not None and (not isinstance(which.step, int) or which.step < 1):
            raise ValueError(f"{name} is {which!r}; its step must be 1 or more")
        return range(n)[which]

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def blocks(self, heads: range, queries: range, keys: range) -> tuple[bool, Iterator[Any]]:
        """Blocks of the weights in turn, and whether they are of some keys each, not of some queries."""
        of_queries = max(1, self.columns // self.group)
        along_keys = -(-len(keys) // self.columns) <= 3 * -(-len(queries) // of_queries)  # a backward costs some three
        if along_keys:
            return True, (self._of_keys(heads, queries, x) for x in _pieces(keys, self.columns))
        return False, (self._of_queries(heads, x, keys) for x in _pieces(queries, of_queries))

    def _of_keys(self, heads: range, queries: range, keys: range) -> Any:
        """P V, where V has a column for each key."""
        v = self._spread(self._columns(self.keys, keys), self.heads_k)
        out = self._rows_last(attention(self.q, self.k, v, **self.options))
        return out[self._some(heads, queries)]

    def _of_queries(self, heads: range, queries: range, keys: range) -> Any:
        """Pᵀ dO, where dO has a column for each query, and each head of a group its own."""
        dv = self._through(self._columns(self.queries, queries))
        return self.xp.swapaxes(dv, -1, -2)[self._some(heads, range(len(queries)), keys)]

    def over_keys(self, heads: range, queries: range, keys: range) -> Any:
        v = self._spread(self._column(self.keys, keys), self.heads_k)
        return self._rows_last(attention(self.q, self.k, v, **self.options))[self._some(heads, queries)][..., 0]

    def over_queries(self, heads: range, queries: range, keys: range) -> Any:
        return self._through(self._column(self.queries, queries))[self._some(heads, keys)][..., 0]

    def over_heads(self, x: Any) -> Any:
        """In the precision of lse: many small numbers."""
        return x if self.rank == 2 else cast(cast(x, self._wide()).sum(-3), x.dtype)

    def largest(self, n: int, heads: range, queries: range, keys: range) -> tuple[Any, Any]:
        along_keys, blocks = self.blocks(heads, queries, keys)
        if not along_keys:
            found = [self._top(x, self._numbers(x, keys), n) for x in blocks]
            return tuple(self.xp.concatenate(list(x), -2) for x in zip(*found))
        best: tuple[Any, Any] | None = None
        for x, some in zip(blocks, _pieces(keys, self.columns)):
            both = (x, self._numbers(x, some))
            if best is not None:
                both = tuple(self.xp.concatenate([a, b], -1) for a, b in zip(best, both))
            best = self._top(*both, n)
        assert best is not None
        return best

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def _arange(self, n: int) -> Any:
        return self.xp.arange(n, **self.where)

    def _columns(self, rows: int, some: range) -> Any:
        """(rows, n): 1 where the row is the n-th of `some`."""
        return self._typed(self._arange(rows)[:, None] == some.start + some.step * self._arange(len(some))[None])

    def _column(self, rows: int, some: range) -> Any:
        """(rows, 1): 1 where the row is one of `some`."""
        row = self._arange(rows)[:, None]
        return self._typed((row >= some.start) & (row < some.stop) & ((row - some.start) % some.step == 0))

    def _typed(self, x: Any) -> Any:
        return cast(x, self.q.dtype)

    def _spread(self, x: Any, heads: int) -> Any:
        """(S, n) for every head and batch entry, or (S, heads, n) for every batch entry."""
        if self.rank == 2:
            return x if x.ndim == 2 else x[:, 0]
        x = x[:, None] if x.ndim == 2 else x
        x = self.xp.broadcast_to(x, (x.shape[0], heads, x.shape[-1]))
        x = x if self.layout == "bshd" else self.xp.swapaxes(x, 0, 1)
        return x if self.rank == 3 else self.xp.broadcast_to(x, (self.batch, *x.shape))

    def _through(self, x: Any) -> Any:
        """(..., heads, keys, n): Pᵀ x of every head, where x is (queries, n), by the gradient of values of 0."""
        rows, n = x.shape
        own = self._columns(self.group, range(self.group))  # a group has one dV: each of its heads gets columns there
        columns = x[:, None, None, None, :] * own[None, None, :, :, None]
        columns = self.xp.broadcast_to(columns, (rows, self.heads_k, self.group, self.group, n))
        dout = self._spread(columns.reshape(rows, self.heads, self.group * n), self.heads)
        v = self._spread(self._typed(self.xp.zeros((self.keys, self.group * n), **self.where)), self.heads_k)
        lse = self.lse
        if lse is None:
            _, lse = attention(self.q, self.k, v[..., :1], return_lse=True, **self.options)
        dv = self._rows_last(attention_backward(dout, self.q, self.k, v, dout * 0, lse, **self.options).dv)
        if self.rank == 2:
            return dv
        dv = self.xp.swapaxes(dv.reshape(*dv.shape[:-1], self.group, n), -2, -3)  # (..., Hk, group, keys, n)
        return dv.reshape(*dv.shape[:-4], self.heads, self.keys, n)

    def _rows_last(self, x: Any) -> Any:
        """(..., heads, rows, columns)."""
        return self.xp.swapaxes(x, -3, -2) if self.layout == "bshd" and self.rank > 2 else x

    def _some(self, heads: range, *others: range) -> tuple[Any, ...]:
        """An index of the heads, rows and columns of an array whose last axes these are."""
        whole = (slice(None),) * max(0, self.rank - 3)
        index = [slice(x.start, x.stop, x.step) for x in ((heads,) if self.rank > 2 else ()) + others]
        return (*whole, *index)

    def _wide(self) -> Any:
        return self.xp.float64 if str(self.q.dtype).endswith("float64") else self.xp.float32

    def _numbers(self, x: Any, keys: range) -> Any:
        """Of keys, in the shape of x."""
        return self.xp.broadcast_to(keys.start + keys.step * self._arange(x.shape[-1]), x.shape)

    def _top(self, x: Any, places: Any, n: int) -> tuple[Any, Any]:
        """The largest n along the last axis, the largest first; of equals the first key."""
        n = min(n, x.shape[-1])
        if self.xp.__name__ == "torch":
            order = self.xp.argsort(x, dim=-1, descending=True, stable=True)[..., :n]
            return self.xp.gather(x, -1, order), self.xp.gather(places, -1, order)
        stable = {} if self.xp.__name__ == "jax.numpy" else {"kind": "stable"}  # JAX's is
        order = self.xp.argsort(-cast(x, self._wide()), axis=-1, **stable)[..., :n]
        return self.xp.take_along_axis(x, order, -1), self.xp.take_along_axis(places, order, -1)

    def given_back(self, *results: Any) -> Any:
        """As arrays of the library that q came from."""
        found = results if self.as_given is None else tuple(map(self.as_given, results))
        return found if len(found) > 1 else found[0]


def _pieces(some: range, n: int) -> Iterator[range]:
    """At most n of them each; one, and empty, where there are none."""
    for first in range(0, max(1, len(some)), n):
        yield some[first : first + n]
