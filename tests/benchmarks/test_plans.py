"""The benchmarks of the plans run, on a model small enough for a CPU; what they measure there means nothing."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from benchmarks import mage
from benchmarks.shapes import SHAPES, step_flops, step_weight_bytes
from herald_jax import Dense, Mage
from herald_jax.model import init_params
from tests.herald_jax import tiny

pytestmark = pytest.mark.once


@pytest.mark.parametrize("form", ["sdar", "fast_dllm"])
@pytest.mark.parametrize("plan", [Dense(), Mage(8, min_budget=0, dense_layers=1)], ids=["dense", "mage"])
def test_blocks_are_timed(form: str, plan: Dense | Mage) -> None:
    config = dataclasses.replace(tiny.FORMS[form], max_position_embeddings=512)
    params = init_params(config, jax.random.key(0))
    taken = mage.measure(config, params, 2, 64, plan, mage.compile_ahead(config, 2, 64, plan))
    assert taken.block(32) == pytest.approx(taken.first + 32 * taken.later)
    assert taken.first + taken.later > 0  # one-step blocks took time; their parts may drown in noise here


def test_one_dense_program_serves_all_contexts() -> None:
    config = dataclasses.replace(tiny.FORMS["sdar"], max_position_embeddings=512, num_layers=1)
    params = init_params(config, jax.random.key(0))
    before = mage.run_blocks._cache_size()
    taken = mage.measure_contexts(config, params, 1, [32, 96], Dense())
    assert list(taken) == [32, 96]
    assert all(time.first + time.later > 0 for time in taken.values())
    assert mage.run_blocks._cache_size() == before + 1


def test_memory_of_a_case() -> None:
    """Beside the arguments and temporary memory of the loop compiled for an H200 with XLA's own accounting, in GB."""
    for name, batch, compiled in (("sdar8b", 4, 116.958 + 0.080), ("fdv2_1.5b", 8, 42.205 + 0.157)):
        needed = mage.bytes_needed(SHAPES[name], batch, 128 * 1024, Mage(0.05)) / 1e9
        assert compiled < needed < 1.02 * compiled
    assert mage.fits(SHAPES["sdar8b"], 4, 128 * 1024, Mage(0.05), 0.95 * 143_771 * 2**20)
    assert not mage.fits(SHAPES["sdar8b"], 4, 128 * 1024, Mage(0.05), 0.75 * 143_771 * 2**20)


def test_what_a_step_must_move() -> None:
    config = SHAPES["sdar8b"]
    assert step_weight_bytes(config) == 15_136_811_008  # models.md's 8B shape without the rows of its embedding
    assert config.kv_bytes_per_token == 144 * 1024
    # Memory-bound at one block, matmul-bound at many rows.
    small = mage.floor_of(config, 1, 4096, 4.2e12, 7.8e14)
    assert small == pytest.approx((15_136_811_008 + 4096 * 144 * 1024) / 4.2e12)
    assert mage.floor_of(config, 64, 1024, 4.2e12, 7.8e14) > step_flops(config, 64 * 32) / 7.8e14


def test_forwards_are_counted_where_a_block_takes_more_than_one() -> None:
    """Two blocks of 4 sub-blocks: 2 first forwards and 7 later ones, or 63."""
    first, later = 3.0, 0.5
    taken = mage.split_times(2 * first + 7 * later, 9, 2 * first + 63 * later, 65)
    assert taken == mage.BlockTime(first, later)
