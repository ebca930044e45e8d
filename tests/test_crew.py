"""The threads of a call on the CPU: how many, what BLAS does meanwhile, and what interrupts and forks leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import threadpoolctl
from reference import fresh_rng, state

from cupyflash import attention, attention_backward, cpu
from cupyflash.cpu import blas, crew, tiles
from cupyflash.problem import AttentionProblem


def run_python(code, *arguments, **environment):
    """What a process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIBRARIES = """
import numpy, threadpoolctl
print(*(x["filepath"] for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"), sep="\\n")
"""


@pytest.fixture(scope="module")
def of_numpy():
    """The BLAS libraries that NumPy brings along: other packages may have loaded their own."""
    return set(run_python(LIBRARIES).splitlines())


@pytest.fixture
def threads_of_blas(of_numpy):
    """A function that asks NumPy's BLAS how many threads it has; it has 3 before the test."""

    def ask():
        return {x["num_threads"] for x in threadpoolctl.threadpool_info() if x["filepath"] in of_numpy}

    if not ask():
        pytest.skip("NumPy's BLAS has no number of threads")
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if ask() != {3}:  # threadpoolctl listens to the thread that set a limit first, while that lives
            pytest.skip("another thread holds the number of threads")
        yield ask


def few(seq=20):
    """q, k and v of a small problem with many tasks."""
    return (fresh_rng().standard_normal((4, seq, 2, 8), "float32") for _ in range(3))


@pytest.fixture(params=["1", "4"])
def workers(request, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", request.param)
    monkeypatch.setattr(crew, "WORTH_THREADS", 0)
    return int(request.param)


def test_products_stay_on_the_thread_that_calls_them(threads_of_blas, workers, monkeypatch):
    """While a call lasts, of all that last at the same time; then BLAS has as many threads as before."""
    seen, plain = [], tiles.product

    def watched(*given, **more):
        seen.append(threads_of_blas())
        plain(*given, **more)

    monkeypatch.setattr(sys.modules["cupyflash.cpu.forward"], "product", watched)
    q, k, v = few()
    blas.one_thread.__enter__()  # another call, which begins earlier and ends later
    cpu.forward(state(q, k, v), q, k, v)
    assert threads_of_blas() == {1}
    blas.one_thread.__exit__()
    assert threads_of_blas() == {3}
    monkeypatch.setattr(sys.modules["cupyflash.cpu.forward"], "product", lambda *a, **b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cpu.forward(state(q, k, v), q, k, v)
    assert threads_of_blas() == {3}
    assert seen and all(x == {1} for x in seen)


def test_after_an_error_nothing_is_begun(workers):
    """By those that work beside."""
    done, all_there = [], threading.Barrier(workers)

    def task(number):
        done.append(number)
        if number < workers:
            all_there.wait(60)
        if number == 0:
            raise ZeroDivisionError
        time.sleep(0.001)

    with pytest.raises(ZeroDivisionError):
        crew.Crew(1 << 40).run(task, ((n,) for n in range(2000)))
    assert len(done) < 1000


def test_who_leaves_last_brings_the_threads_back(threads_of_blas, workers):
    """Also where who came first lives on, with a limit of its own."""
    inside, leave, left, over = (threading.Event() for _ in range(4))

    def first():
        with blas.one_thread:
            inside.set()
            leave.wait(60)
        left.set()
        over.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    q, k, v = few()
    with blas.one_thread:
        leave.set()
        assert left.wait(60)
        cpu.forward(state(q, k, v), q, k, v)
        assert threads_of_blas() == {1}
    assert threads_of_blas() == {3}
    over.set()
    thread.join()


def test_an_interrupt_anywhere_leaves_blas_as_it_was(threads_of_blas, workers):
    """At every instruction of ours that the caller runs; and no thread works on behind it."""
    q, k, v = few()
    problem = state(q, k, v)
    sources = {crew.__file__, blas.__file__}

    def call(point):
        """Whether the interrupt came."""
        passed = 0

        def trace(frame, event, _):
            nonlocal passed
            if frame.f_code.co_filename not in sources:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                passed += 1
                if passed == point:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            cpu.forward(problem, q, k, v)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    point = 1
    while call(point):
        assert threads_of_blas() == {3}, f"after an interrupt at instruction {point}"
        point += 1
    assert point > 50


SIGNALS = """
import random, signal, threading, numpy as np, threadpoolctl
from cupyflash import attention
from cupyflash.cpu import crew
crew.WORTH_THREADS = 0
x = np.random.default_rng(0).standard_normal((4, 20, 2, 8), "float32")
expected = attention(x, x, x)
def ask():
    return [y["num_threads"] for y in threadpoolctl.threadpool_info() if y["user_api"] == "blas"]
threadpoolctl.threadpool_limits(3, user_api="blas")
before, came, inside = ask(), 0, False
def interrupt(*_):
    if inside:  # between two of them there is nobody to take it
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for n in range(300):
    try:
        inside = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-4))
        for _ in range(10):
            attention(x, x, x)
        inside = False
    except KeyboardInterrupt:
        inside = False
        came += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
assert ask() == before and set(before) <= {3}, ask()
assert (attention(x, x, x) == expected).all()
print(came)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such signals on Windows")
def test_interrupts_by_a_timer():
    assert int(run_python(SIGNALS, OMP_NUM_THREADS="3")) > 150


FORKS = """
import os, sys, threading, time, numpy as np, threadpoolctl
from cupyflash import attention
from cupyflash.cpu import blas
x = np.random.default_rng(0).standard_normal((1, int(sys.argv[1]), 4, 64), "float32")
expected = attention(x, x, x)
def ask():
    return [y.num_threads for y in blas._libraries()]
threadpoolctl.threadpool_limits(3, user_api="blas")
before, over = ask(), threading.Event()
def compute():
    while not over.is_set():
        attention(x, x, x)
others = [threading.Thread(target=compute) for _ in range(2)]
for thread in others:
    thread.start()
bad = held = 0
for n in range(40):
    while n < 20 and before and set(ask()) != {1}:
        time.sleep(0.0005)
    held += n < 20
    child = os.fork()
    if not child:
        right = ask() == before
        os._exit(not right)
    bad += os.waitpid(child, 0)[1] != 0
over.set()
for thread in others:
    thread.join()
child = os.fork()
if not child:
    os._exit(not (attention(x, x, x) == expected).all() or ask() != before)
bad += os.waitpid(child, 0)[1] != 0
assert ask() == before
print(bad, held)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on Windows")
@pytest.mark.parametrize("size", [300, 500])
def test_a_fork_while_others_compute(size):
    """The new process has BLAS's threads as they were before the calls, in which it has no part.

    Calls hold BLAS alone, or are of two threads.
    """
    problem = AttentionProblem("float32", 1, size, size, 4, 4, 64, 64, 1.0)
    assert crew.worth_threads(problem) == (size == 500) and not crew.stays_here(problem)
    assert run_python(FORKS, str(size), OMP_NUM_THREADS="2").split() == ["0", "20"]


@pytest.mark.parametrize(
    "dtype, shape", [("float64", (3, 300, 4, 16)), ("float32", (8, 256, 2, 32)), ("float16", (16, 200, 4, 32))]
)
def test_bits_of_an_entry_do_not_depend_on_the_batch(dtype, shape, rng):
    """With batch_invariant=True. Products of one alone are cut."""
    sizes = [AttentionProblem(dtype, n, shape[1], shape[1], shape[2], shape[2], shape[3], shape[3], 1.0)
             for n in (1, shape[0])]  # fmt: skip
    assert [crew.cuts(x) for x in sizes] == [True, False]
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for _ in range(4))

    def results(at):
        out, lse = attention(q[at], k[at], v[at], return_lse=True, batch_invariant=True)
        return [out, lse, *attention_backward(dout[at], q[at], k[at], v[at], out, lse, batch_invariant=True)]

    together = results(slice(None))
    for n in (0, shape[0] - 1):
        for x, y in zip(together, results(slice(n, n + 1))):
            assert x[n : n + 1].tobytes() == y.tobytes()


FORKED_WITHIN = """
import os, signal, sys, threading, time, numpy as np
from cupyflash import attention, cpu
from cupyflash.cpu import crew
if sys.argv[1] == "threads":
    crew.WORTH_THREADS = 0
forward = sys.modules["cupyflash.cpu.forward"]
parent, main, first, plain = os.getpid(), threading.get_ident(), threading.Lock(), forward.product
def joins():  # in a new process the main thread would wait for ever for one that is just being started
    frame = sys._current_frames()[main]
    while frame is not None and frame.f_code is not threading.Thread.join.__code__:
        frame = frame.f_back
    return frame is not None
def product(*given, **more):
    if first.acquire(blocking=False):
        while threading.get_ident() != main and not joins():
            time.sleep(0.001)
        os.kill(parent, signal.SIGUSR1)
        while threading.get_ident() != main and not forked.wait(0.01):
            os.kill(parent, signal.SIGUSR1)  # it may have looked for signals just before it began to wait
    if threading.get_ident() != main:
        forked.wait(60)  # none is within BLAS, whose locks the new process would have, too
    plain(*given, **more)
forked, child = threading.Event(), None
def fork(*_):
    global child
    if child is None:
        child = os.fork()
    if child or sys.argv[1] == "none":  # in the child a thread that is not there may hold the event's lock
        forked.set()
signal.signal(signal.SIGUSR1, fork)
forward.product = product
x = np.random.default_rng(0).standard_normal((1, 20, 2, 8), "float32")
try:
    out = attention(x, x, x)
    said = "done" if (attention(x, x, x) == out).all() else "wrong"
except RuntimeError as error:
    said = "refused" if "forked while attention computed" in str(error) else str(error)
if child == 0:
    os._exit(said != ("refused" if sys.argv[1] == "threads" else "done"))
print(said, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on Windows")
@pytest.mark.parametrize("what", ["threads", "none"])
def test_a_fork_within_a_call(what):
    """Threads do not come along: an error in the new process, never a result that is not there. A call without goes on
    in both."""
    assert run_python(FORKED_WITHIN, what, OMP_NUM_THREADS="2").split() == ["done", "0"]


INTERRUPTED = """
import itertools, os, signal, sys, time, numpy as np
from cupyflash import attention_backward, cpu
backward = sys.modules["cupyflash.cpu.backward"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
shape = (1, 24000, 1, 128) if sys.argv[1] == "one head" else (9, 6000, 1, 128)
x = np.ones(shape, "float32")
out, lse = x, np.full((shape[0], 1, shape[1]), 20, "float32")
bias = {} if sys.argv[1] == "one head" else {"bias": np.zeros((6000, 6000), "float32")}
begun, plain, numbers = [], backward.product, itertools.count(1)
def product(*given, **more):
    begun.append(None)
    plain(*given, **more)
    if next(numbers) == 20:
        os.kill(os.getpid(), signal.SIGINT)
backward.product = product
try:
    attention_backward(x, x, x, x, out, lse, wrt=bias, **bias)
except KeyboardInterrupt:
    seen = len(begun)
time.sleep(0.1)
print(seen, len(begun) - seen)
"""


@pytest.mark.parametrize("what", ["one head", "one bias"])
@pytest.mark.parametrize("workers", ["1", "3"])
def test_an_interrupt_does_not_wait_for_a_whole_head(workers, what):
    """Of more than 5000 products; nor do threads wait for their turn. And none works on behind it."""
    begun, later = run_python(INTERRUPTED, what, OMP_NUM_THREADS=workers).split()
    assert int(begun) < 1000 and later == "0"


BITS = """
import sys, hashlib, numpy as np
from cupyflash import attention, attention_backward
rng = np.random.default_rng(7)
n = 1500
for heads in (1, 3):
    q, k, v, dout = (rng.standard_normal((1, n, heads, 40), "float32") for _ in range(4))
    for shape in ((n, n), (heads, n, n), (n,), (n, 1), None):
        given = {"bias": rng.standard_normal(shape, "float32")} if shape else {}
        given |= {"alibi_slopes": np.full(heads, 0.01, "float32"), "sinks": np.zeros(heads, "float32")}
        out, lse = attention(q, k, v, causal=True, return_lse=True, **given)
        grads = attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True, wrt=given, **given)
        results = (out, lse, *grads, *(getattr(grads, f"d{name}") for name in given))
        print([hashlib.sha256(x.tobytes()).hexdigest() for x in results])
"""


def test_deterministic_gradients_do_not_depend_on_the_number_of_cores():
    said = [run_python(BITS, OMP_NUM_THREADS=str(n)) for n in (1, 2, 3, 5)]
    assert said[0] and all(x == said[0] for x in said)


AFTER_THE_END = """
import threading, time, numpy as np
from cupyflash import attention, attention_backward
def late():
    threading.main_thread().join()
    x = np.random.default_rng(0).standard_normal((1, 600, 4, 64), "float32")
    out, lse = attention(x, x, x, return_lse=True)
    grads = attention_backward(x, x, x, x, out, lse)
    print("done", all(np.isfinite(g).all() for g in (out, *grads)))
threading.Thread(target=late).start()
"""


def test_a_thread_that_outlives_the_main_thread():
    assert run_python(AFTER_THE_END, OMP_NUM_THREADS="4").split() == ["done", "True"]
