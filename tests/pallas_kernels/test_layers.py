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


def expected_gather(sources, indices, pool, used=None):
    out = np.array(pool)
    for place in np.ndindex(*indices.shape):
        if (row := int(indices[place])) >= 0 and (used is None or place[-1] < used[place[:-1]]):
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


ENDS = {
    "ragged": np.random.default_rng(3).integers(0, P + 1, (L, B, K)),
    "one row": np.broadcast_to(np.array([P, 0])[:, None], (L, B, K)),
    "one list": np.where(np.arange(L * B * K).reshape(L, B, K) == 6, 5, 0),
    "none": np.zeros((L, B, K)),
    "all": np.full((L, B, K), P),
    "more than there is": np.full((L, B, K), 2**31 - 1),
}


@pytest.mark.parametrize("used", ENDS.values(), ids=ENDS)
def test_nothing_behind_the_used_part_of_a_list_is_copied(used):
    sources, indices, pool = case()
    want = expected_gather(sources, indices, pool, used)
    used = jnp.asarray(used, jnp.int32)
    np.testing.assert_array_equal(jax.jit(gather_layers)(sources, indices, pool, used=used), want)
    for blocks, threads, unroll in ((1, 128, 1), (2, 256, 2), (3, 128, 1), (50, 128, 8)):
        config = gather_kernel.GatherConfig(blocks, threads, unroll)
        got = gather_kernel.gather_layers(sources, indices, pool, used=used, config=config, launch=lanes_numpy.launch)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("first", "dim", "slots"), [(0, 8, 300), (1, 24, 129), (2, 136, 31)])
def test_rows_of_any_size_and_lists_of_any_length(first, dim, slots):
    rng = np.random.default_rng(dim)
    sources = [jnp.asarray(rng.standard_normal((1, B, K, N, dim)), jnp.bfloat16) for _ in range(L - first)]
    indices = rng.integers(-1, N + 1, (L - first, B, K, slots)).astype(np.int32)
    indices[indices == N] = 2**31 - 1  # no entry either
    used = jnp.asarray(rng.integers(0, slots + 1, indices.shape[:3]), jnp.int32)
    pool = jnp.asarray(rng.standard_normal((L, B, K, slots + 3, dim)), jnp.bfloat16)
    want = np.array(pool)
    real = np.where(indices < N, indices, -1)
    want[first:] = expected_gather(sources, real, pool[first:], np.asarray(used))
    where = jnp.int32(first)
    np.testing.assert_array_equal(jax.jit(gather_layers)(sources, jnp.asarray(indices), pool, where, used=used), want)
    for blocks in (1, 2, 5):
        config = gather_kernel.GatherConfig(blocks=blocks, threads=128, unroll=2)
        got = gather_kernel.gather_layers(
            sources, jnp.asarray(indices), pool, where, used, config=config, launch=lanes_numpy.launch
        )
        np.testing.assert_array_equal(got, want)


def test_blocks_take_as_many_tiles_however_short_the_lists(monkeypatch):
    """And none of what is not used: every list has one tile here, and half of them nothing in it."""
    sources, indices, pool = case()
    taken = np.zeros(2, int)
    load = lanes_numpy.NumpyLanes.load

    def counted(self, memory, index, words=1, **options):
        taken[int(self.block[0])] += words == 4
        return load(self, memory, index, words, **options)

    monkeypatch.setattr(lanes_numpy.NumpyLanes, "load", counted)
    used = jnp.asarray(np.arange(L * B * K).reshape(L, B, K) % 2 * P, jnp.int32)
    config = gather_kernel.GatherConfig(blocks=2, threads=128, unroll=1)
    gather_kernel.gather_layers(sources, indices, pool, used=used, config=config, launch=lanes_numpy.launch)
    assert taken.tolist() == [3, 3]


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
@pytest.mark.parametrize("ends", [False, True])
def test_one_launch_for_all_layers_of_host_memory_on_an_h100(ends):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    host = [jax.ShapeDtypeStruct((1, B, K, N, D), jnp.bfloat16, sharding=place) for _ in range(L)]
    indices = jax.ShapeDtypeStruct((L, B, K, P), jnp.int32)
    pool = jax.ShapeDtypeStruct((L, B, K, S, D), jnp.bfloat16)
    used = jax.ShapeDtypeStruct((L, B, K), jnp.int32)

    def gather(indices, pool, used, *host):
        return gather_layers(host, indices, pool, used=used if ends else None, implementation="mosaic_gpu")

    text = lower_for_h100(gather, indices, pool, used, *host, donate_argnums=(1,))
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


@pytest.mark.parametrize("used", [jnp.zeros((L, B, K)), jnp.zeros((B,), jnp.int32)], ids=["dtype", "shape"])
def test_gather_rejects_ends_that_are_no_lists(used):
    with pytest.raises(ValueError, match=r"used must be i32\[3, 2, 2\]"):
        gather_layers(*case(), used=used)


def test_write_is_not_for_traced_code():
    caches, _, block = case()
    with pytest.raises(ValueError, match="only a call outside jit"):
        jax.jit(lambda b: write_layers(b, b, jnp.zeros((B,), jnp.int32), caches, caches, mask=jnp.ones((B,), bool)))(
            block
        )
