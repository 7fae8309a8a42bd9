"""Configurations of LLaDA2 and SDAR-MoE: as published, and every refusal's sentence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from herald_jax.config import ModelConfig, MoEConfig
from herald_jax.errors import ConfigError
from tests.convert.checkpoints import config_without
from tests.herald_jax.test_hf_config import SDAR_4B, error, read

# inclusionAI/dFactory configs/model_configs/llada2_mini/config.json, the fields that matter, values as published.
LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "model_type": "llada2_moe_veomni",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "norm_head": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_key_value_heads": 4,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-06,
    "head_dim": 128,
    "num_shared_experts": 1,
    "use_qkv_bias": False,
    "norm_softmax": False,
    "vocab_size": 157184,
    "rotary_dim": 64,
    "using_split_qkv_in_self_attention": False,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "max_window_layers": 28,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "use_sliding_window": False,
}
END = {"generation_config.json": {"eos_token_id": 156892}}

# SDAR-4B's published fields with those that Qwen3-30B-A3B's configuration adds.
SDAR_MOE: dict[str, Any] = {
    **SDAR_4B,
    "architectures": ["SDARMoeForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM"},
    "model_type": "sdar_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@pytest.mark.parametrize("model_type", ["llada2_moe", "llada2_moe_veomni"])
def test_llada2_mini_as_published(tmp_path: Path, model_type: str) -> None:
    found = read(tmp_path, {**LLADA2_MINI, "model_type": model_type}, END)
    c, d = found.config, found.config.diffusion
    assert (c.family, c.num_layers, c.hidden_size, c.intermediate_size) == ("llada2", 20, 2048, 5120)
    assert (c.qkv_bias, c.out_bias, c.qk_norm, c.tie_word_embeddings) == (False, False, True, False)
    assert (c.rope.theta, c.rope.rotary_dim, c.head_dim) == (6e5, 64, 128)
    assert c.moe == MoEConfig(256, 8, 512, "sigmoid", True, 2.5, True, 8, 4, shared_size=512, first_dense_layers=1)
    assert [c.is_moe_layer(i) for i in (0, 1, 19)] == [False, True, True]
    assert (d.block_length, d.small_block_length, d.mask_token_id) == (32, 32, 156895)
    assert (d.logit_alignment, d.first_canvas) == ("same", "all_masked")
    assert (d.stop_token_ids, d.pad_token_id) == ((156892,), 156892)
    assert c.kv_bytes_per_token == 40 * 1024
    assert any("block_length 32 supplied by family llada2" in note for note in found.notes)
    assert any("mask_token_id 156895 supplied by family llada2" in note for note in found.notes)


def test_sdar_30b_a3b(tmp_path: Path) -> None:
    found = read(tmp_path, SDAR_MOE)
    c = found.config
    assert c.moe == MoEConfig(128, 8, 768, "softmax", True)
    assert (c.family, c.diffusion.block_length, c.diffusion.mask_token_id) == ("sdar_moe", 4, 151669)
    assert c.rope.rotary_dim is None
    assert c.is_moe_layer(0)
    assert c.kv_bytes_per_token == 96 * 1024
    without = read(tmp_path, config_without("intermediate_size", base=SDAR_MOE)).config
    assert dataclasses.replace(without, intermediate_size=6144) == c


def test_a_mask_token_of_the_tokenizer_must_agree(tmp_path: Path) -> None:
    tokenizer = {"added_tokens_decoder": {"156000": {"content": "<|mask|>"}}, "mask_token": "<|mask|>"}
    found = read(tmp_path, LLADA2_MINI, {**END, "tokenizer_config.json": tokenizer})
    assert found.config.diffusion.mask_token_id == 156000
    assert read(tmp_path, {**LLADA2_MINI, "block_size": 16}, END).config.diffusion.block_length == 16


@pytest.mark.parametrize("base", [LLADA2_MINI, SDAR_MOE], ids=["llada2", "sdar_moe"])
def test_dictionary_form_survives_json(tmp_path: Path, base: dict[str, Any]) -> None:
    config = read(tmp_path, base, END if base is LLADA2_MINI else None).config
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


def test_dense_models_are_stored_as_before(tmp_path: Path) -> None:
    """Checkpoints written before there were experts load, and older versions read new dense ones."""
    stored = read(tmp_path, SDAR_4B).config.to_dict()
    assert "moe" not in stored
    assert "rotary_dim" not in stored["rope"]
    assert ModelConfig.from_dict(stored).moe is None


GUESS = "add it to config.json, the value is not guessed"


@pytest.mark.parametrize(
    ("base", "changes", "sentence"),
    [
        (LLADA2_MINI, {"n_group": None}, f"config.json does not state n_group; {GUESS}"),
        (LLADA2_MINI, {"routed_scaling_factor": None}, f"config.json does not state routed_scaling_factor; {GUESS}"),
        (LLADA2_MINI, {"num_experts": 0}, "num_experts in config.json is 0, but must be an integer of at least 1"),
        (
            LLADA2_MINI,
            {"score_function": "softmax"},
            "score_function in config.json is 'softmax', but LLaDA2 is supported with 'sigmoid' only",
        ),
        (
            LLADA2_MINI,
            {"norm_topk_prob": False},
            "norm_topk_prob in config.json is False, but LLaDA2 is supported with True only",
        ),
        (
            LLADA2_MINI,
            {"expert_capacity": 48, "block_size": 32},
            "expert_capacity is 48: this is LLaDA2.2, which deletes and splits positions while it writes (its DELETE "
            "and SPLIT tokens), and that is not supported; LLaDA2.0 and 2.1 are",
        ),
        (LLADA2_MINI, {"n_group": 7}, "num_experts 256 is not a multiple of n_group 7"),
        (LLADA2_MINI, {"topk_group": 9}, "topk_group is 9, but there are only 8 groups (n_group)"),
        (
            LLADA2_MINI,
            {"num_experts_per_tok": 200},
            "num_experts_per_tok is 200, but a token can choose among 128 experts only",
        ),
        (
            LLADA2_MINI,
            {"first_k_dense_replace": 20},
            "first_k_dense_replace 20 leaves no layer with experts: num_hidden_layers is 20",
        ),
        (
            LLADA2_MINI,
            {"rotary_dim": 32},
            "config.json contradicts itself: partial_rotary_factor 0.5, rotary_dim 32 (head_dim is 128)",
        ),
        (
            LLADA2_MINI,
            {"rotary_dim": None, "partial_rotary_factor": None},
            "config.json states neither partial_rotary_factor nor rotary_dim; add one, the value is not guessed",
        ),
        (
            LLADA2_MINI,
            {"partial_rotary_factor": 2},
            "partial_rotary_factor in config.json is 2, but must be a number above 0 and at most 1",
        ),
        (
            SDAR_MOE,
            {"norm_topk_prob": None},
            "norm_topk_prob in config.json is None, but must be true or false; the value is not guessed",
        ),
        (SDAR_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers is [3], but every layer must have experts"),
        (
            SDAR_MOE,
            {"decoder_sparse_step": 2},
            "decoder_sparse_step in config.json is 2, but only 1 (every layer has experts) is supported",
        ),
        (
            SDAR_MOE,
            {"block_size": None},
            "config.json does not state the block length (block_size or block_length); give --block-length",
        ),
    ],
)
def test_refusals(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    config = config_without(*[k for k, v in changes.items() if v is None], base=base)
    config |= {k: v for k, v in changes.items() if v is not None}
    assert error(tmp_path, config, END if base is LLADA2_MINI else None) == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"router": "linear"}, "router is 'linear', but must be sigmoid or softmax"),
        ({"num_groups": 8, "groups_per_token": 8}, "groups of 1 expert (num_experts 8, n_group 8) cannot be ranked"),
        ({"block_capacity": 9}, "expert_capacity is 9, but must be between 1 and num_experts 8"),
        ({"block_capacity": 1}, "num_experts_per_tok is 2, but a token can choose among 1 experts only"),
        ({"routed_scaling": 0.0}, "routed_scaling_factor is 0.0, but must be a positive number"),
    ],
)
def test_impossible_experts(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(MoEConfig(8, 2, 16, "sigmoid", True), **changes)
    assert sentence in str(caught.value)
