"""GGUF sources of Llama models, presented under their Hugging Face names so that the same rules convert them.

Differences that end here: llama.cpp names (`_NAMES`), rows of q and k permuted for interleaved rotation,
block-quantised weights (restored by the `gguf` package to float32), configuration and tokenizer inside the file's
metadata. The latter are written out as config.json, generation_config.json and tokenizer files (`gguf_metadata`), which
`hf_config` then reads like any other. A tokenizer.json lying beside the .gguf file is preferred to the one rebuilt.

Source of the formats: the `gguf` package (quantisation types, metadata keys).
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from convert.gguf_header import Tensor, read_header
from convert.gguf_metadata import write_hf_files
from convert.safetensors import pread_into
from convert.source import TensorInfo
from herald_jax.errors import ConversionError

# Kinds of numbers that are restored; the rest (K-quants and others) are named in the error.
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_1")

_NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"blk\.(\d+)\.attn_norm\.weight": "model.layers.{}.input_layernorm.weight",
    r"blk\.(\d+)\.attn_q\.(weight|bias)": "model.layers.{}.self_attn.q_proj.{}",
    r"blk\.(\d+)\.attn_k\.(weight|bias)": "model.layers.{}.self_attn.k_proj.{}",
    r"blk\.(\d+)\.attn_v\.(weight|bias)": "model.layers.{}.self_attn.v_proj.{}",
    r"blk\.(\d+)\.attn_output\.(weight|bias)": "model.layers.{}.self_attn.o_proj.{}",
    r"blk\.(\d+)\.ffn_norm\.weight": "model.layers.{}.post_attention_layernorm.weight",
    r"blk\.(\d+)\.ffn_gate\.weight": "model.layers.{}.mlp.gate_proj.weight",
    r"blk\.(\d+)\.ffn_up\.weight": "model.layers.{}.mlp.up_proj.weight",
    r"blk\.(\d+)\.ffn_down\.weight": "model.layers.{}.mlp.down_proj.weight",
}


def hugging_face_name(name: str) -> str | None:
    """The Hugging Face name of a llama.cpp tensor of a Llama model, None if it has none."""
    for pattern, template in _NAMES.items():
        found = re.fullmatch(pattern, name)
        if found is not None:
            return template.format(*found.groups())
    return None


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k: `[heads * D, ...]`, per head (pair, half) → (half, pair)."""
    per_head = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(rows.shape)


class GGUFSource:
    """One GGUF file; every tensor reads as float32. Raises ConversionError if the file is not a usable Llama model."""

    kind = "gguf"

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError as error:
            raise ConversionError(f"reading {path.name} needs the gguf package: install herald-jax[gguf]") from error
        try:
            fields, listed = read_header(path)
        except ValueError as error:  # bad UTF-8 too
            raise ConversionError(f"{path} is not a readable GGUF file: {error}") from error
        self._gguf = gguf
        self.files = [path]
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self.lost: set[str] | None = set()
        self.notes: list[str] = []
        self._types: dict[str, Any] = {}
        self._heads: dict[str, int] = {}
        size = path.stat().st_size
        for tensor in listed:
            self._add(path, tensor, size)
        self._temporary = tempfile.TemporaryDirectory(prefix="herald-gguf-")
        self.config_dir = Path(self._temporary.name)
        try:
            config, notes = write_hf_files(fields, self.tensors, path, self.config_dir)
        except ConversionError:
            self._temporary.cleanup()
            raise
        self.notes += notes
        for name in self.tensors:
            if ".q_proj." in name:
                self._heads[name] = config["num_attention_heads"]
            elif ".k_proj." in name:
                self._heads[name] = config["num_key_value_heads"]
        self._descriptor = os.open(path, os.O_RDONLY)

    def _add(self, path: Path, tensor: Tensor, size: int) -> None:
        try:
            kind = self._gguf.GGMLQuantizationType(tensor.type)
        except ValueError:
            self.problems.append(f"{tensor.name} has the unknown GGUF type {tensor.type}")
            self.lost = None
            return
        shape = tuple(reversed(tensor.shape))
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        name = hugging_face_name(tensor.name)
        if tensor.name == "rope_freqs.weight":
            self.problems.append(
                "rope_freqs.weight holds rotary frequencies (Llama 3.1 and later) whose parameters GGUF does not "
                "state; convert the safetensors checkpoint instead"
            )
            return
        nbytes = math.prod(shape) // block * block_bytes
        if tensor.offset + nbytes > size:
            end = tensor.offset + nbytes
            self.problems.append(f"{path.name} is truncated: {tensor.name} ends at byte {end}, the file has {size}")
            self.lost = None
            return
        name = name or tensor.name  # an unknown one keeps its name, and the rules will call it unknown
        if name in self.tensors:
            self.problems.append(f"{path.name} lists {tensor.name} twice")
            return
        dtype = np.dtype(np.float32) if kind.name in QUANTISATIONS else None
        self.tensors[name] = TensorInfo(shape, dtype, kind.name, nbytes, path.name, tensor.offset)
        self._types[name] = kind

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        info = self.tensors[name]
        if name in self._heads:  # rows of a head are interleaved: take the whole tensor, these are small
            return unpermute(self._read(name, 0, info.shape[0]), self._heads[name])[start:stop]
        return self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows as float32. A row is a whole number of quantisation blocks, so rows can be read on their own."""
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        raw = np.empty((stop - start, row), np.uint8)
        pread_into(self._descriptor, raw, info.offset + start * row)
        values = self._gguf.quants.dequantize(raw if len(info.shape) > 1 else raw.reshape(-1), self._types[name])
        return values.reshape(stop - start, *info.shape[1:]).astype(np.float32, copy=False)

    def close(self) -> None:
        os.close(self._descriptor)
        self._temporary.cleanup()
