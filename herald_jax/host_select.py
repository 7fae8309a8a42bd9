"""HERALD's selection on the CPU: every key's score, from keys read where they lie in host memory.

The scan runs beside the GPU's denoising, on all cores: by code compiled for them (`host_scan_native.py`), or by JAX's
CPU backend (`host_scan_xla.py`). Either reads the page-locked arrays where they are. A scan is over before the cache is
appended to: the pipeline waits for its result in between.

The CPU multiplies and nothing else. Softmax, mean and top-k are left to the device, which has them done in the time
that exponentials alone would cost the CPU; the scores that cross PCIe for it are a 32nd of the keys at four queries per
head and head dim 128.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from herald_jax import host_scan_native
from herald_jax.errors import GenerationError
from herald_jax.host_scan_native import NativeScan
from herald_jax.host_scan_xla import XlaScan
from herald_jax.host_scores import Scan, Sent, Stage

# Transfers of a scan's scores to the device, unless it has more parts. They wait for what the device does before them,
# and with one for each of 36 layers `cuLaunchHostFunc`, which XLA calls with each, waited too: in the driver and with
# its lock, so that no program could be launched until the device had come to them (docs/herald.md).
_TRANSFERS = 6


class Scanner:
    """A thread that has the keys scanned and sends their scores to the device.

    `submit` returns at once; an error in any of the threads comes out of the parts' results. What is to be done with
    scores can be launched when they are there, behind whatever the device still does. The next scan begins at once.

    Attributes:
      by: who scanned last, and why, if it was not the native code and could have been; "" before the first scan.
    """

    def __init__(self, how: Literal["auto", "native", "xla"] = "auto") -> None:
        self._how = how
        self.by = ""
        self._stages: list[Stage] = []
        self._native: NativeScan | None = None
        self._xla: XlaScan | None = None
        self._lead = concurrent.futures.ThreadPoolExecutor(1, "herald-scan")
        self._watch = concurrent.futures.ThreadPoolExecutor(1, "herald-scan-sent")

    def prepare(self, dtype: str, dim: int) -> None:
        """Compile what the first scan, of keys of `dim` numbers, would wait for, in the background.

        Raises: GenerationError if it is to be native and cannot be.
        """
        if self._how == "native":
            _check_native(dtype, dim)
        elif self._how == "auto":
            self._lead.submit(host_scan_native.why_not, dtype, dim)

    def submit(self, queries: jax.Array, keys: Sequence[jax.Array], lengths: jax.Array, *, parts: int = 1) -> Scan:
        """Scan `keys`, one `[1, B, K, N, D]` per layer, with `queries` `[L, B, K, R, D]`, up to i32[B] `lengths`.

        The layers come in so many equal `parts`.
        """
        scan = Scan(concurrent.futures.Future(), tuple(concurrent.futures.Future() for _ in range(parts)))
        leading = self._lead.submit(self._scan, scan, queries, tuple(keys), lengths)
        leading.add_done_callback(functools.partial(_end, scan))
        return scan

    def close(self) -> None:
        """Wait for what is running, drop what is not, end the threads. Further calls do nothing."""
        for threads in (self._lead, self._watch):
            threads.shutdown(wait=True, cancel_futures=True)
        for scanning in (self._native, self._xla):
            if scanning is not None:
                scanning.close()

    def _scan(self, scan: Scan, queries: jax.Array, keys: tuple[jax.Array, ...], lengths: jax.Array) -> None:
        scanning = self._chosen(keys[0])
        size = len(keys) // len(scan.parts)
        together = -(-size // max(_TRANSFERS // len(scan.parts), 1))
        stages = [
            [
                self._staging(keys[0], queries.shape[-2], min(together, part + size - first))
                for first in range(part, part + size, together)
            ]
            for part in range(0, len(keys), size)
        ]
        places: Any = scanning.places(keys)
        asked, rows = _shards(queries), _shards(lengths)  # waits for the draft
        sent = Sent(scan, stages)
        for layer, k in enumerate(keys):
            for shard in k.addressable_shards:
                _, _, heads, _, dim = shard.data.shape
                sent.nbytes[layer] += int(rows[shard.device].sum()) * heads * dim * k.dtype.itemsize
        views = [sent.views(layer) for layer in range(len(keys))]
        done = scanning.scan(places, asked, rows, views)
        with contextlib.closing(done):
            for layer in done:
                for some, scores in sent.done(layer):
                    self._watch.submit(_free, some, scores)

    def _chosen(self, k: jax.Array) -> NativeScan | XlaScan:
        """Who scans keys like `k`."""
        dtype, dim = k.dtype.name, k.shape[-1]
        if self._how == "native":
            _check_native(dtype, dim)
        why = "" if self._how == "xla" else host_scan_native.why_not(dtype, dim)
        if why is None:
            self._native = self._native or NativeScan()
            self.by = "native code"
            return self._native
        self._xla = self._xla or XlaScan()
        self.by = f"XLA: {why}" if why else "XLA"
        return self._xla

    def _staging(self, k: jax.Array, queries: int, layers: int) -> Stage:
        """Where some layers' scores wait for their transfer. Made once and used again when that is over."""
        like = k.shape, k.dtype, k.sharding, queries, layers
        stage = next((stage for stage in self._stages if stage.like == like and not stage.busy), None)
        if stage is None:
            stage = Stage(k, queries, layers)
            self._stages.append(stage)
        stage.busy = True
        return stage


def _check_native(dtype: str, dim: int) -> None:
    """Raises GenerationError if native code cannot scan such keys, which it was asked to."""
    why = host_scan_native.why_not(dtype, dim)
    if why is not None:
        raise GenerationError(f'scan is "native", but {why}; choose "auto" or "xla", or mend that')


def _end(scan: Scan, leading: concurrent.futures.Future[None]) -> None:
    """Nobody is to wait for what a scan that has ended did not come to."""
    error = concurrent.futures.CancelledError() if leading.cancelled() else leading.exception()
    for part in scan.parts:
        if not part.done():
            part.set_exception(error)
    if not scan.nearly.done():
        scan.nearly.set_result(None)


def _shards(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array on this process, by device, as NumPy arrays."""
    return {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}


def _free(stages: list[Stage], scores: tuple[jax.Array, ...]) -> None:
    """Wait until the `scores` have left the `stages`, which can be written to again then."""
    jax.block_until_ready(scores)
    for stage in stages:
        stage.busy = False
