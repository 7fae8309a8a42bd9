"""The scores of HERALD's scan, on their way from host memory to the device, and what becomes of them there.

Several layers' scores share one piece of page-locked memory and one transfer (`Stage`). Parts of a scan are handed out
one after the other, as soon as their scores have been sent (`Sent`).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import page_sums
from pallas_kernels.index_scores import softmax_over_prefix

# Share of the layers whose scores are on their way when a scan is nearly over.
_NEARLY = 0.8


@functools.partial(jax.jit, static_argnames=("reduce", "page"))
def weigh(scores: tuple[jax.Array, ...], lengths: jax.Array, *, reduce: str, page: int = 1) -> tuple[jax.Array, ...]:
    """Importance of each layer from scores `[layers, B, K, R, N]` and i32[B] prefix lengths, on the device.

    f32[B, K, ceil(N / page)]: a page's entries share a number, the sum of theirs.
    """
    inside = lengths.reshape(-1, 1, 1, 1)
    layers = [some[i] for some in scores for i in range(len(some))]
    found = tuple(softmax_over_prefix(x.astype(jnp.float32), inside, reduce) for x in layers)
    return found if page == 1 else tuple(page_sums(x, page, lengths) for x in found)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Scores of a part's layers on their way to the device, and the bytes of K read for them.

    `scores`: in each array some layers', `[layers, B, K, R, N]`.

    `seconds` are from the queries' arrival, or the part before, until all scores are in host memory. They may be on the
    device much later: a transfer waits for the programs that had been launched when it was asked for.
    """

    scores: tuple[jax.Array, ...]
    seconds: float
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan that has been asked for.

    Attributes:
      nearly: is over when most of the scores have been sent to the device, or the scan has ended, whatever its end.
      parts: what comes of each part of its layers, one after the other, or the error that ended the scan.
    """

    nearly: concurrent.futures.Future[None]
    parts: tuple[concurrent.futures.Future[Scanned], ...]


class Sent:
    """The scores of one scan that are on their way to the device, several layers' at once.

    `stages` are those of each part, where its layers' scores are put before they leave. All parts have as many layers.

    Attributes:
      nbytes: of K, for each layer.
    """

    def __init__(self, scan: Scan, stages: list[list[Stage]]) -> None:
        self._scan, self._stages = scan, stages
        self._where = [(stage, i) for part in stages for stage in part for i in range(stage.layers)]
        self._scores: dict[Stage, jax.Array] = {}
        self._missing = {stage: stage.layers for part in stages for stage in part}
        self.nbytes = [0] * len(self._where)
        self._delivered = 0
        self._since = time.perf_counter()

    def views(self, layer: int) -> dict[Any, np.ndarray]:
        """Where a layer's scores `[B, K, R, N]` are to be put, by device."""
        stage, i = self._where[layer]
        return {device: view[i] for device, view in stage.views.items()}

    def done(self, layer: int) -> Iterator[tuple[list[Stage], tuple[jax.Array, ...]]]:
        """One layer's are in place. Yields the stages and scores of each part that is handed out now."""
        stage, _ = self._where[layer]
        self._missing[stage] -= 1
        if self._missing[stage]:
            return
        self._scores[stage] = stage.send()
        sent = sum(stage.layers for stage in self._scores)
        if sent >= _NEARLY * len(self._where) and not self._scan.nearly.done():
            self._scan.nearly.set_result(None)
        size = len(self._where) // len(self._stages)
        for part in self._stages[self._delivered :]:
            if any(stage not in self._scores for stage in part):
                return
            scores, first = tuple(self._scores[stage] for stage in part), self._delivered * size
            now, nbytes = time.perf_counter(), sum(self.nbytes[first : first + size])
            self._scan.parts[self._delivered].set_result(Scanned(scores, now - self._since, nbytes))
            self._delivered, self._since = self._delivered + 1, now
            yield part, scores


def host_views(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array in host memory, by device, as writable NumPy arrays over the very same memory.

    By address, not by `np.asarray`: that view would be kept by the array, which then could never be donated again. The
    caller sees to it that nobody uses the views while a program changes the array, or the other way round.
    """
    jax.block_until_ready(x)
    return {shard.device: host_view(shard.data) for shard in x.addressable_shards}


def host_view(x: jax.Array) -> np.ndarray:
    """The memory of an array on one device, which has to be ready."""
    pointer = ctypes.cast(x.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint8))
    flat = np.ctypeslib.as_array(pointer, shape=(x.nbytes,)) if x.nbytes else np.empty((0,), np.uint8)
    return flat.view(x.dtype).reshape(x.shape)


def score_bytes(queries: jax.Array, keys: Sequence[jax.Array]) -> int:
    """Bytes of the scores that a scan of `keys` with `queries` sends to the device, as `Scanner.submit` takes them."""
    return sum(k.size // k.shape[-1] * queries.shape[-2] * _score_dtype(k).itemsize for k in keys)


def _score_dtype(k: jax.Array) -> np.dtype[Any]:
    return np.dtype(np.float32 if k.dtype == jnp.float32 else np.float16)


class Stage:
    """Host memory for the scores `[layers, B, K, R, N]` of layers with keys like `k`, and where they go from there.

    On a GPU it is page-locked, because a transfer from pageable memory runs at a thirtieth of the speed (1.7 against 49
    GB/s, docs/herald.md). JAX's arrays cannot be written by NumPy, so this writes to the buffer's address: only here,
    only between transfers, and nothing ever computes on the array itself.

    Attributes:
      like: of what keys and how many queries and layers it holds the scores.
      layers: how many.
      busy: whether scores are being put here or sent from here.
      views: the memory as writable NumPy arrays, by device.
    """

    def __init__(self, k: jax.Array, queries: int, layers: int):
        self.like = k.shape, k.dtype, k.sharding, queries, layers
        self.layers = layers
        self.busy = False
        _, batch, heads, slots, _ = k.shape
        self._target: Any
        if isinstance(k.sharding, NamedSharding):
            spec = (*k.sharding.spec, *(None,) * 5)[:5]
            self._target = NamedSharding(k.sharding.mesh, P(None, *spec[1:3], None, spec[3]))
        else:
            self._target = SingleDeviceSharding(next(iter(k.sharding.device_set)))
        place = self._target.with_memory_kind(k.sharding.memory_kind)
        self._array = jax.device_put(np.zeros((layers, batch, heads, queries, slots), _score_dtype(k)), place)
        self.views = host_views(self._array)

    def send(self) -> jax.Array:
        """The scores on their way to the device."""
        return jax.device_put(self._array, self._target, may_alias=False)
