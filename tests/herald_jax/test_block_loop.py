"""The block loop against two plainer forms of itself, and what a row's tokens may depend on.

`CASES` are the compiled programs of this file; other tests run them again with other prompts and traced numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from herald_jax import (
    BlockEvent,
    Dense,
    Editing,
    EntropyBound,
    GenerateConfig,
    Model,
    Sequential,
    StaticLowConfidence,
    Stats,
    Threshold,
    generate,
    stream,
)
from herald_jax.block_loop import step
from herald_jax.generate import _Run
from herald_jax.model import bind
from tests.herald_jax import plain, tiny

# Shorter than a block, one less than a block, a block, one more, and more than two of them.
LENGTHS = {"sdar": (1, 3, 4, 5, 10, 13), "fast_dllm": (1, 7, 8, 9, 20, 17), "llama": (1, 2, 5, 9, 12, 17)}
NEW = 19  # ends inside a block of four and of eight, for most of those lengths

GREEDY: dict[str, Any] = {}
WARM = {"temperature": 0.8}
FILTERED = {"temperature": 1.1, "top_k": 30, "top_p": 0.8}
CASES: dict[str, tuple[str, GenerateConfig]] = {}
for _form, _cache, _choices in (
    ("sdar", False, ((Threshold(0.5), GREEDY), (StaticLowConfidence(2), FILTERED), (EntropyBound(1.5), WARM))),
    ("sdar", False, ((Sequential(2), GREEDY), (Threshold(0.6, steps=3), WARM))),
    ("fast_dllm", False, ((Threshold(0.3), FILTERED), (StaticLowConfidence(4), GREEDY), (EntropyBound(4.0), GREEDY))),
    ("fast_dllm", False, ((Sequential(4), WARM),)),
    ("fast_dllm", True, ((Threshold(0.3), FILTERED), (StaticLowConfidence(4), GREEDY), (EntropyBound(4.0), WARM))),
    ("fast_dllm", True, ((Sequential(2), GREEDY),)),
    ("llama", False, ((Threshold(0.9), GREEDY), (Threshold(0.9), FILTERED))),
):
    for _policy, _sampling in _choices:
        _how = {0: "greedy", 1: "warm", 3: "filtered"}[len(_sampling)]
        _name = f"{_form}{'-cache' if _cache else ''}-{type(_policy).__name__}-{_how}"
        CASES[_name] = (_form, GenerateConfig(NEW, _policy, block_cache=_cache, seed=3, **_sampling))


def case(name: str, **changes: Any) -> tuple[Model, list[list[int]], GenerateConfig]:
    form, config = CASES[name]
    return tiny.model(tiny.FORMS[form]), tiny.prompts(LENGTHS[form], seed=1), dataclasses.replace(config, **changes)


@functools.cache
def unstopped(name: str) -> list[list[int]]:
    """The case's tokens when nothing ends a row but its length."""
    model, prompts, config = case(name, ignore_stop=True)
    return generate(model, prompts, config).tokens


def row_keys(seed: int, rows: int) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(np.arange(rows))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "-Threshold-" in name else [pytest.mark.once]) for name in CASES]
)
def test_equals_plain_decoding_row_by_row(name: str) -> None:
    """Tokens, blocks, steps and commits are those of a restatement that has neither cache nor batch nor device loop."""
    model, prompts, config = case(name)
    result = generate(model, prompts, config)
    keys = row_keys(config.seed, len(prompts))
    expected = [plain.decode(model, p, keys[i], config, (tiny.STOP,)) for i, p in enumerate(prompts)]
    assert result.tokens == [row.tokens for row in expected]
    assert result.errors == {}
    assert result.stats.blocks == sum(len(row.steps) for row in expected)
    assert result.stats.denoise_steps == sum(sum(row.steps) for row in expected)
    assert result.stats.commits == sum(len(row.steps) - 1 for row in expected)
    assert result.stats.batch_forwards == max(sum(row.steps) + len(row.steps) - 1 for row in expected)


@pytest.mark.once
def test_the_cases_decide_something() -> None:
    """The comparison above would mean little if rows never stopped, or caches, keys and policies never mattered."""
    stopped = [generate(*case(name)).tokens for name in CASES]
    assert sum(row[-1] == tiny.STOP for rows in stopped for row in rows) >= 5
    assert sum(len(row) == NEW and row[-1] != tiny.STOP for rows in stopped for row in rows) >= 5
    for name in ("Threshold-filtered", "StaticLowConfidence-greedy"):
        assert unstopped(f"fast_dllm-{name}") != unstopped(f"fast_dllm-cache-{name}")
    for name in CASES:
        model, prompts, config = case(name, seed=4, ignore_stop=True)
        assert (generate(model, prompts, config).tokens == unstopped(name)) == (config.temperature == 0)
    quick = generate(*case("sdar-Threshold-greedy", policy=Threshold(0.05), ignore_stop=True)).stats
    slow = generate(*case("sdar-Threshold-greedy", policy=Threshold(1.0), ignore_stop=True)).stats
    assert quick.steps_per_block < 0.6 * slow.steps_per_block


@pytest.mark.once
@pytest.mark.parametrize("name", ["sdar-Threshold-greedy", "fast_dllm-cache-Threshold-filtered"])
def test_equals_a_python_loop_over_step(name: str) -> None:
    """`run_blocks` is `while not done: step(...)`, in every field of the state."""
    model, prompts, config = case(name)
    jitted, plainly = (_Run(model, prompts, config, Dense(), None, None) for _ in range(2))
    jitted.advance(pause=False)

    @jax.jit
    def one_step(params: Any, rows: Any) -> Any:
        module = bind(model.config, params)
        return step(module, rows, config.policy, plainly._sampling, plainly._stops, plainly._options)

    rows, count = plainly._rows, 0
    while not bool(rows.done.all()):
        rows, count = one_step(model.params, rows), count + 1
    assert count == int(rows.batch_forwards) > 10
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(jitted._rows), jax.tree.leaves(rows), strict=True):
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_the_head_runs_over_the_small_block_only() -> None:
    """Of a family with small blocks; editing asks for every position."""
    model, prompts, config = case("fast_dllm-StaticLowConfidence-greedy")
    contract, rows = model.config.diffusion, len(prompts)
    assert contract.small_block_length < contract.block_length
    run = _Run(model, prompts, config, Dense(), None, None)

    def logits(policy: Any) -> set[int]:
        def one_step(params: Any, state: Any) -> Any:
            return step(bind(model.config, params), state, policy, run._sampling, run._stops, run._options)

        program = str(jax.make_jaxpr(one_step)(model.params, run._rows))
        sizes = (rows * contract.small_block_length, rows * contract.block_length)
        return {size for size in sizes if f"f32[{size},{model.config.vocab_size}]" in program}

    assert logits(config.policy) == {rows * contract.small_block_length}
    assert logits(Editing(config.policy)) == {rows * contract.block_length}


@pytest.mark.parametrize(
    "name",
    ["sdar-Threshold-warm", pytest.param("fast_dllm-cache-Threshold-filtered", marks=pytest.mark.once)],
)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Other neighbours, other places in the batch, no neighbours: the same prompt with the same key writes the same."""
    model, prompts, config = case(name, ignore_stop=True)
    count = len(prompts)
    keys = row_keys(config.seed, count)
    others = tiny.prompts([11, 2, 19, 6, 4, 15], seed=9)
    other_keys = row_keys(77, count)
    for mine in (set(range(0, count, 2)), set(range(1, count, 2)), {0}):
        at = {row: (5 * row + 2) % count for row in range(count)}  # a permutation of six
        batch, batch_keys = list(others), other_keys
        for row in mine:
            batch[at[row]] = prompts[row]
            batch_keys = batch_keys.at[at[row]].set(keys[row])
        tokens = generate(model, batch, config, keys=batch_keys).tokens
        for row in mine:
            assert tokens[at[row]] == unstopped(name)[row]
    for row in range(count):
        assert generate(model, prompts[row : row + 1], config, keys=keys[row : row + 1]).tokens == [
            unstopped(name)[row]
        ]


def test_a_row_does_not_depend_on_the_padding() -> None:
    """A neighbour of 150 tokens widens every buffer; prefill in chunks of one block or of many is the same."""
    name = "sdar-Threshold-greedy"
    model, prompts, config = case(name, ignore_stop=True)
    long = tiny.prompts([150], seed=5)
    for chunk in (1024, 16):
        batch = [*prompts[:-1], *long]
        tokens = generate(model, batch, dataclasses.replace(config, prefill_chunk=chunk)).tokens
        assert tokens[:-1] == unstopped(name)[:-1]
        assert len(tokens[-1]) == NEW


@pytest.mark.parametrize(
    "name", ["sdar-Threshold-greedy", "fast_dllm-cache-Threshold-filtered", "llama-Threshold-greedy"]
)
def test_max_new_tokens_cuts_anywhere(name: str) -> None:
    for limit in (1, 2, 3, 7, 8, 9, 16):
        tokens = generate(*case(name, max_new_tokens=limit, ignore_stop=True)).tokens
        assert tokens == [row[:limit] for row in unstopped(name)]


@pytest.mark.parametrize(
    "name", ["sdar-Threshold-greedy", "fast_dllm-cache-Threshold-filtered", "llama-Threshold-greedy"]
)
def test_a_stop_token_ends_its_row_wherever_it_is_written(name: str) -> None:
    """Inside a block, at its ends, as a block's seed: a row is cut behind its first stop token, and nowhere else."""
    model, prompts, config = case(name)
    block = model.config.diffusion.block_length
    offsets: set[int] = set()
    candidates = sorted({token for row in unstopped(name) for token in row})
    for stop in candidates[:: max(1, len(candidates) // 12)]:
        tokens = generate(model, prompts, dataclasses.replace(config, stop_token_ids=(stop,))).tokens
        for prompt, row, whole in zip(prompts, tokens, unstopped(name), strict=True):
            end = whole.index(stop) if stop in whole else len(whole)
            assert row == whole[: end + 1]
            if end < len(whole):
                offsets.add((len(prompt) + end) % block)
    assert len(offsets) > min(block - 1, 3)


def test_a_stop_token_in_the_prompt_is_only_read() -> None:
    name = "sdar-Threshold-greedy"
    model, prompts, config = case(name)
    typed = {token for prompt in prompts for token in prompt}
    unwritten = typed - {token for row in unstopped(name) for token in row}
    assert unwritten
    for stop in sorted(unwritten)[:3]:
        assert generate(model, prompts, dataclasses.replace(config, stop_token_ids=(stop,))).tokens == unstopped(name)


def test_stops_default_to_the_checkpoint_and_can_be_ignored() -> None:
    name = "sdar-Threshold-greedy"
    model, prompts, config = case(name)
    cut = [row[: row.index(tiny.STOP) + 1] if tiny.STOP in row else row for row in unstopped(name)]
    assert cut != unstopped(name)
    assert generate(model, prompts, config).tokens == cut
    assert generate(model, prompts, dataclasses.replace(config, stop_token_ids=())).tokens == unstopped(name)


@pytest.mark.parametrize(
    "name", ["sdar-Threshold-warm", "fast_dllm-cache-Threshold-filtered", "llama-Threshold-filtered"]
)
@pytest.mark.parametrize("limit", [NEW, 1])
def test_stream_is_generate_block_by_block(name: str, limit: int) -> None:
    model, prompts, config = case(name, max_new_tokens=limit)
    whole = generate(model, prompts, config)
    *events, stats = list(stream(model, prompts, config))
    assert isinstance(stats, Stats)
    for field in ("rows", "new_tokens", "forwards", "commits", "blocks", "batch_forwards"):
        assert getattr(stats, field) == getattr(whole.stats, field)
    block = model.config.diffusion.block_length
    for row, prompt in enumerate(prompts):
        mine = [event for event in events if isinstance(event, BlockEvent) and event.row == row]
        assert [event.index for event in mine] == list(range(len(mine)))
        assert [event.done for event in mine] == [False] * (len(mine) - 1) + [True]
        assert [token for event in mine for token in event.tokens] == whole.tokens[row]
        assert all(event.text is None and event.error is None and event.tokens for event in mine)
        # Every block but the last is whole, and the first is what the prompt left of its block.
        assert [len(event.tokens) for event in mine[:-1]] == [block - len(prompt) % block, *[block] * (len(mine) - 2)][
            : len(mine) - 1
        ]


def poisoned(model: Model, token: int) -> Model:
    table = np.array(model.params["embed"]["embedding"])
    table[token] = np.nan
    return dataclasses.replace(model, params=model.params | {"embed": {"embedding": jax.numpy.asarray(table)}})


@pytest.mark.parametrize("whole_block", [True, False], ids=["prefilled", "in-the-first-canvas"])
def test_nan_from_a_prompt_ends_only_its_row(whole_block: bool) -> None:
    name = "sdar-Threshold-greedy"
    model, prompts, config = case(name, ignore_stop=True)
    token = min(set(range(tiny.MASK)) - {t for p in prompts for t in p} - {t for row in unstopped(name) for t in row})
    sick = next(row for row, prompt in enumerate(prompts) if len(prompt) > 4 and len(prompt) % 4)
    batch = [list(prompt) for prompt in prompts]
    batch[sick][0 if whole_block else -1] = token
    result = generate(poisoned(model, token), batch, config)
    assert result.errors == {sick: f"row {sick} ended early: the model produced NaN after 0 new tokens"}
    assert result.tokens == [[] if row == sick else tokens for row, tokens in enumerate(unstopped(name))]
    *events, _ = list(stream(poisoned(model, token), batch, config))
    (event,) = (event for event in events if isinstance(event, BlockEvent) and event.row == sick)
    assert (event.tokens, event.done, event.error) == ([], True, result.errors[sick])


def test_nan_while_writing_keeps_the_finished_blocks() -> None:
    name = "sdar-Threshold-greedy"
    model, prompts, config = case(name, ignore_stop=True)
    base = unstopped(name)

    def first_poison(token: int) -> tuple[int, int] | None:
        """(row, index) if the token is written by one row alone, behind its first block, and typed by none."""
        rows = [row for row, tokens in enumerate(base) if token in tokens]
        if len(rows) != 1 or any(token in prompt for prompt in prompts):
            return None
        index = base[rows[0]].index(token)
        return (rows[0], index) if 4 <= index < NEW - 4 else None

    token, (sick, index) = next((t, at) for t in range(tiny.MASK) if (at := first_poison(t)) is not None)
    result = generate(poisoned(model, token), prompts, config)
    assert [row for row in range(len(base)) if result.tokens[row] != base[row]] == [sick] == list(result.errors)
    kept = result.tokens[sick]
    assert kept == base[sick][: len(kept)]
    assert (len(prompts[sick]) + len(kept)) % 4 == 0
    assert index - 4 < len(kept) <= index + 4
    assert f"NaN after {len(kept)} new tokens" in result.errors[sick]
