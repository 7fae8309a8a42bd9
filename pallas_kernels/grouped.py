"""SwiGLU MLPs of many experts, each over the tokens that chose it: the work of a mixture of experts.

The pairs of token and expert are sorted by expert. The plain form hands them to `jax.lax.ragged_dot`, which XLA expands
on most GPUs into a dense product with every expert; the Mosaic GPU kernel reads the weights of the chosen experts only.
Nothing is dropped in either: there is no capacity per expert. A pair's result does not depend on the others.

Shape letters: T tokens, E width, X experts, k experts per token, F width of one expert, N = T * k pairs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

__all__ = ["grouped_mlp"]


def grouped_mlp(
    x: jax.Array,
    chosen: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    implementation: str | None = None,
    configs: tuple[Any, Any] = (None, None),
) -> jax.Array:
    """`(silu(x @ gate) * (x @ up)) @ down` of each token with each of the experts it chose.

    Args:
      x: `[T, E]`. chosen: i32[T, k]. gate_up: `[X, E, 2, F]`, down: `[X, F, E]`, both in x's dtype.
      implementation: None (the kernel where it can run), "xla" or "mosaic_gpu".
      configs: `grouped_mosaic.GroupedConfig` of the two matmuls.

    Returns:
      f32[T, k, E] (the kernel rounds each result to x's dtype first).

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    experts, size, _, width = gate_up.shape
    if x.ndim != 2 or x.shape[1] != size or down.shape != (experts, width, size) or chosen.shape[0] != x.shape[0]:
        raise ValueError(
            "grouped_mlp takes x [T, E], chosen [T, k], gate_up [X, E, 2, F] and down [X, F, E], not "
            f"{list(x.shape)}, {list(chosen.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )
    taken = dispatch.select(implementation, lambda: dispatch.grouped_mlp_missing(x, gate_up))
    kernel = functools.partial(_kernel, configs=configs)
    return dispatch.run(taken, kernel, _plain, x, chosen, gate_up, down)


# Up to so many pairs their ranks are counted by comparing all with all: one small fusion, where a sort takes longer.
_COMPARED = 4096


def _sizes(flat: jax.Array, experts: int) -> jax.Array:
    """How many pairs each expert has, i32[X]."""
    return jnp.sum(flat[:, None] == jnp.arange(experts)[None, :], axis=0, dtype=jnp.int32)


def _ranks(flat: jax.Array, sizes: jax.Array) -> jax.Array:
    """How many earlier pairs chose the same expert, i32[N]."""
    number = jnp.arange(flat.shape[0], dtype=jnp.int32)
    if flat.shape[0] <= _COMPARED:
        earlier = (flat[:, None] == flat[None, :]) & (number[None, :] < number[:, None])
        return jnp.sum(earlier, axis=1, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros_like(number).at[order].set(number, unique_indices=True)
    return place - (jnp.cumsum(sizes) - sizes)[flat]


def _plain(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    precision = "highest" if x.dtype == jnp.float32 else None
    flat = chosen.reshape(-1)
    sizes = _sizes(flat, gate_up.shape[0])
    order = jnp.argsort(flat, stable=True)
    both = jax.lax.ragged_dot(
        x[order // chosen.shape[1]], gate_up.reshape(*gate_up.shape[:2], -1), sizes, precision=precision
    )
    gate, up = jnp.split(both, 2, axis=-1)
    out = jax.lax.ragged_dot(
        jax.nn.silu(gate) * up, down, sizes, precision=precision, preferred_element_type=jnp.float32
    )
    # Back to the tokens by a gather: a scatter's order of addition would be anyone's guess.
    place = (jnp.cumsum(sizes) - sizes)[flat] + _ranks(flat, sizes)
    return out[place].reshape(*chosen.shape, -1)


def _kernel(
    x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, *, configs: tuple[Any, Any]
) -> jax.Array:
    from pallas_kernels import grouped_mosaic as mosaic  # Mosaic GPU is imported only where a kernel is built

    (pairs, k), experts = (chosen.size, chosen.shape[1]), gate_up.shape[0]
    flat = chosen.reshape(-1)
    sizes = _sizes(flat, experts)
    # Every expert's rows begin where a tile of 8 does, and up to 64 rows at a time are an item of work.
    padded = -(-sizes // mosaic.ALIGN) * mosaic.ALIGN
    begin = jnp.cumsum(padded) - padded
    row = begin[flat] + _ranks(flat, sizes)
    rows = pairs + (mosaic.ALIGN - 1) * min(pairs, experts) + mosaic.ROWS
    token = jnp.zeros((rows,), jnp.int32).at[row].set(jnp.arange(pairs, dtype=jnp.int32) // k, unique_indices=True)

    tiles = -(-sizes // mosaic.ROWS)
    ends = jnp.cumsum(tiles)
    item = jnp.arange(min(pairs, experts) + pairs // mosaic.ROWS, dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    done = (item - (ends - tiles)[expert]) * mosaic.ROWS
    count = jnp.where(item < ends[-1], jnp.minimum(sizes[expert] - done, mosaic.ROWS), 0)
    start = jnp.where(count > 0, begin[expert] + done, 0)

    hidden = mosaic.matmul(x[token], gate_up, expert, start, count, gated=True, config=configs[0])
    out = mosaic.matmul(hidden, down, expert, start, count, gated=False, config=configs[1])
    return out[row].reshape(*chosen.shape, -1).astype(jnp.float32)
