"""The index on the device: what is appended to it is what a whole index would hold, with and without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import device_index
from herald_jax.sharding import make_mesh


@pytest.mark.parametrize("bits", [8, 4])
def test_appending_is_building_it_whole(bits):
    keys = jax.random.normal(jax.random.key(bits), (2, 1, 3, 2, 20, 32), jnp.bfloat16)
    block = jax.random.normal(jax.random.key(1), (2, 3, 2, 4, 32), jnp.bfloat16)
    start = jnp.array([3, 16, 17], jnp.int32)
    wanted = np.array(keys[:, 0])
    for row, at in ((0, 3), (1, 16)):  # the last row's block does not fit
        wanted[:, row, :, at : at + 4] = block[:, row]
    for written in (True, False):
        index = tuple(device_index.build(k, bits=bits, mesh=None) for k in keys)
        index = device_index.append(index, block, start, jnp.full((3,), written), bits=bits, mesh=None)
        for layer, found in enumerate(index):
            theirs = device_index.quantise(jnp.asarray(wanted[layer] if written else keys[layer, 0]), bits)
            np.testing.assert_array_equal(found.codes, theirs.codes)
            np.testing.assert_array_equal(found.scales, theirs.scales)


def test_a_mesh_changes_nothing():
    keys = jax.random.normal(jax.random.key(0), (2, 1, 2, 2, 40, 32), jnp.bfloat16)
    block = jax.random.normal(jax.random.key(1), (2, 2, 2, 8, 32), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(2), (2, 2, 2, 3, 32), jnp.bfloat16)
    start, lengths, mask = jnp.array([16, 32], jnp.int32), jnp.array([24, 37], jnp.int32), jnp.array([True, False])
    scored = []
    for mesh in (None, make_mesh(data=2, model=2)):
        index = tuple(device_index.build(k, bits=4, mesh=mesh) for k in keys)
        index = device_index.append(index, block, start, mask, bits=4, mesh=mesh)
        scored.append(device_index.score(index, q, lengths, reduce="mean", page=16, mesh=mesh))
    for ours, theirs in zip(*scored, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
