"""Checkpoints with experts as transformers' own models name their tensors, for `verify`.

Written from transformers' side: for each of its parameters, where in the checkpoint its values are. Nothing of the
converter's rules is used, so that the two check each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.source import Source
from herald_jax.config import ModelConfig
from herald_jax.errors import ConversionError

_LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}


def glm4_moe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """LLaDA2's config.json in the words of transformers' Glm4MoeConfig."""
    if raw.get("use_bias"):
        raise ConversionError("--verify cannot compare use_bias: transformers' Glm4Moe has no bias there")
    renamed = {
        "n_routed_experts": raw["num_experts"],
        "n_shared_experts": raw["num_shared_experts"],
        "attention_bias": bool(raw.get("use_qkv_bias")),
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
    kept = {key: value for key, value in raw.items() if key not in ("num_experts", "num_shared_experts", "rotary_dim")}
    return {"partial_rotary_factor": raw.get("rotary_dim", 0) / raw["head_dim"]} | kept | renamed


def read_named(source: Source, config: ModelConfig, name: str) -> np.ndarray:
    """The values of transformers' parameter or buffer `name`.

    Raises: ConversionError if the checkpoint does not have them.
    """
    if name in source.tensors:
        return _whole(source, name)
    prefix, _, leaf = name.rpartition(".mlp.experts.")
    if prefix:
        return _experts(source, config, f"{prefix}.mlp.", leaf)
    for theirs, ours in _LLADA2_NAMES.items():
        name = name.replace(theirs, ours)
    for index, part in enumerate((".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")):
        if part in name and name not in source.tensors:
            fused = _whole(source, name.replace(part, ".attention.query_key_value."))
            ends = np.cumsum([config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim])
            return np.split(fused, ends)[index]
    return _whole(source, name)


def _whole(source: Source, name: str) -> np.ndarray:
    if name not in source.tensors:
        raise ConversionError(f"transformers' model needs {name}, but the source does not have it")
    return source.rows(name, 0, source.tensors[name].shape[0])


def _experts(source: Source, config: ModelConfig, prefix: str, leaf: str) -> np.ndarray:
    """`experts.gate_up_proj` [X, 2F, E] or `experts.down_proj` [X, E, F] of one layer, from any layout."""
    assert config.moe is not None
    parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
    whole = {"gate_up_proj": "w1", "down_proj": "w2"}[leaf]
    if f"{prefix}{whole}" in source.tensors:
        return _whole(source, f"{prefix}{whole}")
    if f"{prefix}experts.{parts[0]}" in source.tensors:
        return np.concatenate([_whole(source, f"{prefix}experts.{part}") for part in parts], axis=1)
    each = range(config.moe.num_experts)
    return np.stack(
        [np.concatenate([_whole(source, f"{prefix}experts.{i}.{part}.weight") for part in parts]) for i in each]
    )
