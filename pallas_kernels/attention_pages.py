"""The small kernel that turns weights kept by page into importance: `block_attention`'s last launch where it runs.

The programs of the attention left, for every query row, the sums of its weights over pages of 8 entries, each relative
to the running maximum of that moment. Only now the log-sum-exp of every row is known, and with it what its sums count.
Per-thread code (`lanes`): a warp takes a tile of entries, its lanes 16 bytes of a row's sums each, so that all it reads
is in flight together.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import PAGE, Plan
from pallas_kernels.warps import WARP

KERNEL_NAME = "block_attention_pages"

THREADS = 128
PER_LANE = 8  # page sums of 16 bytes
AT_ONCE = 8  # rows of which a lane asks for sums at once


def pages(
    parts: Any,
    lengths: jax.Array,
    bias: jax.Array,
    plan: Plan,
    page: int,
    into: tuple[jax.Array, jax.Array] | None = None,
    *,
    launch: Any = None,
) -> jax.Array:
    """Importance `f32[B, K, ceil(N / page)]`, page a multiple of PAGE.

    parts: `attention_mosaic.Parts`. lengths: `i32[B, 1]`. bias: `f32[B, K, R, rows]`, by which exp2(maximum + bias) is
      what a row's sums count, -inf if they do not; of rows that are no query it may be anything.
    into: `f32[S, B, K, ceil(N / page)]` and i32 scalar, for a page of PAGE: the stack whose element of that number the
      importance becomes, in place. Then the whole stack is returned.
    launch: what runs the kernel, `lanes.launch` if None.
    """
    p = plan
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    found = p.kv_tiles * (p.kv_tile // PAGE)
    warps = p.batch * p.kv_heads * p.kv_tiles
    launched = functools.partial(launch, name=KERNEL_NAME, blocks=-(-warps * WARP // THREADS), threads=THREADS)
    inputs = [parts.pages, parts.page_tops, bias, lengths[:, 0]]
    if into is not None:
        stack, number = into

        def kernel(lanes: Any, *memories: Any) -> None:
            kept, tops, bias, lengths, number, out = memories
            _pages(lanes, kept, tops, bias, lengths, out, number, plan=p, length=stack.shape[-1])

        [stack] = launched(kernel, inputs=[*inputs, number.reshape(1)], updated=[stack])
        return stack
    [sums] = launched(
        functools.partial(_pages, plan=p, length=found),
        inputs=inputs,
        outputs=[jax.ShapeDtypeStruct((p.batch, p.kv_heads, found), jnp.float32)],
    )
    ratio, wanted = page // PAGE, -(-p.entries // page)
    if ratio > 1:
        sums = jnp.pad(sums, ((0, 0), (0, 0), (0, -found % ratio)))
        sums = jnp.sum(sums.reshape(p.batch, p.kv_heads, -1, ratio), axis=-1)
    return sums[:, :, :wanted]


def _pages(
    lanes: Any,
    kept: Any,
    tops: Any,
    bias: Any,
    lengths: Any,
    out: Any,
    number: Any = None,
    *,
    plan: Plan,
    length: int,
) -> None:
    """`out` holds `length` pages of a KV head; with `number` it is a stack of such."""
    p = plan
    per_tile = p.kv_tile // PAGE
    width = per_tile // PER_LANE  # lanes that share a row
    warp = (lanes.block * THREADS + lanes.thread) // WARP
    lane = lanes.thread & (WARP - 1)
    inside = warp < p.batch * p.kv_heads * p.kv_tiles
    warp = lanes.where(inside, warp, lanes.constant(0))
    pair, kv_tile = warp // p.kv_tiles, warp % p.kv_tiles
    (limit,) = lanes.load(lengths, pair // p.kv_heads)
    limit = lanes.minimum(limit & ~lanes.sign(limit), lanes.constant(p.entries))
    wanted = inside & (kv_tile * p.kv_tile < limit)  # of the others nothing was written
    first_row, piece = lane // width, lane % width
    nothing = lanes.constant(0xFF800000)  # -inf

    totals = [lanes.real(lanes.constant(0))] * PER_LANE
    starts = list(range(0, p.used_rows, WARP // width))
    for some in (starts[i : i + AT_ONCE] for i in range(0, len(starts), AT_ONCE)):
        loaded = []
        for start in some:
            index = first_row + start
            real = wanted & (index < p.used_rows)
            if p.queries % p.query_chunk:  # a slab may end in rows that are no query
                query = index // (p.query_chunk * p.group) * p.query_chunk + index % p.query_chunk
                real = real & (query < p.queries)
            tile, row = index // p.rows, index % p.rows
            at = ((lanes.wide(pair) * p.tiles + lanes.wide(tile)) * p.kv_tiles + lanes.wide(kv_tile)) * p.rows
            at = at + lanes.wide(row)
            words = lanes.load(kept, at * (per_tile // 2) + lanes.wide(piece * (PER_LANE // 2)), 4, where=real)
            (top,) = lanes.load(tops, at, where=real)
            (shift,) = lanes.load(bias, (pair * p.tiles + tile) * p.rows + row, where=real)
            loaded.append((words, top, lanes.where(real, shift, nothing)))
        for words, top, shift in loaded:
            factor = lanes.exp2(lanes.real(top) + lanes.real(shift))
            numbers = [half for word in words for half in lanes.unpack(word, jnp.dtype(jnp.bfloat16))]
            totals = [total + number * factor for total, number in zip(totals, numbers, strict=True)]

    # Over the lanes that have the same pages: each time half of the sums go away and half stay, until one is left.
    distance, page = WARP // 2, piece * PER_LANE
    while distance >= width:
        if len(totals) > 1:
            count = len(totals) // 2
            upper = lane & distance != 0
            page = page + lanes.where(upper, lanes.constant(count), lanes.constant(0))
            keep = [_either(lanes, upper, b, a) for a, b in zip(totals[:count], totals[count:], strict=True)]
            give = [_either(lanes, upper, a, b) for a, b in zip(totals[:count], totals[count:], strict=True)]
            totals = [_exchanged(lanes, k, g, lane ^ distance) for k, g in zip(keep, give, strict=True)]
        else:
            totals = [_exchanged(lanes, totals[0], totals[0], lane ^ distance)]
        distance //= 2
    # What the last steps added up, several lanes have.
    mine = inside & (lane & (WARP // 8 - width) == 0)
    page = kv_tile * per_tile + page
    place = lanes.wide(pair)
    if number is not None:
        (layer,) = lanes.load(number, lanes.constant(0))
        place = place + lanes.wide(layer) * (p.batch * p.kv_heads)
    mine = mine & (page < length)
    lanes.store(out, place * length + lanes.wide(page), [lanes.bits(totals[0])], where=mine)


def _either(lanes: Any, condition: Any, a: Any, b: Any) -> Any:
    return lanes.real(lanes.where(condition, lanes.bits(a), lanes.bits(b)))


def _exchanged(lanes: Any, keep: Any, give: Any, other: Any) -> Any:
    return keep + lanes.real(lanes.shuffle(lanes.bits(give), other))
