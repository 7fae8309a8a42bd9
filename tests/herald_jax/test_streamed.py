"""The denoising step's own form of a layer, in jax.numpy on the CPU: the same tokens as the ordinary form's."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import herald_jax
from herald_jax import Dense, GenerateConfig, Mage, Threshold
from herald_jax import model as model_file
from herald_jax.plans import Plan
from tests.herald_jax import tiny
from tests.herald_jax.tiny import quick_compilation  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")


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


@pytest.mark.parametrize(
    ("form", "plan"),
    [("sdar", Dense()), ("fast_dllm", Mage(0.2, dense_layers=1, min_budget=2))],
    ids=["dense", "mage"],
)
def test_same_tokens(form: str, plan: Plan, streamed: list[bool]) -> None:
    """Per-head norms and none, biases and none, caches written by the head kernel and by the plan itself."""
    model = tiny.model(dataclasses.replace(tiny.FORMS[form], num_layers=3))
    prompts = tiny.prompts((1, 18))
    request = GenerateConfig(max_new_tokens=9, policy=Threshold(0.6), ignore_stop=True)
    wanted = herald_jax.generate(model, prompts, request, plan)
    jax.clear_caches()
    streamed.append(True)
    got = herald_jax.generate(model, prompts, request, plan)
    assert got.tokens == wanted.tokens
    assert len(streamed) > 1
