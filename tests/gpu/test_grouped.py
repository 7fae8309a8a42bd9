"""grouped_mlp on the GPU: equal to a loop over tokens, to itself on a second run, and whatever else shares the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.moe import route
from pallas_kernels.grouped import grouped_mlp, lay_out
from pallas_kernels.grouped_mosaic import GroupedConfig
from tests.herald_jax.test_moe import LLADA2_MINI, SDAR_30B
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


@pytest.mark.parametrize("tokens", [1, 32, 500, 1500])
@pytest.mark.parametrize("config", [LLADA2_MINI, SDAR_30B], ids=["llada2_mini", "sdar_30b_a3b"])
def test_routing_and_layout(config, tokens):
    """The two kernels beside their plain forms on the same card."""
    logits = jax.random.normal(jax.random.key(tokens), (1, tokens, config.num_experts), jnp.float32)
    bias = jax.random.normal(jax.random.key(1), (config.num_experts,)) * 0.1 if config.expert_bias else None
    got = jax.jit(lambda x: route(x, config, bias, implementation="mosaic_gpu"))(logits)
    wanted = jax.jit(lambda x: route(x, config, bias, implementation="xla"))(logits)
    same = np.asarray(got[1] == wanted[1]).all(axis=-1)
    assert same.mean() > 0.99  # scores that differ in their last bits may change places
    np.testing.assert_allclose(np.asarray(got[0])[same], np.asarray(wanted[0])[same], rtol=1e-5)
    laid, plain = (
        jax.jit(lambda x, how=how: lay_out(x, config.num_experts, implementation=how))(got[1][0])
        for how in ("mosaic_gpu", "xla")
    )
    there = np.arange(laid.expert.size) < int(laid.items)
    for name in ("token", "row", "start", "filled", "items"):
        np.testing.assert_array_equal(getattr(laid, name), getattr(plain, name), err_msg=name)
    np.testing.assert_array_equal(np.asarray(laid.expert)[there], np.asarray(plain.expert)[there])


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
