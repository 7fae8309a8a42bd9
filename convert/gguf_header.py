"""The header of a GGUF file: metadata and the list of tensors.

Read directly, because the `gguf` package's reader makes several numpy views per string: 3.8 s of processor time for
SmolLM2's vocabulary against 0.13 s. Our tests compare the two. What the numbers of a tensor mean is still that
package's business (`gguf.GGML_QUANT_SIZES`, `gguf.quants`). The format is llama.cpp's, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor list. `shape` is in the file's order (fastest first), `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def read_header(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata by key, and the tensors.

    Raises: ValueError, with what is wrong, for anything but a whole header; OSError.
    """
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise ValueError("the file ends inside its header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).read()


class _Header:
    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = 0

    def read(self) -> tuple[dict[str, Any], list[Tensor]]:
        if self.data[:4] != b"GGUF":
            raise ValueError(f"it begins with {bytes(self.data[:4])!r}, not b'GGUF'")
        self.position = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3 are supported, in little-endian order")
        tensor_count, field_count = self.scalar("Q"), self.scalar("Q")
        fields = {self.string(): self.value(self.scalar("I")) for _ in range(self.counted(field_count, 13))}
        listed = []
        for _ in range(self.counted(tensor_count, 24)):
            name, rank = self.string(), self.scalar("I")
            shape = tuple(self.scalar("Q") for _ in range(self.counted(rank, 8)))
            listed.append((name, shape, self.scalar("I"), self.scalar("Q")))
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        return fields, [Tensor(name, shape, kind, start + offset) for name, shape, kind, offset in listed]

    def counted(self, count: int, least: int) -> int:
        """`count`, if that many items of at least `least` bytes can still follow: a corrupt count must not loop."""
        if count * least > len(self.data) - self.position:
            raise ValueError("the file ends inside its header")
        return count

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.counted(1, size)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def string(self) -> str:
        length = self.counted(self.scalar("Q"), 1)
        self.position += length
        return self.data[self.position - length : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                size = struct.calcsize("<" + _SCALARS[item])
                self.counted(count, size)
                values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, self.position)
                self.position += count * size
                return list(values)
            return [self.value(item) for _ in range(self.counted(count, 8))]
        if kind not in _SCALARS:
            raise ValueError(f"a metadata value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])
