"""Importances from a quantised index of K: what of a prefix queries look at, by keys of 8 or 4 bits.

Shape letters: L layers, B batch, K KV heads, R queries, N slots, D head dim, G groups of an entry's numbers.

An index of one layer is codes, i8`[B, K, N, D]` or u8`[B, K, N, D / 2]`, and their scales, bf16`[B, K, N, G]`: a key's
number is its code times the scale of its group, D / G numbers that follow each other. What two numbers share a byte of
u8 codes, and where, is `in_bytes`; both are signed, of 4 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, index_scores_kernel
from pallas_kernels.block_attention import page_sums
from pallas_kernels.index_scores_kernel import IndexConfig

__all__ = ["GROUP", "IndexConfig", "importance", "in_bytes", "pack", "softmax_over_prefix", "unpack"]

GROUP = 32
# What the first kernel may leave for the second: the layers that it takes at once are as many as this has room for.
_BETWEEN = 256 * 2**20


def in_bytes(x: jax.Array) -> jax.Array:
    """`[..., D]` as `[..., 2, D / 2]`: what the lower and the upper halves of the bytes hold.

    The kernel's order: of every 32 numbers the first half below the second, and four bytes of each 32 in turn. That
    is a word of each group for each of four threads. A head dim without such groups is halved.
    """
    *lead, dim = x.shape
    shape = (dim // GROUP, 2, 4, 4) if dim % GROUP == 0 else (1, 2, 1, dim // 2)
    return jnp.moveaxis(x.reshape(*lead, *shape), (-3, -2), (-4, -3)).reshape(*lead, 2, dim // 2)


def pack(codes: jax.Array) -> jax.Array:
    """i8`[..., D]` of 4 bits, D even, as u8`[..., D / 2]`."""
    halves = in_bytes(codes.astype(jnp.uint8))
    return (halves[..., 0, :] & 15) | (halves[..., 1, :] << 4)


def unpack(codes: jax.Array) -> jax.Array:
    """u8`[..., D / 2]` as i8`[..., D]`. For tests: nothing else wants the numbers in their order."""
    halves = jnp.stack(_halves(codes), axis=-2)
    dim = 2 * codes.shape[-1]
    where = jnp.argsort(in_bytes(jnp.arange(dim)).reshape(dim))
    return halves.reshape(*codes.shape[:-1], dim)[..., where]


def _halves(codes: jax.Array) -> tuple[jax.Array, ...]:
    """i8 arrays as wide as the codes: these, or the lower and upper halves of u8."""
    if codes.dtype != jnp.uint8:
        return (codes,)
    return (codes << 4).astype(jnp.int8) >> 4, codes.astype(jnp.int8) >> 4


def importance(
    codes: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    q: jax.Array,
    lengths: jax.Array,
    *,
    reduce: str,
    page: int = 1,
    implementation: str | None = None,
    config: IndexConfig | None = None,
) -> tuple[jax.Array, ...]:
    """Of each layer the softmax weights of its prefix, over its queries: f32`[B, K, ceil(N / page)]`.

    Args:
        codes, scales: the index, layer by layer, all layers alike.
        q: `[L, B, K, R, D]`.
        lengths: i32[B], the prefixes. Entries from there on count nothing, whatever they hold.
        reduce: "mean" or "max" over the queries.
        page: how many entries share a number, which is the sum of theirs.
        implementation: "xla", "mosaic_gpu" or None for the fastest that runs here.
        config: how the kernel cuts the work.

    Raises:
        ValueError: another `reduce`, or numbers of layers that differ.
        NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    if reduce not in ("mean", "max"):
        raise ValueError(f"reduce must be 'mean' or 'max', not {reduce!r}")
    if not len(codes) == len(scales) == q.shape[0]:
        raise ValueError(f"{len(codes)} layers' codes, {len(scales)} layers' scales and queries {list(q.shape)}")
    if not codes:
        return ()
    chosen = dispatch.select(implementation, lambda: dispatch.index_scores_missing(codes[0], scales[0], q))
    return _run(tuple(codes), tuple(scales), q, lengths, reduce=reduce, page=page, chosen=chosen, config=config)


@functools.partial(jax.jit, static_argnames=("reduce", "page", "chosen", "config"))
def _run(codes, scales, q, lengths, *, reduce: str, page: int, chosen: str, config: IndexConfig | None):
    def xla(codes, scales, q, lengths):
        found: list[jax.Array] = []
        for layer, keys in enumerate(zip(codes, scales, strict=True)):
            if found:
                # One layer after the other: its codes as numbers, if XLA writes them, are larger than its keys.
                keys, found[-1] = jax.lax.optimization_barrier((keys, found[-1]))
            weights = _layer_xla(*keys, q[layer], lengths, reduce=reduce)
            found.append(weights if page == 1 else page_sums(weights, page, lengths))
        return tuple(found)

    def mosaic_gpu(codes, scales, q, lengths):
        grain = 1
        if reduce == "mean":
            grain = next((x for x in (64, 32, 16, 8) if page % x == 0 and x <= (config or IndexConfig()).tile), 1)
        slots, asked = codes[0].shape[2], q.shape[1] * q.shape[2] * q.shape[3]
        layer_bytes = asked * slots * (2 if grain == 1 else 4 / grain)
        together = max(1, int(_BETWEEN // layer_bytes))
        found: list[jax.Array] = []
        for first in range(0, len(codes), together):
            some: tuple[Any, Any, Any] = tuple(x[first : first + together] for x in (codes, scales, q))
            if found:
                some, found[-1] = jax.lax.optimization_barrier((some, found[-1]))
            a, b, c = some
            found += index_scores_kernel.importance(a, b, c, lengths, reduce=reduce, grain=grain, config=config)
        return tuple(x if page == grain else page_sums(x, page // grain) for x in found)

    return dispatch.run(chosen, mosaic_gpu, xla, codes, scales, q, lengths)


@functools.partial(jax.jit, static_argnames="reduce")
def _layer_xla(codes: jax.Array, scales: jax.Array, q: jax.Array, lengths: jax.Array, *, reduce: str) -> jax.Array:
    """Importance f32[B, K, N] of one layer from q `[B, K, R, D]`: the definition.

    The product takes the codes as they are, converted on their way into it; restored keys would be written to memory
    and read again. So the scales are applied to its result, and each group of numbers with a scale of its own asks
    with a query that is zero elsewhere: a matrix unit multiplies 16 queries as fast as 4.
    """
    batch, heads, queries, dim = q.shape
    groups = scales.shape[-1]
    mine = jnp.arange(dim)[None, :] // (dim // groups) == jnp.arange(groups)[:, None]
    asked = jnp.where(mine.reshape(1, 1, groups, 1, dim), q[:, :, None], 0)
    asked = asked.reshape(batch, heads, groups * queries, dim)
    precision = "highest" if q.dtype == jnp.float32 else None
    halves = _halves(codes)
    parts = [asked] if len(halves) == 1 else list(jnp.moveaxis(in_bytes(asked), -2, 0))
    sums = sum(
        jnp.einsum("bkrd,bknd->bkrn", x, y.astype(q.dtype), preferred_element_type=jnp.float32, precision=precision)
        for x, y in zip(parts, halves, strict=True)
    )
    factors = jnp.moveaxis(scales.astype(jnp.float32), 3, 2)[:, :, :, None]
    scores = jnp.sum(jnp.reshape(sums, (batch, heads, groups, queries, -1)) * factors, axis=2)
    return softmax_over_prefix(scores / dim**0.5, lengths.reshape(-1, 1, 1, 1), reduce)


def softmax_over_prefix(scores: jax.Array, length: jax.Array, reduce: str) -> jax.Array:
    """Importance f32[..., N] from scores f32[..., R, N] and the prefix length, a scalar or of shape `[..., 1, 1]`."""
    inside = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,)) < length
    weights = jax.nn.softmax(jnp.where(inside, scores, jnp.finfo(jnp.float32).min), axis=-1)
    merged = jnp.max(weights, axis=-2) if reduce == "max" else jnp.mean(weights, axis=-2)
    return jnp.where(inside[..., 0, :], merged, 0.0)
