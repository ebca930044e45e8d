"""Runs of the fuzzer: kinds are shared out over processes and GPUs, until a number of problems or a time; the record.

A record (fuzz_runs.json) is a list of runs. Each names its sources, its seed and the kinds it went over, `from` and
`to`, so runs with --go-on add up: they take the seed of the runs of these sources, and the kinds behind theirs.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from backends import gpu_count
from criterion import luck_explains

from cupyflash.gpu.source import sources_digest

FILTERS = ("family", "dtype", "library")
SECONDS_BETWEEN_LINES = 10
FAILURES = 20  # and then it ends
PORTIONS = 8  # of each of the last kinds


class Result(NamedTuple):
    """Of a kind's problems."""

    index: int
    counted_as: str
    problems: int
    failures: list[str]
    by_luck: int  # results that missed the criterion by little


class Work(NamedTuple):
    """Problems of a kind, until a time."""

    args: argparse.Namespace
    kind: int
    numbers: range
    libraries: list[str]
    until: float = math.inf  # as time.time() has it


def spread(problems: int, weights: list[float]) -> Iterator[range]:
    """The numbers of the problems of each kind, as many as its weight is large."""
    whole = sum(weights)
    ends = [round(problems * x / whole) for x in itertools.accumulate(weights, initial=0)]
    for start, end in itertools.pairwise(ends):
        yield range(end - start)


def in_portions(work: list[Work], jobs: int) -> list[Work]:
    """The last kinds, one for each process, in portions: else most would wait for the few that took the last ones.

    The first portions come first: what they compile the others load.
    """
    if jobs == 1:
        return work
    cut = [
        kind._replace(numbers=kind.numbers[len(kind.numbers) * n // PORTIONS : len(kind.numbers) * (n + 1) // PORTIONS])
        for n in range(PORTIONS) for kind in work[-jobs:]
    ]  # fmt: skip
    return [*work[:-jobs], *(portion for portion in cut if portion.numbers)]


def results(run: Callable[[Work], Result], work: list[Work], jobs: int) -> Iterator[Result]:
    """In the order in which they are done. A process for each job: those that share a GPU each have their own kinds,
    but for the last ones."""
    if jobs == 1:
        yield from map(run, work)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes, which have a core each
    context = multiprocessing.get_context("spawn")
    gpus = 0 if work[0].args.cpu else gpu_count()
    jobs = min(jobs, len(work))
    numbers = context.SimpleQueue()
    for n in range(jobs):
        numbers.put(n)
    with context.Pool(jobs, take_a_gpu, (numbers, gpus)) as pool:
        yield from pool.imap_unordered(run, work)


def take_a_gpu(numbers: Any, gpus: int) -> None:
    """In a new process, before anything is on a GPU."""
    if gpus > 1:
        there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        n = numbers.get()
        numbers.put(n)  # for who takes this one's place, if it dies
        os.environ["CUDA_VISIBLE_DEVICES"] = there[n % gpus]


class Before(NamedTuple):
    """What runs of the same sources did already."""

    seed: int | None
    kinds: int
    problems: int


def before(args: argparse.Namespace) -> Before:
    """Of the seed that is given, or of the last one; with the same filters."""
    runs = [
        run for run in of_these_sources(read(args.record), args)
        if "to" in run and args.seed in (None, run["seed"])
        and {name: run[name] for name in FILTERS if name in run} == filters_of(args)
    ]  # fmt: skip
    seed = runs[-1]["seed"] if runs else None
    runs = [run for run in runs if run["seed"] == seed]
    return Before(seed, max((run["to"] for run in runs), default=0), sum(run["problems"] for run in runs))


def filters_of(args: argparse.Namespace) -> dict[str, str]:
    return {name: getattr(args, name) for name in FILTERS if getattr(args, name)}


def of_these_sources(runs: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """On a GPU or on a CPU, as this one."""
    return [run for run in runs if run["sources"] == sources_digest() and bool(run["gpu"]) != args.cpu]


def read(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else []


def record(args: argparse.Namespace, first: int, end: int, problems: int, counts: Counter[str], failures: list[str],
           by_luck: int) -> str:  # fmt: skip
    """Add a run to the record; what all runs of these sources come to."""
    from gpu_report import machine

    runs = read(args.record)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    facts = {"gpu": None} if args.cpu else machine() | {"gpus": gpu_count()}
    runs.append(
        {**facts, "date": now, "sources": sources_digest(), "seed": args.seed, "problems": problems,
         "from": first, "to": end, **filters_of(args), "wrong": len(failures), "by_luck": by_luck,
         "counts": dict(sorted(counts.items()))}
    )  # fmt: skip
    args.record.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    same = of_these_sources(runs, args)
    problems, wrong = (sum(run[name] for run in same) for name in ("problems", "wrong"))
    return f"these sources: {problems:,} problems in {len(same)} runs, {wrong} wrong"


def go_over(
    args: argparse.Namespace, run: Callable[[Work], Result], libraries: list[str], weights: Callable[[int], float],
    each: int,
) -> bool:  # fmt: skip
    """Run what `args` ask for, tell of it, and record it; whether something is wrong. `each`: problems of a kind."""
    first, wanted = 0, args.problems
    if args.go_on:
        seed, first, already = before(args)
        args.seed, wanted = args.seed if seed is None else seed, args.problems - already
    args.seed = int(time.time()) if args.seed is None else args.seed
    if wanted <= 0:
        print(f"seed {args.seed}: {args.problems:,} problems are recorded")
        return False
    kinds = min(wanted, args.kinds or max(20, wanted // each))
    until = time.time() + args.seconds
    shares = spread(wanted, [weights(k) for k in range(first, first + kinds)])
    work = [Work(args, k, numbers, libraries, until) for k, numbers in enumerate(shares, first) if numbers]
    work = in_portions(work, args.jobs)
    print(f"seed {args.seed}: {wanted:,} problems of {kinds} kinds, arrays of {', '.join(libraries)}", flush=True)
    done, by_luck, end, counts, failures = 0, 0, first, Counter[str](), []
    whole, start = False, time.monotonic()
    told = start
    try:
        for result in results(run, work, args.jobs):
            done, by_luck = done + result.problems, by_luck + result.by_luck
            end = max(end, result.index + 1) if result.problems else end
            counts[result.counted_as] += result.problems
            failures += result.failures
            now = time.monotonic()
            if result.failures or now - told > SECONDS_BETWEEN_LINES:
                told, rate = now, done / (now - start)
                print(f"{done:,} problems, {len(failures)} wrong, {rate:,.0f}/s", *result.failures, sep="\n")
                sys.stdout.flush()
            if len(failures) >= FAILURES:
                break
        else:
            whole = True
    except KeyboardInterrupt:
        print("interrupted")
    if not whole:  # what is done counts; kinds that others were at do not, and are left out by who goes on
        end = min(first + kinds, end + args.jobs)
    counts = +counts
    too_many = by_luck > luck_explains(done)
    if too_many:
        print(f"{by_luck} results missed the criterion by little: luck explains {luck_explains(done)}")
    for text in failures:  # what to run again, at the end of all
        print(text.partition(": Kind(")[0], text.splitlines()[2].strip()[:200])
    if args.record:
        print(record(args, first, end, done, counts, failures, by_luck))
    told = f"{done:,} problems of {end - first} kinds, {len(failures)} wrong"
    print(f"seed {args.seed}: {told}, in {time.monotonic() - start:,.0f} s")
    return bool(failures) or too_many
