"""HERALD's device programs: denoise over the pool, draft, and fill the next pool while the block is finished.

The host side of the pipeline is `herald.py`. A block is three programs: `draft` runs the steps up to the draft and the
draft itself, one forward over [the block, its masks guessed | an all-masked next block], whose queries select;
`denoise` runs steps while the selection is awaited; `finish` turns the scores into the next pool while it runs the
block's last steps, and `fill` some layers' scores when there are no more steps. Everything is donated; nothing but the
selected rows that the current pool lacks crosses PCIe.

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

from herald_jax import select
from herald_jax.block_loop import step
from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.denoise import Policy, Sampling
from herald_jax.host_kv import HostKV, on_gpu
from herald_jax.loop_state import LoopOptions, Rows, placed_rows
from herald_jax.model import Params, bind
from herald_jax.plans import Herald
from herald_jax.pooled import PooledAttend, PooledKV, draft_positions, note_drafts
from pallas_kernels import dispatch, gather_rows
from pallas_kernels.clock import device_time
from pallas_kernels.layers import FETCHING, gather_layers

# How XLA is to compile a program with a loop of steps: all of it as one CUDA graph, the loop included. Left to itself
# it makes a graph of the loop's body only: the host launches that anew for each step when it has seen that there is
# one, and the device waits where a program ends and the next one's graph is brought up to date.
_ONE_GRAPH: dict[str, Any] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
}
# And with what does not wait for each other side by side in it: XLA's own order puts a fetch before the loop.
_SIDE_BY_SIDE: dict[str, Any] = _ONE_GRAPH | {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}

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


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Moved:
    """What filling a pool, or some of its layers, took.

    Attributes:
      rows: i32[2, B], rows of K and V fetched from the host, and copied from the current pool.
      times: u32[3, 2], the device's clock (`device_time`) when the fetch could begin, when it had ended, and when the
        steps beside it had, or no earlier than it began where there are none. None unless the plan measures.
    """

    rows: jax.Array
    times: jax.Array | None


def _plan(options: LoopOptions) -> Herald:
    assert isinstance(options.plan, Herald)
    return options.plan


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
    sparse = first & ~rows.done & (select.budget_of(_plan(options), rows.length) < rows.length)
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
    choose, fetch = _moves(host, len(importance), held.indices.shape[0], options)
    spare, indices, far, moved = choose(
        _pooled(rows).pool, spare, importance, prefix, held, _pooled(rows).counts, jnp.int32(0)
    )
    # The steps below change the pool in place: not before what is reused has been read from it, or XLA would copy it.
    # One number of the result stands for all of it, so that the fetch need not come after the barrier too: XLA would
    # start it only behind the steps.
    rows, _ = jax.lax.optimization_barrier((rows, jax.tree.map(lambda x: x[0, 0, 0, 0, 0], spare)))
    begun, far = _begin(options, far)
    if runs_apart(host, options):
        fetch = _on_second_stream(fetch)
        options = dataclasses.replace(options, spared=FETCHING)
    spare = DeviceKV(fetch(spare.k, far, host.k), fetch(spare.v, far, host.v))
    one = _stepping(params, (policy, sampling, stops), options)
    rows = _run(one, rows, False, _more_masks_than(jnp.int32(-1)))
    if _plan(options).measure:
        # In the program's text the fetch is waited for behind the steps, as without this. The graph goes by what needs
        # what, and reads the clock when the fetch has ended.
        rows, spare = jax.lax.optimization_barrier((rows, spare))
    moved = _moved(moved, begun, _clock(options, spare.k, spare.v), _clock(options, rows.step))
    return placed_rows(rows, options.mesh), spare, indices, moved


def _clock(options: LoopOptions, *after: jax.Array) -> jax.Array | None:
    """The device's clock when `after` had been computed, u32[2], if the plan measures."""
    if not _plan(options).measure:
        return None
    # One number of each stands for all of it.
    first = jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in after])
    return device_time(first, implementation=options.implementation)


def _begin(options: LoopOptions, far: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """The device's clock before a fetch of `far`, if the plan measures, and `far`, which is not there before that."""
    begun = _clock(options, far)
    # Never so for centuries. But XLA does not know, and the fetch needs the answer.
    return begun, far if begun is None else jnp.where(begun[1] == jnp.uint32(2**32 - 1), -1, far)


def _moved(rows: jax.Array, *times: jax.Array | None) -> Moved:
    read = [x for x in times if x is not None]
    return Moved(rows, jnp.stack(read) if read else None)


def _moves(
    host: HostKV, count: int, every: int, options: LoopOptions
) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """How `count` of `every` layers' entries are chosen and copied from the current pool, and the others fetched.

    `host` has these layers only. What was chosen comes for every layer, what is to be fetched for these.
    """
    plan = _plan(options)

    def choose(
        pool: DeviceKV, spare: DeviceKV, importance: Any, prefix: jax.Array, held: Held, counts: Any, first: jax.Array
    ) -> Any:
        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            """`x` `[Ls, ...]` with these layers anew."""
            return new if count == every else jax.lax.dynamic_update_slice_in_dim(x, new, first, 0)

        wanted = select.budget_of(plan, prefix)
        capacity = held.indices.shape[-1]
        # By page all layers in one launch: by itself one has too few heads to fill the device. Entry by entry their
        # scores are too large to be joined.
        scores = [jnp.stack(importance)] if select.scored_page(plan) > 1 else [x[None] for x in importance]
        there = held
        if count < every:
            there = Held(jax.lax.dynamic_slice_in_dim(held.indices, first, count), held.resident)
        favours: list[jax.Array | None] = [None] * len(scores)
        if plan.bonus:
            kept = [Held(x, held.resident) for x in jnp.split(there.indices, len(scores))]
            pages = -(-scores[0].shape[-1] * select.scored_page(plan) // plan.page)
            favours = [1 + plan.bonus * held_shares(x, counts, prefix, plan.page, pages) for x in kept]
        chosen = [
            select.pick_scored(plan, x, wanted, prefix, capacity, options.implementation, favour)
            for x, favour in zip(scores, favours, strict=True)
        ]
        indices = jnp.concatenate(chosen)
        near = held_slots(indices, there, counts) if plan.reuse else jnp.full_like(indices, -1)
        far = jnp.where(near >= 0, -1, indices)
        moved = jnp.stack([jnp.sum(x >= 0, axis=(0, 2, 3), dtype=jnp.int32) for x in (far, near)])
        if plan.reuse:
            # Of the other layers nothing is copied: whole pools, for a part of one would be a copy.
            near = put(jnp.full_like(held.indices, -1), near)
            filled = gather_rows(pool.k, pool.v, near, spare.k, spare.v, implementation=options.implementation)
            spare = DeviceKV(*filled)
        if options.mesh is not None:
            moved = jax.lax.psum(moved, "model")
        return spare, put(held.indices, indices), far, moved

    apart = runs_apart(host, options)

    def fetch(spare: jax.Array, far: jax.Array, layers: tuple[jax.Array, ...], *first: jax.Array) -> jax.Array:
        how = "mosaic_gpu" if apart else options.implementation
        return gather_layers(layers, far, spare, *first, implementation=how)

    if options.mesh is not None:
        both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
        score = tuple(P("data", "model", None) for _ in range(count))
        what = Held(_INDICES, P("data"))  # type: ignore[arg-type]
        layers = tuple(CACHE_SPEC for _ in host.k)
        mapped = functools.partial(jax.shard_map, mesh=options.mesh, check_vma=False)
        choose = mapped(
            choose, in_specs=(both, both, score, P("data"), what, P("data"), P()),
            out_specs=(both, _INDICES, _INDICES, P(None, "data")),
        )  # fmt: skip
        where = () if count == every else (P(),)
        fetch = mapped(fetch, in_specs=(CACHE_SPEC, _INDICES, layers, *where), out_specs=CACHE_SPEC)
    return choose, fetch


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
    choose, fetch = _moves(host, len(importance), held.indices.shape[0], options)
    spare, indices, far, moved = choose(pool, spare, importance, prefix, held, counts, first)
    where = () if len(importance) == held.indices.shape[0] else (first,)
    begun, far = _begin(options, far)
    spare = DeviceKV(fetch(spare.k, far, host.k, *where), fetch(spare.v, far, host.v, *where))
    return spare, indices, _moved(moved, begun, _clock(options, spare.k, spare.v), begun)


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


def held_shares(held: Held, counts: jax.Array, prefix: jax.Array, size: int, pages: int) -> jax.Array:
    """How much of each of `pages` pages of `size` entries the current pool holds, f32[Ls, B, K, pages] in [0, 1].

    Of what lies below `prefix` i32[B] in it. `counts` as in `held_slots`.
    """
    leading, lists = held.indices.shape[:3], held.indices.reshape(-1, held.indices.shape[-1])
    # One scatter into flat counters: with an index for each axis XLA would write all of them out.
    page = jnp.where(lists < 0, pages, lists // size)
    at = jnp.where(page < pages, jnp.arange(len(lists), dtype=jnp.int32)[:, None] * pages + page, len(lists) * pages)
    held_here = jnp.zeros(len(lists) * pages, jnp.int32).at[at].add(1, mode="drop").reshape(*leading, pages)
    selected = jnp.sum(held.indices >= 0, axis=-1, dtype=jnp.int32)[..., None]
    begin = jnp.arange(pages, dtype=jnp.int32).reshape(1, 1, 1, -1) * size
    ahead = begin - held.resident.reshape(1, -1, 1, 1)  # of the resident block
    resident = jnp.minimum(ahead + size, counts.reshape(1, -1, 1, 1) - selected) - jnp.maximum(ahead, 0)
    return select.page_means((held_here + jnp.maximum(resident, 0)).astype(jnp.float32), size, prefix)


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
