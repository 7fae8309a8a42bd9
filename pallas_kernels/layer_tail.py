"""What follows attention in a decoder layer, as one launch: output projection, residual, norm and MLP."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.fused_rows import add_norm
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

__all__ = ["layer_tail"]


def layer_tail(
    attended: jax.Array,
    x: jax.Array,
    out: jax.Array,
    scale: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    counters: jax.Array,
    layer: Any,
    *,
    eps: float,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The residual stream behind attention, and the MLP of its norm.

    Args:
      attended: `[T, H]`, what attention gave.
      x: `[T, E]`, the residual stream before it.
      out: `[H, E]`; scale: `[E]`; gate_up: `[E, 2, F]`; down: `[F, E]`.
      counters: i32[L, 4]: by these the kernel's programs meet. The row of `layer` must be 0, and is not afterwards.
      layer: i32 scalar.
      eps: added to the mean square.
      implementation: `"xla"`, `"mosaic_gpu"` or None for the fastest that runs here.
      config: `stream_tail_mosaic.TailConfig`; None chooses one.

    Returns:
      `(x + attended @ out, the MLP's partial sums [S, T, E], counters)`, roundings as of the parts one by one.

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    shapes = [list(a.shape) for a in (attended, x, out, scale, gate_up, down)]
    (t, h), (e, f) = attended.shape, (x.shape[1], down.shape[0])
    if shapes != [[t, h], [t, e], [h, e], [e], [e, 2, f], [f, e]]:
        raise ValueError(
            "layer_tail takes attended [T, H], x [T, E], out [H, E], scale [E], gate_up [E, 2, F] and down [F, E], not "
            f"{shapes}"
        )
    chosen = dispatch.select(implementation, lambda: dispatch.layer_tail_missing(attended, out, gate_up))
    if chosen == "xla":
        return _plain(attended, x, out, scale, gate_up, down, counters, layer, eps=eps, splits=1)
    from pallas_kernels import stream_tail_mosaic  # Mosaic GPU is imported only where a kernel is built

    if config is None:
        config = stream_tail_mosaic.make_config(t, h, e, f, dispatch.processors())
    kernel = functools.partial(stream_tail_mosaic.layer_tail, eps=eps, config=config)
    plain = functools.partial(_plain, eps=eps, splits=config.splits[1])
    return dispatch.run(chosen, kernel, plain, attended, x, out, scale, gate_up, down, counters, layer)


def _plain(
    attended: Any,
    x: Any,
    out: Any,
    scale: Any,
    gate_up: Any,
    down: Any,
    counters: Any,
    layer: Any,
    *,
    eps: float,
    splits: int,
) -> Any:
    del layer
    x, y = add_norm(x, stream_matmul(attended, out, implementation="xla"), scale, eps=eps, implementation="xla")
    parts = stream_matmul(gated_matmul(y, gate_up, implementation="xla"), down, implementation="xla")
    return x, jnp.pad(parts, ((0, splits - 1), (0, 0), (0, 0))), counters
