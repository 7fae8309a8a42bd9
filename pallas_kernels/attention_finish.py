"""The small kernel that ends `block_attention`: joins the splits, and turns kept weights into importance.

Per-thread code (`lanes`): it is all latency, so every thread has its loads in flight together, 16 bytes each, and what
all threads of a row or head need (how the splits weigh against each other) is worked out once per warp, by shuffles.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import attention_pages
from pallas_kernels.attention_plan import LOG2E, Plan
from pallas_kernels.warps import WARP, halves, merged

KERNEL_NAME = "block_attention_finish"

NOTHING = 0xFF800000  # -inf, as bits
THREADS = 128
# Entries that a thread turns into importance: 16 bytes of bfloat16 weights.
ENTRIES = 8
# Splits whose partial results a thread asks for at once.
AT_ONCE = 16


class Finished(NamedTuple):
    """What `finish` returns; T is as long as the kernel made it.

    out: `[B, T, H, D]`. lse: `f32[B, T, H]`. importance: of the kept weights `f32[B, K, N]`; of those kept by page as
    `attention_pages.pages` returns it, where shares were given and splits are joined; or None.
    """

    out: jax.Array
    lse: jax.Array
    importance: jax.Array | None


def finish(
    parts: Any,
    lengths: jax.Array,
    query: Any,
    prefix_lengths: Any,
    plan: Plan,
    importance: Any,
    *,
    shares: jax.Array | None = None,
    into: tuple[jax.Array, jax.Array] | None = None,
    launch: Any = None,
) -> Finished:
    """What is left to do once the programs have left `parts`, an `attention_mosaic.Parts`.

    Importance only where the plan keeps weights, for `query` `i32[B]`, or keeps them by page.
    shares: `f32[B, T]`, to base 2, what a query's weights count by page; -inf if they do not.
    into: of importance by page, as `attention_pages.pages` takes it.
    launch: what runs the kernel, `lanes.launch` if None.
    """
    p = plan
    merge = p.splits > 1
    if not (merge or p.keep_weights):
        return Finished(parts.out, parts.lse, None)
    by_page = merge and shares is not None
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch

    heads = p.kv_heads * p.group
    inputs: dict[str, Any] = {"lse": parts.lse}
    outputs: dict[str, Any] = {}
    weight_blocks = merge_blocks = 0
    # The importance blocks come first: they are the longer ones.
    if p.keep_weights:
        weight_blocks = p.batch * p.kv_heads * _blocks_per_head(p)
        inputs |= {"weights": parts.weights, "tops": parts.tops, "query": query, "lengths": lengths[:, 0]}
        if p.prefix_sums:
            inputs |= {"over": parts.prefix_lse, "prefix_lengths": prefix_lengths}
        shape = (p.batch, p.kv_heads, p.kv_tiles * p.kv_tile)
        outputs |= {"importance": jax.ShapeDtypeStruct(shape, jnp.float32)}
    updated: list[jax.Array] = []
    if by_page:
        weight_blocks = attention_pages.blocks(p)
        inputs |= {"pages": parts.pages, "page_tops": parts.page_tops, "shares": shares, "lengths": lengths[:, 0]}
        inputs |= attention_pages.stack_inputs(into)
        updated, made = attention_pages.destination(p, into)
        outputs |= {"importance": made[0]} if made else {}
    if merge:
        merge_blocks = -(-p.batch * p.queries * heads * (p.head_dim // 8) // THREADS)
        inputs |= {"out": parts.out}
        outputs |= {
            "joined": jax.ShapeDtypeStruct((p.batch, p.queries, heads, p.head_dim), p.dtype),
            "joined_lse": jax.ShapeDtypeStruct((p.batch, p.queries, heads), jnp.float32),
        }

    def kernel(lanes: Any, *memories: Any) -> None:
        names = [*inputs, *(["importance"] if updated else []), *outputs, *(["biases"] if by_page else [])]
        refs = dict(zip(names, memories, strict=True))

        def only_if(mine: Any, work: Any) -> None:
            def once(_: Any) -> tuple[()]:
                work()
                return ()

            lanes.loop(lanes.constant(0), lanes.word(mine), lanes.constant(1), (), once)

        if p.keep_weights:
            only_if(lanes.block < weight_blocks, lambda: _importance(lanes, refs, p, importance.reduce))
        if by_page:
            length = None if into is None else into[0].shape[-1]
            only_if(lanes.block < weight_blocks, lambda: _pages(lanes, refs, p, length))
        if merge:
            only_if(lanes.block >= weight_blocks, lambda: _merge(lanes, refs, lanes.block - weight_blocks, p))

    results = launch(
        kernel,
        name=KERNEL_NAME,
        blocks=weight_blocks + merge_blocks,
        threads=THREADS,
        inputs=list(inputs.values()),
        updated=updated,
        outputs=list(outputs.values()),
        shared=[p.used_rows] if by_page else [],
    )
    by_name = dict(zip([*(["importance"] if updated else []), *outputs], results, strict=True))
    out, lse = (by_name["joined"], by_name["joined_lse"]) if merge else (parts.out, parts.lse)
    weight = by_name.get("importance")
    if p.keep_weights:
        weight = by_name["importance"][:, :, : p.entries]
    elif by_page and into is None:
        weight = attention_pages.of_page(by_name["importance"], p, importance.page)
    return Finished(out, lse, weight)


def _blocks_per_head(p: Plan) -> int:
    return -(-p.kv_tiles * p.kv_tile // (ENTRIES * THREADS))


def _row(lanes: Any, p: Plan, batch: Any, head: Any, query: Any, member: Any) -> Any:
    """Where a query of a KV head's member lies in `[B, K, R, rows]`: `Plan.row_of`, per thread."""
    chunk, offset = query // p.query_chunk, query % p.query_chunk
    slab = chunk * p.group + member
    tile, row = slab // p.slabs, (slab % p.slabs) * p.query_chunk + offset
    return ((batch * p.kv_heads + head) * p.tiles + tile) * p.rows + row


def _row_count(p: Plan) -> int:
    return math.prod(p.row_shape)


def _lses(lanes: Any, memory: Any, row: Any, piece: Any, width: int, p: Plan) -> list[Any]:
    """A row's log-sum-exp of splits piece, piece + width, ...: `width` neighbouring lanes share them."""
    held = []
    for first in range(0, p.splits, width):
        split = piece + first
        (word,) = lanes.load(memory, split * _row_count(p) + row, where=split < p.splits)
        held.append(lanes.real(lanes.where(split < p.splits, word, lanes.constant(NOTHING))))
    return held


def _joint(lanes: Any, held: list[Any], width: int) -> tuple[list[Any], Any, Any]:
    """How splits weigh whose log-sum-exp `width` neighbouring lanes hold.

    Returns each one's share, their joint log-sum-exp (0 where nothing was seen), and whether anything was.
    """
    top = held[0]
    for value in held[1:]:
        top = lanes.maximum(top, value)
    top = merged(lanes, top, lanes.maximum, halves(width))
    seen = lanes.bits(top) != NOTHING
    top = lanes.real(lanes.where(seen, lanes.bits(top), lanes.constant(0)))
    relative = [(value - top) * LOG2E for value in held]
    total = lanes.exp2(relative[0])
    for value in relative[1:]:
        total = total + lanes.exp2(value)
    total = merged(lanes, total, operator.add, halves(width))
    one = lanes.constant(0x3F800000)
    log = lanes.log2(lanes.real(lanes.where(seen, lanes.bits(total), one)))
    return [lanes.exp2(value - log) for value in relative], top + log * (1 / LOG2E), seen


def _merge(lanes: Any, refs: dict[str, Any], block: Any, p: Plan) -> None:
    """Joins the splits of a few rows: 16 lanes for each, or 8 of 64 numbers."""
    heads, width = p.kv_heads * p.group, p.head_dim // 8
    index = block * THREADS + lanes.thread
    number, piece = index // width, index % width
    inside = number < p.batch * p.queries * heads
    # Queries of a head lie side by side among the partial results.
    rest, query = number // p.queries, number % p.queries
    batch, q_head = rest // heads, rest % heads
    row = _row(lanes, p, batch, q_head // p.group, query, q_head % p.group)
    row = lanes.where(inside, row, lanes.constant(0))
    held = _lses(lanes, refs["lse"], row, piece, width, p)
    words = p.head_dim // 2

    def load(splits: range) -> list[Any]:
        return [lanes.load(refs["out"], (row + s * _row_count(p)) * words + piece * 4, 4) for s in splits]

    batches = [range(s, min(s + AT_ONCE, p.splits)) for s in range(0, p.splits, AT_ONCE)]
    loaded = load(batches[0])
    shares, joint, seen = _joint(lanes, held, width)
    first_lane = (lanes.thread & (WARP - 1)) - piece
    sums = [lanes.real(lanes.constant(0))] * 8
    for splits in batches:
        loaded = loaded if splits is batches[0] else load(splits)
        for s, packed in zip(splits, loaded, strict=True):
            share = lanes.real(lanes.shuffle(lanes.bits(shares[s // width]), first_lane + s % width))
            numbers = [half for word in packed for half in lanes.unpack(word, p.dtype)]
            sums = [total + number * share for total, number in zip(sums, numbers, strict=True)]
    packed = [lanes.pack(low, high, p.dtype) for low, high in zip(sums[::2], sums[1::2], strict=True)]
    at = (batch * p.queries + query) * heads + q_head
    lanes.store(refs["joined"], at * words + piece * 4, packed, where=inside)
    lse = lanes.where(seen, lanes.bits(joint), lanes.constant(NOTHING))
    lanes.store(refs["joined_lse"], at, [lse], where=inside & (piece < 1))


def _pages(lanes: Any, refs: dict[str, Any], p: Plan, length: int | None) -> None:
    """Importance by page of four tiles of entries, once the block knows what its rows' sums count."""
    pair = lanes.block // (attention_pages.blocks(p) // (p.batch * p.kv_heads))
    for start in range(0, p.used_rows, THREADS):
        index = lanes.thread + start
        query = index // (p.query_chunk * p.group) * p.query_chunk + index % p.query_chunk
        real = (index < p.used_rows) & (query < p.queries)
        row = pair * (p.tiles * p.rows) + index
        held = [lanes.load(refs["lse"], row + split * _row_count(p), where=real)[0] for split in range(p.splits)]
        (share,) = lanes.load(refs["shares"], (pair // p.kv_heads) * p.queries + query, where=real)
        _, joint, seen = _joint(lanes, [lanes.real(word) for word in held], 1)
        bias = lanes.bits(lanes.real(share) - joint * LOG2E)
        bias = lanes.where(seen & real, bias, lanes.constant(NOTHING))
        lanes.store(refs["biases"], index, [bias], where=index < p.used_rows)
    lanes.barrier()

    def shift(pair: Any, index: Any, real: Any) -> Any:
        del pair
        return lanes.load(refs["biases"], index, where=real)[0]

    attention_pages.add_up(lanes, refs, lanes.block, shift, p, length)


def _importance(lanes: Any, refs: dict[str, Any], p: Plan, reduce: str) -> None:
    """Importance of 8 entries per thread, from the chosen query's kept weights; 0 past the row's end."""
    pair, part = lanes.block // _blocks_per_head(p), lanes.block % _blocks_per_head(p)
    batch, head = pair // p.kv_heads, pair % p.kv_heads
    (query,) = lanes.load(refs["query"], batch)
    (limit,) = lanes.load(refs["lengths"], batch)
    limit = lanes.minimum(limit & ~lanes.sign(limit), lanes.constant(p.entries))
    if p.prefix_sums:
        (prefix,) = lanes.load(refs["prefix_lengths"], batch)
        limit = lanes.minimum(limit, prefix & ~lanes.sign(prefix))
    unit = part * THREADS + lanes.thread
    per_tile = p.kv_tile // ENTRIES
    tile, place = unit // per_tile, unit % per_tile
    inside = tile < p.kv_tiles
    # A tile past the end was never written.
    wanted = inside & (tile * p.kv_tile < limit)
    row_of_tops = (pair * p.kv_tiles + tile) * p.group
    kept = [
        lanes.load(refs["weights"], (row_of_tops + m) * (p.kv_tile // 2) + place * 4, 4, where=wanted)
        for m in range(p.group)
    ]
    tops = [lanes.real(lanes.load(refs["tops"], row_of_tops + m, where=wanted)[0]) for m in range(p.group)]
    by_split = p.splits > 1 or p.prefix_sums
    width = min(WARP, 1 << (p.splits - 1).bit_length()) if by_split else 1
    held = []
    for m in range(p.group):
        if by_split:
            row = _row(lanes, p, batch, head, query, lanes.constant(m))
            lane = lanes.thread & (WARP - 1)
            held.append(_lses(lanes, refs["over" if p.prefix_sums else "lse"], row, lane % width, width, p))
        else:
            heads = p.kv_heads * p.group
            at = (batch * p.padded_queries + query) * heads + head * p.group + m
            held.append([lanes.real(lanes.load(refs["lse"], at)[0])])
    results = [lanes.real(lanes.constant(0))] * ENTRIES
    for m in range(p.group):
        _, joint, _ = _joint(lanes, held[m], width)
        factor = lanes.exp2(tops[m] - joint * LOG2E)
        weights = [half for word in kept[m] for half in lanes.unpack(word, jnp.dtype(jnp.bfloat16))]
        if reduce == "max":
            results = [lanes.maximum(r, w * factor) for r, w in zip(results, weights, strict=True)]
        else:
            factor = factor * (1 / p.group)
            results = [r + w * factor for r, w in zip(results, weights, strict=True)]
    # The order in which `mosaic_inline.store_rows_wide` left them: of 32 entries a thread had 2 t, 2 t + 1 and those 8,
    # 16 and 24 further on.
    first = tile * p.kv_tile + (place // 4) * 32 + (place % 4) * 2
    out = pair * (p.kv_tiles * p.kv_tile)
    for j in range(4):
        entry = first + 8 * j
        words = [lanes.where(entry + b < limit, lanes.bits(results[2 * j + b]), lanes.constant(0)) for b in range(2)]
        lanes.store(refs["importance"], out + entry, words, where=inside)
