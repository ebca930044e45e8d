"""The suites `decode`, `varlen`, `paged` and `latent`: what serving and packed training ask, with lengths on the
device.

Everybody is replayed from a CUDA graph: who calls has the host's time as well, which the suite `host` measures. One
graph goes through several copies of the arrays, which are larger than any L2 cache together.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..passes import BACKWARD, FORWARD, PASSES, Pass
from ..problem import OFFSETS, View, contiguous
from ..rules import describe
from ..tools.timing import Candidate, geomean, ratio
from . import peers, serving_peers
from .serving_rows import CALLS, KINDS, QUICK, Call
from .suite import Measured, Options, Problem, compare, importable, replayed, take_turns

COLD = 256 << 20  # bytes of q, k and v in all copies; L2 caches have up to 126 MB
MOST_CALLS, LEAST_CALLS = 64, 6  # of one graph
SCORES = 2**27  # of standard attention at a time
ROUND = 256  # rows; caches have a multiple of it
LARGE = 200e6  # bytes of k and v; such rows are told in shares of the bandwidth
LATENT_SCALE = 192**-0.5  # DeepSeek's: heads have 192 columns before their weights are absorbed

# Beside the peers stand ours in another form, and what reading K and V takes.
PEERS = {
    "decode": ("fa3", "flashinfer", "flashinfer-tc", "cudnn", "fa2", "lengths", "sixteen", "append", "read"),
    "varlen": ("fa3", "flashinfer", "fa2", "dense"),
    "paged": ("fa3", "flashinfer", "flashinfer-tc", "cudnn", "dense", "append", "read"),
    "latent": ("flashmla", "fa3", "flashinfer", "dense", "read"),
}
OWN = {
    "lengths": "lengths on the device",
    "sixteen": "against our call on 16 bits",
    "append": "appending",
    "dense": "against our dense call",
    "read": "against reading K and V",
}


def problems(suite: str, options: Options) -> list[Problem]:
    """The rows of a suite, those of packed sequences in both passes where queries and keys are as many."""
    wanted = options.only or (QUICK if options.quick else ())
    return [
        {"pass": direction, "row": name, "call": str(call), "dtype": options.dtype}
        for direction in ("forward", "backward")
        for name, call in CALLS[suite].items()
        if name.startswith(wanted or "")
        and (direction == "forward" or call.held == "packed" and call.queries == call.keys)
    ]


def call_of(problem: Mapping[str, Any]) -> Call:
    return next(calls[problem["row"]] for calls in CALLS.values() if problem["row"] in calls)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def shapes(call: Call) -> dict[str, tuple[int, ...]]:
    """Of q, of k and v, and of the arrays that say where they lie."""
    batch, queries, keys = len(call.keys), max(call.queries), max(call.keys)
    of_q, of_k = (call.heads, call.dim), (call.heads_k, call.dim)
    if call.held == "packed":
        ends = {"cu_seqlens_q": (batch + 1,), "cu_seqlens_k": (batch + 1,)}
        return {"q": (sum(call.queries), *of_q), "k": (sum(call.keys), *of_k), **ends}
    q = (batch, queries, *of_q)
    if call.held == "pages":
        pages = _pages(call)
        table = batch, max(pages)
        return {"q": q, "k": (sum(pages), call.page, *of_k), "seqlens_k": (batch,), "page_table": table}
    if call.held == "caches":
        return {"q": q, "k": (batch, -(-keys // ROUND) * ROUND, *of_k), "seqlens_k": (batch,)}
    return {"q": q, "k": (batch, keys, *of_k)}


def _pages(call: Call) -> list[int]:
    return [-(-n // call.page) for n in call.keys]


def draw(call: Call, dtype: str, seed: int, device: str = "cuda") -> peers.Case:
    """Random normal inputs; the pages of a sequence lie anywhere."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    given: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    lengths = {name: shape for name, shape in shapes(call).items() if name not in "qk"}
    q, k = (shapes(call)[x] for x in "qk")
    a, b, c, dout = (torch.randn(shape, **given) for shape in (q, k, k, q))
    if call.eight:
        b, c = (x.to(getattr(torch, call.eight)) for x in (b, c))
    values: dict[str, Any] = {"seqlens_k": call.keys}
    values |= {f"cu_seqlens_{x}": (0, *itertools.accumulate(n)) for x, n in (("q", call.queries), ("k", call.keys))}
    if "page_table" in lengths:
        order = torch.randperm(k[0], generator=torch.Generator().manual_seed(seed)).tolist()
        taken = iter(order)
        lines = [[*itertools.islice(taken, n)] for n in _pages(call)]
        values["page_table"] = [line + [0] * (lengths["page_table"][1] - len(line)) for line in lines]
    scores = {name: torch.tensor(values[name], dtype=torch.int32, device=device) for name in lengths}
    return peers.Case(a, b, None if call.latent else c, dout, call.causal, scores | _options(call))


def _options(call: Call) -> dict[str, Any]:
    """What `attention` is given beside the arrays; of packed sequences the longest lengths, which peers must know."""
    hints = {"max_seqlen_q": max(call.queries), "max_seqlen_k": max(call.keys)} if call.held == "packed" else {}
    return hints | ({"latent": call.latent, "scale": LATENT_SCALE} if call.latent else {})


def in_other_form(case: peers.Case, call: Call) -> dict[str, tuple[Call, peers.Case]]:
    """The same for ours in the form to compare with: numbers of 8 bits in 16; dense caches with their lengths; without,
    what has one length."""
    if call.eight:
        wide = case._replace(k=case.k.to(case.q.dtype), v=case.v.to(case.q.dtype))
        return {"sixteen": (call._replace(eight=""), wide)}
    dense = call._replace(held="dense", page=0)
    if call.held == "dense":
        import torch

        lengths = torch.tensor(call.keys, dtype=torch.int32, device=case.q.device)
        return {"lengths": (call._replace(held="caches"), case._replace(scores={"seqlens_k": lengths}))}
    if not call.even or call.held == "caches":
        return {}
    if call.held == "packed":
        rows = (len(call.keys), call.keys[0])
        q, k, v, dout = (x.view(*rows, *x.shape[1:]) for x in case[:4])
        return {"dense": (dense, peers.Case(q, k, v, dout, call.causal))}
    k, v = (
        None if x is None else x[case.scores["page_table"]].flatten(1, 2)[:, : call.keys[0]] for x in (case.k, case.v)
    )
    return {"dense": (dense, peers.Case(case.q, k, v, case.dout, call.causal, _options(call)))}


def appending(family: str | None) -> peers.Prepare:
    """Ours, which write the rows that belong to the queries first, turned by an angle of 0: the same is attended to."""
    import torch

    from .. import attention_append

    def prepare(case: peers.Case, of: Pass) -> Candidate:
        q, k, v = case[:3]
        table, filled = case.scores.get("page_table"), case.scores["seqlens_k"] - q.shape[1]
        at = filled[:, None] + torch.arange(q.shape[1], device=q.device)
        number = torch.arange(len(filled), device=q.device)[:, None]
        k_new, v_new = (
            x[number if table is None else table[number, at // x.shape[1]], at % x.shape[1]].to(q.dtype) for x in (k, v)
        )
        angles = torch.zeros(k.shape[1] if table is None else table.shape[1] * k.shape[1], q.shape[-1] // 2)
        rotary = angles.cos().to(q.device), angles.to(q.device)
        given: dict[str, Any] = {"page_table": table, "causal": case.causal, "family": family, "rotary": rotary}
        return Candidate(lambda: (attention_append(q, k_new, v_new, k, v, filled, **given),))

    return prepare


def exact(case: peers.Case, call: Call, of: Pass) -> tuple[Any, ...]:
    """Standard attention in float64, sequence by sequence; its gradients are PyTorch's."""
    import torch

    v = case.k[..., : call.latent] if call.latent else case.v
    scale = case.scores.get("scale", call.dim**-0.5)
    found = []
    for n, (queries, keys) in enumerate(zip(call.queries, call.keys)):
        if call.held == "packed":
            own = slice(first := sum(call.queries[:n]), first + queries)
            theirs = slice(first := sum(call.keys[:n]), first + keys)
            rows = case.q[own], case.k[theirs], v[theirs], case.dout[own]
        elif call.held == "pages":
            pages = case.scores["page_table"][n, : -(-keys // call.page)]
            rows = case.q[n], *(x[pages].flatten(0, 1)[:keys] for x in (case.k, v)), case.dout[n]
        else:
            rows = case.q[n], case.k[n, :keys], v[n, :keys], case.dout[n]
        found.append(_standard(*rows, scale, call.causal, of))
    join = torch.cat if call.held == "packed" else torch.stack
    return tuple(join(x) for x in zip(*found))


def _standard(q: Any, k: Any, v: Any, dout: Any, scale: float, causal: bool, of: Pass) -> tuple[Any, ...]:
    """One sequence, (rows, heads, dim), some heads at a time."""
    import torch

    heads_k, group = k.shape[1], q.shape[1] // k.shape[1]
    step = max(1, SCORES // (len(q) * len(k) * group))
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    parts = []
    for first in range(0, heads_k, step):
        theirs = slice(first, first + step)
        own = slice(first * group, (first + step) * group)
        leaves = [x.detach().double().requires_grad_(of is BACKWARD) for x in (q[:, own], k[:, theirs], v[:, theirs])]
        a, b, c = leaves
        s = torch.einsum("ihgd,jhd->hgij", a.unflatten(1, (-1, group)), b) * scale
        p = (s.masked_fill(hidden, -torch.inf) if causal else s).softmax(-1)
        out = torch.einsum("hgij,jhd->ihgd", p, c).flatten(1, 2)
        parts.append(torch.autograd.grad(out, leaves, dout[:, own].double()) if of is BACKWARD else (out,))
    return tuple(torch.cat(x, 1) for x in zip(*parts))


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(suite: str, problem: Problem, options: Options) -> Measured:
    """Microseconds, or TFLOP/s of packed sequences, of calls replayed from CUDA graphs; each result is that of a
    replay."""
    call, of = call_of(problem), PASSES[problem["pass"]]
    compile_ahead(suite, options)
    seed = zlib.crc32(repr(problem).encode())
    first = draw(call, problem["dtype"], seed)
    size = sum(x.nbytes for x in first[:3]) if call.held == "packed" else call.cache_bytes
    copies = min(MOST_CALLS, -(-COLD // size))
    cases = [*(draw(call, problem["dtype"], seed + n) for n in range(1, copies)), first]  # the last one is looked at
    cases *= -(-LEAST_CALLS // copies)
    ours = peers.ours(options.family)
    ways: dict[str, tuple[peers.Prepare, list[peers.Case]]] = {"ours": (ours, cases)}
    ways |= {name: (prepare, cases) for name, prepare in others(suite, call).items()}
    forms = [in_other_form(case, call) for case in cases[:copies]] * (len(cases) // copies)
    ways |= {name: (ours, [form[name][1] for form in forms]) for name in forms[0]}
    if "append" in PEERS[suite]:
        on_caches = [form["lengths"][1] if "lengths" in form else x for form, x in zip(forms, cases)]
        ways["append"] = (appending(options.family), on_caches)
    prepares: dict[str, peers.Prepare] = {name: functools.partial(_replayed, *way) for name, way in ways.items()}
    candidates, notes = compare(prepares, first, of, exact(first, call, of))
    if "read" in PEERS[suite]:
        candidates["read"] = _replayed(functools.partial(_reading, call), cases, first, of)
    seconds, more = take_turns(candidates, options)
    each = {name: t / len(cases) for name, t in seconds.items()}
    notes |= more
    speeds = {name: call.work * (2.5 if of is BACKWARD else 1) / 1e12 / t for name, t in each.items()}
    if suite == "varlen":
        return speeds, notes
    if call.latent:
        notes |= {name: _rates(speeds[name], each["read"] / t) for name, t in each.items() if name != "read"}
    return {name: 1e6 * t for name, t in each.items()}, notes


def _rates(tflops: float, read: float) -> str:
    """What either limit leaves: few heads are bound by reading K, many by products."""
    return f"{tflops:.0f} TFLOP/s, {read:.0%} of reading K"


def others(suite: str, call: Call) -> dict[str, peers.Prepare]:
    """The peers of a suite that are there, as they take such a call."""
    found = importable(tuple(name for name in PEERS[suite] if name in peers.LOADERS))
    if "fa3" in found:
        found["fa3"] = functools.partial(serving_peers.fa3, peers.fa3_operators())
    if call.held != "dense":
        of_lengths = {"fa2": serving_peers.fa2, "cudnn": serving_peers.cudnn}
        found |= {name: prepare for name, prepare in of_lengths.items() if name in found}
    return found


def _replayed(prepare: peers.Prepare, cases: Sequence[peers.Case], case: peers.Case, of: Pass) -> Candidate:
    """Calls on all the cases as one CUDA graph, with the results of the last one."""
    made = {id(x): prepare(x, of) for x in cases}
    return replayed([made[id(x)] for x in cases])


def _reading(call: Call, case: peers.Case, of: Pass) -> Candidate:
    """A sum over as many bytes as K and V have filled: what reading them takes."""
    import torch

    filled = sum(call.keys) * call.heads_k * call.dim
    arrays = [x for x in (case.k, case.v) if x is not None]
    rows = torch.cat([x.flatten()[:filled].view(torch.uint8) for x in arrays]).view(torch.int64)
    return Candidate(lambda: (rows.sum(),))


@functools.cache
def compile_ahead(suite: str, options: Options) -> None:
    """Compile what a suite's rows run, on all cores: one by one it would take longer than they do."""
    from ..gpu.device import current
    from ..gpu.source import generate
    from ..tools.precompile import compile_all

    arch = current(0)
    work = {generate(job.plan): job for x in problems(suite, options) for job in jobs_of(x, arch, options.family)}
    for _ in compile_all([*work.values()]):
        pass


def jobs_of(problem: Mapping[str, Any], arch: Any, family: str | None) -> Iterable[Any]:
    """What `compile_all` takes, of ours in a row; nothing of what a family objects to."""
    from ..gpu.plan import plan
    from ..tools.precompile import Job

    call, of = call_of(problem), PASSES[problem["pass"]]
    forms = [call, *([call._replace(held="caches")] if call.held == "dense" else [])]
    forms += [call._replace(eight="")] if call.eight else []
    if call.even and call.held in ("packed", "pages"):
        forms.append(call._replace(held="dense", page=0))
    for form, each in itertools.product(forms, dict.fromkeys((FORWARD, of))):
        dtypes = {"q": problem["dtype"], "k": form.eight or problem["dtype"]}
        views = {
            name: View(x, contiguous(x), dtypes.get(name, OFFSETS[0]), "cuda:0", "torch")
            for name, x in shapes(form).items()
        }
        q, k = views.pop("q"), views.pop("k")
        try:
            asked = describe(q, k, None if form.latent else k, causal=form.causal, **views, **_options(form))
            yield Job(asked, each, plan(asked, arch, each, family))
        except (TypeError, ValueError):  # it is told where the row is measured
            continue


# ---- what is shown --------------------------------------------------------------------------------------------------


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What `report.summary` says of each kind of row: the best peer, ours in another form, and of large caches how much
    of the time is reading."""
    found = []
    for (kind, names), of in itertools.product(KINDS.items(), ("forward", "backward")):
        group = [row for row in rows if row["problem"]["row"] in names and row["problem"]["pass"] == of]
        said = []
        against = {"the best peer": [(row["ratio_to_best"], row) for row in group]}
        for name, words in OWN.items():
            large = [row for row in group if name != "read" or call_of(row["problem"]).cache_bytes > LARGE]
            pairs = [(ratio(row["ours"], row["peers"].get(name), row["unit"]), row) for row in large]
            if name in ("lengths", "append"):
                words, pairs = f"{words}, against without", [(x and 1 / x, row) for x, row in pairs]
            against[words.removeprefix("against ")] = pairs
        for words, pairs in against.items():
            known = [(x, row["problem"]["row"]) for x, row in pairs if x]
            if known:
                least, name = min(known)
                said.append(f"{words} {geomean(x for x, _ in known):.2f}x, worst {least:.2f}x ({name})")
        if said:
            found.append(f"{kind}, {of}: {'; '.join(said)}")
    return found
