"""A decoder layer over the few tokens of a denoising step: `model._Layer` in as few launches as possible.

With so few tokens a step takes the time of reading the weights, plus that of every launch between the matmuls. So the
matmuls leave partial sums, and what follows them (residual and norm; heads and cache) is one kernel each, which adds
them up. The residual stream is therefore a pair between layers, see `Stream`.

Used on one device, for 16-bit models, where the kernels of `pallas_kernels` can run; all else takes `model`'s form.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.config import ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.fused_rows import add_norm, project_heads
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

# As many as a HERALD draft of sixteen blocks. Prefill goes by more rows at a time, and what lies between its matmuls is
# little beside them.
_MOST_ROWS = 1024


class Stream(NamedTuple):
    """The residual stream `[R, E]` and what the last sublayer adds to it, as partial sums `[S, R, E]`. R = B * T."""

    x: jax.Array
    parts: jax.Array


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
    reasons = [dispatch.stream_matmul_missing(of((rows, w.shape[0])), w) for w in weights]
    if 256 < rows <= _MOST_ROWS:
        reasons = []  # matmuls are XLA's, and what lies between them is still worth its kernels
    reasons += [
        dispatch.project_heads_missing(None, c.dtype, c.head_dim, rotated),
        dispatch.add_norm_missing(of((rows, c.hidden_size)), None),
    ]
    return next((reason for reason in reasons if reason), None)


def begin(layer: Any, x: jax.Array) -> Stream:
    """The stream before the first layer: x `[B, T, E]`, and sums of zeros, shaped like those that `layer` leaves."""
    x = x.reshape(-1, x.shape[-1])
    kernel = layer.attn.out.kernel[...]
    attended = jax.ShapeDtypeStruct((x.shape[0], kernel.size // x.shape[1]), x.dtype)
    parts = jax.eval_shape(functools.partial(_behind_attention, layer, lead=(1, x.shape[0])), attended, x).parts
    return Stream(x, jnp.zeros(parts.shape, parts.dtype))


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
    x, y = add_norm(stream.x, stream.parts, norm.scale[...], eps=norm.eps)
    by_row = (angles[0].reshape(rows, -1), angles[1].reshape(rows, -1))
    into = attend.destination(number, tokens, cache) if hasattr(attend, "destination") else None
    q, k, v = project_heads(
        stream_matmul(y, qkv), bias, q_scale, k_scale, by_row,
        group=group, eps=norm.eps, dtype=x.dtype, head_dim=out.shape[2], into=into,
    )  # fmt: skip
    q = q.reshape(batch, tokens, *q.shape[1:])
    if into is None:
        k, v = (x.reshape(batch, tokens, *x.shape[1:]) for x in (k, v))
        attended, cache = attend(number, q, k, v, cache)
    else:
        attended, cache = attend(number, q, None, None, attend.written(cache, k, v))
    attended = attended.reshape(rows, -1)
    return _behind_attention(layer, attended, x, lead=(batch, tokens)), cache


def _behind_attention(layer: Any, attended: jax.Array, x: jax.Array, *, lead: tuple[int, int]) -> Stream:
    """Output projection, residual, norm and MLP: attended `[R, H * D]`, x `[R, E]`, lead `(B, T)`."""
    norm, mlp = layer.mlp_norm, layer.mlp
    out = layer.attn.out.kernel[...]
    out = out.reshape(-1, out.shape[-1])
    if not hasattr(mlp, "gate_up"):  # experts keep their own form
        x, y = add_norm(x, stream_matmul(attended, out), norm.scale[...], eps=norm.eps)
        return Stream(x, mlp(y.reshape(*lead, -1), None).reshape(1, *y.shape))
    gate_up, down = mlp.gate_up.kernel[...], mlp.down.kernel[...]
    x, y = add_norm(x, stream_matmul(attended, out), norm.scale[...], eps=norm.eps)
    return Stream(x, stream_matmul(gated_matmul(y, gate_up), down))
