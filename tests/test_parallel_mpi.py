"""A sequence that two processes share over MPI, where mpi4py and an mpiexec are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyflash import attention, attention_backward, parallel


def in_a_group() -> None:
    """What each of the processes does."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, rng = comm.Get_rank(), np.random.default_rng(0)
    rows = parallel.Rows.zigzag(256, comm.Get_size(), multiple=16)
    q, k, v, dout = rng.standard_normal((4, 1, 256, 4, 8))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, causal=True)
    for exchange in ("keys", "heads"):
        of_rank, *own = (rows.take(x, rank) for x in (dout, q, k, v))
        how = {"rows": rows, "causal": True, "exchange": exchange}
        found, norm = parallel.attention(*own, comm, return_lse=True, **how)
        np.testing.assert_allclose(found, rows.take(out, rank), atol=1e-12)
        for x, y in zip(parallel.attention_backward(of_rank, *own, found, norm, comm, **how), grads):
            np.testing.assert_allclose(x, rows.take(y, rank), atol=1e-12)
    try:
        parallel.attention(*own, comm, rows=rows, scale=1.0 + rank)
    except ValueError as error:
        assert "scale is" in str(error)
    else:
        raise AssertionError("another scale on each rank is let through")


def test_over_mpi() -> None:
    pytest.importorskip("mpi4py")
    if (mpiexec := shutil.which("mpiexec")) is None:
        pytest.skip("there is no mpiexec")
    code = "import test_parallel_mpi; test_parallel_mpi.in_a_group()"
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", code], check=False, cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
