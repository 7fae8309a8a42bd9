"""The vocabulary head's kernel on the card."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head import head_statistics

pytestmark = pytest.mark.gpu


# Tokens that fill no tile, one, one of 128 and two of them; words that do not fill the last program, and very many.
@pytest.mark.parametrize("tokens", [8, 64, 128, 200, 256])
@pytest.mark.parametrize(
    ("depth", "words", "dtype"), [(64, 136, "bfloat16"), (832, 5000, "float16"), (2048, 151936, "bfloat16")]
)
def test_statistics(tokens: int, depth: int, words: int, dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), (tokens, depth), dtype)
    w = 3 * depth**-0.5 * jax.random.normal(jax.random.key(1), (words, depth), dtype)
    run = jax.jit(functools.partial(head_statistics, implementation="mosaic_gpu"))
    got = run(x, w)
    for one, again in zip(got, run(x, w), strict=True):
        np.testing.assert_array_equal(one, again)
    plain = head_statistics(x.astype(jnp.float32), w.astype(jnp.float32), implementation="xla")
    assert np.mean(np.asarray(got.token == plain.token)) > 0.98  # words within the rounding of a sum may change places
    for one, other in zip(got[1:], plain[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    broken = run(x, w.at[words - 1, 0].set(jnp.nan))
    assert np.all(np.isnan(broken.total))
    assert np.all((broken.token >= 0) & (broken.token < words))
