"""The tiny random checkpoints: their shapes, their weights, and the Hugging Face directories they are landed as.

Small enough to be committed (float32, two layers), and made so that decoding with them is not degenerate: embeddings of
unit variance, attention sharp enough to tell positions apart, layers that outweigh the input in the residual stream,
and a final norm that spreads the top probability over most of (0, 1). Without that a random model repeats one token
with probability near 1/V and no policy has anything to decide.

`transformers` is only used to run them; the directories are written here, each in the spelling its family publishes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracles.cases import MASK, VOCAB

DATA = pathlib.Path(__file__).parent / "data"
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIALS = {"sdar": "<|MASK|>", "fast_dllm_v2": "|<MASK>|"}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One checkpoint. `family` names the published form of its config.json, `kind` the transformers architecture."""

    family: str
    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int = 80
    layers: int = 2
    tied: bool = False
    attention_bias: bool = False
    theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_positions: int = 512
    block_length: int = 1
    small_block_length: int | None = None
    temperature: float = 6.0  # standard deviation of the logits
    seed: int = 0


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

ZOO: dict[str, Spec] = {
    # base causal LMs; G = query heads per KV head
    "llama3": Spec("llama", "llama", 72, 9, 3, 8, theta=5e5, rope_scaling=LLAMA3, seed=1),  # G = 3
    "llama-linear": Spec(  # multi-query, biased output projection
        "llama",
        "llama",
        64,
        4,
        1,
        16,
        tied=True,
        attention_bias=True,
        rope_scaling={"type": "linear", "factor": 4.0},
        seed=2,
    ),
    "llama-yarn": Spec("llama", "llama", 64, 4, 2, 16, rope_scaling=YARN, seed=3),  # G = 2
    "qwen2-tied": Spec("qwen2", "qwen2", 112, 14, 2, 8, tied=True, theta=1e6, seed=4),  # G = 7
    "qwen2-untied": Spec("qwen2", "qwen2", 64, 4, 4, 16, theta=1e6, seed=5),  # G = 1
    "qwen3-tied": Spec("qwen3", "qwen3", 64, 6, 3, 16, tied=True, theta=1e6, seed=6),  # G = 2, 6 * 16 != 64
    "qwen3-untied": Spec("qwen3", "qwen3", 64, 7, 1, 16, theta=1e6, seed=7),  # G = 7, multi-query, 7 * 16 != 64
    # block diffusion
    "sdar": Spec("sdar", "qwen3", 64, 6, 2, 16, theta=1e6, block_length=4, seed=8),
    "sdar-tied": Spec("sdar", "qwen3", 64, 4, 2, 32, tied=True, theta=1e6, block_length=4, seed=9),
    "fast-dllm-v2": Spec(
        "fast_dllm_v2",
        "qwen2",
        96,
        6,
        2,
        16,
        tied=True,
        theta=1e6,
        block_length=32,
        small_block_length=8,
        seed=10,
    ),
}


def _hf_config(spec: Spec) -> PretrainedConfig:
    """The transformers config that computes what the checkpoint's own modelling code would."""
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.theta,
        "rope_scaling": dict(spec.rope_scaling) if spec.rope_scaling else None,
        "attn_implementation": "eager",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": None,  # an nn.Embedding with a padding row would zero it
    }
    if spec.kind == "llama":
        return LlamaConfig(attention_bias=spec.attention_bias, **shared)
    if spec.kind == "qwen2":
        return Qwen2Config(use_sliding_window=False, **shared)
    return Qwen3Config(attention_bias=spec.attention_bias, use_sliding_window=False, **shared)


_CLASSES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


def _empty(spec: Spec) -> PreTrainedModel:
    return _CLASSES[spec.kind](_hf_config(spec)).to(torch.float32).eval()


def build(spec: Spec) -> PreTrainedModel:
    """A model with weights drawn from `spec.seed`; see the module's docstring for the scales."""
    model = _empty(spec)
    generator = torch.Generator().manual_seed(spec.seed)

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    gains = {
        "q_proj": 1.7,
        "k_proj": 1.7,
        "v_proj": 1.0,
        "o_proj": 2.0,
        "gate_proj": 1.5,
        "up_proj": 1.0,
        "down_proj": 2.5,
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner, leaf = name.split(".")[-2:]
            if owner == "embed_tokens":
                parameter.copy_(normal(parameter.shape, 1.0))
                # A mask predicts by its context: with a tied head a long mask vector would only predict itself.
                parameter[MASK] *= 0.1
                if spec.tied:
                    parameter.mul_(spec.hidden**-0.5)
            elif owner == "lm_head":
                parameter.copy_(normal(parameter.shape, spec.hidden**-0.5))
            elif owner == "norm":
                parameter.copy_(spec.temperature * (1 + normal(parameter.shape, 0.1)))
            elif owner in ("q_norm", "k_norm"):
                parameter.copy_(1.7 * (1 + normal(parameter.shape, 0.1)))
            elif owner.endswith("layernorm"):
                parameter.copy_(1 + normal(parameter.shape, 0.1))
            elif leaf == "bias":
                parameter.copy_(normal(parameter.shape, 0.5))
            else:
                parameter.copy_(normal(parameter.shape, gains[owner] * parameter.shape[1] ** -0.5))
    return model


def load(name: str, data: pathlib.Path = DATA) -> PreTrainedModel:
    """The landed checkpoint `name`, run by transformers from its safetensors file."""
    spec = ZOO[name]
    model = _empty(spec)
    tensors = load_file(data / name / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) != ({"lm_head.weight"} if spec.tied else set()):
        raise ValueError(f"{name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def published_config(spec: Spec) -> dict[str, Any]:
    """config.json in its family's spelling; base LMs in that of transformers 5 or the older one."""
    config: dict[str, Any] = {
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_positions,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": spec.tied,
        "use_cache": True,
        "vocab_size": VOCAB,
    }
    if spec.family in ("llama", "qwen2", "qwen3"):
        names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        config |= {"architectures": [names[spec.family] + "ForCausalLM"], "model_type": spec.family}
        if spec.family != "qwen2":
            config |= {"head_dim": spec.head_dim, "attention_bias": spec.attention_bias}
        if spec.family == "llama":
            config["mlp_bias"] = False
        else:
            config |= {"sliding_window": None, "use_sliding_window": False}
        if spec.rope_scaling and "type" in spec.rope_scaling:  # the oldest spelling
            return config | {"rope_theta": spec.theta, "rope_scaling": spec.rope_scaling, "torch_dtype": "float32"}
        parameters = {"rope_theta": spec.theta, "rope_type": "default"} | (spec.rope_scaling or {})
        return config | {"rope_parameters": parameters, "dtype": "float32"}
    config |= {"rope_theta": spec.theta, "torch_dtype": "float32", "use_sliding_window": False, "sliding_window": None}
    if spec.family == "sdar":
        return config | {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            "auto_map": {
                "AutoConfig": "configuration_sdar.SDARConfig",
                "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
            },
            "attention_bias": False,
            "head_dim": spec.head_dim,
            "rope_scaling": None,
            "block_size": spec.block_length,
            "mask_token_id": MASK,
        }
    return config | {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "auto_map": {
            "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
            "AutoModel": "modeling.Fast_dLLM_QwenModel",
            "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
        },
        "bd_size": spec.block_length,
        "layer_types": ["full_attention"] * spec.layers,
        "mask_token_id": MASK,  # real ones do not say it; a vocabulary of 320 cannot hold the family's 151665
    }


def tiny_tokenizer(mask_token: str) -> Tokenizer:
    """Byte-level tokenizer without merges: ids 0..255 are bytes, then the four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", mask_token])
    return tokenizer


def write(name: str, model: PreTrainedModel, data: pathlib.Path = DATA) -> None:
    """Land `model` as the Hugging Face directory data/name."""
    spec, directory = ZOO[name], data / name
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    if spec.tied:
        del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    mask_token = SPECIALS.get(spec.family, "<|MASK|>")
    generation = {"bos_token_id": END_OF_TEXT, "eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    } | ({"mask_token": mask_token} if spec.family in SPECIALS else {})
    for file, value in (
        ("config.json", published_config(spec)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (directory / file).write_text(json.dumps(value, indent=2) + "\n")
    tiny_tokenizer(mask_token).save(str(directory / "tokenizer.json"), pretty=False)
