"""gather_rows and scatter_rows on the CPU: exact against NumPy loops, in place, in loops and in shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pallas_kernels import gather_kernel, host_memory, lanes_numpy
from pallas_kernels.gather_kernel import GatherConfig
from pallas_kernels.gather_rows import _write_block, gather_rows, scatter_rows, write_block
from pallas_kernels.topk import select_topk

L, B, K, N, D, S = 3, 2, 2, 37, 24, 19


def in_memory(x, kind):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind=kind))


def fresh(rng, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def gather_loop(src, indices, pool, dst=None):
    """The definition, one row at a time."""
    out = np.array(pool)
    for where in np.ndindex(*indices.shape):
        *problem, p = where
        slot = p if dst is None else dst[where]
        if 0 <= indices[where] < src.shape[-2] and 0 <= slot < out.shape[-2]:
            out[(*problem, slot)] = np.asarray(src)[(*problem, indices[where])]
    return out


def scatter_loop(block, positions, cache, mask):
    out = np.array(cache)
    for b, position in enumerate(positions):
        if mask[b] and 0 <= position <= out.shape[-2] - block.shape[-2]:
            out[:, b, :, position : position + block.shape[-2]] = np.asarray(block)[:, b]
    return out


def random_indices(rng, slots, rows=N):
    """Distinct ascending rows, a different number of them for each problem, padded with -1."""
    out = np.full((L, B, K, slots), -1, np.int32)
    for problem in np.ndindex(L, B, K):
        count = rng.integers(0, min(slots, rows) + 1)
        out[problem][:count] = np.sort(rng.choice(rows, count, replace=False))
    return out


INDICES = {
    "random": lambda rng: random_indices(rng, 13),
    "holes": lambda rng: np.where(rng.random((L, B, K, S)) < 0.5, -1, rng.integers(0, N, (L, B, K, S))).astype("i4"),
    "all_minus_one": lambda rng: np.full((L, B, K, S), -1, np.int32),
    "no_slots": lambda rng: np.zeros((L, B, K, 0), np.int32),
    "full_pool": lambda rng: rng.integers(0, N, (L, B, K, S)).astype(np.int32),
    "out_of_range": lambda rng: rng.integers(-2 * N, 3 * N, (L, B, K, 7)).astype(np.int32),
}


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("case", INDICES)
def test_gather_is_exact(case, memory):
    rng = np.random.default_rng(len(case))
    k, v = fresh(rng, L, B, K, N, D), fresh(rng, L, B, K, N, D)
    k_pool, v_pool = fresh(rng, L, B, K, S, D), fresh(rng, L, B, K, S, D)
    indices = INDICES[case](rng)
    got = gather_rows(in_memory(k, memory), in_memory(v, memory), jnp.asarray(indices), k_pool, v_pool)
    np.testing.assert_array_equal(got[0], gather_loop(k, indices, k_pool))
    np.testing.assert_array_equal(got[1], gather_loop(v, indices, v_pool))
    assert all(x.sharding.memory_kind == "device" for x in got)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_gather_to_chosen_slots(memory, dtype):
    """``dst`` appends behind rows that stay: slots beyond the pool and negative ones drop the row."""
    rng = np.random.default_rng(3)
    k, v = (fresh(rng, L, B, K, N, 8, dtype=jnp.float32).astype(dtype) for _ in range(2))
    k_pool, v_pool = (fresh(rng, L, B, K, S, 8, dtype=jnp.float32).astype(dtype) for _ in range(2))
    indices = random_indices(rng, 29)
    dst = np.stack([rng.permutation(40)[:29] - 6 for _ in range(L * B * K)]).reshape(L, B, K, 29).astype(np.int32)
    got = gather_rows(
        in_memory(k, memory), in_memory(v, memory), jnp.asarray(indices), k_pool, v_pool, dst=jnp.asarray(dst)
    )
    np.testing.assert_array_equal(got[0], gather_loop(k, indices, k_pool, dst))
    np.testing.assert_array_equal(got[1], gather_loop(v, indices, v_pool, dst))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_gather_one_layer(memory, traced):
    rng = np.random.default_rng(4)
    k, v = fresh(rng, L, B, K, N, D), fresh(rng, L, B, K, N, D)
    pool = fresh(rng, L, B, K, S, D)
    indices = random_indices(rng, 11)
    layer = jnp.int32(2) if traced else 2
    got, _ = gather_rows(in_memory(k, memory), in_memory(v, memory), jnp.asarray(indices[2]), pool, pool, layer=layer)
    expected = np.array(pool)
    expected[2] = gather_loop(k, indices, pool)[2]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_gather_updates_a_donated_pool_in_place(memory):
    rng = np.random.default_rng(5)
    k = in_memory(fresh(rng, L, B, K, N, D), memory)
    pools = [fresh(rng, L, B, K, S, D) for _ in range(2)]
    indices = random_indices(rng, 13)
    expected = gather_loop(k, indices, pools[0])
    step = jax.jit(lambda i, kp, vp: gather_rows(k, k, i, kp, vp), donate_argnums=(1, 2))
    memory_use = step.lower(jnp.asarray(indices), *pools).compile().memory_analysis()
    assert memory_use.alias_size_in_bytes == 2 * pools[0].nbytes
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    got = step(jnp.asarray(indices), *pools)
    assert [x.unsafe_buffer_pointer() for x in got] == addresses
    assert all(pool.is_deleted() for pool in pools)
    np.testing.assert_array_equal(got[0], expected)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("loop", ["fori_loop", "while_loop"])
def test_gather_layer_by_layer_in_a_loop(memory, loop):
    """MAGE's form: the pool is a loop's carry, filled one layer per turn; the source is closed over."""
    rng = np.random.default_rng(6)
    k, v = (in_memory(fresh(rng, L, B, K, N, D), memory) for _ in range(2))
    pool = fresh(rng, L, B, K, S, D)
    indices = random_indices(rng, 13)

    @jax.jit
    def fill(k, v, indices, pool):
        def body(i, pools):
            return gather_rows(k, v, indices[i], *pools, layer=i)

        if loop == "fori_loop":
            return jax.lax.fori_loop(0, L, body, (pool, pool))
        state = (jnp.int32(0), (pool, pool))
        return jax.lax.while_loop(lambda s: s[0] < L, lambda s: (s[0] + 1, body(*s)), state)[1]

    got = fill(k, v, jnp.asarray(indices), pool)
    np.testing.assert_array_equal(got[0], gather_loop(k, indices, pool))
    np.testing.assert_array_equal(got[1], gather_loop(v, indices, pool))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_gather_and_scatter_under_shard_map(memory):
    """Batch over one mesh axis, KV heads over the other: every problem is local."""
    rng = np.random.default_rng(7)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "heads"))
    spec = PartitionSpec(None, "batch", "heads")
    k, v = fresh(rng, L, B, K, N, D), fresh(rng, L, B, K, N, D)
    pool, block = fresh(rng, L, B, K, S, D), fresh(rng, L, B, K, 5, D)
    indices, positions = random_indices(rng, 13), np.array([2, 30], np.int32)

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, spec, memory_kind=memory))

    @partial(jax.jit, out_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, spec, memory_kind=memory)))
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, spec, spec, spec, spec, PartitionSpec("batch")),
        out_specs=(spec, spec),
    )
    def both(k, v, indices, pool, block, positions):
        k_pool, _ = gather_rows(k, v, indices, pool, pool)
        k_cache, _ = scatter_rows(block, block, positions, k, v)
        return k_pool, k_cache

    got, cache = both(place(k), place(v), jnp.asarray(indices), pool, block, jnp.asarray(positions))
    np.testing.assert_array_equal(got, gather_loop(k, indices, pool))
    np.testing.assert_array_equal(cache, scatter_loop(block, positions, k, [True, True]))


SCATTERS = {
    "ragged": ([3, 18], [True, True]),
    "ends": ([0, N - 5], [True, True]),
    "masked": ([4, 4], [False, True]),
    "all_masked": ([0, 1], [False, False]),
    "does_not_fit": ([-1, N - 4], [True, True]),
}


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("case", SCATTERS)
def test_scatter_is_exact_and_in_place(case, memory):
    rng = np.random.default_rng(8)
    caches = [in_memory(fresh(rng, L, B, K, N, D), memory) for _ in range(2)]
    blocks = [fresh(rng, L, B, K, 5, D) for _ in range(2)]
    positions, mask = SCATTERS[case]
    expected = [scatter_loop(block, positions, cache, mask) for block, cache in zip(blocks, caches, strict=True)]
    addresses = [cache.unsafe_buffer_pointer() for cache in caches]
    write = jax.jit(lambda kb, vb, p, kc, vc, m: scatter_rows(kb, vb, p, kc, vc, mask=m), donate_argnums=(3, 4))
    got = write(*blocks, jnp.asarray(positions, jnp.int32), *caches, jnp.asarray(mask))
    for x, address, cache, value in zip(got, addresses, caches, expected, strict=True):
        assert x.unsafe_buffer_pointer() == address
        assert cache.is_deleted()
        assert x.sharding.memory_kind == memory
        np.testing.assert_array_equal(x, value)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("case", SCATTERS)
def test_write_block_takes_the_caches_over(case, memory):
    rng = np.random.default_rng(14)
    caches = [in_memory(fresh(rng, L, B, K, N, D), memory) for _ in range(2)]
    blocks = [fresh(rng, L, B, K, 5, D) for _ in range(2)]
    positions, mask = SCATTERS[case]
    expected = [scatter_loop(block, positions, cache, mask) for block, cache in zip(blocks, caches, strict=True)]
    addresses = [cache.unsafe_buffer_pointer() for cache in caches]
    got = write_block(*blocks, jnp.asarray(positions, jnp.int32), *caches, mask=jnp.asarray(mask))
    assert [x.unsafe_buffer_pointer() for x in got] == addresses
    assert all(cache.is_deleted() for cache in caches)
    for x, value in zip(got, expected, strict=True):
        assert x.sharding.memory_kind == memory
        np.testing.assert_array_equal(x, value)


def test_write_block_is_not_for_traced_code():
    cache, block = jnp.zeros((L, B, K, N, D)), jnp.zeros((L, B, K, 5, D))
    with pytest.raises(ValueError, match="use scatter_rows inside"):
        jax.jit(write_block)(block, block, jnp.zeros(B, jnp.int32), cache, cache)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_scatter_one_layer_without_mask(memory):
    rng = np.random.default_rng(9)
    cache, block = fresh(rng, L, B, K, N, D), fresh(rng, B, K, 3, D)
    positions = np.array([7, 0], np.int32)
    got, _ = scatter_rows(
        block, block, jnp.asarray(positions), in_memory(cache, memory), in_memory(cache, memory), layer=jnp.int32(1)
    )
    expected = np.array(cache)
    expected[1:2] = scatter_loop(block[None], positions, cache[1:2], [True, True])
    np.testing.assert_array_equal(got, expected)


def test_scatter_of_a_block_longer_than_the_cache_changes_nothing():
    rng = np.random.default_rng(10)
    cache, block = fresh(rng, L, B, K, 4, D), fresh(rng, L, B, K, 5, D)
    got, _ = scatter_rows(block, block, jnp.zeros(B, jnp.int32), cache, cache)
    np.testing.assert_array_equal(got, cache)


# The kernel's own function, run thread by thread in NumPy, with fewer and with more blocks than tiles.
CONFIGS = [GatherConfig(blocks=3, threads=128, unroll=2), GatherConfig(blocks=40, threads=256, unroll=1)]


@pytest.mark.parametrize("config", CONFIGS, ids=["few_blocks", "many_blocks"])
@pytest.mark.parametrize("case", INDICES)
def test_kernel_gather_in_numpy(case, config):
    rng = np.random.default_rng(11)
    k, v = fresh(rng, L, B, K, N, D), fresh(rng, L, B, K, N, D)
    k_pool, v_pool = fresh(rng, L, B, K, S, D), fresh(rng, L, B, K, S, D)
    indices = INDICES[case](rng)
    got = gather_kernel.gather_rows(k, v, indices, k_pool, v_pool, config=config, launch=lanes_numpy.launch)
    np.testing.assert_array_equal(got[0], gather_loop(k, indices, k_pool))
    np.testing.assert_array_equal(got[1], gather_loop(v, indices, v_pool))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.int8])
def test_kernel_gather_to_chosen_slots_of_one_layer_in_numpy(dtype):
    rng = np.random.default_rng(12)
    k, v = (fresh(rng, L, B, K, N, 16, dtype=jnp.float32).astype(dtype) for _ in range(2))
    pool = fresh(rng, L, B, K, S, 16, dtype=jnp.float32).astype(dtype)
    indices = random_indices(rng, 29)[1]
    dst = np.stack([rng.permutation(40)[:29] - 6 for _ in range(B * K)]).reshape(B, K, 29).astype(np.int32)
    got, _ = gather_kernel.gather_rows(
        k, v, indices, pool, pool, dst, jnp.int32(1), config=CONFIGS[0], launch=lanes_numpy.launch
    )
    expected = np.array(pool)
    expected[1] = gather_loop(np.asarray(k)[1:2], indices[None], np.asarray(pool)[1:2], dst[None])[0]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("case", SCATTERS)
@pytest.mark.parametrize("layer", [None, 2])
def test_kernel_scatter_in_numpy(case, layer):
    rng = np.random.default_rng(13)
    cache, block = fresh(rng, L, B, K, N, D), fresh(rng, L, B, K, 5, D)
    positions, mask = SCATTERS[case]
    got, _ = gather_kernel.scatter_rows(
        block if layer is None else block[layer],
        block if layer is None else block[layer],
        jnp.asarray(positions, jnp.int32),
        cache,
        cache,
        jnp.asarray(mask),
        layer,
        config=CONFIGS[0],
        launch=lanes_numpy.launch,
    )
    expected = scatter_loop(block, positions, cache, mask)
    if layer is not None:
        expected = np.concatenate([np.array(cache[:layer]), expected[layer : layer + 1], np.array(cache[layer + 1 :])])
    np.testing.assert_array_equal(got, expected)


def lower_for_h100(f, *arguments, **options):
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    ):
        return jax.jit(f, **options).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


needs_mosaic = pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="needs JAX 0.11: Mosaic GPU kernels")


@needs_mosaic
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
@pytest.mark.parametrize("with_dst", [False, True])
@pytest.mark.parametrize("with_layer", [False, True])
def test_gather_lowers_for_an_h100_in_place(implementation, with_dst, with_layer):
    kv, pool = (jax.ShapeDtypeStruct((L, B, K, n, 128), jnp.bfloat16) for n in (N, S))
    indices = jax.ShapeDtypeStruct((B, K, 7) if with_layer else (L, B, K, 7), jnp.int32)

    def f(k, v, indices, k_pool, v_pool, layer):
        return gather_rows(
            k,
            v,
            indices,
            k_pool,
            v_pool,
            dst=indices + 1 if with_dst else None,
            layer=layer if with_layer else None,
            implementation=implementation,
        )

    text = lower_for_h100(f, kv, kv, indices, pool, pool, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=(3, 4))
    assert "gather_rows" in text
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == 2
    assert text.count("output_operand_alias<") == 2


@needs_mosaic
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_lowers_for_h100s_under_shard_map(implementation, check_vma):
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("x",), (AxisType.Auto,), abstract_device=device)
    heads = PartitionSpec(None, None, "x")

    def f(k, v, indices, k_pool, v_pool, block, positions, importance):
        pools = gather_rows(k, v, indices, k_pool, v_pool, implementation=implementation)
        caches = scatter_rows(block, block, positions, k, v, implementation=implementation)
        return pools, caches, select_topk(importance, 5, 9, implementation=implementation)

    sharded = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(*(heads,) * 6, PartitionSpec(), heads),
        out_specs=((heads, heads), (heads, heads), heads),
        check_vma=check_vma,
    )
    kv, pool, block = (jax.ShapeDtypeStruct((L, B, K, n, 128), jnp.bfloat16) for n in (N, S, 5))
    indices, positions = jax.ShapeDtypeStruct((L, B, K, 7), jnp.int32), jax.ShapeDtypeStruct((B,), jnp.int32)
    arguments = (kv, kv, indices, pool, pool, block, positions, jax.ShapeDtypeStruct((L, B, K, N), jnp.float32))
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(sharded, donate_argnums=(3, 4)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3
    assert text.count("tf.aliasing_output") == 2


@needs_mosaic
def test_host_source_lowers_for_an_h100_without_a_copy():
    space = jax.sharding.NamedSharding(
        Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec(), memory_kind="pinned_host"
    )
    kv = jax.ShapeDtypeStruct((L, B, K, N, 128), jnp.bfloat16, sharding=space)
    pool = jax.ShapeDtypeStruct((L, B, K, S, 128), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((L, B, K, 7), jnp.int32)
    f = partial(gather_rows, implementation="mosaic_gpu")
    text = lower_for_h100(f, kv, kv, indices, pool, pool)
    assert "custom_call @mosaic_gpu" in text
    assert "annotate_device_placement" not in text


@needs_mosaic
def test_scatter_lowers_for_an_h100_in_place():
    block, cache = (jax.ShapeDtypeStruct((L, B, K, n, 64), jnp.float16) for n in (5, N))
    arguments = (block, block, jax.ShapeDtypeStruct((B,), jnp.int32), cache, cache)
    text = lower_for_h100(partial(scatter_rows, implementation="mosaic_gpu"), *arguments, donate_argnums=(3, 4))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == 2


@needs_mosaic
@pytest.mark.parametrize("chosen", ["auto", "mosaic_gpu"])
def test_write_block_lowers_for_an_h100_in_place_in_host_memory(chosen):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    space = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    block = jax.ShapeDtypeStruct((L, B, K, 5, 64), jnp.float16)
    cache = jax.ShapeDtypeStruct((L, B, K, N, 64), jnp.float16, sharding=space)
    rest = (jax.ShapeDtypeStruct((B,), jnp.bool_), jax.ShapeDtypeStruct((), jnp.int32))
    block = jax.ShapeDtypeStruct(block.shape[1:], block.dtype)
    arguments = (block, block, jax.ShapeDtypeStruct((B,), jnp.int32), cache, cache, *rest)
    text = lower_for_h100(partial(_write_block, chosen=chosen), *arguments, donate_argnums=(3, 4))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == 2
    assert text.count("output_operand_alias<") == 2
    assert text.count('mhlo.memory_kind = "pinned_host"') == 4  # the caches, coming and going
    assert "annotate_device_placement" not in text


def test_the_kernel_is_refused_by_name_where_it_cannot_run():
    with pytest.raises(NotImplementedError, match=r"need JAX 0\.11|need an NVIDIA GPU"):
        gather_rows(**arrays(), implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation must be"):
        gather_rows(**arrays(), implementation="triton")


@needs_mosaic
def test_the_kernel_refuses_rows_of_a_broken_size_and_host_caches():
    kv = jax.ShapeDtypeStruct((L, B, K, N, 12), jnp.bfloat16)
    indices = jax.ShapeDtypeStruct((L, B, K, 7), jnp.int32)
    with pytest.raises(NotImplementedError, match="16-byte chunks"):
        lower_for_h100(partial(gather_rows, implementation="mosaic_gpu"), kv, kv, indices, kv, kv)
    assert "mosaic_gpu" not in lower_for_h100(gather_rows, kv, kv, indices, kv, kv)
    cache = in_memory(np.zeros((L, B, K, N, D), "f"), "pinned_host")
    block = jnp.zeros((L, B, K, 5, D))
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    with (
        jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
        ),
        pytest.raises(NotImplementedError, match="device memory only"),
    ):
        scatter_rows(block, block, jnp.zeros(B, jnp.int32), cache, cache, implementation="mosaic_gpu")


def arrays(**changed):
    x = {
        "k_src": jnp.zeros((L, B, K, N, D)),
        "v_src": jnp.zeros((L, B, K, N, D)),
        "indices": jnp.zeros((L, B, K, 5), jnp.int32),
        "k_pool": jnp.zeros((L, B, K, S, D)),
        "v_pool": jnp.zeros((L, B, K, S, D)),
    }
    return x | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v_src": jnp.zeros((L, B, K, N + 1, D))}, "source: K and V"),
        ({"k_pool": jnp.zeros((L, B, K, S, D), jnp.bfloat16)}, "pool: K and V"),
        ({"k_pool": jnp.zeros((L, B, 1, S, D)), "v_pool": jnp.zeros((L, B, 1, S, D))}, "differ in length only"),
        ({"indices": jnp.zeros((L, B, K, 5), jnp.int16)}, "indices must be i32"),
        ({"indices": jnp.zeros((L, B, K, S + 1), jnp.int32)}, "do not fit a pool"),
        ({"dst": jnp.zeros((L, B, K, 4), jnp.int32)}, "must have one shape"),
        ({"layer": L, "indices": jnp.zeros((B, K, 5), jnp.int32)}, "outside"),
        ({"layer": 1.0, "indices": jnp.zeros((B, K, 5), jnp.int32)}, "integer scalar"),
        ({"layer": 1}, "indices must be i32"),
        ({"k_pool": in_memory(np.zeros((L, B, K, S, D), "f"), "pinned_host")}, "pool: K and V must be in the same"),
    ],
)
def test_gather_rejects(changed, message):
    with pytest.raises(ValueError, match=message):
        gather_rows(**arrays(**changed))


def test_gather_rejects_a_pool_in_host_memory():
    pool = in_memory(np.zeros((L, B, K, S, D), "f"), "pinned_host")
    with pytest.raises(ValueError, match="pool must be in device memory"):
        gather_rows(**arrays(k_pool=pool, v_pool=pool))


def test_a_kernel_is_given_host_memory_inside_jit_only():
    with pytest.raises(RuntimeError, match="only inside jax.jit; wrap the call in jax.jit"):
        host_memory.read_in_place(in_memory(np.zeros((2, 16), "f"), "pinned_host"))


def test_gather_rejects_mixed_dtypes():
    pool = jnp.zeros((L, B, K, S, D), jnp.bfloat16)
    with pytest.raises(ValueError, match="one dtype"):
        gather_rows(**arrays(k_pool=pool, v_pool=pool))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k_block": jnp.zeros((L, B, 1, 5, D))}, "k_block must be"),
        ({"v_block": jnp.zeros((L, B, K, 5, D), jnp.bfloat16)}, "v_block must be"),
        ({"positions": jnp.zeros((B + 1,), jnp.int32)}, "positions must be"),
        ({"mask": jnp.zeros((B,), jnp.int32)}, "mask must be"),
    ],
)
def test_scatter_rejects(changed, message):
    x = {
        "k_block": jnp.zeros((L, B, K, 5, D)),
        "v_block": jnp.zeros((L, B, K, 5, D)),
        "positions": jnp.zeros((B,), jnp.int32),
        "k_cache": jnp.zeros((L, B, K, N, D)),
        "v_cache": jnp.zeros((L, B, K, N, D)),
    }
    with pytest.raises(ValueError, match=message):
        scatter_rows(**(x | changed))
