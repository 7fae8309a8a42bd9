"""The dense and MAGE plans in bfloat16 on the card: with the kernels as without them, within the dtype's rounding."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.common import rms_error
from herald_jax import Dense, GenerateConfig, Mage, Model, ModelConfig, StaticLowConfidence, generate
from herald_jax.cache import DeviceKV
from herald_jax.generate import _Run
from herald_jax.mage import MageKV
from herald_jax.plans import Plan
from tests.herald_jax import tiny

pytestmark = pytest.mark.gpu
REQUEST = GenerateConfig(max_new_tokens=40, policy=StaticLowConfidence(2), ignore_stop=True)
LENGTHS = (3, 130, 300, 64)


def config_of(form: str, head_dim: int) -> ModelConfig:
    base = dataclasses.replace(tiny.FORMS[form], num_layers=3, hidden_size=128, head_dim=head_dim, dtype="bfloat16")
    contract = dataclasses.replace(base.diffusion, block_length=32, small_block_length=8)
    return dataclasses.replace(base, diffusion=contract, max_position_embeddings=1024)


def model_of(config: ModelConfig) -> Model:
    return Model.from_params(config, tiny.params(config))


def committed(model: Model, plan: Plan, implementation: str | None) -> tuple[Any, np.ndarray]:
    """K after one block of every row, and how many of its entries each row has committed."""
    prompts = tiny.prompts(LENGTHS)
    request = dataclasses.replace(REQUEST, policy=StaticLowConfidence(1))
    run = _Run(model, prompts, request, plan, None, implementation)
    run.advance(pause=True)
    run.advance(pause=True)
    cache = run._rows.cache
    full = cache.full if isinstance(cache, MageKV) else cache
    assert isinstance(full, DeviceKV)
    return full.k, np.asarray(run._rows.length)


@pytest.mark.parametrize(("form", "head_dim"), [("sdar", 128), ("fast_dllm", 64)])
@pytest.mark.parametrize("plan", [Dense(), Mage(0.3, min_budget=16, dense_layers=1)], ids=["dense", "mage"])
def test_the_cache_is_the_same_with_and_without_the_kernels(form: str, head_dim: int, plan: Plan) -> None:
    """Of the prompt: tokens written later may differ where roundings decide a near tie. A second run is the same."""
    model = model_of(config_of(form, head_dim))
    ours, lengths = committed(model, plan, "mosaic_gpu")
    again, _ = committed(model, plan, "mosaic_gpu")
    for row, length in enumerate(lengths):
        written = [np.asarray(k[:, row, :, :length], np.float32) for k in (ours, again)]
        np.testing.assert_array_equal(*written)
    plain, _ = committed(model, plan, "xla")
    for row, length in enumerate(LENGTHS):
        whole = length // 32 * 32
        if whole:
            assert rms_error(ours[:, row, :, :whole], plain[:, row, :, :whole]) < 0.02


@pytest.mark.parametrize("form", ["sdar", "fast_dllm"])
def test_a_budget_of_everything_is_dense(form: str) -> None:
    model = model_of(config_of(form, 128))
    prompts = tiny.prompts(LENGTHS)
    dense = generate(model, prompts, REQUEST, Dense())
    sparse = generate(model, prompts, REQUEST, Mage(1.0))
    # The pool holds the same entries in the same order, but the kernel cuts another length into other splits: a near
    # tie may fall the other way, and what follows it differs. The first block of every row is compared.
    same = [a[:8] == b[:8] for a, b in zip(dense.tokens, sparse.tokens, strict=True)]
    assert sum(same) >= 3, (dense.tokens, sparse.tokens)
    assert sparse.stats.sparse_blocks == 0
