"""Real model shapes for benchmarks with random weights. Sources: the config.json of each family."""

from __future__ import annotations

import dataclasses
import math

from herald_jax.config import DiffusionContract, ModelConfig, MoEConfig, RopeConfig
from herald_jax.model import ParamSpec, param_specs


def _sdar(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, *, tied: bool, block: int) -> ModelConfig:
    return ModelConfig(
        family="sdar",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,  # beyond the trained 32,768: these weights are random, only shapes matter
        tie_word_embeddings=tied,
        qkv_bias=False,
        out_bias=False,
        qk_norm=True,
        rope=RopeConfig(1e6),
        dtype="bfloat16",
        diffusion=DiffusionContract(block, block, 151669, "same", "all_masked", stop_token_ids=(151643,)),
    )


def _fast_dllm(hidden: int, mlp: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="fast_dllm_v2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=28,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=tied,
        qkv_bias=True,
        out_bias=False,
        qk_norm=False,
        rope=RopeConfig(1e6),
        dtype="bfloat16",
        diffusion=DiffusionContract(32, 8, 151665, "shifted", "seed_and_masks", stop_token_ids=(151645,)),
    )


def _llada2_mini() -> ModelConfig:
    return ModelConfig(
        family="llada2",
        vocab_size=157184,
        hidden_size=2048,
        intermediate_size=5120,
        num_layers=20,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
        qkv_bias=False,
        out_bias=False,
        qk_norm=True,
        rope=RopeConfig(6e5, rotary_dim=64),
        dtype="bfloat16",
        diffusion=DiffusionContract(32, 32, 156895, "same", "all_masked", stop_token_ids=(156892,)),
        moe=MoEConfig(256, 8, 512, "sigmoid", True, 2.5, True, 8, 4, shared_size=512, first_dense_layers=1),
    )


SHAPES = {
    "sdar8b": _sdar(36, 4096, 12288, 32, 8, tied=False, block=32),
    "sdar4b": _sdar(36, 2560, 9728, 32, 8, tied=False, block=32),
    "sdar1.7b": _sdar(28, 2048, 6144, 16, 8, tied=True, block=32),
    "sdar_30b_a3b": dataclasses.replace(
        _sdar(48, 2048, 6144, 32, 4, tied=False, block=32),
        family="sdar_moe",
        moe=MoEConfig(128, 8, 768, "softmax", True),
    ),
    "llada2_mini": _llada2_mini(),
    "fdv2_7b": _fast_dllm(3584, 18944, 28, 4, 152064, tied=False),
    "fdv2_1.5b": _fast_dllm(1536, 8960, 12, 2, 151936, tied=True),
}


def _nbytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all parameters."""
    return sum(_nbytes(spec) for spec in param_specs(config).values())


def step_weight_bytes(config: ModelConfig) -> int:
    """Bytes of parameters that one forward of a block must read: everything but the rows of an untied embedding.

    Of a mixture of experts, all experts: what a step touches of them is for `benchmarks.moe` to count.
    """
    skipped = set() if config.tie_word_embeddings else {"embed/embedding"}
    return sum(_nbytes(spec) for path, spec in param_specs(config).items() if path not in skipped)


def step_flops(config: ModelConfig, rows: int, head_rows: int | None = None) -> int:
    """Multiply-adds times two of the matmuls of one forward over `rows` tokens (attention scores not counted).

    `head_rows`: over how many of them the vocabulary head runs, if not over all.
    """
    skipped = set() if config.tie_word_embeddings else {"embed/embedding"}
    weights = sum(math.prod(s.shape) for p, s in param_specs(config).items() if p not in skipped and len(s.shape) > 1)
    unread = 0 if head_rows is None else rows - head_rows
    return 2 * (rows * weights - unread * config.vocab_size * config.hidden_size)
