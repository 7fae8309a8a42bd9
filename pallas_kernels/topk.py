"""Top-k selection: from importances to ascending index lists, one list per (layer, row, KV head).

``select_topk`` turns attention weights into the rows that :func:`pallas_kernels.gather_rows.gather_rows` fetches. It
differs from ``lax.top_k`` in what a selection needs: indices only, ascending (so that the gather walks memory
forwards), a count that differs per problem, a length that differs per problem, and -1 padding.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, reference_rows, topk_kernel
from pallas_kernels.topk_kernel import TopkConfig

__all__ = ["TopkConfig", "select_topk"]


def _broadcast(name: str, value: jax.typing.ArrayLike, leading: tuple[int, ...]) -> jax.Array:
    """``value`` as i32 of the leading shape, or ValueError."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(f"{name} must be integers, got {jnp.result_type(value)}")
    if np.ndim(value) not in (0, len(leading)):
        raise ValueError(f"{name} must be a scalar or of shape {leading}, got {np.shape(value)}")
    try:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), leading)
    except ValueError as e:
        raise ValueError(f"{name} of shape {np.shape(value)} does not fit the leading axes {leading}") from e


def select_topk(
    importance: jax.Array,
    counts: jax.typing.ArrayLike,
    capacity: int,
    *,
    lengths: jax.typing.ArrayLike | None = None,
    implementation: str | None = None,
    config: TopkConfig | None = None,
) -> jax.Array:
    """Indices of the largest importances of each problem, ascending, padded with -1.

    Args:
        importance: ``f32[..., N]``. NaN and -inf are never chosen; -0.0 and subnormals equal 0.0.
        counts: how many to choose, an int or ``i32[...]`` of the leading shape. Clipped to ``[0, capacity]``; fewer
            come back where fewer are eligible.
        capacity: P, the static length of the result; may exceed N.
        lengths: only the first ``lengths[...]`` entries of a problem are eligible; an int or ``i32[...]``; default all.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None for the fastest that runs here.
        config: how the kernel cuts the work.

    Returns:
        ``i32[..., capacity]``. Of equal importances the lowest indices are chosen; the result is the same on every run.

    Recompiles for a new shape or ``capacity``; ``counts`` and ``lengths`` are traced.

    Raises:
        ValueError: wrong dtype, shape or capacity.
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run; the message says why.
    """
    if importance.ndim < 1 or importance.dtype != jnp.float32:
        raise ValueError(f"importance must be f32[..., N], got {importance.dtype}{list(importance.shape)}")
    if not isinstance(capacity, (int, np.integer)) or capacity < 0:
        raise ValueError(f"capacity must be an integer of at least 0, got {capacity!r}")
    leading = importance.shape[:-1]
    n = importance.shape[-1]
    counts = _broadcast("counts", counts, leading)
    lengths = jnp.full(leading, n, jnp.int32) if lengths is None else _broadcast("lengths", lengths, leading)
    chosen = dispatch.select(implementation, lambda: None)
    return _select(importance, counts, lengths, capacity=int(capacity), chosen=chosen, config=config)


@partial(jax.jit, static_argnames=("capacity", "chosen", "config"))
def _select(
    importance: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
    chosen: str,
    config: TopkConfig | None,
) -> jax.Array:
    kernel = partial(topk_kernel.select_topk, capacity=capacity, config=config)
    return dispatch.run(
        chosen, kernel, partial(reference_rows.select_topk, capacity=capacity), importance, counts, lengths
    )
