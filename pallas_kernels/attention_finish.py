"""The small kernel that ends `block_attention`: joins the splits, and turns kept weights into importance."""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import Plan, divide
from pallas_kernels.reference import merge_by_lse

KERNEL_NAME = "block_attention_finish"

LOG2E = math.log2(math.e)
# A warpgroup has 128 threads; one of them per column, or per entry.
THREADS = 128
# KV tiles whose importance one program computes.
TILES_PER_PROGRAM = 8
# Above this many programs, starting them takes longer than their work: each then joins several query rows.
MAX_ROW_PROGRAMS = 2048


def finish(parts, lengths, query, prefix_lengths, plan: Plan, importance):
    """`(out [B, T, H, D], lse f32[B, T, H], importance f32[B, K, N] or None)` from what the kernel left.

    `parts` is `attention_mosaic.Parts`; importance only where the plan keeps weights, for `query` `i32[B]`.
    """
    p = plan
    merge_here = p.splits > 1 and p.head_dim == THREADS
    if not merge_here:
        if p.splits == 1:
            out, lse = parts.out[:, : p.queries], p.rows_to_queries(parts.lse[0])
        else:
            out, lse = merge_by_lse(parts.out, parts.lse)
            out, lse = p.rows_to_queries(out).astype(p.dtype), p.rows_to_queries(lse)
        if not p.keep_weights:
            return out, lse, None

    heads = p.kv_heads * p.group
    rows = p.batch * p.queries * heads
    rows_per_program = -(-rows // MAX_ROW_PROGRAMS)
    row_programs = -(-rows // rows_per_program) if merge_here else 0
    tile_groups = -(-p.kv_tiles // TILES_PER_PROGRAM)
    weight_programs = p.batch * p.kv_heads * tile_groups if p.keep_weights else 0

    inputs = {"lse": parts.lse}
    outputs = {}
    if merge_here:
        inputs |= {"out": parts.out}
        outputs |= {
            "out": jax.ShapeDtypeStruct((p.batch, p.queries, heads, p.head_dim), p.dtype),
            "lse": jax.ShapeDtypeStruct((p.batch, p.queries, heads), jnp.float32),
        }
    if p.keep_weights:
        inputs |= {"weights": parts.weights, "tops": parts.tops, "query": query, "lengths": lengths}
        if p.prefix_sums:
            inputs |= {"over": parts.prefix_lse, "prefix_lengths": prefix_lengths}
        shape = (p.batch, p.kv_heads, p.kv_tiles * p.kv_tile)
        outputs |= {"importance": jax.ShapeDtypeStruct(shape, jnp.float32)}
    used_inputs, input_tree = jax.tree.flatten(inputs)
    used_outputs, output_tree = jax.tree.flatten(outputs)

    def body(*refs):
        ins = jax.tree.unflatten(input_tree, refs[: len(used_inputs)])
        outs = jax.tree.unflatten(output_tree, refs[len(used_inputs) :])
        program = lax.axis_index("program")
        # The importance programs come first: they are the longer ones.
        if weight_programs:
            pl.when(program < weight_programs)(lambda: _importance(ins, outs, program, p, importance.reduce))
        if row_programs:
            first = (program - weight_programs) * rows_per_program
            pl.when(program >= weight_programs)(lambda: _merge_rows(ins, outs, first, rows_per_program, p))

    results = plgpu.kernel(
        body,
        out_type=used_outputs,
        grid=(weight_programs + row_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )(*used_inputs)
    results = jax.tree.unflatten(output_tree, results)
    if merge_here:
        out, lse = results["out"], results["lse"]
    weight = results["importance"][:, :, : p.entries] if p.keep_weights else None
    return out, lse, weight


def _shares(lses):
    """Merge weights of the splits from their lse (scalars), and the joint lse; all 0 and -inf if nothing was seen."""
    top = functools.reduce(jnp.maximum, lses)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    shares = [jnp.exp2((lse - top) * LOG2E) for lse in lses]
    total = functools.reduce(jnp.add, shares)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return [share / total for share in shares], jnp.where(some, top + jnp.log2(total) * (1 / LOG2E), -jnp.inf)


def _merge_rows(ins, outs, first, count: int, p: Plan):
    """Joins the splits of `count` query rows, from the `first` in the order of out."""
    heads = p.kv_heads * p.group
    done = []
    for i in range(count):
        index = jnp.minimum(first + i, p.batch * p.queries * heads - 1)  # past the end: the last row again
        rest, q_head = divide(index, heads)
        batch, query = divide(rest, p.queries)
        head, member = divide(q_head, p.group)
        tile, row = p.row_of(query, member)
        shares, lse = _shares([ins["lse"][s, batch, head, tile, row] for s in range(p.splits)])
        acc = jnp.zeros((THREADS,), jnp.float32)
        for s, share in enumerate(shares):
            acc += ins["out"][s, batch, head, tile, row] * share
        done.append(((batch, query, q_head), acc.astype(p.dtype), lse))
    for where, row_out, lse in done:  # after all loads, so that these are in flight together
        outs["out"][where] = row_out
        outs["lse"][where] = lse


def _importance(ins, outs, program, p: Plan, reduce: str):
    """Importance of `TILES_PER_PROGRAM` KV tiles of one KV head, from the chosen query's kept weights."""
    groups = -(-p.kv_tiles // TILES_PER_PROGRAM)
    pair, tile_group = divide(program, groups)
    batch, head = divide(pair, p.kv_heads)
    limit = jnp.minimum(ins["lengths"][batch, 0], p.entries)
    if p.prefix_sums:
        limit = jnp.minimum(limit, ins["prefix_lengths"][batch])
    over = ins["over"] if p.prefix_sums else ins["lse"]
    lses = []
    for member in range(p.group):
        tile, row = p.row_of(ins["query"][batch], member)
        _, lse = _shares([over[s, batch, head, tile, row] for s in range(p.splits)])
        # Nothing seen: every weight below is masked anyway, and 0 keeps the arithmetic finite.
        lses.append(jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E))

    for i in range(TILES_PER_PROGRAM):
        tile = tile_group * TILES_PER_PROGRAM + i
        for part in range(0, p.kv_tile, THREADS):
            start = tile * p.kv_tile + part
            here = (batch, head, pl.ds(start, THREADS))

            @pl.when((tile < p.kv_tiles) & (start < limit))
            def _write(tile=tile, part=part, start=start, here=here):
                result = jnp.zeros((THREADS,), jnp.float32)
                for member, lse in enumerate(lses):
                    weights = ins["weights"][batch, head, tile, member, pl.ds(part, THREADS)].astype(jnp.float32)
                    factor = jnp.exp2(ins["tops"][batch, head, tile, member] - lse)
                    if reduce == "max":
                        result = jnp.maximum(result, weights * factor)
                    else:
                        result += weights * (factor * (1 / p.group))
                index = plgpu.broadcasted_iota(
                    jnp.int32, (THREADS,), 0, layout=plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
                )
                outs["importance"][here] = jnp.where(index < limit - start, result, 0.0)

            @pl.when((tile < p.kv_tiles) & (start >= limit))
            def _clear(here=here):
                outs["importance"][here] = jnp.zeros((THREADS,), jnp.float32)
