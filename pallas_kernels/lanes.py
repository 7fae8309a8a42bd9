"""Per-thread code inside a Mosaic GPU kernel.

Pallas' own operations work on arrays owned by a warpgroup. Copying rows named by a list, counting into a histogram and
compacting what was found need the thread's view instead: each thread its own address, its own predicate, a sum over
the lanes below it. ``plgpu.inline_mgpu`` is Pallas' door to that; this module is the small vocabulary that the kernels
of this package use behind it. A kernel is a plain function of a :class:`Lanes` and its references, so
:mod:`pallas_kernels.lanes_numpy` can run the very same function on the CPU, which is how the tests check its logic.

The vocabulary: one unsigned 32-bit word per thread (``Value``, with Python's operators, all of them unsigned; 64-bit
for addresses), one float32 number per thread (``Real``), predicates instead of branches, loops with the same bounds for
the whole thread block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm, nvvm

__all__ = ["Lanes", "Real", "Value", "launch"]

# The stubs of these two describe the generated operations, not the hand-written ones that replace them.
arith: Any = importlib.import_module("jaxlib.mlir.dialects.arith")
scf: Any = importlib.import_module("jaxlib.mlir.dialects.scf")


# The operands of `multiply_bytes` by number: sums, first and second factor, what is added to.
_FRAGMENTS = range(4), range(4, 8), range(8, 10), range(10, 14)


def _word() -> Any:
    return ir.IntegerType.get_signless(32)


def _wide() -> Any:
    return ir.IntegerType.get_signless(64)


class Value:
    """An unsigned integer (32 or 64 bits) or a predicate, one per thread. Plain Python integers mix in."""

    def __init__(self, value: Any):
        self.ir = value

    def _operand(self, other: Value | int) -> Any:
        if isinstance(other, Value):
            return other.ir
        bits = ir.IntegerType(self.ir.type).width
        return arith.constant(self.ir.type, other - (1 << bits) if other >= 1 << (bits - 1) else other)

    def __add__(self, other: Value | int) -> Value:
        return Value(arith.addi(self.ir, self._operand(other)))

    def __sub__(self, other: Value | int) -> Value:
        return Value(arith.subi(self.ir, self._operand(other)))

    def __mul__(self, other: Value | int) -> Value:
        return Value(arith.muli(self.ir, self._operand(other)))

    def __floordiv__(self, other: Value | int) -> Value:
        return Value(arith.divui(self.ir, self._operand(other)))

    def __mod__(self, other: Value | int) -> Value:
        return Value(arith.remui(self.ir, self._operand(other)))

    def __and__(self, other: Value | int) -> Value:
        return Value(arith.andi(self.ir, self._operand(other)))

    def __or__(self, other: Value | int) -> Value:
        return Value(arith.ori(self.ir, self._operand(other)))

    def __xor__(self, other: Value | int) -> Value:
        return Value(arith.xori(self.ir, self._operand(other)))

    def __invert__(self) -> Value:
        ones = -1 if ir.IntegerType(self.ir.type).width > 1 else 1
        return Value(arith.xori(self.ir, arith.constant(self.ir.type, ones)))

    def __lshift__(self, other: int) -> Value:
        return Value(arith.shli(self.ir, self._operand(other)))

    def __rshift__(self, other: int) -> Value:
        return Value(arith.shrui(self.ir, self._operand(other)))

    def _compare(self, predicate: Any, other: Value | int) -> Value:
        return Value(arith.cmpi(predicate, self.ir, self._operand(other)))

    def __lt__(self, other: Value | int) -> Value:
        return self._compare(arith.CmpIPredicate.ult, other)

    def __le__(self, other: Value | int) -> Value:
        return self._compare(arith.CmpIPredicate.ule, other)

    def __gt__(self, other: Value | int) -> Value:
        return self._compare(arith.CmpIPredicate.ugt, other)

    def __ge__(self, other: Value | int) -> Value:
        return self._compare(arith.CmpIPredicate.uge, other)

    def __eq__(self, other: Value | int) -> Value:  # type: ignore[override]
        return self._compare(arith.CmpIPredicate.eq, other)

    def __ne__(self, other: Value | int) -> Value:  # type: ignore[override]
        return self._compare(arith.CmpIPredicate.ne, other)

    __hash__ = None  # type: ignore[assignment]


class Real:
    """A float32 number, one per thread. Plain Python numbers mix in."""

    def __init__(self, value: Any):
        self.ir = value

    def _operand(self, other: Real | float) -> Any:
        return other.ir if isinstance(other, Real) else arith.constant(ir.F32Type.get(), float(other))

    def __add__(self, other: Real | float) -> Real:
        return Real(arith.addf(self.ir, self._operand(other)))

    def __sub__(self, other: Real | float) -> Real:
        return Real(arith.subf(self.ir, self._operand(other)))

    def __mul__(self, other: Real | float) -> Real:
        return Real(arith.mulf(self.ir, self._operand(other)))


class _Memory:
    """A reference as the address of its first byte: 64 bits wide in global memory, 32 in shared memory."""

    def __init__(self, address: Value, *, shared: bool):
        self.address, self.shared = address, shared

    @classmethod
    def of(cls, ref: Any) -> _Memory:
        shared = mgpu.utils.is_smem_ref(ref)
        pointer = mgpu.utils.memref_ptr(ref)
        return cls(Value(llvm.ptrtoint(_word() if shared else _wide(), pointer)), shared=shared)


class Lanes:
    """What a thread can do. All memory is addressed in 32-bit words, counted from the start of the reference.

    Global memory takes 32-bit or 64-bit indices: a row's start needs 64 bits, what is inside it seldom does.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self.thread = Value(mgpu.thread_idx())
        self.block = Value(arith.index_cast(_word(), gpu.block_id(gpu.Dimension.x)))
        self.blocks = Value(arith.index_cast(_word(), gpu.grid_dim(gpu.Dimension.x)))

    def constant(self, value: int) -> Value:
        return Value(arith.constant(_word(), value - (1 << 32) if value >= 1 << 31 else value))

    def wide(self, value: Value) -> Value:
        """A word as 64 bits, for global addresses."""
        return Value(arith.extui(_wide(), value.ir))

    def word(self, predicate: Value) -> Value:
        """A predicate as 0 or 1."""
        return Value(arith.extui(_word(), predicate.ir))

    def where(self, predicate: Value, a: Value, b: Value) -> Value:
        return Value(arith.select(predicate.ir, a.ir, b.ir))

    def choose(self, index: Value, memories: Sequence[_Memory]) -> _Memory:
        """The reference number ``index``, which must be below their number; all of one kind of memory."""
        chosen = Value(memories[0].address.ir)
        for i, memory in enumerate(memories[1:], 1):
            chosen = self.where(index == self.constant(i), memory.address, chosen)
        return _Memory(chosen, shared=memories[0].shared)

    def sign(self, value: Value) -> Value:
        """All ones where the highest bit is set, else 0."""
        return Value(arith.shrsi(value.ir, self.constant(31).ir))

    def ones(self, word: Value) -> Value:
        """How many bits are set."""
        return Value(llvm.inline_asm(_word(), [word.ir], "popc.b32 $0, $1;", "=r,r"))

    def minimum(self, a: Value, b: Value) -> Value:
        return Value(arith.minui(a.ir, b.ir))

    def real(self, bits: Value) -> Real:
        """The float32 number with these bits."""
        return Real(arith.bitcast(ir.F32Type.get(), bits.ir))

    def bits(self, number: Real) -> Value:
        return Value(arith.bitcast(_word(), number.ir))

    def rsqrt(self, number: Real) -> Real:
        """1 / sqrt, to about 2 units in the last place."""
        return Real(llvm.inline_asm(ir.F32Type.get(), [number.ir], "rsqrt.approx.f32 $0, $1;", "=f,f"))

    def divide(self, a: Real, b: Real) -> Real:
        """a / b, rounded to nearest."""
        return Real(llvm.inline_asm(ir.F32Type.get(), [a.ir, b.ir], "div.rn.f32 $0, $1, $2;", "=f,f,f"))

    def exp2(self, number: Real) -> Real:
        """2 to its power, to about 2 units in the last place."""
        return Real(llvm.inline_asm(ir.F32Type.get(), [number.ir], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))

    def log2(self, number: Real) -> Real:
        """The logarithm to base 2, to about 2**-22."""
        return Real(llvm.inline_asm(ir.F32Type.get(), [number.ir], "lg2.approx.ftz.f32 $0, $1;", "=f,f"))

    def multiply_add(self, a: Real, b: Real, c: Real) -> Real:
        """a * b + c, rounded once."""
        return Real(llvm.inline_asm(ir.F32Type.get(), [a.ir, b.ir, c.ir], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))

    def multiply_bytes(self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> tuple[Value, ...]:
        """A warp's product of signed bytes on the tensor cores, added to `c`: 16 x 32 by 32 x 8, sums of 32 bits.

        Thread 4 g + i of the warp has, as PTX's m16n8k32 lays it out, of the first factor rows g and g + 8, columns 4 i
        to 4 i + 3 of both, then columns 16 + 4 i to 16 + 4 i + 3 of both; of the second column g, the same rows in two
        words; of the sums columns 2 i and 2 i + 1 of row g, then of row g + 8. All threads of the warp must take part.
        """
        outs, first, second, old = ("{" + ", ".join(f"${i}" for i in r) + "}" for r in _FRAGMENTS)
        code = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {outs}, {first}, {second}, {old};"
        kind = llvm.StructType.get_literal([_word()] * 4)
        constraints = ",".join(["=r"] * 4 + ["r"] * 10)
        got: Any = llvm.inline_asm(kind, [v.ir for v in (*a, *b, *c)], code, constraints, has_side_effects=True)
        return tuple(Value(llvm.extractvalue(_word(), got, [i])) for i in range(4))

    def maximum(self, a: Real, b: Real) -> Real:
        """The greater number; of a number and NaN the number."""
        return Real(arith.maxnumf(a.ir, b.ir))

    def unpack(self, word: Value, dtype: Any) -> tuple[Real, Real]:
        """The two numbers of a 16-bit dtype in a word, the lower half first."""
        if dtype == jax.numpy.bfloat16:
            return self.real(word << 16), self.real(word & 0xFFFF0000)
        code = "{{ .reg .b16 h; .reg .b16 l; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {}; }}"
        low, high = (
            Real(llvm.inline_asm(ir.F32Type.get(), [word.ir], code.format(half), "=f,r")) for half in ("l", "h")
        )
        return low, high

    def pack(self, low: Real, high: Real, dtype: Any) -> Value:
        """Inverse of `unpack`, rounded to nearest, ties to even."""
        kind = "bf16x2" if dtype == jax.numpy.bfloat16 else "f16x2"
        return Value(llvm.inline_asm(_word(), [high.ir, low.ir], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f"))

    def at(self, memory: _Memory, index: Value) -> _Memory:
        """The memory from word ``index`` (64 bits for global memory) on."""
        return _Memory(memory.address + index * 4, shared=memory.shared)

    def clock(self) -> tuple[Value, Value]:
        """The device's nanoseconds, the lower 32 bits and the upper ones. How finely it ticks is its own choice."""
        code = "{ .reg .b64 now; mov.u64 now, %globaltimer; mov.b64 {$0, $1}, now; }"
        kind = llvm.StructType.get_literal([_word()] * 2)
        got: Any = llvm.inline_asm(kind, [], code, "=r,=r,~{memory}", has_side_effects=True)
        return Value(llvm.extractvalue(_word(), got, [0])), Value(llvm.extractvalue(_word(), got, [1]))

    def barrier(self) -> None:
        """All threads of the block meet, and see each other's shared memory."""
        gpu.barrier()

    def shuffle_up(self, value: Value, distance: int) -> Value:
        """The value of the lane ``distance`` below; a lane without one gets its own."""
        return self._shuffle(value, self.constant(distance), 0, nvvm.ShflKind.up)

    def shuffle(self, value: Value, lane: Value) -> Value:
        """The value of lane ``lane`` of the warp."""
        return self._shuffle(value, lane, 0x1F, nvvm.ShflKind.idx)

    def _shuffle(self, value: Value, offset: Value, clamp: int, kind: Any) -> Value:
        everyone = self.constant(0xFFFFFFFF)
        return Value(nvvm.shfl_sync(everyone.ir, value.ir, offset.ir, self.constant(clamp).ir, kind))

    def loop(
        self, start: Value, stop: Value, step: Value, carry: Sequence[Value], body: Callable[..., Sequence[Value]]
    ) -> tuple[Value, ...]:
        """``for i in range(start, stop, step): carry = body(i, *carry)``; bounds below 2**31, alike in the block."""
        op = scf.ForOp(start.ir, stop.ir, step.ir, [v.ir for v in carry])
        with ir.InsertionPoint(op.body):
            new = body(Value(op.induction_variable), *map(Value, op.inner_iter_args))
            scf.yield_([v.ir for v in new])
        return tuple(map(Value, op.results))

    def load(
        self, memory: _Memory, index: Value, words: int = 1, *, where: Value | None = None, hint: str = ""
    ) -> tuple[Value, ...]:
        """Reads 1, 2 or 4 words; 0 where the predicate is false. ``hint``: PTX cache qualifiers of a global load."""
        space = "shared" if memory.shared else "global"
        out = [f"${i}" for i in range(words)]
        vector = f".v{words}" if words > 1 else ""
        target = "{" + ", ".join(out) + "}" if words > 1 else out[0]
        code = f"ld.{space}{hint}{vector}.u32 {target}, [${words}];"
        if where is not None:
            zeros = " ".join(f"mov.u32 {o}, 0;" for o in out)
            code = f"{{ .reg .pred p; setp.ne.u32 p, ${words + 1}, 0; {zeros} @p {code} }}"
        result = _word() if words == 1 else llvm.StructType.get_literal([_word()] * words)
        got = self._asm(code, result, ["=&r"] * words, memory, index, where)
        if words == 1:
            return (Value(got),)
        return tuple(Value(llvm.extractvalue(_word(), got, [i])) for i in range(words))

    def store(self, memory: _Memory, index: Value, values: Sequence[Value], *, where: Value | None = None) -> None:
        """Writes 1, 2 or 4 words, where the predicate holds."""
        self._write("st", memory, index, values, where)

    def add(self, memory: _Memory, index: Value, value: Value, *, where: Value | None = None) -> None:
        """Adds a word atomically, where the predicate holds. A sum of integers does not depend on the order."""
        self._write("red.add", memory, index, [value], where)

    def unite(self, memory: _Memory, index: Value, bits: Value, *, where: Value | None = None) -> None:
        """Sets the word's bits that are set in ``bits``, atomically, where the predicate holds."""
        self._write("red.or", memory, index, [bits], where)

    def _write(self, op: str, memory: _Memory, index: Value, values: Sequence[Value], where: Value | None) -> None:
        space = "shared" if memory.shared else "global"
        first = 1 if where is None else 2
        source = [f"${i + first}" for i in range(len(values))]
        operand = source[0] if len(source) == 1 else "{" + ", ".join(source) + "}"
        op, _, kind = op.partition(".")
        vector = f".v{len(values)}" if len(values) > 1 else ""
        kind = {"": f"{vector}.u32", "add": ".add.u32", "or": ".or.b32"}[kind]
        code = f"{op}.{space}{kind} [$0], {operand};"
        if where is not None:
            code = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p {code} }}"
        self._asm(code, ir.Type.parse("!llvm.void"), [], memory, index, where, values)

    def _asm(
        self,
        code: str,
        result: Any,
        outputs: list[str],
        memory: _Memory,
        index: Value,
        where: Value | None,
        values: Sequence[Value] = (),
    ) -> Any:
        predicate = [] if where is None else [self.word(where)]
        if not memory.shared and index.ir.type == _word():
            index = self.wide(index)
        operands = [memory.address + index * 4, *predicate, *values]
        inputs = ["r" if memory.shared else "l", *("r" for _ in operands[1:])]
        constraints = ",".join([*outputs, *inputs, "~{memory}"])
        return llvm.inline_asm(result, [v.ir for v in operands], code, constraints, has_side_effects=True)


# In a shard_map that tracks which mesh axes a value varies over, Pallas takes arrays that vary but no such references.
# This primitive drops the mark from what becomes a reference; `launch` sets it again on all that comes back.
_unmarked_p = Primitive("herald_unmark_varying")


@_unmarked_p.def_abstract_eval
def _unmarked_abstract_eval(aval: Any) -> Any:
    return aval.update(manual_axis_type=type(aval.manual_axis_type)())


def _unmarked_lowering(ctx: Any, x: Any) -> list[Any]:
    del ctx
    return [x]


mlir.register_lowering(_unmarked_p, _unmarked_lowering)


def _varying(x: jax.Array) -> frozenset[Any]:
    """The mesh axes that ``x`` varies over, as far as the shard_map around it tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    blocks: int,
    threads: int,
    inputs: Sequence[jax.Array],
    updated: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    shared: Sequence[int] = (),
) -> list[jax.Array]:
    """Runs ``kernel(lanes, *inputs, *updated, *outputs, *shared)`` in ``blocks`` thread blocks.

    Args:
        name: the kernel's name in the lowered program and in profiles.
        threads: per block, a multiple of 128.
        inputs: arrays the kernel only reads.
        updated: arrays it changes in place; XLA aliases them to results, and copies first where the caller keeps them.
        outputs: shapes of new arrays; the kernel must write every element.
        shared: sizes, in words, of shared-memory buffers; their contents are undefined at the start.

    Returns:
        The updated arrays, then the outputs.
    """
    if threads % 128 or not 0 < threads <= 1024:
        raise ValueError(f"threads must be a multiple of 128 up to 1024, got {threads}")
    varying = frozenset[Any]().union(*map(_varying, [*inputs, *updated]))

    def body(*args: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(args))
        def per_thread(ctx: Any, *memrefs: Any) -> None:
            del ctx
            kernel(Lanes(threads), *map(_Memory.of, memrefs))

        per_thread(*args)

    run = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM((size,), jax.numpy.int32) for size in shared],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=threads // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
    )
    updated = [_unmarked_p.bind(x) if _varying(x) else x for x in updated]
    if not updated:
        results = list(run(*inputs))
    elif not outputs:
        # References that live in a scope of their own: free ones cannot be inside a `compute_on`.
        results = list(pl.run_state(lambda refs: run(*inputs, *refs))(tuple(updated)))
    else:
        refs = [jax.new_ref(x) for x in updated]
        made = run(*inputs, *refs)
        results = [jax.freeze(ref) for ref in refs] + list(made)
    return [jax.lax.pcast(x, tuple(varying), to="varying") for x in results] if varying else results
