"""The transformer: a pre-norm, SwiGLU, grouped-query decoder declared with Flax NNX and called as a pure function.

One class serves every family (Llama, Qwen2 / Fast-dLLM v2, Qwen3 / SDAR; LLaDA2 and SDAR-MoE with the expert layers of
`moe.py`); `ModelConfig` says which parts exist.
Parameters live outside the modules as a nested dict (`init_params`, `checkpoint.load_checkpoint`); `bind` joins them
for the length of one trace. The module never decides what a query may see: each layer hands its q, k and v to an
`attend` callback, which owns the KV cache. That callback is where the plans differ.

Shape letters: B batch, T query tokens, E hidden, K KV heads, G = H // K, D head dim, F MLP width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from herald_jax.config import ModelConfig, RopeConfig
from herald_jax.moe import MoE
from herald_jax.streamed import Stream, begin, end, streamed_layer, streams

Params = dict[str, Any]
Cache = TypeVar("Cache")


class Attend(Protocol):
    """`attend(layer, q, k, v, cache) -> (out, cache)`; q, out `[B, T, K, G, D]`; k, v `[B, T, K, D]`; rotated.

    A pytree that also has `at(layer) -> Attend`, giving what is static about a layer, is traced once for all layers it
    is the same for; `layer` is then a traced i32 scalar. Any other callable is called layer by layer, with an int.
    """

    def __call__(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]: ...


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What one leaf must be. `axes` are logical names, mapped to mesh axes by `sharding.RULES`."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: Any


def _precision(dtype: Any) -> str | None:
    # A float32 model is asked for when exactness matters; TF32 would undo it.
    return "highest" if dtype == jnp.float32 else None


class _Linear(nnx.Module):
    """`einsum(equation, x, kernel) (+ bias)` in the kernel's dtype, accumulated in float32 by the backend."""

    def __init__(self, equation: str, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, bias_axes: int = 0):
        self.equation = equation
        self.kernel = nnx.Param(jnp.zeros(shape, dtype), axes=axes)
        if bias_axes:
            self.bias = nnx.Param(jnp.zeros(shape[-bias_axes:], dtype), axes=axes[-bias_axes:])

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        y = jnp.einsum(self.equation, x, kernel, precision=_precision(kernel.dtype))
        if not hasattr(self, "bias"):
            return y
        bias = self.bias[...]
        return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


class _RMSNorm(nnx.Module):
    """x / rms(x) in float32, rounded to the model dtype, then scaled (the order of Llama's and Qwen's code)."""

    def __init__(self, size: int, axis: str, eps: float, dtype: Any):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return x32.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class _Attention(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any):
        c, g = config, config.group_size
        # Per KV head: its G query heads, its key head, its value head. One matmul instead of three, and a
        # tensor-parallel split over KV heads keeps each head with the queries that read it.
        shape = (c.hidden_size, c.num_kv_heads, g + 2, c.head_dim)
        axes = ("embed", "kv_heads", "group", "head_dim")
        self.qkv = _Linear("bte,ekjd->btkjd", shape, axes, dtype, bias_axes=3 if c.qkv_bias else 0)
        if c.qk_norm:
            self.q_norm = _RMSNorm(c.head_dim, "head_dim", c.rms_norm_eps, dtype)
            self.k_norm = _RMSNorm(c.head_dim, "head_dim", c.rms_norm_eps, dtype)
        shape = (c.num_kv_heads, g, c.head_dim, c.hidden_size)
        axes = ("kv_heads", "group", "head_dim", "embed")
        self.out = _Linear("btkgd,kgde->bte", shape, axes, dtype, bias_axes=1 if c.out_bias else 0)

    def __call__(
        self, layer: Any, x: jax.Array, angles: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[jax.Array, Any]:
        qkv = self.qkv(x)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = attend(layer, rotate(q, angles), rotate(k, angles), v, cache)
        return self.out(out), cache


class _MLP(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any):
        e, f = config.hidden_size, config.intermediate_size
        self.gate_up = _Linear("bte,ecf->btcf", (e, 2, f), ("embed", "pair", "mlp"), dtype)
        self.down = _Linear("btf,fe->bte", (f, e), ("mlp", "embed"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])


def _feed_forward(config: ModelConfig, dtype: Any, layer: int) -> Any:
    """The MLP of layer number `layer`, or its experts and the MLP that all tokens share."""
    if config.moe is None or not config.is_moe_layer(layer):
        return _MLP(config, dtype)
    width = config.moe.shared_size
    return MoE(config, dtype, _MLP(dataclasses.replace(config, intermediate_size=width), dtype) if width else None)


class _Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: Any, layer: int):
        self.attn_norm = _RMSNorm(config.hidden_size, "embed", config.rms_norm_eps, dtype)
        self.attn = _Attention(config, dtype)
        self.mlp_norm = _RMSNorm(config.hidden_size, "embed", config.rms_norm_eps, dtype)
        self.mlp = _feed_forward(config, dtype, layer)

    def __call__(
        self, layer: Any, x: Any, angles: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Any, Any]:
        if isinstance(x, Stream):
            return streamed_layer(self, layer, x, angles, attend, cache)
        y, cache = self.attn(layer, self.attn_norm(x), angles, attend, cache)
        x = x + y
        mesh = (getattr(attend, "mesh", None),) if isinstance(self.mlp, MoE) else ()
        return x + self.mlp(self.mlp_norm(x), *mesh), cache


@functools.partial(jax.jit, static_argnames="graph")
def _shared_layer(
    graph: Any,
    state: Any,
    layer: jax.Array,
    x: Any,
    angles: tuple[jax.Array, jax.Array],
    attend: Attend,
    cache: Any,
) -> tuple[Any, Any]:
    """One layer as a function of its number.

    Layers are unrolled (a scan over stacked weights copies each layer's slice), but traced and lowered once: lowering a
    Pallas kernel anew in each of 36 layers took minutes.
    """
    return nnx.merge(graph, state)(layer, x, angles, attend, cache)


class _Table(nnx.Module):
    def __init__(self, name: str, config: ModelConfig, dtype: Any):
        shape = (config.vocab_size, config.hidden_size)
        setattr(self, name, nnx.Param(jnp.zeros(shape, dtype), axes=("vocab", "embed")))


class Transformer(nnx.Module):
    """The whole model without a cache and without an opinion about visibility."""

    def __init__(self, config: ModelConfig):
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.embed = _Table("embedding", config, dtype)
        self.layers = nnx.List([_Layer(config, dtype, i) for i in range(config.num_layers)])
        self.norm = _RMSNorm(config.hidden_size, "embed", config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = _Table("kernel", config, dtype)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Run every layer.

        Args:
          tokens: i32[B, T] ids.
          positions: i32[B, T] absolute positions, for the rotary embedding.
          attend: called once per layer; writes k and v where the plan keeps them and returns the attention output.
          cache: whatever `attend` reads and writes.

        Returns:
          The normalised hidden states `[B, T, E]` (logits are `hidden @ head_kernel().T`) and the new cache.
        """
        x: Any = jnp.take(self.embed.embedding[...], tokens, axis=0)
        angles = rope_angles(self.config.rope, self.config.head_dim, positions)
        if streams(self.config, attend, tokens):
            x = begin(self.layers[0], x)
        for i, layer in enumerate(self.layers):
            if hasattr(attend, "at"):
                x, cache = _shared_layer(*nnx.split(layer), jnp.int32(i), x, angles, attend.at(i), cache)
            else:
                x, cache = layer(i, x, angles, attend, cache)
        if isinstance(x, Stream):
            return end(self.norm, x).reshape(*tokens.shape, -1), cache
        return self.norm(x), cache

    def head_kernel(self) -> jax.Array:
        """`[V, E]`: the output projection, which is the embedding when the two are tied."""
        return self.embed.embedding[...] if self.config.tie_word_embeddings else self.head.kernel[...]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies f64[D // 2] and the factor on cos and sin, for every supported kind of scaling.

    D is the rotated part of a head, `rope.rotary_dim` where that is set.

    Sources: RoFormer (arXiv 2104.09864); Llama 3.1's wavelength rule; YaRN (arXiv 2309.00071, sections 3.2 to 3.4).
    """
    head_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    inv = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return inv, 1.0
    if rope.kind == "linear":
        return inv / rope.factor, 1.0
    trained = rope.original_max_position_embeddings
    assert trained is not None  # RopeConfig checked it
    if rope.kind == "llama3":
        turns = trained * inv / (2 * math.pi)  # rotations a dimension makes within the trained context
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return inv * (keep + (1 - keep) / rope.factor), 1.0

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low if high > low else 0.001)
    keep = 1 - np.clip(ramp, 0.0, 1.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    factor = rope.attention_factor
    if factor is None:
        factor = (
            mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)
        )
    return inv * (keep + (1 - keep) / rope.factor), factor


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each f32`[B, T, D // 2]`, of `positions` i32[B, T]."""
    inv, factor = rope_frequencies(rope, head_dim)
    inv32 = jnp.asarray(inv, jnp.float32).reshape((1,) * positions.ndim + (-1,))
    angles = positions.astype(jnp.float32)[..., None] * inv32
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the two halves of the last axis (`x` is `[B, T, ..., D]`) by `rope_angles`, in float32.

    Angles for fewer dimensions than x has rotate its leading ones, and the rest passes as it is.
    """
    width = 2 * angles[0].shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], angles), x[..., width:]], axis=-1)
    middle = (1,) * (x.ndim - angles[0].ndim)
    cos, sin = (a.reshape(a.shape[:-1] + middle + a.shape[-1:]) for a in angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@functools.lru_cache(maxsize=32)
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config)))


@functools.lru_cache(maxsize=32)
def _specs(config: ModelConfig) -> dict[str, ParamSpec]:
    _, state = _abstract(config)
    specs = {}
    for keys, leaf in nnx.to_flat_state(state):
        value = leaf.get_value()
        specs["/".join(str(k) for k in keys)] = ParamSpec(value.shape, leaf.get_metadata()["axes"], value.dtype)
    return specs


def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every leaf of `config`'s parameters: flat path (`"layers/0/attn/qkv/kernel"`) to shape, axes and dtype."""
    return dict(_specs(config))


def unflatten(leaves: dict[str, Any]) -> Params:
    """Nested dict from flat paths."""
    tree: Params = {}
    for path, value in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = value
    return tree


def flatten(params: Params, prefix: str = "") -> dict[str, Any]:
    """Inverse of `unflatten`."""
    leaves: dict[str, Any] = {}
    for key, value in params.items():
        leaves |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def bind(config: ModelConfig, params: Params) -> Transformer:
    """The module holding `params` (nested dict, as `unflatten` makes it). Cheap; call it inside the traced function."""
    graph, state = _abstract(config)
    leaves = flatten(params)
    flat = [(keys, leaf.replace(leaves["/".join(str(k) for k in keys)])) for keys, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def init_params(
    config: ModelConfig,
    key: jax.Array,
    *,
    scale: float = 0.02,
    sharding_for: Callable[[str, ParamSpec], Any] | None = None,
) -> Params:
    """Random parameters (normal with deviation `scale`; norms 1; biases too are random, so that tests see them).

    Leaves are made one at a time on the device, straight in their dtype and sharding: no float32 copy of the model.
    """
    leaves = {}
    for i, (path, spec) in enumerate(sorted(param_specs(config).items())):
        sharding = None if sharding_for is None else sharding_for(path, spec)
        make = _init_leaf(spec.shape, jnp.dtype(spec.dtype), 0.0 if path.endswith("scale") else scale, sharding)
        leaves[path] = make(jax.random.fold_in(key, i))
    return unflatten(leaves)


@functools.lru_cache(maxsize=256)
def _init_leaf(shape: tuple[int, ...], dtype: Any, scale: float, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if scale == 0.0:
            return jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)

    return jax.jit(make, out_shardings=sharding)
