"""Who may import whom: no circle, and nothing of the tools in the library that they stand on."""

from __future__ import annotations

import graphlib
import subprocess
import sys

from imports import HANDED_OVER, import_graph

LIBRARY = (
    "api",
    "call",
    "dispatch",
    "passes",
    "folding",
    "problem",
    "interop",
    "cpu",
    "gpu",
    "torch",
    "jax",
    "compat",
    "integrations",
)
TOOLS = ("bench", "demo", "reference", "cli", "commands", "autotune", "precompile", "explanation", "info", "timing")


def room(module: str) -> str:
    """The part of the package that a module is in."""
    return module.partition(".")[2].partition(".")[0]


def test_no_circle() -> None:
    try:
        list(graphlib.TopologicalSorter(import_graph()).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_library_imports_no_tool() -> None:
    graph = import_graph()
    assert {room(name) for name in graph} >= {*LIBRARY, *TOOLS}
    for name, imported in graph.items():
        if room(name) in (*LIBRARY, "tuned"):
            tools = {other for other in imported if room(other) in TOOLS}
            assert tools <= (set(HANDED_OVER) if name == "cupyflash.api" else set()), f"{name} imports {tools}"


def test_the_planner_reads_no_file() -> None:
    """Tuned tiles come in from outside."""
    graph = import_graph()
    for name in graph:
        if name.startswith("cupyflash.gpu.families") or name in ("cupyflash.gpu.plan", "cupyflash.gpu.kernel_plan"):
            assert not graph[name] & {"cupyflash.tuned", "cupyflash.files", "cupyflash.folders"}


def test_importing_the_package_imports_no_array_library() -> None:
    """They take longer than everything else; each comes with the first array of its own."""
    code = "import sys, cupyflash; print(*{'numpy', 'cupy', 'torch', 'jax', 'ml_dtypes', 'cuda'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_graph_sees_imports_of_every_form() -> None:
    graph = import_graph()
    assert "cupyflash.gpu.plan" in graph["cupyflash.gpu.corridor"]  # from .plan import plan
    assert "cupyflash.gpu.params" in graph["cupyflash.gpu.source"]  # from . import params
    assert "cupyflash.problem" in graph["cupyflash.gpu.families.sm90"]  # from ...problem import
    assert "cupyflash.explanation" in graph["cupyflash.api"]  # in a function
    assert "cupyflash" in graph["cupyflash.bench.gpt"]  # import cupyflash
