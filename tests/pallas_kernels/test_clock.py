"""The device's clock: the kernel's own function in NumPy, XLA's form, and lowered for a GPU."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import clock, dispatch, lanes_numpy


def nanoseconds(halves) -> int:
    low, high = np.asarray(halves).tolist()
    return low | high << 32


@pytest.mark.parametrize(
    "read",
    [
        lambda x: clock._kernel_time(x, launch=lanes_numpy.launch),
        lambda x: clock.device_time(x, implementation="xla"),
        jax.jit(clock.device_time),
    ],
    ids=["kernel", "xla", "compiled"],
)
def test_reads_the_time(read) -> None:
    read(jnp.ones((3,)))
    before = time.perf_counter_ns()
    got = nanoseconds(read(jnp.ones((3,))))
    assert before <= got <= time.perf_counter_ns()


def test_is_read_when_its_argument_is_there() -> None:
    @jax.jit
    def run(x):
        begun = clock.device_time(x)
        x = jnp.where(begun[1] == jnp.uint32(2**32 - 1), 0, x)
        for _ in range(20):
            x = jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sin(y), x)
        return begun, clock.device_time(x)

    begun, ended = map(nanoseconds, run(jnp.ones((64,))))
    assert ended - begun > 20 * 1000 * 64 * 0.05  # at least a twentieth of a nanosecond for each


@pytest.mark.skipif(dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: Mosaic GPU kernels")
def test_lowers_for_an_abstract_h200() -> None:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(clock.device_time).trace(jnp.ones((2,))).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "callback" not in text
