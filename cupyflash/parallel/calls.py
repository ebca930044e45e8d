"""The public functions: attention over the rows of a sequence that several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from .. import api, interop
from ..gradients import Gradients
from ..scalars import check_flag
from . import run
from .adapters import of
from .agree import agree
from .arrays import empty, four, library, three, wide
from .asked import Asked, check, check_place, groups_of, usual_exchange, usual_of_two
from .groups import Group
from .kinds import keep, kind_of, recalled
from .rows import Rows
from .transfers import gathered


def attention(
    q: Any,
    k: Any,
    v: Any,
    group: Any,
    *,
    rows: Rows,
    key_rows: Rows | None = None,
    exchange: str | None = None,
    groups: int | None = None,
    stretches: int | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`cupyflash.attention` of a sequence whose rows several ranks hold: each calls it with its own, and gets the
    result of these.

    Parameters
    ----------
    q : (B, own rows, Hq, D)
    k, v : (B, own rows, Hk, D), (B, own rows, Hk, Dv)
        This rank's rows, as `rows` says, in the ranks and layouts that `attention` takes. NumPy or CuPy arrays, or
        tensors, where the group is.
    group : a group, or (heads, keys)
        Of tensors a `torch.distributed.ProcessGroup`, a `DeviceMesh` of one dimension or of two, (keys, heads), or
        None, the default group. Of CuPy arrays a `cupyx.distributed.NCCLBackend` or a
        `cupy.cuda.nccl.NcclCommunicator`. Of CuPy's and NumPy's an mpi4py communicator. Of any `parallel.simulated`'s.
        Two: each rank of the first gets some heads of all their rows (inside a host); ranks of the second get the keys
        that those rows see. Rank n of `rows` is then keys.rank * heads.size + heads.rank.
    rows, key_rows : Rows
        Who holds which queries, and which keys (default: the same).
    exchange : "keys", "heads", optional
        "keys": each rank gets the keys that its rows see. "heads": each rank gets all rows of some heads (DeepSpeed
        Ulysses); results are the bits of one GPU, but for dk and dv where it deals out queries of few heads.
        Default: of a forward and of a backward each the one by which less travels; "keys" where the key heads cannot be
        dealt out, a mask or bias has rows of its own, or `groups` are more than the key heads that each rank would get.
    groups : int, optional
        Of key heads: the next group travels while one is computed. Default: as many as leave each enough to compute,
        and 1 where transfers and kernels wait for each other's multiprocessors (NCCL's within a host).
    stretches : int, optional
        Keys come in so many parts of the sequence, which takes less memory; parts are merged in float32. Default: 1.
    return_lse : bool
    options : as of `attention`
        They mean what they mean for the whole: positions, score functions and dropout are those of one device. key_mask
        is for all keys; mask and bias have this rank's rows, or one for all, and all keys; alibi_slopes, sinks and
        score_arrays are the same on all ranks; block_mask is what `parallel.block_mask` made. With dropout chunks begin
        at multiples of 16.

    Returns
    -------
    out : (B, own rows, Hq, Dv)
    lse : (B, Hq, own rows), only with return_lse=True

    Raises
    ------
    NotImplementedError
        Of PyTorch in forward mode, inside torch.func, and where a gradient is differentiated again.
    TypeError, ValueError
        Naming the argument, what it is and what it must be; on all ranks, where one of them is given what it cannot
        take, or two are given what differs. A rank that raises anything else leaves the others waiting until their
        group's own time-out.
    """
    plan = {"rows": rows, "key_rows": key_rows, "exchange": exchange, "groups": groups, "stretches": stretches}
    out, lse = forward(q, k, v, group, plan, options, return_lse)
    return (out, lse) if return_lse else out


def forward(
    q: Any, k: Any, v: Any, group: Any, plan: dict[str, Any], options: dict[str, Any], return_lse: Any,
    followed: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """out and lse of `attention`. followed: whether gradients will be asked for, by autograd: then of all ranks."""
    flags = {"return_lse": return_lse, "followed": followed}
    asked = _agreed("attention", group, {"q": q, "k": k, "v": v}, plan, options, flags)
    try:
        out = empty((*q.shape[:-1], v.shape[-1]), q)
        b, s, h, _ = asked.operands["q"].shape
        lse = empty((b, h, s)[4 - len(q.shape) :], q, wide(q))
        run.forward(asked, four(out, asked.layout), three(lse))
    except Exception as error:
        _note(error, asked.rank, asked.team.size * asked.group.size)
        raise
    return out, lse


def refused(function: str, group: Any, error: Exception) -> NoReturn:
    """Raise an error on all ranks, which call `function` with this group now: doing what they do until they agree."""
    ranks = (of(group),) if function == "merge" else _met(group)
    agree(ranks, {}, error)
    raise error


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    group: Any,
    *,
    rows: Rows,
    key_rows: Rows | None = None,
    exchange: str | None = None,
    groups: int | None = None,
    stretches: int | None = None,
    dlse: Any = None,
    wrt: Any = (),
    reduce: bool = False,
    **options: Any,
) -> Gradients:
    """Gradients of `parallel.attention`: those of this rank's rows of q, k and v.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse
        As of `cupyflash.attention_backward`, of this rank's rows.
    group, rows, key_rows, exchange, groups, stretches : as of `parallel.attention`
    wrt : names, or one name
        Optional arrays whose gradients are wanted too. That of a bias with this rank's rows is for these; of what all
        ranks share each gets its part, whose sum over the ranks is the gradient, as with other weights.
    reduce : bool
        Return that sum, on all ranks.
    options : as given to `parallel.attention`

    Returns
    -------
    dq, dk, dv, and those that `wrt` names
        As `cupyflash.attention_backward` has them. What ranks add to dk and dv is added in the order of ranks: the same
        bits in every run, if each rank's own are (deterministic=True).
    """
    plan = {"rows": rows, "key_rows": key_rows, "exchange": exchange, "groups": groups, "stretches": stretches}
    operands = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        operands["dlse"] = dlse
    asked = _agreed("attention_backward", group, operands, plan | {"reduce": reduce}, options, {}, wrt)
    try:
        grads = dq, dk, dv = [empty(x.shape, x) for x in (q, k, v)]
        found = run.backward(asked, *(grads if asked.operands["q"] is q else [four(x, asked.layout) for x in grads]))
    except Exception as error:
        _note(error, asked.rank, asked.team.size * asked.group.size)
        raise
    return Gradients(dq, dk, dv, found)


def merge(out: Any, lse: Any, group: Any, *, layout: str = "bshd") -> tuple[Any, Any]:
    """Each rank attended with the same queries to keys of its own; the result of all keys, on all ranks.

    For decoding over a cache that is shared out. out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) as `attention(...,
    return_lse=True)` returned them, all ranks' shaped alike; parts are merged in the order of ranks, in float32 where
    they are of 16 bits. There is no derivative: tensors that require grad, have tangents, or are given inside a
    transform of torch.func are refused.
    """
    ranks = of(group)
    kind = kind_of([ranks], {"q": out, "lse": lse}, {}, "merge", layout)
    if kind is None or kind not in ranks.known:
        error: Exception | None = None
        said = {}
        try:
            api.merge([out], [lse], layout=layout)  # says what is wrong
            check_place(ranks, interop.library("out", out), "out", out)
            said = {"out": f"{out.dtype}, shape {tuple(out.shape)}", "layout": layout}
        except Exception as wrong:  # noqa: BLE001 - raised on all ranks
            error = _renamed(wrong)
        agree([ranks], said, error)
        _prepare([ranks], out)
        if kind is not None:
            ranks.known.add(kind)
    try:
        return api.merge(*gathered(ranks, out, lse), layout=layout)
    except Exception as error:
        _note(error, ranks.rank, ranks.size)
        raise


def _note(error: Exception, rank: int, size: int) -> None:
    """Say what an error that no other rank knows of means for these."""
    if size > 1 and hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(
            f"Raised on rank {rank} after all ranks had agreed on the call: others may wait for it until the time-out "
            "of their group."
        )


def _prepare(ranks: Sequence[Any], x: Any) -> None:
    """Have groups make what they need to send such arrays: all ranks do it at once."""
    for group in ranks:
        if hasattr(group, "prepare"):
            group.prepare(library(x))


def _renamed(error: Exception) -> Exception:
    """What `merge` of lists says of their only entry."""
    return type(error)(str(error).replace("outs[0]", "out").replace("lses[0]", "lse"))


def _met(group: Any) -> tuple[Group, ...]:
    """The groups of a call, whose ranks are all there."""
    ranks = tuple(map(of, group)) if isinstance(group, (tuple, list)) else (of(group),)
    for x in ranks:
        if hasattr(x, "meet"):
            x.meet()
    return ranks


def _agreed(
    function: str,
    group: Any,
    operands: dict[str, Any],
    plan: dict[str, Any],
    options: dict[str, Any],
    flags: dict[str, Any],
    wrt: Any = (),
) -> Asked:
    """What is asked, once all ranks say the same."""
    ranks = _met(group)
    group = ranks if isinstance(group, (tuple, list)) else ranks[0]
    more = (*plan.values(), *flags.values(), tuple(wrt) if isinstance(wrt, list) else wrt)
    kind = kind_of(ranks, operands, options, function, *more)
    if (known := recalled(kind, ranks, operands, options)) is not None:
        return known
    exchange = plan["exchange"] if plan["exchange"] in (None, "keys", "heads") else None
    try:
        chosen = usual_exchange(group, exchange, options, operands["k"], plan["rows"])
        if exchange is None and chosen == "heads":
            chosen = usual_of_two(group, operands, plan, options)
    except Exception:  # noqa: BLE001 - named by `check`
        chosen = exchange
    if plan["exchange"] is None:
        plan = plan | {"exchange": chosen}
    if len(ranks) > 2:
        groups_of(group, chosen)  # raises: with whom to agree is not known
    asked, error = None, None
    try:
        for name, x in flags.items():
            check_flag(name, x)
        asked = check(function, group, operands, plan, options, wrt)
    except Exception as wrong:  # noqa: BLE001 - raised on all ranks
        error = wrong
    said = {} if asked is None else asked.said | {"requires_grad of some input": str(flags.get("followed", False))}
    agree(ranks, said, error)
    assert asked is not None
    _prepare(ranks, operands["q"])
    keep(kind, ranks, asked, operands)
    return asked
