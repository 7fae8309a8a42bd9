"""`herald.json`, the file that makes a directory a checkpoint: what it must hold, and what can be wrong with it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herald_jax.config import ModelConfig
from herald_jax.errors import CheckpointError, ConfigError
from herald_jax.model import param_specs

FORMAT = "herald_jax checkpoint"
FORMAT_VERSION = 1
MANIFEST = "herald.json"
PARAMS = "params"
TOKENIZER = "tokenizer"
SOURCE = "source"


@dataclass(frozen=True)
class Manifest:
    """What `herald.json` says, before any parameter is read."""

    path: Path
    config: ModelConfig
    params: dict[str, dict[str, Any]]
    files: dict[str, int]
    provenance: dict[str, Any]


def read_manifest(path: str | Path) -> Manifest:
    """Read and check a checkpoint's manifest and the presence and size of each of its files; reads no parameter.

    Raises: CheckpointError: no such directory, not a checkpoint, incomplete, damaged, or written by a newer version.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; a checkpoint is a directory written by herald-convert")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(_not_a_checkpoint(path))
    try:
        raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST} has the format {raw['format']!r} instead of {FORMAT!r}")
        version = raw["format_version"]
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} was written by a newer herald_jax (format version {version}, this one reads up to "
                f"{FORMAT_VERSION}); upgrade herald-jax"
            )
        manifest = Manifest(
            path, ModelConfig.from_dict(raw["config"]), raw["params"], raw["files"], dict(raw["provenance"])
        )
        problems = _file_problems(manifest) + spec_problems(manifest.config, manifest.params)
    except ConfigError as error:
        raise CheckpointError(f"{path / MANIFEST} holds an invalid configuration: {error}") from error
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # of no JSON, or of another form
        raise CheckpointError(f"{path / MANIFEST} is damaged ({error!r}); convert the source again") from error
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{path} is incomplete or damaged: {'; '.join(problems[:5])}{more}; convert the source again"
        )
    return manifest


def _not_a_checkpoint(path: Path) -> str:
    if (path / PARAMS).is_dir() or any(path.glob(PARAMS + ".orbax-checkpoint-tmp*")):
        return f"{path} is an incomplete checkpoint (its conversion did not finish); run herald-convert again"
    hugging_face = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    if hugging_face:
        return f"{path} is a Hugging Face checkpoint; convert it first with: herald-convert {path} <destination>"
    return f"{path} is not a herald_jax checkpoint (it has no {MANIFEST}); make one with herald-convert"


def _file_problems(manifest: Manifest) -> list[str]:
    problems = []
    for name, size in manifest.files.items():
        file = manifest.path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
    return problems


def spec_problems(config: ModelConfig, params: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How `{path: {"shape": ...}}` differs from the parameters that `config` declares."""
    specs = param_specs(config)
    problems = [f"parameter {path} is missing" for path in specs if path not in params]
    problems += [f"parameter {path} is unknown" for path in params if path not in specs]
    for path, spec in specs.items():
        stored = params.get(path)
        if stored is not None and tuple(stored["shape"]) != spec.shape:
            problems.append(f"parameter {path} has shape {tuple(stored['shape'])} instead of {spec.shape}")
    return problems


def write_manifest(
    directory: Path, config: ModelConfig, params: Mapping[str, Mapping[str, Any]], provenance: Mapping[str, Any]
) -> None:
    """Write `herald.json` over the files that are in `directory`; the last file of a checkpoint.

    Raises: CheckpointError if `params` are not exactly those that `config` declares.
    """
    problems = spec_problems(config, params)
    if problems:
        raise CheckpointError(f"parameters do not fit the configuration: {'; '.join(problems)}")
    files = {str(f.relative_to(directory)): f.stat().st_size for f in sorted(directory.rglob("*")) if f.is_file()}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "config": config.to_dict(),
        "provenance": dict(provenance),
        "params": params,
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint, for its provenance."""
    from importlib import metadata

    found = {}
    for name in ("herald-jax", "jax", "orbax-checkpoint", "tensorstore", "numpy", "safetensors", "gguf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
