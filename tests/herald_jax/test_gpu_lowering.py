"""The block loop lowered for an H100 on a machine without one: which kernels it holds, and how many times."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from herald_jax import Dense, Mage, Threshold
from herald_jax.block_loop import run_blocks
from herald_jax.cache import DeviceKV
from herald_jax.denoise import Sampling
from herald_jax.loop_state import LoopOptions, Rows
from herald_jax.mage import MageKV
from herald_jax.model import param_specs, unflatten
from herald_jax.plans import Plan
from pallas_kernels import dispatch
from tests.herald_jax import tiny

pytestmark = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX,
    reason="needs JAX 0.11: Mosaic GPU kernels",
)


def lowered(plan: Plan, layers: int, size: int, slots: int = 256) -> str:
    """The loop of a small bfloat16 model with `layers` layers of width `size`, two rows with `slots` slots."""
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "head_dim": 64}
    config = dataclasses.replace(tiny.SDAR, num_layers=layers, dtype="bfloat16", **sizes)
    of = jax.ShapeDtypeStruct
    batch, block = 2, config.diffusion.block_length
    params = unflatten({path: of(spec.shape, spec.dtype) for path, spec in param_specs(config).items()})
    number, flag, scalar = of((batch,), jnp.int32), of((batch,), jnp.bool_), of((), jnp.int32)

    def rows() -> Rows:
        cache: DeviceKV | MageKV = DeviceKV.empty(config, batch, slots)
        if isinstance(plan, Mage):
            cache = MageKV.around(cache, plan, config, slots, None)
        keys = jax.random.split(jax.random.key(0), batch)
        zero, off = jnp.zeros(number.shape, number.dtype), jnp.zeros(flag.shape, flag.dtype)
        canvas = jnp.zeros((batch, block), jnp.int32)
        count = jnp.zeros(scalar.shape, scalar.dtype)
        return Rows(
            cache, jnp.zeros((batch, slots), jnp.int32), zero, zero, zero, canvas, canvas > 0, zero, off, zero, off,
            off, off, keys, zero, zero, zero, count, zero, count, zero, zero,
        )  # fmt: skip

    state = jax.eval_shape(rows)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = run_blocks.trace(
            params,
            state,
            Threshold(0.5),
            Sampling.of(0.0, 0, 1.0),
            of((1,), jnp.int32),
            of((), jnp.bool_),
            options=LoopOptions(config, plan=plan),
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    """Names of the Mosaic GPU kernels in it."""
    return re.findall(r"custom_call @(mosaic_gpu\w*)", text)


# Layers of a width that the matmul kernel has no tiles for, and of one that it has: nine launches a layer.
@pytest.mark.parametrize(
    ("plan", "size", "at_least"),
    [(Mage(0.5, dense_layers=1, rest="keep"), 32, 2), (Dense(), 128, 9)],
)
def test_kernels_are_lowered_once_and_not_once_a_layer(plan: Plan, size: int, at_least: int) -> None:
    """Lowered anew in each of 36 layers they took minutes to compile (docs/measurements.md)."""
    few, many = (kernels(lowered(plan, layers, size)) for layers in (3, 7))
    assert len(few) >= at_least
    assert len(many) == len(few)


def test_a_layer_that_selects_has_no_launch_of_its_own() -> None:
    """Importance is added up by the kernel that joins splits, and goes straight into the stack of all layers.

    Put there by XLA, it was a copy beside the next layer's kernels, for which a straight CUDA graph got branches.
    """
    text = lowered(Mage(0.5, dense_layers=1), 3, 128, slots=8192)
    assert "block_attention_finish_mosaic_gpu" in text
    assert "block_attention_pages" not in text
    stack = "tensor<2x2x2x1024xf32>"  # two layers, two rows, two KV heads, pages of 8
    assert stack in text
    assert not re.search(rf"}}\) : \({stack}", text)  # the last line of a scatter into it
