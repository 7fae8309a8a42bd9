"""What Pallas' Mosaic GPU language has no operation for, written one level lower. Nothing else imports MLIR."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector


def store_rows(ref, values, indices):
    """Stores rows of a wgmma tile wherever they belong, each thread the elements it holds.

    ref: in GMEM, `[..., n]` with as many leading axes as there are indices; or, for values `[64]`, without the n.
    values: `[64, n]` in the WGMMA layout, of a 16-bit dtype, or `[64]` in its row layout; of the dtype of ref.
    indices: `i32[64]` each, in the row layout. Row r goes to ref[indices[0][r], indices[1][r], ...], or nowhere if the
      first of them is negative.

    Masked and scattered stores have no other form: an array can be sliced by 64 rows, not by one, and a detour through
    shared memory would move all 64.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else by_row

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *([by_row] * len(indices))))
    def store(_, ref, values, *indices):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        # PTX's layout of an accumulator: thread t of a warp holds columns 8 j + 2 (t % 4) and the next, for every j, of
        # rows t / 4 and t / 4 + 8 of the warp's 16. A per-row array is held by the same threads.
        blocks = values.registers.reshape(-1, 2)
        thread = gpu.thread_id(gpu.Dimension.x)
        column = arith.muli(arith.remui(thread, utils.c(4, index)), utils.c(2, index))
        for half in range(2):
            rows = [_scalar(i.registers.reshape(2)[half]) for i in indices]
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, rows[0], utils.c(0, i32))):
                rows = [arith.index_cast(index, row) for row in rows]
                if len(values.shape) == 1:
                    memref.store(_scalar(blocks[0, half]), ref, rows)
                    continue
                for j, block in enumerate(blocks):
                    vector.store(block[half], ref, [*rows, arith.addi(column, utils.c(8 * j, index))])

    store(ref, values, *indices)


def _scalar(register):
    """The value of a register that holds one element."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
