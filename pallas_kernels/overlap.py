"""Kernels that start before the kernel they follow has ended: CUDA's programmatic dependent launch.

A denoising step is a chain of short kernels, and between two of them the memory idles for 2 to 3 microseconds: the one
drains, the other is launched, sets up and waits for its first bytes. Inside `overlapped()` the kernels of this package
are launched as soon as every program of the kernel before has begun, do what does not depend on it (set up barriers,
fill their ring with weights), and wait for its end before they read or write anything else. What that asks for:

- **Weights are there already.** The `w` of `stream_matmul` and `gated_matmul` is read before the wait, so no kernel of
  the same program may compute it. Everything else is waited for.
- **Plain launches.** In a CUDA graph, which XLA makes of long runs of kernels, each of these kernels is a graph of its
  own and starts when the one before has ended. `COMPILER_OPTIONS` keeps XLA from making graphs.
- **No such launches of XLA's own.** Its kernels may read what they take for constant before they wait, which is right
  behind its own kernels but not behind ours. `COMPILER_OPTIONS` turns them off, too.

All kernels wait before their first write, and none has ended before its wait has. So behind its wait a kernel may rely
on all that ran before it, not on its predecessor alone, however early any of them began.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

__all__ = ["COMPILER_OPTIONS", "WANTED", "active", "begin", "overlapped", "wait"]

# Whether the decoding loop makes use of this. Off until it has been measured on the card.
WANTED = os.environ.get("HERALD_OVERLAP") == "1"

# For `jax.jit(..., compiler_options=)` of a program whose kernels overlap.
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_pdl": False}

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("herald_kernels_overlap", default=False)


@contextlib.contextmanager
def overlapped(on: bool = True) -> Iterator[None]:
    """Kernels traced inside start early. See the module for what the program around them owes them.

    A matter of tracing: a function jitted and traced outside keeps the form it was traced in.
    """
    token = _active.set(on)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> bool:
    """Whether kernels that are traced now shall start early."""
    return _active.get()


# Whether kernels that stream let the next one start when they have asked for all they read, and not when they start:
# its own first loads then fill the time in which this one drains.
LATE = True


# Bytes of shared memory per thread that small kernels take beside what they need (see `padding`).
PAD = 0


def padding(threads: int) -> int:
    """32-bit words of shared memory for a kernel of so many threads to leave unused.

    A multiprocessor divides its memory between L1 and shared memory as the kernel it runs asks for, and takes in no
    program of a kernel that wants it divided otherwise. So kernels that are to overlap must all want the most.
    """
    return threads * PAD // 4


def begin(overlap: bool, late: bool | None = None) -> None:
    """In a kernel: lets the next kernel start, as soon as all programs have come here."""
    if overlap and late in (None, LATE):
        import jax.experimental.pallas.mosaic_gpu as plgpu

        plgpu.griddepcontrol_launch_dependents()


def wait(overlap: bool) -> None:
    """In a kernel: until the kernel before has ended and what it wrote can be seen."""
    if overlap:
        import jax.experimental.pallas.mosaic_gpu as plgpu

        plgpu.griddepcontrol_wait()
