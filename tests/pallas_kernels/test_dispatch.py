"""Which implementation runs where: explicit choices never fall back, and every refusal says why."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels import dispatch

needs_abstract_devices = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: abstract devices with a platform"
)


def refuses():
    return "not for these arguments"


def test_without_a_gpu_none_is_xla_and_a_name_is_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("needs a machine without a GPU")
    assert dispatch.select(None, lambda: None) == "xla"
    assert dispatch.select("xla", refuses) == "xla"
    with pytest.raises(NotImplementedError, match="NVIDIA GPU|JAX 0.11"):
        dispatch.select("mosaic_gpu", lambda: None)


def test_unknown_names_are_mistakes():
    with pytest.raises(ValueError, match="triton"):
        dispatch.select("triton", lambda: None)


def on(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@needs_abstract_devices
def test_an_abstract_hopper_is_enough_to_lower_for():
    with on("NVIDIA H200"):
        assert dispatch.select(None, lambda: None) == "auto"
        assert dispatch.select("mosaic_gpu", lambda: None) == "mosaic_gpu"
        assert dispatch.select(None, refuses) == "xla"
        with pytest.raises(NotImplementedError, match="not for these arguments"):
            dispatch.select("mosaic_gpu", refuses)


@needs_abstract_devices
def test_other_gpus_are_refused_by_name():
    with on("NVIDIA A100-SXM4-80GB"):
        assert dispatch.select(None, lambda: None) == "xla"
        with pytest.raises(NotImplementedError, match="9.0"):
            dispatch.select("mosaic_gpu", lambda: None)


def test_auto_is_decided_by_the_platform_that_is_lowered_for():
    def run(x):
        return dispatch.run("auto", lambda x: x + 1, lambda x: x + 2, x)

    traced = jax.jit(run).trace(jnp.float32(0))
    cuda, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    assert "1.000000e+00" in cuda
    assert "2.000000e+00" not in cuda
    assert "2.000000e+00" in cpu
    assert "1.000000e+00" not in cpu


REFUSED = {
    "float32": ((1, 8, 2, 64), (1, 2, 64, 64), jnp.float32, "bfloat16 or float16"),
    "head_dim_96": ((1, 8, 2, 96), (1, 2, 64, 96), jnp.bfloat16, "64 and 128"),
    "head_dim_256": ((1, 8, 2, 256), (1, 2, 64, 256), jnp.bfloat16, "64 and 128"),
    "odd_cache": ((1, 8, 2, 64), (1, 2, 63, 64), jnp.bfloat16, "multiple of 8"),
    "no_entries": ((1, 8, 2, 64), (1, 2, 0, 64), jnp.bfloat16, "at least one"),
    "no_queries": ((1, 0, 2, 64), (1, 2, 64, 64), jnp.bfloat16, "at least one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_block_attention_says_what_its_kernel_does_not_take(case):
    q, k, dtype, reason = REFUSED[case]
    assert reason in dispatch.block_attention_missing(jax.ShapeDtypeStruct(q, dtype), jax.ShapeDtypeStruct(k, dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_block_attention_takes(head_dim, dtype):
    q, k = jax.ShapeDtypeStruct((2, 5, 14, head_dim), dtype), jax.ShapeDtypeStruct((3, 2, 2, 64, head_dim), dtype)
    assert dispatch.block_attention_missing(q, k) is None
