"""SwiGLU MLPs of many experts, each over the tokens that chose it: the work of a mixture of experts.

The pairs of token and expert are laid out by expert, and none is dropped: there is no capacity per expert. A pair's
result does not depend on the others. The Mosaic GPU kernels and the plain form, a loop over tiles of rows, read the
weights of the chosen experts only. `jax.lax.ragged_dot`, which XLA expands into a dense product with every expert, is
there to be compared with.

Shape letters: T tokens, E width, X experts, k experts per token, F width of one expert, N = T * k pairs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, grouped_rows

__all__ = ["grouped_mlp", "grouped_sum"]


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
      implementation: None (the kernel where it can run), "xla", "mosaic_gpu" or "ragged_dot".
      configs: `grouped_mosaic.GroupedConfig` of the two matmuls.

    Returns:
      f32[T, k, E] (the kernel rounds each result to x's dtype first).

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    _check(x, chosen, gate_up, down)
    if implementation == "ragged_dot":
        return _ragged(x, chosen, gate_up, down)
    taken = dispatch.select(implementation, lambda: dispatch.grouped_mlp_missing(x, gate_up))
    kernel = functools.partial(_kernel, configs=configs)
    return dispatch.run(taken, kernel, _loop, x, chosen, gate_up, down)


def _check(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> None:
    experts, size, _, width = gate_up.shape
    if x.ndim != 2 or x.shape[1] != size or down.shape != (experts, width, size) or chosen.shape[0] != x.shape[0]:
        raise ValueError(
            "grouped_mlp takes x [T, E], chosen [T, k], gate_up [X, E, 2, F] and down [X, F, E], not "
            f"{list(x.shape)}, {list(chosen.shape)}, {list(gate_up.shape)} and {list(down.shape)}"
        )


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


def _ragged(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
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


ALIGN, ROWS = 8, 64  # where an expert's rows may start; rows of one item of work


class Layout(NamedTuple):
    """Pairs laid out by expert, and the work they make.

    Attributes:
      token: i32[R], which token each row holds (row 0's where it is padding). row: i32[N], where each pair is.
      expert, start, filled: i32[I], an item's expert, first row and number of rows, 0 for items that are none.
      items: i32, how many items there are; they come first, in the order of their rows.
    """

    token: jax.Array
    row: jax.Array
    expert: jax.Array
    start: jax.Array
    filled: jax.Array
    items: jax.Array


def lay_out(chosen: jax.Array, experts: int, *, implementation: str | None = "xla") -> Layout:
    """Every expert's rows begin at a multiple of ALIGN, and up to ROWS of them are an item of work.

    `implementation`: "xla", or None for a kernel where it can run.
    """
    chosen_form = dispatch.select(implementation, lambda: dispatch.lay_out_missing(chosen, experts))
    kernel = functools.partial(_lay_out_kernel, experts=experts)
    return dispatch.run(chosen_form, kernel, functools.partial(_lay_out, experts=experts), chosen)


def _at_most(chosen: jax.Array, experts: int) -> tuple[int, int]:
    """Rows and items that there can be."""
    pairs = chosen.size
    return pairs + (ALIGN - 1) * min(pairs, experts) + ROWS, min(pairs, experts) + pairs // ROWS


def _lay_out_kernel(chosen: jax.Array, *, experts: int) -> Layout:
    from pallas_kernels import grouped_layout

    rows, items = _at_most(chosen, experts)
    return Layout(*grouped_layout.lay_out(chosen, experts, rows=rows, items=items, align=ALIGN, tile=ROWS))


def _lay_out(chosen: jax.Array, *, experts: int) -> Layout:
    (pairs, k), flat = (chosen.size, chosen.shape[1]), chosen.reshape(-1)
    rows, items = _at_most(chosen, experts)
    sizes = _sizes(flat, experts)
    padded = -(-sizes // ALIGN) * ALIGN
    begin = jnp.cumsum(padded) - padded
    row = begin[flat] + _ranks(flat, sizes)
    token = jnp.zeros((rows,), jnp.int32).at[row].set(jnp.arange(pairs, dtype=jnp.int32) // k, unique_indices=True)
    tiles = -(-sizes // ROWS)
    ends = jnp.cumsum(tiles)
    item = jnp.arange(items, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32), experts - 1)
    done = (item - (ends - tiles)[expert]) * ROWS
    filled = jnp.where(item < ends[-1], jnp.minimum(sizes[expert] - done, ROWS), 0)
    start = jnp.where(filled > 0, begin[expert] + done, 0)
    return Layout(token, row, expert, start, filled, ends[-1])


def _loop(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    precision = "highest" if x.dtype == jnp.float32 else None
    laid = lay_out(chosen, gate_up.shape[0])
    rows = x[laid.token]

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        at = laid.start[index]
        tile = jax.lax.dynamic_slice_in_dim(rows, at, ROWS)
        wide, narrow = (jax.lax.dynamic_index_in_dim(w, laid.expert[index], keepdims=False) for w in (gate_up, down))
        both = jnp.einsum("re,ecf->rcf", tile, wide, precision=precision)
        hidden = jax.nn.silu(both[:, 0]) * both[:, 1]
        done = jnp.matmul(hidden, narrow, precision=precision, preferred_element_type=jnp.float32)
        # What lies behind an item's rows belongs to the next, which comes later and writes over it.
        return jax.lax.dynamic_update_slice_in_dim(out, done, at, 0)

    out = jax.lax.fori_loop(0, laid.items, body, jnp.zeros((rows.shape[0], x.shape[1]), jnp.float32))
    return out[laid.row].reshape(*chosen.shape, -1)


def _kernel(
    x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, *, configs: tuple[Any, Any]
) -> jax.Array:
    out, laid = _by_rows(x, chosen, gate_up, down, configs)
    return out[laid.row].reshape(*chosen.shape, -1).astype(jnp.float32)


def _by_rows(
    x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, configs: tuple[Any, Any]
) -> tuple[jax.Array, Layout]:
    """Every pair's result `[R, E]`, laid out by expert."""
    from pallas_kernels import grouped_mosaic as mosaic  # Mosaic GPU is imported only where a kernel is built

    assert (ALIGN, ROWS) == (mosaic.ALIGN, mosaic.ROWS)
    laid = lay_out(chosen, gate_up.shape[0], implementation=None)
    work = laid.expert, laid.start, laid.filled
    form = dispatch.select(None, lambda: None)
    spread = dispatch.run(form, grouped_rows.spread, lambda x, token: x[token], x, laid.token)
    hidden = mosaic.matmul(spread, gate_up, *work, gated=True, config=configs[0])
    return mosaic.matmul(hidden, down, *work, gated=False, config=configs[1]), laid


def grouped_sum(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    extra: jax.Array | None = None,
    *,
    dtype: Any,
    implementation: str | None = None,
) -> jax.Array:
    """The sum of a token's experts' results, each times its weight, and of what else is added: `[T, E]` of `dtype`.

    Args:
      weights: f32[T, k]. x, chosen, gate_up, down, implementation: as `grouped_mlp` takes them.
      extra: `[S, T, E]` of x's dtype, to be added along the first axis, or None.
      dtype: float32 or x's.

    Raises as `grouped_mlp` does.
    """

    def plain(x: Any, weights: Any, chosen: Any, gate_up: Any, down: Any, extra: Any) -> jax.Array:
        parts = grouped_mlp(x, chosen, gate_up, down, implementation=implementation)
        total = jnp.sum(parts * weights[..., None], axis=1)
        if extra is not None:
            total = total + jnp.sum(extra.astype(jnp.float32), axis=0)
        return total.astype(dtype)

    def kernel(x: Any, weights: Any, chosen: Any, gate_up: Any, down: Any, extra: Any) -> jax.Array:
        out, laid = _by_rows(x, chosen, gate_up, down, (None, None))
        return grouped_rows.combine(out, laid.row, weights, extra, dtype=dtype)

    _check(x, chosen, gate_up, down)
    taken = dispatch.select(
        "xla" if implementation == "ragged_dot" else implementation, lambda: dispatch.grouped_mlp_missing(x, gate_up)
    )
    return dispatch.run(taken, kernel, plain, x, weights, chosen, gate_up, down, extra)
