"""Problems and tolerances shared by the CPU and GPU tests of block_attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.reference import attention_reference, importance_reference


class Case(NamedTuple):
    """One problem. lengths: one list per batch row, of as many lengths as there are runs of queries."""

    lengths: tuple[tuple[int, ...], ...]
    queries: int = 32
    kv_heads: int = 2
    group: int = 4
    entries: int = 704
    head_dim: int = 128
    dtype: str = "bfloat16"
    stacked: bool = False

    @property
    def id(self) -> str:
        lengths = "-".join(str(row[0]) for row in self.lengths)
        runs = f"q{len(self.lengths[0])}" if len(self.lengths[0]) > 1 else ""
        return (
            f"t{self.queries}k{self.kv_heads}g{self.group}n{self.entries}d{self.head_dim}-{lengths}{runs}-{self.dtype}"
        )


class Problem(NamedTuple):
    """Arrays of a case: q, the caches as passed (`cached_k`, `cached_v`), the layer's own K and V, and the lengths."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cached_k: jax.Array
    cached_v: jax.Array
    layer: int | None
    lengths: jax.Array


# Jitted: compiling them once is quicker than compiling each of their operations.
_attention = jax.jit(attention_reference)
_importance = jax.jit(importance_reference, static_argnames="reduce")


def make(case: Case, seed: int = 0) -> Problem:
    """Random arrays; every entry that no query sees, and every other layer of a stacked cache, is NaN."""
    rng = np.random.default_rng(seed)
    batch = len(case.lengths)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    q = normal(batch, case.queries, case.kv_heads * case.group, case.head_dim)
    shape = (batch, case.kv_heads, case.entries, case.head_dim)
    unseen = np.arange(case.entries)[None] >= np.max(case.lengths, axis=1)[:, None]
    k, v = (np.where(unseen[:, None, :, None], np.nan, normal(*shape)).astype(dtype) for _ in range(2))
    cached_k, cached_v, layer = k, v, None
    if case.stacked:
        other = np.full_like(k, np.nan)
        cached_k, cached_v, layer = np.stack([other, k, other]), np.stack([other, v, other]), 1
    q, k, v, cached_k, cached_v = (jnp.asarray(x) for x in (q, k, v, cached_k, cached_v))
    return Problem(q, k, v, cached_k, cached_v, layer, jnp.asarray(case.lengths, jnp.int32))


TOLERANCE = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 5e-3}  # RMS of the error over RMS of the reference


def assert_close(value, reference, dtype: str, *, scale: float = 1.0) -> None:
    """No NaN, RMS error within the dtype's tolerance (times `scale`), and no single value far out."""
    value, reference = np.asarray(value, np.float32), np.asarray(reference, np.float32)
    assert value.shape == reference.shape
    assert np.all(np.isfinite(value)), "NaN or infinity in the result"
    error, rms = value - reference, np.sqrt(np.mean(reference**2))
    limit = TOLERANCE[dtype] * scale * rms
    assert np.sqrt(np.mean(error**2)) <= limit
    assert np.max(np.abs(error), initial=0) <= 20 * limit


def check_output(result, problem: Problem, case: Case) -> None:
    """out and lse of `block_attention` against the float32 reference."""
    lengths = np.clip(problem.lengths, 0, case.entries)
    out, lse = _attention(problem.q, problem.k, problem.v, lengths)
    assert result.out.dtype == jnp.dtype(case.dtype)
    assert result.lse.dtype == jnp.float32
    assert_close(result.out, out, case.dtype)
    empty = np.isneginf(lse)
    np.testing.assert_array_equal(np.isneginf(result.lse), empty)
    np.testing.assert_array_equal(np.asarray(result.out, np.float32)[empty], 0)
    np.testing.assert_allclose(np.where(empty, 0, result.lse), np.where(empty, 0, lse), atol=2e-3)


def check_importance(weight, problem: Problem, rows, *, reduce: str, prefix=None, dtype: str = "float32") -> None:
    """Importance against the reference, its zeros, and for the mean its sum: 1 for every row that sees anything."""
    entries = problem.k.shape[2]
    lengths = np.clip(problem.lengths, 0, entries)
    if prefix is not None:
        lengths = np.minimum(lengths, np.asarray(prefix)[:, None])
    expected = _importance(problem.q, problem.k, lengths, rows, reduce=reduce)
    assert weight.dtype == jnp.float32
    assert_close(weight, expected, dtype, scale=4)
    past = np.arange(entries)[None, None] >= lengths[:, :, None]
    np.testing.assert_array_equal(np.where(past, weight, 0), 0)
    if reduce == "mean":
        counts = (lengths[:, 0] > 0) & np.asarray(rows).any(axis=1)
        total = np.broadcast_to(counts[:, None], weight.shape[:2])
        np.testing.assert_allclose(np.sum(weight, axis=2), total, atol=2e-3)


def check_pages(sums, problem: Problem, rows, *, over: str, page: int, prefix, dtype: str = "bfloat16") -> None:
    """Importance by page, the mean over `rows`, against sums of the reference below `prefix`."""
    entries = problem.k.shape[2]
    lengths = np.clip(problem.lengths, 0, entries)
    inside = np.minimum(lengths, np.asarray(prefix)[:, None])
    weight = np.array(_importance(problem.q, problem.k, inside if over == "prefix" else lengths, rows, reduce="mean"))
    weight[np.broadcast_to(np.arange(entries) >= inside[:, :, None], weight.shape)] = 0
    weight = np.pad(weight, ((0, 0), (0, 0), (0, -entries % page)))
    assert sums.dtype == jnp.float32
    assert_close(sums, weight.reshape(*weight.shape[:2], -1, page).sum(axis=-1), dtype)
