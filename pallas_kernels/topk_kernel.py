"""Top-k selection as a Mosaic GPU kernel: a radix search, then an ordered compaction.

The floats are mapped to unsigned keys of the same order, with 0 for what may not be chosen. Three passes over the row
find the key of the last entry to be taken, 11, 11 and 10 bits at a time: each counts, in shared memory, the entries
that share the bits found so far by their next bits, and picks the digit in which the count from above reaches the
target. A last pass writes the indices of all larger keys, and of as many equal ones as are still wanted, in ascending
order: the position of an entry is the number of larger ones before it plus the number of chosen equals before it.

Many problems: one thread block each does all of this in one launch. Few long problems would leave most multiprocessors
idle, so there several blocks share a problem, each a part of its eligible entries, and every pass is a launch of its
own: the blocks leave their counts in global memory, and each block of the next launch adds up those of its problem. Of
the parts before its own it keeps how many entries they will write; that is where its own list begins.

Everything is a sum of integers, so the result is the same on every run. Three or four reads of the row (the first from
HBM, the rest mostly from L2) and one write of the list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["TopkConfig", "select_topk"]

_DIGITS = (11, 11, 10)  # bits found per pass, from the top
_BINS = 1 << max(_DIGITS)
_NO_BIN, _PART_OF_BIN, _WHOLE_BIN = 0, 1, 2
_STATE = 8  # words that a block leaves for its successor in the next launch
_PROCESSORS = 132
# Below this a part's passes take no longer than the three launches that they cost.
_PART = 8192


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """How the work is cut.

    Attributes:
        threads: per block, a power of two from 128 to 1024.
        unroll: 16-byte loads in flight per thread in the counting passes.
        parts: blocks per problem; with more than one there are four launches instead of one.
    """

    threads: int
    unroll: int = 4
    parts: int = 1


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
    problems = math.prod(leading)
    out = jax.ShapeDtypeStruct((*leading, capacity), jnp.int32)
    if n == 0 or problems == 0 or capacity == 0:
        return jnp.full(out.shape, -1, jnp.int32)
    config = config or _config(problems, n)
    blocks = problems * config.parts

    def run(name: str, method: Any, inputs: list[jax.Array], outputs: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        def kernel(lanes: Any, importance: Any, counts: Any, lengths: Any, *memories: Any) -> None:
            *between, histogram, totals, found = memories
            search = _Search(lanes, importance, counts, lengths, histogram, totals, found, n, capacity, config)
            method(search, *between)

        return launch(
            kernel,
            name=name,
            blocks=blocks,
            threads=config.threads,
            inputs=[importance, counts, lengths, *inputs],
            outputs=outputs,
            shared=[_BINS + 1, 32, 3],
        )

    if config.parts == 1:
        return run("select_topk", _Search.run, [], [out])[0]
    left: list[jax.Array] = []
    state = jax.ShapeDtypeStruct((blocks, _STATE), jnp.int32)
    for level, bits in enumerate(_DIGITS):
        made = [jax.ShapeDtypeStruct((blocks, 1 << bits), jnp.int32), state]
        left = run(f"select_topk_{level}", functools.partial(_Search.run_pass, level=level), left, made)
    return run("select_topk_write", _Search.run_write, left, [out])[0]


def _config(problems: int, n: int) -> TopkConfig:
    parts = max(1, min(_PROCESSORS // problems, n // _PART))
    # Measured on an H200: a block of 1024 is faster on a long row by a third, a smaller one on a short row by a fifth.
    return TopkConfig(threads=1024 if n > 16384 else 512, parts=parts if n > 4 * _PART else 1)


class _Progress(NamedTuple):
    """What the passes have found so far.

    prefix: the bits of the last entry to be taken. above: entries whose bits are higher. few, whole: predicates; the
    search is over, for there are fewer eligible entries than wanted, or all with these bits are wanted. larger: entries
    that the parts before this one will write, as far as they are known to be wanted.
    """

    prefix: Any
    above: Any
    few: Any
    whole: Any
    larger: Any


class _Search:
    """One part of one problem, seen by one thread."""

    def __init__(
        self,
        lanes: Any,
        importance: Any,
        counts: Any,
        lengths: Any,
        histogram: Any,
        totals: Any,
        found: Any,
        n: int,
        capacity: int,
        config: TopkConfig,
    ):
        self.lanes = lanes
        self.histogram, self.totals, self.found = histogram, totals, found
        self.n, self.capacity, self.unroll, self.parts = n, capacity, config.unroll, config.parts
        self.warps = lanes.threads // 32
        self.lane, self.warp = lanes.thread & 31, lanes.thread >> 5
        self.zero, self.one = lanes.constant(0), lanes.constant(1)
        problem, self.part = lanes.block // self.parts, lanes.block % self.parts
        self.first_block = problem * self.parts
        self.problem = lanes.wide(problem)
        self.importance = lanes.at(importance, self.problem * n)
        (count,) = lanes.load(counts, self.problem)
        (length,) = lanes.load(lengths, self.problem)
        # Both are signed numbers in unsigned words: a negative one means 0.
        length = lanes.minimum(length & ~lanes.sign(length), lanes.constant(n))
        self.target = lanes.minimum(count & ~lanes.sign(count), lanes.constant(capacity))
        # Entries [start, stop), start a multiple of 8: 16-byte loads, and 8 entries per thread when writing.
        size = ((length + (8 * self.parts - 1)) // (8 * self.parts)) * 8
        self.start = lanes.minimum(self.part * size, length)
        self.stop = lanes.minimum(self.start + size, length)

    def run(self, out: Any) -> None:
        """All of it: the only block of its problem."""
        progress = self._begin()
        for level in range(len(_DIGITS)):
            self._count(progress, level)
            progress, _ = self._advance(progress, level, self.histogram)
        self._write(progress, self.zero, out)

    def run_pass(self, *memories: Any, level: int) -> None:
        """One counting pass. memories: the counts and the state of the pass before, if any, then those of this one."""
        *before, counts, state = memories
        progress = self._begin()
        if before:
            progress, _ = self._advance(self._load(before[1]), level - 1, before[0])
        self._count(progress, level)
        lanes, bins = self.lanes, 1 << _DIGITS[level]
        mine = lanes.at(counts, lanes.wide(lanes.block) * bins)

        def copy(i: Any) -> tuple[()]:
            index = i + lanes.thread
            (value,) = lanes.load(self.histogram, index, where=index < bins)
            lanes.store(mine, index, [value], where=index < bins)
            return ()

        lanes.loop(self.zero, lanes.constant(bins), lanes.constant(lanes.threads), (), copy)
        self._save(state, progress)

    def run_write(self, counts: Any, state: Any, out: Any) -> None:
        """The last launch: writes this part's share of the list."""
        progress, equal = self._advance(self._load(state), len(_DIGITS) - 1, counts)
        self._write(progress, equal, out)

    def _begin(self) -> _Progress:
        no = self.target != self.target
        return _Progress(self.zero, self.zero, no, no, self.zero)

    def _save(self, state: Any, progress: _Progress) -> None:
        lanes = self.lanes
        few, whole = lanes.word(progress.few), lanes.word(progress.whole)
        for i, word in enumerate((progress.prefix, progress.above, few, whole, progress.larger)):
            index = lanes.block * _STATE + i
            lanes.store(state, index, [word], where=lanes.thread == 0)
        for i in range(5, _STATE):
            lanes.store(state, lanes.block * _STATE + i, [self.zero], where=lanes.thread == 0)

    def _load(self, state: Any) -> _Progress:
        words = [self.lanes.load(state, self.lanes.block * _STATE + i)[0] for i in range(5)]
        prefix, above, few, whole, larger = words
        return _Progress(prefix, above, few != 0, whole != 0, larger)

    def _keys(self, first: Any) -> list[Any]:
        """Keys of entries ``first .. first + 3``: words of the floats' order, 0 for what may not be chosen.

        Refused are NaN, -inf and entries beyond the length; both zeros and all subnormals have one key.
        """
        lanes, zero = self.lanes, self.zero
        left = lanes.where(first < self.stop, self.stop - first, zero)
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

    def _advance(self, progress: _Progress, level: int, counts: Any) -> tuple[_Progress, Any]:
        """After a pass: one digit more. Also how many entries with the bits found the parts before this one have."""
        lanes, zero, bits = self.lanes, self.zero, _DIGITS[level]
        prefix, above, few, whole, larger = progress
        # The search ends early where a bin is wanted whole: then its lower end is all there is to know. That is the
        # usual case before the last pass, whose bins are finer than the floats are close.
        done = (self.target == 0) | few | whole
        digit, over, state, before = self._digit(self.target - above, bits, counts)
        few = few | (~done & (state == _NO_BIN))
        whole = whole | (~done & (state == _WHOLE_BIN))
        equal = zero
        if self.parts > 1:
            highest, own = before
            # Where the search is over already, the counts are all 0.
            taken = equals = zero
            for i, value in enumerate(own):
                here = highest - i == digit
                taken = taken + lanes.where((highest - i > digit) | (here & (state != _PART_OF_BIN)), value, zero)
                equals = equals + lanes.where(here, value, zero)
            # Each sum fits a word; so does the block's. The block has met since the last scan (in `_digit`).
            _, taken = self._scan(taken)
            lanes.barrier()
            _, equal = self._scan(equals)
            lanes.barrier()
            larger = larger + taken
        return _Progress((prefix << bits) | digit, above + over, few, whole, larger), equal

    def _count(self, progress: _Progress, level: int) -> None:
        """Histogram of a pass's bits of this part's entries whose higher bits are those found; all 0 if it is over."""
        lanes, zero = self.lanes, self.zero
        prefix, bits, shift = progress.prefix, _DIGITS[level], 32 - sum(_DIGITS[: level + 1])
        over = (self.target == 0) | progress.few | progress.whole
        stop = lanes.where(over, zero, self.stop)

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

        lanes.loop(lanes.minimum(self.start, stop), stop, lanes.constant(stride * self.unroll), (), count)
        lanes.barrier()

    def _digit(self, target: Any, bits: int, counts: Any) -> tuple[Any, Any, Any, tuple[Any, list[Any]]]:
        """The bin in which the count from the highest bin down reaches ``target``, the count above it, and the state.

        The state says whether there is no such bin, and whether the target takes all of it. Last, this thread's highest
        bin and, from there down, the counts of the parts before this one. ``counts``: the block's histogram, or those
        of all parts, in global memory.
        """
        lanes = self.lanes
        bins = 1 << bits
        per_thread = max(1, bins // lanes.threads)
        active = lanes.thread < bins // per_thread
        highest = lanes.constant(bins - 1) - lanes.thread * per_thread
        own, earlier = [], []
        for i in range(per_thread):
            if self.parts == 1:
                own.append(lanes.load(counts, highest - i, where=active)[0])
                continue
            all_parts = [
                lanes.load(counts, (self.first_block + part) * bins + (highest - i), where=active)[0]
                for part in range(self.parts)
            ]
            own.append(functools.reduce(lambda a, b: a + b, all_parts))
            mine = [lanes.where(self.part > part, value, self.zero) for part, value in enumerate(all_parts)]
            earlier.append(functools.reduce(lambda a, b: a + b, mine))
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
        return digit, above, state, (highest, earlier)

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

    def _write(self, progress: _Progress, equal: Any, out: Any) -> None:
        """Writes this part's chosen indices in ascending order, and behind the last part's -1.

        Chosen is every key above a threshold, and the first ``wanted`` equal to it, of which the parts before this one
        have ``equal``.
        """
        lanes, zero = self.lanes, self.zero
        prefix, above, few, whole, larger = progress
        nothing = self.target == 0
        lowest = lanes.where(prefix == 0, zero, prefix - 1)
        threshold = lanes.where(whole, lowest, lanes.where(few, zero, prefix))
        threshold = lanes.where(nothing, lanes.constant(0xFFFFFFFF), threshold)
        wanted = lanes.where(nothing | few | whole, zero, self.target - above)
        out = lanes.at(out, self.problem * self.capacity)
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
        carry = (larger, equal)
        for ties in (False, True):
            stop = lanes.where((wanted == 0) ^ ties, self.stop, zero)
            first = lanes.minimum(self.start, stop)
            carry = lanes.loop(first, stop, lanes.constant(stride), carry, functools.partial(tile, ties=ties))
        larger, equal = carry
        chosen = larger + lanes.minimum(equal, wanted)

        def pad(start: Any) -> tuple[()]:
            slot = start + lanes.thread
            beyond = (slot >= chosen) & (slot < self.capacity)
            lanes.store(out, slot, [lanes.constant(0xFFFFFFFF)], where=beyond)
            return ()

        stop = lanes.where(self.part == self.parts - 1, lanes.constant(self.capacity), zero)
        lanes.loop(zero, stop, lanes.constant(lanes.threads), (), pad)
