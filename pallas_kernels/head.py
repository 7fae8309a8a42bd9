"""The vocabulary head of a denoising step, as far as it decides: the best word of each token and how sure it is.

Logits of a block are 19 MB in float32 for each row of a batch. The kernel (docs/kernels-matmul.md) reads the weights
once and keeps the logits in registers; the plain form holds them whole.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

__all__ = ["HeadStatistics", "head_statistics"]


class HeadStatistics(NamedTuple):
    """Of each token's logits.

    Attributes:
      token: i32[T], the word with the largest logit, the first of several.
      top: f32[T], that logit. A NaN among the logits makes `total` NaN, and `token` any word.
      total: f32[T], the sum of exp(logit - top).
      weighted: f32[T], the sum of exp(logit - top) * (logit - top).
    """

    token: jax.Array
    top: jax.Array
    total: jax.Array
    weighted: jax.Array


def head_statistics(
    x: jax.Array, w: jax.Array, *, implementation: str | None = None, config: Any = None, spared: int = 0
) -> HeadStatistics:
    """Statistics of the logits `x [T, E] @ w [V, E].T`, accumulated in float32.

    `implementation`, `config`: as `stream_matmul`'s (`head_mosaic.HeadConfig`). `spared`: multiprocessors to leave to
    a kernel that runs beside this one. (Where one of its programs has to wait for another to end, it takes twice the
    time.)

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"head_statistics takes x [T, E] and w [V, E], not {list(x.shape)} and {list(w.shape)}")
    chosen = dispatch.select(implementation, lambda: dispatch.head_statistics_missing(x, w))
    if chosen == "xla":
        return _plain(x, w)
    from pallas_kernels import head_mosaic  # Mosaic GPU is imported only where a kernel is built

    if config is None:
        config = head_mosaic.make_config(x.shape[0], spared)
    return dispatch.run(chosen, functools.partial(_by_kernel, config=config), _plain, x, w)


def _by_kernel(x: jax.Array, w: jax.Array, *, config: Any) -> HeadStatistics:
    from pallas_kernels import head_mosaic

    shares = head_mosaic.statistics(x, w, config=config)
    lowest = (head_mosaic.LOWEST, float(w.shape[0] - 1), 0.0, 0.0)
    # One reduction of all four is one launch; cut to the tokens before it, each would be a launch more.
    top, word, total, weighted = (y[: x.shape[0]] for y in jax.lax.reduce(shares, lowest, _joined, (0,)))
    return HeadStatistics(word.astype(jnp.int32), top, total, weighted)


def _joined(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Statistics of two parts of the vocabulary, each (top, word, total, weighted), as those of both."""
    top = jnp.maximum(a[0], b[0])
    word = jnp.where(a[0] > b[0], a[1], jnp.where(b[0] > a[0], b[1], jnp.minimum(a[1], b[1])))
    total = weighted = jnp.zeros_like(top)
    for part_top, _, part_total, part_weighted in (a, b):
        fall = part_top - top
        shrink = jnp.exp(fall)
        total += shrink * part_total
        weighted += shrink * (part_weighted + fall * part_total)
    return top, word, total, weighted


def _plain(x: jax.Array, w: jax.Array) -> HeadStatistics:
    precision = "highest" if w.dtype == jnp.float32 else None
    logits = jnp.einsum("te,ve->tv", x, w, preferred_element_type=jnp.float32, precision=precision)
    top = jnp.max(logits, axis=-1)
    below = logits - top[:, None]
    weights = jnp.exp(below)
    weighted = jnp.sum(jnp.where(weights > 0, weights * below, 0.0), axis=-1)
    return HeadStatistics(jnp.argmax(logits, axis=-1).astype(jnp.int32), top, jnp.sum(weights, axis=-1), weighted)
