"""Directories and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from herald_jax.errors import CheckpointError
from herald_jax.manifest import MANIFEST


class AtomicDirectory:
    """Fill `work`, a hidden sibling of `path`; `publish` flushes it and renames it to `path`.

    Used as a context manager; leaving without `publish` (an exception, Ctrl-C) removes everything. What a killed
    process leaves is removed by the next one with the same `path`. One at a time: a lock, which the kernel drops when
    its owner dies, tells a running process from a dead one.

    Args:
      path: the directory to create.
      force: replace the checkpoint that is already there, once the new one is complete.
    Raises: CheckpointError if `path` cannot be the destination or another process is writing it; OSError.
    """

    def __init__(self, path: Path, *, force: bool = False):
        self.path = path.absolute()
        self._force = force
        self._work: Path | None = None
        self._lock: int | None = None

    @property
    def work(self) -> Path:
        if self._work is None:
            raise CheckpointError("the writer is not open; use it in a with statement, before commit")
        return self._work

    def __enter__(self) -> AtomicDirectory:
        _remove_leftovers(self.path)
        check_destination(self.path, force=self._force)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._work = Path(tempfile.mkdtemp(prefix=_work_prefix(self.path), dir=self.path.parent))
        self._work.chmod(0o755)  # mkdtemp's 0700 would stay on the published directory
        self._lock = os.open(self._work, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None
        self._release()

    def publish(self) -> None:
        """Flush every file and directory to the disk, then rename into place."""
        work = self.work
        _flush(work)
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
        self._work = None
        _fsync(self.path.parent)
        self._release()
        if replaced is not None:
            shutil.rmtree(replaced.parent, ignore_errors=True)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears at `path`, or replaces what is there, when it is written and on the disk.

    Of a link, the target is replaced; a file that is replaced keeps its permissions. An exception leaves `path` as it
    was, and so does a process that is killed.

    Raises: OSError, which names `path`; before anything is written where that is a directory or may not be written.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _naming(path, partial):
        _check_replaceable(path)
        partial.unlink(missing_ok=True)  # of a killed process that had the same number, as in a container
        try:
            with partial.open("x", encoding="utf-8") as out:
                with contextlib.suppress(OSError):  # nothing is there, or a file system without permissions
                    os.fchmod(out.fileno(), stat.S_IMODE(path.stat().st_mode))
                yield out
                out.flush()
                os.fsync(out.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """A device or a pipe, which cannot be replaced, opened for text. Raises: OSError, which names `path`."""
    with _naming(path, path), path.open("w", encoding="utf-8") as out:
        yield out


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def _naming(path: Path, written: Path) -> Iterator[None]:
    """An OSError names `path` instead of the file that is `written` for it, or of nothing, as a full disk's does."""
    try:
        yield
    except OSError as error:
        # The partial file's name says nothing to whoever gave the other.
        if error.filename == str(written) or (error.filename is None and error.errno in _NO_ROOM):
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
        raise


def _check_replaceable(path: Path) -> None:
    """Raises what opening `path` for writing would, which replacing it may not."""
    refused = None
    if path.is_dir():
        refused = errno.EISDIR
    elif path.is_symlink():  # though links were followed
        refused = errno.ELOOP
    elif path.exists() and not os.access(path, os.W_OK):
        refused = errno.EACCES
    if refused is not None:
        raise OSError(refused, os.strerror(refused), str(path))


def check_destination(path: Path, *, force: bool) -> None:
    """Raise CheckpointError unless a checkpoint may be written to `path`."""
    if not path.exists() and not path.is_symlink():
        ancestor = next(parent for parent in path.absolute().parents if parent.exists())
        if not ancestor.is_dir():
            raise CheckpointError(f"{path} cannot be created: {ancestor} is not a directory")
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
    # The whole name must be ours: "a" has no claim on what belongs to a destination called "a.partial-b".
    ours = re.compile(re.escape(_work_prefix(path)) + r"[a-z0-9_]{8}")
    entries = path.parent.iterdir() if path.parent.is_dir() else ()
    for entry in sorted(entry for entry in entries if ours.fullmatch(entry.name)):
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


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush(directory: Path) -> None:
    """fsync every file and directory below."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _fsync(Path(folder, name))
        _fsync(Path(folder))
