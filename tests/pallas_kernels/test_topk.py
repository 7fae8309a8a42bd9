"""select_topk on the CPU: exact against a stable NumPy sort, with ties, NaN, lengths and ragged counts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels import lanes_numpy, topk_kernel
from pallas_kernels.topk import select_topk
from pallas_kernels.topk_kernel import TopkConfig


def select_loop(importance, counts, lengths, capacity):
    """The definition, one problem at a time."""
    importance = np.asarray(importance)
    out = np.full((*importance.shape[:-1], capacity), -1, np.int32)
    counts = np.broadcast_to(counts, importance.shape[:-1])
    lengths = np.broadcast_to(lengths, importance.shape[:-1])
    for problem in np.ndindex(*importance.shape[:-1]):
        row = importance[problem]
        eligible = [j for j in range(min(lengths[problem], row.size)) if row[j] > -np.inf]
        row = np.where(np.abs(row) < np.finfo(np.float32).tiny, 0, row)  # subnormals count as zero
        best = sorted(eligible, key=lambda j, row=row: (-row[j], j))[: max(0, min(counts[problem], capacity))]
        out[problem][: len(best)] = sorted(best)
    return out


def softmax_like(rng, *shape):
    logits = rng.standard_normal(shape) * 4
    return (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).astype(np.float32)


VALUES = {
    "softmax": softmax_like,
    "ties": lambda rng, *shape: rng.integers(0, 4, shape).astype(np.float32),
    "all_equal": lambda rng, *shape: np.full(shape, 0.25, np.float32),
    "zeros": lambda rng, *shape: np.where(rng.random(shape) < 0.5, 0.0, -0.0).astype(np.float32),
    "signed": lambda rng, *shape: rng.standard_normal(shape).astype(np.float32),
    "subnormal": lambda rng, *shape: rng.integers(-3, 4, shape).astype(np.float32) * np.float32(1e-45),
    "specials": lambda rng, *shape: rng.choice(
        np.array([np.nan, -np.nan, np.inf, -np.inf, 0, 1, -1, 3e38, -3e38], np.float32), shape
    ),
}


@pytest.mark.parametrize("n", [1, 63, 257])
@pytest.mark.parametrize("case", VALUES)
def test_exact(case, n):
    rng = np.random.default_rng(n)
    importance = VALUES[case](rng, 3, 2, 2, n)
    counts = rng.integers(0, n + 3, (3, 2, 2)).astype(np.int32)
    lengths = rng.integers(0, n + 1, (3, 2, 2)).astype(np.int32)
    capacity = max(1, n - 2)
    got = select_topk(jnp.asarray(importance), jnp.asarray(counts), capacity, lengths=jnp.asarray(lengths))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, select_loop(importance, counts, lengths, capacity))


@pytest.mark.parametrize("counts", [-1, 0, 1, 40, 41, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 41, 50])
def test_scalar_counts_and_every_capacity(counts, capacity):
    importance = softmax_like(np.random.default_rng(1), 5, 41)
    got = select_topk(jnp.asarray(importance), counts, capacity)
    np.testing.assert_array_equal(got, select_loop(importance, counts, 41, capacity))


def test_no_leading_axis_and_no_entries():
    np.testing.assert_array_equal(select_topk(jnp.zeros(0), 3, 2), [-1, -1])
    np.testing.assert_array_equal(select_topk(jnp.array([0.0, 2.0, 1.0]), 2, 3), [1, 2, -1])


def test_traced_in_a_loop_and_deterministic():
    rng = np.random.default_rng(2)
    importance = jnp.asarray(softmax_like(rng, 4, 99))

    @jax.jit
    def run(importance, counts, lengths):
        def body(i, acc):
            return acc.at[i].set(select_topk(importance, counts + i, 30, lengths=lengths))

        return jax.lax.fori_loop(0, 3, body, jnp.zeros((3, 4, 30), jnp.int32))

    counts, lengths = np.array([0, 7, 30, 12], np.int32), np.array([99, 50, 98, 3], np.int32)
    first, second = (run(importance, jnp.asarray(counts), jnp.asarray(lengths)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    for i in range(3):
        np.testing.assert_array_equal(first[i], select_loop(importance, counts + i, lengths, 30))


def test_under_shard_map():
    importance = softmax_like(np.random.default_rng(3), 2, 4, 2, 65)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "heads"))
    spec = PartitionSpec(None, "batch", "heads")
    select = jax.shard_map(partial(select_topk, counts=9, capacity=12), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(select)(jnp.asarray(importance)), select_loop(importance, 9, 65, 12))


# The kernel's own function, run thread by thread in NumPy.
@pytest.mark.parametrize(
    "config",
    [TopkConfig(threads=128, unroll=1), None, TopkConfig(threads=128, unroll=2, parts=3)],
    ids=["small", "default", "parts"],
)
@pytest.mark.parametrize("n", [1, 63, 2500])
@pytest.mark.parametrize("case", VALUES)
def test_kernel_in_numpy(case, n, config):
    rng = np.random.default_rng(n + 1)
    importance = VALUES[case](rng, 3, n)
    counts = np.array([n // 3, -4, n + 2], np.int32)
    lengths = np.array([n, n, max(0, n - 5)], np.int32)
    capacity = max(2, n // 2)
    got = topk_kernel.select_topk(importance, counts, lengths, capacity, config=config, launch=lanes_numpy.launch)
    np.testing.assert_array_equal(got, select_loop(importance, counts, lengths, capacity))


@pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="needs JAX 0.11: Mosaic GPU kernels")
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
@pytest.mark.parametrize(("shape", "launches"), [((36, 1, 8, 65536), 1), ((7,), 1), ((4, 8, 131072), 4)])
def test_lowers_for_an_h100(shape, launches, implementation):
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.int32))
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    ):
        f = jax.jit(lambda x, counts: select_topk(x, counts, 50, implementation=implementation))
        text = f.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "select_topk" in text
    assert text.count("custom_call @mosaic_gpu") == launches


def test_the_kernel_is_refused_by_name_where_it_cannot_run():
    with pytest.raises(NotImplementedError, match=r"need JAX 0\.11|need an NVIDIA GPU"):
        select_topk(jnp.zeros((2, 9)), 1, 2, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="implementation must be"):
        select_topk(jnp.zeros((2, 9)), 1, 2, implementation="cub")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((jnp.zeros((2, 9), jnp.bfloat16), 1, 2), "importance must be f32"),
        ((jnp.zeros((2, 9)), 1, -1), "capacity"),
        ((jnp.zeros((2, 9)), 1, 2.0), "capacity"),
        ((jnp.zeros((2, 9)), 1.5, 2), "counts must be integers"),
        ((jnp.zeros((2, 9)), jnp.zeros((3,), jnp.int32), 2), "counts of shape"),
        ((jnp.zeros((2, 9)), jnp.zeros((2, 9), jnp.int32), 2), "counts must be a scalar"),
    ],
)
def test_rejects(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_topk(*arguments)
