"""`herald-convert --verify`: logits of the converted checkpoint against transformers' model of the source, in float32.

Transformers has no block-diffusion families, but their networks are Qwen2's and Qwen3's (with experts: Qwen3-MoE's and
GLM-4-MoE's) under another attention mask (block-causal: all of one's own block and everything before it), and it
honours an explicit four-dimensional mask. GGUF files are read by transformers' own loader too, so that our restoring of
weights and of row order is compared as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.hf import open_source
from convert.source import Source
from convert.verify_moe import glm4_moe_fields, read_named
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.checkpoint import load_checkpoint, read_manifest
from herald_jax.config import ModelConfig
from herald_jax.errors import ConversionError
from herald_jax.model import Params, bind

TOLERANCE = 2e-4  # of the largest logit, and absolute below 1
_BASES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "fast_dllm_v2": "Qwen2",
    "sdar": "Qwen3",
    "sdar_moe": "Qwen3Moe",
    "llada2": "Glm4Moe",
}


def verify(source: str | Path, checkpoint: str | Path, *, blocks: int = 3) -> str:
    """Compare the logits of a few blocks of pseudo-random token ids.

    Both models run in float32 on weights rounded to the checkpoint's dtype, so that what is compared is the conversion
    and not the rounding. Needs memory for both.

    Returns: a sentence with the largest difference.
    Raises: ConversionError if the logits differ, or torch or transformers is not installed.
    """
    config = read_manifest(checkpoint).config
    length = config.diffusion.block_length * max(blocks, -(-16 // config.diffusion.block_length))
    length = min(
        length, config.max_position_embeddings // config.diffusion.block_length * config.diffusion.block_length
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    expected = _transformers_logits(Path(source), config, tokens)
    loaded = load_checkpoint(checkpoint, dtype="float32")
    actual = np.asarray(whole_sequence_logits(loaded.config, loaded.params, jnp.asarray(tokens, jnp.int32)))
    if not np.isfinite(expected).all():
        raise ConversionError(
            "transformers' logits of the source are not finite, so there is nothing to verify against"
        )
    error = float(np.max(np.abs(actual - expected)))
    bound = TOLERANCE * max(1.0, float(np.max(np.abs(expected))))
    if not error <= bound:
        raise ConversionError(
            f"verification failed: logits differ from transformers' by up to {error:.3g} (allowed {bound:.3g}); the "
            "checkpoint was written but should not be used"
        )
    return (
        f"verified: logits of {length} tokens equal transformers' to {error:.2g} (float32, largest {bound:.2g} allowed)"
    )


def whole_sequence_logits(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits `[B, T, V]` of one pass over whole blocks; every position sees its block and all before. T % M == 0."""
    block, (batch, length) = config.diffusion.block_length, tokens.shape

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> jax.Array:
        model = bind(config, params)
        ends = jnp.arange(block, length + 1, block, dtype=jnp.int32)
        visible = jnp.broadcast_to(ends, (batch, ends.shape[0]))
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        attend = DenseAttend(start=jnp.int32(0), visible=visible)
        hidden, _ = model(tokens, positions, attend, DeviceKV.empty(config, batch, length))
        return jnp.einsum("bte,ve->btv", hidden, model.head_kernel(), precision="highest")

    return run(params, tokens)


def _transformers_logits(source: Path, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConversionError("--verify needs torch and transformers: install herald-jax[oracle]") from error
    base = _BASES[config.family]
    model_class = getattr(transformers, f"{base}ForCausalLM")
    opened = open_source(source)
    try:
        raw = json.loads((opened.config_dir / "config.json").read_text(encoding="utf-8"))
        for name in ("architectures", "auto_map", "model_type", "attn_implementation", "dtype", "torch_dtype"):
            raw.pop(name, None)
        if base == "Glm4Moe":
            raw = glm4_moe_fields(raw)
        model = model_class(getattr(transformers, f"{base}Config")(**raw))
        if opened.kind == "gguf":
            from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

            tensors = load_gguf_checkpoint(str(opened.files[0]), return_tensors=True, model_to_load=model)["tensors"]
            tied = ["lm_head.weight"] if config.tie_word_embeddings else []
            missing, unexpected = model.load_state_dict(tensors, strict=False)
            if unexpected or missing != tied:
                raise ConversionError(f"transformers' GGUF loader left {missing} unset and {unexpected} unused")
        else:
            _fill(model, opened, config, torch)
    finally:
        opened.close()
    _round(model, getattr(torch, config.dtype), torch)
    model.eval()
    block, length = config.diffusion.block_length, tokens.shape[1]
    owner = torch.arange(length) // block
    mask = torch.where(owner[:, None] >= owner[None, :], 0.0, torch.finfo(torch.float32).min)[None, None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens), attention_mask=mask).logits
    return logits.numpy()


def _round(model: Any, dtype: Any, torch: Any) -> None:
    """Round the weights, not the rotary frequencies as `model.to(dtype)` would; a router's stay as they are stored."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(".mlp.gate.weight"):
                parameter.copy_(parameter.to(dtype))


def _fill(model: Any, source: Source, config: ModelConfig, torch: Any) -> None:
    """Copy the source's tensors into transformers' model by name, one at a time."""
    biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *biases):  # a tied head is listed once, as the embedding
            array = read_named(source, config, name)
            parameter.copy_(torch.from_numpy(array.astype(np.float32)))
