"""Kernels that start while the one before them runs: which are launched so, and that they wait before they read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from backends import no_gpu
from kernel_cover import problem
from reference import state
from stand_in_cuda import Cuda
from test_launch import A100, H200, SPACE, Launched

from cupyflash.gpu import compiler, early
from cupyflash.gpu.append import NAME, Program
from cupyflash.gpu.device import Arch
from cupyflash.gpu.launch import Launcher
from cupyflash.gpu.plan import plan
from cupyflash.gpu.source import generate
from cupyflash.passes import BACKWARD, FORWARD


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What is launched early."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(early, "launch", lambda *given: found.append(given))
    return found


LONG: dict[str, Any] = {"seq_q": 1, "seq_k": 60_000, "batch": 1, "heads_q": 4, "heads_k": 4}


def launched(cuda: Cuda, arch: Arch, overlaps: bool, follows: bool, **fields: Any) -> Launched:
    found = Launched(cuda, arch, fields.pop("of", FORWARD), **fields)
    strides = {name: (640_000, 640, 64) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    functions: Any = [type("Function", (), {"ptr": 1000 + n}) for n, _ in enumerate(found.plan.launches)]
    launcher = Launcher(found.plan, functions, found.problem, strides, 0, overlaps)
    launcher([0] * len(launcher.slots), 77, SPACE, follows)
    return found


@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_what_combines_shares_starts_under_what_makes_them(
    family: str, cuda: Cuda, asked: list[tuple[int, ...]]
) -> None:
    plan = launched(cuda, H200, True, False, family=family, **LONG).plan
    assert [x.name for x in plan.launches] == ["attention_forward", "attention_combine"]
    assert [x.function for x in cuda.launches] == [1000]  # in the usual way: nobody knows what is before it
    combine = plan.launches[1]
    [(function, grid, threads, shared, stream, address)] = asked
    assert (function, grid, threads, shared, stream) == (1001, combine.grid, combine.threads, combine.shared_memory, 77)
    assert address == cuda.launches[0].table


def test_behind_an_append_all_of_a_forward_does(cuda: Cuda, asked: list[tuple[int, ...]]) -> None:
    launched(cuda, H200, True, True, **LONG)
    assert [x[0] for x in asked] == [1000, 1001] and not cuda.launches


def test_a_backward_starts_under_what_prepares_it(cuda: Cuda, asked: list[tuple[int, ...]]) -> None:
    launched(cuda, H200, True, True, of=BACKWARD)
    assert [x[0] for x in asked] == [1001]
    assert [x.function for x in cuda.launches] == [1000]  # waits for all before it: it writes what those may read


def test_what_does_not_wait_is_launched_as_ever(cuda: Cuda, asked: list[tuple[int, ...]]) -> None:
    """Families that have no such kernels, an older GPU, and where it is not possible."""
    for overlaps, arch, more in (
        (True, H200, {"of": BACKWARD, "family": "sm80"}), (True, H200, {"family": "simt"}), (True, A100, LONG),
        (False, H200, LONG), (False, H200, {"of": BACKWARD}),
    ):  # fmt: skip
        launched(cuda, arch, overlaps, True, **more)
    assert not asked and len(cuda.launches) >= 7


@pytest.mark.skipif(no_gpu() is None, reason="there is a GPU")
def test_without_a_driver_it_is_not_possible() -> None:
    assert not early.possible.__wrapped__()


READS = r"ld\.global|st\.global|red\.global|atom\.|cp\.async|ldmatrix"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_who_may_start_early_waits_before_it_reads_or_writes(arch: str) -> None:
    """In the order of the code; and lets the next one start."""
    pytest.importorskip("cuda.core")
    half, lengths = np.zeros((16, 1, 4, 64), "f2"), {"seqlens_k": np.zeros(16, "i4")}
    cache = np.zeros((16, 9000, 4, 64), "f2")
    seen = 0
    for asked in (
        problem("bfloat16", **LONG), state(half, cache, cache, **lengths), problem("float32", **LONG),
        state(half, cache.astype("i1"), cache.astype("i1"), **lengths),
    ):  # fmt: skip
        made = plan(asked, Arch.of(arch))
        code = ptx(generate(made), arch)
        for x in made.launches:
            waits, reads = (re.search(what, code[x.name]) for what in (r"griddepcontrol\.wait", READS))
            assert (waits is not None) == x.waits and reads
            assert waits is None or waits.start() < reads.start(), x.name
            seen += x.waits
        assert "griddepcontrol.launch_dependents" in code["attention_forward"]
    assert seen == 8
    made = plan(problem("bfloat16"), Arch.of("sm_90a"), BACKWARD)
    code = {x.name: ptx(generate(made), "sm_90a")[x.name] for x in made.launches}
    assert "griddepcontrol.launch_dependents" in code["attention_backward_prepare"]
    waits, reads = (re.search(what, code["attention_backward"]) for what in (r"griddepcontrol\.wait", READS))
    assert waits is not None and reads is not None and waits.start() < reads.start()
    program = Program("bfloat16", 8, "", False, (("seqlens_k", "int32"),))
    assert "griddepcontrol.launch_dependents" in ptx(program.source(), arch)[NAME]


def ptx(source: str, arch: str) -> dict[str, str]:
    """Of each kernel."""
    from cuda.bindings import nvrtc

    program, _, _ = compiler._nvrtc(source, arch)
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    text = bytes(size)
    nvrtc.nvrtcGetPTX(program.handle, text)
    return dict(re.findall(r"\.entry (\w+)\((.*?)\n}", text.decode(), re.DOTALL))


@pytest.mark.gpu
@pytest.mark.parametrize("eight", [False, True])
def test_the_same_bits(eight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call behind call, and in a graph: rows, lengths and turned queries that the launch before has written."""
    torch = pytest.importorskip("torch")
    from cupyflash import appending, attention_append
    from cupyflash.gpu import corridor

    def early_is(possible: bool) -> None:
        monkeypatch.setattr(early, "possible", lambda: possible)
        monkeypatch.setattr(appending, "_alike", {})
        corridor.forget()

    n, rows = 3, 5000
    q, new = torch.randn(n, 1, 8, 128, device="cuda").half(), torch.randn(n, 1, 2, 128, device="cuda").half()
    caches = torch.randn(2, n, rows, 2, 128, device="cuda").to(torch.float8_e4m3fn if eight else torch.half)
    angles, filled = torch.rand(rows, 64, device="cuda"), torch.tensor([4000, 0, 700], device="cuda")

    def steps(count: int = 6) -> Any:
        """Each with what the one before gave."""
        x, at = q, filled.clone()
        for _ in range(count):
            x = attention_append(x, new, x[:, :, ::4], *caches, at, rotary=(angles.cos(), angles.sin()), causal=True)
            at += 1
        return x

    early_is(False)
    start = caches.clone()
    want, left = steps(), caches.clone()
    early_is(True)
    caches.copy_(start)
    launches: list[Any] = []
    launch = early.launch
    monkeypatch.setattr(early, "launch", lambda *given: (launches.append(given), launch(*given)))
    assert torch.equal(steps(), want) and torch.equal(caches.view(torch.uint8), left.view(torch.uint8))
    assert len(launches) == 12
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps()
    for _ in range(20):
        q.normal_(), new.normal_()
        caches.copy_(start)
        graph.replay()
        got = out.clone()
        caches.copy_(start)
        early_is(False)
        assert torch.equal(got, steps())
        early_is(True)


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "heads", "dim"), [(300, 1, 128), (700, 8, 64), (200, 3, 256)])
def test_a_backward_gives_the_same_bits(length: int, heads: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards behind each other share their workspace, and each gives the next one its dout."""
    torch = pytest.importorskip("torch")
    from cupyflash import attention, attention_backward
    from cupyflash.gpu import corridor

    q, k, v, first = (torch.randn(2, length, heads, dim, device="cuda").bfloat16() for _ in range(4))
    out, lse = attention(q, k, v, causal=True, return_lse=True)

    def steps(count: int = 6) -> Any:
        dout, found = first, []
        for _ in range(count):
            found.append(attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True))
            dout = found[-1].dq
        return torch.stack([x for grads in found for x in grads[:3]])

    monkeypatch.setattr(early, "possible", lambda: False)
    corridor.forget()
    want = steps()
    monkeypatch.setattr(early, "possible", lambda: True)
    corridor.forget()
    graph = torch.cuda.CUDAGraph()
    assert torch.equal(steps(), want)
    with torch.cuda.graph(graph):
        got = steps()
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    from cupyflash.gpu import corridor

    corridor.forget()
