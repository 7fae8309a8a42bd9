"""What lies between the matmuls of a decoder layer, as per-thread kernels (`lanes`). Contracts: `fused_rows`.

Each is one launch over a few hundred kilobytes, so what counts is latency: every thread has all its loads in flight
together, and a sum over threads goes through shuffles and at most one barrier.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.warps import WARP, halves, merged

__all__ = ["Destination", "add_norm", "project_heads", "write_kv"]


@dataclasses.dataclass(frozen=True)
class Destination:
    """Where a block's K and V go: one layer of caches `[L, B, K, N, D]`.

    Attributes:
      k, v: the caches.
      layer: i32 scalar.
      start: i32[B], or a scalar that holds for all rows: the first slot written; the block must fit behind it.
      tokens: T, the length of the block.
      keep: bool[B, T] or None: which positions are written; the rest keep what their slots hold.
    """

    k: jax.Array
    v: jax.Array
    layer: jax.Array
    start: jax.Array
    tokens: int
    keep: jax.Array | None = None


jax.tree_util.register_dataclass(Destination, ["k", "v", "layer", "start", "keep"], ["tokens"])


def _launch(launch: Any) -> Any:
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    return launch


def _warp_sum(lanes: Any, value: Any, width: int = WARP) -> Any:
    """The sum over each run of `width` lanes, in all of them."""
    return merged(lanes, value, operator.add, halves(width))


def _load_reals(lanes: Any, memory: Any, index: Any, count: int, dtype: Any, where: Any) -> list[Any]:
    """`count` (4 or 8) numbers from element `index`, float32 or of a 16-bit dtype."""
    if jnp.dtype(dtype) == jnp.float32:
        words = [w for i in range(0, count, 4) for w in lanes.load(memory, index + i, 4, where=where)]
        return [lanes.real(w) for w in words]
    words = lanes.load(memory, index // 2, count // 2, where=where)
    return [half for word in words for half in lanes.unpack(word, dtype)]


def _round(lanes: Any, numbers: list[Any], dtype: Any) -> list[Any]:
    """The numbers as `dtype` holds them."""
    return [half for word in _pack(lanes, numbers, dtype) for half in lanes.unpack(word, dtype)]


def _pack(lanes: Any, numbers: list[Any], dtype: Any) -> list[Any]:
    return [lanes.pack(low, high, dtype) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]


def add_norm(
    x: jax.Array,
    parts: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    launch: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`fused_rows.add_norm`: x `[R, E]`, parts `[S, R, E]`."""
    rows, size = x.shape
    dtype = x.dtype
    splits, added_dtype = (0, dtype) if parts is None else (parts.shape[0], parts.dtype)
    chunks = size // 8
    threads = min(1024, -(-chunks // 128) * 128)
    per_thread = -(-chunks // threads)
    inputs = [x] + ([parts] if parts is not None else []) + [scale]

    def kernel(lanes: Any, x_ref: Any, *rest: Any) -> None:
        refs = list(rest)
        parts_ref = refs.pop(0) if splits else None
        scale_ref = refs.pop(0)
        out_ref = refs.pop(0) if splits else None
        normed_ref, shared = refs
        row = lanes.block
        held = []
        for i in range(per_thread):
            chunk = lanes.thread + i * threads
            inside = chunk < chunks
            at = row * size + chunk * 8
            values = _load_reals(lanes, x_ref, at, 8, dtype, inside)
            scales = _load_reals(lanes, scale_ref, chunk * 8, 8, dtype, inside)
            added = [_load_reals(lanes, parts_ref, at + s * rows * size, 8, added_dtype, inside) for s in range(splits)]
            held.append((at, inside, values, scales, added))
        total = lanes.real(lanes.constant(0))
        sums = []
        for at, inside, values, scales, added in held:
            if splits:
                for more in added[1:]:
                    added[0] = [a + b for a, b in zip(added[0], more, strict=True)]
                values = [a + b for a, b in zip(values, added[0], strict=True)]
                packed = _pack(lanes, values, dtype)
                lanes.store(out_ref, at // 2, packed, where=inside)
                values = [half for word in packed for half in lanes.unpack(word, dtype)]
            for value in values:
                total = total + value * value
            sums.append((at, inside, values, scales))
        total = _warp_sum(lanes, total)
        lane, warp = lanes.thread & (WARP - 1), lanes.thread // WARP
        lanes.store(shared, warp, [lanes.bits(total)], where=lane < 1)
        lanes.barrier()
        (word,) = lanes.load(shared, lanes.minimum(lane, lanes.constant(threads // WARP - 1)))
        word = lanes.where(lane < threads // WARP, word, lanes.constant(0))
        total = _warp_sum(lanes, lanes.real(word))
        factor = lanes.rsqrt(total * (1 / size) + eps)
        for at, inside, values, scales in sums:
            values = _round(lanes, [value * factor for value in values], dtype)
            values = [value * s for value, s in zip(values, scales, strict=True)]
            lanes.store(normed_ref, at // 2, _pack(lanes, values, dtype), where=inside)

    *out, normed = _launch(launch)(
        kernel,
        name="add_norm",
        blocks=rows,
        threads=threads,
        inputs=inputs,
        outputs=[jax.ShapeDtypeStruct(x.shape, dtype)] * (2 if splits else 1),
        shared=(threads // WARP,),
    )
    return (out[0] if splits else x), normed


def project_heads(
    parts: jax.Array,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    angles: tuple[jax.Array, jax.Array],
    *,
    group: int,
    eps: float,
    dtype: Any,
    dim: int,
    into: Destination | None = None,
    launch: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`fused_rows.project_heads`: parts `[S, R, K * (G + 2) * D]`, angles f32 `[R, D' // 2]` each; q `[R, K, G, D]`."""
    cos, sin = angles
    splits, rows, width = parts.shape
    half = cos.shape[-1]
    per_kv = group + 2
    heads = width // dim
    kv_heads = heads // per_kv
    lanes_per_head, lanes_turned = dim // 4, half // 2
    threads = 256
    inputs = [parts, cos, sin]
    inputs += [bias] if bias is not None else []
    inputs += [] if q_scale is None or k_scale is None else [q_scale, k_scale]
    inputs += [] if into is None else _destination_inputs(into)

    def kernel(lanes: Any, parts_ref: Any, cos_ref: Any, sin_ref: Any, *rest: Any) -> None:
        refs = list(rest)
        bias_ref = refs.pop(0) if bias is not None else None
        q_scale_ref, k_scale_ref = (refs.pop(0), refs.pop(0)) if q_scale is not None else (None, None)
        index = lanes.block * threads + lanes.thread
        head, piece = index // lanes_per_head, index % lanes_per_head
        inside = head < rows * heads
        row, number = head // heads, head % heads
        kv, member = number // per_kv, number % per_kv
        at = row * width + number * dim + piece * 4
        loaded = [_load_reals(lanes, parts_ref, at + s * rows * width, 4, parts.dtype, inside) for s in range(splits)]
        angle = row * half + (piece % (lanes_turned // 2)) * 4
        cosines = _load_reals(lanes, cos_ref, angle, 4, jnp.float32, inside)
        sines = _load_reals(lanes, sin_ref, angle, 4, jnp.float32, inside)
        extra = None if bias is None else _load_reals(lanes, bias_ref, number * dim + piece * 4, 4, dtype, inside)
        is_q, is_v = member < group, member == group + 1
        if q_scale is not None:
            q_by = _load_reals(lanes, q_scale_ref, piece * 4, 4, dtype, inside)
            k_by = _load_reals(lanes, k_scale_ref, piece * 4, 4, dtype, inside)
        values = loaded[0]
        for more in loaded[1:]:
            values = [a + b for a, b in zip(values, more, strict=True)]
        values = _round(lanes, values, dtype)
        if extra is not None:
            values = _round(lanes, [a + b for a, b in zip(values, extra, strict=True)], dtype)
        plain = _pack(lanes, values, dtype)
        if q_scale is not None:
            total = values[0] * values[0]
            for value in values[1:]:
                total = total + value * value
            factor = lanes.rsqrt(_warp_sum(lanes, total, lanes_per_head) * (1 / dim) + eps)
            values = _round(lanes, [value * factor for value in values], dtype)
            by = [lanes.real(lanes.where(is_q, lanes.bits(a), lanes.bits(b))) for a, b in zip(q_by, k_by, strict=True)]
            values = _round(lanes, [value * b for value, b in zip(values, by, strict=True)], dtype)
        # The other half of what is turned is half its lanes away.
        lane = lanes.thread & (WARP - 1)
        others = [lanes.real(lanes.shuffle(lanes.bits(v), lane ^ (lanes_turned // 2))) for v in values]
        first = piece < lanes_turned // 2
        turned = []
        for value, other, c, s in zip(values, others, cosines, sines, strict=True):
            product = lanes.bits(other * s)
            product = lanes.where(first, product ^ 0x80000000, product)
            number = value * c + lanes.real(product)
            if lanes_turned < lanes_per_head:
                number = lanes.real(lanes.where(piece < lanes_turned, lanes.bits(number), lanes.bits(value)))
            turned.append(number)
        packed = [lanes.where(is_v, a, b) for a, b in zip(plain, _pack(lanes, turned, dtype), strict=True)]
        q_out = ((row * kv_heads + kv) * group + member) * dim + piece * 4
        if into is None:
            q_ref, k_ref, v_ref = refs
            kv_out, written = lanes.wide((row * kv_heads + kv) * dim), inside
        else:
            *slot_refs, k_ref, v_ref, q_ref = refs
            slot, written = _slot(lanes, into, slot_refs, row, kv, inside)
            kv_out = slot * dim
        kv_out = (kv_out + lanes.wide(piece * 4)) // 2
        lanes.store(q_ref, q_out // 2, packed, where=inside & is_q)
        lanes.store(k_ref, kv_out, packed, where=written & (member == group))
        lanes.store(v_ref, kv_out, packed, where=written & is_v)

    of = jax.ShapeDtypeStruct
    outputs = [of((rows, kv_heads, group, dim), dtype)]
    outputs += [of((rows, kv_heads, dim), dtype)] * 2 if into is None else []
    results = _launch(launch)(
        kernel,
        name="project_heads",
        blocks=-(-rows * heads * lanes_per_head // threads),
        threads=threads,
        inputs=inputs,
        updated=[] if into is None else [into.k, into.v],
        outputs=outputs,
    )
    if into is None:
        return tuple(results)
    k_cache, v_cache, q = results
    return q, k_cache, v_cache


def _destination_inputs(into: Destination) -> list[jax.Array]:
    layer, start = jnp.asarray(into.layer, jnp.int32).reshape(1), into.start.astype(jnp.int32).reshape(-1)
    return [layer, start] + ([] if into.keep is None else [into.keep.astype(jnp.int32)])


def _slot(lanes: Any, into: Destination, refs: Any, token_row: Any, head: Any, inside: Any) -> tuple[Any, Any]:
    """Which row of `[L * B * K * N]` the entry of a token (of `[B, T]`) and head goes to, and whether it goes there."""
    layer_ref, start_ref, *keep_ref = refs
    _, batch, heads, slots, _ = into.k.shape
    row = token_row // into.tokens
    (layer,) = lanes.load(layer_ref, lanes.constant(0))
    (first,) = lanes.load(start_ref, row if into.start.size > 1 else lanes.constant(0), where=inside)
    slot = first + token_row % into.tokens
    wanted = inside & (slot < slots)  # unsigned: a negative slot is far outside
    if keep_ref:
        (kept,) = lanes.load(keep_ref[0], token_row, where=inside)
        wanted = wanted & (kept > 0)
    pair = (lanes.wide(layer) * batch + lanes.wide(row)) * heads + lanes.wide(head)
    return pair * slots + lanes.wide(slot), wanted


def write_kv(k: jax.Array, v: jax.Array, into: Destination, *, launch: Any = None) -> tuple[jax.Array, jax.Array]:
    """`fused_rows.write_kv`: k, v `[B, T, K, D]`."""
    batch, tokens, heads, dim = k.shape
    chunks = dim * k.dtype.itemsize // 16
    threads = 256
    work = batch * tokens * heads * chunks

    def kernel(lanes: Any, k_ref: Any, v_ref: Any, *rest: Any) -> None:
        *refs, k_out, v_out = rest
        index = lanes.block * threads + lanes.thread
        row, chunk = index // chunks, index % chunks
        slot, wanted = _slot(lanes, into, refs, row // heads, row % heads, index < work)
        source = lanes.wide(index) * 4
        target = slot * (chunks * 4) + lanes.wide(chunk) * 4
        new_k = lanes.load(k_ref, source, 4, where=wanted)
        new_v = lanes.load(v_ref, source, 4, where=wanted)
        lanes.store(k_out, target, new_k, where=wanted)
        lanes.store(v_out, target, new_v, where=wanted)

    k_cache, v_cache = _launch(launch)(
        kernel,
        name="write_kv",
        blocks=-(-work // threads),
        threads=threads,
        inputs=[k, v, *_destination_inputs(into)],
        updated=[into.k, into.v],
    )
    return k_cache, v_cache
