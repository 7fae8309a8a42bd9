"""`Model.from_params` and `load`: what they refuse, and where parameters end up."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import CheckpointError, ConfigError, Model, load, make_mesh
from herald_jax.checkpoint import save_checkpoint
from herald_jax.model import flatten, param_specs, unflatten
from tests.herald_jax import tiny


def changed(**leaves: Any) -> dict[str, Any]:
    flat = flatten(tiny.params(tiny.SDAR)) | leaves
    return unflatten({path: leaf for path, leaf in flat.items() if leaf is not None})


@pytest.mark.parametrize(
    ("params", "where"),
    [
        (changed(**{"norm/scale": None}), "norm/scale"),
        (changed(**{"layers/0/attn/qkv/bias": np.zeros((2, 4, 16))}), "layers/0/attn/qkv/bias"),
        (changed(**{"head/kernel": np.zeros((96, 31), np.float32)}), "head/kernel"),
        (changed(**{"layers/2/mlp/down/kernel": np.zeros((48, 32))}), "layers/2/mlp/down/kernel"),
    ],
    ids=["missing", "unknown", "shape", "layer"],
)
def test_parameters_must_fit(params: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"parameters do not fit the configuration at {where}")):
        Model.from_params(tiny.SDAR, params)


def test_up_to_five_misfits_are_named() -> None:
    with pytest.raises(ConfigError, match=r"at (\S+, ){4}\S+$"):
        Model.from_params(tiny.SDAR, {})


def test_parameters_are_placed_and_kept() -> None:
    model = Model.from_params(tiny.SDAR, tiny.params(tiny.SDAR), provenance={"source": "here"})
    assert model.provenance == {"source": "here"}
    for path, leaf in flatten(model.params).items():
        assert isinstance(leaf, jax.Array)
        assert leaf.devices() == {jax.devices()[0]}
        assert (np.asarray(leaf) == flatten(tiny.params(tiny.SDAR))[path]).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loading") / "model"
    save_checkpoint(path, tiny.SDAR, tiny.params(tiny.SDAR), provenance={"notes": ["random"]})
    return path


def test_load_restores_what_was_saved(checkpoint: Path) -> None:
    model = load(str(checkpoint))
    assert model.config == tiny.SDAR
    assert model.mesh is None
    assert model.tokenizer_dir is None
    assert model.provenance["notes"] == ["random"]
    for path, leaf in flatten(model.params).items():
        assert leaf.devices() == {jax.devices()[0]}
        assert (np.asarray(leaf) == flatten(tiny.params(tiny.SDAR))[path]).all()
    with pytest.raises(CheckpointError, match="carries no tokenizer files"):
        _ = model.tokenizer


def test_load_in_another_dtype(checkpoint: Path) -> None:
    model = load(checkpoint, dtype="bfloat16")
    assert model.config == dataclasses.replace(tiny.SDAR, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in flatten(model.params).values()} == {"bfloat16"}
    with pytest.raises(ConfigError, match="dtype is 'float8', but must be one of bfloat16, float16, float32"):
        load(checkpoint, dtype="float8")


@pytest.mark.parametrize("shape", [{"model": 2}, {"data": 2, "model": 2}, {"model": 4}], ids=str)
def test_load_onto_a_mesh_is_placing_the_parameters(checkpoint: Path, shape: dict[str, int]) -> None:
    """Also where four devices share two KV heads, which are replicated after the read."""
    mesh = make_mesh(**shape)
    loaded = load(checkpoint, mesh=mesh)
    placed = Model.from_params(tiny.SDAR, tiny.params(tiny.SDAR), mesh=mesh)
    assert (loaded.config, loaded.mesh) == (placed.config, placed.mesh)
    assert loaded.config.num_kv_heads == max(2, shape["model"])
    assert loaded.provenance["notes"] == ["random"]
    for (path, ours), theirs in zip(flatten(loaded.params).items(), flatten(placed.params).values(), strict=True):
        assert ours.shape == theirs.shape == param_specs(loaded.config)[path].shape
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim), path
        assert (np.asarray(ours) == np.asarray(theirs)).all(), path


def test_load_refuses_a_mesh_before_it_reads(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="2 KV heads with 2 query heads each cannot be spread over 3 devices"):
        load(checkpoint, mesh=make_mesh(model=3))
    with pytest.raises(ConfigError, match="mesh axis 'heads' is unknown"):
        load(checkpoint, mesh=jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2]))


def test_load_of_something_else(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            load(path)
