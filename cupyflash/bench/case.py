"""What is measured: the inputs of a call, and what a peer makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..passes import Pass
from ..tools.timing import Candidate


class Case(NamedTuple):
    """Inputs that everyone shares: PyTorch tensors (B, S, H, D).

    `scores` is what else `attention` is given, softcap, a score function and optional arrays by name; `wrt` names those
    of them, or of the arrays that the score function reads, whose gradients are wanted too. "ours", PyTorch's and
    FlexAttention know of these; who does not is found wrong where they are given.
    `visible` says of (b, h, i, j), tensors of integers, what a block mask among them does. `window`: (left, right) as
    of `attention`; "ours" and the FlashAttention packages know of it. With `latent` among the scores v is None.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    causal: bool
    scores: Mapping[str, Any] = MappingProxyType({})
    wrt: tuple[str, ...] = ()
    visible: Any = None
    window: tuple[int, int] | None = None

    @property
    def wanted(self) -> tuple[Any, ...]:
        """The arrays that `wrt` names."""
        arrays = {**self.scores, **self.scores.get("score_arrays", {})}
        return tuple(arrays[name] for name in self.wrt)

    def with_wanted(self, arrays: Iterable[Any]) -> Case:
        """The same with these in their places."""
        named, read = dict(zip(self.wrt, arrays)), self.scores.get("score_arrays", {})
        scores = {**self.scores, **{name: x for name, x in named.items() if name not in read}}
        if read:
            scores["score_arrays"] = {name: named.get(name, x) for name, x in read.items()}
        return self._replace(scores=scores)


Prepare = Callable[[Case, Pass], Candidate]  # (case, of) -> what is timed: (out,) or (dq, dk, dv, those of wrt)


def make_case(
    batch: int,
    seq: int,
    heads: int,
    dim: int,
    causal: bool,
    dtype: str,
    seed: int,
    device: str = "cuda",
    *,
    seq_k: int | None = None,
    heads_k: int | None = None,
    dim_v: int | None = None,
    window: tuple[int, int] | None = None,
) -> Case:
    """Random normal inputs (zeros would run faster than real data does). K and V are as Q where nothing else is
    said."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    of_queries, of_keys = (batch, seq, heads), (batch, seq_k or seq, heads_k or heads)
    shapes = (*of_queries, dim), (*of_keys, dim), (*of_keys, dim_v or dim), (*of_queries, dim_v or dim)
    q, k, v, dout = (torch.randn(shape, **options) for shape in shapes)
    return Case(q, k, v, dout, causal, window=window)
