"""Prefixes that many sequences share, in two levels, attended once for all of them and put together by `merge`.

Every sequence begins with the same system prompt; then comes one of some documents; then a question of its own. A token
of each is to be written. Each query sees all three parts, so what it gets is merged from three calls:

1. the prompt, with the queries of all sequences in one long tile: its keys are read once;
2. each document, with the queries of those that ask about it;
3. what each has of its own, from its cache.

The flat call reads prompt and document again for every sequence.

    python examples/shared_prefix.py [--prompt N] [--document N] [--questions N] [--device cpu|gpu]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from cupyflash import attention, merge
from cupyflash.arrays import array_module, on_host

Array = Any
DOCUMENTS, HEADS, KEY_HEADS, DIM, OWN = 2, 8, 2, 32, 24  # OWN: the most rows that a sequence has of its own


def in_levels(q: Array, prompt: Any, documents: Any, own: Any, lengths: Array) -> Array:
    """q (N, 1, Hq, D), sequences in the order of their documents. prompt: k and v (P, Hk, D) of all; documents: (number
    of documents, R, Hk, D); own: caches (N, OWN, Hk, D), of which `lengths` (N,) rows are filled."""
    n, groups = len(q), len(documents[0])
    of_all = attention(q.swapaxes(0, 1), *(x[None] for x in prompt), return_lse=True)  # q is (1, N, Hq, D)
    of_group = attention(q.reshape(groups, n // groups, *q.shape[2:]), *documents, return_lse=True)
    of_one = attention(q, *own, seqlens_k=lengths, return_lse=True)
    outs = [out.reshape(q.shape) for out, _ in (of_all, of_group, of_one)]
    lses = [lse.swapaxes(1, 2).reshape(n, HEADS, 1) for _, lse in (of_all, of_group, of_one)]
    return merge(outs, lses)[0]


def flat(xp: Any, q: Array, prompt: Any, documents: Any, own: Any, lengths: Array) -> Array:
    """The same in one call, on caches that hold everything."""
    n, groups = len(q), len(documents[0])
    caches = []
    for of_all, of_group, of_one in zip(prompt, documents, own):
        of_all = xp.broadcast_to(of_all, (n, *of_all.shape))
        caches.append(xp.concatenate([of_all, of_group.repeat(n // groups, axis=0), of_one], axis=1))
    return attention(q, *caches, seqlens_k=lengths + prompt[0].shape[0] + documents[0].shape[1])


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=300, help="rows that all share")
    parser.add_argument("--document", type=int, default=120, help="rows of a document")
    parser.add_argument("--questions", type=int, default=4, help="sequences that ask about each of two documents")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU if there is one")
    given = parser.parse_args(arguments)
    xp, rng, n = array_module(given.device), np.random.default_rng(0), DOCUMENTS * given.questions

    def draw(*shape: int) -> Array:
        return xp.asarray(rng.standard_normal(shape).astype(np.float32))

    q = draw(n, 1, HEADS, DIM)
    prompt = [draw(given.prompt, KEY_HEADS, DIM) for _ in "kv"]
    documents = [draw(DOCUMENTS, given.document, KEY_HEADS, DIM) for _ in "kv"]
    own = [draw(n, OWN, KEY_HEADS, DIM) for _ in "kv"]
    lengths = xp.asarray(rng.integers(0, OWN + 1, n).astype(np.int32))
    found = in_levels(q, prompt, documents, own, lengths)
    difference = float(np.abs(on_host(found - flat(xp, q, prompt, documents, own, lengths))).max())
    rows = int(on_host(lengths).sum())
    shared, all_rows = given.prompt + DOCUMENTS * given.document, n * (given.prompt + given.document)
    print(f"{DOCUMENTS} x {given.questions} sequences on {xp.__name__}: {shared + rows:,} rows of keys are read,")
    print(f"by the flat call {all_rows + rows:,}; the largest difference of results is {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
