"""A sequence over two GPUs: PyTorch and CuPy over NCCL, JAX, and simulated ranks on one, beside one GPU and float64.

Processes of gpus_parallel.py compute it, once for all tests here; each test judges one case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from backends import gpu_count
from gpus_parallel import CASES, IN_AUTOGRAD, IN_CUPY, IN_JAX, SIZE

from cupyflash.bench.parallel import free_port

pytestmark = pytest.mark.gpus
SECONDS = float(os.environ.get("CUPYFLASH_GPUS_SECONDS", "240"))  # of one kind of processes
RANKS = list(range(SIZE))


def processes(kinds: dict[str, int], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """So many processes of each kind, at once: what each found. Where one has failed, the others of its kind are
    ended."""
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))}
    env |= {"TORCH_NCCL_HIGH_PRIORITY": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    started = {kind: [] for kind in kinds}
    for kind, number in kinds.items():
        port = str(free_port())
        for n in range(number):
            command = [sys.executable, "gpus_parallel.py", kind, str(n), str(number), str(folder), port]
            log = (folder / f"{kind}-{n}.log").open("w")
            started[kind].append(subprocess.Popen(command, cwd=here, env=env, stdout=log, stderr=subprocess.STDOUT))
    end = dict.fromkeys(kinds, time.monotonic() + SECONDS)
    while any(x.poll() is None for some in started.values() for x in some):
        for kind, some in started.items():
            if kind != "simulated" and any(x.poll() not in (None, 0) for x in some):
                end[kind] = min(end[kind], time.monotonic() + 20)
            if time.monotonic() > end[kind]:
                for x in some:
                    x.kill()
        time.sleep(0.1)
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, some in started.items():
        found[kind] = []
        for n, _ in enumerate(some):
            path = folder / f"{kind}-{n}.json"
            rows = json.loads(path.read_text()) if path.exists() else {}
            found[kind].append(rows | {"log": (folder / f"{kind}-{n}.log").read_text()[-1500:]})
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpus")


@pytest.fixture(scope="session")
def simulated(folder: Path) -> dict[str, Any]:
    """Of all cases, each by one process; what it compiles the others find."""
    found = processes({"simulated": min(len(CASES), os.cpu_count() or 1)}, folder)["simulated"]
    return {name: x[name] for x in found for name in x if name != "log"} | {"log": "\n".join(x["log"] for x in found)}


@pytest.fixture(scope="session")
def ranks(simulated: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
    return processes({"torch": SIZE, "cupy": SIZE, "jax": 1}, folder)


def found(rows: dict[str, Any], case: str) -> Any:
    assert case in rows, f"{case} has no result; the log ends: {rows['log']}"
    assert "error" not in rows[case], rows[case]["error"]
    return rows[case]["found"]


def judge(verdict: dict[str, Any], case: dict[str, Any]) -> None:
    """As good as one GPU; and its bits, where they are promised."""
    sixteen = case.get("dtype", "bfloat16") in ("bfloat16", "float16")
    for name, x in verdict.items():
        rounding = 1e-12 if case.get("dtype") == "float64" else 4e-3 if case.get("judge") == "one" else 1e-6
        allowed = case.get("allowed", 1.05 if sixteen else 1.5) * x["off of one"] + rounding * x["size"]
        assert x["off"] <= allowed, f"{name} is off by {x['off']:.3e}, one GPU by {x['off of one']:.3e}"
    if case.get("bits"):
        other = [x for x in case["bits"] if not verdict[x]["bits"]]
        assert not other, f"{other} are not the bits of one GPU"


@pytest.mark.parametrize("case", CASES)
def test_simulated_on_one_gpu(case: str, simulated: Any) -> None:
    for verdict in found(simulated, case):
        judge(verdict, CASES[case])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_torch(case: str, rank: int, ranks: Any) -> None:
    judge(found(ranks["torch"][rank], case), CASES[case])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", IN_AUTOGRAD)
def test_autograd(case: str, rank: int, ranks: Any) -> None:
    judge(found(ranks["torch"][rank], f"autograd {case}"), CASES[case] | {"bits": False})


@pytest.mark.parametrize("rank", RANKS)
def test_refused_on_both(rank: int, ranks: Any) -> None:
    said = found(ranks["torch"][rank], "refused")
    for text, message in zip(said, ("on the CPU|on cpu", "scale is", "window's left bound is -1", "k has 3 heads")):
        assert any(x in text for x in message.split("|")), said


@pytest.mark.parametrize("rank", RANKS)
def test_a_thousand_calls_hold_no_memory(rank: int, ranks: Any) -> None:
    after_100, after_1000 = found(ranks["torch"][rank], "memory")
    assert after_1000 <= after_100


@pytest.mark.parametrize("rank", RANKS)
def test_a_cuda_graph_holds_attention_and_its_transfers(rank: int, ranks: Any) -> None:
    assert found(ranks["torch"][rank], "graph") == [0.0, 0.0]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", IN_CUPY)
def test_cupy(case: str, rank: int, ranks: Any) -> None:
    judge(found(ranks["cupy"][rank], case), CASES[case])


@pytest.mark.parametrize("rank", RANKS)
def test_merge_in_cupy(rank: int, ranks: Any) -> None:
    off = found(ranks["cupy"][rank], "merge")
    assert off[0] < 2e-3 and off[1] < 1e-5


@pytest.mark.parametrize("case", IN_JAX)
def test_jax(case: str, ranks: Any) -> None:
    """Parts of dk and dv are rounded to 16 bits there."""
    judge(found(ranks["jax"][0], case), IN_JAX[case])


def test_there_are_two_gpus() -> None:
    assert gpu_count() >= SIZE
