"""Top-k selection as a Mosaic GPU kernel: one thread block per problem, a radix search, then an ordered compaction.

The floats are mapped to unsigned keys of the same order, with 0 for what may not be chosen. Three passes over the row
find the key of the last entry to be taken, 11, 11 and 10 bits at a time: each counts, in shared memory, the entries
that share the bits found so far by their next bits, and picks the digit in which the count from above reaches the
target. A last pass writes the indices of all larger keys, and of as many equal ones as are still wanted, in ascending
order: the position of an entry is the number of larger ones before it plus the number of chosen equals before it.

Everything is a sum of integers, so the result is the same on every run. Four reads of the row (the first from HBM, the
rest mostly from L2) and one write of the list.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["TopkConfig", "select_topk"]

_DIGITS = (11, 11, 10)  # bits found per pass, from the top
_BINS = 1 << max(_DIGITS)


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """How the work is cut.

    Attributes:
        threads: per block, a power of two from 128 to 1024; one block per problem.
        unroll: 16-byte loads in flight per thread in the counting passes.
        copies: histograms kept side by side, by lane, against lanes that count into one bin at once; a power of two.
    """

    threads: int = 512
    unroll: int = 4
    copies: int = 4


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
    config = config or TopkConfig()
    *leading, n = importance.shape
    problems = math.prod(leading)
    out = jax.ShapeDtypeStruct((*leading, capacity), jnp.int32)
    if n == 0 or problems == 0 or capacity == 0:
        return jnp.full(out.shape, -1, jnp.int32)

    def kernel(lanes: Any, *memories: Any) -> None:
        _Search(lanes, *memories, n=n, capacity=capacity, unroll=config.unroll, copies=config.copies).run()

    (chosen,) = launch(
        kernel,
        name="select_topk",
        blocks=problems,
        threads=config.threads,
        inputs=[importance, counts, lengths],
        outputs=[out],
        shared=[_BINS * config.copies, 2 * 32, 2],
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
        copies: int,
    ):
        self.lanes, self.importance, self.out = lanes, importance, out
        self.histogram, self.totals, self.found = histogram, totals, found
        self.n, self.capacity, self.unroll, self.copies = n, capacity, unroll, copies
        self.warps = lanes.threads // 32
        self.lane, self.warp = lanes.thread & 31, lanes.thread >> 5
        self.always = lanes.thread < lanes.threads
        self.problem = lanes.wide(lanes.block)
        (count,) = lanes.load(counts, self.problem, where=self.always)
        (length,) = lanes.load(lengths, self.problem, where=self.always)
        # Both are signed numbers in unsigned words: a negative one means 0.
        zero = lanes.constant(0)
        self.length = lanes.minimum(lanes.where(length >> 31 == 1, zero, length), lanes.constant(n))
        self.target = lanes.minimum(lanes.where(count >> 31 == 1, zero, count), lanes.constant(capacity))

    def run(self) -> None:
        threshold, wanted = self._threshold()
        self._compact(threshold, wanted)

    def _key(self, bits: Any) -> Any:
        """Float bits to a word of the same order; 0 for NaN and -inf, one value for both zeros and all subnormals."""
        lanes = self.lanes
        zero = lanes.constant(0)
        bits = lanes.where(bits & 0x7F800000 == 0, zero, bits)
        flip = lanes.where(bits >> 31 == 1, lanes.constant(0xFFFFFFFF), lanes.constant(0x80000000))
        refused = ((bits & 0x7FFFFFFF) > 0x7F800000) | (bits == 0xFF800000)
        return lanes.where(refused, zero, bits ^ flip)

    def _keys(self, first: Any) -> list[Any]:
        """The keys of entries ``first .. first + 3``; 0 beyond the length."""
        lanes = self.lanes
        start = self.problem * self.n + lanes.wide(first)
        if self.n % 4 == 0:
            words = lanes.load(self.importance, start, 4, where=first < self.length)
        else:
            words = [lanes.load(self.importance, start + i, where=first + i < self.length)[0] for i in range(4)]
        zero = lanes.constant(0)
        return [lanes.where(first + i < self.length, self._key(word), zero) for i, word in enumerate(words)]

    def _threshold(self) -> tuple[Any, Any]:
        """The key of the last entry to take, and how many entries of exactly that key to take.

        Where fewer entries are eligible than wanted, the threshold is 0 and every eligible entry is above it.
        """
        lanes = self.lanes
        prefix, above, shift = lanes.constant(0), lanes.constant(0), 32
        # The search is on while the count from above still reaches the target somewhere.
        on = self.target > 0
        for bits in _DIGITS:
            shift -= bits
            self._count(prefix, shift, bits)
            digit, over, hit = self._digit(self.target - above, bits)
            on = on & hit
            prefix = (prefix << bits) | digit
            above = above + over
        nothing = self.target == 0
        zero = lanes.constant(0)
        threshold = lanes.where(on, prefix, lanes.where(nothing, lanes.constant(0xFFFFFFFF), zero))
        return threshold, lanes.where(on, self.target - above, zero)

    def _count(self, prefix: Any, shift: int, bits: int) -> None:
        """Histogram of the ``bits`` bits from ``shift`` up, of the entries whose higher bits equal ``prefix``."""
        lanes = self.lanes
        zero = lanes.constant(0)
        step = lanes.constant(lanes.threads)

        def clear(i: Any) -> tuple[()]:
            lanes.store(self.histogram, i + lanes.thread, [zero], where=self.always)
            return ()

        lanes.loop(zero, lanes.constant((1 << bits) * self.copies), step, (), clear)
        lanes.barrier()
        stride = lanes.threads * 4
        copy = self.lane & (self.copies - 1)

        def count(start: Any) -> tuple[()]:
            batches = [self._keys(start + lanes.thread * 4 + i * stride) for i in range(self.unroll)]
            for key in (key for batch in batches for key in batch):
                mine = key != 0
                if shift + bits < 32:
                    mine = mine & (key >> (shift + bits) == prefix)
                digit = (key >> shift) & ((1 << bits) - 1)
                lanes.add(self.histogram, digit * self.copies + copy, lanes.constant(1), where=mine)
            return ()

        lanes.loop(zero, self.length, lanes.constant(stride * self.unroll), (), count)
        lanes.barrier()

    def _digit(self, target: Any, bits: int) -> tuple[Any, Any, Any]:
        """The bin in which the count from the highest bin down reaches ``target``, the count above it, whether any."""
        lanes = self.lanes
        bins = 1 << bits
        per_thread = max(1, bins // lanes.threads)
        active = lanes.thread < bins // per_thread
        first = lanes.thread * per_thread  # counted from the highest bin down
        own = []
        for i in range(per_thread):
            base = (lanes.constant(bins - 1) - first - i) * self.copies
            total = lanes.constant(0)
            for copy in range(self.copies):
                total = total + lanes.load(self.histogram, base + copy, where=active)[0]
            own.append(total)
        mine = own[0]
        for total in own[1:]:
            mine = mine + total
        before, _ = self._scan(mine, 0)
        lanes.store(self.found, lanes.constant(0), [lanes.constant(0xFFFFFFFF)], where=lanes.thread == 0)
        lanes.barrier()
        for i, total in enumerate(own):
            here = active & (before < target) & (before + total >= target)
            lanes.store(self.found, lanes.constant(0), [lanes.constant(bins - 1) - first - i], where=here)
            lanes.store(self.found, lanes.constant(1), [before], where=here)
            before = before + total
        lanes.barrier()
        (digit,) = lanes.load(self.found, lanes.constant(0), where=self.always)
        (above,) = lanes.load(self.found, lanes.constant(1), where=self.always)
        hit = digit != 0xFFFFFFFF
        zero = lanes.constant(0)
        # No thread may start the next histogram, or the next use of `found`, while another still reads this one.
        lanes.barrier()
        return lanes.where(hit, digit, zero), lanes.where(hit, above, zero), hit

    def _scan(self, value: Any, buffer: int) -> tuple[Any, Any]:
        """Sum of ``value`` over the threads below, and over the block. One barrier; two buffers let calls alternate."""
        lanes = self.lanes
        inclusive = self._warp_scan(value)
        slot = lanes.constant(buffer * 32)
        lanes.store(self.totals, slot + self.warp, [inclusive], where=self.lane == 31)
        lanes.barrier()
        (total,) = lanes.load(self.totals, slot + self.lane, where=self.lane < self.warps)
        totals = self._warp_scan(total)
        everything = lanes.shuffle(totals, lanes.constant(31))
        below = lanes.shuffle(totals, (self.warp - 1) & 31)
        zero = lanes.constant(0)
        return lanes.where(self.warp == 0, zero, below) + inclusive - value, everything

    def _warp_scan(self, value: Any) -> Any:
        lanes = self.lanes
        zero = lanes.constant(0)
        for distance in (1, 2, 4, 8, 16):
            below = lanes.shuffle_up(value, distance)
            value = value + lanes.where(self.lane >= distance, below, zero)
        return value

    def _compact(self, threshold: Any, wanted: Any) -> None:
        lanes = self.lanes
        zero = lanes.constant(0)
        stride = lanes.threads * 4
        row = self.problem * self.capacity

        def tile(start: Any, larger_before: Any, equal_before: Any, buffer: int) -> tuple[Any, Any]:
            first = start + lanes.thread * 4
            keys = self._keys(first)
            larger = [key > threshold for key in keys]
            equal = [(key == threshold) & (key != 0) for key in keys]
            # A tile has at most 4096 entries: both counts fit one word, and one scan.
            packed = zero
            for a, b in zip(larger, equal, strict=True):
                packed = packed + lanes.word(a) + (lanes.word(b) << 16)
            below, everything = self._scan(packed, buffer)
            a_before = larger_before + (below & 0xFFFF)
            b_before = equal_before + (below >> 16)
            for i, (a, b) in enumerate(zip(larger, equal, strict=True)):
                position = a_before + lanes.minimum(b_before, wanted)
                chosen = a | (b & (b_before < wanted))
                lanes.store(self.out, row + lanes.wide(position), [first + i], where=chosen)
                a_before = a_before + lanes.word(a)
                b_before = b_before + lanes.word(b)
            return larger_before + (everything & 0xFFFF), equal_before + (everything >> 16)

        def two_tiles(start: Any, larger: Any, equal: Any) -> tuple[Any, Any]:
            larger, equal = tile(start, larger, equal, 0)
            return tile(start + stride, larger, equal, 1)

        larger, equal = lanes.loop(zero, self.length, lanes.constant(2 * stride), (zero, zero), two_tiles)
        chosen = larger + lanes.minimum(equal, wanted)

        def pad(start: Any) -> tuple[()]:
            slot = start + lanes.thread
            beyond = (slot >= chosen) & (slot < self.capacity)
            lanes.store(self.out, row + lanes.wide(slot), [lanes.constant(0xFFFFFFFF)], where=beyond)
            return ()

        lanes.loop(zero, lanes.constant(self.capacity), lanes.constant(lanes.threads), (), pad)
