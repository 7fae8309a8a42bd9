"""The benchmark of mixtures of experts runs on a model small enough for a CPU; what it measures there is nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import moe, shapes
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
    assert moe.measure_step(MOE, params, 2, 40, 2) > 0
    assert 3 < moe.count_touched(MOE, params, 2, 40) <= 8  # more than one token's, for they are routed apart
    row = moe.expert_row("tiny", 2, params)
    assert row["id"] == "experts/tiny/b2/vs_ragged_dot"
    assert row["detail"]["error"] == 0.0  # here both are ragged_dot
    # The runs themselves are `generate`'s, tested elsewhere; here a second takes 5 tokens of each row.
    rate = SimpleNamespace(decode_seconds=1.0, offload=None)
    monkeypatch.setattr(moe, "throughput", lambda _, batch, *__: SimpleNamespace(new_tokens=5 * batch, **vars(rate)))
    row = moe.herald_row("tiny", 40, 4e5, 9, 8, params)
    assert row["id"] == "herald/tiny/0k/throughput"
    assert (row["detail"]["dense_rows"], row["detail"]["herald_rows"], row["value"]) == (2, 9, 4.5)
    big = SimpleNamespace(pool_bytes=4e5, dense_bytes=0, index_bytes=0)
    monkeypatch.setattr(rate, "offload", big)
    with pytest.raises(SystemExit, match="HERALD with 9 rows holds 0.0 GB, too close to the cap: take fewer rows"):
        moe.herald_row("tiny", 40, 4e5, 9, 8, params)
    with pytest.raises(SystemExit, match="tiny with one row of 40 tokens does not fit the cap"):
        moe.herald_row("tiny", 40, 2e5, 3, 8, params)
