"""Gather and scatter for caches that are kept as one array per layer.

A cache in host memory is allocated layer by layer: one array for all layers would have to be built in one piece, and a
prefill that fills a layer at a time hands each over as it is. The pool, small and on the device, stays one array.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, gather_kernel, host_memory, reference_rows

__all__ = ["FETCHING", "gather_layers", "write_layers"]

# Multiprocessors that K's and V's gathers from host memory occupy, side by side.
FETCHING = 2 * gather_kernel.HOST_LAYERS.blocks


def gather_layers(
    sources: Sequence[jax.Array],
    indices: jax.Array,
    pool: jax.Array,
    first: jax.Array | None = None,
    *,
    used: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """:func:`~pallas_kernels.gather_rows.gather_rows` of K or V alone, with a source of one array per layer.

    Args:
        sources: L arrays ``[1, B, K, N, D]``, in device or ``pinned_host`` memory, which the kernel reads in place.
        indices: ``i32[L, B, K, P]``; entries outside ``[0, N)`` leave their slot as it was.
        pool: ``[L, B, K, S, D]`` in device memory, ``S >= P``; in place when donated. With more layers than there are
            sources, `first` says where.
        first: i32 scalar, the pool's layer that the first source fills; the others follow. None: the pool has one layer
            for each source.
        used: i32[L, B, K], not negative: where each list's entries end. Slots from there on are left as they were,
            whatever the list says, and cost nothing. None: all P are looked at.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None.

    Raises:
        ValueError: lengths, shapes or dtypes that do not fit together.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
        RuntimeError: sources in host memory outside ``jit``, where no kernel reads them in place.
    """
    _check(sources, pool, some=first is not None)
    shape = (len(sources), *pool.shape[1:3])
    if indices.dtype != jnp.int32 or indices.shape[:-1] != shape or indices.shape[-1] > pool.shape[-2]:
        raise ValueError(
            f"indices must be i32{[*shape, 'P']} with P <= {pool.shape[-2]}, got {indices.dtype}{list(indices.shape)}"
        )
    if used is not None and (used.dtype != jnp.int32 or used.shape != shape):
        raise ValueError(f"used must be i32{[*shape]}, got {used.dtype}{list(used.shape)}")
    if not sources:
        return pool
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(sources[0]))
    return dispatch.run(chosen, gather_kernel.gather_layers, _plain_gather, tuple(sources), indices, pool, first, used)


def _plain_gather(
    sources: Sequence[jax.Array],
    indices: jax.Array,
    pool: jax.Array,
    first: jax.Array | None,
    used: jax.Array | None,
) -> jax.Array:
    """Layer by layer, so that a source in host memory passes through the device one layer at a time."""
    if used is not None:
        slot = jax.lax.broadcasted_iota(jnp.int32, indices.shape, 3)
        indices = jnp.where(slot < used[..., None], indices, -1)
    for i, source in enumerate(sources):
        layer = i if first is None else first + i
        source = host_memory.copy_to_device(source)
        old = jax.lax.dynamic_slice_in_dim(pool, layer, 1)
        new, _ = reference_rows.gather_rows(source, source, indices[i : i + 1], old, old)
        pool = jax.lax.dynamic_update_slice_in_dim(pool, new, layer, 0)
    return pool


def write_layers(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: Sequence[jax.Array],
    v_cache: Sequence[jax.Array],
    *,
    mask: jax.Array,
    implementation: str | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """:func:`~pallas_kernels.gather_rows.write_block` for caches of one array per layer. Not for traced code.

    Args:
        k_block, v_block: ``[L, B, K, M, D]`` in device memory.
        positions: ``i32[B]``, slot of the first entry; a row that does not fit is left as it was.
        k_cache, v_cache: L arrays ``[1, B, K, N, D]`` each, in device or ``pinned_host`` memory. Taken over (donated):
            use only what is returned.
        mask: ``bool[B]``; rows where it is False are left as they were.

    Raises:
        ValueError: shapes or dtypes that do not fit together; called under ``jit``; another view of a cache is alive.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (k_block, positions, *k_cache)):
        raise ValueError("write_layers donates its caches, which only a call outside jit can")
    _check(k_cache, k_block)
    _check(v_cache, v_block)
    if not k_cache:
        return (), ()
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(k_cache[0]))
    return _write_layers(k_block, v_block, positions, tuple(k_cache), tuple(v_cache), mask, chosen=chosen)


def _check(layers: Sequence[jax.Array], stack: jax.Array, *, some: bool = False) -> None:
    if len(layers) > stack.shape[0] or (len(layers) != stack.shape[0] and not some):
        at_most = "at most " if some else ""
        raise ValueError(f"one array per layer was expected, {at_most}{stack.shape[0]} of them, got {len(layers)}")
    want = (1, *stack.shape[1:3], stack.shape[-1])
    for layer, x in enumerate(layers):
        if x.ndim != 5 or (*x.shape[:3], x.shape[-1]) != want or x.dtype != stack.dtype:
            raise ValueError(
                f"layer {layer} is {x.dtype}{list(x.shape)}, but must be {stack.dtype} "
                f"[1, {want[1]}, {want[2]}, N, {want[3]}]"
            )


@functools.partial(jax.jit, static_argnames="chosen", donate_argnums=(3, 4))
def _write_layers(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: tuple[jax.Array, ...],
    v_cache: tuple[jax.Array, ...],
    mask: jax.Array,
    *,
    chosen: str,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    written = [
        _write_one(k_block[i : i + 1], v_block[i : i + 1], positions, k, v, mask, chosen=chosen)
        for i, (k, v) in enumerate(zip(k_cache, v_cache, strict=True))
    ]
    return tuple(k for k, _ in written), tuple(v for _, v in written)


# One layer as a program of its own, so that the kernel is lowered once and not once per layer.
@functools.partial(jax.jit, static_argnames="chosen")
def _write_one(*args: jax.Array, chosen: str) -> tuple[jax.Array, jax.Array]:
    return dispatch.run(chosen, gather_kernel.scatter_into_donated_rows, reference_rows.scatter_rows, *args)
