"""`python -m benchmarks.herald`: the HERALD plan beside the dense plan, under one cap on device memory.

Random weights in real shapes, bfloat16, blocks of 32 in fixed steps. The device memory that JAX may use is capped for
both sides alike; the dense plan, the strongest baseline there is here, keeps its KV in device memory and runs the
largest batch that fits. Caches are filled with random K and V instead of a prefill. Times are wall-clock medians over
blocks.

What is exposed of a block is its time less that of its own steps and draft, each timed alone.

The parts can be run apart, each with an `--out` of its own; `--merge FILES` joins what they wrote. A case that the host
may have no room for is left out: the others are measured, and the run ends with a sentence and status 1.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, mage
from benchmarks.block_times import GREEDY, NO_STOPS, loudness
from benchmarks.shapes import SHAPES, weight_bytes
from herald_jax import Dense, Herald, ModelConfig, StaticLowConfidence, draft_moment, host_kv, select
from herald_jax import device_index as index_of
from herald_jax.block_loop import LoopOptions, Rows, first_canvas
from herald_jax.cache import DeviceKV
from herald_jax.herald import Pipeline
from herald_jax.host_kv import HostKV
from herald_jax.host_prefill import Prefilled
from herald_jax.host_select import host_views
from herald_jax.model import Params, init_params
from herald_jax.offload import draft
from herald_jax.pooled import pool_slots


def cap_device_memory(gigabytes: float) -> None:
    """Let JAX use so much of the GPU's memory. Has to come before JAX's first use; without a GPU it does nothing."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
        total = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20
    except (OSError, subprocess.CalledProcessError):
        return
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(gigabytes * 1e9 / total, 0.95):.4f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="sdar8b,fdv2_7b", help="comma-separated; the goals are sdar8b's")
    parser.add_argument(
        "--contexts", default="16,32,64,128", help="of the latency part, in units of 1024 tokens; 0: leave it out"
    )
    parser.add_argument("--throughput", default="64", help="context of the throughput part, likewise; 0: leave it out")
    parser.add_argument("--rows", type=int, default=8, help="batch under HERALD in the throughput part")
    parser.add_argument("--budgets", default="0.05", help="comma-separated; the goals are those of 0.05")
    parser.add_argument("--cap", type=float, default=40, help="device memory in GB (default %(default)s)")
    parser.add_argument("--over-cap", type=int, default=0, help="a context beyond the cap, likewise, such as 256")
    parser.add_argument("--blocks", type=int, default=8, help="timed blocks of each case (default %(default)s)")
    common.merge_option(parser)
    common.output_option(parser)
    return parser.parse_args()


GOAL_SHAPE, GOAL_BUDGET = "sdar8b", 0.05
GOALS = {
    "latency/longest/speedup": ">=1.59",
    "latency/all/worst_speedup": ">=0.95",
    "throughput/64k/steps32/cpu": ">=2.47",
    "throughput/64k/steps32/best": ">=4",
    "throughput/64k/steps10/best": ">=2.5",
    "pipeline/exposed_fraction": "<=0.05",
    "selection/cpu/host_bandwidth_fraction": ">=0.85",
}


def host_slots(config: ModelConfig, longest: int) -> int:
    """Slots of each row of a case's cache: its context and as many blocks as are run (page-locking takes seconds)."""
    return -(-(longest + 32 * config.diffusion.block_length) // 128) * 128


def cache_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """Host memory of a case's cache."""
    return rows * host_slots(config, context) * config.kv_bytes_per_token


def reserve_host_memory(options: argparse.Namespace) -> None:
    """Let JAX page-lock what the largest case needs and not much more. Has to come before JAX's first use.

    Not a default: `import herald_jax` has set the variable already, to all memory that the machine has.
    """
    needed = [0]
    for name in options.shapes.split(","):
        config, longest = SHAPES[name], max(map(int, options.contexts.split(",")))
        for rows, thousands in ((1, longest), (options.rows, int(options.throughput)), (1, options.over_cap)):
            if thousands:
                needed.append(cache_bytes(config, rows, 1024 * thousands))
    os.environ[host_kv.LIMIT_VARIABLE] = str(int(1.1 * max(needed) / 1e9) + 2)


class HostRoom:
    """Whether the host can hold the next case, with how JAX page-locks memory in mind.

    Its allocator takes regions that double, so up to twice the need, but no more than the limit it is set (which it
    counts in units of 2^30 bytes). It never gives one back, and uses again those of arrays that are gone.

    Attributes:
      refused: a sentence for each case that there was no room for.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._held = 0  # at least so many bytes are in regions of earlier cases

    def has(self, config: ModelConfig, rows: int, context: int) -> bool:
        """Whether there is room for a case; says so if not."""
        gc.collect()  # a pipeline's threads refer to it: the last case is gone only now
        needed = cache_bytes(config, rows, context)
        limit = int(os.environ.get(host_kv.LIMIT_VARIABLE, "64")) * 2**30
        most = max(min(2 * needed + 2**30, limit) - self._held, 0)
        there = host_kv.available()
        if there is None or most <= there:
            self._held = max(self._held, needed)
            return True
        self.refused.append(
            f"{rows} x {context} tokens need {needed / 1e9:.1f} GB of host memory, for which JAX may page-lock another "
            f"{most / 1e9:.1f} GB, but {there / 1e9:.1f} GB are available; run this part alone (--contexts 0 or "
            "--throughput 0 leaves out the other one), with fewer --rows, or on a machine with more memory"
        )
        common.stage(self.refused[-1])
        return False


class Case:
    """HERALD's state for a shape, batch and capacity, with a cache in host memory that stays the same for all plans."""

    def __init__(self, config: ModelConfig, params: Params, batch: int, longest: int):
        self.config, self.params, self.batch = config, params, batch
        self.capacity = host_slots(config, longest)
        self.longest = longest + 64 * config.diffusion.block_length
        shape = (1, batch, config.num_kv_heads, self.capacity, config.head_dim)
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(config.dtype)))
        loud = jnp.asarray(loudness(config, longest), jnp.dtype(config.dtype))
        device = DeviceKV(make(jax.random.key(1)), make(jax.random.key(2)) * loud)
        layers = [host_kv.layer_to_host(device, None) for _ in range(config.num_layers)]
        jax.block_until_ready(layers)
        self.host = HostKV(tuple(k for k, _ in layers), tuple(v for _, v in layers))
        self.keys = device.k

    def index(self, bits: int) -> tuple[index_of.QuantisedKeys, ...]:
        """A quantised copy of every layer's keys (which are alike; the copies are not shared)."""
        return tuple(index_of.build(self.keys, bits=bits, mesh=None) for _ in range(self.config.num_layers))

    def start(self, plan: Herald, context: int) -> tuple[Pipeline, Rows]:
        """A pipeline whose rows have `context` tokens behind them."""
        config, batch, block = self.config, self.batch, self.config.diffusion.block_length
        pipeline = Pipeline(self.params, LoopOptions(config, plan=plan))
        pool = DeviceKV.empty(config, batch, pool_slots(plan, self.longest, block))
        entries = select.selected_capacity(plan, self.longest)
        chosen = np.full((entries,), -1, np.int32)
        chosen[: plan.entries(context)] = np.arange(plan.entries(context))
        indices = jnp.broadcast_to(jnp.asarray(chosen), (config.num_layers, batch, config.num_kv_heads, entries))
        nothing = jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype))
        full = np.full((batch,), context, np.int32)
        index = self.index(plan.index_bits) if plan.selector == "index" else ()
        cache = pipeline.adopt(Prefilled(self.host, None, pool, indices, nothing), full, index=index)
        tokens = np.ones((batch, self.capacity), np.int32)
        rows = first_canvas(
            self.params, cache, nothing, tokens, full, full, full + 2**20, np.zeros((batch,), bool),
            jax.random.split(jax.random.key(0), batch), NO_STOPS, GREEDY, options=LoopOptions(config, plan=plan),
        )  # fmt: skip
        return pipeline, rows

    def measure(self, plan: Herald, context: int, steps: int, blocks: int) -> dict[str, Any]:
        """Seconds of a block and its parts, and the pipeline's counters, over `blocks` blocks after two more."""
        pipeline, rows = self.start(plan, context)
        policy = StaticLowConfidence(min(steps, self.config.diffusion.block_length))
        with pipeline:
            how = (policy, GREEDY, NO_STOPS)
            at = []  # when the host was done with each block: it waits for a scan in each, so that a stall shows
            for i in range(blocks + 2):
                if i == 2:
                    before = pipeline.settle()
                    jax.block_until_ready(rows.length)
                    at.append(time.perf_counter())
                rows = pipeline.block(rows, *how, last=False)
                if i >= 2:
                    at.append(time.perf_counter())
            jax.block_until_ready(rows.length)
            block = (time.perf_counter() - at[0]) / blocks
            stats = pipeline.settle()
            self.host = pipeline._host  # appended to in place: the arrays that were put in are gone
            alone, how = [], pipeline._on_device(*how)
            for _ in range(3):
                began = time.perf_counter()
                rows, _, _ = draft(self.params, rows, *how, options=pipeline._options)
                rows = pipeline._denoise(rows, how, first=False)
                jax.block_until_ready(rows.length)
                alone.append(time.perf_counter() - began)
        own = min(alone)
        scan = (stats.scan_seconds - before.scan_seconds) / blocks
        return {
            "block": block,
            "each": np.diff(at).tolist(),
            "own": own,
            "exposed": max(block - own, 0.0) / block,
            "scan": scan,
            "scan_rate": (stats.scan_bytes - before.scan_bytes) / blocks / scan if scan else 0.0,
            "fetched": (stats.fetched_bytes - before.fetched_bytes) / blocks,
            "reused": (stats.reused_bytes - before.reused_bytes) / blocks,
            "stats": stats,
        }


def host_read_bandwidth(host: HostKV) -> float:
    """Bytes per second at which all cores together can read the cache in host memory (the best of three passes)."""
    views = [view.reshape(-1).view(np.int64) for k in host.k for view in host_views(k).values()]
    pieces = [piece for view in views for piece in np.array_split(view, 16)]
    taken = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in range(3):
            began = time.perf_counter()
            list(pool.map(np.max, pieces))
            taken.append(time.perf_counter() - began)
    return sum(view.nbytes for view in views) / min(taken)


# Device memory that activations and programs are given.
_WORKING = 1.5e9


def rows_that_fit(config: ModelConfig, context: int, cap: float) -> int:
    """The largest batch whose whole cache fits beside the weights, not a slot allocated in vain."""
    per_row = (context + 128) * config.kv_bytes_per_token
    return int((cap - weight_bytes(config) - _WORKING) // per_row)


def index_bits_that_fit(config: ModelConfig, budget: float, rows: int, context: int, cap: float) -> int:
    """8 if two pools and an index of 8 bits fit beside the weights, else 4."""
    plan, block = Herald(budget, selector="index"), config.diffusion.block_length
    longest = context + 64 * block
    pools = 2 * rows * pool_slots(plan, longest, block) * config.kv_bytes_per_token
    index = rows * host_slots(config, context) * config.kv_bytes_per_token // 4  # one byte for each two-byte key
    return 8 if weight_bytes(config) + pools + 1.02 * index + _WORKING < cap else 4


def main(options: argparse.Namespace) -> None:
    cap, blocks = options.cap * 1e9, options.blocks
    out: list[dict[str, Any]] = []
    room = HostRoom()

    def add(id: str, value: float, unit: str = "x", **detail: Any) -> None:
        out.append(common.row(id, value, unit, goal=GOALS.get(id), detail=detail or None))
        print(out[-1]["id"], out[-1]["value"], out[-1].get("detail", ""), flush=True)
        common.write_results("herald", out, folder=options.out)
        common.stage(id)

    budgets = [float(b) for b in options.budgets.split(",")]
    for name in options.shapes.split(","):
        config = SHAPES[name]
        params = init_params(config, jax.random.key(0))
        common.stage(f"{name}: weights made")
        contexts = [1024 * int(c) for c in options.contexts.split(",") if int(c)]
        if contexts and room.has(config, 1, max(contexts)):
            _latency(name, config, params, contexts, budgets, blocks, add)
        context = 1024 * int(options.throughput)
        if context and room.has(config, options.rows, context):
            _throughput(name, config, params, context, options.rows, budgets[0], cap, blocks, add)
        context = 1024 * options.over_cap
        if name == GOAL_SHAPE and context and room.has(config, 1, context):
            case = Case(config, params, 1, context)
            common.stage(f"{name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
            got = case.measure(plan_of(budgets[0]), context, 32, 1)
            stats = got["stats"]
            add(
                "context_over_cap/tokens", context, "tokens", host_bytes=stats.host_bytes, pool_bytes=stats.pool_bytes,
                weight_bytes=weight_bytes(config), cap_bytes=cap, block_ms=got["block"] * 1e3,
                steps_and_draft_ms=got["own"] * 1e3, scan_ms=got["scan"] * 1e3, scan_gbs=got["scan_rate"] / 1e9,
            )  # fmt: skip
            del case
        del params
    common.print_rows(out)
    if room.refused:
        raise SystemExit("error: left out: " + "; ".join(room.refused))


def plan_of(budget: float, selector: Literal["cpu", "index"] = "cpu", bits: int = 8) -> Herald:
    """The plan that is measured: the default but for the draft, made as early as what follows needs it."""
    return Herald(budget, draft_at="auto", selector=selector, index_bits=bits)


def drafted_after(config: ModelConfig, plan: Herald, rows: int, context: int, steps: int) -> int:
    """Positions of a block that are revealed when it is drafted."""
    prefix = jnp.full((rows,), context, jnp.int32)
    return int(draft_moment.revealed(prefix, StaticLowConfidence(steps), plan=plan, config=config)[0])


def _latency(
    name: str, config: ModelConfig, params: Params, contexts: list[int], budgets: list[float], blocks: int, add: Any
) -> None:
    """One row of every context, under both plans."""
    bases = dense(config, params, 1, contexts)
    common.stage(f"{name}: dense plan measured")
    case = Case(config, params, 1, max(contexts))
    common.stage(f"{name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
    for budget in budgets:
        speedups, exposed, plan = {}, [], plan_of(budget)
        for context in contexts:
            got = case.measure(plan, context, 32, blocks)
            base = bases[context].block(32)
            add(
                f"latency_case/{name}/{context // 1024}k/b1/{budget:g}/speedup", base / got["block"],
                block_ms=got["block"] * 1e3, dense_block_ms=base * 1e3, steps_and_draft_ms=got["own"] * 1e3,
                exposed=got["exposed"], scan_ms=got["scan"] * 1e3, scan_gbs=got["scan_rate"] / 1e9,
                each_ms=[1e3 * x for x in got["each"]],
                drafted_after=drafted_after(config, plan, 1, context, 32), fetched_bytes=got["fetched"],
                reused_bytes=got["reused"],
            )  # fmt: skip
            speedups[context] = base / got["block"]
            if got["scan"] < got["own"]:
                exposed.append(got["exposed"])
        if name != GOAL_SHAPE or budget != GOAL_BUDGET:
            continue
        add("latency/longest/speedup", speedups[max(contexts)])
        add("latency/all/worst_speedup", min(speedups.values()))
        if exposed:
            add("pipeline/exposed_fraction", max(exposed), "", over="cases whose scan is shorter than denoising")
        rate = host_read_bandwidth(case.host)
        add(
            "selection/cpu/host_bandwidth_fraction", got["scan_rate"] / rate, "", host_read_gbs=rate / 1e9,
            scan_gbs=got["scan_rate"] / 1e9,
        )  # fmt: skip
        moved = got["fetched"] / max(got["fetched"] + got["reused"], 1)
        add("gather/reuse/traffic_fraction", moved, "", note="random weights")


def _throughput(
    name: str, config: ModelConfig, params: Params, context: int, rows: int, budget: float, cap: float, blocks: int,
    add: Any,
) -> None:  # fmt: skip
    """`rows` rows of one context, beside as many as the dense plan has room for."""
    alone = rows_that_fit(config, context, cap)
    if alone < 1:
        raise SystemExit(f"error: not one row of {context} tokens fits {cap / 1e9} GB; choose a larger --cap")
    times = dense(config, params, alone, [context])[context]
    common.stage(f"{name}: dense plan measured with {alone} rows")
    case = Case(config, params, rows, context)
    common.stage(f"{name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
    bits = index_bits_that_fit(config, budget, rows, context, cap)
    goals = name == GOAL_SHAPE and budget == GOAL_BUDGET
    for steps in (32, 10):
        base, best = times.block(steps), 0.0
        for plan in (plan_of(budget), plan_of(budget, "index", bits)):
            if plan.selector == "cpu" and steps != 32:
                continue  # the scan does not get shorter with the block
            got = case.measure(plan, context, steps, blocks)
            gain = (rows / got["block"]) / (alone / base)
            best, stats = max(best, gain), got["stats"]
            add(
                f"throughput_case/{name}/{context // 1024}k/steps{steps}/{budget:g}/{plan.selector}", gain, rows=rows,
                dense_rows=alone, block_ms=got["block"] * 1e3, dense_block_ms=base * 1e3,
                steps_and_draft_ms=got["own"] * 1e3, exposed=got["exposed"], scan_ms=got["scan"] * 1e3,
                each_ms=[1e3 * x for x in got["each"]],
                scan_gbs=got["scan_rate"] / 1e9, drafted_after=drafted_after(config, plan, rows, context, steps),
                fetched_bytes=got["fetched"], host_bytes=stats.host_bytes, pool_bytes=stats.pool_bytes,
                index_bytes=stats.index_bytes, index_bits=plan.index_bits if plan.selector == "index" else None,
                cap_bytes=cap,
            )  # fmt: skip
            if goals and plan.selector == "cpu":
                add(f"throughput/{context // 1024}k/steps{steps}/cpu", gain)
        if goals:
            add(f"throughput/{context // 1024}k/steps{steps}/best", best)


def dense(config: ModelConfig, params: Params, batch: int, contexts: Sequence[int]) -> dict[int, mage.BlockTime]:
    """The dense plan's first and later forwards by one program, its device cache no longer than needed."""
    slots = max(contexts) + (mage.BLOCKS + 1) * config.diffusion.block_length
    capacity = -(-slots // 128) * 128
    return mage.measure_contexts(config, params, batch, contexts, Dense(), capacity=capacity)


if __name__ == "__main__":
    options = _options()
    if options.merge:
        common.print_rows(common.merge_results("herald", options.merge, folder=options.out))
        raise SystemExit
    cap_device_memory(options.cap)
    reserve_host_memory(options)
    main(options)
