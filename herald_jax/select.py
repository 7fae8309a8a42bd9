"""Selection: from what the queries of a block look at, to the prefix entries its later steps may attend to.

Each layer turns its queries and keys into one score per prefix entry and KV head; `pallas_kernels.select_topk` turns
scores into indices. What differs between MAGE and the baselines it is compared with is the score alone.

Shape letters: B batch, M block length, H query heads, K KV heads, G = H // K, D head dim, N cache slots, L layers,
P selected entries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from herald_jax.plans import Herald, Mage
from pallas_kernels import page_sums, select_topk

# Scores of entries that are chosen whatever their attention says. Finite: infinities would tie with overflow.
_ALWAYS = 1e30
_POOL_GRAIN = 64


def budget_of(plan: Mage | Herald, prefix: jax.Array) -> jax.Array:
    """Entries per layer and KV head for rows with `prefix` i32[B] committed tokens: `plan.entries`, traced."""
    if isinstance(plan.budget, int):
        wanted = jnp.full_like(prefix, plan.budget)
    else:
        wanted = jnp.ceil(plan.budget * prefix.astype(jnp.float32) - 1e-3).astype(jnp.int32)
    return jnp.minimum(prefix, jnp.maximum(wanted, max(plan.min_budget, plan.sinks + plan.recent)))


def selected_capacity(plan: Mage | Herald, longest: int) -> int:
    """P: pool slots for selected entries when no prefix exceeds `longest`."""
    wanted = plan.entries(longest)
    if isinstance(plan, Mage) and plan.allocate == "layer_adaptive":
        wanted = int(min(longest, wanted * plan.layer_spread))
    return -(-max(wanted, 1) // _POOL_GRAIN) * _POOL_GRAIN


def query_rows(plan: Mage | Herald, masked: jax.Array) -> jax.Array:
    """Which queries of the block count: bool[B, M] for "all" (and "mean"), else the index i32[B] of the single one.

    `masked` bool[B, M] are the positions still to be written; only a mask's query says what a mask will look for.
    """
    length = masked.shape[1]
    index = jnp.arange(length)[None, :]
    if plan.query in ("all", "mean"):
        return masked
    if plan.query == "first":
        cost = index
    elif plan.query == "last":
        cost = length - index
    else:
        cost = jnp.abs(2 * index - (length - 1))
    return jnp.argmin(jnp.where(masked, cost, 4 * length), axis=1).astype(jnp.int32)


def chosen(rows: jax.Array, length: int) -> jax.Array:
    """`query_rows` as a mask bool[B, M]."""
    return rows if rows.dtype == jnp.bool_ else jnp.arange(length)[None, :] == rows[:, None]


def with_residents(plan: Mage | Herald, score: jax.Array, prefix: jax.Array) -> jax.Array:
    """`score` f32[..., B, K, N] with sinks and the most recent entries of each row's prefix raised above all others."""
    if plan.sinks + plan.recent == 0:
        return score
    index = jnp.arange(score.shape[-1])[None, :]
    always = (index < plan.sinks) | (index >= prefix[:, None] - plan.recent)
    always = always.reshape((1,) * (score.ndim - 3) + (always.shape[0], 1, always.shape[1]))
    return jnp.where(always, _ALWAYS, score)


def scored_page(plan: Mage | Herald) -> int:
    """How many entries share a number in the importance that a selecting attention is asked for; see `pick_scored`.

    A page's, where its sums are all that counts; 1 where some entries of a page are chosen anyway.
    """
    in_pages = plan.page > 1 and plan.selector != "quest" and plan.sinks + plan.recent == 0
    return plan.page if in_pages else 1


def by_page(score: jax.Array, size: int, prefix: jax.Array) -> jax.Array:
    """`score` f32[..., B, K, N] with each entry's replaced by its page's mean over what is below `prefix` i32[B].

    Equal scores are chosen from the lowest entry on, so pages are chosen whole but for the last one.
    """
    mean = page_means(page_sums(score, size, prefix), size, prefix)
    return jnp.repeat(mean, size, axis=-1)[..., : score.shape[-1]]


def page_means(sums: jax.Array, size: int, prefix: jax.Array) -> jax.Array:
    """Means f32[..., B, K, pages] of what sums f32[..., B, K, pages] add up below `prefix` i32[B]."""
    pages = sums.shape[-1]
    held = jnp.clip(prefix[:, None] - jnp.arange(pages)[None, :] * size, 1, size).astype(jnp.float32)
    return sums / held.reshape((1,) * (sums.ndim - 3) + (-1, 1, pages))


def pick(
    plan: Mage | Herald,
    score: jax.Array,
    counts: jax.Array,
    prefix: jax.Array,
    capacity: int,
    implementation: str | None,
) -> jax.Array:
    """Indices i32[..., B, K, P], ascending, of the `counts` i32[..., B] best entries below `prefix` i32[B].

    `score` f32[..., B, K, N].
    """
    page = scored_page(plan)
    scored = page_sums(score, page, prefix) if page > 1 else score
    return pick_scored(plan, scored, counts, prefix, capacity, implementation)


def pick_scored(
    plan: Mage | Herald,
    score: jax.Array,
    counts: jax.Array,
    prefix: jax.Array,
    capacity: int,
    implementation: str | None,
    favour: jax.Array | None = None,
) -> jax.Array:
    """`pick` from what a selecting attention returned, a number for `scored_page(plan)` entries: f32[..., B, K, S].

    `favour` f32[..., B, K, ceil(N / plan.page)] is what each page's score is multiplied by.
    """
    if scored_page(plan) > 1:
        return pick_pages(plan, score, counts, prefix, capacity, implementation, favour)
    if plan.page > 1 and plan.selector != "quest":  # whose scores are by page already
        score = by_page(score, plan.page, prefix)
    if favour is not None:
        score = score * jnp.repeat(favour, plan.page, axis=-1)[..., : score.shape[-1]]
    score = with_residents(plan, score, prefix)
    leading = score.shape[:-1]
    wanted = jnp.broadcast_to(counts[..., None], leading)
    within = jnp.broadcast_to(prefix.reshape((1,) * (len(leading) - 2) + (-1, 1)), leading)
    return select_topk(score, wanted, capacity, lengths=within, implementation=implementation)


def pick_pages(
    plan: Mage | Herald,
    sums: jax.Array,
    counts: jax.Array,
    prefix: jax.Array,
    capacity: int,
    implementation: str | None,
    favour: jax.Array | None = None,
) -> jax.Array:
    """`pick` from sums over pages, f32[..., B, K, ceil(N / plan.page)]: what it finds from `by_page`, bit for bit.

    Entries of a page have one score, so pages are chosen, by their means; of those with the lowest, the last entries
    are more than was wanted. That is at most two pages: one more than fills the budget is chosen, for the page that the
    prefix ends in may have a single entry. `favour`, of `sums`' shape, multiplies the means.
    """
    size, leading = plan.page, sums.shape[:-1]
    mean = page_means(sums, size, prefix)
    if favour is not None:
        mean = mean * favour
    wanted = jnp.broadcast_to(jnp.minimum(counts, capacity)[..., None], leading)
    end = jnp.broadcast_to(prefix[:, None], leading)
    most = -(-wanted // size) + (wanted > 0)
    chosen = select_topk(mean, most, -(-capacity // size) + 1, lengths=-(-end // size), implementation=implementation)
    some = chosen >= 0
    at = jnp.maximum(chosen, 0)
    rank = _along(mean, at)
    # Equals as `select_topk` has them: -0.0 and subnormal numbers are 0.
    rank = jnp.where(jnp.abs(rank) < jnp.finfo(jnp.float32).tiny, 0.0, rank)
    own = jnp.where(some, jnp.clip(end[..., None] - at * size, 0, size), 0)
    excess = jnp.maximum(jnp.sum(own, axis=-1) - wanted, 0)
    place = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)

    def last(rank: jax.Array, among: jax.Array) -> jax.Array:
        """The place, in the ascending list, of the page that is chosen last: of the lowest the one furthest back."""
        lowest = jnp.min(jnp.where(among, rank, jnp.inf), axis=-1, keepdims=True)
        return jnp.max(jnp.where(among & (rank == lowest), place, -1), axis=-1)

    gaps = []
    for _ in range(2):
        where = last(rank, some)
        here = place == where[..., None]
        kept = jnp.sum(jnp.where(here, own, 0), axis=-1)
        cut = jnp.minimum(kept, excess)
        excess -= cut
        # In a list of whole pages: where the missing entries of this one begin, and how many there are.
        gaps.append((where * size + kept - cut, jnp.where(where < 0, 0, size - kept + cut)))
        some = some & ~here
    (start, missing), (other, others) = gaps
    swapped = other < start
    start, missing, other, others = (
        jnp.where(swapped, a, b)[..., None]
        for a, b in ((other, start), (others, missing), (start, other), (missing, others))
    )
    slot = jax.lax.broadcasted_iota(jnp.int32, (*leading, capacity), chosen.ndim - 1)
    entry = slot + jnp.where(slot >= start, missing, 0)
    entry += jnp.where(entry >= other, others, 0)
    page = entry // size
    found = _along(chosen, jnp.minimum(page, chosen.shape[-1] - 1))
    valid = (slot < wanted[..., None]) & (page < chosen.shape[-1]) & (found >= 0)
    index = found * size + entry % size
    # The page that the prefix ends in is the last of the list.
    return jnp.where(valid & (index < end[..., None]), index, -1)


def _along(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[..., index[...]]` over the last axis. (`take_along_axis` writes out where every element is, axis by axis.)"""
    found = jax.vmap(lambda x, index: x[index])(*(a.reshape(-1, a.shape[-1]) for a in (x, index)))
    return found.reshape(index.shape)


def page_bounds(plan: Mage, q: jax.Array, k: jax.Array, rows: jax.Array, prefix: jax.Array) -> jax.Array:
    """Quest's score f32[B, K, N]: for each page, the largest dot product any key inside the page's bounds could have.

    q `[B, M, H, D]`, k `[B, K, N, D]`, rows bool[B, M]. Source: arXiv 2406.10774, section 3.3; over several queries the
    bounds are reduced as the plan says.
    """
    b, m, h, d = q.shape
    kv_heads, n = k.shape[1:3]
    size = plan.page
    pages = -(-n // size)
    k32 = jnp.pad(k.astype(jnp.float32), ((0, 0), (0, 0), (0, pages * size - n), (0, 0)))
    inside = (jnp.arange(pages * size)[None, :] < prefix[:, None])[:, None, :, None]
    paged = (b, kv_heads, pages, size, d)
    low = jnp.min(jnp.where(inside, k32, jnp.inf).reshape(paged), axis=3)
    high = jnp.max(jnp.where(inside, k32, -jnp.inf).reshape(paged), axis=3)
    empty = ~jnp.any(inside.reshape(b, 1, pages, size), axis=-1)[..., None]
    low, high = jnp.where(empty, 0.0, low), jnp.where(empty, 0.0, high)
    q32 = q.astype(jnp.float32).reshape(b, m, kv_heads, h // kv_heads, d)
    # max(q * low, q * high) summed over D is relu(q) . high - relu(-q) . low
    bound = jnp.einsum("bmkgd,bkpd->bkmgp", jax.nn.relu(q32), high, precision="highest")
    bound -= jnp.einsum("bmkgd,bkpd->bkmgp", jax.nn.relu(-q32), low, precision="highest")
    counted = rows[:, None, :, None, None]
    if plan.reduce == "max":
        score = jnp.max(jnp.where(counted, bound, jnp.finfo(jnp.float32).min), axis=(2, 3))
    else:
        score = jnp.sum(jnp.where(counted, bound, 0.0), axis=(2, 3))
    return jnp.repeat(score, size, axis=-1)[..., :n]


def random_score(layer: Any, prefix: jax.Array, first_head: jax.Array | int, heads: int, slots: int) -> jax.Array:
    """Uniform noise f32[B, heads, slots], fixed by layer, head and the row's prefix length: another set every block."""
    key = jax.random.fold_in(jax.random.key(0), layer)

    def of(length: jax.Array, head: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, length), head), (slots,))

    return jax.vmap(jax.vmap(of, (None, 0)), (0, None))(prefix, first_head + jnp.arange(heads))


def recent_score(prefix: jax.Array, heads: int, slots: int) -> jax.Array:
    """f32[B, heads, slots] that ranks entries by position: a sliding window."""
    return jnp.broadcast_to(jnp.arange(slots, dtype=jnp.float32), (prefix.shape[0], heads, slots))


def votes_and_need(
    plan: Mage, q: jax.Array, k: jax.Array, rows: jax.Array, visible: jax.Array, prefix: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """MAGE v1 for one layer: how many queries want each entry, and how much the layer needs.

    Every chosen query (and query head) takes its own top K of the prefix, K the row's budget. U_h is the union over the
    queries of KV head h; the head's coverage p_h is the attention that falls into U_h, averaged over its queries; the
    layer's need is max over h of |U_h| (1 - log p_h). (arXiv 2602.14209v1, adaptive budget allocation.)

    Args:
      q: `[B, M, H, D]`; k: `[B, K, N, D]`, the block's own keys included; rows: bool[B, M].
      visible: i32[B], entries a query sees; prefix: i32[B]; capacity: static bound on K.

    Returns:
      votes i32[B, K, N] and need f32[B, K], the latter per KV head.
    """
    b, m, h, d = q.shape
    kv_heads, n = k.shape[1:3]
    group = h // kv_heads
    folded = jnp.moveaxis(q.reshape(b, m, kv_heads, group, d), 2, 0).reshape(kv_heads, b, m * group, d)
    counted = jnp.repeat(rows, group, axis=1)
    index = jnp.arange(n)[None, None, :]
    inside = index < prefix[:, None, None]
    seen = inside if plan.normalise == "prefix" else index < visible[:, None, None]
    budget = jnp.broadcast_to(budget_of(plan, prefix)[:, None], (b, m * group))
    within = jnp.broadcast_to(prefix[:, None], (b, m * group))
    precision = "highest" if q.dtype == jnp.float32 else None

    def head(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k = args  # one KV head at a time: its weights are [B, M * G, N] float32
        scores = jnp.einsum("brd,bnd->brn", q, k, preferred_element_type=jnp.float32, precision=precision)
        scores = jnp.where(seen, scores / d**0.5, jnp.finfo(jnp.float32).min)
        weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0)
        top = select_topk(weights, budget, capacity, lengths=within)
        top = jnp.where((top >= 0) & counted[..., None], top, n)
        votes = jnp.zeros((b, n), jnp.int32).at[jnp.arange(b)[:, None, None], top].add(1, mode="drop")
        union = votes > 0
        share = jnp.sum(jnp.where(union[:, None, :] & counted[..., None], weights, 0.0), axis=(1, 2))
        coverage = share / jnp.maximum(jnp.sum(counted, axis=1), 1)
        size = jnp.sum(union, axis=1).astype(jnp.float32)
        return votes, size * (1.0 - jnp.log(jnp.maximum(coverage, jnp.finfo(jnp.float32).tiny)))

    votes, need = jax.lax.map(head, (folded, jnp.moveaxis(k, 1, 0)))
    return jnp.moveaxis(votes, 0, 1), jnp.moveaxis(need, 0, 1)


def layer_budgets(plan: Mage, need: jax.Array, prefix: jax.Array, capacity: int) -> jax.Array:
    """MAGE v1's entries per layer i32[L, B] from each sparse layer's need f32[L, B].

    K_l = max(K_min, floor(need_l / sum(need) * K * L)) with K the row's uniform budget and K_min `plan.min_budget`,
    but room for sinks and recent entries; then at most the prefix and `plan.layer_spread` times K (ours), for which the
    pool's static `capacity` has room. Where K is the whole prefix there is nothing to share out: every layer gets all
    of it (ours).
    """
    total = jnp.maximum(jnp.sum(need, axis=0, keepdims=True), jnp.finfo(jnp.float32).tiny)
    layers = need.shape[0]
    mean = budget_of(plan, prefix)[None, :].astype(jnp.float32)
    wanted = jnp.floor(need / total * mean * layers).astype(jnp.int32)
    wanted = jnp.where(mean < prefix[None, :], wanted, prefix[None, :])
    # Not by `capacity` alone, which the batch's longest row decides: a row's budgets depend on no neighbour.
    most = jnp.minimum(mean * plan.layer_spread, jnp.minimum(prefix, capacity)[None, :]).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(wanted, max(plan.min_budget, plan.sinks + plan.recent)), most)


def vote_score(votes: jax.Array) -> jax.Array:
    """f32 score of `votes` i32[..., N]: most votes first; entries nobody voted for follow, the most recent first."""
    slots = votes.shape[-1]
    recency = (jnp.arange(slots, dtype=jnp.float32) / slots).reshape((1,) * (votes.ndim - 1) + (slots,))
    return jnp.where(votes > 0, votes.astype(jnp.float32), recency)
