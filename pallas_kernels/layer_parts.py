"""What lies before and behind a decoder layer's attention, as one kernel launch each, for the few tokens of a step.

Each has a plain form in jax.numpy, made of those of its parts, and a Mosaic GPU kernel; see `dispatch`. Roundings are
those of the parts one by one: `add_norm`, `stream_matmul` and `gated_matmul`.

The programs of a kernel meet by counters in memory, so all of them must run at the same time: nothing else that takes
long may run on the device beside it, or they stand and wait.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.fused_rows import add_norm
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

__all__ = ["COUNTERS", "layer_head", "layer_tail"]

# What a layer needs of them; of zeros, anew for every forward.
COUNTERS = 4


def layer_head(
    x: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    qkv: jax.Array,
    counters: jax.Array,
    layer: Any,
    *,
    eps: float,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The residual stream, and the projection of its norm to queries, keys and values.

    Args:
      x: `[T, E]`, the residual stream; parts: `[S, T, E]` of its dtype, partial sums of what is added to it.
      scale: `[E]`; qkv: `[E, W]`.
      counters: i32[L, COUNTERS]; the row of `layer` must be 0 before its first call. In place under jit.
      layer: i32 scalar.
      eps: added to the mean square.
      implementation: `"xla"`, `"mosaic_gpu"` or None for the fastest that runs here.
      config: `stream_chain_mosaic.ChainConfig`; None chooses one.

    Returns:
      `(x + sum of parts [T, E], partial sums of the projection [S', T, W], counters)`.

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    if parts.ndim != 3 or parts.shape[1:] != x.shape or scale.shape != x.shape[1:] or qkv.shape[:1] != x.shape[1:]:
        given = [list(a.shape) for a in (x, parts, scale, qkv)]
        raise ValueError(f"layer_head takes x [T, E], parts [S, T, E], scale [E] and qkv [E, W], not {given}")
    chosen = dispatch.select(implementation, lambda: dispatch.stream_matmul_missing(x, qkv))
    plain = functools.partial(_head, eps=eps)
    arguments = (x, parts, scale, qkv, counters, layer)
    if chosen == "xla":
        return plain(*arguments, splits=1)
    from pallas_kernels import layer_parts_mosaic as mosaic  # Mosaic GPU is imported only where a kernel is built

    config = config or mosaic.make_config(x.shape[0], dispatch.processors())
    splits = mosaic.splits_of(x.shape[1], qkv.shape[1], config)
    kernel = functools.partial(mosaic.layer_head, eps=eps, config=config)
    return dispatch.run(chosen, kernel, functools.partial(plain, splits=splits), *arguments)


def _head(
    x: Any, parts: Any, scale: Any, qkv: Any, counters: Any, layer: Any, *, eps: float, splits: int
) -> tuple[Any, Any, Any]:
    del layer
    x, y = add_norm(x, parts, scale, eps=eps, implementation="xla")
    return x, _padded(stream_matmul(y, qkv, implementation="xla"), splits), counters


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
      counters, layer, eps, implementation, config: as `layer_head` takes them.

    Returns:
      `(x + attended @ out, the MLP's partial sums [S, T, E], counters)`.

    Raises:
      ValueError, NotImplementedError: as `layer_head` does.
    """
    shapes = [list(a.shape) for a in (attended, x, out, scale, gate_up, down)]
    (t, h), (e, f) = attended.shape, (x.shape[1], down.shape[0])
    if shapes != [[t, h], [t, e], [h, e], [e], [e, 2, f], [f, e]]:
        raise ValueError(
            "layer_tail takes attended [T, H], x [T, E], out [H, E], scale [E], gate_up [E, 2, F] and down [F, E], not "
            f"{shapes}"
        )

    def missing() -> str | None:
        act = jax.ShapeDtypeStruct((t, f), x.dtype)
        pairs = ((attended, out), (x, gate_up), (act, down))
        return next((why for pair in pairs if (why := dispatch.stream_matmul_missing(*pair))), None)

    chosen = dispatch.select(implementation, missing)
    plain = functools.partial(_tail, eps=eps)
    arguments = (attended, x, out, scale, gate_up, down, counters, layer)
    if chosen == "xla":
        return plain(*arguments, splits=1)
    from pallas_kernels import layer_parts_mosaic as mosaic  # Mosaic GPU is imported only where a kernel is built

    config = config or mosaic.make_config(t, dispatch.processors())
    kernel = functools.partial(mosaic.layer_tail, eps=eps, config=config)
    return dispatch.run(chosen, kernel, functools.partial(plain, splits=mosaic.splits_of(f, e, config)), *arguments)


def _tail(
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
) -> tuple[Any, Any, Any]:
    del layer
    x, y = add_norm(x, stream_matmul(attended, out, implementation="xla"), scale, eps=eps, implementation="xla")
    parts = stream_matmul(gated_matmul(y, gate_up, implementation="xla"), down, implementation="xla")
    return x, _padded(parts, splits), counters


def _padded(parts: jax.Array, splits: int) -> jax.Array:
    """As many partial sums as the kernel leaves: both forms of one program have the same shapes."""
    return jnp.pad(parts, ((0, splits - 1), (0, 0), (0, 0)))
