"""`layer_parts` as chains of work for the kernel of `stream_chain_mosaic`."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.stream_chain_mosaic import AddNorm, ChainConfig, Matmul, make_config, run_chain, splits_of

__all__ = ["layer_head", "layer_tail", "make_config", "splits_of"]

# Counters of a layer: the tail's meetings, then the head's.
TAIL, HEAD = 0, 3


def layer_head(
    x: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    qkv: jax.Array,
    counters: jax.Array,
    layer: Any,
    *,
    eps: float,
    config: ChainConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`layer_parts.layer_head`."""
    (tokens, size), width = x.shape, qkv.shape[1]
    of = jax.ShapeDtypeStruct
    splits = splits_of(size, width, config)
    work = (
        AddNorm("x", "parts", "scale", "sum", "normed", parts.shape[0], eps),
        Matmul("normed", "qkv", "sums", size, width, splits),
    )
    outputs = {
        "sum": of(x.shape, x.dtype),
        "normed": of(x.shape, x.dtype),
        "sums": of((splits, tokens, width), x.dtype),
    }
    inputs = {"x": x, "parts": parts, "scale": scale, "qkv": qkv}
    made, counters = run_chain(
        work, inputs, outputs, counters, layer, first_counter=HEAD, config=config, name="layer_head"
    )
    return made["sum"], made["sums"], counters


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
    config: ChainConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`layer_parts.layer_tail`."""
    (tokens, inner), size, hidden = attended.shape, x.shape[1], down.shape[0]
    of = jax.ShapeDtypeStruct
    first, last = splits_of(inner, size, config), splits_of(hidden, size, config)
    work = (
        Matmul("attended", "out", "first", inner, size, first),
        AddNorm("x", "first", "scale", "sum", "normed", first, eps),
        Matmul("normed", "gate_up", "act", size, hidden, gated=True),
        Matmul("act", "down", "sums", hidden, size, last),
    )
    outputs = {
        "sum": of(x.shape, x.dtype),
        "normed": of(x.shape, x.dtype),
        "first": of((first, *x.shape), x.dtype),
        "act": of((tokens, hidden), x.dtype),
        "sums": of((last, *x.shape), x.dtype),
    }
    inputs = {"attended": attended, "x": x, "out": out, "scale": scale, "gate_up": gate_up, "down": down}
    made, counters = run_chain(
        work, inputs, outputs, counters, layer, first_counter=TAIL, config=config, name="layer_tail"
    )
    return made["sum"], made["sums"], counters
