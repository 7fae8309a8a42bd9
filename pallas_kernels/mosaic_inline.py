"""What Pallas' Mosaic GPU language has no operation for, written one level lower. Nothing else imports MLIR."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector


def store_rows(ref, values, indices):
    """Stores a per-row array of a wgmma tile wherever its rows belong.

    ref: in GMEM, with as many axes as there are indices. values: `[64]` in the row layout of WGMMA, of ref's dtype.
    indices: `i32[64]` each, in that layout. Row r goes to ref[indices[0][r], ...], or nowhere if the first is negative.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), by_row, *([by_row] * len(indices))))
    def store(_, ref, values, *indices):
        for half in range(2):
            rows = [_row_register(i, half) for i in indices]
            with utils.when(_not_negative(rows[0])):
                memref.store(_row_register(values, half), ref, [arith.index_cast(ir.IndexType.get(), r) for r in rows])

    store(ref, values, *indices)


# PTX's layout of an accumulator: thread t of a warp holds columns 8 j + 2 (t % 4) and the next, for every j, of rows
# t / 4 and t / 4 + 8 of the warp's 16. A per-row array is held by the same threads. So the four threads of a row hold a
# run of 32 columns as 4 x 4 pairs, [j % 4][t % 4]; stored pair-transposed, each writes 16 bytes, and together two whole
# sectors of memory, where the plain order would take four times the stores and write half sectors.
_RUN = 32


def store_weights(ref, values, slots):
    """Stores chosen rows of a wgmma tile, and nothing for the other rows, each run of 32 columns pair-transposed.

    ref: `bf16[G, n]` in GMEM. values: `bf16[64, n]` in the WGMMA layout. slots: `i32[64]` in its row layout: row r goes
    to ref[slots[r]], or nowhere if that is negative. `store_in_order` undoes the transposition.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, by_row))
    def store(_, ref, values, slots):
        index = ir.IndexType.get()
        pairs = values.registers.reshape(values.shape[1] // 8, 2)
        lane = arith.remui(gpu.thread_id(gpu.Dimension.x), utils.c(4, index))
        for half in range(2):
            slot = _row_register(slots, half)
            with utils.when(_not_negative(slot)):
                row = arith.index_cast(index, slot)
                for run in range(values.shape[1] // _RUN):
                    four = [utils.bitcast(pairs[4 * run + i, half], ir.IntegerType.get_signless(32)) for i in range(4)]
                    packed = vector.from_elements(ir.VectorType.get((4,), four[0].type), four)
                    packed = vector.bitcast(ir.VectorType.get((8,), values.mlir_dtype), packed)
                    column = arith.addi(arith.muli(lane, utils.c(8, index)), utils.c(_RUN * run, index))
                    vector.store(packed, ref, [row, column])

    store(ref, values, slots)


def store_in_order(ref, values):
    """Stores `f32[128]`, one element per thread in the order of `store_weights`, into ref `f32[128]` in plain order."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_STRIDED((128,), vec_size=1)))
    def store(_, ref, values):
        index = ir.IndexType.get()

        def digit(divisor, base):
            return arith.remui(arith.divui(thread, utils.c(divisor, index)), utils.c(base, index))

        thread = arith.remui(gpu.thread_id(gpu.Dimension.x), utils.c(128, index))
        # run, pair's thread, pair's block, element -> run, block, thread, element
        column = digit(1, 2)
        for value, stride in ((digit(8, 4), 2), (digit(2, 4), 8), (digit(32, 4), 32)):
            column = arith.addi(column, arith.muli(value, utils.c(stride, index)))
        memref.store(_scalar(values.registers.reshape(1)[0]), ref, [column])

    store(ref, values)


def ordered_index(thread):
    """The plain position of the element that `store_in_order` takes from each thread; i32, any shape."""
    run, rest = thread // _RUN, thread % _RUN
    return run * _RUN + rest % 8 // 2 * 8 + rest // 8 * 2 + rest % 2


def _row_register(array, half):
    return _scalar(array.registers.reshape(2)[half])


def _not_negative(value):
    return arith.cmpi(arith.CmpIPredicate.sge, value, utils.c(0, ir.IntegerType.get_signless(32)))


def _scalar(register):
    """The value of a register that holds one element."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
