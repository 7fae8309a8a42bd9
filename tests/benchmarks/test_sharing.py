"""What lets benchmarks share a GPU's time: one profiler session for many functions, turns of several processes, kernels
lowered elsewhere."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import lowering, turns
from benchmarks.stopwatch import Stopwatch, Time, split_at_marks, time_of_calls
from pallas_kernels import dispatch
from pallas_kernels.topk import select_topk


def test_events_between_marks_belong_to_a_function() -> None:
    events = [("fill", 9.0), ("the_mark_0", 0.1), ("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 4.0), ("the_mark_0", 0.1)]
    events += [("check", 9.0), ("the_mark_0", 0.1), ("c", 5.0), ("c", 6.0), ("d", 7.0), ("the_mark_0", 0.1)]
    first, second = split_at_marks(events, 2, "the_mark")
    assert time_of_calls(first, 2) == Time(5.0, "profiler", (("a", 2.0), ("b", 3.0)))
    assert time_of_calls(second, 2) == Time(9.0, "profiler, mean")
    with pytest.raises(RuntimeError, match="6 marks were set but the profiler recorded 4; it saw: a, b, c"):
        split_at_marks(events, 3, "the_mark")


def test_without_a_gpu_wall_time_is_taken() -> None:
    with Stopwatch() as watch:
        taken = watch.time(jax.jit(jnp.cos), [(jnp.ones(8),), (jnp.zeros(8),)], repeats=3)
    assert taken.time.how == "wall"
    assert taken.us == 1e6 * taken.seconds > 0


CHILD = """
import argparse, json, pathlib, time
from benchmarks.turns import Turns
parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("--turns", type=pathlib.Path)
parser.add_argument("--out", type=pathlib.Path)
options = parser.parse_args()
turns = Turns(options.turns)
with turns.compiling():
    begun = time.time()
    (options.turns.parent / options.name).touch()
    while len(list(options.turns.parent.glob("name*"))) < 2:  # neither goes on before both are here
        time.sleep(0.01)
    time.sleep(0.1)
    compiled = time.time()
turns.begin_measuring()
measuring = time.time()
(options.out / "x.json").write_text(json.dumps({"rows": [{"id": options.name, "at": [begun, compiled, measuring]}]}))
time.sleep(0.2)
raise SystemExit(3 if options.name == "name1" else 0)
"""


def test_processes_compile_together_and_measure_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    saved: list[list[dict[str, Any]]] = []
    with pytest.raises(SystemExit, match="error: name1: exit code 3"):
        turns.run_side_by_side("child", [["name0"], ["name1"]], saved.append)
    assert [len(rows) for rows in saved] == [1, 2]
    assert [row["id"] for row in saved[-1]] == ["name0", "name1"]
    times = np.array([row["at"] for row in saved[-1]])
    assert times[:, 0].max() < times[:, 1].min()  # together
    assert times[:, 1].max() <= times[:, 2].min()  # nobody measures while another compiles
    assert abs(times[0, 2] - times[1, 2]) >= 0.2  # in turn


def test_programs_of_a_workshop() -> None:
    shapes = (jax.ShapeDtypeStruct((2, 40), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
    program = functools.partial(select_topk, capacity=5, implementation="xla")
    with lowering.Workshop() as shop:
        shop.add({"one": (program, shapes)})
        x, counts = jax.random.normal(jax.random.key(0), (2, 40)), jnp.asarray([5, 3])
        np.testing.assert_array_equal(shop["one"](x, counts), program(x, counts))
        with lowering.Workshop.of({"shop": shop}) as same:
            assert same is shop


@pytest.mark.skipif(dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: Mosaic GPU kernels")
def test_a_kernel_is_lowered_without_a_gpu() -> None:
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, which jax.export writes with")
    shapes = (jax.ShapeDtypeStruct((2, 40), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
    program = functools.partial(select_topk, capacity=5, implementation="mosaic_gpu")
    exported = jax.export.deserialize(bytearray(lowering.lower(program, shapes, "NVIDIA H200")))
    assert exported.platforms == ("cuda",)
    assert "select_topk_mosaic_gpu" in exported.mlir_module()
