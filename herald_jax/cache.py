"""The KV cache in device memory, and attention over it.

Layout is head-major, `[L, B, K, N, D]`: a head's entries are contiguous, which the kernels and a host scan both need.
Every forward writes the K and V of its block behind the prefix (slots `start .. start + T`) and attends to prefix and
block in one pass; committing a block is nothing more than counting those slots as prefix afterwards. Slots past a row's
committed length hold leftovers that no query sees.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax.config import ModelConfig
from herald_jax.sharding import one_device
from pallas_kernels import block_attention
from pallas_kernels.fused_rows import Destination, write_kv, write_rows

CACHE_SPEC = P(None, "data", "model", None, None)

# Compiler options of programs that update a large cache in place. XLA counts the cache anew in every loop around it and
# beside every kernel that writes to it, up to three times. Believing that it does not fit, XLA computes projections
# twice to keep fewer activations, which are nothing beside the cache: compiled for an H200, those of every layer of an
# SDAR-8B prefilling 4 rows of 128K. What the program needs in the end is the same to the byte.
BESIDE_A_CACHE: dict[str, Any] = {"xla_disable_hlo_passes": "rematerialization"}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeviceKV:
    """K and V of every layer, each `[L, B, K, N, D]` in the model dtype."""

    k: jax.Array
    v: jax.Array

    @property
    def capacity(self) -> int:
        """N, slots per row."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int, mesh: Mesh | None = None) -> DeviceKV:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        place = one_device() if mesh is None else NamedSharding(mesh, CACHE_SPEC)
        zeros = functools.partial(jnp.zeros, shape, jnp.dtype(config.dtype), device=place)
        return cls(zeros(), zeros())


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "visible", "keep"],
    meta_fields=["mesh", "implementation"],
)
@dataclasses.dataclass(frozen=True)
class DenseAttend:
    """The dense plan's `attend`: write the block's K and V behind the prefix, then attend to all that is visible.

    Attributes:
      start: i32[B], or a scalar when all rows write at one place (prefill): first slot written.
      visible: i32[B, Q]: entries that each of the Q equal runs of the T queries sees.
      keep: bool[B, T] or None: which of the T positions are written; the rest keep what their slots hold.
      mesh: run per device over "data" (rows) and "model" (KV heads).
      implementation: passed to `block_attention`.
    """

    start: jax.Array
    visible: jax.Array
    keep: jax.Array | None = None
    mesh: Mesh | None = None
    implementation: Any = None

    def at(self, layer: int) -> DenseAttend:
        """The same for every layer."""
        return self

    def destination(self, layer: Any, tokens: int, cache: DeviceKV) -> Destination:
        """Where a block of `tokens` goes. Who writes K and V there itself calls with None for them, on `written`."""
        return Destination(cache.k, cache.v, jnp.asarray(layer, jnp.int32), self.start, tokens, self.keep)

    def written(self, cache: DeviceKV, k: jax.Array, v: jax.Array) -> DeviceKV:
        """`cache` with the arrays that its `destination` has become."""
        del cache
        return DeviceKV(k, v)

    def __call__(
        self, layer: Any, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: DeviceKV
    ) -> tuple[jax.Array, DeviceKV]:
        """q `[B, T, K, G, D]`; k, v `[B, T, K, D]`. Returns the output, shaped like q, and the cache."""
        local = functools.partial(
            _write_and_attend, self.implementation, self.implementation if self.mesh is None else "xla"
        )
        args = (jnp.asarray(layer, jnp.int32), q, k, v, cache.k, cache.v, self.start, self.visible, self.keep)
        if self.mesh is not None:
            row = P("data") if self.start.ndim else P()
            keep = None if self.keep is None else P("data", None)
            heads = P("data", None, "model", None)
            queries = P("data", None, "model", None, None)
            in_specs = (
                P(),
                queries,
                heads,
                heads,
                CACHE_SPEC,
                CACHE_SPEC,
                row,
                P("data", None),
                keep,
            )
            out_specs = (queries, CACHE_SPEC, CACHE_SPEC)
            local = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        out, new_k, new_v = local(*args)
        return out, DeviceKV(new_k, new_v)


def _write_and_attend(
    implementation: Any,
    writes: str | None,
    layer: jax.Array,
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    cache_k: jax.Array,
    cache_v: jax.Array,
    start: jax.Array,
    visible: jax.Array,
    keep: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if k is not None and v is not None:
        into = Destination(cache_k, cache_v, layer, start, k.shape[1], keep)
        cache_k, cache_v = write_kv(k, v, into, implementation=writes)
    b, t, kv_heads, group, d = q.shape
    folded = q.reshape(b, t, kv_heads * group, d)
    result = block_attention(folded, cache_k, cache_v, visible, layer=layer, implementation=implementation)
    return result.out.reshape(q.shape), cache_k, cache_v


def write(cache: jax.Array, layer: Any, new: jax.Array, start: jax.Array, keep: jax.Array | None = None) -> jax.Array:
    """`new` `[B, T, K, D]` into slots `start[b] .. start[b] + T` of one layer of `[L, B, K, N, D]`, in place under jit.

    The slots must lie inside the cache; `generate` sizes it so that even a finished row's do.
    """
    return write_rows(cache, layer, new, start, keep)
