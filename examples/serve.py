"""A server of texts: continuous batching of a small random Llama, on NumPy or CuPy.

Requests of different lengths come over time. Each step is one pass of the model over tokens of many of them, packed:
prompts in chunks beside the newest tokens of others. Their keys and values lie in pages; requests that begin alike
share those (`Pages.fork`); where pages run out, the youngest request gives its own back and is put off. Every text is
the one that the same model writes alone, with no cache: the script checks that at the end.

    python examples/serve.py [--requests N] [--pages N] [--device cpu|gpu]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from cupyflash import Pages, attention, attention_append
from cupyflash.arrays import array_module, on_host

Array = Any
WORDS, LAYERS, HEADS, KEY_HEADS, DIM, LONGEST = 96, 2, 4, 2, 16, 512
PREFIXES = ("You are a helpful machine. Answer in rhymes. ", "Translate what follows into verse, line by line: ")
ASKED = ("why?", "the sea, the sea", "one two three four five six", "o", "a longer question, with commas, and an end.")


class Llama:
    """Tokens in, scores of the next ones out: rotary positions, shared key heads, gated layers; weights are random."""

    def __init__(self, xp: Any, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.xp, width = xp, HEADS * DIM

        def weight(rows: int, columns: int) -> Array:
            return xp.asarray(rng.standard_normal((rows, columns)).astype(np.float32) / rows**0.5)

        self.embed, self.read = weight(WORDS, width) * 8, weight(width, WORDS)
        self.layers = [
            {
                "q": weight(width, width), "kv": weight(width, 2 * KEY_HEADS * DIM), "out": weight(width, width),
                "gate": weight(width, 2 * width), "up": weight(width, 2 * width), "down": weight(2 * width, width),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        angles = np.arange(LONGEST)[:, None] * 1e4 ** (-np.arange(DIM // 2) / (DIM // 2))
        self.rotary = xp.asarray(np.cos(angles).astype(np.float32)), xp.asarray(np.sin(angles).astype(np.float32))

    def __call__(self, tokens: Array, attend: Any) -> Array:
        """Scores (T, WORDS) of what follows each of the tokens (T,); attend(layer, q, k, v) is its attention."""
        x = self.embed[tokens]
        for n, w in enumerate(self.layers):
            h = norm(x)
            k, v = (h @ w["kv"]).reshape(-1, 2, KEY_HEADS, DIM).swapaxes(0, 1)
            x = x + attend(n, (h @ w["q"]).reshape(-1, HEADS, DIM), k, v).reshape(x.shape) @ w["out"]
            h = norm(x)
            gate = h @ w["gate"]
            x = x + (gate / (1 + self.xp.exp(-gate)) * (h @ w["up"])) @ w["down"]
        return norm(x) @ self.read

    def alone(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens behind a prompt, each from all before it, densely."""
        text = list(prompt)
        cos, sin = self.rotary

        def attend(_: int, q: Array, k: Array, v: Array) -> Array:
            q, k = (turn(self.xp, x, cos[: len(x)], sin[: len(x)]) for x in (q, k))
            return attention(q[None], k[None], v[None], causal=True)[0]

        for _ in range(count):
            text.append(int(self(self.xp.asarray(text), attend)[-1].argmax()))
        return text[len(prompt) :]


def norm(x: Array) -> Array:
    return x * ((x * x).mean(axis=-1, keepdims=True) + 1e-6) ** -0.5


def turn(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    c, s = cos[:, None], sin[:, None]
    return xp.concatenate([a * c - b * s, a * s + b * c], axis=-1)


class Request:
    """A prompt, of which the first `shared` tokens are a prefix that others have too, and `count` tokens to be written
    behind it; it comes at a step. `sequence`: its name among pages, while it has some."""

    def __init__(self, number: int, comes: int, prompt: list[int], count: int, shared: int) -> None:
        self.number, self.comes, self.prompt, self.count, self.shared = number, comes, prompt, count, shared
        self.written: list[int] = []
        self.sequence: int | None = None

    @property
    def text(self) -> list[int]:
        return self.prompt + self.written

    @property
    def done(self) -> bool:
        return len(self.written) == self.count


class Server:
    """Requests wait, run, or are done. `step` is one pass of the model over at most `most` tokens of those that run."""

    def __init__(self, model: Llama, pages: int, page: int, most: int) -> None:
        pools = model.xp.zeros((2 * LAYERS, pages, page, KEY_HEADS, DIM), np.float32)
        self.model, self.pages, self.most = model, Pages(list(pools)), most
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # the oldest first
        self.prefixes: dict[tuple[int, ...], int] = {}  # sequences that hold a prefix for who comes later
        self.put_off = self.reused = 0

    def submit(self, request: Request) -> None:
        needed = -(-(len(request.prompt) + request.count) // self.pages.page)
        if needed > self.pages.count:
            raise ValueError(f"request {request.number} needs {needed} pages; there are {self.pages.count}")
        self.waiting.append(request)

    def step(self) -> int:
        """How many tokens went through the model."""
        while self.waiting and (not self.running or self._fits(self.waiting[0])):
            self._start(self.waiting.pop(0))
        chunks = self._chunks()
        if not chunks:
            return 0
        names = [request.sequence for request, _ in chunks]
        before = [self.pages.rows(name) for name in names]
        new = [count for _, count in chunks]
        room = self.pages.append(names, new)
        xp, pools = self.model.xp, self.pages.pools
        ends = np.cumsum([0, *new])
        offsets = xp.asarray(ends.astype(np.int32))
        tokens = [x for (request, n), at in zip(chunks, before) for x in request.text[at : at + n]]

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return attention_append(
                q, k, v, *pools[2 * layer : 2 * layer + 2], room.seqlens_k, page_table=room.page_table,
                cu_seqlens_q=offsets, rotary=self.model.rotary, causal=True, max_seqlen_q=max(new),
            )  # fmt: skip

        scores = self.model(xp.asarray(tokens), attend)
        best = on_host(scores[offsets[1:] - 1].argmax(axis=-1))
        for (request, n), at, token in zip(chunks, before, best.tolist()):
            if at + n == len(request.text):
                request.written.append(token)
            self._keep_prefix(request)
            if request.done:
                self._stop(request)
        return len(tokens)

    def _fits(self, request: Request) -> bool:
        """Whether there are pages for what it has by now, beside what those that run still have to put into some."""
        promised = [(x.sequence, len(x.text) - self.pages.rows(x.sequence)) for x in self.running]
        promised = self.pages.needed(*zip(*promised)) if promised else 0
        return promised + -(-len(request.text) // self.pages.page) <= self.pages.left

    def _start(self, request: Request) -> None:
        prefix = tuple(request.prompt[: request.shared])
        if prefix and prefix in self.prefixes:
            request.sequence = self.pages.fork(self.prefixes[prefix])
            self.reused += len(prefix)
        else:
            request.sequence = self.pages.allocate()
        self.running.append(request)

    def _chunks(self) -> list[tuple[Request, int]]:
        """Who goes on by how many tokens: first the oldest; who needs pages that are not there waits, and the youngest
        gives its own back."""
        while True:
            left, chunks = self.most, []
            for request in self.running:
                n = min(left, len(request.text) - self.pages.rows(request.sequence))
                if n:
                    chunks.append((request, n))
                left -= n
            if self.pages.needed([x.sequence for x, _ in chunks], [n for _, n in chunks]) <= self.pages.left:
                return chunks
            if self.prefixes:  # what is kept for who may come goes first
                self.pages.free(self.prefixes.pop(next(iter(self.prefixes))))
                continue
            youngest = self.running[-1]
            self._stop(youngest)
            self.waiting.insert(0, youngest)
            self.put_off += 1

    def _stop(self, request: Request) -> None:
        self.pages.free(request.sequence)
        request.sequence = None
        self.running.remove(request)

    def _keep_prefix(self, request: Request) -> None:
        prefix = tuple(request.prompt[: request.shared])
        if prefix and prefix not in self.prefixes and self.pages.rows(request.sequence) >= len(prefix):
            self.prefixes[prefix] = self.pages.fork(request.sequence, len(prefix))


def tokens_of(text: str) -> list[int]:
    return [(ord(x) - 32) % WORDS for x in text]


def requests(count: int, seed: int = 1) -> list[Request]:
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        prefix = PREFIXES[rng.integers(2)] if rng.random() < 0.7 else ""
        prompt = tokens_of(prefix + ASKED[rng.integers(len(ASKED))] * int(rng.integers(1, 4)))
        found.append(Request(number, int(rng.integers(0, 2 * count)), prompt, int(rng.integers(3, 30)), len(prefix)))
    return sorted(found, key=lambda x: x.comes)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pages", type=int, default=48, help="of the pool; few of them, and requests are put off")
    parser.add_argument("--page", type=int, default=16, help="rows of a page")
    parser.add_argument("--most", type=int, default=64, help="tokens of a step")
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU if there is one")
    given = parser.parse_args(arguments)
    xp = array_module(given.device)
    model = Llama(xp)
    server, coming = Server(model, given.pages, given.page, given.most), requests(given.requests)
    all_of_them, begin, last, steps, total = list(coming), time.perf_counter(), 0.0, 0, 0
    while coming or server.waiting or server.running:
        while coming and coming[0].comes <= steps:
            server.submit(coming.pop(0))
        total += server.step()
        steps += 1
        now = time.perf_counter()
        busy = bool(coming or server.waiting or server.running)
        if now - last > (0.1 if sys.stdout.isatty() else 1) or not busy:  # in a pipe a line a second, and the last
            done, used = sum(x.done for x in all_of_them), given.pages - server.pages.left
            text = (
                f"step {steps}: {done} of {given.requests} requests done, {len(server.running)} running, "
                f"{used} of {given.pages} pages, {total / (now - begin):,.0f} tokens/s"
            )
            print(text, end="\n" if not busy or not sys.stdout.isatty() else "\r", flush=True)
            last = now
    print(f"{server.reused} tokens of prefixes computed once for all, {server.put_off} times a request was put off")
    wrong = [x.number for x in all_of_them if x.written != model.alone(x.prompt, x.count)]
    print(f"{given.requests - len(wrong)} of {given.requests} texts are those of the model alone, on {xp.__name__}")
    return {"wrong": wrong, "steps": steps, "put off": server.put_off, "reused": server.reused}


if __name__ == "__main__":
    sys.exit(bool(main()["wrong"]))
