"""What Pallas' Mosaic GPU language has no operation for, written one level lower. Nothing else imports MLIR."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector


def store_rows(values_ref, tops_ref, values, tops, slots):
    """Stores chosen rows of a wgmma tile, each thread the elements it holds, and nothing for the other rows.

    values_ref: `[G, n]` in GMEM; values: `[64, n]` in the WGMMA layout, of the same 16-bit dtype.
    tops_ref: `f32[G]` in GMEM; tops: `f32[64]`, one per row.
    slots: `i32[64]`: row r goes to slot slots[r] of both, or nowhere if that is negative.

    A masked store has no other form: an array can be sliced by 64 rows, not by one, and a detour through shared memory
    would move all 64.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA, by_row, by_row))
    def store(_, values_ref, tops_ref, values, tops, slots):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        # PTX's layout of an accumulator: thread t of a warp holds columns 8 j + 2 (t % 4) and the next, for every j, of
        # rows t / 4 and t / 4 + 8 of the warp's 16. A per-row array is held by the same threads.
        thread = gpu.thread_id(gpu.Dimension.x)
        column = arith.muli(arith.remui(thread, utils.c(4, index)), utils.c(2, index))
        blocks = values.shape[1] // 8
        by_block = values.registers.reshape(blocks, 2)
        for half, (slot, top) in enumerate(zip(slots.registers.flat, tops.registers.flat, strict=True)):
            slot, top = _scalar(slot), _scalar(top)
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, slot, utils.c(0, i32))):
                row = arith.index_cast(index, slot)
                for j in range(blocks):
                    where = [row, arith.addi(column, utils.c(8 * j, index))]
                    vector.store(by_block[j, half], values_ref, where)
                memref.store(top, tops_ref, [row])

    store(values_ref, tops_ref, values, tops, slots)


def _scalar(register):
    """The value of a register that holds one element."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
