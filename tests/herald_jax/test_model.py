"""The transformer's parameters and rotary embedding, and attention heads against a loop over heads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import RopeConfig
from herald_jax.config import ModelConfig
from herald_jax.model import (
    bind,
    flatten,
    init_params,
    param_specs,
    rope_angles,
    rope_frequencies,
    rotate,
    unflatten,
)
from tests.herald_jax import tiny

SDAR_LAYER = {
    "attn_norm/scale": ((32,), ("embed",)),
    "attn/qkv/kernel": ((32, 2, 4, 16), ("embed", "kv_heads", "group", "head_dim")),
    "attn/q_norm/scale": ((16,), ("head_dim",)),
    "attn/k_norm/scale": ((16,), ("head_dim",)),
    "attn/out/kernel": ((2, 2, 16, 32), ("kv_heads", "group", "head_dim", "embed")),
    "mlp_norm/scale": ((32,), ("embed",)),
    "mlp/gate_up/kernel": ((32, 2, 48), ("embed", "pair", "mlp")),
    "mlp/down/kernel": ((48, 32), ("mlp", "embed")),
}


def test_param_specs_of_an_untied_model_with_norms() -> None:
    expected = {f"layers/{i}/{name}": value for i in range(2) for name, value in SDAR_LAYER.items()}
    expected |= {
        "embed/embedding": ((96, 32), ("vocab", "embed")),
        "head/kernel": ((96, 32), ("vocab", "embed")),
        "norm/scale": ((32,), ("embed",)),
    }
    specs = param_specs(tiny.SDAR)
    assert {path: (spec.shape, spec.axes) for path, spec in specs.items()} == expected
    assert {spec.dtype for spec in specs.values()} == {jnp.dtype("float32")}
    half = param_specs(dataclasses.replace(tiny.SDAR, dtype="bfloat16"))
    assert {spec.dtype for spec in half.values()} == {jnp.dtype("bfloat16")}


def test_param_specs_follow_the_configuration() -> None:
    biased = dataclasses.replace(tiny.FAST_DLLM, out_bias=True, num_layers=1)
    specs = param_specs(biased)
    assert "head/kernel" not in specs
    assert not [path for path in specs if "q_norm" in path or "k_norm" in path]
    assert specs["layers/0/attn/qkv/bias"].shape == (2, 5, 16)
    assert specs["layers/0/attn/qkv/bias"].axes == ("kv_heads", "group", "head_dim")
    assert specs["layers/0/attn/out/bias"].shape == (32,)
    assert specs["layers/0/attn/out/bias"].axes == ("embed",)
    assert not [path for path in specs if path.startswith("layers/1")]
    specs.clear()  # a copy: the next caller sees all of them
    assert param_specs(biased)


def test_flatten_and_unflatten_are_inverse() -> None:
    leaves = {path: i for i, path in enumerate(param_specs(tiny.SDAR))}
    tree = unflatten(leaves)
    assert tree["layers"]["1"]["attn"]["qkv"]["kernel"] == leaves["layers/1/attn/qkv/kernel"]
    assert flatten(tree) == leaves
    assert flatten({}) == unflatten({}) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_params_match_their_specs(dtype: Any) -> None:
    config = dataclasses.replace(tiny.FAST_DLLM, dtype=dtype)
    leaves = flatten(init_params(config, jax.random.key(0), scale=0.5))
    specs = param_specs(config)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()} == {
        path: (spec.shape, spec.dtype) for path, spec in specs.items()
    }
    for path, leaf in leaves.items():
        values = np.asarray(leaf, np.float64)
        if path.endswith("scale"):
            assert (values == 1).all()
        else:
            assert abs(values.std() - 0.5) < 0.12, path
    again = flatten(init_params(config, jax.random.key(0), scale=0.5))
    assert all((np.asarray(leaves[path]) == np.asarray(again[path])).all() for path in leaves)
    other = flatten(init_params(config, jax.random.key(1), scale=0.5))
    assert (np.asarray(other["embed/embedding"]) != np.asarray(leaves["embed/embedding"])).any()
    first, second = (np.asarray(leaves[f"layers/{i}/mlp/down/kernel"]) for i in (0, 1))
    assert (first != second).any()


def test_bind_holds_the_parameters_it_is_given() -> None:
    module = bind(tiny.FAST_DLLM, tiny.params(tiny.FAST_DLLM))
    table = tiny.params(tiny.FAST_DLLM)["embed"]["embedding"]
    assert (np.asarray(module.head_kernel()) == table).all()
    untied = tiny.params(tiny.SDAR)
    assert (np.asarray(bind(tiny.SDAR, untied).head_kernel()) == untied["head"]["kernel"]).all()
    missing = {name: value for name, value in untied.items() if name != "norm"}
    with pytest.raises(KeyError, match="norm/scale"):
        bind(tiny.SDAR, missing)


def plain_frequencies(rope: RopeConfig, dim: int) -> tuple[list[float], float]:
    """Each kind's formula, one dimension at a time, in Python floats."""
    result, length = [], rope.original_max_position_embeddings or 0
    for i in range(dim // 2):
        frequency = 1.0 / rope.theta ** (2 * i / dim)
        if rope.kind == "linear":
            frequency /= rope.factor
        elif rope.kind == "llama3":
            wavelength = 2 * math.pi / frequency
            if wavelength > length / rope.low_freq_factor:
                frequency /= rope.factor
            elif wavelength >= length / rope.high_freq_factor:
                smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        elif rope.kind == "yarn":
            # The dimension that turns `n` times in the trained context: theta^(2d/dim) = length / (2 pi n).
            edges = [
                dim / 2 * math.log(length / (2 * math.pi * n), rope.theta) for n in (rope.beta_fast, rope.beta_slow)
            ]
            if rope.truncate:
                edges = [math.floor(edges[0]), math.ceil(edges[1])]
            low, high = max(edges[0], 0), min(edges[1], dim - 1)
            extrapolated = 1 - min(max((i - low) / (high - low), 0), 1)
            frequency = frequency / rope.factor * (1 - extrapolated) + frequency * extrapolated
        result.append(frequency)
    factor = 1.0
    if rope.kind == "yarn":
        factor = 0.1 * math.log(rope.factor) + 1
        if rope.attention_factor is not None:
            factor = rope.attention_factor
        elif rope.mscale and rope.mscale_all_dim:
            top, bottom = (0.1 * m * math.log(rope.factor) + 1 for m in (rope.mscale, rope.mscale_all_dim))
            factor = top / bottom
    return result, factor


ROPES = {
    "default": RopeConfig(1e6),
    "linear": RopeConfig(1e4, "linear", 2.5),
    "llama3": RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
    "llama3-narrow": RopeConfig(1e4, "llama3", 32.0, 2.0, 2.5, 512),
    "yarn": RopeConfig(1e6, "yarn", 4.0, original_max_position_embeddings=32768),
    "yarn-betas": RopeConfig(1e4, "yarn", 16.0, original_max_position_embeddings=2048, beta_fast=16.0, beta_slow=2.0),
    "yarn-untruncated": RopeConfig(1e4, "yarn", 8.0, original_max_position_embeddings=4096, truncate=False),
    "yarn-mscale": RopeConfig(
        1e4, "yarn", 40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.0
    ),
    "yarn-attention": RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=4096, attention_factor=1.25),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_rope_frequencies_equal_their_formulas(name: str, dim: int) -> None:
    frequencies, factor = rope_frequencies(ROPES[name], dim)
    expected, expected_factor = plain_frequencies(ROPES[name], dim)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    if name != "default":
        assert (frequencies <= rope_frequencies(RopeConfig(ROPES[name].theta), dim)[0] + 1e-15).all()


def test_rope_angles_carry_the_factor() -> None:
    rope = ROPES["yarn-attention"]
    cos, sin = rope_angles(rope, 16, jnp.asarray([[0, 7]]))
    assert cos.shape == sin.shape == (1, 2, 8)
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-6)
    np.testing.assert_allclose(cos[0, 1], 1.25 * np.cos(7 * rope_frequencies(rope, 16)[0]), rtol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 3, 16)), jnp.float32) for _ in range(2))

    def at(x: jax.Array, position: int) -> jax.Array:
        return rotate(x, rope_angles(RopeConfig(1e4), 16, jnp.asarray([[position]])))

    np.testing.assert_allclose(at(q, 0), q, atol=1e-7)
    np.testing.assert_allclose(jnp.linalg.norm(at(q, 90), axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(at(q, 95) * at(k, 90)), jnp.sum(at(q, 5) * at(k, 0)), rtol=1e-4)
    # The two halves are the two coordinates (Llama's order, not interleaved pairs).
    angle = 3.0  # of the first dimension, at position 3
    expected = q[..., 0] * math.cos(angle) - q[..., 8] * math.sin(angle)
    np.testing.assert_allclose(at(q, 3)[..., 0], expected, rtol=1e-5)
    assert rotate(q.astype(jnp.bfloat16), rope_angles(RopeConfig(1e4), 16, jnp.asarray([[1]]))).dtype == jnp.bfloat16


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = positions[:, None] * 1e4 ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def numpy_layer(config: ModelConfig, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Embedding, one layer with full attention, last norm: float64, head by head."""
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(tiny.params(config)).items()}
    layer = {path.removeprefix("layers/0/"): leaf for path, leaf in leaves.items()}
    group = config.group_size
    x = leaves["embed/embedding"][tokens]
    y = norm(x, layer["attn_norm/scale"])
    out = np.zeros_like(x)
    for head in range(config.num_heads):
        pair = head // group
        q, k, v = (y @ layer["attn/qkv/kernel"][:, pair, part] for part in (head % group, group, group + 1))
        if config.qkv_bias:
            q, k, v = (
                value + layer["attn/qkv/bias"][pair, part]
                for value, part in ((q, head % group), (k, group), (v, group + 1))
            )
        if config.qk_norm:
            q, k = norm(q, layer["attn/q_norm/scale"]), norm(k, layer["attn/k_norm/scale"])
        scores = turn(q, positions) @ turn(k, positions).T / np.sqrt(config.head_dim)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out += weights @ v @ layer["attn/out/kernel"][pair, head % group]
    x = x + out + layer["attn/out/bias"]
    y = norm(x, layer["mlp_norm/scale"])
    gate, up = y @ layer["mlp/gate_up/kernel"][:, 0], y @ layer["mlp/gate_up/kernel"][:, 1]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp/down/kernel"]
    return norm(x, leaves["norm/scale"])


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (7, 1), (14, 2)], ids=["1", "2", "3", "7", "7x2"]
)
@pytest.mark.parametrize("form", ["sdar", "fast_dllm"])
def test_layer_equals_numpy_for_any_group_size(form: str, heads: int, kv_heads: int) -> None:
    """Which key head a query head reads, biases, per-head norms, SwiGLU, residuals."""
    config = dataclasses.replace(tiny.FORMS[form], num_heads=heads, num_kv_heads=kv_heads, num_layers=1, out_bias=True)
    tokens, positions = np.array(tiny.prompts([6])[0]), np.arange(3, 9)

    def attend(layer: int, q: Any, k: Any, v: Any, cache: None) -> tuple[Any, None]:
        assert q.shape == (1, 6, kv_heads, heads // kv_heads, 16)
        assert k.shape == v.shape == (1, 6, kv_heads, 16)
        scores = jnp.einsum("btkgd,bnkd->bkgtn", q, k, precision="highest") / 4
        return jnp.einsum("bkgtn,bnkd->btkgd", jax.nn.softmax(scores, axis=-1), v, precision="highest"), None

    @jax.jit
    def run(params: Any) -> jax.Array:
        return bind(config, params)(tokens[None], positions[None], attend, None)[0]

    np.testing.assert_allclose(run(tiny.params(config))[0], numpy_layer(config, tokens, positions), atol=2e-5)
