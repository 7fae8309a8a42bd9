"""What follows attention in a layer as one kernel: output projection, residual and norm, gate and up, down.

Between two kernels the memory idles while the one drains and the other starts. Here one program per multiprocessor goes
through all four parts, and its copying warpgroup fills the ring with the next part's weights while the last results of
the part before are written and all programs meet. A part reads what others wrote only behind such a meeting.
Contract and figures: docs/kernels-matmul.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_inline
from pallas_kernels.attention_plan import SMEM_LIMIT, SMEM_RESERVED
from pallas_kernels.stream_matmul_mosaic import MAX_SPLITS

KERNEL_NAME = "stream_tail"

DEPTH = 64  # entries of the contracted axis per step
COLUMNS = 128  # columns per unit of work; of a gated product 64 of each half
MEETINGS = 3  # counters a layer needs


@dataclasses.dataclass(frozen=True)
class TailConfig:
    """How the work is cut.

    Attributes:
        programs: that share it; all must fit the device at once.
        splits: units that share a column's contracted axis in the output and in the down projection.
        stages: tiles in flight per program.
    """

    programs: int
    splits: tuple[int, int]
    stages: int


def smem_bytes(tokens: int, config: TailConfig) -> int:
    """Shared memory of a program."""
    token_tiles = -(-tokens // 64)
    return (config.stages * DEPTH * (COLUMNS + 64 * token_tiles) + token_tiles * 64 * COLUMNS) * 2 + SMEM_RESERVED


def make_config(tokens: int, inner: int, size: int, hidden: int, processors: int) -> TailConfig:
    """One program per multiprocessor, the ring as long as it may be."""
    groups = size // COLUMNS
    first, second = (max(1, min(processors // groups, MAX_SPLITS, depth // DEPTH)) for depth in (inner, hidden))
    stages = 8
    while stages > 2 and smem_bytes(tokens, TailConfig(processors, (first, second), stages)) > SMEM_LIMIT:
        stages -= 1
    return TailConfig(processors, (first, second), stages)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One of the matmuls: `[T, depth] @ [depth, columns]`, `units = groups * splits`."""

    depth: int
    groups: int
    splits: int
    gated: bool

    @property
    def units(self) -> int:
        return self.groups * self.splits

    @property
    def width(self) -> int:
        return COLUMNS // 2 if self.gated else COLUMNS


def layer_tail(
    attended: jax.Array,
    x: jax.Array,
    out: jax.Array,
    scale: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    counters: jax.Array,
    layer: Any,
    *,
    eps: float,
    config: TailConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(x + attended @ out, partial sums [S, T, E] of the MLP of its norm, counters)`.

    Args:
      attended: `[T, H]`, x: `[T, E]`, out: `[H, E]`, scale: `[E]`, gate_up: `[E, 2, F]`, down: `[F, E]`, 16-bit.
      counters: i32[L, 4], zeros in the row of this layer, used up by the call; in place under jit.
      layer: i32 scalar.
      eps: added to the mean square.
    """
    tokens, inner = attended.shape
    size, hidden = x.shape[1], gate_up.shape[2]
    if config.stages < 2 or smem_bytes(tokens, config) > SMEM_LIMIT:
        raise ValueError(f"{config} takes {smem_bytes(tokens, config)} bytes of {SMEM_LIMIT} for {tokens} tokens")
    dtype, programs, stages = x.dtype, config.programs, config.stages
    parts = (
        _Part(inner, size // COLUMNS, config.splits[0], False),
        _Part(size, hidden // (COLUMNS // 2), 1, True),
        _Part(hidden, size // COLUMNS, config.splits[1], False),
    )
    token_tiles = -(-tokens // 64)

    def body(attended_ref, x_ref, out_ref, scale_ref, gate_up_ref, down_ref, layer_ref, counters_ref, *rest, **scratch):
        x_out, sums, first_sums, normed, act = rest
        x_smem, w_smem, staged = scratch["x_smem"], scratch["w_smem"], scratch["staged"]
        ready, free = scratch["ready"], scratch["free"]
        program = lax.axis_index("program")
        wg = lax.axis_index("wg")
        counter = counters_ref.at[layer_ref[0]]
        sources = (attended_ref, normed, act)
        weights = (out_ref, gate_up_ref, down_ref)
        targets = (first_sums, act, sums)

        def steps_of(part, unit):
            """(group, split, first step, last step) of a unit of work."""
            group, split = lax.div(unit, part.splits), lax.rem(unit, part.splits)
            steps = part.depth // DEPTH
            return group, split, lax.div(steps * split, part.splits), lax.div(steps * (split + 1), part.splits)

        # Who takes part in a meeting: every computing warpgroup, or those that have a row to normalise.
        everyone = programs * token_tiles
        expected = (everyone, min(tokens, everyone), everyone)

        def meet(number):
            """All that this warpgroup wrote can be seen by who waits for meeting `number`."""
            if programs > 1:
                mosaic_inline.signal(counter.at[number])
            else:
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch["met"].at[number])

        def await_meeting(number):
            if programs > 1:
                mosaic_inline.await_count(counter.at[number], expected[number])
            else:
                plgpu.barrier_wait(scratch["met"].at[number])

        @pl.when(wg < token_tiles)
        def _compute():
            def multiply(part, target, unit, done):
                group, split, first, last = steps_of(part, unit)

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
                if part.gated:
                    gate, up = results
                    results = (gate / (1 + jnp.exp(-gate)) * up,)
                for half, values in enumerate(results):
                    staged[wg, half] = values.astype(dtype)
                plgpu.commit_smem()
                to = target if part.gated else target.at[split]
                for number in range(token_tiles):

                    def store(number=number):
                        rows = min(64, tokens - number * 64)
                        for half in range(len(results)):
                            where = pl.ds(group * part.width + half * 64, 64)
                            tile = staged.at[number, half, pl.ds(0, rows)]
                            plgpu.copy_smem_to_gmem(tile, to.at[pl.ds(number * 64, rows), where])

                    pl.when(wg == number)(store)
                plgpu.wait_smem_to_gmem(0)
                return done + last - first

            def run(number, done):
                part, target = parts[number], targets[number]
                mine = lax.div(part.units - program + programs - 1, programs)
                return lax.fori_loop(
                    0, mine, lambda i, done: multiply(part, target, program + i * programs, done), done
                )

            done = run(0, jnp.int32(0))
            meet(0)
            row = program + wg * programs

            @pl.when(row < tokens)
            def _norm():
                await_meeting(0)

                @pl.loop(row, tokens, step=everyone)
                def _row(row):
                    _add_norm_row(x_ref, first_sums, scale_ref, x_out, normed, row, eps, config.splits[0])

                meet(1)

            done = run(1, done)
            meet(2)
            run(2, done)

        @pl.when(wg == token_tiles)
        def _copy():
            def load_tokens(number, index, at):
                slot = lax.rem(at, stages)
                for tile in range(token_tiles):
                    rows = min(64, tokens - tile * 64)
                    plgpu.copy_gmem_to_smem(
                        sources[number].at[pl.ds(tile * 64, rows), pl.ds(index * DEPTH, DEPTH)],
                        x_smem.at[slot, tile, pl.ds(0, rows)],
                        ready.at[slot],
                    )

            def load_weights(number, group, index, at):
                part = parts[number]
                slot = lax.rem(at, stages)
                pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                for half in range(2):
                    columns = pl.ds(group * part.width + half * (hidden if part.gated else 64), 64)
                    tile = weights[number].at[pl.ds(index * DEPTH, DEPTH), columns]
                    plgpu.copy_gmem_to_smem(tile, w_smem.at[slot, half], ready.at[slot])

            def fetch(number, wait, unit, done, waits):
                group, _, first, last = steps_of(parts[number], unit)
                ahead = jnp.minimum(first + stages, last) if waits else first

                @pl.loop(first, ahead)
                def _weights(index):
                    load_weights(number, group, index, done + index - first)

                if waits:
                    wait()

                    @pl.loop(first, ahead)
                    def _tokens(index):
                        load_tokens(number, index, done + index - first)

                @pl.loop(ahead, last)
                def _both(index):
                    load_weights(number, group, index, done + index - first)
                    load_tokens(number, index, done + index - first)

                return done + last - first

            done = jnp.int32(0)
            for number, part in enumerate(parts):
                mine = lax.div(part.units - program + programs - 1, programs)

                def others(i, done, number=number):
                    return fetch(number, None, program + i * programs, done, False)

                waiting = 0
                if number:
                    waiting = jnp.minimum(mine, 1)

                    def first_one(_, done, number=number):
                        return fetch(number, lambda: await_meeting(number), program, done, True)

                    done = lax.fori_loop(0, waiting, first_one, done)
                done = lax.fori_loop(waiting, mine, others, done)
            # Nothing depends on this; the interpreter wants every phase that completed to have been seen.
            pl.loop(jnp.maximum(0, done - stages), done)(lambda at: plgpu.barrier_wait(free.at[lax.rem(at, stages)]))

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    of = jax.ShapeDtypeStruct
    run = plgpu.kernel(
        body,
        out_type=(
            of(x.shape, dtype),
            of((config.splits[1], *x.shape), dtype),
            of((config.splits[0], *x.shape), dtype),
            of(x.shape, dtype),
            of((tokens, hidden), dtype),
        ),
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
            "met": plgpu.Barrier(num_arrivals=token_tiles, num_barriers=MEETINGS),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=KERNEL_NAME,
    )
    ref = jax.new_ref(counters)
    new_x, sums, *_ = run(
        attended,
        x,
        out,
        scale,
        gate_up.reshape(size, 2 * hidden),
        down,
        jnp.asarray(layer, jnp.int32).reshape(1),
        ref,
    )
    return new_x, sums, jax.freeze(ref)


def _add_norm_row(x_ref, parts_ref, scale_ref, x_out, normed, row, eps, splits):
    """One row of `fused_rows.add_norm`, by one warpgroup."""
    size = x_ref.shape[1]
    dtype = x_ref.dtype
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=next(n for n in (8, 4, 2, 1) if size % (128 * n) == 0))

    def load(ref, *where):
        return plgpu.load(ref.at[where], layout=layout).astype(jnp.float32)

    values = load(x_ref, row)
    added = load(parts_ref, 0, row)
    for split in range(1, splits):
        added += load(parts_ref, split, row)
    rounded = (values + added).astype(dtype)
    x_out[row] = rounded
    values = rounded.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(values * values) * (1 / size) + eps)
    values = (values * factor).astype(dtype).astype(jnp.float32)
    normed[row] = (values * plgpu.load(scale_ref, layout=layout).astype(jnp.float32)).astype(dtype)
