"""`python -m benchmarks.dense`: milliseconds per denoising step of the dense plan, beside the floor.

Random weights in real shapes, bfloat16, blocks of 32 denoised in 32 fixed steps plus the commit, at 4K context. A step
is the wall time of the jitted block loop over the forwards it ran: everything a user waits for, nothing else. The floor
is the bytes a forward must read (weights once, the KV of every row once) over the measured copy bandwidth, counted as
bytes read plus written.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import herald_jax
from benchmarks import common
from benchmarks.shapes import SHAPES, step_flops, step_weight_bytes
from benchmarks.stopwatch import gpu_events
from herald_jax.model import init_params

CASES = [
    ("sdar8b", 1), ("sdar8b", 4), ("sdar8b", 8), ("sdar1.7b", 1), ("fdv2_7b", 1), ("fdv2_7b", 4), ("fdv2_1.5b", 1),
]  # fmt: skip
GOALS = {"dense_step/sdar8b/4k/b1/over_floor": "<=1.25"}  # issue 4's


def measure(
    model: herald_jax.Model, batch: int, context: int, new_tokens: int, implementation: str | None
) -> herald_jax.Stats:
    """Run the same request twice and report the second, compiled one."""
    block = model.config.diffusion.block_length
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, context - new_tokens).tolist() for _ in range(batch)]
    request = herald_jax.GenerateConfig(
        max_new_tokens=new_tokens,
        policy=herald_jax.StaticLowConfidence(block),
        ignore_stop=True,
        prefill_chunk=max(1024 // batch, block),  # the same matmul shapes at every batch size: tuned once
    )
    first = herald_jax.generate(model, prompts, request, implementation=implementation).stats
    print(f"compiled in {first.compile_seconds:.1f} s", flush=True)
    return herald_jax.generate(model, prompts, request, implementation=implementation).stats


def profile(model: herald_jax.Model, batch: int, context: int) -> dict[str, Any]:
    """GPU time of one block's forwards by kernel name: {"name": [launches, milliseconds]}, largest first."""
    block = model.config.diffusion.block_length
    measure(model, batch, context, block, None)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            measure(model, batch, context, block, None)
        [trace] = Path(folder).rglob("*.xplane.pb")
        events = gpu_events(jax.profiler.ProfileData.from_file(str(trace)))
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for name, seconds in events:
        total[name][0] += 1
        total[name][1] += seconds * 1e3
    return dict(sorted(total.items(), key=lambda item: -item[1][1])[:40])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096, help="prompt plus new tokens (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to write (default 64)")
    parser.add_argument("--cases", default=",".join(f"{n}:{b}" for n, b in CASES), help="shape:batch, comma-separated")
    parser.add_argument("--implementation", default=None, choices=("xla", "mosaic_gpu"))
    parser.add_argument("--profile", type=Path, default=None, help="write kernel times of the first case to this file")
    common.output_option(parser)
    options = parser.parse_args()

    bandwidth = common.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows, loaded, model = [], None, None
    for name, batch in (case.split(":") for case in options.cases.split(",")):
        batch = int(batch)
        config = SHAPES[name]
        if loaded != name:
            model = None  # free the last model before the next is made
            model = herald_jax.Model(config, init_params(config, jax.random.key(0)))
            loaded = name
        stats = measure(model, batch, options.context, options.new_tokens, options.implementation)
        step = stats.decode_seconds / stats.batch_forwards
        kv_bytes = batch * options.context * config.kv_bytes_per_token
        floor = (step_weight_bytes(config) + kv_bytes) / bandwidth
        prompt = batch * (options.context - options.new_tokens)
        prefill_flops = step_flops(config, prompt) - step_flops(config, 0)
        detail = {
            "step_ms": step * 1e3,
            "floor_ms": floor * 1e3,
            "weight_bytes": step_weight_bytes(config),
            "kv_bytes": kv_bytes,
            "copy_bandwidth": bandwidth,
            "forwards": stats.batch_forwards,
            "prefill_seconds": stats.prefill_seconds,
            "prefill_tflops": prefill_flops / stats.prefill_seconds / 1e12,
            "implementation": options.implementation,
        }
        context = f"{options.context // 1024}k"
        id = f"dense_step/{name}/{context}/b{batch}/over_floor"
        rows.append(common.row(id, step / floor, "x", goal=GOALS.get(id), detail=detail))
        print(rows[-1]["id"], rows[-1]["value"], rows[-1]["detail"], flush=True)
        common.write_results("dense", rows, folder=options.out)  # after every case: a run cut short keeps what it has
        if options.profile is not None and len(rows) == 1:
            kernels = profile(model, batch, options.context)
            options.profile.write_text("\n".join(f"{n:6.0f} {ms:9.3f} ms  {k}" for k, (n, ms) in kernels.items()))
    common.print_rows(rows)


if __name__ == "__main__":
    main()
