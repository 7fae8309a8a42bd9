"""The device's clock: the kernels' own functions in NumPy, XLA's form, and lowered for a GPU."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import clock, dispatch, lanes_numpy


def nanoseconds(watch) -> list[int]:
    return [low | high << 32 for low, high in np.asarray(watch).tolist()]


IN_NUMPY = (
    functools.partial(clock._kernel_start, launch=lanes_numpy.launch),
    functools.partial(clock._kernel_stop, launch=lanes_numpy.launch),
)
BY_XLA = tuple(functools.partial(f, implementation="xla") for f in (clock.start_clocks, clock.stop_clock))
COMPILED = (jax.jit(clock.start_clocks, static_argnums=0), jax.jit(clock.stop_clock))


@pytest.mark.parametrize(("start", "stop"), [IN_NUMPY, BY_XLA, COMPILED], ids=["kernel", "xla", "compiled"])
def test_reads_the_time_at_the_start_and_at_the_end(start, stop) -> None:
    x, y = jnp.ones((3,)), jnp.ones((2, 2), jnp.bfloat16)
    stop(start(2, x)[0], x, y)
    before = time.perf_counter_ns()
    one, other = start(2, x, y)
    assert nanoseconds(one) == nanoseconds(other)
    begun, not_ended = nanoseconds(one)
    assert before <= begun == not_ended
    after = time.perf_counter_ns()
    kept, ended = nanoseconds(stop(one, x, y))
    assert kept == begun <= after <= ended <= time.perf_counter_ns()


def test_is_read_when_its_arguments_are_there() -> None:
    @jax.jit
    def run(x):
        (watch,) = clock.start_clocks(1, x)
        x = jnp.where(watch[0, 1] == jnp.uint32(2**32 - 1), 0, x)
        for _ in range(20):
            x = jax.lax.fori_loop(0, 1000, lambda _, y: jnp.sin(y), x)
        return clock.stop_clock(watch, x)

    begun, ended = nanoseconds(run(jnp.ones((64,))))
    assert ended - begun > 20 * 1000 * 64 * 0.05  # at least a twentieth of a nanosecond for each


@pytest.mark.skipif(dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: Mosaic GPU kernels")
def test_lowers_for_an_abstract_h200() -> None:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)

    @jax.jit
    def run(x):
        return [clock.stop_clock(watch, x) for watch in clock.start_clocks(2, x)]

    with jax.sharding.use_abstract_mesh(mesh):
        text = run.trace(jnp.ones((2,), jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "start_clocks" in text
    assert text.count("stop_clock") >= 2
    assert "callback" not in text
