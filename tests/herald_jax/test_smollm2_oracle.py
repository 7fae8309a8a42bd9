"""Real weights, from the GGUF file to text: SmolLM2-135M-Instruct against `transformers`, greedy, float32.

This is the autoregressive limit of the block path (block length 1), not a diffusion model. Expected values:
tests/oracles/data/smollm2.json and smollm2_logits.npz, recorded by tests/oracles/smollm2.py.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from convert.converter import convert
from herald_jax import GenerateConfig
from herald_jax.cache import DeviceKV
from herald_jax.generate import capacity_for
from herald_jax.prefill import chunk_length, prefill
from tests.data_packages import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.usefixtures("optimised")]

DATA = pathlib.Path(__file__).parents[1] / "oracles" / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "smollm2.json").read_text())
ROWS: list[dict[str, Any]] = RECORDED["rows"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> herald_jax.Model:
    path = tmp_path_factory.mktemp("smollm2") / "model"
    convert(smollm2_gguf(), path)
    return herald_jax.load(path)


def test_ids_of_texts(model: herald_jax.Model) -> None:
    """The tokenizer rebuilt from the GGUF encodes as the oracle's, and decodes what the oracle said."""
    assert len(ROWS) >= 5
    assert len({len(row["ids"]) for row in ROWS}) == len(ROWS), "prompts of different lengths"
    for row in ROWS:
        assert model.tokenizer.encode(row["text"]) == row["ids"]
        assert model.tokenizer.decode(row["tokens"]) == row["said"]


def test_chat_template(model: herald_jax.Model) -> None:
    chats = [row for row in ROWS if row["question"] is not None]
    assert len(chats) >= 2
    for row in chats:
        assert model.tokenizer.chat([{"role": "user", "content": row["question"]}]) == row["text"]


def test_greedy_continuations(model: herald_jax.Model) -> None:
    """64 tokens for every prompt, from one ragged batch."""
    assert model.config.dtype == "float32"
    assert model.config.diffusion.block_length == 1
    config = GenerateConfig(max_new_tokens=RECORDED["new_tokens"], ignore_stop=True)
    result = herald_jax.generate(model, [row["text"] for row in ROWS], config)
    assert result.tokens == [row["tokens"] for row in ROWS]
    assert result.texts == [row["said"] for row in ROWS]
    assert {len(row) for row in result.tokens} == {64}


def test_stops_at_the_checkpoints_stop_token(model: herald_jax.Model) -> None:
    """Without ignore_stop a chat ends with its <|im_end|>, and only there."""
    (stop,) = model.config.diffusion.stop_token_ids
    expected = []
    for row in ROWS:
        end = row["tokens"].index(stop) if stop in row["tokens"] else len(row["tokens"]) - 1
        expected.append(row["tokens"][: end + 1])
    config = GenerateConfig(max_new_tokens=RECORDED["new_tokens"])
    result = herald_jax.generate(model, [row["ids"] for row in ROWS], config)
    assert result.tokens == expected
    assert min(map(len, expected)) < 20
    assert result.texts is not None
    assert result.texts[0] == "The capital of France is Paris."


def test_logits(model: herald_jax.Model) -> None:
    """Logits of the first prompt's last position, from the prefill program that `generate` runs."""
    block, new = 1, RECORDED["new_tokens"]
    lengths = np.array([len(row["ids"]) for row in ROWS], np.int32)
    longest = int(lengths.max())
    tokens = np.zeros((len(ROWS), longest), np.int32)
    for index, row in enumerate(ROWS):
        tokens[index, : lengths[index]] = row["ids"]
    chunk = chunk_length(longest, GenerateConfig().prefill_chunk, block)
    capacity = capacity_for(max(longest + new + block, -(-longest // chunk) * chunk))
    cache = DeviceKV.empty(model.config, len(ROWS), capacity)
    _, hidden = prefill(model.params, cache, tokens, lengths, config=model.config, chunk=chunk)
    kernel = model.params["embed"]["embedding"]
    logits = jnp.einsum("e,ve->v", hidden[0], kernel, precision="highest")
    np.testing.assert_allclose(logits, np.load(DATA / "smollm2_logits.npz")["logits"], rtol=0, atol=2e-4)
