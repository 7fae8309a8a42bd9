"""The plain ``jnp`` forms of :mod:`~pallas_kernels.gather_rows` and :mod:`~pallas_kernels.topk`.

They run on any backend, are what the kernels are tested against, and are what CI runs. Arguments are expected to be
checked already: the public functions do that once for every implementation.

L layers, B batch, K KV heads, N source entries, S pool capacity, P index slots, M block length, D head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import host_memory

__all__ = ["gather_rows", "scatter_rows", "select_topk"]


def _place(
    rows: jax.Array, indices: jax.Array, dst: jax.Array | None, source_length: int, pool: jax.Array
) -> jax.Array:
    """Writes ``rows[..., p, :]`` into ``pool[..., slot(p), :]`` where ``indices[..., p]`` names a source entry."""
    keep = (indices >= 0) & (indices < source_length)
    if dst is None:
        old = lax.slice_in_dim(pool, 0, indices.shape[-1], axis=pool.ndim - 2)
        return lax.dynamic_update_slice(pool, jnp.where(keep[..., None], rows, old), (0,) * pool.ndim)
    # A slot outside the pool makes a scatter drop the row; a negative one would count from the end, so it is moved.
    slots = jnp.where(keep & (dst >= 0), dst, pool.shape[-2])

    def put(pool: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.at[slots].set(rows, mode="drop")

    for _ in range(pool.ndim - 2):
        put = jax.vmap(put)
    return put(pool, slots, rows)


def _gather(src: jax.Array, indices: jax.Array, dst: jax.Array | None, pool: jax.Array) -> jax.Array:
    """One gather over all leading axes: ``src [..., N, D]``, ``indices [..., P]``, ``pool [..., S, D]``."""
    source_length = src.shape[-2]
    if source_length == 0 or indices.shape[-1] == 0:
        return pool
    rows = jnp.take_along_axis(src, jnp.clip(indices, 0, source_length - 1)[..., None], axis=src.ndim - 2)
    return _place(rows, indices, dst, source_length, pool)


def gather_rows(
    k_src: jax.Array,
    v_src: jax.Array,
    indices: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    dst: jax.Array | None = None,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Plain form of :func:`pallas_kernels.gather_rows.gather_rows`.

    A source in host memory goes through device memory one layer at a time: right everywhere, slow on a GPU.
    """

    def one_layer(
        layer: jax.Array, index: jax.Array, slots: jax.Array | None, k_pool: jax.Array, v_pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def update(src: jax.Array, pool: jax.Array) -> jax.Array:
            src_layer = host_memory.copy_to_device(lax.dynamic_index_in_dim(src, layer, 0, keepdims=False))
            pool_layer = lax.dynamic_index_in_dim(pool, layer, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(pool, _gather(src_layer, index, slots, pool_layer), layer, 0)

        return update(k_src, k_pool), update(v_src, v_pool)

    if layer is not None:
        return one_layer(layer, indices, dst, k_pool, v_pool)
    if not host_memory.is_host(k_src):
        return _gather(k_src, indices, dst, k_pool), _gather(v_src, indices, dst, v_pool)

    def body(i: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index = lax.dynamic_index_in_dim(indices, i, 0, keepdims=False)
        slots = None if dst is None else lax.dynamic_index_in_dim(dst, i, 0, keepdims=False)
        return one_layer(i, index, slots, *pools)

    return lax.fori_loop(0, k_src.shape[0], body, (k_pool, v_pool))


def scatter_rows(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array | None = None,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Plain form of :func:`pallas_kernels.gather_rows.scatter_rows`: one in-place update per batch row.

    ``dynamic_update_slice`` clamps a position that does not fit, which would overwrite good entries; such a row (and a
    masked one) writes back what it reads instead.
    """
    block_length, length = k_block.shape[-2], k_cache.shape[-2]
    if block_length > length or block_length == 0:
        return k_cache, v_cache  # nothing fits, or nothing to write
    allowed = (positions >= 0) & (positions <= length - block_length)
    if mask is not None:
        allowed &= mask
    zero = jnp.int32(0)
    first = zero if layer is None else jnp.asarray(layer, jnp.int32)

    def update(cache: jax.Array, block: jax.Array) -> jax.Array:
        block = block if layer is None else block[None]
        for b in range(cache.shape[1]):
            start = (first, jnp.int32(b), zero, jnp.clip(positions[b], 0, length - block_length), zero)
            new = lax.slice_in_dim(block, b, b + 1, axis=1)
            old = host_memory.copy_to_device(lax.dynamic_slice(cache, start, new.shape))
            new = jnp.where(allowed[b], new, old)
            if host_memory.is_host(cache):
                new = host_memory.copy_to_host(new)
            cache = lax.dynamic_update_slice(cache, new, start)
        return cache

    return update(k_cache, k_block), update(v_cache, v_block)


def select_topk(importance: jax.Array, counts: jax.Array, lengths: jax.Array, capacity: int) -> jax.Array:
    """Plain form of :func:`pallas_kernels.topk.select_topk`, by ``lax.top_k`` and a sort of the winners.

    ``importance: f32[..., N]``; ``counts``, ``lengths``: i32 of the leading shape. Returns ``i32[..., capacity]``.
    """
    n = importance.shape[-1]
    leading = importance.shape[:-1]
    k = min(capacity, n)
    if k == 0:
        return jnp.full((*leading, capacity), -1, jnp.int32)
    entry = lax.broadcasted_iota(jnp.int32, importance.shape, importance.ndim - 1)
    eligible = (importance > -jnp.inf) & (entry < lengths[..., None])  # NaN compares false
    # top_k orders -0 below +0, and backends differ in whether a subnormal is zero; here all of these are one value, so
    # that the same entries tie everywhere, and ties go to the lowest index.
    values = jnp.where(jnp.abs(importance) < jnp.finfo(jnp.float32).tiny, 0.0, importance)
    _, order = lax.top_k(jnp.where(eligible, values, -jnp.inf), k)
    # Eligible entries come first, so their number bounds how many of the winners mean anything.
    taken = jnp.minimum(jnp.clip(counts, 0, k), jnp.sum(eligible, axis=-1, dtype=jnp.int32))
    rank = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    chosen = jnp.sort(jnp.where(rank < taken[..., None], order.astype(jnp.int32), n), axis=-1)
    chosen = jnp.where(chosen < n, chosen, -1)
    return jnp.pad(chosen, [(0, 0)] * len(leading) + [(0, capacity - k)], constant_values=-1)
