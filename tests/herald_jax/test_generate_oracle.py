"""Greedy decoding against the published samplers, restated over `transformers`: the same tokens, the same passes.

Expected values: tests/oracles/data/decodes.json, recorded by tests/oracles/make.py; what is recorded is listed in
tests/oracles/cases.py. Every case is one call: prompts of many lengths share a batch, though each was recorded alone.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import pytest

import herald_jax
from herald_jax import GenerateConfig
from herald_jax.denoise import EntropyBound, Sequential, StaticLowConfidence, Threshold
from tests.oracles import cases

DECODES = json.loads((pathlib.Path(__file__).parents[1] / "oracles" / "data" / "decodes.json").read_text())

# Further block lengths and policies: what is special in them is ours, not JAX's.
MORE = {c.name for c in cases.CASES if c.block_length == 32 or (c.block_length == 8 and c.policy.kind == cases.STATIC)}


def policy_of(policy: cases.Policy) -> StaticLowConfidence | Threshold | EntropyBound | Sequential:
    """Our policy of the same name."""
    match policy.kind:
        case "static":
            return StaticLowConfidence(policy.steps)
        case "threshold":
            return Threshold(policy.threshold, policy.steps)
        case "entropy":
            return EntropyBound(policy.bound, policy.steps)
        case "sequential":
            return Sequential(policy.steps)
    raise ValueError(policy.kind)


def request(case: cases.Case) -> GenerateConfig:
    """The `GenerateConfig` of a case."""
    return GenerateConfig(
        max_new_tokens=case.max_new_tokens,
        policy=policy_of(case.policy),
        stop_token_ids=tuple(DECODES["cases"][case.name]["stops"]),
        block_cache=case.block_cache,
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.once] if case.name in MORE else []) for case in cases.CASES],
)
def test_decode(case: cases.Case, oracle_model: Callable[..., herald_jax.Model]) -> None:
    rows = DECODES["cases"][case.name]["rows"]
    model = oracle_model(case.model, case.block_length, case.small_block_length)
    result = herald_jax.generate(model, [row["prompt"] for row in rows], request(case))
    wrong = {
        len(row["prompt"]): {"got": got, "wanted": row["tokens"]}
        for row, got in zip(rows, result.tokens, strict=True)
        if got != row["tokens"]
    }
    assert not wrong, f"other tokens than the published sampler's, by the prompt's length: {wrong}"
    assert result.stats.denoise_steps == sum(row["passes"] for row in rows)
    assert result.errors == {}


@pytest.mark.parametrize("name", cases.CAUSAL)
def test_causal_limit(name: str, oracle_model: Callable[..., herald_jax.Model]) -> None:
    """A causal LM through the block path at block length 1 is plain greedy decoding."""
    rows = DECODES["causal"][name]
    config = GenerateConfig(max_new_tokens=cases.CAUSAL_NEW_TOKENS, ignore_stop=True)
    result = herald_jax.generate(oracle_model(name), [row["prompt"] for row in rows], config)
    assert result.tokens == [row["tokens"] for row in rows]


def test_causal_limit_stops(oracle_model: Callable[..., herald_jax.Model]) -> None:
    """Rows end with their own first stop token, at different lengths, and some not at all."""
    rows = DECODES["causal"]["llama3"]
    stops = {row["tokens"][3 * index] for index, row in enumerate(rows[:4])}
    expected = []
    for row in rows:
        end = next((i for i, token in enumerate(row["tokens"]) if token in stops), cases.CAUSAL_NEW_TOKENS - 1)
        expected.append(row["tokens"][: end + 1])
    config = GenerateConfig(max_new_tokens=cases.CAUSAL_NEW_TOKENS, stop_token_ids=tuple(stops))
    result = herald_jax.generate(oracle_model("llama3"), [row["prompt"] for row in rows], config)
    assert result.tokens == expected
    assert 1 in map(len, expected)
    assert cases.CAUSAL_NEW_TOKENS in map(len, expected)


def test_stop_cases_stop() -> None:
    """The recorded cases with stop tokens have rows that end early, in the middle of a block, and rows that do not."""
    for case in cases.CASES:
        if case.stops:
            rows = DECODES["cases"][case.name]["rows"]
            lengths = {len(row["tokens"]) for row in rows}
            assert case.max_new_tokens in lengths, case.name
            assert len(lengths) > 3, case.name
            ends = {(len(row["prompt"]) + len(row["tokens"])) % case.block_length for row in rows}
            assert len(ends) > 2, case.name


@pytest.mark.parametrize("name", ["sdar-4/stop", "fdv2-8/stop-cache"])
def test_streamed_blocks_add_up(name: str, oracle_model: Callable[..., herald_jax.Model]) -> None:
    """Streaming yields the same rows in pieces that end where blocks end, and says when a row is done."""
    case = next(case for case in cases.CASES if case.name == name)
    rows = DECODES["cases"][name]["rows"]
    model = oracle_model(case.model, case.block_length, case.small_block_length)
    written: list[list[int]] = [[] for _ in rows]
    finished: set[int] = set()
    indices = [0] * len(rows)
    for event in herald_jax.stream(model, [row["prompt"] for row in rows], request(case)):
        if isinstance(event, herald_jax.Stats):
            continue
        assert event.row not in finished
        assert event.index == indices[event.row]
        indices[event.row] += 1
        written[event.row] += event.tokens
        if event.done:
            finished.add(event.row)
        else:
            assert (len(rows[event.row]["prompt"]) + len(written[event.row])) % case.block_length == 0
    assert written == [row["tokens"] for row in rows]
    assert finished == set(range(len(rows)))


def test_batch_of_one(oracle_model: Callable[..., herald_jax.Model]) -> None:
    """The same tokens without neighbours (the cache writes of a single row take another path)."""
    for name in ("sdar-4/threshold-0.9", "fdv2-8/threshold-0.9-cache"):
        case = next(case for case in cases.CASES if case.name == name)
        model = oracle_model(case.model, case.block_length, case.small_block_length)
        for row in DECODES["cases"][name]["rows"][:: case.block_length - 1]:
            assert herald_jax.generate(model, [row["prompt"]], request(case)).tokens == [row["tokens"]]
