"""The vocabulary of :mod:`pallas_kernels.lanes` in NumPy: runs a kernel's own function on the CPU, for its tests.

All threads of a block advance together, one block after the other. That is a legal order for kernels written in this
vocabulary, so logic errors show here; what cannot show is a missing barrier, or speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["NumpyLanes", "launch"]

ALL = slice(None)  # no predicate: every thread


class NumpyLanes:
    """See :class:`pallas_kernels.lanes.Lanes`; a value is an array with one element per thread."""

    def __init__(self, threads: int, block: int, blocks: int):
        self.threads = threads
        self.thread = np.arange(threads, dtype=np.uint32)
        self.block = self.constant(block)
        self.blocks = self.constant(blocks)

    def constant(self, value: int) -> np.ndarray:
        return np.full(self.threads, value, np.uint32)

    def wide(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.uint64)

    def word(self, predicate: np.ndarray) -> np.ndarray:
        return predicate.astype(np.uint32)

    def where(self, predicate: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(predicate, a, b)

    def sign(self, value: np.ndarray) -> np.ndarray:
        return (value.view(np.int32) >> 31).view(np.uint32)

    def ones(self, word: np.ndarray) -> np.ndarray:
        return np.bitwise_count(word).astype(np.uint32)

    def minimum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.minimum(a, b)

    def real(self, bits: np.ndarray) -> np.ndarray:
        return bits.view(np.float32)

    def bits(self, number: np.ndarray) -> np.ndarray:
        return np.asarray(number, np.float32).view(np.uint32)

    def rsqrt(self, number: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(number)

    def divide(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a, np.float32) / np.asarray(b, np.float32)

    def exp2(self, number: np.ndarray) -> np.ndarray:
        return np.exp2(number)

    def log2(self, number: np.ndarray) -> np.ndarray:
        return np.log2(number)

    def multiply_add(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def multiply_bytes(
        self, a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        def numbers(words: Sequence[np.ndarray]) -> np.ndarray:
            """By warp, g, i, word and byte."""
            return np.stack(words, axis=1).view(np.int8).reshape(-1, 8, 4, len(words), 4).astype(np.int32)

        first, second = numbers(a), numbers(b)
        warps = len(first)
        # Words of the first factor: the half of the columns, then the half of the rows.
        rows = np.einsum("wgihrb->wrghib", first.reshape(warps, 8, 4, 2, 2, 4)).reshape(warps, 16, 32)
        columns = np.einsum("wgihb->wghib", second).reshape(warps, 8, 32)
        # By warp, row's half, g, i and column's last bit.
        sums = np.einsum("wrk,wck->wrc", rows, columns).reshape(warps, 2, 8, 4, 2)
        mine = np.einsum("whgic->wgihc", sums).reshape(-1, 4)
        return tuple((mine[:, i] + x.view(np.int32)).view(np.uint32) for i, x in enumerate(c))

    def maximum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fmax(a, b)

    def unpack(self, word: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        halves = word.view(np.uint16).view(np.dtype(dtype)).astype(np.float32)
        return halves[0::2], halves[1::2]

    def pack(self, low: np.ndarray, high: np.ndarray, dtype: Any) -> np.ndarray:
        return np.stack([low, high], axis=1).astype(np.dtype(dtype)).view(np.uint32)[:, 0]

    def at(self, memory: np.ndarray, index: np.ndarray) -> np.ndarray:
        if (index != index[0]).any():
            raise NotImplementedError("a start that differs between the threads of a block")
        return memory[int(index[0]) :]

    def choose(self, index: np.ndarray, memories: Sequence[np.ndarray]) -> np.ndarray:
        if (index != index[0]).any():
            raise NotImplementedError("a reference that differs between the threads of a block")
        return memories[int(index[0])]

    def clock(self) -> tuple[np.ndarray, np.ndarray]:
        now = time.perf_counter_ns()
        return self.constant(now & 0xFFFFFFFF), self.constant(now >> 32 & 0xFFFFFFFF)

    def barrier(self) -> None:
        pass

    def shuffle_up(self, value: np.ndarray, distance: int) -> np.ndarray:
        warps = value.reshape(-1, 32)
        return np.concatenate([warps[:, :distance], warps[:, :-distance]], axis=1).reshape(-1)

    def shuffle(self, value: np.ndarray, lane: np.ndarray) -> np.ndarray:
        return np.take_along_axis(value.reshape(-1, 32), (lane & 31).astype(np.int64).reshape(-1, 32), 1).reshape(-1)

    def loop(
        self, start: np.ndarray, stop: np.ndarray, step: np.ndarray, carry: Any, body: Callable[..., Any]
    ) -> tuple[np.ndarray, ...]:
        for bound in (start, stop, step):
            if (bound != bound[0]).any():
                raise ValueError("a loop's bounds must be alike for all threads of a block")
        carry = tuple(carry)
        for i in range(int(start[0]), int(stop[0]), int(step[0])):
            carry = tuple(body(self.constant(i), *carry))
        return carry

    def _checked(self, memory: np.ndarray, index: np.ndarray, words: int, where: Any) -> np.ndarray:
        at = index.astype(np.int64)[where]
        if at.size and (at.min() < 0 or at.max() + words > memory.size):
            raise IndexError(f"words {at.min()}..{at.max() + words} of a buffer of {memory.size}")
        if (at % words).any():
            raise IndexError(f"a {words}-word access must be aligned")
        return at

    def load(
        self, memory: np.ndarray, index: np.ndarray, words: int = 1, *, where: Any = ALL, hint: str = ""
    ) -> tuple[np.ndarray, ...]:
        at = self._checked(memory, index, words, where)
        out = tuple(self.constant(0) for _ in range(words))
        for i, word in enumerate(out):
            word[where] = memory[at + i]
        return out

    def store(self, memory: np.ndarray, index: np.ndarray, values: Sequence[np.ndarray], *, where: Any = ALL) -> None:
        at = self._checked(memory, index, len(values), where)
        for i, value in enumerate(values):
            memory[at + i] = value[where]

    def add(self, memory: np.ndarray, index: np.ndarray, value: np.ndarray, *, where: Any = ALL) -> None:
        np.add.at(memory, self._checked(memory, index, 1, where), value[where])

    def unite(self, memory: np.ndarray, index: np.ndarray, bits: np.ndarray, *, where: Any = ALL) -> None:
        np.bitwise_or.at(memory, self._checked(memory, index, 1, where), bits[where])


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    blocks: int,
    threads: int,
    inputs: Sequence[Any],
    updated: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    shared: Sequence[int] = (),
) -> list[np.ndarray]:
    """:func:`pallas_kernels.lanes.launch` on NumPy arrays; ``name`` is ignored. Unwritten memory holds 0xA5 bytes."""
    del name

    def words(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1).view(np.uint32)

    # Copies: the caller's arrays stay as they were, and JAX arrays become writable ones.
    read = [words(np.array(x)) for x in inputs]
    changed = [np.array(x) for x in updated]
    made = [np.empty(x.shape, x.dtype) for x in outputs]
    for x in made:
        words(x)[:] = 0xA5A5A5A5
    for block in range(blocks):
        scratch = [np.full(size, 0xA5A5A5A5, np.uint32) for size in shared]
        kernel(NumpyLanes(threads, block, blocks), *read, *map(words, [*changed, *made]), *scratch)
    return [*changed, *made]
