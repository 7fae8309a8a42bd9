"""Rotary embedding fields of config.json, in both spellings that `transformers` has used.

Before version 5: `rope_theta` beside `rope_scaling: {"rope_type" | "type": ..., ...} | null`.
Since version 5: `rope_parameters: {"rope_theta": ..., "rope_type": ..., ...}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.config import RopeConfig
from herald_jax.errors import ConfigError

# Fields of each kind: required, optional. What a kind does not know is an error: it would change the angles silently.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_NAMES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


def read_rope(config: Mapping[str, Any], partial_of: int | None = None) -> RopeConfig:
    """The `RopeConfig` of a parsed config.json.

    Args:
      partial_of: head_dim of a family that rotates part of each head and must say how much of it; None for the others,
        where a partial rotation is refused.
    Raises: ConfigError if the base is missing (no class default is trusted: they differ between families and versions),
      the two spellings disagree, the kind is unknown, or a field is missing or unknown.
    """
    parameters = _object(config, "rope_parameters")
    scaling = _object(config, "rope_scaling")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError("rope_parameters differ per layer type, which is not supported")
    rotary_dim = _rotary_dim(config, parameters, partial_of)

    thetas = {value for value in (parameters.get("rope_theta"), config.get("rope_theta")) if value is not None}
    if not thetas:
        raise ConfigError("config.json does not state rope_theta; add it to config.json, the value is not guessed")
    if len(thetas) > 1:
        raise ConfigError(
            f"config.json contradicts itself: rope_theta {config['rope_theta']}, rope_parameters.rope_theta "
            f"{parameters['rope_theta']}"
        )
    theta = thetas.pop()
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(f"rope_theta in config.json is {theta!r}, but must be a number")

    stated = [
        _kind_and_fields(name, values)
        for name, values in (("rope_parameters", parameters), ("rope_scaling", scaling))
        if values
    ]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise ConfigError(f"config.json contradicts itself: rope_parameters {parameters}, rope_scaling {scaling}")
    kind, fields = stated[0] if stated else ("default", {})
    return RopeConfig(theta=float(theta), kind=kind, rotary_dim=rotary_dim, **fields)  # type: ignore[arg-type]


def _rotary_dim(config: Mapping[str, Any], parameters: Mapping[str, Any], head_dim: int | None) -> int | None:
    """How many dimensions of a head are rotated; None for all of them."""
    stated = {
        name: value
        for name, value in (
            ("rope_parameters.partial_rotary_factor", parameters.get("partial_rotary_factor")),
            ("partial_rotary_factor", config.get("partial_rotary_factor")),
        )
        if value is not None
    }
    for name, value in stated.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(f"{name} in config.json is {value!r}, but must be a number above 0 and at most 1")
    if head_dim is None:
        partial = set(stated.values()) - {1}
        if partial:
            raise ConfigError(f"partial_rotary_factor is {partial.pop()}, but only whole-head rotation is supported")
        return None
    sizes = {name: int(head_dim * value) for name, value in stated.items()}
    if config.get("rotary_dim") is not None:
        sizes["rotary_dim"] = config["rotary_dim"]
    if not sizes:
        raise ConfigError(
            "config.json states neither partial_rotary_factor nor rotary_dim; add one, the value is not guessed"
        )
    if len(set(sizes.values())) > 1:
        both = ", ".join(f"{name} {stated.get(name, config.get(name))}" for name in sizes)
        raise ConfigError(f"config.json contradicts itself: {both} (head_dim is {head_dim})")
    size = next(iter(sizes.values()))
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f"rotary_dim in config.json is {size!r}, but must be an integer")
    return None if size == head_dim else size


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} in config.json is {value!r}, but must be an object or null")
    return value


def _kind_and_fields(name: str, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    kinds = {values[key] for key in ("rope_type", "type") if values.get(key) is not None}
    if len(kinds) > 1:
        raise ConfigError(f"{name} contradicts itself: rope_type {values['rope_type']!r}, type {values['type']!r}")
    if not kinds and name == "rope_scaling":
        raise ConfigError(f"rope_scaling {dict(values)} states no rope_type")
    kind = kinds.pop() if kinds else "default"
    if kind not in _FIELDS:
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported are {', '.join(_FIELDS)}")
    required, optional = _FIELDS[kind]
    missing = [field for field in required if values.get(field) is None]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} needs {', '.join(missing)} in {name}")
    allowed = {*required, *optional}
    unknown = [key for key, value in values.items() if key not in allowed and key not in _NAMES and value is not None]
    if unknown:
        raise ConfigError(f"{name} has fields that rope scaling {kind!r} does not use: {', '.join(unknown)}")
    return kind, {field: values[field] for field in (*required, *optional) if values.get(field) is not None}
