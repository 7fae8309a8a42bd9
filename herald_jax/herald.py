"""The HERALD pipeline, host side: who works when, from prefill to the last block.

Per block: `denoise` up to the drafting moment, `draft`, and while the worker thread scans the host's keys with the
draft's queries, more `denoise` segments. When the scores are there, `finish` fills the spare pool beside the block's
last steps. Then the block's K and V are appended to the host's cache, the pools change places, and the next block
begins.

Programs are dispatched ahead of their results: a segment that finds its block finished ends at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import host_kv, host_prefill, offload
from herald_jax.block_loop import LoopOptions, Rows
from herald_jax.cache import DeviceKV
from herald_jax.denoise import Policy, Sampling
from herald_jax.host_select import Scanned, Scanner
from herald_jax.model import Params
from herald_jax.offload import Held
from herald_jax.plans import Herald
from herald_jax.pooled import PooledKV
from herald_jax.stats import OffloadStats

_NEVER = np.int32(2**31 - 1)


class Pipeline:
    """One batch under HERALD. `close` it (or leave a `with`): it owns a thread.

    Attributes:
      stats: what has been counted so far.
    """

    def __init__(self, params: Params, options: LoopOptions):
        plan = options.plan
        assert isinstance(plan, Herald)
        self._params, self._options, self._plan = params, options, plan
        self._scanner = Scanner(plan.reduce)
        self.stats = OffloadStats(selector=plan.selector)

    def close(self) -> None:
        """End the worker thread; a scan in progress is waited for."""
        self._scanner.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prefill(
        self, tokens: np.ndarray, lengths: np.ndarray, known: np.ndarray, *, capacity: int, longest: int, chunk: int
    ) -> tuple[PooledKV, jax.Array]:
        """Prefill and select for the first blocks; see `host_prefill.prefill`. Returns the device's cache and `[B, E]`.

        Raises GenerationError if the host has no room for the cache.
        """
        config, mesh, plan = self._options.config, self._options.mesh, self._plan
        layers = config.num_layers - plan.dense_layers
        batch = tokens.shape[0]
        host_kv.check_room(host_kv.bytes_needed(config, batch, capacity, layers), gpu=host_kv.on_gpu(mesh))
        done = host_prefill.prefill(
            self._params, tokens, lengths, known, config=config, plan=plan, capacity=capacity, longest=longest,
            chunk=chunk, mesh=mesh, implementation=self._options.implementation,
        )  # fmt: skip
        self._host = done.host
        self._spare = jax.tree.map(jnp.zeros_like, done.pool)
        never = jax.device_put(np.full((batch,), _NEVER), lengths_sharding(mesh))
        self._held = Held(done.indices, never)
        counts = jax.device_put(np.array([plan.entries(int(n)) for n in lengths], np.int32), lengths_sharding(mesh))
        self.stats.host_bytes = self._host.nbytes
        self.stats.pool_bytes = 2 * done.pool.nbytes
        self.stats.dense_bytes = 0 if done.dense is None else done.dense.nbytes
        cache = PooledKV.around(done.dense, done.pool, counts, config, mesh)
        return cache, done.last_hidden

    def block(self, rows: Rows, policy: Policy, sampling: Sampling, stops: Any, *, last: bool) -> Rows:
        """One block of every row that is not done, and the preparation of the next one (not if this is the `last`)."""
        how = (policy, sampling, stops)
        yes, no = np.bool_(True), np.bool_(False)
        block = self._options.config.diffusion.block_length
        if last:
            return offload.denoise(self._params, rows, *how, yes, _NEVER, _NEVER, options=self._options)[0]
        target = np.int32(np.ceil(self._plan.draft_at * block))
        rows, _ = offload.denoise(self._params, rows, *how, yes, _NEVER, target, options=self._options)
        rows, queries, prefix = offload.draft(self._params, rows, options=self._options)
        future = self._scanner.submit(queries, self._host.k, prefix)
        del queries
        inside: deque[jax.Array] = deque()
        steps = np.int32(self._plan.segment)
        finished = False
        while not future.done() and not finished:
            rows, more = offload.denoise(self._params, rows, *how, no, steps, _NEVER, options=self._options)
            inside.append(more)
            if len(inside) > 1:  # one segment stays queued, so that the device has work while this one is asked
                finished = not bool(inside.popleft())
        waiting = time.perf_counter()
        if finished:
            jax.block_until_ready(rows.step)
            waiting = time.perf_counter()
        scanned: Scanned = future.result()
        exposed = time.perf_counter() - waiting if finished else 0.0
        rows, spare, held, moved = offload.finish(
            self._params, rows, self._spare, scanned.importance, prefix, self._held, self._host, *how,
            options=self._options,
        )  # fmt: skip
        self._count(scanned, exposed, moved)
        del scanned
        return self._turn(rows, spare, held, prefix)

    def _turn(self, rows: Rows, spare: DeviceKV, held: Held, prefix: jax.Array) -> Rows:
        """Append the block to the host's cache, put it behind the filled pool's entries, and change the pools."""
        cache = rows.cache
        assert isinstance(cache, PooledKV)
        self._host = self._host.append(
            cache.outbox, cache.start, cache.committed, self._options.mesh, self._options.implementation
        )
        pool, counts, self._held, guess = offload.turn(
            spare, cache.outbox, cache.guess, held, prefix, cache.committed, options=self._options
        )
        # Outside any program: exchanged inside one, the two buffers would be copied.
        self._spare = cache.pool
        return dataclasses.replace(rows, cache=dataclasses.replace(cache, pool=pool, counts=counts, guess=guess))

    def _count(self, scanned: Scanned, exposed: float, moved: jax.Array) -> None:
        stats, config = self.stats, self._options.config
        stats.blocks += 1
        stats.scan_seconds += scanned.seconds
        stats.scan_bytes += scanned.nbytes
        stats.scan_exposed_seconds += exposed
        self._moved = getattr(self, "_moved", [])
        self._moved.append((moved, 2 * config.head_dim * jnp.dtype(config.dtype).itemsize))

    def settle(self) -> OffloadStats:
        """`stats` with the counters that were still on the device."""
        for moved, row_bytes in getattr(self, "_moved", []):
            fetched, reused = np.asarray(moved).sum(axis=1, dtype=np.int64)
            self.stats.fetched_bytes += int(fetched) * row_bytes
            self.stats.reused_bytes += int(reused) * row_bytes
        self._moved = []
        return dataclasses.replace(self.stats)


def lengths_sharding(mesh: Any) -> Any:
    """Where an i32[B] lives."""
    from herald_jax import sharding

    return sharding.one_device() if mesh is None else sharding.batch_sharding(mesh, 1)
