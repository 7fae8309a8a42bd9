"""Reading safetensors files: a strict header check, and rows of a tensor by position.

The `safetensors` library validates too, but stops at the first fault, names neither tensor nor byte, and hands out
whole tensors from a memory map, whose pages count as resident. The format is small enough to read directly: eight bytes
of header length, a JSON header, then the tensors' bytes. Our tests compare the two readers.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from herald_jax.errors import ConversionError

# Everything the format can hold → bytes per element. The floats among them can be converted (`NUMPY`).
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
NUMPY = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype's name in the format, its shape, its first byte counted from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """All tensors of a file and every problem of its header.

    Returns: entries by name (those that are sound), and problems, one sentence each, empty for a good file.
    Raises: OSError if the file cannot be read.
    """
    name, size = path.name, path.stat().st_size
    if size < 8:
        return {}, [f"{name} is {size} bytes long, too short for a safetensors file"]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER:
            return {}, [f"{name} is not a safetensors file: its header would be {length} bytes long"]
        if 8 + length > size:
            return {}, [f"{name} is truncated: its header needs {8 + length} bytes, the file has {size}"]
        raw = file.read(length)
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                duplicates.append(key)
            found[key] = value
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        return {}, [f"{name} has a corrupt header: {error}"]
    if not isinstance(header, dict):
        return {}, [f"{name} has a corrupt header: it is a JSON {type(header).__name__}, not an object"]
    problems = [f"{name} lists {key} twice" for key in duplicates]
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for key, value in header.items():
        if key == "__metadata__":
            continue
        entry = _entry(value, 8 + length)
        if isinstance(entry, str):
            problems.append(f"{name}: {key} {entry}")
            continue
        spans.append((entry.offset, entry.offset + entry.nbytes, key))
        if entry.offset + entry.nbytes > size:
            problems.append(
                f"{name} is truncated: {key} ends at byte {entry.offset + entry.nbytes}, the file has {size}"
            )
        else:
            entries[key] = entry
    spans.sort()
    end = 8 + length
    previous = "the header"
    for start, stop, key in spans:
        if start < end:
            problems.append(f"{name}: {key} overlaps {previous} (byte {start} is before byte {end})")
        elif start > end:
            problems.append(f"{name}: {start - end} bytes before {key} belong to no tensor")
        if stop > end:
            end, previous = stop, key
    if not problems and end != size:
        problems.append(f"{name}: {size - end} bytes at its end belong to no tensor")
    return entries, problems


def _entry(value: Any, data_start: int) -> Entry | str:
    """The entry, or what is wrong with it."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        return "has no dtype, shape and data_offsets"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in ITEM_BYTES:
        return f"has the unknown dtype {dtype!r}"
    if not _naturals(shape):
        return f"has the shape {shape!r}"
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has the data_offsets {offsets!r}"
    entry = Entry(dtype, tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        return f"spans {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shape} needs {entry.nbytes}"
    return entry


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)


def read_rows(descriptor: int, entry: Entry, start: int, stop: int) -> np.ndarray:
    """Rows `start:stop` of axis 0, one read, in the file's dtype: `[stop - start, *shape[1:]]`.

    Reads by position (pread) rather than through a memory map: mapped pages stay resident and would add up to the
    checkpoint's size. Raises: OSError; ConversionError if the file became shorter.
    """
    dtype = NUMPY[entry.dtype]
    row = math.prod(entry.shape[1:]) * dtype.itemsize
    array = np.empty((stop - start, *entry.shape[1:]), dtype)
    pread_into(descriptor, array, entry.offset + start * row)
    return array


def pread_into(descriptor: int, array: np.ndarray, offset: int) -> None:
    """Fill a C-contiguous array with the file's bytes from `offset` on."""
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        read = os.preadv(descriptor, [view[done:]], offset + done)
        if read == 0:
            raise ConversionError(
                f"the source file ended at byte {offset + done} while it was read; is it still being downloaded?"
            )
        done += read
