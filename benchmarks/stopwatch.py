"""Device time of many functions in one profiler session.

The time of a call is what its kernels and copies took on the GPU, summed: launch overhead on the host is left out, so a
kernel of a few microseconds is not hidden behind Python. A session takes the better part of a second to start, stop and
read, so one serves all functions of a group of cases: a small kernel of our own before and after each function's calls
marks in the profile which events are whose. Whatever else runs in between (inputs, checks) falls outside the marks.

Without a GPU wall time of blocking calls is used instead, and `Time.how` says so.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Measurement", "Stopwatch", "Time", "gpu_events", "split_at_marks", "time_of_calls", "wall_time"]

MARK = "stopwatch_mark"


class Time(NamedTuple):
    """Median seconds of one call, how it was measured, and the kernels of one call as (name, seconds)."""

    seconds: float
    how: str
    kernels: tuple[tuple[str, float], ...] = ()

    @property
    def us(self) -> float:
        return self.seconds * 1e6


class Measurement:
    """What `Stopwatch.time` returns: `.time` is there once the session has ended."""

    def __init__(self, repeats: int, taken: Time | None = None):
        self.repeats = repeats
        self.taken = taken

    @property
    def time(self) -> Time:
        if self.taken is None:
            raise RuntimeError("the session that measures this has not ended yet")
        return self.taken

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def us(self) -> float:
        return self.time.us


class Stopwatch:
    """A profiler session: `with Stopwatch() as watch: a = watch.time(f, inputs)`, and `a.time` after the `with`.

    Raises RuntimeError at the end if the profiler recorded other marks than were set.
    """

    def __init__(self) -> None:
        self._measured: list[Measurement] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> Stopwatch:
        if jax.default_backend() == "gpu":
            jax.block_until_ready(_mark())  # compiled before the session
            options = jax.profiler.ProfileOptions()
            options.host_tracer_level = options.python_tracer_level = 0  # nothing of the host is read
            self._folder = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(self._folder.name, profiler_options=options)
        return self

    def time(
        self, fn: Callable[..., Any], inputs: Sequence[tuple], *, repeats: int = 20, warmup: int = 2
    ) -> Measurement:
        """A `Measurement` of the median device time of `fn(*args)`, taking `args` from `inputs` in turn.

        `fn` must be compiled once for all of `inputs` (they differ in values only). Give several inputs when one call
        reads less than a few times the L2, or repeated calls measure the cache.
        """
        for i in range(max(warmup, min(len(inputs), 4))):
            jax.block_until_ready(fn(*inputs[i % len(inputs)]))
        if self._folder is None:
            return Measurement(repeats, Time(wall_time(fn, inputs, repeats=repeats), "wall"))
        jax.block_until_ready(_mark())
        jax.block_until_ready([fn(*inputs[i % len(inputs)]) for i in range(repeats)])
        jax.block_until_ready(_mark())
        self._measured.append(Measurement(repeats))
        return self._measured[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        jax.profiler.stop_trace()
        with self._folder as folder:
            if error is not None:
                return
            [path] = Path(folder).rglob("*.xplane.pb")
            events = gpu_events(jax.profiler.ProfileData.from_file(str(path)))
        for measured, calls in zip(self._measured, split_at_marks(events, len(self._measured), MARK), strict=True):
            measured.taken = time_of_calls(calls, measured.repeats)


@functools.cache
def _compiled_mark() -> Any:
    from pallas_kernels.lanes import launch  # Mosaic GPU is imported only where there is a GPU

    def kernel(lanes: Any, out: Any) -> None:
        lanes.store(out, lanes.thread, [lanes.thread])

    def mark() -> jax.Array:
        out = jax.ShapeDtypeStruct((128,), jnp.int32)
        return launch(kernel, name=MARK, blocks=1, threads=128, inputs=[], outputs=[out])[0]

    return jax.jit(mark)


def _mark() -> jax.Array:
    return _compiled_mark()()


def gpu_events(profile: Any) -> list[tuple[str, float]]:
    """(name, seconds) of everything that ran on the GPU's streams, in order of start."""
    events = [
        (event.start_ns, event.name, event.duration_ns * 1e-9)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return [(name, seconds) for _, name, seconds in sorted(events)]


def split_at_marks(events: Sequence[tuple[str, float]], functions: int, mark: str) -> list[list[tuple[str, float]]]:
    """The events between the first mark and the second, the third and the fourth, ...: one list for each function."""
    at = [i for i, (name, _) in enumerate(events) if mark in name]
    if len(at) != 2 * functions:
        seen = ", ".join(sorted({name for name, _ in events})[:8])
        raise RuntimeError(f"{2 * functions} marks were set but the profiler recorded {len(at)}; it saw: {seen}")
    return [list(events[start + 1 : end]) for start, end in zip(at[::2], at[1::2], strict=True)]


def time_of_calls(events: Sequence[tuple[str, float]], repeats: int) -> Time:
    """The median of `repeats` calls, from their events; the mean where calls launched different numbers of kernels."""
    per_call, rest = divmod(len(events), repeats)
    if rest or not per_call:
        return Time(sum(seconds for _, seconds in events) / repeats, "profiler, mean")
    calls = [events[i * per_call : (i + 1) * per_call] for i in range(repeats)]
    kernels = tuple((calls[0][j][0], statistics.median(call[j][1] for call in calls)) for j in range(per_call))
    return Time(statistics.median(sum(seconds for _, seconds in call) for call in calls), "profiler", kernels)


def wall_time(fn: Callable[..., Any], inputs: Sequence[tuple], *, repeats: int = 20, warmup: int = 1) -> float:
    """Median wall-clock seconds of one call, waiting for its result."""
    for i in range(warmup):
        jax.block_until_ready(fn(*inputs[i % len(inputs)]))
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*inputs[i % len(inputs)]))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
