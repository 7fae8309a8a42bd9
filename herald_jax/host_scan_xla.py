"""The scan by JAX's CPU backend: threads that call its program (`host_scan.py`) and put the scores in place."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.errors import GenerationError
from herald_jax.host_scan import scan
from herald_jax.host_scores import host_view

# Threads that call, and calls that each has under way: some compute while others' scores are put in place.
_CALLERS, _AHEAD = 6, 2
# Bytes of keys that a call scans at most, if a head has no more.
_CALL = 160 << 20
# So many tokens before a row needs the next program, that is compiled.
_FORESIGHT = 512
# Arrays over keys' memory that a scanner keeps: as many as there are layers, as long as the cache stays in its place.
_KEPT = 1024


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


class XlaScan:
    """Threads that have JAX's CPU backend scan and put the scores in place.

    XLA computes on threads of its own, one for each core, whoever calls it; but what one thread calls, one after the
    other. So a few threads call, each with the next call under way before it waits for the last. What they call takes
    arrays made beforehand, of keys and of numbers: made in the call, they would keep Python's lock for longer.

    Raises: GenerationError if JAX has no CPU backend.
    """

    def __init__(self) -> None:
        try:
            self._cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise GenerationError(
                f"selection on the CPU needs JAX's CPU backend beside the GPU's, which is not there ({error}); leave "
                "JAX_PLATFORMS unset or name both, as in JAX_PLATFORMS=cuda,cpu"
            ) from None
        self._keys: dict[Any, jax.Array] = {}
        self._number = functools.cache(lambda x: jax.device_put(np.int32(x), self._cpu))
        self._callers = concurrent.futures.ThreadPoolExecutor(_CALLERS, "herald-scan-call")
        self._compiler = concurrent.futures.ThreadPoolExecutor(1, "herald-scan-compile")
        self._programs: dict[Any, concurrent.futures.Future[Any]] = {}

    def close(self) -> None:
        """Wait for what is running, drop what is not, end the threads."""
        for threads in (self._callers, self._compiler):
            threads.shutdown(wait=True, cancel_futures=True)

    def places(self, keys: Sequence[jax.Array]) -> list[dict[Any, jax.Array]]:
        """Each layer's keys, by device, as the CPU backend's arrays `[B * K, N, ..]` over the very same memory.

        Those of memory that was scanned before are the same arrays again, which saves more time than a call takes.
        """
        if len(self._keys) > _KEPT:
            self._keys.clear()
        places = []
        jax.block_until_ready(list(keys))
        for k in keys:
            place = {}
            for shard in k.addressable_shards:
                memory = shard.data.unsafe_buffer_pointer(), shard.data.shape, k.dtype
                if memory not in self._keys:
                    view = host_view(shard.data).reshape(-1, *shard.data.shape[-2:])
                    view = view.view(np.uint32) if k.dtype == jnp.bfloat16 else view
                    self._keys[memory] = jax.device_put(view, self._cpu)
                place[shard.device] = self._keys[memory]
            places.append(place)
        return places

    def scan(
        self,
        places: list[dict[Any, jax.Array]],
        queries: dict[Any, np.ndarray],
        lengths: dict[Any, np.ndarray],
        scores: list[dict[Any, np.ndarray]],
    ) -> Generator[int, None, None]:
        """Yield each layer's number when all its scores are in place.

        Args:
          places: the keys, as arrays of the CPU backend.
          queries: `[L, B, K, R, D]` by device.
          lengths: i32[B] by device.
          scores: of each layer, by device, the memory `[B, K, R, N]` that they are to be put into.
        """
        on_cpu = {x: jax.device_put(q.reshape(len(q), -1, *q.shape[3:]), self._cpu) for x, q in queries.items()}
        run = _Run()
        callers = [self._callers.submit(self._call, run) for _ in range(_CALLERS)]
        left = [0] * len(places)
        try:
            for layer, place in enumerate(places):
                for device, k in place.items():
                    parts = _parts(layer, on_cpu[device], k, lengths[device], scores[layer][device])
                    left[layer] += len(parts)
                    for part in parts:
                        self._program(part, part.reach).result()
                        run.todo.put(part)
                        if part.next_reach:
                            self._program(part, part.next_reach)
                if not left[layer]:  # no row has any entry, and nothing is scanned
                    yield layer
            run.end()
            working = _CALLERS
            while working:
                layer_done = run.done.get()
                if layer_done is None:
                    working -= 1
                    continue
                left[layer_done] -= 1
                if not left[layer_done]:
                    yield layer_done
        finally:
            run.drop()
            concurrent.futures.wait(callers)
        for caller in callers:
            caller.result()

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
