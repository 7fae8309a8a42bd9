"""The plain `jnp` form of attention over a long prefix, and merging by log-sum-exp.

These are the definitions that every implementation is tested against: float32 throughout, matmuls at the highest
precision, every intermediate held in full. They are for reading and for tests, not for speed.

Shape letters: B batch, T queries, H query heads, K KV heads, G = H // K, D head dim, N KV entries.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def attention_reference(q, k, v, lengths, *, scale=None) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of each query over the first entries of its row, with nothing clever.

    q `[B, T, H, D]`; k, v `[B, K, N, D]`; lengths `i32[B, Q]`, T % Q == 0: each run of T // Q consecutive queries sees
    entries [0, lengths[b, i]). Returns out `f32[B, T, H, D]` and lse `f32[B, T, H]`; a query that sees nothing gets
    out 0 and lse -inf. Entries no query of the row sees may hold anything, NaN included.
    """
    weights, lse = _weights(q, k, lengths, scale)
    seen = jnp.arange(v.shape[2])[None] < jnp.max(lengths, axis=1)[:, None]
    v = jnp.where(seen[:, None, :, None], v.astype(jnp.float32), 0)  # 0 * NaN is NaN, so the tail must go first
    out = jnp.einsum("btkgn,bknd->btkgd", weights, v, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def importance_reference(q, k, lengths, rows, *, reduce="mean", scale=None) -> jax.Array:
    """Softmax weight of each entry, over the chosen query rows and the query heads of its KV head: `f32[B, K, N]`.

    rows `bool[B, T]` says which queries count; reduce is "mean" or "max". To normalise over the prefix alone, pass the
    prefix lengths as `lengths`. Entries that no chosen query sees, and rows with no chosen query, get 0.
    """
    weights, _ = _weights(q, k, lengths, scale)
    chosen = jnp.where(rows[:, :, None, None, None], weights, 0)
    if reduce == "max":
        return jnp.max(chosen, axis=(1, 3))
    count = jnp.maximum(jnp.sum(rows, axis=1), 1) * weights.shape[3]
    return jnp.sum(chosen, axis=(1, 3)) / count[:, None, None]


def merge_by_lse(outs: jax.Array, lses: jax.Array, *, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Join attention over disjoint sets of entries: outs `[..., S, ..., D]`, lses `f32[..., S, ...]`, S at `axis`.

    Returns out (dtype of `outs`) and lse `f32` without the S axis. Parts that saw nothing (lse -inf) do not count,
    whatever their `outs` hold; if no part saw anything, out is 0 and lse -inf.
    """
    axis %= lses.ndim
    top = jnp.max(lses, axis=axis, keepdims=True)
    weights = jnp.where(lses == -jnp.inf, 0, jnp.exp(lses - jnp.where(top == -jnp.inf, 0, top)))
    total = jnp.sum(weights, axis=axis, keepdims=True)
    lse = jnp.squeeze(jnp.log(total) + jnp.where(top == -jnp.inf, 0, top), axis)
    share = (weights / jnp.where(total == 0, 1, total))[..., None]
    out = jnp.sum(jnp.where(share == 0, 0, outs.astype(jnp.float32) * share), axis=axis)
    return out.astype(outs.dtype), lse


def _weights(q, k, lengths, scale):
    """Softmax weights `f32[B, T, K, G, N]` (0 where not visible) and lse `f32[B, T, K, G]`."""
    b, t, h, d = q.shape
    kv_heads, n = k.shape[1:3]
    scale = 1 / math.sqrt(d) if scale is None else scale
    q = q.astype(jnp.float32).reshape(b, t, kv_heads, h // kv_heads, d)
    scores = jnp.einsum("btkgd,bknd->btkgn", q, k.astype(jnp.float32), precision=lax.Precision.HIGHEST) * scale
    limit = jnp.repeat(lengths, t // lengths.shape[1], axis=1)
    visible = (jnp.arange(n)[None, None] < limit[:, :, None])[:, :, None, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
    return weights, lse
