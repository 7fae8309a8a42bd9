"""Hugging Face sources: a directory (one file, or shards with an index) or one weight file; safetensors or .bin."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from convert.safetensors import NUMPY, Entry, read_header, read_rows
from convert.source import Source, TensorInfo
from herald_jax.errors import ConversionError

_NAMES = {"safetensors": "model.safetensors", "pytorch": "pytorch_model.bin"}


def open_source(path: str | Path) -> Source:
    """Open a checkpoint for conversion: a directory, a .safetensors, .bin or .gguf file. Reads headers only.

    Problems inside the files are collected in `Source.problems`.
    Raises: ConversionError if `path` holds nothing that looks like a checkpoint, or a needed package is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise ConversionError(f"{path} does not exist")
    if path.is_file():
        return _open_file(path)
    for kind, name in _NAMES.items():
        single, index = path / name, path / f"{name}.index.json"
        if single.is_file():  # transformers, too, prefers the single file where both exist
            source = _open_shards(kind, path, [single])
            if index.is_file():
                source.notes.append(f"{index.name} was ignored: {name} exists beside it")
            return source
        if index.is_file():
            return _open_index(kind, path, index)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_file(ggufs[0])
    if len(ggufs) > 1:
        raise ConversionError(f"{path} holds {len(ggufs)} .gguf files ({ggufs[0].name}, ...); name the one to convert")
    loose = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if len(loose) == 1:
        return _open_file(loose[0])
    if loose:
        raise ConversionError(
            f"{path} holds {len(loose)} weight files ({loose[0].name}, ...) but no {_NAMES['safetensors']}.index.json"
        )
    raise ConversionError(f"{path} holds no weights (no .safetensors, .bin or .gguf file)")


def _open_file(path: Path) -> Source:
    if path.suffix == ".gguf":
        from convert.gguf import GGUFSource

        return GGUFSource(path)
    if path.suffix == ".safetensors":
        return _open_shards("safetensors", path.parent, [path])
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_shards("pytorch", path.parent, [path])
    raise ConversionError(f"{path} is neither a .safetensors, a .bin nor a .gguf file")


def _open_shards(kind: str, directory: Path, files: list[Path]) -> SafetensorsSource | TorchSource:
    return SafetensorsSource(directory, files) if kind == "safetensors" else TorchSource(directory, files)


def _open_index(kind: str, directory: Path, index: Path) -> Source:
    weight_map, problems = _read_index(index)
    names = sorted(set(weight_map.values()))
    present = [name for name in names if (directory / name).is_file()]
    for name in names:
        if name not in present:
            count = sum(1 for shard in weight_map.values() if shard == name)
            problems.append(f"{index.name} names {name} ({count} tensors), which does not exist")
    source = _open_shards(kind, directory, [directory / name for name in present])
    damaged = {t for t, shard in weight_map.items() if shard not in present or shard in source.unreadable}
    source.lost = damaged if weight_map else None
    for tensor, shard in weight_map.items():
        info = source.tensors.get(tensor)
        if info is None and shard in present and shard not in source.unreadable:
            problems.append(f"{index.name} places {tensor} in {shard}, which does not have it")
        elif info is not None and info.file != shard:
            problems.append(f"{index.name} places {tensor} in {shard}, but it is in {info.file}")
    problems += [
        f"{i.file} has {t}, which {index.name} does not list" for t, i in source.tensors.items() if t not in weight_map
    ]
    source.problems[:0] = problems
    source.files.append(index)
    return source


def _read_index(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        return {}, [f"{path.name} is not a valid index: {error!r}"]
    if not isinstance(weight_map, dict):
        return {}, [f"{path.name} is not a valid index: weight_map is a JSON {type(weight_map).__name__}"]
    problems = []
    for tensor, shard in list(weight_map.items()):
        # Only file names: an index must not lead out of its directory.
        if not isinstance(shard, str) or Path(shard).name != shard:
            problems.append(f"{path.name} places {tensor} in {shard!r}, which is not a file name")
            del weight_map[tensor]
    return weight_map, problems


class SafetensorsSource:
    """One or more safetensors files."""

    kind = "safetensors"

    def __init__(self, directory: Path, files: list[Path]):
        self.config_dir = directory
        self.files = list(files)
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.unreadable: set[str] = set()  # files of which some tensors could not even be listed
        self._entries: dict[str, Entry] = {}
        self._descriptors: dict[str, int] = {}
        for file in files:
            entries, problems = read_header(file)
            self.problems += problems
            if problems:
                self.unreadable.add(file.name)
            for name, entry in entries.items():
                if name in self.tensors:
                    self.problems.append(f"{name} is in both {self.tensors[name].file} and {file.name}")
                    continue
                dtype = NUMPY.get(entry.dtype)
                info = TensorInfo(entry.shape, dtype, entry.dtype, entry.nbytes, file.name, entry.offset)
                self.tensors[name] = info
                self._entries[name] = entry
            self._descriptors[file.name] = os.open(file, os.O_RDONLY)
        self.lost: set[str] | None = None if self.unreadable else set()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return read_rows(self._descriptors[self.tensors[name].file], self._entries[name], start, stop)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class TorchSource:
    """One or more PyTorch files (`torch.save` of a state dict, zip format), through torch, memory-mapped."""

    kind = "pytorch"

    def __init__(self, directory: Path, files: list[Path]):
        try:
            import torch
        except ImportError as error:
            raise ConversionError(
                f"{files[0].name if files else directory} is a PyTorch file, and reading it needs torch: install "
                "herald-jax[oracle], or use the safetensors files of the same checkpoint"
            ) from error
        import pickle

        self._torch = torch
        self.config_dir = directory
        self.files = list(files)
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.unreadable: set[str] = set()
        self._state: dict[str, Any] = {}
        stored = {
            torch.bfloat16: "BF16",
            torch.float16: "F16",
            torch.float32: "F32",
            torch.float64: "F64",
        }
        for file in files:
            try:
                # weights_only: a pickle from a stranger must not run code. mmap: nothing is read until it is used.
                state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError) as error:
                self.problems.append(f"{file.name} could not be read by torch: {str(error).splitlines()[0]}")
                self.unreadable.add(file.name)
                continue
            state = state.get("state_dict", state) if isinstance(state, dict) else state
            if not isinstance(state, dict):
                self.problems.append(f"{file.name} holds a {type(state).__name__}, not a state dict")
                self.unreadable.add(file.name)
                continue
            for name, tensor in state.items():
                if not isinstance(tensor, torch.Tensor):
                    self.problems.append(f"{file.name}: {name} is a {type(tensor).__name__}, not a tensor")
                    continue
                if name in self.tensors:
                    self.problems.append(f"{name} is in both {self.tensors[name].file} and {file.name}")
                    continue
                kind = stored.get(tensor.dtype, str(tensor.dtype))
                nbytes = tensor.numel() * tensor.element_size()
                info = TensorInfo(
                    tuple(tensor.shape), NUMPY.get(kind), kind, nbytes, file.name, tensor.storage_offset()
                )
                self.tensors[name] = info
                self._state[name] = tensor
        self.lost: set[str] | None = None if self.unreadable else set()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        part = self._state[name][start:stop].detach().contiguous()
        info = self.tensors[name]
        assert info.dtype is not None
        bits = {2: self._torch.int16, 4: self._torch.int32, 8: self._torch.int64}[info.dtype.itemsize]
        array = part.view(bits).numpy().copy().view(info.dtype)  # numpy has no bfloat16: pass the bits
        _forget(part)
        return array

    def close(self) -> None:
        self._state.clear()


def _forget(tensor: Any) -> None:
    """Unmap what was read of a memory-mapped tensor, or the pages stay resident and add up to the checkpoint's size."""
    if not sys.platform.startswith("linux") or tensor.numel() == 0:
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    stop = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if stop > start:
        # Private, unmodified file pages: the kernel reads them again from the file if they are touched once more.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
