"""How long the first call takes: in new processes, with an empty cache and with the cache that the first one filled.

Run as a program it is such a process: it makes the first forward and the first backward call and prints their times.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ..tools.timing import reason

PROBLEM: dict[str, Any] = {"dtype": "float16", "batch": 2, "seq": 2048, "heads": 16, "dim": 128, "causal": True}
SHAPE = tuple(PROBLEM[key] for key in ("batch", "seq", "heads", "dim"))
# NVRTC keeps what it compiled in the driver's cache, whoever asked.
CACHES = ("CUPYFLASH_CACHE_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
Times = dict[str, dict[str, float]]


@functools.cache
def measure(name: str, family: str | None, repeats: int) -> Times | str:
    """Seconds by "cold" / "disk cache" and "forward" / "backward", medians over `repeats` pairs of processes.

    Where that fails, the reason.
    """
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="cupyflash-bench-", ignore_cleanup_errors=True) as folder:
            try:
                runs.append({start: _process(name, family, folder) for start in ("cold", "disk cache")})
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                return reason(error)
    return {
        start: {key: statistics.median(run[start][key] for run in runs) for key in runs[0][start]} for start in runs[0]
    }


IMPORTS = {  # what is imported, and what that stands on
    "import cupyflash": "import numpy",
    "from cupyflash import attention": "import numpy",
    "import cupyflash.torch": "import torch",
    "import cupyflash.jax": "import jax",
}
LIBRARIES = ("numpy", "cupy", "torch", "jax", "cuda")
_IMPORT = """
import sys, time
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin, *(name for name in {libraries!r} if name in sys.modules))
"""


def import_time(statement: str) -> tuple[float, list[str]]:
    """Seconds that it takes in a new process, and the array libraries that came with it."""
    code = _IMPORT.format(statement=statement, libraries=LIBRARIES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    seconds, *libraries = done.stdout.split()
    return float(seconds), libraries


def _process(name: str, family: str | None, folder: str) -> dict[str, float]:
    environment = {**os.environ, **{variable: os.path.join(folder, variable.lower()) for variable in CACHES}}
    command = [sys.executable, "-m", __name__, name, *([family] if family else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _clock(call: Callable[[], Any], synchronize: Callable[[], object]) -> tuple[float, Any]:
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - start, result


def _ours(family: str | None = None) -> dict[str, float]:
    import cupy

    from cupyflash import attention, attention_backward

    q, k, v, dout = (cupy.random.standard_normal(SHAPE, dtype="float32").astype(PROBLEM["dtype"]) for _ in range(4))
    options = {"causal": PROBLEM["causal"], "family": family}
    wait = cupy.cuda.Device().synchronize
    forward, (out, lse) = _clock(lambda: attention(q, k, v, return_lse=True, **options), wait)
    backward, _ = _clock(lambda: attention_backward(dout, q, k, v, out, lse, **options), wait)
    return {"forward": forward, "backward": backward}


def _flex() -> dict[str, float]:
    """FlexAttention, what PyTorch compiles at the first call; its block mask is made before the clock starts."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    b, s, h, d = SHAPE
    dtype = getattr(torch, PROBLEM["dtype"])
    q, k, v, dout = (torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(4))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda")
    compiled = torch.compile(functools.partial(flex_attention, block_mask=mask))
    forward, _ = _clock(lambda: compiled(q, k, v), torch.cuda.synchronize)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves)
    backward, _ = _clock(lambda: torch.autograd.grad(out, leaves, dout), torch.cuda.synchronize)
    return {"forward": forward, "backward": backward}


if __name__ == "__main__":
    print(json.dumps({"ours": _ours, "flex": _flex}[sys.argv[1]](*sys.argv[2:])))
