"""The small kernel that ends `block_attention`: joins the splits, and turns kept weights into importance."""

from __future__ import annotations

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_inline
from pallas_kernels.attention_plan import Plan, divide
from pallas_kernels.reference import merge_by_lse

KERNEL_NAME = "block_attention_finish"

LOG2E = math.log2(math.e)
# A warpgroup has 128 threads; one of them per column, or per entry.
THREADS = 128
# KV tiles whose importance one program computes.
TILES_PER_PROGRAM = 8


def finish(parts, lengths, query, prefix_lengths, plan: Plan, importance):
    """`(out [B, T, H, D], lse f32[B, T, H], importance f32[B, K, N] or None)` from what the kernel left, with T
    as long as the kernel made it.

    `parts` is `attention_mosaic.Parts`; importance only where the plan keeps weights, for `query` `i32[B]`.
    """
    p = plan
    merge_here = p.splits > 1 and p.head_dim == THREADS
    out, lse = parts.out, parts.lse
    if p.splits > 1 and not merge_here:
        out, lse = merge_by_lse(out, lse)
        out, lse = p.rows_to_queries(out).astype(p.dtype), p.rows_to_queries(lse)
    if not (merge_here or p.keep_weights):
        return out, lse, None

    heads = p.kv_heads * p.group
    # Four consecutive queries of a head lie in one piece among the partial results: one warp for each. With many splits
    # there are few rows, and one program each is sooner done.
    rows_per_program = 4 if p.queries % 4 == 0 and p.splits <= 8 else 1
    row_programs = p.batch * p.queries * heads // rows_per_program if merge_here else 0
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
            number = program - weight_programs
            pl.when(program >= weight_programs)(lambda: _merge_rows(ins, outs, number, rows_per_program, p))

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


def _merge_rows(ins, outs, number, count: int, p: Plan):
    """Joins the splits of `count` consecutive queries of one query head."""
    heads = p.kv_heads * p.group
    rest, q_head = divide(number, heads)
    batch, first = divide(rest, p.queries // count)
    first *= count
    head, member = divide(q_head, p.group)
    tile, row = p.row_of(first, member)
    by_query = [_shares([ins["lse"][s, batch, head, tile, row + i] for s in range(p.splits)]) for i in range(count)]
    shape = (count, THREADS)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=count)
    which = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
    for s in range(p.splits):
        part = plgpu.load(ins["out"].at[s, batch, head, tile, pl.ds(row, count)], layout=layout)
        part = part.astype(jnp.float32)
        share = by_query[0][0][s]
        for i in range(1, count):
            share = jnp.where(which == i, by_query[i][0][s], share)
        acc += part * share
    outs["out"][batch, pl.ds(first, count), q_head] = acc.astype(p.dtype)
    for i, (_, lse) in enumerate(by_query):
        outs["lse"][batch, first + i, q_head] = lse


def _importance(ins, outs, program, p: Plan, reduce: str):
    """Importance of `TILES_PER_PROGRAM` KV tiles of one KV head, from the chosen query's kept weights."""
    groups = -(-p.kv_tiles // TILES_PER_PROGRAM)
    pair, tile_group = divide(program, groups)
    batch, head = divide(pair, p.kv_heads)
    limit = jnp.minimum(ins["lengths"][batch, 0], p.entries)
    if p.prefix_sums:
        limit = jnp.minimum(limit, ins["prefix_lengths"][batch])
    first = tile_group * TILES_PER_PROGRAM
    # Tiles past the last are the last again: their programs write the same values twice.
    tiles = [jnp.minimum(first + i, p.kv_tiles - 1) for i in range(TILES_PER_PROGRAM)]
    blocks = [(tile, part) for tile in tiles for part in range(0, p.kv_tile, THREADS)]

    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    # A thread's weight is that of another entry than its own: see `Parts`.
    entry = mosaic_inline.wide_order(plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=layout))

    def write(results):
        for (tile, part), result in zip(blocks, results, strict=True):
            start = tile * p.kv_tile + part
            result = plgpu.layout_cast(jnp.where(entry < limit - start, result, 0.0), layout)
            mosaic_inline.store_each(outs["importance"].at[batch, head, pl.ds(start, THREADS)], result, entry)

    query = ins["query"][batch]

    @pl.when(first * p.kv_tile < limit)
    def _some():
        over = ins["over"] if p.prefix_sums else ins["lse"]
        by_split = p.prefix_sums or p.splits > 1

        # All loads first, so that they are in flight together.
        def load(tile, part, member):
            weights = plgpu.load(ins["weights"].at[batch, head, tile, member, pl.ds(part, THREADS)], layout=layout)
            return weights, ins["tops"][batch, head, tile, member]

        kept = [[load(*block, member) for block in blocks] for member in range(p.group)]
        results = [jnp.zeros((THREADS,), jnp.float32) for _ in blocks]
        for member in range(p.group):
            row_tile, row = p.row_of(query, member)
            if by_split:
                _, lse = _shares([over[s, batch, head, row_tile, row] for s in range(p.splits)])
            else:
                lse = over[batch, query, head * p.group + member]
            # Nothing seen: every weight is masked anyway, and 0 keeps the arithmetic finite.
            lse = jnp.where(lse == -jnp.inf, 0.0, lse * LOG2E)
            for i, (weights, top) in enumerate(kept[member]):
                weights = weights.astype(jnp.float32)
                factor = jnp.exp2(top - lse)
                if reduce == "max":
                    results[i] = jnp.maximum(results[i], weights * factor)
                else:
                    results[i] += weights * (factor * (1 / p.group))
        write(results)

    @pl.when(first * p.kv_tile >= limit)
    def _none():
        write([jnp.zeros((THREADS,), jnp.float32) for _ in blocks])
