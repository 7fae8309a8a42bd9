"""HERALD's device programs: denoise over the pool, draft, and fill the next pool while the block is finished.

The host side of the pipeline is `herald.py`. A block is three programs: `draft` runs the steps up to the draft and the
draft itself, one forward over [the block, its masks guessed | an all-masked next block], whose queries select;
`denoise` runs steps while the selection is awaited; `finish` turns the scores into the next pool (`pool_fill.py`) while
it runs the block's last steps, and `fill` some layers' scores when there are no more steps. Everything is donated;
nothing but the selected rows that the current pool lacks crosses PCIe.

On a GPU each program is one CUDA graph with its loop in it, so that the host has launched all of a block long before
the device is done with it (`_ONE_GRAPH`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from herald_jax import pool_fill, select
from herald_jax.block_loop import step
from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.denoise import Policy, Sampling
from herald_jax.host_kv import HostKV
from herald_jax.loop_state import LoopOptions, Rows, placed_rows
from herald_jax.model import Params, bind
from herald_jax.pool_fill import Held, Moved, herald_plan
from herald_jax.pooled import PooledAttend, PooledKV, draft_positions, note_drafts
from pallas_kernels.layers import FETCHING

# How XLA is to compile a program with a loop of steps: all of it as one CUDA graph, the loop included. Left to itself
# it makes a graph of the loop's body only: the host launches that anew for each step when it has seen that there is
# one, and the device waits where a program ends and the next one's graph is brought up to date.
_ONE_GRAPH: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}
# And with what does not wait for each other side by side in it: XLA's own order puts a fetch before the loop.
_SIDE_BY_SIDE: dict[str, Any] = _ONE_GRAPH | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def _pooled(rows: Rows) -> PooledKV:
    assert isinstance(rows.cache, PooledKV)
    return rows.cache


Step = Callable[[Rows, jax.Array], Rows]
How = tuple[Policy, Sampling, jax.Array]


def _stepping(params: Params, how: How, options: LoopOptions) -> Step:
    """A step of the rows that are not waiting (bool[B]), and the drafts of those that have come so far."""
    model = bind(options.config, params)

    def one(rows: Rows, waiting: jax.Array) -> Rows:
        rows = step(model, rows, *how, options, phase="sparse", waiting=waiting)
        # A row that has just committed was drafted at the latest when its block was complete, a step before.
        apart = waiting | (rows.step == 0)
        cache = note_drafts(_pooled(rows), rows.canvas, rows.known, apart)
        return dataclasses.replace(rows, cache=cache)

    return one


def _run(one: Step, rows: Rows, first: jax.Array | bool, wanted: Callable[[Rows], jax.Array]) -> Rows:
    """Steps while a row is inside its block and `wanted(rows)` is true.

    Rows begin their blocks together (`first`), and those that are ahead wait at the first step of their next one.
    """

    def going(state: tuple[jax.Array, Rows]) -> jax.Array:
        i, rows = state
        return (first & (i == 0)) | (_inside(rows) & wanted(rows))

    def body(state: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        i, rows = state
        waiting = (rows.step == 0) & ~(first & (i == 0))
        return i + 1, one(rows, waiting)

    return jax.lax.while_loop(going, body, (jnp.int32(0), rows))[1]


def _inside(rows: Rows) -> jax.Array:
    return jnp.any(~rows.done & (rows.step > 0))


def _begun(rows: Rows, options: LoopOptions, first: jax.Array) -> Rows:
    """The rows at a block's start, if it is one."""
    cache = _pooled(rows)
    sparse = first & ~rows.done & (select.budget_of(herald_plan(options), rows.length) < rows.length)
    cache = dataclasses.replace(cache, committed=cache.committed & ~first, drafted=cache.drafted & ~first)
    return dataclasses.replace(rows, cache=cache, sparse_blocks=rows.sparse_blocks + sparse)


def _more_masks_than(left: jax.Array) -> Callable[[Rows], jax.Array]:
    """Whether a row inside its block has more than i32 scalar `left` masks."""

    def wanted(rows: Rows) -> jax.Array:
        masks = jnp.sum(~rows.known, axis=1)
        return jnp.any(~rows.done & (rows.step > 0) & (masks > left))

    return wanted


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows", compiler_options=_ONE_GRAPH)
def denoise(
    params: Params,
    rows: Rows,
    policy: Policy,
    sampling: Sampling,
    stops: jax.Array,
    first: jax.Array,
    left: jax.Array,
    *,
    options: LoopOptions,
) -> Rows:
    """Denoising steps over the pool, from a block's start if bool scalar `first`.

    They go on while a row has more than i32 scalar `left` masks; if that is negative, until all have committed. All
    arguments but `options` are traced: one program serves every part of every block.
    """
    one = _stepping(params, (policy, sampling, stops), options)
    rows = _run(one, _begun(rows, options, first), first, _more_masks_than(left))
    return placed_rows(rows, options.mesh)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows", compiler_options=_ONE_GRAPH)
def draft(
    params: Params, rows: Rows, policy: Policy, sampling: Sampling, stops: jax.Array, *, options: LoopOptions
) -> tuple[Rows, jax.Array, jax.Array]:
    """A block's steps until every row is drafted, and the draft.

    That is one forward of [this block, each mask filled by its prediction | a block of masks] over the current pool,
    each row as it was at its own moment (`PooledKV.draft`). What it writes behind the pool's entries, the next step
    overwrites.

    Returns:
      The rows, the queries that select for their next blocks, `[Ls, B, K, R, D]`, and i32[B], the prefix they select
      from.
    """
    one, yes = _stepping(params, (policy, sampling, stops), options), jnp.ones((), bool)

    def undrafted(rows: Rows) -> jax.Array:
        return ~jnp.all(rows.done | (rows.step == 0) | _pooled(rows).drafted)

    rows = _run(one, _begun(rows, options, yes), yes, undrafted)
    return _asked(params, rows, options)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows")
def ask(params: Params, rows: Rows, *, options: LoopOptions) -> tuple[Rows, jax.Array, jax.Array]:
    """The draft alone, of rows that have been drafted (`note_drafts`) and have not committed: for a replay."""
    return _asked(params, rows, options)


def _asked(params: Params, rows: Rows, options: LoopOptions) -> tuple[Rows, jax.Array, jax.Array]:
    """The draft's forward, and what `draft` returns."""
    plan, contract = herald_plan(options), options.config.diffusion
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


@functools.partial(
    jax.jit, static_argnames="options", donate_argnames=("rows", "spare"), compiler_options=_SIDE_BY_SIDE
)
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
) -> tuple[Rows, DeviceKV, jax.Array, Moved]:
    """Fill `spare` for the next block and run this one on until all rows have committed, side by side on a GPU.

    Args:
      importance: f32[B, K, S] of each pooled layer, of `select.scored_page` entries each.
      prefix: i32[B], the entries it is about.
      held: what the current pool holds.
      host: read in place, not changed.

    Returns:
      The rows, the pool, its indices, and what was moved.
    """
    choose, fetch = pool_fill.moves(host, len(importance), held.indices.shape[0], options)
    spare, indices, far, ends, moved = choose(
        _pooled(rows).pool, spare, importance, prefix, held, _pooled(rows).counts, jnp.int32(0)
    )
    # The steps below change the pool in place: not before what is reused has been read from it, or XLA would copy it.
    # One number of the result stands for all of it, so that the fetch need not come after the barrier too: XLA would
    # start it only behind the steps.
    rows, _ = jax.lax.optimization_barrier((rows, jax.tree.map(lambda x: x[0, 0, 0, 0, 0], spare)))
    watches, far = pool_fill.begin_fetch(options, far)
    if pool_fill.runs_apart(host, options):
        fetch = pool_fill.on_second_stream(fetch)
        options = dataclasses.replace(options, spared=FETCHING)
    spare = DeviceKV(fetch(spare.k, far, ends, host.k), fetch(spare.v, far, ends, host.v))
    one = _stepping(params, (policy, sampling, stops), options)
    rows = _run(one, rows, False, _more_masks_than(jnp.int32(-1)))
    if herald_plan(options).measure:
        # In the program's text the fetch is waited for behind the steps, as without this. The graph goes by what uses
        # which memory, and stops the watch when the fetch has ended.
        rows, spare = jax.lax.optimization_barrier((rows, spare))
    moved = pool_fill.moved_by(options, moved, watches, spare, rows.step)
    return placed_rows(rows, options.mesh), spare, indices, moved


@functools.partial(jax.jit, static_argnames="options", donate_argnames="spare")
def fill(
    pool: DeviceKV,
    counts: jax.Array,
    spare: DeviceKV,
    importance: tuple[jax.Array, ...],
    prefix: jax.Array,
    held: Held,
    host: HostKV,
    first: jax.Array,
    *,
    options: LoopOptions,
) -> tuple[DeviceKV, jax.Array, Moved]:
    """Fill layers of `spare` as `finish` does, for a block whose steps are over.

    Args:
      pool: the current one, of i32[B] `counts` entries.
      importance: f32[B, K, S] of the layers to fill, which follow each other, of `select.scored_page` entries each.
      held: what `pool` holds; its indices of layers that have been filled may be the next pool's.
      host: the layers to fill, of the cache.
      first: i32 scalar, which pooled layer is their first.

    Returns:
      The pool, `held.indices` with those that these layers are filled with, and what was moved.
    """
    choose, fetch = pool_fill.moves(host, len(importance), held.indices.shape[0], options)
    spare, indices, far, ends, moved = choose(pool, spare, importance, prefix, held, counts, first)
    where = () if len(importance) == held.indices.shape[0] else (first,)
    watches, far = pool_fill.begin_fetch(options, far)
    spare = DeviceKV(fetch(spare.k, far, ends, host.k, *where), fetch(spare.v, far, ends, host.v, *where))
    return spare, indices, pool_fill.moved_by(options, moved, watches, spare)


@functools.partial(jax.jit, static_argnames="options", donate_argnames=("spare", "guess"))
def turn(
    spare: DeviceKV, outbox: DeviceKV, guess: jax.Array, held: Held, prefix: jax.Array, committed: jax.Array,
    *, options: LoopOptions,
) -> tuple[DeviceKV, jax.Array, Held, jax.Array]:  # fmt: skip
    """Put the block just written behind a filled pool's entries.

    Returns the pool, its counts i32[B], what it holds, and empty guesses.
    """
    counts = select.budget_of(herald_plan(options), prefix)

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
    resident = jnp.where(committed, prefix, pool_fill.NEVER)
    return spare, counts + block * committed, Held(held.indices, resident), jnp.zeros_like(guess)
