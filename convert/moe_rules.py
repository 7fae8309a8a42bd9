"""The rules of mixtures of experts: LLaDA2 and SDAR-MoE, in every layout their checkpoints are published in.

Layouts of the experts of a layer, below `model.layers.{layer}.mlp.`:

* "per expert": `experts.{expert}.{gate,up,down}_proj.weight`, as transformers saves them and all of the models' own
  repositories have them;
* "stacked": `experts.{gate,up,down}_proj`, all experts in one tensor each (dFactory's `moe_convertor.py`, for VeOmni);
* "fused": `experts.gate_up_proj` and `experts.down_proj`, the names of transformers' modules;
* "dInfer": `w1` (gate above up) and `w2` (dInfer's `tools/transfer.py`).
"""

from __future__ import annotations

import numpy as np

from convert.rules import (
    DOWN,
    EMBEDDING,
    GATE,
    HEAD,
    HEAD_NORM,
    NORM,
    OUT_BIAS,
    OUTPUT,
    RULES,
    UP,
    Rule,
    Shape,
    Transform,
    gate_or_up,
    heads_part,
    transposed,
    transposed_into,
)
from herald_jax.config import ModelConfig, MoEConfig


def _moe(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None  # the families of these tables have experts
    return config.moe


# -- transforms --------------------------------------------------------------------------------------------------------


def _fused_qkv(leaf: np.ndarray, tensor: np.ndarray) -> None:
    """All heads of a layer, in rows [query heads | key heads | value heads], or their biases."""
    kv_heads, parts, dim = leaf.shape[-3:]
    ends = np.cumsum([kv_heads * (parts - 2) * dim, kv_heads * dim])
    for (first, last), rows in zip(((0, -2), (-2, -1), (-1, None)), np.split(tensor, ends), strict=True):
        heads_part(first, last)(leaf, rows)


def _fused_gate_up(leaf: np.ndarray, tensor: np.ndarray) -> None:
    gate, up = np.split(tensor, 2)
    transposed_into((leaf[:, 0, :], gate), (leaf[:, 1, :], up))


def _router(leaf: np.ndarray, tensor: np.ndarray) -> None:
    transposed_into((leaf, tensor))


def _qkv_rows(c: ModelConfig) -> int:
    return (c.num_heads + 2 * c.num_kv_heads) * c.head_dim


def _gate_shape(c: ModelConfig) -> Shape:
    return (_moe(c).intermediate_size, c.hidden_size)


def _down_shape(c: ModelConfig) -> Shape:
    return (c.hidden_size, _moe(c).intermediate_size)


def _all_gates(c: ModelConfig) -> Shape:
    return (_moe(c).num_experts, *_gate_shape(c))


def _all_gate_ups(c: ModelConfig) -> Shape:
    return (_moe(c).num_experts, 2 * _moe(c).intermediate_size, c.hidden_size)


def _all_downs(c: ModelConfig) -> Shape:
    return (_moe(c).num_experts, *_down_shape(c))


QKV = Transform("qkv", lambda c: (_qkv_rows(c), c.hidden_size), "all", _fused_qkv)
QKV_BIAS = Transform("qkv_bias", lambda c: (_qkv_rows(c),), "all", _fused_qkv)
ROUTER = Transform("router", lambda c: (_moe(c).num_experts, c.hidden_size), "all", _router)
EXPERT_BIAS = Transform("expert_bias", lambda c: (_moe(c).num_experts,))
EXPERT_GATE = Transform("expert_gate", _gate_shape, "gate", gate_or_up(0), by_expert=True)
EXPERT_UP = Transform("expert_up", _gate_shape, "up", gate_or_up(1), by_expert=True)
EXPERT_DOWN = Transform("expert_down", _down_shape, "down", transposed, by_expert=True)
STACKED_GATE = Transform("stacked_gate", _all_gates, "gate", gate_or_up(0), by_expert=True)
STACKED_UP = Transform("stacked_up", _all_gates, "up", gate_or_up(1), by_expert=True)
STACKED_DOWN = Transform("stacked_down", _all_downs, "down", transposed, by_expert=True)
FUSED_GATE_UP = Transform("fused_gate_up", _all_gate_ups, "gate and up", _fused_gate_up, by_expert=True)
SHARED_GATE = Transform("shared_gate", lambda c: (_moe(c).shared_size, c.hidden_size), "gate", gate_or_up(0))
SHARED_UP = Transform("shared_up", lambda c: (_moe(c).shared_size, c.hidden_size), "up", gate_or_up(1))
SHARED_DOWN = Transform("shared_down", lambda c: (c.hidden_size, _moe(c).shared_size), "all", transposed)


# -- rule tables -------------------------------------------------------------------------------------------------------

_LAYER, _PATH = "model.layers.{layer}", "layers/{layer}"
_GATE_UP, _DOWN = f"{_PATH}/mlp/experts/gate_up", f"{_PATH}/mlp/experts/down"

EXPERTS = (
    Rule(f"{_LAYER}.mlp.gate.weight", f"{_PATH}/mlp/router/kernel", ROUTER),
    Rule(f"{_LAYER}.mlp.experts.{{expert}}.gate_proj.weight", _GATE_UP, EXPERT_GATE, ("per expert",)),
    Rule(f"{_LAYER}.mlp.experts.{{expert}}.up_proj.weight", _GATE_UP, EXPERT_UP, ("per expert",)),
    Rule(f"{_LAYER}.mlp.experts.{{expert}}.down_proj.weight", _DOWN, EXPERT_DOWN, ("per expert",)),
    Rule(f"{_LAYER}.mlp.experts.gate_proj", _GATE_UP, STACKED_GATE, ("stacked",)),
    Rule(f"{_LAYER}.mlp.experts.up_proj", _GATE_UP, STACKED_UP, ("stacked",)),
    Rule(f"{_LAYER}.mlp.experts.down_proj", _DOWN, STACKED_DOWN, ("stacked", "fused")),
    Rule(f"{_LAYER}.mlp.experts.gate_up_proj", _GATE_UP, FUSED_GATE_UP, ("fused",)),
    Rule(f"{_LAYER}.mlp.w1", _GATE_UP, FUSED_GATE_UP, ("dInfer",)),
    Rule(f"{_LAYER}.mlp.w2", _DOWN, STACKED_DOWN, ("dInfer",)),
)
_LLADA2 = (
    Rule("model.word_embeddings.weight", "embed/embedding", EMBEDDING),
    Rule(f"{_LAYER}.input_layernorm.weight", f"{_PATH}/attn_norm/scale", NORM),
    Rule(f"{_LAYER}.attention.query_key_value.weight", f"{_PATH}/attn/qkv/kernel", QKV),
    Rule(f"{_LAYER}.attention.query_key_value.bias", f"{_PATH}/attn/qkv/bias", QKV_BIAS),
    Rule(f"{_LAYER}.attention.query_layernorm.weight", f"{_PATH}/attn/q_norm/scale", HEAD_NORM),
    Rule(f"{_LAYER}.attention.key_layernorm.weight", f"{_PATH}/attn/k_norm/scale", HEAD_NORM),
    Rule(f"{_LAYER}.attention.dense.weight", f"{_PATH}/attn/out/kernel", OUTPUT),
    Rule(f"{_LAYER}.attention.dense.bias", f"{_PATH}/attn/out/bias", OUT_BIAS),
    Rule(f"{_LAYER}.attention.rotary_emb.inv_freq", None, None),
    Rule("model.rotary_emb.inv_freq", None, None),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", f"{_PATH}/mlp_norm/scale", NORM),
    Rule(f"{_LAYER}.mlp.gate_proj.weight", f"{_PATH}/mlp/gate_up/kernel", GATE),
    Rule(f"{_LAYER}.mlp.up_proj.weight", f"{_PATH}/mlp/gate_up/kernel", UP),
    Rule(f"{_LAYER}.mlp.down_proj.weight", f"{_PATH}/mlp/down/kernel", DOWN),
    Rule(f"{_LAYER}.mlp.gate.expert_bias", f"{_PATH}/mlp/router/bias", EXPERT_BIAS),
    Rule(f"{_LAYER}.mlp.shared_experts.gate_proj.weight", f"{_PATH}/mlp/shared/gate_up/kernel", SHARED_GATE),
    Rule(f"{_LAYER}.mlp.shared_experts.up_proj.weight", f"{_PATH}/mlp/shared/gate_up/kernel", SHARED_UP),
    Rule(f"{_LAYER}.mlp.shared_experts.down_proj.weight", f"{_PATH}/mlp/shared/down/kernel", SHARED_DOWN),
    Rule("model.norm.weight", "norm/scale", NORM),
    Rule(HEAD, "head/kernel", EMBEDDING),
)

ALL_RULES: dict[str, tuple[Rule, ...]] = {
    **RULES,
    "sdar_moe": RULES["sdar"] + EXPERTS,
    "llada2": _LLADA2 + EXPERTS,
}
