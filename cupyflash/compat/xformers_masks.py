"""The block-diagonal attention biases of xformers.ops.fmha.attn_bias, with their names, constructors and attributes.

Sequences stand one after another, and each attends to keys of its own. What they mean is in `xformers_blocks`, which
takes those of xFormers too. Numbers are on a device and, as *_py, on the host.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..scalars import whole_number

if TYPE_CHECKING:
    from typing_extensions import Self

Lengths = Sequence[int] | torch.Tensor


class AttentionBias:
    """A mask that is known by its kind, not by its elements."""


@dataclass(eq=False)
class SeqLenInfo:
    """Where sequences begin among rows, and how long they are. padding: rows from one to the next, where all have as
    many."""

    seqstart: torch.Tensor
    seqstart_py: list[int]
    seqlen: torch.Tensor
    seqlen_py: list[int]
    padding: int | None = None

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlen_py, default=0)

    @property
    def min_seqlen(self) -> int:
        return min(self.seqlen_py, default=0)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """First row and the one behind the last of each sequence."""
        return zip(self.seqstart_py, map(sum, zip(self.seqstart_py, self.seqlen_py)))

    def to(self, device: Any) -> SeqLenInfo:
        return dataclasses.replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))


def _info(
    name: str, lengths: Lengths, device: Any, starts: Lengths | None = None, padding: int | None = None
) -> SeqLenInfo:
    held = _whole(name, lengths)
    if padding is not None:
        if any(n > padding for n in held):
            raise ValueError(f"{name} has {max(held)}; it must be at most kv_padding, {padding}")
        places = [n * padding for n in range(len(held) + 1)]
    elif starts is not None:
        places = _whole("kv_seqstarts", starts)
        if len(places) != len(held) + 1:
            raise ValueError(
                f"kv_seqstarts has {len(places)} numbers; it must have {len(held) + 1}, one more than {name}"
            )
    else:
        places = [0, *itertools.accumulate(held)]
    where = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    on_device = [torch.tensor(x, dtype=torch.int32, device=where) for x in (places, held)]
    return SeqLenInfo(on_device[0], places, on_device[1], held, padding)


def _whole(name: str, numbers: Lengths) -> list[int]:
    held = numbers.tolist() if isinstance(numbers, torch.Tensor) else list(numbers)
    whole = [n for n in map(whole_number, held) if n is not None and n >= 0]
    if len(whole) < len(held):
        raise ValueError(f"{name} is {held}; it must hold integers, 0 or more, one for each sequence")
    return whole


def _both(q_seqlen: Lengths, kv_seqlen: Lengths, device: Any, **of_keys: Any) -> dict[str, Any]:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(f"kv_seqlen has {len(kv_seqlen)} sequences; it must have as many as q_seqlen, {len(q_seqlen)}")
    return {
        "q_seqinfo": _info("q_seqlen", q_seqlen, device), "k_seqinfo": _info("kv_seqlen", kv_seqlen, device, **of_keys)
    }  # fmt: skip


def check_keys(name: str, n: Any, least: int) -> None:
    """ValueError where n is no number of keys that a window may have."""
    if (whole := whole_number(n)) is None or whole < least:
        raise ValueError(f"{name} is {n!r}; it must be a number of keys, {least} or more")


class _Window:
    _window_size: int

    def __post_init__(self) -> None:
        check_keys("window_size", self._window_size, 1)


@dataclass(eq=False)
class _Blocks(AttentionBias):
    q_seqinfo: Any
    k_seqinfo: Any

    def to(self, device: Any) -> Self:
        """The same, on another device."""
        tables = {"block_tables": self.block_tables.to(device)} if hasattr(self, "block_tables") else {}
        q = self.q_seqinfo.to(device)
        k = q if self.k_seqinfo is self.q_seqinfo else self.k_seqinfo.to(device)
        return dataclasses.replace(self, q_seqinfo=q, k_seqinfo=k, **tables)


@dataclass(eq=False)
class BlockDiagonalMask(_Blocks):
    """Sequences of q, (1, rows, ...), each with keys of its own, (1, rows of keys, ...)."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(cls, q_seqlen: Lengths, kv_seqlen: Lengths | None = None, *, device: Any = None) -> Self:
        """Of so many queries and keys each; kv_seqlen is q_seqlen unless given. On the GPU if there is one."""
        both = _both(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen, device)
        if both["q_seqinfo"].seqlen_py == both["k_seqinfo"].seqlen_py:
            both["k_seqinfo"] = both["q_seqinfo"]
        return cls(**both)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Of tensors (B, M, ...), whose M may differ; and these one after another, (1, rows, ...)."""
        mask = cls.from_seqlens(_rows_of(tensors), device=tensors[0].device)
        mask._batch_sizes = [len(x) for x in tensors]
        return mask, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The same of queries, keys and values."""
        sizes = [len(x) for x in tensors_q]
        for name, others in (("tensors_k", tensors_k), ("tensors_v", tensors_v)):
            if others is not None and (own := [len(x) for x in others]) != sizes:
                raise ValueError(f"{name} has batches of {own}; it must have those of tensors_q, {sizes}")
        rows = _rows_of(tensors_k)
        if tensors_v is not None and (own := _rows_of(tensors_v)) != rows:
            raise ValueError(f"tensors_v has {own} rows; it must have those of tensors_k, {rows}")
        mask = cls.from_seqlens(_rows_of(tensors_q), rows, device=tensors_q[0].device)
        mask._batch_sizes = sizes
        return mask, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of which (1, rows, ...) is made."""
        return _split(tensor, self.q_seqinfo, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return _split(tensor, self.k_seqinfo, self._batch_sizes)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("queries and keys have other lengths; call split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        of = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return of(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


def _rows_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(len(x))]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors])[None]


def _split(tensor: torch.Tensor, info: SeqLenInfo, sizes: Sequence[int] | None) -> list[torch.Tensor]:
    if tensor.shape[:1] != (1,) or tensor.shape[1] != sum(info.seqlen_py):
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)}; it must be (1, {sum(info.seqlen_py)}, ...), sequences one after "
            "another"
        )
    parts = tensor[0].split(info.seqlen_py)
    ends = list(itertools.accumulate(sizes or [1] * len(parts), initial=0))
    return [torch.stack(parts[a:b]) for a, b in itertools.pairwise(ends)]


@dataclass(eq=False)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """And each query sees the keys up to its own number."""


@dataclass(eq=False)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """And the last query of a sequence sees its last key, the one before it one less."""


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(_Window, BlockDiagonalCausalMask):
    """And of these keys the last `_window_size`."""

    _window_size: int = 0


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_Window, BlockDiagonalCausalFromBottomRightMask):
    """And of these keys the last `_window_size`."""

    _window_size: int = 0


@dataclass(eq=False)
class BlockDiagonalPaddedKeysMask(_Blocks):
    """Keys are caches of `kv_padding` rows, one after another, of which each sequence has filled some."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, causal_diagonal: Any = None, *,
        device: Any = None,
    ) -> Self:  # fmt: skip
        return cls(**_both(q_seqlen, kv_seqlen, device, padding=kv_padding))

    def make_paged(self, block_tables: torch.Tensor, page_size: int, paged_type: type[_Paged]) -> Any:
        """The same keys in pages, and the same window. ValueError where a mask of paged_type has none, or another."""
        _check_tables(block_tables)
        if not dataclasses.is_dataclass(paged_type):
            raise TypeError(f"paged_type is {paged_type!r}; it must be a class of block masks whose keys are in pages")
        window = {name: getattr(self, name) for name in _windows_of(self)}
        if list(window) != _windows_of(paged_type):
            raise ValueError(
                f"paged_type is {paged_type.__name__}; it must be one with the window of a {type(self).__name__}: "
                f"{', '.join(window) or 'none'}"
            )
        info = dataclasses.replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, info, block_tables, page_size, **window)


def _windows_of(mask: Any) -> list[str]:
    return [x.name for x in dataclasses.fields(mask) if "window" in x.name]


def _check_tables(x: Any) -> None:
    must = "it must be int32 or int64, (sequences, pages of one)"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"block_tables is a {type(x).__name__}; {must}")
    if x.dim() != 2 or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"block_tables is {x.dtype} of shape {tuple(x.shape)}; {must}")


class _WindowIsGiven:
    """It has no usual size."""

    @classmethod
    def from_seqlens(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{cls.__name__}.from_seqlens has no window; call from_seqlens_local with one")


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """And the last query stands on the last key."""


@dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(_WindowIsGiven, BlockDiagonalPaddedKeysMask):
    """And a query sees so many keys to the left and to the right of the one that it stands on."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, window_left: int, window_right: int, *,
        device: Any = None,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:  # fmt: skip
        both = _both(q_seqlen, kv_seqlen, device, padding=kv_padding)
        return cls(**both, window_left=window_left, window_right=window_right)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(_WindowIsGiven, _Window, BlockDiagonalPaddedKeysMask):
    """And a query sees the key that it stands on and those before it, `_window_size` in all."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, window_size: int, *, device: Any = None
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        return cls(**_both(q_seqlen, kv_seqlen, device, padding=kv_padding), _window_size=window_size)


@dataclass(eq=False)
class BlockDiagonalGappyKeysMask(_Blocks):
    """Keys of a sequence begin where `kv_seqstarts` says; behind them there may be others."""

    @classmethod
    def from_seqlens(cls, q_seqlen: Lengths, kv_seqstarts: Lengths, kv_seqlen: Lengths, *, device: Any = None) -> Self:
        return cls(**_both(q_seqlen, kv_seqlen, device, starts=kv_seqstarts))


@dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """And the last query stands on the last key."""


@dataclass(eq=False)
class _Paged(_Blocks):
    block_tables: torch.Tensor
    page_size: int


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """Keys are in pages of `page_size` rows, of which a line of `block_tables` names those of a sequence."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqlen: Lengths, block_tables: torch.Tensor, page_size: int, *,
        device: Any = None,
    ) -> Self:  # fmt: skip
        _check_tables(block_tables)
        padding = block_tables.shape[1] * page_size
        both = _both(q_seqlen, kv_seqlen, block_tables.device if device is None else device, padding=padding)
        return cls(both["q_seqinfo"], both["k_seqinfo"], block_tables, page_size)


@dataclass(eq=False)
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """And the last query stands on the last key."""


@dataclass(eq=False)
class PagedBlockDiagonalCausalLocalPaddedKeysMask(_WindowIsGiven, _Window, PagedBlockDiagonalPaddedKeysMask):
    """And a query sees the key that it stands on and those before it, `_window_size` in all."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_seqlen: Lengths, block_tables: torch.Tensor, page_size: int, window_size: int, *,
        device: Any = None,
    ) -> PagedBlockDiagonalCausalLocalPaddedKeysMask:  # fmt: skip
        mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen, kv_seqlen, block_tables, page_size, device=device
        )
        return cls(mask.q_seqinfo, mask.k_seqinfo, block_tables, page_size, window_size)
