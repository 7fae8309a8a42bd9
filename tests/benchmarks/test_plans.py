"""The benchmarks of the plans run, on a model small enough for a CPU; what they measure there means nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import block_times, common, mage
from benchmarks.shapes import SHAPES, step_flops, step_weight_bytes
from herald_jax import Dense, Mage
from herald_jax.model import init_params
from tests.herald_jax import tiny

pytestmark = pytest.mark.once


class StepClock:
    """`time` for a module: stands still but while `call` runs, which takes `cost(forwards)` seconds."""

    def __init__(self, cost: Callable[[int], float]):
        self.now, self._cost = 0.0, cost

    def perf_counter(self) -> float:
        return self.now

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which returns Rows, and this clock set forward by what their forwards cost."""

        def timed(*args: Any, **options: Any) -> Any:
            rows = call(*args, **options)
            self.now += self._cost(int(rows.batch_forwards))
            return rows

        return timed


@pytest.mark.parametrize("form", ["sdar", "fast_dllm"])
@pytest.mark.parametrize("plan", [Dense(), Mage(8, min_budget=0, dense_layers=1)], ids=["dense", "mage"])
def test_blocks_are_timed(form: str, plan: Dense | Mage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock by which a call costs 100 s and a forward 2: both are found, at any load of the machine."""
    config = dataclasses.replace(tiny.FORMS[form], max_position_embeddings=512)
    params = init_params(config, jax.random.key(0))
    clock = StepClock(lambda forwards: 100.0 + 2.0 * forwards)
    monkeypatch.setattr(block_times, "time", clock)
    compiled = clock.around(block_times.compile_ahead(config, 2, 64, plan))
    taken = block_times.measure(config, params, 2, 64, plan, compiled)
    assert dataclasses.astuple(taken) == pytest.approx((2.0, 2.0, 100.0))
    assert taken.block(32) == pytest.approx(66.0)


def test_one_dense_program_serves_all_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(tiny.FORMS["sdar"], max_position_embeddings=512, num_layers=1)
    params = init_params(config, jax.random.key(0))
    run_blocks = block_times.run_blocks
    before = run_blocks._cache_size()
    clock = StepClock(lambda forwards: 3.0 * forwards)
    monkeypatch.setattr(block_times, "time", clock)
    monkeypatch.setattr(block_times, "run_blocks", clock.around(run_blocks))
    taken = block_times.measure_contexts(config, params, 1, [32, 96], Dense())
    assert {context: dataclasses.astuple(time) for context, time in taken.items()} == {
        context: pytest.approx((3.0, 3.0, 0.0)) for context in (32, 96)
    }
    assert run_blocks._cache_size() == before + 1


def test_memory_of_a_case() -> None:
    """Beside the arguments and temporary memory of the loop compiled for an H200 with XLA's own accounting, in GB."""
    for name, batch, compiled in (("sdar8b", 4, 117.047 + 0.201), ("fdv2_1.5b", 8, 42.239 + 0.169)):
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


def test_a_call_a_first_forward_and_later_ones_are_told_apart() -> None:
    """Blocks of 4 sub-blocks, 3 to a call: a block has a first forward, 3 later ones and its commit, or 31 and it."""
    assert block_times.BLOCKS == 3
    call, first, later = 7.0, 3.0, 0.5
    one, several = call + first + 3 * later, call + 3 * first + 11 * later
    taken = block_times.split_times(
        block_times.Taken(one, 4), block_times.Taken(several, 14), block_times.Taken(call + first + 31 * later, 32)
    )
    assert taken == block_times.BlockTime(first, later, call)


def test_parts_of_a_run_are_merged(tmp_path: Path) -> None:
    """Each part has a summary of its own; the whole has one of all. Parts of different runs are refused."""
    paths = []
    for name, value in (("a", 1.2), ("b", 1.3)):
        rows = [common.row(f"sparse_step/{name}/64k/b1/over_floor", value, "x")]
        paths.append(common.write_results("mage", rows + mage.summary(rows), folder=tmp_path / name))
    merged = common.merge_results("mage", paths, mage.with_summary, folder=tmp_path)
    assert [(row["id"], row["value"]) for row in merged] == [
        ("sparse_step/a/64k/b1/over_floor", 1.2),
        ("sparse_step/b/64k/b1/over_floor", 1.3),
        ("sparse_step/all/worst_over_floor", 1.3),
    ]
    written = json.loads((tmp_path / paths[0].name).read_text())
    assert written["rows"] == merged
    assert written["command"].count(" && ") == 1
    with pytest.raises(SystemExit, match="have sparse_step/a/64k/b1/over_floor more than once"):
        common.merge_results("mage", [paths[0], paths[0]], mage.with_summary, folder=tmp_path)
    paths[1].write_text(paths[1].read_text().replace(written["commit"], "another"))
    with pytest.raises(SystemExit, match="has commit 'another', not .*: not a part of the same run"):
        common.merge_results("mage", paths, folder=tmp_path)
