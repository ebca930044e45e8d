"""What serving and packed training ask: the rows of the suites `decode`, `varlen`, `paged` and `latent`."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple


class Call(NamedTuple):
    """Queries and keys of each sequence. `held`: all of one length, "dense"; "packed"; in "caches"; in "pages" of
    `page` rows."""

    held: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    heads_k: int
    dim: int
    page: int = 0
    eight: str = ""  # dtype of k and v, where they are of 8 bits
    latent: int = 0  # columns of k that are v, which is left out then

    @property
    def causal(self) -> bool:
        return max(self.queries) > 1

    @property
    def even(self) -> bool:
        """Whether all sequences are of one length."""
        return len({*zip(self.queries, self.keys)}) == 1

    @property
    def cache_bytes(self) -> int:
        """Of K and V, as far as they are filled."""
        return (2 if self.eight or self.latent else 4) * sum(self.keys) * self.heads_k * self.dim

    @property
    def pairs(self) -> int:
        """Of a query and a key in a head that the mask leaves; the last query stands on the last key."""
        of = zip(self.queries, self.keys)
        return sum(n * m - n * (n - 1) // 2 if self.causal else n * m for n, m in of)

    @property
    def work(self) -> int:
        """Floating-point operations of a forward."""
        return 2 * self.heads * self.pairs * (self.dim + (self.latent or self.dim))

    def __str__(self) -> str:
        queries, keys = ({*x} for x in (self.queries, self.keys))
        rows = _span(queries) if self.queries == self.keys else f"{_span(queries)} on {_span(keys)}"
        pages = f", pages of {self.page}" if self.page else ""
        sizes = f"{self.heads}/{self.heads_k} x {self.dim}{f'/{self.latent}' * bool(self.latent)}"
        eight = f", {self.eight}" if self.eight else ""
        return f"{len(self.keys)} x {rows}, {sizes}{', causal' * self.causal}{pages}{eight}"


def _span(lengths: set[int]) -> str:
    return str(*lengths) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"


def lognormal(n: int, median: float, sigma: float, least: int, most: int) -> tuple[int, ...]:
    """Lengths as those of texts are spread; the same in every run."""
    draw = random.Random(n)
    return tuple(int(min(most, max(least, draw.lognormvariate(math.log(median), sigma)))) for _ in range(n))


def _tokens(batch: int, keys: int, heads: int, heads_k: int, dim: int) -> tuple[str, Call]:
    """A token of each sequence, on keys of one length: its row's name, and the call."""
    call = Call("dense", (1,) * batch, (keys,) * batch, heads, heads_k, dim)
    return f"{batch}x{keys}-{heads}/{heads_k}-d{dim}", call


_LLAMA = 32, 8, 128  # heads, heads of keys, dimension
_DENSE = dict(
    _tokens(*lengths, *sizes)
    for sizes, lengths in itertools.product(
        (_LLAMA, (32, 1, 128), (32, 32, 128), (64, 8, 64)),
        ((1, 16384), (1, 131072), (16, 4096), (16, 16384), (64, 4096)),
    )
)
_ALONE = dict(
    _tokens(*x) for x in (
        (1, 8192, 32, 1, 128), (4, 8192, 32, 1, 128), (1, 60000, 8, 1, 128), (1, 4096, 32, 8, 128),
        (2, 8192, 32, 8, 128), (1, 16384, 16, 1, 64), (1, 32768, 16, 2, 256),
    )
)  # fmt: skip
_RAGGED = {
    name: Call("caches", (1,) * len(keys), keys, *sizes)
    for name, keys, sizes in (
        ("long-32", (65536, *(256,) * 31), _LLAMA),
        ("ragged-64", lognormal(64, 2048, 1, 16, 16384), _LLAMA),
        ("ragged-128", lognormal(128, 512, 1, 16, 8192), _LLAMA),
        ("ragged-16", lognormal(16, 8192, 1, 16, 65536), (64, 8, 128)),
        ("ragged-64-32/32", lognormal(64, 1024, 1, 16, 8192), (32, 32, 128)),
        ("ragged-256", lognormal(256, 512, 1, 16, 4096), (64, 8, 64)),
        ("ragged-8", lognormal(8, 4096, 1, 16, 16384), _LLAMA),
        ("long-4", (65536, *(256,) * 3), _LLAMA),
        ("long-32-8/1", (65536, *(256,) * 31), (8, 1, 128)),
    )
}
_FEW = {
    f"{batch}x{n}on{keys}-{heads}/{heads_k}": Call("dense", (n,) * batch, (keys,) * batch, heads, heads_k, 128)
    for batch, n, keys, heads, heads_k in (
        (1, 4, 32768, 32, 8), (16, 4, 4096, 32, 8), (16, 8, 4096, 32, 8), (64, 2, 4096, 64, 8), (16, 16, 4096, 32, 32)
    )
}  # fmt: skip
_PACKED = {
    f"{name}-d{dim}": Call("packed", rows, rows, heads, heads, dim)
    for dim, heads in ((128, 16), (64, 32))
    for name, rows in {
        "8x2048": (2048,) * 8,
        "lognormal": lognormal(24, 665, 0.9, 16, 8192),
        "64x256": (256,) * 64,
        "long": (8192, *(128,) * 64),
        "short": lognormal(512, 28, 0.6, 8, 96),
    }.items()
}
_CHUNK = Call("packed", (2048, *(1,) * 31), (16384, *(4096,) * 31), *_LLAMA)
_TOKENS = lognormal(125, 2000, 0.8, 16, 8192)
_MIXED = {
    "chunk": _CHUNK,
    "chunk-last": _CHUNK._replace(queries=_CHUNK.queries[::-1], keys=_CHUNK.keys[::-1]),
    "chunk-many": Call("packed", (1024, 700, 300, *(1,) * 125), (9000, 700, 3000, *_TOKENS), *_LLAMA),
    "chunk-d64": _CHUNK._replace(heads=64, dim=64),
}
_PROMPTED = lognormal(60, 200, 0.9, 8, 1500)
_PROMPTS = {
    f"prompts-d{dim}": Call("packed", _PROMPTED, _PROMPTED, heads, 8, dim)
    for dim, heads in ((128, 32), (64, 32), (96, 64))
}
_IN_PAGES = {"16x4096": (4096,) * 16, "64x4096": (4096,) * 64, "ragged": _RAGGED["ragged-64"].keys}
_PAGED = {
    f"{name}-p{page}": Call("pages", (1,) * len(keys), keys, *_LLAMA, page)
    for (name, keys), page in itertools.product(_IN_PAGES.items(), (16, 64, 256))
}

_EIGHT = {
    f"{name}-fp8": call._replace(held="pages" if call.page else "caches", eight="float8_e4m3fn")
    for name, call in (_DENSE | _RAGGED | _PAGED).items()
    if name in ("16x16384-32/8-d128", "64x4096-32/8-d128", "1x131072-32/8-d128", "64x4096-64/8-d64", "ragged-64",
        "64x4096-p16")
}  # fmt: skip

_LATENT = {
    name: Call("pages" if page else "caches", (queries,) * len(keys), keys, heads, 1, 576, page, latent=512)
    for name, heads, keys, queries, page in (
        *((f"64x4096-h{heads}", heads, (4096,) * 64, 1, 0) for heads in (128, 16, 64, 8)),
        ("1x8192-h128", 128, (8192,), 1, 0),
        ("1x65536-h16", 16, (65536,), 1, 0),
        ("64x2on4096-h128", 128, (4096,) * 64, 2, 0),
        ("ragged-h128", 128, lognormal(128, 1110, 1, 16, 16384), 1, 0),  # 2048 on average
        *((f"64x4096-h{heads}-p64", heads, (4096,) * 64, 1, 64) for heads in (128, 16)),
    )
}

CALLS: dict[str, dict[str, Call]] = {
    "decode": _DENSE | _ALONE | _RAGGED | _FEW | _EIGHT,
    "varlen": _PACKED | _PROMPTS | _MIXED,
    "paged": _PAGED,
    "latent": _LATENT,
}
QUICK = (  # or how they begin
    "16x4096-", "1x131072-32/8", "1x16384-32", "64x4096-64/8", "long", "ragged-64", "ragged-p", "16x4on",
    "8x2048", "lognormal", "64x256-d128", "short-d128", "chunk", "16x16384-32/8-d128-fp8",
    "64x4096-h128", "64x4096-h16", "1x8192-h128",
)  # fmt: skip
# What `lines` sums up: the rows of a kind.
KINDS = {
    "a token, caches of one length": (*_DENSE,),
    "a token, few heads of keys": (*_ALONE,),
    "ragged caches": (*_RAGGED,),
    "2 to 16 queries": (*_FEW,),
    "caches of 8 bits": (*_EIGHT,),
    "packed, one length": tuple(name for name, x in _PACKED.items() if x.even),
    "packed, ragged": tuple(name for name, x in _PACKED.items() if not x.even),
    "prompts of heads in groups": (*_PROMPTS,),
    "a chunk beside tokens": (*_MIXED,),
    "pages": tuple(name for name, x in _PAGED.items() if x.even),
    "ragged pages": tuple(name for name, x in _PAGED.items() if not x.even),
    "latent, 64 and 128 heads": tuple(name for name, x in _LATENT.items() if x.heads >= 64),
    "latent, 8 and 16 heads": tuple(name for name, x in _LATENT.items() if x.heads < 64),
}
