"""FlashAttention (Dao et al. 2022): tiles, keys and values in the outer loop, and its block-sparse form."""

from __future__ import annotations

from typing import Any

from .trace import Array, Trace, default_scale, namespace, started, tiles, with_trace


def tile_sizes(on_chip: int, dim: int) -> tuple[int, int]:
    """(Br, Bc) for `on_chip` elements and head dimension d: Bc = ⌊M / 4d⌋, Br = min(Bc, d).

    FlashAttention's Algorithm 1, line 1. The paper rounds up; rounding down keeps the tiles of Q, K, V and O within M.
    """
    keys = on_chip // (4 * dim)
    if keys < 1:
        raise ValueError(f"on_chip is {on_chip}; it must be at least 4 · D = {4 * dim}, a row each of Q, K, V and O")
    return min(keys, dim), keys


def flash1_forward(
    q: Array,
    k: Array,
    v: Array,
    on_chip: int,
    *,
    key_mask: Array | None = None,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """FlashAttention's Algorithm 1 for one head: each tile of K and V is loaded once, O, ℓ and m are rescaled and
    stored at every step. Θ(N²d²/M) HBM accesses (Theorem 2).

    Parameters
    ----------
    q, k, v : (Sq, D), (Sk, D), (Sk, Dv)
    on_chip : int
        M, the elements that fit on the chip; at least 4 · max(D, Dv), or ValueError. See `tile_sizes`.
    key_mask : (Sk,) of bool, optional
        False hides a padding key. A row whose keys are all hidden gives 0.

    Returns
    -------
    out (Sq, Dv), ell (Sq,), m (Sq,)
        ell is the denominator of each row, m its largest score (-inf where all keys are hidden).

    Examples
    --------
    Twelve rows of eight on a chip of 72 elements: tiles of 2 x 2, six of them in each direction.

    >>> import numpy as np
    >>> from cupyflash.reference import flash1_forward, standard_attention, tile_sizes
    >>> tile_sizes(72, 8)
    (2, 2)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 12, 8))
    >>> out, ell, m, trace = flash1_forward(q, k, v, 72, trace=True)
    >>> exact, p = standard_attention(*(x[None, :, None] for x in (q, k, v)))
    >>> bool(np.allclose(out, exact[0, :, 0], rtol=0, atol=1e-12))
    True

    Four tiles of 2 x 8, S of 2 x 2, and ℓ and m of 2 rows are 72 elements; Q and O are read 6 times and K and V once:

    >>> trace.on_chip, trace.read, trace.written
    (72, 1488, 840)
    >>> trace.exponentials, trace.multiplications, trace.rescalings
    (288, 3888, 1152)
    """
    chip = started(trace)
    return with_trace(_algorithm_1(chip, q, k, v, on_chip, key_mask, None, scale), chip, trace)


def block_sparse(
    q: Array,
    k: Array,
    v: Array,
    blocks: Array,
    on_chip: int,
    *,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """Block-sparse FlashAttention (Algorithm 5) for one head: Algorithm 1 that leaves out the zero blocks.

    With a share s of the blocks, Θ(Nd + N²d²s/M) HBM accesses (Proposition 4).

    Parameters
    ----------
    q, k, v, on_chip
        As in `flash1_forward`.
    blocks : (⌈Sq / Br⌉, ⌈Sk / Bc⌉) of bool
        Which blocks count; ValueError for another shape. Zero blocks are never touched; `tile_sizes` gives Br and Bc.

    Returns
    -------
    out (Sq, Dv), ell (Sq,), m (Sq,)
        Rows without a block: 0, 0 and -inf.
    """
    rows, keys = tile_sizes(on_chip, max(q.shape[1], v.shape[1]))
    shape = len(tiles(len(q), rows)), len(tiles(len(k), keys))
    if blocks.shape != shape:
        raise ValueError(f"blocks has shape {blocks.shape}; it must be {shape}, one for each tile of {rows} x {keys}")
    chip = started(trace)
    return with_trace(_algorithm_1(chip, q, k, v, on_chip, None, blocks, scale), chip, trace)


def _algorithm_1(
    chip: Trace,
    q: Array,
    k: Array,
    v: Array,
    on_chip: int,
    key_mask: Array | None,
    blocks: Array | None,
    scale: float | None,
) -> tuple[Array, Array, Array]:
    xp = namespace(q=q, k=k, v=v)
    tau = default_scale(q, scale)
    rows, keys = tile_sizes(on_chip, max(q.shape[1], v.shape[1]))  # line 1
    row_tiles, key_tiles = tiles(len(q), rows), tiles(len(k), keys)  # lines 3 and 4

    out = xp.empty((len(q), v.shape[1]), q.dtype)  # line 2
    ell, m = xp.empty((2, len(q), 1), q.dtype)
    for memory, start in ((out, 0), (ell, 0), (m, -xp.inf)):
        chip.store(memory, ..., start)

    for at, j in enumerate(key_tiles):  # line 5
        visited = [i for n, i in enumerate(row_tiles) if blocks is None or blocks[n, at]]
        if not visited:
            continue
        k_j, v_j = chip.load(k[j]), chip.load(v[j])  # line 6
        seen = None if key_mask is None else chip.load(key_mask[j])
        for i in visited:  # line 7
            q_i, o_i, ell_i, m_i = (chip.load(x[i]) for x in (q, out, ell, m))  # line 8

            s = chip.times(tau, chip.matmul(q_i, k_j.T))  # line 9
            if seen is not None:
                s = xp.where(seen, s, -xp.inf)

            m_tile = s.max(1, keepdims=True)  # line 10
            p = chip.exp(s, m_tile)
            ell_tile = p.sum(1, keepdims=True)

            m_new = xp.maximum(m_i, m_tile)  # line 11
            before = chip.times(chip.exp(m_i, m_new), ell_i)
            weight = chip.exp(m_tile, m_new)
            ell_new = before + chip.times(weight, ell_tile)

            o_new = chip.rescale(chip.over(before, ell_new), o_i)  # line 12
            o_new = o_new + chip.rescale(chip.over(weight, ell_new), chip.matmul(p, v_j))
            chip.hold(q_i, k_j, v_j, o_i, s, ell_i, m_i)
            chip.store(out, i, o_new)
            chip.store(ell, i, ell_new)  # line 13
            chip.store(m, i, m_new)
    return out, ell[:, 0], m[:, 0]


def flash1_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    ell: Array,
    m: Array,
    on_chip: int,
    *,
    key_mask: Array | None = None,
    scale: float | None = None,
    trace: bool | Trace = False,
) -> Any:
    """FlashAttention's Algorithm 4 for one head: P is computed again, tile by tile, from ℓ and m.

    Θ(N²d²/M) HBM accesses (Theorem 5), where the standard backward reads and writes N x N matrices.

    Parameters
    ----------
    dout : (Sq, Dv)
    q, k, v, out, ell, m, on_chip, key_mask, scale
        What `flash1_forward` was given and returned. The tile sizes are the forward's (line 2), although more tiles are
        on the chip here: the trace tells how many elements that is.

    Returns
    -------
    dq, dk, dv
        Shaped like q, k, v.
    """
    xp = namespace(dout=dout, q=q, k=k, v=v, out=out, ell=ell, m=m)
    chip = started(trace)
    tau = default_scale(q, scale)
    rows, keys = tile_sizes(on_chip, max(q.shape[1], v.shape[1]))
    ell, m = ell[:, None], m[:, None]

    dq, dk, dv = (xp.empty_like(x) for x in (q, k, v))
    for memory in (dq, dk, dv):
        chip.store(memory, ..., 0)

    for j in tiles(len(k), keys):
        k_j, v_j = chip.load(k[j]), chip.load(v[j])
        seen = None if key_mask is None else chip.load(key_mask[j])
        dk_j, dv_j = xp.zeros_like(k_j), xp.zeros_like(v_j)
        for i in tiles(len(q), rows):
            q_i, o_i, do_i, dq_i, ell_i, m_i = (chip.load(x[i]) for x in (q, out, dout, dq, ell, m))

            s = chip.times(tau, chip.matmul(q_i, k_j.T))
            if seen is not None:
                s = xp.where(seen, s, -xp.inf)
            p = chip.over(chip.exp(s, m_i), ell_i)

            dv_j += chip.matmul(p.T, do_i)
            dp = chip.matmul(do_i, v_j.T)
            d_i = chip.times(do_i, o_i).sum(1, keepdims=True)
            ds = chip.times(p, dp - d_i)

            chip.store(dq, i, dq_i + chip.times(tau, chip.matmul(ds, k_j)))
            dk_j += chip.times(tau, chip.matmul(ds.T, q_i))
            chip.hold(q_i, o_i, do_i, dq_i, ell_i, m_i, d_i, k_j, v_j, dk_j, dv_j, p, dp)
        chip.store(dk, j, dk_j)
        chip.store(dv, j, dv_j)
    return with_trace((dq, dk, dv), chip, trace)
