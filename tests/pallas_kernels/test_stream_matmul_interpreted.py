"""The skinny matmul's kernel in JAX's interpreter of Mosaic GPU, on the CPU: its own code, on simulated memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch

pytestmark = [
    pytest.mark.skipif(
        dispatch.jax_version() < dispatch.MIN_JAX, reason="needs JAX 0.11: the interpreter of Mosaic GPU kernels"
    ),
    pytest.mark.slow,
]


@pytest.fixture
def kernel():
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels import stream_matmul_mosaic

    with plgpu.force_gpu_interpret_mode():
        yield stream_matmul_mosaic


# Tokens that do not fill their tile, and that do; columns that do not fill the last program; splits of unequal length
# and more steps than stages.
@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "config"), [(24, 320, 384, (2, 2, 2)), (64, 128, 128, (1, 1, 3))]
)
@pytest.mark.parametrize("gated", [False, True])
def test_kernel_in_the_interpreter(kernel, tokens, depth, columns, config, gated):
    config = kernel.MatmulConfig(*config)
    if gated:
        config = kernel.MatmulConfig(config.column_groups + 1, 1, config.stages)
    check(kernel, tokens, depth, columns, config, gated)


# More than 64 tokens: few and all of the second warpgroup's; with more than 128, one tile of it or two. Columns that
# the last program shares with the one before; halves of 96 and 160 columns. Programs of 128 of 256 tokens.
@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "config", "gated"),
    [
        (72, 320, 320, (192, 2, 3, 128), False),
        (72, 192, 192, (320, 1, 4, 128), True),
        (128, 128, 128, (128, 1, 2, 128), False),
        (120, 192, 160, (192, 1, 2, 128), True),
        (136, 320, 320, (192, 2, 3), False),
        (136, 192, 160, (192, 1, 2), True),
        (256, 192, 256, (128, 1, 3), False),
        (256, 320, 288, (256, 2, 4, 128), False),
        (256, 192, 192, (320, 1, 4, 128), True),
    ],
)
def test_many_tokens_in_the_interpreter(kernel, tokens, depth, columns, config, gated):
    from pallas_kernels import stream_matmul_wide

    check(stream_matmul_wide, tokens, depth, columns, stream_matmul_wide.WideConfig(*config), gated)


def check(kernel, tokens, depth, columns, config, gated):
    """The kernel's product of random numbers, beside one in float64."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(tokens, depth)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(depth, 2, columns) if gated else (depth, columns)) / depth**0.5, jnp.bfloat16)
    got = np.asarray(kernel.matmul(x, w, gated=gated, config=config), np.float64)
    product = np.einsum("te,e...->t...", np.asarray(x, np.float64), np.asarray(w, np.float64))
    if gated:
        wanted = np.asarray(jax.nn.silu(product[:, 0]) * product[:, 1])
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)
    else:
        assert got.shape == (config.splits, tokens, columns)
        np.testing.assert_allclose(got.sum(0), product, rtol=2e-2, atol=2e-2)
