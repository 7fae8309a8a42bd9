"""HERALD's selection on the CPU: every key's score, from keys read where they lie in host memory.

The scan runs on JAX's CPU backend, beside the GPU's denoising. It reads the page-locked arrays where they are, through
NumPy views of their memory that the CPU backend takes without a copy. A scan is over before the cache is appended to:
the pipeline waits for its result in between.

The CPU multiplies and nothing else. Softmax, mean and top-k are left to the device, which has them done in the time
that exponentials alone would cost the CPU; the scores that cross PCIe for it are a 32nd of the keys at four queries per
head and head dim 128.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from herald_jax import host_threads
from herald_jax.errors import GenerationError

_F16_MAX = float(np.finfo(np.float16).max)

# How XLA is to compile a scan.
_COMPILED = host_threads.ONE_THREAD | {
    "xla_cpu_enable_fast_math": True,  # sums may be reordered, without which no reduction is vectorised; NaN is kept
    "xla_cpu_prefer_vector_width": 512,
}
# More queries than these per head are left to XLA's matrix product: their sums would not fit the vector registers.
_STREAMED_QUERIES = 8
# Keys that each stream reads before the scores are stored. Its scores in float32 take an odd number of cache lines, so
# that those of all streams and queries never compete for the same places of the first-level cache.
_TURN = 272
# Bytes of keys that one call scans at least, if there are heads enough: a call holds Python's lock for some 50 us.
_CALL = 16 * 2**20
# Calls in XLA's queue for each thread at most: more would keep their scores in memory for nothing.
_AHEAD = 4


@functools.partial(jax.jit, static_argnames="reach", compiler_options=_COMPILED)
def scan(q: jax.Array, k: jax.Array, *, reach: int) -> jax.Array:
    """Scores `[H, R, reach]` of the first `reach` keys of H heads by their queries, over sqrt(D), on one thread.

    Args:
      q: queries `[H, R, D]`.
      k: keys `[H, N, D]`, or u32`[H, N, D / 2]`: the same memory of bfloat16 keys seen two by two, which is read
        faster and never copied.
      reach: how many keys to score, at most N.

    Returns:
      float32 for float32 keys, else float16: finer than what bfloat16 keys can tell apart, and half the traffic. Beyond
      float16's range scores stay at its end; NaN stays NaN.
    """
    if k.dtype == jnp.uint32:
        return _scan_pairs(q, k, reach)
    precision = "highest" if k.dtype == jnp.float32 else None
    scores = jnp.einsum("hnd,hrd->hrn", k[:, :reach], q, preferred_element_type=jnp.float32, precision=precision)
    scores = scores / q.shape[-1] ** 0.5
    return scores if k.dtype == jnp.float32 else _to_f16(scores)


def _scan_pairs(q: jax.Array, k: jax.Array, reach: int) -> jax.Array:
    """Scores f16`[H, R, reach]` of keys u32`[H, N, D / 2]`, at the rate at which a core reads memory.

    XLA's matrix product is fast enough in cache, but waits for memory at every page of it: nothing is asked for ahead.
    So the keys are read as several streams at once, from as many places: what one waits for, the processor fetches
    while it multiplies for the others. One reduction with an operand for each query and stream reads every key once;
    LLVM turns it into a loop whose sums stay in registers.
    """
    heads, queries, dim = q.shape
    streams = math.gcd(reach, _streams(queries))
    share = reach // streams
    turn = min(_TURN, share)
    turns = -(-share // turn)  # for each head
    scaled = q.astype(jnp.float32) / dim**0.5
    # Behind a barrier, or every turn of the loop would convert them again.
    low, high = jax.lax.optimization_barrier((scaled[..., 0::2], scaled[..., 1::2]))

    def step(i: jax.Array, scores: jax.Array) -> jax.Array:
        head = jax.lax.div(i, turns)
        first = jnp.minimum(jax.lax.rem(i, turns) * turn, share - turn)  # the last turn scores some keys again
        products = []
        for stream, query in itertools.product(range(streams), range(queries)):
            at = (head, stream * share + first, 0)
            pairs = jax.lax.dynamic_slice(k, at, (1, turn, dim // 2))[0]
            # The upper half of a float32 is a bfloat16: a pair's second is there already, its first goes there.
            even = jax.lax.bitcast_convert_type(pairs << 16, jnp.float32)
            odd = jax.lax.bitcast_convert_type(pairs & jnp.uint32(0xFFFF0000), jnp.float32)
            of_even, of_odd = (jax.lax.dynamic_slice(x, (head, query, 0), (1, 1, dim // 2))[0] for x in (low, high))
            products.append(even * of_even + odd * of_odd)
        zeros = (jnp.float32(0),) * len(products)
        sums = jax.lax.reduce(tuple(products), zeros, _add_each, (1,))
        # Joined first, then converted: in one loop, its choice of what to join is made for every single element.
        ordered = [sums[stream * queries + query] for query in range(queries) for stream in range(streams)]
        joined = jax.lax.optimization_barrier(jnp.concatenate(jax.lax.optimization_barrier(ordered)))
        piece = _to_f16(joined).reshape(1, queries, streams, turn)
        return jax.lax.dynamic_update_slice(scores, piece, (head, 0, 0, first))

    scores = jnp.zeros((heads, queries, streams, share), jnp.float16)
    return jax.lax.fori_loop(0, heads * turns, step, scores).reshape(heads, queries, reach)


def _streams(queries: int) -> int:
    """How many places to read from at once: as many as the sums of all queries fit the registers with."""
    if queries <= 2:
        return 8
    return 4 if queries <= 5 else 2


def _add_each(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _to_f16(scores: jax.Array) -> jax.Array:
    return jnp.clip(scores, -_F16_MAX, _F16_MAX).astype(jnp.float16)


@functools.partial(jax.jit, static_argnames="reduce")
def weigh(scores: tuple[jax.Array, ...], lengths: jax.Array, *, reduce: str) -> tuple[jax.Array, ...]:
    """Importance f32[B, K, N] of each layer from its scores `[B, K, R, N]` and i32[B] prefix lengths, on the device."""
    inside = lengths.reshape(-1, 1, 1, 1)
    return tuple(softmax_over_prefix(x.astype(jnp.float32), inside, reduce) for x in scores)


def softmax_over_prefix(scores: jax.Array, length: jax.Array, reduce: str) -> jax.Array:
    """Importance f32[..., N] from scores f32[..., R, N] and the prefix length, a scalar or of shape `[..., 1, 1]`."""
    inside = jnp.arange(scores.shape[-1]).reshape((1,) * (scores.ndim - 1) + (-1,)) < length
    weights = jax.nn.softmax(jnp.where(inside, scores, jnp.finfo(jnp.float32).min), axis=-1)
    merged = jnp.max(weights, axis=-2) if reduce == "max" else jnp.mean(weights, axis=-2)
    return jnp.where(inside[..., 0, :], merged, 0.0)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Scores `[B, K, R, N]` of each scanned layer, on the device, and the seconds and bytes of K it took."""

    scores: tuple[jax.Array, ...]
    seconds: float
    nbytes: int


class _Hand:
    """A thread that calls the scan of its share, and how many results of it may wait to be collected.

    Its own number, not one for all: the scores are collected in order, and those that come first must not wait for room
    that other threads' later ones have taken.
    """

    def __init__(self, number: int) -> None:
        self.thread = concurrent.futures.ThreadPoolExecutor(1, f"herald-scan-part-{number}")
        self.room = threading.BoundedSemaphore(_AHEAD)


_Part = tuple[_Hand, "concurrent.futures.Future[jax.Array]", np.ndarray]  # who scans, the scores, and their place


class Scanner:
    """A thread that deals out the scan, one for each core that hands its share to JAX's CPU backend, and one that
    collects the scores.

    XLA computes on threads of its own, whoever calls it, and what one thread calls, one after the other. So every
    core's share has a thread that calls, and none of them waits for what it called: waking up, they would take turns at
    Python's lock. Where there are cores enough, XLA's threads leave some of them to the thread that launches the GPU's
    work and to these (`host_threads.py`).

    `submit` returns at once; an error in any of the threads comes out of the future's result.
    """

    def __init__(self, *, beside_gpu: bool = False) -> None:
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise GenerationError(
                f"selection on the CPU needs JAX's CPU backend beside the GPU's, which is not there ({error}); leave "
                "JAX_PLATFORMS unset or name both, as in JAX_PLATFORMS=cuda,cpu"
            ) from None
        self._stages: list[_Stage] = []
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._holds = beside_gpu and host_threads.hold(self._cpu)
        if self._holds:
            cores -= host_threads.RESERVED
        self._lead = concurrent.futures.ThreadPoolExecutor(1, "herald-scan")
        self._hands = [_Hand(i) for i in range(cores)]
        self._collect = concurrent.futures.ThreadPoolExecutor(1, "herald-scan-scores")

    def submit(
        self, queries: jax.Array, keys: Sequence[jax.Array], lengths: jax.Array
    ) -> concurrent.futures.Future[Scanned]:
        """Scan `keys`, one `[1, B, K, N, D]` per layer, with `queries` `[L, B, K, R, D]`, up to i32[B] `lengths`."""
        return self._lead.submit(self._scan, queries, tuple(keys), lengths)

    def close(self) -> None:
        """Wait for what is running, drop what is not, end the threads. Further calls do nothing."""
        for threads in (self._lead, *(hand.thread for hand in self._hands), self._collect):
            threads.shutdown(wait=True, cancel_futures=True)
        if self._holds:
            host_threads.release(self._cpu)
            self._holds = False

    def _scan(self, queries: jax.Array, keys: tuple[jax.Array, ...], lengths: jax.Array) -> Scanned:
        asked, rows = _shards(queries), _shards(lengths)  # waits for the draft
        began = time.perf_counter()
        nbytes = 0
        sent: list[concurrent.futures.Future[jax.Array]] = []
        hands = itertools.cycle(self._hands)
        places = [(self._staging(layer, k, queries.shape[-2]), host_views(k)) for layer, k in enumerate(keys)]
        try:
            for layer, (stage, views) in enumerate(places):
                parts: list[_Part] = []
                for device, view in views.items():
                    for row, length in enumerate(rows[device]):
                        reach = _reach(int(length), view.shape[3])
                        # Part of the keys of several heads is no array of its own, all that XLA's product takes.
                        size = reach * view.shape[4] * view.itemsize if _streamed(asked[device], view) else _CALL
                        for heads in _calls(view.shape[2], size) if reach else ():
                            what = (asked[device][layer, row, heads], view[0, row, heads], reach)
                            out = stage.views[device][row, heads, :, :reach]
                            hand = next(hands)
                            parts.append((hand, hand.thread.submit(self._part, hand, *what), out))
                    nbytes += int(rows[device].sum()) * view.shape[2] * view.shape[4] * view.itemsize
                sent.append(self._collect.submit(self._send, stage, parts))
            scores = [layer.result() for layer in sent]
        finally:
            concurrent.futures.wait(sent)  # no scan is left that reads the keys, whatever went wrong
        jax.block_until_ready(scores)  # the staging memory is written again by the next scan
        return Scanned(tuple(scores), time.perf_counter() - began, nbytes)

    def _staging(self, layer: int, k: jax.Array, queries: int) -> _Stage:
        """Where one layer's scores wait for their transfer, made once and kept."""
        if layer >= len(self._stages):
            self._stages.append(_Stage(k, queries))
        return self._stages[layer]

    def _part(self, hand: _Hand, q: np.ndarray, k: np.ndarray, reach: int) -> jax.Array:
        """Begin to score some heads of a row, all their keys `[H, N, D]`; the result `[H, R, reach]` is on its way.

        NumPy arrays go in as they are, because `device_put` would hold Python's lock for longer than the whole call.
        JAX reads them in place where they begin at a multiple of 64 bytes, as heads of 32 dimensions and more do.
        """
        hand.room.acquire()  # until `_send` has what comes of it
        k = k.view(np.uint32) if _streamed(q, k) else k[:, :reach]
        with jax.default_device(self._cpu):
            return scan(q, k, reach=reach)

    def _send(self, stage: _Stage, parts: list[_Part]) -> jax.Array:
        """Wait for all `parts` of a layer, put each into its place in staging memory, and send that to the device."""
        errors: list[BaseException] = []
        for hand, part, out in parts:
            failed = part.exception()  # waits
            if failed is None:
                try:
                    out[:] = part.result()
                except jax.errors.JaxRuntimeError as error:
                    failed = error
            hand.room.release()
            if failed is not None:
                errors.append(failed)
        if errors:
            raise errors[0]
        return jax.device_put(stage.array, stage.target, may_alias=False)


def _streamed(q: np.ndarray, k: np.ndarray) -> bool:
    """Whether keys `[..., D]` are to be seen two by two for queries `[..., R, D]`."""
    return k.dtype == jnp.bfloat16 and q.shape[-2] <= _STREAMED_QUERIES


def _calls(heads: int, nbytes: int) -> list[slice]:
    """A row's heads, of `nbytes` of keys each, by the calls that scan them."""
    group = next((n for n in range(1, heads) if heads % n == 0 and n * nbytes >= _CALL), heads)
    return [slice(first, first + group) for first in range(0, heads, group)]


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
    """Host memory for the scores `[B, K, R, N]` of one layer whose keys are `k`, and where they go from there.

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
            spec = (*k.sharding.spec, *(None,) * 5)[:5]
            self.target = NamedSharding(k.sharding.mesh, P(*spec[1:3], None, spec[3]))
        else:
            self.target = SingleDeviceSharding(next(iter(k.sharding.device_set)))
        place = self.target.with_memory_kind(k.sharding.memory_kind)
        self.array = jax.device_put(np.zeros((batch, heads, queries, slots), dtype), place)
        self.views = host_views(self.array)
