"""Importance of many queries: a second pass over K alone, once the log-sum-exp of every query row is known.

The scores are computed transposed, KV entries as rows and query rows as columns, so that the sum over query rows runs
along a thread's own registers. A program handles a chunk of the entries of one KV head against all its query rows.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import PROCESSORS, SMEM_LIMIT, SMEM_RESERVED, Plan, divide, slabs

KERNEL_NAME = "block_attention_importance"

LOG2E = math.log2(math.e)
WARPGROUPS = 3  # compute warpgroups; three hide each other's exponentials, and their registers just suffice
ENTRIES = 64 * WARPGROUPS  # KV entries per step, 64 for each
MAX_TILES = 3  # tiles of query rows held in shared memory at once; more are further launches
MAX_STAGES = 4


def importance_pass(q, k, lengths, layer, rows, prefix_lengths, lse, plan: Plan, *, scale: float, reduce: str):
    """Importance `f32[B, K, N]` of the queries chosen by rows, `bool[B, T]`.

    q `[B, T', H, D]` with the plan's padded queries; lse `f32[B, T, H]` over whatever the weights are normalised by.
    Entries past the length (or prefix length) get 0.
    """
    # A query row's weight is exp2(score + bias): the bias holds its lse, its share of the mean, and -inf if it does
    # not count.
    chosen = rows[:, :, None] & (lse > -jnp.inf)
    bias = -lse * LOG2E
    if reduce == "mean":
        bias -= jnp.log2(jnp.maximum(jnp.sum(rows, axis=1), 1) * plan.group)[:, None, None]
    bias = plan.queries_to_rows(jnp.where(chosen, bias, -jnp.inf), -jnp.inf)
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
    padded = -(-p.entries // 64) * 64
    steps = -(-p.entries // ENTRIES)
    heads = p.batch * p.kv_heads
    chunk = _chunk(steps, heads)
    row_bytes = p.head_dim * jnp.dtype(p.dtype).itemsize
    room = SMEM_LIMIT - SMEM_RESERVED - len(tiles) * p.rows * row_bytes
    stages = max(2, min(chunk, MAX_STAGES, room // (ENTRIES * row_bytes)))
    inputs = {"q": q, "k": k, "lengths": lengths, "bias": bias}
    if layer is not None:
        inputs |= {"layer": layer.reshape(1)}
    if prefix_lengths is not None:
        inputs |= {"prefix_lengths": prefix_lengths}
    used_inputs, input_tree = jax.tree.flatten(inputs)

    def body(*refs, q_smem, k_smem, q_ready, k_ready, k_free):
        *in_refs, out_ref = refs
        ins = jax.tree.unflatten(input_tree, in_refs)
        batch, head = divide(lax.axis_index("head"), p.kv_heads)
        wg = lax.axis_index("wg")
        limit = jnp.clip(ins["lengths"][batch, 0], 0, p.entries)
        if prefix_lengths is not None:
            limit = jnp.clip(ins["prefix_lengths"][batch], 0, limit)
        first = lax.axis_index("chunk") * chunk
        last = jnp.minimum(first + chunk, steps)
        seen = jnp.clip(divide(limit + ENTRIES - 1, ENTRIES)[0], first, last)
        # The steps [first, seen) run from the end: what the attention read last may still be in the L2.
        mirror = first + seen - 1

        def per_entry(value):
            return plgpu.layout_cast(jnp.full((64,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

        def load_bias(tile):
            ref = ins["bias"].at[batch, head, tile]
            return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

        def write(index, values):
            start = index * ENTRIES + wg * 64

            @pl.when(start < padded)
            def _():
                out_ref[batch, head, pl.ds(start, 64)] = values

        @pl.when(wg < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(152, action="increase")
            # One tile's bias stays in registers; those of several would not fit and are read again, from the L1.
            held = load_bias(tiles[0]) if len(tiles) == 1 else None
            row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
            pl.when(first < seen)(lambda: plgpu.barrier_wait(q_ready))

            def step(index, _):
                slot = divide(index - first, stages)[1]
                plgpu.barrier_wait(k_ready.at[slot])
                result = per_entry(0.0)
                for i, tile in enumerate(tiles):

                    def scores_of(acc_ref, i=i):
                        plgpu.wgmma(acc_ref, k_smem.at[slot, pl.ds(wg * 64, 64)], q_smem.at[i].transpose((1, 0)))
                        return acc_ref[...]

                    s = pl.run_scoped(scores_of, plgpu.ACC((64, p.rows), jnp.float32))
                    if i == len(tiles) - 1:
                        plgpu.barrier_arrive(k_free.at[slot])
                    bias = load_bias(tile) if held is None else held
                    weights = jnp.exp2(s * (scale * LOG2E) + lax.broadcast_in_dim(bias, s.shape, [1]))
                    if reduce == "max":
                        result = jnp.maximum(result, weights.max(axis=1))
                    else:
                        result += weights.sum(axis=1)
                index = mirror - index
                write(index, jnp.where(row < limit - index * ENTRIES - wg * 64, result, 0.0))

            def clear(index, _):
                write(index, per_entry(0.0))

            lax.fori_loop(first, seen, step, None)
            lax.fori_loop(seen, last, clear, None)

        def _load_all():
            for i, tile in enumerate(tiles):
                for part in range(p.warpgroups):
                    for rows, where, _ in slabs(p, batch, head, jnp.int32(tile), jnp.int32(part)):
                        start = pl.ds(part * 64 + rows.start, rows.size)
                        plgpu.copy_gmem_to_smem(ins["q"].at[where], q_smem.at[i, start], q_ready)

            def load(index, wait):
                slot = divide(index - first, stages)[1]
                where = (batch, head, pl.ds((mirror - index) * ENTRIES, ENTRIES))
                where = where if layer is None else (ins["layer"][0], *where)
                if wait:
                    plgpu.barrier_wait(k_free.at[slot])
                plgpu.copy_gmem_to_smem(ins["k"].at[where], k_smem.at[slot], k_ready.at[slot])

            filled = jnp.minimum(first + stages, seen)
            pl.loop(first, filled)(functools.partial(load, wait=False))
            pl.loop(filled, seen)(functools.partial(load, wait=True))

        @pl.when(wg == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            pl.when(first < seen)(_load_all)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((p.batch, p.kv_heads, padded), jnp.float32),
        grid=(-(-steps // chunk), heads),
        grid_names=("chunk", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types={
            "q_smem": plgpu.SMEM((len(tiles), p.rows, p.head_dim), p.dtype, transforms=transforms),
            "k_smem": plgpu.SMEM((stages, ENTRIES, p.head_dim), p.dtype, transforms=transforms),
            "q_ready": plgpu.Barrier(num_arrivals=len(tiles) * p.warpgroups * p.slabs_per_warpgroup),
            "k_ready": plgpu.Barrier(num_barriers=stages),
            "k_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )(*used_inputs)


def _chunk(steps: int, heads: int) -> int:
    """Steps per program with which the last program ends soonest; starting one costs about two steps."""

    def cost(chunk):
        return -(-(-(-steps // chunk) * heads) // PROCESSORS) * (chunk + 2)

    return min(range(1, steps + 1), key=cost)
