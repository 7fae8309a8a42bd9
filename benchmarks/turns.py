"""Several processes of a benchmark on one card: they compile at the same time and measure one after the other.

A model's program takes half a minute to compile, most of it Python that holds the interpreter's lock, so the cases of a
benchmark compile in processes of their own. A file's lock keeps them out of each other's way: who compiles shares it
(XLA tries candidates on the GPU meanwhile), who measures has it alone. The first to measure waits for all that compile.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp


class Turns:
    """The lock of one process, which measures last of all. Without a file nothing is waited for."""

    def __init__(self, path: Path | None):
        self._path = path
        self._turn: IO[str] | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Others may compile too; nobody measures."""
        if self._path is None or self._turn is not None:
            yield
            return
        with self._path.open("a") as file:  # closing it ends the lock
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def begin_measuring(self, nbytes: float = 0) -> None:
        """Waits until this process alone may use the GPU, which it then has until it ends: JAX keeps memory it took.

        nbytes: what it will hold. JAX takes that much in one piece. Growing as arrays are made, it would take a power
        of two for each of the large ones: 64 GiB for a K of 45, and then no room was left on the card for V.
        """
        if self._path is not None and self._turn is None:
            self._turn = self._path.open("a")
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            mebibytes = int(nbytes / 2**20)
            jax.block_until_ready(jnp.zeros((mebibytes, 2**20), jnp.uint8))  # freed at once, but kept by JAX


def run_side_by_side(
    module: str, arguments: Sequence[Sequence[str]], save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Runs `python -m module ARGUMENTS --turns FILE --out FOLDER` for each of `arguments`, all at once.

    `save` gets all rows so far whenever a process has ended, well or not. Returns all rows; raises SystemExit if a
    process failed, after all have ended.
    """
    # What a process holds while it waits for its turn has to be little.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    rows: dict[int, list[dict[str, Any]]] = {}
    failed, lock = [], threading.Lock()

    def wait(index: int, process: subprocess.Popen, folder: Path) -> None:
        code = process.wait()
        with lock:
            if code:
                failed.append(f"{' '.join(arguments[index])}: exit code {code}")
            for path in folder.glob("*.json"):
                rows[index] = json.loads(path.read_text())["rows"]
            save([row for i in sorted(rows) for row in rows[i]])

    with tempfile.TemporaryDirectory() as name:
        threads, processes = [], []
        try:
            for index, one in enumerate(arguments):
                folder = Path(name) / str(index)
                folder.mkdir()
                command = [sys.executable, "-m", module, *one, "--turns", f"{name}/lock", "--out", str(folder)]
                processes.append(subprocess.Popen(command, env=environment))
                threads.append(threading.Thread(target=wait, args=(index, processes[-1], folder)))
                threads[-1].start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                process.kill()
    if failed:
        raise SystemExit("error: " + "; ".join(failed))
    return [row for i in sorted(rows) for row in rows[i]]
