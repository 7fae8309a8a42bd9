"""The matmul of `stream_matmul` for up to 64 tokens, as a Mosaic GPU kernel for Hopper. Design: docs/kernels-matmul.md.

A program computes all tokens against `128 * column_groups` columns, over one share of the contracted axis: a warpgroup
that only issues TMA copies feeds a ring of weight and token tiles in shared memory; each compute warpgroup multiplies
the tokens with 128 of the columns. Weights pass through once, in the layout they are stored in. With more tokens
`stream_matmul_wide` is faster.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import PROCESSORS, SMEM_LIMIT, SMEM_RESERVED

KERNEL_NAME = "stream_matmul"
GATED_KERNEL_NAME = "stream_matmul_gated"

DEPTH = 64  # entries of the contracted axis per step: one swizzled row of 16-bit tokens
MOST_TOKENS = 64
COLUMNS = 128  # columns per compute warpgroup: 64 registers of accumulators per thread
MAX_SPLITS = 12


@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """How the work is cut.

    Attributes:
        column_groups: groups of 128 columns per program (gated: 64 columns of the gate and the same 64 of the other).
        splits: programs that share a column's contracted axis; each leaves a partial sum. 1 if gated.
        stages: tiles in flight per program.
    """

    column_groups: int
    splits: int
    stages: int


def smem_bytes(config: MatmulConfig) -> int:
    """Shared memory of a program."""
    return config.stages * DEPTH * 2 * (COLUMNS * config.column_groups + MOST_TOKENS) + SMEM_RESERVED


def make_config(tokens: int, depth: int, columns: int, gated: bool) -> MatmulConfig:
    """What was fastest on an H200, see docs/kernels-matmul.md; `columns` of the result."""
    del tokens  # a tile has room for 64, and costs the same with fewer
    groups = columns // (COLUMNS // 2 if gated else COLUMNS)
    if gated:
        # Few programs with wide tiles read the tokens less often, and half the multiprocessors saturate the memory.
        fits = [c for c in (3, 2) if -(-groups // c) >= PROCESSORS * 0.45]
        return MatmulConfig(fits[0], 1, 3 if fits[0] == 3 else 4) if fits else MatmulConfig(1, 1, 4)
    splits = max(1, PROCESSORS // groups)
    if groups * splits < 0.9 * PROCESSORS:
        splits = max(1, 2 * PROCESSORS // groups)  # two programs share a multiprocessor
    return MatmulConfig(1, min(splits, MAX_SPLITS, depth // DEPTH), 4)


def matmul(x: jax.Array, w: jax.Array, *, gated: bool, config: MatmulConfig | None = None) -> jax.Array:
    """`x [T, E] @ w [E, F]` as partial sums `[S, T, F]`; gated, w is `[E, 2, F]` and this `[T, F]`. T up to 64.

    Raises ValueError for more tokens and for a config that does not fit shared memory or has fewer than two stages.
    """
    tokens, depth = x.shape
    columns = w.shape[-1]
    if config is None:
        config = make_config(tokens, depth, columns, gated)
    if config.stages < 2 or smem_bytes(config) > SMEM_LIMIT or (gated and config.splits > 1):
        raise ValueError(
            f"{config} takes {smem_bytes(config)} bytes of {SMEM_LIMIT}, and needs 2 stages, and 1 split if gated"
        )
    if tokens > MOST_TOKENS:
        raise ValueError(f"the skinny matmul takes up to {MOST_TOKENS} tokens, not {tokens}: stream_matmul_wide does")
    c, splits, stages = config.column_groups, config.splits, config.stages
    width = COLUMNS // 2 if gated else COLUMNS
    groups = columns // width
    steps = depth // DEPTH
    halves = 2 if gated else 1
    w = w.reshape(depth, halves * columns)

    def body(x_ref, w_ref, out_ref, *, x_smem, w_smem, ready, free):
        first_group = lax.axis_index("columns") * c
        split = lax.axis_index("split")
        wg = lax.axis_index("wg")
        first, last = lax.div(steps * split, splits), lax.div(steps * (split + 1), splits)

        def column(group):
            # Past the end a group computes the last one again, and drops it.
            return jnp.minimum(first_group + group, groups - 1) * width

        @pl.when(wg < c)
        def _compute():
            group = wg

            def accumulate(*accumulators):
                def step(index, _):
                    slot = lax.rem(index - first, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    for half, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, x_smem.at[slot], w_smem.at[slot, group, half])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(first, last, step, None)
                return tuple(acc[...] for acc in accumulators)

            sums = pl.run_scoped(accumulate, *([plgpu.ACC((64, width), jnp.float32)] * halves))
            if gated:
                gate, up = sums
                values = gate / (1 + jnp.exp(-gate)) * up
            else:
                [values] = sums
            staged = w_smem.at[0, group, 0]  # nobody else reads it, and all that was asked for has come
            staged[...] = values.astype(x.dtype)
            plgpu.commit_smem()

            @pl.when(first_group + group < groups)
            def _store():
                to = out_ref if gated else out_ref.at[split]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, tokens)], to.at[:, pl.ds(column(group), width)])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written ends with the kernel

        @pl.when(wg == c)
        def _copy():

            def load(index, wait):
                slot = lax.rem(index - first, stages)
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                entries = pl.ds(index * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x_ref.at[:, entries], x_smem.at[slot, pl.ds(0, tokens)], ready.at[slot])
                for group in range(c):
                    for half in range(halves):
                        plgpu.copy_gmem_to_smem(
                            w_ref.at[entries, pl.ds(half * columns + column(group), width)],
                            w_smem.at[slot, group, half],
                            ready.at[slot],
                        )

            filled = jnp.minimum(first + stages, last)
            pl.loop(first, filled)(lambda index: load(index, False))
            pl.loop(filled, last)(lambda index: load(index, True))
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(first, last - stages), last)(
                lambda index: plgpu.barrier_wait(free.at[lax.rem(index - first, stages)])
            )

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out = jax.ShapeDtypeStruct((tokens, columns) if gated else (splits, tokens, columns), x.dtype)
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(-(-groups // c), splits),
        grid_names=("columns", "split"),
        num_threads=c + 1,
        thread_name="wg",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, MOST_TOKENS, DEPTH), x.dtype, transforms=transforms),
            "w_smem": plgpu.SMEM((stages, c, halves, DEPTH, width), w.dtype, transforms=transforms),
            "ready": plgpu.Barrier(num_arrivals=1 + c * halves, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=c, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=GATED_KERNEL_NAME if gated else KERNEL_NAME,
    )(x, w)
