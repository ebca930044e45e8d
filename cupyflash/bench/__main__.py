"""`python -m cupyflash.bench [suites...] [options]`, or `python -m cupyflash.bench plot`."""

from __future__ import annotations

import argparse

from ..tools.cli import told
from . import plot, run


def main(arguments: list[str] | None = None) -> int:
    """Run suites or draw their results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cupyflash.bench", description=__doc__)
    parser.add_argument("suites", nargs="*", default=["forward", "backward"], help="names of suites, all, or plot")
    parser.add_argument("--family", help="force this kernel family")
    parser.add_argument(
        "--out", help="folder for the JSON files (default bench/results/<gpu>, with --quick bench/quick/<gpu>)"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32", "float64"])
    parser.add_argument("--quick", action="store_true", help="fewer problems, rounds and milliseconds")
    parser.add_argument("--rounds", type=int, help="samples of each candidate")
    parser.add_argument("--min-ms", type=float, help="least duration of a sample")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="suites scores, models, derivatives, decode, varlen, paged, latent, parallel: rows, or how they begin",
    )
    parser.add_argument("--slow", action="store_true", help="suite scores: the slow peers too")
    parser.add_argument(
        "--sustained", action="store_true", help="suites forward, backward, models: a second of everybody on end"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has, measure the others")
    parser.add_argument("--results", help="plot: where the JSON files are (default bench/results, quick bench/quick)")
    parser.add_argument(
        "--docs", help="plot: where the pictures and benchmarks.md go (default docs, quick bench/quick)"
    )
    args = parser.parse_args(arguments)
    if args.suites == ["plot"]:
        for path in plot(args.results, args.docs, args.quick):
            print(path)
        return 0
    return run(
        args.suites, args.family, args.out, args.quick, args.dtype, args.rounds, args.min_ms, args.only, args.slow,
        args.sustained, args.resume,
    )  # fmt: skip


if __name__ == "__main__":
    with told():
        raise SystemExit(main())
