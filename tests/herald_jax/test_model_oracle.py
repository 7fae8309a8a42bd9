"""The transformer against `transformers`: logits of every architecture, in one pass and block by block with the cache.

Expected values: tests/oracles/data/logits.npz (float32), recorded by tests/oracles/make.py.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.model import Params, bind
from tests.oracles import cases

LOGITS = pathlib.Path(__file__).parents[1] / "oracles" / "data" / "logits.npz"
ATOL = 2e-4  # float32, maximum; the logits' standard deviation is about 6
BLOCK = 4  # the causal checkpoints are fed in pieces of this length
RECORDED = sorted(np.load(LOGITS).files)


@functools.partial(jax.jit, static_argnames=("config",))
def forward(
    config: ModelConfig, params: Params, tokens: jax.Array, start: jax.Array, visible: jax.Array, cache: DeviceKV
) -> tuple[jax.Array, DeviceKV]:
    """Logits f32[B, T, V] of tokens i32[B, T] at positions start .. start + T, and the cache with their K and V."""
    model = bind(config, params)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, cache = model(tokens, positions, DenseAttend(start, visible), cache)
    return jnp.einsum("bte,ve->btv", hidden, model.head_kernel(), precision="highest"), cache


def blockwise(model: herald_jax.Model, ids: list[int], block: int, piece: int) -> np.ndarray:
    """Logits f32[N, V] of `ids` under a block-causal mask, fed in pieces of `piece` tokens (a multiple of `block`).

    The tail is padded up to a whole piece with tokens that no query sees.
    """
    length = len(ids)
    padded = -(-length // piece) * piece
    tokens = np.full((1, padded), 7, np.int32)
    tokens[0, :length] = ids
    ends = np.minimum(block * (1 + np.arange(padded // block)), length)[None].astype(np.int32)
    cache = DeviceKV.empty(model.config, 1, padded)
    parts = []
    for start in range(0, padded, piece):
        visible = ends[:, start // block : (start + piece) // block]
        part, cache = forward(
            model.config, model.params, tokens[:, start : start + piece], np.int32(start), visible, cache
        )
        parts.append(np.asarray(part[0]))
    return np.concatenate(parts)[:length]


def recorded(key: str) -> tuple[str, int, np.ndarray]:
    """Checkpoint, block length and expected logits of one entry of logits.npz."""
    name, block = key.rsplit("/", 1)
    return name, int(block), np.load(LOGITS)[key]


@pytest.mark.parametrize("key", RECORDED)
def test_block_by_block_with_cache(key: str, oracle_model: Callable[..., herald_jax.Model]) -> None:
    """A block that attends to the cache sees exactly what it would see in one pass over everything before it."""
    name, block, expected = recorded(key)
    logits = blockwise(oracle_model(name), cases.logits_ids(name), block, max(block, BLOCK))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)


def test_configurations(oracle_model: Callable[..., herald_jax.Model]) -> None:
    """What the oracles cover is what their names say."""
    configs = {name: oracle_model(name).config for name in {key.rsplit("/", 1)[0] for key in RECORDED}}
    assert {c.group_size for c in configs.values()} == {1, 2, 3, 4, 7}
    assert {c.rope.kind for c in configs.values()} == {"default", "linear", "llama3", "yarn"}
    assert {c.num_kv_heads for c in configs.values()} >= {1, 2, 3, 4}
    assert {(c.qkv_bias, c.out_bias, c.qk_norm) for c in configs.values()} == {
        (False, False, False),
        (True, True, False),
        (True, False, False),
        (False, False, True),
    }
    for family in ("llama", "qwen2", "qwen3", "sdar"):
        assert {c.tie_word_embeddings for c in configs.values() if c.family == family} == {True, False}, family
    odd = configs["qwen3-tied"]
    assert odd.num_heads * odd.head_dim != odd.hidden_size


@pytest.mark.usefixtures("optimised")  # until the end of the module: this test is the last
@pytest.mark.parametrize("key", RECORDED)
def test_full_pass(key: str, oracle_model: Callable[..., herald_jax.Model]) -> None:
    name, block, expected = recorded(key)
    model = oracle_model(name)
    assert model.config.dtype == "float32"
    ids = cases.logits_ids(name)
    logits = blockwise(model, ids, block, -(-len(ids) // block) * block)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)
