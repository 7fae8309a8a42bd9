"""Fixtures shared by the tests of `herald_jax`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

import herald_jax
from convert.converter import convert

ORACLES = pathlib.Path(__file__).parents[1] / "oracles" / "data"


@pytest.fixture(scope="session")
def oracle_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., herald_jax.Model]:
    """`oracle_model(name, block_length=None, small_block_length=None)`: a landed checkpoint of tests/oracles.

    Converted and loaded once per session. Other block lengths than the checkpoint's own share its parameters.
    """
    root = tmp_path_factory.mktemp("oracles")
    loaded: dict[str, herald_jax.Model] = {}

    def get(name: str, block_length: int | None = None, small_block_length: int | None = None) -> herald_jax.Model:
        if name not in loaded:
            convert(ORACLES / name, root / name)
            loaded[name] = herald_jax.load(root / name)
        model = loaded[name]
        if block_length is None:
            return model
        contract = dataclasses.replace(
            model.config.diffusion,
            block_length=block_length,
            small_block_length=small_block_length or block_length,
        )
        return dataclasses.replace(model, config=dataclasses.replace(model.config, diffusion=contract))

    return get
