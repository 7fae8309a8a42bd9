"""HERALD's selection on the CPU: importances of all prefix entries, from keys read where they lie in host memory.

The scan runs on JAX's CPU backend from one worker thread, beside the GPU's denoising. NumPy's view of a page-locked
array is zero-copy, and so is handing that view to the CPU backend: K is never copied. The views are dropped before the
result is handed over, because the cache cannot be appended to (donated) while one is alive.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.errors import GenerationError


@functools.partial(jax.jit, static_argnames="reduce")
def scan(q: jax.Array, k: jax.Array, length: jax.Array, *, reduce: str) -> jax.Array:
    """Importance f32[K, N] of a row's prefix entries: softmax over the prefix per query, then mean or max over queries.

    Args:
      q: `[K, R, D]`, R queries per KV head. k: `[K, N, D]`. length: i32 scalar, entries of the prefix.

    Keys come first in the product, and the transpose is kept apart from it: on the CPU backend that reads bfloat16 keys
    at twice the speed of the other order, and leaves softmax a contiguous axis (docs/herald.md).
    """
    scores = jnp.einsum("knd,krd->knr", k, q, preferred_element_type=jnp.float32, precision=_precision(q))
    scores = jax.lax.optimization_barrier(scores)
    scores = jnp.stack([scores[..., r] for r in range(q.shape[1])], axis=1)
    scores = jax.lax.optimization_barrier(scores) / q.shape[-1] ** 0.5
    return softmax_over_prefix(scores, length, reduce)


def softmax_over_prefix(scores: jax.Array, length: jax.Array, reduce: str) -> jax.Array:
    """Importance f32[..., N] from scores f32[..., R, N] and the prefix length, a scalar or of shape `[..., 1, 1]`."""
    inside = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,)) < length
    weights = jax.nn.softmax(jnp.where(inside, scores, jnp.finfo(jnp.float32).min), axis=-1)
    merged = jnp.max(weights, axis=-2) if reduce == "max" else jnp.mean(weights, axis=-2)
    return jnp.where(inside[..., 0, :], merged, 0.0)


def _precision(q: jax.Array) -> Any:
    return "highest" if q.dtype == jnp.float32 else None


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Importances f32[B, K, N] of each scanned layer, on the device, and the seconds and bytes of K it took."""

    importance: tuple[jax.Array, ...]
    seconds: float
    nbytes: int


class Scanner:
    """One worker thread that scans. `submit` returns at once; errors in the thread come out of the future's result."""

    def __init__(self, reduce: str):
        self._reduce = reduce
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise GenerationError(
                f"selection on the CPU needs JAX's CPU backend beside the GPU's, which is not there ({error}); leave "
                "JAX_PLATFORMS unset or name both, as in JAX_PLATFORMS=cuda,cpu"
            ) from None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="herald-scan")

    def submit(
        self, queries: jax.Array, keys: Sequence[jax.Array], lengths: jax.Array
    ) -> concurrent.futures.Future[Scanned]:
        """Scan `keys` (one `[1, B, K, N, D]` per layer) with `queries` `[L, B, K, R, D]` for rows of i32[B] `lengths`."""
        return self._pool.submit(self._scan, queries, tuple(keys), lengths)

    def close(self) -> None:
        """Wait for what is running, drop what is not, end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _scan(self, queries: jax.Array, keys: tuple[jax.Array, ...], lengths: jax.Array) -> Scanned:
        if not keys:
            return Scanned((), 0.0, 0)
        rows, asked = _shards(lengths), _shards(queries)  # waits for the draft
        began = time.perf_counter()
        # Everything is started before anything is waited for, so that the cores never idle between layers.
        started: list[dict[Any, list[_Part]]] = []
        nbytes = 0
        for layer, k in enumerate(keys):
            parts = {}
            for device, view in _shards(k).items():
                here = [self._row(asked[device][layer, b], view, b, int(n)) for b, n in enumerate(rows[device])]
                parts[device] = [part for row in here for part in row]
                nbytes += int(rows[device].sum()) * view.shape[2] * view.shape[4] * view.itemsize
                del view
            started.append(parts)
        importance = []
        for k in keys:
            done = started.pop(0)
            shards = []
            for shard in k.addressable_shards:
                out = np.zeros(shard.data.shape[1:4], np.float32)
                for part in done[shard.device]:
                    out[part.row, part.heads, : part.value.shape[-1]] = part.value
                shards.append(jax.device_put(out, shard.device))
            del done, part
            importance.append(_assemble(k, shards))
        return Scanned(tuple(importance), time.perf_counter() - began, nbytes)

    def _row(self, q: np.ndarray, view: np.ndarray, row: int, length: int) -> list[_Part]:
        """One row's scan, started and not waited for.

        A row much shorter than the cache is scanned head by head, since only within a head are its entries contiguous;
        a slice across heads would be copied.
        """
        heads, slots = view.shape[2:4]
        grain = max(slots // 8, 128)
        reach = min(-(-length // grain) * grain, slots)
        put = functools.partial(jax.device_put, device=self._cpu)
        if length == 0:
            return []
        if reach == slots:
            value = scan(put(q), put(view[0, row]), put(np.int32(length)), reduce=self._reduce)
            return [_Part(row, slice(0, heads), value)]
        return [
            _Part(
                row,
                slice(h, h + 1),
                scan(
                    put(q[h : h + 1]), put(view[0, row, h : h + 1, :reach]), put(np.int32(length)), reduce=self._reduce
                ),
            )
            for h in range(heads)
        ]


class _Part(NamedTuple):
    """Importance f32[heads, n] of one row's first n entries."""

    row: int
    heads: slice
    value: jax.Array


def _shards(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array on this process, by device, as NumPy views (no copy for host memory)."""
    return {shard.device: np.asarray(shard.data) for shard in x.addressable_shards}


def _assemble(k: jax.Array, shards: list[jax.Array]) -> jax.Array:
    """The importance `[B, K, N]` of one layer from its parts, placed as that layer's keys are, on the device."""
    _, batch, heads, slots, _ = k.shape
    if len(shards) == 1:
        return shards[0]
    spec = jax.sharding.PartitionSpec(*k.sharding.spec[1:4])
    sharding = jax.sharding.NamedSharding(k.sharding.mesh, spec)
    return jax.make_array_from_single_device_arrays((batch, heads, slots), sharding, shards)
