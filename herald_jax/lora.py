"""LoRA (arXiv 2106.09685): train a low-rank addition to each matrix, and leave the model itself as it is.

The additions live in a tree of their own, `{path: {"a": [in, r], "b": [r, out]}}`; `merge_layer` adds them to one
layer's frozen parameters inside the traced step, so that the transformer does not know of them, and `merge` to all of
them at the end, so that the result is an ordinary checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.config import ModelConfig
from herald_jax.errors import ConfigError
from herald_jax.joined_layers import leaves
from herald_jax.model import Params, param_specs, unflatten

Adapters = dict[str, dict[str, jax.Array]]

# How many leading axes of a kernel are its input; the rest are its output.
_INPUT_AXES = {"attn/qkv/kernel": 1, "attn/out/kernel": 3, "mlp/gate_up/kernel": 1, "mlp/down/kernel": 1}


def _shape(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(inputs, outputs) of an adaptable kernel, else None."""
    for name, axes in _INPUT_AXES.items():
        if path.endswith(name):
            return math.prod(shape[:axes]), math.prod(shape[axes:])
    return None


def init_adapters(config: ModelConfig, rank: int, key: jax.Array) -> Adapters:
    """Adapters for the attention and MLP matrices of every layer, float32; `b` is zero, so that they begin as nothing.

    Raises ConfigError for a rank below 1 or a model without such matrices.
    """
    if rank < 1:
        raise ConfigError(f"the LoRA rank is {rank}, but a positive number was expected")
    adapters: Adapters = {}
    for i, (path, spec) in enumerate(sorted(param_specs(config).items())):
        shape = _shape(path, spec.shape)
        if shape is not None:
            inputs, outputs = shape
            a = jax.random.normal(jax.random.fold_in(key, i), (inputs, rank)) * inputs**-0.5
            adapters[path] = {"a": a, "b": jnp.zeros((rank, outputs))}
    if not adapters:
        raise ConfigError(f"family {config.family!r} has no matrices that LoRA knows; train the whole model")
    return adapters


def _added(kernel: jax.Array, adapter: Mapping[str, jax.Array], alpha: float) -> jax.Array:
    a, b = adapter["a"], adapter["b"]
    delta = jnp.einsum("ir,ro->io", a, b, precision="highest") * (alpha / a.shape[1])
    return (kernel.astype(jnp.float32) + delta.reshape(kernel.shape)).astype(kernel.dtype)


def merged(
    params: Params, adapters: Mapping[str, Mapping[str, jax.Array]], *, alpha: float
) -> Iterator[tuple[str, jax.Array]]:
    """Each leaf of `params` (joined layers or not) by its path, with `alpha / rank * a @ b` added in its dtype."""
    for path, leaf in leaves(params):
        yield path, _added(leaf, adapters[path], alpha) if path in adapters else leaf


def merge(params: Params, adapters: Mapping[str, Mapping[str, jax.Array]], *, alpha: float) -> Params:
    """All of `merged`, nested."""
    return unflatten(dict(merged(params, adapters, alpha=alpha)))


def merge_layer(state: Any, adapters: Mapping[str, Mapping[str, jax.Array]], *, alpha: float) -> Any:
    """The same for the NNX state of one layer; `adapters` are named from the layer down ("attn/qkv/kernel")."""
    flat = []
    for keys, leaf in nnx.to_flat_state(state):
        path = "/".join(str(k) for k in keys)
        if path in adapters:
            leaf = leaf.replace(_added(leaf.get_value(), adapters[path], alpha))
        flat.append((keys, leaf))
    return nnx.from_flat_state(flat)
