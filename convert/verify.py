"""`herald-convert --verify`: logits of the converted checkpoint against transformers' model of the source, in float32.

Transformers has no block-diffusion families, but their transformers are Qwen2's and Qwen3's under another attention mask
(block-causal: all of one's own block and everything before it), and it honours an explicit four-dimensional mask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.hf import open_source
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.checkpoint import load_checkpoint, read_manifest
from herald_jax.config import ModelConfig
from herald_jax.errors import ConversionError
from herald_jax.model import Params, bind

TOLERANCE = 2e-4  # of the largest logit, and absolute below 1
_BASES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "fast_dllm_v2": "Qwen2", "sdar": "Qwen3"}


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
    dtype = getattr(torch, config.dtype)
    if source.suffix == ".gguf" or (source.is_dir() and not (source / "config.json").is_file()):
        file = source if source.is_file() else next(source.glob("*.gguf"))
        model = model_class.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).to(dtype)
    else:
        directory = source if source.is_dir() else source.parent
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for name in ("architectures", "auto_map", "model_type", "attn_implementation", "quantization_config"):
            raw.pop(name, None)
        hf_config = getattr(transformers, f"{base}Config")(**raw)
        model = model_class(hf_config).to(dtype)
        _fill(model, source, torch)
    model = model.float().eval()
    block, length = config.diffusion.block_length, tokens.shape[1]
    owner = torch.arange(length) // block
    mask = torch.where(owner[:, None] >= owner[None, :], 0.0, torch.finfo(torch.float32).min)[None, None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens), attention_mask=mask).logits
    return logits.numpy()


def _fill(model: Any, source_path: Path, torch: Any) -> None:
    """Copy the source's tensors into transformers' model by name, through our reader: one tensor at a time."""
    source = open_source(source_path)
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name not in source.tensors:
                    raise ConversionError(f"transformers' model has {name}, but the source does not")
                array = source.rows(name, 0, source.tensors[name].shape[0])
                parameter.copy_(torch.from_numpy(array.astype(np.float32)))
    finally:
        source.close()
