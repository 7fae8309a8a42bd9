"""A layer's head and tail: plain forms, mistakes, and the kernels in JAX's interpreter and lowered for Hopper."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import dispatch
from pallas_kernels.layer_parts import COUNTERS, layer_head, layer_tail

EPS = 1e-6
NEEDS_KERNELS = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: the interpreter of Mosaic GPU kernels"
)


def arrays(tokens, inner, size, hidden, width, splits, dtype):
    """attended, x, parts, scale and the weights out, qkv, gate_up, down."""
    rng = np.random.default_rng(0)

    def draw(*shape, by=1.0):
        return jnp.asarray(rng.normal(size=shape) * by, dtype)

    return (
        draw(tokens, inner),
        draw(tokens, size),
        draw(splits, tokens, size),
        draw(size),
        draw(inner, size, by=inner**-0.5),
        draw(size, width, by=size**-0.5),
        draw(size, 2, hidden, by=size**-0.5),
        draw(hidden, size, by=hidden**-0.5),
    )


def wide(x):
    return np.asarray(x, np.float64)


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


def mlp(y, gate_up, down):
    gate, up = np.einsum("te,ecf->ctf", y, wide(gate_up))
    return gate / (1 + np.exp(-gate)) * up @ wide(down)


def check(run_head, run_tail, operands, tolerance):
    """Both against float64; the second of three layers' counters."""
    attended, x, parts, scale, out, qkv, gate_up, down = operands
    counters = jnp.zeros((3, COUNTERS), jnp.int32)
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    got, sums, _ = run_head(x, parts, scale, qkv, counters, jnp.int32(1), eps=EPS)
    close(wide(got), wide(x) + wide(parts).sum(0))
    close(wide(sums).sum(0), norm(wide(got), wide(scale)) @ wide(qkv))
    got, sums, _ = run_tail(attended, x, out, scale, gate_up, down, counters, jnp.int32(1), eps=EPS)
    close(wide(got), wide(x) + wide(attended) @ wide(out))
    close(wide(sums).sum(0), mlp(norm(wide(got), wide(scale)), gate_up, down))


def test_plain_forms():
    check(layer_head, layer_tail, arrays(5, 12, 10, 7, 9, 2, jnp.float32), 1e-5)


def test_mistakes():
    attended, x, parts, scale, out, qkv, gate_up, down = arrays(4, 8, 8, 8, 8, 1, jnp.float32)
    counters = jnp.zeros((1, COUNTERS), jnp.int32)
    with pytest.raises(ValueError, match=r"layer_head takes x \[T, E\]"):
        layer_head(x, parts[:, :2], scale, qkv, counters, 0, eps=EPS)
    with pytest.raises(ValueError, match=r"layer_tail takes attended \[T, H\]"):
        layer_tail(attended, x, out, scale, gate_up, down[:4], counters, 0, eps=EPS)


# Tokens that fill neither their tile nor the second one; more steps than stages; more units of a matmul than programs.
# There is one program: the interpreter runs one after the other, and none could wait for the next.
@NEEDS_KERNELS
@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "stages", "splits"), [(24, 3, 2), (72, 2, 1)])
def test_kernels_in_the_interpreter(monkeypatch, tokens, stages, splits):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels import layer_parts_mosaic as mosaic
    from pallas_kernels.stream_chain_mosaic import ChainConfig

    monkeypatch.setattr(mosaic, "splits_of", lambda depth, columns, config: splits)
    run = {"config": ChainConfig(1, stages)}
    with plgpu.force_gpu_interpret_mode():
        check(
            functools.partial(mosaic.layer_head, **run),
            functools.partial(mosaic.layer_tail, **run),
            arrays(tokens, 192, 256, 192, 128, 3, jnp.bfloat16),
            5e-2,
        )


@NEEDS_KERNELS
@pytest.mark.parametrize(("tokens", "processors", "splits"), [(32, 132, (2, 4)), (128, 114, (2, 3))])
def test_lowers_for_hopper(tokens, processors, splits):
    """One kernel each, cut for as many programs as the device has multiprocessors: they wait for each other."""
    size, hidden, width = 4096, 12288, 6144
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = [of(s) for s in ((tokens, size), (4, tokens, size), (size,), (size, width))]
    shapes += [of(s) for s in ((size, size), (size, 2, hidden), (hidden, size))]
    counters = jax.ShapeDtypeStruct((36, COUNTERS), jnp.int32)

    def both(x, parts, scale, qkv, out, gate_up, down, counters, layer):
        x, sums, counters = layer_head(x, parts, scale, qkv, counters, layer, eps=EPS)
        return sums, *layer_tail(x, x, out, scale, gate_up, down, counters, layer, eps=EPS)

    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", processors, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(both).trace(*shapes, counters, jax.ShapeDtypeStruct((), jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 2
    for count, columns in zip(splits, (width, size), strict=True):
        assert f"tensor<{count}x{tokens}x{columns}xbf16>" in text
