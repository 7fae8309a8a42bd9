"""What HERALD's denoising steps attend to: a pool of selected entries, with the whole cache elsewhere.

For every layer, row and KV head the pool holds the selected entries next to each other, behind them the block written
last (resident: it is younger than the scan that selected), behind that the block being denoised, and during a draft a
second one. A step is therefore one kernel call over a short cache. Layers below `dense_layers` keep their whole cache
on the device instead, and have no pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.config import DiffusionContract, ModelConfig
from herald_jax.plans import Herald
from herald_jax.select import selected_capacity
from pallas_kernels import block_attention, gather_rows
from pallas_kernels.fused_rows import Destination, write_kv

QUERY_SPEC = P(None, "data", "model", None, None)


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class PooledKV:
    """The device's part of a HERALD cache. Ls layers have a pool, Ld = L - Ls are dense.

    Attributes:
      dense: `[Ld, B, K, N, D]`, or None without dense layers.
      pool: `[Ls, B, K, S, D]`.
      counts: i32[B], entries before the block: selected and resident ones.
      guess: i32[B, M], every position's prediction at the last step; position 0 of a shifted family holds the seed of
        the next block.
      draft: i32[B, M + 1], the block as it was when the row had revealed `draft_from` i32[B] positions of it, masks
        filled by guesses, and the guess of the next block's seed; `drafted` bool[B] says that the row has come so far.
        Each row's own moment: what is selected for it depends on no neighbour.
      outbox: `[Ls, B, K, M, D]`, the block each row committed last, to be appended to the host's cache.
      committed: bool[B], rows that committed since the block began; `start` i32[B], where that block lies.
      queries: `[Ls, B, K, R, D]` during a draft, else None.
    """

    dense: DeviceKV | None
    pool: DeviceKV
    counts: jax.Array
    guess: jax.Array
    draft: jax.Array
    draft_from: jax.Array
    drafted: jax.Array
    outbox: DeviceKV
    committed: jax.Array
    start: jax.Array
    queries: jax.Array | None = None

    @property
    def nbytes(self) -> int:
        """Device memory of the dense layers, one pool and the outbox."""
        return self.pool.nbytes + self.outbox.nbytes + (0 if self.dense is None else self.dense.nbytes)

    @classmethod
    def around(
        cls,
        dense: DeviceKV | None,
        pool: DeviceKV,
        counts: jax.Array,
        draft_from: jax.Array,
        config: ModelConfig,
        mesh: Mesh | None,
    ) -> PooledKV:
        """The state before the first block, for a pool that prefill has filled."""
        layers, batch = pool.k.shape[:2]
        block = config.diffusion.block_length
        shape = dataclasses.replace(config, num_layers=layers)
        outbox = DeviceKV.empty(shape, batch, block, mesh)
        guess, draft = jnp.zeros((batch, block), jnp.int32), jnp.zeros((batch, block + 1), jnp.int32)
        drafted, committed = jnp.zeros((batch,), bool), jnp.zeros((batch,), bool)  # two arrays: both will be donated
        start = jnp.zeros((batch,), jnp.int32)
        return cls(dense, pool, counts, guess, draft, draft_from, drafted, outbox, committed, start)


def pool_slots(plan: Herald, longest: int, block: int) -> int:
    """S: slots per head for selected entries, the resident block, and two blocks in progress."""
    return -(-(selected_capacity(plan, longest) + 3 * block) // 8) * 8  # the attention kernel copies by 8 rows


def draft_positions(plan: Herald, contract: DiffusionContract) -> list[int]:
    """Which positions of an all-masked block ask: one, or all masked ones ("all" and "mean")."""
    masked = list(range(int(contract.seeded), contract.block_length))
    centre = (contract.block_length - 1) / 2
    return {
        "all": masked,
        "mean": masked,
        "first": masked[:1],
        "last": masked[-1:],
        "center": [min(masked, key=lambda i: (abs(i - centre), i))],
    }[plan.query]


def asking(plan: Herald, contract: DiffusionContract, q: jax.Array) -> jax.Array:
    """The draft block's queries `[B, M, K, G, D]` that select, `[B, K, R, D]`."""
    q = q[:, jnp.array(draft_positions(plan, contract))]
    if plan.query == "mean":
        q = jnp.mean(q.astype(jnp.float32), axis=1, keepdims=True).astype(q.dtype)
    b, n, heads, group, dim = q.shape
    return jnp.moveaxis(q, 1, 2).reshape(b, heads, n * group, dim)


def _specs(kv: PooledKV) -> PooledKV:
    both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
    row, wide = P("data"), P("data", None)
    queries = None if kv.queries is None else QUERY_SPEC
    specs: tuple[Any, ...] = (
        None if kv.dense is None else both,
        both,
        row,
        wide,
        wide,
        row,
        row,
        both,
        row,
        row,
        queries,
    )
    return PooledKV(*specs)


def placed(kv: PooledKV, mesh: Mesh) -> PooledKV:
    """`kv` split over the mesh as its attention expects it, wherever it comes from."""
    return jax.tree.map(lambda x, s: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)), kv, _specs(kv))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "visible", "keep"],
    meta_fields=["plan", "contract", "mesh", "implementation", "role"],
)
@dataclasses.dataclass(frozen=True)
class PooledAttend:
    """`attend` of one forward over the pool: of a block, or of a block and the draft of the next one (two runs).

    Attributes:
      start: i32[B], slot of the first query's entry in a whole cache; dense layers write there.
      visible: bool[B], rows that take part.
      keep: bool[B, T] or None, positions whose K and V dense layers write.
      contract: of the family, for a draft's queries.
      role: of the layer: "dense" or "pooled".
    """

    start: jax.Array
    visible: jax.Array
    keep: jax.Array | None
    plan: Herald
    contract: DiffusionContract
    mesh: Mesh | None = None
    implementation: Any = None
    role: Literal["dense", "pooled"] = "pooled"

    def at(self, layer: int) -> PooledAttend:
        """With the layer's part in the plan: all layers of one part share one trace."""
        return dataclasses.replace(self, role="dense" if layer < self.plan.dense_layers else "pooled")

    def destination(self, layer: Any, tokens: int, cache: PooledKV) -> Destination:
        """Where a block's K and V go, as `DenseAttend.destination`."""
        layer = jnp.asarray(layer, jnp.int32)
        if self.role == "dense":
            assert cache.dense is not None  # there are dense layers
            return Destination(cache.dense.k, cache.dense.v, layer, self.start, tokens, self.keep)
        return Destination(cache.pool.k, cache.pool.v, layer - self.plan.dense_layers, cache.counts, tokens)

    def written(self, cache: PooledKV, k: jax.Array, v: jax.Array) -> PooledKV:
        """`cache` with the arrays that its `destination` has become."""
        kv = DeviceKV(k, v)
        return dataclasses.replace(cache, dense=kv) if self.role == "dense" else dataclasses.replace(cache, pool=kv)

    def __call__(
        self, layer: Any, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: PooledKV
    ) -> tuple[jax.Array, PooledKV]:
        """q `[B, T, K, G, D]`; k, v `[B, T, K, D]`. Returns the output, shaped like q, and the cache."""

        def local(layer: Any, q: Any, k: Any, v: Any, cache: Any, start: Any, visible: Any, keep: Any) -> Any:
            return dataclasses.replace(self, start=start, visible=visible, keep=keep)._local(layer, q, k, v, cache)

        args = (jnp.asarray(layer, jnp.int32), q, k, v, cache, self.start, self.visible, self.keep)
        if self.mesh is None:
            return local(*args)
        heads, queries = P("data", None, "model", None), P("data", None, "model", None, None)
        keep = None if self.keep is None else P("data", None)
        in_specs = (P(), queries, heads, heads, _specs(cache), P("data"), P("data"), keep)
        out_specs = (queries, _specs(cache))
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)

    def _local(
        self, layer: jax.Array, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: PooledKV
    ) -> tuple[jax.Array, PooledKV]:
        b, t, heads, group, d = q.shape
        block = self.contract.block_length
        runs = max(t // block, 1)
        ends = t // runs * (1 + jnp.arange(runs, dtype=jnp.int32))[None, :]
        into = self.destination(layer, t, cache)
        if k is not None and v is not None:
            writes = self.implementation if self.mesh is None else "xla"
            cache = self.written(cache, *write_kv(k, v, into, implementation=writes))
            into = self.destination(layer, t, cache)
        if self.role == "pooled" and cache.queries is not None:
            asked = asking(self.plan, self.contract, q[:, block:])
            queries = jax.lax.dynamic_update_index_in_dim(cache.queries, asked, into.layer, 0)
            cache = dataclasses.replace(cache, queries=queries)
        before = self.start if self.role == "dense" else cache.counts
        seen = jnp.where(self.visible[:, None], before[:, None] + ends, 0)
        folded = q.reshape(b, t, heads * group, d)
        out = block_attention(folded, into.k, into.v, seen, layer=into.layer, implementation=self.implementation).out
        return out.reshape(q.shape), cache


def after_step(
    cache: PooledKV,
    guess: jax.Array,
    start: jax.Array,
    committing: jax.Array,
    mesh: Mesh | None,
    implementation: str | None = None,
) -> PooledKV:
    """After a denoising forward: remember the predictions, and the finished block's K and V of `committing` rows."""

    def local(pool: DeviceKV, outbox: DeviceKV, counts: jax.Array, committing: jax.Array) -> DeviceKV:
        # In one launch, which does nothing where nothing is committed: most steps.
        token = jax.lax.broadcasted_iota(jnp.int32, outbox.k.shape[:-1], 3)
        first, now = (x.reshape(1, -1, 1, 1) for x in (counts, committing))
        rows = jnp.where(now, first + token, -1)
        return DeviceKV(*gather_rows(pool.k, pool.v, rows, outbox.k, outbox.v, implementation=implementation))

    if mesh is not None:
        both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
        specs = (both, both, P("data"), P("data"))
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=both, check_vma=False)
    return dataclasses.replace(
        cache,
        guess=guess,
        outbox=local(cache.pool, cache.outbox, cache.counts, committing),
        committed=cache.committed | committing,
        start=jnp.where(committing, start, cache.start),
    )


def note_drafts(cache: PooledKV, canvas: jax.Array, known: jax.Array, waiting: jax.Array) -> PooledKV:
    """After a step: keep the draft of rows that now have `draft_from` positions of their block (i32, bool[B, M])."""
    enough = jnp.sum(known, axis=1) >= cache.draft_from
    now = enough & ~cache.drafted & ~waiting
    new = jnp.concatenate([jnp.where(known, canvas, cache.guess), cache.guess[:, :1]], axis=1)
    draft = jnp.where(now[:, None], new, cache.draft)
    return dataclasses.replace(cache, draft=draft, drafted=cache.drafted | now)
