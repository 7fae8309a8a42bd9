"""`block_attention` in plain XLA: what runs wherever the Mosaic GPU kernel does not.

The query heads of a group are folded into the rows of one matmul per KV head, and the queries are taken in chunks, so
that the float32 scores (the only array that grows with queries times entries) stay below `scores_limit` bytes.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

SCORES_LIMIT = 256 * 2**20


def attention_xla(q, k, v, lengths, layer, rows, prefix_lengths, *, scale, importance, scores_limit=SCORES_LIMIT):
    """The contract of `block_attention` on checked arguments; `importance` is None or an `Importance`.

    Returns `(out, lse, importance or None)`.
    """
    if k.ndim == 5:
        k = lax.dynamic_index_in_dim(k, layer, 0, keepdims=False)
        v = lax.dynamic_index_in_dim(v, layer, 0, keepdims=False)
    b, t, h, _ = q.shape
    kv_heads, n = k.shape[1:3]
    group = h // kv_heads
    lengths = jnp.clip(lengths, 0, n)
    shared = lengths.shape[1] == 1  # all queries of a row see the same entries
    limits = lengths if shared else jnp.repeat(lengths, t // lengths.shape[1], axis=1)

    # 0 * NaN is NaN: entries that no query sees must be taken out of V. Where they end is known only at run time.
    seen = jnp.arange(n)[None, :] < jnp.max(lengths, axis=1, keepdims=True)
    v = jnp.where(seen[:, None, :, None], v, 0)

    def attend(q, limits, rows):
        return _attend(q, k, v, limits, rows, prefix_lengths, scale=scale, importance=importance)

    chunks = -(-t // max(1, scores_limit // max(1, b * h * n * 4)))
    if chunks == 1:
        out, lse, weight = attend(q, limits, rows)
    else:
        pad = -t % chunks
        size = (t + pad) // chunks

        def split(x):  # [B, T, ...] -> [chunks, B, size, ...]
            x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(b, chunks, size, *x.shape[2:]), 1, 0)

        def join(x):
            return jnp.moveaxis(x, 0, 1).reshape(b, t + pad, *x.shape[3:])[:, :t]

        parts = (split(q), None if shared else split(limits), None if importance is None else split(rows))
        start = None if importance is None else jnp.zeros((b, kv_heads, n), jnp.float32)

        def body(weight, part):
            q, part_limits, part_rows = part
            out, lse, more = attend(q, limits if shared else part_limits, part_rows)
            if importance is not None:
                weight = jnp.maximum(weight, more) if importance.reduce == "max" else weight + more
            return weight, (out, lse)

        weight, (out, lse) = lax.scan(body, start, parts)
        out, lse = join(out), join(lse)
    if importance is not None and importance.reduce == "mean":
        count = jnp.maximum(jnp.sum(rows, axis=1), 1) * group
        weight = weight / count[:, None, None]
    return out, lse, weight


def _attend(q, k, v, limits, rows, prefix_lengths, *, scale, importance):
    """One chunk of queries: `(out, lse, summed or largest weight)`; limits `i32[B, t or 1]`, rows `bool[B, t]`."""
    b, t, h, d = q.shape
    kv_heads, n = k.shape[1:3]
    group = h // kv_heads
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    folded = jnp.moveaxis(q.reshape(b, t, kv_heads, group, d), 2, 1).reshape(b, kv_heads, t * group, d)
    scores = jnp.einsum("bkrd,bknd->bkrn", folded, k, precision=precision, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv_heads, t, group, n) * scale
    visible = (jnp.arange(n)[None, None, :] < limits[:, :, None])[:, None, :, None, :]
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(visible, scores, lowest)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + top, -jnp.inf)
    inverse = jnp.where(some, 1 / jnp.where(some, total, 1), 0)

    flat = weights.astype(v.dtype).reshape(b, kv_heads, t * group, n)
    out = jnp.einsum("bkrn,bknd->bkrd", flat, v, precision=precision, preferred_element_type=jnp.float32)
    out = (out.reshape(b, kv_heads, t, group, d) * inverse).astype(q.dtype)

    weight = None
    if importance is not None:
        if importance.over == "prefix":
            # Its own softmax: dividing the weights above by their prefix sum loses everything when the block's own
            # entries outweigh the prefix by more than float32 holds.
            inside = (jnp.arange(n)[None, :] < prefix_lengths[:, None])[:, None, None, None, :] & visible
            top = jnp.max(jnp.where(inside, scores, lowest), axis=-1, keepdims=True)
            weights = jnp.where(inside, jnp.exp(scores - top), 0)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            inverse = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        share = weights * jnp.where(rows[:, None, :, None, None], inverse, 0)
        weight = jnp.max(share, axis=(2, 3)) if importance.reduce == "max" else jnp.sum(share, axis=(2, 3))
    return (
        jnp.moveaxis(out, 1, 2).reshape(b, t, h, d),
        jnp.moveaxis(lse[..., 0], 1, 2).reshape(b, t, h),
        weight,
    )
