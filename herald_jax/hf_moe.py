"""Expert fields of config.json, in the spellings of LLaDA2 (inclusionAI's BailingMoE code) and SDAR-MoE (Qwen3-MoE's).

Sources of the facts: inclusionAI/dFactory `configs/model_configs/llada2_{mini,flash}/config.json` and
`models/llada2_moe/modeling_llada2_moe.py`; transformers' Qwen3-MoE, whose modelling code SDAR-MoE's follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.config import MoEConfig
from herald_jax.errors import ConfigError

# Switches of LLaDA2's modelling code that change what is computed, with the only value that is understood here.
_LLADA2_FIXED = {
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "norm_topk_prob": True,
    "norm_head": False,
    "norm_softmax": False,
    "use_rmsnorm": True,
    "use_qk_norm": True,
    "moe_router_enable_expert_bias": True,
    "using_split_qkv_in_self_attention": False,
}


def read_moe(config: Mapping[str, Any], style: str) -> MoEConfig:
    """The `MoEConfig` of a parsed config.json; `style` is "llada2" or "sdar_moe" (`hf_families.Family.moe`).

    Raises: ConfigError, one sentence, if a field is missing, not a number of its kind, or asks for something else than
      the family's modelling code computes.
    """
    return _llada2(config) if style == "llada2" else _sdar_moe(config)


def _llada2(config: Mapping[str, Any]) -> MoEConfig:
    for name, only in _LLADA2_FIXED.items():
        value = config.get(name)
        if value is not None and value != only:
            raise ConfigError(f"{name} in config.json is {value!r}, but LLaDA2 is supported with {only!r} only")
    if config.get("expert_capacity") is not None:
        raise ConfigError(
            f"expert_capacity is {config['expert_capacity']}: this is LLaDA2.2, which deletes and splits positions "
            "while it writes (its DELETE and SPLIT tokens), and that is not supported; LLaDA2.0 and 2.1 are"
        )
    width, dense = _integer(config, "moe_intermediate_size"), _integer(config, "first_k_dense_replace", least=0)
    if dense >= config.get("num_hidden_layers", dense + 1):
        raise ConfigError(
            f"first_k_dense_replace {dense} leaves no layer with experts: num_hidden_layers is "
            f"{config['num_hidden_layers']}"
        )
    return MoEConfig(
        num_experts=_integer(config, "num_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        intermediate_size=width,
        router="sigmoid",
        # The published code divides by the sum unless it has but one weight.
        renormalise=_integer(config, "num_experts_per_tok") > 1,
        routed_scaling=_number(config, "routed_scaling_factor"),
        expert_bias=True,
        num_groups=_integer(config, "n_group"),
        groups_per_token=_integer(config, "topk_group"),
        shared_size=width * _integer(config, "num_shared_experts", least=0),
        first_dense_layers=dense,
    )


def _sdar_moe(config: Mapping[str, Any]) -> MoEConfig:
    if config.get("mlp_only_layers"):
        raise ConfigError(f"mlp_only_layers is {config['mlp_only_layers']}, but every layer must have experts")
    if config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"decoder_sparse_step in config.json is {config['decoder_sparse_step']!r}, but only 1 (every layer has "
            "experts) is supported"
        )
    renormalise = config.get("norm_topk_prob")
    if not isinstance(renormalise, bool):
        raise ConfigError(
            f"norm_topk_prob in config.json is {renormalise!r}, but must be true or false; the value is not guessed"
        )
    return MoEConfig(
        num_experts=_integer(config, "num_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        intermediate_size=_integer(config, "moe_intermediate_size"),
        router="softmax",
        renormalise=renormalise,
    )


def _integer(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = _stated(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} in config.json is {value!r}, but must be an integer of at least {least}")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = _stated(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} in config.json is {value!r}, but must be a number")
    return float(value)


def _stated(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        raise ConfigError(f"config.json does not state {name}; add it to config.json, the value is not guessed")
    return value
