"""Errors on every rank or on none: before anything is sent, the ranks compare what they were asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .groups import Group

_TEXT = 4096  # bytes of what a rank has to say where there is a difference


def agree(groups: Sequence[Group], said: dict[str, str], error: Exception | None) -> None:
    """Raise `error`, that of another rank, or what the first difference is, on all ranks; do nothing where there is
    none. `said`: what this rank was asked for, by the name of the argument."""
    text = "\n".join(f"{name}\t{value}" for name, value in said.items())
    own = _digest("error" if error is not None else text, error)
    if error is None and all(not x.eager and own in x.known for x in groups):
        return
    other: Exception | None = None
    for group in groups:
        found = error if error is not None else other
        digests = group.all_gather(np.frombuffer(_digest(text, found), np.uint8))
        if all((x == digests[0]).all() for x in digests) and found is None:
            continue
        texts = group.all_gather(_padded(f"!{_brief(found)}" if found is not None else f"={text}"))
        if found is None:
            other = _difference(group.rank, [bytes(x).rstrip(b"\0").decode(errors="ignore") for x in texts])
    if error is not None:
        raise error
    if other is not None:
        raise other
    for x in groups:
        if not x.eager:
            x.known.add(own)


def _digest(text: str, error: Exception | None) -> bytes:
    """64 bytes, of which the first says whether there is an error."""
    return bytes([error is not None]) + hashlib.sha512(text.encode()).digest()[1:]


def _padded(text: str) -> np.ndarray:
    some = text.encode()[:_TEXT]
    return np.frombuffer(some + bytes(_TEXT - len(some)), np.uint8)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}\t{error}"


def _difference(rank: int, texts: list[str]) -> Exception | None:
    """What another rank says that is an error, or that is not said here."""
    for other, text in enumerate(texts):
        if other != rank and text.startswith("!"):
            kind, _, message = text[1:].partition("\t")
            named = {"TypeError": TypeError, "NotImplementedError": NotImplementedError}.get(kind, ValueError)
            return named(message if message.startswith("rank ") else f"rank {other} of the group: {message}")
    said = [dict(x.split("\t", 1) for x in text[1:].splitlines() if "\t" in x) for text in texts]
    mine = said[rank]
    for other, theirs in enumerate(said):
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return _named(name, mine.get(name), theirs.get(name), rank, other)
    return None


def _named(name: str, mine: str | None, theirs: str | None, rank: int, other: int) -> Exception:
    here, there = (("not given" if x is None else x) for x in (mine, theirs))
    return ValueError(f"{name} is {here} on rank {rank} and {there} on rank {other}; it must be the same on all ranks")
