"""Configurations that are refused, each with its sentence."""

from pathlib import Path
from typing import Any

import pytest

from herald_jax.errors import ConfigError
from herald_jax.hf_config import read_hf_config
from tests.convert.checkpoints import CONFIG, LLAMA, SDAR, config_without
from tests.herald_jax.test_hf_config import error, read

MOE = "of the mixture-of-experts families only LLaDA2 and SDAR-MoE are supported"
KNOWN = "fast_dllm_v2, sdar, sdar_moe, llada2, llama, qwen2, qwen3"


@pytest.mark.parametrize(
    ("model_type", "architecture", "sentence"),
    [
        (
            "wedlm",
            "WeDLMForCausalLM",
            "wedlm is not supported: WeDLM denoises under causal attention with reordered positions",
        ),
        (
            "nemotron_labs_diffusion",
            "NemotronLabsDiffusionModel",
            "nemotron_labs_diffusion is not supported: Nemotron-Labs-Diffusion commits its blocks causally and scales "
            "its queries by position",
        ),
        (
            "diffusion_gemma",
            "DiffusionGemmaForBlockDiffusion",
            "diffusion_gemma is not supported: DiffusionGemma denoises uniform noise and commits its blocks causally",
        ),
        ("qwen3_moe", "Qwen3MoeForCausalLM", f"qwen3_moe is not supported: {MOE}"),
        (
            "llada",
            "LLaDAModelLM",
            "llada is not supported: LLaDA attends to the whole sequence, not block by block",
        ),
        ("Dream", "DreamModel", "Dream is not supported: Dream attends to the whole sequence, not block by block"),
        (
            "gemma3",
            "Gemma3ForCausalLM",
            f"architecture Gemma3ForCausalLM is not supported; supported families are {KNOWN}; if its modelling code "
            "is that of one of them, say which with --family",
        ),
        (
            "qwen2",
            "Qwen3ForCausalLM",
            "config.json contradicts itself: model_type 'qwen2', architectures Qwen3ForCausalLM; say which is right "
            "with --family",
        ),
    ],
)
def test_refused_architectures(tmp_path: Path, model_type: str, architecture: str, sentence: str) -> None:
    assert error(tmp_path, config_without(model_type=model_type, architectures=[architecture])) == sentence


CAUSAL_CODE = (
    "the checkpoint's own modelling code is causal (I-DLM's use_regular_causal), not block diffusion; to run it as the "
    "causal model it is, give --family qwen3"
)


def test_i_dlm_imports_as_sdar_but_is_causal(tmp_path: Path) -> None:
    """I-DLM's config.json is SDAR's; the code it ships tells."""
    code = {
        "modeling_sdar.py": "def block_diff_mask(b, h, q, kv, block_size=None, n=None, use_regular_causal=True): ..."
    }
    assert error(tmp_path, SDAR, code) == CAUSAL_CODE
    assert error(tmp_path, SDAR, code, family="sdar") == CAUSAL_CODE
    assert read(tmp_path, SDAR, code, family="qwen3").config.diffusion.block_length == 1


def test_i_dlm_by_its_config_or_name(tmp_path: Path) -> None:
    assert error(tmp_path, {**SDAR, "use_regular_causal": True}) == CAUSAL_CODE
    assert error(tmp_path, {**SDAR, "architectures": ["I-DLMForCausalLM"]}) == CAUSAL_CODE


def test_family_flag_takes_an_unknown_name(tmp_path: Path) -> None:
    """Stable-DiffCoder: Llama's network, its own class name, a contract that nothing states."""
    config = config_without(base=LLAMA, architectures=["StableDiffcoderForCausalLM"], vocab_size=155136, eos_token_id=2)
    found = read(
        tmp_path,
        config,
        family="llama",
        block_length=4,
        mask_token_id=5,
        logit_alignment="same",
        first_canvas="all_masked",
    )
    assert found.config.family == "llama"
    assert (found.config.diffusion.block_length, found.config.diffusion.mask_token_id) == (4, 5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_experts": 128},
            "num_experts is 128, but family qwen3 has no experts; say whose it is with --family",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "the checkpoint is quantised (fp8); convert the unquantised one",
        ),
        ({"mlp_bias": True}, "mlp_bias is true, but the MLP of the supported families has no bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but the supported families use 'silu'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention, but only full_attention layers are supported",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
            "layers 1 to 1 use a sliding window of 4096 (use_sliding_window is true); sliding windows are not "
            "supported",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic' is not supported; supported are default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope scaling 'yarn' needs original_max_position_embeddings in rope_scaling",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}},
            "rope_scaling has fields that rope scaling 'linear' does not use: mrope_section",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling {'factor': 2.0} states no rope_type"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_scaling contradicts itself: rope_type 'linear', type 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            "config.json contradicts itself: rope_theta 10000.0, rope_parameters.rope_theta 1000000.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters differ per layer type, which is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but only whole-head rotation is supported"),
        ({"rope_theta": "1e6"}, "rope_theta in config.json is '1e6', but must be a number"),
        (
            {"num_attention_heads": 5},
            "num_attention_heads 5 is not a multiple of num_key_value_heads 2",
        ),
        ({"head_dim": 5}, "head_dim is 5, but rotary embedding needs an even one"),
        ({"hidden_size": -1}, "hidden_size in config.json is -1, but must be a positive integer"),
        ({"vocab_size": True}, "vocab_size in config.json is True, but must be a positive integer"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps in config.json is 'tiny', but must be a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in config.json is 'no', but must be true or false"),
        (
            {"torch_dtype": "float8_e4m3fn"},
            "torch_dtype in config.json is 'float8_e4m3fn', but must be one of bfloat16, float16, float32; choose with "
            "--dtype",
        ),
        (
            {"dtype": "float32"},
            "config.json contradicts itself: dtype float32, torch_dtype bfloat16; say which with --dtype",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id in config.json is '</s>', but must be an id or a list of ids"),
        ({"eos_token_id": 40}, "stop_token_ids[0] is 40, outside the vocabulary of 40 rows"),
    ],
    ids=lambda v: None if isinstance(v, str) else "+".join(v),
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert error(tmp_path, config_without(**changes)) == sentence


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hidden_size", "config.json does not state hidden_size; add it to config.json, the value is not guessed"),
        ("rope_theta", "config.json does not state rope_theta; add it to config.json, the value is not guessed"),
        ("head_dim", "config.json does not state head_dim; add it to config.json, the value is not guessed"),
        ("rms_norm_eps", "config.json does not state rms_norm_eps; add it to config.json, the value is not guessed"),
        ("torch_dtype", "config.json states neither dtype nor torch_dtype; give --dtype"),
        (
            "block_size",
            "config.json does not state the block length (block_size or block_length); give --block-length",
        ),
        (
            "mask_token_id",
            "neither config.json (mask_token_id) nor the tokenizer (mask_token) states the mask token id; give "
            "--mask-token-id",
        ),
        (
            "eos_token_id",
            "neither generation_config.json, config.json nor the tokenizer states an end-of-text id; give "
            "--stop-token-ids (or --stop-token-ids none)",
        ),
    ],
)
def test_missing_fields_name_what_supplies_them(tmp_path: Path, name: str, sentence: str) -> None:
    assert error(tmp_path, config_without(name, base=SDAR)) == sentence


@pytest.mark.parametrize(
    ("base", "flags", "sentence"),
    [
        (
            SDAR,
            {"mask_token_id": 40},
            "mask_token_id 40 (--mask-token-id) is outside the vocabulary of 40 rows; give --mask-token-id",
        ),
        (
            SDAR,
            {"small_block": 3},
            "block_length 4 is not a multiple of small_block_length 3; give a divisor with --small-block",
        ),
        (
            SDAR,
            {"logit_alignment": "shifted"},
            "logit_alignment 'shifted' with first_canvas 'all_masked' is contradictory: shifted logits need a seed "
            "token at position 0 (--first-canvas seed_and_masks), same-position logits need all masks (--first-canvas "
            "all_masked)",
        ),
        (SDAR, {"stop_token_ids": (39,)}, "mask_token_id 39 is also a stop token id"),
        (
            CONFIG,
            {"block_length": 4},
            "neither config.json (mask_token_id) nor the tokenizer (mask_token) states the mask token id; give "
            "--mask-token-id",
        ),
    ],
    ids=["mask id", "small block", "alignment", "stop id", "causal base"],
)
def test_wrong_flags(tmp_path: Path, base: dict[str, Any], flags: dict[str, Any], sentence: str) -> None:
    assert error(tmp_path, base, **flags) == sentence


def test_the_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    files = {"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 57}}, "added_tokens": []}}
    assert error(tmp_path, CONFIG, files) == (
        "the tokenizer has ids up to 57, but vocab_size is 40; the tokenizer files belong to another checkpoint"
    )


def test_files_that_are_not_json(tmp_path: Path) -> None:
    assert error(tmp_path, CONFIG, {"generation_config.json": "{"}).startswith(
        f"{tmp_path}/generation_config.json is not valid JSON: "
    )
    (tmp_path / "generation_config.json").write_text("[1]")
    assert error(tmp_path, CONFIG) == f"{tmp_path}/generation_config.json holds a JSON list instead of an object"


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json$"):
        read_hf_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapter: merge it into its base model first"):
        read_hf_config(tmp_path)


def test_llama_details(tmp_path: Path) -> None:
    config = config_without(
        "num_key_value_heads", "head_dim", base=LLAMA, hidden_size=24, attention_bias=True, pad_token_id=-1
    )
    found = read(tmp_path, config)
    assert (found.config.num_kv_heads, found.config.head_dim) == (6, 4)
    assert (found.config.qkv_bias, found.config.out_bias, found.config.diffusion.pad_token_id) == (True, True, None)
    assert found.notes[0] == (
        "num_key_value_heads 6 supplied by family llama: config.json does not state it, so every head has its own keys"
    )
    assert error(tmp_path, config_without("head_dim", base=LLAMA, num_attention_heads=5)).startswith(
        "hidden_size 12 is not a multiple of num_attention_heads 5"
    )
