"""A decoder layer over the few tokens of a denoising step: `model._Layer` in as few launches as possible.

With so few tokens a step takes the time of reading the weights, plus that of every launch between the matmuls. So the
matmuls leave partial sums, and what follows them (residual and norm; heads and cache) is one kernel each, which adds
them up. The residual stream is therefore a pair between layers, see `Stream`.

Used on one device, for 16-bit models, where the kernels of `pallas_kernels` can run; all else takes `model`'s form.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.config import ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.fused_rows import add_norm, project_heads
from pallas_kernels.layer_parts import COUNTERS, layer_head, layer_tail
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

# Whether what lies before and behind attention is one launch each. Off until it has been measured on the card.
CHAINED = os.environ.get("HERALD_CHAINED") == "1"


class Stream(NamedTuple):
    """The residual stream `[R, E]` and what the last sublayer adds to it, as partial sums `[S, R, E]`. R = B * T.

    counters: i32[L, COUNTERS], zeros in the rows of layers to come: see `pallas_kernels.layer_parts`.
    """

    x: jax.Array
    parts: jax.Array
    counters: jax.Array


def streams(config: ModelConfig, attend: Any, tokens: jax.Array) -> bool:
    """Whether layers over `tokens` i32[B, T] take this form under `attend`."""
    if not hasattr(attend, "at") or getattr(attend, "mesh", None) is not None or config.out_bias:
        return False
    if getattr(attend, "implementation", None) == "xla" or dispatch.mosaic_gpu_missing():
        return False
    return _missing(config, math.prod(tokens.shape)) is None


def _missing(config: ModelConfig, rows: int) -> str | None:
    """Why the kernels cannot run a layer of `config` over this many tokens, or None if they can."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(config.dtype))
    c = config
    width = c.num_kv_heads * (c.group_size + 2) * c.head_dim
    rotated = c.head_dim if c.rope.rotary_dim is None else c.rope.rotary_dim
    weights = [of((c.hidden_size, width)), of((c.num_heads * c.head_dim, c.hidden_size))]
    if not (c.moe is not None and all(c.is_moe_layer(i) for i in range(c.num_layers))):
        weights += [of((c.hidden_size, 2, c.intermediate_size)), of((c.intermediate_size, c.hidden_size))]
    if rotated != c.head_dim:
        return "project_heads rotates whole heads"
    reasons = [dispatch.stream_matmul_missing(of((rows, w.shape[0])), w) for w in weights]
    reasons += [
        dispatch.project_heads_missing(None, c.dtype, c.head_dim),
        dispatch.add_norm_missing(of((rows, c.hidden_size)), None),
    ]
    return next((reason for reason in reasons if reason), None)


def _chained(attend: Any, rows: int) -> bool:
    """Whether a layer takes the kernels of `layer_parts`, for up to 128 tokens, which must have the device alone."""
    return CHAINED and rows <= 128 and not getattr(attend, "shares_device", False)


def begin(layers: Any, x: jax.Array, attend: Any) -> Stream:
    """The stream before the first of `layers`: x `[B, T, E]`, and sums of zeros, shaped like those a layer leaves."""
    x = x.reshape(-1, x.shape[-1])
    layer = layers[0]
    counters = jnp.zeros((len(layers), COUNTERS), jnp.int32)
    kernel = layer.attn.out.kernel[...]
    attended = jax.ShapeDtypeStruct((x.shape[0], kernel.size // x.shape[1]), x.dtype)
    tail = functools.partial(_behind_attention, layer, 0, lead=(1, x.shape[0]), chained=_chained(attend, x.shape[0]))
    parts = jax.eval_shape(tail, attended, x, counters).parts
    return Stream(x, jnp.zeros(parts.shape, parts.dtype), counters)


def end(norm: Any, stream: Stream) -> jax.Array:
    """The normalised hidden states `[R, E]` after the last layer."""
    return add_norm(stream.x, stream.parts, norm.scale[...], eps=norm.eps)[1]


def streamed_layer(
    layer: Any, number: Any, stream: Stream, angles: tuple[jax.Array, jax.Array], attend: Any, cache: Any
) -> tuple[Stream, Any]:
    """`layer` is a `model._Layer`; the rest is as its call takes it."""
    batch, tokens = angles[0].shape[:2]
    attn = layer.attn
    out, qkv = attn.out.kernel[...], attn.qkv.kernel[...]
    group, size = out.shape[1], out.shape[3]
    rows = batch * tokens
    qkv = qkv.reshape(size, -1)
    bias = attn.qkv.bias[...].reshape(-1) if hasattr(attn.qkv, "bias") else None
    q_scale, k_scale = (attn.q_norm.scale[...], attn.k_norm.scale[...]) if hasattr(attn, "q_norm") else (None, None)

    norm = layer.attn_norm
    counters = stream.counters
    chained = _chained(attend, rows)
    if chained:
        x, projected, counters = layer_head(*stream[:2], norm.scale[...], qkv, counters, number, eps=norm.eps)
    else:
        x, y = add_norm(stream.x, stream.parts, norm.scale[...], eps=norm.eps)
        projected = stream_matmul(y, qkv)
    by_row = (angles[0].reshape(rows, -1), angles[1].reshape(rows, -1))
    into = attend.destination(number, tokens, cache) if hasattr(attend, "destination") else None
    q, k, v = project_heads(
        projected, bias, q_scale, k_scale, by_row, group=group, eps=norm.eps, dtype=x.dtype, into=into
    )
    q = q.reshape(batch, tokens, *q.shape[1:])
    if into is None:
        k, v = (x.reshape(batch, tokens, *x.shape[1:]) for x in (k, v))
        attended, cache = attend(number, q, k, v, cache)
    else:
        attended, cache = attend(number, q, None, None, attend.written(cache, k, v))
    attended = attended.reshape(rows, -1)
    return _behind_attention(layer, number, attended, x, counters, lead=(batch, tokens), chained=chained), cache


def _behind_attention(
    layer: Any,
    number: Any,
    attended: jax.Array,
    x: jax.Array,
    counters: jax.Array,
    *,
    lead: tuple[int, int],
    chained: bool,
) -> Stream:
    """Output projection, residual, norm and MLP: attended `[R, H * D]`, x `[R, E]`, lead `(B, T)`."""
    norm, mlp = layer.mlp_norm, layer.mlp
    out = layer.attn.out.kernel[...]
    out = out.reshape(-1, out.shape[-1])
    if not hasattr(mlp, "gate_up"):  # experts keep their own form
        x, y = add_norm(x, stream_matmul(attended, out), norm.scale[...], eps=norm.eps)
        return Stream(x, mlp(y.reshape(*lead, -1), None).reshape(1, *y.shape), counters)
    gate_up, down = mlp.gate_up.kernel[...], mlp.down.kernel[...]
    if chained:
        return Stream(*layer_tail(attended, x, out, norm.scale[...], gate_up, down, counters, number, eps=norm.eps))
    x, y = add_norm(x, stream_matmul(attended, out), norm.scale[...], eps=norm.eps)
    return Stream(x, stream_matmul(gated_matmul(y, gate_up), down), counters)
