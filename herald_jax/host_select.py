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
import dataclasses
import functools
import queue
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.errors import GenerationError
from herald_jax.host_scan import scan
from herald_jax.host_scores import Scan, Sent, Stage, host_view

# Threads that call, and calls that each has under way: some compute while others' scores are put in place.
_CALLERS, _AHEAD = 6, 2
# Bytes of keys that a call scans at most, if a head has no more.
_CALL = 160 << 20
# So many tokens before a row needs the next program, that is compiled.
_FORESIGHT = 512
# Arrays over keys' memory that a scanner keeps: as many as there are layers, as long as the cache stays in its place.
_KEPT = 1024
# Transfers of a scan's scores to the device, unless it has more parts. They wait for what the device does before them,
# and with one for each of 36 layers `cuLaunchHostFunc`, which XLA calls with each, waited too: in the driver and with
# its lock, so that no program could be launched until the device had come to them (docs/herald.md).
_TRANSFERS = 6


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
        self._stages: list[Stage] = []
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
        size = len(keys) // len(scan.parts)
        together = -(-size // max(_TRANSFERS // len(scan.parts), 1))
        stages = [
            [
                self._staging(keys[0], queries.shape[-2], min(together, part + size - first))
                for first in range(part, part + size, together)
            ]
            for part in range(0, len(keys), size)
        ]
        places = self._in_place(keys)
        asked, rows = _shards(queries), _shards(lengths)  # waits for the draft
        sent = Sent(scan, stages)
        on_cpu = {x: jax.device_put(q.reshape(len(keys), -1, *q.shape[3:]), self._cpu) for x, q in asked.items()}
        run = _Run()
        callers = [self._callers.submit(self._call, run) for _ in range(_CALLERS)]
        left = [0] * len(keys)
        try:
            for layer, place in enumerate(places):
                views = sent.views(layer)
                for device, k in place.items():
                    sent.nbytes[layer] += int(rows[device].sum()) * k.nbytes // (len(rows[device]) * k.shape[1])
                    parts = _parts(layer, on_cpu[device], k, rows[device], views[device])
                    left[layer] += len(parts)
                    for part in parts:
                        self._program(part, part.reach).result()
                        run.todo.put(part)
                        if part.next_reach:
                            self._program(part, part.next_reach)
                if not left[layer]:  # no row has any entry, and nothing is scanned
                    self._deliver(sent, layer)
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

    def _deliver(self, sent: Sent, layer: int) -> None:
        """A layer's scores are in place: send what is complete, and hand out each part that is."""
        for stages, scores in sent.done(layer):
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

    def _staging(self, k: jax.Array, queries: int, layers: int) -> Stage:
        """Where some layers' scores wait for their transfer. Made once and used again when that is over."""
        like = k.shape, k.dtype, k.sharding, queries, layers
        stage = next((stage for stage in self._stages if stage.like == like and not stage.busy), None)
        if stage is None:
            stage = Stage(k, queries, layers)
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
                    view = host_view(shard.data).reshape(-1, *shard.data.shape[-2:])
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


def _free(stages: list[Stage], scores: tuple[jax.Array, ...]) -> None:
    """Wait until the `scores` have left the `stages`, which can be written to again then."""
    jax.block_until_ready(scores)
    for stage in stages:
        stage.busy = False
