"""What lies between the matmuls of a decoder layer, each as one kernel launch: residual and norm, heads, cache write.

Every function has a plain form in jax.numpy and a Mosaic GPU kernel for a denoising step's few rows; see `dispatch`.
Rows are tokens, R of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, fused_rows_kernel
from pallas_kernels.fused_rows_kernel import Destination

__all__ = ["Destination", "add_norm", "project_heads", "write_kv", "write_rows"]


def add_norm(
    x: jax.Array,
    parts: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The residual stream plus a sublayer's output, and its RMS norm.

    Args:
      x: `[R, E]`.
      parts: `[S, R, E]`, float32 or of x's dtype: partial sums of what is added; None adds nothing.
      scale: `[E]` of x's dtype.
      eps: added to the mean square.
      implementation: `"xla"`, `"mosaic_gpu"` or None for the fastest that runs here.

    Returns:
      `(x + sum of parts, its norm times scale)`, both `[R, E]` of x's dtype. The norm is taken of the rounded sum.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    if x.ndim != 2 or scale.shape != x.shape[1:] or (parts is not None and parts.shape[1:] != x.shape):
        given = [None if a is None else list(a.shape) for a in (x, parts, scale)]
        raise ValueError(f"add_norm takes x [R, E], parts [S, R, E] or None and scale [E], not {given}")
    chosen = dispatch.select(implementation, lambda: dispatch.add_norm_missing(x, parts))
    kernel = functools.partial(fused_rows_kernel.add_norm, eps=eps)
    return dispatch.run(chosen, kernel, functools.partial(_add_norm_plain, eps=eps), x, parts, scale)


def _add_norm_plain(x: Any, parts: Any, scale: Any, *, eps: float) -> Any:
    if parts is not None:
        x = (x.astype(jnp.float32) + jnp.sum(parts.astype(jnp.float32), axis=0)).astype(x.dtype)
    return x, _norm(x, scale, eps)


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def project_heads(
    parts: jax.Array,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    angles: tuple[jax.Array, jax.Array],
    *,
    group: int,
    eps: float,
    dtype: Any,
    head_dim: int | None = None,
    into: Destination | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """From the partial sums of a qkv projection to normed and rotated heads, K and V where they belong.

    Args:
      parts: `[S, R, K * (G + 2) * D]`, float32 or of `dtype`: per KV head its G query heads, its key, its value head.
      bias: `[K * (G + 2) * D]` of `dtype`, or None.
      q_scale, k_scale: `[D]` of `dtype`: RMS norm of each query and key head; both None for none.
      angles: cos and sin of the rotary embedding, f32 `[R, D' // 2]` each, of a head's leading D' numbers.
      group: G.
      eps: added to the mean square.
      dtype: of the result.
      head_dim: D, where it is not D'.
      into: caches (of `dtype`) to write K and V to, in place under jit; rows are then `[B, T]` flattened.
      implementation: `"xla"`, `"mosaic_gpu"` or None for the fastest that runs here.

    Returns:
      `(q [R, K, G, D], k [R, K, D], v [R, K, D])`, or with `into` `(q, k_cache, v_cache)`.

    Raises:
      ValueError, NotImplementedError: as `add_norm` does.
    """
    rotated = 2 * angles[0].shape[-1]
    dim = rotated if head_dim is None else head_dim
    if parts.ndim != 3 or parts.shape[-1] % ((group + 2) * dim) or angles[0].shape[0] != parts.shape[1]:
        raise ValueError(
            f"project_heads takes parts [S, R, K * {group + 2} * {dim}] and angles [R, {rotated // 2}], "
            f"not {list(parts.shape)} and {list(angles[0].shape)}"
        )
    if rotated > dim:
        raise ValueError(f"project_heads was given angles for {rotated} numbers of a head of {dim}")
    chosen = dispatch.select(implementation, lambda: dispatch.project_heads_missing(parts, dtype, dim, rotated))
    options = {"group": group, "eps": eps, "dtype": jnp.dtype(dtype), "dim": dim}

    def kernel(*args: Any) -> Any:
        return fused_rows_kernel.project_heads(*args[:-1], into=args[-1], **options)

    return dispatch.run(
        chosen, kernel, functools.partial(_project_heads_plain, **options), parts, bias, q_scale, k_scale, angles, into
    )


def _project_heads_plain(
    parts: Any, bias: Any, q_scale: Any, k_scale: Any, angles: Any, into: Any, *, group: int, eps: float, dtype: Any,
    dim: int,
) -> Any:  # fmt: skip
    rotated = 2 * angles[0].shape[-1]
    qkv = jnp.sum(parts.astype(jnp.float32), axis=0).astype(dtype)
    if bias is not None:
        qkv = qkv + bias[None]
    qkv = qkv.reshape(qkv.shape[0], -1, group + 2, dim)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if q_scale is not None:
        q, k = _norm(q, q_scale, eps), _norm(k, k_scale, eps)

    def rotate(x: jax.Array) -> jax.Array:
        cos, sin = (a.reshape(a.shape[0], *(1,) * (x.ndim - 2), a.shape[1]) for a in angles)
        a, b = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
        turned = [a * cos - b * sin, b * cos + a * sin]
        return jnp.concatenate([*(part.astype(dtype) for part in turned), x[..., rotated:]], axis=-1)

    q, k = rotate(q), rotate(k)
    if into is None:
        return q, k, v
    k, v = (x.reshape(-1, into.tokens, *x.shape[1:]) for x in (k, v))
    return q, *_write_kv_plain(k, v, into)


def write_kv(
    k: jax.Array, v: jax.Array, into: Destination, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """A block's K and V, `[B, T, K, D]` each, into one layer of the caches, in place under jit; returns the caches.

    Raises:
      ValueError, NotImplementedError: as `add_norm` does.
    """
    fits = k.ndim == 4 and into.k.ndim == 5 and k.shape == (into.k.shape[1], into.tokens, into.k.shape[2], k.shape[3])
    if not fits or k.shape != v.shape or into.k.shape != into.v.shape or k.shape[-1] != into.k.shape[-1]:
        given = [list(x.shape) for x in (k, v, into.k, into.v)]
        raise ValueError(f"write_kv takes k, v [B, T, K, D] and caches [L, B, K, N, D], not {given}")
    chosen = dispatch.select(implementation, lambda: dispatch.gather_rows_missing(into.k))
    return dispatch.run(chosen, _write_kv_kernel, _write_kv_plain, k, v, into)


def _write_kv_kernel(k: Any, v: Any, into: Any) -> Any:
    return fused_rows_kernel.write_kv(k.astype(into.k.dtype), v.astype(into.v.dtype), into)


def _write_kv_plain(k: Any, v: Any, into: Any) -> Any:
    return tuple(write_rows(cache, into.layer, x, into.start, into.keep) for cache, x in ((into.k, k), (into.v, v)))


def write_rows(
    cache: jax.Array, layer: Any, new: jax.Array, start: jax.Array, keep: jax.Array | None = None
) -> jax.Array:
    """`write_kv` of one array `new` `[B, T, K, D]`, in jax.numpy."""
    batch, length = new.shape[:2]
    if keep is None and (start.ndim == 0 or batch == 1):
        slot = start.reshape(())
        block = jnp.swapaxes(new, 1, 2)[None].astype(cache.dtype)
        zero = jnp.zeros_like(slot)
        return jax.lax.dynamic_update_slice(cache, block, (jnp.full_like(slot, layer), zero, zero, slot, zero))
    slots = start.reshape(-1, 1) + jnp.arange(length)[None, :]
    if keep is not None:
        slots = jnp.where(keep, slots, cache.shape[3])  # out of bounds: dropped
    rows = jnp.arange(batch)[:, None]
    return cache.at[layer, rows, :, slots].set(new.astype(cache.dtype), mode="drop", unique_indices=keep is None)
