"""The grouped matmul of `grouped.grouped_mlp` as a Mosaic GPU kernel for Hopper: `stream_matmul` with experts.

A program computes up to 64 rows of one expert against `128 * column_groups` of its columns: a warpgroup that only
issues TMA copies feeds a ring of weight and row tiles in shared memory; each compute warpgroup multiplies the rows with
128 of the columns. The weights of an expert that no row asks for are never touched, and with up to 64 rows per expert
each weight is read once.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import SMEM_LIMIT, SMEM_RESERVED

KERNEL_NAME = "grouped_matmul"
GATED_KERNEL_NAME = "grouped_matmul_gated"

ROWS = 64  # of one expert per program: the rows of a wgmma
ALIGN = 8  # rows per swizzled atom: where an expert's rows may start
DEPTH = 64  # entries of the contracted axis per step: one swizzled row of 16-bit numbers
COLUMNS = 128  # columns per compute warpgroup: 64 registers of accumulators per thread
COPIED = (8, 16, 24, 32, 64)  # rows that an item's copies may have: the fewest that hold its own


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """How the work is cut.

    Attributes:
        column_groups: groups of 128 columns per program (gated: 64 columns of the gate and the same 64 of the other).
        stages: tiles in flight per program.
    """

    column_groups: int = 1
    stages: int = 4


def smem_bytes(config: GroupedConfig) -> int:
    """Shared memory of a program."""
    return config.stages * DEPTH * 2 * (COLUMNS * config.column_groups + ROWS) + SMEM_RESERVED


def matmul(
    x: jax.Array,
    w: jax.Array,
    expert: jax.Array,
    start: jax.Array,
    rows: jax.Array,
    *,
    gated: bool,
    config: GroupedConfig | None = None,
) -> jax.Array:
    """Rows `start[i] .. start[i] + rows[i]` of x times `w[expert[i]]`, for every item i.

    Args:
      x: `[R, E]`, 16-bit; at least 64 rows beyond the last item's start.
      w: `[X, E, F]`, or gated `[X, E, 2, F]`, the dtype of x.
      expert, start, rows: i32[I]; starts are multiples of 8, rows at most 64, 0 for an item that is none.

    Returns:
      `[R, F]`; gated, `silu(x @ w[:, 0]) * (x @ w[:, 1])`. Rows of no item are left as they come, and so are those that
      fill an item's last 8.

    Raises ValueError for a config that does not fit shared memory or has fewer than two stages.
    """
    depth, columns = x.shape[1], w.shape[-1]
    config = config or GroupedConfig()
    if config.stages < 2 or smem_bytes(config) > SMEM_LIMIT:
        raise ValueError(f"{config} takes {smem_bytes(config)} bytes of {SMEM_LIMIT}")
    c, stages = config.column_groups, config.stages
    width = COLUMNS // 2 if gated else COLUMNS
    groups = columns // width
    halves = 2 if gated else 1
    w = w.reshape(w.shape[0], depth, halves * columns)

    def body(expert_ref, start_ref, rows_ref, x_ref, w_ref, out_ref, *, x_smem, w_smem, ready, free):
        first_group = lax.axis_index("columns") * c
        item = lax.axis_index("item")
        wg = lax.axis_index("wg")
        number, begin, count = expert_ref[item], start_ref[item], rows_ref[item]
        begin = pl.multiple_of(begin, ALIGN)
        steps = jnp.where(count > 0, depth // DEPTH, 0)

        def column(group):
            # Past the end a group computes the last one again, and drops it.
            return jnp.minimum(first_group + group, groups - 1) * width

        @pl.when(wg < c)
        def _compute():
            def accumulate(*accumulators):
                def step(index, _):
                    slot = lax.rem(index, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    for half, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, x_smem.at[slot], w_smem.at[slot, wg, half])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(0, steps, step, None)
                return tuple(acc[...] for acc in accumulators)

            sums = pl.run_scoped(accumulate, *([plgpu.ACC((ROWS, width), jnp.float32)] * halves))
            if gated:
                gate, up = sums
                values = gate / (1 + jnp.exp(-gate)) * up
            else:
                [values] = sums
            # This warpgroup has read the last tile that it stages its result in, and no other reads it.
            staged = w_smem.at[0, wg, 0]
            staged[...] = values.astype(x.dtype)
            plgpu.commit_smem()
            where = pl.ds(column(wg), width)
            for chunk in range(0, ROWS, ALIGN):

                def store(chunk=chunk):
                    to = out_ref.at[pl.ds(begin + chunk, ALIGN), where]
                    plgpu.copy_smem_to_gmem(staged.at[pl.ds(chunk, ALIGN)], to)

                pl.when((chunk < count) & (first_group + wg < groups))(store)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written ends with the kernel

        @pl.when(wg == c)
        def _copy():
            def load(index, wait):
                slot = lax.rem(index, stages)
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                entries = pl.ds(index * DEPTH, DEPTH)

                def load_rows(size):
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(begin, size), entries], x_smem.at[slot, pl.ds(0, size)], ready.at[slot]
                    )

                # Few rows are the rule while denoising, and every program of an item fetches them, as the weights, from
                # the L2. What lies below them in the tile is multiplied and dropped.
                for fewer, size in zip((0, *COPIED), COPIED, strict=False):
                    pl.when((count > fewer) & (count <= size))(functools.partial(load_rows, size))
                for group in range(c):
                    for half in range(halves):
                        plgpu.copy_gmem_to_smem(
                            w_ref.at[number, entries, pl.ds(half * columns + column(group), width)],
                            w_smem.at[slot, group, half],
                            ready.at[slot],
                        )

            filled = jnp.minimum(stages, steps)
            pl.loop(0, filled)(lambda index: load(index, False))
            pl.loop(filled, steps)(lambda index: load(index, True))
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(0, steps - stages), steps)(
                lambda index: plgpu.barrier_wait(free.at[lax.rem(index, stages)])
            )

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype),
        # Neighbours differ in the last axis: what they read lies side by side in memory, which is worth 14 %.
        grid=(expert.shape[0], -(-groups // c)),
        grid_names=("item", "columns"),
        num_threads=c + 1,
        thread_name="wg",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, ROWS, DEPTH), x.dtype, transforms=transforms),
            "w_smem": plgpu.SMEM((stages, c, halves, DEPTH, width), w.dtype, transforms=transforms),
            "ready": plgpu.Barrier(num_arrivals=1 + c * halves, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=c, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=GATED_KERNEL_NAME if gated else KERNEL_NAME,
    )(expert, start, rows, x, w)
