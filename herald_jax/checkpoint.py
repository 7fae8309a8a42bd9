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
import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy)
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from herald_jax.config import ModelConfig
from herald_jax.errors import CheckpointError, ConfigError
from herald_jax.model import Params, ParamSpec, flatten, param_specs, unflatten

FORMAT = "herald_jax checkpoint"
FORMAT_VERSION = 1
MANIFEST = "herald.json"
PARAMS = "params"
TOKENIZER = "tokenizer"
SOURCE = "source"
CHUNK_BYTES = 64 << 20


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
        for leaf, info in ordered:
            await info.await_path_creation()
            await self._write(leaf, info)
            self._on_leaf(info.name)
        return []

    async def _write(self, leaf: LeafSource, info: ocp.type_handlers.ParamInfo) -> None:
        rows = leaf.chunk_rows
        store = await ts.open(_zarr_spec(leaf, rows, str(info.path)), create=True)
        slabs = leaf.read(rows)
        pending: ts.Future | None = None
        start = 0
        # One slab is read while the previous one is written: the disk works both ways, memory holds two slabs.
        while (slab := await asyncio.to_thread(next, slabs, None)) is not None:
            if pending is not None:
                await pending
            stop = start + slab.shape[0]
            pending = store[start:stop].write(slab, can_reference_source_data_indefinitely=True)
            start = stop
            self._on_bytes(slab.nbytes)
        if pending is not None:
            await pending
        if start != leaf.shape[0]:
            raise CheckpointError(f"{info.name} yielded {start} rows instead of {leaf.shape[0]}")


def _zarr_spec(leaf: LeafSource, rows: int, path: str) -> dict[str, Any]:
    name = leaf.dtype.name if leaf.dtype.name == "bfloat16" else leaf.dtype.str
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": path + "/"},
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
    """Builds a checkpoint beside its destination and publishes it atomically.

    ```
    with CheckpointWriter("model.ckpt") as writer:
        writer.write_params(leaves)                       # streamed
        writer.copy_files(files, TOKENIZER)
        writer.commit(config, provenance)                 # now "model.ckpt" exists, whole
    ```
    Leaving the block without `commit` (an exception, Ctrl-C) removes everything written. One writer per destination
    at a time; a second one fails instead of mixing files.

    Args:
      path: the directory to create.
      force: replace a checkpoint that is already there, once the new one is complete. Nothing but a herald_jax
        checkpoint or an empty directory is ever replaced.
    Raises: CheckpointError if `path` cannot be the destination; OSError as the file system reports it.
    """

    def __init__(self, path: str | Path, *, force: bool = False):
        self.path = Path(path).absolute()
        self._force = force
        self._work: Path | None = None
        self._lock: int | None = None
        self._params: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> CheckpointWriter:
        check_destination(self.path, force=self._force)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.path)
        prefix = _work_prefix(self.path)
        self._work = Path(tempfile.mkdtemp(prefix=prefix, dir=self.path.parent))
        self._work.chmod(0o755)  # mkdtemp's 0700 would stay on the published directory
        self._lock = os.open(self._work, os.O_RDONLY)  # held until published; the kernel drops it if we die
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *exc: object) -> None:
        self._release()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

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
        work = self._require_open()
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
        target = self._require_open() / directory
        for file in files:
            target.mkdir(exist_ok=True)
            shutil.copyfile(file, target / file.name)

    def commit(self, config: ModelConfig, provenance: Mapping[str, Any]) -> None:
        """Write the manifest, flush everything to the disk and rename the directory to its destination.

        Raises: CheckpointError if the written parameters are not exactly those that `config` declares.
        """
        work = self._require_open()
        problems = _spec_problems(config, self._params)
        if problems:
            raise CheckpointError(f"parameters do not fit the configuration: {'; '.join(problems)}")
        files = {str(f.relative_to(work)): f.stat().st_size for f in sorted(work.rglob("*")) if f.is_file()}
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "config": config.to_dict(),
            "provenance": dict(provenance),
            "params": self._params,
            "files": files,
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        _flush(work)
        self._publish(work)
        self._work = None
        self._release()

    def _publish(self, work: Path) -> None:
        replaced = None
        if self.path.exists() and any(self.path.iterdir()):
            replaced = Path(tempfile.mkdtemp(prefix=_work_prefix(self.path), dir=self.path.parent)) / "replaced"
            os.rename(self.path, replaced)
        try:
            os.rename(work, self.path)  # over an empty directory too
        except OSError:
            if replaced is not None:
                os.rename(replaced, self.path)
            raise
        _fsync(self.path.parent)
        if replaced is not None:
            shutil.rmtree(replaced.parent, ignore_errors=True)

    def _require_open(self) -> Path:
        if self._work is None:
            raise CheckpointError("the checkpoint writer is not open; use it in a with statement, before commit")
        return self._work

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_destination(path: Path, *, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written to `path`."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} exists and is not a directory; give another destination")
    if not any(path.iterdir()):
        return
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is not empty and not a herald_jax checkpoint; give another destination")
    if not force:
        raise CheckpointError(f"{path} already holds a checkpoint; give another destination or replace it with --force")


def _work_prefix(path: Path) -> str:
    return f".{path.name}.partial-"


def _remove_leftovers(path: Path) -> None:
    """Delete what earlier, dead runs left beside `path`; a live one holds its lock and stops this run."""
    for entry in sorted(path.parent.glob(_work_prefix(path) + "*")):
        if (entry / "replaced").is_dir() and not path.exists():
            # The earlier run died between the two renames of a replacement: put the old checkpoint back.
            os.rename(entry / "replaced", path)
        handle = os.open(entry, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry)
        except BlockingIOError:
            raise CheckpointError(f"another conversion is writing {path} now; wait for it or stop it") from None
        finally:
            os.close(handle)


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


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush(directory: Path) -> None:
    """fsync every directory below, and every file outside the arrays (TensorStore has synced those)."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _fsync(Path(folder, name))
        _fsync(Path(folder))


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `params` is nested like `model.param_specs`; `tokenizer_dir` is None without tokenizer."""

    path: Path
    config: ModelConfig
    params: Params
    tokenizer_dir: Path | None
    provenance: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What `herald.json` says, before any parameter is read."""

    path: Path
    config: ModelConfig
    params: dict[str, dict[str, Any]]
    files: dict[str, int]
    provenance: dict[str, Any]


def read_manifest(path: str | Path) -> Manifest:
    """Read and check a checkpoint's manifest and the presence and size of each of its files; reads no parameter.

    Raises: CheckpointError: no such directory, not a checkpoint, incomplete, damaged, or written by a newer version.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; a checkpoint is a directory written by herald-convert")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(_not_a_checkpoint(path))
    try:
        raw = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST} has the format {raw['format']!r} instead of {FORMAT!r}")
        version = raw["format_version"]
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} was written by a newer herald_jax (format version {version}, this one reads up to "
                f"{FORMAT_VERSION}); upgrade herald-jax"
            )
        manifest = Manifest(
            path, ModelConfig.from_dict(raw["config"]), raw["params"], raw["files"], dict(raw["provenance"])
        )
    except ConfigError as error:
        raise CheckpointError(f"{path / MANIFEST} holds an invalid configuration: {error}") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged ({error!r}); convert the source again") from error
    problems = _file_problems(manifest) + _spec_problems(manifest.config, manifest.params)
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{path} is incomplete or damaged: {'; '.join(problems[:5])}{more}; convert the source again"
        )
    return manifest


def _not_a_checkpoint(path: Path) -> str:
    if (path / PARAMS).is_dir() or any(path.glob(PARAMS + ".orbax-checkpoint-tmp*")):
        return f"{path} is an incomplete checkpoint (its conversion did not finish); run herald-convert again"
    hugging_face = (path / "config.json").is_file() or any(path.glob("*.safetensors"))
    if hugging_face:
        return f"{path} is a Hugging Face checkpoint; convert it first with: herald-convert {path} <destination>"
    return f"{path} is not a herald_jax checkpoint (it has no {MANIFEST}); make one with herald-convert"


def _file_problems(manifest: Manifest) -> list[str]:
    problems = []
    for name, size in manifest.files.items():
        file = manifest.path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
    return problems


def _spec_problems(config: ModelConfig, params: Mapping[str, Mapping[str, Any]]) -> list[str]:
    specs = param_specs(config)
    problems = [f"parameter {path} is missing" for path in specs if path not in params]
    problems += [f"parameter {path} is unknown" for path in params if path not in specs]
    for path, spec in specs.items():
        stored = params.get(path)
        if stored is not None and tuple(stored["shape"]) != spec.shape:
            problems.append(f"parameter {path} has shape {tuple(stored['shape'])} instead of {spec.shape}")
    return problems


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
    if sharding_for is None:
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def sharding_for(path: str, spec: ParamSpec) -> jax.sharding.Sharding:
            return single

    restore_args = {
        name: ocp.ArrayRestoreArgs(
            restore_type=jax.Array,
            dtype=np.dtype(spec.dtype),
            sharding=sharding_for(name, spec),
            global_shape=spec.shape,
        )
        for name, spec in specs.items()
    }
    # Host memory is bounded by what may be in flight at once: a few GB, and never less than the largest leaf.
    largest = max(math.prod(spec.shape) * 4 for spec in specs.values())
    concurrent_gb = max(2, math.ceil(1.5 * largest / 1e9))
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


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what wrote a checkpoint, for its provenance."""
    from importlib import metadata

    found = {}
    for name in ("herald-jax", "jax", "orbax-checkpoint", "tensorstore", "numpy", "safetensors", "gguf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
