"""An index with random keys, and what it scores: the softmax of restored keys, in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.index_scores import GROUP, pack


def index_of(rng, layers, batch, heads, slots, dim, bits):
    """Codes and scales, layer by layer, and the keys that they stand for, f64`[L, B, K, N, D]`."""
    top, groups = (127, 1) if bits == 8 else (7, dim // GROUP)
    whole = rng.integers(-top, top + 1, (layers, batch, heads, slots, dim)).astype(np.int8)
    scales = np.exp(rng.standard_normal((layers, batch, heads, slots, groups))) / top
    scales = np.asarray(scales, jnp.bfloat16)
    keys = whole.reshape(*scales.shape, -1) * scales.astype(np.float64)[..., None]
    codes = [jnp.asarray(x) if bits == 8 else pack(jnp.asarray(x)) for x in whole]
    return codes, [jnp.asarray(x) for x in scales], keys.reshape(whole.shape)


def importance_of(keys, q, lengths, reduce, page):
    """f64`[L, B, K, ceil(N / page)]`."""
    slots, dim = keys.shape[-2:]
    scores = np.einsum("lbkrd,lbknd->lbkrn", np.asarray(q, np.float64), keys) / dim**0.5
    inside = np.arange(slots) < np.asarray(lengths)[:, None, None, None]
    scores = np.where(inside, scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))
    weights = np.where(inside, weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300), 0)
    merged = weights.max(axis=-2) if reduce == "max" else weights.mean(axis=-2)
    merged = np.pad(merged, [(0, 0)] * 3 + [(0, -slots % page)])
    return merged.reshape(*merged.shape[:3], -1, page).sum(axis=-1)
