"""What each process of tests/test_parallel_gpus.py does: cases of a sequence over two GPUs, beside one GPU and float64.

python gpus_parallel.py KIND NUMBER OF FOLDER PORT: its results are in FOLDER/KIND-NUMBER.json. KIND: simulated (ranks
are threads on one GPU, and this process takes each OF-th case), torch, cupy (rank NUMBER of 2), jax.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash import attention, attention_backward, parallel
from cupyflash import block_mask as whole_mask
from cupyflash.parallel import Rows

SIZE = 2
Case = dict[str, Any]


def _table(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
    return s + t[h, i // 64, j // 64] * (b + 1)


def _documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 300 == j // 300) & (j <= i)


KEYS: Case = {"exchange": "keys"}
HEADS: Case = {"exchange": "heads"}
OF_QUERIES = ("out", "lse", "dq")  # of dk and dv where no queries are dealt out in shares, as of few rows
CASES: dict[str, Case] = {
    "keys causal": KEYS | {"what": {"causal": True}, "groups": 2},
    # Beside one GPU alone, for which float64 on the host would take long.
    "keys 16k": KEYS | {"what": {"causal": True}, "groups": 2, "length": 16384, "dim": 128, "judge": "one"},
    "keys full": KEYS | {"what": {}, "groups": 4, "batch": 2},
    "keys window": KEYS | {"what": {"causal": True, "window": (300, None)}, "rows": "contiguous"},
    "keys window both ways": KEYS | {"what": {"window": (200, 40)}},
    "keys uneven": KEYS | {"what": {"causal": True}, "length": 1000, "batch": 2, "groups": 2},
    "keys float16, d 128": KEYS | {"what": {"causal": True}, "dtype": "float16", "dim": 128, "groups": 2},
    "keys float32": KEYS | {"what": {"causal": True}, "dtype": "float32"},
    "keys float64": KEYS | {"what": {"causal": True}, "dtype": "float64", "length": 640},
    "keys dropout": KEYS | {"what": {"causal": True, "dropout": 0.2, "seed": 3}, "groups": 2},
    "keys alibi": KEYS | {"what": {"causal": True}, "arrays": ("alibi_slopes",)},
    "keys sinks, softcap": KEYS | {"what": {"causal": True, "softcap": 5.0}, "arrays": ("sinks",)},
    "keys bias": KEYS | {"what": {}, "arrays": ("bias",)},
    "keys bias of heads, mask": KEYS | {"what": {"causal": True}, "arrays": ("bias of heads", "key_mask")},
    "keys table": KEYS | {"what": {"causal": True, "score": _table}, "arrays": ("t",)},
    "keys documents": KEYS | {"what": {}, "blocks": True, "rows": "balanced"},
    "keys stretches": KEYS | {"what": {"causal": True}, "stretches": 2},
    "keys dlse": KEYS | {"what": {"causal": True}, "arrays": ("dlse",)},
    "heads causal": HEADS | {"what": {"causal": True}, "groups": 2, "batch": 2, "bits": OF_QUERIES},
    "heads uneven": HEADS | {"what": {"causal": True}, "length": 1000, "rows": "contiguous", "bits": OF_QUERIES},
    "heads short": HEADS | {"what": {"causal": True}, "length": 510, "groups": 2, "bits": (*OF_QUERIES, "dk", "dv")},
    "heads dropout, alibi": HEADS | {"what": {"causal": True, "dropout": 0.2, "seed": 3}, "arrays": ("alibi_slopes",)},
    "heads table, sinks": HEADS | {"what": {"causal": True, "score": _table}, "arrays": ("t", "sinks")},
    "usual": {"what": {"causal": True}},
}  # fmt: skip
IN_CUPY = ("keys causal", "keys uneven", "keys float16, d 128", "keys dropout", "keys bias", "heads causal", "usual")
IN_AUTOGRAD = ("keys causal", "keys bias", "keys table", "heads dropout, alibi")

IN_JAX: dict[str, Case] = {
    "heads causal": HEADS | {"what": {"causal": True}},
    "heads float16": HEADS | {"what": {"causal": True}, "dtype": "float16", "batch": 2},
    "keys causal": KEYS | {"what": {"causal": True}, "allowed": 1.7},
    "keys window": KEYS | {"what": {"window": (200, 40)}, "allowed": 1.7},
    "keys dropout": KEYS | {"what": {"causal": True, "dropout": 0.2, "seed": 3}, "allowed": 1.7},
}


class Problem:
    """The whole in NumPy, of float64 that the case's dtype has."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(sum(map(ord, repr(sorted(case)))))
        self.case, self.length = case, case.get("length", 1024)
        dim, hq, hk = case.get("dim", 64), 8, 4
        self.dtype = case.get("dtype", "bfloat16")
        draw = lambda *shape: self.rounded(rng.standard_normal(shape))
        s, b = self.length, case.get("batch", 1)
        self.q, self.k, self.v, self.dout = (draw(b, s, h, dim) for h in (hq, hk, hk, hq))
        named = case.get("arrays", ())
        made: dict[str, Callable[[], np.ndarray]] = {
            "alibi_slopes": lambda: rng.random(hq).astype("f4").astype("f8"),
            "sinks": lambda: rng.standard_normal(hq).astype("f4").astype("f8"),
            "bias": lambda: draw(1, hq, s, s),
            "bias of heads": lambda: draw(1, hq, 1, s),
            "key_mask": lambda: rng.random((b, s)) < 0.7,
            "t": lambda: rng.standard_normal((hq, 16, 16)).astype("f4").astype("f8"),
            "dlse": lambda: rng.standard_normal((b, hq, s)).astype("f4").astype("f8"),
        }
        self.arrays = {name: made[name]() for name in named}
        kind, size = case.get("rows", "zigzag"), SIZE
        self.rows = (
            Rows.balanced(s, size, np.arange(s) % 300 + 1.0, chunks=2)
            if kind == "balanced"
            else getattr(Rows, kind)(s, size)
        )

    def rounded(self, x: np.ndarray) -> np.ndarray:
        import ml_dtypes

        return x.astype(getattr(ml_dtypes, self.dtype, self.dtype)).astype(np.float64)

    @property
    def wrt(self) -> list[str]:
        known = {"bias of heads": "bias"}
        return [known.get(x, x) for x in self.arrays if x not in ("key_mask", "dlse")]

    def given(self, put: Callable[[str, np.ndarray], Any], rank: int | None = None) -> tuple[dict[str, Any], Any]:
        """Options with arrays, those of a rank; and dlse."""
        options, dlse = dict(self.case["what"]), None
        for name, x in self.arrays.items():
            if rank is not None and name in ("bias", "dlse"):
                x = self.rows.take(x, rank, 2)
            found = put(name, x)
            if name == "dlse":
                dlse = found
            elif name == "t":
                options["score_arrays"] = {"t": found}
            else:
                options["bias" if name == "bias of heads" else name] = found
        return options, dlse

    def operands(self, put: Callable[[str, np.ndarray], Any], rank: int | None = None) -> list[Any]:
        """dout, q, k, v."""
        some = {"dout": self.dout, "q": self.q, "k": self.k, "v": self.v}
        return [put(n, x if rank is None else self.rows.take(x, rank)) for n, x in some.items()]

    def one(self, put: Callable[[str, np.ndarray], Any]) -> dict[str, Any]:
        """Of one device."""
        (dout, q, k, v), (options, dlse) = self.operands(put), self.given(put)
        if self.case.get("blocks"):
            options["block_mask"] = whole_mask(_documents, shape=(self.length, self.length), like=q)
        out, lse = attention(q, k, v, return_lse=True, **options)
        more = {"dlse": dlse, "wrt": self.wrt, "deterministic": True}
        return self.named(out, lse, attention_backward(dout, q, k, v, out, lse, **more, **options))

    def shared(
        self, group: Any, rank: int, put: Callable[[str, np.ndarray], Any], reduce: bool = True
    ) -> dict[str, Any]:
        """Of a rank."""
        (dout, q, k, v), (options, dlse) = self.operands(put, rank), self.given(put, rank)
        how = {"rows": self.rows} | {x: self.case[x] for x in ("exchange", "groups", "stretches") if x in self.case}
        if self.case.get("blocks"):
            options["block_mask"] = parallel.block_mask(_documents, self.rows, group, like=q)
        out, lse = parallel.attention(q, k, v, group, return_lse=True, **how, **options)
        more = {"dlse": dlse, "wrt": self.wrt, "deterministic": True, "reduce": True}
        grads = parallel.attention_backward(dout, q, k, v, out, lse, group, **how, **more, **options)
        return self.named(out, lse, grads)

    def named(self, out: Any, lse: Any, grads: Any) -> dict[str, Any]:
        found = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        return found | {f"d{name}": x for name, x in grads.of_arrays.items()}

    def own(self, found: dict[str, Any], rank: int) -> dict[str, Any]:
        """A rank's part of the whole."""
        axes = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1} | ({"dbias": 2} if "bias" in self.arrays else {})
        return {n: self.rows.take(x, rank, axes[n]) if n in axes else x for n, x in found.items()}


def judged(problem: Problem, rank: int, found: dict[str, Any], one: dict[str, Any], exact: dict[str, Any]) -> Any:
    """Of each result: whether it has the bits of one GPU's, and errors of both, root mean squares."""
    verdict = {}
    one, exact = problem.own(one, rank), problem.own(exact, rank)
    for name in found:
        ours, theirs, true = (np.asarray(y[name]).astype(np.float64) for y in (found, one, exact))
        seen = np.isfinite(true)
        assert (np.isfinite(ours) == seen).all(), f"{name} has infinities or NaN of its own"
        assert ours.shape == true.shape, f"{name} has shape {ours.shape}, not {true.shape}"
        off = [float(np.sqrt(np.mean((y[seen] - true[seen]) ** 2))) if seen.any() else 0.0 for y in (ours, theirs)]
        size = float(np.sqrt(np.mean(true[seen] ** 2))) if seen.any() else 0.0
        verdict[name] = {
            "bits": bool((ours[seen] == theirs[seen]).all()),
            "off": off[0],
            "off of one": off[1],
            "size": size,
        }
    return verdict


class Results:
    def __init__(self, folder: str, name: str) -> None:
        self.path, self.rows, self.began = Path(folder, f"{name}.json"), {}, time.time()

    def kept(self, case: str) -> Path:
        return self.path.with_name(f"{case}.npz")

    def add(self, case: str, run: Callable[[], Any]) -> None:
        start = time.time()
        try:
            self.rows[case] = {"found": run()}
        except BaseException:  # noqa: BLE001 - a test says it
            self.rows[case] = {"error": traceback.format_exc()[-1500:]}
        self.rows[case]["seconds"] = round(time.time() - start, 2)
        self.path.write_text(json.dumps(self.rows))
        print(f"{time.time() - self.began:6.1f} s {case}", flush=True)


def in_torch(device: str) -> tuple[Callable[..., Any], Callable[[Any], np.ndarray]]:
    """To tensors of a problem, and back."""
    import torch

    def put(problem: Problem) -> Callable[[str, np.ndarray], Any]:
        def of(name: str, x: np.ndarray) -> Any:
            wide = torch.float64 if problem.dtype == "float64" else torch.float32
            kind = getattr(torch, problem.dtype)
            if name in ("alibi_slopes", "sinks", "t", "dlse"):
                kind = wide
            return torch.from_numpy(x).to(device, torch.bool if x.dtype == bool else kind)

        return of

    return put, lambda x: x.detach().double().cpu().numpy()


def in_cupy() -> tuple[Callable[..., Any], Callable[[Any], np.ndarray]]:
    import cupy
    import ml_dtypes

    def put(problem: Problem) -> Callable[[str, np.ndarray], Any]:
        def of(name: str, x: np.ndarray) -> Any:
            wide = "f8" if problem.dtype == "float64" else "f4"
            kind = (
                wide
                if name in ("alibi_slopes", "sinks", "t", "dlse")
                else getattr(ml_dtypes, problem.dtype, problem.dtype)
            )
            return cupy.asarray(x if x.dtype == bool else x.astype(kind))

        return of

    return put, lambda x: cupy.asnumpy(x).astype(np.float64)


def whole(problem: Problem, put: Any, get: Any, kept: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of one GPU, and in float64, kept in a file."""
    one = {n: get(x) for n, x in problem.one(put(problem)).items()}
    if problem.case.get("judge") == "one":
        return one, one
    if kept is not None and kept.exists():
        return one, dict(np.load(kept))
    exact = problem.one(lambda name, x: x)
    if kept is not None:
        part = kept.with_name(f"{os.getpid()}-{kept.name}")
        np.savez(part, **exact)
        part.rename(kept)
    return one, exact


def placed(number: int) -> str:
    """On which device a process is; without a GPU this file can be tried on the CPU, over gloo."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    torch.cuda.set_device(number % torch.cuda.device_count())
    return f"cuda:{torch.cuda.current_device()}"


def simulated(number: int, of: int, results: Results) -> None:
    device = placed(number)
    put, get = in_torch(device)
    for case in list(CASES)[number::of]:

        def run(case: str = case) -> Any:
            problem = Problem(CASES[case])
            one, exact = whole(problem, put, get, results.kept(case))

            def work(group: Any) -> Any:
                placed(number)  # devices are current for a thread
                return {n: get(x) for n, x in problem.shared(group, group.rank, put(problem)).items()}

            found = parallel.simulated(SIZE).run(work)
            return [judged(problem, r, found[r], one, exact) for r in range(SIZE)]

        results.add(case, run)


def torch_ranks(rank: int, port: str, results: Results) -> None:
    from torch import distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    device = placed(rank)
    distributed.init_process_group("gloo" if device == "cpu" else "nccl", rank=rank, world_size=SIZE)
    put, get = in_torch(device)
    for case in list(CASES):

        def run(case: str = case) -> Any:
            problem = Problem(CASES[case])
            found = {n: get(x) for n, x in problem.shared(None, rank, put(problem)).items()}
            return judged(problem, rank, found, *whole(problem, put, get, results.kept(case)))

        results.add(case, run)
    for case in IN_AUTOGRAD:
        results.add(f"autograd {case}", lambda case=case: autograd(case, rank, put, get, results))
    if device == "cpu":
        os._exit(0)
    results.add("refused", lambda: refused(rank))
    results.add("memory", lambda: memory(rank))
    results.add("graph", lambda: graph(rank))
    os._exit(0)


def _gradient(name: str) -> str:
    return "dscore_arrays['t']" if name == "t" else f"d{name}"


def autograd(case: str, rank: int, put: Any, get: Any, results: Results) -> Any:
    """Gradients that autograd finds, of what all share summed over the ranks."""
    from torch import distributed

    problem = Problem(CASES[case])
    of = put(problem)
    dout, *own = problem.operands(of, rank)
    options, _ = problem.given(of, rank)
    leaves = dict(zip("qkv", (x.requires_grad_() for x in own)))
    for name in problem.wrt:
        leaves[name] = (options["score_arrays"][name] if name == "t" else options[name]).requires_grad_()
    how = {"rows": problem.rows} | {x: problem.case[x] for x in ("exchange", "groups") if x in problem.case}
    out, lse = parallel.attention(*own, **how, **options, return_lse=True)
    out.backward(dout)
    for name in problem.wrt:
        if not (name == "bias" and "bias" in problem.arrays):
            distributed.all_reduce(leaves[name].grad)
    found = {"out": get(out), "lse": get(lse)} | {_gradient(n): get(x.grad) for n, x in leaves.items()}
    return judged(problem, rank, found, *whole(problem, put, get, results.kept(case)))


def refused(rank: int) -> list[str]:
    """What both ranks say of calls that are wrong on one or on both."""
    import torch

    x, rows = torch.ones(1, 128, 4, 64, device=f"cuda:{rank}", dtype=torch.float16), Rows.contiguous(256, SIZE)
    said = []
    for call in (
        lambda: parallel.attention(x.cpu(), x.cpu(), x.cpu(), rows=rows),
        lambda: parallel.attention(x, x, x, rows=rows, scale=1.0 + rank),
        lambda: parallel.attention(x, x, x, rows=rows, window=(-1, 0) if rank else None),
        lambda: parallel.attention(x[:, :, :3], x[:, :, :3], x[:, :, :3], rows=rows, exchange="heads"),
    ):
        try:
            call()
            said.append("nothing")
        except Exception as error:  # noqa: BLE001 - a test reads it
            said.append(f"{type(error).__name__}: {error}")
    return said


def memory(rank: int) -> list[int]:
    """Bytes that are held after 100 calls and after 1,000."""
    import torch

    x, rows = torch.ones(1, 256, 4, 64, device=f"cuda:{rank}", dtype=torch.float16), Rows.contiguous(512, SIZE)
    held = []
    for n in range(1000):
        parallel.attention(x, x, x, rows=rows, exchange=("keys", "heads")[n % 2], groups=2)
        if n + 1 in (100, 1000):
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    return held


def graph(rank: int) -> list[float]:
    """How far a CUDA graph of attention with its transfers is off from the call, for new inputs."""
    import torch

    device, rows, off = f"cuda:{rank}", Rows.zigzag(1024, SIZE), []
    for exchange in ("keys", "heads"):
        held = [torch.randn(1, 512, 4, 64, device=device).half() for _ in range(3)]
        how = {"rows": rows, "exchange": exchange, "causal": True, "groups": 2}
        with torch.no_grad():
            parallel.attention(*held, **how)
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                out = parallel.attention(*held, **how)
            for x in held:
                x.copy_(torch.randn_like(x))
            captured.replay()
            off.append(float((out - parallel.attention(*held, **how)).abs().max()))
    return off


def cupy_ranks(rank: int, port: str, results: Results) -> None:
    import cupy
    from cupyx.distributed import NCCLBackend

    cupy.cuda.Device(rank).use()
    group: Any = NCCLBackend(SIZE, rank, host="127.0.0.1", port=int(port))
    put, get = in_cupy()
    for case in IN_CUPY:

        def run(case: str = case) -> Any:
            problem = Problem(CASES[case])
            found = {n: get(x) for n, x in problem.shared(group, rank, put(problem)).items()}
            return judged(problem, rank, found, *whole(problem, put, get, results.kept(case)))

        results.add(case, run)

    def merged() -> Any:
        rng = np.random.default_rng(1)
        q, k, v = (cupy.asarray(rng.standard_normal((2, n, 4, 64)).astype("f2")) for n in (1, 512, 512))
        own = slice(rank * 256, rank * 256 + 256)
        out, lse = parallel.merge(*attention(q, k[:, own], v[:, own], return_lse=True), group._comm)
        one = attention(q, k, v, return_lse=True)
        return [float(abs(x.astype("f4") - y.astype("f4")).max()) for x, y in zip((out, lse), one)]

    results.add("merge", merged)
    os._exit(0)


def jax_devices(results: Results) -> None:
    import functools

    import jax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from cupyflash.jax import attention as one_attention
    from cupyflash.jax import parallel as over

    mesh, spec = Mesh(np.array(jax.devices()[:SIZE]), ("sp",)), P(None, "sp")
    for name, case in IN_JAX.items():

        def run(case: Case = case) -> Any:
            problem, options = Problem(case), case["what"]
            exchange, dtype = case["exchange"], problem.dtype
            rows, order = problem.rows, np.concatenate([problem.rows.positions(r) for r in range(SIZE)])
            dout, *x = (jnp.asarray(a).astype(dtype) for a in (problem.dout, problem.q, problem.k, problem.v))
            placed = [jax.device_put(a[:, order], NamedSharding(mesh, spec)) for a in (dout, *x)]
            each = jax.shard_map(
                functools.partial(over.attention, axis="sp", rows=rows, exchange=exchange, **options),
                mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
            )  # fmt: skip

            def both(f: Any) -> Any:
                def run(dout: Any, *x: Any) -> Any:
                    out, pull = jax.vjp(f, *x)
                    return out, *pull(dout)

                return jax.jit(run)

            names = ("out", "dq", "dk", "dv")
            get = lambda a: np.asarray(a).astype(np.float64)
            found = dict(zip(names, (get(a)[:, np.argsort(order)] for a in both(each)(*placed))))
            one = dict(zip(names, map(get, both(functools.partial(one_attention, **options))(dout, *x))))
            problem.rows = Rows.contiguous(problem.length, 1)
            exact = problem.one(lambda name, a: a)
            return judged(problem, 0, found, one, exact)

        results.add(name, run)


def main(kind: str, number: str, of: str, folder: str, port: str) -> None:
    results = Results(folder, f"{kind}-{number}")
    if kind == "simulated":
        simulated(int(number), int(of), results)
    elif kind == "torch":
        torch_ranks(int(number), port, results)
    elif kind == "cupy":
        cupy_ranks(int(number), port, results)
    else:
        jax_devices(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
