"""Requests that `generate` and `stream` refuse, and what a run reports about itself."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import CheckpointError, GenerateConfig, GenerationError, HeraldError, Stats, Threshold, generate, stream
from tests.herald_jax import tiny

SHORT = GenerateConfig(max_new_tokens=8, policy=Threshold(0.5), ignore_stop=True)

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "text": ("hello", {}, "prompts is a single text, but a list of prompts was expected; write [prompt]"),
    "none": ([], {}, "prompts is empty, but at least one prompt was expected"),
    "empty": ([[1], []], {}, "prompt 1 is empty, but at least one token was expected"),
    "outside": ([[1, 96]], {}, "prompt 0 has token id 96, outside the vocabulary of 96"),
    "negative": ([[1], [2, -3]], {}, "prompt 1 has token id -3, outside the vocabulary of 96"),
    "long": (
        [[1] * 505],
        {},
        "prompt 0 has 505 tokens and max_new_tokens is 8, together 513, but the model's context is 512 tokens",
    ),
    "top-k": ([[1]], {"top_k": 97, "temperature": 1.0}, "top_k is 97, but the vocabulary has 96 ids"),
    "block-cache": ([[1]], {"block_cache": True}, "block_cache needs sub-blocks, but family 'sdar' has none"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", [generate, lambda *args: list(stream(*args))], ids=["generate", "stream"])
def test_requests_are_refused_in_a_sentence(name: str, way: Any) -> None:
    prompts, fields, sentence = REFUSED[name]
    with pytest.raises(GenerationError, match=re.escape(sentence)):
        way(tiny.model(tiny.SDAR), prompts, dataclasses.replace(SHORT, **fields))


def test_ids_are_whole_numbers() -> None:
    """A fraction is not cut to an id; NumPy's integers are welcome."""
    with pytest.raises(GenerationError, match="prompt 1 must be a text or a list of token ids"):
        generate(tiny.model(tiny.SDAR), [[1], [2.5]], SHORT)  # type: ignore[list-item]
    ids = np.array([1, 2])
    assert (
        generate(tiny.model(tiny.SDAR), [ids], SHORT).tokens == generate(tiny.model(tiny.SDAR), [[1, 2]], SHORT).tokens
    )


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(CheckpointError, match="the model carries no tokenizer files; pass token ids instead of text"):
        generate(tiny.model(tiny.SDAR), ["hello"], SHORT)


@pytest.mark.parametrize(
    "keys",
    [jax.random.split(jax.random.key(0), 3), jnp.zeros((2, 2), jnp.uint32), jnp.zeros((2,), jnp.uint32)],
    ids=["three", "raw", "numbers"],
)
def test_keys_are_one_typed_key_per_prompt(keys: jax.Array) -> None:
    with pytest.raises(GenerationError, match=r"but one typed key per prompt, \[2\], was expected"):
        generate(tiny.model(tiny.SDAR), [[1], [2]], SHORT, keys=keys)


def test_the_plan_must_be_one() -> None:
    with pytest.raises(HeraldError, match="plan is 'dense', but must be"):
        generate(tiny.model(tiny.SDAR), [[1]], SHORT, plan="dense")  # type: ignore[arg-type]


def test_the_whole_context_can_be_used() -> None:
    """A prompt that leaves exactly max_new_tokens is not refused, and decodes to the very end."""
    result = generate(tiny.model(tiny.SDAR), tiny.prompts([504]), SHORT)
    assert [len(row) for row in result.tokens] == [8]


def test_prompts_may_be_arrays() -> None:
    """Rows of one array, NumPy integers, tuples: all the same ids."""
    rows = tiny.prompts([9, 9])
    expected = generate(tiny.model(tiny.SDAR), rows, SHORT).tokens
    assert generate(tiny.model(tiny.SDAR), np.array(rows), SHORT).tokens == expected  # type: ignore[arg-type]
    assert generate(tiny.model(tiny.SDAR), [tuple(row) for row in rows], SHORT).tokens == expected


def test_stats_add_up() -> None:
    prompts = tiny.prompts([9, 2])
    stats = generate(tiny.model(tiny.SDAR), prompts, SHORT).stats
    assert (stats.rows, stats.prompt_tokens, stats.new_tokens) == (2, 11, 16)
    assert stats.forwards == stats.denoise_steps + stats.commits
    assert stats.blocks == stats.commits + stats.rows == 6
    assert stats.forwards / 2 <= stats.batch_forwards < stats.forwards
    assert stats.tokens_per_forward == 16 / stats.forwards
    assert stats.steps_per_block == stats.denoise_steps / 6
    assert stats.kv_bytes == 2 * 128 * tiny.SDAR.kv_bytes_per_token
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    report = "\n".join(stats.lines())
    assert f"forwards            {stats.forwards} ({stats.denoise_steps} denoising, {stats.commits} commits" in report
    values = json.loads(json.dumps(stats.as_dict()))
    assert values["steps_per_block"] == stats.steps_per_block
    assert {field.name for field in dataclasses.fields(Stats)} < set(values)
