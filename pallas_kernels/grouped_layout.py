"""Where each pair of token and expert is computed, as one per-thread kernel (`lanes`): `grouped.lay_out`'s.

One thread block. Each expert has a bit for every token, set in shared memory: how many experts' bits are set says how
many rows it needs, and those below a token's own say which row is its. Nothing depends on the order of the threads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.warps import WARP

__all__ = ["MOST_WORDS", "lay_out", "shared_words"]

MOST_WORDS = 56 * 1024  # of shared memory: 224 KB of a Hopper multiprocessor's 227
_THREADS = 1024


def shared_words(tokens: int, experts: int) -> int:
    """Words of shared memory that `lay_out` takes."""
    return 2 * experts * _stride(tokens) + 2 * experts + 2 * WARP


def _stride(tokens: int) -> int:
    return -(-tokens // WARP) | 1  # words of an expert's bits; odd, so that experts begin in different banks


def lay_out(
    chosen: jax.Array, experts: int, *, rows: int, items: int, align: int, tile: int, launch: Any = None
) -> tuple[jax.Array, ...]:
    """`grouped.lay_out` of chosen i32[T, k], up to 1,024 experts: the fields of `grouped.Layout`, in their order.

    `rows` and `items` are how many there are at the most; every expert's rows begin at a multiple of `align`, and up to
    `tile` of them are an item.
    """
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    tokens, k = chosen.shape
    pairs, words, stride = tokens * k, -(-tokens // WARP), _stride(tokens)
    most = -(-tokens // tile)  # items of one expert

    def kernel(
        lanes: Any, chosen_ref: Any, token_ref: Any, row_ref: Any, expert_ref: Any, start_ref: Any, filled_ref: Any,
        items_ref: Any, bits: Any, before: Any, begins: Any, totals: Any,
    ) -> None:  # fmt: skip
        zero = lanes.constant(0)

        def each(count: int, body: Any) -> None:
            """body(i, i < count) for every i, shared among the threads."""

            def turn(base: Any) -> tuple[()]:
                index = base + lanes.thread
                body(index, index < count)
                return ()

            lanes.loop(zero, lanes.constant(-(-count // _THREADS) * _THREADS), lanes.constant(_THREADS), (), turn)

        each(experts * stride, lambda i, inside: lanes.store(bits, i, [zero], where=inside))
        each(rows, lambda i, inside: lanes.store(token_ref, i, [zero], where=inside))

        def no_item(i: Any, inside: Any) -> None:
            for ref in (expert_ref, start_ref, filled_ref):
                lanes.store(ref, i, [zero], where=inside)

        each(items, no_item)
        lanes.barrier()

        def bit_of(pair: Any, inside: Any) -> tuple[Any, Any, Any]:
            """The word that holds a pair's bit, the bit, and the pair's expert."""
            (expert,) = lanes.load(chosen_ref, pair, where=inside)
            token = pair // k
            return expert * stride + token // WARP, lanes.constant(1) << (token & (WARP - 1)), expert

        def mark(pair: Any, inside: Any) -> None:
            word, bit, _ = bit_of(pair, inside)
            lanes.unite(bits, word, bit, where=inside)

        each(pairs, mark)
        lanes.barrier()

        expert = lanes.thread
        real = expert < experts

        def count(word: Any, size: Any) -> tuple[Any]:
            (held,) = lanes.load(bits, expert * stride + word, where=real)
            lanes.store(before, expert * stride + word, [size], where=real)
            return (size + lanes.ones(held),)

        (size,) = lanes.loop(zero, lanes.constant(words), lanes.constant(1), (zero,), count)
        padded, tiles = (size + (align - 1)) // align * align, (size + (tile - 1)) // tile
        begin, first = _sums_before(lanes, [padded, tiles], totals)
        lanes.store(begins, expert, [begin], where=real)

        def item(number: Any) -> tuple[()]:
            there = real & (number < tiles)
            done = number * tile
            lanes.store(expert_ref, first + number, [expert], where=there)
            lanes.store(start_ref, first + number, [begin + done], where=there)
            lanes.store(filled_ref, first + number, [lanes.minimum(size - done, lanes.constant(tile))], where=there)
            return ()

        lanes.loop(zero, lanes.constant(most), lanes.constant(1), (), item)
        lanes.store(items_ref, zero, [first + tiles], where=expert == experts - 1)
        lanes.barrier()

        def place(pair: Any, inside: Any) -> None:
            word, bit, expert = bit_of(pair, inside)
            (held,) = lanes.load(bits, word, where=inside)
            (earlier,) = lanes.load(before, word, where=inside)
            (begin,) = lanes.load(begins, expert, where=inside)
            row = begin + earlier + lanes.ones(held & (bit - 1))
            lanes.store(row_ref, pair, [row], where=inside)
            lanes.store(token_ref, row, [pair // k], where=inside)

        each(pairs, place)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    *found, count = launch(
        kernel,
        name="lay_out_experts",
        blocks=1,
        threads=_THREADS,
        inputs=[chosen],
        outputs=[of(rows), of(pairs), of(items), of(items), of(items), of(1)],
        shared=[experts * stride, experts * stride, experts, 2 * WARP],
    )
    return *found, count.reshape(())


def _sums_before(lanes: Any, values: list[Any], totals: Any) -> list[Any]:
    """For each of two values the sum over all threads before this one. `totals`: a word per warp for each."""
    lane, warp = lanes.thread & (WARP - 1), lanes.thread // WARP
    within = []
    for number, value in enumerate(values):
        total = value
        for distance in (1, 2, 4, 8, 16):
            other = lanes.shuffle_up(total, distance)
            total = total + lanes.where(lane >= distance, other, lanes.constant(0))
        lanes.store(totals, warp + number * WARP, [total], where=lane == WARP - 1)
        within.append(total - value)
    lanes.barrier()
    found = []
    for number, value in enumerate(within):
        for other in range(_THREADS // WARP):
            (total,) = lanes.load(totals, lanes.constant(other + number * WARP))
            value = value + lanes.where(warp > other, total, lanes.constant(0))
        found.append(value)
    return found
