"""Cores that the CPU's scan leaves free, for the threads that feed the GPU.

JAX's CPU backend computes on threads of its own, one for each core, whichever thread called it. While they are all
busy, the thread that launches the GPU's kernels gets a core only when one of them is preempted, and the GPU waits with
it. So they are kept off a few cores while a scanner exists. XLA does not say which threads they are: they are found by
keeping all of them busy for some milliseconds, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RESERVED = 2  # cores: one for the thread that launches, one for those that hand out the scan and collect its scores
_ENOUGH = 8  # with fewer cores than this, none is given away
_TASKS = Path("/proc/self/task")
# XLA's options for a program that is to run on one of those threads; others run beside it.
ONE_THREAD: dict[str, Any] = {
    "xla_cpu_multi_thread_eigen": False,  # library calls, and then XLA's own loops, stay on one thread
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
}
_lock = threading.Lock()
_holders = 0


def hold(cpu: Any, cores: int = RESERVED) -> bool:
    """Keep the threads of JAX's CPU device `cpu` off `cores` cores until `release`; holders are counted.

    Returns whether anything is held: not on a machine of fewer than 8 cores, nor where threads cannot be told apart
    (anything but Linux).
    """
    global _holders
    if not hasattr(os, "sched_getaffinity") or not _TASKS.exists():
        return False
    allowed = os.sched_getaffinity(0)
    if len(allowed) < _ENOUGH:
        return False
    with _lock:
        threads = compute_threads(cpu)
        if threads and not _holders:
            _pin(threads, allowed - spared(allowed, cores))
        _holders += bool(threads)
        return bool(threads)


def release(cpu: Any) -> None:
    """Give back what a successful `hold` took, once the last holder is gone."""
    global _holders
    with _lock:
        _holders -= 1
        if not _holders:
            _pin(compute_threads(cpu), os.sched_getaffinity(0))


def spared(allowed: set[int], cores: int) -> set[int]:
    """At least `cores` of the `allowed` ones, whole physical cores where the system tells which belong together."""
    taken: set[int] = set()
    for core in sorted(allowed, reverse=True):
        if len(taken) >= cores:
            break
        taken |= _siblings(core) & allowed
    return taken


def _siblings(core: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    if not path.exists():
        return {core}
    found = {core}
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _pin(threads: tuple[int, ...], cores: set[int]) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it: the scan is right either way
            os.sched_setaffinity(thread, cores)


@functools.cache
def compute_threads(cpu: Any) -> tuple[int, ...]:
    """System ids of the threads on which JAX's CPU device `cpu` computes; empty where the system does not tell."""
    found: set[int] = set()
    ours = {thread.native_id for thread in threading.enumerate()}
    with jax.default_device(cpu):
        start = np.ones((1 << 20,), np.float32)
        _spin(start).block_until_ready()  # compiled
        for _ in range(2):  # a thread that was late for the first round is there for the second
            before = _seconds_on_core()
            jax.block_until_ready([_spin(start) for _ in range(2 * (os.cpu_count() or 1))])
            for thread, seconds in _seconds_on_core().items():
                if thread not in ours and seconds - before.get(thread, 0.0) > 1e-3:
                    found.add(thread)
    return tuple(sorted(found))


@functools.partial(jax.jit, compiler_options=ONE_THREAD)
def _spin(x: jax.Array) -> jax.Array:
    """Some milliseconds of one core's time. A program without such loops would run on the thread that calls it."""
    return jnp.sum(jnp.sin(x))


def _seconds_on_core() -> dict[int, float]:
    """How long each thread of this process has run."""
    found = {}
    for task in _TASKS.iterdir():
        thread = int(task.name)
        with contextlib.suppress(OSError):  # the thread has ended
            # Linux's name for the clock that counts a given thread's time on a core (pthread_getcpuclockid).
            found[thread] = time.clock_gettime(~thread << 3 | 6)
    return found
