"""Which Hugging Face tensor fills which part of which parameter, and every way in which a checkpoint can fail to fit.

A `Rule` says: tensors whose whole name matches `pattern` fill the parameter `path` through a named transform. Fused
parameters (q, k and v; gate and up) are filled by several rules, each its own part. `plan` applies a family's table to
the tensors that exist and reports all problems at once: unmatched, doubly matched, doubly set, never filled, wrong
shape, wrong kind of number.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from convert.source import TensorInfo
from herald_jax.config import ModelConfig
from herald_jax.model import ParamSpec, param_specs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Transform:
    """How a source tensor becomes (part of) a parameter. Shapes use E, K, G, D, F, V as in `model.py`.

    Attributes:
      shape: the source shape that a config demands.
      part: what of the parameter it fills; parameters that need more than "all" are in `PARTS`.
      write: `write(leaf, tensor)` puts the tensor into its part. None: the tensor is the parameter, byte for byte.
    """

    name: str
    shape: Callable[[ModelConfig], Shape]
    part: str = "all"
    write: Callable[[np.ndarray, np.ndarray], None] | None = None


@dataclass(frozen=True)
class Rule:
    """Tensors named `pattern` fill parameter `path` by `transform`.

    Both are literal but for `{layer}`, which stands for a layer number. `path` None: ignored on purpose.
    """

    pattern: str
    path: str | None
    transform: Transform | None

    def match(self, name: str) -> str | None:
        """The layer number ("" if the pattern has none) when the whole name matches, else None."""
        found = _compiled(self.pattern).fullmatch(name)
        return None if found is None else "".join(found.groups())


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(0|[1-9]\d*)"))


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


def _heads(first: int, last: int | None) -> Callable[[np.ndarray, np.ndarray], None]:
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


def _gate_or_up(index: int) -> Callable[[np.ndarray, np.ndarray], None]:
    return lambda leaf, tensor: transposed_into((leaf[:, index, :], tensor))


def _output(leaf: np.ndarray, tensor: np.ndarray) -> None:
    transposed_into((leaf.reshape(-1, leaf.shape[-1]), tensor))


EMBEDDING = Transform("embedding", lambda c: (c.vocab_size, c.hidden_size))
NORM = Transform("norm", lambda c: (c.hidden_size,))
HEAD_NORM = Transform("head_norm", lambda c: (c.head_dim,))
OUT_BIAS = Transform("out_bias", lambda c: (c.hidden_size,))
QUERY = Transform("query", lambda c: (c.num_heads * c.head_dim, c.hidden_size), "query", _heads(0, -2))
KEY = Transform("key", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size), "key", _heads(-2, -1))
VALUE = Transform("value", lambda c: (c.num_kv_heads * c.head_dim, c.hidden_size), "value", _heads(-1, None))
QUERY_BIAS = Transform("query_bias", lambda c: (c.num_heads * c.head_dim,), "query", _heads(0, -2))
KEY_BIAS = Transform("key_bias", lambda c: (c.num_kv_heads * c.head_dim,), "key", _heads(-2, -1))
VALUE_BIAS = Transform("value_bias", lambda c: (c.num_kv_heads * c.head_dim,), "value", _heads(-1, None))
OUTPUT = Transform("output", lambda c: (c.hidden_size, c.num_heads * c.head_dim), "all", _output)
GATE = Transform("gate", lambda c: (c.intermediate_size, c.hidden_size), "gate", _gate_or_up(0))
UP = Transform("up", lambda c: (c.intermediate_size, c.hidden_size), "up", _gate_or_up(1))
DOWN = Transform("down", lambda c: (c.hidden_size, c.intermediate_size), "all", _output)


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
PARTS: dict[str, tuple[str, ...]] = {
    "attn/qkv/kernel": ("query", "key", "value"),
    "attn/qkv/bias": ("query", "key", "value"),
    "mlp/gate_up/kernel": ("gate", "up"),
}


def parts_of(path: str) -> tuple[str, ...]:
    """The parts that a parameter must be filled with."""
    return PARTS.get(path.split("/", 2)[-1] if path.startswith("layers/") else path, ("all",))


# -- applying a table --------------------------------------------------------------------------------------------------


@dataclass
class LeafPlan:
    """One parameter and the tensors that fill it, by part."""

    path: str
    spec: ParamSpec
    sources: dict[str, tuple[str, Transform]] = field(default_factory=dict)


@dataclass
class Plan:
    """The mapping of a whole checkpoint. `problems` empty means that every parameter is filled exactly once.

    Attributes:
      leaves: by parameter path, in the order in which their tensors lie in the files.
      ignored: tensors that a rule ignores, with the reason.
      compare_head: lm_head.weight is present although tied: it must equal the embedding (checked by reading both).
    """

    leaves: dict[str, LeafPlan]
    ignored: dict[str, str]
    problems: list[str]
    compare_head: bool = False


def plan(config: ModelConfig, tensors: Mapping[str, TensorInfo], rules: tuple[Rule, ...] | None = None) -> Plan:
    """Match `tensors` against the family's rules (or `rules`) and collect every problem. Reads no tensor."""
    rules = RULES[config.family] if rules is None else rules
    specs = param_specs(config)
    leaves = {path: LeafPlan(path, spec) for path, spec in specs.items()}
    result = Plan({}, {}, [])
    touched: set[tuple[str, str]] = set()
    for name in sorted(tensors, key=_natural):
        info = tensors[name]
        matches = [(rule, layer) for rule in rules if (layer := rule.match(name)) is not None]
        if not matches:
            result.problems.append(f"{name} {list(info.shape)} is unknown to family {config.family}")
            continue
        if len(matches) > 1:
            said = " and ".join(rule.pattern for rule, _ in matches)
            result.problems.append(f"{name} matches two rules, {said}")
            continue
        rule, layer = matches[0]
        if rule.path is None or rule.transform is None:
            result.ignored[name] = "follows from the configuration"
            continue
        path = rule.path.replace("{layer}", layer)
        if path not in leaves:
            if name == HEAD and config.tie_word_embeddings:
                result.compare_head = True
                result.ignored[name] = "tied to the embedding"
            else:
                result.problems.append(_superfluous(name, layer, config))
                continue
        elif rule.transform.part in leaves[path].sources:
            earlier = leaves[path].sources[rule.transform.part][0]
            result.problems.append(f"{path} ({rule.transform.part}) is set by both {earlier} and {name}")
            continue
        else:
            leaves[path].sources[rule.transform.part] = (name, rule.transform)
        touched.add((path, rule.transform.part))
        expected = rule.transform.shape(config)
        if info.shape != expected:
            result.problems.append(f"{name} has shape {list(info.shape)} instead of {list(expected)}")
        if info.dtype is None:
            result.problems.append(
                f"{name} is stored as {info.stored}, which cannot be converted; use unquantised weights"
            )
    for path, leaf in leaves.items():
        parts = parts_of(path)
        result.problems += [_never_filled(path, part, rules, config) for part in parts if (path, part) not in touched]
        leaf.sources = {part: leaf.sources[part] for part in parts if part in leaf.sources}
    result.leaves = dict(sorted(leaves.items(), key=lambda item: _position(item[1], tensors)))
    return result


def _superfluous(name: str, layer: str, config: ModelConfig) -> str:
    if layer and int(layer) >= config.num_layers:
        return f"{name} belongs to layer {layer}, but num_hidden_layers is {config.num_layers}"
    return f"{name} has no place in this configuration (family {config.family}: {_switches(config)})"


def _switches(config: ModelConfig) -> str:
    names = ("qkv_bias", "out_bias", "qk_norm", "tie_word_embeddings")
    return ", ".join(f"{name} {str(getattr(config, name)).lower()}" for name in names)


def _never_filled(path: str, part: str, rules: tuple[Rule, ...], config: ModelConfig) -> str:
    layer = path.split("/")[1] if path.startswith("layers/") else ""
    for rule in rules:
        if rule.path is None or rule.transform is None or rule.transform.part != part:
            continue
        if rule.path.replace("{layer}", layer) == path:
            name = rule.pattern.replace("{layer}", layer)
            why = " (tie_word_embeddings is false)" if name == HEAD else ""
            return f"{name} {list(rule.transform.shape(config))} is missing{why}"
    return f"no rule fills {path} ({part})"


def _position(leaf: LeafPlan, tensors: Mapping[str, TensorInfo]) -> tuple[str, int]:
    places = [(tensors[name].file, tensors[name].offset) for name, _ in leaf.sources.values()]
    return min(places, default=("", 0))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in name.split(".")]
