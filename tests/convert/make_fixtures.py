"""Makes tests/convert/data: tiny checkpoints saved by transformers, and the logits transformers computes for them.

Run from the repository root with torch and transformers installed: `python -m tests.convert.make_fixtures`.
SDAR and Fast-dLLM v2 are Qwen3 and Qwen2 under a block-causal mask; their config.json is put into the spelling that
their published checkpoints have.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
LENGTH = 16


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A tiny model: `base` in transformers, its configuration, how it is saved and which mask it runs under."""

    base: str
    fields: dict[str, Any]
    block_length: int = 1
    shard_size: str = "1GB"
    published: dict[str, Any] = dataclasses.field(default_factory=dict)


_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_QWEN3 = {**_SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
_QWEN2 = {**_SIZES, "num_attention_heads": 8, "num_key_value_heads": 1}

FIXTURES = {
    "qwen3": Fixture("Qwen3", {**_QWEN3, "tie_word_embeddings": False}, shard_size="20KB"),
    "qwen2": Fixture("Qwen2", {**_QWEN2, "tie_word_embeddings": True}, shard_size="20KB"),
    "llama": Fixture(
        "Llama",
        {
            **_SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": _LLAMA3,
        },
    ),
    "sdar": Fixture(
        "Qwen3",
        {**_QWEN3, "tie_word_embeddings": False},
        block_length=4,
        shard_size="20KB",
        published={
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
            "block_size": 4,
            "mask_token_id": 120,
        },
    ),
    "fast_dllm_v2": Fixture(
        "Qwen2",
        {**_QWEN2, "tie_word_embeddings": True},
        block_length=8,
        published={
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "model_type": "Fast_dLLM_Qwen",
            "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
            "bd_size": 8,
        },
    ),
}


def tokens() -> np.ndarray:
    """i64[1, LENGTH], the ids every fixture's logits are for."""
    return np.random.default_rng(7).integers(3, 128, (1, LENGTH))


def build(name: str, directory: Path) -> np.ndarray:
    """Save fixture `name` into `directory`; returns transformers' float32 logits `[1, LENGTH, V]`."""
    import torch
    import transformers

    fixture = FIXTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{fixture.base}Config")(**fixture.fields)
    model = getattr(transformers, f"{fixture.base}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: ones and zeros would hide a mistake
            parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.bfloat16())
    # A copy: model.to(bfloat16) would round the rotary frequencies too, and they would stay rounded in float32.
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory, max_shard_size=fixture.shard_size)
    if fixture.published:
        raw = json.loads((directory / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": raw.pop("dtype")}
        raw |= fixture.published
        (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    owner = torch.arange(LENGTH) // fixture.block_length
    mask = torch.where(owner[:, None] >= owner[None, :], 0.0, torch.finfo(torch.float32).min)[None, None]
    model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens()), attention_mask=mask).logits.numpy()


def main() -> None:
    """Rebuild every fixture."""
    shutil.rmtree(DATA, ignore_errors=True)
    for name in FIXTURES:
        logits = build(name, DATA / name)
        np.save(DATA / name / "logits.npy", logits)
        print(
            name, sum(f.stat().st_size for f in (DATA / name).iterdir()), "bytes, largest logit", np.abs(logits).max()
        )


if __name__ == "__main__":
    main()
