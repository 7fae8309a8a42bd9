"""The arithmetic of the CPU's scan: every key of a row and layer times its head's queries, by one program of XLA's."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

_F16_MAX = float(np.finfo(np.float16).max)

# How XLA is to compile a scan: with sums that may be reordered, without which no reduction is vectorised (NaN is kept).
_COMPILED = {"xla_cpu_enable_fast_math": True, "xla_cpu_prefer_vector_width": 512}
# Queries of a head whose sums fit the vector registers together; more of them read the keys again.
_TOGETHER = 8
# Pieces of a row's keys that XLA can divide among its threads, if their number allows it.
_PIECES = 16


@functools.partial(jax.jit, static_argnames=("heads", "reach"), compiler_options=_COMPILED)
def scan(q: jax.Array, k: jax.Array, layer: jax.Array, head: jax.Array, *, heads: int, reach: int) -> jax.Array:
    """Scores of the first `reach` keys of some heads by their queries, over sqrt(D).

    XLA's matrix product is fast enough in cache, but waits for memory at every page of it: nothing is asked for ahead.
    So the keys are read as several streams at once, from as many places: what one waits for, the processor fetches
    while it multiplies for the others. One reduction with an operand for each query and stream reads every key once;
    LLVM turns it into a loop whose sums stay in registers. XLA splits it among its threads. (Left to calls of single
    heads from a Python thread for each core, a third of the cores waited for Python's lock.) What the reduction returns
    for each query and stream is put together here, for the same reason: in Python that took longer than a short scan.

    Args:
      q: queries `[L, H, R, D]` of all layers.
      k: keys `[H, N, D]` of one of them, or u32`[H, N, D / 2]`: the same memory of bfloat16 keys seen two by two, which
        is read faster.
      layer: whose queries, i32.
      head: the first head, i32.
      heads: how many.
      reach: how many keys to score, at most N.

    Returns:
      `[heads, R, reach]`, float32 for float32 keys, else float16: finer than what bfloat16 keys can tell apart, and
      half the traffic. Beyond float16's range scores stay at its end; NaN stays NaN.
    """
    queries, dim = q.shape[2:]
    pieces, streams, width = _layout(heads, reach, queries)
    scaled = jax.lax.dynamic_slice(q, (layer, head, 0, 0), (1, heads, queries, dim))[0].astype(jnp.float32) / dim**0.5
    scaled = scaled.reshape(heads, queries, 1, 1, dim)
    paired = k.dtype == jnp.uint32
    # Behind a barrier, or every key would have them converted again.
    factors = jax.lax.optimization_barrier((scaled[..., 0::2], scaled[..., 1::2]) if paired else (scaled,))
    keys = jax.lax.dynamic_slice(k, (head, 0, 0), (heads, reach, k.shape[2]))
    keys = keys.reshape(heads, pieces, reach // pieces, k.shape[2])
    starts = _starts(reach // pieces, streams, width)
    strips: list[jax.Array] = []
    for first in range(0, queries, _TOGETHER):
        products = []
        for query in range(first, min(first + _TOGETHER, queries)):
            for start in starts:
                values = _values(keys[:, :, start : start + width])
                products.append(sum(x * factor[:, query] for x, factor in zip(values, factors, strict=True)))
        strips += jax.lax.reduce(tuple(products), (jnp.float32(0),) * len(products), _add_each, (3,))
    if k.dtype != jnp.float32:
        strips = [_to_f16(x) for x in jax.lax.optimization_barrier(strips)]
    ends = [*starts[1:], reach // pieces]
    strips = [x[:, :, : ends[i % streams] - starts[i % streams]] for i, x in enumerate(strips)]
    # Behind barriers, which leave concatenations that copy whole strips: merged into one loop, they choose one of the
    # strips anew for every score, which takes a quarter of the scan's time.
    strips = jax.lax.optimization_barrier(strips)
    joined = [jnp.concatenate(strips[i : i + streams], axis=2) for i in range(0, len(strips), streams)]
    return jnp.stack(jax.lax.optimization_barrier(joined), axis=1).reshape(heads, queries, reach)


def _layout(heads: int, reach: int, queries: int) -> tuple[int, int, int]:
    """Pieces of each head's keys, streams in each piece, and keys in each stream.

    An odd number of these, because then the sums of all streams and queries, which are stored side by side, do not
    compete for the same places of the first-level cache. Streams may overlap for it: some keys are scored twice.
    """
    pieces = math.gcd(reach, max(_PIECES // heads, 1))
    keys = reach // pieces
    together = min(queries, _TOGETHER)
    streams = min(8 if together <= 2 else 4 if together <= 5 else 2, keys)
    width = -(-keys // streams)
    return pieces, streams, min(width + (width % 2 == 0), keys)


def _starts(keys: int, streams: int, width: int) -> list[int]:
    """Where each stream begins: apart evenly, from the first key to the last."""
    return [stream * (keys - width) // max(streams - 1, 1) for stream in range(streams)]


def _values(keys: jax.Array) -> tuple[jax.Array, ...]:
    """Keys in float32; of bfloat16 keys seen two by two, the first of each two and the second."""
    if keys.dtype != jnp.uint32:
        return (keys.astype(jnp.float32),)
    # The upper half of a float32 is a bfloat16: a pair's second is there already, its first goes there.
    first, second = keys << 16, keys & jnp.uint32(0xFFFF0000)
    return tuple(jax.lax.bitcast_convert_type(x, jnp.float32) for x in (first, second))


def _add_each(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _to_f16(scores: jax.Array) -> jax.Array:
    return jnp.clip(scores, -_F16_MAX, _F16_MAX).astype(jnp.float16)
