"""Reading Hugging Face configuration files: published spellings, what is supplied, and every refusal's sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from herald_jax.config import RopeConfig
from herald_jax.errors import ConfigError
from herald_jax.hf_config import HFConfig, Overrides, read_hf_config
from tests.convert.checkpoints import CONFIG, FAST_DLLM, SDAR, config_without


def read(directory: Path, config: dict[str, Any], files: dict[str, Any] | None = None, **flags: Any) -> HFConfig:
    (directory / "config.json").write_text(json.dumps(config))
    for name, value in (files or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        (directory / name).write_text(text)
    return read_hf_config(directory, Overrides(**flags))


def error(directory: Path, config: dict[str, Any], files: dict[str, Any] | None = None, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(directory, config, files, **flags)
    return str(caught.value)


# -- published checkpoints ---------------------------------------------------------------------------------------------

# The fields that matter of JetAstra/SDAR training/model/SDAR-4B-Chat (config.json, generation_config.json,
# added_tokens.json, tokenizer_config.json), values as published.
SDAR_4B = {
    "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "block_size": 4,
    "mask_token_id": 151669,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SDAR_4B_FILES = {
    "generation_config.json": {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
    },
    # The two files spell the mask token differently; the id is what counts.
    "added_tokens.json": {"<MASK>": 151669, "<|endoftext|>": 151643, "<|im_end|>": 151645},
    "tokenizer_config.json": {
        "added_tokens_decoder": {
            "151643": {"content": "<|endoftext|>", "special": True},
            "151669": {"content": "<|MASK|>", "special": False},
        },
        "eos_token": "<|endoftext|>",
        "mask_token": "<|MASK|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    },
}
# Fast_dLLM_v2_7B: Qwen2.5-7B-Instruct's fields plus what its configuration builder adds.
FAST_DLLM_7B = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
    "bd_size": 32,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_sdar_4b_as_published(tmp_path: Path) -> None:
    found = read(tmp_path, SDAR_4B, SDAR_4B_FILES)
    c, d = found.config, found.config.diffusion
    assert (c.family, c.head_dim, c.num_heads, c.num_kv_heads, c.hidden_size) == ("sdar", 128, 32, 8, 2560)
    assert (c.tie_word_embeddings, c.qkv_bias, c.out_bias, c.qk_norm, c.dtype) == (
        False,
        False,
        False,
        True,
        "bfloat16",
    )
    assert c.rope == RopeConfig(theta=1e6)
    assert (d.block_length, d.small_block_length, d.mask_token_id) == (4, 4, 151669)
    assert (d.logit_alignment, d.first_canvas, d.stop_token_ids, d.pad_token_id) == (
        "same",
        "all_masked",
        (151645, 151643),
        151643,
    )
    assert found.notes == (
        "logit_alignment same supplied by family sdar: its config.json never states it",
        "first_canvas all_masked supplied by family sdar: its config.json never states it",
    )


def test_fast_dllm_v2_7b_as_published(tmp_path: Path) -> None:
    found = read(tmp_path, FAST_DLLM_7B, {"generation_config.json": {"eos_token_id": [151645], "pad_token_id": 151643}})
    c, d = found.config, found.config.diffusion
    assert (c.family, c.head_dim, c.group_size, c.qkv_bias, c.out_bias, c.qk_norm) == (
        "fast_dllm_v2",
        128,
        7,
        True,
        False,
        False,
    )
    assert (d.block_length, d.small_block_length, d.mask_token_id, d.seed_rule) == (32, 8, 151665, "argmax")
    assert (d.logit_alignment, d.first_canvas, d.stop_token_ids) == ("shifted", "seed_and_masks", (151645,))
    assert found.notes == (
        "mask_token_id 151665 supplied by family fast_dllm_v2: its config.json never states it",
        "logit_alignment shifted supplied by family fast_dllm_v2: its config.json never states it",
        "first_canvas seed_and_masks supplied by family fast_dllm_v2: its config.json never states it",
        "small_block_length 8 supplied by family fast_dllm_v2: its config.json never states it",
    )


def test_a_causal_model_is_the_ar_limit(tmp_path: Path) -> None:
    found = read(tmp_path, CONFIG)
    d = found.config.diffusion
    assert (d.block_length, d.small_block_length, d.mask_token_id, d.seed_rule) == (1, 1, None, "sample")
    assert found.notes[0] == (
        "block_length 1 supplied by family qwen3: a causal language model runs as the AR limit of the block path"
    )


def test_an_unstated_tie_is_supplied_and_noted(tmp_path: Path) -> None:
    found = read(tmp_path, config_without("tie_word_embeddings"))
    assert not found.config.tie_word_embeddings
    assert found.notes[0] == "tie_word_embeddings false supplied by family qwen3: config.json does not state it"


def test_both_spellings_are_the_same_config(tmp_path: Path) -> None:
    old = read(tmp_path, CONFIG).config
    new = config_without(
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        dtype="bfloat16",
    )
    assert read(tmp_path, new).config == old


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(1e4, "linear", 2.0)),
        ({"rope_type": "yarn", **YARN}, RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=32768)),
        ({"rope_type": "default"}, RopeConfig(1e4)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
    ids=lambda v: v.kind if isinstance(v, RopeConfig) else None,
)
def test_rope_scalings(tmp_path: Path, scaling: dict[str, Any], expected: RopeConfig) -> None:
    assert read(tmp_path, config_without(rope_scaling=scaling)).config.rope == expected
    new = config_without("rope_theta", "rope_scaling", rope_parameters={"rope_theta": 1e4, **scaling})
    assert read(tmp_path, new).config.rope == expected


# -- values that flags supply ------------------------------------------------------------------------------------------


def test_flags_win_and_say_so(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        SDAR,
        block_length=8,
        small_block=4,
        mask_token_id=7,
        stop_token_ids=(3,),
        dtype="float32",
        logit_alignment="shifted",
        first_canvas="seed_and_masks",
    )
    d = found.config.diffusion
    assert (d.block_length, d.small_block_length, d.mask_token_id, d.stop_token_ids) == (8, 4, 7, (3,))
    assert (found.config.dtype, d.logit_alignment, d.first_canvas) == ("float32", "shifted", "seed_and_masks")
    assert found.notes == (
        "dtype float32 given by --dtype: config.json says bfloat16",
        "block_length 8 given by --block-length: config.json says block_size 4",
        "mask_token_id 7 given by --mask-token-id: mask_token_id in config.json says 39",
        "logit_alignment shifted given by --logit-alignment: family sdar has same",
        "first_canvas seed_and_masks given by --first-canvas: family sdar has all_masked",
        "small_block_length 4 given by --small-block",
    )


def test_a_flag_settles_a_contradiction(tmp_path: Path) -> None:
    config = {**SDAR, "block_length": 8}
    assert error(tmp_path, config) == (
        "config.json contradicts itself: block_size 4, block_length 8; say which with --block-length"
    )
    assert read(tmp_path, config, block_length=8).config.diffusion.block_length == 8


def test_stop_ids_prefer_generation_config_and_may_be_none(tmp_path: Path) -> None:
    files = {"generation_config.json": {"eos_token_id": [5, 2, 5]}}
    assert read(tmp_path, CONFIG, files).config.diffusion.stop_token_ids == (5, 2)
    assert read(tmp_path, CONFIG, stop_token_ids=()).config.diffusion.stop_token_ids == ()


def test_the_mask_id_comes_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = {"mask_token": {"content": "<|MASK|>"}}
    added = {"added_tokens": [{"id": 38, "content": "<|MASK|>"}]}
    files = {"tokenizer_config.json": tokenizer, "tokenizer.json": added}
    config = config_without("mask_token_id", base=SDAR)
    assert read(tmp_path, config, files).config.diffusion.mask_token_id == 38
    assert error(tmp_path, SDAR, files) == (
        "the mask token id is contradictory: mask_token_id in config.json says 39, the tokenizer's mask_token "
        "'<|MASK|>' says 38; say which with --mask-token-id"
    )


def test_fast_dllm_finds_its_mask_token_by_name(tmp_path: Path) -> None:
    files = {"added_tokens.json": {"|<MASK>|": 151700}}
    assert read(tmp_path, FAST_DLLM, files).config.diffusion.mask_token_id == 151700


def test_fast_dllm_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    files = {"added_tokens.json": {"<tool_response>": 151665}}  # Qwen3's table
    assert error(tmp_path, FAST_DLLM, files) == (
        "family fast_dllm_v2 masks with id 151665 '|<MASK>|', but the tokenizer has '<tool_response>' there; "
        "give --mask-token-id"
    )
