"""Programs that are compiled while another is: which, when, and that nothing depends on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
from test_corridor_offline import Gpu, for_backward, gpu, inputs

from cupyflash import attention, attention_backward, dispatch
from cupyflash.call import Call
from cupyflash.gpu import ahead, corridor, programs
from cupyflash.passes import FORWARD

assert gpu  # a fixture


@pytest.fixture
def asked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans whose programs are compiled ahead. No program is there."""
    found: list[Any] = []
    monkeypatch.setattr(corridor, "compile_ahead", lambda make: found.extend(make()))
    monkeypatch.setattr(corridor, "ready", lambda *_: False)
    return found


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of every forward will be asked for."""
    run = corridor.run
    monkeypatch.setattr(corridor, "run", lambda call: run(call.but(followed=call.of is FORWARD)))


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (30, None)}, {"scale": -2.0}])
def test_a_forward_that_is_followed_has_its_backward_compiled(
    gpu: Gpu, followed: None, asked: list[Any], options: dict[str, Any]
) -> None:
    given = for_backward(gpu)
    attention(*(given[name] for name in "qkv"), **options)
    [plan] = asked
    attention_backward(**given, **options)
    assert programs._key(plan, 0) == programs._key(gpu.launched[-1][0], 0)


def test_gradients_of_arrays_are_compiled_beside_the_first(gpu: Gpu, asked: list[Any]) -> None:
    sinks = gpu.array((4,), np.float32)
    attention_backward(**for_backward(gpu), sinks=sinks, wrt="sinks")
    assert [plan.wrt for plan in asked] == [("sinks",)]


def test_nothing_is_compiled_for_a_forward_alone_or_where_the_program_is_there(
    gpu: Gpu, asked: list[Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    attention(**inputs(gpu))
    monkeypatch.setattr(corridor, "ready", lambda *_: True)
    request.getfixturevalue("followed")
    attention(**inputs(gpu), causal=True)
    assert not asked


def test_pytorch_says_that_gradients_will_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    seen: list[bool] = []
    run = dispatch.run

    def noted(call: Call) -> Any:
        seen.append(call.followed)
        return run(call)

    monkeypatch.setattr(dispatch, "run", noted)
    q = torch.randn(1, 3, 1, 8)
    attention(q.requires_grad_(), q, q).sum().backward()
    assert seen == [True, False]


def test_on_threads_whose_errors_are_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    done = threading.Event()

    def program(plan: Any) -> None:
        compiled.append((plan, threading.get_ident()))
        if len(compiled) == 2:
            done.set()
        raise RuntimeError("refused")

    def make() -> Iterable[Any]:
        yield "one"
        yield None
        yield "two"
        raise ValueError("no plan")

    monkeypatch.setattr(ahead, "program", program)
    ahead.compile_ahead(make)
    assert done.wait(30)
    assert {plan for plan, _ in compiled} == {"one", "two"}
    assert threading.get_ident() not in {thread for _, thread in compiled}


def test_no_more_than_some_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go = threading.Semaphore(0), threading.Event()
    compiled: list[Any] = []

    def program(plan: Any) -> None:
        compiled.append(plan)
        started.release()
        go.wait(30)

    monkeypatch.setattr(ahead, "MOST", 3)
    monkeypatch.setattr(ahead, "program", program)
    before = {*threading.enumerate()}
    try:
        for n in range(3):
            ahead._start(ahead._compile, n)
            assert started.acquire(timeout=30)
        ahead.compile_ahead(lambda: [3])
        ahead._start(ahead._compile, 4)
    finally:
        go.set()
        for x in {*threading.enumerate()} - before:
            x.join()
    assert compiled == [0, 1, 2]
    ahead.compile_ahead(lambda: [5])  # they are done
    assert started.acquire(timeout=30) and compiled == [0, 1, 2, 5]


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    made: list[Callable[..., Any]] = []
    monkeypatch.setattr(ahead.threading, "Thread", Thread)
    ahead.compile_ahead(lambda: made)
