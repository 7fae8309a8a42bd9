"""The kernel that ends block_attention: its own code in NumPy, beside a plain form, on parts made up for it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Importance, lanes_numpy, merge_by_lse
from pallas_kernels.attention_finish import finish
from pallas_kernels.attention_plan import AttentionConfig, make_plan


def problem(splits, *, dim, group, queries, keep=False, prefix=False):
    """A plan over 600 entries of two rows and two KV heads, and parts: of the second row nothing was seen."""
    of = jax.ShapeDtypeStruct
    q, k = of((2, queries, 2 * group, dim), jnp.bfloat16), of((2, 2, 600, dim), jnp.bfloat16)
    plan = make_plan(q, k, 1, AttentionConfig(splits=splits), keep_weights=keep, prefix_sums=prefix)
    rng = np.random.default_rng(splits)
    row_shape = (splits, *plan.row_shape)
    lse = rng.normal(size=row_shape).astype(np.float32) * 3
    if splits > 1:
        lse[-1, 0] = -np.inf  # one of several saw nothing
    lse[:, 1] = -np.inf
    out = rng.normal(size=(*row_shape, dim))
    out[lse == -np.inf] = 0
    kept = (2, 2, plan.kv_tiles, group)
    weights = jnp.asarray(rng.uniform(size=(*kept, plan.kv_tile)), jnp.bfloat16) if keep else None
    tops = jnp.asarray(rng.normal(size=kept), jnp.float32) if keep else None
    parts = types.SimpleNamespace(
        out=jnp.asarray(out, jnp.bfloat16),
        lse=jnp.asarray(lse),
        prefix_lse=jnp.asarray(lse + 1),
        weights=weights,
        tops=tops,
    )
    return plan, parts


@pytest.mark.parametrize(("splits", "dim", "group", "queries"), [(19, 128, 3, 5), (2, 64, 4, 32), (9, 64, 1, 8)])
def test_joins_splits(splits, dim, group, queries):
    plan, parts = problem(splits, dim=dim, group=group, queries=queries)
    shares = jnp.asarray(np.random.default_rng(0).normal(size=(2, queries)), jnp.float32).at[0, 1].set(-jnp.inf)
    out, lse, importance, bias = finish(
        parts, jnp.ones((2, 1), jnp.int32), None, None, plan, None, shares=shares, launch=lanes_numpy.launch
    )
    wanted, wanted_lse = merge_by_lse(parts.out.astype(jnp.float32), parts.lse)
    np.testing.assert_allclose(np.asarray(out, np.float32), plan.rows_to_queries(wanted), rtol=1e-2, atol=1e-2)
    lse_by_query = plan.rows_to_queries(wanted_lse)
    np.testing.assert_allclose(lse, lse_by_query, rtol=1e-5, atol=1e-5)
    assert importance is None
    wanted_bias = jnp.where(lse_by_query > -jnp.inf, shares[:, :, None] - lse_by_query * np.log2(np.e), -jnp.inf)
    np.testing.assert_allclose(plan.rows_to_queries(bias), wanted_bias, rtol=1e-5, atol=1e-4)


def test_nan_of_a_split_is_passed_on():
    plan, parts = problem(3, dim=64, group=1, queries=8)
    parts.lse = parts.lse.at[1, 0, 0].set(jnp.nan)
    out, lse, *_ = finish(parts, jnp.ones((2, 1), jnp.int32), None, None, plan, None, launch=lanes_numpy.launch)
    assert np.isnan(np.asarray(out, np.float32)[0, :, 0]).all()
    assert np.isfinite(np.asarray(out, np.float32)[0, :, 1]).all()
    assert np.isnan(lse[0, :, 0]).all()


@pytest.mark.parametrize(
    ("splits", "group", "prefix", "reduce"), [(19, 3, False, "mean"), (1, 4, True, "max"), (40, 1, True, "mean")]
)
def test_importance_of_kept_weights(splits, group, prefix, reduce):
    plan, parts = problem(splits, dim=128, group=group, queries=8, keep=True, prefix=prefix)
    lengths, prefixes, query = (
        jnp.asarray([[601], [-1]], jnp.int32),
        jnp.asarray([555, 0], jnp.int32),
        jnp.asarray([5, 0]),
    )
    *_, got, _ = finish(parts, lengths, query, prefixes, plan, Importance(reduce), launch=lanes_numpy.launch)
    over = jax.scipy.special.logsumexp(parts.prefix_lse if prefix else parts.lse, axis=0)
    joint = plan.rows_to_queries(over)[0, 5].reshape(2, group, 1)
    place = np.arange(plan.kv_tile)
    entry = (place & ~31) + (place & 6) * 4 + ((place & 24) >> 2) + (place & 1)
    weights = np.zeros(parts.weights.shape[1:], np.float32)
    weights[..., entry] = np.asarray(parts.weights[0], np.float32) * 2 ** np.asarray(parts.tops[0])[..., None]
    weights = np.swapaxes(weights, 1, 2).reshape(2, group, -1)[:, :, :600] / np.exp(joint)
    wanted = weights.mean(1) if reduce == "mean" else weights.max(1)
    wanted[:, 555 if prefix else 600 :] = 0
    np.testing.assert_allclose(got[0], wanted, rtol=1e-4, atol=1e-6)
    assert not np.asarray(got[1]).any()
