"""The trained parameters as a Hugging Face directory in SDAR's form, and the same in pieces small enough to move."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from herald_jax.config import DiffusionContract, ModelConfig, RopeConfig
from herald_jax.model import Params, flatten, param_specs, unflatten

PIECE_BYTES = 12 << 20


def model_config(
    *, vocab_size: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, context: int,
    block: int, end: int, mask: int,
) -> ModelConfig:  # fmt: skip
    """The reference model's architecture: SDAR's, tied, with grouped queries."""
    contract = DiffusionContract(
        block_length=block, small_block_length=block, mask_token_id=mask, logit_alignment="same",
        first_canvas="all_masked", stop_token_ids=(end,), pad_token_id=end,
    )  # fmt: skip
    return ModelConfig(
        family="sdar", vocab_size=vocab_size, hidden_size=hidden, intermediate_size=mlp, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-6,
        max_position_embeddings=context, tie_word_embeddings=True, qkv_bias=False, out_bias=False, qk_norm=True,
        rope=RopeConfig(theta=1e6), dtype="bfloat16", diffusion=contract,
    )  # fmt: skip


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": config.diffusion.block_length,
        "bos_token_id": config.diffusion.pad_token_id,
        "eos_token_id": config.diffusion.stop_token_ids[0],
        "pad_token_id": config.diffusion.pad_token_id,
        "mask_token_id": config.diffusion.mask_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def to_hf(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Tensors by their published names, bfloat16; matrices are [out, in]."""
    leaves = {path: np.asarray(leaf).astype(ml_dtypes.bfloat16) for path, leaf in flatten(params).items()}
    tensors = {"model.embed_tokens.weight": leaves["embed/embedding"], "model.norm.weight": leaves["norm/scale"]}
    for i in range(config.num_layers):
        ours, theirs = f"layers/{i}", f"model.layers.{i}"
        qkv = leaves[f"{ours}/attn/qkv/kernel"]  # [E, K, G + 2, D]
        parts = {"q": qkv[:, :, :-2], "k": qkv[:, :, -2], "v": qkv[:, :, -1]}
        for name, part in parts.items():
            tensors[f"{theirs}.self_attn.{name}_proj.weight"] = part.reshape(config.hidden_size, -1).T
        out = leaves[f"{ours}/attn/out/kernel"]
        tensors[f"{theirs}.self_attn.o_proj.weight"] = out.reshape(-1, config.hidden_size).T
        for name in ("q_norm", "k_norm"):
            tensors[f"{theirs}.self_attn.{name}.weight"] = leaves[f"{ours}/attn/{name}/scale"]
        gate_up = leaves[f"{ours}/mlp/gate_up/kernel"]
        tensors[f"{theirs}.mlp.gate_proj.weight"] = gate_up[:, 0].T
        tensors[f"{theirs}.mlp.up_proj.weight"] = gate_up[:, 1].T
        tensors[f"{theirs}.mlp.down_proj.weight"] = leaves[f"{ours}/mlp/down/kernel"].T
        tensors[f"{theirs}.input_layernorm.weight"] = leaves[f"{ours}/attn_norm/scale"]
        tensors[f"{theirs}.post_attention_layernorm.weight"] = leaves[f"{ours}/mlp_norm/scale"]
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def from_hf(config: ModelConfig, directory: Path) -> Params:
    """The inverse of `to_hf`, float32, to go on training."""
    tensors = {name: t.astype(np.float32) for name, t in load_file(directory / "model.safetensors").items()}
    specs = param_specs(config)
    e, k, g, d = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
    leaves = {"embed/embedding": tensors["model.embed_tokens.weight"], "norm/scale": tensors["model.norm.weight"]}
    for i in range(config.num_layers):
        ours, theirs = f"layers/{i}", f"model.layers.{i}"
        q = tensors[f"{theirs}.self_attn.q_proj.weight"].T.reshape(e, k, g, d)
        key, value = (tensors[f"{theirs}.self_attn.{n}_proj.weight"].T.reshape(e, k, 1, d) for n in "kv")
        leaves[f"{ours}/attn/qkv/kernel"] = np.concatenate([q, key, value], axis=2)
        leaves[f"{ours}/attn/out/kernel"] = tensors[f"{theirs}.self_attn.o_proj.weight"].T.reshape(k, g, d, e)
        for name in ("q_norm", "k_norm"):
            leaves[f"{ours}/attn/{name}/scale"] = tensors[f"{theirs}.self_attn.{name}.weight"]
        gate, up = (tensors[f"{theirs}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        leaves[f"{ours}/mlp/gate_up/kernel"] = np.stack([gate, up], axis=1)
        leaves[f"{ours}/mlp/down/kernel"] = tensors[f"{theirs}.mlp.down_proj.weight"].T
        leaves[f"{ours}/attn_norm/scale"] = tensors[f"{theirs}.input_layernorm.weight"]
        leaves[f"{ours}/mlp_norm/scale"] = tensors[f"{theirs}.post_attention_layernorm.weight"]
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: spec.shape for path, spec in specs.items()}
    return unflatten(leaves)


def write_hf(directory: Path, config: ModelConfig, params: Params, tokenizer: Path, card: str | None = None) -> None:
    """Write the Hugging Face directory: configuration, weights, tokenizer and, if given, the model card."""
    directory.mkdir(parents=True, exist_ok=True)
    end = config.diffusion.stop_token_ids[0]
    for name, value in (
        ("config.json", hf_config(config)),
        ("generation_config.json", {"eos_token_id": end, "pad_token_id": end}),
    ):
        (directory / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    save_file(to_hf(config, params), directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((tokenizer / name).read_bytes())
    if card is not None:
        (directory / "README.md").write_text(card, encoding="utf-8")


def split_directory(directory: Path, out: Path, *, size: int = PIECE_BYTES) -> list[Path]:
    """The directory as one tar archive in pieces `<name>.tar.00`, ... of at most `size` bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(directory, arcname=directory.name)
    data = buffer.getvalue()
    for old in out.glob(f"{directory.name}.tar.*"):
        old.unlink()
    pieces = []
    for number, start in enumerate(range(0, len(data), size)):
        piece = out / f"{directory.name}.tar.{number:02d}"
        piece.write_bytes(data[start : start + size])
        pieces.append(piece)
    return pieces


def join_pieces(pieces: Path, into: Path) -> Path:
    """Unpack what `split_directory` wrote into `pieces`; returns the directory."""
    found = sorted(pieces.glob("*.tar.[0-9][0-9]"))
    with tarfile.open(fileobj=io.BytesIO(b"".join(p.read_bytes() for p in found))) as archive:
        archive.extractall(into, filter="data")
    return into / found[0].name.rsplit(".tar.", 1)[0]
