"""Top-k selection as a Mosaic GPU kernel: one thread block per problem, a radix search, then an ordered compaction.

The floats are mapped to unsigned keys of the same order, with 0 for what may not be chosen. Three passes over the row
find the key of the last entry to be taken, 11, 11 and 10 bits at a time: each counts, in shared memory, the entries
that share the bits found so far by their next bits, and picks the digit in which the count from above reaches the
target. A last pass writes the indices of all larger keys, and of as many equal ones as are still wanted, in ascending
order: the position of an entry is the number of larger ones before it plus the number of chosen equals before it.

Everything is a sum of integers, so the result is the same on every run. Three or four reads of the row (the first from
HBM, the rest mostly from L2) and one write of the list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["TopkConfig", "select_topk"]

_DIGITS = (11, 11, 10)  # bits found per pass, from the top
_BINS = 1 << max(_DIGITS)
_NO_BIN, _PART_OF_BIN, _WHOLE_BIN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """How the work is cut.

    Attributes:
        threads: per block, a power of two from 128 to 1024; one block per problem.
        unroll: 16-byte loads in flight per thread in the counting passes.
    """

    threads: int
    unroll: int = 4


def select_topk(
    importance: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    capacity: int,
    *,
    config: TopkConfig | None = None,
    launch: Any = None,
) -> jax.Array:
    """:func:`pallas_kernels.topk.select_topk` on Mosaic GPU; arguments are checked there.

    ``launch`` is :func:`pallas_kernels.lanes.launch`, or its NumPy twin in tests.
    """
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    *leading, n = importance.shape
    # Measured on an H200: a block of 1024 is faster on a long row by a third, a smaller one on a short row by a fifth.
    config = config or TopkConfig(threads=1024 if n > 16384 else 512)
    problems = math.prod(leading)
    out = jax.ShapeDtypeStruct((*leading, capacity), jnp.int32)
    if n == 0 or problems == 0 or capacity == 0:
        return jnp.full(out.shape, -1, jnp.int32)

    def kernel(lanes: Any, *memories: Any) -> None:
        _Search(lanes, *memories, n=n, capacity=capacity, unroll=config.unroll).run()

    (chosen,) = launch(
        kernel,
        name="select_topk",
        blocks=problems,
        threads=config.threads,
        inputs=[importance, counts, lengths],
        outputs=[out],
        shared=[_BINS + 1, 32, 3],
    )
    return chosen


class _Search:
    """One problem, seen by one thread."""

    def __init__(
        self,
        lanes: Any,
        importance: Any,
        counts: Any,
        lengths: Any,
        out: Any,
        histogram: Any,
        totals: Any,
        found: Any,
        *,
        n: int,
        capacity: int,
        unroll: int,
    ):
        self.lanes, self.out = lanes, out
        self.histogram, self.totals, self.found = histogram, totals, found
        self.n, self.capacity, self.unroll = n, capacity, unroll
        self.warps = lanes.threads // 32
        self.lane, self.warp = lanes.thread & 31, lanes.thread >> 5
        self.problem = lanes.wide(lanes.block)
        self.importance = lanes.at(importance, self.problem * n)
        self.zero, self.one = lanes.constant(0), lanes.constant(1)
        (count,) = lanes.load(counts, self.problem)
        (length,) = lanes.load(lengths, self.problem)
        # Both are signed numbers in unsigned words: a negative one means 0.
        self.length = lanes.minimum(length & ~lanes.sign(length), lanes.constant(n))
        self.target = lanes.minimum(count & ~lanes.sign(count), lanes.constant(capacity))

    def run(self) -> None:
        threshold, wanted = self._threshold()
        self._compact(threshold, wanted)

    def _keys(self, first: Any) -> list[Any]:
        """Keys of entries ``first .. first + 3``: words of the floats' order, 0 for what may not be chosen.

        Refused are NaN, -inf and entries beyond the length; both zeros and all subnormals have one key.
        """
        lanes, zero = self.lanes, self.zero
        left = lanes.where(first < self.length, self.length - first, zero)
        if self.n % 4 == 0:
            words = lanes.load(self.importance, first, 4, where=left > 0)
        else:
            words = [lanes.load(self.importance, first + i, where=left > i)[0] for i in range(4)]
        keys = []
        for i, word in enumerate(words):
            bits = lanes.where(word & 0x7F800000 == 0, zero, word)
            # Negative floats are flipped and positive ones moved above them: -inf becomes 0x007FFFFF, +inf 0xFF800000,
            # and NaN lie outside. Moved down until -inf is 0, all NaN are at the top of the range.
            key = (bits ^ (lanes.sign(bits) | 0x80000000)) - 0x007FFFFF
            keys.append(lanes.where((key > 0xFF800000 - 0x007FFFFF) | (left <= i), zero, key))
        return keys

    def _threshold(self) -> tuple[Any, Any]:
        """``(threshold, wanted)``: take every key above the threshold, and the first ``wanted`` equal to it."""
        lanes, zero = self.lanes, self.zero
        prefix, above, shift = zero, zero, 32
        # The search ends early where a bin is wanted whole: then its lower end is all there is to know. That is the
        # usual case before the last pass, whose bins are finer than the floats are close.
        nothing = self.target == 0
        few = whole = self.target != self.target
        for bits in _DIGITS:
            shift -= bits
            done = nothing | few | whole
            self._count(prefix, shift, bits, lanes.where(done, zero, self.length))
            digit, over, state = self._digit(self.target - above, bits)
            few = few | (~done & (state == _NO_BIN))
            whole = whole | (~done & (state == _WHOLE_BIN))
            prefix = (prefix << bits) | digit
            above = above + over
        lowest = lanes.where(prefix == 0, zero, prefix - 1)
        threshold = lanes.where(whole, lowest, lanes.where(few, zero, prefix))
        threshold = lanes.where(nothing, lanes.constant(0xFFFFFFFF), threshold)
        return threshold, lanes.where(nothing | few | whole, zero, self.target - above)

    def _count(self, prefix: Any, shift: int, bits: int, stop: Any) -> None:
        """Histogram of the ``bits`` bits from ``shift`` up, of the entries whose higher bits equal ``prefix``."""
        lanes, zero = self.lanes, self.zero

        def clear(i: Any) -> tuple[()]:
            lanes.store(self.histogram, i + lanes.thread, [zero], where=i + lanes.thread < 1 << bits)
            return ()

        lanes.loop(zero, lanes.constant(1 << bits), lanes.constant(lanes.threads), (), clear)
        lanes.barrier()
        stride = lanes.threads * 4

        def count(start: Any) -> tuple[()]:
            batches = [self._keys(start + lanes.thread * 4 + i * stride) for i in range(self.unroll)]
            for key in (key for batch in batches for key in batch):
                if shift + bits == 32:
                    # Nearly all entries count: the others do too, in a bin nobody reads, and no warp branches.
                    lanes.add(self.histogram, lanes.where(key == 0, lanes.constant(_BINS), key >> shift), self.one)
                else:
                    mine = (key >> (shift + bits) == prefix) & (key != 0)
                    lanes.add(self.histogram, (key >> shift) & ((1 << bits) - 1), self.one, where=mine)
            return ()

        lanes.loop(zero, stop, lanes.constant(stride * self.unroll), (), count)
        lanes.barrier()

    def _digit(self, target: Any, bits: int) -> tuple[Any, Any, Any]:
        """The bin in which the count from the highest bin down reaches ``target``, the count above it, and the state.

        The state says whether there is no such bin, and whether the target takes all of it.
        """
        lanes = self.lanes
        bins = 1 << bits
        per_thread = max(1, bins // lanes.threads)
        active = lanes.thread < bins // per_thread
        highest = lanes.constant(bins - 1) - lanes.thread * per_thread
        own = [lanes.load(self.histogram, highest - i, where=active)[0] for i in range(per_thread)]
        mine = functools.reduce(lambda a, b: a + b, own)
        for slot, value in enumerate((0, 0, _NO_BIN)):
            lanes.store(self.found, lanes.constant(slot), [lanes.constant(value)], where=lanes.thread == 0)
        before, _ = self._scan(mine)
        for i, total in enumerate(own):
            here = active & (before < target) & (before + total >= target)
            state = lanes.where(before + total == target, lanes.constant(_WHOLE_BIN), lanes.constant(_PART_OF_BIN))
            for slot, value in enumerate((highest - i, before, state)):
                lanes.store(self.found, lanes.constant(slot), [value], where=here)
            before = before + total
        lanes.barrier()
        digit, above, state = (lanes.load(self.found, lanes.constant(slot))[0] for slot in range(3))
        # No thread may start on the next histogram, or on `found`, while another still reads this one.
        lanes.barrier()
        return digit, above, state

    def _scan(self, value: Any) -> tuple[Any, Any]:
        """Sum of ``value`` over the threads below, and over the block. The block must meet before the next call."""
        lanes = self.lanes
        inclusive = self._warp_scan(value)
        lanes.store(self.totals, self.warp, [inclusive], where=self.lane == 31)
        lanes.barrier()
        (total,) = lanes.load(self.totals, self.lane, where=self.lane < self.warps)
        totals = self._warp_scan(total)
        everything = lanes.shuffle(totals, lanes.constant(31))
        below = lanes.shuffle(totals, (self.warp - 1) & 31)
        return lanes.where(self.warp == 0, self.zero, below) + inclusive - value, everything

    def _warp_scan(self, value: Any) -> Any:
        lanes = self.lanes
        for distance in (1, 2, 4, 8, 16):
            below = lanes.shuffle_up(value, distance)
            value = value + lanes.where(self.lane >= distance, below, self.zero)
        return value

    def _compact(self, threshold: Any, wanted: Any) -> None:
        """Writes the chosen indices in ascending order, then -1."""
        lanes, zero = self.lanes, self.zero
        out = lanes.at(self.out, self.problem * self.capacity)
        per_thread = 8  # consecutive entries, so that one scan serves them all
        stride = lanes.threads * per_thread

        def tile(start: Any, larger_before: Any, equal_before: Any, *, ties: bool) -> tuple[Any, Any]:
            first = start + lanes.thread * per_thread
            keys = [key for i in range(0, per_thread, 4) for key in self._keys(first + i)]
            larger = [key > threshold for key in keys]
            equal = [key == threshold for key in keys]
            # A tile has at most 8192 entries: both counts fit one word, and one scan.
            packed = zero
            for a, b in zip(larger, equal, strict=True):
                packed = packed + lanes.word(a)
                if ties:
                    packed = packed + (lanes.word(b) << 16)
            below, everything = self._scan(packed)
            position = larger_before + (below & 0xFFFF)
            equals = equal_before + (below >> 16)
            for i, (a, b) in enumerate(zip(larger, equal, strict=True)):
                chosen = (a | (b & (equals < wanted))) if ties else a
                slot = position + lanes.minimum(equals, wanted) if ties else position
                lanes.store(out, slot, [first + i], where=chosen)
                position = position + lanes.word(a)
                if ties:
                    equals = equals + lanes.word(b)
            # No thread may write its part of the next scan while another still reads this one's.
            lanes.barrier()
            return larger_before + (everything & 0xFFFF), equal_before + (everything >> 16)

        # Seldom is only a part of the equals wanted. Of the two loops one has nothing to do.
        carry = (zero, zero)
        for ties in (False, True):
            stop = lanes.where((wanted == 0) ^ ties, self.length, zero)
            carry = lanes.loop(zero, stop, lanes.constant(stride), carry, functools.partial(tile, ties=ties))
        larger, equal = carry
        chosen = larger + lanes.minimum(equal, wanted)

        def pad(start: Any) -> tuple[()]:
            slot = start + lanes.thread
            beyond = (slot >= chosen) & (slot < self.capacity)
            lanes.store(out, slot, [lanes.constant(0xFFFFFFFF)], where=beyond)
            return ()

        lanes.loop(zero, lanes.constant(self.capacity), lanes.constant(lanes.threads), (), pad)
