"""A call over several ranks, checked: its arrays as (B, S, H, D), its rows, what its queries see, and how it is shared
out."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import interop, rules
from ..api import present, trace_score
from ..dispatch import refuse_family
from ..gradients import check_wrt
from ..other_names import unexpected
from ..passes import BACKWARD, FORWARD
from ..problem import ARRAY_RULES, ARRAYS, FLOAT8, ITEMSIZE, AttentionProblem, check_layout, complete
from ..rules import seed_of
from ..scalars import check_flag
from .adapters import of
from .arrays import four, three, wide
from .groups import Alone, Group
from .masks import RowsMask
from .rows import Rows, Span
from .steps import Band, Blocks, Sight, arriving, band_of, lighter, usual_groups

EXCHANGES = ("keys", "heads")
ALIGNED = 16  # rows at whose multiples parts begin under dropout
_RANKS = (2, 3, 4)  # of q, k and v
PLAN = ("rows", "key_rows", "exchange", "groups", "stretches")
_LATER = (  # of `attention`, and not taken here
    "at", "latent", "out_dtype", "out_scale", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k",
    "seqlens_k", "page_table", "max_seqlen_q", "max_seqlen_k", "batch_invariant", "check", "out", "grads", "add",
)  # fmt: skip


@dataclass
class Asked:
    """What `check` makes of the arguments."""

    team: Group  # whose ranks deal out heads
    group: Group  # whose ranks share out keys
    rows: Rows
    key_rows: Rows
    groups: int  # of key heads
    stretches: int
    layout: str
    options: dict[str, Any]  # of each step, but for what stands for a part of a whole
    arrays: dict[str, Any]  # optional arrays, by the names of ARRAYS
    operands: dict[str, Any]  # q, k, v, dout, out as (B, S, H, D), lse and dlse as (B, H, S): views of what was given
    problem: AttentionProblem  # of this rank's rows with all keys
    sight: Sight
    shift: tuple[int, int] = (0, 0)  # what positions of queries and of keys get, so that a query stands on its own key
    block: int = ALIGNED
    mask: RowsMask | None = None
    wrt: tuple[str, ...] = ()
    reduce: bool = False
    lasts: bool = False  # whether what is kept in `memo` serves other calls
    plain: bool = False  # whether that may be what its calls ran by: they are a GPU's, and followed by nobody
    said: dict[str, str] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)  # what is the same in all calls of this kind

    def but(self, **fields: Any) -> Asked:
        """The same with other fields; what is kept of the kind is shared."""
        found = object.__new__(Asked)  # `copy` and `replace` cost several us
        found.__dict__.update(self.__dict__, **fields)
        return found

    @property
    def rank(self) -> int:
        """Among all."""
        return self.group.rank * self.team.size + self.team.rank


def groups_of(group: Any, exchange: Any) -> tuple[Any, Any]:
    """That of heads and that of keys, of which one may be None: the caller's, as they are."""
    if isinstance(group, (tuple, list)):
        if len(group) != 2:
            raise ValueError(f"group holds {len(group)}; it must be one, or two: (heads, keys)")
        if exchange is not None:
            raise ValueError(f"exchange is {exchange!r}, and group holds two; with (heads, keys) it must be None")
        return tuple(group)
    if exchange not in (None, *EXCHANGES):
        raise ValueError(f"exchange is {exchange!r}; it must be 'keys', 'heads' or None")
    return (group, None) if exchange == "heads" else (None, group)


def usual_exchange(group: Any, exchange: Any, given: dict[str, Any], k: Any, rows: Any) -> str | None:
    """ "heads" where the key heads can be dealt out and no array over pairs has, or may have, rows of its own."""
    if exchange is not None or isinstance(group, (tuple, list)):
        return exchange
    single = isinstance(rows, Rows) and any(rows.count(r) == 1 for r in range(rows.size))  # then one may be its own
    arrays: list[Any] = [x for x in (given.get("mask"), given.get("bias")) if hasattr(x, "shape")]
    own = [x for x in arrays if own_rows(x) or (single and rows.length > 1 and len(x.shape) > 1)]
    heads = four(k, given.get("layout", "bshd")).shape[2] if hasattr(k, "shape") and len(k.shape) in _RANKS else 1
    fits = heads and heads % of(group).size == 0 and not own and given.get("block_mask") is None
    return "heads" if fits else "keys"


def usual_of_two(group: Any, operands: dict[str, Any], plan: dict[str, Any], given: dict[str, Any]) -> str:
    """The exchange of a call that could have both."""
    ranks: Group = of(group)
    heads_q, heads_k = (four(operands[name], given.get("layout", "bshd")).shape[2] for name in "qv")
    if isinstance(plan["groups"], numbers.Integral) and plan["groups"] > heads_k // ranks.size:  # of keys alone
        return "keys"
    rows, key_rows = plan["rows"], plan["key_rows"] or plan["rows"]
    sight = band_of(rows, key_rows, given.get("window"), given.get("causal"))
    of_pass = BACKWARD if "dout" in operands else FORWARD
    near, ratio = getattr(ranks, "window", None) is not None, 2 if wide(operands["k"]) else 1
    return lighter(rows, key_rows, sight, heads_q, heads_k, of_pass, ratio, near=near)


def own_rows(x: Any) -> bool:
    """Whether an array over pairs has rows of its own, and not one for all queries."""
    return len(x.shape) > 1 and x.shape[-2] != 1


def _check_one_each(views: dict[str, Any], names: Sequence[str], rows: Rows, what: str) -> None:
    """ValueError where no rank has more than one row, so that arrays of one do not say whose it is."""
    if rows.length == 1 or max(rows.count(r) for r in range(rows.size)) != 1:
        return
    for name in names:
        if name in views and len(shape := views[name].shape) > 1 and shape[-2] == 1:
            raise ValueError(
                f"{name} has shape {shape}, and no rank has more than one row: it may be that row's or one for all; "
                f"{what}"
            )


def check(
    function: str, group: Any, operands: dict[str, Any], plan: dict[str, Any], given: dict[str, Any], wrt: Any = ()
) -> Asked:
    """TypeError or ValueError, naming the argument. operands: of the pass, by name; plan: rows, key_rows, exchange,
    groups, stretches, reduce; given: what `attention` takes by name."""
    exchange = usual_exchange(group, plan["exchange"], given, operands["k"], plan["rows"])
    team, keys = (Alone() if x is None else of(x) for x in groups_of(group, exchange))
    known = [*complete({}), *(row.name for row in ARRAYS), "score_arrays", "family"]
    for name, value in given.items():
        if name in _LATER and value is not None and value is not False and not (name == "out_scale" and value == 1):
            raise ValueError(f"{name} is given; parallel.{function} does not take it yet, it must be left out")
        if name not in known:
            raise unexpected(f"parallel.{function}", name, [*known, *PLAN])
    options, layout = complete(given), check_layout(given.get("layout", "bshd"))
    seed, number = seed_of(given.get("seed"), options["dropout"])
    optional = {row.name: given.get(row.name) for row in ARRAYS} | {"seed": seed}
    required = [name for name in operands if name != "dlse"]
    arrays = present(required, operands | optional)
    lib: Any = interop.library("q", arrays["q"])
    reads, mask = given.get("score_arrays"), options["block_mask"]
    stated = dict(options)
    if options["score"] is not None or reads is not None:
        trace_score(lib, arrays, stated, reads)
    arrays = interop.adopted(lib, arrays)
    views = {name: interop.view(lib, name, x) for name, x in arrays.items()}
    if views["q"].dtype == FLOAT8:
        raise TypeError(f"q has dtype {FLOAT8}; parallel.{function} takes float16, bfloat16, float32 and float64")
    if given.get("family") is not None and lib.kind != "jax" and not lib.on_gpu(arrays["q"]):  # there it is traced
        refuse_family(given["family"], lib.kind)
    for ranks in (team, keys):
        check_place(ranks, lib, "q", arrays["q"])
    size = team.size * keys.size
    rows, key_rows = _rows(plan, size, keys.rank * team.size + team.rank, views, layout)
    if mask is not None and not isinstance(mask, RowsMask):
        raise TypeError(
            f"block_mask is a {type(mask).__name__}; it must be what parallel.block_mask made of the same rows"
        )
    if mask is not None:
        _check_mask(mask, rows, key_rows, team)
        stated["block_mask"] = mask.own
    axis = 0 if len(views["k"].shape) == 2 else -3 if layout == "bshd" else -2
    for name in "kv":
        shape = list(views[name].shape)
        if len(shape) in _RANKS:  # others are refused below
            shape[axis] = key_rows.length
            views[name] = views[name]._replace(shape=tuple(shape))
    problem, _ = rules.state(views, {}, stated, BACKWARD if "dout" in operands else FORWARD)
    if team.size > 1:
        _check_heads(problem, team, views, rows)
    wanted = check_wrt(wrt, arrays, stated["score"])
    reduce = check_flag("reduce", plan.get("reduce", False))
    if reduce and "bias" in wanted:
        _check_one_each(views, ("bias",), rows, "reduce must be False, with a sum by the caller where it is for all")
    band, shift = _sight(problem, options, rows, key_rows)
    sight = band if mask is None else Blocks(band, mask.own.block[0], mask.hulls)
    asked = Asked(
        team, keys, rows, key_rows, *_shares(plan, problem, team, keys, sight, rows, key_rows), layout,
        {name: x for name, x in options.items() if name not in ("layout", "block_mask", *_LATER)}
        | {"seed": number if seed is None else seed, "score_arrays": reads, "family": given.get("family")},
        {row.name: arrays[row.name] for row in ARRAYS if row.name in arrays and row.name != "seed"},
        {name: three(x) if name in ("lse", "dlse") else four(x, layout)
            for name in operands if (x := arrays.get(name)) is not None},
        problem, sight, shift, wrt=wanted, reduce=reduce,
    )  # fmt: skip
    if mask is not None:
        asked.mask, asked.block = mask, math.lcm(mask.own.block[1], ALIGNED)
    if problem.dropout:
        for name, x in (("rows", rows), ("key_rows", key_rows)):
            odd = [a for spans in x.chunks for a, b in spans if b > a and a % ALIGNED]
            if odd:
                raise ValueError(
                    f"{name} begins a chunk at {odd[0]}; with dropout chunks must begin at multiples of 16"
                )
    told: Any = number
    if seed is not None:
        told = "an array" if lib.on_gpu(arrays["q"]) else lib.to_numpy(arrays["seed"]).item()
    asked.said = _said(asked, views, stated, exchange, function, told)
    return asked


def check_place(group: Any, lib: Any, name: str, x: Any) -> None:
    """TypeError for arrays that a group does not send."""
    if hasattr(group, "refuses"):
        on_gpu = lib.on_gpu(x)
        if must := group.refuses(lib.kind, on_gpu, lib.device(x) if on_gpu else None):
            raise TypeError(f"{name} is a {lib.kind} array on {lib.view(x).device}; it must be {must}")


def _rows(plan: dict[str, Any], size: int, rank: int, views: dict[str, Any], layout: str) -> tuple[Rows, Rows]:
    rows = plan["rows"]
    key_rows = rows if plan["key_rows"] is None else plan["key_rows"]
    for name, x, of_array in (("rows", rows, "q"), ("key_rows", key_rows, "k")):
        if not isinstance(x, Rows):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a parallel.Rows")
        if x.size != size:
            raise ValueError(f"{name} is of {x.size} ranks; it must be of {size}, as the group is")
        shape = views[of_array].shape
        if len(shape) not in _RANKS:
            continue
        count = shape[0] if len(shape) == 2 else shape[-3 if layout == "bshd" else -2]
        if count != x.count(rank):
            raise ValueError(
                f"{of_array} has {count} rows, shape {shape}; it must have those of rank {rank} in {name}, "
                f"{x.count(rank)}"
            )
    return rows, key_rows


def _check_mask(mask: RowsMask, rows: Rows, key_rows: Rows, team: Group) -> None:
    if mask.rows != rows or mask.key_rows != key_rows:
        raise ValueError("block_mask is of other rows; it must be what parallel.block_mask made of the same")
    if team.size > 1:
        raise ValueError("block_mask is given with an exchange of heads; it must be None, or exchange 'keys'")


def _check_heads(problem: AttentionProblem, team: Group, views: dict[str, Any], rows: Rows) -> None:
    if problem.heads_k % team.size:
        raise ValueError(
            f"k has {problem.heads_k} heads, which cannot be dealt out to {team.size} ranks; with exchange 'heads' it "
            "must be a multiple of them"
        )
    _check_one_each(views, ("mask", "bias"), rows, "exchange must be 'keys', which takes both")
    for name in ("mask", "bias"):
        if name in views and ARRAY_RULES[name].lengths(views[name].shape)[2] > 1:
            raise ValueError(
                f"{name} has shape {views[name].shape}, with this rank's rows; with an exchange of heads each rank has "
                "all rows of some heads: its queries must be 1, or exchange 'keys'"
            )


def _sight(
    problem: AttentionProblem, options: dict[str, Any], rows: Rows, key_rows: Rows
) -> tuple[Band, tuple[int, int]]:
    """What queries see by position, and what positions are shifted by where queries stand on other keys."""
    band = band_of(rows, key_rows, options["window"], problem.causal)
    diagonal, stands = band.diagonal, not (band.left is None and band.right is None) or problem.has("alibi_slopes")
    if diagonal and stands and (problem.dropout or problem.score is not None):
        what = "dropout" if problem.dropout else "score"
        raise ValueError(
            f"{what} is given with rows of {rows.length} and key_rows of {key_rows.length}, where causal, window or "
            "alibi_slopes put query i on another key than i; lengths must be equal then, or causal 'top_left'"
        )
    shift = (max(diagonal, 0), max(-diagonal, 0)) if diagonal and stands else (0, 0)
    return band, shift


def _shares(
    plan: dict[str, Any], problem: AttentionProblem, team: Group, keys: Group, sight: Sight, rows: Rows, key_rows: Rows
) -> tuple[int, int]:  # fmt: skip
    """Groups of key heads, and stretches of the keys."""
    heads, of_q = max(1, problem.heads_k // team.size), problem.batch * problem.heads_q
    # While one group is computed the next comes, unless those who move it and those who compute wait for each other.
    pays = getattr(keys, "window", None) is not None or all(getattr(x, "beside", True) for x in (team, keys))
    columns, usual, sent = problem.dim + problem.dim_v, 1, math.inf
    if team.size == 1:
        sent = arriving(rows, key_rows, sight) * problem.batch * heads * columns * ITEMSIZE[problem.dtype]
    if team.size * keys.size > 1 and pays:
        usual = usual_groups(rows, sight, heads, of_q, 2 * columns * of_q, sent)
    return parts("groups", plan["groups"], usual, heads), parts("stretches", plan["stretches"], 1)


def parts(name: str, n: Any, default: int, most: int = 1 << 20) -> int:
    """How many there are, of `groups` or `stretches`. ValueError where n does not say it."""
    if n is None:
        return default
    number = int(n) if isinstance(n, numbers.Integral) and not isinstance(n, bool) else 0
    if not 1 <= number <= most:
        raise ValueError(f"{name} is {n!r}; it must be None or an integer from 1 to {most}")
    return number


def index(name: str, shape: Sequence[int], heads: Span, rows: Span, keys: Span) -> tuple[slice, ...]:
    """The part of an optional array that a step is about."""
    at = {"head": heads, "query": rows, "key": keys}
    axes = ARRAY_RULES[name].axes[len(ARRAY_RULES[name].axes) - len(shape) :]
    return tuple(slice(*at[x]) if n > 1 and x in at else slice(None) for x, n in zip(axes, shape))


def _said(
    asked: Asked, views: dict[str, Any], options: dict[str, Any], exchange: str | None, function: str, seed: Any
) -> dict[str, str]:
    """What must be the same on all ranks, by the name of the argument."""
    said = {name: f"of {x.dtype}" for name, x in views.items()}
    for name in asked.operands:
        if name not in ("lse", "dlse"):
            b, _, h, d = asked.operands[name].shape
            said[name] += f", batch {b}, {h} heads of {d}"
    for name, x in asked.arrays.items():
        axes = ARRAY_RULES[name].axes[-len(x.shape) :] if len(x.shape) else ()
        lengths = ["rows" if axis == "query" else str(n) for axis, n in zip(axes, x.shape)]
        said[name] += f", shape ({', '.join(lengths)})"
    for name, x in views.items():  # what a score function reads
        if name not in asked.operands and name not in asked.arrays:
            said[name] += f", shape {tuple(x.shape)}"
    for name, value in options.items():
        if name == "score":
            value = None if value is None else hashlib.sha256(repr(value.data).encode()).hexdigest()[:12]
        elif name == "block_mask":
            value = None if asked.mask is None else f"{asked.mask.own.shape[:2]}, blocks of {asked.mask.own.block}"
        said[name] = repr(value)
    said["seed"] = str(seed)
    for name in ("rows", "key_rows"):
        said[name] = getattr(asked, name).digest()
    said |= {"exchange": repr(exchange), "groups": str(asked.groups), "stretches": str(asked.stretches)}
    return said | {"wrt": repr(asked.wrt), "reduce": str(asked.reduce), "function": function}
