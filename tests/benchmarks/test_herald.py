"""The HERALD benchmark on a tiny shape: every row it promises, from start to end."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json

import jax
import pytest

from benchmarks import common, herald, herald_case, herald_mesh, herald_plot, herald_traffic
from benchmarks.shapes import SHAPES
from herald_jax import Herald, device_index, tasks
from tests.herald_jax import tiny


def test_writes_every_row(tmp_path, monkeypatch) -> None:
    small = dataclasses.replace(tiny.FORMS["sdar"], max_position_embeddings=4096)
    monkeypatch.setitem(SHAPES, "tiny", small)
    monkeypatch.setattr(herald, "GOAL_SHAPE", "tiny")
    options = argparse.Namespace(
        shapes="tiny",
        contexts="1",
        throughput="1",
        rows=2 / 64,
        budgets="0.05",
        selectors="cpu,index",
        cap=1.503,
        over_cap=2,
        measure=True,
        scan="xla",
        keep_bonus=0.5,
        blocks=1,
        out=tmp_path,
    )
    herald.main(options)
    [path] = tmp_path.glob("herald-*.json")
    rows = {row["id"]: row for row in json.loads(path.read_text())["rows"]}
    promised = {
        "latency/longest/speedup",
        "latency/longest/cpu",
        "latency/all/worst_speedup",
        "latency/all/worst_cpu",
        "throughput/1k/steps32/cpu",
        "throughput/1k/steps32/best",
        "throughput/1k/steps10/best",
        "selection/cpu/host_bandwidth_fraction",
        "gather/reuse/random_weights/traffic_fraction",
        "context_over_cap/tokens",
    }
    assert promised <= rows.keys()
    for best, cpu in (("speedup", "cpu"), ("worst_speedup", "worst_cpu")):
        part = "all" if best.startswith("worst") else "longest"
        assert rows[f"latency/{part}/{best}"]["value"] >= rows[f"latency/{part}/{cpu}"]["value"]
    assert rows["latency/longest/speedup"]["detail"]["selector"] in ("cpu", "index")
    assert rows["throughput_case/tiny/1k/steps32/0.05/cpu"]["detail"]["scanned_by"] == "XLA"
    case = rows["throughput_case/tiny/1k/steps32/0.05/index"]["detail"]
    assert case["index_bytes"] > 0
    assert 0 <= case["fetch_exposed_ms"] <= case["fetch_ms"]
    assert case["fetch_ms"] > 0
    assert case["host_bytes"] == 2 * small.kv_bytes_per_token * herald_case.host_slots(small, 1024)
    assert rows["context_over_cap/tokens"]["value"] == 2048
    assert 0 < rows["gather/reuse/random_weights/traffic_fraction"]["value"] <= 1
    plot = tmp_path / "img" / "speedup.png"
    herald_plot.draw(list(rows.values()), plot, "tiny")
    assert plot.stat().st_size > 10_000
    assert herald_plot.points(list(rows.values()), "tiny", "0.05")[1] == {
        selector: {1: rows[f"throughput_case/tiny/1k/steps32/0.05/{selector}"]["value"]}
        for selector in ("cpu", "index")
    }
    with pytest.raises(SystemExit, match=r"no rows of sdar8b at budget 0\.05; run python -m benchmarks.herald first"):
        herald_plot.draw(list(rows.values()), plot)
    assert common.row("latency/longest/speedup", 1.6, "x", goal=herald.GOALS["latency/longest/speedup"])["met"]


def test_a_case_that_the_host_may_not_hold_is_left_out(tmp_path, monkeypatch) -> None:
    """Regions of page-locked memory double, up to the limit; what an earlier case has left can be used again."""
    config = SHAPES["sdar8b"]
    needed = herald.cache_bytes(config, 8, 64 * 1024)
    assert 77e9 < needed < 80e9
    monkeypatch.setenv(herald.host_kv.LIMIT_VARIABLE, "88")
    monkeypatch.setattr(herald.host_kv, "available", lambda: 88 * 2**30)
    room = herald.HostRoom()
    assert room.has(config, 8, 64 * 1024)
    assert not room.refused
    monkeypatch.setattr(herald.host_kv, "available", lambda: 90 * 10**9)
    assert not herald.HostRoom().has(config, 8, 64 * 1024)
    after_another = herald.HostRoom()
    assert after_another.has(config, 1, 64 * 1024)
    assert after_another.has(config, 8, 64 * 1024)

    monkeypatch.setitem(SHAPES, "tiny", tiny.FORMS["sdar"])
    monkeypatch.setattr(herald.host_kv, "available", lambda: 10**6)
    options = argparse.Namespace(
        shapes="tiny", contexts="0", throughput="1", rows=2, budgets="0.05", selectors="cpu", cap=1.5, over_cap=0,
        measure=False, scan="auto", keep_bonus=0.0, blocks=1, out=tmp_path,
    )  # fmt: skip
    with pytest.raises(SystemExit, match=r"error: left out: 128 x 1024 tokens need .* GB of host memory, .* run this"):
        herald.main(options)


def test_the_limit_on_page_locked_memory_is_the_benchmarks_own(monkeypatch) -> None:
    """`import herald_jax` has set another one before, so a default would do nothing."""
    monkeypatch.setenv(herald.host_kv.LIMIT_VARIABLE, "137")
    herald.reserve_host_memory(
        argparse.Namespace(shapes="sdar8b", contexts="16,128", throughput="64", rows=8, over_cap=0)
    )
    assert herald.os.environ[herald.host_kv.LIMIT_VARIABLE] == "88"


def test_the_mesh_row_compares_two_devices_with_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", tiny.FORMS["sdar"])
    monkeypatch.setattr(herald_mesh, "equal_in_float32", lambda config, devices: 1.0)  # minutes on a CPU
    options = argparse.Namespace(shape="tiny", context=40, rows=2, blocks=2, budget=0.5, devices=2, out=tmp_path)
    [row] = herald_mesh.main(options)
    assert row["id"] == "mesh2/throughput"
    assert row["value"] > 0
    assert row["detail"]["equal_tokens"] == 1.0  # float32: as sharded equals unsharded elsewhere
    assert json.loads(next(tmp_path.glob("herald-*.json")).read_text())["rows"] == [row]


def test_counts_what_reuse_leaves_of_the_traffic() -> None:
    model, prompts = tiny.model(tiny.FORMS["sdar"]), tiny.prompts((48, 48))
    plan = Herald(16, min_budget=0, page_size=1)
    assert herald_traffic.fraction(model, prompts, dataclasses.replace(plan, reuse=False), blocks=4) == 1.0
    assert 0 < herald_traffic.fraction(model, prompts, plan, blocks=4) < 1


def test_prompts_are_pieces_of_the_text_one_behind_the_other() -> None:
    def encode(text: str) -> list[int]:
        return [len(word) for word in text.split()]

    first, second = herald_traffic.pieces(encode, 2, 100)
    assert first + second == encode(" ".join(tasks.default_haystack().sentences))[:200]
    with pytest.raises(SystemExit, match="not 2 times 10000000; ask for fewer --texts"):
        herald_traffic.pieces(encode, 2, 10**7)


def test_a_batch_with_an_index_fits_under_the_cap() -> None:
    config = SHAPES["sdar8b"]
    context, cap = 64 * 1024, 40e9
    assert herald_case.rows_with_index(config, 0.05, 8, context, cap) == 8
    rows = herald_case.rows_with_index(config, 0.1, 8, context, cap)
    assert 1 < rows < 8
    for bits, counted in herald_case._INDEX_BYTES.items():  # what is counted is what an index takes
        keys = jax.ShapeDtypeStruct((1, 2, 256, config.head_dim), "bfloat16")
        made = jax.eval_shape(functools.partial(device_index.quantise, bits=bits), keys)
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made)) == counted * keys.size
