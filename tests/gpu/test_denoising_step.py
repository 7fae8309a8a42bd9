"""The kernels of a denoising step on the card: skinny matmuls, what lies between them, a forward made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import rms_error
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.config import ModelConfig, MoEConfig, RopeConfig
from herald_jax.model import bind
from herald_jax.streamed import streams
from pallas_kernels.fused_rows import Destination, add_norm, project_heads, write_kv
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul
from tests.herald_jax import tiny

pytestmark = pytest.mark.gpu


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16, scale: float = 1.0) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [scale * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# Tokens that fill no tile, one and a part, up to four; columns for less than one program of several groups; few, many
# steps.
@pytest.mark.parametrize("tokens", [8, 40, 64, 72, 128, 136, 200, 256])
@pytest.mark.parametrize(
    ("depth", "columns", "dtype"), [(64, 128, "bfloat16"), (832, 1152, "float16"), (4096, 4096, "bfloat16")]
)
def test_matmuls(tokens: int, depth: int, columns: int, dtype: str) -> None:
    x, w = arrays(tokens, (tokens, depth), (depth, columns), dtype=dtype, scale=depth**-0.25)
    run = jax.jit(lambda x, w: stream_matmul(x, w, implementation="mosaic_gpu"))
    got = run(x, w)
    wanted = jnp.einsum("te,ef->tf", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert rms_error(jnp.sum(got.astype(jnp.float32), axis=0), wanted) < tolerance
    assert_same(got, run(x, w))
    gates = w.reshape(depth, 2, columns // 2)
    if columns // 2 % 64 == 0:
        gated = jax.jit(lambda x, w: gated_matmul(x, w, implementation="mosaic_gpu"))(x, gates)
        halves = wanted.reshape(tokens, 2, columns // 2)
        assert rms_error(gated, jax.nn.silu(halves[:, 0]) * halves[:, 1]) < tolerance


# Programs of 128 tokens, where there are as many, fewer or twice as many; columns that the last program shares with the
# one before; uneven shares of the steps.
@pytest.mark.parametrize("tokens", [72, 128, 256])
@pytest.mark.parametrize("columns", [128, 192, 256, 320])
def test_matmuls_in_programs_of_128_tokens(columns: int, tokens: int) -> None:
    from pallas_kernels.stream_matmul_wide import WideConfig

    x, w = arrays(columns, (tokens, 1088), (1088, 1152), scale=1088**-0.25)
    wanted = jnp.einsum("te,ef->tf", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    tolerance = 4 * float(jnp.finfo(jnp.bfloat16).eps)
    if columns <= 256:
        config = WideConfig(columns, 3, 4, 128)
        run = jax.jit(lambda x, w: stream_matmul(x, w, implementation="mosaic_gpu", config=config))
        got = run(x, w)
        assert got.shape == (3, tokens, 1152)
        assert rms_error(jnp.sum(got.astype(jnp.float32), axis=0), wanted) < tolerance
        assert_same(got, run(x, w))
    config = WideConfig(columns, 1, 4, 128)
    gates = w.reshape(1088, 2, 576)
    gated = jax.jit(lambda x, w: gated_matmul(x, w, implementation="mosaic_gpu", config=config))(x, gates)
    halves = wanted.reshape(tokens, 2, 576)
    assert rms_error(gated, jax.nn.silu(halves[:, 0]) * halves[:, 1]) < tolerance


@pytest.mark.parametrize(("rows", "size", "splits"), [(1, 8, 2), (33, 1544, 0), (128, 4096, 4), (5, 16384, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_add_norm(rows: int, size: int, splits: int, dtype: str) -> None:
    x, scale, parts = arrays(rows, (rows, size), (size,), (splits, rows, size), dtype=dtype)
    args = (x, parts if splits else None, scale)
    got = add_norm(*args, eps=1e-6, implementation="mosaic_gpu")
    for a, b in zip(got, add_norm(*args, eps=1e-6, implementation="xla"), strict=True):
        assert rms_error(a, b) < float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(("dim", "group", "norm"), [(64, 1, False), (128, 7, True), (128, 4, False)])
@pytest.mark.parametrize("keep", [False, True])
def test_heads_and_cache(dim: int, group: int, norm: bool, keep: bool) -> None:
    batch, tokens, heads = 3, 9, 2
    width, rows = heads * (group + 2) * dim, batch * tokens
    parts, bias, q_scale, k_scale = arrays(dim, (2, rows, width), (width,), (dim,), (dim,))
    angles = tuple(arrays(1, *[(rows, dim // 2)] * 2, dtype=jnp.float32))
    caches = arrays(2, *[(4, batch, heads, 64, dim)] * 2)
    kept = jax.random.bernoulli(jax.random.key(3), 0.5, (batch, tokens)) if keep else None
    into = Destination(*caches, jnp.int32(2), jnp.asarray([0, 55, 13], jnp.int32), tokens, kept)

    def run(implementation: str) -> Any:
        args = (parts, None if norm else bias, *((q_scale, k_scale) if norm else (None, None)), angles)
        options = {"group": group, "eps": 1e-6, "dtype": jnp.bfloat16, "implementation": implementation}
        q, k, v = project_heads(*args, **options)
        written = write_kv(*(x.reshape(batch, tokens, heads, dim) for x in (k, v)), into, implementation=implementation)
        return q, k, v, *written, *project_heads(*args, into=into, **options)

    got = run("mosaic_gpu")
    for a, b in zip(got, run("xla"), strict=True):
        assert rms_error(a, b) < 4e-3
    assert_same(got[3:5], got[6:])  # written by the head kernel itself
    for before, after in zip(caches, got[6:], strict=True):
        np.testing.assert_array_equal(np.asarray(after[:2], np.float32), np.asarray(before[:2], np.float32))


# 128 experts behind a first layer without them, and half of each head rotated.
EXPERTS = dataclasses.replace(
    tiny.SDAR,
    head_dim=128,
    rope=RopeConfig(theta=1e4, rotary_dim=64),
    moe=MoEConfig(128, 8, 64, "sigmoid", True, 2.5, True, 8, 4, shared_size=128, first_dense_layers=1),
)


def typical_error(value: Any, reference: Any) -> float:
    """The median over vectors of how far each is off, but for those that are not at all: cache entries nobody wrote."""
    value, reference = (np.asarray(x, np.float64) for x in (value, reference))
    off = np.sqrt(np.sum((value - reference) ** 2, axis=-1) / np.sum(reference**2, axis=-1))
    return float(np.median(off[off > 0]))


@pytest.mark.parametrize(
    ("form", "batch"),
    [*((form, batch) for form in ("sdar", "fast_dllm") for batch in (1, 3, 4, 10)), ("experts", 1), ("experts", 10)],
)
def test_a_forward_is_as_exact_as_the_ordinary_one(form: str, batch: int) -> None:
    """Both are roundings of the same float32 forward, and about equally far from it. With experts the typical token is:
    some, rounded, choose others. Ten rows are more than the matmuls' own kernels take."""
    config = dataclasses.replace(
        EXPERTS if form == "experts" else tiny.FORMS[form],
        num_layers=3, hidden_size=256, head_dim=128, intermediate_size=320, dtype="bfloat16",
    )  # fmt: skip
    error = typical_error if form == "experts" else rms_error
    exact = dataclasses.replace(config, dtype="float32")
    params = tiny.params(config)
    tokens = jax.random.randint(jax.random.key(0), (batch, 32), 0, 90)
    start = jnp.asarray([100, 0, 57, 3, 224, 64, 200, 1, 31, 32][:batch], jnp.int32)
    kv = DeviceKV(*arrays(5, *[(3, batch, config.num_kv_heads, 256, 128)] * 2))

    def run(config: ModelConfig, implementation: str | None) -> Any:
        attend = DenseAttend(start, (start + 32)[:, None], implementation=implementation)
        assert streams(config, attend, tokens) == (implementation is None)
        positions = start[:, None] + jnp.arange(32)[None]
        # As they are but for the exact run: a router's weights are float32 in all of them.
        args = jax.tree.map(lambda x: jnp.asarray(x, config.dtype if config is exact else x.dtype), (params, kv))
        hidden, cache = jax.jit(lambda params, kv: bind(config, params)(tokens, positions, attend, kv))(*args)
        return hidden, cache.k, cache.v

    for ours, plain, truth in zip(run(config, None), run(config, "xla"), run(exact, "xla"), strict=True):
        assert error(ours, truth) < 1.2 * error(plain, truth) + 1e-3
