"""Selection against plain NumPy: budgets, query rows, residents, Quest's bounds, MAGE v1's votes and layer budgets."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import GenerationError, Mage, select
from pallas_kernels import select_topk


@pytest.mark.parametrize("budget", [0.05, 0.07, 0.1, 1 / 3, 1.0, 1, 37, 512])
def test_budget_is_the_plans_for_every_prefix(budget):
    plan = Mage(budget, min_budget=8, sinks=1, recent=2) if budget != 1 else Mage(1, min_budget=8)
    prefix = np.arange(3000, dtype=np.int32)
    traced = np.asarray(select.budget_of(plan, jnp.asarray(prefix)))
    assert traced.tolist() == [plan.entries(int(n)) for n in prefix]
    assert (traced <= prefix).all()
    assert select.selected_capacity(plan, 2999) >= traced.max()


def test_a_fraction_is_rounded_up_but_not_by_float_noise():
    plan = Mage(0.07, min_budget=0)
    assert [plan.entries(n) for n in (0, 1, 100, 101, 200)] == [0, 1, 7, 8, 14]


@pytest.mark.parametrize("query", ["all", "center", "first", "last"])
def test_query_rows(query):
    rng = np.random.default_rng(1)
    masked = rng.random((40, 7)) < 0.5
    masked[:3] = [[True] * 7, [True] + [False] * 6, [False] * 6 + [True]]
    rows = select.query_rows(Mage(query=query), jnp.asarray(masked))
    if query == "all":
        np.testing.assert_array_equal(np.asarray(rows), masked)
        return
    cost = {"first": lambda i: i, "last": lambda i: -i, "center": lambda i: abs(i - 3)}[query]
    for row, chosen in zip(masked, np.asarray(rows), strict=True):
        if row.any():
            assert chosen == min(np.flatnonzero(row), key=lambda i: (cost(i), i))
    flags = np.asarray(select.chosen(rows, 7))
    np.testing.assert_array_equal(flags.sum(axis=1), 1)
    np.testing.assert_array_equal(flags.argmax(axis=1), np.asarray(rows))


def test_pick_takes_residents_first_and_never_leaves_the_prefix():
    rng = np.random.default_rng(2)
    plan = Mage(6, min_budget=0, sinks=2, recent=3, page_size=1)
    score = rng.random((4, 2, 50), np.float32)
    prefix = np.array([50, 17, 4, 0], np.int32)
    counts = np.array([plan.entries(int(n)) for n in prefix], np.int32)
    got = np.asarray(select.pick(plan, jnp.asarray(score), jnp.asarray(counts), jnp.asarray(prefix), 8, None))
    for b, n in enumerate(prefix):
        for head in range(2):
            always = {i for i in range(n) if i < 2 or i >= n - 3}
            rest = sorted((i for i in range(n) if i not in always), key=lambda i: -score[b, head, i])
            expected = sorted([*always, *rest[: counts[b] - len(always)]])
            assert got[b, head].tolist() == expected + [-1] * (8 - len(expected))


def test_quest_bounds_no_key_exceeds_its_page():
    rng = np.random.default_rng(3)
    q = rng.normal(size=(2, 5, 6, 8)).astype(np.float32)
    k = rng.normal(size=(2, 3, 21, 8)).astype(np.float32)
    k[0, :, 13:] = np.nan  # past the prefix: never read
    rows = np.array([[True, False, True, True, False], [False, True, False, False, False]])
    prefix = np.array([13, 21], np.int32)
    args = [jnp.asarray(x) for x in (q, k, rows, prefix)]
    bound = np.asarray(select.page_bounds(Mage(reduce="max", page_size=4), *args))
    exact = np.asarray(select.page_bounds(Mage(reduce="max", page_size=1), *args))
    dots = np.einsum("bmkgd,bknd->bkmgn", q.reshape(2, 5, 3, 2, 8), k)
    for b in range(2):
        best = dots[b][:, rows[b]].max(axis=(1, 2))[:, : prefix[b]]
        np.testing.assert_allclose(exact[b][:, : prefix[b]], best, rtol=1e-5)  # a page of one key is the key
        assert (bound[b][:, : prefix[b]] >= best - 1e-5).all()
        assert np.isfinite(bound[b]).all()
    for start in range(0, 20, 4):  # one score per page
        assert (np.ptp(bound[1, :, start : start + 4], axis=-1) == 0).all()


def test_random_scores_repeat_for_a_block_and_change_with_the_prefix():
    prefix = jnp.asarray([40, 40, 44], jnp.int32)
    a = np.asarray(select.random_score(3, prefix, 0, 4, 60))
    np.testing.assert_array_equal(a[0], a[1])
    assert (a[0] != a[2]).mean() > 0.99
    assert (a[0, 0] != a[0, 1]).mean() > 0.99
    np.testing.assert_array_equal(np.asarray(select.random_score(3, prefix, 2, 2, 60)), a[:, 2:])  # a device's share
    assert (np.asarray(select.random_score(4, prefix, 0, 4, 60))[0] != a[0]).mean() > 0.99


def _v1(plan, q, k, rows, visible, prefix):
    """MAGE v1 of one layer and row, in float64 loops: votes [K, N] and need per KV head."""
    m, h, d = q.shape
    heads, n = k.shape[:2]
    group, budget = h // heads, plan.entries(prefix)
    votes, need = np.zeros((heads, n), int), np.zeros(heads)
    for head in range(heads):
        coverage, queries = 0.0, [(i, g) for i in range(m) if rows[i] for g in range(group)]
        weights = {}
        for i, g in queries:
            seen = prefix if plan.normalise == "prefix" else visible
            scores = k[head, :seen] @ q[i, head * group + g] / math.sqrt(d)
            weight = np.exp(scores - scores.max(initial=-np.inf))
            weights[i, g] = np.zeros(n)
            weights[i, g][:seen] = weight / weight.sum() if seen else 0
            top = sorted(range(prefix), key=lambda j: (-weights[i, g][j], j))[:budget]
            votes[head, top] += 1
        union = votes[head] > 0
        for weight in weights.values():
            coverage += weight[union].sum() / max(len(queries), 1)
        need[head] = union.sum() * (1 - math.log(max(coverage, np.finfo(np.float32).tiny)))
    return votes, need


@pytest.mark.parametrize("normalise", ["prefix", "prefix+block"])
def test_votes_coverage_and_need_are_v1s(normalise):
    rng = np.random.default_rng(4)
    plan = Mage(0.2, min_budget=2, allocate="layer_adaptive", normalise=normalise)
    q = rng.normal(size=(3, 4, 6, 16)).astype(np.float32) * 2
    k = rng.normal(size=(3, 2, 45, 16)).astype(np.float32)
    rows = np.array([[True, True, True, True], [False, True, False, True], [True, False, False, False]])
    prefix, visible = np.array([40, 23, 1], np.int32), np.array([44, 27, 5], np.int32)
    votes, need = select.votes_and_need(plan, *(jnp.asarray(x) for x in (q, k, rows, visible, prefix)), 10)
    for b in range(3):
        expected = _v1(plan, q[b].astype(float), k[b].astype(float), rows[b], int(visible[b]), int(prefix[b]))
        np.testing.assert_array_equal(np.asarray(votes)[b], expected[0])
        np.testing.assert_allclose(np.asarray(need)[b], expected[1], rtol=1e-4)


def test_layer_budgets_are_v1s_shares():
    rng = np.random.default_rng(5)
    plan = Mage(0.1, min_budget=7, allocate="layer_adaptive", layer_spread=1.5)
    need = rng.gamma(2.0, size=(5, 3)).astype(np.float32)
    prefix = np.array([400, 90, 5], np.int32)

    def budgets(plan, capacity=600):
        return np.asarray(select.layer_budgets(plan, jnp.asarray(need), jnp.asarray(prefix), capacity))

    got = budgets(plan)
    for b, n in enumerate(prefix):
        mean = plan.entries(int(n))
        for layer in range(5):
            share = math.floor(np.float32(need[layer, b] / need[:, b].sum() * mean * 5))
            # float32 may floor the other way
            assert abs(got[layer, b] - min(max(7, share), n, int(1.5 * mean))) <= (share > 7)
    assert (got[:, 2] == 5).all()
    assert got[:, 0].max() == 60  # of 40, whatever the pool has room for
    # A budget of everything is everything in every layer, however little one needs.
    for budget in (1.0, 500):
        assert (budgets(dataclasses.replace(plan, budget=budget)) == prefix).all()
    assert (budgets(dataclasses.replace(plan, layer_spread=math.inf)) <= prefix).all()
    always = dataclasses.replace(plan, min_budget=0, sinks=3, recent=5)
    assert (budgets(always) >= np.minimum(8, prefix)).all()


def test_pages_are_chosen_by_their_mean():
    """Whole but for the last one; the page that the prefix cuts by what is inside; residents entry by entry."""
    score = jnp.asarray([[[5.0, 0, 0, 1, 1, 2, 1, 3, 3, 9]]])  # pages of 3: 5 / 3, 4 / 3, then 7 / 3 or, cut, 3
    plan = Mage(4, min_budget=0, page_size=3)

    def chosen(plan, prefix):
        got = np.asarray(select.pick(plan, score, jnp.array([4]), jnp.array([prefix]), 6, None))[0, 0]
        return got[got >= 0].tolist()

    assert chosen(plan, 9) == [0, 6, 7, 8]
    assert chosen(plan, 7) == [0, 1, 2, 3]
    assert chosen(plan, 8) == [0, 1, 6, 7]
    assert chosen(dataclasses.replace(plan, sinks=1, recent=1), 9) == [0, 6, 7, 8]
    assert chosen(dataclasses.replace(plan, sinks=2), 8) == [0, 1, 6, 7]


@pytest.mark.parametrize("size", [2, 8])
def test_choosing_pages_finds_what_choosing_their_entries_does(size):
    """Equal means, means of 0 and -0, NaN, a prefix that ends in a page, budgets of everything and of nothing."""
    rng = np.random.default_rng(size)
    plan = Mage(4, min_budget=0, page_size=size)
    slots, capacity, rows = 61, 29, 24
    score = rng.integers(0, 6, size=(2, rows, 2, slots)).astype(np.float32)  # sums are exact: many equal means
    score[0, :4] *= -0.0
    score[1, 5, 0, 8:16] = np.nan
    prefix = rng.integers(0, slots + 1, size=rows).astype(np.int32)
    prefix[:6] = [61, 57, 0, 1, 9, 48]
    counts = np.minimum(rng.integers(0, capacity + 2, size=(2, rows)), prefix).astype(np.int32)
    counts[0, :3] = np.minimum(prefix[:3], capacity)
    got = np.asarray(select.pick(plan, *map(jnp.asarray, (score, counts, prefix)), capacity, None))
    expanded = select.by_page(jnp.asarray(score), size, jnp.asarray(prefix))
    lengths = np.broadcast_to(prefix[:, None], score.shape[:3])
    wanted = select_topk(expanded, np.broadcast_to(counts[..., None], score.shape[:3]), capacity, lengths=lengths)
    np.testing.assert_array_equal(got, np.asarray(wanted))
    assert (got >= 0).any(axis=-1).sum() > rows


def test_votes_rank_first_and_recency_fills():
    votes = jnp.asarray([[0, 3, 0, 1, 0, 3]], jnp.int32)
    order = np.argsort(-np.asarray(select.vote_score(votes))[0], kind="stable")
    assert order.tolist() == [1, 5, 3, 4, 2, 0]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"budget": 0}, "budget is 0, but must be a fraction in (0, 1] or a positive number of entries"),
        ({"budget": 1.5}, "budget is 1.5, but must be a fraction in (0, 1] or a positive number of entries"),
        ({"budget": True}, "budget is True, but must be"),
        ({"query": "middle"}, "query is 'middle', but must be one of all, center, first, last"),
        ({"reduce": "sum"}, "reduce is 'sum'"),
        ({"selector": "h2o"}, "selector is 'h2o'"),
        ({"dense_layers": -1}, "dense_layers is -1, but must be an integer of at least 0"),
        ({"select_at_step": 0}, "select_at_step is 0, but must be an integer of at least 1"),
        ({"page_size": 0}, "page_size is 0, but must be an integer of at least 1"),
        ({"page_size": 8, "allocate": "layer_adaptive"}, "page_size above 1 goes with allocate 'uniform'"),
        ({"page_size": 8, "selector": "recent"}, "page_size above 1 goes with selector 'mage', not 'recent'"),
        ({"select_every": 0}, "select_every is 0, but must be an integer of at least 1"),
        ({"select_every": 4, "select_at_step": 2}, "select_every above 1 goes with select_at_step 1, not 2"),
        ({"select_every": 4, "measure": True}, "select_every above 1 goes with measure False, not True"),
        ({"select_every": 4, "selector": "oracle"}, "but selector 'oracle' keeps none"),
        ({"select_every": 4, "rest": "keep"}, "rest 'keep' is of one block's queries, so it goes with select_every 1"),
        ({"selector": "oracle", "rest": "keep"}, "but selector 'oracle' selects at each"),
        ({"rest": "all"}, "rest is 'all', but must be one of drop, keep"),
        ({"layer_spread": 0.5}, "layer_spread is 0.5, but must be at least 1"),
        ({"budget": 2**32}, "at most 1000000000"),
        ({"min_budget": 10**10}, "min_budget is 10000000000, but must be an integer of at least 0 and at most"),
        ({"layer_spread": "2"}, "layer_spread is '2', but must be at least 1"),
        ({"reselect_layers": 3, "selector": "tidal"}, "reselect_layers is 3, but must be layers"),
        (
            {"allocate": "layer_adaptive", "selector": "quest"},
            "'layer_adaptive' goes with selector 'mage', not 'quest'",
        ),
        ({"selector": "oracle", "measure": True}, "measure judges a selection at the steps after it"),
        ({"reselect_layers": (3,)}, "reselect_layers goes with selector 'tidal' only"),
        ({"budget": 4, "min_budget": 0, "sinks": 3, "recent": 2}, "sinks and recent are 5 entries together"),
    ],
)
def test_impossible_plans_are_refused(fields, sentence):
    with pytest.raises(GenerationError) as error:
        Mage(**fields)
    assert sentence in str(error.value)
