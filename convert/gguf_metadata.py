"""GGUF metadata of Llama models → config.json, generation_config.json, tokenizer.json, tokenizer_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from convert.source import TensorInfo
from herald_jax.errors import ConversionError
from herald_jax.hf_files import TOKENIZER_FILES

# ggml token types
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_hf_files(
    fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path, directory: Path
) -> tuple[dict[str, Any], list[str]]:
    """Write the files a Hugging Face checkpoint would have into `directory`.

    Returns: the config, and notes on what was rebuilt or supplied.
    Raises: ConversionError if the file is not a Llama model, or lacks or contradicts something.
    """
    config = _config(fields, tensors, path)
    notes = [
        f"configuration rebuilt from the metadata of {path.name}",
        f"dtype float32 supplied for {path.name}: its weights are restored from GGUF types; store them smaller with "
        "--dtype",
    ]
    _write(directory / "config.json", config)
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding", "unknown")}
    stops = [i for i in (ids["eos"], ids["eot"]) if i is not None]
    generation = {"bos_token_id": ids["bos"], "eos_token_id": stops or None, "pad_token_id": ids["padding"]}
    _write(directory / "generation_config.json", generation)
    if (path.parent / "tokenizer.json").is_file():
        for name in TOKENIZER_FILES:
            if (path.parent / name).is_file():
                shutil.copyfile(path.parent / name, directory / name)
        notes.append(f"tokenizer files taken from beside {path.name}")
        return config, notes
    if "tokenizer.ggml.model" not in fields:
        return config, notes
    _write_tokenizer(fields, ids, path, directory)
    notes.append(f"tokenizer rebuilt from the metadata of {path.name}")
    return config, notes


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(fields: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, Any]:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"{path} is a GGUF model of architecture {architecture!r}; only 'llama' is supported")

    def value(name: str) -> Any:
        key = f"llama.{name}"
        if key not in fields:
            raise ConversionError(f"{path} does not state {key} in its metadata")
        return fields[key]

    if fields.get("llama.expert_count"):
        raise ConversionError(f"{path} has {fields['llama.expert_count']} experts; mixtures are not supported yet")
    hidden, heads = value("embedding_length"), value("attention.head_count")
    if not isinstance(heads, int):
        raise ConversionError(f"{path} has different head counts per layer, which is not supported")
    head_dim = fields.get("llama.attention.key_length") or hidden // heads
    rotary = fields.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ConversionError(f"{path} rotates {rotary} of {head_dim} dimensions; only whole heads are supported")
    embedding = tensors.get("model.embed_tokens.weight")
    stated = fields.get("llama.vocab_size") or len(fields.get("tokenizer.ggml.tokens") or ())
    if embedding is not None and stated and embedding.shape[0] != stated:
        raise ConversionError(
            f"{path} states a vocabulary of {stated}, but its embedding has {embedding.shape[0]} rows"
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": stated or (embedding.shape[0] if embedding is not None else None),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _short(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(value("rope.freq_base")),
        "rope_scaling": _rope_scaling(fields, path),
        "attention_bias": any(name.endswith("_proj.bias") for name in tensors),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "float32",
    }
    return config


def _short(value: float) -> float:
    """GGUF stores float32; the number meant is the shortest one that rounds to it (1e-05, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _rope_scaling(fields: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConversionError(f"{path} uses rope scaling {kind!r}; supported are none, linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short(fields["llama.rope.scaling.factor"])}
    original = fields.get("llama.rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _write_tokenizer(fields: Mapping[str, Any], ids: Mapping[str, Any], path: Path, directory: Path) -> None:
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    remedy = "put the checkpoint's tokenizer.json beside the .gguf file"
    if kind != "gpt2":
        raise ConversionError(f"{path} has a tokenizer of type {kind!r}; only byte-level BPE is rebuilt: {remedy}")
    words = _pre_tokenizer(pre)
    if words is None:
        raise ConversionError(f"{path} splits words by the rules of {pre!r}, which are not known here: {remedy}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConversionError(f"{path} has {len(tokens) - len(vocab)} tokens twice in its vocabulary: {remedy}")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types or [], strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False)])
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token")) and ids["bos"] is not None
    if add_bos:
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    backend.save(str(directory / "tokenizer.json"))
    named = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {field: tokens[ids[name]] for name, field in named.items() if ids[name] is not None}
    config["add_bos_token"] = add_bos
    config["chat_template"] = fields.get("tokenizer.chat_template")
    _write(directory / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


def _pre_tokenizer(name: str) -> Any:
    """How text is cut into words before merging, by the name llama.cpp gives it; None if unknown."""
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name == "llama-bpe":
        words = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_WORDS), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return None
