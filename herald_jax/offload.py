"""HERALD's device programs: denoise over the pool, draft, and fill the next pool while the block is finished.

The host side of the pipeline is `herald.py`. A block is three kinds of program: `denoise` runs steps, as many as asked;
`draft` is one forward over [the block, its masks guessed | an all-masked next block], whose queries select; `finish`
turns the scores into the next pool while it runs the block's last steps. Everything is donated; nothing but the
selected rows that the current pool lacks crosses PCIe.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from herald_jax import select
from herald_jax.block_loop import LoopOptions, Rows, placed_rows, step
from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.denoise import Editing, Policy, Sampling
from herald_jax.host_kv import HostKV, on_gpu
from herald_jax.model import Params, Transformer, bind
from herald_jax.plans import Herald
from herald_jax.pooled import PooledAttend, PooledKV, draft_positions, note_drafts
from pallas_kernels import dispatch, gather_rows
from pallas_kernels.layers import gather_layers

_INDICES = P(None, "data", "model", None)
_NEVER = jnp.iinfo(jnp.int32).max


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Held:
    """What a pool holds.

    Attributes:
      indices: i32[Ls, B, K, P], positions of its selected entries, ascending, -1 padded.
      resident: i32[B], first position of the resident block behind them; a value no position reaches if there is none.
    """

    indices: jax.Array
    resident: jax.Array


def _plan(options: LoopOptions) -> Herald:
    assert isinstance(options.plan, Herald)
    return options.plan


def _pooled(rows: Rows) -> PooledKV:
    assert isinstance(rows.cache, PooledKV)
    return rows.cache


def _run(
    model: Transformer,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    options: LoopOptions,
    first: jax.Array,
    limit: jax.Array,
    until_drafted: jax.Array,
    *,
    but_last: bool = False,
) -> Rows:
    """Steps until every row has committed, at most `limit`, or with `until_drafted` until every row has its draft.

    Rows begin their blocks together (`first`), and those that are ahead wait at the first step of their next one. With
    `but_last` the steps end before the one that commits the last rows, where that can be told (`_one_is_left`).
    """

    def going(state: tuple[jax.Array, Rows]) -> jax.Array:
        i, rows = state
        starting = first & (i == 0)
        drafted = jnp.all(rows.done | (rows.step == 0) | _pooled(rows).drafted)
        wanted = (i < limit) & ~(until_drafted & drafted)
        if but_last:
            wanted &= ~_one_is_left(rows)
        return starting | (_inside(rows) & wanted)

    def body(state: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        i, rows = state
        waiting = (rows.step == 0) & ~(first & (i == 0))
        return i + 1, _one_step(model, rows, policy, sampling, stops, options, waiting)

    return jax.lax.while_loop(going, body, (jnp.int32(0), rows))[1]


def _one_step(
    model: Transformer,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    options: LoopOptions,
    waiting: jax.Array,
) -> Rows:
    """A step of the rows that are not `waiting` bool[B], and the drafts of those that have come so far."""
    rows = step(model, rows, policy, sampling, stops, options, phase="sparse", waiting=waiting)
    # A row that has just committed was drafted at the latest when its block was complete, a step before.
    apart = waiting | (rows.step == 0)
    cache = note_drafts(_pooled(rows), rows.canvas, rows.known, apart)
    return dataclasses.replace(rows, cache=cache)


def _inside(rows: Rows) -> jax.Array:
    return jnp.any(~rows.done & (rows.step > 0))


def _one_is_left(rows: Rows) -> jax.Array:
    """Whether the next forward commits every row that is inside its block. Not for policies that rewrite tokens."""
    return jnp.all(rows.done | (rows.step == 0) | jnp.all(rows.known, axis=1))


def leaves_last(policy: Policy) -> bool:
    """Whether `finish` leaves the block's last forward to an `advance`: not if it alone tells that it is the last."""
    return not isinstance(policy, Editing)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows")
def denoise(
    params: Params,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    first: jax.Array,
    limit: jax.Array,
    until_drafted: jax.Array,
    *,
    options: LoopOptions,
) -> tuple[Rows, jax.Array]:
    """Denoising steps over the pool: from a block's start (bool scalar `first`), `limit` of them at most, or (bool
    scalar `until_drafted`) until every row has its draft.

    Returns the rows, and whether any of them is inside its block still. All arguments but `options` are traced: one
    program serves every segment of every block.
    """
    cache = _pooled(rows)
    sparse = first & ~rows.done & (select.budget_of(_plan(options), rows.length) < rows.length)
    cache = dataclasses.replace(cache, committed=cache.committed & ~first, drafted=cache.drafted & ~first)
    rows = dataclasses.replace(rows, cache=cache, sparse_blocks=rows.sparse_blocks + sparse)
    rows = _run(bind(options.config, params), rows, policy, sampling, stops, options, first, limit, until_drafted)
    return placed_rows(rows, options.mesh), _inside(rows)


@functools.partial(jax.jit, static_argnames=("steps", "options"), donate_argnames="rows")
def advance(
    params: Params,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    *,
    steps: int,
    options: LoopOptions,
) -> tuple[Rows, jax.Array]:
    """`steps` further denoising steps of a block that has begun, for a device that must not wait for its host.

    As `denoise` with that limit, and the same results. But a loop that may end early is driven by the host, step by
    step: it waits for each step before it launches the next. This one has no such loop: the call returns once all is
    launched, and several of them can be queued. Steps after the last row has committed are carried out on nothing, and
    not counted.
    """
    model = bind(options.config, params)

    def one(_: Any, rows: Rows) -> Rows:
        going = _inside(rows)
        after = _one_step(model, rows, policy, sampling, stops, options, waiting=rows.step == 0)
        counted = jnp.where(going, after.batch_forwards, rows.batch_forwards)
        return dataclasses.replace(after, batch_forwards=counted)

    # A number of steps that XLA knows: the host need not see the end of any of them.
    rows = one(0, rows) if steps == 1 else jax.lax.fori_loop(0, steps, one, rows)
    return placed_rows(rows, options.mesh), _inside(rows)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows")
def draft(params: Params, rows: Rows, *, options: LoopOptions) -> tuple[Rows, jax.Array, jax.Array]:
    """The queries that select for every row's next block, `[Ls, B, K, R, D]`, and i32[B], the prefix they select from.

    One forward of [this block, each mask filled by its prediction | a block of masks] over the current pool, each row
    as it was at its own moment (`PooledKV.draft`). What it writes behind the pool's entries, the next step overwrites.
    """
    plan, contract = _plan(options), options.config.diffusion
    cache = _pooled(rows)
    batch, block = rows.canvas.shape
    ahead = cache.committed  # these rows' canvas is already the next block's
    start = jnp.where(ahead, rows.length - block, rows.length)
    assert contract.mask_token_id is not None  # `check_request` saw to it
    following = jnp.full((batch, block), contract.mask_token_id, jnp.int32)
    if contract.seeded:
        following = following.at[:, 0].set(cache.draft[:, block])
    tokens = jnp.concatenate([cache.draft[:, :block], following], axis=1)
    positions = start[:, None] + jnp.arange(2 * block)[None, :]
    keep = ~ahead[:, None] | (jnp.arange(2 * block) >= block)[None, :]
    attend = PooledAttend(start, ~rows.done, keep, plan, contract, options.mesh, options.implementation)
    layers, _, heads, _, dim = cache.pool.k.shape
    asked = 1 if plan.query == "mean" else len(draft_positions(plan, contract))
    shape = (layers, batch, heads, asked * options.config.group_size, dim)
    with_queries = dataclasses.replace(cache, queries=jnp.zeros(shape, cache.pool.k.dtype))
    _, drafted = bind(options.config, params)(tokens, positions, attend, with_queries)
    assert drafted.queries is not None  # the forward fills them
    rows = dataclasses.replace(rows, cache=dataclasses.replace(drafted, queries=None))
    return placed_rows(rows, options.mesh), drafted.queries, start


@functools.partial(jax.jit, static_argnames="options", donate_argnames=("rows", "spare"))
def finish(
    params: Params,
    rows: Rows,
    spare: DeviceKV,
    importance: tuple[jax.Array, ...],
    prefix: jax.Array,
    held: Held,
    host: HostKV,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    *,
    options: LoopOptions,
) -> tuple[Rows, DeviceKV, Held, jax.Array]:
    """Fill `spare` for the next block and run this one almost to its end, side by side on a GPU.

    The last forward is left to `advance` (see `leaves_last`). A loop's end is seen by the host: had the block ended in
    this one, the device would have nothing to do until the host has launched what comes after it.

    Args:
      importance: f32[B, K, N] of each pooled layer.
      prefix: i32[B], the entries it is about.
      held: what the current pool holds.
      host: read in place, not changed.

    Returns:
      The rows, the filled pool, what it holds (its resident block is still to be added, by `turn`), and i32[2, B]: rows
      of K and V fetched from the host, and copied from the current pool.
    """
    plan = _plan(options)
    pool = _pooled(rows).pool
    never = jnp.full_like(prefix, _NEVER)

    def choose(pool: DeviceKV, spare: DeviceKV, importance: Any, prefix: jax.Array, held: Held, counts: Any) -> Any:
        wanted = select.budget_of(plan, prefix)
        capacity = held.indices.shape[-1]
        indices = jnp.stack(
            [select.pick(plan, x, wanted, prefix, capacity, options.implementation) for x in importance]
        )
        near = held_slots(indices, held, counts) if plan.reuse else jnp.full_like(indices, -1)
        if plan.reuse:
            filled = gather_rows(pool.k, pool.v, near, spare.k, spare.v, implementation=options.implementation)
            spare = DeviceKV(*filled)
        far = jnp.where(near >= 0, -1, indices)
        moved = jnp.stack([jnp.sum(x >= 0, axis=(0, 2, 3), dtype=jnp.int32) for x in (far, near)])
        if options.mesh is not None:
            moved = jax.lax.psum(moved, "model")
        return spare, indices, far, moved

    apart = runs_apart(host, options)

    def fetch(spare: jax.Array, far: jax.Array, layers: tuple[jax.Array, ...]) -> jax.Array:
        how = "mosaic_gpu" if apart else options.implementation
        return gather_layers(layers, far, spare, implementation=how)

    if options.mesh is not None:
        both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
        score = tuple(P("data", "model", None) for _ in importance)
        what = Held(_INDICES, P("data"))  # type: ignore[arg-type]
        layers = tuple(CACHE_SPEC for _ in host.k)
        mapped = functools.partial(jax.shard_map, mesh=options.mesh, check_vma=False)
        choose = mapped(
            choose, in_specs=(both, both, score, P("data"), what, P("data")),
            out_specs=(both, _INDICES, _INDICES, P(None, "data")),
        )  # fmt: skip
        fetch = mapped(fetch, in_specs=(CACHE_SPEC, _INDICES, layers), out_specs=CACHE_SPEC)
    spare, indices, far, moved = choose(pool, spare, importance, prefix, held, _pooled(rows).counts)
    # The steps below change the pool in place: not before what is reused has been read from it, or XLA would copy it.
    # One number of the result stands for all of it, so that the fetch need not come after the barrier too: XLA would
    # start it only behind the steps.
    rows, _ = jax.lax.optimization_barrier((rows, jax.tree.map(lambda x: x[0, 0, 0, 0, 0], spare)))
    fetch = _on_second_stream(fetch) if apart else fetch
    spare = DeviceKV(fetch(spare.k, far, host.k), fetch(spare.v, far, host.v))
    model = bind(options.config, params)
    no = jnp.zeros((), bool)
    rows = _run(model, rows, policy, sampling, stops, options, no, jnp.int32(_NEVER), no, but_last=leaves_last(policy))
    return placed_rows(rows, options.mesh), spare, Held(indices, never), moved


def runs_apart(host: HostKV, options: LoopOptions) -> bool:
    """Whether the fetch can have a stream of its own: on a GPU, as a single kernel with a single result.

    What XLA 0.11 makes of more: a call inside has no stream and is refused; the parts of a tuple result become calls of
    their own, for which the first is waited for at once, and nothing overlaps.
    """
    if not on_gpu(options.mesh) or options.implementation == "xla" or not host.k:
        return False
    return dispatch.gather_rows_missing(host.k[0]) is None


def _on_second_stream(fetch: Callable[..., Any]) -> Callable[..., Any]:
    from jax.experimental import compute_on as experimental  # as of JAX 0.11, which GPUs need, a function of functions

    compute_on: Any = experimental.compute_on
    return compute_on(fetch, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)


def held_slots(indices: jax.Array, held: Held, counts: jax.Array) -> jax.Array:
    """Where in the current pool each entry of `indices` i32[Ls, B, K, P] lies, or -1.

    `counts` i32[B] are the pool's entries, the resident block's included: that is M long and lies behind the others.
    """
    there = jnp.where(held.indices < 0, _NEVER, held.indices)
    find = functools.partial(jnp.searchsorted, method="scan_unrolled")
    for _ in range(3):
        find = jax.vmap(find)
    slot = find(there, indices).astype(jnp.int32)
    last = there.shape[-1] - 1
    match = jnp.take_along_axis(there, jnp.minimum(slot, last), axis=-1) == indices
    selected = jnp.sum(held.indices >= 0, axis=-1, dtype=jnp.int32)[..., None]
    first = held.resident.reshape(1, -1, 1, 1)
    behind = indices - first  # negative for every entry where there is no resident block
    resident = (behind >= 0) & (behind < counts.reshape(1, -1, 1, 1) - selected)
    near = jnp.where(match, slot, jnp.where(resident, selected + behind, -1))
    return jnp.where(indices >= 0, near, -1)


@functools.partial(jax.jit, static_argnames="options", donate_argnames=("spare", "guess"))
def turn(
    spare: DeviceKV, outbox: DeviceKV, guess: jax.Array, held: Held, prefix: jax.Array, committed: jax.Array,
    *, options: LoopOptions,
) -> tuple[DeviceKV, jax.Array, Held, jax.Array]:  # fmt: skip
    """Put the block just written behind a filled pool's entries.

    Returns the pool, its counts i32[B], what it holds, and empty guesses.
    """
    counts = select.budget_of(_plan(options), prefix)

    def local(spare: DeviceKV, outbox: DeviceKV, counts: jax.Array) -> DeviceKV:
        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            for b in range(x.shape[1]):
                start = (jnp.int32(0), jnp.int32(b), jnp.int32(0), counts[b], jnp.int32(0))
                x = jax.lax.dynamic_update_slice(x, new[:, b : b + 1], start)
            return x

        return DeviceKV(put(spare.k, outbox.k), put(spare.v, outbox.v))

    if options.mesh is not None:
        both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
        local = jax.shard_map(
            local, mesh=options.mesh, in_specs=(both, both, P("data")), out_specs=both, check_vma=False
        )
    block = outbox.k.shape[3]
    spare = local(spare, outbox, counts)
    resident = jnp.where(committed, prefix, _NEVER)
    return spare, counts + block * committed, Held(held.indices, resident), jnp.zeros_like(guess)
