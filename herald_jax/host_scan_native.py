"""The scan by code of our own, `host_scan.c`, which is compiled for the very machine when it is first wanted.

XLA's program for it (`host_scan.py`) reads keys at two thirds of what the host's memory delivers; this one is held up
by little else. It needs a C compiler. Without one, or for other keys than bfloat16, XLA scans.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

_SOURCE = Path(__file__).with_name("host_scan.c")
# `-march=native`: it is never run anywhere else. `-w`: compilers warn of vectors as arguments, where all is inlined.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-w")
_COMPILED_IN = 60  # seconds; it takes half a second
# Keys of one head that a thread takes at once: 1 MiB at head dim 128.
_CHUNK = 4096
# Numbers of a key that are multiplied together, and the most that a key may have (at most: LINE, MAX_DIM).
_STEP, _MAX_DIM = 32, 512

_TASK = np.dtype([(name, np.int64) for name in ("keys", "queries", "scores", "count", "layer")])  # `struct task`


class _Job(ctypes.Structure):
    """`struct job`."""

    _fields_ = [
        ("tasks", ctypes.c_void_p), ("tasks_count", ctypes.c_int64), ("next", ctypes.c_void_p),
        ("left", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dim", ctypes.c_int32), ("queries", ctypes.c_int32),
        ("scale", ctypes.c_float), ("done", ctypes.c_int32),
    ]  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | str:
    """The compiled code, or why there is none. Compiled once in a process, into a directory that is gone afterwards."""
    try:
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(compiler[0]) is None:
            return f"there is no C compiler {compiler[0]!r} (CC can name another)"
        with tempfile.TemporaryDirectory(prefix="herald-scan-") as directory:
            made = Path(directory) / "host_scan.so"
            command = [*compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
            ran = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMPILED_IN
            )
            if ran.returncode:
                said = next((line for line in ran.stderr.splitlines() if "error" in line), f"status {ran.returncode}")
                return f"{shlex.join(compiler)} did not compile {_SOURCE.name}: {said}"
            found = ctypes.CDLL(str(made))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{_SOURCE.name} could not be compiled and loaded: {error}"
    found.herald_scan.argtypes = [ctypes.POINTER(_Job)]
    return found


def why_not(dtype: str, dim: int) -> str | None:
    """Why this cannot scan keys of `dim` numbers with queries of the same type, on this machine; None if it can."""
    if dtype != "bfloat16":
        return f"keys are {dtype}, not bfloat16"
    if dim % _STEP or dim > _MAX_DIM:
        return f"head dim {dim} is not a multiple of {_STEP} up to {_MAX_DIM}"
    found = library()
    return found if isinstance(found, str) else None


class NativeScan:
    """Threads, one for each core, that take pieces of the keys until none is left.

    Python has no part in it while they do: each makes one call for a whole scan, without Python's lock, and tells by a
    pipe which layers are done. For keys of which `why_not` has nothing to say.
    """

    def __init__(self) -> None:
        found = library()
        assert not isinstance(found, str), found
        self._library = found
        self._count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = concurrent.futures.ThreadPoolExecutor(self._count, "herald-scan-native")

    def close(self) -> None:
        """End the threads; none of them works."""
        self._threads.shutdown(wait=True)

    def places(self, keys: Sequence[jax.Array]) -> list[dict[Any, int]]:
        """Where each layer's keys `[1, B, K, N, D]` begin, by device. There they stay until something is appended."""
        jax.block_until_ready(list(keys))
        return [{shard.device: shard.data.unsafe_buffer_pointer() for shard in k.addressable_shards} for k in keys]

    def scan(
        self,
        places: list[dict[Any, int]],
        queries: dict[Any, np.ndarray],
        lengths: dict[Any, np.ndarray],
        scores: list[dict[Any, np.ndarray]],
    ) -> Generator[int, None, None]:
        """Yield each layer's number when all its scores are in place.

        Args:
          places: where the keys are.
          queries: `[L, B, K, R, D]` by device, bfloat16.
          lengths: i32[B] by device.
          scores: of each layer, by device, the memory `[B, K, R, N]` that they are to be put into.
        """
        asked = {device: np.ascontiguousarray(q) for device, q in queries.items()}
        assert all(q.dtype.name == "bfloat16" for q in asked.values())  # as keys are (`offload.draft`)
        parts = [_tasks(places, asked[device], lengths[device], scores, device) for device in asked]
        tasks = np.concatenate(parts, axis=1)
        left = np.full(len(places), tasks.shape[1], np.int64)
        if not tasks.size:
            yield from range(len(places))
            return
        dim, some = next(iter(asked.values())).shape[-1], next(iter(scores[0].values()))
        following = np.zeros(1, np.int64)
        done, tell = os.pipe()
        job = _Job(
            tasks.ctypes.data, tasks.size, following.ctypes.data, left.ctypes.data, some.shape[-1], dim, some.shape[-2],
            dim**-0.5, tell,
        )  # fmt: skip
        try:
            running: list[concurrent.futures.Future[int]] = []
            try:
                for _ in range(self._count):
                    running.append(self._threads.submit(self._library.herald_scan, ctypes.byref(job)))
                for _ in places:
                    yield struct.unpack("i", os.read(done, 4))[0]
            finally:
                following[:] = tasks.size  # whoever stopped listening: nothing more is begun
                concurrent.futures.wait(running)
        finally:
            os.close(done)
            os.close(tell)


def _tasks(
    places: list[dict[Any, int]], q: np.ndarray, lengths: np.ndarray, scores: list[dict[Any, np.ndarray]], device: Any
) -> np.ndarray:
    """One device's part of a scan in pieces, `_TASK[L, pieces of a layer]`."""
    _, _, heads, queries, dim = q.shape
    slots = scores[0][device].shape[-1]
    rows = np.repeat(np.arange(len(lengths)), -(-lengths // _CHUNK))
    starts = np.concatenate([np.arange(0, n, _CHUNK, dtype=np.int64) for n in lengths.tolist()])
    # Row, head and key: a head's keys lie one behind the other.
    pairs = rows[:, None] * heads + np.arange(heads)
    tasks = np.empty((len(places), pairs.size), _TASK)
    tasks["keys"] = ((pairs * slots + starts[:, None]) * dim * 2).reshape(-1)
    tasks["queries"] = (pairs * queries * dim * 2).reshape(-1)
    tasks["scores"] = ((pairs * queries * slots + starts[:, None]) * 2).reshape(-1)
    tasks["count"] = np.repeat(np.minimum(lengths[rows] - starts, _CHUNK), heads)
    layers = np.arange(len(places), dtype=np.int64)[:, None]
    tasks["layer"] = layers
    tasks["keys"] += np.array([place[device] for place in places])[:, None]
    tasks["queries"] += q.ctypes.data + layers * (q.nbytes // len(q))
    tasks["scores"] += np.array([view[device].ctypes.data for view in scores])[:, None]
    return tasks
