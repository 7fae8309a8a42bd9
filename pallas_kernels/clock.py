"""The device's clock, read between the operations of a program: the host cannot see when they happen."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch

__all__ = ["device_time"]


def device_time(after: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """When `after` had been computed: ``u32[2]``, nanoseconds, the lower 32 bits first.

    Only differences mean something. On a GPU it is PTX's ``%globaltimer``, read by a kernel of one thread block that
    waits for `after` and for nothing else; how finely that clock ticks is the device's choice. XLA's form asks the
    host.

    Args:
        after: at least one element, of 32 bits each. It is not read.
        implementation: ``"xla"``, ``"mosaic_gpu"`` or None.

    Raises:
        NotImplementedError: ``implementation="mosaic_gpu"`` where that kernel cannot run.
    """
    return dispatch.run(dispatch.select(implementation, lambda: None), _kernel_time, _host_time, after)


def _kernel_time(after: jax.Array, launch: Any = None) -> jax.Array:
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch

    def kernel(lanes: Any, _: Any, out: Any) -> None:
        lanes.store(out, lanes.constant(0), lanes.clock(), where=lanes.thread == 0)

    now = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return launch(kernel, name="device_time", blocks=1, threads=128, inputs=[after], outputs=[now])[0]


def _host_time(after: jax.Array) -> jax.Array:
    return jax.pure_callback(_now, jax.ShapeDtypeStruct((2,), jnp.uint32), after)


def _now(_: Any) -> np.ndarray:
    now = time.perf_counter_ns()
    return np.array([now & 0xFFFFFFFF, now >> 32 & 0xFFFFFFFF], np.uint32)
