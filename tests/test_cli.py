"""The command line: its entrance, and the commands info, compile, tune and bench."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import typer
from reference import DTYPES

import cupyflash
from cupyflash import bench
from cupyflash.bench.__main__ import main as bench_main
from cupyflash.bench.suites import SUITES
from cupyflash.gpu import cache as disk
from cupyflash.gpu import compiler
from cupyflash.passes import BACKWARD, FORWARD
from cupyflash.pip_line import pip_line
from cupyflash.problem import ARRAYS, OPTIONS
from cupyflash.rules import describe
from cupyflash.tools import cli, precompile
from cupyflash.tools.command_options import value as command_value
from cupyflash.tools.precompile import Done, Job, jobs
from cupyflash.tools.tables import KernelLines

X = np.ones((1, 3, 2, 4), np.float32)
SHAPE = X.shape
Run = Callable[..., tuple[int, str, str]]


def problem_of(arrays: dict[str, np.ndarray], **options: object):
    from cupyflash.interop import numpy_

    return describe(*(numpy_.view(arrays[name]) for name in "qkv"), **options)


# ---- the entrance ---------------------------------------------------------------------------------------------------


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("demo", "attend", "explain", "info", "compile", "tune", "bench"):
        assert command in out


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_help_cuts_no_summary(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("--help")
    assert "..." not in out.partition("Commands:")[2] and max(map(len, out.splitlines())) <= columns
    assert "use the fastest from now on." in " ".join(out.split())
    for command in ("demo", "attend", "explain", "info", "compile", "tune", "bench"):
        _, out, _ = run(command, "--help")
        assert max(map(len, out.splitlines())) <= columns or columns < 80, command


def test_explain_fits_a_terminal(run: Run) -> None:
    """What kernels are compiled with is told where it is asked for."""
    asked = ("explain", "--shape", "2,8192,16,128", "--causal", "--arch", "sm_90a")
    for also in ((), ("--of", "backward")):
        _, out, _ = run(*asked, *also)
        assert "constants" not in out and max(map(len, out.splitlines())) <= 80
        _, told, _ = run(*asked, *also, "--verbose")
        extra = [line for line in told.splitlines() if line not in out.splitlines()]
        assert len(extra) == 1 and re.match(r"constants +DIM 128, .*STAGES 2", extra[0])
    found = cupyflash.explain((2, 8192, 16, 128), dtype="bf16", arch="sm_90a")
    assert "constants" not in str(found) and "constants" in dict(found.rows(verbose=True))


@pytest.mark.parametrize(
    ("missing", "module", "arguments"),
    [
        ("typer", "cupyflash", ["info"]),
        ("rich", "cupyflash", ["info"]),
        ("rich", "cupyflash.bench", ["cpu", "--quick"]),
        ("matplotlib", "cupyflash.bench", ["plot"]),
    ],
)
def test_missing_extra_is_a_message(missing: str, module: str, arguments: list[str]) -> None:
    code = (
        f"import runpy, sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {arguments}; "
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    said = f"cupyflash: this command needs {missing}, which is not installed; run {pip_line('demo')}\n"
    assert done.stderr == said


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cupyflash {cupyflash.__version__}\n", "")


@pytest.mark.parametrize("command", ["attend", "explain", "tune", "compile"])
def test_every_row_of_the_tables_is_an_option(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    for row in (*OPTIONS, *ARRAYS):
        if (
            getattr(row, "written", True)
            and not (command == "attend" and getattr(row, "of_gradients", False))
            and (command, row.name)
            != (
                "compile",
                "layout",
            )
        ):
            assert f"--{row.name.replace('_', '-')}" in out, row.name
    flags = [line for line in out.splitlines() if line.strip().startswith(("--causal", "--deterministic", "--version"))]
    assert not [line for line in flags if "<" in line or "BOOL" in line]  # they take no value


def test_a_new_row_needs_no_change_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option and an array that are not there yet become options of a command by their rows alone."""
    from cupyflash.problem import ArrayRule, OptionRule
    from cupyflash.tools import command_options

    def check(cap: object) -> object:
        if not isinstance(cap, float):
            raise TypeError(f"soft_cap is {cap!r}; it must be a number")
        return cap

    cap = OptionRule("soft_cap", None, "Scores are bent below it.", check)
    bias = ArrayRule("tint", ("batch", "head", "query", "key"), ("q",), "tint", "added to a score")
    monkeypatch.setattr(command_options, "OPTIONS", (*OPTIONS, cap))
    monkeypatch.setattr(command_options, "ARRAYS", (*ARRAYS, bias))
    app, calls = typer.Typer(), []

    @app.command()
    @command_options.asked(files=True)
    def command(options: dict[str, object], arrays: dict[str, Path]) -> None:
        calls.append((options, arrays))

    app(["--soft-cap", "3.5", "--tint", "b.npy", "--top-left", "--window", "4,"], standalone_mode=False)
    assert calls == [
        ({"causal": "top_left", "window": (4, None), "layout": "bshd", "soft_cap": 3.5}, {"tint": Path("b.npy")})
    ]
    with pytest.raises(TypeError, match="soft_cap is 'high'; it must be a number"):
        app(["--soft-cap", "high"], standalone_mode=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("-3,0", (-3, 0)), ("3,", (3, None)), (",3", (None, 3)), ("1e-3", 1e-3), ("bhsd", "bhsd"), ("", "")],
)
def test_values(text: str, value: object) -> None:
    assert command_value(text) == value


def test_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", "nonsense"], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "No such command 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_traceback_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["cupyflash", "explain", "--shape", "a"])
    with pytest.raises(ValueError, match="--shape is 'a'"):
        cli.main()


# ---- info, compile, bench -------------------------------------------------------------------------------------------


def test_info_with_nothing_there(run: Run, no_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("cuda", "cuda.core", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "none"))
    code, out, err = run("info")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "none can be used" in words and pip_line("cuda13") in words
    assert "no kernel can be compiled" in words
    for package in ("numpy", "ml-dtypes", "threadpoolctl"):  # what is installed with this one
        assert f"{metadata.version(package)} ({package})" in words
    assert "0 programs" in words
    assert "CUPYFLASH_DUMP not set (a folder to write source" in words
    assert not [line for line in out.splitlines() if line != line.rstrip()]  # nothing is padded


def test_info_tells_of_a_cache_that_is_not_used(run: Run, cache: Path) -> None:
    disk.write(b"key", b"value")
    (cache / "cupyflash-programs").chmod(0o777)
    if sys.platform != "win32":
        assert "are not used, since other users can write there" in run("info")[1]


def test_compile_fills_the_cache(run: Run, cache: Path) -> None:
    only = ("--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--causal", "--of", "forward")
    code, out, err = run("compile", *only)
    assert (code, err) == (0, "")
    assert "sm80" in out and "forward" in out and "4 programs" in out  # of few queries, of many, and in portions, too
    assert not [line for line in out.splitlines() if line != line.rstrip() or not line]
    assert "cached" not in out
    assert disk.cache_info().entries == 4
    compiler.compile_source.cache_clear()  # as in a new process
    code, out, _ = run("compile", *only)
    assert code == 0 and "cached" in out


def test_caches_of_8_bits_are_told_and_compiled(run: Run, cache: Path, no_gpu: None) -> None:
    """With a scale for each row, or none; in pages too. Of no other dtype, and no gradients."""
    shapes = ("--shape", "4,1,32,128", "--kv-shape", "4,8192,8,128", "--arch", "sm_90a")
    scales = ("--k-descale", "--v-descale")
    for more in ((), scales, (*scales, "--seqlens-k")):
        code, out, err = run("explain", *shapes, "--kv-dtype", "int8", *more)
        assert (code, err) == (0, "") and "4 x 8192 x 8 x 128 int8" in out and "sm80" in out
    pages = (*shapes[:2], "--kv-shape", "256,16,8,128", *shapes[4:], "--seqlens-k", "--page-table", *scales)
    assert "256 x 16 x 8 x 128 float8_e4m3fn" in run("explain", *pages, "--kv-dtype", "fp8")[1]
    only = ("--arch", "sm_80", "--head-dim", "64", "--causal", "--kv-dtype", "int8", *scales)
    code, out, err = run("compile", *only, "--dtype", "bf16")
    assert (code, err) == (0, "") and "forward" in out and "backward" not in out
    assert {job.problem.cache_dtype for job in jobs(["sm_80"], ["fp16"], [64], kv_dtype="int8")} == {"int8"}
    assert "float8_e4m3fn or int8" in run("explain", *shapes, "--kv-dtype", "bf16")[2]
    assert "q of float16 or bfloat16" in run("explain", *shapes, "--kv-dtype", "int8", "--dtype", "fp32")[2]
    assert "forward alone" in run("explain", *shapes, "--kv-dtype", "int8", "--of", "backward")[2]


def test_compiled_kernels_are_told_in_80_columns() -> None:
    """In lines that stand under their headings."""
    work = jobs(["sm_90a"])
    lines = KernelLines(work)
    told = [lines.heading]
    for job in work:
        found = {x.name: compiler.Resources(255, 1000, 1000, 0, 0) for x in job.plan.launches}
        told += lines.of(Done(job, 12.34, compiler.Compiled("sm_90a", b"", "", found, False)))
        told += lines.of(Done(job, 12.34, None, RuntimeError("refused")))
    assert len(told) == 1 + 2 * sum(len(job.plan.launches) for job in work)
    assert max(map(len, told)) <= 80 and all(x == x.rstrip() and "\n" not in x for x in told)
    for heading, cell in (("registers", "255"), ("spilled", "2000"), ("seconds", "12.34")):
        end = told[0].index(heading) + len(heading)
        assert {x[:end][-len(cell) :] for x in told[1:] if cell in x} == {cell}


def test_compiled_kernels_are_told_as_they_come(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe too: what is there is told before the next program is."""
    seen = []

    def slow(work: list[Job]) -> Iterator[Done]:
        for job in work:
            seen.append(capsys.readouterr().out)
            found = {x.name: compiler.Resources(40, 0, 0, 0, 0) for x in job.plan.launches}
            yield Done(job, 1.0, compiler.Compiled("sm_80", b"", "", found, True))

    monkeypatch.setattr(precompile, "compile_all", slow)
    code, out, _ = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward", "--full")
    assert code == 0 and out.count("\n") > 1
    first, second, *_ = seen
    assert first.startswith("3 programs to compile or to find in the cache, on ") and first.count("\n") == 1
    heading, told, *_ = second.splitlines()
    assert "registers" in heading and "float32" in told and "sm_80" in told


def test_compile_that_keeps_nothing_fails(run: Run, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    code, out, err = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward")
    assert code == 2 and "registers" not in out
    assert f"nothing can be kept in the cache folder {cache}" in err and err.count("\n") == 1


def test_compile_without_nvrtc_has_no_table(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, arch: str) -> None:
        raise ImportError("compiling kernels needs NVRTC, which cannot be loaded")

    monkeypatch.setattr(compiler, "compile_uncached", missing)
    code, out, err = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward")
    assert code == 2 and "needs NVRTC" in err and err.count("\n") == 1
    assert out.count("\n") == 1 and "registers" not in out


def test_compiled_is_what_a_call_needs(cache: Path) -> None:
    """The kernels of `compile` are those of a real call: training, a prompt, a late part of one, a token."""
    from cupyflash.gpu.device import Arch
    from cupyflash.gpu.plan import plan
    from cupyflash.gpu.source import generate

    ready = {generate(job.plan) for job in jobs(["sm_90a"])}
    for dtype, dim in (("float16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 64), ("float64", 128)):
        for causal in (False, True):
            arrays = {name: np.empty((8, 1000, 16, dim), DTYPES[dtype]) for name in "qkv"}
            problem = problem_of(arrays, causal=causal)
            for of in (FORWARD, BACKWARD):
                assert generate(plan(problem, Arch.of("sm_90a"), of)) in ready, (dtype, dim, causal, of)
            for length, heads, heads_k in ((1, 32, 8), (1, 32, 32), (512, 8, 8)):
                shapes = {"q": (1, length, heads, dim), "k": (1, 9000, heads_k, dim), "v": (1, 9000, heads_k, dim)}
                problem = problem_of(
                    {name: np.empty(shape, DTYPES[dtype]) for name, shape in shapes.items()}, causal=causal
                )
                assert generate(plan(problem, Arch.of("sm_90a"))) in ready, (dtype, dim, causal, length, heads_k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_42"], "arch is 'sm_42'"),
        (["--arch", "sm_80", "--of", "jvp"], "of is 'jvp'; it must be one of 'forward', 'backward'"),
        (["--arch", "sm_80", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["--arch", "sm_80", "--family", "sm1"], "family is 'sm1'"),
        (["--arch", "sm_75", "--family", "sm80", "--dtype", "fp16"], "needs compute capability 8.0"),
    ],
)
def test_compile_errors(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("compile", *arguments)
    assert code == 2
    assert message in err and err.count("\n") == 1


def test_compile_tells_of_a_refused_source(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu import programs

    monkeypatch.setattr(programs, "generate", lambda plan: "this is no CUDA")
    code, out, _ = run("compile", "--arch", "sm_80", "--dtype", "fp32", "--head-dim", "64", "--of", "forward", "--full")
    assert code == 1
    assert "failed" in out and "cannot compile for sm_80" in out


def test_tune_prints_every_tile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.gpu.device import Arch
    from cupyflash.problem import AttentionProblem
    from cupyflash.tools.autotune import Tuning, candidates

    asked = AttentionProblem("bfloat16", 2, 512, 512, 4, 4, 64, 64, 0.125)
    own, best, wrong, *_ = candidates(asked, Arch.of("sm_80"), FORWARD, "sm80")
    own, best = replace(own, seconds=2e-3), replace(best, seconds=1e-3)
    wrong = replace(wrong, note="wrong: differs by 1.0e+00")
    calls = []

    def tune(*shapes: object, **options: object) -> Tuning:
        calls.append((shapes, options))
        options["progress"]("time", 1, 2)
        return Tuning(asked, "forward", "sm80", (own, best, wrong), best, "/there/tuning.json")

    monkeypatch.setattr(cupyflash, "tune", tune)
    code, out, err = run("tune", "--shape", "2,512,4,64", "--causal", "--key-mask", "--dry-run", "--family", "sm80")
    assert (code, err) == (0, "")
    ((shapes, options),) = calls
    assert shapes == ((2, 512, 4, 64),) * 3 and options["key_mask"] == (2, 512) and options["dtype"] == "bfloat16"
    assert options["causal"] is True and options["family"] == "sm80" and options["store"] is False
    for text in ("2.000x", "the table's own", "wrong: differs", "2.000 times as fast", "/there/tuning.json", "keys"):
        assert text in out
    assert out.index("2.000x") < out.index("the table's own") < out.index("wrong: differs")


def test_tune_export(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cupyflash.gpu import tuned
    from cupyflash.gpu.device import Arch

    monkeypatch.setenv("CUPYFLASH_CONFIG_DIR", str(tmp_path))
    tuned.stored.cache_clear()
    code, out, err = run("tune", "--export")
    assert (code, out) == (2, "") and "tuning.json holds nothing" in err
    problem = problem_of({name: np.empty((1, 100, 2, 64), np.float16) for name in "qkv"})
    tuned.replace([tuned.entry(problem, Arch.of("sm_80"), "sm80", FORWARD, (64, 64, 4, 1, 2, 2))], [])
    code, out, _ = run("tune", "--export")
    tuned.stored.cache_clear()
    assert code == 0 and out.splitlines()[1].startswith("Tile(rows=64, keys=64, ")


def test_tune_errors(run: Run, no_gpu: None) -> None:
    code, out, err = run("tune")
    assert (code, out) == (2, "") and "--shape is missing" in err
    code, out, err = run("tune", "--shape", "2,512,4,64")
    assert (code, out) == (2, "") and "arrays on a GPU need CuPy" in err and err.count("\n") == 1


def test_bench_is_handed_over(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(bench, "run", lambda *given: calls.append(given) or 1)
    few = ("--rounds", 2, "--min-ms", 1.5)
    code, _, err = run("bench", "fp32", "host", "--family", "simt", "--quick", "--out", tmp_path, "--dtype=fp16", *few)
    assert (code, err) == (1, "")
    assert calls == [(["fp32", "host"], "simt", tmp_path, True, "float16", 2, 1.5, (), False, False, False)]
    assert run("bench", "scores", "--only", "bias", "--only=mask", "--slow")[0] == 1
    assert calls[1] == (["scores"], None, None, False, None, None, None, ["bias", "mask"], True, False, False)
    assert run("bench", "models", "--sustained")[0] == 1
    assert calls[2] == (["models"], None, None, False, None, None, None, (), False, True, False)
    assert run("bench", "models", "--resume")[0] == 1
    assert calls[3] == (["models"], None, None, False, None, None, None, (), False, False, True)


def test_bench_plot_draws_what_quick_wrote(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    suite = SUITES["cpu"]
    monkeypatch.setitem(SUITES, "cpu", suite._replace(problems=lambda options: suite.problems(options)[:2]))
    assert bench.run(["cpu"], quick=True, rounds=1, min_ms=1) == 0
    code, _, err = run("bench", "plot")
    assert code == 2 and "`cupyflash bench plot --quick` draws" in err
    picture = Path("bench", "quick", "plots", "cpu_cpu.png")
    for plotted in (
        lambda: run("bench", "plot", "--quick")[:2],
        lambda: (bench_main(["plot", "--quick"]), str(picture)),
    ):
        code, printed = plotted()
        assert code == 0 and str(picture) in printed and picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
    assert not Path("docs").exists()


def test_bench_of_an_unknown_suite(run: Run) -> None:
    code, out, err = run("bench", "speed")
    assert code == 2
    assert "'speed'" in out + err
