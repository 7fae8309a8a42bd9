"""The memory benchmark's own arithmetic, its checkpoints, and that its document is up to date."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import convert_memory
from benchmarks.common import RESULTS
from convert.converter import inspect
from convert.hf import open_source
from herald_jax.hf_config import NO_OVERRIDES


def test_its_checkpoints_are_convertible(tmp_path: Path) -> None:
    shape = dataclasses.replace(convert_memory.LADDER["1-layers"], hidden=16, intermediate=24, vocab=32, layers=3)
    size = convert_memory.write_checkpoint(tmp_path / "hf", shape, shard_bytes=100_000)
    source = open_source(tmp_path / "hf")
    found = inspect(source, NO_OVERRIDES)
    source.close()
    assert found.problems == ()
    assert sum(info.nbytes for info in source.tensors.values()) == size
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2


def test_sdar_8b_has_sixteen_gigabytes() -> None:
    (shape,) = convert_memory.FULL.values()
    elements = 0
    for _, dims in shape.tensors():
        count = 1
        for n in dims:
            count *= n
        elements += count
    assert 16.3e9 < 2 * elements < 16.5e9


def test_the_slope_is_a_least_squares_line() -> None:
    points = [{"bytes": gb * 1e9, "peak": (0.5 + 0.01 * gb) * 1e9} for gb in (1, 2, 4)]
    slope, intercept = convert_memory.fit(points)
    assert slope == pytest.approx(0.01)
    assert intercept == pytest.approx(0.5)


def test_the_document_shows_the_results_file() -> None:
    document = convert_memory.DOC.read_text(encoding="utf-8")
    assert convert_memory.render(document, convert_memory.load_rows(RESULTS)) == document
