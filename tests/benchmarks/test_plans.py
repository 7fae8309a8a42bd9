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
    assert dataclasses.astuple(taken) == pytest.approx((2.0, 2.0, 100.0, 0.0, 0.0))
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
        context: pytest.approx((3.0, 3.0, 0.0, 0.0, 0.0)) for context in (32, 96)
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
    # A family with sub-blocks reveals tokens of one a step: its head runs over 8 of a block's 32 positions.
    config = SHAPES["fdv2_1.5b"]
    attention = 4 * 256 * 12 * 128 * 28 * 1024
    head = 2 * 151_936 * 1536
    flops = step_flops(config, 256) - 256 * head + 64 * head + attention
    assert mage.floor_of(config, 8, 1024, 1e18, 7.8e14) == pytest.approx(flops / 7.8e14)


def runs_of_blocks(call: float, first: float, later: float) -> tuple[tuple[Any, Any], Any]:
    """Blocks of 4 sub-blocks: a block has a first forward, 3 later ones and its commit, or 31 and it."""
    blocks = block_times.BLOCKS
    one = block_times.Taken(call + first + 3 * later, 4)
    several = block_times.Taken(call + blocks * first + (4 * blocks - 1) * later, 5 * blocks - 1)
    return (one, several), block_times.Taken(call + first + 31 * later, 32)


def test_a_call_a_first_forward_and_later_ones_are_told_apart() -> None:
    pair, full = runs_of_blocks(call=7.0, first=3.0, later=0.5)
    taken = block_times.split_times([pair] * 3, [full])
    assert dataclasses.astuple(taken) == pytest.approx((3.0, 0.5, 7.0, 0.0, 0.0), abs=1e-12)


def test_a_first_forward_is_known_as_well_as_pairs_agree() -> None:
    """Calls drift from 7 s to 10; one pair was held up between its runs; of the others the second takes 0.8 s more."""
    pairs = [runs_of_blocks(call, 3.0, 0.5)[0] for call in (7.0, 7.5, 8.0, 9.0, 10.0)]
    later = [seconds + off for (_, (seconds, _)), off in zip(pairs, (0.0, 0.8, 900.0, 0.0, 0.8), strict=True)]
    pairs = [
        (one, block_times.Taken(seconds, several.forwards))
        for (one, several), seconds in zip(pairs, later, strict=True)
    ]
    taken = block_times.split_times(pairs, [runs_of_blocks(8.0, 3.0, 0.5)[1]])
    more = block_times.BLOCKS - 1
    assert taken.first == pytest.approx(3.0 + 0.8 / more)
    assert taken.later == pytest.approx(0.5)
    # Beside the median deviation of first forwards, that of calls, which makes the later ones uncertain.
    of_later = 1.2533 * 1.4826 * 1.0 / 5**0.5 / 28
    of_pairs = 1.2533 * 1.4826 * 0.8 / more / 5**0.5
    assert taken.later_error == pytest.approx(of_later)
    assert taken.first_error == pytest.approx((of_pairs**2 + (4 * of_later) ** 2) ** 0.5)


def test_rows_state_how_well_a_first_step_is_known() -> None:
    dense, sparse = block_times.BlockTime(5.0, 5.0, later_error=0.1), block_times.BlockTime(6.0, 4.0, first_error=0.3)
    ratio, error = mage.first_over_dense(dense, sparse)
    assert ratio == pytest.approx(1.2)
    assert error == pytest.approx(1.2 * (0.05**2 + 0.02**2) ** 0.5)
    rows = [
        common.row(f"first_step/a/{context}/b1/over_dense", value, "x", detail={"error": error})
        for context, value, error in (("16k", 1.1, 0.02), ("32k", 1.2, 0.01))
    ]
    [whole] = mage.summary(rows)
    assert whole["value"] == 1.2
    assert whole["detail"] == {"case": "first_step/a/32k/b1/over_dense", "cases": 2, "error": 0.01}


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
