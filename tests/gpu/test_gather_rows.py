"""gather_rows and scatter_rows on the GPU: bit-exact from device and host memory, in place, and without copies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import gather_kernel
from pallas_kernels.gather_rows import GatherConfig, gather_rows, scatter_rows, write_block
from pallas_kernels.layers import gather_layers

pytestmark = pytest.mark.gpu

L, B, K, N, S = 3, 2, 2, 1111, 203


def in_memory(x, kind):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind=kind))


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def random(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def random_indices(rng, slots):
    """A different number of distinct rows in each problem, -1 between them, one problem empty and one full."""
    out = np.full((L, B, K, slots), -1, np.int32)
    for i, problem in enumerate(np.ndindex(L, B, K)):
        count = {0: 0, 1: slots}.get(i, int(rng.integers(1, slots)))
        out[problem][np.sort(rng.choice(slots, count, replace=False))] = np.sort(rng.choice(N, count, replace=False))
    return out


def expected_rows(src, indices, pool, dst=None):
    src, out = np.asarray(src), np.array(pool)
    for where in np.ndindex(*indices.shape):
        *problem, p = where
        slot = p if dst is None else dst[where]
        if 0 <= indices[where] < src.shape[-2] and 0 <= slot < out.shape[-2]:
            out[(*problem, slot)] = src[(*problem, indices[where])]
    return out


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(128, "bfloat16"), (64, "float16"), (96, "bfloat16"), (256, "float32"), (8, "bfloat16")]
)
def test_bit_exact(dim, dtype, memory):
    rng = np.random.default_rng(dim)
    k, v = (random(rng, L, B, K, N, dim, dtype=dtype) for _ in range(2))
    k_pool, v_pool = (random(rng, L, B, K, S, dim, dtype=dtype) for _ in range(2))
    indices = random_indices(rng, 177)
    got = gather_rows(
        in_memory(k, memory), in_memory(v, memory), jnp.asarray(indices), k_pool, v_pool, implementation="mosaic_gpu"
    )
    np.testing.assert_array_equal(bits(got[0]), bits(expected_rows(k, indices, k_pool)))
    np.testing.assert_array_equal(bits(got[1]), bits(expected_rows(v, indices, v_pool)))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_host_and_device_sources_fill_identical_pools_at_every_cut(memory):
    rng = np.random.default_rng(1)
    k = random(rng, L, B, K, N, 128)
    pool = random(rng, L, B, K, S, 128)
    indices = jnp.asarray(random_indices(rng, S))
    want = gather_rows(k, k, indices, pool, pool, implementation="xla")
    for blocks, threads, unroll in ((1, 128, 1), (7, 256, 8), (300, 1024, 2)):
        got = gather_rows(
            in_memory(k, memory),
            in_memory(k, memory),
            indices,
            pool,
            pool,
            implementation="mosaic_gpu",
            config=GatherConfig(blocks=blocks, threads=threads, unroll=unroll),
        )
        np.testing.assert_array_equal(bits(got[0]), bits(want[0]))


@pytest.mark.parametrize(("batch", "heads", "slots", "dim"), [(5, 3, 1777, 128), (1, 1, 4096, 64), (8, 2, 515, 96)])
def test_layers_are_gathered_as_far_as_their_lists_are_used(batch, heads, slots, dim):
    """Rows of very different lengths, some lists empty, and entries behind the ends, which must not be copied."""
    rng = np.random.default_rng(dim)
    layers = [random(rng, 1, batch, heads, 2 * slots + 1, dim) for _ in range(L)]
    indices = rng.integers(-1, 2 * slots + 1, (L, batch, heads, slots)).astype(np.int32)
    most = np.array([slots, 17, 0, slots // 3, 1, slots - 1, 100, 513])[:batch, None]
    used = np.minimum(rng.integers(0, slots + 1, (L, batch, heads)), most)
    used[0] = most
    pool = random(rng, L + 1, batch, heads, slots + 40, dim)
    want = np.array(pool)
    for place in np.ndindex(L, batch, heads):
        rows = indices[place][: used[place]]
        there = np.flatnonzero(rows >= 0)
        want[place[0] + 1, place[1], place[2], there] = np.asarray(layers[place[0]])[0, place[1], place[2], rows[there]]
    host = [in_memory(x, "pinned_host") for x in layers]
    lists, ends = jnp.asarray(indices), jnp.asarray(used, jnp.int32)

    @partial(jax.jit, donate_argnums=0)
    def fill(pool, host, lists, ends):
        return gather_layers(host, lists, pool, jnp.int32(1), used=ends, implementation="mosaic_gpu")

    lowered = fill.lower(pool, host, lists, ends)
    assert "gather_layers" in lowered.as_text()
    got = lowered.compile()(pool + 0, host, lists, ends)
    np.testing.assert_array_equal(bits(got), bits(want))
    for blocks, threads, unroll in ((1, 128, 1), (5, 384, 8), (64, 1024, 2)):
        config = GatherConfig(blocks=blocks, threads=threads, unroll=unroll)
        cut = jax.jit(partial(gather_kernel.gather_layers, config=config))
        np.testing.assert_array_equal(bits(cut(host, lists, pool, jnp.int32(1), ends)), bits(want))
    beyond = jnp.asarray(np.where(np.arange(slots) < used[..., None], indices, -1))
    for other, end in ((lists, ends), (beyond, None)):
        plain = gather_layers(layers, other, pool, jnp.int32(1), used=end, implementation="xla")
        np.testing.assert_array_equal(bits(plain), bits(want))
    without = jax.jit(partial(gather_layers, implementation="mosaic_gpu"))(host, beyond, pool, jnp.int32(1))
    np.testing.assert_array_equal(bits(without), bits(want))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_chosen_slots_and_one_layer(memory):
    rng = np.random.default_rng(2)
    k = random(rng, L, B, K, N, 128)
    pool = random(rng, L, B, K, S, 128)
    indices = random_indices(rng, 150)
    dst = np.stack([rng.permutation(300)[:150] - 40 for _ in range(L * B * K)]).reshape(L, B, K, 150).astype(np.int32)
    source = in_memory(k, memory)
    got, _ = gather_rows(
        source, source, jnp.asarray(indices), pool, pool, dst=jnp.asarray(dst), implementation="mosaic_gpu"
    )
    np.testing.assert_array_equal(bits(got), bits(expected_rows(k, indices, pool, dst)))
    got, _ = gather_rows(
        source, source, jnp.asarray(indices[2]), pool, pool, layer=jnp.int32(2), implementation="mosaic_gpu"
    )
    want = np.array(pool)
    want[2] = expected_rows(k, indices, pool)[2]
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_in_place_inside_a_loop_and_nothing_of_the_source_is_copied(memory):
    rng = np.random.default_rng(3)
    k = random(rng, L, B, K, N, 128)
    indices = random_indices(rng, 100)
    pools = [jnp.zeros((L, B, K, S, 128), jnp.bfloat16) for _ in range(2)]
    source = in_memory(k, memory)

    @partial(jax.jit, donate_argnums=(3, 4))
    def fill(k, v, indices, k_pool, v_pool):
        def body(i, pools):
            return gather_rows(k, v, indices[i], *pools, layer=i, implementation="mosaic_gpu")

        return jax.lax.fori_loop(0, L, body, (k_pool, v_pool))

    compiled = fill.lower(source, source, jnp.asarray(indices), *pools).compile()
    assert "gather_rows" in compiled.as_text()
    use = compiled.memory_analysis()
    assert use.alias_size_in_bytes == 2 * pools[0].nbytes
    assert use.temp_size_in_bytes < pools[0].nbytes // 4
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    want = expected_rows(k, indices, pools[0])
    got = compiled(source, source, jnp.asarray(indices), *pools)
    assert [x.unsafe_buffer_pointer() for x in got] == addresses
    for x in got:
        np.testing.assert_array_equal(bits(x), bits(want))


@pytest.mark.parametrize(
    ("memory", "implementation"), [("device", "mosaic_gpu"), ("device", "xla"), ("pinned_host", None)]
)
def test_scatter_in_place(memory, implementation):
    rng = np.random.default_rng(4)
    cache, block = random(rng, L, B, K, N, 128), random(rng, L, B, K, 32, 128)
    k_cache, v_cache = in_memory(cache + 0, memory), in_memory(cache + 0, memory)
    write = jax.jit(
        lambda b, p, kc, vc, m: scatter_rows(b, b, p, kc, vc, mask=m, implementation=implementation),
        donate_argnums=(2, 3),
    )
    want = np.array(cache)
    address = k_cache.unsafe_buffer_pointer()
    for positions, mask in (([5, 1000], [True, True]), ([40, 40], [True, False]), ([-1, N - 31], [True, True])):
        for b in range(B):
            if mask[b] and 0 <= positions[b] <= N - 32:
                want[:, b, :, positions[b] : positions[b] + 32] = np.asarray(block)[:, b]
        k_cache, v_cache = write(block, jnp.asarray(positions, jnp.int32), k_cache, v_cache, jnp.asarray(mask))
    assert k_cache.unsafe_buffer_pointer() == address
    assert k_cache.sharding.memory_kind == memory
    np.testing.assert_array_equal(bits(k_cache), bits(want))
    np.testing.assert_array_equal(bits(v_cache), bits(want))


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu", "xla"])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_write_block_in_place(memory, implementation):
    rng = np.random.default_rng(5)
    cache, block = random(rng, L, B, K, N, 128), random(rng, L, B, K, 32, 128)
    k_cache, v_cache = in_memory(cache + 0, memory), in_memory(cache + 0, memory)
    want = np.array(cache)
    addresses = [k_cache.unsafe_buffer_pointer(), v_cache.unsafe_buffer_pointer()]
    for positions, mask in (([5, 1000], [True, True]), ([40, 40], [True, False]), ([-1, N - 31], [True, True])):
        for b in range(B):
            if mask[b] and 0 <= positions[b] <= N - 32:
                want[:, b, :, positions[b] : positions[b] + 32] = np.asarray(block)[:, b]
        k_cache, v_cache = write_block(
            block,
            block,
            jnp.asarray(positions, jnp.int32),
            k_cache,
            v_cache,
            mask=jnp.asarray(mask),
            implementation=implementation,
        )
    want[1, :, :, 7:39] = np.asarray(block)[1]
    k_cache, v_cache = write_block(
        block[1], block[1], jnp.full(B, 7, jnp.int32), k_cache, v_cache, layer=1, implementation=implementation
    )
    assert [k_cache.unsafe_buffer_pointer(), v_cache.unsafe_buffer_pointer()] == addresses
    for x in (k_cache, v_cache):
        assert x.sharding.memory_kind == memory
        np.testing.assert_array_equal(bits(x), bits(want))
    # The rows come back out of the updated cache, through the kernel that reads it in place.
    pool = jnp.zeros((L, B, K, S, 128), jnp.bfloat16)
    indices = random_indices(rng, 100)
    got, _ = gather_rows(k_cache, v_cache, jnp.asarray(indices), pool, pool, implementation="mosaic_gpu")
    np.testing.assert_array_equal(bits(got), bits(expected_rows(want, indices, pool)))


def test_the_default_here_is_the_kernel():
    k = jnp.zeros((L, B, K, N, 128), jnp.bfloat16)
    pool = jnp.zeros((L, B, K, S, 128), jnp.bfloat16)
    text = jax.jit(gather_rows).lower(k, k, jnp.zeros((L, B, K, 9), jnp.int32), pool, pool).as_text()
    assert "custom_call @mosaic_gpu" in text
    assert "gather_rows" in text
