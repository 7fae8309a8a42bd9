"""PyTorch's scaled-dot-product attention on the same problems: the strongest peer. Run as a process of its own.

Reads a JSON list of cases `{"id", "batch", "queries", "kv_heads", "group", "entries", "head_dim", "causal"}` from
standard input and prints a JSON object id -> backend -> microseconds of device time (null where the backend cannot).
Query heads of a group are folded into the query axis, except for `causal`, which is plain causal attention of as many
queries as entries. Its own process, because two profilers in one process get in each other's way.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.sizes import input_sets

BACKENDS = {"torch_flash": SDPBackend.FLASH_ATTENTION, "torch_cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(case: dict[str, Any], repeats: int) -> dict[str, float | None]:
    """Microseconds of one call, by backend."""
    batch, kv_heads, entries, dim = (case[key] for key in ("batch", "kv_heads", "entries", "head_dim"))
    heads = kv_heads * case["group"] if case["causal"] else kv_heads
    rows = case["queries"] if case["causal"] else case["queries"] * case["group"]
    count = 1 if case["causal"] else input_sets(2 * batch * kv_heads * entries * dim * 2)

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    q = random(batch, heads, rows, dim)
    # K and V of one call are neighbours in one list: half the memory, and still no reuse in between.
    kv = [random(batch, kv_heads, entries, dim) for _ in range(count + 1)]
    results: dict[str, float | None] = {}
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
                results[name] = None
                continue
            results[name] = _kernel_time(call, repeats)
    return results


def _kernel_time(call, repeats: int) -> float:
    """Median over calls of the durations of the kernels of one call, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(repeats):
            call(i)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    per_call, rest = divmod(len(events), repeats)
    times = [e.time_range.elapsed_us() for e in events]
    if rest or not per_call:
        return sum(times) / repeats
    return statistics.median(sum(times[i * per_call : (i + 1) * per_call]) for i in range(repeats))


def main() -> None:
    cases = json.load(sys.stdin)
    results = {}
    for case in cases:
        results[case["id"]] = measure(case, 5 if case["causal"] else 20)
        torch.cuda.empty_cache()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
