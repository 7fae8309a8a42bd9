"""Matmuls of a few tokens with large weights: what a denoising step spends its time on.

The time is that of reading the weights once. The Mosaic GPU kernel (docs/kernels-matmul.md) streams them in the layout
they are stored in; where one column's contracted axis must be shared among programs it leaves partial sums, which the
next kernel adds up anyway (`add_norm`, `project_heads`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

__all__ = ["gated_matmul", "stream_matmul"]


def stream_matmul(x: jax.Array, w: jax.Array, *, implementation: str | None = None, config: Any = None) -> jax.Array:
    """`x [T, E] @ w [E, F]` as partial sums: `[S, T, F]` of x's dtype, to be added (in float32) along the first axis.

    Rounding S summands costs about what rounding their sum does: each is smaller by the square root of S.

    How many there are depends on the shapes, the implementation and `config` (`stream_matmul_mosaic.MatmulConfig`,
    above 64 tokens `stream_matmul_wide.WideConfig`), and never on values: the same program gives the same bits.

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: `implementation="mosaic_gpu"` where that kernel cannot run; the message says why.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"stream_matmul takes x [T, E] and w [E, F], not {list(x.shape)} and {list(w.shape)}")
    return _run(x, w, _plain, implementation, config)


def gated_matmul(x: jax.Array, w: jax.Array, *, implementation: str | None = None, config: Any = None) -> jax.Array:
    """`silu(x @ w[:, 0]) * (x @ w[:, 1])`: x `[T, E]`, w `[E, 2, F]`, the result `[T, F]` of x's dtype.

    The kernel rounds once, at the end. Raises as `stream_matmul` does.
    """
    if x.ndim != 2 or w.ndim != 3 or w.shape[1] != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"gated_matmul takes x [T, E] and w [E, 2, F], not {list(x.shape)} and {list(w.shape)}")
    return _run(x, w, _gated_plain, implementation, config)


def _run(x: jax.Array, w: jax.Array, plain: Any, implementation: str | None, config: Any) -> jax.Array:
    chosen = dispatch.select(implementation, lambda: dispatch.stream_matmul_missing(x, w))
    if chosen == "xla":
        return plain(x, w, splits=1)
    # Mosaic GPU is imported only where a kernel is built.
    from pallas_kernels import stream_matmul_mosaic, stream_matmul_wide

    few = x.shape[0] <= stream_matmul_mosaic.MOST_TOKENS
    module: Any = stream_matmul_mosaic if few else stream_matmul_wide
    gated = w.ndim == 3
    if config is None:
        config = module.make_config(x.shape[0], w.shape[0], w.shape[-1], gated)
    kernel = functools.partial(module.matmul, gated=gated, config=config)
    # Both forms of one program leave equally many partial sums.
    return dispatch.run(chosen, kernel, functools.partial(plain, splits=config.splits), x, w)


def _precision(dtype: Any) -> str | None:
    return "highest" if dtype == jnp.float32 else None


def _plain(x: jax.Array, w: jax.Array, *, splits: int) -> jax.Array:
    y = jnp.einsum("te,ef->tf", x, w, precision=_precision(w.dtype))
    return jnp.pad(y[None], ((0, splits - 1), (0, 0), (0, 0)))


def _gated_plain(x: jax.Array, w: jax.Array, *, splits: int) -> jax.Array:
    del splits
    y = jnp.einsum("te,ecf->tcf", x, w, precision=_precision(w.dtype))
    return jax.nn.silu(y[:, 0]) * y[:, 1]
