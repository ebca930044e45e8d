"""What a type checker makes of calls on JAX arrays; never run."""

from typing import Any

import jax
from typing_extensions import assert_type

import cupyflash
import cupyflash.jax


def right(q: jax.Array) -> None:
    assert_type(cupyflash.attention(q, q, q), jax.Array)
    assert_type(cupyflash.jax.attention(q, q, q, key_mask=q), jax.Array)
    assert_type(cupyflash.jax.attention(q, q, q, return_lse=True), tuple[jax.Array, Any])


def wrong(q: jax.Array) -> None:
    cupyflash.jax.attention(q, q, q, implementation="cudnn")  # type: ignore[call-overload]
