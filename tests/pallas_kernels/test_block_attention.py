"""block_attention on the CPU: the XLA form against float32 references, its contract, and the kernel's lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels import AttentionOutput, Importance, attention_xla, block_attention, dispatch, merge_by_lse
from pallas_kernels.attention_plan import SMEM_LIMIT, AttentionConfig, make_plan
from pallas_kernels.reference import attention_reference
from tests.pallas_kernels.attention_cases import Case, Problem, assert_close, check_importance, check_output, make

CASES = [
    Case(((37,), (0,)), queries=5, group=3, entries=40, head_dim=16, dtype="float32", stacked=True),
    Case(((63,), (1,)), queries=8, group=7, entries=64, head_dim=64),
    Case(((40,),), queries=1, group=1, kv_heads=1, entries=40, head_dim=8, dtype="float16"),
    Case(((99,),), queries=4, group=6, entries=41, head_dim=16, dtype="float32"),  # a length beyond N is N
    Case(((4, 8, 0, 41),), queries=8, group=2, entries=41, head_dim=16, dtype="float32"),
    Case((tuple(range(1, 7)), (6, 5, 4, 3, 2, 0)), queries=6, group=2, entries=8, head_dim=16, dtype="float32"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_output(case):
    p = make(case)
    check_output(block_attention(p.q, p.cached_k, p.cached_v, p.lengths, layer=p.layer), p, case)


@pytest.mark.parametrize("queries_per_chunk", [1, 2, 4])
def test_chunks_of_queries(queries_per_chunk):
    """In chunks, the last one short: the same output, and importance summed over all of them."""
    case = Case(((21,), (9,)), queries=5, group=3, entries=24, head_dim=16, dtype="float32")
    p = make(case)
    rows = jnp.asarray([[1, 0, 1, 1, 1], [0, 0, 0, 0, 1]], bool)
    attend = functools.partial(
        attention_xla.attention_xla, scale=0.25, scores_limit=queries_per_chunk * p.q.shape[0] * p.q.shape[2] * 24 * 4
    )
    for reduce in ("mean", "max"):
        one = functools.partial(attend, importance=Importance(reduce))
        result = AttentionOutput(*jax.jit(one)(p.q, p.k, p.v, p.lengths, None, rows, None))
        check_output(result, p, case)
        check_importance(result.importance, p, rows, reduce=reduce)
    lengths = jnp.asarray([[3, 0, 21, 7, 1], [9, 9, 8, 1, 0]])
    several = Problem(*p[:-1], lengths)
    result = jax.jit(functools.partial(attend, importance=None))(p.q, p.k, p.v, lengths, None, None, None)
    check_output(AttentionOutput(*result), several, case)


def test_lengths_of_one_axis_and_a_scale():
    case = Case(((7,), (12,)), queries=3, group=2, entries=12, head_dim=8, dtype="float32")
    p = make(case)
    result = block_attention(p.q, p.k, p.v, jnp.asarray([7, 12]), scale=0.5)
    out, lse = jax.jit(functools.partial(attention_reference, scale=0.5))(p.q, p.k, p.v, p.lengths)
    assert_close(result.out, out, "float32")
    assert_close(result.lse, lse, "float32")


ROWS = {
    "all": lambda b, t: (None, jnp.ones((b, t), bool)),
    "one": lambda b, t: (jnp.arange(b, dtype=jnp.int32) + 1, jnp.arange(t)[None] == jnp.arange(b)[:, None] + 1),
    "some": lambda b, t: ((jnp.arange(b * t) % 3 == 1).reshape(b, t),) * 2,
    "none": lambda b, t: (jnp.zeros((b, t), bool),) * 2,
}


@pytest.mark.parametrize(("reduce", "over"), [("mean", "visible"), ("max", "prefix")])
@pytest.mark.parametrize("rows", ROWS)
def test_importance(rows, reduce, over):
    case = Case(((21,), (0,), (9,)), queries=5, group=3, entries=24, head_dim=16, dtype="float32")
    p = make(case)
    argument, mask = ROWS[rows](3, 5)
    prefix = jnp.asarray([16, 0, 4]) if over == "prefix" else None
    result = block_attention(
        p.q, p.k, p.v, p.lengths, importance=Importance(reduce, over), importance_rows=argument, prefix_lengths=prefix
    )
    check_output(result, p, case)
    check_importance(result.importance, p, mask, reduce=reduce, prefix=prefix)


@pytest.mark.parametrize(("reduce", "over"), [("mean", "visible"), ("max", "prefix")])
def test_importance_by_page_is_its_sum_below_the_prefix(reduce, over):
    case = Case(((21,), (0,), (9,)), queries=5, group=3, entries=24, head_dim=16, dtype="float32")
    p = make(case)
    prefix = jnp.asarray([17, 0, 4])
    run = functools.partial(block_attention, p.q, p.k, p.v, p.lengths)
    inside = prefix if over == "prefix" else None
    weight = np.array(run(importance=Importance(reduce, over), prefix_lengths=inside).importance)
    weight[np.broadcast_to(np.arange(24) >= np.asarray(prefix)[:, None, None], weight.shape)] = 0
    weight = np.pad(weight, ((0, 0), (0, 0), (0, 1)))
    got = run(importance=Importance(reduce, over, page=5), prefix_lengths=prefix).importance
    np.testing.assert_allclose(got, weight.reshape(3, 2, 5, 5).sum(axis=-1), rtol=1e-6)


@pytest.mark.parametrize("importance", [Importance("max"), Importance(page=8)], ids=["entries", "pages"])
def test_importance_into_a_stack(importance):
    case = Case(((21,), (9,)), queries=5, group=3, entries=24, head_dim=16, dtype="float32")
    p = make(case)
    prefix = jnp.asarray([17, 4]) if importance.page > 1 else None
    run = functools.partial(block_attention, p.q, p.k, p.v, p.lengths, importance=importance, prefix_lengths=prefix)
    alone = run()
    stack = jnp.full((3, *alone.importance.shape), 7.0)
    result = jax.jit(lambda stack, number: run(importance_into=(stack, number)))(stack, jnp.int32(1))
    np.testing.assert_allclose(result.out, alone.out, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.importance, stack.at[1].set(alone.importance), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="must be a stack of"):
        run(importance_into=(stack[0], 1))
    with pytest.raises(ValueError, match="goes with importance"):
        block_attention(p.q, p.k, p.v, p.lengths, importance_into=(stack, 1))


def test_importance_over_a_prefix_that_the_block_outweighs():
    """The block's own entries hold all of the visible softmax; over the prefix alone the weights are still exact."""
    q = jnp.ones((1, 1, 1, 4))
    k = jnp.concatenate([jnp.zeros((1, 1, 3, 4)), jnp.full((1, 1, 2, 4), 100.0)], axis=2)
    result = block_attention(
        q, k, k, jnp.asarray([5]), importance=Importance(over="prefix"), prefix_lengths=jnp.asarray([3])
    )
    np.testing.assert_allclose(result.importance, [[[1 / 3, 1 / 3, 1 / 3, 0, 0]]], rtol=1e-6)


def test_inside_loops_conditions_and_a_traced_layer():
    """A cache carried through a loop, each turn reading the layer of its own number."""
    case = Case(((13,),), queries=2, group=2, entries=16, head_dim=8, dtype="float32")
    p = make(case)
    k, v = (jnp.stack([x, x + 1, x - 1]) for x in (p.k, p.v))

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def run(q, k, v, lengths):
        def body(state):
            layer, total, k, v = state
            attend = functools.partial(block_attention, q, k, v, lengths, layer=layer)
            return layer + 1, total + lax.cond(layer < 2, lambda: attend().out, lambda: jnp.zeros_like(q)), k, v

        return lax.while_loop(lambda state: state[0] < 3, body, (jnp.int32(0), jnp.zeros_like(q), k, v))[1:]

    reference = jax.jit(attention_reference)
    expected = sum(reference(p.q, k[i], v[i], p.lengths)[0] for i in range(2))
    total, k_after, _ = run(p.q, k + 0, v, p.lengths)  # donates what it is given
    assert_close(total, expected, "float32")
    np.testing.assert_array_equal(k_after, k)


def test_inside_shard_map_each_device_has_its_heads():
    if jax.device_count() < 4:
        pytest.skip("needs four devices (tests/conftest.py makes four virtual ones on a CPU)")
    case = Case(((13,), (16,)), queries=3, kv_heads=4, group=2, entries=16, head_dim=8, dtype="float32")
    p = make(case)
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    heads, cache = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(heads, cache, cache, PartitionSpec()), out_specs=(heads, heads, cache)
    )
    def run(q, k, v, lengths):
        result = block_attention(q, k, v, lengths, importance=Importance())
        return result.out, result.lse, result.importance

    out, lse, importance = run(p.q, p.k, p.v, p.lengths)
    expected = block_attention(p.q, p.k, p.v, p.lengths, importance=Importance())
    assert_close(out, expected.out, "float32")
    assert_close(lse, expected.lse, "float32")
    assert_close(importance, expected.importance, "float32")


def test_no_array_grows_with_queries_times_entries():
    """Prefill of 64 x 2048 scores in chunks of 16 queries: no float32 array of the program holds them all."""
    limit = 16 * 4 * 2048 * 4
    q = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, 2, 2048, 8), jnp.float32)
    lengths = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def program(scores_limit):
        attend = functools.partial(attention_xla.attention_xla, scale=1.0, importance=None, scores_limit=scores_limit)
        return str(jax.make_jaxpr(lambda *x: attend(*x, None, None, None))(q, kv, kv, lengths))

    chunked, whole = program(limit), program(4 * limit)
    assert "f32[1,2,32,2048]" in chunked  # 16 queries of 2 heads
    assert "f32[1,2,128,2048]" not in chunked
    assert "f32[1,2,128,2048]" in whole


def test_gradient_of_the_xla_form():
    case = Case(((5,),), queries=2, group=2, entries=6, head_dim=8, dtype="float32")
    p = make(case)
    k, v = jnp.nan_to_num(p.k), jnp.nan_to_num(p.v)

    def loss(attend, q):
        return jnp.sum(attend(q) ** 2)

    ours = jax.jit(jax.grad(functools.partial(loss, lambda q: block_attention(q, k, v, p.lengths).out)))(p.q)
    expected = jax.jit(jax.grad(functools.partial(loss, lambda q: attention_reference(q, k, v, p.lengths)[0])))(p.q)
    assert_close(ours, expected, "float32", scale=10)


def test_merge_by_lse_joins_parts_of_the_entries():
    case = Case(((20,), (7,)), queries=3, group=2, entries=20, head_dim=8, dtype="float32")
    p = make(case)
    v = jnp.where(jnp.isnan(p.v), 0, p.v)
    reference = jax.jit(attention_reference)
    parts = [
        reference(p.q, p.k[:, :, a:b], v[:, :, a:b], jnp.clip(p.lengths - a, 0, b - a))
        for a, b in ((0, 7), (7, 8), (8, 20))
    ]
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    out, lse = jax.jit(merge_by_lse)(jnp.where(jnp.isneginf(lses)[..., None], jnp.nan, outs), lses)
    expected_out, expected_lse = reference(p.q, p.k, v, p.lengths)
    assert_close(out, expected_out, "float32")
    assert_close(lse, expected_lse, "float32")
    nothing, none = merge_by_lse(jnp.full((2, 3, 4), jnp.nan), jnp.full((2, 3), -jnp.inf))
    np.testing.assert_array_equal(nothing, 0)
    np.testing.assert_array_equal(none, -np.inf)


Q = jnp.zeros((2, 6, 4, 8))
KV = jnp.zeros((2, 2, 16, 8))
LENGTHS = jnp.zeros((2,), jnp.int32)
MISTAKES = {
    "q of rank 3": ({"q": Q[0]}, "q must be"),
    "v unlike k": ({"v": KV[:, :, :8]}, "k and v must both"),
    "layer without layers": ({"layer": 0}, "layer goes with"),
    "layers without layer": ({"k": KV[None], "v": KV[None]}, "layer goes with"),
    "layer out of range": ({"k": KV[None], "v": KV[None], "layer": 1}, "outside"),
    "head dim": ({"q": jnp.zeros((2, 6, 4, 4))}, "does not fit"),
    "heads": ({"q": jnp.zeros((2, 6, 5, 8))}, "does not fit"),
    "dtype": ({"q": Q.astype(jnp.bfloat16)}, "one dtype"),
    "runs that do not divide": ({"lengths": jnp.zeros((2, 4), jnp.int32)}, "lengths must be"),
    "rows without importance": ({"importance_rows": LENGTHS}, "go with importance"),
    "prefix without over": ({"importance": Importance(), "prefix_lengths": LENGTHS}, "prefix_lengths goes with"),
    "over without prefix": ({"importance": Importance(over="prefix")}, "prefix_lengths goes with"),
    "short prefix": ({"importance": Importance(over="prefix"), "prefix_lengths": LENGTHS[:1]}, "must be i32"),
    "short rows": ({"importance": Importance(), "importance_rows": jnp.zeros((2, 5), bool)}, "importance_rows must be"),
    "rows of floats": ({"importance": Importance(), "importance_rows": jnp.zeros((2,))}, "importance_rows must be"),
    "scale": ({"scale": 0.0}, "scale must be"),
    "implementation": ({"implementation": "triton"}, "triton"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    changed, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        block_attention(**({"q": Q, "k": KV, "v": KV, "lengths": LENGTHS} | changed))


def test_importance_of_queries_that_see_different_entries_is_not_implemented():
    with pytest.raises(NotImplementedError, match="Q = 3"):
        block_attention(Q, KV, KV, jnp.zeros((2, 3), jnp.int32), importance=Importance())


@pytest.mark.parametrize("field", [{"reduce": "sum"}, {"over": "all"}, {"page": 0}], ids=str)
def test_importance_has_named_options(field):
    with pytest.raises(ValueError, match="must be"):
        Importance(**field)


PLANS = {
    "warpgroups": (AttentionConfig(warpgroups=4), "no tile of query rows"),
    "registers": (AttentionConfig(warpgroups=3, kv_tile=128), "registers for a kv_tile of 64, not 128"),
    "chunk": (AttentionConfig(query_chunk=128, warpgroups=1), "no tile of query rows"),
    "tile": (AttentionConfig(kv_tile=96), "kv_tile must be"),
    "stages": (AttentionConfig(stages=1), "stages >= 2"),
    "shared memory": (AttentionConfig(stages=4, kv_tile=256), "bytes of shared memory"),
    "ping_pong": (AttentionConfig(warpgroups=1, query_chunk=32, ping_pong=True), "two compute warpgroups"),
}


@pytest.mark.parametrize("wrong", PLANS)
def test_explicit_tile_sizes_are_checked(wrong):
    q, k = jax.ShapeDtypeStruct((1, 32, 32, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 8, 1024, 128), jnp.bfloat16)
    config, message = PLANS[wrong]
    with pytest.raises(ValueError, match=message):
        make_plan(q, k, 1, config)


@pytest.mark.once
@pytest.mark.parametrize("group", [1, 2, 4, 6, 7, 8])
@pytest.mark.parametrize("queries", [1, 5, 32, 100, 256])
def test_plans_cover_every_query_and_fit(queries, group):
    q = jax.ShapeDtypeStruct((3, queries, 2 * group, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((3, 2, 2048, 128), jnp.bfloat16)
    plan = make_plan(q, k, 1, None)
    assert plan.smem_bytes() <= SMEM_LIMIT
    assert plan.tiles * plan.slabs >= plan.chunks * group
    assert plan.chunks * plan.query_chunk >= queries
    number = jnp.arange(3 * queries * 2 * group, dtype=jnp.float32).reshape(3, queries, 2 * group)
    rows = plan.queries_to_rows(number, -1.0)
    np.testing.assert_array_equal(plan.rows_to_queries(rows), number)
    assert np.sum(np.asarray(rows) >= 0) == number.size  # each query once


def test_batch_one_fills_the_card_and_prefill_is_not_split():
    def splits(batch, queries, entries, runs=1):
        q = jax.ShapeDtypeStruct((batch, queries, 32, 128), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((batch, 8, entries, 128), jnp.bfloat16)
        return make_plan(q, k, runs, None).splits

    assert splits(1, 32, 65536) == 16  # 8 heads x 16 = 128 of 132 multiprocessors
    assert splits(4, 32, 65536) == 4
    assert splits(16, 32, 65536) == 1
    assert splits(1, 32768, 32768, 1024) == 1


needs_mosaic = pytest.mark.skipif(
    dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: the interface of its Mosaic GPU backend"
)
LOWERED = {
    "one_split": (Case(((1024,),) * 16, entries=1024), {}, {"block_attention"}),
    "splits": (Case(((65536,),), kv_heads=8, entries=65536), {}, {"block_attention", "block_attention_finish"}),
    "stacked_g7": (Case(((4096,),), kv_heads=4, group=7, entries=4096, stacked=True), {}, {"block_attention"}),
    "d64_g6_f16": (Case(((640,), (1,)), queries=5, group=6, head_dim=64, dtype="float16"), {}, {"block_attention"}),
    "block_causal": (Case((tuple(range(32, 257, 32)),), queries=256, entries=256), {}, {"block_attention"}),
    "any_lengths": (Case((tuple(range(1, 57)),), queries=56, group=7, entries=256), {}, {"block_attention"}),
    "one_query": (
        Case(((700,), (1,))),
        {"importance": Importance("max"), "importance_rows": jnp.asarray([3, 4])},
        {"block_attention", "block_attention_finish"},
    ),
    "many_queries": (
        Case(((700,), (1,)), queries=128, group=6),
        {"importance": Importance(over="prefix"), "prefix_lengths": jnp.asarray([600, 0])},
        {"block_attention", "block_attention_importance"},
    ),
    "by_page": (
        Case(((700,), (1,)), group=6),
        {"importance": Importance(over="prefix", page=16), "prefix_lengths": jnp.asarray([600, 0])},
        {"block_attention", "block_attention_pages"},
    ),
    "by_page_into_a_stack": (
        Case(((700,), (1,)), group=6),
        {
            "importance": Importance(page=8),
            "prefix_lengths": jnp.asarray([600, 0]),
            "importance_into": (jnp.zeros((3, 2, 2, 88)), 1),
        },
        {"block_attention", "block_attention_finish"},
    ),
}


def h100s(count):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    return jax.sharding.AbstractMesh((count,), ("model",), (AxisType.Explicit,), abstract_device=device)


@needs_mosaic
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_an_abstract_h100(name):
    """The whole kernel goes through Mosaic GPU's own checks, on a machine without a GPU."""
    case, options, kernels = LOWERED[name]
    p = jax.eval_shape(functools.partial(make, case))

    def run(q, k, v, lengths):
        layer = None if not case.stacked else jnp.int32(1)
        return block_attention(q, k, v, lengths, layer=layer, implementation="mosaic_gpu", **options)

    lengths = jax.ShapeDtypeStruct((len(case.lengths), len(case.lengths[0])), jnp.int32)
    with jax.sharding.use_abstract_mesh(h100s(1)):
        traced = jax.jit(run).trace(p.q, p.cached_k, p.cached_v, lengths)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for kernel in kernels:
        assert f"{kernel}_mosaic_gpu" in text


@needs_mosaic
@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
def test_lowers_inside_shard_map_and_a_loop(implementation):
    """Each device has its heads; the types of a kernel's results have to say that they differ between devices."""
    heads, cache = PartitionSpec(None, None, "model"), PartitionSpec(None, None, "model")

    def per_device(q, k, v, lengths):
        def step(layer, q):
            return block_attention(q, k, v, lengths, layer=layer, implementation=implementation).out

        result = block_attention(
            lax.fori_loop(0, 3, step, q), k, v, lengths, layer=0, importance=Importance(), implementation=implementation
        )
        return result.out, result.lse, result.importance

    mesh = h100s(2)
    with jax.sharding.use_abstract_mesh(mesh):

        def spec(shape, dtype, where):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, where))

        q = spec((2, 32, 8, 128), jnp.bfloat16, heads)
        kv = spec((3, 2, 2, 1024, 128), jnp.bfloat16, cache)
        lengths = spec((2,), jnp.int32, PartitionSpec())
        specs = (heads, heads, PartitionSpec(None, "model"))
        run = jax.shard_map(per_device, in_specs=(heads, cache, cache, PartitionSpec()), out_specs=specs)
        text = jax.jit(run).trace(q, kv, kv, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "block_attention_mosaic_gpu" in text
    assert "block_attention_importance_mosaic_gpu" in text
