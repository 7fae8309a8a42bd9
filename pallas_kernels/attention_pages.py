"""The small kernel that turns weights kept by page into importance: `block_attention`'s last launch where it runs.

The programs of the attention left, for every query row, the sums of its weights over pages of 8 entries, each relative
to the running maximum of that moment. Only now the log-sum-exp of every row is known, and with it what its sums count.
Per-thread code (`lanes`): a warp takes a tile of entries, its lanes 16 bytes of a row's sums each, so that all it reads
is in flight together. Where splits are joined, this is done by more blocks of the kernel that joins them
(`attention_finish`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import PAGE, Plan
from pallas_kernels.warps import WARP

KERNEL_NAME = "block_attention_pages"

THREADS = 128
TILES = THREADS // WARP  # of entries, to a block
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
      what a row's sums count, -inf if they do not.
    into: `f32[S, B, K, ceil(N / page)]` and i32 scalar, for a page of PAGE: the stack whose element of that number the
      importance becomes, in place. Then the whole stack is returned.
    launch: what runs the kernel, `lanes.launch` if None.
    """
    p = plan
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    inputs = {"pages": parts.pages, "page_tops": parts.page_tops, "bias": bias, "lengths": lengths[:, 0]}
    inputs |= stack_inputs(into)
    updated, outputs = destination(p, into)

    def kernel(lanes: Any, *memories: Any) -> None:
        refs = dict(zip([*inputs, "importance"], memories, strict=True))

        def shift(pair: Any, index: Any, real: Any) -> Any:
            return lanes.load(refs["bias"], pair * (p.tiles * p.rows) + index, where=real)[0]

        add_up(lanes, refs, lanes.block, shift, p, None if into is None else into[0].shape[-1])

    [found] = launch(
        kernel,
        name=KERNEL_NAME,
        blocks=blocks(p),
        threads=THREADS,
        inputs=list(inputs.values()),
        updated=updated,
        outputs=outputs,
    )
    return found if into is not None else of_page(found, p, page)


def blocks(p: Plan) -> int:
    """How many blocks of THREADS `add_up` takes, each for tiles of one KV head."""
    return p.batch * p.kv_heads * -(-p.kv_tiles // TILES)


def stack_inputs(into: tuple[jax.Array, jax.Array] | None) -> dict[str, jax.Array]:
    """What the kernel reads beside the parts where importance goes `into` a stack: the number it gets there."""
    return {} if into is None else {"number": into[1].reshape(1)}


def destination(
    p: Plan, into: tuple[jax.Array, jax.Array] | None
) -> tuple[list[jax.Array], list[jax.ShapeDtypeStruct]]:
    """The arrays that the kernel changes and those that it makes: one of these is what it calls importance."""
    if into is not None:
        return [into[0]], []
    return [], [jax.ShapeDtypeStruct((p.batch, p.kv_heads, p.kv_tiles * (p.kv_tile // PAGE)), jnp.float32)]


def of_page(sums: jax.Array, p: Plan, page: int) -> jax.Array:
    """What `pages` returns, from the sums of whole tiles over PAGE entries."""
    ratio, wanted = page // PAGE, -(-p.entries // page)
    if ratio > 1:
        sums = jnp.pad(sums, ((0, 0), (0, 0), (0, -sums.shape[-1] % ratio)))
        sums = jnp.sum(sums.reshape(p.batch, p.kv_heads, -1, ratio), axis=-1)
    return sums[:, :, :wanted]


def add_up(
    lanes: Any, refs: dict[str, Any], block: Any, shift: Callable[[Any, Any, Any], Any], p: Plan, length: int | None
) -> None:
    """The kernel's work: block `block` of `blocks`.

    shift: from a pair of row and KV head, a query row of it and where both are real to the row's bias, as bits.
    length: of the stack's last axis where "importance" is one.
    """
    per_tile = p.kv_tile // PAGE
    width = per_tile // PER_LANE  # lanes that share a row
    lane = lanes.thread & (WARP - 1)
    per_pair = -(-p.kv_tiles // TILES)
    pair = block // per_pair
    kv_tile = (block % per_pair) * TILES + lanes.thread // WARP
    inside = kv_tile < p.kv_tiles
    (limit,) = lanes.load(refs["lengths"], pair // p.kv_heads)
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
            tile, row = index // p.rows, index % p.rows
            at = ((lanes.wide(pair) * p.tiles + lanes.wide(tile)) * p.kv_tiles + lanes.wide(kv_tile)) * p.rows
            at = at + lanes.wide(row)
            words = lanes.load(refs["pages"], at * (per_tile // 2) + lanes.wide(piece * (PER_LANE // 2)), 4, where=real)
            (top,) = lanes.load(refs["page_tops"], at, where=real)
            loaded.append((words, top, lanes.where(real, shift(pair, index, real), nothing)))
        for words, top, bias in loaded:
            factor = lanes.exp2(lanes.real(top) + lanes.real(bias))
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
    if length is None:
        length = p.kv_tiles * per_tile
    else:
        (number,) = lanes.load(refs["number"], lanes.constant(0))
        place = place + lanes.wide(number) * (p.batch * p.kv_heads)
        mine = mine & (page < length)  # the last tile may reach past the stack's end
    lanes.store(refs["importance"], place * length + lanes.wide(page), [lanes.bits(totals[0])], where=mine)


def _either(lanes: Any, condition: Any, a: Any, b: Any) -> Any:
    return lanes.real(lanes.where(condition, lanes.bits(a), lanes.bits(b)))


def _exchanged(lanes: Any, keep: Any, give: Any, other: Any) -> Any:
    return keep + lanes.real(lanes.shuffle(lanes.bits(give), other))
