"""The HERALD pipeline, host side: who works when, from prefill to the last block.

Per block: `draft` runs the steps up to the drafting moment and the draft. While worker threads scan the host's keys
with the draft's queries, `denoise` runs steps until so many masks are left as it takes steps to hide the fetch, the
last of them when most of the scores are on their way. When all are there, `finish` fills the spare pool beside the
block's last steps. (Where the scan takes longer than the block, `denoise` runs it to its end, and `fill` fills some
layers of the spare pool while others are scanned.) Then the block's K and V are appended to the host's cache, the pools
change places, and the next block begins.

All of it is launched ahead of the device, which sees to its loops itself: this thread waits for nothing but the scan.
Nor does the device wait for this thread where the first of these programs is launched (`begin`) before the last block
is read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax import device_index, draft_moment, host_kv, host_prefill, host_scores, offload, select, sharding
from herald_jax.denoise import Policy, Sampling
from herald_jax.device_index import QuantisedKeys
from herald_jax.errors import GenerationError
from herald_jax.host_kv import HostKV
from herald_jax.host_prefill import Prefilled
from herald_jax.host_select import Scanner
from herald_jax.loop_state import LoopOptions, Rows
from herald_jax.model import Params
from herald_jax.plans import Herald
from herald_jax.pool_fill import NEVER, Held, Moved
from herald_jax.pooled import PooledKV
from herald_jax.stats import OffloadStats

_ALL = -1  # so many masks are left when all of a block's steps have been made, and its commit
_LOOK = 2e-3  # seconds between two looks at what the device is doing, while the CPU scans
_MEASURED_BLOCKS = 2  # "auto" judges by the third block: the first two compile and page memory in
_TOLERATED = 0.05  # share of a scan that may be exposed before "auto" moves layers to the index


@dataclasses.dataclass(frozen=True)
class Begun:
    """A block whose first steps have been launched.

    Attributes:
      rows: after these steps.
      policy, how: the block's policy, and all that its programs take of the request, on the device.
      draft: the queries `[Ls, B, K, R, D]` that select for the next block, and i32[B], the prefix they select from.
        None where the block does not draft.
      whole: whether all of the block has been launched.
    """

    rows: Rows
    policy: Policy
    how: Any
    draft: tuple[jax.Array, jax.Array] | None = None
    whole: bool = False


class Pipeline:
    """One batch under HERALD. `close` it (or leave a `with`): it owns threads.

    Attributes:
      stats: what has been counted so far; `settle` adds what is still on the device.
    """

    def __init__(self, params: Params, options: LoopOptions):
        plan = options.plan
        assert isinstance(plan, Herald)
        if plan.measure and options.mesh is not None:
            raise GenerationError("measure is True, but each device of a mesh has a clock of its own; measure on one")
        self._params, self._plan = params, plan
        # What only the host side reads of a plan, no program is to be compiled anew for.
        same = dataclasses.replace(plan, selector="cpu", scan="auto", index_bits=8, split=0.5, draft_at=0.5)
        self._options = dataclasses.replace(options, plan=same)
        self._layers = options.config.num_layers - plan.dense_layers
        share = {"index": 1.0, "split": plan.split}.get(plan.selector, 0.0)
        self._indexed = round(share * self._layers) if plan.draft else 0  # leading pooled layers that the device scores
        self._scanner = Scanner(plan.scan)
        if plan.draft and plan.selector != "index":
            self._scanner.prepare(options.config.dtype, options.config.head_dim)
        self._everywhere = sharding.one_device() if options.mesh is None else NamedSharding(options.mesh, P())
        self._how: tuple[Any, Any] | None = None
        self._constants: dict[Any, jax.Array] = {}
        self._index: tuple[QuantisedKeys, ...] = ()
        self._moved: list[Moved] = []
        self._choose = plan.selector == "auto" and plan.draft  # not chosen yet
        self._wanted = self._indexed
        self.stats = OffloadStats(selector=plan.selector if plan.draft else "exact first step")

    def close(self) -> None:
        """End the worker threads; a scan in progress is waited for."""
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
        batch = tokens.shape[0]
        host_kv.check_room(host_kv.bytes_needed(config, batch, capacity, self._layers), gpu=host_kv.on_gpu(mesh))
        index: list[QuantisedKeys] = []

        def on_layer(layer: int, k: jax.Array) -> None:
            if layer < self._indexed:
                index.append(device_index.build(k, bits=plan.index_bits, mesh=mesh))

        done = host_prefill.prefill(
            self._params, tokens, lengths, known, config=config, plan=plan, capacity=capacity, longest=longest,
            chunk=chunk, mesh=mesh, implementation=self._options.implementation, on_layer=on_layer,
        )  # fmt: skip
        return self.adopt(done, lengths, index=tuple(index)), done.last_hidden

    def adopt(self, done: Prefilled, lengths: np.ndarray, *, index: tuple[QuantisedKeys, ...] = ()) -> PooledKV:
        """Go on from what a prefill of i32[B] `lengths` left (or made as one would). Returns the device's cache.

        `index`: of the leading pooled layers that the device is to score.
        """
        mesh, plan = self._options.mesh, self._plan
        self._host, self._index, self._lengths = done.host, index, lengths
        self._indexed = self._wanted = len(index)
        self._spare = jax.tree.map(jnp.zeros_like, done.pool)
        place = sharding.batch_place(mesh, 1)
        self._held = Held(done.indices, jax.device_put(np.full(lengths.shape, NEVER, np.int32), place))
        counts = np.array([plan.entries(int(n)) for n in lengths], np.int32)
        self.stats.host_bytes = self._host.nbytes
        self.stats.pool_bytes = 2 * done.pool.nbytes
        self.stats.dense_bytes = 0 if done.dense is None else done.dense.nbytes
        self.stats.index_bytes = sum(keys.nbytes for keys in self._index)
        never = jax.device_put(np.full(lengths.shape, NEVER, np.int32), place)  # until a block says when
        return PooledKV.around(done.dense, done.pool, jax.device_put(counts, place), never, self._options.config, mesh)

    def begin(self, rows: Rows, policy: Policy, sampling: Sampling, stops: Any, *, last: bool) -> Begun:
        """Launch what a block, of every row that is not done, has to do before anything is waited for.

        That is its steps up to the draft, and the draft; all of it if it is the `last` one, which prepares no other.
        Whoever reads the block before between this and `rest` leaves the device no moment without work. If it turns out
        that all rows are done, the block can be dropped: only the forward of the draft was in vain.
        """
        how = self._on_device(policy, sampling, stops)
        if not self._plan.draft:
            return Begun(rows, policy, how)
        if last:
            return Begun(self._denoise(rows, how, first=True), policy, how, whole=True)
        assert isinstance(rows.cache, PooledKV)
        moment = draft_moment.revealed(rows.length, how[0], plan=self._plan, config=self._options.config)
        rows = dataclasses.replace(rows, cache=dataclasses.replace(rows.cache, draft_from=moment))
        rows, queries, prefix = offload.draft(self._params, rows, *how, options=self._options)
        return Begun(rows, policy, how, draft=(queries, prefix))

    def rest(self, begun: Begun, *, last: bool) -> Rows:
        """The block that was begun, to its end, and the preparation of the next one (not if this is the `last`)."""
        rows, how = begun.rows, begun.how
        if begun.whole:
            return rows
        if begun.draft is None:
            return self._exact_block(rows, how, last=last)
        if last:
            return self._denoise(rows, how, first=False)
        queries, prefix = begun.draft
        if self._indexed < self._layers:
            rows, held = self._scan_beside(rows, begun.policy, how, queries, prefix)
        else:
            scored = self._index_scores(queries, prefix)
            rows, held = self._finish(rows, scored, prefix, how)
        self.stats.blocks += 1
        return self._turn(rows, held, prefix)

    def prepare(self, rows: Rows) -> tuple[Rows, Callable[[Rows], Rows]]:
        """What a block does beside its steps, by itself: for a replay, which makes the steps one by one.

        Args:
          rows: drafted, and not yet committed.

        Returns:
          The rows, and what is to be called with them when they have committed: it brings the next block's pool.
        """
        rows, queries, prefix = offload.ask(self._params, rows, options=self._options)
        scored = self._index_scores(queries, prefix)
        if self._indexed < self._layers:
            scan = self._scanner.submit(queries[self._indexed :], self._host.k[self._indexed :], prefix)
            scores, page = scan.parts[0].result().scores, select.scored_page(self._plan)
            scored += host_scores.weigh(scores, prefix, reduce=self._plan.reduce, page=page)
        held = self._fill(rows, self._held, scored, prefix, first=0)
        return rows, functools.partial(self._turn, held=held, prefix=prefix)

    def prepare_exactly(self, rows: Rows, *how: Any) -> tuple[Rows, Callable[[Rows], Rows]]:
        """The same without drafts: a block's own first step, which selects for it (policy, sampling, stops)."""
        rows = host_prefill.exact_step(self._params, rows, self._host, self._on_device(*how), self._options)

        def behind(rows: Rows) -> Rows:
            assert isinstance(rows.cache, PooledKV)
            self._append(rows.cache)
            return rows

        return rows, behind

    def _on_device(self, *how: Any) -> Any:
        """The numbers that every program takes, moved to the device once: each of them would be, with every call."""
        if self._how is None or any(a is not b for a, b in zip(how, self._how[0], strict=True)):
            self._how = (how, jax.device_put(how, self._everywhere))
        return self._how[1]

    def _constant(self, value: np.generic) -> jax.Array:
        key = (value.dtype, value.item())
        if key not in self._constants:
            self._constants[key] = jax.device_put(value, self._everywhere)
        return self._constants[key]

    def _denoise(self, rows: Rows, how: Any, *, first: bool, left: int = _ALL) -> Rows:
        where = tuple(self._constant(x) for x in (np.bool_(first), np.int32(left)))
        return offload.denoise(self._params, rows, *how, *where, options=self._options)

    def _index_scores(self, queries: jax.Array, prefix: jax.Array) -> tuple[jax.Array, ...]:
        """Importance of the layers that have an index."""
        if not self._index:
            return ()
        near = queries[: self._indexed]
        plan, options = self._plan, self._options
        return device_index.score(
            self._index, near, prefix, reduce=plan.reduce, page=select.scored_page(plan), mesh=options.mesh,
            implementation=options.implementation,
        )  # fmt: skip

    def _finish(self, rows: Rows, scored: tuple[jax.Array, ...], prefix: jax.Array, how: Any) -> tuple[Rows, Held]:
        """Fill the spare pool beside the steps that are left of the block."""
        held = self._held
        rows, self._spare, indices, moved = offload.finish(
            self._params, rows, self._spare, scored, prefix, held, self._host, *how, options=self._options
        )
        self._moved.append(moved)
        return rows, Held(indices, held.resident)

    def _fill(self, rows: Rows, held: Held, scored: tuple[jax.Array, ...], prefix: jax.Array, *, first: int) -> Held:
        """Fill `len(scored)` layers of the spare pool from layer `first` on; nothing is left to denoise."""
        cache, where = rows.cache, self._constant(np.int32(first))
        assert isinstance(cache, PooledKV)
        layers = slice(first, first + len(scored))
        host = HostKV(self._host.k[layers], self._host.v[layers])
        self._spare, indices, moved = offload.fill(
            cache.pool, cache.counts, self._spare, scored, prefix, held, host, where, options=self._options
        )
        self._moved.append(moved)
        return Held(indices, held.resident)

    def _scan_beside(
        self, rows: Rows, policy: Policy, how: Any, queries: jax.Array, prefix: jax.Array
    ) -> tuple[Rows, Held]:
        """Fill the spare pool by the CPU's scores (and the index', if it has layers), denoising the block meanwhile.

        In parts, where the scan takes longer than the steps and the fetch together: the steps are over long before the
        scan is, and each part is fetched while the next one is scanned.
        """
        assert isinstance(rows.cache, PooledKV)
        parts = self._parts(policy)
        layers = slice(parts[0].start, parts[-1].stop)
        near = queries[layers] if self._indexed else queries
        scan = self._scanner.submit(near, self._host.k[layers], prefix, parts=len(parts))
        scored = self._index_scores(queries, prefix)
        idle = _Idle()
        if len(parts) == 1:
            moved, config = host_scores.score_bytes(queries, self._host.k[layers]), self._options.config
            lengths = self._lengths + self.stats.blocks * config.diffusion.block_length
            selected = draft_moment.selected_bytes(lengths, self._layers, self._plan, config)
            early, left = draft_moment.left_for_transfers(selected, moved, policy, config)
            rows = self._denoise(rows, how, first=False, left=early)
            # A transfer waits for the programs that were launched before it: most of the scores have been sent before
            # these steps are launched, and arrive beside them.
            idle.wait(scan.nearly, rows.step)
            rows = self._denoise(rows, how, first=False, left=left)
        else:
            rows = self._denoise(rows, how, first=False)
        held, seconds = self._held, 0.0
        for part, future in zip(parts, scan.parts, strict=True):
            idle.wait(future, rows.step)
            scanned = future.result()
            seconds += scanned.seconds
            self.stats.scan_bytes += scanned.nbytes
            scored += host_scores.weigh(
                scanned.scores, prefix, reduce=self._plan.reduce, page=select.scored_page(self._plan)
            )
            if len(parts) == 1:
                rows, held = self._finish(rows, scored, prefix, how)
            else:
                held = self._fill(rows, held, scored, prefix, first=part.start)
                scored = ()
        self.stats.scan_seconds += seconds
        self.stats.scan_exposed_seconds += idle.seconds
        if self._choose and self.stats.blocks == _MEASURED_BLOCKS:
            self._choose_selector(seconds, idle.seconds)
        return rows, held

    def _parts(self, policy: Policy) -> list[slice]:
        """The pooled layers in the parts that the CPU scans, and that are fetched, one after the other.

        All of them at once where it scans none.
        """
        scanned = self._layers - self._indexed
        if not scanned:
            return [slice(0, self._layers)]
        # With an index for some layers the parts would be of two sizes: another program, for a case that has no need.
        count = draft_moment.parts(self._lengths, scanned, policy, self._plan, self._options.config)
        size = scanned if self._indexed else scanned // count
        return [slice(first, first + size) for first in range(self._indexed, self._layers, size)]

    def _choose_selector(self, seconds: float, exposed: float) -> None:
        """For "auto": keep to the CPU what it can finish in time, and index the other layers from the next block on.

        Judged by one block that neither compiles nor is the first: what was exposed of its scan is what is too much.
        """
        self._choose = False
        wanted = math.ceil(self._layers * min(exposed / seconds, 1.0)) if exposed > _TOLERATED * seconds else 0
        if exposed > 0.5 * seconds:
            wanted = self._layers  # the little that the CPU would do is not worth its waking up
        self._wanted = wanted

    def _turn(self, rows: Rows, held: Held, prefix: jax.Array) -> Rows:
        """Append the block to the host's cache, put it behind the filled pool's entries, and change the pools."""
        cache = rows.cache
        assert isinstance(cache, PooledKV)
        self._append(cache)
        if self._wanted > self._indexed:
            self._move_to_index()
        pool, counts, self._held, guess = offload.turn(
            self._spare, cache.outbox, cache.guess, held, prefix, cache.committed, options=self._options
        )
        # Outside any program: exchanged inside one, the two buffers would be copied.
        self._spare = cache.pool
        return dataclasses.replace(rows, cache=dataclasses.replace(cache, pool=pool, counts=counts, guess=guess))

    def _append(self, cache: PooledKV) -> None:
        mesh, block, where = self._options.mesh, cache.outbox, (cache.start, cache.committed)
        self._host = self._host.append(block, *where, mesh, self._options.implementation)
        if self._index:
            self._index = device_index.append(
                self._index, block.k[: self._indexed], *where, bits=self._plan.index_bits, mesh=mesh
            )

    def _move_to_index(self) -> None:
        """Build the index of as many layers as were found wanting, each brought to the device once."""
        place = host_kv.device_sharding(self._options.mesh)
        for layer in range(self._indexed, self._wanted):
            k = jax.device_put(self._host.k[layer], place)
            keys = device_index.build(k, bits=self._plan.index_bits, mesh=self._options.mesh)
            self._index = (*self._index, jax.block_until_ready(keys))
        self._indexed = self._wanted
        self.stats.index_bytes = sum(keys.nbytes for keys in self._index)
        share = "index" if self._indexed == self._layers else f"split, {self._indexed} of {self._layers} layers indexed"
        self.stats.selector = f"auto: {share}"

    def _exact_block(self, rows: Rows, how: Any, *, last: bool) -> Rows:
        """A block whose own first step selects: every layer's K and V pass through the device."""
        rows = host_prefill.exact_step(self._params, rows, self._host, how, self._options)
        rows = self._denoise(rows, how, first=False)
        cache = rows.cache
        assert isinstance(cache, PooledKV)
        self.stats.blocks += 1
        self.stats.fetched_bytes += self._host.nbytes
        if not last:
            self._append(cache)
        return rows

    def settle(self) -> OffloadStats:
        """`stats` with the counters that were still on the device."""
        config = self._options.config
        row_bytes = 2 * config.head_dim * jnp.dtype(config.dtype).itemsize
        for moved in self._moved:
            fetched, reused = np.asarray(moved.rows).sum(axis=1, dtype=np.int64)
            self.stats.fetched_bytes += int(fetched) * row_bytes
            self.stats.reused_bytes += int(reused) * row_bytes
            if moved.times is not None:
                halves = np.asarray(moved.times, np.uint64)
                (begun, ended), (_, stepped) = (halves[..., 0] | halves[..., 1] << np.uint64(32)).tolist()
                self.stats.fetch_seconds += (ended - begun) / 1e9
                self.stats.fetch_exposed_seconds += max(ended - max(begun, stepped), 0) / 1e9
        self._moved = []
        self.stats.scanned_by = self._scanner.by
        if self._plan.selector == "auto" and not self._choose and not self._indexed:
            self.stats.selector = "auto: cpu"
        return dataclasses.replace(self.stats)


class _Idle:
    """Counts the seconds for which the device had nothing to do while the host waited.

    What is waited for is followed by launches, which are best made before the steps on the device are over.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def wait(self, event: concurrent.futures.Future[Any], steps: Any) -> None:
        """Wait until `event` is over, by whatever end. The device has `steps` for a result of what it was given."""
        since = None
        while not event.done():
            if since is None and steps.is_ready():
                since = time.perf_counter()
            concurrent.futures.wait([event], timeout=_LOOK)
        self.seconds += 0.0 if since is None else time.perf_counter() - since
