"""The kernel that ends block_attention: its own code in NumPy, beside a plain form, on parts made up for it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Importance, lanes_numpy, merge_by_lse
from pallas_kernels.attention_finish import finish
from pallas_kernels.attention_pages import pages
from pallas_kernels.attention_plan import PAGE, AttentionConfig, make_plan


def problem(splits, *, dim, group, queries, keep=False, pages=False, prefix=False):
    """A plan over 600 entries of two rows and two KV heads, and parts: of the second row nothing was seen."""
    of = jax.ShapeDtypeStruct
    q, k = of((2, queries, 2 * group, dim), jnp.bfloat16), of((2, 2, 600, dim), jnp.bfloat16)
    plan = make_plan(q, k, 1, AttentionConfig(splits=splits), keep_weights=keep, keep_pages=pages, prefix_sums=prefix)
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
    paged = (2, 2, plan.tiles, plan.kv_tiles, plan.rows)
    parts = types.SimpleNamespace(
        pages=jnp.asarray(rng.uniform(size=(*paged, plan.kv_tile // PAGE)), jnp.bfloat16) if pages else None,
        page_tops=jnp.asarray(rng.normal(size=paged), jnp.float32) if pages else None,
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
    out, lse, importance = finish(parts, jnp.ones((2, 1), jnp.int32), None, None, plan, None, launch=lanes_numpy.launch)
    wanted, wanted_lse = merge_by_lse(parts.out.astype(jnp.float32), parts.lse)
    np.testing.assert_allclose(np.asarray(out, np.float32), plan.rows_to_queries(wanted), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(lse, plan.rows_to_queries(wanted_lse), rtol=1e-5, atol=1e-5)
    assert importance is None


@pytest.mark.parametrize(("splits", "group", "queries", "page"), [(19, 3, 5, 8), (2, 4, 32, 16), (3, 6, 32, 8)])
def test_kept_by_page(splits, group, queries, page):
    """The kernel that joins splits adds up pages, too: as `attention_pages` does, once it is told what rows count."""
    plan, parts = problem(splits, dim=64, group=group, queries=queries, pages=True)
    lengths = jnp.asarray([[550], [-1]], jnp.int32)
    chosen = jnp.asarray(np.random.default_rng(1).uniform(size=(2, queries)) < 0.7)
    shares, importance = plan.row_shares(chosen, "mean"), Importance(page=page)
    launch = {"launch": lanes_numpy.launch}
    out, lse, got = finish(parts, lengths, None, None, plan, importance, shares=shares, **launch)
    plain = finish(parts, lengths, None, None, plan, None, **launch)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(plain.out, np.float32))
    np.testing.assert_array_equal(lse, plain.lse)
    bias = plan.row_bias(chosen, lse, "mean")
    wanted = pages(parts, lengths, bias, plan, page, **launch)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    counted = np.asarray(parts.pages[0], np.float64)
    counted *= 2.0 ** np.asarray(parts.page_tops[0] + bias[0][:, :, None], np.float64)[..., None]
    counted[:, :, np.arange(plan.kv_tiles) * plan.kv_tile >= 550] = 0
    by_tile = counted.sum(axis=(1, 3)).reshape(2, -1)
    by_page = np.add.reduceat(by_tile, np.arange(0, by_tile.shape[1], page // 8), axis=1)
    np.testing.assert_allclose(wanted[0], by_page[:, : wanted.shape[-1]], rtol=1e-4)
    assert wanted[0].any()
    assert not wanted[1].any()
    if page == 8:
        stack, number = jnp.full((3, *wanted.shape), 7.0), jnp.int32(2)
        filled = stack.at[2].set(got)
        how = {"shares": shares, "into": (stack, number)}
        np.testing.assert_array_equal(
            finish(parts, lengths, None, None, plan, importance, **how, **launch).importance, filled
        )
        alone = pages(parts, lengths, bias, plan, page, (stack, number), **launch)
        np.testing.assert_allclose(alone, filled, rtol=1e-5)


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
    *_, got = finish(parts, lengths, query, prefixes, plan, Importance(reduce), launch=lanes_numpy.launch)
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
