"""The MAGE plan: equal to the dense plan where it chooses everything, to a plain restatement where it does not."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import herald_jax
from herald_jax import BlockEvent, Dense, GenerateConfig, GenerationError, Mage, Threshold, block_loop, select
from herald_jax.cache import DeviceKV
from herald_jax.denoise import Sampling, StaticLowConfidence
from herald_jax.generate import _Run
from herald_jax.mage import MageAttend, MageKV
from herald_jax.model import bind
from tests.herald_jax import plain_mage, tiny

FORMS = {name: dataclasses.replace(form, num_layers=3) for name, form in tiny.FORMS.items()}
LENGTHS = (1, 18, 33, 8)  # a prefix of length 0, two ragged ones, one of whole blocks
REQUEST = GenerateConfig(max_new_tokens=11, policy=Threshold(0.6), ignore_stop=True)


@pytest.mark.parametrize(
    "plan",
    [
        Mage(1.0, dense_layers=1, rest="keep"),
        pytest.param(Mage(1000, dense_layers=0, query="center", select_at_step=2), marks=pytest.mark.once),
        pytest.param(Mage(1.0, dense_layers=0, allocate="layer_adaptive", min_budget=2), marks=pytest.mark.once),
        Mage(0.01, dense_layers=0, min_budget=64, selector="oracle"),
        pytest.param(Mage(1.0, dense_layers=1, query="last", selector="oracle"), marks=pytest.mark.once),
        Mage(1.0, dense_layers=1, selector="quest"),
        pytest.param(Mage(1.0, dense_layers=0, selector="random"), marks=pytest.mark.once),
    ],
    ids=lambda plan: f"{plan.selector}-{plan.allocate}-{plan.query}",
)
def test_choosing_everything_is_dense(plan):
    model = tiny.model(FORMS["sdar"])
    prompts = tiny.prompts(LENGTHS)
    dense = herald_jax.generate(model, prompts, REQUEST, Dense())
    sparse = herald_jax.generate(model, prompts, REQUEST, plan)
    assert sparse.tokens == dense.tokens
    assert sparse.stats.sparse_blocks == dense.stats.sparse_blocks == 0
    assert dense.stats.exact_forwards == 0
    assert sparse.stats.forwards == dense.stats.forwards


PLANS = [
    ("sdar", Mage(0.2, dense_layers=1, min_budget=2, page_size=1, rest="keep")),
    pytest.param(
        "sdar",
        Mage(
            5,
            dense_layers=0,
            min_budget=0,
            query="center",
            reduce="max",
            normalise="prefix",
            sinks=1,
            recent=2,
            page_size=3,
        ),
        marks=pytest.mark.once,
    ),
    pytest.param(
        "sdar",
        Mage(0.25, dense_layers=1, min_budget=3, query="last", select_at_step=2, rest="keep", page_size=2),
        marks=pytest.mark.once,
    ),
    pytest.param("sdar", Mage(6, dense_layers=0, min_budget=0, selector="tidal", rest="keep"), marks=pytest.mark.once),
    pytest.param("sdar", Mage(6, dense_layers=1, min_budget=0, selector="recent"), marks=pytest.mark.once),
    ("fast_dllm", Mage(0.2, dense_layers=1, min_budget=2, query="first")),
    # One selection for several blocks: of several steps each, and of one token each.
    pytest.param("sdar", Mage(0.2, dense_layers=1, min_budget=2, select_every=2), marks=pytest.mark.once),
    ("llama", Mage(3, dense_layers=1, min_budget=0, select_every=4)),
]


@pytest.mark.parametrize(("form", "plan"), PLANS, ids=lambda x: x if isinstance(x, str) else f"{x.selector}-{x.query}")
def test_equals_the_plain_restatement_row_by_row(form, plan):
    model = tiny.model(FORMS[form])
    prompts = tiny.prompts(LENGTHS)
    result = herald_jax.generate(model, prompts, REQUEST, plan)
    assert result.tokens == [plain_mage.decode(model, prompt, REQUEST, plan) for prompt in prompts]
    assert 0 < result.stats.sparse_blocks < result.stats.blocks  # the first block of the shortest row covers its prefix
    if plan is PLANS[0][1]:
        assert result.tokens != herald_jax.generate(model, prompts, REQUEST, Dense()).tokens

    streamed = [[] for _ in prompts]
    for event in herald_jax.stream(model, prompts, REQUEST, plan):
        if isinstance(event, BlockEvent):
            streamed[event.row] += event.tokens
    assert streamed == result.tokens


def test_a_selection_for_all_blocks_needs_room_for_those_there_are():
    model, prompts = tiny.model(FORMS["sdar"]), tiny.prompts((18, 33))
    ever, long = (
        herald_jax.generate(model, prompts, REQUEST, Mage(0.2, dense_layers=1, min_budget=2, select_every=every))
        for every in (10**9, 5)
    )
    assert ever.tokens == long.tokens
    assert ever.stats.exact_forwards == 1
    assert ever.stats.kv_bytes < 2 * long.stats.kv_bytes


@pytest.mark.once
def test_a_selection_for_several_single_tokens():
    """At block length 1: exact at every fourth token, equal to dense if everything is chosen, the same on a mesh."""
    model, prompts = tiny.model(FORMS["llama"]), tiny.prompts(LENGTHS)
    dense = herald_jax.generate(model, prompts, REQUEST, Dense())
    everything = herald_jax.generate(model, prompts, REQUEST, Mage(1.0, dense_layers=1, select_every=4))
    assert everything.tokens == dense.tokens
    assert everything.stats.exact_forwards == 3  # of eleven
    assert everything.stats.sparse_blocks == 0
    _, plan = PLANS[-1]
    sparse = herald_jax.generate(model, prompts, REQUEST, plan)
    assert sparse.tokens != dense.tokens
    mesh = herald_jax.make_mesh(model=2, data=2)
    many = herald_jax.Model.from_params(FORMS["llama"], tiny.params(FORMS["llama"]), mesh=mesh)
    assert herald_jax.generate(many, prompts, REQUEST, plan).tokens == sparse.tokens


@pytest.mark.parametrize(
    "plan",
    [
        Mage(0.2, dense_layers=1, min_budget=2, allocate="layer_adaptive", rest="keep"),
        pytest.param(Mage(4, min_budget=0, selector="random"), marks=pytest.mark.once),
    ],
    ids=["layer_adaptive", "random"],
)
def test_a_row_does_not_depend_on_its_neighbours(plan):
    model = tiny.model(FORMS["sdar"])
    prompts = tiny.prompts((18, 3, 33, 18))
    request = dataclasses.replace(REQUEST, temperature=1.0)
    keys = jax.random.split(jax.random.key(5), 4)
    together = herald_jax.generate(model, prompts, request, plan, keys=keys).tokens
    swapped = herald_jax.generate(model, prompts[::-1], request, plan, keys=keys[::-1]).tokens
    assert together == swapped[::-1]


@pytest.mark.once
def test_jitted_loop_is_the_python_loop():
    config = FORMS["sdar"]
    model, plan = tiny.model(config), Mage(0.3, dense_layers=1, min_budget=2, select_at_step=2, rest="keep")
    prompts = tiny.prompts(LENGTHS)
    request = dataclasses.replace(REQUEST, policy=StaticLowConfidence(3))
    expected = herald_jax.generate(model, prompts, request, plan)

    run = _Run(model, prompts, request, plan, None, None)
    rows, options = run._rows, run._options
    stops, sampling = jnp.asarray([-1]), Sampling.of(0.0, 0, 1.0)

    @jax.jit
    def select_step(rows, waiting):
        return block_loop.step(
            bind(config, model.params), rows, request.policy, sampling, stops, options, phase="select", waiting=waiting
        )

    @jax.jit
    def sparse_step(rows, waiting):
        return block_loop.step(
            bind(config, model.params), rows, request.policy, sampling, stops, options, phase="sparse", waiting=waiting
        )

    while not bool(rows.done.all()):
        for i in range(plan.select_at_step):
            rows = select_step(rows, (rows.step == 0) & (i > 0))
        while bool((~rows.done & (rows.step > 0)).any()):
            rows = sparse_step(rows, rows.step == 0)
    got = [
        np.asarray(rows.tokens)[i, len(prompt) : len(prompt) + request.max_new_tokens].tolist()
        for i, prompt in enumerate(prompts)
    ]
    assert got == expected.tokens


def test_pool_holds_the_chosen_rows_bit_for_bit():
    config = FORMS["sdar"]
    model, plan = tiny.model(config), Mage(6, dense_layers=1, min_budget=0)
    prompts = tiny.prompts((18, 33))
    run = _Run(model, prompts, REQUEST, plan, None, None)

    @jax.jit
    def one(rows):
        module = bind(config, model.params)
        return block_loop.step(
            module, rows, REQUEST.policy, Sampling.of(0.0, 0, 1.0), jnp.asarray([-1]), run._options, phase="select"
        )

    cache = one(run._rows).cache
    assert isinstance(cache, MageKV)
    counts = np.asarray(cache.counts)
    assert counts.tolist() == [[0, 0], [6, 6], [6, 6]]
    indices = np.asarray(cache.indices)[-1]
    assert (np.asarray(cache.indices)[0] == -1).all()
    for b in range(2):
        for head in range(config.num_kv_heads):
            chosen = indices[b, head][indices[b, head] >= 0]
            assert len(chosen) == 6
            assert (np.diff(chosen) > 0).all()
            assert chosen.max() < len(prompts[b]) // 4 * 4
            for full, pool in ((cache.full.k, cache.pool.k), (cache.full.v, cache.pool.v)):
                np.testing.assert_array_equal(np.asarray(pool)[-1, b, head, :6], np.asarray(full)[-1, b, head, chosen])


@pytest.mark.once
@pytest.mark.parametrize(("form", "query"), [("sdar", "all"), ("sdar", "center"), ("fast_dllm", "all")])
def test_recall_and_kept_mass_are_the_plain_ones(form, query):
    """Measured beside the sparse steps, on one device and on a mesh, without changing a token."""
    config, plan = FORMS[form], Mage(5, dense_layers=1, min_budget=0, query=query)
    model, prompts = tiny.model(config), tiny.prompts((18, 33))
    unmeasured = herald_jax.generate(model, prompts, REQUEST, plan)
    assert unmeasured.stats.recall is None
    quality = []
    tokens = [plain_mage.decode(model, prompt, REQUEST, plan, quality) for prompt in prompts]
    many = herald_jax.Model.from_params(config, tiny.params(config), mesh=herald_jax.make_mesh(model=2))
    for on in (model, many):
        result = herald_jax.generate(on, prompts, REQUEST, dataclasses.replace(plan, measure=True))
        assert result.tokens == unmeasured.tokens == tokens
        recall, mass = np.mean(quality, axis=0)
        assert 0.3 < recall < 0.98
        np.testing.assert_allclose(result.stats.recall, recall, rtol=1e-4)
        np.testing.assert_allclose(result.stats.mass_kept, mass, rtol=1e-4)
        assert f"recall {recall:.3f}" in "\n".join(result.stats.lines())


AFTER_0_10 = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX 0.10, which has no GPU kernels, copies the cache beside a rest; needs JAX 0.11",
)


@pytest.mark.parametrize("rest", ["drop", pytest.param("keep", marks=AFTER_0_10)])
def test_no_copy_of_the_cache_or_the_pool_in_the_compiled_loop(rest):
    config = FORMS["sdar"]
    model = tiny.model(config)
    plan = Mage(0.2, dense_layers=1, min_budget=2, rest=rest)
    run = _Run(model, tiny.prompts((18, 33)), REQUEST, plan, None, None)
    assert isinstance(run._rows.cache, MageKV)
    stops = jnp.asarray([-1])
    lowered = block_loop.run_blocks.lower(
        model.params, run._rows, REQUEST.policy, run._sampling, stops, np.bool_(False), options=run._options
    )
    program = lowered.compile().as_text()
    for kv in (run._rows.cache.full, run._rows.cache.pool):
        shape = "f32\\[" + ",".join(map(str, kv.k.shape)) + "\\]"
        assert len(re.findall(f"= {shape}", program)) > 10  # the pattern finds what it looks for
        assert re.findall(f"= {shape}\\S* copy\\(", program) == []


@pytest.mark.parametrize(
    ("plan", "layer", "sparse", "waits"),
    [
        (Mage(8), 2, False, True),
        (Mage(8, selector="quest"), 2, False, True),
        (Mage(8, allocate="layer_adaptive"), 2, False, True),
        (Mage(8, measure=True), 2, True, True),
        (Mage(8), 2, True, False),  # reads the pool alone
        (Mage(8), 1, False, False),  # a dense layer selects nothing
    ],
)
def test_a_layers_output_waits_for_what_reads_the_cache(plan, layer, sparse, waits):
    """Lowered for its output alone, a layer still selects: else XLA would copy the cache at the next layer's write.

    (On a GPU. The fallback attention reads a slice, which XLA takes in time: no program for a CPU shows that copy.)
    """
    config = FORMS["sdar"]
    cache = MageKV.around(DeviceKV.empty(config, 2, 64), plan, config, 64, None)
    prefix = jnp.array([20, 30], jnp.int32)
    every = jnp.ones((2, 4), bool)
    attend = MageAttend(prefix, prefix[:, None] + 4, every, plan, sparse, same=every).at(layer)
    q = jnp.ones((2, 4, config.num_kv_heads, config.group_size, config.head_dim))
    k = q[:, :, :, 0]
    program = jax.jit(lambda cache: attend(layer, q, k, k, cache)[0]).lower(cache).as_text()
    assert ("optimization_barrier" in program) == waits


@pytest.mark.parametrize("allocate", ["uniform", pytest.param("layer_adaptive", marks=pytest.mark.once)])
def test_sharded_is_unsharded(allocate):
    config = FORMS["sdar"]
    one, mesh = tiny.model(config), herald_jax.make_mesh(model=2, data=2)
    many = herald_jax.Model.from_params(config, tiny.params(config), mesh=mesh)
    prompts = tiny.prompts(LENGTHS)
    plan = Mage(0.2, dense_layers=1, min_budget=2, allocate=allocate, rest="keep")
    expected = herald_jax.generate(one, prompts, REQUEST, plan).tokens
    assert herald_jax.generate(many, prompts, REQUEST, plan).tokens == expected


def test_blocks_that_finish_in_one_step():
    model, prompts = tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS)
    request = dataclasses.replace(REQUEST, policy=Threshold(0.0))
    plan = Mage(0.2, dense_layers=1, min_budget=2)
    result = herald_jax.generate(model, prompts, request, plan)
    assert result.tokens == [plain_mage.decode(model, prompt, request, plan) for prompt in prompts]
    assert result.stats.steps_per_block == 1


def test_a_step_that_no_block_comes_to_never_selects():
    """All that a block has are exact then, and no more of them are made than there are."""
    late = Mage(0.2, dense_layers=1, min_budget=2, select_at_step=10**9)
    model, prompts = tiny.model(FORMS["sdar"]), tiny.prompts(LENGTHS)
    result = herald_jax.generate(model, prompts, REQUEST, late)
    assert result.tokens == herald_jax.generate(model, prompts, REQUEST, Dense()).tokens
    assert result.stats.exact_forwards == result.stats.batch_forwards


@pytest.mark.parametrize(
    ("plan", "request_", "sentence"),
    [
        (Mage(dense_layers=3), REQUEST, "dense_layers is 3, but the model has 3 layers; leave some sparse"),
        (Mage(selector="tidal", reselect_layers=(1,)), REQUEST, "reselect_layers names layer 1, but the sparse layers"),
        (Mage(), dataclasses.replace(REQUEST, block_cache=True), "block_cache goes with the dense plan only"),
        ("mage", REQUEST, "plan is 'mage', but must be Dense(), Mage(...) or Herald(...)"),
    ],
)
def test_requests_the_model_cannot_serve_are_refused(plan, request_, sentence):
    with pytest.raises(GenerationError) as error:
        herald_jax.generate(tiny.model(FORMS["fast_dllm"]), tiny.prompts((3,)), request_, plan)
    assert sentence in str(error.value)


def test_pool_is_sized_by_the_budget():
    plan = Mage(0.05)
    assert select.selected_capacity(plan, 131072) == 6592  # 6,554 entries, in steps of 64
    assert select.selected_capacity(dataclasses.replace(plan, allocate="layer_adaptive"), 131072) == 26240
    unbound = dataclasses.replace(plan, allocate="layer_adaptive", layer_spread=math.inf)
    assert select.selected_capacity(unbound, 1000) == 1024
    assert select.selected_capacity(plan, 100) == 128
