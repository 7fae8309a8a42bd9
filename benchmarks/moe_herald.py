"""HERALD's throughput on a mixture of experts for `benchmarks.moe`, beside the dense plan's under one cap.

As `benchmarks.herald` measures it: random caches instead of a prefill, JAX's device memory capped, the dense plan with
as many rows as the cap has room for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Literal

from benchmarks import common, herald_case
from benchmarks.block_times import BLOCKS, lower_ahead, measure_contexts
from benchmarks.shapes import SHAPES, weight_bytes
from herald_jax import Dense, Herald, host_kv
from herald_jax.model import Params
from herald_jax.pooled import pool_slots

STEPS = 8  # denoising steps of a block, under both plans
TIMED = 8  # blocks of each selector


def prepare(name: str, rows: int, context: int, cap: float) -> None:
    """Caps JAX's device memory at `cap` bytes and page-locked memory at the need. Has to come before JAX's first use.

    Raises SystemExit if the host may have no room for the case.
    """
    herald_case.cap_device_memory(cap / 1e9)
    needed = herald_case.cache_bytes(SHAPES[name], rows, context)
    os.environ[host_kv.LIMIT_VARIABLE] = str(int(1.1 * needed / 1e9) + 2)
    room = herald_case.HostRoom()
    if not room.has(SHAPES[name], rows, context):
        raise SystemExit("error: " + room.refused[0])


class Throughput:
    """The dense plan's and HERALD's tokens a second, of one shape and context under a cap of `cap` bytes.

    What takes long without the weights is begun here, in threads of `pool`: the dense program's compilation, and the
    host's cache, whose pages are locked one by one. `Case` compiles HERALD's programs when they are first needed.

    Raises SystemExit where either plan does not fit the cap.
    """

    def __init__(self, name: str, rows: int, context: int, cap: float, pool: Executor):
        self.name, self.config = name, SHAPES[name]
        self.rows, self.context, self.cap = rows, context, cap
        self.alone = herald_case.rows_that_fit(self.config, context, cap)
        if self.alone < 1:
            raise SystemExit(
                f"error: {name} with one row of {context} tokens does not fit the cap of {cap / 1e9:.4g} GB"
            )
        held = held_bytes(name, self.plan("index"), rows, context)
        if held > cap:
            raise SystemExit(
                f"error: HERALD with {rows} rows holds {held / 1e9:.4g} GB, more than the cap of {cap / 1e9:.4g} GB: "
                "take fewer rows"
            )
        self.slots = -(-(context + (BLOCKS + 1) * self.config.diffusion.block_length) // 128) * 128  # none in vain
        self._case: Future = pool.submit(self._page_lock)
        lowered = lower_ahead(self.config, self.alone, context, Dense(), self.slots)
        self._dense: Future = pool.submit(lowered.compile)

    def _page_lock(self) -> herald_case.Case:
        case = herald_case.Case(self.config, {}, self.rows, self.context)  # parameters come when they are there
        common.stage(f"{self.name}: {case.host.nbytes / 1e9:.0f} GB in host memory")
        return case

    def wait(self) -> None:
        """Until what was begun is done."""
        self._dense.result()
        self._case.result()

    def plan(self, selector: Literal["cpu", "index"]) -> Herald:
        """What is measured, with the finest index that fits."""
        budget = Herald().budget
        bits = herald_case.index_bits_that_fit(self.config, budget, self.rows, self.context, self.cap)
        return herald_case.plan_of(budget, selector, bits)

    def measure(
        self, params: Params, selectors: Sequence[Any], add: Callable[[dict[str, Any]], None], goal: str | None
    ) -> None:
        """Adds a row for each of `selectors`, HERALD's tokens a second over the dense plan's, and one of the best."""
        config, rows, alone = self.config, self.rows, self.alone
        block = config.diffusion.block_length
        run = self._dense.result()
        times = measure_contexts(config, params, alone, [self.context], Dense(), run, self.slots)[self.context]
        base, best = alone * block / times.block(STEPS), 0.0
        common.stage(f"{self.name}: dense plan measured with {alone} rows")
        case = self._case.result()
        case.params = params
        id = f"{self.name}/{self.context // 1024}k"
        for selector in selectors:
            plan = self.plan(selector)
            got = case.measure(plan, self.context, STEPS, TIMED)
            rate, kept = rows * block / got["block"], got["stats"]
            best = max(best, rate / base)
            detail = {
                "cap_bytes": self.cap, "herald_rows": rows, "dense_rows": alone, "steps": STEPS,
                "herald_tokens_per_s": rate, "dense_tokens_per_s": base, "block_ms": got["block"] * 1e3,
                "dense_block_ms": times.block(STEPS) * 1e3, "each_ms": [1e3 * x for x in got["each"]],
                "steps_and_draft_ms": got["own"] * 1e3, "exposed": got["exposed"], "scan_ms": got["scan"] * 1e3,
                "scan_gbs": got["scan_rate"] / 1e9, "fetched_bytes": got["fetched"], "host_bytes": kept.host_bytes,
                "weight_bytes": weight_bytes(config), "pool_bytes": kept.pool_bytes, "index_bytes": kept.index_bytes,
                "index_bits": plan.index_bits if selector == "index" else None,
            }  # fmt: skip
            add(common.row(f"herald_case/{id}/{selector}", rate / base, "x", detail=detail))
            common.stage(f"{self.name}: HERALD measured, selector {selector}")
        detail = {"cap_bytes": self.cap, "herald_rows": rows, "dense_rows": alone, "steps": STEPS}
        add(common.row(f"herald/{id}/throughput", best, "x", goal=goal, detail=detail))


def held_bytes(name: str, plan: Herald, rows: int, context: int) -> float:
    """Device memory that HERALD holds from block to block: weights, two pools and the index."""
    config, block = SHAPES[name], SHAPES[name].diffusion.block_length
    index = 0.0
    if plan.selector == "index":  # codes and scales of keys, which are half of the cache
        keys = rows * herald_case.host_slots(config, context) * config.kv_bytes_per_token / 2
        index = keys * (0.508 if plan.index_bits == 8 else 0.2813)
    pools = 2 * rows * pool_slots(plan, context + 64 * block, block) * config.kv_bytes_per_token
    return weight_bytes(config) + pools + index
