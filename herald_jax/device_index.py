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

from herald_jax.host_select import softmax_over_prefix

_KEYS = P("data", "model", None, None)
_GROUP = 32
# A library's product would have to be given the codes in the queries' type: written to memory and read again.
_TAKE_CODES: dict[str, Any] = {"xla_gpu_cublas_fallback": False}


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class QuantisedKeys:
    """One layer's keys.

    Attributes:
      codes: i8[B, K, N, D] or, two neighbours in a byte, u8[B, K, N, D / 2].
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
    group = d if bits == 8 or d % _GROUP else _GROUP
    top = 127 if bits == 8 else 7
    grouped = k.astype(jnp.float32).reshape(*k.shape[:-1], d // group, group)
    scales = (jnp.max(jnp.abs(grouped), axis=-1) / top).astype(jnp.bfloat16)
    step = jnp.where(scales > 0, scales, 1).astype(jnp.float32)[..., None]
    codes = jnp.clip(jnp.round(grouped / step), -top, top).astype(jnp.int8).reshape(k.shape)
    if bits == 4:
        low, high = codes[..., 0::2], codes[..., 1::2]
        codes = ((low.astype(jnp.uint8) & 15) | (high.astype(jnp.uint8) << 4)).astype(jnp.uint8)
    return QuantisedKeys(codes, scales)


def _numbers(codes: jax.Array) -> jax.Array:
    """Codes `[..., D]`, i8 or i4: of two in a byte the same memory, no copy."""
    if codes.dtype != jnp.uint8:
        return codes
    return jax.lax.bitcast_convert_type(codes, jnp.int4).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def dequantise(keys: QuantisedKeys, dtype: Any) -> jax.Array:
    """What is left of the keys, `[..., D]`."""
    codes = _numbers(keys.codes)
    groups = keys.scales.shape[-1]
    grouped = codes.astype(dtype).reshape(*codes.shape[:-1], groups, codes.shape[-1] // groups)
    return (grouped * keys.scales.astype(dtype)[..., None]).reshape(codes.shape)


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
    """The index with a block's keys `k` `[L, B, K, M, D]` at slots `start` i32[B] of the rows in `mask` bool[B]."""

    def local(index: Any, k: jax.Array, start: jax.Array, mask: jax.Array) -> Any:
        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            for b in range(x.shape[0]):
                at = (jnp.int32(b), jnp.int32(0), start[b], jnp.int32(0))
                old = jax.lax.dynamic_slice(x, at, (1, *new.shape[1:]))
                x = jax.lax.dynamic_update_slice(x, jnp.where(mask[b], new[b : b + 1], old), at)
            return x

        return tuple(jax.tree.map(put, keys, quantise(k[layer], bits)) for layer, keys in enumerate(index))

    if mesh is None:
        return local(index, k, start, mask)
    specs = jax.tree.map(lambda _: _KEYS, index)
    block = P(None, "data", "model", None, None)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, block, P("data"), P("data")), out_specs=specs, check_vma=False
    )
    return mapped(index, k, start, mask)


@functools.partial(jax.jit, static_argnames=("reduce", "mesh"), compiler_options=_TAKE_CODES)
def score(
    index: Sequence[QuantisedKeys], queries: jax.Array, lengths: jax.Array, *, reduce: str, mesh: Mesh | None
) -> tuple[jax.Array, ...]:
    """Importance f32[B, K, N] of each indexed layer, from its `queries` `[L, B, K, R, D]` and i32[B] prefix lengths."""

    def local(index: Any, queries: jax.Array, lengths: jax.Array) -> Any:
        found: list[jax.Array] = []
        for layer, keys in enumerate(index):
            if found:
                # One layer after the other: its codes as numbers, if XLA writes them, are larger than its keys.
                keys, found[-1] = jax.lax.optimization_barrier((keys, found[-1]))
            found.append(_score_layer(keys, queries[layer], lengths, reduce))
        return tuple(found)

    if mesh is None:
        return local(index, queries, lengths)
    specs = jax.tree.map(lambda _: _KEYS, index)
    asked, scored = P(None, "data", "model", None, None), tuple(P("data", "model", None) for _ in index)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, asked, P("data")), out_specs=scored, check_vma=False
    )  # fmt: skip
    return mapped(index, queries, lengths)


@functools.partial(jax.jit, static_argnames="reduce")
def _score_layer(keys: QuantisedKeys, q: jax.Array, lengths: jax.Array, reduce: str) -> jax.Array:
    """As `score`, of one layer: q `[B, K, R, D]`.

    The product takes the codes as they are, converted on their way into it; restored keys would be written to memory
    and read again. So the scales are applied to its result, and each group of numbers with a scale of its own asks
    with a query that is zero elsewhere: a matrix unit multiplies 16 queries as fast as 4.
    """
    batch, heads, queries, dim = q.shape
    groups = keys.scales.shape[-1]
    mine = jnp.arange(dim)[None, :] // (dim // groups) == jnp.arange(groups)[:, None]
    asked = jnp.where(mine.reshape(1, 1, groups, 1, dim), q[:, :, None], 0)
    asked = asked.reshape(batch, heads, groups * queries, dim)
    precision = "highest" if q.dtype == jnp.float32 else None
    codes = _numbers(keys.codes).astype(q.dtype)
    sums = jnp.einsum("bkrd,bknd->bkrn", asked, codes, preferred_element_type=jnp.float32, precision=precision)
    scales = jnp.moveaxis(keys.scales.astype(jnp.float32), 3, 2)[:, :, :, None]
    scores = jnp.sum(sums.reshape(batch, heads, groups, queries, -1) * scales, axis=2)
    return softmax_over_prefix(scores / dim**0.5, lengths.reshape(-1, 1, 1, 1), reduce)
