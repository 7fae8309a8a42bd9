"""Forced-token replay under HERALD: equal to what the pipeline itself writes, to MAGE's replay, and to dense."""

import dataclasses

import numpy as np
import pytest

import herald_jax
from herald_jax import (
    Dense,
    Editing,
    GenerateConfig,
    GenerationError,
    Herald,
    Mage,
    Model,
    Threshold,
    make_mesh,
    replay,
)
from herald_jax.denoise import Sequential
from tests.herald_jax import tiny

FORMS = {name: dataclasses.replace(tiny.FORMS[name], num_layers=3) for name in ("sdar", "fast_dllm")}
[PROMPT] = tiny.prompts((33,))


def own_trajectory(model, plan, new_tokens, policy):
    """What `plan` writes by itself from left to right, as though it had been recorded: only the order is known."""
    request = GenerateConfig(max_new_tokens=new_tokens, policy=policy, ignore_stop=True)
    [tokens] = herald_jax.generate(model, [PROMPT], request, plan).tokens
    contract = model.config.diffusion
    block, begin = contract.block_length, len(PROMPT) // contract.block_length * contract.block_length
    whole = np.array([*PROMPT[begin:], *tokens], np.int32).reshape(-1, block)
    blocks = []
    for number, final in enumerate(whole):
        first = max(len(PROMPT) - begin if number == 0 else 0, int(contract.seeded))
        states = [
            replay.State(final, np.arange(block) < at, np.arange(block) == at, final) for at in range(first, block)
        ]
        blocks.append((states, final))
    return replay.Trajectory(list(PROMPT), blocks, policy=policy)


PLANS = [
    ("sdar", Herald(0.3, min_budget=2, page_size=1)),
    pytest.param("sdar", Herald(0.3, min_budget=2, page_size=2, draft=False, dense_layers=1), marks=pytest.mark.once),
    pytest.param(
        "sdar", Herald(0.3, min_budget=2, page_size=2, draft_at="auto", selector="index"), marks=pytest.mark.once
    ),
    pytest.param("fast_dllm", Herald(6, min_budget=0, query="last", dense_layers=1, sinks=1), marks=pytest.mark.once),
    ("fast_dllm", Herald(0.3, min_budget=2, page_size=1, draft_at=0.3, selector="split", keep_bonus=1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "plan"), PLANS, ids=lambda x: x if isinstance(x, str) else f"{x.selector}-{x.draft}")
def test_repeats_what_the_pipeline_writes(form, plan):
    """The replay of a plan's own answer predicts every token of it: each draft, selection and pool is the same."""
    model = tiny.model(FORMS[form])
    block = model.config.diffusion.block_length
    trajectory = own_trajectory(model, plan, 4 * block - len(PROMPT) % block, Sequential())
    states = [state for block, _ in trajectory.blocks for state in block]
    assert len(states) > 2 * block
    assert replay.replay(model, trajectory, plan) == 1
    assert replay.replay(model, trajectory, Dense()) < 1
    assert replay.replay(model, trajectory, dataclasses.replace(plan, query="first", page_size=4)) < 1


def test_without_a_draft_it_predicts_as_mage_does():
    """Under tokens that neither has written, to the last prediction; and everything that is chosen is dense's."""
    model = tiny.model(FORMS["sdar"])
    trajectory = replay.record(model, PROMPT, GenerateConfig(max_new_tokens=13, policy=Threshold(0.6)))
    same = {"query": "all", "min_budget": 2, "dense_layers": 1, "reduce": "max", "page_size": 2}
    ours = list(replay.predictions(model, trajectory, Herald(0.3, draft=False, **same)))
    mages = list(replay.predictions(model, trajectory, Mage(0.3, normalise="prefix", **same)))
    assert len(ours) == len(mages) == sum(len(states) for states, _ in trajectory.blocks)
    assert all(map(np.array_equal, ours, mages))
    dense = list(replay.predictions(model, trajectory, Dense()))
    assert not all(map(np.array_equal, ours, dense))
    for plan in (Herald(1.0), Herald(1.0, selector="index", draft_at=0.2), Herald(1.0, draft=False)):
        everything = list(replay.predictions(model, trajectory, plan))
        assert all(map(np.array_equal, everything, dense))
        assert replay.replay(model, trajectory, plan) == 1


def test_token_editing_is_refused():
    with pytest.raises(GenerationError, match="does not go with token editing"):
        replay.record(tiny.model(FORMS["sdar"]), PROMPT, GenerateConfig(policy=Editing()))


@pytest.mark.once
def test_a_mesh_changes_nothing():
    """The model spread over two devices, as `herald-eval --devices 2` has it."""
    config = FORMS["sdar"]
    spread = Model.from_params(config, tiny.params(config), mesh=make_mesh(model=2))
    request = GenerateConfig(max_new_tokens=9, policy=Threshold(0.6))
    trajectory = replay.record(spread, PROMPT, request)
    alone = replay.record(tiny.model(config), PROMPT, request)
    assert np.array_equal([final for _, final in trajectory.blocks], [final for _, final in alone.blocks])
    for plan in (Mage(0.3, min_budget=2, page_size=1, dense_layers=0), Herald(0.3, min_budget=2, page_size=1)):
        assert replay.replay(spread, trajectory, plan) == replay.replay(tiny.model(config), alone, plan) < 1
