"""A tiny checkpoint with random weights and a tokenizer of bytes, for tests that need one to run, not to be right."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from herald_jax.checkpoint import save_checkpoint
from herald_jax.config import DiffusionContract, ModelConfig, RopeConfig
from herald_jax.model import param_specs, unflatten

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]  # ids 256..259
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """One id per byte and four special tokens: every character beyond ASCII takes several ids."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def config(*, block_length: int = 4, max_position_embeddings: int = 512, num_layers: int = 2) -> ModelConfig:
    """SDAR's architecture and decoding, at the smallest size."""
    contract = DiffusionContract(
        block_length=block_length,
        small_block_length=block_length,
        mask_token_id=259,
        logit_alignment="same",
        first_canvas="all_masked",
        stop_token_ids=(258,),
        pad_token_id=256,
    )
    return ModelConfig(
        family="sdar",
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=False,
        qkv_bias=False,
        out_bias=False,
        qk_norm=True,
        rope=RopeConfig(theta=10000.0),
        dtype="float32",
        diffusion=contract,
    )


def save(path: Path, *, chat_template: str | None = CHATML, seed: int = 0, scale: float = 0.3, **fields: int) -> Path:
    """Write the checkpoint to `path`."""
    files = path.with_name(path.name + "-tokenizer")
    files.mkdir(parents=True)
    byte_level().save(str(files / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "mask_token": "<|MASK|>", "chat_template": chat_template}
    (files / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    settings = config(**fields)
    # Drawn on the host: compiling a generator for every shape takes longer than all the rest.
    draw = np.random.default_rng(seed)
    leaves = {
        name: np.ones(spec.shape, np.float32)
        if name.endswith("scale")
        else draw.normal(0, scale, spec.shape).astype(np.float32)
        for name, spec in sorted(param_specs(settings).items())
    }
    save_checkpoint(path, settings, unflatten(leaves), tokenizer_dir=files)
    return path
