"""What Pallas' Mosaic GPU language has no operation for, written one level lower. Nothing else imports MLIR."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector


def store_rows(ref, values, indices):
    """Stores one value per row of a wgmma tile wherever it belongs.

    ref: in GMEM, with as many axes as there are indices. values: `[64]` in the row layout, of the dtype of ref.
    indices: `i32[64]` each, in the row layout. Row r goes to ref[indices[0][r], indices[1][r], ...], or nowhere if the
      first of them is negative.

    Masked and scattered stores have no other form: an array can be sliced by 64 rows, not by one, and a detour through
    shared memory would move all 64.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), by_row, *([by_row] * len(indices))))
    def store(_, ref, values, *indices):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        # PTX's layout of an accumulator: each thread of a warp has a part of rows t / 4 and t / 4 + 8 of the warp's 16.
        for half, value in enumerate(values.registers.reshape(2)):
            rows = [_scalar(i.registers.reshape(2)[half]) for i in indices]
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, rows[0], utils.c(0, i32))):
                memref.store(_scalar(value), ref, [arith.index_cast(index, row) for row in rows])

    store(ref, values, *indices)


def store_rows_wide(ref, values, rows):
    """Stores rows of a wgmma tile 16 bytes at a time, their entries in another order.

    ref: in GMEM, `[m, n]`, each row 16-byte aligned; or, for values `[64]`, `[m]`.
    values: of ref's dtype: `[64, n]` in the WGMMA layout, 16 bits each, n a multiple of 32; or `[64]` in its row
      layout, 32 bits each.
    rows: `i32[64]` in the row layout. Row r goes to ref[rows[r]], or nowhere if that is negative.

    PTX's layout of an accumulator: thread t of a warp holds columns 8 j + 2 (t % 4) and the next, for every j. In that
    order a row takes four times as many store instructions, each of 4 bytes in four threads: half a sector of memory.
    So within 32 entries thread t of a row's four stores 2 t, 2 t + 1 and those 8, 16 and 24 further on together.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)
    layout = plgpu.Layout.WGMMA if values.ndim == 2 else by_row

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, by_row))
    def store(_, ref, values, rows):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        registers = values.registers.reshape(-1, 2)
        base = llvm.ptrtoint(i64, utils.memref_ptr(ref))
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        mine = arith.muli(arith.remui(thread, utils.c(4, i32)), utils.c(16, i32))
        for half in range(2):
            row = _scalar(rows.registers.reshape(2)[half])
            if len(values.shape) == 1:
                start = _offset(base, arith.muli(row, utils.c(4, i32)))
                _store_if(row, start, [utils.bitcast(_scalar(registers[0, half]), i32)])
                continue
            start = _offset(base, arith.addi(arith.muli(row, utils.c(2 * values.shape[1], i32)), mine))
            _store_if(row, start, [utils.bitcast(block[half], i32) for block in registers])

    store(ref, values, rows)


def _offset(base, offset):
    """An i64 address and an i32 offset, added."""
    return arith.addi(base, arith.extsi(ir.IntegerType.get_signless(64), offset))


def _store_if(condition, address, words):
    """Stores 1 word, or 4 at every 64th byte, from an i64 global address on where the i32 condition is not negative.

    A branch, not predicated stores: four words must lie in registers side by side, where the matmul that reads them too
    wants others, and only threads that store shall spend the moves.
    """
    names = [f"${i + 2}" for i in range(len(words))]
    if len(words) == 1:
        stores = f"st.global.b32 [$0], {names[0]};"
    else:
        fours = [", ".join(names[i : i + 4]) for i in range(0, len(names), 4)]
        stores = " ".join(f"st.global.v4.b32 [$0 + {64 * i}], {{{four}}};" for i, four in enumerate(fours))
    code = f"{{ .reg .pred p; setp.lt.s32 p, $1, 0; @p bra AFTER; {stores} AFTER: }}"
    constraints = ",".join(["l", *["r"] * (1 + len(words)), "~{memory}"])
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [address, condition, *words], code, constraints, has_side_effects=True)


def computed_here(never, *arrays):
    """Keeps the compiler from computing `arrays` later than here: behind a barrier, in another warpgroup's time.

    never: an i32 scalar that the compiler cannot know to be at least 0, but is.
    arrays: `[64, n]` in the WGMMA layout, 16 or 32 bits each.

    Nothing in PTX's language says so, and ptxas moves plain arithmetic behind a barrier to where its result is used.
    But what a branch may use has to be there before it: this one would store everything, and is never taken.
    """
    layouts = [plgpu.Layout.WGMMA] * len(arrays)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, *layouts))
    def use(_, never, *arrays):
        words = [word for array in arrays for word in _words(array)]
        stores = " ".join(f"st.volatile.shared.b32 [$0], ${i + 1};" for i in range(len(words)))
        code = f"{{ .reg .pred p; setp.ge.s32 p, $0, 0; @p bra.uni NEVER; {stores} NEVER: }}"
        constraints = ",".join(["r"] * (1 + len(words)))
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(
            nothing, [_scalar(never.registers.reshape(-1)[0]), *words], code, constraints, has_side_effects=True
        )

    use(never, *arrays)


def _words(array):
    """The registers of an array as i32 values."""
    i32 = ir.IntegerType.get_signless(32)
    for register in array.registers.reshape(-1):
        kind = ir.VectorType(register.type)
        count = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
        register = utils.bitcast(register, ir.VectorType.get((count,), i32))
        yield from (vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(count))


def _scalar(register):
    """The value of a register that holds one element."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
