"""The suite `scores`: masks, biases and what else happens to a score, beside who else has it."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

from .. import block_mask
from ..passes import BACKWARD, PASSES, Pass
from ..tools.timing import flops, gpu_sampler, interleave
from . import peers
from .suite import Measured, Options, Problem, case_of, compare, importable, relative_error


class Row(NamedTuple):
    """Who else takes it, who of them so slowly that the GPU cools for whoever follows, and the gradients beside dq, dk,
    dv."""

    peers: tuple[str, ...]
    slow: tuple[str, ...] = ()
    causal: bool = False
    wrt: tuple[str, ...] = ()
    seq: int = 2048


PEERS = ("fa2", "cudnn", "flex", "efficient", "math")
_SPARSE = Row(("flex",))
SPARSE = ("documents", "streaming", "sparse10", "sparse50")
_BIASED = Row(("cudnn", "flex"), slow=("efficient",))
# By name. Behind the dash the shape of the array: batch, heads, sequence, or 1 for all.
ROWS = {
    "causal": Row(("fa2", "cudnn"), causal=True),
    "alibi": Row(("flex",), causal=True),
    "softcap": Row(("flex",), causal=True),
    "sinks": Row(("flex",), causal=True),
    # Score functions of the user's own, and the gradient of the table that they read.
    "relative": Row(("flex",), wrt=("table",)),
    "t5": Row(("flex",), wrt=("table",)),
    "dropout": Row(("fa2", "cudnn")),
    "dropout-causal": Row(("fa2", "cudnn"), causal=True),
    "bias-1hss": _BIASED,
    "bias-b1ss": _BIASED,
    "bias-bhss": _BIASED,
    "bias-111s": _BIASED,
    "dbias-1hss": _BIASED._replace(wrt=("bias",)),
    "dbias-b1ss": _BIASED._replace(wrt=("bias",)),
    "dbias-bhss": _BIASED._replace(wrt=("bias",)),
    "mask-b1ss": _BIASED,
    "padding-b11s": _BIASED,
    # Block masks, of sequences so long. Causal documents; 1024 keys before and 4 first ones; blocks of 128, so many of
    # 100.
    **{f"{name}-{seq // 1024}k": _SPARSE._replace(seq=seq) for name, seq in itertools.product(SPARSE, (8192, 32768))},
    "evoformer": Row(("efficient", "cudnn", "flex"), slow=("math",), wrt=("bias",)),
}


def problems(options: Options) -> list[Problem]:
    """16k tokens (32k of one sequence that is so long), hidden 2048; for `evoformer` 256 rows of 256 residues. Of
    `dbias` the backward: its forward is `bias`."""
    dims = (128,) if options.quick else (64, 128)
    usual = [{"dtype": options.dtype, "dim": dim, "heads": 2048 // dim} for dim in dims]
    dtypes = dict.fromkeys((options.dtype,) if options.quick else ("float32", options.dtype))
    pairs = [{"dtype": dtype, "dim": 32, "seq": 256, "batch": 256, "heads": 4} for dtype in dtypes]
    return [
        {"pass": direction, "scores": name, "causal": row.causal, **sizes}
        for direction, (name, row) in itertools.product(("forward", "backward"), ROWS.items())
        if name.startswith(options.only or "") and not (direction == "forward" and name.startswith("dbias"))
        for sizes in (
            pairs if name == "evoformer" else [x | {"seq": row.seq, "batch": max(1, 16384 // row.seq)} for x in usual]
        )
    ]


def draw(problem: Problem, device: str = "cuda") -> peers.Case:
    """Inputs of a row. What happens to the scores is drawn such that nobody can leave it out unnoticed."""
    import torch

    case, name = case_of(problem, device), problem["scores"]
    (batch, seq, heads, _), dtype = case.q.shape, case.q.dtype
    generator = torch.Generator(device).manual_seed(1)
    if name == "softcap":
        case.q.mul_(4)  # scores beyond the cap

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    kind, _, letters = name.partition("-")
    if kind in SPARSE:
        visible = pattern(kind, seq, device)
        return case._replace(scores={"block_mask": block_mask(visible, shape=(seq, seq), like=case.q)}, visible=visible)
    shape = [{"1": 1, "b": batch, "h": heads, "s": seq}.get(letter, 0) for letter in letters]
    # Every entry of the batch ends somewhere between half of the sequence and all of it.
    padding = torch.arange(seq, device=device) < torch.linspace(seq // 2, seq, batch, device=device)[:, None]
    scores: dict[str, Any] = {}
    if kind == "alibi":
        scores = {"alibi_slopes": 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)}
    elif kind == "softcap":
        scores = {"softcap": 20.0}
    elif kind == "sinks":
        scores = {"sinks": 4 + normal(heads)}
    elif kind == "dropout":
        scores = {"dropout": 0.1, "seed": 1}
    elif kind in ("relative", "t5"):
        distance = torch.arange(1 - seq, seq, device=device)
        table = torch.randn((heads, len(distance) if kind == "relative" else 32), generator=generator, device=device)
        read = {"table": table} if kind == "relative" else {"table": table, "bucket": t5_bucket(distance)}
        scores = {"score": relative(kind, seq), "score_arrays": read}
    elif kind in ("bias", "dbias"):
        scores = {"bias": normal(*shape)}
    elif kind == "mask":  # every tenth pair is hidden
        scores = {"mask": torch.rand(shape, generator=generator, device=device) > 0.1}
    elif kind == "padding":
        scores = {"mask": padding.view(shape)}
    elif kind == "evoformer":
        scores = {"bias": normal(1, heads, seq, seq), "key_mask": padding}
    return case._replace(scores=scores, wrt=ROWS[name].wrt)


def relative(kind: str, seq: int) -> Any:
    """A score function of ours and of FlexAttention alike: a learned bias by distance, `t5` for buckets of
    distances."""
    if kind == "relative":
        return lambda s, b, h, i, j, table: s + table[h, j - i + (seq - 1)]
    return lambda s, b, h, i, j, table, bucket: s + table[h, bucket[j - i + (seq - 1)]]


def t5_bucket(distance: Any) -> Any:
    """Which of 32 learned numbers a key so far to the right has (Raffel et al. 2020): in both directions 8 distances
    have their own, and 8 grow with the logarithm up to 128."""
    far = distance.abs()
    by_log = (far.clamp(min=1) / 8).log() / math.log(128 / 8) * 8
    within = far.where(far < 8, (8 + by_log.long()).clamp(max=15))
    return (within + 16 * (distance > 0)).int()


def pattern(kind: str, seq: int, device: str) -> Any:
    """What is visible, as a function of (b, h, i, j)."""
    import torch

    if kind == "streaming":
        reach, first = min(1024, seq // 4), 4
        return lambda b, h, i, j: (j <= i) & ((i - j <= reach) | (j < first))
    generator = torch.Generator().manual_seed(1)
    if kind == "documents":  # 16 of them, of any length
        ends = torch.randperm(seq - 1, generator=generator)[:15] + 1
        document = torch.zeros(seq, dtype=torch.int32).index_fill(0, ends, 1).cumsum(0).to(device)
        return lambda b, h, i, j: (j <= i) & (document[i] == document[j])
    size = min(128, seq // 8)
    blocks = torch.rand((seq // size, seq // size), generator=generator) < int(kind[-2:]) / 100
    blocks = (blocks | torch.eye(len(blocks), dtype=torch.bool)).to(device)
    return lambda b, h, i, j: blocks[i // size, j // size]


def measure(problem: Problem, options: Options) -> Measured:
    """TFLOP/s of what the masks leave. "ours_causal" is our own attention with a causal mask alone, in turn with all
    others."""
    row, of = ROWS[problem["scores"]], PASSES[problem["pass"]]
    case = draw(problem)
    prepares = importable(row.peers + (row.slow if options.slow else ()))
    ours = prepares["ours"] = peers.ours(options.family)
    candidates, notes = compare(prepares, case, of, *expected(case, of))
    sizes = {key: problem[key] for key in ("batch", "seq", "heads", "dim")}
    work = dict.fromkeys(candidates, flops(**sizes, causal=case.causal, of=of) * left(case))
    if "ours" in candidates and case.scores:
        candidates["ours_causal"] = ours(case._replace(causal=True, scores={}, wrt=()), of)
        work["ours_causal"] = flops(**sizes, causal=True, of=of)
    sampler = gpu_sampler(candidates, options.min_ms, patience=0.25)
    seconds, failures = interleave([name for name in candidates if name not in row.slow], options.rounds, sampler)
    late = interleave([name for name in candidates if name in row.slow], options.rounds, sampler)  # nobody follows them
    values = {name: work[name] / 1e12 / t for name, t in {**seconds, **late[0]}.items()}
    return values, notes | failures | late[1]


def left(case: peers.Case) -> float:
    """The share of all pairs that masks leave."""
    if "block_mask" in case.scores:
        return float(case.scores["block_mask"].share())
    masks = [case.scores[name] for name in ("mask", "key_mask") if name in case.scores]
    return float(masks[0].float().mean()) if masks else 1.0


def expected(case: peers.Case, of: Pass) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """What is right; and with dropout, of which everyone draws his own, how far from what is right without it."""
    if "dropout" not in case.scores:
        return exact(case, of), ()
    plain = exact(case._replace(scores={}), of)
    return plain, tuple(relative_error(x, y) for x, y in zip(exact(case, of), plain))


def exact(case: peers.Case, of: Pass) -> tuple[Any, ...]:
    """Standard attention in float32, from the formula; its gradients are PyTorch's. As many batch entries at a time as
    have 1 GB of scores; with block masks a head at a time."""
    import torch

    wide = torch.promote_types(case.q.dtype, torch.float32)
    arrays = {**case._asdict(), **case.scores}
    arrays = {
        name: x.detach().to(wide) if x.is_floating_point() else x for name, x in arrays.items() if torch.is_tensor(x)
    }
    read = {name: x.detach().clone() for name, x in case.scores.get("score_arrays", {}).items()}
    leaves = [
        (read if name in read else arrays)[name].requires_grad_(of is BACKWARD) for name in ("q", "k", "v", *case.wrt)
    ]
    dout = arrays.pop("dout")
    batch, seq, heads, _ = case.q.shape
    at = torch.arange(seq, device=case.q.device)
    if case.visible is not None:
        seen = case.visible(0, 0, at[:, None], at).expand(seq, seq)
        parts = []
        for b, h in itertools.product(range(batch), range(heads)):
            some = (slice(b, b + 1), slice(None), slice(h, h + 1))
            q, k, v = (x[some] for x in leaves)
            out = _formula(q, k, v, case.causal, None, mask=seen)
            parts.append(out.detach())
            if of is BACKWARD:
                out.backward(dout[some], inputs=leaves)
        return (
            tuple(x.grad for x in leaves)
            if of is BACKWARD
            else (torch.cat(parts).view(batch, heads, seq, -1).transpose(1, 2),)
        )
    outs = []
    for some in torch.arange(batch).split(max(1, 2**28 // (heads * seq * seq))):
        part = slice(int(some[0]), int(some[-1]) + 1)
        given = {name: x[part] if x.ndim > 1 and len(x) == batch else x for name, x in arrays.items()}
        given |= {name: case.scores[name] for name in ("softcap", "dropout") if name in case.scores}
        if "score" in case.scores:
            entry = some.to(at.device)[:, None, None, None]
            head = torch.arange(heads, device=at.device)[:, None, None]
            given["score"] = functools.partial(case.scores["score"], b=entry, h=head, i=at[:, None], j=at, **read)
        out = _formula(**given, causal=case.causal)
        outs.append(out.detach())
        if of is BACKWARD:
            out.backward(dout[part], inputs=leaves)
    return tuple(x.grad for x in leaves) if of is BACKWARD else (torch.cat(outs),)


def _formula(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    softcap: float | None = None,
    score: Any = None,
    dropout: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    key_mask: Any = None,
    sinks: Any = None,
) -> Any:
    """softmax(score(Q Kᵀ)) V with every score in memory."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if score is not None:
        s = score(s)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * distance.abs()
    if bias is not None:
        s = s + bias
    for seen in (mask, None if key_mask is None else key_mask[:, None, None], distance >= 0 if causal else None):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = torch.nn.functional.dropout(s.softmax(-1)[..., : k.shape[2]], dropout)
    return (p @ v).transpose(1, 2)
