"""The row gather as a Mosaic GPU kernel: one launch for K and V, all layers, batch rows and heads.

A row is a few 16-byte chunks, one per thread, so that a warp's loads are runs of whole rows. The thread blocks walk
over tiles of rows; a thread first fetches all its row numbers, then has all its chunks of K and of V in flight
together, then stores them. That is all there is to it on the device. From host memory the same loads cross PCIe in
requests of up to 128 bytes, and what counts is how many are outstanding, not how many blocks ask: four blocks saturate
the link and leave the other multiprocessors to the denoising step that runs meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import host_memory

__all__ = [
    "CHUNK_BYTES",
    "DEVICE",
    "HOST",
    "HOST_LAYERS",
    "GatherConfig",
    "gather_layers",
    "gather_rows",
    "scatter_into_donated_rows",
    "scatter_rows",
]

CHUNK_BYTES = 16  # the widest access of a thread; a row must be a whole number of these
_WORDS = CHUNK_BYTES // 4


@dataclasses.dataclass(frozen=True)
class GatherConfig:
    """How the work is cut.

    Attributes:
        blocks: thread blocks; they take tiles in turn.
        threads: per block, a multiple of 128.
        unroll: rows in flight per thread (each a chunk of K and one of V).
        hint: PTX cache qualifiers of the source's loads. The source is read-only for the kernel and each chunk is read
            once, so it need not stay in L1.
    """

    blocks: int
    threads: int = 256
    unroll: int = 4
    hint: str = ".nc.L1::no_allocate"


# Measured on an H200 (docs/kernels-gather.md): every cut with 256 KiB in flight reads host memory equally fast, so one
# that occupies few multiprocessors. Four, because the matmuls of a denoising step are 128 programs: beside eight blocks
# some of them would have to wait for others to end. Layer by layer K and V are a launch each, which run side by side:
# two blocks each. On the device all from one to eight blocks each are within 5 %.
HOST = GatherConfig(blocks=4, threads=512, unroll=8, hint="")
HOST_LAYERS = GatherConfig(blocks=2, threads=1024, unroll=8, hint="")
DEVICE = GatherConfig(blocks=2 * 132)


def gather_rows(
    k_src: jax.Array,
    v_src: jax.Array,
    indices: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    dst: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    source_is_one_layer: bool = False,
    config: GatherConfig | None = None,
    launch: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.gather_rows.gather_rows` on Mosaic GPU; arguments are checked there.

    ``source_is_one_layer``: ``layer`` picks the layer of the pool; the source, ``[1, B, K, N, D]``, has no other.
    ``launch`` is :func:`pallas_kernels.lanes.launch`, or its NumPy twin in tests.
    """
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    if config is None:
        config = HOST if host_memory.is_host(k_src) else DEVICE
    slots = indices.shape[-1]
    if slots == 0 or math.prod(k_src.shape) == 0 or k_pool.shape[-2] == 0:
        return k_pool, v_pool
    chunks = k_src.shape[-1] * k_src.dtype.itemsize // CHUNK_BYTES
    shape: dict[str, Any] = {
        "source_rows": k_src.shape[-2],
        "pool_rows": k_pool.shape[-2],
        "slots": slots,
        "chunks": chunks,
        "problems": math.prod(indices.shape[:-1]),
        "problems_per_layer": math.prod(k_src.shape[1:3]),
        "unroll": config.unroll,
        "hint": config.hint,
        "source_is_one_layer": source_is_one_layer,
        "has_dst": dst is not None,
        "has_layer": layer is not None,
    }

    def kernel(lanes: Any, *memories: Any) -> None:
        _kernel(lanes, *memories, **shape)

    inputs = [host_memory.read_in_place(k_src), host_memory.read_in_place(v_src), indices]
    if dst is not None:
        inputs.append(dst)
    if layer is not None:
        inputs.append(jnp.asarray(layer, jnp.int32).reshape(1))
    k_pool, v_pool = launch(
        kernel,
        name="gather_rows",
        blocks=config.blocks,
        threads=config.threads,
        inputs=inputs,
        updated=[k_pool, v_pool],
    )
    return k_pool, v_pool


def gather_layers(
    sources: Sequence[jax.Array],
    indices: jax.Array,
    pool: jax.Array,
    first: jax.Array | None = None,
    used: jax.Array | None = None,
    *,
    config: GatherConfig | None = None,
    launch: Any = None,
) -> jax.Array:
    """K or V of :func:`pallas_kernels.layers.gather_layers`: the same gather with a source per layer, in one launch.

    A thread picks its source's address from all of them, a select per layer and list: nothing beside a PCIe round trip.
    Every block goes through all lists, empty or not, which is meant for the few that saturate the host's link. One
    array at a time, and so one result: with two, XLA would not let the launch run beside anything (see
    ``herald_jax.offload``).
    """
    if launch is None:
        from pallas_kernels import lanes

        launch = lanes.launch
    if config is None:
        config = HOST_LAYERS if host_memory.is_host(sources[0]) else DEVICE
    slots = indices.shape[-1]
    if slots == 0 or math.prod(sources[0].shape) == 0:
        return pool
    shape: dict[str, Any] = {
        "sources": len(sources),
        "source_rows": sources[0].shape[-2],
        "pool_rows": pool.shape[-2],
        "slots": slots,
        "chunks": pool.shape[-1] * pool.dtype.itemsize // CHUNK_BYTES,
        "lists_per_layer": math.prod(indices.shape[1:-1]),
        "blocks": config.blocks,
        "unroll": config.unroll,
        "hint": config.hint,
        "has_first": first is not None,
        "has_used": used is not None,
    }

    def kernel(lanes: Any, *memories: Any) -> None:
        _layers_kernel(lanes, *memories, **shape)

    inputs = [*map(host_memory.read_in_place, sources), indices]
    if first is not None:
        inputs.append(jnp.asarray(first, jnp.int32).reshape(1))
    if used is not None:
        inputs.append(used)
    [pool] = launch(
        kernel,
        name="gather_layers",
        blocks=config.blocks,
        threads=config.threads,
        inputs=inputs,
        updated=[pool],
    )
    return pool


def scatter_rows(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array | None = None,
    layer: jax.Array | None = None,
    *,
    config: GatherConfig = DEVICE,
    launch: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`pallas_kernels.gather_rows.scatter_rows` on Mosaic GPU: the gather, from every row of the block."""
    block_length = k_block.shape[-2]
    allowed = (positions >= 0) & (positions <= k_cache.shape[-2] - block_length)
    if mask is not None:
        allowed &= mask
    shape = k_block.shape[:-1]
    by_row = [1] * len(shape)
    by_row[-3] = shape[-3]  # the batch axis of [L, B, K, M] or [B, K, M]
    token = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    slots = jnp.where(allowed.reshape(by_row), positions.reshape(by_row) + token, -1)
    if layer is not None:
        k_block, v_block = k_block[None], v_block[None]
    return gather_rows(
        k_block,
        v_block,
        token,
        k_cache,
        v_cache,
        slots,
        layer,
        source_is_one_layer=layer is not None,
        config=config,
        launch=launch,
    )


def scatter_into_donated_rows(
    k_block: jax.Array,
    v_block: jax.Array,
    positions: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    mask: jax.Array | None = None,
    layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`scatter_rows` into caches that are donated arguments of the program, in whatever memory they are."""
    if not host_memory.is_host(k_cache):
        return scatter_rows(k_block, v_block, positions, k_cache, v_cache, mask, layer)
    device_k, device_v = host_memory.read_in_place(k_cache), host_memory.read_in_place(v_cache)
    device_k, device_v = scatter_rows(k_block, v_block, positions, device_k, device_v, mask, layer)
    return host_memory.still_in_host_memory(device_k), host_memory.still_in_host_memory(device_v)


def _kernel(
    lanes: Any,
    *memories: Any,
    source_rows: int,
    pool_rows: int,
    slots: int,
    chunks: int,
    problems: int,
    problems_per_layer: int,
    unroll: int,
    hint: str,
    source_is_one_layer: bool,
    has_dst: bool,
    has_layer: bool,
) -> None:
    # K and V are the sources at the front and the pools at the end.
    sources, pools = memories[:2], memories[-2:]
    indices, *rest = memories[2:-2]
    dst = rest.pop(0) if has_dst else None
    first_problem = lanes.constant(0)
    if has_layer:
        (layer,) = lanes.load(rest.pop(0), lanes.wide(lanes.constant(0)))
        first_problem = layer * problems_per_layer

    per_tile = lanes.threads * unroll  # chunks of one tile, all of one problem
    tiles_per_problem = -(-slots * chunks // per_tile)

    def tile(index: Any) -> tuple[()]:
        problem = index // tiles_per_problem
        first_chunk = (index % tiles_per_problem) * per_tile + lanes.thread
        work = []
        for i in range(unroll):
            flat = first_chunk + i * lanes.threads
            slot, chunk = flat // chunks, flat % chunks
            inside = slot < slots
            entry = lanes.wide(problem) * slots + lanes.wide(slot)
            (row,) = lanes.load(indices, entry, where=inside)
            if dst is not None:
                (slot,) = lanes.load(dst, entry, where=inside)
            # Unsigned comparison: -1 is far outside.
            work.append((row, slot, chunk, inside & (row < source_rows) & (slot < pool_rows)))
        from_problem = lanes.wide(problem if source_is_one_layer else first_problem + problem)
        to_problem = lanes.wide(first_problem + problem)
        moved = []
        for row, slot, chunk, wanted in work:
            offset = lanes.wide(chunk) * _WORDS
            source = (from_problem * source_rows + lanes.wide(row)) * (chunks * _WORDS) + offset
            target = (to_problem * pool_rows + lanes.wide(slot)) * (chunks * _WORDS) + offset
            rows = [lanes.load(src, source, _WORDS, where=wanted, hint=hint) for src in sources]
            moved.append((target, rows, wanted))
        for target, rows, wanted in moved:
            for pool, row in zip(pools, rows, strict=True):
                lanes.store(pool, target, row, where=wanted)
        return ()

    lanes.loop(lanes.block, lanes.constant(problems * tiles_per_problem), lanes.blocks, (), tile)


def _layers_kernel(
    lanes: Any,
    *memories: Any,
    sources: int,
    source_rows: int,
    pool_rows: int,
    slots: int,
    chunks: int,
    lists_per_layer: int,
    blocks: int,
    unroll: int,
    hint: str,
    has_first: bool,
    has_used: bool,
) -> None:
    layers, pool = memories[:sources], memories[-1]
    indices, *rest = memories[sources:-1]
    first_list = lanes.constant(0)
    if has_first:
        (first,) = lanes.load(rest.pop(0), lanes.wide(lanes.constant(0)))
        first_list = first * lists_per_layer
    per_tile = lanes.threads * unroll  # chunks of one tile, all of one list
    row_words = chunks * _WORDS

    def one_list(number: Any, turn: Any) -> tuple[Any]:
        end = lanes.constant(slots)
        if has_used:
            (ending,) = lanes.load(rest[0], lanes.wide(number))
            end = lanes.minimum(end, ending)
        wanted_chunks = end * chunks
        layer, in_layer = number // lists_per_layer, number % lists_per_layer
        entries = lanes.at(indices, lanes.wide(number) * slots)
        target = lanes.at(pool, lanes.wide(first_list + number) * (pool_rows * row_words))

        def tile(index: Any) -> tuple[()]:
            source = lanes.at(lanes.choose(layer, layers), lanes.wide(in_layer) * (source_rows * row_words))
            work = []
            for i in range(unroll):
                flat = index * per_tile + lanes.thread + i * lanes.threads
                # Loaded by no predicate, of which there are seven: an eighth load would wait for the others.
                (row,) = lanes.load(entries, lanes.minimum(flat // chunks, lanes.constant(slots - 1)))
                work.append((flat, row))
            moved = []
            for flat, row in work:
                wanted = (flat < wanted_chunks) & (row < source_rows)  # unsigned: -1 is far outside
                place = lanes.wide(row) * row_words + lanes.wide(flat % chunks) * _WORDS
                moved.append((flat, lanes.load(source, place, _WORDS, where=wanted, hint=hint), wanted))
            for flat, words, wanted in moved:
                lanes.store(target, flat * _WORDS, words, where=wanted)
            return ()

        # Empty tiles are not walked over: a pool has room for the longest row, and a shorter one leaves most of it.
        # `turn` is the block whose turn it is, so that all get as many tiles, however few a list has.
        tiles = (wanted_chunks + (per_tile - 1)) // per_tile
        mine = (lanes.block + blocks - turn) % blocks
        lanes.loop(mine, tiles, lanes.constant(blocks), (), tile)
        return ((turn + tiles) % blocks,)

    zero, one = lanes.constant(0), lanes.constant(1)
    lanes.loop(zero, lanes.constant(sources * lists_per_layer), one, (zero,), one_list)
