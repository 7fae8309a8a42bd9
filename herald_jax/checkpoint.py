"""Checkpoints on disk: every Orbax call of the project is in this file.

A checkpoint is one directory:

```
herald.json     manifest: format version, ModelConfig, every parameter's shape and dtype, every file's size, provenance
params/         one Orbax PyTree item; `orbax.checkpoint.PyTreeCheckpointer().restore(path / "params")` reads it too
tokenizer/      tokenizer files as they came
source/         the source's config.json and generation_config.json, for the record
```

Writing streams: Orbax walks the tree of `LeafSource`s, and a type handler of ours asks each for row slabs of about
`CHUNK_BYTES` and passes them to TensorStore, so memory stays at a few slabs however large a leaf is. Everything is
written to a hidden sibling directory, flushed, and renamed into place; the manifest is the last file written. A run
that dies on the way leaves only that sibling, which the next run to the same destination removes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import errno
import logging
import math
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy)
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from herald_jax.config import ModelConfig
from herald_jax.errors import CheckpointError
from herald_jax.manifest import PARAMS, SOURCE, TOKENIZER, Manifest, read_manifest, versions, write_manifest
from herald_jax.model import Params, ParamSpec, flatten, param_specs, unflatten
from herald_jax.publish import AtomicDirectory, check_destination

CHUNK_BYTES = 64 << 20
IN_FLIGHT_BYTES = 2 * CHUNK_BYTES
_IN_FLIGHT = 32
_SYNC_BYTES = 1 << 20


@dataclass(frozen=True)
class LeafSource:
    """One parameter that can be read in pieces.

    Attributes:
      shape, dtype: of the whole leaf.
      read: `read(rows)` yields consecutive C-ordered slabs of exactly `rows` rows of axis 0 (the last may be shorter),
        already in `dtype`. A slab may be reused by the caller only after the next one has been handed over and written.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Rows of axis 0 in one stored chunk: near CHUNK_BYTES, evenly split so that the last has little padding."""
        chunks = max(1, round(self.nbytes / CHUNK_BYTES))
        return math.ceil(self.shape[0] / chunks)

    @classmethod
    def from_array(cls, array: Any) -> LeafSource:
        """A leaf that is in memory already; device arrays are fetched when they are written."""

        def read(rows: int) -> Iterator[np.ndarray]:
            for start in range(0, array.shape[0], rows):
                yield np.ascontiguousarray(np.asarray(array[start : start + rows]))

        return cls(tuple(array.shape), np.dtype(array.dtype), read)


class _Write(NamedTuple):
    """A slab on its way to the disk; `leaf` names the leaf that is complete with it."""

    future: Any
    nbytes: int
    leaf: str | None


class _StreamingHandler(ocp.type_handlers.NumpyHandler):
    """Writes `LeafSource`s one at a time as uncompressed Zarr arrays; on disk they are ordinary Orbax numpy leaves.

    Orbax's own handlers take whole arrays and write all of them concurrently: memory of the checkpoint's size.
    """

    def __init__(self, order: Sequence[str], on_bytes: Callable[[int], None], on_leaf: Callable[[str], None]):
        super().__init__()
        self._order = {name: position for position, name in enumerate(order)}
        self._on_bytes = on_bytes
        self._on_leaf = on_leaf

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        # Orbax sorts by name; the caller's order is that of the source's files, read from front to back.
        ordered = sorted(zip(values, infos, strict=True), key=lambda pair: self._order[pair[1].name])
        # While slabs are written the next is read and put together, across leaves; what is in flight is bounded.
        flight: collections.deque[_Write] = collections.deque()
        try:
            for leaf, info in ordered:
                await info.await_path_creation()
                async for write in self._writes(leaf, info):
                    flight.append(write)
                    while sum(w.nbytes for w in flight) > IN_FLIGHT_BYTES or len(flight) > _IN_FLIGHT:
                        await self._finish(flight.popleft())
            while flight:
                await self._finish(flight.popleft())
        finally:
            for write in flight:  # an error or Ctrl-C: nobody may write any more when the directory is removed
                with contextlib.suppress(ValueError):
                    write.future.result()
        return []

    async def _finish(self, write: _Write) -> None:
        await write.future
        self._on_bytes(write.nbytes)
        if write.leaf is not None:
            self._on_leaf(write.leaf)

    async def _writes(self, leaf: LeafSource, info: ocp.type_handlers.ParamInfo) -> AsyncIterator[_Write]:
        """Read a leaf slab by slab and start writing each."""
        rows, total = leaf.chunk_rows, leaf.shape[0]
        store = await ts.open(_zarr_spec(leaf, rows, str(info.path)), create=True)
        slabs = leaf.read(rows)
        start = 0
        while (slab := await asyncio.to_thread(next, slabs, None)) is not None:
            stop = start + slab.shape[0]
            future = store[start:stop].write(slab, can_reference_source_data_indefinitely=True)
            yield _Write(future, slab.nbytes, info.name if stop == total else None)
            start = stop
        if start != total:
            raise CheckpointError(f"{info.name} yielded {start} rows instead of {total}")


def _zarr_spec(leaf: LeafSource, rows: int, path: str) -> dict[str, Any]:
    name = leaf.dtype.name if leaf.dtype.name == "bfloat16" else leaf.dtype.str
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": path + "/"},
        # Large chunks are flushed as they are written, which paces us to the disk. For norms and biases that would cost
        # more than all the rest; they are flushed with the directory (publish.AtomicDirectory).
        "context": {"file_io_sync": leaf.nbytes >= _SYNC_BYTES},
        # Without this a chunk of zeros (a bias, say) would leave no file, and a lost file could not be told from zeros.
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(leaf.shape),
            "chunks": [rows, *leaf.shape[1:]],
            "dtype": name,
            "compressor": None,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "dimension_separator": ".",
        },
    }


class CheckpointWriter:
    """Builds a checkpoint beside its destination and publishes it atomically (`publish.AtomicDirectory`).

    ```
    with CheckpointWriter("model.ckpt") as writer:
        writer.write_params(leaves)                       # streamed
        writer.copy_files(files, TOKENIZER)
        writer.commit(config, provenance)                 # now "model.ckpt" exists, whole
    ```
    Args:
      path: the directory to create.
      force: replace a checkpoint that is already there, once the new one is complete. Nothing but a herald_jax
        checkpoint or an empty directory is ever replaced.
    Raises: CheckpointError if `path` cannot be the destination; OSError as the file system reports it.
    """

    def __init__(self, path: str | Path, *, force: bool = False):
        self._directory = AtomicDirectory(Path(path), force=force)
        self._params: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> CheckpointWriter:
        self._directory.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._directory.__exit__(*exc)

    def write_params(
        self,
        leaves: Mapping[str, LeafSource],
        *,
        on_bytes: Callable[[int], None] = lambda n: None,
        on_leaf: Callable[[str], None] = lambda path: None,
    ) -> None:
        """Write `{"embed/embedding": LeafSource, ...}` as one Orbax item, in the mapping's order.

        `on_bytes(n)` is called after each slab, `on_leaf(path)` after each leaf.
        Raises: OSError (disk full, permission) or whatever a leaf's `read` raises.
        """
        work = self._directory.work
        names = {path.replace("/", "."): path for path in leaves}
        handler = _StreamingHandler(list(names), on_bytes, lambda name: on_leaf(names[name]))
        registry = ocp.type_handlers.create_type_handler_registry(
            (LeafSource, handler), (jax.Array, ocp.type_handlers.ArrayHandler())
        )
        # Plain Zarr directories, not OCDBT: OCDBT gathers values into data files in memory first.
        pytree = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with _tensorstore_errors(work), _quiet_orbax(), ocp.Checkpointer(pytree) as checkpointer:
            checkpointer.save(work / PARAMS, args=ocp.args.PyTreeSave(unflatten(dict(leaves))))
        self._params = {p: {"shape": list(leaf.shape), "dtype": leaf.dtype.name} for p, leaf in leaves.items()}

    def copy_files(self, files: Iterable[Path], directory: str) -> None:
        """Copy small files into a subdirectory (`TOKENIZER`, `SOURCE`)."""
        target = self._directory.work / directory
        for file in files:
            target.mkdir(exist_ok=True)
            shutil.copyfile(file, target / file.name)

    def commit(self, config: ModelConfig, provenance: Mapping[str, Any]) -> None:
        """Write the manifest and publish.

        Raises: CheckpointError if the written parameters are not exactly those that `config` declares.
        """
        write_manifest(self._directory.work, config, self._params, provenance)
        self._directory.publish()


@contextlib.contextmanager
def _tensorstore_errors(where: Path) -> Iterator[None]:
    """TensorStore reports a full disk as ValueError; give it back as the OSError it was."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EROFS):
            if os.strerror(code) in text:
                raise OSError(code, os.strerror(code), str(where.parent)) from error
        raise


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Drop Orbax's warnings about features that a plain Zarr item does not use (OCDBT merging, device metadata)."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `params` is nested like `model.param_specs`; `tokenizer_dir` is None without tokenizer."""

    path: Path
    config: ModelConfig
    params: Params
    tokenizer_dir: Path | None
    provenance: dict[str, Any]


def load_checkpoint(
    path: str | Path,
    *,
    dtype: str | None = None,
    sharding_for: Callable[[str, ParamSpec], jax.sharding.Sharding] | None = None,
) -> Checkpoint:
    """Load a checkpoint, each leaf straight to its devices and dtype.

    Args:
      path: directory written by `CheckpointWriter`.
      dtype: "bfloat16", "float16" or "float32"; None keeps what is stored. The returned config says which.
      sharding_for: maps a parameter's path and spec to its sharding; None puts everything on the first local device.
    Raises: CheckpointError, see `read_manifest`; ConfigError for an unknown dtype.
    """
    manifest = read_manifest(path)
    config = manifest.config if dtype is None else dataclasses.replace(manifest.config, dtype=dtype)  # type: ignore[arg-type]
    specs = param_specs(config)
    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    place = sharding_for or (lambda path, spec: single)
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=np.dtype(spec.dtype),
            sharding=place(name, spec),
            global_shape=spec.shape,
        )
        for name, spec in specs.items()
    }
    # Host memory beside the parameters is what may be in flight: 1 GB, or enough for the largest leaf.
    largest = max(math.prod(spec.shape) * 4 for spec in specs.values())
    concurrent_gb = max(1, math.ceil(1.5 * largest / 1e9))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=concurrent_gb)) as checkpointer:
        try:
            params = checkpointer.restore(
                manifest.path.absolute() / PARAMS,
                args=ocp.args.PyTreeRestore(restore_args=unflatten(restore_args)),
            )
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(f"{path} could not be read: {error}; convert the source again") from error
    tokenizer = manifest.path / TOKENIZER
    return Checkpoint(
        manifest.path, config, params, tokenizer if tokenizer.is_dir() else None, dict(manifest.provenance)
    )


def save_checkpoint(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    tokenizer_dir: str | Path | None = None,
    provenance: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write parameters that are in memory (initialised or trained) as a checkpoint. Atomic like a conversion.

    Raises: CheckpointError if `path` is taken or `params` do not fit `config`; OSError on a full disk.
    """
    leaves = {name: LeafSource.from_array(leaf) for name, leaf in flatten(params).items()}
    with CheckpointWriter(path, force=force) as writer:
        writer.write_params(leaves)
        if tokenizer_dir is not None:
            writer.copy_files(sorted(f for f in Path(tokenizer_dir).iterdir() if f.is_file()), TOKENIZER)
        writer.commit(config, {"versions": versions(), **(provenance or {})})


__all__ = [
    "SOURCE",
    "TOKENIZER",
    "Checkpoint",
    "CheckpointWriter",
    "LeafSource",
    "Manifest",
    "check_destination",
    "load_checkpoint",
    "read_manifest",
    "save_checkpoint",
    "versions",
]
