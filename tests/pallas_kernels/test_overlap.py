"""Which kernels start before the one they follow has ended, as lowered for an H100. The rest only the card shows."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from pallas_kernels import dispatch, overlap
from pallas_kernels.block_attention import block_attention
from pallas_kernels.fused_rows import add_norm, project_heads
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul
from pallas_kernels.topk import select_topk

pytestmark = pytest.mark.skipif(dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: Mosaic GPU kernels")

OF = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)


def kernels(f, *arguments) -> dict[str, bool]:
    """Every Mosaic kernel of `f` lowered for an H100 by name, and whether it is launched early."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @mosaic_gpu\w*\(.*", text)
    names = [re.search(r"c_interface\\00(\w+)_mosaic_gpu\\00", call) for call in calls]
    assert all(names)
    return {name[1]: "uses_pdl" in call for name, call in zip(names, calls, strict=True) if name}


def layer(x, w, gates, scale, angles, cache):
    """One after the other what a streamed layer is made of, on shapes that need not fit each other."""
    x, y = add_norm(x, stream_matmul(x, w), scale, eps=1e-6)
    gated = gated_matmul(y, gates)
    parts = stream_matmul(x, jnp.tile(w, (1, 2))[:, :768])
    q, _, _ = project_heads(parts, None, None, None, (angles, angles), group=4, eps=1e-6, dtype=x.dtype)
    attended = block_attention(q.reshape(1, 32, 4, 128), cache, cache, jnp.asarray([4000])).out
    return gated, attended, select_topk(angles, jnp.full((32,), 8, jnp.int32), capacity=8)


ARGUMENTS = (
    OF((32, 512)), OF((512, 512)), OF((512, 2, 128)), OF((512,)), jax.ShapeDtypeStruct((32, 64), jnp.float32),
    OF((1, 1, 4096, 128)),
)  # fmt: skip


def test_which_kernels_start_early():
    """Those of a layer, inside the scope only, though attention is a jitted function traced once per shape."""

    def early(*arguments):
        with overlap.overlapped():
            return layer(*arguments)

    found = kernels(early, *ARGUMENTS)
    names = {"stream_matmul", "stream_matmul_gated", "add_norm", "project_heads", "block_attention"}
    finish = {"block_attention_finish"} & set(found)
    assert {name for name, is_early in found.items() if is_early} == names | finish
    assert kernels(layer, *ARGUMENTS) == dict.fromkeys(found, False)


def test_the_scope_ends_with_an_error():
    seen = []

    def fail():
        with overlap.overlapped():
            seen.append(overlap.active())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [*seen, overlap.active()] == [True, False]
