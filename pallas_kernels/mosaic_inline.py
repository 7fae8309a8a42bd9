"""What Pallas' Mosaic GPU language has no operation for, written one level lower. Nothing else imports MLIR."""

from __future__ import annotations

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

MEETING = 8  # of a block's 16 named barriers that of `meet`; the first ones are Mosaic's own


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


def pair_sums(values):
    """Sums of every thread's two neighbouring columns: f32 `[64, n]` to `[64, n / 2]`, in the WGMMA layout.

    PTX's layout of an accumulator: thread c of a quad holds columns 8 j + 2 c and the next, for every j. Its sums of
    j = 2 i and 2 i + 1 become its columns 8 i + 2 c and the next. A row keeps its sum.
    """
    shape = (values.shape[0], values.shape[1] // 2)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, values.dtype, layout=plgpu.Layout.WGMMA),
    )
    def run(_, values):
        rows = values.registers.reshape(-1, 2, 2)  # i, which of its two j, which of the thread's two rows
        kind = values.registers.reshape(-1)[0].type
        sums = np.empty((len(rows), 2), object)
        for i, half in np.ndindex(sums.shape):
            pairs = [arith.addf(*(_element(pair, column) for column in range(2))) for pair in rows[i, :, half]]
            sums[i, half] = vector.from_elements(kind, pairs)
        registers = sums.reshape(values.layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return run(values)


def store_page_sums(sums_ref, tops_ref, pairs, tops, store):
    """Stores sums of 8 neighbouring columns of a wgmma tile, and one number per row beside them.

    sums_ref: in GMEM, bfloat16 `[64, n / 8]`, contiguous. tops_ref: in GMEM, f32 `[64]`. pairs: `pair_sums` of f32
    `[64, n]`, n a multiple of 64. tops: f32 `[64]` in its row layout. store: an i32 scalar, negative for nothing.

    A quad of threads shares the sums of a row by exchanging halves: of n / 8 sums each thread sends half away and keeps
    half, then half of those, and is left with a quarter, finished. They are bfloat16 by then, two to a word: each sum
    is rounded three times instead of once, which takes half the instructions.

    All of it is behind a branch, with nothing on its other side. Where a matmul has been asked for, this can run beside
    it; but ptxas takes all that lies between two branches for one piece, and of a matmul asks for the first part, does
    everything else, and only then asks for the other parts.
    """
    layouts = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *layouts))
    def run(_, sums_ref, tops_ref, pairs, tops, store):
        i32 = ir.IntegerType.get_signless(32)
        condition = _scalar(store.registers.reshape(-1)[0])
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, condition, utils.c(0, i32))):
            _store_page_sums(sums_ref, tops_ref, pairs.registers.reshape(-1, 2), tops.registers.reshape(2))

    run(sums_ref, tops_ref, pairs, tops, store)


def _store_page_sums(sums_ref, tops_ref, pairs, tops):
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    thread = arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), utils.c(128, i32))
    quad = arith.remui(thread, utils.c(4, i32))
    # A warp has 16 rows; a thread part of rows t / 4 and t / 4 + 8 of them.
    row = arith.addi(
        arith.muli(arith.divui(thread, utils.c(32, i32)), utils.c(16, i32)),
        arith.divui(arith.remui(thread, utils.c(32, i32)), utils.c(4, i32)),
    )
    base = llvm.ptrtoint(i64, utils.memref_ptr(sums_ref))
    for half in range(2):
        held = [_packed(*(_element(pair, i) for i in range(2))) for pair in pairs[:, half]]
        words = len(held)
        for distance in (2, 1):
            shift = utils.c(distance, i32)
            upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad, shift), utils.c(0, i32))
            held = [
                _added(arith.select(upper, b, a), utils.shfl_bfly(arith.select(upper, a, b), shift))
                for a, b in zip(held[: len(held) // 2], held[len(held) // 2 :], strict=True)
            ]
        here = arith.addi(row, utils.c(8 * half, i32))
        at = arith.addi(arith.muli(here, utils.c(4 * words, i32)), arith.muli(quad, utils.c(words, i32)))
        _store(_offset(base, at), held)
    # Two threads of a quad store its two rows' numbers.
    first = arith.cmpi(arith.CmpIPredicate.eq, quad, utils.c(0, i32))
    at = arith.addi(row, arith.select(first, utils.c(0, i32), utils.c(8, i32)))
    word = arith.select(first, *(utils.bitcast(_scalar(top), i32) for top in tops))
    base = llvm.ptrtoint(i64, utils.memref_ptr(tops_ref))
    mine = arith.cmpi(arith.CmpIPredicate.ult, quad, utils.c(2, i32))
    _store(_offset(base, arith.muli(at, utils.c(4, i32))), [word], mine)


def _packed(low, high):
    """Two f32 as the bfloat16 halves of an i32."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")


def _added(a, b):
    """Sums of the bfloat16 halves of two i32."""
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [a, b], "add.rn.bf16x2 $0, $1, $2;", "=r,r,r")


def _store(address, words, where=None):
    """Stores 1, 2 or 4 words at an i64 global address; only where the predicate holds, if there is one."""
    condition = [] if where is None else [arith.extui(ir.IntegerType.get_signless(32), where)]
    names = [f"${i + 1}" for i in range(len(words))]
    width, what = ("", names[0]) if len(words) == 1 else (f".v{len(words)}", "{" + ", ".join(names) + "}")
    code = f"st.global{width}.b32 [$0], {what};"
    if condition:
        code = f"{{ .reg .pred p; setp.ne.u32 p, ${len(words) + 1}, 0; @p {code} }}"
    operands = [address, *words, *condition]
    constraints = ",".join(["l", *["r"] * (len(operands) - 1), "~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)


def _offset(base, offset):
    """An i64 address and an i32 offset, added."""
    return arith.addi(base, arith.extsi(ir.IntegerType.get_signless(64), offset))


def _store_if(condition, address, words):
    """Stores 1 word, or 4 at every 64th byte, from an i64 global address on where the i32 condition is not negative.

    A branch, not predicated stores: four words must lie in registers side by side, where the matmul that reads them too
    wants others, and only warps that store shall spend the moves. A warp's threads meet behind it, without which ptxas
    makes predicates of it all the same, and puts everything before a matmul that it was to run beside.
    """
    names = [f"${i + 2}" for i in range(len(words))]
    if len(words) == 1:
        stores = f"@p st.global.b32 [$0], {names[0]};"
    else:
        fours = [", ".join(names[i : i + 4]) for i in range(0, len(names), 4)]
        stores = " ".join(f"@p st.global.v4.b32 [$0 + {64 * i}], {{{four}}};" for i, four in enumerate(fours))
    everyone = "0xffffffff"
    some = f"setp.ge.s32 p, $1, 0; vote.sync.any.pred q, p, {everyone}; @!q bra.uni AFTER;"
    code = f"{{ .reg .pred p; .reg .pred q; {some} bar.warp.sync {everyone}; {stores} AFTER: }}"
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


def meet():
    """Waits until a second warpgroup is here, too.

    A named barrier: two of these take some 120 cycles less than two turns at a barrier in shared memory, at which every
    thread of both arrives and then looks for itself.
    """

    @plgpu.inline_mgpu(arg_types=())
    def run(_):
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, [], f"bar.sync {MEETING}, 256;", "~{memory}", has_side_effects=True)

    run()


def _words(array):
    """The registers of an array as i32 values."""
    i32 = ir.IntegerType.get_signless(32)
    for register in array.registers.reshape(-1):
        kind = ir.VectorType(register.type)
        count = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
        register = utils.bitcast(register, ir.VectorType.get((count,), i32))
        yield from (vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(count))


def _element(register, i):
    """Element i of a register that holds a vector."""
    return vector.extract(register, dynamic_position=[], static_position=[i])


def _scalar(register):
    """The value of a register that holds one element."""
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, dynamic_position=[], static_position=[0])
    return register
