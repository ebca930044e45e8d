"""The suite `precision` without a GPU: what is drawn, what is computed, how it is judged, and the table."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rich")
torch = pytest.importorskip("torch")

from reference import standard as reference
from reference import state

from cupyflash import bench
from cupyflash.bench import precision, report
from cupyflash.bench.suite import Options
from cupyflash.bench.suites import SUITES

SHAPE = (1, 2, 48, 16)


def small(inputs: str) -> list[dict]:
    return [
        {**p, "seq": SHAPE[2], "dim": SHAPE[3]}
        for p in precision.problems(Options(quick=True))
        if p["inputs"] == inputs
    ]


def test_standard_attention_is_that_of_the_tests(rng):
    x = precision.Inputs(*rng.standard_normal((4, *SHAPE)))
    q, k, v, dout = (a.swapaxes(1, 2) for a in x)
    right = reference(state(q, k, v), q, k, v, None, dout)
    for given in (x, precision.Inputs(*map(torch.from_numpy, x))):
        for name, found in zip(precision.RESULTS, precision.standard(given)):
            np.testing.assert_allclose(np.asarray(found), getattr(right, name).swapaxes(1, 2), atol=1e-13)


def test_three_products_of_tf32_are_as_good_as_float32(rng):
    """Where the hardware has more bits than TF32, as here, the parts lose nothing; each alone has 11 bits."""
    a, b = (torch.from_numpy(x).float() for x in rng.standard_normal((2, 3, 40, 40)))
    exact = a.double() @ b.double()
    assert float((precision.product_of_parts(a, b) - exact).norm() / exact.norm()) < 3e-7
    bits = precision._eleven_bits(a)
    assert 1e-5 < float(((bits - a) / a).abs().max()) <= 2**-11
    assert bool(((bits.view(torch.int32) & 0x1FFF) == 0).all())


@pytest.mark.parametrize("inputs", precision.INPUTS)
def test_inputs_hurt_but_have_results_in_float32(inputs, rng):
    drawn = precision.INPUTS[inputs](rng, SHAPE)
    assert all(x.shape == SHAPE for x in drawn)
    for x in precision.standard(drawn):
        assert np.isfinite(x.astype(np.float32)).all() and 1e-30 < abs(x).max() < 1e30


@pytest.mark.parametrize("inputs", precision.INPUTS)
def test_ours_is_as_good_as_standard(inputs):
    """Not where one key takes all: there dP - rowsum(P dP) of standard attention is a difference of equal roundings."""
    for problem in small(inputs):
        values, notes = precision.measure(problem, Options())
        assert notes.keys() == {"efficient"}, notes  # not on a CPU
        wanted = {"standard", "ours"} | ({"standard-tf32", "3xtf32"} if problem["dtype"] == "float32" else set())
        assert values.keys() == wanted
        luck = 8 * np.finfo(problem["dtype"]).eps
        few = inputs in ("scores x 100", "outlier row") and problem["result"] != "out"
        assert few or problem["error"] == "row" or values["ours"] <= 3 * values["standard"] + luck, problem


def test_the_measures(rng):
    right = rng.standard_normal((1, 1, 3, 4))
    right[0, 0, 1], right[0, 0, 2] = 1e-20, 1e-6
    x = right.copy()
    x[0, 0, 1:] += 1e-8
    found = precision.distance(x.astype(np.float64), right)
    assert found["row"] == pytest.approx(0.01) and found["largest"] == pytest.approx(1e-8 / abs(right).max())
    assert found["Frobenius"] == pytest.approx(8**0.5 * 1e-8 / np.linalg.norm(right))
    assert not np.isfinite(precision.distance(np.full_like(right, np.nan), right)["largest"])


def test_what_is_not_finite_is_wrong(monkeypatch):
    precision.errors.cache_clear()
    monkeypatch.setattr(precision, "ours", lambda x, family: (x.q * torch.inf,) * 4)
    values, notes = precision.measure(small("normal")[0], Options())
    precision.errors.cache_clear()
    assert "ours" not in values and notes["ours"] == "wrong: out is not finite"


def test_the_page_gets_a_table_for_each_dtype(tmp_path):
    pytest.importorskip("matplotlib")
    suite, rows = SUITES["precision"], []
    for n, problem in enumerate(precision.problems(Options())):
        values = {"ours": 1e-7 + n * 1e-12, "standard": 2e-7}
        rows.append(report.make_row(problem, suite.unit, values, {"efficient": "no"}, suite.peers))
    assert rows[0]["ratio_to_best"] == 2
    data = {
        "suite": "precision", "gpu": "NVIDIA H200", "machine": "NVIDIA H200", "date": "2026-01-01T00", "family": None,
        "rows": rows,
    }  # fmt: skip
    report.save(tmp_path / "results" / "h200" / "precision.json", data)
    page = tmp_path / "docs" / "precision.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- precision:begin -->\n<!-- precision:end -->\nafter\n")
    assert bench.plot(tmp_path / "results", tmp_path / "docs") == [str(page)]
    text = page.read_text()
    assert text.count("| inputs | | cupyflash | standard |") == 2 and "float64, NVIDIA H200, 2026-01-01" in text
    assert "| normal | out | 1e-07 1e-07 1e-07 | 2e-07 2e-07 2e-07 |" in text and "efficient" not in text
    assert text.count("| heavy tails |") == 2 * 4
