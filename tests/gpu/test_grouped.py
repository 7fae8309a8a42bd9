"""grouped_mlp on the GPU: equal to a loop over tokens, to itself on a second run, and whatever else shares the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped import grouped_mlp
from pallas_kernels.grouped_mosaic import GroupedConfig
from tests.pallas_kernels.test_grouped import case, loop

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "config"),
    [("bfloat16", None), ("float16", None), ("bfloat16", GroupedConfig(2, 4)), ("bfloat16", GroupedConfig(1, 6))],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "crowd"),
    [((32, 8, 256, 512, 128), 0), ((1, 8, 64, 256, 64), 0), ((130, 4, 16, 256, 192), 100), ((600, 8, 32, 256, 128), 0)],
    ids=str,
)
def test_kernel(shape, crowd, config, dtype):
    """Few rows per expert; one token; an expert with several programs' rows; more pairs than are compared."""
    arguments = case(*shape, dtype, crowd)
    fn = jax.jit(lambda *a: grouped_mlp(*a, implementation="mosaic_gpu", configs=(config, config)))
    got, again = (np.asarray(fn(*arguments)) for _ in range(2))
    np.testing.assert_array_equal(got, again)
    wanted = loop(*arguments)
    error = np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))
    assert error < (8e-3 if dtype == "bfloat16" else 1e-3)
    assert np.abs(got - wanted).max() < 0.1


def test_rows_do_not_depend_on_each_other():
    x, chosen, gate_up, down = case(64, 8, 64, 512, 128, "bfloat16")
    together = grouped_mlp(x, chosen, gate_up, down, implementation="mosaic_gpu")
    for row in (0, 17, 63):
        part = slice(row, row + 1)
        alone = grouped_mlp(x[part], chosen[part], gate_up, down, implementation="mosaic_gpu")
        np.testing.assert_array_equal(alone[0], together[row])


def test_the_default_here_is_the_kernel():
    arguments = case(32, 4, 16, 256, 64, "bfloat16")
    text = jax.jit(grouped_mlp).lower(*arguments).as_text()
    assert "grouped_matmul_gated" in text
    assert "ragged_dot" not in text


def test_a_layer_of_llada2_mini_is_finite_and_right():
    """The published widths, 256 experts, one block; against XLA's own form on the same card."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (32, 2048), jnp.bfloat16)
    gate_up = jax.random.normal(keys[1], (256, 2048, 2, 512), jnp.bfloat16) * 2048**-0.5
    down = jax.random.normal(keys[2], (256, 512, 2048), jnp.bfloat16) * 512**-0.5
    chosen = jax.lax.top_k(jax.random.uniform(keys[3], (32, 256)), 8)[1]
    got = np.asarray(grouped_mlp(x, chosen, gate_up, down, implementation="mosaic_gpu"))
    wanted = np.asarray(grouped_mlp(x, chosen, gate_up, down, implementation="xla"))
    assert np.isfinite(got).all()
    assert np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)) < 8e-3
