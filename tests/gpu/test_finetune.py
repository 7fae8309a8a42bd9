"""MAGE fine-tuning with cuDNN's attention on the card: the gradient that the plain form has."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.finetune_step import LossOptions, block_loss
from herald_jax.model import flatten
from herald_jax.objective import corrupt
from herald_jax.plans import Mage
from tests.herald_jax import tiny

pytestmark = pytest.mark.gpu


def test_cudnn_has_the_plain_gradient() -> None:
    """One layer, so that both forms choose from the same numbers; half of the entries, so that the mask has holes."""
    contract = dataclasses.replace(tiny.SDAR.diffusion, block_length=32, small_block_length=32)
    config = dataclasses.replace(
        tiny.SDAR, num_layers=1, hidden_size=128, head_dim=64, dtype="bfloat16", diffusion=contract
    )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tiny.params(config))
    tokens = jax.random.randint(jax.random.key(1), (2, 256), 0, tiny.MASK)
    at = jnp.array([[2, 5, 7], [1, 6, 6]])
    batch = corrupt(jax.random.key(2), tokens, contract, at=at)

    def gradient(implementation: str | None) -> dict[str, np.ndarray]:
        options = LossOptions(
            Mage(0.5, min_budget=1, dense_layers=0, page_size=1), remat=False, implementation=implementation
        )
        found = jax.jit(jax.grad(lambda p: block_loss(config, p, batch, options)[0]))(params)
        return {path: np.asarray(leaf) for path, leaf in flatten(found).items()}

    plain, ours = gradient(None), gradient("cudnn")
    for path, leaf in plain.items():
        error = np.linalg.norm(ours[path] - leaf) / np.linalg.norm(leaf)
        assert error < 0.02, f"{path}: {error}"
