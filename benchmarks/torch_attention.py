"""PyTorch's scaled-dot-product attention on the same problems: the strongest peer. Run as a process of its own.

Reads a JSON list of cases `{"id", "batch", "queries", "kv_heads", "group", "entries", "head_dim", "causal"}` from
standard input and prints, case by case as they are measured, JSON objects id -> backend -> microseconds of device time
(null where the backend cannot). Query heads of a group are folded into the query axis, except for `causal`, which is
plain causal attention of as many queries as entries. Its own process, because two profilers in one process get in each
other's way. What `benchmarks.stopwatch` does with JAX's profiler is done with PyTorch's here: a session serves several
cases, and a kernel that does nothing marks where the calls of one begin and end.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.sizes import input_sets

BACKENDS = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}
MARK = "spin_kernel"  # what `torch.cuda._sleep` launches
GROUP = 11  # cases that share a profiler session


def launch(case: dict[str, Any], repeats: int) -> dict[str, bool]:
    """Runs a case on each backend, between marks; says of each whether it could."""
    batch, kv_heads, entries, dim = (case[key] for key in ("batch", "kv_heads", "entries", "head_dim"))
    heads = kv_heads * case["group"] if case["causal"] else kv_heads
    rows = case["queries"] if case["causal"] else case["queries"] * case["group"]
    count = 1 if case["causal"] else input_sets(2 * batch * kv_heads * entries * dim * 2)

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    q = random(batch, heads, rows, dim)
    # K and V of one call are neighbours in one list: half the memory, and still no reuse in between.
    kv = [random(batch, kv_heads, entries, dim) for _ in range(count + 1)]
    able: dict[str, bool] = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):

            def call(i):
                k, v = kv[i % count], kv[i % count + 1]
                return scaled_dot_product_attention(q, k, v, is_causal=case["causal"], enable_gqa=heads != kv_heads)

            try:
                for i in range(3):
                    call(i)
                torch.cuda.synchronize()
            except RuntimeError as error:  # what PyTorch raises for a backend that does not take the arguments
                print(f"{case['id']} {name}: {error}", file=sys.stderr)
                able[name] = False
                continue
            torch.cuda._sleep(1)
            for i in range(repeats):
                call(i)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            able[name] = True
    return able


def repeats_of(case: dict[str, Any]) -> int:
    return 5 if case["causal"] else 20


def measure(cases: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Microseconds of one call, by case and backend, from one profiler session."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        able = []
        for case in cases:
            able.append(launch(case, repeats_of(case)))
            torch.cuda.empty_cache()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    marks = [i for i, event in enumerate(events) if MARK in event.name]
    wanted = 2 * sum(could for one in able for could in one.values())
    if len(marks) != wanted:
        names = ", ".join(sorted({event.name for event in events})[:8])
        raise RuntimeError(f"{wanted} marks were set but the profiler recorded {len(marks)}; it saw: {names}")
    spans = iter(zip(marks[::2], marks[1::2], strict=True))
    results: dict[str, dict[str, float | None]] = {}
    for case, one in zip(cases, able, strict=True):
        results[case["id"]] = dict.fromkeys(one)
        for name in (name for name, could in one.items() if could):
            first, last = next(spans)
            times = [event.time_range.elapsed_us() for event in events[first + 1 : last]]
            results[case["id"]][name] = median_call(times, repeats_of(case))
    return results


def median_call(times: list[float], repeats: int) -> float:
    """The median over calls of the sum of their kernels' times, or the mean where calls differ in kernels."""
    per_call, rest = divmod(len(times), repeats)
    if rest or not per_call:
        return sum(times) / repeats
    return statistics.median(sum(times[i * per_call : (i + 1) * per_call]) for i in range(repeats))


def main() -> None:
    began = time.perf_counter()
    torch.zeros(1, device="cuda")  # CUDA starts while the other process still compiles
    torch.cuda._sleep(1)
    cases = json.load(sys.stdin)
    for start in range(0, len(cases), GROUP):
        print(json.dumps(measure(cases[start : start + GROUP])), flush=True)
        done = f"PyTorch measured {min(start + GROUP, len(cases))} of {len(cases)} cases"
        print(f"[{time.perf_counter() - began:6.1f} s] {done}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
