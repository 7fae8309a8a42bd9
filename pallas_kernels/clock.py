"""The device's clock, read between the operations of a program: the host cannot see when they happen.

A stopwatch is one array from its start to its end, written in place both times. An array that is made for the end alone
gets memory that something before it has used, and a CUDA graph whose nodes are ordered by who uses which memory keeps
it waiting for that: so measured, a fetch beside a loop seemed to end when the loop did.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch

__all__ = ["start_clocks", "stop_clock"]


def start_clocks(count: int, *after: jax.Array, implementation: str | None = None) -> tuple[jax.Array, ...]:
    """Stopwatches that run as soon as all of `after` has been computed.

    On a GPU the clock is PTX's ``%globaltimer``, read by a kernel of one thread block that waits for `after` and for
    nothing else; how finely that clock ticks is the device's choice. XLA's form asks the host.

    Args:
        count: how many, all with the same reading.
        after: arrays of any shape and dtype. They are not read.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None.

    Returns:
        Each ``u32[2, 2]``: when it was started, and when it was stopped, which is now, too, as long as it was not. In
        nanoseconds, the lower 32 bits first. Only differences mean something.

    Raises:
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
    """
    kernel, host = (functools.partial(form, count) for form in (_kernel_start, _host_start))
    return tuple(dispatch.run(dispatch.select(implementation, lambda: None), kernel, host, *after))


def stop_clock(watch: jax.Array, *after: jax.Array, implementation: str | None = None) -> jax.Array:
    """`watch` of :func:`start_clocks`, stopped when all of `after` has been computed; in place where it is not kept."""
    return dispatch.run(dispatch.select(implementation, lambda: None), _kernel_stop, _host_stop, watch, *after)


def _kernel_start(count: int, *after: jax.Array, launch: Any = None) -> list[jax.Array]:
    def kernel(lanes: Any, *arrays: Any) -> None:
        now = lanes.clock()
        for watch in arrays[len(after) :]:
            lanes.store(watch, lanes.constant(0), now + now, where=lanes.thread == 0)

    watch = jax.ShapeDtypeStruct((2, 2), jnp.uint32)
    return _launch(launch)(kernel, name="start_clocks", blocks=1, threads=128, inputs=after, outputs=[watch] * count)


def _kernel_stop(watch: jax.Array, *after: jax.Array, launch: Any = None) -> jax.Array:
    def kernel(lanes: Any, *arrays: Any) -> None:
        lanes.store(arrays[-1], lanes.constant(2), lanes.clock(), where=lanes.thread == 0)

    return _launch(launch)(kernel, name="stop_clock", blocks=1, threads=128, inputs=after, updated=[watch])[0]


def _launch(launch: Any) -> Any:
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    return launch


def _host_start(count: int, *after: jax.Array) -> list[jax.Array]:
    now = _host_time(*after)
    return [jnp.stack([now, now])] * count


def _host_stop(watch: jax.Array, *after: jax.Array) -> jax.Array:
    return watch.at[1].set(_host_time(*after))


def _host_time(*after: jax.Array) -> jax.Array:
    first = [x.ravel()[:1] for x in after]  # one number of each stands for all of it
    return jax.pure_callback(_now, jax.ShapeDtypeStruct((2,), jnp.uint32), first)


def _now(_: Any) -> np.ndarray:
    now = time.perf_counter_ns()
    return np.array([now & 0xFFFFFFFF, now >> 32 & 0xFFFFFFFF], np.uint32)
