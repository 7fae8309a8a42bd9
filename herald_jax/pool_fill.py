"""HERALD's next pool: what it takes over from the current one, and what is fetched from the host.

`offload.finish` and `offload.fill` are the programs that fill it: they choose the entries, copy those that the current
pool holds, and fetch the others (`moves`). On a GPU a fetch can have a stream of its own (`runs_apart`), and under
`Herald.measure` the device's clock is read around it.
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
from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.host_kv import HostKV, on_gpu
from herald_jax.loop_state import LoopOptions
from herald_jax.plans import Herald
from pallas_kernels import dispatch, gather_rows
from pallas_kernels.clock import start_clocks, stop_clock
from pallas_kernels.layers import gather_layers

NEVER = jnp.iinfo(jnp.int32).max  # where a position is asked for, one that no row reaches

Watches = tuple[jax.Array, jax.Array]  # of a fetch, and of the steps beside it: u32[2, 2] each

_INDICES = P(None, "data", "model", None)
_LISTS = P(None, "data", "model")


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
      times: u32[2, 2, 2], two watches of the device's clock (`start_clocks`), stopped when the fetch had ended and when
        the steps beside it had; where there are none, the second never was. None unless the plan measures.
    """

    rows: jax.Array
    times: jax.Array | None


def herald_plan(options: LoopOptions) -> Herald:
    """The plan of a loop that is HERALD's."""
    assert isinstance(options.plan, Herald)
    return options.plan


def begin_fetch(options: LoopOptions, far: jax.Array) -> tuple[Watches | None, jax.Array]:
    """Start watches before a fetch of `far`, if the plan measures; and `far`, which is not there before they run."""
    if not herald_plan(options).measure:
        return None, far
    fetching, stepping = start_clocks(2, far, implementation=options.implementation)
    # Never so for centuries. But XLA does not know, and the fetch needs the answer.
    return (fetching, stepping), jnp.where(fetching[0, 1] == jnp.uint32(2**32 - 1), -1, far)


def moved_by(
    options: LoopOptions, rows: jax.Array, watches: Watches | None, spare: DeviceKV, stepped: jax.Array | None = None
) -> Moved:
    """`Moved`, its watches stopped when `spare` has been fetched and when the steps beside it have led to `stepped`."""
    if watches is None:
        return Moved(rows, None)
    fetching, stepping = watches
    fetching = stop_clock(fetching, spare.k, spare.v, implementation=options.implementation)
    if stepped is not None:
        stepping = stop_clock(stepping, stepped, implementation=options.implementation)
    return Moved(rows, jnp.stack([fetching, stepping]))


def moves(
    host: HostKV, count: int, every: int, options: LoopOptions
) -> tuple[Callable[..., Any], Callable[..., jax.Array]]:
    """How `count` of `every` layers' entries are chosen and copied from the current pool, and the others fetched.

    `host` has these layers only. What was chosen comes for every layer, what is to be fetched for these, and where each
    list of that ends, i32[count, B, K].
    """
    plan = herald_plan(options)

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
        # Behind that lie the slots of a pool with room for longer rows than these, too many to look at.
        slot = jax.lax.broadcasted_iota(jnp.int32, far.shape, far.ndim - 1)
        ends = jnp.max(jnp.where(far >= 0, slot + 1, 0), axis=-1)
        of_lists = jnp.stack([jnp.sum(x >= 0, axis=-1, dtype=jnp.int32) for x in (far, near)])
        moved = jnp.sum(of_lists, axis=(1, 3))
        if plan.reuse:
            # Of the other layers nothing is copied: whole pools, for a part of one would be a copy.
            near = put(jnp.full_like(held.indices, -1), near)
            filled = gather_rows(pool.k, pool.v, near, spare.k, spare.v, implementation=options.implementation)
            spare = DeviceKV(*filled)
        if options.mesh is not None:
            moved = jax.lax.psum(moved, "model")
        return spare, put(held.indices, indices), far, ends, moved

    apart = runs_apart(host, options)

    def fetch(
        spare: jax.Array, far: jax.Array, ends: jax.Array, layers: tuple[jax.Array, ...], *first: jax.Array
    ) -> jax.Array:
        how = "mosaic_gpu" if apart else options.implementation
        return gather_layers(layers, far, spare, *first, used=ends, implementation=how)

    if options.mesh is not None:
        both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
        score = tuple(P("data", "model", None) for _ in range(count))
        what = Held(_INDICES, P("data"))  # type: ignore[arg-type]
        layers = tuple(CACHE_SPEC for _ in host.k)
        mapped = functools.partial(jax.shard_map, mesh=options.mesh, check_vma=False)
        choose = mapped(
            choose, in_specs=(both, both, score, P("data"), what, P("data"), P()),
            out_specs=(both, _INDICES, _INDICES, _LISTS, P(None, "data")),
        )  # fmt: skip
        where = () if count == every else (P(),)
        fetch = mapped(fetch, in_specs=(CACHE_SPEC, _INDICES, _LISTS, layers, *where), out_specs=CACHE_SPEC)
    return choose, fetch


def runs_apart(host: HostKV, options: LoopOptions) -> bool:
    """Whether the fetch can have a stream of its own: on a GPU, as a single kernel with a single result.

    What XLA 0.11 makes of more: a call inside has no stream and is refused; the parts of a tuple result become calls of
    their own, for which the first is waited for at once, and nothing overlaps.
    """
    if not on_gpu(options.mesh) or options.implementation == "xla" or not host.k:
        return False
    return dispatch.gather_rows_missing(host.k[0]) is None


def on_second_stream(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """`fetch`, if it `runs_apart`, on a stream beside the one of the steps."""
    from jax.experimental import compute_on as experimental  # as of JAX 0.11, which GPUs need, a function of functions

    compute_on: Any = experimental.compute_on
    return compute_on(fetch, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)


def held_slots(indices: jax.Array, held: Held, counts: jax.Array) -> jax.Array:
    """Where in the current pool each entry of `indices` i32[Ls, B, K, P] lies, or -1.

    `counts` i32[B] are the pool's entries, the resident block's included: that is M long and lies behind the others.
    """
    there = jnp.where(held.indices < 0, NEVER, held.indices)
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
