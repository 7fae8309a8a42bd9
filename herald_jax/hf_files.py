"""The small JSON files of a Hugging Face checkpoint, read raw: no defaults filled in, no remote code run.

`transformers` would fill what a file lacks with class defaults, and from then on nobody can tell a stated value from a
default. Here absence stays visible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from herald_jax.errors import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class RawFiles:
    """Parsed files of one checkpoint directory; a file that does not exist is an empty mapping.

    Attributes:
      directory: where they were read.
      config, generation: config.json, generation_config.json.
      tokenizer_config: tokenizer_config.json.
      tokens: content → id of every token that a tokenizer file adds to the base vocabulary.
      token_by_id: the same the other way round, every content an id is given.
      vocabulary_end: one past the largest id of any tokenizer file, 0 without tokenizer files.
      modelling_code: text of bundled modeling*.py files (read, never run).
    """

    directory: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    token_by_id: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    vocabulary_end: int = 0
    modelling_code: str = ""

    def special(self, name: str) -> tuple[str, int] | None:
        """Content and id of the tokenizer's `mask_token`, `eos_token` or `pad_token`, None if it has none.

        Raises: ConfigError if the tokenizer names a token that none of its files gives an id.
        """
        token = self.tokenizer_config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is None:
            return None
        if token not in self.tokens:
            raise ConfigError(f"tokenizer_config.json names {name} {token!r}, but no tokenizer file gives it an id")
        return token, self.tokens[token]


def read_raw_files(directory: Path) -> RawFiles:
    """Read the JSON files of `directory`.

    Raises: ConfigError if config.json is absent, a file is not a JSON object, or a token's id is not a number.
    """
    if not (directory / "config.json").is_file():
        hint = ""
        if (directory / "adapter_config.json").is_file():
            hint = " (it holds a LoRA adapter: merge it into its base model first)"
        raise ConfigError(f"{directory} has no config.json{hint}")
    tokenizer_config = _read_object(directory / "tokenizer_config.json")
    tokenizer = _read_object(directory / "tokenizer.json")
    pairs: list[tuple[str, int]] = []
    for token, id_ in _read_object(directory / "added_tokens.json").items():
        pairs.append((token, _token_id("added_tokens.json", id_)))
    for entry in tokenizer.get("added_tokens") or ():
        pairs.append((entry["content"], _token_id("tokenizer.json", entry["id"])))
    for id_, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        content = entry["content"] if isinstance(entry, Mapping) else entry
        pairs.append((content, _token_id("tokenizer_config.json", id_)))
    by_id: dict[int, tuple[str, ...]] = {}
    for content, id_ in pairs:
        if content not in by_id.get(id_, ()):
            by_id[id_] = (*by_id.get(id_, ()), content)
    vocabulary = _vocabulary(directory, tokenizer)
    ids = [id_ for _, id_ in pairs] + list(vocabulary.values())
    # Later sources win, and the named special tokens may sit in the base vocabulary (Llama's </s>).
    named = {n: vocabulary[n] for n in _named_specials(tokenizer_config) if n in vocabulary}
    return RawFiles(
        directory=directory,
        config=_read_object(directory / "config.json"),
        generation=_read_object(directory / "generation_config.json"),
        tokenizer_config=tokenizer_config,
        tokens=named | dict(pairs),
        token_by_id=by_id,
        vocabulary_end=max(ids, default=-1) + 1,
        modelling_code="\n".join(
            f.read_text(encoding="utf-8", errors="replace") for f in sorted(directory.glob("model*.py"))
        ),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__} instead of an object")
    return value


def _token_id(file: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+", value):
        return int(value)
    raise ConfigError(f"{file} gives a token the id {value!r}, which is not a number")


def _vocabulary(directory: Path, tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, list):  # Unigram: [[content, score], ...]
        return {entry[0]: i for i, entry in enumerate(vocab)}
    return dict(vocab) if isinstance(vocab, Mapping) else _read_object(directory / "vocab.json")


def _named_specials(tokenizer_config: Mapping[str, Any]) -> list[str]:
    values = (tokenizer_config.get(name) for name in ("mask_token", "eos_token", "pad_token", "bos_token"))
    return [v["content"] if isinstance(v, Mapping) else v for v in values if v is not None]
