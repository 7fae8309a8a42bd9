"""Tokens to their experts' rows and back, as per-thread kernels (`lanes`): what surrounds the grouped matmuls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["combine", "spread"]

_THREADS = 256
_AT_ONCE = 4  # copies of 16 bytes in flight per thread


def _launch(launch: Any) -> Any:
    if launch is None:
        from pallas_kernels import lanes  # Mosaic GPU is imported only where a kernel is built

        launch = lanes.launch
    return launch


def spread(x: jax.Array, token: jax.Array, *, launch: Any = None) -> jax.Array:
    """`x[token]`: x `[T, E]` of a 16-bit dtype, E a multiple of 8; token i32[R]."""
    rows, chunks = token.shape[0], x.shape[1] // 8
    total = rows * chunks
    blocks = -(-total // (_THREADS * _AT_ONCE))

    def kernel(lanes: Any, x_ref: Any, token_ref: Any, out_ref: Any) -> None:
        places = []
        for turn in range(_AT_ONCE):
            index = (lanes.block + turn * blocks) * _THREADS + lanes.thread
            inside = index < total
            (source,) = lanes.load(token_ref, index // chunks, where=inside)
            places.append((index, inside, source))
        copies = [
            (index, inside, lanes.load(x_ref, (source * chunks + index % chunks) * 4, 4, where=inside))
            for index, inside, source in places
        ]
        for index, inside, words in copies:
            lanes.store(out_ref, index * 4, words, where=inside)

    [out] = _launch(launch)(
        kernel,
        name="spread_rows",
        blocks=blocks,
        threads=_THREADS,
        inputs=[x, token],
        outputs=[jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype)],
    )
    return out


def combine(
    out: jax.Array, row: jax.Array, weights: jax.Array, extra: jax.Array | None, *, dtype: Any, launch: Any = None
) -> jax.Array:
    """`sum_j weights[t, j] * out[row[t, j]] + sum_s extra[s, t]` of every token t, in float32 and rounded once.

    out: `[R, E]` of a 16-bit dtype, E a multiple of 8. row: i32[T * k]; weights: f32[T, k]. extra: `[S, T, E]` of out's
    dtype, or None. Returns `[T, E]` of `dtype`: float32 or out's.
    """
    (tokens, k), chunks = weights.shape, out.shape[1] // 8
    splits = 0 if extra is None else extra.shape[0]
    total = tokens * chunks
    wide = jnp.dtype(dtype) == jnp.float32

    def kernel(lanes: Any, out_ref: Any, row_ref: Any, weights_ref: Any, *rest: Any) -> None:
        *extra_ref, result_ref = rest
        index = lanes.block * _THREADS + lanes.thread
        inside = index < total
        token, chunk = index // chunks, index % chunks
        pairs = [token * k + j for j in range(k)]
        rows = [lanes.load(row_ref, pair, where=inside)[0] for pair in pairs]
        by = [lanes.real(lanes.load(weights_ref, pair, where=inside)[0]) for pair in pairs]
        found = [lanes.load(out_ref, (r * chunks + chunk) * 4, 4, where=inside) for r in rows]
        added = [lanes.load(extra_ref[0], (index + s * total) * 4, 4, where=inside) for s in range(splits)]
        sums: list[Any] = []
        for words, weight in zip(found, by, strict=True):
            numbers = [number * weight for word in words for number in lanes.unpack(word, out.dtype)]
            sums = [a + b for a, b in zip(sums, numbers, strict=True)] if sums else numbers
        for words in added:
            numbers = [number for word in words for number in lanes.unpack(word, out.dtype)]
            sums = [a + b for a, b in zip(sums, numbers, strict=True)]
        if wide:
            bits = [lanes.bits(number) for number in sums]
            lanes.store(result_ref, index * 8, bits[:4], where=inside)
            lanes.store(result_ref, index * 8 + 4, bits[4:], where=inside)
        else:
            packed = [lanes.pack(low, high, out.dtype) for low, high in zip(sums[::2], sums[1::2], strict=True)]
            lanes.store(result_ref, index * 4, packed, where=inside)

    [result] = _launch(launch)(
        kernel,
        name="combine_rows",
        blocks=-(-total // _THREADS),
        threads=_THREADS,
        inputs=[out, row, weights] + ([] if extra is None else [extra]),
        outputs=[jax.ShapeDtypeStruct((tokens, out.shape[1]), dtype)],
    )
    return result
