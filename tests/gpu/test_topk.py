"""select_topk on the GPU: equal to the XLA form entry for entry, and to itself on a second run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.topk import TopkConfig, select_topk

pytestmark = pytest.mark.gpu

VALUES = {
    "softmax": lambda key, shape: jax.nn.softmax(3 * jax.random.normal(key, shape), axis=-1),
    "ties": lambda key, shape: jax.random.randint(key, shape, 0, 5).astype(jnp.float32),
    "all_equal": lambda key, shape: jnp.full(shape, 0.25, jnp.float32),
    "signed": lambda key, shape: jax.random.normal(key, shape),
    "any_bits": lambda key, shape: jax.random.bits(key, shape, jnp.uint32).view(jnp.float32),  # NaN and inf among them
    "zeros": lambda key, shape: jnp.where(jax.random.bernoulli(key, 0.5, shape), 0.0, -0.0),
}


@pytest.mark.parametrize("config", [None, TopkConfig(threads=128, unroll=1), TopkConfig(threads=512, parts=3)])
@pytest.mark.parametrize(("n", "capacity"), [(1, 1), (63, 5), (111, 200), (8191, 700), (65536, 3277), (131072, 16384)])
@pytest.mark.parametrize("case", VALUES)
def test_equals_the_xla_form(case, n, capacity, config):
    keys = jax.random.split(jax.random.key(n), 3)
    importance = VALUES[case](keys[0], (2, 3, n))
    counts = jax.random.randint(keys[1], (2, 3), -2, capacity + 3)
    lengths = jax.random.randint(keys[2], (2, 3), 0, n + 1).at[0, 0].set(n)
    want = select_topk(importance, counts, capacity, lengths=lengths, implementation="xla")
    got, again = (
        select_topk(importance, counts, capacity, lengths=lengths, implementation="mosaic_gpu", config=config)
        for _ in range(2)
    )
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(again, got)


def test_xla_form_breaks_ties_by_lowest_index_here_too():
    """The reference leans on ``lax.top_k``; where the GPU's were not stable, it would be no reference."""
    importance = jax.random.randint(jax.random.key(1), (4, 20000), 0, 7).astype(jnp.float32)
    got = np.asarray(select_topk(importance, 3000, 3000, implementation="xla"))
    for row, chosen in zip(np.asarray(importance), got, strict=True):
        np.testing.assert_array_equal(chosen, np.sort(np.argsort(-row, kind="stable")[:3000]))


def test_the_default_here_is_the_kernel():
    text = jax.jit(lambda x: select_topk(x, 5, 8)).lower(jnp.zeros((2, 999))).as_text()
    assert "custom_call @mosaic_gpu" in text
    assert "select_topk" in text
