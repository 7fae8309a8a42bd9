"""HERALD's selection on the device: importances from a quantised copy of K that stays there (ours, beyond the paper).

Where the CPU cannot scan all keys while a block is denoised, the device can score a copy of them in 8 or 4 bits: a
half or a quarter of K, an eighth of the cache at 4 bits. Only the choice comes from it; what is attended to are the
exact rows from host memory. Keys are quantised symmetrically per entry, at 4 bits per group of 32 numbers of an entry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import index_scores

_KEYS = P("data", "model", None, None)
# A library's product would have to be given the codes in the queries' type: written to memory and read again.
_TAKE_CODES: dict[str, Any] = {"xla_gpu_cublas_fallback": False}


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class QuantisedKeys:
    """One layer's keys.

    Attributes:
      codes: i8[B, K, N, D] or, two in a byte (`index_scores.in_bytes`), u8[B, K, N, D / 2].
      scales: bf16[B, K, N, D / group].
    """

    codes: jax.Array
    scales: jax.Array

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def quantise(k: jax.Array, bits: int) -> QuantisedKeys:
    """`k` `[..., D]` in 8 or 4 bits; D must be even for 4."""
    d = k.shape[-1]
    group = d if bits == 8 or d % index_scores.GROUP else index_scores.GROUP
    top = 127 if bits == 8 else 7
    grouped = k.astype(jnp.float32).reshape(*k.shape[:-1], d // group, group)
    scales = (jnp.max(jnp.abs(grouped), axis=-1) / top).astype(jnp.bfloat16)
    step = jnp.where(scales > 0, scales, 1).astype(jnp.float32)[..., None]
    codes = jnp.clip(jnp.round(grouped / step), -top, top).astype(jnp.int8).reshape(k.shape)
    return QuantisedKeys(index_scores.pack(codes) if bits == 4 else codes, scales)


@functools.partial(jax.jit, static_argnames=("bits", "mesh"))
def build(k: jax.Array, *, bits: int, mesh: Mesh | None) -> QuantisedKeys:
    """The index of one layer's keys `[1, B, K, N, D]`, which are on the device."""
    keys = quantise(k[0], bits)
    if mesh is None:
        return keys
    place = jax.sharding.NamedSharding(mesh, _KEYS)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), keys)


@functools.partial(jax.jit, static_argnames=("bits", "mesh"), donate_argnames="index")
def append(
    index: tuple[QuantisedKeys, ...], k: jax.Array, start: jax.Array, mask: jax.Array, *, bits: int, mesh: Mesh | None
) -> tuple[QuantisedKeys, ...]:
    """The index with a block's keys `k` `[L, B, K, M, D]` from slots `start` i32[B] on, of the rows in `mask` bool[B].

    A block that does not fit is left out.
    """

    def local(index: Any, k: jax.Array, start: jax.Array, mask: jax.Array) -> Any:
        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            # One scatter for all rows, in place. With slices it takes as many launches as there are rows.
            row, head, entry = (jax.lax.broadcasted_iota(jnp.int32, new.shape[:3], i) for i in range(3))
            slots = x.shape[2]
            fits = (mask & (start <= slots - new.shape[2]))[:, None, None]
            slot = jnp.where(fits, start[:, None, None] + entry, slots)
            return x.at[row, head, slot].set(new, mode="drop", unique_indices=True)

        return tuple(jax.tree.map(put, keys, quantise(k[layer], bits)) for layer, keys in enumerate(index))

    if mesh is None:
        return local(index, k, start, mask)
    specs = jax.tree.map(lambda _: _KEYS, index)
    block = P(None, "data", "model", None, None)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, block, P("data"), P("data")), out_specs=specs, check_vma=False
    )
    return mapped(index, k, start, mask)


@functools.partial(jax.jit, static_argnames=("reduce", "page", "mesh", "implementation"), compiler_options=_TAKE_CODES)
def score(
    index: Sequence[QuantisedKeys],
    queries: jax.Array,
    lengths: jax.Array,
    *,
    reduce: str,
    page: int = 1,
    mesh: Mesh | None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Importance of each indexed layer, from its `queries` `[L, B, K, R, D]` and i32[B] prefix lengths.

    f32[B, K, ceil(N / page)]: a page's entries share a number, the sum of theirs.
    """

    def local(index: Any, queries: jax.Array, lengths: jax.Array) -> Any:
        codes, scales = ([getattr(keys, name) for keys in index] for name in ("codes", "scales"))
        return index_scores.importance(
            codes, scales, queries, lengths, reduce=reduce, page=page, implementation=implementation
        )

    if mesh is None:
        return local(index, queries, lengths)
    specs = jax.tree.map(lambda _: _KEYS, index)
    asked, scored = P(None, "data", "model", None, None), tuple(P("data", "model", None) for _ in index)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, asked, P("data")), out_specs=scored, check_vma=False
    )  # fmt: skip
    return mapped(index, queries, lengths)
