"""Hugging Face checkpoints made of numpy arrays, and a safetensors writer that can also write broken files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int8": "I8"}

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "eos_token_id": 2,
}
SDAR = {
    **CONFIG,
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": 4,
    "mask_token_id": 39,
}
FAST_DLLM = {
    **CONFIG,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 32,
    "vocab_size": 152064,
    "eos_token_id": 151645,
}
LLAMA = {**CONFIG, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def config_without(*names: str, base: Mapping[str, Any] = CONFIG, **changes: Any) -> dict[str, Any]:
    """`base` without some fields and with others changed."""
    return {k: v for k, v in {**base, **changes}.items() if k not in names}


def tensors(config: Mapping[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes that `config` calls for."""
    draw = np.random.default_rng(seed)
    e, f, v, d = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}input_layernorm.weight": (e,), f"{layer}post_attention_layernorm.weight": (e,)}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (rows, e) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (e, q), f"{layer}mlp.down_proj.weight": (e, f)}
        shapes |= {f"{layer}mlp.gate_proj.weight": (f, e), f"{layer}mlp.up_proj.weight": (f, e)}
        if config["model_type"] in ("qwen3", "sdar"):
            shapes |= {f"{layer}self_attn.q_norm.weight": (d,), f"{layer}self_attn.k_norm.weight": (d,)}
        if config["model_type"] in ("qwen2", "Fast_dLLM_Qwen"):
            shapes |= {f"{layer}self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes["model.norm.weight"] = (e,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, e)
    return {name: draw.normal(0, 1, shape).astype(dtype) for name, shape in shapes.items()}


def write_safetensors(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    edit: Callable[[dict[str, Any]], None] = lambda header: None,
    tail: bytes = b"",
) -> None:
    """Write a file; `edit` changes its parsed header first, `tail` is appended."""
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    edit(header)
    write_raw(path, json.dumps(header).encode(), b"".join(a.tobytes() for a in arrays.values()) + tail)


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    """Header bytes and data bytes as they are."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write(
    directory: Path,
    config: Mapping[str, Any] = CONFIG,
    arrays: Mapping[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint directory. `files`: further JSON files by name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    for name, value in (files or {}).items():
        (directory / name).write_text(json.dumps(value))
    arrays = tensors(config) if arrays is None else arrays
    if shards == 1:
        write_safetensors(directory / "model.safetensors", arrays)
        return directory
    weight_map = {}
    names = list(arrays)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: arrays[name] for name in names[i::shards]}
        write_safetensors(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
