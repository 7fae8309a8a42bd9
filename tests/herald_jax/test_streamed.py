"""The denoising step's own form of a layer, in jax.numpy on the CPU: the same tokens as the ordinary form's."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax import GenerateConfig, Mage, ModelConfig, Threshold
from herald_jax import model as model_file
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.model import bind
from tests.herald_jax import tiny
from tests.herald_jax.test_moe import MOE


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Once it holds something every later trace takes the form of `streamed`, and adds to it for each layer traced."""
    chosen: list[bool] = []
    layer = model_file.streamed_layer

    def counted(*args: Any) -> Any:
        chosen.append(True)
        return layer(*args)

    monkeypatch.setattr(model_file, "streams", lambda *args: bool(chosen))
    monkeypatch.setattr(model_file, "streamed_layer", counted)
    jax.clear_caches()
    yield chosen
    jax.clear_caches()


def test_same_tokens_under_mage(streamed: list[bool]) -> None:
    """Biases, no per-head norms; caches written by the head kernel, and by the plan where K and V go to two places."""
    model = tiny.model(tiny.FORMS["fast_dllm"])
    prompts = tiny.prompts((1, 18))
    request = GenerateConfig(max_new_tokens=9, policy=Threshold(0.6), ignore_stop=True)
    plan = Mage(0.2, dense_layers=1, min_budget=2)
    wanted = herald_jax.generate(model, prompts, request, plan)
    jax.clear_caches()
    streamed.append(True)
    got = herald_jax.generate(model, prompts, request, plan)
    assert got.tokens == wanted.tokens
    assert len(streamed) > 1


@pytest.mark.parametrize("config", [tiny.SDAR, MOE], ids=["dense", "experts"])
def test_same_hidden_states_and_cache(streamed: list[bool], config: ModelConfig) -> None:
    """Per-head norms and no biases; rows that end at different places, some of whose positions are not written. With
    experts: a first layer without them, and half of each head rotated."""
    params = tiny.params(config)
    tokens = jnp.asarray(tiny.prompts((4, 4)))
    start, keep = jnp.asarray([5, 0]), jnp.asarray([[True, True, False, True], [False, True, True, True]])
    attend = DenseAttend(start, (start + 4)[:, None], keep)

    def forward() -> tuple[jax.Array, DeviceKV]:
        positions = start[:, None] + jnp.arange(4)[None]
        return jax.jit(lambda kv: bind(config, params)(tokens, positions, attend, kv))(DeviceKV.empty(config, 2, 16))

    wanted = forward()
    streamed.append(True)
    got = forward()
    assert len(streamed) > 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
