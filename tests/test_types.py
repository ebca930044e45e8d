"""The public signatures as a type checker sees them: results are of the type of q, and wrong calls are found."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash
from cupyflash.api import Options, Shared

TOP = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_calls(library: str) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip(library)
    command = [sys.executable, "-m", "mypy", f"tests/typed/{library}_calls.py"]  # quick after `mypy cupyflash`
    done = subprocess.run(command, check=False, cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_typed_by_name_is_what_is_taken() -> None:
    shown = inspect.signature(cupyflash.attention).parameters
    named = {name: x.annotation for name, x in shown.items() if x.kind is x.KEYWORD_ONLY and name != "return_lse"}
    assert {name: getattr(x, "__forward_arg__", x) for name, x in Options.__annotations__.items()} == named
    shown = inspect.signature(cupyflash.attention_backward).parameters
    assert {x for x, y in shown.items() if y.kind is y.KEYWORD_ONLY} == {
        *Shared.__annotations__,
        "dlse",
        "wrt",
        "grads",
        "add",
        "out_dtype",
    }
    of = cupyflash.attention, cupyflash.attention_backward, cupyflash.attention_jvp, cupyflash.attention_backward_jvp
    assert all(x.kind is not x.VAR_KEYWORD for f in of for x in inspect.signature(f).parameters.values())
    assert inspect.signature(cupyflash.attention_jvp).parameters.keys() >= {*Shared.__annotations__, "tout"}
    assert inspect.signature(cupyflash.attention_backward_jvp).parameters.keys() >= {*shown, "jvp", "tangents"} - {
        "add"
    }
