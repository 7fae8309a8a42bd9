"""The shared parts of the benchmarks, and the kernels' benchmark on tiny shapes."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import common, kernels_attention


def test_rows_say_whether_they_met_their_goal():
    assert common.row("a/b", 1.23456, "x", goal=">=1.2")["met"] is True
    assert common.row("a/b", 1.3, "x", goal="<=1.25")["met"] is False
    assert "met" not in common.row("a/b", 1.0, "us")
    assert common.row("a/b", 1.0, "x", detail={"us": [1.23456]})["detail"] == {"us": [1.235]}
    with pytest.raises(ValueError, match="goal must be like"):
        common.row("a/b", 1.0, "x", goal="fast")


def test_results_replace_their_own_group_and_keep_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("HERALD_COMMIT", "first")
    common.write_results("kernels", [common.row("topk/a", 1.0, "x"), common.row("gather/a", 1.0, "x")], folder=tmp_path)
    monkeypatch.setenv("HERALD_COMMIT", "second")
    path = common.write_results("kernels", [common.row("gather/b", 2.0, "x")], folder=tmp_path)
    assert path.name == f"kernels-{common.device_slug()}.json"
    report = json.loads(path.read_text())
    assert report["commit"] == "second"
    assert report["versions"]["jax"] == jax.__version__
    by_id = {row["id"]: row for row in report["rows"]}
    assert set(by_id) == {"topk/a", "gather/b"}
    assert by_id["topk/a"]["commit"] == "first"
    assert "commit" not in by_id["gather/b"]
    common.write_results("kernels", [common.row("topk/b", 3.0, "x")], folder=tmp_path, by_id=True)
    assert path == common.results_path("kernels", tmp_path)
    values = {row["id"]: row["value"] for row in json.loads(path.read_text())["rows"]}
    assert values == {"topk/a": 1.0, "gather/b": 2.0, "topk/b": 3.0}
    common.write_results("kernels", [common.row("topk/b", 4.0, "x")], folder=tmp_path, by_id=True)
    assert [row["value"] for row in json.loads(path.read_text())["rows"]] == [1.0, 2.0, 4.0]


def test_rms_error():
    assert common.rms_error(jnp.asarray([1.1, 2.2]), jnp.asarray([1.0, 2.0])) == pytest.approx(0.1, rel=1e-5)
    assert common.rms_error(jnp.asarray([jnp.nan, 2.0]), jnp.asarray([1.0, 2.0])) == float("inf")


def test_inputs_outgrow_the_cache():
    assert common.input_sets(2**20) * 2**20 >= 4 * common.L2_BYTES or common.input_sets(2**20) == 64
    assert common.input_sets(2**30) == 1


@pytest.mark.once
@pytest.mark.slow
def test_the_attention_benchmark_runs_on_tiny_shapes():
    rows = kernels_attention.rows({"copy_bandwidth": 1e10, "quick": True})
    ids = {row["id"] for row in rows}
    assert {"attention/short/worst_over_floor", "importance/one_row/overhead", "importance/all_rows/overhead"} <= ids
    assert all(row["value"] > 0 for row in rows)
