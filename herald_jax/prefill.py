"""Prompt to KV cache: the whole blocks of every row's prompt, block-causally, in chunks.

What is left of a prompt (its length modulo the block length) joins the row's first canvas as known tokens. Rows of a
batch start at slot 0 and are padded on the right; a query sees entries up to the end of its own block, so padding is
never seen, whatever the mix of lengths. A chunk bounds activation memory: no array grows with the prompt but the cache.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from herald_jax import sharding
from herald_jax.cache import BESIDE_A_CACHE, DenseAttend, DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.model import Params, bind


def chunk_length(longest: int, limit: int, block_length: int) -> int:
    """Tokens per prefill forward for a batch whose longest whole-block prompt is `longest`; a multiple of the block.

    A power of two, so that prompts of similar length share one compiled program.
    """
    size = min(1 << max(longest - 1, 15).bit_length(), max(limit, block_length))
    return -(-size // block_length) * block_length


@functools.partial(
    jax.jit,
    static_argnames=("config", "mesh", "implementation"),
    donate_argnames=("cache", "last_hidden"),
    compiler_options=BESIDE_A_CACHE,
)
def prefill_chunk(
    params: Params,
    cache: DeviceKV,
    last_hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    config: ModelConfig,
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> tuple[DeviceKV, jax.Array]:
    """Write one chunk of every row's prompt into the cache.

    Args:
      last_hidden: `[B, E]`; rows whose last prefilled token lies in this chunk get its hidden state here.
      tokens: i32[B, C], C a multiple of the block length.
      start: i32 scalar, the chunk's first position, a multiple of the block length.
      lengths: i32[B], whole-block prompt length of each row.

    Compiles once per shape of `tokens` and `cache`.
    """
    batch, length = tokens.shape
    block = config.diffusion.block_length
    positions = start + jnp.arange(length)
    block_ends = start + block * (1 + jnp.arange(length // block))
    visible = jnp.where(block_ends[None, :] <= lengths[:, None], block_ends[None, :], 0)
    attend = DenseAttend(start, visible, mesh=mesh, implementation=implementation)
    hidden, cache = bind(config, params)(tokens, jnp.broadcast_to(positions, (batch, length)), attend, cache)
    offset = lengths - 1 - start
    here = (offset >= 0) & (offset < length)
    last = jnp.take_along_axis(hidden, jnp.clip(offset, 0, length - 1)[:, None, None], axis=1)[:, 0]
    last_hidden = jnp.where(here[:, None], last, last_hidden)
    if mesh is not None:  # as it came in, or the next chunk would be another program
        last_hidden = jax.lax.with_sharding_constraint(last_hidden, sharding.batch_sharding(mesh, 2))
    return cache, last_hidden


def prefill(
    params: Params,
    cache: DeviceKV,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    config: ModelConfig,
    chunk: int,
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> tuple[DeviceKV, jax.Array]:
    """Fill the cache with the first `lengths[b]` (whole blocks) tokens of each row of `tokens` i32[B, >= max length].

    Returns the cache and the hidden state `[B, E]` of each row's last prefilled token (zeros where there is none).
    `cache.capacity` must hold the longest row rounded up to `chunk`.
    """
    batch = tokens.shape[0]
    place = sharding.batch_place(mesh, 2)
    last_hidden = jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype), device=place)
    longest = int(lengths.max(initial=0))
    padded = np.zeros((batch, -(-longest // chunk) * chunk), np.int32)
    padded[:, :longest] = tokens[:, :longest]
    for start in range(0, longest, chunk):
        cache, last_hidden = prefill_chunk(
            params,
            cache,
            last_hidden,
            padded[:, start : start + chunk],
            np.int32(start),
            lengths.astype(np.int32),
            config=config,
            mesh=mesh,
            implementation=implementation,
        )
    return cache, last_hidden
