"""What a run reports about its time: wall time without compilation, whoever compiles what beside it."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from herald_jax.config import GenerateConfig
from herald_jax.generate import generate, stream
from herald_jax.plans import Herald
from herald_jax.stats import Stats, Stopwatch
from tests.herald_jax import tiny

PART = "/jax/core/compile/backend_compile_duration"


def begin(event: str = PART) -> None:
    jax.monitoring.record_scalar(event, time.time())


def end(event: str = PART, seconds: float = 1000.0) -> None:
    # The durations told are nonsense: a clock that was set meanwhile.
    jax.monitoring.record_event_duration_secs(event, seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in seconds, to be set by the test."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0] * 10**9)
    return now


def test_time_is_divided_between_compiling_and_the_rest(clock: list[int]) -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch:
            clock[0] += 3
            begin()
            clock[0] += 4
            end()
            clock[0] += 1
        begin()
        clock[0] += 50  # between the spans
        end()
    assert (watch.seconds, watch.compile_seconds) == (8, 8)


def test_what_is_compiled_within_what_is_compiled_counts_once(clock: list[int]) -> None:
    watch = Stopwatch()
    with watch:
        for _ in range(2):
            begin("/jax/core/compile/jaxpr_trace_duration")
            clock[0] += 1
            for _ in range(2):
                begin()
                clock[0] += 2
                end()
            clock[0] += 1
            end("/jax/core/compile/jaxpr_trace_duration")
            begin("/jax/something/else")
            clock[0] += 10
            end("/jax/something/else")
    assert (watch.seconds, watch.compile_seconds) == (20, 12)


def test_what_another_thread_compiles_is_no_time_of_this_one(clock: list[int]) -> None:
    watch = Stopwatch()
    with concurrent.futures.ThreadPoolExecutor(1) as other, watch:
        clock[0] += 1
        other.submit(begin).result()
        clock[0] += 5
        other.submit(end, seconds=5.0).result()
    assert (watch.seconds, watch.compile_seconds) == (6, 0)


def test_a_span_within_what_is_compiled_is_compilation(clock: list[int]) -> None:
    """And one that begins in it, or ends in it, as far as it lies in it. An end without a beginning is nothing."""
    end()
    begin()
    clock[0] += 9
    inner, last = Stopwatch(), Stopwatch()
    with inner:
        clock[0] += 2
    with last:
        clock[0] += 3
        end()
        clock[0] += 4
        begin()
        clock[0] += 5
    end()
    assert (inner.seconds, inner.compile_seconds) == (0, 2)
    assert (last.seconds, last.compile_seconds) == (4, 8)


def test_jax_tells_when_it_compiles() -> None:
    """A program that is compiled while another is traced, in truth: most of this time is compilation, and no more."""
    inner = jax.jit(lambda x: np.float32(2) * jax.numpy.sort(x))

    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            found = inner(np.arange(5, dtype=np.float32))
        return inner(x) + found

    watch = Stopwatch()
    started = time.perf_counter()
    with watch:
        outer(np.zeros(5, np.float32)).block_until_ready()
    wall = time.perf_counter() - started
    assert 0 < watch.compile_seconds < watch.compile_seconds + watch.seconds <= wall
    with watch:
        before = watch.compile_seconds
        outer(np.zeros(5, np.float32)).block_until_ready()
    assert watch.compile_seconds == before


@pytest.fixture
def busy() -> Iterator[None]:
    """Another thread that says, as long as the test runs, that it has compiled for an hour."""
    over = threading.Event()

    def compile_on() -> None:
        while not over.wait(0.01):
            begin()
            end(seconds=3600.0)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(compile_on)
        yield
        over.set()


def run(how: str) -> Stats:
    model, prompts = tiny.model(tiny.SDAR), tiny.prompts([40, 30])
    config, plan = GenerateConfig(max_new_tokens=12), Herald(budget=8, min_budget=1)
    if how == "generate":
        return generate(model, prompts, config, plan).stats
    # As a server may: each block in whatever thread is free.
    blocks, found = stream(model, prompts, config, plan), None
    while not isinstance(found, Stats):
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            found = thread.submit(next, blocks).result()
    return found


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_run_reports_times_that_passed(how: str) -> None:
    """Under HERALD, whose scans are compiled beside the main thread."""
    started = time.perf_counter()
    stats = run(how)
    wall = time.perf_counter() - started
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    assert stats.compile_seconds >= 0
    assert stats.prefill_seconds + stats.decode_seconds + stats.compile_seconds <= wall
