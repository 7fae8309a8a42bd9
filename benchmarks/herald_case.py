"""A HERALD pipeline for a benchmark: random weights, random K and V in host memory, a block's time and its parts.

Memory, too: the cap on what JAX may take of the device, what a case needs of the host, and whether that is there.
"""

from __future__ import annotations

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
from benchmarks.block_times import GREEDY, NO_STOPS, contrast
from benchmarks.shapes import weight_bytes
from herald_jax import Dense, Herald, ModelConfig, StaticLowConfidence, draft_moment, host_kv, offload, select
from herald_jax import device_index as index_of
from herald_jax.block_loop import first_canvas
from herald_jax.cache import DeviceKV
from herald_jax.herald import Pipeline
from herald_jax.host_kv import HostKV
from herald_jax.host_prefill import Prefilled
from herald_jax.host_scores import host_views
from herald_jax.loop_state import LoopOptions, Rows
from herald_jax.model import Params
from herald_jax.pooled import PooledKV, pool_slots


def cap_device_memory(gigabytes: float) -> None:
    """Let JAX use so much of the GPU's memory. Has to come before JAX's first use; without a GPU it does nothing."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
        total = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20
    except (OSError, subprocess.CalledProcessError):
        return
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{min(gigabytes * 1e9 / total, 0.95):.4f}"


def host_slots(config: ModelConfig, longest: int) -> int:
    """Slots of each row of a case's cache: its context and as many blocks as are run (page-locking takes seconds)."""
    return -(-(longest + 32 * config.diffusion.block_length) // 128) * 128


def cache_bytes(config: ModelConfig, rows: int, context: int) -> int:
    """Host memory of a case's cache."""
    return rows * host_slots(config, context) * config.kv_bytes_per_token


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
        self._compiled: set[Any] = set()
        # Committed to their device, as what a prefill makes is: else the first block's programs are others than the
        # second's, and each is compiled twice.
        self._here = next(iter(host_kv.device_sharding(None).device_set))
        shape = (1, batch, config.num_kv_heads, self.capacity, config.head_dim)
        make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(config.dtype)))
        of_k, of_v = (jnp.asarray(times, jnp.dtype(config.dtype)) for times in contrast(config))
        k, v = make(jax.random.key(1)) * of_k, make(jax.random.key(2)) * of_v
        device = jax.device_put(DeviceKV(k, v), self._here)
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
        indices = jax.device_put(indices, self._here)
        cache = pipeline.adopt(Prefilled(self.host, None, pool, indices, nothing), full, index=index)
        tokens = np.ones((batch, self.capacity), np.int32)
        rows = first_canvas(
            self.params, cache, nothing, tokens, full, full, full + 2**20, np.zeros((batch,), bool),
            jax.random.split(jax.random.key(0), batch), NO_STOPS, GREEDY, options=LoopOptions(config, plan=plan),
        )  # fmt: skip
        return pipeline, rows

    def measure(self, plan: Herald, context: int, steps: int, blocks: int) -> dict[str, Any]:
        """Seconds of a block and its parts, and the pipeline's counters, of `blocks` blocks after two more.

        Times are medians. The host waits for each when the next one has been begun, as `generate` does to hand out what
        was written.
        """
        pipeline, rows = self.start(plan, context)
        how = (StaticLowConfidence(min(steps, self.config.diffusion.block_length)), GREEDY, NO_STOPS)
        with pipeline:
            self._compile(pipeline, rows, how[0])
            at, scanned = [], []
            begun = pipeline.begin(rows, *how, last=False)
            for i in range(blocks + 2):
                rows = pipeline.rest(begun, last=False)
                length = jnp.copy(rows.length)  # the next block takes the rows over
                begun = pipeline.begin(rows, *how, last=False)
                jax.block_until_ready(length)
                if i >= 1:
                    at.append(time.perf_counter())
                    scanned.append(pipeline.stats.scan_seconds)
                if i == 1:
                    before = pipeline.settle()
            stats = pipeline.settle()
            rows = pipeline.rest(begun, last=True)
            self.host = pipeline._host  # appended to in place: the arrays that were put in are gone
            own = self._own(pipeline, rows, pipeline._on_device(*how))
        each = np.diff(at)
        block = float(np.median(each))
        scan = float(np.median(np.diff(scanned)))
        return {
            "block": block,
            "each": each.tolist(),
            "own": own,
            "exposed": max(block - own, 0.0) / block,
            "scan": scan,
            "scan_rate": (stats.scan_bytes - before.scan_bytes) / blocks / scan if scan else 0.0,
            "fetched": (stats.fetched_bytes - before.fetched_bytes) / blocks,
            "reused": (stats.reused_bytes - before.reused_bytes) / blocks,
            "fetch": (stats.fetch_seconds - before.fetch_seconds) / blocks,
            "fetch_exposed": (stats.fetch_exposed_seconds - before.fetch_exposed_seconds) / blocks,
            "stats": stats,
        }

    def _own(self, pipeline: Pipeline, rows: Rows, how: Any) -> float:
        """Seconds of a block's steps and its draft with nothing beside them: the lesser of two.

        Of runs of one and of five blocks, so that the device waits for no launch: it does not in the pipeline either.
        """

        def run(blocks: int, rows: Rows) -> tuple[float, Rows]:
            began = time.perf_counter()
            for _ in range(blocks):
                rows, _, _ = offload.draft(self.params, rows, *how, options=pipeline._options)
                rows = pipeline._denoise(rows, how, first=False)
            jax.block_until_ready(rows.length)
            return time.perf_counter() - began, rows

        taken = []
        jax.block_until_ready(rows.length)  # what was launched before
        for _ in range(2):
            one, rows = run(1, rows)
            five, rows = run(5, rows)
            taken.append((five - one) / 4)
        return min(taken)

    def _compile(self, pipeline: Pipeline, rows: Rows, policy: StaticLowConfidence) -> None:
        """The programs that hold the model, side by side: one after the other, as blocks would, takes a minute.

        The calls that follow find them. Whoever changes what the pipeline passes to them finds them compiled twice.
        """
        parts = pipeline._parts(policy)
        if (pipeline._options, len(parts)) in self._compiled:
            return
        self._compiled.add((pipeline._options, len(parts)))
        params, options, how = self.params, pipeline._options, pipeline._on_device(policy, GREEDY, NO_STOPS)
        pages = -(-self.capacity // select.scored_page(pipeline._plan))
        scores = jnp.zeros((self.batch, self.config.num_kv_heads, pages), jnp.float32, device=self._here)
        yes, zero = pipeline._constant(np.bool_(True)), pipeline._constant(np.int32(0))
        scored = (scores,) * (parts[0].stop - parts[0].start)
        pools = (pipeline._spare, scored, rows.length, pipeline._held, pipeline._host)
        programs: list[tuple[Any, tuple[Any, ...]]] = [
            (offload.draft, (params, rows, *how)),
            (offload.denoise, (params, rows, *how, yes, zero)),
        ]
        if len(parts) == 1:
            programs.append((offload.finish, (params, rows, *pools, *how)))
        else:
            assert isinstance(rows.cache, PooledKV)
            host = HostKV(pipeline._host.k[parts[0]], pipeline._host.v[parts[0]])
            programs.append((offload.fill, (rows.cache.pool, rows.cache.counts, *pools[:-1], host, zero)))
        with ThreadPoolExecutor(len(programs)) as threads:  # lowering holds Python's lock, compiling does not
            made = [threads.submit(f.lower(*arguments, options=options).compile) for f, arguments in programs]
        for program in made:
            program.result()


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
# Bytes of an index, scales included, for each number of K (`device_index`).
_INDEX_BYTES: dict[int, float] = {8: 1 + 1 / 64, 4: 1 / 2 + 1 / 16}


def rows_that_fit(config: ModelConfig, context: int, cap: float) -> int:
    """The largest batch whose whole cache fits beside the weights, not a slot allocated in vain."""
    per_row = (context + 128) * config.kv_bytes_per_token
    return int((cap - weight_bytes(config) - _WORKING) // per_row)


def index_bits_that_fit(config: ModelConfig, budget: float, rows: int, context: int, cap: float) -> Literal[8, 4]:
    """8 if two pools and an index of 8 bits fit beside the weights, else 4."""
    return 8 if _with_index(config, budget, rows, context, 8) < cap else 4


def rows_with_index(config: ModelConfig, budget: float, rows: int, context: int, cap: float) -> int:
    """The largest batch of at most `rows` whose two pools and index of 4 bits fit beside the weights."""
    return next((n for n in range(rows, 0, -1) if _with_index(config, budget, n, context, 4) < cap), 0)


def _with_index(config: ModelConfig, budget: float, rows: int, context: int, bits: Literal[8, 4]) -> float:
    """Device memory of a case with an index of so many bits."""
    plan, block = Herald(budget, selector="index"), config.diffusion.block_length
    longest = context + 64 * block
    pools = 2 * rows * pool_slots(plan, longest, block) * config.kv_bytes_per_token
    # Half of the cache's bytes are keys, of two bytes a number.
    numbers = rows * host_slots(config, context) * config.kv_bytes_per_token // 4
    return weight_bytes(config) + pools + _INDEX_BYTES[bits] * numbers + _WORKING


def plan_of(
    budget: float, selector: Literal["cpu", "index"] = "cpu", bits: Literal[8, 4] = 8, *, keep_bonus: float = 0.0,
    measure: bool = False, scan: Literal["auto", "native", "xla"] = "auto",
) -> Herald:  # fmt: skip
    """The plan that is measured: the default but for the draft, made as early as what follows needs it, and the bonus.

    With random weights entries score nearly alike: with a bonus next to none of a pool would be fetched.
    """
    return Herald(
        budget, draft_at="auto", selector=selector, scan=scan, index_bits=bits, keep_bonus=keep_bonus, measure=measure
    )  # fmt: skip


def drafted_after(config: ModelConfig, plan: Herald, rows: int, context: int, steps: int) -> int:
    """Positions of a block that are revealed when it is drafted."""
    prefix = jnp.full((rows,), context, jnp.int32)
    return int(draft_moment.revealed(prefix, StaticLowConfidence(steps), plan=plan, config=config)[0])


def dense(config: ModelConfig, params: Params, batch: int, contexts: Sequence[int]) -> dict[int, mage.BlockTime]:
    """The dense plan's first and later forwards by one program, its device cache no longer than needed."""
    slots = max(contexts) + (mage.BLOCKS + 1) * config.diffusion.block_length
    capacity = -(-slots // 128) * 128
    return mage.measure_contexts(config, params, batch, contexts, Dense(), capacity=capacity)
