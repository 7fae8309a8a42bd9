"""HERALD's selection on the CPU: every key's score, from keys read where they lie in host memory.

The scan runs on JAX's CPU backend, beside the GPU's denoising. It reads the page-locked arrays where they are: CPU
arrays over their memory are made once and kept as long as it stays in its place. A scan is over before the cache is
appended to: the pipeline waits for its result in between.

The CPU multiplies and nothing else. Softmax, mean and top-k are left to the device, which has them done in the time
that exponentials alone would cost the CPU; the scores that cross PCIe for it are a 32nd of the keys at four queries per
head and head dim 128.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from herald_jax.errors import GenerationError
from herald_jax.host_scan import scan
from pallas_kernels import page_sums
from pallas_kernels.index_scores import softmax_over_prefix

# Threads that call, and calls that each has under way: some compute while others' scores are put in place.
_CALLERS, _AHEAD = 6, 2
# Bytes of keys that a call scans at most, if a head has no more.
_CALL = 160 << 20
# So many tokens before a row needs the next program, that is compiled.
_FORESIGHT = 512
# Arrays over keys' memory that a scanner keeps: as many as there are layers, as long as the cache stays in its place.
_KEPT = 1024
# Share of the layers whose scores are on their way when a scan is nearly over.
_NEARLY = 0.8


@functools.partial(jax.jit, static_argnames=("reduce", "page"))
def weigh(scores: tuple[jax.Array, ...], lengths: jax.Array, *, reduce: str, page: int = 1) -> tuple[jax.Array, ...]:
    """Importance of each layer from its scores `[B, K, R, N]` and i32[B] prefix lengths, on the device.

    f32[B, K, ceil(N / page)]: a page's entries share a number, the sum of theirs.
    """
    inside = lengths.reshape(-1, 1, 1, 1)
    found = tuple(softmax_over_prefix(x.astype(jnp.float32), inside, reduce) for x in scores)
    return found if page == 1 else tuple(page_sums(x, page, lengths) for x in found)


@dataclasses.dataclass(frozen=True)
class Scanned:
    """Scores `[B, K, R, N]` of each layer of a part, on their way to the device, and the bytes of K read for them.

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """What one call scans: the first keys of one row, of all its heads.

    Attributes:
      layer: its number among the scanned ones.
      q, k, head, heads, reach: as `scan` takes them.
      out: where the scores `[heads, R, reach]` are to go.
      next_reach: another one, which the row will soon need, or 0.
    """

    layer: int
    q: jax.Array
    k: jax.Array
    head: int
    heads: int
    reach: int
    out: np.ndarray
    next_reach: int


class _Run:
    """One scan's parts on their way to the threads that call, and the layers of those done on their way back.

    Attributes:
      todo: parts, then None for each thread.
      done: of each part that has its scores in place its layer, then None from each thread.
    """

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def end(self) -> None:
        """There will be no more, for any thread."""
        for _ in range(_CALLERS):
            self.todo.put(None)

    def drop(self) -> None:
        """Begin nothing more of what is there to do, on any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.todo.get_nowait()
        self.end()


class _Sent:
    """The scores of one scan that are on their way to the device.

    Attributes:
      scores: those of each layer, None before they are.
      nbytes: of K, for each layer.
    """

    def __init__(self, scan: Scan, stages: list[_Stage]) -> None:
        self._scan, self._stages = scan, stages
        self.scores: list[jax.Array | None] = [None] * len(stages)
        self.nbytes = [0] * len(stages)
        self._delivered = 0
        self._since = time.perf_counter()

    def send(self, layer: int) -> Iterator[tuple[list[_Stage], tuple[jax.Array, ...]]]:
        """Send one layer's. Yields the stages and scores of each part that is handed out now."""
        self.scores[layer] = self._stages[layer].send()
        if sum(x is not None for x in self.scores) >= _NEARLY * len(self.scores) and not self._scan.nearly.done():
            self._scan.nearly.set_result(None)
        size = len(self._stages) // len(self._scan.parts)
        while self._delivered < len(self._scan.parts):
            part = slice(self._delivered * size, (self._delivered + 1) * size)
            scores = tuple(x for x in self.scores[part] if x is not None)
            if len(scores) < size:
                return
            now = time.perf_counter()
            self._scan.parts[self._delivered].set_result(Scanned(scores, now - self._since, sum(self.nbytes[part])))
            self._delivered, self._since = self._delivered + 1, now
            yield self._stages[part], scores


class Scanner:
    """Threads that have JAX's CPU backend scan and put the scores in place, and one that sends them to the device.

    XLA computes on threads of its own, one for each core, whoever calls it; but what one thread calls, one after the
    other. So a few threads call, each with the next call under way before it waits for the last. What they call takes
    arrays made beforehand, of keys and of numbers: made in the call, they would keep Python's lock for longer.

    `submit` returns at once; an error in any of the threads comes out of the parts' results. What is to be done with
    scores can be launched when they are there, behind whatever the device still does. The next scan begins at once.
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
        self._keys: dict[Any, jax.Array] = {}
        self._number = functools.cache(lambda x: jax.device_put(np.int32(x), self._cpu))
        self._lead = concurrent.futures.ThreadPoolExecutor(1, "herald-scan")
        self._callers = concurrent.futures.ThreadPoolExecutor(_CALLERS, "herald-scan-call")
        self._watch = concurrent.futures.ThreadPoolExecutor(1, "herald-scan-sent")
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "herald-scan-compile")
        self._programs: dict[Any, concurrent.futures.Future[Any]] = {}

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
        for threads in (self._lead, self._callers, self._watch, self._compiler):
            threads.shutdown(wait=True, cancel_futures=True)

    def _scan(self, scan: Scan, queries: jax.Array, keys: tuple[jax.Array, ...], lengths: jax.Array) -> None:
        stages = [self._staging(k, queries.shape[-2]) for k in keys]
        places = self._in_place(keys)
        asked, rows = _shards(queries), _shards(lengths)  # waits for the draft
        sent = _Sent(scan, stages)
        on_cpu = {x: jax.device_put(q.reshape(len(keys), -1, *q.shape[3:]), self._cpu) for x, q in asked.items()}
        run = _Run()
        callers = [self._callers.submit(self._call, run) for _ in range(_CALLERS)]
        left = [0] * len(keys)
        try:
            for layer, (stage, place) in enumerate(zip(stages, places, strict=True)):
                for device, k in place.items():
                    sent.nbytes[layer] += int(rows[device].sum()) * k.nbytes // (len(rows[device]) * k.shape[1])
                    parts = _parts(layer, on_cpu[device], k, rows[device], stage.views[device])
                    left[layer] += len(parts)
                    for part in parts:
                        self._program(part, part.reach).result()
                        run.todo.put(part)
                        if part.next_reach:
                            self._program(part, part.next_reach)
            run.end()
            working = _CALLERS
            while working:
                layer_done = run.done.get()
                if layer_done is None:
                    working -= 1
                    continue
                left[layer_done] -= 1
                if not left[layer_done]:
                    self._deliver(sent, layer_done)
        finally:
            run.drop()
            concurrent.futures.wait(callers)
        for caller in callers:
            caller.result()
        for layer, scores in enumerate(sent.scores):
            if scores is None:  # of rows without any entry
                self._deliver(sent, layer)

    def _deliver(self, sent: _Sent, layer: int) -> None:
        """Send a layer's scores, and hand out what has been sent if a part is complete."""
        for stages, scores in sent.send(layer):
            self._watch.submit(_free, stages, scores)

    def _call(self, run: _Run) -> None:
        """Scan one part after the other until there is none, with so many under way at once."""
        begun: collections.deque[tuple[_Part, Any]] = collections.deque()
        try:
            more = True
            while more or begun:
                part = run.todo.get() if more else None
                more = part is not None
                if part is not None:
                    arguments = self._arguments(part)
                    begun.append((part, scan(*arguments, heads=part.heads, reach=part.reach)))
                    if len(begun) < _AHEAD:
                        continue
                if begun:
                    part, strips = begun.popleft()
                    np.copyto(part.out, np.asarray(strips))
                    run.done.put(part.layer)
        except BaseException:
            run.drop()
            raise
        finally:
            # Whatever went wrong: no scan is left that reads the keys.
            for _, strips in begun:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    jax.block_until_ready(strips)
            run.done.put(None)

    def _arguments(self, part: _Part) -> tuple[jax.Array, ...]:
        return part.q, part.k, self._number(part.layer), self._number(part.head)

    def _program(self, part: _Part, reach: int) -> concurrent.futures.Future[Any]:
        """The program that scans keys such as the part's up to `reach`: `scan` finds it when it is there.

        Not left to the call: several threads call at once, and a block would wait for each new program.
        """
        key = part.q.shape, part.q.dtype, part.k.shape, part.k.dtype, part.heads, reach
        if key not in self._programs:
            lowered = functools.partial(scan.lower, *self._arguments(part), heads=part.heads, reach=reach)
            self._programs[key] = self._compiler.submit(lambda: lowered().compile())
        return self._programs[key]

    def _staging(self, k: jax.Array, queries: int) -> _Stage:
        """Where one layer's scores wait for their transfer. Made once and used again when that is over."""
        like = k.shape, k.dtype, k.sharding, queries
        stage = next((stage for stage in self._stages if stage.like == like and not stage.busy), None)
        if stage is None:
            stage = _Stage(k, queries)
            self._stages.append(stage)
        stage.busy = True
        return stage

    def _in_place(self, keys: tuple[jax.Array, ...]) -> list[dict[Any, jax.Array]]:
        """Each layer's keys, by device, as the CPU backend's arrays `[B * K, N, ..]` over the very same memory.

        Those of memory that was scanned before are the same arrays again, which saves more time than a call takes.
        """
        if len(self._keys) > _KEPT:
            self._keys.clear()
        places = []
        jax.block_until_ready(keys)
        for k in keys:
            place = {}
            for shard in k.addressable_shards:
                memory = shard.data.unsafe_buffer_pointer(), shard.data.shape, k.dtype
                if memory not in self._keys:
                    view = _view(shard.data).reshape(-1, *shard.data.shape[-2:])
                    view = view.view(np.uint32) if k.dtype == jnp.bfloat16 else view
                    self._keys[memory] = jax.device_put(view, self._cpu)
                place[shard.device] = self._keys[memory]
            places.append(place)
        return places


def _parts(layer: int, q: jax.Array, k: jax.Array, rows: np.ndarray, out: np.ndarray) -> list[_Part]:
    """A layer's scan in parts: keys `[B * K, N, ..]` of rows of i32[B] lengths, scores to `out` `[B, K, R, N]`."""
    heads, slots = out.shape[1], out.shape[3]
    key = k.shape[-1] * k.dtype.itemsize
    parts = []
    for row, length in enumerate(rows.tolist()):
        reach = _reach(length, slots)
        later = _reach(reach + 1, slots) if length + _FORESIGHT > reach else reach
        some = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * reach * key <= _CALL))
        for head in range(0, heads if reach else 0, some):
            where = out[row, head : head + some, :, :reach]
            parts.append(_Part(layer, q, k, row * heads + head, some, reach, where, later if later > reach else 0))
    return parts


def _reach(length: int, slots: int) -> int:
    """How many of a head's slots to scan for a prefix of `length`: in eighths, so that few programs serve them all."""
    grain = max(slots // 8, 128)
    return min(-(-length // grain) * grain, slots)


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


def host_views(x: jax.Array) -> dict[Any, np.ndarray]:
    """The parts of an array in host memory, by device, as writable NumPy arrays over the very same memory.

    By address, not by `np.asarray`: that view would be kept by the array, which then could never be donated again. The
    caller sees to it that nobody uses the views while a program changes the array, or the other way round.
    """
    jax.block_until_ready(x)
    return {shard.device: _view(shard.data) for shard in x.addressable_shards}


def _view(x: jax.Array) -> np.ndarray:
    """The memory of an array on one device, which has to be ready."""
    pointer = ctypes.cast(x.unsafe_buffer_pointer(), ctypes.POINTER(ctypes.c_uint8))
    flat = np.ctypeslib.as_array(pointer, shape=(x.nbytes,)) if x.nbytes else np.empty((0,), np.uint8)
    return flat.view(x.dtype).reshape(x.shape)


def _free(stages: list[_Stage], scores: tuple[jax.Array, ...]) -> None:
    """Wait until the `scores` have left the `stages`, which can be written to again then."""
    jax.block_until_ready(scores)
    for stage in stages:
        stage.busy = False


def score_bytes(queries: jax.Array, keys: Sequence[jax.Array]) -> int:
    """Bytes of the scores that a scan of `keys` with `queries` sends to the device, as `Scanner.submit` takes them."""
    return sum(k.size // k.shape[-1] * queries.shape[-2] * _score_dtype(k).itemsize for k in keys)


def _score_dtype(k: jax.Array) -> np.dtype[Any]:
    return np.dtype(np.float32 if k.dtype == jnp.float32 else np.float16)


class _Stage:
    """Host memory for the scores `[B, K, R, N]` of one layer whose keys are `k`, and where they go from there.

    On a GPU it is page-locked, because a transfer from pageable memory runs at a thirtieth of the speed (1.7 against 49
    GB/s, docs/herald.md). JAX's arrays cannot be written by NumPy, so this writes to the buffer's address: only here,
    only between transfers, and nothing ever computes on the array itself.

    Attributes:
      like: of what keys and how many queries it holds the scores.
      busy: whether scores are being put here or sent from here.
      views: the memory as writable NumPy arrays, by device.
    """

    def __init__(self, k: jax.Array, queries: int):
        self.like = k.shape, k.dtype, k.sharding, queries
        self.busy = False
        _, batch, heads, slots, _ = k.shape
        self._target: Any
        if isinstance(k.sharding, NamedSharding):
            spec = (*k.sharding.spec, *(None,) * 5)[:5]
            self._target = NamedSharding(k.sharding.mesh, P(*spec[1:3], None, spec[3]))
        else:
            self._target = SingleDeviceSharding(next(iter(k.sharding.device_set)))
        place = self._target.with_memory_kind(k.sharding.memory_kind)
        self._array = jax.device_put(np.zeros((batch, heads, queries, slots), _score_dtype(k)), place)
        self.views = host_views(self._array)

    def send(self) -> jax.Array:
        """The scores on their way to the device."""
        return jax.device_put(self._array, self._target, may_alias=False)
