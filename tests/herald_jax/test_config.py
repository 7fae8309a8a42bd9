"""ModelConfig, DiffusionContract, RopeConfig and GenerateConfig: every sentence, and the dictionary form."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from herald_jax import (
    ConfigError,
    DiffusionContract,
    GenerateConfig,
    GenerationError,
    HeraldError,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    Sequential,
    Threshold,
)
from tests.herald_jax import tiny

CONTRACT = tiny.SDAR.diffusion


def contract(**changes: Any) -> DiffusionContract:
    return dataclasses.replace(CONTRACT, **changes)


def model(**changes: Any) -> ModelConfig:
    return dataclasses.replace(tiny.SDAR, **changes)


def rope(**changes: Any) -> RopeConfig:
    return RopeConfig(**({"theta": 1e4} | changes))


SENTENCES = {
    "rope-kind": (lambda: rope(kind="dynamic"), "rope scaling 'dynamic' is not supported; supported are default"),
    "rope-theta": (lambda: rope(theta=0.0), "rope_theta is 0.0, but must be positive"),
    "rope-factor": (lambda: rope(kind="linear", factor=0.5), "rope scaling factor is 0.5, but must be at least 1"),
    "llama3-context": (
        lambda: rope(kind="llama3", factor=8.0),
        "rope scaling 'llama3' needs a positive original_max_position_embeddings, got None",
    ),
    "yarn-context": (
        lambda: rope(kind="yarn", original_max_position_embeddings=0),
        "rope scaling 'yarn' needs a positive original_max_position_embeddings, got 0",
    ),
    "llama3-bands": (
        lambda: rope(kind="llama3", original_max_position_embeddings=8, low_freq_factor=4.0),
        "rope scaling 'llama3' needs high_freq_factor (4.0) above low_freq_factor (4.0)",
    ),
    "block-zero": (lambda: contract(block_length=0), "block_length is 0, but must be a positive integer"),
    "block-bool": (lambda: contract(block_length=True), "block_length is True, but must be an integer"),
    "block-text": (lambda: contract(block_length="4"), "block_length is '4', but must be an integer"),
    "mask-text": (lambda: contract(mask_token_id="95"), "mask_token_id is '95', but must be an integer"),
    "stops-text": (lambda: contract(stop_token_ids="12"), "stop_token_ids is '12', but must be a list of token ids"),
    "stops-fraction": (lambda: contract(stop_token_ids=[1, 2.5]), "stop_token_ids is [1, 2.5], but must be a list"),
    "rope-text": (lambda: rope(theta="1e4"), "theta is '1e4', but must be a number"),
    "rope-nan": (lambda: rope(factor=float("nan")), "factor is nan, but must be a number"),
    "rope-dim": (lambda: rope(rotary_dim=8.0), "rotary_dim is 8.0, but must be an integer"),
    "rope-switch": (lambda: rope(truncate=1), "truncate is 1, but must be True or False"),
    "tied": (lambda: model(tie_word_embeddings="no"), "tie_word_embeddings is 'no', but must be True or False"),
    "eps-none": (lambda: model(rms_norm_eps=None), "rms_norm_eps is None, but must be a number"),
    "experts": (
        lambda: MoEConfig(8.0, 2, 16, "softmax", True),  # type: ignore[arg-type]
        "num_experts is 8.0, but must be an integer",
    ),
    "block-large": (
        lambda: contract(block_length=512, small_block_length=512),
        "block_length is 512, but at most 256 is supported",
    ),
    "small-block": (
        lambda: contract(small_block_length=3),
        "block_length 4 is not a multiple of small_block_length 3; give a divisor with --small-block",
    ),
    "small-block-zero": (lambda: contract(small_block_length=0), "small_block_length is 0, but must be a positive"),
    "no-mask": (
        lambda: contract(mask_token_id=None),
        "block_length 4 needs a mask token id; give it with --mask-token-id",
    ),
    "alignment": (
        lambda: contract(logit_alignment="left"),
        "logit_alignment is 'left', but must be one of same, shifted",
    ),
    "canvas": (lambda: contract(first_canvas="noise"), "first_canvas is 'noise', but must be one of all_masked, seed"),
    "seed-rule": (lambda: contract(seed_rule="mean"), "seed_rule is 'mean', but must be one of argmax, sample"),
    "commit": (lambda: contract(commit="causal"), "commit is 'causal', but must be one of bidirectional"),
    "shifted-all-masked": (
        lambda: contract(logit_alignment="shifted"),
        "logit_alignment 'shifted' with first_canvas 'all_masked' is contradictory: shifted logits need a seed token",
    ),
    "same-seeded": (
        lambda: contract(first_canvas="seed_and_masks"),
        "logit_alignment 'same' with first_canvas 'seed_and_masks' is contradictory",
    ),
    "heads": (
        lambda: model(num_heads=5),
        "num_attention_heads 5 is not a multiple of num_key_value_heads 2",
    ),
    "head-dim": (lambda: model(head_dim=15), "head_dim is 15, but rotary embedding needs an even one"),
    "eps": (lambda: model(rms_norm_eps=0.0), "rms_norm_eps is 0.0, but must be positive"),
    "dtype": (lambda: model(dtype="int8"), "dtype is 'int8', but must be one of bfloat16, float16, float32"),
    "mask-outside": (
        lambda: model(diffusion=contract(mask_token_id=96)),
        "mask_token_id is 96, outside the vocabulary of 96 rows",
    ),
    "mask-negative": (
        lambda: model(diffusion=contract(mask_token_id=-1)),
        "mask_token_id is -1, outside the vocabulary of 96 rows",
    ),
    "pad-outside": (
        lambda: model(diffusion=contract(pad_token_id=200)),
        "pad_token_id is 200, outside the vocabulary of 96 rows",
    ),
    "stop-outside": (
        lambda: model(diffusion=contract(stop_token_ids=(1, 97))),
        "stop_token_ids[1] is 97, outside the vocabulary of 96 rows",
    ),
    "mask-stops": (
        lambda: model(diffusion=contract(stop_token_ids=(tiny.MASK,))),
        "mask_token_id 95 is also a stop token id",
    ),
} | {
    f"size-{name}": (
        lambda name=name: model(**{name: -1}),
        f"{name} is -1, but must be a positive integer",
    )
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "max_position_embeddings",
    )
}  # fmt: skip

REQUESTS = {
    "tokens": ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be a positive integer"),
    "tokens-float": ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, but"),
    "policy": (
        {"policy": "greedy"},
        "policy is 'greedy', but must be one of StaticLowConfidence, Threshold, EntropyBound, Sequential",
    ),
    "cold": ({"temperature": -0.1}, "temperature is -0.1, but must be 0 (greedy) or a positive number"),
    "text": ({"temperature": "a"}, "temperature is 'a', but must be 0 (greedy) or a positive number"),
    "switch": ({"top_p": True}, "top_p is True, but must be in (0, 1]"),
    "hot": ({"temperature": float("inf")}, "temperature is inf, but"),
    "nan": ({"temperature": float("nan")}, "temperature is nan, but"),
    "top-k": ({"top_k": -1}, "top_k is -1, but must be 0 (off) or a positive integer"),
    "top-k-float": ({"top_k": 0.5}, "top_k is 0.5, but"),
    "top-p-zero": ({"top_p": 0.0}, "top_p is 0.0, but must be in (0, 1]"),
    "top-p": ({"top_p": 1.1}, "top_p is 1.1, but must be in (0, 1]"),
    "seed": ({"seed": 2**63}, "seed is 9223372036854775808, but must be an integer of 64 bits"),
    "seed-text": ({"seed": "lucky"}, "seed is 'lucky', but must be an integer"),
    "chunk": ({"prefill_chunk": 0}, "prefill_chunk is 0, but must be a positive number of tokens"),
    "room": ({"room": -1}, "room is -1, but must be 0 (what is needed) or a positive number"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_model_configurations_are_refused_in_a_sentence(name: str) -> None:
    make, sentence = SENTENCES[name]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_are_refused_in_a_sentence(name: str) -> None:
    fields, sentence = REQUESTS[name]
    with pytest.raises(GenerationError, match=re.escape(sentence)):
        GenerateConfig(**fields)


@pytest.mark.parametrize("config", tiny.FORMS.values(), ids=tiny.FORMS)
def test_dictionary_form_survives_json(config: ModelConfig) -> None:
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert isinstance(again.diffusion.stop_token_ids, tuple)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda d: d.update(experts=8), "ModelConfig has unknown fields experts; was it written by a newer version?"),
        (lambda d: d["rope"].update(b=1, a=2), "RopeConfig has unknown fields a, b; was it"),
        (lambda d: d["diffusion"].update(edit=0.5), "DiffusionContract has unknown fields edit"),
        (lambda d: d.pop("head_dim"), "ModelConfig lacks the fields head_dim"),
        (lambda d: d["rope"].pop("theta"), "RopeConfig lacks the fields theta"),
        (lambda d: d.pop("rope"), "RopeConfig must be a mapping of fields, got NoneType"),
        (lambda d: d.update(diffusion=[4, 4]), "DiffusionContract must be a mapping of fields, got list"),
        (lambda d: d.update(num_heads=3), "num_attention_heads 3 is not a multiple"),
    ],
)
def test_from_dict_is_strict(edit: Any, sentence: str) -> None:
    values = tiny.SDAR.to_dict()
    edit(values)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ModelConfig.from_dict(values)


def test_from_dict_leaves_its_argument_alone_and_fills_defaults() -> None:
    values = tiny.SDAR.to_dict()
    del values["rope"]["kind"], values["diffusion"]["stop_token_ids"]
    before = json.dumps(values)
    config = ModelConfig.from_dict(values)
    assert json.dumps(values) == before
    assert config.rope.kind == "default"
    assert config.diffusion.stop_token_ids == ()


def test_derived_figures() -> None:
    assert tiny.FAST_DLLM.group_size == 3
    assert tiny.SDAR.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model(dtype="bfloat16").kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert tiny.FAST_DLLM.diffusion.seeded
    assert not CONTRACT.seeded


def test_requests_are_hashable_and_default_to_the_documented_values() -> None:
    config = GenerateConfig()
    assert config.policy == Threshold(0.9)
    assert (config.temperature, config.top_k, config.top_p, config.seed) == (0.0, 0, 1.0, 0)
    assert config.stop_token_ids is None
    listed = GenerateConfig(stop_token_ids=[3, 4], policy=Sequential(2))  # type: ignore[arg-type]
    assert listed.stop_token_ids == (3, 4)
    assert hash(listed) == hash(GenerateConfig(stop_token_ids=(3, 4), policy=Sequential(2)))


def test_user_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, HeraldError)
    assert issubclass(GenerationError, HeraldError)
    assert issubclass(HeraldError, ValueError)


def test_numpys_numbers_become_pythons():
    """A configuration that was computed is the one that was written down, also as text."""
    computed = model(
        num_layers=np.int64(tiny.SDAR.num_layers), rms_norm_eps=np.float64(tiny.SDAR.rms_norm_eps),
        qk_norm=np.bool_(tiny.SDAR.qk_norm), diffusion=contract(stop_token_ids=[np.int32(i) for i in (1, 2)]),
    )  # fmt: skip
    assert computed == model(diffusion=contract(stop_token_ids=(1, 2)))
    assert ModelConfig.from_dict(json.loads(json.dumps(computed.to_dict()))) == computed
