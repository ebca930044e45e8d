"""How explain says what it has found."""

from __future__ import annotations

from typing import Any

from ..problem import ARRAY_RULES, AttentionProblem


def queries(p: AttentionProblem, rank: int) -> str:
    of = _as_given(rank, " x ", *_rows_of_q(p), p.heads_q, p.dim)
    return f"{of} {p.dtype} {_axes(p, rank)}"


def keys_and_values(p: AttentionProblem, rank: int) -> str:
    columns = f"{p.dim}, {p.dim_v}" if p.dim_v != p.dim else p.dim
    columns = columns if p.latent is None else f"{p.dim}, v the first {p.dim_v}"
    of = _as_given(rank, " x ", *_rows_of_k(p), p.heads_k, columns)
    return f"{of} {p.cache_dtype}" if p.cache_dtype else of


def mask(p: AttentionProblem) -> str:
    parts = [] if p.causal is None else [f"causal ({p.causal.replace('_', ' ')})"]
    left, right = ("all" if n is None else n for n in (p.left, p.right))
    if p.left is not None or (p.right is not None and p.causal is None):
        parts.append(f"window ({left} keys to the left, {right} to the right)")
    parts += ["block mask"] * (p.block_mask is not None)
    parts += [ARRAY_RULES[x.name].label for x in p.given if x.dtype == "bool"]
    parts += [f"{ARRAY_RULES[x.name].label} read by kernels" for x in p.given if ARRAY_RULES[x.name].placed]
    share = p.visible / max(1, p.seq_q * p.seq_k)
    return (", ".join(parts) or "none") + ("" if is_a_bound(p) else f": {share:.1%} of the scores are computed")


def is_a_bound(p: AttentionProblem) -> bool:
    """Whether what is counted of a problem is the most that may be computed."""
    return p.shifts or p.block_mask is not None


def _rows_of_q(p: AttentionProblem) -> tuple[int, ...]:
    return (p.batch, p.seq_q) if p.rows_q is None else (p.rows_q,)


def _rows_of_k(p: AttentionProblem) -> tuple[int, ...]:
    return (p.pages or 0, p.page) if p.page is not None else (p.batch, p.seq_k) if p.rows_k is None else (p.rows_k,)


def _as_given(rank: int, between: str, *axes: Any) -> str:
    """Without those that an array of fewer dimensions has not."""
    return between.join(map(str, {4: axes, 3: axes[1:], 2: axes[1::2]}[rank]))


def _axes(p: AttentionProblem, rank: int) -> str:
    """What the numbers of q are, and how those of k and v are known."""
    if not p.ragged:
        named = _as_given(rank, ", ", "batch", "sequence", "heads", "dim")
        heads = f"{p.heads_q} head{'s' * (p.heads_q != 1)}"
        return f"({named})" + {4: "", 3: f": no batch, {heads}", 2: ": no batch, no heads"}[rank]
    own = ", ".join(ARRAY_RULES[x.name].label for x in p.given if ARRAY_RULES[x.name].ragged)
    rows = "rows" if p.rows_q is not None else "sequences, rows"
    return f"({rows}, heads, dim) of {p.batch} sequences, by {own}"


def scores(p: AttentionProblem) -> str:
    parts = [] if p.softcap is None else [f"soft cap {p.softcap:g}"]
    parts += [] if p.score is None else [f"score function {p.score}"]
    rules = [ARRAY_RULES[x.name] for x in p.given if x.dtype != "bool" and x.name != "seed"]
    parts += [rule.label for rule in rules if not (rule.ragged or rule.placed)]
    return ", ".join(parts + [f"dropout {p.dropout:g}"] * (p.dropout > 0))


def resources(registers: int | None, spilled: int | None, shared_memory: int | None) -> str:
    if registers is None:
        return "unknown"
    spills = f"{spilled} bytes spilled" if spilled else "no spills"
    return f"{registers} registers, {spills}, {si(shared_memory or 0)}B of shared memory"


def plain(value: bool | float) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def si(n: float, base: int = 1024) -> str:
    """A number with the prefix that leaves 1 to 4 digits: 2.5 Ki (base 1024) or 2.6 k (base 1000)."""
    prefix, larger = "", iter("kMGTPE")
    while n >= base and prefix != "E":
        n, prefix = n / base, next(larger)
    i = "i" if base == 1024 and prefix else ""
    return f"{n:,.4g} {prefix.upper() if i else prefix}{i}"


def of_which(optional: dict[str, int]) -> str:
    return f", of which {', '.join(f'{name} {si(size)}B' for name, size in optional.items())}" if optional else ""
