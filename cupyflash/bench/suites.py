"""What each suite measures: a list of problems, and a function that measures one of them for everybody."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math

from ..gpu.plan import KernelPlan, plan
from ..passes import BACKWARD, FORWARD, PASSES, Pass
from ..problem import AttentionProblem
from ..tools.timing import gpu_sampler, interleave, reason
from . import derivatives, eight, first_call, host, jitted, models, numpy_path, peers, precision, scores, serving, steps
from .suite import Measured, Options, Problem, Suite, case_of, compare, flops_of, importable, take_turns

DENSE = ("math", "standard")  # peers that build the S x S matrix


def _taking(problem: Problem, names: tuple[str, ...], longest: int) -> tuple[dict[str, peers.Prepare], dict[str, str]]:
    """The peers for a problem, without those whose S x S matrix is longer than `longest` or has no room."""
    import torch

    itemsize = 8 if problem["dtype"] == "float64" else 4
    # The matrix, its gradient and the copies that PyTorch's math backend makes.
    need = 6 * problem["batch"] * problem["heads"] * problem["seq"] ** 2 * itemsize
    fits = problem["seq"] <= longest and need < torch.cuda.mem_get_info()[0] // 2
    found = importable(names)
    notes = {name: "left out: the S x S matrix is too large" for name in found if name in DENSE and not fits}
    return {name: peer for name, peer in found.items() if name not in notes}, notes


def _speed(
    names: tuple[str, ...], longest: int, problem: Problem, options: Options, patience: float = math.inf
) -> Measured:
    """TFLOP/s of ours and the peers on the GPU, taken in turn; `patience` as in `gpu_sampler`."""
    prepares, left_out = _taking(problem, names, longest)
    prepares["ours"] = peers.ours(options.family)
    of = PASSES[problem["pass"]]
    candidates, notes = compare(prepares, case_of(problem), of)
    seconds, more = take_turns(candidates, options, patience)
    work = flops_of(problem, of) / 1e12
    return {name: work / t for name, t in seconds.items()}, left_out | notes | more


# --- forward, backward: the papers' grid --------------------------------------------------------------------------


def _grid(direction: str, options: Options) -> list[Problem]:
    tokens, hidden = 16384, 2048
    lengths = (1024, 8192) if options.quick else (512, 1024, 2048, 4096, 8192, 16384)
    return [
        {"pass": direction, "dtype": options.dtype, "dim": dim, "causal": causal, "seq": seq,
         "batch": tokens // seq, "heads": hidden // dim}
        for dim, causal, seq in itertools.product((64, 128, 256), (False, True), lengths)
    ]  # fmt: skip


GRID_PEERS = ("fa2", "cudnn", "fa3", "fa4", "efficient", "math")
_grid_speed = functools.partial(_speed, GRID_PEERS, 4096)


# --- figures: FlashAttention-2's Figures 4 to 7 -------------------------------------------------------------------


def _figures(options: Options) -> list[Problem]:
    """Both passes; the page computes the figures' third kind, forward and backward, from the two."""
    grids = [_grid(direction, options) for direction in ("forward", "backward")]
    return [problem for grid in grids for problem in grid if problem["dim"] <= 128]


FIGURE_PEERS = ("fa2", "cudnn", "fa3", "sm80", "flash1", "math")
# FlashAttention-1 has as many thread blocks as there are heads and takes seconds where those are few and long.
_figure_speed = functools.partial(_speed, FIGURE_PEERS, 16384, patience=0.1)


# --- fp32: the dtypes of scientific arrays ------------------------------------------------------------------------


def _wide(options: Options) -> list[Problem]:
    tokens, hidden = 8192, 1024
    lengths = (2048,) if options.quick else (512, 2048, 8192)
    passes = ("forward", "backward")
    dtypes = (options.dtype,) if options.dtype in ("float32", "float64") else ("float32", "float64")
    biased = {"dtype": "float32", "dim": 32, "causal": False, "bias": True, "seq": 256, "batch": 256, "heads": 4}
    rows = [
        {"pass": direction, "dtype": dtype, "dim": dim, "causal": causal, "bias": False, "seq": seq,
         "batch": tokens // seq, "heads": hidden // dim}
        for direction, dtype, dim, causal, seq in itertools.product(passes, dtypes, (64, 128), (False, True), lengths)
    ] + [{"pass": direction, **biased} for direction in passes if "float32" in dtypes]  # fmt: skip
    return rows if options.family is None else [row for row in rows if _taken(row, options.family)]


def _taken(problem: Problem, family: str) -> bool:
    """Whether a kernel family takes a problem on this GPU: sm80 has no float64."""
    from ..gpu.device import current

    seq, heads, dim = (problem[key] for key in ("seq", "heads", "dim"))
    asked = AttentionProblem(problem["dtype"], problem["batch"], seq, seq, heads, heads, dim, dim, dim**-0.5)
    try:
        plan(asked, current(0), PASSES[problem["pass"]], family=family)
    except ValueError:
        return False
    return True


WIDE_PEERS = ("math", "efficient", "cudnn", "standard")
BIAS_PEERS = ("math", "efficient")  # those that give a bias' gradient


def _wide_speed(problem: Problem, options: Options) -> Measured:
    """As any; a row with a bias is an Evoformer's, `evoformer` of the suite `scores`: with its gradient and a
    key mask."""
    if not problem["bias"]:
        return _speed(WIDE_PEERS, 8192, problem, options)
    of = PASSES[problem["pass"]]
    case = scores.draw({**problem, "scores": "evoformer"})
    prepares = {**importable(BIAS_PEERS), "ours": peers.ours(options.family)}
    candidates, notes = compare(prepares, case, of, scores.exact(case, of))
    seconds, failures = take_turns(candidates, options)
    work = flops_of(problem, of) * scores.left(case) / 1e12
    return {name: work / t for name, t in seconds.items()}, notes | failures


# --- jit: how long the first call takes ---------------------------------------------------------------------------


def _jit(options: Options) -> list[Problem]:
    return [
        {"start": start, "pass": direction, **first_call.PROBLEM}
        for start, direction in itertools.product(("cold", "disk cache"), ("forward", "backward"))
    ]


def _jit_time(problem: Problem, options: Options) -> Measured:
    repeats = 1 if options.quick else min(3, options.rounds)
    values: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, family in (("ours", options.family), ("flex", None)):
        times = first_call.measure(name, family, repeats)
        if isinstance(times, str):  # torch.compile needs a C compiler on the machine, among other things
            notes[name] = times
        else:
            values[name] = times[problem["start"]][problem["pass"]]
    return values, notes


# --- import: in a new process, what does it cost to have us ---------------------------------------------------------


def _imports(options: Options) -> list[Problem]:
    return [{"statement": statement, "stands on": beside} for statement, beside in first_call.IMPORTS.items()]


def _import_time(problem: Problem, options: Options) -> Measured:
    """Seconds; each process finds the files in the machine's memory. Our note names the array libraries that came
    along."""
    came: list[str] = []

    def sample(name: str) -> float:
        seconds, libraries = first_call.import_time(problem["statement" if name == "ours" else "stands on"])
        came[:] = libraries if name == "ours" else came
        return seconds

    for name in ("alone", "ours"):
        with contextlib.suppress(Exception):  # told below
            sample(name)
    values, notes = interleave(["alone", "ours"], options.rounds, sample)
    return values, {"ours": "with " + (", ".join(came) or "no array library")} | notes


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(options: Options) -> list[Problem]:
    lengths = (1024, 8192) if options.quick else (512, 1024, 2048, 4096, 8192, 16384, 32768)
    fixed = {"dtype": options.dtype, "batch": 1, "heads": 16, "dim": 128, "causal": False}
    return [
        {"pass": direction, "seq": seq, **fixed}
        for direction, seq in itertools.product(("forward", "forward and backward"), lengths)
    ]


MEMORY_PEERS = ("fa2", "efficient", "cudnn", "math")


def _memory_peak(problem: Problem, options: Options) -> Measured:
    """Megabytes at the peak, beyond inputs and results."""
    prepares, notes = _taking(problem, MEMORY_PEERS, problem["seq"])
    prepares["ours"] = peers.ours(options.family)
    of = FORWARD if problem["pass"] == "forward" else BACKWARD
    case, small = case_of(problem), case_of({**problem, "seq": 256})
    values: dict[str, float] = {}
    for name, prepare in prepares.items():
        try:
            _peak(prepare, small, of)  # cuBLAS and cuDNN keep the workspaces of their first call
            values[name] = _peak(prepare, case, of) / 1e6
        except Exception as failure:  # noqa: BLE001 - as in compare
            notes[name] = reason(failure)
    return values, notes


def _peak(prepare: peers.Prepare, case: peers.Case, of: Pass) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    candidate = prepare(case, of)
    with candidate.context():
        results = candidate.call()
    torch.cuda.synchronize()
    kept = sum(x.nbytes for x in results)
    if of is BACKWARD:
        kept += case.q.nbytes  # out, which the backward holds as well
    return int(torch.cuda.max_memory_allocated()) - before - kept


# --- ladder: from the formula to the planner's choice, on one problem ----------------------------------------------


def _ladder(options: Options) -> list[Problem]:
    fixed = {"dtype": "float16", "batch": 4, "heads": 16, "dim": 64, "causal": False}
    fixed["seq"] = 1024 if options.quick else 4096
    return [
        {"pass": direction, "unit": unit, **fixed}
        for direction, unit in (("forward", "ms"), ("backward", "ms"), ("forward", "GB"))
    ]


LADDER = ("standard", "flash1", "simt", "sm80")


def _ladder_rung(problem: Problem, options: Options) -> Measured:
    """Milliseconds of each rung; or the gigabytes that it moves, which follow from its tiles."""
    if problem["unit"] == "GB":
        return _moved(problem, options.family)
    prepares = {name: peers.standard if name == "standard" else peers.ours(name) for name in LADDER}
    prepares["ours"] = peers.ours(options.family)
    candidates, notes = compare(prepares, case_of(problem), PASSES[problem["pass"]])
    seconds, failures = interleave(list(candidates), options.rounds, gpu_sampler(candidates, options.min_ms))
    return {name: 1e3 * t for name, t in seconds.items()}, notes | failures


def _moved(problem: Problem, family: str | None) -> Measured:
    """What the kernels of each rung ask of memory and its cache in a forward; notes tell ours' family."""
    from ..gpu.device import current

    shape = (problem["batch"], problem["seq"], problem["heads"], problem["dim"])
    values, notes = {"standard": rung_bytes("standard", *shape) / 1e9}, {}
    for name in (*LADDER[1:], "ours"):
        asked = AttentionProblem(
            problem["dtype"], shape[0], shape[1], shape[1], shape[2], shape[2], shape[3], shape[3], shape[3] ** -0.5
        )
        try:
            chosen = plan(asked, current(0), family=family if name == "ours" else name)
        except ValueError as objection:
            notes[name] = reason(objection)
            continue
        values[name] = rung_bytes(chosen.family, *shape, tile=tile_of(chosen)) / 1e9
        if name == "ours":
            notes[name] = chosen.family
    return values, notes


def tile_of(chosen: KernelPlan) -> int:
    """How many rows of the other side one row that was fetched serves: queries, in flash1 keys."""
    constants = dict(chosen.constants)
    tile = constants["OWNED"] if "OWNED" in constants else constants.get("ROWS") or 64 * constants["WARPGROUPS"]
    return int(tile)


def rung_bytes(family: str, batch: int, seq: int, heads: int, dim: int, tile: int = 1) -> int:
    """Bytes of a float16 forward, as `cupyflash.reference` counts them, with O, l and m of flash1 in float32."""
    rows, steps = seq * dim, -(-seq // tile)
    if family == "standard":
        head = 2 * (4 * rows + 4 * seq**2)
    elif family == "flash1":
        head = 2 * (2 * rows + steps * rows) + 4 * (1 + 2 * steps) * (rows + 2 * seq)
    else:
        head = 2 * (2 * rows + steps * 2 * rows)
    return batch * heads * head


# --- training: FlashAttention-2's Table 1 -------------------------------------------------------------------------


def _training(options: Options) -> list[Problem]:
    """8192 tokens a step, so that all ways of attention fit at 2k; at 8k also with activations computed again."""
    models, lengths = (("1.3B",), (2048,)) if options.quick else (("1.3B", "2.7B"), (2048, 8192))
    return [
        {"model": model, "seq": seq, "batch": 8192 // seq, "recompute": recompute, "dtype": "bfloat16"}
        for model, seq, recompute in itertools.product(models, lengths, (False, True))
        if seq > 2048 or not recompute
    ]


TRAINING_PEERS = ("fa2", "math")


def _training_speed(problem: Problem, options: Options) -> Measured:
    """Model TFLOP/s; one after the other, as there is no room for several models."""
    import torch

    from . import gpt

    size, steps, values, notes = gpt.SIZES[problem["model"]], 2 * options.rounds + 2, {}, {}  # the first three warm up
    for name in ("ours", *TRAINING_PEERS):
        try:
            done = gpt.train(size, problem["seq"], problem["batch"], name, steps, checkpoint=problem["recompute"])
            work = problem["batch"] * gpt.model_flops(done.parameters, size.layers, size.width, problem["seq"])
            values[name] = work / done.seconds / 1e12
            notes[name] = f"{problem['batch'] * problem['seq'] / done.seconds:.0f} tokens/s"
        except Exception as failure:  # noqa: BLE001 - as in compare; the most likely one is that memory does not suffice
            notes[name] = reason(failure)
        gc.collect()
        torch.cuda.empty_cache()
    return values, notes


SUITES: dict[str, Suite] = {
    "forward": Suite("TFLOP/s", GRID_PEERS, functools.partial(_grid, "forward"), _grid_speed, sustained=True),
    "backward": Suite("TFLOP/s", GRID_PEERS, functools.partial(_grid, "backward"), _grid_speed, sustained=True),
    "models": Suite(
        "TFLOP/s", models.PEERS, models.problems, models.measure, names=tuple(models.CALLS), sustained=True
    ),
    "host": Suite("us", host.PEERS, host.problems, host.measure),
    "jax": Suite("TFLOP/s", jitted.PEERS, jitted.problems, jitted.measure),
    "jit": Suite("s", ("flex",), _jit, _jit_time),
    "import": Suite("s", ("alone",), _imports, _import_time),
    "memory": Suite("MB", MEMORY_PEERS, _memory, _memory_peak),
    "fp32": Suite("TFLOP/s", WIDE_PEERS, _wide, _wide_speed),
    "fp8": Suite("TFLOP/s", eight.PEERS, eight.problems, eight.measure),
    "precision": Suite("error", precision.PEERS, precision.problems, precision.measure),
    "figures": Suite("TFLOP/s", FIGURE_PEERS, _figures, _figure_speed),
    "training": Suite("TFLOP/s", TRAINING_PEERS, _training, _training_speed),
    "gpt": Suite("tokens/s", steps.PEERS, steps.problems, steps.measure),
    "ladder": Suite("ms", LADDER, _ladder, _ladder_rung),
    "scores": Suite("TFLOP/s", scores.PEERS, scores.problems, scores.measure, names=tuple(scores.ROWS)),
    "derivatives": Suite("ms", derivatives.PEERS, derivatives.problems, derivatives.measure, names=derivatives.NAMES),
    **{
        name: Suite(
            "TFLOP/s" if name == "varlen" else "us",
            serving.PEERS[name],
            functools.partial(serving.problems, name),
            functools.partial(serving.measure, name),
            names=tuple(calls),
        )
        for name, calls in serving.CALLS.items()
    },
    "cpu": Suite("GFLOP/s", numpy_path.PEERS, numpy_path.problems, numpy_path.measure, needs_gpu=False),
}
GROUPS = {"all": tuple(name for name in SUITES if SUITES[name].needs_gpu), "paper": ("figures", "memory", "training")}
