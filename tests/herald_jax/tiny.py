"""Tiny random models of every family's form, shared by the tests: two layers, a vocabulary of 96, compiled in seconds.

Weights are drawn wide enough that confidences spread over (0, 1): a policy that decides nothing tests nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from herald_jax.config import DiffusionContract, ModelConfig, RopeConfig
from herald_jax.loading import Model
from herald_jax.model import param_specs, unflatten

# Ids of every form below.
MASK = 95
STOP = 65  # a token that the random models like to write

# SDAR: Qwen3 with per-head norms, untied; same-position logits, all-masked canvas.
SDAR = ModelConfig(
    family="sdar",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    qk_norm=True,
    rope=RopeConfig(theta=1e4),
    dtype="float32",
    diffusion=DiffusionContract(
        block_length=4,
        small_block_length=4,
        mask_token_id=MASK,
        logit_alignment="same",
        first_canvas="all_masked",
        stop_token_ids=(STOP,),
    ),
)

# Fast-dLLM v2: Qwen2 with biases, tied, G = 3; shifted logits, seed token, blocks of two small blocks.
FAST_DLLM = dataclasses.replace(
    SDAR,
    family="fast_dllm_v2",
    num_heads=6,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    diffusion=DiffusionContract(
        block_length=8,
        small_block_length=4,
        mask_token_id=MASK,
        logit_alignment="shifted",
        first_canvas="seed_and_masks",
        stop_token_ids=(STOP,),
    ),
)

# A base causal language model (Llama): the limit of block length 1, where the seed is the only token of a block.
LLAMA = dataclasses.replace(
    SDAR,
    family="llama",
    qk_norm=False,
    rope=RopeConfig(theta=1e4, kind="llama3", factor=4.0, original_max_position_embeddings=64),
    diffusion=DiffusionContract(
        block_length=1,
        small_block_length=1,
        mask_token_id=None,
        logit_alignment="shifted",
        first_canvas="seed_and_masks",
        stop_token_ids=(STOP,),
        seed_rule="sample",
    ),
)

FORMS = {"sdar": SDAR, "fast_dllm": FAST_DLLM, "llama": LLAMA}


@functools.partial(jax.jit, static_argnames="size")
def _draws(seed: int, leaf: int, *, size: int) -> jax.Array:
    """f32[size], normal, as `init_params` draws them, but by one program for all leaves of all models."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), leaf), (size,), np.float32)


@functools.lru_cache(maxsize=64)
def params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Host arrays for `config`: weights with deviation about 1 / sqrt(fan in), so that every layer matters."""
    leaves = {}
    for index, (path, spec) in enumerate(sorted(param_specs(config).items())):
        if path.endswith("scale"):
            leaves[path] = np.ones(spec.shape, spec.dtype)
            continue
        count = math.prod(spec.shape)
        scale = 0.5
        if path.endswith("kernel") and not path.startswith("head"):
            fan_in = config.hidden_size if "qkv" in path or "gate_up" in path else count // config.hidden_size
            scale = 1.5 * fan_in**-0.5
        # A draw's beginning is the same whatever its length.
        drawn = np.asarray(_draws(seed, index, size=max(8192, 1 << (count - 1).bit_length())))
        leaves[path] = (drawn[:count].reshape(spec.shape).astype(spec.dtype) * scale).astype(spec.dtype)
    return unflatten(leaves)


@functools.lru_cache(maxsize=64)
def model(config: ModelConfig, seed: int = 0) -> Model:
    """The model on one device."""
    return Model.from_params(config, params(config, seed))


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without the mask token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MASK, size=length).tolist() for length in lengths]
