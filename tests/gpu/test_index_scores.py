"""The index' kernel on the card: the exact softmax of restored keys, for all kinds of sizes and lengths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.common import rms_error
from pallas_kernels.index_scores import IndexConfig, importance
from tests.pallas_kernels.index_cases import importance_of, index_of

pytestmark = pytest.mark.gpu

# layers, batch, heads, queries, slots, head dim
SHAPES = {
    "one entry": (1, 1, 1, 1, 2, 128),
    "odd": (2, 3, 2, 4, 1237, 128),
    "eight queries": (1, 2, 2, 8, 3000, 128),
    "narrow": (3, 1, 4, 7, 2999, 64),
    "long": (1, 1, 2, 4, 70001, 128),
    "many": (5, 16, 2, 2, 500, 64),
}


def case(name, bits):
    layers, batch, heads, asked, slots, dim = SHAPES[name]
    rng = np.random.default_rng(len(name) + bits)
    slots += slots % 2 if bits == 8 else 0
    codes, scales, keys = index_of(rng, layers, batch, heads, slots, dim, bits)
    q = jnp.asarray(3 * rng.standard_normal((layers, batch, heads, asked, dim)), jnp.bfloat16)
    lengths = rng.integers(0, slots + 1, batch).astype(np.int32)
    lengths[0] = slots
    return codes, scales, keys, q, lengths


@pytest.mark.parametrize(
    ("reduce", "page", "config"),
    [("mean", 16, None), ("mean", 1, None), ("max", 24, IndexConfig(threads=128, unroll=4, chunks=3))],
    ids=["pages", "entries", "max"],
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_importance(name, bits, reduce, page, config):
    codes, scales, keys, q, lengths = case(name, bits)
    found, again = (
        importance(codes, scales, q, lengths, reduce=reduce, page=page, implementation="mosaic_gpu", config=config)
        for _ in range(2)
    )
    for ours, same, theirs in zip(found, again, importance_of(keys, q, lengths, reduce, page), strict=True):
        np.testing.assert_array_equal(ours, same)
        # Scores of these keys reach hundreds, and queries have 15 bits; single weights are kept in bfloat16.
        assert rms_error(ours, theirs) < (1e-3 if page == 16 else 3e-3)
        past = np.arange(theirs.shape[-1]) * page >= lengths[:, None, None]
        assert not np.where(past, ours, 0).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_form(bits):
    codes, scales, keys, q, lengths = case("odd", bits)
    found = importance(codes, scales, q, lengths, reduce="mean", implementation="xla")
    for ours, theirs in zip(found, importance_of(keys, q, lengths, "mean", 1), strict=True):
        assert rms_error(ours, theirs) < 1e-3


def test_what_lies_behind_a_prefix_does_not_matter():
    codes, scales, keys, q, _ = case("odd", 4)
    lengths = np.array([77, 600, 1], np.int32)
    behind = (np.arange(keys.shape[3]) >= lengths[:, None, None])[..., None]
    spoilt = [jnp.where(behind, jnp.nan, x) for x in scales]
    found = importance(codes, spoilt, q, lengths, reduce="mean", page=16, implementation="mosaic_gpu")
    wanted = importance(codes, scales, q, lengths, reduce="mean", page=16, implementation="mosaic_gpu")
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_in_a_shard_map_on_a_mesh():
    codes, scales, _, q, lengths = case("odd", 4)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    keys, asked = P("data", "model", None, None), P(None, "data", "model", None, None)
    run = functools.partial(importance, reduce="mean", page=16, implementation="mosaic_gpu")
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=((keys,) * 2, (keys,) * 2, asked, P("data")), out_specs=(P("data", "model", None),) * 2
    )
    found = jax.jit(mapped)(tuple(codes), tuple(scales), q, lengths)
    for ours, theirs in zip(found, run(codes, scales, q, lengths), strict=True):
        np.testing.assert_array_equal(ours, theirs)
