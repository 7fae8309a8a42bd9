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

__all__ = ["gather_layers", "write_layers"]


def gather_layers(
    k_src: Sequence[jax.Array],
    v_src: Sequence[jax.Array],
    indices: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`~pallas_kernels.gather_rows.gather_rows` with a source of one array per layer.

    Args:
        k_src, v_src: L arrays ``[1, B, K, N, D]`` each, in device or ``pinned_host`` memory (read in place by the kernel).
        indices: ``i32[L, B, K, P]``; entries outside ``[0, N)`` leave their slot as it was.
        k_pool, v_pool: ``[L, B, K, S, D]`` in device memory, ``S >= P``; in place when donated.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None.

    Raises:
        ValueError: lengths, shapes or dtypes that do not fit together.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
    """
    _check(k_src, v_src, k_pool, v_pool)
    if indices.dtype != jnp.int32 or indices.shape[:-1] != k_pool.shape[:3] or indices.shape[-1] > k_pool.shape[-2]:
        raise ValueError(
            f"indices must be i32{[*k_pool.shape[:3], 'P']} with P <= {k_pool.shape[-2]}, got "
            f"{indices.dtype}{list(indices.shape)}"
        )
    if not k_src:
        return k_pool, v_pool
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(k_src[0]))
    for layer, (k, v) in enumerate(zip(k_src, v_src, strict=True)):
        k_pool, v_pool = _gather_one(k, v, indices[layer], k_pool, v_pool, jnp.int32(layer), chosen=chosen)
    return k_pool, v_pool


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
        k_cache, v_cache: L arrays ``[1, B, K, N, D]`` each, in device or ``pinned_host`` memory. Taken over (donated): use
            only what is returned.
        mask: ``bool[B]``; rows where it is False are left as they were.

    Raises:
        ValueError: shapes or dtypes that do not fit together; called under ``jit``; another view of a cache is alive.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (k_block, positions, *k_cache)):
        raise ValueError("write_layers donates its caches, which only a call outside jit can")
    _check(k_cache, v_cache, k_block, v_block)
    if not k_cache:
        return (), ()
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(k_cache[0]))
    return _write_layers(k_block, v_block, positions, tuple(k_cache), tuple(v_cache), mask, chosen=chosen)


def _check(k: Sequence[jax.Array], v: Sequence[jax.Array], k_stack: jax.Array, v_stack: jax.Array) -> None:
    if not len(k) == len(v) == k_stack.shape[0]:
        raise ValueError(f"one K and one V per layer were expected: {len(k)}, {len(v)} for {k_stack.shape[0]} layers")
    if k_stack.shape != v_stack.shape:
        raise ValueError(f"K and V must have one shape, got {list(k_stack.shape)} and {list(v_stack.shape)}")
    for layer, x in enumerate((*k, *v)):
        want = (1, *k_stack.shape[1:3], k_stack.shape[-1])
        if x.ndim != 5 or (*x.shape[:3], x.shape[-1]) != want or x.dtype != k_stack.dtype:
            raise ValueError(
                f"layer {layer % len(k)} is {x.dtype}{list(x.shape)}, but must be {k_stack.dtype} "
                f"[1, {want[1]}, {want[2]}, N, {want[3]}]"
            )


# One layer as a program of its own, so that the kernel is lowered once and not once per layer.
@functools.partial(jax.jit, static_argnames="chosen")
def _gather_one(
    k: jax.Array,
    v: jax.Array,
    indices: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array,
    *,
    chosen: str,
) -> tuple[jax.Array, jax.Array]:
    def kernel(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, indices, k_pool, v_pool, layer = args
        return gather_kernel.gather_rows(k, v, indices, k_pool, v_pool, None, layer, source_is_one_layer=True)

    def plain(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v, indices, k_pool, v_pool, layer = args

        def update(src: jax.Array, pool: jax.Array) -> jax.Array:
            old = jax.lax.dynamic_index_in_dim(pool, layer, 0)
            src = host_memory.copy_to_device(src)
            new, _ = reference_rows.gather_rows(src, src, indices[None], old, old)
            return jax.lax.dynamic_update_slice_in_dim(pool, new, layer, 0)

        return update(k, k_pool), update(v, v_pool)

    return dispatch.run(chosen, kernel, plain, k, v, indices, k_pool, v_pool, layer)


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


@functools.partial(jax.jit, static_argnames="chosen")
def _write_one(*args: jax.Array, chosen: str) -> tuple[jax.Array, jax.Array]:
    return dispatch.run(chosen, gather_kernel.scatter_into_donated_rows, reference_rows.scatter_rows, *args)
