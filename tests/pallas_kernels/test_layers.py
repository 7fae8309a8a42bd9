"""Gather and scatter of caches with one array per layer: against NumPy, the kernel's own logic, and for an H100."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather_kernel, lanes_numpy
from pallas_kernels.layers import _write_layers, gather_layers, write_layers
from tests.pallas_kernels.test_gather_rows import lower_for_h100, needs_mosaic

L, B, K, N, D, S, P = 3, 2, 2, 40, 16, 24, 17


def case(dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    sources = [make(1, B, K, N, D) for _ in range(L)]
    indices = rng.integers(-1, N, (L, B, K, P)).astype(np.int32)
    return sources, jnp.asarray(indices), make(L, B, K, S, D)


def expected_gather(sources, indices, pool):
    out = np.array(pool)
    for place in np.ndindex(*indices.shape):
        if (row := int(indices[place])) >= 0:
            out[place] = np.asarray(sources[place[0]])[0, place[1], place[2], row]
    return out


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gather_is_exact(dtype):
    sources, indices, pool = case(dtype)
    got = jax.jit(gather_layers)(sources, indices, pool)
    np.testing.assert_array_equal(got, expected_gather(sources, indices, pool))


@pytest.mark.parametrize("layers", [1, 3])
def test_the_gather_kernel_in_numpy(layers):
    sources, indices, pool = case()
    sources, indices, pool = sources[:layers], indices[:layers], pool[:layers]
    config = gather_kernel.GatherConfig(blocks=3, threads=128, unroll=2)
    got = gather_kernel.gather_layers(sources, indices, pool, config=config, launch=lanes_numpy.launch)
    np.testing.assert_array_equal(got, expected_gather(sources, indices, pool))


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 2), (2, 1)])
def test_some_layers_of_a_pool_are_filled_and_the_others_left_alone(first, count):
    sources, indices, pool = case()
    sources, indices = sources[:count], indices[:count]
    want = np.array(pool)
    want[first : first + count] = expected_gather(sources, indices, pool[first : first + count])
    where = jnp.int32(first)
    np.testing.assert_array_equal(jax.jit(gather_layers)(sources, indices, pool, where), want)
    config = gather_kernel.GatherConfig(blocks=3, threads=128, unroll=2)
    got = gather_kernel.gather_layers(sources, indices, pool, where, config=config, launch=lanes_numpy.launch)
    np.testing.assert_array_equal(got, want)


def test_write_takes_the_caches_over_and_leaves_masked_rows_alone():
    caches, _, _ = case(jnp.float32)
    values, _, _ = case(jnp.float32, seed=1)
    rng = np.random.default_rng(2)
    blocks = [jnp.asarray(rng.standard_normal((L, B, K, 8, D)), jnp.float32) for _ in range(2)]
    before = [np.array(x) for x in (*caches, *values)]
    start, mask = jnp.array([5, 32], jnp.int32), jnp.array([True, True])
    k, v = write_layers(*blocks, start, caches, values, mask=mask)
    assert all(x.is_deleted() for x in (*caches, *values))
    for i, old in enumerate(before):
        for row in range(B):
            old[0, row, :, start[row] : start[row] + 8] = blocks[i // L][i % L, row]
        np.testing.assert_array_equal((*k, *v)[i], old)
    k, v = write_layers(*blocks, start + 1, k, v, mask=jnp.array([False, True]))  # the second row no longer fits
    for x, old in zip((*k, *v), before, strict=True):
        np.testing.assert_array_equal(x, old)


@needs_mosaic
def test_one_launch_for_all_layers_of_host_memory_on_an_h100():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    host = [jax.ShapeDtypeStruct((1, B, K, N, D), jnp.bfloat16, sharding=place) for _ in range(L)]
    indices = jax.ShapeDtypeStruct((L, B, K, P), jnp.int32)
    pool = jax.ShapeDtypeStruct((L, B, K, S, D), jnp.bfloat16)
    text = lower_for_h100(
        lambda *args: gather_layers(args[:L], *args[L:], implementation="mosaic_gpu"), *host, indices, pool,
        donate_argnums=(L + 1,),
    )  # fmt: skip
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "annotate_device_placement" not in text  # nothing is moved but by the kernel


@needs_mosaic
def test_the_write_lowers_its_kernel_once():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    host = tuple(jax.ShapeDtypeStruct((1, B, K, N, D), jnp.bfloat16, sharding=place) for _ in range(L))
    block = jax.ShapeDtypeStruct((L, B, K, 8, D), jnp.bfloat16)
    start, mask = jax.ShapeDtypeStruct((B,), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.bool_)
    write = partial(_write_layers, chosen="mosaic_gpu")
    text = lower_for_h100(write, block, block, start, host, host, mask, donate_argnums=(3, 4))
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, i, p: (s[:2], i, p), "one array per layer was expected, 3 of them, got 2"),
        (lambda s, i, p: (s, i, p[:2], jnp.int32(0)), "one array per layer was expected, at most 2 of them, got 3"),
        (lambda s, i, p: (s[:2], i, p, jnp.int32(1)), r"indices must be i32\[2, 2, 2"),
        (lambda s, i, p: ([s[0], s[1], s[2].astype(jnp.float16)], i, p), "layer 2 is float16"),
        (lambda s, i, p: (s, i[:2], p), "indices must be i32"),
        (lambda s, i, p: (s, jnp.zeros((L, B, K, S + 1), jnp.int32), p), "P <= 24"),
    ],
    ids=["layers", "too many", "some indices", "dtype", "indices", "capacity"],
)
def test_gather_rejects(change, message):
    with pytest.raises(ValueError, match=message):
        gather_layers(*change(*case()))


def test_write_is_not_for_traced_code():
    caches, _, block = case()
    with pytest.raises(ValueError, match="only a call outside jit"):
        jax.jit(lambda b: write_layers(b, b, jnp.zeros((B,), jnp.int32), caches, caches, mask=jnp.ones((B,), bool)))(
            block
        )
