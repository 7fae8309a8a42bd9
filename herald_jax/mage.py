"""The MAGE plan's attention: exact over the whole prefix while selecting, over a small pool afterwards.

`MageKV` is the dense cache plus a pool: for every layer, row and KV head the selected entries lie next to each other,
`[L, B, K, S, D]`, and the block's own K and V are written right behind them, so that a sparse step is the same kernel
call as a dense one, over a shorter cache. Which entries are selected is `select.py`; when, is `block_loop.mage_blocks`;
what the other entries still contribute, `rest.py`.

Under a mesh each device selects and gathers for its own KV heads; nothing crosses devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax import select
from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.plans import Mage
from herald_jax.rest import Rest
from pallas_kernels import Importance, block_attention, gather_rows
from pallas_kernels.fused_rows import Destination, write_kv

Role = Literal["dense", "sparse", "reuse"]
_INDICES = P(None, "data", "model", None)


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class MageKV:
    """The whole cache, the pool selected from it, and what a selection in progress needs.

    Attributes:
      full: every committed entry, `[L, B, K, N, D]`.
      pool: selected entries, then the block's, `[L, B, K, S, D]`. Layers that stay dense have a pool they do not use.
      counts: i32[L, B], entries of the pool before the block's: the selected ones, and with `plan.select_every` those
        of the blocks written since.
      indices: i32[L, B, K, P], every layer's selection, ascending, -1 padded.
      scores: f32[S, B, K, N], or by page [S, B, K, pages], what the S layers that select look at, until all choose at
        once; None where a layer chooses by itself.
      votes, need: i32[L, B, K, N] and f32[L, B, K] of a layer-adaptive selection; None otherwise.
      quality: f32[L, B, 2], recall and kept mass of the last sparse step in each layer, and `measured` f32[B, 3], their
        sums over layers and steps and the number of summands; None unless the plan measures.
      rest: what the selection leaves out; None if the plan drops it.
    """

    full: DeviceKV
    pool: DeviceKV
    counts: jax.Array
    indices: jax.Array
    scores: jax.Array | None
    votes: jax.Array | None
    need: jax.Array | None
    quality: jax.Array | None
    measured: jax.Array | None
    rest: Rest | None

    @classmethod
    def around(cls, full: DeviceKV, plan: Mage, config: ModelConfig, longest: int, mesh: Mesh | None) -> MageKV:
        """Add an empty pool to a prefilled cache whose rows grow to at most `longest` tokens."""
        layers, batch, heads, slots, _ = full.k.shape
        capacity = select.selected_capacity(plan, longest)
        # A row that waits writes behind its last block; the next selection is what makes room again.
        block = config.diffusion.block_length
        blocks = 1 if plan.select_every == 1 else min(plan.select_every, -(-longest // block)) + 1
        pool = DeviceKV.empty(config, batch, capacity + blocks * block, mesh)
        scores = votes = need = None
        if plan.selector == "mage" and plan.allocate == "uniform":
            held = -(-slots // select.scored_page(plan))
            scores = jnp.zeros((max(layers - plan.dense_layers, 0), batch, heads, held), jnp.float32)
        if plan.allocate == "layer_adaptive":
            votes = jnp.zeros((layers, batch, heads, slots), jnp.int32)
            need = jnp.zeros((layers, batch, heads), jnp.float32)
        quality = jnp.zeros((layers, batch, 2), jnp.float32) if plan.measure else None
        measured = jnp.zeros((batch, 3), jnp.float32) if plan.measure else None
        counts = jnp.zeros((layers, batch), jnp.int32)
        indices = jnp.full((layers, batch, heads, capacity), -1, jnp.int32)
        rest = Rest.empty(config, batch) if plan.rest == "keep" else None
        return cls(full, pool, counts, indices, scores, votes, need, quality, measured, rest)

    @property
    def nbytes(self) -> int:
        return self.full.nbytes + self.pool.nbytes + (0 if self.rest is None else self.rest.nbytes)


def specs(kv: MageKV) -> MageKV:
    """How its arrays are split over a mesh."""
    both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
    scores = None if kv.scores is None else P(None, "data", "model", None)
    votes = None if kv.votes is None else P(None, "data", "model", None)
    need = None if kv.need is None else P(None, "data", "model")
    quality = None if kv.quality is None else P(None, "data", None)
    measured = None if kv.measured is None else P("data", None)
    rest = None if kv.rest is None else Rest.specs()
    plain = P(None, "data"), _INDICES, scores, votes, need, quality, measured, rest
    return MageKV(both, both, *plain)  # type: ignore[arg-type]


def placed(kv: MageKV, mesh: Mesh) -> MageKV:
    """`kv` split over the mesh as its attention expects it, wherever it comes from."""
    return jax.tree.map(lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), kv, specs(kv))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prefix", "visible", "rows", "same"],
    meta_fields=["plan", "sparse", "mesh", "implementation", "role"],
)
@dataclasses.dataclass(frozen=True)
class MageAttend:
    """`attend` of one forward under MAGE.

    Attributes:
      prefix: i32[B], committed tokens; the block is written at this slot.
      visible: i32[B, 1], prefix plus block, or 0 for rows that take no part.
      rows: the queries that select, from `select.query_rows`.
      plan: what to select.
      sparse: False for the selecting forward (exact attention; fills the pool), True for the later ones.
      role: of the layer: "dense" always attends to everything, "sparse" selects, "reuse" takes the selection of the
        layer below ("tidal").
      same: bool[B, M], which queries are fed what they were when the block selected; needed where `rest` is kept.
    """

    prefix: jax.Array
    visible: jax.Array
    rows: jax.Array
    plan: Mage
    sparse: bool
    mesh: Mesh | None = None
    implementation: Any = None
    role: Role = "sparse"
    same: jax.Array | None = None

    def at(self, layer: int) -> MageAttend:
        """With the layer's part in the plan: all layers of one part share one trace."""
        plan = self.plan
        if layer < plan.dense_layers:
            role: Role = "dense"
        elif plan.selector == "tidal" and layer != plan.dense_layers and layer not in (plan.reselect_layers or ()):
            role = "reuse"
        else:
            role = "sparse"
        return dataclasses.replace(self, role=role)

    def destination(self, layer: Any, tokens: int, cache: MageKV) -> Destination | None:
        """Where a block's K and V go, as `DenseAttend.destination`; None where they go to two places."""
        if self.sparse and (self.role == "dense" or self.plan.measure):
            return None
        kv, start = (cache.pool, self._entries(cache, layer)) if self.sparse else (cache.full, self.prefix)
        return Destination(kv.k, kv.v, jnp.asarray(layer, jnp.int32), start, tokens)

    def _entries(self, cache: MageKV, layer: Any) -> jax.Array:
        """i32[B], entries of the layer's pool before the block's.

        Unless layers differ this is the same number in every layer of a part, so that a step computes it once.
        """
        if self.role == "dense":
            return jnp.zeros_like(self.prefix)
        return cache.counts[layer if self.plan.allocate == "layer_adaptive" else self.plan.dense_layers]

    def written(self, cache: MageKV, k: jax.Array, v: jax.Array) -> MageKV:
        """`cache` with the arrays that its `destination` has become."""
        kv = DeviceKV(k, v)
        return dataclasses.replace(cache, pool=kv) if self.sparse else dataclasses.replace(cache, full=kv)

    def __call__(
        self, layer: Any, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: MageKV
    ) -> tuple[jax.Array, MageKV]:
        """q `[B, T, K, G, D]`; k, v `[B, T, K, D]`. Returns the output, shaped like q, and the cache."""

        def local(layer: Any, q: Any, k: Any, v: Any, cache: MageKV, *state: Any) -> Any:
            prefix, visible, rows, same = state
            here = dataclasses.replace(self, prefix=prefix, visible=visible, rows=rows, same=same)
            return here._local(layer, q, k, v, cache)

        args = (jnp.asarray(layer, jnp.int32), q, k, v, cache, self.prefix, self.visible, self.rows, self.same)
        if self.mesh is None:
            return local(*args)
        heads = P("data", None, "model", None)
        queries = P("data", None, "model", None, None)
        rows = P("data", *(None,) * (self.rows.ndim - 1))
        same = None if self.same is None else P("data", None)
        in_specs = (P(), queries, heads, heads, specs(cache), P("data"), P("data", None), rows, same)
        out_specs = (queries, specs(cache))
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)

    def _local(
        self, layer: jax.Array, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: MageKV
    ) -> tuple[jax.Array, MageKV]:
        b, t, kv_heads, group, d = q.shape
        folded = q.reshape(b, t, kv_heads * group, d)
        dense = self.role == "dense"
        measuring = self.plan.measure and self.sparse and not dense
        if not self.sparse or dense or measuring:
            cache = dataclasses.replace(cache, full=self._write(cache.full, layer, k, v, self.prefix))
        if self.sparse:
            # In dense layers too: `commit` takes the block's K and V of every layer from the pool.
            pool = self._write(cache.pool, layer, k, v, self._entries(cache, layer))
            cache = dataclasses.replace(cache, pool=pool)
        elif not dense:
            out, cache = self._select(layer, folded, cache)
            return out.reshape(q.shape), cache
        if self.sparse and not dense:
            seen = jnp.where(self.visible > 0, self._entries(cache, layer)[:, None] + t, 0)
            result = self._attention(folded, cache.pool, seen, layer)
            out = result.out
            if cache.rest is not None:
                assert self.same is not None  # `block_forward` gives it
                out = cache.rest.joined(layer, out, result.lse, self.same)
            if measuring:
                quality = self._measure(layer, folded, cache)
                out, quality = jax.lax.optimization_barrier((out, quality))  # as in `_select`
                assert cache.quality is not None  # `around` made it
                cache = dataclasses.replace(cache, quality=cache.quality.at[layer].set(quality))
        else:
            out = self._attention(folded, cache.full, self.visible, layer).out
        return out.reshape(q.shape), cache

    def _write(self, kv: DeviceKV, layer: jax.Array, k: Any, v: Any, start: jax.Array) -> DeviceKV:
        if k is None:  # written already
            return kv
        implementation = self.implementation if self.mesh is None else "xla"
        into = Destination(kv.k, kv.v, layer, start, k.shape[1])
        return DeviceKV(*write_kv(k, v, into, implementation=implementation))

    def _exact(self, layer: jax.Array, q: jax.Array, cache: MageKV, page: int = 1, into: Any = None) -> Any:
        """Attention over everything visible, with the importance by which this plan selects, that of the prefix by
        `page`; put `into` a stack, as `block_attention` does it."""
        prefix_only = self.plan.normalise == "prefix"
        return self._attention(
            q,
            cache.full,
            self.visible,
            layer,
            importance=Importance(self.plan.reduce, "prefix" if prefix_only else "visible", page),
            importance_rows=self.rows,
            prefix_lengths=self.prefix if prefix_only or page > 1 else None,
            importance_into=into,
        )

    def _measure(self, layer: jax.Array, q: jax.Array, cache: MageKV) -> jax.Array:
        """Recall and kept mass f32[B, 2]: the block's selection beside what this step's own queries would choose.

        Averaged over KV heads.
        """
        importance = self._exact(layer, q, cache).importance
        counts, chosen = cache.counts[layer], cache.indices[layer]
        exact = select.pick(self.plan, importance, counts, self.prefix, chosen.shape[-1], self.implementation)
        heads = jnp.arange(chosen.shape[1])[None, :, None]
        rows = jnp.arange(chosen.shape[0])[:, None, None]
        slots = importance.shape[-1]
        flags = (
            jnp.zeros(importance.shape, bool)
            .at[rows, heads, jnp.where(chosen < 0, slots, chosen)]
            .set(True, mode="drop")
        )
        hit = jnp.take_along_axis(flags, jnp.maximum(exact, 0), axis=-1) & (exact >= 0)
        recall = jnp.mean(jnp.sum(hit, axis=-1) / jnp.maximum(jnp.sum(exact >= 0, axis=-1), 1), axis=1)
        inside = (jnp.arange(slots)[None, :] < self.prefix[:, None])[:, None, :]
        total = jnp.sum(jnp.where(inside, importance, 0.0), axis=-1)
        kept = jnp.sum(jnp.where(flags & inside, importance, 0.0), axis=-1)
        mass = jnp.mean(jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), 1.0), axis=1)
        quality = jnp.stack([recall, mass], axis=-1)
        if self.mesh is not None:
            quality = jax.lax.pmean(quality, "model")
        return quality

    def _attention(self, q: jax.Array, kv: DeviceKV, visible: jax.Array, layer: jax.Array, **importance: Any) -> Any:
        return block_attention(q, kv.k, kv.v, visible, layer=layer, implementation=self.implementation, **importance)

    def _select(self, layer: jax.Array, q: jax.Array, cache: MageKV) -> tuple[jax.Array, MageKV]:
        """Exact attention of one sparse layer, and its selection: into the indices, or what later becomes one into
        scores, or into votes when layers share.

        What the selection reads of the whole cache, it must have read before the next layer writes to that cache in
        place; otherwise XLA copies all layers of K to keep it readable. The next layer's K and V depend on the output
        alone, so each barrier below makes the output wait for the selection.
        """
        plan, prefix = self.plan, self.prefix
        full, t = cache.full, q.shape[1]
        kv_heads, slots = full.k.shape[2:4]
        capacity = cache.indices.shape[-1]
        if plan.allocate == "layer_adaptive":
            result = self._attention(q, full, self.visible, layer)
            out, cache = result.out, _noted(cache, layer, q, result)
            assert cache.votes is not None  # `around` made them
            assert cache.need is not None
            rows = select.chosen(self.rows, t)
            per_query = select.selected_capacity(dataclasses.replace(plan, allocate="uniform"), slots)
            votes, need = select.votes_and_need(
                plan, q, full.k[layer], rows, self.visible[:, 0], prefix, min(per_query, slots)
            )
            out, votes, need = jax.lax.optimization_barrier((out, votes, need))
            cache = dataclasses.replace(
                cache, votes=cache.votes.at[layer].set(votes), need=cache.need.at[layer].set(need)
            )
            return out, cache

        if cache.scores is not None:
            result = self._exact(layer, q, cache, select.scored_page(plan), (cache.scores, layer - plan.dense_layers))
            out, scores = jax.lax.optimization_barrier((result.out, result.importance))
            return out, dataclasses.replace(_noted(cache, layer, q, result), scores=scores)

        exact = plan.selector in ("mage", "oracle", "tidal") and self.role != "reuse"
        if exact:
            result = self._exact(layer, q, cache, select.scored_page(plan))
            score = result.importance
        else:
            result, score = self._attention(q, full, self.visible, layer), None
            if plan.selector == "quest":
                score = select.page_bounds(plan, q, full.k[layer], select.chosen(self.rows, t), prefix)
            elif plan.selector == "random":
                first = 0 if self.mesh is None else jax.lax.axis_index("model") * kv_heads
                score = select.random_score(layer, prefix, first, kv_heads, slots)
            elif plan.selector == "recent":
                score = select.recent_score(prefix, kv_heads, slots)
        out, cache = result.out, _noted(cache, layer, q, result)
        counts = select.budget_of(plan, prefix)
        if score is None:
            indices = cache.indices[layer - 1]  # "tidal": what the layer below chose
        else:
            pick = select.pick_scored if exact else select.pick
            indices = pick(plan, score, counts, prefix, capacity, self.implementation)
            out, indices = jax.lax.optimization_barrier((out, indices))
        cache = dataclasses.replace(cache, indices=cache.indices.at[layer].set(indices))
        if plan.selector == "oracle":
            # Its own attention is already the sparse one: the selection is made anew from every step's queries.
            return self._over_pool(layer, q, indices, counts, cache)
        return out, cache

    def _over_pool(
        self, layer: jax.Array, q: jax.Array, indices: jax.Array, start: jax.Array, cache: MageKV
    ) -> tuple[jax.Array, MageKV]:
        """Attention of `q` over the `start` i32[B] entries this layer has just chosen, and the block's behind them."""
        t, full = q.shape[1], cache.full

        def block(x: jax.Array) -> jax.Array:  # the block as it lies in the whole cache, [B, T, K, D]
            one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=t, axis=1)
            return jnp.swapaxes(jax.vmap(one)(x[layer], self.prefix), 1, 2)

        k, v = gather_rows(
            full.k, full.v, indices, cache.pool.k, cache.pool.v, layer=layer, implementation=self.implementation
        )
        pool = self._write(DeviceKV(k, v), layer, block(full.k), block(full.v), start)
        seen = jnp.where(self.visible > 0, start[:, None] + t, 0)
        return self._attention(q, pool, seen, layer).out, dataclasses.replace(cache, pool=pool)


def _noted(cache: MageKV, layer: jax.Array, q: jax.Array, exact: Any) -> MageKV:
    """With what `mage_steps` will need of one layer's exact attention."""
    if cache.rest is None:
        return cache
    # Were a kernel's own result put into the stack, XLA would run that kernel twice, once for the stack alone: the one
    # that made `q` writes to the cache, which was therefore copied.
    noted = jax.lax.optimization_barrier((q, exact.out, exact.lse))
    return dataclasses.replace(cache, rest=cache.rest.noted(layer, *noted))
