"""Measure this package beside every other attention that can be imported: `cupyflash bench`, `python -m
cupyflash.bench`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

__all__ = ["plot", "run"]


def run(
    suites: Sequence[str] = ("forward", "backward"),
    family: str | None = None,
    out: str | PathLike[str] | None = None,
    quick: bool = False,
    dtype: str | None = None,
    rounds: int | None = None,
    min_ms: float | None = None,
    only: Sequence[str] = (),
    slow: bool = False,
    sustained: bool = False,
    resume: bool = False,
) -> int:
    """Run suites, print a table of each and write `<out>/<suite>.json` after every row.

    Parameters
    ----------
    suites : names
        "forward", "backward" (the papers' grid), "host", "jax", "jit", "import", "memory", "fp32", "fp8", "figures",
        "training", "gpt", "ladder", "scores", "models", "precision", "derivatives", "decode", "varlen", "paged",
        "latent", "cpu"; "paper" (figures, memory and training: what the papers report), or "all": those that need a
        GPU. "parallel" goes alone: over the GPUs of a host, with processes of its own; of the options it takes out,
        only and resume.
    family : str, optional
        Force this kernel family; the file is then `<family>_<suite>.json`. Of "fp32" the problems that it takes.
    out : folder, optional
        Default `bench/results/<gpu>` in the current directory, with quick `bench/quick/<gpu>`.
    quick : bool
        Fewer problems, rounds and milliseconds.
    dtype : str, optional
        For the suites "forward", "backward", "figures", "memory", "scores", "models", "decode", "varlen", "paged",
        "latent" and "jax". Default "bfloat16". For "fp32" and "cpu" one of their two.
    rounds, min_ms : optional
        Samples of each candidate, and the least duration of one in milliseconds. Default 7 and 20, with quick 3 and 5.
    only : names, optional
        For the suites "scores", "models", "derivatives", "decode", "varlen", "paged" and "latent": rows to measure, or
        how their names begin. Default folder as with quick.
    slow : bool
        For the suite "scores": also the peers that are too slow to be of interest, after the others in each row.
    sustained : bool
        For the suites "forward", "backward" and "models": a second of everybody on end in place of short samples, twice
        unless `rounds` is given, with the GPU's clock and power. The file is then `<suite>_sustained.json`.
    resume : bool
        Keep the rows that the file has, where it is of the same kernel sources, machine and versions, and measure the
        others:
        to go on where a run was stopped, or to add rows by `only`.

    Returns
    -------
    int
        0; 1 where a problem gave no result or a wrong one; 2 where a suite is unknown, cannot run here or cannot use
        the family, dtype or rows, after a message that says why.
    """
    if list(suites) == ["parallel"]:
        from .parallel import run as over_gpus

        given = {"family": family, "dtype": dtype, "rounds": rounds, "min_ms": min_ms}
        flags = {"quick": quick, "slow": slow, "sustained": sustained}
        return over_gpus(out, only=only, resume=resume, refused=[name for name, x in (given | flags).items() if x])
    from .runner import run as _run

    return _run(suites, family, out, quick, dtype, rounds, min_ms, only, slow, sustained, resume)


def plot(
    results: str | PathLike[str] | None = None, docs: str | PathLike[str] | None = None, quick: bool = False
) -> list[str]:
    """Draw the results as PNGs under `<docs>/plots` and write `<docs>/benchmarks.md`, `<docs>/papers.md` and the table
    in `<docs>/tutorial.md`.

    results and docs are `bench/results` and `docs` unless given; with quick both are `bench/quick`, where such runs
    are.
    Returns the files written.
    """
    from .pages import plot as _plot

    return _plot(results or ("bench/quick" if quick else "bench/results"), docs or ("bench/quick" if quick else "docs"))
