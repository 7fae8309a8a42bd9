"""The benchmark of mixtures of experts runs on a model small enough for a CPU; what it measures there is nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import moe, moe_herald, moe_steps, shapes
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
    assert moe_steps.step_bytes(mini, 256, 0, 0) == shapes.step_weight_bytes(mini)
    assert moe_steps.bytes_needed(shapes.SHAPES["sdar_30b_a3b"], 16, 32768) < 120e9
    more = moe_steps.step_bytes(mini, 10, 2, 100) - moe_steps.step_bytes(mini, 9, 2, 100)
    assert more == 19 * 3 * 2048 * 512 * 2


@pytest.mark.once
def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", MOE)
    params = moe.parameters(MOE)
    with ThreadPoolExecutor(1) as pool:
        counter = moe_steps.Touched(MOE, 2, 40, pool)
        steps = moe_steps.Steps("tiny", 2, 40, 2, pool)
    touched = counter.count(params, 40, [1, 2])
    assert 3 < touched[1] <= touched[2] <= 8  # more than one token's, for they are routed apart
    assert all(seconds > 0 for seconds in steps.seconds(params, [20, 40]).values())
    row = steps.expert_row(params)
    assert row["id"] == "experts/tiny/b2/vs_ragged_dot"
    assert row["detail"]["error"] < 1e-5  # float32: a loop over experts, and all in one


def test_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and the better selector, where a block takes a second with the dense plan and less under HERALD."""
    mini, given = shapes.SHAPES["llada2_mini"], ("llada2_mini", 8, 65536)
    kept = SimpleNamespace(pool_bytes=0, index_bytes=0, host_bytes=0)
    seconds = {"cpu": 0.5, "index": 0.4}

    def measured(plan: Any, *_: int) -> dict[str, Any]:
        block = seconds[plan.selector]
        return dict.fromkeys(("own", "exposed", "scan", "scan_rate", "fetched"), 0.0) | {
            "block": block, "each": [block], "stats": kept,
        }  # fmt: skip

    case = SimpleNamespace(measure=measured, host=SimpleNamespace(nbytes=0), params={})
    monkeypatch.setattr(moe_herald.herald_case, "Case", lambda *_: case)
    monkeypatch.setattr(moe_herald, "lower_ahead", lambda *_: SimpleNamespace(compile=dict))
    monkeypatch.setattr(moe_herald, "measure_contexts", lambda *_: {65536: BlockTime(0.2, 0.1)})
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        throughput = moe_herald.Throughput(*given, 40e9, pool)
        throughput.wait()
        throughput.measure({"some": 0}, ["index", "cpu"], rows.append, ">=2")
        with pytest.raises(SystemExit, match="llada2_mini with one row of 65536 tokens does not fit the cap of 36 GB"):
            moe_herald.Throughput(*given, 36e9, pool)
        with pytest.raises(
            SystemExit, match=r"HERALD with 12 rows holds 40.56 GB, more than the cap of 40 GB: take few"
        ):
            moe_herald.Throughput("llada2_mini", 12, 65536, 40e9, pool)
    assert case.params == {"some": 0}
    assert throughput.alone == 2  # 5.4 of 40 GB beside 32.5 of weights and what activations need
    # 8 rows in 0.4 s beside 2 in the first of 9 forwards and 8 more.
    assert [(row["id"], row["value"]) for row in rows] == [
        ("herald_case/llada2_mini/64k/index", 10.0),
        ("herald_case/llada2_mini/64k/cpu", 8.0),
        ("herald/llada2_mini/64k/throughput", 10.0),
    ]
    assert rows[-1]["met"]
    assert rows[0]["detail"]["index_bits"] == 4  # 8 would not fit
    held = moe_herald.held_bytes("llada2_mini", throughput.plan("index"), 8, 65536)
    pools = 2 * 8 * 3488 * mini.kv_bytes_per_token  # 5 % of the longest prefix, and three blocks
    index = 8 * 66560 * 20 * 4 * (64 + 8)  # of each key: 128 codes of half a byte and a scale for each 32 of them
    assert held == pytest.approx(shapes.weight_bytes(mini) + pools + index, rel=1e-3)


def test_parts_that_cannot_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, sentence in (
        ("--parts mage,herald", "HERALD's part caps the device memory of its process"),
        ("--parts step", "--parts knows steps, mage, herald, but not step"),
    ):
        monkeypatch.setattr("sys.argv", ["moe", *arguments.split()])
        with pytest.raises(SystemExit, match=sentence):
            moe.main()
