"""From a Hugging Face checkpoint's own files to `ModelConfig`: what is stated is read, what is not stated is asked for.

Only a value that a family's published checkpoints never state is supplied (`hf_families.Family`), and each such value
leaves a sentence in `HFConfig.notes`. Everything else that is missing or contradictory is a `ConfigError` that names
the value, what was expected and the flag of `herald-convert` that settles it. Flags win, and say so in the notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herald_jax.config import DTYPES, DiffusionContract, ModelConfig, MoEConfig
from herald_jax.errors import ConfigError
from herald_jax.hf_families import pick_family, refuse_variants
from herald_jax.hf_files import RawFiles, read_raw_files
from herald_jax.hf_moe import read_moe
from herald_jax.hf_rope import read_rope


@dataclass(frozen=True)
class Overrides:
    """The flags of `herald-convert`; None means "read it". `stop_token_ids=()` means "none at all"."""

    family: str | None = None
    block_length: int | None = None
    small_block: int | None = None
    mask_token_id: int | None = None
    logit_alignment: str | None = None
    first_canvas: str | None = None
    stop_token_ids: tuple[int, ...] | None = None
    dtype: str | None = None


NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class HFConfig:
    """The configuration read, and one sentence for every value that did not come from the checkpoint's own files."""

    config: ModelConfig
    notes: tuple[str, ...]


def read_hf_config(directory: str | Path, overrides: Overrides = NO_OVERRIDES) -> HFConfig:
    """Read config.json, generation_config.json and the tokenizer files of `directory`.

    Raises: ConfigError, one sentence, on the first thing that is missing, contradictory or not supported.
    """
    return _Reader(read_raw_files(Path(directory)), overrides).read()


class _Reader:
    def __init__(self, files: RawFiles, overrides: Overrides):
        self.files = files
        self.config = files.config
        self.flags = overrides
        self.notes: list[str] = []
        self.family = pick_family(files, overrides.family)

    def read(self) -> HFConfig:
        family = self.family
        refuse_variants(self.config, family)
        vocab_size = self._integer("vocab_size")
        if self.files.vocabulary_end > vocab_size:
            raise ConfigError(
                f"the tokenizer has ids up to {self.files.vocabulary_end - 1}, but vocab_size is {vocab_size}; "
                "the tokenizer files belong to another checkpoint"
            )
        hidden_size, num_heads = self._integer("hidden_size"), self._integer("num_attention_heads")
        head_dim = self._head_dim(hidden_size, num_heads)
        moe = None if family.moe is None else read_moe(self.config, family.moe)
        config = ModelConfig(
            family=family.name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._intermediate_size(moe),
            num_layers=self._integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=self._num_kv_heads(num_heads),
            head_dim=head_dim,
            rms_norm_eps=self._number("rms_norm_eps"),
            max_position_embeddings=self._integer("max_position_embeddings"),
            tie_word_embeddings=self._boolean("tie_word_embeddings"),
            qkv_bias=self._bias(family.qkv_bias),
            out_bias=self._bias(family.out_bias),
            qk_norm=family.qk_norm,
            rope=read_rope(self.config, head_dim if family.partial_rotary else None),
            dtype=self._dtype(),  # type: ignore[arg-type]
            diffusion=self._diffusion(vocab_size),
            moe=moe,
        )
        return HFConfig(config, tuple(self.notes))

    # -- architecture --------------------------------------------------------------------------------------------------

    def _stated(self, name: str) -> Any:
        value = self.config.get(name)
        if value is None:
            raise ConfigError(f"config.json does not state {name}; add it to config.json, the value is not guessed")
        return value

    def _integer(self, name: str) -> int:
        value = self._stated(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{name} in config.json is {value!r}, but must be a positive integer")
        return value

    def _number(self, name: str) -> float:
        value = self._stated(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} in config.json is {value!r}, but must be a number")
        return float(value)

    def _boolean(self, name: str) -> bool:
        value = self.config.get(name)
        if value is None:
            self.notes.append(f"{name} false supplied by family {self.family.name}: config.json does not state it")
            return False
        if not isinstance(value, bool):
            raise ConfigError(f"{name} in config.json is {value!r}, but must be true or false")
        return value

    def _bias(self, rule: bool | str) -> bool:
        if isinstance(rule, bool):
            return rule
        return bool(self.config.get(rule, False))

    def _intermediate_size(self, moe: MoEConfig | None) -> int:
        if moe is not None and moe.first_dense_layers == 0 and self.config.get("intermediate_size") is None:
            return moe.intermediate_size  # no layer has an ordinary MLP: the width plays no part
        return self._integer("intermediate_size")

    def _num_kv_heads(self, num_heads: int) -> int:
        if self.config.get("num_key_value_heads") is None and self.family.name == "llama":
            self.notes.append(
                f"num_key_value_heads {num_heads} supplied by family llama: config.json does not state it, "
                "so every head has its own keys"
            )
            return num_heads
        return self._integer("num_key_value_heads")

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        if self.config.get("head_dim") is not None or not self.family.head_dim_from_hidden:
            return self._integer("head_dim")
        if hidden_size % num_heads:
            raise ConfigError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and config.json "
                "states no head_dim"
            )
        return hidden_size // num_heads

    def _dtype(self) -> str:
        stated = {}
        for name in ("dtype", "torch_dtype"):
            value = self.config.get(name)
            if value is not None:
                stated[name] = str(value).removeprefix("torch.")
        if self.flags.dtype is not None:
            if self.flags.dtype not in DTYPES:
                raise ConfigError(f"--dtype is {self.flags.dtype!r}, but must be one of {', '.join(DTYPES)}")
            said = next(iter(stated.values()), "nothing")
            if said != self.flags.dtype:
                self.notes.append(f"dtype {self.flags.dtype} given by --dtype: config.json says {said}")
            return self.flags.dtype
        if not stated:
            raise ConfigError("config.json states neither dtype nor torch_dtype; give --dtype")
        if len(set(stated.values())) > 1:
            raise ConfigError(
                f"config.json contradicts itself: dtype {stated['dtype']}, torch_dtype {stated['torch_dtype']}; "
                "say which with --dtype"
            )
        name, value = next(iter(stated.items()))
        if value not in DTYPES:
            raise ConfigError(
                f"{name} in config.json is {value!r}, but must be one of {', '.join(DTYPES)}; choose with --dtype"
            )
        return value

    # -- diffusion contract --------------------------------------------------------------------------------------------

    def _diffusion(self, vocab_size: int) -> DiffusionContract:
        family, flags = self.family, self.flags
        block_length = self._block_length()
        mask_token_id = self._mask_token_id(vocab_size) if block_length > 1 else flags.mask_token_id
        alignment = self._choice("logit_alignment", flags.logit_alignment, family.logit_alignment)
        canvas = self._choice("first_canvas", flags.first_canvas, family.first_canvas)
        return DiffusionContract(
            block_length=block_length,
            small_block_length=self._small_block(block_length),
            mask_token_id=mask_token_id,
            logit_alignment=alignment,  # type: ignore[arg-type]
            first_canvas=canvas,  # type: ignore[arg-type]
            seed_rule=family.seed_rule,  # type: ignore[arg-type]
            stop_token_ids=self._stop_token_ids(),
            pad_token_id=self._pad_token_id(),
        )

    def _choice(self, name: str, flag: str | None, known: str) -> str:
        if flag is None or flag == known:
            self.notes.append(f"{name} {known} supplied by family {self.family.name}: its config.json never states it")
            return known
        self.notes.append(f"{name} {flag} given by --{name.replace('_', '-')}: family {self.family.name} has {known}")
        return flag

    def _block_length(self) -> int:
        family, flag = self.family, self.flags.block_length
        stated = {name: self.config[name] for name in family.block_fields if self.config.get(name) is not None}
        if flag is not None:
            said = ", ".join(f"{name} {value}" for name, value in stated.items()) or "nothing"
            if set(stated.values()) != {flag}:
                self.notes.append(f"block_length {flag} given by --block-length: config.json says {said}")
            return flag
        if not family.block_fields:
            self.notes.append(
                f"block_length 1 supplied by family {family.name}: a causal language model runs as the AR limit of the "
                "block path"
            )
            return 1
        if not stated and family.block_length is not None:
            self.notes.append(
                f"block_length {family.block_length} supplied by family {family.name}: config.json does not state it"
            )
            return family.block_length
        if not stated:
            raise ConfigError(
                f"config.json does not state the block length ({' or '.join(family.block_fields)}); give --block-length"
            )
        if len(set(stated.values())) > 1:
            both = ", ".join(f"{name} {value}" for name, value in stated.items())
            raise ConfigError(f"config.json contradicts itself: {both}; say which with --block-length")
        return self._integer(next(iter(stated)))

    def _small_block(self, block_length: int) -> int:
        if self.flags.small_block is not None:
            if self.flags.small_block != self.family.small_block:
                self.notes.append(f"small_block_length {self.flags.small_block} given by --small-block")
            return self.flags.small_block
        small = self.family.small_block
        if small is None or block_length == 1:
            return block_length
        self.notes.append(
            f"small_block_length {small} supplied by family {self.family.name}: its config.json never states it"
        )
        return small

    def _mask_token_id(self, vocab_size: int) -> int:
        if self.flags.mask_token_id is not None:
            found = self._stated_mask_ids()
            if found and set(found.values()) != {self.flags.mask_token_id}:
                said = ", ".join(f"{where} says {id_}" for where, id_ in found.items())
                self.notes.append(f"mask_token_id {self.flags.mask_token_id} given by --mask-token-id: {said}")
            return self._inside(self.flags.mask_token_id, vocab_size, "--mask-token-id")
        found = self._stated_mask_ids()
        if len(set(found.values())) > 1:
            said = ", ".join(f"{where} says {id_}" for where, id_ in found.items())
            raise ConfigError(f"the mask token id is contradictory: {said}; say which with --mask-token-id")
        if found:
            where, id_ = next(iter(found.items()))
            return self._inside(id_, vocab_size, where)
        if self.family.mask_token_id is None:
            raise ConfigError(
                "neither config.json (mask_token_id) nor the tokenizer (mask_token) states the mask token id; "
                "give --mask-token-id"
            )
        known, content = self.family.mask_token_id
        named = self.files.token_by_id.get(known, ())
        if named and content and content not in named:
            raise ConfigError(
                f"family {self.family.name} masks with id {known} {content!r}, but the tokenizer has {named[0]!r} "
                "there; give --mask-token-id"
            )
        self.notes.append(
            f"mask_token_id {known} supplied by family {self.family.name}: its config.json never states it"
        )
        return self._inside(known, vocab_size, f"family {self.family.name}")

    def _stated_mask_ids(self) -> dict[str, int]:
        found = {}
        for name in ("mask_token_id", "mask_id"):
            if self.config.get(name) is not None:
                found[f"{name} in config.json"] = self.config[name]
        special = self.files.special("mask_token")
        if special is not None:
            found[f"the tokenizer's mask_token {special[0]!r}"] = special[1]
        if self.family.mask_token_id is not None:
            content = self.family.mask_token_id[1]
            if content and content in self.files.tokens:
                found[f"the tokenizer's {content!r}"] = self.files.tokens[content]
        return found

    def _inside(self, id_: Any, vocab_size: int, where: str) -> int:
        if isinstance(id_, bool) or not isinstance(id_, int):
            raise ConfigError(f"the mask token id of {where} is {id_!r}, but must be an integer; give --mask-token-id")
        if not 0 <= id_ < vocab_size:
            raise ConfigError(
                f"mask_token_id {id_} ({where}) is outside the vocabulary of {vocab_size} rows; give --mask-token-id"
            )
        return id_

    def _stop_token_ids(self) -> tuple[int, ...]:
        if self.flags.stop_token_ids is not None:
            return self.flags.stop_token_ids
        for name, source in (("generation_config.json", self.files.generation), ("config.json", self.config)):
            value = source.get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                    raise ConfigError(f"eos_token_id in {name} is {value!r}, but must be an id or a list of ids")
                return tuple(dict.fromkeys(ids))
        special = self.files.special("eos_token")
        if special is None:
            raise ConfigError(
                "neither generation_config.json, config.json nor the tokenizer states an end-of-text id; "
                "give --stop-token-ids (or --stop-token-ids none)"
            )
        return (special[1],)

    def _pad_token_id(self) -> int | None:
        for source in (self.files.generation, self.config):
            value = source.get("pad_token_id")
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:  # some Llamas say -1 for "none"
                return value
        special = self.files.special("pad_token")
        return None if special is None else special[1]
