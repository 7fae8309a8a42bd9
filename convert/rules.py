"""Which Hugging Face tensor fills which part of which parameter: one table of rules per family.

A `Rule` says: tensors whose whole name matches `pattern` fill the parameter `path` through a named transform. Fused
parameters (q, k and v; gate and up) are filled by several rules, each its own part. `mapping.plan` applies a table to
the tensors of a checkpoint. The tables of mixtures of experts are in `moe_rules.py`.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from herald_jax.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """How a source tensor becomes (part of) a parameter. Shapes use E, K, G, D, F, V as in `model.py`.

    Attributes:
      shape: the source shape that a config demands.
      part: what of the parameter it fills: "all", or a part; the rules of one path together say which parts there are.
      write: `write(leaf, tensor)` puts the tensor into its part. None: the tensor is the parameter, byte for byte.
      by_expert: parameter and tensor have a leading axis of experts (with `{expert}` in the pattern: the tensors form
        it), and `write` is called for one expert at a time.
    """

    name: str
    shape: Callable[[ModelConfig], Shape]
    part: str = "all"
    write: Callable[[np.ndarray, np.ndarray], None] | None = None
    by_expert: bool = False


class Match(NamedTuple):
    """What a name says: the numbers of its layer and expert, "" where its pattern has none."""

    layer: str
    expert: str


@dataclass(frozen=True)
class Rule:
    """Tensors named `pattern` fill parameter `path` by `transform`.

    Both are literal but for `{layer}`, which stands for a layer number, and in patterns `{expert}`, for an expert's.
    `path` None: ignored on purpose. `layouts`: the ways of laying out experts that have such tensors; a checkpoint
    must follow one of them throughout. Empty: tensors of every layout.
    """

    pattern: str
    path: str | None
    transform: Transform | None
    layouts: tuple[str, ...] = ()

    def match(self, name: str) -> Match | None:
        """The numbers in the name when the whole of it matches, else None."""
        found = _compiled(self.pattern).fullmatch(name)
        if found is None:
            return None
        numbers = found.groupdict()
        return Match(numbers.get("layer", ""), numbers.get("expert", ""))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for name in ("layer", "expert"):
        escaped = escaped.replace(rf"\{{{name}\}}", rf"(?P<{name}>0|[1-9]\d*)")
    return re.compile(escaped)


# -- transforms --------------------------------------------------------------------------------------------------------


_BAND = 256
_THREADS = concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="transpose")


def transposed_into(*pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """`out[...] = source.T` for each pair of matrices, in bands of rows that fit the cache, on a few threads.

    Bands are 4x faster than numpy's strided copy of the whole. Both sides are seen as plain integers when they have the
    same dtype: numpy copies bfloat16 element by element.
    """
    bands = []
    for out, source in pairs:
        if out.dtype == source.dtype:
            bits = np.dtype(f"u{out.dtype.itemsize}")
            out, source = out.view(bits), source.view(bits)
        for start in range(0, source.shape[0], _BAND):
            bands.append((out[:, start : start + _BAND], source[start : start + _BAND].T))
    for copied in [_THREADS.submit(np.copyto, *band) for band in bands]:
        copied.result()


def heads_part(first: int, last: int | None) -> Callable[[np.ndarray, np.ndarray], None]:
    """A part of a fused kernel `[E, K, G+2, D]` or bias `[K, G+2, D]`, from a weight `[K*n*D, E]` or bias `[K*n*D]`."""

    def write(leaf: np.ndarray, tensor: np.ndarray) -> None:
        part = leaf[..., first:last, :]  # [E, K, n, D] or [K, n, D]
        kv_heads, n, dim = part.shape[-3:]
        if tensor.ndim == 1:
            part[...] = tensor.reshape(kv_heads, n, dim)
            return
        heads = tensor.reshape(kv_heads, n, dim, -1)
        transposed_into(*((part[:, k, j, :], heads[k, j]) for k in range(kv_heads) for j in range(n)))

    return write


def gate_or_up(index: int) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda leaf, tensor: transposed_into((leaf[:, index, :], tensor))


def transposed(leaf: np.ndarray, tensor: np.ndarray) -> None:
    transposed_into((leaf.reshape(-1, leaf.shape[-1]), tensor))


EMBEDDING = Transform("embedding", lambda c: (c.vocab_size, c.hidden_size))
NORM = Transform("norm", lambda c: (c.hidden_size,))
HEAD_NORM = Transform("head_norm", lambda c: (c.head_dim,))
OUT_BIAS = Transform("out_bias", lambda c: (c.hidden_size,))
QUERY = Transform("query", lambda c: (c.num_heads * c.head_dim, c.hidden_size), "query", heads_part(0, -2))
KEY = Transform("key", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size), "key", heads_part(-2, -1))
VALUE = Transform("value", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size), "value", heads_part(-1, None))
QUERY_BIAS = Transform("query_bias", lambda c: (c.num_heads * c.head_dim,), "query", heads_part(0, -2))
KEY_BIAS = Transform("key_bias", lambda c: (c.num_kv_heads * c.head_dim,), "key", heads_part(-2, -1))
VALUE_BIAS = Transform("value_bias", lambda c: (c.num_kv_heads * c.head_dim,), "value", heads_part(-1, None))
OUTPUT = Transform("output", lambda c: (c.hidden_size, c.num_heads * c.head_dim), "all", transposed)
GATE = Transform("gate", lambda c: (c.intermediate_size, c.hidden_size), "gate", gate_or_up(0))
UP = Transform("up", lambda c: (c.intermediate_size, c.hidden_size), "up", gate_or_up(1))
DOWN = Transform("down", lambda c: (c.hidden_size, c.intermediate_size), "all", transposed)


# -- rule tables -------------------------------------------------------------------------------------------------------

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
_LAYER, _PATH = "model.layers.{layer}", "layers/{layer}"

_DECODER = (
    Rule(EMBED, "embed/embedding", EMBEDDING),
    Rule(f"{_LAYER}.input_layernorm.weight", f"{_PATH}/attn_norm/scale", NORM),
    Rule(f"{_LAYER}.self_attn.q_proj.weight", f"{_PATH}/attn/qkv/kernel", QUERY),
    Rule(f"{_LAYER}.self_attn.k_proj.weight", f"{_PATH}/attn/qkv/kernel", KEY),
    Rule(f"{_LAYER}.self_attn.v_proj.weight", f"{_PATH}/attn/qkv/kernel", VALUE),
    Rule(f"{_LAYER}.self_attn.o_proj.weight", f"{_PATH}/attn/out/kernel", OUTPUT),
    Rule(f"{_LAYER}.post_attention_layernorm.weight", f"{_PATH}/mlp_norm/scale", NORM),
    Rule(f"{_LAYER}.mlp.gate_proj.weight", f"{_PATH}/mlp/gate_up/kernel", GATE),
    Rule(f"{_LAYER}.mlp.up_proj.weight", f"{_PATH}/mlp/gate_up/kernel", UP),
    Rule(f"{_LAYER}.mlp.down_proj.weight", f"{_PATH}/mlp/down/kernel", DOWN),
    Rule("model.norm.weight", "norm/scale", NORM),
    Rule(HEAD, "head/kernel", EMBEDDING),
    # A buffer that older versions of transformers saved; it follows from the configuration.
    Rule(f"{_LAYER}.self_attn.rotary_emb.inv_freq", None, None),
    Rule("model.rotary_emb.inv_freq", None, None),
)
_QKV_BIAS = (
    Rule(f"{_LAYER}.self_attn.q_proj.bias", f"{_PATH}/attn/qkv/bias", QUERY_BIAS),
    Rule(f"{_LAYER}.self_attn.k_proj.bias", f"{_PATH}/attn/qkv/bias", KEY_BIAS),
    Rule(f"{_LAYER}.self_attn.v_proj.bias", f"{_PATH}/attn/qkv/bias", VALUE_BIAS),
)
_OUT_BIAS = (Rule(f"{_LAYER}.self_attn.o_proj.bias", f"{_PATH}/attn/out/bias", OUT_BIAS),)
_QK_NORM = (
    Rule(f"{_LAYER}.self_attn.q_norm.weight", f"{_PATH}/attn/q_norm/scale", HEAD_NORM),
    Rule(f"{_LAYER}.self_attn.k_norm.weight", f"{_PATH}/attn/k_norm/scale", HEAD_NORM),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "llama": _DECODER + _QKV_BIAS + _OUT_BIAS,
    "qwen2": _DECODER + _QKV_BIAS,
    "fast_dllm_v2": _DECODER + _QKV_BIAS,
    "qwen3": _DECODER + _QKV_BIAS + _OUT_BIAS + _QK_NORM,
    "sdar": _DECODER + _QKV_BIAS + _OUT_BIAS + _QK_NORM,
}
