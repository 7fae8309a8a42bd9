"""The families of checkpoints that are understood, and those that are refused by name or by their modelling code.

Sources of the facts: JetAstra/SDAR `training/model/SDAR-*-Chat/` and OpenMOSS/DiRL `models/sdar/config.json` (SDAR),
Fast-dLLM v2's published `generation_functions.py` and configuration (mask id 151665, small block 8), the configuration
classes of `transformers` (Llama, Qwen2, Qwen3); I-DLM's `modeling_sdar.py`, which imports as SDAR and is causal;
inclusionAI/dFactory (LLaDA2) and sgl-project/sglang `srt/dllm/config.py` (LLaDA2's block length and mask id).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herald_jax.errors import ConfigError
from herald_jax.hf_files import RawFiles


@dataclass(frozen=True)
class Family:
    """What is true of a family's modelling code and never written in its checkpoints.

    Attributes:
      model_types, architectures: how config.json names it.
      qkv_bias: True or False whatever config.json says, or "attention_bias" to read that field.
      out_bias: likewise for the output projection.
      qk_norm: per-head RMS norm of q and k before rotation.
      block_fields: fields of config.json that state the block length; empty for causal models (block length 1).
      small_block: sub-block length of the published sampler; None = the whole block.
      mask_token_id: (id, token) hard-coded by the published code; None = the checkpoint states it. A token of "" means
        that the id's name is not known, and so not compared with the tokenizer's.
      head_dim_from_hidden: head_dim is hidden_size / heads where config.json does not state it.
      block_length: that of the published code, where config.json may leave it out; None = it must be stated.
      moe: how config.json spells the expert layers (`hf_moe.read_moe`); None = a dense family.
      partial_rotary: part of each head is rotated, and config.json says how much.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    qkv_bias: bool | str
    out_bias: bool | str
    qk_norm: bool
    logit_alignment: str
    first_canvas: str
    seed_rule: str
    block_fields: tuple[str, ...] = ()
    small_block: int | None = None
    mask_token_id: tuple[int, str] | None = None
    head_dim_from_hidden: bool = False
    block_length: int | None = None
    moe: str | None = None
    partial_rotary: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "fast_dllm_v2",
            ("Fast_dLLM_Qwen",),
            ("Fast_dLLM_QwenForCausalLM",),
            qkv_bias=True,
            out_bias=False,
            qk_norm=False,
            logit_alignment="shifted",
            first_canvas="seed_and_masks",
            seed_rule="argmax",
            block_fields=("bd_size",),
            small_block=8,
            mask_token_id=(151665, "|<MASK>|"),
            head_dim_from_hidden=True,
        ),
        Family(  # SDAR, TraDo and DiRL: the same modelling code and names
            "sdar",
            ("sdar",),
            ("SDARForCausalLM",),
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=True,
            logit_alignment="same",
            first_canvas="all_masked",
            seed_rule="argmax",
            block_fields=("block_size", "block_length"),
        ),
        Family(
            "sdar_moe",
            ("sdar_moe",),
            ("SDARMoeForCausalLM",),
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=True,
            logit_alignment="same",
            first_canvas="all_masked",
            seed_rule="argmax",
            block_fields=("block_size", "block_length"),
            moe="sdar_moe",
        ),
        Family(  # LLaDA2.0 and 2.1; dFactory's checkpoints call themselves llada2_moe_veomni
            "llada2",
            ("llada2_moe", "llada2_moe_veomni"),
            ("LLaDA2MoeModelLM",),
            qkv_bias="use_qkv_bias",
            out_bias="use_bias",
            qk_norm=True,
            logit_alignment="same",
            first_canvas="all_masked",
            seed_rule="argmax",
            block_fields=("block_size", "block_length"),
            block_length=32,
            mask_token_id=(156895, ""),
            moe="llada2",
            partial_rotary=True,
        ),
        Family(
            "llama",
            ("llama",),
            ("LlamaForCausalLM",),
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=False,
            head_dim_from_hidden=True,
            logit_alignment="shifted",
            first_canvas="seed_and_masks",
            seed_rule="sample",
        ),
        Family(
            "qwen2",
            ("qwen2",),
            ("Qwen2ForCausalLM",),
            qkv_bias=True,
            out_bias=False,
            qk_norm=False,
            head_dim_from_hidden=True,
            logit_alignment="shifted",
            first_canvas="seed_and_masks",
            seed_rule="sample",
        ),
        Family(
            "qwen3",
            ("qwen3",),
            ("Qwen3ForCausalLM",),
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            qk_norm=True,
            logit_alignment="shifted",
            first_canvas="seed_and_masks",
            seed_rule="sample",
        ),
    )
}

# Part of a model_type or architecture name (lower case, first match wins) → why such a checkpoint is refused.
_REFUSED = (
    ("wedlm", "WeDLM denoises under causal attention with reordered positions"),
    ("nemotron", "Nemotron-Labs-Diffusion commits its blocks causally and scales its queries by position"),
    ("diffusion_gemma", "DiffusionGemma denoises uniform noise and commits its blocks causally"),
    ("diffusiongemma", "DiffusionGemma denoises uniform noise and commits its blocks causally"),
    ("llada", "LLaDA attends to the whole sequence, not block by block"),
    ("dream", "Dream attends to the whole sequence, not block by block"),
    ("moe", "of the mixture-of-experts families only LLaDA2 and SDAR-MoE are supported"),
    ("mixtral", "of the mixture-of-experts families only LLaDA2 and SDAR-MoE are supported"),
)
# What the names of supported families have in common with refused ones must not be held against them.
_ACCEPTED = ("llada2", "sdarmoe", "sdar_moe")


def pick_family(files: RawFiles, flag: str | None) -> Family:
    """The family that config.json names, or the one that `--family` names.

    Raises: ConfigError if the checkpoint names no family, several, an unknown one, or one that cannot run here.
    """
    config = files.config
    names = [config.get("model_type"), *(config.get("architectures") or ()), *(config.get("auto_map") or {}).values()]
    names = [name for name in names if isinstance(name, str)]
    causal_code = bool(config.get("use_regular_causal")) or "use_regular_causal" in files.modelling_code
    causal_name = any("idlm" in name.lower().replace("-", "").replace("_", "") for name in names)
    known = ", ".join(FAMILIES)
    if flag is not None and flag not in FAMILIES:
        raise ConfigError(f"--family is {flag!r}, but must be one of {known}")
    if causal_code or causal_name:
        # Its weights are those of a causal Qwen3; as that, and only as that, it can run.
        if flag is None or FAMILIES[flag].block_fields:
            raise ConfigError(
                "the checkpoint's own modelling code is causal (I-DLM's use_regular_causal), not block diffusion; "
                "to run it as the causal model it is, give --family qwen3"
            )
        return FAMILIES[flag]
    for name in names:
        if any(part in name.lower() for part in _ACCEPTED):
            continue
        for part, reason in _REFUSED:
            if part in name.lower():
                raise ConfigError(f"{name} is not supported: {reason}")
    if flag is not None:
        return FAMILIES[flag]
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    by_type = {f.name for f in FAMILIES.values() if model_type in f.model_types}
    by_name = {f.name for f in FAMILIES.values() for a in architectures if a in f.architectures}
    if architectures and not by_name:
        raise ConfigError(
            f"architecture {architectures[0]} is not supported; supported families are {known}; if its modelling "
            "code is that of one of them, say which with --family"
        )
    if model_type is not None and not by_type:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported families are {known}; if its modelling code is "
            "that of one of them, say which with --family"
        )
    found = by_type | by_name
    if not found:
        raise ConfigError(f"config.json states neither model_type nor architectures; give --family ({known})")
    if len(found) > 1:
        raise ConfigError(
            f"config.json contradicts itself: model_type {model_type!r}, architectures {', '.join(architectures)}; "
            "say which is right with --family"
        )
    return FAMILIES[found.pop()]


def refuse_variants(c: Mapping[str, Any], family: Family) -> None:
    """Raise ConfigError if a parsed config.json switches on something that the transformer here does not compute."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if c.get(name) and family.moe is None:
            raise ConfigError(
                f"{name} is {c[name]}, but family {family.name} has no experts; say whose it is with --family"
            )
    if c.get("quantization_config"):
        method = c["quantization_config"].get("quant_method", "unknown method")
        raise ConfigError(f"the checkpoint is quantised ({method}); convert the unquantised one")
    if c.get("mlp_bias"):
        raise ConfigError("mlp_bias is true, but the MLP of the supported families has no bias")
    activation = c.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act is {activation!r}, but the supported families use 'silu'")
    other = sorted({t for t in c.get("layer_types") or () if t != "full_attention"})
    if other:
        raise ConfigError(f"layer_types has {', '.join(other)}, but only full_attention layers are supported")
    window, layers = c.get("sliding_window"), c.get("num_hidden_layers")
    if c.get("use_sliding_window") and window is not None:
        first = c.get("max_window_layers", 0)
        if isinstance(layers, int) and isinstance(first, int) and first < layers:
            raise ConfigError(
                f"layers {first} to {layers - 1} use a sliding window of {window} (use_sliding_window is true); "
                "sliding windows are not supported"
            )
