"""How the Mosaic GPU kernel of `block_attention` cuts a problem into tiles and splits.

See `Plan` for the words used; docs/kernels.md for why the defaults are what they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
SMEM_LIMIT = 227 * 1024
# Besides the tiles: Mosaic's scratch for reductions across warps (2 KB), the barriers and their alignment.
SMEM_RESERVED = 3 * 1024
PAGE = 8  # entries whose weights a kernel that keeps them by page adds up: those that a quad of threads holds
PROCESSORS = 132  # multiprocessors of an H100 or H200 (SXM); fewer only makes the last wave less full


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Tile sizes of the kernel; None means chosen from the shapes.

    warpgroups: compute warpgroups per program, 1 to 3, of 64 query rows each. Three go with a kv_tile of 64: they have
      fewer registers.
    query_chunk: consecutive queries of one head that stay together in a tile; a power of two from 8 to 64 * warpgroups.
    kv_tile: KV entries per step, a multiple of 64 up to 256.
    stages: K and V tiles in flight, at least 2.
    splits: into how many parts the entries of a KV head are cut.
    ping_pong: whether two warpgroups take turns at the tensor cores.
    """

    warpgroups: int | None = None
    query_chunk: int | None = None
    kv_tile: int | None = None
    stages: int | None = None
    splits: int | None = None
    ping_pong: bool | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A problem cut into programs.

    A *slab* is `query_chunk` consecutive queries of one query head; the slabs of a KV head are numbered chunk-major
    (chunk * G + member) and `slabs` of them make a *tile* of `rows` query rows; R = `tiles` cover a KV head. Each tile
    is computed by `splits` programs, each over its share of the KV entries.

    keep_weights: the kernel stores the weights of one query per row of the batch (importance of one query).
    keep_pages: the kernel stores the weights of every query row, summed over PAGE entries (importance by page).
    prefix_sums: the kernel also returns the log-sum-exp over the prefix alone.
    """

    batch: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    entries: int
    runs: int
    dtype: Any
    warpgroups: int
    query_chunk: int
    kv_tile: int
    stages: int
    splits: int
    ping_pong: bool
    keep_weights: bool = False
    keep_pages: bool = False
    prefix_sums: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute warpgroup, and of the one that copies."""
        return (160, 24) if self.warpgroups > 2 else (232, 40)

    @property
    def slabs(self) -> int:
        return self.rows // self.query_chunk

    @property
    def slabs_per_warpgroup(self) -> int:
        return max(1, 64 // self.query_chunk)

    @property
    def chunks(self) -> int:
        return -(-self.queries // self.query_chunk)

    @property
    def tiles(self) -> int:
        return -(-self.chunks * self.group // self.slabs)

    @property
    def kv_tiles(self) -> int:
        return -(-self.entries // self.kv_tile)

    @property
    def used_rows(self) -> int:
        """How many of a KV head's `tiles * rows` rows hold slabs."""
        return self.chunks * self.group * self.query_chunk

    @property
    def padded_queries(self) -> int:
        """How long q's query axis must be for the copies: they go by 8 queries, in boxes no longer than the axis."""
        return max(-(-self.queries // 8) * 8, self.query_chunk)

    @property
    def row_shape(self) -> tuple[int, int, int, int]:
        """[B, K, R, rows]: *row order*, the order in which the kernel holds query rows."""
        return self.batch, self.kv_heads, self.tiles, self.rows

    def row_of(self, query: Any, member: Any) -> tuple[Any, Any]:
        """(tile, row in the tile) of a query of the group's query head `member`; traced i32."""
        chunk, offset = divide(query, self.query_chunk)
        tile, slab = divide(chunk * self.group + member, self.slabs)
        return tile, slab * self.query_chunk + offset

    @property
    def queries_per_run(self) -> int:
        return self.queries // self.runs

    @property
    def uniform(self) -> bool:
        """Whether all queries of every tile belong to one run, and so see the same entries."""
        if self.runs == 1:
            return True
        for tile in range(self.tiles):
            low = tile * self.slabs // self.group * self.query_chunk
            slab = min((tile + 1) * self.slabs, self.chunks * self.group) - 1
            high = min((slab // self.group + 1) * self.query_chunk, self.queries) - 1
            if low // self.queries_per_run != high // self.queries_per_run:
                return False
        return True

    def smem_bytes(self) -> int:
        """Estimated shared memory of a program."""
        elements = self.rows + 2 * self.stages * self.kv_tile
        return elements * self.head_dim * jnp.dtype(self.dtype).itemsize + SMEM_RESERVED

    def row_limits(self, lengths: jax.Array) -> list[jax.Array]:
        """Per-row lengths `i32[B, R, rows]`, and the (shortest, longest) of each tile `i32[B, R, 2]`."""
        limits = jnp.repeat(jnp.clip(lengths, 0, self.entries), self.queries_per_run, axis=1)
        pad = self.chunks * self.query_chunk - self.queries
        limits = jnp.pad(limits, ((0, 0), (0, pad)), mode="edge").reshape(self.batch, self.chunks, 1, self.query_chunk)
        slabs = jnp.broadcast_to(limits, (self.batch, self.chunks, self.group, self.query_chunk))
        slabs = slabs.reshape(self.batch, self.chunks * self.group, self.query_chunk)
        slabs = jnp.pad(slabs, ((0, 0), (0, self.tiles * self.slabs - slabs.shape[1]), (0, 0)), mode="edge")
        rows = slabs.reshape(self.batch, self.tiles, self.rows)
        return [rows, jnp.stack([jnp.min(rows, axis=-1), jnp.max(rows, axis=-1)], axis=-1)]

    def queries_to_rows(self, x: jax.Array, fill: float) -> jax.Array:
        """From `[B, T, H]` to row order `[B, K, R, rows]`; rows that are no query get `fill`."""
        pad = self.chunks * self.query_chunk - self.queries
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)), constant_values=fill)
        x = x.reshape(self.batch, self.chunks, self.query_chunk, self.kv_heads, self.group)
        x = jnp.transpose(x, (0, 3, 1, 4, 2)).reshape(self.batch, self.kv_heads, -1, self.query_chunk)
        pad = self.tiles * self.slabs - self.chunks * self.group
        return jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0)), constant_values=fill).reshape(self.row_shape)

    def row_bias(self, chosen: jax.Array, lse: jax.Array, reduce: str) -> jax.Array:
        """In row order, from `lse f32[B, T, H]`: a row's weight of an entry is exp2(score + bias), the score to base 2.

        The bias holds its log-sum-exp, its share of the mean, and -inf if it is none of `chosen bool[B, T]`.
        """
        bias = self.row_shares(chosen, reduce)[:, :, None] - lse * LOG2E
        return self.queries_to_rows(jnp.where(lse > -jnp.inf, bias, -jnp.inf), -jnp.inf)

    def row_shares(self, chosen: jax.Array, reduce: str) -> jax.Array:
        """`f32[B, T]`: what weights of the `chosen bool[B, T]` queries count in `reduce`, to base 2; of others -inf."""
        each = jnp.zeros((), jnp.float32)
        if reduce == "mean":
            each = -jnp.log2((jnp.maximum(jnp.sum(chosen, axis=1), 1) * self.group).astype(jnp.float32))[:, None]
        return jnp.where(chosen, each, -jnp.inf)

    def rows_to_queries(self, x: jax.Array) -> jax.Array:
        """From row order `[B, K, R, rows, ...]` to `[B, T, H, ...]`."""
        x = x.reshape(self.batch, self.kv_heads, self.tiles * self.slabs, self.query_chunk, *x.shape[4:])
        x = x[:, :, : self.chunks * self.group]
        x = x.reshape(self.batch, self.kv_heads, self.chunks, self.group, self.query_chunk, *x.shape[4:])
        x = jnp.moveaxis(x, (2, 4), (1, 2))  # [B, chunks, query_chunk, K, G, ...]
        x = x.reshape(self.batch, self.chunks * self.query_chunk, self.kv_heads * self.group, *x.shape[5:])
        return x[:, : self.queries]


def slabs(plan: Plan, batch, head, tile, warpgroup) -> Iterator[tuple[Any, tuple, Any]]:
    """The slabs of a warpgroup's 64 rows of a tile, inside a kernel, all but the plan traced i32 scalars.

    For each: its rows among the 64, its index into q or out `[B, T, H, D]`, and whether any of it exists. If not, the
    index is behind the queries, from where copies read zeros: a card at the end of its power runs slower for what is
    computed of other numbers. A slab longer than 64 comes as its part.
    """
    size = min(plan.query_chunk, 64)
    count = plan.chunks * plan.group
    for i in range(plan.slabs_per_warpgroup):
        number, offset = divide(warpgroup * 64 + i * size, plan.query_chunk)
        slab = tile * plan.slabs + number
        chunk, member = divide(jnp.minimum(slab, count - 1), plan.group)
        start = jnp.where(slab < count, chunk * plan.query_chunk + offset, plan.padded_queries)
        where = (batch, pl.ds(start, size), head * plan.group + member)
        yield pl.ds(i * size, size), where, (slab < count) & (start < plan.queries)


def divide(x: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a non-negative i32 by a constant, without the sign handling of `//` and `%`."""
    if n == 1:
        return x, x - x
    divisor = jnp.int32(n) if x.ndim == 0 else jnp.broadcast_to(jnp.int32(n), x.shape)
    return lax.div(x, divisor), lax.rem(x, divisor)


def make_plan(
    q: Any,
    k: Any,
    runs: int,
    config: AttentionConfig | None,
    *,
    keep_weights: bool = False,
    keep_pages: bool = False,
    prefix_sums: bool = False,
) -> Plan:
    """The plan for q `[B, T, H, D]`, k `[..., K, N, D]` and `runs` lengths per row. Explicit sizes win over heuristics.

    Raises ValueError for sizes that do not fit together or do not fit shared memory.
    """
    config = config or AttentionConfig()
    batch, queries, heads, head_dim = q.shape
    kv_heads, entries = k.shape[-3], k.shape[-2]
    group = heads // kv_heads
    warpgroups, query_chunk = _rows(queries, group, runs, config, most=2 if keep_weights else 3)
    kv_tile = config.kv_tile or (128 if (entries > 64 and warpgroups < 3) or keep_weights else 64)
    row_bytes = head_dim * jnp.dtype(q.dtype).itemsize
    room = SMEM_LIMIT - SMEM_RESERVED - 64 * warpgroups * row_bytes

    def stages_of(kv_tile: int) -> int:
        return config.stages or max(2, min(8, room // (2 * kv_tile * row_bytes)))

    plan = Plan(
        batch=batch,
        queries=queries,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        entries=entries,
        runs=runs,
        dtype=jnp.dtype(q.dtype),
        warpgroups=warpgroups,
        query_chunk=query_chunk,
        kv_tile=kv_tile,
        stages=stages_of(kv_tile),
        splits=1,
        ping_pong=warpgroups == 2 if config.ping_pong is None else config.ping_pong,
        keep_weights=keep_weights,
        keep_pages=keep_pages,
        prefix_sums=prefix_sums,
    )
    splits = config.splits or _splits(plan)
    plan = dataclasses.replace(plan, splits=splits)
    if config.kv_tile is None and not keep_weights and splits > 1 and plan.kv_tiles <= 2 * splits:
        # Of so few tiles the first is what a program waits for longest: halves of them arrive sooner.
        plan = dataclasses.replace(plan, kv_tile=64, stages=stages_of(64))
    _check(plan)
    return plan


def _rows(queries: int, group: int, runs: int, config: AttentionConfig, most: int) -> tuple[int, int]:
    """`(warpgroups, query_chunk)` with the fewest computed rows; among those the most rows per tile, then per slab.

    At most `most` warpgroups; three only if asked for or if all rows then are one tile.
    """
    three = config.warpgroups == 3 or (most > 2 and runs == 1 and 128 < queries * group <= 192)

    def cost(choice):
        warpgroups, chunk = choice
        rows = 64 * warpgroups
        tiles = -(-(-(-queries // chunk) * group) // (rows // chunk))
        # Every tile reads the KV entries again, so fewer tiles go first; then fewer rows.
        # Prefill is bound by arithmetic, and has a mask only at the end: there long slabs win.
        return (-chunk if runs > 1 else 0), tiles, tiles * rows, -chunk

    choices = [
        (warpgroups, chunk)
        for warpgroups in ((1, 2, 3) if three else (1, 2))
        for chunk in (8, 16, 32, 64, 128)
        if chunk <= 64 * warpgroups and config.warpgroups in (None, warpgroups) and config.query_chunk in (None, chunk)
    ]
    if not choices:
        raise ValueError(f"no tile of query rows fits {config}: see AttentionConfig")
    return min(choices, key=cost)


def _splits(plan: Plan) -> int:
    """The number of splits that is expected to finish soonest.

    The times are microseconds fitted to an H200 (docs/kernels.md); only their proportions matter here. What counts is
    the latency of one program's tiles against the bytes that all of them move, partial results included.
    """
    heads = plan.batch * plan.kv_heads
    rows = heads * plan.tiles * plan.rows
    row_bytes = plan.head_dim * jnp.dtype(plan.dtype).itemsize
    entry_bytes = 2 * heads * plan.entries * row_bytes
    per_tile = 1.6 * plan.kv_tile / 128 * row_bytes / 256

    def cost(splits):
        waves = -(-heads * plan.tiles * splits // PROCESSORS)
        latency = waves * -(-plan.kv_tiles // splits) * per_tile + 2.5 * (waves - 1)
        partial_bytes = splits * rows * row_bytes if splits > 1 else 0  # partial results are of q's dtype
        traffic = (entry_bytes + partial_bytes / 2) / 4.2e6
        end = 1.6 + partial_bytes / 6e6 + rows / 8192 if splits > 1 else 0.0
        return (latency**4 + traffic**4) ** 0.25 + end

    return min(range(1, min(plan.kv_tiles, 64) + 1), key=cost)


def _check(plan: Plan) -> None:
    if plan.kv_tile % 64 or not 64 <= plan.kv_tile <= 256:
        raise ValueError(f"kv_tile must be a multiple of 64 up to 256, not {plan.kv_tile}")
    if plan.keep_weights and plan.kv_tile % 128:
        raise ValueError(f"importance of one query needs a kv_tile that is a multiple of 128, not {plan.kv_tile}")
    if plan.keep_pages and plan.kv_tile not in (64, 128, 256):
        raise ValueError(f"importance by page needs a kv_tile of 64, 128 or 256, not {plan.kv_tile}")
    if plan.stages < 2 or plan.splits < 1:
        raise ValueError(f"need stages >= 2 and splits >= 1, got {plan.stages} and {plan.splits}")
    if plan.warpgroups == 3 and plan.kv_tile > 64:
        raise ValueError(f"three compute warpgroups have registers for a kv_tile of 64, not {plan.kv_tile}")
    if plan.ping_pong and plan.warpgroups != 2:
        raise ValueError("ping_pong is for two compute warpgroups")
    if plan.smem_bytes() > SMEM_LIMIT:
        raise ValueError(f"{plan.smem_bytes()} bytes of shared memory needed, {SMEM_LIMIT} available: {plan}")
