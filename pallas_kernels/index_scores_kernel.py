"""Importances from a quantised index as Mosaic GPU kernels of single threads. Contract: `index_scores`.

What bounds it is memory: an entry of 128 numbers in 4 bits, with its scales, is 72 bytes, and a multiprocessor gets
those in about four cycles. So every code is read once, by 16-byte loads straight into the registers that the tensor
cores take it from: nothing passes through shared memory, and a conversion is two or three operations for eight codes.

- The tensor cores multiply bytes (`Lanes.multiply_bytes`), and a step of theirs is 32 numbers of 16 entries: a group
  with a scale of its own. Codes of 4 bits are used in the upper halves of their bytes, where they are 16 times
  themselves with the right sign; the two that share a byte are 16 numbers apart, in the two halves of a step.
- Queries are integers, too: whole numbers of 15 bits, as an upper and a lower byte in two columns side by side, which
  is finer than bfloat16. A step has 8 columns, four queries.
- The sums start at the bits of 1.5 * 2**23, and so end as the bits of that number plus the sum: no conversion.
- A thread holds 8 entries that follow each other, of one query. Their weights relative to the greatest score its warp
  has met so far are what is left behind, or their sums over pages; a second, small kernel scales them when the sum over
  the whole prefix is known. All layers are one launch of each.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import struct
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_plan import PROCESSORS
from pallas_kernels.warps import WARP, merged

__all__ = ["IndexConfig", "importance", "query_words"]

STEP = 32  # numbers of an entry that a step of the tensor cores takes
COLUMNS = 4  # queries of a step
# The codes are read once, and a load has half of a line of the L2: the other half is what the next one wants.
_HINT = ".nc.L1::no_allocate.L2::128B"
_LOG2E = math.log2(math.e)
_MOST = 127 * 128  # of a query's whole numbers


def _float_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


_MAGIC = 1.5 * 2**23
# Where a running maximum starts: finite, so that nothing seen gives exp2(LOWEST - LOWEST), not NaN.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class IndexConfig:
    """How the work is cut.

    Attributes:
        threads: per block of the first kernel.
        unroll: entries per thread and turn, 4 or 8: as many are in flight.
        chunks: blocks per layer, row and head; None is what ends soonest.
    """

    threads: int = 512
    unroll: int = 8
    chunks: int | None = None

    @property
    def tile(self) -> int:
        """Entries of a warp's turn."""
        return 8 * self.unroll

    @property
    def warps(self) -> int:
        return self.threads // WARP


def query_words(q: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Queries `[..., R, D]` as the bytes that a warp's threads hold, and f32[..., R] to multiply the sums with.

    i8[..., tiles, 8 columns, 4 quarters, D / 32 steps, 2, 4]: the thread of a column and quarter holds eight bytes of a
    step. The factors make scores of sums, to base 2.
    """
    *lead, asked, dim = q.shape
    tiles, steps = -(-asked // COLUMNS), dim // STEP
    exact = q.astype(jnp.float32)
    top = jnp.max(jnp.abs(exact), axis=-1)
    unit = jnp.where(top != 0, top, 1) / _MOST  # NaN stays
    whole = jnp.round(exact / unit[..., None]).astype(jnp.int32)
    upper = (whole + 64) >> 7
    both = jnp.stack([upper, whole - (upper << 7)], axis=-2).astype(jnp.int8)
    both = jnp.pad(both, [(0, 0)] * len(lead) + [(0, tiles * COLUMNS - asked), (0, 0), (0, 0)])
    columns = (*lead, tiles, 2 * COLUMNS)
    # Which number is where in a step is free, as long as codes and queries agree. 4 bits: `index_scores.in_bytes`. 8
    # bits: a quarter's 16 bytes of 64 are its part of two steps.
    if bits == 4:
        words = jnp.moveaxis(both.reshape(*columns, steps, 2, 4, 4), -2, -4)
    else:
        words = jnp.moveaxis(both.reshape(*columns, steps // 2, 4, 2, 2, 4), -4, -5)
    factor = unit * (_LOG2E / dim**0.5 / (16 if bits == 4 else 1))
    return words.reshape(*columns, 4, steps, 2, 4), factor


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Shapes and cuts, all static.

    Attributes:
        grain: entries whose weights' sum is kept instead of the weights themselves; 1 for these.
    """

    layers: int
    batch: int
    heads: int
    asked: int
    dim: int
    bits: int
    slots: int
    grain: int
    chunks: int
    reduce: str
    config: IndexConfig

    @property
    def problems(self) -> int:
        return self.layers * self.batch * self.heads

    @property
    def tiles(self) -> int:
        return -(-self.slots // self.config.tile)

    @property
    def parts(self) -> int:
        """Warps that share a layer, row and head."""
        return self.chunks * self.config.warps

    @property
    def kept(self) -> int:
        """Weights or sums per query."""
        return self.tiles * self.config.tile // self.grain

    @property
    def together(self) -> int:
        """Importances of a thread of the second kernel: up to 16 bytes of what is kept, and of one tile."""
        return 8 if self.grain == 1 else min(4, self.config.tile // self.grain)

    @property
    def pieces(self) -> int:
        """Blocks of the second kernel per layer, row and head."""
        return -(-self.found // (_MERGE * self.together))

    @property
    def found(self) -> int:
        """Importances per head."""
        return -(-self.slots // self.grain)


_MERGE = 256  # threads of the second kernel


def importance(
    codes: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    q: jax.Array,
    lengths: jax.Array,
    *,
    reduce: str,
    grain: int = 1,
    config: IndexConfig | None = None,
    launch: Any = None,
) -> list[jax.Array]:
    """`index_scores.importance` on Mosaic GPU, by pages of `grain` entries: 1, or with a mean 8 to 64, a power of two.

    `launch` is `lanes.launch`, or its NumPy twin in tests.
    """
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    layers, batch, heads, asked, dim = q.shape
    slots = codes[0].shape[2]
    bits = 8 if codes[0].shape[3] == dim else 4
    config = config or default_config(bits, asked, grain)
    steps = -(-slots // (config.tile * config.warps))
    chunks = config.chunks or _chunks(steps, layers * batch * heads)
    p = _Plan(layers, batch, heads, asked, dim, bits, slots, grain, chunks, reduce, config)
    words, factors = query_words(q, bits)
    row = (layers, batch, heads, asked)
    parts = launch(
        lambda lanes, *memories: _First(lanes, p, memories).run(),
        name="index_weights",
        blocks=p.problems * chunks,
        threads=config.threads,
        inputs=[*codes, *scales, words, factors, lengths],
        outputs=[
            jax.ShapeDtypeStruct((*row, p.kept), jnp.bfloat16 if grain == 1 else jnp.float32),
            jax.ShapeDtypeStruct((*row, p.tiles), jnp.float32),
            jax.ShapeDtypeStruct((*row, p.parts, 2), jnp.float32),
        ],
    )
    out = jax.ShapeDtypeStruct((batch, heads, p.found), jnp.float32)
    return launch(
        lambda lanes, *memories: _merge(lanes, p, *memories),
        name="index_importance",
        blocks=p.problems * p.pieces,
        threads=_MERGE,
        inputs=[*parts, lengths],
        outputs=[out] * layers,
    )


def default_config(bits: int, asked: int, grain: int) -> IndexConfig:
    """The fastest on an H200: one block per multiprocessor, of as many threads as there are registers for."""
    return IndexConfig(threads=768 if bits == 4 and asked <= COLUMNS and grain > 1 else 512)


def _chunks(steps: int, problems: int) -> int:
    """Blocks per layer, row and head with which the last block ends soonest; starting one costs about two steps."""

    def cost(chunks: int) -> int:
        return -(-chunks * problems // PROCESSORS) * (-(-steps // chunks) + 2)

    return min(range(1, max(1, min(steps, 2 * PROCESSORS)) + 1), key=cost)


class _First:
    """The kernel that reads the index: a block's share of one layer, row and head.

    Leaves, for every query: weights (bf16) or their sums over `grain` entries (f32), relative to `tops`, one per tile
    (to base 2); and per warp the last of its tops, with the sum of all its weights relative to it.
    """

    def __init__(self, lanes: Any, p: _Plan, memories: Sequence[Any]):
        self.lanes, self.p = lanes, p
        codes, scales = memories[: p.layers], memories[p.layers : 2 * p.layers]
        words, factors, lengths, self.kept, self.tops, self.sums = memories[2 * p.layers :]
        self.steps = p.dim // STEP
        self.groups = self.steps if p.bits == 4 else 1
        chunk, self.problem = lanes.block % p.chunks, lanes.block // p.chunks
        layer, place = self.problem // (p.batch * p.heads), self.problem % (p.batch * p.heads)
        (length,) = lanes.load(lengths, place // p.heads)
        self.length = lanes.minimum(length, lanes.constant(p.slots))
        self.codes, self.scales = lanes.choose(layer, codes), lanes.choose(layer, scales)
        self.warp, self.lane = lanes.thread // WARP, lanes.thread % WARP
        # PTX's layout of a step: a thread of a warp has entries' rows g and g + 8, and of each a quarter of its
        # numbers; of the sums columns 2 c and 2 c + 1.
        self.g, self.c = self.lane // 4, self.lane % 4
        self.part = chunk * p.config.warps + self.warp
        seen = (self.length + (p.config.tile - 1)) // p.config.tile
        self.first, self.last = (seen * x // p.chunks for x in (chunk, chunk + 1))
        self.code_words = p.dim * p.bits // 32  # of an entry
        self.code_row = lanes.wide(place) * (p.slots * self.code_words)
        self.scale_row = lanes.wide(place) * (p.slots * self.groups // 2)
        self.queries = []
        for t in range(-(-p.asked // COLUMNS)):
            at = ((self.problem * -(-p.asked // COLUMNS) + t) * WARP + self.lane) * (2 * self.steps)
            mine = [w for i in range(0, 2 * self.steps, 4) for w in lanes.load(words, at + i, 4)]
            number = self.c + t * COLUMNS
            (factor,) = lanes.load(factors, self.problem * p.asked + number, where=number < p.asked)
            self.queries.append((list(zip(mine[::2], mine[1::2], strict=True)), lanes.real(factor), number))

    def run(self) -> None:
        lanes, p = self.lanes, self.p
        start = [lanes.constant(_float_bits(_LOWEST)), lanes.constant(0)] * len(self.queries)
        ends = lanes.loop(self.first, self.last, lanes.constant(p.config.warps), start, self._turn)
        for (_, _, number), top, total in zip(self.queries, ends[::2], ends[1::2], strict=True):
            total = merged(lanes, lanes.real(total), operator.add, (4, 8, 16))
            at = (self.problem * p.asked + number) * p.parts + self.part
            mine = (number < p.asked) & (self.g == 0)
            lanes.store(self.sums, lanes.wide(at) * 2, [top, lanes.bits(total)], where=mine)

    def _turn(self, index: Any, *carry: Any) -> list[Any]:
        lanes, p = self.lanes, self.p
        tile = index + self.warp
        entry = tile * p.config.tile + self.g * p.config.unroll
        # A warp beyond the last tile goes along, and sees nothing.
        limit = lanes.where(tile < self.last, self.length, lanes.constant(0))
        inside = [entry + m < limit for m in range(p.config.unroll)]
        codes = [self._codes(entry + m, where) for m, where in enumerate(inside)]
        totals = self._multiply(codes, self._scales(entry, limit))
        new = []
        for (_, factor, number), total, top, sum_ in zip(self.queries, totals, carry[::2], carry[1::2], strict=True):
            lowest = lanes.constant(_float_bits(_LOWEST))
            scores = [
                lanes.real(lanes.where(where, lanes.bits(x * factor), lowest))
                for x, where in zip(total, inside, strict=True)
            ]
            most = lanes.real(top)
            for x in scores:
                most = lanes.maximum(most, x)
            most = merged(lanes, most, lanes.maximum, (4, 8, 16))
            weights = [lanes.exp2(x - most) for x in scores]
            added = weights[0]
            for x in weights[1:]:
                added = added + x
            self._keep(tile, entry, number, weights, added, most)
            shrunk = lanes.multiply_add(lanes.real(sum_), lanes.exp2(lanes.real(top) - most), added)
            new += [lanes.bits(most), lanes.bits(shrunk)]
        return new

    def _codes(self, entry: Any, where: Any) -> list[tuple[Any, Any]]:
        """This thread's part of an entry: of every step the first and the second half's four codes."""
        lanes = self.lanes
        at = self.code_row + lanes.wide(entry * self.code_words)
        if self.p.bits == 4:
            words = lanes.load(self.codes, at + lanes.wide(self.c * self.steps), self.steps, where=where, hint=_HINT)
            return [((w << 4) & 0xF0F0F0F0, w & 0xF0F0F0F0) for w in words]
        chunks = [
            lanes.load(self.codes, at + lanes.wide(self.c * 4) + 16 * i, 4, where=where, hint=_HINT)
            for i in range(self.steps // 2)
        ]
        return [pair for a, b, c, d in chunks for pair in ((a, b), (c, d))]

    def _scales(self, entry: Any, limit: Any) -> list[Any]:
        """Of this thread's entries, entry by entry, each group's; four threads read the same."""
        lanes, p = self.lanes, self.p
        words = p.config.unroll * self.groups // 2
        together = next(w for w in (4, 2, 1) if words % w == 0 and p.slots * self.groups // 2 % w == 0)
        at = self.scale_row + lanes.wide(entry * self.groups // 2)
        found = []
        for i in range(0, words, together):
            where = entry + 2 * i // self.groups < limit
            found += lanes.load(self.scales, at + i, together, where=where, hint=".nc")
        return [x for word in found for x in lanes.unpack(word, jnp.bfloat16)]

    def _multiply(self, codes: Sequence[Any], scales: Sequence[Any]) -> list[list[Any]]:
        """Of each tile of queries this thread's query with each of its entries, as `query_words` has it."""
        lanes = self.lanes
        magic = (lanes.constant(_float_bits(_MAGIC)),) * 4
        shift = lanes.real(lanes.constant(_float_bits(128.0)))
        totals: list[list[Any]] = [[] for _ in self.queries]
        for pair in range(0, len(codes), 2):
            rows = codes[pair : pair + 2]
            sums = [magic] * len(self.queries)
            for j in range(self.steps):
                both = [rows[i][j][half] for half in range(2) for i in range(2)]
                for t, (words, _, _) in enumerate(self.queries):
                    sums[t] = lanes.multiply_bytes(both, words[j], magic if self.groups > 1 else sums[t])
                    if self.groups == 1 and j < self.steps - 1:
                        continue
                    for i in range(2):
                        upper, lower = (lanes.real(x) - _MAGIC for x in sums[t][2 * i : 2 * i + 2])
                        value = lanes.multiply_add(upper, shift, lower)
                        scale = scales[(pair + i) * self.groups + (j if self.groups > 1 else 0)]
                        if self.groups == 1 or j == 0:
                            totals[t].append(value * scale)
                        else:
                            totals[t][pair + i] = lanes.multiply_add(value, scale, totals[t][pair + i])
        return totals

    def _keep(self, tile: Any, entry: Any, number: Any, weights: Sequence[Any], added: Any, top: Any) -> None:
        lanes, p = self.lanes, self.p
        row = lanes.wide(self.problem * p.asked + number)
        mine = (number < p.asked) & (tile < self.last)
        lanes.store(self.tops, row * p.tiles + lanes.wide(tile), [lanes.bits(top)], where=mine & (self.g == 0))
        if p.grain == 1:
            words = [lanes.pack(a, b, jnp.bfloat16) for a, b in zip(weights[::2], weights[1::2], strict=True)]
            lanes.store(self.kept, row * (p.kept // 2) + lanes.wide(entry // 2), words, where=mine)
            return
        threads = p.grain // p.config.unroll  # that share a sum
        distances = [d for d in (4, 8, 16) if d < 4 * threads]
        added = merged(lanes, added, operator.add, distances)
        mine = mine & (self.g % threads == 0)
        lanes.store(self.kept, row * p.kept + lanes.wide(entry // p.grain), [lanes.bits(added)], where=mine)


def _merge(lanes: Any, p: _Plan, kept: Any, tops: Any, sums: Any, lengths: Any, *outs: Any) -> None:
    """The kernel that scales what the first one left, and merges the queries."""
    piece, problem = lanes.block % p.pieces, lanes.block // p.pieces
    layer, place = problem // (p.batch * p.heads), problem % (p.batch * p.heads)
    (length,) = lanes.load(lengths, place // p.heads)
    length = lanes.minimum(length, lanes.constant(p.slots))
    out = lanes.choose(layer, outs)
    count = p.together
    mine = (piece * lanes.threads + lanes.thread) * count  # the first of this thread's
    entry = mine * p.grain
    some = entry < length

    held = []
    for r in range(p.asked):
        row = lanes.wide(problem * p.asked + r)
        if p.grain == 1:
            words = lanes.load(kept, row * (p.kept // 2) + lanes.wide(mine // 2), 4, where=some)
            weights = [x for word in words for x in lanes.unpack(word, jnp.bfloat16)]
        else:
            weights = [lanes.real(x) for x in lanes.load(kept, row * p.kept + lanes.wide(mine), count, where=some)]
        (top,) = lanes.load(tops, row * p.tiles + lanes.wide(entry // p.config.tile), where=some)
        held.append((weights, lanes.real(lanes.where(some, top, lanes.constant(_float_bits(_LOWEST))))))
    values: list[Any] = []
    for r, (weights, top) in enumerate(held):
        most, total = _whole(lanes, p, sums, problem * p.asked + r)
        if p.reduce == "mean":
            total = total * float(p.asked)
        # A thread without entries goes along: an empty row has no sum.
        total = lanes.real(lanes.where(some, lanes.bits(total), lanes.constant(_float_bits(1.0))))
        scale = lanes.divide(lanes.exp2(top - most), total)
        scaled = [x * scale for x in weights]
        if not values:
            values = scaled
        else:
            values = [a + b if p.reduce == "mean" else lanes.maximum(a, b) for a, b in zip(values, scaled, strict=True)]
    found = [lanes.where(entry + i * p.grain < length, lanes.bits(x), lanes.constant(0)) for i, x in enumerate(values)]
    together = next(w for w in (4, 2, 1) if count % w == 0 and p.found % w == 0)
    for i in range(0, count, together):
        at = lanes.wide(place) * p.found + lanes.wide(mine + i)
        lanes.store(out, at, found[i : i + together], where=mine + i < p.found)


def _whole(lanes: Any, p: _Plan, sums: Any, row: Any) -> tuple[Any, Any]:
    """The greatest score of a query, and the sum of its weights relative to it."""
    held = []
    for i in range(0, p.parts, WARP):
        part = lanes.thread % WARP + i
        where = part < p.parts
        top, total = lanes.load(sums, lanes.wide(row * p.parts + part) * 2, 2, where=where)
        top = lanes.where(where, top, lanes.constant(_float_bits(_LOWEST)))
        held.append((lanes.real(top), lanes.real(total)))
    most = held[0][0]
    for top, _ in held[1:]:
        most = lanes.maximum(most, top)
    most = merged(lanes, most, lanes.maximum, (1, 2, 4, 8, 16))
    whole = held[0][1] * lanes.exp2(held[0][0] - most)
    for top, total in held[1:]:
        whole = lanes.multiply_add(total, lanes.exp2(top - most), whole)
    return most, merged(lanes, whole, operator.add, (1, 2, 4, 8, 16))
