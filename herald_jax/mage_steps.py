"""What happens to MAGE's caches between the layers' forward and the next: choosing, filling the pool, committing.

`block_loop.step` calls these after every forward, for all layers at once; what a layer itself does is `mage.py`.

Shape letters: L layers, B batch, M block length, K KV heads, N cache slots, S pool slots, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from herald_jax import select
from herald_jax.cache import DeviceKV
from herald_jax.mage import MageKV, specs
from herald_jax.plans import Mage
from pallas_kernels import block_attention, gather_rows, scatter_rows


def unchanged(cache: MageKV, inputs: jax.Array, selecting: bool) -> tuple[MageKV, jax.Array | None]:
    """Which of a forward's `inputs` i32[B, M] are those of the selecting one, bool[B, M]; that notes them itself."""
    if cache.rest is None:
        return cache, None
    same = cache.rest.inputs == inputs
    if selecting:
        cache = dataclasses.replace(cache, rest=dataclasses.replace(cache.rest, inputs=inputs))
    return cache, same


def finish_selection(cache: MageKV, plan: Mage, prefix: jax.Array, mesh: Mesh | None, implementation: Any) -> MageKV:
    """After the last layer of a selecting forward: choose, share a layer-adaptive budget out, and fill the pool.

    All layers are gathered at once, here and not where they choose: nothing in the forward waits for the pool, and a
    gather that the next layer's write to the cache need not wait for would make XLA copy the whole cache.
    """
    capacity = cache.indices.shape[-1]
    first = plan.dense_layers
    if plan.allocate == "layer_adaptive":
        assert cache.need is not None  # `MageKV.around` made it
        budgets = select.layer_budgets(plan, jnp.max(cache.need[first:], axis=-1), prefix, capacity)
    else:
        budgets = select.budget_of(plan, prefix)[None, :]
    counts = cache.counts.at[first:].set(budgets)
    if plan.selector == "oracle":
        return dataclasses.replace(cache, counts=counts)  # it has filled its pool layer by layer

    def local(cache: MageKV, counts: jax.Array, prefix: jax.Array) -> MageKV:
        indices, votes = cache.indices, cache.votes
        if cache.scores is not None:
            # All layers in one launch: by itself a layer has too few heads to fill the device.
            chosen = select.pick_scored(plan, cache.scores, counts[first:], prefix, capacity, implementation)
            indices = indices.at[first:].set(chosen)
        if votes is not None:
            # Layer by layer: the scores of all of them would be as large as the votes once more.
            def choose(layer: jax.Array, indices: jax.Array) -> jax.Array:
                score = select.vote_score(votes[layer])
                chosen = select.pick(plan, score, counts[layer], prefix, capacity, implementation)
                return indices.at[layer].set(chosen)

            indices = jax.lax.fori_loop(first, counts.shape[0], choose, indices)
        full, pool = cache.full, cache.pool
        filled = gather_rows(full.k, full.v, indices, pool.k, pool.v, implementation=implementation)
        cache = dataclasses.replace(cache, pool=DeviceKV(*filled), counts=counts, indices=indices)
        return cache if cache.rest is None else _take_rest(cache, prefix, implementation)

    if mesh is None:
        return local(cache, counts, prefix)
    in_specs = (specs(cache), P(None, "data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=specs(cache), check_vma=False)(
        cache, counts, prefix
    )


def _take_rest(cache: MageKV, prefix: jax.Array, implementation: Any) -> MageKV:
    """With a filled pool: what each layer's queries found in neither the selection nor the block.

    Layers and rows are one axis here: all layers in one launch. Those that select nothing look at the block alone, and
    for nothing.
    """
    rest, pool = cache.rest, cache.pool
    assert rest is not None
    block = rest.inputs.shape[1]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    def of_block(x: jax.Array) -> jax.Array:  # [L, B, K, N, D] -> [1, L * B, K, M, D]
        one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=block, axis=2)
        return flat(jax.vmap(one, (1, 0), 1)(x, prefix))[None]

    k, v, starts = of_block(cache.full.k), of_block(cache.full.v), flat(cache.counts)
    # Between barriers: fused with what fills the pool, or with a change of shape, XLA's form of it is not in place.
    pool = jax.lax.optimization_barrier(pool)
    into = jax.lax.optimization_barrier((flat(pool.k)[None], flat(pool.v)[None]))
    k, v = jax.lax.optimization_barrier(scatter_rows(k, v, starts, *into, implementation=implementation))
    seen = (starts + block)[:, None]
    found = block_attention(flat(rest.queries), k[0], v[0], seen, implementation=implementation)
    out, lse = found.out.reshape(rest.out.shape), found.lse.reshape(rest.lse.shape)
    pool = DeviceKV(k.reshape(pool.k.shape), v.reshape(pool.v.shape))
    return dataclasses.replace(cache, pool=pool, rest=rest.without(out, lse, cache.counts >= prefix[None, :]))


def add_measured(cache: MageKV, plan: Mage, prefix: jax.Array, counted: jax.Array) -> MageKV:
    """After a sparse forward: add its quality for the rows `counted` bool[B] whose budget is below their prefix."""
    if cache.quality is None or cache.measured is None:
        return cache
    counted = counted & (select.budget_of(plan, prefix) < prefix)
    quality = cache.quality[plan.dense_layers :]
    summands = jnp.full((quality.shape[1], 1), quality.shape[0], jnp.float32)
    step = jnp.concatenate([jnp.sum(quality, axis=0), summands], axis=-1)
    return dataclasses.replace(cache, measured=cache.measured + jnp.where(counted[:, None], step, 0.0))


def keep(cache: MageKV, plan: Mage, committing: jax.Array, block: int) -> MageKV:
    """Let the block behind the pool's entries stay there, for rows `committing` bool[B] of a plan that wants it."""
    if plan.select_every == 1:
        return cache
    return dataclasses.replace(cache, counts=cache.counts.at[plan.dense_layers :].add(block * committing))


def follow(cache: MageKV, prefix: jax.Array, block: int, mesh: Mesh | None) -> MageKV:
    """After a selecting forward: the block's K and V from the whole cache to their place behind the pool's entries.

    A block that has later steps writes them there anew. One that is finished by its selecting forward has none.
    """

    def local(cache: MageKV, prefix: jax.Array) -> MageKV:
        def put(pool: jax.Array, full: jax.Array) -> jax.Array:  # [K, S, D], [K, N, D] of each layer and row
            def one(pool: jax.Array, full: jax.Array, at: jax.Array, start: jax.Array) -> jax.Array:
                new = jax.lax.dynamic_slice_in_dim(full, start, block, axis=1)
                return jax.lax.dynamic_update_slice_in_dim(pool, new, at, axis=1)

            return jax.vmap(jax.vmap(one), (0, 0, 0, None))(pool, full, cache.counts, prefix)

        pool = DeviceKV(put(cache.pool.k, cache.full.k), put(cache.pool.v, cache.full.v))
        return dataclasses.replace(cache, pool=pool)

    if mesh is None:
        return local(cache, prefix)
    in_specs = (specs(cache), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=in_specs[0], check_vma=False)(cache, prefix)


def commit(
    cache: MageKV, prefix: jax.Array, committing: jax.Array, block: int, mesh: Mesh | None, implementation: Any
) -> MageKV:
    """After a sparse forward: the block's K and V of `committing` rows (bool[B]) from the pool into the whole cache."""

    def local(cache: MageKV, prefix: jax.Array, committing: jax.Array) -> MageKV:
        # Out of the pool and into the cache in one launch, which does nothing where nothing is committed: most steps.
        shape = (*cache.full.k.shape[:3], block)
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 3)
        rows = cache.counts[:, :, None, None] + token
        slots = jnp.where(committing[None, :, None, None], prefix[None, :, None, None] + token, -1)
        full, pool = cache.full, cache.pool
        written = gather_rows(pool.k, pool.v, rows, full.k, full.v, dst=slots, implementation=implementation)
        return dataclasses.replace(cache, full=DeviceKV(*written))

    if mesh is None:
        return local(cache, prefix, committing)
    in_specs = (specs(cache), P("data"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=in_specs[0], check_vma=False)(
        cache, prefix, committing
    )
