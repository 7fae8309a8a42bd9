"""The safetensors reader against the library's, and every fault of a header, each with its sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.safetensors import read_header, read_rows
from herald_jax.errors import ConversionError
from tests.convert.checkpoints import CONFIG, tensors, write_raw, write_safetensors

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}


def problems(path: Path) -> list[str]:
    return read_header(path)[1]


def read_all(path: Path) -> dict[str, np.ndarray]:
    entries, found = read_header(path)
    assert found == []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return {name: read_rows(descriptor, e, 0, e.shape[0]) for name, e in entries.items()}
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_reads_what_the_library_writes(tmp_path: Path, dtype: str) -> None:
    arrays = tensors(CONFIG, dtype)
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    for name, array in read_all(tmp_path / "a.safetensors").items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])


def test_the_library_reads_what_the_tests_write(tmp_path: Path) -> None:
    """So that the broken files below are broken only where they mean to be."""
    arrays = tensors(CONFIG, np.float32)
    write_safetensors(tmp_path / "a.safetensors", arrays)
    for name, array in load_file(tmp_path / "a.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])
    for name, array in read_all(tmp_path / "a.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])


def test_bfloat16_and_rows(tmp_path: Path) -> None:
    arrays = tensors(CONFIG)
    write_safetensors(tmp_path / "a.safetensors", arrays)
    entries, _ = read_header(tmp_path / "a.safetensors")
    descriptor = os.open(tmp_path / "a.safetensors", os.O_RDONLY)
    embedding = arrays["model.embed_tokens.weight"]
    part = read_rows(descriptor, entries["model.embed_tokens.weight"], 7, 19)
    os.close(descriptor)
    assert part.dtype == embedding.dtype
    np.testing.assert_array_equal(part, embedding[7:19])


def test_a_file_that_shrank_is_noticed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", ARRAYS)
    entries, _ = read_header(tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", entries["b"].offset + 3)
    descriptor = os.open(tmp_path / "a.safetensors", os.O_RDONLY)
    with pytest.raises(ConversionError, match="while it was read; is it still being downloaded"):
        read_rows(descriptor, entries["b"], 0, 4)
    os.close(descriptor)


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["b"].update(changes)


def rename_to_nothing(header: dict[str, Any]) -> None:
    del header["b"]["dtype"]


@pytest.mark.parametrize(
    ("edit", "tail", "expected"),
    [
        (entry(dtype="F12"), b"", ["f.safetensors: b has the unknown dtype 'F12'"]),
        (entry(shape=[-4]), b"", ["f.safetensors: b has the shape [-4]"]),
        (entry(shape="4"), b"", ["f.safetensors: b has the shape '4'"]),
        (entry(data_offsets=[32, 24]), b"", ["f.safetensors: b has the data_offsets [32, 24]"]),
        (entry(shape=[5]), b"", ["f.safetensors: b spans 8 bytes, but F16 of shape [5] needs 10"]),
        (rename_to_nothing, b"", ["f.safetensors: b has no dtype, shape and data_offsets"]),
        (entry(data_offsets=[20, 28]), b"", ["f.safetensors: b overlaps a (byte 156 is before byte 160)"]),
        (entry(data_offsets=[26, 34]), b"\0\0", ["f.safetensors: 2 bytes before b belong to no tensor"]),
        (lambda header: None, b"abc", ["f.safetensors: 3 bytes at its end belong to no tensor"]),
    ],
    ids=["dtype", "shape", "shape type", "offsets", "size", "keys", "overlap", "hole", "tail"],
)
def test_faulty_entries(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], tail: bytes, expected: list[str]
) -> None:
    write_safetensors(tmp_path / "f.safetensors", ARRAYS, edit, tail)
    assert problems(tmp_path / "f.safetensors")[:1] == expected


def test_several_faults_are_reported_together(tmp_path: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header["a"]["dtype"] = "F12"
        header["b"]["shape"] = [5]

    write_safetensors(tmp_path / "f.safetensors", ARRAYS, edit)
    assert len(problems(tmp_path / "f.safetensors")) == 2


def test_truncated_files(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write_safetensors(path, ARRAYS)
    size = path.stat().st_size
    os.truncate(path, size - 5)
    assert problems(path) == [f"f.safetensors is truncated: b ends at byte {size}, the file has {size - 5}"]
    os.truncate(path, 20)
    assert problems(path) == [f"f.safetensors is truncated: its header needs {size - 32} bytes, the file has 20"]
    os.truncate(path, 3)
    assert problems(path) == ["f.safetensors is 3 bytes long, too short for a safetensors file"]


def test_corrupt_headers(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    write_raw(path, b'{"a": ', b"")
    assert problems(path)[0].startswith("f.safetensors has a corrupt header: Expecting value")
    write_raw(path, b"\xff\xfe", b"")
    assert problems(path)[0].startswith("f.safetensors has a corrupt header: 'utf-8' codec")
    write_raw(path, b"[1]", b"")
    assert problems(path) == ["f.safetensors has a corrupt header: it is a JSON list, not an object"]
    path.write_bytes(b"<!DOCTYPE html><html>not found</html>")  # what a failed download leaves
    assert problems(path)[0].startswith("f.safetensors is not a safetensors file: its header would be")


def test_duplicate_names(tmp_path: Path) -> None:
    one = json.dumps({"dtype": "F16", "shape": [4], "data_offsets": [0, 8]})
    write_raw(tmp_path / "f.safetensors", f'{{"b": {one}, "b": {one}}}'.encode(), bytes(8))
    assert problems(tmp_path / "f.safetensors") == ["f.safetensors lists b twice"]


def test_an_empty_tensor_is_legal(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "f.safetensors", {"none": np.zeros((0, 3), np.float32), **ARRAYS})
    assert problems(tmp_path / "f.safetensors") == []
