"""Exact attention of queries over a long, head-major KV cache, with the importance of every entry on request.

One contract serves denoising (a block of M queries, all seeing the prefix and the block's own entries behind it) and
block-causal prefill (many blocks of queries, each seeing up to its own end). See docs/kernels.md for the design.

Shape letters: B batch, T queries, Q runs of queries, H query heads, K KV heads, G = H // K, D head dim, N KV entries,
L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import attention_xla, dispatch

if TYPE_CHECKING:
    from pallas_kernels.attention_mosaic import AttentionConfig


@dataclasses.dataclass(frozen=True)
class Importance:
    """Which importance `block_attention` returns. Static: each value compiles its own program.

    reduce: "mean" or "max", over the chosen queries and the G query heads of the KV head.
    over: what a query's weights are normalised over. "visible": everything it sees. "prefix": only the entries before
        `prefix_lengths[b]`, so that the block's own entries neither get importance nor take any.
    page: above 1, importance comes added up over pages of so many entries. The mean over many queries by pages of 8, or
        a multiple of 8, costs far less than entry by entry: no second reading of K.
    """

    reduce: Literal["mean", "max"] = "mean"
    over: Literal["visible", "prefix"] = "visible"
    page: int = 1

    def __post_init__(self):
        if self.reduce not in ("mean", "max"):
            raise ValueError(f'Importance.reduce must be "mean" or "max", not {self.reduce!r}')
        if self.over not in ("visible", "prefix"):
            raise ValueError(f'Importance.over must be "visible" or "prefix", not {self.over!r}')
        if not isinstance(self.page, int) or self.page < 1:
            raise ValueError(f"Importance.page must be an integer of at least 1, not {self.page!r}")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["out", "lse", "importance"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class AttentionOutput:
    """out `[B, T, H, D]` in q's dtype; lse `f32[B, T, H]`, natural log; importance, or None.

    importance: `f32[B, K, N]`, or `f32[B, K, ceil(N / page)]` by page; with `importance_into` the whole stack.
    """

    out: jax.Array
    lse: jax.Array
    importance: jax.Array | None = None


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    layer: int | jax.Array | None = None,
    scale: float | None = None,
    importance: Importance | None = None,
    importance_rows: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    importance_into: tuple[jax.Array, jax.typing.ArrayLike] | None = None,
    implementation: dispatch.Implementation | None = None,
    config: AttentionConfig | None = None,
) -> AttentionOutput:
    """Softmax attention of every query over the first entries of its row of the cache.

    Args:
      q: `[B, T, H, D]`, bfloat16, float16 or (xla only) float32. Query head h reads KV head h // G.
      k, v: `[B, K, N, D]`, or a stacked cache `[L, B, K, N, D]` of which `layer` is read in place. Dtype as q.
        Entries that no query of a row sees may hold anything, NaN included; entries seen by some must be finite.
      lengths: `i32[B]` or `i32[B, Q]` with T % Q == 0: each run of T // Q consecutive queries sees exactly entries
        [0, lengths[b, i]), clamped to N. Q = 1: a block over its prefix and itself (write the block's K and V behind
        the prefix first); Q = blocks: block-causal prefill; Q = T: any per-query length. Rows of equal or rising
        lengths are the fast case: the kernel reads a run of queries up to the largest length in it.
      layer: Python int or traced i32 scalar; with 5-D k, v only.
      scale: multiplies the scores; default 1 / sqrt(D).
      importance: also return the softmax weight of every entry; needs Q == 1. See `Importance`.
      importance_rows: which queries count. None: all; `i32[B]`: one query of each row, the cheap case (the kernel keeps
        that query's scores as it goes; any other choice reads K a second time); `bool[B, T]`: any subset. A row with
        none gets importance 0.
      prefix_lengths: `i32[B]`, for `Importance(over="prefix")`. By page also for "visible": entries from there on are
        left out of the sums, so that a page which the prefix ends in counts with its part before.
      importance_into: a stack of importances, `f32[S, ...]` of this one's shape, and the number (i32 scalar, may be
        traced) that this one gets in it. In place under jit; by pages of 8 the kernel itself writes there.
      implementation: "xla", "mosaic_gpu", or None for the kernel where it can run and XLA elsewhere. A name never falls
        back. See `dispatch`.
      config: tile sizes of the kernel; None picks them from the shapes.

    Shapes, dtypes, `scale`, `importance`, the rank of `importance_rows`, `implementation` and `config` recompile;
    lengths, layer, which rows and prefix lengths do not.

    Returns:
      `AttentionOutput`. A query that sees nothing has out 0 and lse -inf. Importance is 0 past the row's length.

    Raises:
      ValueError: arguments that do not fit together.
      NotImplementedError: `implementation="mosaic_gpu"` where the kernel cannot run, or importance with Q > 1.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    if lengths.ndim == 1:
        lengths = lengths[:, None]
    _check(q, k, v, lengths, layer)
    b, t, _, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, not {scale}")
    layer = None if layer is None else jnp.asarray(layer, jnp.int32)
    rows, prefix_lengths = _check_importance(importance, importance_rows, prefix_lengths, b, t, lengths.shape[1])
    into = _check_into(importance_into, importance, b, k.shape[-3], k.shape[-2])
    chosen = dispatch.select(implementation, lambda: dispatch.block_attention_missing(q, k))
    how = {"chosen": chosen, "scale": scale, "importance": importance, "config": config}
    return AttentionOutput(*_run(q, k, v, lengths, layer, rows, prefix_lengths, into, **how))


def page_sums(weight: jax.Array, page: int, limits: jax.Array | None = None) -> jax.Array:
    """Sums `f32[..., B, K, ceil(N / page)]` of `weight f32[..., B, K, N]` over pages; entries from `limits i32[B]` on
    count nothing."""
    slots = weight.shape[-1]
    pages = -(-slots // page)
    if limits is not None:
        inside = jnp.arange(slots)[None, :] < limits[:, None]
        weight = jnp.where(inside.reshape((1,) * (weight.ndim - 3) + (-1, 1, slots)), weight, 0.0)
    weight = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, pages * page - slots)])
    return jnp.sum(weight.reshape(*weight.shape[:-1], pages, page), axis=-1)


# A jit of its own, so that a model that calls this once per layer traces and lowers it once.
@functools.partial(jax.jit, static_argnames=("chosen", "scale", "importance", "config"))
def _run(q, k, v, lengths, layer, rows, prefix_lengths, into, *, chosen, scale, importance, config):
    def xla(q, k, v, lengths, layer, rows, prefix_lengths, into):
        if rows is not None and rows.dtype != jnp.bool_:
            rows = jnp.arange(q.shape[1])[None] == rows[:, None]
        *found, weight = attention_xla.attention_xla(
            q, k, v, lengths, layer, rows, prefix_lengths, scale=scale, importance=importance
        )
        return *found, put(paged(weight, prefix_lengths), into)

    def paged(weight, prefix_lengths):
        if importance is None or importance.page == 1:
            return weight
        return page_sums(weight, importance.page, prefix_lengths)

    def put(weight, into):
        return weight if into is None else into[0].at[into[1]].set(weight)

    def mosaic_gpu(q, k, v, lengths, layer, rows, prefix_lengths, into):
        from pallas_kernels import attention_mosaic  # Mosaic GPU's interface differs before dispatch.MIN_JAX

        *found, weight = attention_mosaic.attention_mosaic(
            q, k, v, lengths, layer, rows, prefix_lengths, into, scale=scale, importance=importance, config=config
        )
        if into is not None and attention_mosaic.in_place(importance, rows):
            return *found, weight
        weight = weight if attention_mosaic.by_page(importance, rows) else paged(weight, prefix_lengths)
        return *found, put(weight, into)

    return dispatch.run(chosen, mosaic_gpu, xla, q, k, v, lengths, layer, rows, prefix_lengths, into)


def _check(q, k, v, lengths, layer):
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, H, D], got shape {q.shape}")
    if k.ndim not in (4, 5) or k.shape != v.shape:
        raise ValueError(f"k and v must both be [B, K, N, D] or [L, B, K, N, D], got {k.shape} and {v.shape}")
    if (k.ndim == 5) != (layer is not None):
        raise ValueError(f"layer goes with a stacked [L, B, K, N, D] cache, got k of rank {k.ndim} and layer={layer}")
    b, t, h, d = q.shape
    if k.shape[-4] != b or k.shape[-1] != d or h % k.shape[-3]:
        raise ValueError(f"q {q.shape} does not fit k {k.shape}: B and D must agree and K must divide H")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if lengths.ndim != 2 or lengths.shape[0] != b or lengths.shape[1] < 1 or t % lengths.shape[1]:
        raise ValueError(f"lengths must be [B] or [B, Q] with Q dividing T = {t}, got {lengths.shape} for B = {b}")
    if isinstance(layer, int) and not 0 <= layer < k.shape[0]:
        raise ValueError(f"layer {layer} is outside a cache of {k.shape[0]} layers")


def _check_importance(importance, rows, prefix_lengths, b, t, runs):
    """Checked `(rows, prefix_lengths)`; rows is None without importance, else `i32[B]` or `bool[B, T]`."""
    if importance is None:
        if rows is not None or prefix_lengths is not None:
            raise ValueError("importance_rows and prefix_lengths go with importance=Importance(...)")
        return None, None
    if runs != 1:
        raise NotImplementedError(f"importance is for queries that all see the same entries (Q == 1), got Q = {runs}")
    if prefix_lengths is None if importance.over == "prefix" else prefix_lengths is not None and importance.page == 1:
        raise ValueError(f'prefix_lengths goes with Importance(over="prefix") or by page, got over={importance.over!r}')
    if prefix_lengths is not None:
        prefix_lengths = jnp.asarray(prefix_lengths, jnp.int32)
        if prefix_lengths.shape != (b,):
            raise ValueError(f"prefix_lengths must be i32[{b}], got shape {prefix_lengths.shape}")
    if rows is None:
        return jnp.ones((b, t), jnp.bool_), prefix_lengths
    rows = jnp.asarray(rows)
    if rows.dtype == jnp.bool_ and rows.shape == (b, t):
        return rows, prefix_lengths
    if jnp.issubdtype(rows.dtype, jnp.integer) and rows.shape == (b,):
        return rows.astype(jnp.int32), prefix_lengths
    raise ValueError(f"importance_rows must be bool[{b}, {t}] or i32[{b}], got {rows.dtype}{list(rows.shape)}")


def _check_into(into, importance, b, kv_heads, entries):
    """Checked `(stack, number)`, the number a traced i32 scalar; or None."""
    if into is None:
        return None
    if importance is None:
        raise ValueError("importance_into goes with importance=Importance(...)")
    stack, number = into
    expected = (b, kv_heads, -(-entries // importance.page))
    if stack.ndim != 4 or stack.shape[1:] != expected or stack.dtype != jnp.float32:
        raise ValueError(
            f"importance_into must be a stack of f32{list(expected)}, got {stack.dtype}{list(stack.shape)}"
        )
    return stack, jnp.asarray(number, jnp.int32)
