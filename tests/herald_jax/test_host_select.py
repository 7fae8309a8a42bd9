"""The scan of keys by the CPU alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import host_select

pytestmark = pytest.mark.usefixtures("optimised")


def keys_and_queries(slots, queries, dim, heads=1):
    k = jax.random.normal(jax.random.key(slots), (heads, slots, dim), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(queries), (heads, queries, dim), jnp.bfloat16)
    return np.array(k), np.array(q)


# Several heads of which only some keys are scored; turns that fit, turns of which the last overlaps, one short turn; a
# number of keys that cannot be split into streams.
@pytest.mark.parametrize(
    ("heads", "slots", "reach", "queries", "dim"),
    [(3, 2500, 8 * 272, 4, 128), (2, 2000, 2000, 7, 64), (2, 48, 24, 2, 128), (1, 301, 301, 5, 16)],
)
def test_scores_are_the_products_of_bfloat16_keys(heads, slots, reach, queries, dim):
    k, q = keys_and_queries(slots, queries, dim, heads)
    scores = np.asarray(host_select.scan(q, k.view(np.uint32), reach=reach))
    assert scores.dtype == np.float16
    wanted = q.astype(np.float64) @ k[:, :reach].astype(np.float64).transpose(0, 2, 1) / dim**0.5
    np.testing.assert_allclose(scores, wanted, rtol=2**-11 * 1.01, atol=1e-5)
    np.testing.assert_allclose(host_select.scan(q, k, reach=reach), wanted, rtol=2**-11 * 1.01, atol=1e-5)


def test_a_nan_is_kept_and_what_float16_cannot_hold_stays_finite():
    k, q = keys_and_queries(1024, 4, 16)
    q[:] = 1
    k[0, 5, 3], k[0, 700, 2], k[0, 900, 15] = np.nan, 1e30, -np.inf
    (scores,) = np.asarray(host_select.scan(q, k.view(np.uint32), reach=1024))
    assert np.isnan(scores[:, 5]).all()
    assert (scores[:, 700] == 65504).all()
    assert (scores[:, 900] == -65504).all()
    assert np.isfinite(np.delete(scores, 5, axis=1)).all()


def test_heads_are_scanned_together_until_a_call_is_worth_its_while():
    assert host_select._calls(8, 40 * 2**20) == [slice(i, i + 1) for i in range(8)]
    assert host_select._calls(8, 5 * 2**20) == [slice(0, 4), slice(4, 8)]
    assert host_select._calls(6, 6 * 2**20) == [slice(0, 3), slice(3, 6)]
    assert host_select._calls(3, 100) == [slice(0, 3)]
