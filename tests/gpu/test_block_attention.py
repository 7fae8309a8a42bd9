"""The Mosaic GPU kernel of block_attention against float32 references, on the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Importance, block_attention
from pallas_kernels.attention_plan import AttentionConfig
from tests.pallas_kernels.attention_cases import Case, check_importance, check_output, check_pages, make

pytestmark = pytest.mark.gpu

CASES = [
    *(Case(((699,), (n,)), group=g) for n, g in ((0, 1), (1, 2), (63, 4), (111, 6), (512, 7), (640, 8))),
    Case(((8191,), (1,)), entries=8192, kv_heads=8),
    Case(((8191,),), entries=8192, kv_heads=4, group=7, dtype="float16"),
    Case(((8191,), (0,)), entries=8192, kv_heads=2, stacked=True),
    Case(((655,),), queries=1, head_dim=64),
    Case(((655,), (3,)), queries=5, group=7, head_dim=64, dtype="float16"),
    Case(((655,),), queries=256, group=8, head_dim=64),
    Case(((655,),), queries=64, group=1),
    Case(((699,), (65,)), group=6),
    Case(((699,), (3,)), queries=40, group=4, head_dim=64, dtype="float16"),
    Case(((40,),), entries=40),
    Case(((40,),), group=1, entries=40),
    Case(((0,),), entries=64),
    Case(((9999,),), entries=704),
    Case((tuple(range(32, 513, 32)),), queries=512, entries=512),
    Case((tuple(range(32, 513, 32)), (0,) * 15 + (7,)), queries=512, entries=512, group=7, stacked=True),
    Case((tuple(range(1, 251)),), queries=250, entries=256),
]


def compiled(case, **options):
    """The jitted call, and its inputs; asserts that the kernel is in the lowered program."""
    p = make(case, seed=case.queries)
    f = jax.jit(functools.partial(block_attention, implementation="mosaic_gpu", **options))
    layer = None if p.layer is None else jnp.int32(p.layer)
    arguments = (p.q, p.cached_k, p.cached_v, p.lengths)
    assert "block_attention_mosaic_gpu" in f.lower(*arguments, layer=layer).as_text()
    return functools.partial(f, *arguments, layer=layer), p


def assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output(case):
    run, p = compiled(case)
    result = run()
    check_output(result, p, case)
    assert_same(result, run())


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_number_of_splits(splits, head_dim):
    """More splits than tiles too: some programs then have nothing to do."""
    case = Case(((699,), (65,)), head_dim=head_dim)
    run, p = compiled(case, config=AttentionConfig(splits=splits))
    check_output(run(), p, case)


CONFIGS = [
    AttentionConfig(warpgroups=1, query_chunk=8),
    AttentionConfig(warpgroups=2, query_chunk=64),
    AttentionConfig(kv_tile=64, stages=6),
    AttentionConfig(ping_pong=False, stages=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_tile_sizes(config):
    case = Case(((699,), (65,)))
    run, p = compiled(case, config=config)
    check_output(run(), p, case)


ROWS = {
    "all": (None, jnp.ones((2, 32), bool)),
    "one": (jnp.asarray([5, 31], jnp.int32), jnp.arange(32)[None] == jnp.asarray([[5], [31]])),
    "some": ((jnp.arange(64) % 3 == 1).reshape(2, 32),) * 2,
}


# Every choice of rows meets every number of splits, each combination of the others one of them.
KINDS = [("mean", "visible"), ("max", "visible"), ("mean", "prefix"), ("max", "prefix")]
IMPORTANCES = [(rows, *kind, (1, 3, 16)[(i + j) % 3]) for i, rows in enumerate(ROWS) for j, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("rows", "reduce", "over", "splits"), IMPORTANCES)
def test_importance(rows, reduce, over, splits):
    argument, mask = ROWS[rows]
    prefix = jnp.asarray([2001, 0], jnp.int32) if over == "prefix" else None
    options = {"importance": Importance(reduce, over), "importance_rows": argument, "prefix_lengths": prefix}
    case = Case(((2033,), (32,)), entries=2048, group=7 if splits == 3 else 4)
    run, p = compiled(case, config=AttentionConfig(splits=splits), **options)
    result = run()
    check_output(result, p, case)
    # The weights of one query are kept in bfloat16.
    dtype = "bfloat16" if rows == "one" else "float32"
    check_importance(result.importance, p, mask, reduce=reduce, prefix=prefix, dtype=dtype)
    assert_same(result, run())


def test_importance_of_an_empty_row_and_of_many_query_tiles():
    case = Case(((1000,), (0,)), queries=128, group=6, entries=1024, head_dim=64, dtype="float16")
    run, p = compiled(case, importance=Importance())
    result = run()
    check_output(result, p, case)
    check_importance(result.importance, p, jnp.ones((2, 128), bool), reduce="mean")


@pytest.mark.parametrize(("over", "splits", "page"), [("visible", 1, 8), ("prefix", 3, 16), ("visible", 16, 8)])
@pytest.mark.parametrize("group", [4, 6, 7])
def test_importance_by_page(over, splits, page, group):
    """With 16 splits tiles are halves; 6 and 7 heads of 32 queries leave rows of a tile empty."""
    case = Case(((2033,), (32,)), entries=2048, group=group, dtype="float16" if group == 7 else "bfloat16")
    prefix = jnp.asarray([2001, 0], jnp.int32)
    chosen = ROWS["some"][0]
    how = {"importance": Importance("mean", over, page), "importance_rows": chosen, "prefix_lengths": prefix}
    run, p = compiled(case, config=AttentionConfig(splits=splits), **how)
    result = run()
    check_output(result, p, case)
    check_pages(result.importance, p, chosen, over=over, page=page, prefix=prefix)
    assert_same(result, run())
    # The same in a stack, where the kernel puts it by pages of 8.
    stack = jnp.full((3, *result.importance.shape), 7.0)
    run, _ = compiled(case, config=AttentionConfig(splits=splits), importance_into=(stack, 1), **how)
    np.testing.assert_array_equal(run().importance, stack.at[1].set(result.importance))


def test_none_chooses_the_kernel_and_agrees_with_xla():
    case = Case(((699,), (65,)))
    p = make(case)
    automatic = jax.jit(block_attention)
    assert "block_attention_mosaic_gpu" in automatic.lower(p.q, p.k, p.v, p.lengths).as_text()
    check_output(automatic(p.q, p.k, p.v, p.lengths), p, case)
    check_output(block_attention(p.q, p.k, p.v, p.lengths, implementation="xla"), p, case)


def test_the_cache_is_not_copied():
    """The compiled program's temporary memory is far below one layer of the stacked cache."""
    case = Case(((4096,),), kv_heads=8, entries=4096, stacked=True)
    p = make(case)
    f = jax.jit(functools.partial(block_attention, implementation="mosaic_gpu"))
    memory = f.lower(p.q, p.cached_k, p.cached_v, p.lengths, layer=jnp.int32(1)).compile().memory_analysis()
    partial_results = 16 * 1024 * (128 + 1) * 4
    assert memory.temp_size_in_bytes <= partial_results + 2**20 < p.k.nbytes * 2
