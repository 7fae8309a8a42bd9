"""`Model`: a configuration, its parameters on their devices, and the tokenizer that came with them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from herald_jax import sharding
from herald_jax.config import DTYPES, ModelConfig
from herald_jax.errors import ConfigError
from herald_jax.model import Params, flatten, param_specs, unflatten

if TYPE_CHECKING:
    from herald_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Model:
    """What `generate` runs.

    Attributes:
      config: as converted, except that KV heads may be replicated for `mesh` (`sharding.replicate_kv_heads`).
      params: nested dict of arrays, placed.
      mesh: None, or a mesh with the axes "data" and "model".
      tokenizer_dir: directory with the checkpoint's tokenizer files, if there is one.
      provenance: where the checkpoint came from, as the converter recorded it.
    """

    config: ModelConfig
    params: Params
    mesh: Mesh | None = None
    tokenizer_dir: Path | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises CheckpointError when it carries none."""
        from herald_jax.errors import CheckpointError
        from herald_jax.text import load_tokenizer

        if self.tokenizer_dir is None:
            raise CheckpointError("the model carries no tokenizer files; pass token ids instead of text")
        return load_tokenizer(self.tokenizer_dir)

    @classmethod
    def from_params(cls, config: ModelConfig, params: Params, *, mesh: Mesh | None = None, **fields: Any) -> Model:
        """Place parameters (host or device arrays, shaped as `param_specs(config)`) for `mesh`.

        Raises ConfigError for leaves missing, unknown or of another shape, and for meshes the model cannot use.
        """
        leaves, specs = flatten(params), param_specs(config)
        wrong = sorted(leaves.keys() ^ specs.keys())
        wrong += [path for path, leaf in leaves.items() if path in specs and leaf.shape != specs[path].shape]
        if wrong:
            raise ConfigError(f"parameters do not fit the configuration at {', '.join(wrong[:5])}")
        mesh = None if mesh is None else sharding.normalise_mesh(mesh)
        copies = sharding.replication(config, mesh)
        if copies == 1:
            placed = {p: jax.device_put(leaf, sharding.param_sharding(specs[p], mesh)) for p, leaf in leaves.items()}
            return cls(config, unflatten(placed), mesh, **fields)
        config = sharding.replicate_kv_heads(config, copies)
        stored, specs = specs, param_specs(config)
        placed = {}
        for path in sorted(leaves):
            place = jax.jit(
                functools.partial(sharding.replicate_leaf, path, copies=copies),
                out_shardings=sharding.param_sharding(specs[path], mesh),
            )
            placed[path] = place(jax.device_put(leaves.pop(path), sharding.loading_sharding(stored[path], mesh)))
        return cls(config, unflatten(placed), mesh, **fields)


def load(path: str | Path, *, dtype: str | None = None, mesh: Mesh | None = None) -> Model:
    """Load a converted checkpoint, each parameter straight to its device and dtype.

    Args:
      path: directory written by `herald-convert`.
      dtype: "bfloat16", "float16" or "float32" to run in; None takes the checkpoint's.
      mesh: devices to spread the model over, axes "data" and/or "model" (`sharding.make_mesh`); None: one device.

    Raises:
      CheckpointError: not a checkpoint, an incomplete one, or one written by a newer version.
      ConfigError: unknown dtype, or a mesh over which the model cannot be spread.
    """
    from herald_jax.checkpoint import load_checkpoint, read_manifest

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}")
    mesh = None if mesh is None else sharding.normalise_mesh(mesh)
    copies = sharding.replication(read_manifest(path).config, mesh)  # a mesh that does not fit fails before the read
    checkpoint = load_checkpoint(path, dtype=dtype, sharding_for=lambda _, spec: sharding.loading_sharding(spec, mesh))
    extra: dict[str, Any] = {"tokenizer_dir": checkpoint.tokenizer_dir, "provenance": checkpoint.provenance}
    if copies == 1:
        return Model(checkpoint.config, checkpoint.params, mesh, **extra)
    return Model.from_params(checkpoint.config, checkpoint.params, mesh=mesh, **extra)
