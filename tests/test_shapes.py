"""Shapes that commands make of names: of q, k, v and of what says how long sequences are; and `attend` with those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import attention
from cupyflash.lengths import check_values
from cupyflash.passes import FORWARD
from cupyflash.problem import View, contiguous
from cupyflash.rules import describe, state
from cupyflash.tools.shapes import even, of_arrays, of_problem, placed

PACKED, PAGED = ("cu_seqlens_q", "cu_seqlens_k"), ("seqlens_k", "page_table")
CASES: list[tuple[tuple[str, ...], Any, Any, int | None]] = [
    (("bias", "key_mask"), (2, 5, 4, 8), (2, 7, 2, 8), None),
    ((*PACKED, "bias", "sinks"), (20, 4, 8), (30, 2, 8), 3),
    (PACKED, (20, 4, 8), (30, 2, 8), None),
    (("seqlens_k", "alibi_slopes"), (3, 2, 4, 8), (3, 9, 2, 8), None),
    ((*PAGED, "mask"), (3, 2, 4, 8), (7, 16, 2, 8), None),
    (("cu_seqlens_q", *PAGED), (20, 4, 8), (7, 16, 2, 8), 4),
    (("cu_seqlens_k",), (3, 2, 4, 8), (30, 2, 8), None),
]


@pytest.mark.parametrize(("names", "q", "k", "sequences"), CASES)
def test_shapes_of_names_state_a_problem(names: Any, q: Any, k: Any, sequences: Any) -> None:
    """Of which the same shapes, and lengths that fit, are made again."""
    shapes = of_arrays(names, q, k, k, "bshd", sequences)
    assert shapes.keys() == {*names}

    def view(shape: Any, dtype: str) -> View:
        return View(shape, contiguous(shape), dtype, "cpu", "shape")

    dtypes = {"key_mask": "bool", "mask": "bool"} | dict.fromkeys((*PACKED, *PAGED), "int32")
    views = {name: view(x, dtypes.get(name, "float32")) for name, x in shapes.items()}
    problem = describe(view(q, "float32"), view(k, "float32"), view(k, "float32"), **views)
    found = of_problem(problem)
    assert (found["q"], found["k"], found["v"]) == (q, k, k)
    assert {name: found[name] for name in names} == shapes
    assert problem.batch == (sequences or (1 if len(q) == 3 else q[0]))
    lengths = even(problem)
    check_values(problem, {name: x.astype(np.int64) for name, x in lengths.items()})
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(found[name]).astype(np.float32) for name in "qkv"}
    given = {name: np.ones(x, dtypes.get(name, "float32")) for name, x in shapes.items()} | lengths
    out = attention(**arrays, **given)
    rows = problem.rows_q or q[0] * q[1]
    assert np.count_nonzero(np.abs(out).sum((-1, -2)).ravel()) >= rows - problem.batch  # some of packed ones remain
    own = {x: view(y.shape, y.dtype.name) for x, y in (arrays | given).items()}
    assert state(own, {}, {}, FORWARD)[0] == problem


def test_lines() -> None:
    view = lambda shape, dtype="float32": View(shape, contiguous(shape), dtype, "cpu", "shape")
    of = {"cu_seqlens_q": view((4,), "int32"), "cu_seqlens_k": view((4,), "int32"), "bias": view((4, 20, 9))}
    assert of_problem(describe(view((20, 4, 8)), view((30, 2, 8)), view((30, 2, 8)), **of))["bias"] == (4, 20, 9)


def test_placed() -> None:
    q, k = (1, 40, 4, 8), (1, 50, 2, 8)
    assert placed(("bias",), q, k) == (q, k)
    assert placed(PACKED, q, k) == (q[1:], k[1:])
    assert placed(PAGED, q, k) == (q, (4, 16, 2, 8))


def test_the_number_of_sequences() -> None:
    q, packed = (3, 2, 4, 8), (20, 4, 8)
    with pytest.raises(ValueError, match="--sequences is 2, but nothing says that sequences are packed"):
        of_arrays(("bias",), q, q, q, "bshd", 2)
    with pytest.raises(ValueError, match=r"there are 3 sequences by the shapes \(3, 2, 4, 8\) and .*, but --seq"):
        of_arrays(("seqlens_k",), q, q, q, "bshd", 2)
    with pytest.raises(ValueError, match="q has 4 dimensions, .*; with cu_seqlens_q it must have 3"):
        of_arrays(PACKED, q, packed, packed, "bshd", 2)


# ---- the command line -----------------------------------------------------------------------------------------------


def said(arguments: list[str]) -> str:
    """What a command prints; its errors are raised."""
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from cupyflash.tools.commands import app

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_attend_with_lengths(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((9, 4, 8)), rng.standard_normal((9, 2, 8))
    cu = np.array([0, 2, 2, 7], np.int32)
    for name, x in (("q", q), ("k", k), ("cu", cu)):
        np.save(tmp_path / f"{name}.npy", x)
    files = [part for name in "qkv" for part in (f"--{name}", str(tmp_path / f"{'k' if name == 'v' else name}.npy"))]
    lengths = [part for side in "qk" for part in (f"--cu-seqlens-{side}", str(tmp_path / "cu.npy"))]
    out = tmp_path / "out.npz"
    more = ["--causal", "--lse", "--max-seqlen-q", "5", "--batch-invariant", "--device", "cpu"]
    assert "cu_seqlens_q 4 int32" in said(["attend", *files, *lengths, *more, "-o", str(out)])
    wanted = attention(q, k, k, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
    with np.load(out) as found:
        np.testing.assert_array_equal(found["out"], wanted[0])
        np.testing.assert_array_equal(found["lse"], wanted[1])
    np.save(tmp_path / "cu.npy", cu[::-1])
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 7; it must be 0"):
        said(["attend", *files, *lengths, "--device", "cpu", "-o", str(tmp_path / "other.npz")])


def test_explain_with_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, for which nothing is compiled."""
    monkeypatch.setattr("cupyflash.tools.explanation._gpu_at_hand", lambda: False)
    shape = ["explain", "--shape", "512,4,64", "--kv-shape", "512,2,64", "--dtype", "fp32"]
    assert "(rows, heads, dim) of 8 sequences, by offsets of q, offsets of k and v" in said(
        [*shape, "--cu-seqlens-q", "--cu-seqlens-k", "--sequences", "8"]
    )
    shape = ["explain", "--shape", "16,1,4,64", "--kv-shape", "64,16,2,64", "--dtype", "fp32"]
    paged = [*shape, "--seqlens-k", "--page-table"]
    assert "of 16 sequences, by lengths of caches, page table" in said(paged)
    with pytest.raises(TypeError, match="page_table is given to attention_backward; k and v in pages have a forward"):
        said([*paged, "--of", "backward"])


def test_programs_with_lengths() -> None:
    """What `compile` would compile."""
    pytest.importorskip("cuda.core")
    from cupyflash.passes import BACKWARD
    from cupyflash.tools.precompile import jobs

    for names, packed in ((PACKED, True), (("cu_seqlens_q", *PAGED), True), (("seqlens_k",), False)):
        made = jobs(["sm_80"], ["float32"], [64], [True], arrays=names)
        assert made and all(x.problem.ragged and (x.problem.rows_q is not None) == packed for x in made)
        assert any(x.of is BACKWARD for x in made) == ("page_table" not in names)
    with pytest.raises(TypeError, match="page_table is given to attention_backward"):
        jobs(["sm_80"], ["float32"], [64], [True], [BACKWARD], PAGED)
