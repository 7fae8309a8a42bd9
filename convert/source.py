"""What a checkpoint to convert looks like to the rest of the converter, whatever files it came in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

_WHOLE = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that can be read: shape, the dtype it has when read, where it lies (for reading in file order).

    Attributes:
      dtype: numpy dtype of `Source.rows`, or None if this kind of number is not converted (`stored` says which it is).
      stored: the name of the stored type: "BF16", "Q4_1".
      nbytes: bytes on disk.
      file, offset: the file that holds it and its position there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype | None
    stored: str
    nbytes: int
    file: str
    offset: int


class Source(Protocol):
    """An open checkpoint.

    Attributes:
      kind: "safetensors", "pytorch" or "gguf".
      tensors: every readable tensor by its Hugging Face name.
      problems: everything wrong with the files themselves, one sentence each.
      lost: names of tensors that a damaged or absent file holds; None if that cannot be told.
      notes: remarks for the provenance.
      files: the weight files.
      config_dir: directory with config.json and the tokenizer files.
    """

    kind: str
    tensors: dict[str, TensorInfo]
    problems: list[str]
    lost: set[str] | None
    notes: list[str]
    files: list[Path]
    config_dir: Path

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of a tensor, in `tensors[name].dtype`."""
        ...

    def close(self) -> None:
        """Release file handles and temporary files."""
        ...


def slabs(source: Source, name: str, rows: int) -> Iterator[np.ndarray]:
    """A tensor in consecutive pieces of `rows` rows."""
    total = source.tensors[name].shape[0]
    for start in range(0, total, rows):
        yield source.rows(name, start, min(start + rows, total))


def fingerprint(path: Path) -> dict[str, object]:
    """Name, size and a hash for the provenance: of the whole file up to 2 MiB, else of its size, first and last MiB.

    Hashing every byte would read a 16 GB checkpoint a second time; header and tail tell two checkpoints apart.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= 2 * _WHOLE:
            digest.update(file.read())
            return {"name": path.name, "bytes": size, "sha256": digest.hexdigest()}
        digest.update(str(size).encode())
        digest.update(file.read(_WHOLE))
        file.seek(-_WHOLE, 2)
        digest.update(file.read())
    return {"name": path.name, "bytes": size, "sha256_of_size_first_and_last_mib": digest.hexdigest()}
