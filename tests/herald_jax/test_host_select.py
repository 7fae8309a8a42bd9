"""The scan of keys by the CPU alone: what it computes, and that it is compiled to vector code."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import host_select

pytestmark = pytest.mark.usefixtures("optimised")


def keys_and_queries(slots, queries, dim):
    k = jax.random.normal(jax.random.key(slots), (slots, dim), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(queries), (queries, dim), jnp.bfloat16)
    return np.array(k), np.array(q)


# Turns that fit, turns of which the last overlaps, one short turn, a number that cannot be split into streams.
@pytest.mark.parametrize(
    ("slots", "queries", "dim"), [(2 * 4 * 272, 4, 128), (2000, 7, 64), (24, 2, 128), (301, 5, 16), (2448, 8, 128)]
)
def test_scores_are_the_products_of_bfloat16_keys(slots, queries, dim):
    k, q = keys_and_queries(slots, queries, dim)
    scores = np.asarray(host_select.scan(q, k.view(np.uint32)))
    assert scores.dtype == np.float16
    wanted = q.astype(np.float64) @ k.astype(np.float64).T / dim**0.5
    np.testing.assert_allclose(scores, wanted, rtol=2**-11 * 1.01, atol=1e-5)
    np.testing.assert_allclose(host_select.scan(q, k), wanted, rtol=2**-11 * 1.01, atol=1e-5)


def test_a_nan_is_kept_and_what_float16_cannot_hold_stays_finite():
    k, q = keys_and_queries(1024, 4, 16)
    q[:] = 1
    k[5, 3], k[700, 2], k[900, 15] = np.nan, 1e30, -np.inf
    scores = np.asarray(host_select.scan(q, k.view(np.uint32)))
    assert np.isnan(scores[:, 5]).all()
    assert (scores[:, 700] == 65504).all()
    assert (scores[:, 900] == -65504).all()
    assert np.isfinite(np.delete(scores, 5, axis=1)).all()


def test_the_scan_is_compiled_to_vector_code():
    # In cache it keeps up with XLA's matrix product; with one number at a time it would take five times as long.
    k, q = (jax.device_put(x) for x in keys_and_queries(8192, 4, 128))
    pairs = jax.device_put(np.asarray(k).view(np.uint32))
    assert least_seconds(lambda: host_select.scan(q, pairs)) < 2.5 * least_seconds(lambda: host_select.scan(q, k))


def least_seconds(run):
    jax.block_until_ready(run())
    times = []
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return min(times)
