"""What `head_statistics` computes, as a Mosaic GPU kernel for Hopper. Design and figures: docs/kernels-matmul.md.

One program per multiprocessor goes through its share of the vocabulary, 128 words at a time: a warpgroup that only
issues TMA copies feeds a ring of weight and token tiles in shared memory, and does not stop between words; a compute
warpgroup multiplies its tokens with 128 words and keeps of the logits, in registers, no more than their maximum, its
word, and two sums. Logits are never written anywhere.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import PROCESSORS, SMEM_LIMIT, SMEM_RESERVED

KERNEL_NAME = "head_statistics"
DEPTH = 64  # entries of the contracted axis per tile: one swizzled row of 16-bit numbers
WORDS = 128  # per compute warpgroup at a time
LOWEST = -1e30  # below every logit; finite, so that differences are numbers


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """How the work is cut.

    Attributes:
        programs: that share the vocabulary.
        groups: of 128 words that a program has at a time; each has a warpgroup for every tile of tokens.
        pieces: tiles of 64 entries of the contracted axis per step.
        stages: steps in flight per program.
    """

    programs: int
    groups: int
    pieces: int
    stages: int


def tile_rows(tokens: int) -> int:
    """Tokens per compute warpgroup."""
    return 64 if tokens <= 64 else 128


def smem_bytes(tokens: int, config: HeadConfig) -> int:
    """Shared memory of a program."""
    rows = tile_rows(tokens)
    tiles = -(-tokens // rows)
    return config.stages * config.pieces * DEPTH * 2 * (WORDS * config.groups + rows * tiles) + SMEM_RESERVED


def make_config(tokens: int, spared: int = 0) -> HeadConfig:
    """What was fastest on an H200, see docs/kernels-matmul.md, on all multiprocessors but `spared` ones."""
    if tokens <= 64:
        return HeadConfig(PROCESSORS - spared, 1, 1, 8)
    return HeadConfig(PROCESSORS - spared, 2 if tokens <= 128 else 1, 1, 4)


def statistics(x: jax.Array, w: jax.Array, *, config: HeadConfig) -> tuple[jax.Array, ...]:
    """Of logits `x [T, E] @ w [V, E]`, for each of P shares of the vocabulary, as f32[P, T] each, T up to whole tiles:

    the largest logit, the first word that has it, the sum of exp(logit - largest), and that of
    exp(logit - largest) * (logit - largest).

    Raises ValueError for a config that does not fit shared memory or has fewer than two stages.
    """
    tokens, depth = x.shape
    words = w.shape[0]
    if config.stages < 2 or smem_bytes(tokens, config) > SMEM_LIMIT or depth % (DEPTH * config.pieces):
        raise ValueError(f"{config} takes {smem_bytes(tokens, config)} bytes of {SMEM_LIMIT} for {tokens} tokens")
    c, stages, pieces, programs = config.groups, config.stages, config.pieces, config.programs
    rows = tile_rows(tokens)
    tiles = -(-tokens // rows)
    warpgroups = tiles * c
    steps = depth // (DEPTH * pieces)
    blocks = -(-words // (WORDS * c))
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def body(x_ref, w_ref, top_ref, word_ref, total_ref, weighted_ref, *, x_smem, w_smem, ready, free):
        program = lax.axis_index("program")
        wg = lax.axis_index("wg")
        mine = lax.div(blocks - program + programs - 1, programs)  # blocks of words: every `programs`-th

        def first_word(block, group):
            return (program + block * programs) * (WORDS * c) + group * WORDS

        def clipped(word):
            # Past the end a group computes the last words again, and counts none of them twice.
            return jnp.minimum(word, words - WORDS)

        @pl.when(wg < warpgroups)
        def _compute():
            plgpu.set_max_registers(232 if warpgroups == 2 else 152, action="increase")
            tile, group = lax.div(wg, c), lax.rem(wg, c)

            def logits(block):
                first = block * steps

                def accumulate(acc):
                    def release(index):
                        plgpu.barrier_arrive(free.at[lax.rem(index, stages)])

                    # The tensor cores have the next step's matmuls before those of one are waited for.
                    def step(index, _):
                        slot = lax.rem(index, stages)
                        plgpu.barrier_wait(ready.at[slot])
                        for i in range(pieces):
                            plgpu.wgmma(acc, x_smem.at[slot, i, tile], w_smem.at[slot, i, group].transpose((1, 0)))
                        plgpu.wgmma_wait(pieces)
                        pl.when(index > first)(lambda: release(index - 1))

                    lax.fori_loop(first, first + steps, step, None)
                    plgpu.wgmma_wait(0)
                    release(first + steps - 1)
                    return acc[...]

                return pl.run_scoped(accumulate, plgpu.ACC((rows, WORDS), jnp.float32))

            def reduce(block, carry):
                top, word, total, weighted = carry
                s = logits(block)
                start = first_word(block, group)
                at = clipped(start)
                column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                s = jnp.where(column >= start - at, s, LOWEST)
                best = s.max(axis=1)
                is_best = s == lax.broadcast_in_dim(best, s.shape, [0])
                place = jnp.where(is_best, -column.astype(jnp.float32), -float(WORDS)).max(axis=1)
                word = jnp.where(best > top, at.astype(jnp.float32) - place, word)
                new_top = jnp.maximum(top, best)
                fall = top - new_top
                shrink = jnp.exp(fall)
                weighted = shrink * (weighted + fall * total)
                total = shrink * total
                for i in range(0, WORDS, 64):
                    below = s[:, i : i + 64] - lax.broadcast_in_dim(new_top, (rows, 64), [0])
                    weights = jnp.exp(below)
                    total += weights.sum(axis=1)
                    weighted += (weights * below).sum(axis=1)
                return new_top, word, total, weighted

            def per_row(value):
                return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), by_row)

            carry = per_row(LOWEST), per_row(0.0), per_row(0.0), per_row(0.0)
            found = lax.fori_loop(0, mine, reduce, carry)
            here = (program * c + group, pl.ds(tile * rows, rows))
            for ref, value in zip((top_ref, word_ref, total_ref, weighted_ref), found, strict=True):
                ref[here] = value

        @pl.when(wg == warpgroups)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")

            def load(index, wait):
                slot = lax.rem(index, stages)
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                block, step = lax.div(index, steps), lax.rem(index, steps)
                for i in range(pieces):
                    entries = pl.ds((step * pieces + i) * DEPTH, DEPTH)
                    for group in range(c):
                        plgpu.copy_gmem_to_smem(
                            w_ref.at[pl.ds(clipped(first_word(block, group)), WORDS), entries],
                            w_smem.at[slot, i, group],
                            ready.at[slot],
                        )
                    for tile in range(tiles):
                        count = min(rows, tokens - tile * rows)
                        plgpu.copy_gmem_to_smem(
                            x_ref.at[pl.ds(tile * rows, count), entries],
                            x_smem.at[slot, i, tile, pl.ds(0, count)],
                            ready.at[slot],
                        )

            last = mine * steps
            filled = jnp.minimum(stages, last)
            pl.loop(0, filled)(lambda index: load(index, False))
            pl.loop(filled, last)(lambda index: load(index, True))
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(0, last - stages), last)(
                lambda index: plgpu.barrier_wait(free.at[lax.rem(index, stages)])
            )

    transforms = (plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(128))
    found = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((programs * c, tiles * rows), jnp.float32)] * 4,
        grid=(programs,),
        grid_names=("program",),
        num_threads=warpgroups + 1,
        thread_name="wg",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, pieces, tiles, rows, DEPTH), x.dtype, transforms=transforms),
            "w_smem": plgpu.SMEM((stages, pieces, c, WORDS, DEPTH), w.dtype, transforms=transforms),
            "ready": plgpu.Barrier(num_arrivals=pieces * (tiles + c), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )(x, w)
    return tuple(found)
