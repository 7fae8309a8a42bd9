"""The kernels between the matmuls: their own code in NumPy, beside the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fused_rows, fused_rows_kernel, lanes_numpy


def arrays(rng, *shapes, dtype=jnp.bfloat16):
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def close(got, wanted, dtype):
    for g, w in zip(got, wanted, strict=True):
        tolerance = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=tolerance, atol=tolerance)


# A row that is one round of the threads' chunks and one that takes two rounds and a part; sums and no sums.
@pytest.mark.parametrize(
    ("size", "splits", "dtype"), [(72, 3, "bfloat16"), (8200, 1, "float16"), (1024, 0, "bfloat16")]
)
def test_add_norm_kernel_in_numpy(size, splits, dtype):
    rng = np.random.default_rng(size)
    x, scale = arrays(rng, (3, size), (size,), dtype=dtype)
    parts = jnp.asarray(rng.normal(size=(splits, 3, size)), jnp.float32 if splits != 1 else dtype) if splits else None
    got = fused_rows_kernel.add_norm(x, parts, scale, eps=1e-6, launch=lanes_numpy.launch)
    wanted = fused_rows.add_norm(x, parts, scale, eps=1e-6, implementation="xla")
    close(got, wanted, dtype)


@pytest.mark.parametrize(
    ("dim", "turned", "group", "splits", "bias", "norm", "dtype", "cached"),
    [
        (128, 128, 3, 2, False, True, "bfloat16", True),
        (64, 64, 1, 1, True, False, "float16", False),
        (128, 64, 2, 1, False, True, "bfloat16", False),
    ],
)
def test_project_heads_kernel_in_numpy(dim, turned, group, splits, bias, norm, dtype, cached):
    rng = np.random.default_rng(dim)
    rows, width = 6, 2 * (group + 2) * dim
    (parts,) = arrays(rng, (splits, rows, width), dtype=jnp.float32)
    cos, sin = arrays(rng, (rows, turned // 2), (rows, turned // 2), dtype=jnp.float32)
    extra, q_scale, k_scale = arrays(rng, (width,), (dim,), (dim,), dtype=dtype)
    args = (parts, extra if bias else None, q_scale if norm else None, k_scale if norm else None, (cos, sin))
    options = {"group": group, "eps": 1e-6, "dtype": jnp.dtype(dtype)}
    if cached:
        caches = arrays(rng, *[(3, 2, 2, 16, dim)] * 2, dtype=dtype)
        keep = jnp.asarray([[True, True, False], [False, True, True]])
        options["into"] = fused_rows.Destination(*caches, jnp.int32(2), jnp.asarray([4, 9], jnp.int32), 3, keep)
    got = fused_rows_kernel.project_heads(*args, **options, dim=dim, launch=lanes_numpy.launch)
    wanted = fused_rows.project_heads(*args, **options, head_dim=dim, implementation="xla")
    assert [x.shape for x in wanted] == [(rows, 2, group, dim)] + [(3, 2, 2, 16, dim) if cached else (rows, 2, dim)] * 2
    # One rounding of a number that is then turned: a unit of the largest, not of each.
    for g, w in zip(got, wanted, strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert np.abs(g - w).max() <= 2 * float(jnp.finfo(dtype).eps) * np.abs(w).max()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("start", [[3], [0, 9], 4])
def test_write_kv_kernel_in_numpy(keep, start):
    rng = np.random.default_rng(0)
    start = jnp.asarray(start, jnp.int32)
    batch = start.shape[0] if start.ndim else 2
    k, v, k_cache, v_cache = arrays(rng, *[(batch, 5, 2, 8)] * 2, *[(3, batch, 2, 16, 8)] * 2)
    kept = jnp.asarray(rng.random((batch, 5)) < 0.5) if keep else None
    into = fused_rows.Destination(k_cache, v_cache, jnp.int32(1), start, 5, kept)
    got = fused_rows_kernel.write_kv(k, v, into, launch=lanes_numpy.launch)
    wanted = fused_rows.write_kv(k, v, into, implementation="xla")
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def test_what_does_not_fit_is_refused():
    x, scale = jnp.zeros((4, 64)), jnp.ones((64,))
    with pytest.raises(ValueError, match=r"add_norm takes x \[R, E\]"):
        fused_rows.add_norm(x, jnp.zeros((2, 4, 32)), scale, eps=1e-6)
    with pytest.raises(ValueError, match="project_heads takes parts"):
        fused_rows.project_heads(
            jnp.zeros((1, 4, 100)), None, None, None, (x[:, :8], x[:, :8]), group=2, eps=1e-6, dtype="float32"
        )
    cache = jnp.zeros((1, 2, 2, 16, 8))
    into = fused_rows.Destination(cache, cache, jnp.int32(0), jnp.int32(0), 4)
    with pytest.raises(ValueError, match="write_kv takes k, v"):
        fused_rows.write_kv(jnp.zeros((2, 4, 2, 4)), jnp.zeros((2, 4, 2, 4)), into)
