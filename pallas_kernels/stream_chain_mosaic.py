"""Matmuls of a few tokens and norms between them, one after the other in a single kernel (`layer_parts`).

Between two kernels the memory idles while the one drains and the other starts. Here one program per multiprocessor goes
through all of them, and its copying warpgroup fills the ring with the next matmul's weights while the last results of
the work before are written and the programs meet. What others wrote is read only behind such a meeting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_inline
from pallas_kernels.attention_plan import SMEM_LIMIT, SMEM_RESERVED
from pallas_kernels.stream_matmul_mosaic import MAX_SPLITS

DEPTH = 64  # entries of the contracted axis per step
COLUMNS = 128  # columns per unit of work; of a gated product 64 of each half


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """How the work is cut.

    Attributes:
        programs: that share it; all must fit the device at once.
        stages: tiles in flight per program.
    """

    programs: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Matmul:
    """`source [T, depth] @ weights`, to `target`; all by name.

    weights `[depth, columns]` and partial sums `[splits, T, columns]`; gated, `[depth, 2, columns]` and
    `silu(.. w0) * (.. w1)`, `[T, columns]`.
    """

    source: str
    weights: str
    target: str
    depth: int
    columns: int
    splits: int = 1
    gated: bool = False

    @property
    def width(self) -> int:
        return COLUMNS // 2 if self.gated else COLUMNS

    @property
    def units(self) -> int:
        return self.columns // self.width * self.splits


@dataclasses.dataclass(frozen=True)
class AddNorm:
    """`fused_rows.add_norm` of x `[T, E]` and the partial sums `parts [splits, T, E]`; all by name."""

    x: str
    parts: str
    scale: str
    sum: str
    normed: str
    splits: int
    eps: float


def smem_bytes(tokens: int, stages: int) -> int:
    """Shared memory of a program."""
    token_tiles = -(-tokens // 64)
    return (stages * DEPTH * (COLUMNS + 64 * token_tiles) + token_tiles * 64 * COLUMNS) * 2 + SMEM_RESERVED


def make_config(tokens: int, processors: int) -> ChainConfig:
    """One program per multiprocessor, the ring as long as it may be."""
    return ChainConfig(processors, max(n for n in range(2, 9) if smem_bytes(tokens, n) <= SMEM_LIMIT))


def splits_of(depth: int, columns: int, config: ChainConfig) -> int:
    """Into how many partial sums a matmul is cut so that every program has a unit of it."""
    return max(1, min(config.programs // (columns // COLUMNS), MAX_SPLITS, depth // DEPTH))


def run_chain(
    work: Sequence[Matmul | AddNorm],
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    counters: jax.Array,
    layer: Any,
    *,
    first_counter: int,
    config: ChainConfig,
    name: str,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Runs `work` in order: `(outputs by name, counters)`.

    counters: i32[L, C], in place under jit; those of row `layer` from `first_counter` on, one less than there is work,
    must be 0 and are not afterwards.
    """
    tokens, dtype = next(iter(outputs.values())).shape[-2], next(iter(outputs.values())).dtype
    programs, stages = config.programs, config.stages
    if stages < 2 or smem_bytes(tokens, stages) > SMEM_LIMIT:
        raise ValueError(f"{config} takes {smem_bytes(tokens, stages)} bytes of {SMEM_LIMIT} for {tokens} tokens")
    token_tiles = -(-tokens // 64)
    # Who tells of the end of each piece of work: every computing warpgroup, or those that had a row to normalise.
    everyone = programs * token_tiles
    expected = [everyone if isinstance(piece, Matmul) else min(tokens, everyone) for piece in work]
    inputs = {k: x.reshape(x.shape[0], -1) if x.ndim == 3 and k in _gated(work) else x for k, x in inputs.items()}

    def body(*refs, **scratch):
        # References come in the order of the call, then those of the outputs.
        layer_ref, counters_ref = refs[len(inputs) : len(inputs) + 2]
        by_name = dict(zip(inputs, refs, strict=False)) | dict(zip(outputs, refs[len(inputs) + 2 :], strict=True))
        x_smem, w_smem, staged = scratch["x_smem"], scratch["w_smem"], scratch["staged"]
        ready, free, met = scratch["ready"], scratch["free"], scratch["met"]
        program = lax.axis_index("program")
        wg = lax.axis_index("wg")
        counter = counters_ref.at[layer_ref[0]]

        def tell(number):
            """That this warpgroup has done its share of a piece of work."""
            if number == len(work) - 1:
                return
            if programs > 1:
                mosaic_inline.signal(counter.at[first_counter + number])
            else:
                plgpu.commit_smem()
                plgpu.barrier_arrive(met.at[number])

        def await_all(number):
            """Until a piece of work is done."""
            if programs > 1:
                mosaic_inline.await_count(counter.at[first_counter + number], expected[number])
            else:
                plgpu.barrier_wait(met.at[number])

        def mine(piece):
            """How many units of a matmul are this program's: number `program`, `program + programs`, ..."""
            return lax.div(piece.units - program + programs - 1, programs)

        def steps_of(piece, i):
            """(columns' group, split, first step, last step) of this program's unit i."""
            unit = program + i * programs
            split = lax.rem(unit, piece.splits)
            steps = piece.depth // DEPTH
            return (
                lax.div(unit, piece.splits),
                split,
                lax.div(steps * split, piece.splits),
                lax.div(steps * (split + 1), piece.splits),
            )

        def multiply(piece, i, done):
            group, split, first, last = steps_of(piece, i)

            def accumulate(*accumulators):
                def step(index, _):
                    slot = lax.rem(done + index - first, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    for half, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, x_smem.at[slot, wg], w_smem.at[slot, half])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(first, last, step, None)
                return tuple(acc[...] for acc in accumulators)

            results = pl.run_scoped(accumulate, *([plgpu.ACC((64, 64), jnp.float32)] * 2))
            if piece.gated:
                gate, up = results
                results = (gate / (1 + jnp.exp(-gate)) * up,)
            for half, values in enumerate(results):
                staged[wg, half] = values.astype(dtype)
            plgpu.commit_smem()
            target = by_name[piece.target]
            target = target if piece.gated else target.at[split]
            for number in range(token_tiles):

                def store(number=number):
                    rows = min(64, tokens - number * 64)
                    for half in range(len(results)):
                        where = pl.ds(group * piece.width + half * 64, 64)
                        tile = staged.at[number, half, pl.ds(0, rows)]
                        plgpu.copy_smem_to_gmem(tile, target.at[pl.ds(number * 64, rows), where])

                pl.when(wg == number)(store)
            plgpu.wait_smem_to_gmem(0)
            return done + last - first

        @pl.when(wg < token_tiles)
        def _compute():
            done = jnp.int32(0)
            for number, piece in enumerate(work):
                if isinstance(piece, Matmul):

                    def unit(i, done, piece=piece):
                        return multiply(piece, i, done)

                    done = lax.fori_loop(0, mine(piece), unit, done)
                    tell(number)
                    continue
                row = program + wg * programs

                @pl.when(row < tokens)
                def _rows(number=number, piece=piece, row=row):
                    if number:
                        await_all(number - 1)
                    pl.loop(row, tokens, step=everyone)(lambda row: _add_norm_row(piece, by_name, row))
                    tell(number)

        @pl.when(wg == token_tiles)
        def _copy():
            def load_tokens(piece, index, at):
                slot = lax.rem(at, stages)
                for tile in range(token_tiles):
                    rows = min(64, tokens - tile * 64)
                    plgpu.copy_gmem_to_smem(
                        by_name[piece.source].at[pl.ds(tile * 64, rows), pl.ds(index * DEPTH, DEPTH)],
                        x_smem.at[slot, tile, pl.ds(0, rows)],
                        ready.at[slot],
                    )

            def load_weights(piece, group, index, at):
                slot = lax.rem(at, stages)
                pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for half in range(2):
                    columns = pl.ds(group * piece.width + half * (piece.columns if piece.gated else 64), 64)
                    tile = by_name[piece.weights].at[pl.ds(index * DEPTH, DEPTH), columns]
                    plgpu.copy_gmem_to_smem(tile, w_smem.at[slot, half], ready.at[slot])

            def fetch(piece, i, done, behind=None):
                """A unit's tiles; the tokens not before the piece of work numbered `behind` is done."""
                group, _, first, last = steps_of(piece, i)
                ahead = first if behind is None else jnp.minimum(first + stages, last)
                pl.loop(first, ahead)(lambda index: load_weights(piece, group, index, done + index - first))
                if behind is not None:
                    await_all(behind)
                    pl.loop(first, ahead)(lambda index: load_tokens(piece, index, done + index - first))

                @pl.loop(ahead, last)
                def _both(index):
                    load_weights(piece, group, index, done + index - first)
                    load_tokens(piece, index, done + index - first)

                return done + last - first

            done = jnp.int32(0)
            for number, piece in enumerate(work):
                if isinstance(piece, AddNorm):
                    continue
                first_unit: Any = 0
                if number:
                    first_unit = jnp.minimum(mine(piece), 1)

                    def first_of(i, done, number=number, piece=piece):
                        return fetch(piece, i, done, number - 1)

                    done = lax.fori_loop(0, first_unit, first_of, done)

                def other(i, done, piece=piece):
                    return fetch(piece, i, done)

                done = lax.fori_loop(first_unit, mine(piece), other, done)
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(0, done - stages), done)(lambda at: plgpu.barrier_wait(free.at[lax.rem(at, stages)]))

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=token_tiles + 1,
        thread_name="wg",
        scratch_types={
            "x_smem": plgpu.SMEM((stages, token_tiles, 64, DEPTH), dtype, transforms=transforms),
            "w_smem": plgpu.SMEM((stages, 2, DEPTH, 64), dtype, transforms=transforms),
            "staged": plgpu.SMEM((token_tiles, 2, 64, 64), dtype, transforms=transforms),
            "ready": plgpu.Barrier(num_arrivals=token_tiles + 2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=token_tiles, num_barriers=stages),
            # Where a program is alone, as in the interpreter, which knows no counters: it meets itself here.
            "met": plgpu.Barrier(num_arrivals=token_tiles, num_barriers=len(work)),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )
    ref = jax.new_ref(counters)
    results = kernel(*inputs.values(), jnp.asarray(layer, jnp.int32).reshape(1), ref)
    return dict(zip(outputs, results, strict=True)), jax.freeze(ref)


def _gated(work: Sequence[Matmul | AddNorm]) -> set[str]:
    return {piece.weights for piece in work if isinstance(piece, Matmul) and piece.gated}


def _add_norm_row(piece, refs, row):
    """One row, by one warpgroup."""
    x_ref, parts_ref = refs[piece.x], refs[piece.parts]
    size, dtype = x_ref.shape[1], x_ref.dtype
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=next(n for n in (8, 4, 2, 1) if size % (128 * n) == 0))

    def load(ref, *where):
        return plgpu.load(ref.at[where] if where else ref, layout=layout).astype(jnp.float32)

    values = load(x_ref, row)
    added = load(parts_ref, 0, row)
    for split in range(1, piece.splits):
        added += load(parts_ref, split, row)
    rounded = (values + added).astype(dtype)
    refs[piece.sum][row] = rounded
    values = rounded.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(values * values) * (1 / size) + piece.eps)
    values = (values * factor).astype(dtype).astype(jnp.float32)
    refs[piece.normed][row] = (values * load(refs[piece.scale])).astype(dtype)
