"""What a model is (`ModelConfig`), how it writes (`DiffusionContract`), what is asked of it (`GenerateConfig`, plans).

Everything here is frozen, hashable and validated on construction, so that any instance can be a static argument of
`jax.jit` and no later stage has to check again. Reading Hugging Face files into these classes is `hf_config.py`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from herald_jax.errors import ConfigError
from herald_jax.fields import FLOAT32_MOST, MOST, ask, ids, real, switch, typed, whole

DTYPES = ("bfloat16", "float16", "float32")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _require(value > 0, f"{name} is {value!r}, but must be a positive integer")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and, optionally, one of the published frequency scalings.

    Attributes:
      theta: base of the geometric frequency series.
      kind: "default"; "linear" (positions divided by `factor`); "llama3" (Llama 3.1's wavelength-dependent
        interpolation); "yarn" (arXiv 2309.00071, NTK-by-parts with an attention temperature).
      factor: context extension factor, used by every kind but "default".
      low_freq_factor, high_freq_factor: "llama3" only.
      original_max_position_embeddings: trained context, "llama3" and "yarn".
      beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: "yarn" only.
      rotary_dim: how many of a head's leading dimensions are rotated, the rest passes (LLaDA2: half); None = all.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        typed(self)
        kinds = ("default", "linear", "llama3", "yarn")
        _require(self.kind in kinds, f"rope scaling {self.kind!r} is not supported; supported are {', '.join(kinds)}")
        _require(self.theta > 0, f"rope_theta is {self.theta!r}, but must be positive")
        _require(self.factor >= 1, f"rope scaling factor is {self.factor!r}, but must be at least 1")
        if self.kind in ("llama3", "yarn"):
            _require(
                self.original_max_position_embeddings is not None and self.original_max_position_embeddings > 0,
                f"rope scaling {self.kind!r} needs a positive original_max_position_embeddings, "
                f"got {self.original_max_position_embeddings!r}",
            )
        if self.kind == "llama3":
            _require(
                self.high_freq_factor > self.low_freq_factor,
                f"rope scaling 'llama3' needs high_freq_factor ({self.high_freq_factor}) above "
                f"low_freq_factor ({self.low_freq_factor})",
            )


@dataclass(frozen=True)
class DiffusionContract:
    """How a family denoises; the part of a model that its weights do not show.

    Attributes:
      block_length: M, positions denoised together. 1 is plain autoregressive decoding (the AR limit of the block path).
      small_block_length: positions are revealed inside the leftmost sub-block of this length that still has a mask
        (Fast-dLLM v2: 8 of 32). Equal to block_length for families without sub-blocks.
      mask_token_id: the id that stands for a hole; None only when block_length is 1.
      logit_alignment: "same" (logits at position i predict token i) or "shifted" (they predict token i + 1).
      first_canvas: "all_masked", or "seed_and_masks": position 0 of a new block is the prediction made by the last
        logits of the committed prefix.
      seed_rule: how that seed token is drawn at temperature > 0: "argmax" always (Fast-dLLM v2's published code), or
        "sample" like every other token (the AR limit, where the seed is the only token there is).
      commit: "bidirectional": the finished block is written to the KV cache by a forward that attends to the whole
        block. Families that commit causally are refused.
      stop_token_ids: ids that end a row once no masked position precedes them.
      pad_token_id: the tokenizer's padding id, if it has one.
    """

    block_length: int
    small_block_length: int
    mask_token_id: int | None
    logit_alignment: Literal["same", "shifted"]
    first_canvas: Literal["all_masked", "seed_and_masks"]
    seed_rule: Literal["argmax", "sample"] = "argmax"
    commit: Literal["bidirectional"] = "bidirectional"
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        typed(self)
        _positive(self, "block_length", "small_block_length")
        _require(self.block_length <= 256, f"block_length is {self.block_length}, but at most 256 is supported")
        _require(
            self.block_length % self.small_block_length == 0,
            f"block_length {self.block_length} is not a multiple of small_block_length {self.small_block_length}; "
            "give a divisor with --small-block",
        )
        _require(
            self.mask_token_id is not None or self.block_length == 1,
            f"block_length {self.block_length} needs a mask token id; give it with --mask-token-id",
        )
        choices = {
            "logit_alignment": ("same", "shifted"),
            "first_canvas": ("all_masked", "seed_and_masks"),
            "seed_rule": ("argmax", "sample"),
            "commit": ("bidirectional",),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            _require(value in allowed, f"{name} is {value!r}, but must be one of {', '.join(allowed)}")
        pair = (self.logit_alignment, self.first_canvas)
        _require(
            pair in (("same", "all_masked"), ("shifted", "seed_and_masks")),
            f"logit_alignment {pair[0]!r} with first_canvas {pair[1]!r} is contradictory: shifted logits need a seed "
            "token at position 0 (--first-canvas seed_and_masks), same-position logits need all masks "
            "(--first-canvas all_masked)",
        )
        stops = ids(self.stop_token_ids)
        _require(stops is not None, f"stop_token_ids is {self.stop_token_ids!r}, but must be a list of token ids")
        object.__setattr__(self, "stop_token_ids", stops)

    @property
    def seeded(self) -> bool:
        """Whether a new block starts with one known token."""
        return self.first_canvas == "seed_and_masks"


@dataclass(frozen=True)
class MoEConfig:
    """The expert layers of a mixture of experts, which replace the MLP of every layer but the first few.

    Attributes:
      num_experts: X, routed experts per layer.
      experts_per_token: how many of them each token is sent to.
      intermediate_size: MLP width of one expert.
      router: how scores follow from the router's float32 logits: "sigmoid", each expert on its own (LLaDA2), or
        "softmax" over all experts (SDAR-MoE).
      renormalise: a token's weights are divided by their sum.
      routed_scaling: factor on the weights, after that.
      expert_bias: a learnt bias per expert is added to the scores for choosing; the weights are the scores without it.
      num_groups, groups_per_token: the experts lie in equal consecutive groups, and a token chooses among its best
        `groups_per_token` groups, ranked by the sum of their two highest scores. 1 and 1: no groups.
      shared_size: MLP width of the shared expert that every token passes; 0 = none.
      first_dense_layers: leading layers that keep an ordinary MLP of `ModelConfig.intermediate_size`.
      block_capacity: LLaDA2.2's block routing: the tokens of one block choose among these many experts, those whose
        highest score over the block's tokens is largest (groups then play no part). None = every token for itself.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    router: Literal["sigmoid", "softmax"]
    renormalise: bool
    routed_scaling: float = 1.0
    expert_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0
    first_dense_layers: int = 0
    block_capacity: int | None = None

    def __post_init__(self) -> None:
        typed(self)
        _positive(self, "num_experts", "experts_per_token", "intermediate_size", "num_groups", "groups_per_token")
        _require(self.router in ("sigmoid", "softmax"), f"router is {self.router!r}, but must be sigmoid or softmax")
        for name in ("shared_size", "first_dense_layers"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} is {value!r}, but must be 0 or more")
        _require(
            self.routed_scaling > 0, f"routed_scaling_factor is {self.routed_scaling!r}, but must be a positive number"
        )
        _require(
            self.num_experts % self.num_groups == 0,
            f"num_experts {self.num_experts} is not a multiple of n_group {self.num_groups}",
        )
        _require(
            self.groups_per_token <= self.num_groups,
            f"topk_group is {self.groups_per_token}, but there are only {self.num_groups} groups (n_group)",
        )
        size = self.num_experts // self.num_groups
        _require(
            self.num_groups == 1 or size >= 2,
            f"groups of {size} expert (num_experts {self.num_experts}, n_group {self.num_groups}) cannot be ranked by "
            "their two best",
        )
        open_to_token = self.groups_per_token * size if self.block_capacity is None else self.block_capacity
        _require(
            self.block_capacity is None or 0 < self.block_capacity <= self.num_experts,
            f"expert_capacity is {self.block_capacity!r}, but must be between 1 and num_experts {self.num_experts}",
        )
        _require(
            self.experts_per_token <= open_to_token,
            f"num_experts_per_tok is {self.experts_per_token}, but a token can choose among {open_to_token} experts "
            "only",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and diffusion contract of one checkpoint.

    The fields are those of a pre-norm, SwiGLU, grouped-query decoder, `moe` those of its expert layers (None: every
    layer has an ordinary MLP). `family` names the checkpoint family ("fast_dllm_v2", "sdar", "llada2", "sdar_moe",
    "llama", "qwen2", "qwen3"); no computation depends on the name, only on the fields.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: Literal["bfloat16", "float16", "float32"]
    diffusion: DiffusionContract
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        typed(self)
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        _positive(self, *sizes, "max_position_embeddings")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"head_dim is {self.head_dim}, but rotary embedding needs an even one")
        rotary_dim = self.rope.rotary_dim
        _require(
            rotary_dim is None or (rotary_dim % 2 == 0 and 0 < rotary_dim <= self.head_dim),
            f"rotary_dim is {rotary_dim!r}, but must be even and at most head_dim {self.head_dim}",
        )
        _require(self.rms_norm_eps > 0, f"rms_norm_eps is {self.rms_norm_eps!r}, but must be positive")
        _require(self.dtype in DTYPES, f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}")
        ids = {"mask_token_id": self.diffusion.mask_token_id, "pad_token_id": self.diffusion.pad_token_id}
        ids |= {f"stop_token_ids[{i}]": t for i, t in enumerate(self.diffusion.stop_token_ids)}
        for name, token in ids.items():
            _require(
                token is None or 0 <= token < self.vocab_size,
                f"{name} is {token}, outside the vocabulary of {self.vocab_size} rows",
            )
        _require(
            self.diffusion.mask_token_id is None or self.diffusion.mask_token_id not in self.diffusion.stop_token_ids,
            f"mask_token_id {self.diffusion.mask_token_id} is also a stop token id",
        )

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer number `layer` has experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token occupies in the KV cache, all layers."""
        itemsize = 4 if self.dtype == "float32" else 2
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; `from_dict` is its inverse. Fields that came later are left out while they say nothing, so
        that a dense model's form, and what is stored of it, stays readable to older versions."""
        values = dataclasses.asdict(self)
        if self.moe is None:
            del values["moe"]
        if self.rope.rotary_dim is None:
            del values["rope"]["rotary_dim"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Rebuild from `to_dict`'s form. Raises ConfigError on unknown or missing fields."""
        values = dict(values)
        values["rope"] = _strict(RopeConfig, values.get("rope"))
        values["diffusion"] = _strict(DiffusionContract, values.get("diffusion"))
        if values.get("moe") is not None:
            values["moe"] = _strict(MoEConfig, values["moe"])
        return _strict(cls, values)


def _strict(cls: type, values: Any) -> Any:
    _require(isinstance(values, dict), f"{cls.__name__} must be a mapping of fields, got {type(values).__name__}")
    names = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(names))
    _require(not unknown, f"{cls.__name__} has unknown fields {', '.join(unknown)}; was it written by a newer version?")
    missing = [
        name
        for name, f in names.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    _require(not missing, f"{cls.__name__} lacks the fields {', '.join(missing)}")
    return cls(**values)


def _default_policy() -> Any:
    from herald_jax.denoise import Threshold

    return Threshold(0.9)


@dataclass(frozen=True)
class GenerateConfig:
    """One generation request. Temperature, top-p, thresholds and the seed are traced: other values never recompile,
    except that greedy, sampled and top-p decoding (temperature 0, above 0, top_p below 1) are three programs.

    Attributes:
      max_new_tokens: upper bound of new tokens per row; the last block is denoised whole, then cut.
      policy: which masked positions a step reveals (`herald_jax.denoise`).
      temperature: 0 takes the most probable token; above 0 samples softmax(logits / temperature).
      top_k: sample among the k most probable tokens only; 0 switches it off.
      top_p: sample in the smallest set of tokens whose probability reaches top_p; 1 switches it off.
      seed: row b draws from `fold_in(key(seed), b)` unless `generate(..., keys=)` names the keys.
      stop_token_ids: ids that end a row; None takes the checkpoint's.
      ignore_stop: keep writing after a stop token (benchmarks).
      block_cache: Fast-dLLM v2's sub-block cache: while the first position of the current small block is known, only
        the small block is run, against the K and V its block had at the last whole-block forward.
      prefill_chunk: most prompt tokens per prefill forward; bounds its activation memory.
      room: tokens that a row's cache has room for at least, so that batches of shorter and longer prompts run the same
        compiled programs; 0 makes room for what the batch needs.
    """

    max_new_tokens: int = 256
    policy: Any = field(default_factory=_default_policy)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] | None = None
    ignore_stop: bool = False
    block_cache: bool = False
    prefill_chunk: int = 1024
    room: int = 0

    def __post_init__(self) -> None:
        from herald_jax.denoise import POLICIES, of_numbers

        policy = self.policy
        ask(
            isinstance(policy, POLICIES),
            f"policy is {policy!r}, but must be one of {', '.join(p.__name__ for p in POLICIES)}",
        )
        object.__setattr__(self, "policy", of_numbers(policy))
        for name, kind, least, most, expected in (
            ("max_new_tokens", whole, 1, math.inf, "a positive integer"),
            ("temperature", real, 0, FLOAT32_MOST, "0 (greedy) or a positive number that float32 holds"),
            ("top_k", whole, 0, math.inf, "0 (off) or a positive integer"),
            ("top_p", real, 0, 1, "in (0, 1]"),
            ("seed", whole, -(2**63), 2**63 - 1, "an integer of 64 bits"),
            ("ignore_stop", switch, False, True, "True or False"),
            ("block_cache", switch, False, True, "True or False"),
            ("prefill_chunk", whole, 1, math.inf, "a positive number of tokens"),
            ("room", whole, 0, MOST, f"0 (what is needed) or a positive number of tokens, at most {MOST}"),
        ):
            value = getattr(self, name)
            found = kind(value)
            ok = found is not None and least <= found <= most and not (name == "top_p" and found == 0)
            ask(ok, f"{name} is {value!r}, but must be {expected}")
            object.__setattr__(self, name, found)  # NumPy's number as Python's
        if self.stop_token_ids is not None:
            stops = ids(self.stop_token_ids)
            ask(
                stops is not None and all(-(2**31) <= i < 2**31 for i in stops),
                f"stop_token_ids is {self.stop_token_ids!r}, but must be token ids, as (2, 7), or None for the "
                "checkpoint's",
            )
            object.__setattr__(self, "stop_token_ids", stops)
