"""The commands: what they take, what they print. The work is done elsewhere; each imports what it needs when it
runs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .. import __version__
from ..passes import BACKWARD, FORWARD, pass_named
from ..problem import HALVES, float_name
from .command_options import asked, flag
from .console import Console
from .tables import KernelLines, pairs, say, show, tuning_table


class Group(typer.core.TyperGroup):
    """Commands whose summaries are told whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write them."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, x.get_short_help_str(limit=1000)) for name, x in commands if x is not None])


app = typer.Typer(
    cls=Group,
    help="Exact attention, forward and backward, for any array library, on CPU and GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DType = Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64, fp8 or their long names.")]
KvShape = Annotated[str | None, typer.Option(help="Of k and v. Default: that of q.")]
VShape = Annotated[str | None, typer.Option(help="Of v, where its last dimension is not that of k.")]
KvDType = Annotated[str | None, typer.Option(help="int8 or fp8: k and v have 8 bits beside q of 16.")]
Sequences = Annotated[
    int | None, typer.Option(min=1, help="How many there are, where --cu-seqlens-q packs them. Default 1.")
]
Device = Annotated[str | None, typer.Option(help="cpu or gpu. Default: the GPU where one can be used.")]
Family = Annotated[str | None, typer.Option(help="Take this kernel family instead of the fastest.")]


def _version(asked_for: bool) -> None:
    if asked_for:
        say(f"cupyflash {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Exact attention, forward and backward, for any array library, on CPU and GPU."""


@app.command()
def demo(
    train: Annotated[bool, typer.Option("--train", help="Then train a language model, in about a minute.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="With --train: stop after so many steps.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="With --train: for so long. Default 55 (GPU: 40).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture.")] = Path("cupyflash-demo.png"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = None,
) -> None:
    """Time and memory beside plain attention, gradients beside float64, and a picture of it; all in 15 seconds."""
    from ..arrays import array_module
    from ..demo.screen import run
    from ..demo.training import recipe
    from .files import writable

    for name, value in (("--steps", steps), ("--seconds", seconds)):
        if value is not None and not train:
            raise ValueError(f"{name} is {value:g}; it goes with --train")
    if output.suffix.lower() != ".png" or os.path.isdir(output) or not os.path.isdir(output.absolute().parent):
        raise ValueError(f"--output is {output}; it must be a .png file in a folder that exists")
    if not writable(output):
        raise ValueError(f"--output is {output}, which cannot be written")  # said now, not after the training
    xp = array_module(device)
    how = recipe(xp, steps, seconds, seed) if train else None
    if not run(xp, how, output, Console(highlight=False), seed):
        raise typer.Exit(1)


@app.command()
@asked(files=True, of=FORWARD)
def attend(
    options: dict[str, Any],
    arrays: dict[str, Path],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write out (.npy, .npz, .safetensors).")],
    file: Annotated[
        Path | None, typer.Option("--input", "-i", help="A file with arrays named q, k, v (and what else is taken).")
    ] = None,
    q: Annotated[Path | None, typer.Option("--q", help="Queries.")] = None,
    k: Annotated[Path | None, typer.Option("--k", help="Keys.")] = None,
    v: Annotated[Path | None, typer.Option("--v", help="Values.")] = None,
    score_array: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="An array that --score reads; may be given several times."),
    ] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Also write lse, the log-sum-exp of each row.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output where it exists.")] = False,
    device: Device = None,
    family: Family = None,
) -> None:
    """Attention of arrays in files (.npy, .npz, .safetensors), written to a file."""
    from .. import attention
    from ..arrays import array_module, on_host
    from . import files

    suffix = files.suffix(output)
    if lse and suffix == ".npy":
        raise ValueError(f"--output is {output}; with --lse there are two arrays: write .npz or .safetensors")
    if not files.writable(output):  # said now, not after the work
        raise ValueError(f"--output is {output}; it must be a file in a folder that exists and can be written")
    single = {"q": q, "k": k, "v": v, **arrays}
    read = _score_arrays(options.get("score", ""), score_array or [])
    for name, path in [("input", file), *single.items(), *(("score_array", path) for path in read.values())]:
        if path is not None and path.exists() and output.exists() and output.samefile(path):
            raise ValueError(f"--output is {output}, the file that {flag(name)} reads; it must be another")
    if output.exists() and not overwrite:
        raise ValueError(f"--output is {output}, which exists; --overwrite replaces it")
    # A number given as --seed is there in place of the array of --input.
    read_from = _read(file, single, "qk" if options.get("latent") is not None else "qkv")
    inputs = {name: x for name, x in read_from.items() if name not in options}
    if options.get("dropout") and "seed" not in {**inputs, **options}:
        raise ValueError(
            f"--dropout is {options['dropout']}, but there is no seed; give --seed, a whole number or a file of one"
        )
    held = {name: _array("--score-array", name, path) for name, path in read.items()}
    xp = array_module(device)
    start = time.perf_counter()
    given, of_score = ({name: xp.asarray(x) for name, x in group.items()} for group in (inputs, held))
    out, rows = attention(**given, **options, score_arrays=of_score, return_lse=True, family=family)
    results = {"out": on_host(out), **({"lse": on_host(rows)} if lse else {})}
    seconds = time.perf_counter() - start
    files.write(output, results)
    for name, x in (*inputs.items(), *held.items(), *results.items()):
        say(f"{name:<8} {'x'.join(map(str, x.shape))} {x.dtype}")
    say(f"{seconds:.3g} s with {xp.__name__}, written to {output}")
    kept = results["out"].dtype
    if kept.kind == "V" and suffix != ".safetensors":  # of ml_dtypes
        size = {1: "one byte", 2: "two bytes"}[kept.itemsize]
        say(f"note: {suffix} has no {kept}; others read {size} of no type there (.safetensors keeps it)")


@app.command()
@asked()
def explain(
    options: dict[str, Any],
    arrays: tuple[str, ...],
    shape: Annotated[str, typer.Option(help="Of q, as in 2,8192,16,128.")],
    dtype: DType = "bfloat16",
    kv_dtype: KvDType = None,
    kv_shape: KvShape = None,
    v_shape: VShape = None,
    sequences: Sequences = None,
    arch: Annotated[str | None, typer.Option(help="Plan for sm_80, sm_90a, ...; no GPU is needed.")] = None,
    of: Annotated[
        str | None,
        typer.Option(help="forward, backward, jvp or backward_jvp. Default: forward, with --tangents jvp."),
    ] = None,
    tangents: Annotated[str | None, typer.Option(help="The arrays that move, as in q,k,v.")] = None,
    family: Family = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also the constants that kernels are compiled with.")
    ] = False,
) -> None:
    """Tell how a call would run: kernels, registers, shared memory, FLOPs, bytes, workspace, copies, fall backs."""
    from .. import explain as _explain

    (q, k, v), others = _shapes(shape, kv_shape, v_shape, arrays, options, sequences, kv_dtype is not None)
    moved = tuple(tangents.split(",")) if tangents is not None else ()
    how: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "arch": arch, "of": of, "family": family}
    told = _explain(q, k, v, **others, **options, **how, tangents=moved)
    pairs(told.rows(verbose))


@app.command()
def info() -> None:
    """Tell which GPU, driver, libraries and cache this machine has, and what is missing."""
    from .info import facts

    pairs(facts())


@app.command("compile")
@asked(without=("causal", "layout"))
def compile_(
    options: dict[str, Any],
    arrays: tuple[str, ...],
    arch: Annotated[list[str], typer.Option(help="sm_80, sm_90a, ...; may be given several times.")],
    dtype: Annotated[list[str] | None, typer.Option(help="Default: all but fp8.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(min=1, help="Default: 64, 128 and, up to 16 bits, 256.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Default: both.")] = None,
    of: Annotated[str | None, typer.Option(help="forward or backward. Default: both.")] = None,
    family: Family = None,
    kv_dtype: KvDType = None,
) -> None:
    """Fill the cache with compiled kernels; no GPU is needed, so a container can be built with them.

    Every user whom the umask lets read the cache (with 022: all) finds them there, where CUPYFLASH_CACHE_DIR is the
    same.
    """
    from ..gpu.cache import cache_info
    from .precompile import HEAD_DIMS, Done, compile_all, jobs, kept

    both, both_passes = (False, True), (FORWARD, BACKWARD)
    usual = tuple(HEAD_DIMS if kv_dtype is None else HALVES)
    work = jobs(
        arch, dtype or usual, head_dim or (), both if causal is None else (causal,),
        both_passes if of is None else (pass_named(of, both_passes),), arrays, family, kv_dtype, **options,
    )  # fmt: skip
    console = Console(highlight=False)
    lines = KernelLines(work)
    done: list[Done] = []
    checked = False
    say(f"{len(work)} programs to compile or to find in the cache, on {os.cpu_count()} cores")
    columns = (BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("programs", total=len(work))
        for result in compile_all(work):
            if not checked and result.compiled is not None and not result.compiled.cached:
                checked = True  # the first one tells, before minutes are spent on the others
                if not kept(result):
                    raise RuntimeError(
                        f"nothing can be kept in the cache folder {cache_info().path}; it must be a folder that can be "
                        "written, with room on its disk (CUPYFLASH_CACHE_DIR names another)"
                    )
            for line in ([] if done else [lines.heading]) + lines.of(result):
                if console.is_terminal:  # above the bar
                    progress.console.print(Text(line), soft_wrap=True)
                else:
                    say(line)
            done.append(result)
            progress.advance(bar)
    errors = [result for result in done if result.error is not None]
    for result in errors:
        console.print(Text(str(result.error)), style="red", soft_wrap=True)
    cache = cache_info()
    say(f"{cache.path}: {cache.entries} programs, {cache.bytes / 2**20:.1f} MiB")
    if errors:
        raise typer.Exit(1)


@app.command()
@asked()
def tune(
    options: dict[str, Any],
    arrays: tuple[str, ...],
    shape: Annotated[str | None, typer.Option(help="Of q, as in 2,8192,16,128.")] = None,
    dtype: DType = "bfloat16",
    kv_shape: KvShape = None,
    v_shape: VShape = None,
    sequences: Sequences = None,
    of: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    family: Family = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each tile is timed.")] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing.")] = False,
    export: Annotated[bool, typer.Option("--export", help="Print what is stored as rows for the tables.")] = False,
) -> None:
    """Time the tiles that a problem's kernels could have on this GPU, and use the fastest from now on."""
    from .. import tune as _tune
    from ..gpu import tuned

    if export:
        from .autotune import export as lines

        found = tuned.stored()
        if not found.entries:
            raise ValueError(found.note or f"{tuned.path()} holds nothing; cupyflash tune --shape ... fills it")
        for line in lines(found.entries):
            say(line)
        return
    if shape is None:
        raise ValueError("--shape is missing; it is the shape of q, as in --shape 2,8192,16,128")
    (q, k, v), others = _shapes(shape, kv_shape, v_shape, arrays, options, sequences)
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("compile", total=None)
        result = _tune(
            q, k, v, **others, **options, dtype=dtype, of=of, family=family,
            rounds=rounds, store=not dry_run,
            progress=lambda what, done, total: progress.update(bar, description=what, completed=done, total=total),
        )  # fmt: skip
    show(tuning_table(result))
    if result.best is result.trials[0]:
        say("the table's own tile is the fastest, or as fast")
    else:
        say(f"{result.gain:.3f} times as fast as the table's own tile")
    if result.path is not None:
        say(f"written to {result.path}")


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="forward, backward, host, jax, jit, import, memory, fp32, fp8, figures, training, gpt, ladder, "
            "scores, models, precision, derivatives, decode, varlen, paged, latent, cpu; parallel: alone, over all "
            "GPUs; paper: what the papers report; all; plot draws the results."
        ),
    ] = None,
    family: Family = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the JSON files. Default bench/results/<gpu>, of quick and only bench/quick/<gpu>."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="For the suites forward, backward, figures, memory, scores, models, jax. Default: bfloat16. For fp32, "
            "cpu: one of their two."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer problems, rounds and milliseconds; files go to bench/quick.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Samples of each candidate. Default 7, quick 3, sustained 2.")
    ] = None,
    min_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Least duration of a sample. Default 20, quick 5.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Suites scores, models, derivatives, decode, varlen, paged, latent, parallel: this row, or all whose "
            "names begin so. May be repeated."
        ),
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Suite scores: the slow peers too.")] = False,
    sustained: Annotated[
        bool,
        typer.Option(
            "--sustained", help="Suites forward, backward, models: a second of everybody on end, with clock and watts."
        ),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows that the file has, and measure the others.")
    ] = False,
) -> None:
    """Measure beside every other attention that can be imported, in turn in the same run."""
    from ..bench import plot, run

    if suites == ["plot"]:
        for path in plot(quick=quick):
            say(path)
        return
    asked = suites or ("forward", "backward")
    raise typer.Exit(
        run(asked, family, out, quick, float_name(dtype), rounds, min_ms, only or (), slow, sustained, resume)
    )


def _read(file: Path | None, single: dict[str, Path | None], required: str) -> dict[str, Any]:
    """The arrays from one file or from single files; an optional array in a file of its own goes with either."""
    from ..problem import ARRAYS
    from . import files

    arrays: dict[str, Any] = {}
    held: list[str] = []
    if file is not None:
        for name in ("q", "k", "v"):
            if single[name] is not None:
                raise ValueError(f"--input is {file} and --{name} is {single[name]}; give --q, --k and --v, or --input")
        held = files.names(file)
        arrays = files.read(file, ["q", "k", "v", *(row.name for row in ARRAYS if not single.get(row.name))])
    for name, path in single.items():
        if path is not None:
            arrays[name] = _array(flag(name), name, path)
    missing = [name for name in required if name not in arrays]
    if missing:
        where = f" in {file}, which holds {_some(held)}" if file is not None else ""
        raise ValueError(f"no {' and no '.join(missing)}{where}; give --q, --k and --v, or --input with all three")
    return arrays


def _array(option: str, name: str, path: Path) -> Any:
    """The array of this name in a file, or the only one there."""
    from . import files

    try:
        own = files.names(path)
        if name not in own and len(own) != 1:
            raise ValueError(f"{path} holds {_some(own)}, but no {name}")
        chosen = name if name in own else own[0]
        return files.read(path, [chosen])[chosen]
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error


def _score_arrays(score: str, given: list[str]) -> dict[str, Path]:
    """The files of the arrays that a score reads, by name, from NAME=FILE for each."""
    from ..score.expression import parse
    from ..score.graph import Graph, ScoreArray

    reads = sorted(set(re.findall(r"([A-Za-z_]\w*)\s*\[", score)))  # only arrays have an index
    if score and not reads:  # perhaps as it is no expression
        parse(score, Graph(), tuple(ScoreArray(text.partition("=")[0], "float32", 0) for text in given))
    paths: dict[str, Path] = {}
    for text in given:
        name, _, path = text.partition("=")
        if name not in reads or name in paths or not path:
            raise ValueError(
                f"--score-array is {text!r}; it must be NAME=FILE, once for each array that --score reads as "
                f"NAME[...]: {_some(reads)}"
            )
        paths[name] = Path(path)
    for name in reads:
        if name not in paths:
            raise ValueError(f"--score reads {name}, which is not given; give --score-array {name}=FILE")
    return paths


def _some(names: list[str]) -> str:
    """Names of arrays in a sentence, which a file may have thousands of."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    shown = (name if name.isprintable() else ascii(name) for name in names[:10])  # one with a line break, too
    return ", ".join(shown) + more if names else "no array"


Shape = tuple[int, ...]


def _shape(name: str, text: str) -> Shape:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not 2 <= len(shape) <= 4:
        raise ValueError(f"{name} is {text!r}; it must be 2 to 4 integers, as in 2,8192,16,128")
    return shape


def _shapes(
    shape: str,
    kv_shape: str | None,
    v_shape: str | None,
    arrays: tuple[str, ...],
    options: dict[str, Any],
    sequences: int | None,
    eight: bool = False,
) -> tuple[tuple[Shape, Shape, Shape | None], dict[str, Any]]:
    """Shapes of q, k, v (None: in k), and of the optional arrays that are to be there."""
    from .shapes import of_arrays

    q = _shape("--shape", shape)
    k = q if kv_shape is None else _shape("--kv-shape", kv_shape)
    v = k if v_shape is None else _shape("--v-shape", v_shape)
    found = {}
    if arrays or sequences is not None:
        found = of_arrays(arrays, q, k, v, options["layout"], sequences, eight)
    return (q, k, None if v_shape is None and options.get("latent") is not None else v), found
