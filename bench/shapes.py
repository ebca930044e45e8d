"""Shapes drawn at random, bf16, beside the peers that are there; or, with --regret, beside every tile of ours.

    python bench/shapes.py --seed 7 --count 50 [--pass forward] [--regret] [--seconds 300] [--out FILE]
    python bench/shapes.py --call "4 x 2048, 16/4 x 128, causal" [--call ...] --kernels ../before/kernels_cu
    python bench/shapes.py --call "8 x 197, 12 x 64" [--call ...] --eager | --recorded
    python bench/shapes.py --call "8 x 960, 48/6 x 128, causal" [--call ...] --dealt

Beside peers everybody is replayed from a CUDA graph, in turn; a row has the best peer's time over ours. The regret of a
row is the time of the planner's tile over that of the fastest one. Then geometric means, worst rows, and how many are
behind. --kernels: ours with the CUDA files of another state, and this one's plans, as the peer "before", alone.
--eager: calls as they are, by the host's clock from the first of many until all are done. --recorded: so forward and
backward together, as PyTorch's autograd records them, beside its own attention. --dealt: Hopper's backward with its key
tiles dealt out in other ways, named by shares of a head's queries, first heads that are whole, and heads together.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from cupyflash import attention, rules
from cupyflash.bench import models, peers
from cupyflash.bench.models import Call
from cupyflash.bench.serving import _replayed
from cupyflash.bench.suite import Options, compare, importable, take_turns
from cupyflash.gpu import corridor, programs, source
from cupyflash.gpu.device import Arch, current
from cupyflash.gpu.families import sm90_backward
from cupyflash.gpu.families import sm90_backward_cost as cost
from cupyflash.gpu.families.sm90_backward_tiles import cluster_keys
from cupyflash.gpu.kernel_plan import ceil
from cupyflash.gpu.plans import plans
from cupyflash.gpu.source import generate
from cupyflash.passes import PASSES, Pass
from cupyflash.problem import AttentionProblem, View, contiguous
from cupyflash.tools.precompile import Job, compile_all
from cupyflash.tools.timing import Candidate, geomean, interleave, wall_sampler

DIMS = (40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 128, 144, 160, 176, 192, 224, 256)
WORK = 2e9, 1.5e12  # floating-point operations of a forward: from calls that a launch bounds to some milliseconds
PEERS = ("cudnn", "fa3")
RECORDED = {"ours": None, "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
CALLS = 8  # in one CUDA graph
MOST_SUMS = 512 << 20  # bytes of float32 sums of shares
_CALL = re.compile(r"(\d+) x (\d+)(?: on (\d+))?, (\d+)(?:/(\d+))? x (\d+)(?:, (causal)|, window (\d+))?")


def drawn(draw: random.Random) -> Call:
    """1 to 96 heads, 1 to 16 of them for each of K and V, 48 to 24k rows; a third is causal, a tenth has a window, a
    quarter other keys than queries."""

    def rows(least: int, most: int) -> int:
        return int(least * (most / least) ** draw.random())

    while True:
        dim = draw.choice(DIMS if draw.random() < 0.6 else (64, 128))
        heads_k = rows(1, 97)
        heads = heads_k * draw.choice((1, 1, 1, 2, 4, 5, 6, 8, 16))
        seq, kind = rows(48, 24576), draw.random()
        seq_k = rows(48, 24576) if draw.random() < 0.25 else None
        if draw.random() < 0.5:  # most lengths that people have are even
            seq = max(64, seq // 64 * 64)
        batch = max(1, int(draw.choice((4096, 8192, 16384, 32768)) / seq))
        window = rows(32, 4096) if kind > 0.9 else None
        causal = kind < 0.35 or window is not None
        if (causal and seq_k is not None and seq_k < seq) or heads > 96 or (window and window >= (seq_k or seq)):
            continue
        call = Call(batch, seq, heads, heads_k, dim, causal=causal, seq_k=seq_k, window=window)
        if WORK[0] <= models.work(call, PASSES["forward"]) <= WORK[1]:
            return call


def read(text: str) -> Call:
    """A call as rows print it."""
    found = _CALL.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no call; it must be like '4 x 512 on 2048, 16/4 x 128, causal'")
    batch, seq, keys, heads, heads_k, dim, causal, window = found.groups()
    return Call(
        int(batch), int(seq), int(heads), int(heads_k or heads), int(dim), causal=bool(causal or window),
        seq_k=int(keys) if keys else None, window=int(window) if window else None,
    )  # fmt: skip


@contextlib.contextmanager
def kernels_of(folder: Path) -> Iterator[None]:
    """Ours by the CUDA files there; what is captured stays so."""
    try:
        with mock.patch.object(source, "kernels_folder", lambda: folder):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    corridor.forget()
    programs._loaded.clear()
    source.inlined.cache_clear()


def described(call: Call, of: Pass) -> AttentionProblem:
    shapes = {"q": (call.batch, call.seq, call.heads, call.dim)}
    shapes |= dict.fromkeys("kv", (call.batch, call.keys, call.heads_k, call.dim))
    views = {name: View(x, contiguous(x), "bfloat16", "cuda:0", "torch") for name, x in shapes.items()}
    window = None if call.window is None else (call.window, 0)
    return rules.for_pass(rules.describe(**views, causal=call.causal, window=window), of)


def compile_ahead(calls: list[Call], passes: list[Pass]) -> None:
    """What ours run, on all cores: one by one it would take longer than they do."""
    arch, work = current(0), dict[str, Job]()
    for call, of in itertools.product(calls, dict.fromkeys((PASSES["forward"], *passes))):
        problem = described(call, of)
        work |= {generate(x): Job(problem, of, x) for x in plans(problem, arch, of, None) if x}
    for _ in compile_all([*work.values()]):
        pass


def beside_peers(call: Call, of: Pass, kernels: Path | None) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of ours and the peers', or of ours with other kernels."""
    case = models.draw(call, "bfloat16", 0)
    prepares: dict[str, peers.Prepare] = {"ours": peers.ours()} | ({} if kernels else importable(PEERS))
    graphs: dict[str, peers.Prepare] = {
        name: functools.partial(_replayed, prepare, [case] * CALLS) for name, prepare in prepares.items()
    }
    if kernels:

        def before(case: peers.Case, of: Pass) -> Candidate:
            with kernels_of(kernels):
                return graphs["ours"](case, of)

        graphs["before"] = before
    candidates, notes = compare(graphs, case, of)
    seconds, more = take_turns(candidates, Options(rounds=5, min_ms=4), patience=0.1)
    return {name: t / CALLS for name, t in seconds.items()}, notes | more


def eagerly(call: Call, of: Pass, recorded: bool) -> tuple[dict[str, float], dict[str, str]]:
    """The same of calls that are not replayed, or of a forward and its backward."""
    import torch

    case = models.draw(call, "bfloat16", 0)
    prepares: dict[str, peers.Prepare]
    if recorded:
        prepares = {name: functools.partial(_step, backend) for name, backend in RECORDED.items()}
    else:
        prepares = {"ours": peers.ours()} | importable(PEERS)
    candidates, notes = compare(prepares, case, of)
    sampler = wall_sampler(candidates, 5.0, lambda _: torch.cuda.synchronize())
    seconds, failures = interleave(list(candidates), 9, sampler)
    return seconds, notes | failures


def _step(backend: str | None, case: peers.Case, _: Pass) -> Candidate:
    """Ours, or a backend of PyTorch's attention. Everybody's heads come first, as PyTorch has them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in case[:4])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    forward: Callable[[], Any]
    context: Callable[[], Any] = contextlib.nullcontext
    if backend is None:
        forward = functools.partial(attention, q, k, v, causal=case.causal, window=case.window, layout="bhsd")
    elif case.window is not None or (case.causal and q.shape[2] != k.shape[2]):
        raise NotImplementedError("PyTorch's attention has no window, and is causal from the top left")
    else:
        scaled, grouped = torch.nn.functional.scaled_dot_product_attention, q.shape[1] != k.shape[1]
        forward = functools.partial(scaled, q, k, v, is_causal=case.causal, enable_gqa=grouped)
        context = functools.partial(sdpa_kernel, getattr(SDPBackend, backend))
    return Candidate(lambda: torch.autograd.grad(forward(), leaves, dout), context)


def beside_tiles(call: Call, of: Pass) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of the planner's tile and of each other, as it is named."""
    from cupyflash import tune

    q = call.batch, call.seq, call.heads, call.dim
    k = call.batch, call.keys, call.heads_k, call.dim
    window = (call.window, 0) if call.window is not None else None
    found = tune(q, k, dtype="bfloat16", of=of.name, causal=call.causal and window is None, window=window, store=False,
                 rounds=3, min_ms=3.0)  # fmt: skip
    seconds = {"ours" if not x.tile else str(x.tile): x.seconds for x in found.trials if x.seconds}
    return seconds, {str(x.tile): x.note for x in found.trials if x.note.startswith("wrong")}


def ways(call: Call, arch: Arch) -> dict[str, tuple[cost.Dealt, int]]:
    """Some ways to deal out a backward's key tiles, by their names."""
    problem = described(call, PASSES["backward"])
    found = sm90_backward.fit(problem, arch, None)
    if found is None:
        return {}
    t, heads = found.tile, problem.batch * problem.heads_k
    clusters, key_tiles = sm90_backward._clusters(arch, t), ceil(problem.seq_k, cluster_keys(problem, t))
    query_tiles, wave = problem.group * ceil(problem.seq_q, t.rows), ceil(clusters, key_tiles)
    tried = [cost.Dealt(n) for n in (1, 2, 3, 4, 6, 8, 12, 16)]
    tried += [cost.Dealt(n, heads - last) for n in (2, 4, 6) for last in (1, 2, wave) if last < heads]
    made: dict[str, tuple[cost.Dealt, int]] = {}
    for dealt in tried:
        sums = 4 * dealt.shares * (heads - dealt.whole) * problem.seq_k * (problem.dim + problem.dim_v)
        if dealt.shares <= query_tiles and (dealt.shares == 1 or sums <= MOST_SUMS):
            for together in cost._orders(problem, t, dealt, clusters):
                made[f"{dealt.shares} {dealt.whole} {together}"] = dealt, together
    return made


def beside_ways(call: Call, of: Pass) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of the planner's way and of others."""
    case = models.draw(call, "bfloat16", 0)

    def as_planned(case: peers.Case, of: Pass) -> Candidate:
        return _replayed(peers.ours(), [case] * CALLS, case, of)

    def dealt_out(dealt: cost.Dealt, together: int, case: peers.Case, of: Pass) -> Candidate:
        with (
            mock.patch.object(cost, "shares", lambda *_: dealt),
            mock.patch.object(cost, "_orders", lambda *_: (together,)),
            kernels_of(source.kernels_folder()),
        ):
            return as_planned(case, of)

    prepares: dict[str, peers.Prepare] = {"ours": as_planned}
    prepares |= {name: functools.partial(dealt_out, *way) for name, way in ways(call, current(0)).items()}
    candidates, notes = compare(prepares, case, of)
    seconds, more = take_turns(candidates, Options(rounds=4, min_ms=3), patience=0.1)
    return {name: t / CALLS for name, t in seconds.items()}, notes | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--pass", dest="of", choices=("forward", "backward"), action="append")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--regret", action="store_true")
    beside.add_argument("--eager", action="store_true")
    beside.add_argument("--recorded", action="store_true")
    beside.add_argument("--dealt", action="store_true")
    parser.add_argument(
        "--call", type=read, action="append", help="a call, as rows print it, in the place of random ones"
    )
    beside.add_argument(
        "--kernels", type=Path, help="a folder kernels_cu of another state, to be timed beside this one's"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new row after so many")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    args = parser.parse_args()
    if args.recorded and args.of:
        parser.error("--pass is given beside --recorded, which is of both together")
    if args.dealt and args.of not in (None, ["backward"]):
        parser.error("--dealt is of the backward alone")
    named = ("backward",) if args.recorded or args.dealt else args.of or ("forward", "backward")
    draw, passes = random.Random(args.seed), [PASSES[name] for name in named]
    calls = args.call or [drawn(draw) for _ in range(args.count)]
    compile_ahead(calls, passes)
    if args.kernels:
        with kernels_of(args.kernels):
            compile_ahead(calls, passes)
    rows: list[dict[str, Any]] = []
    regret = args.regret or args.dealt
    begin = time.monotonic()
    for call, of in itertools.product(calls, passes):
        if time.monotonic() - begin > args.seconds:
            break
        if args.regret:
            seconds, notes = beside_tiles(call, of)
        elif args.dealt:
            seconds, notes = beside_ways(call, of)
        elif args.eager or args.recorded:
            seconds, notes = eagerly(call, of, args.recorded)
        else:
            seconds, notes = beside_peers(call, of, args.kernels)
        us = {name: 1e6 * t for name, t in seconds.items()}
        others = {name: t for name, t in us.items() if name != "ours"}
        of_pass = "both" if args.recorded else of.name
        what = f"{of_pass:8} {call!s:44}"
        for name, note in notes.items():
            if name == "ours" or "wrong" in note:
                print(f"       {what} {name}: {note}", flush=True)
        if "ours" not in us or not others:
            continue
        best = min(others, key=others.__getitem__)
        ratio = us["ours"] / min(us.values()) if regret else others[best] / us["ours"]
        rows.append({"pass": of_pass, "call": str(call), "ratio": ratio, "us": us})
        print(f"{ratio:6.3f} {what} {us['ours']:9.1f} us, {best} {others[best]:9.1f}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    for name in dict.fromkeys(row["pass"] for row in rows):
        ratios = sorted(row["ratio"] for row in rows if row["pass"] == name)
        behind = f"{sum(x < 1 for x in ratios)} below 1, {sum(x < 0.95 for x in ratios)} below 0.95, "
        worst = f"worst {ratios[-1]:.3f}" if regret else f"{behind}worst {ratios[0]:.3f}"
        print(f"{name}: {len(ratios)} shapes, geometric mean {geomean(ratios):.3f}, {worst}")


if __name__ == "__main__":
    main()
