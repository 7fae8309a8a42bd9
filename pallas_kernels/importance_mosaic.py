"""Importance of many queries: a second pass over K alone, once the log-sum-exp of every query row is known.

The scores are computed transposed, KV entries as rows and query rows as columns, so that the sum over query rows runs
along a thread's own registers. A program handles a chunk of the entries of one KV head against all its query rows.

Per 64 entries and 128 query rows the tensor cores and the exponentials take about 512 cycles each, and at memory speed
a multiprocessor gets 192 entries of K in about 2,700. So both must overlap: warpgroups that wait for one tile start
together, share the tensor cores, end together, and then share the exponentials. Here each has tiles and barriers of its
own, which arrive one after another, and they take turns at the tensor cores.
"""

from __future__ import annotations

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import LOG2E, PROCESSORS, SMEM_LIMIT, SMEM_RESERVED, Plan, divide, slabs

KERNEL_NAME = "block_attention_importance"

TILE = 64  # KV entries of a warpgroup's step
MAX_TILES = 3  # tiles of query rows held in shared memory at once; more are further launches
MAX_STAGES = 4
# Compute warpgroups, the query rows of one matmul at most, and registers per thread. Three hide each other's
# exponentials best, and with 128 rows their registers just suffice; two have room for twice the rows.
NARROW, WIDE = (3, 128, 152), (2, 256, 232)


def importance_pass(q, k, lengths, layer, rows, prefix_lengths, lse, plan: Plan, *, scale: float, reduce: str):
    """Importance `f32[B, K, N]` of the queries chosen by rows, `bool[B, T]`.

    q `[B, T', H, D]` with the plan's padded queries; lse `f32[B, T, H]` over whatever the weights are normalised by.
    Entries past the length (or prefix length) get 0.
    """
    bias = plan.row_bias(rows, lse, reduce)
    weight = None
    for first in range(0, plan.tiles, MAX_TILES):
        tiles = range(first, min(plan.tiles, first + MAX_TILES))
        more = _kernel(q, k, lengths, layer, prefix_lengths, bias, tiles, plan, scale, reduce)
        if weight is None:
            weight = more
        else:
            weight = jnp.maximum(weight, more) if reduce == "max" else weight + more
    return weight[:, :, : plan.entries]


def _kernel(q, k, lengths, layer, prefix_lengths, bias, tiles: range, p: Plan, scale: float, reduce: str):
    """`f32[B, K, N rounded up to 64]`: the given tiles of query rows against all entries."""
    # The query rows of these tiles. The last tile may be partly empty: 6 heads of 32 queries are two tiles of 128 rows,
    # but 192 rows.
    used = min(len(tiles) * p.rows, p.chunks * p.group * p.query_chunk - tiles[0] * p.rows)
    warpgroups, most, registers = NARROW if used <= NARROW[1] else WIDE
    passes = -(-used // most)
    columns = -(-used // (16 * passes)) * 16
    padded = -(-p.entries // TILE) * TILE
    entries = TILE * warpgroups  # of a step of the program
    steps = -(-p.entries // entries)
    heads = p.batch * p.kv_heads
    chunks = _chunks(steps, heads)
    row_bytes = p.head_dim * jnp.dtype(p.dtype).itemsize
    room = SMEM_LIMIT - SMEM_RESERVED - len(tiles) * p.rows * row_bytes
    stages = max(2, min(-(-steps // chunks), MAX_STAGES, room // (entries * row_bytes)))
    inputs = {"q": q, "k": k, "lengths": lengths, "bias": bias.reshape(p.batch, p.kv_heads, p.tiles * p.rows)}
    if layer is not None:
        inputs |= {"layer": layer.reshape(1)}
    if prefix_lengths is not None:
        inputs |= {"prefix_lengths": prefix_lengths}
    used_inputs, input_tree = jax.tree.flatten(inputs)

    def body(*refs, q_smem, k_smem, q_ready, k_ready, k_free, turn):
        *in_refs, out_ref = refs
        ins = jax.tree.unflatten(input_tree, in_refs)
        batch, head = divide(lax.axis_index("head"), p.kv_heads)
        wg = lax.axis_index("wg")
        limit = jnp.clip(ins["lengths"][batch, 0], 0, p.entries)
        if prefix_lengths is not None:
            limit = jnp.clip(ins["prefix_lengths"][batch], 0, limit)
        # The row's own entries are shared out, not the cache's slots: programs of a row that fills a part of its slots
        # would otherwise wait for those that have all of it.
        chunk = lax.axis_index("chunk")
        seen = divide(limit + entries - 1, entries)[0]
        first, last = (lax.div(seen * (chunk + i), chunks) for i in range(2))
        # The steps run from the end: what the attention read last may still be in the L2.
        mirror = first + last - 1

        def per_entry(value):
            return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        def load_bias(number):
            ref = ins["bias"].at[batch, head, pl.ds(tiles[0] * p.rows + number * columns, columns)]
            return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

        def write(index, values):
            start = index * entries + wg * TILE

            @pl.when(start < padded)
            def _():
                out_ref[batch, head, pl.ds(start, TILE)] = values

        def slot_of(index, warpgroup):
            return divide(index - first, stages)[1] * warpgroups + warpgroup

        @pl.when(wg < warpgroups)
        def _compute():
            plgpu.set_max_registers(registers, action="increase")
            # One pass's bias stays in registers; those of several would not fit and are read again, from the L1.
            held = load_bias(0) if passes == 1 else None
            row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
            next_wg = jnp.where(wg == warpgroups - 1, 0, wg + 1)
            pl.when(first < last)(lambda: plgpu.barrier_wait(q_ready))
            pl.when(wg == warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def step(index, _):
                slot = slot_of(index, wg)
                plgpu.barrier_wait(k_ready.at[slot])
                result = per_entry(0.0)
                for number in range(passes):

                    def scores_of(acc_ref, number=number):
                        queries = q_smem.at[pl.ds(number * columns, columns)]
                        plgpu.wgmma(acc_ref, k_smem.at[slot], queries.transpose((1, 0)))
                        return acc_ref[...]

                    bias = load_bias(number) if held is None else held
                    plgpu.barrier_wait(turn.at[wg])
                    s = pl.run_scoped(scores_of, plgpu.ACC((TILE, columns), jnp.float32))
                    plgpu.barrier_arrive(turn.at[next_wg])
                    if number == passes - 1:
                        plgpu.barrier_arrive(k_free.at[slot])
                    weights = jnp.exp2(s * (scale * LOG2E) + lax.broadcast_in_dim(bias, s.shape, [1]))
                    if reduce == "max":
                        result = jnp.maximum(result, weights.max(axis=1))
                    else:
                        result += weights.sum(axis=1)
                index = mirror - index
                write(index, jnp.where(row < limit - index * entries - wg * TILE, result, 0.0))

            def clear(index, _):
                write(index, per_entry(0.0))

            lax.fori_loop(first, last, step, None)
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))  # no phase is left open
            lax.fori_loop(*(seen + lax.div((steps - seen) * (chunk + i), chunks) for i in range(2)), clear, None)

        def _load_all():
            for i, tile in enumerate(tiles):
                for part in range(p.warpgroups):
                    for rows, where, _ in slabs(p, batch, head, jnp.int32(tile), jnp.int32(part)):
                        start = pl.ds(i * p.rows + part * 64 + rows.start, rows.size)
                        plgpu.copy_gmem_to_smem(ins["q"].at[where], q_smem.at[start], q_ready)

            def load(index, wait):
                for warpgroup in range(warpgroups):
                    slot = slot_of(index, warpgroup)
                    # A tile behind the last one is read by nobody, but its warpgroup waits for it.
                    start = jnp.minimum((mirror - index) * entries + warpgroup * TILE, padded - TILE)
                    where = (batch, head, pl.ds(start, TILE))
                    where = where if layer is None else (ins["layer"][0], *where)
                    if wait:
                        plgpu.barrier_wait(k_free.at[slot])
                    plgpu.copy_gmem_to_smem(ins["k"].at[where], k_smem.at[slot], k_ready.at[slot])

            filled = jnp.minimum(first + stages, last)
            pl.loop(first, filled)(functools.partial(load, wait=False))
            pl.loop(filled, last)(functools.partial(load, wait=True))

        @pl.when(wg == warpgroups)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            pl.when(first < last)(_load_all)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.batch, p.kv_heads, padded), jnp.float32),
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types={
            "q_smem": plgpu.SMEM((len(tiles) * p.rows, p.head_dim), p.dtype, transforms=transforms),
            "k_smem": plgpu.SMEM((stages * warpgroups, TILE, p.head_dim), p.dtype, transforms=transforms),
            "q_ready": plgpu.Barrier(num_arrivals=len(tiles) * p.warpgroups * p.slabs_per_warpgroup),
            "k_ready": plgpu.Barrier(num_barriers=stages * warpgroups),
            "k_free": plgpu.Barrier(num_barriers=stages * warpgroups),
            "turn": plgpu.Barrier(num_barriers=warpgroups),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )(*used_inputs)


def _chunks(steps: int, heads: int) -> int:
    """Programs per KV head with which the last program ends soonest; starting one costs about two steps."""

    def cost(chunks):
        return -(-chunks * heads // PROCESSORS) * (-(-steps // chunks) + 2)

    return min(range(1, steps + 1), key=cost)
