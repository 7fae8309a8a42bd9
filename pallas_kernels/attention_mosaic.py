"""`block_attention` as a Mosaic GPU kernel for Hopper. Its design and what bounds it: docs/kernels.md.

One program computes a tile of query rows against one split of the KV entries of one KV head: a warpgroup that only
issues TMA copies feeds a ring of K and V tiles in shared memory, and one or two compute warpgroups of 64 rows each run
the online softmax over them with wgmma. With several splits the programs leave partial results that a second, small
kernel joins in a fixed order (`attention_finish`).

The rows of a tile are *slabs*: `query_chunk` consecutive queries of one query head. All G heads of a KV head are folded
into the rows this way by the copies themselves, so q needs no transposition beforehand.

Importance of one query: the programs also store that query's weights, relative to the running maximum of their tile,
and the finishing kernel scales them. Importance by page: they store every query's, added up by page, and
`attention_pages` scales those. Importance of more queries entry by entry: a second pass over K (`importance_mosaic`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import attention_finish, attention_pages, attention_plan, importance_mosaic, mosaic_inline
from pallas_kernels.attention_plan import LOG2E, PAGE, AttentionConfig, Plan, divide, slabs

KERNEL_NAME = "block_attention"

# Where a row's running maximum starts: finite, so that a row that has seen nothing gives exp2(-inf - M) = 0, not NaN.
LOWEST = -1e30


def attention_mosaic(
    q, k, v, lengths, layer, rows, prefix_lengths, into=None, *, scale, importance, config: AttentionConfig | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The contract of `block_attention` on checked arguments; returns `(out, lse, importance or None)`.

    Importance comes by page, `f32[B, K, ceil(N / importance.page)]`, where `by_page` says so; where `in_place` does, it
    is the stack of `into` with it in its place.
    """
    one_query = rows is not None and rows.dtype != jnp.bool_
    paged = by_page(importance, rows)
    plan = attention_plan.make_plan(
        q,
        k,
        lengths.shape[1],
        config,
        keep_weights=one_query,
        keep_pages=paged,
        prefix_sums=importance is not None and importance.over == "prefix",
    )
    t = plan.queries
    q = jnp.pad(q, ((0, 0), (0, plan.padded_queries - t), (0, 0), (0, 0)))
    parts = _forward(q, k, v, lengths, layer, rows, prefix_lengths, plan, scale)
    shares = plan.row_shares(rows, importance.reduce) if paged and not plan.prefix_sums else None
    into = into if in_place(importance, rows) else None
    out, lse, weight = attention_finish.finish(
        parts, lengths, rows, prefix_lengths, plan, importance, shares=shares, into=into
    )
    out, lse = out[:, :t], lse[:, :t]
    if importance is not None and weight is None:
        over = lse
        if plan.prefix_sums:
            over = plan.rows_to_queries(jax.scipy.special.logsumexp(parts.prefix_lse, axis=0))
        if paged:
            bias = plan.row_bias(rows, over, importance.reduce)
            weight = attention_pages.pages(parts, lengths, bias, plan, importance.page, into)
        else:
            weight = importance_mosaic.importance_pass(
                q, k, lengths, layer, rows, prefix_lengths, over, plan, scale=scale, reduce=importance.reduce
            )
    return out, lse, weight


def by_page(importance, rows) -> bool:
    """Whether the kernels themselves give importance by page: sums of weights, over pages made of theirs."""
    if importance is None or rows.dtype != jnp.bool_:
        return False
    return importance.reduce == "mean" and importance.page % attention_plan.PAGE == 0


def in_place(importance, rows) -> bool:
    """Whether the kernels put importance into a stack themselves."""
    return by_page(importance, rows) and importance.page == attention_plan.PAGE


class Parts(NamedTuple):
    """What the programs of the kernel leave, S splits.

    out: `[B, T, H, D]` (T padded) if S == 1, else partial results `[S, B, K, R, rows, D]`, both of q's dtype: each is
      normalised, so rounding them costs about what rounding their mean does, and at short lengths their bytes count.
    lse: likewise `f32[B, T, H]` or `f32[S, B, K, R, rows]`, natural log.
    prefix_lse: `f32[S, B, K, R, rows]` over the prefix alone, or None.
    weights, tops: for the chosen query, `bf16[B, K, kv_tiles, G, kv_tile]` its weights relative to the running maximum
      `f32[B, K, kv_tiles, G]` (base 2), or None. Tiles past the row's length are not written. The entries of a tile
      are in the order of `mosaic_inline.store_rows_wide`.
    pages, page_tops: for every query row, `bf16[B, K, R, kv_tiles, rows, kv_tile / PAGE]` the sums of its weights over
      PAGE entries relative to the running maximum `f32[B, K, R, kv_tiles, rows]` (base 2), or None. As above of tiles;
      rows that are no query hold anything finite or are not written.
    """

    out: jax.Array
    lse: jax.Array
    prefix_lse: jax.Array | None
    weights: jax.Array | None
    tops: jax.Array | None
    pages: jax.Array | None
    page_tops: jax.Array | None


class _Inputs(NamedTuple):
    """References to the kernel's inputs; those that a plan has no use for are None."""

    q: jax.Ref
    k: jax.Ref
    v: jax.Ref
    lengths: jax.Ref
    layer: jax.Ref | None
    row_limits: jax.Ref | None
    tile_limits: jax.Ref | None
    prefix_lengths: jax.Ref | None
    query: jax.Ref | None


def _forward(q, k, v, lengths, layer, query, prefix_lengths, plan: Plan, scale: float) -> Parts:
    p = plan
    row_shape = (p.splits, *p.row_shape)
    partial = p.splits > 1
    kept = (p.batch, p.kv_heads, p.kv_tiles, p.group)
    paged = (p.batch, p.kv_heads, p.tiles, p.kv_tiles, p.rows)
    outputs = Parts(
        out=jax.ShapeDtypeStruct((*row_shape, p.head_dim) if partial else q.shape, q.dtype),
        lse=jax.ShapeDtypeStruct(row_shape if partial else q.shape[:3], jnp.float32),
        prefix_lse=jax.ShapeDtypeStruct(row_shape, jnp.float32) if p.prefix_sums else None,
        weights=jax.ShapeDtypeStruct((*kept, p.kv_tile), jnp.bfloat16) if p.keep_weights else None,
        tops=jax.ShapeDtypeStruct(kept, jnp.float32) if p.keep_weights else None,
        pages=jax.ShapeDtypeStruct((*paged, p.kv_tile // PAGE), jnp.bfloat16) if p.keep_pages else None,
        page_tops=jax.ShapeDtypeStruct(paged, jnp.float32) if p.keep_pages else None,
    )
    row_limits, tile_limits = (None, None) if p.uniform else p.row_limits(lengths)
    inputs = _Inputs(
        q,
        k,
        v,
        lengths,
        None if layer is None else layer.reshape(1),
        row_limits,
        tile_limits,
        prefix_lengths,
        query if p.keep_weights else None,
    )
    # plgpu.kernel passes one reference per array: the Nones are put back inside.
    used_inputs, input_tree = jax.tree.flatten(inputs)
    used_outputs, output_tree = jax.tree.flatten(outputs)

    def body(*refs, **scratch):
        ins = jax.tree.unflatten(input_tree, refs[: len(used_inputs)])
        outs = jax.tree.unflatten(output_tree, refs[len(used_inputs) :])
        _body(ins, outs, scratch, plan, scale)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((p.stages, p.kv_tile, p.head_dim), q.dtype, transforms=transforms)
    results = plgpu.kernel(
        body,
        out_type=used_outputs,
        grid=(p.tiles, p.splits, p.batch * p.kv_heads),
        grid_names=("tile", "split", "head"),
        num_threads=p.warpgroups + 1,
        thread_name="wg",
        scratch_types={
            "q_smem": plgpu.SMEM((p.warpgroups, 64, p.head_dim), q.dtype, transforms=transforms),
            "k_smem": ring,
            "v_smem": ring,
            "q_ready": plgpu.Barrier(num_arrivals=p.slabs_per_warpgroup, num_barriers=p.warpgroups),
            "k_ready": plgpu.Barrier(num_barriers=p.stages),
            "v_ready": plgpu.Barrier(num_barriers=p.stages),
            "k_free": plgpu.Barrier(num_arrivals=p.warpgroups, num_barriers=p.stages),
            "v_free": plgpu.Barrier(num_arrivals=p.warpgroups, num_barriers=p.stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )(*used_inputs)
    return jax.tree.unflatten(output_tree, results)


class _Range(NamedTuple):
    """The KV entries of one program: tiles [first, last), of which those before `full` need no mask.

    longest: how many entries the rows of the tile see at most. row_limit: `i32[64]`, how many each row sees, or None if
    all see `longest`. prefix: the prefix length, or None.
    """

    first: jax.Array
    full: jax.Array
    last: jax.Array
    longest: jax.Array
    row_limit: jax.Array | None
    prefix: jax.Array | None


def _body(ins: _Inputs, outs: Parts, scratch, p: Plan, scale: float):
    # Long tiles first: with block-causal lengths the last tiles see the most entries and would otherwise end alone.
    tile = p.tiles - 1 - lax.axis_index("tile")
    split = lax.axis_index("split")
    batch, head = divide(lax.axis_index("head"), p.kv_heads)
    wg = lax.axis_index("wg")

    if p.uniform:
        run = lax.div(divide(tile * p.slabs, p.group)[0] * p.query_chunk, p.queries_per_run)
        longest = shortest = jnp.clip(ins.lengths[batch, run], 0, p.entries)
    else:
        shortest, longest = ins.tile_limits[batch, tile, 0], ins.tile_limits[batch, tile, 1]
    prefix = None
    if ins.prefix_lengths is not None:
        prefix = jnp.clip(ins.prefix_lengths[batch], 0, p.entries)
        shortest = jnp.minimum(shortest, prefix)
    kv_tiles = divide(longest + p.kv_tile - 1, p.kv_tile)[0]
    first = lax.div(kv_tiles * split, p.splits)
    last = lax.div(kv_tiles * (split + 1), p.splits)
    full = jnp.clip(divide(shortest, p.kv_tile)[0], first, last)

    @pl.when(wg < p.warpgroups)
    def _compute():
        plgpu.set_max_registers(p.registers[0], action="increase")
        for rows, where, _ in slabs(p, batch, head, tile, wg):
            plgpu.copy_gmem_to_smem(ins.q.at[where], scratch["q_smem"].at[wg, rows], scratch["q_ready"].at[wg])
        row_limit = None
        if not p.uniform:
            row_limit = plgpu.load(
                ins.row_limits.at[batch, tile, pl.ds(wg * 64, 64)],
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
        kept = None
        if p.keep_weights:
            query, q_head = _row_queries(head, tile, wg, p)
            slot = jnp.where(query == ins.query[batch], q_head - head * p.group, -1)
            kept = functools.partial(_keep_weights, outs, batch, head, slot)
        paged = None
        if p.keep_pages:
            paged = functools.partial(_keep_pages, outs, (batch, head, tile), wg, p)
        plgpu.barrier_wait(scratch["q_ready"].at[wg])
        entries = _Range(first, full, last, longest, row_limit, prefix)
        acc, top, total, prefix_total = _softmax_loop(entries, kept, paged, wg, scratch, p, scale)

        here = (split, batch, head, tile, pl.ds(wg * 64, 64))
        lse = _lse(top, total)
        if p.prefix_sums:
            outs.prefix_lse[here] = _lse(top, prefix_total)
        acc *= lax.broadcast_in_dim(jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0), acc.shape, [0])
        smem = scratch["q_smem"].at[wg]
        smem[...] = acc.astype(p.dtype)
        plgpu.commit_smem()
        if p.splits > 1:
            outs.lse[here] = lse
            plgpu.copy_smem_to_gmem(smem, outs.out.at[here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written ends with the kernel
        else:
            mosaic_inline.store_rows(outs.lse.at[batch], lse, _row_queries(head, tile, wg, p))
            for rows, where, exists in slabs(p, batch, head, tile, wg):
                pl.when(exists)(functools.partial(plgpu.copy_smem_to_gmem, smem.at[rows], outs.out.at[where]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written ends with the kernel

    @pl.when(wg == p.warpgroups)
    def _copy():
        plgpu.set_max_registers(p.registers[1], action="decrease")

        def load(index, wait):
            where = (batch, head, pl.ds(index * p.kv_tile, p.kv_tile))
            where = where if ins.layer is None else (ins.layer[0], *where)
            slot = divide(index - first, p.stages)[1]
            for ref, name in ((ins.k, "k"), (ins.v, "v")):
                if wait:
                    plgpu.barrier_wait(scratch[f"{name}_free"].at[slot])
                plgpu.copy_gmem_to_smem(
                    ref.at[where], scratch[f"{name}_smem"].at[slot], scratch[f"{name}_ready"].at[slot]
                )

        filled = jnp.minimum(first + p.stages, last)
        pl.loop(first, filled)(functools.partial(load, wait=False))
        pl.loop(filled, last)(functools.partial(load, wait=True))


def _softmax_loop(entries: _Range, keep_weights, keep_pages, wg, scratch, p: Plan, scale: float):
    """Online softmax over the program's KV tiles.

    Returns the accumulator `f32[64, D]`, and per row the maximum (base 2), the sum of weights and that of the prefix.
    """
    e = entries
    scores_shape, acc_shape = (64, p.kv_tile), (64, p.head_dim)
    to_base_2 = scale * LOG2E

    def take_turn():
        if p.ping_pong:
            mosaic_inline.meet()

    def step(index, carry, masked):
        acc, top, total, prefix_total = carry
        slot = divide(index - e.first, p.stages)[1]
        start = index * p.kv_tile
        k_tile, v_tile = scratch["k_smem"].at[slot], scratch["v_smem"].at[slot]

        plgpu.barrier_wait(scratch["k_ready"].at[slot])

        def scores_of(acc_ref):
            plgpu.wgmma(acc_ref, scratch["q_smem"].at[wg], k_tile.transpose((1, 0)))
            take_turn()
            return acc_ref[...]

        s = pl.run_scoped(scores_of, plgpu.ACC(scores_shape, jnp.float32))
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        if masked:
            columns = plgpu.broadcasted_iota(jnp.int32, scores_shape, 1, layout=plgpu.Layout.WGMMA)
            if e.row_limit is None:
                limit = e.longest - start
            else:
                limit = lax.broadcast_in_dim(e.row_limit - start, scores_shape, [0])
            s = jnp.where(columns < limit, s, -jnp.inf)

        new_top = jnp.maximum(top, s.max(axis=1) * to_base_2)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(s * to_base_2 - lax.broadcast_in_dim(new_top, scores_shape, [0]))
        pairs = None if keep_pages is None else mosaic_inline.pair_sums(weights)
        row_sum = (weights if pairs is None else pairs).sum(axis=1)
        if p.prefix_sums:
            if masked:
                prefix_sum = jnp.where(columns < e.prefix - start, weights, 0.0).sum(axis=1)
            else:
                prefix_sum = row_sum
            prefix_total = prefix_total * shrink + prefix_sum
        total = total * shrink + row_sum
        acc *= lax.broadcast_in_dim(shrink, acc_shape, [0])
        # float16 would lose the small ones. What is bfloat16 anyway is not rounded twice.
        if keep_pages is not None and masked and e.prefix is not None:
            pairs = mosaic_inline.pair_sums(jnp.where(columns < e.prefix - start, weights, 0.0))
        keeps_its_own = keep_weights is not None and p.dtype != jnp.bfloat16
        kept = weights.astype(jnp.bfloat16) if keeps_its_own else None
        weights = weights.astype(p.dtype)
        # Both keep the compiler from moving arithmetic behind the barrier, where the tensor cores would wait for it.
        # Where nothing is kept the first does nearly all of that, and the second costs more than it gains.
        acc, new_top, total, weights = lax.optimization_barrier((acc, new_top, total, weights))
        if p.ping_pong and (keep_weights is not None or keep_pages is not None):
            mosaic_inline.computed_here(e.longest, acc, weights)

        take_turn()
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        if masked:
            _zero_tail(v_tile, e.longest - start, p)

        # The tensor cores are this warpgroup's for now, and would leave it waiting.
        meanwhile = None
        if keep_pages is not None:
            meanwhile = functools.partial(keep_pages, index, pairs, new_top)
        elif keep_weights is not None:
            meanwhile = functools.partial(keep_weights, index, weights if kept is None else kept, new_top)
        acc = _add_matmul(acc, weights, v_tile, meanwhile)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return acc, new_top, total, prefix_total

    def per_row(value):
        return plgpu.layout_cast(jnp.full((64,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    acc = plgpu.layout_cast(jnp.zeros(acc_shape, jnp.float32), plgpu.Layout.WGMMA)
    carry = (acc, per_row(LOWEST), per_row(0.0), per_row(0.0) if p.prefix_sums else None)
    # Ping-pong: the warpgroups alternate between the tensor cores and the softmax. The second starts half a step late.
    if p.ping_pong:
        pl.when(wg == 1)(take_turn)
    carry = lax.fori_loop(e.first, e.full, functools.partial(step, masked=False), carry)
    carry = lax.fori_loop(e.full, e.last, functools.partial(step, masked=True), carry)
    if p.ping_pong:
        pl.when(wg == 0)(take_turn)
    return carry


def _add_matmul(acc, weights, v_tile, meanwhile):
    """acc `f32[64, D]` + weights `[64, n]` @ v_tile `[n, D]`; calls `meanwhile`, if any, while that is under way."""

    def add(acc_ref):
        plgpu.wgmma(acc_ref, weights, v_tile)
        if meanwhile is not None:
            meanwhile()

    return pl.run_state(add)(plgpu.ACC.init(acc))


def _lse(top, total):
    """Natural log-sum-exp from a base-2 maximum and the sum relative to it; -inf where nothing was seen."""
    some = total > 0
    return jnp.where(some, (top + jnp.log2(jnp.where(some, total, 1.0))) * (1 / LOG2E), -jnp.inf)


def _row_queries(head, tile, wg, p: Plan):
    """For each of a warpgroup's 64 rows its query and query head, both `i32[64]`; query -1 for rows that are none."""
    row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1)) + wg * 64
    slab, offset = divide(row, p.query_chunk)
    chunk, member = divide(tile * p.slabs + slab, p.group)
    query = chunk * p.query_chunk + offset
    # With one query head per KV head the second is the same for all rows, and has to be told that it is one per row.
    q_head = plgpu.layout_cast(head * p.group + member, plgpu.Layout.WGMMA.reduce(1))
    return jnp.where(query < p.queries, query, -1), q_head


def _zero_tail(v_tile, valid, p: Plan):
    """Zeroes the rows of a V tile from `valid` on: their weights are 0, but 0 * NaN is NaN.

    Every warpgroup does this for itself, before its own matmul; they write the same values.
    """

    @pl.when(valid < p.kv_tile)
    def _():
        for start in range(0, p.kv_tile, 64):
            part = v_tile.at[pl.ds(start, 64)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
            index = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(index < valid - start, values, jnp.zeros_like(values))
        plgpu.commit_smem()


def _keep_weights(outs: Parts, batch, head, slot, index, weights, top):
    mosaic_inline.store_rows_wide(outs.weights.at[batch, head, index], weights, slot)
    mosaic_inline.store_rows_wide(outs.tops.at[batch, head, index], top, slot)


def _keep_pages(outs: Parts, where, wg, p: Plan, index, pairs, top):
    batch, head, tile = where
    here = (batch, head, tile, index, pl.ds(wg * 64, 64))
    exists = p.used_rows - 1 - tile * p.rows - wg * 64  # below 0: no row of this warpgroup is a query
    mosaic_inline.store_page_sums(outs.pages.at[here], outs.page_tops.at[here], pairs, top, exists)
