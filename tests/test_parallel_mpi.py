"""A sequence that processes share over MPI, where mpi4py and an mpiexec are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import attention, attention_backward, parallel

LENGTH = 256


def in_a_group() -> None:
    """What each of the processes does."""
    from mpi4py import MPI

    from cupyflash.parallel import mpi

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    mpi._MOST = 1000  # of a message in several parts
    rows = parallel.Rows.zigzag(LENGTH, size, multiple=16)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, LENGTH, 4, 8))
    options: dict[str, Any] = {"causal": True, "dropout": 0.2, "seed": 3, "sinks": rng.standard_normal(4)}
    bias = rng.standard_normal((1, 4, LENGTH, LENGTH))
    ways: list[tuple[Any, dict[str, Any]]] = [(comm, {"exchange": "keys", "groups": 2}), (comm, {"exchange": "heads"})]
    if size > 2:  # heads of two neighbours, keys of all twos
        ways.append(((comm.Split(rank // 2, rank), comm.Split(rank % 2, rank)), {}))
    for arrays in ({}, {"bias": bias}):
        one = attention(q, k, v, return_lse=True, **options, **arrays)
        grads = attention_backward(dout, q, k, v, *one, wrt=["sinks", *arrays], **options, **arrays)
        whole = {"out": one[0], "lse": one[1], "dq": grads.dq, "dk": grads.dk, "dv": grads.dv, **grads.of_arrays}
        axes = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1, "bias": 2}
        for group, how in ways if not arrays else ways[:1]:
            of_rank, *own = (rows.take(x, rank) for x in (dout, q, k, v))
            given = how | options | {name: rows.take(x, rank, 2) for name, x in arrays.items()} | {"rows": rows}
            found = parallel.attention(*own, group, return_lse=True, **given)
            some = parallel.attention_backward(
                of_rank, *own, *found, group, wrt=["sinks", *arrays], reduce=True, **given
            )
            of_all = {"out": found[0], "lse": found[1], "dq": some.dq, "dk": some.dk, "dv": some.dv, **some.of_arrays}
            for name, x in whole.items():
                want = rows.take(x, rank, axes[name]) if name in axes else x
                np.testing.assert_allclose(of_all[name], want, atol=1e-12, err_msg=f"{name}, {how}")
    try:
        parallel.attention(*own, comm, rows=rows, scale=1.0 + rank)
    except ValueError as error:
        assert "scale is" in str(error)
    else:
        raise AssertionError("another scale on each rank is let through")
    part = slice(*(LENGTH // size * np.array([rank, rank + 1])))  # a cache that is shared out
    merged = parallel.merge(*attention(q[:, :1], k[:, part], v[:, part], return_lse=True), comm)
    for x, y in zip(merged, attention(q[:, :1], k, v, return_lse=True)):
        np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_over_mpi(size: int) -> None:
    pytest.importorskip("mpi4py")
    if (mpiexec := shutil.which("mpiexec")) is None:
        pytest.skip("there is no mpiexec")
    code = "import test_parallel_mpi; test_parallel_mpi.in_a_group()"
    # Open MPI's wants to be asked twice where it runs as root, and by name where ranks are more than cores.
    asked = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")
    asked |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [mpiexec, "-n", str(size), sys.executable, "-c", code], check=False, cwd=Path(__file__).parent,
        env=os.environ | asked, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
