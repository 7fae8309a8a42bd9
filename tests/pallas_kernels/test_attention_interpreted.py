"""The Mosaic GPU kernels of block_attention in JAX's interpreter of Mosaic GPU, on the CPU.

It runs the kernels' own code, with their barriers, copies and warpgroups, on simulated memory. What it has no form of
is replaced here: adding to a wgmma accumulator with an operand in registers, and stores of single rows. The tests in
tests/gpu have those. The finishing kernel's code runs in NumPy (`lanes_numpy`).
"""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import AttentionOutput, Importance, dispatch, lanes_numpy
from pallas_kernels.attention_plan import AttentionConfig
from tests.pallas_kernels.attention_cases import Case, check_importance, check_output, check_pages, make

pytestmark = [
    pytest.mark.skipif(
        dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: the interpreter of Mosaic GPU kernels"
    ),
    pytest.mark.slow,
]


@pytest.fixture
def interpreted(monkeypatch):
    """`attention_mosaic`, interpreted."""
    pl = pytest.importorskip("jax.experimental.pallas")
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels import attention_mosaic, lanes, mosaic_inline

    def add_matmul(acc, weights, v_tile, meanwhile):
        if meanwhile is not None:
            meanwhile()
        return acc + jnp.dot(weights.astype(jnp.float32), v_tile[...].astype(jnp.float32))

    def store_rows(ref, values, indices):
        @pl.loop(0, 64)
        def _row(row):
            @pl.when(indices[0][row] >= 0)
            def _store():
                ref[tuple(index[row] for index in indices)] = values[row]

    monkeypatch.setattr(attention_mosaic, "_add_matmul", add_matmul)

    def store_rows_wide(ref, values, rows):
        if values.ndim == 1:
            return store_rows(ref, values, [rows])
        place = jnp.arange(values.shape[1])
        order = (place & ~31) + (place & 6) * 4 + ((place & 24) >> 2) + (place & 1)

        @pl.loop(0, 64)
        def _row(row):
            @pl.when(rows[row] >= 0)
            def _store():
                ref[rows[row]] = values[row][order]

    def pair_sums(values):
        pairs = values.reshape(64, -1, 2, 4, 2).sum(axis=4)
        return jnp.swapaxes(pairs, 2, 3).reshape(64, -1)

    def store_page_sums(sums_ref, tops_ref, pairs, tops, store):
        @pl.when(store >= 0)
        def _store():
            sums_ref[...] = pairs.reshape(64, -1, 4, 2).sum(axis=2).reshape(64, -1).astype(jnp.bfloat16)
            tops_ref[...] = tops

    monkeypatch.setattr(mosaic_inline, "pair_sums", pair_sums)

    monkeypatch.setattr(mosaic_inline, "store_page_sums", store_page_sums)
    monkeypatch.setattr(mosaic_inline, "computed_here", lambda never, *arrays: None)  # only tells when
    monkeypatch.setattr(mosaic_inline, "meet", lambda: None)  # likewise
    monkeypatch.setattr(mosaic_inline, "store_rows", store_rows)
    monkeypatch.setattr(mosaic_inline, "store_rows_wide", store_rows_wide)
    monkeypatch.setattr(lanes, "launch", lanes_numpy.launch)
    with plgpu.force_gpu_interpret_mode():
        yield attention_mosaic.attention_mosaic


def run(interpreted, p, case, rows=None, prefix=None, importance=None, into=None, **config):
    attend = functools.partial(
        interpreted, scale=case.head_dim**-0.5, importance=importance, config=AttentionConfig(**config)
    )
    layer = None if p.layer is None else jnp.int32(p.layer)
    return AttentionOutput(*attend(p.q, p.cached_k, p.cached_v, p.lengths, layer, rows, prefix, into))


def test_one_split_of_a_stacked_cache(interpreted):
    case = Case(((97,), (0,)), queries=5, kv_heads=1, group=3, entries=128, head_dim=64, stacked=True)
    p = make(case)
    check_output(run(interpreted, p, case, splits=1), p, case)


def test_splits_joined_by_the_finishing_kernel(interpreted):
    """Two compute warpgroups in turns, more tiles than stages, a tail of NaN."""
    case = Case(((250,),), queries=16, kv_heads=1, entries=264, dtype="float16")
    p = make(case)
    check_output(run(interpreted, p, case, splits=3, kv_tile=64, stages=2, query_chunk=32, warpgroups=2), p, case)


def test_three_warpgroups(interpreted):
    """Five heads of 32 queries, which are one tile of three warpgroups by default; half of the last is no query."""
    case = Case(((250,), (3,)), kv_heads=1, group=5, entries=256, head_dim=64)
    p = make(case)
    check_output(run(interpreted, p, case, splits=2), p, case)


@pytest.mark.parametrize("runs", [4, 32])
def test_queries_that_see_different_entries(interpreted, runs):
    lengths = tuple((i + 1) * 32 // runs for i in range(runs))
    case = Case((lengths,), queries=32, kv_heads=1, group=2, entries=64, head_dim=64)
    p = make(case)
    check_output(run(interpreted, p, case, splits=1), p, case)


@pytest.mark.parametrize(("splits", "over"), [(1, "visible"), (2, "prefix")])
def test_importance_of_one_query(interpreted, splits, over):
    case = Case(((250,), (0,)), queries=8, kv_heads=1, group=2, entries=264)
    p = make(case)
    prefix = jnp.asarray([242, 0]) if over == "prefix" else None
    options = Importance("mean", over)
    result = run(interpreted, p, case, jnp.asarray([3, 0], jnp.int32), prefix, options, splits=splits, stages=2)
    check_output(result, p, case)
    chosen = jnp.arange(8)[None] == jnp.asarray([[3], [0]])
    check_importance(result.importance, p, chosen, reduce="mean", prefix=prefix, dtype="bfloat16")


def test_importance_of_many_queries(interpreted):
    case = Case(((250,),), queries=8, kv_heads=1, group=2, entries=264)
    p = make(case)
    chosen = jnp.asarray([[1, 0, 0, 1, 1, 0, 0, 1]], bool)
    result = run(interpreted, p, case, chosen, None, Importance("max"), splits=2, stages=2)
    check_output(result, p, case)
    check_importance(result.importance, p, chosen, reduce="max")


@pytest.mark.parametrize(("over", "splits", "page"), [("visible", 2, 8), ("prefix", 1, 16)])
def test_importance_by_page(interpreted, over, splits, page):
    """Six heads of 16 queries: two tiles, half of the second is no query. The prefix ends within a page."""
    case = Case(((250,), (0,)), queries=16, kv_heads=1, group=6, entries=264)
    p = make(case)
    chosen = jnp.asarray([[1, 0, 0, 1] * 4] * 2, bool)
    prefix = jnp.asarray([221, 0])
    result = run(interpreted, p, case, chosen, prefix, Importance("mean", over, page), splits=splits, stages=2)
    check_output(result, p, case)
    check_pages(result.importance, p, chosen, over=over, page=page, prefix=prefix)


@pytest.mark.parametrize("splits", [1, 2])
def test_importance_by_page_in_a_stack(interpreted, splits):
    """Of 261 entries the last page has 5, and of 13 queries the last slab's end is none."""
    case = Case(((250,),), queries=13, kv_heads=2, group=2, entries=261)
    p = make(case)
    chosen, prefix = jnp.arange(13)[None] % 2 == 0, jnp.asarray([245])
    stack = jnp.full((3, 1, 2, 33), 7.0)
    how = {"splits": splits, "stages": 2, "query_chunk": 16}
    result = run(interpreted, p, case, chosen, prefix, Importance(page=8), (stack, jnp.int32(1)), **how)
    check_output(result, p, case)
    check_pages(result.importance[1], p, chosen, over="visible", page=8, prefix=prefix)
    assert (result.importance[jnp.asarray([0, 2])] == 7).all()


def test_importance_of_many_queries_in_turns(interpreted, monkeypatch):
    """One program of a row that fills a part of its slots: tiles in flight are used again, the rest is cleared.

    Its query rows take two matmuls.
    """
    from pallas_kernels import importance_mosaic

    monkeypatch.setattr(importance_mosaic, "NARROW", (3, 16, 152))
    monkeypatch.setattr(importance_mosaic, "WIDE", (2, 16, 232))
    monkeypatch.setattr(importance_mosaic, "MAX_STAGES", 2)
    monkeypatch.setattr(importance_mosaic, "_chunks", lambda steps, heads: 1)
    case = Case(((500,), (0,)), queries=8, kv_heads=1, entries=800, head_dim=64)
    p = make(case)
    prefix = jnp.asarray([492, 0])
    chosen = jnp.asarray([[1, 0, 0, 1, 1, 0, 0, 1]] * 2, bool)
    result = run(interpreted, p, case, chosen, prefix, Importance("mean", "prefix"), splits=1)
    check_importance(result.importance, p, chosen, reduce="mean", prefix=prefix)
