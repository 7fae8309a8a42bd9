"""Cores kept free of the threads that JAX's CPU backend computes on."""

from __future__ import annotations

import os
import threading

import jax
import pytest

from herald_jax import host_threads

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores at least: one to keep free",
)


def test_xlas_threads_leave_cores_to_others_until_the_last_holder_is_gone(monkeypatch):
    monkeypatch.setattr(host_threads, "_ENOUGH", 2)
    cpu, allowed = jax.devices("cpu")[0], os.sched_getaffinity(0)
    threads = host_threads.compute_threads(cpu)
    assert threads
    assert not set(threads) & {thread.native_id for thread in threading.enumerate()}
    monkeypatch.setattr(host_threads, "_siblings", lambda core: {core})
    kept = allowed - host_threads.spared(allowed, 1)
    assert len(kept) == len(allowed) - 1
    assert host_threads.hold(cpu, 1)
    assert host_threads.hold(cpu, 1)
    assert all(os.sched_getaffinity(thread) == kept for thread in threads)
    assert os.sched_getaffinity(0) == allowed
    host_threads.release(cpu)
    assert all(os.sched_getaffinity(thread) == kept for thread in threads)
    host_threads.release(cpu)
    assert all(os.sched_getaffinity(thread) == allowed for thread in threads)


def test_a_small_machine_gives_no_core_away(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert not host_threads.hold(jax.devices("cpu")[0])


def test_whole_physical_cores_are_spared(monkeypatch):
    monkeypatch.setattr(host_threads, "_siblings", lambda core: {core % 8, core % 8 + 8})
    assert host_threads.spared(set(range(16)), 2) == {15, 7}
    assert host_threads.spared(set(range(16)), 3) == {15, 7, 14, 6}
    assert host_threads.spared(set(range(12)), 2) == {11, 3}
