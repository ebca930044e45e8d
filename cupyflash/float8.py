"""Inputs of 8 bits (e4m3) for `attention`: numbers with a scale, and a rotation that spreads what is large in a few
columns."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .namespaces import float8_of, namespace
from .problem import BLOCK, FLOATS, check_layout, float_name

LARGEST = 448.0  # of e4m3
_SMALLEST = 1e-30  # that `attention` takes for a descale
_LIBRARIES = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}


def quantize(x: Any, by: str | None = "block", *, layout: str = "bshd") -> tuple[Any, Any]:
    """x in 8 bits, and what that is multiplied by: `q`, `k` or `v` of `attention`, and its `descale`.

    Parameters
    ----------
    x : (B, S, H, D), as `attention` takes it
        A NumPy or JAX array or a PyTorch tensor of float16, bfloat16, float32 or float64. CuPy has no arrays of 8 bits:
        of one of its arrays give `torch.from_dlpack(x)`, which shares the memory. Numbers that are not finite in
        float32 become NaN.
    by : "block", "head" or None
        Each block of 128 rows of a head, each head or the whole has a scale of its own, with which its largest number
        is 448, the largest of e4m3. (Blocks as in Shah et al. 2024, section 3.3.)
    layout : "bshd" or "bhsd"

    Returns
    -------
    numbers : as x, in float8_e4m3fn
    descale : (B, H, ceil(S / 128)), (B, H, 1) or (1, 1, 1), without B where x has no batch and without H where it has
    no heads
        float32; x is about numbers * descale.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it is and what it must be.
    """
    if by not in ("block", "head", None):
        raise ValueError(f"by is {by!r}; it must be 'block', 'head' or None")
    check_layout(layout)
    package = type(x).__module__.partition(".")[0]
    if package not in _LIBRARIES:
        more = ": CuPy has none of 8 bits; torch.from_dlpack(x) shares its memory" if package == "cupy" else ""
        name = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"x is a {name}; it must be a NumPy or JAX array or a PyTorch tensor{more}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("x is a masked array, whose mask would be lost; pass its data")
    if float_name(x.dtype) not in FLOATS:
        raise TypeError(f"x has dtype {x.dtype}; it must be one of {', '.join(FLOATS)}")
    if not 2 <= len(x.shape) <= 4:
        raise ValueError(f"x has {len(x.shape)} dimensions, shape {tuple(x.shape)}; it must have 4, 3 or 2")
    xp = namespace(_LIBRARIES[package])
    seq_first = layout == "bshd" and len(x.shape) > 2
    rows = xp.swapaxes(x, -3, -2) if seq_first else x  # (..., S, D)
    rows = _cast(rows, xp.float32)
    finite = xp.isfinite(rows)
    sizes = _largest(xp, xp.where(finite, xp.abs(rows), 0.0))  # (..., S)
    *outer, seq = sizes.shape
    blocks = -(-seq // BLOCK) if by == "block" else 1
    if by == "block":
        missing = xp.broadcast_to(xp.zeros_like(sizes[..., :1]), (*outer, blocks * BLOCK - seq))
        sizes = xp.concatenate((sizes, missing), -1).reshape((*outer, blocks, BLOCK))
    elif by == "head":
        sizes = sizes[..., None, :]
    else:
        sizes = sizes.reshape((*[1] * len(outer), 1, math.prod(sizes.shape)))
    descale = _largest(xp, sizes) / LARGEST
    # (Of zeros it is small too: beside a large one of V's the kernel would keep few bits of the others' probabilities.)
    descale = xp.where(descale < _SMALLEST, _SMALLEST, descale)
    per_row = descale[..., None]  # (..., blocks, 1)
    if by == "block":
        per_row = xp.broadcast_to(per_row, (*outer, blocks, BLOCK)).reshape((*outer, blocks * BLOCK))[..., :seq, None]
    eight = xp.where(finite, xp.clip(rows / per_row, -LARGEST, LARGEST), math.nan)
    eight = _cast(eight, float8_of(xp))
    return (xp.swapaxes(eight, -3, -2) if seq_first else eight), descale


def rotation(dim: int, seed: int = 0) -> np.ndarray:
    """A random orthogonal matrix, (dim, dim) in float32: of q @ M and k @ M products are those of q and k.

    "Incoherent processing" (Shah et al. 2024, section 3.3): a number that is large in one column becomes many of
    middling size, so that a scale serves all of them. Random signs and a Hadamard matrix, of the powers of two in dim;
    of what is left of it a random rotation.
    """
    if isinstance(dim, bool) or not isinstance(dim, numbers.Integral) or dim < 1:
        raise ValueError(f"dim is {dim!r}; it must be an integer, 1 or more")
    dim = int(dim)
    rng = np.random.default_rng(seed)
    twos = dim & -dim
    hadamard = np.ones((1, 1))
    while len(hadamard) < twos:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    odd, _ = np.linalg.qr(rng.standard_normal((dim // twos, dim // twos)))
    signs = rng.choice([-1.0, 1.0], dim)
    return (signs[:, None] * np.kron(odd, hadamard / math.sqrt(twos))).astype(np.float32)


def _largest(xp: Any, x: Any) -> Any:
    """Along the last axis; 0 of nothing."""
    return xp.amax(x, -1) if x.shape[-1] else x.sum(-1)


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)
