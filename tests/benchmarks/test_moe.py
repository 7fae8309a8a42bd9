"""The benchmark of mixtures of experts runs on a model small enough for a CPU; what it measures there is nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks import moe, shapes
from benchmarks.block_times import BlockTime
from herald_jax.model import param_specs
from tests.herald_jax.test_moe import MOE


def test_published_sizes() -> None:
    """Parameters as the models' names have them, and bytes per token as models.md derives them."""
    for name, billions, kib in (("llada2_mini", 16.3, 40), ("sdar_30b_a3b", 30.5, 96)):
        config = shapes.SHAPES[name]
        count = sum(shapes._nbytes(spec) // spec.dtype.itemsize for spec in param_specs(config).values())
        assert count == pytest.approx(billions * 1e9, rel=0.01)
        assert config.kv_bytes_per_token == kib * 1024
    mini = shapes.SHAPES["llada2_mini"]
    assert moe.step_bytes(mini, 256, 0, 0) == shapes.step_weight_bytes(mini)
    assert moe.step_bytes(mini, 10, 2, 100) - moe.step_bytes(mini, 9, 2, 100) == 19 * 3 * 2048 * 512 * 2
    assert moe.fits(mini, 3, 65536, 48e9)
    assert not moe.fits(mini, 4, 65536, 48e9)


@pytest.mark.once
def test_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", MOE)
    params = moe.parameters(MOE)
    with ThreadPoolExecutor(1) as pool:
        steps = moe.Steps(MOE, 2, 40, 2, pool)
    assert 3 < steps.touched(params, 40) <= 8  # more than one token's, for they are routed apart
    assert all(seconds > 0 for seconds in steps.seconds(params, [20, 40]).values())
    row = moe.expert_row("tiny", 2, params)
    assert row["id"] == "experts/tiny/b2/vs_ragged_dot"
    assert row["detail"]["error"] == 0.0  # here both are ragged_dot
    # The runs themselves are the plans' benchmarks', tested there; here a block takes a second.
    kept = SimpleNamespace(pool_bytes=0, dense_bytes=0, index_bytes=0, host_bytes=0)
    got = {"block": 1.0, "scan": 0.0, "exposed": 0.0, "stats": kept}
    monkeypatch.setattr(moe.herald, "dense", lambda *given: {given[-1][0]: BlockTime(1.0, 0.0)})
    monkeypatch.setattr(moe.herald, "Case", lambda *_: SimpleNamespace(measure=lambda *_: got))
    row = moe.herald_row("tiny", 40, 4e5, 9, params)
    assert row["id"] == "herald/tiny/0k/throughput"
    assert (row["detail"]["dense_rows"], row["detail"]["herald_rows"], row["value"]) == (2, 9, 4.5)
    kept.pool_bytes = 4e5
    with pytest.raises(SystemExit, match="HERALD with 9 rows holds 0.0 GB, too close to the cap: take fewer rows"):
        moe.herald_row("tiny", 40, 4e5, 9, params)
    with pytest.raises(SystemExit, match="tiny with one row of 40 tokens does not fit the cap"):
        moe.herald_row("tiny", 40, 2e5, 3, params)
