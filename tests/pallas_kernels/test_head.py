"""The vocabulary head's statistics: plain, which shapes have a kernel, and the kernel itself in JAX's interpreter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.head import HeadStatistics, head_statistics
from pallas_kernels.layers import FETCHING
from tests.pallas_kernels.test_stream_matmul import HALF, OF, lower_for_h100, needs_mosaic


def wanted(x, w):
    """In float64."""
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    return HeadStatistics(logits.argmax(-1), top[:, 0], weights.sum(-1), (weights * (logits - top)).sum(-1))


def arrays(tokens, depth, words, dtype):
    rng = np.random.default_rng(tokens)
    x, w = rng.normal(size=(tokens, depth)), 3 * rng.normal(size=(words, depth)) / depth**0.5
    w[-1] = w[3]  # a tie: the first of two words
    x[0] = 5 * w[3]
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def check(got, x, w):
    want = wanted(x, w)
    assert int(got.token[0]) == 3
    np.testing.assert_array_equal(got.token, want.token)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_plain_form():
    x, w = arrays(5, 12, 31, jnp.float32)
    check(head_statistics(x, w), x, w)
    broken = head_statistics(x, w.at[7, 0].set(jnp.nan))
    assert np.all(np.isnan(broken.total))
    assert np.all((broken.token >= 0) & (broken.token < 31))


def test_mistakes():
    with pytest.raises(
        ValueError, match=r"head_statistics takes x \[T, E\] and w \[V, E\], not \[4, 64\] and \[64, 8\]"
    ):
        head_statistics(jnp.zeros((4, 64)), jnp.zeros((64, 8)))


REFUSALS = {
    "dtype": (OF((8, 64), jnp.float32), OF((128, 64), jnp.float32), "takes bfloat16 or float16"),
    "mixed": (OF((8, 64), HALF), OF((128, 64), jnp.float16), "arrays of one dtype"),
    "tokens": (OF((12, 64), HALF), OF((128, 64), HALF), "a multiple of 8 tokens up to 256, not 12"),
    "many": (OF((264, 64), HALF), OF((128, 64), HALF), "not 264"),
    "depth": (OF((8, 32), HALF), OF((128, 32), HALF), "tiles of 128 words and 64 numbers"),
    "words": (OF((8, 64), HALF), OF((120, 64), HALF), "tiles of 128 words"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_has_no_kernel(case):
    x, w, sentence = REFUSALS[case]
    why = dispatch.head_statistics_missing(x, w)
    assert why is not None
    assert sentence in why
    with pytest.raises(NotImplementedError):
        jax.eval_shape(functools.partial(head_statistics, implementation="mosaic_gpu"), x, w)


@needs_mosaic
@pytest.mark.parametrize("tokens", [32, 128, 256])
def test_lowers_for_an_h100(tokens):
    """With the chosen cut; there is no array of logits."""
    text = lower_for_h100(head_statistics, OF((tokens, 4096), HALF), OF((151936, 4096), HALF))
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 1
    kernel_form = text[text.index("custom_call @mosaic_gpu") :]
    rows = -(-tokens // 64) * 64  # whole tiles
    assert f"tensor<264x{rows}xf32>" in kernel_form or f"tensor<132x{rows}xf32>" in kernel_form
    # And beside a fetch from host memory.
    beside = functools.partial(head_statistics, spared=FETCHING)
    text = lower_for_h100(beside, OF((tokens, 4096), HALF), OF((151936, 4096), HALF))
    assert f"tensor<256x{rows}xf32>" in text or f"tensor<128x{rows}xf32>" in text


# One tile of tokens that they do not fill, two of 64 rows, two of 128; words that fill no program, and fewer than there
# are programs; more steps than stages.
@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "depth", "words", "config"),
    [(24, 128, 320, (2, 2, 1, 2)), (72, 128, 384, (2, 1, 2, 2)), (136, 64, 200, (3, 1, 1, 3))],
)
def test_kernel_in_the_interpreter(tokens, depth, words, config):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    from pallas_kernels import head, head_mosaic

    x, w = arrays(tokens, depth, words, HALF)
    with plgpu.force_gpu_interpret_mode():
        check(head._by_kernel(x, w, config=head_mosaic.HeadConfig(*config)), x, w)
        broken = head._by_kernel(x, w.at[130, 0].set(jnp.nan), config=head_mosaic.HeadConfig(*config))
    assert np.all(np.isnan(broken.total))
    assert np.all((broken.token >= 0) & (broken.token < words))


@needs_mosaic
def test_cuts_that_do_not_fit():
    from pallas_kernels import head_mosaic

    for config, depth in (((132, 2, 1, 1), 64), ((132, 3, 2, 5), 128), ((132, 1, 2, 2), 64)):
        with pytest.raises(ValueError, match=r"takes \d+ bytes of \d+ for 32 tokens"):
            jax.eval_shape(
                functools.partial(head_mosaic.statistics, config=head_mosaic.HeadConfig(*config)),
                OF((32, depth), HALF),
                OF((256, depth), HALF),
            )
