"""HERALD's selection on the CPU: every key's score, from keys read where they lie in host memory.

The scan runs on JAX's CPU backend from worker threads, beside the GPU's denoising. It reads the page-locked arrays
where they are, through NumPy views of their memory that the CPU backend takes without a copy. A scan is over before the
cache is appended to: the pipeline waits for its result in between.

The CPU multiplies and nothing else. Softmax, mean and top-k are left to the device, which has them done in the time
that exponentials alone would cost the CPU; the scores that cross PCIe for it are a 32nd of the keys at four queries per
head and head dim 128.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from herald_jax.errors import GenerationError

_F16_MAX = float(np.finfo(np.float16).max)


# One thread per call, and many calls at once: on 16 cores that reads keys a third faster than XLA's own threads do.
@functools.partial(jax.jit, compiler_options={"xla_cpu_multi_thread_eigen": False})
def scan(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scores `[N, R]` of one head's keys `k` `[N, D]` by its queries `q` `[R, D]`, over sqrt(D).

    In float32 for float32 keys, else in float16: finer than what bfloat16 keys can tell apart, and half the traffic.
    """
    precision = "highest" if q.dtype == jnp.float32 else None
    scores = jnp.einsum("nd,rd->nr", k, q, preferred_element_type=jnp.float32, precision=precision)
    scores = scores / q.shape[-1] ** 0.5
    if k.dtype == jnp.float32:
        return scores
    return jnp.clip(scores, -_F16_MAX, _F16_MAX).astype(jnp.float16)


@functools.partial(jax.jit, static_argnames="reduce")
def weigh(scores: tuple[jax.Array, ...], lengths: jax.Array, *, reduce: str) -> tuple[jax.Array, ...]:
    """Importance f32[B, K, N] of each layer from its scores `[B, K, N, R]` and i32[B] prefix lengths, on the device."""
    inside = lengths.reshape(-1, 1, 1, 1)
    return tuple(softmax_over_prefix(jnp.swapaxes(x, 2, 3).astype(jnp.float32), inside, reduce) for x in scores)


def softmax_over_prefix(scores: jax.Array, length: jax.Array, reduce: str) -> jax.Array:
    """Importance f32[..., N] from scores f32[..., R, N] and the prefix length, a scalar or of shape `[..., 1, 1]`."""
    inside = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,)) < length
    weights = jax.nn.softmax(jnp.where(inside, scores, jnp.finfo(jnp.float32).min), axis=-1)
    merged = jnp.max(weights, axis=-2) if reduce == "max" else jnp.mean(weights, axis=-2)
    return jnp.where(inside[..., 0, :], merged, 0.0)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Scores `[B, K, N, R]` of each scanned layer, on the device, and the seconds and bytes of K it took."""

    scores: tuple[jax.Array, ...]
    seconds: float
    nbytes: int


class Scanner:
    """A thread that scans, and as many that help it as there are cores.

    `submit` returns at once; an error in any of the threads comes out of the future's result.
    """

    def __init__(self) -> None:
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise GenerationError(
                f"selection on the CPU needs JAX's CPU backend beside the GPU's, which is not there ({error}); leave "
                "JAX_PLATFORMS unset or name both, as in JAX_PLATFORMS=cuda,cpu"
            ) from None
        self._stages: list[_Stage] = []
        self._threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._lead = concurrent.futures.ThreadPoolExecutor(1, "herald-scan")
        self._help = concurrent.futures.ThreadPoolExecutor(self._threads, "herald-scan-part")

    def submit(
        self, queries: jax.Array, keys: Sequence[jax.Array], lengths: jax.Array
    ) -> concurrent.futures.Future[Scanned]:
        """Scan `keys`, one `[1, B, K, N, D]` per layer, with `queries` `[L, B, K, R, D]`, up to i32[B] `lengths`."""
        return self._lead.submit(self._scan, queries, tuple(keys), lengths)

    def close(self) -> None:
        """Wait for what is running, drop what is not, end the threads."""
        self._lead.shutdown(wait=True, cancel_futures=True)
        self._help.shutdown(wait=True, cancel_futures=True)

    def _scan(self, queries: jax.Array, keys: tuple[jax.Array, ...], lengths: jax.Array) -> Scanned:
        rows, asked = _shards(lengths), _shards(queries)  # waits for the draft
        began = time.perf_counter()
        nbytes = 0
        layers: list[list[concurrent.futures.Future[None]]] = []
        for layer, k in enumerate(keys):
            stage = self._staging(layer, k, queries.shape[-2])
            parts = []
            for device, view in host_views(k).items():
                for row, head in np.ndindex(view.shape[1:3]):
                    reach = _reach(int(rows[device][row]), view.shape[3])
                    if reach:
                        part = (asked[device][layer, row, head], view[0, row, head, :reach])
                        out = stage.views[device][row, head, :reach]
                        parts.append(self._help.submit(self._part, *part, out))
                nbytes += int(rows[device].sum()) * view.shape[2] * view.shape[4] * view.itemsize
            layers.append(parts)
        scores = []
        for layer, parts in enumerate(layers):
            for done in parts:
                done.result()
            stage = self._stages[layer]
            scores.append(jax.device_put(stage.array, stage.target, may_alias=False))
        jax.block_until_ready(scores)  # the staging memory is written again by the next scan
        return Scanned(tuple(scores), time.perf_counter() - began, nbytes)

    def _staging(self, layer: int, k: jax.Array, queries: int) -> _Stage:
        """Where one layer's scores wait for their transfer, made once and kept."""
        if layer >= len(self._stages):
            self._stages.append(_Stage(k, queries))
        return self._stages[layer]

    def _part(self, q: np.ndarray, k: np.ndarray, out: np.ndarray) -> None:
        """One head's scores into `out`. Within a head entries are contiguous, so a row's length can cut them short."""
        put = functools.partial(jax.device_put, device=self._cpu)
        out[:] = scan(put(q), put(k))


def _reach(length: int, slots: int) -> int:
    """How many of a head's slots to scan for a prefix of `length`: in eighths, so that few programs serve them all."""
    grain = max(slots // 8, 128)
    return min(-(-length // grain) * grain, slots)


def _shards(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array on this process, by device, as NumPy arrays."""
    return {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}


def host_views(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array in host memory, by device, as writable NumPy arrays over the very same memory.

    By address, not by `np.asarray`: that view would be kept by the array, which then could never be donated again. The
    caller sees to it that nobody uses the views while a program changes the array, or the other way round.
    """
    views = {}
    jax.block_until_ready(x)
    for shard in x.addressable_shards:
        size = shard.data.nbytes
        pointer = ctypes.cast(shard.data.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint8))
        flat = np.ctypeslib.as_array(pointer, shape=(size,)) if size else np.empty((0,), np.uint8)
        views[shard.device] = flat.view(x.dtype).reshape(shard.data.shape)
    return views


class _Stage:
    """Host memory for the scores `[B, K, N, R]` of one layer whose keys are `k`, and where they go from there.

    On a GPU it is page-locked, because a transfer from pageable memory runs at a thirtieth of the speed (1.7 against 49
    GB/s, docs/herald.md). JAX's arrays cannot be written by NumPy, so this writes to the buffer's address: only here,
    only between transfers, and nothing ever computes on the array itself.

    Attributes:
      array: the staging memory as a JAX array, split over devices as `k` is.
      views: the same memory as writable NumPy arrays, by device.
      target: where `array` is sent.
    """

    def __init__(self, k: jax.Array, queries: int):
        _, batch, heads, slots, _ = k.shape
        dtype = np.float32 if k.dtype == jnp.float32 else np.float16
        self.target: Any
        if isinstance(k.sharding, NamedSharding):
            self.target = NamedSharding(k.sharding.mesh, P(*k.sharding.spec[1:4], None))
        else:
            self.target = SingleDeviceSharding(next(iter(k.sharding.device_set)))
        place = self.target.with_memory_kind(k.sharding.memory_kind)
        self.array = jax.device_put(np.zeros((batch, heads, slots, queries), dtype), place)
        self.views = host_views(self.array)
