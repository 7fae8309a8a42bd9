"""Rows by index from device or host memory into a dense pool, and a committed block back into a cache.

``gather_rows`` fills the pool that a block's denoising steps attend to: for every layer, batch row and KV head it
copies the selected K and V rows next to each other. The source may be in ``pinned_host`` memory, where it is read in
place, so that only the selected rows cross PCIe. ``scatter_rows`` is the way back: the finished block's K and V are
written behind the prefix. Both update their destination in place when the caller donates it. ``write_block`` is
``scatter_rows`` as a program of its own, which can do that to a cache in host memory with a kernel too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, gather_kernel, host_memory, reference_rows
from pallas_kernels.gather_kernel import GatherConfig

__all__ = ["GatherConfig", "gather_rows", "scatter_rows", "write_block"]


def _check_cache(what: str, k: jax.Array, v: jax.Array) -> None:
    if k.ndim != 5 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"{what}: K and V must both be [L, B, K, N, D] of one dtype, got {k.dtype}{list(k.shape)} and "
            f"{v.dtype}{list(v.shape)}"
        )
    if host_memory.is_host(k) != host_memory.is_host(v):
        raise ValueError(f"{what}: K and V must be in the same memory")


def _check_layer(layer: jax.typing.ArrayLike | None, layers: int) -> jax.Array | None:
    if layer is None:
        return None
    if np.ndim(layer) != 0 or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer must be an integer scalar, got {jnp.result_type(layer)}{list(np.shape(layer))}")
    if isinstance(layer, (int, np.integer)) and not 0 <= layer < layers:
        raise ValueError(f"layer {layer} is outside [0, {layers})")
    return jnp.asarray(layer, jnp.int32)


def _check_index(name: str, x: jax.Array, leading: tuple[int, ...]) -> None:
    if x.dtype != jnp.int32 or x.ndim != len(leading) + 1 or x.shape[:-1] != leading:
        raise ValueError(f"{name} must be i32{[*leading, 'P']}, got {x.dtype}{list(x.shape)}")


def gather_rows(
    k_src: jax.Array,
    v_src: jax.Array,
    indices: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *,
    dst: jax.Array | None = None,
    layer: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
    config: GatherConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies the rows ``indices`` names from K and V sources into K and V pools.

    Args:
        k_src, v_src: ``[L, B, K, N, D]``, in device memory or in ``pinned_host`` memory. The Mosaic GPU kernel reads
            host memory in place; the plain form moves it through device memory one layer at a time.
        indices: ``i32[L, B, K, P]``. Row p of a problem goes to pool slot p. An index outside ``[0, N)``, -1 above all,
            leaves its slot as it was.
        k_pool, v_pool: ``[L, B, K, S, D]`` in device memory, of the source's dtype, ``S >= P`` unless ``dst`` is given.
            Updated in place when donated (to the jitted function this is called in, or as a loop's carry).
        dst: ``i32[L, B, K, P]``: the slot of each row, instead of its own position; outside ``[0, S)`` means leave out.
            Slots of one problem must differ.
        layer: fill one layer only. ``indices`` and ``dst`` then lack the leading axis; sources and pools stay whole, so
            that no layer is ever sliced out. May be traced, and must be inside ``[0, L)``.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None for the fastest that runs here.
        config: how the kernel cuts the work; by default one that suits the source's memory.

    Returns:
        ``(k_pool, v_pool)``, bit for bit the source's rows where one was named and the old pool elsewhere.

    Recompiles for new shapes, dtypes or memory spaces; ``layer`` and all indices are traced.

    Raises:
        ValueError: shapes, dtypes or memory spaces that do not fit together.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run; the message says why.
        RuntimeError: a source in host memory outside ``jit``, where no kernel reads it in place.
    """
    _check_cache("source", k_src, v_src)
    _check_cache("pool", k_pool, v_pool)
    if host_memory.is_host(k_pool):
        raise ValueError("the pool must be in device memory")
    if k_pool.dtype != k_src.dtype:
        raise ValueError(f"source and pool must have one dtype, got {k_src.dtype} and {k_pool.dtype}")
    if k_pool.shape[:3] != k_src.shape[:3] or k_pool.shape[-1] != k_src.shape[-1]:
        raise ValueError(f"source {list(k_src.shape)} and pool {list(k_pool.shape)} may differ in length only")
    layer = _check_layer(layer, k_src.shape[0])
    leading = k_src.shape[:3] if layer is None else k_src.shape[1:3]
    _check_index("indices", indices, leading)
    if dst is not None:
        _check_index("dst", dst, leading)
        if dst.shape != indices.shape:
            raise ValueError(f"dst {list(dst.shape)} and indices {list(indices.shape)} must have one shape")
    elif indices.shape[-1] > k_pool.shape[-2]:
        raise ValueError(f"{indices.shape[-1]} indices do not fit a pool of {k_pool.shape[-2]} slots")
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(k_src))
    return _gather(k_src, v_src, indices, k_pool, v_pool, dst, layer, chosen=chosen, config=config)


def scatter_rows(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    mask: jax.Array | None = None,
    layer: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes a block's K and V into the caches, at a position of its own for each batch row.

    Args:
        k_block, v_block: ``[L, B, K, M, D]`` (``[B, K, M, D]`` with ``layer``) in device memory.
        positions: ``i32[B]``: where the first of the M entries goes. A row whose block does not fit, that is outside
            ``[0, N - M]``, is left as it was.
        k_cache, v_cache: ``[L, B, K, N, D]`` in device or ``pinned_host`` memory; in place when donated.
        mask: ``bool[B]``; rows where it is False (finished ones) are left as they were.
        layer: write one layer only; may be traced.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None for the fastest that runs here.

    Returns:
        ``(k_cache, v_cache)``, in the memory they came in.

    Raises:
        ValueError: shapes, dtypes or memory spaces that do not fit together.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run; the message says why.
    """
    layer = _check_scatter(k_block, v_block, positions, k_cache, v_cache, mask, layer)
    chosen = dispatch.select(
        implementation, lambda: dispatch.scatter_rows_missing(k_cache, in_host_memory=host_memory.is_host(k_cache))
    )
    return _scatter(k_block, v_block, positions, k_cache, v_cache, mask, layer, chosen=chosen)


def write_block(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    mask: jax.Array | None = None,
    layer: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`scatter_rows` as a program of its own, which takes the caches over: use only what it returns.

    Not for traced code. Because this program donates the caches itself, a kernel may change them in place wherever they
    are; ``"mosaic_gpu"`` and None use it for caches in ``pinned_host`` memory too, which XLA's form updates several
    times slower (one strided update per batch row and cache).

    Raises:
        ValueError: as :func:`scatter_rows`; also when called under ``jit``, or while another view of a cache (a NumPy
            or CPU one) is alive, since such a cache cannot be donated.
        NotImplementedError: as :func:`scatter_rows`, except that host memory is supported.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (k_block, v_block, positions, k_cache, v_cache, mask, layer)):
        raise ValueError("write_block donates its caches, which only a call outside jit can: use scatter_rows inside")
    layer = _check_scatter(k_block, v_block, positions, k_cache, v_cache, mask, layer)
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(k_cache))
    return _write_block(k_block, v_block, positions, k_cache, v_cache, mask, layer, chosen=chosen)


def _check_scatter(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array | None,
    layer: jax.typing.ArrayLike | None,
) -> jax.Array | None:
    _check_cache("cache", k_cache, v_cache)
    index = _check_layer(layer, k_cache.shape[0])
    expected = (*k_cache.shape[:3], k_block.shape[-2] if k_block.ndim >= 2 else 0, k_cache.shape[-1])
    expected = expected if index is None else expected[1:]
    for name, block in (("k_block", k_block), ("v_block", v_block)):
        if block.shape != expected or block.dtype != k_cache.dtype or host_memory.is_host(block):
            raise ValueError(
                f"{name} must be {k_cache.dtype}{list(expected)} in device memory, got {jax.typeof(block).str_short()}"
            )
    batch = (k_cache.shape[1],)
    if positions.shape != batch or positions.dtype != jnp.int32:
        raise ValueError(f"positions must be i32{list(batch)}, got {positions.dtype}{list(positions.shape)}")
    if mask is not None and (mask.shape != batch or mask.dtype != jnp.bool_):
        raise ValueError(f"mask must be bool{list(batch)}, got {mask.dtype}{list(mask.shape)}")
    return index


# Compiled on their own where they are called outside `jit` too: host memory is readable in place only inside a program.
@partial(jax.jit, static_argnames=("chosen", "config"))
def _gather(*args: jax.Array | None, chosen: str, config: GatherConfig | None) -> tuple[jax.Array, jax.Array]:
    kernel = partial(gather_kernel.gather_rows, config=config)
    return dispatch.run(chosen, kernel, reference_rows.gather_rows, *args)


@partial(jax.jit, static_argnames="chosen")
def _scatter(*args: jax.Array | None, chosen: str) -> tuple[jax.Array, jax.Array]:
    return dispatch.run(chosen, gather_kernel.scatter_rows, reference_rows.scatter_rows, *args)


@partial(jax.jit, static_argnames="chosen", donate_argnums=(3, 4))
def _write_block(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array | None,
    layer: jax.Array | None,
    *,
    chosen: str,
) -> tuple[jax.Array, jax.Array]:
    args = (k_block, v_block, positions, k_cache, v_cache, mask, layer)
    return dispatch.run(chosen, gather_kernel.scatter_into_donated_rows, reference_rows.scatter_rows, *args)
