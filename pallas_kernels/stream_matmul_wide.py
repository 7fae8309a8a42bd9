"""The matmul of `stream_matmul` for 65 to 256 tokens, as a Mosaic GPU kernel. Design: docs/kernels-matmul.md.

With so many tokens the tensor cores take about as long as the memory does, or longer. So a program has a tile as large
as the registers hold, up to 128 tokens against up to 320 columns or all 256 against 128 or 192, and at best there are
no more programs than multiprocessors: each warpgroup keeps half of the tokens' accumulators and goes through the
contracted axis, fed by one that only issues TMA copies. Weights come from memory once: two programs that share columns
run side by side.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_plan import PROCESSORS, SMEM_LIMIT, SMEM_RESERVED
from pallas_kernels.stream_matmul_mosaic import DEPTH, GATED_KERNEL_NAME, KERNEL_NAME, MAX_SPLITS

WARPGROUPS = 2
MOST_TOKENS = 256
# Columns of a program by its tokens: that many registers of accumulators per thread, or half as many. A warpgroup
# multiplies with at most 256 columns at once, which is no limit to two halves of 160.
COLUMNS = {256: (128, 192), 128: (128, 192, 256, 320)}


@dataclasses.dataclass(frozen=True)
class WideConfig:
    """How the work is cut.

    Attributes:
        columns: of the weights per program, one of COLUMNS[rows] (gated: half of them gate).
        splits: programs that share a column's contracted axis; each leaves a partial sum. 1 if gated.
        stages: tiles in flight per program.
        rows: tokens per program, one of COLUMNS: 128 of up to 128 or of 256, else 256.
    """

    columns: int
    splits: int
    stages: int
    rows: int = MOST_TOKENS


def padded(tokens: int) -> int:
    """Tokens up to whole tiles of 64."""
    return -(-tokens // 64) * 64


def smem_bytes(tokens: int, config: WideConfig) -> int:
    """Shared memory of a program."""
    return config.stages * DEPTH * 2 * (config.columns + min(config.rows, padded(tokens))) + SMEM_RESERVED


def make_config(tokens: int, depth: int, columns: int, gated: bool) -> WideConfig:
    """The cut that is expected to finish soonest; `columns` of the result. Figures: docs/kernels-matmul.md."""
    estimate = _many_tokens if tokens > 128 else _few_tokens
    configs = [
        WideConfig(width, splits, stages, rows)
        for rows in _rows(tokens)
        for width in COLUMNS[rows]
        for splits in range(1, 1 + (1 if gated else min(MAX_SPLITS, depth // DEPTH)))
        for stages in (6, 5, 4)
        if width <= (2 * columns if gated else min(columns, 256))
    ]
    return min(
        (config for config in configs if smem_bytes(tokens, config) <= SMEM_LIMIT),
        key=functools.partial(estimate, tokens, depth, columns, gated),
    )


def _many_tokens(tokens: int, depth: int, columns: int, gated: bool, config: WideConfig) -> float:
    """Microseconds on an H200, fitted to 64 cuts of 16 products, and those of reading partial sums again."""
    rows, width = min(config.rows, padded(tokens)), config.columns // 2 if gated else config.columns
    programs = -(-columns // width) * -(-tokens // config.rows) * config.splits
    # A step takes as many cycles as the tensor cores need, or reading shared memory for them (64 tokens and one
    # half's columns for each matmul of 16 entries) and writing it, or copies of so many rows of swizzled tiles.
    flops = rows * config.columns * DEPTH / 2048
    nbytes = 2 * DEPTH * (rows + config.columns) + rows // 64 * (1 + gated) * 2 * DEPTH * (64 + width)
    copied = DEPTH * (rows + config.columns) / _piece(width)
    cycles = max(1.2 * flops, nbytes / 128, 1.9 * copied)
    waves = -(-programs // PROCESSORS)
    steps = -(-(depth // DEPTH) // config.splits)
    return waves * (3 + steps * cycles / 1900) + config.splits * tokens * columns / 1.3e6


def _few_tokens(tokens: int, depth: int, columns: int, gated: bool, config: WideConfig) -> float:
    """The same, fitted to 109 cuts of 16 products with 128 tokens, where the memory takes as long as the tensor cores.

    Programs that run at once share the memory, which is slower for the rows of 64 bytes of a narrower swizzle; those of
    a last wave that is not full have it to themselves, and then take as long as one program's steps.
    """
    width = config.columns // 2 if gated else config.columns
    groups = -(-columns // width)
    memory = 2 * depth * columns * (1 + gated) * (1 if _piece(width) == 64 else 1.21) / 4.2e6
    steps = -(-(depth // DEPTH) // config.splits) * 1.2 * config.rows * config.columns * DEPTH / 2048 / 1900
    waves, rest = divmod(groups * config.splits, PROCESSORS)
    share = memory / (groups * config.splits)
    taken = waves * max(steps, share * PROCESSORS) + (max(steps, share * rest) if rest else 0)
    return taken + 1 + 2 * (waves + (rest > 0)) + config.splits * tokens * columns / (1.3e6 if gated else 0.9e6)


def _rows(tokens: int) -> tuple[int, ...]:
    """Tokens that a program may have: all of them, or whole halves."""
    if tokens <= 128:
        return (128,)
    return (128, MOST_TOKENS) if tokens == MOST_TOKENS else (MOST_TOKENS,)


def _piece(width: int) -> int:
    """Columns of a tile's rows in shared memory. Halves of 96 or 160 are whole rows of a narrower swizzle only."""
    return 64 if width % 64 == 0 else 32


def matmul(x: jax.Array, w: jax.Array, *, gated: bool, config: WideConfig | None = None) -> jax.Array:
    """`x [T, E] @ w [E, F]` as partial sums `[S, T, F]`; gated, w is `[E, 2, F]` and this `[T, F]`. T from 65 to 256.

    Raises ValueError for a config that does not fit the problem or shared memory.
    """
    tokens, depth = x.shape
    columns = w.shape[-1]
    if config is None:
        config = make_config(tokens, depth, columns, gated)
    c, splits, stages = config.columns, config.splits, config.stages
    width = c // 2 if gated else c
    steps = depth // DEPTH
    _check(config, tokens, steps, columns, width, gated)
    programs = -(-columns // width)
    tokens_here = min(config.rows, padded(tokens))
    each = config.rows // WARPGROUPS
    halves = 2 if gated else 1
    piece = _piece(width)
    pieces = DEPTH // piece
    w = w.reshape(depth, -1)
    dtype = x.dtype

    def body(x_ref, w_ref, out_ref, *, x_smem, w_smem, ready, free):
        # The last programs overlap where columns are no multiple of theirs: they write the same values.
        column = jnp.minimum(lax.axis_index("columns") * width, columns - width)
        first_row = lax.axis_index("rows") * config.rows
        split = lax.axis_index("split")
        wg = lax.axis_index("wg")
        first, last = lax.div(steps * split, splits), lax.div(steps * (split + 1), splits)

        def compute(start: int, rows: int) -> None:
            """All of the work of a warpgroup with the program's tokens `start` to `start + rows`."""

            def accumulate(*accumulators):
                def multiply(index):
                    slot = lax.rem(index - first, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    for half, acc in enumerate(accumulators):
                        for i in range(pieces):
                            entries = pl.ds(i * piece, piece)
                            plgpu.wgmma(acc, x_smem.at[slot, i, pl.ds(start, rows)], w_smem.at[slot, half, entries])

                def release(index):
                    plgpu.barrier_arrive(free.at[lax.rem(index - first, stages)])

                # The tensor cores have the next step's matmuls before those of one are waited for.
                def step(index, _):
                    multiply(index)
                    plgpu.wgmma_wait(halves * pieces)
                    pl.when(index > first)(lambda: release(index - 1))

                lax.fori_loop(first, last, step, None)
                plgpu.wgmma_wait(0)
                release(last - 1)
                return tuple(acc[...] for acc in accumulators)

            sums = pl.run_scoped(accumulate, *([plgpu.ACC((rows, width), jnp.float32)] * halves))
            if gated:
                gate, up = sums
                values = gate / (1 + jnp.exp(-gate)) * up
            else:
                [values] = sums
            values = values.astype(dtype)
            # No other warpgroup reads these tokens' part of the ring, and all that was asked for has come.
            to = out_ref if gated else out_ref.at[split]
            count = min(rows, min(config.rows, tokens) - start)
            for number in range(width // piece):
                slot, i = divmod(number, pieces)
                x_smem[slot, i, start : start + rows] = values[:, number * piece : (number + 1) * piece]
            plgpu.commit_smem()
            for number in range(width // piece):
                slot, i = divmod(number, pieces)
                plgpu.copy_smem_to_gmem(
                    x_smem.at[slot, i, pl.ds(start, count)],
                    to.at[pl.ds(first_row + start, count), pl.ds(column + number * piece, piece)],
                )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is written ends with the kernel

        for number in range(WARPGROUPS):

            @pl.when(wg == number)
            def _compute(number=number):
                plgpu.set_max_registers(232, action="increase")
                compute(number * each, min(each, tokens_here - number * each))

        @pl.when(wg == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            count = min(config.rows, tokens)

            def load(index, wait):
                slot = lax.rem(index - first, stages)
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                for half in range(halves):
                    plgpu.copy_gmem_to_smem(
                        w_ref.at[pl.ds(index * DEPTH, DEPTH), pl.ds(half * columns + column, width)],
                        w_smem.at[slot, half],
                        ready.at[slot],
                    )
                for i in range(pieces):
                    plgpu.copy_gmem_to_smem(
                        x_ref.at[pl.ds(first_row, count), pl.ds(index * DEPTH + i * piece, piece)],
                        x_smem.at[slot, i, pl.ds(0, count)],
                        ready.at[slot],
                    )

            filled = jnp.minimum(first + stages, last)
            pl.loop(first, filled)(lambda index: load(index, False))
            pl.loop(filled, last)(lambda index: load(index, True))
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(first, last - stages), last)(
                lambda index: plgpu.barrier_wait(free.at[lax.rem(index - first, stages)])
            )

    transforms = (plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(2 * piece))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, columns) if gated else (splits, tokens, columns), dtype),
        grid=(programs, splits, -(-tokens // config.rows)),  # the last goes first: programs with the same weights
        grid_names=("columns", "split", "rows"),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, pieces, tokens_here, piece), dtype, transforms=transforms),
            "w_smem": plgpu.SMEM((stages, halves, DEPTH, width), w.dtype, transforms=transforms),
            "ready": plgpu.Barrier(num_arrivals=halves + pieces, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=GATED_KERNEL_NAME if gated else KERNEL_NAME,
    )(x, w)


def _check(config: WideConfig, tokens: int, steps: int, columns: int, width: int, gated: bool) -> None:
    allowed = COLUMNS.get(config.rows, ())
    if config.columns not in allowed or width > min(columns, 256):
        raise ValueError(f"a program has {allowed} columns, and no more than there are: not {config} for {columns}")
    if not 1 <= config.splits <= (1 if gated else steps):
        raise ValueError(f"a gated product has 1 split, any other from 1 to {steps}, its steps: not {config.splits}")
    if not 64 < tokens <= MOST_TOKENS or tokens % 8:
        raise ValueError(f"the wide matmul takes a multiple of 8 tokens from 65 to {MOST_TOKENS}, not {tokens}")
    if config.rows not in _rows(tokens):
        raise ValueError(f"a program computes {_rows(tokens)} of {tokens} tokens, not {config.rows}")
    least = max(2, -(-width // 64))  # the result, 64 columns in each, lies in them before it leaves
    if config.stages < least or smem_bytes(tokens, config) > SMEM_LIMIT:
        raise ValueError(
            f"{config} takes {smem_bytes(tokens, config)} bytes of {SMEM_LIMIT} for {tokens} tokens, and needs at "
            f"least {least} stages"
        )
