"""The comparison of a draft's choice with the block's own: that the own one is what HERALD without drafts makes."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import herald_draft
from herald_jax import GenerateConfig, Herald, Threshold
from herald_jax.generate import _Run
from herald_jax.pooled import PooledKV
from tests.herald_jax import tiny

MODEL = tiny.model(tiny.FORMS["sdar"])
PROMPTS = tiny.prompts((48, 30, 9))
PLAN = Herald(8, min_budget=0, page_size=2)


def test_the_own_choice_is_what_fills_a_pool_without_drafts() -> None:
    request = GenerateConfig(max_new_tokens=8, policy=Threshold(0.6), ignore_stop=True)
    plan = dataclasses.replace(PLAN, draft=False)
    with _Run(MODEL, PROMPTS, request, plan, None, None) as run:
        pipeline, rows = run._pipeline, run._rows
        assert pipeline is not None
        own, importance = herald_draft.own_choice(MODEL, rows, pipeline._host, plan)
        keys = [np.asarray(k)[0] for k in pipeline._host.k]
        rows, _ = pipeline.prepare_exactly(rows, request.policy, run._sampling, run._stops)
        assert isinstance(rows.cache, PooledKV)
        pool = np.asarray(rows.cache.pool.k)
        assert own.sum(-1).tolist() == [[[8, 8]] * 3] * 2
        assert importance.shape == own.shape
        for layer, row, head in np.ndindex(own.shape[:-1]):
            wanted = keys[layer][row, head, own[layer, row, head]]
            np.testing.assert_array_equal(pool[layer, row, head, :8], wanted)


def test_a_draft_is_compared_with_it() -> None:
    assert herald_draft.compared(MODEL, PROMPTS, Herald(1.0), 2) == (1.0, 1.0)
    held, kept = herald_draft.compared(MODEL, PROMPTS, PLAN, 3)
    assert 0.2 < held < 1
    assert 0.2 < kept < 3
