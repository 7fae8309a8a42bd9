"""Importances from an index on the CPU: packing, the plain form, and the kernel's own functions run in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from benchmarks.common import rms_error
from pallas_kernels import dispatch, index_scores, index_scores_kernel, lanes_numpy
from pallas_kernels.index_scores import IndexConfig, importance, pack, unpack
from tests.pallas_kernels.index_cases import importance_of, index_of


@pytest.mark.parametrize("dim", [10, 32, 128])
def test_packed_codes_are_all_there(dim):
    codes = np.random.default_rng(dim).integers(-7, 8, (2, 3, dim)).astype(np.int8)
    packed = pack(jnp.asarray(codes))
    assert packed.dtype == jnp.uint8
    assert packed.shape == (2, 3, dim // 2)
    np.testing.assert_array_equal(unpack(packed), codes)


@pytest.mark.parametrize(("bits", "reduce", "page"), [(8, "mean", 1), (4, "max", 5), (4, "mean", 16)])
def test_plain_form(bits, reduce, page):
    rng = np.random.default_rng(bits)
    codes, scales, keys = index_of(rng, 2, 2, 2, 70, 64, bits)
    q = jnp.asarray(rng.standard_normal((2, 2, 2, 3, 64)), jnp.float32)
    lengths = jnp.array([70, 33], jnp.int32)
    found = importance(codes, scales, q, lengths, reduce=reduce, page=page, implementation="xla")
    wanted = importance_of(keys, q, lengths, reduce, page)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-7)


# bits, head dim, queries, slots, entries to a number, entries of a thread.
KERNELS = [
    (4, 128, 4, 201, 1, 8, "mean"),
    (4, 64, 1, 77, 1, 4, "max"),
    (4, 128, 8, 333, 16, 8, "mean"),
    (8, 128, 5, 130, 64, 8, "mean"),
    (8, 64, 7, 90, 8, 4, "mean"),
    (8, 128, 3, 40, 1, 8, "max"),
]


@pytest.mark.parametrize(("bits", "dim", "asked", "slots", "grain", "unroll", "reduce"), KERNELS)
def test_kernel_in_numpy(bits, dim, asked, slots, grain, unroll, reduce):
    """Two layers and rows, of which one has a third of its slots and one none."""
    rng = np.random.default_rng(slots)
    codes, scales, keys = index_of(rng, 2, 3, 1, slots, dim, bits)
    q = jnp.asarray(3 * rng.standard_normal((2, 3, 1, asked, dim)), jnp.bfloat16)
    lengths = jnp.array([slots, slots // 3, 0], jnp.int32)
    config = IndexConfig(threads=128, unroll=unroll, chunks=2)
    found = index_scores_kernel.importance(
        codes, scales, q, lengths, reduce=reduce, grain=grain, config=config, launch=lanes_numpy.launch
    )
    wanted = importance_of(keys, q, lengths, reduce, grain)
    for ours, theirs in zip(found, wanted, strict=True):
        # Weights are kept in bfloat16, sums in float32.
        assert rms_error(ours, theirs) < (2e-3 if grain == 1 else 1e-4)
        assert not ours[2].any()
        assert not ours[1, :, -(-(slots // 3) // grain) :].any()


def test_queries_are_finer_than_bfloat16():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 3, 4, 64)), jnp.float32).at[0, 0, 0, 0].set(0.0)
    words, factor = index_scores_kernel.query_words(q, 8)
    columns = np.asarray(words, np.float64).reshape(1, 2, 3, 4, 2, 4, 2, 2, 4)
    # A column's quarters have 16 bytes of every 64 each, in two steps of two words.
    whole = (128 * columns[:, :, :, :, 0] + columns[:, :, :, :, 1]).reshape(q.shape)
    restored = whole * np.asarray(factor, np.float64)[..., None] * 64**0.5 / np.log2(np.e)
    np.testing.assert_allclose(restored, q, atol=float(jnp.max(jnp.abs(q))) * 2**-14)


needs_mosaic = pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="needs JAX 0.11: Mosaic GPU kernels")


@needs_mosaic
@pytest.mark.parametrize(("bits", "page", "launches"), [(4, 16, 2), (8, 1, 4)])
def test_lowers_for_an_h200(bits, page, launches):
    """Ten layers of eight rows of 64K: by pages all at once, entry by entry in two parts."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="gpu")
    of = jax.ShapeDtypeStruct
    layers, batch, heads, slots = 10, 8, 8, 65536
    codes = of((batch, heads, slots, 64), jnp.uint8) if bits == 4 else of((batch, heads, slots, 128), jnp.int8)
    scales = of((batch, heads, slots, 4 if bits == 4 else 1), jnp.bfloat16)
    arguments = ([codes] * layers, [scales] * layers, of((layers, batch, heads, 4, 128), jnp.bfloat16))
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        f = jax.jit(functools.partial(importance, reduce="mean", page=page, implementation="mosaic_gpu"))
        text = f.trace(*arguments, of((batch,), jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == launches


@pytest.mark.parametrize(
    ("shape", "asked", "groups", "why"),
    [
        ((1, 2, 90, 128), 4, 1, None),
        ((1, 2, 91, 128), 4, 1, "reads scales two by two: not of 91 slots with 1 each"),
        ((1, 2, 90, 32), 4, 1, "head dim 64 or 128"),
        ((1, 2, 90, 128), 9, 1, "up to 8 queries of a head in registers, not 9"),
    ],
)
def test_what_the_kernel_does_not_do(shape, asked, groups, why):
    of = jax.ShapeDtypeStruct
    codes, scales = of(shape, jnp.int8), of((*shape[:3], groups), jnp.bfloat16)
    said = dispatch.index_scores_missing(codes, scales, of((1, *shape[:2], asked, shape[3]), jnp.bfloat16))
    assert said is None if why is None else why in said


def test_mistakes():
    codes, scales, _ = index_of(np.random.default_rng(0), 1, 1, 1, 8, 32, 8)
    q, lengths = jnp.zeros((2, 1, 1, 1, 32)), jnp.ones((1,), jnp.int32)
    with pytest.raises(ValueError, match="1 layers' codes"):
        index_scores.importance(codes, scales, q, lengths, reduce="mean")
    with pytest.raises(ValueError, match="not 'sum'"):
        index_scores.importance(codes, scales, q[:1], lengths, reduce="sum")
    assert index_scores.importance([], [], q[:0], lengths, reduce="mean") == ()
